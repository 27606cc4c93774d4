#include "tessera/data/sources/source.h"

#include <ATen/ops/empty.h>

#include "tessera/base/internal/name.h"
#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"

namespace tessera {

Source::~Source() = default;

void detail::ListedSource::add(VariableInfo variable) {
  places_.emplace(variable.name, variables_.size());
  variables_.push_back(std::move(variable));
}

std::vector<std::string> detail::ListedSource::variables() const {
  return mapped(variables_, &VariableInfo::name);
}

std::size_t detail::ListedSource::place(const std::string& variable) const {
  if (const auto found = places_.find(variable); found != places_.end()) return found->second;
  throw VariableError(path_, " has no ", what_, " ", variable, "; it has ",
                      list(mapped(variables_, [](const auto& v) { return printable(v.name); })));
}

Hyperslab complete_slab(const Hyperslab& slab, const std::vector<std::int64_t>& shape,
                        const std::vector<std::string>& dims, const std::string& variable) {
  const std::size_t given = slab.start.size();
  if (slab.count.size() != given || (!slab.stride.empty() && slab.stride.size() != given))
    throw InvalidArgument("the hyperslab of ", variable, " has ", given, " starts, ",
                          slab.count.size(), " counts and ", slab.stride.size(),
                          " strides: give as many of each (strides may be left out)");
  if (given > shape.size())
    throw InvalidArgument("the hyperslab of ", variable, " has ", given,
                          " dimensions, the variable has ", shape.size(), ": ", list(dims));
  Hyperslab full;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    const std::int64_t start = d < given ? slab.start[d] : 0;
    const std::int64_t count = d < given ? slab.count[d] : shape[d];
    const std::int64_t stride = d < given && !slab.stride.empty() ? slab.stride[d] : 1;
    // By division, so that no sum or product can overflow.
    const bool inside =
        start >= 0 && count >= 0 && stride >= 1 && start <= shape[d] &&
        (count == 0 || (start < shape[d] && count - 1 <= (shape[d] - 1 - start) / stride));
    if (!inside)
      throw RangeError("dimension ", dims[d], " of ", variable, " has ", shape[d],
                       " indices, 0 to ", shape[d] - 1, "; asked for ", count, " from ", start,
                       " with stride ", stride);
    full.start.push_back(start);
    full.count.push_back(count);
    full.stride.push_back(stride);
  }
  return full;
}

at::Tensor Source::read(const std::string& variable, const Hyperslab& slab,
                        const ReadOptions& options) const {
  const VariableInfo& about = info(variable);
  const Hyperslab full =
      complete_slab(slab, about.shape, about.dims, concat(variable, " in ", name()));
  for (const std::int64_t n : full.count)
    if (n == 0) return at::empty(full.count, options.dtype);
  return read_box(about, full, options);
}

namespace {

const Attribute& attribute_of(const Source& source, const std::string& variable,
                              const std::string& attribute) {
  const auto& all = source.info(variable).attributes;
  const auto found = all.find(attribute);
  if (found == all.end()) {
    throw VariableError(variable, " in ", source.name(), " has no attribute ", attribute,
                        "; it has ",
                        list(mapped(all, [](const auto& one) { return printable(one.first); })));
  }
  return found->second;
}

}  // namespace

double Source::number(const std::string& variable, const std::string& attribute) const {
  const auto* numbers = std::get_if<std::vector<double>>(&attribute_of(*this, variable, attribute));
  if (!numbers || numbers->size() != 1)
    throw VariableError("attribute ", attribute, " of ", variable, " in ", name(), " is ",
                        numbers ? "a list of numbers" : "text", ", not one number");
  return numbers->front();
}

std::string Source::text(const std::string& variable, const std::string& attribute) const {
  const auto* text = std::get_if<std::string>(&attribute_of(*this, variable, attribute));
  if (!text)
    throw VariableError("attribute ", attribute, " of ", variable, " in ", name(),
                        " is a number, not text");
  return *text;
}

}  // namespace tessera

#include "tessera/data/sources/source_dataset.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <exception>

#include "tessera/base/text.h"

namespace tessera {

namespace {

/// An HDF5 variable's name begins with '/'.
std::vector<std::string> names_of(const std::vector<SourceField>& fields) {
  std::vector<std::string> names;
  bool given = false;
  for (const SourceField& field : fields) {
    given = given || !field.name.empty();
    const auto first = std::min(field.variable.find_first_not_of('/'), field.variable.size());
    names.push_back(field.name.empty() ? field.variable.substr(first) : field.name);
  }
  try {
    require_field_names(names);
  } catch (const InvalidArgument&) {
    if (given) throw;
    names.clear();
  }
  return names;
}

}  // namespace

SourceDataset::SourceDataset(std::shared_ptr<const Source> source, std::vector<SourceField> fields)
    : source_(std::move(source)), fields_(std::move(fields)) {
  if (!source_ || fields_.empty())
    throw InvalidArgument("a dataset of a source needs a source and at least one field");
  for (SourceField& field : fields_) {
    const VariableInfo& about = source_->info(field.variable);
    if (about.shape.empty())
      throw InvalidArgument(field.variable, " in ", source_->name(),
                            " has no dim along which samples could lie");
    field.slab = complete_slab(field.slab, about.shape, about.dims,
                               concat(field.variable, " in ", source_->name()));
    const auto samples = static_cast<std::uint64_t>(field.slab.count[0]);
    if (&field == &fields_.front()) size_ = samples;
    if (samples != size_)
      throw InvalidArgument(field.variable, " gives ", samples, " samples, ",
                            fields_.front().variable, " ", size_, "; all fields give as many");
  }
  names_ = names_of(fields_);
}

Sample SourceDataset::get(std::uint64_t index) const {
  const std::uint64_t one[] = {index};
  Sample sample = get_batch(one);
  for (at::Tensor& t : sample) t = t.squeeze(0);
  return sample;
}

std::vector<at::Tensor> SourceDataset::get_batch(std::span<const std::uint64_t> indices) const {
  for (const std::uint64_t index : indices)
    if (index >= size_)
      throw SampleError(
          concat("sample ", index, " of a dataset with ", size_, " (", source_->name(), ")"),
          index);
  std::vector<at::Tensor> batch;
  for (const SourceField& field : fields_) {
    auto shape = field.slab.count;
    shape[0] = static_cast<std::int64_t>(indices.size());
    batch.push_back(at::empty(shape, field.read.dtype));
    for (std::size_t i = 0; i < indices.size();) {
      std::size_t run = 1;
      while (i + run < indices.size() && indices[i + run] == indices[i] + run) ++run;
      Hyperslab slab = field.slab;
      slab.start[0] += static_cast<std::int64_t>(indices[i]) * slab.stride[0];
      slab.count[0] = static_cast<std::int64_t>(run);
      try {
        batch.back()
            .narrow(0, static_cast<std::int64_t>(i), slab.count[0])
            .copy_(source_->read(field.variable, slab, field.read));
      } catch (const std::exception& e) {
        std::throw_with_nested(SampleError(
            concat("samples ", indices[i], " to ", indices[i] + run - 1, ": ", e.what()),
            indices[i]));
      }
      i += run;
    }
  }
  return batch;
}

}  // namespace tessera

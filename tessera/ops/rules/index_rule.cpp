#include "tessera/ops/rules/index_rule.h"

#include <ATen/core/function_schema.h>

#include <map>
#include <sstream>

#include "tessera/ops/rules/detail/rules.h"

namespace tessera {
namespace {

constexpr int kEllipsis = -2;
// Labels of the dims that an ellipsis stands for: kOfEllipsis, kOfEllipsis + 1, ...
constexpr int kOfEllipsis = 1000;

struct NamedDim {
  int label;
  bool unsharded, stretched;
};
using NamedDims = std::vector<NamedDim>;

struct Notation {
  std::string text;
  std::vector<NamedDims> inputs, outputs;
  std::map<std::string, int> labels;
  std::set<int> reduced;

  explicit Notation(const std::string& given) : text(given) {
    const auto arrow = text.find("->");
    if (arrow == std::string::npos || text.find("->", arrow + 2) != std::string::npos)
      fail("it needs one '->' between inputs and outputs");
    inputs = tensors(text.substr(0, arrow));
    outputs = tensors(text.substr(arrow + 2));
    for (const NamedDims& in : inputs) {
      for (const NamedDim& dim : in) {
        if (dim.unsharded || dim.label == kEllipsis) continue;
        const bool everywhere = std::ranges::all_of(outputs, [&](const NamedDims& out) {
          return std::ranges::any_of(out, [&](const NamedDim& d) { return d.label == dim.label; });
        });
        if (!everywhere) reduced.insert(dim.label);
      }
    }
  }

  [[noreturn]] void fail(const std::string& why) const {
    throw RuleError("the index notation '", text, "' cannot be read: ", why,
                    ". An example: \"m k, k n -> m n\"");
  }

 private:
  std::vector<NamedDims> tensors(const std::string& side) {
    std::vector<NamedDims> all;
    std::size_t begin = 0;
    for (;;) {
      const auto comma = side.find(',', begin);
      all.push_back(dims(side.substr(begin, comma - begin)));
      if (comma == std::string::npos) return all;
      begin = comma + 1;
    }
  }
  NamedDims dims(const std::string& tensor) {
    NamedDims all;
    std::istringstream words(tensor);
    for (std::string word; words >> word;) {
      if (word == "...") {
        for (const NamedDim& d : all)
          if (d.label == kEllipsis) fail("a tensor has '...' twice");
        all.push_back({kEllipsis, false, false});
        continue;
      }
      const bool unsharded = word.back() == '!', stretched = word.back() == '?';
      if (unsharded || stretched) word.pop_back();
      if (word.empty() || !std::ranges::all_of(word, [](unsigned char c) {
            return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                   c == '_';
          }))
        fail(concat("'", word, "' is not a name"));
      const int label = labels.emplace(word, static_cast<int>(labels.size())).first->second;
      for (const NamedDim& d : all)
        if (d.label == label) fail(concat("a tensor has the dim '", word, "' twice"));
      all.push_back({label, unsharded, stretched});
    }
    return all;
  }
};

// The labels of one tensor's dims, with its broadcast and ellipsis dims resolved.
NamedDims expanded(const NamedDims& dims, std::size_t of_ellipsis) {
  NamedDims all;
  for (const NamedDim& d : dims) {
    if (d.label != kEllipsis) {
      all.push_back(d);
      continue;
    }
    for (std::size_t i = 0; i < of_ellipsis; ++i)
      all.push_back({kOfEllipsis + static_cast<int>(i), false, false});
  }
  return all;
}

bool has_ellipsis(const NamedDims& dims) {
  return std::ranges::any_of(dims, [](const NamedDim& d) { return d.label == kEllipsis; });
}

std::string argument_of(const OpCall& call, const TensorInfo& t) {
  return call.schema().arguments()[t.argument].name();
}

// The position in the notation of each tensor given: tensor arguments of the schema count.
std::vector<std::size_t> places(const OpCall& call, const Notation& n) {
  std::map<int, std::size_t> place_of;
  const auto& arguments = call.schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    auto type = arguments[i].type();
    for (;;)
      if (const auto optional = type->cast<c10::OptionalType>())
        type = optional->getElementType();
      else if (const auto list = type->cast<c10::ListType>())
        type = list->getElementType();
      else
        break;
    const bool written_result = arguments[i].is_out();
    if (type->kind() == c10::TypeKind::TensorType && !written_result)
      place_of.emplace(static_cast<int>(i), place_of.size());
  }
  if (place_of.size() != n.inputs.size())
    throw RuleError("the index notation '", n.text, "' has ", n.inputs.size(), " inputs, but ",
                    call.name(), " takes ", place_of.size(), " tensors");
  std::vector<std::size_t> all;
  for (const TensorInfo& t : call.tensors()) {
    const auto it = place_of.find(t.argument);
    if (it == place_of.end())
      throw ShardingError(call.name(), " with out= has no rule: use the form that returns");
    all.push_back(it->second);
  }
  return all;
}

// How many dims the ellipsis stands for, in all inputs alike; 0 where there is none.
std::size_t dims_of_ellipsis(const OpCall& call, const Notation& n,
                             const std::vector<std::size_t>& place) {
  const auto& tensors = call.tensors();
  std::optional<std::size_t> of_ellipsis;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const NamedDims& dims = n.inputs[place[i]];
    if (!has_ellipsis(dims)) continue;
    const auto given = static_cast<std::size_t>(tensors[i].spec.dims());
    if (given + 1 < dims.size() || (of_ellipsis && *of_ellipsis != given + 1 - dims.size()))
      throw InvalidArgument(call.name(), ": ", argument_of(call, tensors[i]), " has ", given,
                            " dims, which does not agree with '", n.text, "'");
    of_ellipsis = given + 1 - dims.size();
  }
  return of_ellipsis.value_or(0);
}

void apply(const IndexRuleOptions& options, const std::vector<std::size_t>& place,
           const Notation& n, detail::LabelProblem& p) {
  p.contract = n.reduced;
  p.reduce = options.reduce;
  for (std::size_t i = 0; i < place.size(); ++i)
    if (options.added.contains(static_cast<int>(place[i])))
      p.additive.insert(static_cast<int>(i));
    else if (options.linear)
      p.linear_in.insert(static_cast<int>(i));
}

Plan planned(const OpCall& call, const Notation& n, const IndexRuleOptions& options) {
  const std::vector<std::size_t> place = places(call, n);
  const auto& tensors = call.tensors();
  const std::size_t of_ellipsis = dims_of_ellipsis(call, n, place);
  detail::LabelProblem p(call);
  std::map<int, std::int64_t> extent;
  std::vector<NamedDims> inputs;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    NamedDims dims = expanded(n.inputs[place[i]], of_ellipsis);
    const auto& shape = tensors[i].spec.shape();
    while (dims.size() > shape.size() && dims.front().stretched) dims.erase(dims.begin());
    if (dims.size() != shape.size())
      throw InvalidArgument(call.name(), ": ", argument_of(call, tensors[i]), " of shape ",
                            list(shape), " has ", shape.size(), " dims, and needs ", dims.size(),
                            " ('", n.text, "')");
    for (std::size_t d = 0; d < dims.size(); ++d)
      if (!dims[d].stretched) extent.emplace(dims[d].label, shape[d]);
    inputs.push_back(std::move(dims));
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& shape = tensors[i].spec.shape();
    detail::Labels labels;
    for (std::size_t d = 0; d < shape.size(); ++d) {
      const NamedDim& dim = inputs[i][d];
      const std::int64_t size = extent.emplace(dim.label, shape[d]).first->second;
      const bool stretched = dim.stretched && shape[d] == 1 && size != 1;
      if (size != shape[d] && !stretched)
        throw InvalidArgument(call.name(), ": dim ", d, " of ", argument_of(call, tensors[i]),
                              " has size ", shape[d], ", and the same dim of another argument has ",
                              size, " ('", n.text, "')");
      labels.push_back(dim.unsharded || stretched ? detail::kUnsharded : dim.label);
    }
    p.inputs.push_back(std::move(labels));
  }
  const bool inferred = call.outputs() && !call.outputs()->empty();
  for (const NamedDims& out : n.outputs) {
    detail::Labels labels;
    std::vector<std::int64_t> shape;
    for (const NamedDim& dim : expanded(out, of_ellipsis)) {
      labels.push_back(dim.unsharded ? detail::kUnsharded : dim.label);
      const auto known = extent.find(dim.label);
      if (known == extent.end() && !inferred)
        throw ShardingError("the rule of ", call.name(), " ('", n.text,
                            "') does not know the size of a dim of its result: register a "
                            "kernel for the Meta key");
      shape.push_back(known == extent.end() ? 0 : known->second);
    }
    p.outputs.push_back(std::move(labels));
    if (!inferred) p.output_shapes.push_back(std::move(shape));
  }
  apply(options, place, n, p);
  return detail::solve(p);
}

}  // namespace

Rule index_rule(const std::string& notation, IndexRuleOptions options) {
  return [n = Notation(notation), options = std::move(options)](const OpCall& call) {
    return planned(call, n, options);
  };
}

}  // namespace tessera

#include "tessera/pipeline/detail/tensor_list.h"

#include <ATen/ATen.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::detail {
namespace {

// Of one list; more is no list that a stage makes.
constexpr std::int64_t kMostTensors = 1 << 16, kMostDims = 64, kMostNumbers = 1 << 24;

at::Tensor flat(const at::Tensor& dense) {
  return dense.as_strided({dense.numel()}, {1}, dense.storage_offset());
}

}  // namespace

TensorSpec spec_of(const at::Tensor& tensor, bool wants) {
  if (!tensor.defined()) throw InvalidArgument("a tensor that a stage passes on is undefined");
  if (tensor.layout() != at::kStrided || !tensor.has_storage())
    throw InvalidArgument("a tensor that a stage passes on (", tensor.sizes(),
                          ") has no dense memory of its own; pass on a dense one");
  TensorSpec spec{tensor.scalar_type(), tensor.sizes().vec(), tensor.strides().vec(), wants};
  if (tensor.numel() == 0 || !tensor.is_non_overlapping_and_dense())
    spec.strides = at::IntArrayRef(c10::contiguous_strides(spec.sizes)).vec();
  return spec;
}

ListSpec spec_of(const std::vector<CarriedTensor>& list, const DeviceMesh& mesh,
                 const std::string& axis) {
  ListSpec spec;
  for (const CarriedTensor& one : list) {
    spec.push_back(spec_of(one.value, one.wants));
    if (one.shards) spec.back().shards = layout_of(one.shards, mesh, axis);
  }
  return spec;
}

ShardLayout layout_of(const ShardSpec& spec, const DeviceMesh& mesh, const std::string& axis) {
  const Mesh& own = spec.mesh().mesh();
  const Mesh& all = mesh.mesh();
  const std::vector<std::string> names = own.names();
  const bool known = std::ranges::all_of(
      names, [&](const std::string& name) { return name != axis && all.has_axis(name); });
  if (!known || !(own == all.submesh(names, mesh.manager().rank())))
    throw InvalidArgument(
        "a stage passes on a sharded tensor (", spec, ") that lies on the mesh ", own,
        "; the next stage can hold its shards only if that mesh is the pipeline's (", all,
        ") through this rank without its axis '", axis,
        "': make sharded tensors on stage_mesh(mesh, \"", axis,
        "\"), or pass on the local one (to_local)");
  return {all.indices(names), spec.placements(), spec.shape(), spec.sizes()};
}

ShardSpec spec_of(const ShardLayout& layout, const DeviceMesh& mesh) {
  std::vector<std::string> names;
  for (const int a : layout.axes) names.push_back(mesh.mesh().axes().at(a).name);
  const DistributedManager& manager = mesh.manager();
  return {manager.mesh(mesh.mesh().submesh(names, manager.rank())), layout.shape, layout.placements,
          layout.sizes};
}

std::string to_string(const ListSpec& list) {
  std::string text;
  for (const TensorSpec& spec : list) {
    text += concat(text.empty() ? "" : ", ", spec.dtype, " ", tessera::list(spec.sizes));
    if (!spec.shards) continue;
    text += concat(" of ", tessera::list(spec.shards->shape), " as ",
                   joined(spec.shards->placements, " x "));
    for (const auto& [dim, sizes] : spec.shards->sizes)
      text += concat(", dim ", dim, " ", tessera::list(sizes));
  }
  return text.empty() ? "nothing" : text;
}

std::vector<std::int64_t> encode(const ListSpec& list) {
  std::vector<std::int64_t> numbers{static_cast<std::int64_t>(list.size())};
  for (const TensorSpec& spec : list) {
    numbers.push_back(static_cast<std::int64_t>(spec.dtype));
    numbers.push_back(spec.wants ? 1 : 0);
    numbers.push_back(static_cast<std::int64_t>(spec.sizes.size()));
    numbers.insert(numbers.end(), spec.sizes.begin(), spec.sizes.end());
    numbers.insert(numbers.end(), spec.strides.begin(), spec.strides.end());
    numbers.push_back(spec.shards ? 1 : 0);
    if (!spec.shards) continue;
    const auto add = [&](const auto& values) {
      numbers.push_back(static_cast<std::int64_t>(values.size()));
      for (const auto value : values) numbers.push_back(static_cast<std::int64_t>(value));
    };
    add(spec.shards->axes);
    for (const Placement& p : spec.shards->placements) {
      numbers.push_back(static_cast<std::int64_t>(p.kind));
      numbers.push_back(p.is_shard() ? p.dim : static_cast<std::int64_t>(p.op));
    }
    add(spec.shards->shape);
    numbers.push_back(static_cast<std::int64_t>(spec.shards->sizes.size()));
    for (const auto& [dim, sizes] : spec.shards->sizes) {
      numbers.push_back(dim);
      add(sizes);
    }
  }
  return numbers;
}

ListSpec decode(const std::vector<std::int64_t>& numbers) {
  std::size_t at = 0;
  const auto next = [&](std::int64_t most) {
    if (at >= numbers.size() || numbers[at] < 0 || numbers[at] > most)
      throw InvalidArgument("the other rank's description of what it sends cannot be read");
    return numbers[at++];
  };
  ListSpec list(static_cast<std::size_t>(next(kMostTensors)));
  for (TensorSpec& spec : list) {
    spec.dtype = static_cast<c10::ScalarType>(
        next(static_cast<std::int64_t>(c10::ScalarType::NumOptions) - 1));
    spec.wants = next(1) != 0;
    spec.sizes.resize(next(kMostDims));
    spec.strides.resize(spec.sizes.size());
    constexpr std::int64_t any = std::numeric_limits<std::int64_t>::max();
    for (auto* values : {&spec.sizes, &spec.strides}) {
      for (std::int64_t& value : *values) value = next(any);
    }
    if (next(1) == 0) continue;
    ShardLayout& shards = spec.shards.emplace();
    shards.axes.resize(next(kMostDims));
    for (int& axis : shards.axes) axis = static_cast<int>(next(kMostDims));
    for (std::size_t i = 0; i < shards.axes.size(); ++i) {
      const auto kind = static_cast<Placement::Kind>(next(2));
      const std::int64_t value = next(kMostDims);
      if (kind == Placement::Kind::shard)
        shards.placements.push_back(Shard(static_cast<int>(value)));
      else if (kind == Placement::Kind::partial)
        shards.placements.push_back(Partial(static_cast<ReduceOp::Kind>(value)));
      else
        shards.placements.push_back(Replicate());
    }
    shards.shape.resize(next(kMostDims));
    for (std::int64_t& size : shards.shape) size = next(any);
    for (std::int64_t left = next(kMostDims); left > 0; --left) {
      Sizes& sizes = shards.sizes[static_cast<int>(next(kMostDims))];
      sizes.resize(next(kMostNumbers));
      for (std::int64_t& size : sizes) size = next(any);
    }
  }
  if (at != numbers.size())
    throw InvalidArgument("the other rank's description of what it sends is too long");
  return list;
}

at::Tensor to_wire(const at::Tensor& tensor, const TensorSpec& spec) {
  // Lazy conjugation and negation are done: what travels is memory.
  const at::Tensor value = tensor.detach().resolve_conj().resolve_neg();
  if (value.strides() == at::IntArrayRef(spec.strides) && value.numel() > 0) return flat(value);
  at::Tensor wire;
  const at::Tensor copy = empty_for(spec, value.device(), wire);
  copy.copy_(value);
  return wire;
}

at::Tensor empty_for(const TensorSpec& spec, c10::Device device, at::Tensor& wire) {
  at::Tensor tensor =
      at::empty_strided(spec.sizes, spec.strides, at::TensorOptions(spec.dtype).device(device));
  wire = flat(tensor);
  return tensor;
}

}  // namespace tessera::detail

#include "tessera/data/shard_batch.h"

#include <ATen/ops/ones.h>

#include <algorithm>
#include <utility>

#include "tessera/base/internal/split.h"
#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/partition/partition.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera {

namespace {

/// The axes of a mesh by what they do with a batch, all in mesh order.
struct BatchAxes {
  std::vector<int> batch, others;
  std::vector<std::string> other_names;
  int coordinates = 1;
};

BatchAxes batch_axes_of(const Mesh& mesh, const std::vector<std::string>& names) {
  BatchAxes axes;
  for (const std::string& name : names) {
    const int axis = mesh.index(name);
    if (!axes.batch.empty() && axis <= axes.batch.back())
      throw InvalidArgument(concat("batch axes ", list(names),
                                   " are not in the order of the mesh, outermost first: ", mesh));
    axes.batch.push_back(axis);
    axes.coordinates *= mesh.size(axis);
  }
  axes.others = mesh.complement(axes.batch);
  for (const int axis : axes.others) axes.other_names.push_back(mesh.axes()[axis].name);
  return axes;
}

/// This rank's row of the batch's shards.
int my_coordinate(const DeviceMesh& mesh, const BatchAxes& axes) {
  const std::vector<int> at = mesh.coordinate();
  int coordinate = 0;
  for (const int axis : axes.batch) coordinate = coordinate * mesh.mesh().size(axis) + at[axis];
  return coordinate;
}

const FieldSharding& field_of(const std::vector<FieldSharding>& fields, std::size_t i) {
  static const FieldSharding replicated;
  return fields.empty() ? replicated : fields[fields.size() == 1 ? 0 : i];
}

/// Entries that name fields as a list by place. Throws InvalidArgument.
std::vector<FieldSharding> by_place(const std::vector<FieldSharding>& fields,
                                    const std::vector<std::string>& names) {
  const auto named = [](const FieldSharding& field) { return !field.field.empty(); };
  if (std::none_of(fields.begin(), fields.end(), named)) return fields;
  std::vector<FieldSharding> placed(names.size());
  for (const FieldSharding& field : fields) {
    if (field.field.empty())
      throw InvalidArgument(
          "some field shardings name their field and others do not: name it in all, or in none");
    bool found = false;
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (!detail::names_field(field.field, names[i])) continue;
      if (named(placed[i]))
        throw InvalidArgument(concat("the field '", names[i], "' has two shardings: '",
                                     placed[i].field, "' and '", field.field, "'"));
      placed[i] = field;
      found = true;
    }
    if (!found)
      throw InvalidArgument(concat("a sharding of '", field.field, "', and the fields are ",
                                   list(names), names.empty() ? ": the batch has no names" : ""));
  }
  return placed;
}

/// Before anything is sent, from what all ranks share.
void require_fields(const std::vector<FieldSharding>& fields, std::size_t tensors, const Mesh& mesh,
                    const BatchAxes& axes) {
  if (fields.size() > 1 && fields.size() != tensors)
    throw InvalidArgument(concat("a batch of ", tensors, " tensors and ", fields.size(),
                                 " field shardings: give one for each, one for all, or none"));
  for (const FieldSharding& field : fields) {
    for (const auto& [axis, dim] : field.dims) {
      if (std::find(axes.batch.begin(), axes.batch.end(), mesh.index(axis)) != axes.batch.end())
        throw InvalidArgument(concat("axis '", axis, "' shards the batch, and cannot shard dim ",
                                     dim, " of a field too"));
      if (dim < 1)
        throw InvalidArgument(
            concat("axis '", axis, "' is to shard dim ", dim, " of a field; dim 0 is the batch"));
    }
  }
}

/// Complete tensors that are taken for shards would lie one over the other.
void require_whole(const std::vector<FieldSharding>& fields) {
  for (const FieldSharding& field : fields) {
    if (field.dims.empty() || field.whole) continue;
    const auto& [axis, dim] = *field.dims.begin();
    throw InvalidArgument(concat(
        "shard_batch: axis '", axis, "' shards dim ", dim,
        field.field.empty() ? std::string(" of a field")
                            : concat(" of the field '", field.field, "'"),
        ", and it is not said what each rank has read: give whole = true where it has read the "
        "complete tensor, of which it keeps its shard, or whole = false where it has read its own "
        "shard alone"));
  }
}

/// One placement for each of `over`, axes of the mesh.
std::vector<Placement> field_placements(const FieldSharding& field, const Mesh& mesh,
                                        const std::vector<int>& over, int dims) {
  std::vector<Placement> placements;
  for (const int axis : over) {
    const auto found = field.dims.find(mesh.axes()[axis].name);
    if (found != field.dims.end() && found->second >= dims)
      throw InvalidArgument(concat("axis '", found->first, "' is to shard dim ", found->second,
                                   " of a tensor with ", dims, " dims"));
    placements.push_back(found == field.dims.end() ? Replicate() : Shard(found->second));
  }
  return placements;
}

std::vector<Placement> batch_placements(const FieldSharding& field, const Mesh& mesh,
                                        const BatchAxes& axes, int dims) {
  std::vector<int> all(mesh.dims());
  for (int axis = 0; axis < mesh.dims(); ++axis) all[axis] = axis;
  std::vector<Placement> placements = field_placements(field, mesh, all, dims);
  for (const int axis : axes.batch) placements[axis] = Shard(0);
  return placements;
}

/// The shards' sizes of dims that all ranks have read whole.
ShardSizes sizes_of_whole(const at::Tensor& tensor, const FieldSharding& field, const Mesh& mesh,
                          const BatchAxes& axes) {
  ShardSizes sizes = field.sizes;
  std::map<int, int> shards;
  for (const int axis : axes.others) {
    const auto found = field.dims.find(mesh.axes()[axis].name);
    if (found == field.dims.end()) continue;
    auto& count = shards.try_emplace(found->second, 1).first->second;
    count *= mesh.size(axis);
  }
  for (const auto& [dim, count] : shards)
    sizes.try_emplace(dim, Partition::even(tensor.size(dim), count).sizes());
  return sizes;
}

/// The rows of the global batch, sharded over the batch axes.
ShardSizes with_rows(ShardSizes sizes, std::int64_t rows, const BatchAxes& axes) {
  if (!axes.batch.empty()) sizes[0] = Partition::even(rows, axes.coordinates).sizes();
  return sizes;
}

at::Tensor whole_mask(const LoadedBatch& batch) {
  if (batch.mask.defined()) return batch.mask;
  // Where the other ranks' masks are.
  const auto device = batch.tensors.empty() ? at::Device(at::kCPU) : batch.tensors[0].device();
  return at::ones({batch.rows}, at::TensorOptions().dtype(at::kBool).device(device));
}

void require_mine(const LoadedBatch& batch, int coordinate, const BatchAxes& axes) {
  const Partition rows = Partition::even(batch.global_rows, axes.coordinates);
  if (batch.slices.size() != 1 || batch.slices[0].coordinate != coordinate ||
      !(batch.slices[0].samples == rows.interval(coordinate)))
    throw InvalidArgument(concat(
        "this rank is number ", coordinate, " of ", axes.coordinates,
        " along the batch axes, and the batch was loaded as ", batch.slices.size(),
        " slices of other axes or devices: give the axes of the loader's mapping, and one device "
        "a process"));
}

/// What the ranks that do not read must know: step, epoch, rows, real, and how many tensors; then
/// the names, which hold no line ends, a line each.
std::string header_of(const LoadedBatch& batch) {
  std::string header = concat(batch.step, " ", batch.epoch, " ", batch.global_rows, " ",
                              batch.global_real, " ", batch.tensors.size());
  for (const std::string& name : batch.names) header += concat("\n", name);
  return header;
}

std::vector<std::uint64_t> header_numbers(const std::string& line) {
  std::vector<std::uint64_t> numbers;
  for (const std::string& number : split(line, ' ')) numbers.push_back(std::stoull(number));
  return numbers;
}

/// A batch that the user has put together may have any.
void require_names(const LoadedBatch& batch) {
  require_field_names(batch.names);
  if (!batch.names.empty() && batch.names.size() != batch.tensors.size())
    throw InvalidArgument(concat("a batch of ", batch.tensors.size(), " tensors and ",
                                 batch.names.size(), " names: ", list(batch.names)));
}

}  // namespace

ShardedBatch shard_batch(const LoadedBatch& batch, const DeviceMesh& mesh,
                         const std::vector<std::string>& batch_axes,
                         const std::vector<FieldSharding>& field_shardings) {
  const Mesh& layout = mesh.mesh();
  const BatchAxes axes = batch_axes_of(layout, batch_axes);
  require_names(batch);
  const auto fields = by_place(field_shardings, batch.names);
  require_fields(fields, batch.tensors.size(), layout, axes);
  require_whole(fields);
  require_mine(batch, my_coordinate(mesh, axes), axes);
  ShardedBatch sharded{.step = batch.step,
                       .epoch = batch.epoch,
                       .rows = batch.global_rows,
                       .real = batch.global_real,
                       .names = batch.names};
  for (std::size_t i = 0; i < batch.tensors.size(); ++i) {
    const FieldSharding& field = field_of(fields, i);
    at::Tensor local = batch.tensors[i];
    const auto placements = batch_placements(field, layout, axes, static_cast<int>(local.dim()));
    ShardSizes sizes = field.sizes;
    if (field.whole.value_or(false)) {
      sizes = sizes_of_whole(local, field, layout, axes);
      auto shape = local.sizes().vec();
      shape[0] = batch.global_rows;
      const ShardSpec spec(mesh, shape, placements, with_rows(sizes, batch.global_rows, axes));
      for (int dim = 1; dim < static_cast<int>(shape.size()); ++dim)
        local = local.narrow(dim, spec.local_offset()[dim], spec.local_shape()[dim]);
    }
    sharded.tensors.push_back(
        from_local(local, mesh, placements, with_rows(sizes, batch.global_rows, axes)));
  }
  if (batch.global_real < batch.global_rows)
    sharded.mask = from_local(whole_mask(batch), mesh, batch_placements({}, layout, axes, 1),
                              with_rows({}, batch.global_rows, axes));
  return sharded;
}

bool reads_for_others(const DeviceMesh& mesh, const std::vector<std::string>& batch_axes) {
  const BatchAxes axes = batch_axes_of(mesh.mesh(), batch_axes);
  const std::vector<int> at = mesh.coordinate();
  return std::all_of(axes.others.begin(), axes.others.end(), [&](int axis) { return !at[axis]; });
}

ShardedBatch scatter_batch(const std::optional<LoadedBatch>& batch, const DeviceMesh& mesh,
                           const std::vector<std::string>& batch_axes,
                           const std::vector<FieldSharding>& field_shardings) {
  const Mesh& layout = mesh.mesh();
  const BatchAxes axes = batch_axes_of(layout, batch_axes);
  if (axes.others.empty() && batch) return shard_batch(*batch, mesh, batch_axes, field_shardings);
  const DeviceMesh sharing =
      mesh.manager().mesh(layout.submesh(axes.other_names, mesh.manager().rank()));
  const Group group = sharing.all();
  const bool reader = group.rank() == 0;
  const std::string said = agree::first<std::string>(group, "scatter_batch", [&] {
    if (!batch)
      throw InvalidArgument("this rank reads for others (reads_for_others()), and gave no batch");
    require_names(*batch);
    require_fields(by_place(field_shardings, batch->names), batch->tensors.size(), layout, axes);
    require_mine(*batch, my_coordinate(mesh, axes), axes);
    for (const at::Tensor& t : batch->tensors) {
      if (!t.defined() || t.layout() != at::kStrided || t.is_quantized() || t.is_nested())
        throw InvalidArgument("a tensor of the batch is undefined or not dense");
    }
    return header_of(*batch);
  });
  std::vector<std::string> names = split(said, '\n');
  const auto numbers = header_numbers(names.front());
  names.erase(names.begin());
  const auto fields = by_place(field_shardings, names);
  ShardedBatch sharded{.step = numbers[0],
                       .epoch = numbers[1],
                       .rows = static_cast<std::int64_t>(numbers[2]),
                       .real = static_cast<std::int64_t>(numbers[3]),
                       .names = std::move(names)};
  // The other coordinates' ranks have their own: the shapes are known, and nothing else is sent.
  const auto place = [&](const at::Tensor& full, const FieldSharding& field, int dims) {
    const at::Tensor shared =
        scatter(full, sharing, field_placements(field, layout, axes.others, dims), field.sizes);
    auto shape = shared.sizes().vec();
    shape[0] = sharded.rows;
    return from_local(to_local(shared),
                      ShardSpec(mesh, shape, batch_placements(field, layout, axes, dims),
                                with_rows(spec(shared).sizes(), sharded.rows, axes)));
  };
  for (std::uint64_t i = 0; i < numbers[4]; ++i) {
    const FieldSharding& field = field_of(fields, i);
    int most = 1;
    for (const auto& [axis, dim] : field.dims) most = std::max(most, dim + 1);
    const at::Tensor full = reader ? batch->tensors[i] : at::Tensor();
    sharded.tensors.push_back(place(full, field, most));
  }
  if (sharded.real < sharded.rows)
    sharded.mask = place(reader ? whole_mask(*batch) : at::Tensor(), {}, 1);
  return sharded;
}

}  // namespace tessera

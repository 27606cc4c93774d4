#include "tessera/data/shard_batch.h"

#include <ATen/ops/ones.h>

#include <algorithm>
#include <functional>
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
      throw InvalidArgument("batch axes ", list(names),
                            " are not in the order of the mesh, outermost first: ", mesh);
    axes.batch.push_back(axis);
    axes.coordinates *= mesh.size(axis);
  }
  axes.others = mesh.complement(axes.batch);
  for (const int axis : axes.others) axes.other_names.push_back(mesh.axes()[axis].name);
  return axes;
}

/// The row of the batch's shards at a coordinate of the mesh.
int batch_coordinate(const std::vector<int>& at, const Mesh& mesh, const BatchAxes& axes) {
  int coordinate = 0;
  for (const int axis : axes.batch) coordinate = coordinate * mesh.size(axis) + at[axis];
  return coordinate;
}

/// The rows of the global batch: of each batch coordinate, and together.
struct GlobalRows {
  Sizes sizes;
  std::int64_t all = 0, real = 0;
  bool masked = false;
};

/// What one rank says of the rows that it gives.
struct SaidRows {
  std::int64_t rows, real, tensors, masked;
  bool operator==(const SaidRows&) const = default;
};

/// `said`: by position in the mesh. Throws InvalidArgument, from what all ranks know.
GlobalRows counted(const std::vector<SaidRows>& said, const Mesh& mesh, const BatchAxes& axes) {
  GlobalRows rows;
  std::vector<int> first(static_cast<std::size_t>(axes.coordinates), -1);
  rows.sizes.resize(first.size());
  for (int i = 0; i < mesh.size(); ++i) {
    const SaidRows& mine = said[static_cast<std::size_t>(i)];
    const int rank = mesh.ranks()[i], at = batch_coordinate(mesh.coordinate(rank), mesh, axes);
    if (mine.tensors != said[0].tensors)
      throw InvalidArgument("rank ", rank, " gives ", mine.tensors, " tensors of a batch, rank ",
                            mesh.ranks()[0], " gives ", said[0].tensors);
    if (const int known = first[at]; known >= 0) {
      const SaidRows& other = said[static_cast<std::size_t>(known)];
      if (mine == other) continue;
      throw InvalidArgument("rank ", rank, " gives ", mine.real, " of ", mine.rows,
                            " rows that count, and rank ", mesh.ranks()[known],
                            ", which has the same samples, ", other.real, " of ", other.rows);
    }
    first[at] = i;
    rows.sizes[at] = mine.rows;
    rows.all += mine.rows;
    rows.real += mine.real;
    rows.masked = rows.masked || mine.masked != 0;
  }
  return rows;
}

const FieldSharding& field_of(const std::vector<FieldSharding>& fields, std::size_t i) {
  static const FieldSharding replicated;
  return fields.empty() ? replicated : fields[fields.size() == 1 ? 0 : i];
}

/// Entries that name fields as a list by place. Throws InvalidArgument.
std::vector<FieldSharding> by_place(const std::vector<FieldSharding>& fields,
                                    const std::vector<std::string>& names) {
  const auto named = [](const FieldSharding& field) { return !field.field.empty(); };
  if (std::ranges::none_of(fields, named)) return fields;
  std::vector<FieldSharding> placed(names.size());
  for (const FieldSharding& field : fields) {
    if (field.field.empty())
      throw InvalidArgument(
          "some field shardings name their field and others do not: name it in all, or in none");
    bool found = false;
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (!detail::names_field(field.field, names[i])) continue;
      if (named(placed[i]))
        throw InvalidArgument("the field '", names[i], "' has two shardings: '", placed[i].field,
                              "' and '", field.field, "'");
      placed[i] = field;
      found = true;
    }
    if (!found)
      throw InvalidArgument("a sharding of '", field.field, "', and the fields are ", list(names),
                            names.empty() ? ": the batch has no names" : "");
  }
  return placed;
}

/// Before anything is sent, from what all ranks share.
void require_fields(const std::vector<FieldSharding>& fields, std::size_t tensors, const Mesh& mesh,
                    const BatchAxes& axes) {
  if (fields.size() > 1 && fields.size() != tensors)
    throw InvalidArgument("a batch of ", tensors, " tensors and ", fields.size(),
                          " field shardings: give one for each, one for all, or none");
  for (const FieldSharding& field : fields) {
    for (const auto& [axis, dim] : field.dims) {
      if (std::ranges::find(axes.batch, mesh.index(axis)) != axes.batch.end())
        throw InvalidArgument("axis '", axis, "' shards the batch, and cannot shard dim ", dim,
                              " of a field too");
      if (dim < 1)
        throw InvalidArgument("axis '", axis, "' is to shard dim ", dim,
                              " of a field; dim 0 is the batch");
    }
  }
}

/// Complete tensors that are taken for shards would lie one over the other.
void require_whole(const std::vector<FieldSharding>& fields) {
  for (const FieldSharding& field : fields) {
    if (field.dims.empty() || field.whole) continue;
    const auto& [axis, dim] = *field.dims.begin();
    throw InvalidArgument(
        "shard_batch: axis '", axis, "' shards dim ", dim,
        field.field.empty() ? std::string(" of a field")
                            : concat(" of the field '", field.field, "'"),
        ", and it is not said what each rank has read: give whole = true where it has read the "
        "complete tensor, of which it keeps its shard, or whole = false where it has read its own "
        "shard alone");
  }
}

/// One placement for each of `over`, axes of the mesh.
std::vector<Placement> field_placements(const FieldSharding& field, const Mesh& mesh,
                                        const std::vector<int>& over, int dims) {
  std::vector<Placement> placements;
  for (const int axis : over) {
    const auto found = field.dims.find(mesh.axes()[axis].name);
    if (found != field.dims.end() && found->second >= dims)
      throw InvalidArgument("axis '", found->first, "' is to shard dim ", found->second,
                            " of a tensor with ", dims,
                            " dims: give each tensor of the batch its own sharding, an empty one "
                            "where no other axis shards it");
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

/// The rows of the global batch, sharded over the batch axes.
ShardSizes with_rows(ShardSizes sizes, const GlobalRows& rows, const BatchAxes& axes) {
  if (!axes.batch.empty()) sizes[0] = rows.sizes;
  return sizes;
}

at::Tensor whole_mask(const TensorBatch& batch) {
  if (batch.mask.defined()) return batch.mask;
  // Where the other ranks' masks are.
  const auto device = batch.tensors.empty() ? at::Device(at::kCPU) : batch.tensors[0].device();
  return at::ones({batch.rows}, at::TensorOptions().dtype(at::kBool).device(device));
}

void require_mine(const LoadedBatch& batch, int coordinate, const BatchAxes& axes) {
  const Partition rows = Partition::even(batch.global_rows, axes.coordinates);
  if (batch.slices.size() != 1 || batch.slices[0].coordinate != coordinate ||
      !(batch.slices[0].samples == rows.interval(coordinate)))
    throw InvalidArgument(
        "this rank is number ", coordinate, " of ", axes.coordinates,
        " along the batch axes, and its loader has read for another mesh, other axes or several "
        "devices: give the mesh and the axes that the loader was made with, and one device a "
        "process");
}

/// What the ranks that do not read must know: step, epoch, rows, real, how many tensors, and
/// whether there is a mask; then the names, which hold no line ends, a line each.
std::string header_of(const TensorBatch& batch) {
  std::string header = concat(batch.step, " ", batch.epoch, " ", batch.rows, " ", batch.real, " ",
                              batch.tensors.size(), " ", batch.mask.defined());
  for (const std::string& name : batch.names) header += concat("\n", name);
  return header;
}

/// A batch that the user has put together may have any names and tensors.
void require_rows(const TensorBatch& batch) {
  require_field_names(batch.names);
  if (!batch.names.empty() && batch.names.size() != batch.tensors.size())
    throw InvalidArgument("a batch of ", batch.tensors.size(), " tensors and ", batch.names.size(),
                          " names: ", list(batch.names));
  if (batch.real < 0 || batch.real > batch.rows)
    throw InvalidArgument("a batch of ", batch.rows, " rows, of which ", batch.real, " count");
  for (const at::Tensor& t : batch.tensors) {
    if (!t.defined() || t.layout() != at::kStrided || t.is_quantized() || t.is_nested())
      throw InvalidArgument("a tensor of the batch is undefined or not dense");
    if (t.dim() == 0 || t.size(0) != batch.rows)
      throw InvalidArgument("a tensor of shape ", t.sizes(), " in a batch of ", batch.rows,
                            " rows; dim 0 has the rows");
  }
  if (batch.mask.defined() && (batch.mask.dim() != 1 || batch.mask.size(0) != batch.rows))
    throw InvalidArgument("a mask of shape ", batch.mask.sizes(), " for ", batch.rows, " rows");
}

/// Each rank's rows as shards of the global batch.
ShardedBatch joined(const TensorBatch& batch, const DeviceMesh& mesh, const BatchAxes& axes,
                    const std::vector<FieldSharding>& fields, const GlobalRows& rows) {
  const Mesh& layout = mesh.mesh();
  ShardedBatch sharded{.step = batch.step,
                       .epoch = batch.epoch,
                       .rows = rows.all,
                       .real = rows.real,
                       .names = batch.names};
  for (std::size_t i = 0; i < batch.tensors.size(); ++i) {
    const FieldSharding& field = field_of(fields, i);
    at::Tensor local = batch.tensors[i];
    const auto placements = batch_placements(field, layout, axes, static_cast<int>(local.dim()));
    ShardSizes sizes = with_rows(field.sizes, rows, axes);
    if (field.whole.value_or(false)) {
      auto shape = local.sizes().vec();
      shape[0] = rows.all;
      const ShardSpec spec(mesh, shape, placements, sizes);
      sizes = spec.sizes();
      for (int dim = 1; dim < static_cast<int>(shape.size()); ++dim)
        local = local.narrow(dim, spec.local_offset()[dim], spec.local_shape()[dim]);
    }
    sharded.tensors.push_back(from_local(local, mesh, placements, sizes));
  }
  if (rows.masked)
    sharded.mask = from_local(whole_mask(batch), mesh, batch_placements({}, layout, axes, 1),
                              with_rows({}, rows, axes));
  return sharded;
}

void require_given(const TensorBatch* batch) {
  if (!batch)
    throw InvalidArgument("this rank reads for others (reads_for_others()), and gave no batch");
}

/// Each rank gives rows of its own, which `check` may refuse.
ShardedBatch gathered(const TensorBatch* batch, const DeviceMesh& mesh, const BatchAxes& axes,
                      const std::vector<FieldSharding>& field_shardings,
                      const std::function<void()>& check) {
  std::vector<FieldSharding> fields;
  const auto said = agree::all<SaidRows>(mesh.all(), "shard_rows", [&] {
    require_given(batch);
    require_rows(*batch);
    fields = by_place(field_shardings, batch->names);
    require_fields(fields, batch->tensors.size(), mesh.mesh(), axes);
    require_whole(fields);
    check();
    return SaidRows{batch->rows, batch->real, static_cast<std::int64_t>(batch->tensors.size()),
                    batch->mask.defined()};
  });
  return joined(*batch, mesh, axes, fields, counted(said, mesh.mesh(), axes));
}

/// What all ranks know of a batch that some of them have read.
struct Told {
  std::vector<std::uint64_t> numbers;
  std::vector<std::string> names;
  std::vector<FieldSharding> fields;
  GlobalRows rows;
};

/// The first rank of `sharing` gives the batch, which `check` may refuse. What is wrong with it
/// those that wait for it learn, and then all others.
Told told_by_readers(const TensorBatch* batch, const DeviceMesh& mesh, const BatchAxes& axes,
                     const Group& sharing, const std::vector<FieldSharding>& field_shardings,
                     const std::function<void()>& check) {
  Told told;
  const auto header = [&] {
    require_given(batch);
    require_rows(*batch);
    require_fields(by_place(field_shardings, batch->names), batch->tensors.size(), mesh.mesh(),
                   axes);
    check();
    return header_of(*batch);
  };
  const auto said = agree::all<SaidRows>(mesh.all(), "scatter_batch", [&] {
    told.names = split(agree::first<std::string>(sharing, "scatter_batch", header), '\n');
    for (const std::string& number : split(told.names.front(), ' '))
      told.numbers.push_back(std::stoull(number));
    told.names.erase(told.names.begin());
    told.fields = by_place(field_shardings, told.names);
    const auto number = [&](int i) { return static_cast<std::int64_t>(told.numbers[i]); };
    // A rank that has not read may know its rows all the same: they are compared.
    return SaidRows{batch ? batch->rows : number(2), batch ? batch->real : number(3), number(4),
                    number(5)};
  });
  told.rows = counted(said, mesh.mesh(), axes);
  return told;
}

ShardedBatch scattered(const TensorBatch* batch, const DeviceMesh& mesh, const BatchAxes& axes,
                       const std::vector<FieldSharding>& field_shardings,
                       const std::function<void()>& check) {
  if (axes.others.empty()) return gathered(batch, mesh, axes, field_shardings, check);
  const Mesh& layout = mesh.mesh();
  const DeviceMesh sharing =
      mesh.manager().mesh(layout.submesh(axes.other_names, mesh.manager().rank()));
  const Group group = sharing.all();
  const bool reader = group.rank() == 0;
  const Told told = told_by_readers(batch, mesh, axes, group, field_shardings, check);
  ShardedBatch sharded{.step = told.numbers[0],
                       .epoch = told.numbers[1],
                       .rows = told.rows.all,
                       .real = told.rows.real,
                       .names = told.names};
  // The other coordinates' ranks have their own: the shapes are known, and nothing else is sent.
  const auto place = [&](const at::Tensor& full, const FieldSharding& field, int dims) {
    const at::Tensor shared =
        scatter(full, sharing, field_placements(field, layout, axes.others, dims), field.sizes);
    auto shape = shared.sizes().vec();
    shape[0] = sharded.rows;
    return from_local(to_local(shared),
                      ShardSpec(mesh, shape, batch_placements(field, layout, axes, dims),
                                with_rows(spec(shared).sizes(), told.rows, axes)));
  };
  for (std::uint64_t i = 0; i < told.numbers[4]; ++i) {
    const FieldSharding& field = field_of(told.fields, i);
    int most = 1;
    for (const auto& [axis, dim] : field.dims) most = std::max(most, dim + 1);
    const at::Tensor full = reader ? batch->tensors[i] : at::Tensor();
    sharded.tensors.push_back(place(full, field, most));
  }
  if (told.rows.masked) sharded.mask = place(reader ? whole_mask(*batch) : at::Tensor(), {}, 1);
  return sharded;
}

}  // namespace

ShardedBatch shard_batch(const LoadedBatch& batch, const DeviceMesh& mesh,
                         const std::vector<std::string>& batch_axes,
                         const std::vector<FieldSharding>& field_shardings) {
  const Mesh& layout = mesh.mesh();
  const BatchAxes axes = batch_axes_of(layout, batch_axes);
  require_rows(batch);
  const auto fields = by_place(field_shardings, batch.names);
  require_fields(fields, batch.tensors.size(), layout, axes);
  require_whole(fields);
  require_mine(batch, batch_coordinate(mesh.coordinate(), layout, axes), axes);
  return joined(batch, mesh, axes, fields,
                {Partition::even(batch.global_rows, axes.coordinates).sizes(), batch.global_rows,
                 batch.global_real, batch.global_real < batch.global_rows});
}

ShardedBatch shard_rows(const TensorBatch& batch, const DeviceMesh& mesh,
                        const std::vector<std::string>& batch_axes,
                        const std::vector<FieldSharding>& field_shardings) {
  return gathered(&batch, mesh, batch_axes_of(mesh.mesh(), batch_axes), field_shardings, [] {});
}

bool reads_for_others(const DeviceMesh& mesh, const std::vector<std::string>& batch_axes) {
  const BatchAxes axes = batch_axes_of(mesh.mesh(), batch_axes);
  const std::vector<int> at = mesh.coordinate();
  return std::ranges::all_of(axes.others, [&](int axis) { return !at[axis]; });
}

ShardedBatch scatter_batch(const std::optional<LoadedBatch>& batch, const DeviceMesh& mesh,
                           const std::vector<std::string>& batch_axes,
                           const std::vector<FieldSharding>& fields) {
  const BatchAxes axes = batch_axes_of(mesh.mesh(), batch_axes);
  return scattered(batch ? &*batch : nullptr, mesh, axes, fields, [&] {
    require_mine(*batch, batch_coordinate(mesh.coordinate(), mesh.mesh(), axes), axes);
  });
}

ShardedBatch scatter_rows(const std::optional<TensorBatch>& batch, const DeviceMesh& mesh,
                          const std::vector<std::string>& batch_axes,
                          const std::vector<FieldSharding>& fields) {
  return scattered(batch ? &*batch : nullptr, mesh, batch_axes_of(mesh.mesh(), batch_axes), fields,
                   [] {});
}

}  // namespace tessera

// segment_reduce where rows and the lengths of their segments are sharded over the same ranks: rows
// by target and the degrees of nodes. Each row gets the number of its segment, and what a rank has
// reduced for a segment of another goes to it as a ghost: rows of one segment may be on any ranks.
// Written with operators by index, so that it can be differentiated as often as these.

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/where.h>

#include <limits>

#include "tessera/base/error.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/ops/ghosts/detail/row_plan.h"
#include "tessera/ops/rules/detail/rules.h"
#include "tessera/tensor/dispatch/internal/dispatch.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/redistribute.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::detail::indexed_rows {

namespace {

constexpr auto kSegments = "aten::segment_reduce";

// How many rows the segments of this rank have.
std::int64_t rows_of_segments(const at::Tensor& lengths, std::int64_t first) {
  std::int64_t rows = 0;
  const auto* const length = lengths.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < lengths.numel(); ++i) {
    if (length[i] < 0) throw InvalidArgument("segment ", first + i, " has the length ", length[i]);
    rows += length[i];
  }
  return rows;
}

// The number of each row's segment, sharded as the rows are. Collective.
at::Tensor segment_of_rows(const ShardMeta& data, const ShardMeta& lengths) {
  const auto& context = context_of(data.spec());
  const DimSharding &rows = data.spec().dim(0), &segments = lengths.spec().dim(0);
  const Group group = context->mesh.group(rows.axes);
  const Interval own = segments.partition.interval(group.rank());
  const LocalCallGuard guard;
  const at::Tensor mine = lengths.local.to(at::kCPU, at::kLong).contiguous();
  const Sizes sizes =
      agree::all<std::int64_t>(group, kSegments, [&] { return rows_of_segments(mine, own.begin); });
  const Partition covered(sizes);
  if (covered.extent() != rows.partition.extent())
    throw InvalidArgument(kSegments, ": segments of ", covered.extent(), " rows in all (",
                          list(sizes), " by rank), and ", rows.partition.extent(),
                          " rows; give each row a segment");
  at::Tensor index = at::arange(own.begin, own.end, at::TensorOptions(at::kLong))
                         .repeat_interleave(mine)
                         .to(data.local.device());
  const auto along = [&](const Partition& partition) {
    return make_spec(context, {partition.extent()}, lengths.spec().placements(),
                     {DimSharding{rows.axes, partition}});
  };
  const ShardSpec to = along(rows.partition);
  // Where a rank has rows of others' segments their numbers are sent, and nothing else.
  if (!(covered == rows.partition)) index = redistribute_local(index, along(covered), to);
  return wrap_fresh(index.contiguous(), make_layout(to, at::kLong, data.local.device()));
}

at::Tensor reduced_segments(const at::Tensor& data, const at::Tensor& lengths,
                            const std::string& reduce, const std::optional<at::Scalar>& initial) {
  const ShardMeta &rows = *meta_of(data), &of = *meta_of(lengths);
  const at::Tensor index = segment_of_rows(rows, of);
  const ShardSpec spec = with_places(rows.spec(), 0, of.spec());
  const at::Tensor none = zeros(spec, data.options().requires_grad(false));
  if (reduce == "sum" || reduce == "mean") {
    at::Tensor sum = none.index_add(0, index, data) + initial.value_or(0);
    if (reduce == "sum") return sum;
    const at::Tensor count = as_dim(lengths.to(data.scalar_type()), 0, data.dim());
    const at::Tensor mean = sum / count;
    return initial ? at::where(count.gt(0), mean, sum) : mean;
  }
  const bool largest = reduce == "max";
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const at::Tensor places = as_dim(index, 0, data.dim()).expand(data.sizes());
  at::Tensor extreme = at::full_like(none, largest ? -kInfinity : kInfinity)
                           .scatter_reduce(0, places, data, largest ? "amax" : "amin", false);
  if (!initial) return extreme;
  // Not maximum(): of values that equal `initial` the rows have the gradient.
  return at::where(largest ? extreme.lt(*initial) : extreme.gt(*initial),
                   at::full_like(none, *initial), extreme);
}

bool segment_reduce(torch::jit::Stack* stack) {
  const auto a = torch::jit::last(*stack, 8);
  const at::Tensor data = a[0].toTensor();
  const auto given = [&](std::size_t i) { return a[i].isTensor() && a[i].toTensor().defined(); };
  // data, reduce, lengths, indices, offsets, axis, unsafe, initial
  if (!given(2) || given(3) || given(4) || a[5].toInt() != 0 || a[6].toBool()) return false;
  const std::string reduce(a[1].toStringRef());
  const at::Tensor lengths = a[2].toTensor();
  if ((reduce != "sum" && reduce != "mean" && reduce != "max" && reduce != "min") ||
      !data.is_floating_point() || lengths.dim() != 1 || !names_rows_of(data, 0, lengths))
    return false;
  const auto initial = a[7].isNone() ? std::nullopt : std::optional(a[7].toScalar());
  return answer(stack, 8, reduced_segments(data, lengths, reduce, initial));
}

const AtStart registered_segments([] { register_above_and_below<segment_reduce>(kSegments); });

}  // namespace

}  // namespace tessera::detail::indexed_rows

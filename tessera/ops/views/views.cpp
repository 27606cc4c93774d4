// Views: every rank takes the view of its local. If the result's dims cannot be sharded as the
// input's are, the input is redistributed first, and the result is a copy, from which writes reach
// the input.

#include <ATen/core/function_schema.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/ops/rules/detail/decomposition.h"
#include "tessera/ops/rules/detail/labels.h"
#include "tessera/ops/rules/detail/windowed.h"
#include "tessera/ops/views/detail/view_parts.h"
#include "tessera/tensor/dispatch/internal/dispatch.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/dispatch/internal/no_dispatch.h"
#include "tessera/tensor/dispatch/internal/view_copy.h"
#include "tessera/tensor/dispatch/rule.h"
#include "tessera/tensor/errors.h"
#include "tessera/tensor/spec/internal/mesh_context.h"

namespace tessera::detail::views_rules {

namespace {

using Shape = std::vector<std::int64_t>;

// The first input as it must be, and how it is sharded then.
struct Source {
  Plan plan;
  ShardSpec spec;

  Source(const OpCall& call, const std::set<int>& whole)
      : Source(call, call.tensor(0).spec, whole) {}
  Source(const OpCall& call, const ShardSpec& as, const std::set<int>& whole)
      : spec(with_unsharded_dims(as, whole)) {
    plan.inputs = {spec};
    plan.view_copied = !(spec == call.tensor(0).spec);
  }
};

void require_dims(const OpCall& call) {
  if (call.tensor(0).spec.dims() == 0)
    throw InvalidArgument(concat(call.name(), " of a tensor without dims"));
}

const std::vector<OutputInfo>& outputs_of(const OpCall& call) {
  const auto* out = call.outputs();
  if (!out) throw ShardingError(concat(call.name(), " has no meta kernel"));
  return *out;
}

// Dims of the result that are dims of the input, by position; the others come from none.
Plan by_dims(const OpCall& call, const std::vector<int>& from, const std::set<int>& whole = {}) {
  Source source(call, whole);
  for (const OutputInfo& out : outputs_of(call))
    source.plan.outputs.push_back({mapped_spec(source.spec, out.shape, from, true)});
  return std::move(source.plan);
}

Plan same(const OpCall& call) { return by_dims(call, identity(call.tensor(0).spec.dims())); }

// Views of other values than the tensor's: for a sum they are the sum of the ranks' views. The real
// part of a product is not the product of the real parts, and the minimum of all negatives not the
// negative of the minimum: these are reduced first.
Plan linear_view(const OpCall& call, const std::vector<int>& from,
                 const std::set<int>& whole = {}) {
  Source source(call, whole);
  const auto placements = source.spec.placements();
  const bool linear = std::ranges::all_of(placements, [](const Placement& p) {
    return !p.is_partial() || p.is_partial(ReduceOp::Kind::sum) ||
           p.is_partial(ReduceOp::Kind::avg);
  });
  if (!linear) {
    source.spec = without_partial(source.spec);
    source.plan.inputs = {source.spec};
    source.plan.view_copied = true;
  }
  source.plan.outputs = {{mapped_spec(source.spec, outputs_of(call)[0].shape, from, true)}};
  return std::move(source.plan);
}

Plan transpose(const OpCall& call) {
  const int n = call.tensor(0).spec.dims();
  auto from = identity(n);
  if (n > 1 || call.has("dim0")) {
    const auto a = call.has("dim0") ? normal_dim(call.integer("dim0"), n) : 0,
               b = call.has("dim1") ? normal_dim(call.integer("dim1"), n) : n - 1;
    if (n > 0) std::swap(from[a], from[b]);
  }
  return by_dims(call, from);
}

Plan permute(const OpCall& call) {
  std::vector<int> from;
  for (const auto d : call.integers("dims"))
    from.push_back(static_cast<int>(normal_dim(d, call.tensor(0).spec.dims())));
  return by_dims(call, from);
}

Plan unsqueeze(const OpCall& call) {
  const int n = call.tensor(0).spec.dims();
  auto from = identity(n);
  from.insert(from.begin() + normal_dim(call.integer("dim"), n + 1), -1);
  return by_dims(call, from);
}

// Which dims are removed is decided by the global sizes; a dim of size 1 that is sharded is
// gathered first.
Plan squeeze(const OpCall& call) {
  const auto& shape = call.tensor(0).spec.shape();
  const int n = static_cast<int>(shape.size());
  std::set<int> gone;
  if (call.argument("dim") >= 0) {
    for (const auto d : call.integers("dim")) gone.insert(static_cast<int>(normal_dim(d, n)));
  } else {
    for (int d = 0; d < n; ++d) gone.insert(d);
  }
  std::erase_if(gone, [&](int d) { return d >= n || shape[d] != 1; });
  std::vector<int> from;
  for (int d = 0; d < n; ++d) {
    if (!gone.contains(d)) from.push_back(d);
  }
  Plan plan = by_dims(call, from, gone);
  // The local may have dims of size 1 that the global tensor does not have: name the dims. squeeze,
  // squeeze.dim and squeeze.dims become one.
  plan.local = [dims = Shape(gone.begin(), gone.end())](const c10::OperatorHandle&,
                                                        torch::jit::Stack arguments) {
    return torch::jit::Stack{arguments[0].toTensor().squeeze(dims)};
  };
  return plan;
}

Plan expand(const OpCall& call) {
  const auto& shape = call.tensor(0).spec.shape();
  const auto& target = outputs_of(call)[0].shape;
  const int lead = static_cast<int>(target.size() - shape.size());
  std::vector<int> from(target.size(), -1);
  std::set<int> whole;
  for (int d = 0; d < static_cast<int>(shape.size()); ++d) {
    if (shape[d] == target[lead + d]) {
      from[lead + d] = d;
    } else {
      whole.insert(d);
    }
  }
  Plan plan = by_dims(call, from, whole);
  plan.arguments = {{call.argument("size"), int_list(plan.outputs[0].spec.local_shape())}};
  return plan;
}

// A slice along a sharded dim keeps the dim, with other sizes, and shares memory.
Plan slice(const OpCall& call) {
  const ShardSpec& in = call.tensor(0).spec;
  require_dims(call);
  const int d = static_cast<int>(normal_dim(call.integer("dim"), in.dims()));
  if (!in.is_sharded(d)) return by_dims(call, identity(in.dims()));
  const std::int64_t step = call.integer("step"), extent = in.shape()[d];
  std::int64_t start = call.has("start") ? call.integer("start") : 0;
  if (start < 0) start += extent;
  start = std::clamp<std::int64_t>(start, 0, extent);
  const OutputInfo& out = outputs_of(call)[0];
  Plan plan;
  const ShardSpec spec = mapped_spec(in, out.shape, identity(in.dims()), true,
                                     {{d, kept(in.dim(d).partition, start, step, out.shape[d])}});
  plan.outputs = {{spec}};
  const LocalSlice mine = local_slice(in, d, start, step, spec.local_shape()[d]);
  plan.arguments = {{call.argument("start"), mine.start},
                    {call.argument("end"),
                     mine.length == 0 ? mine.start : mine.start + (mine.length - 1) * step + 1}};
  return plan;
}

Plan split(const OpCall& call) {
  const ShardSpec& in = call.tensor(0).spec;
  require_dims(call);
  const int d = static_cast<int>(normal_dim(call.integer("dim"), in.dims()));
  if (!in.is_sharded(d)) return by_dims(call, identity(in.dims()));
  Plan plan;
  Shape sizes;
  std::int64_t begin = 0;
  for (const OutputInfo& out : outputs_of(call)) {
    const ShardSpec spec = mapped_spec(in, out.shape, identity(in.dims()), true,
                                       {{d, kept(in.dim(d).partition, begin, 1, out.shape[d])}});
    sizes.push_back(spec.local_shape()[d]);
    plan.outputs.push_back({spec});
    begin += out.shape[d];
  }
  plan.local = [sizes, d](const c10::OperatorHandle&, torch::jit::Stack arguments) {
    return torch::jit::Stack{arguments[0].toTensor().split_with_sizes(sizes, d)};
  };
  return plan;
}

Plan select(const OpCall& call) {
  const int n = call.tensor(0).spec.dims();
  require_dims(call);
  const int d = static_cast<int>(normal_dim(call.integer("dim"), n));
  auto from = identity(n);
  from.erase(from.begin() + d);
  return by_dims(call, from, {d});
}

Plan unbind(const OpCall& call) { return select(call); }

// Of a dim over several ranks one row is gathered, not all: a slice, which shares memory, of which
// the dim is then taken off.
bool select_row(torch::jit::Stack* stack) {
  const std::size_t first = stack->size() - 3;
  const at::Tensor self = (*stack)[first].toTensor();
  const ShardMeta* meta = meta_of(self);
  const std::int64_t n = self.dim(), dim = (*stack)[first + 1].toInt();
  if (!meta || dim < -n || dim >= n) return false;
  const auto d = dim < 0 ? dim + n : dim;
  std::int64_t at = (*stack)[first + 2].toInt();
  if (at < -self.size(d) || at >= self.size(d) || self.size(d) == 1 ||
      !is_distributed(meta->spec(), static_cast<int>(d)))
    return false;
  if (at < 0) at += self.size(d);
  const at::Tensor row = self.slice(d, at, at + 1).squeeze(d);
  stack->resize(first);
  stack->emplace_back(row);
  return true;
}

Plan diagonal(const OpCall& call) {
  const int n = call.tensor(0).spec.dims();
  const int a = static_cast<int>(normal_dim(call.integer("dim1"), n)),
            b = static_cast<int>(normal_dim(call.integer("dim2"), n));
  std::vector<int> from;
  for (int d = 0; d < n; ++d) {
    if (d != a && d != b) from.push_back(d);
  }
  from.push_back(-1);
  return by_dims(call, from, {a, b});
}

// The boundaries moved to the nearest of `units` that begin every `rows` rows, the last ending with
// the dim; in units. Of the ranks that have rows as many keep some as there are units. nullopt if
// all of it would be on one rank.
std::optional<Shape> in_whole_units(const Partition& parts, std::int64_t units, std::int64_t rows) {
  const Shape given = parts.sizes();
  std::int64_t behind = std::ranges::count_if(given, [](std::int64_t n) { return n > 0; });
  if (std::min(units, behind) < 2) return std::nullopt;
  const bool each = units >= behind;
  Shape sizes;
  std::int64_t last = 0, at = 0;
  for (const std::int64_t n : given) {
    at += n;
    std::int64_t boundary = last;
    if (n > 0) {
      --behind;
      const std::int64_t low = each && behind > 0 ? last + 1 : std::max(last, units - behind),
                         high = each ? units - behind : last + 1;
      boundary = std::clamp((at + rows / 2) / rows, low, std::max(low, high));
    }
    sizes.push_back(boundary - last);
    last = boundary;
  }
  return sizes;
}

// Windows along a sharded dim lie on the rank of their rows. Where they do not overlap boundaries
// are moved between them, if they are not there; windows that overlap are taken of all rows.
Plan unfold(const OpCall& call) {
  const ShardSpec& in = call.tensor(0).spec;
  const int d = static_cast<int>(normal_dim(call.integer("dimension"), in.dims()));
  auto from = identity(in.dims());
  from.push_back(-1);
  const std::int64_t size = call.integer("size"), step = call.integer("step");
  const Shape& shape = outputs_of(call)[0].shape;
  std::optional<Shape> windows;
  if (in.dims() > 0 && in.is_sharded(d) && size <= step)
    windows = in_whole_units(in.dim(d).partition, shape[d], step);
  if (!windows) return by_dims(call, from, {d});
  const Partition of_windows{std::span<const std::int64_t>(*windows)};
  Source source(call, with_parts(in, {{d, rows_of_windows(of_windows, step, in.shape()[d])}}), {});
  const ShardSpec out = mapped_spec(source.spec, shape, from, true, {{d, of_windows}});
  source.plan.outputs = {{out}};
  if (out.local_shape()[d] == 0) {
    source.plan.local = [size](const c10::OperatorHandle&, torch::jit::Stack arguments) {
      const at::Tensor& t = arguments[0].toTensor();
      Shape none = t.sizes().vec();
      none.push_back(size);
      return torch::jit::Stack{t.unsqueeze(-1).expand(none)};
    };
  }
  return std::move(source.plan);
}

// view: groups of dims with the same number of elements on both sides. The sharding of a group's
// first dim passes to the first dim of the other side, if its boundaries are between rows of that.
struct Group {
  std::vector<int> in, out;
};

std::vector<Group> groups(const Shape& in, const Shape& out) {
  std::vector<Group> all;
  std::size_t i = 0, o = 0;
  while (i < in.size() || o < out.size()) {
    Group g;
    std::int64_t a = 1, b = 1;
    const auto take_in = [&] { a *= in[i], g.in.push_back(static_cast<int>(i++)); };
    const auto take_out = [&] { b *= out[o], g.out.push_back(static_cast<int>(o++)); };
    if (i < in.size()) take_in();
    if (o < out.size()) take_out();
    while (a != b) {
      if (a < b ? i < in.size() : o >= out.size() && i < in.size()) {
        take_in();
      } else if (o < out.size()) {
        take_out();
      } else {
        break;
      }
    }
    // Trailing dims of size 1 belong to no group.
    if (i == in.size()) {
      while (o < out.size() && out[o] == 1) take_out();
    }
    if (o == out.size()) {
      while (i < in.size() && in[i] == 1) take_in();
    }
    all.push_back(std::move(g));
  }
  return all;
}

int first_wide(const std::vector<int>& dims, const Shape& shape) {
  for (const int d : dims) {
    if (shape[d] != 1) return d;
  }
  return dims.empty() ? -1 : dims.front();
}

// Dims of size 1. Where one is sharded, the ranks at one coordinate on its axes hold everything,
// and where it is merged with other dims these lie there as well: nothing moves.

// The rows of a dim at a position of the mesh.
std::int64_t rows_at(const DimSharding& dim, const std::vector<int>& mesh,
                     const std::vector<int>& at) {
  int shard = 0;
  for (const int axis : dim.axes) shard = shard * mesh[axis] + at[axis];
  return dim.partition.size(shard);
}

// A dim that is sharded over `axes`, with `rows` of each position.
template <class Rows>
DimSharding sharded_over(std::vector<int> axes, const std::vector<int>& mesh, const Rows& rows) {
  std::sort(axes.begin(), axes.end());
  int positions = 1;
  for (const int axis : axes) positions *= mesh[axis];
  Shape sizes;
  std::vector<int> at(mesh.size(), 0);
  for (int p = 0; p < positions; ++p) {
    int rest = p;
    for (std::size_t i = axes.size(); i-- > 0; rest /= mesh[axes[i]])
      at[axes[i]] = rest % mesh[axes[i]];
    sizes.push_back(rows(at));
  }
  return {std::move(axes), Partition(std::span<const std::int64_t>(sizes))};
}

// A dim of `extent`, sharded as `own` says (without axes: not), whose rows are held where all of
// the dims of size 1 are.
DimSharding held_with(const DimSharding& own, const std::vector<DimSharding>& ones,
                      std::int64_t extent, const std::vector<int>& mesh) {
  std::vector<int> axes = own.axes;
  for (const DimSharding& one : ones) axes.insert(axes.end(), one.axes.begin(), one.axes.end());
  return sharded_over(std::move(axes), mesh, [&](const std::vector<int>& at) {
    std::int64_t n = own.axes.empty() ? extent : rows_at(own, mesh, at);
    for (const DimSharding& one : ones) n *= rows_at(one, mesh, at);
    return n;
  });
}

// The way back, for data: the axes on which one coordinate has all rows of a dim shard a dim of
// size 1 before it, and the others the dim.
struct WithOne {
  WithOne(const DimSharding& dim, const std::vector<int>& mesh) {
    std::vector<int> single, others;
    std::vector<int> holder(mesh.size(), 0);
    for (const int axis : dim.axes) {
      std::set<int> held;
      sharded_over(dim.axes, mesh, [&](const std::vector<int>& at) {
        const std::int64_t n = rows_at(dim, mesh, at);
        if (n > 0) held.insert(at[axis]);
        return n;
      });
      const bool on_one = mesh[axis] > 1 && held.size() == 1;
      (on_one ? single : others).push_back(axis);
      if (on_one) holder[axis] = *held.begin();
    }
    const auto on_holder = [&](const std::vector<int>& at) {
      return std::ranges::all_of(single, [&](int axis) { return at[axis] == holder[axis]; });
    };
    if (single.empty()) return;
    one = sharded_over(single, mesh,
                       [&](const std::vector<int>& at) { return on_holder(at) ? 1 : 0; });
    if (others.empty()) return;
    rest = sharded_over(others, mesh, [&](std::vector<int> at) {
      for (const int axis : single) at[axis] = holder[axis];
      return rows_at(dim, mesh, at);
    });
  }
  DimSharding one = {}, rest = {};
};

// The spec with some dims sharded in another way, over axes that shard nothing else.
ShardSpec with_dims(const ShardSpec& spec, const std::vector<std::pair<int, DimSharding>>& given) {
  if (given.empty()) return spec;
  auto placements = spec.placements();
  std::vector<DimSharding> dims;
  for (int d = 0; d < spec.dims(); ++d) dims.push_back(spec.dim(d));
  for (const auto& [d, sharding] : given) {
    for (const int axis : sharding.axes) placements[axis] = Shard(d);
    dims[d] = sharding;
  }
  return make_spec(context_of(spec), spec.shape(), std::move(placements), std::move(dims));
}

// How the input of a view is to be sharded: where its shards do not pass to dims of the result they
// are moved between ranks, if another sharding does, rather than gathered.
struct Reshaping {
  /// Dim `a`, the first of its group, with boundaries between `rows` of its rows.
  void move_boundaries(int a, std::int64_t rows) {
    const Partition& parts = spec.dim(a).partition;
    const auto units = in_whole_units(parts, parts.extent() / rows, rows);
    if (!units) {
      spec = with_unsharded_dims(spec, {a});
      return;
    }
    const Partition moved{std::span<const std::int64_t>(*units)};
    spec = with_parts(spec, {{a, scaled(moved, rows)}});
  }
  /// Dim `d`, merged behind dim `a`: its axis shards `a`, if that has two elements or more.
  /// If these are fewer than the ranks some have none: less moves, and less is computed.
  void shard_instead(int d, int a) {
    const std::vector<int> axes = spec.dim(d).axes;
    const bool room = axes.size() == 1 && !spec.is_sharded(a) && spec.shape()[a] >= 2;
    spec = with_unsharded_dims(spec, {d});
    if (!room) return;
    auto placements = spec.placements();
    placements[axes[0]] = Shard(a);
    spec = spec.with_placements(placements);
  }

  ShardSpec spec;
};

Plan reshape_to(const OpCall& call, const Shape& target) {
  Reshaping as{call.tensor(0).spec};
  const ShardSpec& in = as.spec;
  const Shape& shape = call.tensor(0).spec.shape();
  std::vector<int> from(target.size(), -1);
  std::set<int> whole;
  std::vector<std::pair<int, Partition>> parts;
  std::vector<std::pair<int, DimSharding>> joined;
  const std::vector<int>& mesh = context_of(in)->sizes;
  // What has one dim, or is a parameter, gets dims of size 1 to be broadcast along them.
  const bool data = in.dims() > 1 && !call.tensor(0).parameter;
  if (in.numel() == 0) {
    // No elements: only dims that stay as they are keep their sharding.
    for (int d = 0; d < in.dims(); ++d) {
      if (d < static_cast<int>(target.size()) && target[d] == shape[d] &&
          std::equal(shape.begin(), shape.begin() + d, target.begin())) {
        from[d] = d;
      } else {
        whole.insert(d);
      }
    }
  } else {
    for (const Group& g : groups(shape, target)) {
      const int a = first_wide(g.in, shape), b = first_wide(g.out, target);
      std::vector<DimSharding> ones;
      for (const int d : g.in) {
        if (d == a || !in.is_sharded(d)) continue;
        if (shape[d] == 1 && b >= 0) {
          ones.push_back(in.dim(d));
        } else {
          as.shard_instead(d, a);
        }
      }
      if (a < 0) continue;
      if (!in.is_sharded(a)) {
        if (!ones.empty()) joined.emplace_back(b, held_with({}, ones, target[b], mesh));
        continue;
      }
      if (b < 0) {
        whole.insert(a);
        continue;
      }
      std::int64_t inner_in = 1, inner_out = 1;
      for (const int d : g.in) inner_in *= d == a ? 1 : shape[d];
      for (const int d : g.out) inner_out *= d == b ? 1 : target[d];
      const auto fits = [&](std::int64_t n) { return n * inner_in % inner_out == 0; };
      if (!std::ranges::all_of(in.dim(a).partition.sizes(), fits))
        as.move_boundaries(a, inner_out / std::gcd(inner_in, inner_out));
      DimSharding own;
      if (in.is_sharded(a)) {
        Shape sizes;
        for (const auto n : in.dim(a).partition.sizes()) sizes.push_back(n * inner_in / inner_out);
        own = {in.dim(a).axes, Partition(std::span<const std::int64_t>(sizes))};
      }
      if (!ones.empty()) {
        joined.emplace_back(b, held_with(own, ones, target[b], mesh));
      } else if (own.axes.empty()) {
        continue;
      } else if (const WithOne apart(own, mesh);
                 data && g.out.front() != b && !apart.one.axes.empty()) {
        joined.emplace_back(g.out.front(), apart.one);
        if (!apart.rest.axes.empty()) joined.emplace_back(b, apart.rest);
      } else {
        from[b] = a;
        parts.emplace_back(b, own.partition);
      }
    }
  }
  Source source(call, as.spec, whole);
  const ShardSpec out = with_dims(mapped_spec(source.spec, target, from, true, parts), joined);
  source.plan.outputs = {{out}};
  if (!source.plan.view_copied &&
      (call.name() == "aten::view" || call.name() == "aten::_unsafe_view")) {
    source.plan.arguments = {{1, int_list(out.local_shape())}};
    return std::move(source.plan);
  }
  // What was gathered for an operator that returns no view may be in any memory order.
  const bool alias = call.schema().returns()[0].alias_info() != nullptr;
  source.plan.local = [shape_of_local = out.local_shape(), alias](const c10::OperatorHandle&,
                                                                  torch::jit::Stack arguments) {
    const at::Tensor& t = arguments[0].toTensor();
    return torch::jit::Stack{alias ? t.view(shape_of_local) : t.reshape(shape_of_local)};
  };
  return std::move(source.plan);
}

Plan view(const OpCall& call) { return reshape_to(call, outputs_of(call)[0].shape); }

Plan view_dtype(const OpCall& call) {
  const OutputInfo& out = outputs_of(call)[0];
  if (out.shape != call.tensor(0).spec.shape() || call.tensor(0).spec.has_partial())
    throw ShardingError(
        "view(dtype) of another element size, or of a partial value, has no rule: redistribute to "
        "Replicate first");
  return same(call);
}

// Strides describe the global memory, which no rank has: the only thing that follows from them is
// that every element stays where it is. The stride of a dim of one element has no meaning.
bool same_elements(const Shape& shape, const Shape& strides, std::int64_t offset, const Shape& size,
                   const Shape& stride, std::optional<std::int64_t> from) {
  if (size != shape || stride.size() != size.size() || from.value_or(offset) != offset)
    return false;
  const bool empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
  for (std::size_t d = 0; d < size.size(); ++d) {
    if (size[d] != 1 && stride[d] != strides[d] && !empty) return false;
  }
  return true;
}

// In place every element stays, and so does its gradient. Autograd would differentiate it by way of
// a tensor of the global memory, for which the gradient is gathered.
bool same_elements_in_place(torch::jit::Stack* stack) {
  const c10::IValue* asked = stack->data() + stack->size() - 3;
  const at::Tensor& self = asked[-1].toTensor();
  if (!meta_of(self)) return false;
  const auto integers = [](const c10::IValue& list_of) {
    Shape all;
    for (const c10::IValue& n : list_of.toListRef()) all.push_back(n.toInt());
    return all;
  };
  const Shape size = integers(asked[0]), stride = integers(asked[1]);
  const auto from = asked[2].isNone() ? std::nullopt : std::optional(asked[2].toInt());
  if (!same_elements(self.sizes().vec(), self.strides().vec(), self.storage_offset(), size, stride,
                     from))
    return false;
  {
    const BelowAutogradGuard guard;
    self.as_strided_(size, stride, from);
  }
  stack->resize(stack->size() - 3);
  return true;
}

// A view of what was gathered lies in memory of its own, to which strides of the global memory say
// nothing.
bool require_global_memory(torch::jit::Stack* stack, std::size_t count) {
  const at::Tensor& self = (*stack)[stack->size() - count].toTensor();
  const ShardMeta* meta = meta_of(self);
  if (!meta || !meta->copy || !meta->spec().is_replicated()) return false;
  bool same = stack->back().isNone() || meta->local.storage_offset() == meta->layout->offset;
  for (std::int64_t d = 0; d < self.dim(); ++d)
    same &= self.size(d) == 1 || meta->local.stride(d) == meta->layout->strides[d];
  if (!same)
    throw ShardingError(concat("as_strided of a view of ", meta_of(meta->copy->base)->spec(),
                               " that had to be gathered: strides have no meaning in its memory. "
                               "Use slices, permute and expand, or clone it first."));
  return false;
}

// For each dim of the result the sharded dim of the tensor that it is, or -1, if all others lie
// within one dense row of the sharded ones: then each rank takes the view of its own rows. nullopt
// if they do not.
std::optional<std::vector<int>> within_rows(const TensorInfo& t, const Shape& size,
                                            const Shape& stride, std::int64_t skipped) {
  if (size.size() != stride.size() || skipped < 0 || t.spec.numel() == 0) return std::nullopt;
  std::vector<int> of(size.size(), -1);
  std::int64_t row = 1, last = skipped;
  for (int d = 0; d < t.spec.dims(); ++d) row *= t.spec.is_sharded(d) ? 1 : t.spec.shape()[d];
  for (int d = 0; d < t.spec.dims(); ++d) {
    if (!t.spec.is_sharded(d)) {
      if (t.spec.shape()[d] > 1 && t.strides[d] >= row) return std::nullopt;
      continue;
    }
    std::size_t k = 0;
    while (k < size.size() &&
           (of[k] >= 0 || size[k] != t.spec.shape()[d] || stride[k] != t.strides[d]))
      ++k;
    if (k == size.size() || t.strides[d] < row) return std::nullopt;
    of[k] = d;
  }
  for (std::size_t k = 0; k < size.size(); ++k) {
    if (stride[k] < 0 || size[k] == 0) return std::nullopt;
    if (of[k] < 0) last += (size[k] - 1) * stride[k];
  }
  return last < row ? std::optional(of) : std::nullopt;
}

Plan as_strided_within_rows(const TensorInfo& t, const std::vector<int>& of, const Shape& size,
                            const Shape& stride, std::int64_t skipped) {
  Plan plan;
  const ShardSpec out = mapped_spec(t.spec, size, of, true);
  plan.outputs = {{out, stride}};
  plan.local = [=, shape = t.spec.shape(), strides = t.strides, sizes = out.local_shape()](
                   const c10::OperatorHandle&, torch::jit::Stack arguments) {
    const at::Tensor& local = arguments[0].toTensor();
    Shape own = stride;
    for (std::size_t k = 0; k < of.size(); ++k)
      if (of[k] >= 0) own[k] = local.stride(of[k]);
    for (std::size_t d = 0; d < shape.size(); ++d) {
      const bool sharded = std::ranges::find(of, static_cast<int>(d)) != of.end();
      if (!sharded && shape[d] > 1 && local.numel() > 0 &&
          local.stride(static_cast<std::int64_t>(d)) != strides[d])
        throw ShardingError("as_strided: this rank's rows lie in another order: clone it first");
    }
    return torch::jit::Stack{local.as_strided(sizes, own, local.storage_offset() + skipped)};
  };
  return plan;
}

Plan as_strided(const OpCall& call) {
  const TensorInfo& t = call.tensor(0);
  const auto from =
      call.has("storage_offset") ? std::optional(call.integer("storage_offset")) : std::nullopt;
  const Shape size = call.integers("size"), stride = call.integers("stride");
  if (!same_elements(t.spec.shape(), t.strides, t.offset, size, stride, from)) {
    const std::int64_t skipped = from.value_or(t.offset) - t.offset;
    if (const auto of = within_rows(t, size, stride, skipped))
      return as_strided_within_rows(t, *of, size, stride, skipped);
    throw ShardingError(concat("as_strided of a sharded tensor ", t.spec, " with size ", list(size),
                               " and stride ", list(stride),
                               ": strides have no meaning across ranks. Use slices, permute and "
                               "expand, or redistribute to Replicate first."));
  }
  Plan plan;
  plan.outputs = {{t.spec}};
  plan.local = [](const c10::OperatorHandle&, torch::jit::Stack arguments) {
    return torch::jit::Stack{arguments[0].toTensor().alias()};
  };
  return plan;
}

const bool registered = [] {
  for (const char* op : {"aten::alias", "aten::detach", "aten::_conj", "aten::_conj_physical"})
    register_rule(op, same);
  register_rule("aten::_neg_view", [](const OpCall& call) {
    return linear_view(call, identity(call.tensor(0).spec.dims()));
  });
  register_rule("aten::view_as_real", [](const OpCall& call) {
    auto from = identity(call.tensor(0).spec.dims());
    from.push_back(-1);
    return linear_view(call, from);
  });
  register_rule("aten::view_as_complex", [](const OpCall& call) {
    const int n = call.tensor(0).spec.dims();
    return linear_view(call, identity(n - 1), {n - 1});
  });
  for (const char* op : {"aten::t", "aten::transpose"}) register_rule(op, transpose);
  register_rule("aten::permute", permute);
  register_rule("aten::unsqueeze", unsqueeze);
  register_rule("aten::squeeze", squeeze);
  register_rule("aten::expand", expand);
  register_rule("aten::slice.Tensor", slice);
  for (const char* op : {"aten::split.Tensor", "aten::split_with_sizes",
                         "aten::unsafe_split.Tensor", "aten::unsafe_split_with_sizes"})
    register_rule(op, split);
  register_rule("aten::select.int", select);
  register_rule("aten::unbind.int", unbind);
  for (const char* op : {"aten::diagonal", "aten::diagonal_copy"}) register_rule(op, diagonal);
  register_rule("aten::unfold", unfold);
  for (const char* op : {"aten::view", "aten::_unsafe_view"}) register_rule(op, view);
  // Its strides are those of the global memory, which a row that was gathered has not.
  register_rule("aten::_reshape_alias", view, {.for_replicated = true});
  register_rule("aten::view.dtype", view_dtype);
  register_rule("aten::as_strided", as_strided);
  register_above("aten::as_strided_", same_elements_in_place);
  for (const char* op : {"aten::as_strided", "aten::as_strided_copy"})
    register_above(op, [](torch::jit::Stack* stack) { return require_global_memory(stack, 4); });
  register_above("aten::as_strided_scatter",
                 [](torch::jit::Stack* stack) { return require_global_memory(stack, 5); });
  register_above("aten::select.int", select_row);
  // What forward-mode differentiation asks of a value and its tangent.
  for (const char* op : {"is_same_size", "_has_same_storage_numel"})
    register_decomposition(op, [](const at::Tensor& self, const at::Tensor& other) {
      return self.sizes() == other.sizes();
    });
  return true;
}();

}  // namespace

}  // namespace tessera::detail::views_rules

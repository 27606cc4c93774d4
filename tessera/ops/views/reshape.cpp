// view: each rank takes the view of its local, whose shards pass to dims of the result where that
// is possible.

#include <numeric>

#include "tessera/ops/rules/detail/rules.h"
#include "tessera/ops/rules/detail/windowed.h"
#include "tessera/ops/views/detail/view_parts.h"

namespace tessera::detail::views_rules {
namespace {

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
    while (a != b)
      if (a < b ? i < in.size() : o >= out.size() && i < in.size())
        take_in();
      else if (o < out.size())
        take_out();
      else
        break;
    // Trailing dims of size 1 belong to no group.
    if (i == in.size())
      while (o < out.size() && out[o] == 1) take_out();
    if (o == out.size())
      while (i < in.size() && in[i] == 1) take_in();
    all.push_back(std::move(g));
  }
  return all;
}

int first_wide(const std::vector<int>& dims, const Shape& shape) {
  for (const int d : dims)
    if (shape[d] != 1) return d;
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
  std::ranges::sort(axes);
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
  return {std::move(axes), Partition(sizes)};
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
  auto dims = spec.sharding().dims();
  for (const auto& [d, sharding] : given) {
    for (const int axis : sharding.axes) placements[axis] = Shard(d);
    dims[d] = sharding;
  }
  return make_spec(context_of(spec), spec.shape(), std::move(placements), std::move(dims));
}

// How the input of a view is to be sharded: where its shards do not pass to dims of the result they
// are moved between ranks, if another sharding does, rather than gathered.
struct Reshaping {
  Reshaping(const TensorInfo& t, const Shape& to)
      : spec(t.spec),
        shape(t.spec.shape()),
        target(to),
        mesh(context_of(t.spec)->sizes),
        data(t.spec.dims() > 1 && !t.parameter),
        from(to.size(), -1) {
    if (t.spec.numel() == 0)
      keep_unchanged();
    else
      for (const Group& g : groups(shape, target)) pass(g);
  }

  // No elements: only dims that stay as they are keep their sharding.
  void keep_unchanged() {
    for (int d = 0; d < spec.dims(); ++d) {
      if (d < static_cast<int>(target.size()) && target[d] == shape[d] &&
          std::equal(shape.begin(), shape.begin() + d, target.begin())) {
        from[d] = d;
      } else {
        whole.insert(d);
      }
    }
  }

  // The sharding of the group's dims, to the dims of the result.
  void pass(const Group& g) {
    const int a = first_wide(g.in, shape), b = first_wide(g.out, target);
    std::vector<DimSharding> ones;
    for (const int d : g.in) {
      if (d == a || !spec.is_sharded(d)) continue;
      if (shape[d] == 1 && b >= 0)
        ones.push_back(spec.dim(d));
      else
        shard_instead(d, a);
    }
    if (a < 0) return;
    if (!spec.is_sharded(a)) {
      if (!ones.empty()) joined.emplace_back(b, held_with({}, ones, target[b], mesh));
      return;
    }
    if (b < 0) {
      whole.insert(a);
      return;
    }
    std::int64_t inner_in = 1, inner_out = 1;
    for (const int d : g.in) inner_in *= d == a ? 1 : shape[d];
    for (const int d : g.out) inner_out *= d == b ? 1 : target[d];
    const auto fits = [&](std::int64_t n) { return n * inner_in % inner_out == 0; };
    if (!std::ranges::all_of(spec.dim(a).partition.sizes(), fits))
      move_boundaries(a, inner_out / std::gcd(inner_in, inner_out));
    DimSharding own;
    if (spec.is_sharded(a)) {
      own = {spec.dim(a).axes, with_boundaries(spec.dim(a).partition, [&](std::int64_t end) {
               return end * inner_in / inner_out;
             })};
    }
    if (!ones.empty()) {
      joined.emplace_back(b, held_with(own, ones, target[b], mesh));
    } else if (own.axes.empty()) {
      return;
    } else if (const WithOne apart(own, mesh);
               data && g.out.front() != b && !apart.one.axes.empty()) {
      joined.emplace_back(g.out.front(), apart.one);
      if (!apart.rest.axes.empty()) joined.emplace_back(b, apart.rest);
    } else {
      from[b] = a;
      parts.emplace_back(b, own.partition);
    }
  }

  // Dim `a`, the first of its group, with boundaries between `rows` of its rows.
  void move_boundaries(int a, std::int64_t rows) {
    const Partition& held = spec.dim(a).partition;
    const auto units = in_whole_units(held, held.extent() / rows, rows);
    spec = units ? with_parts(spec, {{a, scaled(*units, rows)}}) : with_unsharded_dims(spec, {a});
  }

  // Dim `d`, merged behind dim `a`: its axis shards `a`, if that has two elements or more.
  // If these are fewer than the ranks some have none: less moves, and less is computed.
  void shard_instead(int d, int a) {
    const std::vector<int> axes = spec.dim(d).axes;
    const bool room = axes.size() == 1 && !spec.is_sharded(a) && spec.shape()[a] >= 2;
    spec = with_unsharded_dims(spec, {d});
    if (room) spec = spec.with_placement(axes[0], Shard(a));
  }

  ShardSpec spec;
  const Shape &shape, &target;
  const std::vector<int>& mesh;
  // What has one dim, or is a parameter, gets dims of size 1 to be broadcast along them.
  const bool data;
  // For mapped_spec(), and dims of the input that no rank may have a shard of.
  std::vector<int> from;
  std::vector<std::pair<int, Partition>> parts;
  std::set<int> whole;
  // Dims of the result that are sharded otherwise.
  std::vector<std::pair<int, DimSharding>> joined;
};

Plan view(const OpCall& call) {
  const Shape& target = outputs_of(call)[0].shape;
  const Reshaping as(call.tensor(0), target);
  Source source(call, as.spec, as.whole);
  const ShardSpec out =
      with_dims(mapped_spec(source.spec, target, as.from, true, as.parts), as.joined);
  source.plan.outputs = {{out}};
  if (!source.plan.view_copied &&
      (call.name() == "aten::view" || call.name() == "aten::_unsafe_view")) {
    source.plan.arguments = {{1, out.local_shape()}};
    return std::move(source.plan);
  }
  // What was gathered for an operator that returns no view may be in any memory order.
  const bool alias = call.schema().returns()[0].alias_info() != nullptr;
  source.plan.local = [local = out.local_shape(), alias](const OperatorHandle&, Stack arguments) {
    const at::Tensor& t = arguments[0].toTensor();
    return Stack{alias ? t.view(local) : t.reshape(local)};
  };
  return std::move(source.plan);
}

const AtStart registered_reshape([] {
  register_rules({"aten::view", "aten::_unsafe_view"}, view);
  // Its strides are those of the global memory, which a row that was gathered has not.
  register_rule("aten::_reshape_alias", view, {.for_replicated = true});
});

}  // namespace
}  // namespace tessera::detail::views_rules

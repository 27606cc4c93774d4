// Rearrangements of elements: flipped, rolled, repeated, put on diagonals or dropped beside them.

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <cmath>

#include "tessera/base/internal/vector.h"
#include "tessera/ops/halo/halo.h"
#include "tessera/ops/rules/detail/rules.h"
#include "tessera/ops/rules/detail/windowed.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/promote.h"

namespace tessera::detail::flip_roll_repeat_rules {
namespace {

// The source of each dim's elements: roll shifts them around, flip reverses them.
struct Rearranging {
  explicit Rearranging(const OpCall& call) : rolls(call.argument("shifts") >= 0) {
    const Shape& shape = call.tensor(0).spec.shape();
    const int n = static_cast<int>(shape.size());
    shift.assign(n, 0);
    turned.assign(n, false);
    const Shape dims = call.integers("dims"), by = rolls ? call.integers("shifts") : Shape{};
    flattened = rolls && dims.empty();
    if (rolls && !flattened && by.size() != dims.size())
      throw InvalidArgument("aten::roll by ", by.size(), " shifts in ", dims.size(),
                            " dims: give one shift per dim");
    for (std::size_t i = 0; i < dims.size(); ++i) {
      const auto d = normal_dim(dims[i], n);
      if (n == 0) continue;
      if (rolls && shape[d] > 0) shift[d] = ((shift[d] + by[i]) % shape[d] + shape[d]) % shape[d];
      if (rolls) continue;
      if (turned[d])
        throw InvalidArgument("aten::flip: dim ", d, " is a duplicate in dims ", list(dims));
      turned[d] = true;
    }
  }

  /// True if elements of dim d leave the shard of the rank that has them.
  bool moves(const ShardSpec& spec, int d) const {
    return is_distributed(spec, d) && (turned[d] || shift[d] != 0);
  }

  bool rolls, flattened;
  Shape shift;
  std::vector<bool> turned;
};

// Along a sharded dim each rank receives what its shard of the result consists of, from the ranks
// that have it, and nothing else moves.
Plan rearranged(const OpCall& call) {
  const TensorInfo& x = call.tensor(0);
  const int n = x.spec.dims();
  const Rearranging r(call);
  const Labels labels = r.flattened ? unsharded_labels(x) : all_labels(n);
  LabelProblem p(call, {labels}, {labels}, {x.spec.shape()});
  p.linear_in = {0};
  Plan plan = solve(p);
  // flip keeps a dense memory order, roll returns row-major.
  if (!r.rolls && is_dense(x.spec.shape(), x.strides))
    plan.outputs[0].strides = strides_in_order(x.spec.shape(), x.strides);
  const ShardSpec field = without_partial(*plan.inputs[0]);
  bool moves = false;
  for (int d = 0; d < n; ++d) moves |= r.moves(field, d);
  if (!moves) {
    // A shift by the global extent of a sharded dim does nothing; one by as many rows as the shard
    // has does.
    if (r.rolls && !r.flattened && n > 0) {
      const Shape every = numbers_below<std::int64_t>(n);
      plan.local = [shift = r.shift, every](const OperatorHandle&, Stack a) {
        return Stack{a[0].toTensor().roll(shift, every)};
      };
    }
    return plan;
  }
  const Halo halo(field, std::vector<Edge>(n, Edge::circular),
                  [r, shape = field.shape(), to = field.sharding()](int position) {
                    Box box = to.box(position);
                    if (volume(box) == 0) return Box(box.size());
                    for (std::size_t d = 0; d < box.size(); ++d) {
                      if (r.turned[d]) box[d] = {shape[d] - box[d].end, shape[d] - box[d].begin};
                      box[d] = box[d].shifted(-r.shift[d]);
                    }
                    return box;
                  });
  Shape turned;
  for (int d = 0; d < n; ++d)
    if (r.turned[d]) turned.push_back(d);
  plan.local = [halo, turned, local = field.local_shape()](const OperatorHandle&, Stack a) {
    const at::Tensor t = halo.exchange(a[0].toTensor()).view(local);
    return Stack{turned.empty() ? t : t.flip(turned)};
  };
  return plan;
}

// Repeated dims must not be sharded.
Plan repeat(const OpCall& call) {
  const Shape times = call.integers("repeats"), &shape = call.tensor(0).spec.shape();
  if (times.size() < shape.size())
    throw InvalidArgument("aten::repeat of a tensor of ", shape.size(), " dims ", times.size(),
                          " numbers of repeats: give one per dim or more");
  const std::size_t lead = times.size() - shape.size();
  Labels in(shape.size(), kUnsharded), out(times.size(), kUnsharded);
  Shape result = times;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    result[lead + d] *= shape[d];
    if (times[lead + d] == 1) in[d] = out[lead + d] = static_cast<int>(d);
  }
  return solve({call, {in}, {out}, {result}});
}

// tril, triu: the start of a rank's rows and columns shifts its diagonal.
Plan triangle(const OpCall& call) {
  const int n = call.tensor(0).spec.dims();
  const Shape& shape = call.tensor(0).spec.shape();
  LabelProblem p(call, {all_labels(n)}, {all_labels(n)}, {shape});
  p.linear_in = {0};
  Plan plan = solve(p);
  if (n < 2) return plan;
  const auto& offset = plan.inputs[0]->local_offset();
  // Beyond the corners nothing changes; far beyond, the sum would overflow.
  const std::int64_t corners = shape[n - 2] + shape[n - 1],
                     diagonal = std::clamp(call.integer("diagonal"), -corners, corners);
  plan.arguments = {{call.argument("diagonal"), diagonal + offset[n - 2] - offset[n - 1]}};
  return plan;
}

// The last dim becomes the diagonal of two.
Plan diag_embed(const OpCall& call) {
  const TensorInfo& x = call.tensor(0);
  if (x.spec.dims() == 0) throw InvalidArgument("aten::diag_embed of a tensor without dims");
  const int n = x.spec.dims() + 1;
  const auto a = normal_dim(call.integer("dim1"), n), b = normal_dim(call.integer("dim2"), n);
  const std::int64_t length = x.spec.shape().back() + std::abs(call.integer("offset"));
  Labels in = all_labels(n - 1), out;
  in.back() = kUnsharded;
  Shape shape;
  for (int d = 0, next = 0; d < n; ++d) {
    const bool diagonal = d == a || d == b;
    shape.push_back(diagonal ? length : x.spec.shape()[next]);
    out.push_back(diagonal ? kUnsharded : next++);
  }
  LabelProblem p(call, {in}, {out}, {shape});
  p.linear_in = {0};
  return solve(p);
}

at::Tensor rot90(const at::Tensor& self, std::int64_t k, at::IntArrayRef dims) {
  TORCH_CHECK(dims.size() == 2, "expected total rotation dims == 2, but got dims = ", dims.size());
  const auto n = self.dim();
  TORCH_CHECK(n >= 2, "rot90: expected a tensor of at least 2 dims, but got ", n);
  for (const auto d : dims)
    TORCH_CHECK_INDEX(d >= -n && d < n, "rot90: dim ", d, " of a tensor of ", n, " dims");
  TORCH_CHECK((dims[0] + n) % n != (dims[1] + n) % n, "rot90: the plane's two dims are both ",
              dims[0]);
  const auto turns = ((k % 4) + 4) % 4;
  if (turns == 0) return self.clone(at::MemoryFormat::Contiguous);
  if (turns == 2) return self.flip(dims);
  return self.flip({dims[turns == 1 ? 1 : 0]}).transpose_(dims[0], dims[1]);
}

// libtorch writes through other strides; here by a mask, of which each rank makes its shard.
at::Tensor& fill_diagonal(at::Tensor& self, const at::Scalar& value, bool wrap) {
  const std::int64_t n = self.dim();
  TORCH_CHECK(n >= 2, "fill_diagonal_: expected a tensor of at least 2 dims, but got ", n);
  TORCH_CHECK(n == 2 || std::ranges::all_of(
                            self.sizes(), [&](std::int64_t size) { return size == self.size(0); }),
              "fill_diagonal_: of a tensor of more than 2 dims all sizes must be equal, they are ",
              self.sizes());
  const auto options = meta_or_throw(self).local.options().dtype(at::kLong);
  const auto context = context_of(meta_or_throw(self).spec());
  const auto along = [&](std::int64_t d) {
    return as_dim(at::arange(self.size(d), options), d, n);
  };
  const at::Tensor zero = at::zeros_like(self.detach(), options),
                   rows = zero + promote(wrap && n == 2 ? along(0) % (self.size(1) + 1) : along(0),
                                         context);
  at::Tensor mask = rows.eq(promote(along(1), context));
  for (std::int64_t d = 2; d < n; ++d) mask.logical_and_(rows.eq(promote(along(d), context)));
  return self.masked_fill_(mask, value);
}

const AtStart registered([] {
  register_rules({"aten::flip", "aten::roll"}, rearranged);
  register_rule("aten::repeat", repeat);
  register_rules({"aten::tril", "aten::triu"}, triangle);
  register_rule("aten::diag_embed", diag_embed);
  register_decomposition("rot90", rot90);
  register_decomposition("fill_diagonal_", fill_diagonal);
});

}  // namespace
}  // namespace tessera::detail::flip_roll_repeat_rules

// Fourier transforms. A dim that is not sharded is transformed where it is. One that is sharded is
// first gathered by an all-to-all, in which another dim is sharded instead ("pencils"): so the data
// moves once per sharded dim, and no rank ever holds more than its share. The result stays as the
// last all-to-all left it; the inverse transform, which takes the dims in the opposite order,
// brings it back.

#include <ATen/ops/_fft_c2c.h>
#include <ATen/ops/_fft_c2r.h>
#include <ATen/ops/_fft_r2c.h>

#include <algorithm>

#include "tessera/base/text.h"
#include "tessera/ops/rules/labels.h"
#include "tessera/tensor/dispatch/execute.h"
#include "tessera/tensor/dispatch/redistribute.h"
#include "tessera/tensor/dispatch/rule.h"
#include "tessera/tensor/errors.h"
#include "tessera/tensor/spec/mesh_context.h"

namespace tessera::detail::fft_rules {

namespace {

using Shape = std::vector<std::int64_t>;

enum class Kind : unsigned char { c2c, r2c, c2r };

struct Step {
  enum class What : unsigned char { move, complex, from_real, to_real } what;
  Shape dims;
  ShardSpec from, to;
};

class Stages {
 public:
  Stages(const ShardSpec& start, Shape dims) : now_(start), left_(std::move(dims)) {}

  // Transforms every dim but `later`, in as few moves as there are sharded ones among them.
  void complex(std::int64_t later) {
    const auto remaining = [&] {
      Shape some;
      for (const auto d : left_) {
        if (d != later) some.push_back(d);
      }
      return some;
    };
    while (!remaining().empty()) {
      Shape ready;
      for (const auto d : remaining()) {
        if (!now_.is_sharded(static_cast<int>(d))) ready.push_back(d);
      }
      if (ready.empty()) {
        gather_dim(static_cast<int>(remaining()[0]));
        continue;
      }
      steps.push_back({Step::What::complex, ready, now_, now_});
      std::erase_if(
          left_, [&](auto d) { return std::find(ready.begin(), ready.end(), d) != ready.end(); });
    }
  }

  void last(std::int64_t dim, Step::What what, std::int64_t extent) {
    if (now_.is_sharded(static_cast<int>(dim))) gather_dim(static_cast<int>(dim));
    Shape shape = now_.shape();
    shape[dim] = extent;
    std::vector<int> from;
    for (int d = 0; d < now_.dims(); ++d) from.push_back(d == static_cast<int>(dim) ? -1 : d);
    const ShardSpec to = mapped_spec(now_, shape, from, false);
    steps.push_back({what, {dim}, now_, to});
    now_ = to;
    std::erase(left_, dim);
  }

  const ShardSpec& now() const { return now_; }
  std::vector<Step> steps;

 private:
  // Another dim is sharded instead: one that will not be transformed any more, if there is one,
  // that is not sharded yet, and long.
  void gather_dim(int dim) {
    int best = -1;
    double most = -1;
    for (int d = 0; d < now_.dims(); ++d) {
      if (d == dim) continue;
      const bool done = std::find(left_.begin(), left_.end(), d) == left_.end();
      const double merit = (done ? 2e18 : 0) + (now_.is_sharded(d) ? 0 : 1e18) +
                           static_cast<double>(now_.shape()[d]);
      if (merit > most) {
        most = merit;
        best = d;
      }
    }
    auto placements = now_.placements();
    for (Placement& p : placements) {
      if (p.is_shard(dim)) p = best < 0 ? Replicate() : Shard(best);
    }
    const ShardSpec to = now_.with_placements(placements);
    steps.push_back({Step::What::move, {}, now_, to});
    now_ = to;
  }

  ShardSpec now_;
  Shape left_;
};

Plan transform(const OpCall& call, Kind kind) {
  const TensorInfo& x = call.tensor(0);
  const int n = x.spec.dims();
  Shape dims;
  for (const auto d : call.integers("dim")) dims.push_back(normal_dim(d, n));
  if (dims.empty())
    throw ShardingError(concat(call.name(), " of ", x.spec, " over no dims has no rule"));
  const std::int64_t last = dims.back();
  const bool onesided = kind == Kind::r2c && call.boolean("onesided");
  const std::int64_t before = x.spec.shape()[last], extent = kind == Kind::c2r
                                                                 ? call.integer("last_dim_size")
                                                             : onesided ? before / 2 + 1
                                                                        : before;
  Stages stages(without_partial(x.spec), dims);
  bool forward = kind == Kind::r2c;
  if (kind == Kind::c2c) {
    forward = call.boolean("forward");
    stages.complex(-1);
  } else if (kind == Kind::r2c) {
    stages.last(last, Step::What::from_real, extent);
    stages.complex(-1);
  } else {
    stages.complex(last);
    stages.last(last, Step::What::to_real, extent);
  }
  Plan plan;
  plan.inputs = {without_partial(x.spec)};
  plan.outputs = {{stages.now()}};
  plan.local = [steps = std::move(stages.steps), forward, onesided, extent,
                norm = call.integer("normalization"), name = call.name(),
                context = context_of(x.spec)](const c10::OperatorHandle&, torch::jit::Stack a) {
    at::Tensor t = a[0].toTensor();
    std::vector<ImplicitMove> moves;
    for (const Step& s : steps) {
      if (s.what == Step::What::move) moves.push_back({"self", s.from, s.to, t.element_size()});
    }
    if (!moves.empty()) check_implicit_moves(name, moves, *context);
    for (const Step& s : steps) {
      if (s.what == Step::What::move) {
        t = redistribute_local(t, s.from, s.to);
      } else if (s.to.local_numel() == 0) {
        // The kernels need at least one signal.
        const auto dtype = s.what == Step::What::to_real ? c10::toRealValueType(t.scalar_type())
                                                         : c10::toComplexType(t.scalar_type());
        t = t.new_empty(s.to.local_shape(), dtype);
      } else if (s.what == Step::What::complex) {
        t = at::_fft_c2c(t, s.dims, norm, forward);
      } else if (s.what == Step::What::from_real) {
        t = at::_fft_r2c(t, s.dims, norm, onesided);
      } else {
        t = at::_fft_c2r(t, s.dims, norm, extent);
      }
    }
    return torch::jit::Stack{t};
  };
  return plan;
}

const bool registered = [] {
  register_rule("aten::_fft_c2c", [](const OpCall& c) { return transform(c, Kind::c2c); });
  register_rule("aten::_fft_r2c", [](const OpCall& c) { return transform(c, Kind::r2c); });
  register_rule("aten::_fft_c2r", [](const OpCall& c) { return transform(c, Kind::c2r); });
  return true;
}();

}  // namespace

}  // namespace tessera::detail::fft_rules

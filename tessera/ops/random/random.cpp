// Random numbers: element i of a draw is a function of seed, draw and i's global index. So they are
// the same for any placement and number of ranks. Plain tensors use libtorch's generator.

#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>
#include <functional>
#include <mutex>
#include <numbers>
#include <string>
#include <tuple>

#include "tessera/comm/agree/agree.h"
#include "tessera/comm/job/internal/failures.h"
#include "tessera/ops/random/detail/draws.h"
#include "tessera/ops/rules/detail/rules.h"
#include "tessera/tensor/spec/internal/boxes.h"
#include "tessera/tensor/spec/internal/rank_state.h"

namespace tessera::detail {

namespace random_rules {
namespace {

// A draw that one rank alone has made shifts its numbers for ever. With CheckLevel::collective the
// ranks' positions are compared.
void require_in_step(const MeshContext& context, std::uint64_t seed, std::uint64_t stream) {
  if (context.mesh.mesh().size() < 2) return;
  const Group all = context.mesh.all();
  if (all.check_level() != CheckLevel::collective) return;
  const auto stands = agree::all<std::string>(
      all, "random numbers", [&] { return concat("draw ", stream, " from seed ", seed); },
      {.name = "random numbers"});
  for (std::size_t r = 1; r < stands.size(); ++r)
    if (stands[r] != stands[0])
      throw MismatchError("the random numbers of sharded tensors have come apart: rank ",
                          all.ranks()[0], " makes ", stands[0], ", rank ", all.ranks()[r], " ",
                          stands[r],
                          ". Draw on all ranks alike, or set_random_state() on all of them");
}

// Where one rank failed alone, others had perhaps drawn further: at the first draw afterwards the
// ranks go on from the state of the one that had drawn most.
void meet_after_failures(const MeshContext& context) {
  const std::uint64_t failures = failures_of(context.mesh);
  if (failures == 0) return;
  const std::vector<int>& ranks = context.mesh.mesh().ranks();
  RankState& state = *context.state;
  std::pair<std::uint64_t, std::uint64_t> furthest;  // stream and seed
  {
    const std::lock_guard lock(state.mutex);
    if (const auto met = state.met.find(ranks); met != state.met.end() && met->second == failures)
      return;
    furthest = {state.stream, state.seed};
  }
  using Position = std::array<std::uint64_t, 2>;  // stream and seed
  for (const auto& [stream, seed] :
       agree::all<Position>(context.mesh.all(), "random numbers after a failure",
                            [&] { return Position{furthest.first, furthest.second}; },
                            {.name = "random numbers after a failure"}))
    furthest = std::max(furthest, std::pair(stream, seed));
  const std::lock_guard lock(state.mutex);
  std::tie(state.stream, state.seed) = furthest;
  state.met[ranks] = failures;
}

}  // namespace
}  // namespace random_rules

DrawPosition next_draw(const MeshContext& context) {
  random_rules::meet_after_failures(context);
  DrawPosition draw;
  {
    const std::lock_guard lock(context.state->mutex);
    draw = {context.state->seed, context.state->stream++};
  }
  random_rules::require_in_step(context, draw.seed, draw.stream);
  return draw;
}

void refuse_generator(const std::string& op, const std::optional<at::Generator>& generator) {
  if (generator && generator->defined())
    throw ShardingError(op,
                        ": a generator is given, but sharded tensors draw by global index: "
                        "leave it out and use tessera::manual_seed");
}

at::Tensor dropout_mask(const DrawPosition& draw, const std::vector<std::int64_t>& global,
                        const std::vector<std::int64_t>& offset,
                        const std::vector<std::int64_t>& local, double p) {
  at::Tensor mask = at::empty(local, at::kBool);
  bool* data = mask.mutable_data_ptr<bool>();
  each_element(draw, global, offset, local,
               [&](std::int64_t i, const Words& w) { data[i] = unit_double(w[0], w[1]) < 1 - p; });
  return mask;
}

namespace random_rules {
namespace {

// One draw: value(words) of each local element of a spec, as a row-major double tensor on the CPU.
template <class Value>
at::Tensor doubles(const ShardSpec& spec, Value value) {
  at::Tensor t = at::empty(spec.local_shape(), at::kDouble);
  double* data = t.mutable_data_ptr<double>();
  each_element(next_draw(*context_of(spec)), spec.shape(), spec.local_offset(), spec.local_shape(),
               [&](std::int64_t i, const Words& w) { data[i] = value(w); });
  return t;
}

// Rounded down to the dtype's own grid, so that 1 is never reached.
double unit(const Words& w, at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return unit_double(w[0], w[1]);
    case at::kHalf:
      return static_cast<double>(w[0] >> 21) * 0x1p-11;
    case at::kBFloat16:
      return static_cast<double>(w[0] >> 24) * 0x1p-8;
    default:
      return static_cast<double>(w[0] >> 8) * 0x1p-24;
  }
}

// The Box-Muller transform (1958).
double normal(const Words& w) {
  const double u = 1.0 - unit_double(w[0], w[1]), v = unit_double(w[2], w[3]);
  return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
}

// Checks what plain libtorch refuses, on every rank before anything is drawn.
using Check = std::function<void(const OpCall&)>;

[[noreturn]] void refuse(const OpCall& call, const std::string& what) {
  throw InvalidArgument(call.name(), what);
}
at::ScalarType drawn_type(const OpCall& call) {
  if (call.argument("dtype") >= 0 && call.has("dtype")) return call.value("dtype").toScalarType();
  const auto* out = call.outputs();
  return out && !out->empty() ? (*out)[0].dtype : call.tensor(0).dtype;
}
// Checks the dtype of what is drawn.
void require_floating(const OpCall& call) {
  const at::ScalarType type = drawn_type(call);
  if (!at::isFloatingType(type))
    refuse(call, concat(" into ", c10::toString(type), " values: give floating-point ones"));
}
void check_uniform(const OpCall& call) {
  require_floating(call);
  const double from = call.number("from"), to = call.number("to");
  if (!(from <= to)) refuse(call, concat(" from ", from, " to ", to, ": the range is empty"));
}
// Checks a number of a call, and, unless `any_type`, the dtype of what is drawn.
struct Within {
  const char *argument, *called;
  bool (*fits)(double);
  const char* range;
  bool any_type = false;

  void operator()(const OpCall& call) const {
    if (!any_type) require_floating(call);
    if (const double value = call.number(argument); !fits(value))
      refuse(call, concat(" with ", called, " ", value, ": ", range));
  }
};
bool positive(double value) { return value > 0; }
const Within check_probability{"p", "probability", [](double p) { return p >= 0 && p <= 1; },
                               "0 to 1", true};
void check_range(const OpCall& call) {
  const at::ScalarType type = drawn_type(call);
  if (at::isComplexType(type))
    refuse(call, concat(" into ", c10::toString(type), " values: give real ones"));
  const char* low_name = call.argument("low") >= 0 ? "low" : "from";
  const char* high_name = call.argument("high") >= 0 ? "high" : "to";
  const double low = call.argument(low_name) >= 0 ? call.number(low_name) : 0;
  if (!call.has(high_name)) return;
  if (const double high = call.number(high_name); !(low < high))
    refuse(call, concat(" from ", low, " to ", high, ": the range is empty"));
  else if (type == at::kBool && (low < 0 || high > 2))
    refuse(call, concat(" from ", low, " to ", high, " into booleans: 0 to 2 at most"));
}
// The probabilities are broadcast to the target.
void check_shape_of_probabilities(const OpCall& call) {
  const TensorInfo* p = call.find("p");
  if (p && !at::is_expandable_to(p->spec.shape(), call.tensor(0).spec.shape()))
    refuse(call, concat(" with probabilities of shape ", list(p->spec.shape()), " into ",
                        list(call.tensor(0).spec.shape())));
}
void check_probabilities_type(const OpCall& call) {
  if (!at::isFloatingType(call.tensor(0).dtype))
    refuse(call, concat(" of ", c10::toString(call.tensor(0).dtype),
                        " probabilities: give floating-point ones"));
}

using Draw = std::function<at::Tensor(const ShardSpec&, const Stack&, at::ScalarType)>;

// rand_like(x), bernoulli(x): a new tensor with the input's placements; x.uniform_(...): the
// target's values are replaced.
Plan drawn(const OpCall& call, const Draw& draw) {
  if (call.argument("generator") >= 0)
    refuse_generator(call.name(), call.value("generator").toOptional<at::Generator>());
  // a partial target is reduced first, that is, its ranks are given the same values
  const ShardSpec spec = without_partial(call.tensor(0).spec);
  Plan plan{.inputs = {spec}, .outputs = {{spec}}};
  for (std::size_t i = 1; i < call.tensors().size(); ++i)
    plan.inputs.emplace_back(replicated(call.tensor(i).spec));
  plan.local = [spec, draw, type = drawn_type(call), writes = call.in_place()](
                   const OperatorHandle&, Stack a) {
    const at::Tensor t = a[0].toTensor(), values = draw(spec, a, type);
    return Stack{writes ? t.copy_(values) : values.to(t.options().dtype(type))};
  };
  return plan;
}

at::Tensor uniform(const ShardSpec& spec, const Stack& a, at::ScalarType type) {
  const double from = a[1].toDouble(), to = a[2].toDouble();
  return doubles(spec, [&](const Words& w) { return from + (to - from) * unit(w, type); });
}

// A draw by the call's first two numbers, or by its first one.
template <class Value>
Draw by_two(Value value) {
  return [value](const ShardSpec& spec, const Stack& a, at::ScalarType) {
    const double first = a[1].toDouble(), second = a[2].toDouble();
    return doubles(spec, [&](const Words& w) { return value(first, second, w); });
  };
}
template <class Value>
Draw by_one(Value value) {
  return [value](const ShardSpec& spec, const Stack& a, at::ScalarType) {
    const double number = a[1].toDouble();
    return doubles(spec, [&](const Words& w) { return value(number, w); });
  };
}

at::Tensor below(const ShardSpec& spec, const at::Tensor& probabilities) {
  const at::Tensor p = probabilities.to(at::kDouble);
  const at::Tensor u =
      doubles(spec, [](const Words& w) { return unit_double(w[0], w[1]); }).to(p.device());
  // on other devices the host would have to wait
  if (p.is_cpu() && p.numel() > 0)
    TORCH_CHECK(p.ge(0).logical_and(p.le(1)).all().item<bool>(),
                "bernoulli: probabilities must be 0 to 1");
  return u.lt(p).to(at::kDouble);
}
at::Tensor bernoulli_each(const ShardSpec& spec, const Stack& a, at::ScalarType) {
  return below(spec, a[0].toTensor());
}
// For probabilities that are replicated.
at::Tensor bernoulli_tensor(const ShardSpec& spec, const Stack& a, at::ScalarType) {
  return below(spec, local_slice(a[1].toTensor().expand(spec.shape()), spec));
}

// Integers in [low, high), by scaling: the bias is below 2^-53 times their number.
at::Tensor integers(const ShardSpec& spec, double low, double high) {
  return doubles(spec, [=](const Words& w) {
    return low + std::floor(unit_double(w[0], w[1]) * (high - low));
  });
}

Plan dropout(const OpCall& call) {
  if (!call.has("train") || call.boolean("train")) {
    check_probability(call);
    if (at::isIntegralType(call.tensor(0).dtype, true) && call.number("p") != 0)
      refuse(call, concat(" of ", c10::toString(call.tensor(0).dtype),
                          " values: give floating-point ones"));
  }
  const ShardSpec spec = without_partial(call.tensor(0).spec);
  const Plan::Output out{spec, call.tensor(0).strides};
  Plan plan{.inputs = {spec}, .outputs = {out, out}};
  plan.local = [spec](const OperatorHandle&, Stack a) {
    const at::Tensor& x = a[0].toTensor();
    const double p = a[1].toDouble();
    if (!(a[2].isNone() || a[2].toBool()) || p == 0)
      return Stack{x.clone(), at::ones_like(x, at::kBool)};
    const at::Tensor mask = dropout_mask(next_draw(*context_of(spec)), spec.shape(),
                                         spec.local_offset(), spec.local_shape(), p)
                                .to(x.device());
    return Stack{p == 1 ? at::zeros_like(x) : x.mul(mask).div(1 - p), mask};
  };
  return plan;
}

const RuleOptions kAlways{.for_replicated = true};

void register_draw(const char* op, const Draw& draw, const Check& check) {
  const auto rule = [draw, check](const OpCall& call) {
    check(call);
    return drawn(call, draw);
  };
  register_rule(op, rule, kAlways);
}

const AtStart registered([] {
  const auto up_to = [](const ShardSpec& spec, const Stack& a, at::ScalarType) {
    return integers(spec, 0, a[1].toScalar().toDouble());
  };
  const auto between = [](const ShardSpec& spec, const Stack& a, at::ScalarType) {
    if (a[2].isNone())
      throw ShardingError(
          "random_ without an upper bound has no rule for sharded tensors: give one");
    return integers(spec, a[1].toScalar().toDouble(), a[2].toScalar().toDouble());
  };
  register_draw("aten::uniform_", uniform, check_uniform);
  const auto normal_by = [](double mean, double deviation, const Words& w) {
    return mean + deviation * normal(w);
  };
  const Draw bernoulli_p =
      by_one([](double p, const Words& w) { return unit_double(w[0], w[1]) < p ? 1.0 : 0.0; });
  register_draw("aten::normal_", by_two(normal_by),
                Within{"std", "standard deviation", [](double d) { return d >= 0; }, "at least 0"});
  register_draw("aten::bernoulli_.float", bernoulli_p, check_probability);
  register_draw("aten::bernoulli_.Tensor", bernoulli_tensor, check_shape_of_probabilities);
  register_draw("aten::exponential_", by_one([](double rate, const Words& w) {
                  return -std::log1p(-unit_double(w[0], w[1])) / rate;
                }),
                Within{"lambd", "rate", positive, "more than 0"});
  register_draw("aten::log_normal_",
                by_two([normal_by](double mean, double deviation, const Words& w) {
                  return std::exp(normal_by(mean, deviation, w));
                }),
                Within{"std", "standard deviation", positive, "more than 0"});
  register_draw("aten::cauchy_", by_two([](double median, double sigma, const Words& w) {
                  return median +
                         sigma * std::tan(std::numbers::pi * (unit_double(w[0], w[1]) - 0.5));
                }),
                Within{"sigma", "scale", positive, "more than 0"});
  // The number of trials up to the first success.
  register_draw(
      "aten::geometric_", by_one([](double p, const Words& w) {
        const double trials = std::ceil(std::log1p(-unit_double(w[0], w[1])) / std::log1p(-p));
        return p >= 1 ? 1.0 : std::max(1.0, trials);
      }),
      Within{"p", "probability", [](double p) { return p > 0 && p < 1; }, "between 0 and 1", true});
  register_draw("aten::random_.to", up_to, check_range);
  register_draw("aten::random_.from", between, check_range);
  register_draw("aten::randint_like", up_to, check_range);
  register_draw("aten::randint_like.low_dtype", between, check_range);
  register_draw("aten::bernoulli", bernoulli_each, check_probabilities_type);
  register_draw("aten::bernoulli.p", bernoulli_p, check_probability);
  register_draw("aten::bernoulli.Tensor", bernoulli_tensor, [](const OpCall&) {});
  register_draw(
      "aten::rand_like",
      [](const ShardSpec& spec, const Stack&, at::ScalarType t) {
        return doubles(spec, [t](const Words& w) { return unit(w, t); });
      },
      require_floating);
  register_draw(
      "aten::randn_like",
      [](const ShardSpec& spec, const Stack&, at::ScalarType) { return doubles(spec, normal); },
      require_floating);
  register_rule("aten::native_dropout", dropout, kAlways);
});

}  // namespace
}  // namespace random_rules
}  // namespace tessera::detail

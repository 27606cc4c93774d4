#include "property.h"

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include "hoard.h"
#include "out_forms.h"
#include "special.h"
#include "tessera/base/hash.h"

namespace tessera::test {

namespace {

// The bound on the largest difference, relative to the largest value.
double bound(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
    case at::kComplexFloat:
      return 1e-4;  // sums of a hundred terms in another order
    case at::kHalf:
      return 2e-2;
    case at::kBFloat16:
      return 1.2e-1;  // partial sums are rounded to 8 bits before they are added
    default:
      return 1e-10;
  }
}

at::ScalarType draw_type(const OperatorCase& one, Draw& draw) {
  const int n = draw.below(100);
  if (!one.any_type || n < 75) return at::kDouble;
  if (n < 85) return at::kFloat;
  if (n < 88) return at::kBFloat16;
  if (n < 91) return at::kHalf;
  return one.complex ? at::kComplexDouble : at::kDouble;
}

// The same values in memory of another order, or with gaps.
at::Tensor lay_out(const at::Tensor& t, Draw& draw) {
  switch (draw.below(8)) {
    case 0: {  // transposed
      if (t.dim() < 2) return t;
      const int a = draw.below(static_cast<int>(t.dim())),
                b = draw.below(static_cast<int>(t.dim()));
      return t.transpose(a, b).contiguous().transpose(a, b);
    }
    case 1: {  // every second element
      if (t.dim() < 1) return t;
      return at::stack({t, t}, -1).select(-1, 0);
    }
    case 2:
      return t.dim() == 4 ? t.contiguous(at::MemoryFormat::ChannelsLast) : t;
    default:
      return t;
  }
}

struct Compared {
  Tensors values, gradients, second;
  std::string second_error;  // plain libtorch has no second derivative
};

// Sum of weighted elements, real. `weights`: their dtype; none: that of the element.
at::Tensor weighted_sum(const Tensors& values, std::optional<at::ScalarType> weights = {}) {
  at::Tensor loss;
  for (const at::Tensor& v : values) {
    if (!v.defined()) continue;
    at::Tensor w = randn(v.sizes(), at::kDouble);
    if (v.is_complex()) {
      const at::Tensor imaginary = randn(v.sizes(), at::kDouble);
      w = at::complex(w, imaginary);
    }
    if (!v.requires_grad()) continue;
    at::Tensor term =
        (v * w.to(weights.value_or(v.scalar_type())).to(v.device(), v.scalar_type())).sum();
    if (term.is_complex()) term = at::real(term);
    loss = loss.defined() ? loss + term : term;
  }
  return loss;
}

// The targets of an `out=` form: what it returns, other numbers in it; for sharded inputs in drawn
// placements. The last of the function's values, if it calls none.
Tensors written_by_out(const Instance& instance, const Tensors& inputs, std::uint64_t number) {
  const at::NoGradGuard no_grad;
  Tensors own;
  for (const at::Tensor& t : inputs) own.push_back(t.detach().clone(at::MemoryFormat::Preserve));
  Tensors values;
  const auto call = last_with_out([&] { values = instance.function(own); });
  if (!call) return values;
  const auto sharded = std::ranges::find_if(own, [](const at::Tensor& t) { return is_sharded(t); });
  Draw draw(number + 2);
  Tensors targets;
  for (const at::Tensor& value : call->results()) {
    const at::Tensor made = whole(value);
    at::Tensor target = at::ones(made.sizes(), made.options());
    if (sharded != own.end() && draw.chance(70))
      target =
          distribute_tensor(target, draw.spec(spec(*sharded).mesh(), made.sizes().vec(), false));
    targets.push_back(target);
  }
  call->into(targets);
  return targets;
}

Compared differentiate(const Instance& instance, const Tensors& inputs, std::uint64_t number,
                       bool second, Special special,
                       std::optional<at::ScalarType> weights = std::nullopt) {
  Compared c;
  if (special == Special::out) {
    c.values = written_by_out(instance, inputs, number);
    return c;
  }
  if (special == Special::inference) {
    const c10::InferenceMode mode;
    Tensors own;  // what is written to must be made in inference mode
    for (const at::Tensor& t : inputs) own.push_back(t.detach().clone(at::MemoryFormat::Preserve));
    c.values = instance.function(own);
    return c;
  }
  c.values = instance.function(inputs);
  // A partial sum of numbers of both signs may overflow where the sum does not.
  if (special == Special::one_rank || special == Special::overflow) return c;
  test::seed(number);
  const at::Tensor loss = weighted_sum(c.values, weights);
  Tensors leaves;
  for (const at::Tensor& t : inputs) {
    if (t.requires_grad()) leaves.push_back(t);
  }
  if (!loss.defined() || leaves.empty()) return c;
  c.gradients = torch::autograd::grad({loss}, leaves, {}, true, second, true);
  if (!second) return c;
  const at::Tensor next = weighted_sum(c.gradients);
  if (next.defined())
    c.second = torch::autograd::grad({next}, leaves, {}, std::nullopt, false, true);
  return c;
}

std::string describe(const Tensors& tensors) {
  std::string text;
  for (const at::Tensor& t : tensors) {
    text += concat(text.empty() ? "" : "; ", toString(t.scalar_type()), " ");
    if (is_sharded(t)) {
      text += concat(spec(t), " strides ", t.strides());
    } else {
      text += concat("plain ", t.sizes());
    }
  }
  return text;
}

double largest(const Tensors& tensors) {
  double most = 0;
  for (const at::Tensor& t : tensors) {
    if (!t.defined() || t.numel() == 0 || !differentiable(t)) continue;
    const at::Tensor size = whole(t).abs().to(at::kDouble);
    most = std::max(most,
                    at::where(at::isfinite(size), size, at::zeros_like(size)).max().item<double>());
  }
  return most;
}

// Where a sum of products has an infinity, the order of its terms decides whether it is NaN or
// infinite; what is finite is not touched by it.
at::Tensor finite_where(const at::Tensor& value, const at::Tensor& finite) {
  return at::where(finite.logical_and(value.isfinite()), value, at::zeros_like(value)) +
         at::where(finite, at::zeros_like(value), value.isfinite().to(value));
}

// What differs, or nothing. `finite_below`: what is not smaller than that need not be equal.
std::string compare(const char* what, const Tensors& got, const Tensors& expected, double tolerance,
                    double floor, std::optional<double> finite_below) {
  if (got.size() != expected.size())
    return concat(got.size(), " ", what, "s instead of ", expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i].defined() != expected[i].defined())
      return concat(what, " ", i, got[i].defined() ? " is there" : " is missing");
    if (!got[i].defined()) continue;
    if (got[i].sizes() != expected[i].sizes())
      return concat(what, " ", i, " has shape ", got[i].sizes(), " instead of ",
                    expected[i].sizes());
    if (got[i].scalar_type() != expected[i].scalar_type())
      return concat(what, " ", i, " is ", toString(got[i].scalar_type()), " instead of ",
                    toString(expected[i].scalar_type()));
    double d = 0;
    if (finite_below && at::isFloatingType(expected[i].scalar_type())) {
      const at::Tensor value = whole(got[i]).cpu(), want = whole(expected[i]),
                       finite = want.abs() < *finite_below;
      if (!value.isfinite().logical_or(finite.logical_not()).all().item<bool>())
        return concat(what, " ", i, " is not finite where it should be");
      if (value.abs().lt(*finite_below / 2).logical_and(want.isinf()).any().item<bool>() &&
          std::isfinite(*finite_below))
        return concat(what, " ", i, " is small where it should be infinite");
      d = std::isfinite(*finite_below)
              ? difference(at::where(finite, value, want), want, floor)
              : difference(finite_where(value, finite), finite_where(want, finite), floor);
    } else {
      d = difference(whole(got[i]).cpu(), expected[i], floor);
    }
    if (!(d <= tolerance)) {
      std::string values;
      if (expected[i].numel() <= 6) {
        std::ostringstream text;
        text << ": " << whole(got[i]).cpu().flatten() << " instead of "
             << whole(expected[i]).flatten();
        values = text.str();
        std::ranges::replace(values, '\n', ' ');
      }
      return concat(what, " ", i, " differs by ", d, values);
    }
  }
  return "";
}

struct Prepared {
  Instance instance;
  Tensors plain, sharded;
  at::ScalarType type = at::kDouble;
  bool second = false;
  bool gaps = false;  // some input has gaps in memory, which no shard keeps
  Special special = Special::none;
};

// Of dims with one element they mean nothing.
bool same_strides(const at::Tensor& a, const at::Tensor& b) {
  for (std::int64_t d = 0; d < b.dim() && b.numel() > 0; ++d) {
    if (b.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

Prepared prepare(const OperatorCase& one, Draw& draw, const DeviceMesh& mesh,
                 const DeviceMesh& alone, std::uint64_t number, Hard hard) {
  Prepared p;
  p.instance = one.make(draw);
  p.type = draw_type(one, draw);
  // The stand-in's kernels are those of the CPU, whose narrow statistics have other dtypes.
  if (!mesh.manager().device().is_cpu()) p.type = at::kDouble;
  p.second = draw.chance(20) && p.type == at::kDouble && one.second;
  Draw other(number + 1);  // so that the other draws stay as they were
  if (hard == Hard::things) p.special = draw_special(one, p.instance.inputs, other);
  p.type = type_of(p.special).value_or(p.type);
  p.second &= p.type == at::kDouble;
  make_special(p.instance, p.special, other);
  const int keep_sharded = draw.below(static_cast<int>(p.instance.inputs.size()));
  for (std::size_t i = 0; i < p.instance.inputs.size(); ++i) {
    at::Tensor value = p.instance.inputs[i];
    if (differentiable(value)) {
      if (p.type == at::kComplexDouble)
        value = at::complex(value, value.flatten().flip(0).reshape(value.sizes()) * 0.5);
      value = special_values(value.to(p.type), p.special, other);
    }
    value = lay_out(value, draw);
    p.gaps |= !value.is_non_overlapping_and_dense();
    const bool gradient = differentiable(value) && !draw.chance(10);
    const bool on_this_rank =
        p.special != Special::one_rank || (mesh.manager().rank() == 0 && i == 0);
    const bool stays_plain = draw.chance(12) && static_cast<int>(i) != keep_sharded;
    const bool partial = one.partial && differentiable(value);
    const ShardSpec spec = draw.spec(mesh, value.sizes().vec(), partial, value.is_complex());
    const auto as_leaf = [&](const at::Tensor& t) {
      return t.detach().requires_grad_(gradient && on_this_rank);
    };
    // Each with memory of its own.
    const auto copy = [&] {
      return at::empty_strided(value.sizes(), value.strides(), value.options()).copy_(value);
    };
    p.plain.push_back(as_leaf(
        one.random ? distribute_tensor(copy(), ShardSpec::replicated(alone, value.sizes().vec()))
                   : copy()));
    const at::Tensor there = copy().to(mesh.manager().device());
    p.sharded.push_back(
        as_leaf(stays_plain && !one.random ? there : distribute_tensor(there, spec)));
  }
  return p;
}

// For a case that is wrong in a narrow dtype: how far both are from the same in float64, so that a
// reader sees whether it is rounding. Decides nothing.
std::string beside_double(const Prepared& p, std::uint64_t number, const Compared& got,
                          const Compared& expected) {
  if (p.type != at::kFloat && p.type != at::kHalf && p.type != at::kBFloat16) return "";
  Tensors wide;
  for (const at::Tensor& t : p.plain) {
    const bool cast = at::isFloatingType(t.scalar_type());
    wide.push_back(
        (cast ? t.detach().to(at::kDouble) : t.detach().clone()).requires_grad_(t.requires_grad()));
  }
  Compared exact;
  test::seed(number + 1);
  try {
    exact = differentiate(p.instance, wide, number, false, p.special, p.type);
  } catch (const std::exception& e) {
    return concat(" (not possible in float64: ", std::string(e.what()).substr(0, 200), ")");
  }
  const auto farthest = [](const Tensors& is, const Tensors& should) {
    double most = 0;
    for (std::size_t i = 0; i < std::min(is.size(), should.size()); ++i) {
      if (is[i].defined() && should[i].defined() && at::isFloatingType(is[i].scalar_type()))
        most = std::max(most, difference(whole(is[i]).to(at::kCPU, at::kDouble), should[i], 0));
    }
    return most;
  };
  return concat(" (from float64, of the largest value: values of plain libtorch ",
                farthest(expected.values, exact.values), ", sharded ",
                farthest(got.values, exact.values), "; gradients of plain libtorch ",
                farthest(expected.gradients, exact.gradients), ", sharded ",
                farthest(got.gradients, exact.gradients), ")");
}

bool is_refusal(const std::exception& e) {
  if (std::string(e.what()).find("a ShardTensor's memory is spread over ranks") !=
      std::string::npos)
    return true;
  return dynamic_cast<const Error*>(&e) && !dynamic_cast<const CommError*>(&e) &&
         !dynamic_cast<const RuleError*>(&e);
}

std::string short_text(const std::exception& e) {
  std::string text = e.what();
  const auto at = text.find("Exception raised from");
  return text.substr(0, std::min<std::size_t>(at, 700));
}

Outcome run_alone(const OperatorCase& one, std::uint64_t number, DistributedManager& manager,
                  Hard hard, bool hoards) {
  test::seed(number);
  Draw draw(number);
  const auto mesh = manager.mesh(draw.mesh(manager.world_size()));
  const auto alone = manager.mesh(Mesh({{"alone", 1}}, {manager.rank()}));
  const Prepared p = prepare(one, draw, mesh, alone, number, hard);
  const auto say = [&](const std::string& what) {
    return Outcome{Outcome::Kind::failed,
                   concat(what, " with ", describe(p.sharded), " ", name_of(p.special))};
  };
  Compared expected;
  std::string plain_throws;
  bool second = p.second;
  const auto start = [&] {
    test::seed(number + 1);
    manual_seed(manager, number);
  };
  try {
    start();
    expected = differentiate(p.instance, p.plain, number, second, p.special);
  } catch (const std::exception& e) {
    plain_throws = short_text(e);
  }
  if (!plain_throws.empty() && second) {  // perhaps the second derivative alone does not exist
    second = false;
    try {
      start();
      expected = differentiate(p.instance, p.plain, number, false, p.special);
      plain_throws.clear();
    } catch (const std::exception& e) {
    }
  }
  const Hoard hoard(hoards ? manager.rank() : -1, number);
  try {
    start();
    const Compared got = differentiate(p.instance, p.sharded, number, second, p.special);
    if (!plain_throws.empty()) {
      Outcome said = say("plain libtorch throws, this does not: " + plain_throws);
      said.alone = p.special != Special::mixed;
      return said;
    }
    // Results of whole numbers have the default dtype.
    double tolerance = p.special == Special::mixed ? 5 * bound(at::kFloat) : bound(p.type);
    for (const at::Tensor& value : expected.values)
      if (value.scalar_type() == at::kFloat) tolerance = std::max(tolerance, bound(at::kFloat));
    std::optional<double> finite_below;
    if (p.special == Special::infinite) finite_below = std::numeric_limits<double>::infinity();
    if (p.special == Special::overflow) finite_below = 3e4;  // where rounding does not overflow
    // What is zero but for rounding is measured by what it is made of: to a hundredth of the bound
    // of the largest of that.
    double floor = std::max(largest(p.plain), largest(expected.values));
    std::string wrong =
        compare("value", got.values, expected.values, tolerance, 1e-2 * floor, finite_below);
    floor = std::max(floor, largest(expected.gradients));
    if (wrong.empty())
      wrong = compare("gradient", got.gradients, expected.gradients, tolerance, 1e-2 * floor,
                      finite_below);
    floor = std::max(floor, largest(expected.second));
    if (wrong.empty())
      wrong = compare("second derivative", got.second, expected.second, tolerance, 1e-2 * floor,
                      finite_below);
    for (std::size_t i = 0; i < got.values.size() && wrong.empty() && one.strides; ++i) {
      if (is_sharded(got.values[i]) && !p.gaps && !same_strides(got.values[i], expected.values[i]))
        wrong = concat("value ", i, " has strides ", got.values[i].strides(), " instead of ",
                       expected.values[i].strides());
    }
    if (!wrong.empty()) return say(wrong + beside_double(p, number, got, expected));
    return {Outcome::Kind::equal, "", second};
  } catch (const PeerFailedError&) {
    // Another rank alone saw that it cannot be: so does plain libtorch.
    // But all ranks know dtypes.
    if (plain_throws.empty() || p.special == Special::mixed) throw;
    return {Outcome::Kind::both_throw, plain_throws};
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& e) {
    if (!plain_throws.empty()) return {Outcome::Kind::both_throw, plain_throws};
    if (is_refusal(e))
      return {Outcome::Kind::refused,
              concat(short_text(e), " with ", describe(p.sharded), " ", name_of(p.special)), false,
              p.special == Special::out || p.special == Special::inference};
    return say(short_text(e));
  }
}

}  // namespace

std::uint64_t case_number(std::uint64_t seed, const std::string& name, int ranks, int draw) {
  Hash hash;
  hash.number(seed)
      .text(name)
      .number(static_cast<std::uint64_t>(ranks))
      .number(static_cast<std::uint64_t>(draw));
  return hash.value();
}

Outcome run_case(const OperatorCase& one, std::uint64_t number, DistributedManager& manager,
                 Hard hard, bool hoards) {
  Outcome mine = run_alone(one, number, manager, hard, hoards);
  if (manager.world_size() == 1) return mine;
  // A rank that is alone with its outcome would have left the others waiting.
  const auto exchange = [&] {
    return manager.world().all_gather_bytes(
        std::string(1, static_cast<char>(mine.kind)) + mine.text, {.name = "outcome"});
  };
  std::vector<std::string> all;
  try {
    try {
      all = exchange();
    } catch (const PeerFailedError&) {
      // A rank whose numbers are right has waited for nobody, and hears of the others' here.
      if (!mine.alone) throw;
      mine = {Outcome::Kind::both_throw, ""};
      all = exchange();
    }
  } catch (const CommError& e) {
    throw CommError("after '", static_cast<char>(mine.kind), "' ", mine.text, ": ", e.what());
  }
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r][0] != all[0][0]) {
      std::string text = "the ranks' outcomes differ:";
      for (std::size_t k = 0; k < all.size(); ++k)
        text += concat(" rank ", k, ": ", all[k].substr(0, 300), ";");
      return {Outcome::Kind::failed, text};
    }
  }
  mine.text = all[0].substr(1);
  return mine;
}

}  // namespace tessera::test

#include "property.h"

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <limits>
#include <sstream>

#include "hoard.h"
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

bool differentiable(const at::Tensor& t) {
  return at::isFloatingType(t.scalar_type()) || at::isComplexType(t.scalar_type());
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

// What a third of the cases are about besides shapes and placements.
enum class Special : char {
  none,
  ties,
  nan,
  infinite,
  large,
  integers,
  booleans,
  /// An input is one row, expanded.
  expanded,
  /// An input is conjugated, its memory is not.
  conjugated,
  /// Two inputs are one tensor.
  shared,
  inference,
  /// The same call was made before, with other values.
  again,
};

const char* name_of(Special special) {
  static constexpr const char* names[] = {"",
                                          "ties",
                                          "NaN",
                                          "infinities",
                                          "large",
                                          "integers",
                                          "booleans",
                                          "an expanded input",
                                          "conjugated",
                                          "one tensor twice",
                                          "inference mode",
                                          "other values before"};
  return names[static_cast<int>(special)];
}

Special draw_special(const OperatorCase& one, const Tensors& inputs, at::ScalarType type,
                     Draw& draw) {
  if (!draw.chance(35) || one.random || !one.special) return Special::none;
  const bool complex = type == at::kComplexDouble;
  // Of nothing, kernels take dtypes that they refuse of something.
  const bool numbers =
      one.any_type && !complex &&
      std::ranges::all_of(inputs, [](const at::Tensor& t) { return t.numel() > 0; });
  switch (draw.below(11)) {
    case 0:
      return complex ? Special::none : Special::ties;
    case 1:
      return Special::nan;
    case 2:
      return complex ? Special::none : Special::infinite;
    case 3:
      return type == at::kDouble ? Special::large : Special::none;
    case 4:
      return numbers ? Special::integers : Special::none;
    case 5:
      return numbers ? Special::booleans : Special::none;
    case 6:
      return Special::expanded;
    case 7:
      return complex ? Special::conjugated : Special::none;
    case 8:
      return Special::shared;
    case 9:
      return Special::inference;
    default:
      return Special::again;
  }
}

// The values of one input that is of floating point.
at::Tensor special_values(const at::Tensor& value, Special special, Draw& draw) {
  const auto sprinkled = [&](double with) {
    at::Tensor t = value.clone(at::MemoryFormat::Preserve);
    for (std::int64_t n = t.numel(); n > 0; n -= 7) {
      if (t.dim() == 0) return draw.chance(50) ? at::full_like(t, with) : t;
      at::Tensor place = t;
      while (place.dim() > 0) place = place.select(0, draw.below(static_cast<int>(place.size(0))));
      place.fill_(draw.chance(50) ? with : -with);
    }
    return t;
  };
  switch (special) {
    case Special::ties:
      return at::round(value);
    case Special::nan:
      return sprinkled(std::numeric_limits<double>::quiet_NaN());
    case Special::infinite:
      return sprinkled(std::numeric_limits<double>::infinity());
    case Special::large:
      return value * 1e120;
    case Special::integers:
      return (value * 2).round().to(at::kLong);
    case Special::booleans:
      return value.gt(0);
    default:
      return value;
  }
}

// The inputs seen by the function as the case has them.
void make_special(Instance& instance, Special special, Draw& draw) {
  Tensors& inputs = instance.inputs;
  const auto f = instance.function;
  if (special == Special::expanded) {
    const auto i = static_cast<std::size_t>(draw.below(static_cast<int>(inputs.size())));
    const at::Tensor t = inputs[i];
    if (t.dim() == 0 || t.size(0) == 0 || !differentiable(t)) return;
    inputs[i] = t.narrow(0, 0, 1).clone();
    instance.function = [f, i, shape = t.sizes().vec()](const Tensors& given) {
      Tensors all = given;
      all[i] = all[i].expand(shape);
      return f(all);
    };
  } else if (special == Special::conjugated) {
    instance.function = [f](const Tensors& given) {
      Tensors all = given;
      all[0] = all[0].conj();
      return f(all);
    };
  } else if (special == Special::shared && inputs.size() > 1 &&
             inputs[0].sizes() == inputs[1].sizes() &&
             inputs[0].scalar_type() == inputs[1].scalar_type()) {
    instance.function = [f](const Tensors& given) {
      Tensors all = given;
      all[1] = all[0];
      return f(all);
    };
  } else if (special == Special::again) {
    instance.function = [f](const Tensors& given) {
      Tensors others;
      for (const at::Tensor& t : given) {
        const at::NoGradGuard guard;
        others.push_back(differentiable(t) ? t.detach() * 0.5 : t.detach().clone());
      }
      {
        const at::NoGradGuard guard;
        f(others);
      }
      return f(given);
    };
  }
}

struct Compared {
  Tensors values, gradients, second;
  std::string second_error;  // plain libtorch has no second derivative
};

// Sum of weighted elements, real.
at::Tensor weighted_sum(const Tensors& values) {
  at::Tensor loss;
  for (const at::Tensor& v : values) {
    if (!v.defined()) continue;
    at::Tensor w = randn(v.sizes(), at::kDouble);
    if (v.is_complex()) {
      const at::Tensor imaginary = randn(v.sizes(), at::kDouble);
      w = at::complex(w, imaginary);
    }
    if (!v.requires_grad()) continue;
    at::Tensor term = (v * w.to(v.scalar_type())).sum();
    if (term.is_complex()) term = at::real(term);
    loss = loss.defined() ? loss + term : term;
  }
  return loss;
}

Compared differentiate(const Instance& instance, const Tensors& inputs, std::uint64_t number,
                       bool second, bool inference) {
  Compared c;
  if (inference) {
    const c10::InferenceMode mode;
    Tensors own;  // what is written to must be made in inference mode
    for (const at::Tensor& t : inputs) own.push_back(t.detach().clone(at::MemoryFormat::Preserve));
    c.values = instance.function(own);
    return c;
  }
  c.values = instance.function(inputs);
  test::seed(number);
  const at::Tensor loss = weighted_sum(c.values);
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

// What differs, or nothing.
// Where a sum of products has an infinity, the order of its terms decides whether it is NaN or
// infinite; what is finite is not touched by it.
at::Tensor finite_where(const at::Tensor& value, const at::Tensor& finite) {
  return at::where(finite.logical_and(value.isfinite()), value, at::zeros_like(value)) +
         at::where(finite, at::zeros_like(value), value.isfinite().to(value));
}

std::string compare(const char* what, const Tensors& got, const Tensors& expected, double tolerance,
                    double floor, bool infinite) {
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
    if (infinite && at::isFloatingType(expected[i].scalar_type())) {
      const at::Tensor value = whole(got[i]), want = whole(expected[i]), finite = want.isfinite();
      if (!value.isfinite().logical_or(finite.logical_not()).all().item<bool>())
        return concat(what, " ", i, " is not finite where it should be");
      d = difference(finite_where(value, finite), finite_where(want, finite), floor);
    } else {
      d = difference(got[i], expected[i], floor);
    }
    if (!(d <= tolerance)) {
      std::string values;
      if (expected[i].numel() <= 6) {
        std::ostringstream text;
        text << ": " << whole(got[i]).flatten() << " instead of " << whole(expected[i]).flatten();
        values = text.str();
        std::replace(values.begin(), values.end(), '\n', ' ');
      }
      return concat(what, " ", i, " differs by ", d, values);
    }
  }
  return "";
}

// Of dims with one element they mean nothing.
bool same_strides(const at::Tensor& a, const at::Tensor& b) {
  for (std::int64_t d = 0; d < b.dim() && b.numel() > 0; ++d) {
    if (b.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

struct Prepared {
  Instance instance;
  Tensors plain, sharded;
  at::ScalarType type = at::kDouble;
  bool second = false;
  bool gaps = false;  // some input has gaps in memory, which no shard keeps
  Special special = Special::none;
};

Prepared prepare(const OperatorCase& one, Draw& draw, const DeviceMesh& mesh,
                 const DeviceMesh& alone, std::uint64_t number, bool special) {
  Prepared p;
  p.instance = one.make(draw);
  p.type = draw_type(one, draw);
  p.second = draw.chance(20) && p.type == at::kDouble && one.second;
  Draw other(number + 1);  // so that the other draws stay as they were
  if (special) p.special = draw_special(one, p.instance.inputs, p.type, other);
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
    const bool stays_plain = draw.chance(12) && static_cast<int>(i) != keep_sharded;
    // Products of Partial tensors are linear in numbers alone: infinite shares give NaN.
    const bool partial = one.partial && differentiable(value) && p.special != Special::infinite;
    const ShardSpec spec = draw.spec(mesh, value.sizes().vec(), partial, value.is_complex());
    const auto as_leaf = [&](const at::Tensor& t) { return t.detach().requires_grad_(gradient); };
    // Each with memory of its own.
    const auto copy = [&] {
      return at::empty_strided(value.sizes(), value.strides(), value.options()).copy_(value);
    };
    p.plain.push_back(as_leaf(
        one.random ? distribute_tensor(copy(), ShardSpec::replicated(alone, value.sizes().vec()))
                   : copy()));
    p.sharded.push_back(
        as_leaf(stays_plain && !one.random ? copy() : distribute_tensor(copy(), spec)));
  }
  return p;
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
                  bool special) {
  test::seed(number);
  Draw draw(number);
  const auto mesh = manager.mesh(draw.axes(manager.world_size()));
  const auto alone = manager.mesh(Mesh({{"alone", 1}}, {manager.rank()}));
  const Prepared p = prepare(one, draw, mesh, alone, number, special);
  const auto say = [&](const std::string& what) {
    return Outcome{Outcome::Kind::failed,
                   concat(what, " with ", describe(p.sharded), " ", name_of(p.special))};
  };
  Compared expected;
  std::string plain_throws;
  bool second = p.second;
  const bool inference = p.special == Special::inference;
  const auto start = [&] {
    test::seed(number + 1);
    manual_seed(manager, number);
  };
  try {
    start();
    expected = differentiate(p.instance, p.plain, number, second, inference);
  } catch (const std::exception& e) {
    plain_throws = short_text(e);
  }
  if (!plain_throws.empty() && second) {  // perhaps the second derivative alone does not exist
    second = false;
    try {
      start();
      expected = differentiate(p.instance, p.plain, number, false, inference);
      plain_throws.clear();
    } catch (const std::exception& e) {
    }
  }
  const Hoard hoard(manager.rank(), number);
  try {
    start();
    const Compared got = differentiate(p.instance, p.sharded, number, second, inference);
    if (!plain_throws.empty()) return say("plain libtorch throws, this does not: " + plain_throws);
    // Results of whole numbers have the default dtype.
    double tolerance = bound(p.type);
    for (const at::Tensor& value : expected.values)
      if (value.scalar_type() == at::kFloat) tolerance = std::max(tolerance, bound(at::kFloat));
    const bool infinite = p.special == Special::infinite;
    // What is zero but for rounding is measured by what it is made of: to a hundredth of the bound
    // of the largest of that.
    double floor = std::max(largest(p.plain), largest(expected.values));
    std::string wrong =
        compare("value", got.values, expected.values, tolerance, 1e-2 * floor, infinite);
    floor = std::max(floor, largest(expected.gradients));
    if (wrong.empty())
      wrong =
          compare("gradient", got.gradients, expected.gradients, tolerance, 1e-2 * floor, infinite);
    floor = std::max(floor, largest(expected.second));
    if (wrong.empty())
      wrong = compare("second derivative", got.second, expected.second, tolerance, 1e-2 * floor,
                      infinite);
    for (std::size_t i = 0; i < got.values.size() && wrong.empty() && one.strides; ++i) {
      if (is_sharded(got.values[i]) && !p.gaps && !same_strides(got.values[i], expected.values[i]))
        wrong = concat("value ", i, " has strides ", got.values[i].strides(), " instead of ",
                       expected.values[i].strides());
    }
    if (!wrong.empty()) return say(wrong);
    return {Outcome::Kind::equal, "", second};
  } catch (const PeerFailedError&) {
    // Another rank alone saw that it cannot be: so does plain libtorch.
    if (plain_throws.empty()) throw;
    return {Outcome::Kind::both_throw, plain_throws};
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& e) {
    if (!plain_throws.empty()) return {Outcome::Kind::both_throw, plain_throws};
    if (is_refusal(e))
      return {Outcome::Kind::refused, concat(short_text(e), " with ", describe(p.sharded))};
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
                 bool special) {
  Outcome mine = run_alone(one, number, manager, special);
  if (manager.world_size() == 1) return mine;
  // A rank that is alone with its outcome would have left the others waiting.
  std::vector<std::string> all;
  try {
    all = manager.world().all_gather_bytes(std::string(1, static_cast<char>(mine.kind)) + mine.text,
                                           {.name = "outcome"});
  } catch (const CommError& e) {
    throw CommError(
        concat("after '", static_cast<char>(mine.kind), "' ", mine.text, ": ", e.what()));
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

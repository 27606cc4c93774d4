// One argument after the other of right calls is made wrong, or at least different: what plain
// libtorch refuses every rank refuses, what both take has the same values, and whatever it was the
// next collective works.

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "arguments_bases.h"
#include "support.h"

namespace tessera::test::arguments_fuzz_test {
namespace {

using Values = std::vector<c10::IValue>;
using Integers = std::vector<std::int64_t>;

constexpr double kInf = std::numeric_limits<double>::infinity(),
                 kNan = std::numeric_limits<double>::quiet_NaN();
constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max(),
                       // the least that a SymInt holds
    kMin = -(std::int64_t{1} << 62);

bool is_floating(const at::Tensor& t) {
  return at::isFloatingType(t.scalar_type()) || at::isComplexType(t.scalar_type());
}

// Of another rank, size, dtype or memory order, or with other values.
std::vector<at::Tensor> other_tensors(Draw& draw, const at::Tensor& t) {
  if (!t.defined()) return {at::ones({6}, at::kDouble)};
  std::vector<at::Tensor> all = {t.sum(),
                                 t.unsqueeze(0),
                                 t.reshape({-1}),
                                 t.to(is_floating(t) ? at::kLong : at::kDouble),
                                 t.to(at::kBool),
                                 t.to(at::kFloat),
                                 t.to(at::kComplexDouble),
                                 at::Tensor()};
  if (t.dim() > 0) {
    const int d = draw.below(static_cast<int>(t.dim()));
    all.push_back(t.narrow(d, 0, t.size(d) / 2).contiguous());
    all.push_back(t.narrow(d, 0, 0).contiguous());
    all.push_back(t.narrow(d, 0, 1).contiguous());
    all.push_back(at::cat({t, t}, d));
  }
  if (t.dim() > 1) all.push_back(t.transpose(0, 1).contiguous().transpose(0, 1));
  if (t.scalar_type() == at::kDouble && t.numel() > 1) {
    for (const double special : {kNan, kInf, -kInf}) {
      at::Tensor with = t.clone();
      with.view({-1})[draw.below(static_cast<int>(t.numel()))] = special;
      all.push_back(with);
    }
  }
  if (t.scalar_type() == at::kLong && t.numel() > 1) {
    for (const std::int64_t special : {-1, -100, 100}) {
      at::Tensor with = t.clone();
      with.view({-1})[draw.below(static_cast<int>(t.numel()))] = special;
      all.push_back(with);
    }
  }
  return all;
}

template <class List>
Values other_lists(const List& list, const std::vector<typename List::value_type>& strange) {
  std::vector<List> all(1);
  if (!list.empty()) {
    all.emplace_back(list.begin(), list.end() - 1);
    List longer = list;
    longer.push_back(list.back());
    all.push_back(longer);
    for (const auto& s : strange) {
      all.emplace_back(list.size(), s);
      List last = list;
      last.back() = s;
      all.push_back(last);
    }
  }
  for (const auto& s : strange) all.push_back(List(1, s));
  return Values(all.begin(), all.end());
}

Values other_of(Draw& draw, const c10::TypePtr& type, const c10::IValue& v);

Values other_tensor_lists(Draw& draw, const c10::TypePtr& element, const c10::IValue& v) {
  std::vector<Values> lists = {{}};
  const auto given = v.toListRef();
  const Values list(given.begin(), given.end());
  lists.emplace_back(list.begin(), list.end() - 1);
  lists.push_back(list);
  lists.back().push_back(list.back());
  const std::size_t at = static_cast<std::size_t>(draw.below(static_cast<int>(list.size())));
  for (const c10::IValue& one : other_of(draw, element, list[at])) {
    lists.push_back(list);
    lists.back()[at] = one;
  }
  Values all;
  for (const Values& of : lists) {
    c10::impl::GenericList made(element);
    for (const c10::IValue& one : of) made.push_back(one);
    all.emplace_back(made);
  }
  return all;
}

// What may stand in place of `v`, an argument of this type.
Values other_of(Draw& draw, const c10::TypePtr& type, const c10::IValue& v) {
  using Kind = c10::TypeKind;
  switch (type->kind()) {
    case Kind::OptionalType: {
      Values all = other_of(draw, type->castRaw<c10::OptionalType>()->getElementType(), v);
      if (!v.isNone()) all.emplace_back();
      return all;
    }
    case Kind::TensorType: {
      const auto all = other_tensors(draw, v.isTensor() ? v.toTensor() : at::Tensor());
      return Values(all.begin(), all.end());
    }
    case Kind::IntType:
    case Kind::SymIntType:
      return {-100, -1, 0, 1, 2, 3, 100, kMax, kMin};
    case Kind::BoolType:
      return {v.isNone() || !v.toBool(), v.isBool() && v.toBool()};
    case Kind::FloatType:
      return {0.0, -1.0, 0.5, 1e300, kNan, kInf, -kInf};
    case Kind::NumberType:
      return {0, -1, 3, 0.5, 1e300, kNan, kInf, -kInf, true, c10::complex<double>(1, 2)};
    case Kind::ScalarTypeType:
      return {at::kLong, at::kFloat, at::kDouble, at::kBool, at::kComplexDouble, at::kBFloat16};
    case Kind::LayoutType:
      return {at::kStrided, at::kSparse};
    case Kind::MemoryFormatType:
      return {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast,
              at::MemoryFormat::Preserve};
    case Kind::StringType:
      return {"",      "none", "mean",    "sum",     "floor",
              "trunc", "same", "reflect", "forward", "nonsense"};
    case Kind::ListType: {
      const c10::TypePtr element = type->castRaw<c10::ListType>()->getElementType();
      switch (element->kind()) {
        case Kind::TensorType:
        case Kind::OptionalType:
          return other_tensor_lists(draw, element, v);
        case Kind::IntType:
        case Kind::SymIntType:
          return other_lists(v.isNone() ? Integers() : v.toIntVector(),
                             {-2, -1, 0, 1, 3, 50, kMax, kMin});
        case Kind::NumberType:
          return other_lists(v.to<std::vector<at::Scalar>>(), {0, kNan, 1e300});
        default:
          return {};
      }
    }
    default:
      return {};
  }
}

std::string describe(const c10::IValue& v) {
  if (v.isTensor()) {
    const at::Tensor& t = v.toTensor();
    if (!t.defined()) return "undefined";
    const std::string what = concat(toString(t.scalar_type()), list(t.sizes().vec()));
    if (is_sharded(t)) return concat(what, " ", spec(t));
    return t.numel() > 8 || t.is_complex() ? what : concat(what, " plain");
  }
  if (v.isList()) {
    std::string text = "[";
    for (const c10::IValue& one : v.toListRef()) text += describe(one) + ", ";
    return text + "]";
  }
  return concat(v);
}

// `v` with each tensor replaced by what `as` makes of it.
c10::IValue with_tensors(const c10::IValue& v,
                         const std::function<at::Tensor(const at::Tensor&)>& as) {
  if (v.isTensor()) return v.toTensor().defined() ? as(v.toTensor()) : at::Tensor();
  if (!v.isList()) return v;
  const auto elements = v.toListRef();
  if (std::ranges::none_of(elements, [](const auto& e) { return e.isTensor(); })) return v;
  c10::impl::GenericList made(v.type()->castRaw<c10::ListType>()->getElementType());
  for (const c10::IValue& one : elements) made.push_back(with_tensors(one, as));
  return made;
}

void add_tensors(const c10::IValue& v, std::vector<at::Tensor>& all) {
  if (v.isTensor()) all.push_back(v.toTensor());
  if (!v.isList()) return;
  for (const c10::IValue& one : v.toListRef()) add_tensors(one, all);
}

enum class End : char { taken, refused, torch, other, peer, communication };

struct Call {
  End end = End::taken;
  std::string what;
  /// What it returns, and what it has written to.
  std::vector<at::Tensor> results;
};

Call run(const c10::OperatorHandle& op, torch::jit::Stack stack) {
  const auto& schema = op.schema();
  const torch::jit::Stack arguments = stack;
  Call call;
  op.callBoxed(&stack);
  for (const c10::IValue& v : stack) add_tensors(v, call.results);
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias && alias->isWrite()) add_tensors(arguments[i], call.results);
  }
  return call;
}

// How a call ends on this rank.
Call guarded(const std::function<Call()>& f) {
  Call call;
  try {
    return f();
  } catch (const PeerFailedError& e) {
    call = {End::peer, e.what(), {}};
  } catch (const CommError& e) {
    call = {End::communication, e.what(), {}};
  } catch (const RuleError& e) {
    call = {End::communication, e.what(), {}};
  } catch (const Error& e) {
    call = {End::refused, e.what(), {}};
  } catch (const c10::Error& e) {
    call = {End::torch, e.what_without_backtrace(), {}};
  } catch (const std::exception& e) {
    call = {End::other, e.what(), {}};
  }
  return call;
}

std::vector<at::Tensor> tensors_of(const Values& arguments) {
  std::vector<at::Tensor> all, defined;
  for (const c10::IValue& v : arguments) add_tensors(v, all);
  for (const at::Tensor& t : all) {
    if (t.defined()) defined.push_back(t);
  }
  return defined;
}
bool all_finite(const Values& arguments) {
  for (const c10::IValue& v : arguments) {
    if (v.isDouble() && !std::isfinite(v.toDouble())) return false;
  }
  for (const at::Tensor& t : tensors_of(arguments)) {
    if (!t.isfinite().all().item<bool>()) return false;
  }
  return true;
}
double tolerance(const Values& arguments) {
  for (const at::Tensor& t : tensors_of(arguments)) {
    if (t.scalar_type() == at::kFloat) return 1e-5;
  }
  return 1e-9;
}
// Numbers beyond those of a kernel's own type, told in libtorch's words.
bool tells_overflow(const Call& call) {
  return call.end == End::other && call.what.find("without overflow") != call.what.npos;
}

// Of no samples or channels: some operators make a result without elements of them here. The second
// is what MKL says in libtorch 2.11.
bool refuses_nothing(const Call& plain) {
  return plain.what.find("possibly 0 batch size") != plain.what.npos ||
         plain.what.find("Inconsistent configuration parameters") != plain.what.npos;
}

class Fuzzer {
 public:
  Fuzzer(DistributedManager& manager, const std::vector<Axis>& axes, int percent,
         std::uint64_t seed)
      : mesh_(manager.mesh(axes)), percent_(percent), draw_(seed) {
    set_policies(manager, {.redistribution = Policy::allow, .promotion = Policy::allow});
  }

  void perturb(const Base& base) {
    const auto dot = base.name.find('.');
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
        base.name.substr(0, dot).c_str(),
        dot == std::string::npos ? "" : base.name.substr(dot + 1).c_str());
    const auto& schema = op.schema();
    Values arguments = base.arguments;
    for (std::size_t i = arguments.size(); i < schema.arguments().size(); ++i)
      arguments.push_back(schema.arguments()[i].default_value().value_or(c10::IValue()));
    const int before = taken;
    compare(base, op, arguments, true);
    sound += taken > before;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      if (schema.arguments()[i].name() == "pin_memory" ||  // a matter of the machine
          std::ranges::find(base.fixed, i) != base.fixed.end())
        continue;
      for (const c10::IValue& v :
           other_of(draw_, schema.arguments()[i].real_type(), arguments[i])) {
        if (!draw_.chance(percent_)) continue;
        Values changed = arguments;
        changed[i] = v;
        compare(base, op, changed, false);
      }
    }
  }

  /// Right calls that are taken; of all calls those that are refused, those that are taken as plain
  /// libtorch takes them, and those of them whose values are compared.
  int sound = 0, refused = 0, taken = 0, compared = 0;

 private:
  at::Tensor placed(const at::Tensor& t, bool always) {
    if (!always && draw_.chance(10)) return t.clone();
    const bool partial = t.scalar_type() == at::kDouble && draw_.chance(20);
    return distribute_tensor(t.clone(), draw_.spec(mesh_, t.sizes().vec(), partial)).detach();
  }

  // How the call has ended on all ranks.
  std::vector<End> ends(const Call& call) {
    std::vector<End> all;
    for (const std::string& one :
         mesh_.all().all_gather_bytes(std::string(1, static_cast<char>(call.end))))
      all.push_back(static_cast<End>(one[0]));
    return all;
  }

  void compare(const Base& base, const c10::OperatorHandle& op, const Values& arguments,
               bool right) {
    torch::jit::Stack plain, sharded;
    bool first = true;
    std::string text;
    for (const c10::IValue& v : arguments) {
      plain.push_back(with_tensors(v, [](const at::Tensor& t) { return t.clone(); }));
      sharded.push_back(with_tensors(
          v, [&](const at::Tensor& t) { return placed(t, std::exchange(first, false)); }));
      text += describe(sharded.back()) + ", ";
    }
    SCOPED_TRACE(concat(base.name, "(", text, ")"));
    const Call expected = guarded([&] { return run(op, plain); });
    std::vector<End> all;
    Call got = guarded([&] {
      Call call = run(op, sharded);
      all = ends(call);
      return call;
    });
    if (got.end != End::taken) all = ends(got);
    const bool throws = expected.end != End::taken;
    EXPECT_FALSE(right && throws) << "the base: " << expected.what;
    judge(all, throws, expected, got);
    if (std::ranges::count(all, End::taken) < static_cast<int>(all.size())) {
      ++refused;
    } else if (!throws) {
      ++taken;
      // Of no samples plain libtorch makes a result of the shape of the input.
      const bool of_nothing =
          base.name == "aten::pixel_unshuffle" && expected.results[0].numel() == 0;
      if (base.values != Base::Values::drawn && !of_nothing &&
          (base.values != Base::Values::finite || all_finite(arguments)))
        same(expected, got, base.values == Base::Values::first, tolerance(arguments));
    }
    ASSERT_DOUBLE_EQ(
        distribute_tensor(at::ones({3}, at::kDouble), mesh_, mesh_shards()).sum().item<double>(),
        3);
  }

  void judge(const std::vector<End>& all, bool throws, const Call& expected, const Call& got) {
    const auto count = [&](End end) { return std::ranges::count(all, end); };
    const auto ranks = static_cast<std::ptrdiff_t>(all.size());
    EXPECT_EQ(count(End::communication), 0) << got.what;
    EXPECT_TRUE(count(End::taken) == 0 || count(End::taken) == ranks)
        << "is refused on some ranks: " << got.what;
    EXPECT_TRUE(count(End::taken) == 0 || !throws || refuses_nothing(expected))
        << "is taken, plain: " << expected.what;
    // An error that one rank saw alone is that of a value.
    EXPECT_TRUE(count(End::peer) == 0 || throws) << got.what;
    EXPECT_TRUE(throws || got.end == End::taken || got.end == End::refused ||
                got.end == End::peer || tells_overflow(got))
        << got.what;
  }

  std::vector<Placement> mesh_shards() const {
    std::vector<Placement> all(mesh_.mesh().axes().size());
    all[0] = Shard(0);
    return all;
  }

  void same(const Call& expected, const Call& got, bool only_first, double most) {
    ++compared;
    ASSERT_EQ(got.results.size(), expected.results.size());
    for (std::size_t i = 0; i < (only_first ? 1 : expected.results.size()); ++i) {
      const at::Tensor &e = expected.results[i], &g = got.results[i];
      ASSERT_EQ(g.defined(), e.defined()) << "result " << i;
      if (!e.defined()) continue;
      ASSERT_EQ(g.layout(), e.layout());
      const auto type = e.scalar_type();
      const double within = type == at::kBFloat16                             ? 2e-2
                            : type == at::kFloat || type == at::kComplexFloat ? 1e-5
                                                                              : most;
      EXPECT_LT(difference(g, e), within) << "result " << i << ":\n" << whole(g) << "\n" << e;
    }
  }

  DeviceMesh mesh_;
  /// Of the wrong calls, how many are made.
  int percent_;
  Draw draw_;
};

class Perturbed : public ::testing::TestWithParam<Family> {};

TEST_P(Perturbed, IsRefusedOrTakenAlike) {
  const Family& family = GetParam();
  const auto bases = static_cast<int>(family.bases.size());
  on_threads(2, [&](DistributedManager& manager) {
    Fuzzer fuzzer(manager, {{"x", 2}}, 100, 7);
    for (const Base& base : family.bases) fuzzer.perturb(base);
    // So that it cannot become hollow.
    EXPECT_GE(fuzzer.sound * 10, bases * 9);
    EXPECT_GE(fuzzer.refused, bases * 8) << "calls that are refused";
    EXPECT_GE(fuzzer.taken, bases * 15) << "calls that are taken";
    if (family.name != "random") {
      EXPECT_GE(fuzzer.compared, bases * 10) << "results";
    }
  });
}

TEST_P(Perturbed, OnTwoAxes) {
  on_threads(4, [&](DistributedManager& manager) {
    Fuzzer fuzzer(manager, {{"a", 2}, {"b", 2}}, 10, 8);
    for (const Base& base : GetParam().bases) fuzzer.perturb(base);
  });
}

INSTANTIATE_TEST_SUITE_P(Arguments, Perturbed, ::testing::ValuesIn(argument_families()),
                         [](const auto& of) { return of.param.name; });

}  // namespace
}  // namespace tessera::test::arguments_fuzz_test

// For every operator: inputs of drawn shapes in drawn placements on drawn meshes give the values and gradients of plain libtorch.

#include <mutex>

#include "cases.h"

namespace tessera::test {

namespace {

constexpr double kTolerance = 1e-10;

// What a case says when it fails, once an operator.
class Failures {
 public:
  void add(const std::string& name, const std::string& what) {
    const std::lock_guard lock(mutex_);
    if (seen_[name]++ == 0) text_ += concat("\n", name, ": ", what);
  }
  const std::string& text() const { return text_; }

 private:
  std::mutex mutex_;
  std::map<std::string, int> seen_;
  std::string text_;
};

struct Compared {
  std::vector<at::Tensor> values, gradients;
};

Compared differentiate(const Instance& instance, const std::vector<at::Tensor>& inputs, std::uint64_t number) {
  Compared c;
  c.values = instance.function(inputs);
  at::Tensor loss;
  test::seed(number);
  std::vector<at::Tensor> weights;
  for (const at::Tensor& v : c.values) weights.push_back(randn(v.sizes(), at::kDouble));
  for (std::size_t i = 0; i < c.values.size(); ++i) {
    if (!c.values[i].requires_grad()) continue;
    const at::Tensor term = (c.values[i] * weights[i]).sum();
    loss = loss.defined() ? loss + term : term;
  }
  if (loss.defined()) loss.backward();
  for (const at::Tensor& t : inputs) c.gradients.push_back(t.grad());
  return c;
}

void compare(const OperatorCase& one, std::uint64_t number, const DeviceMesh& mesh, Draw& draw, Failures& failures) {
  test::seed(number);
  const Instance instance = one.make(draw);
  std::vector<at::Tensor> plain, sharded;
  std::string where;
  for (const at::Tensor& t : instance.inputs) {
    const ShardSpec spec = draw.spec(mesh, t.sizes().vec(), at::isFloatingType(t.scalar_type()));
    where += concat(where.empty() ? "" : "; ", spec);
    plain.push_back(t.clone());
    if (at::isFloatingType(t.scalar_type())) plain.back().requires_grad_(true);
    sharded.push_back(leaf(t, spec));
  }
  const Compared expected = differentiate(instance, plain, number);
  try {
    const Compared got = differentiate(instance, sharded, number);
    for (std::size_t i = 0; i < got.values.size(); ++i) {
      if (!is_sharded(got.values[i])) failures.add(one.name, "the result is a plain tensor");
      if (const double d = difference(got.values[i], expected.values[i]); !(d < kTolerance))
        failures.add(one.name, concat("value ", i, " differs by ", d, " with ", where));
      if (got.values[i].strides() != expected.values[i].strides() && expected.values[i].numel() > 1) {
        failures.add(one.name, concat("strides ", got.values[i].strides(), " instead of ", expected.values[i].strides(), " with ", where));
      }
    }
    for (std::size_t i = 0; i < got.gradients.size(); ++i) {
      if (got.gradients[i].defined() != expected.gradients[i].defined()) {
        failures.add(one.name, concat("gradient ", i, " is ", got.gradients[i].defined() ? "there" : "missing", " with ", where));
      } else if (got.gradients[i].defined()) {
        if (const double d = difference(got.gradients[i], expected.gradients[i]); !(d < kTolerance)) {
          failures.add(one.name, concat("gradient ", i, " differs by ", d, " with ", where));
        }
      }
    }
  } catch (const CommError&) {
    throw;  // the ranks no longer agree: nothing that follows would mean anything
  } catch (const std::exception& e) {
    failures.add(one.name, concat(std::string(e.what()).substr(0, 600), " with ", where));
  }
}

}  // namespace

class Operators : public ::testing::TestWithParam<int> {};

TEST_P(Operators, GiveWhatOneProcessGives) {
  const int ranks = GetParam();
  constexpr int kDraws = 12;
  Failures failures;
  for (std::size_t n = 0; n < operator_cases().size(); ++n) {
    const OperatorCase& one = operator_cases()[n];
    try {
      on_threads(ranks, [&](DistributedManager& manager) {
        set_policies(manager, {.redistribution = Policy::allow});
        for (int i = 0; i < kDraws; ++i) {
          const std::uint64_t number = 1000003ull * static_cast<std::uint64_t>(ranks) + 1009 * n + static_cast<std::uint64_t>(i);
          Draw draw(number);
          compare(one, number, manager.mesh(draw.axes(ranks)), draw, failures);
        }
      });
    } catch (const std::exception& e) {
      failures.add(one.name, concat("stopped: ", std::string(e.what()).substr(0, 600)));
    }
  }
  EXPECT_EQ(failures.text(), "");
}

INSTANTIATE_TEST_SUITE_P(Ranks, Operators, ::testing::Values(1, 2, 3, 4));

}  // namespace tessera::test

// Differentiable collectives: the adjoint identity, replicated cotangents against one process,
// second derivatives.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <numeric>

#include "../support/ranks.h"
#include "tessera/comm/group/functional.h"

namespace tessera::functional_test {
namespace {

using functional::Cotangent;
using torch::Tensor;
using Map = std::function<Tensor(const Group&, const Tensor&)>;

Tensor random(int rank, const std::vector<std::int64_t>& shape, std::uint64_t seed) {
  return torch::randn(shape,
                      at::detail::createCPUGenerator(seed * 100 + static_cast<std::uint64_t>(rank)),
                      torch::kDouble);
}

double sum_over_ranks(const Group& group, const Tensor& value) {
  auto t = value.detach().to(torch::kDouble).reshape({1}).clone();
  group.all_reduce(t);
  return t.item<double>();
}

Sizes sizes_of(int n) {
  Sizes sizes;
  for (int r = 0; r < n; ++r) sizes.push_back((2 * r + 3) % 4);
  return sizes;
}

struct Named {
  std::string name;
  std::function<std::vector<std::int64_t>(const Group&)> shape;  // of this rank's input
  Map map;
};

std::vector<Named> maps() {
  auto all = [](const Group& g) {
    const auto s = sizes_of(g.size());
    return std::accumulate(s.begin(), s.end(), std::int64_t{0});
  };
  auto fixed = [](const Group&) { return std::vector<std::int64_t>{4, 3}; };
  auto own = [](const Group& g) {
    return std::vector<std::int64_t>{sizes_of(g.size())[g.rank()], 3};
  };
  auto whole = [all](const Group& g) { return std::vector<std::int64_t>{all(g), 3}; };
  auto even = [](const Group& g) { return std::vector<std::int64_t>{2 * g.size(), 3}; };
  std::vector<Named> out{
      {"all_reduce", fixed,
       [](const Group& g, const Tensor& x) { return functional::all_reduce(g, x); }},
      {"all_reduce avg", fixed,
       [](const Group& g, const Tensor& x) { return functional::all_reduce(g, x, ReduceOp::avg); }},
      {"all_reduce premultiplied", fixed,
       [](const Group& g, const Tensor& x) {
         return functional::all_reduce(g, x, ReduceOp::premultiplied(0.5 + g.rank()));
       }},
      {"all_gather", fixed,
       [](const Group& g, const Tensor& x) { return functional::all_gather(g, x); }},
      {"all_gather uneven", own,
       [](const Group& g, const Tensor& x) {
         return functional::all_gather(g, x, sizes_of(g.size()));
       }},
      {"reduce_scatter", even,
       [](const Group& g, const Tensor& x) { return functional::reduce_scatter(g, x); }},
      {"reduce_scatter uneven avg", whole,
       [](const Group& g, const Tensor& x) {
         return functional::reduce_scatter(g, x, sizes_of(g.size()), ReduceOp::avg);
       }},
      {"all_to_all", even,
       [](const Group& g, const Tensor& x) { return functional::all_to_all(g, x); }},
      {"all_to_all uneven",
       [](const Group& g) { return std::vector<std::int64_t>{g.size() * g.rank(), 3}; },
       [](const Group& g, const Tensor& x) {
         Sizes from(g.size());
         std::iota(from.begin(), from.end(), 0);  // rank r sends r rows to every rank
         return functional::all_to_all(g, x, from, Sizes(g.size(), g.rank()));
       }},
      {"transposed input", fixed,
       [](const Group& g, const Tensor& x) { return functional::all_gather(g, x.t()); }},
  };
  for (const bool last : {false, true}) {
    auto root = [last](const Group& g) { return last ? g.size() - 1 : 0; };
    const std::string tag = last ? " to the last" : " to the first";
    out.push_back({"broadcast" + tag, fixed, [root](const Group& g, const Tensor& x) {
                     return functional::broadcast(g, x, root(g));
                   }});
    out.push_back({"reduce" + tag, fixed, [root](const Group& g, const Tensor& x) {
                     return functional::reduce(g, x, root(g));
                   }});
    out.push_back({"gather" + tag, own, [root](const Group& g, const Tensor& x) {
                     return functional::gather(g, x, root(g), sizes_of(g.size()));
                   }});
    out.push_back({"scatter" + tag,
                   [root, all](const Group& g) {
                     return std::vector<std::int64_t>{g.rank() == root(g) ? all(g) : 0, 3};
                   },
                   [root](const Group& g, const Tensor& x) {
                     return functional::scatter(g, x, root(g), sizes_of(g.size()));
                   }});
  }
  // Rank 0 sends to the last rank: what it holds afterwards is the (empty) token, and the last
  // rank's output is what it received.
  out.push_back({"send and receive", fixed, [](const Group& g, const Tensor& x) {
                   if (g.size() == 1) return x * 1.0;
                   if (g.rank() == 0) return functional::send(g, x, g.size() - 1);
                   if (g.rank() == g.size() - 1) return functional::receive(g, x, 0);
                   return x * 1.0;
                 }});
  return out;
}

class Functional : public ::testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  void run(const std::function<void(const Group&)>& body) {
    ManagerOptions options;
    options.backend = std::get<0>(GetParam());
    options.timeout = std::chrono::seconds(30);
    options.check_level = CheckLevel::collective;
    test::on_ranks(
        std::get<1>(GetParam()), [&](DistributedManager& manager) { body(manager.world()); },
        options);
  }
};

TEST_P(Functional, BackwardIsTheAdjoint) {
  run([](const Group& g) {
    for (const auto& [name, shape, map] : maps()) {
      auto x = random(g.rank(), shape(g), 1).requires_grad_();
      const auto y = map(g, x);
      const auto w = random(g.rank(), y.sizes().vec(), 2);
      y.backward(w);
      const double left = sum_over_ranks(g, (y * w).sum()),
                   right = sum_over_ranks(g, (x * x.grad()).sum());
      EXPECT_NEAR(left, right, 1e-12 * (1 + std::abs(left))) << name << " on " << g.size();
    }
  });
}

// d/dx of sum_r |A x|^2 / 2 is A' A x; its derivative in direction v is A' A v. The second backward
// must give exactly that.
TEST_P(Functional, TwiceDifferentiated) {
  run([](const Group& g) {
    for (const auto& [name, shape, map] : maps()) {
      auto x = random(g.rank(), shape(g), 3).requires_grad_();
      const auto v = random(g.rank(), shape(g), 4);
      const auto y = map(g, x);
      const auto first = torch::autograd::grad({(y * y).sum() / 2}, {x}, {}, true, true)[0];
      const auto second = torch::autograd::grad({first}, {x}, {v})[0];
      auto u = v.clone().requires_grad_();
      const auto z = map(g, u);
      z.backward(z.detach());
      EXPECT_TRUE(torch::allclose(second, u.grad(), 1e-12, 1e-12))
          << name << " on " << g.size() << "\n"
          << second << u.grad();
    }
  });
}

// All ranks compute one loss from an output that they all hold: gradients must be those of one
// process that holds all inputs.
TEST_P(Functional, ReplicatedCotangentsEqualOneProcess) {
  run([](const Group& g) {
    const int n = g.size(), me = g.rank();
    auto loss = [](const Tensor& y) { return (y * y * y).sum() + y.sin().sum(); };
    auto check = [&](const char* name, const Tensor& y, const Tensor& x, const Tensor& reference_y,
                     const Tensor& reference_x) {
      const auto first = torch::autograd::grad({loss(y)}, {x}, {}, true, true)[0];
      const auto want =
          torch::autograd::grad({loss(reference_y)}, {reference_x}, {}, true, true)[0];
      EXPECT_TRUE(torch::allclose(first, want, 1e-12, 1e-12))
          << name << " rank " << me << " of " << n;
      // Second derivatives: of the sum over ranks of <gradient, gradient>, which is one number that
      // all ranks know by summing.
      const auto energy =
          functional::all_reduce(g, (first * first).sum(), ReduceOp::sum, Cotangent::replicated);
      const auto second = torch::autograd::grad({energy}, {x})[0];
      return second;
    };
    std::vector<Tensor> inputs;
    for (int r = 0; r < n; ++r) inputs.push_back(random(r, {2, 3}, 5).requires_grad_());
    auto energy_reference = [&](const Tensor& y, const std::vector<Tensor>& xs, int index) {
      const auto grads = torch::autograd::grad({loss(y)}, xs, {}, true, true, true);
      Tensor energy = torch::zeros({}, torch::kDouble);
      for (const auto& d : grads)
        if (d.defined()) energy = energy + (d * d).sum();
      return torch::autograd::grad({energy}, {xs[index]}, {}, true, false, true)[0];
    };

    auto x = inputs[me].detach().clone().requires_grad_();
    {
      Tensor y = inputs[0];
      for (int r = 1; r < n; ++r) y = y + inputs[r];
      const auto second =
          check("all_reduce", functional::all_reduce(g, x, ReduceOp::sum, Cotangent::replicated), x,
                y, inputs[me]);
      EXPECT_TRUE(torch::allclose(second, energy_reference(y, inputs, me), 1e-10, 1e-10))
          << "all_reduce twice, " << n;
    }
    {
      const auto y = torch::cat(inputs);
      const auto second = check(
          "all_gather", functional::all_gather(g, x, {}, Cotangent::replicated), x, y, inputs[me]);
      EXPECT_TRUE(torch::allclose(second, energy_reference(y, inputs, me), 1e-10, 1e-10))
          << "all_gather twice, " << n;
    }
    {
      const int root = n - 1;
      const auto y = inputs[root] * 1.0;
      const auto mine = functional::broadcast(g, x, root, Cotangent::replicated);
      const auto first = torch::autograd::grad({loss(mine)}, {x})[0];
      const auto want = torch::autograd::grad({loss(y)}, {inputs[root]})[0];
      EXPECT_TRUE(
          torch::allclose(first, me == root ? want : torch::zeros_like(want), 1e-12, 1e-12));
    }
  });
}

TEST_P(Functional, ReplicateSumsWhatTheRanksMakeOfOneValue) {
  run([](const Group& g) {
    auto x = random(0, {3}, 7).requires_grad_();  // the same on all ranks
    (functional::replicate(g, x) * (g.rank() + 1.0)).sum().backward();
    EXPECT_TRUE(torch::allclose(x.grad(),
                                torch::full({3}, g.size() * (g.size() + 1) / 2.0, torch::kDouble)));
    auto whole = random(0, {2 * g.size(), 3}, 8).requires_grad_();
    const auto rows = functional::own_rows(g, whole, Sizes(g.size(), 2));
    rows.backward(torch::full_like(rows, g.rank() + 1.0));
    for (int r = 0; r < g.size(); ++r) EXPECT_EQ(whole.grad()[2 * r][0].item<double>(), r + 1.0);
  });
}

TEST_P(Functional, WhatIsNotLinearIsRefused) {
  run([](const Group& g) {
    EXPECT_THROW(functional::all_reduce(g, torch::ones({2}), ReduceOp::max), InvalidArgument);
    EXPECT_THROW(functional::reduce_scatter(g, torch::ones({2 * g.size()}), {}, ReduceOp::product),
                 InvalidArgument);
  });
}

TEST_P(Functional, RanksThatDisagreeAboutNeedingAGradientThrow) {
  run([](const Group& g) {
    if (g.size() == 1) return;
    auto x = torch::ones({2}).requires_grad_(g.rank() == 0);
    EXPECT_THROW(functional::all_reduce(g, x), MismatchError);
  });
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<std::string, int>>& info) {
  return std::get<0>(info.param) + std::to_string(std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Backends, Functional,
                         ::testing::Combine(::testing::Values("threads", "gloo", "shm"),
                                            ::testing::Values(1, 2, 3, 4)),
                         name_of);

}  // namespace
}  // namespace tessera::functional_test

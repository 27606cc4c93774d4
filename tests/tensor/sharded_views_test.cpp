// Views whose base had to be gathered, kernels' own temporaries, plain tensors that differ, and
// failures of one rank.

#include <torch/library.h>

#include "support.h"

namespace tessera::test::sharded_views_test {

namespace {

// A kernel as libtorch's own are: a plain tensor of the result's shape, filled through a view of
// it.
at::Tensor embed(const at::Tensor& x) {
  const at::Tensor result = at::zeros({x.size(0), x.size(0)}, at::TensorOptions(x.scalar_type()));
  result.diagonal().copy_(x);
  return result;
}
TORCH_LIBRARY(tessera_view_test, m) {
  m.def("embed(Tensor x) -> Tensor");
  m.def("without_rule(Tensor x) -> Tensor");
}
TORCH_LIBRARY_IMPL(tessera_view_test, CompositeExplicitAutograd, m) { m.impl("embed", embed); }
TORCH_LIBRARY_IMPL(tessera_view_test, CPU, m) {
  m.impl("without_rule", [](const at::Tensor& x) { return x * 2; });
}
TORCH_LIBRARY_IMPL(tessera_view_test, PrivateUse2, m) { m.impl("embed", embed); }

void on_two(const std::function<void(DistributedManager&, const DeviceMesh&)>& body) {
  on_ranks(2, [&](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::allow});
    body(manager, manager.mesh({{"x", 2}}));
  });
}

}  // namespace

// A view that communicates is a copy; what is written to it is written back.
TEST(Rule06ViewsThatMove, WritesReachTheBase) {
  on_two([](DistributedManager&, const DeviceMesh& mesh) {
    const auto write = [](at::Tensor x) {
      x[1] = 5;
      x[-1].slice(0, 0, 2).mul_(3);  // a view of the copy
      x.select(0, 2)[1].fill_(7);    // a copy of a copy where dim 1 is sharded too
      x.unbind(0)[3].sub_(1);
      x.diagonal().add_(0.5);
      x.flatten().slice(0, 3, 9, 2).mul_(2);
      x.t()[0].neg_();
      return x;
    };
    const at::Tensor value = randn({5, 4}, at::kDouble);
    const at::Tensor expected = write(value.clone());
    for (const ShardSpec& spec : {ShardSpec(mesh, {5, 4}, {Shard(0)}, {{0, {3, 2}}}),
                                  ShardSpec(mesh, {5, 4}, {Shard(1)}, {{1, {1, 3}}}),
                                  ShardSpec(mesh, {5, 4}, {Shard(0)}, {{0, {0, 5}}})}) {
      EXPECT_EQ(difference(write(distribute_tensor(value.clone(), spec)), expected), 0) << spec;
    }
  });
}

// A conjugate is a view, and so are its real and imaginary parts: what is written to them reaches
// the tensor.
TEST(Rule04LazyBits, WritesReachTheBase) {
  on_two([](DistributedManager&, const DeviceMesh& mesh) {
    const auto write = [](at::Tensor x) {
      x.conj().add_(c10::complex<double>(1, 2));
      at::imag(x.conj()).mul_(3);
      at::real(x.conj()).select(1, 1).add_(5);
      at::imag(x.conj().t())[2].sub_(1);
      at::view_as_real(x.conj().resolve_conj()).zero_();  // a view of memory of its own
      return x;
    };
    const at::Tensor value = randn({5, 4}, at::kComplexDouble), w = randn({5, 4}, at::kDouble);
    const at::Tensor expected = write(value.clone());
    for (const ShardSpec& spec :
         {ShardSpec::replicated(mesh, {5, 4}), ShardSpec(mesh, {5, 4}, {Shard(0)}, {{0, {3, 2}}}),
          ShardSpec(mesh, {5, 4}, {Shard(1)}, {{1, {4, 0}}})}) {
      EXPECT_EQ(difference(write(distribute_tensor(value.clone(), spec)), expected), 0) << spec;
      EXPECT_TRUE(distribute_tensor(value.clone(), spec).conj().is_conj());
      const at::Tensor a = value.clone().requires_grad_(),
                       x = distribute_tensor(value.clone(), spec).requires_grad_();
      (at::real(a.conj() * a.conj()) * at::imag(a.conj()) * w).sum().backward();
      (at::real(x.conj() * x.conj()) * at::imag(x.conj()) *
       distribute_tensor(w, mesh, spec.placements(), spec.sizes()))
          .sum()
          .backward();
      EXPECT_LT(difference(x.grad(), a.grad()), 1e-12) << spec;
    }
    // Each rank holds a factor of every element: neither real parts nor negatives of factors are
    // those of the product.
    const at::Tensor factors = distribute_tensor(
        value.clone(), ShardSpec(mesh, {5, 4}, {Partial(ReduceOp::Kind::product)}));
    EXPECT_LT(difference(at::real(factors), at::real(value)), 1e-12);
    EXPECT_LT(difference(at::imag(factors.conj()), at::imag(value.conj())), 1e-12);
    const at::Tensor sum = value.clone();
    for (const at::Tensor& t : {sum, factors}) at::real(t).add_(2);
    EXPECT_LT(difference(factors, sum), 1e-12);
  });
}

TEST(Rule06ViewsThatMove, GradientsOfWrites) {
  on_two([](DistributedManager&, const DeviceMesh& mesh) {
    const at::Tensor value = randn({5, 4}, at::kDouble), w = randn({5, 4}, at::kDouble);
    const auto gradient = [&](const at::Tensor& x) {
      at::Tensor y = x * 2;
      y[1].mul_(10);
      y.select(0, 3).copy_(y.select(0, 0));
      (y * w).sum().backward();
      return x.grad();
    };
    const at::Tensor expected = gradient(value.clone().requires_grad_(true));
    EXPECT_LT(difference(gradient(leaf(value, ShardSpec(mesh, {5, 4}, {Shard(0)}, {{0, {2, 3}}}))),
                         expected),
              1e-14);
  });
}

TEST(Rule06ViewsThatMove, AreTakenAgainOnceTheBaseHasChanged) {
  on_two([](DistributedManager&, const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(at::ones({4, 3}), mesh, {Shard(0)});
    const at::Tensor row = x[1], alias = x.slice(0, 1, 3);
    EXPECT_NO_THROW(row + 1);
    row.add_(1);
    EXPECT_NO_THROW(row + 1) << "its own write";
    x.mul_(2);
    EXPECT_TRUE(whole(row + 1).equal(at::full({3}, 5.0)));
    EXPECT_TRUE(full_tensor(row).equal(at::full({3}, 4.0)));
    x.mul_(2);
    EXPECT_TRUE(full_tensor(row).equal(at::full({3}, 8.0))) << "not through an operator";
    x.mul_(0.5);
    EXPECT_THROW(to_local(row), ShardingError) << "no other rank takes part in it";
    EXPECT_EQ(spec(row).shape(), std::vector<std::int64_t>{3});
    EXPECT_TRUE(full_tensor(redistribute(row, {Shard(0)})).equal(at::full({3}, 4.0)));
    EXPECT_NO_THROW(to_local(row));
    EXPECT_EQ(whole(alias)[0][0].item<float>(), 4) << "a view that shares memory follows its base";
  });
}

// Where one rank has everything it needs no copy, which the others are sent.
TEST(Rule06ViewsThatMove, OfARankThatHasEverythingAreAsThoseOfTheOthers) {
  const at::Tensor value = randn({5, 4}, at::kDouble);
  const auto write = [](const at::Tensor& x) {
    x[1].sub_(2);
    x.unsqueeze(0).select(1, 3).mul_(3);
    const at::Tensor row = x.slice(0, 2)[1];
    row.add_(1);
    return row + 1;
  };
  const at::Tensor expected = value.clone(), row = write(expected);
  for (const std::vector<std::int64_t>& sizes :
       {std::vector<std::int64_t>{5}, {0, 5}, {0, 0, 5}, {5, 0, 0}}) {
    on_ranks(static_cast<int>(sizes.size()), [&](DistributedManager& manager) {
      set_policies(manager, {.redistribution = Policy::allow});
      const DeviceMesh mesh = manager.mesh({{"x", static_cast<int>(sizes.size())}});
      const at::Tensor x =
          distribute_tensor(value.clone(), ShardSpec(mesh, {5, 4}, {Shard(0)}, {{0, sizes}}));
      EXPECT_EQ(difference(write(x), row), 0);
      EXPECT_EQ(difference(x, expected), 0);
      const at::Tensor first = x[1], second = x[1];
      second.add_(1);
      EXPECT_EQ(difference(first + 1, second + 1), 0) << "on every rank";
      EXPECT_EQ(difference(x.select(0, 1), second), 0);
    });
  }
}

// What a kernel writes through a view of its own plain temporary would be lost.
TEST(Rule16PlainTemporaries, WithViewsAreRefused) {
  on_two([](DistributedManager&, const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(at::ones({4}), mesh, {Shard(0)});
    const auto op = c10::Dispatcher::singleton()
                        .findSchemaOrThrow("tessera_view_test::embed", "")
                        .typed<at::Tensor(const at::Tensor&)>();
    try {
      op.call(x);
      ADD_FAILURE() << "the write to the diagonal is lost";
    } catch (const ShardingError& e) {
      EXPECT_NE(std::string(e.what()).find("into a plain tensor"), std::string::npos) << e.what();
    }
  });
}

TEST(PlainTensors, ThatDifferAreReportedByTheCollectiveCheck) {
  on_two([](DistributedManager& manager, const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(at::ones({4}), mesh, {Shard(0)});
    const at::Tensor mine = at::full({4}, manager.rank());
    EXPECT_NO_THROW(x + mine) << "not looked at without the check";
    manager.set_check_level(CheckLevel::collective);
    EXPECT_NO_THROW(x + at::ones({4}));
    EXPECT_THROW(x + mine, MismatchError);
  });
}

// An index out of range on one rank alone: the other one must not wait for it.
TEST(Failures, OfOneRankReachTheOthers) {
  std::atomic<int> own = 0, told = 0;
  const auto start = std::chrono::steady_clock::now();
  if (process()) return;  // what a rank throws ends it there
  EXPECT_ANY_THROW(on_two([&](DistributedManager& manager, const DeviceMesh& mesh) {
    const at::Tensor table = distribute_tensor(at::ones({4, 2}), mesh, {Replicate()});
    const at::Tensor index = from_local(at::full({3}, manager.rank() == 1 ? 9 : 1, at::kLong), mesh,
                                        {Shard(0)}, {{0, {3, 3}}});
    try {
      whole(at::embedding(table, index).sum());
    } catch (const PeerLostError& e) {
      EXPECT_EQ(manager.rank(), 0);
      EXPECT_NE(std::string(e.what()).find("aten::embedding"), std::string::npos) << e.what();
      ++told;
      throw;
    } catch (const std::exception&) {
      EXPECT_EQ(manager.rank(), 1);
      ++own;
      throw;
    }
  }));
  EXPECT_EQ(own, 1);
  EXPECT_EQ(told, 1);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

// A refusal is the same on every rank, and the tensors stay usable.
TEST(Failures, RefusalsLeaveEverythingUsable) {
  on_two([](DistributedManager&, const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(at::ones({4, 4}), mesh, {Shard(0)});
    const auto op = c10::Dispatcher::singleton()
                        .findSchemaOrThrow("tessera_view_test::without_rule", "")
                        .typed<at::Tensor(const at::Tensor&)>();
    EXPECT_THROW(op.call(x), NoRuleError);
    EXPECT_ANY_THROW(x + at::ones({3}));
    EXPECT_EQ(whole(x.sum()).item<float>(), 16);
  });
}

}  // namespace tessera::test::sharded_views_test

// What is written through one handle on a sharded tensor is seen through the others, or these are
// refused.

#include <torch/library.h>

#include "support.h"
#include "tessera/tensor/dispatch/rule.h"
#include "tessera/tensor/errors.h"
#include "tessera/tensor/policy.h"

namespace tessera::test::writes_test {
namespace {

TORCH_LIBRARY(tessera_writes_test, m) { m.def("fill_both(Tensor(a!) x, Tensor(b!) y) -> ()"); }
TORCH_LIBRARY_IMPL(tessera_writes_test, CPU, m) {
  m.impl("fill_both", [](const at::Tensor& x, const at::Tensor& y) {
    x.fill_(1);
    y.fill_(2);
  });
}

using Results = std::vector<at::Tensor>;
using Run = std::function<Results(const at::Tensor&)>;

void on_two(const std::function<void(const DeviceMesh&)>& body) {
  on_ranks(2, [&](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::allow});
    body(manager.mesh({{"x", 2}}));
  });
}

// `run` on `value` sharded in any dim gives what it gives on one process.
void as_plain(const at::Tensor& value, const Run& run) {
  on_two([&](const DeviceMesh& mesh) {
    const Results expected = run(value.clone());
    for (int dim = 0; dim < value.dim(); ++dim) {
      const Results got = run(distribute_tensor(value.clone(), mesh, {Shard(dim)}).detach());
      for (std::size_t i = 0; i < expected.size(); ++i)
        EXPECT_LT(difference(got[i], expected[i]), 1e-14) << "result " << i << ", dim " << dim;
    }
  });
}

at::Tensor counted() { return at::arange(12, at::kDouble).view({4, 3}) + 1; }

}  // namespace

TEST(Writes, ToAliasesInOneList) {
  as_plain(counted(), [](const at::Tensor& x) -> Results {
    const at::Tensor g = x.sum(0), h = x.sum(0), k = x.sum(0).view({3, 1}), t = k.t();
    at::_foreach_mul_({g, g}, 3);
    at::_foreach_add_({h.narrow(0, 0, 2), h.narrow(0, 2, 1), h.narrow(0, 0, 1)}, 1);
    at::_foreach_sqrt_({k, t});
    return {g, h, k, t};
  });
}

// A part of a module is sharded, and its optimizer works on lists of all parameters.
TEST(Writes, ToListsOfPlainAndShardedTensors) {
  on_two([](const DeviceMesh& mesh) {
    const auto updated = [](const at::Tensor& first, const at::Tensor& plain) {
      plain.requires_grad_(true);
      const at::NoGradGuard no_grad;
      const std::vector<at::Tensor> roots = at::_foreach_sqrt({at::full_like(plain, 0.25), first});
      const at::Tensor step = roots[0], other = at::ones_like(first);
      at::_foreach_mul_({plain, first, plain}, 3);
      at::_foreach_addcmul_({first, plain}, {other, step}, {other, step},
                            std::vector<at::Scalar>{2, 4});
      EXPECT_FALSE(is_sharded(plain) || is_sharded(step));
      return Results{first, plain.detach(), roots[1]};
    };
    const Results expected = updated(counted(), at::ones({2}, at::kDouble)),
                  got = updated(distribute_tensor(counted(), mesh, {Shard(0)}).detach(),
                                at::ones({2}, at::kDouble));
    for (std::size_t i = 0; i < 3; ++i) EXPECT_LT(difference(got[i], expected[i]), 1e-14);
    // A plain tensor that a sharded value is written into.
    const at::Tensor leaf = at::ones({4, 3}, at::kDouble).requires_grad_(true);
    const at::NoGradGuard no_grad;
    EXPECT_THROW(at::_foreach_add_({got[0], leaf}, {got[0], got[0]}), ShardingError);
  });
}

TEST(Writes, ToAViewOfWhatTheSameCallReduces) {
  as_plain(counted(), [](const at::Tensor& x) -> Results {
    const at::Tensor g = x.sum(0), part = g.narrow(0, 0, 3);
    at::_foreach_add_({g}, at::TensorList{part}, 2);
    return {g, part};
  });
}

TEST(Writes, ToCopiedViewsInOneList) {
  as_plain(counted(), [](const at::Tensor& x) -> Results {
    at::_foreach_zero_({x[0], x[1]});
    at::_foreach_add_({x[3], x, x[3]}, 1);  // one after the other, as libtorch does
    const std::vector<at::Scalar> each = {2, 3};
    at::_foreach_mul_({x[2], x.select(1, 1)}, each);
    at::_foreach_mul_({x[2], x[0]}, at::tensor({5.0, 7.0}, at::kDouble).unbind(0));
    at::_foreach_addcmul_({x[0], x[3]}, {x[1].clone(), x[2].clone()}, {x[2].clone(), x[2].clone()},
                          each);
    at::_foreach_add_({x[0], x[1]}, {x[1], x[0]});  // the second with what the first has written
    return {x};
  });
}

TEST(Writes, ToTwoCopiedViewsByAnotherOperatorAreRefused) {
  register_rule("tessera_writes_test::fill_both", [](const OpCall&) { return Plan{}; });
  on_two([](const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(counted(), mesh, {Shard(0)}).detach();
    const auto fill_both = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("tessera_writes_test::fill_both", "")
                               .typed<void(const at::Tensor&, const at::Tensor&)>();
    EXPECT_THROW(fill_both.call(x[0], x[1]), ShardingError);
    EXPECT_LT(difference(x, counted()), 1e-14) << "untouched";
    const at::Tensor y = distribute_tensor(counted(), mesh, {Shard(0)}).detach();
    fill_both.call(x[0], y[1]);
    const at::Tensor one = counted(), two = counted();
    one[0].fill_(1);
    two[1].fill_(2);
    EXPECT_LT(difference(x, one), 1e-14);
    EXPECT_LT(difference(y, two), 1e-14);
  });
}

TEST(Writes, InInferenceModeAreCounted) {
  on_two([](const DeviceMesh& mesh) {
    const c10::InferenceMode mode;
    const auto fresh = [&] { return distribute_tensor(at::ones({4, 3}), mesh, {Shard(0)}); };
    {
      const at::Tensor x = fresh(), row = x[1];
      ASSERT_TRUE(x.is_inference());
      row.add_(1);
      EXPECT_EQ(whole(row + 1)[0].item<float>(), 3) << "its own write";
      x.add_(1);
      EXPECT_EQ(whole(row + 1)[0].item<float>(), 4);
      EXPECT_EQ(whole(x)[1][0].item<float>(), 3);
    }
    {
      const at::Tensor x = fresh(), a = x[0], b = x[1];
      a.add_(1);
      b.add_(2);
      EXPECT_EQ(whole(x)[0][0].item<float>(), 2);
      EXPECT_EQ(whole(x)[1][0].item<float>(), 3);
    }
    for (const bool turn : {false, true}) {
      const at::Tensor x = fresh();
      x.t();  // the next one finds its plan
      const at::Tensor alias = turn ? x.t() : x.narrow(0, 1, 2), row = x[1];
      alias.mul_(2);
      EXPECT_EQ(whole(row + 1)[2].item<float>(), 3) << "written through a view taken before";
    }
    {
      const at::Tensor x = fresh(), row = x[1];
      at::_foreach_add_({x}, 1);
      EXPECT_EQ(whole(row + 1)[0].item<float>(), 3);
      at::_foreach_add_({x[0], x[1]}, 1);
      EXPECT_EQ(whole(x)[0][0].item<float>(), 3);
      EXPECT_EQ(whole(x)[1][0].item<float>(), 3);
    }
  });
}

TEST(Writes, AfterACopiedViewHasChangedItsShape) {
  as_plain(counted(), [](const at::Tensor& x) -> Results {
    at::Tensor v = x[1];
    v.unsqueeze_(0);
    v.mul_(2);
    v.t_();
    v.add_(1);
    v.squeeze_(1);
    v.sub_(3);
    return {x, v};
  });
}

// Every second column of a plain tensor.
TEST(Targets, MayBeSlicesWithAStep) {
  on_two([](const DeviceMesh& mesh) {
    const at::Tensor base = at::zeros({4, 6}, at::kDouble), expected = base.clone();
    base.slice(1, 1, 6, 2).add_(distribute_tensor(counted(), mesh, {Shard(0)}).detach());
    expected.slice(1, 1, 6, 2).add_(counted());
    EXPECT_TRUE(is_sharded(base));
    EXPECT_EQ(difference(base, expected), 0);
  });
}

TEST(Targets, AreWhatTheyWereWhenTheOperatorFails) {
  on_two([](const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(at::ones({4}), mesh, {Shard(0)});
    at::Tensor whole_numbers = at::zeros({4}, at::kLong), short_one = at::zeros({3}),
               two = at::zeros({2, 4}), base = at::zeros({2, 5}), slice = base.narrow(1, 1, 3);
    EXPECT_ANY_THROW(whole_numbers.add_(x));
    EXPECT_ANY_THROW(short_one.add_(x));
    EXPECT_ANY_THROW(two.addmm_(x.view({1, 4}), two));
    EXPECT_ANY_THROW(slice.add_(x));
    {
      const at::NoGradGuard no_grad;
      EXPECT_ANY_THROW(short_one.mul_(x));
    }
    for (const at::Tensor& t : {whole_numbers, short_one, two, base, slice}) {
      EXPECT_FALSE(is_sharded(t));
      EXPECT_EQ(t.add(1).sum().item<double>(), static_cast<double>(t.numel()));
      EXPECT_NE(t.data_ptr(), nullptr);
    }
    // With a history.
    const at::Tensor w = at::ones({3}).requires_grad_(true);
    at::Tensor y = w * 2;
    EXPECT_ANY_THROW(y.add_(x));
    EXPECT_FALSE(is_sharded(y));
    y.sum().backward();
    EXPECT_TRUE(w.grad().equal(at::full({3}, 2.0f)));
  });
}

// Views that show the elements as another type, conjugated or negated.
TEST(Aliases, OfAnotherTypeFollowWhatAPartialTensorWasReducedTo) {
  on_two([](const DeviceMesh& mesh) {
    test::seed(3);
    const at::Tensor a = randn({2, 4}, at::kComplexDouble), b = randn({4, 3}, at::kComplexDouble),
                     r = randn({4, 3, 2}, at::kDouble);
    const auto run = [&](bool sharded) -> Results {
      const auto lay = [&](const at::Tensor& t, int dim) {
        return sharded ? distribute_tensor(t.clone(), mesh, {Shard(dim)}).detach() : t.clone();
      };
      const auto made = [&] { return lay(a, 1).mm(lay(b, 0)); };
      const at::Tensor x = made(), real = at::view_as_real(x);
      EXPECT_TRUE(!sharded || spec(real).has_partial());
      const at::Tensor size = x.abs();  // reduces it
      real.mul_(2);
      const at::Tensor y = made(), conj = y.conj(), part = conj.narrow(0, 1, 1),
                       imag = at::imag(conj);
      y.abs();
      y.mul_(at::Scalar(c10::complex<double>(0, 2)));
      imag.add_(1);
      const at::Tensor p = lay(r, 0).sum(0), z = at::view_as_complex(p);
      p.exp();
      z.mul_(3);
      const at::Tensor w = made(), shown = at::view_as_real(w);
      shown.exp_();  // reduces what it is a view of
      return {size, x, real, y, conj.resolve_conj(), part.resolve_conj(), imag.resolve_neg(),
              p,    z, w};
    };
    const Results expected = run(false), got = run(true);
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_LT(difference(got[i], expected[i]), 1e-13) << i;
  });
}

}  // namespace tessera::test::writes_test

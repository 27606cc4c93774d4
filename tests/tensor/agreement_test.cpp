// Ranks decide alike: what one rank alone holds, keeps or believes changes no collective.

#include "support.h"
#include "tessera/comm/group/trace.h"
#include "tessera/tensor/policy.h"

namespace tessera::test::agreement_test {
namespace {

at::Tensor cut(const DeviceMesh& mesh, const at::Tensor& t, int dim, bool grad = false) {
  at::Tensor made = distribute_tensor(t.clone(), mesh, {Shard(dim)}).detach();
  return grad ? made.requires_grad_(true) : made;
}

// The ways in which a program holds on to a result.
using Hold = std::function<at::Tensor(const at::Tensor&)>;
const std::vector<std::pair<const char*, Hold>>& holds() {
  static const std::vector<std::pair<const char*, Hold>> all = {
      {"detach", [](const at::Tensor& t) { return t.detach(); }},
      {"data", [](const at::Tensor& t) { return t.variable_data(); }},
      {"view", [](const at::Tensor& t) { return t.dim() == 0 ? t.view({1}) : t.narrow(0, 0, 1); }},
      {"to_local", [](const at::Tensor& t) { return to_local(t); }},
      {"itself", [](const at::Tensor& t) { return t; }},
  };
  return all;
}

TEST(PlainTensors, ThatDifferByRankAreToldOnce) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor x = cut(mesh, at::arange(12, at::kDouble).view({4, 3}), 0);
    const at::Tensor same = at::full({4, 3}, 2.0, at::kDouble),
                     own = at::full({3}, 1.0 + manager.rank(), at::kDouble);
    set_policies(manager, {.plain_values = Policy::error});
    for (int i = 0; i < 2; ++i) {
      EXPECT_NO_THROW(x * at::scalar_tensor(2.0, at::kDouble));
      EXPECT_THROW(x * own, MismatchError) << "not taken for equal after the first time";
      EXPECT_EQ(difference(x * same, at::arange(12, at::kDouble).view({4, 3}) * 2), 0);
    }
    {
      const CommTraceScope trace(manager);
      x* at::full({4, 3}, 3.0, at::kDouble);
      EXPECT_TRUE(trace->events().empty()) << "compared once: " << trace->table();
      x + at::full({4, 3}, 3.0, at::kDouble);
      EXPECT_FALSE(trace->events().empty()) << "another operator";
    }
    set_policies(manager, {});
    EXPECT_NO_THROW(x * own);
  });
}

struct Counting final : c10::WarningHandler {
  void process(const c10::Warning& w) override {
    if (w.msg().find("hold different values") != std::string::npos) ++count;
  }
  int count = 0;
};

// Once they are told, no rank compares alone what has a new shape there.
TEST(PlainTensors, ThatDifferInShapeAreWarnedOfOnce) {
  on_threads(2, [](DistributedManager& manager) {
    Counting counting;
    const c10::WarningUtils::WarningHandlerGuard guard(&counting);
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor x = cut(mesh, at::arange(12, at::kDouble).view({4, 3}), 0);
    for (const int with_rows : {1, 0, 1, 2}) {
      const std::int64_t rows = manager.rank() == with_rows ? 4 : 1;
      const at::Tensor sum = x + at::ones({rows, 3}, at::kDouble);
      EXPECT_EQ(difference(sum, at::arange(12, at::kDouble).view({4, 3}) + 1), 0);
    }
    EXPECT_EQ(counting.count, manager.rank() == 0 ? 1 : 0);
  });
}

TEST(PlainTensors, ThatDifferAreWarnedOfByTheFirstRankAlone) {
  on_threads(2, [](DistributedManager& manager) {
    Counting counting;
    const c10::WarningUtils::WarningHandlerGuard guard(&counting);
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor x = cut(mesh, at::arange(12, at::kDouble).view({4, 3}), 0, true);
    const at::Tensor weight = at::full({3}, 2.0, at::kDouble).requires_grad_(true);
    // What programs do: numbers, scalars, weights and targets that are equal, results of the
    // generator that ranks share, and memory that is written to before it is read.
    at::Tensor loss = (x * 2 * at::scalar_tensor(0.5, at::kDouble) * weight - 1).square().mean();
    (loss * at::ones({}, at::kDouble) + at::zeros({1}, at::kDouble)).backward();
    at::Tensor into = at::full({4, 3}, manager.rank(), at::kDouble);
    into.copy_(x.detach());
    at::Tensor sum = at::full({4, 3}, manager.rank(), at::kDouble);
    at::add_out(sum, x.detach(), x.detach());
    EXPECT_EQ(counting.count, 0);
    const at::Tensor own = at::full({3}, 1.0 + manager.rank(), at::kDouble);
    for (int i = 0; i < 3; ++i) x.detach() / own;
    EXPECT_EQ(counting.count, manager.rank() == 0 ? 1 : 0);
  });
}

TEST(PlainTensors, OfEverNewShapesAreNotComparedForEver) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const CommTraceScope trace(manager);
    for (int n = 1; n <= 1100; ++n) {
      const ShardSpec spec(mesh, {n}, {Replicate()});
      from_local(at::zeros({n}), spec) + at::zeros({n});
    }
    EXPECT_LE(trace->events().size(), 1024);
  });
}

TEST(Aliases, OnOneRankChangeNoCollective) {
  for (const auto& hold : holds()) {
    SCOPED_TRACE(hold.first);
    on_threads(2, [&hold](DistributedManager& manager) {
      const auto mesh = manager.mesh({{"x", 2}});
      const at::Tensor value = at::arange(12, at::kDouble).view({4, 3});
      const at::Tensor x = cut(mesh, value, 0, true);
      std::vector<at::Tensor> log;
      for (int step = 0; step < 4; ++step) {
        const at::Tensor loss = (x * (step + 1)).mean(), rows = (x * x).sum(0);
        if (manager.rank() == step % 2) log.push_back(hold.second(loss));
        if (manager.rank() == (step + 1) % 2) log.push_back(hold.second(rows));
        const double expected = value.mean().item<double>() * (step + 1);
        EXPECT_DOUBLE_EQ(loss.item<double>(), expected);
        EXPECT_DOUBLE_EQ((loss.exp().log() * 2).item<double>(), 2 * expected);
        EXPECT_DOUBLE_EQ(loss.item<double>(), expected);
        EXPECT_LT(difference(rows.sqrt(), (value * value).sum(0).sqrt()), 1e-14);
        EXPECT_LT(difference(rows, (value * value).sum(0)), 1e-14);
        x.mutable_grad() = at::Tensor();
        (loss + rows.sqrt().sum()).backward();
        EXPECT_LT(difference(x.grad(), (step + 1) / 12.0 + value / (value * value).sum(0).sqrt()),
                  1e-14);
      }
    });
  }
}

TEST(Aliases, TakeOverWhatAPartialTensorWasReducedTo) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor value = at::arange(12, at::kDouble).view({4, 3});
    const auto run = [&](const at::Tensor& x) {
      const at::Tensor y = (x * 1).sum(0), alias = y.detach(), row = y.detach().narrow(0, 1, 2),
                       turned = (x * 1).sum(0, true).t().detach();
      EXPECT_TRUE(!is_sharded(y) || spec(alias).has_partial());
      const at::Tensor used = y.exp();  // reduces it
      EXPECT_TRUE(!is_sharded(y) || !spec(row).has_partial());
      alias.mul_(2);
      row.add_(1);
      turned.add_(3);
      return std::vector<at::Tensor>{whole(y), whole(alias), whole(row), whole(turned),
                                     whole(used)};
    };
    const auto expected = run(value.clone().requires_grad_(true)),
               got = run(cut(mesh, value, 0, true));
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(got[i].equal(expected[i])) << i;
  });
}

TEST(Aliases, AndViewsOfAPartialTensorSeeWhatIsWritten) {
  on_threads(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    const at::Tensor value = at::arange(12, at::kDouble).view({4, 3});
    const auto run = [&](const at::Tensor& x) {
      const at::Tensor y = x.sum(0), kept = y.detach(), view = y.narrow(0, 1, 2);
      view.fill_(-1);  // x.sum(0)[1:].fill_(0)
      view.narrow(0, 0, 1).add_(5);
      const at::Tensor z = x.sum(0), other = manager.rank() == 1 ? z.detach() : at::Tensor();
      z.add_(1);  // a rank that keeps an alias does as the others do
      const at::Tensor w = x.sum(0).view({1, 3}), part = w.select(0, 0);
      part.add_(at::ones({3}, at::kDouble));
      return std::vector<at::Tensor>{whole(y), whole(kept), whole(view), whole(z), whole(w)};
    };
    const auto expected = run(value.clone()), got = run(cut(mesh, value, 0));
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(got[i].equal(expected[i])) << i;
  });
}

TEST(Writes, ToListsCountVersionsUp) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor p = cut(mesh, at::ones({4, 3}, at::kDouble), 0, true);
    const at::Tensor z = (p * p).sum();
    {
      const at::NoGradGuard guard;
      at::_foreach_add_({p}, 1);
    }
    EXPECT_THROW(z.backward(), c10::Error);
    const at::Tensor x = cut(mesh, at::ones({4, 3}, at::kDouble), 0);
    const auto before = x._version();
    at::_foreach_mul_({x}, 2);
    EXPECT_GT(x._version(), before);
    EXPECT_TRUE(whole(x).equal(at::full({4, 3}, 2.0, at::kDouble)));
  });
}

// A row of a sharded dim is a copy: what is written to the tensor by another way is seen in it, and
// what is written to it afterwards undoes nothing.
TEST(Views, ThatWereCopiedAreNeverStale) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    set_policies(manager, {.redistribution = Policy::allow});
    const at::Tensor value = at::arange(12, at::kDouble).view({4, 3});
    using Write = std::function<void(at::Tensor)>;
    const std::vector<std::pair<const char*, Write>> writes = {
        {"add_", [](at::Tensor x) { x.add_(100); }},
        {"add_ of a view", [](at::Tensor x) { x.narrow(1, 0, 2).add_(100); }},
        {"data", [](at::Tensor x) { x.variable_data().add_(100); }},
        {"foreach", [](at::Tensor x) { at::_foreach_add_({x}, 100); }},
        {"another copy", [](at::Tensor x) { x.select(0, 1).add_(100); }},
        {"fill_", [](at::Tensor x) { x.fill_(7); }},
    };
    for (const bool inference : {false, true}) {
      const c10::InferenceMode mode(inference);
      for (const auto& [name, write] : writes) {
        SCOPED_TRACE(concat(name, inference ? " in inference mode" : ""));
        const at::Tensor x = cut(mesh, value, 0), v = x.select(0, 1);
        write(x);
        at::Tensor expected = value.clone();
        write(expected);
        EXPECT_DOUBLE_EQ(v.sum().item<double>(), expected.select(0, 1).sum().item<double>());
        v.add_(1);
        expected.select(0, 1).add_(1);
        EXPECT_TRUE(whole(x.select(0, 1)).equal(expected.select(0, 1)));
        EXPECT_TRUE(whole(x).equal(expected));
      }
      // Through the view itself, and a view of it.
      const at::Tensor x = cut(mesh, value, 0), v = x.select(0, 1), part = v.narrow(0, 0, 2);
      v.add_(1);
      part.mul_(2);
      at::Tensor expected = value.clone();
      expected.select(0, 1).add_(1).narrow(0, 0, 2).mul_(2);
      EXPECT_TRUE(whole(x).equal(expected));
      EXPECT_TRUE(whole(v).equal(expected.select(0, 1)));
      to_local(v).fill_(-1);  // a copy: neither changes
      EXPECT_TRUE(whole(v).equal(expected.select(0, 1)));
      EXPECT_TRUE(whole(x).equal(expected));
    }
  });
}

// What one rank alone holds refuses a write there: the others hear of it instead of waiting.
TEST(Aliases, OfAPlainTargetOnOneRank) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor x = cut(mesh, at::ones({4, 3}, at::kDouble), 0);
    const at::Tensor plain = at::zeros({4, 3}, at::kDouble);
    const at::Tensor alias = manager.rank() == 0 ? plain.view({12}) : at::Tensor();
    const auto write = [&] {
      plain.add_(x);
      mesh.all().barrier();
    };
    if (manager.rank() == 0) {
      EXPECT_THROW(write(), ShardingError);
    } else {
      EXPECT_THROW(write(), PeerFailedError);
    }
    mesh.all().barrier();
    EXPECT_DOUBLE_EQ(x.sum().item<double>(), 12);
  });
}

TEST(Plans, KnowTheDefaultDtype) {
  // It is the process': one rank sets it, between barriers, and it is put back whatever happens.
  struct Kept {
    ~Kept() { c10::set_default_dtype(dtype); }
    const caffe2::TypeMeta dtype = c10::get_default_dtype();
  };
  const Kept kept;
  on_threads(1, [](DistributedManager&) {});
  run_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor x =
        distribute_tensor(at::arange(4, at::kLong), mesh, {Shard(0)}, {{0, {4, 0}}});
    EXPECT_EQ((x / 2).scalar_type(), at::kFloat);
    mesh.all().barrier();
    if (manager.rank() == 0) c10::set_default_dtype(caffe2::TypeMeta::Make<double>());
    mesh.all().barrier();
    EXPECT_EQ((x / 2).scalar_type(), at::kDouble);
    EXPECT_EQ(to_local(x / 2).scalar_type(), at::kDouble);
    EXPECT_TRUE(whole(x / 2).equal(at::arange(4, at::kDouble) / 2));
    mesh.all().barrier();
  });
}

TEST(FromLocal, ComparesWhatRanksBelieve) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor mine = manager.rank() == 0 ? at::ones({4, 6}, at::kDouble) : at::Tensor();
    const auto refused = [&](const at::Tensor& placeholder, const ShardSizes& sizes) {
      EXPECT_THROW(from_local(mine.defined() ? mine : placeholder, mesh, {Shard(0)}, sizes),
                   InvalidArgument)
          << placeholder.toString() << placeholder.sizes();
    };
    for (const ShardSizes& sizes : {ShardSizes{}, ShardSizes{{0, {4, 0}}}}) {
      refused(at::empty({0, 6}), sizes);                                    // dtype
      refused(at::empty({0}, at::kDouble), sizes);                          // dims
      refused(at::empty({0, 5}, at::kDouble), sizes);                       // other dims
      refused(at::empty({0, 6}, at::kDouble).requires_grad_(true), sizes);  // grad
    }
    refused(at::empty({1, 6}, at::kDouble), {{0, {4, 0}}});  // size
    const at::Tensor right = mine.defined() ? mine : at::empty({0, 6}, at::kDouble);
    EXPECT_THROW(from_local(right, mesh, {Shard(0)}, {{0, {4, manager.rank()}}}), InvalidArgument);
    EXPECT_TRUE(whole(from_local(right, mesh, {Shard(0)}, {{0, {4, 0}}}))
                    .equal(at::ones({4, 6}, at::kDouble)));
  });
}

TEST(FromLocal, GivesSummandsTheirOwnGradient) {
  on_threads(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    const at::Tensor all = at::tensor({1.0, 5.0, -2.0, 5.0, 3.0, -2.0, 4.0, 0.5, 7.0}).view({3, 3});
    const at::Tensor weights = at::tensor({1.0, 2.0, 3.0});
    const auto reduced = [](const at::Tensor& t, ReduceOp::Kind op) {
      switch (op) {
        case ReduceOp::Kind::avg:
          return t.mean(0);
        case ReduceOp::Kind::max:
          return t.amax(0);
        case ReduceOp::Kind::min:
          return t.amin(0);
        case ReduceOp::Kind::product:
          return t.prod(0);
        default:
          return t.sum(0);
      }
    };
    for (const auto op : {ReduceOp::Kind::sum, ReduceOp::Kind::avg, ReduceOp::Kind::max,
                          ReduceOp::Kind::min, ReduceOp::Kind::product}) {
      const at::Tensor plain = all.clone().requires_grad_(true);
      (reduced(plain, op) * weights).sum().backward();
      const at::Tensor mine = all[manager.rank()].clone().requires_grad_(true);
      const at::Tensor x = from_local(mine, mesh, {Partial(op)});
      (full_tensor(x) * weights).sum().backward();
      EXPECT_LT(difference(mine.grad(), plain.grad()[manager.rank()]), 1e-14)
          << static_cast<int>(op);
    }
  });
}

TEST(RandomState, IsTakenAndSet) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor x = cut(mesh, at::ones({5, 3}, at::kDouble), 0);
    const RandomState before = random_state(manager);
    const at::Tensor first = whole(at::rand_like(x)), second = whole(at::rand_like(x));
    EXPECT_FALSE(first.equal(second));
    set_random_state(manager, before);
    EXPECT_TRUE(whole(at::rand_like(x)).equal(first));
    EXPECT_TRUE(whole(at::rand_like(x)).equal(second));
  });
}

TEST(RandomState, ThatDiffersBetweenRanksIsReported) {
  on_threads(2, [](DistributedManager& manager) {
    manager.set_check_level(CheckLevel::collective);
    const auto mesh = manager.mesh({{"x", 2}}),
               mine = manager.mesh(Mesh({{"x", 1}}, {manager.rank()}));
    const at::Tensor x = cut(mesh, at::ones({5, 3}, at::kDouble), 0);
    EXPECT_NO_THROW(at::rand_like(x));
    if (manager.rank() == 0)
      at::rand_like(distribute_tensor(at::ones({3}, at::kDouble), mine, {Replicate()}));
    EXPECT_THROW(at::rand_like(x), MismatchError);
    set_random_state(manager, {3, 5});
    EXPECT_NO_THROW(at::rand_like(x));
  });
}

TEST(Bernoulli, OfATensorOfProbabilities) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor x = cut(mesh, at::full({40, 50}, 7.0, at::kDouble), 0);
    x.bernoulli_(at::tensor(0.25, at::kDouble));
    EXPECT_NEAR(x.mean().item<double>(), 0.25, 0.05);
    EXPECT_TRUE(whole(x).eq(0).logical_or(whole(x).eq(1)).all().item<bool>());
    const at::Tensor p =
        at::cat({at::zeros({20, 50}, at::kDouble), at::ones({20, 50}, at::kDouble)});
    x.bernoulli_(cut(mesh, p, 1));
    EXPECT_TRUE(whole(x).equal(p));
    x.fill_(2).bernoulli_(0.5);
    EXPECT_NEAR(x.mean().item<double>(), 0.5, 0.05);
  });
}

}  // namespace
}  // namespace tessera::test::agreement_test

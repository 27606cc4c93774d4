// ShardedOptimizer: the states of libtorch's optimizers sharded over ranks that have the same
// parameters, equal to the optimizers themselves.

#include "tessera/nn/sharded_optimizer.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>

#include "support.h"
#include "tessera/checkpoint/checkpointer.h"
#include "tessera/checkpoint/optimizer_state.h"
#include "tessera/comm/group/trace.h"

namespace tessera::test::sharded_optimizer_test {

namespace {

using torch::nn::Linear;
using torch::nn::Sequential;
using torch::optim::OptimizerParamGroup;
using OptimizerPointer = std::unique_ptr<torch::optim::Optimizer>;

// A parameter without dims, one that is frozen, one that no step uses, one with fewer rows than
// ranks, and one under two names.
struct ManyImpl : torch::nn::Module {
  ManyImpl() {
    first = register_module("first", Linear(3, 5));
    second = register_module("second", Linear(5, 3));
    frozen = register_module("frozen", Linear(3, 3));
    unused = register_module("unused", Linear(2, 2));
    scale = register_parameter("scale", torch::ones({}));
    row = register_parameter("row", torch::ones({1, 3}));
    again = register_parameter("again", first->weight);
    to(at::kDouble);
    again = first->weight;
    for (auto& p : frozen->parameters()) p.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = second(torch::tanh(first(x)));
    return (frozen(h) * row + x.matmul(first->weight.t()).sum(1, true)) * scale;
  }
  Linear first = nullptr, second = nullptr, frozen = nullptr, unused = nullptr;
  at::Tensor scale, row, again;
};
TORCH_MODULE(Many);

Many many() {
  Many net;
  fill(*net, 7);
  return net;
}

std::vector<at::Tensor> parameters_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& p : module.parameters()) {
    if (std::ranges::none_of(all, [&](const at::Tensor& q) { return q.is_same(p); }))
      all.push_back(p);
  }
  return all;
}

// Each optimizer of libtorch's that sharding holds for: sharded, and as it is.
struct Case {
  std::string name;
  std::function<OptimizerPointer(std::vector<at::Tensor>, const DeviceMesh&)> sharded;
  std::function<OptimizerPointer(std::vector<at::Tensor>)> plain;
};

template <class Optimizer, class Options>
Case case_of(const char* name, const Options& options) {
  return {name,
          [options](std::vector<at::Tensor> p, const DeviceMesh& mesh) -> OptimizerPointer {
            return std::make_unique<ShardedOptimizer<Optimizer>>(std::move(p), mesh, options);
          },
          [options](std::vector<at::Tensor> p) -> OptimizerPointer {
            return std::make_unique<Optimizer>(std::move(p), options);
          }};
}

std::vector<Case> cases() {
  namespace optim = torch::optim;
  // Where a gradient is all round-off, Adam makes a step of it unless eps is large.
  return {case_of<optim::SGD>("SGD", optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01)),
          case_of<optim::Adam>("Adam", optim::AdamOptions(0.02).eps(1e-3).amsgrad(true)),
          case_of<optim::AdamW>("AdamW", optim::AdamWOptions(0.02).eps(1e-3)),
          case_of<optim::RMSprop>(
              "RMSprop", optim::RMSpropOptions(0.01).eps(1e-3).momentum(0.5).centered(true)),
          case_of<optim::Adagrad>("Adagrad", optim::AdagradOptions(0.05).eps(1e-3))};
}

void backward_of(Many& net, int step) {
  seed(300 + step);
  net->forward(randn({4, 3}, at::kDouble)).square().mean().backward();
}

void expect_equal(Many& net, Many& expected, const std::string& where) {
  const auto named = net->named_parameters();
  for (const auto& item : expected->named_parameters())
    EXPECT_LT(difference(named[item.key()], item.value(), 1e-3), 1e-12) << where << item.key();
}

// What the moments of an Adam take on this rank.
std::int64_t elements_of(torch::optim::Optimizer& optimizer) {
  std::int64_t all = 0;
  for (const auto& [key, kept] : optimizer.state()) {
    const at::Tensor& t = static_cast<torch::optim::AdamParamState&>(*kept).exp_avg();
    all += is_sharded(t) ? to_local(t).numel() : t.numel();
  }
  return all;
}

struct Folder {
  Folder() {
    std::string name = concat(::testing::TempDir(), "sharded_optimizer.XXXXXX");
    path = ::mkdtemp(name.data());
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string path;
};

}  // namespace

TEST(ShardedOptimizer, EqualsTheOptimizerItself) {
  for (const auto& axes : std::vector<std::vector<Axis>>{
           {{"x", 1}}, {{"x", 2}}, {{"x", 3}}, {{"x", 4}}, {{"a", 2}, {"b", 2}}}) {
    int ranks = 1;
    for (const Axis& a : axes) ranks *= a.size;
    on_ranks(ranks, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh(test::mapped(axes));
      for (const Case& one : cases()) {
        Many net = many(), expected = many();
        const OptimizerPointer opt = one.sharded(parameters_of(*net), mesh);
        const OptimizerPointer other = one.plain(parameters_of(*expected));
        for (int step = 0; step < 4; ++step) {
          opt->zero_grad();
          other->zero_grad();
          EXPECT_FALSE(net->first->weight.grad().defined());
          backward_of(net, step);
          backward_of(expected, step);
          if (step == 2) opt->param_groups()[0].options().set_lr(0.03);
          if (step == 2) other->param_groups()[0].options().set_lr(0.03);
          opt->step();
          other->step();
          expect_equal(net, expected, concat(one.name, " on ", ranks, " step ", step, " "));
        }
        EXPECT_FALSE(is_sharded(net->first->weight));
        EXPECT_TRUE(net->again.is_same(net->first->weight));
        EXPECT_TRUE(opt->param_groups()[0].params()[0].is_same(parameters_of(*net)[0]));
      }
    });
  }
}

TEST(ShardedOptimizer, KeepsAShardOfTheStates) {
  on_ranks(4, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 4}});
    const auto make = [] { return Sequential(Linear(32, 64), Linear(64, 16)); };
    Sequential net = make();
    fill(*net, 2);
    ShardedOptimizer<torch::optim::Adam> opt(net->parameters(), mesh,
                                             torch::optim::AdamOptions(0.01));
    const CommTraceScope trace(manager);
    net->forward(at::ones({2, 32})).sum().backward();
    opt.step();
    std::int64_t all = 0;
    for (const at::Tensor& p : net->parameters()) all += p.numel();
    const std::int64_t mine = elements_of(opt);
    EXPECT_LE(mine, all / 4 + 64) << "of " << all;
    std::int64_t gathers = 0;
    for (const CommEvent& e : trace->events()) gathers += e.operation == "all_gather";
    EXPECT_EQ(gathers, 1) << "one message for all parameters";
    const at::Tensor sum = at::full({}, static_cast<double>(mine));
    mesh.all().all_reduce(sum);
    EXPECT_EQ(sum.item<double>(), static_cast<double>(all));
  });
}

TEST(ShardedOptimizer, ShardsWhatAdagradMakesBeforeItsFirstStep) {
  on_ranks(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    Many net = many();
    ShardedOptimizer<torch::optim::Adagrad> opt(parameters_of(*net), mesh,
                                                torch::optim::AdagradOptions(0.05));
    for (int step = 0; step < 2; ++step) {
      for (const at::Tensor& p : parameters_of(*net)) {
        if (p.dim() == 0) continue;
        const auto kept = opt.state().find(p.unsafeGetTensorImpl());
        ASSERT_NE(kept, opt.state().end());
        EXPECT_TRUE(is_sharded(static_cast<torch::optim::AdagradParamState&>(*kept->second).sum()));
      }
      backward_of(net, step);
      opt.step();
    }
  });
}

TEST(ShardedOptimizer, GroupsClosuresAndParametersAddedLater) {
  on_ranks(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    using torch::optim::AdamWOptions;
    const auto groups = [](Many& net) {
      std::vector<OptimizerParamGroup> all;
      all.emplace_back(net->first->parameters(),
                       std::make_unique<AdamWOptions>(AdamWOptions(0.03).eps(1e-3)));
      all.emplace_back(std::vector<at::Tensor>{net->row, net->scale},
                       std::make_unique<AdamWOptions>(AdamWOptions(0.01).eps(1e-3)));
      return all;
    };
    Many net = many(), expected = many();
    ShardedOptimizer<torch::optim::AdamW> opt(groups(net), mesh, AdamWOptions(0.02).eps(1e-3));
    torch::optim::AdamW other(groups(expected), AdamWOptions(0.02).eps(1e-3));
    for (int step = 0; step < 5; ++step) {
      if (step == 2) {
        opt.add_param_group(OptimizerParamGroup(net->second->parameters()));
        other.add_param_group(OptimizerParamGroup(expected->second->parameters()));
      }
      const auto closure = [step](Many& n, torch::optim::Optimizer& o) {
        return [step, &n, &o] {
          o.zero_grad();
          seed(500 + step);
          const at::Tensor loss = n->forward(randn({4, 3}, at::kDouble)).square().mean();
          loss.backward();
          return loss;
        };
      };
      const at::Tensor got = opt.step(closure(net, opt));
      const at::Tensor wanted = other.step(closure(expected, other));
      EXPECT_LT(difference(got, wanted), 1e-12);
      expect_equal(net, expected, concat("step ", step, " "));
    }
  });
}

TEST(ShardedOptimizer, SavesAndLoadsOnOtherRanks) {
  for (const Case& one : cases()) {
    const Folder folder;
    Many straight = many();
    {
      const OptimizerPointer opt = one.plain(parameters_of(*straight));
      for (int step = 0; step < 5; ++step) {
        opt->zero_grad();
        backward_of(straight, step);
        opt->step();
      }
    }
    on_threads(3, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh({{"x", 3}});
      Many net = many();
      const OptimizerPointer opt = one.sharded(parameters_of(*net), mesh);
      for (int step = 0; step < 3; ++step) {
        opt->zero_grad();
        backward_of(net, step);
        opt->step();
      }
      CheckpointState state;
      state.add("net.", *net);
      add_optimizer(state, "o.", *opt, *net);
      Checkpointer(manager, folder.path).save("c", state);
    });
    // Sharded again, and by the optimizer itself.
    for (const int ranks : {1, 2, 4}) {
      on_threads(ranks, [&](DistributedManager& manager) {
        const auto mesh = manager.mesh({{"x", ranks}});
        for (const bool sharded : {true, false}) {
          Many net = many();
          const OptimizerPointer opt =
              sharded ? one.sharded(parameters_of(*net), mesh) : one.plain(parameters_of(*net));
          const CheckpointReader saved(manager.world(), folder.path, "c");
          CheckpointState state;
          state.add("net.", *net);
          saved.load(state, {.allow_extra = true});
          load_optimizer(saved, "o.", *opt, *net);
          for (int step = 3; step < 5; ++step) {
            opt->zero_grad();
            backward_of(net, step);
            opt->step();
          }
          expect_equal(net, straight, concat(one.name, " on ", ranks, " "));
        }
      });
    }
  }
}

TEST(ShardedOptimizer, RefusesWhatCannotBeAndGoesOn) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    Linear net(3, 2);
    fill(*net, 4);
    ShardedOptimizer<torch::optim::SGD> opt(net->parameters(), mesh, torch::optim::SGDOptions(0.1));
    torch::serialize::OutputArchive archive;
    EXPECT_THROW(opt.save(archive), NotAvailable);
    net->weight.mutable_grad() = at::ones({2, 3}).to_sparse();
    EXPECT_THROW(opt.step(), InvalidArgument);
    EXPECT_TRUE(opt.param_groups()[0].params()[0].is_same(net->weight));
    const at::Tensor before = net->weight.detach().clone();
    net->weight.mutable_grad() = at::ones({2, 3});
    opt.step();
    EXPECT_LT(difference(net->weight, before - 0.1), 1e-6);
    EXPECT_THROW(ShardedOptimizer<torch::optim::SGD>(
                     std::vector<at::Tensor>{at::ones({2 + manager.rank()}).requires_grad_()}, mesh,
                     torch::optim::SGDOptions(0.1)),
                 MismatchError);
  });
}

}  // namespace tessera::test::sharded_optimizer_test

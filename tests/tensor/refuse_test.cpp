// What reads memory, resizes, or writes where a rank has no shard: the right thing, or a refusal
// that says what to do.

#include <torch/serialize.h>

#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "support.h"
#include "tessera/comm/group/values.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/tensor/redistribution.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera::test::refuse_test {

namespace {

std::string message(const std::function<void()>& f) {
  try {
    f();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "nothing was thrown";
}

}  // namespace

// A spec, a tensor or memory that is not there is an error, not a crash.
TEST(Refuse, WhatIsNotThere) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const ShardSpec none, rows(mesh, {4, 3}, {Shard(0)});
    const at::Tensor value = at::ones({4, 3}), part = at::ones({2, 3}),
                     sharded = distribute_tensor(value, rows);
    double memory[6] = {};
    const std::vector<std::function<void()>> calls = {
        [&] { (void)none.mesh(); },
        [&] { (void)none.shape(); },
        [&] { (void)none.has_partial(); },
        [&] { none.with_placements({Replicate()}); },
        [&] { distribute_tensor(value, none); },
        [&] { from_local(part, none); },
        [&] { from_blob(memory, none, at::kDouble); },
        [&] { redistribute(sharded, none); },
        [&] { explain_redistribution(none, rows); },
        [&] { explain_redistribution(rows, none); },
        [&] { visualize_sharding(none); },
        [&] { tessera::empty(none); },
        [&] { tessera::zeros(none); },
        [&] { tessera::full(none, 1); },
        [&] { tessera::arange(none); },
        [&] { tessera::randn(none); },
        [&] { ShardSpec(mesh, {-4}, {Replicate()}); },
        [&] { from_blob(nullptr, rows, at::kDouble); },
        [&] { from_local(at::Tensor(), rows); },
        [&] { distribute_tensor(at::Tensor(), mesh, {Shard(0)}); },
        [&] { distribute_tensor(sharded, mesh, {Shard(0)}); },
        [&] { distribute_tensor(sharded, rows); },
        [&] { tessera::print(at::Tensor()); },
        [&] { value_bytes(c10::List<at::Tensor>({sharded})); },  // no memory of its own
    };
    for (std::size_t i = 0; i < calls.size(); ++i) EXPECT_THROW(calls[i](), InvalidArgument) << i;
    EXPECT_EQ(from_blob(nullptr, ShardSpec(mesh, {0}, {Shard(0)}), at::kDouble).numel(), 0);
  });
}

// The root alone has the tensor, and alone sees what is wrong with it.
TEST(Refuse, ToScatterWhatTheRootDoesNotHave) {
  on_threads(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    const at::Tensor value = randn({4, 3}), sharded = distribute_tensor(value, mesh, {Shard(0)});
    for (const at::Tensor& wrong : {at::Tensor(), sharded, value.to_sparse()}) {
      EXPECT_THROW(scatter(manager.rank() == 1 ? wrong : at::Tensor(), mesh, {Shard(0)}, {}, 1),
                   Error);
      const at::Tensor got =
          scatter(manager.rank() == 1 ? value : at::Tensor(), mesh, {Shard(0)}, {}, 1);
      EXPECT_EQ(difference(got, value), 0) << "the next one works";
    }
  });
}

TEST(Refuse, OrDoTheRightThing) {
  on_threads(2, [](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::allow});
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor value = randn({4, 3}, at::kDouble);
    const auto rows = [&] {
      return distribute_tensor(value.clone(), mesh, {Shard(0)}, {{0, {3, 1}}});
    };
    EXPECT_NE(message([&] { rows().data_ptr<double>(); }).find("tessera::to_local"),
              std::string::npos);
    std::ostringstream out;
    EXPECT_NE(message([&] { torch::save(rows(), out); }).find("tessera::save"), std::string::npos)
        << message([&] { torch::save(rows(), out); });
    // What was distributed in place has libtorch's own tensors.
    torch::nn::Linear net(3, 2);
    distribute_module(*net, mesh);
    for (const at::Tensor& p : net->parameters())
      EXPECT_NE(message([&] { torch::save(p, out); }).find("tessera::save"), std::string::npos)
          << message([&] { torch::save(p, out); });
    EXPECT_NE(message([&] { torch::save(net, out); }).find("tessera::save"), std::string::npos)
        << message([&] { torch::save(net, out); });
    EXPECT_NE(message([&] { out << rows(); }).find("tessera::print"), std::string::npos);
    // Scalars, wherever they lie.
    EXPECT_NEAR(rows().sum().item<double>(), value.sum().item<double>(), 1e-12)
        << "a partial scalar";
    EXPECT_EQ(rows().max().item<double>(), value.max().item<double>());
    EXPECT_NEAR(distribute_tensor(value.slice(0, 0, 1).slice(1, 0, 1).clone(), mesh, {Shard(0)})
                    .item<double>(),
                value[0][0].item<double>(), 0);
    // As plain libtorch does it, or refused where said: never something else.
    struct Write {
      const char* name;
      std::function<void(at::Tensor)> write;
      // Resizes a shard, or replaces its memory.
      bool refused = false;
    };
    const std::vector<Write> writes = {
        {"a row by its number", [](at::Tensor t) { t[3] = 7.0; }},
        {"in place to a row", [](at::Tensor t) { t[0].mul_(2); }},
        {"to rows of several shards", [](at::Tensor t) { t.slice(0, 1, 4).fill_(5); }},
        {"to a box", [](at::Tensor t) { t.slice(0, 2, 4).slice(1, 0, 2).mul_(-1); }},
        {"to narrowed columns", [](at::Tensor t) { t.narrow(1, 1, 1).fill_(2); }},
        {"a column from a tensor",
         [](at::Tensor t) { t.select(1, 0).copy_(at::ones({4}, at::kDouble)); }},
        {"to the transpose", [](at::Tensor t) { t.t().add_(1); }},
        {"to another view", [](at::Tensor t) { t.view({2, 6}).mul_(3); }},
        {"with a dim more", [](at::Tensor t) { t.unsqueeze(0).zero_(); }},
        {"a number at a slice",
         [](at::Tensor t) { t.index_put_({torch::indexing::Slice(1, 3)}, 4.0); }},
        {"rows at indices",
         [](at::Tensor t) { t.index_put_({at::arange(2)}, at::ones({2, 3}, at::kDouble)); }},
        {"resized to less", [](at::Tensor t) { t.resize_({2, 3}); }, true},
        {"resized to more", [](at::Tensor t) { t.resize_({5, 5}).zero_(); }, true},
        {"transposed in place", [](at::Tensor t) { t.t_(); }},
        {"transposed in place, then written", [](at::Tensor t) { t.transpose_(0, 1).mul_(2); }},
        {"given a dim in place, then written", [](at::Tensor t) { t.unsqueeze_(1).add_(1); }},
        {"set to other memory", [](at::Tensor t) { t.set_(at::zeros({2}, at::kDouble)); }, true},
        {"out= of what is read", [](at::Tensor t) { at::add_out(t, t, t); }},
        {"out= of another shape",
         [](at::Tensor t) { at::sum_out(t, t * 1, at::IntArrayRef({0})); }},
    };
    for (const Write& w : writes) {
      const at::Tensor plain = value.clone(), x = rows();
      w.write(plain);
      if (w.refused) {
        const std::string why = message([&] { w.write(x); });
        EXPECT_NE(why.find("redistribute"), std::string::npos) << w.name << ": " << why;
        EXPECT_EQ(difference(x, value), 0) << w.name << ": refused, and written";
      } else {
        EXPECT_NO_THROW(w.write(x)) << w.name;
        EXPECT_LT(difference(x, plain), 1e-14) << w.name;
      }
    }
  });
}

}  // namespace tessera::test::refuse_test

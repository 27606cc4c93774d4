// How many kernels sharded operators launch on each of two ranks, beside plain ones: on the
// stand-in device, forward and backward, when it is not the first time.

#include <array>
#include <cstdio>

#include "../nn/fully_shard_case.h"
#include "../support/old_libtorch.h"
#include "tessera/nn/clip.h"
#include "tessera/ops/attention/neighborhood.h"
#include "timeline.h"
#include "transport.h"

namespace tessera::test {
namespace {

using Make = std::function<void()>;

std::vector<std::string> kernels_of(const stand_in::Timeline& timeline, c10::Device on,
                                    const Make& make) {
  for (int i = 0; i < 2; ++i) make();
  const std::size_t before = timeline.tasks(on.index()).size();
  make();
  const auto all = timeline.tasks(on.index());
  std::vector<std::string> kernels;
  for (std::size_t i = before; i < all.size(); ++i)
    if (all[i].is_kernel()) kernels.push_back(all[i].what);
  return kernels;
}

/// One line of the table: a call on plain tensors and on sharded ones.
struct Row {
  std::string name, sharded;
  /// How many launches more there may be, and why.
  int more;
  const char* why;
  std::array<std::vector<std::string>, 2> plain, of_ranks;

  /// Prints the line, which docs.devices compares with docs/gpu.md.
  void print() const {
    const std::size_t alone = plain[0].size(),
                      most = std::max(of_ranks[0].size(), of_ranks[1].size());
    std::printf("| %s | %s | %zu | %zu | %s |\n", name.c_str(), sharded.c_str(), alone, most, why);
    EXPECT_LE(most, alone + static_cast<std::size_t>(more))
        << name << ", " << sharded << "\nrank 0: " << list(of_ranks[0])
        << "\nrank 1: " << list(of_ranks[1]);
  }
};

using Inputs = std::vector<at::Tensor>;
struct Operator {
  const char* name;
  const char* sharded;
  Placement placement;  // of the first input; the others are plain, and replicated where sharded
  std::vector<std::vector<std::int64_t>> shapes;
  std::function<at::Tensor(const Inputs&)> call;
  int more = 0;
  const char* why = "";
  bool all = false;  // all inputs are sharded alike
};

constexpr const char* kHalo = "halos are packed, put beside the shard, and added in backward";

std::vector<Operator> operators() {
  const auto conv = [](const Inputs& t) { return at::conv2d(t[0], t[1], t[2], 1, 1); };
  const auto attention = [](const Inputs& t) {
    return at::scaled_dot_product_attention(t[0], t[1], t[2]);
  };
  const auto norm = [](const Inputs& t) {
    return at::batch_norm(t[0], t[1], t[2], {}, {}, true, 0.1, 1e-5, false);
  };
  const std::vector<std::vector<std::int64_t>> image{{2, 4, 16, 8}},
      kernel{{2, 4, 16, 8}, {4, 4, 3, 3}, {4}}, normed{{2, 4, 16, 8}, {4}, {4}},
      qkv(3, {2, 2, 8, 4}), field(3, {1, 16, 8, 2, 4});
  return {
      {"`gelu`", "samples", Shard(0), image, [](const Inputs& t) { return at::gelu(t[0]); }},
      {"`linear`",
       "samples",
       Shard(0),
       {{8, 6}, {4, 6}, {4}},
       [](const Inputs& t) { return at::linear(t[0], t[1], t[2]); }},
      {"`softmax`", "samples", Shard(0), {{8, 6}}, [](const Inputs& t) { return t[0].softmax(1); }},
      {"`layer_norm`",
       "samples",
       Shard(0),
       {{8, 6}, {6}, {6}},
       [](const Inputs& t) { return at::layer_norm(t[0], {6}, t[1], t[2]); }},
      {"`conv2d`", "samples", Shard(0), kernel, conv},
      {"`conv2d`", "space", Shard(2), kernel, conv, 7, kHalo},
      {"`max_pool2d`", "space", Shard(2), image,
       [](const Inputs& t) { return at::max_pool2d(t[0], 3, 2, 1); }, 7, kHalo},
      {"`avg_pool2d`", "space", Shard(2), image,
       [](const Inputs& t) { return at::avg_pool2d(t[0], 3, 2, 1); }, 3, kHalo},
      {"`batch_norm`", "samples", Shard(0), normed, norm, 16,
       "statistics of all ranks: what is one kernel here lies on both sides of an all-reduce"},
      {"`group_norm`", "space", Shard(2), normed,
       [](const Inputs& t) { return at::group_norm(t[0], 2, t[1], t[2]); },
       kOldLibtorch ? 22 : 17,  // where one kernel does the backward of a plain one
       "as `batch_norm`"},
      {"`scaled_dot_product_attention`", "heads", Shard(1), qkv, attention, 0, "", true},
      {"`scaled_dot_product_attention`", "sequence", Shard(2), qkv, attention, 39,
       "the keys of each rank in turn, joined by a running maximum and sum", true},
      {"`neighborhood_attention`", "space", Shard(1), field,
       [](const Inputs& t) { return neighborhood_attention_2d(t[0], t[1], t[2], {3, 3}); }, 13,
       kHalo, true},
  };
}

TEST(DeviceLaunches, ShardedOperatorsLaunchLittleMore) {
  const stand_in::Timeline timeline;
  std::vector<Row> rows;
  for (const Operator& op : operators())
    rows.push_back({op.name, op.sharded, op.more, op.why, {}, {}});
  stand_in::on_devices(2, [&](DistributedManager& manager) {
    at::set_num_threads(1);
    test::seed(5);
    const c10::Device on = manager.device();
    const DeviceMesh mesh = manager.mesh({{"x", 2}});
    const auto all = operators();
    for (std::size_t i = 0; i < all.size(); ++i) {
      const Operator& op = all[i];
      Inputs plain, sharded;
      for (const auto& shape : op.shapes) {
        plain.push_back(randn(shape).to(on).requires_grad_());
        const bool cut = op.all || sharded.empty();
        sharded.push_back(distribute_tensor(plain.back().detach(), mesh,
                                            {cut ? op.placement : Placement(Replicate())})
                              .detach()
                              .requires_grad_());
      }
      const auto made = [&](const Inputs& inputs) {
        const at::Tensor g = at::ones_like(op.call(inputs)).detach();
        return kernels_of(timeline, on, [&] {
          for (const at::Tensor& t : inputs) t.mutable_grad().reset();
          op.call(inputs).backward(g);
        });
      };
      const auto me = static_cast<std::size_t>(manager.rank());
      rows[i].plain[me] = made(plain);
      rows[i].of_ranks[me] = made(sharded);
    }
  });
  for (const Row& row : rows) row.print();
}

// A step of an optimizer, and clipping, on parameters that are fully sharded.
TEST(DeviceLaunches, StepsOfShardedParametersLaunchLittleMore) {
  const stand_in::Timeline timeline;
  std::vector<Row> rows{{"`SGD`, a step", "fully", 0, "", {}, {}},
                        {"`AdamW`, a step", "fully", 0, "", {}, {}},
                        {"clipping", "fully", 4, "norms of all ranks", {}, {}}};
  stand_in::on_devices(2, [&](DistributedManager& manager) {
    at::set_num_threads(1);
    const c10::Device on = manager.device();
    const DeviceMesh mesh = manager.mesh({{"x", 2}});
    Net plain = net_of({}), sharded = net_of({});
    for (Net* net : {&plain, &sharded}) (*net)->to(on);
    fully_shard(*sharded, mesh);
    const at::Tensor x = randn({4, 5}, at::kDouble).to(on);
    plain->forward(x).square().mean().backward();
    sharded->forward(distribute_tensor(x, mesh, {Shard(0)})).square().mean().backward();
    const auto me = static_cast<std::size_t>(manager.rank());
    const auto both = [&](std::size_t row, const Make& of_plain, const Make& of_sharded) {
      rows[row].plain[me] = kernels_of(timeline, on, of_plain);
      rows[row].of_ranks[me] = kernels_of(timeline, on, of_sharded);
    };
    torch::optim::SGD sgd_of_plain(plain->parameters(), 0.01), sgd(sharded->parameters(), 0.01);
    both(0, [&] { sgd_of_plain.step(); }, [&] { sgd.step(); });
    torch::optim::AdamW adam_of_plain(plain->parameters(), 0.01), adam(sharded->parameters(), 0.01);
    both(1, [&] { adam_of_plain.step(); }, [&] { adam.step(); });
    both(
        2, [&] { torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.3); },
        [&] { clip_gradients(sharded->parameters(), mesh.all(), {.max_norm = 0.3}); });
  });
  for (const Row& row : rows) row.print();
}

}  // namespace
}  // namespace tessera::test

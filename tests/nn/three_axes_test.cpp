// Three kinds of parallelism above 1 at once, on eight ranks that are processes, over a mesh whose
// ranks are in an order of their own: equal to one process, and nothing moves that has no name.

#include "fully_shard_case.h"
#include "tessera/comm/job/parallel_groups.h"
#include "tessera/data/shard_batch.h"
#include "tessera/nn/tensor_parallel.h"
#include "tessera/pipeline/pipeline.h"
#include "tessera/schedule/generators.h"

namespace tessera::test {

namespace {

constexpr std::int64_t kItem = 8;  // bytes of a double

/// "all_reduce [data, domain]" -> bytes that this rank gave to such calls.
using Moved = std::map<std::string, std::int64_t>;

/// Those that have bytes.
Moved some(Moved all) {
  std::erase_if(all, [](const auto& one) { return one.second == 0; });
  return all;
}

/// The groups of a mesh, by the axes that they are along, which may have names of their own here.
class Groups {
 public:
  explicit Groups(const DeviceMesh& mesh, const std::vector<std::string>& called = {}) {
    const int axes = mesh.mesh().dims();
    for (int set = 1; set < 1 << axes; ++set) {
      std::vector<int> some;
      std::vector<std::string> names;
      for (int a = 0; a < axes; ++a) {
        if ((set >> a & 1) == 0) continue;
        some.push_back(a);
        names.push_back(called.empty() ? mesh.mesh().axes()[a].name : called[a]);
      }
      axes_of_[mesh.group(some).name()] = list(names);
    }
  }
  Moved moved(const CommTrace& trace) const {
    Moved all;
    for (const CommEvent& e : trace.events()) {
      const auto found = axes_of_.find(e.group);
      all[concat(e.operation, " ", found == axes_of_.end() ? e.group : found->second)] += e.bytes;
    }
    return some(std::move(all));
  }

 private:
  std::map<std::string, std::string> axes_of_;
};

std::int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  std::int64_t sum = 0;
  for (const at::Tensor& t : tensors) sum += (is_sharded(t) ? to_local(t.detach()) : t).numel();
  return sum * kItem;
}

// A convolution, then two layers on the channels of each cell: a column and a row layer.
struct CellsImpl : torch::nn::Module {
  CellsImpl() {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 3).padding(1)));
    up = register_module("up", Linear(4, 6));
    down = register_module("down", Linear(6, 2));
  }
  at::Tensor forward(const at::Tensor& x) {
    return down(at::gelu(up(torch::tanh(conv(x)).permute({0, 2, 3, 1}))));
  }
  torch::nn::Conv2d conv = nullptr;
  Linear up = nullptr, down = nullptr;
};
TORCH_MODULE(Cells);

// A table, column and row layers with residuals, and the table again.
struct WordsImpl : torch::nn::Module {
  WordsImpl() {
    table = register_module("table", torch::nn::Embedding(8, 6));
    for (int i = 0; i < 2; ++i) {
      up.push_back(register_module(concat("up", i), Linear(6, 4)));
      down.push_back(register_module(concat("down", i), Linear(4, 6)));
    }
  }
  at::Tensor forward(const at::Tensor& words) {
    at::Tensor h = table(words);
    for (int i = 0; i < 2; ++i) h = h + down[i](at::gelu(up[i](h)));
    return at::linear(h, table->weight);
  }
  torch::nn::Embedding table = nullptr;
  std::vector<Linear> up, down;
};
TORCH_MODULE(Words);

Sequential stage_net(int stage) {
  Sequential net(Linear(5, 7), torch::nn::Tanh(), Linear(7, 5));
  net->to(at::kDouble);
  fill(*net, 40 + static_cast<std::uint64_t>(stage));
  return net;
}

DistributedManager& world() {
  static DistributedManager manager =
      DistributedManager::initialize({.timeout = std::chrono::seconds(60)});
  set_policies(manager, {.redistribution = Policy::error});
  return manager;
}

template <class Net>
Net prepared() {
  Net net;
  net->to(at::kDouble);
  fill(*net, 17);
  return net;
}

}  // namespace

TEST(ThreeAxes, DataDomainTensor) {
  DistributedManager& manager = world();
  const auto mesh = manager.mesh(mapped({{"data", 2}, {"domain", 2}, {"tensor", 2}}));
  const Groups groups(mesh);
  auto net = prepared<Cells>(), expected = prepared<Cells>();
  tensor_parallel(*net, mesh, {{"up", column()}, {"down", row()}});
  torch::optim::AdamW opt(net->parameters(), 0.01), expected_opt(expected->parameters(), 0.01);
  const Sizes samples{2, 1}, rows{4, 3};
  const std::int64_t n = samples[mesh.coordinate()[0]], h = rows[mesh.coordinate()[1]], w = 5;
  for (int step = 0; step < 2; ++step) {
    const at::Tensor x = randn({3, 2, 7, w}, at::kDouble);
    opt.zero_grad();
    expected_opt.zero_grad();
    const at::Tensor wanted = expected(x);
    loss_of(wanted).backward();
    const at::Tensor input =
        distribute_tensor(x, mesh, {Shard(0), Shard(2), Replicate()}, {{0, samples}, {2, rows}});
    CommTraceScope trace(manager);
    const at::Tensor y = net(input), loss = loss_of(y);
    EXPECT_EQ(groups.moved(*trace),
              (Moved{// The row beside the boundary, to the neighbour and from it.
                     {"exchange [domain]", 2 * n * 2 * w * kItem},
                     // What the row layer adds up.
                     {"all_reduce [tensor]", n * h * w * 2 * kItem}}))
        << trace->table();
    EXPECT_LT(difference(y, wanted), 1e-12);
    trace->clear();
    loss.backward();
    EXPECT_EQ(groups.moved(*trace),
              (Moved{// The gradient of the convolution's outputs beside the boundary.
                     {"exchange [domain]", 2 * n * 4 * w * kItem},
                     // The gradient of what the column layer takes.
                     {"all_reduce [tensor]", n * h * w * 4 * kItem},
                     {"all_reduce [data, domain]", bytes_of(net->parameters())}}))
        << trace->table();
    expect_same(*net, *expected, concat("step ", step));
    opt.step();
    expected_opt.step();
  }
  expect_same(*net, *expected, "the end", false);
}

TEST(ThreeAxes, DataShardedTensor) {
  DistributedManager& manager = world();
  const auto mesh = manager.mesh(mapped({{"data", 2}, {"sharded", 2}, {"tensor", 2}}));
  const Groups groups(mesh);
  auto net = prepared<Words>(), expected = prepared<Words>();
  tensor_parallel(*net, mesh, {{"up*", column()}, {"down*", row()}, {"table", vocabulary()}});
  fully_shard(*net, mesh, {.axes = {"sharded"}});
  torch::optim::AdamW opt(net->parameters(), 0.01), expected_opt(expected->parameters(), 0.01);
  const Sizes samples{2, 1, 0, 3};
  // Batches of three samples, of which the last of the four ranks that share a batch has none.
  const std::vector<std::string> batch_axes{"data", "sharded"};
  const auto loader = [&, all = randint(8, {6, 3})](BatchMapping mapping, int process) {
    return std::make_unique<Loader>(
        std::vector<std::shared_ptr<const Dataset>>{
            std::make_shared<TensorDataset>(std::vector<at::Tensor>{all})},
        std::make_shared<FixedOrder>(SampleOrderOptions{.samples = 6, .seed = 3}, BatchSchedule(3)),
        std::move(mapping), process);
  };
  const auto mine = loader(batch_mapping(mesh.mesh(), batch_axes), manager.rank()),
             whole_batches = loader(BatchMapping({1}, {0}, {0}), 0);
  // Of this rank: all its shards; column layers' biases, whose only dim the tensor axis has taken,
  // so that they are not sharded again; row layers' biases, the same on the tensor axis.
  const std::int64_t shards = bytes_of(net->parameters()),
                     kept = bytes_of({net->up[0]->bias, net->up[1]->bias}),
                     shared = bytes_of({net->down[0]->bias, net->down[1]->bias});
  // Of this rank on the tensor axis: rows of the table, and of each pair of layers two matrices and
  // two biases.
  const std::int64_t whole = (4 * 6 + 2 * (2 * 6 + 2 + 6 * 2 + 6)) * kItem;
  for (int step = 0; step < 4; ++step) {
    const bool loaded = step % 2 == 1;
    const at::Tensor words = loaded ? whole_batches->next().tensors[0] : randint(8, {6, 3});
    opt.zero_grad();
    expected_opt.zero_grad();
    const at::Tensor wanted = expected(words);
    loss_of(wanted).backward();
    const at::Tensor input =
        loaded ? shard_batch(mine->next(), mesh, batch_axes).tensors[0]
               : distribute_tensor(words, mesh, {Shard(0), Shard(0), Replicate()}, {{0, samples}});
    const std::int64_t n = to_local(input).size(0);
    if (loaded) {
      EXPECT_EQ(n, 1 - mesh.coordinate()[0] * mesh.coordinate()[1]);
    }
    CommTraceScope trace(manager);
    const at::Tensor y = net(input);
    loss_of(y).backward();
    EXPECT_EQ(groups.moved(*trace),
              some({// Table, row layers' sums and the gradients of what column layers take: three
                    // of 6 columns in forward, three in backward.
                    {"all_reduce [tensor]", 6 * n * 3 * 6 * kItem},
                    {"all_gather [sharded]", shards - kept},
                    {"reduce_scatter [sharded]", whole - kept},
                    {"all_reduce [data]", shards - kept - shared},
                    {"all_reduce [data, tensor]", shared},
                    {"all_reduce [data, sharded]", kept}}))
        << trace->table();
    EXPECT_LT(difference(y, wanted), 1e-12);
    expect_same(*net, *expected, concat("step ", step));
    opt.step();
    expected_opt.step();
  }
  expect_same(*net, *expected, "the end", false);
}

namespace {

// Along the first axis data, along the second stages, along the third shards.
void train_pipeline(DistributedManager& manager, const DeviceMesh& mesh) {
  const Groups groups(mesh, {"data", "pipe", "sharded"});
  const std::string pipe = mesh.mesh().axes()[1].name;
  const int stage = mesh.coordinate()[1], micro_batches = 3;
  const auto shards = stage_mesh(mesh, pipe);
  Sequential net = stage_net(stage), first = stage_net(0), second = stage_net(1);
  fully_shard(*net, shards, {.axes = {mesh.mesh().axes()[2].name}, .coalesce_bytes = 0});
  const auto squared = [](const auto& out, const auto& y) { return torch::mse_loss(out[0], y[0]); };
  Pipeline pipeline(mesh, pipe, schedule_1f1b(2, micro_batches),
                    {make_stage(net.ptr(),
                                [&](const std::vector<at::Tensor>& in) {
                                  const at::Tensor x =
                                      from_local(in[0], shards, {Shard(0), Shard(0)});
                                  return std::vector{to_local(net->forward(x))};
                                },
                                {.gather = gather_parameters, .release = release_parameters})},
                    squared);
  std::vector<at::Tensor> of_both = first->parameters();
  for (const at::Tensor& p : second->parameters()) of_both.push_back(p);
  torch::optim::AdamW opt(net->parameters(), 0.01), expected_opt(of_both, 0.01);
  // Rows of a micro-batch of each rank beside the pipelines.
  const Sizes rows{2, 1, 0, 3};
  const auto at = static_cast<std::size_t>(mesh.coordinate()[0] * 2 + mesh.coordinate()[2]);
  const std::int64_t whole = bytes_of(first->parameters());  // of either stage
  for (int step = 0; step < 2; ++step) {
    const at::Tensor x = randn({6 * micro_batches, 5}, at::kDouble),
                     y = randn({6 * micro_batches, 5}, at::kDouble);
    PipelineBatch batch = split_batch({x}, {y}, micro_batches);
    for (auto* lists : {&batch.inputs, &batch.targets})
      for (auto& list : *lists) list[0] = list[0].split_with_sizes(rows)[at];
    opt.zero_grad();
    expected_opt.zero_grad();
    const at::Tensor wanted = torch::mse_loss(second->forward(first->forward(x)), y);
    wanted.backward();
    CommTraceScope trace(manager);
    const double loss = pipeline.step(batch).loss;
    EXPECT_NEAR(loss, wanted.item<double>(), 1e-12);
    Moved all = groups.moved(*trace);
    // What ranks agree on: sizes of the plain rows, signatures of the micro-batches.
    EXPECT_LT(all["all_gather [data, sharded]"], micro_batches * 100);
    EXPECT_LT(all["all_gather [pipe]"], 200);
    // Shards, and what makes them equally large.
    EXPECT_GE(all["all_gather [sharded]"], bytes_of(net->parameters()));
    EXPECT_LT(all["all_gather [sharded]"], bytes_of(net->parameters()) + 4 * kItem);
    // The first stage says once what it passes on.
    EXPECT_EQ(all["send [pipe]"] > 0, step == 0 && stage == 0);
    EXPECT_EQ(all["receive [pipe]"] > 0, step == 0 && stage == 1);
    for (const char* known : {"send [pipe]", "receive [pipe]", "all_gather [data, sharded]",
                              "all_gather [pipe]", "all_gather [sharded]"})
      all.erase(known);
    EXPECT_EQ(all, some({// Activations one way, their gradients the other.
                         {"exchange [pipe]", 2 * micro_batches * rows[at] * 5 * kItem},
                         {"reduce_scatter [sharded]", whole},
                         {"all_reduce [data]", whole / 2},
                         // Samples of each micro-batch, the loss.
                         {"all_reduce [data, sharded]", 4 * micro_batches * kItem},
                         {"all_reduce [data, pipe, sharded]", kItem}}))
        << trace->table();
    expect_same(*net, stage == 0 ? *first : *second, concat("step ", step));
    opt.step();
    expected_opt.step();
  }
  expect_same(*net, stage == 0 ? *first : *second, "the end", false);
}

}  // namespace

TEST(ThreeAxes, DataPipelineSharded) {
  DistributedManager& manager = world();
  train_pipeline(manager, manager.mesh(mapped({{"data", 2}, {"pipe", 2}, {"sharded", 2}})));
  train_pipeline(manager, ParallelGroups(manager, {.model = 2, .pipeline = 2}).mesh);
}

}  // namespace tessera::test

int main(int argc, char** argv) {
  at::set_num_threads(1);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

// Deferred modules that are filled from checkpoints and from files of other programs: the values
// are those of the files, nothing is drawn, and a rank reads its own ranges.

#include <torch/torch.h>

#include <fstream>

#include "../nn/byte_counter.h"
#include "support.h"
#include "tessera/checkpoint/fill_deferred.h"
#include "tessera/nn/deferred.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/nn/fully_shard.h"
#include "tessera/nn/tensor_parallel.h"

namespace tessera::test {

using ::tessera::testing::Folder;

namespace {

namespace nn = torch::nn;
using Reader = std::shared_ptr<CheckpointReader>;

// A tied table, a buffer that has values from the beginning, one that is computed.
struct WordsImpl : nn::Module {
  explicit WordsImpl(at::ScalarType dtype = at::kDouble) {
    table = register_module("table", nn::Embedding(11, 6));
    blocks = register_module("blocks", nn::ModuleList());
    for (int i = 0; i < 2; ++i) blocks->push_back(nn::Linear(6, 6));
    head = register_parameter("head", table->weight);
    given = register_buffer("given", torch::tensor({1.0, 2.0, 3.0}, at::kDouble));
    made = register_buffer("made", torch::ones({5}).mul(3));
    to(dtype);
  }
  nn::Embedding table = nullptr;
  nn::ModuleList blocks = nullptr;
  at::Tensor head, given, made;
};
TORCH_MODULE(Words);

NamedTensors named(nn::Module& net) {
  NamedTensors all;
  for (const auto& p : net.named_parameters()) all.emplace_back(p.key(), p.value());
  for (const auto& b : net.named_buffers()) all.emplace_back(b.key(), b.value());
  return all;
}

// What the files hold, under their names.
std::map<std::string, at::Tensor> stored() {
  std::map<std::string, at::Tensor> all;
  Words net;
  double next = 0;
  for (const auto& [name, t] : named(*net)) {
    if (name == "head") continue;
    std::string as = name == "table.weight" ? "model.embed.weight" : name;
    if (as.starts_with("blocks.")) as = "model.layers." + as.substr(7, 1) + ".proj" + as.substr(8);
    all[as] = at::arange(t.numel(), at::kDouble).reshape(t.sizes()) + next;
    next += 1000;
  }
  return all;
}

const NameTable kTable{{"table.*", "model.embed.*"}, {"blocks.*.*", "model.layers.*.proj.*"}};

void write_folder(const DeviceMesh& mesh, const std::string& folder) {
  NamedTensors tensors;
  for (const auto& [name, t] : stored()) tensors.emplace_back(name, t);
  save_folder(tensors, mesh, folder, 300);
}

void expect_filled(nn::Module& net, const std::string& where) {
  const auto expected = stored();
  for (const auto& [name, t] : named(net)) {
    EXPECT_FALSE(is_deferred(t)) << where << name;
    const std::string there = name == "head" ? "model.embed.weight" : name_in_files(name, kTable);
    EXPECT_TRUE(whole(t).equal(expected.at(there).to(t.scalar_type()))) << where << name;
  }
}

// Places the module in one of the ways.
void place(nn::Module& net, const DeviceMesh& mesh, Draw& draw, int how) {
  if (how == 0) {
    distribute_module(net, mesh, [&](const std::string&, const at::Tensor& t) {
      return std::optional(
          ParameterPlacement{draw.spec(mesh, t.sizes().vec(), false).placements()});
    });
  } else if (how == 1) {
    fully_shard(net, mesh, {.units = {"blocks.*"}});
  } else {
    tensor_parallel(net, mesh, {{"blocks.0", column()}, {"blocks.1", row()}},
                    {.axis = mesh.mesh().axes()[0].name});
  }
}

}  // namespace

TEST(FillDeferred, FromAFolderOfFilesByATableOfNames) {
  const Folder folder;
  for (const int ranks : {1, 2, 3, 4}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      Draw draw(static_cast<std::uint64_t>(ranks));
      const auto mesh = manager.mesh(draw.mesh(ranks));
      const std::string path = folder / concat("model of ", ranks);
      write_folder(mesh, path);
      const auto saved = std::make_shared<CheckpointReader>(mesh.all(), path);
      for (int how = 0; how < 3; ++how) {
        auto net = deferred([] { return Words(); });
        const RandomState before = random_state(manager);
        fill_deferred(*net, saved, kTable);
        place(*net, mesh, draw, how);
        expect_filled(*net, concat(ranks, " ranks, way ", how, ": "));
        EXPECT_EQ(random_state(manager).seed, before.seed);
        EXPECT_EQ(net->head.unsafeGetTensorImpl(), net->table->weight.unsafeGetTensorImpl());
      }
      // Whole, on this process; in another dtype, recorded before and after.
      auto other = deferred([] { return Words(at::kFloat); });
      EXPECT_THROW(fill_deferred(*other, saved, kTable), InvalidArgument) << "another dtype";
      fill_deferred(*other, saved, kTable, {.convert = true});
      other->to(at::kDouble);
      {
        const torch::NoGradGuard no_grad;
        other->made.add_(1);
      }
      materialize(*other);
      EXPECT_TRUE(other->made.equal(stored().at("made") + 1));
      EXPECT_TRUE(other->table->weight.equal(stored().at("model.embed.weight")));
    });
  }
}

TEST(FillDeferred, FromACheckpointAndGoesOn) {
  const Folder folder;
  on_threads(2, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    nn::Sequential net(nn::Linear(5, 7), nn::Linear(7, 3));
    fully_shard(*net, mesh);
    CheckpointState state;
    state.add("net.", *net).set_integer("step", 7);
    Checkpointer(manager, folder.path()).save("c", state);
    std::vector<at::Tensor> expected;
    for (const at::Tensor& p : net->parameters()) expected.push_back(whole(p));
    const auto saved = std::make_shared<CheckpointReader>(mesh.all(), folder.path(), "c");
    auto other = deferred([] { return nn::Sequential(nn::Linear(5, 7), nn::Linear(7, 3)); });
    fill_deferred(*other, saved, {{"*", "net.*"}});
    distribute_module(*other, mesh, {{"*.weight", {{Shard(1)}}}});
    const auto got = other->parameters();
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(whole(got[i]).equal(expected[i]));
    // Trains as any other.
    other->forward(distribute_tensor(at::ones({4, 5}), mesh, {Shard(0)})).sum().backward();
    EXPECT_TRUE(got[0].grad().defined());
  });
}

TEST(FillDeferred, ARankReadsItsRangesAndHoldsItsShardsAndOneParameter) {
  const Folder folder;
  const ByteCounter counter;
  on_threads(4, [&](DistributedManager& manager) {
    const int rank = manager.rank();
    const auto mesh = manager.mesh({{"x", 4}});
    static constexpr std::int64_t kLayers = 8, kWidth = 128, kOne = kWidth * kWidth * 4;
    constexpr std::int64_t kShard = kLayers * (kOne + kWidth * 4) / 4;
    const auto make = [] {
      nn::Sequential all;
      for (int i = 0; i < kLayers; ++i) all->push_back(nn::Linear(kWidth, kWidth));
      return all;
    };
    auto whole_net = make();
    save_folder(named(*whole_net), mesh, folder / "big", 3 * kOne);
    CheckpointState state;
    state.add("", *whole_net);
    Checkpointer(manager, folder / "saved").save("c", state);
    whole_net = nullptr;
    for (const bool checkpoint : {false, true}) {
      ByteCounter::count_as(rank);
      counter.restart(rank);
      const std::int64_t before = counter.live(rank);
      auto net = deferred(make);
      const Reader saved =
          checkpoint ? std::make_shared<CheckpointReader>(mesh.all(), folder / "saved", "c")
                     : std::make_shared<CheckpointReader>(mesh.all(), folder / "big");
      fill_deferred(*net, saved);
      EXPECT_LT(counter.most(rank) - before, kOne / 8) << "nothing has been read yet";
      EXPECT_EQ(saved->bytes_read(), 0u);
      fully_shard(*net, mesh, {.units = {"*"}});
      EXPECT_LE(counter.most(rank) - before, kShard + kOne) << "of " << 4 * kShard << " in all";
      EXPECT_GE(counter.most(rank) - before, kShard);
      // A checkpoint's pieces are verified too, each by one of the ranks.
      const auto bytes = static_cast<std::int64_t>(saved->bytes_read());
      std::int64_t mine = 0;
      for (const at::Tensor& p : net->parameters()) mine += spec(p).local_numel() * 4;
      EXPECT_GE(bytes, mine);
      EXPECT_LE(bytes, checkpoint ? mine + kShard + kOne : mine);
      ByteCounter::count_as(-1);
      mesh.all().barrier();
    }
  });
}

TEST(FillDeferred, MistakesAreToldBeforeAnythingChanges) {
  const Folder folder;
  on_threads(2, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    write_folder(mesh, folder / "model");
    const auto saved = std::make_shared<CheckpointReader>(mesh.all(), folder / "model");
    auto net = deferred([] { return Words(); });
    const auto told = [&](const NameTable& table, const LoadOptions& options = {}) {
      return thrown<InvalidArgument>([&] { fill_deferred(*net, saved, table, options); });
    };
    EXPECT_TRUE(contains(told({}), "'head' is not there"));
    EXPECT_TRUE(contains(told({}), "'model.embed.weight' is there alone"));
    EXPECT_TRUE(contains(told({{"nobody.*", "a.*"}}), "has a name like 'nobody.*'"));
    EXPECT_TRUE(contains(told({{"table.weight", "a.*"}}), "more stars"));
    EXPECT_TRUE(contains(told({{"table.*", "given"}, kTable[1]}), "has shape [3]"));
    // Of many stars none is tried again and again.
    const std::string stars(40, '*');
    EXPECT_EQ(name_in_files(std::string(300, 'a'), {{stars + "b", "x"}, {stars, stars}}),
              std::string(300, 'a'));
    EXPECT_EQ(name_in_files("ab.cab.d", {{"*b.*.d", "<*|*>"}}), "<a|cab>");
    EXPECT_THROW(fill_deferred(*net, nullptr), InvalidArgument);
    EXPECT_THROW(fill_deferred(*net, saved, manager.rank() == 0 ? kTable : NameTable{}),
                 InvalidArgument);
    EXPECT_THROW(set_source(net->given, "plain", {}), InvalidArgument);
    // Missing: what the constructor draws; and it is still deferred.
    EXPECT_EQ(told({{"table.*", "nobody.*"}, kTable[1]}, {.allow_missing = true}).find("missing"),
              std::string::npos);
    fill_deferred(*net, saved, {{"table.*", "nobody.*"}, kTable[1]},
                  {.allow_extra = true, .allow_missing = true});
    distribute_module(*net, mesh);
    EXPECT_TRUE(
        whole(net->blocks->parameters()[0]).equal(stored().at("model.layers.0.proj.weight")));
    EXPECT_FALSE(whole(net->table->weight).equal(stored().at("model.embed.weight")));

    // A reader over other ranks than those that place.
    auto other = deferred([] { return Words(); });
    const auto alone = std::make_shared<CheckpointReader>(
        manager.mesh({{"a", 2}, {"b", 1}}).group("b"), folder / "model");
    fill_deferred(*other, alone, kTable);
    EXPECT_TRUE(contains(thrown<InvalidArgument>([&] { distribute_module(*other, mesh); }),
                         "make the reader over the mesh's ranks"));
    EXPECT_TRUE(is_deferred(other->table->weight));
    fill_deferred(*other, saved, kTable);
    distribute_module(*other, mesh);
    expect_filled(*other, "after a failure: ");
  });
}

TEST(FillDeferred, IndexesAreHeldAgainstTheirFiles) {
  const Folder folder;
  on_threads(2, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const std::string path = folder / "model", index = path + "/model.safetensors.index.json";
    const auto told = [&](const std::string& text) {
      mesh.all().barrier();
      if (manager.rank() == 0) std::ofstream(index) << text;
      mesh.all().barrier();
      const auto one = thrown<FileError>([&] { load(mesh, path); });
      EXPECT_EQ(one, thrown<FileError>([&] { CheckpointReader(mesh.all(), path).tensors(); }));
      return one;
    };
    save_folder({{"a", at::ones({3})}, {"b", at::ones({4})}}, mesh, path, 12);
    EXPECT_EQ(load(mesh, path).size(), 2u);
    const std::string one = "model-00001-of-00002.safetensors",
                      two = "model-00002-of-00002.safetensors";
    EXPECT_TRUE(contains(told("{"), "cannot be read"));
    EXPECT_TRUE(contains(told(R"({"weight_map": {"a": "../a"}})"), "outside of the folder"));
    EXPECT_TRUE(contains(told(R"({"weight_map": {"a": "gone"}})"), "gone"));
    EXPECT_TRUE(contains(
        told(concat(R"({"weight_map": {"a": ")", one, R"(", "c": ")", two, "\"}}")), "holds 'b'"));
    EXPECT_TRUE(
        contains(told(concat(R"({"weight_map": {"a": ")", one, R"(", "c": ")", one, "\"}}")),
                 "does not hold 'c'"));
    // What is saved again has no index until it is complete.
    save_folder({{"a", at::zeros({3})}}, mesh, path, 1);
    EXPECT_TRUE(whole(load(mesh, path)[0].second).eq(0).all().item<bool>());
    EXPECT_THROW(save_folder({{"a", at::ones({1})}, {"a", at::ones({1})}}, mesh, path, 9),
                 InvalidArgument);
  });
}

}  // namespace tessera::test

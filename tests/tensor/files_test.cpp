// Files of sharded tensors: what one mesh saves another loads, and what is wrong with a file is
// told to every rank.

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "../support/folder.h"
#include "support.h"
#include "tessera/checkpoint/file.h"
#include "tessera/nn/distribute_module.h"

namespace tessera::test::files_test {

using ::tessera::testing::Folder;
using ::tessera::testing::put;
using ::tessera::testing::thrown;

TEST(Files, WhatOneMeshSavesLoadsOnAnother) {
  const Folder folder;
  const std::string path = folder / "state.safetensors";
  const auto make = [] {
    torch::nn::Sequential net(torch::nn::Linear(6, 5), torch::nn::BatchNorm1d(5),
                              torch::nn::Linear(5, 3));
    fill(*net, 11);
    return net;
  };
  on_threads(4, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"a", 2}, {"b", 2}});
    auto net = make();
    distribute_module(
        *net, mesh,
        [](const std::string& name, const at::Tensor&) -> std::optional<ParameterPlacement> {
          if (name == "0.weight")
            return ParameterPlacement{{Shard(0), Shard(1)}, {{0, {4, 1}}, {1, {0, 6}}}};
          return std::nullopt;
        });
    seed(0);
    // moves the running statistics
    net->forward(distribute_tensor(randn({8, 6}), mesh, {Shard(0), Replicate()}));
    save(*net, mesh, path);
  });
  auto plain = make();
  plain->forward([&] {
    seed(0);
    return randn({8, 6});
  }());
  for (const int ranks : {1, 3}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh({{"x", ranks}});
      auto net = make();
      fill(*net, 99);
      distribute_module(
          *net, mesh,
          [](const std::string& name, const at::Tensor& t) -> std::optional<ParameterPlacement> {
            if (t.dim() == 2 && name.ends_with("weight")) return ParameterPlacement{{Shard(1)}};
            return std::nullopt;
          });
      load(*net, mesh, path);
      for (const auto& p : plain->named_parameters())
        EXPECT_EQ(difference(net->named_parameters()[p.key()], p.value()), 0) << p.key();
      for (const auto& b : plain->named_buffers())
        EXPECT_LT(difference(net->named_buffers()[b.key()], b.value()), 1e-6) << b.key();
      auto undistributed = make();
      fill(*undistributed, 98);
      load(*undistributed, mesh, path);
      EXPECT_EQ(difference(undistributed->parameters()[0], plain->parameters()[0]), 0);
      torch::nn::Sequential other(torch::nn::Linear(6, 4));
      fill(*other, 1);
      const at::Tensor before = other->parameters()[0].detach().clone();
      const std::string why = thrown<Error>([&] { load(*other, mesh, path); });
      EXPECT_NE(why.find("'0.weight' has shape [4, 6], in the file [5, 6]"), std::string::npos)
          << why;
      EXPECT_NE(why.find("'2.bias' is in the file alone"), std::string::npos) << why;
      EXPECT_EQ(difference(other->parameters()[0], before), 0);
    });
  }
}

TEST(Files, EveryDtypeAndPlacement) {
  const Folder folder;
  const std::string path = folder / "dtypes.safetensors";
  on_threads(3, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    Draw draw(3);
    NamedTensors all;
    std::vector<at::Tensor> values;
    for (const auto dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt,
                             at::kShort, at::kChar, at::kByte, at::kBool}) {
      for (const auto& shape : {std::vector<std::int64_t>{}, std::vector<std::int64_t>{0, 3},
                                std::vector<std::int64_t>{4, 5}}) {
        const at::Tensor value = randn(shape).mul(3).abs().to(dtype);
        values.push_back(value);
        all.emplace_back(
            concat("name \"", all.size(), "\" \n"),
            distribute_tensor(value, draw.spec(mesh, shape, at::isFloatingType(dtype))));
      }
    }
    values.push_back(at::arange(3));
    all.emplace_back("plain", values.back());
    save(all, mesh, path);
    const NamedTensors loaded =
        load(mesh, path, [](const std::string& name) -> std::optional<ParameterPlacement> {
          return name == "plain" ? std::optional(ParameterPlacement{{Shard(0)}, {{0, {0, 1, 2}}}})
                                 : std::nullopt;
        });
    ASSERT_EQ(loaded.size(), all.size());
    for (std::size_t i = 0; i < all.size(); ++i) {
      EXPECT_EQ(loaded[i].first, all[i].first);
      EXPECT_LT(difference(loaded[i].second, values[i]), 1e-2) << i;
      if (!at::isFloatingType(values[i].scalar_type())) {
        EXPECT_EQ(difference(loaded[i].second, values[i]), 0) << i;
      }
    }
    EXPECT_THROW(
        save({{"z", distribute_tensor(at::zeros({2}, at::kComplexDouble), mesh, {Replicate()})}},
             mesh, path),
        InvalidArgument);
    const at::Tensor one = distribute_tensor(randn({4, 5}), mesh, {Shard(1)});
    const at::Tensor before = full_tensor(one);
    save(one, path);
    EXPECT_EQ(difference(load(path, ShardSpec(mesh, {4, 5}, {Shard(0)})), before), 0);
    EXPECT_THROW(load(path, ShardSpec(mesh, {5, 4}, {Shard(0)})), InvalidArgument);
  });
}

TEST(Files, MistakesAreReportedOnEveryRankAndLeaveNothingBehind) {
  const Folder folder;
  const std::string path = folder / "broken.safetensors";
  on_threads(2, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor x = distribute_tensor(at::ones({8}), mesh, {Shard(0)});
    EXPECT_THROW(load(mesh, folder / "absent"), Error);
    EXPECT_THROW(save(x, "/nonexistent/folder/x.safetensors"), Error);
    const auto load_of = [&](const std::string& bytes) {
      if (manager.rank() == 0) put(path, bytes);
      load(mesh, path);
    };
    const auto headed = [](const std::string& json) {
      std::string out;
      for (int i = 0; i < 8; ++i) out += static_cast<char>(json.size() >> 8 * i & 0xff);
      return out + json;
    };
    for (const std::string& bytes :
         {std::string(), std::string("short"), std::string(8, '\x7f'), headed("{"), headed("[]"),
          headed(R"({"a":1})"),
          headed(R"({"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}})") + "1234",
          headed(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})") + "1234",
          headed(R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})"),
          headed(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}})") + "12345678",
          headed(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8",)"
                 R"("shape":[1],"data_offsets":[0,1]}})") +
              "1"}) {
      const std::string why = thrown<Error>([&] { load_of(bytes); });
      EXPECT_NE(why.find("load: "), std::string::npos) << why << " for " << bytes;
    }
    EXPECT_NO_THROW(load_of(headed(R"({ "__metadata__":{"format":"pt"}, "\u00e9" :)"
                                   R"( {"dtype":"U8", "shape":[1], "data_offsets":[0,1]} })") +
                            "1"));
    for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
      EXPECT_EQ(entry.path(), path);
  });
}

}  // namespace tessera::test::files_test

// Tensors of samples and batches by name, nested, from the dataset to sharded tensors.
#include "tessera/data/fields.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "../support/ranks.h"
#include "tessera/data/shard_batch.h"
#include "tessera/data/sources/source_dataset.h"
#include "tessera/data/stream_loader.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::fields_test {
namespace {

using NameList = std::vector<std::string>;

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const InvalidArgument& e) {
    return e.what();
  }
  return "nothing was thrown";
}

// Three fields of five samples, two of them in a group.
Fields sample_fields(std::int64_t base = 0) {
  const auto wind = torch::arange(base, base + 5 * 4 * 3, torch::kDouble).view({5, 4, 3});
  return {{"inputs/wind", wind},
          {"inputs/about/month", torch::arange(base, base + 5)},
          {"target", -wind.select(2, 0)}};
}

std::shared_ptr<const Dataset> named_dataset(const Fields& fields) {
  return std::make_shared<TensorDataset>(fields);
}

std::shared_ptr<const Order> named_order(std::uint64_t batch) {
  return std::make_shared<FixedOrder>(
      SampleOrderOptions{.samples = 5, .seed = 2, .last = LastBatch::pad}, BatchSchedule(batch));
}

TEST(Fields, AreFoundByNameAndByGroup) {
  const Fields fields = sample_fields();
  EXPECT_EQ(fields.names(), (NameList{"inputs/wind", "inputs/about/month", "target"}));
  EXPECT_TRUE(fields.at("inputs/wind").equal(fields.tensors()[0]));
  EXPECT_TRUE(fields.under("inputs").under("about").at("month").equal(fields.tensors()[1]));
  EXPECT_EQ(fields.under("inputs").names(), (NameList{"wind", "about/month"}));
  EXPECT_TRUE(fields.contains("target"));
  EXPECT_FALSE(fields.contains("inputs"));  // a group is no tensor
  EXPECT_EQ(message_of([&] { fields.at("wind"); }),
            "no field 'wind'; there are: [inputs/wind, inputs/about/month, target]");
  for (const char* group : {"target", "input", "inputs/", ""})
    EXPECT_THROW(fields.under(group), InvalidArgument) << group;

  Fields joined;
  joined.add("target", fields.at("target"));
  joined.add("inputs", fields.under("inputs"));
  EXPECT_EQ(joined.names(), (NameList{"target", "inputs/wind", "inputs/about/month"}));
  // What is refused changes nothing.
  EXPECT_THROW(joined.add("target", fields.at("target")), InvalidArgument);
  EXPECT_THROW(joined.add("inputs", Fields{{"new", at::Tensor()}, {"wind", at::Tensor()}}),
               InvalidArgument);
  EXPECT_EQ(joined.names().size(), 3u);
}

TEST(Fields, RefuseNamesThatCannotStandSideBySide) {
  const auto t = torch::zeros({1});
  for (const NameList& names : std::vector<NameList>{{""},
                                                     {"/a"},
                                                     {"a/"},
                                                     {"a//b"},
                                                     {"a\nb"},
                                                     {"a", "a"},
                                                     {"a", "a/b"},
                                                     {"a/b/c", "a/b"},
                                                     {std::string(2000, 'x')}}) {
    EXPECT_THROW(require_field_names(names), InvalidArgument) << names[0];
    EXPECT_THROW((Fields{names, std::vector<at::Tensor>(names.size(), t)}), InvalidArgument);
  }
  require_field_names({"a/b", "a/c", "ab", "a b", "Ämter/0"});
  EXPECT_THROW((Fields{NameList{"a"}, {}}), InvalidArgument);
  EXPECT_EQ(message_of([] { require_field_names({"a\nb"}); }).find('\n'), std::string::npos);
}

TEST(Fields, OfADatasetComeWithItsBatches) {
  const Fields all = sample_fields();
  // A function may give them in any order, and must give all of them.
  const FunctionDataset function(5, all.names(), [&](std::uint64_t index) {
    const auto row = [&](const char* name) {
      return all.at(name)[static_cast<std::int64_t>(index)];
    };
    Fields sample{{"target", row("target")}, {"inputs/wind", row("inputs/wind")}};
    if (index != 4) sample.add("inputs/about/month", row("inputs/about/month"));
    return sample;
  });
  EXPECT_EQ(function.field_names(), all.names());
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(function.get(3)[i].equal(all.tensors()[i][3])) << i;
  }
  EXPECT_NE(message_of([&] { function.get(4); }).find("has the fields [target, inputs/wind]"),
            std::string::npos);

  for (const int workers : {0, 2}) {
    const BatchMapping mapping({3}, {0, 1, 2}, {0});
    // Five samples in steps of two for three processes: some have no row, and have the names.
    for (const int process : {0, 2}) {
      Loader loader({named_dataset(all)}, named_order(2), mapping, process, {.workers = workers});
      const LoadedBatch batch = loader.next();
      EXPECT_EQ(batch.rows, process == 0 ? 1 : 0);
      EXPECT_EQ(batch.names, all.names());
      EXPECT_EQ(batch.field("target").sizes(), (std::vector<std::int64_t>{batch.rows, 4}));
      const auto inputs = batch.fields().under("inputs");
      EXPECT_TRUE(inputs.at("wind").equal(batch.tensors[0]));
      EXPECT_TRUE(inputs.under("about").at("month").equal(batch.field("inputs/about/month")));
      EXPECT_THROW(batch.field("wind"), InvalidArgument);
    }
  }
}

TEST(Fields, OfAMixtureAreTheSameInAllDatasets) {
  const Fields all = sample_fields();
  const auto mixture = std::make_shared<MixtureOrder>(
      Mixture({{"a", 5}, {"b", 5}}, {{0, {0.5, 0.5}}}, 1, true), BatchSchedule(4));
  const BatchMapping alone({1}, {0}, {0});
  const auto unnamed = std::make_shared<TensorDataset>(sample_fields(100).tensors());
  const auto names_with = [&](std::shared_ptr<const Dataset> second, LoaderOptions options = {}) {
    Loader loader({named_dataset(all), std::move(second)}, mixture, alone, 0, std::move(options));
    return loader.next().names;
  };
  EXPECT_EQ(names_with(named_dataset(sample_fields(100))), all.names());
  EXPECT_EQ(names_with(unnamed), all.names());
  Fields swapped{{"target", all.at("target")}};
  swapped.add("inputs", all.under("inputs"));
  const std::string said = message_of([&] { names_with(named_dataset(swapped)); });
  EXPECT_NE(said.find("dataset 1 has the fields [target,"), std::string::npos) << said;
  EXPECT_EQ(names_with(named_dataset(sample_fields()), {.names = {"a", "b", "c"}}),
            (NameList{"a", "b", "c"}));
  EXPECT_THROW(names_with(unnamed, {.names = {"a", "a/b", "c"}}), InvalidArgument);
  // A wrong number is seen with the first batch.
  EXPECT_THROW(names_with(unnamed, {.names = {"a", "b"}}), InvalidArgument);
}

TEST(Fields, OfCollatedAndPackedBatches) {
  std::vector<at::Tensor> texts;
  const std::vector<std::uint64_t> lengths{3, 1, 2, 2};
  for (const std::uint64_t n : lengths) texts.push_back(torch::arange(static_cast<int>(n)));
  const auto text = std::make_shared<FunctionDataset>(
      4, NameList{"tokens"}, [&](std::uint64_t i) { return Fields{{"tokens", texts[i]}}; });
  const BatchMapping alone({1}, {0}, {0});
  const auto packing = [&](std::shared_ptr<const Dataset> data) {
    return std::make_unique<Loader>(std::vector<std::shared_ptr<const Dataset>>{std::move(data)},
                                    std::make_shared<PackedOrder>(lengths, 2, 4, 1), alone, 0);
  };
  const auto packed = packing(text)->next();
  EXPECT_EQ(packed.names, (NameList{"tokens", "segments"}));
  EXPECT_TRUE(packed.field("segments").equal(packed.tensors[1]));
  const auto taken = std::make_shared<FunctionDataset>(
      4, NameList{"segments"}, [&](std::uint64_t i) { return Fields{{"segments", texts[i]}}; });
  const auto twice = packing(taken);
  EXPECT_THROW(twice->next(), InvalidArgument);

  const auto order =
      std::make_shared<FixedOrder>(SampleOrderOptions{.samples = 4}, BatchSchedule(4));
  LoaderOptions options{.collate = [](const auto& samples) { return pad_collate(samples); }};
  Loader unnamed({text}, order, alone, 0, options);
  EXPECT_TRUE(unnamed.next().names.empty());
  EXPECT_NE(message_of([&] { unnamed.next().field("tokens"); }).find("have no names"),
            std::string::npos);
  options.names = {"tokens", "lengths"};
  Loader named({text}, order, alone, 0, options);
  EXPECT_EQ(named.next().field("lengths").sum().item<std::int64_t>(), 8);
}

TEST(Fields, OfAStream) {
  struct Pairs : IterableDataset {
    std::optional<Sample> next() override {
      if (at == 4) return std::nullopt;
      ++at;
      return Sample{torch::full({2}, at), torch::tensor(at)};
    }
    std::int64_t at = 0;
  };
  run_threads(2, [&](DistributedManager& manager) {
    StreamLoader stream(std::make_shared<Pairs>(), 2, manager.world(),
                        {.names = {"x/image", "x/label"}});
    const auto first = stream.next();
    EXPECT_TRUE(first->fields().under("x").at("label").equal(first->tensors[1]));
    EXPECT_EQ(first->field("x/image").sizes(), (std::vector<std::int64_t>{2, 2}));
    // A name too few on one rank is an error on both.
    const NameList names = manager.rank() == 0 ? NameList{"x", "y"} : NameList{"x"};
    StreamLoader wrong(std::make_shared<Pairs>(), 2, manager.world(), {.names = names});
    EXPECT_THROW(wrong.next(), SampleError);
    EXPECT_THROW(StreamLoader(std::make_shared<Pairs>(), 2, manager.world(),
                              {.example = {torch::zeros({2})}, .names = {"x", "y"}}),
                 InvalidArgument);
  });
}

TEST(Fields, OfASourceAreItsVariables) {
  // Written by no library: two arrays that are views of one.
  struct Two : Source {
    std::string name() const override { return "memory"; }
    std::vector<std::string> variables() const override { return {"/air/t", "/air/u"}; }
    const VariableInfo& info(const std::string& variable) const override {
      return variable == "/air/t" ? t : u;
    }
    VariableInfo t{"/air/t", {"time"}, {6}, at::kDouble, {}};
    VariableInfo u{"/air/u", {"time"}, {6}, at::kDouble, {}};

   protected:
    at::Tensor read_box(const VariableInfo& about, const Hyperslab& slab,
                        const ReadOptions& options) const override {
      const double sign = about.name == "/air/t" ? 1 : -1;
      return (sign * torch::arange(6, torch::kDouble))
          .slice(0, slab.start[0], slab.start[0] + slab.count[0])
          .to(options.dtype);
    }
  };
  const auto source = std::make_shared<Two>();
  const auto names = [&](std::vector<SourceField> fields) {
    return SourceDataset(source, std::move(fields)).field_names();
  };
  EXPECT_EQ(names({{"/air/t"}, {"/air/u"}}), (NameList{"air/t", "air/u"}));
  EXPECT_EQ(names({{"/air/t", {}, {}, "now"}, {"/air/u"}}), (NameList{"now", "air/u"}));
  // One variable twice: nameless, unless names tell them apart.
  EXPECT_TRUE(names({{"/air/t"}, {"/air/t"}}).empty());
  EXPECT_EQ(names({{"/air/t"}, {"/air/t", {}, {}, "again"}}), (NameList{"air/t", "again"}));
  EXPECT_THROW(names({{"/air/t", {}, {}, "a"}, {"/air/t", {}, {}, "a"}}), InvalidArgument);
}

// Two ranks share each sample; the wind's rows are sharded by name, the rest is replicated.
TEST(Fields, AreShardedByName) {
  const Fields all = sample_fields();
  Loader one({named_dataset(all)}, named_order(3), BatchMapping({1}, {0}, {0}), 0);
  const LoadedBatch expected = one.next();
  for (const bool scattered : {false, true}) {
    test::on_ranks(4, [&](DistributedManager& manager) {
      const DeviceMesh mesh = manager.mesh({{"data", 2}, {"domain", 2}});
      Loader loader({named_dataset(all)}, named_order(3), batch_mapping(mesh.mesh(), {"data"}),
                    manager.rank());
      std::optional<LoadedBatch> read;
      if (!scattered || reads_for_others(mesh, {"data"})) read = loader.next();
      const auto sharded = [&](const std::vector<FieldSharding>& fields) {
        return scattered ? scatter_batch(read, mesh, {"data"}, fields)
                         : shard_batch(*read, mesh, {"data"}, fields);
      };
      const bool whole = !scattered;
      for (const char* name : {"inputs/wind", "target"}) {
        const ShardedBatch batch =
            sharded({{.field = name, .dims = {{"domain", 1}}, .whole = whole}});
        EXPECT_EQ(batch.names, all.names());
        for (const std::string& other : all.names()) {
          const at::Tensor got = batch.field(other);
          EXPECT_TRUE(full_tensor(got).equal(expected.field(other))) << other;
          EXPECT_EQ(spec(got).placements()[1], other == name ? Shard(1) : Replicate());
        }
      }
      // Another group, none of that name, two for one field, and half of them named.
      const std::vector<std::vector<FieldSharding>> wrong = {
          {{.field = "input", .dims = {{"domain", 1}}, .whole = true}},
          {{.field = "wind", .dims = {{"domain", 1}}, .whole = true}},
          {{.field = "inputs", .whole = true},
           {.field = "inputs/wind", .dims = {{"domain", 1}}, .whole = true}},
          {{.field = "target", .dims = {{"domain", 1}}, .whole = true}, {}}};
      for (const auto& fields : wrong) {
        EXPECT_THROW(sharded(fields), InvalidArgument);
        manager.world().barrier();
      }
      // A dim that one field of a group lacks is refused.
      if (!scattered) {
        EXPECT_THROW(sharded({{.field = "inputs", .dims = {{"domain", 2}}, .whole = true}}),
                     InvalidArgument);
      }
    });
  }
}

// Ranks that call their tensors differently would look up different ones.
TEST(Fields, RanksWithOtherNamesAllGetTheError) {
  test::on_ranks(2, [&](DistributedManager& manager) {
    const Fields mine =
        manager.rank() == 0 ? Fields{{"a", torch::zeros({5})}} : Fields{{"b", torch::zeros({5})}};
    const DeviceMesh mesh = manager.mesh({{"data", 2}});
    Loader loader({named_dataset(mine)}, named_order(2), batch_mapping(mesh.mesh(), {"data"}),
                  manager.rank());
    EXPECT_THROW(loader.require_agreement(manager.world()), MismatchError);
  });
}

}  // namespace
}  // namespace tessera::fields_test

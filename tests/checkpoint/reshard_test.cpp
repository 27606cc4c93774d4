// Saved on any mesh, loaded on any other, by ranks as threads.

#include "support.h"

namespace tessera::test {

using ::tessera::testing::Folder;

namespace {

struct Case {
  std::string name;
  std::vector<std::int64_t> shape;
  at::ScalarType dtype;
  at::Tensor value;
};

std::vector<Case> draw_cases(int seed_number, int n) {
  Draw draw(seed_number);
  std::vector<Case> all;
  seed(seed_number);
  const std::vector<at::ScalarType> dtypes{
      at::kDouble,       at::kFloat,  at::kHalf,         at::kBFloat16, at::kLong,
      at::kInt,          at::kShort,  at::kChar,         at::kByte,     at::kBool,
      at::kComplexFloat, at::kUInt16, at::kFloat8_e4m3fn};
  for (int i = 0; i < n; ++i) {
    Case c{concat("t", i, " \"\xc3\xa9"), {}, draw.of(dtypes), {}};
    for (int d = draw.below(4); d > 0; --d) c.shape.push_back(draw.between(0, 6));
    c.value = randn(c.shape).mul(3).abs().to(c.dtype);
    all.push_back(c);
  }
  return all;
}

// Bytes equal: works for every dtype.
bool same(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  return x.sizes() == y.sizes() && x.scalar_type() == y.scalar_type() &&
         (x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0);
}

// This rank's part of a plain value.
at::Tensor part_of(const at::Tensor& value, const ShardSpec& s) {
  at::Tensor part = value;
  for (int d = 0; d < s.dims(); ++d) part = part.narrow(d, s.local_offset()[d], s.local_shape()[d]);
  return part;
}

at::Tensor placed(const at::Tensor& value, const ShardSpec& s) {
  return from_local(part_of(value, s).contiguous(), s);
}

}  // namespace

TEST(Reshard, AnyMeshToAnyOtherReadsOnlyItsBytes) {
  for (int round = 0; round < 6; ++round) {
    const int from = 1 + round % 4;
    const Folder folder;
    const std::vector<Case> cases = draw_cases(round, 14);
    on_threads(from, [&](DistributedManager& manager) {
      Draw draw(100 + round);
      const auto mesh = manager.mesh(draw.mesh(from));
      CheckpointState state;
      for (const Case& c : cases) {
        const ShardSpec s = draw.spec(mesh, c.shape, false);
        state.add(c.name, draw.chance(20) ? c.value.clone() : placed(c.value, s));
      }
      Checkpointer checkpoints(manager, folder.path());
      checkpoints.save("c", state);
      EXPECT_EQ(checkpoints.latest(), "c");
    });
    for (const int to : {1, 2, 3, 4}) {
      on_threads(to, [&](DistributedManager& manager) {
        Draw draw(200 + 10 * round + to);
        const auto mesh = manager.mesh(draw.mesh(to));
        const CheckpointReader saved(manager.world(), folder.path(), "c");
        EXPECT_EQ(saved.saved_ranks(), from);
        CheckpointState state;
        std::vector<at::Tensor> targets;
        std::uint64_t needed = 0;
        for (const Case& c : cases) {
          const ShardSpec s = draw.spec(mesh, c.shape, false);
          targets.push_back(placed(at::zeros(c.shape, at::kByte).to(c.dtype), s));
          state.add(c.name, targets.back());
          needed += static_cast<std::uint64_t>(s.local_numel()) * c.value.element_size();
        }
        saved.load(state, {.verify = false});
        EXPECT_EQ(saved.bytes_read(), needed) << "an over-read of 1.00";
        for (std::size_t i = 0; i < cases.size(); ++i)
          EXPECT_TRUE(same(to_local(targets[i]), part_of(cases[i].value, spec(targets[i]))))
              << cases[i].name << ' ' << spec(targets[i]);
        // With checksums, every byte that is used has been verified by somebody.
        const CheckpointReader again(manager.world(), folder.path(), "c");
        again.load(state);
        for (std::size_t i = 0; i < cases.size(); ++i)
          EXPECT_TRUE(same(to_local(targets[i]), part_of(cases[i].value, spec(targets[i]))));
        again.verify();
      });
    }
  }
}

TEST(Reshard, ReplicasAreWrittenOnceAndShared) {
  const Folder folder;
  on_threads(4, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"data", 2}, {"model", 2}});
    CheckpointState state;
    state.add("replicated",
              distribute_tensor(at::ones({1024, 256}), mesh, {Replicate(), Replicate()}));
    state.add("half", distribute_tensor(at::ones({1024, 256}), mesh, {Replicate(), Shard(0)}));
    state.add("plain", at::ones({512, 256}));
    Checkpointer checkpoints(manager, folder.path());
    checkpoints.save("c", state);
    const std::uint64_t mine = checkpoints.bytes_written();
    const std::uint64_t total = 4 * 256 * (1024 + 1024 + 512);
    EXPECT_LE(mine, total / 4 + total / 40) << "evenly";
    EXPECT_GE(mine, total / 4 - total / 40) << "evenly";
  });
  std::uint64_t all = 0;
  for (const auto& name : names_in(folder / "c"))
    all += std::filesystem::file_size(folder / ("c/" + name));
  EXPECT_LE(all, 4u * 256 * (1024 + 1024 + 512) + 20000) << "once";
}

TEST(Reshard, PartialValuesAreReducedAndHandMadeShardsKept) {
  const Folder folder;
  on_threads(3, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    CheckpointState state;
    state.add("sum", from_local(at::full({2, 2}, 1.0 + manager.rank()), mesh, {Partial()}));
    // Rows 0 to 3 on rank 0, none on rank 1, rows 4 and 5 on rank 2.
    const std::vector<std::int64_t> rows{4, 0, 2}, begin{0, 4, 4};
    const at::Tensor mine = at::arange(12, at::kFloat)
                                .view({6, 2})
                                .narrow(0, begin[manager.rank()], rows[manager.rank()]);
    state.add("table", mine, {{6, 2}, {begin[manager.rank()], 0}});
    Checkpointer(manager, folder.path()).save("c", state);
  });
  on_threads(2, [&](DistributedManager& manager) {
    const CheckpointReader saved(manager.world(), folder.path(), "c");
    const auto mesh = manager.mesh({{"x", 2}});
    EXPECT_EQ(
        difference(saved.read("sum", ShardSpec(mesh, {2, 2}, {Shard(1)})), at::full({2, 2}, 6.0)),
        0);
    EXPECT_EQ(difference(saved.read("table", ShardSpec(mesh, {6, 2}, {Shard(0)}, {{0, {1, 5}}})),
                         at::arange(12, at::kFloat).view({6, 2})),
              0);
    // Into shards by hand, by columns this time.
    const at::Tensor column = at::zeros({6, 1});
    CheckpointState state;
    state.add("table", column, {{6, 2}, {0, manager.rank()}});
    saved.load(state, {.allow_extra = true});
    EXPECT_TRUE(column.equal(at::arange(12, at::kFloat).view({6, 2}).narrow(1, manager.rank(), 1)));
  });
}

TEST(Reshard, ShardsByHandThatDoNotFitAreRefusedOnAllRanks) {
  const Folder folder;
  on_threads(2, [&](DistributedManager& manager) {
    Checkpointer checkpoints(manager, folder.path());
    const int r = manager.rank();
    CheckpointState overlap, hole, shape, dtype;
    overlap.add("t", at::ones({2}), {{3}, {r}});
    hole.add("t", at::ones({1}), {{3}, {2 * r}});
    shape.add("t", at::ones({2 + r}));
    dtype.add("t", at::ones({2}, r == 0 ? at::kFloat : at::kDouble));
    EXPECT_TRUE(
        contains(thrown<InvalidArgument>([&] { checkpoints.save("c", overlap); }), "overlap"));
    EXPECT_TRUE(contains(thrown<InvalidArgument>([&] { checkpoints.save("c", hole); }), "missing"));
    EXPECT_TRUE(
        contains(thrown<InvalidArgument>([&] { checkpoints.save("c", shape); }), "disagree"));
    EXPECT_TRUE(contains(thrown<InvalidArgument>([&] { checkpoints.save("c", dtype); }), "'t'"));
    EXPECT_TRUE(checkpoints.names().empty());
  });
}

TEST(Reshard, LayoutsAreRestoredIfAsked) {
  const Folder folder;
  const at::Tensor value = at::arange(28, at::kDouble).view({4, 7});
  on_threads(4, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"data", 2}, {"domain", 2}});
    CheckpointState state;
    state.add("t",
              distribute_tensor(value, mesh, {Shard(0), Shard(1)}, {{0, {3, 1}}, {1, {0, 7}}}));
    state.add("plain", value);
    Checkpointer(manager, folder.path()).save("c", state);
    const CheckpointReader saved(manager.world(), folder.path(), "c");
    const auto all = saved.read_as_saved(mesh);
    EXPECT_EQ(spec(all[0].second),
              ShardSpec(mesh, {4, 7}, {Shard(0), Shard(1)}, {{0, {3, 1}}, {1, {0, 7}}}));
    EXPECT_EQ(difference(all[0].second, value), 0);
    EXPECT_TRUE(spec(all[1].second).is_replicated());
  });
  on_threads(2, [&](DistributedManager& manager) {
    const CheckpointReader saved(manager.world(), folder.path(), "c");
    const auto domain = manager.mesh({{"domain", 2}});
    EXPECT_TRUE(contains(thrown<InvalidArgument>([&] { saved.read_as_saved(domain); }),
                         "axis 'data' of 2 ranks, which sharded dim 0"));
    std::vector<std::string> misfits;
    const auto all = saved.read_as_saved(domain, &misfits);
    EXPECT_EQ(misfits.size(), 1u);
    EXPECT_EQ(spec(all[0].second), ShardSpec(domain, {4, 7}, {Shard(1)}, {{1, {0, 7}}}));
    EXPECT_EQ(difference(all[0].second, value), 0);
  });
  on_threads(3, [&](DistributedManager& manager) {
    const CheckpointReader saved(manager.world(), folder.path(), "c");
    const auto mesh = manager.mesh({{"data", 3}});
    std::vector<std::string> misfits;
    const auto all = saved.read_as_saved(mesh, &misfits);
    EXPECT_EQ(misfits.size(), 2u) << "the axis `domain`, and the sizes of dim 0";
    EXPECT_EQ(spec(all[0].second), ShardSpec(mesh, {4, 7}, {Shard(0)}));
    EXPECT_EQ(difference(all[0].second, value), 0);
  });
}

TEST(Reshard, OneFileOutAndIn) {
  const Folder folder;
  const std::vector<Case> cases = draw_cases(77, 20);
  for (const int ranks : {1, 3, 4}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      Draw draw(300 + ranks);
      const auto mesh = manager.mesh(draw.mesh(ranks));
      CheckpointState state;
      for (const Case& c : cases)
        state.add(c.name, placed(c.value, draw.spec(mesh, c.shape, false)));
      Checkpointer checkpoints(manager, folder / "many");
      checkpoints.save("c", state);
      const CheckpointReader saved(manager.world(), folder / "many", "c");
      saved.export_file(folder / "one.safetensors");
      const CheckpointReader one(manager.world(), folder / "one.safetensors");
      EXPECT_EQ(one.tensors().size(), cases.size());
      for (const Case& c : cases) {
        const at::Tensor t = one.read(c.name, ShardSpec::replicated(mesh, c.shape));
        EXPECT_TRUE(same(to_local(t), c.value)) << c.name;
      }
      EXPECT_TRUE(
          contains(thrown<FileError>([&] { saved.export_file(folder / "absent/x"); }), "absent"));
    });
    EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"many", "one.safetensors"}));
  }
}

}  // namespace tessera::test

#include "tessera/sampling/batch_mapping.h"

#include <gtest/gtest.h>

#include <set>

#include "generate.h"
#include "tessera/base/error.h"

namespace tessera {
namespace {

using testing::Generator;

std::vector<int> held(const BatchMapping& m, int process) {
  const auto coordinates = m.held_by(process);
  return {coordinates.begin(), coordinates.end()};
}

std::set<std::int64_t> positions(const std::vector<BatchSlice>& slices) {
  std::set<std::int64_t> all;
  for (const BatchSlice& slice : slices)
    for (auto i = slice.samples.begin; i < slice.samples.end; ++i)
      EXPECT_TRUE(all.insert(i).second) << "read twice";
  return all;
}

TEST(BatchMapping, TheDocumentedExample) {
  const BatchMapping m({4, 4}, {0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 1, 1, 2, 2, 3, 3}, {0});
  EXPECT_EQ(m.process_mesh_mapping(), (std::map<int, int>{{0, 0}, {1, 0}, {2, 1}, {3, 1}}));
  for (int p : {0, 1}) EXPECT_EQ(m.local_device_mapping(p), (std::map<int, int>{{0, 0}, {2, 1}}));
  for (int p : {2, 3}) EXPECT_EQ(m.local_device_mapping(p), (std::map<int, int>{{1, 0}, {3, 1}}));
}

TEST(BatchMapping, BatchIndexIsDataTimesFsdpSizePlusFsdp) {
  // data 2 x model 2 x fsdp 3, one device a process
  std::vector<int> processes(12);
  for (int i = 0; i < 12; ++i) processes[i] = i;
  const BatchMapping m({2, 2, 3}, processes, {0, 2});
  for (int data = 0; data < 2; ++data)
    for (int model = 0; model < 2; ++model)
      for (int fsdp = 0; fsdp < 3; ++fsdp)
        EXPECT_EQ(held(m, (data * 2 + model) * 3 + fsdp), std::vector<int>{data * 3 + fsdp});
}

TEST(BatchMapping, PlacementsWithoutATwoFunctionFormAreRefusedAndServedInGeneral) {
  const BatchMapping crossed({3, 4}, {0, 0, 1, 1, 0, 0, 2, 2, 2, 2, 1, 1}, {0});
  EXPECT_THROW(crossed.process_mesh_mapping(), InvalidArgument);
  EXPECT_THROW(crossed.local_device_mapping(0), InvalidArgument);
  EXPECT_EQ(held(crossed, 0), (std::vector<int>{0, 1}));
  EXPECT_EQ(held(crossed, 1), (std::vector<int>{0, 2}));
  EXPECT_EQ(held(crossed, 2), (std::vector<int>{1, 2}));
  EXPECT_EQ(crossed.slices(1, 6), (std::vector<BatchSlice>{{0, {0, 2}, 0}, {2, {4, 6}, 2}}));
  // 2 x 2 x 1 with swapped replicas: sharing follows from the slices, not from the position of the
  // process.
  const BatchMapping swapped({2, 2, 1}, {0, 1, 1, 0}, {0});
  EXPECT_EQ(swapped.process_mesh_mapping(), (std::map<int, int>{{0, 0}, {1, 0}}));
  const BatchMapping replicas({2, 2, 1}, {0, 1, 3, 2}, {1});
  EXPECT_EQ(replicas.process_mesh_mapping(), (std::map<int, int>{{0, 0}, {1, 1}, {2, 1}, {3, 0}}));
  // Disjoint, but of unequal numbers.
  EXPECT_THROW(BatchMapping({3}, {0, 0, 1}, {0}).process_mesh_mapping(), InvalidArgument);
}

TEST(BatchMapping, EqualCoordinatesReadTheSameAndOthersDisjointSamples) {
  Generator random(31);
  int expressible = 0;
  for (int n = 0; n < 4000; ++n) {
    const auto mesh = random.mesh(4, 24);
    int devices = 1;
    for (int size : mesh) devices *= size;
    const int count = static_cast<int>(random.number(1, devices));
    std::vector<int> processes(devices);
    for (int d = 0; d < devices; ++d)
      processes[d] = random.chance(2) ? static_cast<int>(random.number(0, count - 1)) : d % count;
    std::vector<int> batch_axes;
    for (int axis :
         random.permutation(static_cast<int>(mesh.size()), static_cast<int>(mesh.size())))
      if (random.chance(2)) batch_axes.push_back(axis);
    const BatchMapping m(mesh, processes, batch_axes);
    const auto size = random.number(0, 30);
    std::vector<std::set<std::int64_t>> of_coordinate(m.coordinates());
    std::set<std::int64_t> all;
    std::int64_t total = 0;
    std::map<int, std::set<std::int64_t>> read;
    for (int p : std::set<int>(processes.begin(), processes.end())) {
      const auto slices = m.slices(p, size);
      read[p] = positions(slices);
      std::int64_t slot = 0;
      for (const BatchSlice& s : slices) {
        EXPECT_EQ(s.slot, slot);
        slot += s.samples.size();
        std::set<std::int64_t> mine;
        for (auto i = s.samples.begin; i < s.samples.end; ++i) mine.insert(i);
        if (of_coordinate[s.coordinate].empty()) of_coordinate[s.coordinate] = mine;
        EXPECT_EQ(of_coordinate[s.coordinate], mine);
      }
    }
    for (const auto& samples : of_coordinate) {
      total += static_cast<std::int64_t>(samples.size());
      all.insert(samples.begin(), samples.end());
    }
    EXPECT_EQ(total, size);  // different coordinates are disjoint, and together all
    EXPECT_EQ(static_cast<std::int64_t>(all.size()), size);
    for (int d = 0; d < devices; ++d)  // a process reads what its devices need
      for (auto i : of_coordinate[m.coordinate(d)]) EXPECT_TRUE(read[processes[d]].contains(i));
    try {
      const auto shard = m.process_mesh_mapping();
      ++expressible;
      for (const auto& [a, sa] : shard)
        for (const auto& [b, sb] : shard) {
          EXPECT_EQ(sa == sb, held(m, a) == held(m, b));
          EXPECT_EQ(held(m, a).size(), held(m, b).size());
        }
    } catch (const InvalidArgument&) {
      bool fails = false;
      for (const auto& [a, ra] : read)
        for (const auto& [b, rb] : read) {
          const auto ha = held(m, a), hb = held(m, b);
          bool meets = false;
          for (int c : ha) meets |= std::ranges::find(hb, c) != hb.end();
          fails |= ha.size() != hb.size() || (meets && ha != hb);
        }
      EXPECT_TRUE(fails);
    }
  }
  EXPECT_GT(expressible, 400);
}

TEST(BatchMapping, RefusesWhatDoesNotFit) {
  EXPECT_THROW(BatchMapping({2, 2}, {0, 1, 2}, {0}), InvalidArgument);
  EXPECT_THROW(BatchMapping({2}, {0, -1}, {0}), InvalidArgument);
  EXPECT_THROW(BatchMapping({2}, {0, 1}, {1}), InvalidArgument);
  EXPECT_THROW(BatchMapping({2, 2}, {0, 1, 2, 3}, {1, 1}), InvalidArgument);
  EXPECT_THROW(BatchMapping({2}, {0, 1}, {0}).held_by(2), InvalidArgument);
}

}  // namespace
}  // namespace tessera

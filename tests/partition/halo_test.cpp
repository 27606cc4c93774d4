#include "tessera/partition/halo.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "generate.h"
#include "tessera/base/error.h"

namespace tessera {
namespace {

using testing::Generator;

Window any_window(Generator& random) {
  return {random.number(1, 7), random.number(1, 4), random.number(0, 6), random.number(1, 3)};
}

TEST(Window, InputsAreThoseThatTheDefinitionReads) {
  Generator random(51);
  for (int n = 0; n < 5000; ++n) {
    const Window w = any_window(random);
    const Interval outputs{random.number(0, 10), random.number(0, 14)};
    std::set<std::int64_t> read;
    for (auto o = outputs.begin; o < outputs.end; ++o)
      for (std::int64_t k = 0; k < w.kernel; ++k)
        read.insert(o * w.stride - w.padding + k * w.dilation);
    const Interval inputs = w.inputs(outputs);
    ASSERT_EQ(inputs.empty(), read.empty());
    if (!read.empty()) {
      ASSERT_EQ(inputs, (Interval{*read.begin(), *read.rbegin() + 1}));
    }

    std::set<std::int64_t> contributing;
    for (std::int64_t i = -40; i < 60; ++i)
      for (std::int64_t k = 0; k < w.kernel; ++k)
        if (outputs.contains(i * w.stride - w.padding + k * w.dilation)) contributing.insert(i);
    const Interval transposed = w.transposed_inputs(outputs);
    for (auto i : contributing) ASSERT_TRUE(transposed.contains(i));
    // The bounds are those of an undilated reach: tight when the dilation is 1 and the kernel
    // covers the stride.
    if (w.dilation == 1 && w.kernel >= w.stride && !outputs.empty()) {
      ASSERT_EQ(transposed, (Interval{*contributing.begin(), *contributing.rbegin() + 1}));
    }

    const auto extent = random.number(0, 30), after = random.number(0, 6);
    std::int64_t count = 0;
    while (count * w.stride - w.padding + (w.kernel - 1) * w.dilation < extent + after) ++count;
    ASSERT_EQ(w.outputs(extent, after), count);
  }
  EXPECT_THROW((Window{0}).check(), InvalidArgument);
  EXPECT_THROW((Window{1, 0}).check(), InvalidArgument);
}

// The index that stands at virtual index t, -1 for none.
std::int64_t at_edge(std::int64_t t, std::int64_t extent, Edge edge) {
  if (t >= 0 && t < extent) return t;
  switch (edge) {
    case Edge::zero:
      return -1;
    case Edge::replicate:
      return t < 0 ? 0 : extent - 1;
    case Edge::circular:
      while (t < 0) t += extent;
      return t % extent;
    case Edge::reflect:
      while (t < 0 || t >= extent) {
        if (extent == 1) return 0;
        t = t < 0 ? -t : 2 * (extent - 1) - t;
      }
      return t;
  }
  return -1;
}

TEST(Resolve, EveryIndexHasItsValueOnce) {
  Generator random(52);
  for (int n = 0; n < 5000; ++n)
    for (const Edge edge : {Edge::zero, Edge::circular, Edge::reflect, Edge::replicate}) {
      const auto extent = random.number(1, 9);
      const auto begin = random.number(-25, 20);
      const Interval needed{begin, begin + random.number(0, 30)};
      std::int64_t last = needed.begin;
      std::map<std::int64_t, std::int64_t> value;
      for (const Segment& s : resolve(needed, extent, edge)) {
        ASSERT_GE(s.target.begin, last);
        last = s.target.end;
        for (auto t = s.target.begin; t < s.target.end; ++t) {
          value[t] = s.source + (t - s.target.begin) * s.step;
          ASSERT_TRUE(s.sources().contains(value[t]));
        }
      }
      for (auto t = needed.begin; t < needed.end; ++t) {
        const auto wanted = at_edge(t, extent, edge);
        ASSERT_EQ(value.contains(t) ? value[t] : -1, wanted)
            << "virtual index " << t << " of " << extent;
      }
    }
  EXPECT_TRUE(resolve({-3, 3}, 0, Edge::circular).empty());
}

// Runs the plans of all positions on global indices as values, and compares what each assembles
// with the definition.
void check(const Sharding& input, const std::vector<Edge>& edges, const std::vector<Box>& needed) {
  const auto& shape = input.shape();
  std::vector<HaloPlan> plans;
  for (int p = 0; p < input.positions(); ++p)
    plans.push_back(halo_plan(input, edges, [&](int q) { return needed[q]; }, p));
  auto for_each_index = [](const Box& box, auto visit) {
    if (volume(box) == 0) return;
    std::vector<std::int64_t> index;
    for (const Interval& i : box) index.push_back(i.begin);
    for (;;) {
      visit(index);
      std::size_t d = index.size();
      while (d-- > 0) {
        if (++index[d] < box[d].end) break;
        index[d] = box[d].begin;
      }
      if (d == static_cast<std::size_t>(-1)) return;
    }
  };
  std::map<std::pair<int, int>, std::vector<std::pair<Box, Box>>> sent, received;
  for (int p = 0; p < input.positions(); ++p) {
    for (const HaloPiece& piece : plans[p].sends) {
      ASSERT_EQ(intersect(piece.source, input.box(p)), piece.source);
      sent[{input.rank(p), piece.rank}].push_back({piece.source, piece.target});
    }
    std::map<std::vector<std::int64_t>, std::vector<std::int64_t>> assembled;
    auto place = [&](const HaloPiece& piece) {
      for_each_index(piece.target, [&](const std::vector<std::int64_t>& t) {
        std::vector<std::int64_t> s(t.size());
        for (std::size_t d = 0; d < t.size(); ++d) {
          const auto j = t[d] - piece.target[d].begin;
          s[d] = piece.step[d] < 0 ? piece.source[d].end - 1 - j
                                   : piece.source[d].begin + j * piece.step[d];
          ASSERT_TRUE(piece.source[d].contains(s[d]));
        }
        ASSERT_TRUE(assembled.emplace(t, s).second) << "assembled twice";
      });
    };
    for (const HaloPiece& piece : plans[p].receives) {
      received[{piece.rank, input.rank(p)}].push_back({piece.source, piece.target});
      place(piece);
    }
    for (const HaloPiece& piece : plans[p].copies) {
      ASSERT_EQ(intersect(piece.source, input.box(p)), piece.source);
      place(piece);
    }
    std::size_t values = 0;
    for_each_index(needed[p], [&](const std::vector<std::int64_t>& t) {
      std::vector<std::int64_t> wanted(t.size());
      for (std::size_t d = 0; d < t.size(); ++d) {
        wanted[d] = shape[d] == 0 ? -1 : at_edge(t[d], shape[d], edges[d]);
        if (wanted[d] < 0) {
          EXPECT_FALSE(assembled.contains(t));
          return;
        }
      }
      ++values;
      ASSERT_TRUE(assembled.contains(t));
      EXPECT_EQ(assembled[t], wanted);
    });
    EXPECT_EQ(assembled.size(), values);
  }
  EXPECT_EQ(sent, received);
}

TEST(HaloPlan, EveryRankAssemblesWhatItsOutputsNeed) {
  Generator random(53);
  const Edge all[] = {Edge::zero, Edge::circular, Edge::reflect, Edge::replicate};
  for (int n = 0; n < 1500; ++n) {
    const auto mesh = random.mesh(3, 8);
    int positions = 1;
    for (int size : mesh) positions *= size;
    std::vector<std::int64_t> shape(random.number(1, 3)), out(shape.size());
    std::vector<Window> windows;
    std::vector<Edge> edges;
    for (std::size_t d = 0; d < shape.size(); ++d) {
      shape[d] = random.number(0, 8);
      windows.push_back(any_window(random));
      out[d] = windows[d].outputs(shape[d], random.number(0, 6));
      edges.push_back(all[random.number(0, 3)]);
    }
    const Sharding input =
        random.sharding(shape, mesh, random.permutation(positions, positions + 1));
    // Outputs are owned by any partition over the same axes.
    std::vector<DimSharding> dims = input.dims();
    for (std::size_t d = 0; d < dims.size(); ++d)
      if (!dims[d].axes.empty())
        dims[d].partition = random.partition_of(out[d], dims[d].partition.parts());
    const Sharding output(out, mesh, dims, input.ranks());
    std::vector<Box> needed;
    for (int p = 0; p < positions; ++p) {
      const Box owned = output.box(p);
      Box box;
      for (std::size_t d = 0; d < owned.size(); ++d)
        box.push_back(volume(owned) == 0 ? Interval{0, 0} : windows[d].inputs(owned[d]));
      needed.push_back(box);
    }
    check(input, edges, needed);
  }
}

TEST(HaloPlan, TheExampleOfTheHeader) {
  const Sharding rows({7}, {3}, {{{0}, Partition({3, 0, 4})}});
  const Window w{3, 1, 1, 1};
  const auto plan =
      halo_plan(rows, {Edge::zero}, [&](int p) { return Box{w.inputs(rows.box(p)[0])}; }, 0);
  EXPECT_EQ(plan.needed, (Box{{-1, 4}}));
  EXPECT_EQ(plan.receives, (std::vector<HaloPiece>{{2, {{3, 4}}, {{3, 4}}, {1}}}));
  EXPECT_EQ(plan.sends, (std::vector<HaloPiece>{{2, {{2, 3}}, {{2, 3}}, {1}}}));
}

}  // namespace
}  // namespace tessera

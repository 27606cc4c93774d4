// segment_reduce on rows and lengths that are sharded over the same ranks, beside one process.

#include <gtest/gtest.h>

#include <cmath>

#include "cut_rows.h"
#include "tessera/comm/group/trace.h"
#include "tessera/tensor/policy.h"

namespace tessera::test::segment_reduce_test {
namespace {

void expect_same(const std::string& what, const Values& got, const Values& expected) {
  for (std::size_t i = 0; i < got.size(); ++i)
    EXPECT_LT(difference(got[i], expected[i], 1e-3), 1e-11) << what << ", value " << i;
}

class Segments : public ::testing::TestWithParam<int> {};

// Rows of segments by operators by index, on one process: differentiable twice.
at::Tensor segments(const at::Tensor& data, const std::string& reduce, const at::Tensor& lengths,
                    const std::optional<at::Scalar>& initial) {
  const std::int64_t count = lengths.size(0);
  const at::Tensor of = at::arange(count).repeat_interleave(lengths);
  Shape per_row(static_cast<std::size_t>(data.dim()), 1), shape = data.sizes().vec();
  shape[0] = per_row[0] = count;
  const at::Tensor length = lengths.view(per_row).to(at::kDouble);
  const at::Scalar start = initial.value_or(0);
  const at::Tensor sum = at::full(shape, start, data.options()).index_add(0, of, data);
  if (reduce == "sum") return sum;
  if (reduce == "mean") return initial ? at::where(length > 0, sum / length, sum) : sum / length;
  per_row[0] = data.size(0);
  const bool most = reduce == "max";
  const at::Tensor extreme =
      at::full(shape, most ? -INFINITY : INFINITY, data.options())
          .scatter_reduce(0, of.view(per_row).expand_as(data), data, most ? "amax" : "amin", false);
  if (!initial) return extreme;
  return at::where(most ? extreme < start : extreme > start, at::full(shape, start, data.options()),
                   extreme);
}

// Segments are the ranks' own, or rows of one are on several ranks.
TEST_P(Segments, AreReducedBySegmentsOnAnyRanks) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"domain", ranks}});
    for (std::uint64_t n = 0; n < (process() ? 8 : 40); ++n) {
      Draw draw(n * 43 + static_cast<std::uint64_t>(ranks));
      const int count = draw.between(1, 9);  // libtorch refuses none
      const Sizes of_segments = draw.sizes(count, ranks);
      Sizes length, of_rows(static_cast<std::size_t>(ranks), 0);
      for (int i = 0; i < count; ++i) {
        length.push_back(draw.chance(30) ? 0 : draw.below(5));
        of_rows[static_cast<std::size_t>(Partition(of_segments).owner(i))] += length.back();
      }
      const std::int64_t rows = Partition(of_rows).extent();
      const bool aligned = draw.chance(40);
      if (!aligned) of_rows = draw.sizes(rows, ranks);
      const std::vector<std::string> all{"sum", "mean", "max", "min"};
      const std::string reduce = all[n % 4];
      std::optional<at::Scalar> initial;
      if (draw.chance(30)) initial = 0.25;
      Shape shape{rows};
      if (draw.chance(70)) shape.push_back(draw.between(1, 3));
      seed(n);
      const at::Tensor lengths = index_of(length);
      const at::Tensor x = (randn(shape, at::kDouble) * 4).round().div(4).requires_grad_(true);
      const at::Tensor xs = distribute_tensor(x.detach(), mesh, {Shard(0)}, {{0, of_rows}});
      xs.requires_grad_(true);
      const at::Tensor ls = distribute_tensor(lengths, mesh, {Shard(0)}, {{0, of_segments}});
      const std::string what = concat(reduce, ", case ", n, ": lengths ", tessera::list(length),
                                      ", rows ", tessera::list(of_rows));
      set_policies(manager, {.redistribution = Policy::error});
      const auto reduced = [&](const at::Tensor& data, const at::Tensor& by) {
        return at::segment_reduce(data, reduce, by, {}, {}, 0, false, initial);
      };
      const auto slopes = [](const at::Tensor& y, const at::Tensor& by) {
        const at::Tensor finite = y.nan_to_num(0, 0, 0).pow(3);
        const at::Tensor g = torch::autograd::grad({finite.sum()}, {by}, {}, true, true)[0];
        return Values{g, torch::autograd::grad({g.sin().sum()}, {by})[0]};
      };
      CommTraceScope trace(mesh.all());
      const at::Tensor ys = reduced(xs, ls);
      if (aligned) {
        std::int64_t bytes = 0;
        for (const CommSummary& call : trace->summary()) bytes += call.bytes;
        EXPECT_LE(bytes, 600) << trace->table();
      }
      EXPECT_EQ(spec(ys).sizes().at(0), of_segments) << what;
      expect_same(what, {at::nan_to_num(ys, 7)}, {at::nan_to_num(reduced(x, lengths), 7)});
      const Values got = slopes(ys, xs);
      expect_same(what, got, slopes(segments(x, reduce, lengths, initial), x));
      const at::Tensor first =
          torch::autograd::grad({reduced(x, lengths).nan_to_num(0, 0, 0).pow(3).sum()}, {x})[0];
      expect_same(what + ", libtorch's own", {got[0]}, {first});
      {
        const c10::InferenceMode inference;
        const at::Tensor in = distribute_tensor(x.detach(), mesh, {Shard(0)}, {{0, of_rows}});
        expect_same(what, {reduced(in, ls).nan_to_num(7)}, {reduced(x, lengths).nan_to_num(7)});
      }
      set_policies(manager, {.redistribution = Policy::allow});
      const auto product = [](const at::Tensor& data, const at::Tensor& by) {
        return at::segment_reduce(data, "prod", by);
      };
      expect_same(what, {product(xs.detach(), ls)}, {product(x.detach(), lengths)});
      if (::testing::Test::HasFailure()) return;
    }
    const at::Tensor x = distribute_tensor(at::ones({6}, at::kDouble), mesh, {Shard(0)});
    const auto refused = [&](const std::string& part, const Ids& length) {
      const at::Tensor by = distribute_tensor(index_of(length), mesh, {Shard(0)});
      const auto text = thrown<InvalidArgument>([&] { at::segment_reduce(x, "sum", by); });
      EXPECT_NE(text.find(part), std::string::npos) << text;
    };
    refused("segments of 7 rows in all", {3, 0, 4});
    refused("segment 1 has the length -2", {4, -2, 4});
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Segments, ::testing::Values(1, 2, 3, 4));

}  // namespace
}  // namespace tessera::test::segment_reduce_test

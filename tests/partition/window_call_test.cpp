#include "tessera/partition/internal/window_call.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "generate.h"

namespace tessera {
namespace {

using testing::Generator;

Window any_window(Generator& random) {
  return {random.number(1, 7), random.number(1, 4), random.number(0, 6), random.number(1, 3)};
}

// The inputs that output o reads; of a transposed window those that it is a sum over.
std::vector<std::int64_t> reads(const Window& w, std::int64_t o, bool transposed) {
  std::vector<std::int64_t> all;
  for (std::int64_t k = 0; k < w.kernel; ++k) {
    if (!transposed) {
      all.push_back(o * w.stride - w.padding + k * w.dilation);
    } else if (const auto n = o + w.padding - k * w.dilation;
               ((n % w.stride) + w.stride) % w.stride == 0) {
      all.push_back(n / w.stride);
    }
  }
  return all;
}

// The outputs of the array that a call computes are those of the same window on the array: the
// call's output j reads the call's inputs.
void check_call(const Window& w, const BoxCall& call, bool transposed) {
  Window of_call = w;
  of_call.padding = call.padding;
  const std::int64_t n = transposed ? (call.inputs.size() - 1) * w.stride - 2 * call.padding +
                                          (w.kernel - 1) * w.dilation + call.output_padding + 1
                                    : of_call.outputs(call.inputs.size(), call.padding);
  ASSERT_EQ(call.outputs.size(), n);
  ASSERT_GE(call.padding, 0);
  for (std::int64_t j = 0; j < n; ++j) {
    const auto in_call = reads(of_call, j, transposed),
               in_array = reads(w, call.outputs.begin + j, transposed);
    ASSERT_EQ(in_call.size(), in_array.size());
    for (std::size_t k = 0; k < in_call.size(); ++k)
      ASSERT_EQ(in_call[k] + call.inputs.begin, in_array[k]);
  }
}

class WindowCalls : public ::testing::TestWithParam<bool> {};

TEST_P(WindowCalls, ComputeWhatTheySay) {
  const bool transposed = GetParam();
  Generator random(61);
  int aligned = 0;
  for (int n = 0; n < 20000; ++n) {
    const Window w = any_window(random);
    const auto a = random.number(0, 12);
    const Interval box{a, a + random.number(1, 9)};
    const BoxCall forward = forward_call(w, box, transposed);
    check_call(w, forward, transposed);
    ASSERT_TRUE(forward.outputs.contains(box));
    if (!transposed) {
      ASSERT_EQ(forward.outputs, box);
    }
    for (auto o = box.begin; o < box.end; ++o)
      for (const auto i : reads(w, o, transposed)) ASSERT_TRUE(forward.inputs.contains(i));

    const BoxCall backward = backward_call(w, box, transposed);
    check_call(w, backward, transposed);
    ASSERT_EQ(backward.inputs, box);
    for (std::int64_t o = -40; o < 80; ++o) {
      const auto in = reads(w, o, transposed);
      if (std::ranges::any_of(in, [&](auto i) { return box.contains(i); })) {
        ASSERT_TRUE(backward.outputs.contains(o));
      }
    }

    const auto b = random.number(0, 12);
    const Interval outputs{b, b + random.number(1, 9)};
    if (const auto call = aligned_call(w, box, outputs, transposed)) {
      ++aligned;
      check_call(w, *call, transposed);
      ASSERT_EQ(call->outputs, outputs);
    }
    const auto extent = box.end + random.number(0, 3);
    const Interval inner = interior(w, box, outputs, extent, transposed);
    ASSERT_TRUE(outputs.contains(inner));
    for (auto o = inner.begin; o < inner.end; ++o)
      for (const auto i : reads(w, o, transposed))
        ASSERT_TRUE(box.contains(i) || i < 0 || i >= extent) << o << " reads " << i;
  }
  EXPECT_GT(aligned, 200);
}

TEST_P(WindowCalls, OutputsArePartitionedByTheCentresOfTheirWindows) {
  const bool transposed = GetParam();
  Generator random(62);
  for (int n = 0; n < 5000; ++n) {
    const Window w = any_window(random);
    const Partition in =
        random.partition_of(random.number(1, 12), static_cast<int>(random.number(1, 5)));
    const auto outputs = random.number(0, 15);
    const Partition out =
        transposed ? transposed_output_partition(in, w, outputs) : output_partition(in, w, outputs);
    ASSERT_EQ(out.extent(), outputs);
    ASSERT_EQ(out.parts(), in.parts());
    for (std::int64_t o = 0; o < outputs; ++o) {
      const auto half = (w.kernel - 1) * w.dilation / 2;
      std::int64_t centre = o * w.stride - w.padding + half;
      if (transposed) {
        centre = o + w.padding - half;
        centre = centre < 0 ? 0 : centre / w.stride;
      }
      ASSERT_EQ(out.owner(o), in.owner(std::clamp<std::int64_t>(centre, 0, in.extent() - 1)))
          << "output " << o;
    }
  }
  EXPECT_EQ(output_partition(Partition({3, 0, 4}), {3, 2, 1, 1}, 4), Partition({2, 0, 2}));
  EXPECT_EQ(output_partition(Partition({3, 0, 4}), {5, 1, 2, 1}, 7), Partition({3, 0, 4}));
  EXPECT_EQ(transposed_output_partition(Partition({3, 0, 4}), {2, 2, 0, 1}, 14),
            Partition({6, 0, 8}));
}

INSTANTIATE_TEST_SUITE_P(Transposed, WindowCalls, ::testing::Bool());

TEST(Resampled, OutputsBelongToTheShardThatHoldsTheirCentre) {
  EXPECT_EQ(resampled_partition(Partition({3, 0, 4}), 14), Partition({6, 0, 8}));
  EXPECT_EQ(resampled_partition(Partition({3, 0, 4}), 4), Partition({2, 0, 2}));
  Generator random(5);
  for (int n = 0; n < 2000; ++n) {
    std::vector<std::int64_t> sizes;
    for (int part = random.number(1, 5); part > 0; --part) sizes.push_back(random.number(0, 6));
    const Partition inputs(sizes);
    if (inputs.extent() == 0) continue;
    const std::int64_t outputs = random.number(0, 30);
    const Partition got = resampled_partition(inputs, outputs);
    ASSERT_EQ(got.extent(), outputs);
    ASSERT_EQ(got.parts(), inputs.parts());
    for (std::int64_t o = 0; o < outputs; ++o) {
      ASSERT_EQ(got.owner(o), inputs.owner((2 * o + 1) * inputs.extent() / (2 * outputs)))
          << o << " of " << outputs;
    }
  }
}

TEST(WindowCall, TheExampleOfTheHeader) {
  const Window w{3, 2, 1, 1};
  EXPECT_EQ(forward_call(w, {2, 4}, false), (BoxCall{{3, 8}, 0, {2, 4}}));
  EXPECT_EQ(backward_call(w, {3, 7}, false), (BoxCall{{3, 7}, 2, {1, 4}}));
}

}  // namespace
}  // namespace tessera

#pragma once
// All ways of a collective of the MPI backend: dtypes, even, uneven and empty sizes, blocking and
// started, in one message and in pieces, contiguous or not, on the world and on groups of other
// orders; and what a reduction gives, computed on one rank.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "mpi_support.h"

namespace tessera::test {

// Made and ended by main(): MPI has one life in a process.
extern std::unique_ptr<MpiWorld> world;

using c10d::ReduceOp;

const std::vector<at::ScalarType> kDtypes = {
    at::kFloat,         at::kDouble, at::kHalf,   at::kBFloat16, at::kComplexFloat,
    at::kComplexDouble, at::kChar,   at::kByte,   at::kShort,    at::kInt,
    at::kLong,          at::kUInt16, at::kUInt32, at::kUInt64,   at::kBool};

/// The reference reduction over ranks, in the widest type.
inline at::Tensor reduced(const std::vector<at::Tensor>& inputs, ReduceOp::RedOpType op,
                          at::ScalarType dtype) {
  const bool complex = c10::isComplexType(dtype);
  const auto wide = complex ? at::kComplexDouble : at::kDouble;
  at::Tensor result = inputs.front().to(wide);
  for (std::size_t r = 1; r < inputs.size(); ++r) {
    const at::Tensor x = inputs[r].to(wide);
    switch (op) {
      case ReduceOp::PRODUCT:
        result = result * x;
        break;
      case ReduceOp::MIN:
        result = at::minimum(result, x);
        break;
      case ReduceOp::MAX:
        result = at::maximum(result, x);
        break;
      default:
        result = result + x;
        break;
    }
  }
  if (op == ReduceOp::AVG) result = result / static_cast<double>(inputs.size());
  if (dtype == at::kBool) return result.ne(0);
  return c10::isIntegralType(dtype, false) ? result.to(at::kLong).to(dtype) : result.to(dtype);
}

inline void expect_same(const at::Tensor& got, const at::Tensor& expected,
                        const std::string& what) {
  ASSERT_EQ(got.scalar_type(), expected.scalar_type()) << what;
  ASSERT_EQ(got.sizes(), expected.sizes()) << what;
  const bool complex = got.is_complex();
  const auto wide = complex ? at::kComplexDouble : at::kDouble;
  EXPECT_TRUE(at::allclose(got.to(wide), expected.to(wide), 1e-6, 0, /*equal_nan=*/true))
      << what << "\n"
      << got << "\nexpected\n"
      << expected;
}

/// One way to make each call: which group, how long a message may be, blocking or started, memory
/// in order or not.
struct Way {
  BackendPtr backend;
  std::vector<int> ranks;
  bool blocking;
  bool scattered;
  std::string name;

  int rank() const { return backend->getRank(); }
  int size() const { return static_cast<int>(ranks.size()); }
  at::Tensor place(const at::Tensor& t) const {
    return scattered && t.numel() > 0 ? test::scattered(t) : t.clone();
  }
  template <class Options>
  Options options() const {
    Options o;
    o.asyncOp = !blocking;
    o.timeout = kLimit;
    return o;
  }
  /// A call of the transport, with rows for each rank.
  void hand(detail::Transport::Function make, const at::Tensor& output, const at::Tensor& input,
            std::vector<std::int64_t> rows, std::int64_t width, int root = -1) const {
    for (auto& n : rows) n *= width;
    test::hand(backend, make, blocking, output, input, rows, root)->wait();
  }
};

inline std::vector<Way> ways() {
  std::vector<int> all = all_ranks(*world), backwards = all;
  std::ranges::reverse(backwards);
  std::vector<Way> result;
  for (const bool reversed : {false, true}) {
    const auto& ranks = reversed ? backwards : all;
    const auto whole = backend(*world, ranks, "whole");
    const auto pieces = backend(*world, ranks, "pieces", 3);
    for (const bool in_pieces : {false, true})
      for (const bool blocking : {false, true})
        result.push_back({in_pieces ? pieces : whole, ranks, blocking, reversed != blocking,
                          std::string(in_pieces ? "pieces " : "whole ") +
                              (blocking ? "blocking" : "started") + (reversed ? " reversed" : "")});
  }
  return result;
}

/// Rows of each rank: even, uneven, some empty, all empty, one rank alone.
inline std::vector<std::vector<std::int64_t>> size_lists(int ranks) {
  std::vector<std::vector<std::int64_t>> lists(5);
  for (int r = 0; r < ranks; ++r) {
    lists[0].push_back(2);
    lists[1].push_back((r * 3 + 1) % 4 + 1);
    lists[2].push_back(r % 2 ? 0 : 3);
    lists[3].push_back(0);
    lists[4].push_back(r == ranks - 1 ? 5 : 0);
  }
  return lists;
}

inline std::int64_t sum(const std::vector<std::int64_t>& n) {
  return std::accumulate(n.begin(), n.end(), std::int64_t{0});
}

inline std::string label(const Way& way, at::ScalarType dtype, const std::string& more = {}) {
  return way.name + " " + c10::toString(dtype) + " " + more;
}

inline bool valid(at::ScalarType dtype, ReduceOp::RedOpType op) {
  const bool numbers = c10::isFloatingType(dtype) || c10::isComplexType(dtype);
  return op == ReduceOp::AVG ? numbers : op <= ReduceOp::PRODUCT || !c10::isComplexType(dtype);
}

const std::vector<ReduceOp::RedOpType> kOps = {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PRODUCT,
                                               ReduceOp::MIN, ReduceOp::MAX};

inline std::vector<at::Tensor> inputs_of(const Way& way, std::uint64_t seed, at::IntArrayRef shape,
                                         at::ScalarType dtype) {
  std::vector<at::Tensor> inputs;
  for (const int r : way.ranks) inputs.push_back(values(seed, r, shape, dtype));
  return inputs;
}

}  // namespace tessera::test

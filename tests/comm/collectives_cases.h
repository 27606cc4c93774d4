#pragma once
// Every collective of one group against a reference that each rank computes alone, from all ranks'
// inputs, which follow from seeds.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <numeric>
#include <string>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/comm/group/group.h"
#include "tessera/comm/group/types.h"

namespace tessera::testing_cases {

using torch::Tensor;

inline const std::vector<c10::ScalarType>& all_dtypes() {
  static const std::vector<c10::ScalarType> dtypes{
      torch::kFloat,        torch::kDouble,        torch::kHalf,        torch::kBFloat16,
      torch::kComplexFloat, torch::kComplexDouble, torch::kComplexHalf, torch::kByte,
      torch::kChar,         torch::kShort,         torch::kInt,         torch::kLong,
      torch::kBool};
  return dtypes;
}

// Small integers, so that sums and products over four ranks are exact in every dtype.
inline Tensor input_of(int rank, const std::vector<std::int64_t>& shape, c10::ScalarType dtype,
                       std::uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed * 1000 + static_cast<std::uint64_t>(rank));
  auto draw = [&](std::int64_t low, std::int64_t high) {
    return torch::randint(low, high, shape, generator, torch::kLong);
  };
  if (dtype == torch::kBool) return draw(0, 2).to(torch::kBool);
  if (dtype == torch::kByte) return draw(0, 4).to(torch::kByte);
  if (c10::isComplexType(dtype))
    return torch::complex(draw(-2, 3).to(torch::kDouble), draw(-2, 3).to(torch::kDouble)).to(dtype);
  return draw(-3, 4).to(dtype);
}

// The same values in memory that is not row-major.
inline Tensor strided(const Tensor& t) {
  auto shape = t.sizes().vec();
  shape.push_back(2);
  auto view = torch::zeros(shape, t.options()).select(-1, 1);
  view.copy_(t);
  return view;
}

inline Tensor wide(const Tensor& t) {
  if (t.scalar_type() == torch::kHalf || t.scalar_type() == torch::kBFloat16)
    return t.to(torch::kDouble);
  return t.scalar_type() == torch::kComplexHalf ? t.to(torch::kComplexDouble) : t;
}

inline bool defined_for(c10::ScalarType dtype, ReduceOp::Kind op) {
  using Kind = ReduceOp::Kind;
  if (dtype == torch::kBool) return op == Kind::min || op == Kind::max || op == Kind::product;
  if (c10::isComplexType(dtype)) return op != Kind::min && op != Kind::max;
  if (c10::isIntegralType(dtype, true)) return op != Kind::avg && op != Kind::premultiplied;
  return true;
}

inline ReduceOp op_of(ReduceOp::Kind kind, int rank) {
  return kind == ReduceOp::Kind::premultiplied ? ReduceOp::premultiplied(0.5 * (rank + 1))
                                               : ReduceOp{kind};
}

inline Tensor reference(const std::vector<Tensor>& inputs, ReduceOp::Kind kind) {
  const auto dtype = inputs.front().scalar_type();
  auto term = [&](std::size_t r) {
    return kind == ReduceOp::Kind::premultiplied
               ? wide(inputs[r]) * op_of(kind, static_cast<int>(r)).factor
               : wide(inputs[r]);
  };
  Tensor out = term(0).clone();
  for (std::size_t r = 1; r < inputs.size(); ++r) {
    switch (kind) {
      case ReduceOp::Kind::product:
        out = out * term(r);
        break;
      case ReduceOp::Kind::min:
        out = torch::minimum(out, term(r));
        break;
      case ReduceOp::Kind::max:
        out = torch::maximum(out, term(r));
        break;
      default:
        out = (out + term(r)).to(out.scalar_type());
    }
  }
  if (kind == ReduceOp::Kind::avg) out = out / static_cast<double>(inputs.size());
  return out.to(dtype);
}

inline void expect_equal(const Tensor& got, const Tensor& want, const std::string& what) {
  EXPECT_EQ(got.scalar_type(), want.scalar_type()) << what;
  const bool same = got.sizes() == want.sizes() &&
                    torch::equal(wide(got).resolve_conj(), wide(want).resolve_conj());
  EXPECT_TRUE(same) << what << "\ngot " << wide(got.contiguous()) << "\nwant " << wide(want);
}

struct Case {
  c10::ScalarType dtype = torch::kFloat;
  Sizes sizes;  // one number per rank; empty: 2 rows each, and calls without sizes
  bool strided = false;
  bool requests = false;
  std::uint64_t seed = 1;

  std::string text() const {
    return concat(c10::toString(dtype), strided ? " strided" : "", requests ? " requests" : "",
                  " sizes ", list(sizes));
  }
};

class Checker {
 public:
  Checker(Group group, Case c)
      : g_(std::move(group)), c_(std::move(c)), n_(g_.size()), me_(g_.rank()) {
    rows_ = c_.sizes.empty() ? Sizes(n_, 2) : c_.sizes;
    total_ = std::accumulate(rows_.begin(), rows_.end(), std::int64_t{0});
  }

  void all() {
    broadcast();
    all_reduce();
    all_gather();
    reduce_scatter();
    scan();
    all_to_all();
    gather_scatter();
    messages();
    g_.barrier();
  }

  void broadcast() {
    for (int root = 0; root < n_; ++root) {
      auto t = lay(input_of(me_, {3, 5}, c_.dtype, c_.seed));
      run([&] { return g_.started().broadcast(t, root); }, [&] { g_.broadcast(t, root); });
      expect_equal(t, input_of(root, {3, 5}, c_.dtype, c_.seed), at("broadcast"));
    }
  }

  void all_reduce() {
    const auto inputs = of_all_ranks({4, 3});
    for (const auto kind : kinds()) {
      const auto want = reference(inputs, kind);
      auto t = lay(inputs[me_]);
      run([&] { return g_.started().all_reduce(t, op_of(kind, me_)); },
          [&] { g_.all_reduce(t, op_of(kind, me_)); });
      expect_equal(t, want, at("all_reduce " + to_string(kind)));
      const int root = static_cast<int>(c_.seed % n_);
      auto u = lay(inputs[me_]);
      run([&] { return g_.started().reduce(u, root, op_of(kind, me_)); },
          [&] { g_.reduce(u, root, op_of(kind, me_)); });
      expect_equal(u, me_ == root ? want : inputs[me_], at("reduce " + to_string(kind)));
    }
  }

  void scan() {
    const auto inputs = of_all_ranks({2, 3});
    for (const auto kind : kinds()) {
      if (kind == ReduceOp::Kind::avg) continue;
      auto t = lay(inputs[me_]);
      run([&] { return start_inclusive_scan(g_, t, op_of(kind, me_)); },
          [&] { inclusive_scan(g_, t, op_of(kind, me_)); });
      expect_equal(t, reference({inputs.begin(), inputs.begin() + me_ + 1}, kind),
                   at("inclusive_scan " + to_string(kind)));
    }
  }

  void all_gather() {
    const auto parts = everybody_rows();
    auto out = lay(torch::zeros({total_, 3}, c_.dtype));
    const auto mine = lay(parts[me_]);
    run([&] { return g_.started().all_gather(out, mine, c_.sizes); },
        [&] { g_.all_gather(out, mine, c_.sizes); });
    expect_equal(out, torch::cat(parts), at("all_gather"));
    expect_equal(mine, parts[me_], at("all_gather leaves its input"));
  }

  void reduce_scatter() {
    const auto inputs = of_all_ranks({total_, 3});
    const auto begin = std::accumulate(rows_.begin(), rows_.begin() + me_, std::int64_t{0});
    for (const auto kind : kinds()) {
      auto out = lay(torch::zeros({rows_[me_], 3}, c_.dtype));
      const auto mine = lay(inputs[me_]);
      run([&] { return g_.started().reduce_scatter(out, mine, op_of(kind, me_), c_.sizes); },
          [&] { g_.reduce_scatter(out, mine, op_of(kind, me_), c_.sizes); });
      expect_equal(out, reference(inputs, kind).narrow(0, begin, rows_[me_]),
                   at("reduce_scatter " + to_string(kind)));
      expect_equal(mine, inputs[me_], at("reduce_scatter leaves its input"));
    }
  }

  // Rank a sends rows(a, b) = (rows_[a] + b) % 3 rows to b; without sizes two rows each.
  void all_to_all() {
    auto rows = [&](int a, int b) {
      return c_.sizes.empty() ? std::int64_t{2} : total_ == 0 ? 0 : (rows_[a] + b) % 3;
    };
    auto input = [&](int a) {
      std::int64_t sum = 0;
      for (int b = 0; b < n_; ++b) sum += rows(a, b);
      return input_of(a, {sum, 3}, c_.dtype, c_.seed);
    };
    Sizes out_sizes, in_sizes;
    std::vector<Tensor> want;
    for (int r = 0; r < n_; ++r) {
      out_sizes.push_back(rows(r, me_));
      in_sizes.push_back(rows(me_, r));
      std::int64_t begin = 0;
      for (int b = 0; b < me_; ++b) begin += rows(r, b);
      want.push_back(input(r).narrow(0, begin, rows(r, me_)));
    }
    const auto expected = torch::cat(want);
    auto out = lay(torch::zeros_like(expected));
    const auto mine = lay(input(me_));
    if (c_.sizes.empty()) out_sizes = in_sizes = {};
    run([&] { return g_.started().all_to_all(out, mine, out_sizes, in_sizes); },
        [&] { g_.all_to_all(out, mine, out_sizes, in_sizes); });
    expect_equal(out, expected, at("all_to_all"));
  }

  void gather_scatter() {
    const auto parts = everybody_rows();
    const auto whole = torch::cat(parts);
    for (int root = 0; root < n_; ++root) {
      Tensor out;
      if (me_ == root) out = lay(torch::zeros({total_, 3}, c_.dtype));
      const auto mine = lay(parts[me_]);
      run([&] { return g_.started().gather(out, mine, root, c_.sizes); },
          [&] { g_.gather(out, mine, root, c_.sizes); });
      if (me_ == root) expect_equal(out, whole, at("gather"));
      auto back = lay(torch::zeros({rows_[me_], 3}, c_.dtype));
      const auto source = me_ == root ? lay(whole) : Tensor();
      run([&] { return g_.started().scatter(back, source, root, c_.sizes); },
          [&] { g_.scatter(back, source, root, c_.sizes); });
      expect_equal(back, parts[me_], at("scatter"));
    }
  }

  // A ring of sends and receives; then a batch with messages to every rank, this one too, twice.
  void messages() {
    if (n_ > 1) {
      const int next = (me_ + 1) % n_, before = (me_ + n_ - 1) % n_;
      const auto mine = lay(input_of(me_, {2, 3}, c_.dtype, c_.seed));
      auto got = lay(torch::zeros({2, 3}, c_.dtype));
      if (c_.requests) {
        auto a = g_.started().send(mine, next), b = g_.started().receive(got, before);
        b.wait();
        a.wait();
      } else if (me_ == 0) {
        g_.send(mine, next);
        g_.receive(got, before);
      } else {
        g_.receive(got, before);
        g_.send(mine, next);
      }
      expect_equal(got, input_of(before, {2, 3}, c_.dtype, c_.seed), at("send, receive"));
    }
    std::vector<Message> batch;
    std::vector<Tensor> got;
    for (int round = 0; round < 2; ++round)
      for (int peer = 0; peer < n_; ++peer) {
        batch.push_back(
            {Message::Kind::send,
             lay(input_of(me_ * n_ + peer, {1 + round, rows_[me_]}, c_.dtype, c_.seed + round)),
             peer});
        got.push_back(lay(torch::zeros({1 + round, rows_[peer]}, c_.dtype)));
        batch.push_back({Message::Kind::receive, got.back(), peer});
      }
    run([&] { return g_.started().exchange(batch); }, [&] { g_.exchange(batch); });
    for (int round = 0; round < 2; ++round)
      for (int peer = 0; peer < n_; ++peer)
        expect_equal(got[round * n_ + peer],
                     input_of(peer * n_ + me_, {1 + round, rows_[peer]}, c_.dtype, c_.seed + round),
                     at("exchange"));
  }

 private:
  std::string at(const std::string& call) const {
    return call + " [" + c_.text() + "] rank " + std::to_string(me_) + " of " + std::to_string(n_);
  }
  Tensor lay(const Tensor& t) const {
    return c_.strided ? strided(t) : t.clone(at::MemoryFormat::Contiguous);
  }
  template <class Start, class Block>
  void run(Start start, Block block) {
    if (!c_.requests) return block();
    Request request = start();
    request.wait();
    EXPECT_TRUE(request.done());
  }
  std::vector<Tensor> of_all_ranks(const std::vector<std::int64_t>& shape) const {
    std::vector<Tensor> out;
    for (int r = 0; r < n_; ++r) out.push_back(input_of(r, shape, c_.dtype, c_.seed));
    return out;
  }
  std::vector<Tensor> everybody_rows() const {
    std::vector<Tensor> out;
    for (int r = 0; r < n_; ++r) out.push_back(input_of(r, {rows_[r], 3}, c_.dtype, c_.seed));
    return out;
  }
  std::vector<ReduceOp::Kind> kinds() const {
    using Kind = ReduceOp::Kind;
    std::vector<Kind> out;
    for (const auto kind :
         {Kind::sum, Kind::avg, Kind::product, Kind::min, Kind::max, Kind::premultiplied})
      if (defined_for(c_.dtype, kind)) out.push_back(kind);
    return out;
  }

  Group g_;
  Case c_;
  int n_, me_;
  Sizes rows_;
  std::int64_t total_ = 0;
};

// Even without sizes, even with sizes, uneven with a zero, all rows on one rank, nothing at all.
inline std::vector<Sizes> all_sizes(int ranks) {
  std::vector<Sizes> out{{}, Sizes(ranks, 3)};
  Sizes uneven, one(ranks, 0);
  for (int r = 0; r < ranks; ++r) uneven.push_back((2 * r + 3) % 4);
  one[ranks / 2] = 7;
  out.push_back(uneven);
  out.push_back(one);
  out.push_back(Sizes(ranks, 0));
  return out;
}

inline void check_everything(const Group& group, const std::vector<c10::ScalarType>& dtypes) {
  std::uint64_t seed = 1;
  for (const auto dtype : dtypes)
    for (const auto& sizes : all_sizes(group.size()))
      for (const bool lay : {false, true}) {
        ++seed;
        Checker(group, {dtype, sizes, lay, seed % 3 == 0, seed}).all();
        if (::testing::Test::HasFailure()) return;
      }
}

}  // namespace tessera::testing_cases

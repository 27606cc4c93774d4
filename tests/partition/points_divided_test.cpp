// Points divided by several ranks together, as threads, are divided as one process divides them.

#include "tessera/partition/internal/division.h"

#include <gtest/gtest.h>

#include <barrier>
#include <cmath>
#include <thread>

#include "generate.h"
#include "tessera/partition/partitioners.h"

namespace tessera {
namespace {

using testing::Generator;

// What threads that stand for ranks reduce; each is told the most numbers that it has sent.
class Together {
 public:
  explicit Together(int ranks) : said_(static_cast<std::size_t>(ranks)), meet_(ranks) {}
  detail::SharedSums of(std::size_t rank) {
    return {[this, rank](std::span<std::int64_t> n) { reduce(rank, n, std::plus<>()); },
            [this, rank](std::span<std::int64_t> n) {
              reduce(rank, n, [](auto a, auto b) { return std::max(a, b); });
            }};
  }
  std::size_t most_numbers() const { return most_; }

 private:
  template <class Op>
  void reduce(std::size_t rank, std::span<std::int64_t> numbers, const Op& op) {
    said_[rank].assign(numbers.begin(), numbers.end());
    if (rank == 0) most_ = std::max(most_, numbers.size());
    meet_.arrive_and_wait();
    for (std::size_t r = 0; r < said_.size(); ++r) {
      ASSERT_EQ(said_[r].size(), numbers.size());
      for (std::size_t i = 0; i < numbers.size(); ++i)
        numbers[i] = r == 0 ? said_[r][i] : op(numbers[i], said_[r][i]);
    }
    meet_.arrive_and_wait();
  }
  std::vector<std::vector<std::int64_t>> said_;
  std::barrier<> meet_;
  std::size_t most_ = 0;
};

using Divided = std::vector<int> (*)(const detail::PointsHere&, std::span<const std::int64_t>, int,
                                     const detail::SharedSums&);

struct Points {
  int dims, parts;
  bool weighted;
  std::vector<double> places, weights;

  explicit Points(Generator& random)
      : dims(static_cast<int>(random.number(1, 4))),
        parts(static_cast<int>(random.number(1, 9))),
        weighted(random.chance(2)) {
    // Few different places: most cuts go through points at one place.
    const std::int64_t n = random.number(0, 60), places_a_dim = random.chance(2) ? 2 : 1000;
    for (std::int64_t i = 0; i < n * dims; ++i)
      places.push_back(0.37 * static_cast<double>(random.number(-places_a_dim, places_a_dim)));
    for (std::int64_t i = 0; weighted && i < n; ++i)
      weights.push_back(
          random.chance(4) ? 0 : std::exp(0.1 * static_cast<double>(random.number(-80, 80))));
    if (weighted && n > 0) weights.front() = 1;
  }
  // Of all ranks, in order; the points of each are one behind the other.
  std::vector<int> divided(Generator& random, int ranks, Divided divide) const {
    const auto n = places.size() / static_cast<std::size_t>(dims);
    std::vector<std::size_t> ends(static_cast<std::size_t>(ranks), n);
    for (auto& end : ends)
      if (&end != &ends.back())
        end = static_cast<std::size_t>(random.number(0, static_cast<std::int64_t>(n)));
    std::ranges::sort(ends);
    Together together(ranks);
    std::vector<std::vector<int>> part(ends.size());
    std::vector<std::thread> threads;
    for (std::size_t r = 0; r < ends.size(); ++r)
      threads.emplace_back([&, r] {
        const std::size_t first = r == 0 ? 0 : ends[r - 1], count = ends[r] - first;
        const auto d = static_cast<std::size_t>(dims);
        const detail::PointsHere here{std::span(places).subspan(first * d, count * d), dims,
                                      weighted && n > 0 ? std::span(weights).subspan(first, count)
                                                        : std::span<const double>(),
                                      weighted, static_cast<std::int64_t>(first)};
        const auto over = together.of(r);
        part[r] = divide(here, detail::whole_costs(here, over), parts, over);
      });
    for (auto& thread : threads) thread.join();
    EXPECT_LE(together.most_numbers(), static_cast<std::size_t>(2 * dims * parts));
    std::vector<int> all;
    for (const auto& of : part) all.insert(all.end(), of.begin(), of.end());
    return all;
  }
};

TEST(DividedTogether, PointsGoWhereOneProcessPutsThem) {
  Generator random(23);
  for (int n = 0; n < 150; ++n) {
    const Points points(random);
    const int ranks = static_cast<int>(random.number(1, 5));
    EXPECT_EQ(points.divided(random, ranks, detail::bisected),
              bisect_points(points.places, points.dims, points.parts, points.weights))
        << "case " << n;
    EXPECT_EQ(points.divided(random, ranks, detail::along_curve),
              partition_along_curve(points.places, points.dims, points.parts, points.weights))
        << "case " << n;
  }
}

}  // namespace
}  // namespace tessera

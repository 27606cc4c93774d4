#pragma once
// Modules of sharded parameters beside the same one on one process, and the calls and bytes of each
// operation.

#include <map>
#include <string>

#include "support.h"
#include "tessera/comm/group/trace.h"

namespace tessera::test::sharded_parameters_test {

template <class Module>
Module prepared(Module m, std::uint64_t seed = 7) {
  m->to(at::kDouble);
  fill(*m, seed);
  return m;
}

inline void expect_alike(torch::nn::Module& got, torch::nn::Module& expected,
                         const std::string& where) {
  const auto a = got.named_parameters(), b = expected.named_parameters();
  for (const auto& item : b) {
    const at::Tensor p = a[item.key()];
    EXPECT_LT(difference(p, item.value()), 1e-11) << where << " " << item.key();
    ASSERT_EQ(p.grad().defined(), item.value().grad().defined()) << where << " " << item.key();
    if (!p.grad().defined()) continue;
    EXPECT_LT(difference(p.grad(), item.value().grad()), 1e-11)
        << where << " gradient of " << item.key();
    EXPECT_TRUE(spec(p.grad()) == spec(p)) << where << " " << item.key();
  }
}

struct Count {
  int calls = 0;
  std::int64_t bytes = 0;
};
inline std::map<std::string, Count> counts(const CommTrace& trace) {
  std::map<std::string, Count> all;
  for (const CommSummary& s : trace.summary()) {
    all[s.operation].calls += static_cast<int>(s.count);
    all[s.operation].bytes += s.bytes;
  }
  return all;
}

}  // namespace tessera::test::sharded_parameters_test

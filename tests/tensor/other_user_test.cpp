// Another library that uses the dispatch key of sharded tensors: they are refused, and say so. A
// program of its own, because kernels are the process'.

#include <torch/library.h>

#include "support.h"

namespace tessera::test::other_user_test {

TEST(Rule17Registration, RefusesASecondUserOfTheKey) {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse2,
                                __FILE__, __LINE__);
  library.impl("empty.memory_format",
               [](c10::SymIntArrayRef, std::optional<at::ScalarType>, std::optional<at::Layout>,
                  std::optional<at::Device>, std::optional<bool>,
                  std::optional<at::MemoryFormat>) -> at::Tensor {
                 throw std::runtime_error("not meant to be called");
               });
  on_threads(1, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 1}});
    for (int i = 0; i < 2; ++i) {
      try {
        distribute_tensor(at::ones({2}), mesh, {Shard(0)});
        ADD_FAILURE() << "two users of one key";
      } catch (const NotAvailable& e) {
        EXPECT_NE(std::string(e.what()).find("PrivateUse2"), std::string::npos) << e.what();
      }
    }
    EXPECT_EQ(at::ones({2}).sum().item<float>(), 2) << "plain tensors are as before";
  });
}

}  // namespace tessera::test::other_user_test

// What is asked of a part that was not built. Where MPI is, this is linked with the stub, whose
// definitions stand before those of the library.

#include <gtest/gtest.h>

#include <string>

#include "tessera/comm/backends/mpi/mpi.h"
#include "tessera/comm/backends/nccl/nccl.h"
#include "tessera/comm/job/manager.h"

namespace tessera {
namespace {

template <class Call>
void expect_refusal(const Call& call, const std::string& way_out) {
  try {
    call();
    ADD_FAILURE() << "it was there";
  } catch (const NotAvailable& error) {
    EXPECT_NE(std::string(error.what()).find(way_out), std::string::npos) << error.what();
  }
}

TEST(Absent, MpiSaysHowToGetIt) {
  EXPECT_FALSE(has_mpi());
  expect_refusal([] { MpiWorld::initialize(); }, "-DTESSERA_MPI=ON");
  expect_refusal([] { DistributedManager::initialize({.backend = "mpi"}); }, "libopenmpi-dev");
}

TEST(Absent, NcclSaysHowToGetIt) {
#ifdef TESSERA_HAS_NCCL
  GTEST_SKIP() << "this build has the NCCL part";
#else
  expect_refusal([] { nccl_version(); }, "-DTESSERA_NCCL=ON");
  EXPECT_NE(nccl_unavailable(), "");
  expect_refusal([] { DistributedManager::initialize({.device = c10::Device("cuda")}); },
                 "NCCL cannot run here");
#endif
}

}  // namespace
}  // namespace tessera

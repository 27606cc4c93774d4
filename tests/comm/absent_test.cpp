// Calls of a backend whose part of the library is not there.

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
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
#ifdef TESSERA_HAS_MPI
  if (!std::getenv("TESSERA_TEST_ALONE")) {
    EXPECT_TRUE(has_mpi());
    return;
  }
#endif
  EXPECT_FALSE(has_mpi());
  expect_refusal([] { MpiWorld::initialize(); }, "-DTESSERA_MPI=ON");
  expect_refusal([] { MpiWorld::of_communicator(0); }, "python -m tessera --build-mpi");
  expect_refusal([] { mpi_library(); }, "libtessera_mpi.so is not beside libtessera.so");
  expect_refusal([] { DistributedManager::initialize({.backend = "mpi"}); }, "libopenmpi-dev");
}

TEST(Absent, NcclFitsItsLibrariesOrSaysHowToGetIt) {
#ifdef TESSERA_HAS_NCCL
  // Built against the header of the NCCL in libtorch_cuda: needs no GPU.
  const auto part = nccl_part();
  EXPECT_TRUE(part.built);
  if (dlopen("libtorch_cuda.so", RTLD_LAZY) == nullptr) {
    EXPECT_NE(part.problem.find("Install what libtorch_cuda.so needs"), std::string::npos)
        << part.problem;
    GTEST_SKIP() << "libtorch_cuda.so does not load here: " << dlerror();
  }
  EXPECT_EQ(part.problem, "");
  if (part.problem.empty()) {
    EXPECT_NE(nccl_version(), "unknown");
  }
#else
  EXPECT_FALSE(nccl_part().built);
  expect_refusal([] { nccl_version(); }, "-DTESSERA_NCCL=ON");
  EXPECT_NE(nccl_unavailable(), "");
  expect_refusal([] { DistributedManager::initialize({.device = c10::Device("cuda")}); },
                 "NCCL cannot run here");
#endif
}

}  // namespace
}  // namespace tessera

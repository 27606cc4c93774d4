// Of the programs of this folder: ranks are threads, each on a device of its own. With --processes
// this process is one of the ranks that a launcher started: on the GPU if there is one, with NCCL,
// else on the stand-in device. Cases for other numbers of ranks do nothing then.

#include <gtest/gtest.h>

#include <cstdio>
#include <string_view>

#include "device.h"
#include "transport.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const bool processes = argc > 1 && std::string_view(argv[1]) == "--processes";
  if (!processes) {
    const int status = RUN_ALL_TESTS();
    tessera::test::stand_in::finish();
    return status;
  }
  return tessera::test::stand_in::as_process([] { return RUN_ALL_TESTS(); });
}

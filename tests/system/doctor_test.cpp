// `tessera doctor`, alone, under a launcher, and in an environment that is broken.

#include <gtest/gtest.h>

#include "process.h"

namespace tessera::test {
namespace {

TEST(Doctor, SaysWhatIsThere) {
  Process run({TESSERA_PROGRAM, "doctor"});
  EXPECT_EQ(run.finish(), 0) << run.err();
  for (const char* text :
       {"This machine", "cores", "locked memory", "/dev/shm", "free port", "This launch", "single",
        "libtorch", "libtorch_cpu.so", "Backends", "gloo", "mpi", "nccl", "threads"}) {
    EXPECT_NE(run.out().find(text), std::string::npos) << "no " << text << " in\n" << run.out();
  }
  EXPECT_EQ(run.out().find("Check"), std::string::npos);
}

TEST(Doctor, ChecksEveryBackendThatIsThere) {
  Process run({TESSERA_PROGRAM, "doctor", "--check"});
  EXPECT_EQ(run.finish(std::chrono::seconds(200)), 0) << run.out() << run.err();
  for (const char* backend : {"  gloo  ", "  threads  "})
    EXPECT_NE(run.out().find(backend, run.out().find("\nCheck\n")), std::string::npos) << run.out();
  EXPECT_EQ(run.out().find("FAILS"), std::string::npos) << run.out();
}

TEST(Doctor, ChecksTheLaunchItIsIn) {
  Process run({TESSERA_PROGRAM, "run", "-n", "2", "--timeout", "100", "--", TESSERA_PROGRAM,
               "doctor", "--check"});
  EXPECT_EQ(run.finish(std::chrono::seconds(150)), 0) << run.out() << run.err();
  EXPECT_NE(run.out().find("all-reduce on the 2 ranks of this launch: works"), std::string::npos)
      << run.out();
  EXPECT_NE(run.out().find("[0] "), std::string::npos);
  EXPECT_EQ(run.out().find("[1] "), std::string::npos) << "one rank speaks for all";
}

TEST(Doctor, ABrokenLaunchIsAProblemThatNamesItsVariables) {
  Process run({TESSERA_PROGRAM, "doctor", "--check"}, {{"RANK", "5"}});
  EXPECT_EQ(run.finish(), 1);
  EXPECT_NE(run.out().find("-> launcher plain: the environment is incomplete: not set are "
                           "[WORLD_SIZE], while set are [RANK='5']"),
            std::string::npos)
      << run.out();
  EXPECT_EQ(run.out().find("FAILS"), std::string::npos)
      << "nothing is tried with a launch that is not known";
}

TEST(Doctor, SeveralHostsWithoutAMeetingPointGetAdvice) {
  Process run({TESSERA_PROGRAM, "doctor"}, {{"OMPI_COMM_WORLD_RANK", "0"},
                                            {"OMPI_COMM_WORLD_SIZE", "4"},
                                            {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  EXPECT_EQ(run.finish(), 1);
  EXPECT_NE(run.out().find("mpirun -x MASTER_ADDR"), std::string::npos) << run.out();
}

TEST(Doctor, HelpAndMistakes) {
  Process help({TESSERA_PROGRAM, "doctor", "--help"});
  EXPECT_EQ(help.finish(), 0);
  EXPECT_NE(help.out().find("--check"), std::string::npos);
  Process mistake({TESSERA_PROGRAM, "doctor", "--chekc"});
  EXPECT_EQ(mistake.finish(), 2);
}

}  // namespace
}  // namespace tessera::test

// Our programs under mpirun and torchrun, as they are installed here.

#include <gtest/gtest.h>
#include <unistd.h>

#include "process.h"

namespace tessera::test {
namespace {

using Words = std::vector<std::string>;

std::string joined(const std::string& name, const std::string& value) {
  return name + std::string(20 - name.size(), ' ') + value;
}

#ifdef TESSERA_MPIRUN
Words mpirun(int ranks) {
  Words words{TESSERA_MPIRUN, "--oversubscribe", "-n", std::to_string(ranks)};
  if (geteuid() == 0) words.insert(words.begin() + 1, "--allow-run-as-root");
  return words;
}

TEST(OpenMpi, RanksKnowTheirPlaceAndOnePort) {
  Words words = mpirun(2);
  words.insert(words.end(), {"--tag-output", TESSERA_HELPER, "launch"});
  Process run(words);
  ASSERT_EQ(run.finish(), 0) << run.err();
  Words ports;
  for (int r = 0; r < 2; ++r) {
    Words lines;
    for (const auto& line : lines_of(run.out())) {
      const auto end = line.find(">:");
      if (end != std::string::npos &&
          line.substr(0, end).find("," + std::to_string(r) + "]") != std::string::npos)
        lines.push_back(line.substr(end + 2));
    }
    ASSERT_GE(lines.size(), 10u) << run.out();
    EXPECT_EQ(lines[0], joined("launcher", "open_mpi"));
    EXPECT_EQ(lines[1].rfind(joined("rank", std::to_string(r)), 0), 0u) << lines[1];
    EXPECT_EQ(lines[2].rfind(joined("world_size", "2"), 0), 0u) << lines[2];
    EXPECT_EQ(lines[3].rfind(joined("local_rank", std::to_string(r)), 0), 0u) << lines[3];
    EXPECT_EQ(lines[8].rfind(joined("address", "127.0.0.1"), 0), 0u) << lines[8];
    ports.push_back(lines[9]);
  }
  EXPECT_EQ(ports[0], ports[1]);
}

TEST(OpenMpi, OurLauncherInsideItStartsAWorldOfItsOwn) {
  Words words = mpirun(1);
  words.insert(words.end(), {TESSERA_PROGRAM, "run", "-n", "2", "--", TESSERA_HELPER,
                             "env=OMPI_COMM_WORLD_RANK", "launch"});
  Process run(words);
  ASSERT_EQ(run.finish(), 0) << run.err();
  EXPECT_TRUE(run.holds("[1] OMPI_COMM_WORLD_RANK unset"));
  EXPECT_TRUE(run.holds("[1] " + joined("launcher", "tessera"))) << run.out();
}
#endif

#ifdef TESSERA_TORCHRUN
TEST(Torchrun, RanksKnowTheirPlaceAndThatTheAgentServes) {
  Process run({TESSERA_TORCHRUN, "--no-python", "--standalone", "--nproc-per-node=2",
               TESSERA_HELPER, "@0:launch"});
  ASSERT_EQ(run.finish(std::chrono::seconds(120)), 0) << run.err();
  EXPECT_TRUE(run.holds(joined("launcher", "torchrun"))) << run.out();
  EXPECT_TRUE(run.holds(joined("world_size", "2  (WORLD_SIZE=2)"))) << run.out();
  EXPECT_TRUE(run.holds(joined("agent_serves_store", "yes"))) << run.out();
}
#endif

}  // namespace
}  // namespace tessera::test

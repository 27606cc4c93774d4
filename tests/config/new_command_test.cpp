// The program `tessera new`, run as a user runs it.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <filesystem>
#include <string>
#include <utility>

#include "../support/folder.h"
#include "tessera/base/text.h"

namespace tessera {
namespace {

using testing::contents;
using testing::Folder;

std::pair<int, std::string> make(const std::string& arguments) {
  FILE* pipe = popen(concat("timeout 60 ", TESSERA_CLI, " new ", arguments, " 2>&1").c_str(), "r");
  std::string out;
  char buffer[4096];
  for (std::size_t n; (n = fread(buffer, 1, sizeof buffer, pipe)) > 0;) out.append(buffer, n);
  const int status = pclose(pipe);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, out};
}

TEST(NewCommand, WritesTheFilesThatTheTestsTrainWith) {
  const Folder folder;
  const std::string skeleton = TESSERA_SKELETON;
  EXPECT_EQ(make(folder / "deep/net-1/").first, 0);
  EXPECT_EQ(make(concat("--python ", folder / "net_2")).first, 0);
  for (const std::string file : {"train.cpp", "run.yaml"})
    EXPECT_EQ(contents(folder / "deep/net-1/" + file), contents(skeleton + "/cmake/" + file));
  EXPECT_EQ(contents(folder / "net_2/train.py"), contents(skeleton + "/python/train.py"));
  EXPECT_NE(contents(folder / "deep/net-1/CMakeLists.txt").find("project(net-1 CXX)"),
            std::string::npos);
  EXPECT_TRUE(contents(folder / "deep/net-1/README.md").starts_with("# net-1\n"));
  EXPECT_TRUE(contents(folder / "net_2/README.md").starts_with("# net_2\n"));
}

TEST(NewCommand, WritesNothingWhereSomethingIsOrTheNameIsNone) {
  const Folder folder;
  std::filesystem::create_directory(folder / "there");
  const auto [status, out] = make(folder / "there");
  EXPECT_EQ(status, 2);
  EXPECT_NE(out.find("there is there already"), std::string::npos) << out;
  const auto [again, said] = make(folder / "1net");
  EXPECT_EQ(again, 2);
  EXPECT_NE(said.find("'1net' is no name of a project"), std::string::npos) << said;
  EXPECT_NE(make(concat("--python --cmake ", folder / "net")).first, 0);
  EXPECT_TRUE(std::filesystem::is_empty(folder / "there"));
  EXPECT_FALSE(std::filesystem::exists(folder / "net"));
}

}  // namespace
}  // namespace tessera

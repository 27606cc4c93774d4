// `tessera plan --data`, run as a user runs it.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tessera/base/text.h"

using tessera::concat;
using Json = nlohmann::json;

namespace {

const std::string kDocumented =
    "--mesh data=4,model=4 --data data --processes 0,0,1,1,2,2,3,3,0,0,1,1,2,2,3,3";

std::pair<int, std::string> plan(const std::string& arguments) {
  FILE* pipe = popen(concat("timeout 60 ", TESSERA_CLI, " plan ", arguments, " 2>&1").c_str(), "r");
  std::string out;
  char buffer[4096];
  for (std::size_t n; (n = fread(buffer, 1, sizeof buffer, pipe)) > 0;) out.append(buffer, n);
  const int status = pclose(pipe);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, out};
}

TEST(PlanData, TheDocumentedExample) {
  const auto [status, out] = plan(kDocumented + " --batch 8 --json -");
  ASSERT_EQ(status, 0) << out;
  const auto json = Json::parse(out);
  EXPECT_EQ(json["process_mesh_mapping"], Json({{"0", 0}, {"1", 0}, {"2", 1}, {"3", 1}}));
  EXPECT_EQ(json["processes"][0]["local_device_mapping"], Json({{"0", 0}, {"2", 1}}));
  EXPECT_EQ(json["processes"][3]["local_device_mapping"], Json({{"1", 0}, {"3", 1}}));
  EXPECT_EQ(json["processes"][1]["slices"][1],
            Json({{"coordinate", 2}, {"begin", 4}, {"end", 6}, {"slot", 2}}));
}

TEST(PlanData, AMeshWithoutTheTwoFunctionFormSaysWhy) {
  const std::string crossed = "--mesh a=3,b=4 --data a --processes 0,0,1,1,0,0,2,2,2,2,1,1";
  const auto [status, out] = plan(crossed + " --json -");
  ASSERT_EQ(status, 0) << out;
  const auto json = Json::parse(out);
  EXPECT_FALSE(json.contains("process_mesh_mapping"));
  EXPECT_NE(json["no_two_function_form"].get<std::string>().find("equal or disjoint"),
            std::string::npos);
  EXPECT_NE(plan(crossed).second.find("no two-function form"), std::string::npos);
  EXPECT_NE(plan(crossed).second.find(
                "process 1 reads [0, 2) of coordinate 0 at 0, [4, 6) of coordinate 2 at 2"),
            std::string::npos);
}

TEST(PlanData, PicturesShowEveryDeviceAndSlice) {
  const auto folder =
      std::filesystem::path(::testing::TempDir()) / concat("tessera_plan_data_", getpid());
  std::filesystem::create_directories(folder);
  for (const std::string name : {"who.svg", "who.html"}) {
    ASSERT_EQ(plan(concat(kDocumented, " --picture ", (folder / name).string())).first, 0);
    std::ifstream file(folder / name);
    std::ostringstream text;
    text << file.rdbuf();
    std::size_t cells = 0;
    for (auto at = text.str().find(" data-c="); at != std::string::npos;
         at = text.str().find(" data-c=", at + 1))
      ++cells;
    EXPECT_EQ(cells, 16u + 8u);  // devices, and two slices of each process
    EXPECT_EQ(text.str().find("http"), text.str().find("http://www.w3.org/2000/svg"))
        << "stands alone";
  }
  std::filesystem::remove_all(folder);
}

TEST(PlanData, WhatCannotBeIsRefused) {
  for (const std::string arguments :
       {"--mesh data=2,model=2 --data dat", "--mesh data=2,model=2 --data data,data",
        "--mesh data=2,model=2 --data data --processes 0,1,2",
        "--mesh data=2,model=2 --data data --batch 0", "--mesh data=2,model=2 --batch 4",
        "--mesh data=2,model=2 --data data --rankfile x",
        "--mesh data=2 --data data --picture x.png",
        "--mesh data=100,model=100 --data data --picture /tmp/never.svg"}) {
    const auto [status, out] = plan(arguments);
    EXPECT_NE(status, 0) << arguments;
    EXPECT_FALSE(out.empty());
  }
  EXPECT_EQ(plan("--mesh data=2,model=2 --data none --json -").first, 0);
  EXPECT_EQ(plan("--mesh data=500,model=200 --data data --json - > /dev/null").first, 0);
}

}  // namespace

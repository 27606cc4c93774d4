// The program `tessera report`, run as a user runs it.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "tessera/base/text.h"

namespace tessera {
namespace {

class ReportCommand : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    folder_ = concat(::testing::TempDir(), "tessera_report_", test->name(), "_", getpid());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  void write(const std::string& name, const std::string& text) const {
    const std::filesystem::path path = std::filesystem::path(folder_) / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  std::string read(const std::string& name) const {
    std::ifstream file(folder_ + "/" + name);
    std::ostringstream text;
    text << file.rdbuf();
    return std::move(text).str();
  }
  // What it prints, and its exit status behind that.
  std::string report(const std::string& arguments) const {
    const std::string command =
        concat("cd ", folder_, " && timeout 60 ", TESSERA_CLI, " report ", arguments, " 2>&1");
    // NOLINTNEXTLINE(bugprone-command-processor)
    FILE* pipe = popen(command.c_str(), "r");
    std::string out;
    char part[512];
    for (std::size_t n = 0; (n = fread(part, 1, sizeof part, pipe)) > 0;) out.append(part, n);
    return concat(out, "status ", WEXITSTATUS(pclose(pipe)));
  }
  // A log as csv_logger() writes it.
  static std::string csv(int steps, double scale) {
    TextStream out;
    out << "step,epoch,seconds,name,value\n";
    for (int i = 1; i <= steps; ++i) {
      out << i << ",0," << i * 0.5 << ",train/loss," << scale * std::exp(-i / 50.0) << "\n"
          << i << ",0," << i * 0.5 << ",throughput/samples," << 100 + i % 7 << "\n";
    }
    out << steps << ",0,9.5,val/loss,nan\n" << steps << ",0,9.5,\"odd, <name>\",4\n";
    return std::move(out).str();
  }

  std::string folder_;
};

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t n = 0;
  for (std::size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++n;
  return n;
}

TEST_F(ReportCommand, DrawsARunWithItsCheckpoints) {
  write("runs/7/metrics.csv", csv(3000, 2) + "3001,0,9.6,train/lo");
  write("runs/7/checkpoints/step-100/manifest.json", "{}");
  write("runs/7/checkpoints/step-100/0.safetensors", std::string(2048, 'x'));
  write("runs/7/checkpoints/step-200/0.safetensors", "cut short");
  EXPECT_EQ(report("runs/7"), "the report is in runs/7/report.html\nstatus 0");
  const std::string page = read("runs/7/report.html");
  for (const char* word : {"<h1>Run 7</h1>", "<h2>Loss</h2>", "<h2>Throughput</h2>", "step-100",
                           "2.002 KiB", "not complete", "odd, &lt;name&gt;",
                           "val/loss is not finite", "3000", "prefers-color-scheme"})
    EXPECT_NE(page.find(word), std::string::npos) << word;
  EXPECT_EQ(page.find("http://"), std::string::npos) << "it needs no network";
  EXPECT_EQ(page.find("nan"), std::string::npos);
  EXPECT_EQ(count(page, "<svg"), 3u) << "the losses together, the rate, and what is odd";
  EXPECT_EQ(count(page, "<svg"), count(page, "</svg>"));
  EXPECT_EQ(count(page, "throughput/samples"), 1u) << "a title, and no legend that repeats it";
  EXPECT_LT(page.size(), 200000u) << "long runs are thinned";
}

TEST_F(ReportCommand, DrawsALearningRateAsItWas) {
  TextStream log;
  log << "step,lr,norm\n";
  for (int step = 0; step < 100; ++step) log << step << ",1e-3,2\n";
  write("own.csv", std::move(log).str());
  EXPECT_EQ(report("own.csv"), "the report is in report.html\nstatus 0");
  const std::string page = read("report.html");
  EXPECT_EQ(count(page, "<polyline"), 3u) << "one line of the rate; the norm, and its mean";
}

TEST_F(ReportCommand, ComparesRunsFromAnyLog) {
  write("a/metrics.csv", csv(20, 2));
  write("b/metrics.jsonl",
        "{\"step\": 1, \"epoch\": 0, \"seconds\": 0.5, \"train/loss\": 0.75}\n"
        "no json\n{\"step\": 2, \"epoch\": 0, \"seconds\": 1, \"train/loss\": null}\n"
        "{\"step\": 3, \"seconds\": 1.5, \"train/loss\": 1e-3, \"note\": \"x\"}\n"
        "{\"step\": 4, \"tr");
  write("own.csv", "step,train/loss,lr\n1,0.5,1e-5\n2,0.25,1e-5\n");
  EXPECT_EQ(report("a b own.csv --out out/page.html"), "the report is in out/page.html\nstatus 0");
  const std::string page = read("out/page.html");
  EXPECT_EQ(count(page, "class=dot"), 3u);
  for (const char* word : {"<h1>Runs</h1>", "own.csv", "Learning rate", "first at step 2",
                           "<td>0.001</td>", "<td>0.25</td>"})
    EXPECT_NE(page.find(word), std::string::npos) << word;
  // A line in each run's colour, in the one chart of the loss that they share.
  const std::size_t loss = page.find("<h3>train/loss</h3>");
  ASSERT_NE(loss, std::string::npos);
  const std::string chart = page.substr(loss, page.find("</div>", loss) - loss);
  for (const char* name : {">a<", ">b<", ">own.csv<"}) EXPECT_EQ(count(chart, name), 1u) << name;
}

TEST_F(ReportCommand, SaysWhatIsNotThere) {
  EXPECT_EQ(report("nothing"), "tessera: nothing: there is no such file or folder\nstatus 2");
  write("empty/notes.txt", "x");
  EXPECT_NE(report("empty").find("no numbers in [empty]: a run's folder holds metrics.csv"),
            std::string::npos);
  write("broken/metrics.csv", "step,epoch,seconds,name,value\n1,0,0,\"a\n2,0\n");
  EXPECT_NE(report("broken").find("no numbers"), std::string::npos);
  EXPECT_NE(report("broken --watch 0").find("status 2"), std::string::npos);
}

TEST_F(ReportCommand, FollowsARun) {
  write("run/metrics.csv", csv(5, 2));
  // Until timeout(1) interrupts it: 124.
  const std::string command = concat("cd ", folder_, " && (timeout -s INT 2 ", TESSERA_CLI,
                                     " report run --watch 1 >/dev/null; echo $? >status) & wait");
  // NOLINTNEXTLINE(bugprone-command-processor)
  ASSERT_EQ(std::system(command.c_str()), 0);
  EXPECT_EQ(read("status"), "124\n");
  EXPECT_NE(read("run/report.html").find("http-equiv=refresh content=1"), std::string::npos);
}

}  // namespace
}  // namespace tessera

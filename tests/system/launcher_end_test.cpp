// `tessera run`: how runs end, and that nothing is left of them.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <functional>

#include "launcher_run.h"
#include "process.h"
#include "tessera/launch/detail/process_tree.h"

namespace tessera::test {
namespace {

// Within 30 s.
bool becomes_true(const std::function<bool()>& condition) {
  for (int i = 0; i < 3000; ++i) {
    if (condition()) return true;
    usleep(10000);
  }
  return false;
}

TEST(LauncherEnd, SuccessLeavesNothing) {
  Process run(command(3, {}, {"child", "daemon", "print=ready"}));
  EXPECT_EQ(run.finish(), 0) << run.err();
  EXPECT_TRUE(run.all_gone()) << "children and daemons end with their rank";
}

TEST(LauncherEnd, ARankMayEndEarlyAndTheOthersGoOn) {
  Process run(command(2, {}, {"@0:exit=0", "lines=1000", "print=done"}));
  EXPECT_EQ(run.finish(), 0);
  EXPECT_TRUE(run.holds("[1] done"));
}

TEST(LauncherEnd, AFailureEndsAllAndIsNamed) {
  for (int code : {1, 3, 255}) {
    // The others wait for ever, so that rank 1 is the first in any case.
    Process run(command(
        3, {}, {"daemon", "@1:error=the reason", "@1:exit=" + std::to_string(code), "pause"}));
    EXPECT_EQ(run.finish(), code);
    EXPECT_TRUE(run.holds("first failure: rank 1: exit code " + std::to_string(code))) << run.err();
    EXPECT_TRUE(run.holds("  | the reason")) << run.err();
    EXPECT_TRUE(run.all_gone());
  }
}

TEST(LauncherEnd, ASignalGivesItsNameAndStatus) {
  for (int number : {SIGKILL, SIGSEGV, SIGABRT, SIGTERM}) {
    Process run(command(2, {}, {"@0:kill=" + std::to_string(number), "pause"}));
    EXPECT_EQ(run.finish(), 128 + number);
    EXPECT_TRUE(run.holds("first failure: rank 0: signal " + std::to_string(number))) << run.err();
    EXPECT_TRUE(run.all_gone());
  }
}

TEST(LauncherEnd, LastLinesAreTheLast) {
  Process run(command(1, {}, {"lines=100", "exit=9"}));
  EXPECT_EQ(run.finish(), 9);
  EXPECT_TRUE(run.holds("last lines of rank 0 on its standard output:"));
  EXPECT_TRUE(run.holds("  | line 99\n"));
  EXPECT_FALSE(run.err().find("  | line 50\n") != std::string::npos);
}

TEST(LauncherEnd, RanksThatIgnoreSigtermAreKilledAfterTheGrace) {
  const Folder folder;
  const std::string meeting = (folder.path() / "meeting").string();
  ASSERT_EQ(mkfifo(meeting.c_str(), 0600), 0);
  Process run(command(2, {}, {"ignore=15", "meet=" + meeting, "@0:pause", "exit=5"}));
  EXPECT_EQ(run.finish(), 5);
  EXPECT_TRUE(run.holds("were killed")) << run.err();
  EXPECT_TRUE(run.all_gone());
}

TEST(LauncherEnd, LingerLetsTheOthersEndByThemselves) {
  const Folder folder;
  const std::string meeting = (folder.path() / "meeting").string();
  ASSERT_EQ(mkfifo(meeting.c_str(), 0600), 0);
  Process run(command(
      2, {"--linger", "90"},
      {"catch=15", "@0:exit=6", "print=ready", "meet=" + meeting, "print=ended by itself"}));
  ASSERT_TRUE(run.await({"rank 0 failed: exit code 6", "[1] ready"}));
  const int fd = open(meeting.c_str(), O_WRONLY);  // Rank 1 goes on once both ends are open.
  EXPECT_EQ(run.finish(), 6);
  close(fd);
  EXPECT_TRUE(run.holds("[1] ended by itself")) << run.out();
  EXPECT_FALSE(run.holds("caught 15"));
}

TEST(LauncherEnd, TimeLimitNamesWhoStillRuns) {
  Process run(command(3, {"--timeout", "3"},
                      {"daemon", "@1:exit=0", "error=working", "ignore=15", "pause"}));
  EXPECT_EQ(run.finish(), 124);
  EXPECT_TRUE(run.holds("time limit of 3 s")) << run.err();
  EXPECT_TRUE(run.holds("still running: ranks [0, 2]")) << run.err();
  EXPECT_TRUE(run.all_gone());
}

TEST(LauncherEnd, AStoppedRankDoesNotOutliveTheTimeLimit) {
  Process run(command(2, {"--timeout", "1"}, {"@0:kill=19", "@0:print=never", "exit=0"}));
  EXPECT_EQ(run.finish(), 124);
  EXPECT_TRUE(run.holds("still running: ranks [0]")) << run.err();
  EXPECT_TRUE(run.all_gone());
}

TEST(LauncherEnd, AProgramThatCannotBeStarted) {
  Process missing({TESSERA_PROGRAM, "run", "-n", "2", "--", "/no/such/program"});
  EXPECT_EQ(missing.finish(), 127);
  EXPECT_TRUE(missing.holds("cannot start '/no/such/program': No such file or directory"))
      << missing.err();
  Process folder({TESSERA_PROGRAM, "run", "-n", "2", "--", "/"});
  EXPECT_EQ(folder.finish(), 126);
  EXPECT_TRUE(folder.holds("cannot start '/'")) << folder.err();
  EXPECT_TRUE(missing.all_gone() && folder.all_gone());
}

TEST(LauncherSignals, AreForwardedToEveryRank) {
  for (int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
    Process run(command(3, {}, {"catch=" + std::to_string(number), "print=ready", "pause"}));
    ASSERT_TRUE(run.await({"[0] ready", "[1] ready", "[2] ready"}));
    run.signal(number);
    EXPECT_EQ(run.finish(), 40) << "the status is the ranks' own";
    for (const char* rank : {"[0] ", "[1] ", "[2] "})
      EXPECT_TRUE(run.holds(rank + ("caught " + std::to_string(number)))) << run.out();
    EXPECT_TRUE(run.all_gone());
  }
}

TEST(LauncherSignals, WithoutAHandlerTheStatusIsTheSignals) {
  for (int number : {SIGINT, SIGTERM}) {
    Process run(command(2, {}, {"print=ready", "pause"}));
    ASSERT_TRUE(run.await({"[0] ready", "[1] ready"}));
    run.signal(number);
    EXPECT_EQ(run.finish(), 128 + number);
    EXPECT_TRUE(run.all_gone());
  }
}

TEST(LauncherSignals, KillsAfterTheGrace) {
  Process run(command(2, {}, {"ignore=15", "daemon", "print=ready", "pause"}));
  ASSERT_TRUE(run.await({"[0] ready", "[1] ready"}));
  run.signal(SIGTERM);
  EXPECT_EQ(run.finish(), 128 + SIGTERM);
  EXPECT_TRUE(run.all_gone());
}

TEST(LauncherSignals, ASecondOneKillsAtOnce) {
  Process run(command(2, {"--grace", "90"}, {"note=2", "print=ready", "pause"}));
  ASSERT_TRUE(run.await({"[0] ready", "[1] ready"}));
  run.signal(SIGINT);
  ASSERT_TRUE(run.await({"[0] noted 2", "[1] noted 2"}));
  run.signal(SIGINT);
  EXPECT_EQ(run.finish(std::chrono::seconds(60)), 128 + SIGINT);
  EXPECT_TRUE(run.all_gone());
}

TEST(LauncherSignals, UserSignalsArePassedOnAndChangeNothing) {
  Process run(command(2, {}, {"note=10", "print=ready", "@0:pause", "pause"}));
  ASSERT_TRUE(run.await({"[0] ready", "[1] ready"}));
  run.signal(SIGUSR1);
  ASSERT_TRUE(run.await({"[0] noted 10", "[1] noted 10"}));
  run.signal(SIGTERM);
  EXPECT_EQ(run.finish(), 128 + SIGTERM);
}

TEST(LauncherDeath, KilledItLeavesNothing) {
  Process run(command(3, {}, {"ignore=15", "ignore=1", "child", "daemon", "print=ready", "pause"}));
  ASSERT_TRUE(run.await({"[0] ready", "[1] ready", "[2] ready"}));
  run.signal(SIGKILL);
  EXPECT_EQ(run.finish(), 128 + SIGKILL);
  EXPECT_TRUE(run.all_gone()) << "ranks, their children and daemons in sessions of their own";
}

TEST(LauncherDeath, KilledWhileStartingItLeavesNothing) {
  // The kill comes at any moment of the start: after 0, 1, 2, ... ranks have reported.
  for (int seen = 0; seen < 6; ++seen) {
    Process run(command(8, {}, {"daemon", "print=ready", "pause"}));
    if (seen > 0) {
      ASSERT_TRUE(run.await({"[" + std::to_string(seen - 1) + "] ready"}));
    }
    run.signal(SIGKILL);
    run.finish();
    EXPECT_TRUE(run.all_gone());
  }
}

TEST(LauncherDeath, ItsReaderGoesAway) {
  Process run(command(2, {}, {"daemon", "lines=1000", "print=ready", "lines=100000000"}));
  ASSERT_TRUE(run.await({"[0] ready"}));
  run.close_output();
  EXPECT_EQ(run.finish(), 141);
  EXPECT_TRUE(run.all_gone());
}

TEST(LauncherDeath, ANotReadingReaderDoesNotStopTheTimeLimit) {
  Process run(command(2, {"--timeout", "1"}, {"lines=100000000"}));
  // Nothing is read: the launcher ends its ranks, and waits for the reader with what it still has
  // to say.
  ASSERT_TRUE(becomes_true([&] { return !detail::children(run.pid()).empty(); }));
  ASSERT_TRUE(becomes_true([&] { return detail::children(run.pid()).empty(); }));
  EXPECT_EQ(run.finish(), 124);
  EXPECT_TRUE(run.all_gone());
}

TEST(LauncherDeath, ASupervisorThatIsKilledIsAFailedRank) {
  Process run(command(2, {}, {"daemon", "print=ready", "pause"}));
  ASSERT_TRUE(run.await({"[0] ready", "[1] ready"}));
  const pid_t victim = detail::children(run.pid()).at(0);
  kill(victim, SIGKILL);
  EXPECT_EQ(run.finish(), 128 + SIGKILL);
  EXPECT_TRUE(run.holds("its supervisor was killed")) << run.err();
  EXPECT_TRUE(run.all_gone());
}

}  // namespace
}  // namespace tessera::test

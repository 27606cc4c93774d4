// `tessera run`: how runs end, and that nothing is left of them.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <functional>

#include "../support/sanitized.h"
#include "launcher_run.h"
#include "process.h"
#include "tessera/base/text.h"
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
  for (int number : {SIGKILL, SIGABRT, SIGTERM, SIGSEGV}) {
    if (kSanitized && number == SIGSEGV) break;  // the sanitizer's exit code
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

TEST(LauncherEnd, ALimitOnTheSizeOfFilesIsAnErrorAndNoSignal) {
  const Folder folder;
  const std::string file = (folder.path() / "output").string();
  Process run(in_shell("ulimit -f 1; exec \"$@\" > " + file, command(1, {}, {"lines=1000"})));
  EXPECT_EQ(run.finish(), 125);
  EXPECT_TRUE(run.holds("bytes of output could not be written")) << run.err();
}

TEST(LauncherEnd, TheTimeMayEndWhileRanksAreStarted) {
  Process run(command(200, {"--timeout", "0.001"}, {"pause"}));
  EXPECT_EQ(run.finish(), 124);
  EXPECT_TRUE(run.holds("still running: ranks [0")) << run.err();
  EXPECT_TRUE(run.holds(" of 200 ranks had not been started")) << run.err();
  EXPECT_TRUE(run.all_gone());
}

TEST(LauncherEnd, ARankMayFailWhileOthersAreStarted) {
  // None of the first ones can start, which is known long before all would have been.
  Process run({TESSERA_PROGRAM, "run", "-n", "2000", "--grace", "0.2", "--", "/no/such/program"});
  EXPECT_EQ(run.finish(), 127);
  EXPECT_TRUE(run.holds(" of 2000 ranks had not been started")) << run.err();
  EXPECT_TRUE(run.all_gone());
}

TEST(LauncherEnd, RanksThatIgnoreSigtermAreKilledAfterTheGrace) {
  const Folder folder;
  const std::string meeting = (folder.path() / "meeting").string();
  ASSERT_EQ(mkfifo(meeting.c_str(), 0600), 0);
  Process run(command(2, {}, {"ignore=15", "meet=" + meeting, "@0:pause", "exit=5"}));
  EXPECT_EQ(run.finish(), 5);
  EXPECT_TRUE(run.holds("rank 0 did not end within 0.2 s and was killed")) << run.err();
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

TEST(LauncherEnd, LingerDoesNotReachBeyondTheTimeLimit) {
  Process run(command(2, {"--linger", "90", "--timeout", "3"}, {"@0:exit=6", "pause"}));
  EXPECT_EQ(run.finish(std::chrono::seconds(30)), 6);
  EXPECT_TRUE(run.holds("first failure: rank 0: exit code 6")) << run.err();
}

TEST(LauncherEnd, AStoppedDescendantDoesNotCostTheGrace) {
  Process left(command(2, {"--grace", "90"}, {"stopped", "exit=0"}));
  EXPECT_EQ(left.finish(std::chrono::seconds(30)), 0);
  EXPECT_TRUE(left.all_gone());
  Process stopped(command(2, {"--grace", "90"}, {"@0:kill=19", "@1:exit=5"}));
  EXPECT_EQ(stopped.finish(std::chrono::seconds(30)), 5) << "nor does a stopped rank";
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
  Process run(command(2, {"--timeout", "3"}, {"@0:kill=19", "@0:print=never", "exit=0"}));
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
    // Long enough for a rank that the machine keeps from its handler.
    Process run(
        command(3, {"--grace", "90"}, {"catch=" + std::to_string(number), "print=ready", "pause"}));
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

TEST(LauncherSignals, IgnoredOnesStayIgnored) {
  // As by nohup, and as in the background jobs of scripts.
  Process run(in_shell("trap '' HUP INT QUIT; exec \"$@\"",
                       command(2, {}, {"note=10", "print=ready", "@0:pause", "pause"})));
  ASSERT_TRUE(run.await({"[0] ready", "[1] ready"}));
  for (int number : {SIGHUP, SIGINT, SIGQUIT, SIGUSR1}) run.signal(number);
  ASSERT_TRUE(run.await({"[0] noted 10", "[1] noted 10"}));
  run.signal(SIGTERM);
  EXPECT_EQ(run.finish(), 128 + SIGTERM);
  for (int number : {SIGHUP, SIGINT, SIGQUIT})
    EXPECT_FALSE(run.holds(concat("got signal ", number, " ("))) << run.err();
}

TEST(LauncherSignals, AreNoticedWhileRanksAreStarted) {
  // The signal waits from before the start, so that the first rank is the only one.
  const std::string blocked = "env --block-signal=TERM ";
  Process possible({"sh", "-c", blocked + "true"});
  if (possible.finish() != 0) GTEST_SKIP() << "env cannot block signals: " << possible.err();
  const std::string script = blocked + "sh -c 'kill -TERM $$; exec \"$@\"' sh \"$@\"";
  Process run(in_shell(script, command(200, {}, {"exit=0"})));
  EXPECT_EQ(run.finish(), 128 + SIGTERM) << "a rank that ended well is no whole run";
  EXPECT_TRUE(run.holds("got signal 15")) << run.err();
  EXPECT_TRUE(run.holds("199 of 200 ranks had not been started")) << run.err();
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

TEST(LauncherDeath, AStalledReaderDoesNotStopTheTimeLimit) {
  Process run(command(2, {"--timeout", "1"}, {"lines=100000000"}));
  EXPECT_EQ(run.end_unread(std::chrono::seconds(20)), 124);
  EXPECT_TRUE(run.all_gone());
}

// Rank 0 writes more than is kept, rank 1 fails with 40 on SIGUSR1.
const Words kStandStill{"@0:ignore=10", "@1:catch=10", "@1:error=ready", "@1:pause",
                        "lines=100000000"};

TEST(LauncherDeath, AStalledReaderIsNotTakenForARankThatDoesNotEnd) {
  // What is behind the reader arrives when it reads again.
  Process run(command(2, {"--grace", "12"}, kStandStill));
  ASSERT_TRUE(run.await({"[1] ready"}));
  ASSERT_TRUE(becomes_true([&] { return run.unread() > 60000; }));
  run.signal(SIGUSR1);
  ASSERT_TRUE(becomes_true([&] { return detail::children(run.pid()).empty(); }));
  EXPECT_EQ(run.finish(), 40);
  EXPECT_FALSE(run.holds("does not end")) << run.err();
  EXPECT_TRUE(run.holds("first failure: rank 1: exit code 40")) << run.err();
}

TEST(LauncherDeath, AStalledReaderDoesNotStopTheEndAfterAFailure) {
  Process run(command(2, {}, kStandStill));
  ASSERT_TRUE(run.await({"[1] ready"}));
  ASSERT_TRUE(becomes_true([&] { return run.unread() > 60000; }));
  run.signal(SIGUSR1);
  EXPECT_EQ(run.end_unread(std::chrono::seconds(20)), 40);
  EXPECT_TRUE(run.all_gone());
}

TEST(LauncherDeath, AStalledReaderDoesNotStopASignal) {
  Process run(command(2, {}, {"error=ready", "lines=100000000"}));
  ASSERT_TRUE(run.await({"[0] ready", "[1] ready"}));
  run.signal(SIGTERM);
  EXPECT_EQ(run.end_unread(std::chrono::seconds(20)), 128 + SIGTERM);
  EXPECT_TRUE(run.all_gone());
}

TEST(LauncherDeath, AFullDiskLeavesTheRanksAlone) {
  Process run(in_shell("exec \"$@\" > /dev/full",
                       command(2, {}, {"lines=2000", "print=more", "error=went on"})));
  EXPECT_EQ(run.finish(), 125) << "what was not written is no success";
  EXPECT_TRUE(run.holds("[0] went on") && run.holds("[1] went on")) << run.err();
  EXPECT_TRUE(run.holds("bytes of output could not be written: No space left on device"))
      << run.err();
  EXPECT_FALSE(run.holds("reader")) << run.err();
}

TEST(LauncherDeath, AClosedOutputIsNobodysSocket) {
  Process run(in_shell("exec \"$@\" >&-", command(2, {}, {"lines=2000", "error=went on"})));
  EXPECT_EQ(run.finish(), 0);
  EXPECT_TRUE(run.holds("[0] went on") && run.holds("[1] went on")) << run.err();
}

// Without /proc nothing of what a rank leaves behind can be found by its parent. The namespace ends
// it after the test.
TEST(LauncherDeath, WithoutProcItEndsAllTheSame) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer reads its options from /proc";
  const std::string namespaces = "unshare -Urmpf --kill-child ";
  Process possible({"sh", "-c", namespaces + "mount -t tmpfs none /proc"});
  if (possible.finish() != 0) GTEST_SKIP() << "no namespaces here: " << possible.err();
  Process run(in_shell(namespaces + "sh -c 'mount -t tmpfs none /proc; \"$@\"; exit $?' sh \"$@\"",
                       command(2, {}, {"daemon", "child", "exit=0"})));
  EXPECT_EQ(run.finish(std::chrono::seconds(30)), 0) << run.err();
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

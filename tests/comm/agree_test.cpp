// Agreement: whatever one rank sees, all ranks learn, for every kind of error, on every rank, in
// every call, with ranks as threads and as processes.

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <typeinfo>
#include <utility>
#include <vector>

#include "fork_ranks.h"
#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/comm/group/trace.h"
#include "tessera/comm/job/manager.h"
#include "tessera/comm/job/threads.h"

namespace tessera::agree_test {
namespace {

using namespace std::chrono_literals;
using testing::fork_ranks;

struct NamedError : Error {
  using Error::Error;
};
struct NarrowerError : NamedError {
  using NamedError::NamedError;
};
struct UnnamedError : Error {
  using Error::Error;
};
struct WrongSize : InvalidArgument {
  using InvalidArgument::InvalidArgument;
};

/// An error that a rank's part of a call throws, and what every rank then gets.
struct Case {
  const char* name;
  std::function<void()> raise;
  const std::type_info* type;
  std::string text;
};

template <class E>
Case own(const char* name, const std::type_info& type = typeid(E),
         const std::string& text = "of\nits own: \x01") {
  return {name, [text] { throw E(text); }, &type, text};
}

std::vector<Case> cases() {
  return {
      own<InvalidArgument>("argument"),
      own<ConfigurationError>("configuration"),
      own<FileError>("file"),
      own<NotAvailable>("absent"),
      own<NamedError>("named"),
      own<NarrowerError>("derived from a named one", typeid(NamedError)),
      own<WrongSize>("derived", typeid(InvalidArgument)),
      own<UnnamedError>("unnamed", typeid(Error)),
      own<std::out_of_range>("of the standard library", typeid(Error)),
      own<InvalidArgument>("without text", typeid(InvalidArgument), ""),
      own<FileError>("long", typeid(FileError), std::string(100000, 'x')),
      {"no memory", [] { throw std::bad_alloc(); }, &typeid(Error), std::bad_alloc().what()},
      {"no exception", [] { throw 7; },  // NOLINT(bugprone-std-exception-baseclass)
       &typeid(Error), "something was thrown that is no std::exception"},
      {"of libtorch", [] { TORCH_CHECK(false, "of torch"); }, &typeid(Error), "of torch"},
      {"of libtorch, derived", [] { TORCH_CHECK_INDEX(false, "index"); }, &typeid(Error), "index"}};
}

/// One of the calls, of which this rank's part is `body`.
struct Call {
  const char* name;
  std::function<void(const Group&, const std::function<void()>& body)> run;
  bool only_first = false;
};

std::string text_of(int rank) { return std::string(static_cast<std::size_t>(rank * 3), '\0'); }
std::vector<double> list_of(int rank) {
  return std::vector<double>(static_cast<std::size_t>(rank), 0.5 + rank);
}

template <class T, class Value>
void all_of(const Group& group, const std::function<void()>& body, const Value& value) {
  const auto values = agree::all<T, NamedError>(group, "load", [&] {
    body();
    return value(group.rank());
  });
  std::vector<T> wanted;
  for (int r = 0; r < group.size(); ++r) wanted.push_back(value(r));
  EXPECT_EQ(values, wanted);
}

std::vector<Call> calls() {
  return {
      {"nothing",
       [](const Group& g, const auto& body) { agree::all<void, NamedError>(g, "load", body); }},
      {"numbers",
       [](const Group& g, const auto& body) {
         all_of<std::int64_t>(g, body, [](int r) { return std::int64_t{7} << r; });
       }},
      {"texts", [](const Group& g, const auto& body) { all_of<std::string>(g, body, text_of); }},
      {"lists",
       [](const Group& g, const auto& body) { all_of<std::vector<double>>(g, body, list_of); }},
      {"one text",
       [](const Group& g, const auto& body) {
         const auto text = agree::all_same<NamedError>(g, "load", [&] {
           body();
           return std::string("alike");
         });
         EXPECT_EQ(text, "alike");
       }},
      {"nothing of the first",
       [](const Group& g, const auto& body) { agree::first<void, NamedError>(g, "load", body); },
       true},
      {"the first's text",
       [](const Group& g, const auto& body) {
         const auto text = agree::first<std::string, NamedError>(g, "load", [&] {
           EXPECT_EQ(g.rank(), 0);
           body();
           return text_of(3);
         });
         EXPECT_EQ(text, text_of(3));
       },
       true},
  };
}

/// Every error on every rank, and on that one and those behind it, in every call.
void check_all(const Group& group) {
  for (const auto& call : calls()) {
    call.run(group, [] {});
    for (const auto& error : cases())
      for (int failing = 0; failing < (call.only_first ? 1 : group.size()); ++failing)
        for (const bool and_behind : {false, true}) {
          const std::string of = concat(call.name, ", ", error.name, ", rank ", failing);
          const bool fails = group.rank() == failing || (and_behind && group.rank() > failing);
          try {
            call.run(group, [&] {
              if (fails) error.raise();
            });
            ADD_FAILURE() << of << ": no error";
          } catch (const Error& caught) {
            const std::string blame =
                group.size() > 1 ? concat("rank ", group.ranks()[failing], ": ") : "";
            EXPECT_EQ(caught.what(), concat("load: ", blame, error.text)) << of;
            EXPECT_TRUE(typeid(caught) == *error.type) << of << ": " << typeid(caught).name();
          }
        }
  }
  // Without its name it is an Error.
  try {
    agree::all(group, "load", [] { throw NamedError("x"); });
    ADD_FAILURE() << "no error";
  } catch (const Error& caught) {
    EXPECT_TRUE(typeid(caught) == typeid(Error));
  }
}

void check_same(const Group& group) {
  const auto lines = [&](int differing) {
    return concat("a\nb ", group.rank() == differing ? 1 : 0, "\nc");
  };
  agree::same(group, "the plan", lines(-1));
  for (int differing = 0; group.size() > 1 && differing < group.size(); ++differing) {
    try {
      agree::same(group, "the plan", lines(differing));
      ADD_FAILURE() << "no error";
    } catch (const MismatchError& error) {
      const std::string what = error.what();
      EXPECT_NE(what.find("the plan"), std::string::npos) << what;
      EXPECT_NE(what.find("line 2"), std::string::npos) << what;
      EXPECT_NE(what.find("\"b 1\""), std::string::npos) << what;
    }
    EXPECT_THROW(agree::all_same(group, "load", [&] { return lines(differing); }), InvalidArgument);
  }
  EXPECT_EQ(agree::all_same(group, "load", [&] { return lines(-1); }), lines(-1));
  if (group.size() == 1) return;
  // The first has all lines of the others but their last.
  try {
    agree::same(group, "the plan", group.rank() == 0 ? "a\nb" : "a\nb\nc");
    ADD_FAILURE() << "no error";
  } catch (const MismatchError& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find("line 3: ranks [0] have nothing, rank 1 has \"c\""), std::string::npos)
        << what;
  }
}

class Agreement : public ::testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  static ManagerOptions options() {
    ManagerOptions options;
    options.backend = std::get<0>(GetParam());
    options.timeout = 60s;
    return options;
  }
  static int ranks() { return std::get<1>(GetParam()); }

  /// Ranks as processes. What `body` returns, "ok" unless a check failed.
  static std::vector<testing::RankEnd> processes(
      const std::function<std::string(const DistributedManager&)>& body,
      const std::vector<bool>& wait_for = {}) {
    return fork_ranks(
        ranks(),
        [&](const Launch& launch) -> std::string {
          at::set_num_threads(1);
          auto given = options();
          given.launch = launch;
          given.rendezvous_timeout = 30s;
          const std::string report = body(DistributedManager::initialize(given));
          return ::testing::Test::HasFailure() ? "failed: see above" : report;
        },
        60s, wait_for);
  }
};

TEST_P(Agreement, OfProcesses) {
  const auto ends = processes([](const DistributedManager& manager) -> std::string {
    check_all(manager.world());
    check_same(manager.world());
    return "ok";
  });
  for (const auto& end : ends) EXPECT_EQ(end.report, "ok") << end.exit_code << " " << end.signal;
}

/// The error that `call` ends with, and whose fault it is.
std::string end_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const PeerLostError& error) {
    return concat("lost ", list(error.ranks()));
  } catch (const TimeoutError& error) {
    return concat("late ", list(error.missing()));
  } catch (const std::exception& error) {
    return error.what();
  }
  return "none";
}

TEST_P(Agreement, WithARankThatEnds) {
  if (ranks() == 1) return;
  const int victim = ranks() - 1;
  for (const auto& call : calls()) {
    const auto ends = processes([&](const DistributedManager& manager) {
      const Group world = manager.world();
      // A rank may still be in the barrier when another has left it, and the world.
      return end_of([&] {
        world.barrier();
        if (world.rank() == victim) ::kill(::getpid(), SIGKILL);
        // The ranks behind the first need not wait for each other.
        for (;;) call.run(world, [] {});
      });
    });
    for (int r = 0; r < victim; ++r)
      EXPECT_EQ(ends[r].report, concat("lost [", victim, "]")) << call.name;
  }
}

TEST_P(Agreement, WithARankThatHangs) {
  if (ranks() == 1) return;
  const int victim = 0;
  std::vector<bool> others(static_cast<std::size_t>(ranks()), true);
  others[victim] = false;
  for (const auto& call : calls()) {
    // One of each way in which bytes travel.
    if (std::string("numbers texts the first's text").find(call.name) == std::string::npos)
      continue;
    const auto ends = processes(
        [&](const DistributedManager& manager) {
          Group world = manager.world();
          world.barrier();
          // Of what follows alone: the ranks may take long to make the group.
          world.set_timeout(1500ms);
          return end_of([&] {
            call.run(world, [&] {
              while (world.rank() == victim) ::pause();
            });
          });
        },
        others);
    // Who is told by another rank's limit gets a PeerLostError.
    for (int r = 1; r < ranks(); ++r)
      EXPECT_TRUE(ends[r].report == "late [0]" || ends[r].report == "lost [0]")
          << call.name << ": " << ends[r].report;
  }
}

TEST_P(Agreement, ACommErrorGoesOnAtOnce) {
  if (ranks() == 1) return;
  const auto ends = processes([](const DistributedManager& manager) -> std::string {
    const Group world = manager.world();
    const auto load = [&] {
      world.barrier();
      agree::all(world, "load", [&] {
        if (world.rank() == 1) throw TimeoutError("of another group", {5});
      });
    };
    // It leaves the scope of rank 1's manager, which tells the others.
    if (world.rank() == 1) load();
    return end_of(load);
  });
  EXPECT_EQ(ends[1].report, "uncaught: of another group");
  EXPECT_EQ(ends[0].report, "lost [1]");
}

TEST_P(Agreement, OfThreads) {
  run_threads(
      ranks(),
      [](DistributedManager& manager) {
        check_all(manager.world());
        check_same(manager.world());
        std::vector<int> backwards(manager.world().ranks().rbegin(),
                                   manager.world().ranks().rend());
        check_all(manager.group(backwards));
      },
      options());
}

TEST_P(Agreement, CostsWhatItSays) {
  if (ranks() == 1) return;
  run_threads(
      ranks(),
      [](DistributedManager& manager) {
        const Group world = manager.world();
        world.barrier();
        const auto cost = [&](const std::function<void()>& call) {
          const CommTraceScope trace(world);
          try {
            call();
          } catch (const InvalidArgument&) {
          }
          return trace->events().size();
        };
        const auto fail = [] { throw InvalidArgument("x"); };
        EXPECT_EQ(cost([&] { agree::all(world, "load", [] {}); }), 1U);
        EXPECT_EQ(cost([&] { agree::all<double>(world, "load", [] { return 1.5; }); }), 1U);
        EXPECT_EQ(cost([&] { agree::all<std::string>(world, "load", [] { return "xy"; }); }), 2U);
        EXPECT_EQ(cost([&] { agree::first(world, "load", [] {}); }), 2U);
        EXPECT_EQ(cost([&] { agree::same(world, "the plan", "xy"); }), 1U);
        EXPECT_EQ(cost([&] { agree::all(world, "load", fail); }), 3U);
        EXPECT_EQ(cost([&] { agree::first(world, "load", fail); }), 2U);
        EXPECT_EQ(cost([&] {
                    agree::all<std::string>(world, "load", [&]() -> std::string {
                      fail();
                      return "";
                    });
                  }),
                  2U);
      },
      options());
}

INSTANTIATE_TEST_SUITE_P(Backends, Agreement,
                         ::testing::Combine(::testing::Values("gloo", "shm"),
                                            ::testing::Values(1, 2, 3)),
                         [](const auto& info) {
                           return std::get<0>(info.param) + std::to_string(std::get<1>(info.param));
                         });

}  // namespace
}  // namespace tessera::agree_test

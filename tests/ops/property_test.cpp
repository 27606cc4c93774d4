// For every operator: inputs of drawn shapes, dtypes and memory orders in drawn placements on drawn
// meshes give the values, gradients and second derivatives of plain libtorch, or a refusal that all
// ranks agree on.
//
//   test_ops_property                                            ranks as threads: 1, 2, 3, 4, 8
//   test_ops_property --operator=softmax --ranks=3 --draw=5      one case, as a failure names it
//   test_ops_property --draws=100 --seed=7                       more, and others
//   test_ops_property --special                                  NaN, ties, `out=`, ... in all
//   test_ops_property --ordinary                                 in none, not in every second case
//   test_ops_property --hoard                                    aliases kept, calls compared
//   test_ops_property --device=7                                 on the stand-in device, its seed
//   tessera run -n 2 -- test_ops_property --processes --draws=1  every rank a process;
//     --backend=mpi under MPI's own launcher

#include <charconv>
#include <iostream>

#include "property.h"
#include "transport.h"

namespace tessera::test {

namespace {

struct Options {
  std::uint64_t seed = 1;
#ifdef __SANITIZE_ADDRESS__
  int draws = 2;
#else
  int draws = 5;
#endif
  int draw = -1;                        // this one alone
  int ranks = 0;                        // these alone
  bool processes = false;               // every rank is one
  bool special = false;                 // every case may be about what is hard
  bool ordinary = false;                // none is
  bool hoard = false;                   // ranks keep aliases, and every call is compared
  std::optional<std::uint64_t> device;  // every rank on one that stands in, by this seed
  std::string only, backend;
};
Options options;

Hard hard(int draw) {
  if (options.ordinary) return Hard::nothing;
  return options.special || draw % 2 == 1 ? Hard::things : Hard::nothing;
}

struct Count {
  int equal = 0, refused = 0, both_throw = 0, second = 0;
  std::string refusal;
};

class Report {
 public:
  void add(const OperatorCase& one, int ranks, int draw, const Outcome& o) {
    Count& c = counts_[one.name];
    const auto where =
        concat("\n  --operator='", one.name, "' --ranks=", ranks, " --draw=", draw,
               " --seed=", options.seed, options.special ? " --special" : "",
               options.ordinary ? " --ordinary" : "", options.hoard ? " --hoard" : "", ": ");
    switch (o.kind) {
      case Outcome::Kind::equal:
        ++c.equal;
        c.second += o.second;
        break;
      case Outcome::Kind::refused:
        if (c.refused++ == 0) c.refusal = o.text;
        if (one.must && !o.allowed && failed_[one.name]++ < 2)
          wrong_ += where + "refused: " + o.text;
        break;
      case Outcome::Kind::both_throw:
        ++c.both_throw;
        break;
      case Outcome::Kind::failed:
        if (failed_[one.name]++ < 2) wrong_ += where + o.text;
        break;
    }
  }

  void print(int ranks) const {
    Count all;
    int operators = 0;
    for (const auto& [name, c] : counts_) {
      ++operators;
      all.equal += c.equal, all.refused += c.refused, all.both_throw += c.both_throw,
          all.second += c.second;
    }
    int failed = 0;
    for (const auto& [name, n] : failed_) failed += n;
    std::cout << concat("seed ", options.seed, ", ", ranks, " ranks: ", operators, " operators, ",
                        all.equal + all.refused + all.both_throw, " cases: ", all.equal, " equal (",
                        all.second, " with second derivatives), ", all.refused, " refused, ",
                        all.both_throw, " that plain libtorch throws for too, ", failed,
                        " wrong\n");
    for (const auto& [name, c] : counts_) {
      if (c.refused)
        std::cout << concat("  ", name, ": ", c.equal, " equal, ", c.refused, " refused, e.g. ",
                            c.refusal.substr(0, 160), "\n");
    }
    if (!failed_.empty()) {
      std::cout << "  wrong:";
      for (const auto& [name, n] : failed_) std::cout << concat(" '", name, "' ", n);
      std::cout << "\n";
    }
  }
  const std::string& wrong() const { return wrong_; }

 private:
  std::map<std::string, Count> counts_;
  std::map<std::string, int> failed_;
  std::string wrong_;
};

struct Task {
  const OperatorCase* one;
  int draw;
};

std::vector<Task> tasks(int draws) {
  std::vector<Task> all;
  for (const OperatorCase& one : operator_cases()) {
    if (!options.only.empty() && one.name != options.only) continue;
    for (int i = 0; i < draws; ++i) {
      if (options.draw < 0 || i == options.draw) all.push_back({&one, i});
    }
    if (options.draw >= draws) all.push_back({&one, options.draw});
  }
  return all;
}

void prepare(DistributedManager& manager) {
  at::set_num_threads(1);
  if (options.hoard) manager.set_check_level(CheckLevel::collective);  // else as users run it
  set_policies(manager, {.redistribution = Policy::allow});
}

// On the device of the rank, if one is to stand in.
void on_chosen(int ranks, const std::function<void(DistributedManager&)>& body) {
  if (options.device)
    stand_in::on_devices(ranks, body);
  else
    run_threads(ranks, body, {.timeout = std::chrono::seconds(60)});
}

class Operators : public ::testing::TestWithParam<int> {};

TEST_P(Operators, GiveWhatOneProcessGives) {
  const int ranks = GetParam();
  if (options.ranks && options.ranks != ranks)
    GTEST_SKIP() << "not for " << options.ranks << " ranks";
  if (options.device && ranks > stand_in::kDevices) GTEST_SKIP() << "there are four devices";
  // More ranks than processors: fewer draws of each operator.
  const auto all = tasks(ranks > 4 ? (options.draws + 1) / 2 : options.draws);
  ASSERT_FALSE(all.empty()) << "no operator is called '" << options.only << "'";
  Report report;
  for (std::size_t next = 0; next < all.size();) {
    std::vector<Outcome> outcomes;
    try {
      on_chosen(ranks, [&](DistributedManager& manager) {
        prepare(manager);
        for (std::size_t i = next; i < all.size(); ++i) {
          Outcome o =
              run_case(*all[i].one, case_number(options.seed, all[i].one->name, ranks, all[i].draw),
                       manager, hard(all[i].draw), options.hoard);
          if (manager.rank() == 0) outcomes.push_back(std::move(o));
        }
      });
    } catch (const std::exception& e) {
      // The groups of that run are gone: this case is wrong, the others go on in a new run.
      outcomes.push_back({Outcome::Kind::failed, concat("the ranks did not stay together: ",
                                                        std::string(e.what()).substr(0, 900))});
    }
    for (const Outcome& o : outcomes) {
      report.add(*all[next].one, ranks, all[next].draw, o);
      ++next;
    }
  }
  report.print(ranks);
  EXPECT_EQ(report.wrong(), "");
  EXPECT_EQ(stand_in::take_faults(), "");
}

// Eight ranks: meshes of three axes, of which each has two.
INSTANTIATE_TEST_SUITE_P(Ranks, Operators, ::testing::Values(1, 2, 3, 4, 8));

// Every rank a process.
int run_processes() {
  ManagerOptions given;
  given.backend = options.backend;
  given.timeout = std::chrono::seconds(60);
  auto manager = DistributedManager::initialize(given);
  prepare(manager);
  Report report;
  for (const Task& task : tasks(options.draws)) {
    const int ranks = manager.world_size();
    report.add(*task.one, ranks, task.draw,
               run_case(*task.one, case_number(options.seed, task.one->name, ranks, task.draw),
                        manager, hard(task.draw), options.hoard));
  }
  if (manager.rank() == 0) {
    report.print(manager.world_size());
    std::cout << report.wrong() << std::endl;
  }
  manager.shutdown();
  return report.wrong().empty() ? 0 : 1;
}

bool take(const std::string& argument, const std::string& name, std::string& value) {
  if (!argument.starts_with("--" + name + "=")) return false;
  value = argument.substr(name.size() + 3);
  return true;
}

template <class Number>
Number number(const std::string& text) {
  Number n{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
  if (error != std::errc() || end != text.data() + text.size())
    throw InvalidArgument("'", text, "' is not a number");
  return n;
}

int run(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    std::string value;
    if (take(argument, "seed", value)) {
      options.seed = number<std::uint64_t>(value);
    } else if (take(argument, "draws", value)) {
      options.draws = number<int>(value);
    } else if (take(argument, "draw", value)) {
      options.draw = number<int>(value);
    } else if (argument == "--processes") {
      options.processes = true;
    } else if (argument == "--special") {
      options.special = true;
    } else if (argument == "--ordinary") {
      options.ordinary = true;
    } else if (argument == "--hoard") {
      options.hoard = true;
    } else if (take(argument, "device", value)) {
      options.device = number<std::uint64_t>(value);
      stand_in::reseed(*options.device);
    } else if (take(argument, "ranks", value)) {
      options.ranks = number<int>(value);
    } else if (!take(argument, "operator", options.only) &&
               !take(argument, "backend", options.backend)) {
      std::cerr << concat("unknown argument '", argument, "'\n");
      return 2;
    }
  }
  at::set_num_threads(1);
  if (options.processes) return run_processes();
  return RUN_ALL_TESTS();
}

}  // namespace

}  // namespace tessera::test

int main(int argc, char** argv) { return tessera::test::run(argc, argv); }

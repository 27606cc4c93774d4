// What an operator costs on a sharded tensor above the same operator on a plain one, beside what
// Python's DTensor costs above Python's plain one. No communication: meshes of one rank, dim 0
// sharded. With --device cuda on a GPU, where what the host takes is what counts. DTensor runs in a
// child process (dtensor.py), in turn with ours, sample by sample.

#include <malloc.h>
#include <signal.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "device.h"
#include "harness.h"
#include "tessera/comm/job/device_mesh.h"
#include "tessera/comm/job/threads.h"
#include "tessera/tensor/shard_tensor.h"

#if __has_include(<valgrind/callgrind.h>)
#include <valgrind/callgrind.h>
#else
#define CALLGRIND_START_INSTRUMENTATION
#define CALLGRIND_STOP_INSTRUMENTATION
#define CALLGRIND_ZERO_STATS
#define CALLGRIND_DUMP_STATS_AT(name)
#endif

namespace {

using tessera::bench::Record;
using Clock = std::chrono::steady_clock;

double microseconds(const std::function<void()>& f, int n, c10::Device device) {
  tessera::bench::settle(device);
  const auto start = Clock::now();
  for (int i = 0; i < n; ++i) f();
  tessera::bench::settle(device);
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count() / n;
}

// dtensor.py: a line "case calls" is answered by "plain dtensor", in microseconds.
class Child {
 public:
  Child(const std::string& python, const std::string& script) {
    int to[2], from[2];
    if (pipe(to) != 0 || pipe(from) != 0) throw std::runtime_error("no pipe for the child process");
    child_ = fork();
    if (child_ == 0) {
      dup2(to[0], 0);
      dup2(from[1], 1);
      for (const int fd : {to[0], to[1], from[0], from[1]}) close(fd);
      execlp(python.c_str(), python.c_str(), script.c_str(), static_cast<char*>(nullptr));
      _exit(127);
    }
    close(to[0]);
    close(from[1]);
    to_ = fdopen(to[1], "w");
    from_ = fdopen(from[0], "r");
    char version[64] = "";
    if (!std::fgets(version, sizeof version, from_))
      throw std::runtime_error("the child process with DTensor did not start: " + python + " " +
                               script);
    version_ = version;
    while (!version_.empty() && version_.back() == '\n') version_.pop_back();
  }
  ~Child() {
    std::fclose(to_);
    std::fclose(from_);
    waitpid(child_, nullptr, 0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  const std::string& version() const { return version_; }
  std::pair<double, double> measure(const std::string& name, int calls) {
    std::fprintf(to_, "%s\t%d\n", name.c_str(), calls);
    std::fflush(to_);
    double plain = 0, dtensor = 0;
    if (std::fscanf(from_, "%lf %lf", &plain, &dtensor) != 2)
      throw std::runtime_error("DTensor in the child process failed at " + name);
    return {plain, dtensor};
  }

 private:
  pid_t child_ = -1;
  std::FILE *to_ = nullptr, *from_ = nullptr;
  std::string version_;
};

struct Case {
  std::string name;
  double limit;  // of sharded - plain, microseconds
  int calls, python_calls;
  std::function<void()> plain, sharded;
  std::function<void()> prepare = {};  // before each sample
};

at::Tensor sharded(const at::Tensor& t, const tessera::DeviceMesh& mesh) {
  std::vector<tessera::Placement> placements(mesh.mesh().dims());
  placements[0] = tessera::Shard(0);
  return tessera::distribute_tensor(t, mesh, placements);
}

std::shared_ptr<torch::optim::Adam> adam(const std::function<at::Tensor(const at::Tensor&)>& place,
                                         const at::TensorOptions& here) {
  std::vector<at::Tensor> parameters;
  for (int i = 0; i < 200; ++i) {
    at::Tensor p = place(torch::randn({16, 16}, here)).detach().requires_grad_(true);
    p.mutable_grad() = place(torch::randn({16, 16}, here)).detach();
    parameters.push_back(p);
  }
  return std::make_shared<torch::optim::Adam>(parameters);
}

// Shapes that have no plan yet.
struct Fresh {
  std::vector<at::Tensor> plain, sharded;
  std::size_t next_plain = 0, next_sharded = 0;
  int shape = 0;
};

std::vector<Case> cases(tessera::DistributedManager& manager, c10::Device device) {
  const at::TensorOptions here(device);
  const auto mesh = manager.mesh({{"x", 1}});
  const auto place = [mesh](const at::Tensor& t) { return sharded(t, mesh); };
  const at::Tensor a = torch::randn({4, 8}, here), b = torch::randn({4, 8}, here),
                   w = torch::randn({8, 3}, here);
  const at::Tensor sa = place(a), sb = place(b),
                   sw = tessera::distribute_tensor(w, mesh, {tessera::Replicate()});
  const at::Tensor ga = a.clone().requires_grad_(true), gs = place(a).detach().requires_grad_(true);
  std::vector<Case> all;
  const auto add = [&](const char* name, double limit, std::function<void()> plain,
                       std::function<void()> ours, int calls = 2000, int python = 100) {
    all.push_back({name, limit, calls, python, std::move(plain), std::move(ours)});
  };
  add("add", 0.5, [=] { auto r = a + b; }, [=] { auto r = sa + sb; });
  add("add_", 0.5, [=] { a.add_(b); }, [=] { sa.add_(sb); });
  add("relu", 0.5, [=] { auto r = a.relu(); }, [=] { auto r = sa.relu(); });
  add("t", 0.5, [=] { auto r = a.t(); }, [=] { auto r = sa.t(); });
  add("view", 0.5, [=] { auto r = a.view({4, 2, 4}); }, [=] { auto r = sa.view({4, 2, 4}); });
  add("mm", 0.5, [=] { auto r = a.mm(w); }, [=] { auto r = sa.mm(sw); });
  add("detach", 0.5, [=] { auto r = a.detach(); }, [=] { auto r = sa.detach(); });
  add("add with grad", 1.0, [=] { auto r = ga + b; }, [=] { auto r = gs + sb; });
  add("mm with grad", 1.0, [=] { auto r = ga.mm(w); }, [=] { auto r = gs.mm(sw); });
  add(
      "mul forward and backward", 1.0,
      [=] {
        (ga * b).backward(b);
        ga.mutable_grad().reset();
      },
      [=] {
        (gs * sb).backward(sb);
        gs.mutable_grad().reset();
      },
      500, 50);
  // Eight operators a parameter.
  const auto plain_adam = adam([](const at::Tensor& t) { return t; }, here),
             our_adam = adam(place, here);
  add(
      "Adam step, 200 parameters", 200 * 8 * 0.5, [=] { plain_adam->step(); },
      [=] { our_adam->step(); }, 2, 1);
  for (int axes = 1; axes <= 3; ++axes) {
    std::vector<tessera::Axis> named;
    for (int i = 0; i < axes; ++i) named.push_back({std::string(1, static_cast<char>('a' + i)), 1});
    const auto of = manager.mesh(named);
    for (const bool product : {false, true}) {
      constexpr int kCalls = 20;
      const auto fresh = std::make_shared<Fresh>();
      Case c{std::string(product ? "mm" : "add") + ", new shape, " + std::to_string(axes) +
                 (axes > 1 ? " axes" : " axis"),
             20,
             kCalls,
             1,
             {},
             {}};
      c.prepare = [=] {
        fresh->plain.clear();
        fresh->sharded.clear();
        for (int i = 0; i < kCalls; ++i) {
          const int n = ++fresh->shape;
          fresh->plain.push_back(torch::zeros({n % 40 + 1, n / 40 + 1}, here));
          fresh->sharded.push_back(sharded(fresh->plain.back(), of));
          if (product) {  // its transposed form is another shape
            fresh->plain.back() = torch::zeros({n / 40 + 1, 3}, here);
            fresh->sharded.push_back(tessera::distribute_tensor(
                fresh->plain.back(), of, std::vector<tessera::Placement>(axes)));
          }
        }
        fresh->next_plain = fresh->next_sharded = 0;
      };
      if (product) {
        const at::Tensor left = torch::zeros({8, 8}, here);
        c.plain = [=] {
          auto r = left.narrow(1, 0, 1).mm(fresh->plain[fresh->next_plain++].narrow(0, 0, 1));
        };
        c.sharded = [=] {
          auto r = fresh->sharded[fresh->next_sharded].mm(fresh->sharded[fresh->next_sharded + 1]);
          fresh->next_sharded += 2;
        };
      } else {
        c.plain = [=] {
          auto r = fresh->plain[fresh->next_plain] + fresh->plain[fresh->next_plain];
          ++fresh->next_plain;
        };
        c.sharded = [=] {
          auto r = fresh->sharded[fresh->next_sharded] + fresh->sharded[fresh->next_sharded];
          ++fresh->next_sharded;
        };
      }
      all.push_back(std::move(c));
    }
  }
  return all;
}

struct Options {
  std::string device = "cpu", python, script, instructions;
  tessera::bench::Output output;
  bool count = false;
};

// Under callgrind: a dump for each case and kind, named so.
void count(const std::vector<Case>& all) {
  for (const Case& c : all) {
    if (c.prepare) continue;
    const int calls = c.calls > 100 ? 100 : 1;
    for (const bool ours : {false, true}) {
      const auto& f = ours ? c.sharded : c.plain;
      // Otherwise malloc merges what other cases have freed in the middle of one of them.
      malloc_trim(0);
      microseconds(f, 2, c10::kCPU);
      CALLGRIND_START_INSTRUMENTATION;
      CALLGRIND_ZERO_STATS;
      for (int i = 0; i < calls; ++i) f();
      CALLGRIND_STOP_INSTRUMENTATION;
      const std::string name = c.name + (ours ? "\tours\t" : "\tplain\t") + std::to_string(calls);
      CALLGRIND_DUMP_STATS_AT(name.c_str());
    }
  }
}

// Lines "case<tab>ours|plain<tab>calls<tab>instructions", as `run` makes them of callgrind's files.
std::map<std::string, std::pair<double, double>> read_instructions(const std::string& path) {
  std::map<std::string, std::pair<double, double>> all;
  std::ifstream in(path);
  std::string name, kind, calls, total;
  while (std::getline(in, name, '\t') && std::getline(in, kind, '\t') &&
         std::getline(in, calls, '\t') && std::getline(in, total)) {
    (kind == "ours" ? all[name].first : all[name].second) = std::stod(total) / std::stod(calls);
  }
  return all;
}

int measure(const std::vector<Case>& all, const Options& options, c10::Device device) {
  const auto timed = [device](const std::function<void()>& f, int n) {
    return microseconds(f, n, device);
  };
  tessera::bench::Report report("dispatch", options.output);
  std::unique_ptr<Child> child;
  if (options.python.empty()) {
    std::printf("dispatch: not beside DTensor: no Python with torch was given (--python)\n");
  } else {
    child = std::make_unique<Child>(options.python, options.script);
    report.meta("python_torch", child->version());
  }
  report.meta("torch", std::string(TORCH_VERSION));
  report.meta("device", device.str());
  const auto instructions = read_instructions(options.instructions);
  for (const Case& c : all) {
    if (!report.wants(c.name)) continue;
    std::vector<double> plain, ours, above, dtensor, ratios;
    if (!c.prepare) {
      timed(c.plain, c.calls / 10 + 1);
      timed(c.sharded, c.calls / 10 + 1);
      if (child) child->measure(c.name, c.python_calls / 10 + 1);
    }
    for (int i = 0; i < 31; ++i) {
      if (c.prepare) c.prepare();
      double p = 0, s = 0;
      if (i % 2 == 0) p = timed(c.plain, c.calls);
      s = timed(c.sharded, c.calls);
      if (i % 2 != 0) p = timed(c.plain, c.calls);
      plain.push_back(p);
      ours.push_back(s);
      above.push_back(s - p);
      if (!child) continue;
      const auto [python_plain, python_dtensor] = child->measure(c.name, c.python_calls);
      dtensor.push_back(python_dtensor - python_plain);
      ratios.push_back((s - p) / (python_dtensor - python_plain));
    }
    using tessera::bench::median;
    using tessera::bench::upper_bound_of_median;
    report.add({.name = c.name,
                .metric = "time",
                .value = median(ours),
                .unit = "us",
                .reference = "plain libtorch",
                .reference_value = median(plain)});
    Record r{.name = c.name,
             .metric = "above",
             .value = upper_bound_of_median(above),
             .unit = "us",
             .reference = "limit",
             .limit = c.limit};
    r.holds = r.value <= c.limit;
    report.add(r);
    if (child) {
      Record d{.name = c.name,
               .metric = "above",
               .value = median(above),
               .unit = "us",
               .reference = "DTensor above Python",
               .limit = 0.1};
      d.reference_value = median(dtensor);
      d.ratio = upper_bound_of_median(ratios);
      d.median_ratio = median(ratios);
      d.holds = *d.ratio <= 0.1;
      report.add(d);
    }
    if (const auto it = instructions.find(c.name); it != instructions.end()) {
      report.add({.name = c.name,
                  .metric = "count",
                  .value = it->second.first,
                  .unit = "instr.",
                  .reference = "plain libtorch",
                  .reference_value = it->second.second});
    }
  }
  return report.finish();
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("What an operator costs on a sharded tensor");
  tessera::bench::add_device(app, options.device);
  tessera::bench::add_output(app, options.output);
  app.add_option("--python", options.python,
                 "A Python interpreter with torch, to compare with DTensor");
  app.add_option("--script", options.script, "dtensor.py");
  app.add_option("--instructions", options.instructions, "Counts made by --count under callgrind");
  app.add_flag("--count", options.count,
               "Run each case a few times for callgrind; measure nothing");
  CLI11_PARSE(app, argc, argv);
  signal(SIGPIPE, SIG_IGN);
  return tessera::bench::guarded("bench_dispatch", [&] {
    const c10::Device device = tessera::bench::device_of(options.device, 1);
    int status = 0;
    const auto run = [&](tessera::DistributedManager& manager) {
      at::set_num_threads(1);
      const auto all = cases(manager, device);
      if (options.count)
        count(all);
      else
        status = measure(all, options, device);
    };
    if (device.is_cpu()) {
      tessera::run_threads(1, run);
    } else {
      auto manager = tessera::DistributedManager::initialize({.device = device});
      run(manager);
    }
    return status;
  });
}

// What a call of a network through C costs above libtorch's own call of the same TorchScript file
// on the same memory, and whether anything is copied; one rank, no communication. Beside FTorch's
// call as well where its library is given (FTorch is inference from Fortran in one process).
//
//   bench_c [--out FILE] [--only PATTERN] [--ftorch libftorch.so]
#include <dlfcn.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <filesystem>
#include <string>
#include <vector>

#include "../fsdp/counter.h"
#include "harness.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/c/tessera.h"

namespace {

using namespace tessera;
using Clock = std::chrono::steady_clock;

struct Case {
  std::string name;
  std::vector<std::int64_t> shape;
  std::string script;
  int calls;
};

// Short samples, about a millisecond, and many: what else runs on the machine is in few of them.
constexpr int kPairs = 601;

const std::vector<Case> kCases = {
    {"x + x", {64, 32}, "return x + x", 400},
    {"two layers", {64, 32}, "return torch.tanh(x.matmul(self.a).add(self.c)).matmul(self.b)", 20},
    {"two convolutions",
     {1, 3, 32, 32},
     "return torch.conv2d(torch.tanh(torch.conv2d(x, self.v, None, [1, 1], [1, 1])), self.w, "
     "None, [1, 1], [1, 1])",
     8},
};

std::string script_of(const Case& c, const std::filesystem::path& folder) {
  torch::manual_seed(1);
  torch::jit::Module module("Scripted");
  const std::vector<std::pair<std::string, std::vector<std::int64_t>>> parameters = {
      {"a", {32, 64}}, {"b", {64, 8}}, {"c", {64}}, {"v", {8, 3, 3, 3}}, {"w", {3, 8, 3, 3}}};
  for (const auto& [name, shape] : parameters)
    module.register_parameter(name, torch::randn(shape), false);
  module.define("def forward(self, x):\n    " + c.script + "\n");
  const std::string file = folder / (c.name + ".pt");
  module.save(file);
  return file;
}

void ok(tessera_result result) {
  if (result != TESSERA_OK) throw Error(tessera_message());
}

// FTorch's functions in C, as its Fortran calls them.
struct FTorch {
  explicit FTorch(const std::string& file) : library(dlopen(file.c_str(), RTLD_NOW)) {
    if (!library) throw Error(dlerror());
    load = reinterpret_cast<decltype(load)>(dlsym(library, "torch_jit_load"));
    call = reinterpret_cast<decltype(call)>(dlsym(library, "torch_jit_module_forward"));
    if (!load || !call) throw Error(file, " has no torch_jit_module_forward");
  }
  void* library;
  void* (*load)(const char*, int, int, bool, bool) = nullptr;
  void (*call)(void*, void**, int, void**, int, bool) = nullptr;
};

// One network, called in each way on the same memory.
class Ways {
 public:
  Ways(const Case& c, const std::string& file, tessera_mesh mesh, FTorch* ftorch)
      : memory_(torch::randn(c.shape)), plain_(torch::jit::load(file)), ftorch_(ftorch) {
    plain_.eval();
    std::vector<int> axes(c.shape.size(), -1);
    axes[c.shape.size() == 4 ? 2 : 0] = 0;
    const tessera_array block = {
        memory_.data_ptr(), TESSERA_FLOAT32, static_cast<int>(c.shape.size()),
        c.shape.data(),     nullptr,         TESSERA_ROW_MAJOR};
    ok(tessera_field(mesh, &block, nullptr, nullptr, axes.data(), &field_));
    ok(tessera_model_load(mesh, file.c_str(), TESSERA_AS_SAVED, &model_));
    ok(tessera_model_train(model_, 0));
    void* own = nullptr;
    ok(tessera_local(field_, &own, nullptr, nullptr, nullptr, nullptr));
    if (own != memory_.data_ptr()) throw Error("the field is a copy of the memory");
    const at::NoGradGuard no_grad;
    result_ = plain_.forward({memory_}).toTensor().clone();
    if (ftorch_) theirs_ = ftorch_->load(file.c_str(), 0, -1, false, false);
    check();
  }
  ~Ways() {
    for (void* handle : {static_cast<void*>(field_), static_cast<void*>(model_)})
      tessera_free(handle);
  }
  Ways(const Ways&) = delete;
  Ways& operator=(const Ways&) = delete;

  void ours() {
    tessera_tensor output = nullptr;
    ok(tessera_predict(model_, 1, &field_, 1, &output));
    ok(tessera_free(output));
  }
  void libtorch() {
    const at::NoGradGuard no_grad;
    const at::Tensor output = plain_.forward({memory_}).toTensor();
  }
  // Writes into an array of the caller, as all of its calls do.
  void ftorch() {
    void *input = &memory_, *output = &result_;
    ftorch_->call(theirs_, &input, 1, &output, 1, false);
  }

 private:
  void check() {
    tessera_tensor output = nullptr;
    void* data = nullptr;
    ok(tessera_predict(model_, 1, &field_, 1, &output));
    ok(tessera_local(output, &data, nullptr, nullptr, nullptr, nullptr));
    const at::Tensor got = torch::from_blob(data, result_.sizes(), at::kFloat);
    if (!at::equal(got, result_)) throw Error("the two calls give different values");
    ok(tessera_free(output));
  }

  at::Tensor memory_, result_;
  torch::jit::Module plain_;
  FTorch* ftorch_;
  void* theirs_ = nullptr;
  tessera_tensor field_ = nullptr;
  tessera_model model_ = nullptr;
};

double seconds(const std::function<void()>& call, int calls) {
  const auto start = Clock::now();
  for (int i = 0; i < calls; ++i) call();
  return std::chrono::duration<double>(Clock::now() - start).count() / calls;
}

// The most bytes that one call holds beyond what is there.
double bytes(const std::function<void()>& call) {
  bench_counter_restart();
  const auto before = bench_counter_bytes();
  call();
  return static_cast<double>(bench_counter_bytes() - before);
}

void above(bench::Report& report, const Case& c, const std::function<void()>& ours,
           const std::function<void()>& theirs, const std::string& reference) {
  for (const auto* call : {&ours, &theirs}) seconds(*call, c.calls);
  const auto pairs = bench::alternate(
      kPairs, [&] { return seconds(ours, c.calls); }, [&] { return seconds(theirs, c.calls); });
  std::vector<double> added, reference_values, ratios;
  for (const auto& [mine, other] : pairs) {
    added.push_back((mine - other) * 1e6);
    reference_values.push_back(other * 1e6);
    ratios.push_back(mine / other);
  }
  bench::Record record{.name = c.name,
                       .metric = "above",
                       .value = bench::upper_bound_of_median(added),
                       .unit = "us",
                       .reference = reference,
                       .reference_value = bench::median(reference_values),
                       .limit = 5};
  record.median_ratio = bench::median(ratios);
  record.holds = record.value <= 5;
  report.add(record);
}

int measure(bench::Report& report, FTorch* ftorch) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / concat("tessera_bench_c.", getpid());
  std::filesystem::create_directories(folder);
  tessera_job job = nullptr;
  tessera_mesh mesh = nullptr;
  ok(tessera_start(nullptr, 60, &job));
  const char* name = "x";
  const int size = 1;
  ok(tessera_mesh_create(job, 1, &name, &size, nullptr, &mesh));
  for (const bool timed : {true, false}) {
    if (!timed) bench_counter_install();
    for (const Case& c : kCases) {
      if (!report.wants(c.name)) continue;
      Ways ways(c, script_of(c, folder), mesh, ftorch);
      const std::function<void()> ours = [&] { ways.ours(); }, plain = [&] { ways.libtorch(); };
      if (timed) {
        above(report, c, ours, plain, "libtorch");
        if (ftorch) above(report, c, ours, [&] { ways.ftorch(); }, "FTorch");
        continue;
      }
      bench::Record record{.name = c.name,
                           .metric = "bytes",
                           .value = bytes(ours),
                           .unit = "B",
                           .reference = "libtorch",
                           .reference_value = bytes(plain)};
      record.limit = record.reference_value;
      record.holds = record.value <= *record.limit;
      report.add(record);
    }
  }
  ok(tessera_end(job));
  std::filesystem::remove_all(folder);
  return report.finish();
}

}  // namespace

int main(int count, char** arguments) {
  bench::Output output;
  std::string ftorch;
  CLI::App app("A network called through C beside libtorch's own call");
  bench::add_output(app, output);
  app.add_option("--ftorch", ftorch, "FTorch's library, to be compared as well");
  CLI11_PARSE(app, count, arguments);
  at::set_num_threads(1);
  try {
    bench::Report report("c", output);
    report.meta("ranks", 1);
    report.meta("threads_per_rank", 1);
    std::unique_ptr<FTorch> theirs;
    if (!ftorch.empty()) theirs = std::make_unique<FTorch>(ftorch);
    return measure(report, theirs.get());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_c: %s\n", error.what());
    return 2;
  }
}

// Redistribution beside what a user would write by hand with the same group's collectives on plain
// tensors, on two ranks: time, and bytes received beside the fewest that the two specs allow. The
// hand-written way ends with the same result in memory of its own: an all-reduce, which works in
// place, copies its input first, and an all-to-all packs what it sends. Above 1 MiB redistribution
// may take 1.1 times as long. Each backend in a run of its own; `run` makes all.

#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "backend.h"
#include "harness.h"
#include "tessera/base/text.h"
#include "tessera/comm/backends/mpi/mpi.h"
#include "tessera/comm/job/manager.h"
#include "tessera/tensor/shard_tensor.h"

namespace {

using namespace tessera;

constexpr int kPairs = 31;
constexpr double kSampleSeconds = 5e-3, kCaseSeconds = 1.2;

struct Case {
  std::string name;
  at::Tensor input;
  ShardSpec to;
  double fewest;  // elements that this rank must receive
  std::function<at::Tensor()> by_hand;
};

std::vector<Case> cases(const DeviceMesh& mesh, const Group& group, std::int64_t rows) {
  const std::int64_t columns = 1024, mine = group.rank();
  const std::vector<std::int64_t> shape = {rows, columns};
  const auto numel = static_cast<double>(rows * columns);
  const at::Tensor all = at::ones(shape);
  const Sizes half = {rows / 2, rows / 2}, uneven = {rows / 4 * 3, rows / 4};
  const ShardSpec whole = ShardSpec::replicated(mesh, shape), by_rows(mesh, shape, {Shard(0)}),
                  by_columns(mesh, shape, {Shard(1)}),
                  by_uneven(mesh, shape, {Shard(0)}, {{0, uneven}}),
                  by_other(mesh, shape, {Shard(0)}, {{0, {uneven[1], uneven[0]}}}),
                  terms(mesh, shape, {Partial()});
  const auto shard = [&](const ShardSpec& s) { return distribute_tensor(all, s); };
  const auto gather = [=](const ShardSpec& s, const Sizes& sizes) {
    const at::Tensor local = to_local(shard(s));
    return [=] {
      at::Tensor out = at::empty(shape);
      group.all_gather(out, local, sizes);
      return out;
    };
  };
  const at::Tensor local_rows = to_local(shard(by_rows)), local_uneven = to_local(shard(by_uneven));
  return {
      {"Shard(0) to Replicate", shard(by_rows), whole, numel / 2, gather(by_rows, half)},
      {"Shard(0) 3:1 to Replicate", shard(by_uneven), whole,
       numel - static_cast<double>(uneven[mine] * columns), gather(by_uneven, uneven)},
      {"Partial to Replicate", from_local(all, terms), whole, numel,
       [=] {
         at::Tensor out = all.clone();
         group.all_reduce(out);
         return out;
       }},
      {"Partial to Shard(0)", from_local(all, terms), by_rows, numel / 2,
       [=] {
         at::Tensor out = at::empty({rows / 2, columns});
         group.reduce_scatter(out, all);
         return out;
       }},
      {"Shard(0) to Shard(1)", shard(by_rows), by_columns, numel / 4,
       [=] {
         const at::Tensor packed = at::empty({2, rows / 2, columns / 2}),
                          out = at::empty({rows, columns / 2});
         packed.copy_(local_rows.view({rows / 2, 2, columns / 2}).transpose(0, 1));
         group.all_to_all(out, packed.view({rows, columns / 2}));
         return out;
       }},
      // Half of all rows go from rank 0 to rank 1.
      {"Shard(0) 3:1 to 1:3", shard(by_uneven), by_other, mine == 0 ? 0.0 : numel / 2,
       [=] {
         if (mine == 0) {
           group.send(local_uneven.narrow(0, rows / 4, rows / 2), 1);
           return local_uneven.narrow(0, 0, rows / 4).clone();
         }
         at::Tensor out = at::empty({rows / 4 * 3, columns});
         group.receive(out.narrow(0, 0, rows / 2), 0);
         out.narrow(0, rows / 2, rows / 4).copy_(local_uneven);
         return out;
       }},
  };
}

int run(const std::string& asked, const bench::Output& output) {
  torch::set_num_threads(1);
  ManagerOptions options;
  options.backend = asked;
  options.check_level = CheckLevel::off;
  auto manager = DistributedManager::initialize(options);
  if (manager.world_size() != 2)
    throw InvalidArgument("bench_redistribute runs on 2 ranks, and there are ",
                          manager.world_size());
  const std::string backend = bench::backend_of(asked, manager);
  const auto mesh = manager.mesh({{"x", 2}});
  const Group group = mesh.all();
  bench::Report report("redistribute", output, manager.rank());
  report.meta("torch", TORCH_VERSION);
  report.meta("backend", backend);
  std::optional<bench::AwakeCores> awake;
  if (backend == "gloo") awake.emplace();  // its calls sleep until another thread wakes them
  const at::NoGradGuard no_grad;
  for (const auto& [label, rows] :
       {std::pair<const char*, std::int64_t>{"64 KiB", 16}, {"4 MiB", 1024}, {"16 MiB", 4096}}) {
    for (const Case& c : cases(mesh, group, rows)) {
      const std::string name = concat(c.name, " ", label, " ", backend);
      if (!report.wants(name)) continue;
      double received = 0;
      for (const auto& call : explain_redistribution(spec(c.input), c.to))
        received += static_cast<double>(call.received);
      const at::Tensor both = at::tensor({received, c.fewest}, at::kDouble);
      group.all_reduce(both);
      const double bytes = both[0].item<double>() * 4, fewest = both[1].item<double>() * 4;
      report.add(
          {name, "bytes", bytes, "B", "fewest", fewest, bytes / fewest, {}, 1.0, bytes <= fewest});
      const auto ours = [&] { redistribute(c.input, c.to); };
      const auto bare = [&] { c.by_hand(); };
      const double once =
          std::max(bench::seconds_of(group, 3, bare), bench::seconds_of(group, 3, ours));
      const int repeats = std::clamp(static_cast<int>(kSampleSeconds / once), 1, 200);
      const int count =
          std::clamp(static_cast<int>(kCaseSeconds / (2 * once * repeats)), kPairs, 201);
      const auto pairs = bench::alternate(
          count, [&] { return bench::seconds_of(group, repeats, ours); },
          [&] { return bench::seconds_of(group, repeats, bare); });
      std::vector<double> reference;
      for (const auto& pair : pairs) reference.push_back(pair.second);
      // Below 1 MiB what counts is the overhead of a call: 30 us.
      report.time(name, pairs, "by hand",
                  rows >= 1024 ? 1.1 : 1.1 + 30e-6 / bench::median(reference));
    }
  }
  group.barrier();
  return manager.rank() == 0 ? report.finish() : 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Redistribution beside the bare collectives, on two ranks");
  std::string backend = has_mpi() ? "mpi" : "gloo";
  bench::Output output{.shared = true};
  bench::add_backend(app, backend);
  bench::add_output(app, output);
  CLI11_PARSE(app, argc, argv);
  try {
    return run(backend, output);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bench_redistribute: %s\n", e.what());
    return 2;
  }
}

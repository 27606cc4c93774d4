// What an operator costs on a sharded tensor, beside the same operator on the local one with plain libtorch. No communication: a mesh of one rank,
// sharded. Each figure is the best of several rounds, plain and sharded in turn, so that both see the same machine.

#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "tessera/comm/device_mesh.h"
#include "tessera/comm/threads.h"
#include "tessera/tensor/distribute_module.h"
#include "tessera/tensor/shard_tensor.h"

namespace {

using Clock = std::chrono::steady_clock;

double once(const std::function<void()>& f, int n) {
  const auto start = Clock::now();
  for (int i = 0; i < n; ++i) f();
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count() / n;
}

struct Row {
  std::string name;
  double plain, sharded, limit;  // microseconds; limit of the difference, 0: none
};
std::vector<Row> rows;

void add(const Row& r) {
  std::printf("%-28s %10.3f %10.3f %10.3f", r.name.c_str(), r.plain, r.sharded, r.sharded - r.plain);
  if (r.limit > 0) std::printf("   limit %.1f%s", r.limit, r.sharded - r.plain > r.limit ? "  EXCEEDED" : "");
  std::printf("\n");
  rows.push_back(r);
}

void row(const std::string& name, double limit, const std::function<void()>& plain, const std::function<void()>& sharded, int n = 5000) {
  double p = 1e9, s = 1e9;
  once(plain, n / 10 + 1);
  once(sharded, n / 10 + 1);
  for (int round = 0; round < 9; ++round) {
    p = std::min(p, once(plain, n));
    s = std::min(s, once(sharded, n));
  }
  add({name, p, s, limit});
}

void bench(tessera::DistributedManager& manager) {
  at::set_num_threads(1);
  const auto mesh = manager.mesh({{"x", 1}});
  const auto sharded = [&](const at::Tensor& t) { return tessera::distribute_tensor(t, mesh, {tessera::Shard(0)}); };
  const at::Tensor a = torch::randn({4, 8}), b = torch::randn({4, 8}), w = torch::randn({8, 3});
  const at::Tensor sa = sharded(a), sb = sharded(b), sw = tessera::distribute_tensor(w, mesh, {tessera::Replicate()});
  std::printf("%-28s %10s %10s %10s   (microseconds)\n", "operator on [4, 8] float", "plain", "sharded", "above");
  row("add", 0.5, [&] { auto r = a + b; }, [&] { auto r = sa + sb; });
  row("add_", 0.5, [&] { a.add_(b); }, [&] { sa.add_(sb); });
  row("relu", 0.5, [&] { auto r = a.relu(); }, [&] { auto r = sa.relu(); });
  row("t", 0.5, [&] { auto r = a.t(); }, [&] { auto r = sa.t(); });
  row("view", 0.5, [&] { auto r = a.view({4, 2, 4}); }, [&] { auto r = sa.view({4, 2, 4}); });
  row("detach", 0.5, [&] { auto r = a.detach(); }, [&] { auto r = sa.detach(); });
  row("mm", 0.5, [&] { auto r = a.mm(w); }, [&] { auto r = sa.mm(sw); });
  const at::Tensor ga = a.clone().requires_grad_(true), gs = sharded(a).detach().requires_grad_(true);
  row("add with grad", 1.0, [&] { auto r = ga + b; }, [&] { auto r = gs + sb; });
  row("relu with grad", 1.0, [&] { auto r = ga.relu(); }, [&] { auto r = gs.relu(); });
  row("mm with grad", 1.0, [&] { auto r = ga.mm(w); }, [&] { auto r = gs.mm(sw); });
  row(
      "mul forward + backward", 0,
      [&] {
        (ga * b).backward(b);
        ga.mutable_grad().reset();
      },
      [&] {
        (gs * sb).backward(sb);
        gs.mutable_grad().reset();
      },
      1000);

  const auto adam = [&](bool with_mesh) {
    std::vector<at::Tensor> parameters;
    for (int i = 0; i < 200; ++i) {
      at::Tensor p = torch::randn({16, 16});
      at::Tensor g = torch::randn({16, 16});
      if (with_mesh) {
        p = tessera::distribute_tensor(p, mesh, {tessera::Replicate()}).detach();
        g = tessera::distribute_tensor(g, mesh, {tessera::Replicate()}).detach();
      }
      p.requires_grad_(true);
      p.mutable_grad() = g;
      parameters.push_back(p);
    }
    return parameters;
  };
  torch::optim::Adam plain(adam(false)), ours(adam(true));
  row("Adam step, 200 parameters", 0, [&] { plain.step(); }, [&] { ours.step(); }, 10);

  // The first use of a shape: a new plan each time.
  for (const auto& axes : std::vector<std::vector<tessera::Axis>>{{{"a", 1}}, {{"a", 1}, {"b", 1}}, {{"a", 1}, {"b", 1}, {"c", 1}}}) {
    const auto m = manager.mesh(axes);
    std::vector<tessera::Placement> placements(axes.size());
    placements[0] = tessera::Shard(0);
    std::vector<at::Tensor> plain_tensors, sharded_tensors;
    constexpr int kShapes = 300;
    for (int i = 0; i < kShapes; ++i) {
      plain_tensors.push_back(torch::zeros({i % 20 + 1, i / 20 + 1}));
      sharded_tensors.push_back(tessera::distribute_tensor(plain_tensors.back(), m, placements));
    }
    int i = 0, j = 0;
    const double p = once(
        [&] {
          auto r = plain_tensors[i] + plain_tensors[i];
          ++i;
        },
        kShapes);
    const double s = once(
        [&] {
          auto r = sharded_tensors[j] + sharded_tensors[j];
          ++j;
        },
        kShapes);
    add({"add, new shape, " + std::to_string(axes.size()) + " axes", p, s, 20});
  }
}

}  // namespace

int main(int argc, char** argv) {
  tessera::run_threads(1, bench);
  bool within = true;
  for (const Row& r : rows) within &= r.limit == 0 || r.sharded - r.plain <= r.limit;
  if (argc == 3 && std::string(argv[1]) == "--out") {
    std::FILE* out = std::fopen(argv[2], "w");
    if (!out) {
      std::fprintf(stderr, "cannot write %s\n", argv[2]);
      return 2;
    }
    std::fprintf(out, "{\"benchmark\": \"dispatch\", \"unit\": \"us\", \"rows\": [");
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const Row& r = rows[i];
      std::fprintf(out, "%s\n  {\"name\": \"%s\", \"plain\": %.4f, \"sharded\": %.4f, \"limit_above_plain\": %.2f}", i ? "," : "", r.name.c_str(),
                   r.plain, r.sharded, r.limit);
    }
    std::fprintf(out, "\n]}\n");
    std::fclose(out);
  }
  return within ? 0 : 1;
}

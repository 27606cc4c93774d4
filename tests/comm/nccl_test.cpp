// NCCL through Group, beside Gloo in the same group: every collective on CUDA and on CPU tensors
// against values computed on one rank. Without arguments it starts ranks of itself: one for each
// GPU, at most two; two on one GPU where NCCL allows that (2.30 and newer). No test library: the
// exit status tells, and each failure is a line.

#include <ATen/ATen.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <string>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/comm/backends/nccl/nccl.h"
#include "tessera/comm/group/detail/group_spec.h"
#include "tessera/comm/group/detail/group_state.h"
#include "tessera/comm/group/group.h"

extern char** environ;

namespace {

using tessera::concat;
using tessera::Group;
using tessera::Message;
using tessera::ReduceOp;
using tessera::Sizes;

constexpr int kSeconds = 240;
int failures = 0;

at::Tensor values(int seed, int rank, at::IntArrayRef shape, at::ScalarType dtype) {
  std::int64_t n = 1;
  for (const auto d : shape) n *= d;
  const at::Tensor t =
      at::arange(n, at::kDouble).mul(7 + seed).add(11 * rank + seed).fmod(7).sub(3).reshape(shape);
  if (dtype == at::kBool) return t.gt(0);
  if (dtype == at::kByte) return t.abs().to(dtype);
  if (c10::isComplexType(dtype)) return at::complex(t, t.neg().add(1)).to(dtype);
  return t.to(dtype);
}

void expect(const at::Tensor& got, const at::Tensor& expected, const std::string& what) {
  const at::Tensor on_cpu = got.cpu();
  const auto wide = on_cpu.is_complex() ? at::kComplexDouble : at::kDouble;
  if (on_cpu.sizes() == expected.sizes() && on_cpu.scalar_type() == expected.scalar_type() &&
      at::allclose(on_cpu.to(wide), expected.to(wide), 1e-6, 0, /*equal_nan=*/true))
    return;
  ++failures;
  std::printf("FAILED %s\n", what.c_str());
  std::fflush(stdout);
}

at::Tensor reduced(const std::vector<at::Tensor>& inputs, ReduceOp::Kind op) {
  const auto dtype = inputs.front().scalar_type();
  const auto wide = c10::isComplexType(dtype) ? at::kComplexDouble : at::kDouble;
  at::Tensor result = inputs.front().to(wide);
  for (std::size_t r = 1; r < inputs.size(); ++r) {
    const at::Tensor x = inputs[r].to(wide);
    result = op == ReduceOp::Kind::product ? result * x
             : op == ReduceOp::Kind::min   ? at::minimum(result, x)
             : op == ReduceOp::Kind::max   ? at::maximum(result, x)
                                           : result + x;
  }
  if (op == ReduceOp::Kind::avg) result = result / static_cast<double>(inputs.size());
  return result.to(dtype);
}

bool makes_sense(at::ScalarType dtype, ReduceOp::Kind op) {
  if (c10::isComplexType(dtype)) return op != ReduceOp::Kind::min && op != ReduceOp::Kind::max;
  return op != ReduceOp::Kind::avg || c10::isFloatingType(dtype);
}

std::int64_t sum(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
}

void run(const Group& group, at::Device device) {
  const int n = group.size(), me = group.rank();
  const auto mine = static_cast<std::size_t>(me);
  const auto place = [&](const at::Tensor& t) {
    return t.to(device, t.scalar_type(), false, /*copy=*/true);
  };
  const std::vector<at::ScalarType> dtypes = {at::kFloat,    at::kDouble,      at::kHalf,
                                              at::kBFloat16, at::kLong,        at::kInt,
                                              at::kByte,     at::kComplexFloat};
  std::vector<Sizes> lists(4);
  for (int r = 0; r < n; ++r) {
    lists[0].push_back(2);
    lists[1].push_back(r + 1);
    lists[2].push_back(r == n - 1 ? 3 : 0);
    lists[3].push_back(r == 0 ? 30000 : 7);
  }
  for (const auto dtype : dtypes) {
    const std::string where =
        concat(" of ", c10::toString(dtype), " on ", device, ", ", n, " ranks");
    for (const auto& op :
         {ReduceOp::sum, ReduceOp::avg, ReduceOp::product, ReduceOp::min, ReduceOp::max}) {
      if (!makes_sense(dtype, op.kind)) continue;
      std::vector<at::Tensor> inputs;
      for (int r = 0; r < n; ++r) inputs.push_back(values(1, r, {3, 5}, dtype));
      at::Tensor t = place(inputs[mine]);
      group.all_reduce(t, op);
      expect(t, reduced(inputs, op.kind), concat("all_reduce ", to_string(op.kind), where));
      t = place(inputs[mine].t()).t();
      auto request = group.started().all_reduce(t, op);
      request.wait();
      expect(t, reduced(inputs, op.kind), concat("started all_reduce ", to_string(op.kind), where));
      at::Tensor u = place(inputs[mine]);
      group.reduce(u, n - 1, op);
      expect(u, me == n - 1 ? reduced(inputs, op.kind) : inputs[mine],
             concat("reduce ", to_string(op.kind), where));
      for (const auto& sizes : lists) {
        std::vector<at::Tensor> wide;
        for (int r = 0; r < n; ++r) wide.push_back(values(2, r, {sum(sizes), 2}, dtype));
        const at::Tensor out = at::empty({sizes[mine], 2}, at::TensorOptions(device).dtype(dtype));
        const at::Tensor in = place(wide[mine]);
        group.reduce_scatter(out, in, op, sizes);
        expect(out, reduced(wide, op.kind).split_with_sizes(sizes)[mine],
               concat("reduce_scatter ", to_string(op.kind), tessera::list(sizes), where));
        expect(in, wide[mine], concat("reduce_scatter keeps its input", where));
      }
    }
    if (c10::isFloatingType(dtype)) {
      std::vector<at::Tensor> inputs;
      for (int r = 0; r < n; ++r) inputs.push_back(values(3, r, {4}, dtype).mul(0.5 * (r + 1)));
      at::Tensor t = place(values(3, me, {4}, dtype));
      group.all_reduce(t, ReduceOp::premultiplied(0.5 * (me + 1)));
      expect(t, reduced(inputs, ReduceOp::Kind::sum), concat("premultiplied", where));
      for (const auto& op : {ReduceOp::sum, ReduceOp::min, ReduceOp::max}) {
        at::Tensor nan = place(values(3, me, {4}, dtype));
        if (me == n - 1) nan[2] = std::numeric_limits<double>::quiet_NaN();
        group.all_reduce(nan, op);
        if (!nan.isnan()[2].item<bool>() || nan.isnan().sum().item<std::int64_t>() != 1)
          expect(nan, nan.cpu().add(1), concat("NaN in ", to_string(op.kind), where));
      }
    }
    for (int root = 0; root < n; ++root) {
      at::Tensor t = place(values(4, me, {6}, dtype));
      group.broadcast(t, root);
      expect(t, values(4, root, {6}, dtype), concat("broadcast", where));
    }
    for (const auto& sizes : lists) {
      const std::string what = concat(tessera::list(sizes), where);
      std::vector<at::Tensor> parts;
      for (int r = 0; r < n; ++r)
        parts.push_back(values(5, r, {sizes[static_cast<std::size_t>(r)], 3}, dtype));
      const auto options = at::TensorOptions(device).dtype(dtype);
      const at::Tensor all = at::empty({sum(sizes), 3}, options), in = place(parts[mine]);
      group.all_gather(all, in, sizes);
      expect(all, at::cat(parts), concat("all_gather ", what));
      const int root = n - 1;
      const at::Tensor whole = me == root ? at::empty({sum(sizes), 3}, options) : at::Tensor();
      group.gather(whole, in, root, sizes);
      if (me == root) expect(whole, at::cat(parts), concat("gather ", what));
      const at::Tensor back = at::empty({sizes[mine], 3}, options);
      group.scatter(back, whole, root, sizes);
      expect(back, parts[mine], concat("scatter ", what));
    }
    {
      const auto rows = [&](int from, int to) -> std::int64_t { return (from + 2 * to) % 3; };
      std::vector<at::Tensor> give, take;
      Sizes in_sizes, out_sizes;
      for (int r = 0; r < n; ++r) {
        give.push_back(values(6, 8 * me + r, {rows(me, r), 2}, dtype));
        take.push_back(values(6, 8 * r + me, {rows(r, me), 2}, dtype));
        in_sizes.push_back(rows(me, r));
        out_sizes.push_back(rows(r, me));
      }
      const at::Tensor out = at::empty({sum(out_sizes), 2}, at::TensorOptions(device).dtype(dtype));
      group.all_to_all(out, place(at::cat(give)), out_sizes, in_sizes);
      expect(out, at::cat(take), concat("all_to_all", where));
      std::vector<Message> messages;
      std::vector<at::Tensor> received;
      for (int r = 0; r < n; ++r) {
        messages.push_back({Message::Kind::send, place(give[static_cast<std::size_t>(r)]), r});
        received.push_back(at::empty({rows(r, me), 2}, at::TensorOptions(device).dtype(dtype)));
        messages.push_back({Message::Kind::receive, received.back(), r});
      }
      group.exchange(messages);
      for (int r = 0; r < n; ++r)
        expect(received[static_cast<std::size_t>(r)], take[static_cast<std::size_t>(r)],
               concat("exchange", where));
    }
    if (n > 1) {
      at::Tensor t = place(values(7, me, {5}, dtype));
      if (me == 0) group.send(t, 1);
      if (me == 1) {
        group.receive(t, 0);
        expect(t, values(7, 0, {5}, dtype), concat("receive", where));
      }
    }
  }
  group.barrier();
}

int rank_main(int rank, int size, const std::string& path) {
  alarm(kSeconds);  // A hang ends here, and the parent says so.
  const int devices = tessera::cuda_device_count();
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(rank % devices));
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  tessera::detail::GroupSpec spec;
  spec.name = "world";
  spec.ranks = ranks;
  spec.rank = rank;
  spec.backend = "gloo";
  spec.device = device;
  spec.address = "127.0.0.1";
  spec.store = c10::make_intrusive<c10d::PrefixStore>(
      "world", c10::make_intrusive<c10d::FileStore>(path, size));
  spec.timeout = std::chrono::seconds(60);
  spec.watch = std::make_shared<tessera::detail::GroupWatch>(spec.name, ranks, rank, nullptr);
  {
    const auto state = tessera::detail::make_group_state(spec);
    const Group group(state);
    run(group, device);
    run(group, at::kCPU);
    state->set_check_level(tessera::CheckLevel::collective);
    run(group, device);
    // Both kinds under way at once in one group.
    if (size > 1) {
      at::Tensor on_gpu = at::ones({1000}, at::TensorOptions(device)), on_cpu = at::ones({1000});
      auto a = group.started().all_reduce(on_gpu);
      auto b = group.started().all_reduce(on_cpu);
      b.wait();
      a.wait();
      expect(on_gpu, at::full({1000}, static_cast<float>(size)), "CUDA beside CPU");
      expect(on_cpu, at::full({1000}, static_cast<float>(size)), "CPU beside CUDA");
    }
    // Messages that are compared keep the order in which they were started, whichever is waited
    // for first.
    if (size == 2) {
      const auto options = at::TensorOptions(device);
      const bool sends = rank == 0;
      at::Tensor first = sends ? at::full({1000}, 1.0, options) : at::zeros({1000}, options);
      at::Tensor second = sends ? at::full({1000}, 2.0, options) : at::zeros({1000}, options);
      auto a = sends ? group.started().send(first, 1) : group.started().receive(first, 0);
      auto b = sends ? group.started().send(second, 1) : group.started().receive(second, 0);
      if (sends) {
        a.wait();
        b.wait();
      } else {
        b.wait();
        a.wait();
      }
      expect(first, at::full({1000}, 1.0), "the message that was started first");
      expect(second, at::full({1000}, 2.0), "the message that was started second");
    }
  }
  std::printf("rank %d of %d on %s: %d failures\n", rank, size, device.str().c_str(), failures);
  return failures == 0 ? 0 : 1;
}

int start(const char* program, int size) {
  std::string folder = (std::filesystem::temp_directory_path() / "tessera_nccl_XXXXXX").string();
  if (!mkdtemp(folder.data())) return 1;
  const std::string path = folder + "/store";
  std::vector<pid_t> children;
  for (int r = 0; r < size; ++r) {
    const std::string rank = std::to_string(r), count = std::to_string(size);
    const char* arguments[] = {program, rank.c_str(), count.c_str(), path.c_str(), nullptr};
    pid_t child = 0;
    if (posix_spawn(&child, program, nullptr, nullptr, const_cast<char**>(arguments), environ) != 0)
      return 1;
    children.push_back(child);
  }
  int worst = 0;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    if (WIFSIGNALED(status)) {
      std::printf("a rank of %d ended by signal %d%s\n", size, WTERMSIG(status),
                  WTERMSIG(status) == SIGALRM ? " (it hung)" : "");
      worst = 1;
    } else if (WEXITSTATUS(status) != 0) {
      worst = 1;
    }
  }
  unlink(path.c_str());
  rmdir(folder.c_str());
  return worst;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::string problem = tessera::nccl_unavailable();
    if (!problem.empty()) {
      std::printf("NCCL is not available: %s\n", problem.c_str());
      return 77;
    }
    if (argc == 4) return rank_main(std::atoi(argv[1]), std::atoi(argv[2]), argv[3]);
    const std::string version = tessera::nccl_version();
    const int devices = tessera::cuda_device_count();
    std::printf("NCCL %s, %d devices\n", version.c_str(), devices);
    std::fflush(stdout);
    int major = 0, minor = 0;
    std::sscanf(version.c_str(), "%d.%d", &major, &minor);
    const bool shares = major > 2 || (major == 2 && minor >= 30);
    if (devices == 1 && shares) setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
    if (devices == 1 && !shares) {
      // A group of one rank makes no call of NCCL: there would be nothing to see.
      std::printf("skipped: one GPU, and NCCL older than 2.30 does not let two ranks share it\n");
      return 77;
    }
    return start(argv[0], 2);
  } catch (const std::exception& e) {
    std::printf("%s\n", e.what());
    return 1;
  }
}

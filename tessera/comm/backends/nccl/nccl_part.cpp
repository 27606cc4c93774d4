// libtessera_nccl.so: c10d's NCCL backend with uneven collectives and batched messages.

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <algorithm>
#include <numeric>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/comm/backends/nccl/nccl_part.h"
#include "tessera/comm/group/detail/abilities.h"
#include "tessera/comm/group/detail/uneven.h"

namespace tessera::detail {

namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Sizes = std::vector<std::int64_t>;

/// Padding to the largest block is one kernel; it is worth it while it moves at most this much more
/// than needed,
constexpr double kPaddingFactor = 1.25;
/// or while all of it is small.
constexpr std::int64_t kSmallBytes = 64 << 10;

/// A call that had nothing to do.
class DoneWork : public c10d::Work {
 public:
  DoneWork() : c10d::Work(-1, c10d::OpType::UNKNOWN) { finish(); }
  bool wait(std::chrono::milliseconds = kNoTimeout) override { return true; }
  void synchronize() override {}
};

WorkPtr done() { return c10::make_intrusive<DoneWork>(); }

std::vector<at::Tensor> rows(const at::Tensor& whole, const Sizes& sizes) {
  return whole.split_with_sizes(sizes);
}

class NcclBackend final : public c10d::ProcessGroupNCCL,
                          public UnevenBackend,
                          public ReducingBackend {
 public:
  using c10d::ProcessGroupNCCL::ProcessGroupNCCL;

  WorkPtr all_gather_v(const at::Tensor& output, const at::Tensor& input, const Sizes& sizes,
                       CallLimit limit) override {
    at::Tensor out = output, in = input;
    c10d::AllgatherOptions options;
    set(options, limit);
    const std::int64_t largest = *std::max_element(sizes.begin(), sizes.end()),
                       smallest = *std::min_element(sizes.begin(), sizes.end());
    const std::int64_t total = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
    if (total == 0) return done();
    if (largest == smallest) return _allgather_base(out, in, options);
    const std::int64_t padded = largest * getSize();
    const std::int64_t padded_bytes =
        padded * (output.numel() / total) * static_cast<std::int64_t>(output.element_size());
    if (padded_bytes <= kSmallBytes ||
        static_cast<double>(padded) <= kPaddingFactor * static_cast<double>(total))
      return padded_gather(output, input, sizes, largest, options);
    auto blocks = rows(output, sizes);
    if (smallest > 0 && 2 * largest > total && getSize() > 2) {
      std::vector<std::vector<at::Tensor>> lists{blocks};
      std::vector<at::Tensor> inputs{in};
      return allgather(lists, inputs, options);  // Unequal blocks: a group of broadcasts.
    }
    std::vector<Message> messages;
    for (int r = 0; r < getSize(); ++r) {
      messages.push_back({Message::Kind::send, input, r});
      messages.push_back({Message::Kind::receive, blocks[static_cast<std::size_t>(r)], r});
    }
    return exchange(messages, limit);
  }

  WorkPtr reduce_scatter_v(const at::Tensor& output, const at::Tensor& input, const Sizes& sizes,
                           const c10d::ReduceOp& op, CallLimit limit) override {
    c10d::ReduceScatterOptions options;
    set(options, limit);
    options.reduceOp = op;
    at::Tensor out = output, in = input;
    if (std::equal(sizes.begin() + 1, sizes.end(), sizes.begin()))
      return _reduce_scatter_base(out, in, options);
    // A reduction to each rank that gets rows.
    const auto blocks = rows(input, sizes);
    // NCCL reduces in place on the root: its part goes to the output first, so that the input keeps
    // its values.
    out.copy_(blocks[static_cast<std::size_t>(getRank())], /*non_blocking=*/true);
    if (input.numel() == 0) return done();
    startCoalescing();
    for (int r = 0; r < getSize(); ++r) {
      const at::Tensor& block = blocks[static_cast<std::size_t>(r)];
      if (block.numel() == 0) continue;
      const at::Tensor& target = r == getRank() ? out : block;
      c10d::ReduceOptions to_rank;
      to_rank.rootRank = r;
      to_rank.reduceOp = op;
      to_rank.timeout = options.timeout;
      std::vector<at::Tensor> list{target};
      reduce(list, to_rank);
    }
    const WorkPtr work = endCoalescing();
    return work ? work : WorkPtr(done());
  }

  WorkPtr gather_v(const at::Tensor& output, const at::Tensor& input, const Sizes& sizes, int root,
                   CallLimit limit) override {
    std::vector<Message> messages{{Message::Kind::send, input, root}};
    if (getRank() == root) {
      const auto blocks = rows(output, sizes);
      for (int r = 0; r < getSize(); ++r)
        messages.push_back({Message::Kind::receive, blocks[static_cast<std::size_t>(r)], r});
    }
    return exchange(messages, limit);
  }

  WorkPtr scatter_v(const at::Tensor& output, const at::Tensor& input, const Sizes& sizes, int root,
                    CallLimit limit) override {
    std::vector<Message> messages{{Message::Kind::receive, output, root}};
    if (getRank() == root) {
      const auto blocks = rows(input, sizes);
      for (int r = 0; r < getSize(); ++r)
        messages.push_back({Message::Kind::send, blocks[static_cast<std::size_t>(r)], r});
    }
    return exchange(messages, limit);
  }

  WorkPtr exchange(const std::vector<Message>& messages, CallLimit) override {
    // Messages to this rank itself are copies, matched in list order; empty messages are left out
    // on both sides.
    std::vector<at::Tensor> to_self, from_self;
    bool any = false;
    for (const auto& message : messages) {
      if (message.tensor.numel() == 0) continue;
      if (message.peer == getRank())
        (message.kind == Message::Kind::send ? to_self : from_self).push_back(message.tensor);
      else
        any = true;
    }
    if (to_self.size() != from_self.size())
      throw InvalidArgument(concat("exchange: ", to_self.size(),
                                   " messages to this rank itself and ", from_self.size(),
                                   " from it; their numbers must agree"));
    for (std::size_t i = 0; i < to_self.size(); ++i) {
      if (to_self[i].numel() != from_self[i].numel())
        throw InvalidArgument(
            "exchange: a message to this rank itself has another size than its receiver");
      from_self[i].copy_(to_self[i].view(from_self[i].sizes()), /*non_blocking=*/true);
    }
    if (!any) return done();
    startCoalescing();
    for (const auto& message : messages) {
      if (message.peer == getRank() || message.tensor.numel() == 0) continue;
      std::vector<at::Tensor> list{message.tensor};
      if (message.kind == Message::Kind::send)
        send(list, message.peer, 0);
      else
        recv(list, message.peer, 0);
    }
    const WorkPtr work = endCoalescing();
    return work ? work : WorkPtr(done());
  }

  bool reduces(c10::ScalarType dtype, ReduceOp::Kind op) const override {
    switch (dtype) {
      case c10::ScalarType::Float:
      case c10::ScalarType::Double:
        return op != ReduceOp::Kind::min && op != ReduceOp::Kind::max;
      case c10::ScalarType::Char:
      case c10::ScalarType::Byte:
      case c10::ScalarType::Int:
      case c10::ScalarType::Long:
        return op != ReduceOp::Kind::avg && op != ReduceOp::Kind::premultiplied;
      default:
        return false;
    }
  }

  bool moves(c10::ScalarType dtype) const override {
    return dtype == c10::ScalarType::BFloat16 || every_library_moves(dtype);
  }

 private:
  template <class Options>
  static void set(Options& options, CallLimit limit) {
    if (limit.timeout.count() > 0) options.timeout = limit.timeout;
  }

  WorkPtr padded_gather(const at::Tensor& output, const at::Tensor& input, const Sizes& sizes,
                        std::int64_t largest, const c10d::AllgatherOptions& options) {
    auto shape = output.sizes().vec();
    shape[0] = largest;
    at::Tensor mine = at::empty(shape, output.options());
    mine.narrow(0, 0, input.size(0)).copy_(input, /*non_blocking=*/true);
    shape[0] = largest * getSize();
    at::Tensor all = at::empty(shape, output.options());
    const WorkPtr work = _allgather_base(all, mine, options);
    work->wait();  // The stream waits, not the host.
    const auto blocks = rows(output, sizes);
    for (int r = 0; r < getSize(); ++r)
      blocks[static_cast<std::size_t>(r)].copy_(
          all.narrow(0, r * largest, sizes[static_cast<std::size_t>(r)]), /*non_blocking=*/true);
    return work;
  }
};

}  // namespace

}  // namespace tessera::detail

// Both sides are C++ of one build; the names alone are C's.

extern "C" c10::intrusive_ptr<c10d::Backend> tessera_nccl_make(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  return c10::make_intrusive<tessera::detail::NcclBackend>(store, rank, size, options);
}

extern "C" std::string tessera_nccl_version() {
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess) return "unknown";
  return tessera::concat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

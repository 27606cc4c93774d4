// libtessera_nccl.so: c10d's NCCL backend with uneven collectives and batched messages.

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <algorithm>
#include <cstddef>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/comm/backends/nccl/nccl_part.h"
#include "tessera/comm/group/detail/abilities.h"
#include "tessera/comm/group/detail/uneven.h"

namespace tessera::detail {

namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Sizes = std::vector<std::int64_t>;

/// Padding to the largest block is one kernel; it is used while it moves at most this much more
/// than needed,
constexpr double kPaddingFactor = 1.25;
/// or while all of it is small.
constexpr std::int64_t kSmallBytes = 64 << 10;

/// The work of a call that had nothing to do.
class DoneWork : public c10d::Work {
 public:
  DoneWork() : c10d::Work(-1, c10d::OpType::UNKNOWN) { finish(); }
  bool wait(std::chrono::milliseconds = kNoTimeout) override { return true; }
  void synchronize() override {}
};

WorkPtr done() { return c10::make_intrusive<DoneWork>(); }

/// NCCL's work together with what was done on the current stream after or beside it, such as
/// copies: a wait is for both, also on another stream.
class WorkAndCopies : public c10d::Work {
 public:
  explicit WorkAndCopies(WorkPtr work)
      : c10d::Work(-1, c10d::OpType::UNKNOWN), work_(std::move(work)) {
    copied_.record();
  }
  bool isCompleted() override { return work_->isCompleted() && copied_.query(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    const bool done = work_->wait(timeout);
    copied_.block(c10::cuda::getCurrentCUDAStream());
    return done;
  }
  void synchronize() override { wait(); }
  void abort() override { work_->abort(); }

 private:
  WorkPtr work_;
  at::cuda::CUDAEvent copied_;
};

/// Calls between the constructor and end() become one. A batch that is left by an exception is
/// closed: otherwise every later NCCL call of this thread, of any group, would join it and wait.
class Batch {
 public:
  explicit Batch(c10d::Backend& backend) : backend_(backend) { backend_.startCoalescing(); }
  ~Batch() {
    if (ended_) return;
    try {
      backend_.endCoalescing();
    } catch (...) {  // the first error is being thrown
    }
  }
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;
  WorkPtr end() {
    ended_ = true;
    const WorkPtr work = backend_.endCoalescing();
    return work ? work : done();
  }

 private:
  c10d::Backend& backend_;
  bool ended_ = false;
};

std::vector<at::Tensor> rows(const at::Tensor& whole, const Sizes& sizes) {
  return whole.split_with_sizes(sizes);
}

bool nccl_reduces(c10::ScalarType dtype, ReduceOp::Kind op) {
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

bool nccl_moves(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::BFloat16 || every_library_moves(dtype);
}

class NcclBackend final : public c10d::ProcessGroupNCCL, public UnevenBackend {
 public:
  NcclBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
              c10::intrusive_ptr<Options> options)
      : c10d::ProcessGroupNCCL(store, rank, size, std::move(options)) {
    // Limits are the group's: c10d's would end the process.
    asyncErrorHandling_ = c10d::NoHandling;
  }

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
    // One reduction to each rank that gets rows.
    const auto blocks = rows(input, sizes);
    // NCCL reduces in place on the root: its rows are copied to the output first, so that the input
    // keeps its values.
    out.copy_(blocks[static_cast<std::size_t>(getRank())], /*non_blocking=*/true);
    if (input.numel() == 0) return done();
    Batch batch(*this);
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
    return batch.end();
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
    if (!any) return copied_here(done(), !to_self.empty());
    Batch batch(*this);
    for (const auto& message : messages) {
      if (message.peer == getRank() || message.tensor.numel() == 0) continue;
      std::vector<at::Tensor> list{message.tensor};
      if (message.kind == Message::Kind::send)
        send(list, message.peer, 0);
      else
        recv(list, message.peer, 0);
    }
    return copied_here(batch.end(), !to_self.empty());
  }

  Abilities abilities() override {
    Abilities result;
    result.reduces = nccl_reduces;
    result.moves = nccl_moves;
    result.keeps_inputs = true;
    result.uneven = this;
    result.aborts_slowly = true;
    return result;
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
    return copied_here(work, true);
  }

  static WorkPtr copied_here(WorkPtr work, bool copied) {
    if (copied) return c10::make_intrusive<WorkAndCopies>(std::move(work));
    return work;
  }
};

}  // namespace

}  // namespace tessera::detail

// Both sides are C++ of one build; only the names are C's.

extern "C" std::string tessera_nccl_version() {
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess) return "unknown";
  return tessera::concat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

extern "C" c10::intrusive_ptr<c10d::Backend> tessera_nccl_make(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout, c10::Device device) {
  if (device.has_index()) c10::cuda::set_device(device.index());
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  return c10::make_intrusive<tessera::detail::NcclBackend>(store, rank, size, options);
}

// The options contain a structure of NCCL's, whose size differs between its versions. The
// constructor in libtorch_cuda is not inline: it writes the structure at its own size, with that
// size in front. Here it writes into memory with room to spare.
extern "C" std::string tessera_nccl_problem() {
  using Options = c10d::ProcessGroupNCCL::Options;
  constexpr std::size_t kRoom = 8 * sizeof(Options);
  // Never destroyed: its destructor is inline and assumes the size of this build.
  static auto* const place = static_cast<std::byte*>(::operator new(kRoom));
  std::fill_n(place, kRoom, std::byte{0});
  const auto* options = new (place) Options(false);
  const std::size_t theirs = options->config.size;
  int version = 0;
  const bool known = ncclGetVersion(&version) == ncclSuccess;
  if (theirs != sizeof(ncclConfig_t))
    return tessera::concat(
        "libtessera_nccl.so was built with nccl.h of NCCL ", NCCL_MAJOR, ".", NCCL_MINOR, ".",
        NCCL_PATCH, ", whose settings take ", sizeof(ncclConfig_t),
        " bytes, and libtorch with one "
        "whose settings take ",
        theirs,
        ". Configure again with the nccl.h that belongs to this "
        "libtorch (-DTESSERA_NCCL_HEADER=<folder>; the torch wheel's is nvidia/nccl/include beside "
        "torch)");
  if (known && version < NCCL_VERSION_CODE)
    return tessera::concat("libtessera_nccl.so was built for NCCL ", NCCL_MAJOR, ".", NCCL_MINOR,
                           ".", NCCL_PATCH, ", and the library that was loaded is older (",
                           tessera_nccl_version(),
                           "). Put the newer one first in "
                           "LD_LIBRARY_PATH, or build with the older header");
  return {};
}

// libtessera_nccl.so: c10d's NCCL backend as a transport, with uneven collectives and batched
// messages.

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <algorithm>
#include <cstddef>
#include <new>
#include <utility>
#include <vector>

#include "tessera/base/pinned.h"
#include "tessera/base/text.h"
#include "tessera/comm/backends/flat.h"
#include "tessera/comm/backends/nccl/nccl_part.h"
#include "tessera/comm/backends/of_c10d.h"
#include "tessera/comm/group/detail/abilities.h"
#include "tessera/comm/group/detail/reduction.h"

namespace tessera::detail {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// Padding to the largest block is one kernel; it is used while it moves at most this much more
/// than needed,
constexpr double kPaddingFactor = 1.25;
/// or while all of it is small.
constexpr std::int64_t kSmallBytes = 64 << 10;

/// NCCL's work together with what was done on the current stream after or beside it, such as
/// copies: a wait is for both, also on another stream.
class WorkAndCopies : public c10d::Work {
 public:
  explicit WorkAndCopies(WorkPtr work)
      : c10d::Work(-1, c10d::OpType::UNKNOWN), work_(std::move(work)) {
    copied_.record();
  }
  bool isCompleted() override { return (!work_ || work_->isCompleted()) && copied_.query(); }
  bool isSuccess() const override { return !work_ || work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_ ? work_->exception() : nullptr; }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    const bool done = !work_ || work_->wait(timeout);
    copied_.block(c10::cuda::getCurrentCUDAStream());
    return done;
  }
  void synchronize() override { wait(); }
  void abort() override {
    if (work_) work_->abort();
  }

 private:
  /// Null if there were copies alone.
  WorkPtr work_;
  at::cuda::CUDAEvent copied_;
};

/// Calls between the constructor and end() become one. A batch that is left by an exception is
/// closed: otherwise every later NCCL call of this thread, of any group, would join it and wait.
class Batch : Pinned {
 public:
  explicit Batch(c10d::Backend& backend) : backend_(backend) { backend_.startCoalescing(); }
  ~Batch() {
    if (ended_) return;
    try {
      backend_.endCoalescing();
    } catch (...) {  // the first error is being thrown
    }
  }
  WorkPtr end() {
    ended_ = true;
    return backend_.endCoalescing();
  }

 private:
  c10d::Backend& backend_;
  bool ended_ = false;
};

bool nccl_reduces(c10::ScalarType dtype, ReduceOp::Kind op) {
  using enum c10::ScalarType;
  using Kind = ReduceOp::Kind;
  if (op == Kind::min || op == Kind::max) return is_one_of(dtype, {Char, Byte, Int, Long});
  if (op == Kind::avg || op == Kind::premultiplied) return is_one_of(dtype, {Float, Double});
  return is_one_of(dtype, {Float, Double, Char, Byte, Int, Long});
}

bool nccl_moves(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::BFloat16 || every_library_moves(dtype);
}

class NcclBackend final : public c10d::ProcessGroupNCCL {
 public:
  NcclBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
              c10::intrusive_ptr<Options> options)
      : c10d::ProcessGroupNCCL(store, rank, size, std::move(options)) {
    // Limits are the group's: c10d's would end the process.
    asyncErrorHandling_ = c10d::NoHandling;
  }
};

class NcclTransport final : public OfC10d {
 public:
  using OfC10d::OfC10d;
  bool batches(int) const override { return true; }

  void reduce(TransportCall& call) override {
    add(call, reduced(call.output, call.root, call.op, call.timeout));
  }

  void all_gather(TransportCall& call) override {
    const Counts& counts = call.counts;
    at::Tensor out = call.output, in = call.input;
    const auto how = options<c10d::AllgatherOptions>(call);
    const std::int64_t largest = *std::ranges::max_element(counts),
                       smallest = *std::ranges::min_element(counts);
    if (largest == smallest) return add(call, backend_->_allgather_base(out, in, how));
    const std::int64_t padded = largest * size_;
    if (padded * static_cast<std::int64_t>(out.element_size()) <= kSmallBytes ||
        static_cast<double>(padded) <= kPaddingFactor * static_cast<double>(out.numel()))
      return padded_gather(call, largest, how);
    auto blocks = split_flat(out, counts);
    if (smallest > 0 && 2 * largest > out.numel() && size_ > 2) {
      std::vector<Tensors> lists{blocks};
      Tensors inputs{in};
      // Unequal blocks: a group of broadcasts.
      return add(call, backend_->allgather(lists, inputs, how));
    }
    for (int r = 0; r < size_; ++r) {
      call.messages.push_back({Message::Kind::send, in, r});
      call.messages.push_back({Message::Kind::receive, blocks[r], r});
    }
    exchange(call);
  }

  void reduce_scatter(TransportCall& call) override {
    if (all_equal(call.counts)) {
      auto how = options<c10d::ReduceScatterOptions>(call);
      how.reduceOp = to_c10d(call.op.kind, call.op.factor);
      at::Tensor out = call.output, in = call.input;
      return add(call, backend_->_reduce_scatter_base(out, in, how));
    }
    // One reduction to each rank that gets rows. NCCL reduces in place on the root: its rows are
    // copied to the output first, so that the input keeps its values.
    const auto blocks = split_flat(call.input, call.counts);
    call.output.copy_(blocks[me()], /*non_blocking=*/true);
    if (call.input.numel() == 0) return;
    Batch batch(*backend_);
    for (int r = 0; r < size_; ++r) {
      const at::Tensor& block = blocks[r];
      if (block.numel() > 0) reduced(r == rank_ ? call.output : block, r, call.op, call.timeout);
    }
    add(call, batch.end());
  }

  void gather(TransportCall& call) override { rooted(call, call.output, call.input, true); }

  void scatter(TransportCall& call) override { rooted(call, call.input, call.output, false); }

  void all_to_all(TransportCall& call) override {
    OfC10d::all_to_all(call, call.output, call.counts, call.input, call.input_counts);
  }

  void exchange(TransportCall& call) override {
    // Messages to this rank itself are copies, matched in list order; empty messages are left out
    // on both sides.
    Tensors to_self, from_self;
    bool any = false;
    for (const auto& message : call.messages) {
      if (message.tensor.numel() == 0) continue;
      if (message.peer == rank_)
        (message.kind == Message::Kind::send ? to_self : from_self).push_back(message.tensor);
      else
        any = true;
    }
    if (to_self.size() != from_self.size())
      throw InvalidArgument("exchange: ", to_self.size(), " messages to this rank itself and ",
                            from_self.size(), " from it; their numbers must agree");
    for (std::size_t i = 0; i < to_self.size(); ++i) {
      if (to_self[i].numel() != from_self[i].numel())
        throw InvalidArgument(
            "exchange: a message to this rank itself has another size than its receiver");
      from_self[i].copy_(to_self[i].view(from_self[i].sizes()), /*non_blocking=*/true);
    }
    WorkPtr work;
    if (any) {
      Batch batch(*backend_);
      for (const auto& message : call.messages) {
        if (message.peer == rank_ || message.tensor.numel() == 0) continue;
        Tensors list{message.tensor};
        if (message.kind == Message::Kind::send)
          backend_->send(list, message.peer, 0);
        else
          backend_->recv(list, message.peer, 0);
      }
      work = batch.end();
    }
    if (!to_self.empty()) work = c10::make_intrusive<WorkAndCopies>(std::move(work));
    add(call, std::move(work));
  }

 private:
  void rooted(TransportCall& call, const at::Tensor& whole, const at::Tensor& part, bool gathers) {
    using Kind = Message::Kind;
    call.messages = {{gathers ? Kind::send : Kind::receive, part, call.root}};
    if (rank_ == call.root) {
      const auto blocks = split_flat(whole, call.counts);
      for (int r = 0; r < size_; ++r)
        call.messages.push_back({gathers ? Kind::receive : Kind::send, blocks[r], r});
    }
    exchange(call);
  }

  WorkPtr reduced(const at::Tensor& tensor, int root, ReduceOp op,
                  std::chrono::milliseconds timeout) {
    c10d::ReduceOptions how;
    how.rootRank = root;
    how.reduceOp = to_c10d(op.kind, op.factor);
    how.timeout = timeout;
    Tensors list{tensor};
    return backend_->reduce(list, how);
  }

  void padded_gather(TransportCall& call, std::int64_t largest, const c10d::AllgatherOptions& how) {
    at::Tensor mine = at::empty({largest}, call.output.options());
    mine.narrow(0, 0, call.input.numel()).copy_(call.input, /*non_blocking=*/true);
    at::Tensor all = at::empty({largest * size_}, call.output.options());
    const WorkPtr work = backend_->_allgather_base(all, mine, how);
    work->wait();  // The stream waits, not the host.
    const auto blocks = split_flat(call.output, call.counts);
    for (int r = 0; r < size_; ++r)
      blocks[r].copy_(all.narrow(0, r * largest, call.counts[r]),
                      /*non_blocking=*/true);
    add(call, c10::make_intrusive<WorkAndCopies>(work));
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

extern "C" std::shared_ptr<tessera::detail::Transport> tessera_nccl_make(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout, c10::Device device) {
  if (device.has_index()) c10::cuda::set_device(device.index());
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  tessera::detail::Abilities can;
  can.reduces = tessera::detail::nccl_reduces;
  can.moves = tessera::detail::nccl_moves;
  can.aborts_slowly = true;
  return std::make_shared<tessera::detail::NcclTransport>(
      c10::make_intrusive<tessera::detail::NcclBackend>(store, rank, size, options), timeout, can);
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

#pragma once
// OfC10d: a transport over any backend of c10d, such as Gloo. What c10d has not is composed; for n
// ranks, S elements in total, and M elements in the largest shard:
//   uneven all-gather    Of two ranks, each shard is sent straight to its place. Of more, each is
//                        broadcast by its rank if ceil(log2 n) S < (n - 1) M, else one all-to-all
//                        in which every rank sends its shard n times: the busiest sender bounds the
//                        latter, the number of tree levels the former (if one rank holds
//                        everything: 2 S against 3 S on 4 ranks).
//   uneven gather, scatter   One all-to-all with zero counts but for the root's.
//   reduce               Of two ranks, one message and a sum here; of more, on a copy, since Gloo
//                        works in place on every rank.
//   reduce-scatter       Transport::compose_reduce_scatter().
//   all-to-all with counts that were not compared   One message for each pair of ranks with data,
//                        which is not delivered where its two ends differ.
//   exchange             A send or receive for each message.

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/backends/transport.h"

namespace tessera::detail {

class OfC10d : public Transport {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Counts = TransportCall::Counts;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  /// `sign`: null, or where the backend is told TransportCall::sign of its next collective.
  OfC10d(c10::intrusive_ptr<c10d::Backend> backend, std::chrono::milliseconds timeout,
         Abilities abilities, std::uint64_t* sign = nullptr);

  const char* name() const override { return name_.c_str(); }
  Abilities abilities() override { return abilities_; }
  void broadcast(TransportCall& call) override;
  void all_reduce(TransportCall& call) override;
  void reduce(TransportCall& call) override;
  void all_gather(TransportCall& call) override;
  void reduce_scatter(TransportCall& call) override { compose_reduce_scatter(call); }
  void gather(TransportCall& call) override;
  void scatter(TransportCall& call) override;
  void all_to_all(TransportCall& call) override;
  void exchange(TransportCall& call) override;
  void barrier(TransportCall& call) override;
  void abort() override { backend_->abort(); }
  void shutdown() override { backend_->shutdown(); }
  bool batches(int) const override { return false; }
  c10::intrusive_ptr<c10d::Backend> backend() override { return backend_; }

 protected:
  /// c10d's options for a call, which becomes the next one.
  template <class Options>
  Options options(const TransportCall& call) {
    if (sign_) *sign_ = call.sign;
    Options result;
    result.timeout = call.timeout;
    result.asyncOp = !call.blocking;
    return result;
  }
  static void add(TransportCall& call, WorkPtr work) {
    if (work) call.works.push_back({std::move(work)});
  }
  void all_to_all(TransportCall& call, at::Tensor output, Counts output_counts, at::Tensor input,
                  Counts input_counts);
  void all_to_all_pairs(TransportCall& call);
  template <class Options>
  void rooted(TransportCall& call, bool gathers);

  const c10::intrusive_ptr<c10d::Backend> backend_;
  const std::string name_;
  const Abilities abilities_;
  std::uint64_t* const sign_;
};

}  // namespace tessera::detail

#include "tessera/comm/backends/of_c10d.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>

#include "tessera/comm/backends/flat.h"
#include "tessera/comm/group/detail/reduction.h"

namespace tessera::detail {

OfC10d::OfC10d(c10::intrusive_ptr<c10d::Backend> backend, std::chrono::milliseconds timeout,
               Abilities abilities, std::uint64_t* sign)
    : Transport(backend->getRank(), backend->getSize(), timeout),
      backend_(std::move(backend)),
      name_(backend_->getBackendName()),
      abilities_(std::move(abilities)),
      sign_(sign) {}

void OfC10d::broadcast(TransportCall& call) {
  auto how = options<c10d::BroadcastOptions>(call);
  how.rootRank = call.root;
  Tensors tensors{call.output};
  add(call, backend_->broadcast(tensors, how));
}

void OfC10d::all_reduce(TransportCall& call) {
  auto how = options<c10d::AllreduceOptions>(call);
  how.reduceOp = to_c10d(call.op.kind, call.op.factor);
  Tensors tensors{call.output};
  add(call, backend_->allreduce(tensors, how));
}

void OfC10d::reduce(TransportCall& call) {
  const bool is_root = rank_ == call.root;
  if (size_ > 2) {
    auto how = options<c10d::ReduceOptions>(call);
    how.reduceOp = to_c10d(call.op.kind, call.op.factor);
    how.rootRank = call.root;
    Tensors tensors{is_root ? call.output : call.output.clone()};
    call.kept.push_back(tensors.front());
    return add(call, backend_->reduce(tensors, how));
  }
  const at::Tensor data = flat(call.output), nothing = at::empty({0}, data.options());
  const Counts none(2, 0), all = only_for(1 - rank_, data.numel(), 2);
  if (!is_root) return all_to_all(call, nothing, none, data, all);
  const at::Tensor other = at::empty_like(data);
  all_to_all(call, other, all, nothing, none);
  call.then = [data, other, first = rank_ == 0, kind = call.op.kind] {
    reduce_in_order(data, first ? Tensors{data, other} : Tensors{other, data}, kind);
  };
}

void OfC10d::all_gather(TransportCall& call) {
  const auto& counts = call.counts;
  at::Tensor output = call.output, input = call.input;
  // Gloo's own needs the memory of the result twice.
  if (all_equal(counts) && size_ != 2)
    return add(call,
               backend_->_allgather_base(output, input, options<c10d::AllgatherOptions>(call)));
  const auto parts = split_flat(output, counts);
  const std::int64_t largest = *std::ranges::max_element(counts),
                     levels = std::bit_width(static_cast<unsigned>(size_ - 1));
  if (size_ == 2) {
    const int peer = 1 - rank_;
    if (input.numel() > 0) parts[me()].copy_(input);
    return all_to_all(call, parts[peer], only_for(peer, counts[peer], 2), input,
                      only_for(peer, input.numel(), 2));
  }
  if (levels * output.numel() < (size_ - 1) * largest) {
    if (input.numel() > 0) parts[me()].copy_(input);
    for (int r = 0; r < size_; ++r) {
      if (counts[r] == 0) continue;
      auto how = options<c10d::BroadcastOptions>(call);
      how.rootRank = r;
      Tensors tensors{parts[r]};
      add(call, backend_->broadcast(tensors, how));
    }
    return;
  }
  const at::Tensor copies = input.repeat({size_});
  call.kept.push_back(copies);
  all_to_all(call, output, counts, copies, Counts(size_, input.numel()));
}

void OfC10d::gather(TransportCall& call) { rooted<c10d::GatherOptions>(call, true); }

void OfC10d::scatter(TransportCall& call) { rooted<c10d::ScatterOptions>(call, false); }

template <class Options>
void OfC10d::rooted(TransportCall& call, bool gathers) {
  if (!all_equal(call.counts)) {
    rooted_as_all_to_all(call, rank_, gathers);
    return all_to_all(call, call.output, call.counts, call.input, call.input_counts);
  }
  auto how = options<Options>(call);
  how.rootRank = call.root;
  std::vector<Tensors> wholes;
  if (rank_ == call.root)
    wholes.push_back(split_flat(gathers ? call.output : call.input, call.counts));
  Tensors parts{gathers ? call.input : call.output};
  if constexpr (std::is_same_v<Options, c10d::GatherOptions>)
    add(call, backend_->gather(wholes, parts, how));
  else
    add(call, backend_->scatter(parts, wholes, how));
}

void OfC10d::all_to_all(TransportCall& call) {
  if (!call.agreed) return all_to_all_pairs(call);
  all_to_all(call, call.output, call.counts, call.input, call.input_counts);
}

void OfC10d::all_to_all(TransportCall& call, at::Tensor output, Counts output_counts,
                        at::Tensor input, Counts input_counts) {
  add(call, backend_->alltoall_base(output, input, output_counts, input_counts,
                                    options<c10d::AllToAllOptions>(call)));
}

void OfC10d::all_to_all_pairs(TransportCall& call) {
  const auto to = split_flat(call.input, call.input_counts),
             from = split_flat(call.output, call.counts);
  if (to[me()].numel() > 0) from[me()].copy_(to[me()]);
  for (const bool sends : {false, true})
    for (int step = 1; step < size_; ++step) {
      const int peer = sends ? (rank_ + step) % size_ : (rank_ - step + size_) % size_;
      Tensors part{sends ? to[peer] : from[peer]};
      if (part[0].numel() == 0) continue;
      const MessageCard card{.number = call.number,
                             .peer = peer,
                             .sends = sends,
                             .of_call = true,
                             .call = call.sign,
                             .dtype = part[0].scalar_type(),
                             .elements = part[0].numel()};
      const int tag = card.tag();
      call.works.push_back(
          {sends ? backend_->send(part, peer, tag) : backend_->recv(part, peer, tag),
           Wait::at_one_go, card});
    }
}

void OfC10d::exchange(TransportCall& call) {
  for (const auto& m : call.messages) {
    Tensors tensors{m.tensor};
    call.works.push_back({m.kind == Message::Kind::send ? backend_->send(tensors, m.peer, call.tag)
                          : m.peer == TransportCall::kAnyRank
                              ? backend_->recvAnysource(tensors, call.tag)
                              : backend_->recv(tensors, m.peer, call.tag),
                          Wait::at_one_go});
  }
}

void OfC10d::barrier(TransportCall& call) {
  add(call, backend_->barrier(options<c10d::BarrierOptions>(call)));
}

void rooted_as_all_to_all(TransportCall& call, int rank, bool gathers) {
  const auto ranks = call.counts.size();
  auto &whole = gathers ? call.output : call.input, &part = gathers ? call.input : call.output;
  TransportCall::Counts of_whole(ranks, 0), of_part = only_for(call.root, part.numel(), ranks);
  if (rank == call.root)
    of_whole = call.counts;
  else
    whole = part.new_empty({0});
  call.counts = gathers ? of_whole : of_part;
  call.input_counts = gathers ? of_part : of_whole;
}

void Transport::compose_reduce_scatter(TransportCall& call) {
  const at::Tensor output = call.output;
  const auto parts = split_flat(call.input, call.counts);
  const auto item = static_cast<std::int64_t>(output.element_size());
  const auto kind = call.op.kind;
  if (size_ == 2) {
    // Without scratch: what the other rank sends lands in the output, and this rank's elements are
    // added where they lie.
    const auto mine = parts[me()], theirs = parts[1 - me()];
    call.output = flat_bytes(output);
    call.input = flat_bytes(theirs);
    call.counts = only_for(1 - rank_, output.numel() * item, 2);
    call.input_counts = only_for(1 - rank_, theirs.numel() * item, 2);
    call.then = [output, mine, first = rank_ == 0, kind] {
      if (output.numel() > 0)
        reduce_in_order(output, first ? std::vector{mine, output} : std::vector{output, mine},
                        kind);
    };
  } else {
    const auto scratch = at::empty({size_ * output.numel()}, output.options());
    call.output = flat_bytes(scratch);
    call.input_counts = times(call.counts, item);
    call.input = flat_bytes(call.input);
    call.counts.assign(size_, output.numel() * item);
    call.then = [output, scratch, n = size_, kind] {
      if (output.numel() > 0)
        reduce_in_order(output, split_flat(scratch, TransportCall::Counts(n, output.numel())),
                        kind);
    };
  }
  call.kept.push_back(call.input);
  call.kept.push_back(call.output);
  all_to_all(call);
}

}  // namespace tessera::detail

#include "tessera/comm/backends/hosts/hosts_transport.h"

#include <ATen/ATen.h>

#include <stdexcept>
#include <utility>

#include "tessera/base/deadline.h"
#include "tessera/base/text.h"
#include "tessera/comm/backends/flat.h"

namespace tessera::detail {
namespace {

// The limits of the steps begin later than that of the call, which is the one that counts: its
// error names the ranks that are missing.
constexpr std::chrono::milliseconds kStepSlack{2000};

at::Tensor bytes_if_any(const at::Tensor& tensor) {
  return tensor.defined() ? flat_bytes(tensor) : tensor;
}

}  // namespace

HostsTransport::HostsTransport(std::shared_ptr<HostLinks> links, int rank,
                               std::chrono::milliseconds timeout, bool tells)
    : Transport(rank, links->map().size(), timeout),
      links_(std::move(links)),
      worker_(std::make_shared<HostsWorker>()),
      tells_(tells) {}

Abilities HostsTransport::abilities() {
  Abilities result;  // each host's result is rounded, so the steps do what Gloo does exactly
  result.signs = result.ends_messages = true;
  return result;
}

void HostsTransport::post(TransportCall& given, std::function<void(HostLinks&, HostCall&)> body) {
  HostCall call;
  call.sign = given.sign;
  call.limit = bounded_limit(given.timeout + kStepSlack);
  auto work = c10::make_intrusive<HostsWork>(
      rank_, given.type, given.results,
      [links = links_, call, tells = tells_, body = std::move(body),
       finish = std::move(given.finish)]() mutable {
        if (links->aborted()) throw std::runtime_error("connection closed: the group was aborted");
        try {
          body(*links, call);
          if (finish) finish();
        } catch (...) {
          // No watch tells the other ranks: those of this host see it in memory, and the leaders of
          // the others that the connections are closed.
          if (tells) links->abort();
          throw;
        }
      });
  worker_->post(work);
  given.works.push_back({std::move(work)});
}

// ---- collectives ----

void HostsTransport::broadcast(TransportCall& given) {
  post(given,
       [data = flat_bytes(given.output), root = given.root](HostLinks& links, HostCall& call) {
         if (data.numel() > 0) links.broadcast(call, data, root);
       });
}

void HostsTransport::all_reduce(TransportCall& given) {
  post(given, [data = flat(given.output), op = given.op](HostLinks& links, HostCall& call) {
    if (data.numel() > 0) links.all_reduce(call, data, op);
  });
}

void HostsTransport::reduce(TransportCall& given) {
  post(given, [data = flat(given.output), op = given.op, root = given.root](HostLinks& links,
                                                                            HostCall& call) {
    if (data.numel() > 0) links.reduce(call, data, op, root);
  });
}

void HostsTransport::all_gather(TransportCall& given) {
  const auto item = static_cast<std::int64_t>(given.input.element_size());
  post(given, [to = flat_bytes(given.output), from = flat_bytes(given.input),
               counts = times(given.counts, item)](HostLinks& links, HostCall& call) {
    if (to.numel() > 0) links.all_gather(call, to, from, counts);
  });
}

void HostsTransport::reduce_scatter(TransportCall& given) {
  post(given, [to = flat(given.output), from = flat(given.input), counts = given.counts,
               op = given.op](HostLinks& links, HostCall& call) {
    if (from.numel() > 0) links.reduce_scatter(call, to, from, counts, op);
  });
}

void HostsTransport::gather(TransportCall& given) {
  const auto item = static_cast<std::int64_t>(given.input.element_size());
  post(given,
       [to = bytes_if_any(given.output), from = flat_bytes(given.input),
        counts = times(given.counts, item), root = given.root](HostLinks& links, HostCall& call) {
         if (total_of(counts) > 0) links.gather(call, to, from, counts, root);
       });
}

void HostsTransport::scatter(TransportCall& given) {
  const auto item = static_cast<std::int64_t>(given.output.element_size());
  post(given,
       [to = flat_bytes(given.output), from = bytes_if_any(given.input),
        counts = times(given.counts, item), root = given.root](HostLinks& links, HostCall& call) {
         if (total_of(counts) > 0) links.scatter(call, to, from, counts, root);
       });
}

void HostsTransport::all_to_all(TransportCall& given) {
  const auto item = static_cast<std::int64_t>(given.output.element_size());
  post(given, [to = flat_bytes(given.output), out = times(given.counts, item),
               from = flat_bytes(given.input), in = times(given.input_counts, item)](
                  HostLinks& links, HostCall& call) { links.all_to_all(call, to, out, from, in); });
}

void HostsTransport::barrier(TransportCall& given) {
  post(given, [](HostLinks& links, HostCall& call) { links.barrier(call); });
}

// ---- messages ----

void HostsTransport::exchange(TransportCall& call) {
  const int peer = call.messages.front().peer;
  if (peer == TransportCall::kAnyRank) {
    // Of two ways on which a message may come, one would take it and the other wait for ever.
    if (links_->map().count() < size_)
      throw NotAvailable(
          "receive from any rank: some ranks of the group share a host and others do not, so that "
          "messages come through memory or through the network; name the sender");
    return links_->wide().exchange(call);
  }
  if (!links_->is_near(peer)) return links_->wide().exchange(call);
  if (!links_->near()) throw InvalidArgument("a rank does not send messages to itself");
  for (auto& m : call.messages) m.peer = links_->map().place_of[static_cast<std::size_t>(m.peer)];
  links_->near()->exchange(call);
}

}  // namespace tessera::detail

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

at::Tensor flat_if_any(const at::Tensor& tensor) {
  return tensor.defined() ? flat(tensor) : tensor;
}

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

void HostsTransport::post(TransportCall& given, Function function) {
  post(given, {flat_if_any(given.output), flat_if_any(given.input), given.counts, {}}, function);
}

void HostsTransport::move(TransportCall& given, Function function) {
  const auto& any = given.output.defined() ? given.output : given.input;
  const auto item = static_cast<std::int64_t>(any.element_size());
  post(given,
       {bytes_if_any(given.output), bytes_if_any(given.input), times(given.counts, item),
        times(given.input_counts, item)},
       function);
}

void HostsTransport::post(TransportCall& given, HostCall call, Function function) {
  call.op = given.op;
  call.root = given.root;
  call.sign = given.sign;
  call.limit = bounded_limit(given.timeout + kStepSlack);
  auto work = c10::make_intrusive<HostsWork>(
      rank_, given.type, given.results,
      [links = links_, call = std::move(call), tells = tells_, function,
       finish = std::move(given.finish)]() mutable {
        if (links->aborted()) throw std::runtime_error("connection closed: the group was aborted");
        try {
          (links.get()->*function)(call);
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

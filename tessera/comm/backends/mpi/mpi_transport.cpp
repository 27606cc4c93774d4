#include "tessera/comm/backends/mpi/mpi_transport.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <limits>
#include <utility>

#include "tessera/base/hash.h"
#include "tessera/comm/backends/mpi/mpi_attempt.h"

namespace tessera::detail {

MpiTransport::MpiTransport(std::shared_ptr<MpiComm> comm, const MpiBackendOptions& options)
    : Transport(comm->rank(), comm->size(), options.timeout),
      comm_(std::move(comm)),
      max_count_(options.max_count),
      sent_(comm_->ranks().size()),
      received_(comm_->ranks().size()) {
  if (max_count_ < 1 || max_count_ > std::numeric_limits<int>::max())
    throw InvalidArgument("max_count of an MPI group is ", max_count_, "; it must be 1 to ",
                          std::numeric_limits<int>::max());
  if (timeout_.count() <= 0)
    throw InvalidArgument("the time limit of an MPI group is ", timeout_.count(),
                          " ms; it must be positive");
}

Abilities MpiTransport::abilities() {
  Abilities result;
  result.reduces = mpi_reduces;
  result.moves = moves_every_dtype;
  result.reduces_bits = result.signs = result.gathers_any_sizes = true;
  result.ends_collectives = result.ends_messages = true;
  result.any_thread = false;
  return result;
}

void MpiTransport::run(const char* name, TransportCall& given, CallCard card,
                       const std::function<void(MpiCall&)>& add) {
  comm_->require_usable(name);
  const bool collective = given.messages.empty();
  const at::NoGradGuard no_grad;
  auto call = std::make_unique<MpiCall>();
  call->name = name;
  call->timeout = given.timeout;
  call->tensors = {given.output, given.input};
  call->finish = std::exchange(given.finish, nullptr);
  if (collective) {
    card.operation = name;
    if (given.source) card.source = *given.source;
    call->hash = Hash().number(given.sign).number(card.hash()).value();
    call->card = std::move(card);
  }
  try {
    // At level `serialized` a blocking call would hold the lock that the thread needs for which the
    // other ranks wait.
    if (collective && given.blocking && comm_->library().level() != MpiThreadLevel::serialized) {
      call->blocking = call->at_once = true;
      add(*call);
      comm_->meet(*call);
      call->phase.reset();
    } else {
      {
        const auto lock = comm_->library().serialize();
        add(*call);
      }
      if (collective) comm_->begin(*call);
    }
  } catch (...) {
    call->phase.reset();
    if (call->pending()) {
      comm_->set_stuck();
      comm_->adopt(std::move(call));
    }
    throw;
  }
  const auto work = c10::make_intrusive<MpiWork>(shared_from_this(), comm_, std::move(call), given);
  if (given.blocking)
    work->wait();
  else
    given.works.push_back({work});
}

void MpiTransport::barrier(TransportCall& given) {
  // A barrier is the meeting alone.
  run("barrier", given, {}, [](MpiCall&) {});
}

MpiTransport::Route MpiTransport::route_of(const Message& message, int tag) {
  const auto count = message.tensor.numel();
  if (tag == TransportCall::kInOrder) {
    auto& counts = message.kind == Message::Kind::send ? sent_ : received_;
    const auto number = counts[message.peer]++;
    return {comm_->gate(),
            comm_->tags().numbered(false, number, message.tensor.scalar_type(), count)};
  }
  if (tag < 0 || tag >= comm_->tags().users())
    throw InvalidArgument("message tag ", tag, " is not in 0 to ", comm_->tags().users() - 1,
                          ", which this MPI library allows");
  return {comm_->handle(),
          comm_->tags().users(tag, static_cast<std::int64_t>(message.tensor.nbytes()))};
}

void MpiTransport::exchange(TransportCall& given) {
  const auto& messages = given.messages;
  const bool any = messages.front().peer == TransportCall::kAnyRank;
  if (any && !fits(messages.front().tensor.numel()))
    throw InvalidArgument("receive from any rank: ", messages.front().tensor.numel(),
                          " elements, and one MPI message holds ", max_count_, "; name the sender");
  const char* name = given.tag == TransportCall::kInOrder           ? "exchange"
                     : messages.front().kind == Message::Kind::send ? "send"
                     : any                                          ? "receive from any rank"
                                                                    : "receive";
  run(name, given, {}, [&](MpiCall& call) {
    for (const auto kind : {Message::Kind::receive, Message::Kind::send})
      for (const auto& m : messages) {
        if (m.kind != kind) continue;
        const Route route = route_of(m, given.tag);
        call.tensors.push_back(m.tensor);
        call.bytes += static_cast<std::int64_t>(m.tensor.nbytes());
        if (!any) call.peers.push_back(comm_->ranks()[m.peer]);
        post(call, kind, mpi_address(m.tensor), m.tensor.numel(), m.tensor.element_size(),
             any ? MPI_ANY_SOURCE : m.peer, route);
      }
    std::ranges::sort(call.peers);
    call.peers.erase(std::unique(call.peers.begin(), call.peers.end()), call.peers.end());
  });
}

// ---- works ----

MpiWork::MpiWork(std::shared_ptr<Transport> transport, std::shared_ptr<MpiComm> comm,
                 std::unique_ptr<MpiCall> call, const TransportCall& given)
    : OwnWork(comm->rank(), given.type, given.results),
      transport_(std::move(transport)),
      comm_(std::move(comm)),
      call_(std::move(call)) {
  // A mismatch that is known already is for wait() to throw.
  if (!call_->pending() && !call_->error) complete();
}

MpiWork::~MpiWork() {
  // What nobody has waited for tells its error in the next call.
  if (call_ && (call_->pending() || (call_->error && !exception_))) comm_->adopt(std::move(call_));
}

void MpiWork::fail() {
  exception_ = std::current_exception();
  if (call_->pending()) comm_->set_stuck();
}

void MpiWork::complete() {
  source_ = call_->source;
  call_->end();
  completed_ = true;
  call_.reset();
}

bool MpiWork::isCompleted() {
  comm_->library().drive();  // a caller that only tests must let other calls continue too
  std::lock_guard<std::mutex> lock(mutex_);
  if (completed_ || exception_) return true;
  try {
    if (!comm_->test(*call_)) return false;
    complete();
  } catch (...) {
    fail();
  }
  return true;
}

bool MpiWork::wait(std::chrono::milliseconds timeout) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (exception_) std::rethrow_exception(exception_);
  if (completed_) return true;
  const auto limit = timeout.count() > 0 ? timeout : call_->timeout;
  try {
    comm_->library().require_thread();
    comm_->wait(*call_, limit);
    complete();
  } catch (const TimeoutError&) {
    if (limit >= call_->timeout) fail();
    throw;
  } catch (...) {
    fail();
    throw;
  }
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> MpiWork::getFuture() {
  wait();
  return OwnWork::getFuture();
}

std::shared_ptr<Transport> MpiContext::make_transport(const std::vector<int>& ranks,
                                                      const MpiBackendOptions& options,
                                                      const MpiAttempt& attempt) {
  const auto self = std::static_pointer_cast<MpiContext>(shared_from_this());
  return std::make_shared<MpiTransport>(make_mpi_comm(self, ranks, options, attempt), options);
}

}  // namespace tessera::detail

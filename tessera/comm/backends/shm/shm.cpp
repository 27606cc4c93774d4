#include "tessera/comm/backends/shm/shm.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <utility>

#include "tessera/base/deadline.h"
#include "tessera/base/hash.h"
#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/comm/backends/shm/shm_work.h"
#include "tessera/comm/backends/transport.h"

namespace tessera::detail {
namespace {

// nullopt for dtypes without arithmetic here.
std::optional<shm::Element> element_of(c10::ScalarType dtype) {
  using Type = c10::ScalarType;
  using Element = shm::Element;
  static constexpr std::pair<Type, Element> kElements[] = {
      {Type::Bool, Element::boolean},
      {Type::Char, Element::int8},
      {Type::Byte, Element::uint8},
      {Type::Short, Element::int16},
      {Type::UInt16, Element::uint16},
      {Type::Int, Element::int32},
      {Type::UInt32, Element::uint32},
      {Type::Long, Element::int64},
      {Type::UInt64, Element::uint64},
      {Type::Half, Element::half},
      {Type::BFloat16, Element::bfloat16},
      {Type::Float, Element::float32},
      {Type::Double, Element::float64},
      {Type::ComplexFloat, Element::complex64},
      {Type::ComplexDouble, Element::complex128}};
  for (const auto& [type, element] : kElements)
    if (type == dtype) return element;
  return std::nullopt;
}

shm::Reduction reduction_of(ReduceOp op) {
  using Kind = shm::Reduction::Kind;
  // in the order of ReduceOp::Kind
  static constexpr Kind kKinds[] = {Kind::sum, Kind::average, Kind::product,
                                    Kind::min, Kind::max,     Kind::premultiplied};
  return {kKinds[static_cast<std::size_t>(op.kind)], op.factor};
}

shm::Reduction reduction_in(const TransportCall& call) {
  using Kind = shm::Reduction::Kind;
  if (call.bits == Bits::none) return reduction_of(call.op);
  return {call.bits == Bits::bit_and  ? Kind::bit_and
          : call.bits == Bits::bit_or ? Kind::bit_or
                                      : Kind::bit_xor};
}

// What a reduction works on.
struct Reduces {
  shm::Element element;
  shm::Reduction reduction;
};

// What reduces `tensor` as the call says. Throws InvalidArgument if nothing does.
Reduces reduces_of(const char* name, const TransportCall& call, const at::Tensor& tensor) {
  const auto element = element_of(tensor.scalar_type());
  const auto reduction = reduction_in(call);
  if (!element || !shm::reduces(*element, reduction.kind))
    throw InvalidArgument(name, ": ", c10::toString(tensor.scalar_type()), " has no reduction by ",
                          to_string(reduction.kind), " over shared memory");
  return {*element, reduction};
}

bool shm_reduces(c10::ScalarType dtype, ReduceOp::Kind op) {
  // libtorch divides a complex number by a real one with other rounding.
  if (op == ReduceOp::Kind::avg && c10::isComplexType(dtype)) return false;
  const auto element = element_of(dtype);
  return element && shm::reduces(*element, reduction_of({op}).kind);
}

/// The group's signature of a call, combined with the dtype.
std::uint64_t shm_signature(const TransportCall& call, const at::Tensor& tensor) {
  const auto dtype = tensor.defined() ? tensor.scalar_type() : c10::ScalarType::Undefined;
  return Hash().number(call.sign).number(static_cast<std::uint64_t>(dtype)).value();
}

const void* shm_read(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}
void* shm_written(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

std::vector<std::size_t> sizes_in(std::size_t unit, const TransportCall::Counts& counts) {
  return mapped(counts, [&](auto n) { return static_cast<std::size_t>(n) * unit; });
}

// A group's calls through memory that its ranks share.
class ShmTransport final : public Transport {
 public:
  ShmTransport(std::shared_ptr<ShmLink> link, std::chrono::milliseconds timeout)
      : Transport(link->rank(), link->size(), timeout), link_(std::move(link)) {}
  ~ShmTransport() override { link_->close(); }

  const char* name() const override { return "shm"; }
  Abilities abilities() override {
    Abilities result;
    result.reduces = shm_reduces;
    result.moves = moves_every_dtype;
    result.reduces_bits = result.signs = result.ends_collectives = result.ends_messages = true;
    result.share = [this](std::size_t bytes, const c10::intrusive_ptr<c10d::Store>& store,
                          std::chrono::milliseconds limit) { return share(bytes, store, limit); };
    return result;
  }
  void abort() override { link_->abort(); }
  // Waits for calls in progress; later calls fail. The other ranks continue without this one.
  void shutdown() override {
    link_->close();
    link_->group().interrupt("it was shut down");
  }

  void broadcast(TransportCall& call) override {
    void* data =
        rank_ == call.root ? const_cast<void*>(shm_read(call.output)) : shm_written(call.output);
    run(call, shm_signature(call, call.output), [&](const auto& calls, shm::Call o) {
      return calls.broadcast(data, call.output.nbytes(), call.root, o);
    });
  }
  void all_reduce(TransportCall& call) override {
    const auto how = reduces_of("all_reduce", call, call.output);
    void* data = shm_written(call.output);
    run(call, shm_signature(call, call.output), [&](const auto& calls, shm::Call o) {
      return calls.all_reduce(data, data, static_cast<std::size_t>(call.output.numel()),
                              how.element, how.reduction, o);
    });
  }
  void reduce(TransportCall& call) override {
    const auto how = reduces_of("reduce", call, call.output);
    void* output = rank_ == call.root ? shm_written(call.output) : nullptr;
    const void* input = output ? output : shm_read(call.output);
    run(call, shm_signature(call, call.output), [&](const auto& calls, shm::Call o) {
      return calls.reduce(input, output, static_cast<std::size_t>(call.output.numel()), how.element,
                          how.reduction, call.root, o);
    });
  }
  void all_gather(TransportCall& call) override {
    const auto sizes = sizes_in(call.input.element_size(), call.counts);
    run(call, shm_signature(call, call.input), [&](const auto& calls, shm::Call o) {
      return calls.all_gather(shm_read(call.input), shm_written(call.output), sizes, o);
    });
  }
  void reduce_scatter(TransportCall& call) override {
    const auto how = reduces_of("reduce_scatter", call, call.input);
    const auto counts = sizes_in(1, call.counts);
    run(call, shm_signature(call, call.input), [&](const auto& calls, shm::Call o) {
      return calls.reduce_scatter(shm_read(call.input), shm_written(call.output), counts,
                                  how.element, how.reduction, o);
    });
  }
  void gather(TransportCall& call) override {
    const auto sizes = sizes_in(call.input.element_size(), call.counts);
    run(call, shm_signature(call, call.input), [&](const auto& calls, shm::Call o) {
      return calls.gather(shm_read(call.input), shm_written(call.output), sizes, call.root, o);
    });
  }
  void scatter(TransportCall& call) override {
    const auto sizes = sizes_in(call.output.element_size(), call.counts);
    run(call, shm_signature(call, call.output), [&](const auto& calls, shm::Call o) {
      return calls.scatter(shm_read(call.input), shm_written(call.output), sizes, call.root, o);
    });
  }
  // Made of messages, with a barrier beside them in which it is compared with what the others call.
  void all_to_all(TransportCall& call) override {
    const auto out = sizes_in(call.output.element_size(), call.counts),
               in = sizes_in(call.input.element_size(), call.input_counts);
    start(call, shm_signature(call, call.input),
          [&](std::vector<shm::Request>& requests, shm::Call o) {
            const auto calls = group().started();
            requests.push_back(
                calls.all_to_all(shm_read(call.input), in, shm_written(call.output), out, o));
            requests.push_back(calls.barrier(o, "all_to_all"));
          });
  }
  void exchange(TransportCall& call) override;
  void barrier(TransportCall& call) override {
    run(call, shm_signature(call, {}),
        [&](const auto& calls, shm::Call o) { return calls.barrier(o); });
  }

 private:
  // Makes one call: `make(calls, options)` on the calls that block or on those that are started.
  template <class Make>
  void run(TransportCall& call, std::uint64_t sign, const Make& make);
  // Adds the work of what `make(requests, options)` starts.
  template <class Make>
  void start(TransportCall& call, std::uint64_t sign, const Make& make);
  std::shared_ptr<shm::Arena> share(std::size_t bytes, const c10::intrusive_ptr<c10d::Store>& store,
                                    std::chrono::milliseconds limit);
  shm::Group& group() { return link_->group(); }

  const std::shared_ptr<ShmLink> link_;
};

template <class Make>
void ShmTransport::run(TransportCall& call, std::uint64_t sign, const Make& make) {
  if (!call.blocking)
    return start(call, sign, [&](std::vector<shm::Request>& requests, shm::Call o) {
      requests.push_back(make(group().started(), o));
    });
  try {
    make(static_cast<const shm::Calls<void>&>(group()), shm::Call{call.timeout, sign});
  } catch (const InvalidArgument&) {
    throw;
  } catch (const Error&) {
    link_->rethrow();
  }
}

template <class Make>
void ShmTransport::start(TransportCall& call, std::uint64_t sign, const Make& make) {
  std::vector<shm::Request> requests;
  try {
    make(requests, shm::Call{call.timeout, sign});
  } catch (const InvalidArgument&) {
    throw;
  } catch (const Error&) {
    link_->rethrow();
  }
  const auto work = c10::make_intrusive<ShmWork>(link_, call, std::move(requests));
  if (call.blocking) {
    work->wait();
    return;
  }
  if (!work->isCompleted()) link_->follow(work);
  call.works.push_back({work});
}

void ShmTransport::exchange(TransportCall& call) {
  std::vector<shm::Message> messages;
  messages.reserve(call.messages.size());
  for (const auto& m : call.messages) {
    const bool sends = m.kind == Message::Kind::send;
    messages.push_back(
        {sends ? shm::Message::Kind::send : shm::Message::Kind::receive,
         sends ? const_cast<void*>(shm_read(m.tensor)) : shm_written(m.tensor), m.tensor.nbytes(),
         m.peer == TransportCall::kAnyRank ? shm::Message::kAnySource : m.peer,
         // Tags of c10d have 31 bits, and the others the highest one.
         static_cast<std::uint32_t>(call.tag), static_cast<std::uint8_t>(m.tensor.scalar_type())});
  }
  const char* name = messages.size() != 1                                ? "exchange"
                     : messages.front().kind == shm::Message::Kind::send ? "send"
                     : messages.front().peer == shm::Message::kAnySource ? "receive from any rank"
                                                                         : "receive";
  run(call, 0, [&](const auto& calls, shm::Call o) { return calls.exchange(messages, o, name); });
}

std::shared_ptr<shm::Arena> ShmTransport::share(std::size_t bytes,
                                                const c10::intrusive_ptr<c10d::Store>& store,
                                                std::chrono::milliseconds limit) {
  try {
    return group().share(bytes, directory_at(store), {bounded_limit(limit)});
  } catch (const shm::SetupError& error) {
    if (error.cause() == shm::Cause::disagreement) throw MismatchError(error.what());
    if (error.cause() == shm::Cause::absent) throw PeerLostError(error.what(), {});
    throw NotAvailable(error.what());
  } catch (const Error&) {
    link_->rethrow();
  }
}

}  // namespace
}  // namespace tessera::detail

namespace tessera {

shm::Directory directory_at(const c10::intrusive_ptr<c10d::Store>& store) {
  shm::Directory directory;
  directory.put = [store](const std::string& key, const std::string& bytes) {
    store->set(key, std::vector<std::uint8_t>(bytes.begin(), bytes.end()));
  };
  directory.get = [store](const std::string& key, std::chrono::milliseconds limit) {
    // For some stores a limit of zero means no limit.
    store->wait({key}, std::max(limit, std::chrono::milliseconds(1)));
    const auto bytes = store->get(key);
    return std::string(bytes.begin(), bytes.end());
  };
  directory.erase = [store](const std::string& key) { store->deleteKey(key); };
  return directory;
}

std::shared_ptr<detail::Transport> make_shm_transport(const c10::intrusive_ptr<c10d::Store>& store,
                                                      int rank, int size,
                                                      const ShmOptions& options) {
  return make_shm_transport(directory_at(store), rank, size, options);
}

std::shared_ptr<detail::Transport> make_shm_transport(const shm::Directory& directory, int rank,
                                                      int size, const ShmOptions& options) {
  shm::Options meeting;
  meeting.name = options.name;
  meeting.timeout = bounded_limit(options.timeout);
  auto ranks = options.ranks;
  if (ranks.empty()) ranks = numbers_below(size);
  const Deadline deadline = deadline_after(meeting.timeout);
  try {
    auto link = std::make_shared<detail::ShmLink>(shm::Group::meet(rank, size, directory, meeting),
                                                  std::move(ranks), options.watch);
    return std::make_shared<detail::ShmTransport>(std::move(link), meeting.timeout);
  } catch (const shm::SetupError& error) {
    // The group's watch derives from the text which rank is missing or gone.
    if (error.cause() == shm::Cause::absent)
      throw std::runtime_error(concat(
          time_left(deadline).count() == 0 ? "timed out: " : "connection closed: ", error.what()));
    throw NotAvailable("group '", options.name, "' over shm: ", error.what(),
                       "; choose another backend for it (gloo, mpi)");
  } catch (const shm::TimeoutError& error) {
    throw std::runtime_error(concat("timed out: ", error.what()));
  } catch (const shm::PeerLostError& error) {
    throw std::runtime_error(concat("connection closed: ", error.what()));
  }
}

}  // namespace tessera

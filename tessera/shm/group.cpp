#include "tessera/shm/group.h"

#include <numeric>
#include <span>
#include <type_traits>

#include "tessera/base/text.h"
#include "tessera/shm/detail/calls.h"
#include "tessera/shm/detail/meet.h"
#include "tessera/shm/detail/messages.h"
#include "tessera/shm/detail/pulling.h"

namespace tessera::shm {

using detail::Batch;
using detail::Blocks;
using detail::Core;
using detail::Deal;
using detail::DealArguments;
using detail::Op;
using detail::PullDeal;
using detail::PullReduce;
using detail::PullSpread;
using detail::ReduceArguments;
using detail::ReduceOnce;
using detail::ReducePieces;
using detail::Spread;
using std::chrono::milliseconds;

namespace {

/// Marks the messages of collectives, which match none of the user's.
constexpr std::uint64_t kCollective = std::uint64_t{1} << 63;

const std::byte* bytes(const void* data) { return static_cast<const std::byte*>(data); }
std::byte* bytes(void* data) { return static_cast<std::byte*>(data); }

std::size_t total(const std::vector<std::size_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::size_t{0});
}

void require_data(const void* data, std::size_t size, const char* what) {
  if (data == nullptr && size > 0)
    throw InvalidArgument("shm: ", what, " of ", size, " bytes is null");
}

}  // namespace

namespace detail {

struct GroupState {
  GroupState(std::shared_ptr<Core> c, milliseconds limit)
      : core(std::move(c)),
        timeout(limit),
        arena(core, core->arena(core->rank()), core->layout().arena_bytes()) {}
  milliseconds limit(Call call) const { return call.timeout.count() > 0 ? call.timeout : timeout; }
  void require_rank(int rank, const char* what) const {
    if (rank < 0 || rank >= core->size())
      throw InvalidArgument("shm: ", what, " ", rank, " of a group of ", core->size(), " ranks");
  }
  void require_sizes(const std::vector<std::size_t>& sizes) const {
    if (sizes.size() != static_cast<std::size_t>(core->size()))
      throw InvalidArgument("shm: ", sizes.size(), " sizes for a group of ", core->size(),
                            " ranks");
  }

  const std::shared_ptr<Core> core;
  const milliseconds timeout;
  Arena arena;
  std::atomic<std::uint64_t> all_to_alls{0};
};

}  // namespace detail

using detail::GroupState;

template <class Result>
Calls<Result>::Calls(std::shared_ptr<GroupState> state) : state_(std::move(state)) {}

Group Group::meet(int rank, int size, const Directory& directory, const Options& options) {
  return Group(
      std::make_shared<GroupState>(detail::meet(rank, size, directory, options), options.timeout));
}

std::vector<Group> Group::threads(int size, const Options& options) {
  std::vector<Group> groups;
  for (auto& core : detail::meet_threads(size, options))
    groups.push_back(Group(std::make_shared<GroupState>(std::move(core), options.timeout)));
  return groups;
}

Calls<Request> Group::started() const { return Calls<Request>(state_); }
Arena& Group::arena() { return state_->arena; }

std::shared_ptr<Arena> Group::share(std::size_t bytes, const Directory& directory, Call call) {
  if (bytes == 0)
    throw InvalidArgument("shm: memory of 0 bytes is to be shared; ask for at least 1");
  Core& core = *state_->core;
  // Ranks that are late or gone are found out by the group, which says so better than a meeting.
  barrier(call, "sharing of memory");
  const std::uint64_t number = core.next_memory();
  Options options;
  options.name = concat(core.options().name, " memory ", number);
  options.timeout = state_->limit(call);
  options.arena_bytes = bytes;
  // Calls go through the group; of this memory only the arenas are used.
  options.slot_bytes = options.frame_bytes = 1;
  options.single_copy = false;
  Directory patient = directory;
  // A rank that is gone will not come.
  patient.get = [&](const std::string& key, milliseconds limit) {
    const Deadline deadline = deadline_after(limit);
    while (true) {
      const milliseconds slice = std::min(time_left(deadline), milliseconds(200));
      const Deadline half = deadline_after(slice / 2);
      try {
        return directory.get(key, slice);
      } catch (const std::exception&) {
        // Sooner than its limit, the directory itself has failed.
        if (time_left(deadline).count() == 0 || time_left(half).count() > 0) throw;
      }
      core.require_peers();
    }
  };
  auto memory = detail::meet(core.rank(), core.size(), patient, options);
  core.attach(number, memory);
  std::byte* begin = memory->arena(core.rank());
  const std::size_t size = memory->layout().arena_bytes();
  return std::make_shared<Arena>(std::move(memory), begin, size);
}

void Group::abort(const std::string& reason) { state_->core->abort(reason); }
void Group::interrupt(const std::string& reason) { state_->core->interrupt(reason); }
bool Group::drive(milliseconds nap) { return state_->core->drive(nap); }
bool Group::neglected() { return state_->core->neglected(); }
void Group::nudge() { state_->core->nudge(); }

// Each call is an object: on the stack if it runs at once, on the heap if it is started.
namespace {

template <class Result>
struct How {
  const std::shared_ptr<Core>& core;
  milliseconds limit;
  std::uint64_t sign;

  template <class T, class... Args>
  Result make(Args&&... args) const {
    return prepare<T>(
        [&](Op& op) {
          if (sign != 0) op.signature = detail::signature_of(op.signature, sign);
        },
        *core, std::forward<Args>(args)...);
  }
  /// `complete` does to the object what remains before it runs.
  template <class T, class Complete, class... Args>
  Result prepare(const Complete& complete, Args&&... args) const {
    if constexpr (std::is_void_v<Result>) {
      T op(std::forward<Args>(args)...);
      complete(op);
      core->run(op, limit);
    } else {
      auto op = std::make_unique<T>(std::forward<Args>(args)...);
      complete(*op);
      core->start(*op, limit);
      return Request(core, std::move(op), limit);
    }
  }
};

template <class Result>
Result reduce_any(const How<Result>& how, const char* name, const ReduceArguments& a) {
  const Core& core = *how.core;
  const std::size_t size = a.count * size_of(a.element);
  require_data(a.input, size, "the input");
  if (a.root < 0 || a.root == core.rank()) require_data(a.output, size, "the output");
  if (size <= ReduceOnce::limit(core)) return how.template make<ReduceOnce>(name, a);
  // Where memory is shared the ranks first find out whether all data are in it.
  if (core.single_copy() && core.options().crowded && !core.shares() && a.root < 0 &&
      size >= detail::kPullAllReduceBytes)
    return how.template make<PullReduce>(name, a);
  return how.template make<ReducePieces>(name, a);
}

template <class Result>
Result spread_any(const How<Result>& how, const char* name, Blocks blocks, const void* input,
                  void* output, int reader) {
  const Core& core = *how.core;
  require_data(input, blocks.size(core.rank()), "the input");
  if (reader < 0 || reader == core.rank()) require_data(output, blocks.total(), "the output");
  if (blocks.largest() >= detail::pull_bytes(core, false))
    return how.template make<PullSpread>(name, std::move(blocks), bytes(input), bytes(output),
                                         reader);
  return how.template make<Spread>(name, std::move(blocks), bytes(input), bytes(output), reader,
                                   false);
}

template <class Result>
Result deal_any(const How<Result>& how, const char* name, DealArguments a) {
  const Core& core = *how.core;
  if (a.source < 0 || a.source == core.rank()) require_data(a.input, a.blocks.total(), "the input");
  require_data(a.output, a.blocks.size(core.rank()), "the output");
  if (a.blocks.largest() >= detail::pull_bytes(core, a.reducer.has_value()))
    return how.template make<PullDeal>(name, std::move(a));
  return how.template make<Deal>(name, std::move(a));
}

std::vector<std::size_t> in_bytes(std::vector<std::size_t> counts, Element element) {
  for (auto& n : counts) n *= size_of(element);
  return counts;
}

template <class Result>
How<Result> how_to(const GroupState& state, Call call) {
  return {state.core, state.limit(call), call.sign};
}

}  // namespace

template <class Result>
int Calls<Result>::rank() const {
  return state_->core->rank();
}

template <class Result>
int Calls<Result>::size() const {
  return state_->core->size();
}

template <class Result>
Result Calls<Result>::barrier(Call call, const char* name) const {
  return how_to<Result>(*state_, call)
      .template make<Spread>(name, Blocks::equal(size(), 0), nullptr, nullptr, -1, true);
}

template <class Result>
Result Calls<Result>::broadcast(void* data, std::size_t n, int root, Call call) const {
  state_->require_rank(root, "root");
  return spread_any(how_to<Result>(*state_, call), "broadcast", Blocks::only(size(), root, n), data,
                    data, -1);
}

template <class Result>
Result Calls<Result>::all_reduce(const void* input, void* output, std::size_t count,
                                 Element element, Reduction reduction, Call call) const {
  return reduce_any(how_to<Result>(*state_, call), "all_reduce",
                    {bytes(input), bytes(output), count, element, reduction, -1});
}

template <class Result>
Result Calls<Result>::reduce(const void* input, void* output, std::size_t count, Element element,
                             Reduction reduction, int root, Call call) const {
  state_->require_rank(root, "root");
  return reduce_any(how_to<Result>(*state_, call), "reduce",
                    {bytes(input), bytes(output), count, element, reduction, root});
}

template <class Result>
Result Calls<Result>::all_gather(const void* input, void* output,
                                 const std::vector<std::size_t>& sizes, Call call) const {
  state_->require_sizes(sizes);
  return spread_any(how_to<Result>(*state_, call), "all_gather", Blocks::of(sizes), input, output,
                    -1);
}

template <class Result>
Result Calls<Result>::all_gather(const void* input, void* output, std::size_t bytes_each,
                                 Call call) const {
  return spread_any(how_to<Result>(*state_, call), "all_gather", Blocks::equal(size(), bytes_each),
                    input, output, -1);
}

template <class Result>
Result Calls<Result>::gather(const void* input, void* output, const std::vector<std::size_t>& sizes,
                             int root, Call call) const {
  state_->require_rank(root, "root");
  state_->require_sizes(sizes);
  return spread_any(how_to<Result>(*state_, call), "gather", Blocks::of(sizes), input, output,
                    root);
}

template <class Result>
Result Calls<Result>::scatter(const void* input, void* output,
                              const std::vector<std::size_t>& sizes, int root, Call call) const {
  state_->require_rank(root, "root");
  state_->require_sizes(sizes);
  return deal_any(how_to<Result>(*state_, call), "scatter",
                  {Blocks::of(sizes), bytes(input), bytes(output), root});
}

template <class Result>
Result Calls<Result>::reduce_scatter(const void* input, void* output,
                                     const std::vector<std::size_t>& counts, Element element,
                                     Reduction reduction, Call call) const {
  state_->require_sizes(counts);
  return deal_any(how_to<Result>(*state_, call), "reduce_scatter",
                  {Blocks::of(in_bytes(counts, element)), bytes(input), bytes(output), -1,
                   Reducer(element, reduction.kind), reduction});
}

template <class Result>
Result Calls<Result>::reduce_scatter(const void* input, void* output, std::size_t count_each,
                                     Element element, Reduction reduction, Call call) const {
  if (count_each == 0 && reduces(element, reduction.kind) && state_->core->whole()) return Result();
  return deal_any(how_to<Result>(*state_, call), "reduce_scatter",
                  {Blocks::equal(size(), count_each * size_of(element)), bytes(input),
                   bytes(output), -1, Reducer(element, reduction.kind), reduction});
}

// ---- messages ----

namespace {

void fill(Batch& batch, const Core& core, std::span<const Message> messages) {
  batch.sends.reserve(messages.size());
  batch.receives.reserve(messages.size());
  for (const auto& m : messages) {
    const bool sends = m.kind == Message::Kind::send;
    const bool any = !sends && m.peer == Message::kAnySource;
    if (!any && (m.peer < 0 || m.peer >= core.size()))
      throw InvalidArgument("shm: a message ", sends ? "to" : "from", " rank ", m.peer,
                            " in a group of ", core.size(), " ranks");
    require_data(m.data, m.bytes, "a message");
    const std::uint64_t tag = m.tag | std::uint64_t{m.type} << detail::kTypeAt;
    if (sends)
      batch.sends.push_back({bytes(m.data), m.bytes, m.peer, tag});
    else
      batch.receives.push_back({bytes(m.data), m.bytes, m.peer, tag});
  }
}

void fill_all_to_all(Batch& batch, const Core& core, const void* input,
                     const std::vector<std::size_t>& input_sizes, void* output,
                     const std::vector<std::size_t>& output_sizes, std::uint64_t number,
                     std::uint64_t sign) {
  const int ranks = core.size(), me = core.rank();
  number = (number & detail::kNumberMask) | (sign & 0xff) << detail::kTypeAt;
  require_data(input, total(input_sizes), "the input");
  require_data(output, total(output_sizes), "the output");
  const auto own = static_cast<std::size_t>(me);
  if (input_sizes[own] != output_sizes[own])
    throw InvalidArgument("shm: all_to_all: rank ", me, " sends ", input_sizes[own],
                          " bytes to itself and expects ", output_sizes[own]);
  const auto start = [](const std::vector<std::size_t>& sizes, int rank) {
    return std::accumulate(sizes.begin(), sizes.begin() + rank, std::size_t{0});
  };
  batch.sends.reserve(static_cast<std::size_t>(ranks));
  batch.receives.reserve(static_cast<std::size_t>(ranks));
  // Every rank begins with another one.
  for (int step = 1; step < ranks; ++step) {
    const int from = (me - step + ranks) % ranks, to = (me + step) % ranks;
    batch.receives.push_back({bytes(output) + start(output_sizes, from), output_sizes[from], from,
                              kCollective | number});
    batch.sends.push_back(
        {bytes(input) + start(input_sizes, to), input_sizes[to], to, kCollective | number});
  }
  detail::copy_bytes(bytes(output) + start(output_sizes, me), bytes(input) + start(input_sizes, me),
                     input_sizes[own]);
}

}  // namespace

template <class Result>
Result Calls<Result>::all_to_all(const void* input, const std::vector<std::size_t>& input_sizes,
                                 void* output, const std::vector<std::size_t>& output_sizes,
                                 Call call) const {
  state_->require_sizes(input_sizes);
  state_->require_sizes(output_sizes);
  return how_to<Result>(*state_, call)
      .template prepare<Batch>(
          [&](Batch& batch) {
            fill_all_to_all(batch, *state_->core, input, input_sizes, output, output_sizes,
                            state_->all_to_alls++, call.sign);
          },
          "all_to_all");
}

template <class Result>
Result Calls<Result>::send(const void* data, std::size_t n, int to, std::uint32_t tag,
                           Call call) const {
  const Message message{Message::Kind::send, const_cast<void*>(data), n, to, tag};
  return how_to<Result>(*state_, call)
      .template prepare<Batch>([&](Batch& batch) { fill(batch, *state_->core, {&message, 1}); },
                               "send");
}

template <class Result>
Result Calls<Result>::receive(void* data, std::size_t n, int from, std::uint32_t tag,
                              Call call) const {
  const Message message{Message::Kind::receive, data, n, from, tag};
  return how_to<Result>(*state_, call)
      .template prepare<Batch>([&](Batch& batch) { fill(batch, *state_->core, {&message, 1}); },
                               "receive");
}

template <class Result>
Result Calls<Result>::exchange(const std::vector<Message>& messages, Call call,
                               const char* name) const {
  return how_to<Result>(*state_, call)
      .template prepare<Batch>(
          [&](Batch& batch) {
            fill(batch, *state_->core, messages);
            batch.buffered = !batch.receives.empty();
          },
          name);
}

template class Calls<void>;
template class Calls<Request>;

// ---- requests ----

Request::Request() = default;
Request::Request(std::shared_ptr<Core> core, std::unique_ptr<Op> op, milliseconds limit)
    : core_(std::move(core)), op_(std::move(op)), limit_(limit) {}
Request::Request(Request&&) noexcept = default;

Request& Request::operator=(Request&& other) noexcept {
  Request old(std::move(*this));
  core_ = std::move(other.core_);
  op_ = std::move(other.op_);
  limit_ = other.limit_;
  source_ = other.source_;
  return *this;
}

Request::~Request() {
  if (!op_) return;
  try {
    wait();
  } catch (const std::exception&) {  // It failed, and no longer uses any memory.
  }
}

void Request::settle() {
  if (const auto* batch = dynamic_cast<const Batch*>(op_.get());
      batch != nullptr && batch->sends.empty() && batch->receives.size() == 1)
    source_ = batch->receives.front().from;
  op_.reset();
}

bool Request::test() {
  if (!op_) return true;
  if (!core_->test(*op_)) return false;
  settle();
  return true;
}

void Request::wait() { wait(limit_); }

void Request::wait(milliseconds limit) {
  if (!op_) return;
  core_->wait(*op_, limit);
  settle();
}

// ---- reports ----

Group::Description Group::describe() const {
  const Core& core = *state_->core;
  const auto& layout = core.layout();
  return {core.size(),          layout.total(),         layout.slot_bytes(),
          layout.frame_bytes(), layout.arena_bytes(),   ReduceOnce::limit(core),
          core.single_copy(),   core.options().crowded, core.stores().for_one,
          Reducer::unit()};
}

std::string to_string(const Group::Description& d) {
  return concat("ranks: ", d.ranks, "\nshared memory: ", d.shared_bytes, " bytes, of which arenas ",
                d.arena_bytes, " per rank\npieces: ", d.slot_bytes, " bytes of a collective, ",
                d.frame_bytes, " of a message\nall-reduce in one step: up to ", d.once_bytes,
                " bytes\nlarge messages: ",
                d.single_copy ? "copied once, out of the sender's memory"
                              : "copied twice, through the shared memory",
                "\nwaiting: ",
                d.crowded ? "fewer cores than ranks, waits yield theirs soon"
                          : "a core for each rank, waits keep it at first",
                "\nmessages: ", to_string(d.stores), "\nreductions: ", d.vector_unit, "\n");
}

}  // namespace tessera::shm

#include "tessera/shm/group.h"

#include <numeric>

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
using detail::Op;
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
    throw InvalidArgument(concat("shm: ", what, " of ", size, " bytes is null"));
}

}  // namespace

struct Group::State {
  State(std::shared_ptr<Core> c, milliseconds limit)
      : core(std::move(c)),
        timeout(limit),
        arena(core, core->arena(core->rank()), core->layout().arena_bytes()) {}
  milliseconds limit(Call call) const { return call.timeout.count() > 0 ? call.timeout : timeout; }
  void require_rank(int rank, const char* what) const {
    if (rank < 0 || rank >= core->size())
      throw InvalidArgument(
          concat("shm: ", what, " ", rank, " of a group of ", core->size(), " ranks"));
  }
  void require_sizes(const std::vector<std::size_t>& sizes) const {
    if (sizes.size() != static_cast<std::size_t>(core->size()))
      throw InvalidArgument(
          concat("shm: ", sizes.size(), " sizes for a group of ", core->size(), " ranks"));
  }

  /// Runs the op to its end, or starts it.
  template <class MakeOp>
  void run(Call call, const MakeOp& make) {
    auto op = make();
    core->run(op, limit(call));
  }

  const std::shared_ptr<Core> core;
  const milliseconds timeout;
  Arena arena;
  std::atomic<std::uint64_t> all_to_alls{0};
};

Group::Group(std::shared_ptr<State> state) : state_(std::move(state)) {}

Group Group::meet(int rank, int size, const Directory& directory, const Options& options) {
  return Group(
      std::make_shared<State>(detail::meet(rank, size, directory, options), options.timeout));
}

std::vector<Group> Group::threads(int size, const Options& options) {
  std::vector<Group> groups;
  for (auto& core : detail::meet_threads(size, options))
    groups.push_back(Group(std::make_shared<State>(std::move(core), options.timeout)));
  return groups;
}

int Group::rank() const { return state_->core->rank(); }
int Group::size() const { return state_->core->size(); }
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

void sign(Op& op, std::uint64_t with) {
  if (with != 0) op.signature = detail::signature_of(op.signature, with);
}

struct Runs {
  Core& core;
  milliseconds limit;
  std::uint64_t with;
  using Result = void;
  template <class T, class... Args>
  void operator()(Args&&... args) const {
    T op(std::forward<Args>(args)...);
    sign(op, with);
    core.run(op, limit);
  }
};

struct Starts {
  std::shared_ptr<Core> core;
  milliseconds limit;
  std::uint64_t with;
  using Result = Request;
  template <class T, class... Args>
  Request operator()(Args&&... args) const {
    auto op = std::make_unique<T>(std::forward<Args>(args)...);
    sign(*op, with);
    core->start(*op, limit);
    return Request(core, std::move(op), limit);
  }
};

template <class How>
typename How::Result reduce_any(const How& how, Core& core, const char* name,
                                const ReduceArguments& a) {
  const std::size_t size = a.count * size_of(a.element);
  require_data(a.input, size, "the input");
  if (a.root < 0 || a.root == core.rank()) require_data(a.output, size, "the output");
  if (size <= ReduceOnce::limit(core)) return how.template operator()<ReduceOnce>(core, name, a);
  // Where memory is shared the ranks first find out whether all data are in it.
  if (core.single_copy() && core.options().crowded && !core.shares() && a.root < 0 &&
      size >= detail::kPullAllReduceBytes)
    return how.template operator()<detail::PullReduce>(core, name, a);
  return how.template operator()<ReducePieces>(core, name, a);
}

template <class How>
typename How::Result spread_any(const How& how, Core& core, const char* name, Blocks blocks,
                                const void* input, void* output, int reader) {
  require_data(input, blocks.size(core.rank()), "the input");
  if (reader < 0 || reader == core.rank()) require_data(output, blocks.total(), "the output");
  if (blocks.largest() >= detail::pull_bytes(core, false))
    return how.template operator()<detail::PullSpread>(core, name, std::move(blocks), bytes(input),
                                                       bytes(output), reader);
  return how.template operator()<Spread>(core, name, std::move(blocks), bytes(input), bytes(output),
                                         reader, false);
}

template <class How>
typename How::Result deal_any(const How& how, Core& core, const char* name, Blocks blocks,
                              const void* input, void* output, int source,
                              std::optional<Reducer> reducer, const Reduction& reduction) {
  if (source < 0 || source == core.rank()) require_data(input, blocks.total(), "the input");
  require_data(output, blocks.size(core.rank()), "the output");
  if (blocks.largest() >= detail::pull_bytes(core, reducer.has_value()))
    return how.template operator()<detail::PullDeal>(core, name, std::move(blocks), bytes(input),
                                                     bytes(output), source, reducer, reduction);
  return how.template operator()<Deal>(core, name, std::move(blocks), bytes(input), bytes(output),
                                       source, reducer, reduction);
}

std::vector<std::size_t> in_bytes(std::vector<std::size_t> counts, Element element) {
  for (auto& n : counts) n *= size_of(element);
  return counts;
}

}  // namespace

#define TESSERA_SHM_RUNS \
  Runs { *state_->core, state_->limit(call), call.sign }
#define TESSERA_SHM_STARTS \
  Starts { state_->core, state_->limit(call), call.sign }

void Group::barrier(Call call, const char* name) {
  TESSERA_SHM_RUNS.operator()<Spread>(*state_->core, name, Blocks::equal(size(), 0), nullptr,
                                      nullptr, -1, true);
}
Request Group::start_barrier(Call call, const char* name) {
  return TESSERA_SHM_STARTS.operator()<Spread>(*state_->core, name, Blocks::equal(size(), 0),
                                               nullptr, nullptr, -1, true);
}

void Group::broadcast(void* data, std::size_t n, int root, Call call) {
  state_->require_rank(root, "root");
  spread_any(TESSERA_SHM_RUNS, *state_->core, "broadcast", Blocks::only(size(), root, n), data,
             data, -1);
}
Request Group::start_broadcast(void* data, std::size_t n, int root, Call call) {
  state_->require_rank(root, "root");
  return spread_any(TESSERA_SHM_STARTS, *state_->core, "broadcast", Blocks::only(size(), root, n),
                    data, data, -1);
}

void Group::all_reduce(const void* input, void* output, std::size_t count, Element element,
                       Reduction reduction, Call call) {
  reduce_any(TESSERA_SHM_RUNS, *state_->core, "all_reduce",
             {bytes(input), bytes(output), count, element, reduction, -1});
}
Request Group::start_all_reduce(const void* input, void* output, std::size_t count, Element element,
                                Reduction reduction, Call call) {
  return reduce_any(TESSERA_SHM_STARTS, *state_->core, "all_reduce",
                    {bytes(input), bytes(output), count, element, reduction, -1});
}

void Group::reduce(const void* input, void* output, std::size_t count, Element element,
                   Reduction reduction, int root, Call call) {
  state_->require_rank(root, "root");
  reduce_any(TESSERA_SHM_RUNS, *state_->core, "reduce",
             {bytes(input), bytes(output), count, element, reduction, root});
}
Request Group::start_reduce(const void* input, void* output, std::size_t count, Element element,
                            Reduction reduction, int root, Call call) {
  state_->require_rank(root, "root");
  return reduce_any(TESSERA_SHM_STARTS, *state_->core, "reduce",
                    {bytes(input), bytes(output), count, element, reduction, root});
}

void Group::all_gather(const void* input, void* output, const std::vector<std::size_t>& sizes,
                       Call call) {
  state_->require_sizes(sizes);
  spread_any(TESSERA_SHM_RUNS, *state_->core, "all_gather", Blocks::of(sizes), input, output, -1);
}
Request Group::start_all_gather(const void* input, void* output,
                                const std::vector<std::size_t>& sizes, Call call) {
  state_->require_sizes(sizes);
  return spread_any(TESSERA_SHM_STARTS, *state_->core, "all_gather", Blocks::of(sizes), input,
                    output, -1);
}
void Group::all_gather(const void* input, void* output, std::size_t bytes_each, Call call) {
  spread_any(TESSERA_SHM_RUNS, *state_->core, "all_gather", Blocks::equal(size(), bytes_each),
             input, output, -1);
}

void Group::gather(const void* input, void* output, const std::vector<std::size_t>& sizes, int root,
                   Call call) {
  state_->require_rank(root, "root");
  state_->require_sizes(sizes);
  spread_any(TESSERA_SHM_RUNS, *state_->core, "gather", Blocks::of(sizes), input, output, root);
}
Request Group::start_gather(const void* input, void* output, const std::vector<std::size_t>& sizes,
                            int root, Call call) {
  state_->require_rank(root, "root");
  state_->require_sizes(sizes);
  return spread_any(TESSERA_SHM_STARTS, *state_->core, "gather", Blocks::of(sizes), input, output,
                    root);
}

void Group::scatter(const void* input, void* output, const std::vector<std::size_t>& sizes,
                    int root, Call call) {
  state_->require_rank(root, "root");
  state_->require_sizes(sizes);
  deal_any(TESSERA_SHM_RUNS, *state_->core, "scatter", Blocks::of(sizes), input, output, root,
           std::nullopt, {});
}
Request Group::start_scatter(const void* input, void* output, const std::vector<std::size_t>& sizes,
                             int root, Call call) {
  state_->require_rank(root, "root");
  state_->require_sizes(sizes);
  return deal_any(TESSERA_SHM_STARTS, *state_->core, "scatter", Blocks::of(sizes), input, output,
                  root, std::nullopt, {});
}

void Group::reduce_scatter(const void* input, void* output, const std::vector<std::size_t>& counts,
                           Element element, Reduction reduction, Call call) {
  state_->require_sizes(counts);
  deal_any(TESSERA_SHM_RUNS, *state_->core, "reduce_scatter", Blocks::of(in_bytes(counts, element)),
           input, output, -1, Reducer(element, reduction.kind), reduction);
}
Request Group::start_reduce_scatter(const void* input, void* output,
                                    const std::vector<std::size_t>& counts, Element element,
                                    Reduction reduction, Call call) {
  state_->require_sizes(counts);
  return deal_any(TESSERA_SHM_STARTS, *state_->core, "reduce_scatter",
                  Blocks::of(in_bytes(counts, element)), input, output, -1,
                  Reducer(element, reduction.kind), reduction);
}
void Group::reduce_scatter(const void* input, void* output, std::size_t count_each, Element element,
                           Reduction reduction, Call call) {
  if (count_each == 0 && reduces(element, reduction.kind) && state_->core->whole()) return;
  deal_any(TESSERA_SHM_RUNS, *state_->core, "reduce_scatter",
           Blocks::equal(size(), count_each * size_of(element)), input, output, -1,
           Reducer(element, reduction.kind), reduction);
}

// ---- messages ----

namespace {

void add(Batch& batch, const Message& message, std::uint64_t tag) {
  if (message.kind == Message::Kind::send) {
    batch.sends.push_back(
        {bytes(static_cast<const void*>(message.data)), message.bytes, message.peer, tag});
  } else {
    batch.receives.push_back({bytes(message.data), message.bytes, message.peer, tag});
  }
}

void fill(Batch& batch, const Core& core, const std::vector<Message>& messages) {
  batch.sends.reserve(messages.size());
  batch.receives.reserve(messages.size());
  for (const auto& m : messages) {
    const bool any = m.kind == Message::Kind::receive && m.peer == Message::kAnySource;
    if (!any && (m.peer < 0 || m.peer >= core.size()))
      throw InvalidArgument(concat("shm: a message ", m.kind == Message::Kind::send ? "to" : "from",
                                   " rank ", m.peer, " in a group of ", core.size(), " ranks"));
    require_data(m.data, m.bytes, "a message");
    add(batch, m, m.tag | std::uint64_t{m.type} << detail::kTypeAt);
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
    throw InvalidArgument(concat("shm: all_to_all: rank ", me, " sends ", input_sizes[own],
                                 " bytes to itself and expects ", output_sizes[own]));
  const auto start = [](const std::vector<std::size_t>& sizes, int rank) {
    return std::accumulate(sizes.begin(), sizes.begin() + rank, std::size_t{0});
  };
  batch.sends.reserve(static_cast<std::size_t>(ranks));
  batch.receives.reserve(static_cast<std::size_t>(ranks));
  // Every rank begins with another one.
  for (int step = 1; step < ranks; ++step) {
    const int from = (me - step + ranks) % ranks, to = (me + step) % ranks;
    batch.receives.push_back({bytes(output) + start(output_sizes, from),
                              output_sizes[static_cast<std::size_t>(from)], from,
                              kCollective | number});
    batch.sends.push_back({bytes(input) + start(input_sizes, to),
                           input_sizes[static_cast<std::size_t>(to)], to, kCollective | number});
  }
  detail::copy_bytes(bytes(output) + start(output_sizes, me), bytes(input) + start(input_sizes, me),
                     input_sizes[own]);
}

}  // namespace

void Group::all_to_all(const void* input, const std::vector<std::size_t>& input_sizes, void* output,
                       const std::vector<std::size_t>& output_sizes, Call call) {
  state_->require_sizes(input_sizes);
  state_->require_sizes(output_sizes);
  Batch batch("all_to_all");
  fill_all_to_all(batch, *state_->core, input, input_sizes, output, output_sizes,
                  state_->all_to_alls++, call.sign);
  state_->core->run(batch, state_->limit(call));
}
Request Group::start_all_to_all(const void* input, const std::vector<std::size_t>& input_sizes,
                                void* output, const std::vector<std::size_t>& output_sizes,
                                Call call) {
  state_->require_sizes(input_sizes);
  state_->require_sizes(output_sizes);
  auto batch = std::make_unique<Batch>("all_to_all");
  fill_all_to_all(*batch, *state_->core, input, input_sizes, output, output_sizes,
                  state_->all_to_alls++, call.sign);
  state_->core->start(*batch, state_->limit(call));
  return Request(state_->core, std::move(batch), state_->limit(call));
}

void Group::send(const void* data, std::size_t n, int to, std::uint32_t tag, Call call) {
  Batch batch("send");
  fill(batch, *state_->core, {{Message::Kind::send, const_cast<void*>(data), n, to, tag}});
  state_->core->run(batch, state_->limit(call));
}
Request Group::start_send(const void* data, std::size_t n, int to, std::uint32_t tag, Call call) {
  auto batch = std::make_unique<Batch>("send");
  fill(*batch, *state_->core, {{Message::Kind::send, const_cast<void*>(data), n, to, tag}});
  state_->core->start(*batch, state_->limit(call));
  return Request(state_->core, std::move(batch), state_->limit(call));
}

void Group::receive(void* data, std::size_t n, int from, std::uint32_t tag, Call call) {
  Batch batch("receive");
  fill(batch, *state_->core, {{Message::Kind::receive, data, n, from, tag}});
  state_->core->run(batch, state_->limit(call));
}
Request Group::start_receive(void* data, std::size_t n, int from, std::uint32_t tag, Call call) {
  auto batch = std::make_unique<Batch>("receive");
  fill(*batch, *state_->core, {{Message::Kind::receive, data, n, from, tag}});
  state_->core->start(*batch, state_->limit(call));
  return Request(state_->core, std::move(batch), state_->limit(call));
}

void Group::exchange(const std::vector<Message>& messages, Call call, const char* name) {
  Batch batch(name);
  fill(batch, *state_->core, messages);
  batch.buffered = !batch.receives.empty();
  state_->core->run(batch, state_->limit(call));
}
Request Group::start_exchange(const std::vector<Message>& messages, Call call, const char* name) {
  auto batch = std::make_unique<Batch>(name);
  fill(*batch, *state_->core, messages);
  batch->buffered = !batch->receives.empty();
  state_->core->start(*batch, state_->limit(call));
  return Request(state_->core, std::move(batch), state_->limit(call));
}

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

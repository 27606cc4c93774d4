#include "tessera/comm/backends/mpi/mpi_work.h"

#include <ATen/core/grad_mode.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <thread>

#include "tessera/base/text.h"
#include "tessera/comm/group/types.h"

namespace tessera::detail {
namespace {

using Clock = std::chrono::steady_clock;

// Number of spins if ranks share cores.
constexpr int kSpinsShared = 4;
// How often a receive that lasts is investigated: the peer may have sent something else.
constexpr std::chrono::milliseconds kInspect{20};

// The time that a regular transfer of that size does not exceed, even over a slow network.
std::chrono::milliseconds patience_for(std::int64_t bytes) {
  return std::chrono::milliseconds(2000 + bytes / 100000);
}

void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void check_received(int code, const MpiCall& call) {
  int kind = MPI_SUCCESS;
  if (code != MPI_SUCCESS && MPI_Error_class(code, &kind) == MPI_SUCCESS &&
      kind == MPI_ERR_TRUNCATE)
    throw FinalMismatch(call.name, ": a rank sent more than this one expects",
                        call.peers.empty() ? "" : concat(" from rank ", list(call.peers)),
                        "; sender and receiver must use tensors of one size and dtype");
  check_mpi(code, call.name);
}

}  // namespace

void MpiCall::end() const {
  if (!finish) return;
  const at::NoGradGuard no_grad;  // Results are written below autograd, as MPI itself does.
  finish();
}

bool MpiCall::pending() const {
  if (queued.load(std::memory_order_acquire)) return true;
  return gate != MPI_REQUEST_NULL || std::ranges::any_of(requests, [](MPI_Request request) {
           return request != MPI_REQUEST_NULL;
         });
}

MpiComm::MpiComm(std::shared_ptr<MpiContext> context, MPI_Comm comm, std::vector<int> ranks,
                 std::string name, std::chrono::milliseconds limit)
    : context_(std::move(context)), comm_(comm), ranks_(std::move(ranks)) {
  check_mpi(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check_mpi(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
  int* largest = nullptr;
  int found = 0;
  check_mpi(MPI_Comm_get_attr(comm_, MPI_TAG_UB, &largest, &found), "MPI_Comm_get_attr");
  if (found) tags_ = MpiTags(*largest);
  slot_ = library().watchdog().watch(concat("rank ", ranks_[rank_], " in group '", name, "'"));
  library().set_end_limit(limit);
  MPI_Comm host = MPI_COMM_NULL;
  int host_size = 1;
  {
    const BlockingPhase phase(*slot_, "making the group", limit.count());
    check_mpi(MPI_Comm_split_type(comm_, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host),
              "MPI_Comm_split_type");
    check_mpi(MPI_Comm_dup(comm_, &gate_), "MPI_Comm_dup");
  }
  check_mpi(MPI_Comm_size(host, &host_size), "MPI_Comm_size");
  MPI_Comm_free(&host);
  one_host_ = host_size == size();
  spins_ = host_size > sysconf(_SC_NPROCESSORS_ONLN) ? kSpinsShared : 1000;
  library().add_queue(this);
}

void MpiComm::close() noexcept {
  if (closed_) return;
  closed_ = true;
  library().remove_queue(this);
  if (mpi_flag(MPI_Finalized)) return;
  const bool sound = !stuck_.load() && !library().broken() && std::uncaught_exceptions() == 0;
  drained_ = sound && drain(std::chrono::seconds(10));
}

MpiComm::~MpiComm() {
  close();
  if (mpi_flag(MPI_Finalized)) return;
  if (drained_) {
    if (!free_comm(gate_) || !free_comm(comm_)) library().set_broken();
    return;
  }
  library().count_queued(-static_cast<int>(queue_.size()));
  library().set_broken();
  for (auto& call : adopted_) {
    // MPI may still use their memory: never freed, the process is about to end.
    [[maybe_unused]] const MpiCall* const kept = call.release();
  }
}

void MpiComm::require_usable(const char* operation) {
  library().require_thread();
  if (aborted_.load(std::memory_order_acquire))
    throw PeerLostError(
        concat(operation, " on an MPI group that was aborted; make a new group, or end the job"),
        {});
  if (stuck_.load(std::memory_order_acquire))
    throw CommError(operation,
                    " on an MPI group of which an earlier call never completed; MPI cannot "
                    "take such a call back. End the job");
  if (has_adopted_.load(std::memory_order_relaxed)) sweep();
}

void MpiComm::set_stuck() {
  stuck_.store(true, std::memory_order_release);
  library().set_broken();
}

template <class Test>
void MpiComm::poll(MpiCall& call, std::chrono::milliseconds limit, Test&& test) {
  for (int i = 0; i < spins_; ++i) {
    if (test()) return;
    pause_core();
  }
  const auto start = Clock::now();
  // A sleeping rank moves no data, so it sleeps only when even a slow network would be done: after
  // 2 s, and 1 s more for each 100 MB.
  const auto patience = patience_for(call.bytes);
  auto look_at = kInspect;
  // A large message arrives in several steps, one per test: if this rank has its core to itself,
  // not every step waits for the system to yield.
  const int burst = spins_ > kSpinsShared ? 16 : 1;
  for (int i = 0;; ++i) {
    for (int n = 0; n < burst; ++n)
      if (test()) return;
    if (i % 8 == 0) {
      library().drive();
      const auto waited = Clock::now() - start;
      if (aborted_.load(std::memory_order_acquire)) {
        if (call.pending()) set_stuck();
        throw PeerLostError(concat(call.name, ": the group was aborted while the call waited"), {});
      }
      if (waited > limit) {
        if (limit >= call.timeout) set_stuck();  // A shorter wait leaves the call in progress.
        throw TimeoutError(
            concat(call.name, " did not complete within ", limit.count(), " ms",
                   call.peers.empty() ? std::string()
                                      : concat("; it waits for rank ", list(call.peers))),
            call.peers);
      }
      if (waited > look_at) {
        look_at = std::chrono::duration_cast<std::chrono::milliseconds>(waited) + kInspect;
        look_for_others(call);
      }
      if (waited > patience) std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    sched_yield();
  }
}

void MpiComm::begin_meeting(MpiCall& call, bool waits) {
  const auto hash = static_cast<std::int64_t>(call.hash);
  const auto elements = call.card.elements;
  call.number = ++calls_;
  // The smallest of ~x is ~ of the largest x.
  call.brought = {hash,          ~hash,
                  elements,      ~elements,
                  waits ? 1 : 0, waits && call.timeout >= patience_for(call.bytes) ? 1 : 0};
  check_mpi(
      MPI_Iallreduce(call.brought.data(), call.met.data(), static_cast<int>(call.brought.size()),
                     MPI_INT64_T, MPI_MIN, gate_, &call.gate),
      "MPI_Iallreduce");
}

void MpiComm::begin(MpiCall& call) {
  {
    const std::lock_guard queue(queue_mutex_);
    const auto lock = library().serialize();
    begin_meeting(call, call.blocking);
    queue_.push_back(&call);
    queue_size_.store(queue_.size(), std::memory_order_relaxed);
    call.queued.store(true, std::memory_order_release);
    library().count_queued(1);
  }
  pump();
}

bool MpiComm::let_through(MpiCall& call) {
  try {
    if (!mpi_test(call.gate, call.name)) return false;
    call.has_met = true;
    // A blocking call sees to the rest itself.
    if (call.blocking) return true;
    if (call.met[0] != ~call.met[1]) throw FinalMismatch(difference(call, MismatchAt::under_way));
    if (aborted_.load(std::memory_order_acquire))
      throw PeerLostError(concat(call.name, ": the group was aborted before its data moved"), {});
    const at::NoGradGuard no_grad;
    for (const auto& move : call.moves) move();
  } catch (...) {
    call.error = std::current_exception();
  }
  call.moves.clear();
  return true;
}

void MpiComm::pump() {
  if (queue_size_.load(std::memory_order_relaxed) == 0) return;
  const std::unique_lock queue(queue_mutex_, std::try_to_lock);
  if (!queue) return;
  const auto lock = library().serialize();
  while (!queue_.empty()) {
    MpiCall& call = *queue_.front();
    if (!let_through(call)) break;
    queue_.pop_front();
    queue_size_.store(queue_.size(), std::memory_order_relaxed);
    library().count_queued(-1);
    call.queued.store(false, std::memory_order_release);
  }
}

void MpiComm::meet(MpiCall& call) {
  if (call.has_met) return;
  if (queue_size_.load(std::memory_order_relaxed) > 0) {
    begin(call);  // behind the started calls before it
    poll(call, call.timeout, [&] {
      pump();
      return !call.queued.load(std::memory_order_acquire);
    });
    if (call.error) std::rethrow_exception(call.error);
  } else {
    begin_meeting(call, true);
    // Held by the library while it is pending, with the call, if the wait throws.
    poll(call, call.timeout, [&call] { return mpi_test(call.gate, "MPI_Test"); });
    call.has_met = true;
  }
  const bool alike = call.met[0] == ~call.met[1], all_wait = call.met[4] == 1;
  if (!alike && all_wait) throw MismatchError(tell_difference(call));
  if (!alike) throw FinalMismatch(difference(call, MismatchAt::under_way));
  if (call.met[5] == 1)
    call.phase.emplace(*slot_, call.name, call.timeout.count());
  else
    call.blocking = false;
}

std::string MpiComm::difference(const MpiCall& call, MismatchAt at) const {
  const auto least = call.met[2], most = ~call.met[3];
  return mismatch_text({{ranks_[rank_], "called " + call.card.text()}}, at,
                       least < most ? concat(" (over the ranks ", least, " to ", most, ")") : "");
}

std::string MpiComm::tell_difference(MpiCall& call) {
  constexpr int kText = 400;
  std::vector<char> texts(ranks_.size() * kText, '\0'), mine(kText, '\0');
  const auto text = call.card.text();
  std::copy_n(text.begin(), std::min<std::size_t>(text.size(), kText - 1), mine.begin());
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(
      MPI_Iallgather(mine.data(), kText, MPI_CHAR, texts.data(), kText, MPI_CHAR, gate_, &request),
      "MPI_Iallgather");
  try {
    poll(call, call.timeout, [&request] { return mpi_test(request, "MPI_Test"); });
  } catch (...) {
    // MPI may still use their memory.
    new std::vector<char>(std::move(texts));
    new std::vector<char>(std::move(mine));
    throw;
  }
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    const std::string other(&texts[r * kText]);
    if (static_cast<int>(r) == rank_ || other == std::string(mine.data())) continue;
    return mismatch_text({{ranks_[rank_], "called " + text}, {ranks_[r], "called " + other}},
                         MismatchAt::before_data);
  }
  return difference(call, MismatchAt::before_data);
}

void MpiComm::look_for_others(MpiCall& call) {
  if (call.queued.load(std::memory_order_acquire)) return;
  for (const auto& it : call.expected) {
    const bool numbered = it.comm == gate_;
    std::string came;
    MPI_Status status{};
    {
      const auto lock = library().serialize();
      int found = 0;
      check_mpi(MPI_Iprobe(it.peer, MPI_ANY_TAG, it.comm, &found, &status), "MPI_Iprobe");
      const int tag = status.MPI_TAG;
      if (!found ||
          !(numbered ? tags_.numbered_differ(tag, it.tag) : tags_.users_differ(tag, it.tag)))
        continue;
      // A receive that cannot be taken back has its message: what waits here is a later one.
      if (!take_back(call.requests[it.request])) continue;
      const auto sent = numbered ? tags_.dtype_of(tag) : c10::ScalarType::Undefined,
                 wanted = numbered ? tags_.dtype_of(it.tag) : sent;
      MPI_Count bytes = 0;
      check_mpi(MPI_Get_elements_x(&status, MPI_BYTE, &bytes), "MPI_Get_elements_x");
      came = sent != wanted ? concat(" sent ", c10::toString(sent), " where this rank waits for ",
                                     c10::toString(wanted))
                            : concat(" sent ", bytes, " bytes where this rank expects ", it.bytes);
    }
    try {
      drop_message(it.comm, status);
    } catch (const std::exception&) {  // no memory for it: its sender waits until its limit
    }
    throw FinalMismatch(call.name, ": rank ", ranks_[status.MPI_SOURCE], came,
                        "; sender and receiver must use tensors of one size and dtype");
  }
}

bool MpiComm::take_back(MPI_Request& request) const {
  if (request == MPI_REQUEST_NULL) return false;
  check_mpi(MPI_Cancel(&request), "MPI_Cancel");
  MPI_Status status{};
  int done = 0, cancelled = 0;
  check_mpi(MPI_Request_get_status(request, &done, &status), "MPI_Request_get_status");
  if (done) check_mpi(MPI_Test_cancelled(&status, &cancelled), "MPI_Test_cancelled");
  if (!cancelled) return false;
  check_mpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
  return true;
}

void MpiComm::drop_message(MPI_Comm comm, const MPI_Status& status) {
  MPI_Count bytes = 0;
  if (MPI_Get_elements_x(&status, MPI_BYTE, &bytes) != MPI_SUCCESS ||
      bytes > std::numeric_limits<int>::max())
    return;
  auto call = std::make_unique<MpiCall>();
  call->name = "a message that nobody expects";
  call->numbers.emplace_back((static_cast<std::size_t>(bytes) + sizeof(int) - 1) / sizeof(int));
  {
    const auto lock = library().serialize();
    check_mpi(MPI_Irecv(call->numbers.back().data(), static_cast<int>(bytes), MPI_BYTE,
                        status.MPI_SOURCE, status.MPI_TAG, comm, call->request()),
              "MPI_Irecv");
  }
  adopt(std::move(call));
}

bool MpiComm::test(MpiCall& call) {
  if (call.queued.load(std::memory_order_acquire)) {
    pump();
    if (call.queued.load(std::memory_order_acquire)) return false;
  }
  if (call.error) std::rethrow_exception(call.error);
  if (!call.pending()) return true;
  const auto lock = library().serialize();
  int done = 0;
  if (call.receives.empty()) {
    if (call.requests.size() == 1) return mpi_test(call.requests.front(), call.name);
    check_mpi(MPI_Testall(static_cast<int>(call.requests.size()), call.requests.data(), &done,
                          MPI_STATUSES_IGNORE),
              call.name);
    return done != 0;
  }
  auto& statuses = call.statuses;
  statuses.resize(call.requests.size());
  const int code = MPI_Testall(static_cast<int>(call.requests.size()), call.requests.data(), &done,
                               statuses.data());
  if (code == MPI_ERR_IN_STATUS) {
    for (const auto& status : statuses)
      if (status.MPI_ERROR != MPI_ERR_PENDING) check_received(status.MPI_ERROR, call);
  }
  check_received(code, call);
  if (!done) return false;
  for (std::size_t i = 0; i < statuses.size(); ++i) {
    if (call.receives[i] < 0) continue;
    MPI_Count got = 0;
    call.source = statuses[i].MPI_SOURCE;
    check_mpi(MPI_Get_elements_x(&statuses[i], MPI_BYTE, &got), "MPI_Get_elements_x");
    if (got != call.receives[i])
      throw FinalMismatch(call.name, ": rank ", ranks_[call.source], " sent ", got,
                          " bytes where this rank expects ", call.receives[i],
                          "; sender and receiver must use tensors of one size");
  }
  return true;
}

void MpiComm::wait(MpiCall& call, std::chrono::milliseconds limit) {
  poll(call, limit, [&] { return test(call); });
}

void MpiComm::adopt(std::unique_ptr<MpiCall> call) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  adopted_.push_back(std::move(call));
  has_adopted_.store(true, std::memory_order_relaxed);
}

void MpiComm::sweep() {
  std::exception_ptr error;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(adopted_, [&](const auto& call) {
      try {
        if (!test(*call)) return false;
        call->end();
        return true;
      } catch (...) {
        if (!error) error = std::current_exception();
        if (!call->pending()) return true;
        set_stuck();
        return false;
      }
    });
    has_adopted_.store(!adopted_.empty(), std::memory_order_relaxed);
  }
  if (error) std::rethrow_exception(error);
}

bool MpiComm::drain(std::chrono::milliseconds limit) noexcept {
  try {
    MpiCall none;
    none.name = "closing an MPI group";
    if (has_adopted_.load())
      poll(none, limit, [this] {
        sweep();
        return adopted_.empty();
      });
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace tessera::detail

#include "tessera/comm/backends/mpi/mpi_work.h"

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <thread>

#include "tessera/base/text.h"
#include "tessera/comm/group/types.h"

namespace tessera::detail {

namespace {

using Clock = std::chrono::steady_clock;

// Number of spins if ranks share cores.
constexpr int kSpinsShared = 4;
// A receive that lasts longer is investigated: the peer may have sent something else.
constexpr std::chrono::milliseconds kLookAfter{1000};

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
    throw FinalMismatch(concat(call.name, ": a rank sent more than this one expects",
                               call.peers.empty() ? "" : concat(" from rank ", list(call.peers)),
                               "; sender and receiver must use tensors of one size and dtype"));
  check_mpi(code, call.name);
}

void finish(const MpiCall& call) {
  if (call.finish.empty()) return;
  const at::NoGradGuard no_grad;  // Results are written below autograd, as MPI itself does.
  for (const auto& step : call.finish) step();
}

}  // namespace

bool MpiCall::pending() const {
  return gate != MPI_REQUEST_NULL ||
         std::any_of(requests.begin(), requests.end(),
                     [](MPI_Request request) { return request != MPI_REQUEST_NULL; });
}

MpiComm::MpiComm(std::shared_ptr<MpiContext> context, MPI_Comm comm, std::vector<int> ranks,
                 std::string name, std::chrono::milliseconds limit)
    : context_(std::move(context)),
      comm_(comm),
      ranks_(std::move(ranks)),
      slot_(std::make_shared<BlockingSlot>()) {
  check_mpi(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check_mpi(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
  slot_->who = concat("rank ", ranks_[static_cast<std::size_t>(rank_)], " in group '", name, "'");
  context_->library()->watchdog().add(slot_);
  context_->library()->set_end_limit(limit);
  MPI_Comm host = MPI_COMM_NULL;
  int host_size = 1;
  {
    const BlockingPhase phase(*slot_, "making the group", limit.count());
    check_mpi(MPI_Comm_split_type(comm_, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host),
              "MPI_Comm_split_type");
  }
  check_mpi(MPI_Comm_size(host, &host_size), "MPI_Comm_size");
  MPI_Comm_free(&host);
  one_host_ = host_size == size();
  spins_ = host_size > sysconf(_SC_NPROCESSORS_ONLN) ? kSpinsShared : 1000;
}

MpiComm::~MpiComm() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized) return;
  const bool sound = !stuck_.load() && !library().broken() && std::uncaught_exceptions() == 0;
  if (sound && drain(std::chrono::seconds(10))) {
    MPI_Comm_free(&comm_);
    return;
  }
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
    throw CommError(concat(operation,
                           " on an MPI group of which an earlier call never completed; MPI cannot "
                           "take such a call back. End the job"));
  if (has_adopted_.load(std::memory_order_relaxed)) sweep();
}

void MpiComm::set_stuck() {
  stuck_.store(true, std::memory_order_release);
  library().set_broken();
}

template <class Test>
void MpiComm::poll(const MpiCall& call, std::chrono::milliseconds limit, Test&& test) {
  for (int i = 0; i < spins_; ++i) {
    if (test()) return;
    pause_core();
  }
  const auto start = Clock::now();
  // A sleeping rank moves no data, so it sleeps only when even a slow network would be done: after
  // 2 s, and 1 s more for each 100 MB.
  const auto patience = patience_for(call.bytes);
  bool looked = call.expected.empty();
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
        set_stuck();
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
      if (!looked && waited > kLookAfter) {
        looked = true;
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
  // The smallest of ~x is ~ of the largest x.
  call.brought = {hash,          ~hash,
                  elements,      ~elements,
                  waits ? 1 : 0, waits && call.timeout >= patience_for(call.bytes) ? 1 : 0};
  check_mpi(
      MPI_Iallreduce(call.brought.data(), call.met.data(), static_cast<int>(call.brought.size()),
                     MPI_INT64_T, MPI_MIN, comm_, &call.gate),
      "MPI_Iallreduce");
}

void MpiComm::meet(MpiCall& call) {
  if (call.has_met) return;
  begin_meeting(call, true);
  // Held by the library while it is pending, with the call, if the wait throws.
  poll(call, call.timeout, [&call] {
    int done = 0;
    check_mpi(MPI_Test(&call.gate, &done, MPI_STATUS_IGNORE), "MPI_Test");
    return done != 0;
  });
  call.has_met = true;
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
  return mismatch_text({ranks_[static_cast<std::size_t>(rank_)], "called " + call.card.text()}, at,
                       least < most ? concat(" (over the ranks ", least, " to ", most, ")") : "");
}

std::string MpiComm::tell_difference(const MpiCall& call) {
  constexpr int kText = 160;
  std::vector<char> texts(ranks_.size() * kText, '\0'), mine(kText, '\0');
  const auto text = call.card.text();
  std::copy_n(text.begin(), std::min<std::size_t>(text.size(), kText - 1), mine.begin());
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(
      MPI_Iallgather(mine.data(), kText, MPI_CHAR, texts.data(), kText, MPI_CHAR, comm_, &request),
      "MPI_Iallgather");
  try {
    poll(call, call.timeout, [&request] {
      int done = 0;
      check_mpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
      return done != 0;
    });
  } catch (...) {
    // MPI may still use their memory.
    new std::vector<char>(std::move(texts));
    new std::vector<char>(std::move(mine));
    throw;
  }
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    const std::string other(&texts[r * kText]);
    if (static_cast<int>(r) == rank_ || other == std::string(mine.data())) continue;
    return mismatch_text({ranks_[static_cast<std::size_t>(rank_)], "called " + text},
                         {ranks_[r], "called " + other}, MismatchAt::before_data);
  }
  return difference(call, MismatchAt::before_data);
}

void MpiComm::look_for_others(const MpiCall& call) const {
  for (const auto& [peer, tag] : call.expected)
    for (int t = kMessageTags; t < kMessageTags + kDtypes; ++t) {
      if (t == tag) continue;
      int found = 0;
      check_mpi(MPI_Iprobe(peer, t, comm_, &found, MPI_STATUS_IGNORE), "MPI_Iprobe");
      if (found)
        throw FinalMismatch(
            concat(call.name, ": rank ", ranks_[static_cast<std::size_t>(peer)], " sent ",
                   c10::toString(static_cast<c10::ScalarType>(t - kMessageTags)),
                   " where this rank waits for ",
                   c10::toString(static_cast<c10::ScalarType>(tag - kMessageTags))));
    }
}

bool MpiComm::test(MpiCall& call) {
  if (!call.pending()) return true;
  const auto lock = library().serialize();
  int done = 0;
  if (call.gate != MPI_REQUEST_NULL) {
    check_mpi(MPI_Test(&call.gate, &done, MPI_STATUS_IGNORE), call.name);
    if (!done) return false;
    if (call.met[0] != ~call.met[1]) throw FinalMismatch(difference(call, MismatchAt::under_way));
    if (call.requests.empty()) return true;
  }
  if (call.receives.empty()) {
    if (call.requests.size() == 1)
      check_mpi(MPI_Test(call.requests.data(), &done, MPI_STATUS_IGNORE), call.name);
    else
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
      throw FinalMismatch(concat(call.name, ": rank ",
                                 ranks_[static_cast<std::size_t>(call.source)], " sent ", got,
                                 " bytes where this rank expects ", call.receives[i],
                                 "; sender and receiver must use tensors of one size"));
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
  std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(adopted_, [this](const auto& call) {
    if (!test(*call)) return false;
    finish(*call);
    return true;
  });
  has_adopted_.store(!adopted_.empty(), std::memory_order_relaxed);
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

MpiWork::MpiWork(std::shared_ptr<MpiComm> comm, std::unique_ptr<MpiCall> call)
    : c10d::Work(comm->rank(), call->type), comm_(std::move(comm)), call_(std::move(call)) {
  if (!call_->pending()) complete();
}

MpiWork::~MpiWork() {
  if (call_ && call_->pending()) comm_->adopt(std::move(call_));
}

void MpiWork::fail() {
  exception_ = std::current_exception();
  if (call_->pending()) comm_->set_stuck();
}

void MpiWork::complete() {
  source_ = call_->source;
  results_ = std::move(call_->results);
  detail::finish(*call_);
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

bool MpiWork::isSuccess() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return completed_ && !exception_;
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

int MpiWork::sourceRank() const { return source_; }

std::vector<at::Tensor> MpiWork::result() {
  wait();
  return results_;
}

c10::intrusive_ptr<c10::ivalue::Future> MpiWork::getFuture() {
  wait();
  auto future =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  future->markCompleted(at::IValue(results_));
  return future;
}

}  // namespace tessera::detail

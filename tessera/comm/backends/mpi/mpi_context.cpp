#include "tessera/comm/backends/mpi/mpi_context.h"

#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "tessera/base/deadline.h"
#include "tessera/base/text.h"
#include "tessera/comm/backends/mpi/mpi_work.h"
#include "tessera/comm/group/types.h"
#include "tessera/launch/launch.h"

namespace tessera::detail {
namespace {

// In the order of MpiThreadLevel.
constexpr int kLevels[] = {MPI_THREAD_SINGLE, MPI_THREAD_FUNNELED, MPI_THREAD_SERIALIZED,
                           MPI_THREAD_MULTIPLE};

MpiThreadLevel to_level(int provided) {
  const auto* const found = std::find(std::begin(kLevels), std::end(kLevels), provided);
  return found == std::end(kLevels) ? MpiThreadLevel::single
                                    : static_cast<MpiThreadLevel>(found - std::begin(kLevels));
}

// For calls that belong to no group.
constexpr std::chrono::minutes kWorldLimit{5};

bool complete_within(MPI_Request& request, std::chrono::milliseconds limit, const char* function) {
  const auto deadline = deadline_after(limit);
  for (int i = 0;; ++i) {
    if (mpi_test(request, function)) return true;
    if (std::chrono::steady_clock::now() > deadline) return false;
    if (i < 1000)
      sched_yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

std::string processor_name() {
  char name[MPI_MAX_PROCESSOR_NAME] = {};
  int length = 0;
  MPI_Get_processor_name(name, &length);
  return std::string(name, static_cast<std::size_t>(length));
}

// The text of an error.
std::string mpi_error_text(int code) {
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) return concat("error code ", code);
  return std::string(text, static_cast<std::size_t>(length));
}

}  // namespace

void check_mpi(int code, const char* function) {
  if (code == MPI_SUCCESS) return;
  int kind = MPI_SUCCESS;
  MPI_Error_class(code, &kind);
  const char* hint = kind == MPI_ERR_TRUNCATE
                         ? ". A rank sent more than this one expects: shapes or dtypes differ "
                           "between ranks; CheckLevel::collective shows which"
                         : "";
  throw CommError(function, " failed: ", mpi_error_text(code), hint);
}

bool mpi_test(MPI_Request& request, const char* function) {
  int done = 0;
  check_mpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), function);
  return done != 0;
}

bool mpi_flag(int (*query)(int*)) {
  int flag = 0;
  query(&flag);
  return flag != 0;
}

void mpi_fatal(const std::string& who, const std::string& reason, bool may_call_mpi) {
  std::fprintf(stderr, "tessera: %s: %s. Ending the MPI job.\n", who.c_str(), reason.c_str());
  std::fflush(stderr);
  if (may_call_mpi) MPI_Abort(MPI_COMM_WORLD, 1);
  std::_Exit(1);  // The launcher ends a job if one of its processes leaves without MPI_Finalize.
}

BlockingWatchdog::~BlockingWatchdog() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<BlockingSlot> BlockingWatchdog::watch(std::string who) {
  auto slot = std::make_shared<BlockingSlot>();
  slot->who = std::move(who);
  std::lock_guard<std::mutex> lock(mutex_);
  slots_.push_back(slot);
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  return slot;
}

void BlockingWatchdog::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_) {
    std::erase_if(slots_, [](const auto& slot) { return slot.expired(); });
    const auto now = std::chrono::steady_clock::now();
    for (const auto& weak : slots_) {
      const auto slot = weak.lock();
      if (!slot) continue;
      const std::uint64_t phase = slot->phase.load(std::memory_order_acquire);
      if (slot->seen_phase != phase) {
        slot->seen_phase = phase;
        slot->seen_since = now;
      }
      const std::chrono::milliseconds limit(slot->limit_ms.load(std::memory_order_relaxed));
      if (phase % 2 == 1 && now - slot->seen_since > limit)
        mpi_fatal(
            slot->who,
            concat(slot->operation.load(std::memory_order_relaxed),
                   " did not end within its limit of ", limit.count(),
                   " ms although all ranks had begun it: a rank died or was stopped in the middle, "
                   "or the network is slower than the limit allows"),
            may_call_mpi_);
    }
    wake_.wait_for(lock, std::chrono::milliseconds(200), [this] { return stop_; });
  }
}

MPI_Comm duplicate(MPI_Comm comm, std::chrono::milliseconds limit) {
  // MPI writes the handle when the request completes, which may be after a wait ran out.
  auto copy = std::make_unique<MPI_Comm>(MPI_COMM_NULL);
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Comm_idup(comm, copy.get(), &request), "MPI_Comm_idup");
  if (!complete_within(request, limit, "MPI_Comm_idup")) {
    [[maybe_unused]] const auto* const kept = copy.release();
    throw TimeoutError(concat("not all ranks of the communicator have come within ", limit.count(),
                              " ms to take part in making a world of it; call this on all of them"),
                       {});
  }
  check_mpi(MPI_Comm_set_errhandler(*copy, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return *copy;
}

bool free_comm(MPI_Comm& comm) noexcept {
  const auto deadline = deadline_after(std::chrono::seconds(10));
  // A message that is here is seen by the first look or by one soon after it.
  for (int misses = 0; misses < 10;) {
    int there = 0, done = 0;
    MPI_Status status;
    if (MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm, &there, &status) != MPI_SUCCESS) return false;
    if (!there) {
      ++misses;
      continue;
    }
    if (std::chrono::steady_clock::now() > deadline) return false;
    // Cut to nothing, which MPI_Test calls an error; a large one needs its sender, maybe gone.
    MPI_Request request = MPI_REQUEST_NULL;
    if (MPI_Irecv(nullptr, 0, MPI_BYTE, status.MPI_SOURCE, status.MPI_TAG, comm, &request) !=
        MPI_SUCCESS)
      return false;
    while (MPI_Test(&request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && !done) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      sched_yield();
    }
  }
  MPI_Comm_free(&comm);
  return true;
}

bool all_come(MPI_Comm comm, std::chrono::milliseconds limit) {
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Ibarrier(comm, &request), "MPI_Ibarrier");
  return complete_within(request, limit, "MPI_Ibarrier");
}

MpiLibrary::MpiLibrary(bool owner, int provided)
    : owner_(owner),
      level_(to_level(provided)),
      watchdog_(std::make_unique<BlockingWatchdog>(provided == MPI_THREAD_MULTIPLE)) {}

std::shared_ptr<MpiLibrary> MpiLibrary::open(MpiThreadLevel wanted) {
  // MPI can be initialised and finalised once per process, so its owner has to be found again.
  static std::mutex mutex;
  static std::weak_ptr<MpiLibrary> current;
  std::lock_guard<std::mutex> lock(mutex);
  if (auto library = current.lock()) return library;
  if (mpi_flag(MPI_Finalized))
    throw CommError(
        "MPI was finalised in this process already and cannot be initialised again; keep one "
        "MpiWorld until the end of main()");
  if (mpi_flag(MPI_Initialized)) return attach();
  int provided = MPI_THREAD_SINGLE;
  check_mpi(MPI_Init_thread(nullptr, nullptr, kLevels[static_cast<int>(wanted)], &provided),
            "MPI_Init_thread");
  std::shared_ptr<MpiLibrary> library(new MpiLibrary(true, provided));
  current = library;
  try {
    library->world_ = duplicate(MPI_COMM_WORLD, kWorldLimit);
  } catch (...) {
    library->set_broken();
    throw;
  }
  if (wanted > MpiThreadLevel::funneled && library->level() < wanted)
    throw CommError("this MPI library grants thread level ", to_string(library->level()), ", and ",
                    to_string(wanted),
                    " was asked for; ask for less, or use a library built with thread support");
  return library;
}

std::shared_ptr<MpiLibrary> MpiLibrary::attach() {
  int provided = MPI_THREAD_SINGLE;
  check_mpi(MPI_Query_thread(&provided), "MPI_Query_thread");
  return std::shared_ptr<MpiLibrary>(new MpiLibrary(false, provided));
}

MpiLibrary::~MpiLibrary() {
  watchdog_.reset();
  if (!owner_ || mpi_flag(MPI_Finalized)) return;
  std::string why;
  if (std::uncaught_exceptions() > 0) {
    why = "an exception is being thrown";
  } else if (broken()) {
    why = "a call did not complete";
  } else {
    // MPI_Finalize waits for all ranks, without a limit.
    std::chrono::milliseconds limit(end_limit_ms_.load());
    if (limit.count() == 0) limit = kWorldLimit;
    try {
      if (!all_come(world_, limit))
        why = concat("not all ranks came to the end within ", limit.count(), " ms");
      else if (!free_comm(world_))
        why = "a message that nobody received does not arrive";
    } catch (const std::exception& error) {
      why = error.what();
    }
  }
  if (!why.empty()) {
    int rank = -1;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    std::fprintf(
        stderr,
        "tessera: rank %d on %s leaves MPI without finalising it, because %s; the launcher ends "
        "the other ranks.\n",
        rank, processor_name().c_str(), why.c_str());
    return;
  }
  MPI_Finalize();
}

void MpiLibrary::set_end_limit(std::chrono::milliseconds limit) {
  auto known = end_limit_ms_.load();
  while (known < limit.count() && !end_limit_ms_.compare_exchange_weak(known, limit.count())) {
  }
}

void MpiLibrary::require_thread() const {
  if (level_ < MpiThreadLevel::serialized && !mpi_flag(MPI_Is_thread_main))
    throw Error(
        "a call on an MPI group came from another thread than the one that initialised MPI, "
        "and MPI's thread level is ",
        to_string(level_),
        ". Initialise MPI with MPI_THREAD_MULTIPLE "
        "(MpiWorld::initialize(MpiThreadLevel::multiple)), or call from the main thread");
}

std::unique_lock<std::mutex> MpiLibrary::serialize() {
  if (level_ != MpiThreadLevel::serialized) return {};
  return std::unique_lock<std::mutex>(mutex_);
}

void MpiLibrary::step_in_waits(const std::weak_ptr<const std::function<bool()>>& step) {
  const std::lock_guard lock(steps_mutex_);
  steps_.push_back({std::this_thread::get_id(), step});
  has_steps_.store(true, std::memory_order_relaxed);
}

void MpiLibrary::add_queue(MpiComm* comm) {
  const std::lock_guard lock(queues_mutex_);
  queues_.push_back(comm);
}

void MpiLibrary::remove_queue(MpiComm* comm) {
  const std::lock_guard lock(queues_mutex_);
  std::erase(queues_, comm);
}

void MpiLibrary::pump_queues() {
  const std::unique_lock lock(queues_mutex_, std::try_to_lock);
  if (!lock) return;  // another thread is at it
  for (auto* comm : queues_) comm->pump();
}

void MpiLibrary::run_steps() {
  // Taken out while they run: a step may make calls of its own.
  std::vector<Step> mine;
  {
    const std::lock_guard lock(steps_mutex_);
    const auto others = std::stable_partition(steps_.begin(), steps_.end(), [](const Step& s) {
      return s.thread != std::this_thread::get_id();
    });
    mine.assign(others, steps_.end());
    steps_.erase(others, steps_.end());
  }
  std::erase_if(mine, [](const Step& step) {
    const auto run = step.run.lock();
    return !run || (*run)();
  });
  const std::lock_guard lock(steps_mutex_);
  steps_.insert(steps_.end(), mine.begin(), mine.end());
  has_steps_.store(!steps_.empty(), std::memory_order_relaxed);
}

MpiContext::MpiContext(std::shared_ptr<MpiLibrary> library, MPI_Comm comm, bool owns_comm)
    : library_(std::move(library)), comm_(comm), owns_comm_(owns_comm) {
  check_mpi(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(comm_, &size_), "MPI_Comm_size");
}

MpiContext::~MpiContext() {
  if (!owns_comm_ || library_->broken() || mpi_flag(MPI_Finalized) ||
      std::uncaught_exceptions() > 0)
    return;
  MPI_Comm comm = comm_;
  if (!free_comm(comm)) library_->set_broken();
}

std::string MpiContext::host() const { return processor_name(); }

Launch MpiContext::launch(std::chrono::milliseconds limit) {
  Launch launch;
  launch.launcher = "code";
  launch.rank = rank();
  launch.world_size = size();
  launch.node_rank = -1;
  MPI_Comm host = MPI_COMM_NULL;
  if (!all_come(comm_, limit)) {
    library_->set_broken();
    throw TimeoutError("MpiWorld::launch: not all ranks came; call it on all of them", {});
  }
  const auto slot = library_->watchdog().watch(concat("rank ", rank()));
  {
    const BlockingPhase phase(*slot, "finding the ranks of this host", limit.count());
    check_mpi(MPI_Comm_split_type(comm_, MPI_COMM_TYPE_SHARED, rank(), MPI_INFO_NULL, &host),
              "MPI_Comm_split_type");
  }
  MPI_Comm_rank(host, &launch.local_rank);
  MPI_Comm_size(host, &launch.local_size);
  MPI_Comm_free(&host);
  return launch;
}

void MpiContext::fatal(const std::string& reason) const {
  mpi_fatal(concat("rank ", rank(), " of ", size(), " on ", host()), reason, true);
}

namespace {

std::string library_version() {
  char text[8192] = {};  // the most that any MPI library writes, should it be another one
  int length = 0;
  check_mpi(MPI_Get_library_version(text, &length), "MPI_Get_library_version");
  const std::string all(text, static_cast<std::size_t>(length));
  return all.substr(0, all.find('\n'));
}

std::shared_ptr<MpiRanks> duplicate_of(MPI_Comm communicator, std::chrono::milliseconds limit) {
  const MPI_Comm copy = duplicate(communicator, limit);
  return std::make_shared<MpiContext>(MpiLibrary::attach(), copy, true);
}

std::shared_ptr<MpiRanks> initialize(MpiThreadLevel wanted) {
  const auto library = MpiLibrary::open(wanted);
  if (library->owner()) return std::make_shared<MpiContext>(library, library->world(), false);
  // MPI belongs to the program, which may have messages of its own: use another communicator.
  return duplicate_of(MPI_COMM_WORLD, kWorldLimit);
}

std::shared_ptr<MpiRanks> of_communicator(int handle, std::chrono::milliseconds limit) {
  if (mpi_flag(MPI_Finalized))
    throw InvalidArgument(
        "MPI is finalised: ranks of a communicator come before MPI_Finalize, and go before it");
  if (!mpi_flag(MPI_Initialized))
    throw InvalidArgument(
        "MPI is not initialised: MPI_Init comes first (or MpiWorld::initialize(), without a "
        "communicator of your own). If it did, the program uses another MPI library than "
        "libtessera_mpi.so, whose is ",
        library_version());
  const MPI_Comm communicator = MPI_Comm_f2c(static_cast<MPI_Fint>(handle));
  if (communicator == MPI_COMM_NULL)
    throw InvalidArgument(
        "mpi_world() was given MPI_COMM_NULL: this process is not in the communicator");
  int inter = 0;
  check_mpi(MPI_Comm_test_inter(communicator, &inter), "MPI_Comm_test_inter");
  if (inter)
    throw InvalidArgument(
        "mpi_world() was given an intercommunicator; merge it first (MPI_Intercomm_merge)");
  return duplicate_of(communicator, limit);
}

#ifdef OPEN_MPI
constexpr bool kOpenMpi = true;
#else
constexpr bool kOpenMpi = false;
#endif
constexpr MpiPart kPart{TESSERA_MPI_PART_FOR, kOpenMpi, library_version, initialize,
                        of_communicator};

}  // namespace

extern "C" const MpiPart* tessera_mpi_part() { return &kPart; }

}  // namespace tessera::detail

#include "tessera/c/detail/call.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <new>

#include "tessera/base/internal/vector.h"
#include "tessera/c/detail/refuse.h"
#include "tessera/comm/group/types.h"
#include "tessera/gradient/sync.h"
#include "tessera/tensor/errors.h"
#include "tessera/train/session.h"

namespace tessera::c {

Object::~Object() = default;

namespace {

std::string& message() {
  thread_local std::string text;
  return text;
}

// Where handles are kept. One for the process, as MPI's: a handle is a number that says its kind,
// its slot, and the how manieth use of that slot it is, so that nothing is ever read through one.
class Table {
 public:
  static Table& of_process() {
    static Table& table = *new Table;  // never destroyed: an exit may come in the middle of a call
    return table;
  }

  std::uintptr_t add(std::shared_ptr<Object> object, Kind kind) {
    const std::lock_guard lock(mutex_);
    std::size_t at = 0;
    if (free_.empty()) {
      at = slots_.size();
      if (at > kMostSlots)
        throw Misuse(TESSERA_ERROR_MEMORY, "more handles than there are numbers");
      slots_.emplace_back();
    } else {
      at = free_.back();
      free_.pop_back();
    }
    Slot& slot = slots_[at];
    slot = {std::move(object), kind, slot.use + 1, ++made_, false};
    return (static_cast<std::uintptr_t>(kind) << 60) | (static_cast<std::uintptr_t>(at) << 32) |
           slot.use;
  }

  std::shared_ptr<Object> find(const void* handle, const char* name, std::optional<Kind> wanted,
                               Kind* found = nullptr) {
    const std::lock_guard lock(mutex_);
    const Slot& slot = slots_[index(handle, name, wanted)];
    if (found) *found = slot.kind;
    return slot.object;
  }

  // The caller lets go of the object outside of the lock.
  std::shared_ptr<Object> remove(const void* handle, std::optional<Kind> wanted) {
    const std::lock_guard lock(mutex_);
    const std::size_t at = index(handle, "the handle", wanted);
    if (!wanted && slots_[at].kind == Kind::job)
      throw Misuse(TESSERA_ERROR_HANDLE, "a job is ended by tessera_end(), not freed");
    return empty(at, false);
  }

  // All of a job, newest first.
  std::vector<std::shared_ptr<Object>> remove_all(const Job* job) {
    const std::lock_guard lock(mutex_);
    std::vector<std::size_t> mine;
    for (std::size_t at = 0; at < slots_.size(); ++at)
      if (slots_[at].object && slots_[at].object->job.get() == job) mine.push_back(at);
    std::ranges::sort(
        mine, [&](std::size_t a, std::size_t b) { return slots_[a].made > slots_[b].made; });
    return mapped(mine, [&](std::size_t at) { return empty(at, true); });
  }

  // The job that runs in this process, if it is the only one.
  JobPtr only_job() {
    const std::lock_guard lock(mutex_);
    JobPtr job;
    for (const Slot& slot : slots_) {
      if (!slot.object || slot.kind != Kind::job) continue;
      if (job) return nullptr;
      job = slot.object->job;
    }
    return job;
  }

 private:
  struct Slot {
    std::shared_ptr<Object> object;
    Kind kind = Kind::job;
    std::uint32_t use = 0;
    std::uint64_t made = 0;
    bool ended = false;
  };
  static constexpr std::size_t kMostSlots = (std::size_t{1} << 28) - 1;

  std::shared_ptr<Object> empty(std::size_t at, bool ended) {
    slots_[at].ended = ended;
    free_.push_back(at);
    return std::exchange(slots_[at].object, nullptr);
  }

  [[noreturn]] void refuse_null(const char* name, std::optional<Kind> wanted) const {
    const bool any =
        std::ranges::any_of(slots_, [](const Slot& s) { return s.object && s.kind == Kind::job; });
    if (!any)
      throw Misuse(TESSERA_ERROR_NO_JOB, name,
                   " is NULL, and no job runs: tessera_start() or "
                   "tessera_start_mpi() comes first");
    throw Misuse(TESSERA_ERROR_HANDLE, name, " is NULL, where a ",
                 wanted ? to_string(*wanted) : "handle",
                 " is wanted: the call that was to make it failed, or was not made");
  }

  std::size_t index(const void* handle, const char* name, std::optional<Kind> wanted) const {
    const auto number = reinterpret_cast<std::uintptr_t>(handle);
    if (!number) refuse_null(name, wanted);
    const auto kind = static_cast<Kind>(number >> 60);
    const std::size_t at = (number >> 32) & kMostSlots;
    const auto use = static_cast<std::uint32_t>(number);
    if (kind < Kind::job || kind > Kind::state || at >= slots_.size() || use == 0 ||
        use > slots_[at].use || (use == slots_[at].use && kind != slots_[at].kind))
      throw Misuse(TESSERA_ERROR_HANDLE, name,
                   " is no handle of Tessera: it was never set, or is an address");
    const Slot& slot = slots_[at];
    if (use != slot.use || !slot.object) {
      const bool ended = use == slot.use && slot.ended;
      throw Misuse(ended ? TESSERA_ERROR_NO_JOB : TESSERA_ERROR_HANDLE, name, " is a ",
                   to_string(kind), ended ? " whose job has ended" : " that was freed already");
    }
    if (wanted && kind != *wanted)
      throw Misuse(TESSERA_ERROR_HANDLE, name, " is a ", to_string(kind), ", where a ",
                   to_string(*wanted), " is wanted");
    return at;
  }

  std::mutex mutex_;
  std::vector<Slot> slots_;
  std::vector<std::size_t> free_;
  std::uint64_t made_ = 0;
};

tessera_result code_of_comm(const CommError& error) {
  if (dynamic_cast<const PeerFailedError*>(&error)) return TESSERA_ERROR_PEER_FAILED;
  if (dynamic_cast<const PeerLostError*>(&error)) return TESSERA_ERROR_PEER_LOST;
  if (dynamic_cast<const TimeoutError*>(&error)) return TESSERA_ERROR_TIMEOUT;
  if (dynamic_cast<const MismatchError*>(&error)) return TESSERA_ERROR_MISMATCH;
  return TESSERA_ERROR_COMMUNICATION;
}

tessera_result code_of(const Error& error) {
  if (const auto* misuse = dynamic_cast<const Misuse*>(&error)) return misuse->result();
  if (const auto* comm = dynamic_cast<const CommError*>(&error)) return code_of_comm(*comm);
  if (dynamic_cast<const InvalidArgument*>(&error)) return TESSERA_ERROR_ARGUMENT;
  if (dynamic_cast<const ConfigurationError*>(&error)) return TESSERA_ERROR_CONFIGURATION;
  if (dynamic_cast<const FileError*>(&error)) return TESSERA_ERROR_FILE;
  if (dynamic_cast<const NotAvailable*>(&error)) return TESSERA_ERROR_NOT_AVAILABLE;
  if (dynamic_cast<const ShardingError*>(&error)) return TESSERA_ERROR_SHARDING;
  if (dynamic_cast<const GradientError*>(&error)) return TESSERA_ERROR_GRADIENT;
  if (dynamic_cast<const NonFiniteGradient*>(&error)) return TESSERA_ERROR_GRADIENT;
  return TESSERA_ERROR_OTHER;
}

// Tells the other ranks of the job.
void tell(const JobPtr& job, const std::string& reason) {
  if (!job || !job->manager || job->size == 1) return;
  job->manager->fail_groups_within(Mesh({{"job", job->size}}, numbers_below(job->size)), reason);
}

// Inside a handler. The text may lack memory, the code does not.
tessera_result caught(const char* name) noexcept {
  tessera_result code = TESSERA_ERROR_OTHER;
  try {
    try {
      throw;
    } catch (const Error& error) {
      code = code_of(error);
      message() = concat(name, ": ", error.what());
    } catch (const c10::Error& error) {
      code = TESSERA_ERROR_TORCH;
      message() = concat(name, ": ", error.what_without_backtrace());
    } catch (const std::bad_alloc&) {
      code = TESSERA_ERROR_MEMORY;
      message() = concat(name, ": the memory did not suffice");
    } catch (const std::exception& error) {
      message() = concat(name, ": ", error.what());
    } catch (...) {
      message() = concat(name, ": an exception that is no std::exception");
    }
  } catch (...) {
    message().clear();
  }
  return code;
}

}  // namespace

const char* to_string(Kind kind) {
  static constexpr const char* kNames[] = {"handle", "job",       "mesh",    "group", "tensor",
                                           "model",  "optimizer", "session", "state"};
  const auto i = static_cast<std::size_t>(kind);
  return kNames[i < std::size(kNames) ? i : 0];
}

std::string need_text(const char* text, const char* name) {
  if (!*need(text, name)) refuse(name, " is empty");
  return text;
}

void Job::enter() {
  const std::lock_guard lock(mutex_);
  const auto me = std::this_thread::get_id();
  if (depth_ > 0 && inside_ != me)
    throw Misuse(TESSERA_ERROR_THREAD,
                 "another thread is in a call of this job: one at a time may be, since the order "
                 "of calls must be the same on all ranks");
  inside_ = me;
  ++depth_;
}

void Job::leave() {
  const std::lock_guard lock(mutex_);
  --depth_;
}

Call::~Call() {
  held_.clear();
  if (job_) job_->leave();
}

void Call::enter(const JobPtr& job) {
  if (job_ == job) return;
  if (job_) refuse("handles of two jobs in one call");
  job->enter();
  job_ = job;
}

Object& Call::look_up(const void* handle, const char* name, Kind kind) {
  held_.push_back(Table::of_process().find(handle, name, kind));
  enter(held_.back()->job);
  return *held_.back();
}

std::shared_ptr<Object> Call::share_any(const void* handle, const char* name, Kind& kind) {
  auto object = Table::of_process().find(handle, name, std::nullopt, &kind);
  enter(object->job);
  return object;
}

void* Call::keep(std::shared_ptr<Object> object, Kind kind) {
  const std::uintptr_t number = Table::of_process().add(std::move(object), kind);
  return reinterpret_cast<void*>(number);  // NOLINT(performance-no-int-to-ptr): never an address
}

tessera_result run(const char* name, Reach reach, const std::function<void(Call&)>& body) noexcept {
  tessera_result code = TESSERA_OK;
  try {
    Call call;
    try {
      body(call);
      return TESSERA_OK;
    } catch (const Misuse& error) {
      code = caught(name);
      if (reach == Reach::own || error.result() == TESSERA_ERROR_THREAD) return code;
      JobPtr job = call.job();
      if (!job) {
        job = Table::of_process().only_job();
        if (job) call.enter(job);
      }
      tell(job, message());
      return code;
    } catch (...) {
      return caught(name);
    }
  } catch (...) {
    // Telling failed: the first error is the one to report.
    return code == TESSERA_OK ? caught(name) : code;
  }
}

void release_job(Call& call, const void* handle) {
  Table& table = Table::of_process();
  const JobPtr job = table.find(handle, "job", Kind::job)->job;
  call.enter(job);
  auto objects = table.remove_all(job.get());
  for (auto& object : objects) object.reset();
  job->manager.reset();
}

extern "C" {

const char* tessera_message(void) { return message().c_str(); }

const char* tessera_result_name(tessera_result result) {
  static constexpr const char* names[] = {"TESSERA_OK",
                                          "TESSERA_ERROR_ARGUMENT",
                                          "TESSERA_ERROR_HANDLE",
                                          "TESSERA_ERROR_NO_JOB",
                                          "TESSERA_ERROR_THREAD",
                                          "TESSERA_ERROR_CONFIGURATION",
                                          "TESSERA_ERROR_FILE",
                                          "TESSERA_ERROR_NOT_AVAILABLE",
                                          "TESSERA_ERROR_MISMATCH",
                                          "TESSERA_ERROR_TIMEOUT",
                                          "TESSERA_ERROR_PEER_LOST",
                                          "TESSERA_ERROR_PEER_FAILED",
                                          "TESSERA_ERROR_COMMUNICATION",
                                          "TESSERA_ERROR_SHARDING",
                                          "TESSERA_ERROR_GRADIENT",
                                          "TESSERA_ERROR_TORCH",
                                          "TESSERA_ERROR_MEMORY",
                                          "TESSERA_ERROR_OTHER"};
  const auto number = static_cast<std::size_t>(result);
  return number < std::size(names) ? names[number] : "no result of Tessera";
}

tessera_result tessera_refuse(const char* name, const char* text) {
  return run(name, Reach::all, [&](Call&) { refuse(text); });
}

tessera_result tessera_free(void* handle) {
  if (!handle) return TESSERA_OK;
  return run("tessera_free", Reach::own, [&](Call& call) {
    Table& table = Table::of_process();
    call.enter(table.find(handle, "the handle", std::nullopt)->job);
    table.remove(handle, std::nullopt);
  });
}
}

}  // namespace tessera::c

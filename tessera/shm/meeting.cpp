#include "tessera/shm/group.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <new>
#include <optional>
#include <set>

#include "tessera/base/text.h"
#include "tessera/launch/internal/cores.h"
#include "tessera/shm/detail/calls.h"
#include "tessera/shm/detail/meet.h"
#include "tessera/shm/detail/messages.h"
#include "tessera/shm/detail/reception.h"
#include "tessera/shm/detail/socket.h"

namespace tessera::shm::detail {
namespace {

constexpr std::size_t kLeastSlot = 131072, kMostSlot = 524288, kSlotForEach = 16384;
constexpr std::size_t kMessageBytes = std::size_t{4} << 20, kLeastFrame = 4096, kMostFrame = 65536;
// Of the trial that compares kinds of stores: every frame is first used with each.
constexpr std::size_t kTrialBytes = 32768;
constexpr int kWarmTrials = static_cast<int>(kFrames), kTrials = 4;
/// Others than plain stores have to need less than this share of the time.
constexpr double kClearlyFaster = 0.8;
/// How long a rank that finds no rank 0 looks for the reason, left before the door closed.
constexpr std::chrono::milliseconds kRecently(200);
constexpr std::size_t kMostArena = std::size_t{1} << 40;

void require_rank(int rank, int size) {
  if (size < 1 || rank < 0 || rank >= size)
    throw InvalidArgument("shm: rank ", rank, " of ", size, " ranks: ranks are 0 to size - 1");
}

Layout layout_of(int size, const Options& options) {
  if (size > kMaxRanks)
    throw SetupError(Cause::too_many_ranks,
                     concat("shm: ", size, " ranks are to share one memory, at most ", kMaxRanks,
                            " can: make groups of groups"));
  if (options.arena_bytes > kMostArena || options.slot_bytes > kMostArena ||
      options.frame_bytes > kMostArena)
    throw InvalidArgument("shm: sizes of arena, slots and frames are at most ", kMostArena,
                          " bytes");
  const auto n = static_cast<std::size_t>(size);
  const std::size_t slot = options.slot_bytes != 0
                               ? std::max(options.slot_bytes, n * kLineBytes)
                               : std::clamp(kSlotForEach * (n - 1), kLeastSlot, kMostSlot);
  const std::size_t frame =
      options.frame_bytes != 0 ? options.frame_bytes
                               : std::clamp(kMessageBytes / (n * kFrames), kLeastFrame, kMostFrame);
  return Layout(size, slot, frame, options.arena_bytes);
}

/// The words, separated by spaces, with which a rank introduces itself during the meeting.
std::string own_account(int rank, const Layout& layout, const Probe& probe) {
  TextStream out;
  out << rank << ' ' << layout.slot_bytes() << ' ' << layout.frame_bytes() << ' '
      << layout.arena_bytes() << ' ' << probe.address << ' ' << probe.value;
  const CpuBudget budget = cpu_budget();
  out << ' ' << (register_for_barriers() ? 1 : 0) << ' '
      << (budget.quota > 0 ? static_cast<int>(std::ceil(budget.quota)) : kMaxRanks);
  for (const int cpu : budget.cpus) out << ' ' << cpu;
  return std::move(out).str();
}

struct Account {
  int rank = -1;
  std::size_t slot = 0, frame = 0, arena = 0;
  Probe probe;
  int barriers = 0;
  /// Number of ranks that the control group gives time to at once.
  int quota = 1;
  std::vector<int> cpus;
};

Account read_account(const std::string& text) {
  TextReader in(text);
  Account a;
  in >> a.rank >> a.slot >> a.frame >> a.arena >> a.probe.address >> a.probe.value >> a.barriers >>
      a.quota;
  if (!in)
    throw SetupError(Cause::disagreement,
                     "shm: what came over the local socket is no message of this library");
  for (int cpu = 0; in >> cpu;) a.cpus.push_back(cpu);
  return a;
}

std::optional<ChosenStores> chosen_stores(const Options& options) {
  if (!options.stores) return std::nullopt;
  return ChosenStores{*options.stores, *options.stores == Stores::past_cache};
}

/// What a text begins with that says why there is no group.
constexpr const char* kFailure = "no ";

std::string failure_text(const std::exception& error) {
  Cause cause = Cause::not_permitted;
  if (const auto* setup = dynamic_cast<const SetupError*>(&error)) cause = setup->cause();
  if (dynamic_cast<const InvalidArgument*>(&error) != nullptr) cause = Cause::disagreement;
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) cause = Cause::no_memory;
  return concat(kFailure, static_cast<int>(cause), ' ', error.what());
}

/// Throws the error that another rank described by failure_text().
void rethrow_failure(const std::string& text) {
  if (!text.starts_with(kFailure)) return;
  TextReader in(text.substr(std::strlen(kFailure)));
  int cause = 0;
  in >> cause;
  std::string what;
  std::getline(in, what);
  cause = std::clamp(cause, 0, static_cast<int>(Cause::absent));
  throw SetupError(static_cast<Cause>(cause),
                   what.empty() ? "shm: another rank failed" : what.substr(1));
}

/// True if each rank can have a CPU of its own, given the CPUs that each may use.
bool each_has_a_core(const std::vector<std::vector<int>>& cpus) {
  // A matching of ranks and CPUs by augmenting paths.
  std::map<int, int> owners;
  std::set<int> tried;
  const std::function<bool(int)> seat = [&](int rank) {
    const auto& own = cpus[rank];
    const auto free = std::ranges::find_if(own, [&](int cpu) { return !owners.contains(cpu); });
    if (free != own.end()) {
      owners[*free] = rank;
      return true;
    }
    for (const int cpu : own) {
      if (!tried.insert(cpu).second || !seat(owners[cpu])) continue;
      owners[cpu] = rank;
      return true;
    }
    return false;
  };
  for (std::size_t r = 0; r < cpus.size(); ++r) {
    tried.clear();
    if (!seat(static_cast<int>(r))) return false;
  }
  return true;
}

class Meeting {
 public:
  Meeting(int rank, int size, const Directory& directory, const Options& options)
      : rank_(rank),
        size_(size),
        directory_(directory),
        options_(options),
        deadline_(deadline_after(options.timeout)),
        key_(concat("shm/", options.name, "/")) {}

  std::shared_ptr<Core> run() {
    if (rank_ == 0)
      lead();
    else
      follow();
    finish();
    return std::move(core_);
  }

 private:
  struct Guest {
    Descriptor socket;
    Descriptor process;
    Account account;
  };

  void put(const std::string& key, const std::string& text) { directory_.put(key_ + key, text); }
  /// As put(), while something else fails.
  void leave(const std::string& key, const std::string& text) {
    try {
      put(key, text);
    } catch (const std::exception&) {  // The first failure says more.
    }
  }

  std::string get(const std::string& key, int from) {
    try {
      return directory_.get(key_ + key, time_left(deadline_));
    } catch (const std::exception& error) {
      throw SetupError(Cause::absent, concat("shm group '", options_.name, "': rank ", from,
                                             " did not come: ", error.what()));
    }
  }

  /// What may fail on one rank alone, and is told to the others like what comes later.
  void prepare() {
    layout_ = layout_of(size_, options_);
    std::uint64_t value = 0;
    std::memcpy(&value, random_bytes(sizeof value).data(), sizeof value);
    identity_.emplace(value | 1);
  }

  /// Before this rank says that it has all it needs.
  void make_core() {
    core_ = std::make_shared<Core>(
        CoreOptions{options_.name, rank_, size_, layout_, crowded_, barriers_, options_.kept_bytes},
        memory_, std::move(*identity_), Liveness(std::move(processes_), std::move(probes_)));
  }

  // ---- rank 0 ----

  void lead() {
    std::vector<Guest> guests(static_cast<std::size_t>(size_));
    std::string failure_key = "address";
    // Closed after the others can know why.
    Listener listener;
    try {
      prepare();
      listener = listen_locally();
      secret_ = random_bytes(16);
      Reception reception(listener, secret_, size_, deadline_);
      put("address", listener.name + secret_);
      failure_key = "failure";
      admit(reception, guests);
      hand_out(guests);
      for (int r = 1; r < size_; ++r)
        rethrow_failure(receive_text(guests[r].socket, nullptr, deadline_));
      for (int r = 1; r < size_; ++r) send_text(guests[r].socket, "yes", {}, deadline_);
    } catch (const std::exception& error) {
      leave(failure_key, failure_text(error));
      for (const auto& guest : guests)
        if (guest.socket) tell(guest.socket, error);
      throw;
    }
  }

  static void tell(const Descriptor& socket, const std::exception& error) {
    try {
      send_text(socket, failure_text(error), {}, deadline_after(std::chrono::seconds(1)));
    } catch (const SetupError&) {  // That rank is gone itself.
    }
  }

  /// Waits for all ranks. The ranks that came learn of a failure too: they are among the guests.
  void admit(Reception& reception, std::vector<Guest>& guests) {
    std::optional<SetupError> failure;
    std::vector<bool> met(static_cast<std::size_t>(size_), false);
    for (int r = 1; r < size_; ++r) {
      try {
        rethrow_failure(get(concat("met/", r), r));
        met[r] = true;
      } catch (const SetupError& error) {
        if (!failure) failure = SetupError(error.cause(), concat(error.what(), " (rank ", r, ")"));
      }
    }
    std::vector<Hello> hellos = reception.close(met);
    for (std::size_t r = 1; r < hellos.size(); ++r) guests[r].socket = std::move(hellos[r].socket);
    if (failure) throw SetupError(*failure);
    for (std::size_t r = 1; r < hellos.size(); ++r) {
      if (!guests[r].socket)
        throw SetupError(Cause::absent, concat("shm group '", options_.name, "': rank ", r,
                                               " did not say who it is within the time limit"));
      guests[r].process = process_of(guests[r].socket);
      guests[r].account = read_account(hellos[r].text);
      require_same_sizes(guests[r].account);
    }
  }

  void require_same_sizes(const Account& account) const {
    if (account.slot == layout_.slot_bytes() && account.frame == layout_.frame_bytes() &&
        account.arena == layout_.arena_bytes())
      return;
    throw SetupError(
        Cause::disagreement,
        concat("shm group '", options_.name, "': rank ", account.rank,
               " has slots, frames and an arena of ", account.slot, ", ", account.frame, " and ",
               account.arena, " bytes, rank 0 of ", layout_.slot_bytes(), ", ",
               layout_.frame_bytes(), " and ", layout_.arena_bytes()));
  }

  void hand_out(std::vector<Guest>& guests) {
    file_ = make_memory(layout_.total());
    memory_ = std::make_shared<Mapping>(file_, layout_.total());
    claim(file_, 0, kPageBytes);
    auto& header = *reinterpret_cast<Header*>(memory_->data());
    header.magic = Header::kMagic;
    std::memcpy(header.nonce, secret_.data(), sizeof header.nonce);
    guests[0].process = own_process();
    guests[0].account = read_account(own_account(0, layout_, identity_->probe()));
    std::vector<std::vector<int>> cpus;
    int quota = size_;
    std::vector<int> descriptors{file_.get()};
    barriers_ = true;
    for (const auto& guest : guests) {
      barriers_ = barriers_ && guest.account.barriers != 0;
      descriptors.push_back(guest.process.get());
      cpus.push_back(guest.account.cpus);
      quota = std::min(quota, guest.account.quota);
      probes_.push_back(guest.account.probe);
    }
    crowded_ = quota < size_ || !each_has_a_core(cpus);
    TextStream text;
    text << "memory " << (crowded_ ? 1 : 0) << ' ' << (barriers_ ? 1 : 0);
    for (const Probe& probe : probes_) text << ' ' << probe.address << ' ' << probe.value;
    for (int r = 1; r < size_; ++r) send_text(guests[r].socket, text.str(), descriptors, deadline_);
    claim(file_, layout_.region(0), layout_.region_bytes());
    for (auto& guest : guests) processes_.push_back(std::move(guest.process));
    make_core();
  }

  // ---- the other ranks ----

  void follow() {
    Descriptor socket;
    try {
      prepare();
      socket = enter(get("address", 0));
    } catch (const std::exception& error) {
      leave(concat("met/", rank_), failure_text(error));
      throw;
    }
    put(concat("met/", rank_), "met");
    std::string text;
    try {
      std::vector<Descriptor> descriptors;
      text = receive_text(socket, &descriptors, deadline_);
      if (!text.starts_with(kFailure)) take_over(text, std::move(descriptors));
    } catch (const std::exception& error) {
      tell(socket, error);
      throw;
    }
    rethrow_failure(text);
    send_text(socket, "claimed", {}, deadline_);
    rethrow_failure(receive_text(socket, nullptr, deadline_));
  }

  /// Goes to rank 0 and says who this is.
  Descriptor enter(const std::string& address) {
    rethrow_failure(address);
    if (address.size() <= 16) throw SetupError(Cause::disagreement, "shm: rank 0 left no address");
    secret_ = address.substr(address.size() - 16);
    Descriptor socket = connect(address.substr(0, address.size() - 16));
    if (const uid_t leader = user_of(socket); leader != ::geteuid())
      throw SetupError(Cause::other_user,
                       concat("shm group '", options_.name, "': rank ", rank_, " runs as user ",
                              ::geteuid(), ", rank 0 as user ", leader));
    send_text(socket, secret_ + own_account(rank_, layout_, identity_->probe()), {}, deadline_);
    return socket;
  }

  Descriptor connect(const std::string& name) {
    try {
      return connect_to(name, deadline_);
    } catch (const SetupError& error) {
      if (error.cause() != Cause::other_host) throw;
      // If rank 0 has given up it has left the reason.
      std::string failure;
      try {
        failure = directory_.get(key_ + "failure", kRecently);
      } catch (const std::exception&) {  // It has not.
      }
      rethrow_failure(failure);
      throw;
    }
  }

  void take_over(const std::string& text, std::vector<Descriptor> descriptors) {
    TextReader in(text);
    std::string word;
    in >> word >> crowded_ >> barriers_;
    for (Probe probe; in >> probe.address >> probe.value;) probes_.push_back(probe);
    if (word != "memory" || descriptors.size() != static_cast<std::size_t>(size_) + 1 ||
        probes_.size() != static_cast<std::size_t>(size_))
      throw SetupError(Cause::disagreement,
                       "shm: what came over the local socket is no message of this library");
    file_ = std::move(descriptors[0]);
    memory_ = std::make_shared<Mapping>(file_, layout_.total());
    const auto& header = *reinterpret_cast<const Header*>(memory_->data());
    if (header.magic != Header::kMagic ||
        std::memcmp(header.nonce, secret_.data(), sizeof header.nonce) != 0)
      throw SetupError(Cause::disagreement, "shm: the memory that came is not that of this group");
    processes_.assign(std::make_move_iterator(descriptors.begin() + 1),
                      std::make_move_iterator(descriptors.end()));
    claim(file_, layout_.region(rank_), layout_.region_bytes());
    make_core();
  }

  // ---- all ranks ----

  void finish();
  /// The stores that bring data to another rank in the least time, the same on all ranks.
  /// Collective.
  ChosenStores fastest_stores(Core& core) const;
  /// Reduces a few values over the ranks, in place.
  void reduce(void* data, std::size_t count, Element element, Reduction::Kind kind) const;

  const int rank_, size_;
  const Directory& directory_;
  const Options& options_;
  const Deadline deadline_;
  const std::string key_;
  Layout layout_;
  std::optional<Identity> identity_;
  std::string secret_;
  bool crowded_ = false, barriers_ = false;
  Descriptor file_;
  std::shared_ptr<Mapping> memory_;
  std::vector<Descriptor> processes_;
  std::vector<Probe> probes_;
  std::shared_ptr<Core> core_;
};

void Meeting::reduce(void* data, std::size_t count, Element element, Reduction::Kind kind) const {
  auto* bytes = static_cast<std::byte*>(data);
  ReduceOnce agreement(*core_, "the first call", {bytes, bytes, count, element, {kind}});
  core_->run(agreement, time_left(deadline_));
}

void Meeting::finish() {
  Core& core = *core_;
  // Every rank tries all others, and all agree; this is also the first call of the group.
  auto readable = std::uint8_t{options_.single_copy};
  for (int r = 0; r < size_ && readable != 0; ++r)
    readable = core.liveness().read(r, nullptr, 0, 0) ? 1 : 0;
  reduce(&readable, 1, Element::uint8, Reduction::Kind::min);
  core.allow_single_copy(readable != 0);
  // All ranks take part, also where some are told what to use.
  const ChosenStores fastest = fastest_stores(core);
  core.write_by(chosen_stores(options_).value_or(fastest));
  if (rank_ == 0 && directory_.erase) {
    try {
      directory_.erase(key_ + "address");
      for (int r = 1; r < size_; ++r) directory_.erase(concat(key_, "met/", r));
    } catch (const std::exception&) {  // The ranks have met; what is left there is only untidy.
    }
  }
}

ChosenStores Meeting::fastest_stores(Core& core) const {
  // Messages around the ring, of a size that is fetched line by line. Ranks that share cores would
  // measure the scheduler.
  const std::size_t bytes = std::min(layout_.frame_bytes(), kTrialBytes);
  if (size_ < 2 || core.options().crowded || bytes < kStreamBytes) return {};
  std::vector<std::byte> from(bytes), to(bytes);
  constexpr Stores kKinds[] = {Stores::cached, Stores::handed_over, Stores::past_cache};
  std::array<double, std::size(kKinds)> best;
  best.fill(std::numeric_limits<double>::max());
  for (std::size_t kind = 0; kind < best.size(); ++kind) {
    core.write_by({kKinds[kind], false});
    for (int trial = -kWarmTrials; trial < kTrials; ++trial) {
      const auto begin = std::chrono::steady_clock::now();
      Batch batch("the first call");
      batch.sends.push_back({from.data(), bytes, (rank_ + 1) % size_, 0});
      batch.receives.push_back({to.data(), bytes, (rank_ + size_ - 1) % size_, 0});
      core.run(batch, time_left(deadline_));
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      if (trial >= 0) best[kind] = std::min(best[kind], took.count());
    }
  }
  reduce(best.data(), best.size(), Element::float64, Reduction::Kind::sum);
  const auto fastest = std::ranges::min_element(best);
  const double enough = kClearlyFaster * best.front();
  return {*fastest < enough ? kKinds[fastest - best.begin()] : Stores::cached,
          best.back() < enough};
}

}  // namespace

std::shared_ptr<Core> meet(int rank, int size, const Directory& directory, const Options& options) {
  require_rank(rank, size);
  return Meeting(rank, size, directory, options).run();
}

std::vector<std::shared_ptr<Core>> meet_threads(int size, const Options& options) {
  require_rank(0, size);
  const Layout layout = layout_of(size, options);
  const Descriptor file = make_memory(layout.total());
  claim(file, 0, layout.total());
  const auto memory = std::make_shared<Mapping>(file, layout.total());
  const bool crowded = cpu_budget().usable() < size, barriers = register_for_barriers();
  std::vector<std::shared_ptr<Core>> cores;
  for (int rank = 0; rank < size; ++rank)
    cores.push_back(std::make_shared<Core>(
        CoreOptions{options.name, rank, size, layout, crowded, barriers, options.kept_bytes},
        memory, Identity(1), Liveness()));
  for (const auto& core : cores) {
    core->allow_single_copy(options.single_copy);
    core->write_by(chosen_stores(options).value_or(ChosenStores{}));
  }
  return cores;
}

}  // namespace tessera::shm::detail

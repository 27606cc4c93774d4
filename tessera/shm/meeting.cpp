#include "tessera/shm/meeting.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>

#include "tessera/base/text.h"
#include "tessera/launch/cores.h"
#include "tessera/shm/detail/calls.h"
#include "tessera/shm/detail/meet.h"
#include "tessera/shm/detail/messages.h"
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
constexpr std::size_t kMostArena = std::size_t{1} << 40;

void require_arguments(int rank, int size, const Options& options) {
  if (size < 1 || rank < 0 || rank >= size)
    throw InvalidArgument(
        concat("shm: rank ", rank, " of ", size, " ranks: ranks are 0 to size - 1"));
  if (options.arena_bytes > kMostArena || options.slot_bytes > kMostArena ||
      options.frame_bytes > kMostArena)
    throw InvalidArgument(
        concat("shm: sizes of arena, slots and frames are at most ", kMostArena, " bytes"));
}

Layout layout_of(int size, const Options& options) {
  if (size > kMaxRanks)
    throw SetupError(Cause::too_many_ranks,
                     concat("shm: ", size, " ranks are to share one memory, at most ", kMaxRanks,
                            " can: make groups of groups"));
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
std::string own_account(int rank, const Layout& layout, const std::uint64_t& probe) {
  TextStream out;
  out << rank << ' ' << layout.slot_bytes() << ' ' << layout.frame_bytes() << ' '
      << layout.arena_bytes() << ' ' << reinterpret_cast<std::uintptr_t>(&probe) << ' ' << probe;
  const CpuBudget budget = cpu_budget();
  out << ' ' << (register_for_barriers() ? 1 : 0) << ' '
      << (budget.quota > 0 ? static_cast<int>(std::ceil(budget.quota)) : kMaxRanks);
  for (const int cpu : budget.cpus) out << ' ' << cpu;
  return std::move(out).str();
}

struct Account {
  int rank = -1;
  std::size_t slot = 0, frame = 0, arena = 0;
  /// A number in the rank's memory: its address and its value. A rank that can read it there can
  /// read the rest.
  std::pair<std::uint64_t, std::uint64_t> probe;
  int barriers = 0;
  /// Number of ranks that the control group gives time to at once.
  int quota = 1;
  std::vector<int> cpus;
};

Account read_account(const std::string& text) {
  TextReader in(text);
  Account a;
  in >> a.rank >> a.slot >> a.frame >> a.arena >> a.probe.first >> a.probe.second >> a.barriers >>
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

std::string failure_text(const SetupError& error) {
  return concat("no ", static_cast<int>(error.cause()), ' ', error.what());
}

/// Throws the error that another rank described by failure_text().
void rethrow_failure(const std::string& text) {
  if (text.rfind("no ", 0) != 0) return;
  TextReader in(text.substr(3));
  int cause = 0;
  in >> cause;
  std::string what;
  std::getline(in, what);
  cause = std::clamp(cause, 0, static_cast<int>(Cause::absent));
  throw SetupError(static_cast<Cause>(cause),
                   what.empty() ? "shm: another rank failed" : what.substr(1));
}

class Meeting {
 public:
  Meeting(int rank, int size, const Directory& directory, const Options& options)
      : rank_(rank),
        size_(size),
        directory_(directory),
        options_(options),
        layout_(layout_of(size, options)),
        deadline_(deadline_after(options.timeout)),
        key_(concat("shm/", options.name, "/")) {
    std::memcpy(&probe_, random_bytes(8).data(), 8);
  }

  std::shared_ptr<Core> run() {
    if (rank_ == 0) {
      lead();
    } else {
      follow();
    }
    return finish();
  }

 private:
  struct Guest {
    Descriptor socket;
    Descriptor process;
    Account account;
  };

  void put(const std::string& key, const std::string& text) { directory_.put(key_ + key, text); }

  std::string get(const std::string& key, int from) {
    try {
      return directory_.get(key_ + key, time_left(deadline_));
    } catch (const std::exception& error) {
      throw SetupError(Cause::absent, concat("shm group '", options_.name, "': rank ", from,
                                             " did not come: ", error.what()));
    }
  }

  // ---- rank 0 ----

  void lead() {
    std::vector<Guest> guests(static_cast<std::size_t>(size_));
    try {
      const Listener listener = listen_locally(size_ + 8);
      secret_ = random_bytes(16);
      put("address", listener.name + secret_);
      std::optional<SetupError> failure;
      std::vector<bool> met(static_cast<std::size_t>(size_), false);
      for (int r = 1; r < size_; ++r) {
        try {
          rethrow_failure(get(concat("met/", r), r));
          met[static_cast<std::size_t>(r)] = true;
        } catch (const SetupError& error) {
          if (!failure)
            failure = SetupError(error.cause(), concat(error.what(), " (rank ", r, ")"));
        }
      }
      // The ranks that came learn of the failure too.
      accept_all(listener, guests, static_cast<int>(std::count(met.begin(), met.end(), true)));
      if (failure) throw SetupError(*failure);
      hand_out(guests);
      for (int r = 1; r < size_; ++r)
        rethrow_failure(
            receive_text(guests[static_cast<std::size_t>(r)].socket, nullptr, deadline_));
      const std::string verdict = concat("yes ", crowded_ ? 1 : 0, ' ', barriers_ ? 1 : 0);
      for (int r = 1; r < size_; ++r)
        send_text(guests[static_cast<std::size_t>(r)].socket, verdict, {}, deadline_);
    } catch (const SetupError& error) {
      for (const auto& guest : guests) {
        if (!guest.socket) continue;
        try {
          send_text(guest.socket, failure_text(error), {}, deadline_after(std::chrono::seconds(1)));
        } catch (const SetupError&) {  // That rank is gone itself.
        }
      }
      throw;
    }
  }

  void accept_all(const Listener& listener, std::vector<Guest>& guests, int count) {
    std::optional<SetupError> failure;
    while (count > 0) {
      Descriptor socket = accept_from(listener.socket, deadline_);
      Peer peer = peer_of(socket);
      Account account;
      try {
        const std::string hello =
            receive_text(socket, nullptr, deadline_after(std::chrono::seconds(5)));
        if (hello.substr(0, secret_.size()) != secret_) continue;
        account = read_account(hello.substr(secret_.size()));
      } catch (const SetupError&) {
        continue;  // Another program found the socket.
      }
      if (account.rank < 1 || account.rank >= size_ ||
          guests[static_cast<std::size_t>(account.rank)].socket)
        continue;
      --count;
      Guest& guest = guests[static_cast<std::size_t>(account.rank)];
      if (peer.user != ::geteuid() && !failure)
        failure = SetupError(Cause::other_user,
                             concat("shm group '", options_.name, "': rank ", account.rank,
                                    " runs as user ", peer.user, ", rank 0 as user ", ::geteuid()));
      if ((account.slot != layout_.slot_bytes() || account.frame != layout_.frame_bytes() ||
           account.arena != layout_.arena_bytes()) &&
          !failure)
        failure = SetupError(
            Cause::disagreement,
            concat("shm group '", options_.name, "': rank ", account.rank,
                   " has slots, frames and an arena of ", account.slot, ", ", account.frame,
                   " and ", account.arena, " bytes, rank 0 of ", layout_.slot_bytes(), ", ",
                   layout_.frame_bytes(), " and ", layout_.arena_bytes()));
      guest = {std::move(socket), std::move(peer.process), std::move(account)};
    }
    if (failure) throw SetupError(*failure);
  }

  void hand_out(std::vector<Guest>& guests) {
    file_ = make_memory(layout_.total());
    memory_ = std::make_shared<Mapping>(file_, layout_.total());
    claim(file_, 0, kPageBytes);
    auto& header = *reinterpret_cast<Header*>(memory_->data());
    header.magic = Header::kMagic;
    std::memcpy(header.nonce, secret_.data(), sizeof header.nonce);
    guests[0].process = own_process();
    guests[0].account = read_account(own_account(0, layout_, probe_));
    std::vector<std::vector<int>> cpus;
    int quota = size_;
    TextStream text;
    text << "memory";
    std::vector<int> descriptors{file_.get()};
    barriers_ = true;
    for (const auto& guest : guests) {
      barriers_ = barriers_ && guest.account.barriers != 0;
      descriptors.push_back(guest.process.get());
      cpus.push_back(guest.account.cpus);
      quota = std::min(quota, guest.account.quota);
      text << ' ' << guest.account.probe.first << ' ' << guest.account.probe.second;
      probes_.push_back(guest.account.probe);
    }
    crowded_ = quota < size_ || !each_has_a_core(cpus);
    for (int r = 1; r < size_; ++r)
      send_text(guests[static_cast<std::size_t>(r)].socket, text.str(), descriptors, deadline_);
    claim(file_, layout_.region(0), layout_.region_bytes());
    for (auto& guest : guests) processes_.push_back(std::move(guest.process));
  }

  // ---- the other ranks ----

  void follow() {
    Descriptor socket;
    try {
      const std::string address = get("address", 0);
      if (address.size() <= 16)
        throw SetupError(Cause::disagreement, "shm: rank 0 left no address");
      secret_ = address.substr(address.size() - 16);
      socket = connect_to(address.substr(0, address.size() - 16));
    } catch (const SetupError& error) {
      put(concat("met/", rank_), failure_text(error));
      throw;
    }
    send_text(socket, secret_ + own_account(rank_, layout_, probe_), {}, deadline_);
    put(concat("met/", rank_), "met");
    try {
      take_over(socket);
    } catch (const SetupError& error) {
      if (!told_)
        send_text(socket, failure_text(error), {}, deadline_after(std::chrono::seconds(1)));
      throw;
    }
    send_text(socket, "claimed", {}, deadline_);
    const std::string verdict = receive_text(socket, nullptr, deadline_);
    rethrow_failure(verdict);
    crowded_ = verdict.rfind("yes 1", 0) == 0;
    barriers_ = verdict.size() == 7 && verdict.back() == '1';
  }

  void take_over(const Descriptor& socket) {
    std::vector<Descriptor> descriptors;
    told_ = true;  // Until the memory has arrived, a failure is rank 0's.
    const std::string text = receive_text(socket, &descriptors, deadline_);
    rethrow_failure(text);
    told_ = false;
    TextReader in(text);
    std::string word;
    in >> word;
    for (std::pair<std::uint64_t, std::uint64_t> probe; in >> probe.first >> probe.second;)
      probes_.push_back(probe);
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
    for (std::size_t r = 1; r < descriptors.size(); ++r)
      processes_.push_back(std::move(descriptors[r]));
    claim(file_, layout_.region(rank_), layout_.region_bytes());
  }

  // ---- all ranks ----

  std::shared_ptr<Core> finish();
  /// The stores that bring data to another rank in the least time, the same on all ranks.
  /// Collective.
  ChosenStores fastest_stores(Core& core) const;

  const int rank_, size_;
  const Directory& directory_;
  const Options& options_;
  const Layout layout_;
  const Deadline deadline_;
  const std::string key_;
  std::string secret_;
  std::uint64_t probe_ = 0;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> probes_;
  bool crowded_ = false, barriers_ = false, told_ = false;
  Descriptor file_;
  std::shared_ptr<Mapping> memory_;
  std::vector<Descriptor> processes_;
};

std::shared_ptr<Core> Meeting::finish() {
  auto core =
      std::make_shared<Core>(CoreOptions{options_.name, rank_, size_, layout_, crowded_, barriers_},
                             memory_, Liveness(std::move(processes_)));
  // Every rank tries all others, and all agree; this is also the first call of the group.
  auto readable = std::uint8_t{options_.single_copy};
  for (int r = 0; r < size_ && readable != 0; ++r) {
    std::uint64_t value = 0;
    const auto i = static_cast<std::size_t>(r);
    if (!core->try_copy_from(r, reinterpret_cast<std::byte*>(&value), probes_[i].first,
                             sizeof value) ||
        value != probes_[i].second)
      readable = 0;
  }
  ReduceArguments arguments;
  arguments.input = arguments.output = reinterpret_cast<std::byte*>(&readable);
  arguments.count = 1;
  arguments.element = Element::uint8;
  arguments.reduction.kind = Reduction::Kind::min;
  ReduceOnce agreement(*core, "the first call", arguments);
  core->run(agreement, time_left(deadline_));
  // No rank reads the probe any more.
  ReduceOnce end(*core, "the first call", arguments);
  core->run(end, time_left(deadline_));
  core->allow_single_copy(readable != 0);
  // All ranks take part, also where some are told what to use.
  const ChosenStores fastest = fastest_stores(*core);
  core->write_by(chosen_stores(options_).value_or(fastest));
  if (rank_ == 0 && directory_.erase) {
    try {
      directory_.erase(key_ + "address");
      for (int r = 1; r < size_; ++r) directory_.erase(concat(key_, "met/", r));
    } catch (const std::exception&) {  // The ranks have met; what is left there is only untidy.
    }
  }
  return core;
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
  ReduceArguments arguments;
  arguments.input = arguments.output = reinterpret_cast<std::byte*>(best.data());
  arguments.count = best.size();
  arguments.element = Element::float64;
  ReduceOnce sum(core, "the first call", arguments);
  core.run(sum, time_left(deadline_));
  const auto fastest = std::min_element(best.begin(), best.end());
  const double enough = kClearlyFaster * best.front();
  return {*fastest < enough ? kKinds[fastest - best.begin()] : Stores::cached,
          best.back() < enough};
}

}  // namespace

bool each_has_a_core(const std::vector<std::vector<int>>& cpus) {
  // A matching of ranks and CPUs by augmenting paths.
  std::vector<std::pair<int, int>> taken;  // CPU, rank.
  const auto owner = [&](int cpu) {
    return std::find_if(taken.begin(), taken.end(), [&](const auto& t) { return t.first == cpu; });
  };
  std::vector<int> tried;
  const std::function<bool(int)> seat = [&](int rank) {
    for (const int cpu : cpus[static_cast<std::size_t>(rank)]) {
      if (std::find(tried.begin(), tried.end(), cpu) != tried.end()) continue;
      tried.push_back(cpu);
      if (owner(cpu) == taken.end()) {
        taken.emplace_back(cpu, rank);
        return true;
      }
      const int other = owner(cpu)->second;
      if (seat(other)) {
        owner(cpu)->second = rank;
        return true;
      }
    }
    return false;
  };
  for (std::size_t r = 0; r < cpus.size(); ++r) {
    tried.clear();
    if (!seat(static_cast<int>(r))) return false;
  }
  return true;
}

std::shared_ptr<Core> meet(int rank, int size, const Directory& directory, const Options& options) {
  require_arguments(rank, size, options);
  return Meeting(rank, size, directory, options).run();
}

std::vector<std::shared_ptr<Core>> meet_threads(int size, const Options& options) {
  require_arguments(0, size, options);
  const Layout layout = layout_of(size, options);
  const Descriptor file = make_memory(layout.total());
  claim(file, 0, layout.total());
  const auto memory = std::make_shared<Mapping>(file, layout.total());
  const bool crowded = cpu_budget().usable() < size, barriers = register_for_barriers();
  std::vector<std::shared_ptr<Core>> cores;
  for (int rank = 0; rank < size; ++rank)
    cores.push_back(std::make_shared<Core>(
        CoreOptions{options.name, rank, size, layout, crowded, barriers}, memory, Liveness()));
  for (const auto& core : cores) {
    core->allow_single_copy(options.single_copy);
    core->write_by(chosen_stores(options).value_or(ChosenStores{}));
  }
  return cores;
}

}  // namespace tessera::shm::detail

#include "tessera/comm/backends/hosts/hosts.h"

#include <sys/stat.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <fstream>
#include <random>
#include <utility>

#include "tessera/base/deadline.h"
#include "tessera/base/hash.h"
#include "tessera/base/internal/split.h"
#include "tessera/base/text.h"
#include "tessera/comm/backends/gloo/gloo.h"
#include "tessera/comm/backends/hosts/host_links.h"
#include "tessera/comm/backends/mpi/mpi_attempt.h"
#include "tessera/comm/backends/shm/shm.h"
#include "tessera/comm/group/detail/group_watch.h"
#include "tessera/comm/group/detail/store_meeting.h"

namespace tessera {
namespace {

using detail::HostMap;

constexpr auto kMet = "met";

// How much a rank wants MPI between hosts: it asks for it by name, it has it, or neither.
constexpr auto kInsists = "!", kHas = "+", kHasNot = "-";

/// What a rank says of MPI.
struct MpiWord {
  std::string wish, why_not;
};

/// Why two ranks cannot share memory.
std::string why_apart(int a, const std::string& mark_a, int b, const std::string& mark_b) {
  auto of_a = split(mark_a, '\n'), of_b = split(mark_b, '\n');
  for (auto* lines : {&of_a, &of_b}) lines->resize(3);
  if (of_a[0] != of_b[0]) return concat("ranks ", a, " and ", b, " are on different hosts");
  if (of_a[1] != of_b[1])
    return concat("ranks ", a, " and ", b,
                  " are in different network namespaces (containers) of one host");
  return concat("ranks ", a, " and ", b, " belong to different users, ", of_a[2], " and ", of_b[2]);
}

class ByHost {
 public:
  ByHost(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
         const HostsOptions& options)
      : store_(store),
        rank_(rank),
        size_(size),
        options_(options),
        deadline_(deadline_after(options.timeout)) {}

  ChosenTransport make() {
    auto marks = gather("mark", options_.host.empty() ? mark_of_host() : options_.host);
    const std::string apart = first_difference(marks);
    meet(HostMap::of(marks));
    std::vector<std::string> verdicts;
    std::vector<MpiWord> words;
    for (const auto& text : gather("verdict", concat(my_mpi_word(), '\n', verdict_))) {
      const auto end = std::min(text.find('\n'), text.size());
      words.push_back({text.substr(0, 1), end > 1 ? text.substr(1, end - 1) : ""});
      verdicts.push_back(text.substr(std::min(end + 1, text.size())));
    }
    std::string refused;
    for (const auto& verdict : verdicts)
      if (refused.empty() && verdict != kMet) refused = verdict;
    HostMap map = HostMap::of(separated(std::move(marks), verdicts));
    if (map.hosts[map.host_of[me()]].size() == 1) near_.reset();
    if (map.count() == 1)
      return {std::move(near_), "shm", concat("its ", size_, " ranks share the memory of a host"),
              ""};
    auto chosen = over_hosts(std::move(map), over_mpi(words), refused.empty() ? apart : refused);
    chosen.refused = std::move(refused);
    return chosen;
  }

 private:
  std::size_t me() const { return static_cast<std::size_t>(rank_); }
  /// The global rank of a rank of the group.
  int global(int rank) const { return options_.ranks.empty() ? rank : options_.ranks[rank]; }
  std::chrono::milliseconds left() const {
    // For some stores a limit of zero means no limit.
    return std::max(time_left(deadline_), std::chrono::milliseconds(1));
  }
  c10::intrusive_ptr<c10d::Store> prefixed(const std::string& key) const {
    return c10::make_intrusive<c10d::PrefixStore>("hosts/" + key, store_);
  }
  std::vector<std::string> gather(const std::string& key, const std::string& mine) const {
    return detail::gather_at_store(*store_, "hosts/" + key, rank_, size_, mine, left());
  }

  std::string first_difference(const std::vector<std::string>& marks) const {
    for (int r = 1; r < size_; ++r) {
      const auto& mark = marks[r];
      if (mark != marks[0]) return why_apart(global(0), marks[0], global(r), mark);
    }
    return "";
  }

  /// What this rank says of MPI between hosts, in one line: how much it is wanted, and why it
  /// cannot be; nothing more if it can.
  std::string my_mpi_word() const {
    const char* wish = options_.between == "mpi" ? kInsists : options_.mpi ? kHas : kHasNot;
    if (options_.between == "gloo") return concat(kHasNot, "it asked for Gloo");
    if (!options_.mpi)
      return concat(wish,
                    has_mpi() ? "it was not given ranks of MPI" : "its build has no MPI part");
    const auto level = options_.mpi->thread_level();
    if (level >= MpiThreadLevel::serialized) return wish;
    return concat(wish, "its MPI has the thread level ", to_string(level),
                  ", and a thread of the group would call it");
  }

  /// True if the collectives between hosts go over MPI; the same on all ranks, as what they throw.
  bool over_mpi(const std::vector<MpiWord>& words) {
    const auto says = [&](const char* wish) {
      return std::ranges::any_of(words, [&](const MpiWord& word) { return word.wish == wish; });
    };
    const auto first =
        std::ranges::find_if(words, [](const MpiWord& word) { return !word.why_not.empty(); });
    if (first == words.end()) return true;
    const int rank = global(static_cast<int>(first - words.begin()));
    if (says(kInsists))
      throw NotAvailable("group '", options_.name, "' over MPI between hosts: not on rank ", rank,
                         ": ", first->why_not,
                         "; give between_hosts = \"mpi\" on all ranks of a job that MPI's "
                         "own launcher started, or \"gloo\"");
    // Ranks of MPI that are there and not used are worth a word.
    if (says(kHas)) no_mpi_ = concat("; not mpi: rank ", rank, " says that ", first->why_not);
    return false;
  }

  /// The group over the hosts of `map`, of which there are several.
  ChosenTransport over_hosts(HostMap map, bool mpi, const std::string& why) {
    const bool alone = map.count() == size_;
    std::vector<int> leads;  // of each host the first rank; where no two share one, all ranks
    for (const auto& host : map.hosts) leads.push_back(global(host.front()));
    const std::string way = mpi ? "mpi" : "gloo";
    if (alone && mpi && options_.plain)
      return {over_mpi_of(leads), way,
              concat("no two of its ranks share memory, and all have MPI: ", why), ""};
    const std::string address = options_.find_address ? options_.find_address() : options_.address;
    auto wide = make_gloo_transport(prefixed("wide"), rank_, size_, options_.timeout, address);
    if (alone && options_.plain)
      return {std::move(wide), way, concat("no two of its ranks share memory: ", why, no_mpi_), ""};
    std::shared_ptr<detail::Transport> leaders;
    if (map.place_of[me()] == 0)
      leaders = mpi ? over_mpi_of(leads)
                    : make_gloo_transport(prefixed("leaders"), map.host_of[me()], map.count(),
                                          options_.timeout, address);
    const std::string text = alone ? concat("no two of its ranks share memory: ", way,
                                            " between them (", why, no_mpi_, ")")
                                   : concat("its ", size_, " ranks are on ", map.count(),
                                            " hosts: memory inside a host, ", way,
                                            " between the hosts (", why, no_mpi_, ")");
    auto links = std::make_shared<detail::HostLinks>(std::move(map), rank_, std::move(near_),
                                                     std::move(wide), std::move(leaders));
    return {
        detail::make_hosts_transport(std::move(links), rank_, options_.timeout, !options_.watch),
        "hosts", text, ""};
  }

  std::shared_ptr<detail::Transport> over_mpi_of(const std::vector<int>& ranks) const {
    MpiBackendOptions options;
    options.name = options_.name;
    options.timeout = options_.timeout;
    detail::MpiAttempt attempt{Hash().text(options_.name).value(), {}};
    if (options_.watch)
      attempt.given_up = [watch = options_.watch] { return watch->poison() != nullptr; };
    return detail::make_mpi_transport(*options_.mpi, ranks, options, attempt);
  }

  /// Meets the ranks of this host, if there are any.
  void meet(const HostMap& map) {
    const auto host = map.host_of[me()];
    const auto& mates = map.hosts[host];
    if (mates.size() < 2) return;
    ShmOptions options = options_;
    options.ranks.clear();
    for (const int mate : mates) options.ranks.push_back(global(mate));
    try {
      near_ = make_shm_transport(prefixed(concat("of host ", host)), map.place_of[me()],
                                 static_cast<int>(mates.size()), options);
      verdict_ = kMet;
    } catch (const NotAvailable& error) {
      const std::string what = error.what();
      verdict_ = what.substr(0, what.find("; choose another backend"));
    }
  }

  /// The marks, with one of its own for each rank of a host whose ranks have not all met.
  std::vector<std::string> separated(std::vector<std::string> marks,
                                     const std::vector<std::string>& verdicts) const {
    for (const auto& host : HostMap::of(marks).hosts) {
      if (std::ranges::all_of(host, [&](int r) { return verdicts[r] == kMet; })) continue;
      for (const int r : host) marks[r] = concat("alone ", r);
    }
    return marks;
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_, size_;
  const HostsOptions& options_;
  const Deadline deadline_;
  std::shared_ptr<detail::Transport> near_;
  std::string verdict_;
  /// Why MPI is not used although a rank has it, for the reason.
  std::string no_mpi_;
};

}  // namespace

std::string mark_of_host() {
  std::ifstream in("/proc/sys/kernel/random/boot_id");
  std::string boot;
  struct stat net{};
  if (!std::getline(in, boot) || ::stat("/proc/self/ns/net", &net) != 0) {
    // Without /proc no other rank is known to be near.
    std::random_device random;
    return concat("unknown ", random(), random(), "\n\n");
  }
  return concat(boot, '\n', net.st_dev, ':', net.st_ino, '\n', ::geteuid());
}

ChosenTransport make_transport_by_host(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                       int size, const HostsOptions& options) {
  return ByHost(store, rank, size, options).make();
}

}  // namespace tessera

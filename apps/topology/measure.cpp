// What runs when. Inside hosts: every host measures its pairs one after the other, all hosts at the
// same time; then all disjoint pairs of a host at once. Between hosts: a tournament (circle
// method), in whose rounds disjoint pairs of hosts are measured, by their first ranks; then whole
// hosts against each other, all their ranks at once.

#include "measure.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <numeric>

#include "tessera/base/number.h"
#include "tessera/base/text.h"

namespace tessera::app {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

/// As concat() of another rank wrote it.
double number_of(const std::string& text) { return parse_real(text).value_or(0); }

struct Place {
  int host = 0, slot = 0;
};

class Prober {
 public:
  Prober(const DistributedManager& manager, const ProbeOptions& options)
      : manager_(manager),
        world_(manager.world()),
        options_(options),
        large_(at::zeros({options.bytes}, at::kByte)),
        tiny_(at::zeros({1}, at::kByte)) {}

  ProbedJob run() {
    find_hosts();
    inside_hosts();
    if (hosts() > 1) between_hosts();
    collect();
    return std::move(job_);
  }

 private:
  int hosts() const { return static_cast<int>(ranks_of_.size()); }

  void find_hosts() {
    const Launch& launch = manager_.launch();
    char name[256] = "";
    ::gethostname(name, sizeof name - 1);
    std::string host = name;
    const auto node = static_cast<std::size_t>(std::max(0, launch.node_rank));
    if (launch.node_rank >= 0 && node < launch.hosts.size()) host = launch.hosts[node];
    const auto all = world_.all_gather_bytes(concat(launch.node_rank, "\n", host));
    std::map<std::string, int> known, names;
    for (int rank = 0; rank < world_.size(); ++rank) {
      const auto [at, is_new] = known.emplace(all[rank], hosts());
      if (is_new) {
        const std::string plain = all[rank].substr(all[rank].find('\n') + 1);
        // hosts that the launcher tells apart, and their names do not
        const int before = names[plain]++;
        job_.probe.hosts.push_back(before == 0 ? plain : concat(plain, "-", before));
        ranks_of_.emplace_back();
      }
      ranks_of_[at->second].push_back(rank);
      if (rank == world_.rank()) mine_.host = at->second;
    }
    for (int h = 0; h < hosts(); ++h) {
      job_.probe.devices.push_back(static_cast<int>(ranks_of_[h].size()));
      first_slot_.push_back(static_cast<int>(job_.rank_of_slot.size()));
      for (const int rank : ranks_of_[h]) {
        if (rank == world_.rank()) mine_.slot = static_cast<int>(job_.rank_of_slot.size());
        job_.rank_of_slot.push_back(rank);
      }
    }
  }

  /// A round trip after the other until the time is up; this rank decides how many if it leads.
  /// Returns the lower quartile of one way: what the link does, less what else the machine did
  /// meanwhile.
  double one_way(const Group& pair, const at::Tensor& message) {
    const bool leads = pair.rank() == 0;
    const auto trip = [&] {
      if (leads) {
        pair.send(message, 1);
        pair.receive(message, 1);
      } else {
        pair.receive(message, 0);
        pair.send(message, 0);
      }
    };
    const auto begin = Clock::now();
    for (int i = 0; i < 3; ++i) trip();
    const double once = seconds_since(begin) / 3;
    const at::Tensor count = at::empty({1}, at::kLong);
    if (leads) {
      *count.data_ptr<std::int64_t>() =
          std::clamp<std::int64_t>(static_cast<std::int64_t>(options_.seconds / once), 5, 5000);
      pair.send(count, 1);
    } else {
      pair.receive(count, 0);
    }
    std::vector<double> times;
    for (std::int64_t i = 0; i < *count.data_ptr<std::int64_t>(); ++i) {
      const auto start = Clock::now();
      trip();
      times.push_back(0.5 * seconds_since(start));
    }
    std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 4),
                     times.end());
    return times[times.size() / 4];
  }

  double bandwidth(const Group& pair, double latency) {
    const double time = one_way(pair, large_);
    return static_cast<double>(options_.bytes) / std::max(time - latency, 0.05 * time);
  }

  Group pair_of(int slot_a, int slot_b) const {
    return manager_.group({job_.rank_of_slot[slot_a], job_.rank_of_slot[slot_b]});
  }

  /// Both take part; the first writes it down.
  LinkSample measure(int slot_a, int slot_b) {
    const Group pair = pair_of(slot_a, slot_b);
    LinkSample sample{slot_a, slot_b, one_way(pair, tiny_), 0};
    sample.bandwidth = bandwidth(pair, sample.latency);
    if (mine_.slot == slot_a) job_.probe.samples.push_back(sample);
    return sample;
  }

  void inside_hosts() {
    const auto& mine = ranks_of_[mine_.host];
    const int devices = static_cast<int>(mine.size()), first = first_slot_[mine_.host];
    kept_ = 1;
    if (devices > 1) {
      const Group host = manager_.group(mine);
      std::vector<std::pair<int, int>> pairs;
      // neighbours first: of many devices, the far pairs are left out evenly
      for (int apart = 1; apart < devices; ++apart)
        for (int a = 0; a + apart < devices; ++a) pairs.emplace_back(first + a, first + a + apart);
      if (static_cast<int>(pairs.size()) > options_.pairs) {
        std::vector<std::pair<int, int>> some;
        for (int i = 0; i < options_.pairs; ++i)
          some.push_back(pairs[static_cast<std::size_t>(
              static_cast<double>(i) * static_cast<double>(pairs.size()) / options_.pairs)]);
        pairs = std::move(some);
      }
      double alone = 0;
      for (const auto& [a, b] : pairs) {
        host.barrier();
        if (mine_.slot != a && mine_.slot != b) continue;
        const auto sample = measure(a, b);
        if (b == a + 1 && (a - first) % 2 == 0) alone = sample.bandwidth;
      }
      // Slots 0-1, 2-3, ... at once. Each leader says what its pair kept.
      host.barrier();
      const int place = mine_.slot - first, leader = place - place % 2;
      double kept = -1;
      if (devices >= 4 && leader + 1 < devices && alone > 0) {
        const double together = bandwidth(pair_of(first + leader, first + leader + 1), 0);
        if (place == leader) kept = std::min(1.0, together / alone);
      }
      const auto all = host.all_gather_bytes(concat(kept));
      std::vector<double> shares;
      for (const auto& text : all)
        if (const double share = number_of(text); share > 0) shares.push_back(share);
      if (!shares.empty()) kept_ = median(shares);
    }
    world_.barrier();
  }

  void between_hosts() {
    const int n = hosts(), even = n + n % 2;  // with an odd number, one rests in each round
    const int rounds = std::min(options_.rounds, even - 1);
    const auto opponent = [&](int host, int round) {
      if (host == even - 1) return (round * (even / 2)) % (even - 1);
      const int other = ((round - host) % (even - 1) + even - 1) % (even - 1);
      return other == host ? even - 1 : other;
    };
    const bool leads = mine_.slot == first_slot_[mine_.host];
    for (int round = 0; round < rounds; ++round) {
      world_.barrier();
      const int other = opponent(mine_.host, round);
      if (leads && other < n)
        measure(first_slot_[std::min(mine_.host, other)], first_slot_[std::max(mine_.host, other)]);
    }
    world_.barrier();
    // Hosts 0-1, 2-3, ... with all their ranks at once: what one adapter carries.
    const int low = mine_.host - mine_.host % 2, place = mine_.slot - first_slot_[mine_.host];
    double mine = 0;
    if (low + 1 < n && place < std::min(job_.probe.devices[low], job_.probe.devices[low + 1]))
      mine = bandwidth(pair_of(first_slot_[low] + place, first_slot_[low + 1] + place), 0);
    const auto all = world_.gather_bytes(concat(mine), 0);
    if (world_.rank() != 0) return;
    std::vector<double> sums;
    for (int h = 0; h + 1 < n; h += 2) {
      double sum = 0;
      for (const int rank : ranks_of_[h]) sum += number_of(all[rank]);
      sums.push_back(sum);
    }
    job_.probe.adapter = median(sums);
  }

  /// Everything to rank 0.
  void collect() {
    const std::string bytes(reinterpret_cast<const char*>(job_.probe.samples.data()),
                            job_.probe.samples.size() * sizeof(LinkSample));
    const auto samples = world_.gather_bytes(bytes, 0);
    const auto kept = world_.gather_bytes(concat(kept_), 0);
    if (world_.rank() != 0) return;
    job_.probe.samples.clear();
    for (const auto& part : samples) {
      if (part.empty()) continue;
      const auto have = job_.probe.samples.size();
      job_.probe.samples.resize(have + part.size() / sizeof(LinkSample));
      std::memcpy(job_.probe.samples.data() + have, part.data(), part.size());
    }
    for (int h = 0; h < hosts(); ++h)
      job_.probe.kept.push_back(number_of(kept[ranks_of_[h].front()]));
  }

  const DistributedManager& manager_;
  Group world_;
  ProbeOptions options_;
  at::Tensor large_, tiny_;
  ProbedJob job_;
  std::vector<std::vector<int>> ranks_of_;  // by host
  std::vector<int> first_slot_;
  Place mine_;
  double kept_ = 1;
};

}  // namespace

ProbedJob probe_job(const DistributedManager& manager, const ProbeOptions& options) {
  return Prober(manager, options).run();
}

}  // namespace tessera::app

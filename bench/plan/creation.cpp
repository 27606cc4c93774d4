// One rank compares the plan with all others and makes all its groups over Gloo; its store counts.
// The members of its groups are real, as threads; of the ranks that share no group with it only
// what they write for the comparison is there, as if they had come before.

#include "creation.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <chrono>
#include <latch>
#include <mutex>
#include <set>
#include <thread>

#include "tessera/base/text.h"
#include "tessera/comm/job/detail/manager_state.h"
#include "tessera/comm/job/manager.h"

namespace tessera::bench {
namespace {

struct Counts {
  std::mutex mutex;
  int operations = 0;
  std::set<std::string> read;     // keys of others
  std::set<std::string> written;  // own keys
  std::set<std::string> met;      // keys that the other ranks have counted themselves in
};

constexpr auto kPlans = "plans";  // in the keys by which all ranks compare their plans

/// A HashStore that counts what one rank does. `others` ranks have been everywhere where all ranks
/// count themselves.
class CountingStore : public c10d::Store {
 public:
  CountingStore(c10::intrusive_ptr<c10d::HashStore> inner, std::shared_ptr<Counts> counts,
                int others)
      : inner_(std::move(inner)), counts_(std::move(counts)), others_(others) {}

  using Store::compareSet;
  using Store::set;
  c10::intrusive_ptr<Store> clone() override {
    return c10::make_intrusive<CountingStore>(inner_, counts_, others_);
  }
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    count({}, {key});
    inner_->set(key, value);
  }
  std::vector<std::uint8_t> compareSet(const std::string& key,
                                       const std::vector<std::uint8_t>& expected,
                                       const std::vector<std::uint8_t>& desired) override {
    count({key}, {key});
    return inner_->compareSet(key, expected, desired);
  }
  std::vector<std::uint8_t> get(const std::string& key) override {
    count({key}, {});
    return inner_->get(key);
  }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    count({}, {key});
    {
      const std::lock_guard lock(counts_->mutex);
      if (key.find(kPlans) != std::string::npos && counts_->met.insert(key).second)
        inner_->add(key, others_);
    }
    return inner_->add(key, value);
  }
  bool deleteKey(const std::string& key) override {
    count({}, {key});
    return inner_->deleteKey(key);
  }
  bool check(const std::vector<std::string>& keys) override {
    count({}, {});
    return inner_->check(keys);
  }
  std::int64_t getNumKeys() override {
    count({}, {});
    return inner_->getNumKeys();
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& limit) override {
    count({}, {});
    inner_->wait(keys, limit);
  }
  std::vector<std::vector<std::uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    count(keys, {});
    return inner_->multiGet(keys);
  }
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<std::uint8_t>>& values) override {
    count({}, keys);
    inner_->multiSet(keys, values);
  }
  bool hasExtendedApi() const override { return true; }

 private:
  void count(const std::vector<std::string>& read, const std::vector<std::string>& written) {
    const std::lock_guard lock(counts_->mutex);
    ++counts_->operations;
    counts_->read.insert(read.begin(), read.end());
    counts_->written.insert(written.begin(), written.end());
  }

  c10::intrusive_ptr<c10d::HashStore> inner_;
  std::shared_ptr<Counts> counts_;
  int others_;
};

DistributedManager manager_of(int rank, int world, c10::intrusive_ptr<c10d::Store> store) {
  detail::ManagerBase base;
  base.launch.launcher = "code";
  base.launch.rank = base.launch.local_rank = rank;
  base.launch.world_size = base.launch.local_size = world;
  base.options.timeout = std::chrono::seconds(60);
  base.backend = "gloo";
  base.address = "127.0.0.1";
  base.store = std::move(store);
  return DistributedManager(std::make_shared<detail::ManagerState>(std::move(base)));
}

struct Cost {
  int operations = 0, peers = 0, groups = 0;
  double milliseconds = 0;
};

/// Every axis has four ranks.
Cost cost_of(int axes, int rank) {
  std::vector<Axis> shape;
  for (int i = 0; i < axes; ++i) shape.push_back({concat("axis", i), 4});
  const Mesh mesh(shape);
  const auto plan = GroupPlan::of_mesh(mesh);
  auto inner = c10::make_intrusive<c10d::HashStore>();
  auto counts = std::make_shared<Counts>();
  std::latch done(1);
  std::vector<std::thread> members;
  for (const auto& mine : plan.memberships(rank))
    for (const int member : mine.ranks) {
      if (member == rank) continue;
      members.emplace_back([&mesh, &done, member, ranks = mine.ranks, inner] {
        const auto manager = manager_of(member, mesh.size(), inner);
        const Group group = manager.group(ranks);
        done.wait();  // who leaves early breaks connections of the others
      });
    }
  Cost cost;
  {
    const auto manager = manager_of(
        rank, mesh.size(), c10::make_intrusive<CountingStore>(inner, counts, mesh.size() - 1));
    const auto begin = std::chrono::steady_clock::now();
    manager.create_process_groups(plan, true);
    cost.milliseconds =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
    done.count_down();
    cost.groups = static_cast<int>(manager.group_names().size());
  }
  for (auto& thread : members) thread.join();
  cost.operations = counts->operations;
  // Over Gloo a rank connects to those whose addresses it reads.
  for (const auto& key : counts->read)
    if (!counts->written.count(key) && key.find(kPlans) == std::string::npos) ++cost.peers;
  return cost;
}

}  // namespace

void group_creation(Report& report) {
  Cost small, large;
  // The dearest of three ranks: the first, one inside, the last.
  for (const auto& [axes, into] : {std::pair<int, Cost*>{3, &small}, {6, &large}}) {
    const int world = 1 << (2 * axes);
    for (const int rank : {0, world / 3, world - 1}) {
      const Cost cost = cost_of(axes, rank);
      into->operations = std::max(into->operations, cost.operations);
      into->peers = std::max(into->peers, cost.peers);
      into->groups = cost.groups;
      into->milliseconds = std::max(into->milliseconds, cost.milliseconds);
    }
  }
  const std::string name = concat("one rank's groups of 4: ", large.groups, " at 4096 ranks"),
                    reference = concat(small.groups, " at 64 ranks");
  report.beside(name, "store operations", large.operations, "", reference, small.operations, 2);
  report.beside(name, "peers contacted", large.peers, "", reference, small.peers, 2);
  report.value(name, "plan compared, groups made", large.milliseconds, "ms", {});
}

}  // namespace tessera::bench

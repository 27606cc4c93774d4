#pragma once
// A schedule run for real, in whole numbers: an independent judge of whether it is right.
//
// Stage s turns x into (s + 2) x + k for micro-batch k; the gradient of its input is (s + 2) times
// that of its output, that of its parameter is the gradient of its output times its input. All
// modulo 2^64.

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "tessera/schedule/schedule.h"

namespace tessera::testing {

/// The sums of the parameters' gradients of each stage; nothing where the schedule cannot be run,
/// leaves something behind, or does something twice. Sends wait for their receiver.
class Interpreter {
 public:
  explicit Interpreter(const PipelineSchedule& schedule)
      : schedule_(schedule), next_(schedule.actions.size(), 0), sums_(schedule.stages(), 0) {
    for (const auto& row : schedule.actions) {
      for (const PipelineAction& a : row) lowered_ = lowered_ || is_message(a.kind);
    }
  }

  std::optional<std::vector<std::uint64_t>> run() {
    for (bool moved = true; moved && !wrong_;) {
      moved = false;
      for (int rank = 0; rank < schedule_.ranks(); ++rank) {
        while (!wrong_ && step(rank)) moved = true;
      }
    }
    for (int rank = 0; rank < schedule_.ranks(); ++rank) {
      wrong_ = wrong_ || next_[rank] != schedule_.actions[rank].size();
    }
    const auto all = static_cast<std::size_t>(schedule_.stages()) * schedule_.micro_batches;
    // Everything was done, and nothing is left over.
    if (forwards_.size() != all || weights_.size() != all || !inputs_.empty() || !grads_.empty() ||
        !saved_.empty() || !outputs_.empty() || !input_grads_.empty() || !here_.empty()) {
      wrong_ = true;
    }
    if (wrong_) return std::nullopt;
    return sums_;
  }

 private:
  using Key = std::tuple<int, int>;
  using Values = std::map<Key, std::uint64_t>;

  std::optional<std::uint64_t> take(Values& values, Key key) {
    const auto it = values.find(key);
    if (it == values.end()) return std::nullopt;
    const std::uint64_t value = it->second;
    values.erase(it);
    return value;
  }
  void put(Values& values, Key key, std::uint64_t value) {
    if (!values.emplace(key, value).second) wrong_ = true;
  }
  bool apart(int s, int t) const { return schedule_.placement[s] != schedule_.placement[t]; }

  bool step(int rank) {
    const auto& row = schedule_.actions[rank];
    if (next_[rank] == row.size()) return false;
    const PipelineAction a = row[next_[rank]];
    if (a.stage < 0 || a.stage >= schedule_.stages() || schedule_.placement[a.stage] != rank ||
        (has_micro_batch(a.kind) &&
         (a.micro_batch < 0 || a.micro_batch >= schedule_.micro_batches))) {
      return !(wrong_ = true);
    }
    if (is_message(a.kind)) return meet(rank, a);
    if (!act(a)) return false;
    ++next_[rank];
    return true;
  }

  // Both ends of a message go on together.
  bool meet(int rank, const PipelineAction& a) {
    const bool activation =
        a.kind == ActionKind::send_activation || a.kind == ActionKind::receive_activation;
    const bool sends = a.kind == ActionKind::send_activation || a.kind == ActionKind::send_gradient;
    const int other = activation == sends ? a.stage + 1 : a.stage - 1;
    if (other < 0 || other >= schedule_.stages() || !apart(a.stage, other)) return !(wrong_ = true);
    const int peer = schedule_.placement[other];
    const ActionKind wanted =
        sends ? (activation ? ActionKind::receive_activation : ActionKind::receive_gradient)
              : (activation ? ActionKind::send_activation : ActionKind::send_gradient);
    if (next_[peer] == schedule_.actions[peer].size() ||
        schedule_.actions[peer][next_[peer]] != PipelineAction{wanted, other, a.micro_batch}) {
      return false;
    }
    const int from = sends ? a.stage : other, to = sends ? other : a.stage;
    const auto value = take(activation ? outputs_ : input_grads_, {from, a.micro_batch});
    if (!value) return !(wrong_ = true);
    put(activation ? inputs_ : grads_, {to, a.micro_batch}, *value);
    ++next_[rank];
    ++next_[peer];
    return true;
  }

  bool act(const PipelineAction& a) {
    const Key key{a.stage, a.micro_batch};
    switch (a.kind) {
      case ActionKind::forward:
        return forward(a, key);
      case ActionKind::input_gradient:
      case ActionKind::backward:
        return backward(a, key);
      case ActionKind::weight_gradient: {
        const auto value = take(saved_weight_, key);
        if (!value) return !(wrong_ = true);
        weight(a, *value);
        return true;
      }
      case ActionKind::gather:
        ever_.insert(a.stage);
        if (!here_.insert(a.stage).second) wrong_ = true;
        return true;
      case ActionKind::release:
        if (here_.erase(a.stage) == 0) wrong_ = true;
        return true;
      default:
        if (!reduced_.insert(a.stage).second || counts_[a.stage] != schedule_.micro_batches)
          wrong_ = true;
        return true;
    }
  }

  void gathered(int stage) {
    bool sharded = false;
    for (const auto& row : schedule_.actions) {
      for (const PipelineAction& a : row) {
        sharded |=
            a.stage == stage && (a.kind == ActionKind::gather || a.kind == ActionKind::release);
      }
    }
    if (sharded && here_.count(stage) == 0) wrong_ = true;
  }

  bool forward(const PipelineAction& a, Key key) {
    std::optional<std::uint64_t> x = 3 + static_cast<std::uint64_t>(a.micro_batch);
    if (a.stage > 0) x = take(inputs_, key);
    if (!x) return missing(a.stage, a.stage - 1);
    gathered(a.stage);
    if (!forwards_.insert(key).second) wrong_ = true;
    put(saved_, key, *x);
    const std::uint64_t y = *x * (a.stage + 2) + a.micro_batch;
    if (a.stage + 1 == schedule_.stages()) {
      put(grads_, key, 5 + y);
    } else if (lowered_ && apart(a.stage, a.stage + 1)) {
      put(outputs_, key, y);
    } else {
      put(inputs_, {a.stage + 1, a.micro_batch}, y);
    }
    return true;
  }

  bool backward(const PipelineAction& a, Key key) {
    if (saved_.count(key) == 0) return !(wrong_ = true);
    const auto gradient = take(grads_, key);
    if (!gradient)
      return a.stage + 1 == schedule_.stages() ? !(wrong_ = true) : missing(a.stage, a.stage + 1);
    gathered(a.stage);
    const std::uint64_t x = *take(saved_, key);
    if (a.stage > 0) {
      const std::uint64_t onwards = *gradient * (a.stage + 2);
      if (lowered_ && apart(a.stage, a.stage - 1)) {
        put(input_grads_, key, onwards);
      } else {
        put(grads_, {a.stage - 1, a.micro_batch}, onwards);
      }
    }
    if (a.kind == ActionKind::backward) {
      weight(a, *gradient * x);
    } else {
      put(saved_weight_, key, *gradient * x);
    }
    return true;
  }

  void weight(const PipelineAction& a, std::uint64_t value) {
    gathered(a.stage);
    if (!weights_.insert({a.stage, a.micro_batch}).second) wrong_ = true;
    sums_[a.stage] += value;
    ++counts_[a.stage];
  }

  // A value that is not there: it may still come from another rank by itself, or never.
  bool missing(int stage, int other) {
    if (lowered_ || !apart(stage, other)) wrong_ = true;
    return false;
  }

  const PipelineSchedule& schedule_;
  bool lowered_ = false, wrong_ = false;
  std::vector<std::size_t> next_;
  std::vector<std::uint64_t> sums_;
  Values inputs_, outputs_, grads_, input_grads_, saved_, saved_weight_;
  std::set<Key> forwards_, weights_;
  std::set<int> here_, ever_, reduced_;
  std::map<int, int> counts_;
};

inline std::optional<std::vector<std::uint64_t>> interpret(const PipelineSchedule& schedule) {
  return Interpreter(schedule).run();
}

}  // namespace tessera::testing

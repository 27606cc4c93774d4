#include "tessera/pipeline/detail/stage_graph.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace tessera::detail {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::Node;
using torch::autograd::variable_list;

// What a stage computes on: no leaf, which in-place operators refuse. One node for each input, so
// that an unused one costs nothing.
struct EnterStage : torch::autograd::Function<EnterStage> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& leaf) {
    ctx->set_materialize_grads(false);
    at::Tensor entered;
    {
      const at::AutoDispatchBelowADInplaceOrView guard;
      entered = leaf.detach();
    }
    // Writing to it is seen by what saved the value in another stage of this rank.
    torch::autograd::impl::set_version_counter(entered,
                                               torch::autograd::impl::version_counter(leaf));
    return entered;
  }
  static variable_list backward(torch::autograd::AutogradContext*, const variable_list& gradients) {
    return {gradients[0]};
  }
};

bool splits(Node& node) {
  // Fused recurrent layers compute all gradients at once, whatever is asked for.
  const std::string name = node.name();
  for (const char* fused : {"Rnn", "Lstm", "Gru"}) {
    if (name.find(fused) != std::string::npos) return false;
  }
  return node.is_traceable() && node.pre_hooks().empty() && node.post_hooks().empty() &&
         node.tensor_pre_hooks().empty() && node.retains_grad_hooks().empty();
}

// Of all nodes behind the roots, whether one of `targets` is reached from them.
class Reaching {
 public:
  Reaching(const edge_list& roots, const edge_list& targets) {
    for (const Edge& target : targets) {
      if (target.is_valid()) known_[target.function.get()] = true;
    }
    for (const Edge& root : roots) {
      if (root.is_valid()) visit(root.function.get());
    }
  }
  bool operator()(const Edge& edge) const {
    if (!edge.is_valid()) return false;
    const auto at = known_.find(edge.function.get());
    return at != known_.end() && at->second;
  }
  const std::unordered_map<Node*, bool>& nodes() const { return known_; }

 private:
  void visit(Node* first) {
    struct Open {
      Node* node;
      std::size_t next;
    };
    std::vector<Open> open;
    const auto enter = [&](Node* node) {
      if (known_.try_emplace(node, false).second) open.push_back({node, 0});
    };
    enter(first);
    while (!open.empty()) {
      Node* const node = open.back().node;
      const edge_list& edges = std::as_const(*node).next_edges();
      if (open.back().next < edges.size()) {
        const Edge& edge = edges[open.back().next++];
        if (edge.is_valid()) enter(edge.function.get());
        continue;
      }
      open.pop_back();
      bool reaches = false;
      for (const Edge& edge : edges) reaches = reaches || (*this)(edge);
      known_[node] = reaches;
    }
  }
  std::unordered_map<Node*, bool> known_;
};

variable_list execute(const edge_list& roots, const variable_list& gradients, bool keep,
                      const edge_list& captured = {}) {
  if (roots.empty()) return variable_list(captured.size());
  return Engine::get_default_engine().execute(roots, gradients, keep, false, captured.empty(),
                                              captured);
}

// Nodes that lead to an entry and elsewhere, so that both halves compute with them, once each; none
// if one of them computes all its gradients at once.
std::optional<std::vector<Node*>> nodes_of_both(const Reaching& reaches, const edge_list& entries) {
  std::vector<Node*> shared;
  for (const auto& [node, in_first_half] : reaches.nodes()) {
    const auto is_it = [&, here = node](const Edge& e) { return e.function.get() == here; };
    if (!in_first_half || std::ranges::any_of(entries, is_it)) continue;
    const auto leads_elsewhere = [&](const Edge& e) { return e.is_valid() && !reaches(e); };
    if (!std::ranges::any_of(std::as_const(*node).next_edges(), leads_elsewhere)) continue;
    if (!splits(*node)) return std::nullopt;
    shared.push_back(node);
  }
  return shared;
}

}  // namespace

std::vector<at::Tensor> StageGraph::enter(const std::vector<at::Tensor>& values,
                                          const std::vector<bool>& wants) {
  std::vector<at::Tensor> entered;
  for (std::size_t i = 0; i < values.size(); ++i) {
    leaves_.emplace_back();
    entries_.emplace_back();
    entered.push_back(values[i]);
    if (!wants[i]) continue;
    leaves_.back() = values[i].detach().requires_grad_(true);
    entered.back() = EnterStage::apply(leaves_.back());
    entries_.back() = torch::autograd::impl::gradient_edge(entered.back());
  }
  return entered;
}

void StageGraph::leave(const std::vector<at::Tensor>& outputs) {
  for (const at::Tensor& output : outputs) {
    roots_.push_back(output.defined() && output.requires_grad()
                         ? torch::autograd::impl::gradient_edge(output)
                         : Edge());
  }
}

std::vector<at::Tensor> StageGraph::backward(const std::vector<at::Tensor>& gradients) {
  edge_list roots;
  variable_list given;
  for (std::size_t i = 0; i < roots_.size(); ++i) {
    if (!roots_[i].is_valid() || !gradients[i].defined()) continue;
    roots.push_back(std::move(roots_[i]));
    given.push_back(gradients[i]);
  }
  roots_.clear();
  entries_.clear();
  execute(roots, given, false);
  std::vector<at::Tensor> of_inputs;
  for (at::Tensor& leaf : leaves_) {
    of_inputs.push_back(leaf.defined() ? leaf.grad() : at::Tensor());
    leaf.reset();
  }
  leaves_.clear();
  return of_inputs;
}

std::vector<at::Tensor> StageGraph::input_gradients(const std::vector<at::Tensor>& gradients) {
  const Reaching reaches(roots_, entries_);
  const auto both_halves = nodes_of_both(reaches, entries_);
  if (!both_halves) return backward(gradients);
  const std::vector<Node*>& shared = *both_halves;

  edge_list roots, captured;
  variable_list given;
  for (std::size_t i = 0; i < roots_.size(); ++i) {
    if (!roots_[i].is_valid() || !gradients[i].defined()) continue;
    const bool now = reaches(roots_[i]);
    (now ? roots : later_).push_back(roots_[i]);
    (now ? given : later_gradients_).push_back(gradients[i]);
  }
  for (const Edge& entry : entries_) {
    if (entry.is_valid()) captured.push_back(entry);
  }
  const std::size_t inputs = captured.size();
  for (Node* node : shared) {
    for (std::uint32_t i = 0; i < node->num_inputs(); ++i) captured.emplace_back(node->getptr(), i);
  }
  variable_list got(captured.size());
  if (!captured.empty()) got = execute(roots, given, true, captured);

  std::vector<at::Tensor> of_inputs;
  std::size_t next = 0;
  for (const Edge& entry : entries_)
    of_inputs.push_back(entry.is_valid() ? std::move(got[next++]) : at::Tensor());
  for (std::size_t i = inputs; i < captured.size(); ++i) {
    if (!got[i].defined()) continue;
    later_.push_back(std::move(captured[i]));
    later_gradients_.push_back(std::move(got[i]));
  }
  // What is saved of an input holds the nodes before it, so that these do not go with the edges.
  const std::unordered_set<Node*> both(shared.begin(), shared.end());
  for (const auto& [node, in_first_half] : reaches.nodes()) {
    if (in_first_half && !both.contains(node)) node->release_variables();
  }
  // Collected first: what an edge leads to is freed with it.
  std::vector<std::pair<Node*, std::size_t>> inside;
  for (Node* node : shared) {
    const edge_list& edges = std::as_const(*node).next_edges();
    for (std::size_t i = 0; i < edges.size(); ++i) {
      if (reaches(edges[i])) inside.emplace_back(node, i);
    }
  }
  edge_list taken;
  for (const auto& [node, i] : inside)
    taken.push_back(std::exchange(node->next_edges()[i], Edge()));
  roots_.clear();
  entries_.clear();
  leaves_.clear();
  return of_inputs;
}

void StageGraph::weight_gradients() {
  const edge_list roots = std::move(later_);
  const variable_list given = std::move(later_gradients_);
  later_.clear();
  later_gradients_.clear();
  execute(roots, given, false);
}

}  // namespace tessera::detail

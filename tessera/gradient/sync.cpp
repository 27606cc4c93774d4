#include "tessera/gradient/sync.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <unordered_set>
#include <utility>

#include "tessera/gradient/internal/announce.h"
#include "tessera/gradient/internal/hooks.h"

namespace tessera {

GradientSync::~GradientSync() = default;

std::optional<double> GradientSync::scale(const at::Tensor&) const { return std::nullopt; }
std::vector<int> GradientSync::ranks(const at::Tensor&) const { return {}; }
void GradientSync::receives(const at::Tensor&, GradientForm, const std::vector<int>&) {}

void GradientSync::pause() {
  const std::lock_guard lock(mutex_);
  if (scopes_ == 0) {
    before_ = syncing();
    set_syncing(false);
  }
  ++scopes_;
}

void GradientSync::resume() {
  const std::lock_guard lock(mutex_);
  if (--scopes_ == 0) set_syncing(before_);
}

void attach_gradient_sync(const std::vector<at::Tensor>& parameters,
                          const std::shared_ptr<GradientSync>& sync) {
  if (!sync) throw InvalidArgument("attach_gradient_sync: nothing to attach");
  for (const at::Tensor& p : parameters)
    if (!p.defined() || !p.is_leaf() || !p.requires_grad())
      throw InvalidArgument(
          "attach_gradient_sync takes leaves that require grad; only such have a gradient to "
          "reduce");
  for (const at::Tensor& p : parameters) detail::add_hook_after(p, nullptr, sync);
}

namespace {

using Syncs = std::vector<std::shared_ptr<GradientSync>>;

// In the order in which they were attached.
Syncs syncs_of(const at::Tensor& p) {
  Syncs all;
  if (!p.defined() || !torch::autograd::impl::get_autograd_meta(p)) return all;
  const auto* hook =
      dynamic_cast<const detail::ChainedHook*>(torch::autograd::impl::post_acc_grad_hooks(p).get());
  for (; hook; hook = dynamic_cast<const detail::ChainedHook*>(hook->before.get()))
    if (auto sync = hook->sync.lock()) all.push_back(std::move(sync));
  std::ranges::reverse(all);
  return all;
}

}  // namespace

std::vector<std::shared_ptr<GradientSync>> gradient_syncs(
    const std::vector<at::Tensor>& parameters) {
  std::vector<Syncs> lists;
  for (const at::Tensor& p : parameters) {
    Syncs list = syncs_of(p);
    if (!list.empty() && std::ranges::find(lists, list) == lists.end())
      lists.push_back(std::move(list));
  }
  // The first that stands behind no other one in any list comes next.
  Syncs all;
  const auto done = [&](const auto& sync) { return std::ranges::find(all, sync) != all.end(); };
  const auto is_next = [&](const auto& sync) {
    return std::ranges::all_of(lists, [&](const Syncs& list) {
      const auto at = std::ranges::find(list, sync);
      return at == list.end() || std::all_of(list.begin(), at, done);
    });
  };
  for (bool found = true; found;) {
    found = false;
    for (std::size_t l = 0; l < lists.size() && !found; ++l) {
      for (const auto& sync : lists[l]) {
        if (done(sync) || !is_next(sync)) continue;
        all.push_back(sync);
        found = true;
        break;
      }
    }
  }
  return all;
}

namespace {

bool is_mean_over(double scale, std::int64_t count) {
  return std::abs(scale * static_cast<double>(count) - 1) < 1e-9;
}

}  // namespace

bool GradientSum::covers(const std::vector<int>& others) const {
  if (count == 0) return true;
  const bool all = std::ranges::all_of(
      others, [&](int rank) { return std::ranges::find(ranks, rank) != ranks.end(); });
  // Behind the ranks known here there are others if several reduce it.
  return all || (reducers > 1 && count >= static_cast<std::int64_t>(others.size()));
}

bool GradientSum::is_mean() const { return count > 1 && is_mean_over(scale, count); }

std::optional<GradientSum> gradient_sum(const at::Tensor& parameter) {
  GradientSum sum;
  for (const auto& sync : syncs_of(parameter)) {
    const auto scale = sync->scale(parameter);
    if (!scale) return std::nullopt;
    const std::vector<int> ranks = sync->ranks(parameter);
    ++sum.reducers;
    const std::int64_t count = static_cast<std::int64_t>(ranks.size());
    if (count == 0 || sum.count == 0) {
      sum.scale *= *scale;
      sum.count = 0;
      continue;
    }
    const int shared = detail::shared_ranks(ranks, sum.ranks);
    if (shared < 2) {
      sum.scale *= *scale;
      sum.count *= count;
      for (const int rank : ranks)
        if (std::ranges::find(sum.ranks, rank) == sum.ranks.end()) sum.ranks.push_back(rank);
      continue;
    }
    // A mean of equal values changes nothing; one of means over as many ranks is the mean over all.
    if (!sum.is_mean() || !is_mean_over(*scale, count)) return std::nullopt;
    if (shared == count) continue;
    if (shared != static_cast<int>(sum.ranks.size())) return std::nullopt;
    sum.scale = *scale;
    sum.count = count;
    sum.ranks = ranks;
  }
  return sum;
}

void reduce_gradients(const std::vector<at::Tensor>& parameters) {
  for (const auto& sync : gradient_syncs(parameters)) sync->reduce();
}

NoSync::NoSync(const std::vector<at::Tensor>& parameters) {
  const auto syncs = gradient_syncs(parameters);
  paused_.reserve(syncs.size());
  for (const auto& sync : syncs) {
    sync->pause();
    paused_.emplace_back(sync.get(), Resume{sync});
  }
}

void NoSync::Resume::operator()(GradientSync*) const {
  try {
    sync->resume();
  } catch (const std::exception& e) {  // of a user's own set_syncing()
    TORCH_WARN("gradients could not be switched back to being reduced: ", e.what());
  }
}

namespace detail {

void add_hook_after(const at::Tensor& leaf, std::function<void(const at::Tensor& leaf)> accumulated,
                    const std::weak_ptr<GradientSync>& sync) {
  auto hook = std::make_unique<ChainedHook>();
  hook->accumulated = std::move(accumulated);
  hook->sync = sync;
  hook->before = std::move(torch::autograd::impl::post_acc_grad_hooks(leaf));
  torch::autograd::impl::set_post_acc_grad_hooks(leaf, std::move(hook));
}

void add_hook_before(const at::Tensor& leaf,
                     std::function<at::TensorBase(const at::TensorBase&)> hook) {
  // libtorch makes its list of C++ hooks by dropping all others.
  auto& hooks = torch::autograd::impl::hooks(leaf);
  const auto* meta = torch::autograd::impl::get_autograd_meta(leaf);
  if (meta && meta->cpp_hooks_list_) {
    static_cast<const at::TensorBase&>(leaf).register_hook(std::move(hook));
    return;
  }
  auto others = std::move(hooks);
  hooks.clear();
  static_cast<const at::TensorBase&>(leaf).register_hook(std::move(hook));
  hooks.insert(hooks.begin(), std::make_move_iterator(others.begin()),
               std::make_move_iterator(others.end()));
}

const void* at_end_of_backward(std::function<void(const void* backward, bool completed)> then) {
  struct End : Pinned {
    explicit End(std::function<void(const void*, bool)> t) : then(std::move(t)) {}
    ~End() {
      if (then) then(this, false);
    }
    std::function<void(const void*, bool)> then;
  };
  const auto end = std::make_shared<End>(std::move(then));
  torch::autograd::Engine::get_default_engine().queue_callback([end] {
    const auto call = std::exchange(end->then, nullptr);
    raising([&] { call(end.get(), true); });
  });
  return end.get();
}

namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;
using NodeSet = std::unordered_set<const Node*>;

// What has been announced in the backward that runs on this thread.
struct Announced {
  struct Forms {
    GradientForm form;
    std::vector<int> ranks;
    NodeSet seen;
  };
  struct Average {
    const Node* from;
    std::vector<int> ranks;
    NodeSet reached;  // empty: not looked for yet
  };
  int task = -1;
  std::vector<Forms> forms;
  std::vector<Average> averages;

  static Announced& now() {
    static thread_local Announced announced;
    const int task = torch::autograd::get_current_graph_task_id();
    if (announced.task != task) announced = Announced{task, {}, {}};
    return announced;
  }
};

// All nodes behind `from`; `visit` says whether to go on behind one.
template <class Visit>
void walk(const Node& from, NodeSet& seen, const Visit& visit) {
  std::vector<const Node*> open{&from};
  while (!open.empty()) {
    const Node* node = open.back();
    open.pop_back();
    for (const auto& edge : node->next_edges()) {
      const Node* next = edge.function.get();
      if (next && seen.insert(next).second && visit(*next)) open.push_back(next);
    }
  }
}

}  // namespace

int shared_ranks(const std::vector<int>& a, const std::vector<int>& b) {
  return static_cast<int>(
      std::ranges::count_if(a, [&](int rank) { return std::ranges::find(b, rank) != b.end(); }));
}

bool accumulates_into(const at::Tensor& leaf) {
  const auto* asked = torch::autograd::get_current_graph_task_exec_info();
  if (!asked || asked->empty()) return true;
  const auto it = asked->find(torch::autograd::impl::gradient_edge(leaf).function.get());
  return it != asked->end() && it->second.needed_;
}

void announce_gradient(GradientForm form, const std::vector<int>& ranks,
                       const std::function<bool(const Node&)>& stop) {
  const auto node = torch::autograd::get_current_node();
  if (ranks.size() < 2 || !node) return;
  auto& forms = Announced::now().forms;
  auto known = std::ranges::find_if(
      forms, [&](const Announced::Forms& f) { return f.form == form && f.ranks == ranks; });
  if (known == forms.end()) known = forms.insert(forms.end(), {form, ranks, {}});
  walk(*node, known->seen, [&](const Node& next) {
    if (const auto* leaf = dynamic_cast<const AccumulateGrad*>(&next)) {
      if (leaf->variable.defined() && accumulates_into(leaf->variable))
        for (const auto& sync : gradient_syncs({leaf->variable}))
          sync->receives(leaf->variable, form, ranks);
      return false;
    }
    return !stop(next);
  });
}

void announce_average(const std::vector<int>& ranks) {
  if (const auto node = torch::autograd::get_current_node(); node && ranks.size() > 1)
    Announced::now().averages.push_back({node.get(), ranks, {}});
}

bool averaged_above(const std::vector<int>& ranks, const Node* to) {
  auto& averages = Announced::now().averages;
  if (averages.empty()) return false;
  const auto current = torch::autograd::get_current_node();
  const Node* target = to ? to : current.get();
  return std::ranges::any_of(averages, [&](Announced::Average& average) {
    if (shared_ranks(average.ranks, ranks) < 2) return false;
    if (average.reached.empty())
      walk(*average.from, average.reached, [](const Node&) { return true; });
    return average.reached.contains(target);
  });
}

}  // namespace detail

}  // namespace tessera

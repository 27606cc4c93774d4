#include "tessera/ops/ghosts/detail/row_plan.h"

#include <ATen/ops/bincount.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <bit>
#include <deque>
#include <span>

#include "tessera/base/error.h"
#include "tessera/base/internal/vector.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/comm/job/internal/failures.h"
#include "tessera/ops/rules/detail/rules.h"
#include "tessera/partition/internal/id_table.h"
#include "tessera/tensor/dispatch/internal/kernels.h"

namespace tessera::detail {
namespace {

using Ids = std::span<const std::int64_t>;

// As many as fit into the word that ranks compare, with bits that say that an index does not fit,
// and that it has an order.
constexpr std::size_t kMostPlans = 16, kMostTensors = 64;
constexpr std::uint64_t kUnfit = std::uint64_t{1} << 63, kInOrder = std::uint64_t{1} << 62;

// A plan, with what it is found by.
struct Kept {
  DimSharding rows;
  std::uint64_t hash;
  RowPlanPtr plan;
};

// A tensor whose plan is known. The layout tells views of one tensor apart.
struct Known {
  c10::weak_intrusive_ptr<ShardMeta> meta;
  const ShardMeta* address;
  LayoutPtr layout;
  DimSharding rows;
  std::uint32_t version;
  RowPlanPtr plan;
};

// What this thread's rank keeps of some axes of a mesh, most recent first: in the same order on the
// ranks along these axes, which make the same calls. Along others ranks may have other graphs.
struct KeptPlans {
  std::shared_ptr<MeshContext> context;
  std::uint64_t failures = 0;
  std::deque<Kept> plans;
  std::deque<Known> tensors;
};

KeptPlans& kept_plans(const std::shared_ptr<MeshContext>& context, const std::vector<int>& axes) {
  using Cache = ThreadCache<std::shared_ptr<KeptPlans>, struct RowPlansOfAxes>;
  Key key{reinterpret_cast<std::uintptr_t>(context.get())};
  key.append(axes.begin(), axes.end());
  KeptPlans& kept = *Cache::find_or_make(
      key, [&] { return std::make_shared<KeptPlans>(KeptPlans{context, 0, {}, {}}); });
  // What one rank has added when another failed may differ between them.
  if (const auto failures = failures_of(context->mesh); kept.failures != failures) {
    kept.plans.clear();
    kept.tensors.clear();
    kept.failures = failures;
  }
  return kept;
}

// One index per row of the local, on the host. Dims behind the first are expanded.
at::Tensor ids_of(const ShardMeta& index) {
  const LocalCallGuard guard;
  at::Tensor ids = index.local;
  while (ids.dim() > 1) {
    // Nothing is moved of the rows that they name.
    if (ids.size(1) == 0) return at::zeros({ids.size(0)}, at::kLong);
    ids = ids.select(1, 0);
  }
  return ids.to(at::kCPU, at::kLong).contiguous();
}

std::uint64_t hash_of_ids(Ids ids) {
  std::uint64_t h = ids.size();
  for (const std::int64_t id : ids)
    h = (h ^ static_cast<std::uint64_t>(id)) * 0x9e3779b97f4a7c15ull;
  return h ^ (h >> 32);
}

// The ids that a plan was made of, by row of the local array.
std::int64_t id_of(const RowPlan& plan, std::int64_t row) {
  return row < plan.owned() ? plan.begin + row
                            : plan.ghosts[static_cast<std::size_t>(row - plan.owned())];
}

// The first place at which the ids are others than the plan's; none if they are the same.
std::optional<std::size_t> difference(const RowPlan& plan, Ids ids) {
  const at::Tensor there = plan.rows.to(at::kCPU);
  const Ids rows = span_over(there);
  for (std::size_t i = 0; i < std::min(ids.size(), rows.size()); ++i)
    if (id_of(plan, rows[i]) != ids[i]) return i;
  if (ids.size() != rows.size()) return std::min(ids.size(), rows.size());
  return std::nullopt;
}

RowPlanPtr made_plan(const std::shared_ptr<MeshContext>& context, const DimSharding& sharding,
                     Ids ids, const SumOrder& order, c10::Device device, std::string origin) {
  auto plan = std::make_shared<RowPlan>();
  plan->origin = std::make_shared<const CallOrigin>(std::move(origin));
  const OriginScope scope(plan->origin);
  plan->state = std::make_shared<GhostState>(GhostState{context->mesh, sharding.axes});
  GhostState& state = *plan->state;
  const Group group = state.group();
  const Partition& rows = sharding.partition;
  const Interval own = rows.interval(group.rank());
  plan->begin = own.begin;
  auto& ghosts = plan->ghosts;
  for (const std::int64_t id : ids)
    if (id < own.begin || id >= own.end) ghosts.push_back(id);
  std::ranges::sort(ghosts);
  ghosts.erase(std::unique(ghosts.begin(), ghosts.end()), ghosts.end());

  state.rows.rank = group.rank();
  state.rows.ranks = group.size();
  state.rows.owned = own.end - own.begin;
  state.rows.ghosts = static_cast<std::int64_t>(ghosts.size());
  IdsByRank asked{{}, ghosts};
  for (int r = 0; r < group.size(); ++r) {
    const auto [first, last] = std::pair(std::ranges::lower_bound(ghosts, rows.interval(r).begin),
                                         std::ranges::lower_bound(ghosts, rows.interval(r).end));
    asked.counts.push_back(last - first);
    if (last != first) state.rows.receives.push_back({r, last - first});
  }
  state.rows.received = numbers_below<std::int64_t>(ghosts.size());
  IdsByRank wanted = group.size() > 1 ? carried_by(group, asked) : asked;
  for (int r = 0; r < group.size(); ++r)
    if (wanted.counts[r] > 0) state.rows.sends.push_back({r, wanted.counts[r]});
  for (std::int64_t& id : wanted.values) id -= own.begin;
  state.rows.sent = std::move(wanted.values);
  prepare_messages(state);
  at::Tensor all = at::zeros({1}, at::kLong).fill_(state.rows.ghosts);
  if (group.size() > 1) group.all_reduce(all, ReduceOp::sum, {.name = "ghost_plan"});
  plan->all_ghosts = all.item<std::int64_t>();

  IdTable place(ghosts.size());
  for (std::size_t g = 0; g < ghosts.size(); ++g)
    place.insert(ghosts[g], state.rows.owned + static_cast<std::int64_t>(g));
  plan->rows = at::empty({static_cast<std::int64_t>(ids.size())}, at::kLong);
  auto* const row = plan->rows.mutable_data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < ids.size(); ++i)
    row[i] = ids[i] >= own.begin && ids[i] < own.end ? ids[i] - own.begin : place.find(ids[i]);
  plan->counts = at::bincount(plan->rows, {}, state.rows.owned + state.rows.ghosts);
  if (plan->all_ghosts > 0)
    plan->counts = reduced_to_owners(plan->state, plan->counts, ReduceOp::sum);
  if (order) plan->ordered = ordered_sums(group, rows, ids, order);
  plan->rows = plan->rows.to(device);
  plan->counts = plan->counts.to(device);
  return plan;
}

bool same_order(const std::shared_ptr<const OrderedSums>& of, const SumOrder& order) {
  return of && order ? of->order == order || *of->order == *order : !of && !order;
}

template <class T>
void to_front(std::deque<T>& all, typename std::deque<T>::iterator at) {
  std::rotate(all.begin(), at, at + 1);
}

[[noreturn]] void refuse_changed(const char* op, const RowPlan& plan, Ids ids, std::size_t at) {
  const auto rows = plan.rows.to(at::kCPU);
  const bool grown = at >= ids.size() || at >= span_over(rows).size();
  throw InvalidArgument(
      op, ": the index was written to since its exchange of ghosts was planned: on rank ",
      plan.state->group().ranks()[static_cast<std::size_t>(plan.state->rows.rank)],
      grown ? concat(" it has ", ids.size(), " places, and had ", span_over(rows).size())
            : concat(" place ", at, " named row ", id_of(plan, span_over(rows)[at]),
                     ", and now names row ", ids[at]),
      ". Give a changed graph as a new tensor (clone() before it is written to)");
}

// By the tensor itself.
RowPlanPtr known_plan(const char* op, KeptPlans& kept, const at::Tensor& tensor,
                      const ShardMeta* meta, const DimSharding& rows) {
  const ShardMeta& index = *meta_of(tensor);
  const auto found = std::ranges::find_if(kept.tensors, [&](const Known& k) {
    return k.address == meta && k.layout == index.layout && k.rows == rows && !k.meta.expired();
  });
  if (found == kept.tensors.end()) return nullptr;
  if (const auto version = static_cast<std::uint32_t>(tensor._version());
      found->version != version) {
    const at::Tensor ids = ids_of(index);
    if (const auto at = difference(*found->plan, span_over(ids)))
      refuse_changed(op, *found->plan, span_over(ids), *at);
    found->version = version;
  }
  to_front(kept.tensors, found);
  return kept.tensors.front().plan;
}

// By its values: each rank says which of the plans that it keeps are of its own indices.
RowPlanPtr agreed_plan(const char* op, KeptPlans& kept, const ShardMeta& index,
                       const DimSharding& rows) {
  const auto& context = kept.context;
  const Group group = context->mesh.group(rows.axes);
  const at::Tensor given = ids_of(index);
  const Ids ids = span_over(given);
  const std::uint64_t hash = hash_of_ids(ids);
  const auto origin = concat(op, " of rows ", list(rows.partition.sizes()), " by ", index.spec());
  const SumOrder order = order_of(index.local);
  const auto words = agree::all<std::uint64_t>(group, op, [&] {
    if (order && order->size() != ids.size())
      throw InvalidArgument("an index of ", ids.size(), " places by edges that have an order of ",
                            order->size(), "; give all of them, or edges without an order");
    std::uint64_t word = order ? kInOrder : 0;
    for (const std::int64_t id : ids)
      if (id < 0 || id >= rows.partition.extent()) return kUnfit;
    for (std::size_t i = 0; i < kept.plans.size(); ++i) {
      const Kept& k = kept.plans[i];
      if (k.hash == hash && k.rows == rows && k.plan->rows.device() == index.local.device() &&
          same_order(k.plan->ordered, order) && !difference(*k.plan, ids))
        word |= std::uint64_t{1} << i;
    }
    return word;
  });
  std::uint64_t common = ~(kUnfit | kInOrder);
  for (const std::uint64_t word : words) {
    if (word & kUnfit) return nullptr;
    if ((word ^ words.front()) & kInOrder)
      throw InvalidArgument(op, " by edges that have an order on some ranks alone; ",
                            "give those of OwnedRows::edges() on all of them, or copies");
    common &= word;
  }
  if (common != 0) {
    to_front(kept.plans, kept.plans.begin() + std::countr_zero(common));
    return kept.plans.front().plan;
  }
  const RowPlanPtr plan = made_plan(context, rows, ids, order, index.local.device(), origin);
  kept.plans.push_front({rows, hash, plan});
  if (kept.plans.size() > kMostPlans) {
    std::erase_if(kept.tensors,
                  [&](const Known& known) { return known.plan == kept.plans.back().plan; });
    kept.plans.pop_back();
  }
  return plan;
}

}  // namespace

RowPlanPtr row_plan(const char* op, const at::Tensor& index, const DimSharding& rows) {
  const ShardMeta& meta = *meta_of(index);
  const auto& context = context_of(meta.spec());
  try {
    KeptPlans& kept = kept_plans(context, rows.axes);
    // A tensor of inference mode counts no writes.
    const bool counted = !meta.local.is_inference() && !index.is_inference();
    const at::Tensor base = counted && index.is_view() ? at::Tensor(index._base()) : index;
    ShardMeta* const of = meta_of(base) ? meta_of(base) : meta_of(index);
    if (counted)
      if (RowPlanPtr plan = known_plan(op, kept, index, of, rows)) return plan;
    RowPlanPtr plan = agreed_plan(op, kept, meta, rows);
    if (plan && counted) {
      const auto held = c10::intrusive_ptr<ShardMeta>::reclaim_copy(of);
      kept.tensors.push_front({c10::weak_intrusive_ptr<ShardMeta>(held), of, meta.layout, rows,
                               static_cast<std::uint32_t>(index._version()), plan});
      if (kept.tensors.size() > kMostTensors) kept.tensors.pop_back();
    }
    return plan;
  } catch (...) {
    rethrow_to_all(op, *context);
  }
}

}  // namespace tessera::detail

// Which tokens go to which experts, and the way there and back.

#include <ATen/ops/empty.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cmath>

#include "tessera/base/error.h"
#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/comm/group/functional.h"
#include "tessera/nn/detail/routes.h"
#include "tessera/nn/experts.h"
#include "tessera/partition/partition.h"
#include "tessera/tensor/shard_tensor.h"
#include "tessera/tensor/spec/internal/boxes.h"

namespace tessera {

namespace {

using detail::ChoiceCounts;
using detail::Routes;

int axis_named(const DeviceMesh& mesh, const std::string& name, const char* who) {
  const auto& axes = mesh.mesh().axes();
  for (std::size_t a = 0; a < axes.size(); ++a)
    if (axes[a].name == name) return static_cast<int>(a);
  throw InvalidArgument(who, ": the mesh has no axis '", name, "': ", mesh.mesh());
}

void check_routing(const at::Tensor& p, const RoutingOptions& options) {
  if (!p.defined() || p.dim() != 2 || !at::isFloatingType(p.scalar_type()))
    throw InvalidArgument("Routing: probabilities are floating-point, [tokens, experts]");
  if (options.chosen < 1 || options.chosen > p.size(1))
    throw InvalidArgument("Routing: a token cannot choose ", options.chosen, " of ", p.size(1),
                          " experts");
  if (!(options.capacity >= 0))
    throw InvalidArgument("Routing: a capacity of ", options.capacity,
                          "; give a positive one, or 0 for none");
}

// Where tokens lie while they are routed, and who the experts' ranks are.
void place_rows(Routes& routes, const at::Tensor& p, const RoutingOptions& options) {
  const std::int64_t experts = p.size(1);
  int parts = 1;
  if (is_sharded(p)) {
    const ShardSpec given = detail::without_partial(spec(p));
    routes.axis = axis_named(given.mesh(), options.axis, "Routing");
    routes.ranks = given.mesh().group(routes.axis);
    parts = routes.ranks->size();
    routes.result = given.placements();
    for (Placement& at : routes.result)
      if (!at.is_shard(0)) at = Replicate();
    auto rows = routes.result;
    rows[static_cast<std::size_t>(routes.axis)] = Shard(0);
    routes.rows = given.with_placements(rows);
  }
  routes.experts = options.sizes.empty() ? Partition::even(experts, parts).sizes() : options.sizes;
  if (static_cast<int>(routes.experts.size()) != parts ||
      c10::sum_integers(routes.experts) != experts ||
      std::ranges::any_of(routes.experts, [](auto n) { return n < 0; }))
    throw InvalidArgument("Routing: ", list(routes.experts), " experts on the ranks of '",
                          options.axis, "' are not ", experts, " on ", parts, " ranks");
}

at::Tensor indices(const std::vector<std::int64_t>& values, c10::Device device) {
  return at::tensor(values, at::TensorOptions(at::kLong)).to(device);
}

// The counts of all ranks that have tokens. `mine`: of this rank alone; `what` they all ask for.
ChoiceCounts gathered(const ChoiceCounts& mine, const std::optional<Group>& ranks,
                      c10::Device device, const std::string& what) {
  if (!ranks || ranks->size() == 1) return mine;
  const at::Tensor sent = indices(mine.of, device);
  const at::Tensor all = at::empty({ranks->size() * sent.numel()}, sent.options());
  ranks->all_gather(all, sent, {}, {.name = what});
  const at::Tensor here = all.cpu();
  ChoiceCounts counts{ranks->size(), mine.choices, mine.experts, {}};
  counts.of.assign(here.const_data_ptr<std::int64_t>(),
                   here.const_data_ptr<std::int64_t>() + here.numel());
  return counts;
}

// How many of them find room.
ChoiceCounts within(const ChoiceCounts& counts, std::int64_t room) {
  ChoiceCounts kept = counts;
  for (std::int64_t e = 0; e < counts.experts; ++e) {
    std::int64_t left = room;
    for (std::int64_t j = 0; j < counts.choices; ++j)
      for (std::int64_t r = 0; r < counts.ranks; ++r) {
        kept.at(r, j, e) = std::min(counts.at(r, j, e), left);
        left -= kept.at(r, j, e);
      }
  }
  return kept;
}

// Of the choices of this rank's tokens, choice by choice, those that leave: by expert, first
// choices first.
std::vector<std::int64_t> leaving(const std::int64_t* expert, std::int64_t tokens,
                                  const ChoiceCounts& kept, std::int64_t me) {
  std::vector<std::int64_t> next, left;
  std::int64_t at = 0;
  for (std::int64_t e = 0; e < kept.experts; ++e)
    for (std::int64_t j = 0; j < kept.choices; ++j) {
      next.push_back(at);
      left.push_back(kept.at(me, j, e));
      at += left.back();
    }
  std::vector<std::int64_t> entries(static_cast<std::size_t>(at));
  for (std::int64_t j = 0; j < kept.choices; ++j)
    for (std::int64_t t = 0; t < tokens; ++t) {
      const auto run = static_cast<std::size_t>(expert[j * tokens + t] * kept.choices + j);
      if (left[run]-- > 0) entries[static_cast<std::size_t>(next[run]++)] = j * tokens + t;
    }
  return entries;
}

// What this rank sends to and gets from each rank of the experts' axis, and in which order.
// `rank_of`: the ranks of that axis among those that have tokens.
void plan_exchange(Routes& routes, const ChoiceCounts& kept,
                   const std::vector<std::int64_t>& rank_of, int me, c10::Device device) {
  std::int64_t first = 0, begin = 0;
  for (std::size_t q = 0; q < routes.experts.size(); ++q) {
    std::int64_t sent = 0;
    for (std::int64_t e = begin; e < begin + routes.experts[q]; ++e)
      sent += kept.sum(rank_of[static_cast<std::size_t>(me)], e);
    routes.sent.push_back(sent);
    if (static_cast<int>(q) == me) first = begin;
    begin += routes.experts[q];
  }
  const std::int64_t experts = routes.experts[static_cast<std::size_t>(me)];
  routes.mine.assign(static_cast<std::size_t>(experts), 0);
  // Where the rows of each rank for each of this rank's experts begin among those received.
  std::vector<std::vector<std::int64_t>> begins;
  std::int64_t at = 0;
  for (const std::int64_t r : rank_of) {
    begins.emplace_back();
    const std::int64_t before = at;
    for (std::int64_t e = 0; e < experts; ++e) {
      begins.back().push_back(at);
      at += kept.sum(r, first + e);
      routes.mine[static_cast<std::size_t>(e)] += kept.sum(r, first + e);
    }
    routes.received.push_back(at - before);
  }
  std::vector<std::int64_t> arrival, departure(static_cast<std::size_t>(at));
  for (std::int64_t e = 0; e < experts; ++e)
    for (std::size_t q = 0; q < rank_of.size(); ++q)
      for (std::int64_t i = 0; i < kept.sum(rank_of[q], first + e); ++i) {
        const std::int64_t from = begins[q][static_cast<std::size_t>(e)] + i;
        departure[static_cast<std::size_t>(from)] = static_cast<std::int64_t>(arrival.size());
        arrival.push_back(from);
      }
  routes.arrival = indices(arrival, device);
  routes.departure = indices(departure, device);
}

// The ranks of the experts' axis among those that have tokens, whose axes are in mesh order.
std::vector<std::int64_t> ranks_along(const Routes& routes, const Group& tokens) {
  const std::vector<int>& axes = routes.rows->dim(0).axes;
  const auto& sizes = routes.rows->mesh().mesh().axes();
  std::int64_t stride = 1;
  for (auto a = axes.rbegin(); *a != routes.axis; ++a)
    stride *= sizes[static_cast<std::size_t>(*a)].size;
  return mapped(numbers_below(routes.ranks->size()),
                [&](int q) { return tokens.rank() + (q - routes.ranks->rank()) * stride; });
}

// How many tokens an expert takes.
std::int64_t room_of(const Routes& routes, const RoutingOptions& options) {
  const std::int64_t all = routes.probabilities.size(0) * options.chosen;
  if (options.capacity == 0 || all == 0) return all;
  const double mean = static_cast<double>(all) / static_cast<double>(routes.probabilities.size(1));
  return static_cast<std::int64_t>(
      std::min(std::ceil(options.capacity * mean), static_cast<double>(all)));
}

// `p`: the probabilities of this rank's tokens.
void make_routes(Routes& routes, const at::Tensor& p, const RoutingOptions& options) {
  const std::int64_t tokens = p.size(0), experts = p.size(1);
  // Stable: of equal probabilities the first, on every device.
  const at::Tensor order =
      std::get<1>(at::sort(p.detach(), true, 1, true)).narrow(1, 0, options.chosen);
  const at::Tensor choice = order.t().contiguous().cpu();
  const auto* expert = choice.const_data_ptr<std::int64_t>();
  ChoiceCounts counts{1, options.chosen, experts,
                      Sizes(static_cast<std::size_t>(options.chosen * experts), 0)};
  for (std::int64_t j = 0; j < options.chosen; ++j)
    for (std::int64_t t = 0; t < tokens; ++t) ++counts.at(0, j, expert[j * tokens + t]);

  std::optional<Group> all;
  if (routes.rows) all = routes.rows->mesh().group(routes.rows->dim(0).axes);
  counts = gathered(counts, all, p.device(),
                    concat("tokens per expert, ", list(routes.experts), ", capacity ",
                           options.capacity, options.normalized ? ", normalized" : ""));
  const ChoiceCounts kept = within(counts, room_of(routes, options));
  routes.chosen.assign(static_cast<std::size_t>(experts), 0);
  for (std::int64_t e = 0; e < experts; ++e)
    for (std::int64_t r = 0; r < counts.ranks; ++r)
      routes.chosen[static_cast<std::size_t>(e)] += counts.sum(r, e);
  routes.left_out = c10::sum_integers(counts.of) - c10::sum_integers(kept.of);

  const std::vector<std::int64_t> entries = leaving(expert, tokens, kept, all ? all->rank() : 0);
  const auto token = mapped(entries, [&](std::int64_t i) { return i % tokens; });
  plan_exchange(routes, kept, all ? ranks_along(routes, *all) : std::vector<std::int64_t>{0},
                routes.ranks ? routes.ranks->rank() : 0, p.device());
  routes.token = indices(token, p.device());
  at::Tensor weight = p.gather(1, order);
  if (options.normalized) weight = weight / weight.sum(1, true);
  routes.weight = weight.t().reshape({-1}).index_select(0, indices(entries, p.device()));
}

}  // namespace

ShardSpec detail::Routes::weights(at::IntArrayRef shape, bool gradient) const {
  std::vector<Placement> placements(rows->placements().size(), Replicate());
  for (std::size_t a = 0; a < placements.size(); ++a)
    if (gradient && rows->placements()[a].is_shard()) placements[a] = Partial();
  placements[static_cast<std::size_t>(axis)] = Shard(0);
  return {rows->mesh(), shape.vec(), placements, {{0, experts}}};
}

Routing::Routing(const at::Tensor& probabilities, const RoutingOptions& options) {
  check_routing(probabilities, options);
  auto made = std::make_shared<Routes>();
  place_rows(*made, probabilities, options);
  made->probabilities = probabilities;
  made->choices = options.chosen;
  at::Tensor p = probabilities;
  if (made->rows) p = to_local(spec(p) == *made->rows ? p : redistribute(p, *made->rows));
  made->told("Routing", [&] { make_routes(*made, p, options); });
  routes_ = std::move(made);
}

at::Tensor Routing::to_experts(const at::Tensor& tokens) const {
  const Routes& r = *routes_;
  if (!tokens.defined() || tokens.dim() != 2 || tokens.size(0) != r.probabilities.size(0))
    throw InvalidArgument("Routing: tokens are [", r.probabilities.size(0),
                          ", features], as many as the probabilities are of");
  if (is_sharded(tokens) != r.rows.has_value())
    throw InvalidArgument(
        "Routing: tokens and probabilities are both plain, or both sharded on one mesh");
  at::Tensor x = tokens;
  if (r.rows) {
    const ShardSpec to(r.rows->mesh(), tokens.sizes().vec(), r.rows->placements(), r.rows->sizes());
    x = to_local(spec(x) == to ? x : redistribute(x, to));
  }
  return r.told("Routing", [&] {
    x = x.index_select(0, r.token);
    if (r.ranks && r.ranks->size() > 1) x = functional::all_to_all(*r.ranks, x, r.received, r.sent);
    return x.index_select(0, r.arrival);
  });
}

at::Tensor Routing::to_tokens(const at::Tensor& made) const {
  const Routes& r = *routes_;
  const std::int64_t tokens = r.rows ? r.rows->local_shape()[0] : r.probabilities.size(0);
  at::Tensor local = r.told("to_tokens", [&] {
    const std::int64_t rows = c10::sum_integers(r.mine);
    if (!made.defined() || is_sharded(made) || made.dim() != 2 || made.size(0) != rows)
      throw InvalidArgument("Routing: what experts made is plain, [", rows,
                            ", features], a row for each of to_experts()");
    at::Tensor x = made.index_select(0, r.departure);
    if (r.ranks && r.ranks->size() > 1) x = functional::all_to_all(*r.ranks, x, r.sent, r.received);
    x = x * r.weight.unsqueeze(1);
    return at::zeros({tokens, made.size(1)}, x.options())
        .index_add(0, r.token, x)
        .to(made.scalar_type());
  });
  if (!r.rows) return local;
  const ShardSpec lies(r.rows->mesh(), {r.probabilities.size(0), made.size(1)},
                       r.rows->placements(), r.rows->sizes());
  const at::Tensor y = from_local(local, lies);
  return r.result == r.rows->placements() ? y : redistribute(y, r.result);
}

const std::vector<std::int64_t>& Routing::counts() const { return routes_->mine; }
const std::vector<std::int64_t>& Routing::chosen() const { return routes_->chosen; }
std::int64_t Routing::left_out() const { return routes_->left_out; }

at::Tensor Routing::balance() const {
  const Routes& r = *routes_;
  const at::Tensor& p = r.probabilities;
  const auto tokens = static_cast<double>(std::max<std::int64_t>(p.size(0), 1));
  at::Tensor share =
      indices(r.chosen, at::kCPU).to(p.scalar_type()).div(tokens * static_cast<double>(r.choices));
  if (r.rows) {
    const DeviceMesh& mesh = r.rows->mesh();
    share = distribute_tensor(share.to(mesh.manager().device()),
                              ShardSpec::replicated(mesh, share.sizes().vec()));
  } else {
    share = share.to(p.device());
  }
  return (p.sum(0) * share).sum() * (static_cast<double>(p.size(1)) / tokens);
}

ParameterPlacement experts_on(const DeviceMesh& mesh, const std::string& axis, const Sizes& sizes) {
  std::vector<Placement> placements(mesh.mesh().axes().size(), Replicate());
  placements[static_cast<std::size_t>(axis_named(mesh, axis, "experts_on"))] = Shard(0);
  ParameterPlacement where{placements};
  if (!sizes.empty()) where.sizes = {{0, sizes}};
  return where;
}

}  // namespace tessera

#include "tessera/ops/ghosts/ghost_plan.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/base/hash.h"
#include "tessera/base/internal/vector.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/ops/ghosts/detail/ghost_state.h"

namespace tessera {
namespace {

using detail::carried_by;
using detail::GhostDirectory;
using detail::GhostState;
using detail::IdsByRank;

std::uint64_t hash_of(std::span<const std::int64_t> owned, std::span<const std::int64_t> needed) {
  Hash hash;
  for (const auto ids : {owned, needed})
    hash.number(ids.size()).bytes(ids.data(), ids.size_bytes());
  return hash.value();
}

const std::shared_ptr<GhostState>& made_plan(const std::shared_ptr<GhostState>& state) {
  if (!state) throw InvalidArgument("a GhostPlan that was made without arguments: give it ids");
  return state;
}

}  // namespace

namespace detail {

at::Tensor tensor_over(const std::vector<std::int64_t>& numbers) {
  return at::from_blob(const_cast<std::int64_t*>(numbers.data()),
                       {static_cast<std::int64_t>(numbers.size())}, at::kLong);
}

std::span<const std::int64_t> span_over(const at::Tensor& numbers) {
  return {numbers.const_data_ptr<std::int64_t>(), static_cast<std::size_t>(numbers.numel())};
}

std::vector<int> all_axes(const DeviceMesh& mesh) { return numbers_below(mesh.mesh().dims()); }

IdsByRank carried_by(const Group& group, const IdsByRank& sent) {
  IdsByRank received{std::vector<std::int64_t>(sent.counts.size()), {}};
  group.all_to_all(tensor_over(received.counts), tensor_over(sent.counts), {}, {},
                   {.name = "ghost_plan"});
  received.values.resize(static_cast<std::size_t>(
      std::accumulate(received.counts.begin(), received.counts.end(), std::int64_t{0})));
  group.all_to_all(tensor_over(received.values), tensor_over(sent.values), received.counts,
                   sent.counts, {.name = "ghost_plan"});
  return received;
}

void prepare_messages(GhostState& state) {
  const auto pieces_of = [](const std::vector<GhostRows::Peer>& peers) {
    return mapped(peers, [](const auto& peer) { return PeerPiece{peer.rank, {peer.rows}}; });
  };
  state.in_order = std::ranges::is_sorted(state.rows.received);
  state.peers =
      std::make_shared<PeerExchange>(pieces_of(state.rows.sends), pieces_of(state.rows.receives));
}

}  // namespace detail

GhostPlan::GhostPlan(const DeviceMesh& mesh, std::span<const std::int64_t> owned,
                     std::span<const std::int64_t> needed)
    : GhostPlan(mesh, detail::all_axes(mesh), owned, needed) {}

GhostPlan::GhostPlan(const DeviceMesh& mesh, const std::vector<int>& axes,
                     std::span<const std::int64_t> owned, std::span<const std::int64_t> needed) {
  constexpr auto kCall = "GhostPlan";
  GhostState state{mesh, axes};
  const Group group = state.group();
  std::optional<GhostDirectory> directory;
  const auto hashes = agree::all<std::uint64_t>(group, kCall, [&] {
    directory.emplace(group.rank(), group.ranks(), owned, needed);
    return hash_of(owned, needed);
  });
  const IdsByRank claimed = carried_by(group, directory->claims());
  const IdsByRank asked = carried_by(group, directory->questions());
  IdsByRank owners;
  const auto problems = agree::all<std::string>(group, kCall, [&] {
    std::string here;
    owners = directory->answers(claimed, asked, here);
    return here;
  });
  if (const auto text = detail::ghost_problems(problems); !text.empty())
    throw InvalidArgument(kCall, ": ", text);
  const IdsByRank wanted = carried_by(group, directory->requests(carried_by(group, owners)));

  state.rows = directory->rows(wanted);
  detail::prepare_messages(state);
  Hash number;
  for (const std::uint64_t hash : hashes) number.number(hash);
  state.number = number.value();
  state_ = std::make_shared<GhostState>(std::move(state));
}

const GhostRows& GhostPlan::rows() const { return made_plan(state_)->rows; }
Group GhostPlan::group() const { return made_plan(state_)->group(); }
std::string GhostPlan::summary() const { return rows().summary(); }

}  // namespace tessera

#include "tessera/ops/ghosts/ghost_transport.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/real.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/ops/ghosts/detail/ghost_state.h"

namespace tessera {

struct detail::UserExchange {
  GhostTransport functions;
  // Of the owned rows, then of the ghosts.
  std::vector<std::int64_t> ids;
};

namespace {

using detail::GhostState;
using detail::UserExchange;

constexpr auto kPlanOver = "plan_over";

// What of an id is carried in one number of a dtype: so many bits, whose sum over so many copies of
// a row is exact. No bits: no transport carries the dtype.
struct Digit {
  int bits = 0, copies_bits = 0;
  std::int64_t base() const { return std::int64_t{1} << bits; }
  std::int64_t copies() const { return std::int64_t{1} << copies_bits; }
  std::int64_t count() const { return (62 + bits) / bits; }
};

Digit digit_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
    case at::kComplexDouble:
    case at::kLong:
      return {32, 20};
    case at::kFloat:
    case at::kComplexFloat:
    case at::kInt:
      return {12, 11};
    case at::kHalf:
      return {4, 6};
    case at::kBFloat16:
      return {2, 5};
    default:
      return {};
  }
}

// One of the two functions, on rows of this rank: those of the caller, or ids.
void run_user(const GhostState& s, bool forward, const at::Tensor& rows) {
  const GhostTransport& functions = s.by_user->functions;
  const at::AutoGradMode none(false);
  const auto sizes = rows.sizes().vec();
  const void* const memory = rows.const_data_ptr();
  (forward ? functions.forward : functions.reverse)(rows);
  if (rows.sizes() != at::IntArrayRef(sizes) || rows.const_data_ptr() != memory)
    throw InvalidArgument("it has made its rows of shape ", at::IntArrayRef(sizes),
                          " ones of shape ", rows.sizes(),
                          ", or moved them; it changes values alone");
}

// Digits of the ids plus 1 (0: nothing has come), lowest first: rows x `width`, from digit `first`
// on.
at::Tensor digits(const at::Tensor& ids, const Digit& digit, std::int64_t first,
                  std::int64_t width) {
  const at::Tensor place =
      (at::arange(first, first + width, at::TensorOptions(at::kLong)) * digit.bits).clamp_max(63);
  return ids.unsqueeze(1).bitwise_right_shift(place).bitwise_and(digit.base() - 1) + 1;
}

// The rank that owns each ghost, as it is called outside.
std::vector<int> owners_of_ghosts(const GhostState& s) {
  std::vector<int> owner(static_cast<std::size_t>(s.rows.ghosts));
  const auto ranks = s.group().ranks();
  auto ghost = s.rows.received.begin();
  for (const GhostRows::Peer& peer : s.rows.receives)
    for (std::int64_t k = 0; k < peer.rows; ++k)
      owner[static_cast<std::size_t>(*ghost++)] = ranks[static_cast<std::size_t>(peer.rank)];
  return owner;
}

// Calls the function on digits of ids, in rows like the caller's, as often as all of them take:
// rows x digits, as they have come.
at::Tensor passed(const GhostState& s, bool forward, const at::Tensor& like, const at::Tensor& ids,
                  const at::Tensor& given) {
  const Digit digit = digit_of(like.scalar_type());
  const std::int64_t rows = ids.size(0), width = c10::multiply_integers(like.sizes().slice(1));
  std::vector<at::Tensor> columns;
  for (std::int64_t first = 0; first < digit.count(); first += width) {
    const at::Tensor sent = digits(ids, digit, first, width) * given.unsqueeze(1);
    const at::Tensor here = sent.to(like.options()).view(like.sizes()).contiguous();
    run_user(s, forward, here);
    const at::Tensor back = at::real(here).to(at::kCPU, at::kDouble).view({rows, width});
    columns.push_back(back.narrow(1, 0, std::min(width, digit.count() - first)));
  }
  return at::cat(columns, 1);
}

// What has come in the place of an id.
std::string named(const at::Tensor& come, const Digit& digit) {
  std::uint64_t id = 0;
  for (std::int64_t c = digit.count(); c-- > 0;) {
    const double value = come[c].item<double>() - 1;
    if (!(value >= 0 && value < static_cast<double>(digit.base()))) return "what is no id";
    id = (id << digit.bits) | static_cast<std::uint64_t>(value);
  }
  return concat("id ", id);
}

std::string said_of(const GhostState& s, bool forward, std::int64_t row, const at::Tensor& come,
                    const Digit& digit) {
  const auto id = concat("id ", s.by_user->ids[static_cast<std::size_t>(row)]);
  if (!forward) return concat(id, " (row ", row, ") did not get the sum of its ghosts");
  if (row < s.rows.owned) return concat(id, " (owned row ", row, ") became ", named(come, digit));
  const int owner = owners_of_ghosts(s)[static_cast<std::size_t>(row - s.rows.owned)];
  return concat("the ghost of ", id, " (row ", row, ", owned by rank ", owner, ") got ",
                come.eq(0).all().item<bool>() ? "nothing" : named(come, digit));
}

// Empty where what arrives of ids is what the plan says.
std::string ids_are_wrong(const GhostState& s, bool forward, const at::Tensor& like) {
  if (c10::multiply_integers(like.sizes().slice(1)) == 0) return {};  // on all ranks alike
  const GhostRows& rows = s.rows;
  const Digit digit = digit_of(like.scalar_type());
  const at::Tensor ids = detail::tensor_over(s.by_user->ids);
  at::Tensor given = at::zeros_like(ids);
  given.narrow(0, forward ? 0 : rows.owned, forward ? rows.owned : rows.ghosts).fill_(1);
  const at::Tensor come = passed(s, forward, like, ids, given);
  const std::int64_t compared = forward ? rows.owned + rows.ghosts : rows.owned;
  const at::Tensor copies =
      forward ? at::ones_like(ids) : at::bincount(detail::tensor_over(rows.sent), {}, compared);
  const at::Tensor expected =
      digits(ids, digit, 0, digit.count()).narrow(0, 0, compared) * copies.unsqueeze(1);
  const at::Tensor wrong = come.narrow(0, 0, compared)
                               .ne(expected)
                               .any(1)
                               .logical_and(copies.le(digit.copies()))
                               .nonzero();
  std::string text;
  const std::int64_t shown = std::min<std::int64_t>(wrong.size(0), 4);
  for (std::int64_t k = 0; k < shown; ++k) {
    const auto row = wrong[k].item<std::int64_t>();
    text += concat(k > 0 ? ", " : "", said_of(s, forward, row, come[row], digit));
  }
  return shown < wrong.size(0) ? concat(text, ", ... (", wrong.size(0), " in all)") : text;
}

}  // namespace

namespace detail {

void run_by_user(const GhostState& s, bool forward, const at::Tensor& rows) {
  const Group group = s.group();
  const auto call = concat(forward ? "ghost_exchange" : "ghost_reduce", " by the transport's ",
                           forward ? "forward" : "reverse");
  if (group.check_level() == CheckLevel::collective) {
    const auto problems =
        agree::all<std::string>(group, call, [&] { return ids_are_wrong(s, forward, rows); });
    std::string text;
    for (std::size_t r = 0; r < problems.size(); ++r)
      if (!problems[r].empty())
        text += concat(" On rank ", group.ranks()[r], ": ", problems[r], '.');
    if (!text.empty())
      throw MismatchError(call, " moves other rows than the plan's.", text,
                          " Its lists of neighbours are of another partition or order");
    agree::all(group, call, [&] { run_user(s, forward, rows); });
    return;
  }
  try {
    run_user(s, forward, rows);
  } catch (const std::exception& e) {
    if (group.size() > 1)
      s.mesh.manager().fail_groups_within(s.mesh.mesh(), concat(call, ": ", e.what()));
    throw;
  }
}

void check_carried(const UserExchange& by_user, at::ScalarType type) {
  const auto& types = by_user.functions.dtypes;
  if (std::ranges::find(types, type) == types.end())
    throw InvalidArgument("rows of ", type, "; the plan's transport carries ", joined(types, ", "),
                          ": convert them, name the dtype in the transport, or exchange "
                          "them by a plan without one");
}

}  // namespace detail

GhostPlan plan_over(const GhostTransport& transport, const DeviceMesh& mesh,
                    std::span<const std::int64_t> owned, std::span<const std::int64_t> needed) {
  return plan_over(transport, mesh, detail::all_axes(mesh), owned, needed);
}

GhostPlan plan_over(const GhostTransport& transport, const DeviceMesh& mesh,
                    const std::vector<int>& axes, std::span<const std::int64_t> owned,
                    std::span<const std::int64_t> needed) {
  agree::all_same(mesh.group(axes), kPlanOver, [&] {
    if (!transport.forward || !transport.reverse)
      throw InvalidArgument("the transport has no ", transport.forward ? "reverse" : "forward",
                            " function");
    if (transport.dtypes.empty())
      throw InvalidArgument("the transport names no dtype that it carries");
    for (const at::ScalarType type : transport.dtypes)
      if (digit_of(type).bits == 0)
        throw InvalidArgument("a transport of ", type,
                              "; it carries floating point, complex, int32 or int64");
    return concat("a transport of ", joined(transport.dtypes, ", "));
  });
  GhostPlan plan(mesh, axes, owned, needed);
  auto kept = std::make_shared<UserExchange>(
      UserExchange{transport, std::vector<std::int64_t>(owned.begin(), owned.end())});
  kept->ids.insert(kept->ids.end(), needed.begin(), needed.end());
  plan.state()->by_user = std::move(kept);
  return plan;
}

}  // namespace tessera

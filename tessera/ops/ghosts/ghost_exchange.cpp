// ghost_exchange and ghost_reduce as differentiable functions.

#include <ATen/Dispatch.h>
#include <ATen/NumericUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstring>
#include <type_traits>
#include <utility>

#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/ops/ghosts/detail/ghost_state.h"
#include "tessera/ops/ghosts/ghost_plan.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera {
namespace {

using detail::GhostState;
using detail::LocalCallGuard;
using detail::PeerTransfer;
using detail::tensor_over;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr auto kExchange = "ghost_exchange";
constexpr auto kReduce = "ghost_reduce";

std::string name_of(ReduceOp op) { return to_string(op.kind); }

void check_rows(const GhostState& s, const char* call, const at::Tensor& t, std::int64_t rows,
                const std::string& which) {
  const auto refuse = [&](const auto&... why) {
    throw InvalidArgument(call, " on rank ", s.group().ranks()[s.rows.rank], ": ", why...);
  };
  if (!t.defined()) refuse("no tensor was given");
  if (is_sharded(t)) refuse("a ShardTensor was given; give this rank's rows, to_local()");
  if (t.layout() != at::kStrided) refuse("a tensor of layout ", t.layout(), "; give a dense one");
  if (t.dim() == 0) refuse("a tensor without dims was given; rows are along dim 0");
  if (t.size(0) != rows)
    refuse("a tensor of ", t.size(0), " rows; the plan's partition has ", rows, ' ', which,
           " on this rank");
}

void check_op(const char* call, const at::Tensor& t, ReduceOp op) {
  if (op != ReduceOp::sum && op != ReduceOp::min && op != ReduceOp::max)
    throw InvalidArgument(call, " by ", name_of(op), "; it reduces by sum, min or max");
  if (op != ReduceOp::sum && t.is_complex())
    throw InvalidArgument(call, ": complex numbers have no ", name_of(op));
  if (!detail::reduces_ghosts_of(t.scalar_type()))
    throw InvalidArgument(call, " does not reduce ", t.scalar_type(),
                          "; convert it to a type of numbers");
}

// Ranks of which one has wrong rows would wait for it: they learn of it.
template <class Check>
void check_on_all(const GhostState& s, const char* call, const at::Tensor& t, const Check& check,
                  const std::string& how) {
  const Group group = s.group();
  if (group.size() > 1 && group.check_level() == CheckLevel::collective) {
    agree::all_same(group, call, [&] {
      check();
      const bool differentiated = at::GradMode::is_enabled() && t.requires_grad();
      return concat("plan ", s.number, ", ", t.scalar_type(), " on ", t.device().type(), ", rows ",
                    t.sizes().slice(1), how, differentiated ? ", with a gradient" : "");
    });
    return;
  }
  try {
    check();
  } catch (const std::exception& e) {
    if (group.size() > 1) s.mesh.manager().fail_groups_within(s.mesh.mesh(), e.what());
    throw;
  }
}

std::vector<std::int64_t> shape_of_rows(std::int64_t rows, at::IntArrayRef row) {
  std::vector<std::int64_t> shape{rows};
  shape.insert(shape.end(), row.begin(), row.end());
  return shape;
}

// The flat buffer as rows.
at::Tensor as_rows(const at::Tensor& flat, std::size_t rows, at::IntArrayRef row) {
  return flat.view(shape_of_rows(static_cast<std::int64_t>(rows), row));
}

// Of each of the rows that flat memory holds.
std::size_t bytes_of_row(const at::Tensor& flat, const std::vector<std::int64_t>& rows) {
  return rows.empty() ? 0 : flat.nbytes() / rows.size();
}

// True where rows are bytes one behind the other. They are copied as such: of few rows a call of
// libtorch takes longer than the message.
bool is_bytes(const at::Tensor& t) {
  return t.is_cpu() && t.is_contiguous() && !t.is_conj() && !t.is_neg() && !t._is_zerotensor();
}

enum class Pack : bool { from_rows, to_rows };

// Between rows of so many bytes and the same rows one behind the other.
template <Pack pack>
void copy_rows(void* to, const void* from, std::size_t bytes,
               const std::vector<std::int64_t>& rows) {
  const auto copy_each = [=, &rows](auto size) {
    std::size_t k = 0;
    for (const std::int64_t row : rows) {
      const std::size_t packed = k++ * bytes, own = static_cast<std::size_t>(row) * bytes;
      std::memcpy(static_cast<char*>(to) + (pack == Pack::from_rows ? packed : own),
                  static_cast<const char*>(from) + (pack == Pack::from_rows ? own : packed), size);
    }
  };
  if (bytes == sizeof(double))
    copy_each(std::integral_constant<std::size_t, sizeof(double)>());  // without a call
  else if (bytes > 0)
    copy_each(bytes);
}

// Rows of `from`, counted from its row `first`, one behind the other.
void pack(const at::Tensor& flat, const at::Tensor& from, std::int64_t first,
          const std::vector<std::int64_t>& rows) {
  if (is_bytes(from)) {
    const std::size_t bytes = bytes_of_row(flat, rows), skipped = static_cast<std::size_t>(first);
    copy_rows<Pack::from_rows>(flat.mutable_data_ptr(),
                               static_cast<const char*>(from.const_data_ptr()) + skipped * bytes,
                               bytes, rows);
  } else {
    at::Tensor to = as_rows(flat, rows.size(), from.sizes().slice(1));
    at::index_select_out(to, from.narrow(0, first, from.size(0) - first), 0,
                         tensor_over(rows).to(from.device()));
  }
}

// Large memory is copied by libtorch's threads.
constexpr std::size_t kMostBytes = 1 << 20;

// The first rows of one tensor to the first of another.
void copy_first(const at::Tensor& to, const at::Tensor& from, std::int64_t rows) {
  if (rows == 0) return;
  const std::size_t bytes =
      from.nbytes() / static_cast<std::size_t>(from.size(0)) * static_cast<std::size_t>(rows);
  if (is_bytes(from) && from.scalar_type() == to.scalar_type() && bytes <= kMostBytes) {
    if (bytes > 0) std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), bytes);
  } else {
    to.narrow(0, 0, rows).copy_(from.narrow(0, 0, rows));
  }
}

// One direction of an exchange, in progress. What it gives is computed in finish(), once.
struct GhostRun {
  explicit GhostRun(std::shared_ptr<GhostState> s)
      : state(std::move(s)), transfer{state->peers, {}, {}} {}
  bool done() const { return transfer.request.done(); }
  const std::shared_ptr<GhostState> state;
  PeerTransfer transfer;
  at::Tensor result;
};

struct ToGhosts : GhostRun {
  ToGhosts(std::shared_ptr<GhostState> given, const at::Tensor& owned)
      : GhostRun(std::move(given)) {
    const LocalCallGuard guard;
    const GhostRows& rows = state->rows;
    const auto row = owned.sizes().slice(1);
    if (state->travels() && !state->by_user) {
      auto& buffers = *(transfer.buffers = state->peers->take(owned, row));
      pack(buffers.sent, owned, 0, rows.sent);
      transfer.request = state->group().started().exchange(buffers.messages, {.name = kExchange});
    }
    result = at::empty(shape_of_rows(rows.owned + rows.ghosts, row),
                       owned.options().requires_grad(false).memory_format(std::nullopt));
    copy_first(result, owned, rows.owned);
    if (state->by_user) detail::run_by_user(*state, true, result);
  }
  at::Tensor finish() {
    transfer.request.wait();
    const LocalCallGuard guard;
    const GhostRows& rows = state->rows;
    if (rows.ghosts > 0 && !state->by_user && result.is_cpu()) {
      const at::Tensor& arrived = transfer.buffers->received;
      const std::size_t bytes = bytes_of_row(arrived, rows.received);
      auto* const ghosts = static_cast<char*>(result.mutable_data_ptr()) +
                           static_cast<std::size_t>(rows.owned) * bytes;
      copy_rows<Pack::to_rows>(ghosts, arrived.const_data_ptr(), bytes, rows.received);
    } else if (rows.ghosts > 0 && !state->by_user) {
      at::Tensor ghosts = result.narrow(0, rows.owned, rows.ghosts);
      const at::Tensor arrived =
          as_rows(transfer.buffers->received, rows.received.size(), result.sizes().slice(1));
      if (state->in_order) {
        ghosts.copy_(arrived);
      } else {
        ghosts.index_copy_(0, tensor_over(rows.received).to(result.device()), arrived);
      }
    }
    return std::move(result);
  }
};

template <class T, class Reduce>
void reduce_rows(at::Tensor& into, const at::Tensor& from, const std::vector<std::int64_t>& rows,
                 const Reduce& reduce) {
  const std::int64_t width = from.numel() / static_cast<std::int64_t>(rows.size());
  T* const to = into.mutable_data_ptr<T>();
  const T* values = from.const_data_ptr<T>();
  for (const std::int64_t row : rows) {
    T* const a = to + row * width;
    for (std::int64_t j = 0; j < width; ++j) a[j] = reduce(a[j], values[j]);
    values += width;
  }
}

// Row by row in the order of `rows`, so that sums do not depend on threads.
void reduce_in_order(at::Tensor& into, const at::Tensor& from,
                     const std::vector<std::int64_t>& rows, ReduceOp op) {
  if (rows.empty() || from.numel() == 0) return;
  if (!into.is_cpu()) {
    const at::Tensor index = tensor_over(rows).to(into.device());
    if (op == ReduceOp::sum) {
      into.index_add_(0, index, from);
    } else {
      into.index_reduce_(0, index, from, op == ReduceOp::max ? "amax" : "amin", true);
    }
    return;
  }
  if (op == ReduceOp::sum) {
    AT_DISPATCH_ALL_TYPES_AND_COMPLEX(into.scalar_type(), kReduce, [&] {
      reduce_rows<scalar_t>(into, from, rows,
                            [](scalar_t a, scalar_t b) { return static_cast<scalar_t>(a + b); });
    });
    return;
  }
  AT_DISPATCH_ALL_TYPES(into.scalar_type(), kReduce, [&] {
    // NaN propagates.
    if (op == ReduceOp::max) {
      reduce_rows<scalar_t>(into, from, rows,
                            [](scalar_t a, scalar_t b) { return at::_isnan(a) || a >= b ? a : b; });
    } else {
      reduce_rows<scalar_t>(into, from, rows,
                            [](scalar_t a, scalar_t b) { return at::_isnan(a) || a <= b ? a : b; });
    }
  });
}

struct ToOwners : GhostRun {
  ToOwners(std::shared_ptr<GhostState> given, const at::Tensor& all, ReduceOp how)
      : GhostRun(std::move(given)),
        op(how),
        type(all.scalar_type()),
        by_user(state->by_user && how == ReduceOp::sum) {
    const LocalCallGuard guard;
    const GhostRows& rows = state->rows;
    const auto row = all.sizes().slice(1);
    if (by_user) {
      const at::Tensor both = all.clone(at::MemoryFormat::Contiguous);
      detail::run_by_user(*state, false, both);
      result = both.narrow(0, 0, rows.owned).clone();
      return;
    }
    if (state->travels()) {
      auto& buffers = *(transfer.buffers = state->peers->take(all, row));
      pack(buffers.received, all, rows.owned, rows.received);
      transfer.request = state->group().started().exchange(buffers.back, {.name = kReduce});
    }
    const auto computed = type == at::kHalf || type == at::kBFloat16 ? at::kFloat : type;
    result =
        at::empty(shape_of_rows(rows.owned, row),
                  all.options().dtype(computed).requires_grad(false).memory_format(std::nullopt));
    copy_first(result, all, rows.owned);
  }
  at::Tensor finish() {
    transfer.request.wait();
    const LocalCallGuard guard;
    if (const auto& sent = state->rows.sent; !sent.empty() && !by_user) {
      const at::Tensor& arrived = transfer.buffers->sent;
      reduce_in_order(
          result,
          type == result.scalar_type() && result.is_cpu()
              ? arrived
              : as_rows(arrived, sent.size(), result.sizes().slice(1)).to(result.scalar_type()),
          sent, op);
    }
    return std::exchange(result, {}).to(type);
  }
  const ReduceOp op;
  const at::ScalarType type;
  const bool by_user;
};

// Rows to ghosts, and sums to owners: each is the other's derivative.
template <class Run, bool to_ghosts>
struct GhostMap : torch::autograd::Function<GhostMap<Run, to_ghosts>> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& /*rows*/, const GhostPlan& plan,
                            const std::shared_ptr<Run>& run) {
    detail::carry(ctx, plan, "plan");
    return run->finish();
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    const auto plan = detail::carried<GhostPlan>(ctx, "plan");
    return {to_ghosts ? ghost_reduce(plan, g[0]) : ghost_exchange(plan, g[0]), at::Tensor(),
            at::Tensor()};
  }
};
using GhostExchange = GhostMap<ToGhosts, true>;
using GhostSum = GhostMap<ToOwners, false>;

// The gradient of an owned row's extreme value is shared by the rows that have it.
struct GhostExtreme : torch::autograd::Function<GhostExtreme> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& rows, const GhostPlan& plan,
                            const std::shared_ptr<ToOwners>& run) {
    detail::carry(ctx, plan, "plan");
    const at::Tensor extreme = run->finish();
    ctx->save_for_backward({rows, extreme});
    return extreme;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    const GhostPlan plan = detail::carried<GhostPlan>(ctx, "plan");
    const auto saved = ctx->get_saved_variables();
    const at::Tensor extreme = ghost_exchange(plan, saved[1].detach());
    const at::Tensor is_extreme = saved[0].detach().eq(extreme);
    // A NaN equals nothing: nobody has a share of it.
    const at::Tensor count = ghost_reduce(plan, is_extreme.to(g[0].scalar_type())).clamp_min(1);
    const at::Tensor share = ghost_exchange(plan, g[0] / count);
    return {at::where(is_extreme, share, at::zeros_like(share)), at::Tensor(), at::Tensor()};
  }
};

// The function is applied when the values are there, so that its node holds the result.
template <class Function, class Run>
class StartedGhosts final : public detail::Unfinished<at::Tensor> {
 public:
  StartedGhosts(GhostPlan plan, at::Tensor given, std::shared_ptr<Run> run)
      : plan_(std::move(plan)), given_(std::move(given)), run_(std::move(run)) {}
  bool done() override { return run_->done(); }
  at::Tensor finish() override {
    // A node costs as much as a message of few rows. A tangent is refused where one is made.
    const bool differentiated =
        (at::GradMode::is_enabled() && given_.requires_grad()) || given_._fw_grad(0).defined();
    return differentiated ? Function::apply(given_, plan_, run_) : run_->finish();
  }

 private:
  const GhostPlan plan_;
  const at::Tensor given_;
  const std::shared_ptr<Run> run_;
};

template <class Function, class Run>
Pending<at::Tensor> started_ghosts(const GhostPlan& plan, const at::Tensor& given,
                                   std::shared_ptr<Run> run) {
  return Pending<at::Tensor>(
      std::make_shared<StartedGhosts<Function, Run>>(plan, given, std::move(run)));
}

}  // namespace

namespace detail {

at::Tensor rows_and_ghosts(const std::shared_ptr<GhostState>& state, const at::Tensor& owned) {
  return ToGhosts(state, owned).finish();
}
at::Tensor reduced_to_owners(const std::shared_ptr<GhostState>& state, const at::Tensor& rows,
                             ReduceOp op) {
  return ToOwners(state, rows, op).finish();
}
bool reduces_ghosts_of(at::ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16 || type == at::kFloat || type == at::kDouble ||
         type == at::kComplexFloat || type == at::kComplexDouble ||
         (at::isIntegralType(type, false) && !at::isBarebonesUnsignedType(type));
}

}  // namespace detail

Pending<at::Tensor> start_ghost_exchange(const GhostPlan& plan, const at::Tensor& owned) {
  const GhostRows& rows = plan.rows();
  const auto& state = plan.state();
  const auto check = [&] {
    check_rows(*state, kExchange, owned, rows.owned, "owned");
    if (state->by_user) detail::check_carried(*state->by_user, owned.scalar_type());
  };
  check_on_all(*state, kExchange, owned, check, "");
  return started_ghosts<GhostExchange>(plan, owned, std::make_shared<ToGhosts>(state, owned));
}

at::Tensor ghost_exchange(const GhostPlan& plan, const at::Tensor& owned) {
  return start_ghost_exchange(plan, owned).wait();
}

Pending<at::Tensor> start_ghost_reduce(const GhostPlan& plan, const at::Tensor& rows, ReduceOp op) {
  const GhostRows& of = plan.rows();
  const auto& state = plan.state();
  const auto check = [&] {
    check_rows(*state, kReduce, rows, of.owned + of.ghosts, "owned and ghosts");
    check_op(kReduce, rows, op);
    if (state->by_user && op == ReduceOp::sum)
      detail::check_carried(*state->by_user, rows.scalar_type());
  };
  check_on_all(*state, kReduce, rows, check, concat(", by ", name_of(op)));
  auto run = std::make_shared<ToOwners>(state, rows, op);
  return op == ReduceOp::sum ? started_ghosts<GhostSum>(plan, rows, std::move(run))
                             : started_ghosts<GhostExtreme>(plan, rows, std::move(run));
}

at::Tensor ghost_reduce(const GhostPlan& plan, const at::Tensor& rows, ReduceOp op) {
  return start_ghost_reduce(plan, rows, op).wait();
}

}  // namespace tessera

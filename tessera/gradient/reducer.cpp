#include "tessera/gradient/reducer.h"

#include <algorithm>
#include <exception>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/gradient/detail/reducer_state.h"
#include "tessera/gradient/internal/coalesced.h"
#include "tessera/gradient/internal/hooks.h"

namespace tessera {

std::optional<double> scale_of(ReduceOp op, int ranks) {
  if (op.kind == ReduceOp::Kind::sum) return 1.0;
  if (op.kind == ReduceOp::Kind::avg) return 1.0 / ranks;
  return std::nullopt;
}

GradientAccess::~GradientAccess() = default;

at::Tensor GradientAccess::like(const at::Tensor& parameter) const { return parameter.detach(); }

std::string GradientAccess::describe(const at::Tensor& parameter) const {
  return concat("shape ", parameter.sizes(), ", ", parameter.scalar_type());
}

UnreducedGradient GradientAccess::unreduced(const at::Tensor& parameter, const Group& group) const {
  return {parameter.grad(), group};
}

void GradientAccess::packed(const at::Tensor&) const {}

void GradientAccess::start_from_nothing(const at::Tensor& parameter) const {
  parameter.mutable_grad().reset();
}

void GradientAccess::store(const at::Tensor& parameter, const at::Tensor& reduced,
                           bool keep) const {
  at::Tensor& grad = parameter.mutable_grad();
  if (keep)
    grad = reduced;
  else if (grad.defined())
    grad.detach().copy_(reduced);
  else
    grad = reduced.clone();
}

namespace {

// A factor goes into the copy into the bucket, which saves a pass over it; half precision is scaled
// in float32, on the wire.
double take_factor(ReduceOp& op, int ranks, c10::ScalarType dtype) {
  const auto real = c10::isComplexType(dtype) ? c10::toRealValueType(dtype) : dtype;
  if (real != c10::ScalarType::Float && real != c10::ScalarType::Double) return 1.0;
  if (op.kind != ReduceOp::Kind::avg) return 1.0;
  op = ReduceOp::sum;
  return 1.0 / ranks;
}

void require_sound(const std::vector<ReducedParameter>& parameters, const ReducerOptions& options,
                   std::size_t groups) {
  if (options.first_bucket_bytes < 1 || options.bucket_bytes < 1)
    throw InvalidArgument("bucket limits of ", options.first_bucket_bytes, " and ",
                          options.bucket_bytes, " bytes; give at least 1");
  std::set<const c10::TensorImpl*> seen;
  for (const ReducedParameter& p : parameters) {
    if (!p.parameter.defined() || !p.parameter.is_leaf() || !p.parameter.requires_grad())
      throw InvalidArgument("parameter '", p.name,
                            "' is no leaf that requires grad; only such have a gradient to reduce");
    if (!seen.insert(p.parameter.unsafeGetTensorImpl()).second)
      throw InvalidArgument("parameter '", p.name,
                            "' was given twice; list a shared parameter once");
  }
  if (options.learn_order && groups > 1)
    throw InvalidArgument("ReducerOptions::learn_order: the parameters are reduced over ", groups,
                          " groups; give one GradientReducer to each");
}

// What decides the calls of a reducer, and their order.
std::string describe(const ReducerOptions& options) {
  return concat("first_bucket_bytes ", options.first_bucket_bytes, ", bucket_bytes ",
                options.bucket_bytes, ", overlap ", options.overlap, ", gradient_as_bucket_view ",
                options.gradient_as_bucket_view, ", learn_order ", options.learn_order, "\n");
}

// All groups hear of what one of them disagrees about, or of what this rank refuses (`told`), so
// that no rank of them goes on.
void compare_parameters(const std::vector<Group>& order,
                        const std::map<const detail::GroupState*, std::string>& agreed,
                        std::string told) {
  std::exception_ptr differs;
  for (const Group& group : order) {
    try {
      agree::same(group, "the parameters whose gradients are reduced",
                  told.empty() ? agreed.at(group.state().get()) : told);
    } catch (const MismatchError& e) {
      if (!differs) {
        differs = std::current_exception();
        told = e.what();
      }
    }
  }
  if (differs) std::rethrow_exception(differs);
}

}  // namespace

void GradientReducer::State::make_buckets(const std::vector<ReducedParameter>& given,
                                          const std::vector<BucketItem>& items) {
  layout = assign_buckets(items, options.first_bucket_bytes, options.bucket_bytes);
  for (std::size_t b = 0; b < layout.size(); ++b) {
    Bucket bucket;
    const ReducedParameter& first = given[layout[b].front()];
    bucket.group = first.group;
    bucket.op = first.op;
    bucket.uniform = access(layout[b].front()).uniform();
    // A gradient that lies in the bucket is not copied: there is nothing to fold into, and it keeps
    // its value until the reduction has succeeded.
    if (bucket.op.kind == ReduceOp::Kind::premultiplied && !bucket.uniform)
      bucket.op = ReduceOp::sum;  // weighted before they are accumulated
    if (!bucket.uniform && !options.gradient_as_bucket_view)  // as all ranks were told
      bucket.factor = take_factor(bucket.op, bucket.group.size(),
                                  access(layout[b].front()).like(first.parameter).scalar_type());
    for (std::size_t i : layout[b]) {
      at::Tensor like = access(i).like(given[i].parameter);
      bucket.slots.push_back({i, bucket.numel, bucket.uniform ? at::Tensor() : like, {}});
      bucket.bytes += items[i].bytes;
      bucket.numel += like.numel();
      parameters[i].bucket = b;
    }
    buckets.push_back(std::move(bucket));
  }
}

void GradientReducer::State::add_hooks(const std::vector<ReducedParameter>& given) {
  const std::weak_ptr<State> weak = weak_from_this();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = given[i].parameter;
    if (parameters[i].sums()) {
      detail::add_hook_before(parameter, [weak, i](const at::TensorBase& gradient) {
        const auto reducer = gradient.defined() ? weak.lock() : nullptr;
        return reducer ? at::TensorBase(reducer->accumulating(i, at::Tensor(gradient))) : gradient;
      });
    }
    const auto accumulated = [weak, i](const at::Tensor&) {
      if (auto reducer = weak.lock()) reducer->accumulated(i);
    };
    detail::add_hook_after(parameter, accumulated, weak);
  }
}

GradientReducer::GradientReducer(std::vector<ReducedParameter> parameters, ReducerOptions options)
    : state_(std::make_shared<State>()) {
  State& state = *state_;
  state.options = options;

  // In order of first use, which is the same on all ranks if they agree at all.
  std::vector<Group> order;
  for (const ReducedParameter& p : parameters)
    if (std::ranges::find(order, p.group) == order.end()) order.push_back(p.group);

  std::vector<BucketItem> items;
  std::map<const detail::GroupState*, std::string> agreed;
  // What one rank refuses is refused on all.
  std::exception_ptr refused;
  std::string told;
  try {
    require_sound(parameters, options, order.size());
    std::map<std::tuple<const void*, int, double, int, int, int, bool, std::size_t>, std::uint64_t>
        keys;
    for (const ReducedParameter& p : parameters) {
      const std::string earlier = state.find_earlier(p, refused);
      state.index[p.parameter.unsafeGetTensorImpl()] = state.parameters.size();
      state.parameters.push_back(
          {c10::weak_intrusive_ptr<c10::TensorImpl>(p.parameter.getIntrusivePtr()), p.name, p.group,
           p.op, p.access});
      const GradientAccess& access = state.access(state.parameters.size() - 1);
      const at::Tensor like = access.like(p.parameter);
      const auto key = keys.try_emplace(
          {p.group.state().get(), static_cast<int>(p.op.kind), p.op.factor,
           static_cast<int>(like.scalar_type()), static_cast<int>(like.device().type()),
           like.device().index(), access.uniform(), p.unit},
          keys.size());
      items.push_back({static_cast<std::int64_t>(p.parameter.numel() * p.parameter.element_size()),
                       key.first->second});
      agreed[p.group.state().get()] +=
          concat("parameter '", p.name, "', ", access.describe(p.parameter), ", ",
                 to_string(p.op.kind), earlier, "\n");
    }
    for (auto& [group, text] : agreed)
      text += concat(describe(options), refused ? "refused for a parameter of this rank\n" : "");
  } catch (const std::exception& e) {
    refused = std::current_exception();
    told = concat("refused: ", e.what());
  }
  compare_parameters(order, agreed, told);
  if (refused) std::rethrow_exception(refused);

  state.make_buckets(parameters, items);
  // What another one reduces first is complete only when backward ends.
  if (!state.earlier.empty()) {
    state.options.overlap = false;
    state.options.gradient_as_bucket_view = false;
  }
  for (std::size_t b = 0; b < state.buckets.size(); ++b) state.order.push_back(b);
  state.reset();
  for (const Group& group : order) state.share_memory(group);
  state.add_hooks(parameters);
}

void GradientReducer::reduce() { state_->reduce(); }

bool GradientReducer::syncing() const { return state_->syncing(); }

const std::vector<std::vector<std::size_t>>& GradientReducer::buckets() const {
  return state_->layout;
}

}  // namespace tessera

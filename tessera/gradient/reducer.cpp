#include "tessera/gradient/reducer.h"

#include <ATen/ATen.h>
#include <c10/util/strides.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <tuple>

#include "tessera/base/text.h"
#include "tessera/comm/group/agreement.h"
#include "tessera/gradient/bucket.h"
#include "tessera/gradient/detail/flight.h"

namespace tessera {

GradientAccess::~GradientAccess() = default;

at::Tensor GradientAccess::like(const at::Tensor& parameter) const { return parameter.detach(); }

std::string GradientAccess::describe(const at::Tensor& parameter) const {
  return concat("shape ", parameter.sizes(), ", ", parameter.scalar_type());
}

OwedGradient GradientAccess::owed(const at::Tensor& parameter, const Group& group) const {
  return {parameter.grad(), group};
}

void GradientAccess::taken(const at::Tensor&) const {}

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

// One place of a parameter in its bucket's flat tensor.
struct Slot {
  std::size_t parameter;
  std::int64_t offset;
  at::Tensor like;
  at::Tensor part;  // its place, once there is a flat tensor
};

// A factor goes into the copy into the bucket, which saves a pass over it; half precision is scaled
// in float32, on the wire.
double take_factor(ReduceOp& op, int ranks, c10::ScalarType dtype) {
  const auto real = c10::isComplexType(dtype) ? c10::toRealValueType(dtype) : dtype;
  if (real != c10::ScalarType::Float && real != c10::ScalarType::Double) return 1.0;
  if (op.kind != ReduceOp::Kind::avg && op.kind != ReduceOp::Kind::premultiplied) return 1.0;
  const double factor = op.kind == ReduceOp::Kind::avg ? 1.0 / ranks : op.factor;
  op = ReduceOp::sum;
  return factor;
}

struct Bucket {
  Group group;
  ReduceOp op;
  double factor = 1.0;  // of what is copied into the flat tensor
  // of parameters whose access says so: what is owed decides over which groups it travels
  bool alike = false;
  std::vector<Slot> slots;
  std::vector<detail::Flight> flights;
  std::int64_t numel = 0;   // without the flags
  at::Tensor flat;          // numel values, then one flag a slot: did this rank use it
  std::size_t missing = 0;  // slots whose gradient has not been accumulated in this backward
  bool started = false;
  Request request;
};

struct Entry {
  c10::weak_intrusive_ptr<c10::TensorImpl> parameter;
  std::string name;
  Group group;
  std::shared_ptr<const GradientAccess> access;

  at::Tensor tensor() const {  // undefined once the parameter is gone
    auto impl = parameter.lock();
    return impl ? at::Tensor(std::move(impl)) : at::Tensor();
  }
};

}  // namespace

struct GradientReducer::State : std::enable_shared_from_this<State> {
  std::vector<Entry> parameters;
  ReducerOptions options;
  std::vector<std::vector<std::size_t>> layout;
  std::vector<Bucket> buckets;
  std::vector<std::size_t> bucket_of;
  std::vector<bool> owed;   // accumulated since the last reduction
  std::vector<bool> fired;  // accumulated in this backward
  int no_sync_depth = 0;
  bool late = false;  // something alike was accumulated after its bucket had started
  bool open = false;  // between the first hook of a backward and its end
  // Of the backward that is open: who tells when it ends.
  const void* backward = nullptr;
  std::size_t next = 0;  // the bucket that starts next
  std::mutex mutex;      // engine threads of several devices fire hooks at the same time

  const GradientAccess& access(std::size_t i) const {
    static const GradientAccess plain;
    return parameters[i].access ? *parameters[i].access : plain;
  }

  void accumulated(std::size_t i);
  void begin();
  void abandon();
  void start(Bucket& bucket);
  void start_alike(Bucket& bucket);
  void land(Bucket& bucket);
  void finish();
  void write_back(Bucket& bucket);
  void reset();
};

namespace {

// Fires after a leaf's gradient is accumulated; hooks that the user had set before stay in force,
// before ours.
struct AccumulatedHook : torch::autograd::PostAccumulateGradHook {
  AccumulatedHook(std::function<void()> call, std::unique_ptr<PostAccumulateGradHook> before)
      : call(std::move(call)), before(std::move(before)) {}
  void operator()(const torch::autograd::Variable& tensor) override {
    if (before) (*before)(tensor);
    call();
  }
  std::function<void()> call;
  std::unique_ptr<PostAccumulateGradHook> before;
};

}  // namespace

void GradientReducer::State::accumulated(std::size_t i) {
  const std::lock_guard lock(mutex);
  owed[i] = true;
  if (no_sync_depth > 0) return;
  if (!open) begin();
  Bucket& bucket = buckets[bucket_of[i]];
  if (fired[i]) {
    if (bucket.started && bucket.alike) {
      late = true;
      return;
    }
    if (bucket.started)
      throw InvalidArgument(concat("the gradient of parameter '", parameters[i].name,
                                   "' was accumulated a second time in one backward, after its "
                                   "reduction had started (a nested backward, such as reentrant "
                                   "checkpointing). Give ReducerOptions::overlap = false, which "
                                   "reduces at the end of backward."));
    return;
  }
  fired[i] = true;
  --bucket.missing;
  if (!options.overlap) return;
  while (next < buckets.size() && buckets[next].missing == 0) start(buckets[next++]);
}

void GradientReducer::State::begin() {
  open = true;
  // At the end of this backward. A nested one ends first and reduces what it has; the rest follows
  // when the outer one ends. A backward that an exception ends calls nobody back: it destroys what
  // was queued, which is how we learn of it.
  struct End {
    explicit End(std::weak_ptr<State> s) : state(std::move(s)) {}
    ~End() {
      if (auto s = called ? nullptr : state.lock()) {
        const std::lock_guard lock(s->mutex);
        if (s->backward == this) s->abandon();
      }
    }
    void operator()() {
      called = true;
      if (auto s = state.lock()) {
        const std::lock_guard lock(s->mutex);
        if (s->open) s->finish();
      }
    }
    std::weak_ptr<State> state;
    bool called = false;
  };
  auto end = std::make_shared<End>(weak_from_this());
  backward = end.get();
  torch::autograd::Engine::get_default_engine().queue_callback([end] { (*end)(); });
}

// What has been started is finished, as on the other ranks, so that the groups are in step and no
// gradient is lost that had been given away. What has not been is left as backward left it.
void GradientReducer::State::abandon() {
  if (!open) return;
  try {
    for (Bucket& bucket : buckets) {
      if (!bucket.started) continue;
      bucket.request.wait();
      write_back(bucket);
    }
  } catch (const std::exception& e) {  // another one is on its way already
    TORCH_WARN("gradients of a backward that failed could not be reduced: ", e.what());
  }
  reset();
}

// One message a set of ranks: what the bucket's gradients are owed over is known only now.
void GradientReducer::State::start_alike(Bucket& bucket) {
  const at::NoGradGuard no_grad;
  bucket.started = true;
  for (const Slot& slot : bucket.slots) {
    const at::Tensor parameter = parameters[slot.parameter].tensor();
    if (!parameter.defined()) continue;
    OwedGradient owed = access(slot.parameter).owed(parameter, parameters[slot.parameter].group);
    if (!owed.value.defined()) continue;
    auto flight = std::find_if(bucket.flights.begin(), bucket.flights.end(),
                               [&](const detail::Flight& f) { return f.takes(owed); });
    if (flight == bucket.flights.end())
      flight = bucket.flights.emplace(bucket.flights.end(), owed, bucket.op);
    flight->add(slot.parameter, std::move(owed));
  }
  // What is scattered comes whole: few such buckets are under way at a time, so that backward does
  // not hold all gradients whole.
  constexpr int kWholeUnderWay = 2;
  const auto scatters = [](const Bucket& b) {
    return std::any_of(b.flights.begin(), b.flights.end(),
                       [](const detail::Flight& f) { return f.scatters(); });
  };
  if (scatters(bucket)) {
    int whole = 0;
    for (std::size_t b = next; b-- > 0;) {
      if (&buckets[b] != &bucket && scatters(buckets[b]) && ++whole >= kWholeUnderWay)
        land(buckets[b]);
    }
  }
  for (detail::Flight& flight : bucket.flights) {
    flight.pack();
    for (const auto& item : flight.items()) {
      if (const at::Tensor parameter = parameters[item.parameter].tensor(); parameter.defined())
        access(item.parameter).taken(parameter);
    }
    flight.start();
  }
}

void GradientReducer::State::land(Bucket& bucket) {
  const at::NoGradGuard no_grad;
  for (detail::Flight& flight : bucket.flights) flight.next();
  for (detail::Flight& flight : bucket.flights) {
    flight.wait();
    for (const auto& item : flight.items()) {
      const at::Tensor parameter = parameters[item.parameter].tensor();
      if (parameter.defined()) access(item.parameter).store(parameter, item.part, true);
      owed[item.parameter] = false;
    }
  }
  bucket.flights.clear();
}

void GradientReducer::State::start(Bucket& bucket) {
  if (bucket.alike) return start_alike(bucket);
  const at::NoGradGuard no_grad;
  const auto slots = static_cast<std::int64_t>(bucket.slots.size());
  if (!bucket.flat.defined()) {
    bucket.flat = at::empty({bucket.numel + slots}, bucket.slots.front().like.options());
    // Not views to autograd: a gradient that is one could not be detached in place, which
    // Optimizer::zero_grad does.
    for (Slot& slot : bucket.slots)
      slot.part = at::empty({0}, bucket.flat.options())
                      .set_(bucket.flat.storage(), slot.offset, slot.like.sizes(),
                            c10::contiguous_strides(slot.like.sizes()));
  }
  std::vector<float> used(bucket.slots.size());
  for (std::size_t s = 0; s < bucket.slots.size(); ++s) {
    const Slot& slot = bucket.slots[s];
    at::Tensor part = slot.part;
    const at::Tensor parameter = parameters[slot.parameter].tensor();
    const at::Tensor mine = parameter.defined()
                                ? access(slot.parameter).owed(parameter, bucket.group).value
                                : at::Tensor();
    if (mine.defined() && mine.layout() != at::kStrided)
      throw InvalidArgument(
          concat("the gradient of parameter '", parameters[slot.parameter].name, "' has layout ",
                 mine.layout(),
                 "; only dense gradients are reduced (make the embedding with sparse = false)"));
    if (!mine.defined())
      part.zero_();
    else if (bucket.factor != 1.0)
      at::mul_out(part, mine, at::scalar_tensor(bucket.factor, mine.options().device(at::kCPU)));
    else if (mine.data_ptr() != part.data_ptr() || !mine.is_contiguous())
      part.copy_(mine);
    // Nothing is owed of a gradient that has been let go since.
    if (!mine.defined()) owed[slot.parameter] = false;
    used[s] = owed[slot.parameter] ? 1.0f : 0.0f;
  }
  bucket.flat.narrow(0, bucket.numel, slots).copy_(at::tensor(used));
  bucket.started = true;
  bucket.request = bucket.group.start().all_reduce(bucket.flat, bucket.op, {.name = "gradients"});
}

void GradientReducer::State::write_back(Bucket& bucket) {
  if (bucket.alike) return land(bucket);
  const at::NoGradGuard no_grad;
  // The flags are read only where they matter: reading them makes the host wait for the device.
  const bool all_used_here = std::all_of(bucket.slots.begin(), bucket.slots.end(),
                                         [&](const Slot& s) { return owed[s.parameter]; });
  at::Tensor flags;
  if (!all_used_here)
    flags = at::real(
                bucket.flat.narrow(0, bucket.numel, static_cast<std::int64_t>(bucket.slots.size())))
                .to(at::kCPU, at::kDouble)
                .contiguous();
  for (std::size_t s = 0; s < bucket.slots.size(); ++s) {
    const Slot& slot = bucket.slots[s];
    if (flags.defined() && flags.const_data_ptr<double>()[s] == 0.0) continue;
    const at::Tensor parameter = parameters[slot.parameter].tensor();
    if (parameter.defined())
      access(slot.parameter).store(parameter, slot.part, options.gradient_as_bucket_view);
    owed[slot.parameter] = false;
  }
}

void GradientReducer::State::finish() {
  try {
    while (next < buckets.size()) start(buckets[next++]);
    for (Bucket& bucket : buckets) {
      bucket.request.wait();
      write_back(bucket);
    }
    if (late) {
      late = false;
      for (Bucket& bucket : buckets) {
        if (!bucket.alike) continue;
        start(bucket);
        land(bucket);
      }
    }
  } catch (...) {
    reset();
    throw;
  }
  reset();
}

void GradientReducer::State::reset() {
  for (Bucket& bucket : buckets) {
    bucket.missing = bucket.slots.size();
    bucket.started = false;
    bucket.request = Request();
    bucket.flights.clear();
  }
  std::fill(fired.begin(), fired.end(), false);
  next = 0;
  late = false;
  open = false;
  backward = nullptr;
}

GradientReducer::GradientReducer(std::vector<ReducedParameter> parameters, ReducerOptions options)
    : state_(std::make_shared<State>()) {
  State& state = *state_;
  state.options = options;
  if (options.first_bucket_bytes < 1 || options.bucket_bytes < 1)
    throw InvalidArgument(concat("bucket limits of ", options.first_bucket_bytes, " and ",
                                 options.bucket_bytes, " bytes; give at least 1"));

  std::set<const c10::TensorImpl*> seen;
  std::vector<BucketItem> items;
  std::map<std::tuple<const void*, int, double, int, int, int, bool>, std::uint64_t> keys;
  std::map<const detail::GroupState*, std::pair<Group, std::string>> agreed;
  for (const ReducedParameter& p : parameters) {
    if (!p.parameter.defined() || !p.parameter.is_leaf() || !p.parameter.requires_grad())
      throw InvalidArgument(
          concat("parameter '", p.name,
                 "' is no leaf that requires grad; only such have a gradient to reduce"));
    if (!seen.insert(p.parameter.unsafeGetTensorImpl()).second)
      throw InvalidArgument(
          concat("parameter '", p.name, "' was given twice; list a shared parameter once"));
    state.parameters.push_back(
        {c10::weak_intrusive_ptr<c10::TensorImpl>(p.parameter.getIntrusivePtr()), p.name, p.group,
         p.access});
    const GradientAccess& access = state.access(state.parameters.size() - 1);
    const at::Tensor like = access.like(p.parameter);
    const auto key = keys.try_emplace(
        {p.group.state().get(), static_cast<int>(p.op.kind), p.op.factor,
         static_cast<int>(like.scalar_type()), static_cast<int>(like.device().type()),
         like.device().index(), access.alike()},
        keys.size());
    items.push_back({static_cast<std::int64_t>(p.parameter.numel() * p.parameter.element_size()),
                     key.first->second});
    auto& text = agreed.try_emplace(p.group.state().get(), p.group, "").first->second.second;
    text += concat("parameter '", p.name, "', ", access.describe(p.parameter), ", ",
                   to_string(p.op.kind), "\n");
  }
  // In order of first use, which is the same on all ranks if they agree at all.
  std::vector<const detail::GroupState*> order;
  for (const ReducedParameter& p : parameters)
    if (std::find(order.begin(), order.end(), p.group.state().get()) == order.end())
      order.push_back(p.group.state().get());
  for (const auto* group : order)
    require_agreement(agreed.at(group).first, "the parameters whose gradients are reduced",
                      agreed.at(group).second);

  state.layout = assign_buckets(items, options.first_bucket_bytes, options.bucket_bytes);
  state.bucket_of.resize(state.parameters.size());
  state.owed.assign(state.parameters.size(), false);
  state.fired.assign(state.parameters.size(), false);
  for (std::size_t b = 0; b < state.layout.size(); ++b) {
    Bucket bucket;
    const ReducedParameter& first = parameters[state.layout[b].front()];
    bucket.group = first.group;
    bucket.op = first.op;
    bucket.alike = state.access(state.layout[b].front()).alike();
    // A gradient that lies in the bucket is not copied: there is nothing to fold into, and it keeps
    // its value until the reduction has succeeded.
    if (!bucket.alike && !options.gradient_as_bucket_view)
      bucket.factor =
          take_factor(bucket.op, bucket.group.size(),
                      state.access(state.layout[b].front()).like(first.parameter).scalar_type());
    for (std::size_t i : state.layout[b]) {
      at::Tensor like = state.access(i).like(parameters[i].parameter);
      bucket.slots.push_back({i, bucket.numel, bucket.alike ? at::Tensor() : like, {}});
      bucket.numel += like.numel();
      state.bucket_of[i] = b;
    }
    state.buckets.push_back(std::move(bucket));
  }
  state.reset();

  for (std::size_t i = 0; i < state.parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i].parameter;
    auto call = [weak = std::weak_ptr<State>(state_), i] {
      if (auto reducer = weak.lock()) reducer->accumulated(i);
    };
    auto& before = torch::autograd::impl::post_acc_grad_hooks(parameter);
    torch::autograd::impl::set_post_acc_grad_hooks(
        parameter, std::make_unique<AccumulatedHook>(std::move(call), std::move(before)));
  }
}

GradientReducer::~GradientReducer() = default;

void GradientReducer::reduce() {
  const std::lock_guard lock(state_->mutex);
  state_->finish();
}

bool GradientReducer::syncing() const {
  const std::lock_guard lock(state_->mutex);
  return state_->no_sync_depth == 0;
}

const std::vector<std::vector<std::size_t>>& GradientReducer::buckets() const {
  return state_->layout;
}

GradientReducer::NoSync::NoSync(GradientReducer& reducer) {
  std::shared_ptr<State> state = reducer.state_;
  {
    const std::lock_guard lock(state->mutex);
    ++state->no_sync_depth;
  }
  scope_ = std::shared_ptr<void>(static_cast<void*>(nullptr), [state](void*) {
    const std::lock_guard lock(state->mutex);
    --state->no_sync_depth;
  });
}

GradientReducer::NoSync::~NoSync() = default;

}  // namespace tessera

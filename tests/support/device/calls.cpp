// Operators of the stand-in device that have no code of their own: what they return is foretold by
// a call on zeros, and the CPU's kernel runs later, in a task.

#include "calls.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <set>
#include <string>

namespace tessera::test::stand_in {
namespace {

using Stack = torch::jit::Stack;
using Change = std::function<at::Tensor(const at::Tensor&)>;

c10::IValue changed(const c10::IValue& v, const Change& change) {
  if (v.isTensor()) return v.toTensor().defined() ? change(v.toTensor()) : v;
  if (v.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : v.toTensorVector()) list.push_back(t.defined() ? change(t) : t);
    return list;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& t : v.toOptionalTensorVector())
      list.push_back(t && t->defined() ? std::optional(change(*t)) : t);
    return list;
  }
  return v.isDevice() ? c10::IValue(c10::Device(c10::kCPU)) : v;
}

void each(const c10::IValue& v, const std::function<void(const at::Tensor&)>& visit) {
  changed(v, [&](const at::Tensor& t) {
    visit(t);
    return t;
  });
}

// A tensor of the CPU of the same size and strides, in which every element is zero.
at::Tensor zeros_like(const at::Tensor& t) {
  if (!is_here(t)) return t;
  const auto elements = static_cast<std::int64_t>(
      at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.element_size()) /
      t.element_size());
  at::Tensor same =
      at::zeros({elements}, at::TensorOptions(t.scalar_type())).as_strided(t.sizes(), t.strides());
  if (t.unsafeGetTensorImpl()->is_wrapped_number())
    same.unsafeGetTensorImpl()->set_wrapped_number(true);
  return same;
}

// One call of an operator.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack) : op_(op), schema_(op.schema()), stack_(stack) {
    const auto n = static_cast<std::ptrdiff_t>(schema_.arguments().size());
    given_.assign(stack->end() - n, stack->end());
    stack->erase(stack->end() - n, stack->end());
    for (const c10::IValue& v : given_) {
      each(v, [&](const at::Tensor& t) {
        if (is_here(t) && device_ < 0) device_ = index_of(t);
      });
      if (v.isDevice() && device_ < 0) device_ = index_of(v.toDevice());
    }
    if (device_ < 0) device_ = current_device();
    for (std::size_t i = 0; i < given_.size(); ++i) given_[i] = checked(given_[i]);
  }

  void make() {
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    const at::AutoDispatchBelowADInplaceOrView below;
    const OnDevice guard(device_);
    if (waits()) return make_now(/*foreseen=*/true);
    Stack made;
    for (std::size_t i = 0; i < given_.size(); ++i)
      made.push_back(is_out(i) ? c10::IValue(apart(i)) : changed(given_[i], zeros_like));
    const std::vector<c10::IValue> dummies(made.begin(), made.end());
    try {
      op_.callBoxed(&made);
    } catch (const std::exception&) {
      return make_now(/*foreseen=*/false);
    }
    follow_sizes(dummies);
    make_late(made);
  }

 private:
  // A number may be on the CPU, and so may indices.
  c10::IValue checked(const c10::IValue& v) const {
    if (!v.isTensor() && !v.isTensorList() && !v.isOptionalTensorList()) return v;
    const bool indexes = schema_.name().find("index") != std::string::npos;
    return changed(v, [&](const at::Tensor& t) {
      if (is_here(t)) {
        TORCH_CHECK(index_of(t) == device_, schema_.name(),
                    ": expected all tensors to be on one device, and found ", device(device_),
                    " and ", t.device());
        return t;
      }
      if (t.dim() == 0) {
        const at::Tensor own = t.clone();
        if (t.unsafeGetTensorImpl()->is_wrapped_number())
          own.unsafeGetTensorImpl()->set_wrapped_number(true);
        return own;
      }
      TORCH_CHECK(indexes && !v.isTensor(), schema_.name(),
                  ": expected all tensors to be on one device, and one is on the CPU");
      return t.to(device(device_));
    });
  }

  // Whether the host must know what the device has computed: sizes that follow from values, results
  // that are no tensors, and random numbers, which are drawn in the order of the calls.
  bool waits() const {
    static const std::set<std::string> by_values{"nonzero",
                                                 "masked_select",
                                                 "_unique2",
                                                 "unique_dim",
                                                 "_unique",
                                                 "unique_consecutive",
                                                 "unique_dim_consecutive",
                                                 "repeat_interleave",
                                                 "bincount",
                                                 "nonzero_out",
                                                 "_ctc_loss",
                                                 "linalg_lstsq",
                                                 "_embedding_bag"};
    std::string name = schema_.name();
    name = name.substr(name.rfind(':') + 1);
    if (by_values.contains(name) || no_tensor()) return true;
    // A mask among indices.
    bool masks = false;
    for (const c10::IValue& v : given_)
      if (v.isOptionalTensorList() || (name == "index" && v.isTensorList()))
        each(v, [&](const at::Tensor& t) {
          masks |= t.scalar_type() == at::kBool || t.scalar_type() == at::kByte;
        });
    return masks;
  }
  bool no_tensor() const {
    return std::ranges::any_of(schema_.returns(), [](const auto& r) {
      return r.type()->kind() != c10::TypeKind::TensorType &&
             r.type()->kind() != c10::TypeKind::ListType;
    });
  }

  bool written(std::size_t i) const {
    const auto* alias = schema_.arguments()[i].alias_info();
    return alias && alias->isWrite();
  }

  std::vector<Use> uses() const {
    std::vector<Use> all;
    for (std::size_t i = 0; i < given_.size(); ++i)
      each(given_[i], [&](const at::Tensor& t) {
        if (is_here(t)) all.push_back(use(t, written(i)));
      });
    return all;
  }
  Stack arguments() const {
    Stack all;
    for (const c10::IValue& v : given_) all.push_back(changed(v, over));
    return all;
  }

  // Results that are given, and tensors that change their size, get the size that the dummies have.
  void follow_sizes(const std::vector<c10::IValue>& dummies) const {
    for (std::size_t i = 0; i < given_.size(); ++i) {
      if (!written(i)) continue;
      std::vector<at::Tensor> now;
      each(dummies[i], [&](const at::Tensor& t) { now.push_back(t); });
      std::size_t k = 0;
      each(given_[i], [&](const at::Tensor& t) {
        const at::Tensor& dummy = now[k++];
        if (is_here(t) && dummy.sizes() != t.sizes()) resize_to(t, dummy.sizes(), dummy.strides());
      });
    }
  }

  static at::Tensor fresh(const at::Tensor& like) {
    if (!like.defined()) return like;
    return empty_strided(like.sizes(), like.strides(), like.scalar_type(), {},
                         device(current_device()), {});
  }

  // The value that a return aliases; null: it is new.
  const c10::IValue* aliased(std::size_t r) const {
    const auto* alias = schema_.returns()[r].alias_info();
    if (!alias) return nullptr;
    TORCH_CHECK(alias->isWrite(), schema_.name(), " makes a view");
    for (std::size_t i = 0; i < given_.size(); ++i) {
      const auto* of = schema_.arguments()[i].alias_info();
      if (of && of->beforeSets() == alias->beforeSets()) return &given_[i];
    }
    return nullptr;
  }

  void make_late(const Stack& made) {
    std::vector<Use> all = uses();
    Stack stack = arguments();
    std::vector<std::vector<at::Tensor>> targets;
    for (std::size_t r = 0; r < schema_.returns().size(); ++r) {
      auto& own = targets.emplace_back();
      if (const c10::IValue* same = aliased(r)) {
        stack_->push_back(*same);
        const auto i = static_cast<std::size_t>(same - given_.data());
        if (!is_out(i)) continue;
        own.push_back(over(same->toTensor()));
        stack[i] = apart(i);
        continue;
      }
      stack_->push_back(changed(made[r], [&](const at::Tensor& like) {
        const at::Tensor t = fresh(like);
        own.push_back(over(t));
        all.push_back(use(t, true));
        return t;
      }));
    }
    post_here(device_, schema_.name().c_str(), all,
              [op = op_, given = std::move(stack), targets = std::move(targets)] {
                Stack stack = given;  // a graph calls it more than once
                op.callBoxed(&stack);
                for (std::size_t r = 0; r < targets.size(); ++r) {
                  std::size_t k = 0;
                  if (targets[r].empty()) continue;
                  each(stack[r], [&](const at::Tensor& t) { targets[r][k++].copy_(t); });
                }
              });
  }

  // Results that are given may have to get another size: they are made apart.
  bool is_out(std::size_t i) const {
    return written(i) && schema_.arguments()[i].kwarg_only() && given_[i].isTensor() &&
           is_here(given_[i].toTensor());
  }
  at::Tensor apart(std::size_t i) const {
    return at::empty({0}, at::TensorOptions(given_[i].toTensor().scalar_type()));
  }
  at::Tensor settle(const at::Tensor& made, at::Tensor to) const {
    if (!to.defined()) to = fresh(made);
    if (to.sizes() != made.sizes()) resize_to(to, made.sizes(), made.strides());
    post_here(device_, schema_.name().c_str(), {use(to, true)},
              [made, target = over(to)] { target.copy_(made); });
    return to;
  }

  void make_now(bool foreseen) {
    const auto stack = std::make_shared<Stack>(arguments());
    for (std::size_t i = 0; i < given_.size(); ++i)
      if (is_out(i)) (*stack)[i] = apart(i);
    std::exception_ptr error;
    const MarkPtr mark =
        post_here(device_, schema_.name().c_str(), uses(), [&error, op = op_, stack] {
          try {
            op.callBoxed(stack.get());
          } catch (...) {
            error = std::current_exception();
          }
        });
    ++(foreseen ? counters().waits : counters().own_waits);
    wait_for(mark);
    if (error) std::rethrow_exception(error);
    for (std::size_t r = 0; r < schema_.returns().size(); ++r) {
      const c10::IValue* same = aliased(r);
      const bool apart = same && is_out(static_cast<std::size_t>(same - given_.data()));
      if (same && !apart) {
        stack_->push_back(*same);
        continue;
      }
      stack_->push_back(changed((*stack)[r], [&](const at::Tensor& made) {
        return made.defined() ? settle(made, apart ? same->toTensor() : at::Tensor()) : made;
      }));
    }
  }

  c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  Stack* stack_;
  std::vector<c10::IValue> given_;
  int device_ = -1;
};

}  // namespace

void call_late(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).make(); }

}  // namespace tessera::test::stand_in

// Operators that are not run on locals as they are: those on lists, element by element, and those
// that write, by their functional forms.

#include <torch/csrc/autograd/variable.h>

#include "tessera/tensor/dispatch/internal/dispatch.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/dispatch/internal/sharded_call.h"
#include "tessera/tensor/errors.h"

namespace tessera::detail {
namespace {

using Copies = std::vector<std::shared_ptr<ViewCopy>>;

// For an operator that writes to several tensors: those targets, or all tensors, that are views in
// memory of their own.
Copies copies_among(const OpInfo& info, const c10::IValue* arguments, bool written_only) {
  Copies copies;
  each_tensor(info, arguments, [&](const at::Tensor& t, int argument, int) {
    const ShardMeta* meta = written_only && !info.written[argument] ? nullptr : meta_of(t);
    if (meta && meta->copy) copies.push_back(meta->copy);
  });
  return copies;
}

void refuse_two_of_one(const OpInfo& info, const Copies& copies) {
  for (std::size_t i = 0; i < copies.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j)
      if (copies[i] != copies[j] && copies[i]->base_local().is_alias_of(copies[j]->base_local()))
        throw ShardingError(info.name, " writes to two views of ", meta_of(copies[i]->base)->spec(),
                            " that had to be copied. Write to one after the other.");
  }
}

// Of a tensor, or the first of a list: whether it shows a device other than the CPU.
bool shows_device(const c10::IValue& v) {
  if (v.isTensor()) return v.toTensor().defined() && !v.toTensor().is_cpu();
  return v.isTensorList() && !v.toListRef().empty() && shows_device(v.toListRef().front());
}

// Whether some of the targets lie in host memory, and others on the device that they show. Where
// the first shows the CPU it is not asked.
bool in_two_memories(const OpInfo& info, const c10::IValue* arguments) {
  bool host = false, device = false;
  if (!shows_device(arguments[0])) return false;
  each_tensor(info, arguments, [&](const at::Tensor& t, int argument, int) {
    const ShardMeta* meta = info.written[argument] ? meta_of(t) : nullptr;
    if (meta) (in_host_memory(*meta) ? host : device) = true;
  });
  return host && device;
}

// Argument `i` of an operator on lists, for element `e` of the lists.
c10::IValue of_element(const OpInfo& info, std::size_t i, const c10::IValue& v, std::size_t e) {
  if (info.kinds[i] == OpInfo::Kind::tensor_list && v.isList()) {
    c10::List<at::Tensor> one;
    one.push_back(v.toListRef()[e].toTensor());
    return one;
  }
  if (info.op.schema().arguments()[i].name() != "scalars") return v;
  if (v.isTensor()) return v.toTensor().narrow(0, static_cast<std::int64_t>(e), 1);
  c10::List<at::Scalar> one;
  one.push_back(v.toListRef()[e].toScalar());
  return one;
}

bool lists_of(std::size_t size, const OpInfo& info, const c10::IValue* arguments) {
  for (std::size_t i = 0; i < info.kinds.size(); ++i)
    if (arguments[i].isList() && arguments[i].toListRef().size() != size) return false;
  return true;
}

// The tensor that `value` is, or those of the list.
void append_tensors(std::vector<at::Tensor>* all, const c10::IValue& value) {
  if (value.isTensor())
    all->push_back(value.toTensor());
  else if (value.isTensorList())
    for (const at::Tensor& t : value.toTensorVector()) all->push_back(t);
}

}  // namespace

bool run_one_by_one(const OpInfo& info, torch::jit::Stack* stack) {
  const std::size_t n = info.kinds.size(), first = stack->size() - n;
  const c10::IValue* arguments = stack->data() + first;
  const Copies copies = copies_among(info, arguments, true);
  if (copies.empty() && !in_two_memories(info, arguments)) return false;
  const bool on_lists = info.name.starts_with("aten::_foreach_") && arguments[0].isList();
  const std::size_t elements = on_lists ? arguments[0].toListRef().size() : 0;
  if (!on_lists || !lists_of(elements, info, arguments)) {
    refuse_two_of_one(info, copies);
    return false;
  }
  if (elements < 2) return false;
  const torch::jit::Stack given(stack->begin() + static_cast<std::ptrdiff_t>(first), stack->end());
  stack->resize(first);
  for (std::size_t e = 0; e < elements; ++e) {
    torch::jit::Stack one;
    for (std::size_t i = 0; i < n; ++i) one.push_back(of_element(info, i, given[i], e));
    // Whether or not they have changed, so that all ranks do the same.
    for (const auto& copy : e == 0 ? Copies() : copies_among(info, one.data(), false))
      copy->refresh();
    run_sharded(info, &one);
  }
  return true;
}

// A view, seen by an operator that changed its shape in place.
struct ShownBy final : torch::autograd::ViewFunc {
  ShownBy(const ViewFunc& view, c10::OperatorHandle op, torch::jit::Stack given)
      : before(view.clone_and_set()), by(std::move(op)), arguments(std::move(given)) {}
  at::Tensor operator()(const at::Tensor& base) const override {
    torch::jit::Stack stack = arguments;
    stack[0] = (*before)(base);
    by.callBoxed(stack);
    return stack[0].toTensor();
  }
  std::unique_ptr<ViewFunc> clone_and_set(
      std::optional<std::vector<c10::SymInt>> /*sizes*/,
      std::optional<std::vector<at::Tensor>> /*tensors*/) const override {
    return std::make_unique<ShownBy>(*before, by, arguments);
  }
  const std::unique_ptr<ViewFunc> before;
  const c10::OperatorHandle by;
  const torch::jit::Stack arguments;
};

// Autograd makes a view anew from its base by what made it, where libtorch takes strides: it has to
// know how its shape has changed in place.
void note_shape(const OpInfo& info, const at::Tensor& target, torch::jit::Stack given) {
  const auto* own = torch::autograd::impl::get_view_autograd_meta(target);
  if (!own || !own->has_bw_view() || !own->get_backward_view().has_view_fn()) return;
  auto& view = const_cast<torch::autograd::ViewInfo&>(own->get_backward_view());
  given[0] = c10::IValue();  // else the view would hold itself
  view.view_fn_ = std::make_unique<ShownBy>(view.view_fn(), *info.functional, std::move(given));
}

void run_by_functional(const OpInfo& info, torch::jit::Stack* stack) {
  const std::size_t n = info.kinds.size(), first = stack->size() - n;
  std::vector<at::Tensor> targets;
  torch::jit::Stack inputs;
  bool lists = false;
  for (std::size_t i = 0; i < n; ++i) {
    if (info.written[i]) append_tensors(&targets, (*stack)[first + i]);
    lists |= info.written[i] && (*stack)[first + i].isList();
    if (!(info.out_variant && info.written[i])) inputs.push_back((*stack)[first + i]);
  }
  torch::jit::Stack given;
  if (info.in_place_view) given = inputs;
  const LocalCallGuard guard;
  info.functional->callBoxed(&inputs);
  std::vector<at::Tensor> results;
  for (const c10::IValue& made : inputs) append_tensors(&results, made);
  if (results.size() < targets.size() || (lists && results.size() != targets.size()))
    throw InvalidArgument(info.name, ": there are ", results.size(), " results, and out has ",
                          targets.size(), " tensors");
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const at::Tensor& result = results[results.size() - targets.size() + i];
    const ShardMeta* made = meta_of(result);
    if (info.out_variant && !c10::canCast(result.scalar_type(), targets[i].scalar_type()))
      throw InvalidArgument(info.name, ": the result is ", toString(result.scalar_type()),
                            ", which out, being ", toString(targets[i].scalar_type()),
                            ", cannot hold");
    if (info.name == "aten::index_select.out" && result.scalar_type() != targets[i].scalar_type())
      throw InvalidArgument(info.name, ": self is ", toString(result.scalar_type()), ", out is ",
                            toString(targets[i].scalar_type()), ": this operator converts nothing");
    if (info.out_variant && targets[i].sizes() == result.sizes()) {
      targets[i].copy_(result);
    } else if (info.out_variant && targets[i].scalar_type() != result.scalar_type()) {
      throw ShardingError(info.name, ": the result is ", toString(result.scalar_type()),
                          ", out is ", toString(targets[i].scalar_type()));
    } else if (!made) {
      throw ShardingError(info.name, ": the result has shape ", result.sizes(),
                          ", out, which is sharded, ", targets[i].sizes());
    } else {
      install(targets[i], made->local, made->layout, made->copy);
      meta_of(targets[i])->base = made->base;
      if (info.in_place_view) note_shape(info, targets[i], std::move(given));
      // libtorch counts the change of shape as a write, but nothing has been written.
      if (info.in_place_view && !targets[i].is_inference())
        for (ViewCopy* copy = made->copy.get(); copy; copy = copy->parent()) ++copy->written;
    }
  }
  stack->resize(first);
  if (info.returns.empty()) return;
  for (const at::Tensor& t : targets) stack->emplace_back(t);
}

}  // namespace tessera::detail

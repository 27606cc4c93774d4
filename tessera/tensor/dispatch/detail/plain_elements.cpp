#include "tessera/tensor/dispatch/detail/make_plan.h"

#include <ATen/core/List.h>

#include <array>
#include <utility>
#include <vector>

#include "tessera/tensor/dispatch/internal/layout.h"

namespace tessera::detail {
namespace {

bool plain(const c10::IValue& v) {
  return !v.isTensor() || !v.toTensor().defined() || !meta_of(v.toTensor());
}

// The elements of a list whose number is in `chosen`.
c10::IValue chosen_of(const c10::IValue& all, const std::vector<std::size_t>& chosen) {
  const c10::List<c10::IValue> from = all.toList();
  c10::impl::GenericList some(from.elementType());
  for (const std::size_t k : chosen) some.push_back(from.get(k));
  return some;
}

bool takes_elements(const OpInfo& info) {
  return !info.kinds.empty() && info.kinds[0] == OpInfo::Kind::tensor_list && !info.out_variant &&
         (info.name.starts_with("aten::_foreach_") || info.name.starts_with("aten::_fused_")) &&
         (info.returns.empty() || (info.returns.size() == 1 && info.returns[0].list));
}

}  // namespace

bool run_plain_elements_apart(const OpInfo& info, torch::jit::Stack* stack) {
  if (!takes_elements(info)) return false;
  const std::size_t count = info.kinds.size(), first = stack->size() - count;
  const c10::IValue* arguments = stack->data() + first;
  if (!arguments[0].isTensorList()) return false;
  const std::size_t size = arguments[0].toListRef().size();
  const auto is_list = [&](std::size_t i) {
    return arguments[i].isList() && arguments[i].toListRef().size() == size;
  };
  // Sharded ones first: what they refuse has changed nothing.
  std::array<std::vector<std::size_t>, 2> parts;
  for (std::size_t k = 0; k < size; ++k) {
    bool all_plain = true;
    for (std::size_t i = 0; i < count; ++i)
      all_plain = all_plain && plain(is_list(i) ? arguments[i].toListRef()[k] : arguments[i]);
    parts[all_plain ? 1 : 0].push_back(k);
  }
  if (parts[0].empty() || parts[1].empty()) return false;
  std::vector<at::Tensor> results(size);
  for (const std::vector<std::size_t>& part : parts) {
    torch::jit::Stack of_part;
    for (std::size_t i = 0; i < count; ++i)
      of_part.push_back(is_list(i) ? chosen_of(arguments[i], part) : arguments[i]);
    info.op.callBoxed(of_part);
    if (of_part.empty()) continue;
    const std::vector<at::Tensor> made = of_part[0].toTensorVector();
    for (std::size_t k = 0; k < part.size(); ++k) results[part[k]] = made[k];
  }
  stack->resize(first);
  if (!info.returns.empty()) stack->emplace_back(std::move(results));
  return true;
}

}  // namespace tessera::detail

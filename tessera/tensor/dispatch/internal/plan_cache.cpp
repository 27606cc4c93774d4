#include "tessera/tensor/dispatch/internal/plan_cache.h"

#include <algorithm>

#include "tessera/base/text.h"
#include "tessera/tensor/errors.h"

namespace tessera::detail {
namespace {

void add_value(const c10::IValue& v, bool numbers, Key& key) {
  if (v.isNone()) {
    key.push_back(kNone);
  } else if (v.isInt()) {
    key.push_back(kInt);
    key.push_back(static_cast<std::uint64_t>(v.toInt()));
  } else if (v.isBool()) {
    key.push_back(v.toBool() ? kTrue : kFalse);
  } else if (v.isDouble()) {
    key.push_back(kDouble);
    if (numbers) {
      const double d = v.toDouble();
      std::uint64_t bits;
      std::memcpy(&bits, &d, sizeof bits);
      key.push_back(bits);
    }
  } else if (v.isComplexDouble()) {
    key.push_back(kComplex);
  } else if (v.isString()) {
    const auto text = v.toStringView();
    key.push_back(kText);
    key.push_back(text.size());
    for (std::size_t i = 0; i < text.size(); i += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, text.data() + i, std::min<std::size_t>(8, text.size() - i));
      key.push_back(word);
    }
  } else if (v.isDevice()) {
    key.push_back(kOther);
    key.push_back(static_cast<std::uint64_t>(v.toDevice().type()) << 8 |
                  static_cast<std::uint8_t>(v.toDevice().index()));
  } else if (v.isList()) {
    const auto list = v.toListRef();
    key.push_back(kList);
    key.push_back(list.size());
    for (const c10::IValue& element : list) add_value(element, numbers, key);
  } else {
    key.push_back(kOther);
  }
}

void add_number(const c10::IValue& v, bool numbers, Key& key) {
  if (numbers) {
    add_value(v, true, key);
  } else if (v.isList()) {
    key.push_back(kList);
    key.push_back(v.toListRef().size());
    for (const c10::IValue& element : v.toListRef()) add_number(element, false, key);
  } else {
    key.push_back(v.isDouble() ? kDouble
                  : v.isInt()  ? kInt
                  : v.isBool() ? kTrue
                  : v.isNone() ? kNone
                               : kComplex);
  }
}

// The bits of a number wrapped as a tensor: a double, an integer, a bool or a complex one.
void add_number_of(const at::Tensor& t, Key& key) {
  if (!t.device().is_cpu()) return;
  std::array<std::uint64_t, 2> bits = {};
  std::memcpy(bits.data(), t.const_data_ptr(), std::min(sizeof bits, t.nbytes()));
  key.append(bits.begin(), bits.end());
}

void add_tensor(const OpInfo& info, const c10::IValue& v, bool numbers, Key& key, Scan& scan) {
  if (!v.isTensor()) {
    key.push_back(kNone);
    return;
  }
  const auto& t = v.toTensor();
  if (!t.defined()) {
    key.push_back(kUndefined);
    return;
  }
  const ShardMeta* meta = meta_of(t);
  if (!meta) {
    scan.plain |= !t.unsafeGetTensorImpl()->is_wrapped_number();
    key.push_back(kWrapped);
    key.push_back(static_cast<std::uint64_t>(t.scalar_type()));
    if (numbers && t.unsafeGetTensorImpl()->is_wrapped_number()) add_number_of(t, key);
    return;
  }
  key.push_back(reinterpret_cast<std::uintptr_t>(meta->layout.get()));
  const SpecData& spec = *meta->layout->spec.data();
  if (!scan.first) {
    scan.first = meta;
  } else if (scan.first->layout->spec.data()->context != spec.context) {
    throw ShardingError(info.name, " is given tensors of two meshes: ", scan.first->spec(), " and ",
                        meta->spec(), ". Redistribute one of them onto the other's mesh.");
  }
  scan.replicated &= spec.replicated;
}

}  // namespace

Scan make_key(const OpInfo& info, const c10::IValue* arguments, bool numbers, Key& key) {
  Scan scan;
  for (std::size_t i = 0; i < info.kinds.size(); ++i) {
    const c10::IValue& v = arguments[i];
    switch (info.kinds[i]) {
      case OpInfo::Kind::tensor:
        add_tensor(info, v, numbers, key, scan);
        break;
      case OpInfo::Kind::tensor_list:
      case OpInfo::Kind::optional_tensor_list:
        if (v.isList()) {
          const auto list = v.toListRef();
          key.push_back(kList);
          key.push_back(list.size());
          for (const c10::IValue& element : list) add_tensor(info, element, numbers, key, scan);
        } else {
          key.push_back(kNone);
        }
        break;
      case OpInfo::Kind::floating:
        add_number(v, numbers, key);
        break;
      case OpInfo::Kind::other:
        add_value(v, numbers, key);
        break;
    }
  }
  if (scan.first && needs_default_dtype(*scan.first->layout)) {
    key.push_back(kDefault);
    key.push_back(default_dtype());
  }
  return scan;
}

PlanCache& PlanCache::of_thread() {
  static thread_local PlanCache cache;
  return cache;
}

void PlanCache::make_room() {
  constexpr std::size_t kLimit = 16384;
  if (size_ < kLimit || depth > 1) return;
  for (OpPlans& op : ops_) op.plans.clear();
  recent_ = {};
  size_ = 0;
}

}  // namespace tessera::detail

#include "tessera/tensor/dispatch/detail/make_plan.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ScalarOps.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <exception>
#include <functional>
#include <initializer_list>
#include <string_view>
#include <utility>

#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/layout.h"

namespace tessera::detail {
namespace {

// The arguments with every tensor replaced by what `stand_in` returns for it.
torch::jit::Stack replaced(const OpInfo& info, const std::vector<c10::IValue>& arguments,
                           const std::function<at::Tensor(const at::Tensor&)>& stand_in) {
  const auto tensor = [&](const c10::IValue& v) {
    return v.isTensor() && v.toTensor().defined() ? stand_in(v.toTensor()) : at::Tensor();
  };
  torch::jit::Stack stack;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& v = arguments[i];
    if (v.isTensor()) {
      stack.emplace_back(tensor(v));
    } else if (v.isList() && info.kinds[i] == OpInfo::Kind::tensor_list) {
      c10::List<at::Tensor> list;
      for (const c10::IValue& t : v.toListRef()) list.push_back(tensor(t));
      stack.emplace_back(list);
    } else if (v.isList() && info.kinds[i] == OpInfo::Kind::optional_tensor_list) {
      c10::List<std::optional<at::Tensor>> list;
      for (const c10::IValue& t : v.toListRef())
        list.push_back(t.isNone() ? std::nullopt : std::optional(tensor(t)));
      stack.emplace_back(list);
    } else {
      stack.push_back(v);
    }
  }
  return stack;
}

// A meta tensor with the shape and strides of the global one; numbers wrapped as tensors are
// returned unchanged.
at::Tensor on_meta(const OpInfo& info, const at::Tensor& t) {
  const auto* meta = meta_of(t);
  if (!meta) return t;
  const Layout& layout = *meta->layout;
  if (!info.view)
    return at::detail::empty_strided_meta(layout.sizes(), layout.strides, layout.dtype);
  // Views show their offset into the same storage.
  std::int64_t extent = layout.offset + 1;
  for (std::size_t d = 0; d < layout.strides.size(); ++d)
    extent += std::max<std::int64_t>(layout.sizes()[d] - 1, 0) * layout.strides[d];
  at::Tensor base = at::detail::empty_strided_meta({extent}, {1}, layout.dtype);
  base.unsafeGetTensorImpl()->set_sizes_and_strides(layout.sizes(), layout.strides, layout.offset);
  return base;
}

bool has_empty(const std::vector<TensorInfo>& tensors) {
  return std::ranges::any_of(tensors, [](const TensorInfo& t) { return t.spec.numel() == 0; });
}

// Calls the operator. The arguments outlive the stack's hold on them: libtorch 2.11 reads outputs
// once more when it has taken them from the stack.
void call(const OpInfo& info, torch::jit::Stack& stack) {
  const LocalCallGuard guard;
  const torch::jit::Stack arguments = stack;
  info.op.callBoxed(&stack);
}

// Runs the operator on meta tensors; false if it has no meta kernel for them.
bool run_on_meta(const OpInfo& info, const std::vector<TensorInfo>& tensors,
                 torch::jit::Stack& stack) {
  try {
    call(info, stack);
  } catch (const c10::NotImplementedError&) {
    return false;
  } catch (const c10::IndexError&) {
    // Some meta kernels look at the first slice of tensors that have none.
    if (!has_empty(tensors)) throw;
    return false;
  } catch (const c10::Error& e) {
    const std::string_view what = e.what_without_backtrace();
    // Some meta kernels require other strides than those of the CPU do; a view that is impossible
    // is the caller's mistake.
    if (!info.view && what.starts_with("view size is not compatible")) return false;
    // The shape of the result depends on values, or the kernel is that of a device alone.
    if (what.find("meta tensor") != what.npos || what.ends_with("got: meta")) return false;
    throw;
  } catch (const std::exception& e) {  // a meta kernel that is written in Python
    const std::string_view what = e.what();
    const auto says = [&](std::string_view text) { return what.find(text) != what.npos; };
    if (says("NotImplementedError") || says("unimplemented") || says("data-dependent"))
      return false;
    // They refuse masks of bytes, which the kernels of devices take.
    if (says("must be long, int, byte or bool") || says("expected predicate to be bool"))
      return false;
    // They divide by the number of elements, where the kernels of devices have none to divide.
    if (says("ZeroDivisionError") && has_empty(tensors)) return false;
    throw;
  }
  return true;
}

const at::Generator& own_generator() {
  static thread_local const at::Generator generator = at::detail::createCPUGenerator();
  return generator;
}

bool is_number(at::ScalarType type) { return at::isFloatingType(type) || at::isComplexType(type); }

bool takes(const OpInfo& info, std::initializer_list<std::string_view> names) {
  const auto& arguments = info.op.schema().arguments();
  return std::ranges::any_of(arguments, [&](const c10::Argument& a) {
    return std::ranges::find(names, a.name()) != names.end();
  });
}

// An operator on stand-ins for its tensors.
struct Trial {
  using Dtype = std::function<at::ScalarType(at::ScalarType)>;
  using Extent = std::int64_t (*)(std::int64_t n, std::size_t dim);

  Extent extent;
  Dtype dtype = [](at::ScalarType t) { return t; };
  double value = 0;
  // Every number among the arguments is one.
  bool ones = false;
};

// Thrown if the trial would take long, or much memory, or its shapes do not fit each other.
struct NotTried final : std::exception {};

constexpr std::int64_t kFew = 1 << 16;

// Names of arguments that determine how large the result is.
constexpr std::array<std::string_view, 6> kSizes = {"size", "output_size", "repeats",
                                                    "pad",  "input_sizes", "input_size"};

bool is_told_sizes(const OpInfo& info) {
  return std::ranges::any_of(kSizes, [&](std::string_view name) { return takes(info, {name}); });
}

std::int64_t product_of_sizes(const OpInfo& info, const torch::jit::Stack& stack) {
  std::int64_t product = 1;
  for (std::size_t i = 0; i < stack.size(); ++i) {
    const std::string_view name = info.op.schema().arguments()[i].name();
    if (std::ranges::find(kSizes, name) == kSizes.end() || !stack[i].isIntList()) continue;
    for (const std::int64_t n : stack[i].toIntVector())
      product = std::min(kFew + 1, product * std::clamp<std::int64_t>(std::abs(n), 1, kFew + 1));
  }
  return product;
}

// For an operator that is told how large its result is: `elements` are those of the stand-ins.
void require_few_results(const OpInfo& info, const torch::jit::Stack& given,
                         std::int64_t elements) {
  const std::int64_t at_most = std::max<std::int64_t>(elements, 1) * product_of_sizes(info, given);
  torch::jit::Stack stack = replaced(info, given, [](const at::Tensor& t) -> at::Tensor {
    return at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type());
  });
  std::int64_t made = 0;
  try {
    if (!run_on_meta(info, {}, stack)) {
      made = at_most;
      stack.clear();
    }
  } catch (const std::exception&) {
    throw NotTried();  // the tensors themselves have passed on meta before: the shapes are at fault
  }
  for (const c10::IValue& v : stack)
    if (v.isTensor() && v.toTensor().defined()) made += v.toTensor().numel();
  if (made > kFew) throw NotTried();
}

void run_trial(const OpInfo& info, const std::vector<c10::IValue>& arguments, const Trial& trial) {
  std::int64_t elements = 0;
  torch::jit::Stack stack = replaced(info, arguments, [&](const at::Tensor& t) {
    const auto* meta = meta_of(t);
    if (!meta) return trial.ones ? c10::scalar_to_tensor(1) : t;
    std::vector<std::int64_t> sizes = meta->layout->sizes();
    std::int64_t n = 1;
    for (std::size_t d = 0; d < sizes.size(); ++d) {
      sizes[d] = std::min(sizes[d], trial.extent(sizes[d], d));
      n *= sizes[d];
    }
    elements += n;
    if (elements > kFew) throw NotTried();
    return at::full(sizes, trial.value, trial.dtype(meta->layout->dtype));
  });
  for (std::size_t i = 0; i < stack.size(); ++i) {
    const c10::Argument& argument = info.op.schema().arguments()[i];
    if (argument.name() == "generator") stack[i] = own_generator();
    if (trial.ones && argument.type()->kind() == c10::TypeKind::NumberType) stack[i] = 1;
  }
  if (is_told_sizes(info)) require_few_results(info, stack, elements);
  call(info, stack);
}

bool trial_runs(const OpInfo& info, const std::vector<c10::IValue>& arguments, const Trial& trial) {
  try {
    run_trial(info, arguments, trial);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// True if the operator accepts other dtypes, or other numbers, in place of those given.
bool would_take_others(const OpInfo& info, const std::vector<c10::IValue>& arguments,
                       Trial::Extent extent) {
  const auto with = [&](const Trial::Dtype& dtype) {
    return trial_runs(info, arguments, {.extent = extent, .dtype = dtype});
  };
  bool first = true, leading = true;
  return with([](at::ScalarType t) { return is_number(t) ? at::kFloat : t; }) ||
         with([](at::ScalarType) { return at::kFloat; }) ||
         with([](at::ScalarType) { return at::kLong; }) ||
         with([&](at::ScalarType t) { return std::exchange(first, false) ? at::kFloat : t; }) ||
         with([&](at::ScalarType t) { return std::exchange(leading, false) ? at::kBool : t; }) ||
         trial_runs(info, arguments, {.extent = extent, .ones = true}) ||
         trial_runs(info, arguments, {.extent = extent, .value = 1, .ones = true});
}

}  // namespace

std::optional<std::vector<OutputInfo>> infer_outputs(const OpInfo& info,
                                                     const std::vector<c10::IValue>& arguments,
                                                     const std::vector<TensorInfo>& tensors) {
  std::vector<OutputInfo> all;
  if (std::ranges::none_of(info.returns, [](const auto& r) { return r.tensor || r.list; }))
    return all;  // item(): the meta kernel checks nothing, and some throw
  torch::jit::Stack stack =
      replaced(info, arguments, [&](const at::Tensor& t) { return on_meta(info, t); });
  for (c10::IValue& v : stack) {
    if (v.isDevice()) v = c10::Device(c10::kMeta);
    if (v.isGenerator()) v = c10::IValue();
  }
  if (!run_on_meta(info, tensors, stack)) return std::nullopt;
  const auto add = [&](const c10::IValue& v) {
    if (!v.isTensor()) return;
    const at::Tensor& t = v.toTensor();
    if (!t.defined()) {
      all.push_back({false, {}, {}, 0, at::kFloat});
    } else {
      all.push_back(
          {true, t.sizes().vec(), t.strides().vec(), t.storage_offset(), t.scalar_type()});
    }
  };
  for (std::size_t i = 0; i < info.returns.size(); ++i) {
    const c10::IValue& v = stack[stack.size() - info.returns.size() + i];
    if (info.returns[i].list)
      for (const c10::IValue& t : v.toListRef()) add(t);
    else
      add(v);
  }
  return all;
}

void require_dtypes(const OpInfo& info, const std::vector<c10::IValue>& arguments,
                    const std::vector<TensorInfo>& tensors, c10::Device device) {
  // A kernel of the program's own may do more than compute.
  if (!device.is_cpu() || info.view || tensors.empty() || !info.name.starts_with("aten::")) return;
  // Kernels believe these, and read as far as they say.
  if (takes(info, {"input_lengths", "target_lengths", "lengths", "batch_sizes"})) return;
  // One value, as stand-ins have it, is written in another way, which refuses masks of bytes.
  if (info.name.starts_with("aten::index_put") &&
      std::ranges::any_of(
          tensors, [](const TensorInfo& t) { return t.element >= 0 && t.dtype == at::kByte; }))
    return;
  // Operators that draw from libtorch's generator would consume the program's random numbers.
  if (info.random && !takes(info, {"generator"})) return;
  // Shapes that fit each other still do with one element per dim, unless an argument depends on
  // sizes, as the number of groups of a convolution or the size of a window: then they are kept, if
  // these are few elements. Zero is a valid index and class, one a divisor.
  for (const Trial::Extent extent :
       {Trial::Extent([](std::int64_t, std::size_t) -> std::int64_t { return 1; }),
        Trial::Extent([](std::int64_t n, std::size_t) { return n; })}) {
    try {
      run_trial(info, arguments, {.extent = extent});
      return;
    } catch (const NotTried&) {
      continue;
    } catch (const std::exception&) {
      if (trial_runs(info, arguments, {.extent = extent, .value = 1})) return;
      // They are at fault if others would be accepted; else the shapes are.
      if (would_take_others(info, arguments, extent)) throw;
    }
  }
}

}  // namespace tessera::detail

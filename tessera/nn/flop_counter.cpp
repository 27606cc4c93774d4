#include "tessera/nn/flop_counter.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tessera/tensor/shard_tensor.h"

namespace tessera {
namespace {

thread_local FlopCounter* counting = nullptr;

enum class Kind : unsigned char {
  product,      // of arguments 0 and 1
  sum_product,  // of arguments 1 and 2, beside what is added
  convolution,
  transposed_convolution,
  any_convolution,  // argument 6 says which
  attention,
  einsum
};

const std::unordered_map<std::string_view, Kind>& kinds() {
  static const std::unordered_map<std::string_view, Kind> all = {
      {"aten::linear", Kind::product},
      {"aten::matmul", Kind::product},
      {"aten::mm", Kind::product},
      {"aten::bmm", Kind::product},
      {"aten::mv", Kind::product},
      {"aten::dot", Kind::product},
      {"aten::_scaled_mm", Kind::product},
      {"aten::addmm", Kind::sum_product},
      {"aten::addmm_", Kind::sum_product},
      {"aten::_addmm_activation", Kind::sum_product},
      {"aten::baddbmm", Kind::sum_product},
      {"aten::baddbmm_", Kind::sum_product},
      {"aten::addmv", Kind::sum_product},
      {"aten::conv1d", Kind::convolution},
      {"aten::conv2d", Kind::convolution},
      {"aten::conv3d", Kind::convolution},
      {"aten::conv_transpose1d", Kind::transposed_convolution},
      {"aten::conv_transpose2d", Kind::transposed_convolution},
      {"aten::conv_transpose3d", Kind::transposed_convolution},
      {"aten::convolution", Kind::any_convolution},
      {"aten::_convolution", Kind::any_convolution},
      {"aten::scaled_dot_product_attention", Kind::attention},
      {"aten::_scaled_dot_product_flash_attention", Kind::attention},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", Kind::attention},
      {"aten::_scaled_dot_product_efficient_attention", Kind::attention},
      {"aten::_scaled_dot_product_cudnn_attention", Kind::attention},
      {"aten::einsum", Kind::einsum}};
  return all;
}

double gradient_of(const at::Tensor& t) {
  return at::GradMode::is_enabled() && t.requires_grad() ? 1 : 0;
}

double elements(const at::Tensor& t) { return static_cast<double>(t.numel()); }

// Forward: products of queries and keys, and of weights and values. Backward: the gradients of
// values, of weights, of queries and of keys.
double attention_flop(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const double rows = elements(q) / static_cast<double>(std::max<std::int64_t>(q.size(-1), 1));
  const double pairs = 2 * rows * static_cast<double>(k.size(-2));
  const auto e = static_cast<double>(q.size(-1)), ev = static_cast<double>(v.size(-1));
  const double dq = gradient_of(q), dk = gradient_of(k);
  return pairs * (e * (1 + dq + dk) + ev * (1 + gradient_of(v) + std::max(dq, dk)));
}

// Pair by pair from the left, as ATen contracts. Nothing for an equation with an ellipsis, whose
// products are counted one by one.
std::optional<double> einsum_flop(std::string equation, const std::vector<at::Tensor>& operands) {
  std::erase(equation, ' ');
  const std::size_t arrow = equation.find("->");
  std::vector<std::string> labels(1);  // of each operand
  for (const char c : equation.substr(0, arrow)) {
    if (c == ',')
      labels.emplace_back();
    else
      labels.back() += c;
  }
  if (equation.find('.') != std::string::npos || labels.size() != operands.size()) return {};
  std::map<char, double> extents;
  std::map<char, int> uses;
  for (std::size_t i = 0; i < labels.size(); ++i) {
    if (labels[i].size() != static_cast<std::size_t>(operands[i].dim())) return {};
    for (std::size_t d = 0; d < labels[i].size(); ++d) {
      double& extent = extents[labels[i][d]];
      extent = std::max(extent, static_cast<double>(operands[i].size(static_cast<int>(d))));
      ++uses[labels[i][d]];
    }
  }
  const std::string of_result = arrow == std::string::npos ? "" : equation.substr(arrow + 2);
  const auto stays = [&](char label, std::size_t behind) {
    if (arrow == std::string::npos ? uses[label] == 1 : of_result.find(label) != std::string::npos)
      return true;
    return std::any_of(labels.begin() + static_cast<std::ptrdiff_t>(behind), labels.end(),
                       [&](const std::string& l) { return l.find(label) != std::string::npos; });
  };
  double flop = 0;
  std::set<char> left(labels[0].begin(), labels[0].end());
  double gradient = gradient_of(operands[0]);
  for (std::size_t i = 1; i < operands.size(); ++i) {
    left.insert(labels[i].begin(), labels[i].end());
    double summands = 2;
    for (const char label : left) summands *= extents[label];
    flop += summands * (1 + gradient + gradient_of(operands[i]));
    gradient = std::max(gradient, gradient_of(operands[i]));
    std::erase_if(left, [&](char label) { return !stays(label, i + 1); });
  }
  return flop;
}

// 1 / ranks that compute the operator together; 1 for plain tensors.
double share_of(c10::ArrayRef<const c10::IValue> arguments) {
  const auto share = [](const at::Tensor& t) {
    return t.defined() && is_sharded(t) ? 1.0 / spec(t).mesh().mesh().size() : 1.0;
  };
  for (const c10::IValue& value : arguments) {
    double found = 1;
    if (value.isTensor()) found = share(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& t : value.toTensorVector()) found = std::min(found, share(t));
    if (found < 1) return found;
  }
  return 1;
}

}  // namespace

// What is known before an operator runs: its FLOP, or those for each element of its result.
struct FlopCounter::Call : at::ObserverContext {
  double flop = 0, of_each_element = 0;

  static std::unique_ptr<Call> of(Kind kind, c10::ArrayRef<const c10::IValue> arguments) {
    auto call = std::make_unique<Call>();
    const auto tensor = [&](std::size_t i) { return arguments[i].toTensor(); };
    if (kind == Kind::any_convolution)
      kind = arguments[6].toBool() ? Kind::transposed_convolution : Kind::convolution;
    if (kind == Kind::einsum) {
      const auto flop = einsum_flop(arguments[0].toStringRef(), arguments[1].toTensorVector());
      if (!flop) return nullptr;
      call->flop = *flop;
    } else if (kind == Kind::attention) {
      call->flop = attention_flop(tensor(0), tensor(1), tensor(2));
    } else {
      const std::size_t first = kind == Kind::sum_product ? 1 : 0;
      const at::Tensor a = tensor(first), b = tensor(first + 1);
      const double times = 2 * (1 + gradient_of(a) + gradient_of(b));
      // Of a convolution: elements of the kernel behind one element, of the result or, transposed,
      // of the input.
      const auto kernel = [&] {
        return elements(b) / static_cast<double>(std::max<std::int64_t>(b.size(0), 1));
      };
      if (kind == Kind::convolution)
        call->of_each_element = times * kernel();
      else if (kind == Kind::transposed_convolution)
        call->flop = times * elements(a) * kernel();
      else
        call->of_each_element = times * static_cast<double>(a.size(-1));
    }
    const double share = share_of(arguments);
    call->flop *= share;
    call->of_each_element *= share;
    return call;
  }
};

FlopCounter::FlopCounter() : outer_(counting) {
  counting = this;
  if (outer_) return;
  handle_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(begin, end)
          .needsInputs(true)
          .needsOutputs(true)
          .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
}

FlopCounter::~FlopCounter() {
  counting = outer_;
  if (outer_)
    outer_->total_ += total_;
  else
    at::removeCallback(handle_);
}

std::unique_ptr<at::ObserverContext> FlopCounter::begin(const at::RecordFunction& call) {
  if (!counting) return nullptr;  // a thread of autograd
  std::unique_ptr<Call> counted;
  if (call.scope() == at::RecordScope::BACKWARD_FUNCTION) {
    counted = std::make_unique<Call>();
  } else if (counting->inside_ == 0) {
    const auto kind = kinds().find(call.name());
    if (kind != kinds().end()) counted = Call::of(kind->second, call.inputs());
  }
  if (counted) ++counting->inside_;
  return counted;
}

void FlopCounter::end(const at::RecordFunction& call, at::ObserverContext* context) {
  if (!counting || !context) return;
  --counting->inside_;
  const auto& counted = static_cast<const Call&>(*context);
  double flop = counted.flop;
  if (counted.of_each_element > 0 && !call.outputs().empty() && call.outputs()[0].isTensor())
    flop += counted.of_each_element * elements(call.outputs()[0].toTensor());
  counting->total_ += flop;
}

double measure_peak_flop(c10::Device device, at::ScalarType dtype) {
  using Clock = std::chrono::steady_clock;
  constexpr std::int64_t kLargest = 8192;
  constexpr double kLongEnough = 0.02;
  const at::NoGradGuard no_grad;
  double best = 0;
  for (std::int64_t n = 256; n <= kLargest; n *= 2) {
    const at::Tensor a = at::ones({n, n}, at::dtype(dtype).device(device));
    double seconds = 0;
    for (int i = 0; i < 3; ++i) {
      const auto from = Clock::now();
      // Reading an element waits for the device.
      at::mm(a, a).select(0, 0).select(0, 0).item<double>();
      seconds = std::chrono::duration<double>(Clock::now() - from).count();
      const auto side = static_cast<double>(n);
      if (i > 0) best = std::max(best, 2 * side * side * side / seconds);
    }
    if (seconds > kLongEnough) break;
  }
  return best;
}

}  // namespace tessera

#include "tessera/comm/group/detail/memory.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "tessera/base/text.h"

namespace tessera::detail {
namespace {

// Stride and size of each dim of more than one element.
using Dims = std::vector<std::pair<std::int64_t, std::int64_t>>;

Dims dims_by_stride(const at::Tensor& t) {
  Dims dims;
  for (std::int64_t d = 0; d < t.dim(); ++d)
    if (t.size(d) > 1) dims.emplace_back(t.stride(d), t.size(d));
  std::ranges::sort(dims);
  return dims;
}

// Distance from the first to the last element.
std::int64_t span(const Dims& dims) {
  std::int64_t last = 0;
  for (const auto& [stride, size] : dims) last += stride * (size - 1);
  return last + 1;
}

// True if every stride is longer than everything that the smaller ones reach.
bool nested(const Dims& dims) {
  std::int64_t reach = 0;
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) return false;
    reach += stride * (size - 1);
  }
  return true;
}

template <class Visit>
void each_offset(const Dims& dims, std::size_t d, std::int64_t offset, const Visit& visit) {
  if (d == 0) return visit(offset);
  for (std::int64_t i = 0; i < dims[d - 1].second; ++i)
    each_offset(dims, d - 1, offset + i * dims[d - 1].first, visit);
}

// True if a byte of an element is marked already. Marks all bytes if `marks`.
bool seen_before(std::vector<bool>& bytes, const Dims& dims, std::int64_t begin, std::int64_t item,
                 bool marks) {
  bool found = false;
  each_offset(dims, dims.size(), 0, [&](std::int64_t offset) {
    for (std::int64_t b = 0; b < item; ++b) {
      auto place = bytes[begin + offset * item + b];
      found = found || place;
      if (marks) place = true;
    }
  });
  return found;
}

}  // namespace

std::string why_unreadable(const at::Tensor& t) {
  if (!t.defined()) return "is undefined";
  if (t.is_nested())
    return "is nested; only dense tensors travel: send its values(), or use to_padded_tensor()";
  if (t.layout() != c10::kStrided)
    return concat("is ", t.layout(), "; only dense tensors travel: use to_dense()");
  if (t.is_quantized())
    return "is quantized; only dense tensors travel: send int_repr(), with scale and zero point";
  if (t.is_meta()) return "is on the meta device and has no values";
  if (t.numel() == 0 || t._is_zerotensor()) return {};
  // A wrapper throws when it is asked for its storage.
  std::int64_t held = 0;
  try {
    held = static_cast<std::int64_t>(t.storage().nbytes());
    if (held > 0 && t.storage().data() == nullptr) held = 0;
  } catch (const c10::Error&) {
    return "has no memory of its own (a ShardTensor or another wrapper): use its local tensor, "
           "for example to_local()";
  }
  const std::int64_t needed =
      (t.storage_offset() + span(dims_by_stride(t))) * static_cast<std::int64_t>(t.element_size());
  if (held < needed)
    return concat("needs ", needed, " bytes of its storage, which holds ", held,
                  " (it was resized or freed)");
  return {};
}

std::string why_unwritable(const at::Tensor& t) {
  auto why = why_unreadable(t);
  if (why.empty() && t._is_zerotensor())
    why = "is an immutable tensor of zeros, as backward formulas make them: clone it first";
  return why;
}

at::Tensor in_memory(const at::Tensor& t) {
  return t.defined() && t._is_zerotensor() ? at::zeros(t.sizes(), t.options()) : t;
}

bool shares_elements(const at::Tensor& t) {
  if (t.numel() < 2 || t.is_contiguous() || t._is_zerotensor()) return false;
  const auto dims = dims_by_stride(t);
  if (dims.front().first == 0) return true;
  if (nested(dims)) return false;
  std::vector<bool> seen(static_cast<std::size_t>(span(dims)));
  return seen_before(seen, dims, 0, 1, true);
}

bool share_elements(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0 || a._is_zerotensor() || b._is_zerotensor()) return false;
  if (a.device() != b.device()) return false;
  const auto ours = dims_by_stride(a), theirs = dims_by_stride(b);
  const auto item_a = static_cast<std::int64_t>(a.element_size()),
             item_b = static_cast<std::int64_t>(b.element_size());
  const auto begin_a =
                 static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(a.const_data_ptr())),
             begin_b =
                 static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(b.const_data_ptr()));
  const auto end_a = begin_a + span(ours) * item_a, end_b = begin_b + span(theirs) * item_b;
  if (end_a <= begin_b || end_b <= begin_a) return false;
  if (a.is_contiguous() && b.is_contiguous()) return true;
  const auto begin = std::min(begin_a, begin_b);
  // Boxes of one array are disjoint if they are disjoint along one dim of it.
  if (item_a == item_b && a.dim() == b.dim() && a.strides() == b.strides() &&
      a.storage().data() == b.storage().data()) {
    auto strides = a.strides().vec();
    std::vector<std::size_t> order(strides.size());
    for (std::size_t d = 0; d < order.size(); ++d) order[d] = d;
    std::ranges::sort(order, [&](std::size_t x, std::size_t y) { return strides[x] > strides[y]; });
    std::int64_t left_a = a.storage_offset(), left_b = b.storage_offset();
    bool fits = true, apart = false;
    for (std::size_t i = 0; i < order.size(); ++i) {
      const auto d = static_cast<std::int64_t>(order[i]);
      const auto stride = a.stride(d);
      if (stride == 0) {
        fits = false;
        break;
      }
      const auto at_a = left_a / stride, at_b = left_b / stride;
      left_a %= stride;
      left_b %= stride;
      // Along a dim the box must stay within the next longer stride.
      if (i > 0) {
        const auto extent = strides[order[i - 1]] / stride;
        fits = fits && strides[order[i - 1]] % stride == 0 && at_a + a.size(d) <= extent &&
               at_b + b.size(d) <= extent;
      }
      apart = apart || at_a + a.size(d) <= at_b || at_b + b.size(d) <= at_a;
    }
    if (fits && (left_a != left_b || apart)) return false;
    if (fits) return true;
  }
  std::vector<bool> seen(static_cast<std::size_t>(std::max(end_a, end_b) - begin));
  seen_before(seen, ours, begin_a - begin, item_a, true);
  return seen_before(seen, theirs, begin_b - begin, item_b, false);
}

}  // namespace tessera::detail

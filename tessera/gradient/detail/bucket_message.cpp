#include "tessera/gradient/detail/bucket_message.h"

#include <ATen/ops/empty.h>
#include <c10/core/TensorImpl.h>

#include <cstring>

namespace tessera::detail {
namespace {

// A place in `flat` that is not a view to autograd: a gradient that is one could not be detached in
// place, which Optimizer::zero_grad does. Made without libtorch's operators, which cost more than
// what is then copied there.
at::Tensor place(const at::Tensor& flat, std::int64_t offset, at::IntArrayRef sizes) {
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(flat.storage()),
                                                             flat.key_set(), flat.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(offset);
  made.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return made;
}

// Copies `rows` rows of `value` along `dim`, from `begin`, to `offset` of `flat`; returns their
// elements. Bytes of a small gradient as they are: to find out that they can be copied so costs
// libtorch's copy more than the bytes.
std::int64_t copy_rows(const at::Tensor& flat, std::int64_t offset, const at::Tensor& value,
                       std::int64_t dim, std::int64_t begin, std::int64_t rows) {
  constexpr std::int64_t kSmall = 64 << 10;
  const std::int64_t row = value.numel() / value.size(dim), elements = rows * row;
  const auto width = static_cast<std::int64_t>(flat.element_size());
  if (elements == 0) return 0;
  const bool interval = dim == 0 || rows == value.size(dim);
  if (interval && elements * width <= kSmall && value.is_cpu() && value.is_contiguous() &&
      !value.is_conj() && !value.is_neg() && !value._is_zerotensor() &&
      value.scalar_type() == flat.scalar_type()) {
    std::memcpy(static_cast<char*>(flat.data_ptr()) + offset * width,
                static_cast<const char*>(value.const_data_ptr()) + begin * row * width,
                static_cast<std::size_t>(elements * width));
  } else {
    const at::Tensor piece = rows == value.size(dim) ? value : value.narrow(dim, begin, rows);
    place(flat, offset, piece.sizes()).copy_(piece);
  }
  return elements;
}

}  // namespace

void BucketMessage::pack() {
  if (scatters_)
    pack_scattered();
  else
    pack_full();
  for (Item& item : items_) {
    item.dtype = item.gradient.value.scalar_type();
    item.gradient.value.reset();
  }
}

// For all gradients.
at::Tensor BucketMessage::flat() const {
  std::int64_t numel = 0;
  for (const Item& item : items_) numel += item.gradient.value.numel();
  const at::TensorOptions options = items_.front().gradient.value.options();
  return at::empty({numel}, dtype_ ? options.dtype(*dtype_) : options);
}

void BucketMessage::pack_full() {
  flat_ = flat();
  std::int64_t offset = 0;
  for (Item& item : items_) {
    item.reduced = place(flat_, offset, item.gradient.value.sizes());
    item.reduced.copy_(item.gradient.value);
    offset += item.reduced.numel();
  }
}

// In the order of the ranks that keep the rows; the rows of one rank in the order of the gradients.
void BucketMessage::pack_scattered() {
  const int ranks = scatter_.size(), me = scatter_.rank();
  flat_ = flat();
  std::vector<std::int64_t> row(items_.size(), 0);
  std::int64_t offset = 0, kept_at = 0;
  rows_.assign(ranks, 0);
  for (int r = 0; r < ranks; ++r) {
    const std::int64_t begin = offset;
    for (std::size_t i = 0; i < items_.size(); ++i) {
      const UnreducedGradient& gradient = items_[i].gradient;
      const std::int64_t rows = gradient.rows[r];
      if (rows == 0) continue;
      offset += copy_rows(flat_, offset, gradient.value, gradient.scatter_dim, row[i], rows);
      row[i] += rows;
    }
    rows_[r] = offset - begin;
  }
  kept_ = at::empty({rows_[me]}, flat_.options());
  for (Item& item : items_) {
    auto sizes = item.gradient.value.sizes().vec();
    sizes[item.gradient.scatter_dim] = item.gradient.rows[me];
    item.reduced = place(kept_, kept_at, sizes);
    kept_at += item.reduced.numel();
  }
}

void BucketMessage::start() {
  request_ =
      scatters_ ? scatter_.started().reduce_scatter(kept_, flat_, op_, rows_, {.name = "gradients"})
                : group_.started().all_reduce(flat_, op_, {.name = "gradients"});
}

void BucketMessage::next() {
  if (!scatters_ || second_) return;
  request_.wait();
  flat_.reset();
  second_ = true;
  request_ = group_.size() > 1 ? group_.started().all_reduce(kept_, op_, {.name = "gradients"})
                               : Request();
}

void BucketMessage::wait() {
  next();
  request_.wait();
  for (Item& item : items_)
    if (item.reduced.scalar_type() != item.dtype) item.reduced = item.reduced.to(item.dtype);
}

}  // namespace tessera::detail

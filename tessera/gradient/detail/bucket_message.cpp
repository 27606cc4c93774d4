#include "tessera/gradient/detail/bucket_message.h"

#include <ATen/ops/empty.h>
#include <c10/util/strides.h>

#include <cstring>

namespace tessera::detail {

namespace {

// A place in `flat` that is not a view to autograd: a gradient that is one could not be detached in
// place, which Optimizer::zero_grad does.
at::Tensor place(const at::Tensor& flat, std::int64_t offset, at::IntArrayRef sizes) {
  return at::empty({0}, flat.options())
      .set_(flat.storage(), offset, sizes, c10::contiguous_strides(sizes));
}

// Bytes of a small gradient as they are: to find out that they can be copied so costs libtorch's
// copy more than the bytes.
void copy_to(const at::Tensor& flat, std::int64_t offset, const at::Tensor& piece) {
  constexpr std::size_t kSmall = 64 << 10;
  const auto width = static_cast<std::int64_t>(flat.element_size());
  const auto bytes = static_cast<std::size_t>(piece.numel() * width);
  if (bytes == 0) return;
  if (bytes <= kSmall && piece.is_cpu() && piece.is_contiguous() && !piece.is_conj() &&
      !piece.is_neg() && !piece._is_zerotensor() && piece.scalar_type() == flat.scalar_type()) {
    std::memcpy(static_cast<char*>(flat.data_ptr()) + offset * width, piece.const_data_ptr(),
                bytes);
  } else {
    place(flat, offset, piece.sizes()).copy_(piece);
  }
}

}  // namespace

void BucketMessage::pack() {
  if (scatters_) {
    pack_scattered();
  } else {
    pack_full();
  }
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
      const at::Tensor& value = gradient.value;
      const at::Tensor piece = rows == value.size(gradient.scatter_dim)
                                   ? value
                                   : value.narrow(gradient.scatter_dim, row[i], rows);
      copy_to(flat_, offset, piece);
      row[i] += rows;
      offset += piece.numel();
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
  request_ = scatters_
                 ? scatter_.start().reduce_scatter(kept_, flat_, op_, rows_, {.name = "gradients"})
                 : group_.start().all_reduce(flat_, op_, {.name = "gradients"});
}

void BucketMessage::next() {
  if (!scatters_ || second_) return;
  request_.wait();
  flat_.reset();
  second_ = true;
  request_ =
      group_.size() > 1 ? group_.start().all_reduce(kept_, op_, {.name = "gradients"}) : Request();
}

void BucketMessage::wait() {
  next();
  request_.wait();
  for (Item& item : items_) {
    if (item.reduced.scalar_type() != item.dtype) item.reduced = item.reduced.to(item.dtype);
  }
}

}  // namespace tessera::detail

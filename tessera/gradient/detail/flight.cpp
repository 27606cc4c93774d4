#include "tessera/gradient/detail/flight.h"

#include <ATen/ops/empty.h>
#include <c10/util/strides.h>

namespace tessera::detail {

namespace {

// A place in `flat` that is not a view to autograd: a gradient that is one could not be detached in
// place, which Optimizer::zero_grad does.
at::Tensor place(const at::Tensor& flat, std::int64_t offset, at::IntArrayRef sizes) {
  return at::empty({0}, flat.options())
      .set_(flat.storage(), offset, sizes, c10::contiguous_strides(sizes));
}

}  // namespace

void Flight::pack() {
  if (scatters_) {
    pack_scattered();
  } else {
    pack_whole();
  }
  for (Item& item : items_) item.owed.value.reset();
}

void Flight::pack_whole() {
  std::int64_t numel = 0;
  for (const Item& item : items_) numel += item.owed.value.numel();
  flat_ = at::empty({numel}, items_.front().owed.value.options());
  std::int64_t offset = 0;
  for (Item& item : items_) {
    item.part = place(flat_, offset, item.owed.value.sizes());
    item.part.copy_(item.owed.value);
    offset += item.part.numel();
  }
}

// Rank by rank, and in each rank's stretch gradient by gradient.
void Flight::pack_scattered() {
  const int ranks = scatter_.size(), me = scatter_.rank();
  std::int64_t numel = 0;
  for (const Item& item : items_) numel += item.owed.value.numel();
  flat_ = at::empty({numel}, items_.front().owed.value.options());
  std::vector<std::int64_t> row(items_.size(), 0);
  std::int64_t offset = 0, kept_at = 0;
  rows_.assign(ranks, 0);
  for (int r = 0; r < ranks; ++r) {
    const std::int64_t begin = offset;
    for (std::size_t i = 0; i < items_.size(); ++i) {
      const OwedGradient& owed = items_[i].owed;
      const at::Tensor piece = owed.value.narrow(owed.scatter_dim, row[i], owed.rows[r]);
      place(flat_, offset, piece.sizes()).copy_(piece);
      row[i] += owed.rows[r];
      offset += piece.numel();
    }
    rows_[r] = offset - begin;
  }
  kept_ = at::empty({rows_[me]}, flat_.options());
  for (Item& item : items_) {
    auto sizes = item.owed.value.sizes().vec();
    sizes[item.owed.scatter_dim] = item.owed.rows[me];
    item.part = place(kept_, kept_at, sizes);
    kept_at += item.part.numel();
  }
}

void Flight::start() {
  request_ = scatters_
                 ? scatter_.start().reduce_scatter(kept_, flat_, op_, rows_, {.name = "gradients"})
                 : group_.start().all_reduce(flat_, op_, {.name = "gradients"});
}

void Flight::next() {
  if (!scatters_ || second_) return;
  request_.wait();
  flat_.reset();
  second_ = true;
  request_ =
      group_.size() > 1 ? group_.start().all_reduce(kept_, op_, {.name = "gradients"}) : Request();
}

void Flight::wait() {
  next();
  request_.wait();
}

}  // namespace tessera::detail

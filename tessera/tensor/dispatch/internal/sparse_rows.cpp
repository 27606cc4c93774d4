#include "tessera/tensor/dispatch/internal/sparse_rows.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/add.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/dispatch/internal/parameter_source.h"
#include "tessera/tensor/errors.h"

namespace tessera::detail {

at::Tensor summed_rows(const at::Tensor& ids, const at::Tensor& values, at::IntArrayRef shape,
                       bool distinct) {
  const LocalCallGuard guard;
  at::Tensor rows = at::_sparse_coo_tensor_unsafe(ids.unsqueeze(0), values.contiguous(), shape,
                                                  values.options().layout(at::kSparse), false);
  if (!distinct && rows._nnz() > 1) return rows.coalesce();
  rows._coalesced_(true);
  return rows;
}

at::Tensor with_dense_locals(const at::Tensor& t) {
  const ShardMeta& meta = meta_or_throw(t);
  if (!meta.local.is_sparse()) return t;
  const LocalCallGuard guard;
  return wrap_fresh(meta.local.to_dense(), meta.layout);
}

namespace {

at::Tensor like(const at::Tensor& t, const at::Tensor& local) {
  return wrap_sparse(local, meta_or_throw(t).spec());
}

void become(const at::Tensor& t, const at::Tensor& local) {
  install(t, local, meta_or_throw(t).layout);
}

// Autograd's accumulation asks for these two, of this rank, and whether anybody else has them: then
// it keeps a copy of the tensor, and not a sparse one that it makes of them.
at::Tensor sparse_indices(const at::Tensor& t) {
  const LocalCallGuard guard;
  return meta_or_throw(t).local._indices();
}
at::Tensor sparse_values(const at::Tensor& t) {
  const LocalCallGuard guard;
  return meta_or_throw(t).local._values();
}

// Of this rank as well, which is what Python prints.
std::int64_t sparse_nnz(const at::Tensor& t) { return meta_or_throw(t).local._nnz(); }

at::Tensor sparse_clone(const at::Tensor& t, std::optional<at::MemoryFormat>) {
  const LocalCallGuard guard;
  return like(t, meta_or_throw(t).local.clone());
}

at::Tensor sparse_detach(const at::Tensor& t) { return like(t, meta_or_throw(t).local); }

bool sparse(const at::Tensor& t) {
  const ShardMeta* meta = meta_of(t);
  return meta && meta->local.is_sparse();
}

at::Tensor sparse_cast(const at::Tensor& t, std::optional<at::ScalarType> dtype,
                       std::optional<at::Layout> layout, std::optional<at::Device> device,
                       std::optional<bool>, bool, std::optional<at::MemoryFormat>) {
  if (!sparse(t))  // who asks for a sparse layout is led here too
    throw ShardingError(
        "aten::_to_copy: a sharded tensor is not made sparse: take its values first (full_tensor)");
  const at::Tensor& local = meta_or_throw(t).local;
  if ((layout && *layout != at::kSparse) || (device && *device != local.device()))
    throw ShardingError("a sparse gradient of a sharded table keeps its layout and device");
  const LocalCallGuard guard;
  return like(t, local.to(dtype.value_or(local.scalar_type())));
}

// A sum with what lies elsewhere or is dense is dense.
bool alike(const at::Tensor& a, const at::Tensor& b) {
  return meta_of(a) && sparse(b) && meta_of(a)->spec() == meta_of(b)->spec() &&
         a.scalar_type() == b.scalar_type();
}
at::Tensor dense(const at::Tensor& t) { return meta_of(t) ? with_dense_locals(t) : t; }

at::Tensor sum_of_rows(const at::Tensor& a, const at::Tensor& b, const at::Scalar& alpha) {
  const LocalCallGuard guard;
  return meta_of(a)->local.add(meta_of(b)->local, alpha).coalesce();
}

at::Tensor sparse_add(const at::Tensor& a, const at::Tensor& b, const at::Scalar& alpha) {
  if (sparse(a) && alike(a, b)) return like(a, sum_of_rows(a, b, alpha));
  return at::add(dense(a), dense(b), alpha);
}

at::Tensor& sparse_add_(at::Tensor& a, const at::Tensor& b, const at::Scalar& alpha) {
  if (sparse(a)) {
    if (!alike(a, b))
      throw ShardingError(
          "what is added in place to the sparse gradient of a sharded table is one itself, with "
          "its placements: use to_dense() first");
    become(a, sum_of_rows(a, b, alpha));
  } else if (alike(a, b) && a.is_contiguous()) {
    const LocalCallGuard guard;
    meta_of(a)->local.add_(meta_of(b)->local, alpha);
    wrote_shard(a);
  } else {
    a.add_(dense(b), alpha);
  }
  return a;
}

// By one number, which is no tensor or has no dims.
at::Tensor factor(const at::Tensor& by) {
  const ShardMeta* meta = meta_of(by);
  if (by.dim() > 0 || (meta && !meta->spec().is_replicated()))
    throw ShardingError("the sparse gradient of a sharded table is multiplied by numbers alone");
  return meta ? meta->local : by;
}
at::Scalar factor(const at::Scalar& by) { return by; }

at::Tensor sparse_mul(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor &t = sparse(a) ? a : b, &by = sparse(a) ? b : a;
  const LocalCallGuard guard;
  return like(t, meta_or_throw(t).local.mul(factor(by)));
}
at::Tensor sparse_div(const at::Tensor& t, const at::Tensor& by) {
  const LocalCallGuard guard;
  return like(t, meta_or_throw(t).local.div(factor(by)));
}
template <class By>
at::Tensor& sparse_mul_(at::Tensor& t, const By& by) {
  const LocalCallGuard guard;
  become(t, meta_or_throw(t).local.mul(factor(by)));
  return t;
}
template <class By>
at::Tensor& sparse_div_(at::Tensor& t, const By& by) {
  const LocalCallGuard guard;
  become(t, meta_or_throw(t).local.div(factor(by)));
  return t;
}

at::Tensor& sparse_zero_(at::Tensor& t) {
  const at::Tensor& local = meta_or_throw(t).local;
  const LocalCallGuard guard;
  become(t, at::zeros(local.sizes(), local.options()).coalesce());
  return t;
}

at::Tensor sparse_to_dense(const at::Tensor& t, std::optional<at::ScalarType> dtype,
                           std::optional<bool>) {
  const at::Tensor made = with_dense_locals(t);
  return dtype ? made.to(*dtype) : made;
}

// What optimizers ask first that go on with this rank's indices and the global shape.
bool refused(const at::Tensor&) {
  throw ShardingError(
      "the sparse gradient of a sharded table knows sums and multiples alone: use tessera's "
      "SparseAdam or RowwiseAdagrad, SGD without momentum, or to_local() for this rank's rows");
}

// Not as views that autograd makes of them, which nobody else has.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse2, m) {
  m.impl("_indices", sparse_indices);
  m.impl("_values", sparse_values);
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse2, m) {
  m.impl("_indices", sparse_indices);
  m.impl("_values", sparse_values);
  m.impl("_nnz", sparse_nnz);
  m.impl("clone", sparse_clone);
  m.impl("detach", sparse_detach);
  m.impl("_to_copy", sparse_cast);
  m.impl("add.Tensor", sparse_add);
  m.impl("add_.Tensor", sparse_add_);
  m.impl("mul.Tensor", sparse_mul);
  m.impl("div.Tensor", sparse_div);
  m.impl("mul_.Tensor", sparse_mul_<at::Tensor>);
  m.impl("mul_.Scalar", sparse_mul_<at::Scalar>);
  m.impl("div_.Tensor", sparse_div_<at::Tensor>);
  m.impl("div_.Scalar", sparse_div_<at::Scalar>);
  m.impl("zero_", sparse_zero_);
  m.impl("_to_dense", sparse_to_dense);
  m.impl("is_coalesced", refused);
}

}  // namespace
}  // namespace tessera::detail

/* Fortran's arrays by the descriptors that the compiler passes (ISO_Fortran_binding.h): any rank, any
 * section, never copied. The first dim of an array is the first dim of its tensor. */

#include <ISO_Fortran_binding.h>

#include "tessera/c/detail/refuse.h"
#include "tessera/c/tessera.h"

/* An array and the room for its shape and strides. */
typedef struct {
  tessera_array array;
  int64_t shape[CFI_MAX_RANK], strides[CFI_MAX_RANK];
} described;

static tessera_dtype dtype_of(CFI_type_t type) {
  if (type == CFI_type_float) return TESSERA_FLOAT32;
  if (type == CFI_type_double) return TESSERA_FLOAT64;
  if (type == CFI_type_int32_t) return TESSERA_INT32;
  if (type == CFI_type_int64_t) return TESSERA_INT64;
  return TESSERA_AS_SAVED;
}

static tessera_result describe(const char* name, const CFI_cdesc_t* from, described* to) {
  const tessera_dtype dtype = dtype_of(from->type);
  if (dtype == TESSERA_AS_SAVED)
    return tessera_refuse(name, "the array is neither real32, real64, int32 nor int64");
  to->array.data = from->base_addr;
  to->array.dtype = dtype;
  to->array.dims = from->rank;
  to->array.shape = to->shape;
  to->array.order = TESSERA_COLUMN_MAJOR;
  int64_t next = (int64_t)from->elem_len;
  int gaps = 0;
  for (int d = 0; d < from->rank; ++d) {
    to->shape[d] = from->dim[d].extent;
    if (to->shape[d] < 0)
      return tessera_refuse(name, "the array is assumed-size (*): its last extent is not known");
    if (from->dim[d].sm % (CFI_index_t)from->elem_len != 0)
      return tessera_refuse(name,
                            "elements are not a whole number of elements apart: an array of a "
                            "component of mixed types cannot be shared");
    to->strides[d] = from->dim[d].sm / (CFI_index_t)from->elem_len;
    if (to->shape[d] > 1 && from->dim[d].sm != next) gaps = 1;
    next *= to->shape[d];
  }
  to->array.strides = gaps ? to->strides : NULL;
  return TESSERA_OK;
}

tessera_result tessera_field_of_descriptor(tessera_mesh mesh, CFI_cdesc_t* array,
                                           const int64_t* before, const int64_t* after,
                                           const int* axes, tessera_tensor* field) {
  described block;
  const tessera_result wrong = describe("tessera_field", array, &block);
  *field = NULL;
  return wrong ? wrong : tessera_field(mesh, &block.array, before, after, axes, field);
}

tessera_result tessera_all_reduce_of_descriptor(tessera_group group, CFI_cdesc_t* array, int op) {
  described all;
  const tessera_result wrong = describe("tessera_all_reduce", array, &all);
  return wrong ? wrong : tessera_all_reduce(group, &all.array, (tessera_op)op);
}

tessera_result tessera_broadcast_of_descriptor(tessera_group group, CFI_cdesc_t* array, int root) {
  described all;
  const tessera_result wrong = describe("tessera_broadcast", array, &all);
  return wrong ? wrong : tessera_broadcast(group, &all.array, root);
}

/* Fortran's last dim is the slow one: the ranks' arrays stand one after the other along it. */
static void turn(described* given) {
  const int dims = given->array.dims;
  for (int d = 0; d < dims / 2; ++d) {
    const int64_t size = given->shape[d], stride = given->strides[d];
    given->shape[d] = given->shape[dims - 1 - d];
    given->strides[d] = given->strides[dims - 1 - d];
    given->shape[dims - 1 - d] = size;
    given->strides[dims - 1 - d] = stride;
  }
  given->array.order = TESSERA_ROW_MAJOR;
}

tessera_result tessera_all_gather_of_descriptors(tessera_group group, CFI_cdesc_t* mine,
                                                 CFI_cdesc_t* all) {
  described in, out;
  tessera_result wrong = describe("tessera_all_gather", mine, &in);
  if (!wrong) wrong = describe("tessera_all_gather", all, &out);
  if (wrong) return wrong;
  turn(&in);
  turn(&out);
  return tessera_all_gather(group, &in.array, &out.array);
}

/* Points `values` at this rank's part of a tensor: bounds from 1, the strides that it has. */
tessera_result tessera_point_at_local(tessera_tensor tensor, CFI_cdesc_t* values) {
  void* data = NULL;
  tessera_dtype dtype = TESSERA_AS_SAVED;
  int dims = 0;
  int64_t shape[TESSERA_MAX_DIMS], strides[TESSERA_MAX_DIMS];
  tessera_result wrong = tessera_shape(tensor, &dims, NULL);
  if (!wrong) wrong = tessera_local(tensor, &data, &dtype, shape, strides, NULL);
  if (wrong) return wrong;
  if (dims != values->rank || dtype != dtype_of(values->type))
    return tessera_refuse("tessera_local", "the pointer has another rank or kind than the tensor");
  values->base_addr = data;
  for (int d = 0; d < dims; ++d) {
    values->dim[d].lower_bound = 1;
    values->dim[d].extent = (CFI_index_t)shape[d];
    values->dim[d].sm = (CFI_index_t)strides[d] * (CFI_index_t)values->elem_len;
  }
  return TESSERA_OK;
}

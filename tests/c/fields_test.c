/* Fields of a solver's memory: drawn blocks with ghost cells, in both orders and with strides,
 * beside what the indices of the whole array say. */
#include "support.h"

enum { FIELDS = 3 };

/* Different for every cell, and for no two dims alike. */
static double value_at(int64_t i, int64_t j, int64_t k) {
  return 0.25 + (double)i + 1e3 * (double)j + 1e6 * (double)k;
}

typedef struct {
  parts of;
  int64_t before[3], after[3], shape[3], strides[3];
  int strided;
  double* memory;
  tessera_array array;
} block;

static double* cell(const block* b, int64_t i, int64_t j, int64_t k) {
  return &b->memory[i * b->strides[0] + j * b->strides[1] + k * b->strides[2]];
}

static void draw_block(block* b, parts of, unsigned long long* seed) {
  b->of = of;
  for (int d = 0; d < 3; ++d) {
    b->before[d] = d < 2 ? draw(seed, 3) : 0;
    b->after[d] = d < 2 ? draw(seed, 3) : 0;
    b->shape[d] = (d < 2 ? of.own[d] : FIELDS) + b->before[d] + b->after[d];
  }
  b->array = (tessera_array){NULL, TESSERA_FLOAT64, 3, b->shape, NULL, TESSERA_ROW_MAJOR};
  if (draw(seed, 2)) b->array.order = TESSERA_COLUMN_MAJOR;
  b->strided = draw(seed, 3) == 0;
  int64_t next = b->strided ? 2 : 1;
  for (int i = 0; i < 3; ++i) {
    const int d = b->array.order == TESSERA_COLUMN_MAJOR ? i : 2 - i;
    b->strides[d] = next;
    next *= b->shape[d] > 0 ? b->shape[d] : 1;
    if (b->strided) next += 3;
  }
  if (b->strided) b->array.strides = b->strides;
  b->memory = malloc((size_t)(next + 1) * sizeof(double));
  for (int64_t e = 0; e <= next; ++e) b->memory[e] = -7;
  b->array.data = b->memory;
  for (int64_t i = 0; i < of.own[0]; ++i)
    for (int64_t j = 0; j < of.own[1]; ++j)
      for (int64_t k = 0; k < FIELDS; ++k)
        *cell(b, i + b->before[0], j + b->before[1], k) =
            value_at(of.first[0] + i, of.first[1] + j, k);
}

static tessera_tensor field_of(tessera_mesh mesh, block* b) {
  const int axes[] = {0, 1, -1};
  tessera_tensor field = NULL;
  OK(tessera_field(mesh, &b->array, b->before, b->after, axes, &field));
  return field;
}

/* The index that a cell beyond the edges has its value of; -1: zero, -2: it stays. */
static int64_t resolved(int64_t i, int64_t n, tessera_edge edge) {
  if (i >= 0 && i < n) return i;
  switch (edge) {
    case TESSERA_EDGE_CIRCULAR:
      return ((i % n) + n) % n;
    case TESSERA_EDGE_REPLICATE:
      return i < 0 ? 0 : n - 1;
    case TESSERA_EDGE_REFLECT: {
      if (n == 1) return 0;
      const int64_t period = 2 * (n - 1), at = ((i % period) + period) % period;
      return at < n ? at : period - at;
    }
    case TESSERA_EDGE_KEEP:
      return -2;
    default:
      return -1;
  }
}

static void check_ghosts(const block* b, const tessera_edge* edges) {
  int wrong = 0;
  for (int64_t i = 0; i < b->shape[0]; ++i)
    for (int64_t j = 0; j < b->shape[1]; ++j)
      for (int64_t k = 0; k < FIELDS; ++k) {
        const int64_t x = resolved(b->of.first[0] + i - b->before[0], b->of.whole[0], edges[0]);
        const int64_t y = resolved(b->of.first[1] + j - b->before[1], b->of.whole[1], edges[1]);
        double wanted = value_at(x, y, k);
        if (x == -1 || y == -1) wanted = 0;
        if (x == -2 || y == -2) wanted = -7;
        wrong += *cell(b, i, j, k) != wanted;
      }
  TRUE(wrong == 0);
}

static void check_description(const block* b, tessera_tensor field) {
  int dims = 0;
  int64_t shape[TESSERA_MAX_DIMS], strides[TESSERA_MAX_DIMS], offset[TESSERA_MAX_DIMS];
  OK(tessera_shape(field, &dims, shape));
  TRUE(dims == 3 && shape[0] == b->of.whole[0] && shape[1] == b->of.whole[1] && shape[2] == FIELDS);
  void* data = NULL;
  tessera_dtype dtype = TESSERA_AS_SAVED;
  OK(tessera_local(field, &data, &dtype, shape, strides, offset));
  TRUE(dtype == TESSERA_FLOAT64);
  TRUE(shape[0] == b->of.own[0] && shape[1] == b->of.own[1] && shape[2] == FIELDS);
  TRUE(offset[0] == b->of.first[0] && offset[1] == b->of.first[1] && offset[2] == 0);
  if (shape[0] > 0 && shape[1] > 0) {
    TRUE(data == cell(b, b->before[0], b->before[1], 0)); /* no copy */
    for (int d = 0; d < 3; ++d) TRUE(shape[d] == 1 || strides[d] == b->strides[d]);
  }
}

/* Into a block of the transposed array, with other ghost cells and in another order. */
static void check_transposed(tessera_mesh mesh, tessera_tensor field, const block* b,
                             unsigned long long* seed) {
  tessera_tensor turned = NULL, other = NULL;
  const int from[] = {1, 0, 2}, axes[] = {1, 0, -1};
  OK(tessera_arrange(field, 3, from, &turned));
  block t;
  draw_block(&t, b->of, seed);
  free(t.memory);
  const int64_t own[] = {b->of.own[1], b->of.own[0], FIELDS};
  int64_t count = 1;
  for (int d = 0; d < 3; ++d) count *= own[d];
  double* memory = malloc((size_t)(count + 1) * sizeof(double));
  const tessera_array array = {memory, TESSERA_FLOAT64, 3, own, NULL, t.array.order};
  OK(tessera_field(mesh, &array, NULL, NULL, axes, &other));
  OK(tessera_copy(other, turned));
  int wrong = 0;
  for (int64_t j = 0; j < own[0]; ++j)
    for (int64_t i = 0; i < own[1]; ++i)
      for (int64_t k = 0; k < FIELDS; ++k) {
        const int64_t at = t.array.order == TESSERA_COLUMN_MAJOR ? j + own[0] * (i + own[1] * k)
                                                                 : (j * own[1] + i) * FIELDS + k;
        wrong += memory[at] != value_at(b->of.first[0] + i, b->of.first[1] + j, k);
      }
  TRUE(wrong == 0);
  OK(tessera_free(turned));
  OK(tessera_free(other));
  free(memory);
}

static void collectives(tessera_job job) {
  int rank = 0, ranks = 1;
  OK(tessera_rank(job, &rank, &ranks));
  int all[16];
  for (int r = 0; r < ranks; ++r) all[r] = ranks - 1 - r;
  tessera_group group = NULL;
  OK(tessera_group_create(job, ranks, all, &group));
  int at = -1, size = 0;
  OK(tessera_group_rank(group, &at, &size));
  TRUE(at == ranks - 1 - rank && size == ranks);
  float numbers[3] = {(float)rank, 1, -(float)rank};
  const int64_t three[] = {3}, rows[] = {rank, 2};
  const tessera_array sums = {numbers, TESSERA_FLOAT32, 1, three, NULL, TESSERA_ROW_MAJOR};
  OK(tessera_all_reduce(group, &sums, TESSERA_SUM));
  NEAR(numbers[0], (float)(ranks * (ranks - 1)) / 2, 0);
  NEAR(numbers[1], (float)ranks, 0);
  OK(tessera_broadcast(group, &sums, 0));
  /* Rank r has r rows, the first one none. */
  int mine[32], gathered[512];
  for (int i = 0; i < 2 * rank; ++i) mine[i] = 100 * rank + i;
  const int64_t total[] = {ranks * (ranks - 1) / 2, 2};
  const tessera_array in = {mine, TESSERA_INT32, 2, rows, NULL, TESSERA_ROW_MAJOR};
  const tessera_array out = {gathered, TESSERA_INT32, 2, total, NULL, TESSERA_ROW_MAJOR};
  OK(tessera_all_gather(group, &in, &out));
  int next = 0, wrong = 0;
  for (int r = ranks - 1; r >= 0; --r)
    for (int i = 0; i < 2 * r; ++i) wrong += gathered[next++] != 100 * r + i;
  TRUE(wrong == 0);
  OK(tessera_barrier(group));
  OK(tessera_free(group));
}

void fields(tessera_job job) {
  unsigned long long seed = 5;
  for (int round = 0; round < 12; ++round) {
    block b;
    const parts of = draw_parts(job, &seed, 5);
    /* Ghosts, order and gaps are the same on all ranks, sizes are not. */
    unsigned long long same = seed;
    draw_block(&b, of, &same);
    seed = same;
    tessera_mesh mesh = mesh_of(job, &of);
    tessera_tensor field = field_of(mesh, &b), wide = NULL, copy = NULL;
    check_description(&b, field);
    tessera_edge edges[3] = {(tessera_edge)draw(&seed, 5), (tessera_edge)draw(&seed, 5),
                             TESSERA_EDGE_ZERO};
    OK(tessera_fill_ghosts(field, edges));
    check_ghosts(&b, edges);
    const int64_t far[] = {4, 1, 0}, none[] = {0, 0, 0};
    const tessera_edge around[] = {TESSERA_EDGE_CIRCULAR, TESSERA_EDGE_CIRCULAR, TESSERA_EDGE_ZERO};
    OK(tessera_halo(field, far, none, around, &wide));
    int64_t shape[TESSERA_MAX_DIMS], strides[TESSERA_MAX_DIMS];
    void* data = NULL;
    OK(tessera_local(wide, &data, NULL, shape, strides, NULL));
    TRUE(shape[0] == of.own[0] + 4 && shape[1] == of.own[1] + 1 && shape[2] == FIELDS);
    if (shape[1] > 0)
      NEAR(((double*)data)[strides[2]],
           value_at(resolved(of.first[0] - 4, of.whole[0], TESSERA_EDGE_CIRCULAR),
                    resolved(of.first[1] - 1, of.whole[1], TESSERA_EDGE_CIRCULAR), 1),
           0);
    check_transposed(mesh, field, &b, &seed);
    OK(tessera_clone(field, &copy));
    tessera_tensor loss = NULL;
    double value = -1;
    OK(tessera_loss("mse", field, copy, &loss));
    OK(tessera_value(loss, &value));
    NEAR(value, 0, 0);
    OK(tessera_free(loss));
    OK(tessera_free(copy));
    OK(tessera_free(wide));
    OK(tessera_free(field));
    OK(tessera_free(mesh));
    free(b.memory);
  }
  collectives(job);
}

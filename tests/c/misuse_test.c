/* What callers do wrong: a code and a sentence, on every rank where others would wait, and never a
 * crash. */
#include <pthread.h>

#include "support.h"

static tessera_tensor small_field(tessera_mesh mesh, double* memory, int64_t cells) {
  const tessera_array array = {memory, TESSERA_FLOAT64, 1, &cells, NULL, TESSERA_ROW_MAJOR};
  const int axes[] = {0};
  tessera_tensor field = NULL;
  OK(tessera_field(mesh, &array, NULL, NULL, axes, &field));
  return field;
}

static tessera_mesh line(tessera_job job) {
  tessera_mesh mesh = NULL;
  const char* names[] = {"x"};
  const int sizes[] = {-1};
  OK(tessera_mesh_create(job, 1, names, sizes, NULL, &mesh));
  return mesh;
}

static void handles(tessera_job job) {
  tessera_mesh mesh = line(job), other = NULL;
  double memory[] = {1, 2, 3};
  tessera_tensor field = small_field(mesh, memory, 3), copy = NULL;
  int dims = 0;
  CODE(tessera_shape(NULL, &dims, NULL), TESSERA_ERROR_HANDLE);
  SAYS("tensor is NULL");
  CODE(tessera_shape((tessera_tensor)mesh, &dims, NULL), TESSERA_ERROR_HANDLE);
  SAYS("is a mesh, where a tensor is wanted");
  CODE(tessera_shape((tessera_tensor)(void*)memory, &dims, NULL), TESSERA_ERROR_HANDLE);
  SAYS("no handle of Tessera");
  OK(tessera_clone(field, &copy));
  OK(tessera_free(copy));
  CODE(tessera_free(copy), TESSERA_ERROR_HANDLE);
  SAYS("freed already");
  CODE(tessera_shape(copy, &dims, NULL), TESSERA_ERROR_HANDLE);
  CODE(tessera_free(job), TESSERA_ERROR_HANDLE);
  SAYS("tessera_end");
  CODE(tessera_clone(field, NULL), TESSERA_ERROR_ARGUMENT);
  OK(tessera_free(NULL));
  const char* names[] = {"x", "y"};
  const int sizes[] = {64, 2}, few[] = {0, 1};
  CODE(tessera_mesh_create(job, 2, names, sizes, NULL, &other), TESSERA_ERROR_ARGUMENT);
  CODE(tessera_mesh_create(job, 2, names, few, few, &other), TESSERA_ERROR_ARGUMENT);
  CODE(tessera_mesh_create(job, 2, NULL, sizes, NULL, &other), TESSERA_ERROR_ARGUMENT);
  CODE(tessera_mesh_create(job, 0, names, sizes, NULL, &other), TESSERA_ERROR_ARGUMENT);
  CODE(tessera_mesh_create(NULL, 2, names, sizes, NULL, &other), TESSERA_ERROR_HANDLE);
  TRUE(other == NULL);
  tessera_group group = NULL;
  CODE(tessera_group_create(job, 0x7fffffff, few, &group), TESSERA_ERROR_ARGUMENT);
  SAYS("a group has 1 to");
  TRUE(strcmp(tessera_result_name((tessera_result)99), "no result of Tessera") == 0);
  OK(tessera_free(field));
  OK(tessera_free(mesh));
}

/* Wrong on all ranks alike: each has its own sentence, and the job goes on. */
static void arrays(tessera_job job) {
  tessera_mesh mesh = line(job);
  double memory[64];
  const int64_t shape[] = {4, 4}, overlap[] = {1, 2}, negative[] = {-1, 4}, minus[] = {-4, 1};
  const int64_t huge[] = {INT64_MAX / 2, 4}, two[] = {3, 0};
  const int64_t most[] = {INT64_MAX, INT64_MAX, 0}, ones[] = {1, 1, 1};
  const int axes[] = {0, -1, -1}, both[] = {0, 0}, far[] = {0, 7};
  tessera_tensor field = NULL;
  tessera_array array = {memory, TESSERA_FLOAT64, 2, shape, overlap, TESSERA_ROW_MAJOR};
#define REFUSED(words)                                                                 \
  CODE(tessera_field(mesh, &array, NULL, NULL, axes, &field), TESSERA_ERROR_ARGUMENT); \
  SAYS(words)
  REFUSED("overlap");
  array.strides = minus;
  REFUSED("overlap");
  array.strides = NULL;
  array.dtype = (tessera_dtype)17;
  REFUSED("dtype is 17");
  array.dtype = TESSERA_AS_SAVED;
  REFUSED("dtype is 0");
  array.dtype = TESSERA_FLOAT64;
  array.shape = negative;
  REFUSED("at least 0");
  array.shape = huge;
  REFUSED("memory");
  array.shape = most;
  array.strides = ones;
  array.dims = 3;
  REFUSED("memory");
  array.strides = NULL;
  array.dims = 2;
  array.shape = NULL;
  REFUSED("shape is NULL");
  array.shape = shape;
  array.order = (tessera_order)5;
  REFUSED("order is 5");
  array.order = TESSERA_ROW_MAJOR;
  array.dims = 9;
  REFUSED("9 dims");
  array.dims = 2;
  array.data = NULL;
  REFUSED("no memory");
  array.data = memory;
  CODE(tessera_field(mesh, &array, two, two, axes, &field), TESSERA_ERROR_ARGUMENT);
  CODE(tessera_field(mesh, &array, most, most, axes, &field), TESSERA_ERROR_ARGUMENT);
  CODE(tessera_field(mesh, &array, NULL, NULL, both, &field), TESSERA_ERROR_ARGUMENT);
  CODE(tessera_field(mesh, &array, NULL, NULL, far, &field), TESSERA_ERROR_ARGUMENT);
  CODE(tessera_field(mesh, &array, NULL, NULL, NULL, &field), TESSERA_ERROR_ARGUMENT);
  CODE(tessera_field(mesh, NULL, NULL, NULL, axes, &field), TESSERA_ERROR_ARGUMENT);
  TRUE(field == NULL);
  OK(tessera_free(mesh));
}

static void models(tessera_job job) {
  tessera_mesh mesh = line(job);
  tessera_model model = NULL;
  tessera_optimizer optimizer = NULL;
  CODE(tessera_model_load(mesh, "no/such/file.pt", TESSERA_AS_SAVED, &model), TESSERA_ERROR_FILE);
  SAYS("no/such/file.pt");
  CODE(tessera_model_create(mesh, "nett", NULL, TESSERA_FLOAT64, &model), TESSERA_ERROR_ARGUMENT);
  SAYS("no model is named 'nett'");
  CODE(tessera_model_create(mesh, "net", NULL, TESSERA_INT32, &model), TESSERA_ERROR_ARGUMENT);
  OK(tessera_model_create(mesh, "net", NULL, TESSERA_FLOAT64, &model));
  CODE(tessera_optimizer_create(model, "adamm", NULL, &optimizer), TESSERA_ERROR_ARGUMENT);
  CODE(tessera_optimizer_create(model, "adam", "lr", &optimizer), TESSERA_ERROR_ARGUMENT);
  CODE(tessera_optimizer_create(model, "adam", "lr=x", &optimizer), TESSERA_ERROR_ARGUMENT);
  CODE(tessera_optimizer_create(model, "adam", "lr=1 lr=2", &optimizer), TESSERA_ERROR_ARGUMENT);
  CODE(tessera_optimizer_create(model, "adam", "momentum=1", &optimizer), TESSERA_ERROR_ARGUMENT);
  SAYS("no option is named 'momentum'");
  TRUE(optimizer == NULL);
  OK(tessera_free(model));
  OK(tessera_free(mesh));
}

void misuse(tessera_job job) {
  handles(job);
  arrays(job);
  models(job);
}

/* One rank alone is wrong: the others are told, and all go on together. */
void told(tessera_job job) {
  int rank = 0, ranks = 1;
  OK(tessera_rank(job, &rank, &ranks));
  if (ranks == 1) return;
  int all[16];
  for (int r = 0; r < ranks; ++r) all[r] = r;
  tessera_group group = NULL;
  OK(tessera_group_create(job, ranks, all, &group));
  for (int round = 0; round < 2; ++round) {
    tessera_mesh mesh = line(job);
    double memory[] = {1, 2, 3};
    int64_t cells = 3;
    const int64_t stride[] = {0};
    tessera_array array = {memory, TESSERA_FLOAT64, 1, &cells, NULL, TESSERA_ROW_MAJOR};
    const int axes[] = {0};
    tessera_tensor field = NULL;
    const int wrong = rank == ranks - 1;
    if (wrong) array.strides = stride;
    const tessera_result got = round == 0 ? tessera_field(mesh, &array, NULL, NULL, axes, &field)
                                          : tessera_all_reduce(group, &array, TESSERA_SUM);
    TRUE(got == (wrong ? TESSERA_ERROR_ARGUMENT : TESSERA_ERROR_PEER_FAILED));
    SAYS("elements overlap");
    OK(tessera_barrier(group));
    array.strides = NULL;
    OK(tessera_field(mesh, &array, NULL, NULL, axes, &field));
    /* Other dims on one rank: all see it. */
    if (wrong) array.dtype = TESSERA_INT64;
    CODE(tessera_field(mesh, &array, NULL, NULL, axes, &field), TESSERA_ERROR_MISMATCH);
    OK(tessera_barrier(group));
    OK(tessera_free(mesh));
  }
  OK(tessera_free(group));
}

/* ---- drawn ---- */

enum { POOL = 24 };
static void* pool[POOL];
static double numbers[64];

static void* any_handle(unsigned long long* seed) {
  switch (draw(seed, 8)) {
    case 0:
      return NULL;
    case 1:
      return numbers;
    case 2: {
      const uintptr_t high = (uintptr_t)draw(seed, 1u << 31), low = draw(seed, 1u << 31);
      return (void*)((high << 33) ^ low); /* NOLINT(performance-no-int-to-ptr) */
    }
    default:
      return pool[draw(seed, POOL)];
  }
}

static const char* any_text(unsigned long long* seed) {
  static const char* const texts[] = {NULL, "", "x", "net", "adam", "lr=1", "mse", "\xff\xfe", "/"};
  return texts[draw(seed, sizeof texts / sizeof *texts)];
}

static void keep(unsigned long long* seed, void* handle) {
  if (!handle) return;
  pool[draw(seed, POOL)] = handle; /* what was there is lost until the end of the job */
}

static tessera_array any_array(unsigned long long* seed, int64_t* shape, int64_t* strides) {
  for (int d = 0; d < 3; ++d) {
    shape[d] = (int64_t)draw(seed, 6) - 1;
    strides[d] = (int64_t)draw(seed, 9) - 1;
  }
  const tessera_array array = {draw(seed, 5) ? numbers : NULL, (tessera_dtype)draw(seed, 6),
                               (int)draw(seed, 5) - 1,         draw(seed, 9) ? shape : NULL,
                               draw(seed, 2) ? strides : NULL, (tessera_order)draw(seed, 3)};
  return array;
}

/* What a drawn call gets: anything. */
typedef struct {
  int64_t shape[3], strides[3];
  tessera_array array;
  int integers[16], number;
  tessera_edge edges[3];
  void *h, *g, *made;
  tessera_tensor in[2], out[2];
} drawn;

static drawn draw_arguments(unsigned long long* seed) {
  drawn d;
  d.array = any_array(seed, d.shape, d.strides);
  d.number = (int)draw(seed, 5) - 1;
  for (int i = 0; i < 16; ++i) d.integers[i] = (int)draw(seed, 4) - 1;
  for (int i = 0; i < 3; ++i) d.edges[i] = (tessera_edge)draw(seed, 6);
  d.h = any_handle(seed);
  d.g = any_handle(seed);
  d.made = NULL;
  for (int i = 0; i < 2; ++i) {
    d.in[i] = any_handle(seed);
    d.out[i] = NULL;
  }
  return d;
}

/* The array points at its own copy of the shape. */
static const tessera_array* array_of(drawn* d) {
  if (d->array.shape) d->array.shape = d->shape;
  if (d->array.strides) d->array.strides = d->strides;
  return &d->array;
}

static tessera_result call_on_ranks(unsigned long long* seed, drawn* d) {
  const char* names[] = {"a", draw(seed, 2) ? "b" : "a", NULL};
  char name[8];
  switch (draw(seed, 10)) {
    case 0:
      return tessera_mesh_create(d->h, d->number, names, d->integers, NULL, (void*)&d->made);
    case 1:
      return tessera_mesh_create(d->h, 1, names, d->integers, d->integers + 4, (void*)&d->made);
    case 2:
      return tessera_mesh_group(d->h, d->number, (void*)&d->made);
    case 3:
      return tessera_group_create(d->h, d->number, d->integers, (void*)&d->made);
    case 4:
      return tessera_all_reduce(d->h, array_of(d), (tessera_op)draw(seed, 5));
    case 5:
      return tessera_broadcast(d->h, array_of(d), d->number);
    case 6:
      return tessera_all_gather(d->h, array_of(d), array_of(d));
    case 7:
      return tessera_barrier(d->h);
    case 8:
      return tessera_latest(d->h, NULL, sizeof name, name);
    default:
      return tessera_free(draw(seed, 3) ? NULL : d->h);
  }
}

static tessera_result call_on_tensors(unsigned long long* seed, drawn* d) {
  const int64_t counts[3] = {0, 1, 0};
  int64_t many[TESSERA_MAX_DIMS];
  double real = 0;
  switch (draw(seed, 11)) {
    case 0:
    case 1: {
      const int64_t* before = draw(seed, 2) ? counts : NULL;
      return tessera_field(d->h, array_of(d), before, NULL, d->integers, (void*)&d->made);
    }
    case 2:
      return tessera_fill_ghosts(d->h, d->edges);
    case 3:
      return tessera_halo(d->h, counts, counts, d->edges, (void*)&d->made);
    case 4:
      return tessera_clone(d->h, (void*)&d->made);
    case 5:
      return tessera_arrange(d->h, d->number + 2, d->integers, (void*)&d->made);
    case 6:
      return tessera_copy(d->h, d->g);
    case 7:
      return tessera_value(d->h, draw(seed, 9) ? &real : NULL);
    case 8:
      return tessera_local(d->h, NULL, NULL, many, many, NULL);
    case 9:
      return tessera_require_gradient(d->h);
    default:
      return tessera_gradient(d->h, (void*)&d->made);
  }
}

static tessera_result call_on_models(unsigned long long* seed, drawn* d) {
  tessera_step step;
  const char *text = any_text(seed), *more = any_text(seed);
  const tessera_dtype dtype = (tessera_dtype)draw(seed, 6);
  switch (draw(seed, 12)) {
    case 0:
      return tessera_model_create(d->h, text, more, dtype, (void*)&d->made);
    case 1:
      return tessera_model_load(d->h, text, TESSERA_AS_SAVED, (void*)&d->made);
    case 2:
      return tessera_forward(d->h, d->number, d->in, 1, (void*)&d->made);
    case 3:
      return tessera_predict(d->h, 1, d->in, 2, d->out);
    case 4:
      return tessera_loss(text, d->h, d->g, (void*)&d->made);
    case 5:
      return tessera_backward(d->h, draw(seed, 2) ? d->g : NULL);
    case 6:
      return tessera_optimizer_create(d->h, text, more, (void*)&d->made);
    case 7:
      return tessera_optimizer_step(d->h);
    case 8:
      return tessera_session_create(d->h, text, (void*)&d->made);
    case 9:
      return tessera_session_backward(d->h, d->g, d->number, d->number);
    case 10:
      return tessera_session_step(d->h, &step);
    default:
      return tessera_state_add(d->h, text, d->g);
  }
}

/* One call with anything. Negative answers are the rule; what counts is that there is one. */
static tessera_result any_call(unsigned long long* seed) {
  drawn d = draw_arguments(seed);
  tessera_result result = TESSERA_OK;
  switch (draw(seed, 3)) {
    case 0:
      result = call_on_ranks(seed, &d);
      break;
    case 1:
      result = call_on_tensors(seed, &d);
      break;
    default:
      result = call_on_models(seed, &d);
      break;
  }
  keep(seed, d.made);
  keep(seed, d.out[0]);
  keep(seed, d.out[1]);
  return result;
}

void drawn_misuse(tessera_job job, unsigned long long seed, int calls) {
  for (int i = 0; i < 64; ++i) numbers[i] = i;
  tessera_mesh mesh = mesh_alone(job);
  double* memory = numbers;
  for (int i = 0; i < POOL; ++i) pool[i] = i % 3 ? (void*)mesh : (void*)job;
  pool[1] = small_field(line(job), memory, 4);
  int refused = 0, silent = 0;
  for (int i = 0; i < calls; ++i) {
    const tessera_result result = any_call(&seed);
    if (result == TESSERA_OK) continue;
    ++refused;
    silent += strlen(tessera_message()) < 20 || result < 0 || result > TESSERA_ERROR_OTHER;
  }
  TRUE(silent == 0);
  TRUE(refused > calls / 3 && refused < calls);
}

/* ---- threads and the end ---- */

typedef struct {
  tessera_job job;
  tessera_tensor field;
  int busy, done, other;
} shared;

static void* many_calls(void* given) {
  shared* s = given;
  for (int i = 0; i < 4000; ++i) {
    tessera_tensor copy = NULL;
    const tessera_result result = tessera_clone(s->field, &copy);
    if (result == TESSERA_ERROR_THREAD)
      s->busy += strstr(tessera_message(), "another thread") != NULL;
    else if (result == TESSERA_OK)
      ++s->done;
    else
      ++s->other;
    while (copy && tessera_free(copy) == TESSERA_ERROR_THREAD) continue;
  }
  return NULL;
}

void after_the_end(tessera_job job) {
  tessera_mesh mesh = line(job);
  double memory[] = {1, 2, 3};
  tessera_tensor field = small_field(mesh, memory, 3), copy = NULL;
  shared one = {job, field, 0, 0, 0}, two = one;
  pthread_t thread;
  TRUE(pthread_create(&thread, NULL, many_calls, &two) == 0);
  many_calls(&one);
  pthread_join(thread, NULL);
  TRUE(one.other == 0 && two.other == 0);
  TRUE(one.done + one.busy == 4000 && two.done + two.busy == 4000);
  OK(tessera_end(job));
  int rank = 0;
  CODE(tessera_clone(field, &copy), TESSERA_ERROR_NO_JOB);
  SAYS("whose job has ended");
  CODE(tessera_rank(job, &rank, NULL), TESSERA_ERROR_NO_JOB);
  CODE(tessera_end(job), TESSERA_ERROR_NO_JOB);
  CODE(tessera_free(mesh), TESSERA_ERROR_NO_JOB);
  CODE(tessera_clone(NULL, &copy), TESSERA_ERROR_NO_JOB);
  SAYS("no job runs");
}

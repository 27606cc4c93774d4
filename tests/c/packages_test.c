/* A compiled network on this rank's cells, and inputs and files that it must refuse. */
#include "support.h"

static tessera_model load(tessera_mesh mesh, const char* folder, const char* name,
                          tessera_result wanted, const char* words) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  tessera_model model = NULL;
  CODE(tessera_model_load(mesh, path, TESSERA_AS_SAVED, &model), wanted);
  if (words) SAYS(words);
  TRUE((model == NULL) == (wanted != TESSERA_OK));
  return model;
}

static tessera_tensor tensor(tessera_mesh mesh, void* memory, tessera_dtype dtype, int dims,
                             const int64_t* shape, const int64_t* strides) {
  const tessera_array array = {memory, dtype, dims, shape, strides, TESSERA_ROW_MAJOR};
  const int axes[] = {-1, -1, -1, -1};
  tessera_tensor field = NULL;
  OK(tessera_field(mesh, &array, NULL, NULL, axes, &field));
  return field;
}

static tessera_tensor image(tessera_tensor field) {
  const int from[] = {-1, 2, 0, 1};
  tessera_tensor made = NULL;
  OK(tessera_arrange(field, 4, from, &made));
  OK(tessera_free(field));
  return made;
}

static double value(int64_t i, int64_t j, int64_t k) { return sin(0.7 * i * i + 0.3 * j + k); }

/* Differences of a field that is divided: its ghost cells come from the neighbours. */
static void over_the_ranks(tessera_job job, const char* folder) {
  int rank = 0, ranks = 1;
  OK(tessera_rank(job, &rank, &ranks));
  const int64_t own = 3 + 2 * (rank % 2), ny = 5, shape[] = {own, ny, 3}, three = 3;
  int64_t first = 0, whole = 0;
  for (int r = 0; r < ranks; ++r) {
    if (r == rank) first = whole;
    whole += 3 + 2 * (r % 2);
  }
  const char* names[] = {"x"};
  tessera_mesh mesh = NULL;
  OK(tessera_mesh_create(job, 1, names, &ranks, NULL, &mesh));
  double* memory = malloc((size_t)(own * ny * 3) * sizeof *memory);
  for (int64_t i = 0; i < own; ++i)
    for (int64_t j = 0; j < ny; ++j)
      for (int64_t k = 0; k < 3; ++k) memory[(i * ny + j) * 3 + k] = value(first + i, j, k);
  const tessera_array array = {memory, TESSERA_FLOAT64, 3, shape, NULL, TESSERA_ROW_MAJOR};
  const int axes[] = {0, -1, -1};
  const int64_t before[] = {1, 0, 0}, after[] = {0, 0, 0};
  const tessera_edge edges[] = {TESSERA_EDGE_CIRCULAR, TESSERA_EDGE_ZERO, TESSERA_EDGE_ZERO};
  int64_t shifts[] = {1, 2, 3}, size = -1;
  tessera_tensor field = NULL, wide = NULL, in[2] = {NULL, NULL}, out[2] = {NULL, NULL};
  OK(tessera_field(mesh, &array, NULL, NULL, axes, &field));
  OK(tessera_halo(field, before, after, edges, &wide));
  in[0] = image(wide);
  in[1] = tensor(mesh, shifts, TESSERA_INT64, 1, &three, NULL);
  const tessera_model model = load(mesh, folder, "net.pt2", TESSERA_OK, NULL);
  OK(tessera_model_size(model, &size));
  TRUE(size == 0);
  OK(tessera_predict(model, 2, in, 2, out));
  double *found = NULL, sum = 0, total = NAN;
  int64_t its[TESSERA_MAX_DIMS], strides[TESSERA_MAX_DIMS];
  OK(tessera_local(out[0], (void**)&found, NULL, its, strides, NULL));
  if (!TRUE(found && its[1] == 3 && its[2] == own && its[3] == ny)) return;
  for (int64_t i = 0; i < own; ++i)
    for (int64_t j = 0; j < ny; ++j)
      for (int64_t k = 0; k < 3; ++k) {
        const double past = value((first + i + whole - 1) % whole, j, k);
        const double wanted = 2 * (value(first + i, j, k) - past) + (double)shifts[k];
        sum += wanted;
        NEAR(found[k * strides[1] + i * strides[2] + j * strides[3]], wanted, 1e-12);
      }
  OK(tessera_value(out[1], &total));
  NEAR(total, sum, 1e-10);
  if (ranks > 1) {
    OK(tessera_free(in[0]));
    in[0] = image(field);
    CODE(tessera_predict(model, 2, in, 2, out), TESSERA_ERROR_ARGUMENT);
    SAYS("tessera_halo()");
  }
  OK(tessera_free(mesh));
  free(memory);
}

static void inputs(tessera_job job, const char* folder) {
  const tessera_mesh mesh = mesh_alone(job);
  const tessera_model model = load(mesh, folder, "net.pt2", TESSERA_OK, NULL);
  enum { MOST = 200 * 5 * 3 };
  double* memory = calloc(MOST, sizeof *memory);
  int64_t shifts[] = {1, 2, 3, 4};
  const int64_t three = 3, four = 4;
  const tessera_tensor shift = tensor(mesh, shifts, TESSERA_INT64, 1, &three, NULL);
  const struct {
    int64_t shape[3], strides[3];
    const char* words; /* NULL: it is right */
  } cases[] = {{{8, 5, 3}, {15, 3, 1}, NULL},
               {{128, 64, 3}, {192, 3, 1}, NULL},
               {{7, 5, 3}, {15, 3, 1}, "of shape [1, 3, 7, 5]"},
               {{130, 5, 3}, {15, 3, 1}, "from 2 to 64"},
               {{0, 5, 3}, {15, 3, 1}, "of shape [1, 3, 0, 5]"},
               {{2, 5, 3}, {15, 3, 1}, "of shape [1, 3, 2, 5]"},
               {{8, 1, 3}, {3, 3, 1}, "of shape [1, 3, 8, 1]"},
               {{8, 5, 2}, {10, 2, 1}, "of shape [1, 2, 8, 5]"},
               {{8, 5, 3}, {15, 1, 5}, "the strides [15, 5, 15, 1]"},
               {{8, 5, 3}, {1, 8, 40}, "export it with an example"},
               {{8, 5, 3}, {20, 4, 1}, "compiled for [120, 1, 15, 3]"}};
  double* large = calloc(128 * 64 * 3, sizeof *large);
  for (size_t c = 0; c < sizeof cases / sizeof *cases; ++c) {
    tessera_tensor out[2] = {NULL, NULL};
    const tessera_tensor in[] = {
        image(tensor(mesh, large, TESSERA_FLOAT64, 3, cases[c].shape, cases[c].strides)), shift};
    CODE(tessera_predict(model, 2, in, 2, out), cases[c].words ? TESSERA_ERROR_ARGUMENT : TESSERA_OK);
    if (cases[c].words) SAYS(cases[c].words);
    TRUE((out[0] == NULL) == (cases[c].words != NULL));
  }
  tessera_tensor out[2] = {NULL, NULL};
  tessera_tensor in[] = {image(tensor(mesh, memory, TESSERA_FLOAT64, 3, cases[0].shape, NULL)), shift,
                         shift};
#define REFUSED(call, words)            \
  CODE((call), TESSERA_ERROR_ARGUMENT); \
  SAYS(words)
  REFUSED(tessera_predict(model, 1, in, 2, out), "inputs is 1, the package takes 2");
  REFUSED(tessera_predict(model, 3, in, 2, out), "inputs is 3");
  REFUSED(tessera_predict(model, 2, in, 1, out), "gives 2 tensors");
  REFUSED(tessera_forward(model, 2, in, 2, out), "no backward");
  in[1] = tensor(mesh, shifts, TESSERA_INT64, 1, &four, NULL);
  REFUSED(tessera_predict(model, 2, in, 2, out), "input 1 ('shift') is int64 of shape [4]");
  in[1] = tensor(mesh, memory, TESSERA_FLOAT64, 1, &three, NULL);
  REFUSED(tessera_predict(model, 2, in, 2, out), "compiled for int64 of shape [3]");
  in[1] = shift;
  in[0] = tensor(mesh, memory, TESSERA_FLOAT64, 3, cases[0].shape, NULL);
  REFUSED(tessera_predict(model, 2, in, 2, out), "of shape [1, 3, 2*");
  in[0] = image(tensor(mesh, memory, TESSERA_FLOAT32, 3, cases[0].shape, NULL));
  REFUSED(tessera_predict(model, 2, in, 2, out), "input 0 ('x') is float32");
  tessera_optimizer adam = NULL;
  REFUSED(tessera_optimizer_create(model, "adam", NULL, &adam), "cannot be trained");
  REFUSED(tessera_model_train(model, 1), "cannot be trained");
  OK(tessera_model_train(model, 0));
  OK(tessera_free(mesh));
  OK(tessera_free(model));
  free(memory);
  free(large);
}

static void files(tessera_job job, const char* folder) {
  const tessera_mesh mesh = mesh_alone(job);
  load(mesh, folder, "bare.pt2", TESSERA_ERROR_FILE, "tessera.save_package");
  load(mesh, folder, "code.pt2", TESSERA_ERROR_FILE, "holds no compiled network");
  load(mesh, folder, "program.pt2", TESSERA_ERROR_FILE, "holds no compiled network");
  load(mesh, folder, "text.pt2", TESSERA_ERROR_FILE, "cannot be read");
  load(mesh, folder, "order.pt2", TESSERA_ERROR_FILE, "order is [0, 1, 2, 9]");
  load(mesh, folder, "bit.pt2", TESSERA_ERROR_FILE, "is damaged");
  load(mesh, folder, "sum.pt2", TESSERA_ERROR_FILE, "sum is another");
  load(mesh, folder, "short.pt2", TESSERA_ERROR_FILE, "short.pt2");
  load(mesh, folder, "words.pt2", TESSERA_ERROR_FILE, "words.pt2");
  load(mesh, folder, "nowhere.pt2", TESSERA_ERROR_FILE, "nowhere.pt2");
  load(mesh, folder, "cpu.pt2", TESSERA_ERROR_NOT_AVAILABLE, "of another CPU");
  char path[4096];
  snprintf(path, sizeof path, "%s/net.pt2", folder);
  tessera_model model = NULL;
  CODE(tessera_model_load(mesh, path, TESSERA_FLOAT64, &model), TESSERA_ERROR_ARGUMENT);
  SAYS("TESSERA_AS_SAVED");
  OK(tessera_free(mesh));
}

void packages(tessera_job job, const char* folder) {
  over_the_ranks(job, folder);
  inputs(job, folder);
  files(job, folder);
}

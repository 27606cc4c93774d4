/* shallow_water.f90 and main.f90 in C: a solver that trains a network on its own memory while it
 * runs. The same arguments, and the same losses to round-off:
 *
 *   mpirun -n 4 shallow_water_c NETWORK.pt FOLDER WINDOWS [END_AFTER]
 */
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tessera/c/mpi.h"

enum { FIELDS = 3, STEPS_A_WINDOW = 4, UPDATES = 3 };

static const int whole[2] = {26, 19};

typedef struct {
  MPI_Comm comm;
  int grid[2], place[2], n[2], first[2];
  /* [FIELDS][n[0] + 2][n[1] + 2]: h, hu, hv, with a ghost cell all around. */
  double *state, *next;
} water;

static void ok(tessera_result result) {
  if (result == TESSERA_OK) return;
  fprintf(stderr, "%s\n", tessera_message());
  MPI_Abort(MPI_COMM_WORLD, 1);
}

static double* cell(const water* w, int f, int i, int j) {
  return &w->state[((int64_t)f * (w->n[0] + 2) + i) * (w->n[1] + 2) + j];
}

/* Earlier parts are larger, as if their cores were faster. */
static void share(int cells, int parts, int place, int* first, int* own) {
  int given = 0;
  for (int p = 0; p <= place; ++p) {
    *own = cells * (parts + 1 - p) / (parts * (parts + 3) / 2);
    if (p == parts - 1) *own = cells - given;
    *first = given;
    given += *own;
  }
}

static void begin(water* w) {
  static const double hills[3][3] = {{0.3, 0.3, 0.3}, {0.7, 0.55, 0.2}, {0.2, 0.8, 0.25}};
  const int periods[2] = {1, 1};
  int ranks = 1, rank = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  w->grid[0] = w->grid[1] = 0;
  MPI_Dims_create(ranks, 2, w->grid);
  MPI_Cart_create(MPI_COMM_WORLD, 2, w->grid, periods, 0, &w->comm);
  MPI_Comm_rank(w->comm, &rank);
  MPI_Cart_coords(w->comm, rank, 2, w->place);
  for (int d = 0; d < 2; ++d) share(whole[d], w->grid[d], w->place[d], &w->first[d], &w->n[d]);
  const size_t count = (size_t)FIELDS * (size_t)(w->n[0] + 2) * (size_t)(w->n[1] + 2);
  w->state = calloc(count, sizeof(double));
  w->next = calloc(count, sizeof(double));
  for (int i = 1; i <= w->n[0]; ++i)
    for (int j = 1; j <= w->n[1]; ++j) {
      double h = 1;
      for (int k = 0; k < 3; ++k) {
        double dx = fabs((double)(w->first[0] + i - 1) / whole[0] - hills[k][0]);
        double dy = fabs((double)(w->first[1] + j - 1) / whole[1] - hills[k][1]);
        dx = fmin(dx, 1 - dx);
        dy = fmin(dy, 1 - dy);
        h += hills[k][2] * exp(-(dx * dx + dy * dy) / 0.01);
      }
      *cell(w, 0, i, j) = h;
    }
}

/* Rows to the ranks along x, then columns, corners with them, along y. */
static void exchange(water* w) {
  for (int d = 0; d < 2; ++d) {
    const int from = d == 0 ? 1 : 0, to = d == 0 ? w->n[1] : w->n[0] + 1, count = to - from + 1;
    double* out = malloc(2 * FIELDS * (size_t)count * sizeof(double));
    double* in = out + (size_t)FIELDS * (size_t)count;
    for (int way = -1; way <= 1; way += 2) {
      int before = 0, after = 0;
      MPI_Cart_shift(w->comm, d, way, &before, &after);
      const int mine = way < 0 ? 1 : w->n[d], ghost = way < 0 ? w->n[d] + 1 : 0;
      for (int f = 0; f < FIELDS; ++f)
        for (int c = 0; c < count; ++c)
          out[f * count + c] = d == 0 ? *cell(w, f, mine, from + c) : *cell(w, f, from + c, mine);
      MPI_Sendrecv(out, FIELDS * count, MPI_DOUBLE, after, 7 + d, in, FIELDS * count, MPI_DOUBLE,
                   before, 7 + d, w->comm, MPI_STATUS_IGNORE);
      for (int f = 0; f < FIELDS; ++f)
        for (int c = 0; c < count; ++c)
          *(d == 0 ? cell(w, f, ghost, from + c) : cell(w, f, from + c, ghost)) = in[f * count + c];
    }
    free(out);
  }
}

/* The Rusanov flux across the face after cell (i, j) along dim d. */
static void flux(const water* w, int i, int j, int d, double* f) {
  double s[2][FIELDS], g[2][FIELDS], speed = 0;
  const int n = 1 + d, t = 2 - d;
  for (int side = 0; side < 2; ++side) {
    for (int k = 0; k < FIELDS; ++k)
      s[side][k] = *cell(w, k, i + (d == 0 ? side : 0), j + (d == 1 ? side : 0));
    g[side][0] = s[side][n];
    g[side][n] = s[side][n] * s[side][n] / s[side][0] + 0.5 * s[side][0] * s[side][0];
    g[side][t] = s[side][t] * s[side][n] / s[side][0];
    speed = fmax(speed, fabs(s[side][n] / s[side][0]) + sqrt(s[side][0]));
  }
  for (int k = 0; k < FIELDS; ++k)
    f[k] = 0.5 * (g[0][k] + g[1][k]) - 0.5 * speed * (s[1][k] - s[0][k]);
}

static void step(water* w) {
  exchange(w);
  for (int i = 1; i <= w->n[0]; ++i)
    for (int j = 1; j <= w->n[1]; ++j) {
      double west[FIELDS], east[FIELDS], south[FIELDS], north[FIELDS];
      flux(w, i - 1, j, 0, west);
      flux(w, i, j, 0, east);
      flux(w, i, j - 1, 1, south);
      flux(w, i, j, 1, north);
      for (int f = 0; f < FIELDS; ++f)
        w->next[cell(w, f, i, j) - w->state] =
            *cell(w, f, i, j) - 0.2 * (east[f] - west[f] + north[f] - south[f]);
    }
  /* The address of the state stays: it is a tensor's memory. */
  for (int f = 0; f < FIELDS; ++f)
    for (int i = 1; i <= w->n[0]; ++i)
      memcpy(cell(w, f, i, 1), &w->next[cell(w, f, i, 1) - w->state],
             (size_t)w->n[1] * sizeof(double));
}

static double mass(const water* w) {
  double mine = 0, all = 0;
  for (int i = 1; i <= w->n[0]; ++i)
    for (int j = 1; j <= w->n[1]; ++j) mine += *cell(w, 0, i, j);
  MPI_Allreduce(&mine, &all, 1, MPI_DOUBLE, MPI_SUM, w->comm);
  return all;
}

int main(int argc, char** argv) {
  if (argc < 4) {
    fprintf(stderr, "%s NETWORK.pt FOLDER WINDOWS [END_AFTER]\n", argv[0]);
    return 2;
  }
  const char* folder = argv[2];
  const int64_t windows = atoi(argv[3]), end_after = argc > 4 ? atoi(argv[4]) : -1;
  water w;
  MPI_Init(&argc, &argv);
  begin(&w);

  tessera_job job;
  tessera_mesh mesh;
  tessera_tensor field, image;
  tessera_model model;
  tessera_optimizer optimizer;
  tessera_session session;
  tessera_state state;
  const char* names[] = {"x", "y"};
  const int64_t shape[] = {FIELDS, w.n[0] + 2, w.n[1] + 2}, ghosts[] = {0, 1, 1};
  const int axes[] = {-1, 0, 1}, as_image[] = {-1, 0, 1, 2};
  const tessera_array block = {w.state, TESSERA_FLOAT64, 3, shape, NULL, TESSERA_ROW_MAJOR};
  ok(tessera_start_mpi(w.comm, NULL, 0, &job));
  ok(tessera_set_threads(1));
  ok(tessera_mesh_create(job, 2, names, w.grid, NULL, &mesh));
  ok(tessera_field(mesh, &block, ghosts, ghosts, axes, &field));
  ok(tessera_arrange(field, 4, as_image, &image));
  ok(tessera_model_load(mesh, argv[1], TESSERA_FLOAT64, &model));
  ok(tessera_optimizer_create(model, "adam", "lr=0.004", &optimizer));
  ok(tessera_session_create(optimizer, "clip_norm=10", &session));
  ok(tessera_state_create(job, &state));
  ok(tessera_state_add(state, "water", field));
  ok(tessera_state_add(state, "session", session));

  int rank = 0;
  char name[64];
  int64_t done = 0;
  ok(tessera_rank(job, &rank, NULL));
  ok(tessera_latest(job, folder, sizeof name, name));
  if (name[0]) {
    ok(tessera_load(state, folder, name)); /* into the solver's own memory */
    ok(tessera_state_get_integer(state, "windows", &done));
  }
  for (int64_t window = done + 1; window <= windows; ++window) {
    tessera_tensor before, input;
    tessera_step last;
    ok(tessera_clone(field, &before)); /* the solver is about to overwrite it */
    for (int i = 0; i < STEPS_A_WINDOW; ++i) step(&w);
    ok(tessera_arrange(before, 4, as_image, &input));
    for (int i = 0; i < UPDATES; ++i) {
      tessera_tensor forecast, loss;
      ok(tessera_forward(model, 1, &input, 1, &forecast));
      ok(tessera_loss("mse", forecast, image, &loss));
      ok(tessera_session_backward(session, loss, (double)w.n[0] * w.n[1], 1));
      ok(tessera_session_step(session, &last));
      ok(tessera_free(loss));
      ok(tessera_free(forecast));
    }
    ok(tessera_free(input));
    ok(tessera_free(before));
    const double all = mass(&w);
    if (rank == 0) printf("window %d loss %.16E mass %.16E\n", (int)window, last.loss, all);
    if (window % 2 == 0) {
      snprintf(name, sizeof name, "window-%d", (int)window);
      ok(tessera_state_set_integer(state, "windows", window));
      ok(tessera_save(state, folder, name, 2));
    }
    if (window == end_after) {
      fflush(stdout);
      MPI_Barrier(w.comm); /* the first rank that aborts ends all */
      MPI_Abort(w.comm, 3);
    }
  }
  ok(tessera_end(job));
  free(w.state);
  free(w.next);
  MPI_Comm_free(&w.comm);
  MPI_Finalize();
  return 0;
}

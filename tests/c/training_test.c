/* A network that trains on a field that is spread over the ranks equals one that trains on the whole
 * of it on this rank alone; saved and gone on with over another decomposition. */
#include "models.h"
#include "support.h"

enum { NX = 9, NY = 7, NF = 3, STEPS = 4 };

/* A run: fields in Fortran's order, a model and what trains it. */
typedef struct {
  parts of;
  tessera_mesh mesh;
  double *memory, *target_memory;
  tessera_tensor u, target, x, y;
  tessera_model model;
  tessera_optimizer optimizer;
} run;

static tessera_tensor field_of(const run* r, double* memory) {
  const int64_t shape[] = {r->of.own[0], r->of.own[1], NF};
  const tessera_array array = {memory, TESSERA_FLOAT64, 3, shape, NULL, TESSERA_COLUMN_MAJOR};
  const int axes[] = {0, 1, -1};
  tessera_tensor field = NULL;
  OK(tessera_field(r->mesh, &array, NULL, NULL, axes, &field));
  return field;
}

static tessera_tensor as_image(tessera_tensor field) {
  const int from[] = {-1, 2, 0, 1};
  tessera_tensor image = NULL;
  OK(tessera_arrange(field, 4, from, &image));
  return image;
}

static run begin(tessera_mesh mesh, parts of, const char* script, const char* optimizer) {
  run r = {of, mesh, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL};
  const size_t count = (size_t)(of.own[0] * of.own[1] * NF);
  r.memory = malloc((count + 1) * sizeof(double));
  r.target_memory = malloc((count + 1) * sizeof(double));
  for (int64_t k = 0; k < NF; ++k)
    for (int64_t j = 0; j < of.own[1]; ++j)
      for (int64_t i = 0; i < of.own[0]; ++i) {
        const double a = (double)(of.first[0] + i), b = (double)(of.first[1] + j);
        const int64_t at = i + of.own[0] * (j + of.own[1] * k);
        r.memory[at] = sin(0.7 * a + 0.3 * b * b + (double)k);
        r.target_memory[at] = cos(0.2 * a * a - 0.5 * b + (double)k);
      }
  r.u = field_of(&r, r.memory);
  r.target = field_of(&r, r.target_memory);
  r.x = as_image(r.u);
  r.y = as_image(r.target);
  OK(tessera_seed(3));
  if (script)
    OK(tessera_model_load(mesh, script, TESSERA_FLOAT64, &r.model));
  else
    OK(tessera_model_create(mesh, "net", NULL, TESSERA_FLOAT64, &r.model));
  OK(tessera_optimizer_create(r.model, optimizer, "lr=0.01", &r.optimizer));
  return r;
}

static void end(run* r) {
  void* handles[] = {r->u, r->target, r->x, r->y, r->model, r->optimizer};
  for (size_t i = 0; i < sizeof handles / sizeof *handles; ++i) OK(tessera_free(handles[i]));
  free(r->memory);
  free(r->target_memory);
}

static tessera_tensor loss_of(const run* r) {
  tessera_tensor out = NULL, loss = NULL;
  OK(tessera_forward(r->model, 1, &r->x, 1, &out));
  OK(tessera_loss("mse", out, r->y, &loss));
  OK(tessera_free(out));
  return loss;
}

static double step(const run* r) {
  tessera_tensor loss = loss_of(r);
  double value = NAN;
  OK(tessera_optimizer_zero(r->optimizer));
  OK(tessera_backward(loss, NULL));
  OK(tessera_optimizer_step(r->optimizer));
  OK(tessera_value(loss, &value));
  OK(tessera_free(loss));
  return value;
}

/* The gradient by the solver's own values, of a loss and of a gradient that the solver gives. */
static void compare_gradients(const run* spread, const run* alone) {
  const run* runs[] = {spread, alone};
  double* found[2];
  int64_t strides[2][TESSERA_MAX_DIMS];
  tessera_tensor gradients[2];
  for (int n = 0; n < 2; ++n) {
    const run* r = runs[n];
    tessera_tensor leaf = NULL, image = NULL, out = NULL, twice = NULL;
    OK(tessera_clone(r->u, &leaf));
    OK(tessera_require_gradient(leaf));
    CODE(tessera_gradient(leaf, &gradients[n]), TESSERA_ERROR_ARGUMENT);
    image = as_image(leaf);
    OK(tessera_forward(r->model, 1, &image, 1, &out));
    OK(tessera_clone(out, &twice));
    OK(tessera_backward(out, twice));
    OK(tessera_gradient(leaf, &gradients[n]));
    OK(tessera_local(gradients[n], (void**)&found[n], NULL, NULL, strides[n], NULL));
    OK(tessera_free(leaf));
    OK(tessera_free(image));
    OK(tessera_free(out));
    OK(tessera_free(twice));
  }
  double most = 0;
  for (int64_t i = 0; i < spread->of.own[0]; ++i)
    for (int64_t j = 0; j < spread->of.own[1]; ++j)
      for (int64_t k = 0; k < NF; ++k) {
        const double a = found[0][i * strides[0][0] + j * strides[0][1] + k * strides[0][2]];
        const double b = found[1][(i + spread->of.first[0]) * strides[1][0] +
                                  (j + spread->of.first[1]) * strides[1][1] + k * strides[1][2]];
        most = fmax(most, fabs(a - b));
      }
  NEAR(most, 0, 1e-12);
  OK(tessera_free(gradients[0]));
  OK(tessera_free(gradients[1]));
}

/* A prediction lands in the solver's memory. */
static void predict_into_memory(const run* spread, const run* alone) {
  const run* runs[] = {spread, alone};
  for (int n = 0; n < 2; ++n) {
    tessera_tensor out = NULL;
    OK(tessera_predict(runs[n]->model, 1, &runs[n]->x, 1, &out));
    OK(tessera_copy(runs[n]->x, out)); /* a view of the solver's memory */
    CODE(tessera_backward(out, NULL), TESSERA_ERROR_ARGUMENT);
    OK(tessera_free(out));
  }
  double most = 0;
  for (int64_t k = 0; k < NF; ++k)
    for (int64_t j = 0; j < spread->of.own[1]; ++j)
      for (int64_t i = 0; i < spread->of.own[0]; ++i)
        most = fmax(
            most,
            fabs(spread->memory[i + spread->of.own[0] * (j + spread->of.own[1] * k)] -
                 alone->memory[i + spread->of.first[0] + NX * (j + spread->of.first[1] + NY * k)]));
  NEAR(most, 0, 1e-12);
}

static void equals_one_process(tessera_job job, const char* script, const char* optimizer) {
  int ranks = 1;
  OK(tessera_rank(job, NULL, &ranks));
  const parts of = split(job, ranks % 2 == 0 ? 2 : 1, NX, NY);
  tessera_mesh mesh = mesh_of(job, &of), one = mesh_alone(job);
  const parts whole = {of.rank, 1, {1, 1}, {0, 0}, {{NX}, {NY}}, {NX, NY}, {0, 0}, {NX, NY}};
  run spread = begin(mesh, of, script, optimizer), alone = begin(one, whole, script, optimizer);
  int64_t size = 0, other = 0;
  OK(tessera_model_size(spread.model, &size));
  OK(tessera_model_size(alone.model, &other));
  TRUE(size == other && size > 0);
  double before = 0, last = 0;
  for (int s = 0; s < STEPS; ++s) {
    const double a = step(&spread), b = step(&alone);
    NEAR(a, b, 1e-12);
    if (s == 0) before = a;
    last = a;
  }
  TRUE(last < before);
  compare_gradients(&spread, &alone);
  predict_into_memory(&spread, &alone);
  end(&spread);
  end(&alone);
  OK(tessera_free(mesh));
  OK(tessera_free(one));
}

static tessera_state state_of(tessera_job job, const run* r, tessera_session session) {
  tessera_state state = NULL;
  OK(tessera_state_create(job, &state));
  OK(tessera_state_add(state, "u", r->u));
  if (session) {
    OK(tessera_state_add(state, "session", session));
  } else {
    OK(tessera_state_add(state, "net", r->model));
    OK(tessera_state_add(state, "adam", r->optimizer));
  }
  return state;
}

/* Saved on one decomposition, loaded on another one, in the same job. */
static void resumes(tessera_job job, const char* folder) {
  int ranks = 1;
  OK(tessera_rank(job, NULL, &ranks));
  const parts of = split(job, ranks, NX, NY), turned = split(job, 1, NX, NY);
  tessera_mesh mesh = mesh_of(job, &of), other = mesh_of(job, &turned);
  run first = begin(mesh, of, NULL, "adam");
  step(&first);
  step(&first);
  if (of.own[0] > 0) first.memory[0] += 0.5;
  tessera_state state = state_of(job, &first, NULL);
  OK(tessera_state_set_integer(state, "steps", 2));
  OK(tessera_state_set_real(state, "time", 0.1));
  CODE(tessera_state_add(state, "u", first.target), TESSERA_ERROR_ARGUMENT);
  CODE(tessera_state_add(state, "mesh", mesh), TESSERA_ERROR_ARGUMENT);
  OK(tessera_save(state, folder, "two", 3));
  OK(tessera_free(state));
  double wanted[3];
  for (int s = 0; s < 3; ++s) wanted[s] = step(&first);

  run second = begin(other, turned, NULL, "adam");
  for (int64_t e = 0; e < turned.own[0] * turned.own[1] * NF; ++e) second.memory[e] = 0;
  state = state_of(job, &second, NULL);
  char name[16] = "", little[2] = "";
  OK(tessera_latest(job, folder, sizeof name, name));
  TRUE(strcmp(name, "two") == 0);
  CODE(tessera_latest(job, folder, sizeof little, little), TESSERA_ERROR_ARGUMENT);
  CODE(tessera_load(state, folder, "three"), TESSERA_ERROR_FILE);
  OK(tessera_load(state, folder, "two"));
  int64_t steps = 0;
  double time = 0;
  OK(tessera_state_get_integer(state, "steps", &steps));
  OK(tessera_state_get_real(state, "time", &time));
  CODE(tessera_state_get_real(state, "place", &time), TESSERA_ERROR_ARGUMENT);
  TRUE(steps == 2 && time == 0.1);
  for (int s = 0; s < 3; ++s) NEAR(step(&second), wanted[s], 1e-12);
  OK(tessera_free(state));
  end(&first);
  end(&second);
  OK(tessera_free(mesh));
  OK(tessera_free(other));
}

static tessera_step session_step(const run* r, tessera_session session, double weight) {
  tessera_step done;
  for (int micro = 0; micro < 2; ++micro) {
    tessera_tensor loss = loss_of(r);
    OK(tessera_session_backward(session, loss, weight, micro == 1));
    OK(tessera_free(loss));
  }
  memset(&done, 0, sizeof done);
  OK(tessera_session_step(session, &done));
  return done;
}

/* Two micro-batches of a step, the same ones, are one step of one of them. */
static void sessions(tessera_job job, const char* folder) {
  const parts of = split(job, 1, NX, NY);
  tessera_mesh mesh = mesh_of(job, &of);
  run plain = begin(mesh, of, NULL, "sgd"), r = begin(mesh, of, NULL, "sgd");
  tessera_session session = NULL, again = NULL;
  CODE(tessera_session_create(r.optimizer, "clip=1", &session), TESSERA_ERROR_ARGUMENT);
  OK(tessera_session_create(r.optimizer, "measure_norm=1", &session));
  const double cells = (double)(of.own[0] * of.own[1]);
  for (int s = 0; s < 2; ++s) {
    const double wanted = step(&plain);
    const tessera_step done = session_step(&r, session, cells);
    NEAR(done.loss, wanted, 1e-12);
    NEAR(done.weight, 2.0 * NX * NY, 1e-12);
    TRUE(done.stepped == 1 && done.stop == 0 && done.norm > 0);
  }
  tessera_state state = state_of(job, &r, session);
  OK(tessera_save(state, folder, "session", 0));
  const tessera_step wanted = session_step(&r, session, cells);
  run other = begin(mesh, of, NULL, "sgd");
  OK(tessera_session_create(other.optimizer, "measure_norm=1", &again));
  tessera_state back = state_of(job, &other, again);
  OK(tessera_load(back, folder, "session"));
  int64_t steps = 0;
  OK(tessera_session_steps(again, &steps));
  TRUE(steps == 2);
  if (of.rank == of.ranks - 1) OK(tessera_session_stop(again));
  const tessera_step done = session_step(&other, again, cells);
  NEAR(done.loss, wanted.loss, 1e-12);
  NEAR(done.norm, wanted.norm, 1e-12);
  TRUE(done.stop == 1); /* all learn it */
  OK(tessera_free(state));
  OK(tessera_free(back));
  OK(tessera_free(session));
  OK(tessera_free(again));
  end(&plain);
  end(&r);
  end(&other);
  OK(tessera_free(mesh));
}

static void several_tensors(tessera_job job) {
  const parts of = split(job, 1, NX, NY);
  tessera_mesh mesh = mesh_of(job, &of);
  run r = begin(mesh, of, NULL, "sgd");
  tessera_model two = NULL, none = NULL;
  OK(tessera_model_create(mesh, "two", "", TESSERA_FLOAT64, &two));
  CODE(tessera_model_create(mesh, "none", "", TESSERA_FLOAT64, &none), TESSERA_ERROR_ARGUMENT);
  CODE(tessera_model_create(mesh, "net", "wide", TESSERA_FLOAT64, &none), TESSERA_ERROR_ARGUMENT);
  SAYS("no options");
  OK(tessera_model_train(two, 0));
  const tessera_tensor in[] = {r.x, r.y};
  tessera_tensor out[2] = {NULL, NULL};
  OK(tessera_forward(two, 2, in, 2, out));
  tessera_tensor loss = NULL;
  double once = 0, twice = 0;
  OK(tessera_loss("l1", out[0], r.y, &loss));
  OK(tessera_value(loss, &once));
  OK(tessera_free(loss));
  OK(tessera_loss("l1", out[1], r.y, &loss));
  OK(tessera_value(loss, &twice));
  TRUE(once > 0 && twice > 0 && once != twice);
  OK(tessera_free(out[0]));
  OK(tessera_free(out[1]));
  CODE(tessera_forward(two, 2, in, 1, out), TESSERA_ERROR_ARGUMENT);
  OK(tessera_free(loss));
  OK(tessera_free(two));
  end(&r);
  OK(tessera_free(mesh));
}

void training(tessera_job job, const char* folder) {
  char script[4096];
  int rank = 0;
  OK(tessera_rank(job, &rank, NULL));
  snprintf(script, sizeof script, "%s/net-%d.pt", folder, rank);
  TRUE(test_script(script) == 0);
  equals_one_process(job, NULL, "adam");
  equals_one_process(job, script, "adamw");
  resumes(job, folder);
  sessions(job, folder);
  several_tensors(job);
}

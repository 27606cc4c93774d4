#ifndef TESSERA_C_TESSERA_H
#define TESSERA_C_TESSERA_H
/* Tessera from C: a solver's own arrays as sharded tensors, and networks that learn on them while
 * it runs. C99; no exception, no abort and no type of C++ crosses this header. Fortran has
 * `module tessera` on it (docs/c_and_fortran.md).
 *
 *   tessera_job job;
 *   tessera_mesh mesh;
 *   tessera_tensor u;
 *   if (tessera_start_mpi(comm, NULL, 0, &job)) die(tessera_message());     -- tessera/c/mpi.h
 *   tessera_mesh_create(job, 2, (const char *[]){"x", "y"}, (int[]){2, 3}, NULL, &mesh);
 *   int64_t shape[] = {nx + 2, ny + 2};
 *   tessera_array block = {h, TESSERA_FLOAT64, 2, shape, NULL, TESSERA_ROW_MAJOR};
 *   tessera_field(mesh, &block, (int64_t[]){1, 1}, (int64_t[]){1, 1}, (int[]){0, 1}, &u);
 *   ...
 *   tessera_end(job);
 *
 * Results. Every call returns TESSERA_OK or a code, and tessera_message() then says in a sentence
 * what was asked, what the limit is and what to do. What a call would have given is NULL or
 * untouched after an error.
 *
 * Handles have the type of pointers, and are never addresses: one that is NULL, was freed, is
 * of another kind or is no handle at all is refused with TESSERA_ERROR_HANDLE and a sentence.
 * tessera_free() frees any of them; tessera_end() frees all that were made from the job.
 *
 * Collective calls say so: all ranks of the mesh (or of the group, or of the job) make them, in the
 * same order. Where one rank alone makes a mistake in one, the others do not wait for it: they get
 * TESSERA_ERROR_PEER_FAILED with that rank's sentence. Every wait has the time limit that the job
 * was started with.
 *
 * Threads. One thread at a time may be in the calls of a job, and it may be another one each time;
 * a second one is refused with TESSERA_ERROR_THREAD. tessera_message() belongs to the thread that
 * asks. Over MPI the thread level says which thread that may be.
 *
 * Memory is the host's. Text is UTF-8, ended by a zero. */

#include <stddef.h>
#include <stdint.h>

/* C may hand over any int as an enumeration; C++ may read it only if its type is said. */
#ifdef __cplusplus
#define TESSERA_ENUM : int
extern "C" {
#else
#define TESSERA_ENUM
#endif

/* Most dims that an array has. */
enum { TESSERA_MAX_DIMS = 8 };

typedef enum tessera_result TESSERA_ENUM {
  TESSERA_OK = 0,
  /* An argument that the caller can correct: NULL, a size, a name, a dtype, an overlap. */
  TESSERA_ERROR_ARGUMENT = 1,
  /* A handle that is NULL, was freed, is of another kind, or is none. */
  TESSERA_ERROR_HANDLE = 2,
  /* No job runs: it was not started, or has ended. */
  TESSERA_ERROR_NO_JOB = 3,
  /* Another thread is in a call of the same job. */
  TESSERA_ERROR_THREAD = 4,
  /* The launcher's environment is incomplete or contradicts itself. */
  TESSERA_ERROR_CONFIGURATION = 5,
  /* A file that is absent, unreadable, of another format, or damaged. */
  TESSERA_ERROR_FILE = 6,
  /* A part that this build does not have. */
  TESSERA_ERROR_NOT_AVAILABLE = 7,
  /* The ranks called different things. */
  TESSERA_ERROR_MISMATCH = 8,
  /* A wait ran into its limit. */
  TESSERA_ERROR_TIMEOUT = 9,
  /* A rank died or gave up. */
  TESSERA_ERROR_PEER_LOST = 10,
  /* A rank lives, and met an error that it alone saw; the message has its sentence. */
  TESSERA_ERROR_PEER_FAILED = 11,
  /* Any other failure between ranks. */
  TESSERA_ERROR_COMMUNICATION = 12,
  /* An operator cannot do this with tensors that are sharded so. */
  TESSERA_ERROR_SHARDING = 13,
  /* Gradients that would come together wrongly, or are not finite. */
  TESSERA_ERROR_GRADIENT = 14,
  /* libtorch's own error, in its words. */
  TESSERA_ERROR_TORCH = 15,
  TESSERA_ERROR_MEMORY = 16,
  TESSERA_ERROR_OTHER = 17
} tessera_result;

typedef enum tessera_dtype TESSERA_ENUM {
  /* Only where a call says so: the dtypes that a file has. */
  TESSERA_AS_SAVED = 0,
  TESSERA_FLOAT32 = 1,
  TESSERA_FLOAT64 = 2,
  TESSERA_INT32 = 3,
  TESSERA_INT64 = 4
} tessera_dtype;

/* Which dim is contiguous in memory where no strides are given: the last one, as in C, or the
 * first one, as in Fortran. */
typedef enum tessera_order TESSERA_ENUM {
  TESSERA_ROW_MAJOR = 0,
  TESSERA_COLUMN_MAJOR = 1
} tessera_order;

typedef enum tessera_op TESSERA_ENUM {
  TESSERA_SUM = 0,
  TESSERA_MIN = 1,
  TESSERA_MAX = 2,
  TESSERA_MEAN = 3
} tessera_op;

/* Values beyond the edges of the whole array. */
typedef enum tessera_edge TESSERA_ENUM {
  TESSERA_EDGE_ZERO = 0,
  TESSERA_EDGE_CIRCULAR = 1,
  TESSERA_EDGE_REFLECT = 2,
  TESSERA_EDGE_REPLICATE = 3,
  /* tessera_fill_ghosts() alone: those cells stay as they are. */
  TESSERA_EDGE_KEEP = 4
} tessera_edge;

typedef struct tessera_job_s* tessera_job;
typedef struct tessera_mesh_s* tessera_mesh;
typedef struct tessera_group_s* tessera_group;
typedef struct tessera_tensor_s* tessera_tensor;
typedef struct tessera_model_s* tessera_model;
typedef struct tessera_optimizer_s* tessera_optimizer;
typedef struct tessera_session_s* tessera_session;
typedef struct tessera_state_s* tessera_state;

/* An array of the caller's, which is never copied. The tensor of it has the same dims in the same
 * order, whatever the order in memory: element (i, j, k) is element (i, j, k). */
typedef struct tessera_array {
  void* data;
  tessera_dtype dtype;
  int dims;
  const int64_t* shape;
  /* In elements; NULL: `order` says. */
  const int64_t* strides;
  tessera_order order;
} tessera_array;

/* What a step came to: the same on every rank. */
typedef struct tessera_step {
  /* Mean over what the step's losses were weighted by. */
  double loss;
  double weight;
  /* Of the gradients, before clipping; NaN where none was taken. */
  double norm;
  /* 0: the step was left out, since a gradient was not finite. */
  int stepped;
  /* Not 0: some rank got SIGTERM, SIGUSR1 or asked to stop. */
  int stop;
} tessera_step;

/* ---- errors ---- */

/* The sentence of the last call of this thread that failed, "" before that. It is the thread's own
 * and lives until its next failing call. */
const char* tessera_message(void);
/* "TESSERA_ERROR_ARGUMENT"; never NULL. */
const char* tessera_result_name(tessera_result result);

/* ---- jobs ---- */

/* Begins: rank and world as the launcher's environment says (`tessera run`, torchrun, mpirun,
 * srun), or one process. `backend`: NULL or "auto", "gloo", "shm", "mpi". `timeout`: seconds that a
 * wait may last, 0 for five minutes. Collective over all ranks. */
tessera_result tessera_start(const char* backend, double timeout, tessera_job* job);
/* Begins on a communicator of MPI, given by its handle in Fortran (MPI_Comm_c2f): the ranks are
 * its ranks. tessera_start_mpi() of tessera/c/mpi.h takes an MPI_Comm. MPI must be initialised; it
 * is duplicated, and stays the caller's. `backend`: NULL or "mpi", or "auto", which goes through
 * memory inside a host. End the job before MPI_Finalize. Collective over the communicator. */
tessera_result tessera_start_fortran(int communicator, const char* backend, double timeout,
                                     tessera_job* job);
/* Ends: frees all that was made from it, and leaves the other ranks. Collective. */
tessera_result tessera_end(tessera_job job);
tessera_result tessera_rank(tessera_job job, int* rank, int* size);
/* Threads of this process that one operator uses; the default is a core each. */
tessera_result tessera_set_threads(int threads);
/* Seeds the random numbers of this thread's CPU: parameters of models that are made afterwards. */
tessera_result tessera_seed(uint64_t seed);
/* Frees any handle but a job's. NULL is no error. Not collective. */
tessera_result tessera_free(void* handle);

/* ---- meshes and groups ---- */

/* A mesh of named axes, outermost first, over `ranks` (row-major over the axes), or over all ranks
 * of the job for NULL. One size may be -1: what is left. Ranks outside it may hold the mesh. Not
 * collective. */
tessera_result tessera_mesh_create(tessera_job job, int axes, const char* const* names,
                                   const int* sizes, const int* ranks, tessera_mesh* mesh);
/* This rank's position along each axis. */
tessera_result tessera_mesh_coordinate(tessera_mesh mesh, int* coordinate);
/* The ranks along one axis through this one. Not collective. */
tessera_result tessera_mesh_group(tessera_mesh mesh, int axis, tessera_group* group);
/* The group of exactly these ranks of the job, this one among them. Not collective. */
tessera_result tessera_group_create(tessera_job job, int count, const int* ranks,
                                    tessera_group* group);
tessera_result tessera_group_rank(tessera_group group, int* rank, int* size);
/* Reduces `array` over the group, in place. Collective over the group, as the next three. */
tessera_result tessera_all_reduce(tessera_group group, const tessera_array* array, tessera_op op);
/* Copies `root`'s array into those of the other ranks. */
tessera_result tessera_broadcast(tessera_group group, const tessera_array* array, int root);
/* Puts the ranks' `mine` one after the other along the first dim of `all`; their first dims may
 * differ, and be 0. */
tessera_result tessera_all_gather(tessera_group group, const tessera_array* mine,
                                  const tessera_array* all);
tessera_result tessera_barrier(tessera_group group);

/* ---- fields and tensors ---- */

/* The tensor of which each rank holds `block` without its ghost cells: `before` and `after` of them
 * in each dim, NULL for none. `axes`: for each dim the axis of the mesh over which it is divided,
 * or -1; ranks along the other axes hold the same. Sizes may be uneven, and 0: the ranks' sizes are
 * gathered and compared. What is written to either is seen in the other, and the memory must live
 * as long as the tensor. Collective over the mesh. */
tessera_result tessera_field(tessera_mesh mesh, const tessera_array* block, const int64_t* before,
                             const int64_t* after, const int* axes, tessera_tensor* field);
/* Writes the cells around this rank's own into `block`: those of the neighbours, at the edges of
 * the whole array what `edges` says for each dim. Collective over the mesh. */
tessera_result tessera_fill_ghosts(tessera_tensor field, const tessera_edge* edges);
/* A plain tensor of this rank's own cells with so many of the others' around them; it may be wider
 * than a neighbour's part. Collective over the mesh. */
tessera_result tessera_halo(tessera_tensor field, const int64_t* before, const int64_t* after,
                            const tessera_edge* edges, tessera_tensor* wide);
/* A copy in memory of its own, without history. */
tessera_result tessera_clone(tessera_tensor tensor, tessera_tensor* copy);
/* The same elements with other dims: dim i is dim `from[i]` of `tensor`, -1 a new one of size 1.
 * {-1, 2, 0, 1} makes of (nx, ny, 3) the (1, 3, nx, ny) that a convolution takes. Nothing is
 * copied, and gradients go through it. */
tessera_result tessera_arrange(tessera_tensor tensor, int dims, const int* from,
                               tessera_tensor* arranged);
/* Writes the values of `from` into `to`, of the same shape: into the solver's memory where `to` is
 * a field. Collective over the mesh. */
tessera_result tessera_copy(tessera_tensor to, tessera_tensor from);
/* The value of a tensor of one element. Collective over the mesh. */
tessera_result tessera_value(tessera_tensor tensor, double* value);
/* The whole tensor's dims and shape (room for TESSERA_MAX_DIMS); NULL for what is not wanted. */
tessera_result tessera_shape(tessera_tensor tensor, int* dims, int64_t* shape);
/* Where this rank's part is: memory, dtype, its shape and strides (in elements) and the index of
 * its first element in the whole; NULL for what is not wanted, else room for TESSERA_MAX_DIMS. The
 * memory lives as long as the tensor. */
tessera_result tessera_local(tessera_tensor tensor, void** data, tessera_dtype* dtype,
                             int64_t* shape, int64_t* strides, int64_t* offset);
/* Backward will leave a gradient for this tensor. */
tessera_result tessera_require_gradient(tessera_tensor tensor);
/* That gradient; TESSERA_ERROR_ARGUMENT where none has come. */
tessera_result tessera_gradient(tessera_tensor tensor, tessera_tensor* gradient);

/* ---- models ---- */

/* The network of a TorchScript file, in training mode, its parameters on every rank of the mesh:
 * those of the mesh's first rank. `dtype`: what its numbers with a fraction become, or
 * TESSERA_AS_SAVED. Or that of a package of AOTInductor which save_package() of Python has written:
 * compiled code for tessera_predict() alone, without parameters, of TESSERA_AS_SAVED; its inputs
 * are this rank's (tessera_halo()) or replicated, and those that it was compiled for, else
 * TESSERA_ERROR_ARGUMENT. Collective over the mesh. */
tessera_result tessera_model_load(tessera_mesh mesh, const char* file, tessera_dtype dtype,
                                  tessera_model* model);
/* A network of C++ by the name that tessera::register_model() of tessera/c/models.h gave it;
 * `options` is for it, NULL as "". Collective over the mesh. */
tessera_result tessera_model_create(tessera_mesh mesh, const char* name, const char* options,
                                    tessera_dtype dtype, tessera_model* model);
/* Training mode (dropout, running statistics) or not. */
tessera_result tessera_model_train(tessera_model model, int on);
tessera_result tessera_model_size(tessera_model model, int64_t* parameters);
/* Runs the network on sharded tensors, and keeps what backward needs. Collective over the mesh. */
tessera_result tessera_forward(tessera_model model, int inputs, const tessera_tensor* input,
                               int outputs, tessera_tensor* output);
/* The same without history, for a result that is only read. Collective over the mesh. */
tessera_result tessera_predict(tessera_model model, int inputs, const tessera_tensor* input,
                               int outputs, tessera_tensor* output);

/* ---- training ---- */

/* The mean over all elements of all ranks: `kind` is "mse", "l1", "huber" or "smooth_l1".
 * Collective over the mesh. */
tessera_result tessera_loss(const char* kind, tessera_tensor output, tessera_tensor target,
                            tessera_tensor* loss);
/* Adds the gradients of a loss to those of the parameters, reduced over the ranks. `gradient`: that
 * of what follows by `tensor`, computed by the solver; NULL for a tensor of one element.
 * Collective over the mesh. */
tessera_result tessera_backward(tessera_tensor tensor, tessera_tensor gradient);
/* "adam", "adamw" or "sgd" over the parameters of the model. `options`: "lr=0.001
 * weight_decay=0.01", NULL for the defaults; also beta1, beta2, eps (adam, adamw), momentum,
 * dampening, nesterov (sgd). */
tessera_result tessera_optimizer_create(tessera_model model, const char* kind, const char* options,
                                        tessera_optimizer* optimizer);
tessera_result tessera_optimizer_zero(tessera_optimizer optimizer);
/* One step with the gradients that are there. */
tessera_result tessera_optimizer_step(tessera_optimizer optimizer);
/* Steps of several micro-batches, clipped, stopped by signals on all ranks alike: instead of the
 * two calls before. The model's mesh has all ranks of the job. `options`: clip_norm, clip_value,
 * measure_norm=1, skip_non_finite=1, signals=1, as "clip_norm=1". Collective over the job, as the
 * next two. */
tessera_result tessera_session_create(tessera_optimizer optimizer, const char* options,
                                      tessera_session* session);
/* Gradients of a micro-batch; `weight`: how much this rank has in it (samples, cells), 0 for
 * nothing. `last`: not 0 for the last one of the step. */
tessera_result tessera_session_backward(tessera_session session, tessera_tensor loss, double weight,
                                        int last);
/* Brings the gradients to the mean, clips, steps, clears. */
tessera_result tessera_session_step(tessera_session session, tessera_step* step);
/* This rank wants to stop: all learn it from their next step. Not collective. */
tessera_result tessera_session_stop(tessera_session session);
/* Optimizer steps so far, those before a resume included. */
tessera_result tessera_session_steps(tessera_session session, int64_t* steps);

/* ---- checkpoints ---- */

/* What goes into a checkpoint, by name, and comes back from one. */
tessera_result tessera_state_create(tessera_job job, tessera_state* state);
/* A tensor (its memory is written by a load, the solver's own for a field), a model, an optimizer
 * or a session, which brings its model and optimizer. */
tessera_result tessera_state_add(tessera_state state, const char* name, void* handle);
/* Values that are the same on all ranks. */
tessera_result tessera_state_set_integer(tessera_state state, const char* name, int64_t value);
tessera_result tessera_state_set_real(tessera_state state, const char* name, double value);
tessera_result tessera_state_get_integer(tessera_state state, const char* name, int64_t* value);
tessera_result tessera_state_get_real(tessera_state state, const char* name, double* value);
/* Writes the checkpoint `name` into `folder`, which all ranks see: on the disk when it returns, or
 * not there at all. `keep_last`: older ones beyond so many are removed, 0: none is. Collective over
 * the job, as the next two. */
tessera_result tessera_save(tessera_state state, const char* folder, const char* name,
                            int keep_last);
/* Reads it back, on any number of ranks and any mesh; the values that were saved can be asked for
 * then. Nothing is changed after an error. */
tessera_result tessera_load(tessera_state state, const char* folder, const char* name);
/* The name of the checkpoint to go on from, "" where there is none. */
tessera_result tessera_latest(tessera_job job, const char* folder, size_t room, char* name);

#ifdef __cplusplus
}
#endif

#endif

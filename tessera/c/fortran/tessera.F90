!> Tessera from Fortran 2018: a solver's own arrays as sharded tensors, and networks that learn on
!> them while it runs (docs/c_and_fortran.md; each call in full: tessera/c/tessera.h).
!>
!>   use tessera
!>   type(tessera_job) :: job
!>   type(tessera_mesh) :: mesh
!>   type(tessera_tensor) :: u
!>   real(real64), target :: h(-1:nx+2, -1:ny+2)          ! two ghost cells
!>   call tessera_start(job, MPI_COMM_WORLD)              ! of mpi_f08 or of mpi
!>   call tessera_mesh_create(job, ["x", "y"], [px, py], mesh)
!>   call tessera_field(mesh, h, axes=[1, 2], field=u, before=[2, 2], after=[2, 2])
!>   ...
!>   call tessera_end(job)
!>
!> Arrays. The tensor of an array has its dims in its order: element (i, j, k) of h(nx, ny, nz) is
!> element (i, j, k) of a tensor of shape (nx, ny, nz), and memory stays Fortran's. Dims, axes and
!> elements are counted from 1, ranks from 0 as MPI's. An array that a field is made of has the
!> attribute TARGET and outlives it; sections are shared without a copy too.
!>
!> Errors. Each call has an optional stat=, 0 or one of tessera_error_*; tessera_message() is then the
!> sentence. Without it an error prints the sentence and ends the program with error stop.
module tessera
  use, intrinsic :: iso_c_binding
  use, intrinsic :: iso_fortran_env, only: error_unit, int64, real32, real64
#ifdef TESSERA_HAS_MPI_F08
  use mpi_f08, only: MPI_Comm
#endif
  use tessera_bindings
  implicit none
  private

  public :: tessera_start, tessera_end, tessera_rank, tessera_set_threads, tessera_seed
  public :: tessera_free, tessera_message, tessera_result_name, tessera_step
  public :: tessera_mesh_create, tessera_mesh_coordinate, tessera_mesh_group
  public :: tessera_group_create, tessera_group_rank
  public :: tessera_all_reduce, tessera_broadcast, tessera_all_gather, tessera_barrier
  public :: tessera_field, tessera_fill_ghosts, tessera_halo, tessera_clone, tessera_arrange
  public :: tessera_copy, tessera_value, tessera_shape, tessera_local, tessera_offset
  public :: tessera_require_gradient, tessera_gradient
  public :: tessera_model_load, tessera_model_create, tessera_model_train, tessera_model_size
  public :: tessera_forward, tessera_predict, tessera_loss, tessera_backward
  public :: tessera_optimizer_create, tessera_optimizer_zero, tessera_optimizer_step
  public :: tessera_session_create, tessera_session_backward, tessera_session_step
  public :: tessera_session_stop, tessera_session_steps
  public :: tessera_state_create, tessera_state_add, tessera_state_set, tessera_state_get
  public :: tessera_save, tessera_load, tessera_latest

  type, public :: tessera_handle
    type(c_ptr) :: handle = c_null_ptr
  end type
  type, extends(tessera_handle), public :: tessera_job
  end type
  type, extends(tessera_handle), public :: tessera_mesh
  end type
  type, extends(tessera_handle), public :: tessera_group
  end type
  type, extends(tessera_handle), public :: tessera_tensor
  end type
  type, extends(tessera_handle), public :: tessera_model
  end type
  type, extends(tessera_handle), public :: tessera_optimizer
  end type
  type, extends(tessera_handle), public :: tessera_session
  end type
  type, extends(tessera_handle), public :: tessera_state
  end type

  enum, bind(c)
    enumerator :: tessera_ok = 0, tessera_error_argument, tessera_error_handle, &
      tessera_error_no_job, tessera_error_thread, tessera_error_configuration, &
      tessera_error_file, tessera_error_not_available, tessera_error_mismatch, &
      tessera_error_timeout, tessera_error_peer_lost, tessera_error_peer_failed, &
      tessera_error_communication, tessera_error_sharding, tessera_error_gradient, &
      tessera_error_torch, tessera_error_memory, tessera_error_other
    enumerator :: tessera_as_saved = 0, tessera_float32, tessera_float64, tessera_int32, &
      tessera_int64
    enumerator :: tessera_sum = 0, tessera_min, tessera_max, tessera_mean
    enumerator :: tessera_edge_zero = 0, tessera_edge_circular, tessera_edge_reflect, &
      tessera_edge_replicate, tessera_edge_keep
  end enum
  public :: tessera_ok, tessera_error_argument, tessera_error_handle, tessera_error_no_job, &
    tessera_error_thread, tessera_error_configuration, tessera_error_file, &
    tessera_error_not_available, tessera_error_mismatch, tessera_error_timeout, &
    tessera_error_peer_lost, tessera_error_peer_failed, tessera_error_communication, &
    tessera_error_sharding, tessera_error_gradient, tessera_error_torch, tessera_error_memory, &
    tessera_error_other
  public :: tessera_as_saved, tessera_float32, tessera_float64, tessera_int32, tessera_int64
  public :: tessera_sum, tessera_min, tessera_max, tessera_mean
  public :: tessera_edge_zero, tessera_edge_circular, tessera_edge_reflect, &
    tessera_edge_replicate, tessera_edge_keep

  integer, parameter :: most_dims = 8

  !> Begins, as the launcher's environment says, or on a communicator of MPI.
  interface tessera_start
    module procedure start_plain, start_integer
#ifdef TESSERA_HAS_MPI_F08
    module procedure start_f08
#endif
  end interface
  !> Points at this rank's part of a tensor, without a copy.
  interface tessera_local
    module procedure local_32, local_64
  end interface
  !> Runs the network: one tensor in and out, or arrays of them.
  interface tessera_forward
    module procedure forward_one, forward_many
  end interface
  interface tessera_predict
    module procedure predict_one, predict_many
  end interface
  !> A value of a checkpoint that is the same on all ranks.
  interface tessera_state_set
    module procedure set_integer, set_long, set_real
  end interface
  interface tessera_state_get
    module procedure get_integer, get_long, get_real
  end interface

contains

#include "calls.inc"

end module

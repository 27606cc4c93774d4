! A solver in Fortran trains a network on its own memory while it runs.
!
!   mpirun -n 4 shallow_water NETWORK.pt FOLDER WINDOWS [END_AFTER]
!
! The network learns what four steps of the solver make of a state. Each rank holds its own cells, no
! state is gathered or copied to another layout, and the losses are those of one rank. Every second
! window is saved into FOLDER, from which the next run goes on, on any number of ranks. END_AFTER ends
! the program in the middle, as a batch system would.
program main
  use, intrinsic :: iso_fortran_env, only: int64, output_unit, real64
  use mpi_f08
  use shallow_water
  use tessera
  implicit none
  integer, parameter :: cells(2) = [26, 19], steps_a_window = 4, updates = 3
  type(water), target :: w
  type(tessera_job) :: job
  type(tessera_mesh) :: mesh
  type(tessera_tensor) :: field, image, before, input, forecast, loss
  type(tessera_model) :: model
  type(tessera_optimizer) :: optimizer
  type(tessera_session) :: session
  type(tessera_state) :: state
  type(tessera_step) :: done
  character(:), allocatable :: network, folder, latest
  integer :: window, first, windows, end_after, rank, i

  network = argument(1)
  folder = argument(2)
  windows = number(3, 6)
  end_after = number(4, -1)
  call MPI_Init()
  call begin(w, cells)

  ! ---- ten calls: the solver's ranks, its cells, a network, what trains it, what is saved ----
  call tessera_start(job, w%comm)
  call tessera_set_threads(1)
  call tessera_mesh_create(job, ["x", "y"], w%grid, mesh)
  call tessera_field(mesh, w%state, axes=[1, 2, 0], field=field, before=[1, 1, 0], after=[1, 1, 0])
  call tessera_arrange(field, [0, 3, 1, 2], image)  ! (nx, ny, 3) as (1, 3, nx, ny)
  call tessera_model_load(mesh, network, model, dtype=tessera_float64)
  call tessera_optimizer_create(model, "adam", optimizer, "lr=0.004")
  call tessera_session_create(optimizer, session, "clip_norm=10")
  call tessera_state_create(job, state)
  call tessera_state_add(state, "water", field)
  call tessera_state_add(state, "session", session)

  call tessera_rank(job, rank)
  first = 1
  call tessera_latest(job, folder, latest)
  if (len(latest) > 0) then
    call tessera_load(state, folder, latest)  ! into the solver's own memory
    call tessera_state_get(state, "windows", first)
    first = first + 1
  end if
  do window = first, windows
    call tessera_clone(field, before)  ! the solver is about to overwrite it
    do i = 1, steps_a_window
      call step(w)
    end do
    call tessera_arrange(before, [0, 3, 1, 2], input)
    do i = 1, updates
      call tessera_forward(model, input, forecast)
      call tessera_loss("mse", forecast, image, loss)
      call tessera_session_backward(session, loss, real(product(w%n), real64))
      call tessera_session_step(session, done)
      call tessera_free(loss)
      call tessera_free(forecast)
    end do
    call tessera_free(input)
    call tessera_free(before)
    call report(window)
    if (modulo(window, 2) == 0) then
      call tessera_state_set(state, "windows", window)
      call tessera_save(state, folder, "window-"//text(window), keep_last=2)
    end if
    if (window == end_after) then
      call MPI_Barrier(w%comm)  ! the first rank that ends ends all: what is printed is out by then
      error stop 3
    end if
  end do
  call tessera_end(job)
  call MPI_Finalize()

contains

  subroutine report(window)
    integer, intent(in) :: window
    real(real64) :: all
    all = mass(w)
    if (rank == 0) print '(a, i0, 2(a, es23.16))', "window ", window, " loss ", done%loss, " mass ", all
    flush (output_unit)
  end subroutine

  function argument(at) result(value)
    integer, intent(in) :: at
    character(:), allocatable :: value
    integer :: length
    call get_command_argument(at, length=length)
    allocate (character(length) :: value)
    call get_command_argument(at, value)
  end function

  integer function number(at, otherwise)
    integer, intent(in) :: at, otherwise
    character(:), allocatable :: value
    value = argument(at)
    number = otherwise
    if (len(value) > 0) read (value, *) number
  end function

  function text(n)
    integer, intent(in) :: n
    character(:), allocatable :: text
    character(16) :: digits
    write (digits, '(i0)') n
    text = trim(digits)
  end function

end program

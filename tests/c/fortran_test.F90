! module tessera: fields of Fortran's arrays, training beside this rank alone, checkpoints, errors.
! test_fortran plain|f08|mpi FOLDER
module old_mpi
  implicit none
contains
  subroutine start_with_old_mpi(job)
    use mpi
    use tessera, only: tessera_job, tessera_start
    type(tessera_job), intent(inout) :: job
    call tessera_start(job, MPI_COMM_WORLD)
  end subroutine
end module

module checks
  use, intrinsic :: iso_fortran_env, only: error_unit, int64, real32, real64
  use tessera
  implicit none
  integer :: failures = 0, rank = 0, ranks = 1
  integer, parameter :: nx = 7, ny = 5, nz = 3
contains

  subroutine check(condition, what)
    logical, intent(in) :: condition
    character(*), intent(in) :: what
    if (condition) return
    failures = failures + 1
    write (error_unit, '(2a)') "not so: ", what
  end subroutine

  ! Cells first to first + own - 1, counted from 1, of n over `ranks`: fewer for later ones.
  pure subroutine part(n, first, own)
    integer, intent(in) :: n
    integer, intent(out) :: first, own
    integer :: left, r
    left = n
    first = 1
    do r = 0, rank
      first = n - left + 1
      own = merge(left, (left + 1)/2, r == ranks - 1)
      left = left - own
    end do
  end subroutine

  ! Different for every cell, and for no two dims alike.
  pure elemental real(real64) function value_at(i, j, k)
    integer, intent(in) :: i, j, k
    value_at = i + 1000*j + 1000000*k
  end function

  subroutine fields(mesh)
    type(tessera_mesh), intent(in) :: mesh
    real(real64), allocatable, target :: u(:, :, :), v(:, :, :), wide(:, :, :), table(:, :, :)
    real(real64), pointer :: p(:, :, :)
    real(real32), pointer :: q(:, :, :), r(:, :)
    real(real32), allocatable, target :: single(:, :)
    type(tessera_tensor) :: field, turned, other
    integer(int64), allocatable :: shape(:), first(:)
    integer :: at, own, i, j, k, stat
    call part(nx, at, own)
    allocate (u(own, ny, nz), v(nz, own, ny), table(2, own + 1, ny*2))
    do concurrent(i=1:own, j=1:ny, k=1:nz)
      u(i, j, k) = value_at(at + i - 1, j, k)
    end do
    call tessera_field(mesh, u, [1, 0, 0], field)
    call tessera_shape(field, shape)
    call check(all(shape == [nx, ny, nz]), "the shape is (nx, ny, nz)")
    call tessera_offset(field, first)
    call check(own == 0 .or. all(first == [at, 1, 1]), "this rank's part begins at its own first cell")
    call tessera_local(field, p)
    call check(all(ubound(p) == [own, ny, nz]), "the pointer has the bounds of this rank's part")
    call check(all(p == u), "element (i, j, k) is element (i, j, k)")
    if (own > 0) p(1, 2, 3) = -1
    call check(own == 0 .or. u(min(1, own), 2, 3) < 0, "the pointer is at the array itself")
    if (own > 0) u(1, 2, 3) = value_at(at, 2, 3)
    call tessera_local(field, q, stat)
    call check(stat == tessera_error_argument, "a pointer of another kind is refused")
    ! Turned: v(k, i, j) is u(i, j, k).
    call tessera_arrange(field, [3, 1, 2], turned)
    call tessera_field(mesh, v, [0, 1, 0], other)
    call tessera_copy(other, turned)
    do concurrent(i=1:own, j=1:ny, k=1:nz)
      if (v(k, i, j) /= u(i, j, k)) v(k, i, j) = huge(1d0)
    end do
    call check(.not. any(v == huge(1d0)), "v(k, i, j) is u(i, j, k)")
    call tessera_free(other)
    call tessera_free(turned)
    call tessera_free(field)
    ! Ghost cells, circular: two before, one after.
    allocate (wide(-1:own + 1, 0:ny, nz))
    wide = -7
    wide(1:own, 1:ny, :) = u
    call tessera_field(mesh, wide, [1, 0, 0], field, before=[2, 1, 0], after=[1, 0, 0])
    call tessera_fill_ghosts(field, [tessera_edge_circular, tessera_edge_keep, tessera_edge_zero])
    k = 0
    do i = -1, own + 1
      if (any(wide(i, 1:ny, :) /= reshape([((value_at(modulo(at + i - 2, nx) + 1, j, stat), &
          j=1, ny), stat=1, nz)], [ny, nz]))) k = k + 1
    end do
    call check(k == 0, "ghost cells are the neighbours'")
    call check(all(wide(:, 0, :) == -7), "edges that are kept stay")
    call tessera_free(field)
    ! A section with gaps in each dim, shared as it is.
    table = 0
    call tessera_field(mesh, table(1:1, 1:own, 2:ny*2:2), [0, 1, 0], field)
    call tessera_field(mesh, u(:, :, 2:2), [1, 0, 0], other)
    call tessera_arrange(other, [3, 1, 2], turned)
    call tessera_copy(field, turned)
    call check(all(table(1, 1:own, 2::2) == u(:, :, 2)), "a section is written where it lies")
    call check(sum(abs(table)) == sum(abs(u(:, :, 2))), "and nothing besides")
    call tessera_free(field)
    ! Of real32, and a pointer at a turned part, which has strides.
    allocate (single(own, ny))
    single = real(u(:, :, 1), real32)
    call tessera_free(turned)
    call tessera_field(mesh, single, [1, 0], field)
    call tessera_arrange(field, [2, 1], turned)
    call tessera_local(turned, r)
    call check(all(ubound(r) == [ny, own]), "the bounds of a turned part")
    call check(all(transpose(r) == single), "a pointer with strides")
    call tessera_free(turned)
    call tessera_free(other)
    call tessera_free(field)
  end subroutine

  subroutine collectives(job, mesh)
    type(tessera_job), intent(in) :: job
    type(tessera_mesh), intent(in) :: mesh
    type(tessera_group) :: group
    real(real32) :: sums(2, 2)
    integer :: mine(2, rank), total(2, ranks*(ranks - 1)/2), coordinate(1), at, r, k
    call tessera_mesh_coordinate(mesh, coordinate)
    call check(coordinate(1) == rank + 1, "axes are counted from 1")
    call tessera_mesh_group(mesh, 1, group)
    call tessera_group_rank(group, at)
    call check(at == rank, "this rank's place in the group")
    sums = reshape([1., 2., 3., real(rank)], [2, 2])
    call tessera_all_reduce(group, sums(2:2, :), tessera_sum)
    call check(all(sums(1, :) == [1., 3.]) .and. sums(2, 1) == 2*ranks .and. &
      sums(2, 2) == ranks*(ranks - 1)/2, "a section is reduced in place")
    do k = 1, rank
      mine(:, k) = [rank, k]
    end do
    call tessera_all_gather(group, mine, total)
    at = 0
    do r = 0, ranks - 1
      do k = 1, r
        at = at + 1
        call check(all(total(:, at) == [r, k]), "columns come in the order of the ranks")
      end do
    end do
    call tessera_free(group)
    call tessera_group_create(job, [(r, r=0, ranks - 1)], group)
    at = rank
    call tessera_broadcast(group, at, ranks - 1)
    call check(at == ranks - 1, "a scalar is broadcast")
    call tessera_barrier(group)
    call tessera_free(group)
  end subroutine

  ! Losses of `steps` steps on a field that is spread over the mesh; first of them at `first`.
  subroutine train(job, mesh, alone, folder, name, resume, losses)
    type(tessera_job), intent(in) :: job
    type(tessera_mesh), intent(in) :: mesh
    logical, intent(in) :: alone, resume
    character(*), intent(in) :: folder, name
    real(real64), intent(out) :: losses(:)
    real(real64), allocatable, target :: u(:, :, :), goal(:, :, :)
    type(tessera_tensor) :: field, target_field, x, y, out, loss
    type(tessera_model) :: model
    type(tessera_optimizer) :: optimizer
    type(tessera_session) :: session
    type(tessera_state) :: state
    type(tessera_step) :: done
    integer :: at, own, i, j, k, s, from
    at = 1
    own = nx
    if (.not. alone) call part(nx, at, own)
    allocate (u(own, ny, nz), goal(own, ny, nz))
    do concurrent(i=1:own, j=1:ny, k=1:nz)
      u(i, j, k) = sin(0.6d0*(at + i) + 0.2d0*j*j + k)
      goal(i, j, k) = cos(0.3d0*(at + i)*j - k)
    end do
    call tessera_field(mesh, u, [1, 0, 0], field)
    call tessera_field(mesh, goal, [1, 0, 0], target_field)
    call tessera_arrange(field, [0, 3, 1, 2], x)
    call tessera_arrange(target_field, [0, 3, 1, 2], y)
    call tessera_seed(5)
    call tessera_model_create(mesh, "net", model, dtype=tessera_float64)
    call tessera_optimizer_create(model, "adam", optimizer, "lr=0.01")
    from = 1
    if (.not. alone) then
      call tessera_session_create(optimizer, session)
      call tessera_state_create(job, state)
      call tessera_state_add(state, "u", field)
      call tessera_state_add(state, "session", session)
    end if
    if (resume) then
      u = 0
      call tessera_load(state, folder, name)
      call tessera_state_get(state, "next", from)
    end if
    losses = 0
    do s = from, size(losses)
      call tessera_forward(model, x, out)
      call tessera_loss("mse", out, y, loss)
      if (alone) then
        call tessera_optimizer_zero(optimizer)
        call tessera_backward(loss)
        call tessera_optimizer_step(optimizer)
        call tessera_value(loss, losses(s))
      else
        call tessera_session_backward(session, loss, real(own, real64))
        call tessera_session_step(session, done)
        losses(s) = done%loss
        if (s == 2 .and. .not. resume) then
          call tessera_state_set(state, "next", 3)
          call tessera_save(state, folder, name, keep_last=2)
        end if
      end if
      call tessera_free(out)
      call tessera_free(loss)
    end do
    if (.not. alone) then
      call tessera_free(state)
      call tessera_free(session)
    end if
    call tessera_free(optimizer)
    call tessera_free(model)
    call tessera_free(x)
    call tessera_free(y)
    call tessera_free(field)
    call tessera_free(target_field)
  end subroutine

  subroutine training(job, mesh, folder)
    type(tessera_job), intent(in) :: job
    type(tessera_mesh), intent(in) :: mesh
    character(*), intent(in) :: folder
    type(tessera_mesh) :: one
    real(real64) :: spread(5), alone(5), resumed(5)
    character(:), allocatable :: latest
    call tessera_mesh_create(job, ["x"], [1], one, ranks=[rank])
    call train(job, mesh, .false., folder, "two", .false., spread)
    call train(job, one, .true., folder, "", .false., alone)
    call check(all(abs(spread - alone) < 1d-12), "losses are those of one process")
    call check(spread(5) < spread(1), "the network learns")
    call tessera_latest(job, folder, latest)
    call check(latest == "two", "the checkpoint to go on from is the latest one")
    call train(job, mesh, .false., folder, "two", .true., resumed)
    call check(all(abs(resumed(3:) - alone(3:)) < 1d-12), "it goes on where it was saved")
    call tessera_free(one)
  end subroutine

  subroutine errors(job, mesh)
    type(tessera_job), intent(in) :: job
    type(tessera_mesh), intent(in) :: mesh
    type(tessera_tensor) :: field, copy
    real(real64), target :: u(2, 3)
    character, target :: letters(3)
    type(tessera_model) :: model
    type(tessera_mesh) :: none
    integer :: stat
    u = 1
    call tessera_field(mesh, u, [1], field, stat=stat)
    call check(stat == tessera_error_argument, "axes of another number of dims")
    call check(index(tessera_message(), "another number of dims") > 0, tessera_message())
    call tessera_field(mesh, u, [2, 0], field, stat=stat)
    call check(stat == tessera_error_argument, "an axis that the mesh does not have")
    call tessera_field(mesh, u(2:1:-1, :), [1, 0], field, stat=stat)
    call check(stat == tessera_error_argument, "a section that runs backwards")
    call tessera_field(mesh, letters, [1], field, stat=stat)
    call check(stat == tessera_error_argument, "an array of letters")
    call check(index(tessera_message(), "neither real32") > 0, tessera_message())
    call tessera_field(mesh, u, [1, 0], field, before=[0], stat=stat)
    call check(stat == tessera_error_argument, "ghost cells of fewer dims")
    call check(index(tessera_message(), "before has another number of elements: 1, wanted 2") > 0, &
      tessera_message())
    call tessera_field(mesh, u, [1, 0], field, after=[0, 0, 0], stat=stat)
    call check(stat == tessera_error_argument, "ghost cells of more dims")
    call tessera_mesh_create(job, ["x"], [1], none, ranks=[0, 1, 2], stat=stat)
    call check(stat == tessera_error_argument, "more ranks than the mesh has")
    call tessera_clone(field, copy, stat)
    call check(stat == tessera_error_handle, "a tensor that was never made")
    call tessera_field(mesh, u, [1, 0], field)
    call tessera_fill_ghosts(field, [tessera_edge_zero], stat)
    call check(stat == tessera_error_argument, "edges of fewer dims")
    call tessera_halo(field, [1, 0], [1], [tessera_edge_zero, tessera_edge_zero], copy, stat)
    call check(stat == tessera_error_argument, "cells after fewer dims")
    call tessera_forward(model, field, copy, stat)
    call check(stat == tessera_error_handle, "a model that was never made")
    call tessera_free(copy, stat)
    call check(stat == 0, "what no model gave is nothing")
    call tessera_free(field)
    call tessera_model_load(mesh, "nowhere.pt", model, stat=stat)
    call check(stat == tessera_error_file, "a file that is not there")
    call check(tessera_result_name(stat) == "TESSERA_ERROR_FILE", tessera_result_name(stat))
    call tessera_free(field, stat)
    call check(stat == 0, "to free nothing is no error")
    call tessera_mesh_create(job, ["x", "y"], [1], none, stat=stat)
    call check(stat == tessera_error_argument, "names and sizes that differ in number")
  end subroutine
end module

program test_fortran
  use mpi_f08
  use checks
  use old_mpi
  implicit none
  interface
    subroutine test_models() bind(c)
    end subroutine
  end interface
  character(1000) :: how, folder
  type(tessera_job) :: job
  type(tessera_mesh) :: mesh
  integer :: stat
  call get_command_argument(1, how)
  call get_command_argument(2, folder)
  call test_models()
  if (how /= "plain") call MPI_Init()
  select case (how)
  case ("f08")
    call tessera_start(job, MPI_COMM_WORLD, timeout=60d0)
  case ("mpi")
    call start_with_old_mpi(job)
  case default
    call tessera_start(job, timeout=60d0)
  end select
  call tessera_set_threads(1)
  call tessera_rank(job, rank, ranks)
  call tessera_mesh_create(job, ["x"], [-1], mesh)
  call fields(mesh)
  call collectives(job, mesh)
  call training(job, mesh, trim(folder))
  call errors(job, mesh)
  call tessera_end(job)
  call tessera_rank(job, rank, stat=stat)
  call check(stat == tessera_error_no_job, "a job that has ended")
  if (how /= "plain") call MPI_Finalize()
  if (failures > 0) error stop 1
  print '(a)', "all as it should be"
end program

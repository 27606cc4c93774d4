! Shallow water on a torus, by plain MPI: an uneven decomposition in two dims, halos of its own. It
! knows nothing of networks.
!
!   dh/dt + d(hu)/dx + d(hv)/dy = 0,  d(hu)/dt + d(hu u + g h^2 / 2)/dx + d(hu v)/dy = 0,  hv alike;
!   g = 1, cells of size 1; first-order finite volumes with the Rusanov flux, explicit Euler.
! (R. J. LeVeque, Finite Volume Methods for Hyperbolic Problems, 2002, chapters 12 and 18.)
module shallow_water
  use, intrinsic :: iso_fortran_env, only: real64
  use mpi_f08
  implicit none
  private
  public :: water, begin, step, mass

  type :: water
    type(MPI_Comm) :: comm
    !> Ranks along x and y, this rank's place among them, its cells, and the first of them.
    integer :: grid(2), place(2), n(2), first(2)
    !> h, hu, hv, with a ghost cell all around.
    real(real64), allocatable :: state(:, :, :)
  end type

  real(real64), parameter :: time_step = 0.2_real64

contains

  !> Still water with three hills on whole(1) x whole(2) cells.
  subroutine begin(w, whole)
    type(water), intent(out) :: w
    integer, intent(in) :: whole(2)
    real(real64), parameter :: hills(3, 3) = reshape([0.3_real64, 0.3_real64, 0.3_real64, &
      0.7_real64, 0.55_real64, 0.2_real64, 0.2_real64, 0.8_real64, 0.25_real64], [3, 3])
    real(real64) :: d(2)
    integer :: ranks, me, k, i, j
    call MPI_Comm_size(MPI_COMM_WORLD, ranks)
    w%grid = 0
    call MPI_Dims_create(ranks, 2, w%grid)
    call MPI_Cart_create(MPI_COMM_WORLD, 2, w%grid, [.true., .true.], .false., w%comm)
    call MPI_Comm_rank(w%comm, me)
    call MPI_Cart_coords(w%comm, me, 2, w%place)
    do k = 1, 2
      call share(whole(k), w%grid(k), w%place(k), w%first(k), w%n(k))
    end do
    allocate (w%state(0:w%n(1) + 1, 0:w%n(2) + 1, 3))
    w%state = 0
    do j = 1, w%n(2)
      do i = 1, w%n(1)
        w%state(i, j, 1) = 1
        do k = 1, 3
          d = abs(real(w%first + [i, j] - 2, real64)/whole - hills(1:2, k))
          d = min(d, 1 - d)
          w%state(i, j, 1) = w%state(i, j, 1) + hills(3, k)*exp(-sum(d**2)/0.01_real64)
        end do
      end do
    end do
  end subroutine

  !> Earlier parts are larger, as if their cores were faster.
  subroutine share(whole, parts, place, first, own)
    integer, intent(in) :: whole, parts, place
    integer, intent(out) :: first, own
    integer :: p, weights, given
    weights = parts*(parts + 3)/2
    given = 0
    do p = 0, place
      own = whole*(parts + 1 - p)/weights
      if (p == parts - 1) own = whole - given
      first = given + 1
      given = given + own
    end do
    if (own < 1) error stop "too many ranks for so few cells"
  end subroutine

  !> Along x first, then along y with the corners.
  subroutine exchange(w)
    type(water), intent(inout) :: w
    real(real64), allocatable :: out(:, :), in(:, :)
    integer :: before, after, direction
    allocate (out(w%n(2), 3), in(w%n(2), 3))
    do direction = -1, 1, 2
      call MPI_Cart_shift(w%comm, 0, direction, before, after)
      out = w%state(merge(1, w%n(1), direction < 0), 1:w%n(2), :)
      call MPI_Sendrecv(out, size(out), MPI_DOUBLE_PRECISION, after, 7, in, size(in), &
        MPI_DOUBLE_PRECISION, before, 7, w%comm, MPI_STATUS_IGNORE)
      w%state(merge(w%n(1) + 1, 0, direction < 0), 1:w%n(2), :) = in
    end do
    deallocate (out, in)
    allocate (out(0:w%n(1) + 1, 3), in(0:w%n(1) + 1, 3))
    do direction = -1, 1, 2
      call MPI_Cart_shift(w%comm, 1, direction, before, after)
      out = w%state(:, merge(1, w%n(2), direction < 0), :)
      call MPI_Sendrecv(out, size(out), MPI_DOUBLE_PRECISION, after, 8, in, size(in), &
        MPI_DOUBLE_PRECISION, before, 8, w%comm, MPI_STATUS_IGNORE)
      w%state(:, merge(w%n(2) + 1, 0, direction < 0), :) = in
    end do
  end subroutine

  !> Across a face; n is the momentum that points through it, t the other one.
  pure function flux(left, right, n, t) result(f)
    real(real64), intent(in) :: left(3), right(3)
    integer, intent(in) :: n, t
    real(real64) :: f(3), speed
    speed = max(abs(left(n)/left(1)) + sqrt(left(1)), abs(right(n)/right(1)) + sqrt(right(1)))
    f = 0.5_real64*(through(left) + through(right)) - 0.5_real64*speed*(right - left)
  contains
    pure function through(s) result(g)
      real(real64), intent(in) :: s(3)
      real(real64) :: g(3)
      g(1) = s(n)
      g(n) = s(n)**2/s(1) + 0.5_real64*s(1)**2
      g(t) = s(t)*s(n)/s(1)
    end function
  end function

  subroutine step(w)
    type(water), intent(inout) :: w
    real(real64) :: next(w%n(1), w%n(2), 3)
    integer :: i, j
    call exchange(w)
    associate (s => w%state)
      do j = 1, w%n(2)
        do i = 1, w%n(1)
          next(i, j, :) = s(i, j, :) - time_step*( &
            flux(s(i, j, :), s(i + 1, j, :), 2, 3) - flux(s(i - 1, j, :), s(i, j, :), 2, 3) + &
            flux(s(i, j, :), s(i, j + 1, :), 3, 2) - flux(s(i, j - 1, :), s(i, j, :), 3, 2))
        end do
      end do
      s(1:w%n(1), 1:w%n(2), :) = next
    end associate
  end subroutine

  !> Of all ranks; it never changes.
  real(real64) function mass(w)
    type(water), intent(in) :: w
    real(real64) :: mine
    mine = sum(w%state(1:w%n(1), 1:w%n(2), 1))
    call MPI_Allreduce(mine, mass, 1, MPI_DOUBLE_PRECISION, MPI_SUM, w%comm)
  end function

end module

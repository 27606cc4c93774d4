! The functions of tessera/c/tessera.h as Fortran sees them; `module tessera` is what programs use.
! Those with arrays go through descriptor.c, which gets the compiler's own descriptors.
module tessera_bindings
  use, intrinsic :: iso_c_binding
  implicit none
  public

  !> What a step came to: the same on every rank.
  type, bind(c) :: tessera_step
    !> Mean over what the step's losses were weighted by.
    real(c_double) :: loss = 0
    real(c_double) :: weight = 0
    !> Of the gradients, before clipping; NaN where none was taken.
    real(c_double) :: norm = 0
    !> 0: the step was left out, since a gradient was not finite.
    integer(c_int) :: stepped = 0
    !> Not 0: some rank got a signal, or asked to stop.
    integer(c_int) :: stop = 0
  end type

  interface
    type(c_ptr) function c_message() bind(c, name="tessera_message")
      import :: c_ptr
    end function

    type(c_ptr) function c_result_name(result) bind(c, name="tessera_result_name")
      import :: c_ptr, c_int
      integer(c_int), value :: result
    end function

    integer(c_size_t) function c_strlen(text) bind(c, name="strlen")
      import :: c_ptr, c_size_t
      type(c_ptr), value :: text
    end function

    integer(c_int) function c_refuse(name, text) bind(c, name="tessera_refuse")
      import :: c_int, c_char
      character(kind=c_char), intent(in) :: name(*), text(*)
    end function

    ! ---- through descriptor.c ----

    integer(c_int) function c_field(mesh, array, before, after, axes, field) &
      bind(c, name="tessera_field_of_descriptor")
      import :: c_ptr, c_int, c_int64_t
      type(c_ptr), value :: mesh
      type(*), intent(inout), target :: array(..)
      integer(c_int64_t), intent(in), optional :: before(*), after(*)
      integer(c_int), intent(in) :: axes(*)
      type(c_ptr), intent(out) :: field
    end function

    integer(c_int) function c_all_reduce(group, array, op) &
      bind(c, name="tessera_all_reduce_of_descriptor")
      import :: c_ptr, c_int
      type(c_ptr), value :: group
      type(*), intent(inout) :: array(..)
      integer(c_int), value :: op
    end function

    integer(c_int) function c_broadcast(group, array, root) &
      bind(c, name="tessera_broadcast_of_descriptor")
      import :: c_ptr, c_int
      type(c_ptr), value :: group
      type(*), intent(inout) :: array(..)
      integer(c_int), value :: root
    end function

    integer(c_int) function c_all_gather(group, mine, all) &
      bind(c, name="tessera_all_gather_of_descriptors")
      import :: c_ptr, c_int
      type(c_ptr), value :: group
      type(*), intent(in) :: mine(..)
      type(*), intent(inout) :: all(..)
    end function

    integer(c_int) function c_point_at_32(tensor, values) &
      bind(c, name="tessera_point_at_local")
      import :: c_ptr, c_int, c_float
      type(c_ptr), value :: tensor
      real(c_float), pointer, intent(inout) :: values(..)
    end function

    integer(c_int) function c_point_at_64(tensor, values) &
      bind(c, name="tessera_point_at_local")
      import :: c_ptr, c_int, c_double
      type(c_ptr), value :: tensor
      real(c_double), pointer, intent(inout) :: values(..)
    end function

    ! ---- as the header declares them, in its order ----

    integer(c_int) function c_start(backend, timeout, job) bind(c, name="tessera_start")
      import :: c_int, c_ptr, c_char, c_double
      character(kind=c_char), intent(in), optional :: backend(*)
      real(c_double), value :: timeout
      type(c_ptr), intent(out) :: job
    end function

    integer(c_int) function c_start_fortran(communicator, backend, timeout, job) &
      bind(c, name="tessera_start_fortran")
      import :: c_int, c_ptr, c_char, c_double
      integer(c_int), value :: communicator
      character(kind=c_char), intent(in), optional :: backend(*)
      real(c_double), value :: timeout
      type(c_ptr), intent(out) :: job
    end function

    integer(c_int) function c_set_threads(threads) bind(c, name="tessera_set_threads")
      import :: c_int
      integer(c_int), value :: threads
    end function

    integer(c_int) function c_seed(seed) bind(c, name="tessera_seed")
      import :: c_int, c_int64_t
      integer(c_int64_t), value :: seed
    end function

    integer(c_int) function c_mesh_create(job, axes, names, sizes, ranks, mesh) &
      bind(c, name="tessera_mesh_create")
      import :: c_int, c_ptr
      type(c_ptr), value :: job
      integer(c_int), value :: axes
      type(c_ptr), intent(in) :: names(*)
      integer(c_int), intent(in), optional :: sizes(*), ranks(*)
      type(c_ptr), intent(out) :: mesh
    end function

    integer(c_int) function c_mesh_coordinate(mesh, coordinate) bind(c, name="tessera_mesh_coordinate")
      import :: c_int, c_ptr
      type(c_ptr), value :: mesh
      integer(c_int), intent(out), optional :: coordinate(*)
    end function

    integer(c_int) function c_mesh_group(mesh, axis, group) bind(c, name="tessera_mesh_group")
      import :: c_int, c_ptr
      type(c_ptr), value :: mesh
      integer(c_int), value :: axis
      type(c_ptr), intent(out) :: group
    end function

    integer(c_int) function c_fill_ghosts(field, edges) bind(c, name="tessera_fill_ghosts")
      import :: c_int, c_ptr
      type(c_ptr), value :: field
      integer(c_int), intent(in), optional :: edges(*)
    end function

    integer(c_int) function c_halo(field, before, after, edges, wide) bind(c, name="tessera_halo")
      import :: c_int, c_ptr, c_int64_t
      type(c_ptr), value :: field
      integer(c_int64_t), intent(in), optional :: before(*), after(*)
      integer(c_int), intent(in), optional :: edges(*)
      type(c_ptr), intent(out) :: wide
    end function

    integer(c_int) function c_copy(to, from) bind(c, name="tessera_copy")
      import :: c_int, c_ptr
      type(c_ptr), value :: to, from
    end function

    integer(c_int) function c_value(tensor, value) bind(c, name="tessera_value")
      import :: c_int, c_ptr, c_double
      type(c_ptr), value :: tensor
      real(c_double), intent(out), optional :: value
    end function

    integer(c_int) function c_shape(tensor, dims, shape) bind(c, name="tessera_shape")
      import :: c_int, c_ptr, c_int64_t
      type(c_ptr), value :: tensor
      integer(c_int), intent(out), optional :: dims
      integer(c_int64_t), intent(out), optional :: shape(*)
    end function

    integer(c_int) function c_local(tensor, data, dtype, shape, strides, offset) &
      bind(c, name="tessera_local")
      import :: c_int, c_ptr, c_int64_t
      type(c_ptr), value :: tensor
      type(c_ptr), intent(out), optional :: data
      integer(c_int), intent(out), optional :: dtype
      integer(c_int64_t), intent(out), optional :: shape(*), strides(*), offset(*)
    end function

    integer(c_int) function c_model_load(mesh, file, dtype, model) bind(c, name="tessera_model_load")
      import :: c_int, c_ptr, c_char
      type(c_ptr), value :: mesh
      character(kind=c_char), intent(in), optional :: file(*)
      integer(c_int), value :: dtype
      type(c_ptr), intent(out) :: model
    end function

    integer(c_int) function c_model_create(mesh, name, options, dtype, model) &
      bind(c, name="tessera_model_create")
      import :: c_int, c_ptr, c_char
      type(c_ptr), value :: mesh
      character(kind=c_char), intent(in), optional :: name(*), options(*)
      integer(c_int), value :: dtype
      type(c_ptr), intent(out) :: model
    end function

    integer(c_int) function c_model_train(model, on) bind(c, name="tessera_model_train")
      import :: c_int, c_ptr
      type(c_ptr), value :: model
      integer(c_int), value :: on
    end function

    integer(c_int) function c_loss(kind, output, target, loss) bind(c, name="tessera_loss")
      import :: c_int, c_ptr, c_char
      character(kind=c_char), intent(in), optional :: kind(*)
      type(c_ptr), value :: output, target
      type(c_ptr), intent(out) :: loss
    end function

    integer(c_int) function c_backward(tensor, gradient) bind(c, name="tessera_backward")
      import :: c_int, c_ptr
      type(c_ptr), value :: tensor, gradient
    end function

    integer(c_int) function c_optimizer_create(model, kind, options, optimizer) &
      bind(c, name="tessera_optimizer_create")
      import :: c_int, c_ptr, c_char
      type(c_ptr), value :: model
      character(kind=c_char), intent(in), optional :: kind(*), options(*)
      type(c_ptr), intent(out) :: optimizer
    end function

    integer(c_int) function c_session_create(optimizer, options, session) &
      bind(c, name="tessera_session_create")
      import :: c_int, c_ptr, c_char
      type(c_ptr), value :: optimizer
      character(kind=c_char), intent(in), optional :: options(*)
      type(c_ptr), intent(out) :: session
    end function

    integer(c_int) function c_session_backward(session, loss, weight, last) &
      bind(c, name="tessera_session_backward")
      import :: c_int, c_ptr, c_double
      type(c_ptr), value :: session, loss
      real(c_double), value :: weight
      integer(c_int), value :: last
    end function

    integer(c_int) function c_session_step(session, step) bind(c, name="tessera_session_step")
      import :: c_int, c_ptr, tessera_step
      type(c_ptr), value :: session
      type(tessera_step), intent(out) :: step
    end function

    integer(c_int) function c_state_add(state, name, handle) bind(c, name="tessera_state_add")
      import :: c_int, c_ptr, c_char
      type(c_ptr), value :: state
      character(kind=c_char), intent(in), optional :: name(*)
      type(c_ptr), value :: handle
    end function

    integer(c_int) function c_state_set_integer(state, name, value) &
      bind(c, name="tessera_state_set_integer")
      import :: c_int, c_ptr, c_char, c_int64_t
      type(c_ptr), value :: state
      character(kind=c_char), intent(in), optional :: name(*)
      integer(c_int64_t), value :: value
    end function

    integer(c_int) function c_state_set_real(state, name, value) bind(c, name="tessera_state_set_real")
      import :: c_int, c_ptr, c_char, c_double
      type(c_ptr), value :: state
      character(kind=c_char), intent(in), optional :: name(*)
      real(c_double), value :: value
    end function

    integer(c_int) function c_state_get_integer(state, name, value) &
      bind(c, name="tessera_state_get_integer")
      import :: c_int, c_ptr, c_char, c_int64_t
      type(c_ptr), value :: state
      character(kind=c_char), intent(in), optional :: name(*)
      integer(c_int64_t), intent(out), optional :: value
    end function

    integer(c_int) function c_state_get_real(state, name, value) bind(c, name="tessera_state_get_real")
      import :: c_int, c_ptr, c_char, c_double
      type(c_ptr), value :: state
      character(kind=c_char), intent(in), optional :: name(*)
      real(c_double), intent(out), optional :: value
    end function

    integer(c_int) function c_save(state, folder, name, keep_last) bind(c, name="tessera_save")
      import :: c_int, c_ptr, c_char
      type(c_ptr), value :: state
      character(kind=c_char), intent(in), optional :: folder(*), name(*)
      integer(c_int), value :: keep_last
    end function

    integer(c_int) function c_load(state, folder, name) bind(c, name="tessera_load")
      import :: c_int, c_ptr, c_char
      type(c_ptr), value :: state
      character(kind=c_char), intent(in), optional :: folder(*), name(*)
    end function

    integer(c_int) function c_latest(job, folder, room, name) bind(c, name="tessera_latest")
      import :: c_int, c_ptr, c_char, c_size_t
      type(c_ptr), value :: job
      character(kind=c_char), intent(in), optional :: folder(*)
      integer(c_size_t), value :: room
      character(kind=c_char), intent(out) :: name(*)
    end function
  end interface

  ! ---- those that are alike ----

  abstract interface
    integer(c_int) function on_handle(handle) bind(c)
      import :: c_int, c_ptr
      type(c_ptr), value :: handle
    end function

    integer(c_int) function rank_of(of, rank, size) bind(c)
      import :: c_int, c_ptr
      type(c_ptr), value :: of
      integer(c_int), intent(out), optional :: rank, size
    end function

    integer(c_int) function from_integers(of, count, numbers, made) bind(c)
      import :: c_int, c_ptr
      type(c_ptr), value :: of
      integer(c_int), value :: count
      integer(c_int), intent(in), optional :: numbers(*)
      type(c_ptr), intent(out) :: made
    end function

    integer(c_int) function made_of(of, made) bind(c)
      import :: c_int, c_ptr
      type(c_ptr), value :: of
      type(c_ptr), intent(out) :: made
    end function

    integer(c_int) function count_of(of, count) bind(c)
      import :: c_int, c_ptr, c_int64_t
      type(c_ptr), value :: of
      integer(c_int64_t), intent(out), optional :: count
    end function

    integer(c_int) function on_tensors(model, inputs, input, outputs, output) bind(c)
      import :: c_int, c_ptr
      type(c_ptr), value :: model
      integer(c_int), value :: inputs
      type(c_ptr), intent(in) :: input(*)
      integer(c_int), value :: outputs
      type(c_ptr), intent(out) :: output(*)
    end function
  end interface

  procedure(on_handle), bind(c, name="tessera_end") :: c_end
  procedure(rank_of), bind(c, name="tessera_rank") :: c_rank
  procedure(on_handle), bind(c, name="tessera_free") :: c_free
  procedure(from_integers), bind(c, name="tessera_group_create") :: c_group_create
  procedure(rank_of), bind(c, name="tessera_group_rank") :: c_group_rank
  procedure(on_handle), bind(c, name="tessera_barrier") :: c_barrier
  procedure(made_of), bind(c, name="tessera_clone") :: c_clone
  procedure(from_integers), bind(c, name="tessera_arrange") :: c_arrange
  procedure(on_handle), bind(c, name="tessera_require_gradient") :: c_require_gradient
  procedure(made_of), bind(c, name="tessera_gradient") :: c_gradient
  procedure(count_of), bind(c, name="tessera_model_size") :: c_model_size
  procedure(on_tensors), bind(c, name="tessera_forward") :: c_forward
  procedure(on_tensors), bind(c, name="tessera_predict") :: c_predict
  procedure(on_handle), bind(c, name="tessera_optimizer_zero") :: c_optimizer_zero
  procedure(on_handle), bind(c, name="tessera_optimizer_step") :: c_optimizer_step
  procedure(on_handle), bind(c, name="tessera_session_stop") :: c_session_stop
  procedure(count_of), bind(c, name="tessera_session_steps") :: c_session_steps
  procedure(made_of), bind(c, name="tessera_state_create") :: c_state_create

end module

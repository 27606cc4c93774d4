"""Ranks and sharded tensors: each function is one call of the library."""

import atexit
import contextlib
import multiprocessing
import sys
import threading
from operator import index

import torch

from tessera._errors import CommError, ConfigurationError, Error, InvalidArgument
from tessera._groups import _seconds
from tessera._library import classes, ops
from tessera._mesh import Mesh, Spec, handle_of
from tessera._placement import ParameterPlacement, from_text, to_text


def init(backend="", timeout=300.0, between_hosts="auto", process_group=None, communicator=None):
    """Meets the other ranks of this job (torchrun, `tessera run`, Slurm, mpirun; alone without a launcher).

    `backend`: "auto" (default: memory inside a host, Gloo between hosts), "gloo", "shm" (ranks of one host) or "mpi". `timeout`: seconds, the limit of every wait.
    `between_hosts`: what collectives go over between hosts: "gloo" (and "auto"), or "mpi" in a job that MPI's own launcher started.
    `process_group`: one of torch.distributed's, whose ranks are the world then, whoever started them; collective over it. They meet through its store; `backend="c10d"` is
    that group itself, for groups of all its ranks. It stays yours: it is not ended here.
    `communicator`: one of mpi4py's, whose ranks are the world then, over MPI (or by `backend="auto"` memory and Gloo); collective over it. It is duplicated and stays yours, and so does MPI.

    Raises ConfigurationError where the rank is initialized already or what the launcher says cannot be, InvalidArgument for a backend that there is not, ValueError for a
    negative timeout, NotAvailable for what this build lacks, and RendezvousError, with what is missing, where the others do not come within `timeout`.

    >>> ts.init(timeout=60)              # once, at the start of the program; alone without a launcher
    >>> ts.rank(), ts.world_size()
    (0, 1)
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigurationError(
            "a worker process has imported this program, which begins with init(): it is no rank and meets no job. "
            "Put what the program does into a function, and call that under `if __name__ == \"__main__\":`"
        )
    if communicator is not None and process_group is not None:
        raise InvalidArgument("init was given a process group and a communicator of MPI: the ranks are those of one of them")
    if communicator is not None and not hasattr(communicator, "py2f"):
        raise InvalidArgument(f"init was given a {type(communicator).__name__} as communicator: give one of mpi4py's, MPI.COMM_WORLD for instance")
    group = None if process_group is None else process_group.boxed()
    ops.init(backend, _seconds(timeout), between_hosts, group, None if communicator is None else communicator.py2f())
    atexit.register(shutdown)


def shutdown():
    """Deregisters from the job. Called at the end of the program by itself; collective.

    >>> ts.shutdown()                    # after the last call of another rank's data; needed only to end the job early
    """
    error = getattr(sys, "last_value", None)
    if error is not None and not isinstance(error, CommError):  # of which the others know
        with contextlib.suppress(Error):  # what still holds a graph keeps the groups open beyond this
            Mesh({"ranks": world_size()}).fail(f"its program ended by {type(error).__name__}: {error}")
    ops.shutdown(error is not None)


def rank():
    """This process' global rank; in `run_threads` this thread's. Raises ConfigurationError before `init`, as what needs ranks does.

    >>> if ts.rank() == 0: print("said once")
    said once
    """
    return ops.rank()


def world_size():
    """How many ranks the job has. Raises ConfigurationError before `init`.

    >>> ts.run_threads(3, lambda rank: ts.world_size())
    [3, 3, 3]
    """
    return ops.world_size()


def local_rank():
    """This rank's number on its host. Raises ConfigurationError before `init`.

    >>> ts.run_threads(2, lambda rank: ts.local_rank())
    [0, 1]
    """
    return ops.local_rank()


def manual_seed(seed):
    """Restarts the random numbers of sharded tensors. The same seed on all ranks; nothing is compared. Raises ConfigurationError before `init`.

    >>> ts.manual_seed(7); a = ts.rand([4], mesh, ts.Shard(0))
    >>> ts.manual_seed(7); b = ts.rand([4], mesh, ts.Replicate())
    >>> torch.equal(ts.full_tensor(a), ts.full_tensor(b))    # they depend on no placement
    True
    """
    ops.manual_seed(seed)


def set_policies(redistribution="warn", promotion="allow", plain_values="warn"):
    """'allow', 'warn' or 'error': for operators that move shards by themselves, for plain tensors that meet sharded ones, and for such
    tensors whose values differ by rank (unless 'allow', the first of each shape that an operator is given is compared). Raises InvalidArgument for another word.

    >>> ts.set_policies(redistribution="error")      # from here on nothing moves unasked: ImplicitRedistributionError
    """
    ops.set_policies(redistribution, promotion, plain_values)


def _sizes(sizes):
    return {index(d): [index(n) for n in parts] for d, parts in (sizes or {}).items()}


def from_local(local, mesh, placements, sizes=None):
    """The tensor whose shards are the ranks' `local`s: its global shape is that of the shards joined. Shares their memory where they are contiguous.

    `placements`: one for each axis of the mesh. `sizes`: of sharded dims, `{dim: [rows of each shard]}`; collective where they are not given, for they are gathered
    then. Differentiable. Raises InvalidArgument on every rank where locals differ in dtype, device or a dim that no axis shards.

    >>> def body(rank):
    ...     mine = torch.full((rank + 1, 2), float(rank))          # any number of rows on each rank
    ...     return ts.summary(ts.from_local(mine, ts.Mesh({"data": 2}), ts.Shard(0)))
    >>> ts.run_threads(2, body)[1]
    'ShardTensor Float [3, 2] data=Shard(0)[1, 2], local [2, 2] at [1, 0]'
    """
    return ops.from_local(local, handle_of(mesh), to_text(placements), _sizes(sizes))


def distribute_tensor(full, mesh, placements, sizes=None):
    """Each rank takes its shard of `full`, which is the same on all ranks, and of the result's shape. Differentiable; no communication.

    A rank's own batch is no such tensor: of it only a part would count, and nothing says so but `set_check_level("collective")`, which compares (MismatchError).
    `from_local` makes one tensor of the ranks' own.

    `sizes`: `{dim: [rows of each shard]}`, by default as even as possible, the first ones larger. Raises InvalidArgument for placements and sizes that do not fit the
    shape.

    >>> def body(rank):
    ...     full = torch.arange(5)                                  # the same on all ranks
    ...     t = ts.distribute_tensor(full, ts.Mesh({"data": 2}), ts.Shard(0), {0: [4, 1]})
    ...     return ts.to_local(t).tolist()
    >>> ts.run_threads(2, body)
    [[0, 1, 2, 3], [4]]
    """
    return ops.distribute_tensor(full, handle_of(mesh), to_text(placements), _sizes(sizes))


def scatter(full, mesh, placements, sizes=None, root=0):
    """The rank at mesh position `root` holds `full` (others may give None); every rank gets its shard. Collective.

    Raises InvalidArgument, on every rank, for a root that the mesh does not have, and for placements and sizes that do not fit; MismatchError where
    ranks give different roots.

    >>> def body(rank):
    ...     full = torch.arange(4) if rank == 0 else None
    ...     return ts.to_local(ts.scatter(full, ts.Mesh({"data": 2}), ts.Shard(0))).tolist()
    >>> ts.run_threads(2, body)
    [[0, 1], [2, 3]]
    """
    return ops.scatter(full, handle_of(mesh), to_text(placements), _sizes(sizes), root)


def redistribute(tensor, placements, sizes=None):
    """The same value, of the same shape, in other placements. Differentiable. Collective where something moves: `explain_redistribution` says what.

    Raises InvalidArgument for a plain tensor, and for placements and sizes that do not fit.

    >>> ts.redistribute(t, ts.Shard(1))
    <ShardTensor Float [4, 8] data=Shard(1)[8], local [4, 8] at [0, 0]>
    """
    return ops.redistribute(tensor, to_text(placements), _sizes(sizes))


def full_tensor(tensor):
    """The global value on every rank, as a plain tensor with memory of its own. Collective. Differentiable. Raises InvalidArgument for a plain tensor.

    >>> ts.full_tensor(t).shape
    torch.Size([4, 8])
    """
    return ops.full_tensor(tensor)


def to_local(tensor, gradient=None):
    """This rank's shard, a plain tensor of `spec(tensor).local_shape` that shares its memory. Communicates nothing.

    `gradient`: placements of the gradient that comes back; default the tensor's own, with Replicate in place of Partial. Raises InvalidArgument for a plain tensor.

    >>> ts.run_threads(2, lambda rank: ts.to_local(ts.ones([3, 8], ts.Mesh({"data": 2}), ts.Shard(0))).shape)
    [torch.Size([2, 8]), torch.Size([1, 8])]
    """
    return ops.to_local(tensor, None if gradient is None else to_text(gradient))


def is_sharded(tensor):
    """False for plain tensors.

    >>> ts.is_sharded(t), ts.is_sharded(x)
    (True, False)
    """
    return ops.is_sharded(tensor)


def spec(tensor):
    """Where the elements of a sharded tensor lie; communicates nothing. Raises InvalidArgument for a plain tensor.

    >>> ts.spec(t)
    Spec([4, 8] data=Shard(0)[4])
    """
    handle = ops.spec(tensor)
    return Spec(
        Mesh._of(handle.mesh()),
        tuple(handle.shape()),
        tuple(from_text(p) for p in handle.placements()),
        {d: list(parts) for d, parts in handle.sizes().items()},
        tuple(handle.local_shape()),
        tuple(handle.local_offset()),
        handle.text(),
    )


def summary(tensor):
    """One line: dtype, shape, placements, and this rank's shard. No communication. Raises InvalidArgument for a plain tensor.

    >>> ts.summary(t)
    'ShardTensor Float [4, 8] data=Shard(0)[4], local [4, 8] at [0, 0]'
    """
    return ops.summary(tensor)


def _with_sizes(placed):
    """`placed` is placements, which may be a tuple too, or (placements, sizes)."""
    pair = isinstance(placed, tuple) and len(placed) == 2 and (placed[1] is None or isinstance(placed[1], dict))
    return placed if pair else (placed, None)


def distribute_module(module, mesh, rule=None):
    """Makes the parameters and buffers of `module` sharded tensors, in place, and returns it.

    `rule(name, tensor)` gives placements, or (placements, sizes), or a `ParameterPlacement` (see `stay`), or None for replicated. Before the first forward
    pass. Collective over the mesh, whose first rank's values are broadcast before they are sharded. Raises InvalidArgument for placements that do not fit, and
    MismatchError where the ranks' modules or rules differ, on every rank.

    >>> net = ts.distribute_module(net, mesh, lambda name, p: ts.Shard(0) if name == "0.weight" else None)
    >>> net[0].weight.shape, ts.spec(net[0].weight).placements, ts.spec(net[2].weight).placements
    (torch.Size([16, 8]), (Shard(dim=0),), (Replicate(),))
    >>> net(t).sum().backward()                      # gradients are those of one process
    """
    handle = handle_of(mesh)
    parameters, buffers, where = list(module.named_parameters()), list(module.named_buffers()), []
    for name, tensor in [*parameters, *buffers]:
        given = None if rule is None else rule(name, tensor)
        given = ["Replicate"] * len(mesh.axes) if given is None else given
        placed = given if isinstance(given, ParameterPlacement) else ParameterPlacement(*_with_sizes(given))
        where.append((to_text(placed.placements), _sizes(placed.sizes), (*(placed.sequence or (-1, 0)), placed.stays)))
    names, tensors = [n for n, _ in parameters + buffers], [t for _, t in parameters + buffers]
    ops.distribute_parameters(names, tensors, len(parameters), handle, where)
    return module


class no_sync(contextlib.ContextDecorator):
    """Gradients of `module` accumulate locally in this scope, and nothing is sent; the next backward outside reduces them.

    For all that reduce gradients of its parameters; those of `distribute_module` stay partial sums. Scopes nest, and one object may be
    entered several times. An exception ends it as well. Alike on all ranks.

    >>> ddp = ts.DistributedDataParallel(net)
    >>> with ts.no_sync(net):
    ...     ddp(x).sum().backward()                  # accumulates, sends nothing
    >>> ddp(x).sum().backward()                      # reduces both
    """

    def __init__(self, module):
        self._scopes = classes.NoSync(list(module.parameters()))

    def __enter__(self):
        self._scopes.begin()
        return self

    def __exit__(self, *exception):
        self._scopes.end()


def reduce_gradients(module):
    """Reduces now what has been accumulated and not been reduced, after `no_sync` scopes without a last backward. Collective.

    >>> ddp = ts.DistributedDataParallel(net)
    >>> with ts.no_sync(net):
    ...     ddp(x).sum().backward()
    >>> ts.reduce_gradients(net)
    """
    ops.reduce_gradients(list(module.parameters()))


def _named(tensors):
    if isinstance(tensors, torch.nn.Module):
        tensors = {**dict(tensors.named_parameters()), **dict(tensors.named_buffers())}
    elif isinstance(tensors, torch.Tensor):
        tensors = {"tensor": tensors}
    return list(tensors.keys()), list(tensors.values())


def save(tensors, mesh, path, max_bytes=0):
    """A module's parameters and buffers, a dictionary of tensors, or one tensor (named "tensor"), into one safetensors file. Collective.

    `max_bytes`: into a folder of files of at most so many bytes, with the index that Hugging Face's tools write and read (model.safetensors.index.json).
    Names, dtypes, shapes and placements are the same on all ranks, which compare them by a hash. Values of plain tensors are not compared: those of the mesh's
    first rank are saved. Raises InvalidArgument for a dtype that the format does not have (complex128), FileError for a path that cannot be written,
    MismatchError where ranks differ, with the first tensor that does, on every rank.

    >>> ts.save(net, mesh, "net.safetensors")
    >>> ts.save({"field": t}, mesh, "folder", max_bytes=1 << 30)
    """
    if max_bytes < 0:
        raise InvalidArgument(f"save: files of at most {max_bytes} bytes: give a number above 0, or 0 for one file")
    if max_bytes:
        ops.save_folder(*_named(tensors), handle_of(mesh), str(path), int(max_bytes))
    else:
        ops.save(*_named(tensors), handle_of(mesh), str(path))


def load(path, mesh, placements=None):
    """All tensors of a file, or of a folder of files with an index (model.safetensors.index.json), by name. Collective.

    `placements` maps names to placements, or (placements, sizes); the others are replicated. Raises FileError for a file that is absent or damaged,
    InvalidArgument for names that it does not have, MismatchError where ranks give different placements, on every rank.

    >>> ts.save({"field": t}, mesh, "field.safetensors")
    >>> ts.load("field.safetensors", mesh, {"field": ts.Shard(1)})["field"]
    <ShardTensor Float [4, 8] data=Shard(1)[8], local [4, 8] at [0, 0]>
    """
    names, where, parts = [], [], []
    for name, placed in (placements or {}).items():
        placed, sizes = _with_sizes(placed)
        names.append(name)
        where.append(to_text(placed))
        parts.append(_sizes(sizes))
    return dict(zip(*ops.load(handle_of(mesh), str(path), names, where, parts)))


def load_into(tensors, mesh, path):
    """A file, or a folder of files with an index as for `load`, into the tensors that are there (as for `save`), wherever they lie. Collective.

    Raises FileError for a file that is absent or damaged, and InvalidArgument where names or shapes do not fit, on every rank; nothing is changed then.

    >>> ts.save(net, mesh, "net.safetensors")
    >>> ts.load_into(net, mesh, "net.safetensors")
    """
    ops.load_into(*_named(tensors), handle_of(mesh), str(path))


class CommTrace:
    """Counts what this rank's groups do in a scope.

    with CommTrace() as trace:
        loss.backward()
    assert trace.bytes == 0
    """

    def __init__(self):
        self._handle = classes.CommTrace()

    def __enter__(self):
        self._handle.start()
        return self

    def __exit__(self, *_):
        self._handle.stop()

    @property
    def events(self):
        """(operation, group, bytes) of each call, in order of completion.

        >>> with ts.CommTrace() as trace:
        ...     ts.world().all_reduce(torch.ones(3))
        tensor([1., 1., 1.])
        >>> trace.events, trace.count, trace.bytes
        ([('all_reduce', 'world', 12)], 1, 12)
        """
        return self._handle.events()

    @property
    def count(self):
        """Calls."""
        return len(self.events)

    @property
    def bytes(self):
        """What this rank gave to them."""
        return sum(e[2] for e in self.events)

    def table(self):
        """One line per operation and group, most time first.

        >>> with ts.CommTrace() as trace:
        ...     ts.world().barrier()
        >>> print(trace.table())                         # doctest: +ELLIPSIS
        operation...
        """
        return self._handle.table()

    def write_timeline(self, path):
        """For chrome://tracing or ui.perfetto.dev; files of several ranks load together.

        >>> with ts.CommTrace() as trace:
        ...     ts.world().barrier()
        >>> trace.write_timeline(f"rank-{ts.rank()}.json")
        """
        self._handle.write_timeline(path)


def run_threads(ranks, fn, backend="", timeout=300.0):
    """Runs `fn(rank)` on `ranks` threads, each a rank of one job in this process; returns their results in order of rank.

    The first exception is raised here; the other ranks' waits end. CPU tensors only. `timeout`: seconds, the limit of every wait.

    >>> ts.run_threads(3, lambda rank: ts.world().all_reduce(torch.tensor(rank)).item())
    [3, 3, 3]
    """
    job = classes.ThreadRanks(ranks, backend, _seconds(timeout))
    results, errors, lock = [None] * ranks, [], threading.Lock()

    def body(r):
        try:
            job.enter(r)
            try:
                results[r] = fn(r)
            except BaseException as error:
                with lock:
                    errors.append((r, error))
                job.fail(r, f"{type(error).__name__}: {error}")
            finally:
                job.leave(r)
        except BaseException as error:
            with lock:
                errors.append((r, error))

    threads = [threading.Thread(target=body, args=(r,), daemon=True, name=f"rank {r}") for r in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        r, error = errors[0]
        error.add_note(f"on rank {r} of {ranks}")
        raise error
    return results

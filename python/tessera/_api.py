"""The package's functions: each is one call of the library."""

import atexit
import contextlib
import sys
import threading
from dataclasses import dataclass

import torch

from tessera._library import classes, ops
from tessera._placement import from_text, to_text


def init(backend="", timeout=300.0):
    """Meets the other ranks of this job (torchrun, `tessera run`, Slurm, mpirun; alone without a launcher).

    `backend`: "gloo" (default), "shm" (ranks of one host) or "mpi". `timeout`: seconds, the limit of every wait.
    """
    ops.init(backend, float(timeout))
    atexit.register(shutdown)


def shutdown():
    """Says goodbye to the other ranks. Called at the end of the program by itself; collective."""
    ops.shutdown(getattr(sys, "last_value", None) is not None)


def rank():
    return ops.rank()


def world_size():
    return ops.world_size()


def local_rank():
    return ops.local_rank()


def manual_seed(seed):
    """Restarts the random numbers of sharded tensors. The same seed on all ranks."""
    ops.manual_seed(seed)


def set_policies(redistribution="warn", promotion="allow"):
    """'allow', 'warn' or 'error': for operators that move shards by themselves, and for plain tensors that meet sharded ones."""
    ops.set_policies(redistribution, promotion)


class Mesh:
    """Named axes over all ranks, outermost first: `Mesh({'data': 2, 'domain': 3})` of 6 ranks."""

    def __init__(self, axes):
        self._handle = classes.Mesh(list(axes.keys()), [int(n) for n in axes.values()])

    @classmethod
    def _of(cls, handle):
        mesh = cls.__new__(cls)
        mesh._handle = handle
        return mesh

    @property
    def axes(self):
        return dict(zip(self._handle.names(), self._handle.sizes()))

    @property
    def coordinate(self):
        """This rank's place, one number an axis."""
        return tuple(self._handle.coordinate())

    def barrier(self):
        self._handle.barrier()

    def fail(self, reason):
        """Tells the other ranks that this one met an error: the pending or next call of each raises, once, and where all catch it the mesh goes on."""
        self._handle.fail(reason)

    def __eq__(self, other):
        return isinstance(other, Mesh) and self._handle.same(other._handle)

    def __hash__(self):
        return hash(tuple(self.axes.items()))

    def __repr__(self):
        return f"Mesh({self.axes})"


@dataclass(frozen=True)
class Spec:
    """Where every element of a tensor lies."""

    mesh: Mesh
    shape: tuple
    placements: tuple
    sizes: dict  # sharded dim -> sizes of its parts
    local_shape: tuple
    local_offset: tuple
    text: str

    def __repr__(self):
        return f"Spec({self.text})"


def _sizes(sizes):
    return {int(d): [int(n) for n in parts] for d, parts in (sizes or {}).items()}


def from_local(local, mesh, placements, sizes=None):
    """The tensor whose parts are the ranks' `local`s; sizes of sharded dims that are not given are gathered. Differentiable."""
    return ops.from_local(local, mesh._handle, to_text(placements), _sizes(sizes))


def distribute_tensor(full, mesh, placements, sizes=None):
    """Each rank cuts its part of `full`, which is the same on all ranks. Differentiable; no communication."""
    return ops.distribute_tensor(full, mesh._handle, to_text(placements), _sizes(sizes))


def scatter(full, mesh, placements, sizes=None, root=0):
    """The rank at mesh position `root` holds `full` (others may give None); every rank gets its part."""
    return ops.scatter(full, mesh._handle, to_text(placements), _sizes(sizes), root)


def redistribute(tensor, placements, sizes=None):
    """The same value in other placements. Differentiable."""
    return ops.redistribute(tensor, to_text(placements), _sizes(sizes))


def full_tensor(tensor):
    """The whole value on every rank, as a plain tensor. Differentiable."""
    return ops.full_tensor(tensor)


def to_local(tensor, gradient=None):
    """This rank's part; shares its memory. `gradient`: placements of the gradient that comes back; default the tensor's own."""
    return ops.to_local(tensor, None if gradient is None else to_text(gradient))


def is_sharded(tensor):
    return ops.is_sharded(tensor)


def spec(tensor):
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
    """One line: dtype, shape, placements, and this rank's part. No communication."""
    return ops.summary(tensor)


def _with_sizes(placed):
    """`placed` is placements, which may be a tuple too, or (placements, sizes)."""
    pair = isinstance(placed, tuple) and len(placed) == 2 and (placed[1] is None or isinstance(placed[1], dict))
    return placed if pair else (placed, None)


def distribute_module(module, mesh, rule=None):
    """Makes the parameters and buffers of `module` sharded tensors, in place, and returns it.

    `rule(name, tensor)` gives placements, or (placements, sizes), or None for replicated. Before the first forward pass.
    """
    names, tensors, where, parts = [], [], [], []
    parameters, buffers = list(module.named_parameters()), list(module.named_buffers())
    for name, tensor in [*parameters, *buffers]:
        placements, sizes = _with_sizes((rule and rule(name, tensor)) or ["Replicate"] * len(mesh.axes))
        names.append(name)
        tensors.append(tensor)
        where.append(to_text(placements))
        parts.append(_sizes(sizes))
    ops.distribute_parameters(names, tensors, len(parameters), mesh._handle, where, parts)
    return module


class no_sync(contextlib.ContextDecorator):
    """Gradients of `module` accumulate locally in this scope, and nothing is sent; the next backward outside reduces them.

    For all that reduce gradients of its parameters; those of `distribute_module` stay partial sums. Scopes nest, and one object may be
    entered several times. An exception ends it as well. Alike on all ranks.
    """

    def __init__(self, module):
        self._scopes = classes.NoSync(list(module.parameters()))

    def __enter__(self):
        self._scopes.begin()
        return self

    def __exit__(self, *exception):
        self._scopes.end()


def reduce_gradients(module):
    """Reduces now what has been accumulated and not been reduced, after `no_sync` scopes without a last backward. Collective."""
    ops.reduce_gradients(list(module.parameters()))


def _named(tensors):
    if isinstance(tensors, torch.nn.Module):
        tensors = {**dict(tensors.named_parameters()), **dict(tensors.named_buffers())}
    elif isinstance(tensors, torch.Tensor):
        tensors = {"tensor": tensors}
    return list(tensors.keys()), list(tensors.values())


def save(tensors, mesh, path):
    """A module's parameters and buffers, a dictionary of tensors, or one tensor (named "tensor"), into one safetensors file. Collective."""
    ops.save(*_named(tensors), mesh._handle, str(path))


def load(path, mesh, placements=None):
    """All tensors of a file, by name. `placements` maps names to placements, or (placements, sizes); the others are replicated. Collective."""
    names, where, parts = [], [], []
    for name, placed in (placements or {}).items():
        placed, sizes = _with_sizes(placed)
        names.append(name)
        where.append(to_text(placed))
        parts.append(_sizes(sizes))
    return dict(zip(*ops.load(mesh._handle, str(path), names, where, parts)))


def load_into(tensors, mesh, path):
    """A file into the tensors that are there (as for `save`), wherever they lie. Collective."""
    ops.load_into(*_named(tensors), mesh._handle, str(path))


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
        """(operation, group, bytes) of each call, in order of completion."""
        return self._handle.events()

    @property
    def count(self):
        return len(self.events)

    @property
    def bytes(self):
        return sum(e[2] for e in self.events)

    def table(self):
        return self._handle.table()

    def write_timeline(self, path):
        self._handle.write_timeline(path)


def run_threads(ranks, fn, backend="", timeout=300.0):
    """Runs `fn(rank)` on `ranks` threads, each a rank of one job in this process; returns their results in order of rank.

    The first exception is raised here; the other ranks' waits end. CPU tensors only.
    """
    job = classes.ThreadRanks(ranks, backend, float(timeout))
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

"""Deferred construction: a model that fits on no rank is made on no rank."""

import contextlib
import functools
import math

import torch
from torch.nn.parameter import is_lazy

from tessera._errors import InvalidArgument, NotAvailable
from tessera._library import classes, ops
from tessera._mesh import handle_of


@functools.cache
def _initialise_as_others():
    """Functions of torch.nn.init leave a meta tensor as it is, and draw a truncated normal distribution by looking at the values: a deferred tensor says that
    it is no meta tensor, and inverts the distribution."""
    meta, shown, rejecting = torch.Tensor.is_meta, torch.Tensor.__repr__, torch.nn.init._no_grad_trunc_normal_
    torch.Tensor.__repr__ = lambda t, **how: f"<deferred {list(t.shape)} {t.dtype}>" if ops.is_deferred(t) else shown(t, **how)
    torch.Tensor.is_meta = property(lambda t: meta.__get__(t) and not ops.is_deferred(t), doc=meta.__doc__)

    def truncated(tensor, mean, std, a, b, generator=None):
        if not ops.is_deferred(tensor):
            return rejecting(tensor, mean, std, a, b, generator)
        below, above = (math.erf((bound - mean) / (std * math.sqrt(2))) for bound in (a, b))
        if above - below < 0.002:
            raise NotAvailable(f"deferred construction: trunc_normal_ in [{a}, {b}], which holds less than a thousandth of the numbers of mean {mean} and std {std}: "
                               "fill this tensor after the module is placed")
        with torch.no_grad():
            return tensor.uniform_(below, above, generator=generator).erfinv_().mul_(std * math.sqrt(2)).add_(mean).clamp_(a, b)

    torch.nn.init._no_grad_trunc_normal_ = truncated


class deferred(contextlib.ContextDecorator):
    """Modules that are made in this scope have no values until they are placed: a model that fits on no rank is made on no rank.

    >>> with ts.deferred():
    ...     net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    >>> ts.is_deferred(net[0].weight)
    True
    >>> net = ts.distribute_module(net, mesh, lambda name, t: [ts.Shard(0)])   # each rank fills its shards

    What the constructor does, initialisation included, is recorded instead of computed, and run parameter by parameter on tensors that are sharded from the
    start. Random numbers come from the stream of sharded tensors (`manual_seed`), so that values are those of one rank, bit for bit. What needs values
    (`item()`, a forward pass) raises NotAvailable until then, and so do random operators that cannot be drawn shard by shard (`randperm`, one with a
    generator of its own). `torch.nn.init.trunc_normal_` inverts the distribution, where torch rejects numbers until they fit. Scopes nest; one object is
    entered once at a time.
    """

    def __init__(self):
        _initialise_as_others()
        self._scope = classes.Deferred()

    def __enter__(self):
        self._scope.begin()
        return self

    def __exit__(self, *exception):
        self._scope.end()

    def _recreate_cm(self):
        return deferred()


def _children_first(module, seen):
    if module not in seen:
        seen.add(module)
        for child in module.children():
            yield from _children_first(child, seen)
        yield module


def _kept(module):
    """Parameters and buffers, by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def defer(module, init=None):
    """Defers what `module` has on the meta device, and returns the module: it is then placed as one that was made in `deferred`.

    >>> with torch.device("meta"):
    ...     net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    >>> ts.is_deferred(ts.defer(net)[0].weight)
    True
    >>> net = ts.distribute_module(net, mesh, lambda name, t: [ts.Shard(0)])   # each rank fills its shards

    Each module all of whose parameters, those of its children included, were on the meta device is initialised, children first, as constructors run: by
    `init(module)`, or by its own `reset_parameters()` or `_reset_parameters()`. That is recorded as in `deferred`, and so are its random numbers. A parameter
    that two modules share has what the first of them gave it. What nothing has written to gets its values from `fill_deferred`, or by hand (`copy_`), before
    the module is placed, which otherwise raises InvalidArgument with its name. Defer a model before `ts.split` makes stages of it. Not collective; all ranks
    do the same. Raises InvalidArgument where nothing is on the meta device; by an exception the module is as it was.
    """
    _initialise_as_others()
    kept = _kept(module)
    for name, tensor in kept.items():
        if is_lazy(tensor):
            raise InvalidArgument(f"defer: '{name}' has no shape yet: call the module once, on any input on the meta device")
    deferral = classes.Deferral(list(kept), list(kept.values()))
    try:
        for m in _children_first(module, set()):
            reset = getattr(m, "reset_parameters", None) or getattr(m, "_reset_parameters", None)
            own = [t for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
            if (init or reset) and deferral.begin(list(m.parameters()), list(m.buffers()), own):
                init(m) if init else reset()
                deferral.end()
    except BaseException:
        deferral.undo()
        raise
    return module


def is_deferred(tensor):
    """True if the tensor was made in a `deferred` scope, or is of `defer`, and has no values yet.

    >>> with ts.deferred():
    ...     layer = nn.Linear(8, 64)
    >>> ts.is_deferred(layer.weight), ts.is_deferred(x)
    (True, False)
    """
    return ops.is_deferred(tensor)


def fill_deferred(module, saved, names=(), *, convert=False, allow_missing=False, allow_extra=False):
    """Says that what is deferred in `module` gets its values from files when it is placed or materialized: nothing is drawn, and each rank reads its ranges.

    `saved`: a `CheckpointReader`, or the path of a safetensors file or of a folder with the index of Hugging Face's tools (then for the world). `names`:
    pairs of a pattern of the module's names and the name in the files, or a dictionary; a "*" stands in the second for what it matched in the first, and
    names that no pattern matches are the same. What has values already gets those of the files now. Collective over the reader's group, which are the ranks
    that place the module. Raises InvalidArgument, before anything is changed, for names that are missing, left over or of another shape or dtype
    (`allow_missing`, `allow_extra`, `convert`), FileError for files that are absent or damaged.

    >>> ts.save({"model.up.weight": torch.ones(64, 8), "model.up.bias": torch.zeros(64)}, mesh, "model", max_bytes=1024)
    >>> with ts.deferred():
    ...     layer = nn.Linear(8, 64)
    >>> ts.fill_deferred(layer, "model", {"*": "model.up.*"})
    >>> float(ts.full_tensor(ts.distribute_module(layer, mesh, lambda name, t: [ts.Shard(0)]).weight.detach()).sum())
    512.0
    """
    from tessera._checkpoint import CheckpointReader

    reader = saved if isinstance(saved, CheckpointReader) else CheckpointReader(saved)
    pairs = list(names.items() if isinstance(names, dict) else names)
    kept = module.state_dict(keep_vars=True)
    named = {name: t for name, t in kept.items() if isinstance(t, torch.Tensor)}
    ops.fill_deferred(list(named), list(named.values()), reader._handle, [a for a, _ in pairs], [b for _, b in pairs], allow_missing, allow_extra, convert)


def materialize(module, device=None, mesh=None):
    """Gives what is deferred in `module` its values on this process, whole, as its constructor would have, and returns the module.

    For modules that nothing places; numbers of `trunc_normal_`, and what is drawn after it, are others. Not collective. `device`: default the CPU. With a
    `mesh` the random numbers are those of sharded tensors, so that values are those that placing would give: for modules that a rank has alone, as the
    stages that `ts.Pipeline` fills by itself. That is collective over the mesh, whose ranks may give other modules, and on its device. Raises NotAvailable as
    `deferred`, InvalidArgument inside such a scope, and for what nothing has given values, MismatchError where ranks of the mesh have other seeds.

    >>> with ts.deferred():
    ...     layer = nn.Linear(8, 64)
    >>> ts.materialize(layer)(x).shape
    torch.Size([4, 64])
    """
    kept = _kept(module)
    if mesh is None:
        ops.materialize(list(kept.values()), "cpu" if device is None else str(device))
    elif device is not None:
        raise InvalidArgument("materialize: a mesh has a device of its own: give one of the two")
    else:
        ops.materialize_on(list(kept), list(kept.values()), handle_of(mesh))
    return module

"""Fully sharded and tensor-parallel training of torch.nn modules, and optimizers with sharded states."""

from dataclasses import dataclass

import torch

from tessera._errors import InvalidArgument
from tessera._groups import made_together
from tessera._library import classes, ops
from tessera._mesh import handle_of, told_to_others
from tessera._modules import module_tree, names
from tessera._placement import ParameterPlacement, from_text


@dataclass(frozen=True)
class UnitPrecision:
    """The dtypes of a unit of `fully_shard`: torch.float16, bfloat16, float32 or float64.

    `parameters`: in which the unit is gathered and operators that take its parameters compute; None: each parameter's own. `reduce`: in which gradients
    travel and are added up; None: each parameter's own. `output`: of the results of those operators; None: as they make them. Parameters, gradients and
    optimizer states keep the dtype in which the module was made.

    >>> net = ts.fully_shard(net, mesh, precision=ts.UnitPrecision(torch.bfloat16, torch.float32, torch.float32))
    >>> net(t).dtype, net[0].weight.dtype
    (torch.float32, torch.float32)
    """

    parameters: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None


@dataclass(frozen=True)
class OffloadOptions:
    """Shards of parameters, gradients and optimizer states lie in host memory if `to_host`, and units are gathered on `device`, by default the rank's own.

    `pin_memory`: page-locked where that is a CUDA device, without which copies do not overlap with computing.

    >>> def body(net):                               # where there is a GPU
    ...     return ts.fully_shard(net, mesh, offload=ts.OffloadOptions(to_host=True, device="cuda"))
    """

    to_host: bool = False
    device: str | torch.device | None = None
    pin_memory: bool = True


def fully_shard(
    module,
    mesh,
    axes=(),
    *,
    units=(),
    ignore=(),
    stay=(),
    reshard_after_forward=True,
    reshard_axes=(),
    prefetch=1,
    coalesce_bytes=65536,
    precision=None,
    unit_precision=None,
    offload=None,
    first_bucket_bytes=1073741824,
    bucket_bytes=1073741824,
    overlap=True,
    learn_order=True,
):
    """Shards the parameters of `module` over `axes` of `mesh`, in place, and returns it: every rank keeps a shard of each, of its gradient and of its states.

    >>> mesh = ts.Mesh({"data": ts.world_size()})
    >>> net = ts.fully_shard(net, mesh)                            # before the optimizer is made
    >>> optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    >>> x, y = ts.from_local(x, mesh, [ts.Shard(0)]), ts.from_local(y, mesh, [ts.Shard(0)])   # any number of samples on each rank
    >>> nn.functional.mse_loss(net(x), y).backward()               # loss and gradients of one process with all samples
    >>> norm = ts.clip_gradients(net.parameters(), 1.0)
    >>> optimizer.step()

    Parameters are the same objects as before, of the same global shapes, and sharded tensors; buffers are replicated. They are gathered unit by unit where
    operators use them, ahead of use once the order is known, and gradients are reduce-scattered while backward goes on: nothing is called before or after a
    module, so that hooks, checkpointing and compiled blocks see no difference. Names are those of `named_modules()` and `named_parameters()`; in a pattern "*"
    matches any characters, dots included.

    `axes`: default all; parameters are replicated over the others (hybrid sharding). `units`: patterns of modules that are gathered at once; by default the
    elements of every ModuleList, ModuleDict and Sequential that lies in no other one. `ignore`: patterns of parameters and buffers to leave as they are.
    `stay`: patterns of parameters whose rows are sharded and never gathered (tables of embeddings). `reshard_after_forward`: False keeps units gathered until
    backward has used them. `reshard_axes`: axes among `axes` over which units stay sharded after forward, so that backward gathers over fewer ranks.
    `prefetch`: units gathered ahead. `coalesce_bytes`: small units of fewer bytes together travel in one message. `precision`: `UnitPrecision` of all units
    that `unit_precision`, which maps patterns of units to theirs, does not name; the first pattern that matches counts. `offload`: `OffloadOptions`. The
    others say how gradients are reduced.

    Collective over the mesh; what one rank refuses is refused on all. Raises InvalidArgument for an axis that the mesh does not have, a pattern that matches
    nothing and options that do not fit; ShardingError for a parameter that has a gradient or a graph, or is sharded over `axes` already; MismatchError where
    ranks differ; NotAvailable for an offload from a device that there is not.
    """


    def made():
        options = classes.FullyShardOptions(
            names(units), names(axes), names(ignore), names(stay), reshard_after_forward, names(reshard_axes), prefetch, coalesce_bytes
        )
        options.reduce(first_bucket_bytes, bucket_bytes, overlap, learn_order)
        for pattern, dtypes in [(None, precision or UnitPrecision()), *(unit_precision or {}).items()]:
            options.precision(pattern, dtypes.parameters, dtypes.reduce, dtypes.output)
        if offload and not offload.to_host and offload.device is not None:
            raise InvalidArgument(f"OffloadOptions(device={str(offload.device)!r}) without to_host=True: units are gathered where the parameters are")
        if offload and offload.to_host:
            options.offload("" if offload.device is None else str(torch.device(offload.device)), offload.pin_memory)
        return options

    handle = handle_of(mesh)
    options, _ = made_together(mesh.group(), "fully_shard", made)
    ops.fully_shard(module_tree(module), handle, options)
    return module


def gather_parameters(module):
    """Starts to gather all units of `fully_shard` that hold a parameter of `module`, and keeps them until `release_parameters`: for what uses them several times.

    Collective over the axes that shard them. Raises InvalidArgument if `fully_shard` has sharded none of them.

    >>> net = ts.fully_shard(net, mesh)
    >>> ts.gather_parameters(net[0])                 # once for many uses
    >>> losses = [net(t).sum() for _ in range(3)]
    >>> ts.release_parameters(net[0])
    """
    ops.gather_parameters(module_tree(module))


def release_parameters(module):
    """Releases what is gathered of the units that hold a parameter of `module`; the next use gathers it again. On all ranks alike.

    Needed too where a shard was written to through `to_local` rather than by operators on the parameter, after a forward without a backward. Raises as
    `gather_parameters`.

    >>> net = ts.fully_shard(net, mesh)
    >>> with torch.no_grad():
    ...     ts.to_local(net[0].weight).zero_()[0, 0]
    tensor(0.)
    >>> ts.release_parameters(net)
    """
    ops.release_parameters(module_tree(module))


@dataclass(frozen=True)
class LayerSharding:
    """How `tensor_parallel` shards a layer, or one parameter: made by `column`, `row`, `vocabulary`, `replicated` and `sharded`.

    >>> ts.column(8)
    LayerSharding(kind='column', units=8, dim=0)
    """

    kind: str
    units: int = 0
    dim: int = 0


def column(units=0):
    """A linear layer whose output features are sharded: dim 0 of its weight [out, in] and bias [out].

    `units`: equal blocks of features that stay together, dealt to the ranks as evenly as that goes: the heads of attention. A fused projection has its heads
    outermost. 0: each feature by itself.

    >>> plan = ts.TensorParallelPlan(net, mesh, {"0": ts.column(4)}, axis="data")      # 16 features in 4 heads
    >>> plan.parameters[0].how
    'column of 4 units'
    """
    return LayerSharding("column", units)


def row(units=0):
    """A linear layer whose input features are sharded: dim 1 of its weight. `units`: as in the `column` layer whose features it takes.

    >>> plan = ts.TensorParallelPlan(net, mesh, {"0": ts.column(), "2": ts.row()}, axis="data")
    """
    return LayerSharding("row", units)


def vocabulary():
    """An embedding whose rows are sharded, or the linear layer that scores the same vocabulary; cross_entropy takes the sharded scores.

    >>> net = nn.ModuleDict({"embed": nn.Embedding(100, 8), "scores": nn.Linear(8, 100)})
    >>> plan = ts.TensorParallelPlan(net, mesh, {"embed": ts.vocabulary(), "scores": ts.vocabulary()}, axis="data")
    """
    return LayerSharding("vocabulary")


def replicated():
    """The same on all ranks: what holds for all that no pattern names.

    >>> plan = ts.TensorParallelPlan(net, mesh, {"0": ts.replicated(), "*": ts.column()}, axis="data")     # all layers but the first
    """
    return LayerSharding("replicated")


def sharded(dim, units=0):
    """A parameter, named itself, that is sharded along `dim` in `units` equal blocks; 0: each index by itself.

    >>> plan = ts.TensorParallelPlan(net, mesh, {"0.weight": ts.sharded(1)}, axis="data")
    >>> plan.parameters[0].placement.placements
    [Shard(dim=1)]
    """
    return LayerSharding("sharded", units, dim)


@dataclass(frozen=True)
class PlannedParameter:
    """What `tensor_parallel` makes of one parameter."""

    name: str
    how: str  # "column of 5 units"; empty for what no pattern names
    shape: tuple
    placement: ParameterPlacement
    elements: tuple  # on each rank of the axis


def _plan(module, mesh, layers, axis, sharded_axis, sequence_dim, reducer, distributes):
    listed = [(pattern, layer.kind, (layer.units, layer.dim)) for pattern, layer in layers.items()]
    return ops.tensor_parallel_plan(module_tree(module), handle_of(mesh), listed, axis, sharded_axis, sequence_dim, *reducer, distributes)


class TensorParallelPlan:
    """What the layers of a module become under tensor parallelism: a value that can be looked at before it is applied.

    >>> plan = ts.TensorParallelPlan(net, mesh, {"0": ts.column(), "2": ts.row()}, axis="data")
    >>> print(plan)                                                # each sharded parameter, and the elements of each rank
    tensor parallel over data
      0.weight [16, 8]: column, Shard(0) [16]
      ...
    >>> [(p.name, p.how, p.elements) for p in plan.parameters][0]
    ('0.weight', 'column', (128,))
    >>> bool(ts.check(net.double(), x.double(), mesh, ts.Replicate(), rule=plan.rule()))   # or ts.distribute_module(net, mesh, plan.rule())
    True

    Arguments are those of `tensor_parallel`. Communicates nothing. Raises InvalidArgument for an axis that the mesh does not have, a pattern that matches
    nothing, a layer of which it does not know what to shard, features that do not divide into the units, and a parameter whose names give it two shardings.
    """

    def __init__(self, module, mesh, layers, *, axis="tensor", sharded_axis="", sequence_dim=None):
        self._handle = _plan(module, mesh, layers, axis, sharded_axis, sequence_dim, (0, 0, True, False), False)

    @classmethod
    def _of(cls, handle):
        plan = cls.__new__(cls)
        plan._handle = handle
        return plan

    @property
    def parameters(self):
        """All parameters, in the order of `named_parameters()`, tied ones under each of their names."""
        found = []
        for name, how, shape, placements, sizes, axis, dim, elements in self._handle.parameters():
            where = ParameterPlacement([from_text(p) for p in placements], dict(sizes), (axis, dim) if axis >= 0 else None)
            found.append(PlannedParameter(name, how, tuple(shape), where, tuple(elements)))
        return found

    def rule(self):
        """The plan as a rule for `distribute_module` and `check`."""
        by_name = {p.name: p.placement for p in self.parameters}
        return lambda name, tensor: by_name.get(name)

    def __str__(self):
        return self._handle.text()


def tensor_parallel(
    module, mesh, layers, *, axis="tensor", sharded_axis="", sequence_dim=None, first_bucket_bytes=1048576, bucket_bytes=26214400, overlap=True, learn_order=False
):
    """Shards the layers of `module` over `axis` of `mesh`, in place, as `layers` says by name, and returns the `TensorParallelPlan`.

    >>> mesh = ts.Mesh({"data": -1, "tensor": 1})
    >>> plan = ts.tensor_parallel(net, mesh, {"0": ts.column(), "2": ts.row()})    # {"*.qkv": ts.column(heads), "*.out": ts.row(heads)} of attention
    >>> net = ts.fully_shard(net, mesh, "data")                    # together: what is gathered is this rank's tensor shard

    `layers`: maps patterns of names of layers, or of single parameters, to `column`, `row`, `vocabulary`, `replicated` or `sharded`; the first pattern that
    matches a parameter's layer or its own name counts. The module computes what it did, and its gradients are those of one process: data are replicated over
    `axis`, or with `sequence_dim` (1 for data of [batch, sequence, features]) sharded along that dim between the layers. `sharded_axis`: an axis over which
    samples are sharded, and what the plan shards too, along another dim. The others say how gradients of replicated parameters are reduced.

    Before the first forward, and before the optimizer is made. Collective over the mesh. Raises on every rank what `TensorParallelPlan` and
    `distribute_module` do; MismatchError if the ranks' plans differ.
    """
    reducer = (first_bucket_bytes, bucket_bytes, overlap, learn_order)
    return TensorParallelPlan._of(_plan(module, mesh, layers, axis, sharded_axis, sequence_dim, reducer, True))


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer of torch's whose states are sharded over ranks that hold the same parameters, as those of DistributedDataParallel.

    >>> ddp = ts.DistributedDataParallel(net)
    >>> optimizer = ts.ShardedOptimizer(torch.optim.AdamW, net.parameters(), mesh, lr=1e-3, weight_decay=0.1)
    >>> ddp(x).sum().backward()
    >>> optimizer.step()

    It is an instance of `optimizer`, the class that it names, and is used as one: groups, schedulers, closures, hooks, `zero_grad`, clipping before `step`.
    Each rank keeps the moments of its rows of the parameters and updates those, in place, and `step` gathers them: the updates are those of the unsharded
    optimizer.
    `state_dict()` holds the states as sharded tensors (`full_tensor` gives the whole ones); `load_state_dict` takes them, and the whole ones of the
    unsharded optimizer. Parameters that are sharded tensors, or have no dims, are left to the optimizer as they are.

    `parameters` (tensors, or groups) and `options` are those of the class. Parameters and gradients are equal on all ranks of `mesh` when `step` is called.
    Collective over the mesh, as `step` is. Raises InvalidArgument for what is no optimizer of torch's, for LBFGS, which keeps products over all parameters at
    once, and in `step` for a gradient that is sparse or unlike its parameter; MismatchError if the ranks' parameters differ.
    """

    def __new__(cls, optimizer, parameters, mesh, **options):
        known = isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)
        if not known or issubclass(optimizer, (torch.optim.LBFGS, ShardedOptimizer)):
            raise InvalidArgument(f"ShardedOptimizer: {optimizer!r} is no optimizer of torch's that can be sharded by parameter: give one such as torch.optim.AdamW")
        return super().__new__(type(f"Sharded{optimizer.__name__}", (cls, optimizer), {}))

    def __init__(self, optimizer, parameters, mesh, **options):
        optimizer.__init__(self, parameters, **options)
        self._mesh, self._shards = mesh, classes.OptimizerShards(handle_of(mesh))
        self._shards.plan(self._parameters())

    def step(self, closure=None):
        """Updates the parameters on all ranks; `closure` computes the loss anew, and its value is returned. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = self._parameters()
        self._shards.plan(parameters)
        with told_to_others(self._mesh, "ShardedOptimizer.step"):
            shards = dict(zip(parameters, self._shards.shards(parameters)))
            self._exchange(shards)
            try:
                self._update()
            finally:
                self._exchange({shard: parameter for parameter, shard in shards.items()})
        self._shards.gather()
        return loss

    def __reduce_ex__(self, protocol):
        raise InvalidArgument("ShardedOptimizer: it is neither copied nor pickled: make another one of the copied parameters, and give it state_dict()")

    def _parameters(self):
        return list(dict.fromkeys(p for group in self.param_groups for p in group["params"]))

    def _update(self):
        step = super().step
        # Hooks of step() are called around the whole of it, and by torch around that of the class too if there is a plain optimizer of it.
        hooked = getattr(step.__func__, "hooked", False)
        return step.__func__.__wrapped__(self) if hooked else step()

    def _exchange(self, others):
        """Each key of `others` gives its place and its states to its value. What was made of a whole parameter becomes this rank's rows of it."""
        for group in self.param_groups:
            group["params"][:] = [others.get(p, p) for p in group["params"]]
        for one, other in others.items():
            if one is other or one not in self.state:
                continue
            state = self.state[other] = self.state.pop(one)
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == one.shape and not ops.is_sharded(value):
                    state[key] = self._shards.shard_state(one, value)

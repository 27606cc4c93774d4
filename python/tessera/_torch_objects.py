"""torch's DeviceMesh and DTensor as what they are here, and back: the same memory, and gradients go through."""

import sys
import weakref

import torch

from tessera._errors import ConfigurationError, InvalidArgument, ShardingError
from tessera._library import ops
from tessera._placement import to_text

# Made once for each mesh: by the process group of torch's world, which ends with it.
_DEVICE_MESHES = weakref.WeakKeyDictionary()


def is_dtensor(tensor):
    """Without importing torch.distributed.tensor, which is slow: where nobody has, there is no DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _need_torch_ranks(what):
    """torch's ranks are those of this job: both have the same processes in one order."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise ConfigurationError(f"{what} needs torch.distributed: call torch.distributed.init_process_group() beside tessera.init(); ranks that are threads have none")
    mine, theirs = (ops.rank(), ops.world_size()), (dist.get_rank(), dist.get_world_size())
    if mine != theirs:
        raise ConfigurationError(f"{what}: this is rank {mine[0]} of {mine[1]} here and rank {theirs[0]} of {theirs[1]} in torch.distributed")
    return dist


def from_device_mesh(device_mesh):
    """See `Mesh.from_device_mesh`."""
    from tessera._api import Mesh

    _need_torch_ranks("Mesh.from_device_mesh")
    ranks = device_mesh.mesh
    if not ranks.dim():
        raise InvalidArgument("a DeviceMesh without dims has no axes: give one of a dim or more")
    names = device_mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(ranks.dim()))
    return Mesh(dict(zip(names, ranks.shape)), ranks=ranks.flatten().tolist())


def to_device_mesh(mesh, device_type):
    """See `Mesh.to_device_mesh`."""
    dist = _need_torch_ranks("Mesh.to_device_mesh")
    from torch.distributed.device_mesh import DeviceMesh

    made = _DEVICE_MESHES.setdefault(dist.group.WORLD, {})
    key = device_type, tuple(mesh.axes.items()), tuple(mesh.ranks)
    if key not in made:
        ranks = torch.tensor(mesh.ranks, dtype=torch.int).view(list(mesh.axes.values()))
        made[key] = DeviceMesh(device_type, ranks, mesh_dim_names=tuple(mesh.axes))
    return made[key]


def _chunks(rows, counts):
    """The sizes of torch's shards: all of ceil(rows / ranks), but for the last ones; within each the next axis' likewise."""
    if not counts:
        return [rows]
    size = -(-rows // counts[0])
    parts = [max(0, min(size, rows - i * size)) for i in range(counts[0])]
    return [n for part in parts for n in _chunks(part, counts[1:])]


def _sizes(shape, placements, counts):
    """Of torch's shards, by dim. `placements` are texts."""
    sizes = {}
    for dim in range(len(shape)):
        axes = [count for text, count in zip(placements, counts) if text == f"Shard({dim})"]
        if axes:
            sizes[dim] = _chunks(shape[dim], axes)
    return sizes


def from_dtensor(tensor, mesh=None):
    """A `torch.distributed.tensor.DTensor` as a sharded tensor of the same placements. Shares its memory, differentiable, and sends nothing.

    `mesh`: the `Mesh` over the ranks of its DeviceMesh, for names of one's own; default `Mesh.from_device_mesh`. Shape: the global one. Raises `TypeError`
    for anything else, and for placements without their like here (strided shards, as of FSDP over tensor parallelism: `redistribute` them first);
    `ShardingError` for shards in another order of the axes, and for locals of other sizes than torch's placements say.

    >>> def body(net):                            # under torchrun: net is a module that torch's fully_shard has sharded
    ...     weight = ts.from_dtensor(net.weight)
    ...     return ts.spec(weight).placements
    """
    if not is_dtensor(tensor):
        raise TypeError(f"from_dtensor takes a torch.distributed.tensor.DTensor, not {type(tensor).__module__}.{type(tensor).__name__}")
    spec, device_mesh = tensor._spec, tensor.device_mesh
    if getattr(spec, "shard_order", None) not in (None, spec.compute_default_shard_order(spec.placements)):
        raise ShardingError(f"from_dtensor: axes shard a dim in an order of their own ({spec.shard_order}); redistribute the DTensor to placements without one first")
    own = from_device_mesh(device_mesh) if mesh is None else mesh
    counts = list(device_mesh.mesh.shape)
    if own.ranks != device_mesh.mesh.flatten().tolist() or list(own.axes.values()) != counts:
        raise InvalidArgument(f"from_dtensor: {own} is not the mesh of the tensor, {device_mesh}")
    placements, shape = to_text(list(tensor.placements)), list(tensor.shape)
    local = tensor.to_local()
    if hasattr(local, "wait"):  # a collective of torch's that is in progress
        local = local.wait()
    return ops.from_local_of_spec(local, own._handle, shape, placements, _sizes(shape, placements, counts))


def _torch_placement(text):
    from torch.distributed.tensor import Partial, Replicate, Shard

    kind, _, argument = text.rstrip(")").partition("(")
    return Replicate() if kind == "Replicate" else Shard(int(argument)) if kind == "Shard" else Partial(argument)


def to_dtensor(tensor, device_mesh=None):
    """A sharded tensor as a `torch.distributed.tensor.DTensor` of the same placements. Shares its memory, differentiable, and sends nothing.

    `device_mesh`: a DeviceMesh over the same ranks; default `tensor`'s own by `Mesh.to_device_mesh`, which is collective the first time. torch's shards have
    ceil(rows / ranks) rows but for the last ones: raises `ShardingError` for other sizes, with those that `ts.redistribute` would have to give it.

    >>> def body(t):                              # under torchrun: 7 rows on 3 ranks, as torch has them
    ...     return ts.to_dtensor(ts.redistribute(t, [ts.Shard(0)], {0: [3, 3, 1]}))
    """
    from tessera._api import spec as spec_of

    if not ops.is_sharded(tensor):
        raise TypeError("to_dtensor takes a sharded tensor, and this one is plain: torch's distribute_tensor makes a DTensor of it")
    spec = spec_of(tensor)
    _need_torch_ranks("to_dtensor")
    if device_mesh is None:
        device_mesh = to_device_mesh(spec.mesh, tensor.device.type)
    elif device_mesh.mesh.flatten().tolist() != spec.mesh.ranks or tuple(device_mesh.mesh.shape) != tuple(spec.mesh.axes.values()):
        raise InvalidArgument(f"to_dtensor: {device_mesh} is not the mesh of the tensor, {spec.mesh}")
    from torch.distributed.tensor import DTensor

    placements = [str(p) for p in spec.placements]
    theirs = _sizes(tensor.shape, placements, list(spec.mesh.axes.values()))
    if theirs != spec.sizes:
        wanted = f"ts.redistribute(t, placements, {theirs}) first"
        raise ShardingError(f"to_dtensor: torch's shards of {list(tensor.shape)} have the sizes {theirs}, these have {spec.sizes}: {wanted}")
    local = ops.to_local(tensor, None)
    where = [_torch_placement(text) for text in placements]
    return DTensor.from_local(local, device_mesh, where, run_check=False, shape=tensor.shape, stride=tensor.stride())

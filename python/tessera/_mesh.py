"""Meshes: named axes over ranks, and where the elements of a tensor lie on them."""

from contextlib import contextmanager
from dataclasses import dataclass
from operator import index

from tessera import _html, _torch_objects
from tessera._errors import CommError, ImplicitRedistributionError, InvalidArgument
from tessera._groups import Group
from tessera._library import classes, ops


class Mesh:
    """Named axes over ranks, outermost first: what tensors are placed on, and the groups along its axes.

    >>> def body(rank):
    ...     mesh = ts.Mesh({"data": 2, "domain": 3})     # ranks 0..5, row-major: the last axis has adjacent ranks
    ...     return mesh.coordinate, mesh.group("domain").ranks
    >>> ts.run_threads(6, body)[4]
    ((1, 1), [3, 4, 5])
    >>> def body(rank):
    ...     some = ts.Mesh({"x": 3}, ranks=[4, 0, 2])    # any ranks, in any order
    ...     return some.contains_me and some.coordinate
    >>> ts.run_threads(6, body)
    [(1,), False, (2,), False, (0,), False]
    >>> ts.Mesh({"data": -1, "domain": 1}).axes          # an open axis takes what the others leave of the world
    {'data': 1, 'domain': 1}

    Without `ranks` the product of the sizes is the world. Made on all ranks that it names, and not collective; groups are made on first use, and two meshes
    share the groups that they have in common. Raises for sizes that do not make the world, and for ranks that are not in it or named twice.
    """

    def __init__(self, axes, ranks=None):
        names, sizes = list(axes.keys()), [index(n) for n in axes.values()]
        self._handle = classes.Mesh(names, sizes) if ranks is None else ops.mesh_over(names, sizes, [index(r) for r in ranks])

    @classmethod
    def _of(cls, handle):
        mesh = cls.__new__(cls)
        mesh._handle = handle
        return mesh

    @classmethod
    def of(cls, name):
        """By name: one that `add_mesh` named, or the ranks of a family of `create_process_groups` that this rank belongs to, with one axis per leaf
        below it. So a module asks for "domain" and needs no mesh from its caller. Raises with the known names.

        >>> ts.add_mesh("pencils", ts.Mesh({"y": 1, "z": -1}))
        >>> ts.Mesh.of("pencils").axes
        {'y': 1, 'z': 1}
        """
        return cls._of(ops.mesh_named(name))

    @classmethod
    def from_device_mesh(cls, device_mesh):
        """The mesh over the ranks of a `torch.distributed.device_mesh.DeviceMesh`, with its names ("dim0", ... where it has none). Not collective. Raises
        where torch.distributed has other ranks than this job, or none.

        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> def body():                                  # under torchrun, after init_process_group()
        ...     return ts.Mesh.from_device_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor")))
        """
        return _torch_objects.from_device_mesh(device_mesh)

    def to_device_mesh(self, device_type="cpu"):
        """The `torch.distributed.device_mesh.DeviceMesh` over the same ranks, for code written against PyTorch's own. Made once: that is collective over
        all ranks of torch.distributed, which must be those of this job; later calls give the same one.

        >>> def body(net):                               # under torchrun, after init_process_group()
        ...     return torch.distributed.fsdp.fully_shard(net, mesh=mesh.to_device_mesh())
        """
        return _torch_objects.to_device_mesh(self, device_type)

    @property
    def axes(self):
        """Names and sizes, outermost first."""
        return dict(zip(self._handle.names(), self._handle.sizes()))

    @property
    def ranks(self):
        """The rank table, row-major over the axes.

        >>> ts.Mesh({"data": -1}).ranks
        [0]
        """
        return list(ops.mesh_ranks(self._handle))

    @property
    def contains_me(self):
        """Ranks outside the mesh may hold it, but have no coordinate and no groups."""
        return ops.mesh_contains_me(self._handle)

    @property
    def coordinate(self):
        """This rank's place, one number per axis."""
        return tuple(self._handle.coordinate())

    def rank_at(self, coordinate):
        """The global rank at a coordinate. Raises InvalidArgument outside of the mesh, as the members below do for an unknown axis.

        >>> ts.run_threads(6, lambda rank: ts.Mesh({"data": 2, "domain": 3}).rank_at([1, 2]))[0]
        5
        """
        return ops.mesh_rank_at(self._handle, [index(c) for c in coordinate])

    def group(self, *axes):
        """The group along these axes through this rank, in mesh order; without axes over all of them. Its rank is the coordinate along one axis.
        Raises InvalidArgument on a rank outside of the mesh.

        >>> def body(rank):
        ...     mesh = ts.Mesh({"data": 2, "domain": 2})
        ...     return mesh.group("domain").all_reduce(torch.tensor(rank)).item()
        >>> ts.run_threads(4, body)
        [1, 1, 5, 5]
        """
        return Group(ops.mesh_group(self._handle, list(axes) or list(self.axes)))

    def groups(self, *axes):
        """The ranks of every group along these axes; they partition the mesh. Makes none of them.

        >>> ts.run_threads(4, lambda rank: ts.Mesh({"data": 2, "domain": 2}).groups("data"))[0]
        [[0, 2], [1, 3]]
        """
        return [list(ranks) for ranks in ops.mesh_groups(self._handle, list(axes))]

    def slice(self, axis, begin, end=None):
        """The ranks with coordinate `begin` on `axis`, which is gone; or with [begin, end), and the axis stays, shorter.

        >>> ts.run_threads(4, lambda rank: ts.Mesh({"data": 2, "domain": 2}).slice("data", 1).ranks)[0]
        [2, 3]
        """
        return Mesh._of(ops.mesh_slice(self._handle, axis, begin, end))

    def submesh(self, *axes):
        """The mesh over these axes alone that runs through this rank.

        >>> ts.run_threads(4, lambda rank: ts.Mesh({"data": 2, "domain": 2}).submesh("data").ranks)
        [[0, 2], [1, 3], [0, 2], [1, 3]]
        """
        return Mesh._of(ops.mesh_submesh(self._handle, list(axes)))

    def flatten(self, axes, name):
        """The axes become one, at the place of the outermost of them: `mesh.flatten(["data", "domain"], "all").group("all")`.

        >>> ts.run_threads(4, lambda rank: ts.Mesh({"data": 2, "domain": 2}).flatten(["data", "domain"], "all").axes)[0]
        {'all': 4}
        """
        return Mesh._of(ops.mesh_flatten(self._handle, list(axes), name))

    def view(self, axes):
        """The same table under other axes with the same product: data=2 x tensor=4 as data=2 x expert=2 x tensor=2.
        Raises InvalidArgument for another product.

        >>> ts.run_threads(4, lambda rank: ts.Mesh({"data": 4}).view({"data": 2, "expert": 2}).coordinate)
        [(0, 0), (0, 1), (1, 0), (1, 1)]
        """
        return Mesh._of(ops.mesh_view(self._handle, list(axes), [index(n) for n in axes.values()]))

    def barrier(self):
        """Returns when all ranks of the mesh have come.

        >>> mesh.barrier()
        """
        self._handle.barrier()

    def fail(self, reason):
        """Tells the other ranks that this one met an error: the pending or next call of each raises, once, and where all catch it the mesh goes on.

        >>> def body(rank):
        ...     mesh = ts.Mesh({"data": 2})
        ...     if rank == 1:
        ...         return mesh.fail("the file of rank 1 is empty")
        ...     try:
        ...         mesh.barrier()
        ...     except ts.PeerFailedError as error:
        ...         return "the file of rank 1 is empty" in str(error)
        >>> ts.run_threads(2, body)
        [True, None]
        """
        self._handle.fail(reason)

    def __eq__(self, other):
        return isinstance(other, Mesh) and self._handle.same(other._handle)

    def __hash__(self):
        return hash(tuple(self.axes.items()))

    def __repr__(self):
        return f"Mesh({ops.mesh_text(self._handle)})"

    def _repr_html_(self):
        return _html.of_mesh(self)


def handle_of(mesh):
    """What a function that takes a mesh goes on with. Raises InvalidArgument for anything else, and says what to give."""
    if isinstance(mesh, Mesh):
        return mesh._handle
    instead = "a ts.Mesh, such as ts.Mesh({'data': -1})"
    if isinstance(mesh, Group):
        instead = f"the ts.Mesh that it belongs to, or ts.Mesh({{'data': {mesh.size}}}, ranks={mesh.ranks})"
    elif hasattr(mesh, "mesh_dim_names"):
        instead = "ts.Mesh.from_device_mesh(mesh)"
    raise InvalidArgument(f"{repr(mesh)[:80]} is no mesh: give {instead}")


@contextmanager
def told_to_others(mesh, what):
    """Tells the other ranks of the mesh what is raised inside: their pending or next call raises PeerFailedError, if they meet no error of their own."""
    try:
        yield
    except BaseException as error:
        # What comes from communication, or follows from what all ranks share, they know.
        if mesh.contains_me and not isinstance(error, (CommError, ImplicitRedistributionError)):
            mesh.fail(f"{what}: {error}")
        raise


def add_mesh(name, mesh):
    """Gives a mesh a name, for `Mesh.of(name)`. Not collective, but all ranks that use the name name the same mesh. Raises RepeatedName for one that is taken.

    >>> ts.add_mesh("fields", mesh)
    >>> ts.Mesh.of("fields") == mesh
    True
    """
    ops.add_mesh(name, handle_of(mesh))


@dataclass(frozen=True)
class Spec:
    """Where every element of a tensor is: its placements, and how many rows each rank holds.

    >>> where = ts.spec(t)
    >>> where.shape, where.placements, where.sizes, where.local_shape, where.local_offset
    ((4, 8), (Shard(dim=0),), {0: [4]}, (4, 8), (0, 0))
    >>> where.mesh == mesh, where.text
    (True, '[4, 8] data=Shard(0)[4]')
    """

    mesh: Mesh
    shape: tuple
    placements: tuple
    sizes: dict  # sharded dim -> sizes of its shards
    local_shape: tuple
    local_offset: tuple
    text: str

    def __repr__(self):
        return f"Spec({self.text})"

"""Ghosts of arrays that are divided by a table of owners: graphs, unstructured meshes, particles, in the partition that a solver has."""

import torch

from tessera._groups import Group, Request
from tessera._library import classes, ops


def _ids(given):
    """As a tensor; an empty list has no dtype of its own."""
    given = torch.as_tensor(given)
    return given if given.numel() else given.to(torch.int64)


def _over(over):
    """The handle of a mesh, and axes of it."""
    from tessera._api import Mesh

    if isinstance(over, Mesh):
        return over._handle, list(over.axes)
    if isinstance(over, Group):
        handle = ops.mesh_over(["ranks"], [over.size], over.ranks)
        if not ops.mesh_group(handle, ["ranks"]).same(over._handle):
            raise ValueError(f"{over!r} has a backend or a limit of its own: give a mesh, or the group that ts.group({over.ranks}) is")
        return handle, ["ranks"]
    mesh, *axes = over
    return mesh._handle, axes


class GhostPlan:
    """Who sends which rows to whom: made once for a partition, collectively.

    `over`: a mesh (all its ranks), a mesh and some of its axes (`(mesh, "domain")`), or a group. `owned_ids`: the global ids of this rank's rows, in
    their order; each id has one owner, in any way, and a rank may own none. `needed_ids`: those of its ghosts, in the order in which they stand behind the
    owned rows. Both are tensors or lists of whole numbers. Raises InvalidArgument on every rank, with ids and ranks, for an id that nobody or two own,
    for negative ones, and for a ghost that is owned here.

    >>> def body(rank):
    ...     owned, sources = ([0, 3], [0, 1, 2]) if rank == 0 else ([2, 1], [3, 3])
    ...     needed = ts.ghosts_of(owned, sources)                 # sources of this rank's edges that others own
    ...     plan = ts.GhostPlan(ts.Mesh({"ranks": 2}), owned, needed)
    ...     source = plan.local_rows(sources)                     # ids as rows of the local array
    ...     h = ts.ghost_exchange(plan, 10 * torch.tensor(owned)) # this rank's rows, then its ghosts
    ...     return h[source].tolist(), (plan.owned, plan.ghosts), plan.sends, plan.receives
    >>> ts.run_threads(2, body)
    [([0, 10, 20], (2, 2), [(1, 1)], [(1, 2)]), ([30, 30], (2, 1), [(0, 2)], [(0, 1)])]
    """

    def __init__(self, over, owned_ids, needed_ids):
        self._ids = _ids(owned_ids), _ids(needed_ids)
        self._handle = classes.GhostPlan(*_over(over), *self._ids)

    @property
    def owned(self):
        """Rows that this rank owns."""
        return self._handle.owned()

    @property
    def ghosts(self):
        """Rows that come from others."""
        return self._handle.ghosts()

    @property
    def sends(self):
        """(rank of the group, rows) of each message that this rank sends in `ghost_exchange`."""
        return [tuple(peer) for peer in self._handle.sends()]

    @property
    def receives(self):
        """(rank of the group, rows) of each message that arrives."""
        return [tuple(peer) for peer in self._handle.receives()]

    @property
    def group(self):
        """The ranks that made it.

        >>> ts.GhostPlan(mesh, [0, 1], []).group.ranks
        [0]
        """
        return Group(self._handle.group())

    def local_rows(self, ids):
        """The row of each id in the local array, which has owned rows first and ghosts behind. Raises InvalidArgument for an id that is neither."""
        ids = _ids(ids)
        return ops.local_rows(*self._ids, ids.reshape(-1)).reshape(ids.shape).to(ids.device)

    def summary(self):
        """This rank's part: a line, and a line for each peer.

        >>> print(ts.GhostPlan(mesh, [0, 1], []).summary())
        rank 0...
        """
        return self._handle.summary()

    def __repr__(self):
        return f"GhostPlan({self.summary().splitlines()[0]})"


class OwnedRows:
    """Ownership as a placement: rows with ids that a table of owners divides are numbered rank by rank, and are `Shard(0)` with the ranks' own sizes.

    `over`: a mesh, `(mesh, "domain")`, or a group, as for `GhostPlan`. `owned_ids`: the ids of this rank's rows in their order; any rank may own any id, and a rank
    none. A network that was written for one process in plain torch runs on what `shard` and `edges` give: what it selects, gathers, adds and scatters by index exchanges
    ghosts, once a layer in each direction of autograd. As a context: what is made inside with as many rows (`messages.new_zeros(nodes, 8)`) is sharded as
    the rows are; all ranks enter it together. Raises InvalidArgument on every rank, with ids and ranks, for an id that two ranks own, or one rank names twice.

    >>> def body(rank):
    ...     owned, ends = ([7, 2], [[2, 4], [7, 2]]) if rank == 0 else ([4], [[7], [4]])   # edges: sources, targets
    ...     nodes = ts.OwnedRows(ts.Mesh({"ranks": 2}), owned)
    ...     x, (source, target) = nodes.shard(torch.tensor(owned) * 1.0), nodes.edges(ends)
    ...     y = torch.zeros_like(x).index_add(0, target, x[source])                        # plain torch
    ...     return nodes.begin, nodes.sizes, nodes.size, nodes.numbers(owned).tolist(), ts.to_local(y).tolist()
    >>> ts.run_threads(2, body)
    [(0, [2, 1], 3, [0, 1], [2.0, 4.0]), (2, [2, 1], 3, [2], [7.0])]
    """

    def __init__(self, over, owned_ids):
        self.ids = _ids(owned_ids)
        self._handle = classes.OwnedRows(*_over(over), self.ids)

    @property
    def size(self):
        """Rows of all ranks."""
        return self._handle.size()

    @property
    def sizes(self):
        """Rows of each rank of the group."""
        return list(self._handle.sizes())

    @property
    def begin(self):
        """The number of this rank's first row."""
        return self._handle.begin()

    def shard(self, rows):
        """The sharded tensor of which this rank holds `rows`, one for each owned id, with any dims behind. Shares their memory; differentiable. Collective at first.
        Raises InvalidArgument on every rank for another number of rows.

        >>> ts.OwnedRows(mesh, [5, 3]).shard(torch.ones(2, 4)).shape
        torch.Size([2, 4])
        """
        return self._handle.shard(rows)

    def numbers(self, ids):
        """The numbers of the rows of ids that any rank owns. Collective. Raises InvalidArgument on every rank for an id that nobody owns.

        >>> ts.OwnedRows(mesh, [5, 3]).numbers([3, 3, 5]).tolist()
        [1, 1, 0]
        """
        ids = _ids(ids)
        return self._handle.numbers(ids.reshape(-1)).reshape(ids.shape).to(ids.device)

    def edges(self, ends, *, anywhere=False):
        """Edges by ids, sources and targets, as numbers of rows: 2 x the edges of all ranks, sharded along dim 1.

        Give each edge to the owner of its target; `anywhere`: edges may be on any rank, and what they add is sent to the owners. Collective. Raises
        InvalidArgument on every rank, with ids and ranks, for an end that nobody owns, and, without `anywhere`, a target that another rank owns.

        >>> ts.full_tensor(ts.OwnedRows(mesh, [5, 3]).edges([[3, 5], [5, 5]])).tolist()
        [[1, 0], [0, 0]]
        """
        source, target = (_ids(end) for end in ends)
        return self._handle.edges(source, target, anywhere)

    def summary(self):
        """How many rows each rank owns.

        >>> print(ts.OwnedRows(mesh, [5, 3]).summary())
        2 rows on 1 ranks: 2; this rank's are 0 to 1...
        """
        return self._handle.summary()

    def __enter__(self):
        self._handle.enter()
        return self

    def __exit__(self, *_):
        self._handle.leave()

    def __repr__(self):
        return f"OwnedRows({self.summary().strip()})"


def _box(box, places):
    return [] if box is None else [float(b) for b in (box if hasattr(box, "__len__") else [box] * places.shape[1])]


def edges_within(points, places, radius, box=None, *, loops=False):
    """Edges between points at most `radius` apart, in both directions, and what to add to a source's place: `(edges, shift)`.

    `points`: `OwnedRows`; `places`: this rank's, owned x dims, plain or sharded. `box`: the period along each dim, 0 where there is none, or one for all; an image of a
    point counts as an edge of its own. `edges`: 2 x all edges, sharded along dim 1, numbers of rows; each is on the owner of its target. `shift`: edges x dims.
    `loops`: of each point with itself too. Exact, with ties, whatever the ranks own. Distances that are computed of the edges are differentiable. Collective.
    Raises InvalidArgument on every rank for places that do not fit or are not finite.

    >>> points = ts.OwnedRows(mesh, [0, 1])
    >>> edges, shift = ts.edges_within(points, torch.tensor([[0.1], [0.9]]), 0.3, box=1.0)
    >>> ts.full_tensor(edges).tolist(), ts.full_tensor(shift).tolist()
    ([[1, 0], [0, 1]], [[-1.0], [1.0]])
    """
    return ops.edges_within(points._handle, places, float(radius), _box(box, places), loops)


def nearest_edges(points, places, queries, query_places, count, box=None):
    """An edge from each of the `count` nearest points to each query, nearest first and of equally far ones the lower rows: `(edges, shift)` as of `edges_within`.

    `values[nearest_edges(..., 1)[0][0]]` is nearest-neighbour interpolation of sharded values from `points` to `queries`, both `OwnedRows` of the same ranks.
    Collective. Raises InvalidArgument on every rank as `edges_within`, and for fewer points than `count`.

    >>> points, queries = ts.OwnedRows(mesh, [0, 1]), ts.OwnedRows(mesh, [0])
    >>> edges, _ = ts.nearest_edges(points, torch.tensor([[0.0], [1.0]]), queries, torch.tensor([[0.8]]), 1)
    >>> ts.full_tensor(points.shard(torch.tensor([5.0, 7.0]))[edges[0]]).tolist()
    [7.0]
    """
    return ops.nearest_edges(points._handle, places, queries._handle, query_places, count, _box(box, places))


def partition_along_curve(places, parts, weights=None):
    """The part of each point, 0 .. parts - 1: Hilbert's curve through points x dims in pieces of equally many, or equally heavy, points. Communicates nothing.

    >>> ts.partition_along_curve(torch.tensor([[0.0, 0], [9, 9], [0, 1], [9, 8]]), 2).tolist()
    [0, 1, 0, 1]
    """
    places = torch.as_tensor(places)
    return ops.partition_along_curve(places, parts, torch.as_tensor([] if weights is None else weights, dtype=torch.float64))


def ghosts_of(owned_ids, ids):
    """The distinct `ids` that are not among `owned_ids`, in the order in which they come first: what a rank needs. Communicates nothing.

    >>> ts.ghosts_of([4, 5], [5, 9, 4, 7, 9]).tolist()
    [9, 7]
    """
    return ops.ghosts_of(_ids(owned_ids), _ids(ids).reshape(-1))


def ghost_exchange(plan, owned, *, start=False):
    """This rank's rows followed by its ghosts, which come from their owners; differentiable any number of times.

    `owned`: a plain tensor with a row for each owned id, and any dims behind; any dtype. Its gradient is `ghost_reduce` of the result's. With `start=True`
    a `Request` at once, whose `wait()` gives the tensor: what needs no ghosts can be computed meanwhile. Collective, and so is backward: on every rank
    `owned` requires a gradient or on none, and the result must reach the rank's loss, also where it has no rows. Raises InvalidArgument for another number
    of rows than the plan's, and PeerFailedError on the other ranks.

    >>> def body(rank):
    ...     plan = ts.GhostPlan(ts.world(), [2 * rank, 2 * rank + 1], [2 - 2 * rank])
    ...     return ts.ghost_exchange(plan, torch.tensor([10.0, 11.0]) + 2 * rank).tolist()
    >>> ts.run_threads(2, body)
    [[10.0, 11.0, 12.0], [12.0, 13.0, 10.0]]
    """
    if start:
        return Request(ops.start_ghost_exchange(plan._handle, owned))
    return ops.ghost_exchange(plan._handle, owned)


def ghost_reduce(plan, rows, op="sum", *, start=False):
    """The owned rows, into each of which those of its ghosts on other ranks are reduced; differentiable any number of times.

    `rows`: a plain tensor with a row for each owned id and each ghost. `op`: sum, min or max; the gradient of an extreme value is shared by the rows that
    have it. On the CPU the order is fixed: the owned row, then ranks in ascending order. The gradient of a sum is `ghost_exchange` of the result's.
    `start`, collectiveness and errors as there.

    >>> def body(rank):
    ...     plan = ts.GhostPlan(ts.world(), [2 * rank, 2 * rank + 1], [2 - 2 * rank])
    ...     return ts.ghost_reduce(plan, torch.tensor([1.0, 1.0, 0.5])).tolist()
    >>> ts.run_threads(2, body)
    [[1.5, 1.0], [1.5, 1.0]]
    """
    if start:
        return Request(ops.start_ghost_reduce(plan._handle, rows, op))
    return ops.ghost_reduce(plan._handle, rows, op)

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

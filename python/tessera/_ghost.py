"""Ghosts of arrays that are divided by a table of owners: graphs, unstructured meshes, particles, in the partition that a solver has."""

import contextlib
import weakref

import torch

from tessera._callbacks import Callbacks, address, with_cause
from tessera._groups import Group, Request
from tessera._library import classes, ops
from tessera._mesh import handle_of


def _ids(given):
    """As a tensor; an empty list has no dtype of its own. What is none is refused where every rank learns it."""
    try:
        given = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        return torch.empty(0, 0)
    return given if given.numel() or given.dim() > 1 else given.to(torch.int64)


def _ends(edges):
    """Sources and targets; of what is no pair, two that are refused likewise."""
    try:
        source, target = (_ids(end) for end in edges)
    except (TypeError, ValueError):
        source = target = torch.empty(0, 0)
    return source, target


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
    return handle_of(mesh), axes


# Functions of transports that are gone, which a graph that was recorded with one may still call: (handle, functions).
_RECORDED = []


def _release(handle, functions):
    _RECORDED.append((handle, functions))
    for kept in list(_RECORDED):
        if not kept[0].used():
            with contextlib.suppress(ValueError):  # another thread has
                _RECORDED.remove(kept)


class GhostTransport:
    """A solver's or an engine's own exchange in the place of ours: `GhostPlan(..., transport=)`.

    `forward(rows)` fills the ghosts of `rows`, (owned + ghosts) x any dims, contiguous, from their owners; `reverse(rows)` adds each ghost to its owner's row. Both change `rows` in place
    and return None; they run on every rank, also where it has no rows, in backward too. `dtypes`: what they carry; other rows are refused. Sums go through it, min and max do not.
    With `CheckLevel` "collective" each call is preceded by one on digits of ids in the shape of the rows: MismatchError on every rank, with ids and ranks, where what arrives is not what
    the plan says. What a function raises is the cause of what the library raises, and told to the other ranks.

    >>> def body(rank):
    ...     world, plan = ts.world(), None
    ...     def forward(rows):                        # two ranks that need each other's one row
    ...         rows[1] = world.all_gather(rows[:1].contiguous())[1 - rank]
    ...     def reverse(rows):
    ...         rows[0] += world.all_gather(rows[1:].contiguous())[1 - rank]
    ...     plan = ts.GhostPlan(world, [rank], [1 - rank], transport=ts.GhostTransport(forward, reverse))
    ...     x = torch.tensor([rank + 1.0], dtype=torch.float64, requires_grad=True)
    ...     h = ts.ghost_exchange(plan, x)
    ...     (h * torch.tensor([1.0, 10.0])).sum().backward()
    ...     return h.tolist(), x.grad.tolist()
    >>> ts.run_threads(2, body)
    [([1.0, 2.0], [11.0]), ([2.0, 1.0], [11.0])]
    """

    def __init__(self, forward, reverse, dtypes=(torch.float64,)):
        self._callbacks = Callbacks()
        functions = [self._callbacks.calling(self._run(name, function)) for name, function in (("forward", forward), ("reverse", reverse))]
        self._handle = classes.GhostTransport(*(address(f) for f in functions), [torch.empty(0, dtype=d) for d in dtypes])
        weakref.finalize(self, _release, self._handle, functions).atexit = False

    @staticmethod
    def _run(name, function):
        def run(_):
            (rows,) = ops.taken()
            with torch.no_grad():
                given = function(rows)
            if given is not None:
                raise TypeError(f"{name} of a GhostTransport returned a {type(given).__name__}: it changes the rows that it is given, and returns None")

        return run


class GhostPlan:
    """Who sends which rows to whom: made once for a partition, collectively.

    `over`: a mesh (all its ranks), a mesh and some of its axes (`(mesh, "domain")`), or a group. `owned_ids`: the global ids of this rank's rows, in
    their order; each id has one owner, in any way, and a rank may own none. `needed_ids`: those of its ghosts, in the order in which they stand behind the
    owned rows. Both are tensors or lists of whole numbers. `transport`: a `GhostTransport` in the place of our exchange, on all ranks or none. Raises InvalidArgument on every rank, with ids and ranks, for an id that nobody or two own,
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

    def __init__(self, over, owned_ids, needed_ids, *, transport=None):
        self._ids, self._transport = (_ids(owned_ids), _ids(needed_ids)), transport
        self._handle = classes.GhostPlan(*_over(over), *self._ids, transport and transport._handle)

    def _call(self, function, *arguments):
        return with_cause([self._transport._callbacks] if self._transport else [], function, self._handle, *arguments)

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


class GhostLayers:
    """Several layers of ghosts at once, so that a network of many layers runs by one exchange for every `depth` layers; rows near a cut are then computed on more than one rank.

    `over` and `owned_ids` as for `GhostPlan`; `ends`: ids of the sources and the targets of this rank's edges, each of which is on the owner of its target. The ghosts of `nodes` are in order
    of layer; the rows of `edges` are this rank's edges, then copies of others'. `source` and `target`: both ends of each as rows of `nodes`. `rows[l]`: owned rows and the ghosts of the first
    l layers; `edge_counts[l]`: the edges to those. Collective. Raises InvalidArgument on every rank for an edge whose target is not owned here, a source that nobody owns, another depth.

    >>> def body(rank):
    ...     owned = [2 * rank, 2 * rank + 1]                          # a line of four nodes; edges to the right
    ...     ends = [[0], [1]] if rank == 0 else [[1, 2], [2, 3]]
    ...     g = ts.GhostLayers(ts.Mesh({"ranks": 2}), owned, ends, depth=2)
    ...     h = ts.ghost_exchange(g.nodes, torch.tensor(owned) + 1.0)
    ...     for k in range(2):                                        # one exchange, two layers
    ...         left = g.left_after(k, 2)
    ...         edges, own = slice(g.edge_counts[left]), h[: g.rows[left]]
    ...         h = own + torch.zeros_like(own).index_add(0, g.target[edges], h[g.source[edges]])
    ...     return g.ghosts.tolist(), g.rows, h.tolist()
    >>> ts.run_threads(2, body)
    [([], [2, 2, 2], [1.0, 4.0]), ([1, 0], [2, 3, 4], [8.0, 12.0])]
    """

    def __init__(self, over, owned_ids, ends, depth):
        source, target = _ends(ends)
        owned = _ids(owned_ids)
        self._handle = handle = classes.GhostLayers(*_over(over), owned, source, target, depth)
        self.ghosts, self.source, self.target = handle.ghosts(), handle.source(), handle.target()
        self.rows, self.edge_counts, self.depth = list(handle.rows()), list(handle.edge_counts()), depth
        self.nodes, self.edges = GhostPlan.__new__(GhostPlan), GhostPlan.__new__(GhostPlan)
        for plan, made, ids in (self.nodes, handle.nodes(), (owned, self.ghosts)), (self.edges, handle.edges(), (_ids([]), _ids([]))):
            plan._ids, plan._transport, plan._handle = ids, None, made

    def left_after(self, k, layers):
        """How many layers of ghosts are right after layer `k`, from 0, of a network of `layers` that exchanges before each layer whose number is a multiple of the depth.

        >>> ts.GhostLayers(mesh, [0], [[0], [0]], depth=3).left_after(0, 2)
        1
        """
        return self._handle.left_after(k, layers)

    def costs(self, layers, *, message=10e-6, row=50e-9, edge=200e-9):
        """What one pass of a network of `layers` costs by an exchange for every 1, 2, ... layers, as a table, and the cheapest: `(text, depth)`.

        Prices in seconds: of a message, a row that is sent, an edge's message with its sum; measure your own. Collective. Raises InvalidArgument on every rank for prices that are negative or differ.

        >>> text, depth = ts.GhostLayers(mesh, [0], [[0], [0]], depth=2).costs(4)
        >>> depth
        1
        """
        return self._handle.costs(layers, float(message), float(row), float(edge))


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

    def edges(self, ends, *, anywhere=False, order=None):
        """Edges by ids, sources and targets, as numbers of rows: 2 x the edges of all ranks, sharded along dim 1.

        Give each edge to the owner of its target; `anywhere`: edges may be on any rank, and what they add is sent to the owners. `order`: the number of each edge in the order
        of one process, no other edge's; what is summed by these edges is then added edge by edge in this order, in all derivatives, equal to the bit on any number of
        ranks (on the CPU). Collective. Raises InvalidArgument on every rank, with ids and ranks, for an end that nobody owns, an order of which two edges have a
        number, and, without `anywhere`, a target that another rank owns.

        >>> ts.full_tensor(ts.OwnedRows(mesh, [5, 3]).edges([[3, 5], [5, 5]], order=[8, 2])).tolist()
        [[1, 0], [0, 0]]
        """
        source, target = _ends(ends)
        return self._handle.edges(source, target, anywhere, None if order is None else _ids(order).reshape(-1))

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


class ShardedGraph:
    """A graph that each rank has read, sharded over them: `nodes`, its `OwnedRows`; `edges`, each with its target. Made by `shard_graph`."""

    def __init__(self, handle):
        self._handle, self.nodes, self.edges = handle, OwnedRows.__new__(OwnedRows), handle.edges()
        self.nodes._handle = handle.nodes()
        self.nodes.ids = self.nodes._handle.ids()

    def of_nodes(self, whole):
        """This rank's rows of a tensor with one for each node, as a sharded tensor. Raises InvalidArgument on every rank for other numbers of rows.

        >>> ts.shard_graph(mesh, [0, 0], [[0], [1]]).of_nodes(torch.ones(2, 3)).shape
        torch.Size([2, 3])
        """
        return self._handle.of_nodes(whole)

    def of_edges(self, whole):
        """This rank's rows of a tensor with one for each edge, as a sharded tensor. Raises InvalidArgument on every rank for other numbers of rows.

        >>> ts.shard_graph(mesh, [0, 0], [[0], [1]]).of_edges(torch.ones(1, 3)).shape
        torch.Size([1, 3])
        """
        return self._handle.of_edges(whole)


def shard_graph(over, owner, index, *, ordered=False):
    """Shards a graph that each rank of `over` has read completely: one large one, or a batch of a `Loader` with `graphs=True`.

    `owner`: the rank of each node, in the group of `over`, e.g. by `partition_by_metis`. `index`: 2 x edges, numbers of nodes, sources first. `ordered`: sums by the edges are
    taken in their order here, see `OwnedRows.edges`. Collective. Raises InvalidArgument on every rank for owners and nodes that there are not, and graphs that differ
    between the ranks.

    >>> def body(rank):
    ...     graph = ts.shard_graph(ts.Mesh({"ranks": 2}), torch.tensor([1, 0, 1]), torch.tensor([[0, 1, 2], [1, 2, 0]]))
    ...     x, (source, target) = graph.of_nodes(torch.tensor([1.0, 2.0, 4.0])), graph.edges
    ...     y = torch.zeros_like(x).index_add(0, target, x[source])                        # plain torch
    ...     return graph.nodes.ids.tolist(), ts.to_local(y).tolist()
    >>> ts.run_threads(2, body)
    [([1], [1.0]), ([0, 2], [4.0, 2.0])]
    """
    return ShardedGraph(ops.shard_graph(*_over(over), _ids(owner), _ids(index), ordered))


class Rebalanced:
    """What `rebalance` gives: `rows`, the new `OwnedRows`; `moved`, the tensors given, sharded as those; `imbalance`, the costliest rank over the mean before and after; `rows_moved`."""

    def __init__(self, handle):
        self._handle = handle
        self.rows = OwnedRows.__new__(OwnedRows)
        self.rows._handle = handle.rows()
        self.rows.ids = self.rows._handle.ids()
        self.moved, self.imbalance, self.rows_moved = handle.moved(), tuple(handle.imbalance()), handle.rows_moved()

    def move(self, tensor):
        """A further tensor whose dim 0 is the rows', moved likewise; a leaf. Collective. Raises InvalidArgument on every rank for one that is not sharded as the rows were.

        >>> points = ts.OwnedRows(mesh, [4, 2])
        >>> to = ts.rebalance(points, torch.rand(2, 1), torch.ones(2))
        >>> ts.full_tensor(to.move(points.shard(torch.tensor([7, 8])))).tolist()
        [7, 8]
        """
        return self._handle.move(tensor)

    def summary(self):
        """Costs and moved rows, and a line for each partition where edges were given.

        >>> print(ts.rebalance(ts.OwnedRows(mesh, [4, 2]), torch.rand(2, 1), torch.ones(2)).summary())
        imbalance of costs 1.00 -> 1.00; 0 of 2 rows moved
        """
        return self._handle.summary().rstrip()

    def __repr__(self):
        return f"Rebalanced({self.summary().splitlines()[0]})"


def rebalance(rows, places, costs, tensors=(), *, by="curve", tolerance=1.05, edges=None):
    """Rows divided anew by what they have cost, and moved to their new owners with their ids and what belongs to them: `Rebalanced`.

    `rows`: `OwnedRows`; `places`: this rank's, owned x dims; `costs`: of each owned row, or one number of all, in any unit; `tensors`: fields and states of optimizers, sharded as the rows.
    `by`: "curve" or "bisection". Rows stay while the costliest rank is within `tolerance` of the mean, and where nothing would be gained. `edges`: as `OwnedRows.edges` gives them, for what
    `summary()` says of both partitions. Collective. Raises InvalidArgument on every rank for what does not fit.

    >>> def body(rank):
    ...     cells = ts.OwnedRows(ts.Mesh({"ranks": 2}), [0, 1, 2, 3, 4, 5, 6] if rank == 0 else [7])
    ...     u = cells.shard(cells.ids * 10.0)
    ...     to = ts.rebalance(cells, cells.ids.unsqueeze(1).double(), torch.tensor(7.0 if rank == 0 else 1.0), [u])
    ...     return to.rows.ids.tolist(), ts.to_local(to.moved[0]).tolist(), to.imbalance
    >>> ts.run_threads(2, body)
    [([0, 1, 2, 3], [0.0, 10.0, 20.0, 30.0], (1.75, 1.0)), ([4, 5, 6, 7], [40.0, 50.0, 60.0, 70.0], (1.75, 1.0))]
    """
    if by not in ("curve", "bisection"):
        raise ValueError(f"by={by!r}; rows are divided by 'curve' or 'bisection'")
    return Rebalanced(ops.rebalance(rows._handle, places, torch.as_tensor(costs), list(tensors), by == "curve", float(tolerance), edges))


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
    Raises InvalidArgument for fewer than one part, places that are not points x dims, other than one weight a point, and coordinates that are not finite.

    >>> ts.partition_along_curve(torch.tensor([[0.0, 0], [9, 9], [0, 1], [9, 8]]), 2).tolist()
    [0, 1, 0, 1]
    """
    places = torch.as_tensor(places)
    return ops.partition_along_curve(places, parts, torch.as_tensor([] if weights is None else weights, dtype=torch.float64))


def partition_by_metis(nodes, edges, parts, weights=None):
    """The part of each of `nodes` nodes, 0 .. parts - 1, by METIS: few of the `edges` (2 x edges, numbers of nodes) between parts, and parts of equally many, or equally heavy, nodes.
    Communicates nothing: call it on one rank and broadcast, or on all where they are alike. Raises InvalidArgument for what is no graph, NotAvailable in a build without METIS.

    >>> def owners(nodes, edges):                        # of a build with METIS
    ...     return ts.partition_by_metis(nodes, edges, ts.world().size)
    """
    return ops.partition_by_metis(nodes, torch.as_tensor(edges), parts, torch.as_tensor([] if weights is None else weights, dtype=torch.float64))


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
        return Request(plan._call(ops.start_ghost_exchange, owned))
    return plan._call(ops.ghost_exchange, owned)


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
        return Request(plan._call(ops.start_ghost_reduce, rows, op))
    return plan._call(ops.ghost_reduce, rows, op)

"""Groups of ranks: the world, the groups of a mesh or a tree, and any other; what they send, and its gradients."""

import types
from operator import index

import torch

from tessera._errors import Error, InvalidArgument
from tessera._library import classes, ops


def _seconds(timeout):
    """A limit; 0 is that of the group, or of `init`."""
    if not timeout >= 0:
        raise ValueError(f"timeout={timeout}: give seconds, or 0 for the usual limit")
    return float(timeout)


def _sent(message):
    """A message as text; of what is none, what is wrong with it, since the others wait for it. (bytes(3) would be three zeros.)"""
    try:
        return memoryview(message).tobytes().hex()
    except TypeError:
        return f"!a message is bytes, and not {message!r:.60}: text.encode(), pickle.dumps(value)"


def _received(text):
    if text.startswith("!"):
        raise InvalidArgument(text[1:])
    return bytes.fromhex(text)


def made_together(ranks, what, make, text_of=lambda made: ""):
    """What `make()` gives, and what `text_of` says of it on each rank; where it raises on one rank the others raise too. Collective over the group."""
    made = own = None
    try:
        made = make()
    except Exception as error:
        own = error
    if ranks.size == 1 and own is None:
        return made, [text_of(made)]
    try:
        told = ops.agree(ranks._handle, what, str(own) or type(own).__name__, "") if own else ops.agree(ranks._handle, what, "", text_of(made))
    except Error:
        if own is None:
            raise
    if own is not None:
        raise own
    return made, told


def _row_shape(tensor):
    """The shape of one row."""
    if not tensor.dim():
        raise ValueError("a tensor of rows is needed, and this one has no dims: give tensor.view(1)")
    return tensor.shape[1:]


class Request:
    """A call that is under way. What was given to it must not be read or written before `wait()` has returned. Dropped without it, it is waited for.

    >>> total = torch.ones(3)
    >>> request = ts.world().all_reduce(total, start=True)
    >>> ready = request.done()                       # compute something else meanwhile
    >>> request.wait()
    tensor([1., 1., 1.])
    """

    __class_getitem__ = classmethod(types.GenericAlias)  # Request[torch.Tensor], as the stubs have it

    def __init__(self, handle, result=None):
        self._handle, self._result = handle, result

    def done(self):
        """True once `wait()` would not block."""
        return self._handle.done()

    def wait(self):
        """Blocks until the call is complete and returns its result: the tensor that it fills, or what it gathers. Raises what the call would."""
        arrived = self._handle.wait()
        return self._result if arrived is None else arrived


class SharedMemory:
    """Memory of `nbytes` on each rank of a group that the other ranks reach as well: collectives on tensors in it are not copied in and out.

    Of groups whose ranks meet in memory (`group.backend == "shm"`); `DistributedDataParallel` has its gradients in some by itself. Collective: every
    rank asks for the same number, and has its own bytes claimed at once. The memory lives as long as it or a tensor in it. Raises NotAvailable for other groups.

    >>> def body(rank):
    ...     memory = ts.SharedMemory(ts.world(), 1 << 20)
    ...     flat = memory.empty(1000, dtype=torch.float32)
    ...     return ts.world().all_reduce(flat.fill_(1))[0].item(), memory.used, memory.nbytes
    >>> ts.run_threads(2, body, backend="shm")[0]
    (2.0, ..., 1048576)
    """

    def __init__(self, group, nbytes, *, timeout=0):
        self._handle = group._handle.shared_memory(int(nbytes), _seconds(timeout))

    @property
    def nbytes(self):
        """What was asked for, rounded up to pages."""
        return self._handle.bytes()

    @property
    def used(self):
        """Bytes that tensors take."""
        return self._handle.used()

    def empty(self, *shape, dtype=None):
        """A tensor of this rank alone in it, of undefined values; `dtype`: torch's default. Raises RuntimeError if no free range is large enough."""
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return self._handle.empty(list(shape), torch.empty(0, dtype=dtype, device="cpu"))


class Group:
    """Some ranks, in order, that communicate: `ts.world()`, `ts.group([0, 3])`, `ts.group("data_parallel")`, `mesh.group("domain")`.

    Every call is collective over the group unless it says otherwise, and has a time limit: `timeout=` seconds, or the group's own. Tensors may be
    non-contiguous; what a call fills, it fills in place and returns. `sizes` are rows along dim 0, one number per rank in group order, zeros included;
    without them all ranks have the same number. With `start=True` a call returns a `Request` at once.

    Every call raises InvalidArgument for a root, an operation or sizes that do not fit, `TimeoutError` after its limit, `PeerLostError` and `PeerFailedError` where
    another rank is gone or has raised, and as `set_check_level` says `MismatchError` where ranks call different things.

    >>> ts.run_threads(4, lambda rank: ts.world().all_reduce(torch.ones(3)))[0]
    tensor([4., 4., 4.])
    >>> def body(rank):
    ...     sizes = [3, 0, 2, 1]
    ...     mine = torch.full((sizes[rank], 8), float(rank))
    ...     return ts.world().all_gather(mine, sizes=sizes).shape    # 6 rows, on every rank
    >>> ts.run_threads(4, body)[1]
    torch.Size([6, 8])
    >>> world = ts.world()
    >>> world.rank, world.size, world.ranks, world.name, world.backend, world.backend_reason
    (0, 1, [0], 'world', 'self', '')

    Autograd does not see these calls; those of `ts.functional` it does.
    """

    def __init__(self, handle):
        self._handle = handle

    @property
    def rank(self):
        """This process' position in `ranks`."""
        return self._handle.rank()

    @property
    def size(self):
        """How many ranks."""
        return self._handle.size()

    @property
    def ranks(self):
        """Global ranks in group order, never sorted."""
        return list(self._handle.ranks())

    @property
    def name(self):
        """What errors and traces call it."""
        return self._handle.name()

    @property
    def backend(self):
        """"gloo", "shm", "hosts", "mpi", "nccl", "threads", or "self" for a group of one."""
        return self._handle.backend()

    @property
    def backend_reason(self):
        """Why it is that one: what the ranks found out about their hosts. Empty where the program named it."""
        return self._handle.backend_reason()

    @property
    def timeout(self):
        """Limit of every wait, in seconds.

        >>> ts.world().timeout = 60
        >>> ts.world().timeout
        60.0
        """
        return self._handle.timeout()

    @timeout.setter
    def timeout(self, seconds):
        self._handle.set_timeout(float(seconds))

    def _call(self, name, tensor, output, rank, op, factor, sizes, input_sizes, timeout, start):
        arguments = (name, tensor, output, rank, op, float(factor), list(sizes or []), list(input_sizes or []), _seconds(timeout))
        result = tensor if output is None else output
        if start:
            return Request(self._handle.start(*arguments), result)
        self._handle.call(*arguments)
        return result

    def broadcast(self, tensor, root, *, timeout=0, start=False):
        """Every rank's `tensor` gets the values of that on `root` (a rank of the group).

        >>> ts.run_threads(2, lambda rank: ts.world().broadcast(torch.tensor([rank]), root=1).item())
        [1, 1]
        """
        return self._call("broadcast", tensor, None, root, "sum", 1, None, None, timeout, start)

    def all_reduce(self, tensor, op="sum", *, factor=1, timeout=0, start=False):
        """`op`: sum, avg, product, min, max, or premultiplied: the sum over ranks of each rank's `factor` times its tensor.

        >>> ts.run_threads(3, lambda rank: ts.world().all_reduce(torch.tensor([rank]), "max").item())
        [2, 2, 2]
        """
        return self._call("all_reduce", tensor, None, 0, op, factor, None, None, timeout, start)

    def reduce(self, tensor, root, op="sum", *, factor=1, timeout=0, start=False):
        """As `all_reduce`, on `root` alone; the other ranks' tensors keep their values.

        >>> ts.run_threads(2, lambda rank: ts.world().reduce(torch.tensor([1.0]), root=0).item())
        [2.0, 1.0]
        """
        return self._call("reduce", tensor, None, root, op, factor, None, None, timeout, start)

    def _rows(self, tensor, sizes):
        row = _row_shape(tensor)
        return tensor.new_empty([sum(sizes) if sizes else self.size * tensor.shape[0], *row])

    def all_gather(self, tensor, output=None, *, sizes=None, timeout=0, start=False):
        """The rows of all ranks below each other, in group order. `output`: where they go; made where it is not given.

        >>> ts.run_threads(2, lambda rank: ts.world().all_gather(torch.tensor([rank])).tolist())
        [[0, 1], [0, 1]]
        """
        output = self._rows(tensor, sizes) if output is None else output
        return self._call("all_gather", tensor, output, 0, "sum", 1, sizes, None, timeout, start)

    def reduce_scatter(self, tensor, output=None, op="sum", *, factor=1, sizes=None, timeout=0, start=False):
        """`tensor` holds the rows of all ranks; the result is this rank's rows of the reduced value.

        >>> ts.run_threads(2, lambda rank: ts.world().reduce_scatter(torch.arange(3), sizes=[1, 2]).tolist())
        [[0], [2, 4]]
        """
        if output is None:
            row = _row_shape(tensor)
            mine = sizes[self.rank] if sizes else tensor.shape[0] // self.size
            output = tensor.new_empty([mine, *row])
        return self._call("reduce_scatter", tensor, output, 0, op, factor, sizes, None, timeout, start)

    def all_to_all(self, tensor, output=None, *, output_sizes=None, input_sizes=None, timeout=0, start=False):
        """Rows of `tensor` go to the ranks, `input_sizes[r]` of them to rank r; those that arrive lie likewise. Sizes are this rank's own.

        >>> ts.run_threads(2, lambda rank: ts.world().all_to_all(torch.tensor([10 * rank, 10 * rank + 1])).tolist())
        [[0, 10], [1, 11]]
        """
        if output is None:
            row = _row_shape(tensor)
            output = tensor.new_empty([sum(output_sizes) if output_sizes else tensor.shape[0], *row])
        return self._call("all_to_all", tensor, output, 0, "sum", 1, output_sizes, input_sizes, timeout, start)

    def gather(self, tensor, root, output=None, *, sizes=None, timeout=0, start=False):
        """As `all_gather`, on `root` alone; the other ranks get None.

        >>> ts.run_threads(2, lambda rank: ts.world().gather(torch.tensor([rank]), root=0))
        [tensor([0, 1]), None]
        """
        mine = self.rank == root
        if mine and output is None:
            output = self._rows(tensor, sizes)
        result = self._call("gather", tensor, output if mine else None, root, "sum", 1, sizes, None, timeout, start)
        if start:
            return result if mine else Request(result._handle)
        return result if mine else None

    def scatter(self, output, root, tensor=None, *, sizes=None, timeout=0, start=False):
        """`root` holds the rows of all ranks in `tensor`; each rank's `output` gets its own.

        >>> ts.run_threads(2, lambda rank: ts.world().scatter(torch.zeros(1), 0, torch.tensor([5.0, 6.0])).item())
        [5.0, 6.0]
        """
        return self._call("scatter", tensor if self.rank == root else None, output, root, "sum", 1, sizes, None, timeout, start)

    def send(self, tensor, to, *, timeout=0, start=False):
        """To a rank of the group, which calls `receive`. Not collective.

        >>> def body(rank):
        ...     if rank == 0:
        ...         return ts.world().send(torch.tensor([7]), to=1).item()
        ...     return ts.world().receive(torch.zeros(1, dtype=torch.int64), source=0).item()
        >>> ts.run_threads(2, body)
        [7, 7]
        """
        return self._call("send", tensor, None, to, "sum", 1, None, None, timeout, start)

    def receive(self, tensor, source, *, timeout=0, start=False):
        """Fills `tensor` from a rank of the group, which calls `send`. Not collective."""
        return self._call("receive", tensor, None, source, "sum", 1, None, None, timeout, start)

    def barrier(self, *, timeout=0, start=False):
        """Returns when all ranks have come.

        >>> ts.world().barrier(timeout=60)
        """
        return self._call("barrier", None, None, 0, "sum", 1, None, None, timeout, start)

    def all_gather_bytes(self, mine):
        """A small message of each rank, on all ranks, in group order.

        >>> ts.run_threads(2, lambda rank: ts.world().all_gather_bytes(b"rank %d" % rank))[0]
        [b'rank 0', b'rank 1']
        """
        return [_received(text) for text in self._handle.all_gather_text(_sent(mine))]

    def broadcast_bytes(self, message, root):
        """A small message of `root`, on all ranks.

        >>> ts.run_threads(2, lambda rank: ts.world().broadcast_bytes(b"run 7" if rank == 0 else None, root=0))
        [b'run 7', b'run 7']
        """
        return _received(self._handle.broadcast_text(_sent(message) if self.rank == root else "", root))

    def abort(self, reason):
        """Tells the other ranks that this one cannot go on: their pending and later calls raise with `reason`.

        >>> def body(rank):
        ...     if rank == 1:
        ...         return ts.world().abort("no memory is left")
        ...     try:
        ...         ts.world().barrier()
        ...     except ts.PeerLostError as error:
        ...         return "no memory is left" in str(error)
        >>> ts.run_threads(2, body)
        [True, None]
        """
        self._handle.abort(reason)

    def process_group(self):
        """The `torch.distributed.ProcessGroup` of these ranks, for code written against PyTorch's own.

        >>> pg = ts.world().process_group()              # a torch.distributed.ProcessGroup
        >>> pg.rank(), pg.size()
        (0, 1)
        """
        import torch.distributed as dist

        return dist.ProcessGroup.unbox(self._handle.process_group())

    def __eq__(self, other):
        return isinstance(other, Group) and self._handle.same(other._handle)

    def __hash__(self):
        return hash(tuple(self.ranks))

    def __repr__(self):
        return f"Group({self.name}: ranks {self.ranks}, {self.backend})"


def world():
    """The group of all ranks. Raises ConfigurationError before `init`.

    >>> ts.world().ranks
    [0]
    """
    return Group(ops.world())


def group_of(given, needed=False):
    """The world for None, unless it is needed. Raises InvalidArgument for what is no group, and says what to give."""
    if given is None and not needed:
        return world()
    if isinstance(given, Group):
        return given
    axes = getattr(given, "axes", None)
    instead = f"one of the mesh's, such as mesh.group({next(iter(axes))!r})" if axes else "ts.world(), ts.group(ranks) or mesh.group('data')"
    raise InvalidArgument(f"{repr(given)[:80]} is no group: give {instead}")


def group(which, backend="", timeout=0):
    """A family by name ("data_parallel", see `create_process_groups`), or the group of exactly these global ranks, in this order.

    Called by its members alone; made on first use, then reused. With a `backend` or a `timeout` (seconds) of its own it is another group than the one
    without. Raises where this rank is not a member, and for a name that is unknown, with the known ones.

    >>> def body(rank):
    ...     return ts.group([0, 2]).all_reduce(torch.tensor(rank)).item() if rank != 1 else None
    >>> ts.run_threads(3, body)
    [2, None, 2]
    """
    if isinstance(which, str):
        if backend or timeout:
            raise ValueError(f"the family '{which}' has the backend and the limit that its configuration gave it: name its ranks for others")
        return Group(ops.group_named(which))
    return Group(ops.group_of([index(rank) for rank in which], backend, _seconds(timeout)))


def group_names():
    """The families that `create_process_groups` made, in their order. Raises ConfigurationError before `init`.

    >>> def body(rank):
    ...     ts.create_process_groups(ts.ProcessGroupConfig().add_node("model", "world", size=2).add_node("data", "world"))
    ...     return ts.group_names()
    >>> ts.run_threads(2, body)[0]
    ['world', 'model', 'data']
    """
    return list(ops.group_names())


def group_size(family):
    """Of a family's group, without making it. Raises UnknownName, with the known names.

    >>> ts.create_process_groups(ts.ProcessGroupConfig().add_node("data", "world"))
    >>> ts.group_size("data")
    1
    """
    return ops.group_size(family)


def group_rank(family):
    """This rank's place in its group of a family, without making it. Raises UnknownName, with the known names.

    >>> ts.create_process_groups(ts.ProcessGroupConfig().add_node("data", "world"))
    >>> ts.group_rank("data")
    0
    """
    return ops.group_rank(family)


def set_check_level(level):
    """'off', 'local' (default) or 'collective': all ranks of a group compare what they call before data moves. The same on all ranks.
    Raises InvalidArgument for another word.

    >>> ts.set_check_level("collective")             # while a program that hangs is looked into
    >>> ts.set_check_level("local")
    """
    ops.set_check_level(level)


class GroupInfo:
    """One kind of parallelism, as this rank sees it: `groups.mp.group`, `.ranks`, `.rank`, `.size`.

    >>> dp = ts.ParallelGroups().dp
    >>> dp.ranks, dp.rank, dp.size
    ([0], 0, 1)
    """

    def __init__(self, handle):
        self._handle, self.group = handle, Group(handle.group())

    @property
    def ranks(self):
        """Global ranks in group order."""
        return self.group.ranks

    @property
    def rank(self):
        """This rank's place in it."""
        return self.group.rank

    @property
    def size(self):
        """How many ranks."""
        return self.group.size

    def all_reduce(self, tensor, op="sum", *, factor=1, start=False):
        """All-reduce in place. Refused for a tensor of a graph: `ts.functional.all_reduce` is recorded.

        >>> ts.run_threads(2, lambda rank: ts.ParallelGroups().dp.all_reduce(torch.ones(2)))[0]
        tensor([2., 2.])
        """
        if start:
            return Request(self._handle.start_all_reduce(tensor, op, float(factor)), tensor)
        self._handle.all_reduce(tensor, op, float(factor))
        return tensor

    def split(self, tensor, dim=0):
        """This rank's slice of a tensor that all ranks hold; the first ranks get one row more where it does not divide. Its gradient is gathered.

        >>> ts.run_threads(2, lambda rank: ts.ParallelGroups(model=2).mp.split(torch.arange(5)).tolist())
        [[0, 1, 2], [3, 4]]
        """
        return self._handle.split(tensor, dim)

    def all_gather(self, tensor, dim=0, *, start=False):
        """The ranks' slices joined along `dim`, any sizes. Inverse of `split`, both ways: its gradient is split.

        >>> ts.run_threads(2, lambda rank: ts.ParallelGroups(model=2).mp.all_gather(torch.full((rank + 1,), rank)).tolist())
        [[0, 1, 1], [0, 1, 1]]
        """
        if start:
            return Request(self._handle.start_all_gather(tensor, dim))
        return self._handle.all_gather(tensor, dim)

    def gather_to(self, root, tensor, dim=0, *, start=False):
        """The same for one rank of the group alone; the others get None. Refused for a tensor of a graph.

        >>> ts.run_threads(2, lambda rank: ts.ParallelGroups(model=2).mp.gather_to(1, torch.tensor([rank])))
        [None, tensor([0, 1])]
        """
        if start:
            return Request(self._handle.start_gather_to(root, tensor, dim))
        return self._handle.gather_to(root, tensor, dim)

    def __repr__(self):
        return f"GroupInfo(rank {self.rank} of {self.ranks})"


class ParallelGroups:
    """Model, pipeline and data parallelism given by two numbers; what is left of the world are replicas.

    >>> def body(rank):
    ...     groups = ts.ParallelGroups(model=2, pipeline=2)
    ...     return groups.mp.ranks, groups.pp.ranks, groups.dp.ranks, groups.mesh.axes, groups.summary()
    >>> ts.run_threads(8, body)[5]
    ([4, 5], [5, 7], [1, 5], {'dp': 2, 'pp': 2, 'mp': 2}, '...')

    `backends` and `timeouts` give a kind ("mp", "pp", "dp") its own. Collective over the world; raises on every rank where sizes do not divide the world
    or ranks give different ones.
    """

    def __init__(self, model=1, pipeline=1, backends=None, timeouts=None):
        from tessera._api import Mesh

        kinds = ("mp", "pp", "dp")
        for what in (backends, timeouts):
            unknown = sorted(set(what or {}) - set(kinds))
            if unknown:
                raise ValueError(f"{unknown[0]!r} is no kind of parallelism: {', '.join(kinds)}")
        chosen = [(backends or {}).get(kind, "") for kind in kinds], [_seconds((timeouts or {}).get(kind, 0)) for kind in kinds]
        self._handle = classes.ParallelGroups(model, pipeline, *chosen)
        self.mesh = Mesh._of(self._handle.mesh())
        self.mp, self.pp, self.dp, self.world = (GroupInfo(self._handle.info(kind)) for kind in (*kinds, "world"))

    def summary(self):
        """The sizes, and this rank's place, in one line."""
        return self._handle.summary()

    def __repr__(self):
        return f"ParallelGroups({self.summary()})"

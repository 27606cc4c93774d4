"""Collectives that autograd sees."""

from tessera._groups import group_of
from tessera._library import ops


class functional:
    """Collectives that autograd sees: they return new tensors, and backward sends the gradients the other way.

    `cotangent="summed"`: each rank has a loss of its own, and their sum is differentiated. `"replicated"`: all ranks compute the same loss from the
    result, and it counts once. Backward is collective: each rank's graph holds the same calls, and their results reach its loss. Sizes are rows along
    dim 0, one number per rank.

    >>> def body(rank):
    ...     x = torch.full((rank + 1,), 2.0, requires_grad=True)
    ...     y = ts.functional.all_gather(ts.world(), x, [1, 2])     # 3 elements
    ...     (y.sum() * (rank + 1)).backward()                       # each rank's loss counts: 1 + 2
    ...     return x.grad.tolist()
    >>> ts.run_threads(2, body)
    [[3.0], [3.0, 3.0]]
    """

    @staticmethod
    def _call(name, group, x, rank=0, op="sum", factor=1.0, sizes=None, input_sizes=None, cotangent="summed"):
        if cotangent not in ("summed", "replicated"):
            raise ValueError(f"a cotangent is 'summed' or 'replicated', not {cotangent!r}")
        sizes, input_sizes = list(sizes or []), list(input_sizes or [])
        return ops.functional(name, group_of(group, needed=True)._handle, x, rank, op, float(factor), sizes, input_sizes, cotangent == "replicated")

    @staticmethod
    def all_reduce(group, x, op="sum", *, factor=1.0, cotangent="summed"):
        """`op`: sum, avg or premultiplied; others are not linear and raise.

        >>> ts.functional.all_reduce(ts.world(), torch.ones(2))
        tensor([1., 1.])
        """
        return functional._call("all_reduce", group, x, op=op, factor=factor, cotangent=cotangent)

    @staticmethod
    def all_gather(group, x, sizes=None, *, cotangent="summed"):
        """The ranks' rows below each other."""
        return functional._call("all_gather", group, x, sizes=sizes, cotangent=cotangent)

    @staticmethod
    def reduce_scatter(group, x, sizes=None, op="sum", *, factor=1.0):
        """This rank's rows of the sum.

        >>> ts.run_threads(2, lambda rank: ts.functional.reduce_scatter(ts.world(), torch.ones(3), [2, 1]).tolist())
        [[2.0, 2.0], [2.0]]
        """
        return functional._call("reduce_scatter", group, x, op=op, factor=factor, sizes=sizes)

    @staticmethod
    def all_to_all(group, x, output_sizes=None, input_sizes=None):
        """Rows of `x` go to the ranks, `input_sizes[r]` of them to rank r.

        >>> ts.run_threads(2, lambda rank: ts.functional.all_to_all(ts.world(), torch.tensor([0.0, 1.0]) + 10 * rank).tolist())
        [[0.0, 10.0], [1.0, 11.0]]
        """
        return functional._call("all_to_all", group, x, sizes=output_sizes, input_sizes=input_sizes)

    @staticmethod
    def broadcast(group, x, root, *, cotangent="summed"):
        """The values of `root`; `x` has the same shape on all ranks, and elsewhere its gradient is zero.

        >>> ts.run_threads(2, lambda rank: ts.functional.broadcast(ts.world(), torch.tensor(1.0 + rank), root=1).item())
        [2.0, 2.0]
        """
        return functional._call("broadcast", group, x, rank=root, cotangent=cotangent)

    @staticmethod
    def reduce(group, x, root, op="sum", *, factor=1.0):
        """The result on `root`, zeros elsewhere.

        >>> ts.run_threads(2, lambda rank: ts.functional.reduce(ts.world(), torch.tensor(1.0), root=0).item())
        [2.0, 0.0]
        """
        return functional._call("reduce", group, x, rank=root, op=op, factor=factor)

    @staticmethod
    def gather(group, x, root, sizes=None):
        """All rows on `root`, no rows elsewhere.

        >>> ts.run_threads(2, lambda rank: ts.functional.gather(ts.world(), torch.full((1,), float(rank)), root=0).tolist())
        [[0.0, 1.0], []]
        """
        return functional._call("gather", group, x, rank=root, sizes=sizes)

    @staticmethod
    def scatter(group, x, root, sizes):
        """This rank's rows of the root's `x`; elsewhere `x` gives dtype, device and the dims after the first.

        >>> ts.run_threads(2, lambda rank: ts.functional.scatter(ts.world(), torch.arange(3.0), 0, [1, 2]).tolist())
        [[0.0], [1.0, 2.0]]
        """
        return functional._call("scatter", group, x, rank=root, sizes=sizes)

    @staticmethod
    def send(group, x, to):
        """Not collective. Returns a token without elements, through which the gradient comes back: add its sum to the loss.

        >>> def body(rank):
        ...     x = torch.ones(2, requires_grad=True)
        ...     if rank == 0:
        ...         ts.functional.send(ts.world(), 3 * x, to=1).sum().backward()
        ...         return x.grad.tolist()
        ...     y = ts.functional.receive(ts.world(), x, source=0)
        ...     y.sum().backward()
        ...     return y.tolist()
        >>> ts.run_threads(2, body)
        [[3.0, 3.0], [3.0, 3.0]]
        """
        return functional._call("send", group, x, rank=to)

    @staticmethod
    def receive(group, like, source):
        """Not collective. A tensor of the shape of `like`, which must require a gradient where the sender's tensor does."""
        return functional._call("receive", group, like, rank=source)

    @staticmethod
    def replicate(group, x):
        """A value that all ranks hold alike, entering computation that differs by rank: the gradients of all ranks are summed.

        >>> def body(rank):
        ...     x = torch.ones(1, requires_grad=True)
        ...     (ts.functional.replicate(ts.world(), x) * (rank + 1)).sum().backward()
        ...     return x.grad.item()
        >>> ts.run_threads(2, body)
        [3.0, 3.0]
        """
        return functional._call("replicate", group, x)

    @staticmethod
    def own_rows(group, x, sizes):
        """This rank's rows of a value that all ranks hold alike; backward gathers.

        >>> ts.run_threads(2, lambda rank: ts.functional.own_rows(ts.world(), torch.arange(3.0), [1, 2]).tolist())
        [[0.0], [1.0, 2.0]]
        """
        return functional._call("own_rows", group, x, sizes=sizes)

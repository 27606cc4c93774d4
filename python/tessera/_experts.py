"""Mixtures of experts: tokens travel to the experts that they choose, and back."""

from operator import index

from tessera._library import classes, ops


class Routing:
    """Which tokens go to which experts, made of one layer's `probabilities`, [tokens, experts], in one step: plain, or sharded on a mesh with `axis`.

    A token chooses the `chosen` experts of its largest probabilities. An expert takes `capacity` times the mean number of tokens (0: all of them); first
    choices come before second ones, and tokens by their global order. `normalized`: weights are divided by their sum. `sizes`: experts on each rank of the
    axis, by default as even as possible. Collective over the axes that shard tokens; values and gradients are those of one process. Raises InvalidArgument
    for more choices than experts, a negative capacity, a mesh without the axis, and sizes that do not fit.

    >>> experts = ts.Mesh({"expert": 1})
    >>> up, down = (ts.distribute_tensor(torch.randn(3, *n), experts, [ts.Shard(0)]).requires_grad_() for n in [(8, 16), (16, 8)])
    >>> tokens = ts.distribute_tensor(x, experts, [ts.Shard(0)])
    >>> routing = ts.Routing(torch.softmax(tokens[:, :3], -1), chosen=2)
    >>> h = ts.grouped_product(routing.to_experts(tokens), up, routing).relu()
    >>> y = routing.to_tokens(ts.grouped_product(h, down, routing))
    >>> y.shape, sum(routing.counts), sum(routing.chosen), routing.left_out
    (torch.Size([4, 8]), 8, 8, 0)
    >>> (y.square().mean() + 0.01 * routing.balance()).backward()
    """

    def __init__(self, probabilities, chosen=1, *, capacity=0.0, normalized=False, axis="expert", sizes=()):
        self._handle = classes.Routing(probabilities, index(chosen), float(capacity), bool(normalized), axis, [index(n) for n in sizes])

    def to_experts(self, tokens):
        """The tokens of this rank's experts, a plain tensor, expert by expert. Collective over the experts' axis.

        >>> routing = ts.Routing(torch.softmax(x[:, :3], -1))
        >>> routing.to_experts(x).shape
        torch.Size([4, 8])
        """
        return self._handle.to_experts(tokens)

    def to_tokens(self, made):
        """What experts have made of them at their tokens again, weighted and added. Collective over the experts' axis.

        >>> routing = ts.Routing(torch.softmax(x[:, :3], -1), normalized=True)
        >>> torch.allclose(routing.to_tokens(routing.to_experts(x)), x)
        True
        """
        return self._handle.to_tokens(made)

    def balance(self):
        """The loss of the Switch Transformer (equation 4): 1 where all experts are chosen alike.

        >>> float(ts.Routing(torch.eye(4)).balance())
        1.0
        """
        return self._handle.balance()

    @property
    def counts(self):
        """How many tokens each of this rank's experts has."""
        return self._handle.counts()

    @property
    def chosen(self):
        """How many tokens of all ranks chose each expert, before capacity."""
        return self._handle.chosen()

    @property
    def left_out(self):
        """Choices of all ranks that found no room."""
        return self._handle.left_out()


def grouped_product(rows, weights, routing):
    """The rows of each of this rank's experts, as `Routing.to_experts` gives them, times the matrix of that expert in `weights`, [experts, in, out].

    `weights` are plain in one process, else sharded on the routing's mesh; those that do not lie by dim 0 on the experts' axis are gathered. Raises
    InvalidArgument for shapes and dtypes that do not fit.

    >>> routing = ts.Routing(torch.softmax(x[:, :3], -1))
    >>> ts.grouped_product(routing.to_experts(x), torch.ones(3, 8, 2), routing).shape
    torch.Size([4, 2])
    """
    return ops.grouped_product(rows, weights, routing._handle)

"""Orders: which samples make up each step, whatever the number of ranks."""

from operator import index

from tessera._library import ops


class Order:
    """The global order of samples: which of them make up step s, whatever the number of ranks or workers. `describe()` says what it depends on.

    >>> order = ts.FixedOrder(100, 8)
    >>> order.describe()
    '...100...'
    """

    def __init__(self, handle):
        self._handle = handle

    def describe(self):
        """One line; loaders with equal ones read the same samples at the same steps."""
        return self._handle.describe()

    def __repr__(self):
        return f"Order({self.describe()})"


def _schedule(batch):
    return [(index(step), index(size)) for step, size in sorted(batch.items())] if isinstance(batch, dict) else [(0, index(batch))]


def FixedOrder(samples, batch, *, seed=0, shuffle=True, last="keep"):
    """One shuffled pass over `samples` samples per epoch, in batches of `batch`, or of a schedule `{step: size}` from step 0 on.

    `last`: what becomes of samples at the end of an epoch that fill no batch: "keep" (a smaller one), "pad" (repeats some, marked), "drop". Raises InvalidArgument for no samples, and for
    a batch below 1.

    >>> ts.FixedOrder(100, {0: 8, 1000: 16}, last="drop")    # batches of 16 from step 1000 on
    Order(...)
    """
    return Order(ops.fixed_order(samples, seed, shuffle, last, _schedule(batch)))


def WeightedOrder(weights, batch, samples_per_epoch, *, seed=0):
    """Draws with replacement, in proportion to one weight per sample; `samples_per_epoch` draws are an epoch.

    Raises InvalidArgument for weights that are negative, not finite, or all zero.

    >>> ts.WeightedOrder([1, 1, 8], batch=4, samples_per_epoch=100)
    Order(...)
    """
    return Order(ops.weighted_order([float(w) for w in weights], seed, _schedule(batch), samples_per_epoch))


def MixtureOrder(datasets, weights, batch, *, seed=0, shuffle=True):
    """A mixture of datasets `{name: samples}`: at every point each one's share is as close to its weight as whole numbers allow.

    `weights`: one per dataset, or `{draw: weights}` from draw 0 on. It has no epochs: count the steps. Raises InvalidArgument for another number of weights
    than of datasets, and for a weight of a dataset without samples.

    >>> ts.MixtureOrder({"books": 1000, "code": 400}, [0.7, 0.3], batch=10)
    Order(...)
    """
    stages = sorted(weights.items()) if isinstance(weights, dict) else [(0, weights)]
    stages = [(index(draw), [float(w) for w in values]) for draw, values in stages]
    return Order(ops.mixture_order(list(datasets), [index(n) for n in datasets.values()], stages, seed, shuffle, _schedule(batch)))


def TokenBudgetOrder(lengths, tokens, *, max_samples=0, padded=False, seed=0, shuffle=True):
    """Batches of as many samples as `tokens` tokens take. `lengths`: tokens per sample. `padded`: a batch costs count x longest.

    Raises InvalidArgument, with its position, for a sample that is longer than the budget.

    >>> ts.TokenBudgetOrder([5, 9, 3, 7], tokens=12)
    Order(...)
    """
    return Order(ops.token_budget_order([index(n) for n in lengths], tokens, max_samples, padded, seed, shuffle))


def PackedOrder(lengths, rows, capacity, *, seed=0, shuffle=True):
    """Batches of `rows` rows of `capacity` tokens, packed with complete samples. `lengths`: tokens per sample.

    Raises InvalidArgument, with its position, for a sample that is longer than a row.

    >>> ts.PackedOrder([5, 9, 3, 7], rows=2, capacity=12)
    Order(...)
    """
    return Order(ops.packed_order([index(n) for n in lengths], rows, capacity, seed, shuffle))

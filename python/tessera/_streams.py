"""Streams: samples in sequence, one stream a rank, or shards that the ranks divide."""

import weakref
from dataclasses import dataclass
from operator import index

import torch

from tessera._callbacks import Callbacks, address, with_cause
from tessera._data import _close, _kept, _tensors
from tessera._groups import group_of
from tessera._library import classes


@dataclass(frozen=True)
class StreamBatch:
    """A batch of this rank's stream; rows from `real` on are padding.

    >>> batch = ts.StreamLoader([[torch.ones(8)]] * 3, rows=4).next()
    >>> batch.step, batch.rows, batch.real, batch.global_real, batch.mask
    (0, 3, 3, 3, None)
    """

    step: int
    tensors: tuple
    rows: int
    real: int
    global_real: int
    mask: torch.Tensor | None


class StreamShards:
    """Shards (files, archives, topics) that ranks read as one stream, which goes on where it stopped, on any number of ranks.

    `count`: of shards, the same on all ranks. `open(shard, sample)`: an iterable of the samples of `shard` from number `sample` on. `lanes`: how many shards are
    open at the same time over all ranks: a divisor of the rows of a global batch, at most `count`, at least the number of ranks that ever read; 0: the largest up
    to 64. Lanes, not ranks, decide the order: lane l has every `lanes`-th shard of an epoch's order, and a batch equally many rows of each. `shuffle`: shards in
    an order that `seed` draws for each epoch. `epochs`: 0 is without end. To be given to a `StreamLoader`, which raises ValueError for lanes out of range.

    >>> shards = ts.StreamShards(4, lambda shard, sample: ([torch.tensor(10 * shard + i)] for i in range(sample, 3)), lanes=2, shuffle=False)
    >>> loader = ts.StreamLoader(shards, rows=4)
    >>> loader.next().tensors[0].tolist(), loader.next().tensors[0].tolist()
    ([0, 1, 10, 11], [2, 20, 12, 30])
    >>> again = ts.StreamLoader(shards, rows=4)
    >>> again.restore(loader.state()); again.next().tensors[0].tolist()
    [21, 22, 31, 32]
    """

    def __init__(self, count, open, *, lanes=0, shuffle=True, seed=0, epochs=1):
        self.open, self.shuffle = open, shuffle
        self.count, self.lanes, self.seed, self.epochs = map(index, (count, lanes, seed, epochs))  # TypeError for what is no whole number

    def _following(self):
        """What the library calls: (number of the opening, shard, sample) -> that sample."""
        opened = {}

        def following(numbers):
            which, shard, sample = numbers
            if which not in opened:
                while len(opened) >= (self.lanes or 64):  # the oldest, of lanes that were put elsewhere; any other would be opened again
                    del opened[next(iter(opened))]
                opened[which] = iter(self.open(shard, sample))
            try:
                return next(opened[which])
            except BaseException:
                del opened[which]
                raise

        return following


class StreamLoader:
    """Batches from iterables, one stream per rank, whose lengths may differ: the ranks agree before every step, so that none waits for one that has ended.

    >>> samples = ([torch.full((8,), float(i))] for i in range(5))
    >>> loader = ts.StreamLoader(samples, rows=2, uneven="pad", example=(torch.zeros(8),))
    >>> loader.next().tensors[0].shape
    torch.Size([2, 8])
    >>> state = loader.state()
    >>> for batch in loader:
    ...     x, = batch.tensors
    ...     print(batch.step, batch.real)
    1 2
    2 1
    >>> again = ts.StreamLoader(([torch.zeros(8)] for i in range(5)), rows=2)
    >>> again.restore(state, replay=True); again.next().step
    1

    `stream`: an iterable of this rank's samples and `rows` the size of this rank's batch; or a `StreamShards`, the same on all ranks, and `rows` that of the global
    batch, of which each rank of `group` reads its lanes' (`mesh.group("data")`: ranks of one coordinate along `data` read the same).

    `uneven`: at a step for which some ranks have a full batch and others do not: "error" (default), "drop", "pad", "weight_zero". `example`: a sample,
    from which a rank whose stream is empty knows the shapes. `transform`: applied to each sample, in the threads.

    Raises on every rank UnevenDataError as `uneven` says, StalledError where a rank has no sample within `stall_limit` seconds, SampleError for what a stream raises.
    """

    def __init__(self, stream, rows, group=None, *, uneven="error", example=(), workers=0, prefetch=2, stall_limit=120.0, transform=None):
        self.sharded, self._errors = isinstance(stream, StreamShards), Callbacks()
        sharding = [stream.count, stream.lanes, int(stream.shuffle), stream.seed, stream.epochs] if self.sharded else []
        iterator = None if self.sharded else iter(stream)
        follow = stream._following() if self.sharded else lambda _: next(iterator)

        def following(numbers):
            try:
                sample = follow(numbers)
            except StopIteration:
                return None
            return _tensors(transform(sample) if transform else sample)

        self._reader = _kept(self._errors.calling(following))
        on = group_of(group)._handle
        self._handle = classes.StreamLoader(address(self._reader), rows, on, uneven, _tensors(example), workers, prefetch, float(stall_limit), sharding)
        self.close = weakref.finalize(self, _close, self._handle, self._reader)

    def next(self):
        """The next batch, or None once the ranks have agreed that the data has ended. Collective."""
        numbers, tensors, mask = with_cause([self._errors], self._handle.next)
        if not numbers:
            return None
        step, rows, real, global_real = numbers
        return StreamBatch(step, tuple(tensors), rows, real, global_real, mask)

    def __iter__(self):
        while (batch := self.next()) is not None:
            yield batch

    def state(self):
        """Steps and samples so far, as text; of shards the place of every lane, the same on all ranks."""
        return self._handle.state()

    def restore(self, state, replay=False):
        """Shards go on where they were, on any number of ranks. A stream without positions cannot be resumed: raises, or with `replay` reads and throws away as many samples."""
        self._handle.restore(state, replay)

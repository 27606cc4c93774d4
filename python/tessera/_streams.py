"""Streams: samples in sequence, without positions, one stream a rank."""

import weakref
from dataclasses import dataclass

import torch

from tessera._callbacks import Callbacks, address, with_cause
from tessera._data import _close, _kept, _tensors
from tessera._groups import world
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

    `uneven`: at a step for which some ranks have a full batch and others do not: "error" (default), "drop", "pad", "weight_zero". `example`: a sample,
    from which a rank whose stream is empty knows the shapes. `transform`: applied to each sample, in the threads.

    Raises on every rank UnevenDataError as `uneven` says, StalledError where a rank has no sample within `stall_limit` seconds, SampleError for what a stream raises.
    """

    def __init__(self, stream, rows, group=None, *, uneven="error", example=(), workers=0, prefetch=2, stall_limit=120.0, transform=None):
        iterator, self._errors = iter(stream), Callbacks()

        def following(_):
            try:
                sample = next(iterator)
            except StopIteration:
                return None
            return _tensors(transform(sample) if transform else sample)

        self._reader = _kept(self._errors.calling(following))
        on = (world() if group is None else group)._handle
        self._handle = classes.StreamLoader(address(self._reader), rows, on, uneven, _tensors(example), workers, prefetch, float(stall_limit))
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
        """Steps and samples so far, as text."""
        return self._handle.state()

    def restore(self, state, replay=False):
        """A stream without positions cannot be resumed: raises, or with `replay` reads and throws away as many samples."""
        self._handle.restore(state, replay)

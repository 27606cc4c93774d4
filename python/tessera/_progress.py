"""What a run says of itself while it runs, and what its steps cost."""

import contextlib
import sys
import threading
from operator import index

import torch

from tessera._api import is_sharded, rank
from tessera._errors import InvalidArgument
from tessera._groups import world
from tessera._library import classes, ops

_open = threading.local()


class _OnThisThread:
    """Counters of the library belong to a thread and end in the reverse order of their beginning: what is left early stays until those behind it are left."""

    def _enter(self, handle, end):
        if getattr(self, "_handle", None) is not None:
            raise InvalidArgument(f"this {type(self).__name__} has been entered: make another one")
        self._handle, self._end, self._left, self._thread = handle, end, False, threading.get_ident()
        _open.stack = getattr(_open, "stack", [])
        _open.stack.append(self)

    def _leave(self):
        if self._thread != threading.get_ident():
            raise InvalidArgument(f"this {type(self).__name__} was entered on another thread, where it must be left")
        self._left = True
        while _open.stack and _open.stack[-1]._left:
            _open.stack.pop()._end()


class _Counter(_OnThisThread):
    _class = None

    def __enter__(self):
        self._total = None
        self._enter(getattr(classes, self._class)(), self._stop)
        return self

    def __exit__(self, *_):
        self._total = self._handle.total()
        self._leave()

    def _stop(self):
        self._handle = None

    @property
    def total(self):
        """So far, or when it was left."""
        if not hasattr(self, "_total"):
            raise InvalidArgument(f"nothing was counted: use it as `with ts.{type(self).__name__}() as counter:`")
        return self._handle.total() if self._total is None else self._total


class FlopCounter(_Counter):
    """Counts this rank's floating-point operations from the shapes that operators are called with; an operator costs about a microsecond more meanwhile.

    >>> with ts.FlopCounter() as counter:
    ...     loss = nn.functional.linear(torch.ones(5, 3), torch.ones(2, 3, requires_grad=True)).sum()
    ...     loss.backward()
    >>> counter.total              # 2 x 5 x 3 x 2 forward, and once more for the weight's gradient
    120.0

    Matrix products, convolutions, attention and einsum are counted, backward with the forward that it belongs to; what is computed again in backward is not,
    as in the model FLOPs utilisation of Chowdhery et al., PaLM, 2022. Of an operator on sharded tensors each rank counts an equal share of the global one.
    Of two that are open on a thread the inner one counts.
    """

    _class = "FlopCounter"


class WaitTime(_Counter):
    """Adds up the seconds that this thread waits for other ranks in collective calls, whoever makes them. Of two that are open the inner one hands on to the outer one.

    >>> with ts.WaitTime() as waiting:
    ...     ts.world().barrier()
    >>> waiting.total < 1
    True
    """

    _class = "WaitTime"


def measure_peak_flop(device="cpu", dtype=torch.float32):
    """FLOP a second that products of square matrices reach on a device, in about a tenth of a second; ranks that share a host call it at once.

    >>> ts.measure_peak_flop() > 1e6
    True
    """
    return ops.measure_peak_flop(str(torch.device(device)), dtype)


# A stderr that is closed, full, none or of another alphabet does not end a run, on rank 0 alone.
_NOT_WRITABLE = OSError, ValueError, AttributeError


def _on_terminal():
    with contextlib.suppress(*_NOT_WRITABLE):
        return bool(sys.stderr.isatty())
    return False


def _shown(name, value):
    if isinstance(value, torch.Tensor):
        if is_sharded(value):
            raise InvalidArgument(f"Progress.step({name}=...) of a sharded tensor: its number is a collective call; give {name}.item(), taken on all ranks")
        value = value.item()
    return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"


class Progress(_OnThisThread):
    """What a loop of one's own says of itself: a bar on a terminal, elsewhere a line a minute, on stderr of rank 0; and what its steps cost on every rank.

    >>> with ts.Progress(1000, start=0, unit="samples") as progress:
    ...     for step in range(1000):
    ...         progress.step(32, loss=1 / (step + 1))
    ...     values = progress.report()               # lines at the end, on rank 0; collective
    >>> values["throughput/steps"] > 0, "memory/peak" in values
    (True, True)

    On a terminal it is

        ━━━━━━━───────────  34%  340/1000  12.3 steps/s  394 samples/s  loss 0.25  53 s left

    `steps`: the number of the last one, None where it is not known. `start`: the number of the step that the loop begins behind, `session.steps` after a resume.
    `unit`: what the weights of steps count. `device`: that of the model, for its peak memory. `peak_flop`: FLOP a second that the device of one rank can do,
    as its maker states it or `measure_peak_flop` finds. `show`: default on rank 0 alone. `line_seconds`: between two lines where no terminal is. Nothing is
    sent but by `report`. Raises InvalidArgument where it is used outside of its `with`.
    """

    def __init__(self, steps=None, *, start=0, unit="samples", device="cpu", peak_flop=0.0, show=None, line_seconds=60.0):
        self._steps, self._start, self._unit, self._peak = steps, index(start), unit, float(peak_flop)
        self._device, self._show, self._line_seconds = str(torch.device(device)), show, float(line_seconds)
        self._handle, self._note = None, ""

    def __enter__(self):
        show = rank() == 0 if self._show is None else bool(self._show)
        self._enter(classes.Progress(show, _on_terminal(), self._unit, self._line_seconds, self._device), self._close)
        self._write(self._handle.start(self._start, -1 if self._steps is None else index(self._steps)))
        return self

    def __exit__(self, *_):
        self._write(self._handle.finish(self._note))
        self._leave()

    def _close(self):
        self._handle.close()
        self._handle = None

    def _write(self, text):
        if text:
            with contextlib.suppress(*_NOT_WRITABLE):
                sys.stderr.write(text)
                sys.stderr.flush()

    def _entered(self):
        if self._handle is None or self._left:
            raise InvalidArgument("a Progress is used inside of its `with ts.Progress(...) as progress:`")
        return self._handle

    def step(self, weight=0, **values):
        """A step has ended, with `weight` samples (tokens, cells) of all ranks; `values` stand beside the pace: numbers, or plain tensors of one element.

        >>> with ts.Progress(2) as progress:
        ...     progress.step(8, loss=0.5)
        ...     progress.step(8, loss=0.25, rate="1e-3")
        """
        handle = self._entered()
        self._note = ", ".join(_shown(name, value) for name, value in values.items())
        self._write(handle.step(float(weight), self._note))

    def say(self, line):
        """Writes a line of its own, where the bar was.

        >>> with ts.Progress() as progress:
        ...     progress.say("resumed from step-7")
        """
        self._write(self._entered().say(line))

    def report(self):
        """Says what all steps have cost, over all ranks, and returns it by the names of the trainer's log (docs/trainer.md). Collective.

        >>> with ts.Progress() as progress:
        ...     progress.step(8)
        ...     sorted(progress.report())[:3]
        ['memory/peak', 'memory/peak_rank', 'throughput/bytes']
        """
        handle = self._entered()
        mine = torch.tensor(handle.pace(), dtype=torch.float64)
        group = world()
        ranks = (mine if group.size == 1 else group.all_gather(mine)).reshape(-1, len(mine)).tolist()
        for line in ops.pace_lines(ranks, self._peak, handle.seconds(), self._unit):
            self._write(handle.say(line))
        return dict(ops.pace_values(ranks, self._peak))

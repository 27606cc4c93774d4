"""Pipeline schedules as values: made, checked, timed and drawn by the library, without ranks and without tensors."""

from dataclasses import astuple, dataclass
from operator import index

from tessera._errors import Error
from tessera._library import classes, ops


def schedules():
    """The names that `Schedule` takes.

    >>> ts.schedules()
    ['gpipe', '1f1b', 'interleaved', 'zero_bubble_h1', 'zero_bubble_v']
    """
    return list(ops.schedule_names())


@dataclass(frozen=True)
class StageCosts:
    """What the actions of a stage take, in any one unit of time, and hold, in any one unit of memory.

    >>> ts.StageCosts(1.0, 1.5, 0.7, recompute=True).weight_gradient
    0.7

    `backward`: time of B; None: input and weight gradient, and a forward before them where the stage recomputes. `activation`: held by a micro-batch from the
    start of its forward to the end of its backward. `kept_for_weight`: what of it is held on from I to the end of W; None: all. `working`: held besides while
    a backward runs. `gather`, `reduce`: of fully sharded parameters and of gradients, beside compute.
    """

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    backward: float | None = None
    recompute: bool = False
    activation: float = 1.0
    kept_for_weight: float | None = None
    working: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0


class PipelineCosts:
    """What the stages of a pipeline cost: what `Schedule.simulate` and `Schedule.for_costs` take, and `Pipeline.measure` gives.

    >>> costs = ts.PipelineCosts([ts.StageCosts(1.0, 1.5, 0.7)] * 3, communication=[0.05, 0.05], sizes=[1, 2])
    >>> costs.stages[0].input_gradient, costs.communication, costs.sizes
    (1.5, [0.05, 0.05], [1.0, 2.0])
    >>> equal = ts.PipelineCosts.uniform(4, forward=1.0, input_gradient=1.5, weight_gradient=0.7)

    `communication[s]`: time of a message between stages s and s + 1; empty: none. `sizes`: relative sizes of the micro-batches; empty: all 1.
    """

    def __init__(self, stages, communication=(), sizes=()):
        floats = [tuple(v if v is None or isinstance(v, bool) else float(v) for v in astuple(stage)) for stage in stages]
        self._handle = classes.PipelineCosts(floats, [float(c) for c in communication], [float(n) for n in sizes])

    @classmethod
    def _of(cls, handle):
        costs = cls.__new__(cls)
        costs._handle = handle
        return costs

    @classmethod
    def uniform(cls, stages, forward=1.0, input_gradient=1.0, weight_gradient=1.0, communication=0.0):
        """Of `stages` equal stages."""
        return cls([StageCosts(forward, input_gradient, weight_gradient)] * stages, [communication] * max(stages - 1, 0) if communication else ())

    @property
    def stages(self):
        """A `StageCosts` each."""
        return [StageCosts(*values) for values in self._handle.stages()]

    @property
    def communication(self):
        """Of a message on each edge."""
        return list(self._handle.communication())

    @property
    def sizes(self):
        """Of the micro-batches."""
        return list(self._handle.sizes())

    def __repr__(self):
        return f"PipelineCosts({self.stages}, communication={self.communication}, sizes={self.sizes})"


@dataclass(frozen=True)
class ScheduleFault:
    """What is wrong with a schedule: "duplicate", "missing", "order", "deadlock", ...; the rank and the position in its list, -1 where it is nobody's.

    >>> fault, = ts.Schedule.from_table([["0F0"], ["1F0", "1B0"]], placement=[0, 1], micro_batches=1).faults()
    >>> fault.kind, fault.rank, fault.why
    ('missing', 0, 'stage 0 never runs micro-batch 0 backward (B, or I and W)')
    """

    kind: str
    rank: int
    position: int
    action: str
    why: str
    text: str

    def __str__(self):
        return self.text


class Timeline:
    """When each action of a schedule runs: simulated (`Schedule.simulate`) or as it was (`Pipeline.timeline`). A notebook draws it; `print` draws letters.

    >>> timeline = ts.Schedule("1f1b", ranks=2, micro_batches=2).simulate()
    >>> timeline.makespan, timeline.work, timeline.busy, timeline.peak
    (9.0, 6.0, [6.0, 6.0], [2.0, 1.0])
    >>> print(timeline.text())
    rank 0: Ff..BB.bb
    rank 1: .FBBfbb..
    >>> f"{timeline.bubble:.2f}", timeline.spans[0][0], timeline.svg()[:4]
    ('0.33', (0.0, 1.0), '<svg')
    """

    def __init__(self, handle):
        self._handle = handle

    @property
    def makespan(self):
        """When the last action ends; the step begins at 0."""
        return self._handle.makespan()

    @property
    def busy(self):
        """Time of each rank's compute."""
        return list(self._handle.busy())

    @property
    def peak(self):
        """The most that each rank holds at once, in the unit of `StageCosts.activation`."""
        return list(self._handle.peak())

    @property
    def work(self):
        """The busiest rank's compute: the makespan without any bubble."""
        return self._handle.work()

    @property
    def bubble(self):
        """The share of all ranks' time in which they do not compute."""
        return self._handle.bubble()

    @property
    def spans(self):
        """(start, end) of each action of each rank, as in `Schedule.actions`."""
        return [list(row) for row in self._handle.spans()]

    def text(self, unit=1.0, columns=400):
        """A line for each rank, a letter for each `unit` of time: F, I, W, B (small ones for every second micro-batch), a point where it waits."""
        return self._handle.text(float(unit), columns)

    def svg(self):
        """The same to scale, as an SVG picture. Raises `InvalidArgument` for more than 200,000 actions."""
        return self._handle.svg()

    def __str__(self):
        unit = max(1.0, self.makespan / 200) if self.makespan >= 1 else self.makespan / 100 or 1.0
        return f"{self.makespan:.6g} units, of which ranks wait {100 * self.bubble:.1f} %\n{self.text(unit)}".rstrip()

    def _repr_svg_(self):
        return _drawn(self.svg)


def _drawn(draw):
    """None where a picture cannot be: the notebook then shows the text."""
    try:
        return draw()
    except Error:
        return None


def loop_placement(ranks, chunks=1):
    """The rank of each stage: stage s on rank s mod `ranks`, `chunks` stages on each. Raises InvalidArgument for numbers below 1.

    >>> ts.loop_placement(3, chunks=2)
    [0, 1, 2, 0, 1, 2]
    """
    return list(ops.loop_placement(ranks, chunks))


def v_placement(ranks, chunks=2):
    """There and back: 0, 1, ..., p - 1, p - 1, ..., 1, 0 for two chunks, and so on in turn. Raises InvalidArgument for numbers below 1.

    >>> ts.v_placement(3)
    [0, 1, 2, 2, 1, 0]
    """
    return list(ops.v_placement(ranks, chunks))


def makespan_bound(placement, micro_batches, costs):
    """A time that no schedule of this placement can beat, whatever its order and memory. Raises InvalidArgument for costs that are negative or of other stages.

    >>> ts.makespan_bound(ts.loop_placement(4), 8, ts.PipelineCosts.uniform(4))  # 1F1B takes 33
    27.0
    """
    return ops.makespan_bound(list(placement), micro_batches, costs._handle)[0]


def _handle_of(costs):
    return None if costs is None else costs._handle


class Schedule:
    """What each rank of a pipeline does, in order: plain data, the same on all ranks, that prints, compares, and is drawn in a notebook.

    >>> schedule = ts.Schedule("1f1b", ranks=2, micro_batches=2)  # alone in a cell of a notebook: a picture
    >>> schedule.check()  # raises ScheduleError, every fault named
    >>> print(schedule)
    1F1B: 2 stages on 2 ranks, 2 micro-batches
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1
    >>> schedule.name, schedule.ranks, schedule.stages, schedule.micro_batches, schedule.placement, schedule.stages_of(1)
    ('1F1B', 2, 2, 2, [0, 1], [1])
    >>> schedule.simulate(ts.PipelineCosts.uniform(2)).makespan, schedule.peak_memory()
    (9.0, [2.0, 1.0])
    >>> table = ts.Schedule.from_table([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]], placement=[0, 1], micro_batches=2)
    >>> table.actions == schedule.actions, table.faults(memory_limit=[1])[0].kind, ts.Schedule.from_csv(schedule.csv()) == schedule
    (True, 'memory', True)
    >>> print(schedule.lowered())
    1F1B: 2 stages on 2 ranks, 2 micro-batches
    rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    rank 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1
    >>> split = ts.Schedule("zero_bubble_h1", 2, 2)
    >>> split.join_backward([True, True]).actions[1], split.merge_backward(ts.PipelineCosts.uniform(2)).actions[1], split.forward_only().actions[1]
    (['1F0', '1B0', '1F1', '1B1'], ['1F0', '1I0', '1F1', '1I1', '1W0', '1W1'], ['1F0', '1F1'])

    `name`: "gpipe", "1f1b", "interleaved" (`chunks` stages on each rank, default 2), "zero_bubble_h1", "zero_bubble_v" (two stages on each rank). Any number
    of micro-batches. Schedules hold compute alone; `Pipeline` adds messages, gathers and reductions, and `lowered` shows them. Raises `InvalidArgument` for
    an unknown name and for numbers below 1.
    """

    def __init__(self, name, ranks, micro_batches, *, chunks=None):
        self._handle = ops.schedule_named(name, ranks, chunks, micro_batches)

    @classmethod
    def _of(cls, handle):
        schedule = cls.__new__(cls)
        schedule._handle = handle
        return schedule

    @classmethod
    def gpipe(cls, placement, micro_batches):
        """All forwards, then all backwards, on any placement: `placement[stage]` is a rank.

        >>> ts.Schedule.gpipe([0, 0, 1], micro_batches=1).actions
        [['0F0', '1F0', '1B0', '0B0'], ['2F0', '2B0']]
        """
        return cls._of(ops.schedule_gpipe([index(r) for r in placement], micro_batches))

    @classmethod
    def for_costs(cls, placement, micro_batches, costs, *, memory_limit=(), split_backward=True, target=1.0, tries=1000, improvements=1000):
        """The shortest schedule found for measured costs, of those that keep to `memory_limit` (of each rank, or one for all; in the unit of activations).

        >>> costs = ts.PipelineCosts.uniform(8, 1.0, 1.5, 0.7)
        >>> made = ts.Schedule.for_costs(ts.v_placement(4), 16, costs, memory_limit=[10])
        >>> made.simulate(costs).makespan < 1.01 * ts.makespan_bound(made.placement, 16, costs)
        True

        Never longer than the named ones that fit. Where ranks have measured other costs, one makes it and the others get its `csv()`. Raises
        `InvalidArgument` for a limit that does not hold one micro-batch.
        """
        limits = [float(n) for n in memory_limit]
        return cls._of(ops.list_schedule([index(r) for r in placement], micro_batches, costs._handle, limits, split_backward, float(target), tries, improvements))

    @classmethod
    def from_table(cls, rows, placement, micro_batches):
        """Of actions, a row for each rank: lists of texts such as "2F0", "1SEND_F3", or one text as torch.distributed.pipelining writes it; empty cells are
        bubbles. Raises `ScheduleSyntaxError` with line and column; `check` says whether the schedule is right."""
        text = rows if isinstance(rows, str) else "".join(",".join(map(str, row)) + "\n" for row in rows)
        return cls._of(ops.schedule_from_table(text, [index(r) for r in placement], micro_batches))

    @classmethod
    def from_csv(cls, text):
        """Of what `csv` writes. Raises `ScheduleSyntaxError` with line and column."""
        return cls._of(ops.schedule_from_csv(text))

    def csv(self):
        """Name, micro-batches, placement and a line of actions for each rank: the same text as C++ writes."""
        return self._handle.csv()

    @property
    def name(self):
        """For people: titles and messages."""
        return self._handle.name()

    @property
    def placement(self):
        """The rank of each stage."""
        return [*self._handle.placement()]

    @property
    def micro_batches(self):
        """Of a step, at most."""
        return self._handle.micro_batches()

    @property
    def ranks(self):
        """How many."""
        return self._handle.ranks()

    @property
    def stages(self):
        """How many."""
        return len(self.placement)

    @property
    def actions(self):
        """Of each rank, in order: "2F0" runs micro-batch 0 forward through stage 2."""
        return [[*row] for row in self._handle.actions()]

    def stages_of(self, rank):
        """The numbers of a rank's stages, ascending."""
        return [*self._handle.stages_of(rank)]

    def faults(self, *, backward=True, sends="rendezvous", memory_limit=(), costs=None):
        """Every fault (`ScheduleFault`), none for a valid schedule. `backward`: False for forwards alone. `sends`: "buffered" where sends never wait."""
        return [ScheduleFault(*fault) for fault in self._handle.faults(backward, sends, [float(n) for n in memory_limit], _handle_of(costs))]

    def check(self, *, backward=True, sends="rendezvous", memory_limit=(), costs=None):
        """Raises `ScheduleError` with what `faults` finds."""
        self._handle.check(backward, sends, [float(n) for n in memory_limit], _handle_of(costs))

    def simulate(self, costs=None):
        """The `Timeline`, each action as soon as its value is there; without costs all actions take 1. Raises `ScheduleError` for a schedule that is wrong."""
        return Timeline(self._handle.simulate((costs or PipelineCosts.uniform(self.stages))._handle))

    def peak_memory(self, costs=None):
        """The most that each rank holds at once; without costs in activations of a stage."""
        return [*self._handle.peak_memory((costs or PipelineCosts.uniform(self.stages))._handle)]

    def lowered(self, *, sharded=(), gathered_at_once=0, reduced=(), costs=None):
        """With its messages; gathers of the stages that are `sharded` and reductions of those that are `reduced`, a bool for each stage."""
        return Schedule._of(self._handle.lowered([bool(s) for s in sharded], gathered_at_once, [bool(r) for r in reduced], _handle_of(costs)))

    def join_backward(self, whole):
        """I and W of the stages that are `whole`, a bool for each, become B."""
        return Schedule._of(self._handle.join_backward([bool(w) for w in whole]))

    def merge_backward(self, costs):
        """I and W that are neighbours become B where no rank waits for the gradient."""
        return Schedule._of(self._handle.merge_backward(costs._handle))

    def forward_only(self):
        """The forwards alone."""
        return Schedule._of(self._handle.forward_only())

    def __eq__(self, other):
        return isinstance(other, Schedule) and self._handle.same(other._handle)

    def __hash__(self):
        return hash((self.name, self.micro_batches, tuple(self.placement)))

    def __str__(self):
        return self._handle.text().rstrip()

    def __repr__(self):
        return f"Schedule({self.name!r}, {self.stages} stages on {self.ranks} ranks, {self.micro_batches} micro-batches)"

    def _repr_svg_(self):
        return _drawn(lambda: self.simulate().svg())

"""Pipelines: stages of a model on several ranks, run by a schedule."""

import contextlib
from dataclasses import dataclass
from operator import index
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tessera._callbacks import Callbacks, address, with_cause
from tessera._checkpoint import _agree
from tessera._errors import InvalidArgument
from tessera._groups import group
from tessera._library import classes, ops
from tessera._mesh import handle_of
from tessera._modules import module_tree
from tessera._parallel import DistributedDataParallel, clip_gradients
from tessera._placement import Replicate, to_text
from tessera._schedules import PipelineCosts, Schedule, Timeline
from tessera._split import Split


def stage_mesh(mesh, axis):
    """`mesh` without `axis`: the ranks that share this rank's stages, on which tensor-parallel and fully sharded stages lie. Raises `InvalidArgument` where
    the mesh has no other axis.

    >>> ts.stage_mesh(ts.Mesh({"pipe": 1, "data": -1}), "pipe").axes
    {'data': 1}
    """
    from tessera._api import Mesh

    return Mesh._of(ops.stage_mesh(handle_of(mesh), axis))


@dataclass(frozen=True)
class PipelineResult:
    """Of a step: `loss`, the mean over all samples (NaN on ranks that do not get it); `weight`, the sum of all weights; on the rank of the last stage, where
    they are kept: `outputs`, nested as the stage returns them and joined along dim 0 (None where shapes do not allow it), and those of each micro-batch.

    >>> pipeline = ts.Pipeline([net], ts.Schedule("gpipe", 1, 2), ts.Mesh({"pipe": 1}), "pipe", nn.functional.mse_loss)
    >>> result = pipeline.evaluate(x, y)
    >>> result.outputs.shape, len(result.micro_batches), result.weight
    (torch.Size([4, 1]), 2, 4.0)
    """

    loss: float
    weight: float
    outputs: Any = None
    micro_batches: tuple = ()


def _bare(stage):
    return stage.module if isinstance(stage, (DistributedDataParallel, nn.parallel.DistributedDataParallel)) else stage


class _Held(nn.Module):
    """The stages of a rank as one module, whose names are those of the complete model: of a tied parameter the first that the model has for it."""

    def __init__(self, stages, tied):
        super().__init__()
        self.__dict__["_stages"] = list(stages.values())
        for name, tensors in (tied or {}).items():
            if tensors:
                path, _, own = name.rpartition(".")
                _container(self, path).register_parameter(own, tensors[0])
        for number, stage in stages.items():
            if tied is None:
                self.add_module(str(number), _bare(stage))
            else:
                _merge(self, _bare(stage))

    def train(self, mode=True):
        for stage in self._stages:
            stage.train(mode)
        return super().train(mode)


def _container(root, path):
    for name in path.split(".") if path else ():
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root._modules[name]
    return root


def _merge(into, module):
    """Adds what `module` holds. Two stages may each have a container of the same name, with other members."""
    for name, parameter in module._parameters.items():
        into.register_parameter(name, parameter)
    for name, buffer in module._buffers.items():
        into.register_buffer(name, buffer, persistent=name not in module._non_persistent_buffers_set)
    for name, child in module._modules.items():
        if type(child) is nn.Module:
            _merge(_container(into, name), child)
        else:
            into.add_module(name, child)


class _Calls:
    """What the library asks of Python on this rank: outputs of a stage, and the loss of what the last one has just returned."""

    def __init__(self, stages, last, loss, scope):
        self.stages, self.last, self.loss, self.scope = stages, last, loss, scope or contextlib.nullcontext
        self.output = self.nesting = self.targets = None

    def __call__(self, numbers):
        (is_loss, number), given = numbers, ops.taken()
        with self.scope():
            if is_loss:
                output, self.output = self.output, None
                loss = self.loss(output, pytree.tree_unflatten(given, self.targets))
                if not isinstance(loss, torch.Tensor):
                    raise InvalidArgument(f"the loss of a pipeline returned a {type(loss).__name__}, and not the mean over the micro-batch, a tensor without dims")
                return [loss]
            made = self.stages[number](*given)
        if number == self.last:
            self.output = made
            leaves, self.nesting = pytree.tree_flatten(made)
        else:
            leaves = [made] if isinstance(made, torch.Tensor) else made
        if not isinstance(leaves, (list, tuple)) or not all(isinstance(t, torch.Tensor) for t in leaves):
            what = [type(t).__name__ for t in leaves] if isinstance(leaves, (list, tuple)) else type(made).__name__
            raise InvalidArgument(f"stage {number} returns {what}; a stage returns a tensor or a tuple of tensors, and the last one any nesting of them")
        return list(leaves)

    def nested(self, tensors):
        return None if any(t is None for t in tensors) else pytree.tree_unflatten(list(tensors), self.nesting)


def _chosen(what, which, stages):
    """The numbers of the stages that are meant."""
    numbers = set(range(stages))
    chosen = (numbers if which else set()) if isinstance(which, bool) else set(which)
    if chosen - numbers:
        raise InvalidArgument(f"{what} names {sorted(chosen - numbers, key=repr)}, and the schedule has stages 0 to {stages - 1}")
    return chosen


def _lists(given, of):
    """A list of tensors for each micro-batch, and how they are nested; None where `given` is the whole batch."""
    if not isinstance(given, list):
        return None, None
    leaves = [pytree.tree_flatten(one) for one in given]
    if any(spec != leaves[0][1] for _, spec in leaves):
        raise InvalidArgument(f"the {of} of a pipeline's micro-batches are nested alike; these are {[str(spec) for _, spec in leaves]}")
    return [_tensors(one, of) for one, _ in leaves], leaves[0][1] if leaves else None


def _tensors(leaves, of):
    wrong = [type(t).__name__ for t in leaves if not isinstance(t, torch.Tensor)]
    if wrong:
        raise InvalidArgument(f"the {of} of a pipeline are tensors, and not {wrong}")
    return list(leaves)


class Pipeline:
    """Runs the stages of a model on the ranks along `axis` of `mesh`, by a schedule. Loss and gradients are those of one process with all of the batch.

    >>> parts = ts.split(net, at=["1"])  # or modules of your own, those of this rank
    >>> schedule = ts.Schedule.gpipe([0, 0], micro_batches=2)  # on four ranks: ts.Schedule("1f1b", 4, 8)
    >>> pipeline = ts.Pipeline(parts, schedule, ts.Mesh({"pipe": -1}), "pipe", nn.functional.mse_loss)
    >>> costs = pipeline.measure(x, y, repeats=1)  # in seconds: what ts.Schedule.for_costs takes
    >>> optimizer = torch.optim.Adam(pipeline.module.parameters(), 1e-3)
    >>> for _ in range(3):
    ...     optimizer.zero_grad()
    ...     loss = pipeline.step(x, y).loss  # the mean over all rows, on every rank
    ...     norm = pipeline.clip_gradients(1.0)
    ...     optimizer.step()
    >>> pipeline.steps, pipeline.timeline().makespan > 0, pipeline.repeated_parameters(), pipeline.schedule.actions[0][:3]
    (3, True, [], ['0F0', '0F1', '1F0'])
    >>> pipeline.step([x[:1], x[1:]], [y[:1], y[1:]]).weight  # micro-batches of any sizes
    4.0
    >>> held = pipeline.module.eval()  # this rank's stages, by the names of the complete model
    >>> pipeline.evaluate(x).outputs.shape
    torch.Size([4, 1])

    `stages`: a `Split`, of which each rank takes those that the schedule places on it, or a list of this rank's own modules in ascending order. A stage is
    called with the tensors that the stage before returns (a tensor, or a tuple of tensors), the first one with the inputs of a micro-batch; then with one for
    each skip connection that ends there; it returns one more for each that begins there. Beside data parallelism each stage is wrapped by
    `DistributedDataParallel` over the mesh's other axes, or sharded on `stage_mesh(mesh, axis)`. `loss(output, target)` gives the mean over a micro-batch.

    `skips`: pairs of stages, `tied`: parameters of this rank by a name that other ranks give them too, whose values are made those of the first and whose
    gradients are summed; both beside those of a `Split`. `sample_axes`: axes along which ranks have other samples; default all but `axis`. `recompute`: True,
    or the numbers of stages of which nothing but the inputs is kept until backward. `gather`: True, or those that `fully_shard` has sharded and that are
    gathered once a step, `gathered_at_once` of them at a time (0: all). `keep_outputs`: in training too. `loss_everywhere`: False for the loss on the last
    stage's ranks alone. `seed`: random numbers depend on it, step, stage and micro-batch alone. `dynamic_shapes`: stages may return other shapes for inputs of
    equal ones. `forward_scope`: makes a context in which forwards run, and no backward (`lambda: torch.autocast("cpu")`).

    Collective over the mesh. Raises `ScheduleError` for a schedule that is not valid, `InvalidArgument` where stages, skips or options do not fit it, on every
    rank; `MismatchError` where ranks differ.
    """

    def __init__(
        self,
        stages,
        schedule,
        mesh,
        axis,
        loss=None,
        *,
        skips=(),
        tied=None,
        sample_axes=None,
        recompute=False,
        gather=False,
        gathered_at_once=0,
        keep_outputs=False,
        loss_everywhere=True,
        seed=None,
        dynamic_shapes=False,
        forward_scope=None,
    ):
        over = handle_of(mesh)
        self._mesh, self._axis = mesh, axis
        options = (None if sample_axes is None else list(sample_axes), gathered_at_once, keep_outputs, loss_everywhere, seed, dynamic_shapes)
        made = []

        def prepare():
            here = mesh.group(axis).rank
            mine = self._mine(stages, schedule, here)
            is_split = isinstance(stages, Split)
            handle = classes.PipelineOptions([*(stages.skips if is_split else []), *skips], *options)
            shared = {name: [t for s, t in by_stage.items() if s in mine] for name, by_stage in stages.tied.items()} if is_split else None
            for name, tensors in {**(shared or {}), **(tied or {})}.items():
                if tensors:
                    handle.tie(name, list(tensors))
            again, gathered = _chosen("recompute", recompute, schedule.stages), _chosen("gather", gather, schedule.stages)
            trees = [(s, module_tree(stage), s in again, s in gathered) for s, stage in mine.items()]
            made.extend([mine, handle, trees, _Held(mine, shared)])

        _agree(mesh.group(), "Pipeline", prepare)
        mine, handle, trees, self.module = made
        self._parameters = {s: list(stage.parameters()) for s, stage in mine.items()}
        self._stages, self._callbacks = mine, Callbacks()
        self._calls = _Calls(mine, schedule.stages - 1, loss, forward_scope)
        self._function = self._callbacks.calling(self._calls)
        self._handle = classes.Pipeline(over, axis, schedule._handle, trees, address(self._function), loss is not None, handle)

    @staticmethod
    def _mine(stages, schedule, here):
        if not isinstance(schedule, Schedule):
            raise InvalidArgument(f"a pipeline's schedule is a ts.Schedule, not {type(schedule).__name__}")
        numbers = [s for s, rank in enumerate(schedule.placement) if rank == here]
        wanted = schedule.stages if isinstance(stages, Split) else len(numbers)
        if len(stages) != wanted:
            raise InvalidArgument(f"{len(stages)} stages are given, and the schedule has {schedule.stages}, of which {numbers} are on this rank")
        mine = {s: stages[s] for s in numbers} if isinstance(stages, Split) else dict(zip(numbers, stages))
        wrong = [type(stage).__name__ for stage in mine.values() if not isinstance(stage, nn.Module)]
        if wrong:
            raise InvalidArgument(f"a pipeline's stages are modules, and not {wrong}")
        return mine

    def _batch(self, inputs, targets, weights, placements):
        """What the library takes. What is wrong with it on this rank goes along, and is raised on all."""
        try:
            return *self._lists(inputs, targets), [float(w) for w in weights], [] if placements is None else to_text(placements), ""
        except Exception as error:
            self._callbacks.by_text[str(error)] = error
            return [], [], [], [] if placements is None else to_text([Replicate()]), str(error) or type(error).__name__

    def _lists(self, inputs, targets):
        for s, stage in self._stages.items():
            now = list(stage.parameters())
            if len(now) != len(self._parameters[s]) or any(p is not q for p, q in zip(now, self._parameters[s])):
                raise InvalidArgument(
                    f"stage {s} has other parameters than when the pipeline was made (load_state_dict(assign=True), or what else replaces them): make it anew"
                )
        if isinstance(inputs, torch.Tensor):
            inputs = (inputs,)
        elif isinstance(inputs, list):
            inputs = [(one,) if isinstance(one, torch.Tensor) else one for one in inputs]
        listed, _ = _lists(inputs, "inputs")
        parts, self._calls.targets = _lists(targets, "targets")
        whole_inputs = _tensors(inputs or (), "inputs") if listed is None else []
        whole_targets = []
        if parts is None and targets is not None:
            whole_targets, self._calls.targets = pytree.tree_flatten(targets)
        split_inputs, split_targets = self._handle.split(whole_inputs, _tensors(whole_targets, "targets"))
        listed = (split_inputs if whole_inputs else []) if listed is None else listed
        return listed, (split_targets if whole_targets else []) if parts is None else parts

    def _called(self, call, *arguments):
        try:
            return with_cause([self._callbacks], call, *arguments)
        finally:
            self._calls.output = None
            self._callbacks.by_text.clear()

    def _run(self, call, *arguments):
        loss, weight, outputs, parts = self._called(call, *arguments)
        nested = self._calls.nested
        return PipelineResult(loss, weight, nested(outputs) if outputs else None, tuple(nested(part) for part in parts if part))

    def step(self, inputs=None, targets=None, *, weights=(), divisor=None, placements=None):
        """One forward and backward of all micro-batches; gradients are added to what the parameters have. Returns a `PipelineResult`.

        `inputs`: a tensor, or a tuple of tensors, whose rows are divided into micro-batches as evenly as that goes; or a list of micro-batches, of any sizes,
        as many as the schedule has or fewer. `targets`: nested in any way, divided alike. Each rank gives what it uses: inputs on the rank of the first stage,
        targets on that of the last; it may give the rest too. `weights`: how many samples the mean of each micro-batch is over, default its rows. `divisor`:
        gradients of the sum of weight * loss divided by it, for several steps that make one gradient. `placements`: the rows are sharded over
        `stage_mesh`, one placement for each of its axes; `sample_axes` leaves these out.

        Collective over the mesh. A stage or loss that raises ends the step on all ranks: there it is a `PipelineError`, whose `__cause__` is what was raised,
        elsewhere a `PeerFailedError` with the same words; where all ranks catch it they go on with the next step, with gradients set to zero (stages
        under `DistributedDataParallel` are wrapped again first, in a pipeline made anew). Raises `InvalidArgument` on every rank
        for a batch that does not fit, `GradientError` where it is not known how gradients come together over the mesh's other axes.
        """
        return self._run(self._handle.step, *self._batch(inputs, targets, weights, placements), divisor)

    def evaluate(self, inputs=None, targets=None, *, weights=(), placements=None):
        """The forwards alone, without gradients; outputs are kept, and there is a loss where there are targets. Collective; arguments and errors as of
        `step`. What differs between training and evaluation inside of modules is set by `pipeline.module.eval()`."""
        return self._run(self._handle.evaluate, *self._batch(inputs, targets, weights, placements))

    def measure(self, inputs=None, targets=None, *, weights=(), placements=None, repeats=3):
        """The `PipelineCosts` of these stages in seconds, the same on every rank: what `Schedule.for_costs` takes. Runs steps, where gradients are zero or
        None, and so they are afterwards. Collective; arguments and errors as of `step`."""
        batch = self._batch(inputs, targets, weights, placements)
        return PipelineCosts._of(self._called(self._handle.measure, *batch, repeats))

    def timeline(self):
        """The `Timeline` of the last step, in seconds, the same on every rank; a notebook draws it. Collective over the pipeline's axis."""
        return Timeline(self._handle.timeline())

    def clip_gradients(self, max_norm=float("inf"), norm_type=2.0):
        """Scales the gradients of all stages to one norm of at most `max_norm`, and returns the norm before that, on every rank. Collective over the mesh."""
        others = [axis for axis in self._mesh.axes if axis != self._axis]
        on = self._mesh.group(*others) if others else group([ops.rank()])
        return clip_gradients(self.module.parameters(), max_norm, norm_type, on, disjoint=self._mesh.group(self._axis), elsewhere=self.repeated_parameters())

    def repeated_parameters(self):
        """The tied parameters of this rank that stand for one that an earlier rank holds: a norm over all stages counts them there."""
        return list(self._handle.repeated_parameters())

    @property
    def schedule(self):
        """What runs: with messages, gathers and reductions."""
        return Schedule._of(self._handle.schedule())

    @property
    def steps(self):
        """Steps made so far, on which random numbers depend if there is a `seed`; to be set after a resume."""
        return self._handle.steps()

    @steps.setter
    def steps(self, steps):
        self._handle.set_steps(index(steps))

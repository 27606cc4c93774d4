"""The training session: what must be right on several ranks in a loop that the user writes."""

import contextlib
import ctypes
from dataclasses import dataclass
from operator import index

import torch
from torch.utils import _pytree as pytree

from tessera._callbacks import as_raised
from tessera._errors import InvalidArgument, MismatchError, NotAvailable
from tessera._groups import Group, made_together, world
from tessera._library import classes, ops
from tessera._mesh import Mesh
from tessera._modules import module_tree
from tessera._parallel import DistributedDataParallel
from tessera._precision import PrecisionPlugin, Served
from tessera._state import from_bytes

_STEP = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)
_PRECISIONS = {None: "", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True)
class StepResult:
    """What a step of a `Session` came to, the same on every rank.

    >>> with ts.Session(net, torch.optim.SGD(net.parameters(), 0.1), measure_norm=True) as session:
    ...     loss = session.micro_batch(lambda: net(x).square().mean(), len(x))
    ...     done = session.step()
    >>> done.weight, done.stepped, done.stop, done.save
    (4.0, True, '', False)

    `loss`: the mean over all samples of the step, of all ranks and micro-batches. `weight`: their number. `norm`: of the gradients before clipping, NaN where
    none was taken. `stepped`: False where the step was left out: a gradient overflowed in float16 on some rank, or was not finite and `non_finite` is "skip".
    `stop`: "SIGTERM", "SIGUSR1" or "requested" where any rank has noted that signal or called `request_stop`, else "". `save`: some rank has called
    `request_save`.
    """

    loss: float
    weight: float
    norm: float
    stepped: bool
    stop: str
    save: bool


class _Steps:
    """Steps the optimizers when the library says so, and keeps what they raise: no exception passes through the library."""

    def __init__(self):
        self.optimizers, self.raised, self.closure, self.micro_batches = [], None, (), None
        self._functions = _STEP(self._keeping(lambda number: self.optimizers[number].step(*self.closure))), _STEP(self._keeping(lambda _: self.micro_batches()))
        self.step, self.evaluate = (ctypes.cast(function, ctypes.c_void_p).value for function in self._functions)

    def _keeping(self, body):
        def call(number):
            try:
                body(number)
                return 0
            except BaseException as error:
                # What an evaluation raised comes through the library and the optimizer as another error.
                self.raised = self.raised or error
                return 1

        return call

    def call(self, function, *arguments, closure=(), micro_batches=None):
        self.raised, self.closure, self.micro_batches = None, closure, micro_batches
        try:
            return as_raised(self, function, *arguments)
        finally:
            self.raised, self.closure, self.micro_batches = None, (), None


def _group_of(ranks):
    if ranks is not None and not isinstance(ranks, (Group, Mesh)):
        raise InvalidArgument(f"the ranks of a session are a Group or a Mesh, not {ranks!r:.60}: ts.group([0, 1])")
    return world() if ranks is None else ranks.group() if isinstance(ranks, Mesh) else ranks


def _require_alike(ranks, told):
    """What decides which calls a step makes."""
    other = next((place for place, text in enumerate(told) if text != told[0]), None)
    if other is not None:
        apart = [f"{a} and {b}" for a, b in zip(told[0].split(", "), told[other].split(", ")) if a != b]
        raise MismatchError(f"a session's options are the same on all ranks: ranks {ranks.ranks[0]} and {ranks.ranks[other]} have {'; '.join(apart)}")


class Session:
    """The parts of a training step for a loop that the user writes: C++'s `Session`, over modules and optimizers of torch's.

    >>> checkpoints = ts.Checkpointer("runs")
    >>> session = ts.Session(net, torch.optim.AdamW(net.parameters(), 1e-2), max_norm=1.0, precision=torch.bfloat16)
    >>> for step in range(session.steps, 1000):
    ...     for k in range(2):                                      # micro-batches of any sizes, on each rank its own
    ...         loss = session.micro_batch(lambda: nn.functional.mse_loss(net(x), y), len(x), last=k == 1)
    ...     done = session.step()                                   # one small all-reduce
    ...     if done.save or step % 100 == 99:
    ...         checkpoints.start_save(f"step-{session.steps}", session.state())
    ...     if done.stop or done.loss < 0.1:                        # SIGTERM on any rank: all leave at the same step
    ...         break
    >>> session.close()

    The gradients of a step are those of the mean over all samples of all ranks and micro-batches, a short micro-batch counting for what it has.
    Nothing is sent before the last micro-batch, but what operators on sharded tensors send.

    `modules`: a module, saved as "net", or a dictionary of modules by name. They stay as they are: plain, in `DistributedDataParallel`, sharded by
    `fully_shard`, `distribute_module` or `tensor_parallel`, in any mixture. What nothing reduces the session makes data-parallel over all ranks: those
    parameters and the plain buffers are broadcast from rank 0, gradients are averaged while backward runs, and buffers are shared after each step. Layers may be
    frozen and unfrozen between steps. With `gradients="averaged"` or "summed" the program does that itself, after the last backward and before `step`.

    `optimizers`: one, or a list, `ShardedOptimizer` too; made after the modules were sharded. `max_norm`, `norm_type`, `by_hand`: as of
    `clip_gradients`; `measure_norm`: the norm is taken even if nothing is clipped. `clip_value`: each element, before the norm. `non_finite`: what a step
    does where that norm is not finite: "error" (`NonFiniteGradient`), "skip" or "step". `precision`: torch.bfloat16 or torch.float16, for autocast; with
    float16 the loss is scaled, by `scaler`: any of `initial`, `growth`, `backoff`, `interval`, `smallest`; or a `PrecisionPlugin` of one's own. `signals`: SIGTERM and SIGUSR1 are noted while
    the session lives. `sharing`: how many ranks compute one plain loss together, as those along an axis of tensor parallelism do; a sharded loss says so itself.

    `group`: the ranks that train together, a `Group` or a `Mesh`; default all. Others have no part in it and are not waited for, so that two halves of a job train
    two models side by side, each with a `Checkpointer(folder, ranks=group.ranks)`. Sharded tensors and wrappers of the modules are of these ranks, too.

    Construction is collective over them, as are `step`, `step_again` and `vote`. Raises MismatchError, on every rank, where ranks have other options; InvalidArgument
    for options out of range, and, when the first loss of a step comes, for a sharded loss or a parameter that other ranks have part in.
    """

    def __init__(
        self,
        modules,
        optimizers=(),
        *,
        max_norm=float("inf"),
        norm_type=2.0,
        clip_value=float("inf"),
        measure_norm=False,
        non_finite="error",
        precision=None,
        scaler=None,
        signals=True,
        gradients="",
        sharing=1,
        by_hand=(),
        group=None,
    ):
        ranks = _group_of(group)
        self._ranks, self._steps, self._own = ranks.ranks, _Steps(), None

        def prepared():
            own = isinstance(precision, PrecisionPlugin)
            if not own and precision not in _PRECISIONS:
                raise InvalidArgument(f"precision is torch.bfloat16, torch.float16, a PrecisionPlugin or None, not {precision!r:.60}: convert the modules for another one")
            if scaler and precision is not torch.float16:
                raise InvalidArgument("a scaler is of precision=torch.float16: no other one scales the loss by it, and a PrecisionPlugin has its own loss_scale()")
            given = {"net": modules} if isinstance(modules, torch.nn.Module) else dict(modules)
            if not all(type(name) is str and isinstance(m, torch.nn.Module) for name, m in given.items()):
                raise InvalidArgument(f"a session is of a module, or of a dictionary of modules by name, and not of {modules!r:.60}")
            self._given = given  # wrappers reduce as long as somebody has them
            self._modules = {name: m.module if isinstance(m, DistributedDataParallel) else m for name, m in given.items()}
            first = next((p for m in self._modules.values() for p in m.parameters()), torch.empty(0))
            self._device = first.device
            numbers = {name: float(n) for name, n in {"max_norm": max_norm, "norm_type": norm_type, "clip_value": clip_value, **(scaler or {})}.items()}
            if own:
                self._own = Served(precision, self, self._modules)
            chosen = (self._own.name, self._own.function, self._own.hooks) if own else (_PRECISIONS[precision], 0, 0)
            alike = {"precision": chosen[0], "gradients": gradients, "sharing": index(sharing), **numbers, "measure_norm": bool(measure_norm)}
            alike |= {"non_finite": non_finite, "by_hand": len(by_hand), **({"hooks": chosen[2]} if own else {})}
            arguments = (
                ranks._handle,
                list(self._modules),
                [module_tree(m, every_name=False) for m in self._modules.values()],
                str(first.device),
                gradients,
                index(sharing),
                [p for p, _ in by_hand],
                [g._handle for _, g in by_hand],
                *chosen,
                list(numbers.items()),
                bool(measure_norm),
                non_finite,
                bool(signals),
            )
            return arguments, ", ".join(f"{name}={value!r}" for name, value in alike.items())

        try:
            (arguments, _), told = made_together(ranks, "session", prepared, lambda made: made[1])
            _require_alike(ranks, told)
            self._handle = self._call(classes.Session, *arguments)
            for optimizer in [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers:
                self.add(optimizer)
        except BaseException:
            self._release()
            raise

    def _call(self, function, *arguments):
        """Of the library, which may ask a precision of the program's own."""
        return self._own.call(function, *arguments) if self._own else function(*arguments)

    def _release(self):
        if self._own:
            self._own.release()

    def add(self, optimizer):
        """One more optimizer. Not collective, but alike on all ranks.

        >>> session = ts.Session({"body": net[0], "head": net[2]}, torch.optim.SGD(net[0].parameters(), 0.1))
        >>> session.add(torch.optim.Adam(net[2].parameters(), 1e-3))
        >>> session.close()
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InvalidArgument(f"a session steps optimizers of torch.optim, not {type(optimizer).__name__}")
        if any(optimizer is one for one in self._steps.optimizers):
            raise InvalidArgument("a session was given an optimizer that it has already, which each step would step twice")
        self._steps.optimizers.append(optimizer)
        self._take(self._handle.add(self._steps.step))

    def _take(self, number):
        groups = self._steps.optimizers[number].param_groups
        self._handle.take(number, list(dict.fromkeys(p for group in groups for p in group["params"])))

    def _ready(self, what):
        if self._steps.micro_batches:
            raise InvalidArgument(f"{what} within an evaluation of step_again(), which makes the micro-batches of one step and no more")
        for number in range(len(self._steps.optimizers)):
            self._take(number)

    def micro_batch(self, forward, weight, last=True):
        """Forward and backward of one micro-batch; returns its loss, detached.

        `forward()` gives the mean loss over its samples, without dims. `weight`: how many samples that is (or tokens, cells, area), 0 on a rank that has none,
        whose loss may be NaN; of a sharded loss all samples of its mesh, the same number on its ranks. `last`: of the step. Raises what `forward` does.

        >>> with ts.Session(net, torch.optim.SGD(net.parameters(), 0.1)) as session:
        ...     loss = session.micro_batch(lambda: nn.functional.mse_loss(net(x), y), len(x))
        """
        self._handle.before_forward(bool(last))
        with self.autocast():
            loss = forward()
        if not isinstance(loss, torch.Tensor):
            raise InvalidArgument(f"forward() of a micro-batch returned a {type(loss).__name__}, and not the loss, a tensor without dims")
        self.backward(loss, weight, last)
        return loss.detach()

    def convert(self, batch):
        """A batch, of any nesting, with its tensors as the precision converts them (`PrecisionPlugin.convert_input`); without such a precision as it is.

        >>> with ts.Session(net) as session:
        ...     session.convert({"x": x})["x"] is x
        True
        """
        return pytree.tree_map_only(torch.Tensor, self._own.convert, batch) if self._own else batch

    @contextlib.contextmanager
    def autocast(self):
        """`with session.autocast():` for a forward outside of `micro_batch`: what the precision puts around one; without a precision nothing.

        >>> session = ts.Session(net, precision=torch.bfloat16)
        >>> with session.autocast():
        ...     net(x).dtype
        torch.bfloat16
        >>> session.close()
        """
        if self._own:
            with self._own.scope(self._device):
                yield
            return
        self._handle.enter()
        try:
            yield
        finally:
            self._handle.leave()

    def backward(self, loss, weight, last=True):
        """The second half of `micro_batch`, for a loss that the program has computed.

        >>> session = ts.Session(net, torch.optim.SGD(net.parameters(), 0.1))
        >>> session.backward(net(x).square().mean(), len(x), last=False)
        >>> session.backward(net(x[:1]).square().mean(), 1)
        >>> session.step().weight
        5.0
        >>> session.close()
        """
        self._call(self._handle.backward, loss, float(weight), bool(last))

    def step(self, *optimizers):
        """Brings the gradients to the mean, clips them, steps these optimizers (none named: all), clears all gradients; returns the `StepResult`. Collective.

        A `register_step_pre_hook` of an optimizer sees the final gradients. Raises InvalidArgument on every rank where the weights of the step are negative, not
        finite, or zero on all ranks; `GradientError` where it is not known how the gradients of a parameter come together; `NonFiniteGradient` as
        `non_finite` says; what an optimizer raises. The gradients are cleared then. `NotAvailable` for LBFGS: `step_again` steps it.

        >>> body, head = (torch.optim.SGD(m.parameters(), 0.1) for m in (net[0], net[2]))
        >>> with ts.Session(net, [body, head]) as session:
        ...     session.backward(net(x).square().mean(), len(x))
        ...     session.step(head).stepped
        True
        """
        known = self._steps.optimizers
        which = [number for number, one in enumerate(known) for optimizer in optimizers if optimizer is one]
        if len(which) != len(optimizers):
            raise InvalidArgument("a step of an optimizer that the session does not have: add() it first")
        if len(set(which)) != len(which):
            raise InvalidArgument("step() was given an optimizer twice, which it would step twice")
        if any(isinstance(one, torch.optim.LBFGS) for one in optimizers or known):
            raise NotAvailable("LBFGS calls the loss again: step it by step_again(evaluate, optimizer), and the others by step(optimizer)")
        self._ready("step()")
        return StepResult(*self._steps.call(self._call, self._handle.step, which))

    def step_again(self, evaluate, optimizer=None):
        """One step of an optimizer that calls the loss again, as LBFGS does; `optimizer` may be left out where there is one. Collective.

        `evaluate()` makes the micro-batches of the step, always the same ones, and is called as often as the optimizer asks, with gradients cleared. Each time the
        gradients are brought to the mean and clipped, by one all-reduce, so that all ranks see the same loss and search alike. Returns the `StepResult` of
        the first evaluation, with the votes of all.

        >>> search = torch.optim.LBFGS(net.parameters(), line_search_fn="strong_wolfe")
        >>> with ts.Session(net, search) as session:
        ...     evaluate = lambda: session.micro_batch(lambda: nn.functional.mse_loss(net(x), y), len(x))
        ...     losses = [session.step_again(evaluate).loss for _ in range(2)]
        >>> losses[1] < losses[0]
        True

        Where an evaluation raises, or is not finite and `non_finite` is "skip", the parameters are what they were before and the optimizer's history begins
        anew. Raises what `evaluate` and `step` raise; NotAvailable for float16, whose overflows a search cannot leave out, and with `by_hand`.
        """
        known = self._steps.optimizers
        which = [number for number, one in enumerate(known) if one is optimizer or (optimizer is None and len(known) == 1)]
        if len(which) != 1:
            raise InvalidArgument(f"step_again() steps one optimizer of the session's {len(known)}: name it")
        self._ready("step_again()")
        number, begun, done = which[0], [], None

        def closure():
            begun.append(True)
            return self._handle.evaluate(number)

        try:
            done = StepResult(*self._steps.call(self._call, self._handle.step_again, self._steps.evaluate, number, closure=(closure,), micro_batches=evaluate))
        finally:
            if begun and (done is None or not done.stepped):
                known[number].state.clear()
        return done

    def request_save(self):
        """This rank wants a checkpoint: the next `step` tells all. Not collective.

        >>> session = ts.Session(net, torch.optim.SGD(net.parameters(), 0.1))
        >>> session.request_save()
        >>> session.backward(net(x).sum(), len(x))
        >>> session.step().save
        True
        >>> session.close()
        """
        self._handle.request_save()

    def request_stop(self):
        """This rank wants to stop: all learn of it at the next `step`. Not collective.

        >>> with ts.Session(net, signals=False) as session:
        ...     session.request_stop()
        ...     session.wanted, session.vote()
        ('requested', 'requested')
        """
        self._handle.request_stop()

    @property
    def wanted(self):
        """What this rank wants, its signals included: "" or as `StepResult.stop`. Not agreed on.

        >>> import signal
        >>> with ts.Session(net) as session:
        ...     signal.raise_signal(signal.SIGUSR1)
        ...     session.wanted
        'SIGUSR1'
        """
        return self._handle.wanted()

    def vote(self):
        """`StepResult.stop` right now, where no step is near, as in an evaluation. Collective.

        >>> with ts.Session(net) as session:
        ...     session.vote()
        ''
        """
        return self._handle.vote()

    @property
    def steps(self):
        """Optimizer steps so far, those left out included.

        >>> with ts.Session(net) as session:
        ...     session.steps
        0
        """
        return self._handle.steps()

    @property
    def loss_scale(self):
        """The factor on losses in float16, or that of a precision of the program's own; else 1.

        >>> with ts.Session(net, precision=torch.float16, scaler={"initial": 1024}) as session:
        ...     session.loss_scale
        1024.0
        """
        return self._call(self._handle.loss_scale)

    def state(self):
        """The state for a `Checkpointer`, to be saved and loaded: modules, optimizers, and the session itself, by the names that C++'s Session gives them.

        >>> checkpoints = ts.Checkpointer("runs")
        >>> session = ts.Session(net, torch.optim.SGD(net.parameters(), 0.1))
        >>> if name := checkpoints.to_resume():
        ...     values = checkpoints.load(name, session.state())    # saved by any number of ranks
        >>> list(session.state())
        ['net', 'optimizer.0', 'train']
        >>> session.close()

        A program with a state of its own gives the session as one of its entries: `{"net": net, "adam": adam, "session": session}`. What it keeps: steps, the scale
        of float16, torch's random numbers of each rank and those of sharded tensors.
        """
        optimizers = {f"optimizer.{number}": one for number, one in enumerate(self._steps.optimizers)}
        return {**self._modules, **optimizers, "train": self}

    def close(self):
        """Ends the session: signals go where they went before, and what it made data-parallel is so no longer. `with` does so, too.

        >>> session = ts.Session(net, torch.optim.SGD(net.parameters(), 0.1))
        >>> session.close()
        """
        self._handle.close()
        self._release()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class SessionPart:
    """The session's own numbers in a checkpoint, under the names of C++."""

    kind = "session"

    def __init__(self, key, thing):
        self.key, self.thing = key, thing

    def save(self, out):
        out.kind(self.key, self.kind)
        self.thing._handle.add_counters(out.handle, f"{self.key}.")
        if self.thing._own:
            self.thing._own.save(out, f"{self.key}.")

    def plan(self, saved):
        prefix = f"{self.key}."
        self._there = f"{prefix}steps" in saved.values
        if not self._there:
            saved.lacks(self.key)
        self._state, self._ranks = classes.CheckpointState(), saved.saved_ranks
        self._restore = self.thing._own.plan(saved, prefix) if self.thing._own else lambda: None
        for put, values in ((self._state.set, saved.values), (self._state.set_of_rank, saved.values_of_rank)):
            for name, data in values.items():
                if name.startswith(prefix):
                    put(name, from_bytes(data))

    def commit(self):
        if self._there:
            self.thing._handle.restore_counters(self._state, self._ranks, f"{self.key}.")
            self._restore()
        return self.thing

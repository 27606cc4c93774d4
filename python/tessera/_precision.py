"""Precisions of one's own: what a session computes in, how its loss is scaled, how its optimizers step."""

import contextlib
import math
import numbers
import threading
import weakref

import torch

from tessera._callbacks import Callbacks, address, as_raised
from tessera._errors import InvalidArgument
from tessera._library import ops
from tessera._values import decode, encode

# Those that the library asks for, in its order (bindings/precision.h).
_HOOKS = ("convert_modules", "loss_scale", "skips_overflow", "update", "clip", "step")
_OF_SESSION = {"steps", "unit", "random", "sharded_seed", "sharded_stream"}
_TAKING = threading.Lock()


class PrecisionPlugin:
    """A precision of one's own, `Session(precision=Mine())`: C++'s `PrecisionPlugin`. What a class does not override is that of no precision.

    >>> class Rounded(ts.PrecisionPlugin):                    # parameters have the values of bfloat16
    ...     def name(self):
    ...         return "rounded"
    ...     def step(self, optimizer, closure=None):
    ...         super().step(optimizer, closure)
    ...         for group in optimizer.param_groups:
    ...             for p in group["params"]:
    ...                 p.copy_(p.bfloat16())
    >>> with ts.Session(net, torch.optim.SGD(net.parameters(), 0.1), precision=Rounded()) as session:
    ...     session.backward(net(x).square().mean(), len(x))
    ...     done = session.step()
    >>> all(torch.equal(p, p.bfloat16().float()) for p in net.parameters())
    True

    The functions are called in the order of a run, without gradients being recorded but in forward. An object is for one session at a time (a second one raises
    InvalidArgument until the first is closed or gone), keeps its state from one to the next, and is alike on all ranks. What a function raises, its rank raises;
    ranks that wait for it raise `PeerFailedError` with its words. A result of another kind is an InvalidArgument.
    """

    _served = None

    def name(self):
        """In messages: a text, and none of those that the library's own have. To be overridden.

        >>> ts.PrecisionPlugin().name()
        Traceback (most recent call last):
        NotImplementedError: a PrecisionPlugin says its name(): PrecisionPlugin has none
        """
        raise NotImplementedError(f"a PrecisionPlugin says its name(): {type(self).__name__} has none")

    def convert_modules(self, modules):
        """Converts the parameters and buffers of these modules, a dictionary by name, in place, before the session makes anything of them.

        >>> class Double(ts.PrecisionPlugin):
        ...     def name(self):
        ...         return "double"
        ...     def convert_modules(self, modules):
        ...         for module in modules.values():
        ...             module.double()
        ...     def convert_input(self, tensor):
        ...         return tensor.double() if tensor.is_floating_point() else tensor
        >>> with ts.Session(net, torch.optim.SGD(net.parameters(), 0.1), precision=Double()) as session:
        ...     session.micro_batch(lambda: net(session.convert(x)).square().mean(), len(x)).dtype
        torch.float64

        Parameters stay the same objects (`p.data = p.double()`, as `module.double()` does); others in their place, or more of them, raise InvalidArgument.

        >>> ts.PrecisionPlugin().convert_modules({"net": net})
        """

    def convert_input(self, tensor):
        """A tensor of what `Session.convert` is given; the default returns it.

        >>> ts.PrecisionPlugin().convert_input(x) is x
        True
        """
        return tensor

    def forward_scope(self, device):
        """What is entered around each forward, a context manager; the default does nothing. It may be None.

        >>> ts.PrecisionPlugin().forward_scope(torch.device("cpu"))
        """

    def loss_scale(self):
        """Losses are multiplied by it before backward, and gradients divided when they are brought to the mean, before they are clipped. The same on every rank,
        finite and above 0.

        >>> ts.PrecisionPlugin().loss_scale()
        1.0
        """
        return 1.0

    def skips_overflow(self):
        """True: a gradient that is not finite on any rank leaves the step out on all.

        >>> ts.PrecisionPlugin().skips_overflow()
        False
        """
        return False

    def update(self, overflow):
        """When the gradients of a step are final. `overflow`: it is left out; the same on every rank.

        >>> ts.PrecisionPlugin().update(False)
        """

    def clip(self, parameters, max_norm, norm_type):
        """Clips the gradients of these parameters by their norm, and returns what it was. Collective; called where a norm is taken (`max_norm`, `measure_norm`).
        The default is that of `clip_gradients` over the session's ranks; it raises InvalidArgument outside of a session.

        >>> class Halved(ts.PrecisionPlugin):
        ...     def name(self):
        ...         return "halved"
        ...     def clip(self, parameters, max_norm, norm_type):
        ...         return super().clip(parameters, max_norm / 2, norm_type)
        >>> session = ts.Session(net, torch.optim.SGD(net.parameters(), 0.1), max_norm=1.0, precision=Halved())
        >>> session.close()
        """
        session = self._served and self._served.session()
        if session is None:
            raise InvalidArgument("clip() of a precision that no session has: give it to a Session, or call ts.clip_gradients")
        return session._handle.clip(list(parameters), float(max_norm), float(norm_type))

    def step(self, optimizer, closure=None):
        """Steps one optimizer, by gradients that are final. With a `closure` it is one that calls the loss again (`Session.step_again`), which puts the parameters
        back where a search fails. What it returns is not used."""
        if closure is None:
            optimizer.step()
        else:
            optimizer.step(closure)

    def add_state(self, state):
        """Puts what a checkpoint keeps into the dictionary `state`, by name: tensors, sharded or not, numbers, texts and other plain values, the same on every rank.
        Also called before a load, which writes into the tensors.

        >>> class Counted(ts.PrecisionPlugin):
        ...     seen = 0
        ...     def name(self):
        ...         return "counted"
        ...     def update(self, overflow):
        ...         self.seen += 1
        ...     def add_state(self, state):
        ...         state["seen"] = self.seen
        ...     def restore(self, state):
        ...         self.seen = state.get("seen", 0)
        >>> checkpoints, adam = ts.Checkpointer("runs"), torch.optim.Adam(net.parameters())
        >>> with ts.Session(net, adam, precision=Counted()) as session:
        ...     session.backward(net(x).sum(), len(x))
        ...     done = session.step()
        ...     checkpoints.save("a", session.state())
        >>> counted = Counted()
        >>> with ts.Session(net, adam, precision=counted) as session:
        ...     values = checkpoints.load("a", session.state())
        >>> counted.seen, ts.PrecisionPlugin().add_state({})
        (1, None)
        """

    def restore(self, state):
        """Goes on from what was loaded: what `add_state` names, as far as the checkpoint has it. A number may be absent from it; a tensor may not.

        >>> ts.PrecisionPlugin().restore({})
        """


def _number(value, what):
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidArgument(f"{what} returned {value!r:.60}, and not a number")
    return float(value)


def _nothing(value, what):
    if value is not None:
        raise InvalidArgument(f"{what} returned a {type(value).__name__}: it changes what it is given, and returns None")
    return math.nan


def _tensors(modules):
    """(module, its tensors, name) -> tensor, each place of each module."""
    owners = dict.fromkeys(m for root in modules.values() for m in root.modules())
    return {(m, kind, name): t for m in owners for kind in ("_parameters", "_buffers") for name, t in getattr(m, kind).items() if t is not None}


class Served:
    """A precision while one session has it: what the library asks, and what that raised."""

    def __init__(self, plugin, session, modules):
        self.plugin, self.modules, self.session, self.raised = plugin, modules, weakref.ref(session), None
        plain = [hook for hook in vars(PrecisionPlugin) if not hook.startswith("_") and not callable(getattr(plugin, hook))]
        if plain:
            raise InvalidArgument(f"'{plain[0]}' of a {type(plugin).__name__} is a {type(getattr(plugin, plain[0])).__name__}, and not a function")
        self.name = plugin.name()
        if type(self.name) is not str or not self.name:
            raise InvalidArgument(f"name() of a {type(plugin).__name__} returned {self.name!r:.60}, and not a text")
        own = (getattr(getattr(plugin, hook), "__func__", None) is not getattr(PrecisionPlugin, hook) for hook in _HOOKS)
        self.hooks = sum(1 << bit for bit, theirs in enumerate(own) if theirs)
        self._callbacks = Callbacks()
        self._function = self._callbacks.calling(self._answer)
        self.function = address(self._function)
        with _TAKING:
            other = plugin._served
            if other is not None and other.session() is not None:
                raise InvalidArgument(f"the precision '{self.name}' is in use by another session: close that one first, or give this one an object of its own")
            plugin._served = self

    def release(self):
        if self.plugin._served is self:
            self.plugin._served = None

    def call(self, function, *arguments):
        """Calls the library, and raises what a function of the precision raised as it was."""
        self.raised = None
        try:
            return as_raised(self, function, *arguments)
        finally:
            self.raised = None
            self._callbacks.by_text.clear()

    def _answer(self, numbers):
        hook = _HOOKS[numbers[0]]
        try:
            with torch.no_grad():
                return [torch.tensor(getattr(self, f"_{hook}")(f"{hook}() of the precision '{self.name}'", *numbers[1:]), dtype=torch.float64)]
        except BaseException as error:
            self.raised = error
            raise

    def _convert_modules(self, what):
        before = _tensors(self.modules)
        _nothing(self.plugin.convert_modules(dict(self.modules)), what)
        for place, now in _tensors(self.modules).items():
            old, (module, kind, name) = before.pop(place, None), place
            if old is now:
                continue
            if old is None or kind == "_parameters":
                raise InvalidArgument(f"{what} put another tensor at '{name}' of a {type(module).__name__}: convert in place (p.data = p.double()), or change modules before the session")
            old.data = now  # the library knows the one before
            module._buffers[name] = old
        if before:
            raise InvalidArgument(f"{what} removed {sorted(name for _, _, name in before)}: change modules before the session")
        return math.nan

    def _loss_scale(self, what):
        return _number(self.plugin.loss_scale(), what)

    def _skips_overflow(self, what):
        skips = self.plugin.skips_overflow()
        if not isinstance(skips, bool):
            raise InvalidArgument(f"{what} returned {skips!r:.60}, and not True or False")
        return float(skips)

    def _update(self, what, overflow):
        return _nothing(self.plugin.update(bool(overflow)), what)

    def _clip(self, what):
        *parameters, limits = ops.taken()
        return _number(self.plugin.clip(parameters, *limits.tolist()), what)

    def _step(self, what, number, searches):
        steps = self.session()._steps
        closure = steps.closure[0] if searches else None
        self.plugin.step(steps.optimizers[number], closure)
        return math.nan

    def convert(self, tensor):
        """What `Session.convert` does to one tensor."""
        made = self.plugin.convert_input(tensor)
        if not isinstance(made, torch.Tensor):
            raise InvalidArgument(f"convert_input() of the precision '{self.name}' returned a {type(made).__name__}, and not a tensor")
        return made

    def scope(self, device):
        """What is entered around a forward."""
        made = self.plugin.forward_scope(device)
        if made is not None and not (hasattr(made, "__enter__") and hasattr(made, "__exit__")):
            raise InvalidArgument(f"forward_scope() of the precision '{self.name}' returned a {type(made).__name__}, and not a context manager or None")
        return contextlib.nullcontext() if made is None else made

    def state(self):
        """What add_state() gives."""
        state = {}
        _nothing(self.plugin.add_state(state), f"add_state() of the precision '{self.name}'")
        wrong = [name for name in state if type(name) is not str or not name or name in _OF_SESSION]
        if wrong:
            raise InvalidArgument(f"add_state() of the precision '{self.name}' has the name {wrong[0]!r:.60}: names are texts, and none of {sorted(_OF_SESSION)}")
        return state

    def save(self, out, prefix):
        for name, value in self.state().items():
            if isinstance(value, torch.Tensor):
                out.tensor(prefix + name, value)
            else:
                out.value(prefix + name, encode(value, prefix + name)[1])

    def plan(self, saved, prefix):
        """Has tensors loaded where they lie; returns what commits."""
        now = self.state()
        for name, value in now.items():
            if isinstance(value, torch.Tensor):
                saved.into(prefix + name, value)

        def commit():
            loaded = {}
            for name, value in now.items():
                if isinstance(value, torch.Tensor):
                    loaded[name] = value
                elif prefix + name in saved.values:
                    loaded[name] = decode(encode(value, name)[0], saved.values[prefix + name], prefix + name)
            _nothing(self.plugin.restore(loaded), f"restore() of the precision '{self.name}'")

        return commit

"""What a checkpoint's state is made of: what each of its entries saves, and how it goes on from what was saved."""

import ctypes
import json
import random
import re
import sys

import torch

from tessera._data import Loader
from tessera._errors import InvalidArgument
from tessera._library import classes, ops
from tessera._streams import StreamLoader
from tessera._torch_objects import from_dtensor, is_dtensor
from tessera._values import KINDS, as_json, decode, encode, kind_like, tensors_in

# Where the kind of each entry is kept: C++ keeps none, and passes over these.
_KIND = "python."


def to_bytes(tensor):
    return ctypes.string_at(tensor.data_ptr(), tensor.numel()) if tensor.numel() else b""


def from_bytes(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _taken(name, tensor):
    """`tensor` as the library takes it."""
    if torch.nn.parameter.is_lazy(tensor):
        raise InvalidArgument(f"'{name}' has no shape yet: run the lazy module once before it is saved or loaded")
    return from_dtensor(tensor.detach()) if is_dtensor(tensor) else tensor


def is_sharded(tensor):
    return is_dtensor(tensor) or ops.is_sharded(tensor)


class Out:
    """What is saved, while it is put together."""

    def __init__(self):
        self.handle = classes.CheckpointState()

    def tensor(self, name, tensor):
        self.handle.add(name, _taken(name, tensor))
        return name

    def value(self, name, data):
        self.handle.set(name, from_bytes(data))

    def value_of_rank(self, name, data):
        self.handle.set_of_rank(name, from_bytes(data))

    def kind(self, key, kind):
        self.value(_KIND + key, kind.encode())


def parameter_label(key, name):
    return f"parameter '{name}' of '{key}'"


class In:
    """A checkpoint while it is loaded: what it has, what of it is wanted here, and what does not fit.

    `groups_of`: by the key of each optimizer, the group of each of its parameters by name.
    """

    def __init__(self, handle, timeout):
        names, tensors, layouts = handle.tensors()
        self.tensors = dict(zip(names, tensors))
        self.sharded = {name for name, layout in zip(names, layouts) if layout}
        self.values, self.values_of_rank = ({n: to_bytes(d) for n, d in zip(*pair)} for pair in handle.values(timeout))
        self.targets, self.saved_ranks = classes.CheckpointState(), handle.saved_ranks()
        self.tensors_made, self.wanted, self.misfits = {}, set(), []
        keys = [name[len(_KIND) :] for name in self.values if name.startswith(_KIND)]
        self.groups_of = {}
        for name, data in self.values.items():
            if found := re.fullmatch(r"(.*)\.parameters\.[0-9a-f]{16}", name):
                self.groups_of.setdefault(found[1], {}).update((p, g) for g, names in enumerate(json.loads(data)) for p in names)
        parameters = [parameter_label(key, p) for key, groups in self.groups_of.items() for p in groups]
        # The same on all ranks, whatever their states are.
        self.there = sorted({f"'{name}'" for name in [*self.tensors, *keys]}.union(parameters))

    def kind(self, key):
        """The kind of an entry, and "" where it was not kept."""
        return self.values.get(_KIND + key, b"").decode()

    def lacks(self, name):
        self.misfits.append(f"'{name}' is not in the checkpoint")

    def into(self, name, tensor):
        """What was saved as `name` goes into `tensor`."""
        self.wanted.add(f"'{name}'")
        self.targets.add(name, _taken(name, tensor))

    def made(self, name, tensor):
        """The same for a tensor that the program does not have yet."""
        self.into(name, tensor)
        self.tensors_made[name] = tensor
        return tensor

    def pending(self, kind, data, where, now=None):
        """What gives the value once the tensors have been loaded. `now`: tensors that the program has in its place, by name."""
        for name in tensors_in(kind, data):
            current, saved = (now or {}).get(name), self.tensors.get(name)
            if saved is None:
                raise InvalidArgument(f"'{where}' of the checkpoint has a tensor '{name}', which is not there")
            if current is not None and is_sharded(current) and current.shape == saved.shape:
                self.made(name, torch.zeros_like(current, dtype=saved.dtype))
            elif name in self.sharded:
                raise InvalidArgument(f"'{name}' was saved sharded, and there is no such sharded tensor here that says how it lies: make one first")
            else:
                self.made(name, torch.zeros(saved.shape, dtype=saved.dtype, device=None if current is None else current.device))
        return lambda: decode(kind, data, where, self.tensors_made)


class ModulePart:
    """Parameters and buffers by their names, those left out that a state_dict leaves out; what get_extra_state() gives."""

    kind = "module"

    def __init__(self, key, module):
        self.key, self.thing = key, module

    def _tensors(self):
        seen, modules = set(), dict(self.thing.named_modules())
        buffers = ((m, f"{prefix}.{name}" if prefix else name, name) for prefix, m in modules.items() for name in m._buffers)
        kept = ((full, m._buffers[name]) for m, full, name in buffers if name not in m._non_persistent_buffers_set)
        for name, tensor in [*self.thing.named_parameters(), *kept]:
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{self.key}.{name}", tensor

    def _extra(self):
        for prefix, module in self.thing.named_modules():
            if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
                yield f"{self.key}.{prefix}{'.' if prefix else ''}_extra_state", module

    def save(self, out):
        out.kind(self.key, self.kind)
        for name, tensor in self._tensors():
            out.tensor(name, tensor)
        for name, module in self._extra():
            out.value(name, as_json(module.get_extra_state(), name, out.tensor))

    def plan(self, saved):
        for name, tensor in self._tensors():
            saved.into(name, tensor)
        self._pending = []
        for name, module in self._extra():
            if name in saved.values:
                self._pending.append((module, saved.pending("json", saved.values[name], name)))
            else:
                saved.lacks(name)

    def commit(self):
        for module, value in self._pending:
            module.set_extra_state(value())
        return self.thing


class TensorsPart:
    """One tensor by its key, or those of a dictionary by key and name."""

    def __init__(self, key, thing):
        self.key, self.thing = key, thing
        self.kind = "tensor" if isinstance(thing, torch.Tensor) else "tensors"
        self._tensors = {key: thing} if self.kind == "tensor" else {f"{key}.{name}": t for name, t in thing.items()}

    def save(self, out):
        out.kind(self.key, self.kind)
        for name, tensor in self._tensors.items():
            out.tensor(name, tensor)

    def plan(self, saved):
        for name, tensor in self._tensors.items():
            saved.into(name, tensor)

    def commit(self):
        return self.thing


class ValuePart:
    """A plain value, or that of an object which gives one and takes it again; of all ranks or of this one."""

    def __init__(self, key, thing, of_rank=False):
        self.key, self.thing, self.of_rank = key, thing, of_rank
        self.kind = "of rank" if of_rank else KINDS
        if isinstance(thing, torch.Generator):
            self._get, self._put = lambda: to_bytes(thing.get_state()), lambda data: thing.set_state(from_bytes(data))
        elif isinstance(thing, (Loader, StreamLoader)):
            self._get, self._put = thing.state, thing.restore
        elif callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None)):
            self._get, self._put = thing.state_dict, thing.load_state_dict
        else:
            self._get, self._put = lambda: thing, None

    def save(self, out):
        if self.of_rank:
            out.kind(self.key, "of rank")
            out.value_of_rank(self.key, as_json(self._get(), self.key))
        else:
            kind, data = encode(self._get(), self.key, out.tensor)
            out.kind(self.key, kind)
            out.value(self.key, data)

    def plan(self, saved):
        self._pending = None
        values, kind = (saved.values_of_rank if self.of_rank else saved.values), saved.kind(self.key)
        if self.key in values:
            now = {}
            if self._put and not self.of_rank:
                encode(self._get(), self.key, lambda name, tensor: now.setdefault(name, tensor) is None or name)
            kind = "json" if self.of_rank and kind else kind or kind_like(self._get())
            self._pending = saved.pending(kind, values[self.key], self.key, now)
        elif not (self.of_rank and kind):  # a rank that had none keeps its own
            saved.lacks(self.key)

    def commit(self):
        if self._pending is None:
            return self.thing
        value = self._pending()
        if not self._put:
            return value
        self._put(value)
        return self.thing


class OfRank:
    """Marks an entry of a checkpoint's state that each rank has of its own: a plain value, or an object with `state_dict()` and `load_state_dict()`.

    >>> ts.Checkpointer("runs").save("a", {"net": net, "seen": ts.OfRank(100 + ts.rank())})
    >>> ts.CheckpointReader("runs", "a").load({"net": net, "seen": ts.OfRank(0)})["seen"]
    100

    It comes back on the rank of the same number; ranks beyond those that saved keep what they have.
    """

    def __init__(self, thing):
        self.thing = thing


class RandomState:
    """Stands in a checkpoint's state for the random generators of each rank: torch's (CPU and CUDA), those of Python and NumPy, and that of sharded tensors.

    >>> checkpoints = ts.Checkpointer("runs")
    >>> checkpoints.save("a", {"net": net, "random": ts.RandomState()})
    >>> a = torch.rand(2)
    >>> state = checkpoints.load("a", {"net": net, "random": ts.RandomState()})
    >>> torch.equal(torch.rand(2), a)
    True

    They come back on the rank of the same number. Ranks beyond those that saved keep their own generators; that of sharded tensors, whose numbers depend
    on no rank, comes back on all. Ranks that are threads share the generators of their process. A `torch.Generator` is an entry of its own.
    """

    def state(self):
        """Of this rank: plain values by the name of what they are of.

        >>> saved = ts.RandomState().state()
        >>> a = torch.rand(2)
        >>> ts.RandomState().restore(saved)
        >>> torch.equal(torch.rand(2), a)
        True
        """
        numbers = {"torch": to_bytes(torch.get_rng_state()), "python": random.getstate()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            numbers["cuda"] = [to_bytes(state) for state in torch.cuda.get_rng_state_all()]
        if "numpy" in sys.modules:
            name, key, *rest = sys.modules["numpy"].random.get_state()
            numbers["numpy"] = (name, key.tolist(), *rest)
        return numbers

    def restore(self, state):
        """Sets them again; of a device or a package that is not here nothing is set."""
        torch.set_rng_state(from_bytes(state["torch"]))
        random.setstate(state["python"])
        if "cuda" in state and torch.cuda.is_available() and torch.cuda.device_count() == len(state["cuda"]):
            torch.cuda.set_rng_state_all([from_bytes(data) for data in state["cuda"]])
        if "numpy" in state and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(state["numpy"])


class RandomPart:
    """The generators of each rank, and the one that all ranks share."""

    kind = "random"

    def __init__(self, key, thing):
        self.key, self.thing = key, thing

    def save(self, out):
        out.kind(self.key, self.kind)
        out.value_of_rank(self.key, as_json(self.thing.state(), self.key))
        out.value(f"{self.key}.sharded", as_json(ops.random_state(), self.key))

    def plan(self, saved):
        shared = saved.values.get(f"{self.key}.sharded")
        if shared is None:
            saved.lacks(self.key)
        mine = saved.values_of_rank.get(self.key)
        self._shared = None if shared is None else decode("json", shared, self.key)
        self._mine = None if mine is None else decode("json", mine, self.key)

    def commit(self):
        if self._mine:
            self.thing.restore(self._mine)
        if self._shared:
            ops.set_random_state(*self._shared)
        return self.thing

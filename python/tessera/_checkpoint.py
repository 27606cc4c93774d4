"""Checkpoints of many ranks: saved from all of them at once, loaded on any others."""

import atexit
import json
import os
import weakref
from dataclasses import dataclass
from operator import index

import torch

from tessera._api import Mesh, _sizes
from tessera._checkpoint_io import place_of
from tessera._errors import Error, InvalidArgument
from tessera._groups import Group, group, group_of, world
from tessera._library import classes, ops
from tessera._mesh import handle_of
from tessera._optimizer_state import OptimizerPart
from tessera._placement import Replicate, Shard, to_text
from tessera._session import Session, SessionPart
from tessera._state import In, ModulePart, OfRank, Out, RandomPart, RandomState, TensorsPart, ValuePart, to_bytes
from tessera._streams import StreamLoader
from tessera._values import KINDS

_HOUR = 3600.0


def _agree(on, what, body):
    """The text that `body()` gives, of every rank of the group; what it raises on one rank is raised on all."""
    text, problem, cause = "", "", None
    try:
        text = body() or ""
    except Exception as error:
        problem, cause = str(error) if isinstance(error, Error) and str(error) else f"{type(error).__name__}: {error}", error
    try:
        return ops.agree(on._handle, what, problem, text)
    except Error as error:
        raise error from cause


def _part(key, thing, state):
    if isinstance(thing, torch.nn.Module):
        return ModulePart(key, thing)
    if isinstance(thing, torch.optim.Optimizer):
        return OptimizerPart(key, thing, state)
    if isinstance(thing, torch.Tensor) or (isinstance(thing, dict) and thing and all(isinstance(t, torch.Tensor) for t in thing.values())):
        return TensorsPart(key, thing)
    if isinstance(thing, RandomState):
        return RandomPart(key, thing)
    if isinstance(thing, Session):
        return SessionPart(key, thing)
    if isinstance(thing, OfRank):
        return ValuePart(key, thing.thing, True)
    # Of these each rank has its own.
    return ValuePart(key, thing, isinstance(thing, torch.Generator) or isinstance(thing, StreamLoader) and not thing.sharded)


def _parts(state):
    if not isinstance(state, dict):
        raise InvalidArgument(f"a checkpoint's state is a dictionary of names and what they stand for, not {type(state).__name__}: {{'net': net}}")
    for key in state:
        if type(key) is not str or not key or key == "python" or key.startswith("python."):
            raise InvalidArgument(f"{key!r} names no entry of a checkpoint's state: names are texts, and none begins with 'python.'")
        outer = next((other for other in state if key.startswith(f"{other}.")), None)
        if outer is not None:
            raise InvalidArgument(f"'{key}' could be a part of '{outer}': give one of both another name")
    return {key: _part(key, thing, state) for key, thing in state.items()}


def _of_these_ranks(state, on):
    """Without a call: the ranks outside of a session would be waited for."""
    for one in state.values() if isinstance(state, dict) else ():
        if isinstance(one, Session) and set(one._ranks) != set(on.ranks):
            raise InvalidArgument(f"the session is of ranks {one._ranks}, and its checkpoint would be of ranks {on.ranks}: Checkpointer(folder, ranks={one._ranks})")


def _saved_as(part, kind):
    fits = kind in part.kind if part.kind is KINDS else kind == part.kind or {kind, part.kind} == {"module", "tensors"}
    if kind and not fits:
        here = "a value" if part.kind is KINDS else f"'{part.kind}'"
        raise InvalidArgument(f"'{part.key}' was saved as '{kind}', and is {here} here")


class Checkpointer:
    """Saves and loads what ranks hold, from all of them at once: each writes its shards, replicas share the work, and a manifest is written last.

    >>> adam = torch.optim.Adam(net.parameters())
    >>> checkpoints = ts.Checkpointer("runs/7", keep_last=3)
    >>> state = {"net": net, "adam": adam, "random": ts.RandomState()}       # a loader, a schedule of learning rates likewise
    >>> step = 0
    >>> if name := checkpoints.to_resume():
    ...     step = checkpoints.load(name, {**state, "step": 0})["step"]      # on these ranks and this mesh, whatever saved it
    >>> for step in range(step, 5):
    ...     net(x).sum().backward(); adam.step()
    ...     checkpoints.start_save(f"step-{step + 1}", {**state, "step": step + 1})  # returns after one copy
    >>> checkpoints.wait()
    >>> checkpoints.names(), checkpoints.latest(), checkpoints.saving, checkpoints.warnings
    (['step-3', 'step-4', 'step-5'], 'step-5', False, [])
    >>> checkpoints.load("step-4", {**state, "step": 0})["step"]
    4

    A state is a dictionary. Modules (parameters and buffers, but for those that a state_dict leaves out), optimizers, tensors and dictionaries of tensors,
    sharded or not; learning rate schedules, `GradScaler` and any other object with `state_dict()` and `load_state_dict()`; `Loader`; `RandomState`; plain
    values, the same on all ranks; `OfRank(value)` of each rank. Names, files and optimizers are those of C++'s Checkpointer: each reads what the other wrote.

    `folder`: on a file system that all ranks share, or an `FsspecIO`. `keep_last`: after a save all but so many of the latest go; 0: none does. `busy`: what a save does while
    an earlier one is still being written: "wait", or "refuse" with `CheckpointBusy`. `background_rate`: bytes a second that a rank writes in the background
    at most. `check_replicas`: plain tensors that differ by rank are refused; else those of the first rank are saved. `remove_incomplete`: the first save
    removes what interrupted ones left. `timeout`: seconds that ranks wait for the slowest. `ranks`: global ranks, of which this is one; default all.

    Calls are collective unless they say otherwise, and an error of one rank is raised on all: `FileError` with a path, `InvalidArgument` for a state that
    does not fit, `CheckpointLocked` where another job saves there.
    """

    def __init__(self, folder, *, keep_last=0, busy="wait", background_rate=0, check_replicas=False, remove_incomplete=True, timeout=_HOUR, ranks=None):
        self._group, self._timeout = world() if ranks is None else group(ranks), float(timeout)
        options = (index(keep_last), busy, int(background_rate), bool(check_replicas), bool(remove_incomplete), self._timeout)
        self._place, self._handle = folder, classes.Checkpointer(place_of(folder), self._group._handle, *options)
        # Not in the destructor of the handle, which holds the interpreter's lock that the other ranks' saves may wait for; and before the job ends.
        self.close = weakref.finalize(self, _close, self._handle, folder)
        atexit.register(self.close)

    @property
    def folder(self):
        """As this rank spells it. Not collective."""
        return self._handle.folder()

    def _out(self, name, state):
        out = Out()
        _of_these_ranks(state, self._group)

        def fill():
            if type(name) is not str:
                raise InvalidArgument(f"a checkpoint's name is a text, not {name!r:.60}")
            with torch.no_grad():
                for part in _parts(state).values():
                    part.save(out)

        _agree(self._group, "save", fill)
        return out.handle

    def save(self, name, state):
        """Returns when the checkpoint is on the disk. One by the same name is replaced, and stays complete until then.

        >>> checkpoints = ts.Checkpointer("runs/8")
        >>> checkpoints.save("best", {"net": net})
        >>> checkpoints.folder, checkpoints.bytes_written > 0
        ('runs/8', True)
        """
        self._handle.save(name, self._out(name, state))

    def start_save(self, name, state):
        """Returns when this rank's share has been copied; the state may change from then on. A thread does the rest, and the next call raises its error."""
        self._handle.start_save(name, self._out(name, state))

    def wait(self):
        """Waits until no save is in progress. Raises the error that one ended with."""
        self._handle.wait()

    @property
    def saving(self):
        """True while this rank is still writing. Not collective."""
        return self._handle.saving()

    def names(self, problems=None):
        """Complete checkpoints in the folder, earliest first. The list `problems` gets what is wrong with damaged ones, a sentence each."""
        names, wrong = self._handle.names()
        if problems is not None:
            problems.extend(wrong)
        return list(names)

    def latest(self, problems=None):
        """The last of `names`, or None: damaged ones are passed over, and told in `problems`."""
        return (self.names(problems) or [None])[-1]

    def to_resume(self):
        """The checkpoint to go on from, or None where there is none. Raises `CheckpointDamaged` where the latest one is damaged: never an older one in
        silence; the message names those that are whole."""
        return self._handle.to_resume()

    def load(self, name, state, **options):
        """Makes everything in `state` what it was; `CheckpointReader.load` says how, and takes the options."""
        _of_these_ranks(state, self._group)
        return CheckpointReader(self._place, name, self._group, timeout=self._timeout).load(state, **options)

    def remove(self, name):
        """Removes a checkpoint, its manifest first.

        >>> checkpoints = ts.Checkpointer("runs/9")
        >>> checkpoints.save("a", {"net": net}); checkpoints.save("b", {"net": net})
        >>> checkpoints.remove("a"); checkpoints.names()
        ['b']
        """
        self._handle.remove(name)

    def protect(self, names):
        """`keep_last` neither removes nor counts these from the next save on; replaces those given before. On all ranks; not collective.

        >>> checkpoints = ts.Checkpointer("runs/10", keep_last=1)
        >>> checkpoints.protect(["best"])
        >>> for name in ("best", "a", "b"): checkpoints.save(name, {"net": net})
        >>> checkpoints.names()
        ['best', 'b']
        """
        self._handle.protect(list(names))

    @property
    def warnings(self):
        """What went wrong beside the saves themselves, a sentence each. Not collective."""
        return list(self._handle.warnings())

    @property
    def bytes_written(self):
        """Bytes of this rank's file in the last save that ended. Not collective."""
        return self._handle.bytes_written()


def _close(handle, _place):
    # What is saved goes to the place until then.
    handle.close()


@dataclass(frozen=True)
class SavedTensor:
    """What a checkpoint has under a name: dtype and global shape; how it lay: axes by name, a placement for each, and sizes of shards, all empty if plain.

    >>> ts.Checkpointer("runs").save("a", {"field": t})
    >>> ts.CheckpointReader("runs", "a").tensors["field"]
    SavedTensor(dtype=torch.float32, shape=(4, 8), axes={'data': 1}, placements=(Shard(dim=0),), sizes={0: [4]})
    """

    dtype: torch.dtype
    shape: tuple
    axes: dict
    placements: tuple
    sizes: dict


def _saved_tensor(meta, layout):
    layout = json.loads(layout) if layout else {"axes": [], "placements": [], "sizes": {}}
    placements = tuple(Replicate() if dim is None else Shard(dim) for dim in layout["placements"])
    sizes = {int(dim): list(parts) for dim, parts in layout["sizes"].items()}
    return SavedTensor(meta.dtype, tuple(meta.shape), {name: size for name, size in layout["axes"]}, placements, sizes)


class CheckpointReader:
    """One checkpoint of a folder or an `FsspecIO`, or a safetensors file of any program or a folder of such with an index, to be loaded on any ranks and mesh.

    >>> ts.Checkpointer("runs/7").save("step-100", {"net": net, "field": t, "step": 100})
    >>> saved = ts.CheckpointReader("runs/7", "step-100")
    >>> saved.load({"net": net, "field": t, "step": 0})["step"]      # into the placements that they have here
    100
    >>> saved.read("net.0.weight", mesh, [ts.Shard(0)])              # one tensor
    <ShardTensor Float [16, 8] data=Shard(0)[16], local [16, 8] at [0, 0]>
    >>> saved.export_file("net.safetensors")                         # all of them in one file, which other programs read
    >>> sorted(ts.CheckpointReader("net.safetensors").tensors)       # name -> dtype, shape, placements
    ['field', 'net.0.bias', 'net.0.weight', 'net.2.bias', 'net.2.weight']
    >>> saved.saved_ranks, saved.bytes_read > 0
    (1, True)

    Each rank reads the bytes that it needs. Collective over `group` (default the world) unless a call says otherwise; errors of one rank are raised on all:
    `FileError` for files that are absent, truncated or damaged, with their path.
    """

    def __init__(self, folder, name=None, group=None, *, timeout=_HOUR):
        self._group, self._timeout = group_of(group), float(timeout)
        self._place = folder
        place, what = (None, os.fspath(folder)) if name is None else (place_of(folder), name)
        self._handle = classes.CheckpointReader(self._group._handle, place, what)

    @property
    def tensors(self):
        """A `SavedTensor` by each name. Not collective."""
        names, tensors, layouts = self._handle.tensors()
        return {name: _saved_tensor(meta, layout) for name, meta, layout in zip(names, tensors, layouts)}

    @property
    def saved_ranks(self):
        """How many ranks saved it. Not collective."""
        return self._handle.saved_ranks()

    @property
    def bytes_read(self):
        """Bytes that this rank has read so far. Not collective."""
        return self._handle.bytes_read()

    def values(self):
        """The bytes of each value that all ranks share, by name: what `CheckpointState::set` of C++ was given.

        >>> ts.Checkpointer("runs").save("a", {"step": 7})
        >>> ts.CheckpointReader("runs", "a").values()["step"]
        b'7'
        """
        (names, data), _ = self._handle.values(self._timeout)
        return {name: to_bytes(d) for name, d in zip(names, data)}

    def values_of_ranks(self, name):
        """The bytes of a value that each rank had of its own, by rank.

        >>> ts.Checkpointer("runs").save("a", {"seen": ts.OfRank(7)})
        >>> ts.CheckpointReader("runs", "a").values_of_ranks("seen")
        {0: b'7'}
        """
        return {rank: to_bytes(data) for rank, data in zip(*self._handle.values_of_ranks(name))}

    def load(self, state, *, allow_extra=False, allow_missing=False, convert=False, all_or_nothing=True, threads=0):
        """Makes everything in `state` what it was, and returns the state with its plain values as they were saved.

        Tensors are filled where they lie, on any mesh; optimizers get the moments, steps and options of the parameters of the same names; of what each rank
        has of its own, the rank of the same number gets it. A value in `state` stands for any value. Nothing changes, on any rank, before everything has been
        read and verified; what an object's own `load_state_dict` raises comes after the tensors, and is raised on all ranks.

        `allow_extra`: what the checkpoint has beyond the state is no error; `allow_missing`: what the state has beyond the checkpoint is none, and stays.
        `convert`: values are converted to the dtype of the tensor; else another one is an error. `all_or_nothing`: False reads everything once, for
        checkpoints larger than the memory of the host; after an error tensors hold what had been read so far. `threads`: that read on each rank.

        Raises `InvalidArgument` with all that is missing, left over, or of another shape, dtype or kind.
        """
        _of_these_ranks(state, self._group)
        saved, parts = In(self._handle, self._timeout), {}

        def plan():
            parts.update(_parts(state))
            for key, part in parts.items():
                saved.wanted.add(f"'{key}'")
                _saved_as(part, saved.kind(key))
                part.plan(saved)
            if saved.misfits and not allow_missing:
                raise InvalidArgument(f"the checkpoint does not fit: {'; '.join(saved.misfits)} (allow_missing=True leaves it as it is)")
            # The names of what was saved are the same on all ranks: a text of ones and zeros says which of them this rank has.
            return "".join("1" if name in saved.wanted else "0" for name in saved.there)

        with torch.no_grad():
            said = _agree(self._group, "load", plan)
            if not allow_extra:
                self._refuse_extra(saved, said)
            self._handle.load(saved.targets, bool(allow_missing), bool(convert), bool(all_or_nothing), index(threads), self._timeout)
            loaded = {}
            _agree(self._group, "load", lambda: loaded.update((key, part.commit()) for key, part in parts.items()))
        return loaded

    @staticmethod
    def _refuse_extra(saved, said):
        left = [name for name, *found in zip(saved.there, *said) if "1" not in found]
        if left:
            more = f" and {len(left) - 8} more" if len(left) > 8 else ""
            raise InvalidArgument(f"load: {', '.join(left[:8])}{more} is in the checkpoint alone (allow_extra=True leaves it there)")

    def read(self, name, mesh, placements, sizes=None):
        """One tensor, sharded as said. Raises for an unknown name, and for `Partial`."""
        return self._handle.read(name, handle_of(mesh), to_text(placements), _sizes(sizes))

    def read_as_saved(self, mesh, misfits=None):
        """All tensors by name, sharded as they were saved, as far as they fit this mesh; axes are found by name. What does not fit raises, or is described
        in the list `misfits`, a sentence each, and gets other shards.

        >>> ts.Checkpointer("runs").save("a", {"field": t})
        >>> ts.CheckpointReader("runs", "a").read_as_saved(mesh)["field"]
        <ShardTensor Float [4, 8] data=Shard(0)[4], local [4, 8] at [0, 0]>
        """
        names, tensors, words = self._handle.read_as_saved(handle_of(mesh), misfits is not None)
        if misfits is not None:
            misfits.extend(words)
        return dict(zip(names, tensors))

    def export_file(self, path):
        """All tensors into one safetensors file, written by all ranks; at its place complete or not at all."""
        self._handle.export_file(os.fspath(path))

    def verify(self):
        """Compares every checksum; each rank reads its share.

        >>> ts.Checkpointer("runs").save("a", {"net": net})
        >>> ts.CheckpointReader("runs", "a").verify()    # FileError with the path where it is damaged
        """
        self._handle.verify()

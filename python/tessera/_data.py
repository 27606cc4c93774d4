"""Data: who reads which samples, in an order that depends neither on ranks nor on workers."""

import os
import re
import threading
import weakref
from dataclasses import dataclass, replace
from functools import partial
from operator import index

import torch
from torch.utils import _pytree as pytree

from tessera._callbacks import Callbacks, address, with_cause
from tessera._errors import InvalidArgument
from tessera._groups import group_of
from tessera._library import classes, ops
from tessera._mesh import handle_of, told_to_others
from tessera._workers import WorkerPool

# Never freed: a worker that hangs in a sample is left behind when its loader goes, and returns through the reader one day.
_READERS = []


def _tensors(sample):
    """The tensors of a sample, however it is nested."""
    return [torch.as_tensor(value) for value in pytree.tree_leaves(sample)]


def _stack(samples, indices):
    """The batch of samples that are nested alike, and how they are nested."""
    specs = [pytree.tree_structure(sample) for sample in samples]
    if any(spec != specs[0] for spec in specs):
        raise ValueError(f"samples of one dataset are nested alike; these are {specs[0]} and {next(spec for spec in specs if spec != specs[0])}")
    columns = list(zip(*map(_tensors, samples)))
    for column in columns:
        kinds = [f"{t.dtype} {list(t.shape)} on {t.device}" for t in column]
        for index, kind in zip(indices, kinds):
            if kind != kinds[0]:
                raise ValueError(f"sample {index} has a tensor {kind}, that of sample {indices[0]} is {kinds[0]}: samples are of one shape, dtype and device")
    return [torch.stack(column) for column in columns], specs[0]


def _names(nested):
    """The paths of what is nested, as the library names tensors: `about/place/0`; none where a key cannot be part of one."""
    names = []
    for path, _ in pytree.tree_flatten_with_path(nested)[0]:
        keys = [getattr(key, "key", getattr(key, "idx", getattr(key, "name", None))) for key in path]
        if not all(isinstance(key, (str, int)) and re.fullmatch(r"[^/\x00-\x1f\x7f]+", str(key)) for key in keys):
            return []
        names.append("/".join(map(str, keys)))
    return names if len(set(names)) == len(names) and all(len(name.encode()) in range(1, 1025) for name in names) else []


def _by_names(names, tensors):
    """Dictionaries of tensors by their names, and tuples where these are numbers; without names all tensors in a tuple."""
    if not names:
        return tuple(tensors)
    groups = {}
    for name, tensor in zip(names, tensors):
        first, _, rest = name.partition("/")
        groups.setdefault(first, []).append((rest, tensor))
    members = {key: inner[0][1] if inner[0][0] == "" else _by_names(*zip(*inner)) for key, inner in groups.items()}
    return tuple(members.values()) if list(members) == [str(i) for i in range(len(members))] else members


def _kept(function):
    _READERS.append(function)
    return function


class _Reader:
    """Batches of an object of Python's: the tensors, and how samples are nested; without indices of no rows."""

    def __init__(self, samples, collate):
        self.samples, self.collate, self.names = samples, collate, None

    def __call__(self, indices):
        got = [self.samples[i] for i in indices or range(min(1, len(self.samples)))]
        if self.names is not None and any(_names(sample) != self.names for sample in got):
            raise ValueError(f"graphs have the same fields in the same order: {[_names(sample) for sample in got]}, and the first has {self.names}")
        if self.collate:
            whole = self.collate(got)
            made, nesting = _tensors(whole), pytree.tree_structure(whole)
        else:
            made, nesting = _stack(got, indices)
        return (made if indices else [t[:0] for t in made]), nesting


class Dataset:
    """Samples by index: what `Loader` reads. Made by `TensorDataset`, `TokenFileDataset`, `SourceDataset`, or of any object with `len()` and `[index]`.

    A sample is a tensor, a number, or tuples, lists and dictionaries of them, nested in any way. An object of Python's is called from the loader's threads.
    `data[index]` raises IndexError outside, and what the object raises.

    >>> class Images:
    ...     def __len__(self): return 3
    ...     def __getitem__(self, i): return {"image": torch.full((2, 2), float(i)), "label": i}
    >>> data = ts.Dataset.of(Images())
    >>> len(data), data[2][1]
    (3, tensor(2))
    """

    def __init__(self, handle, errors=None, keep=None):
        self._handle, self._errors, self._keep, self._nesting, self._probe, self._reader = handle, errors, keep, None, None, None

    def __len__(self):
        return self._handle.size()

    def __getitem__(self, index):
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return tuple(self._handle.get(index))

    @staticmethod
    def of(samples, collate=None):
        """A dataset of `len(samples)` samples, `samples[index]` each.

        `collate`: makes of a list of samples the batch's tensors, with the samples in dim 0 of each; default: stacks them.
        Raises TypeError for what has no `len()` and `[index]`. Samples that are nested differently, or differ in shape, dtype or device, are a `SampleError` when they are read.
        """
        if isinstance(samples, Dataset):
            if collate:
                raise InvalidArgument("collate is for objects of Python's, and this is a Dataset already: give it where that is made")
            return samples
        if isinstance(samples, torch.Tensor):
            raise TypeError("a tensor is no dataset: TensorDataset(t) has its rows; a list of samples is Dataset.of(list)")
        if not hasattr(samples, "__len__") or not hasattr(samples, "__getitem__"):
            raise TypeError(f"a dataset has len() and [index]; {samples!r:.60} has not. A list of samples is one dataset as Dataset.of(list)")
        return Dataset._read_by(_Reader(samples, collate))

    @staticmethod
    def _read_by(reader, elsewhere=None):
        """`elsewhere`: what stands for the reader, in other processes."""
        errors, known, mutex = Callbacks(), [], threading.Lock()

        def batch(indices):
            tensors, nesting = (elsewhere or reader)(indices)
            with mutex:
                if known and known[0] != nesting and known[0].num_leaves == nesting.num_leaves:
                    raise ValueError(f"samples of one dataset are nested alike; these are {known[0]} and {nesting}")
                known[:] = [nesting]
            return tensors

        function = _kept(errors.calling(batch))
        dataset = Dataset(ops.python_dataset(len(reader.samples), address(function)), errors, function)
        dataset._nesting, dataset._probe, dataset._reader = known, batch, reader
        return dataset

    def _nested(self, tensors, names):
        if self._probe and not self._nesting:
            self._probe([])  # this rank has drawn nothing from it yet, and others may have
        if self._nesting and self._nesting[0].num_leaves == len(tensors):
            return pytree.tree_unflatten(list(tensors), self._nesting[0])
        return _by_names(names, tensors)


def TensorDataset(*tensors):
    """Tensors in memory that agree in dim 0; sample i is row i of each. `TensorDataset({"inputs": {"wind": x}, "target": y})`: with names.

    Raises InvalidArgument for no tensors, and for ones that differ in dim 0.

    >>> data = ts.TensorDataset(torch.arange(6).view(3, 2), torch.arange(3))
    >>> data[1]
    (tensor([2, 3]), tensor(1))
    """
    named = len(tensors) == 1 and not isinstance(tensors[0], torch.Tensor)
    leaves, nesting = pytree.tree_flatten(tensors[0] if named else tensors)
    dataset = Dataset(ops.tensor_dataset(leaves))
    dataset._nesting = [nesting] if named else None
    return dataset


def TokenFileDataset(path, dtype, row, stride=0):
    """A file of tokens of `dtype`: rows of `row` tokens, starting every `stride` tokens (0: every `row`).

    Raises FileError for a file that cannot be opened or is no multiple of the dtype's size, InvalidArgument for rows of no tokens or longer than the file.

    >>> size = open("text.bin", "wb").write(bytes(range(10)))
    >>> data = ts.TokenFileDataset("text.bin", torch.uint8, row=4, stride=3)
    >>> [row[0].tolist() for row in data]
    [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    """
    return Dataset(ops.token_file_dataset(os.fspath(path), dtype, row, stride))


@dataclass(frozen=True)
class LoadedBatch:
    """This process' shard of a global batch.

    >>> batch = ts.Loader(ts.TensorDataset({"x": torch.ones(5, 3)}), ts.FixedOrder(5, 4), mesh, ["data"]).next()
    >>> batch.step, batch.rows, batch.real, batch.global_real, batch.mask, batch.fields["x"].shape, len(batch.samples)
    (0, 4, 4, 4, None, torch.Size([4, 3]), 4)
    """

    step: int
    epoch: int
    tensors: tuple
    """Batch dim in front, flat."""
    fields: object
    """The same, nested as the samples of the first dataset are: `batch.fields["image"]`. Those of a `SourceDataset` have the names of their variables."""
    samples: tuple
    """(dataset, index) of each row."""
    slices: tuple
    """(batch coordinate, first and one past the last position in the global batch, first row here)."""
    rows: int
    real: int
    """Rows that are not padding: the weight of this process' mean."""
    global_rows: int
    global_real: int
    mask: torch.Tensor | None
    """Bool [rows], true where a row is real; None if all are."""
    names: tuple = ()
    """Of `tensors`, where `fields` is a dictionary: "about/place/0" is `fields["about"]["place"][0]`."""


def _in_processes(datasets, count):
    """The datasets again, of which those of Python's are read by worker processes."""
    readers = [d._reader for d in datasets]
    if count < 0 or not any(readers):
        raise InvalidArgument(f"processes={count}: a number of processes that read objects of Python's; of the library's own datasets threads read beside each other")
    pool = WorkerPool(readers, count)
    return [Dataset._read_by(d._reader, partial(pool.read, number)) if d._reader else d for number, d in enumerate(datasets)], pool


def _graph_names(datasets):
    """The names of the fields of graphs, which each of their samples is to have."""
    readers = [d._reader for d in datasets]
    if not all(reader and len(reader.samples) and not reader.collate for reader in readers):
        raise InvalidArgument("graphs=True is for objects of Python's that have samples, dictionaries of fields, without collate")
    for reader in readers:
        reader.names = _names(readers[0].samples[0])
    return readers[0].names


def _as_named(made, names):
    """The tensors of what is nested, in the order of these names: dictionaries may have another one."""
    tensors, own = _tensors(made), _names(made)
    if own == names or not own or not names or len(own) != len(names):
        return tensors
    if sorted(own) != sorted(names):
        raise ValueError(f"a sample with the fields {names} has become one with {own}: it is nested as before")
    by_name = dict(zip(own, tensors))
    return [by_name[name] for name in names]


def _require_one_order(datasets):
    """Refuses a mixture whose datasets have the same fields in another order: their tensors would be taken for each other's."""
    names = [_names(pytree.tree_unflatten([0] * nesting.num_leaves, nesting)) for d in datasets for nesting in d._nesting or ()]
    other = next((own for own in names if own != names[0] and sorted(own) == sorted(names[0])), None)
    if other:
        raise InvalidArgument(f"datasets of one mixture have the fields {names[0]} and {other}: give the same names in the same order")


class _Augmenting:
    """A function of complete samples as the library calls it; `nested`: how it knows a sample's tensors."""

    def __init__(self, function, nested):
        self.errors = Callbacks()

        def call(numbers):
            sample = nested(ops.taken())
            names = _names(sample)  # the function may write to it
            return _as_named(function(sample, torch.Generator().manual_seed(numbers[0])), names)

        self._call = self.errors.calling(call)
        self.address = address(self._call)


def _fours(numbers):
    return tuple(tuple(numbers[i : i + 4]) for i in range(0, len(numbers), 4))


class Loader:
    """Each process reads its shard of every global batch, ahead of time.

    >>> data = ts.TensorDataset(torch.arange(10.0), torch.arange(10))
    >>> order = ts.FixedOrder(len(data), 4, seed=1)
    >>> loader = ts.Loader(data, order, mesh, ["data"], workers=2)
    >>> for batch in loader:                           # one epoch, as loader.epoch()
    ...     x, y = batch.tensors                       # batch.real of batch.rows rows count
    ...     print(batch.step, batch.real)
    0 4
    1 4
    2 2
    >>> state = loader.state()                         # a short text; restore(state) goes on there, on any number of ranks
    >>> loader.next_epoch(), loader.next().step
    (1, 3)
    >>> loader.restore(state); loader.next().step
    3
    >>> loader.seek(1); loader.next().step
    1
    >>> loader.require_agreement()
    >>> loader.close()

    `datasets`: one, or a list of those that a mixture names, in its order; a `Dataset`, or anything with `len()` and `[index]` (a list of samples:
    `Dataset.of(list)`). `batch_axes`: the axes of the mesh
    that shard the batch, outermost first; ranks along the others get the same samples. `workers`: threads that read ahead, `prefetch` batches beyond the
    next; 0: `next()` reads. `collate`: for objects of Python's, see `Dataset.of`. What a dataset raises, `next()` raises, with the sample's index. `close()`
    ends the threads and processes; the end of the program does too.

    `processes`: threads decode one after the other where Python holds its lock, processes beside each other: so many, started once, each of which reads a batch at
    a time of the objects of Python's, for a thread that waits for it (`workers` and `prefetch` are at least `processes` then). Batches, their order, `state()`,
    errors and `pin_memory` are as with threads; what a sample draws from the generators of `torch`, `random` or `numpy` is its worker's. Datasets and `collate` are
    pickled: of classes and functions at the top of a module, in a script that starts its work under `if __name__ == "__main__":`. A worker that dies is an error
    of the batch that it was to read, and of all after it.

    `graphs`: samples are graphs of different sizes, dictionaries `{"nodes": {...}, "edges": {"index": ..., ...}, ...}`: `index` is 2 x edges, numbers of nodes, and the other
    tensors of these groups have a row for each node or edge. A batch is one graph without edges between, with `fields["nodes"]["graph"]`, the row of each node's graph; other
    fields are stacked. `rows`, `real` and `mask` count graphs. `shard_graph` shards it over ranks that share it.

    >>> graphs = [{"nodes": {"x": torch.ones(n, 2)}, "edges": {"index": torch.tensor([[0], [n - 1]])}, "energy": torch.tensor(float(n))} for n in (2, 3)]
    >>> batch = ts.Loader(ts.Dataset.of(graphs), ts.FixedOrder(2, 2, shuffle=False), mesh, ["data"], graphs=True).next()
    >>> batch.rows, batch.fields["edges"]["index"].tolist(), batch.fields["nodes"]["graph"].tolist(), batch.fields["energy"].tolist()
    (2, [[0, 2], [1, 4]], [0, 0, 1, 1, 1], [2.0, 3.0])

    `augment(sample, draws)`: returns what is trained on in place of a complete sample, which it may write to, nested as in the dataset: as many tensors, of one shape and dtype
    for a batch. It draws from `draws` alone, a `torch.Generator` that `seed`, epoch, step and sample determine: the same on any number of ranks and workers, and in a run
    that is resumed. Called by the loader's threads, also with `processes`. Of samples of which ranks read shards, see `augment_batch`.

    >>> def flip(sample, draws):
    ...     return sample.flip(-1) if torch.rand(1, generator=draws) < 0.5 else sample
    >>> data = ts.Dataset.of([torch.arange(3.0)] * 4)
    >>> ts.Loader(data, ts.FixedOrder(4, 4), mesh, ["data"], augment=flip, seed=1).next().tensors[0].sum().item()
    12.0

    `reads`: False where another rank reads for this one (`reads_for_others`): its batches have rows and no tensors, for `scatter_batch`.

    >>> def main(images):                              # len(images), images[i]: a class at the top of a module
    ...     return ts.Loader(images, ts.FixedOrder(len(images), 64), mesh, ["data"], processes=4, pin_memory=torch.cuda.is_available())
    """

    def __init__(self, datasets, order, mesh, batch_axes, *, workers=0, prefetch=2, stall_limit=300.0, pin_memory=False, device="", collate=None, processes=0, graphs=False, augment=None, seed=0, reads=True):
        datasets = list(datasets) if isinstance(datasets, (list, tuple)) else [datasets]
        if collate and any(isinstance(d, Dataset) for d in datasets):
            raise ValueError("collate is for objects of Python's: give it to Dataset.of, or leave it out")
        self._datasets, pool = [Dataset.of(d, collate) for d in datasets], None
        names = _graph_names(self._datasets) if graphs else []
        if processes:
            self._datasets, pool = _in_processes(self._datasets, processes)
            workers, prefetch = max(workers, processes), max(prefetch, processes)
        handles, first = [d._handle for d in self._datasets], self._datasets[0]
        self._augment = _kept(_Augmenting(augment, lambda tensors: first._nested(tensors, first._handle.field_names()))) if augment else None
        options = (workers, prefetch, float(stall_limit), pin_memory, str(device), graphs, names, self._augment.address if augment else 0, index(seed), bool(reads))
        try:
            self._handle = classes.Loader(handles, order._handle, handle_of(mesh), list(batch_axes), *options)
        except BaseException:
            if pool:
                pool.close()
            raise
        self._mesh, self._axes = mesh, list(batch_axes)
        # Not in the destructor of the handle, which holds the interpreter's lock that the threads may wait for.
        self.close = weakref.finalize(self, _close, self._handle, self._datasets, pool)

    def _around(self, call):
        own = [self._augment.errors] if self._augment else []
        return with_cause([d._errors for d in self._datasets if d._errors] + own, call)

    def next(self):
        """The next batch. After an exception the loader is still before that batch."""
        (step, epoch, rows, real, global_rows, global_real), tensors, mask, samples, slices, names = self._around(self._handle.next)
        pairs = tuple(zip(samples[::2], samples[1::2]))
        if len(self._datasets) > 1:
            _require_one_order(self._datasets)
        nested = self._datasets[0]._nested(tensors, names) if tensors else ()
        paths = tuple(names or (_names(nested) if isinstance(nested, dict) else ()))
        return LoadedBatch(step, epoch, tuple(tensors), nested, pairs, _fours(slices), rows, real, global_rows, global_real, mask, paths)

    def epoch(self):
        """Batches until the epoch ends; in the middle of one, until its end.

        >>> loader = ts.Loader(ts.TensorDataset(torch.ones(6)), ts.FixedOrder(6, 4), mesh, ["data"])
        >>> [batch.rows for batch in loader.epoch()]
        [4, 2]
        """
        now = self.next_epoch()
        while True:
            yield self.next()
            if self.next_epoch() != now:
                return

    __iter__ = epoch

    def next_epoch(self):
        """The epoch of the batch that `next()` will give."""
        return self._handle.next_epoch()

    def state(self):
        """The place of `next()`; the same text on every process."""
        return self._handle.state()

    def restore(self, state):
        """Goes on from a state. Raises ConfigurationError if another order saved it."""
        self._handle.restore(state)

    def seek(self, step):
        """Goes on at a step, for orders whose batches have sizes that are known beforehand; raises InvalidArgument for others: they need a state."""
        self._handle.seek(step)

    def require_agreement(self, group=None):
        """Raises MismatchError on every rank unless all have the same order, position, sizes of datasets and mapping. Collective."""
        self._handle.require_agreement(group_of(group)._handle)


@dataclass(frozen=True)
class FieldSharding:
    """How one tensor of a batch is sharded over the axes that do not shard the batch: `FieldSharding({"domain": 2}, whole=True)`.

    `dims`: axes and the dims that they shard, dim 0 being the batch. `sizes`: of their shards; without them those that the ranks have read are gathered.
    `whole`: what each rank has read, which `shard_batch` must be told. True: the complete tensor in those dims, of which it keeps its shard (an image).
    False: its own shard alone (a hyperslab). `scatter_batch` takes complete tensors and asks for nothing.

    >>> ts.FieldSharding({"domain": 2}, {2: [5, 3]}, whole=False)    # two ranks have read 5 and 3 rows
    FieldSharding(dims={'domain': 2}, sizes={2: [5, 3]}, whole=False)
    """

    dims: dict
    sizes: dict | None = None
    whole: bool | None = None


@dataclass(frozen=True)
class ShardedBatch:
    """A global batch as sharded tensors.

    >>> loader = ts.Loader(ts.TensorDataset({"x": torch.ones(5, 3)}), ts.FixedOrder(5, 4), mesh, ["data"])
    >>> batch = ts.shard_batch(loader.next(), mesh, ["data"])
    >>> batch.rows, batch.real, batch.mask, batch.fields["x"].shape
    (4, 4, None, torch.Size([4, 3]))
    """

    step: int
    epoch: int
    tensors: tuple
    """Dim 0 is the global batch."""
    mask: torch.Tensor | None
    """Sharded likewise, true where a row is real; None if all are, on all ranks."""
    rows: int
    real: int
    """Of the global batch."""
    fields: object = ()
    """The tensors by name: dictionaries as in the loaded batch's fields, and tuples in place of lists; also on ranks that have read nothing."""


def _fields(fields):
    if isinstance(fields, FieldSharding):
        fields = [fields]
    named = isinstance(fields, dict)
    names, values = (list(map(str, fields)), fields.values()) if named else ([""] * len(fields), fields)
    for name, f in zip(names, values):
        if not (f is None or isinstance(f, (FieldSharding, dict))):
            raise TypeError(f"fields: {f!r:.60} of {name!r} is no FieldSharding, and no dict of dims by axes as {{'domain': 2}}, which stands in a list")
    given = [FieldSharding({}) if f is None else f if isinstance(f, FieldSharding) else FieldSharding(f) for f in values]
    sizes = [{index(d): [index(n) for n in parts] for d, parts in (f.sizes or {}).items()} for f in given]
    return [(name, list(f.dims), [index(d) for d in f.dims.values()], list(s), list(s.values()), f.whole) for name, f, s in zip(names, given, sizes)]


def _loaded(batch):
    if batch is None:
        return [], [], None, [], []
    if not isinstance(batch, LoadedBatch):
        tensors = pytree.tree_leaves(batch)
        if not tensors or not all(isinstance(t, torch.Tensor) and t.dim() for t in tensors):
            raise TypeError(f"a batch is a LoadedBatch, or tensors with the rows in dim 0, nested in any way, not {batch!r:.60}")
        return [len(tensors[0])] * 2, tensors, None, [], _names(batch)
    numbers = [batch.step, batch.epoch, batch.rows, batch.real, batch.global_rows, batch.global_real]
    return numbers, list(batch.tensors), batch.mask, [number for one in batch.slices for number in one], list(batch.names)


def _sharded(values):
    (step, epoch, rows, real), tensors, mask, names = values
    return ShardedBatch(step, epoch, tuple(tensors), mask, rows, real, _by_names(names, tensors))


def _given(what, batch, mesh, batch_axes, fields):
    """What the library takes of these; what is wrong with them on this rank alone the others are told."""
    handle = handle_of(mesh)
    with told_to_others(mesh, what):
        ops.reads_for_others(handle, list(batch_axes))  # refuses axes
        return (*_loaded(batch), handle, list(batch_axes), _fields(fields))


def shard_batch(batch, mesh, batch_axes, fields=()):
    """What a `Loader` has read as sharded tensors: dim 0 over `batch_axes`, those of the loader, and other dims as `fields` say.

    `batch`: also tensors of any loader, nested in any way, with as many rows as each coordinate of `batch_axes` likes; `fields` of the result is nested likewise.
    `fields`: one entry per tensor, or one for all: a `FieldSharding`, or its `dims` alone; None or nothing: replicated along the other axes. Of a batch
    whose fields are a dictionary also a dictionary, by names ("inputs/wind") or the names of groups ("inputs"); what it does not name is replicated.
    Collective over the mesh. Raises InvalidArgument for an axis or a field that is not there, for dim 0, and where `whole` has to be given, and TypeError for what
    is no batch and no field; what is wrong on one rank alone is PeerFailedError on the others.

    >>> mesh = ts.Mesh({"data": -1, "domain": 1})
    >>> data = ts.TensorDataset({"inputs": {"wind": torch.ones(6, 3, 8, 4)}, "month": torch.arange(6)})
    >>> loader = ts.Loader(data, ts.FixedOrder(6, 2), mesh, ["data"])
    >>> fields = {"inputs": ts.FieldSharding({"domain": 2}, whole=True)}               # each rank has read complete images
    >>> ts.shard_batch(loader.next(), mesh, ["data"], fields).fields["inputs"]["wind"]
    <ShardTensor Float [2, 3, 8, 4] data=Shard(0)[2] domain=Shard(2)[8], local [2, 3, 8, 4] at [0, 0, 0, 0]>
    >>> wind, month = ts.shard_batch(loader.next(), mesh, ["data"], [ts.FieldSharding({"domain": 2}, whole=True), None]).tensors
    >>> image, label = ts.shard_batch([torch.ones(2, 3, 8), torch.ones(2)], mesh, ["data"], {"0": ts.FieldSharding({"domain": 2}, whole=True)}).fields
    """
    if isinstance(batch, LoadedBatch):
        handle = handle_of(mesh)
        with told_to_others(mesh, "shard_batch"):  # nothing that ranks have compared
            return _sharded(ops.shard_batch(*_loaded(batch), handle, list(batch_axes), _fields(fields)))
    sharded = _sharded(ops.shard_batch(*_given("shard_batch", batch, mesh, batch_axes, fields)))
    return replace(sharded, fields=pytree.tree_unflatten(list(sharded.tensors), pytree.tree_structure(batch)))


def scatter_batch(batch, mesh, batch_axes, fields=()):
    """The same where one rank has read for all that share its rows: the one for which `reads_for_others` is true; the others give None.

    Collective over the mesh. What a reading rank finds wrong raises on all of its ranks.

    >>> mesh = ts.Mesh({"data": -1, "domain": 1})
    >>> loader = ts.Loader(ts.TensorDataset(torch.ones(6, 3, 8)), ts.FixedOrder(6, 2), mesh, ["data"])
    >>> batch = loader.next() if ts.reads_for_others(mesh, ["data"]) else None
    >>> ts.scatter_batch(batch, mesh, ["data"], [{"domain": 2}]).tensors[0].shape
    torch.Size([2, 3, 8])
    """
    return _sharded(ops.scatter_batch(*_given("scatter_batch", batch, mesh, batch_axes, fields)))


def augment_batch(batch, samples, augment, seed=0):
    """A `ShardedBatch` with each sample as a function of complete samples makes it, wherever its fields are sharded.

    For samples of which each rank has read its shard: rows are dealt to the ranks, `augment(sample, draws)` sees complete ones, as that of a `Loader`, and the results lie
    as the batch did, bit by bit what a `Loader` makes of complete samples. Where ranks read these, leave it to `Loader(augment=)`, which sends nothing.
    `samples`: those of the `LoadedBatch` that this rank has read. A sharded dim that the function changes is sharded evenly. Collective over the mesh. What
    `augment` raises on one rank all raise, with the sample's number; InvalidArgument for results that do not fit together.

    >>> mesh = ts.Mesh({"data": -1, "domain": 1})
    >>> loader = ts.Loader(ts.TensorDataset({"x": torch.ones(6, 8)}), ts.FixedOrder(6, 2), mesh, ["data"])
    >>> loaded = loader.next()
    >>> batch = ts.shard_batch(loaded, mesh, ["data"], {"x": ts.FieldSharding({"domain": 1}, whole=False)})
    >>> noisy = ts.augment_batch(batch, loaded.samples, lambda sample, draws: {"x": sample["x"] + torch.rand(8, generator=draws)}, seed=3)
    >>> noisy.fields["x"].shape == batch.fields["x"].shape
    True
    """
    leaves, nesting = pytree.tree_flatten(batch.fields)
    by = _Augmenting(augment, lambda tensors: pytree.tree_unflatten(list(tensors), nesting))
    flat = [number for one in samples for number in one]
    made = with_cause([by.errors], ops.augment_batch, [batch.step, batch.epoch, batch.rows, batch.real], leaves, flat, by.address, index(seed))
    places = [next(i for i, leaf in enumerate(leaves) if leaf is t) for t in batch.tensors]
    return replace(batch, tensors=tuple(made[i] for i in places), fields=pytree.tree_unflatten(list(made), nesting))


def reads_for_others(mesh, batch_axes):
    """Whether this rank is at coordinate 0 of the axes that do not shard the batch. Raises InvalidArgument for an unknown axis.

    >>> ts.run_threads(4, lambda rank: ts.reads_for_others(ts.Mesh({"data": 2, "domain": 2}), ["data"]))
    [True, False, True, False]
    """
    return ops.reads_for_others(handle_of(mesh), list(batch_axes))


def _close(handle, _keep, pool=None):
    if pool:
        pool.close()  # no thread waits for a sample then
    handle.close()

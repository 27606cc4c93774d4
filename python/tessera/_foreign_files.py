"""What other programs keep tensors in: folders of several safetensors files with an index, and torch's distributed checkpoints."""

import json
import os

import torch

from tessera._errors import FileError, InvalidArgument
from tessera._library import ops
from tessera._placement import Partial

INDEX = "model.safetensors.index.json"


def _read_index(path):
    """The file of each tensor, by name, as JSON; "" where `path` is no folder with an index."""
    if not os.path.isdir(path):
        return ""
    index = os.path.join(path, INDEX)
    try:
        with open(index, encoding="utf-8") as file:
            files = json.load(file)["weight_map"]
        if not all(isinstance(name, str) and isinstance(one, str) and os.path.basename(one) == one for name, one in files.items()):
            raise ValueError("'weight_map' names a file outside of the folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f"'{index}' cannot be read: {type(error).__name__}: {error}") from error
    return json.dumps(files)


def _of_first(mesh, body):
    """The text that `body()` gives on the mesh's first rank, on all of them; what it raises there is raised on all."""
    group, text, problem, cause = mesh.group(), "", "", None
    if group.rank == 0:
        try:
            text = body()
        except (FileError, OSError) as error:
            problem, cause = str(error), error
    problem, text = json.loads(group.broadcast_bytes(json.dumps([problem, text]).encode(), 0))
    if problem:
        raise FileError(problem) from cause
    return text


def files_of(path, mesh):
    """The files of a folder with an index, and the names of the tensors in each; None where `path` is one file. As the mesh's first rank sees it."""
    text = _of_first(mesh, lambda: _read_index(path))
    if not text:
        return None
    files = {}
    for name, one in json.loads(text).items():
        files.setdefault(os.path.join(path, one), []).append(name)
    return dict(sorted(files.items()))


def load_into_files(files, names, tensors, mesh):
    """Each file into the tensors of its names, after names have been compared."""
    there, here = {name for of_one in files.values() for name in of_one}, dict(zip(names, tensors))
    if there != set(here):
        missing, left = sorted(set(here) - there), sorted(there - set(here))
        raise InvalidArgument(f"load_into: not in the folder: {missing[:8]}; in the folder alone: {left[:8]}")
    for file, of_one in files.items():
        ops.load_into(of_one, [here[name] for name in of_one], mesh._handle, file)


def save_files(names, tensors, mesh, folder, most):
    """Files of at most `most` bytes each, or of one tensor, and their index, which comes last."""
    sizes = [t.numel() * t.element_size() for t in tensors]
    parts, size = [], most + 1
    for i, bytes_of_one in enumerate(sizes):
        if size + bytes_of_one > most:
            parts.append([])
            size = 0
        parts[-1].append(i)
        size += bytes_of_one
    _of_first(mesh, lambda: os.makedirs(folder, exist_ok=True) or "")
    files = {}
    for k, part in enumerate(parts):
        file = f"model-{k + 1:05d}-of-{len(parts):05d}.safetensors"
        ops.save([names[i] for i in part], [tensors[i] for i in part], mesh._handle, os.path.join(folder, file))
        files.update((names[i], file) for i in part)

    def write():
        temporary = os.path.join(folder, f".{INDEX}.tmp")
        with open(temporary, "w", encoding="utf-8") as out:
            json.dump({"metadata": {"total_size": sum(sizes)}, "weight_map": files}, out, indent=2)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, os.path.join(folder, INDEX))
        return ""

    _of_first(mesh, write)


class _Shards(torch.Tensor):
    """This rank's shard of a sharded tensor, as torch.distributed.checkpoint asks for it."""

    @staticmethod
    def __new__(cls, name, tensor):
        from tessera._api import spec, to_local

        lies, local = spec(tensor), to_local(tensor.detach())
        if any(isinstance(p, Partial) for p in lies.placements):
            raise InvalidArgument(f"'{name}' is a partial value, of which no rank has a shard: ts.redistribute() it first ({lies.text})")
        made = torch.Tensor._make_wrapper_subclass(cls, lies.shape, dtype=local.dtype, device=local.device)
        made._lies, made._local = lies, local
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise InvalidArgument(f"{function}: what dcp_state() gives is for torch.distributed.checkpoint's save and load alone")

    def __repr__(self, **_):
        return f"<shard of {self._lies.text}>"

    def _chunks(self):
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        box = ChunkStorageMetadata(offsets=torch.Size(self._lies.local_offset), sizes=torch.Size(self._lies.local_shape))
        return [box] if self._local.numel() else []

    def __create_chunk_list__(self):
        return self._chunks()

    def __create_write_items__(self, name, _):
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self._local)
        data = [TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(self._lies.shape)) for chunk in self._chunks()]
        return [WriteItem(index=MetadataIndex(name, d.chunk.offsets), type=WriteItemType.SHARD, tensor_data=d) for d in data]

    def __get_tensor_shard__(self, _):
        return self._local


def dcp_state(tensors):
    """The tensors of a module, of a dictionary, or one tensor, for `torch.distributed.checkpoint`: each rank saves and loads its shards, of any sizes.

    >>> import torch.distributed.checkpoint as dcp
    >>> saved = dcp.save({"net": ts.dcp_state(net)}, checkpoint_id="runs/7/dcp", no_dist=True)   # on several ranks, under torch.distributed, without no_dist
    >>> dcp.load({"net": ts.dcp_state(net)}, checkpoint_id="runs/7/dcp", no_dist=True)           # into the tensors, whoever saved it, on any mesh

    What it gives shares the tensors' memory, and is for those two calls alone. torch.distributed must be initialised with the ranks of the job. Raises
    `InvalidArgument` for partial values.
    """
    from tessera._api import _named

    return {name: _Shards(name, t) if ops.is_sharded(t) else t.detach() for name, t in zip(*_named(tensors))}

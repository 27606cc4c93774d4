"""What other programs keep tensors in: torch's distributed checkpoints."""

import torch

from tessera._errors import InvalidArgument
from tessera._library import ops
from tessera._placement import Partial


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

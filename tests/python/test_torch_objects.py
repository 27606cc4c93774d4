"""torch's DeviceMesh, DTensor, DistributedDataParallel and fully_shard beside sharded tensors; on processes, for torch.distributed has no threads."""

import re

import pytest
import torch

import tessera as ts
from support import on_ranks


@pytest.mark.parametrize("ranks", [3, 4])
def test_there_and_back(tmp_path, warm_torchrun, ranks):
    done = warm_torchrun(ranks, "dtensor_program.py", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"rank (\d) of \d: there and back", done.stdout)) == [str(r) for r in range(ranks)]


@pytest.mark.parametrize("backend", ["auto", "c10d"])
def test_a_process_group_that_is_there_already(tmp_path, warm_torchrun, backend):
    done = warm_torchrun(4, "given_group_program.py", backend, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(rf"rank (\d) of 4: over {backend}", done.stdout)) == ["0", "1", "2", "3"]


def test_ranks_that_are_threads_are_refused():
    def body(rank):
        mesh = ts.Mesh({"x": 2})
        with pytest.raises(ts.ConfigurationError, match="init_process_group"):
            mesh.to_device_mesh()
        with pytest.raises(ts.ConfigurationError, match="init_process_group"):
            ts.to_dtensor(ts.zeros([4], mesh, ts.Shard(0)))
        with pytest.raises(TypeError, match="not torch.Tensor"):
            ts.from_dtensor(torch.ones(2))

    on_ranks(2, body)

"""PyTorch's own tests of process groups and of DDP (torch.testing._internal.distributed.distributed_test), as they are, on WORLD_SIZE ranks."""

import ast
import inspect
import os
import textwrap

os.environ["BACKEND"] = "gloo"
RANKS = int(os.environ["WORLD_SIZE"])

from place import take_the_place_of_gloo

take_the_place_of_gloo()

from torch.testing._internal.distributed import distributed_test
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

# The events of works in a profile are called "tessera:all_reduce" and not "gloo:all_reduce"; tests/python/c10d_program.py looks at them.
distributed_test.PROFILING_SUPPORTED_BACKENDS.remove("gloo")
distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.remove("gloo")


class C10d(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()


# What `tessera` lacks, as docs/backends.md says.
NOT_OURS = {
    "test_sparse_all_reduce_sum": "sums of sparse tensors are not there",
    "test_monitored_barrier_gloo_rank_0_timeout": "a limit of 0 is kNoTimeout, the group's own",
    "test_ddp_logging_data_cpu": "reads settings of Gloo from whatever goes by its name",
}


def decorators():
    """Those of each test, as they are written, by its name."""
    source = textwrap.dedent(inspect.getsource(DistributedTest._DistTestBase))
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
            yield function.name, " ".join(ast.unparse(one) for one in function.decorator_list)


def of_other_ranks():
    """Tests that are run on more or fewer ranks than these: each on two, unless it skips itself there."""
    return {name for name, words in decorators() if RANKS != (8 if "skip_if_small_worldsize" in words else 4 if "world_size(4)" in words else 2)}


def left_out():
    """Why a test is not run, by name: it would ask for GPUs in each of its processes, and skip itself there."""
    why = dict(NOT_OURS)
    for name, words in decorators():
        if any(word in words for word in ("skip_if_no_gpu", "skip_if_lt_x_gpu", "require_n_gpus", "at_least_x_gpu")):
            why[name] = "needs GPUs"
        elif "NCCL Batch Send Recv Only" in words or "nccl' or" in words or "!= 'nccl'" in words:
            why[name] = "is of NCCL"
        elif "'mpi'" in words and "!=" in words:
            why[name] = "is of MPI"
    return why

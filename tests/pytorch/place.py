"""What the modules of `make test-pytorch` share: how ranks begin, and the backend under the names that PyTorch's tests ask for."""

import os

os.environ.setdefault("MASTER_ADDR", "127.0.0.1")

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase

import tessera


def take_the_place_of_gloo():
    """PyTorch's tests choose by names of backends that they know: what is called gloo is tessera from now on, in this process."""
    plugins = dist.Backend._plugins
    dist.Backend._ensure_backend_registered("gloo")
    if "GLOO" not in plugins:
        raise SystemExit("this torch makes its groups over Gloo in another way: test-pytorch is for torch 2.15")
    plugins["GLOO"] = plugins["GLOO"]._replace(creator_fn=tessera._c10d._meet)


class Ranks(MultiProcessTestCase):
    """Ranks of `tessera`, with a group over PyTorch's own Gloo to compare with."""

    RANKS = 2

    @property
    def world_size(self):
        return self.RANKS

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def begin(self):
        torch.set_num_threads(1)
        dist.init_process_group("tessera", rank=self.rank, world_size=self.world_size, init_method=f"file://{self.file_name}")
        self.assertIn(dist.group.WORLD._get_backend(torch.device("cpu")).name(), ("shm", "hosts"))
        self.groups = {"gloo": dist.new_group(backend="gloo"), "tessera": dist.group.WORLD}

    def same_over_both(self, case, what):
        """`case(group)` gives tensors: over Gloo, and then over tessera."""
        expected, got = ([t.detach() for t in case(self.groups[name])] for name in ("gloo", "tessera"))
        self.assertEqual(len(got), len(expected), msg=what)
        for i, (a, b) in enumerate(zip(got, expected)):
            self.assertEqual(a, b, msg=f"{what}, tensor {i}")

"""One rank of bench_fsdp in Python. The models and numbers are those of rank.cpp."""

import ctypes
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from side_rank import Block, fill, pattern, serve, start_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Counter:
    """Bytes of tensors (counter.h)."""

    def __init__(self, path):
        library = ctypes.CDLL(path)
        library.bench_counter_bytes.restype = ctypes.c_int64
        self.restart, self.bytes = library.bench_counter_restart, library.bench_counter_bytes
        library.bench_counter_install()


def make(name, batch, counted):
    if name.startswith("units"):
        net = torch.nn.Sequential(*(torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4))) for _ in range(32)))
        return net, (batch, 16)
    width, blocks = (64, 8) if name.startswith("small") else (256, 6)
    return torch.nn.Sequential(*(Block(width) for _ in range(blocks))), (batch, 8 if counted else 32, width)


def main():
    torch.set_num_threads(1)
    path, backend, name = sys.argv[1:]
    counted, plain = name.endswith(" memory"), name.endswith(" plain")
    counter = Counter(path) if counted else None
    start_group(backend)
    net, shape = make(name, 1 if counted else 4, counted)
    fill(net)
    if not plain:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for unit in net:
            fully_shard(unit, mesh=mesh)
        fully_shard(net, mesh=mesh)
    data, target = pattern(shape, dist.get_rank()), pattern(shape, dist.get_rank() + 0.5)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        loss = F.mse_loss(net(data), target)
        loss.backward()
        optimizer.step()
        return loss

    def value(loss):
        loss = loss.detach().clone()
        if not plain:  # of all samples, as a sharded loss is
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        return loss.item()

    serve(step, value, counter)
    dist.destroy_process_group()


main()

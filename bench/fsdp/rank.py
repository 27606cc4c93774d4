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


def shard_theirs(net):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in net:
        fully_shard(unit, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return lambda t: t


def shard_ours(net):
    import tessera as ts

    mesh = ts.Mesh({"data": ts.world_size()})
    ts.fully_shard(net, mesh)
    return lambda t: ts.from_local(t, mesh, [ts.Shard(0)])


def start(backend):
    """This rank. "ours": the library's fully_shard from Python, over Gloo; else what Python's is over."""
    if backend != "ours":
        start_group(backend)
        return dist.get_rank()
    import tessera as ts

    ts.init("gloo")
    return ts.rank()


def serve_construction(counter):
    """A step makes the model "wide" on the meta device, shards it, and fills the shards."""
    made = []

    def step():
        made.clear()
        with torch.device("meta"):
            net = torch.nn.Sequential(*(Block(256) for _ in range(6)))
        shard_theirs(net)
        net.to_empty(device="cpu")
        for module in net.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        made.append(net)
        return net

    serve(step, lambda net: sum(p.numel() * p.element_size() for p in net.parameters()), counter)


def main():
    torch.set_num_threads(1)
    path, backend, name = sys.argv[1:]
    counted, plain, ours = name.endswith(" memory"), name.endswith(" plain"), backend == "ours"
    counter = Counter(path) if counted else None
    rank = start(backend)
    if name.startswith("construction"):
        serve_construction(counter)
        return dist.destroy_process_group()
    net, shape = make(name, 1 if counted else 4, counted)
    fill(net)
    data, target = pattern(shape, rank), pattern(shape, rank + 0.5)
    if not plain:
        place = shard_ours(net) if ours else shard_theirs(net)
        data, target = place(data), place(target)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        loss = F.mse_loss(net(data), target)
        loss.backward()
        optimizer.step()
        return loss

    def value(loss):
        loss = loss.detach().clone()
        if not plain and not ours:  # of all samples, as a sharded loss is
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        return loss.item()

    serve(step, value, counter)
    if not ours:
        dist.destroy_process_group()


main()

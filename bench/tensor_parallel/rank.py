"""One rank of bench_tensor_parallel in Python. The model and numbers are those of rank.cpp."""

import math
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

SIZE = 16


def pattern(shape, phase):
    return torch.sin(torch.arange(math.prod(shape), dtype=torch.float64) * 0.7 + phase).to(torch.float32).view(shape)


class Attention(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query, self.key, self.value, self.out = (torch.nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x).view(x.size(0), x.size(1), -1, SIZE).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.attention = torch.nn.LayerNorm(width), Attention(width)
        self.second, self.mlp = torch.nn.LayerNorm(width), MLP(width)

    def forward(self, x):
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = sys.argv[1]
    sequence = model.endswith("sequence")
    width, blocks, length = (64, 4, 32) if model.startswith("small") else (256, 2, 128)
    net = torch.nn.Sequential(*(Block(width) for _ in range(blocks)))
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(pattern(p.shape, i + 1) * (1 / math.sqrt(p.shape[1]) if p.dim() > 1 else 0.1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shards = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    out = {"output_layouts": Shard(1)} if sequence else {}
    plan = {}
    for layer in ("query", "key", "value"):
        plan[f"attention.{layer}"] = ColwiseParallel()
    plan |= {"attention.out": RowwiseParallel(**out), "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel(**out)}
    if sequence:
        plan |= {
            "first": SequenceParallel(),
            "second": SequenceParallel(),
            "attention": PrepareModuleInput(**shards),
            "mlp": PrepareModuleInput(**shards),
        }
    for block in net:
        parallelize_module(block, mesh, plan)
    data, target = pattern((4, length, width), 0), pattern((4, length, width), 0.5)
    if sequence:
        data, target = (distribute_tensor(t, mesh, [Shard(1)]) for t in (data, target))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        if sequence:
            y = net(data.to_local())
            loss = F.mse_loss(y.to_local() if hasattr(y, "to_local") else y, target.to_local(), reduction="sum") / target.numel()
        else:
            loss = F.mse_loss(net(data), target)
        loss.backward()
        optimizer.step()
        return loss

    def value(loss):
        loss = loss.detach().clone()
        if sequence:
            dist.all_reduce(loss)
        return loss.item()

    for _ in range(5):
        loss = step()
    print(f"ready {value(loss):.9g}", flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            loss = step()
        seconds = time.perf_counter() - start
        print(f"{seconds:.9g} {value(loss):.9g}", flush=True)
    dist.destroy_process_group()


main()

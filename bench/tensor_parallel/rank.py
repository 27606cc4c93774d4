"""One rank of bench_tensor_parallel in Python. The model and numbers are those of rank.cpp."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from side_rank import Block, fill, pattern, serve
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = sys.argv[1]
    sequence = model.endswith("sequence")
    width, blocks, length = (64, 4, 32) if model.startswith("small") else (256, 2, 128)
    net = torch.nn.Sequential(*(Block(width) for _ in range(blocks)))
    fill(net)
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

    serve(step, value)
    dist.destroy_process_group()


main()

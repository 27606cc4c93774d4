"""One rank of bench_ddp in Python. The models and numbers are those of rank.cpp."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from side_rank import device_of, fill, pattern, serve, start_group
from torch.nn.parallel import DistributedDataParallel


def pad_sphere(field):
    return F.pad(F.pad(field, (1, 1, 0, 0), mode="circular"), (0, 0, 1, 1), mode="replicate")


class WindNet(torch.nn.Module):
    def __init__(self, channels=14, hidden=24, layers=3):
        super().__init__()
        self.around = torch.nn.Conv2d(channels, 2, 1)
        sizes = [channels] + [hidden] * (layers - 1) + [2]
        self.convolutions = torch.nn.ModuleList(torch.nn.Conv2d(a, b, 3) for a, b in zip(sizes, sizes[1:]))

    def forward(self, x):
        field = x
        for i, convolution in enumerate(self.convolutions):
            if i > 0:
                field = F.gelu(field)
            field = convolution(pad_sphere(field))
        return self.around(x) + field


def perceptron(width, depth):
    layers = []
    for _ in range(depth):
        layers += [torch.nn.Linear(width, width), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers)


def make(model, rank):
    if model == "winds":
        net, shapes = WindNet(), ((4, 14, 73, 144), (4, 2, 73, 144))
    elif model == "small":
        net, shapes = perceptron(32, 64), ((16, 32), (16, 32))
    elif model == "wide":
        net, shapes = perceptron(1024, 4), ((32, 1024), (32, 1024))
    else:
        raise ValueError(f"no model {model}")
    fill(net)
    return net, pattern(shapes[0], rank), pattern(shapes[1], rank + 0.5)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--backend", default="gloo", choices=["gloo", "tessera"])
    parser.add_argument("model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = device_of(options.device, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    start_group(options.backend if device.type == "cpu" else "nccl")
    net, data, target = make(options.model, dist.get_rank())
    net, data, target = net.to(device), data.to(device), target.to(device)
    parallel = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        loss = F.mse_loss(parallel(data), target)
        loss.backward()
        optimizer.step()
        return loss

    settle = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    serve(step, lambda loss: loss.item(), settle=settle)
    dist.destroy_process_group()


main()

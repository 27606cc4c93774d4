"""What ranks in Python of the benchmarks with two sides share (sides.h; side_rank.h is their like in C++)."""

import math
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

HEAD_SIZE = 16


def pattern(shape, phase):
    """Numbers that both languages make alike."""
    return torch.sin(torch.arange(math.prod(shape), dtype=torch.float64) * 0.7 + phase).to(torch.float32).view(shape)


def fill(net):
    """The same parameters in both languages."""
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(pattern(p.shape, i + 1) * (1 / math.sqrt(p.numel() // p.shape[0]) if p.dim() > 1 else 0.1))


class Attention(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query, self.key, self.value, self.out = (torch.nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        layers = (self.query, self.key, self.value)
        q, k, v = (layer(x).view(x.size(0), x.size(1), -1, HEAD_SIZE).transpose(1, 2) for layer in layers)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(torch.nn.Module):
    """A transformer's block; parameters in the order of C++."""

    def __init__(self, width):
        super().__init__()
        self.first, self.attention = torch.nn.LayerNorm(width), Attention(width)
        self.second, self.mlp = torch.nn.LayerNorm(width), MLP(width)

    def forward(self, x):
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


def start_group(backend):
    """The default group. "tessera": the package that registers it has to be found (PYTHONPATH)."""
    if backend == "tessera":
        try:
            import tessera  # noqa: F401
        except ImportError as e:
            print(f"skipped: {e}", flush=True)
            sys.exit(77)
    dist.init_process_group(backend)


def device_of(name, rank, world):
    """This rank's device: the CPU, or a GPU, which ranks share where there are fewer (NCCL 2.30 and newer)."""
    if name == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if world > gpus:
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    torch.cuda.set_device(rank % gpus)
    return torch.device("cuda", rank % gpus)


def serve(step, value, peak=None, settle=lambda: None):
    """Steps as the driver says, until the end of input. `step()` gives what `value(...)` makes the loss of, which is not timed; `peak`: what counts the
    bytes of tensors (`restart()`, `bytes()`); `settle()` waits for what a device has been given."""
    for _ in range(5):
        loss = step()
    print(f"ready {value(loss):.9g}", flush=True)
    for line in sys.stdin:
        if peak:
            peak.restart()
        settle()
        computed, start = time.thread_time(), time.perf_counter()
        for _ in range(int(line)):
            loss = step()
        settle()
        seconds, cpu = time.perf_counter() - start, time.thread_time() - computed
        most = peak.bytes() if peak else 0
        print(f"{seconds:.9g} {value(loss):.9g} {cpu:.9g} {most}", flush=True)

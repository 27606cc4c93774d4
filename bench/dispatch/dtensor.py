"""The cases of bench_dispatch with Python's DTensor, beside plain Python tensors. A line "case<tab>calls" on standard input is answered by
"plain dtensor", microseconds a call."""

import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))


def place(t):
    return distribute_tensor(t, mesh, [Shard(0)])


def timed(f, calls):
    start = time.perf_counter()
    for _ in range(calls):
        f()
    return (time.perf_counter() - start) / calls * 1e6


a, b, w = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8, 3)
da, db, dw = place(a), place(b), distribute_tensor(w, mesh, [Replicate()])
ga, gd = a.clone().requires_grad_(), place(a).detach().requires_grad_()


def backward(x, y):
    (x * y).backward(y)
    x.grad = None


def adam(put):
    parameters = []
    for _ in range(200):
        p = put(torch.randn(16, 16)).detach().requires_grad_()
        p.grad = put(torch.randn(16, 16)).detach()
        parameters.append(p)
    return torch.optim.Adam(parameters, foreach=False)


plain_adam, sharded_adam = adam(lambda t: t), adam(place)

CASES = {
    "add": (lambda: a + b, lambda: da + db),
    "add_": (lambda: a.add_(b), lambda: da.add_(db)),
    "relu": (lambda: a.relu(), lambda: da.relu()),
    "t": (lambda: a.t(), lambda: da.t()),
    "view": (lambda: a.view(4, 2, 4), lambda: da.view(4, 2, 4)),
    "mm": (lambda: a.mm(w), lambda: da.mm(dw)),
    "detach": (lambda: a.detach(), lambda: da.detach()),
    "add with grad": (lambda: ga + b, lambda: gd + db),
    "mm with grad": (lambda: ga.mm(w), lambda: gd.mm(dw)),
    "mul forward and backward": (lambda: backward(ga, b), lambda: backward(gd, db)),
    "Adam step, 200 parameters": (plain_adam.step, sharded_adam.step),
}
meshes = {}
shapes = 0


def new_shape(name, calls):
    """The first use of `calls` shapes each."""
    global shapes
    axes = int(name.split(", ")[2].split()[0])
    if axes not in meshes:
        meshes[axes] = init_device_mesh("cpu", (1,) * axes)
    product = name.startswith("mm")
    plain = sharded = 0.0
    for _ in range(calls):
        shapes += 1
        x, y = torch.zeros(shapes % 40 + 1, shapes // 40 + 1), torch.zeros(shapes // 40 + 1, 3)
        dx = distribute_tensor(x, meshes[axes], [Shard(0)] + [Replicate()] * (axes - 1))
        dy = distribute_tensor(y, meshes[axes], [Replicate()] * axes)
        plain += timed((lambda: x.mm(y)) if product else (lambda: x + x), 1)
        sharded += timed((lambda: dx.mm(dy)) if product else (lambda: dx + dx), 1)
    return plain / calls, sharded / calls


print(torch.__version__, flush=True)
for line in sys.stdin:
    name, calls = line.rstrip("\n").split("\t")
    if name in CASES:
        plain, sharded = (timed(f, int(calls)) for f in CASES[name])
    else:
        plain, sharded = new_shape(name, int(calls))
    print(plain, sharded, flush=True)
dist.destroy_process_group()

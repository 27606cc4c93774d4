"""The forward cases of bench_halo with ShardTensor of NVIDIA PhysicsNeMo, beside plain convolution of the same local part: two ranks over Gloo, one
thread each, samples taken and figures made as bench_halo does.

usage: torchrun --nproc-per-node 2 physicsnemo.py [--out FILE] [--only PATTERN] [--pairs N]

FILE keeps its records of other cases. Status 3: the pattern finds no case. Other options are bench_halo's.
"""

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from importlib.metadata import version

# This file's folder is where Python looks first, and there "physicsnemo" is this file.
here = os.path.dirname(os.path.realpath(__file__))
sys.path = [path for path in sys.path if os.path.realpath(path) != here]
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from physicsnemo.domain_parallel import ShardTensor, register_custom_ops
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

SIZES = (16, 32, 64, 128, 256, 512, 1024)
SPIN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while os.getppid() == int(sys.argv[2]):
    for _ in range(100000):
        pass
"""


def keep_cores_awake():
    """harness.h says why; processes, since a thread would take the interpreter's lock."""
    arguments = [sys.executable, "-S", "-c", SPIN]
    return [subprocess.Popen([*arguments, str(cpu), str(os.getpid())]) for cpu in os.sched_getaffinity(0)]


def sample(call, repeats):
    """Seconds of one call, `repeats` in a row; the slower rank counts."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    slowest = torch.tensor([(time.perf_counter() - start) / repeats], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def alternate(count, sharded, plain):
    pairs = [(sharded(), plain())]
    for i in range(count):
        pairs.append((sharded(), plain()) if i % 2 == 0 else (plain(), sharded())[::-1])
    return pairs[1:]


def upper_bound_of_median(values):
    """The order statistic that the median is below with a probability of 0.95."""
    n = len(values)
    below = 0.0
    for k in range(n):
        below += math.comb(n, k) / 2**n
        if below >= 0.95:
            return sorted(values)[k]
    return max(values)


def measure(h, mesh, pairs):
    rank = dist.get_rank()
    torch.manual_seed(h)
    field, weight, bias = torch.randn(1, 8, h, h), torch.randn(8, 8, 3, 3), torch.randn(8)
    local = field.chunk(2, dim=2)[rank].contiguous()
    x = ShardTensor.from_local(local, mesh, [Shard(2)], sharding_shapes={0: [tuple(local.shape)] * 2})
    # As bench_halo has them; plain ones would become this in each call.
    w, b = (DTensor.from_local(t, mesh, [Replicate()]) for t in (weight, bias))

    def sharded():
        return F.conv2d(x, w, b, padding=1)

    def plain():
        return F.conv2d(local, weight, bias, padding=1)

    expected = F.conv2d(field, weight, bias, padding=1)
    result = sharded()
    assert result.shape == expected.shape
    torch.testing.assert_close(result.to_local(), expected.chunk(2, dim=2)[rank])
    for _ in range(3):
        sample(sharded, 2)
        sample(plain, 2)
    repeats = min(max(int(3e-3 / sample(plain, 3)), 1), 200)
    times = alternate(pairs, lambda: sample(sharded, repeats), lambda: sample(plain, repeats))
    ratios = [a / b for a, b in times]
    return {
        "metric": "time",
        "value": statistics.median(a for a, _ in times) * 1e6,
        "unit": "us",
        "reference": "plain",
        "reference_value": statistics.median(b for _, b in times) * 1e6,
        "ratio": upper_bound_of_median(ratios),
        "median_ratio": statistics.median(ratios),
        "limit": None,
        "holds": True,
    }


def write(path, records):
    names = {record["case"] for record in records}
    kept = []
    if os.path.exists(path):
        with open(path) as file:
            kept = [record for record in json.load(file) if record["case"] not in names]
    with open(path, "w") as file:
        json.dump(kept + records, file, indent=1, sort_keys=True)
        file.write("\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--only", default="")
    parser.add_argument("--pairs", type=int, default=31)
    options, _ = parser.parse_known_args()
    cases = {f"forward H={h} physicsnemo": h for h in SIZES}
    cases = {name: h for name, h in cases.items() if re.search(options.only, name)}
    if not cases:
        sys.exit(3)
    if options.pairs < 31 or os.cpu_count() < 2:
        sys.exit("physicsnemo.py needs 31 pairs and 2 cores at least")
    torch.set_num_threads(1)
    register_custom_ops()  # by itself only where there is a GPU
    # Not by its DistributedManager, which without a GPU names the device "cpu" where torch 2.15 wants "cpu:0".
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    meta = {
        "benchmark": "halo",
        "cores": os.cpu_count(),
        "pairs": options.pairs,
        "physicsnemo": version("nvidia-physicsnemo"),
        "python": sys.version.split()[0],
        "threads_per_rank": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    spinning = keep_cores_awake()
    records = []
    with torch.no_grad():
        for name, h in cases.items():
            records.append({"case": name, **measure(h, mesh, options.pairs), "meta": meta})
    for process in spinning:
        process.kill()
    if dist.get_rank() == 0:
        print(f"{'case':40} {'metric':10} {'physicsnemo':>12} {'reference':>12} {'unit':6} {'reference is':22} {'ratio':>8}")
        for r in records:
            numbers = f"{r['value']:12.4g} {r['reference_value']:12.4g}"
            print(f"{r['case']:40} {r['metric']:10} {numbers} {r['unit']:6} {r['reference']:22} {r['ratio']:8.4g}")
        if options.out:
            write(options.out, records)
    dist.barrier()
    dist.destroy_process_group()


main()

"""Samples a second of ts.Loader on a set that Python decodes, by threads and by worker processes, and of torch's DataLoader beside it.

usage: PYTHONPATH=build/release/python .env/bin/python bench/loader/processes.py [BATCHES]
"""

import statistics
import sys
import time

import torch
from torch.utils.data import DataLoader

import tessera as ts

ROWS, TRIES = 16, 5


class Texts:
    """Numbers as text, read one by one: what holds the interpreter's lock."""

    def __init__(self, samples):
        self.samples, self.text = samples, " ".join(map(str, range(40_000)))

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        total = 0
        for word in self.text.split():
            total += int(word) ^ index
        return torch.full((3, 64, 64), float(total % 255)), index


def rate(batches, take):
    """Of the batches after the first ones, which wait for processes to start."""
    for _ in range(4):
        take()
    begin = time.perf_counter()
    for _ in range(batches):
        take()
    return batches * ROWS / (time.perf_counter() - begin)


def ours(batches, **options):
    data = Texts(ROWS * (batches + 8))
    loader = ts.Loader(data, ts.FixedOrder(len(data), ROWS, seed=1), ts.Mesh({"data": 1}), ["data"], **options)
    try:
        return rate(batches, loader.next)
    finally:
        loader.close()


def torchs(batches, workers):
    loader = iter(DataLoader(Texts(ROWS * (batches + 8)), ROWS, shuffle=True, num_workers=workers))
    return rate(batches, lambda: next(loader))


def main():
    batches = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    ts.init()
    torch.set_num_threads(1)
    ways = {
        "1 thread": lambda: ours(batches, workers=1),
        "2 threads": lambda: ours(batches, workers=2),
        "1 process": lambda: ours(batches, processes=1),
        "2 processes": lambda: ours(batches, processes=2),
        "DataLoader, 1 worker": lambda: torchs(batches, 1),
        "DataLoader, 2 workers": lambda: torchs(batches, 2),
    }
    found = {name: [] for name in ways}
    for _ in range(TRIES):
        for name, way in ways.items():
            found[name].append(way())
    for name, rates in found.items():
        print(f"{name:>22}: {statistics.median(rates):7.1f} samples/s")
    print(f"2 processes beside 1: {statistics.median(b / a for a, b in zip(found['1 process'], found['2 processes'])):.2f}")


if __name__ == "__main__":
    main()

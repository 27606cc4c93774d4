"""The reference of bench_loader: torch's DataLoader with DistributedSampler over rows of a memory-mapped file of tokens.

usage: torch_loader.py FILE ROW BATCH WORKERS

Each line "EPOCH" on standard input runs one epoch; the answer is "SECONDS ROWS".
"""

import sys
import time

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Tokens(Dataset):
    def __init__(self, path, row):
        self.tokens = numpy.memmap(path, dtype=numpy.int32, mode="r")
        self.row = row

    def __len__(self):
        return len(self.tokens) // self.row

    def __getitem__(self, i):
        return torch.from_numpy(self.tokens[i * self.row : (i + 1) * self.row])


def main():
    path, row, batch, workers = sys.argv[1], *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    data = Tokens(path, row)
    sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=1)
    loader = DataLoader(
        data,
        batch_size=batch,
        sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
        prefetch_factor=2 if workers else None,
    )
    for line in sys.stdin:
        sampler.set_epoch(int(line))
        start = time.perf_counter()
        rows = sum(len(tokens) for tokens in loader)
        print(time.perf_counter() - start, rows, flush=True)


if __name__ == "__main__":
    import warnings

    warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
    main()

"""One tree, everything on it: fields sharded over `domain`, data parallelism over `data`, the loader on the same mesh. Beside one process.

    tessera run -n 4 -- python examples/python/03_groups.py        # or torchrun --nproc-per-node 4
"""

import copy

import torch
from torch import nn

import tessera as ts

TREE = """
name: world
children:
  - {name: domain, size: 2}    # adjacent ranks share a sample
  - {name: data}               # open: what is left of the world
"""
FIELDS = torch.sin(torch.arange(16 * 12 * 6, dtype=torch.float64)).reshape(16, 1, 12, 6)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(net(x), x * 0.5)
    loss.backward()
    optimizer.step()
    return loss.item()


def main() -> None:
    torch.set_num_threads(1)
    ts.init(timeout=60)
    ts.create_process_groups(ts.parse_group_config(TREE))
    mesh, domain = ts.Mesh.of("world"), ts.Mesh.of("domain")

    torch.manual_seed(1)
    alone = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 1, 3, padding=1)).double()
    net = ts.DistributedDataParallel(ts.distribute_module(copy.deepcopy(alone), domain), ts.group("data"))

    # Each rank reads its rows of its samples, and nothing else.
    rows = slice(0, 7) if ts.group_rank("domain") == 0 else slice(7, 12)
    order = ts.FixedOrder(len(FIELDS), 4, seed=1)
    loader = ts.Loader(ts.TensorDataset(FIELDS[:, :, rows]), order, mesh, ["data"])
    loader.require_agreement()

    ours, theirs = torch.optim.SGD(net.parameters(), 0.1), torch.optim.SGD(alone.parameters(), 0.1)
    whole = ts.Loader(ts.TensorDataset(FIELDS), order, mesh, [])  # for comparison: no axis shards this batch
    mean = float("nan")
    for step in range(4):
        x = ts.from_local(loader.next().tensors[0], domain, [ts.Shard(2)])
        mine, expected = train(net, ours, x), train(alone, theirs, whole.next().tensors[0])
        mean = ts.group("data").all_reduce(torch.tensor([mine], dtype=torch.float64), "avg").item()
        assert abs(mean - expected) < 1e-12, (step, mean, expected)
    for p, q in zip(net.parameters(), alone.parameters()):
        assert torch.allclose(ts.full_tensor(p.detach()), q, rtol=0, atol=1e-12)
    if ts.rank() == 0:
        print(f"groups: loss {mean:.6f} on {mesh.axes}, as on one process", flush=True)


main()

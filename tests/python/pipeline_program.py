"""Run by `tessera run` on 3 ranks: a model in stages on real processes, and a loss that raises. Beside one process."""

import torch

import tessera as ts
from support import assert_same
from test_pipeline import CUTS, drawn, loss_of

torch.set_num_threads(1)
ts.init(timeout=120)
ranks, rank = ts.world_size(), ts.rank()
schedule, failing = ts.Schedule("zero_bubble_v", ranks, 5), False
(net, x, y), (plain, _, _) = drawn(), drawn()


def loss(output, target):
    return 1 / 0 if failing else loss_of(output, target)


pipeline = ts.Pipeline(ts.split(net, CUTS), schedule, ts.Mesh({"pipe": ranks}), "pipe", loss)


def update(module):
    with torch.no_grad():
        for p in module.parameters():
            p -= 0.1 * p.grad
            p.grad = None


for step in range(4):
    failing = step == 2
    try:
        result = pipeline.step(list(x.split([2, 0, 5])), list(y.split([2, 0, 5])))
    except (ts.PipelineError if rank == schedule.placement[-1] else ts.PeerFailedError) as error:
        assert failing and "ZeroDivisionError" in str(error)
        pipeline.module.zero_grad()
        print(f"rank {rank} goes on", flush=True)
        continue
    expected = loss_of(plain(x), y)
    expected.backward()
    assert abs(result.loss - expected.item()) < 1e-12
    update(pipeline.module)
    update(plain)
for name, p in pipeline.module.named_parameters():
    assert_same(p, dict(plain.named_parameters())[name], name)
print(f"rank {rank} of {ranks}: loss {result.loss:.6f}", flush=True)

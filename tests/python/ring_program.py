"""Second derivatives of attention over a sequence that is sharded over processes, beside the definition on one."""

import math
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import tessera as ts


def by_definition(q, k, v, causal):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).tril().logical_not(), -math.inf)
    return scores.softmax(-1) @ v


def second_derivatives(y, inputs):
    """The value, its gradients, and those of a penalty on them."""
    first = torch.autograd.grad(y.square().sum(), inputs, create_graph=True)
    return [y, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), inputs)]


def main():
    torch.set_num_threads(1)
    ts.init(timeout=120)
    ranks, mesh = ts.world_size(), ts.Mesh({"sequence": ts.world_size()})
    ts.set_policies("error")  # nothing is gathered
    compared = 0
    for rows in ([11] if ranks == 1 else [7, 4] + [0] * (ranks - 2), [11 - 2 * (ranks - 1)] + [2] * (ranks - 1)):
        for causal in (False, True):
            torch.manual_seed(compared)
            plain = [torch.randn(2, 2, 11, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
            sharded = [ts.distribute_tensor(t.detach(), mesh, [ts.Shard(2)], {2: rows}).requires_grad_() for t in plain]
            # One rank has no ring, and libtorch's fused kernel no second derivative: there the program asks for the composite, as without Tessera.
            with sdpa_kernel([SDPBackend.MATH]):
                y = torch.nn.functional.scaled_dot_product_attention(*sharded, is_causal=causal)
            assert ranks == 1 or ts.spec(y).sizes == {2: rows}
            for got, expected in zip(second_derivatives(y, sharded), second_derivatives(by_definition(*plain, causal), plain), strict=True):
                off = (ts.full_tensor(got.detach()) - expected).abs().max().item()
                assert off <= 1e-10 * max(1e-3, expected.abs().max().item()), (rows, causal, off)
            compared += 1
    print(f"rank {ts.rank()} of {ranks}: {compared} second derivatives", flush=True)
    return 0


sys.exit(main())

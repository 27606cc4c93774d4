"""Fields from Python, under the names that C++ has: made from nothing, halos, neighbourhood attention."""

import pytest
import torch
from torch import nn

import tessera as ts
from support import assert_same, draw, on_ranks, whole


@pytest.mark.parametrize("edge", ["zero", "circular", "reflect", "replicate"])
def test_halo_exchange(edge):
    sizes, u = [4, 0, 3], draw(7, 2)
    pads = {"zero": ("constant", 0), "circular": ("circular", 1), "reflect": ("reflect", 1), "replicate": ("replicate", 1)}
    columns = u.t()[None]
    padded = nn.functional.pad(columns, (2, 1), mode=pads[edge][0])[0].t()

    def body(rank):
        mesh = ts.Mesh({"x": 3})
        t = ts.distribute_tensor(u, mesh, [ts.Shard(0)], {0: sizes}).detach().requires_grad_(True)
        h = ts.halo_exchange(t, {0: (2, 1, edge)})
        begin = sum(sizes[:rank])
        assert torch.equal(h, padded[begin : begin + sizes[rank] + 3])
        plain = ts.halo_exchange(t, {0: 1})
        assert plain.shape == (sizes[rank] + 2, 2)
        weight = draw(10, 2, seed=8)
        (h * weight[begin : begin + len(h)]).sum().backward()
        assert t.grad.shape == t.shape
        return whole(t.grad)

    grads = on_ranks(3, body)
    x = u.clone().requires_grad_(True)
    again = nn.functional.pad(x.t()[None], (2, 1), mode=pads[edge][0])[0].t()
    total, begin = 0, 0
    for n in sizes:
        part = again[begin : begin + n + 3]
        total, begin = total + (part * draw(10, 2, seed=8)[begin : begin + len(part)]).sum(), begin + n
    total.backward()
    for grad in grads:
        assert_same(grad, x.grad)


def test_neighborhood_attention_on_a_sharded_field():
    q, k, v = (draw(2, 7, 5, 2, 4, seed=i) for i in range(3))
    expected = ts.neighborhood_attention_2d(q, k, v, [3, 3])
    causal = ts.neighborhood_attention_1d(q[:, :, 0], k[:, :, 0], v[:, :, 0], [4], [1], [True])

    def body(rank):
        mesh = ts.Mesh({"x": 3})
        cut = [ts.distribute_tensor(t, mesh, [ts.Shard(1)], {1: [4, 1, 2]}) for t in (q, k, v)]
        out = ts.neighborhood_attention_2d(*cut, [3, 3])
        assert_same(out, expected)
        assert ts.spec(out).placements == (ts.Shard(1),)
        rows = [ts.distribute_tensor(t[:, :, 0].contiguous(), mesh, [ts.Shard(1)]) for t in (q, k, v)]
        assert_same(ts.neighborhood_attention(*rows, [4], causal=[True]), causal)
        with pytest.raises(ValueError, match="3d"):
            ts.neighborhood_attention_3d(*cut, [3, 3])

    on_ranks(3, body)


def test_sharded_tensors_from_nothing_and_where_they_go():
    def body(rank):
        mesh = ts.Mesh({"x": 3})
        where, sizes = [ts.Shard(0)], {0: [4, 0, 3]}
        assert_same(ts.zeros([7, 2], mesh, where, sizes), torch.zeros(7, 2))
        assert_same(ts.full([7, 2], 2.5, mesh, where, sizes, torch.float64), torch.full((7, 2), 2.5, dtype=torch.float64))
        assert_same(ts.ones([7], mesh, where), torch.ones(7))
        assert ts.empty([7, 2], mesh, where, dtype=torch.int32).dtype is torch.int32
        ts.manual_seed(4)
        drawn = [ts.full_tensor(make([7, 2], mesh, where, sizes)) for make in (ts.rand, ts.randn)]
        ts.manual_seed(4)
        again = [ts.full_tensor(make([7, 2], mesh, [ts.Replicate()])) for make in (ts.rand, ts.randn)]
        assert all(torch.equal(a, b) for a, b in zip(drawn, again))
        t = ts.rand([7, 6], mesh, where, sizes)
        ((name, axes, arrived),) = ts.explain_redistribution(t, [ts.Shard(1)])
        assert name == "all_to_all" and axes == ("x",) and arrived == 2 * (7 - sizes[0][rank])
        assert_same(ts.start_redistribute(t, [ts.Shard(1)]).wait(), t)
        assert "0" in ts.visualize_sharding(t) and "<svg" in ts.visualize_sharding_svg(t)

    on_ranks(3, body)

"""Fields from Python: made from nothing, halos, neighbourhood attention, and which operators of a model leave a field sharded."""

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


def test_which_operators_of_a_vision_transformer_stay_sharded():
    """Tokens and windows of a field whose rows are sharded: each operator, what its result is like, and what it sends."""
    calls = []

    def body(rank):
        ts.set_policies("error")  # one that would gather raises
        mesh = ts.Mesh({"domain": 2})
        image = ts.distribute_tensor(draw(2, 3, 24, 16), mesh, [ts.Shard(2)], {2: [16, 8]})
        net = nn.Module()
        net.patches, net.norm, net.linear = nn.Conv2d(3, 8, 4, stride=4).double(), nn.LayerNorm(8).double(), nn.Linear(8, 8).double()
        net.token, net.positions = nn.Parameter(torch.zeros(1, 1, 8, dtype=torch.float64)), nn.Parameter(torch.zeros(1, 25, 8, dtype=torch.float64))
        ts.distribute_module(net, mesh, lambda name, t: ([ts.Shard(1)], {1: [17, 8]}) if name == "positions" else None)

        def stays(f, dim, sizes, operations=()):
            with ts.CommTrace() as trace:
                y = f()
            s, sent = ts.spec(y), tuple(sorted({e[0] for e in trace.events}))
            assert s.placements == ((ts.Partial(),) if dim is None else (ts.Shard(dim),)) and s.sizes == sizes and sent == operations, (ts.summary(y), sent)
            calls.append(rank)
            return y

        x = stays(lambda: net.patches(image), 2, {2: [4, 2]})
        x = stays(lambda: x.flatten(2), 2, {2: [16, 8]})
        x = stays(lambda: x.transpose(1, 2), 1, {1: [16, 8]})
        x = stays(lambda: torch.cat([net.token.expand(2, -1, -1), x], 1), 1, {1: [17, 8]})
        x = stays(lambda: x + net.positions, 1, {1: [17, 8]})
        x = stays(lambda: net.linear(net.norm(x)), 1, {1: [17, 8]})
        heads = stays(lambda: x.unflatten(-1, (2, 4)).transpose(1, 2), 2, {2: [17, 8]})
        heads = stays(lambda: nn.functional.scaled_dot_product_attention(heads, heads, heads), 2, {2: [17, 8]}, ("exchange",))
        x = stays(lambda: heads.transpose(1, 2).flatten(2), 1, {1: [17, 8]})
        token = stays(lambda: x[:, :1], 1, {1: [1, 0]})
        stays(lambda: token.sum(1), None, {})
        stays(lambda: x.mean(1), None, {})
        x = stays(lambda: x[:, 1:], 1, {1: [16, 8]})
        x = stays(lambda: x.unflatten(1, (6, 4)), 1, {1: [4, 2]})
        x = stays(lambda: torch.roll(x, (-1, -1), (1, 2)), 1, {1: [4, 2]}, ("exchange",))
        w = stays(lambda: x.unflatten(2, (2, 2)).unflatten(1, (3, 2)), 1, {1: [2, 1]})
        w = stays(lambda: w.permute(1, 0, 3, 2, 4, 5), 0, {0: [2, 1]})
        w = stays(lambda: w.flatten(0, 2).flatten(1, 2), 0, {0: [8, 4]})
        w = stays(lambda: nn.functional.scaled_dot_product_attention(w, w, w), 0, {0: [8, 4]})
        w = stays(lambda: w.unflatten(1, (2, 2)).unflatten(0, (3, 2, 2)).permute(1, 0, 3, 2, 4, 5), 1, {1: [2, 1]})
        stays(lambda: w.flatten(3, 4).flatten(1, 2), 1, {1: [4, 2]})

    on_ranks(2, body)
    assert calls.count(0) == calls.count(1) == 21


def test_a_pooled_field_meets_a_weight_that_is_sharded_over_the_same_ranks():
    """The mean over a sharded field is a partial sum; the columns of the weight need their features of it alone: one reduce-scatter, no all-reduce."""
    field, weight, bias = draw(2, 6, 7, 5), draw(4, 6, seed=4), draw(4, seed=5)

    def body(rank):
        mesh = ts.Mesh({"domain": 3})
        x = ts.distribute_tensor(field, mesh, [ts.Shard(2)], {2: [4, 0, 3]})
        w = ts.distribute_tensor(weight, mesh, [ts.Shard(1)], {1: [1, 3, 2]}).requires_grad_(True)
        with ts.CommTrace() as trace:
            y = x.mean((2, 3)) @ w.T
        assert [e[0] for e in trace.events] == ["reduce_scatter"] and ts.spec(y).placements == (ts.Partial(),)
        (y + bias).square().mean().backward()
        plain = weight.clone().requires_grad_(True)
        expected = field.mean((2, 3)) @ plain.T
        (expected + bias).square().mean().backward()
        assert_same(y, expected)
        assert_same(w.grad, plain.grad)

    on_ranks(3, body)

"""Modules that are made on no rank: the values of one rank, whatever the placements."""

import pytest
import torch
from torch import nn

import tessera as ts
from support import on_ranks, whole


class Block(nn.Module):
    """As authors write them: functions of nn.init, `.data`, a buffer, a tied weight."""

    def __init__(self, truncated=True):
        super().__init__()
        self.table = nn.Embedding(7, 6, padding_idx=1)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6))
        self.norm = nn.LayerNorm(6)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.table.weight
        self.gain = nn.Parameter(torch.full((6,), 0.5))
        self.register_buffer("positions", torch.arange(12).reshape(3, 4))
        nn.init.orthogonal_(self.mlp[2].weight)
        nn.init.dirac_(self.conv.weight)
        self.mlp[0].weight.data.normal_(0, 0.02)
        with torch.no_grad():
            self.conv.bias[2:4] = 3
        if truncated:
            nn.init.trunc_normal_(self.mlp[0].weight, mean=0.5, std=0.2, a=0.3, b=0.8)

    def forward(self, words):
        x = self.table(words)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.mlp(self.norm(x)) * self.gain
        return self.head(x)


def values(ranks, rule):
    def body(rank):
        ts.manual_seed(5)
        with ts.deferred():
            net = Block()
        assert all(ts.is_deferred(p) and not p.is_meta for p in net.parameters())
        ts.distribute_module(net, ts.Mesh({"x": ranks}), rule)
        assert net.head.weight is net.table.weight
        assert all(ts.is_sharded(p) and p.requires_grad and not ts.is_deferred(p) for p in net.parameters())
        return {n: whole(t).clone() for n, t in net.state_dict().items()}

    return on_ranks(ranks, body)[0]


def rows(name, tensor):
    return [ts.Shard(0)] if tensor.dim() else None


def test_values_depend_on_neither_ranks_nor_placements():
    expected = values(1, None)
    assert torch.equal(expected["positions"], torch.arange(12).reshape(3, 4))
    assert (expected["table.weight"][1] == 0).all() and (expected["conv.bias"][2:4] == 3).all()
    assert torch.equal(expected["conv.weight"][:, :, 1], torch.eye(6)) and torch.allclose(expected["mlp.2.weight"] @ expected["mlp.2.weight"].T, torch.eye(6), atol=1e-6)
    for ranks in [2, 3]:
        for rule in [None, rows]:
            got = values(ranks, rule)
            assert got.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(got[name], value), f"{name} on {ranks} ranks"


def test_filled_by_files_of_other_names_without_a_draw(tmp_path):
    torch.manual_seed(3)
    saved = {name: torch.randn_like(t) if t.is_floating_point() else t + 100 for name, t in Block().state_dict().items() if name != "head.weight"}
    names = {"mlp.*": "model.ffn.*", "table.weight": "model.embed"}
    renamed = {("model.ffn." + n[4:] if n.startswith("mlp.") else names.get(n, n)): t for n, t in saved.items()}

    def body(rank):
        mesh = ts.Mesh({"x": 3})
        ts.save(renamed, mesh, tmp_path / "model", max_bytes=200)
        for rule in [None, rows]:
            with ts.deferred():
                net = Block()
            ts.fill_deferred(net, tmp_path / "model", names)
            ts.distribute_module(net, mesh, rule)
            for name, value in saved.items():
                assert torch.equal(whole(net.state_dict()[name]), value), name
            assert net.head.weight is net.table.weight
        with ts.deferred():
            net = Block()
        with pytest.raises(ts.InvalidArgument, match="'mlp.0.weight' is not there"):
            ts.fill_deferred(net, tmp_path / "model")
        ts.fill_deferred(net, ts.CheckpointReader(tmp_path / "model"), names.items())
        assert torch.equal(ts.materialize(net.mlp)[0].weight, saved["mlp.0.weight"])

    on_ranks(3, body)


def test_materialized_as_constructed():
    torch.manual_seed(3)
    expected = Block(truncated=False).state_dict()
    torch.manual_seed(3)
    with ts.deferred():
        net = Block(truncated=False)
    assert ts.materialize(net) is net
    for name, value in net.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert net.head.weight is net.table.weight and isinstance(net.gain, nn.Parameter)
    net(torch.tensor([[1, 2, 3]])).sum().backward()


def test_truncated_normal():
    with ts.deferred():
        weight = nn.Parameter(torch.empty(200, 100, dtype=torch.float64))
        nn.init.trunc_normal_(weight, mean=0.5, std=0.2, a=0.3, b=0.8)
    made = ts.materialize(nn.ParameterList([weight]))[0]
    plain = nn.init.trunc_normal_(torch.empty(200, 100, dtype=torch.float64), mean=0.5, std=0.2, a=0.3, b=0.8)
    assert made.min() >= 0.3 and made.max() <= 0.8
    levels = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    assert torch.allclose(made.quantile(levels), plain.quantile(levels), atol=0.01)
    assert torch.empty(2, device="meta").is_meta and not plain.is_meta


def test_mistakes():
    with ts.deferred():
        with pytest.raises(ts.NotAvailable, match="randperm"):
            torch.randperm(4)
        with pytest.raises(ts.NotAvailable, match="randperm"):
            nn.init.sparse_(torch.empty(3, 4), 0.5)
        with pytest.raises(ts.NotAvailable, match="less than a thousandth"):
            nn.init.trunc_normal_(torch.empty(3), mean=0.0, std=0.01, a=1.0, b=2.0)
        with pytest.raises(ts.NotAvailable, match="generator"):
            torch.empty(3).uniform_(generator=torch.Generator())
        given = torch.tensor([1.0, 2.0])
    assert not ts.is_deferred(given)
    with ts.deferred():
        net = nn.Linear(3, 2)
    assert "<deferred [2, 3] torch.float32>" in repr(net.weight)
    with pytest.raises(ts.NotAvailable, match="after the module is placed"):
        net(torch.ones(1, 3)).sum().item()

    def body(rank):
        with ts.deferred():
            made = nn.Linear(3, 2)
            with pytest.raises(ts.InvalidArgument, match="end the scope first"):
                ts.distribute_module(made, ts.Mesh({"x": 2}))
        with pytest.raises(ts.ShardingError, match="nothing says what its values are"):
            ts.distribute_module(nn.Linear(3, 2, device="meta"), ts.Mesh({"x": 2}))
        ts.distribute_module(made, ts.Mesh({"x": 2}), rows)

    on_ranks(2, body)

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
        with pytest.raises(ts.ShardingError, match="nothing says what its values are.*tessera::defer"):
            ts.distribute_module(nn.Linear(3, 2, device="meta"), ts.Mesh({"x": 2}))
        ts.distribute_module(made, ts.Mesh({"x": 2}), rows)

    on_ranks(2, body)


# ---- modules on the meta device ----


class Own(nn.Module):
    """A parameter that its own method initialises, children with theirs, a table that a head shares."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.conv = nn.Embedding(7, 6, padding_idx=1), nn.BatchNorm1d(6), nn.Conv1d(6, 6, 3, padding=1)
        self.attention, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 7)
        self.gain = nn.Parameter(torch.empty(6))
        self.head.weight = self.table.weight

    def reset_parameters(self):
        nn.init.trunc_normal_(self.gain, mean=1.0, std=0.1, a=0.9, b=1.1)

    def forward(self, words):
        x = self.table(words) * self.gain
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


def on_meta(make):
    with torch.device("meta"):
        return make()


def deferred_values(ranks, rule):
    def body(rank):
        ts.manual_seed(5)
        net = ts.defer(on_meta(Own))
        assert all(ts.is_deferred(t) and not t.is_meta for t in net.state_dict(keep_vars=True).values())
        ts.distribute_module(net, ts.Mesh({"x": ranks}), rule)
        assert net.head.weight is net.table.weight and all(ts.is_sharded(p) and p.requires_grad for p in net.parameters())
        return {n: whole(t).clone() for n, t in net.state_dict().items()}

    return on_ranks(ranks, body)[0]


def test_of_the_meta_device_by_reset_parameters():
    expected = deferred_values(1, None)
    assert (expected["table.weight"][1] == 0).all() and ((expected["gain"] - 1).abs() <= 0.1).all() and (expected["norm.running_var"] == 1).all()
    for ranks in [2, 3]:
        for rule in [None, rows]:
            for name, value in deferred_values(ranks, rule).items():
                assert torch.equal(value, expected[name]), f"{name} on {ranks} ranks"


def test_of_the_meta_device_as_in_memory():
    def make():
        return nn.Sequential(nn.Embedding(7, 6), nn.MultiheadAttention(6, 2), nn.LSTM(6, 3, 2), nn.Linear(6, 5))

    torch.manual_seed(3)
    expected = make().state_dict()
    torch.manual_seed(3)
    net = ts.materialize(ts.defer(on_meta(make)))
    for name, value in net.state_dict().items():
        assert torch.equal(value, expected[name]), name
    # By a function of one's own, as the models of transformers have one.
    def twos(module):
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 2)
            module.bias.data.zero_()

    net = ts.materialize(ts.defer(on_meta(lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))), init=twos))
    assert all((m.weight == 2).all() and (m.bias == 0).all() for m in net)


def test_what_nothing_has_written_to_is_named(tmp_path):
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)
            self.register_buffer("steps", torch.arange(4.0), persistent=False)

    def body(rank):
        mesh = ts.Mesh({"x": 2})
        net = ts.defer(on_meta(Positions))
        for place in [lambda: ts.fully_shard(net, mesh), lambda: ts.materialize(net), lambda: ts.materialize(net, mesh=mesh)]:
            with pytest.raises(ts.InvalidArgument, match="'steps' was on the meta device, and nothing says what its values are"):
                place()
        net.steps.copy_(torch.arange(4.0))
        ts.fully_shard(net, mesh)
        assert torch.equal(whole(net.steps), torch.arange(4.0)) and ts.is_sharded(net.linear.weight)
        # Files name what they hold, whatever has initialised it.
        saved = {"linear.weight": torch.ones(2, 3), "linear.bias": torch.zeros(2), "steps": torch.full((4,), 7.0)}
        ts.save(saved, mesh, tmp_path / "given.safetensors")
        net = ts.defer(on_meta(lambda: nn.Linear(3, 2)))
        ts.fill_deferred(net, tmp_path / "given.safetensors", {"*": "linear.*"}, allow_extra=True)
        ts.distribute_module(net, mesh, rows)
        assert (whole(net.weight) == 1).all()

    on_ranks(2, body)


def test_meta_mistakes():
    net = on_meta(lambda: nn.Linear(3, 2))
    with pytest.raises(ts.InvalidArgument, match="no parameter or buffer is on the meta device"):
        ts.defer(nn.Linear(3, 2))
    with pytest.raises(ts.InvalidArgument, match="'weight' has no shape yet"):
        ts.defer(on_meta(lambda: nn.LazyLinear(2)))
    with pytest.raises(ZeroDivisionError):
        ts.defer(net, init=lambda m: m.weight.data.zero_() is None or 1 / 0)
    assert net.weight.is_meta and not ts.is_deferred(net.weight)
    with ts.deferred(), pytest.raises(ts.InvalidArgument, match="end the scope first"):
        ts.defer(net)
    # A module that has values beside keeps them.
    half = nn.Sequential(nn.Linear(3, 2), net)
    kept = half[0].weight.clone()
    ts.defer(half)
    assert torch.equal(half[0].weight, kept) and ts.is_deferred(net.weight)
    with pytest.raises(ts.NotAvailable, match="'weight'|'1.weight'"):
        net(torch.ones(1, 3))

    def body(rank):
        with pytest.raises(ts.InvalidArgument, match="device of its own"):
            ts.materialize(net, "cpu", ts.Mesh({"x": 1}))

    on_ranks(1, body)


def test_what_needs_values_names_what_has_none(tmp_path):
    def body(rank):
        mesh = ts.Mesh({"x": 2})
        for net, match in [(ts.defer(on_meta(lambda: nn.Linear(3, 2))), "'(net.)?weight' is deferred and has no values yet"), (on_meta(lambda: nn.Linear(3, 2)), "'(net.)?weight' is on the meta device")]:
            for use in [
                lambda: ts.DistributedDataParallel(net),
                lambda: ts.Session(net, signals=False),
                lambda: ts.Session(net, gradients="averaged", signals=False),
            ]:
                with pytest.raises(ts.InvalidArgument, match=match):
                    use()
            with pytest.raises(ts.InvalidArgument, match="'weight' has no data"):
                ts.save(net, mesh, tmp_path / "net.safetensors")
            with pytest.raises(ts.InvalidArgument, match="no values yet"):
                ts.ShardedOptimizer(torch.optim.Adam, net.parameters(), mesh, lr=0.1).step()

    on_ranks(2, body)


# ---- stages of a pipeline ----


class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)), nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


def recorded(meta):
    if meta:
        return ts.defer(on_meta(Steps))
    with ts.deferred():
        return Steps()


@pytest.mark.parametrize("meta", [False, True])
def test_stages_are_filled_by_the_ranks_that_run_them(meta):
    x, y = torch.linspace(-1, 1, 24).reshape(4, 6), torch.linspace(0, 1, 24).reshape(4, 6)

    def alone(rank):
        ts.manual_seed(8)
        net = ts.materialize(recorded(meta), mesh=ts.Mesh({"x": 1}))
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        return net.state_dict(), {n: p.grad for n, p in net.named_parameters()}, loss.item()

    ((expected, gradients, loss),) = on_ranks(1, alone)

    def body(rank, placement):
        ts.manual_seed(8)
        net = recorded(meta)
        parts = ts.split(net, at=["middle", "last"])
        pipeline = ts.Pipeline(parts, ts.Schedule.gpipe(placement, 2), ts.Mesh({"pipe": max(placement) + 1}), "pipe", nn.functional.mse_loss)
        for s, part in enumerate(parts):
            for name, p in part.named_parameters():
                if placement[s] == rank:
                    assert torch.equal(p, expected[name]), name
                elif not name.endswith(".weight") or name.startswith("middle"):
                    assert ts.is_deferred(p), "no rank makes what it does not run"
        assert abs(pipeline.step(x, y).loss - loss) < 1e-6
        for name, p in pipeline.module.named_parameters():
            assert torch.allclose(p.grad, gradients[name], atol=1e-6), name

    for placement in [[0, 0, 0], [0, 1, 2], [0, 1, 0]]:
        on_ranks(max(placement) + 1, body, placement)


def test_stages_of_the_meta_device_are_named():
    def body(rank):
        net = on_meta(Steps) if rank == 1 else recorded(False)
        with pytest.raises(ts.InvalidArgument, match="'stage 1: middle.0.weight' is on the meta device"):
            ts.Pipeline(ts.split(net, at=["middle", "last"]), ts.Schedule("1f1b", 3, 2), ts.Mesh({"pipe": 3}), "pipe", nn.functional.mse_loss)

    on_ranks(3, body)

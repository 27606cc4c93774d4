"""ts.check: whether a model is safe to shard, and what of it is not."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tessera as ts
from program_cases import WrongGradient, plain
from support import draw, on_ranks


class Twice(nn.Module):
    def forward(self, x):
        return torch.ops.tessera_tests.twice(x) + 1


torch.library.define("tessera_tests::twice", "(Tensor x) -> Tensor")
torch.library.impl("tessera_tests::twice", "CPU", lambda x: x * 2)


class Ranks(nn.Module):
    """Wrong: what a rank computes depends on which one it is."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 4)

    def forward(self, x):
        return self.inner(x) * (1 + 1e-3 * ts.rank() if ts.is_sharded(x) else 1)


class WrongBackward(nn.Linear):
    """Right values; one of the gradients is wrong."""

    def __init__(self, where):
        super().__init__(6, 4)
        self.where = where

    def forward(self, x):
        given = {"input 0": x, "weight": self.weight, "bias": self.bias}
        return F.linear(*(WrongGradient.apply(t) if name == self.where else t for name, t in given.items()))


@pytest.mark.parametrize("where", ["nowhere", "input 0", "weight", "bias"])
def test_check_names_gradients_that_differ(where):
    nets = [plain(lambda: WrongBackward(where)) for _ in range(2)]

    def body(rank):
        mesh = ts.Mesh({"x": 2})
        report = ts.check(nets[rank], draw(5, 6), mesh)
        assert bool(report) == (where == "nowhere") and not report.refused
        assert report.values[0].equal and len(report.gradients) == 3
        assert [g.name for g in report.wrong] == ([] if report else [f"gradient of {where}"])
        assert ("NOT SAFE" in str(report) and f"differs: gradient of {where}" in str(report)) == (not report)
        # What compares no gradients cannot see it.
        assert ts.check(nets[rank], draw(5, 6), mesh, gradients=False)

    on_ranks(2, body)


def test_check_judges_float32_by_float64():
    class Jumps(nn.Module):
        """Off by a hundredth in float32 alone, and only where it is sharded."""

        def __init__(self, of_all):
            super().__init__()
            self.of_all = of_all
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x):
            y = x * self.weight
            return y * 1.01 if ts.is_sharded(x) and (self.of_all or x.dtype == torch.float32) else y

    def body(rank):
        mesh = ts.Mesh({"x": 2})
        x = draw(4, 6).float()
        report = ts.check(Jumps(False), x, mesh)
        assert report and "safe on" in str(report) and "round differently" in str(report)
        assert report.values[0].rounding > 1e-3 and report.values[0].difference < 1e-10
        assert not ts.check(Jumps(False), x, mesh, tolerance=1e-4), "a tolerance that is given is kept to"
        assert not ts.check(Jumps(True), x, mesh) and not ts.check(Jumps(True).double(), x.double(), mesh)

    on_ranks(2, body)


def test_check_compares_what_the_ranks_give_first():
    alike = plain(lambda: nn.Linear(6, 4))
    other = copy.deepcopy(alike)
    other.bias.data.add_(1)

    def body(rank):
        mesh, x = ts.Mesh({"x": 2}), draw(4, 6)
        for net, given, name in (
            (alike, x * (rank + 1), "input 0"),
            (alike, draw(4 + rank, 6), "input 0"),
            (other if rank else alike, x, "parameter 'bias'"),
        ):
            with pytest.raises(ts.MismatchError, match=f"{name} differs between ranks 0 and 1"):
                ts.check(net, given, mesh)

    on_ranks(2, body)


def test_check_shows_the_worst_ten():
    class Wrong(nn.Module):
        def forward(self, x):
            return [x * (1 + 0.01 * i if ts.is_sharded(x) else 1) for i in range(1, 16)]

    def body(rank):
        report = ts.check(Wrong(), draw(4, 6), ts.Mesh({"x": 2}))
        lines = [line for line in str(report).splitlines() if "differs:" in line]
        assert len(lines) == 11 and "gradient of input 0 " in lines[0] and "output 14 " in lines[1] and "more (report.text(None)" in lines[-1]
        assert report.text(None).count("differs:") == len(report.wrong) >= 15

    on_ranks(2, body)


def test_check_says_whether_a_model_is_safe():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU(), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1)).double()
    models = [net, Twice(), Ranks().double(), nn.Linear(6, 4).double()]
    before = [p.detach().clone() for p in net.parameters()]

    def body(rank):
        mesh = ts.Mesh({"data": 1, "domain": 2})
        report = ts.check(models[0], draw(3, 2, 8, 6), mesh, [ts.Replicate(), ts.Shard(2)])
        assert report and not report.refused and len(report.gradients) == 5
        assert any(m.bytes > 0 for m in report.moved if m.operator == "conv2d") and report.backward.bytes > 0
        assert "safe on" in str(report) and "dropout" in str(report)
        assert report.values[0].placements == (ts.Replicate(), ts.Replicate()) or report.values[0].placements[1] == ts.Partial("sum")
        # Refused operators are named, with their place, and what follows them is looked at too.
        report = ts.check(models[1], draw(4, 6), mesh, [ts.Replicate(), ts.Shard(0)], gradients=False)
        assert not report and not report.wrong and [r.operator for r in report.refused] == ["tessera_tests::twice"]
        assert "test_check.py" in report.refused[0].where and "no sharding rule" in report.refused[0].why
        # A difference is named.
        report = ts.check(models[2], draw(4, 6), mesh, [ts.Replicate(), ts.Shard(0)])
        assert not report and report.wrong[0].name == "output" and "NOT SAFE" in str(report)
        # A mistake of the model's own is raised as it is.
        with pytest.raises(RuntimeError):
            ts.check(models[3], draw(4, 7), mesh)
        assert ts.check(models[3], draw(4, 6), mesh, rule=lambda name, p: [ts.Replicate(), ts.Shard(0)])

    on_ranks(2, body)
    for p, q in zip(net.parameters(), before):
        assert torch.equal(p, q) and p.grad is None and not ts.is_sharded(p)


class Drops(nn.Module):
    """Calls functions that drop at random, as models do that hold no module of dropout."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        x = F.dropout(self.inner(x), 0.5, self.training)
        x = F.scaled_dot_product_attention(x, x, x, None, 0.3) + F.scaled_dot_product_attention(x, x, x, dropout_p=0.3)
        return F.dropout(F.alpha_dropout(x, p=0.2, training=True), p=0.0) + torch.dropout(x, 0.5, True)


def test_check_of_a_model_that_calls_dropout_functions():
    net = Drops().double()
    nets = [copy.deepcopy(net) for _ in range(2)]

    def body(rank):
        report = ts.check(nets[rank], draw(4, 5, 8), ts.Mesh({"x": 2}))
        assert report and len(report.gradients) == 3, str(report)
        assert any("5 calls of dropout functions" in note for note in report.notes), report.notes

    on_ranks(2, body)

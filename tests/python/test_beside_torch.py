"""Where the package meets torch's own Python: errors, placements, random draws of libraries, copies of modules, compilers."""

import copy
import pathlib
import re

import pytest
import torch
import torch.distributions as D

import tessera as ts
from support import assert_same, on_ranks, whole

X = torch.arange(42, dtype=torch.float64).reshape(7, 6)


def test_errors_come_by_their_class():
    """From functions of the package, from torch's operators, and from backward; other errors stay what they are."""
    assert issubclass(ts.MismatchError, ts.CommError) and issubclass(ts.CommError, RuntimeError) and issubclass(ts.InvalidArgument, ValueError)

    def body(rank):
        mesh = ts.Mesh({"x": 2})
        x = ts.distribute_tensor(X, mesh, [ts.Shard(0)])
        with pytest.raises(ts.InvalidArgument):
            ts.distribute_tensor(X, mesh, [ts.Shard(2)])
        with pytest.raises(ts.InvalidArgument):
            ts.Mesh({"y": 3})
        with pytest.raises(ts.InvalidArgument):
            ts.spec(X)
        with pytest.raises(ts.UnknownName):
            ts.ProcessGroupConfig("world").add_node("a", "nowhere")
        ts.set_check_level("collective")
        with pytest.raises(ts.MismatchError):
            mesh.group("x").all_reduce(torch.zeros(2 + rank))
        ts.set_check_level("local")
        ts.set_policies("error")
        with pytest.raises(ts.ImplicitRedistributionError):
            x.t() @ x.t().cumsum(1).t()
        leaf = x.clone().requires_grad_(True)
        y = (SumsInBackward.apply(leaf * 2) * x).sum()
        with pytest.raises(ts.ImplicitRedistributionError):
            y.backward()
        with pytest.raises(RuntimeError, match="same reduction dim|mat1 and mat2") as error:
            x @ x
        assert not isinstance(error.value, (ts.CommError, ts.ImplicitRedistributionError))

    on_ranks(2, body)
    with pytest.raises(ts.ConfigurationError, match="no rank yet"):
        ts.rank()


class SumsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g.cumsum(0)


def test_every_error_of_the_library_has_a_class():
    """Of those that a program of Python can meet: not the ones of rooms that the package does not load."""
    from tessera import _errors

    for name in _errors.NAMES:
        each = getattr(ts, name)
        assert issubclass(each, RuntimeError) and name in ts.__all__
    sources = pathlib.Path(__file__).parents[2] / "tessera"
    found = {}
    for header in sources.rglob("*.h"):
        if {"detail", "internal", "shm", "backends"}.isdisjoint(header.parts):
            found.update(re.findall(r"class (\w+) : public (\w+) {", header.read_text()))
    derived = {"Error"}
    while more := {name for name, base in found.items() if base in derived} - derived:
        derived |= more
    assert set(_errors.NAMES) == derived
    for name in derived - {"Error"}:
        assert getattr(ts, found[name]) in getattr(ts, name).__mro__, name


def test_placements_of_torch_and_without_a_list():
    from torch.distributed.tensor import Partial, Replicate, Shard

    def body(rank):
        mesh = ts.Mesh({"x": 2})
        for theirs, ours in ((Shard(1), ts.Shard(1)), (Replicate(), ts.Replicate()), (Partial("max"), ts.Partial("max"))):
            placed = ts.from_local(X, mesh, [theirs])
            assert ts.spec(placed).placements == (ours,) == ts.spec(ts.from_local(X, mesh, theirs)).placements
        assert ts.spec(ts.redistribute(ts.distribute_tensor(X, mesh, ts.Shard(0)), Shard(1))).placements == (ts.Shard(1),)
        net = ts.distribute_module(torch.nn.Linear(3, 4).double(), mesh, lambda name, t: Shard(0))
        assert ts.spec(net.weight).placements == (ts.Shard(0),)
        with pytest.raises(TypeError, match="no placement"):
            ts.distribute_tensor(X, mesh, [0])
        with pytest.raises(ts.InvalidArgument):
            ts.distribute_tensor(X, ts.Mesh({"a": 2, "b": 1}), ts.Shard(0))

    on_ranks(2, body)


LOC, SCALE = torch.linspace(-1, 1, 6, dtype=torch.float64), torch.linspace(0.5, 2, 6, dtype=torch.float64)
DRAWS = {
    "normal": lambda a, b: D.Normal(a, b),
    "log normal": lambda a, b: D.LogNormal(a, b),
    "uniform": lambda a, b: D.Uniform(a, a + b),
    "laplace": lambda a, b: D.Laplace(a, b),
    "gumbel": lambda a, b: D.Gumbel(a, b),
    "cauchy": lambda a, b: D.Cauchy(a, b),
    "exponential": lambda a, b: D.Exponential(b),
    "student": lambda a, b: D.StudentT(b + 2, a, b),
    "half normal": lambda a, b: D.HalfNormal(b),
    "weibull": lambda a, b: D.Weibull(b, b),
    "pareto": lambda a, b: D.Pareto(b, b),
    "kumaraswamy": lambda a, b: D.Kumaraswamy(b, b),
    "geometric": lambda a, b: D.Geometric(torch.sigmoid(a)),
    "continuous bernoulli": lambda a, b: D.ContinuousBernoulli(torch.sigmoid(a)),
    "von mises": lambda a, b: D.VonMises(a, b),
    "relaxed bernoulli": lambda a, b: D.RelaxedBernoulli(b[0], logits=a),
    "relaxed categorical": lambda a, b: D.RelaxedOneHotCategorical(b[0], logits=a),
    "multivariate": lambda a, b: D.MultivariateNormal(a, torch.diag(b)),
    "low rank": lambda a, b: D.LowRankMultivariateNormal(a, b.unsqueeze(-1), b),
    "independent": lambda a, b: D.Independent(D.Normal(a, b), 1),
    "gamma": lambda a, b: D.Gamma(b, b),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_of_distributions_agree(name):
    """The generator of plain numbers is another one on each rank, or shared by the threads: either way each rank would have other numbers."""

    def body(rank, placement):
        mesh = ts.Mesh({"x": 2})
        loc, scale = (ts.distribute_tensor(t, mesh, [placement]) for t in (LOC, SCALE))
        ts.set_policies("allow", "allow", "error")
        distribution = DRAWS[name](loc, scale)
        method = distribution.rsample if distribution.has_rsample else distribution.sample
        return [whole(method(shape)).tolist() for shape in ((), (2,))]

    for placement in (ts.Replicate(), ts.Shard(0)):
        first, second = on_ranks(2, body, placement)
        assert first == second, name


def test_draws_of_normal_do_not_depend_on_the_placement_and_stay_sharded():
    def body(rank, placement):
        mesh = ts.Mesh({"x": 2})
        ts.manual_seed(5)
        loc = ts.distribute_tensor(LOC, mesh, [placement]).requires_grad_(True)
        drawn = D.Normal(loc, ts.distribute_tensor(SCALE, mesh, [placement])).rsample((3,))
        assert placement == ts.Replicate() or ts.spec(drawn).placements == (ts.Shard(1),)
        drawn.sum().backward()
        assert_same(loc.grad, torch.full_like(LOC, 3))
        return whole(drawn)

    (a, b), (c, d) = on_ranks(2, body, ts.Replicate()), on_ranks(2, body, ts.Shard(0))
    assert torch.equal(a, b) and torch.equal(a, c) and torch.equal(a, d)
    # Of plain tensors torch's own generator draws, as it always did.
    torch.manual_seed(3)
    plain = D.Normal(LOC, SCALE).rsample()
    torch.manual_seed(3)
    assert torch.equal(plain, LOC + torch.empty(6, dtype=torch.float64).normal_() * SCALE)


@pytest.mark.parametrize("name", ["svd_lowrank", "pca_lowrank"])
def test_random_methods_of_linear_algebra_agree(name):
    matrix = torch.randn(8, 6, dtype=torch.float64)

    def body(rank):
        ts.set_policies("allow", "allow", "error")
        a = ts.distribute_tensor(matrix, ts.Mesh({"x": 2}), [ts.Replicate()])
        return [whole(t).tolist() for t in getattr(torch, name)(a, q=3, niter=1)]

    first, second = on_ranks(2, body)
    assert first == second


def test_a_copy_of_a_distributed_module_is_reduced_as_its_original():
    x = torch.randn(5, 6, dtype=torch.float64)
    plain = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double()
    plain(x).square().mean().backward()

    def body(rank):
        mesh = ts.Mesh({"x": 2})
        net = ts.distribute_module(copy.deepcopy(plain), mesh, lambda name, t: [ts.Shard(0)])
        field = ts.distribute_tensor(x, mesh, [ts.Shard(0)])
        twin = copy.deepcopy(net)
        twins = copy.deepcopy(twin)  # one of a copy that no backward has reached
        for each in (net, twin, twins):
            optimizer = torch.optim.Adam(each.parameters(), fused=True)
            for step in (1, 2, 3):
                each(field).square().mean().backward()
                for p, q in zip(each.parameters(), plain.parameters()):
                    assert ts.spec(p.grad) == ts.spec(p) or ts.spec(p.grad).placements == ts.spec(p).placements
                    assert_same(p.grad, step * q.grad)
            ts.clip_gradients(each.parameters(), 1.0)
            optimizer.step()
        # A copy sends as much as its original, and waits in no_sync() as it does.
        sent = []
        for each in (net, twin, twins):
            each.zero_grad()
            loss = each(field).square().mean()
            with ts.CommTrace() as trace:
                loss.backward()
            sent.append(trace.bytes)
            loss = each(field).square().mean()
            with ts.no_sync(each), ts.CommTrace() as trace:
                loss.backward()
            sent.append(trace.bytes)
        assert sent == 3 * sent[:2], sent

    on_ranks(2, body)


@pytest.mark.parametrize("how", ["foreach", "fused"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_an_optimizer_over_sharded_and_plain_parameters(kind, how):
    """Its lists hold both; what is plain stays plain, states too."""
    x = torch.randn(5, 6, dtype=torch.float64)
    parts = [torch.nn.Linear(6, 4).double(), torch.nn.Linear(3, 2).double()]

    def train(first, second, field):
        optimizer = kind([*second.parameters(), *first.parameters()], 0.1, weight_decay=0.01, **{how: True})
        for _ in range(3):
            optimizer.zero_grad()
            first(field).square().mean().backward()
            second(torch.ones(1, 3, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
        return optimizer

    expected = copy.deepcopy(parts)
    train(*expected, x)

    def body(rank):
        mesh = ts.Mesh({"x": 2})
        first, second = copy.deepcopy(parts)
        ts.distribute_module(first, mesh, lambda name, t: [ts.Shard(0)])
        optimizer = train(first, second, ts.distribute_tensor(x, mesh, [ts.Shard(0)]))
        for mine, other in zip([first, second], expected):
            for p, q in zip(mine.parameters(), other.parameters()):
                assert_same(p, q)
        for p in second.parameters():
            assert not any(ts.is_sharded(t) for t in [p, p.grad, *optimizer.state[p].values()] if isinstance(t, torch.Tensor))

    on_ranks(2, body)


def test_compiled_functions_go_on_uncompiled():
    """Dynamo breaks its graph at a sharded tensor: value and gradient are those of the function."""

    def body():
        @torch.compile(backend="eager")
        def f(t, w):
            return (t.sin() * 2 + 1) @ w

        mesh = ts.Mesh({"x": 1})
        x, w = (ts.distribute_tensor(t, mesh, [ts.Shard(0)]).requires_grad_(True) for t in (X / 42, X.t().contiguous() / 42))
        y = f(x, w)
        y.square().sum().backward()
        p, q = (t.clone().requires_grad_(True) for t in (X / 42, X.t().contiguous() / 42))
        z = (p.sin() * 2 + 1) @ q
        z.square().sum().backward()
        assert ts.is_sharded(y)
        assert_same(y, z)
        assert_same(x.grad, p.grad)
        assert_same(w.grad, q.grad)

    on_ranks(1, lambda rank: body())


def test_export_is_refused_in_words():
    def body(rank):
        x = ts.distribute_tensor(X, ts.Mesh({"x": 1}), [ts.Shard(0)])
        with pytest.raises(Exception, match="ShardTensor"):
            torch.export.export(torch.nn.Linear(6, 2).double(), (x,))

    on_ranks(1, body)

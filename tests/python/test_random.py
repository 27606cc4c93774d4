"""Random numbers of sharded tensors: the same wherever they lie, of the right distribution, drawn again where they are asked for again."""

import gc
import sys

import pytest
import torch

import tessera as ts
from support import assert_same, on_ranks

X = torch.arange(42, dtype=torch.float64).reshape(7, 6)


def test_random_numbers_do_not_depend_on_placement():
    def draw(rank, ranks):
        ts.manual_seed(5)
        t = ts.distribute_tensor(X, ts.Mesh({"x": ranks}), [ts.Shard(0)])
        return ts.full_tensor(torch.nn.functional.dropout(t, 0.5)), ts.full_tensor(torch.rand_like(t))

    alone = on_ranks(1, draw, 1)[0]
    for ranks in (2, 3):
        for dropped, drawn in on_ranks(ranks, draw, ranks):
            assert torch.equal(dropped, alone[0]) and torch.equal(drawn, alone[1])


def test_numbers_whose_distribution_each_element_gives():
    n = 4000
    rates = torch.tensor([0.0, 0.5, 8.0, 12.0, 300.0], dtype=torch.float64)
    shapes = torch.tensor([0.2, 1.0, 2.5, 40.0, 1000.0], dtype=torch.float64)
    counts = torch.tensor([0.0, 7.0, 30.0, 400.0, 400.0], dtype=torch.float64)
    chances = torch.tensor([0.3, 0.9, 0.2, 0.5, 0.97], dtype=torch.float64)
    wide = lambda t: t.repeat(n, 1)

    def draw(place):
        ts.manual_seed(11)
        shape = place(wide(shapes)).detach().requires_grad_(True)
        gamma = torch._standard_gamma(shape)
        gamma.sum().backward()
        return [torch.poisson(place(wide(rates))), torch.binomial(place(wide(counts)), place(wide(chances))), gamma,
                torch._sample_dirichlet(place(wide(shapes[:3]))), shape.grad]

    def body(rank, ranks):
        mesh = ts.Mesh({"x": ranks})
        ts.set_policies("allow", "allow")
        return [[ts.full_tensor(t.detach()) for t in draw(lambda t: ts.distribute_tensor(t, mesh, [p]))]
                for p in (ts.Shard(0), ts.Shard(1), ts.Replicate())]

    first = on_ranks(1, body, 1)[0][0]
    for ranks in (2, 3):
        for result in on_ranks(ranks, body, ranks):
            for drawn in result:
                assert all(torch.equal(a, b) for a, b in zip(drawn, first))
    poisson, binomial, gamma, dirichlet, grad = first

    def like(drawn, mean, variance):
        spread = (variance / n).sqrt()
        assert ((drawn.mean(0) - mean).abs() <= 5 * spread).all(), (drawn.mean(0), mean)
        fourth = ((drawn - mean) ** 4).mean(0)
        assert ((drawn.var(0) - variance).abs() <= 6 * ((fourth - variance**2).clamp_min(0) / n).sqrt() + 1e-12).all(), (drawn.var(0), variance)

    like(poisson, rates, rates)
    like(binomial, counts * chances, counts * chances * (1 - chances))
    like(gamma, shapes, shapes)
    total = shapes[:3].sum()
    share = shapes[:3] / total
    like(dirichlet, share, share * (1 - share) / (total + 1))
    assert (binomial <= counts).all() and (poisson == poisson.floor()).all() and (gamma > 0).all()
    assert (dirichlet.sum(1) - 1).abs().max() < 1e-12
    assert_same(grad, torch._standard_gamma_grad(wide(shapes), gamma))


def test_draws_are_refused_as_plain_ones():
    def body(rank):
        mesh = ts.Mesh({"x": 2})
        put = lambda t: ts.distribute_tensor(t, mesh, [ts.Shard(0)])
        for wrong in (
            lambda place: torch.poisson(place(torch.tensor([-1.0, -2.0]))),
            lambda place: torch.poisson(place(torch.tensor([1, 2]))),
            lambda place: torch._standard_gamma(place(torch.tensor([1, 2]))),
        ):
            for place in (torch.clone, put):
                with pytest.raises(RuntimeError):
                    wrong(place)
        with pytest.raises(RuntimeError, match="manual_seed"):
            torch.poisson(put(torch.ones(2)), generator=torch.Generator())
        assert_same(put(torch.ones(2)).sum(), torch.tensor(2.0))

    on_ranks(2, body)


def test_checkpointing_draws_the_same_again():
    from torch.utils.checkpoint import checkpoint

    def body(rank):
        mesh = ts.Mesh({"x": 2})
        for reentrant in (False, True):
            for draw in (lambda t: torch.nn.functional.dropout(t * 1, 0.5), lambda t: t * torch.rand_like(t)):
                x = ts.distribute_tensor(torch.ones(8, 6, dtype=torch.float64), mesh, [ts.Shard(0)]).detach().requires_grad_(True)
                y = checkpoint(draw, x, use_reentrant=reentrant)
                after = torch.rand_like(x.detach())
                y.sum().backward()
                assert_same(x.grad, y)
                assert not torch.equal(ts.full_tensor(torch.rand_like(x.detach())), ts.full_tensor(after))
        state = torch.get_rng_state()
        first = ts.full_tensor(torch.rand_like(x.detach()))
        torch.set_rng_state(state)
        assert torch.equal(ts.full_tensor(torch.rand_like(x.detach())), first)
        with torch.random.fork_rng():
            second = ts.full_tensor(torch.rand_like(x.detach()))
        assert torch.equal(ts.full_tensor(torch.rand_like(x.detach())), second) and not torch.equal(first, second)

    ts.run_threads(1, lambda rank: None)
    on_ranks(2, body)


def test_states_are_taken_while_another_rank_collects():
    class Cycle:
        def __init__(self):
            self.me = self

        def __del__(self):  # Python code that the collector runs
            for _ in range(1000):
                pass

    def body(rank):
        for i in range(10000):
            gc.set_threshold(1 + i % 5)
            Cycle()
            torch.set_rng_state(torch.get_rng_state())

    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        ts.run_threads(3, body)
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)

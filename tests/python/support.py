import torch

import tessera as ts

TOLERANCE = 1e-10


def whole(t):
    return ts.full_tensor(t.detach()) if ts.is_sharded(t) else t.detach()


def assert_same(got, expected, what=""):
    """To 1e-10 of the largest value."""
    got, expected = whole(got), whole(expected)
    assert got.shape == expected.shape and got.dtype == expected.dtype, f"{what}: {got.dtype} {got.shape}, {expected.dtype} {expected.shape}"
    if expected.numel():
        scale = max(expected.abs().max().item(), 1e-30)
        off = (got - expected).abs().max().item()
        assert off <= TOLERANCE * scale, f"{what}: off by {off} of {scale}"


def draw(*shape, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def on_ranks(ranks, fn, *arguments):
    """Runs fn(rank, *arguments) on threads; ranks that disagree wait for each other: longer than a rank computes on a busy machine, and less than the test may take."""
    return ts.run_threads(ranks, lambda rank: fn(rank, *arguments), timeout=100)


def raises(kind, match, call, *arguments, **options):
    import pytest  # what ranks run as programs needs none

    with pytest.raises(kind, match=match):
        call(*arguments, **options)

"""Rules for operators that Python defines with torch.library, in index notation and as functions, beside one process."""

import pytest
import torch

import tessera as ts
from support import assert_same, draw, on_ranks

DTYPE = torch.float64


@torch.library.custom_op("tessera_rules::blur", mutates_args=())
def blur(x: torch.Tensor) -> torch.Tensor:
    return (x + x.roll(1, -1) + x.roll(-1, -1)) / 3


blur.register_fake(torch.empty_like)
blur.register_autograd(lambda ctx, g: blur(g))


@torch.library.custom_op("tessera_rules::affine", mutates_args=())
def affine(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return a @ b + (0 if bias is None else bias)


affine.register_fake(lambda a, b, bias: a.new_empty(a.shape[0], b.shape[1]))


@torch.library.custom_op("tessera_rules::top", mutates_args=())
def top(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.amax(0), x.sum(0)


top.register_fake(lambda x: (x.new_empty(x.shape[1:]), x.new_empty(x.shape[1:])))


@torch.library.custom_op("tessera_rules::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: float, dims: list[int]) -> torch.Tensor:
    return x * by / (x.sum(dims, keepdim=True) if dims else 1)


scaled.register_fake(lambda x, by, dims: torch.empty_like(x))


@torch.library.custom_op("tessera_rules::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    return x * 2


unknown.register_fake(torch.empty_like)

asked = []


def scale_rule(call):
    (x,), dims = call.tensors, call.integers("dims")
    asked.append(call.number("by"))
    assert call.name == "tessera_rules::scaled" and call.shapes == [x.shape] and call.has("by") and not call.has("nothing") and not x.written
    if call.number("by") < 0:
        raise ts.ShardingError("a negative factor is not covered")
    whole = [ts.Replicate() if isinstance(p, ts.Partial) and dims or isinstance(p, ts.Shard) and p.dim in dims else p for p in x.placements]
    return [whole], [(whole, {d: n for d, n in x.sizes.items() if ts.Shard(d) in whole})]


ts.register_rule("tessera_rules::blur", "... w! -> ... w!", linear=True)
ts.register_rule("tessera_rules::affine", "m k, k n, n? -> m n", linear=True, added=[2])
ts.register_rule("tessera_rules::scaled", scale_rule)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_index_notation(ranks):
    x, a, b, bias = draw(5, 6), draw(5, 4, seed=1), draw(4, 3, seed=2), draw(3, seed=4)
    z = x.clone().requires_grad_()
    (blur(z) * z.cos()).sum().backward()

    def body(rank):
        mesh = ts.Mesh({"x": ranks})
        uneven = {0: [5 - 2 * (ranks - 1), *[2] * (ranks - 1)]}
        ts.set_policies("error")
        with ts.CommTrace() as trace:
            rows = blur(ts.distribute_tensor(x, mesh, ts.Shard(0), uneven))
            summands = blur(ts.from_local(x / ranks, mesh, ts.Partial()))
        assert trace.count <= 2, trace.table()  # from_local compares the ranks' dtypes
        assert ts.spec(rows).sizes == uneven and ts.spec(summands).placements == (ts.Partial(),)
        assert_same(rows, blur(x), "rows")
        assert_same(summands, blur(x), "a partial sum")
        if ranks > 1:
            with pytest.raises(ts.ImplicitRedistributionError, match="tessera_rules::blur"):
                blur(ts.distribute_tensor(x, mesh, ts.Shard(1)))
            ts.set_policies("allow")
        assert_same(blur(ts.distribute_tensor(x, mesh, ts.Shard(1))), blur(x), "gathered")
        t = ts.distribute_tensor(x, mesh, ts.Shard(0), uneven).requires_grad_()
        (blur(t) * t.cos()).sum().backward()
        assert_same(t.grad, z.grad, "gradient")
        for b_of in (bias, None):
            sharded = None if b_of is None else ts.distribute_tensor(b_of, mesh, ts.Replicate())
            y = affine(ts.distribute_tensor(a, mesh, ts.Shard(1)), ts.distribute_tensor(b, mesh, ts.Shard(0)), sharded)
            assert ranks == 1 or ts.spec(y).placements == (ts.Partial(),)
            assert_same(y, affine(a, b, b_of), "a product over a sharded dim")
        with pytest.raises(ts.InvalidArgument, match="has size 3"):
            affine(ts.distribute_tensor(a, mesh, ts.Shard(0)), ts.distribute_tensor(draw(3, 3), mesh, ts.Replicate()), None)

    on_ranks(ranks, body)


def test_a_function_as_a_rule():
    x = draw(5, 6)

    def body(rank):
        mesh = ts.Mesh({"x": 2, "y": 2})
        ts.set_policies("allow")
        t = ts.distribute_tensor(x, mesh, [ts.Shard(0), ts.Shard(1)], {0: [5, 0], 1: [2, 4]})
        before = len(asked)
        for _ in range(2):
            y = scaled(t, 3.0, [1])
            assert_same(y, scaled(x, 3.0, [1]), "one dim gathered")
        assert ts.spec(y).placements == (ts.Shard(0), ts.Replicate()) and ts.spec(y).sizes == {0: [5, 0]}
        assert_same(scaled(t, 2.0, []), scaled(x, 2.0, []), "as it lies")
        assert len(asked) > before
        with pytest.raises(ts.ShardingError, match="a negative factor is not covered"):
            scaled(t, -1.0, [])
        assert_same(scaled(t, 2.0, [0, 1]), scaled(x, 2.0, [0, 1]), "after an error")

    on_ranks(4, body)


def test_what_is_refused():
    def body(rank):
        mesh = ts.Mesh({"x": 2})
        t = ts.distribute_tensor(draw(4, 2), mesh, ts.Shard(0))
        with pytest.raises(ts.NoRuleError, match="tessera_rules::unknown.*tessera.redistribute, or tessera.register_rule"):
            unknown(t)
        whole = unknown(ts.redistribute(t, ts.Replicate()))  # one of the two ways
        assert_same(whole, unknown(draw(4, 2)))

    on_ranks(2, body)
    for operator, rule, kind, match in (
        ("tessera_rules::blr", "m -> m", ts.InvalidArgument, "no operator 'tessera_rules::blr'.*tessera_rules::blur"),
        ("tessera_rules::unknown", "m m -> m", ts.RuleError, "cannot be read"),
        ("tessera_rules::blur", "m -> m", ts.RuleError, "has a rule already"),
    ):
        with pytest.raises(kind, match=match):
            ts.register_rule(operator, rule)
    with pytest.raises(ts.RuleError, match="belong to index notation"):
        ts.register_rule("tessera_rules::unknown", scale_rule, linear=True)
    with pytest.raises(ts.InvalidArgument, match="median"):
        ts.register_rule("tessera_rules::unknown", "m -> m", reduce="median")
    with pytest.raises(ts.InvalidArgument, match="while its rule runs"):
        ts.RuleCall()
    ts.register_rule("tessera_rules::unknown", "... -> ...", linear=True)  # the other way
    on_ranks(2, lambda rank: assert_same(unknown(ts.distribute_tensor(draw(4, 2), ts.Mesh({"x": 2}), ts.Shard(0))), unknown(draw(4, 2))))


def test_functions_that_plan_wrongly_are_told():
    wrong = {
        "three": (lambda call: ([None], [ts.Replicate()] * 3), "places 3 results, and the operator has 2"),
        "axes": (lambda call: ([None], [[ts.Replicate(), ts.Replicate()]] * 2), "2 placements for a mesh of 1 axis"),
        "inputs": (lambda call: ([None, None], [ts.Replicate()] * 2), "places 2 inputs, and the call has 1"),
        "raises": (lambda call: 1 // 0, "ZeroDivisionError"),
    }

    def body(rank):
        x = ts.distribute_tensor(draw(4, 3), ts.Mesh({"x": 2}), ts.Shard(0))
        with pytest.raises((ts.RuleError, ts.ShardingError), match=match):
            top(x)

    for i, (rule, match) in enumerate(wrong.values()):
        ts.register_rule("tessera_rules::top", rule, replaces=i > 0)
        on_ranks(2, body)
    columns = lambda call: ([[ts.Shard(1)]], [ts.Shard(0), ts.Shard(0)])  # noqa: E731
    ts.register_rule("tessera_rules::top", columns, replaces=True)

    def right(rank):
        ts.set_policies("allow")
        for got, expected in zip(top(ts.distribute_tensor(draw(4, 3), ts.Mesh({"x": 2}), ts.Shard(0))), top(draw(4, 3))):
            assert ts.spec(got).placements == (ts.Shard(0),)
            assert_same(got, expected)

    on_ranks(2, right)

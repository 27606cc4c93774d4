"""Operators as programs call them on sharded tensors: results where the program says, masks, writes, derivatives, and the shapes of rare calls."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tessera as ts
from program_cases import ROWS, WrongGradient, rows
from support import assert_same, draw, on_ranks


def test_results_that_are_written_where_the_program_says():
    """out= that is a list, and out= of another shape than the operator computes in."""
    x, a, b = draw(5, 4), draw(3, 2), draw(2, 5, seed=4)

    def body(rank):
        mesh = ts.Mesh({"x": 2})
        ts.set_policies("allow", "allow")
        t = rows(x, mesh)
        for split, shapes in ((lambda y, out: torch.split_with_sizes_copy(y, [3, 2], out=out), [(3, 4), (2, 4)]), (lambda y, out: torch.unbind_copy(y, 1, out=out), [(5,)] * 4)):
            made, expected = [ts.distribute_tensor(draw(*s), mesh, [ts.Shard(0)]) for s in shapes], [torch.empty(s, dtype=torch.float64) for s in shapes]
            split(t, made)
            split(x, expected)
            for got, want in zip(made, expected):
                assert_same(got, want)
            with pytest.raises((RuntimeError, ValueError)):
                split(t, made[:-1])
        field = draw(5, 6, 3).transpose(0, 2)
        assert_same(torch.view_copy(ts.distribute_tensor(field, mesh, [ts.Shard(1)]), [18, 5]), torch.view_copy(field, [18, 5]))
        for dim in (0, 1):
            out = ts.distribute_tensor(torch.zeros(6, 10, dtype=torch.float64), mesh, [ts.Shard(dim)], {dim: [4, 2] if dim == 0 else [9, 1]})
            torch.kron(rows(a, mesh), b, out=out)
            assert_same(out, torch.kron(a, b))
        with pytest.raises((RuntimeError, ValueError), match="shape"):
            torch.kron(rows(a, mesh), b, out=rows(torch.zeros(5, 10, dtype=torch.float64), mesh))

    on_ranks(2, body)


def test_a_transposed_convolution_whose_input_lies_in_another_order():
    """Sharded groups of one channel each: libtorch took them for channels-last."""
    values, weight, options = draw(4, 2).T, draw(4, 2, 2).transpose(0, 2), {"stride": 3, "padding": 1, "output_padding": 2, "groups": 2, "dilation": 4}
    x, w = values.clone().requires_grad_(), weight.clone().requires_grad_()
    y = F.conv_transpose1d(x, w, **options)
    y.square().sum().backward()

    def body(rank):
        mesh = ts.Mesh({"x": 2})
        ts.set_policies("allow", "allow")
        t, u = ts.distribute_tensor(values, mesh, [ts.Replicate()]).requires_grad_(), rows(weight, mesh).requires_grad_()
        out = F.conv_transpose1d(t, u, **options)
        out.square().sum().backward()
        for got, want in ((out, y), (t.grad, x.grad), (u.grad, w.grad)):
            assert_same(got, want)

    on_ranks(2, body)


def test_the_sweep_takes_rounding_for_right_and_nothing_else():
    from types import SimpleNamespace

    from operator_cases import is_rounding, plain_results
    from torch.utils._pytree import tree_flatten

    def judged(op, x, condition, name, wrong):
        leaves, tree = tree_flatten((x.requires_grad_(), (), {}))
        case = SimpleNamespace(condition=condition, leaves=leaves, tree=tree)
        second = name.startswith("second")
        expected = plain_results(op, case, leaves, True, second)[name].detach()
        return is_rounding(op, case, second, name, wrong(expected), expected)

    generator = torch.Generator().manual_seed(1)
    x = torch.rand(1, 40, dtype=torch.float64, generator=generator) - 0.5

    def normalize(x):  # of one element each: the derivatives are 0 but for rounding
        return torch.nn.functional.normalize(x, 0.5, 0)

    assert judged(normalize, x, "even", "second derivative 0", torch.zeros_like)
    assert not judged(normalize, x, "even", "second derivative 0", lambda e: e + 1e-9)
    w = torch.randn(40, 3, generator=generator)

    def product(x):
        return x @ w.to(x.dtype)

    narrow = torch.randn(5, 40, generator=generator)
    exact = narrow.double() @ w.double()
    assert judged(product, narrow.clone(), "autocast", "result 0", lambda e: exact.to(e.dtype))
    assert not judged(product, narrow.clone(), "autocast", "result 0", lambda e: e + 2 * (e - exact).abs().max())


OPERATORS_THAT_PROGRAMS_USE = {
    "max_pool1d": lambda t: F.max_pool1d(t.view(2, 3, 10), 3, 2, 1),
    "max_pool1d without samples": lambda t: F.max_pool1d(t.view(3, 20), 4, ceil_mode=True),
    "cdist of many points": lambda t: torch.cdist(t.view(30, 2), t.view(30, 2)[:27] * 2),
    "cdist of batches": lambda t: torch.cdist(t.view(1, 30, 2), t.view(1, 30, 2).flip(1) + 1),
    "repeat_interleave by a tensor": lambda t: t.view(12, 5).repeat_interleave((t.view(12, 5)[:, 0].abs() * 2).long(), 0),
    "fill_diagonal_": lambda t: (t.view(12, 5) * 1).fill_diagonal_(-9.0),
    "fill_diagonal_ wrapped": lambda t: (t.view(20, 3) * 1).fill_diagonal_(-9.0, wrap=True),
    "fill_diagonal_ of three dims": lambda t: (t[:27].view(3, 3, 3) * 1).fill_diagonal_(-9.0),
    "affine_grid": lambda t: F.affine_grid(t.view(10, 2, 3), (10, 1, 4, 3), align_corners=False),
    "affine_grid of three dims": lambda t: F.affine_grid(t.view(5, 3, 4), (5, 2, 2, 1, 3), align_corners=True),
}


@pytest.mark.parametrize("name", OPERATORS_THAT_PROGRAMS_USE)
@pytest.mark.parametrize("grad", [False, True])
def test_operators_that_programs_use(name, grad):
    call, x = OPERATORS_THAT_PROGRAMS_USE[name], draw(60).requires_grad_(grad)
    y = call(x)
    given = draw(*y.shape, seed=5)
    if grad:
        (y * given).sum().backward()

    def body(rank):
        ts.set_policies("allow", "allow")
        mesh = ts.Mesh({"x": 3})
        for sizes in (None, {0: [35, 0, 25]}):
            t = ts.distribute_tensor(x.detach(), mesh, [ts.Shard(0)], sizes).detach().requires_grad_(grad)
            out = call(t)
            assert_same(out, y, name)
            if grad:
                (out * given).sum().backward()
                assert_same(t.grad, x.grad, "gradient")

    on_ranks(3, body)


BYTES = (torch.arange(30).reshape(5, 6) % 3 == 0).to(torch.uint8)
MASK = BYTES.bool()
SQUARE = torch.arange(18, dtype=torch.float64).reshape(2, 3, 3) / 20


def written(x, put, where, values):
    y = x * 1
    y[put(where) if where.dim() == 2 else where] = values
    return y


def renormed(x, order):
    table = x.detach().clone()
    rows = torch.nn.functional.embedding(torch.tensor([[0, 4], [2, 0]]), table, max_norm=1.5, norm_type=order)
    return torch.cat([rows.flatten(0, 1), table]) + x.sum()


def in_place(x, scan):
    y, z = x * 1, x * 2
    getattr(y, scan)(0)
    getattr(z, scan)(-1)
    return y + z


ONCE_REFUSED = {
    "elements where bytes say": lambda x, put: x[put(BYTES)] + x[BYTES],
    "rows where bytes say": lambda x, put: x[torch.tensor([1, 0, 0, 1, 1], dtype=torch.uint8)],
    "a choice by bytes": lambda x, put: torch.where(put(BYTES), x, 0.0),
    "a vector where a mask is true": lambda x, put: written(x, put, MASK, torch.arange(10.0, dtype=torch.float64)),
    "a sharded vector": lambda x, put: written(x, put, MASK, put(torch.arange(10.0, dtype=torch.float64))),
    "a vector where bytes say": lambda x, put: written(x, put, BYTES, torch.arange(10.0, dtype=torch.float64)),
    "rows where a mask is true": lambda x, put: written(x, put, MASK[:, 1], ROWS[:1] * 3),
    "a product where a mask is true": lambda x, put: written(x, put, MASK, x[put(MASK)] * x[MASK]),
    "a square root in place": lambda x, put: written(x, put, ROWS > 1, torch.sqrt(x[put(ROWS) > 1])),
    "nowhere": lambda x, put: written(x, put, ROWS > 9, torch.zeros(0, dtype=torch.float64)),
    "sums in place": lambda x, put: in_place(x, "cumsum_"),
    "products in place": lambda x, put: in_place(x, "cumprod_"),
    **{f"rows of norm {order}": lambda x, put, order=order: renormed(x, order) for order in (1.0, 2.0, math.inf, 0.5)},
    "averages of nothing": lambda x, put: torch.nn.functional.adaptive_avg_pool2d(x.detach().view(1, 5, 6), (0, 2)).sum() + x,
    "maxima of nothing": lambda x, put: torch.nn.functional.adaptive_max_pool1d(x.detach(), 0).sum() + x,
}


@pytest.mark.parametrize("name", ONCE_REFUSED)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.filterwarnings("ignore:.*uint8.*")
def test_what_was_refused(name, dim):
    def run(put):
        x = put(ROWS).detach().requires_grad_(True)
        y = ONCE_REFUSED[name](x, put)
        (y * y).sum().backward()
        return y, x.grad

    def body(rank):
        ts.set_policies("allow", "allow")
        mesh = ts.Mesh({"x": 3})
        put = lambda t: ts.distribute_tensor(t.clone(), mesh, [ts.Shard(min(dim, t.dim() - 1))])
        for got, expected in zip(run(put), run(torch.clone)):
            assert_same(got, expected, name)

    on_ranks(3, body)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_exponential_of_matrices(dim):
    def run(put):
        x = put(SQUARE).detach().requires_grad_(True)
        y = torch.matrix_exp(x)
        (first,) = torch.autograd.grad((y * y.detach()).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((first * first.detach()).sum(), x)
        return y, first, second

    def body(rank):
        ts.set_policies("allow", "allow")
        mesh = ts.Mesh({"x": 2})
        for got, expected in zip(run(lambda t: ts.distribute_tensor(t.clone(), mesh, [ts.Shard(dim)])), run(torch.clone)):
            assert_same(got, expected)

    on_ranks(2, body)


def test_wrong_values_for_a_mask_are_refused_on_every_rank():
    def body(rank):
        ts.set_policies("allow", "allow")
        mesh = ts.Mesh({"x": 2})
        x = ts.distribute_tensor(ROWS.clone(), mesh, [ts.Shard(0)])
        for wrong in (
            lambda: x.__setitem__(MASK, torch.zeros(9, dtype=torch.float64)),
            lambda: x.__setitem__(MASK[:4], torch.zeros(2, dtype=torch.float64)),
            lambda: x.__setitem__(MASK[:1], torch.arange(2)),
            lambda: x.__setitem__(torch.arange(30).reshape(5, 6) < 2, torch.arange(2)),
            lambda: torch.embedding_renorm_(x.view(5, 2, 3), torch.tensor([0]), 1.0, 2.0),
            lambda: torch.nn.functional.pad(x.unsqueeze(0), (-20, 0), mode="circular"),
            lambda: torch.nn.functional.pad(x.unsqueeze(0), (-4, -3), mode="circular"),
        ):
            with pytest.raises((RuntimeError, IndexError, ValueError)) as error:
                wrong()
            assert "failed" not in str(error.value), "refused on one rank alone"
        assert_same(x, ROWS)

    on_ranks(2, body)


@pytest.mark.parametrize("window, options", [
    (None, {"return_complex": True}),
    (6, {"hop_length": 3, "win_length": 6, "return_complex": True}),
    (8, {"hop_length": 2, "center": False, "normalized": True, "onesided": False, "return_complex": True}),
    (5, {"win_length": 5, "pad_mode": "constant", "return_complex": False}),
])  # fmt: skip
def test_short_time_transforms_of_a_sharded_batch(window, options):
    signals = draw(7 * 30).view(7, 30).requires_grad_(True)
    shape = None if window is None else torch.hann_window(window, dtype=torch.float64) + 0.1
    y = torch.stft(signals, 8, window=shape, **options)
    size = y.square().sum() if not y.is_complex() else y.abs().square().sum()
    size.backward()

    def body(rank):
        mesh = ts.Mesh({"x": 3})
        for sizes in (None, {0: [4, 0, 3]}):
            t = ts.distribute_tensor(signals.detach(), mesh, [ts.Shard(0)], sizes).detach().requires_grad_(True)
            out = torch.stft(t, 8, window=shape, **options)
            assert_same(out, y, "transform")
            (out.square() if not out.is_complex() else out.abs().square()).sum().backward()
            assert_same(t.grad, signals.grad, "gradient")
            with pytest.raises(RuntimeError):
                torch.stft(t, 31, center=False, return_complex=True)

    on_ranks(3, body)


@pytest.mark.parametrize("dim", [0, 1])
def test_derivatives_by_elements_of_a_sharded_input(dim):
    """gradcheck, jacobian and hessian index by integers: elements that one rank has, and that all wait for."""
    x, weight = draw(3, 4), draw(4, 2, seed=4)

    def f(t):
        return torch.tanh(t @ weight).square().sum(1)

    jacobian, hessian = torch.autograd.functional.jacobian, torch.autograd.functional.hessian
    expected, second = jacobian(f, x), hessian(lambda t: f(t).sum(), x)

    def body(rank):
        ts.set_policies("allow", "allow")
        mesh = ts.Mesh({"x": 2})
        put = lambda: ts.distribute_tensor(x.clone(), mesh, [ts.Shard(dim)], {dim: [1, 2] if dim == 0 else [4, 0]}).detach().requires_grad_(True)
        assert torch.autograd.gradcheck(f, (put(),), rtol=1e-5)
        assert torch.autograd.gradcheck(f, (put(),), rtol=1e-5, fast_mode=True)
        assert torch.autograd.gradgradcheck(f, (put(),))
        with pytest.raises(RuntimeError, match="Jacobian mismatch"):
            torch.autograd.gradcheck(lambda t: f(WrongGradient.apply(t)), (put(),), rtol=1e-5)
        assert_same(jacobian(f, put()), expected, "jacobian")
        assert_same(jacobian(f, put(), create_graph=True), expected, "jacobian with a graph")
        assert_same(hessian(lambda t: f(t).sum(), put()), second, "hessian")

    on_ranks(2, body)


@pytest.mark.parametrize("sizes", [[5], [0, 5], [0, 0, 5], [5, 0, 0], [2, 0, 3]])
def test_rows_that_are_written_where_one_rank_has_everything(sizes):
    """That rank needs no copy of its rows, which the others are sent: its views must not be refused by it alone."""

    def written(y):
        y[1] -= 2
        y[None, 3] *= 3
        y[2:][1][1:] += y[4, :-1]
        row = y[1:].t()[:, 1]
        row.sub_(2)
        y[..., None][0] = row.sum()
        again = y[4]
        again.neg_()
        return y, again + 1

    def body(rank):
        ts.set_policies("allow", "allow")
        mesh = ts.Mesh({"x": len(sizes)})
        y = ts.distribute_tensor(ROWS.clone(), mesh, [ts.Shard(0)], {0: sizes}).detach()
        for got, expected in zip(written(y), written(ROWS.clone())):
            assert_same(got, expected)
        for view in (lambda t: t[4, :-1], lambda t: t[2:][1][1:], lambda t: t[1:].t()[2:, 1]):
            assert view(y).storage_offset() == view(ROWS).storage_offset()
        for wrong in (lambda t: t[3][1:].add_(t[3][:-1]), lambda t: t[2:][1][1:].copy_(t[3, :-1])):
            with pytest.raises(RuntimeError):
                wrong(y)
        first, second = y[1], y[1]
        second.add_(1)
        assert_same(first + 1, second + 1)  # taken again, since its base has changed
        assert_same(y[1], second)

    on_ranks(len(sizes), body)


def test_identities_are_written_into_sharded_weights():
    def body(rank):
        ts.set_policies("allow", "allow")
        mesh = ts.Mesh({"x": 3})
        for dim in (0, 1):
            put = lambda t: ts.distribute_tensor(t.clone(), mesh, [ts.Shard(dim)]).detach()
            weight = put(ROWS)
            assert nn.init.eye_(weight) is weight
            assert_same(weight, torch.eye(5, 6, dtype=torch.float64))
            square = put(SQUARE[0])
            torch.eye(3, out=square)
            assert_same(square, torch.eye(3, dtype=torch.float64))
            for wrong in (lambda: torch.eye(6, 5, out=weight), lambda: torch.eye(-5, 6, out=weight)):
                with pytest.raises(RuntimeError):
                    wrong()
            assert_same(weight.sum(), torch.tensor(5.0, dtype=torch.float64))

    on_ranks(3, body)


def test_forward_mode_of_rows_that_are_written():
    """The tangent of a view is written into the zeros of its base."""
    from torch.autograd import forward_ad

    def written(x):
        out = torch.zeros_like(x)
        out[0] = x[1] * 2
        out[2:, 1:3] = x[1:4, 3:5].sin()
        table = x.t()[1:].clone()
        return out, torch.zeros_like(table).copy_(table), torch.stack([x[0], x[0] * x[1]])

    tangent = ROWS.cos()

    def duals(put):
        made = written(forward_ad.make_dual(put(ROWS), put(tangent)))
        return [t for y in made for t in forward_ad.unpack_dual(y)]

    def body(rank):
        ts.set_policies("allow", "allow")
        mesh = ts.Mesh({"x": 3})
        for dim in (0, 1):
            for got, expected in zip(duals(lambda t: ts.distribute_tensor(t.clone(), mesh, [ts.Shard(dim)]).detach()), duals(torch.clone)):
                assert_same(got, expected)

    with forward_ad.dual_level():  # the process has one at a time, and ranks here are threads of it
        on_ranks(3, body)


SHUFFLES = {
    "pixel_shuffle by 1": lambda x: F.pixel_shuffle(x, 1),
    "pixel_shuffle of a pixel": lambda x: F.pixel_shuffle(x[:, :, :1, :1], 2),
    "pixel_unshuffle by 1": lambda x: F.pixel_unshuffle(x, 1),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "channel_shuffle of one group": lambda x: F.channel_shuffle(x, 1),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", SHUFFLES)
def test_shuffles_have_memory_of_their_own(name, inference):
    x = draw(2, 4, 6, 4)
    expected = SHUFFLES[name](x)

    def body(rank):
        ts.set_policies("allow", "allow")
        mesh = ts.Mesh({"x": 2})
        for dim in range(4):
            with torch.inference_mode(inference):
                t = ts.distribute_tensor(x.clone(), mesh, [ts.Shard(dim)]).detach()
                y = SHUFFLES[name](t)
                assert_same(y, expected)
                assert not y._is_view()
                y.fill_(7.0)
                assert_same(t, x)

    on_ranks(2, body)


FIELD = torch.arange(48, dtype=torch.float64).reshape(2, 3, 2, 4).sin()
OF_A_ROW = {
    "reshape": lambda x: x[..., 3].reshape(-1),
    "split": lambda x: x[:, 0].reshape(2, 2, 2, 2),
    "linear": lambda x: F.linear(x[..., 3], torch.ones(5, 2, dtype=torch.float64)),
    "flatten": lambda x: x.select(2, 1).flatten(0, 1),
    "diagonal": lambda x: x[:, 1:].diagonal().reshape(-1),
    "a part": lambda x: x[1].reshape(-1)[3:],
    "another order": lambda x: x.permute(3, 2, 1, 0).select(2, 1).permute(1, 0, 2).view(8, 2),
    "one element": lambda x: x[:, 1, 0].reshape(-1)[1],
}


@pytest.mark.parametrize("name", OF_A_ROW)
def test_rows_of_a_sharded_dim_can_be_reshaped(name):
    """What was gathered has strides of its own: those of the global memory lead out of it."""
    leaf = FIELD.clone().requires_grad_()
    expected = OF_A_ROW[name](leaf)
    expected.sin().sum().backward()

    def body(rank):
        ts.set_policies("allow", "allow")
        mesh = ts.Mesh({"x": 3})
        for dim in range(4):
            for inference in (False, True):
                with torch.inference_mode(inference):
                    x = ts.distribute_tensor(FIELD.clone(), mesh, [ts.Shard(dim)]).detach().requires_grad_(not inference)
                    y = OF_A_ROW[name](x)
                    assert_same(y, expected)
            x = ts.distribute_tensor(FIELD.clone(), mesh, [ts.Shard(dim)]).detach().requires_grad_()
            OF_A_ROW[name](x).sin().sum().backward()
            assert_same(x.grad, leaf.grad)
        y = ts.distribute_tensor(FIELD.clone(), mesh, [ts.Shard(1)]).detach()
        y[:, 2].reshape(-1)[5:].mul_(2)
        again = FIELD.clone()
        again[:, 2].reshape(-1)[5:].mul_(2)  # a copy: nothing is written to the field
        assert_same(y, again)
        with pytest.raises(RuntimeError, match="strides have no meaning"):
            torch.as_strided(y[:, 1], (2, 2), (8, 1))

    on_ranks(3, body)


def test_what_one_rank_alone_would_see_to_be_wrong():
    def body(rank):
        ts.set_policies("allow", "allow")
        mesh = ts.Mesh({"x": 2})
        sequence = torch.tensor([[3.0, 1.0, 2.0, 4.0], [4.0, 3.0, 2.0, 1.0]])
        sorter, wrong = sequence.argsort(1), torch.tensor([[0, 1, 2, 3], [0, 1, 2, 9]])
        values = torch.tensor([[1.5, 3.5], [2.5, 0.5]])
        put = lambda t: rows(t, mesh).detach()
        assert_same(torch.searchsorted(put(sequence), put(values), sorter=put(sorter)), torch.searchsorted(sequence, values, sorter=sorter))
        with pytest.raises(RuntimeError, match="sorter"):
            torch.searchsorted(put(sequence), put(values), sorter=put(wrong))
        for other in (sequence.double(), sequence.to(torch.int64), sequence + 1, sequence[:, :2]):
            assert torch.equal(put(sequence), put(other)) == torch.equal(sequence, other)

    on_ranks(2, body)

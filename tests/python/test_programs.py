"""Ordinary programs around sharded tensors: what plain PyTorch takes is taken, and gives the same."""

import copy
import io
import math

import pytest
import torch
from torch import nn

import tessera as ts
from support import assert_same, on_ranks, whole

F = torch.nn.functional


def draw(*shape, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows(t, mesh):
    return ts.distribute_tensor(t, mesh, [ts.Shard(0)])


def plain(make):
    torch.manual_seed(1)
    return make().double()


def compare(make, x, call=lambda net, x: net(x), backward=True, rule=None):
    """Value, gradients of the input and of every parameter, beside one process."""
    net, x = plain(make), x.clone().requires_grad_(backward)
    y = call(net, x)
    if backward:
        (y * y.detach().cos()).sum().backward()
    nets = [plain(make) for _ in range(2)]

    def body(rank):
        mesh = ts.Mesh({"x": 2})
        ts.set_policies("allow", "allow")
        mine, t = ts.distribute_module(nets[rank], mesh, rule), rows(x.detach(), mesh).requires_grad_(backward)
        out = call(mine, t)
        assert_same(out, y, "output")
        if not backward:
            return
        (out * out.detach().cos()).sum().backward()
        assert_same(t.grad, x.grad, "input gradient")
        for (name, p), q in zip(mine.named_parameters(), net.parameters()):
            if q.grad is not None:
                assert_same(p.grad, q.grad, name)

    on_ranks(2, body)


def layer(norm_first=False, activation="relu"):
    return lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first, activation=activation)


@pytest.mark.parametrize("make", [layer(), layer(True), layer(False, "gelu"), lambda: nn.TransformerEncoder(layer()(), 2)])
@pytest.mark.parametrize("masked", [None, "keys", "causal"])
def test_transformers_that_evaluate(make, masked):
    """Without gradients libtorch runs fused layers."""
    masks = {}
    if masked == "keys":
        masks = {"src_key_padding_mask": torch.tensor([[False, False, True, True], [False] * 4, [False, False, False, True]])}
    elif masked == "causal":
        masks = {"mask" if "Encoder(" in repr(make()) else "src_mask": nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)}

    def call(net, x):
        net.eval()
        with torch.no_grad():
            out = net(x, **masks)
        # what padding attends to means nothing
        return out.masked_fill(masks["src_key_padding_mask"][..., None], 0) if masked == "keys" else out

    compare(make, draw(3, 4, 8), call, backward=False)


def test_attention_that_evaluates():
    def call(net, x):
        net.eval()
        with torch.no_grad():
            out, weights = net(x, x, x)
        return torch.cat([out, weights], -1)

    compare(lambda: nn.MultiheadAttention(8, 2, batch_first=True), draw(3, 4, 8), call, backward=False)


def test_anomaly_detection():
    # the mode belongs to the process: ranks that are threads must not enter and leave it by themselves
    with torch.autograd.detect_anomaly(check_nan=True):
        compare(lambda: nn.Linear(6, 4), draw(5, 6), lambda net, x: net(x).square())
    assert not torch.is_anomaly_enabled()


def test_distributions_with_validation():
    def call(_, x):
        normal = torch.distributions.Normal(x, x.exp(), validate_args=True)
        return normal.log_prob(x * 0.5) + torch.distributions.Categorical(logits=x, validate_args=True).entropy()[:, None]

    compare(nn.Identity, draw(5, 6), call)


@pytest.mark.parametrize("way", ["parametrization", "hook"])
def test_weight_norm(way):
    norm = nn.utils.parametrizations.weight_norm if way == "parametrization" else nn.utils.weight_norm
    compare(lambda: norm(nn.Linear(6, 4)), draw(5, 6))


def by_rows(name, p):
    return [ts.Shard(0)] if p.dim() else None


@pytest.mark.parametrize("rule", [None, by_rows])
@pytest.mark.parametrize("way", ["parametrization", "hook"])
def test_spectral_norm(way, rule):
    """Trained: each step's forward goes on with the power iteration of the one before."""
    norm = nn.utils.parametrizations.spectral_norm if way == "parametrization" else nn.utils.spectral_norm
    make = lambda: nn.Sequential(norm(nn.Linear(6, 4), n_power_iterations=2), nn.Unflatten(1, (2, 2)), norm(nn.Conv1d(2, 3, 2)))
    compare(make, draw(5, 6), rule=rule)
    x = draw(5, 6)

    def trained(net, x):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        return net.eval()(x), net.state_dict()

    expected, state = trained(plain(make), x)
    nets = [plain(make) for _ in range(2)]

    def body(rank):
        mesh = ts.Mesh({"x": 2})
        ts.set_policies("allow", "allow")
        got, mine = trained(ts.distribute_module(nets[rank], mesh, rule), rows(x, mesh))
        assert_same(got, expected, "output")
        assert mine.keys() == state.keys() and any("_u" in name for name in mine)
        for name, value in mine.items():
            assert ts.is_sharded(value), name
            assert_same(value, state[name], name)

    on_ranks(2, body)


def test_losses_with_weights():
    for weights in ({"pos_weight": draw(4, seed=5).abs()}, {"weight": draw(4, seed=6).abs()}, {"pos_weight": draw(1, seed=7).abs()}):
        target = draw(5, 4, seed=8).sigmoid()

        def call(_, x):
            return F.binary_cross_entropy_with_logits(x, rows_like(target, x), **weights)

        compare(nn.Identity, draw(5, 4), call)


def rows_like(t, x):
    return ts.distribute_tensor(t, ts.spec(x).mesh, ts.spec(x).placements) if ts.is_sharded(x) else t


@pytest.mark.parametrize("rule", [None, by_rows])
def test_embedding_with_max_norm(rule):
    index = torch.tensor([[0, 3], [2, 2], [6, 1]])
    compare(
        lambda: nn.Embedding(7, 4, max_norm=0.7),
        draw(3, 2, 4),
        lambda net, x: net(rows_like(index, x)) * x,
        rule=rule,
    )


def test_sequences_of_different_lengths():
    lengths = torch.tensor([4, 2, 1])

    def call(net, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        out, _ = nn.utils.rnn.pad_packed_sequence(net(packed)[0], batch_first=True)
        return out

    compare(lambda: nn.GRU(6, 5, batch_first=True), draw(3, 4, 6), call)
    compare(nn.Identity, draw(3, 4), lambda _, x: nn.utils.rnn.pad_sequence([x[0], x[1, :2], x[2, :3]], batch_first=True))


class Spectral(nn.Module):
    """As neural operators have it: products of few modes, written into zeros."""

    def __init__(self, channels=2, modes=2):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(2, channels, channels, modes, modes, dtype=torch.float64))

    def forward(self, x):
        m = self.modes
        parts = torch.fft.rfft2(x)
        weight = torch.complex(self.weight[0], self.weight[1])
        out = torch.zeros(x.shape[0], x.shape[1], x.shape[-2], x.shape[-1] // 2 + 1, dtype=parts.dtype)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", parts[:, :, :m, :m], weight)
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", parts[:, :, -m:, :m], weight)
        return torch.fft.irfft2(out, s=x.shape[-2:])


def test_values_written_into_zeros_of_the_model():
    compare(Spectral, draw(3, 2, 6, 8))

    def writes(_, x):
        out = torch.zeros(4, 3, 6, dtype=x.dtype)
        out[0] = x * 2
        out[1, :, ::2] = x[:, ::2]
        out[3, 1:2] = x[1:2]
        return out

    compare(nn.Identity, draw(3, 6), writes)

    def stays_sharded(rank):
        mesh = ts.Mesh({"x": 2})
        ts.set_policies("error", "allow")
        x, out = rows(draw(5, 6), mesh), torch.zeros(5, 9, dtype=torch.float64)
        out[:, 2:8] = x
        assert ts.spec(out).placements == (ts.Shard(0),) and ts.spec(out).sizes == ts.spec(x).sizes
        kept = torch.zeros(5, 6, dtype=torch.float64)
        view = kept[1:]
        with pytest.raises(RuntimeError, match="others are views of too"):
            kept[:3] = x[:3]
        assert view.sum() == 0

    on_ranks(2, stays_sharded)


@pytest.mark.parametrize("samples", [1, 3])
def test_transforms_move_to_the_longest_dim_and_back(samples):
    """With rows sharded: a dim of one sample, shared by two ranks, would leave all work to one of them."""
    x = draw(samples, 2, 6, 8)

    def body(rank):
        mesh = ts.Mesh({"x": 2})
        ts.set_policies("allow", "allow")
        parts = torch.fft.rfft2(ts.distribute_tensor(x, mesh, [ts.Shard(2)]))
        assert ts.spec(parts).placements == (ts.Shard(3),)
        assert_same(parts, torch.fft.rfft2(x))
        back = torch.fft.irfft2(parts, s=(6, 8))
        assert ts.spec(back).placements == (ts.Shard(2),)
        assert_same(back, x)

    on_ranks(2, body)


def scripted(net):
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(net), buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def traced(net):
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.trace(net, draw(4, 2, 6, 6)), buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


@pytest.mark.parametrize("load", [scripted, traced])
def test_modules_from_torchscript_train(load):
    def make():
        return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(3, 2, 2, stride=2), nn.BatchNorm2d(2))

    def trained(net, x):
        optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        return net(x)

    x = draw(5, 2, 6, 6)
    expected = trained(load(plain(make)), x)
    nets = [load(plain(make)) for _ in range(4)]

    def body(rank):
        mesh = ts.Mesh({"x": 2})
        for dim in (0, 2):
            net = ts.distribute_module(nets[rank + dim], mesh)
            assert_same(trained(net, ts.distribute_tensor(x, mesh, [ts.Shard(dim)])), expected, f"dim {dim}")

    on_ranks(2, body)


def test_scaled_losses():
    """GradScaler: one rank's overflow skips the step of all."""

    def trained(net, x, scaler, sharded):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(4):
            optimizer.zero_grad()
            loss = net(x * (float("inf") if step == 1 else 1)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale(), [whole(p) for p in net.parameters()]

    x = draw(5, 6)
    expected = trained(plain(lambda: nn.Linear(6, 4)), x, torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2), False)
    nets = [plain(lambda: nn.Linear(6, 4)) for _ in range(4)]

    def body(rank):
        mesh = ts.Mesh({"x": 2})
        ts.set_policies("allow", "allow")
        for k, rule in enumerate((None, by_rows)):
            net = ts.distribute_module(nets[2 * k + rank], mesh, rule)
            got = trained(net, rows(x, mesh), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2), True)
            assert got[0] == expected[0]
            for a, b in zip(got[1], expected[1]):
                assert_same(a, b)

    on_ranks(2, body)


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_optimizers(kind):
    options = {"lr": 0.05, "fused": True} | ({"momentum": 0.9} if kind == "SGD" else {})

    def trained(net, x):
        optimizer = getattr(torch.optim, kind)(net.parameters(), **options)
        for _ in range(3):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        return [whole(p) for p in net.parameters()]

    x = draw(5, 6)
    expected = trained(plain(lambda: nn.Linear(6, 4)), x)
    nets = [plain(lambda: nn.Linear(6, 4)) for _ in range(4)]

    def body(rank):
        mesh = ts.Mesh({"x": 2})
        ts.set_policies("allow", "allow")
        for k, rule in enumerate((None, by_rows)):
            for a, b in zip(trained(ts.distribute_module(nets[2 * k + rank], mesh, rule), rows(x, mesh)), expected):
                assert_same(a, b)

    on_ranks(2, body)


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


class WrongGradient(torch.autograd.Function):
    """Gives its input, and a gradient that is wrong where ranks share it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * 1.001 if ts.is_sharded(g) else g


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
        assert "test_programs.py" in report.refused[0].where and "no sharding rule" in report.refused[0].why
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


ROWS = torch.arange(30, dtype=torch.float64).reshape(5, 6) / 10 + 0.1
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


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).mT

    def right_inverse(self, w):
        return w.triu()


@pytest.mark.parametrize("rule", [None, by_rows])
def test_parametrizations_of_sharded_weights_come_and_go(rule):
    def trained(net, x):
        nn.utils.parametrize.register_parametrization(net, "weight", Symmetric())
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        nn.utils.parametrize.remove_parametrizations(net, "weight")
        net(x).square().mean().backward()
        return net.weight, net.weight.grad

    x = draw(5, 4)
    expected = trained(plain(lambda: nn.Linear(4, 4)), x)
    nets = [plain(lambda: nn.Linear(4, 4)) for _ in range(2)]

    def body(rank):
        ts.set_policies("allow", "allow")
        mesh = ts.Mesh({"x": 2})
        for got, wanted in zip(trained(ts.distribute_module(nets[rank], mesh, rule), rows(x, mesh)), expected):
            assert_same(got, wanted)
        a, b = rows(ROWS, mesh).detach(), rows(ROWS * 2, mesh).detach()
        a.set_(b)
        b.add_(1)
        assert_same(a, ROWS * 2 + 1)
        for other in (ts.redistribute(b, [ts.Shard(1)]), rows(ROWS[:4], mesh), rows(ROWS.float(), mesh)):
            with pytest.raises(RuntimeError):
                a.set_(other)
        assert_same(a, ROWS * 2 + 1)

    on_ranks(2, body)


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_optimizers_go_on_with_whole_states(kind):
    """What was saved as plain tensors lies where its parameter does, and so do later states."""
    options = {"lr": 0.05, "fused": True} | ({"momentum": 0.9} if kind == "SGD" else {})

    def trained(net, x):
        def steps():
            optimizer = getattr(torch.optim, kind)(net.parameters(), **options)
            if state:
                optimizer.load_state_dict(state)
            for _ in range(2):
                optimizer.zero_grad()
                net(x).square().mean().backward()
                optimizer.step()
            return optimizer

        state = None
        saved = steps().state_dict()
        state = {**saved, "state": {k: {n: whole(v).clone() if torch.is_tensor(v) else v for n, v in s.items()} for k, s in saved["state"].items()}}
        return steps()

    x = draw(5, 6)
    net = plain(lambda: nn.Linear(6, 4))
    trained(net, x)
    nets = [plain(lambda: nn.Linear(6, 4)) for _ in range(2)]

    def body(rank):
        ts.set_policies("allow", "allow")
        mesh = ts.Mesh({"x": 2})
        mine = ts.distribute_module(nets[rank], mesh, by_rows)
        optimizer = trained(mine, rows(x, mesh))
        for p, q in zip(mine.parameters(), net.parameters()):
            assert_same(p, q)
            for name, value in optimizer.state[p].items():
                if torch.is_tensor(value) and value.dim():
                    assert ts.spec(value).placements == (ts.Shard(0),), name

    on_ranks(2, body)


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

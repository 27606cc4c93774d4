"""Ordinary modules and training around sharded tensors: what plain PyTorch takes is taken, and gives the same."""

import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tessera as ts
from program_cases import ROWS, by_rows, compare, plain, rows, rows_like
from support import assert_same, draw, on_ranks, whole


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


M = draw(4, 4, seed=8)


def turned(x):
    """A view whose shape changes in place, as do those of it, before it is written to."""
    v = x.view(4, 4)
    v.t_()
    row = v[0]
    v.mul_(M)
    row.unsqueeze_(0)
    row.add_(M[:1])
    return x * 3, v, row


def taken_before(x):
    v = x.view(2, 2, 4)
    row = v[0]
    v.squeeze_(0)
    v.transpose_(0, 2)
    v.unsqueeze_(0)
    row.mul_(M[:2])
    v[0, 1].mul_(2)
    return x * 3, v, row


def determinants(x):
    """Their gradients use factors that libtorch transposes or not as a matrix lies in memory."""
    matrices = x.view(2, 2, 4)[:, :, :2]
    return x[:3, :3].det(), torch.linalg.slogdet(x[1:, 1:])[1], torch.linalg.solve(x[:2, 2:], x[2:, :2]), matrices.det(), matrices.mT.inverse()


def changed_below_copies(x):
    """Views that had to be copied, read after their base has changed: some ranks have none of them."""
    flat, windows = x.view(-1), x.view(-1).unfold(0, 2, 2)
    x.mul_(0.7)
    return x * 1.0, flat * 1.0, windows * 1.0


@pytest.mark.parametrize("program", [turned, taken_before, determinants, changed_below_copies])
def test_views_changed_in_place(program):
    x = draw(4, 4).requires_grad_()

    def run(x):
        return torch.cat([y.flatten() for y in program(x * 1.0)])

    expected = run(x)
    (expected * torch.arange(len(expected)).cos()).sum().backward()

    def body(rank):
        mesh = ts.Mesh({"x": 3})
        ts.set_policies("allow", "allow")
        for where, sizes in ((ts.Replicate(), None), (ts.Shard(0), {0: [1, 0, 3]}), (ts.Shard(0), None), (ts.Shard(1), {1: [3, 0, 1]})):
            t = ts.distribute_tensor(x.detach(), mesh, where, sizes).requires_grad_()
            got = run(t)
            assert_same(got, expected, f"{where} {sizes}")
            (got * torch.arange(len(expected)).cos()).sum().backward()
            assert_same(t.grad, x.grad, f"{where} {sizes}: gradient")

    on_ranks(3, body)


def test_windows_of_rows_that_do_not_divide():
    x = draw(5, 2)

    def body(rank):
        mesh = ts.Mesh({"x": 3})
        ts.set_policies("allow", "allow")
        for sizes in ([2, 2, 1], [1, 2, 2], [0, 5, 0], [1, 0, 4]):
            t = ts.distribute_tensor(x, mesh, [ts.Shard(0)], {0: sizes})
            assert_same(t.unfold(0, 2, 2), x.unfold(0, 2, 2), str(sizes))
            assert_same(t.unfold(0, 1, 3), x.unfold(0, 1, 3), str(sizes))

    on_ranks(3, body)

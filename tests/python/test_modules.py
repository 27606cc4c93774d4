"""torch.nn modules and torch.optim on sharded tensors: what one process would give."""

import copy

import pytest
import torch
from torch import nn

import tessera as ts
from support import assert_same, on_ranks, whole


class SelfAttention(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.attention, self.causal = nn.MultiheadAttention(8, 2, batch_first=True), causal

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype) if self.causal else None
        return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]


MODULES = {
    "linear": lambda: nn.Linear(8, 5),
    "mlp": lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3)),
    "layer_norm": lambda: nn.LayerNorm(8),
    "attention": lambda: SelfAttention(False),
    "causal_attention": lambda: SelfAttention(True),
    "transformer_layer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    "transformer_pre_norm": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True),
}


def build(name):
    torch.manual_seed(1)
    return MODULES[name]().double()


def batch(rows, last=8):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(rows, 4, last, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("sizes", [[5], [3, 2], [0, 5], [2, 0, 3], [1, 1, 3]])
@pytest.mark.parametrize("name", MODULES)
def test_samples_sharded(name, sizes):
    net, x = build(name), batch(5).requires_grad_(True)
    y = net(x)
    (y * y.detach().cos()).sum().backward()
    # Ranks as threads must not share a module.
    nets = [build(name) for _ in sizes]
    # nn.MultiheadAttention merges samples with the sequence before its last product, samples innermost, and so it moves them.
    merges = "attention" in name or "transformer" in name

    def body(rank):
        mine = ts.distribute_module(nets[rank], ts.Mesh({"data": len(sizes)}))
        ts.set_policies("allow" if merges else "error", "allow")  # batch parallel: nothing but gradients travels
        t = ts.distribute_tensor(x.detach(), ts.Mesh({"data": len(sizes)}), [ts.Shard(0)], {0: sizes}).requires_grad_(True)
        with ts.CommTrace() as trace:
            out = mine(t)
        assert merges or (trace.bytes == 0 and ts.spec(out).sizes[0] == sizes)
        assert_same(out, y, "output")
        (out * out.detach().cos()).sum().backward()
        assert_same(t.grad, x.grad, "input gradient")
        for (key, p), q in zip(mine.named_parameters(), net.parameters()):
            assert ts.spec(p.grad).placements == (ts.Replicate(),), key
            assert_same(p.grad, q.grad, key)

    on_ranks(len(sizes), body)


@pytest.mark.parametrize("sizes", [[2, 2], [3, 1], [1, 0, 3]])
@pytest.mark.parametrize("name", MODULES)
def test_sequence_sharded(name, sizes):
    net, x = build(name), batch(3).requires_grad_(True)
    y = net(x)
    (y * y.detach().cos()).sum().backward()  # of squares behind a norm the gradient is round-off
    nets = [build(name) for _ in sizes]

    def body(rank):
        mesh = ts.Mesh({"domain": len(sizes)})
        mine = ts.distribute_module(nets[rank], mesh)
        ts.set_policies("allow", "allow")
        t = ts.distribute_tensor(x.detach(), mesh, [ts.Shard(1)], {1: sizes}).requires_grad_(True)
        out = mine(t)
        assert_same(out, y, "output")
        (out * out.detach().cos()).sum().backward()
        assert_same(t.grad, x.grad, "input gradient")
        for (key, p), q in zip(mine.named_parameters(), net.parameters()):
            assert_same(p.grad, q.grad, key)

    on_ranks(len(sizes), body)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam_loop": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


def train(net, optimizer, x, target, steps):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), target)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("rule", ["replicated", "sharded"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_one_process(name, rule):
    net, x = build("mlp"), batch(7)
    target = torch.randn(7, 4, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected = train(net, OPTIMIZERS[name](net.parameters()), x, target, 5)
    sizes = [4, 0, 3]
    nets = [build("mlp") for _ in sizes]

    def where(key, tensor):
        return ([ts.Shard(0)], {0: [tensor.shape[0] - 2, 2, 0]}) if rule == "sharded" and tensor.dim() == 2 else None

    def body(rank):
        mesh = ts.Mesh({"data": 3})
        ts.set_policies("allow", "allow")
        mine = ts.distribute_module(nets[rank], mesh, where)
        before = [ts.spec(p) for p in mine.parameters()]
        t = ts.distribute_tensor(x, mesh, [ts.Shard(0)], {0: sizes})
        u = ts.distribute_tensor(target, mesh, [ts.Shard(0)], {0: sizes})
        losses = train(mine, OPTIMIZERS[name](mine.parameters()), t, u, 5)
        assert losses == pytest.approx(expected, rel=1e-10)
        assert before == [ts.spec(p) for p in mine.parameters()]
        for p, q in zip(mine.parameters(), net.parameters()):
            assert_same(p, q)

    on_ranks(3, body)


def test_state_dict_of_whole_values_loads_into_a_plain_module():
    nets = [build("mlp") for _ in range(2)]

    def body(rank):
        mine = ts.distribute_module(nets[rank], ts.Mesh({"x": 2}), lambda key, t: [ts.Shard(0)] if t.dim() == 2 else None)
        return {key: whole(t) for key, t in mine.state_dict().items()}

    for state in on_ranks(2, body):
        plain = build("mlp")
        plain.load_state_dict(state)
        assert torch.equal(plain(batch(2)), build("mlp")(batch(2)))


def test_a_plain_state_dict_loads_into_a_sharded_module():
    other, x = build("mlp"), batch(5)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2).add_(0.25)
    state, y = other.state_dict(), other(x).detach()
    nets = [build("mlp") for _ in range(3)]

    def body(rank):
        mesh = ts.Mesh({"x": 3})
        net = ts.distribute_module(nets[rank], mesh, lambda key, t: ([ts.Shard(0)], {0: [0, 2, len(t) - 2]}) if t.dim() == 2 else None)
        net.load_state_dict(state)
        for key, t in net.state_dict().items():
            assert ts.is_sharded(t) and torch.equal(whole(t), state[key]), key
        assert_same(net(ts.distribute_tensor(x, mesh, [ts.Shard(0)])), y)

    on_ranks(3, body)


def test_plain_module_on_sharded_input():
    net, x = build("mlp"), batch(5)
    y = net(x)
    y.sum().backward()
    nets = [build("mlp") for _ in range(2)]

    def body(rank):
        t = ts.distribute_tensor(x, ts.Mesh({"x": 2}), [ts.Shard(0)], {0: [1, 4]})
        out = nets[rank](t)
        assert_same(out, y)
        out.sum().backward()
        for p, q in zip(nets[rank].parameters(), net.parameters()):
            assert not ts.is_sharded(p.grad)
            assert_same(p.grad, q.grad)

    on_ranks(2, body)


def test_double_backward():
    x = batch(5).requires_grad_(True)
    (g,) = torch.autograd.grad(x.tanh().pow(3).sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(g.square().sum(), x)

    def body(rank):
        t = ts.distribute_tensor(x.detach(), ts.Mesh({"x": 2}), [ts.Shard(0)], {0: [4, 1]}).requires_grad_(True)
        (g,) = torch.autograd.grad(t.tanh().pow(3).sum(), t, create_graph=True)
        (got,) = torch.autograd.grad(g.square().sum(), t)
        assert_same(got, expected)

    on_ranks(2, body)


class Residual(nn.Module):
    """A stem, a block that halves the rows, one that does not, and a head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 7, 2, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.halves = nn.Sequential(nn.Conv2d(6, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.side = nn.Sequential(nn.Conv2d(6, 8, 1, 2, bias=False), nn.BatchNorm2d(8))
        self.stays = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x)
        x = nn.functional.relu(self.halves(x) + self.side(x))
        x = nn.functional.relu(self.stays(x) + x)
        return self.head(torch.flatten(self.pool(x), 1))


class UNet(nn.Module):
    """Down, up, and across."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.SiLU())
        self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.last = nn.Sequential(nn.Conv2d(12, 6, 3, padding=1), nn.GELU(), nn.Conv2d(6, 2, 1))

    def forward(self, x):
        x = self.first(x)
        return self.last(torch.cat([self.up(self.down(x)), x], 1))


NETWORKS = {
    "residual": (Residual, (4, 3, 32, 16), 2),
    "unet": (UNet, (4, 3, 16, 8), 2),
    "encoder": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2), (4, 9, 8), 1),
}


@pytest.mark.parametrize("sizes", ["even", "uneven"])
@pytest.mark.parametrize("along", ["rows", "samples"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_train_as_one_process(name, along, sizes):
    make, shape, rows = NETWORKS[name]
    dim = rows if along == "rows" else 0
    torch.manual_seed(1)
    plain = make().double()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    nets = [copy.deepcopy(plain) for _ in range(2)]

    def trained(net, x):
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            out = net(x)
            out.square().mean().backward()
            optimizer.step()
        return out

    expected = trained(plain, x)
    shares = None if sizes == "even" else {dim: [shape[dim] - shape[dim] // 3, shape[dim] // 3]}

    def body(rank):
        mesh = ts.Mesh({"x": 2})
        ts.set_policies("allow", "allow")
        out = trained(ts.distribute_module(nets[rank], mesh), ts.distribute_tensor(x, mesh, [ts.Shard(dim)], shares))
        assert_same(out, expected, "output")
        if dim == 0 or name != "residual":  # behind its pool no row is left
            assert ts.spec(out).placements == (ts.Shard(dim),)
        for key, p in plain.named_parameters():
            assert_same(nets[rank].get_parameter(key), p, key)
        for key, b in plain.named_buffers():
            assert_same(nets[rank].get_buffer(key), b, key)

    on_ranks(2, body)


class ExpertLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 5, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(5, 4, 6)), nn.Parameter(torch.randn(5, 6, 4))
        self.double()

    def forward(self, x):
        routing = ts.Routing(torch.softmax(self.router(x), -1), 2, capacity=0.8, normalized=True)
        h = torch.tanh(ts.grouped_product(routing.to_experts(x), self.up, routing))
        return x + routing.to_tokens(ts.grouped_product(h, self.down, routing)), routing


def test_a_layer_of_experts_is_that_of_one_process():
    torch.manual_seed(4)
    one, x = ExpertLayer(), torch.randn(11, 4, dtype=torch.double)
    state = {name: t.clone() for name, t in one.state_dict().items()}
    y, its = one(x)
    (y.square().mean() + its.balance()).backward()

    def body(rank):
        mesh = ts.Mesh({"expert": 3})
        net = ExpertLayer()
        net.load_state_dict(state)
        ts.distribute_module(net, mesh, lambda name, t: [ts.Shard(0)] if name in ("up", "down") else None)
        got, routing = net(ts.distribute_tensor(x, mesh, [ts.Shard(0)], {0: [7, 0, 4]}))
        (got.square().mean() + routing.balance()).backward()
        assert routing.chosen == its.chosen and routing.left_out == its.left_out > 0 and len(routing.counts) == (2, 2, 1)[rank]
        torch.testing.assert_close(whole(got), y.detach())
        for name, p in one.named_parameters():
            torch.testing.assert_close(whole(dict(net.named_parameters())[name].grad), p.grad)
        with pytest.raises(ts.InvalidArgument, match="cannot choose 6 of 5"):
            ts.Routing(torch.ones(2, 5), 6)

    on_ranks(3, body)

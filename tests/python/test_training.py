"""Accumulation without communication, and files, from Python."""

import copy
import gc

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import tessera as ts
from support import assert_same, on_ranks


def build():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def batch(seed):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_no_sync_sends_nothing_and_loses_nothing():
    plain, nets = build(), [build() for _ in range(3)]
    for seed in range(3):
        plain(batch(seed)).square().sum().backward()

    def body(rank):
        mesh = ts.Mesh({"data": 3})
        net = ts.distribute_module(nets[rank], mesh)

        def step(seed):
            net(ts.distribute_tensor(batch(seed), mesh, [ts.Shard(0)], {0: [3, 0, 2]})).square().sum().backward()

        with ts.CommTrace() as trace:
            with ts.no_sync(net):
                step(0)
                step(1)
        assert trace.count == 0
        assert ts.spec(net[0].weight.grad).placements == (ts.Partial("sum"),)
        with ts.CommTrace() as trace:
            step(2)
        assert trace.count == 1, trace.table()
        for mine, expected in zip(net.parameters(), plain.parameters()):
            assert ts.spec(mine.grad).placements == (ts.Replicate(),)
            assert_same(mine.grad, expected.grad)

    on_ranks(3, body)


def test_no_sync_nests_and_goes_back_to_what_was():
    plain, nets = build(), [build() for _ in range(2)]
    for seed in range(4):
        plain(batch(seed)).square().sum().backward()

    def body(rank):
        mesh = ts.Mesh({"data": 2})
        net = ts.distribute_module(nets[rank], mesh)
        # hooks of the user's own beside ours
        seen = []
        for parameter in net.parameters():
            parameter.register_hook(lambda g: seen.append(g.shape))

        def step(seed):
            net(ts.distribute_tensor(batch(seed), mesh, [ts.Shard(0)], {0: [4, 1]})).square().sum().backward()

        scope = ts.no_sync(net)
        with ts.CommTrace() as trace:
            with scope, scope:
                step(0)
                with pytest.raises(ZeroDivisionError), ts.no_sync(net[0]):
                    raise ZeroDivisionError
                step(1)
            with scope:
                step(2)
        assert trace.count == 0
        with ts.CommTrace() as trace:
            step(3)
        assert trace.count == 1, trace.table()
        assert len(seen) == 4 * 4
        for mine, expected in zip(net.parameters(), plain.parameters()):
            assert_same(mine.grad, expected.grad)

    on_ranks(2, body)


def test_reduce_gradients_after_the_last_backward():
    plain, nets = build(), [build() for _ in range(2)]
    plain(batch(0)).square().sum().backward()

    def body(rank):
        mesh = ts.Mesh({"data": 2})
        net = ts.distribute_module(nets[rank], mesh)
        with pytest.raises(ZeroDivisionError), ts.no_sync(net):
            net(ts.distribute_tensor(batch(0), mesh, [ts.Shard(0)])).square().sum().backward()
            raise ZeroDivisionError
        for _ in range(2):
            ts.reduce_gradients(net)
        for mine, expected in zip(net.parameters(), plain.parameters()):
            assert ts.spec(mine.grad).placements == (ts.Replicate(),)
            assert_same(mine.grad, expected.grad)

    on_ranks(2, body)


@pytest.mark.parametrize("by_hand", [False, True])
def test_what_nothing_reduces_any_more_its_session_reduces(by_hand):
    """Layers that are unfrozen between two steps, and what a session has reduced that is closed."""

    def frozen():
        net = build()
        net[0].requires_grad_(False)
        return net, torch.optim.SGD(net.parameters(), 0.1)

    (plain, optimizer), pairs = frozen(), [frozen() for _ in range(2)]
    for step in range(4):
        plain[0].requires_grad_(step > 1)
        optimizer.zero_grad()
        plain(batch(step)).square().mean().backward()
        optimizer.step()

    def body(rank):
        net, optimizer = pairs[rank]
        first, second = (ts.Session(net, optimizer, signals=False) for _ in range(2))
        for step in range(4):
            net[0].requires_grad_(step > 1)
            if step == 3:
                first.close()
            session = second if step else first
            rows = batch(step)[slice(4 * rank, 4 + rank)]
            if by_hand:
                session.backward(net(rows).square().mean(), len(rows))
            else:
                session.micro_batch(lambda rows=rows: net(rows).square().mean(), len(rows))
            session.step()
        second.close()
        for mine, expected in zip(net.parameters(), plain.parameters()):
            assert_same(mine, expected)

    on_ranks(2, body)


def test_a_session_keeps_the_wrapper_that_it_is_given():
    plain, nets = build(), [build() for _ in range(2)]
    plain(batch(0)).square().mean().backward()

    def body(rank):
        rows = batch(0)[slice(4 * rank, 4 + rank)]
        optimizer = torch.optim.SGD(nets[rank].parameters(), 1.0)
        with ts.Session(ts.DistributedDataParallel(nets[rank]), optimizer, signals=False) as session:
            gc.collect()
            session.backward(nets[rank](rows).square().mean(), len(rows))
            session.step()
        for mine, expected in zip(nets[rank].parameters(), plain.parameters()):
            assert_same(mine, expected.detach() - expected.grad)

    on_ranks(2, body)


@pytest.mark.parametrize("place", [ts.distribute_module, ts.fully_shard])
def test_a_parameter_that_has_become_a_plain_tensor_is_told(place):
    nets = [build() for _ in range(2)]

    def body(rank):
        mesh = ts.Mesh({"data": 2})
        net = place(nets[rank], mesh)
        net[0].weight.data = torch.ones(6, 4).double()
        with pytest.raises(ts.GradientError, match="is a plain tensor now"):
            net(ts.distribute_tensor(batch(0), mesh, ts.Shard(0))).sum().backward()

    on_ranks(2, body)


def test_what_one_mesh_saves_another_one_loads(tmp_path):
    path, plain = tmp_path / "net.safetensors", build()
    nets = [build() for _ in range(3)]

    def save(rank):
        mesh = ts.Mesh({"x": 3})
        net = ts.distribute_module(nets[rank], mesh, lambda name, t: ([ts.Shard(0)], {0: [len(t), 0, 0]}) if t.dim() == 2 else None)
        ts.save(net, mesh, path)

    on_ranks(3, save)
    others = [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double() for _ in range(2)]

    def load(rank):
        mesh = ts.Mesh({"y": 2})
        net = ts.distribute_module(others[rank], mesh, lambda name, t: [ts.Shard(t.dim() - 1)])
        ts.load_into(net, mesh, path)
        all_of_it = ts.load(path, mesh, {"0.weight": ([ts.Shard(1)], {1: [3, 1]}), "2.bias": [ts.Shard(0)]})
        for name, expected in plain.named_parameters():
            assert_same(dict(net.named_parameters())[name], expected, name)
            assert_same(all_of_it[name], expected, name)
        assert ts.spec(all_of_it["0.weight"]).sizes == {1: [3, 1]}
        assert ts.spec(all_of_it["0.bias"]).placements == (ts.Replicate(),)
        for placed in (ts.Shard(0),), ((ts.Shard(0),), {0: [1, 5]}), ([ts.Shard(0)], None):
            assert ts.spec(ts.load(path, mesh, {"0.weight": placed})["0.weight"]).placements == (ts.Shard(0),)
        with pytest.raises(RuntimeError, match="0.wieght, which is not in the file"):
            ts.load(path, mesh, {"0.wieght": [ts.Shard(0)]})
        with pytest.raises(RuntimeError, match="is not in the file"):
            ts.load_into({"other": net[0].weight}, mesh, path)

    on_ranks(2, load)


def test_one_tensor(tmp_path):
    value = torch.randn(5, 4)

    def body(rank):
        mesh = ts.Mesh({"x": 2})
        ts.save(ts.distribute_tensor(value, mesh, [ts.Shard(0)], {0: [4, 1]}), mesh, tmp_path / "one.safetensors")
        (name, got), = ts.load(tmp_path / "one.safetensors", mesh).items()
        assert name == "tensor"
        assert_same(got, value)

    on_ranks(2, body)


def test_autocast_on_ranks_as_threads_casts_for_each_rank():
    """libtorch keeps one cache of casts for the process: the rank that leaves first would clear it under the others."""

    def body(rank):
        assert not torch.is_autocast_cache_enabled()

    assert torch.is_autocast_cache_enabled()
    on_ranks(2, body)
    assert torch.is_autocast_cache_enabled()


def test_goes_on_after_a_backward_that_failed():
    nets, plain = [build() for _ in range(2)], build()

    def train(net, put, fail):
        optimizer, losses = torch.optim.SGD(net.parameters(), 0.1), []
        for step in range(5):
            x = put(batch(step))
            optimizer.zero_grad()
            if fail and step == 2:
                hook = net[0].weight.register_hook(lambda g: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    net(x).square().mean().backward()
                hook.remove()
                optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    expected = train(plain, lambda t: t, False)

    def body(rank):
        mesh = ts.Mesh({"data": 2})
        net = ts.distribute_module(nets[rank], mesh)
        got = train(net, lambda t: ts.distribute_tensor(t, mesh, [ts.Shard(0)], {0: [3, 2]}), True)
        assert got == pytest.approx(expected, rel=1e-12)

    on_ranks(2, body)


class Raises(torch.autograd.Function):
    """Gives its input; its backward raises."""

    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise ctx.error


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x, fails=None, reentrant=False):
        runs = []

        def recomputed(h):
            runs.append(h)
            if len(runs) == 2 and fails == "recomputation":
                raise ZeroDivisionError("a recomputation")
            if len(runs) == 2 and fails == "nested":
                h = Raises.apply(h, ZeroDivisionError("a recomputation's backward"))
            return self.middle(h).tanh()

        h = torch.utils.checkpoint.checkpoint(recomputed, self.first(x).tanh(), use_reentrant=reentrant)
        if fails in ("function", "interrupt"):
            h = Raises.apply(h, KeyboardInterrupt() if fails == "interrupt" else ZeroDivisionError("a function"))
        return self.last(h)


@pytest.mark.parametrize("parallel", ["sharded batch", "DistributedDataParallel"])
@pytest.mark.parametrize("fails, reentrant", [*((f, r) for f in ("function", "interrupt", "recomputation") for r in (False, True)), ("nested", True)])
def test_goes_on_after_exceptions_of_the_programs_own_backward(parallel, fails, reentrant):
    """A user's function, an interrupt (Ctrl-C), a recomputation, and the backward within a reentrant one: the program catches it and trains on."""
    torch.manual_seed(1)
    plain = Checkpointed().double()
    nets = [copy.deepcopy(plain) for _ in range(2)]

    def train(net, loss_of, failing):
        optimizer, losses = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), []
        for step in range(5):
            if failing and step in (1, 2):
                optimizer.zero_grad(set_to_none=step == 1)
                with pytest.raises(KeyboardInterrupt if fails == "interrupt" else ZeroDivisionError):
                    loss_of(net, batch(step), fails).backward()
            optimizer.zero_grad(set_to_none=step == 1)
            loss = loss_of(net, batch(step), None)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    expected = train(plain, lambda net, x, fails: net(x, fails, reentrant).square().mean(), False)

    def body(rank):
        if parallel == "sharded batch":
            mesh = ts.Mesh({"data": 2})
            net = ts.distribute_module(nets[rank], mesh)
            got = train(net, lambda net, x, fails: net(ts.distribute_tensor(x, mesh, [ts.Shard(0)], {0: [3, 2]}), fails, reentrant).square().mean(), True)
        else:
            net, rows = ts.DistributedDataParallel(nets[rank]), slice(0, 3) if rank == 0 else slice(3, 5)
            got = train(net, lambda net, x, fails: net.mean_loss(net(x[rows], fails, reentrant).square().mean(), len(x[rows])), True)
        assert got == pytest.approx(expected, rel=1e-12)
        for mine, wanted in zip(net.parameters(), plain.parameters()):
            assert_same(mine.grad, wanted.grad)

    on_ranks(2, body)

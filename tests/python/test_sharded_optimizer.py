"""ShardedOptimizer: the updates of torch's optimizers, their states sharded over ranks with the same parameters."""

import copy
import pickle

import pytest
import torch
from torch import nn

import tessera as ts
from support import assert_same, on_ranks, whole


class Many(nn.Module):
    """A parameter without dims, a frozen one, one that no step uses, one of fewer rows than ranks, and one under two names."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.frozen, self.unused = nn.Linear(3, 5), nn.Linear(5, 3), nn.Linear(3, 3), nn.Linear(2, 2)
        self.scale, self.row, self.again = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(1, 3)), self.first.weight
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return (self.frozen(self.second(torch.tanh(self.first(x)))) * self.row + (x @ self.again.t()).sum(1, True)) * self.scale


def build():
    torch.manual_seed(1)
    return Many().double()


def batch(seed):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Where a gradient is all round-off, Adam makes a step of it unless eps is large.
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.02, "eps": 1e-3, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.02, "eps": 1e-3, "foreach": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "eps": 1e-3, "momentum": 0.5, "centered": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
}


def groups_of(net):
    """Two groups, the second without decay."""
    some = list(net.second.parameters())
    ids = {id(p) for p in some}
    return [{"params": [p for p in net.parameters() if id(p) not in ids]}, {"params": some, "weight_decay": 0.0}]


def train(net, optimizer, first=0, steps=4):
    """With a scheduler, a closure in every other step, and clipping."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def backward(seed):
        optimizer.zero_grad()
        loss = net(batch(seed)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        return loss

    losses = []
    for step in range(first, first + steps):
        if step % 2:
            losses.append(optimizer.step(lambda: backward(step)).item())
        else:
            losses.append(backward(step).item())
            optimizer.step()
        scheduler.step()
    return losses


def held(optimizer):
    """Elements of states on this rank, and of all ranks."""
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor) and t.dim()]
    return sum((ts.to_local(t) if ts.is_sharded(t) else t).numel() for t in states), sum(t.numel() for t in states)


@pytest.mark.parametrize("axes", [{"x": 1}, {"x": 3}, {"a": 2, "b": 2}])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_the_optimizer_itself(name, axes):
    kind, options = OPTIMIZERS[name]
    plain, ranks = build(), 1
    for n in axes.values():
        ranks *= n
    unsharded = kind(groups_of(plain), **options)  # torch puts its hooks around the step of this class
    expected = train(plain, unsharded)
    nets = [build() for _ in range(ranks)]

    def body(rank):
        net, mesh, steps = nets[rank], ts.Mesh(axes), []
        optimizer = ts.ShardedOptimizer(kind, groups_of(net), mesh, **options)
        assert isinstance(optimizer, kind) and isinstance(optimizer, ts.ShardedOptimizer) and type(optimizer).__name__ == f"Sharded{kind.__name__}"
        optimizer.register_step_pre_hook(lambda *_: steps.append("before"))
        optimizer.register_step_post_hook(lambda *_: steps.append("after"))
        assert train(net, optimizer) == pytest.approx(expected, rel=1e-12)
        assert steps == ["before", "after"] * 4
        for (key, mine), p in zip(net.named_parameters(), plain.parameters()):
            assert not ts.is_sharded(mine) and mine.is_leaf, key
            assert_same(mine, p, key)
        own, all_of_it = held(optimizer)
        assert own == all_of_it if ranks == 1 else own < all_of_it * 0.7
        assert optimizer.param_groups[0]["params"][0] is net.scale

    on_ranks(ranks, body)


@pytest.mark.parametrize("name", ["adamw", "adagrad"])
def test_states_go_on_sharded_whole_and_unsharded(name):
    kind, options = OPTIMIZERS[name]
    plain = build()
    unsharded = kind(plain.parameters(), **options)
    train(plain, unsharded)
    middle, state = copy.deepcopy(plain.state_dict()), copy.deepcopy(unsharded.state_dict())
    expected = train(plain, unsharded, first=4)
    nets, others = [build() for _ in range(3)], [build() for _ in range(3)]

    def body(rank):
        mesh, net, other = ts.Mesh({"x": 3}), nets[rank], others[rank]
        net.load_state_dict(middle)
        optimizer = ts.ShardedOptimizer(kind, net.parameters(), mesh, **options)
        optimizer.load_state_dict(copy.deepcopy(state))  # whole
        optimizer.step()  # without gradients: the states alone are sharded
        assert all(torch.equal(mine, middle[key]) for key, mine in net.named_parameters())
        other.load_state_dict(middle)
        again = ts.ShardedOptimizer(kind, other.parameters(), mesh, **options)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # sharded
        assert train(other, again, first=4) == pytest.approx(expected, rel=1e-12)
        assert held(again)[0] < 0.7 * held(again)[1]
        return {i: {k: whole(t) for k, t in s.items()} for i, s in again.state_dict()["state"].items()}

    for saved in on_ranks(3, body):
        for i, values in unsharded.state_dict()["state"].items():
            for key, value in values.items():
                assert_same(saved[i][key], value, f"{i}: {key}")


def test_beside_data_parallelism_with_uneven_samples():
    plain, nets = build(), [build() for _ in range(3)]
    kind, options = OPTIMIZERS["adam"]
    theirs = kind(plain.parameters(), **options)
    for seed in range(3):
        theirs.zero_grad()
        plain(batch(seed)).square().mean().backward()
        theirs.step()

    def body(rank):
        net = ts.DistributedDataParallel(nets[rank])
        optimizer = ts.ShardedOptimizer(kind, net.parameters(), ts.Mesh({"data": 3}), **options)
        for seed in range(3):
            mine = batch(seed)[[slice(0, 3), slice(3, 3), slice(3, 4)][rank]]
            optimizer.zero_grad()
            net.mean_loss(net(mine).square().mean(), len(mine)).backward()
            optimizer.step()
        for mine, p in zip(nets[rank].parameters(), plain.parameters()):
            assert_same(mine, p)

    on_ranks(3, body)


def test_what_it_refuses():
    nets = [build() for _ in range(2)]

    def body(rank):
        mesh, net = ts.Mesh({"x": 2}), nets[rank]
        for kind in (torch.optim.LBFGS, ts.ShardedOptimizer, nn.Linear, "AdamW"):
            with pytest.raises(ts.InvalidArgument, match="can be sharded by parameter"):
                ts.ShardedOptimizer(kind, net.parameters(), mesh)
        with pytest.raises(TypeError):
            ts.ShardedOptimizer(torch.optim.SGD, net.parameters(), mesh, rate=0.1)
        with pytest.raises(ts.MismatchError, match="the parameters of a ShardedOptimizer"):
            ts.ShardedOptimizer(torch.optim.SGD, net.first.parameters() if rank else net.second.parameters(), mesh, lr=0.1)
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(ts.InvalidArgument, match="neither copied nor pickled"):
                copied(ts.ShardedOptimizer(torch.optim.SGD, net.parameters(), mesh, lr=0.1))

    on_ranks(2, body)


class Failing(torch.optim.SGD):
    """Raises where it is told to."""

    fails = False

    def step(self, closure=None):
        if self.fails:
            raise ZeroDivisionError("of one rank")
        return super().step(closure)


@pytest.mark.parametrize("fails", ["a sparse gradient", "the optimizer"])
def test_a_failure_of_one_rank_is_told_and_the_parameters_come_back(fails):
    nets = [nn.Linear(4, 6) for _ in range(2)]

    def body(rank):
        net = nets[rank]
        with torch.no_grad():
            for p in net.parameters():
                p.zero_()
        optimizer = ts.ShardedOptimizer(Failing, net.parameters(), ts.Mesh({"x": 2}), lr=1.0)

        def give_gradients():
            for p in net.parameters():
                p.grad = torch.ones_like(p)

        give_gradients()
        if rank == 1 and fails == "a sparse gradient":
            net.weight.grad = net.weight.grad.to_sparse()
        optimizer.fails = rank == 1 and fails == "the optimizer"
        own = {"a sparse gradient": ts.InvalidArgument, "the optimizer": ZeroDivisionError}[fails]
        with pytest.raises(own if rank == 1 else ts.PeerFailedError, match="must be dense" if own is ts.InvalidArgument else "of one rank"):
            optimizer.step()
        assert [p is q for p, q in zip(optimizer.param_groups[0]["params"], net.parameters())] == [True, True]
        with torch.no_grad():
            for p in net.parameters():
                p.zero_()
        optimizer.fails = False
        give_gradients()
        optimizer.step()
        assert all(torch.equal(p, -torch.ones_like(p)) for p in net.parameters())

    on_ranks(2, body)

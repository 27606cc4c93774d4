"""Precisions of one's own: on any ranks as in a plain loop of one process, saved and gone on with elsewhere, and what they do wrong told on every rank."""

import functools
import math
import threading

import pytest
import torch
from torch import nn

import tessera as ts
from precisions import Masters, Numbered, Stochastic, Unsound, drawn, overriding, rounded
from support import assert_same, on_ranks, whole

ROWS = {1: [7], 2: [5, 2], 3: [4, 0, 3], 4: [1, 3, 0, 3]}
RATE, STEPS = 0.1, 6
torch.manual_seed(7)
NET = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def build(dtype=torch.float64):
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)
    net.load_state_dict(NET.state_dict())
    return net


def batch(step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(20 + step)
    return torch.randn(7, 3, generator=generator, dtype=dtype), torch.randn(7, 2, generator=generator, dtype=dtype)


@functools.cache
def rounded_alone():
    """Losses and parameters of a plain loop."""
    net, losses = build(), []
    for step in range(STEPS):
        x, y = batch(step)
        loss = nn.functional.mse_loss(net(x), y)
        net.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in net.parameters()))
        with torch.no_grad():
            for number, p in enumerate(net.parameters()):
                p -= RATE * p.grad * min(1.0, 0.3 / norm)
                p.copy_(rounded(p, drawn(step + 1, number, p.shape)))
        losses.append((loss.item(), norm))
    return losses, {name: p.detach() for name, p in net.named_parameters()}


def placed(kind, net):
    """What places this rank's rows."""
    ranks, rank = ts.world_size(), ts.rank()
    mesh = ts.Mesh({"data": ranks})
    if kind == "fully_shard":
        ts.fully_shard(net, mesh)
        return lambda t: ts.from_local(t.split(ROWS[ranks])[rank], mesh, [ts.Shard(0)])
    return lambda t: t.split(ROWS[ranks])[rank]


def trained(kind, precision, steps, folder=None):
    """This rank's part of these steps; goes on from what is in the folder, and saves there."""
    net = build()
    place = placed(kind, net)
    wrapped = ts.DistributedDataParallel(net) if kind == "ddp" else net
    with ts.Session(wrapped, torch.optim.SGD(net.parameters(), RATE), max_norm=0.3, precision=precision, signals=False) as session:
        checkpoints = folder and ts.Checkpointer(folder)
        if folder and (name := checkpoints.to_resume()):
            checkpoints.load(name, session.state())
        losses = []
        while session.steps < steps:
            x, y = (place(t) for t in batch(session.steps))
            session.micro_batch(lambda: nn.functional.mse_loss(wrapped(x), y), len(x))
            done = session.step()
            losses.append((done.loss, done.norm))
        if folder:
            checkpoints.save(f"step-{steps}", session.state())
    return losses, {name: whole(p) for name, p in net.named_parameters()}


def assert_trained(got, expected, what):
    assert got[0] == [pytest.approx(pair, rel=1e-10) for pair in expected[0]], what
    for name, p in got[1].items():
        assert_same(p, expected[1][name], f"{what} {name}")


@pytest.mark.parametrize("kind", ["plain", "ddp", "fully_shard"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rounding_at_random_is_that_of_one_process(tmp_path, kind, ranks):
    expected = rounded_alone()
    assert all(torch.equal(p, p.bfloat16().double()) for p in expected[1].values())

    def body(rank):
        mine = Stochastic()
        assert_trained(trained(kind, mine, STEPS), expected, kind)
        assert (mine.steps, mine.clipped, mine.entered, mine.left) == (STEPS,) * 4
        trained(kind, Stochastic(), 3, tmp_path)

    on_ranks(ranks, body)

    def on(rank):  # saved half-way, and gone on with by other ranks in another way
        losses, parameters = trained("plain" if kind == "fully_shard" else "fully_shard", Stochastic(), STEPS, tmp_path)
        assert_trained((losses, parameters), (expected[0][3:], expected[1]), kind)

    on_ranks(5 - ranks, on)


def with_masters(steps, folder, rate=1e-9, precision=Masters):
    """Returns the difference to the start of one weight, and of its master."""
    net, mine = build(torch.float32), precision and precision()
    start, checkpoints = net[2].weight.detach().clone(), ts.Checkpointer(folder)
    with ts.Session(net, torch.optim.SGD(net.parameters(), rate), precision=mine, signals=False) as session:
        if name := checkpoints.to_resume():
            checkpoints.load(name, session.state())
        while session.steps < steps:
            x, y = (t.split(ROWS[ts.world_size()])[ts.rank()] for t in batch(session.steps, torch.float32))
            session.micro_batch(lambda: nn.functional.mse_loss(net(x), y), len(x))
            session.step()
        checkpoints.save(f"step-{steps}", session.state())
    assert net[2].weight.dtype == torch.float32
    return net[2].weight.detach() - start, mine and mine.masters["net.2.weight"][1] - start.double()


def test_master_weights_add_up_what_float32_loses(tmp_path):
    ((lost, _),) = on_ranks(1, lambda rank: with_masters(8, tmp_path / "none", precision=None))
    ((_, moved),) = on_ranks(1, lambda rank: with_masters(8, tmp_path / "one"))
    assert not lost.any() and 1e-10 < moved.abs().max() < 1e-7
    for ranks in (1, 2, 3):
        on_ranks(ranks, lambda rank: with_masters(4, tmp_path / str(ranks)))
        for _, got in on_ranks(4 - ranks, lambda rank: with_masters(8, tmp_path / str(ranks))):
            assert (got - moved).abs().max() < 1e-5 * moved.abs().max()
    with pytest.raises(ts.InvalidArgument, match="train.master.net.0.bias"):  # a checkpoint without them
        on_ranks(2, lambda rank: with_masters(9, tmp_path / "none"))
    with pytest.raises(ts.InvalidArgument, match="train.master.net.0.bias"):  # and a session without the precision
        on_ranks(2, lambda rank: with_masters(9, tmp_path / "one", precision=None))


def one_step(precision, **options):
    net, x = build(), batch(0)[0]
    with ts.Session(net, torch.optim.SGD(net.parameters(), RATE), precision=precision, signals=False, **options) as session:
        session.micro_batch(lambda: net(session.convert(x)).square().mean(), len(x))
        return session.step()


HOOKS = ["convert_modules", "loss_scale", "skips_overflow", "update", "clip", "step"]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("raises", [ValueError, KeyboardInterrupt])
def test_what_one_rank_raises_all_learn(hook, raises):
    def body(rank):
        def fails(*given):
            if rank == 1:
                raise raises("not here")
            return {"loss_scale": 2.0, "skips_overflow": True, "clip": 1.0}.get(hook)

        with pytest.raises(raises if rank == 1 else ts.PeerFailedError, match="not here") as caught:
            one_step(overriding(**{hook: fails}), measure_norm=True)
            ts.world().barrier()  # of what comes last in a step the others learn with their next call
        if rank != 1:
            assert f"rank 1 threw: the precision 'own', {hook}(): {raises.__name__}: not here" in str(caught.value)
        ts.world().barrier()
        return one_step(overriding(loss_scale=lambda: 2.0)).loss  # all have caught it: the next session is sound

    assert len(set(on_ranks(3, body))) == 1


@pytest.mark.parametrize("hook", ["forward_scope", "convert_input"])
def test_what_forward_asks_for_is_raised_as_what_it_raises(hook):
    def fails(*given):
        raise ValueError("not here")

    def body(rank):
        with pytest.raises(ValueError, match="not here"):
            one_step(overriding(**{hook: fails}))

    on_ranks(2, body)


def replaced(net):
    net[0].weight = nn.Parameter(net[0].weight.detach().clone())


def added(net):
    net[0].more = nn.Parameter(torch.ones(1))


def removed(net):
    del net[0].bias


WRONG = [
    (dict(loss_scale=lambda: "2"), r"loss_scale\(\) .* returned '2', and not a number"),
    (dict(loss_scale=lambda: None), "returned None, and not a number"),
    (dict(loss_scale=lambda: True), "returned True, and not a number"),
    (dict(loss_scale=lambda: 0), "loss scale of 0: give a finite one above 0"),
    (dict(loss_scale=lambda: math.nan), "give a finite one"),
    (dict(skips_overflow=lambda: 1), "returned 1, and not True or False"),
    (dict(update=lambda overflow: 1), r"update\(\) .* returned a int"),
    (dict(clip=lambda *given: None), r"clip\(\) .* returned None, and not a number"),
    (dict(clip=lambda *given: torch.ones(2)), "and not a number"),
    (dict(forward_scope=lambda device: 1), "returned a int, and not a context manager"),
    (dict(convert_input=lambda tensor: [tensor]), "returned a list, and not a tensor"),
    (dict(name=lambda: None), "returned None, and not a text"),
    (dict(name=lambda: ""), "returned '', and not a text"),
    (dict(name=lambda: "float16_mixed"), "the name 'float16_mixed', which is one of ours"),
    (dict(convert_modules=lambda modules: modules), "returned a dict: it changes what it is given"),
]


@pytest.mark.parametrize("functions,says", WRONG)
def test_wrong_results_are_told(functions, says):
    def body(rank):
        for _ in range(2):
            with pytest.raises(ts.InvalidArgument, match=says):
                one_step(overriding(**functions), measure_norm=True)
        return one_step(None).loss

    on_ranks(1, body)


@pytest.mark.parametrize("change,says", [(replaced, "put another tensor at 'weight' of a Linear"), (added, "another tensor at 'more'"), (removed, r"removed \['bias'\]")])
def test_modules_are_converted_in_place(change, says):
    def body(rank):
        with pytest.raises(ts.InvalidArgument, match=says):
            one_step(Unsound(change))

    on_ranks(2, body)


def test_buffers_that_a_conversion_replaces_are_still_shared_and_saved(tmp_path):
    """`module.double()` puts others in their place."""

    def body(rank):
        net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        mine = overriding(convert_modules=lambda modules: modules["net"].double() and None, convert_input=lambda t: t.double())
        with ts.Session(net, torch.optim.SGD(net.parameters(), RATE), precision=mine, signals=False) as session:
            x = session.convert({"x": batch(rank, torch.float32)[0], "other": [1]})["x"]
            session.micro_batch(lambda: net(x).square().mean(), len(x))
            session.step()
            means = ts.world().all_gather(net[1].running_mean.view(1, -1))
            assert means.dtype == torch.float64 and net[0].weight.dtype == torch.float64 and torch.equal(means[0], means[1]) and means.any()
            checkpoints = ts.Checkpointer(tmp_path)
            checkpoints.save("a", session.state())
            assert torch.equal(checkpoints.load("a", session.state())["net"][1].running_mean, means[0])

    on_ranks(2, body)


def test_an_object_serves_one_session():
    shared, other = overriding(loss_scale=lambda: 2.0), overriding()

    def body(rank):
        net = build()
        first = ts.Session(net, precision=shared, signals=False)
        assert first.loss_scale == 2
        for _ in range(2):
            with pytest.raises(ts.InvalidArgument, match="the precision 'own' is in use by another session"):
                ts.Session(build(), precision=shared, signals=False)
        with pytest.raises(ts.InvalidArgument, match="clip_value"):  # a session that never was has it no longer
            ts.Session(net, precision=other, clip_value=0.0, signals=False)
        ts.Session(net, precision=other, signals=False).close()
        assert first.loss_scale == 2
        first.close()
        second = ts.Session(net, precision=shared, signals=False)
        del second  # gone without close()
        with ts.Session(net, precision=shared, signals=False) as third:
            assert third.loss_scale == 2
        with pytest.raises(ts.InvalidArgument, match="no session has"):
            shared.clip([], 1.0, 2.0)
        with pytest.raises(ts.InvalidArgument, match="PrecisionPlugin"):
            ts.Session(net, precision=ts.PrecisionPlugin, signals=False)
        with pytest.raises(ts.InvalidArgument, match="'loss_scale' of a Numbered is a float, and not a function"):
            ts.Session(net, precision=Numbered(), signals=False)
        with pytest.raises(NotImplementedError, match="PrecisionPlugin has none"):
            ts.Session(net, precision=ts.PrecisionPlugin(), signals=False)
        with pytest.raises(ts.InvalidArgument, match="scaler"):
            ts.Session(net, precision=shared, scaler={"initial": 2}, signals=False)

    on_ranks(1, body)
    with pytest.raises(ts.InvalidArgument, match="in use"):  # ranks that are threads
        on_ranks(2, lambda rank: ts.Session(build(), precision=shared, signals=False))


def test_ranks_have_the_same_options():
    def body(rank):
        net = build()
        for mine, others, says in (
            (dict(precision=overriding()), {}, "precision='own' and precision=''"),
            (dict(max_norm=1.0), dict(max_norm=2.0), "max_norm=1.0 and max_norm=2.0"),
            (dict(gradients="summed"), dict(gradients="averaged"), "gradients='summed' and gradients='averaged'"),
        ):
            with pytest.raises(ts.MismatchError, match=f"ranks 0 and 1 have {says}$"):
                ts.Session(net, signals=False, **(others if rank else mine))
            ts.Session(net, signals=False, **mine).close()  # free again

    on_ranks(2, body)


def test_an_overflow_of_ones_own_leaves_the_step_out_on_all():
    def body(rank):
        seen = []
        mine = overriding(skips_overflow=lambda: True, update=seen.append, loss_scale=lambda: 8.0)
        net = build()
        with ts.Session(net, torch.optim.SGD(net.parameters(), RATE), precision=mine, signals=False) as session:
            before = whole(net[0].weight).clone()
            for factor in (math.inf if rank == 1 else 1.0, 1.0):
                session.micro_batch(lambda: net(batch(0)[0]).square().mean() * factor, 7)
                assert session.step().stepped == (factor == 1.0 and len(seen) == 2)
                assert torch.equal(net[0].weight, before) == (len(seen) == 1)
        assert seen == [True, False]

    on_ranks(2, body)


@pytest.mark.parametrize("kind,ranks", [("plain", 3), ("fully_shard", 2)])
def test_a_search_along_the_loss_is_stepped_by_it(kind, ranks):
    """LBFGS with a clipping of one's own; a search that fails puts the parameters back."""

    def search(steps, precision=None):
        net = build()
        place, calls = placed(kind, net), [0]
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.7, max_iter=4, line_search_fn="strong_wolfe")
        with ts.Session(net, optimizer, max_norm=0.3, precision=precision, signals=False) as session:

            def evaluate():
                calls[0] += 1
                if calls[0] == 100 + 2:
                    raise ValueError("no loss")
                x, y = (place(t) for t in batch(0))
                session.micro_batch(lambda: nn.functional.mse_loss(net(x), y), len(x))

            losses = [session.step_again(evaluate).loss for _ in range(steps)]
            before, calls[0] = {name: whole(p).clone() for name, p in net.named_parameters()}, 100
            with pytest.raises(ValueError, match="no loss"):
                session.step_again(evaluate)
            for name, p in net.named_parameters():
                assert torch.equal(whole(p), before[name])
        return losses, before

    def body(rank):
        kept = []
        mine = overriding(step=lambda optimizer, closure: kept.append(optimizer.step(closure)), loss_scale=lambda: 4.0)
        expected, got = search(3), search(3, mine)
        assert len(kept) == 3 and got[0] == pytest.approx(expected[0], rel=1e-9)
        for name, p in got[1].items():
            assert torch.allclose(p, expected[1][name], rtol=1e-8, atol=1e-9)

    on_ranks(ranks, body)


def test_a_step_of_ones_own_that_raises_within_a_search_is_told():
    told = threading.Event()

    def body(rank):
        def step(optimizer, closure):
            if rank == 0:
                raise KeyError("own step")
            return optimizer.step(closure)

        net, (x, y) = build(), batch(0)
        with ts.Session(net, torch.optim.LBFGS(net.parameters(), max_iter=2), precision=overriding(step=step), signals=False) as session:
            with pytest.raises(KeyError if rank == 0 else ts.PeerFailedError, match="own step"):
                session.step_again(lambda: session.micro_batch(lambda: nn.functional.mse_loss(net(x), y), len(x)))
            # That a rank has left is news too, and may be there before its words.
            told.set() if rank else told.wait(60)

    on_ranks(2, body)


def test_what_one_rank_alone_has_wrong_ends_all():
    def body(rank):
        for wrong in (dict(precision="half"), dict(sharing=1.5), dict(max_norm="x"), dict(scaler={"initial": 2})):
            with pytest.raises(Exception) as caught:
                ts.Session(build(), signals=False, **(wrong if rank == 1 else {}))
            assert not isinstance(caught.value, ts.TimeoutError), wrong
        # What is the same number is no difference.
        ts.Session(build(), max_norm=1 if rank else 1.0, measure_norm=1 if rank else True, signals=False).close()

    on_ranks(2, body)


def test_what_a_state_may_not_be(tmp_path):
    def body(rank):
        checkpoints = ts.Checkpointer(tmp_path)
        for content, says in (({"steps": 1}, "has the name 'steps'"), ({1: 2}, "has the name 1"), ({"a": object()}, "a checkpoint does not keep")):
            with ts.Session(build(), precision=overriding(add_state=lambda state: state.update(content)), signals=False) as session:
                with pytest.raises(ts.InvalidArgument, match=says):
                    checkpoints.save("a", session.state())
        with ts.Session(build(), precision=overriding(add_state=lambda state: {"a": 1}), signals=False) as session:
            with pytest.raises(ts.InvalidArgument, match="returned a dict"):
                checkpoints.save("a", session.state())

        def fails(state):
            if rank == 1:
                raise ValueError("not here")

        kept, got = {"a": 7, "b": [1.5, None], "t": torch.arange(3.0)}, []
        with ts.Session(build(), precision=overriding(add_state=lambda state: state.update(kept), restore=got.append), signals=False) as session:
            checkpoints.save("a", session.state())
            kept["t"], kept["a"] = torch.zeros(3), 0
            checkpoints.load("a", session.state())
        assert got[0]["a"] == 7 and got[0]["b"] == [1.5, None] and got[0]["t"].tolist() == [0, 1, 2] and got[0]["t"] is kept["t"]
        for functions in (dict(add_state=fails), dict(restore=fails)):
            with ts.Session(build(), precision=overriding(**functions), signals=False) as session:
                with pytest.raises(ts.InvalidArgument, match="ValueError: not here"):  # told on every rank
                    checkpoints.save("b", session.state())
                    checkpoints.load("b", session.state())

    on_ranks(2, body)

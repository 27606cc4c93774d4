"""The training session: in every kind of parallelism the parameters of one process that has all samples."""

import functools
import math
import signal

import pytest
import torch
from torch import nn

import tessera as ts
from session_cases import KINDS, ROWS, STEPS, adam, alone, batch, build, made, named, train
from support import assert_same, on_ranks, whole


@pytest.mark.parametrize("kind,ranks", [(kind, ranks) for kind in KINDS for ranks in ([1, 2, 3, 4] if kind == "plain" else [3])] + [("mixed", 2)])
def test_each_trains_as_one_process(kind, ranks):
    expected, parameters = alone(ranks)

    def body(rank):
        net, optimizer, place = made(kind, rank)
        with ts.Session(net, optimizer, max_norm=0.2, signals=False) as session:
            done = train(session, net, place, range(STEPS))
        assert [d.loss for d in done] == pytest.approx([loss for loss, _ in expected], rel=1e-10)
        assert [d.norm for d in done] == pytest.approx([norm for _, norm in expected], rel=1e-10)
        assert all(d.weight == sum(map(sum, ROWS[ranks])) and d.stepped and not d.stop and not d.save for d in done)
        for name, p in named(net).items():
            assert_same(p, parameters[name], f"{kind} {name}")
        return done

    results = on_ranks(ranks, body)
    assert all(r == results[0] for r in results)


def test_rows_and_a_domain_on_a_mesh_of_two_axes():
    """A loss of the ranks along one axis, and data parallelism along the other."""
    expected, parameters = alone(4)

    def body(rank):
        mesh, net = ts.Mesh({"data": 2, "domain": 2}), build()
        domain, data = mesh.submesh("domain"), mesh.coordinate[0]
        ts.distribute_module(net, domain)
        ddp = ts.DistributedDataParallel(net, mesh.group("data"))
        session = ts.Session(ddp, adam(net.parameters()), max_norm=0.2, signals=False)
        rows = [[3, 2], [1, 4]]
        place = lambda t, k: ts.distribute_tensor(t.split(rows[k])[data], domain, [ts.Shard(2)], {2: [6, 3]})  # noqa: E731
        done = train(session, ddp, place, range(STEPS))
        assert [d.loss for d in done] == pytest.approx([loss for loss, _ in expected], rel=1e-10)
        for name, p in net.named_parameters():
            assert_same(p, parameters[name], name)
        session.close()
        alone_each = ts.distribute_module(build(), domain)
        with ts.Session(alone_each, adam(alone_each.parameters()), signals=False) as session, pytest.raises(ts.GradientError, match="along the other axes"):
            train(session, alone_each, place, range(1))

    on_ranks(4, body)


def test_gradients_that_the_program_reduces():
    """Summed by hand; a loss that all ranks compute; shards of a table that each rank has of its own, in the norm once each."""
    expected, parameters = alone(2, steps=1)

    def body(rank):
        net = build()
        session = ts.Session(net, adam(net.parameters()), max_norm=0.2, gradients="summed", signals=False)
        for k in range(2):
            x, y = (t.split(ROWS[2][k])[rank] for t in batch(0, k, 2))
            session.micro_batch(lambda: nn.functional.mse_loss(net(x), y), len(x), last=k == 1)
        for p in net.parameters():
            ts.world().all_reduce(p.grad)
        summed = session.step()
        assert (summed.loss, summed.norm) == pytest.approx(expected[0], rel=1e-10)
        for name, p in net.named_parameters():
            assert_same(p, parameters[name], name)

        net = build()
        session = ts.Session(net, adam(net.parameters()), max_norm=0.2, sharing=2, signals=False)
        for k in range(2):
            x, y = batch(0, k, 2)
            session.micro_batch(lambda: nn.functional.mse_loss(net(x), y), len(x), last=k == 1)
        shared = session.step()
        assert shared.weight == summed.weight and (shared.loss, shared.norm) == pytest.approx(expected[0], rel=1e-10)

        table = nn.ParameterList([torch.zeros(3 - rank, dtype=torch.float64)])
        session = ts.Session(table, torch.optim.SGD(table, 1.0), gradients="summed", by_hand=[(table[0], ts.world())], max_norm=1.0, signals=False)
        session.micro_batch(lambda: (table[0] * 4).sum(), 1)
        assert session.step().norm == pytest.approx(math.sqrt(5 * 2.0**2)) and torch.allclose(table[0], torch.full_like(table[0], -1 / math.sqrt(5)))
        with pytest.raises(ts.InvalidArgument, match="divisor"):
            ts.Session(net, sharing=3, signals=False)
        with pytest.raises(ts.InvalidArgument, match="'averaged' or 'summed'"):
            ts.Session(net, gradients="added", signals=False)

    on_ranks(2, body)


def test_what_ranks_ask_for_all_learn():
    def body(rank):
        net = build()
        session = ts.Session(net, adam(net.parameters()), signals=False)
        one = lambda: session.micro_batch(lambda: net(torch.ones(1, 2, 9).double()).square().mean(), 1)  # noqa: E731
        one()
        if rank == 1:
            session.request_save()
        first = session.step()
        one()
        if rank == 2:
            session.request_stop()
        second = session.step()
        assert session.wanted == ("requested" if rank == 2 else "") and session.vote() == "requested" and session.steps == 2
        return first, second

    (first, second), *others = on_ranks(3, body)
    assert (first.save, first.stop, second.save, second.stop) == (True, "", False, "requested")
    assert all(repr(one) == repr((first, second)) for one in others)  # norms are NaN


def test_a_signal_is_noted_and_the_handler_comes_back():
    noted = []
    before = signal.signal(signal.SIGUSR1, lambda *_: noted.append(1))
    try:

        def body(rank):
            net = build()
            with ts.Session(net, adam(net.parameters())) as session:
                signal.raise_signal(signal.SIGUSR1)
                session.micro_batch(lambda: net(torch.ones(1, 2, 9).double()).sum(), 1)
                assert session.step().stop == "SIGUSR1"

        on_ranks(1, body)
        assert not noted
        signal.raise_signal(signal.SIGUSR1)
        assert noted
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("kind", ["plain", "fully_shard"])
def test_it_goes_on_on_other_ranks(tmp_path, kind):
    ranks, steps = {2: range(2), 3: range(2, 4)}, {}
    x = {step: torch.randn(5, 2, 9, generator=torch.Generator().manual_seed(step)).double() for step in range(4)}

    def body(rank, until=None):
        net, optimizer, _ = made(kind, rank)
        session, mesh = ts.Session(net, optimizer, max_norm=0.2, signals=False), ts.Mesh({"data": ts.world_size()})
        checkpoints = ts.Checkpointer(tmp_path)
        if name := checkpoints.to_resume():
            checkpoints.load(name, session.state())
        for step in range(session.steps, 4) if until is None else until:
            mine = ts.distribute_tensor(x[step], mesh, [ts.Shard(0)])
            mine = mine if kind == "fully_shard" else ts.to_local(mine)
            session.micro_batch(lambda: net(mine).square().mean(), len(mine))
            steps[session.steps] = session.step().loss
        if until is not None:
            checkpoints.save("step-2", session.state())
        return {name: ts.full_tensor(p.detach()) if ts.is_sharded(p) else p.detach() for name, p in named(net).items()}

    (expected,) = on_ranks(1, lambda rank: body(rank))
    losses = dict(steps)
    on_ranks(2, lambda rank: body(rank, ranks[2]))
    steps.clear()
    for got in on_ranks(3, lambda rank: body(rank)):
        for name, p in got.items():
            assert_same(p, expected[name], name)
    assert steps == {n: pytest.approx(losses[n], rel=1e-10) for n in (3, 4)}


def test_an_overflow_on_one_rank_leaves_the_step_out():
    def body(rank):
        net = nn.Linear(2, 1, bias=False)
        nn.init.ones_(net.weight)
        session = ts.Session(net, torch.optim.SGD(net.parameters(), 0.5), precision=torch.float16, scaler={"initial": 1024}, signals=False)
        seen = []

        def loss(size):
            y = net(torch.full((1, 2), size))
            seen.append(y.dtype)
            return y.float().mean()

        session.micro_batch(lambda: loss(1e4 if rank else 1.0), 1)
        left_out = session.step()
        assert not left_out.stepped and session.loss_scale == 512 and seen == [torch.float16] and net.weight.grad is None
        assert torch.equal(net.weight.detach(), torch.ones(1, 2))
        session.micro_batch(lambda: loss(1.0), 1)
        assert session.step().stepped and session.steps == 2 and not torch.is_autocast_enabled("cpu")
        assert net.weight.detach().flatten().tolist() == [0.5, 0.5]

    on_ranks(2, body)


def test_errors_are_told_and_the_next_step_is_sound():
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError("no step today")

    def body(rank):
        net = build()
        x = torch.ones(1, 2, 9).double()
        loss = lambda: net(x).square().mean()  # noqa: E731
        session = ts.Session(net, Failing(net.parameters(), 0.1), max_norm=1.0, signals=False)
        session.micro_batch(loss, 1)
        with pytest.raises(ValueError, match="no step today"):
            session.step()
        assert all(p.grad is None for p in net.parameters())
        fine = torch.optim.SGD(net.parameters(), 0.1)
        session.add(fine)
        session.micro_batch(loss, 0)
        with pytest.raises(ts.InvalidArgument, match="not all zero"):
            session.step(fine)
        session.micro_batch(lambda: loss() * (math.nan if rank else 1.0), 1)
        with pytest.raises(ts.NonFiniteGradient):
            session.step(fine)
        session.micro_batch(loss, 1)
        assert session.step(fine).stepped
        with pytest.raises(ts.InvalidArgument, match="add\\(\\) it first"):
            session.step(adam(net.parameters()))
        session.add(torch.optim.LBFGS(net.parameters()))
        with pytest.raises(ts.NotAvailable, match="step_again"):
            session.step()
        with pytest.raises(ts.InvalidArgument, match="name it"):
            session.step_again(lambda: None)
        with pytest.raises(ts.InvalidArgument, match="clip_value"):
            ts.Session(net, clip_value=0.0, signals=False)
        with pytest.raises(ts.InvalidArgument, match="'growths'"):
            ts.Session(net, precision=torch.float16, scaler={"growths": 2}, signals=False)
        for other in (None, torch.bfloat16):
            with pytest.raises(ts.InvalidArgument, match="scaler is of precision=torch.float16"):
                ts.Session(net, precision=other, scaler={"growth": 2}, signals=False)
        with pytest.raises(ts.InvalidArgument, match="convert"):
            ts.Session(net, precision=torch.float32)
        session.close()
        with pytest.raises(ts.InvalidArgument, match="closed"):
            session.step(fine)

    on_ranks(2, body)


def search(parameters):
    return torch.optim.LBFGS(parameters, lr=0.7, max_iter=4, history_size=3, line_search_fn="strong_wolfe")


@functools.cache
def searched_alone(ranks, max_norm):
    """Losses of the first evaluations, how many there were, and the parameters."""
    net, losses, count = build(), [], 0
    optimizer = search(net.parameters())
    for step in range(STEPS):
        x, y = (torch.cat(t) for t in zip(batch(step, 0, ranks), batch(step, 1, ranks)))

        def closure():
            nonlocal count
            count += 1
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(x), y)
            loss.backward()
            norm = math.sqrt(sum(p.grad.square().sum().item() for p in net.parameters()))
            for p in net.parameters():
                p.grad.mul_(min(1.0, max_norm / norm))
            return loss

        losses.append(optimizer.step(closure).item())
    return losses, count, {name: t.detach().clone() for name, t in net.named_parameters()}


@pytest.mark.parametrize("kind,ranks", [("plain", 1), ("plain", 3), ("ddp", 2), ("fully_shard", 3), ("domain", 2), ("mixed", 4)])
def test_a_search_along_the_loss_is_that_of_one_process(kind, ranks):
    """LBFGS: several evaluations a step, of two micro-batches each, clipped; every rank stops at the same one."""
    losses, count, parameters = searched_alone(ranks, 0.3)

    def body(rank):
        ts.set_policies("allow")
        (net, _, place), made_count = made(kind, rank), 0
        with ts.Session(net, search(named(net).values()), max_norm=0.3, signals=False) as session:
            done = []
            for step in range(STEPS):

                def evaluate():
                    nonlocal made_count
                    made_count += 1
                    for k in range(2):
                        x, y = (place(t, k) for t in batch(step, k, ranks))
                        session.micro_batch(lambda: nn.functional.mse_loss(net(x), y), len(x), last=k == 1)
                    if rank == 0 and made_count == 3:
                        session.request_save()

                done.append(session.step_again(evaluate))
            assert session.steps == STEPS
        assert made_count == count > 2 * STEPS
        assert [d.loss for d in done] == pytest.approx(losses, rel=1e-9) and [d.save for d in done].count(True) == 1
        assert all(d.stepped and d.weight == sum(map(sum, ROWS[ranks])) for d in done)
        for name, p in named(net).items():
            assert torch.allclose(whole(p), parameters[name], rtol=1e-8, atol=1e-9), name  # a search amplifies round-off
            assert p.grad is None
        return done

    results = on_ranks(ranks, body)
    assert all(r == results[0] for r in results)


def test_a_search_that_fails_puts_the_parameters_back():
    def body(rank):
        net, fails, evaluations = build(), None, 0
        optimizer, x = search(net.parameters()), torch.full((1 + rank, 2, 9), 0.5, dtype=torch.float64)

        def evaluate():
            nonlocal evaluations
            evaluations += 1
            if evaluations == 2 and fails is ValueError:
                session.micro_batch(lambda: net(x).square().mean(), 1, last=False)
                raise ValueError("no loss")
            factor = math.nan if evaluations == 2 and fails is not None and rank == 0 else 1.0
            session.micro_batch(lambda: net(x).square().mean() * factor, len(x))

        with ts.Session(net, optimizer, measure_norm=True, non_finite="skip", signals=False) as session:
            first = session.step_again(evaluate)
            assert optimizer.state
            for fails in (ValueError, "skip"):
                evaluations, before = 0, [p.detach().clone() for p in net.parameters()]
                if fails is ValueError:
                    with pytest.raises(ValueError, match="no loss"):
                        session.step_again(evaluate)
                else:
                    assert not session.step_again(evaluate).stepped
                assert evaluations == 2 and not optimizer.state
                assert all(torch.equal(p, b) and p.grad is None for p, b in zip(net.parameters(), before))
            fails = None
            again = session.step_again(evaluate)
            assert again.stepped and again.loss < first.loss and again.weight == first.weight
            with pytest.raises(ts.InvalidArgument, match="not all zero"):
                session.step_again(lambda: None)
            for nested in (session.step, lambda: session.step_again(evaluate)):
                with pytest.raises((ts.InvalidArgument, ts.NotAvailable), match="within an evaluation|step_again"):
                    session.step_again(nested, optimizer)
        with ts.Session(net, optimizer, non_finite="error", measure_norm=True, signals=False) as session:
            evaluations, fails = 0, "error"
            with pytest.raises(ts.NonFiniteGradient):
                session.step_again(evaluate)
            assert session.steps == 0
        with ts.Session(net, optimizer, precision=torch.float16, signals=False) as session, pytest.raises(ts.NotAvailable, match="float16"):
            session.step_again(evaluate)
        table = nn.Parameter(torch.ones(1 + rank))
        with ts.Session(nn.ParameterList([table]), search([table]), gradients="summed", by_hand=[(table, ts.world())], signals=False) as session:
            with pytest.raises(ts.NotAvailable, match="by hand"):
                session.step_again(lambda: session.micro_batch(lambda: table.sum(), 1))

    on_ranks(2, body)


@pytest.mark.parametrize("kind", ["plain", "fully_shard", "domain"])
def test_two_sessions_side_by_side_on_two_halves(tmp_path, kind):
    """Halves of different sizes; each trains as one process of its own, saves, and waits for nobody else."""
    halves, steps = ([0, 2], [3]) if kind == "plain" else ([3, 1], [0, 2]), (3, 2)

    def body(rank):
        everywhere = ts.Checkpointer(tmp_path / "all")
        which = next((i for i, ranks in enumerate(halves) if rank in ranks), None)
        if which is None:
            return None  # a rank that has no part in any: nobody waits for it
        ranks = halves[which]
        mesh, place = ts.Mesh({"data": len(ranks)}, ranks=ranks), ranks.index(rank)
        net = build()
        if kind == "plain" and place:
            nn.init.zeros_(net[0].weight)  # the first rank's of the group count
        if kind == "fully_shard":
            ts.fully_shard(net, mesh)
        elif kind == "domain":
            ts.distribute_module(net, mesh)
        session = ts.Session(net, adam(net.parameters()), max_norm=0.2, signals=False, group=mesh if kind == "plain" else ts.group(ranks))
        checkpoints = ts.Checkpointer(tmp_path / str(which), ranks=ranks)
        losses = []
        for step in range(steps[which]):
            for k in range(2):
                x, y = (t.split(ROWS[len(ranks)][k])[place] if kind == "plain" else t for t in batch(step, k, len(ranks)))
                if kind == "fully_shard":
                    x, y = (ts.distribute_tensor(t, mesh, ts.Shard(0)) for t in (x, y))
                elif kind == "domain":
                    x, y = (ts.distribute_tensor(t, mesh, ts.Shard(2), {2: [6, 3]}) for t in (x, y))
                session.micro_batch(lambda: nn.functional.mse_loss(net(x), y), len(x), last=k == 1)
            if place == 0 and step == 1:
                session.request_stop()
            done = session.step()
            losses.append(done.loss)
            assert done.stop == ("requested" if step == 1 else "") or step > 1
        checkpoints.save("last", session.state())
        expected, parameters = alone(len(ranks), steps[which])
        assert losses == pytest.approx([loss for loss, _ in expected], rel=1e-10)
        for name, p in net.named_parameters():
            assert_same(p, parameters[name], name)
        assert checkpoints.load("last", session.state())["train"] is session
        for call in (everywhere.save, everywhere.start_save, everywhere.load):
            with pytest.raises(ts.InvalidArgument, match=r"Checkpointer\(folder, ranks="):
                call("last", session.state())
        return session.steps

    assert on_ranks(4, body) == [next((steps[i] for i, ranks in enumerate(halves) if rank in ranks), None) for rank in range(4)]


def test_what_other_ranks_have_part_in_is_refused():
    def body(rank):
        mesh, half = ts.Mesh({"data": 4}), ts.group([0, 1] if rank < 2 else [2, 3])
        whole_loss = ts.distribute_module(build(), mesh)
        x = ts.ones([4, 2, 9], mesh, ts.Shard(0), dtype=torch.float64)
        with ts.Session(whole_loss, adam(whole_loss.parameters()), signals=False, group=half) as session:
            loss = whole_loss(x).square().mean()
            with pytest.raises(ts.InvalidArgument, match="sharded over ranks .* session is of ranks"):
                session.backward(loss, 4)
        plain = ts.DistributedDataParallel(build())
        with ts.Session(plain, adam(plain.module.parameters()), signals=False, group=half) as session:
            loss = plain(torch.ones(1, 2, 9, dtype=torch.float64)).square().mean()
            with pytest.raises(ts.InvalidArgument, match="reduced over ranks"):
                session.backward(loss, 1)
        with pytest.raises(ts.InvalidArgument, match=r"ts.group\("):
            ts.Session(build(), signals=False, group=[0, 1])
        if rank > 1:
            with pytest.raises(RuntimeError, match="rank"):
                ts.Session(build(), signals=False, group=ts.Mesh({"x": 2}, ranks=[0, 1]))

    on_ranks(4, body)

"""Pipelines: loss and gradients of one process, errors on every rank, and nothing that hangs."""

import copy
import functools
import pathlib
import subprocess

import pytest
import torch
from torch import nn

import tessera as ts
from support import assert_same, on_ranks

CUTS = ["blocks.1", "blocks.2", "blocks.3", "mid", "last"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A tensor and a size that pass over stages, a weight at both ends, and a parameter outside of modules."""

    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(6, 6), nn.Sequential(*(Block() for _ in range(4)))
        self.mid, self.last, self.scale = nn.Linear(6, 6), nn.Linear(6, 6), nn.Parameter(torch.tensor(0.7))
        self.last.weight = self.first.weight

    def forward(self, x):
        rows, columns = x.shape
        first = self.first(x) * self.scale
        h = self.mid(self.blocks(first))
        return {"y": self.last(h + first).view(rows, columns) + self.scale, "h": h}


def loss_of(output, target):
    return nn.functional.mse_loss(output["y"], target) + output["h"].square().mean()


def drawn(rows=7):
    torch.manual_seed(3)
    return Net().double(), torch.randn(rows, 6, dtype=torch.float64), torch.randn(rows, 6, dtype=torch.float64)


@functools.cache
def alone():
    """To be called before there are ranks, since they share torch's random numbers."""
    net, x, y = drawn()
    loss = loss_of(net(x), y)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in net.named_parameters()}


def cut(sizes, *tensors):
    return [list(t.split(sizes)) for t in tensors]


def assert_is_that_of_one_process(result, module, times=1):
    loss, gradients = alone()
    assert abs(result.loss - loss) < 1e-12 and result.weight == 7
    for name, p in module.named_parameters():
        assert_same(p.grad, times * gradients[name], name)


def clip_plainly(parameters, most):
    gradients = [p.grad for p in parameters]
    norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt().item()
    for g in gradients:
        g.mul_(min(1.0, most / norm))
    return norm


SCHEDULES = {
    "gpipe": lambda: ts.Schedule("gpipe", 3, 4),
    "gpipe on any placement": lambda: ts.Schedule.gpipe([0, 1, 1, 0, 2], 4),
    "1f1b": lambda: ts.Schedule("1f1b", 3, 4),
    "1f1b on one rank": lambda: ts.Schedule("1f1b", 1, 4),
    "interleaved": lambda: ts.Schedule("interleaved", 3, 5),
    "zero_bubble_h1": lambda: ts.Schedule("zero_bubble_h1", 3, 4),
    "zero_bubble_v": lambda: ts.Schedule("zero_bubble_v", 3, 4),
    "for costs": lambda: ts.Schedule.for_costs(ts.v_placement(2), 4, ts.PipelineCosts.uniform(4, 1, 1.5, 0.7), memory_limit=[5]),
    "a table": lambda: ts.Schedule.from_table([["0F0", "0F1", "0F2", "", "0B1", "0B0", "0B2"], ["1F0", "1F1", "1B1", "1F2", "1B0", "1B2"]], [0, 1], 3),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_one_process(name):
    schedule = SCHEDULES[name]()
    nets, (plain, x, y) = [drawn()[0] for _ in range(schedule.ranks)], drawn()
    alone()

    def body(rank):
        mesh = ts.Mesh({"pipe": schedule.ranks})
        parts = ts.split(nets[rank], CUTS[: schedule.stages - 1])
        pipeline = ts.Pipeline(parts, schedule, mesh, "pipe", loss_of)
        # Rows divided evenly; then uneven micro-batches, one of them empty, and fewer than there are in the schedule.
        for times, sizes in enumerate([None, [1, 0, 6], [7]], 1):
            batch = (x, y) if sizes is None else cut(sizes, x, y)
            assert_is_that_of_one_process(pipeline.step(*batch), pipeline.module, times)
        assert pipeline.steps == 3 and pipeline.timeline().makespan > 0
        done = pipeline.evaluate(x, y)
        assert abs(done.loss - alone()[0]) < 1e-12
        if rank == schedule.placement[-1]:
            assert_same(done.outputs["y"], plain(x)["y"])
        return [name for name, _ in pipeline.module.named_parameters()]

    held = on_ranks(schedule.ranks, body)
    # Each rank has its stages alone, and all together have the model by its names.
    assert set().union(*held) == set(alone()[1]) and all(len(set(names)) == len(names) for names in held)


def test_one_norm_and_training_goes_on_from_a_checkpoint(tmp_path):
    nets, (plain, x, y) = [drawn()[0] for _ in range(5)], drawn()
    optimizer, norms = torch.optim.Adam(plain.parameters(), 0.01, eps=1e-3), []
    for _ in range(4):
        optimizer.zero_grad()
        loss_of(plain(x), y).backward()
        norms.append(clip_plainly(plain.parameters(), 0.2))
        optimizer.step()

    def train(net, schedule, first):
        mesh = ts.Mesh({"pipe": schedule.ranks})
        pipeline = ts.Pipeline(ts.split(net, CUTS[: schedule.stages - 1]), schedule, mesh, "pipe", loss_of)
        adam = torch.optim.Adam(pipeline.module.parameters(), 0.01, eps=1e-3)
        checkpoints, state = ts.Checkpointer(tmp_path), {"net": pipeline.module, "adam": adam}
        if first:
            checkpoints.load("a", state)
        for norm in norms[first : first + 2]:
            adam.zero_grad()
            pipeline.step(x, y)
            assert pipeline.clip_gradients(0.2) == pytest.approx(norm, rel=1e-12)
            adam.step()
        checkpoints.save("a", state)
        return dict(pipeline.module.named_parameters())

    on_ranks(3, lambda rank: train(nets[rank], ts.Schedule("1f1b", 3, 3), 0))
    for of_rank in on_ranks(2, lambda rank: train(nets[3 + rank], ts.Schedule("zero_bubble_v", 2, 2), 2)):
        for name, p in of_rank.items():
            assert_same(p, dict(plain.named_parameters())[name], name)

    def load(rank):  # without a pipeline
        net = nets[0]
        for p in net.parameters():
            p.data.zero_()
        ts.CheckpointReader(tmp_path, "a").load({"net": net}, allow_extra=True)
        return dict(net.named_parameters())

    for name, p in ts.run_threads(1, load)[0].items():
        assert_same(p, dict(plain.named_parameters())[name], name)


@pytest.mark.parametrize("how", ["data parallel", "fully sharded", "sharded rows"])
def test_beside_data_parallelism(how):
    nets, (_, x, y) = [drawn()[0] for _ in range(4)], drawn()
    alone()

    def body(rank):
        mesh = ts.Mesh({"pipe": 2, "data": 2})
        on, parts, options = ts.stage_mesh(mesh, "pipe"), ts.split(nets[rank], ["blocks.2"]), {}
        mine = mesh.coordinate[0]
        assert on.axes == {"data": 2}
        if how == "data parallel":
            parts[mine] = ts.DistributedDataParallel(parts[mine], mesh.group("data"))
        elif how == "fully sharded":
            ts.fully_shard(parts[mine], on, units=[["first"], ["last", "mid"]][mine] + ["blocks.*"])  # tied weights have units of their own
            options = {"gather": True, "sample_axes": ()}
        else:
            ts.distribute_module(parts[mine], on)
            options = {"sample_axes": ()}
        pipeline = ts.Pipeline(parts, ts.Schedule("1f1b", 2, 2), mesh, "pipe", loss_of, **options)
        sizes = [[3, 1], [1, 2]][mesh.coordinate[1]]  # of this rank's 4 or 3 rows
        begin = 4 * mesh.coordinate[1]
        batch = cut(sizes, x[begin : begin + sum(sizes)], y[begin : begin + sum(sizes)])
        result = pipeline.step(*batch, placements=None if how == "data parallel" else [ts.Shard(0)])
        assert_is_that_of_one_process(result, pipeline.module)

    on_ranks(4, body)


class Passing(nn.Module):
    """A stage of one's own: takes and gives tensors in any number."""

    def __init__(self, gives=1):
        super().__init__()
        self.mix, self.gives = nn.Linear(6, 6), gives

    def forward(self, *given):
        h = torch.tanh(self.mix(sum(given)))
        return (h,) * self.gives if self.gives > 1 else h


def passing():
    torch.manual_seed(5)
    stages = [Passing(2).double(), Passing().double(), Passing().double()]
    stages[2].mix.weight.data.copy_(stages[0].mix.weight)
    return stages


def test_modules_of_ones_own_and_all_options():
    ranks, (_, x, y), plain = [passing() for _ in range(3)], drawn(), passing()
    h, far = plain[0](x)
    expected = nn.functional.mse_loss(plain[2](plain[1](h), far), y)
    expected.backward()
    shared = plain[0].mix.weight.grad + plain[2].mix.weight.grad

    def body(rank):
        stage, scopes = ranks[rank][rank], []
        tied = {} if rank == 1 else {"w": [stage.mix.weight]}

        def scope():
            scopes.append(torch.is_grad_enabled())
            return torch.autocast("cpu", enabled=False)

        options = {"skips": [(0, 2)], "tied": tied, "recompute": [0, 2], "keep_outputs": True, "seed": 4, "dynamic_shapes": True, "forward_scope": scope}
        pipeline = ts.Pipeline([stage], ts.Schedule("1f1b", 3, 2), ts.Mesh({"pipe": 3}), "pipe", nn.functional.mse_loss, **options)
        result = pipeline.step(x if rank == 0 else None, y if rank == 2 else None)
        assert abs(result.loss - expected.item()) < 1e-12
        assert_same(stage.mix.weight.grad, plain[1].mix.weight.grad if rank == 1 else shared)
        # Recomputed where nothing but the inputs is kept; the loss is in a scope of its own.
        assert sorted(scopes) == {0: [False, False, True, True], 1: [True, True], 2: [False] * 4 + [True] * 4}[rank]
        assert len(pipeline.repeated_parameters()) == (rank == 2)
        assert [name for name, _ in pipeline.module.named_parameters()] == [f"{rank}.mix.weight", f"{rank}.mix.bias"]
        stage.zero_grad()
        costs = pipeline.measure(x, y, repeats=1)
        assert all(stage.forward > 0 for stage in costs.stages) and len(costs.communication) == 2
        assert all(p.grad is None or not p.grad.any() for p in stage.parameters())
        return ts.Schedule.for_costs([0, 1, 2], 4, costs).csv(), result

    done = on_ranks(3, body)
    assert len({csv for csv, _ in done}) == 1 and done[0][1].outputs is None
    assert [len(part) for part in done[2][1].micro_batches] == [4, 3]


class Raising(nn.Module):
    """Raises what it is told to, in forward or in backward."""

    def __init__(self, error, backward):
        super().__init__()
        self.error, self.backward, self.mix = error, backward, nn.Linear(6, 6).double()

    def forward(self, x):
        if self.error and not self.backward:
            raise self.error
        h = self.mix(x)
        if self.error:
            h.register_hook(self.fail)
        return h

    def fail(self, gradient):
        raise self.error


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_h1"])
@pytest.mark.parametrize("error, backward", [(ValueError("had enough"), False), (ValueError("had enough"), True), (KeyboardInterrupt("had enough"), False)])
def test_a_stage_that_raises_is_an_error_on_every_rank(name, error, backward):
    stages, (_, x, y) = [Raising(None, backward) for _ in range(3)], drawn()
    chain = copy.deepcopy(nn.Sequential(*stages))
    nn.functional.mse_loss(chain(x), y).backward()

    def body(rank):
        pipeline = ts.Pipeline([stages[rank]], ts.Schedule(name, 3, 4), ts.Mesh({"pipe": 3}), "pipe", nn.functional.mse_loss)
        stages[rank].error = error if rank == 1 else None  # its own rank sets it: another one may come here when this one goes on already
        kind = (ts.PipelineError if isinstance(error, Exception) else KeyboardInterrupt) if rank == 1 else ts.PeerFailedError
        with pytest.raises(kind, match="had enough") as told:
            pipeline.step(x, y)
        if kind is ts.PipelineError:
            assert "on rank 1" in str(told.value) and "stage 1, micro-batch 0" in str(told.value)
            assert backward or told.value.__cause__ is error
        # All have caught it, and go on.
        stages[rank].error = None
        stages[rank].zero_grad()
        pipeline.step(x, y)
        for p, q in zip(stages[rank].parameters(), chain[rank].parameters()):
            assert_same(p.grad, q.grad)

    on_ranks(3, body)


LOSSES = {
    "loss raises": lambda output, target: 1 / 0,
    "loss that trains nothing": lambda output, target: nn.functional.mse_loss(output.detach(), target),
    "loss without a tensor": lambda output, target: nn.functional.mse_loss(output, target).item(),
}
WRONG = {
    "loss raises": (lambda p, x, y: p.step(x, y), ts.PipelineError, "ZeroDivisionError"),
    "loss that trains nothing": (lambda p, x, y: p.step(x, y), ts.PipelineError, "no stage would be trained"),
    "loss without a tensor": (lambda p, x, y: p.step(x, y), ts.PipelineError, "returned a float"),
    "no targets": (lambda p, x, y: p.step(x), ts.InvalidArgument, "targets"),
    "too many": (lambda p, x, y: p.step([x] * 4, [y] * 4), ts.InvalidArgument, "4 micro-batches"),
    "other numbers": (lambda p, x, y: p.step([x] * 2, [y]), ts.InvalidArgument, "2 micro-batches"),
    "a dictionary": (lambda p, x, y: p.step({"x": 3}, y) if ts.rank() == 0 else p.step(x, y), ts.InvalidArgument, "tensors, and not"),
    "nested otherwise": (lambda p, x, y: p.step([x, x], [y, (y, y)]) if ts.rank() == 0 else p.step(x, y), ts.InvalidArgument, "nested alike"),
    "some evaluate": (lambda p, x, y: p.step(x, y) if ts.rank() == 0 else p.evaluate(x, y), ts.InvalidArgument, "evaluate"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_on_one_rank_is_told_to_all(wrong):
    call, error, text = WRONG[wrong]
    (_, x, y), stages = drawn(), passing()[1:]

    def body(rank):
        loss = LOSSES.get(wrong, nn.functional.mse_loss)
        mesh = ts.Mesh({"pipe": 2})
        pipeline = ts.Pipeline([stages[rank]], ts.Schedule("1f1b", 2, 3), mesh, "pipe", loss)
        with pytest.raises((error, ts.PeerFailedError), match=text) as told:
            call(pipeline, x, y)
        mesh.barrier()  # it goes on; and no rank leaves before the others have heard of it
        return type(told.value)

    assert error in on_ranks(2, body)


def test_pipelines_that_cannot_be_made():
    stages, wrong = passing(), ts.Schedule.from_table([["0F0", "0B0"], ["1B0", "1F0"]], [0, 1], 1)
    gpipe = ts.Schedule("gpipe", 2, 2)

    def body(rank):
        mesh = ts.Mesh({"pipe": 2})
        make = functools.partial(ts.Pipeline, mesh=mesh, axis="pipe", loss=nn.functional.mse_loss)
        for stage, schedule, error, text in [
            ([stages[rank]], wrong, ts.ScheduleError, "order"),
            ([stages[rank]], ts.Schedule("gpipe", 3, 2), ts.InvalidArgument, "3 ranks"),
            ([stages[rank]] * (1 + rank), gpipe, ts.InvalidArgument, "2 stages are given"),
            ([len], gpipe, ts.InvalidArgument, "are modules"),
            ([stages[rank]], "1f1b", ts.InvalidArgument, "ts.Schedule"),
            ([stages[rank]], ts.Schedule(["gpipe", "1f1b"][rank], 2, 2), ts.MismatchError, "schedule"),
        ]:
            with pytest.raises(error, match=text):
                make(stage, schedule)
        with pytest.raises(ts.InvalidArgument, match="must lead forward"):
            make([stages[rank]], gpipe, skips=[(1, 0)])
        pipeline = make([stages[rank]], gpipe)
        stages[rank].mix.weight = nn.Parameter(torch.zeros(6, 6).double())
        with pytest.raises(ts.InvalidArgument, match="other parameters"):
            pipeline.step(torch.zeros(2, 6).double(), torch.zeros(2, 6).double())

    on_ranks(2, body)


def test_processes(request, warm_python):
    launcher = pathlib.Path(request.config.getoption("--launcher"))
    command = [launcher, "run", "-n", 3, "--timeout", 150, "--", *warm_python, pathlib.Path(__file__).parent / "pipeline_program.py"]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("goes on") == 3 and done.stdout.count("of 3: loss") == 3


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.drop, self.inner = nn.ModuleList([nn.Linear(6, 4), nn.Linear(4, 4)]), nn.Dropout(0.5), nn.LSTM(4, 4)
        self.up, self.norm, self.unused = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(1, 1)
        self.register_buffer("shift", torch.ones(6), persistent=False)

    def forward(self, x, factor=2.0, **rest):
        a = torch.relu(self.down[0](x + self.shift))
        out, state = self.inner(self.drop(self.down[1](a)))
        return self.norm(self.up(torch.cat([out, a], 1))) * factor + self.shift, state[0]


class Decides(UNet):
    def forward(self, x):
        a = self.down[0](x)
        return self.down[1](a if a.sum() > 0 else -a)


class ByMode(UNet):
    def forward(self, x):
        return self.down[1](nn.functional.dropout(self.down[0](x), 0.5, self.training))


class Draws(UNet):
    def forward(self, x):
        return self.down[1](self.down[0](x) + torch.randn(4))


class Writes(UNet):
    def forward(self, x):
        a = self.down[0](x)
        return self.down[1](a) + a.mul_(2)


class Twice(UNet):
    def forward(self, x):
        return self.norm(self.up(torch.cat([self.norm(x), x[:, :2]], 1)))


def stage_by_stage(parts, *given):
    """What a pipeline calls, on one process."""
    far = {}
    for s, stage in enumerate(parts):
        made = stage(*given, *(far.pop(skip) for skip in list(far) if parts.skips[skip][1] == s))
        if s == len(parts) - 1:
            return made
        begin = [i for i, (of, _) in enumerate(parts.skips) if of == s]
        far.update(zip(begin, made[len(made) - len(begin) :]))
        given = made[: len(made) - len(begin)]


@pytest.mark.parametrize("at", [["down.1"], ["inner", "up"], ["down.1", "drop", "inner", "up", "norm"]])
def test_stages_are_the_model(at):
    net, x = UNet(), torch.randn(5, 6)
    names = dict(net.named_parameters())
    for mode in (True, False):
        parts = ts.split(net.train(mode), at)
        assert len(parts) == len(at) + 1 and net.norm.training == mode
        torch.manual_seed(2)
        expected = copy.deepcopy(net)(x)
        torch.manual_seed(2)
        for got, wanted in zip(stage_by_stage(parts, x), expected):
            assert_same(got.double(), wanted.double())
        for stage in parts:
            assert all(p is names[name] for name, p in stage.named_parameters()) and "shift" not in stage.state_dict()
    assert not any("_compiled_call_impl" in vars(m) for m in net.modules())


def test_an_exported_program_is_split():
    net, x, _ = drawn()
    parts = ts.split(torch.export.export(net, (x[:3],), dynamic_shapes={"x": {0: torch.export.Dim.DYNAMIC}}), ["blocks.2", "mid", "last"])
    assert len(parts.tied) == 2 and parts.skips and all(any(p is q for q in net.parameters()) for stage in parts for p in stage.parameters())
    for name, t in stage_by_stage(parts, x).items():
        assert_same(t, net(x)[name], name)


def test_what_cannot_be_split_is_named():
    for model, at, text in [
        (UNet(), ["middle"], "no module 'middle'"),
        (UNet(), ["unused"], "calls no module 'unused'"),
        (UNet(), ["up", "inner"], "'inner' is called before 'up'"),
        (UNet(), ["up", "up"], "calls no module 'up'"),
        (UNet(), 3, "nn.Sequential"),
        (nn.Sequential(nn.Linear(1, 1)), 2, "2 stages of 1"),
        (nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), ["0"], "nothing is computed before '0'"),
        (len, ["up"], "neither"),
        (Decides(), "down.1", r"test_pipeline.py:\d+, `return self.down\[1\]\(a if a.sum\(\) > 0 else -a\)`"),
        (ByMode(), "down.1", "differs between training and evaluation"),
        (Draws(), "down.1", "a tensor of no input"),
        (Writes(), "down.1", "'mul_' writes to 'down_0'"),
        (Twice(), "up", "'norm.running_mean' is used in stages"),
    ]:
        state = {name: t.clone() for name, t in model.state_dict().items()} if isinstance(model, nn.Module) else {}
        with pytest.raises(ts.InvalidArgument, match=text):
            ts.split(model, at)
        assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items()) if state else True
    with pytest.raises(ts.InvalidArgument, match="no argument"):
        ts.split(UNet(), "up", inputs=["y"])
    x, stages = torch.randn(3, 6), ts.split(UNet().eval(), "up", inputs=["x", "factor"])
    assert_same(stages[1](*stages[0](x, torch.tensor(3.0)))[1], stage_by_stage(stages, x, torch.tensor(3.0))[1])

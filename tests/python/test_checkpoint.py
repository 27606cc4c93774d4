"""Checkpoints from Python: everything that training needs goes on bit by bit on the same ranks, and from the same values on others."""

import collections
import copy
import fcntl
import pathlib
import re
import subprocess

import pytest
import torch
from torch import nn

import tessera as ts
from support import assert_same, on_ranks, raises, whole

HERE = pathlib.Path(__file__).parent
DTYPE = torch.float64


def network():
    torch.manual_seed(1)
    # A bias before a norm has no gradient but round-off, which optimizers make large.
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3)).double()


def batch(step, rows=7):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(step), dtype=DTYPE)


class Training:
    """Sharded unevenly: of the first weight all rows but one on the last rank, of the last one columns on the first."""

    def __init__(self, net, optimizer_of=lambda p: torch.optim.Adam(p, 0.05, amsgrad=True), sharded=True):
        n = ts.world_size()
        self.mesh = ts.Mesh({"x": n})
        ts.set_policies("allow")

        def rule(name, t):
            if name == "0.weight" and sharded:
                return [ts.Shard(0)], {0: [1, *[0] * (n - 2), t.shape[0] - 1] if n > 1 else [t.shape[0]]}
            return [ts.Shard(1)] if name == "4.weight" and sharded else None

        self.net = ts.distribute_module(net, self.mesh, rule)
        self.optimizer = optimizer_of(list(self.net.parameters()))
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4], 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.loss = None

    def state(self, **more):
        return {"net": self.net, "optimizer": self.optimizer, "schedule": self.schedule, "scaler": self.scaler, "random": ts.RandomState(), **more}

    def step(self, i):
        x = ts.distribute_tensor(batch(i), self.mesh, [ts.Shard(0)])

        def loss():
            self.optimizer.zero_grad()
            value = self.net(x).square().mean()
            value.backward()
            return value

        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.loss = self.optimizer.step(loss).item()
        else:
            self.loss = loss().item()
            self.optimizer.step()
        self.schedule.step()
        self.scaler.scale(torch.ones(()))
        self.scaler.update(self.scaler.get_scale() * 2)

    def values(self):
        return [whole(t).clone() for t in self.net.state_dict().values()] + [torch.tensor([self.loss, self.scaler.get_scale(), *self.schedule.get_last_lr()])]


def resumed(folder, ranks_and_others, make, steps=5, saved_after=3):
    """Trains on the first number of ranks, and goes on from there on each of them."""
    first, *others = ranks_and_others
    nets = [network() for _ in range(max(ranks_and_others))]

    def straight(rank):
        ts.manual_seed(5)
        run = make(copy.deepcopy(nets[rank]))
        checkpoints = ts.Checkpointer(folder)
        for i in range(steps):
            run.step(i)
            if i + 1 == saved_after:
                checkpoints.start_save("c", run.state(step=i + 1))
        checkpoints.wait()
        return run.values()

    expected = on_ranks(first, straight)[0]

    def again(rank):
        ts.manual_seed(77)
        run = make(copy.deepcopy(nets[rank]))
        if ts.world_size() == 2:
            run.step(99)  # a state that is there already is replaced
        begin = ts.Checkpointer(folder).load("c", run.state(step=0))["step"]
        assert begin == saved_after
        for i in range(begin, steps):
            run.step(i)
        return run.values()

    for ranks in [first, *others]:
        got = on_ranks(ranks, again)[0]
        for mine, wanted in zip(got, expected, strict=True):
            if ranks == first:
                assert torch.equal(mine, wanted), f"{first} ranks, bit by bit: {mine} {wanted}"
            assert_same(mine, wanted, f"{first} to {ranks} ranks")


@pytest.mark.parametrize("ranks", [(1, 3), (2, 1, 4), (3, 2), (4, 1, 3)])
def test_training_goes_on_on_the_same_and_on_other_ranks(tmp_path, ranks):
    resumed(tmp_path, ranks, Training)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    "SGD without state": lambda p: torch.optim.SGD(p, 0.05),
    "AdamW": lambda p: torch.optim.AdamW([{"params": p[:2], "lr": 0.02}, {"params": p[2:], "weight_decay": 0.1}], 0.05),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.05),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.05),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.05),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.05, t0=1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.05, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.05),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.05),
    "LBFGS": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3),
    "a tensor as rate": lambda p: torch.optim.Adam(p, torch.tensor(0.05, dtype=DTYPE)),
}


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(tmp_path, name, sharded):
    resumed(tmp_path, (3, 2), lambda net: Training(net, OPTIMIZERS[name], sharded))


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "RMSprop", "Adagrad"])
def test_a_folder_of_python_is_one_of_cpp_and_back(request, tmp_path, name):
    helper = pathlib.Path(request.config.getoption("--launcher")).parent / "checkpoint_stock_helper"
    make = {"Adam": lambda p: torch.optim.Adam(p, 0.05, betas=(0.8, 0.95), amsgrad=True), **OPTIMIZERS}[name]
    if name == "AdamW":  # C++ has the options of its groups, and Python those of these
        make = lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.1)  # noqa: E731

    class Small(Training):
        def step(self, i):
            x = (torch.arange(24, dtype=DTYPE) + i).sin().view(6, 4)
            self.optimizer.zero_grad()
            self.net(ts.distribute_tensor(x, self.mesh, [ts.Shard(0)])).square().mean().backward()
            self.optimizer.step()

        def parts(self, **more):
            return {"net": self.net, "optimizer": self.optimizer, "text": "ein Wort", "real": 0.1, **more}

    torch.manual_seed(1)
    nets = [nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()] * 3
    nets = [copy.deepcopy(net) for net in nets]

    def before(rank):
        run = Small(copy.deepcopy(nets[rank]), make)
        for i in range(6):
            if i == 3:
                ts.Checkpointer(tmp_path).save("python", run.parts(step=i))
            run.step(i)
        return [whole(p).clone() for p in run.net.parameters()]

    expected = on_ranks(3, before)[0]
    done = subprocess.run([helper, name, tmp_path], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr

    def after(rank):
        run = Small(copy.deepcopy(nets[rank]), make)
        checkpoints = ts.Checkpointer(tmp_path)
        assert checkpoints.to_resume() == "c++"
        run.optimizer.param_groups[0]["lr"] = 7.0
        values = checkpoints.load("c++", {**run.parts(step=0), "text": "", "real": 0.0})
        assert (values["step"], values["text"], values["real"]) == (5, "ein Wort", 0.1)
        assert run.optimizer.param_groups[0]["lr"] == 0.05
        run.step(5)
        for p, wanted in zip(run.net.parameters(), expected):
            assert_same(p, wanted, name)

    on_ranks(2, after)


class Counts(nn.Module):
    """Has a state of its own, and a table that is made again."""

    def __init__(self):
        super().__init__()
        self.seen = {}
        self.weight = nn.Parameter(torch.ones(2, dtype=DTYPE))
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def get_extra_state(self):
        return {"seen": self.seen, "last": torch.full((2,), float(len(self.seen)))}

    def set_extra_state(self, state):
        self.seen, self.last = state["seen"], state["last"]


VALUES = {
    "step": 12,
    "large": 2**80,
    "rate": 0.1,
    "best": float("-inf"),
    "word": "größer",
    "raw": bytes(range(256)),
    "none": None,
    "yes": True,
    "nested": {"a": [1, 2.5, (None, "x")], 3: {"$b": b"\x00"}, "counts": collections.Counter({2: 1, 4: 2}), "set": {3, 1}},
    "frozen": {frozenset({1, 2}): {frozenset({3})}},
    "empty": {},
}


def test_values_objects_and_what_each_rank_has_of_its_own(tmp_path):
    def order():
        return ts.FixedOrder(12, 4, seed=2)

    def state(rank, values, fresh):
        mesh = ts.Mesh({"x": ts.world_size()})
        loader = ts.Loader(ts.TensorDataset(torch.arange(12)), order(), mesh, ["x"])
        counts, generator = Counts(), torch.Generator().manual_seed(rank + 100 * fresh)
        averaged = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2).double())
        if not fresh:
            loader.next()
            counts.seen = {"a": 1}
            counts.table.zero_()
            averaged.n_averaged.fill_(3)
        field = ts.rand([5, 4], mesh, [ts.Shard(0)])
        tensors = {"field": field, "plain": torch.full((2,), 2.0 + fresh)}
        mine = ts.OfRank(None if fresh else {"rank": rank})
        return {**values, "loader": loader, "counts": counts, "mine": mine, "generator": generator, "averaged": averaged, "tensors": tensors, "one": -field}

    def save(rank):
        made = state(rank, VALUES, False)
        ts.Checkpointer(tmp_path).save("c", made)
        return whole(made["tensors"]["field"]), whole(made["one"]), torch.rand(3, generator=made["generator"]), made["loader"].next().tensors[0]

    saved = on_ranks(2, save)

    def load(rank):
        made = state(rank, dict.fromkeys(VALUES), True)
        loaded = ts.Checkpointer(tmp_path).load("c", made)
        assert list(loaded) == list(made)
        for key, value in VALUES.items():
            assert loaded[key] == value and type(loaded[key]) is type(value), key
        assert type(loaded["nested"]["counts"]) is collections.Counter
        field, one, draws, _ = saved[rank % 2]
        assert torch.equal(whole(made["tensors"]["field"]), field) and torch.equal(whole(made["one"]), one)
        assert made["tensors"]["plain"].tolist() == [2.0, 2.0]
        assert made["counts"].seen == {"a": 1} and made["counts"].last.tolist() == [1.0, 1.0] and made["counts"].table.tolist() == [0.0, 1.0, 2.0]
        assert int(made["averaged"].n_averaged) == 3
        # The third rank has no predecessor.
        assert loaded["mine"] == ({"rank": rank} if rank < 2 else None)
        assert torch.equal(torch.rand(3, generator=made["generator"]), draws) == (rank < 2)
        rows = torch.cat([t for _, _, _, t in saved])
        return torch.equal(ts.world().all_gather(made["loader"].next().tensors[0], sizes=[2, 1, 1]), rows)

    assert on_ranks(3, load) == [True] * 3


SCHEDULES = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=9),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3), torch.optim.lr_scheduler.ExponentialLR(o, 0.7)], [3]
    ),
}


def test_every_kind_of_schedule(tmp_path):
    def run(schedule, steps, begin=0):
        rates = []
        for i in range(begin, steps):
            schedule.optimizer.step()
            schedule.step(*[float(i)] if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) else [])
            rates.append(schedule.optimizer.param_groups[0]["lr"])
        return rates

    def body(rank):
        checkpoints = ts.Checkpointer(tmp_path)
        for name, make in SCHEDULES.items():
            p = nn.Parameter(torch.zeros(2))
            optimizer = torch.optim.SGD([p], 0.1)
            schedule = make(optimizer)
            run(schedule, 4)
            checkpoints.save(name, {"p": p, "optimizer": optimizer, "schedule": schedule})
            expected = run(schedule, 8, 4)
            q = nn.Parameter(torch.ones(2))
            optimizer = torch.optim.SGD([q], 0.1)
            schedule = make(optimizer)
            checkpoints.load(name, {"p": q, "optimizer": optimizer, "schedule": schedule})
            assert run(schedule, 8, 4) == expected and not q.any(), name

    on_ranks(2, body)


def test_what_does_not_fit_changes_nothing_and_is_told_on_all_ranks(tmp_path):
    nets = [network() for _ in range(4)]

    def body(rank):
        run = Training(nets[rank])
        run.step(0)
        checkpoints = ts.Checkpointer(tmp_path)
        checkpoints.save("c", run.state(step=3))
        other = Training(nets[2 + rank])
        before = [whole(p).clone() for p in other.net.parameters()]
        bad = lambda match, state, kind=ts.InvalidArgument, **options: raises(kind, match, checkpoints.load, "c", state, **options)  # noqa: E731
        good = other.state(step=0)
        bad("'extra' is not in the checkpoint", {**good, "extra": 1})
        bad("'step' is in the checkpoint alone", other.state())
        bad("'optimizer', 'optimizer.0.weight.exp_avg'", {k: v for k, v in good.items() if k != "optimizer"})
        bad("was saved as 'module', and is 'optimizer'", {**good, "net": other.optimizer, "again": other.net})
        bad("was saved as 'integer', and is 'module'", {**good, "step": other.net})
        bad("'optimizer' of the checkpoint is Adam, this one is SGD", {**good, "optimizer": torch.optim.SGD(other.net.parameters(), 0.1)})
        bad("parameter '4.bias' of 'optimizer' is in the checkpoint alone", {**good, "optimizer": torch.optim.Adam(list(other.net.parameters())[:-1])})
        split = torch.optim.Adam([{"params": list(other.net.parameters())[:2]}, {"params": list(other.net.parameters())[2:]}])
        bad("'optimizer' has 1 parameter groups in the checkpoint and 2 here", {**good, "optimizer": split})
        bad("is in no module of the state", {**good, "optimizer": torch.optim.Adam([nn.Parameter(torch.ones(1))])})
        narrow = nn.Sequential(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(), nn.Linear(5, 3)).double()
        bad(r"'net.0.weight' has shape \[5, 4\], in the checkpoint \[6, 4\]", {"net": narrow}, allow_extra=True)
        bad("'net.0.weight' is F32, in the checkpoint F64", {"net": network().float()}, allow_extra=True)
        bad("is a dictionary of names", [other.net])
        bad("'net.0' could be a part of 'net'", {**good, "net.0": 1})
        bad("none begins with 'python.'", {**good, "python.x": 1})
        bad("rank 1: .*no entry", {**good, **({7: 1} if rank == 1 else {})})  # one rank alone is wrong
        raises(ts.FileError, "nothing", checkpoints.load, "nothing", good)
        for p, q in zip(other.net.parameters(), before):
            assert torch.equal(whole(p), q)
        assert not other.optimizer.state
        loaded = checkpoints.load("c", {**other.state(), "extra": 5}, allow_extra=True, allow_missing=True)
        assert loaded["extra"] == 5
        for p, q in zip(other.net.parameters(), run.net.parameters()):
            assert torch.equal(whole(p), whole(q))
        assert ts.CheckpointReader(tmp_path, "c").load({"net": network().float(), **dict.fromkeys(["step"])}, convert=True, allow_extra=True)["step"] == 3
        # What cannot be saved.
        keep = lambda match, state, kind=ts.InvalidArgument: raises(kind, match, checkpoints.save, "d", state)  # noqa: E731
        keep("'thing.a.0' is a builtins.object, which a checkpoint does not keep", {"thing": {"a": [object()]}})
        keep("is in no module of the state", {"optimizer": other.optimizer})
        keep("run the lazy module once", {"net": nn.LazyLinear(3)})
        keep("the ranks disagree on value 'rank'", {"rank": float(rank)})
        raises(ts.InvalidArgument, "name is a text", checkpoints.save, 5, {})
        raises(ts.InvalidArgument, "a/b", checkpoints.save, "a/b", {})
        keep("rank 1: 'bad' is a builtins.object", {"bad": object() if rank else 1})
        assert checkpoints.names() == ["c"]
        raises(ts.InvalidArgument, "'wait' or 'refuse'", ts.Checkpointer, tmp_path, busy="hurry")
        raises(ts.InvalidArgument, "-1", ts.Checkpointer, tmp_path, keep_last=-1)
        raises(ts.MismatchError, "keep_last", ts.Checkpointer, tmp_path, keep_last=rank)
        checkpoints.close()
        raises(ts.InvalidArgument, "is closed", checkpoints.names)

    on_ranks(2, body)


def test_names_retention_and_damage(tmp_path):
    def body(rank):
        field = ts.full([6], 0.0, ts.Mesh({"x": 2}), [ts.Shard(0)], dtype=DTYPE)
        checkpoints = ts.Checkpointer(tmp_path, keep_last=2)
        assert checkpoints.to_resume() is None and checkpoints.latest() is None
        checkpoints.protect(["1"])
        for i in range(1, 5):
            field.fill_(i)
            checkpoints.start_save(str(i), {"field": field, "step": i})
            field.fill_(-1)  # what is saved is the state of the call
        checkpoints.wait()
        assert not checkpoints.saving and checkpoints.names() == ["1", "3", "4"] and checkpoints.to_resume() == checkpoints.latest() == "4"
        assert checkpoints.bytes_written > 0 and checkpoints.warnings == []
        saved = ts.CheckpointReader(tmp_path, "4")
        about = saved.tensors["field"]
        assert about == ts.SavedTensor(DTYPE, (6,), {"x": 2}, (ts.Shard(0),), {0: [3, 3]}) and saved.saved_ranks == 2
        assert saved.values()["step"] == b"4"
        assert whole(saved.read("field", ts.Mesh({"y": 2}), ts.Replicate())).tolist() == [4.0] * 6
        assert ts.spec(saved.read_as_saved(ts.Mesh({"x": 2}))["field"]).sizes == {0: [3, 3]}
        saved.verify()
        saved.export_file(tmp_path / "one.safetensors")
        alone = ts.CheckpointReader(tmp_path / "one.safetensors")
        assert alone.load({"field": field}) == {"field": field} and whole(field).tolist() == [4.0] * 6
        ts.world().barrier()
        if rank == 0:
            shard = next(p for p in (tmp_path / "4").glob("shard-00000*"))
            data = bytearray(shard.read_bytes())
            data[-3] ^= 1
            shard.write_bytes(data)
        ts.world().barrier()
        field.fill_(9)
        raises(ts.FileError, "shard-00000", checkpoints.load, "4", {"field": field, "step": 0})
        assert whole(field).tolist() == [9.0] * 6
        if rank == 0:
            manifest = tmp_path / "4" / "manifest.json"
            manifest.write_bytes(manifest.read_bytes()[:-9])
        ts.world().barrier()
        problems = []
        assert checkpoints.latest(problems) == "3" and len(problems) == 1
        raises(ts.CheckpointDamaged, "'?3'?", checkpoints.to_resume)
        checkpoints.remove("3")
        assert checkpoints.names() == ["1"]

    on_ranks(2, body)


def test_a_second_job_that_saves_meanwhile_is_told(tmp_path):
    """The lock of a folder is that of its first rank's process."""

    def body(rank):
        checkpoints = ts.Checkpointer(tmp_path)
        checkpoints.save("a", {"step": 1})
        if rank == 0:
            other = open(tmp_path / ".lock", "a+b")
            fcntl.flock(other, fcntl.LOCK_EX)
        ts.world().barrier()
        raises(ts.CheckpointLocked, "another job", checkpoints.save, "b", {"step": 2})
        raises(ts.CheckpointLocked, "another job", checkpoints.start_save, "b", {"step": 2})
        assert checkpoints.load("a", {"step": 0})["step"] == 1  # looking needs no lock
        ts.world().barrier()
        if rank == 0:
            other.close()
        ts.world().barrier()
        checkpoints.save("b", {"step": 2})
        assert checkpoints.names() == ["a", "b"]

    on_ranks(2, body)


def test_a_save_that_is_dropped_is_written_and_one_in_progress_can_be_refused(tmp_path):
    def body(rank):
        field = ts.rand([1 << 15], ts.Mesh({"x": 2}), ts.Shard(0))
        slow = ts.Checkpointer(tmp_path, busy="refuse", background_rate=25_000)  # 2.6 s
        slow.start_save("a", {"field": field})
        raises(ts.CheckpointBusy, "still being written", slow.save, "b", {"field": field})
        slow.wait()
        slow.save("b", {"field": field})
        dropped = ts.Checkpointer(tmp_path)
        dropped.start_save("c", {"field": field})
        del dropped
        ts.world().barrier()
        assert ts.Checkpointer(tmp_path).names() == ["a", "b", "c"]

    on_ranks(2, body)


def test_some_ranks_save_alone(tmp_path):
    def body(rank):
        if rank != 1:
            checkpoints = ts.Checkpointer(tmp_path, ranks=[0, 2])
            checkpoints.save("c", {"mine": ts.OfRank(rank)})
            assert checkpoints.load("c", {"mine": ts.OfRank(None)})["mine"] == rank
            assert ts.CheckpointReader(tmp_path, "c", ts.group([0, 2])).saved_ranks == 2

    on_ranks(3, body)


def launch(request, warm_python, ranks, *arguments):
    launcher = pathlib.Path(request.config.getoption("--launcher"))
    command = [launcher, "run", "-n", ranks, "--timeout", 150, "--", *warm_python, HERE / "checkpoint_program.py", *arguments]
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize("ranks", [2])
def test_processes_go_on_bit_by_bit(request, warm_python, tmp_path, ranks):
    """Plain modules under DistributedDataParallel, with dropout from each rank's own generator; the second life is another job."""
    for life in ("straight", "resumed"):
        done = launch(request, warm_python, ranks, life, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"rank (\d): bit by bit", done.stdout)) == [str(r) for r in range(ranks)]


@pytest.mark.parametrize("dies", [0, 1])
def test_killed_while_it_saves_the_last_checkpoint_stays_whole(request, warm_python, tmp_path, dies):
    done = launch(request, warm_python, 2, "killed", tmp_path, dies)
    assert done.returncode != 0 and "is killed" in done.stdout, done.stdout + done.stderr

    def body(rank):
        checkpoints, field = ts.Checkpointer(tmp_path), torch.zeros(1 << 16, dtype=DTYPE)
        assert checkpoints.to_resume() == "whole"
        assert checkpoints.load("whole", {"field": field, "step": 0})["step"] == 1 and torch.equal(field, torch.ones_like(field))
        checkpoints.save("next", {"step": 2})  # removes what the killed one left
        assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["next", "whole"]

    on_ranks(3, body)

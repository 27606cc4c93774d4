"""The loggers into files, and over Weights & Biases and MLflow by modules that stand in for those: who writes, and what a logger that fails does to others."""

import ast
import json
import pathlib
import subprocess
import sys
import threading
import time
import types
import warnings

import pytest
import torch

import tessera as ts
from support import on_ranks
from test_api import assert_same_parameters
from tessera import loggers
from tessera.loggers import FileLogger, MLflowLogger, WandbLogger


class Runs:
    """What was written, by run; `fails` is called before each write."""

    def __init__(self):
        self.runs, self.fails, self.ids, self.lock = {}, lambda step: None, 0, threading.Lock()

    def open(self, **options):
        with self.lock:
            self.ids += 1
            name = f"run-{self.ids}"
            self.runs[name] = {"options": options, "values": [], "end": None}
        return name

    def write(self, run, values, step):
        self.fails(step)
        assert threading.current_thread().name == "tessera logger"
        self.runs[run]["values"].append((step, values))


def stand_in_wandb(runs):
    class Run:
        def __init__(self, **options):
            self.id = runs.open(**options)

        def log(self, values, step):
            runs.write(self.id, values, step)

        def finish(self, exit_code):
            runs.runs[self.id]["end"] = exit_code

    return {"wandb": types.SimpleNamespace(init=Run)}


def stand_in_mlflow(runs):
    class Client:
        def __init__(self, tracking_uri):
            self.uri = tracking_uri

        def get_experiment_by_name(self, name):
            return types.SimpleNamespace(experiment_id="7") if name == "known" else None

        def create_experiment(self, name):
            return f"new {name}"

        def create_run(self, place, tags, run_name):
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id=runs.open(place=place, tags=tags, name=run_name, uri=self.uri)))

        def update_run(self, run, status):
            runs.runs[run]["end"] = None

        def log_batch(self, run, metrics=(), params=()):
            if params:
                runs.runs[run]["options"]["config"] = dict(params)
            for step in dict.fromkeys(m[3] for m in metrics):
                runs.write(run, {m[0]: m[1] for m in metrics if m[3] == step}, step)
                assert abs(metrics[0][2] / 1000 - time.time()) < 60

        def set_terminated(self, run, status):
            runs.runs[run]["end"] = {"FINISHED": 0, "FAILED": 1}[status]

    entities = types.SimpleNamespace(Metric=lambda *m: m, Param=lambda *p: p)
    return {"mlflow": types.ModuleType("mlflow"), "mlflow.entities": entities, "mlflow.tracking": types.SimpleNamespace(MlflowClient=Client)}


KINDS = {"wandb": (stand_in_wandb, WandbLogger), "mlflow": (stand_in_mlflow, MLflowLogger)}


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch):
    """The runs, and what makes a logger."""
    runs, (stand_in, logger) = Runs(), KINDS[request.param]
    for name, module in stand_in(runs).items():
        monkeypatch.setitem(sys.modules, name, module)
    return runs, logger


def test_the_first_rank_writes(kind):
    runs, logger = kind

    def body(rank):
        mesh = ts.Mesh({"data": 3})
        with logger("winds", name="three ranks", config={"rate": 0.1}) as one:
            for step in range(3):
                loss = ts.from_local(torch.full((1,), float(rank)), mesh, ts.Shard(0)).sum() + step  # read on all ranks together
                one.log({"loss": loss, "rows": 4, "norm": torch.tensor([float("nan")])}, step)
            for what in ("text", torch.ones(2), None, [1.0]):
                with pytest.raises(TypeError, match="not one number"):
                    one.log({"what": what}, 3)
        with pytest.raises(ts.InvalidArgument, match="after close"):
            one.log({"loss": 1.0}, 4)
        one.close()
        assert one.error is None
        return one.run_id

    assert on_ranks(3, body) == ["run-1"] * 3
    run = runs.runs["run-1"]
    assert [(step, values["loss"], values["rows"]) for step, values in run["values"]] == [(0, 3.0, 4.0), (1, 4.0, 4.0), (2, 5.0, 4.0)]
    assert run["end"] == 0 and run["options"]["name"] == "three ranks" and set(run["options"]["config"]) == {"rate"}


def test_the_first_rank_of_a_group_and_a_run_that_fails(kind):
    runs, logger = kind

    def body(rank):
        half = ts.group([2, 0] if rank % 2 == 0 else [1, 3])
        try:
            with logger("known", ranks=half) as one:
                one.log({"rank": ts.rank(), "half": rank % 2}, 0)
                if rank == 2:
                    raise ValueError("a mistake in the loop")
        except ValueError:
            pass
        return one.run_id

    even, odd, *others = on_ranks(4, body)
    assert others == [even, odd] and even != odd
    assert runs.runs[even]["values"] == [(0, {"rank": 2.0, "half": 0.0})] and runs.runs[even]["end"] == 1
    assert runs.runs[odd]["values"] == [(0, {"rank": 1.0, "half": 1.0})] and runs.runs[odd]["end"] == 0


def test_a_logger_that_throws_or_hangs_does_not_hold_others_up(kind):
    runs, logger = kind
    ended = threading.Event()

    def train(rank, limit):
        with logger("winds", limit=limit) as one:
            for step in range(20):
                assert ts.world().all_reduce(torch.ones(1)).item() == 2
                one.log({"loss": 1.0}, step)
                if rank == 0 and step == 10:
                    end = time.monotonic() + 60
                    while one.error is None and limit > 1 and time.monotonic() < end:
                        time.sleep(0.001)
        return one

    def throws(step):
        if step == 3:
            raise ConnectionError("the server is gone")

    runs.fails = throws
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        first, other = on_ranks(2, lambda rank: train(rank, 30.0))
    said = [str(w.message) for w in told if "logs no more" in str(w.message)]
    assert len(said) == 1 and "ConnectionError: the server is gone" in said[0] and isinstance(first.error, ConnectionError) and other.error is None
    assert [step for step, _ in runs.runs["run-1"]["values"]] == [0, 1, 2] and runs.runs["run-1"]["end"] == 0

    runs.fails = lambda step: ended.wait(200)
    begin = time.monotonic()
    with pytest.warns(UserWarning, match="not written after 0.2 s is lost"):
        on_ranks(2, lambda rank: train(rank, 0.2))
    ended.set()
    assert time.monotonic() - begin < 10


def test_what_is_wrong_at_the_start_is_raised_on_all(kind, monkeypatch):
    runs, logger = kind

    def refused(**_):
        raise PermissionError("no key is configured")

    def body(rank, words):
        with pytest.raises(ts.Error, match=words):
            logger("winds")
        with pytest.raises(ts.InvalidArgument, match="limit=0"):
            logger("winds", limit=0)
        return ts.world().all_reduce(torch.ones(1)).item()

    monkeypatch.setattr(runs, "open", refused)
    assert on_ranks(2, body, "PermissionError: no key is configured") == [2.0, 2.0]
    for name in ("wandb", "mlflow", "mlflow.entities", "mlflow.tracking"):
        monkeypatch.setitem(sys.modules, name, None)
    assert on_ranks(2, body, "Error: .*(wandb|mlflow)") == [2.0, 2.0]


def test_a_run_goes_on(kind):
    runs, logger = kind

    def body(rank):
        with logger("winds") as one:
            one.log({"loss": 2.0}, 0)
        again = {"run_id": one.run_id} if logger is MLflowLogger else {"id": one.run_id, "resume": "allow"}
        with logger("winds", **again) as other:
            other.log({"loss": 1.0}, 1)
        return one.run_id, other.run_id

    ids = on_ranks(2, body)
    assert ids[0] == ids[1]
    if logger is MLflowLogger:
        assert ids[0][0] == ids[0][1] and [step for step, _ in runs.runs["run-1"]["values"]] == [0, 1]
    else:
        assert runs.runs["run-2"]["options"]["id"] == "run-1"


def steps_of(path):
    return [(row["step"], row["loss"]) for row in map(json.loads, path.read_text().splitlines())]


def test_a_logger_of_files(tmp_path, request):
    folder, file = tmp_path / "runs" / "7", tmp_path / "file"
    file.write_text("")

    def body(rank):
        for start, steps in ((0, range(1, 5)), (2, range(3, 7)), (0, [1])):  # a run; one that goes on behind step 2; one that begins anew
            with FileLogger(folder, start=start) as one:
                assert one.run_id == str(folder)
                for step in steps:
                    one.log({"loss": torch.tensor(step / 2 + start), "norm": float("inf")}, step)
            assert one.error is None
        with FileLogger(folder, kind="csv") as one:
            one.log({"loss": 2.5}, 7)
        with FileLogger(folder / "events", kind="tensorboard", ranks=ts.world()) as one:
            one.log({"loss": 2.5}, 7)
        with pytest.raises(ts.Error, match="cannot be"):  # on all ranks, though the first alone writes
            FileLogger(file / "folder")
        with pytest.raises(ts.Error, match="a logger of kind 'jason': csv, json or tensorboard"):
            FileLogger(folder, kind="jason")
        return ts.world().all_reduce(torch.ones(1)).item()

    assert on_ranks(2, body) == [2.0, 2.0]
    assert steps_of(folder / "metrics.jsonl.1") == [(1, 0.5), (2, 1.0), (3, 3.5), (4, 4.0), (5, 4.5), (6, 5.0)]
    assert steps_of(folder / "metrics.jsonl") == [(1, 0.5)]
    assert (folder / "metrics.csv").read_text().splitlines()[1].endswith(",loss,2.5") and len(list((folder / "events").iterdir())) == 1
    launcher = pathlib.Path(request.config.getoption("--launcher")).resolve()
    done = subprocess.run([launcher, "report", folder], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "loss" in (folder / "report.html").read_text(), done.stdout + done.stderr


def test_the_stub_is_the_code():
    stub = ast.parse(pathlib.Path(ts.__file__).with_name("loggers.pyi").read_text())
    classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    assert [name for name in classes if not name.startswith("_")] == ["FileLogger", "WandbLogger", "MLflowLogger"] and set(loggers.__all__) < set(classes)
    for name, node in classes.items():
        for method in (m for m in node.body if isinstance(m, ast.FunctionDef) and m.name != "__exit__"):
            assert_same_parameters(method, getattr(getattr(loggers, name), method.name), f"{name}.{method.name}")

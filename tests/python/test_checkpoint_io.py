"""Checkpoints at any place that fsspec knows: memory, local files, and a file system that fails, is slow and is dead on purpose."""

import functools
import importlib.util
import threading
import time

import pytest
import torch

import tessera as ts
from support import on_ranks, raises, whole

fsspec = pytest.importorskip("fsspec")
from fsspec.implementations.dirfs import DirFileSystem  # noqa: E402
from fsspec.implementations.local import LocalFileSystem  # noqa: E402
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402

EXPECTED = torch.arange(21, dtype=torch.float64).reshape(7, 3)


class Failing(MemoryFileSystem):
    """Does `fault` before the n-th call from `arm` on, of whatever rank. Each object has a store of its own."""

    cachable = False

    def __init__(self):
        super().__init__(global_store=False)
        self.left, self.fault, self.lock = 0, None, threading.Lock()

    def arm(self, left, fault):
        self.left, self.fault = left, fault

    def step(self):
        with self.lock:
            self.left -= 1
            due = self.left == 0
        if due:
            self.fault()


def _counted(method):
    @functools.wraps(method)
    def call(self, *arguments, **options):
        self.step()
        return method(self, *arguments, **options)

    return call


for _name in ("ls", "info", "cat_file", "open", "pipe_file", "rm_file", "rmdir", "makedirs"):
    setattr(Failing, _name, _counted(getattr(MemoryFileSystem, _name)))


def table(value):
    mesh = ts.Mesh({"x": ts.world_size()})
    return ts.distribute_tensor(EXPECTED + value, mesh, [ts.Shard(0)])


def save(checkpoints, name, value, start=False):
    (checkpoints.start_save if start else checkpoints.save)(name, {"table": table(value), "value": value, "mine": ts.OfRank(ts.rank())})


def loaded(checkpoints, name):
    mesh = ts.Mesh({"y": ts.world_size()})
    into = ts.distribute_tensor(torch.zeros(7, 3, dtype=torch.float64), mesh, [ts.Shard(1)])
    value = checkpoints.load(name, {"table": into, "value": 0, "mine": ts.OfRank(None)})["value"]
    assert torch.equal(whole(into), EXPECTED + value)
    return value


def places(tmp_path):
    return {
        "memory": lambda: ts.FsspecIO(f"memory://{tmp_path}/runs"),
        "local": lambda: ts.FsspecIO(f"file://{tmp_path}/local/runs"),
        "wrapped": lambda: ts.FsspecIO("runs/7", filesystem=DirFileSystem(str(tmp_path / "wrapped"), LocalFileSystem())),
    }


@pytest.mark.parametrize("where", ["memory", "local", "wrapped"])
def test_what_is_saved_there_is_loaded_on_other_ranks(tmp_path, where):
    place = places(tmp_path)[where]

    def saves(rank):
        checkpoints = ts.Checkpointer(place(), keep_last=2)
        assert checkpoints.to_resume() is None
        for i in range(1, 4):
            save(checkpoints, f"c{i}", i, start=True)
        checkpoints.wait()
        save(checkpoints, "c3", 4)  # in place of the one before
        assert checkpoints.names() == ["c2", "c3"] and checkpoints.folder.endswith("runs/7" if where == "wrapped" else "runs")
        assert [("no puts that are refused" in w) for w in checkpoints.warnings] == ([True] if where == "wrapped" and rank == 0 else [])

    on_ranks(3, saves)

    def loads(rank):
        checkpoints = ts.Checkpointer(place())
        name = checkpoints.to_resume()
        assert name == "c3" and loaded(checkpoints, name) == 4 and loaded(checkpoints, "c2") == 2
        saved = ts.CheckpointReader(place(), "c2")
        assert saved.saved_ranks == 3 and saved.values()["value"] == b"2" and sorted(saved.values_of_ranks("mine")) == [0, 1, 2]
        saved.verify()
        before = saved.bytes_read
        saved.read("table", ts.Mesh({"x": ts.world_size()}), ts.Shard(0))
        assert saved.bytes_read > before
        saved.export_file(tmp_path / "one.safetensors")
        assert ts.CheckpointReader(tmp_path / "one.safetensors").tensors["table"].shape == (7, 3)
        raises(ts.FileError, "c1' is not a checkpoint", ts.CheckpointReader, place(), "c1")
        if ts.world_size() == 2:
            checkpoints.remove("c2")
            assert checkpoints.names() == ["c3"]
            save(checkpoints, "c4", 5)
            assert checkpoints.to_resume() == "c4" and loaded(checkpoints, "c4") == 5

    for ranks in (1, 2):
        on_ranks(ranks, loads)
    if where == "local":
        folder = tmp_path / "local" / "runs"
        assert (folder / ".lock").exists() and on_ranks(1, lambda rank: ts.Checkpointer(folder).names()) == [["c3", "c4"]]


def test_a_fault_at_any_call_is_told_on_all_ranks_and_nothing_is_lost():
    def fails():
        raise OSError("the store has had enough")

    refused, n, more = 0, -1, True
    while more:
        n += 2
        assert n < 200
        fs, told = Failing(), []

        def saves(rank, fs=fs, n=n, told=told):
            checkpoints = ts.Checkpointer(ts.FsspecIO("/runs", filesystem=fs), keep_last=1)
            save(checkpoints, "first", 1)
            ts.world().barrier()
            if rank == 0:
                fs.arm(n, fails)
            ts.world().barrier()
            try:
                save(checkpoints, "second", 2, start=n % 4 == 1)
                checkpoints.wait()
            except ts.FileError as error:
                assert "memory:" in str(error) and "the store has had enough" in str(error)
                told.append(rank)

        on_ranks(2, saves)
        more = fs.left <= 0
        fs.arm(0, None)
        refused += len(told) == 2
        assert len(told) in (0, 2)

        def resumes(rank, fs=fs, told=told):
            checkpoints = ts.Checkpointer(ts.FsspecIO("/runs", filesystem=fs))
            name = checkpoints.to_resume()
            assert name == "second" or (name == "first" and told)
            assert loaded(checkpoints, name) == (1 if name == "first" else 2)

        on_ranks(3, resumes)
    assert refused > 5


def test_a_dead_store_is_an_error_on_all_ranks_within_the_limit():
    fs, over = Failing(), threading.Event()

    def body(rank):
        place = ts.FsspecIO("/runs", filesystem=fs)
        checkpoints = ts.Checkpointer(place)
        save(checkpoints, "a", 1)
        saved = ts.CheckpointReader(place, "a")
        place._timeout = 0.5  # a busy machine may need longer for what is to succeed
        ts.world().barrier()
        if rank == 0:
            fs.step = lambda: over.wait(200)
        ts.world().barrier()
        begun = time.monotonic()
        raises(ts.FileError, "no answer within 0.5 s", save, checkpoints, "b", 2)
        save_and_wait = lambda: (save(checkpoints, "b", 2, start=True), checkpoints.wait())  # noqa: E731
        raises(ts.FileError, "no answer within 0.5 s", save_and_wait)
        raises(ts.FileError, "no answer within 0.5 s", checkpoints.to_resume)
        raises(ts.FileError, "no answer within 0.5 s", saved.verify)
        assert time.monotonic() - begun < 10

    try:
        on_ranks(2, body)
    finally:
        over.set()


def test_of_two_writers_one_is_told():
    fs = Failing()

    def body(rank):
        mine = ts.Checkpointer(ts.FsspecIO("/runs", filesystem=fs))
        save(mine, "old", 1)
        ts.world().barrier()
        if rank == 0:
            other = ts.Checkpointer(ts.FsspecIO("/runs", filesystem=fs), ranks=[0])
            begins = other.save
            # The other job claims the place while this one writes.
            fs.arm(6, lambda: fs.pipe_file("/runs/.claim-99", b"", mode="create"))
        ts.world().barrier()
        raises(ts.CheckpointLocked, "another job has begun", save, mine, "new", 2)
        assert mine.names() == ["old"] and loaded(mine, "old") == 1
        save(mine, "next", 3)
        assert mine.to_resume() == "next"
        if rank == 0:
            begins("of the other", {"value": 4})
        ts.world().barrier()
        assert mine.names() == ["old", "next", "of the other"]

    on_ranks(2, body)


def test_wrong_arguments():
    raises(ts.InvalidArgument, "timeout of 0 seconds", ts.FsspecIO, "memory://a", timeout=0)
    raises(ts.InvalidArgument, "no file system of fsspec", ts.FsspecIO, "a", filesystem="memory")
    raises(ts.InvalidArgument, "anon cannot be options", ts.FsspecIO, "a", filesystem=MemoryFileSystem(), anon=True)
    raises(ts.InvalidArgument, "nowhere", ts.FsspecIO, "nowhere://a")
    if importlib.util.find_spec("gcsfs") is None:
        raises(ts.NotAvailable, "gcsfs", ts.FsspecIO, "gs://bucket/a")

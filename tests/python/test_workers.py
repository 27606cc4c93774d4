"""Worker processes of a loader: the batches of threads, and no process that stays."""

import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import torch

import tessera as ts
from support import on_ranks

# Imported once, in the server from which workers come.
multiprocessing.set_forkserver_preload(["test_workers"])
FIELD = torch.arange(11 * 5, dtype=torch.float64).reshape(11, 5)


class Samples:
    """Nested, of several dtypes; says which process has read it."""

    def __init__(self, damaged=-1, deadly=-1, slow=-1):
        self.damaged, self.deadly, self.slow = damaged, deadly, slow

    def __len__(self):
        return len(FIELD)

    def __getitem__(self, index):
        if index == self.damaged:
            raise Damaged(f"a bad sector in {index}", 7)
        if index == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self.slow:
            time.sleep(600)
        return {"field": FIELD[index], "about": [index, torch.tensor([True, False]), torch.zeros(0, 2)], "by": os.getpid()}


class Damaged(OSError):
    pass


class Awkward(Exception):
    """Cannot be made again of its arguments."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class Raising(Samples):
    def __getitem__(self, index):
        if index == 2:
            raise Awkward("one", "two")
        raise KeyboardInterrupt


class Plain:
    """As without processes: what is compared has no number of a process."""

    def __len__(self):
        return len(FIELD)

    def __getitem__(self, index):
        return FIELD[index].to(torch.bfloat16), torch.tensor([index], dtype=torch.int32), index % 2 == 0


def padded(samples):
    return {"field": torch.stack([s["field"] for s in samples]), "by": torch.tensor([s["by"] for s in samples])}


def gone(pids, limit=60.0):
    """True when none of the processes is there."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if not any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_batches_order_and_state_are_those_without():
    order = ts.FixedOrder(len(FIELD), {0: 3, 2: 4}, seed=3, last="pad")

    def body(rank):
        mesh = ts.Mesh({"data": 2})
        without = ts.Loader([Plain()], order, mesh, ["data"])
        expected = [without.next() for _ in range(6)]
        loader = ts.Loader([Plain()], order, mesh, ["data"], processes=2, prefetch=3)
        got = [loader.next() for _ in range(3)]
        state = loader.state()
        loader.seek(1)
        again = loader.next()
        loader.close()
        resumed = ts.Loader([Plain()], order, mesh, ["data"], processes=1)
        resumed.restore(state)
        got += [resumed.next() for _ in range(3)]
        resumed.require_agreement()
        resumed.close()
        for mine, wanted in [*zip(got, expected, strict=True), (again, expected[1])]:
            assert (mine.step, mine.epoch, mine.samples, mine.real, mine.slices) == (wanted.step, wanted.epoch, wanted.samples, wanted.real, wanted.slices)
            assert [t.dtype for t in mine.tensors] == [torch.bfloat16, torch.int32, torch.bool]
            assert all(torch.equal(t, u) for t, u in zip(mine.tensors, wanted.tensors, strict=True))
        return True

    assert on_ranks(2, body) == [True, True]


def test_several_processes_decode_and_none_stays():
    def body(rank):
        mesh = ts.Mesh({"x": 1})
        loader = ts.Loader(Samples(), ts.FixedOrder(11, 2), mesh, ["x"], processes=2)
        batches = [loader.next() for _ in range(6)]
        assert batches[0].fields["about"][2].shape == (2, 0, 2) and batches[0].names[1] == "about/0"
        collated = ts.Loader(Samples(), ts.FixedOrder(11, 4), mesh, ["x"], processes=1, collate=padded)
        one = collated.next()
        assert torch.equal(one.fields["field"], FIELD[[i for _, i in one.samples]])
        pids = {pid for batch in [*batches, one] for pid in batch.fields["by"].tolist()}
        assert os.getpid() not in pids and 2 <= len(pids) <= 3
        collated.close()
        del loader  # without close()
        assert gone(pids)
        assert torch.equal(batches[0].fields["field"], FIELD[[i for _, i in batches[0].samples]])  # memory outlives its maker

    on_ranks(1, body)


def test_what_a_dataset_raises_in_a_process_is_the_cause():
    def body(rank):
        mesh, order = ts.Mesh({"x": 1}), ts.FixedOrder(11, 2, shuffle=False)
        loader = ts.Loader(Samples(damaged=4), order, mesh, ["x"], processes=2)
        assert loader.next().rows == loader.next().rows == 2
        for _ in range(2):  # it still stands there
            with pytest.raises(ts.SampleError, match="sample 4: Damaged: .*a bad sector in 4") as error:
                loader.next()
            cause = error.value.__cause__
            assert isinstance(cause, Damaged) and cause.args == ("a bad sector in 4", 7) and "in __getitem__" in cause.__notes__[0]
        loader.seek(3)
        assert loader.next().fields["about"][0].tolist() == [6, 7]
        loader.close()
        for step, kind in ((3, KeyboardInterrupt), (2, ts.SampleError)):
            other = ts.Loader(Raising(), ts.FixedOrder(11, 1, shuffle=False), mesh, ["x"], processes=1)
            other.seek(step)
            with pytest.raises(kind) as error:
                other.next()
            assert kind is KeyboardInterrupt or "Awkward: one and two" in str(error.value)
            other.close()

    on_ranks(1, body)


def test_a_worker_that_dies_or_hangs_is_told():
    def body(rank):
        mesh, order = ts.Mesh({"x": 1}), ts.FixedOrder(11, 2, shuffle=False)
        begin = time.monotonic()
        loader = ts.Loader(Samples(deadly=4), order, mesh, ["x"], processes=2)
        seen = [loader.next(), loader.next()]
        for _ in range(2):
            with pytest.raises(ts.SampleError, match=r"loader worker \d \(process \d+\) has ended by signal 9 while it was to read samples 4"):
                loader.next()
        loader.close()
        hanging = ts.Loader(Samples(slow=2), order, mesh, ["x"], processes=2, stall_limit=4.0)
        seen.append(hanging.next())
        with pytest.raises(ts.StalledError):
            hanging.next()
        hanging.close()
        assert gone({pid for batch in seen for pid in batch.fields["by"].tolist()}) and time.monotonic() - begin < 30
        with pytest.raises(RuntimeError, match="closed"):
            hanging.next()

    on_ranks(1, body)


class Local(Samples):
    def __reduce__(self):
        raise TypeError("of this process alone")


def test_what_cannot_go_to_a_process_is_refused():
    def body(rank):
        mesh, order = ts.Mesh({"x": 1}), ts.FixedOrder(11, 2)
        with pytest.raises(ts.InvalidArgument, match="pickled, .*of this process alone"):
            ts.Loader(Local(), order, mesh, ["x"], processes=1)
        with pytest.raises(ts.InvalidArgument, match="by name"):
            ts.Loader(Samples(), order, mesh, ["x"], processes=1, collate=lambda samples: samples)
        for datasets, processes in ((ts.TensorDataset(FIELD), 2), (Samples(), -1)):
            with pytest.raises(ts.InvalidArgument, match="processes="):
                ts.Loader(datasets, order, mesh, ["x"], processes=processes)
        with pytest.raises(RuntimeError):
            ts.Loader(Samples(), ts.FixedOrder(99, 2), mesh, ["x"], processes=1)  # and its process is gone
        assert not [p for p in multiprocessing.active_children() if p.name.startswith("loader")]

    on_ranks(1, body)


PROGRAM = pathlib.Path(__file__).with_name("workers_program.py")


def ended(command, how):
    """How the program ended, and what it said; the workers that it told of are gone."""
    done = subprocess.run([str(word) for word in (*command, PROGRAM, how)], capture_output=True, text=True, timeout=150)
    said = done.stdout + done.stderr
    pids = {int(word) for line in said.splitlines() for word in line.partition("workers: ")[2].split()}
    assert done.returncode != 0 and gone(pids), said
    return len(pids), said


def test_ranks_and_their_workers_end_together(request, warm_python):
    """A worker that dies on one rank ends all with the reason; and no process is left, where a rank is killed either."""
    run = [request.config.getoption("--launcher"), "run", "-n", 2, "--timeout", 100, "--", *warm_python]
    workers, said = ended(run, "dies")
    assert workers >= 3 and "has ended by signal 9 while it was to read samples" in said and "first failure: rank 1" in said, said
    assert float(said.partition("told after ")[2].split()[0]) < 20
    assert ended(warm_python, "killed")[0] >= 1


def test_a_script_without_a_main_is_refused(warm_python):
    _, said = ended(warm_python, "unguarded")
    assert "meets no job" in said and "SampleError" in said and "with status 1 while it was to read" in said and "__main__" in said, said

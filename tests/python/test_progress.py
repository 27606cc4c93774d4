"""Progress, FLOP and waiting of a loop in Python."""

import io
import os
import threading
import time

import pytest
import torch

import tessera as ts


@pytest.fixture(autouse=True, scope="module")
def alone():
    ts.init()
    yield
    ts.shutdown()


def test_a_line_where_no_terminal_is(capsys):
    with ts.Progress(40, start=10, unit="tokens", line_seconds=0) as progress:
        progress.say("resumed from step-10")
        for step in range(10, 40):
            progress.step(16, loss=torch.tensor(0.5), rate=1e-3)
        values = progress.report()
    text = capsys.readouterr().err
    assert "resumed from step-10\n" in text
    assert "step 11 of 40" in text and "step 40 of 40" in text and "loss 0.5" in text and "rate 0.001" in text and "tokens/s" in text, text
    assert "trained 30 steps in" in text and "peak memory" in text, text
    assert values["throughput/samples"] == pytest.approx(16 * values["throughput/steps"])
    assert values["memory/peak"] > 1e7 and "time/waited" not in values


def test_flop_and_waiting_of_two_ranks(capsys):
    here = [threading.Event() for _ in range(5)]

    def body(rank):
        weight = torch.ones(64, 64, requires_grad=True)
        ts.world().barrier()  # both begin at once
        with ts.Progress(5, peak_flop=1e9, line_seconds=1e6) as progress:
            for step in range(5):
                (torch.ones(8 * (rank + 1), 64) @ weight).sum().backward()
                if rank == 0:
                    here[step].set()
                else:  # the later one, whatever the other took to come here
                    assert here[step].wait(100)
                    time.sleep(0.1)
                ts.world().barrier()
                progress.step(24)
            return progress.report()

    first, second = ts.run_threads(2, body)
    assert first == second
    seconds = 5 / first["throughput/steps"]
    # Forward, and the gradient of the weight: of 8 and of 16 rows.
    assert first["throughput/flop"] * seconds == pytest.approx(5 * 2 * 2 * 24 * 64 * 64)
    assert first["throughput/mfu"] == pytest.approx(first["throughput/flop"] / 2e9)
    assert first["time/slowest_rank"] == 1
    assert first["time/waited"] > 0.02
    text = capsys.readouterr().err
    assert text.count("trained 5 steps") == 1 and "rank 1 waited least" in text, text


def test_counters_end_in_any_order_and_on_their_thread():
    outer, inner = ts.WaitTime(), ts.FlopCounter()
    outer.__enter__()
    progress = ts.Progress(show=False).__enter__()
    inner.__enter__()
    torch.ones(2, 3) @ torch.ones(3, 4)
    progress.__exit__()
    outer.__exit__()
    torch.ones(2, 3) @ torch.ones(3, 4)
    inner.__exit__()
    assert inner.total == 2 * 2 * 2 * 3 * 4 and outer.total == 0
    with pytest.raises(ts.InvalidArgument, match="inside of its"):
        progress.step(1)

    counter, raised = ts.FlopCounter().__enter__(), []

    def leave():
        try:
            counter.__exit__()
        except ts.InvalidArgument as error:
            raised.append(str(error))

    elsewhere = threading.Thread(target=leave)
    elsewhere.start()
    elsewhere.join()
    assert raised and "another thread" in raised[0]
    counter.__exit__()
    with pytest.raises(ts.InvalidArgument, match="nothing was counted"):
        ts.WaitTime().total  # noqa: B018


def test_the_number_of_a_sharded_tensor_is_refused():
    def body(rank):
        mesh = ts.Mesh({"x": 2})
        loss = ts.from_local(torch.ones(rank + 1), mesh, [ts.Shard(0)]).sum()
        with ts.Progress(show=False) as progress:
            with pytest.raises(ts.InvalidArgument, match=r"give loss\.item\(\), taken on all ranks"):
                progress.step(1, loss=loss)
            progress.step(1, loss=loss.item())

    ts.run_threads(2, body)


def test_an_exception_leaves_nothing_behind(capsys):
    with pytest.raises(ZeroDivisionError), ts.Progress(3, line_seconds=0) as progress:
        progress.step(1)
        1 / 0
    with ts.FlopCounter() as counter:
        torch.ones(2, 3) @ torch.ones(3, 4)
    assert counter.total == 48
    with pytest.raises(ts.InvalidArgument, match="a line every -1"):
        ts.Progress(line_seconds=-1).__enter__()


def test_a_stderr_that_takes_nothing_ends_no_run(monkeypatch):
    closed = open(os.devnull, "w")  # noqa: SIM115
    closed.close()
    letters = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    letters.isatty = lambda: True
    for stream in (closed, None, letters, object()):
        monkeypatch.setattr("sys.stderr", stream)
        with ts.Progress(2, show=True, line_seconds=0) as progress:
            progress.step(1, é=1.0)
            progress.say("─")
            assert progress.report()["throughput/steps"] > 0

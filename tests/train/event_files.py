"""TensorBoard itself reads the event files: scalars of two runs, of which the second takes the place of what the first has after its start."""

import subprocess
import sys
import tempfile

try:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
except ImportError:
    print("tensorboard is not installed: pip install tensorboard in .env")
    sys.exit(77)

with tempfile.TemporaryDirectory() as folder:
    subprocess.run([sys.argv[1], folder], check=True, timeout=60)
    read = EventAccumulator(folder)
    read.Reload()
    assert sorted(read.Tags()["scalars"]) == ["train/loss", "val/loss"], read.Tags()
    got = [(event.step, round(event.value, 6)) for event in read.Scalars("train/loss")]
    expected = [(10, 0.1), (20, 0.05)] + [(step, round(20 + 1 / step, 6)) for step in (30, 40, 50)]
    assert [step for step, _ in got] == [step for step, _ in expected], got
    assert all(abs(a - b) < 2e-6 for (_, a), (_, b) in zip(got, expected)), got
    assert [event.value for event in read.Scalars("val/loss")] == [2.5] * 5
print("TensorBoard reads what was written")

"""The stubs, as a type checker reads them: documented programs pass mypy --strict, and mistakes do not (`make types` asks pyright too)."""

from typed import PAGES, mypy, programs

# Each is one mistake, in the words that mypy has for it.
WRONG = """import torch
import tessera as ts

mesh = ts.Mesh({"data": 2})
ts.Mesh(["data"])  # arg-type
ts.Shard("rows")  # arg-type
ts.distribute_tensor(torch.ones(2), mesh)  # call-arg
ts.distribute_tensor(torch.ones(2), mesh, ["Shard(0)"])  # list-item
ts.full_tensor(torch.ones(2).grad)  # arg-type
ts.world().all_reduce(torch.ones(2), operator="sum")  # call-overload
ts.world().all_reduced(torch.ones(2))  # attr-defined
mesh.axes.append("domain")  # attr-defined
ts.spec(torch.ones(2)).placements[0].dim  # attr-defined
ts.fully_shard(torch.nn.Linear(2, 2), mesh, unit="*")  # call-arg
ts.Checkpointer("runs", keep=2)  # call-arg
ts.Schedule("1f1b", 4, "8")  # arg-type
ts.Loader(ts.TensorDataset(torch.ones(2)), 4, mesh, ["data"])  # arg-type
ts.world().all_reduce(torch.ones(2), start=True).sum()  # attr-defined
ts.Session(torch.nn.Linear(2, 2), precision="bfloat16")  # arg-type
loss: int = ts.run_threads(2, lambda rank: 0.5)[0]  # assignment
"""


def test_documented_programs_and_mistakes(tmp_path):
    """In one run, since most of its time is torch's own types."""
    files = programs(tmp_path)
    assert len(files) >= 20 + len(PAGES) and all(file.stat().st_size > 500 for file in files)
    wrong = tmp_path / "wrong.py"
    wrong.write_text(WRONG)
    said = mypy(tmp_path, [*files, wrong]).splitlines()
    found = {(int(line.split(":")[1]), line.rsplit("[", 1)[1].rstrip("]")) for line in said if line.startswith("wrong.py:") and ": error: " in line}
    wanted = {(number, line.rsplit("# ", 1)[1]) for number, line in enumerate(WRONG.splitlines(), 1) if "  # " in line}
    assert found == wanted, "\n".join(said)
    others = [line for line in said if not line.startswith("wrong.py:")]
    assert not others, "\n".join(others)

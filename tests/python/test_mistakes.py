"""What beginners do wrong from Python, and what they are told: the rows of tests/docs/mistakes.txt that name Python. Ranks are threads."""

import ctypes
import importlib.util
import pathlib
import tempfile
import threading
import warnings

import pytest
import torch
from torch import nn

import tessera as ts

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def module_of(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ROWS = {row["id"]: row for row in module_of(ROOT / "tests/docs/mistakes.py").rows(ROOT) if row["by"].startswith("python ")}
CASES = {}
HERE, DONE = threading.Event(), threading.Event()


def mistake(number):
    def known(body):
        CASES[number] = body
        return body

    return known


def world(name="data"):
    return ts.Mesh({name: ts.world_size()})


def rows(shape=(4, 3)):
    return ts.ones(shape, world(), [ts.Shard(0)])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"qkv": nn.Linear(8, 24), "out": nn.Linear(8, 8)})])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


@mistake("1")
def item_alone(rank):
    loss = rows().square().mean()
    if rank == 0:
        loss.item()
    ts.full_tensor(rows())


@mistake("2")
def own_batches(rank):
    net = ts.fully_shard(nn.Linear(3, 1), world())
    net(torch.full((2, 3), float(rank))).sum().backward()


@mistake("2b")
def samples_for_shards(rank):
    mesh = ts.Mesh({"data": 1, "domain": 2})
    loader = ts.Loader(ts.TensorDataset(torch.ones(4, 3, 8, 4)), ts.FixedOrder(4, 2), mesh, ["data"])
    ts.shard_batch(loader.next(), mesh, ["data"], [{"domain": 2}])


@mistake("2c")
def own_batches_refused(rank):
    ts.set_policies(plain_values="error")
    own_batches(rank)


@mistake("2d")
def own_batches_distributed(rank):
    ts.set_check_level("collective")
    ts.distribute_tensor(torch.full((2, 3), float(rank)), world(), ts.Shard(0))


@mistake("3")
def ghost_cells(rank):
    memory = torch.frombuffer((ctypes.c_float * 36)(), dtype=torch.float32).view(6, 6)
    ts.from_local(memory[1:-1, 1:-1], world(), [ts.Shard(0)])


@mistake("6a")
def check_of_other_inputs(rank):
    ts.check(nn.Linear(3, 1), torch.full((2, 3), float(rank)), world())


@mistake("7")
def two_reducers(rank):
    net = nn.Linear(3, 1)
    both = [ts.DistributedDataParallel(net, reduction="sum") for _ in range(2)]
    both[0](torch.ones(2, 3)).sum().backward()


@mistake("15a")
def numpy(rank):
    rows().numpy()


@mistake("15b")
def asarray(rank):
    pytest.importorskip("numpy").asarray(rows())


@mistake("15c")
def torch_save(rank):
    with tempfile.TemporaryFile() as file:
        torch.save(ts.distribute_module(nn.Linear(3, 1), world()).state_dict(), file)


@mistake("16a")
def mesh_of_six(rank):
    ts.Mesh({"a": 6})


@mistake("16b")
def unknown_axis(rank):
    world().group("domain")


@mistake("16c")
def sizes_of_eleven(rank):
    ts.zeros([10], world(), [ts.Shard(0)], {0: [5, 6]})


@mistake("16d")
def two_placements(rank):
    ts.zeros([10], world(), [ts.Shard(0), ts.Shard(0)])


@mistake("16e")
def other_widths(rank):
    ts.from_local(torch.zeros(2, 3 + rank), world(), [ts.Shard(0)])


@mistake("16f")
def other_dtypes(rank):
    ts.from_local(torch.zeros(2, 3, dtype=[torch.float32, torch.float64][rank]), world(), [ts.Shard(0)])


@mistake("17")
def shard_of_no_dim(rank):
    ts.zeros([10, 4], world(), [ts.Shard(2)])


@mistake("18")
def heads(rank):
    ts.tensor_parallel(Block(), world("tensor"), {"*.qkv": ts.column(5)})


@mistake("19")
def pattern(rank):
    ts.tensor_parallel(Block(), world("tensor"), {"*.qvk": ts.column(4)})


@mistake("20")
def save_alone(rank):
    if rank == 0:
        ts.save({"x": rows()}, world(), "/nonexistent/alone.safetensors")
    else:
        world().barrier()


def saved(rank, into):
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = ts.Checkpointer(ts.world().broadcast_bytes(folder.encode(), 0).decode())
        checkpoints.save("a", {"net": nn.Linear(3, 2)})
        try:
            checkpoints.load("a", {"net": into})
        finally:
            checkpoints.close()


@mistake("21a")
def other_shape(rank):
    saved(rank, nn.Linear(4, 2))


@mistake("21b")
def less_than_saved(rank):
    saved(rank, nn.Linear(3, 2, bias=False))


def attend(policy):
    ts.set_policies(redistribution=policy)
    net = ts.distribute_module(Attention(), world())
    net(ts.distribute_tensor(torch.zeros(2, 6, 8), world(), [ts.Shard(1)]))


@mistake("26")
def nothing_may_move(rank):
    attend("error")


@mistake("27")
def what_moves(rank):
    attend("warn")


@mistake("29")
def all_throw_the_same(rank):
    """The program gets its own exception, and not what the others heard of it."""

    def body(inner):
        raise ValueError("bad learning rate")

    if rank == 0:
        with pytest.raises(ValueError, match="bad learning rate"):
            ts.run_threads(2, body)


@mistake("30a")
def placements_of_torch(rank):
    from torch.distributed.tensor import Shard

    for placements in (ts.Shard(0), Shard(0), [Shard(0)]):
        assert ts.spec(ts.zeros([4], world(), placements)).placements == (ts.Shard(0),)


@mistake("30b")
def as_dtensor_prints(rank):
    ts.zeros([4], world(), ["S(0)"])


@mistake("30c")
def a_number(rank):
    ts.zeros([4], world(), [0])


@mistake("30d")
def a_list_of_samples(rank):
    ts.Loader([1, 2], ts.FixedOrder(2, 1), world(), ["data"])


@mistake("31")
def compiled(rank):
    net = ts.distribute_module(nn.Linear(3, 2), world())
    assert torch.equal(ts.full_tensor(torch.compile(net, backend="eager")(rows())), ts.full_tensor(net(rows())))


@mistake("33a")
def optimizer_first(rank):
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    ts.fully_shard(net, world())
    before = ts.full_tensor(net.weight).clone()
    net(rows()).sum().backward()
    optimizer.step()
    assert torch.allclose(ts.full_tensor(net.weight), before - 2.0)


@mistake("33b")
def other_seeds(rank):
    net = nn.Linear(3, 2)
    with torch.no_grad():
        net.weight.fill_(float(rank))
    ts.DistributedDataParallel(net)
    assert net.weight.eq(0).all()


@mistake("33c")
def not_distributed(rank):
    net = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        net.weight.fill_(1.0)
    net(rows()).sum().backward()
    assert net.weight.grad.eq(4).all()


@torch.library.custom_op("mistakes::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@mistake("34")
def no_rule(rank):
    unknown(rows())


@mistake("35")
def elsewhere(rank):
    ts.world().barrier()
    if rank == 1:
        HERE.set()
        return DONE.wait(100)
    assert HERE.wait(100)  # it has left the barrier, and does not wait in it any more
    try:
        ts.world().barrier(timeout=0.3)
    finally:
        DONE.set()


@mistake("36")
def gives_up(rank):
    ts.world().barrier()  # the world exists on both: else its creation is what fails
    if rank == 1:
        return ts.world().abort("no memory is left")
    ts.world().barrier()


def test_the_table_and_the_cases_are_the_same():
    assert ROWS.keys() == CASES.keys()


@pytest.mark.parametrize("number", ROWS)
def test_a_mistake_is_told(number):
    row, body = ROWS[number], CASES[number]
    wanted = row["by"].removeprefix("python ")

    def told(rank):
        try:
            body(rank)
        except Exception as error:
            return type(error).__name__, str(error)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ranks = ts.run_threads(2, told, timeout=100)
    if wanted in ("warning", "works"):
        assert ranks == [None, None]
        ranks = [("warning", "\n".join(str(w.message) for w in warned))] if wanted == "warning" else []
    for said in ranks[:1] if "told" in row else ranks:
        assert said is not None, "a rank is told nothing"
        name, text = said
        assert name == wanted, text
        for piece in row["asked"] + row["limit"] + row["do"]:
            assert piece in text, f"'{piece}' is not in: {text}"
        assert row["quoted"].search(f"{name}: {text}"), text

"""Arguments that once were taken in silence for something else, or were passed over: each is refused, and says what is meant."""

import array
import copy
import re
import types

import pytest
import torch
from torch import nn

import tessera as ts


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def field(mesh):
    return ts.distribute_tensor(torch.ones(4, 8), mesh, ts.Shard(0))


def used_up():
    parameters = net().parameters()
    list(parameters)
    return parameters


def session(optimizers, stepped=0):
    """Of an optimizer given so often, stepped together so often."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ts.Session(model, [optimizer] * optimizers, signals=False) as made:
        made.backward(model(torch.ones(1, 8)).sum(), 1)
        made.step(*[optimizer] * stepped)


WHOLE = {
    "the size of an axis": lambda mesh: ts.Mesh({"data": 1.7}),
    "a rank of a mesh": lambda mesh: ts.Mesh({"data": 1}, ranks=[0.5]),
    "a coordinate": lambda mesh: mesh.rank_at([0.5]),
    "an axis of a view": lambda mesh: mesh.view({"a": 1.5}),
    "rows of a shard": lambda mesh: ts.distribute_tensor(torch.ones(4), mesh, ts.Shard(0), {0: [4.5]}),
    "a shape": lambda mesh: ts.zeros([2.5], mesh, ts.Shard(0)),
    "a width of a halo": lambda mesh: ts.halo_exchange(field(mesh), {0: (1.5, 1)}),
    "a dim with a halo": lambda mesh: ts.halo_exchange(field(mesh), {0.5: 1}),
    "a rank of a group": lambda mesh: ts.group([0.3]),
    "a rank as a text": lambda mesh: ts.group(["0"]),
    "rows of a batch": lambda mesh: ts.FixedOrder(6, {0: 2.5}),
    "choices of a token": lambda mesh: ts.Routing(torch.softmax(torch.ones(4, 3), -1), chosen=1.5),
    "ranks that share a loss": lambda mesh: ts.Session(net(), sharing=1.5, signals=False),
    "checkpoints to keep": lambda mesh: ts.Checkpointer("nowhere", keep_last=2.7),
    "a stage's rank": lambda mesh: ts.Schedule.gpipe([0.5, 1], 2),
    "steps of a bar": lambda mesh: ts.Progress(10, start=1.5, show=False),
}
REFUSED = {
    "a factor without its operation": (lambda mesh: ts.world().all_reduce(torch.ones(2), factor=3), "factor=3 with 'sum', which takes none"),
    "the same that autograd sees": (lambda mesh: ts.functional.all_reduce(ts.world(), torch.ones(2), "avg", factor=3), "factor=3 with 'avg'"),
    "the same of gradients": (lambda mesh: ts.DistributedDataParallel(net(), factor=3), "factor=3 with 'avg'"),
    "a number as a message": (lambda mesh: ts.world().all_gather_bytes(3), "a message is bytes, and not 3"),
    "no message of the root": (lambda mesh: ts.world().broadcast_bytes(None, 0), "a message is bytes, and not None"),
    "a width of four": (lambda mesh: ts.halo_exchange(field(mesh), {0: (1, 1, "circular", 3)}), r"\(before, after, edge\), and not \(1, 1"),
    "a width of one in a list": (lambda mesh: ts.halo_exchange(field(mesh), {0: [1]}), r"and not \[1\]"),
    "a rule that gives no placement": (lambda mesh: ts.distribute_module(net(), mesh, lambda name, p: []), "placement"),
    "files of less than nothing": (lambda mesh: ts.save(net(), mesh, "nowhere", max_bytes=-5), "files of at most -5 bytes"),
    "a device without an offload": (lambda mesh: ts.fully_shard(net(), mesh, offload=ts.OffloadOptions(device="cpu")), "without to_host=True"),
    "collate of what is a dataset": (lambda mesh: ts.Dataset.of(ts.TensorDataset(torch.ones(3)), collate=list), "is a Dataset already"),
    "an optimizer twice": (lambda mesh: session(2), "has already"),
    "a step of an optimizer twice": (lambda mesh: session(1, stepped=2), "would step twice"),
    "a session of modules by number": (lambda mesh: ts.Session({0: net()}, signals=False), "a dictionary of modules by name"),
    "a loss that is a number": (lambda mesh: ts.Session(net(), signals=False).micro_batch(lambda: 3.0, 1), "returned a float, and not the loss"),
    "a copy of a wrapper": (lambda mesh: copy.deepcopy(ts.DistributedDataParallel(net())), "the module inside, ddp.module"),
    "a dataset of a sharded tensor": (lambda mesh: ts.TensorDataset(field(mesh)), "and each rank reads rows of its own"),
    "sharded samples": (lambda mesh: ts.Loader(ts.Dataset.of([field(mesh)]), ts.FixedOrder(1, 1), mesh, ["data"]).next(), "and each rank reads rows of its own"),
    "parameters that were read": (lambda mesh: ts.clip_gradients(used_up(), 1.0), "a generator that is at its end"),
    "the same of a step's weight": (lambda mesh: ts.StepWeight().finish(used_up()), "a generator that is at its end"),
    "a stage that there is not": (lambda mesh: ts.Pipeline([net()], ts.Schedule("gpipe", 1, 2), ts.Mesh({"pipe": 1}), "pipe", nn.functional.mse_loss, recompute=[1]), r"recompute names \[1\], and the schedule has stages 0 to 0"),
}


@pytest.mark.parametrize("what", WHOLE)
def test_numbers_are_whole(what):
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        ts.run_threads(1, lambda rank: WHOLE[what](ts.Mesh({"data": 1})))


@pytest.mark.parametrize("what", REFUSED)
def test_what_was_passed_over_is_refused(what):
    call, says = REFUSED[what]
    with pytest.raises(ts.InvalidArgument, match=says):
        ts.run_threads(1, lambda rank: call(ts.Mesh({"data": 1})))


def test_what_is_no_message_of_one_rank_is_refused_on_all():
    def body(rank):
        for call in (lambda: ts.world().all_gather_bytes(3 if rank == 1 else b"a"), lambda: ts.world().broadcast_bytes("text" if rank == 0 else None, 0)):
            with pytest.raises(ts.InvalidArgument, match="a message is bytes, and not"):
                call()
        return ts.world().all_gather_bytes(array.array("B", [1, rank]) if rank else memoryview(b"xyz")[::2])

    assert ts.run_threads(2, body) == [[b"xz", b"\x01\x01"]] * 2


def test_what_is_not_a_placement_is_no_rule():
    for rule in (lambda name, p: False, {}):
        with pytest.raises(TypeError):
            ts.run_threads(1, lambda rank: ts.distribute_module(net(), ts.Mesh({"data": 1}), rule))


def test_limits_are_not_negative():
    for call in (lambda: ts.ParallelGroups(timeouts={"mp": -1}), lambda: ts.ProcessGroupConfig().add_node("a", "world", 1, timeout=-1)):
        with pytest.raises(ValueError, match="timeout=-1"):
            ts.run_threads(1, lambda rank: call())


def test_what_is_meant_still_works():
    """Whole numbers of any kind, empty lists of parameters, and factors where they belong."""

    def body(rank):
        one = torch.tensor(1)
        mesh = ts.Mesh({"data": torch.tensor(2)})
        assert ts.to_local(ts.full([2], 2**60 + 1, mesh, ts.Shard(0), dtype=torch.int64)).item() == 2**60 + 1
        t = ts.distribute_tensor(torch.ones(3, 2), mesh, ts.Shard(0), {0: (one, 2)})
        assert ts.halo_exchange(t, {0: one}).shape[0] == ts.to_local(t).shape[0] + 2
        assert ts.clip_gradients([], 1.0) == ts.clip_gradients(nn.Tanh().parameters(), 1.0) == 0 and ts.world().broadcast_bytes(b"" if rank == 0 else None, 0) == b""
        return ts.world().all_reduce(torch.ones(1), "premultiplied", factor=3).item()

    assert ts.run_threads(2, body) == [6, 6]


TAKES_A_MESH = {
    "distribute_tensor": lambda mesh: ts.distribute_tensor(torch.ones(4, 3), mesh, ts.Shard(0)),
    "from_local": lambda mesh: ts.from_local(torch.ones(4, 3), mesh, ts.Shard(0)),
    "scatter": lambda mesh: ts.scatter(torch.ones(4, 3), mesh, ts.Shard(0)),
    "zeros": lambda mesh: ts.zeros((4, 3), mesh, ts.Shard(0)),
    "distribute_module": lambda mesh: ts.distribute_module(net(), mesh),
    "fully_shard": lambda mesh: ts.fully_shard(net(), mesh),
    "tensor_parallel": lambda mesh: ts.tensor_parallel(net(), mesh, {"0": ts.column()}),
    "ShardedOptimizer": lambda mesh: ts.ShardedOptimizer(torch.optim.SGD, net().parameters(), mesh, lr=0.1),
    "Loader": lambda mesh: ts.Loader(ts.TensorDataset({"x": torch.ones(4, 3)}), ts.FixedOrder(4, 2), mesh, ["data"]),
    "shard_batch": lambda mesh: ts.shard_batch([torch.ones(4, 3)], mesh, ["data"]),
    "check": lambda mesh: ts.check(net(), torch.ones(4, 8), mesh),
    "stage_mesh": lambda mesh: ts.stage_mesh(mesh, "data"),
    "add_mesh": lambda mesh: ts.add_mesh("fields", mesh),
    "save": lambda mesh: ts.save({"a": torch.ones(2)}, mesh, "nowhere"),
    "load": lambda mesh: ts.load("nowhere", mesh, {"a": ts.Shard(0)}),
}


@pytest.mark.parametrize("name", TAKES_A_MESH)
def test_what_is_no_mesh(name):
    def body(rank):
        mesh = ts.Mesh({"data": 1})
        torchs = types.SimpleNamespace(mesh_dim_names=("data",))  # as torch's DeviceMesh has
        for given, instead in [(mesh.group("data"), "the ts.Mesh that it belongs to"), (torchs, "from_device_mesh"), (None, "ts.Mesh({'data': -1})"), ("data", "ts.Mesh({'data': -1})")]:
            with pytest.raises(ts.InvalidArgument, match="is no mesh: give .*" + re.escape(instead)):
                TAKES_A_MESH[name](given)

    ts.run_threads(1, body)


def test_what_is_no_group():
    def body(rank):
        mesh = ts.Mesh({"data": 1})
        for call in (
            lambda group: ts.DistributedDataParallel(net(), group),
            lambda group: ts.mean_loss(torch.ones(()), 1, group),
            lambda group: ts.clip_gradients([], 1.0, group=group),
            lambda group: ts.functional.all_reduce(group, torch.ones(2)),
        ):
            for given, instead in [(mesh, "mesh.group('data')"), ("data", "ts.world()"), ([0], "ts.group(ranks)")]:
                with pytest.raises(ts.InvalidArgument, match="is no group: give .*" + re.escape(instead)):
                    call(given)
        with pytest.raises(ts.InvalidArgument, match="None is no group"):
            ts.functional.all_reduce(None, torch.ones(2))

    ts.run_threads(1, body)

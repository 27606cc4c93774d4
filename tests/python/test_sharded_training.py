"""fully_shard and tensor_parallel of plain torch.nn models: what one process would give."""

import copy
import math
import random

import pytest
import torch
from torch import nn

import tessera as ts
from gpt import GPT
from support import assert_same, on_ranks, whole
from training_cases import OPTIMIZERS, STEPS, alone, assert_trains_as, build, clip_plainly, sharded_over, train, trained


def ranks_of(axes):
    return math.prod(axes.values())


MESHES = {
    "one": ({"data": 1}, (), [5]),
    "three": ({"data": 3}, (), [3, 0, 2]),
    "four": ({"data": 4}, (), [1, 2, 0, 2]),
    "hybrid": ({"replica": 2, "shard": 2}, "shard", [2, 0, 2, 1]),
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    "model, optimizer",
    [("gpt", "sgd"), ("gpt", "adam"), ("gpt", "adamw"), ("tied", "adamw"), ("frozen", "adam"), ("recomputed", "sgd"), ("reentrant", "sgd"), ("convolutions", "adamw")],
)
def test_fully_sharded_training_is_that_of_one_process(model, optimizer, mesh):
    axes, over, sizes = MESHES[mesh]
    nets, expected = [build(model) for _ in sizes], alone(model, optimizer)

    def body(rank):
        mesh, net = ts.Mesh(axes), nets[rank]
        before = dict(net.named_parameters())
        assert ts.fully_shard(net, mesh, over) is net
        # The same objects under the same names, of which each rank has some rows.
        assert all(p is before[name] and isinstance(p, nn.Parameter) for name, p in net.named_parameters())
        if len(sizes) > 1:
            held = sum(ts.to_local(p.detach()).numel() for p in net.parameters())
            assert held < 0.7 * sum(p.numel() for p in net.parameters())
        assert_trains_as(expected, optimizer, net, sharded_over(mesh, axes, sizes))

    on_ranks(len(sizes), body)


OPTIONS = {
    "units": {"units": ["blocks.*", "head"]},
    "no units": {"units": "norm", "coalesce_bytes": 0},
    "gathered once": {"reshard_after_forward": False},
    "gathered near": {"reshard_axes": "local", "coalesce_bytes": 0},
    "not ahead": {"prefetch": 0},
    "far ahead": {"prefetch": 3, "coalesce_bytes": 0},
    "small buckets": {"first_bucket_bytes": 64, "bucket_bytes": 64, "learn_order": False},
    "reduced at the end": {"overlap": False, "coalesce_bytes": 900},
    "ignored": {"ignore": ["position.*", "*.up.bias"]},
    "stays": {"stay": ["embedding.weight", "position.weight"]},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_options_change_no_number(options):
    nets, sizes, expected = [build("gpt") for _ in range(4)], [1, 2, 0, 2], alone("gpt", "adam")

    def body(rank):
        mesh = ts.Mesh({"host": 2, "local": 2})
        ts.fully_shard(nets[rank], mesh, **OPTIONS[options])
        assert ts.is_sharded(nets[rank].position.weight) != (options == "ignored")
        assert_trains_as(expected, "adam", nets[rank], sharded_over(mesh, mesh.axes, sizes))

    on_ranks(4, body)


def test_drawn_models_meshes_and_options():
    draw = random.Random(7)
    for _ in range(12):
        ranks, blocks = draw.randint(1, 4), draw.randint(1, 4)
        net = GPT(tied=draw.random() < 0.5, checkpointed=draw.choice([None, None, False, True]), blocks=blocks, width=draw.randint(2, 7), hidden=draw.randint(1, 9)).double()
        for p in draw.sample(list(net.parameters()), 2):
            p.requires_grad_(p.dim() == 2)
        nets, optimizer = [copy.deepcopy(net) for _ in range(ranks)], draw.choice(list(OPTIMIZERS))
        expected, cuts = trained(net, optimizer), sorted(draw.choices(range(6), k=ranks - 1))
        sizes = [end - begin for begin, end in zip([0, *cuts], [*cuts, 5])]
        options = {"prefetch": draw.randint(0, 3), "coalesce_bytes": draw.choice([0, 600, 3000, 65536]), "reshard_after_forward": draw.random() < 0.6}
        options["units"] = draw.choice([(), "blocks.*", ["blocks.0", "norm", "*.attention"], "blocks"])

        def body(rank):
            mesh = ts.Mesh({"data": ranks})
            ts.fully_shard(nets[rank], mesh, **options)
            assert_trains_as(expected, optimizer, nets[rank], sharded_over(mesh, ["data"], sizes))

        on_ranks(ranks, body)


def moved(trace):
    """Calls of each operation."""
    calls = {}
    for operation, _, _ in trace.events:
        calls[operation] = calls.get(operation, 0) + 1
    return calls


def test_units_are_gathered_and_reduced_as_the_options_say():
    blocks = 3
    nets = [build("gpt") for _ in range(2)]

    def calls(rank, mesh, **options):
        net, place = copy.deepcopy(nets[rank]), sharded_over(mesh, ["data"], [3, 2])
        ts.fully_shard(net, mesh, units="blocks.*", **options)
        for _ in range(3):  # the order is learnt in the first
            with ts.CommTrace() as trace:
                net.loss(*(place(t) for t in net.batch(0))).backward()
        return moved(trace)

    def body(rank):
        mesh = ts.Mesh({"data": 2})
        each = calls(rank, mesh, coalesce_bytes=0)
        # Forward: what is in no block, the blocks, and the former again; backward goes on with it.
        assert each["all_gather"] == 2 + blocks + blocks and each["reduce_scatter"] == blocks + 1, each
        assert calls(rank, mesh, coalesce_bytes=0, reshard_after_forward=False)["all_gather"] == blocks + 1
        together = calls(rank, mesh)
        assert together["all_gather"] < each["all_gather"] and together["reduce_scatter"] < each["reduce_scatter"], together

    on_ranks(2, body)


def test_units_are_held_and_released_by_hand():
    nets, plain = [build("gpt") for _ in range(2)], build("gpt")
    with torch.no_grad():
        expected = plain(plain.batch(0)[0])

    def body(rank):
        mesh, net = ts.Mesh({"data": 2}), nets[rank]
        ts.fully_shard(net, mesh)
        tokens = sharded_over(mesh, ["data"], [4, 1])(net.batch(0)[0])
        ts.gather_parameters(net)
        with torch.no_grad():
            net(tokens)  # waits for it
            for held in (True, True, False):
                if not held:
                    ts.release_parameters(net.blocks[1])
                with ts.CommTrace() as trace:
                    out = net(tokens)
                assert moved(trace).get("all_gather", 0) == (0 if held else 1), trace.table()
                assert_same(out, expected)

    on_ranks(2, body)


def test_a_precision_is_that_of_operators_and_messages():
    nets = [build("gpt") for _ in range(2)]

    def gathered(rank, mesh, **options):
        net, place = copy.deepcopy(nets[rank]), sharded_over(mesh, ["data"], [3, 2])
        ts.fully_shard(net, mesh, units="blocks.*", coalesce_bytes=0, **options)
        for _ in range(2):
            net.zero_grad()
            with ts.CommTrace() as trace:
                out = net(place(net.batch(0)[0]))
                out.float().square().mean().backward()
        assert all(p.dtype == p.grad.dtype == torch.float64 for p in net.parameters())
        return out, sum(b for operation, _, b in trace.events if operation == "all_gather")

    def body(rank):
        mesh, low = ts.Mesh({"data": 2}), ts.UnitPrecision(torch.float32)
        expected, all_bytes = gathered(rank, mesh)
        out, bytes = gathered(rank, mesh, precision=low)
        assert out.dtype == torch.float32 and 2 * bytes == all_bytes
        assert torch.allclose(whole(out).double(), whole(expected), rtol=0, atol=1e-5)
        # The unit of what is in no block has one of its own.
        out, some = gathered(rank, mesh, precision=low, unit_precision={"": ts.UnitPrecision(torch.float32, torch.float32, torch.float64)})
        assert out.dtype == torch.float64 and some == bytes
        out, some = gathered(rank, mesh, unit_precision={"blocks.*": low})
        assert out.dtype == torch.float64 and bytes < some < all_bytes

    on_ranks(2, body)


def test_hooks_compiled_blocks_and_copies():
    nets, plain = [build("gpt") for _ in range(2)], build("gpt")
    plain.loss(*plain.batch(0)).backward()

    def body(rank):
        mesh, net, seen = ts.Mesh({"data": 2}), nets[rank], []
        net.blocks[0].compile(backend="eager")
        net.blocks[2].down.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
        ts.fully_shard(net, mesh)
        net.blocks[2].down.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.dtype))
        with pytest.raises(ts.GradientError, match="register it before"):  # it would be in the place of what reduces the gradient
            net.head.weight.register_post_accumulate_grad_hook(lambda p: None)
        net.blocks[1].register_forward_pre_hook(lambda module, args: seen.append("before"))
        net.blocks[1].register_forward_hook(lambda module, args, out: seen.append("after"))
        net.blocks[1].register_full_backward_hook(lambda module, got, given: seen.append("backward"))
        place = sharded_over(mesh, ["data"], [3, 2])
        for one in (net, copy.deepcopy(net)):
            one.loss(*(place(t) for t in net.batch(0))).backward()
            for (name, mine), p in zip(one.named_parameters(), plain.parameters()):
                assert ts.spec(mine.grad).placements == ts.spec(mine).placements, name
                assert_same(mine.grad, p.grad, name)
        assert seen[:5] == ["before", "after", net.blocks[2].down.weight.shape, torch.float64, "backward"]

    on_ranks(2, body)


def test_states_go_between_meshes_and_one_process(tmp_path):
    path, first, later = tmp_path / "net.safetensors", build("tied"), build("tied")
    ours, theirs = OPTIMIZERS["adamw"](first.parameters()), OPTIMIZERS["adamw"](later.parameters())
    train(first, ours, lambda t: t, clip_plainly)
    later.load_state_dict(first.state_dict())
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    expected = train(later, theirs, lambda t: t, clip_plainly, first=STEPS)
    nets, others = [build("tied") for _ in range(3)], [build("tied") for _ in range(3)]

    def body(rank):
        mesh, net, other = ts.Mesh({"data": 3}), nets[rank], others[rank]
        place = sharded_over(mesh, ["data"], [3, 0, 2])
        ts.fully_shard(net, mesh)
        optimizer = OPTIMIZERS["adamw"](net.parameters())
        train(net, optimizer, place, ts.clip_gradients)
        ts.save(net, mesh, path)
        # As sharded tensors into a module whose units have been gathered.
        ts.fully_shard(other, mesh, reshard_after_forward=False)
        other.loss(*(place(t) for t in net.batch(0)))
        other.load_state_dict(net.state_dict())
        again = OPTIMIZERS["adamw"](other.parameters())
        again.load_state_dict(optimizer.state_dict())
        assert train(other, again, place, ts.clip_gradients, first=STEPS) == pytest.approx(expected, rel=1e-10)
        # Whole ones, which a plain module takes too.
        net.load_state_dict({name: whole(t) for name, t in other.state_dict().items()})
        return {name: whole(t) for name, t in net.state_dict().items()}

    for state in on_ranks(3, body):
        build("tied").load_state_dict(state)
        for name, t in later.state_dict().items():
            assert_same(state[name], t, name)

    def load(rank):
        mesh, net = ts.Mesh({"x": 2}), nets[rank]
        ts.fully_shard(net, mesh)
        ts.load_into(net, mesh, path)
        for name, t in first.state_dict().items():
            assert_same(net.state_dict()[name], t, name)

    nets = [build("tied") for _ in range(2)]
    on_ranks(2, load)


# ---- tensor parallelism ----

LAYERS = {
    "*.qkv": ts.column(GPT.HEADS),
    "*.out": ts.row(GPT.HEADS),
    "*.up": ts.column(),
    "*.down": ts.row(),
    "embedding": ts.vocabulary(),
    "head": ts.vocabulary(),
}

TENSOR_MESHES = {
    "two": ({"tensor": 2}, [5]),
    "one has no head": ({"tensor": 4}, [5]),
    "with data": ({"data": 2, "tensor": 2}, [4, 1]),
    "with sharded data": ({"data": 2, "tensor": 2}, [4, 1]),
}


@pytest.mark.parametrize("sequence_dim", [None, 1])
@pytest.mark.parametrize("mesh", TENSOR_MESHES)
@pytest.mark.parametrize("model, optimizer", [("gpt", "sgd"), ("gpt", "adamw"), ("tied", "adam")])
def test_tensor_parallel_training_is_that_of_one_process(model, optimizer, mesh, sequence_dim):
    axes, sizes = TENSOR_MESHES[mesh]
    nets, expected = [build(model) for _ in range(ranks_of(axes))], alone(model, optimizer)

    def body(rank):
        net, on = nets[rank], ts.Mesh(axes)
        ts.set_policies("error", "allow")  # nothing but what the plan says is moved
        plan = ts.tensor_parallel(net, on, LAYERS, sequence_dim=sequence_dim)
        if mesh == "with sharded data":
            ts.fully_shard(net, on, "data")
            assert ts.spec(net.blocks[0].up.weight).placements.count(ts.Replicate()) == 0
        qkv = next(p for p in plan.parameters if p.name == "blocks.0.attention.qkv.weight")
        assert qkv.how == "column of 3 units" and sum(qkv.elements) == math.prod(qkv.shape)
        assert_trains_as(expected, optimizer, net, sharded_over(on, ["data"], sizes))

    on_ranks(ranks_of(axes), body)


def test_plans_are_looked_at_and_are_rules():
    nets, plain = [build("gpt") for _ in range(2)], build("gpt")

    def body(rank):
        mesh, net = ts.Mesh({"tensor": 2}), nets[rank]
        plan = ts.TensorParallelPlan(net, mesh, {**LAYERS, "position.weight": ts.sharded(1, 2)}, sequence_dim=1)
        assert not ts.is_sharded(net.position.weight)
        text = str(plan)
        assert "position.weight [5, 6]: sharded along dim 1 of 2 units, Shard(1) [3, 3]" in text and "column of 3 units, Shard(0) [12, 6]" in text
        by_name = {p.name: p.placement for p in plan.parameters}
        assert list(by_name) == [name for name, _ in plain.named_parameters()]
        assert by_name["head.weight"].sequence == (0, 1) and by_name["norm.bias"].sequence is None
        ts.set_policies("allow", "allow")
        report = ts.check(net, net.batch(0)[0], mesh, [ts.Replicate()], rule=plan.rule())
        assert report, str(report)

    on_ranks(2, body)


def test_rows_that_stay_are_not_gathered():
    rows, width = 400, 8
    plain, indices = nn.Embedding(rows, width).double(), torch.randint(rows, (6, 3), generator=torch.Generator().manual_seed(1))
    plain(indices).square().sum().backward()
    state = copy.deepcopy(plain.state_dict())

    def body(rank):
        mesh, net = ts.Mesh({"data": 3}), nn.Embedding(rows, width).double()
        net.load_state_dict(state)
        ts.distribute_module(net, mesh, lambda name, t: ts.stay([ts.Shard(0)]))
        with ts.CommTrace() as trace:
            net(ts.distribute_tensor(indices, mesh, [ts.Shard(0)], {0: [4, 0, 2]})).square().sum().backward()
        assert sum(b for _, _, b in trace.events) < rows * width, trace.table()
        assert ts.spec(net.weight.grad).placements == (ts.Shard(0),)
        assert_same(net.weight.grad, plain.weight.grad)
        with pytest.raises(ts.InvalidArgument, match="shard its rows"):
            ts.distribute_module(nn.Embedding(4, 4), mesh, lambda name, t: ts.stay([ts.Shard(1)]))

    on_ranks(3, body)


# ---- what is refused ----

REFUSED = {
    "an axis": (lambda net, mesh: ts.fully_shard(net, mesh, "domain"), ts.InvalidArgument, "no axis 'domain'"),
    "a unit": (lambda net, mesh: ts.fully_shard(net, mesh, units="layers.*"), ts.InvalidArgument, "no module has a name like"),
    "an ignored name": (lambda net, mesh: ts.fully_shard(net, mesh, ignore="bias"), ts.InvalidArgument, "which is to be ignored"),
    "a staying name": (lambda net, mesh: ts.fully_shard(net, mesh, stay="table"), ts.InvalidArgument, "which is to stay"),
    "a prefetch": (lambda net, mesh: ts.fully_shard(net, mesh, prefetch=-1), ts.InvalidArgument, "prefetch is -1"),
    "bytes": (lambda net, mesh: ts.fully_shard(net, mesh, coalesce_bytes=-1), ts.InvalidArgument, "coalesce_bytes is -1"),
    "two ways to reshard": (
        lambda net, mesh: ts.fully_shard(net, mesh, reshard_axes="data", reshard_after_forward=False),
        ts.InvalidArgument,
        "give one of the two",
    ),
    "a dtype": (lambda net, mesh: ts.fully_shard(net, mesh, precision=ts.UnitPrecision(torch.int32)), ts.InvalidArgument, "float16, bfloat16"),
    "an output": (lambda net, mesh: ts.fully_shard(net, mesh, precision=ts.UnitPrecision(output=torch.float32)), ts.InvalidArgument, "none to compute in"),
    "a precision of no unit": (
        lambda net, mesh: ts.fully_shard(net, mesh, unit_precision={"tail": ts.UnitPrecision(torch.float32)}),
        ts.InvalidArgument,
        "which unit_precision names",
    ),
    "an offload from the CPU": (lambda net, mesh: ts.fully_shard(net, mesh, offload=ts.OffloadOptions(True)), ts.InvalidArgument, "the device is the CPU"),
    "an offload from no device": (lambda net, mesh: ts.fully_shard(net, mesh, offload=ts.OffloadOptions(True, "xla:0")), ts.NotAvailable, "has none"),
    "one rank's options": (lambda net, mesh: ts.fully_shard(net, mesh, prefetch=1 + ts.rank()), ts.MismatchError, "the module to shard fully"),
    "what is not sharded": (lambda net, mesh: ts.gather_parameters(net), ts.InvalidArgument, "has been sharded by fully_shard"),
    "no shape yet": (lambda net, mesh: ts.fully_shard(nn.Sequential(nn.LazyLinear(3)), mesh), ts.InvalidArgument, "'0.weight' has no shape yet"),
    "an axis of the plan": (lambda net, mesh: ts.tensor_parallel(net, mesh, {"head": ts.column()}), ts.InvalidArgument, "tensor"),
    "a layer": (lambda net, mesh: ts.tensor_parallel(net, mesh, {"tail": ts.row()}, axis="data"), ts.InvalidArgument, "a name like"),
    "units that do not divide": (lambda net, mesh: ts.tensor_parallel(net, mesh, {"*.up": ts.column(4)}, axis="data"), ts.InvalidArgument, "do not divide into 4"),
    "a layer of another kind": (lambda net, mesh: ts.tensor_parallel(net, mesh, {"norm": ts.column()}, axis="data"), ts.InvalidArgument, "it knows layers of"),
    "a layer's dim": (lambda net, mesh: ts.tensor_parallel(net, mesh, {"head.weight": ts.sharded(2)}, axis="data"), ts.InvalidArgument, "has no dim 2"),
    "a kind": (lambda net, mesh: ts.tensor_parallel(net, mesh, {"head": ts.LayerSharding("diagonal")}, axis="data"), ts.InvalidArgument, "no kind of layer"),
    "one rank's plan": (
        lambda net, mesh: ts.tensor_parallel(net, mesh, {"head": ts.column() if ts.rank() else ts.row()}, axis="data"),
        ts.MismatchError,
        "the tensor-parallel plan",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals_come_on_every_rank_and_change_nothing(what):
    call, error, words = REFUSED[what]
    nets, plain = [build("gpt") for _ in range(2)], build("gpt")
    expected = plain.loss(*plain.batch(0)).item()

    def body(rank):
        mesh, net = ts.Mesh({"data": 2}), nets[rank]
        with pytest.raises(error, match=words):
            call(net, mesh)
        assert not any(ts.is_sharded(t) for t in net.state_dict().values())
        ts.fully_shard(net, mesh)
        assert net.loss(*map(sharded_over(mesh, ["data"], [3, 2]), net.batch(0))).item() == pytest.approx(expected, rel=1e-12)

    on_ranks(2, body)


def test_too_late_and_twice():
    nets = [build("gpt") for _ in range(2)]

    def body(rank):
        mesh, net = ts.Mesh({"data": 2}), nets[rank]
        net.loss(*net.batch(0)).backward()
        with pytest.raises(ts.ShardingError, match="has a gradient or a graph"):
            ts.fully_shard(net, mesh)
        net.zero_grad(set_to_none=True)
        ts.fully_shard(net.blocks, mesh)
        ts.fully_shard(net, mesh)  # what is sharded already stays as it is
        with pytest.raises(ts.ShardingError, match="is a ShardTensor already"):
            ts.tensor_parallel(net, mesh, {"head": ts.vocabulary()}, axis="data")

    on_ranks(2, body)

"""Groups, rank tables, trees, mappings and data parallelism from Python, under the names that C++ has."""

import copy
import gc
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from torch import nn

import tessera as ts
from support import assert_same, draw, on_ranks

ROWS = [3, 0, 2]
TREE = "{name: world, children: [{name: mp, size: 2, orthogonal_group: rest, scope: world}, {name: dp}]}"


def test_collectives_with_uneven_rows():
    parts = [draw(n, 2, seed=i) for i, n in enumerate(ROWS)]
    rows = torch.cat(parts)

    def body(rank):
        g, mine = ts.world(), parts[rank].clone()
        assert (g.rank, g.size, g.ranks, g.backend) == (rank, 3, [0, 1, 2], "threads")
        assert torch.equal(g.all_gather(mine, sizes=ROWS), rows)
        total = g.all_reduce(torch.full((2,), rank + 1.0))
        assert total.tolist() == [6, 6] and g.all_reduce(torch.tensor([rank]), "max").item() == 2
        assert g.all_reduce(torch.ones(1), "premultiplied", factor=rank).item() == 3
        assert torch.equal(g.reduce_scatter(rows.clone(), sizes=ROWS), parts[rank] * 3)
        assert torch.equal(g.broadcast(torch.full((2,), float(rank)), 1), torch.ones(2))
        on_root = g.gather(mine, 2, sizes=ROWS)
        assert torch.equal(on_root, rows) if rank == 2 else on_root is None
        out = torch.empty(ROWS[rank], 2, dtype=torch.float64)
        assert torch.equal(g.scatter(out, 0, rows if rank == 0 else None, sizes=ROWS), parts[rank])
        reduced = g.reduce(torch.ones(1), 1)
        assert reduced.item() == (3 if rank == 1 else 1)
        # rank r sends r + 1 rows to each
        arrived = g.all_to_all(torch.full((3 * (rank + 1), 1), float(rank)), output_sizes=[1, 2, 3], input_sizes=[rank + 1] * 3)
        assert arrived.flatten().tolist() == [0, 1, 1, 2, 2, 2]
        started = g.all_reduce(torch.ones(1), start=True)
        assert started.wait().item() == 3 and started.done()
        later = g.gather(mine, 0, sizes=ROWS, start=True).wait()
        assert torch.equal(later, rows) if rank == 0 else later is None
        if rank == 0:
            g.send(torch.ones(2), 2)
        elif rank == 2:
            assert g.receive(torch.empty(2), 0).tolist() == [1, 1]
        g.barrier(timeout=10)
        assert g.all_gather_bytes(bytes([rank, 0, 255])) == [bytes([r, 0, 255]) for r in range(3)]
        assert g.broadcast_bytes(b"from 1" if rank == 1 else b"", 1) == b"from 1"
        assert g.process_group().size() == 3 and g.process_group().rank() == rank
        g.timeout = 7
        assert g.timeout == 7
        if rank != 1:
            pair = ts.group([2, 0])
            assert pair.ranks == [2, 0] and pair.all_reduce(torch.ones(1)).item() == 2 and pair == ts.group([2, 0])
            assert ts.group([2, 0], timeout=5).timeout == 5
        with pytest.raises(RuntimeError, match="no reduce operation"):
            g.all_reduce(torch.ones(1), "median")

    on_ranks(3, body)


CALLS = {
    "even": lambda rank: ts.world().all_reduce(torch.ones(2), start=True),
    "uneven": lambda rank: ts.world().all_gather(torch.ones(1 + rank, 2), sizes=[1, 2], start=True),
    "redistribution": lambda rank: ts.start_redistribute(ts.ones([4, 4], ts.Mesh({"x": 2}), [ts.Shard(0)]), [ts.Shard(1)]),
}


@pytest.mark.parametrize("backend", ["threads", "shm"])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_is_dropped_waits_without_the_interpreter(call, backend):
    started = threading.Event()

    def body(rank):
        ts.world().barrier()  # makes the group
        if rank == 0:
            request = CALLS[call](rank)
            threading.Timer(0.2, started.set).start()
            del request  # waits for the other rank, which is a thread of this interpreter
        else:
            assert started.wait(100)
            CALLS[call](rank).wait()
        return ts.world().all_reduce(torch.ones(1)).item()

    assert ts.run_threads(2, body, backend, 100) == [2, 2]


class Cycle:
    """Goes when the collector finds it."""

    def __init__(self, *holds):
        self.me, self.holds = self, holds


@pytest.mark.parametrize("call", CALLS)
def test_a_rank_collects_what_another_one_has_started(call):
    started = threading.Event()

    def body(rank):
        ts.world().barrier()
        if rank == 0:
            Cycle(CALLS[call](rank))
            started.set()
        else:
            assert started.wait(100)
            gc.collect()  # to wait here would be to wait for the call below
            CALLS[call](rank).wait()
        return ts.world().all_reduce(torch.ones(1)).item()

    gc.disable()
    try:
        assert ts.run_threads(2, body, timeout=100) == [2, 2]
    finally:
        gc.enable()


@pytest.mark.parametrize("backend,ask", [("threads", lambda work: work.get_future().wait()), ("shm", lambda work: work.result())])
def test_pythons_own_groups_wait_without_the_interpreter(backend, ask):
    asked = threading.Event()

    def body(rank):
        group, t = ts.world().process_group(), torch.ones(2)
        ts.world().barrier()
        if rank == 0:
            work = group.allreduce([t])
            threading.Timer(0.2, asked.set).start()
            ask(work)
        else:
            assert asked.wait(100)
            group.allreduce([t]).wait()
        return t.tolist()

    assert ts.run_threads(2, body, backend, 100) == [[2, 2], [2, 2]]


def test_functional_collectives_are_differentiable():
    def body(rank):
        g, x = ts.world(), draw(ROWS[rank], 2, seed=rank).requires_grad_(True)
        weight = draw(5, 2, seed=9)
        (ts.functional.all_gather(g, x, ROWS) * weight).sum().backward()
        begin = sum(ROWS[:rank])
        assert_same(x.grad, 3 * weight[begin : begin + ROWS[rank]])  # three losses are summed
        y = torch.full((2,), rank + 1.0, dtype=torch.float64, requires_grad=True)
        ts.functional.all_reduce(g, y, cotangent="replicated").square().sum().backward()
        assert y.grad.tolist() == [12, 12]
        with pytest.raises(ValueError, match="cotangent"):
            ts.functional.all_reduce(g, y, cotangent="twice")

    on_ranks(3, body)


FIELD = draw(1, 6, 1, 2)
IN_BACKWARD = {
    "functional": lambda mesh: ts.functional.all_reduce(ts.world(), torch.ones(2, requires_grad=True)),
    "ghosts": lambda mesh: ts.ghost_exchange(ts.GhostPlan(mesh, [ts.rank()], [1 - ts.rank()]), torch.ones(1, requires_grad=True)),
    "neighborhoods": lambda mesh: ts.neighborhood_attention(*[ts.distribute_tensor(FIELD, mesh, ts.Shard(1)).requires_grad_()] * 3, [3]),
}


@pytest.mark.parametrize("call", IN_BACKWARD)
def test_errors_in_backward_have_their_class(call):
    def body(rank):
        loss = IN_BACKWARD[call](ts.Mesh({"x": 2})).sum()
        if rank == 0:
            with pytest.raises(ts.PeerLostError, match=r"rank (\[1\] ended|1 has ended)|ranks? \[1\]"):
                loss.backward()

    on_ranks(2, body)


def test_rank_tables_and_meshes_by_name():
    def body(rank):
        mesh = ts.Mesh({"data": 2, "model": 2}, ranks=[3, 0, 2, 1])
        assert mesh.ranks == [3, 0, 2, 1] and mesh.coordinate == {3: (0, 0), 0: (0, 1), 2: (1, 0), 1: (1, 1)}[rank]
        assert mesh.groups("model") == [[3, 0], [2, 1]] and mesh.groups("data") == [[3, 2], [0, 1]]
        assert mesh.group("model").ranks == ([3, 0] if rank in (3, 0) else [2, 1]) and mesh.group().size == 4
        assert mesh.rank_at((1, 0)) == 2 and mesh.slice("data", 0).ranks == [3, 0] and mesh.slice("data", 1).contains_me == (rank in (2, 1))
        assert mesh.submesh("data").axes == {"data": 2} and mesh.flatten(["data", "model"], "all").axes == {"all": 4}
        assert mesh.view({"a": 4}).group("a").ranks == [3, 0, 2, 1]
        ts.add_mesh("grid", mesh)
        assert ts.Mesh.of("grid") == mesh
        t = ts.from_local(torch.full((1,), float(rank)), ts.Mesh.of("grid"), [ts.Shard(0), ts.Shard(0)])
        assert ts.full_tensor(t).tolist() == [3, 0, 2, 1]
        with pytest.raises(RuntimeError, match="grid"):
            ts.Mesh.of("nothing")

    on_ranks(4, body)


def test_a_tree_gives_groups_and_meshes():
    tree = ts.parse_group_config(TREE)
    built = ts.ProcessGroupConfig().add_node("mp", "world", 2, orthogonal_group="rest", scope="world").add_node("dp", "world")
    assert tree == built and tree.leaf_groups() == ["mp", "dp"] and tree.size("dp") is None and tree.resolve(4).size("dp") == 2
    assert tree.mesh(4) == ({"dp": 2, "mp": 2}, [0, 1, 2, 3]) and ts.parse_group_config(ts.format_group_config(tree, "json"), "json") == tree
    with pytest.raises(RuntimeError, match="mp"):
        built.add_node("mp", "world")

    def body(rank):
        assert ts.create_process_groups(tree) is None
        assert {"mp", "dp", "rest"} <= set(ts.group_names()) and ts.group_size("mp") == 2 and ts.group_rank("dp") == rank // 2
        assert ts.group("mp").ranks == [rank // 2 * 2, rank // 2 * 2 + 1] and ts.group("dp").ranks == [rank % 2, rank % 2 + 2]
        assert ts.group("rest").ranks == ts.group("dp").ranks
        # Data parallelism on one leaf, a sharded tensor over the other: the same groups, made once.
        mesh = ts.Mesh.of("mp")
        assert mesh.group("mp") == ts.group("mp") and ts.Mesh.of("world").axes == {"dp": 2, "mp": 2}
        t = ts.distribute_tensor(draw(5, 2), mesh, [ts.Shard(0)])
        assert_same(t.exp().sum(), draw(5, 2).exp().sum())
        net = ts.DistributedDataParallel(nn.Linear(2, 1).double(), ts.group("dp"))
        net(draw(3, 2, seed=rank // 2)).sum().backward()
        assert_same(net.module.weight.grad, (draw(3, 2, seed=0).sum(0) + draw(3, 2, seed=1).sum(0))[None] / 2)
        with pytest.raises(RuntimeError, match="mp"):
            ts.group("tensor")

    on_ranks(4, body)


class Field(nn.Module):
    """Half of the ranks or fewer share a field; the others are replicas of the model."""

    @staticmethod
    def process_groups(tensor=1):
        tree = ts.ProcessGroupConfig("field", orthogonal_group="replicas").add_node("domain", "field")
        return tree.add_node("tensor", "field", tensor) if tensor > 1 else tree

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(1, 1, 3, padding=1).double()
        with torch.no_grad():  # ranks that are threads share torch's generator
            self.layer.weight.copy_(draw(1, 1, 3, 3))
            self.layer.bias.zero_()
        ts.distribute_module(self, ts.Mesh.of("domain"))

    def forward(self, x):
        return self.layer(ts.distribute_tensor(x, ts.Mesh.of("domain"), [ts.Shard(2)]))


def test_a_model_says_which_groups_it_needs():
    tree = ts.process_groups_of(Field, sizes={"domain": 2})
    assert tree.size("domain") == 2 and Field.process_groups().size("domain") is None
    assert ts.process_groups_of(Field, 4).leaf_groups() == ["domain", "tensor"]
    # As a root inside a larger world, and written out.
    written = ts.ProcessGroupConfig().add_node("field", "world").add_node("domain", "field", 2).add_node("replicas", "world")
    assert tree.mesh(6) == written.mesh(6) == ({"replicas": 3, "domain": 2}, [0, 1, 2, 3, 4, 5]) and tree.resolve(6) == written.resolve(6)
    unnamed = ts.ProcessGroupConfig("field").add_node("domain", "field", 2)
    assert unnamed.inside_world("replicas").resolve(6) == tree.inside_world().resolve(6)
    with pytest.raises(RuntimeError, match="(?s)orthogonal_group: data_parallel.*- domain 2"):
        unnamed.resolve(4)
    with pytest.raises(TypeError, match="Linear does not say"):
        ts.create_process_groups(nn.Linear(1, 1))
    with pytest.raises(TypeError, match="returned a dict"):
        ts.process_groups_of(type("Wrong", (), {"process_groups": staticmethod(dict)}))
    with pytest.raises(ValueError, match="orthogonal_group is not given"):
        ts.ProcessGroupConfig("field", scope="world")

    def body(rank):
        ts.create_process_groups(Field, sizes={"domain": 2})
        assert ts.group("replicas").ranks == [rank % 2, rank % 2 + 2] and ts.Mesh.of("field").axes == {"domain": 2}
        net = ts.DistributedDataParallel(Field(), ts.group("replicas"))
        y = net(draw(1, 1, 5, 3, seed=rank // 2))
        y.square().mean().backward()
        assert ts.spec(y).sizes == {2: [3, 2]}
        grad = ts.full_tensor(net.module.layer.weight.grad)
        assert torch.equal(ts.group("replicas").all_reduce(grad.clone(), "avg"), grad)

    on_ranks(4, body)


def test_a_placement_is_handed_to_the_mesh():
    hosts = ts.parse_hosts("2x2")
    traffic = [ts.Traffic("outer", "all_reduce", 1e9)]
    mapping = ts.optimise_mapping({"outer": 2, "inner": 2}, hosts, traffic)
    assert mapping.seconds < mapping.naive_seconds and mapping.exact and mapping.lower_bound <= mapping.seconds
    assert ts.given_mapping({"outer": 2, "inner": 2}, hosts, traffic, [0, 1, 2, 3]).seconds == mapping.naive_seconds
    assert "rank 0=" in ts.open_mpi_rank_file(hosts, mapping.slot_of) and len(ts.slurm_host_file(hosts, mapping.slot_of).split()) == 4
    assert ts.Topology.uniform(2, 2).hosts == hosts.hosts and hosts.slots == 4
    for wrong in ([0, 1, 2, 4], [0, 1, 1, 2]):
        with pytest.raises(ts.MappingError, match="slots 0 to 3"):
            ts.open_mpi_rank_file(hosts, wrong)
    tree = ts.ProcessGroupConfig().add_node("inner", "world", 2).add_node("outer", "world", 2)

    def conv():
        net = nn.Conv2d(1, 2, 3, padding=1).double()
        with torch.no_grad():  # ranks that are threads share torch's generator
            net.weight.copy_(draw(2, 1, 3, 3))
            net.bias.copy_(draw(2))
        return net

    def body(rank):
        chosen = ts.create_process_groups(tree, topology=hosts, traffic=traffic)
        assert chosen.seconds == mapping.seconds
        mesh = ts.mapped_mesh({"outer": 2, "inner": 2}, chosen)
        assert ts.Mesh.of("world").ranks == mesh.ranks and sorted(mesh.groups("outer")[0]) in ([0, 1], [2, 3])  # inside a host
        # A domain inside a host, and its replicas on other ones: as one process.
        domain, x, net, alone = mesh.submesh("outer"), draw(3, 1, 7, 4), conv(), conv()
        mine = x.split([2, 1])[mesh.coordinate[list(mesh.axes).index("inner")]]
        ddp = ts.DistributedDataParallel(ts.distribute_module(net, domain), ts.group("inner"))
        y = ddp(ts.distribute_tensor(mine, domain, [ts.Shard(2)], {2: [5, 2]}))
        assert_same(y, alone(mine).detach())
        ddp.mean_loss(y.square().mean(), len(mine)).backward()
        alone(x).square().mean().backward()
        for got, wanted in zip(net.parameters(), alone.parameters(), strict=True):
            assert_same(got.grad, wanted.grad)

    on_ranks(4, body)

    def by_hand(rank):
        assert ts.create_process_groups(tree, ranks=[0, 2, 1, 3]) is None
        return ts.Mesh.of("world").ranks

    assert on_ranks(4, by_hand) == [[0, 2, 1, 3]] * 4


def cores():
    """That this process may use: of threads of one core Open MPI makes one slot."""
    places = set()
    for cpu in os.sched_getaffinity(0):
        topology = pathlib.Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        places.add(tuple((topology / name).read_text() for name in ("physical_package_id", "core_id")) if topology.exists() else cpu)
    return len(places)


def test_mpirun_places_ranks_as_the_rank_file_says(tmp_path):
    mpirun = shutil.which("mpirun")
    if not mpirun or "Open MPI" not in subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout:
        pytest.skip("no Open MPI here")
    if cores() < 2:
        pytest.skip("one core here: there is no second slot")
    here = ts.parse_topology({"hosts": [{"name": socket.gethostname(), "devices": 2}]}, "json")
    (tmp_path / "ranks").write_text(ts.open_mpi_rank_file(here, [1, 0]))
    # A file each: mpirun may mix what ranks print.
    program = "import os, sys; open(sys.argv[1] + os.environ['OMPI_COMM_WORLD_RANK'], 'w').write(str(min(os.sched_getaffinity(0))))"
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [mpirun, "--rankfile", tmp_path / "ranks", "-n", "2", sys.executable, "-c", program, tmp_path / "core_"]
    done = subprocess.run(command, env={**os.environ, **root}, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    core = [int((tmp_path / f"core_{rank}").read_text()) for rank in range(2)]
    assert core[0] > core[1]  # rank 0 on slot 1


def test_parallel_groups():
    def body(rank):
        groups = ts.ParallelGroups(model=2, timeouts={"mp": 9})
        assert groups.mesh.axes == {"dp": 2, "pp": 1, "mp": 2} and groups.mesh.group("mp").ranks == groups.mp.ranks
        assert groups.mp.group.timeout == 9 and "model 2" in groups.summary() and groups.world.size == 4
        full = draw(7, 2)
        mine = groups.mp.split(full)
        assert len(mine) == [4, 3][rank % 2] and torch.equal(groups.mp.all_gather(mine), full)
        there = groups.mp.gather_to(1, mine)
        assert torch.equal(there, full) if groups.mp.rank == 1 else there is None
        assert groups.dp.all_reduce(torch.ones(1)).item() == 2 and groups.dp.all_reduce(torch.ones(1), start=True).wait().item() == 2
        with pytest.raises(RuntimeError, match="functional::all_reduce"):
            groups.dp.all_reduce(torch.ones(1, requires_grad=True) * 1)
        with pytest.raises(ValueError, match="no kind"):
            ts.ParallelGroups(backends={"tp": "gloo"})
        # Layers over the model ranks, samples over the data ranks: the same groups.
        plain = nn.Linear(3, 5).double()
        with torch.no_grad():
            plain.weight.copy_(draw(5, 3)), plain.bias.copy_(draw(5))
        model = groups.mesh.submesh("mp")
        cut = ts.distribute_module(copy.deepcopy(plain), model, lambda name, t: ([ts.Shard(0)], {0: [2, 3]}))
        net = ts.DistributedDataParallel(cut, groups.dp.group)
        samples = [draw(3 + i, 3, seed=i) for i in range(2)]
        y = net(ts.distribute_tensor(samples[groups.dp.rank], model, [ts.Replicate()]))
        assert ts.spec(y).sizes == {1: [2, 3]}
        y.square().mean().backward()
        sum(plain(x).square().mean() / 2 for x in samples).backward()
        assert_same(cut.weight.grad, plain.weight.grad)
        assert_same(cut.bias.grad, plain.bias.grad)

    on_ranks(4, body)


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)).double()


def test_data_parallel_with_uneven_batches():
    x, y, sizes = draw(7, 4), draw(7, 1, seed=4), [4, 0, 3]
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    nets = [copy.deepcopy(plain) for _ in range(3)]
    for net in nets[1:]:
        for p in net.parameters():
            p.data.add_(1)  # the construction broadcasts rank 0's
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(plain(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
        optimizer.step()

    def body(rank):
        begin = sum(sizes[:rank])
        mine, target = x[begin : begin + sizes[rank]], y[begin : begin + sizes[rank]]
        ddp = ts.DistributedDataParallel(nets[rank])
        assert sorted(i for bucket in ddp.buckets() for i in bucket) == [0, 1, 2, 3] and len(list(ddp.parameters())) == 4
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            if step == 1:  # two micro-batches and one weight
                weight = ts.StepWeight()
                with ddp.no_sync():
                    weight.weigh(nn.functional.mse_loss(ddp(mine[:1]), target[:1]), len(mine[:1])).backward()
                weight.weigh(nn.functional.mse_loss(ddp(mine[1:]), target[1:]), len(mine[1:])).backward()
                weight.finish(ddp.parameters())
            else:
                mean = ddp.mean_loss(nn.functional.mse_loss(ddp(mine), target), len(mine))
                mean.backward()
            last = ts.clip_gradients(ddp.parameters(), 1e9)
            optimizer.step()
        assert mean.item() == pytest.approx(loss.item(), rel=1e-10) and last == pytest.approx(norm.item(), rel=1e-10)
        for p, q in zip(ddp.parameters(), plain.parameters()):
            assert_same(p, q)
        assert ts.clip_gradients(ddp.parameters(), last / 2) == pytest.approx(last) and ts.clip_gradients(ddp.parameters()) == pytest.approx(last / 2)
        with pytest.raises(RuntimeError, match="no parameter or buffer named"):
            ts.DistributedDataParallel(nets[rank], ignore=["0.wieght"])
        nets[rank].load_state_dict({name: t.clone() for name, t in nets[rank].state_dict().items()}, assign=True)
        with pytest.raises(RuntimeError, match="is not the tensor that was wrapped"):
            ddp(mine)
        with torch.no_grad():
            ddp(mine)
        net = ts.DistributedDataParallel(nets[rank])
        for hooked in nets[rank].parameters():
            hooked.register_post_accumulate_grad_hook(lambda p: None)
        with pytest.raises(RuntimeError, match="a post-accumulate hook"):
            net(mine)

    on_ranks(3, body)


def test_python_may_pause_reductions_while_a_gradient_goes():
    paused = []

    def body(rank):
        net = nn.Linear(2, 1)
        ddp = ts.DistributedDataParallel(net, reduction="sum")

        def pause():
            with ts.no_sync(net):
                paused.append(rank)

        for _ in range(2):  # the second backward lets rank 1's gradient go, and Python hears of it
            ddp(torch.ones(1, 2)).sum().backward()
            weakref.finalize(net.weight.grad, pause)
        return net.weight.grad.tolist()

    assert on_ranks(2, body) == [[[4, 4]]] * 2
    assert 1 in paused


def test_buffers_follow_rank_0():
    nets = [network() for _ in range(2)]

    def body(rank):
        ddp = ts.DistributedDataParallel(nets[rank])
        for step in range(2):
            ddp(draw(4 + rank, 4, seed=rank + step)).sum().backward()
        before, x = ddp.module[1].running_mean.clone(), draw(4, 4, seed=7 + rank)
        ddp(x)
        return before, ddp.module[1].running_mean.clone(), ddp.module[0](x).mean(0).detach()

    (first, _, _), (other, after, mean) = on_ranks(2, body)
    assert not torch.equal(first, other)  # each rank adds its own batch to what rank 0 had
    assert_same(after, 0.9 * first + 0.1 * mean)
    assert on_ranks(1, lambda rank: ts.DistributedDataParallel(network()).eval()(draw(2, 4)).shape) == [(2, 1)]


def test_arguments_that_mean_nothing():
    def body(rank):
        world = ts.world()
        for timeout in (-1, float("nan")):
            with pytest.raises(ValueError, match="timeout"):
                world.barrier(timeout=timeout)
            with pytest.raises(ValueError, match="timeout"):
                ts.group([0, 1], timeout=timeout)
        with pytest.raises(ValueError, match="its configuration"):
            ts.group("data_parallel", timeout=5)
        number = torch.tensor(1.0)
        for call in (world.all_gather, world.reduce_scatter, world.all_to_all, lambda t: world.gather(t, rank)):
            with pytest.raises(ValueError, match="no dims"):
                call(number)
        world.barrier(timeout=float("inf"))

    on_ranks(2, body)

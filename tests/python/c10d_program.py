"""Run by torchrun: Python's own DDP, FSDP2 and DTensor over "tessera", beside the same over Gloo. `import tessera` is all there is to do.

Arguments: what the group goes over ("shm"), and "as-hosts" to take each torchrun for another host.
"""

import copy
import datetime
import functools
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import tessera  # noqa: F401

torch.set_num_threads(1)
way, as_hosts = (sys.argv[1:] or ["shm"])[0], "as-hosts" in sys.argv
BACKEND = "tessera"
if as_hosts:
    BACKEND = "tessera_on_hosts"
    meet = functools.partial(tessera._c10d._meet, host=f"host {os.environ['GROUP_RANK']}")
    dist.Backend.register_backend(BACKEND, meet, extended_api=True, devices=["cpu"])
dist.init_process_group(BACKEND)
rank, ranks = dist.get_rank(), dist.get_world_size()
groups = {"tessera": dist.group.WORLD, "gloo": dist.new_group(backend="gloo"), "again": dist.new_group(list(range(ranks)), backend=BACKEND)}
meshes = {name: DeviceMesh.from_group(group, "cpu", mesh_dim_names=("all",)) for name, group in groups.items()}


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 5))


def train(module, parameters, dtype=torch.float32):
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    torch.manual_seed(100 + rank)
    losses = []
    for _ in range(4):
        x, y = torch.randn(16, 20, dtype=dtype), torch.randn(16, 5, dtype=dtype)
        loss = nn.functional.mse_loss(module(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def ddp(name, compressed=False):
    net = network()
    # Callbacks that make calls need one bucket: of several they come between the calls of the backward pass where each rank's threads let them.
    model = DistributedDataParallel(net, process_group=groups[name], bucket_cap_mb=25 if compressed else 0.01)
    if compressed:  # callbacks of its futures wait for the futures of other calls
        model.register_comm_hook(PowerSGDState(groups[name], start_powerSGD_iter=2, min_compression_rate=0.5), powerSGD_hook)
    return train(model, model.parameters()) + [p.detach().clone() for p in net.parameters()] + [b.clone() for b in net.buffers()]


def power_sgd(name):
    return ddp(name, compressed=True)


def fsdp(name):
    net = network()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=meshes[name])
    fully_shard(net, mesh=meshes[name])
    return train(net, net.parameters()) + [p.detach().full_tensor() for p in net.parameters()]


def dtensor(name):
    torch.manual_seed(5)
    a, b = torch.randn(12, 10), torch.randn(10, 7)
    left = distribute_tensor(a, meshes[name], [Shard(1)]).requires_grad_()
    right = distribute_tensor(b, meshes[name], [Shard(0)]).requires_grad_()
    product = (left @ right).redistribute(placements=[Shard(1)])
    product.square().sum().backward()
    full = product.redistribute(placements=[Replicate()]).to_local().detach()
    return [full, left.grad.full_tensor(), right.grad.full_tensor()]


def collectives(name):
    group = groups[name]
    t = torch.arange(10.0) * (rank + 1)
    work = dist.all_reduce(t, group=group, async_op=True)
    future = work.get_future().then(lambda f: f.value()[0] + 1)
    objects = [None] * ranks
    dist.all_gather_object(objects, {"rank": rank, "text": "ä" * rank}, group=group)
    assert objects == [{"rank": r, "text": "ä" * r} for r in range(ranks)]
    value = future.wait()
    lists = [torch.zeros(3) for _ in range(ranks)]
    dist.all_gather(lists, torch.full((3,), float(rank)), group=group)
    mine = [torch.tensor(1.5 + rank), torch.full((2, 3), float(rank)), torch.empty(0), torch.ones(5)]
    coalesced = [[torch.empty_like(t) for t in mine] for _ in range(ranks)]
    dist.all_gather_coalesced(coalesced, mine, group=group)
    lists += [t for of_rank in coalesced for t in of_rank]
    peer = (rank + 1) % ranks
    got = torch.zeros(4)
    if ranks > 1:  # Gloo sends nothing to itself
        messages = [dist.P2POp(dist.isend, torch.full((4,), float(rank)), peer, group), dist.P2POp(dist.irecv, got, (rank - 1) % ranks, group)]
        for request in dist.batch_isend_irecv(messages):
            request.wait()
    dist.barrier(group=group)
    dist.monitored_barrier(group=group)
    return [value, *lists, got]


for case in (ddp, power_sgd, fsdp, dtensor, collectives):
    expected = case("gloo")
    for name in ("tessera", "again"):
        results = case(name)
        assert len(results) == len(expected)
        for i, (got, want) in enumerate(zip(results, expected)):
            # Of two ranks there is one order in which values can be added.
            same = torch.equal(got, want) if ranks <= 2 else torch.allclose(got, want, rtol=1e-5, atol=1e-6)
            assert same, f"{case.__name__} over {name}, value {i}: off by {(got - want).abs().max()}"
with torch.autograd.profiler.profile(record_shapes=True) as profile:
    dist.all_reduce(torch.ones(3, 5))
    for work in (dist.all_reduce(torch.ones(3, 5), async_op=True), dist.broadcast(torch.ones(7), 0, async_op=True)):
        work.get_future().then(lambda _: None).wait()  # follows the event's end
events = {event.name: event for event in profile.function_events if event.name.startswith("tessera:")}
assert set(events) == {"tessera:all_reduce", "tessera:broadcast"} and all(event.is_async for event in events.values()), events
assert events["tessera:all_reduce"].input_shapes == [[3, 5]] and events["tessera:broadcast"].input_shapes == [[7]], events
if ranks > 1 and way == "shm":  # the last rank does not come
    late = dist.new_group(backend=BACKEND)
    if rank < ranks - 1:
        try:
            dist.monitored_barrier(late, datetime.timedelta(seconds=1))
            raise AssertionError("a barrier passed that a rank did not come to")
        except RuntimeError as error:
            assert f"Rank {ranks - 1} failed to pass monitoredBarrier" in str(error), error
            assert rank == 0 or f"Rank {rank} successfully reached monitoredBarrier, but received errors" in str(error), error
    for every, names in ((False, "Rank 1"), (True, "Ranks " + ", ".join(map(str, range(1, ranks))))):  # rank 0 alone comes
        alone = dist.new_group(backend=BACKEND)
        if rank == 0 and ranks > 2:
            try:
                dist.monitored_barrier(alone, datetime.timedelta(seconds=1), wait_all_ranks=every)
                raise AssertionError("a barrier passed that no other rank came to")
            except RuntimeError as error:
                assert str(error).startswith(f"{names} failed to pass monitoredBarrier"), error
    dist.barrier()
assert dist.get_backend() == BACKEND
assert dist.group.WORLD._get_backend(torch.device("cpu")).name() == way
print(f"rank {rank} of {ranks}: equal", file=sys.stdout, flush=True)
dist.destroy_process_group()

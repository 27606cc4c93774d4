"""Run by torchrun: torch's DeviceMesh and DTensor, its DistributedDataParallel and fully_shard, with sharded tensors of Tessera's, beside one process.

Argument: a folder for checkpoints.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import tessera as ts
from support import assert_same

torch.set_num_threads(1)
ts.init(timeout=120)
dist.init_process_group("tessera")
rank, ranks = ts.rank(), ts.world_size()
torch.manual_seed(7)
X = torch.randn(7, 5, dtype=torch.float64)


def raises(kind, what, call, *arguments):
    try:
        call(*arguments)
    except kind as error:
        assert what in str(error), error
        return
    raise AssertionError(f"{call} raised nothing")


def meshes():
    names = init_device_mesh("cpu", (ranks,), mesh_dim_names=("rows",))
    mesh = ts.Mesh.from_device_mesh(names)
    assert mesh == ts.Mesh({"rows": ranks}) and mesh.ranks == list(range(ranks))
    assert mesh.to_device_mesh() == names and mesh.to_device_mesh() is ts.Mesh({"rows": ranks}).to_device_mesh()
    assert ts.Mesh.from_device_mesh(init_device_mesh("cpu", (1, ranks))).axes == {"dim0": 1, "dim1": ranks}
    back = ts.Mesh({"x": ranks}, ranks=list(reversed(range(ranks)))).to_device_mesh()
    assert back.mesh.tolist() == list(reversed(range(ranks))) and back.mesh_dim_names == ("x",)
    return names, mesh


def there_and_back(device_mesh, mesh):
    """Values, memory and gradients of every placement, both ways; rows that do not divide, and more ranks than rows."""
    for placement in (Replicate(), Shard(0), Shard(1), Shard(-1)):
        for whole in (X, X[:1], X[:0]):
            leaf = distribute_tensor(whole, device_mesh, [placement]).requires_grad_()
            with ts.CommTrace() as trace:
                t = ts.from_dtensor(leaf)
            assert trace.count == 0
            assert_same(t, whole, f"from {placement}")
            assert ts.to_local(t.detach()).data_ptr() == leaf._local_tensor.data_ptr()
            (t * t.cos()).sum().backward()
            expected = whole.clone().requires_grad_()
            (expected * expected.cos()).sum().backward()
            assert isinstance(leaf.grad, DTensor)
            assert_same(leaf.grad.full_tensor(), expected.grad, f"gradient of {placement}")
            # And back: the same placements, the same memory.
            again = ts.to_dtensor(t.detach(), device_mesh)
            assert again.placements == leaf.placements and again._local_tensor.data_ptr() == leaf._local_tensor.data_ptr()
            mine = ts.redistribute(ts.distribute_tensor(whole, mesh, ts.Replicate()), *as_torch_has_it(whole, placement, mesh)).requires_grad_()
            d = ts.to_dtensor(mine)
            assert_same(d.detach().full_tensor(), whole, f"to {placement}")
            (d * d).sum().full_tensor().backward()
            assert ts.is_sharded(mine.grad)
            assert_same(mine.grad, 2 * whole, f"gradient to {placement}")
    for op in ("sum", "avg", "max"):
        part = DTensor.from_local(X * (rank + 1), device_mesh, [Partial(op)])
        t = ts.from_dtensor(part)
        assert ts.spec(t).placements == (ts.Partial(op),)
        assert_same(t, part.full_tensor(), op)
        assert_same(ts.to_dtensor(t).full_tensor(), part.full_tensor(), op)
    local = (X * (rank + 1)).requires_grad_()
    ts.from_dtensor(DTensor.from_local(local, device_mesh, [Partial()])).square().sum().backward()
    total = X * sum(range(1, ranks + 1))
    assert_same(local.grad, 2 * total, "gradient of a summand")


def as_torch_has_it(whole, placement, mesh):
    if not isinstance(placement, Shard):
        return ts.Replicate(), None
    dim = placement.dim % 2
    return ts.Shard(dim), {dim: [len(chunk) for chunk in pieces(whole.shape[dim])]}


def pieces(rows):
    size = -(-rows // ranks)
    return [range(min(rows, r * size), min(rows, (r + 1) * size)) for r in range(ranks)]


def two_axes():
    device_mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("a", "b"))
    for placements in ([Shard(0), Shard(0)], [Shard(1), Shard(0)], [Replicate(), Shard(0)], [Shard(0), Replicate()]):
        d = distribute_tensor(X, device_mesh, placements)
        t = ts.from_dtensor(d)
        assert_same(t, X, str(placements))
        assert_same(ts.to_dtensor(t).full_tensor(), X, str(placements))


def refused(device_mesh, mesh):
    raises(TypeError, "not torch.Tensor", ts.from_dtensor, X)
    raises(TypeError, "is plain", ts.to_dtensor, X)
    raises(ts.InvalidArgument, "is not the mesh", ts.from_dtensor, distribute_tensor(X, device_mesh, [Shard(0)]), ts.Mesh({"a": 1, "b": ranks}))
    if ranks == 3:
        raises(ts.ShardingError, "[3, 3, 1]", ts.to_dtensor, ts.distribute_tensor(X, mesh, ts.Shard(0)))


def placements_of_torch(mesh):
    t = ts.distribute_tensor(X, mesh, [Shard(0)])
    assert ts.spec(ts.redistribute(t, Replicate())).placements == (ts.Replicate(),)
    assert_same(ts.from_local(X, mesh, Partial()), X * ranks)
    assert_same(ts.zeros([3], mesh, Shard(0)), torch.zeros(3))
    net = ts.distribute_module(nn.Linear(4, 4), mesh, lambda name, p: [Shard(0)])
    assert ts.spec(net.weight).placements == (ts.Shard(0),)


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)).double()


def train(net, module, x, whole=lambda t: t):
    optimizer, losses = torch.optim.Adam(module.parameters(), 0.05), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses + [whole(p.detach()) for p in module.parameters()], optimizer


def wrappers(mesh, device_mesh):
    """Plain modules in torch's wrappers, whose input is sharded: every rank has a loss over all rows, and the mean of equal gradients is one of them."""
    expected, _ = train(alone := network(), alone, X)
    x = ts.distribute_tensor(X, mesh, ts.Shard(0))
    net = network()
    for got, wanted in zip(train(DistributedDataParallel(net), net, x)[0], expected, strict=True):
        assert_same(got, wanted, "DistributedDataParallel")
    net = network()
    for layer in (net[0], net[3]):
        fully_shard(layer, mesh=device_mesh)
    fully_shard(net, mesh=device_mesh)
    for got, wanted in zip(train(net, net, x, lambda p: p.full_tensor())[0], expected, strict=True):
        assert_same(got, wanted, "fully_shard")
    # Rows over a group of ranks, other samples on each: the mean over all samples.
    if ranks == 4:
        grid = ts.Mesh({"data": 2, "domain": 2})
        mine = ts.distribute_tensor(X[3 * grid.coordinate[0] : 3 * grid.coordinate[0] + 3], grid.submesh("domain"), ts.Shard(1))
        net, whole = network(), network()
        ddp = DistributedDataParallel(net)
        ddp(mine).square().mean().backward()
        whole(X[:6]).square().mean().backward()
        for p, q in zip(net.parameters(), whole.parameters()):
            assert_same(p.grad, q.grad, "data and domain")


def checkpoints(device_mesh, folder):
    """Modules that torch has sharded, with their optimizer, into a plain one and back."""
    net = network()
    fully_shard(net, mesh=device_mesh)
    _, adam = train(net, net, X)
    saves = ts.Checkpointer(folder)
    saves.save("fsdp", {"net": net, "adam": adam})
    plain = network()
    other = torch.optim.Adam(plain.parameters(), 1.0)
    saves.load("fsdp", {"net": plain, "adam": other})
    again = network()
    fully_shard(again, mesh=device_mesh)
    third = torch.optim.Adam(again.parameters(), 1.0)
    saves.load("fsdp", {"net": again, "adam": third})
    for module in (plain, again, net):
        optimizer = {id(plain): other, id(again): third, id(net): adam}[id(module)]
        assert optimizer.param_groups[0]["lr"] == 0.05
        optimizer.zero_grad()
        module(X).square().mean().backward()
        optimizer.step()
    for p, q, r in zip(plain.parameters(), again.parameters(), net.parameters()):
        assert torch.equal(q.full_tensor(), r.full_tensor())
        assert_same(p, r.detach().full_tensor(), "plain")


def torchs_checkpoints(device_mesh, mesh, folder):
    """What torch saves loads into sharded tensors of any sizes, and back; and from one layout of ours into another."""
    uneven = {0: [7 - min(2, ranks - 1), *[1] * min(2, ranks - 1), *[0] * (ranks - 3)]}

    def ours(values, *where):
        return {"rows": ts.distribute_tensor(values["rows"], mesh, *where), "plain": values["plain"].clone()}

    full, zero = {"rows": X, "plain": torch.arange(3.0)}, {"rows": torch.zeros_like(X), "plain": torch.zeros(3)}
    dcp.save({"net": {"rows": distribute_tensor(X, device_mesh, [Shard(1)]), "plain": full["plain"]}}, checkpoint_id=f"{folder}/torch")
    for where in ([ts.Shard(0), uneven], [ts.Shard(1)], [ts.Replicate()]):
        mine = ours(zero, *where)
        dcp.load({"net": ts.dcp_state(mine)}, checkpoint_id=f"{folder}/torch")
        assert_same(mine["rows"], X, str(where))
        assert_same(mine["plain"], full["plain"])
        there = f"{folder}/ours {where[0]}"
        dcp.save({"net": ts.dcp_state(ours(full, *where))}, checkpoint_id=there)
        plain = {"rows": torch.zeros_like(X), "plain": torch.zeros(3)}
        dcp.load({"net": plain}, checkpoint_id=there)
        assert torch.equal(plain["rows"], X) and torch.equal(plain["plain"], full["plain"])
        sharded = ours(zero, ts.Shard(0))
        dcp.load({"net": ts.dcp_state(sharded)}, checkpoint_id=there)
        assert_same(sharded["rows"], X, there)
    raises(ts.InvalidArgument, "is a partial value", ts.dcp_state, ts.from_local(X, mesh, ts.Partial()))


device_mesh, mesh = meshes()
there_and_back(device_mesh, mesh)
if ranks % 2 == 0:
    two_axes()
refused(device_mesh, mesh)
placements_of_torch(mesh)
wrappers(mesh, device_mesh)
checkpoints(device_mesh, sys.argv[1])
torchs_checkpoints(device_mesh, mesh, sys.argv[1])
print(f"rank {rank} of {ranks}: there and back", flush=True)
dist.destroy_process_group()

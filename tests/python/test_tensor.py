"""Every function of the package, on ranks as threads."""

import copy
import copyreg
import io
import pickle

import pytest
import torch

import tessera as ts
from support import assert_same, on_ranks

X = torch.arange(42, dtype=torch.float64).reshape(7, 6)
SIZES = {1: [[7]], 2: [[4, 3], [0, 7], [6, 1]], 3: [[3, 2, 2], [4, 0, 3], [0, 0, 7]], 4: [[1, 3, 0, 3]]}
CUTS = [(ranks, sizes) for ranks, all_sizes in SIZES.items() for sizes in all_sizes]


@pytest.mark.parametrize("ranks,sizes", CUTS)
def test_distribute_local_and_back(ranks, sizes):
    def body(rank):
        mesh = ts.Mesh({"x": ranks})
        t = ts.distribute_tensor(X.clone(), mesh, [ts.Shard(0)], {0: sizes})
        begin = sum(sizes[:rank])
        assert torch.equal(ts.to_local(t), X[begin : begin + sizes[rank]])
        assert torch.equal(ts.full_tensor(t), X)
        assert t.shape == X.shape and t.stride() == X.stride() and t.dtype == X.dtype and t.device == X.device
        again = ts.from_local(ts.to_local(t), mesh, [ts.Shard(0)])  # sizes gathered
        assert ts.spec(again) == ts.spec(t)
        assert torch.equal(ts.full_tensor(again), X)
        with ts.CommTrace() as trace:
            given = ts.from_local(ts.to_local(t), mesh, [ts.Shard(0)], {0: sizes})
        assert trace.count == 0 and ts.spec(given) == ts.spec(t)
        ts.to_local(t).add_(1)  # the same memory
        assert torch.equal(ts.full_tensor(t), X + 1)

    on_ranks(ranks, body)


@pytest.mark.parametrize("ranks,sizes", CUTS)
def test_redistribute(ranks, sizes):
    def body(rank):
        mesh = ts.Mesh({"x": ranks})
        t = ts.distribute_tensor(X, mesh, [ts.Shard(0)], {0: sizes}).requires_grad_(True)
        columns = ts.redistribute(t, [ts.Shard(-1)])
        assert ts.spec(columns).placements == (ts.Shard(1),)
        other = ts.redistribute(columns, [ts.Shard(0)], {0: sizes[::-1]})
        assert ts.spec(other).sizes == {0: sizes[::-1]}
        replicated = ts.redistribute(other, [ts.Replicate()])
        assert torch.equal(ts.to_local(replicated), X)
        (replicated * X).sum().backward()
        assert ts.spec(t.grad) == ts.spec(t)
        assert_same(t.grad, X)
        partial = ts.from_local(X * (rank + 1), mesh, [ts.Partial("sum")])
        assert_same(partial, X * (ranks * (ranks + 1) / 2))
        assert_same(ts.redistribute(partial, [ts.Shard(1)]), X * (ranks * (ranks + 1) / 2))
        for op, value in {"avg": (ranks + 1) / 2, "min": 1, "max": ranks}.items():
            assert_same(ts.from_local(X * (rank + 1), mesh, [ts.Partial(op)]), X * value)

    on_ranks(ranks, body)


def test_two_axes():
    def body(rank):
        mesh = ts.Mesh({"data": 2, "domain": 3})
        assert mesh.axes == {"data": 2, "domain": 3} and mesh.coordinate == (rank // 3, rank % 3)
        t = ts.distribute_tensor(X, mesh, [ts.Shard(0), ts.Shard(1)], {0: [5, 2], 1: [1, 0, 5]})
        s = ts.spec(t)
        assert s.mesh == mesh and s.shape == (7, 6) and s.sizes == {0: [5, 2], 1: [1, 0, 5]}
        assert s.placements == (ts.Shard(0), ts.Shard(1))
        assert s.local_shape == ([5, 2][rank // 3], [1, 0, 5][rank % 3])
        assert s.local_offset == ([0, 5][rank // 3], [0, 1, 1][rank % 3])
        assert_same(t, X)
        nested = ts.distribute_tensor(X, mesh, [ts.Shard(0), ts.Shard(0)], {0: [2, 1, 0, 0, 1, 3]})
        assert_same(nested.exp(), X.exp())
        assert_same((nested @ X.t()).sum(0), (X @ X.t()).sum(0))

    on_ranks(6, body)


def test_scatter():
    def body(rank):
        mesh = ts.Mesh({"x": 3})
        t = ts.scatter(X if rank == 1 else None, mesh, [ts.Shard(1)], {1: [1, 0, 5]}, root=1)
        assert_same(t, X)

    on_ranks(3, body)


def test_ranks_scatter_from_one_root():
    def body(rank):
        mesh = ts.Mesh({"x": 3})
        for roots, says in (([0, 0, 1], "rank 0 has root 0, rank 2 has root 1"), ([1, 2, 0], "rank 0 has root 1, rank 1 has root 2")):
            with pytest.raises(ts.MismatchError, match=says):
                ts.scatter(X, mesh, ts.Shard(0), root=roots[rank])
        with pytest.raises(ts.InvalidArgument, match="rank 1: root 3 of a mesh of 3"):
            ts.scatter(X, mesh, ts.Shard(0), root=3 * (rank == 1))
        assert_same(ts.scatter(X if rank == 2 else None, mesh, ts.Shard(0), root=2), X)

    ts.run_threads(3, body, timeout=20)


def test_gradients_through_local_and_full():
    def body(rank):
        mesh = ts.Mesh({"x": 2})
        local = torch.ones(rank + 1, 3, dtype=torch.float64, requires_grad=True)
        t = ts.from_local(local, mesh, [ts.Shard(0)])
        weight = torch.arange(9, dtype=torch.float64).reshape(3, 3)
        (ts.full_tensor(t) * weight).sum().backward()
        assert torch.equal(local.grad, weight[:1] if rank == 0 else weight[1:])
        full = X.clone().requires_grad_(True)
        back = ts.to_local(ts.distribute_tensor(full, mesh, [ts.Shard(1)], {1: [2, 4]}))
        back.square().sum().backward()
        assert_same(full.grad, 2 * X)

    on_ranks(2, body)


def test_trace_counts():
    def body(rank):
        mesh = ts.Mesh({"x": 2})
        t = ts.distribute_tensor(X, mesh, [ts.Shard(0)])
        with ts.CommTrace() as trace:
            t.mul(2).relu().t().contiguous()
        assert trace.count == 0 and trace.bytes == 0
        with ts.CommTrace() as trace:
            assert t.sum().item() == X.sum().item()
        assert trace.count == 1 and trace.bytes == 8
        assert trace.events[0][0] == "all_reduce" and "all_reduce" in trace.table()

    on_ranks(2, body)


def test_policies():
    def body(rank):
        mesh = ts.Mesh({"x": 2})
        t = ts.distribute_tensor(X, mesh, [ts.Shard(0)])
        ts.set_policies("error", "allow")
        with pytest.raises(RuntimeError, match="Redistribute explicitly"):
            t.sort(dim=0)
        ts.set_policies("allow", "error")
        with pytest.raises(RuntimeError, match="plain tensor"):
            t + torch.ones(7, 6)
        assert torch.equal(whole_sorted(t), X.sort(dim=0).values)
        with pytest.raises(RuntimeError, match="'allow', 'warn' or 'error'"):
            ts.set_policies("sometimes")

    def whole_sorted(t):
        return ts.full_tensor(t.sort(dim=0).values)

    on_ranks(2, body)


def test_what_reads_memory():
    def body(rank):
        mesh = ts.Mesh({"x": 2})
        t = ts.distribute_tensor(X, mesh, [ts.Shard(0)], {0: [5, 2]})
        # No rank waits for another: a debugger that prints on one rank must not hang.
        with ts.CommTrace() as trace:
            for text in (repr(t), str(t), f"{t}"):
                assert "ShardTensor" in text and "[5, 2]" in text and "Shard(0)" in text
        assert trace.count == 0
        total = t.sum()
        assert float(total) == X.sum().item() and total.tolist() == X.sum().item() and f"{total:.1f}" == f"{X.sum().item():.1f}"
        counts = ts.distribute_tensor(X[0], mesh, [ts.Replicate()])
        with ts.CommTrace() as trace:
            assert rank or counts.tolist() == X[0].tolist()  # what a rank has it reads alone
        assert trace.count == 0
        for read in (t.numpy, t.tolist, t.data_ptr, t.untyped_storage, lambda: pickle.dumps(t), lambda: torch.save(t, io.BytesIO())):
            with pytest.raises(RuntimeError, match="ShardTensor.*tessera"):
                read()
        assert str(torch.ones(2)) == "tensor([1., 1.])"  # plain tensors are as they were
        assert torch.equal(pickle.loads(pickle.dumps(X)), X) and X.tolist()[0][1] == 1.0

    on_ranks(2, body)


def test_what_a_tensor_is():
    def body(rank):
        t = ts.distribute_tensor(X.clone(), ts.Mesh({"x": 2}), [ts.Shard(0)], {0: [5, 2]})
        assert isinstance(t, torch.Tensor) and isinstance(torch.nn.Parameter(t), torch.nn.Parameter)
        assert t.type() == X.type() == "torch.DoubleTensor" and t.dtype is X.dtype and t.device == X.device and t.layout is X.layout
        assert t.is_cpu and t.stride() == X.stride() and t.nbytes == X.nbytes and t[1:].storage_offset() == X[1:].storage_offset()
        # As the page on Python says: the legacy classes ask for libtorch's kernels, aliases for memory.
        assert not isinstance(t, torch.DoubleTensor)
        others = {"detach": t.detach(), "data": t.data, "rows": t[1:], "view": t.view(-1, 1), "clone": t.clone()}
        for name, other in others.items():
            assert not torch._C._is_alias_of(t, other), name
            assert torch._C._is_alias_of(ts.to_local(t), ts.to_local(other)) == (name != "clone"), name
            assert other._is_view() == (name in ("rows", "view")) and (other._base is t) == other._is_view(), name
        others["data"].add_(1)
        assert torch.equal(ts.full_tensor(t), X + 1) and torch.equal(ts.full_tensor(others["rows"]), X[1:] + 1)
        others["rows"].mul_(0)
        assert torch.equal(ts.full_tensor(others["detach"]).sum(), (X + 1)[0].sum())

    on_ranks(2, body)


def test_forward_mode():
    from torch.autograd import forward_ad

    def body(rank):
        mesh = ts.Mesh({"x": 2})
        put = lambda v: ts.distribute_tensor(v, mesh, [ts.Shard(0)], {0: [5, 2]})  # noqa: E731
        tangent = X.cos()
        f = lambda x: ((x.sin() * x) @ torch.ones(6, 2, dtype=X.dtype)).square().sum(0)  # noqa: E731
        value, derivative = forward_ad.unpack_dual(f(forward_ad.make_dual(X, tangent)))
        got, moved = forward_ad.unpack_dual(f(forward_ad.make_dual(put(X), put(tangent))))
        assert_same(got, value)
        assert_same(moved, derivative)
        with pytest.raises(RuntimeError):
            forward_ad.make_dual(put(X), put(X)[1:])

    with forward_ad.dual_level():  # the process has one at a time, and ranks here are threads of it
        on_ranks(2, body)


def test_a_line_of_logging_on_one_rank_waits_for_nobody():
    def body(rank):
        mesh = ts.Mesh({"x": 2})
        x = ts.distribute_tensor(X, mesh, [ts.Shard(0)], {0: [5, 2]}).detach().requires_grad_(True)
        best, log = float("inf"), []
        for step in range(3):
            loss = (x * (step + 1)).mean()
            with ts.CommTrace() as trace:
                if rank == step % 2:
                    log.append((loss.detach(), f"{loss:.3f}", f"{loss}", str(loss)))
            assert trace.count == 0
            if loss < best:
                best = loss.item()
            assert best == X.mean().item()
            assert loss.item() == pytest.approx(X.mean().item() * (step + 1))
            if rank == 1:
                assert f"{loss:.3f}" == f"{X.mean().item() * (step + 1):.3f}"  # known by now
            x.grad = None
            loss.backward()
            assert_same(x.grad, torch.full_like(X, (step + 1) / X.numel()))

    on_ranks(2, body)


INDICES = {
    "row": 1,
    "last row": -1,
    "number": (1, 2),
    "row of all": (1, slice(None)),
    "column": (slice(None), 3),
    "with None": (None, 1),
    "None after": (1, None),
    "Ellipsis": (..., 1),
    "Ellipsis and row": (2, ...),
    "row and list": (1, [0, 2]),
    "list and column": ([0, 2], 1),
    "tensor without dims": torch.tensor(1),
    "slices": (slice(1, 5, 2), slice(2, None)),
    "True": (True, 1),
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", INDICES)
def test_indexing_by_integers_where_ranks_are_threads(name, dim):
    index = INDICES[name]

    def body(rank):
        mesh = ts.Mesh({"x": 2})
        x = ts.distribute_tensor(X.clone(), mesh, [ts.Shard(dim)]).detach()
        assert_same(x[index], X[index])
        plain = X.clone()
        plain[index] = -5.0
        x[index] = -5.0
        assert_same(x, plain)
        plain[index] += 1
        x[index] += 1
        assert_same(x, plain)
        grad = X.clone().requires_grad_(True)
        (grad[index] ** 2).sum().backward()
        y = x.detach().requires_grad_(True)
        with torch.no_grad():
            y.copy_(ts.distribute_tensor(X, mesh, [ts.Shard(dim)]))
        (y[index] ** 2).sum().backward()
        assert_same(y.grad, grad.grad)

    on_ranks(2, body)


def test_numbers_of_sharded_tensors_in_plain_pytorch():
    """Python reads a number with its lock held: the other ranks, which are threads, must go on."""

    def body(rank):
        mesh = ts.Mesh({"x": 2})
        x = ts.distribute_tensor(X.clone(), mesh, [ts.Shard(0)]).detach()
        flat, plain = x[:, 0], X.clone()
        assert_same(x[flat.argmax()], X[X[:, 0].argmax()])
        x[flat.argmin()] = 9.0
        plain[X[:, 0].argmin()] = 9.0
        assert_same(x, plain)
        total = plain.sum()
        assert torch.equal(torch.full((2,), x.sum()), torch.full((2,), total.item()))
        assert torch.equal(torch.add(torch.ones(2), 1, alpha=x.sum()), torch.add(torch.ones(2), 1, alpha=total.item()))
        assert torch.equal(torch.arange(x.sum() / x.sum() * 4), torch.arange(4.0))

    on_ranks(2, body)


def test_threads_leave_plain_pytorch_as_it_is():
    on_ranks(2, lambda rank: None)
    assert torch.equal(torch.tensor([torch.tensor(1.0), torch.tensor(2.0)]), torch.tensor([1.0, 2.0]))
    assert torch.equal(torch.as_tensor([torch.tensor(1.0)]), torch.tensor([1.0]))
    assert torch.equal(torch.zeros(1).new_tensor([torch.tensor(3)]), torch.tensor([3.0]))
    assert "__getitem__" not in vars(torch.Tensor)


def test_indexing_errors():
    def body(rank):
        x = ts.distribute_tensor(X, ts.Mesh({"x": 2}), [ts.Shard(0)])
        for wrong in (7, -8, (0, 0, 0), (0, 6)):
            with pytest.raises(IndexError):
                x[wrong]
        assert x.sum().item() == X.sum().item()

    on_ranks(2, body)


def test_new_tensors_of_data_are_plain():
    def body(rank):
        x = ts.distribute_tensor(X, ts.Mesh({"x": 2}), [ts.Shard(0)])
        assert torch.equal(x.new_tensor([1, 2]), X.new_tensor([1, 2])) and x.new_tensor(1.0, dtype=torch.int32).dtype is torch.int32
        assert x.new(2, 3).shape == (2, 3) and x.new(2).dtype is torch.float64 and not ts.is_sharded(x.new([1.0, 2.0]))
        # What is drawn into new memory agrees, and lies as the tensor does.
        drawn = x.new(x.shape).uniform_()
        assert ts.spec(drawn).placements == (ts.Shard(0),) and ts.spec(x.new(2).normal_()).placements == (ts.Replicate(),)

    on_ranks(2, body)


def test_deepcopy():
    def body(rank):
        net = ts.distribute_module(torch.nn.Linear(3, 2).double(), ts.Mesh({"x": 2}))
        twin = copy.deepcopy(net)
        assert ts.is_sharded(twin.weight) and isinstance(twin.weight, torch.nn.Parameter)
        with torch.no_grad():
            twin.weight.zero_()
        assert whole_max(net.weight) > 0
        # A leaf takes its gradient along; a Parameter does not, as in plain PyTorch.
        leaf = ts.distribute_tensor(X, ts.Mesh({"x": 2}), [ts.Shard(0)]).detach().requires_grad_(True)
        (leaf * 2).sum().backward()
        other = copy.deepcopy(leaf)
        assert_same(other.grad, leaf.grad)
        assert other.grad is not leaf.grad

    def whole_max(t):
        return t.abs().max().item()

    on_ranks(2, body)


def test_copy():
    def same_as_plain(put):
        x = put(X).detach().requires_grad_(True)
        x.name_of_mine = "x"
        (x * 2).sum().backward()
        twin, product, parameter = copy.copy(x), copy.copy(x * 3), copy.copy(torch.nn.Parameter(put(X)))
        assert twin.is_leaf and twin.requires_grad and twin.grad is None and twin.name_of_mine == "x"
        assert product.is_leaf and product.requires_grad
        assert isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad
        with torch.no_grad():
            twin.add_(1)  # the same memory
        return [x, product, parameter]

    def body(rank):
        mesh = ts.Mesh({"x": 2})
        ours = same_as_plain(lambda t: ts.distribute_tensor(t.clone(), mesh, [ts.Shard(0)]))
        for got, expected in zip(ours, same_as_plain(torch.clone)):
            assert ts.is_sharded(got)
            assert_same(got, expected)

    on_ranks(2, body)


class Measured(torch.Tensor):
    pass


def test_copies_of_plain_tensors_stay_what_they_are(monkeypatch):
    measured = X.clone().as_subclass(Measured)
    measured.unit = "m"
    twin = copy.copy(measured)
    assert type(twin) is Measured and twin.unit == "m" and twin.data_ptr() == measured.data_ptr()
    monkeypatch.setitem(copyreg.dispatch_table, Measured, lambda t: (Measured.as_subclass, (t.new_zeros(2), Measured)))
    assert copy.copy(measured).shape == (2,)


def test_errors():
    def body(rank):
        mesh = ts.Mesh({"x": 2})
        for wrong in (
            lambda: ts.distribute_tensor(X, mesh, [ts.Shard(0)], {0: [3, 3]}),
            lambda: ts.distribute_tensor(X, mesh, [ts.Shard(2)]),
            lambda: ts.distribute_tensor(X, mesh, [ts.Shard(0), ts.Replicate()]),
            lambda: ts.distribute_tensor(X, mesh, [ts.Partial("median")]),
            lambda: ts.distribute_tensor(X, mesh, ["Shard(x)"]),
            lambda: ts.spec(X),
            lambda: ts.full_tensor(X),
            lambda: ts.Mesh({"x": 3}),
            lambda: ts.from_local(X[: rank + 1, : rank + 1], mesh, [ts.Shard(0)]),
        ):
            with pytest.raises((RuntimeError, ValueError)) as error:
                wrong()
            assert "INTERNAL ASSERT" not in str(error.value)

    on_ranks(2, body)
    with pytest.raises(RuntimeError, match="no rank yet"):
        ts.Mesh({"x": 1})


def test_losses_of_nothing():
    """libtorch's meta kernels in Python divide by the number of elements."""

    def body(rank):
        mesh = ts.Mesh({"x": 2})
        for loss in (torch.nn.functional.mse_loss, torch.nn.functional.smooth_l1_loss, torch.nn.functional.huber_loss):
            plain, target = torch.zeros(0, 3, requires_grad=True), torch.zeros(0, 3)
            expected = loss(plain, target)
            expected.backward()
            sharded = ts.distribute_tensor(torch.zeros(0, 3), mesh, [ts.Shard(0)]).requires_grad_()
            value = loss(sharded, ts.distribute_tensor(target, mesh, [ts.Shard(0)]))
            value.backward()
            assert expected.isnan() and ts.full_tensor(value.detach()).isnan(), loss
            assert_same(sharded.grad, plain.grad, loss)

    on_ranks(2, body)


def test_a_rank_that_raises_ends_the_others():
    def body(rank):
        mesh = ts.Mesh({"x": 3})
        if rank == 1:
            raise KeyError("the reason")
        mesh.barrier()

    with pytest.raises(KeyError, match="the reason") as error:
        ts.run_threads(3, body, timeout=60)
    assert "on rank 1 of 3" in error.value.__notes__


def test_results_in_order_of_rank():
    assert ts.run_threads(4, lambda rank: (rank, ts.rank(), ts.world_size())) == [(r, r, 4) for r in range(4)]
    assert ts.run_threads(2, lambda rank: whole_sum(), backend="gloo") == [3.0, 3.0]


def whole_sum():
    return ts.from_local(torch.tensor([ts.rank() + 1.0]), ts.Mesh({"x": 2}), [ts.Shard(0)]).sum().item()

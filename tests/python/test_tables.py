"""Tables of embeddings that no rank has whole: layers of torch.nn, and the library's optimizers beside torch's on one process."""

import pytest
import torch
from torch import nn

import tessera as ts
from support import assert_same, on_ranks

ROWS, WIDTH = 11, 4
OPTIMIZERS = {"adagrad": (ts.RowwiseAdagrad, {"lr": 0.1}), "adam": (ts.SparseAdam, {"lr": 0.1, "betas": (0.8, 0.95)})}


def build(kind=nn.Embedding, **options):
    """Ranks are threads, which draw from torch's generator in any order: the values have one of their own."""
    net = kind(ROWS, WIDTH, sparse=True, **options).double()
    with torch.no_grad():
        net.weight.copy_(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
    return net


def placed(net, mesh, dim=0, sizes=None):
    return ts.distribute_module(net, mesh, lambda name, t: ([ts.Shard(dim)], sizes and {dim: sizes}))


def ids_of(step, n=7):
    return torch.randint(ROWS, (n,), generator=torch.Generator().manual_seed(step))


def train(net, optimizer, mesh=None, first=0, steps=3):
    for step in range(first, first + steps):
        ids = ids_of(step)
        optimizer.zero_grad()
        net(ids if mesh is None else ts.distribute_tensor(ids, mesh, ts.Shard(0))).sin().sum().backward()
        optimizer.step()


def adagrad(net, steps=3, lr=0.1):
    """Row-wise, in dense arithmetic."""
    w, total = net.weight.detach().clone(), torch.zeros(ROWS, dtype=torch.float64)
    for step in range(steps):
        leaf = w.clone().requires_grad_()
        leaf[ids_of(step)].sin().sum().backward()
        total += leaf.grad.square().mean(1)
        w -= lr * leaf.grad / (total.sqrt() + 1e-10)[:, None]
    return w


def test_on_one_process_they_are_adagrad_by_rows_and_torchs_sparse_adam():
    net, expected = build(), build()
    train(net, ts.RowwiseAdagrad(net.parameters(), lr=0.1))
    assert_same(net.weight, adagrad(expected))
    net, expected = build(), build()
    train(net, ts.SparseAdam(net.parameters(), lr=0.1))
    train(expected, torch.optim.SparseAdam(expected.parameters(), lr=0.1))
    assert_same(net.weight, expected.weight)


@pytest.mark.parametrize("ranks, dim, sizes", [(3, 0, [4, 0, 7]), (2, 1, [1, 3])])
@pytest.mark.parametrize("which", OPTIMIZERS)
def test_steps_are_those_of_one_process(ranks, dim, sizes, which):
    kind, options = OPTIMIZERS[which]
    expected = build()
    train(expected, kind(expected.parameters(), **options))

    def body(rank):
        mesh = ts.Mesh({"x": ranks})
        net = placed(build(), mesh, dim, sizes)
        optimizer = kind(net.parameters(), **options)
        train(net, optimizer, mesh)
        assert net.weight.grad.is_sparse and ts.is_sharded(net.weight.grad)
        touched = ts.to_local(net.weight.grad)
        assert f"nnz={touched._nnz()}" in repr(net.weight.grad)
        assert touched.shape[dim] == sizes[rank] and touched._nnz() <= 7
        assert_same(net.weight.grad, expected.weight.grad.to_dense())
        assert_same(net.weight, expected.weight)

    on_ranks(ranks, body)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_each_ranks_own(mode):
    expected = build(nn.EmbeddingBag, mode=mode, padding_idx=2)

    def body(rank):
        mesh = ts.Mesh({"x": 3})
        net = placed(build(nn.EmbeddingBag, mode=mode, padding_idx=2), mesh)
        n = [5, 0, 4][rank]
        ids, offsets = ts.bags_from_local(ids_of(rank, n), torch.tensor([0, 2, 2][: 3 if n else 0], dtype=torch.long), mesh)
        y = net(ids, offsets)
        assert ts.to_local(y).shape[0] == (3 if n else 0)
        # Rows of bags of one size: their ids have two dims.
        z = net(ts.distribute_tensor(ids_of(9, 6).view(3, 2), mesh, ts.Shard(0)))
        loss = y.square().sum() + z.sin().sum()
        loss.backward()
        return ts.full_tensor(ids), ts.full_tensor(offsets), loss.item(), ts.full_tensor(net.weight.grad)

    ids, offsets, loss, gradient = on_ranks(3, body)[0]
    wanted = expected(ids, offsets).square().sum() + expected(ids_of(9, 6).view(3, 2)).sin().sum()
    wanted.backward()
    assert abs(loss - wanted.item()) < 1e-12
    assert_same(gradient, expected.weight.grad.to_dense())


@pytest.mark.parametrize("which", OPTIMIZERS)
def test_checkpoints_move_states_with_their_rows(which, tmp_path):
    kind, options = OPTIMIZERS[which]
    expected = build()
    train(expected, kind(expected.parameters(), **options), steps=5)

    def save(rank):
        mesh = ts.Mesh({"x": 2})
        net = placed(build(), mesh, sizes=[3, 8])
        optimizer = kind(net.parameters(), **options)
        train(net, optimizer, mesh, steps=2)
        ts.Checkpointer(str(tmp_path)).save("two", {"net": net, "optimizer": optimizer})

    def load(rank, ranks):
        mesh = ts.Mesh({"x": ranks})
        net = placed(build(), mesh)
        optimizer = kind(net.parameters(), lr=1.0)
        ts.Checkpointer(str(tmp_path)).load("two", {"net": net, "optimizer": optimizer})
        assert optimizer.param_groups[0]["lr"] == 0.1
        for state in optimizer.state.values():
            shapes = {name: ts.to_local(t).shape[0] for name, t in state.items() if t.dim()}
            assert set(shapes.values()) == {ts.to_local(net.weight).shape[0]}, shapes
        train(net, optimizer, mesh, first=2, steps=3)
        assert_same(net.weight, expected.weight)

    on_ranks(2, save)
    for ranks in (1, 3):
        on_ranks(ranks, load, ranks)


def test_mistakes_say_what_to_do():
    with pytest.raises(ts.InvalidArgument, match="negative"):
        ts.RowwiseAdagrad(build().parameters(), lr=-1.0)
    dense = nn.Embedding(ROWS, WIDTH)
    dense(ids_of(0)).sum().backward()
    optimizer = ts.SparseAdam(dense.parameters())
    with pytest.raises(ts.InvalidArgument, match="sparse = true"):
        optimizer.step()
    assert optimizer.state[dense.weight]["step"] == 0  # it was no step

    def body(rank):
        mesh = ts.Mesh({"x": 2})
        net = placed(build(), mesh)
        wrong = torch.tensor([0, 1, 2, ROWS])
        with pytest.raises((IndexError, ts.PeerFailedError), match=f"index {ROWS} on rank 1 is out of range"):
            net(ts.distribute_tensor(wrong, mesh, ts.Shard(0)))
        net(ts.distribute_tensor(ids_of(0), mesh, ts.Shard(0))).sum().backward()
        for kind in (torch.optim.SparseAdam, torch.optim.Adagrad):
            with pytest.raises(ts.ShardingError, match="RowwiseAdagrad"):
                kind(net.parameters()).step()
        torch.optim.SGD(net.parameters(), 0.1).step()
        with pytest.raises(ts.Error):
            ts.bags_from_local(ids_of(0), torch.tensor([0, 9 if rank == 1 else 3]), mesh)

    on_ranks(2, body)

"""Tables of embeddings that no rank has whole, and optimizers that touch the rows that were used."""

import torch

from tessera._errors import InvalidArgument
from tessera._library import ops
from tessera._mesh import handle_of
from tessera._placement import to_text


def bags_from_local(indices, offsets, mesh, placements=None):
    """Makes of each rank's own bags those of all, and returns `(indices, offsets)` as `torch.nn.EmbeddingBag` takes them, sharded.

    `indices`: [n] of int or long; `offsets`: [bags], where each bag begins among this rank's. Any number on each rank. They are sharded over all axes of the
    mesh, or those on which `placements` is `Shard(0)`. Collective over the mesh. Raises InvalidArgument on every rank for offsets that do not begin at 0,
    decrease or go beyond the indices, and for ranks whose dtypes differ.

    >>> ids, offsets = ts.bags_from_local(torch.tensor([4, 1, 1]), torch.tensor([0, 2]), mesh)
    >>> table = torch.nn.EmbeddingBag(6, 3, mode="sum", sparse=True)
    >>> _ = ts.distribute_module(table, mesh, lambda name, t: [ts.Shard(0)])
    >>> table(ids, offsets).shape
    torch.Size([2, 3])
    """
    return ops.bags_from_local(indices, offsets, handle_of(mesh), to_text(placements or []))


def _require(name, good):
    if not good:
        raise InvalidArgument(f"{name}: a learning rate, an eps or an initial value is negative, or a beta is not in [0, 1)")


class _OfTables(torch.optim.Optimizer):
    """An optimizer whose updates are the library's own, one call for each table with a gradient."""

    @torch.no_grad()
    def _step(self, closure):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is not None:
                    self._update(table, table.grad, self.state[table], group)
        return loss


class RowwiseAdagrad(_OfTables):
    """Adagrad with one number for each row of a table: the mean of the squares of its gradient's elements is added to it.

    `tables` (tensors, or groups) are weights of layers with `sparse=True`, sharded along rows or columns, or plain; a row's number lies where the row does.
    Rows that were not touched stay. `step` is collective over the axes that shard columns. It raises InvalidArgument for a gradient that is dense. The
    algorithm is that of https://arxiv.org/abs/2104.05158, section 4.1.4.

    >>> table = torch.nn.Embedding(6, 3, sparse=True)
    >>> _ = ts.distribute_module(table, mesh, lambda name, t: [ts.Shard(0)])
    >>> optimizer = ts.RowwiseAdagrad(table.parameters(), lr=0.1)
    >>> table(ts.distribute_tensor(torch.tensor([4, 1, 1]), mesh, [ts.Shard(0)])).sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[table.weight]["sum"].shape
    torch.Size([6])
    """

    def __init__(self, tables, lr=0.01, *, initial_accumulator_value=0.0, eps=1e-10):
        _require("RowwiseAdagrad", min(lr, initial_accumulator_value, eps) >= 0)
        super().__init__(tables, {"lr": lr, "initial_accumulator_value": initial_accumulator_value, "eps": eps})

    def step(self, closure=None):
        """Updates the rows that were touched; `closure` computes the loss anew, and its value is returned. Collective over the axes that shard columns."""
        return self._step(closure)

    @staticmethod
    def _update(table, gradient, state, group):
        if not state:
            state["sum"] = ops.row_state(table, float(group["initial_accumulator_value"]))
        ops.rowwise_adagrad(table, gradient, state["sum"], float(group["lr"]), float(group["eps"]))


class SparseAdam(_OfTables):
    """Adam that updates the rows and moments that were touched, as `torch.optim.SparseAdam` does, of sharded tables too.

    `tables` (tensors, or groups) are weights of layers with `sparse=True`, sharded along rows or columns, or plain; moments lie where the elements do. `step`
    communicates nothing. It raises InvalidArgument for a gradient that is dense.

    >>> table = torch.nn.Embedding(6, 3, sparse=True)
    >>> _ = ts.distribute_module(table, mesh, lambda name, t: [ts.Shard(0)])
    >>> optimizer = ts.SparseAdam(table.parameters(), lr=0.1)
    >>> table(ts.distribute_tensor(torch.tensor([4, 1, 1]), mesh, [ts.Shard(0)])).sum().backward()
    >>> optimizer.step()
    """

    def __init__(self, tables, lr=1e-3, *, betas=(0.9, 0.999), eps=1e-8):
        _require("SparseAdam", min(lr, eps) >= 0 and all(0 <= beta < 1 for beta in betas))
        super().__init__(tables, {"lr": lr, "betas": betas, "eps": eps})

    def step(self, closure=None):
        """Updates the rows that were touched; `closure` computes the loss anew, and its value is returned."""
        return self._step(closure)

    @staticmethod
    def _update(table, gradient, state, group):
        if not state:
            state.update(step=torch.tensor(0.0), exp_avg=ops.element_state(table), exp_avg_sq=ops.element_state(table))
        step = int(state["step"]) + 1  # counted when it is done: a gradient that is refused is no step
        first, second = map(float, group["betas"])
        ops.sparse_adam(table, gradient, state["exp_avg"], state["exp_avg_sq"], step, float(group["lr"]), first, second, float(group["eps"]))
        state["step"] += 1

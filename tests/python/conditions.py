"""The conditions under which each operator of the database is tried: how its tensors are sharded, lie in memory, and which of its forms is called."""

import contextlib

import torch

import tessera as ts

# Of one mesh axis with 2 or 3 ranks unless said.
CONDITIONS = (
    "even",
    "uneven",
    "empty",  # one rank has all
    "two axes",  # 2 x 2 ranks, a dim on each
    "one dim on two axes",  # 2 x 2 ranks
    "partial",  # sums
    "mixed placements",  # each tensor along another dim; of one tensor the second axis is Partial
    "memory orders",  # transposed, or with gaps
    "in place",
    "out=",
    "double backward",
    "autocast",  # float32 to bfloat16
    "integers",
    "bfloat16",
)

# Of transposed inputs libtorch's own kernels give other values than of the same values in memory order: nothing to compare with.
IN_MEMORY_ORDER = {"torch.ops.aten._scaled_dot_product_flash_attention_for_cpu"}


def dtype_for(op, condition):
    """The dtype of the samples; None if the operator has no such form."""
    if condition == "in place" and op.inplace_variant is None or condition == "out=" and not op.supports_out:
        return None
    if condition == "memory orders" and op.name in IN_MEMORY_ORDER:
        return None
    wanted = {
        "integers": (torch.int64,),
        "bfloat16": (torch.bfloat16,),
        "autocast": (torch.float32,),
        "partial": (torch.float64, torch.complex128, torch.float32, torch.int64),
        "double backward": (torch.float64, torch.complex128),
    }.get(condition, (torch.float64, torch.complex128, torch.int64, torch.float32, torch.bool))
    return next((d for d in wanted if d in op.supported_dtypes("cpu")), None)


def needs_several(condition):
    """Whether all tensors of the sample are sharded, whatever the case names."""
    return condition == "mixed placements"


def lay_out(condition, leaves, number):
    if condition != "memory orders":
        return leaves
    return [_other_order(x, number) if isinstance(x, torch.Tensor) and x.dim() > 0 else x for x in leaves]


def _other_order(x, number):
    value = x.detach()
    if number % 2 and value.dim() > 1:
        value = value.transpose(0, -1).contiguous().transpose(0, -1)
    else:
        value = torch.stack([value, value], -1).select(-1, 0)  # every second element
    return value.requires_grad_(x.requires_grad)


@contextlib.contextmanager
def autocast(condition):
    if condition != "autocast":
        yield
        return
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        yield


def called(op, condition, expected, mesh):
    """The function that is called: the operator, or the form of it that the condition is about. `expected`: its results, for `out=`; None: not known yet."""
    if condition == "in place":
        return lambda sample, *args, **kwargs: op.inplace_variant(sample.clone(), *args, **kwargs)
    if condition != "out=" or expected is None:
        return op

    def into(sample, *args, **kwargs):
        results = [torch.full_like(x, 1) for _, x in sorted(expected.items())]
        if mesh is not None:
            results = [ts.distribute_tensor(r, mesh, [ts.Shard(0)] if r.dim() else [ts.Replicate()]) for r in results]
        with torch.no_grad():
            op(sample, *args, **kwargs, out=results[0] if len(results) == 1 else tuple(results))
        return tuple(results) if len(results) > 1 else results[0]

    return into


def even(length, ranks):
    return [length // ranks + (r < length % ranks) for r in range(ranks)]


def uneven(length, ranks, turn):
    shares = [0] * ranks
    for i in range(length):
        shares[(i * i + turn) % ranks] += 1
    return shares


class Case:
    """One sample under one condition: the mesh, and where each tensor lies."""

    def __init__(self, condition, leaves, tree, which, dim, turn):
        self.condition, self.leaves, self.tree, self.which, self.dim, self.turn = condition, leaves, tree, which, dim, turn
        self.axes = {"x": 2 + turn % 2}
        self.places = {}
        tensors = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.dim() > 0]
        if condition in ("two axes", "one dim on two axes") or condition == "mixed placements" and len(tensors) == 1:
            self.axes = {"x": 2, "y": 2}
        for k, i in enumerate(tensors):
            if condition == "mixed placements" or i in which:
                self.places[i] = self._place(leaves[i], dim, k, len(tensors))

    @property
    def ranks(self):
        product = 1
        for size in self.axes.values():
            product *= size
        return product

    def _place(self, x, dim, k, tensors):
        along, n, ranks = dim % x.dim(), x.shape[dim % x.dim()], self.axes["x"]
        if self.condition == "partial":
            return [ts.Partial("sum")], {}
        if self.condition == "two axes":
            other = (along + 1) % x.dim()
            return [ts.Shard(along), ts.Shard(other) if other != along else ts.Replicate()], {along: uneven(n, 2, self.turn)}
        if self.condition == "one dim on two axes":
            return [ts.Shard(along), ts.Shard(along)], {along: uneven(n, 4, self.turn)}
        if self.condition == "mixed placements":
            if tensors == 1:
                partial = ts.Replicate() if x.dtype == torch.bool else ts.Partial("sum")
                return [ts.Shard(along), partial], {along: uneven(n, 2, self.turn)}
            along = (dim + k) % x.dim()
            return [ts.Shard(along)], {along: uneven(x.shape[along], ranks, self.turn + k)}
        if self.condition == "empty":
            return [ts.Shard(along)], {along: [n if r == self.turn % ranks else 0 for r in range(ranks)]}
        if self.condition in ("even", "integers", "bfloat16", "autocast"):
            return [ts.Shard(along)], {along: even(n, ranks)}
        return [ts.Shard(along)], {along: uneven(n, ranks, self.turn)}

    def __str__(self):
        places = (f"input {i} {list(self.leaves[i].shape)} {p} {sizes or ''}".strip() for i, (p, sizes) in self.places.items())
        return f"{self.axes}: " + "; ".join(places)

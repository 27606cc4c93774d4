"""Placements: what ranks hold of a tensor along one axis of a mesh."""

from dataclasses import dataclass


class Placement:
    """What `Replicate`, `Shard` and `Partial` are: where a tensor lies along one axis of a mesh.

    >>> rows: list[ts.Placement] = [ts.Shard(0), ts.Replicate()]
    >>> all(isinstance(p, ts.Placement) for p in rows)
    True
    """


@dataclass(frozen=True)
class Replicate(Placement):
    """Every rank of the axis holds the same.

    >>> ts.spec(ts.ones([4], mesh, ts.Replicate())).placements
    (Replicate(),)
    """

    def __repr__(self):
        return "Replicate()"

    def __str__(self):
        return "Replicate"


@dataclass(frozen=True)
class Shard(Placement):
    """The ranks of the axis hold consecutive shards of `dim`.

    >>> ts.spec(ts.ones([4, 6], mesh, ts.Shard(-1))).placements
    (Shard(dim=1),)
    """

    dim: int

    def __str__(self):
        return f"Shard({self.dim})"


@dataclass(frozen=True)
class Partial(Placement):
    """The value is `op` (sum, avg, product, min or max) over the ranks' locals.

    >>> summands = ts.run_threads(2, lambda rank: ts.from_local(torch.tensor(1.0 + rank), ts.Mesh({"data": 2}), ts.Partial()).item())
    >>> summands
    [3.0, 3.0]
    """

    op: str = "sum"

    def __str__(self):
        return f"Partial({self.op})"


@dataclass(frozen=True)
class ParameterPlacement:
    """What a rule of `distribute_module` may give: where a parameter lies, and how it is used.

    `placements`: one for each axis of the mesh. `sizes`: of sharded dims. `sequence`: (number of a mesh axis, dim) where this is the weight of a linear layer
    or an embedding whose data are sharded over that axis along that dim, as a tensor-parallel plan says. `stays`: see `stay`.

    >>> where = ts.ParameterPlacement([ts.Shard(0)], sizes={0: [16]})
    >>> net = ts.distribute_module(net, mesh, lambda name, p: where if name == "0.weight" else None)
    >>> ts.spec(net[0].weight).sizes
    {0: [16]}
    """

    placements: object
    sizes: dict | None = None
    sequence: tuple | None = None
    stays: bool = False


def stay(placements, sizes=None):
    """What a rule of `distribute_module` gives for a parameter whose rows (dim 0) are sharded and not gathered where it is used: a table of embeddings.

    >>> net = nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 1))
    >>> net = ts.distribute_module(net, mesh, lambda name, t: ts.stay([ts.Shard(0)]) if name == "0.weight" else None)
    >>> ts.spec(net[0].weight).placements
    (Shard(dim=0),)

    An embedding sends indices and rows between the ranks, and its gradient stays with the rows; other operators treat the parameter as data. In
    `fully_shard` patterns say so: `stay="table.weight"`.
    """
    return ParameterPlacement(placements, sizes, stays=True)


def _one(placement):
    """As the library reads it. torch.distributed.tensor's placements are known by their names: that module is slow to import."""
    kind = type(placement)
    if kind.__module__.startswith("torch.distributed.tensor"):
        if kind.__name__ == "Replicate":
            return "Replicate"
        if kind.__name__ == "Shard":
            return f"Shard({placement.dim})"
        if kind.__name__ == "Partial":
            return f"Partial({placement.reduce_op})"
        raise TypeError(f"{placement!r}: of torch's placements Replicate, Shard and Partial have their like here")
    if not isinstance(placement, (Placement, str)):
        raise TypeError(f"{placement!r} is no placement: Replicate(), Shard(dim) or Partial(op), one for each axis of the mesh")
    return str(placement)


def to_text(placements):
    """`placements`: one for each axis of the mesh; of a mesh of one axis it may stand without a list."""
    return [_one(p) for p in placements] if isinstance(placements, (list, tuple)) else [_one(placements)]


def from_text(text):
    kind, _, argument = text.rstrip(")").partition("(")
    if kind == "Replicate":
        return Replicate()
    return Shard(int(argument)) if kind == "Shard" else Partial(argument)

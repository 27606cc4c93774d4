"""Placements: what ranks hold of a tensor along one axis of a mesh."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Replicate:
    """Every rank of the axis holds the same."""

    def __repr__(self):
        return "Replicate()"

    def __str__(self):
        return "Replicate"


@dataclass(frozen=True)
class Shard:
    """The ranks of the axis hold consecutive shards of `dim`."""

    dim: int

    def __str__(self):
        return f"Shard({self.dim})"


@dataclass(frozen=True)
class Partial:
    """The value is `op` (sum, avg, product, min or max) over the ranks' locals."""

    op: str = "sum"

    def __str__(self):
        return f"Partial({self.op})"


def to_text(placements):
    return [str(p) for p in placements]


def from_text(text):
    kind, _, argument = text.rstrip(")").partition("(")
    if kind == "Replicate":
        return Replicate()
    return Shard(int(argument)) if kind == "Shard" else Partial(argument)

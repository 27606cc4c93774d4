"""Rules for one's own operators: what each rank computes on its shards, and where the results lie."""

import ctypes
from dataclasses import dataclass
from operator import index

from tessera._errors import RuleError
from tessera._library import ops
from tessera._placement import from_text, to_text

_RULE = ctypes.CFUNCTYPE(ctypes.c_int)
# Rules are the process' own, as operators are: never freed.
_RULES = []


@dataclass(frozen=True)
class RuleTensor:
    """A tensor of a call that a rule plans: the argument's name, its position in a list (else -1), whether it is written to, and how it lies.

    >>> def rule(call):                              # an elementwise operator with a scale for each channel
    ...     image, scale = call.tensors
    ...     return [None, [ts.Replicate()] * len(scale.placements)], [(image.placements, image.sizes)]
    >>> ts.RuleTensor("x", -1, False, (4, 8), (ts.Shard(0),), {0: [4]}).placements
    (Shard(dim=0),)
    """

    argument: str
    element: int
    written: bool
    shape: tuple
    placements: tuple
    sizes: dict


class RuleCall:
    """A call that a rule plans: global things alone, the same on all ranks. It answers while the rule runs.

    >>> @torch.library.custom_op("mylib::flip", mutates_args=())
    ... def flip(x: torch.Tensor, dims: list[int], by: float) -> torch.Tensor:
    ...     return x.flip(dims) * by
    >>> fake = flip.register_fake(lambda x, dims, by: torch.empty_like(x))
    >>> def rule(call):
    ...     x, dims = call.tensors[0], call.integers("dims")
    ...     assert call.name == "mylib::flip" and call.has("by") and call.number("by") == 2 and call.shapes == [x.shape]
    ...     keep = [p if p != ts.Shard(0) or 0 not in dims else ts.Replicate() for p in x.placements]
    ...     assert len(keep) == len(call.mesh.axes)
    ...     return [keep], [keep]
    >>> ts.register_rule("mylib::flip", rule)
    >>> flip(t, [1], 2.0)
    <ShardTensor Float [4, 8] data=Shard(0)[4], local [4, 8] at [0, 0]>
    """

    def __init__(self):
        self._tensors = tuple(RuleTensor(n, e, w, tuple(s), tuple(map(from_text, p)), {d: list(x) for d, x in z.items()}) for n, e, w, s, p, z in ops.planned_tensors())

    @property
    def name(self):
        """Of the operator, "mylib::blur"."""
        return ops.planned_name()

    @property
    def mesh(self):
        """Over which the tensors lie."""
        from tessera._api import Mesh

        return Mesh._of(ops.planned_mesh())

    @property
    def tensors(self):
        """The tensor inputs in order, lists flattened."""
        return self._tensors

    @property
    def shapes(self):
        """Global shapes of the results, as the operator's fake says; None where it has none."""
        shapes = ops.planned_shapes()
        return None if shapes is None else [tuple(shape) for shape in shapes]

    def has(self, argument):
        """True if there is such an argument and it is not None."""
        return ops.planned_has(argument)

    def integers(self, argument):
        """An argument of integers or booleans as a list; of one number a list of one."""
        return list(ops.planned_integers(argument))

    def number(self, argument):
        """A floating-point argument. The rule runs again for another one; without this it does not."""
        return ops.planned_number(argument)


def _placed(given, mesh):
    pair = isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], dict)
    placements, sizes = given if pair else (given, {})
    if placements is None:
        return [], {}
    texts = to_text(placements)
    if len(texts) != len(mesh.axes):
        axes = "1 axis" if len(mesh.axes) == 1 else f"{len(mesh.axes)} axes"
        raise RuleError(f"{len(texts)} placements for a mesh of {axes}: {placements}")
    return texts, {index(d): [index(n) for n in parts] for d, parts in sizes.items()}


def _calling(rule):
    def call():
        try:
            planned = RuleCall()
            inputs, outputs = rule(planned)
            mesh = planned.mesh
            ops.plan([_placed(p, mesh) for p in inputs], [_placed(p, mesh) for p in outputs])
            return 0
        except BaseException as error:  # no exception passes through the library
            ops.refuse_plan(f"{type(error).__name__}: {error}")
            return 1

    _RULES.append(_RULE(call))
    return ctypes.cast(_RULES[-1], ctypes.c_void_p).value


def register_rule(operator, rule, *, linear=False, reduce="sum", added=(), replaces=False):
    """Says how an operator works on sharded tensors: one of `torch.library.custom_op`, with a fake (`register_fake`), or of any library.

    >>> @torch.library.custom_op("mylib::blur", mutates_args=())
    ... def blur(x: torch.Tensor) -> torch.Tensor:                        # averages over neighbours in the last dim
    ...     return (x + x.roll(1, -1) + x.roll(-1, -1)) / 3
    >>> fake = blur.register_fake(torch.empty_like)
    >>> ts.register_rule("mylib::blur", "... w! -> ... w!", linear=True)  # the dims before the last may be sharded

    `operator`: "mylib::blur" for all overloads, "mylib::blur.out" for one. `rule` in index notation, "inputs -> outputs", one for each tensor: a dim named
    alike is the same dim; what an output lacks is reduced, by `reduce`; `w!` must not be sharded, and is gathered where it is; `n?` may have size 1 or be
    left out in front; `...` is any number of dims. `linear`: in each input by itself, so that a partial sum stays one. `added`: positions of inputs that are
    added to what is reduced (a bias).

    Or a function of a `RuleCall` that returns `(inputs, outputs)`: for each tensor the placements that it must have, None for those it has; for each result
    those that it has then, or (placements, sizes). It decides from global things alone, since all ranks must plan alike, runs once for each new combination,
    and raises where it does not cover a case.

    >>> @torch.library.custom_op("mylib::scale", mutates_args=())
    ... def scale(x: torch.Tensor, by: float) -> torch.Tensor:
    ...     return x * by
    >>> fake = scale.register_fake(lambda x, by: torch.empty_like(x))
    >>> ts.register_rule("mylib::scale", lambda call: ([None], [(call.tensors[0].placements, call.tensors[0].sizes)]))
    >>> scale(t, 2.0)
    <ShardTensor Float [4, 8] data=Shard(0)[4], local [4, 8] at [0, 0]>

    For the process, before the operator is first used; the backward of the operator is made of operators with rules of their own. Raises `InvalidArgument`
    for an operator that does not exist, `RuleError` for notation that cannot be read, and for a second rule unless `replaces`.
    """
    if callable(rule):
        if linear or added or reduce != "sum":
            raise RuleError("linear, reduce and added belong to index notation: a function says by its placements what is partial")
        ops.register_python_rule(operator, _calling(rule), replaces)
    else:
        ops.register_index_rule(operator, rule, bool(linear), reduce, [index(i) for i in added], bool(replaces))

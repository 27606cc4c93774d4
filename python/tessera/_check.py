"""Is my model safe on this mesh? Runs it sharded beside the same model on one process."""

import copy
import math
import os
import traceback
from dataclasses import dataclass, field

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tessera import _api, _html
from tessera._errors import MismatchError
from tessera._library import classes, ops
from tessera._mesh import handle_of
from tessera._placement import Replicate, Shard

_TOLERANCES = {
    torch.float64: 1e-10,
    torch.complex128: 1e-10,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 1.2e-1,
}


@dataclass
class Compared:
    """One output, or one gradient, beside that of one process."""

    name: str
    difference: float  # largest, relative to the largest value; inf where shapes, dtypes or NaNs differ
    tolerance: float
    placements: tuple  # None for what is no sharded tensor
    rounding: float = None  # the difference in the model's own dtype, where float64 decided

    @property
    def equal(self):
        return self.difference <= self.tolerance


@dataclass
class Moved:
    """What one operator of the model sent, on this rank."""

    operator: str
    calls: int = 0
    bytes: int = 0


@dataclass
class Refused:
    """An operator that refused these placements; the check went on with replicated values."""

    operator: str
    where: str  # in the model
    why: str


@dataclass(repr=False)
class Report:
    """What tessera.check() found. True where the model is safe: equal to one process, with no refusal.

    >>> report = ts.check(net.double(), x.double(), mesh)
    >>> bool(report), report.wrong, report.refused
    (True, [], [])
    >>> print(report.text(limit=1))
    safe on Mesh(...): 1 values and 5 gradients as on one process...
    """

    mesh: object
    values: list = field(default_factory=list)
    gradients: list = field(default_factory=list)
    moved: list = field(default_factory=list)  # in forward, by operator
    backward: Moved = field(default_factory=lambda: Moved("backward"))
    refused: list = field(default_factory=list)
    notes: list = field(default_factory=list)

    @property
    def wrong(self):
        """Values and gradients that are not those of one process."""
        return [one for one in self.values + self.gradients if not one.equal]

    def __bool__(self):
        return not self.wrong and not self.refused

    def __str__(self):
        return self.text()

    def __repr__(self):
        return f"<Report: {self.text(0).splitlines()[0]}>"

    def _repr_html_(self):
        return _html.of_report(self)

    def text(self, limit=10):
        """The verdict in a line, and the worst `limit` of each kind (None: all)."""
        lines = [f"{'safe' if self else 'NOT SAFE'} on {self.mesh}: {_verdict(self)}"]

        def worst_first(title, found):
            lines.extend(f"  {title}: {text}" for text in found[:limit])
            if limit is not None and len(found) > limit:
                lines.append(f"  {title}: {len(found) - limit} more (report.text(None) lists all)")

        wrong = sorted(self.wrong, key=lambda one: -one.difference)
        worst_first("differs", [f"{one.name} by {one.difference:.2g} (tolerance {one.tolerance:.0e})" for one in wrong])
        worst_first("refused", [f"{one.operator} at {one.where}: {one.why}" for one in self.refused])
        for one in self.values[:limit]:
            lines.append(f"  {one.name} lies as {_places(one)}, off by {one.difference:.2g}")
        worst = max(self.gradients, key=lambda g: g.difference, default=None)
        if worst:
            lines.append(f"  {len(self.gradients)} gradients, the worst of {worst.name}: off by {worst.difference:.2g}")
        total = sum(m.bytes for m in self.moved)
        lines.append(f"  this rank sends {_size(total)} in forward, {_size(self.backward.bytes)} in backward")
        for m in sorted(self.moved, key=lambda m: -m.bytes)[:limit]:
            lines.append(f"    {m.operator}: {_size(m.bytes)} in {m.calls} calls")
        return "\n".join(lines + [f"  note: {n}" for n in self.notes])


def _verdict(report):
    if report.refused or report.wrong:
        return f"{len(report.wrong)} of {len(report.values) + len(report.gradients)} values and gradients differ, {len(report.refused)} operators are refused"
    return f"{len(report.values)} values and {len(report.gradients)} gradients as on one process"


def _places(one):
    return "a plain tensor" if one.placements is None else list(one.placements)


def _size(n):
    for unit in ("bytes", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.4g} {unit}"
        n /= 1024
    return f"{n:.4g} GiB"


def _tensors(tree):
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def _place_in_model():
    """The line of the caller's code that called the operator."""
    not_the_model = os.path.dirname(torch.__file__), os.path.dirname(__file__)
    for frame in reversed(traceback.extract_stack()[:-2]):
        if not frame.filename.startswith(not_the_model):
            return f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
    return "unknown place"


class _Watch(TorchFunctionMode):
    """Counts what each function of torch sends, and where the model calls what is refused."""

    def __init__(self, report, trace, refusals):
        super().__init__()
        self._report, self._trace, self._refusals, self._by_name = report, trace, refusals, {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        events, refused = self._trace.count, len(self._report.refused)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            for operator, why in self._refusals.all()[refused:]:
                self._report.refused.append(Refused(operator, _place_in_model(), why))
            sent = self._trace.events[events:]
            if sent:
                self._add(getattr(func, "__name__", str(func)), sent)

    def _add(self, name, sent):
        moved = self._by_name.get(name)
        if moved is None:
            moved = self._by_name[name] = Moved(name)
            self._report.moved.append(moved)
        moved.calls += len(sent)
        moved.bytes += sum(e[2] for e in sent)


_F = torch.nn.functional
# What drops at random, as a function: the argument that says so, its place, and its default.
_DROPS = {f: ("training", 2, True) for f in (_F.dropout, _F.dropout1d, _F.dropout2d, _F.dropout3d)}
_DROPS |= {_F.alpha_dropout: ("training", 2, False), _F.feature_alpha_dropout: ("training", 2, False), torch.dropout: ("train", 2, True)}
_DROPS[_F.scaled_dot_product_attention] = ("dropout_p", 4, 0.0)


class _KeepAll(TorchFunctionMode):
    """Functions that drop at random keep everything; counts them."""

    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in _DROPS:
            name, place, default = _DROPS[func]
            share = 1.0 if name == "dropout_p" else args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            if share and (args[place] if len(args) > place else kwargs.get(name, default)):
                self.calls += 1
                if len(args) > place:
                    args = (*args[:place], type(default)(0), *args[place + 1 :])
                else:
                    kwargs[name] = type(default)(0)
        return func(*args, **kwargs)


def _largest(t):
    if t is None or not t.numel():
        return 0.0
    size = t.detach().abs().to(torch.float64)
    return torch.where(size.isfinite(), size, torch.zeros_like(size)).max().item()


def _difference(got, expected, floor):
    got = _api.full_tensor(got.detach()) if _api.is_sharded(got) else got.detach()
    expected = expected.detach()
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return float("inf")
    if not expected.numel():
        return 0.0
    if got.is_complex():
        got, expected = torch.view_as_real(got.resolve_conj()), torch.view_as_real(expected.resolve_conj())
    got, expected = got.to(torch.float64), expected.to(torch.float64)
    if not torch.equal(got.isnan(), expected.isnan()):
        return float("inf")
    same = (got == expected) | expected.isnan()
    off = torch.where(same, torch.zeros_like(got), (got - expected).abs()).max().item()
    return off / max(_largest(expected), floor, 1e-30) if off else 0.0


def _compare(name, got, expected, tolerance, floor=0.0):
    """`floor`: the least that a difference is measured by."""
    if (got is None) != (expected is None):
        return Compared(name + (" (missing)" if got is None else " (not on one process)"), float("inf"), 0.0, None)
    limit = _TOLERANCES.get(expected.dtype, 0.0) if tolerance is None else tolerance
    return Compared(name, _difference(got, expected, floor), limit, _api.spec(got).placements if _api.is_sharded(got) else None)


def _loss(outputs):
    """A number that every element of every output counts in, each with another weight."""
    total = None
    for t in outputs:
        if not t.requires_grad:
            continue
        t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
        term = (t * t.detach().cos()).sum()
        total = term if total is None else total + term
    return total


def _quiet_dropout(model, notes):
    quiet = 0
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p and module.training:
            module.eval()
            quiet += 1
        elif isinstance(module, (torch.nn.MultiheadAttention, torch.nn.RNNBase)) and module.dropout and module.training:
            module.dropout = 0.0
            quiet += 1
    if quiet and notes is not None:
        notes.append(f"{quiet} dropout layers were switched off: sharded tensors draw other random numbers than plain ones")
    return model


def check(model, inputs, mesh, placements=None, rule=None, call=None, gradients=True, tolerance=None):
    """Runs a copy of `model` on `mesh` and another on this process alone, and says what differs, what moves and what is refused.

    `inputs`: a tensor, or a list of arguments (tensors may be nested). They and the model are the same on all ranks: MismatchError names what is not,
    on every rank. `placements`: of every tensor among them, or one entry a tensor; by default dim 0 over the mesh's first axis. `rule`: as for
    distribute_module. `call(model, *inputs)` runs the model, by default `model(*inputs)`. `gradients`: those of the inputs and of every parameter too.
    `tolerance`: relative to the largest value, by default by dtype (1e-10 in float64, 1e-4 in float32). Without one, what differs by more in float32
    or less is judged in float64: rounding flips decisions of ReLU or max-pooling, on one process too. The model itself stays as it is. Collective over
    the mesh. Returns a Report, which is true where the model is safe and prints as text.

    >>> report = ts.check(net, x, mesh, ts.Shard(0))
    >>> assert report, str(report)
    """
    handle_of(mesh)
    report = Report(mesh)
    arguments = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    call = call or (lambda net, *given: net(*given))
    leaves, tree = pytree.tree_flatten(arguments)
    where = _placements_of(leaves, mesh, placements)
    _require_same(model, leaves, mesh.group())

    def run(into, net, given):
        _run(into, net, given, tree, where, rule, call, gradients, tolerance)

    run(report, model, leaves)
    rounds = any(math.isfinite(one.difference) and one.tolerance > _TOLERANCES[torch.float64] for one in report.wrong)
    # What one rank alone sees, all look at.
    if tolerance is None and any(b"y" == found for found in mesh.group().all_gather_bytes(b"y" if rounds else b"n")):
        _judge_in_float64(report, model, leaves, lambda net, wide: call(net, *pytree.tree_unflatten(wide, tree)), run)
    return report


def _require_same(model, leaves, group):
    """What is given is compared over the ranks before anything else is: a difference would read as one of the model."""
    tensors = [(f"input {i}", t) for i, t in enumerate(t for t in leaves if isinstance(t, torch.Tensor))]
    tensors += [(f"parameter '{name}'", p) for name, p in model.named_parameters()] + [(f"buffer '{name}'", b) for name, b in model.named_buffers()]
    tensors = [(name, t.detach()) for name, t in tensors if not _api.is_sharded(t) and t.layout == torch.strided]
    if group.size == 1:
        return

    def refuse(name, rank, mine, other):
        raise MismatchError(
            f"check: {name} differs between ranks {group.ranks[0]} and {group.ranks[rank]}{mine and f' ({mine} and {other})'}: give all ranks the same "
            "model and inputs, drawn with one seed (torch.manual_seed), or loaded from one file"
        )

    kinds = [text.decode().split("\n") for text in group.all_gather_bytes("\n".join(f"{tuple(t.shape)} {t.dtype}" for _, t in tensors).encode())]
    for rank, theirs in enumerate(kinds):
        if len(theirs) != len(kinds[0]):
            refuse("the number of tensors", rank, len(kinds[0]), len(theirs))
        for (name, _), mine, other in zip(tensors, kinds[0], theirs):
            if mine != other:
                refuse(name, rank, mine, other)
    same = bytearray()
    for _, t in tensors:
        bits = t.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        same.append(torch.equal(group.broadcast(bits.clone(), 0), bits) if bits.numel() else 1)
    for rank, found in enumerate(group.all_gather_bytes(same)):
        for (name, _), equal in zip(tensors, found):
            if not equal:
                refuse(name, rank, "", "")


def _run(report, model, leaves, tree, where, rule, call, gradients, tolerance):
    alone = _quiet_dropout(copy.deepcopy(model), report.notes)
    spread = _api.distribute_module(_quiet_dropout(copy.deepcopy(model), None), report.mesh, rule)

    def prepared(sharded):
        made = []
        for leaf, placed in zip(leaves, where):
            if isinstance(leaf, torch.Tensor):
                wanted = gradients and (leaf.is_floating_point() or leaf.is_complex())
                leaf = _api.distribute_tensor(leaf.detach().clone(), report.mesh, placed).detach() if sharded else leaf.detach().clone()
                leaf.requires_grad_(wanted)
            made.append(leaf)
        return made

    plain, placed = prepared(False), prepared(True)
    with _KeepAll() as kept:
        expected = _tensors(call(alone, *pytree.tree_unflatten(plain, tree)))
    if kept.calls:
        report.notes.append(f"{kept.calls} calls of dropout functions were switched off: sharded tensors draw other random numbers than plain ones")
    before, refusals = ops.policies(), classes.Refusals()
    ops.set_policies("allow", before[1], "error")
    refusals.start()
    try:
        with _api.CommTrace() as trace, _Watch(report, trace, refusals), _KeepAll():
            got = _tensors(call(spread, *pytree.tree_unflatten(placed, tree)))
        names = [f"output {i}" for i in range(len(expected))] if len(expected) > 1 else ["output"] * len(expected)
        if len(got) != len(expected):
            report.values.append(Compared(f"{len(got)} outputs instead of {len(expected)}", float("inf"), 0.0, None))
        for name, a, b in zip(names, got, expected):
            report.values.append(_compare(name, a, b, tolerance))
        loss = _loss(expected) if gradients else None
        if loss is not None:
            _differentiate(report, loss, _loss(got), (alone, spread), (plain, placed), tolerance)
        for operator, why in refusals.all()[len(report.refused) :]:
            report.refused.append(Refused(operator, "backward", why))
    finally:
        refusals.stop()
        ops.set_policies(*before)


def _judge_in_float64(report, model, leaves, run_plain, run):
    """Both sides of float32 may be off: a value is wrong if float64, which rounds a billion times less, differs too."""
    widened = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.complex64: torch.complex128}
    wide = [leaf.to(widened.get(leaf.dtype, leaf.dtype)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    net = copy.deepcopy(model).to(torch.float64)
    try:
        with torch.no_grad():
            run_plain(copy.deepcopy(net), wide)
    except Exception as error:  # the same on all ranks, which have the same model and inputs
        report.notes.append(f"the model does not run in float64, which would judge what rounding does: {error}")
        return
    reference = Report(report.mesh)
    run(reference, net, wide)
    known = {one.name: one for one in reference.values + reference.gradients}
    rounded = []
    for found in (report.values, report.gradients):
        for i, one in enumerate(found):
            judge = known.get(one.name)
            if not one.equal and math.isfinite(one.difference) and judge and judge.equal:
                found[i] = Compared(one.name, judge.difference, judge.tolerance, one.placements, one.difference)
                rounded.append(one.difference)
    if rounded:
        report.notes.append(
            f"{len(rounded)} values and gradients are as on one process in float64, and round differently in the model's own dtype, by up to {max(rounded):.2g}"
        )


def _differentiate(report, loss, sharded_loss, models, inputs, tolerance):
    loss.backward()
    if sharded_loss is not None:
        with _api.CommTrace() as trace:
            sharded_loss.backward()
        report.backward.calls, report.backward.bytes = trace.count, trace.bytes
    # A gradient that is zero but for rounding (a bias before a batch norm) is measured by a thousandth of the largest of all.
    plain = [x for x in inputs[0] if isinstance(x, torch.Tensor)] + list(models[0].parameters())
    floor = 1e-3 * max((_largest(x.grad) for x in plain), default=0.0)
    for i, (a, b) in enumerate(zip(*inputs)):
        if isinstance(a, torch.Tensor) and a.requires_grad and (a.grad is not None or b.grad is not None):
            report.gradients.append(_compare(f"gradient of input {i}", b.grad, a.grad, tolerance, floor))
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters()):
        if a.grad is not None or b.grad is not None:
            report.gradients.append(_compare(f"gradient of {name}", b.grad, a.grad, tolerance, floor))


def _placements_of(leaves, mesh, placements):
    tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
    placements = placements if placements is None or isinstance(placements, (list, tuple)) else [placements]
    nested = placements is not None and len(placements) > 0 and isinstance(placements[0], (list, tuple))
    if nested and len(placements) != len(tensors):
        raise ValueError(f"check: {len(placements)} entries of placements for {len(tensors)} tensors among the inputs")
    per_tensor, where = iter(placements if nested else ()), []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            where.append(None)
        elif nested:
            where.append(next(per_tensor))
        elif placements is not None:
            where.append(placements)
        else:
            first = Shard(0) if leaf.dim() else Replicate()
            where.append([first] + [Replicate()] * (len(mesh.axes) - 1))
    return where

"""One operator of PyTorch's operator database on sharded inputs, beside plain libtorch: value, gradients, second derivatives.

A case is a condition (conditions.py), a sample of the operator's inputs, the tensors of it that are sharded, and the dim. The ranks are threads. What is
asked of every case: the outcome is `equal`, `extra` (equal, but shards moved because the operator needed it), or a `refused` whose message speaks of
placements. Everything else is a fault: `wrong`, `error` (an error that does not say that sharding is the matter), `hung` (ranks waited for each other in
vain). `skipped`: a sample that plain libtorch refuses under the condition, or that the operator does not have.
"""

import re
import warnings
from dataclasses import dataclass

import torch
from torch.testing._internal.common_utils import set_rng_seed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

import tessera as ts
from conditions import CONDITIONS, Case, autocast, called, dtype_for, lay_out, needs_several

TOLERANCE = 1e-10
WAIT = 60.0  # seconds that ranks wait for each other
# Contents are not defined, only shape and dtype are.
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
RULE_FAILED = re.compile(r"the rule that made it does not hold|the rule of aten")
SPEAKS_OF_SHARDING = re.compile(r"Shard\(|Partial\(|Replicate|ShardTensor|[Ss]harded|[Rr]edistribut")


@dataclass
class Outcome:
    kind: str  # equal, extra, refused, wrong, error, hung
    text: str = ""


class _Seeded(TorchDispatchMode):
    """Sees whether random numbers are drawn."""

    random = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def leaf(tensor):
    """A copy with the same strides, as a leaf."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype) if _dense(tensor) else tensor.detach().clone()
    copy.copy_(tensor.detach())
    return copy.requires_grad_(tensor.requires_grad)


def _dense(tensor):
    if tensor.is_conj() or tensor.is_neg():
        return False
    expected = 1
    for stride, size in sorted((st, n) for st, n in zip(tensor.stride(), tensor.shape) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _tensors(tree):
    return [x for x in tree_flatten(tree)[0] if isinstance(x, torch.Tensor)]


def _differentiable(tensors):
    return [t for t in tensors if t.requires_grad]


def cotangent(index, tensor):
    generator = torch.Generator().manual_seed(17 + index)
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)


def like(value, tensor):
    """`value` placed as `tensor` is, partial axes replicated."""
    if not ts.is_sharded(tensor):
        return value
    spec = ts.spec(tensor)
    placements = [ts.Replicate() if isinstance(p, ts.Partial) else p for p in spec.placements]
    return ts.distribute_tensor(value, spec.mesh, placements, spec.sizes)


def evaluate(function, leaves, tree, gradients, second):
    """Results, gradients and second derivatives, by name. None stands for an undefined gradient."""
    sample, args, kwargs = tree_unflatten(leaves, tree)
    out = function(sample, *args, **kwargs)
    named = {f"result {i}": x for i, x in enumerate(tree_flatten(out)[0])}
    if not gradients:
        return named
    inputs = _differentiable(x for x in leaves if isinstance(x, torch.Tensor))
    outputs = [t for t in _tensors(out) if t.requires_grad]
    if not inputs or not outputs:
        return named
    weights = [like(cotangent(i, t), t) for i, t in enumerate(outputs)]
    first = torch.autograd.grad(outputs, inputs, weights, allow_unused=True, create_graph=second)
    named |= {f"gradient {i}": g for i, g in enumerate(first)}
    if second:
        again = [g for g in first if g is not None and g.requires_grad]
        if again:
            twice = torch.autograd.grad(again, inputs, [like(cotangent(9 + i, g), g) for i, g in enumerate(again)], allow_unused=True)
            named |= {f"second derivative {i}": g for i, g in enumerate(twice)}
    return named


def whole(x):
    if isinstance(x, torch.Tensor):
        x = x.detach()
        return (ts.full_tensor(x) if ts.is_sharded(x) else x).resolve_conj().resolve_neg()
    return x


def magnitude(trees):
    """The largest finite value, as a scale below which numbers are rounding errors."""
    largest = 0.0
    for x in trees:
        if isinstance(x, torch.Tensor) and x.numel() and (x.is_floating_point() or x.is_complex()):
            x = x.detach().abs()
            largest = max(largest, torch.where(torch.isfinite(x), x, torch.zeros_like(x)).max().item())
    return largest


def difference(got, expected, values, floor=0.0, tolerance=TOLERANCE):
    """Why they are not equal, or ''. `expected` of an undefined gradient is None, which zeros equal too. `floor`: the least scale."""
    if expected is None and isinstance(got, torch.Tensor):
        return "" if not got.any() else "defined where plain libtorch has none"
    if got is None and isinstance(expected, torch.Tensor):
        return "" if not expected.any() else "undefined where plain libtorch has one"
    if not isinstance(expected, torch.Tensor):
        return "" if got == expected or (got != got and expected != expected) else f"{got} instead of {expected}"
    if not isinstance(got, torch.Tensor):
        return f"{type(got).__name__} instead of a tensor"
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{got.dtype} {list(got.shape)} instead of {expected.dtype} {list(expected.shape)}"
    if expected.layout != torch.strided or got.layout != torch.strided:
        return "" if got.layout == expected.layout else f"layout {got.layout} instead of {expected.layout}"
    if not values or expected.numel() == 0:
        return ""
    wide = torch.complex128 if expected.is_complex() else torch.float64
    g, e = got.to(wide), expected.to(wide)
    same = (g == e) | (torch.isnan(g) & torch.isnan(e))
    if bool(same.all()):
        return ""
    finite = torch.where(torch.isfinite(e), e, torch.zeros_like(e))
    off = (torch.where(same, torch.zeros_like(g), g - e)).abs().max().item() / max(finite.abs().max().item(), floor, 1e-30)
    return "" if off <= tolerance else f"off by {off:.1e} of the largest value"


def samples_of(op, condition, limit):
    """Samples of strided tensors, spread over the operator's list; how many were left out because they are of another kind, and where the generator of
    samples ended with an error: its text (which counts as one)."""
    dtype = dtype_for(op, condition)
    if dtype is None:
        return [], 0, ""
    gradients = op.supports_autograd and dtype in (op.backward_dtypes or ()) and dtype.is_floating_point | dtype.is_complex
    gradients &= condition not in ("out=", "integers")
    all_samples, failed = [], ""
    set_rng_seed(1234)  # those that are drawn before the first is asked for: else by what the process did before
    try:
        for sample in op.sample_inputs("cpu", dtype, requires_grad=gradients):
            all_samples.append(sample)
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"[:200]
    kept = []
    for sample in all_samples:
        tensors = _tensors((sample.input, sample.args, sample.kwargs))
        if any(t.layout != torch.strided or t.is_quantized for t in tensors) or not any(t.dim() > 0 for t in tensors):
            continue
        if condition == "in place" and (not isinstance(sample.input, torch.Tensor) or sample.broadcasts_input):
            continue
        kept.append((sample.input, tuple(sample.args), dict(sample.kwargs)))
    left_out = len(all_samples) - len(kept) + bool(failed)
    if len(kept) > limit:
        kept = [kept[(i * (len(kept) - 1)) // max(limit - 1, 1)] for i in range(limit)]
    return kept, left_out, failed


def cases_of(leaves):
    """(which leaves, dim): each tensor alone, and with all those of its shape."""
    where = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.dim() > 0]
    cases = []
    for i in where:
        alike = [j for j in where if leaves[j].shape == leaves[i].shape]
        for dim in range(leaves[i].dim()):
            cases.append(((i,), dim))
            if len(alike) > 1 and alike[0] == i:
                cases.append((tuple(alike), dim))
    return cases


_randn, _rand = torch.randn, torch.rand


def _of_rank(draw):
    """torch.randn and torch.rand with a generator of each call's own, seeded alike, as ranks in processes of their own have."""

    def drawn(*size, generator=None, **options):
        return draw(*size, generator=generator or torch.Generator().manual_seed(5), **options)

    return drawn


def run_case(op, case, policy, gradients, second, random, expected, alone=False):
    """What each rank saw; raises what the ranks raised. `alone`: on a mesh of one rank, all tensors replicated."""

    def body(rank):
        ts.set_policies(policy, "allow")
        ts.manual_seed(3)
        mesh = ts.Mesh({"x": 1} if alone else case.axes)
        mine = []
        for i, x in enumerate(case.leaves):
            if not isinstance(x, torch.Tensor):
                mine.append(x)
                continue
            copy = leaf(x)
            placed = case.places.get(i)
            if alone or (random and not placed):  # what is drawn from plain tensors is each rank's own
                placed = ([ts.Replicate()] * len(mesh.axes), {})
            if placed:
                copy = ts.distribute_tensor(copy.detach(), mesh, *placed).detach().requires_grad_(x.requires_grad)
            mine.append(copy)
        with autocast(case.condition):
            found = evaluate(called(op, case.condition, expected, mesh), mine, case.tree, gradients, second)
        return {name: whole(x) for name, x in found.items()}

    torch.randn, torch.rand = _of_rank(_randn), _of_rank(_rand)
    try:
        return ts.run_threads(1 if alone else case.ranks, body, timeout=WAIT)
    finally:
        torch.randn, torch.rand = _randn, _rand


def tolerance_of(case, values):
    """By the coarsest floating-point dtype that takes part."""
    dtypes = {x.dtype for x in values if isinstance(x, torch.Tensor)}
    if case.condition == "autocast" or torch.bfloat16 in dtypes:
        return 1.2e-1  # partial sums are rounded to 8 bits before they are added
    return 1e-5 if dtypes & {torch.float32, torch.complex64} else TOLERANCE


def judge(op, case, expected, random, second):
    gradients = any(name.startswith("gradient") for name in expected)
    moves = False

    def attempt(policy, alone=False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run_case(op, case, policy, gradients, second, random, expected, alone)

    try:
        try:
            got = attempt("error")
        except Exception as error:
            if "Redistribute explicitly before the call" not in str(error):
                raise
            moves = True
            got = attempt("allow")
        if random:
            expected = attempt("allow", alone=True)[0]
    except Exception as error:
        text = " ".join(str(error).split())
        if re.search(r"time limit|timed out|did not arrive|waited", text):
            return Outcome("hung", text[:300])
        if SPEAKS_OF_SHARDING.search(text) and not RULE_FAILED.search(text):
            return Outcome("refused", text[:300])
        return Outcome("error", f"{type(error).__name__}: {text[:300]}")
    floor = 1e-4 * magnitude([*case.leaves, *expected.values()])
    tolerance = tolerance_of(case, [*case.leaves, *expected.values()])
    for rank, values in enumerate(got):
        if values.keys() != expected.keys():
            return Outcome("wrong", f"results {sorted(values)} instead of {sorted(expected)}")
        for name, value in values.items():
            why = difference(value, expected[name], op.name not in UNDEFINED, floor, tolerance)
            if why and another_of_equals(op, case, name, value, expected[name]):
                continue
            if why and not (why.startswith("off by") and not random and is_rounding(op, case, second, name, value, expected[name])):
                return Outcome("wrong", f"{name} on rank {rank}: {why}")
    return Outcome("extra" if moves else "equal")


def another_of_equals(op, case, name, value, expected):
    """Whether other elements of the same values were chosen, each once: of equal ones libtorch leaves open which."""
    if op.name != "topk" or name != "result 1" or not isinstance(value, torch.Tensor) or value.shape != expected.shape:
        return False
    sample, args, kwargs = tree_unflatten(case.leaves, case.tree)
    dim = args[1] if len(args) > 1 else kwargs.get("dim", -1)
    once = bool((value.sort(dim).values.diff(dim=dim) != 0).all()) if value.dim() else True
    return once and torch.equal(sample.detach().gather(dim, value), sample.detach().gather(dim, expected))


def is_rounding(op, case, second, name, value, expected):
    return ill_conditioned(op, case, second, name, value, expected) or nearer_to_double(op, case, second, name, value, expected)


def nearer_to_double(op, case, second, name, value, expected):
    """Of narrow dtypes and autocast: whether plain libtorch's own value is as far or farther from what it gives in float64."""
    wide = {torch.float32: torch.float64, torch.bfloat16: torch.float64, torch.float16: torch.float64, torch.complex64: torch.complex128}
    if not any(isinstance(x, torch.Tensor) and x.dtype in wide for x in case.leaves) or case.condition == "out=":
        return False
    leaves = [
        x.detach().to(wide.get(x.dtype, x.dtype)).requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in case.leaves
    ]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exact = whole(evaluate(called(op, case.condition, None, None), leaves, case.tree, True, second).get(name))
    except Exception:
        return False
    if not isinstance(exact, torch.Tensor) or exact.shape != expected.shape:
        return False
    finite = torch.isfinite(exact)
    if not finite.any() or not torch.equal(finite, torch.isfinite(value)) or not torch.equal(finite, torch.isfinite(expected)):
        return False
    off, plain_off = ((x.to(exact.dtype) - exact)[finite].abs().max().item() for x in (value, expected))
    return off <= plain_off


def ill_conditioned(op, case, second, name, value, expected):
    """Whether plain libtorch itself changes as much when its inputs change in the last digit."""
    change = 0.0
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        moved = []
        for x in case.leaves:
            if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()):
                real = torch.empty(0, dtype=x.dtype).real.dtype if x.is_complex() else x.dtype
                digits = torch.finfo(real).eps * torch.randint(-2, 3, x.shape, generator=generator).to(real)
                grown = x.detach() * (1 + digits)
                x = grown.requires_grad_(x.requires_grad)
            moved.append(leaf(x) if isinstance(x, torch.Tensor) else x)
        try:
            other = whole(plain_results(op, case, moved, True, second).get(name))
        except Exception:
            return False
        if isinstance(other, torch.Tensor) and other.shape == expected.shape:
            change = max(change, (other - expected).abs().nan_to_num().max().item())
    return (value - expected).abs().nan_to_num().max().item() <= 10 * change


def plain_results(op, case, leaves, gradients, second, expected=None):
    with warnings.catch_warnings(), autocast(case.condition):
        warnings.simplefilter("ignore")
        return evaluate(called(op, case.condition, expected, None), leaves, case.tree, gradients, second)


def plain_of(op, case, second):
    """What plain libtorch gives and whether it draws random numbers; None if it throws."""
    copies = [leaf(x) if isinstance(x, torch.Tensor) else x for x in case.leaves]
    try:
        mode, expected = _Seeded(), None
        with mode:
            named = plain_results(op, case, copies, False, False)
        if case.condition == "out=":
            expected = {n: whole(x) for n, x in named.items()}
        copies = [leaf(x) if isinstance(x, torch.Tensor) else x for x in case.leaves]
        named = plain_results(op, case, copies, True, second, expected)
        return {n: whole(x) for n, x in named.items()}, mode.random
    except Exception:
        return None


def sweep_operator(op, samples=5, limit=60, conditions=CONDITIONS):
    """By condition {outcome: count}, and the first text of each outcome other than equal. `limit`: of cases, per condition."""
    counts, texts, turn = {}, {}, 0
    for condition in conditions:
        mine = counts[condition] = {}
        dim_cases = []
        drawn, left_out, failed = samples_of(op, condition, samples)
        if failed:
            texts.setdefault("none", failed)
        for sample in drawn:
            leaves, tree = tree_flatten(sample)
            for which, dim in cases_of(leaves):
                if not needs_several(condition) or len(which) == 1:
                    dim_cases.append((leaves, tree, which, dim))
        if len(dim_cases) > limit:
            dim_cases = [dim_cases[(i * (len(dim_cases) - 1)) // max(limit - 1, 1)] for i in range(limit)]
        if left_out:
            mine["skipped"] = left_out
        for number, (leaves, tree, which, dim) in enumerate(dim_cases):
            turn += 1
            second = bool(op.supports_gradgrad) and condition not in ("autocast", "bfloat16")
            second &= condition == "double backward" or number % 3 == 0
            if condition == "double backward" and not second:
                plain = None
            else:
                case = Case(condition, lay_out(condition, leaves, number), tree, which, dim, turn)
                plain = plain_of(op, case, second) if case.places else None
                if plain is None and second and condition != "double backward":
                    second = False  # some samples of an operator have none
                    plain = plain_of(op, case, False)
            if plain is None:
                mine["skipped"] = mine.get("skipped", 0) + 1
                continue
            outcome = judge(op, case, *plain, second)
            mine[outcome.kind] = mine.get(outcome.kind, 0) + 1
            if outcome.kind not in ("equal", "extra"):
                texts.setdefault(outcome.kind, f"{outcome.text} ({condition}: {case})")
    return counts, texts

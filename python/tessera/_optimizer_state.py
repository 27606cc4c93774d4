"""The state of torch's optimizers in a checkpoint, laid out as C++ lays out its own: by the names of the parameters."""

import hashlib
import json

import torch

from tessera._errors import InvalidArgument
from tessera._library import ops
from tessera._parallel import zeros
from tessera._placement import Replicate, Shard, from_text
from tessera._state import parameter_label
from tessera._torch_objects import is_dtensor
from tessera._values import as_json, decode, real_bytes, real_from

# Of a group, what is no option of its own.
_NO_OPTIONS = ("params", "param_names")
# Numbers about a parameter that torch's optimizers keep in memory of the host, unless they are capturable or fused.
_ON_HOST = ("step", "mu_product", "eta", "mu")


def _reals(group):
    """The options that C++ has, as it names them."""
    reals = {}
    for name, value in group.items():
        if name == "betas":
            reals["beta1"], reals["beta2"] = map(float, value)
        elif isinstance(value, (bool, int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            reals[name] = float(value)
    return reals


def _from_reals(group, read):
    """The options of `group` with the values that C++ kept."""
    options = {}
    for name, value in group.items():
        if name == "betas":
            numbers = [read("beta1"), read("beta2")]
            options[name] = value if None in numbers else tuple(numbers)
        elif name not in _NO_OPTIONS and (number := read(name)) is not None:
            # A decay of 0 is an integer by default: it is one no longer where C++ has 0.1.
            kept = bool(number) if isinstance(value, bool) else int(number) if isinstance(value, int) and number.is_integer() else number
            options[name] = torch.full_like(value, number) if isinstance(value, torch.Tensor) else kept
    return options


def _laid_out_like(parameter, shape, dtype):
    """Zeros on the mesh of a sharded parameter: dims as long as its own, all or its first ones, are sharded as its own, others replicated."""
    spec = ops.spec(parameter)
    first = list(shape) == list(parameter.shape[: len(shape)])
    same = [d for d in range(len(shape)) if (first or len(shape) == parameter.dim()) and shape[d] == parameter.shape[d]]
    placements = [p if isinstance(p, Shard) and p.dim in same else Replicate() for p in map(from_text, spec.placements())]
    sizes = {d: list(parts) for d, parts in spec.sizes().items() if Shard(d) in placements}
    from tessera._api import Mesh

    return zeros(shape, Mesh._of(spec.mesh()), placements, sizes, dtype)


class OptimizerPart:
    """Moments as tensors laid out like their parameters; steps and the options of the groups as values."""

    kind = "optimizer"

    def __init__(self, key, optimizer, state):
        self.key, self.thing, self._prefix = key, optimizer, f"{key}."
        self._modules = {k: dict(v.named_parameters(remove_duplicate=False)) for k, v in state.items() if isinstance(v, torch.nn.Module)}
        tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
        if tensors:
            self._modules[""] = tensors
        self._group_of, self._parameters = {}, []
        for g, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                if p not in self._group_of:
                    self._group_of[p] = g
                    self._parameters.append(p)

    def _names(self):
        """The names of each parameter, the one that is saved first: those within the first module that has all of them, else those in the state."""
        long = {}
        for k, named in self._modules.items():
            inner = {}
            for name, p in named.items():
                inner.setdefault(p, []).append(name)
                long.setdefault(p, []).append(f"{k}.{name}" if k else name)
            if k and all(p in inner for p in self._parameters):
                return {p: inner[p] for p in self._parameters}, {p: [f"{k}.{name}" for name in inner[p]] for p in self._parameters}
        for position, p in enumerate(self._parameters):
            if p not in long:
                raise InvalidArgument(
                    f"parameter {position} of the optimizer '{self.key}', of shape {list(p.shape)}, is in no module of the state: give the module with it"
                )
        return long, long

    # ---- saving ----

    def save(self, out):
        names, _ = self._names()
        prefix, groups = self._prefix, self.thing.param_groups
        out.kind(self.key, self.kind)
        out.value(f"{prefix}kind", type(self.thing).__name__.encode())
        by_group = [[] for _ in groups]
        for p in self._parameters:
            by_group[self._group_of[p]].append(names[p][0])
        text = json.dumps(by_group, ensure_ascii=False, separators=(",", ":")).encode()
        # Ranks whose optimizers are over other parameters than each other add one each.
        out.value(f"{prefix}parameters.{hashlib.sha256(text).hexdigest()[:16]}", text)
        out.value(f"{prefix}groups", str(len(groups)).encode())
        for g, group in enumerate(groups):
            for name, number in _reals(group).items():
                out.value(f"{prefix}group{g}.{name}", real_bytes(number))
            options = {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in group.items() if name not in _NO_OPTIONS}
            out.value(f"{prefix}group{g}.options", as_json(options, f"{prefix}group{g}"))
        for p in self._parameters:
            for field, value in self.thing.state.get(p, {}).items():
                self._save_field(out, f"{prefix}{names[p][0]}.{field}", field, value)

    def _save_field(self, out, name, field, value):
        if field == "step" and isinstance(value, torch.Tensor) and value.numel() == 1 and float(value) == int(value):
            out.value(name, str(int(value)).encode())
            # C++ counts steps in integers; here they are tensors with most optimizers.
            out.value(f"{self._prefix}step", str(value.dtype).encode())
        elif isinstance(value, torch.Tensor):
            out.tensor(name, value)
        elif value is not None:
            out.value(name, as_json(value, name, out.tensor))

    # ---- loading ----

    def plan(self, saved):
        self._state, self._options = {}, []
        kind = saved.values.get(f"{self._prefix}kind")
        if kind is None:
            return saved.lacks(self.key)
        if kind.decode() != type(self.thing).__name__:
            raise InvalidArgument(f"the optimizer '{self.key}' of the checkpoint is {kind.decode()}, this one is {type(self.thing).__name__}")
        there = saved.groups_of.get(self.key, {})  # none where C++ kept no names, long ago
        short, long = self._names()
        # C++'s trainer names the parameters of its only module with the module's name, too.
        names = long if any(name in there for of_one in long.values() for name in of_one) else short
        self._compare(saved, there, names)
        known = {name: p for p, of_one in names.items() for name in of_one}
        self._state = {p: {} for p in self._parameters}
        for name in [*saved.tensors, *saved.values]:
            if not name.startswith(self._prefix):
                continue
            owner, field = self._split(name[len(self._prefix) :], known)
            if owner in known and name in saved.tensors:
                self._plan_tensor(saved, name, known[owner], field)
            elif owner in known:
                self._plan_value(saved, name, known[owner], field)
        self._plan_options(saved)

    @staticmethod
    def _split(name, known):
        """A parameter's name and the field's, which may have dots as well."""
        at = name.rfind(".")
        while at > 0 and name[:at] not in known:
            at = name.rfind(".", 0, at)
        return (name[:at], name[at + 1 :]) if at > 0 else ("", name)

    def _compare(self, saved, there, names):
        label = lambda name: parameter_label(self.key, name)  # noqa: E731
        for p, of_one in names.items():
            found = [name for name in of_one if name in there]
            saved.wanted.update(map(label, found))
            if there and not found:
                saved.misfits.append(f"{label(of_one[0])} is not in the checkpoint")
            for name in found:
                if there[name] != self._group_of[p]:
                    saved.misfits.append(f"{label(name)} is in group {there[name]} in the checkpoint and in group {self._group_of[p]} here")

    def _host(self, p):
        group = self.thing.param_groups[self._group_of[p]]
        return p.device if group.get("capturable") or group.get("fused") else torch.device("cpu")

    def _plan_tensor(self, saved, name, p, field):
        meta = saved.tensors[name]
        if field in _ON_HOST and not meta.dim() and name not in saved.sharded:
            fresh = torch.zeros(meta.shape, dtype=meta.dtype, device=self._host(p))
        elif meta.shape == p.shape:
            fresh = torch.zeros_like(p, dtype=meta.dtype, requires_grad=False)
        elif is_dtensor(p):
            raise InvalidArgument(f"'{name}' of shape {list(meta.shape)} belongs to a DTensor of shape {list(p.shape)}: of DTensors what has their shape is kept")
        elif ops.is_sharded(p):
            fresh = _laid_out_like(p, list(meta.shape), meta.dtype)
        else:
            fresh = torch.zeros(meta.shape, dtype=meta.dtype, device=p.device)
        saved.made(name, fresh)
        if "." not in field:  # else an element of a value, which finds it by its name
            self._state[p][field] = lambda: fresh

    def _plan_value(self, saved, name, p, field):
        data, dtype = saved.values[name], saved.values.get(f"{self._prefix}step", b"").decode()
        if field == "step" and (dtype or not saved.kind(self.key)):
            kept = getattr(torch, dtype.partition(".")[2], None) or (torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32)
            step = torch.tensor(decode("integer", data, name), dtype=kept, device=self._host(p))
            self._state[p][field] = lambda: step
        else:
            # Its tensors are found among those of this parameter.
            self._state[p][field] = lambda: decode("json", data, name, saved.tensors_made)

    def _plan_options(self, saved):
        groups = self.thing.param_groups
        count = decode("integer", saved.values[f"{self._prefix}groups"], f"{self._prefix}groups")
        if count != len(groups):
            saved.misfits.append(f"'{self.key}' has {count} parameter groups in the checkpoint and {len(groups)} here")
            return
        for g, group in enumerate(groups):
            prefix = f"{self._prefix}group{g}."
            if f"{prefix}options" in saved.values:
                self._options.append(decode("json", saved.values[f"{prefix}options"], f"{prefix}options"))
            else:
                self._options.append(_from_reals(group, lambda name: real_from(saved.values[prefix + name]) if prefix + name in saved.values else None))  # noqa: B023

    def commit(self):
        for group, options in zip(self.thing.param_groups, self._options):
            for name, value in options.items():
                current = group.get(name)
                group[name] = torch.full_like(current, value) if isinstance(current, torch.Tensor) else value
        for p, fields in self._state.items():
            if fields:
                self.thing.state[p] = {field: value() for field, value in fields.items()}
            else:
                self.thing.state.pop(p, None)
        return self.thing

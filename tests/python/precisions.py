"""Precisions of one's own: rounding at random, master weights, and wrong ones."""

import contextlib

import torch

import tessera as ts


def rounded(values, chance):
    """To multiples of 2^-8 of its power of two, up or down by chance: the mean is the value."""
    unit = torch.exp2(torch.frexp(values).exponent.double() - 8)
    return torch.floor(values / unit + chance) * unit


def drawn(step, number, shape):
    """The same on all ranks, however a parameter is sharded."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(1000 * step + number), dtype=torch.float64)


class Stochastic(ts.PrecisionPlugin):
    """Parameters have the eight bits of bfloat16."""

    def __init__(self):
        self.steps = self.clipped = self.entered = self.left = 0

    def name(self):
        return "stochastic"

    @contextlib.contextmanager
    def forward_scope(self, device):
        assert device == torch.device("cpu")
        self.entered += 1
        yield
        self.left += 1

    def loss_scale(self):
        return 3

    def update(self, overflow):
        assert overflow is False
        self.steps += 1

    def clip(self, parameters, max_norm, norm_type):
        assert (len(parameters), max_norm, norm_type) == (4, 0.3, 2.0)
        self.clipped += 1
        return super().clip(parameters, max_norm, norm_type)

    def step(self, optimizer, closure=None):
        assert closure is None and not torch.is_grad_enabled()
        super().step(optimizer, closure)
        for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            chance, here = drawn(self.steps, number, p.shape), p
            if ts.is_sharded(p):
                here, spec = ts.to_local(p), ts.spec(p)
                for d in range(p.dim()):
                    chance = chance.narrow(d, spec.local_offset[d], spec.local_shape[d])
            here.copy_(rounded(here, chance))

    def add_state(self, state):
        state["rounding"] = self.steps

    def restore(self, state):
        self.steps = state["rounding"]


class Masters(ts.PrecisionPlugin):
    """Computes in float32 and steps in float64: parameters of that width are kept beside."""

    def __init__(self):
        self.masters = {}

    def name(self):
        return "masters"

    def convert_modules(self, modules):
        pairs = ((f"{name}.{p}", t) for name, module in modules.items() for p, t in module.named_parameters())
        self.masters = {name: (p, p.detach().double()) for name, p in pairs}

    def step(self, optimizer, closure=None):
        for p, master in self.masters.values():
            gradient, p.grad = p.grad, None
            p.data, p.grad = master, gradient.double()
        super().step(optimizer, closure)
        for p, master in self.masters.values():
            p.grad = None
            p.data = master.float()

    def add_state(self, state):
        state.update((f"master.{name}", master) for name, (_, master) in self.masters.items())


def overriding(**functions):
    """A precision with these functions, which take what they are given."""
    own = {hook: (lambda function: lambda self, *given: function(*given))(f) for hook, f in functions.items()}
    return type("Own", (ts.PrecisionPlugin,), {"name": lambda self: "own", **own})()


class Unsound(ts.PrecisionPlugin):
    """Does what it says to these modules."""

    def __init__(self, change):
        self.change = change

    def name(self):
        return "unsound"

    def convert_modules(self, modules):
        return self.change(modules["net"])


class Numbered(ts.PrecisionPlugin):
    loss_scale = 2.0

    def name(self):
        return "numbered"

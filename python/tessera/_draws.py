"""Functions of torch that draw random numbers of their own: for sharded arguments every rank draws the same."""

import functools

import torch
from torch.overrides import TorchFunctionMode

from tessera._library import ops

_FILLED_BY = {torch.empty: None, torch.rand: torch.Tensor.uniform_, torch.randn: torch.Tensor.normal_}


def empty_beside(tensor, shape, dtype=None):
    """Of this shape, sharded as `tensor` is where it repeats its dims; else replicated."""
    shape, dims = tuple(shape), tensor.dim()
    if len(shape) >= dims and shape[len(shape) - dims :] == tuple(tensor.shape):
        return torch.empty_like(tensor.detach().expand(shape), dtype=dtype, memory_format=torch.contiguous_format)
    return tensor.new_empty(shape, dtype=dtype)


class _Beside(TorchFunctionMode):
    """What the function makes to draw into is a sharded tensor, as its argument is: the draws of sharded tensors agree."""

    def __init__(self, tensor):
        super().__init__()
        self._tensor = tensor

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function not in _FILLED_BY or not kwargs.keys() <= {"size", "dtype", "device"} or not (args or "size" in kwargs):
            return function(*args, **kwargs)
        sizes = kwargs.get("size", args[0] if args and not isinstance(args[0], int) else args)
        made = empty_beside(self._tensor, sizes, kwargs.get("dtype") or torch.get_default_dtype())
        fill = _FILLED_BY[function]
        return fill(made) if fill else made


def _agreeing(function, given):
    @functools.wraps(function)
    def drawn(*args, **kwargs):
        sharded = next((t for t in given(*args, **kwargs) if isinstance(t, torch.Tensor) and ops.is_sharded(t)), None)
        if sharded is None:
            return function(*args, **kwargs)
        with _Beside(sharded):
            return function(*args, **kwargs)

    return drawn


def _classes(of):
    return {of}.union(*map(_classes, of.__subclasses__()))


def draw_alike():
    """Makes torch's distributions and the random methods of linear algebra draw so."""
    for each in _classes(torch.distributions.Distribution):
        for name in ("rsample", "sample"):
            if name in vars(each):
                setattr(each, name, _agreeing(vars(each)[name], lambda self, *_, **__: vars(self).values()))
    for name in ("svd_lowrank", "pca_lowrank", "lobpcg"):
        drawn = _agreeing(getattr(torch, name), lambda *args, **kwargs: (*args, *kwargs.values()))
        setattr(torch, name, drawn)

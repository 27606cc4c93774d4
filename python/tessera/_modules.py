"""Modules of torch.nn as the library sees them."""

from torch import nn
from torch.nn.parameter import is_lazy

from tessera._errors import InvalidArgument
from tessera._library import classes

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def module_tree(module, every_name=True):
    """The names of `module` over its own parameters and buffers, which the library then replaces in place. `every_name`: tied ones under each of theirs."""
    once = not every_name
    modules = list(module.named_modules(remove_duplicate=once))
    parameters, buffers = list(module.named_parameters(remove_duplicate=once)), list(module.named_buffers(remove_duplicate=once))
    for name, tensor in parameters + buffers:
        if is_lazy(tensor):
            raise InvalidArgument(f"'{name}' has no shape yet: call the module once, on any input, before it is sharded or wrapped")
    lists = [name for name, m in modules if isinstance(m, _LISTS)]
    tensors = parameters + buffers
    return classes.ModuleTree([n for n, _ in modules], lists, [n for n, _ in tensors], [t for _, t in tensors], len(parameters))


def names(given):
    """Names or patterns, of which one alone may stand without a list."""
    return [given] if isinstance(given, str) else list(given)

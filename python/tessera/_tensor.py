"""What Python reads from a tensor's memory: a sharded tensor has none of the global shape, so that it answers, or says what to do."""

import functools

import torch

from tessera import _api

_KEY = torch._C.DispatchKey.PrivateUse2


def _sharded(tensor):
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and torch._C._dispatch_keys(tensor).has(_KEY)


def _instead(name, answer):
    plain = getattr(torch.Tensor, name)

    @functools.wraps(plain)
    def method(self, *args, **kwargs):
        return answer(self, *args, **kwargs) if _sharded(self) else plain(self, *args, **kwargs)

    setattr(torch.Tensor, name, method)


def _refuse(what, way_out):
    def answer(tensor, *_, **__):
        raise RuntimeError(f"{what} a ShardTensor: its parts lie on several ranks. {way_out} ({_api.summary(tensor)})")

    return answer


def _deepcopy(tensor, memo):
    if id(tensor) not in memo:
        if tensor.grad_fn is not None:
            raise RuntimeError("Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment")
        with torch.no_grad():
            copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        memo[id(tensor)] = copy
    return memo[id(tensor)]


_WHOLE = "tessera.full_tensor(t) gives the whole value on every rank (collective), tessera.to_local(t) this rank's part"

_instead("__repr__", lambda t, **_: f"<{_api.summary(t)}>")
_instead("__format__", lambda t, spec: format(t.item(), spec) if t.dim() == 0 else f"<{_api.summary(t)}>")
_instead("__reduce_ex__", _refuse("cannot pickle or torch.save", f"Save plain tensors: {_WHOLE}"))
_instead("__deepcopy__", _deepcopy)
_instead("numpy", _refuse("numpy() of", _WHOLE))
_instead("__array__", _refuse("numpy() of", _WHOLE))
_instead("tolist", lambda t: t.item() if t.dim() == 0 else _refuse("tolist() of", _WHOLE)(t))
_instead("data_ptr", _refuse("data_ptr() of", "tessera.to_local(t) has memory of its own"))
_instead("untyped_storage", _refuse("untyped_storage() of", "tessera.to_local(t) has memory of its own"))

"""What Python reads from a tensor's memory: a sharded tensor has none of the global shape, so that it answers, or says what to do."""

import copy as copy_module
import copyreg
import functools
import weakref

import torch

from tessera import _api, _html
from tessera._draws import draw_alike, empty_beside
from tessera._errors import GradientError, ShardingError
from tessera._library import classes, ops
from tessera._placement import Replicate

_KEY = torch._C.DispatchKey.PrivateUse2


def _sharded(tensor):
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and torch._C._dispatch_keys(tensor).has(_KEY)


def _instead(name, answer, of=torch.Tensor):
    plain = getattr(of, name)

    @functools.wraps(plain)
    def method(self, *args, **kwargs):
        return answer(self, *args, **kwargs) if _sharded(self) else plain(self, *args, **kwargs)

    setattr(of, name, method)


def _refuse(what, way_out):
    def answer(tensor, *_, **__):
        raise ShardingError(f"{what} a ShardTensor: its shards are on several ranks. {way_out} ({_api.summary(tensor)})")

    return answer


class _Copies:
    """Copies of parameters whose gradients are reduced: so are theirs. To begin with that is collective, which copy.deepcopy() is not: it happens at the
    end of the first backward that reaches one of them."""

    def __init__(self):
        self._copies, self._hooks, self._queued = [], [], False

    def add(self, copy):
        copy._reduced_later = True  # a copy of this copy is reduced too
        self._copies.append(weakref.ref(copy))
        self._hooks.append(copy.register_post_accumulate_grad_hook(self._reached))

    def _reached(self, _):
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._begin)

    def _begin(self):
        for hook in self._hooks:
            hook.remove()
        copies = [copy for copy in (ref() for ref in self._copies) if copy is not None]
        ops.reduce_copies([f"copy {i}" for i in range(len(copies))], copies)
        for copy in copies:
            if copy.grad is not None and ops.is_sharded(copy.grad):
                copy.grad = ops.redistribute(copy.grad, *_placed(copy))


def _placed(tensor):
    spec = ops.spec(tensor)
    return spec.placements(), spec.sizes()


def _deepcopy(tensor, memo):
    if id(tensor) not in memo:
        if tensor.grad_fn is not None:
            raise RuntimeError("Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment")
        with torch.no_grad():
            copy = ops.copy_parameter(tensor)
            if isinstance(tensor, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, tensor.requires_grad)
            if tensor.grad is not None:
                copy.grad = copy_module.deepcopy(tensor.grad, memo)
        if copy.requires_grad and (ops.is_reduced(tensor) or getattr(tensor, "_reduced_later", False)):
            memo.setdefault(id(_Copies), _Copies()).add(copy)
        memo[id(tensor)] = copy
    return memo[id(tensor)]


def _copy(tensor):
    """copy.copy(): a leaf over the same memory, with the same attributes."""
    if not _sharded(tensor):  # what copy.copy() does with what has no __copy__
        registered = copyreg.dispatch_table.get(type(tensor))
        reduced = registered(tensor) if registered else tensor.__reduce_ex__(4)
        return tensor if isinstance(reduced, str) else copy_module._reconstruct(tensor, None, *reduced)
    copy = tensor.data
    if isinstance(tensor, torch.nn.Parameter):
        copy = torch.nn.Parameter(copy, tensor.requires_grad)
    copy.requires_grad_(tensor.requires_grad)
    copy.__dict__.update(tensor.__dict__)
    return copy


def _replicated(tensor):
    return all(isinstance(p, Replicate) for p in _api.spec(tensor).placements)


def _tolist(tensor):
    """Never a collective, but for a scalar: what every rank has is read there."""
    if tensor.dim() == 0:
        return tensor.item()
    return _api.to_local(tensor.detach()).tolist() if _replicated(tensor) else _refuse("tolist() of", _WHOLE)(tensor)


def _format(tensor, spec):
    """Never a collective: a line of logging that one rank alone writes must not wait for the others."""
    if tensor.dim() == 0 and _replicated(tensor):
        return format(tensor.item(), spec)
    return f"<{_api.summary(tensor)}>" if tensor.dim() else f"<{_api.summary(tensor)}; t.item(), called by all ranks, gives the number>"


def _restore_with_generator():
    """torch.get_rng_state() and set_rng_state() (checkpointing, fork_rng) take the random numbers of sharded tensors along."""
    get, put = torch.get_rng_state, torch.set_rng_state
    generator = classes.HostGenerator()

    @functools.wraps(get)
    def get_rng_state():
        state = generator.state()
        state._tessera_random = ops.random_state()
        return state

    @functools.wraps(put)
    def set_rng_state(new_state):
        put(new_state)
        random = getattr(new_state, "_tessera_random", None)
        if random and ops.random_state():
            ops.set_random_state(*random)

    for module in (torch, torch.random):
        module.get_rng_state, module.set_rng_state = get_rng_state, set_rng_state


def _post_accumulate():
    """torch has one place for what runs after a gradient was accumulated, and puts the first hook of Python's there, whatever reduces the gradient."""
    plain = torch.Tensor.register_post_accumulate_grad_hook

    def register(tensor, hook):
        if tensor._post_accumulate_grad_hooks is None and ops.is_reduced(tensor):
            raise GradientError(
                f"a post-accumulate hook would end the reduction of this parameter's gradient: register it before the module is distributed or sharded ({_api.summary(tensor)})"
            )
        return plain(tensor, hook)

    return register


def _storage(tensor):
    if torch.compiler.is_compiling():  # dynamo, which asks for it first, then breaks the graph here and runs the rest as it is
        raise torch._dynamo.exc.Unsupported(f"a ShardTensor in a compiled graph: operators on it run uncompiled, and torch.export cannot have it ({_api.summary(tensor)})")
    return _refuse("untyped_storage() of", "tessera.to_local(t) has memory of its own")(tensor)


def _new(tensor, *args, **options):
    """Of sizes: a sharded tensor, so that what is drawn into it agrees on all ranks. Of data: a plain one."""
    sizes = args[0] if len(args) == 1 and isinstance(args[0], torch.Size) else args
    if sizes and not options and all(isinstance(n, int) for n in sizes):
        return empty_beside(tensor, sizes, tensor.dtype)
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).new(*args, **options)


_WHOLE = "tessera.full_tensor(t) gives the global value on every rank (collective), tessera.to_local(t) this rank's shard"

# What a notebook asks for; None: as it shows plain tensors.
torch.Tensor._repr_html_ = lambda t: _html.of_tensor(t) if _sharded(t) else None
_instead("__repr__", lambda t, **_: f"<{_api.summary(t)}>")
_instead("__format__", _format)
_instead("__reduce_ex__", _refuse("cannot pickle or torch.save", f"Save plain tensors: {_WHOLE}"))
_instead("__deepcopy__", _deepcopy)
_instead("__deepcopy__", _deepcopy, torch.nn.Parameter)  # which has one of its own
torch.Tensor.__copy__ = _copy
_instead("numpy", _refuse("numpy() of", _WHOLE))
_instead("__array__", _refuse("numpy() of", _WHOLE))
_instead("tolist", _tolist)
_instead("data_ptr", _refuse("data_ptr() of", "tessera.to_local(t) has memory of its own"))
_instead("untyped_storage", _storage)
_instead("register_post_accumulate_grad_hook", _post_accumulate())
_instead("new_tensor", lambda t, data, **options: torch.empty(0, dtype=t.dtype, device=t.device).new_tensor(data, **options))
_instead("new", _new)
draw_alike()
_restore_with_generator()

"""Data parallelism, losses over ranks, operators on fields, and attention over packed documents."""

import inspect
from dataclasses import dataclass
from operator import index

import torch

from tessera._errors import InvalidArgument
from tessera._groups import group_of
from tessera._library import classes, ops
from tessera._mesh import handle_of
from tessera._modules import module_tree
from tessera._placement import to_text


class DistributedDataParallel(torch.nn.Module):
    """A module whose gradients are the mean over the ranks of a group. Ranks may hold different numbers of samples, or none.

    >>> ddp = ts.DistributedDataParallel(net)                # parameters and buffers are broadcast from rank 0
    >>> loss = ddp.mean_loss(nn.functional.mse_loss(ddp(x), y), len(x))   # the mean over all ranks' samples
    >>> loss.backward()                                      # gradients are reduced in buckets while it runs

    `group`: default the world. `reduction`: avg; sum, where each rank's gradient is a summand of that of one loss; premultiplied, each rank by its `factor`.
    `broadcast_buffers`: before each forward in training. `ignore`: names of parameters and buffers that the user takes care of. Construction is
    collective; ranks whose modules differ all raise. `distribute_module` comes first, then the wrapper.
    """

    def __init__(
        self,
        module,
        group=None,
        *,
        reduction="avg",
        factor=1.0,
        broadcast_buffers=True,
        ignore=(),
        first_bucket_bytes=1 << 20,
        bucket_bytes=25 << 20,
        overlap=True,
        gradient_as_bucket_view=False,
    ):
        super().__init__()
        self.module = module
        self.group = group_of(group)
        self._reduction = reduction
        options = (reduction, float(factor), broadcast_buffers, list(ignore), first_bucket_bytes, bucket_bytes, overlap, gradient_as_bucket_view)
        self._engine = classes.DistributedDataParallel(module_tree(module, every_name=False), self.group._handle, *options)
        self._wrapped = [(name, m, {n: p for n, p in m._parameters.items() if p is not None}) for name, m in module.named_modules()]
        self._ignored = set(ignore)

    def _require_wrapped(self):
        """The engine has the tensors that were wrapped: of others it would reduce nothing."""
        for name, module, wrapped in self._wrapped:
            for n, p in module._parameters.items():
                if p is wrapped.get(n) or not p.requires_grad:
                    continue
                full = f"{name}.{n}" if name else n
                if full not in self._ignored:
                    raise RuntimeError(
                        f"DistributedDataParallel: '{full}' is not the tensor that was wrapped, and nothing reduces its gradient: wrap the module anew "
                        "after load_state_dict(assign=True) or what else replaces parameters, or list it in ignore"
                    )

    def forward(self, *args, **kwargs):
        """Of the module; in training its buffers are broadcast first.

        >>> ts.DistributedDataParallel(net).forward(x).shape     # or ddp(x)
        torch.Size([4, 1])
        """
        if torch.is_grad_enabled():
            self._require_wrapped()
        self._engine.before_forward(self.module.training)
        return self.module(*args, **kwargs)

    def __reduce_ex__(self, protocol):
        raise InvalidArgument(
            "a DistributedDataParallel reduces gradients over ranks, and is neither copied nor pickled: copy or save the module inside, ddp.module, and wrap "
            "the copy if it is to be trained"
        )

    def mean_loss(self, loss, samples):
        """The mean loss over all ranks' samples, from this rank's mean over `samples` of its own; see `mean_loss`."""
        return mean_loss(loss, samples, self.group, self._reduction)

    def no_sync(self):
        """`with ddp.no_sync():` gradients accumulate locally; the next backward outside reduces their sum.

        >>> ddp = ts.DistributedDataParallel(net)
        >>> with ddp.no_sync():
        ...     ddp(x).sum().backward()
        >>> ddp(x).sum().backward()
        """
        from tessera._api import no_sync

        return no_sync(self.module)

    def reduce(self):
        """Reduces now what has been accumulated and not been reduced, without a backward. Collective.

        >>> ddp = ts.DistributedDataParallel(net)
        >>> with ddp.no_sync():
        ...     ddp(x).sum().backward()
        >>> ddp.reduce()
        """
        ops.reduce_gradients(list(self.module.parameters()))

    def buckets(self):
        """Indices of the parameters that require grad, bucket by bucket, in the order in which buckets are reduced.

        >>> ts.DistributedDataParallel(net).buckets()
        [[3, 2, 1, 0]]
        """
        return [list(bucket) for bucket in self._engine.buckets()]


def mean_loss(loss, samples, group=None, reduction="avg"):
    """The mean over all ranks' samples, sum_r n_r loss_r / sum_r n_r, on every rank; its gradient is scaled for how gradients are reduced.

    `loss`: this rank's mean over `samples` of its own, without dims; 0 samples count nothing, even if the loss is NaN. `reduction`: "avg" under
    DistributedDataParallel, "sum" where the loss reaches parameters through sharded tensors. Collective. Raises InvalidArgument for a loss with dims, a negative
    number of samples, and none on all ranks; backward raises GradientError where a mean that was scaled for one is summed over ranks.

    >>> def body(rank):
    ...     samples = 1 + 2 * rank
    ...     return ts.mean_loss(torch.tensor(float(rank)), samples).item()     # (1 * 0 + 3 * 1) / 4
    >>> ts.run_threads(2, body)
    [0.75, 0.75]
    """
    return ops.mean_loss(loss, float(samples), group_of(group)._handle, reduction)


def _listed(what, parameters):
    """Of a generator that has been read there is nothing left, and nothing would be done."""
    if inspect.isgenerator(parameters) and inspect.getgeneratorstate(parameters) == inspect.GEN_CLOSED:
        raise InvalidArgument(f"{what} was given a generator that is at its end: call net.parameters() anew")
    return list(parameters)


class StepWeight:
    """The denominator of an optimizer step, over ranks and accumulated micro-batches, which may be ragged.

    >>> from contextlib import nullcontext
    >>> ddp, weight, micro_batches = ts.DistributedDataParallel(net), ts.StepWeight(), [(x, y), (x[:1], y[:1])]
    >>> for k, (x, y) in enumerate(micro_batches):
    ...     with ts.no_sync(net) if k + 1 < len(micro_batches) else nullcontext():
    ...         weight.weigh(nn.functional.mse_loss(ddp(x), y), len(x)).backward()
    >>> mean = weight.finish(net.parameters())      # divides the gradients, and gives the step's mean loss

    `others`: how the gradients of parameters come together that the program reduces by hand, "averaged" or "summed".
    """

    def __init__(self, group=None, others=""):
        if others not in ("", "averaged", "summed"):
            raise ValueError(f"others is 'averaged' or 'summed', not {others!r}")
        self._handle = classes.StepWeight(group_of(group)._handle, others)

    def weigh(self, loss, weight):
        """`loss * weight`, to call backward on. `loss`: the mean over this micro-batch; `weight`: its samples, at least 0."""
        return self._handle.weigh(loss, float(weight))

    def weigh_global(self, loss, weight):
        """The same for a loss over `weight` samples of all ranks together, the same on every rank (of a sharded tensor): it counts once.

        >>> net, weight = ts.distribute_module(net, mesh), ts.StepWeight()
        >>> weight.weigh_global(net(t).square().mean(), len(t)).backward()
        >>> mean = weight.finish(net.parameters())
        """
        return self._handle.weigh_global(loss, float(weight))

    def finish(self, parameters):
        """Divides the gradients by the step's total weight, starts the next step, and returns the step's mean loss. Collective."""
        return self._handle.finish(_listed("StepWeight.finish", parameters))

    def reset(self):
        """Forgets what was weighed: for a step that an exception ended.

        >>> weight = ts.StepWeight()
        >>> weight.weigh(net(x).mean(), len(x)).backward()
        >>> weight.reset(); net.zero_grad()
        """
        self._handle.reset()


def clip_gradients(parameters, max_norm=float("inf"), norm_type=2.0, group=None, *, disjoint=None, elsewhere=(), by_hand=()):
    """Scales gradients to a norm of at most `max_norm` and returns the norm before that, the same number on every rank.

    Plain parameters count once (they are replicated), sharded ones each element once, on whatever mesh. `by_hand`: pairs (parameter, group) of plain
    parameters of which each rank of the group holds another shard. `disjoint`: the ranks that hold other parameters of the same model (the stages of a
    pipeline); `elsewhere`: those of the parameters that another rank of these holds and counts too (`Pipeline.repeated_parameters`). Collective over `group`, default the world. Where a gradient is NaN or infinite every rank gets infinity and nothing is scaled. Raises
    InvalidArgument for a norm out of range, ShardingError for a gradient that is still a partial sum, MismatchError where replicas have drifted apart.

    >>> net(x).sum().backward()
    >>> norm = ts.clip_gradients(net.parameters(), max_norm=1.0)
    >>> round(ts.clip_gradients(net.parameters()), 4)         # without a limit: the norm alone
    1.0
    """
    shards, owners = [p for p, _ in by_hand], [g._handle for _, g in by_hand]
    on = group_of(group)._handle
    return ops.clip_gradients(_listed("clip_gradients", parameters), on, float(max_norm), float(norm_type), disjoint and disjoint._handle, shards, owners, list(elsewhere))


def halo_exchange(tensor, widths, method="automatic"):
    """This rank's shard of a sharded tensor with its halo, a plain tensor; differentiable.

    `widths`: by dim, `{0: 1}` (one element before and after), `{0: (1, 2)}`, or `{0: (1, 1, "circular")}`; beyond the array's own edges "zero" (default),
    "circular", "reflect" or "replicate". Any widths, larger than the shards too; corners included. Collective over the mesh, and so is its backward: the
    result must reach the loss on every rank. Raises InvalidArgument for a plain tensor, a negative width and a dim that there is not.

    >>> def body(rank):
    ...     mesh = ts.Mesh({"domain": 2})
    ...     u = ts.distribute_tensor(torch.tensor([1.0, 4.0, 9.0, 16.0]), mesh, ts.Shard(0))
    ...     h = ts.halo_exchange(u, {0: 1})                             # rows -1 ... n of this rank's n rows
    ...     du = ts.from_local(h[2:] - h[:-2], mesh, ts.Shard(0))       # a centred difference
    ...     return h.tolist(), ts.full_tensor(du).tolist()
    >>> ts.run_threads(2, body)[0]
    ([0.0, 1.0, 4.0, 9.0], [4.0, 8.0, 12.0, -9.0])
    """
    all_widths = []
    for dim, width in widths.items():
        pair = width if isinstance(width, (tuple, list)) or getattr(width, "ndim", 0) == 1 else (width, width)
        if len(pair) not in (2, 3):
            raise InvalidArgument(f"halo_exchange: the width of dim {dim} is a number, (before, after) or (before, after, edge), and not {width!r:.60}")
        before, after, edge = (*pair, "zero")[:3]
        all_widths.append((index(dim), index(before), index(after), edge))
    return ops.halo_exchange(tensor, all_widths, method)


def neighborhood_attention(q, k, v, kernel, dilation=(), causal=(), scale=None):
    """softmax(q k' scale) v over each query's neighbourhood, in one to three spatial dims; on plain tensors and on sharded fields.

    q, k: batch x spatial dims x heads x channels, v with any channels. `kernel`, `dilation`, `causal`: one number per spatial dim; default dilation 1,
    not causal. At the edges the window is shifted, not shortened. `scale`: default 1 / sqrt(channels). Batch, spatial dims and heads may be sharded.
    Differentiable once. Raises RuntimeError for shapes, windows and placements that do not fit, with those that do.

    >>> q = k = v = torch.ones(2, 6, 5, 3, 4)                 # batch x height x width x heads x channels
    >>> ts.neighborhood_attention(q, k, v, kernel=[3, 3]).shape
    torch.Size([2, 6, 5, 3, 4])
    """
    return ops.neighborhood_attention(q, k, v, list(kernel), list(dilation), list(causal), scale)


def neighborhood_attention_1d(q, k, v, kernel, dilation=(), causal=(), scale=None):
    """`neighborhood_attention` of batch x n x heads x channels. Raises ValueError for a kernel of other than one dim.

    >>> q = ts.distribute_tensor(torch.ones(2, 9, 3, 4), mesh, ts.Shard(1))
    >>> ts.neighborhood_attention_1d(q, q, q, [3], causal=[True]).shape
    torch.Size([2, 9, 3, 4])
    """
    return _of_dims(1, q, k, v, kernel, dilation, causal, scale)


def neighborhood_attention_2d(q, k, v, kernel, dilation=(), causal=(), scale=None):
    """`neighborhood_attention` of batch x height x width x heads x channels. Raises ValueError for a kernel of other than two dims.

    >>> q = torch.ones(1, 6, 6, 1, 4)
    >>> ts.neighborhood_attention_2d(q, q, q, [3, 3], dilation=[2, 1]).shape
    torch.Size([1, 6, 6, 1, 4])
    """
    return _of_dims(2, q, k, v, kernel, dilation, causal, scale)


def neighborhood_attention_3d(q, k, v, kernel, dilation=(), causal=(), scale=None):
    """`neighborhood_attention` of batch x depth x height x width x heads x channels. Raises ValueError for a kernel of other than three dims.

    >>> q = torch.ones(1, 4, 4, 4, 1, 2)
    >>> ts.neighborhood_attention_3d(q, q, q, [3, 3, 3]).shape
    torch.Size([1, 4, 4, 4, 1, 2])
    """
    return _of_dims(3, q, k, v, kernel, dilation, causal, scale)


def _of_dims(dims, q, k, v, kernel, dilation, causal, scale):
    if len(kernel) != dims:
        raise ValueError(f"neighborhood_attention_{dims}d: a kernel of {len(kernel)} dims: {tuple(kernel)}")
    return neighborhood_attention(q, k, v, kernel, dilation, causal, scale)


@dataclass(frozen=True)
class DocumentCut:
    """What `cut_documents` returns: tokens of each part, and the largest cost of a part over the mean; `imbalance_of_even` is that of equally many tokens.

    >>> ts.cut_documents([4], 2)
    DocumentCut(sizes=(2, 2), imbalance=1.0, imbalance_of_even=1.0)
    """

    sizes: tuple
    imbalance: float
    imbalance_of_even: float


def _lengths(documents):
    """One list of lengths a row: of a list of numbers, of lists, or of tensors of them."""
    rows = [n.tolist() if isinstance(n, torch.Tensor) else n for n in documents]
    if all(hasattr(n, "__index__") for n in rows):
        rows = [rows]
    return [[index(n) for n in row] for row in rows]


def cut_documents(lengths, parts, *, is_causal=False, token_cost=0.0, tokens=0, most_tokens=0):
    """Where to cut rows of packed documents over `parts` ranks, so that attention inside the documents costs each the same, rather than tokens.

    `lengths`: of the documents of a row, or of each row; all rows are cut alike. A pair of a query and a key costs 1, a token `token_cost` besides: 6 * width
    is what the products of a transformer's layer of `width` channels cost. `tokens`: length of the rows with their padding; `most_tokens`: of a part.
    Communicates nothing. Raises InvalidArgument for lengths, parts and costs below 0, no part, and documents or parts that do not fit the row.

    >>> cut = ts.cut_documents([2, 6], 2, is_causal=True)    # 1 + 2, then 1 + 2 + 3 + 4 + 5 + 6 pairs
    >>> cut.sizes, round(cut.imbalance, 2), round(cut.imbalance_of_even, 2)
    ((6, 2), 1.08, 1.5)
    """
    sizes, ratios = ops.cut_documents(_lengths(lengths), parts, is_causal, float(token_cost), tokens, most_tokens)
    return DocumentCut(tuple(sizes), *ratios)


def packed_attention(q, k, v, lengths, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Attention inside the documents of packed rows, whose tokens may be cut over ranks anywhere (context parallelism).

    q, k, v: rows x heads x tokens x channels, or without rows, as for `torch.nn.functional.scaled_dot_product_attention`, whose other arguments these are.
    `lengths`: of the documents of each row, or once for all rows, the same on every rank; of cumulative ones: `cu_seqlens.diff()`. Documents may be empty; tokens
    after the last one are padding, and give zeros. Of sharded tensors rows, heads (of grouped queries whole groups) and tokens may be sharded, in any sizes, as
    `cut_documents` makes them; keys and values are sent to the ranks that see them, and to no others. Twice differentiable where tokens are sharded. Raises
    InvalidArgument for shapes, types and lengths that do not fit each other.

    >>> q = ts.distribute_tensor(torch.ones(1, 2, 8, 4), mesh, ts.Shard(2))
    >>> ts.packed_attention(q, q, q, [5, 3], is_causal=True).shape
    torch.Size([1, 2, 8, 4])
    """
    return ops.packed_attention(q, k, v, _lengths(lengths), float(dropout_p), is_causal, scale, enable_gqa)


def _made(how, shape, mesh, placements, sizes, dtype, value=0.0):
    from tessera._api import _sizes

    return ops.made(how, [index(n) for n in shape], handle_of(mesh), to_text(placements), _sizes(sizes), float(value), dtype)


def empty(shape, mesh, placements, sizes=None, dtype=None):
    """A sharded tensor of a global `shape`, with whatever is in memory. No communication.

    `sizes`: `{dim: [rows of each shard]}`, by default as even as possible; `dtype`: torch's default. Raises InvalidArgument for placements and sizes that do not fit
    the shape. `zeros`, `ones`, `full`, `rand` and `randn` take the same.

    >>> ts.empty([6, 2], mesh, ts.Shard(0), dtype=torch.int64).fill_(3).shape
    torch.Size([6, 2])
    """
    return _made("empty", shape, mesh, placements, sizes, dtype)


def zeros(shape, mesh, placements, sizes=None, dtype=None):
    """Zeros of a global `shape`. Takes and raises what `empty` does.

    >>> ts.zeros([6, 2], mesh, ts.Shard(0))
    <ShardTensor Float [6, 2] data=Shard(0)[6], local [6, 2] at [0, 0]>
    """
    return _made("zeros", shape, mesh, placements, sizes, dtype)


def ones(shape, mesh, placements, sizes=None, dtype=None):
    """Ones of a global `shape`. Takes and raises what `empty` does.

    >>> ts.ones([6, 2], mesh, ts.Shard(0)).sum().item()
    12.0
    """
    return _made("ones", shape, mesh, placements, sizes, dtype)


def full(shape, value, mesh, placements, sizes=None, dtype=None):
    """`value` everywhere in a global `shape`. Takes and raises what `empty` does.

    >>> ts.full([6], 0.5, mesh, ts.Shard(0)).sum().item()
    3.0
    """
    if isinstance(value, int) and int(float(value)) != value:  # beyond 2^53 a float is another number
        return _made("empty", shape, mesh, placements, sizes, dtype).fill_(value)
    return _made("full", shape, mesh, placements, sizes, dtype, value)


def rand(shape, mesh, placements, sizes=None, dtype=None):
    """Uniform in [0, 1). The numbers depend on the global index alone, so that they are the same for any placement; `manual_seed` restarts them.
    Takes and raises what `empty` does.

    >>> def body(rank):
    ...     ts.manual_seed(3)
    ...     return ts.full_tensor(ts.rand([4], ts.Mesh({"data": -1}), ts.Shard(0)))
    >>> torch.equal(ts.run_threads(3, body)[0], ts.run_threads(1, body)[0])
    True
    """
    return _made("rand", shape, mesh, placements, sizes, dtype)


def randn(shape, mesh, placements, sizes=None, dtype=None):
    """Standard normal; as `rand`. Takes and raises what `empty` does.

    >>> ts.randn([4, 3], mesh, ts.Shard(1), dtype=torch.float64).shape
    torch.Size([4, 3])
    """
    return _made("randn", shape, mesh, placements, sizes, dtype)


def start_redistribute(tensor, placements, sizes=None):
    """Starts `redistribute`; `.wait()` gives the tensor, `.done()` says whether it would block. All ranks wait for theirs in the same order. Raises
    what `redistribute` does.

    >>> later = ts.start_redistribute(t, ts.Replicate())
    >>> ready = later.done()                         # compute something else meanwhile
    >>> later.wait()
    <ShardTensor Float [4, 8] data=Replicate, local [4, 8] at [0, 0]>
    """
    from tessera._api import _sizes

    return ops.start_redistribute(tensor, to_text(placements), _sizes(sizes))


def explain_redistribution(tensor, placements, sizes=None):
    """The collectives that `redistribute` would make: (operation, axes, elements that arrive here) each. Communicates nothing. Raises
    what `redistribute` does.

    >>> def body(rank):
    ...     t = ts.ones([4, 8], ts.Mesh({"data": 2}), ts.Shard(0))
    ...     return ts.explain_redistribution(t, ts.Replicate())
    >>> ts.run_threads(2, body)[0]
    [('all_gather', ('data',), 16)]
    """
    from tessera._api import _sizes

    return [(name, tuple(axes), count) for name, axes, count in ops.explain_redistribution(tensor, to_text(placements), _sizes(sizes))]


def visualize_sharding(tensor):
    """Draws as text which rank holds which shard. Communicates nothing. Raises InvalidArgument for a plain tensor.

    >>> print(ts.visualize_sharding(t))
    [4, 8]...
    """
    return ops.visualize_sharding(tensor, False)


def visualize_sharding_svg(tensor):
    """The same as an SVG picture, with the shards to scale: in a notebook, `IPython.display.SVG(...)`. Raises InvalidArgument for a plain tensor.

    >>> ts.visualize_sharding_svg(t)[:4]
    '<svg'
    """
    return ops.visualize_sharding(tensor, True)


def load_as_saved(path, mesh, misfits=None):
    """All tensors of a file that `save` wrote, sharded as they were saved, as far as they fit this mesh; by name. Collective.

    Axes are found by name: an axis that the saved mesh did not have replicates. What does not fit raises, or is described in the list `misfits`, a sentence
    each, and gets other shards.

    >>> ts.save({"field": t}, mesh, "field.safetensors")
    >>> ts.load_as_saved("field.safetensors", mesh)["field"]
    <ShardTensor Float [4, 8] data=Shard(0)[4], local [4, 8] at [0, 0]>
    """
    names, tensors, words = ops.load_as_saved(handle_of(mesh), str(path), misfits is not None)
    if misfits is not None:
        misfits.extend(words)
    return dict(zip(names, tensors))

"""Strategies for Lightning's `Trainer`: it trains what the user has wrapped and moved, saves from every rank, and undoes nothing.

Needs the package `lightning`; `import tessera` does not.

>>> import lightning as L
>>> from tessera.lightning import MeshStrategy
>>> strategy = MeshStrategy({"data": 2, "domain": 2}, batch=[ts.Shard(0), ts.Shard(2)])
>>> L.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=3, accumulate_grad_batches=4, gradient_clip_val=1.0).fit(model, loader)

Started by `tessera run`, torchrun, Slurm or mpirun: the ranks are there already and Lightning launches none, so that `devices=1` is each rank's own device, and a larger number
says how many ranks this host has. By name they are "tessera_manual", "tessera_ddp" and "tessera_mesh" once this module is imported: `L.Trainer(strategy="tessera_ddp", devices=8)`.
"""

import io
import os
import pathlib
import pickle
import socket
from functools import partial
from operator import index
from types import SimpleNamespace

import torch

import tessera as ts
from tessera._placement import from_text, to_text

try:
    from lightning.fabric.plugins import ClusterEnvironment
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.pytorch.plugins.precision import MixedPrecision
    from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning_utilities.core.apply_func import apply_to_collection
    from torchmetrics import Metric
except ImportError as error:
    raise ImportError(f"tessera.lightning needs the package lightning ({error}): pip install 'lightning>=2.6'") from error

__all__ = ["DDPStrategy", "ManualStrategy", "MeshStrategy"]

# Of what Lightning keeps: entries that are the module's own state_dict, and values beside tensors that a hook has put into it.
_OWN, _PUT = "tessera.state_dict", "tessera.put"
_OPS = {"mean": "avg", "avg": "avg", "sum": "sum", "min": "min", "max": "max", "product": "product"}


class _Ranks(ClusterEnvironment):
    """The ranks of this job, which are there already."""

    creates_processes_externally = True
    main_address, main_port = "", 0

    @staticmethod
    def detect():
        return True

    def world_size(self):
        return ts.world_size()

    def global_rank(self):
        return ts.rank()

    def local_rank(self):
        return ts.local_rank()

    def node_rank(self):
        # Lightning asks whether it is 0: that of the host's first rank says so.
        return ts.rank() - ts.local_rank()

    def set_world_size(self, size):
        pass

    def set_global_rank(self, rank):
        pass


class _Nothing:
    """What a rank for which another one reads has of a loader: as many batches, of nothing."""

    def __init__(self, batches):
        self._batches = batches

    def __len__(self):
        return self._batches

    def __iter__(self):
        return iter([()] * self._batches)


class _Rest:
    """What Lightning keeps beside modules and optimizers (loops, callbacks, schedules, hyperparameters), as it pickles it."""

    def __init__(self, values=None, weights_only=None):
        self.values, self._weights_only = values, weights_only

    def state_dict(self):
        out = io.BytesIO()
        torch.save(self.values, out)
        return {"pickle": out.getvalue()}

    def load_state_dict(self, state):
        self.values = torch.load(io.BytesIO(state["pickle"]), map_location="cpu", weights_only=self._weights_only)


def _whole(tensor):
    return ts.full_tensor(tensor) if ts.is_sharded(tensor) else tensor


def _over(group, default):
    # Lightning's own word for none.
    if torch.distributed.is_available() and torch.distributed.is_initialized() and group is torch.distributed.group.WORLD:
        group = None
    if group is not None and not isinstance(group, ts.Group):
        raise ts.InvalidArgument(f"ranks are a ts.Group here, and not a {type(group).__name__}: ts.group([0, 1])")
    return default if group is None else group


def _place(path):
    """Folder and name of a checkpoint. Lightning's searches (of a learning rate, of a batch size) name theirs with a dot in front, which no checkpoint has."""
    path = pathlib.Path(path).absolute()
    return path.parent, f"_{path.name}" if path.name.startswith(".") else path.name


def _rows(batch):
    """The rows of the first tensor of a batch."""
    found = []
    apply_to_collection(batch, torch.Tensor, found.append)
    if not found or not found[0].dim():
        raise ts.InvalidArgument("DDPStrategy: the batch has no tensor with rows, by which its loss could be weighted: give weight=function of the batch, or weight=None")
    return len(found[0])


class ManualStrategy(ParallelStrategy):
    """The user wraps, shards and moves the modules, in `configure_model` or before; this supplies ranks, collectives and checkpoints, and leaves the rest as it is.

    >>> class Fit(L.LightningModule):
    ...     def configure_model(self):                       # before the optimizers are made
    ...         self.mesh = ts.Mesh({"data": ts.world_size()})
    ...         ts.fully_shard(self.net, self.mesh)
    ...     def training_step(self, batch, _):
    ...         x, y = (ts.from_local(t, self.mesh, [ts.Shard(0)]) for t in batch)
    ...         return criterion(self.net(x), y)
    >>> L.Trainer(strategy=ManualStrategy(), accelerator="cpu", devices=1).fit(Fit(), loader)

    Nothing is moved, converted or broadcast, and no sampler is put into a loader: each rank reads what its own loader gives. While micro-batches accumulate
    (`accumulate_grad_batches`) nothing that reduces gradients of the module sends. Norms of `gradient_clip_val` are those of `clip_gradients`; `by_hand` as there.
    `self.log(..., sync_dist=True)` and torchmetrics reduce over all ranks; `sharing`: how many ranks have the same samples, which a sum counts once. A sharded
    value is logged with `sync_dist=True`.

    A checkpoint is a folder that all ranks write, of the path that Lightning gives it, and is loaded on any number of ranks and by any of these strategies; so is
    a file that another strategy of Lightning's wrote, the optimizers' part of it into plain parameters alone. Tensors that `on_save_checkpoint` of a callback or
    of the module puts into its state_dict, as averages of weights, are kept beside those of the module, and come into it when it is loaded. `load_from_checkpoint`
    is Lightning's own and takes no folder: `ts.CheckpointReader("checkpoints", "last.ckpt").load({"module": module}, allow_extra=True)` fills a module without a trainer.
    With `precision="16-mixed"` a gradient that overflows on one rank leaves the step out on all, by one small all-reduce a step.
    """

    def __init__(self, *, sharing=1, by_hand=()):
        try:
            ts.rank()
        except ts.ConfigurationError:
            ts.init()
        super().__init__(cluster_environment=_Ranks())
        rank_zero_only.rank = ts.rank()
        self._by_hand, self._sharing = tuple(by_hand), index(sharing)
        # Ranks that have different samples; into how many parts a sampler deals them, and which of them is this rank's.
        self._data_group, self._replicas, self._place = ts.world(), 1, 0
        self._checkpointers, self._saved = {}, {}

    # ---- where and what ----

    @property
    def root_device(self):
        """Where batches go: of the devices that the trainer was given, the one of this rank's number on its host."""
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[self.local_rank % len(devices)]

    def setup_environment(self):
        """Raises InvalidArgument, on every rank, for `devices` that are neither one nor the ranks of each host."""
        super().setup_environment()
        hosts = ts.world().all_gather_bytes(socket.gethostname().encode())
        asked, here = len(self.parallel_devices or [None]), hosts[ts.rank()]
        wrong = next((host for host in (here, *hosts) if hosts.count(host) != asked), None)
        if asked != 1 and wrong is not None:  # on all ranks, also where another host has too many
            whose = "this host" if wrong == here else wrong.decode()
            raise ts.InvalidArgument(f"devices={asked}, and {whose} has {hosts.count(wrong)} ranks: start as many (tessera run -n {asked}), or give 1, each rank's own")

    @property
    def is_distributed(self):
        """True: Lightning asks before it reduces what is logged with `sync_dist=True`."""
        return True

    @property
    def distributed_sampler_kwargs(self):
        """Which of the samples this rank reads where Lightning puts a DistributedSampler into a loader."""
        return {"num_replicas": self._replicas, "rank": self._place}

    def model_to_device(self):
        """Leaves the modules where they are."""

    def _sharded(self):
        return any(map(ts.is_sharded, self.lightning_module.parameters()))

    def _prepare(self, fitting):
        """What becomes of the modules before the optimizers are made."""

    def setup(self, trainer):
        """Makes the optimizers, once the modules are as they will be trained."""
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self._replicas == 1:
            trainer._accelerator_connector.use_distributed_sampler = False
        self.accelerator.setup(trainer)
        self._prepare(fitting)
        if fitting:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        plugin = self.precision_plugin
        if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
            self._agree_on_overflow(plugin.scaler)
        plugin.clip_grad_by_norm, plugin.clip_grad_by_value = partial(self._clip, plugin), partial(self._clip_elements, plugin)
        for metric in self.lightning_module.modules():
            if isinstance(metric, Metric) and metric.dist_sync_fn is None:
                metric.dist_sync_fn, metric.distributed_available_fn = self._gather_metric, lambda: ts.world_size() > 1

    def teardown(self):
        """Leaves modules and optimizers as they are."""
        for part in (self.precision_plugin, self.accelerator, self.checkpoint_io, self.cluster_environment):
            part.teardown()

    # ---- gradients ----

    def block_backward_sync(self):
        """`with strategy.block_backward_sync():` gradients accumulate locally."""
        return ts.no_sync(self.lightning_module)

    def _clip(self, plugin, optimizer, clip_val):
        return ts.clip_gradients(plugin.main_params(optimizer), clip_val, by_hand=self._by_hand)

    def _agree_on_overflow(self, scaler):
        """What the scaler finds in this rank's shards it finds in those of all. It asks by this method alone, and is wrapped once."""
        if "_unscale_grads_" in vars(scaler):
            return
        unscale = scaler._unscale_grads_

        def everywhere(optimizer, inverse_scale, nothing, allow_fp16):
            parts, overflow, devices = {}, torch.zeros((), device=self.root_device), set()
            for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
                parts.setdefault(ts.spec(p.grad).mesh if ts.is_sharded(p.grad) else None, []).append(p)
            # One call of all would take plain gradients for sharded ones, and make them so.
            for part in parts.values():
                found = unscale(SimpleNamespace(param_groups=[{"params": part}]), inverse_scale, torch.zeros_like(nothing), allow_fp16)
                devices.update(found)
                for f in found.values():
                    overflow += (ts.to_local(f) if ts.is_sharded(f) else f).to(self.root_device)
            ts.world().all_reduce(overflow, "max")
            return {device: overflow.to(device) for device in devices}

        scaler._unscale_grads_ = everywhere

    @staticmethod
    def _clip_elements(plugin, optimizer, clip_val):
        for p in plugin.main_params(optimizer):
            if p.grad is not None:
                (ts.to_local(p.grad) if ts.is_sharded(p.grad) else p.grad).clamp_(-clip_val, clip_val)

    # ---- collectives ----

    def barrier(self, name=None):
        """Returns when all ranks have come."""
        ts.world().barrier()

    def broadcast(self, obj, src=0):
        """Any object that can be pickled, of rank `src`."""
        return pickle.loads(ts.world().broadcast_bytes(pickle.dumps(obj) if ts.rank() == src else None, src))

    def reduce(self, tensor, group=None, reduce_op="mean"):
        """Over all ranks, or those of a `ts.Group`; what ranks share is in a sum once, and a sharded value is one value."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        over = _over(group, ts.world())
        name = reduce_op if isinstance(reduce_op, str) else "mean" if reduce_op is None else str(reduce_op).rpartition(".")[2]
        op, shared = _OPS[name.lower()], self._sharing
        if ts.is_sharded(tensor):
            tensor, shared = ts.full_tensor(tensor), len(ts.spec(tensor).mesh.ranks)
        # The mean of counts has a fraction.
        summed = tensor.double() if op == "avg" and not tensor.is_floating_point() else tensor.clone()
        with torch.no_grad():
            over.all_reduce(summed, op)
        return summed / shared if op == "sum" and shared > 1 else summed

    def reduce_boolean_decision(self, decision, all=True):
        """True where all ranks decide so, or any of them does: each has a vote, whatever samples it shares. Collective."""
        votes = torch.tensor(int(decision), device=self.root_device)
        return bool(ts.world().all_reduce(votes, "min" if all else "max"))

    def all_gather(self, tensor, group=None, sync_grads=False):
        """The ranks' tensors of one shape, stacked."""
        over, whole = _over(group, ts.world()), _whole(tensor)
        if sync_grads:
            return ts.functional.all_gather(over, whole.unsqueeze(0))
        return over.all_gather(whole.detach().unsqueeze(0))

    def _gather_metric(self, tensor, group=None):
        """As torchmetrics asks for it: a list by rank, of any shapes."""
        over = _over(group, self._data_group)
        mine = _whole(tensor).detach()
        return [pickle.loads(data).to(mine.device) for data in over.all_gather_bytes(pickle.dumps(mine.cpu()))]

    # ---- checkpoints ----

    @property
    def restore_checkpoint_after_setup(self):
        """Into modules and optimizers as they will be trained."""
        return True

    def optimizer_state(self, optimizer):
        """Nothing: `save_checkpoint` takes the optimizers themselves, from all ranks."""
        return {}

    def _state(self, rest, with_optimizers):
        optimizers = {f"optimizer.{number}": optimizer for number, optimizer in enumerate(self.optimizers)}
        return {"module": self.lightning_module, "lightning": ts.OfRank(rest), **(optimizers if with_optimizers else {})}

    def lightning_module_state_dict(self):
        """The state_dict of the module. What hooks put in place of its tensors is found by comparison with it."""
        self._saved = dict(super().lightning_module_state_dict())
        return dict(self._saved)

    def _is_own(self, value):
        return isinstance(value, dict) and bool(value) and value.keys() == self._saved.keys() and all(t is self._saved[name] for name, t in value.items())

    def _checkpointer(self, folder):
        folder = str(folder)
        if folder not in self._checkpointers:
            self._checkpointers[folder] = ts.Checkpointer(folder)
        return self._checkpointers[folder]

    def save_checkpoint(self, checkpoint, filepath, storage_options=None):
        """Writes the folder `filepath` from all ranks: each its shards. Collective."""
        if storage_options is not None:
            raise TypeError("storage_options: a checkpoint of ranks is a folder in a file system that all of them share")
        folder, name = _place(filepath)
        own = [key for key, value in checkpoint.items() if key != "state_dict" and self._is_own(value)]
        rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states", *own)}
        rest = apply_to_collection(rest, torch.Tensor, _whole)  # metrics of a loop may be sharded
        put = {key: value for key, value in checkpoint.get("state_dict", {}).items() if value is not self._saved.get(key)}
        tensors = {key: value.detach() for key, value in put.items() if isinstance(value, torch.Tensor)}
        rest |= {_OWN: own, _PUT: {key: value for key, value in put.items() if key not in tensors}}
        state = self._state(_Rest(rest), "optimizer_states" in checkpoint)
        self._saved = {}
        self._checkpointer(folder).save(name, {**state, "put": tensors} if tensors else state)

    def load_checkpoint(self, checkpoint_path, weights_only=None):
        """Modules and optimizers become what they were; returns the rest. Collective. `weights_only`: of what Lightning has pickled, as of `torch.load`."""
        path = pathlib.Path(checkpoint_path).absolute()
        if path.is_file():
            return super().load_checkpoint(path, weights_only=weights_only)
        rest, fitting = _Rest(weights_only=weights_only), self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        folder, name = _place(path)
        reader, own, put = ts.CheckpointReader(str(folder), name), self.lightning_module.state_dict(), {}
        for key, saved in reader.tensors.items():
            if key.startswith("put."):
                here = own.get(key[4:])
                alike = isinstance(here, torch.Tensor) and here.shape == saved.shape
                put[key[4:]] = torch.zeros_like(here, dtype=saved.dtype) if alike else torch.zeros(saved.shape, dtype=saved.dtype)
        state = self._state(rest, fitting)
        reader.load({**state, "put": put} if put else state, allow_extra=not fitting)
        values = self.broadcast(rest.values)
        put |= values.pop(_PUT, {})
        # What was put comes into the module afterwards, as from a file.
        kept = {key: t.clone() if put and isinstance(t, torch.Tensor) else t for key, t in own.items()}
        values |= dict.fromkeys(values.pop(_OWN, ()), kept)
        return {"state_dict": {**own, **put}, "optimizer_states": [], **values}

    def load_optimizer_state_dict(self, checkpoint):
        """From a file of another strategy; what `load_checkpoint` found in a folder has its values already."""
        if checkpoint["optimizer_states"] and self._sharded():
            raise ts.InvalidArgument(
                "the file has optimizers of plain parameters, and those here are sharded: load the weights alone (load_from_checkpoint, then fit without ckpt_path)"
            )
        super().load_optimizer_state_dict(checkpoint)

    def remove_checkpoint(self, filepath):
        """Removes the folder. Collective."""
        folder, name = _place(filepath)
        self._checkpointer(folder).remove(name)


class DDPStrategy(ManualStrategy):
    """Every rank holds all parameters; gradients are averaged while backward runs, by `DistributedDataParallel` over the LightningModule.

    Ranks may have different numbers of samples, or none: `weight(batch)` says how many, by default the rows of the batch's first tensor, and the gradients of
    each micro-batch are those of the mean over all ranks' samples; None: each rank's loss counts the same. The module is moved to the device and converted to
    the trainer's precision. Lightning puts a DistributedSampler into loaders that have none. `options`: of `DistributedDataParallel`.
    """

    def __init__(self, *, weight=_rows, **options):
        super().__init__()
        self._replicas, self._place = ts.world_size(), ts.rank()
        self._weight, self._options, self._ddp, self._samples = weight, options, None, 1

    def _prepare(self, fitting):
        module = self.precision_plugin.convert_module(self.lightning_module).to(self.root_device)
        if fitting:
            if self._ddp is None or self._ddp.module is not module:
                self._ddp = ts.DistributedDataParallel(module, **self._options)
            self.model = self._ddp

    def training_step(self, *args, **kwargs):
        """Of the LightningModule, behind what `DistributedDataParallel` does before a forward."""
        if self._weight is not None:
            self._samples = float(self._weight(args[0]))
        return super().training_step(*args, **kwargs)

    def backward(self, closure_loss, *args, **kwargs):
        """Backward of the mean over all ranks' samples."""
        if self._weight is not None:
            closure_loss = ts.mean_loss(closure_loss, self._samples)
        return super().backward(closure_loss, *args, **kwargs)


class MeshStrategy(ManualStrategy):
    """Parameters and batches on a mesh: sharded, in space too, or replicated, in any mixture.

    `axes`: as of `Mesh`, which is `trainer.strategy.mesh` in `configure_model`; by default all ranks along "data". `batch`: how the tensors of a batch lie, a placement for each axis; default
    Shard(0) along the first axis. A loader reads complete samples: along axes of Shard(0) each rank its own rows, of any number, and along the others the same
    ones, of which each rank keeps its shard. So Lightning's DistributedSampler goes by the coordinate along the axes of Shard(0). Tensors with too few dims for a
    Shard are replicated on that axis. The loss of such a batch is the mean over all ranks' samples.

    `fields`: where tensors of a batch lie differently, by name, as of `shard_batch`: `{"image": {"domain": 2}}`, or a `FieldSharding`; what it does not name is replicated
    along the axes that do not shard rows, which `batch` names alone then. `one_reads`: one rank of those that have the same samples reads them and sends the
    others their shards (`scatter_batch`); the loaders of these are asked for their length alone, and batches are dictionaries by name, and tuples.

    >>> strategy = MeshStrategy({"data": 2, "domain": 2}, fields={"image": {"domain": 2}}, one_reads=True)

    `rule`: of `distribute_module`, which the LightningModule goes through if `configure_model` has sharded none of its parameters; default: replicated. Raises
    InvalidArgument for placements that do not fit the axes, or are partial.
    """

    def __init__(self, axes=None, *, batch=None, rule=None, fields=None, one_reads=False):
        super().__init__()
        self.mesh, self._rule = ts.Mesh({"data": ts.world_size()} if axes is None else axes), rule
        replicated = [ts.Replicate()] * (len(self.mesh.axes) - 1)
        self._placements = [from_text(text) for text in to_text([ts.Shard(0), *replicated] if batch is None else batch)]
        if len(self._placements) != len(self.mesh.axes) or any(isinstance(p, ts.Partial) or (isinstance(p, ts.Shard) and p.dim < 0) for p in self._placements):
            raise ts.InvalidArgument(
                f"MeshStrategy: a batch that lies as {self._placements} on {self.mesh}: give for each axis Replicate() or Shard(dim), dims counted from the first"
            )
        self._rows_over = [axis for axis, p in zip(self.mesh.axes, self._placements) if p == ts.Shard(0)]
        for axis, size, coordinate in zip(self.mesh.axes, self.mesh.axes.values(), self.mesh.coordinate):
            if axis in self._rows_over:
                self._replicas, self._place = self._replicas * size, self._place * size + coordinate
        self._fields, self._one_reads = fields, bool(one_reads)
        if fields is not None or one_reads:
            if any(isinstance(p, ts.Shard) and p.dim for p in self._placements):
                raise ts.InvalidArgument(f"MeshStrategy: a batch that lies as {self._placements}, beside fields or one_reads: say dims other than the rows' for each field")
            self._fields = {n: f if one_reads or isinstance(f, ts.FieldSharding) else ts.FieldSharding(f or {}, whole=True) for n, f in (fields or {}).items()}
        self._reads = not one_reads or ts.reads_for_others(self.mesh, self._rows_over)
        self._sharing = ts.world_size() // self._replicas
        if self._rows_over:
            self._data_group = self.mesh.group(*self._rows_over)

    def _prepare(self, fitting):
        if not self._sharded():
            module = self.precision_plugin.convert_module(self.lightning_module).to(self.root_device)
            ts.distribute_module(module, self.mesh, self._rule)
            for callback in module.trainer.callbacks:  # averages of weights are copies of before
                average = getattr(callback, "_average_model", None)
                average = average.module if isinstance(average, torch.optim.swa_utils.AveragedModel) else average
                if isinstance(average, torch.nn.Module):
                    ts.distribute_module(average.to(self.root_device), self.mesh, self._rule)

    def process_dataloader(self, dataloader):
        """The loader, or as many batches of nothing where another rank reads. Raises TypeError on every rank for one without a length, if one reads for all."""
        batches = len(dataloader) if self._one_reads else 0
        return dataloader if self._reads else _Nothing(batches)

    def batch_to_device(self, batch, device=None, dataloader_idx=0):
        """Moves the batch, and makes its tensors sharded ones. Collective: the ranks' rows are counted."""
        moved = super().batch_to_device(batch, device, dataloader_idx)
        if self._fields is None:
            return apply_to_collection(moved, torch.Tensor, self._placed)
        if self._one_reads:
            return ts.scatter_batch(moved if self._reads else None, self.mesh, self._rows_over, self._fields).fields
        return ts.shard_batch(moved, self.mesh, self._rows_over, self._fields).fields

    def _placed(self, tensor):
        if ts.is_sharded(tensor):
            return tensor
        where = [ts.Replicate() if isinstance(p, ts.Shard) and p.dim >= tensor.dim() else p for p in self._placements]
        rows = [p if p == ts.Shard(0) else ts.Replicate() for p in where]
        return ts.redistribute(ts.from_local(tensor, self.mesh, rows), where)


for _name, _strategy in {"tessera_manual": ManualStrategy, "tessera_ddp": DDPStrategy, "tessera_mesh": MeshStrategy}.items():
    StrategyRegistry.register(_name, _strategy, _strategy.__doc__.partition("\n")[0], override=True)

"""Lightning's Trainer over the strategies of tessera.lightning, each compared with a plain loop of one process. Argument: a folder of all ranks."""

import math
import pathlib
import sys
import warnings

import lightning as L
import torch
import torchmetrics
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tessera as ts
from support import assert_same
from tessera.lightning import DDPStrategy, ManualStrategy, MeshStrategy

FOLDER = pathlib.Path(sys.argv[1])
EPOCHS, BATCHES, ACCUMULATED, NORM = 2, 3, 2, 0.2
warnings.filterwarnings("ignore")


def build():
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv1d(4, 1, 3, padding=1)).double()


def samples(rows):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(rows, 2, 9, generator=generator).double(), torch.randn(rows, 1, 9, generator=generator).double()


def alone(epochs):
    """Parameters, and the loss over all samples. `epochs`: batches of each."""
    net = build()
    optimizer = torch.optim.AdamW(net.parameters(), 0.02, eps=1e-3)
    for batches in epochs:
        for first in range(0, len(batches), ACCUMULATED):
            optimizer.zero_grad()
            for x, y in batches[first : first + ACCUMULATED]:
                (nn.functional.mse_loss(net(x), y) / ACCUMULATED).backward()
            norm = math.sqrt(sum(p.grad.square().sum().item() for p in net.parameters()))
            for p in net.parameters():
                p.grad.mul_(min(1.0, NORM / norm))
            optimizer.step()
    x, y = (torch.cat(t) for t in zip(*batches))
    return dict(net.named_parameters()), nn.functional.mse_loss(net(x), y).item()


class Fit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.error = build(), torchmetrics.MeanMetric().double()

    def loss(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch, _):
        return self.loss(batch)

    def validation_step(self, batch, _):
        loss, rows = self.loss(batch), len(batch[0])
        self.log("loss", loss.nan_to_num(), sync_dist=True, batch_size=rows)
        self.error.update(ts.full_tensor(loss) if ts.is_sharded(loss) else loss.nan_to_num(), rows)
        self.log("error", self.error)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), 0.02, eps=1e-3)


class FullyShard(Fit):
    def configure_model(self):
        if not any(map(ts.is_sharded, self.parameters())):
            self.mesh = ts.fully_shard(self.net, ts.Mesh({"data": ts.world_size()})) and ts.Mesh({"data": ts.world_size()})

    def loss(self, batch):
        return super().loss([ts.from_local(t, self.mesh, ts.Shard(0)) for t in batch])


class Counting(ManualStrategy):
    def save_checkpoint(self, checkpoint, filepath, storage_options=None):
        self.saved = [*getattr(self, "saved", []), checkpoint["global_step"]]
        super().save_checkpoint(checkpoint, filepath, storage_options)


class Domain(Fit):
    """Each rank has a slab of every field."""

    def configure_model(self):
        if not any(map(ts.is_sharded, self.parameters())):
            self.mesh = ts.Mesh({"domain": ts.world_size()})
            ts.distribute_module(self.net, self.mesh)

    def loss(self, batch):
        n = ts.world_size()
        return super().loss([ts.distribute_tensor(t, self.mesh, ts.Shard(2), {2: [9 - 2 * (n - 1)] + [2] * (n - 1)}) for t in batch])


class Samples:
    """Samples with names, which says what was read of it."""

    def __init__(self, x, y):
        self.x, self.y, self.read = x, y, 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        self.read += 1
        return {"input": self.x[i], "target": self.y[i]}


class Named(Fit):
    def training_step(self, batch, index):
        assert ts.spec(batch["input"]).placements == (ts.Shard(0), ts.Shard(2)), ts.spec(batch["input"])
        return super().training_step((batch["input"], batch["target"]), index)

    def validation_step(self, batch, index):
        super().validation_step((batch["input"], batch["target"]), index)


class Overflows(L.LightningModule):
    """In the second batch the gradients of the last row alone do, which one rank has; `shards` None: those of one rank, each training its own."""

    def __init__(self, shards):
        super().__init__()
        torch.manual_seed(3)
        self.net, self.shards, self.stepped = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)), shards, []

    def configure_model(self):
        if self.shards:
            self.mesh = ts.Mesh({"data": ts.world_size()})
            ts.fully_shard(self.net[1], self.mesh)  # beside plain parameters

    def training_step(self, batch, index):
        x = ts.distribute_tensor(batch, self.mesh, ts.Shard(0)) if self.shards else batch
        y = self.net(x)
        assert y.dtype == torch.float16
        return y.float().square().mean() + (y[:, -1].float() * 1e6).mean() * float(index == 1 and (self.shards is not None or ts.rank() == 1))

    def on_train_batch_end(self, *_):
        self.stepped.append(self.trainer.precision_plugin.scaler.get_scale())

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), 0.5)


def float16_scaler():
    return torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)


def in_float16(plugin, shards):
    module = Overflows(shards)
    trainer(ManualStrategy(), 1, plugins=[plugin], accumulate_grad_batches=1).fit(module, by_batch(list(torch.ones(4, 6, 3))))
    return module.stepped, {name: p.detach() for name, p in module.net.named_parameters()}


def alone_in_float16():
    module, scaler = Overflows(False), float16_scaler()
    optimizer = module.configure_optimizers()
    for index, x in enumerate(torch.ones(4, 6, 3)):
        with torch.autocast("cpu", torch.float16):
            loss = module.training_step(x, index)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), NORM)
        scaler.step(optimizer)
        scaler.update()
    return dict(module.net.named_parameters())


def trainer(strategy, epochs=EPOCHS, **options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {**quiet, "devices": 1, "use_distributed_sampler": not isinstance(strategy, DDPStrategy), "accumulate_grad_batches": ACCUMULATED, "gradient_clip_val": NORM, "num_sanity_val_steps": 0, **options}
    return L.Trainer(strategy=strategy, accelerator="cpu", max_epochs=epochs, default_root_dir=FOLDER, **options)


def averages(what, make, loader):
    """A callback's averages of weights are kept where it puts them, and come back; a search for a rate saves by a name with a dot in front."""

    def run(epochs, folder=None, **options):
        module, keeps = Fit(), L.pytorch.callbacks.ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}")
        own = [L.pytorch.callbacks.EMAWeightAveraging(decay=0.5), *([keeps] if folder else [])]
        one = trainer(make(), epochs, callbacks=own, enable_checkpointing=folder is not None, use_distributed_sampler=False)
        one.fit(module, loader, **options)
        return module, one

    folder = FOLDER / f"averages of {what}"
    module, _ = run(2, folder)
    resumed, one = run(2, ckpt_path=folder / "epoch=0.ckpt")
    evaluated = Fit()
    trainer(make(), use_distributed_sampler=False).validate(evaluated, loader, ckpt_path=folder / "epoch=1.ckpt", verbose=False)
    for name, p in module.net.named_parameters():
        assert_same(resumed.net.get_parameter(name), whole(p), f"averages of {what}, resumed, {name}")
        assert_same(evaluated.net.get_parameter(name), whole(p), f"averages of {what}, evaluated, {name}")
    one.save_checkpoint(folder / ".search.ckpt")
    assert one.strategy.load_checkpoint(folder / ".search.ckpt")["global_step"] == one.global_step
    one.strategy.remove_checkpoint(folder / ".search.ckpt")


def whole(tensor):
    return ts.full_tensor(tensor.detach()) if ts.is_sharded(tensor) else tensor


def compare(what, run, module, expected):
    parameters, loss = expected
    for name, p in module.net.named_parameters():
        assert_same(p, parameters[name], f"{what} {name}")
    for name in ("loss", "error"):
        # Lightning counts in the default dtype at least.
        assert abs(run.callback_metrics[name].item() - loss) < 1e-6 * loss, (what, name, run.callback_metrics[name], loss)


def by_batch(batches):
    return DataLoader(batches, batch_size=None)


def main():
    ts.init()
    torch.set_num_threads(1)
    rank, ranks = ts.rank(), ts.world_size()
    whole = [t.split([5, 4, 6]) for t in samples(15)]
    batches = list(zip(*whole))
    uneven = [[3, 1, 0, 1], [0, 0, 4, 0], [1, 2, 2, 1]]
    mine = [tuple(t.split(rows[: ranks - 1] + [sum(rows[ranks - 1 :])])[rank] for t in b) for b, rows in zip(batches, uneven)]
    expected = alone([batches] * EPOCHS)

    module, run = Fit(), trainer(DDPStrategy())
    run.fit(module, by_batch(mine), by_batch(mine))
    compare("ddp", run, module, expected)
    assert (run.world_size, run.global_rank) == (ranks, rank), (run.world_size, run.global_rank)

    module, run = Domain(), trainer(ManualStrategy(sharing=ranks))
    run.fit(module, by_batch(batches), by_batch(batches))
    compare("domain", run, module, expected)
    assert all(map(ts.is_sharded, module.net.parameters()))  # nothing is undone

    keeps = L.pytorch.callbacks.ModelCheckpoint(FOLDER / "kept", save_top_k=1, monitor="loss", filename="{epoch}")
    module, run = FullyShard(), trainer(Counting(), enable_checkpointing=True, callbacks=[keeps])
    run.fit(module, by_batch(mine), by_batch(mine))
    compare("fully sharded", run, module, expected)
    assert run.strategy.saved == [run.global_step // EPOCHS * epoch for epoch in range(1, EPOCHS + 1)], run.strategy.saved  # each once
    run.save_checkpoint(FOLDER / "last.ckpt")
    kept = ts.Checkpointer(FOLDER / "kept").names()
    assert kept == [f"epoch={EPOCHS - 1}.ckpt"] == [pathlib.Path(keeps.best_model_path).name], kept
    assert ts.CheckpointReader(FOLDER, "last.ckpt").saved_ranks == ranks
    # Without a trainer: what stands for load_from_checkpoint, which takes no folder.
    filled = ts.CheckpointReader(FOLDER, "last.ckpt").load({"module": Fit()}, allow_extra=True)["module"]
    for name, p in filled.net.named_parameters():
        assert_same(p, expected[0][name], f"filled {name}")
    # Another strategy goes on from it.
    module, run = Fit(), trainer(DDPStrategy(), EPOCHS + 1)
    run.fit(module, by_batch(mine), by_batch(mine), ckpt_path=FOLDER / "last.ckpt")
    compare("resumed", run, module, alone([batches] * (EPOCHS + 1)))

    plugin, parameters = MixedPrecision("16-mixed", "cpu", float16_scaler()), alone_in_float16()
    scales, got = in_float16(plugin, True)
    assert scales == [256.0, 128.0, 128.0, 256.0], scales
    for name, p in got.items():
        assert torch.allclose(ts.full_tensor(p) if ts.is_sharded(p) else p, parameters[name], rtol=1e-3), name
    # Nothing but the scaler's question brings these ranks together; it is the same scaler, which goes on.
    assert in_float16(plugin, None)[0] == [256.0, 128.0, 128.0, 256.0]

    axes = {"data": ranks // 2, "domain": 2} if ranks % 2 == 0 else {"data": ranks, "domain": 1}
    x, y = samples(12)
    # As a DistributedSampler deals them, whatever the number of coordinates: alike on ranks of one coordinate. Of one coordinate there is none.
    orders = [torch.randperm(12, generator=torch.Generator().manual_seed(epoch)) if axes["data"] > 1 else torch.arange(12) for epoch in range(EPOCHS)]
    module, run = Fit(), trainer(MeshStrategy(axes, batch=[ts.Shard(0), ts.Shard(2)]))
    loader = DataLoader(TensorDataset(x, y), batch_size=6 // axes["data"])
    run.fit(module, loader, loader)
    compare("mesh", run, module, alone([[(x[i], y[i]) for i in order.split(6)] for order in orders]))

    averages("replicas", DDPStrategy, by_batch(mine))
    averages("a mesh", lambda: MeshStrategy(axes, batch=[ts.Shard(0), ts.Shard(2)]), loader)

    fields = {"input": {"domain": 2}, "target": ts.FieldSharding({"domain": 2}, whole=True)}
    for one_reads in (False, True):
        module, strategy, data = Named(), MeshStrategy(axes, fields=fields, one_reads=one_reads), Samples(x, y)
        named = trainer(strategy)
        loader = DataLoader(data, batch_size=6 // axes["data"])
        named.fit(module, loader, loader)
        compare(f"fields, one_reads={one_reads}", named, module, alone([[(x[i], y[i]) for i in order.split(6)] for order in orders]))
        assert bool(data.read) == (not one_reads or ts.reads_for_others(strategy.mesh, ["data"])), data.read
    try:
        MeshStrategy(axes, batch=[ts.Shard(0), ts.Shard(2)], fields=fields)
        raise AssertionError("a batch and its fields are taken")
    except ts.InvalidArgument as error:
        assert "beside fields" in str(error)
    try:
        MeshStrategy(axes, fields=fields, one_reads=True).process_dataloader(iter([]))
        raise AssertionError("a loader without a length is taken where one rank reads for all")
    except TypeError as error:
        assert "len()" in str(error)

    # By name, with the number of ranks.
    module, by_name = Fit(), trainer("tessera_ddp", devices=ranks, use_distributed_sampler=False)
    by_name.fit(module, by_batch(mine), by_batch(mine))
    compare("by name", by_name, module, expected)
    assert {"tessera_manual", "tessera_ddp", "tessera_mesh"} <= set(StrategyRegistry.available_strategies())
    try:
        trainer("tessera_mesh", devices=ranks + 1).fit(Fit(), by_batch(mine), by_batch(mine))
        raise AssertionError("more devices than ranks are taken")
    except ts.InvalidArgument as error:
        assert f"devices={ranks + 1}, and this host has {ranks} ranks" in str(error)

    strategy = run.strategy
    assert strategy.broadcast({"from": rank}, ranks - 1) == {"from": ranks - 1} and strategy.reduce_boolean_decision(rank == 0, all=False)
    # Whatever samples ranks share: by this a ModelCheckpoint decides what is better.
    assert strategy.reduce_boolean_decision(True) and not strategy.reduce_boolean_decision(rank > 0)
    assert strategy.all_gather(torch.tensor([rank])).flatten().tolist() == list(range(ranks))
    assert strategy.reduce(torch.tensor(1.0), reduce_op="sum").item() == axes["data"]
    for call in (strategy.reduce, strategy.all_gather, strategy._gather_metric):
        try:
            call(torch.ones(1), object())  # a group of another kind was taken for all ranks
            raise AssertionError("a group that is none of ts.Group's is taken")
        except ts.InvalidArgument as error:
            assert "ranks are a ts.Group here" in str(error)
    print(f"rank {rank} of {ranks}: as one process", flush=True)


if __name__ == "__main__":
    main()

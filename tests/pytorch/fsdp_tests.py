"""FSDP2 (fully_shard) over tessera, with the models and checks of PyTorch's own tests: every rank computes the plain model beside it."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.testing._internal.common_fsdp import check_sharded_parity, DoubleLinear, MLP, MLPStack
from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer

from place import Ranks


class Fsdp2(Ranks):
    RANKS = 4

    def beside_plain(self, plain, sharded, inputs, data_group=None, steps=3, parity=True, ranks=None):
        """Trains both; `inputs(step)` are this rank's, and the plain model's gradients are averaged by hand."""
        ranks = ranks or self.world_size
        optimizers = [torch.optim.Adam(model.parameters(), 1e-2) for model in (plain, sharded)]
        for step in range(steps):
            x = inputs(step)
            losses = []
            for model in (plain, sharded):
                out = model(x)
                out = sum(o.sum() for o in out) if isinstance(out, tuple) else out.sum()
                losses.append(out)
                out.backward()
            for p in plain.parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad, group=data_group)
                    p.grad.div_(ranks)
            self.assertEqual(losses[0], losses[1])
            if parity:
                check_sharded_parity(self, plain, sharded)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def seeded(self, dims, group_rank=None):
        def inputs(step):
            torch.manual_seed(42 + step * 10 + (self.rank if group_rank is None else group_rank))
            return torch.randn(dims)

        return inputs

    def plain(self, make):
        torch.manual_seed(7)
        return make()

    def test_parity(self):
        self.begin()
        for reshard in (True, False, 2):
            model = self.plain(lambda: nn.Sequential(MLP(8), MLP(8, dim_multiplier=3), MLP(8)))
            sharded = copy.deepcopy(model)
            for part in sharded:
                fully_shard(part, reshard_after_forward=reshard)
            fully_shard(sharded, reshard_after_forward=reshard)
            self.beside_plain(model, sharded, self.seeded((4, 8)))

    def test_uneven_and_unused(self):
        self.begin()
        for dim in (1, 3, 7):
            model = self.plain(lambda: DoubleLinear(dim, use_second_linear=True))
            sharded = copy.deepcopy(model)
            fully_shard(sharded)
            self.beside_plain(model, sharded, self.seeded((2, dim)))
        model = self.plain(lambda: nn.Sequential(DoubleLinear(5, use_second_linear=False), nn.Linear(5, 5)))
        sharded = copy.deepcopy(model)
        fully_shard(sharded[0])
        fully_shard(sharded)
        self.beside_plain(model, sharded, self.seeded((2, 5)))

    def test_transformer(self):
        self.begin()
        args = ModelArgs(dropout_p=0.0, n_layers=2, weight_tying=True)
        model = self.plain(lambda: Transformer(args))
        sharded = copy.deepcopy(model)
        for layer in sharded.layers:
            fully_shard(layer)
        fully_shard(sharded)

        def tokens(step):
            torch.manual_seed(step * 10 + self.rank)
            return torch.randint(0, args.vocab_size, (2, args.max_seq_len))

        self.beside_plain(model, sharded, tokens)

    def test_hybrid(self):
        """Sharded over two, replicated over two."""
        self.begin()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = self.plain(lambda: MLPStack(6))
        sharded = copy.deepcopy(model)
        for part in sharded:
            fully_shard(part, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        self.beside_plain(model, sharded, self.seeded((3, 6)))

    def test_tensor_parallel_beside_it(self):
        self.begin()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        for checkpointed in (False, True):
            model = self.plain(lambda: MLPStack(8))
            sharded = copy.deepcopy(model).parallelize(mesh["model"], mesh["data"], checkpointed)
            data = mesh["data"]
            self.beside_plain(model, sharded, self.seeded((3, 8), data.get_local_rank()), data.get_group(), parity=False, ranks=2)
            for (name, p), q in zip(model.named_parameters(), sharded.parameters()):
                self.assertEqual(q.full_tensor(), p.detach(), msg=name)

    def test_accumulation(self):
        self.begin()
        model = self.plain(lambda: MLPStack(6))
        sharded = copy.deepcopy(model)
        for part in sharded:
            fully_shard(part)
        fully_shard(sharded)
        inputs = self.seeded((3, 6))
        for step in range(4):
            sharded.set_requires_gradient_sync(step % 2 == 1)
            for net in (model, sharded):
                net(inputs(step)).sum().backward()
            if step % 2 == 1:
                for p in model.parameters():
                    dist.all_reduce(p.grad)
                    p.grad.div_(self.world_size)
                check_sharded_parity(self, model, sharded)
                for net in (model, sharded):
                    net.zero_grad()

    def test_mixed_precision(self):
        self.begin()
        sharded = self.plain(lambda: MLPStack(16))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in sharded:
            fully_shard(part, mp_policy=policy)
        fully_shard(sharded, mp_policy=policy)
        plain = self.plain(lambda: MLPStack(16))
        x = self.seeded((3, 16))(0)
        self.assertEqual(sharded(x).dtype, torch.bfloat16)
        sharded(x).float().sum().backward()
        plain(x).sum().backward()
        for p, q in zip(plain.parameters(), sharded.parameters()):
            dist.all_reduce(p.grad)
            self.assertEqual(q.grad.full_tensor(), p.grad / self.world_size, atol=0.1, rtol=0.1)

    def test_state_dicts(self):
        self.begin()
        model = self.plain(lambda: MLPStack(6))
        sharded = copy.deepcopy(model)
        for part in sharded:
            fully_shard(part)
        fully_shard(sharded)
        full = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True, cpu_offload=False))
        for name, value in model.state_dict().items():
            self.assertEqual(full[name], value)
        self.assertTrue(all(isinstance(p, DTensor) for p in sharded.state_dict().values()))

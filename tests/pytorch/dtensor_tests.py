"""DTensor over tessera, with the models, the converter and the checks of PyTorch's own tests."""

import copy
import itertools

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module, RowwiseParallel
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorConverter, DTensorTestMixin, MLPModule, ModelArgs, Transformer

from place import Ranks


class DTensors(DTensorTestMixin, Ranks):
    RANKS = 4

    def test_every_redistribution(self):
        self.begin()
        for shape, names in (((4,), ("x",)), ((2, 2), ("x", "y"))):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            # As many rows as ranks, one less, one more, and fewer than ranks.
            for rows in (8, 7, 9, 3):
                value = torch.arange(rows * 6.0).view(rows, 6).sin()
                kinds = [Replicate(), Shard(0), Shard(1)]
                for before in itertools.product(kinds, repeat=len(shape)):
                    for after in itertools.product(kinds, repeat=len(shape)):
                        placed = distribute_tensor(value, mesh, before).redistribute(mesh, after)
                        self.assertEqual(placed.full_tensor(), value, msg=f"{rows} rows, {before} to {after}")
                partial = DTensor.from_local(value, mesh, [Partial()] * len(shape))
                for after in itertools.product(kinds, repeat=len(shape)):
                    self.assertEqual(partial.redistribute(mesh, after).full_tensor(), value * 4, msg=f"a sum to {after}")

    def test_operators_by_the_converter(self):
        self.begin()
        mesh = init_device_mesh("cpu", (4,))
        torch.manual_seed(1)
        a, b, square = torch.randn(8, 6), torch.randn(8, 6), torch.randn(6, 5)
        for call, args in (
            (torch.add, (a, b)),
            (torch.mul, (a, b)),
            (torch.matmul, (a, square)),
            (lambda x: x.sum(0), (a,)),
            (lambda x: x.mean(), (a,)),
            (lambda x: torch.softmax(x, 1), (a,)),
            (lambda x: x.t(), (a,)),
            (lambda x, y: torch.cat([x, y]), (a, b)),
            (lambda x: torch.nn.functional.layer_norm(x, (6,)), (a,)),
        ):
            converter = DTensorConverter(mesh, args, {})
            expected, ran = call(*args), 0
            for given, named in converter:
                if converter.successful():
                    self.assertEqual(call(*given, **named).full_tensor(), expected)
                    ran += 1
            self.assertGreater(ran, 1)

    def test_gradients(self):
        self.begin()
        mesh = init_device_mesh("cpu", (4,))
        torch.manual_seed(2)
        a, b = torch.randn(7, 5), torch.randn(5, 6)
        plain = [t.clone().requires_grad_() for t in (a, b)]
        (plain[0] @ plain[1]).square().sum().backward()
        for left, right in itertools.product([Replicate(), Shard(0), Shard(1)], repeat=2):
            placed = [distribute_tensor(a, mesh, [left]).requires_grad_(), distribute_tensor(b, mesh, [right]).requires_grad_()]
            (placed[0] @ placed[1]).square().sum().backward()
            for p, q in zip(plain, placed):
                self.assertEqual(q.grad.full_tensor(), p.grad, msg=f"{left} @ {right}")

    def test_tensor_parallel_mlp(self):
        self.begin()
        mesh = init_device_mesh("cpu", (4,))
        torch.manual_seed(5)
        plain = MLPModule("cpu")
        parallel = copy.deepcopy(plain)
        parallelize_module(parallel, mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
        optimizers = [torch.optim.SGD(model.parameters(), 0.25) for model in (plain, parallel)]
        for step in range(3):
            torch.manual_seed(step)
            x = torch.randn(20, 10)
            outs = [model(x) for model in (plain, parallel)]
            self.assertEqual(*outs)
            for out in outs:
                out.sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for (name, p), q in zip(plain.named_parameters(), parallel.parameters()):
            self.assertEqual(q.full_tensor(), p.detach(), msg=name)

    def test_tensor_parallel_transformer(self):
        self.begin()
        mesh = init_device_mesh("cpu", (4,))
        for sequence in (False, True):
            args = ModelArgs(dropout_p=0.0, n_layers=1, weight_tying=False)
            torch.manual_seed(9)
            plain = Transformer(args)
            parallel = Transformer.parallelize(copy.deepcopy(plain), mesh, sequence, local_output_for_attn=True)
            torch.manual_seed(4)
            tokens = torch.randint(0, args.vocab_size, (4, args.max_seq_len))
            outs = [model(tokens) for model in (plain, parallel)]
            self.assertEqual(outs[1], outs[0], msg=f"sequence parallel: {sequence}")
            for out in outs:
                out.square().sum().backward()
            for (name, p), q in zip(plain.named_parameters(), parallel.parameters()):
                grad = q.grad.full_tensor() if isinstance(q.grad, DTensor) else q.grad
                self.assertEqual(grad, p.grad, msg=f"{name}, sequence parallel: {sequence}", atol=1e-4, rtol=1e-4)

    def test_loss_parallel(self):
        self.begin()
        mesh = init_device_mesh("cpu", (4,))
        torch.manual_seed(6)
        x, y = torch.randn(5, 16, requires_grad=True), torch.randint(0, 16, (5,))
        expected = torch.nn.functional.cross_entropy(x, y)
        expected.backward()
        placed = distribute_tensor(x.detach(), mesh, [Shard(1)]).requires_grad_()
        with loss_parallel():
            got = torch.nn.functional.cross_entropy(placed, distribute_tensor(y, mesh, [Replicate()]))
            self.assertEqual(got.full_tensor(), expected.detach())
            got.backward()
        self.assertEqual(placed.grad.full_tensor(), x.grad)

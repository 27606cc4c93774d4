"""Models of transformers and diffusers, as their authors wrote them, trained on several axes at once, each beside one process (`make zoo`).

    tessera run -n 4 -- python tests/python/models_on_axes.py       # data x sharded, data x tensor, data x domain
    tessera run -n 8 -- python tests/python/models_on_axes.py       # data x sharded x tensor

Random weights from configurations, float64, two steps of SGD; the loss and every parameter are compared. Where no rows of a sequence or field are sharded,
nothing may move unasked (the policy "error").
"""

import copy
import sys

import torch
from torch import nn

import tessera as ts

F = nn.functional
IDS = torch.randint(64, (8, 12), generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def next_token(net, ids):
    logits = net(input_ids=ids).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0)
    # Its layers are Conv1D, whose weights are in x out; attention has q, k and v in one, and stays whole.
    plan = {"*.mlp.c_fc.weight": ts.sharded(1), "*.mlp.c_fc.bias": ts.sharded(0), "*.mlp.c_proj.weight": ts.sharded(0)}
    return GPT2LMHeadModel(config), IDS, next_token, plan, 1, 1e-12


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32)
    plan = {f"*.{name}_proj": ts.column(heads) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    plan |= {"*.o_proj": ts.row(4), "*.gate_proj": ts.column(), "*.up_proj": ts.column(), "*.down_proj": ts.row()}
    return LlamaForCausalLM(config), IDS, next_token, plan, 1, 1e-7  # its norms compute in float32


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(image_size=16, patch_size=4, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, hidden_dropout_prob=0, attention_probs_dropout_prob=0, num_labels=5)
    plan = {f"*.{name}_proj": ts.column(4) for name in "qkv"} | {"*.o_proj": ts.row(4), "*.fc1": ts.column(), "*.fc2": ts.row()}
    return ViTForImageClassification(config), IMAGES, lambda net, x: net(x).logits.square().mean(), plan, 2, 1e-12


def unet():
    from diffusers import UNet2DModel

    blocks = {"block_out_channels": (8, 16), "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    net = UNet2DModel(sample_size=16, layers_per_block=1, norm_num_groups=4, attention_head_dim=8, **blocks)
    plan = {f"*.to_{name}": ts.column(2) for name in "qkv"} | {"*.to_out.0": ts.row(2)}
    return net, IMAGES, lambda net, x: (net(x, 3).sample - x.sin()).square().mean(), plan, 2, 1e-12


def placed(net, kind, plan, dim):
    """The mesh, and where the samples lie on it."""
    if ts.world_size() == 8:
        mesh = ts.Mesh({"data": 2, "sharded": 2, "tensor": 2})
        ts.tensor_parallel(net, mesh, plan)
        ts.fully_shard(net, mesh, ["data", "sharded"])
        return mesh, [ts.Shard(0), ts.Shard(0), ts.Replicate()]
    mesh = ts.Mesh({"data": 2, kind: 2})
    if kind == "domain":
        ts.distribute_module(net, mesh)
        return mesh, [ts.Shard(0), ts.Shard(dim)]
    if kind == "tensor":
        ts.tensor_parallel(net, mesh, plan)
    ts.fully_shard(net, mesh, ["data", "sharded"] if kind == "sharded" else "data")
    return mesh, [ts.Shard(0), ts.Shard(0) if kind == "sharded" else ts.Replicate()]


def off_after_two_steps(make, kind):
    torch.manual_seed(0)
    alone, samples, loss, plan, dim, tolerance = make()
    alone = alone.double()
    start, net = copy.deepcopy(alone), copy.deepcopy(alone)
    mesh, where = placed(net, kind, plan, dim)
    ours, theirs = torch.optim.SGD(net.parameters(), 0.1), torch.optim.SGD(alone.parameters(), 0.1)
    off = 0.0
    for _ in range(2):
        mine, expected = loss(net, ts.distribute_tensor(samples, mesh, where)), loss(alone, samples)
        for value, optimizer in ((mine, ours), (expected, theirs)):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        off = max(off, abs(mine.item() - expected.item()))
    moved = max((p - q).abs().max().item() for p, q in zip(alone.parameters(), start.parameters()))
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        off = max(off, (ts.full_tensor(p.detach()) - q).abs().max().item())
    assert moved > 1e-4 and off <= tolerance, (off, tolerance, moved)
    return off


def main():
    torch.set_num_threads(1)
    ts.init(timeout=120)
    wanted = sys.argv[1:]
    for make in (gpt2, llama, vit, unet):
        for kind in ("sharded", "tensor", "domain") if ts.world_size() == 4 else ("sharded x tensor",):
            if wanted and make.__name__ not in wanted:
                continue
            ts.set_policies("allow" if kind == "domain" else "error")
            off = off_after_two_steps(make, kind)
            if ts.rank() == 0:
                print(f"{make.__name__}, data x {kind}: {off:.1e} from one process", flush=True)


main()

"""Runs models that others wrote, unchanged, on sharded inputs beside one process, and writes the table of outcomes.

    zoo.py [--table docs/model_table.md] [--only REGEX] [--seconds 240] [--jobs 2] [--results FILE]

Each model is run in float64 on 2 ranks, by tessera.check(): outputs and every gradient, once with the rows of its images (or the sequence) sharded, once
with the samples; then it is trained a step, its inputs sharded unevenly: its parameters and running statistics are compared, and where the outputs of its
modules lie is looked at. Networks on graphs, on nodes cut by owners, are in zoo_graphs.py. Every case has a process that can be lost. `--results`: cases whose results the file has are not run again, and new ones are added
to it. Exit status 1 if a case is wrong, hangs or crashes, or does not stay sharded where it should.
"""

import argparse
import concurrent.futures
import dataclasses
import importlib.metadata
import json
import pathlib
import re
import subprocess
import sys
import time

import zoo_graphs

SIZE = 64  # rows and columns of an image
TOLERANCE = 1e-8  # of the largest value
# Modules behind which no row is left: what pools a whole image, and what classifies it.
HEAD = r"^(avgpool|avg_pool|global_pool|heads?|head_drop|classifier|fc|fc_norm)\b"
# Blocks that weigh channels by what they are on average (squeeze and excitation).
SQUEEZE = r"\.(se\..*|avgpool|fc1|fc2|activation|scale_activation)$"


@dataclasses.dataclass
class Model:
    make: object  # a function that gives the model and the shapes of its inputs
    dense: bool = False  # its output has the rows (or the sequence) of its input
    whole: str = HEAD  # a regular expression: the only modules whose outputs may be complete where rows are sharded
    apart: str = "$^"  # the same where samples are: what is computed of parameters alone
    of_samples: tuple = ("Shard(0)",)  # where its outputs lie when samples are sharded
    tolerance: float = TOLERANCE


def vision(name, whole=HEAD, apart="$^", of_samples=("Shard(0)",), **options):
    def make():
        import torchvision

        return torchvision.models.get_model(name, weights=None, num_classes=7, **options), [(3, 3, SIZE, SIZE)]

    return Model(make, whole=whole, apart=apart, of_samples=of_samples)


def segmentation(name, whole="$^"):
    def make():
        import torchvision

        net = torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=4)
        return net, [(3, 3, SIZE, SIZE)]

    return Model(make, dense=True, whole=whole)


def segmentation_of_smp(name, whole="$^"):
    def make():
        import segmentation_models_pytorch

        return segmentation_models_pytorch.create_model(name, "resnet18", encoder_weights=None, in_channels=3, classes=4), [(3, 3, SIZE, SIZE)]

    return Model(make, dense=True, whole=whole)


def neural_operator(name, whole="$^", **options):
    def make():
        import neuralop.models

        net = getattr(neuralop.models, name)(in_channels=3, out_channels=2, hidden_channels=8, **options)
        return net, [(3, 3, SIZE // 2, SIZE // 2)]

    return Model(make, dense=True, whole=whole, tolerance=1e-6)  # it computes its spectra in complex64


def image_model(name, whole=HEAD, apart="$^", **options):
    def make():
        import timm

        return timm.create_model(name, pretrained=False, num_classes=7, **options), [(3, 3, SIZE, SIZE)]

    return Model(make, whole=whole, apart=apart)


def layers(make_net, *shapes):
    return Model(lambda: (make_net(), list(shapes)), dense=True, whole="$^")


def models():
    """{name: Model}."""
    from torch import nn

    named = {f"torchvision {n}": vision(n) for n in (
        "alexnet", "resnet18", "resnext50_32x4d", "wide_resnet50_2", "densenet121", "squeezenet1_1", "mobilenet_v2", "shufflenet_v2_x0_5", "mnasnet0_5",
        "convnext_tiny",
    )}
    named |= {f"torchvision {n}": vision(n, f"{HEAD}|{SQUEEZE}") for n in ("mobilenet_v3_small", "regnet_y_400mf", "efficientnet_b0", "efficientnet_v2_s")}
    # of the smallest fields, one window has all rows
    named["torchvision swin_t"] = vision("swin_t", HEAD + r"|^flatten$|^features\.[57]\.\d\.stochastic_depth$")
    biases = r"\.cpb_mlp\."  # of parameters alone
    named["torchvision swin_v2_t"] = vision("swin_v2_t", HEAD + r"|^flatten$|" + biases, biases)
    # nn.MultiheadAttention merges samples with the sequence, samples innermost, and so they move; its output is the first summand here, and lies on
    named["torchvision vit_b_16"] = vision("vit_b_16", apart=HEAD, of_samples=("Replicate",), image_size=SIZE)
    # the branches of these that pool the whole image
    for name, pooled in (
        ("fcn_resnet50", "$^"),
        ("deeplabv3_mobilenet_v3_large", rf"{SQUEEZE}|^classifier\.0\.convs\.4\."),
        ("lraspp_mobilenet_v3_large", rf"{SQUEEZE}|^classifier\.scale\."),
    ):
        named[f"torchvision {name}"] = segmentation(name, pooled)
    named |= {f"smp {n}": segmentation_of_smp(n) for n in ("Unet", "UnetPlusPlus", "FPN", "Segformer")}
    named["smp DeepLabV3Plus"] = segmentation_of_smp("DeepLabV3Plus", r"^decoder\.aspp\.0\.convs\.4\.")
    named["smp PSPNet"] = segmentation_of_smp("PSPNet", r"^decoder\.psp\.blocks\.0\.pool\.")
    named["neuraloperator FNO"] = neural_operator("FNO", n_modes=(8, 8), n_layers=2)
    # modes are slices of the dim that is sharded then: written into zeros of the model, they become complete
    named["neuraloperator FNO, padded, group_norm"] = neural_operator(
        "FNO", r"^fno_blocks\.norm\.[02]$", n_modes=(8, 8), n_layers=2, domain_padding=0.25, norm="group_norm",
    )
    named["neuraloperator TFNO"] = neural_operator("TFNO", n_modes=(8, 8), n_layers=2, factorization="tucker", rank=0.5)
    named["neuraloperator UNO"] = neural_operator(
        "UNO", lifting_channels=16, projection_channels=16, n_layers=3, uno_out_channels=[8, 12, 8], uno_n_modes=[[4, 4]] * 3,
        uno_scalings=[[1.0, 1.0], [0.5, 0.5], [2.0, 2.0]], horizontal_skips_map={2: 0}, channel_mlp_skip="linear",
    )
    named |= {f"timm {n}": image_model(n) for n in ("resnet10t", "convnextv2_atto", "hrnet_w18_small", "poolformer_s12")}
    named["timm tf_efficientnetv2_b0"] = image_model("tf_efficientnetv2_b0", f"{HEAD}|{SQUEEZE}")
    named |= {f"timm {n}": image_model(n, rf"{HEAD}|{SQUEEZE}|^(conv_head|norm_head|act2|flatten)\b") for n in ("ghostnet_100", "mobilenetv4_conv_small")}
    named["timm resnest14d"] = image_model("resnest14d", rf"{HEAD}|\.conv2\.(bn1|act1|fc1|fc2|rsoftmax)$")  # weighs what it split
    named["timm dm_nfnet_f0"] = image_model("dm_nfnet_f0", rf"{HEAD}|\.attn_last\.")
    # attention over channels; an encoding of positions, of parameters alone
    encoding = r"\.pos_embd\.token_projection$"
    named["timm edgenext_xx_small"] = image_model("edgenext_xx_small", rf"{HEAD}|\.xca\.attn_drop$|{encoding}", encoding)
    named |= {f"timm {n}": image_model(n, img_size=SIZE) for n in ("vit_tiny_patch16_224", "deit_tiny_patch16_224")}
    # of the third stage one window has all rows; those of the fourth are merged of pairs that the ranks' boundary cuts
    small = r"^layers\.2\.blocks\.\d\.(attn\.proj|attn\.proj_drop|drop_path1)$|^layers\.3\.|^norm$"
    named["timm swin_tiny_patch4_window7_224"] = image_model("swin_tiny_patch4_window7_224", f"{HEAD}|{small}", img_size=SIZE)
    # it mixes the tokens of a sample: sums over the sharded ones
    named["timm mixer_s32_224"] = image_model("mixer_s32_224", rf"{HEAD}|\.mlp_tokens\.|^blocks\.\d\.drop_path$", img_size=SIZE)
    biases = r"\.rel_pos\."  # of parameters alone
    windows = r"\.attn_(block|grid)\.(attn\.(qkv|proj|proj_drop)|ls1|drop_path1)$"  # the ranks' boundary cuts them
    named["timm maxvit_rmlp_pico_rw_256"] = image_model("maxvit_rmlp_pico_rw_256", f"{HEAD}|{SQUEEZE}|{biases}|{windows}", biases, img_size=SIZE)
    named["timm coatnet_nano_rw_224"] = image_model("coatnet_nano_rw_224", f"{HEAD}|{SQUEEZE}", img_size=SIZE)
    named["nn.TransformerEncoder"] = layers(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2), (3, 9, 16))
    named["nn.Transformer"] = layers(lambda: nn.Transformer(16, 4, 1, 1, 32, batch_first=True), (3, 9, 16), (3, 7, 16))
    # it goes step by step through the sequence; its states have the samples in dim 1
    named["nn.LSTM"] = Model(lambda: (nn.LSTM(6, 5, 2, batch_first=True), [(3, 9, 6)]), of_samples=("Shard(0)", "Shard(1)"))
    return named


def uneven(n):
    return [n - n // 3, n // 3]


def without_chance(net):
    """What is dropped at random is kept: sharded tensors draw other numbers than plain ones."""
    from torch import nn

    for module in net.modules():
        if type(module).__name__ == "StochasticDepth" or isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif type(module).__name__ == "DropPath":
            module.drop_prob = 0.0
        elif isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            module.dropout = 0.0
        if isinstance(getattr(module, "drop_rate", None), float):  # timm's, of a function
            module.drop_rate = 0.0
    return net


def in_double(net):
    """Complex parameters too, which double() leaves as they are."""
    import torch

    return net.double()._apply(lambda t: t.to(torch.complex128) if t.is_complex() else t)


def without_zeros(net):
    """Parameters that begin at (nearly) zero are drawn: behind a head of zeros every gradient would be zero, and equal to any other."""
    import torch

    generator = torch.Generator().manual_seed(2)
    for p in net.parameters():
        if p.numel() and p.detach().abs().max() < 1e-3:
            p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) / 10
    return net


def stepped(net, inputs, call):
    """The model after one step of an optimizer; and of each module without others inside: its name, and where its output lies (None: a plain tensor)."""
    import torch

    import tessera as ts

    lies = []

    def note(name):
        def hook(module, given, out):
            if isinstance(out, torch.Tensor) and out.dim():
                lies.append((name, ts.spec(out).placements if ts.is_sharded(out) else None))

        return hook

    for name, module in net.named_modules():
        if not any(True for _ in module.children()):
            module.register_forward_hook(note(name))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    out = call(net, *inputs)
    sum(t.square().mean() for t in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(t, torch.Tensor)).backward()
    optimizer.step()
    return net, lies


def state_of(net):
    import tessera as ts

    def value(t):
        t = ts.full_tensor(t.detach()) if ts.is_sharded(t) else t.detach().clone()
        return t if t.is_complex() else t.double()

    return {n: value(t) for n, t in (*net.named_parameters(), *net.named_buffers())}


def differences(got, expected, before):
    """{name: difference}, relative to what the step changed in that parameter or running statistic, at least to a thousandth of the largest change."""
    changes = {n: (e - before[n]).abs().max().item() for n, e in expected.items() if e.numel()}
    least = 1e-3 * max(changes.values())
    return {n: (got[n] - e).abs().max().item() / max(changes[n], least, 1e-30) for n, e in expected.items() if e.numel()}


def run(name, which):
    """One case, printed as a line of JSON."""
    import copy

    import torch

    import tessera as ts

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = models()[name]
    net, shapes = model.make()
    net = without_zeros(in_double(without_chance(net)))
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    along = 0 if which == "samples" else 2 if inputs[0].dim() == 4 else 1

    def call(model, *given):
        out = model(*given)
        return list(out.values()) if isinstance(out, dict) else out

    before = state_of(net)
    alone = stepped(copy.deepcopy(net), inputs, call)[0]
    expected = state_of(alone)

    def body(rank):
        mesh = ts.Mesh({"x": 2})
        report = ts.check(net, inputs, mesh, [ts.Shard(along)], call=call, tolerance=model.tolerance)
        ts.set_policies("allow", "allow")
        placed = [ts.distribute_tensor(x, mesh, [ts.Shard(along)], {along: uneven(x.shape[along])}) for x in inputs]
        mine, lies = stepped(ts.distribute_module(copy.deepcopy(net), mesh), placed, call)
        return report, differences(state_of(mine), expected, before), lies

    report, after, lies = ts.run_threads(2, body, timeout=100.0)[0]
    moved = max(report.moved, key=lambda m: m.bytes, default=None)
    worst = max((*report.values, *report.gradients), key=lambda c: c.difference)
    least = max(after, key=after.get)
    places = [(n, p) for n, p in lies if p is not None]
    print("RESULT " + json.dumps({
        "wrong": len(report.wrong),
        "worst": f"{worst.name} off by {worst.difference:.1e}",
        "gradients": len(report.gradients),
        "step": after[least],
        "step worst": least,
        "still": sum(p.grad is not None and not p.grad.any() for p in alone.parameters()),
        "refused": [f"{r.operator} at {r.where}" for r in report.refused],
        "forward": sum(m.bytes for m in report.moved),
        "backward": report.backward.bytes,
        "most": moved.operator if moved else "",
        "output": sorted({", ".join(map(str, v.placements)) if v.placements else "plain" for v in report.values}),
        "along": str(ts.Shard(along)),
        "modules": len(places),
        "whole": [n for n, p in places if not any(isinstance(x, ts.Shard) for x in p)],
    }))


def judged(name, which, result):
    """(outcome, why) of what run() printed."""
    if which == "owners":
        return ("equal", "") if result["off"] <= TOLERANCE else ("wrong", f"{result['worst']} off by {result['off']:.1e}")
    model = models()[name]
    may_be_whole = model.apart if which == "samples" else model.whole
    whole = [m for m in result["whole"] if not re.search(may_be_whole, m)]
    if result["wrong"]:
        return "wrong", result["worst"]
    if not result["step"] <= model.tolerance:
        return "wrong", f"{result['step worst']} after a step off by {result['step']:.1e}"
    if result["still"] > result["gradients"] // 10:
        return "error", f"a step leaves {result['still']} parameters as they were: nothing is compared there"
    if whole:
        return "gathered", f"{len(whole)} of {result['modules']} modules give complete outputs, the first of them {whole[0]}"
    wanted = model.of_samples if which == "samples" else (result["along"],) if model.dense else None
    if wanted and result["output"] != [*wanted]:
        return "gathered", f"the output lies as {'; '.join(result['output'])}"
    if result["refused"]:
        return "refused", "; ".join(result["refused"][:2])
    return "equal", ""


def tried(name, which, seconds):
    command = [sys.executable, __file__, "--case", name, which]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"outcome": "hung", "why": f"no end after {seconds} s"}
    line = next((x for x in ended.stdout.splitlines() if x.startswith("RESULT ")), None)
    if line is None:
        errors = [x for x in ended.stderr.splitlines() if re.match(r"\w*(Error|Exception)|[\w.]+Error:", x)] or ended.stderr.splitlines()[-1:]
        died = ended.returncode < 0
        return {"outcome": "crashed" if died else "error", "why": f"signal {-ended.returncode}" if died else " ".join(errors)[:200]}
    return json.loads(line[7:])


def outcome_of(name, which, result):
    return (result["outcome"], result["why"]) if "outcome" in result else judged(name, which, result)


def kib(n):
    return f"{n / 1024:.0f} KiB"


def cell(name, which, r):
    outcome, why = outcome_of(name, which, r)
    if outcome not in ("equal", "refused"):
        return f"{outcome}: {why}"
    if which == "owners":
        moved = f"gathered at `{r['gathered']}`" if r["gathered"] else "ghosts and sums alone"
        return f"equal | {r['gradients']} | {moved} | {kib(r['bytes'])}"
    text = "equal" if outcome == "equal" else f"equal, {len(r['refused'])} operators refused and gathered ({why})"
    sends = f"sends {kib(r['forward'])} + {kib(r['backward'])}" + (f", most in `{r['most']}`" if r["forward"] else "")
    return f"{text}; {r['gradients']} gradients; {'; '.join(r['output'])}, {r['modules'] - len(r['whole'])} of {r['modules']}; {sends}"


def table(results):
    outcomes = [outcome_of(n, w, r)[0] for n, of in results.items() for w, r in of.items()]
    counts = ", ".join(f"{outcomes.count(k)} {k}" for k in ("equal", "refused", "gathered", "wrong", "error", "hung", "crashed") if outcomes.count(k))
    packages = ("torch", "torchvision", "timm", "neuraloperator", "segmentation-models-pytorch")
    versions = ", ".join(f"{p} {importlib.metadata.version(p).split('+')[0]}" for p in packages)
    lines = [
        "# Models that others wrote, unchanged",
        "",
        f"Written by `make zoo`: do not edit. {versions}; float64, images of {SIZE} x {SIZE} (neuraloperator: half of that), 3 samples, 2 ranks; outputs and every",
        f"gradient beside one process, to {TOLERANCE:.0e} of the largest value, by [`tessera.check`](bring_a_model.md), then, on shards of two thirds and one, every parameter",
        "and running statistic after a step of SGD (neuraloperator, which computes its spectra in complex64: to 1e-06). *Rows*: rows of the images are sharded",
        "(of sequences: the sequence); *samples*: the batch. After the gradients: where the output lies, and how many of the modules without others inside give sharded",
        "outputs. A case is *gathered* where a module gives a complete one of which tests/python/zoo.py does not say why (heads, pooled branches, tables of positions),",
        "or where samples, or rows of a model without a head, do not stay sharded. Parameters that begin at zero are drawn: behind them all gradients would be zero.",
        f"*Sends*: bytes of one rank in forward + backward; the input has {kib(3 * 3 * SIZE * SIZE * 8)}.",
        "",
        f"{len(outcomes)} cases: {counts}.",
        "",
        "| model | rows | samples |",
        "| --- | --- | --- |",
    ]
    for name, of in results.items():
        if "rows" in of:
            lines.append(f"| {name} | {' | '.join(cell(name, w, of[w]).replace('|', '/').replace('<', '&lt;') for w in ('rows', 'samples'))} |")
    graphs = {n: of["owners"] for n, of in results.items() if "owners" in of}
    packages = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in ("torch_geometric", "mace-torch"))
    lines += [
        "",
        "## Networks on graphs",
        "",
        f"{packages}, on the {zoo_graphs.NODES} nodes of a graph that a table of owners cuts over {zoo_graphs.RANKS} ranks unevenly, with the edges into them",
        "([graphs](graphs.md)); float64. Values, slopes by the nodes (forces), and the gradients of all parameters of a loss of both, beside one process. *Moves*: what",
        "the ranks exchange, and whether something had to be gathered, by which operator first; *bytes*: what one rank sends and receives, forward and twice backward.",
        "",
        "| network | outcome | gradients | moves | bytes |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [f"| {n} | {cell(n, 'owners', r)} |" for n, r in graphs.items()]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=pathlib.Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=int, default=240, help="limit of a case")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--results", type=pathlib.Path)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        return zoo_graphs.run(arguments.case[0]) if arguments.case[1] == "owners" else run(*arguments.case)
    cases = {n: ("rows", "samples") for n in models()} | {n: ("owners",) for n in zoo_graphs.models()}
    names = [n for n in cases if re.search(arguments.only, n)]
    began = time.monotonic()
    kept = json.loads(arguments.results.read_text()) if arguments.results and arguments.results.exists() else {}
    results = {n: dict(kept.get(n, {})) for n in names}
    todo = [(n, w) for n in names for w in cases[n] if w not in results[n]]
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        waiting = {pool.submit(tried, n, w, arguments.seconds): (n, w) for n, w in todo}
        for done in concurrent.futures.as_completed(waiting):
            name, which = waiting[done]
            results[name][which] = done.result()
            print(f"{name}, {which}: {cell(name, which, done.result())}", flush=True)
            if arguments.results:
                arguments.results.write_text(json.dumps(kept | results, indent=1))
    if arguments.table and arguments.only:
        print(f"{arguments.table} stays as it is: these are not all models")
    elif arguments.table:
        arguments.table.write_text(table(results))
    print(f"{len(names)} models in {time.monotonic() - began:.0f} s")
    sys.exit(any(outcome_of(n, w, r)[0] not in ("equal", "refused") for n, of in results.items() for w, r in of.items()))


if __name__ == "__main__":
    main()

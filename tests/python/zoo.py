"""Runs models that others wrote, unchanged, on sharded inputs beside one process, and writes the table of outcomes.

    zoo.py [--table docs/model_table.md] [--only REGEX] [--seconds 120] [--jobs 2] [--results FILE]

Each model is run in float64 on 2 ranks, by tessera.check(): outputs and every gradient, once with the rows of its images (or the sequence) sharded
unevenly, once with the samples. Every case has a process that can be lost. `--results`: cases whose results the file has are not run again, and new ones
are added to it. Exit status 1 if a case is wrong, hangs or crashes.
"""

import argparse
import concurrent.futures
import importlib.metadata
import json
import pathlib
import re
import subprocess
import sys
import time

SIZE = 64  # rows and columns of an image


def vision(name, **options):
    def make():
        import torchvision

        return torchvision.models.get_model(name, weights=None, num_classes=7, **options), [(3, 3, SIZE, SIZE)]

    return make


def segmentation(name):
    def make():
        import torchvision

        net = torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=4)
        return net, [(3, 3, SIZE, SIZE)]

    return make


def image_model(name, **options):
    def make():
        import timm

        return timm.create_model(name, pretrained=False, num_classes=7, **options), [(3, 3, SIZE, SIZE)]

    return make


def layers(make_net, *shapes):
    return lambda: (make_net(), list(shapes))


def models():
    """{name: a function that gives the model and the shapes of its inputs}."""
    from torch import nn

    named = {f"torchvision {n}": vision(n) for n in (
        "alexnet", "resnet18", "resnext50_32x4d", "wide_resnet50_2", "densenet121", "squeezenet1_1", "mobilenet_v2", "mobilenet_v3_small",
        "shufflenet_v2_x0_5", "mnasnet0_5", "regnet_y_400mf", "efficientnet_b0", "efficientnet_v2_s", "convnext_tiny", "swin_t", "swin_v2_t",
    )}
    named["torchvision vit_b_16"] = vision("vit_b_16", image_size=SIZE)
    named |= {f"torchvision {n}": segmentation(n) for n in ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large")}
    named |= {f"timm {n}": image_model(n) for n in (
        "resnet10t", "convnextv2_atto", "edgenext_xx_small", "hrnet_w18_small", "dm_nfnet_f0", "ghostnet_100", "poolformer_s12", "resnest14d",
        "tf_efficientnetv2_b0", "mobilenetv4_conv_small",
    )}
    named |= {f"timm {n}": image_model(n, img_size=SIZE) for n in (
        "vit_tiny_patch16_224", "deit_tiny_patch16_224", "mixer_s32_224", "swin_tiny_patch4_window7_224", "maxvit_rmlp_pico_rw_256", "coatnet_nano_rw_224",
    )}
    named["nn.TransformerEncoder"] = layers(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2), (3, 9, 16))
    named["nn.Transformer"] = layers(lambda: nn.Transformer(16, 4, 1, 1, 32, batch_first=True), (3, 9, 16), (3, 7, 16))
    named["nn.LSTM"] = layers(lambda: nn.LSTM(6, 5, 2, batch_first=True), (3, 9, 6))
    return named


def uneven(n):
    return [n - n // 3, n // 3]


def without_chance(net):
    """Paths that are dropped at random are kept: sharded tensors draw other numbers than plain ones."""
    for module in net.modules():
        if type(module).__name__ == "StochasticDepth":
            module.p = 0.0
        elif type(module).__name__ == "DropPath":
            module.drop_prob = 0.0
    return net


def run(name, which):
    """One case, printed as a line of JSON."""
    import torch

    import tessera as ts

    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, shapes = models()[name]()
    net = without_chance(net).double()
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    along = 0 if which == "samples" else 2 if inputs[0].dim() == 4 else 1

    def call(model, *given):
        out = model(*given)
        return list(out.values()) if isinstance(out, dict) else out

    def body(rank):
        mesh = ts.Mesh({"x": 2})
        return ts.check(net, inputs, mesh, [ts.Shard(along)], call=call, tolerance=1e-8)

    report = ts.run_threads(2, body, timeout=100.0)[0]
    moved = max(report.moved, key=lambda m: m.bytes, default=None)
    worst = max((*report.values, *report.gradients), key=lambda c: c.difference)
    print("RESULT " + json.dumps({
        "wrong": len(report.wrong),
        "worst": f"{worst.name} off by {worst.difference:.1e}",
        "gradients": len(report.gradients),
        "refused": [f"{r.operator} at {r.where}" for r in report.refused],
        "forward": sum(m.bytes for m in report.moved),
        "backward": report.backward.bytes,
        "input": inputs[0].numel() * 8,
        "most": moved.operator if moved else "",
    }))


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
    result = json.loads(line[7:])
    result["outcome"] = "wrong" if result["wrong"] else "refused" if result["refused"] else "equal"
    result["why"] = result["worst"] if result["wrong"] else "; ".join(result["refused"][:2])
    return result


def kib(n):
    return f"{n / 1024:.0f} KiB"


def cell(r):
    if r["outcome"] not in ("equal", "refused"):
        return f"{r['outcome']}: {r['why']}"
    text = "equal" if r["outcome"] == "equal" else f"equal, {len(r['refused'])} operators refused and gathered ({r['why']})"
    return f"{text}; {r['gradients']} gradients; sends {kib(r['forward'])} + {kib(r['backward'])}" + (f", most in `{r['most']}`" if r["forward"] else "")


def table(results):
    outcomes = [r["outcome"] for of in results.values() for r in of.values()]
    counts = ", ".join(f"{outcomes.count(k)} {k}" for k in ("equal", "refused", "wrong", "error", "hung", "crashed") if outcomes.count(k))
    versions = ", ".join(f"{p} {importlib.metadata.version(p).split('+')[0]}" for p in ("torch", "torchvision", "timm"))
    lines = [
        "# Models that others wrote, unchanged",
        "",
        f"Written by `make zoo`: do not edit. {versions}; float64, images of {SIZE} x {SIZE}, 3 samples, 2 ranks, shards of two thirds and one; outputs and every",
        "gradient beside one process, to 1e-8 of the largest value, by [`tessera.check`](bring_a_model.md). *Rows*: rows of the images are sharded (of sequences: the",
        "sequence); *samples*: the batch. *Sends*: bytes of one rank in forward + backward; the input has "
        f"{kib(3 * 3 * SIZE * SIZE * 8)}.",
        "",
        f"{len(outcomes)} cases: {counts}.",
        "",
        "| model | rows | samples |",
        "| --- | --- | --- |",
    ]
    for name, of in results.items():
        lines.append(f"| {name} | {' | '.join(cell(of[w]).replace('|', '/').replace('<', '&lt;') for w in ('rows', 'samples'))} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=pathlib.Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=int, default=120, help="limit of a case")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--results", type=pathlib.Path)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        return run(*arguments.case)
    names = [n for n in models() if re.search(arguments.only, n)]
    began = time.monotonic()
    kept = json.loads(arguments.results.read_text()) if arguments.results and arguments.results.exists() else {}
    results = {n: dict(kept.get(n, {})) for n in names}
    todo = [(n, w) for n in names for w in ("rows", "samples") if w not in results[n]]
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        waiting = {pool.submit(tried, n, w, arguments.seconds): (n, w) for n, w in todo}
        for done in concurrent.futures.as_completed(waiting):
            name, which = waiting[done]
            results[name][which] = done.result()
            print(f"{name}, {which}: {cell(done.result())}", flush=True)
            if arguments.results:
                arguments.results.write_text(json.dumps(kept | results, indent=1))
    if arguments.table:
        arguments.table.write_text(table(results))
    print(f"{len(names)} models in {time.monotonic() - began:.0f} s")
    sys.exit(any(r["outcome"] not in ("equal", "refused") for of in results.values() for r in of.values()))


if __name__ == "__main__":
    main()

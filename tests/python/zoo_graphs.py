"""Networks on graphs that others wrote, unchanged, on nodes that a table of owners cuts, beside one process: cases of zoo.py.

Nodes lie on three ranks, unevenly, with the edges into them. Values, forces (slopes by the nodes' places or features) and the gradients of all parameters of
a loss of both, second derivatives that is, are compared. At first nothing but ghosts and sums may move (the policy "error"); where something else has to, the
operator is named.
"""

import copy
import json

RANKS, NODES, CUTOFF = 3, 30, 1.6


def drawn():
    import torch

    g = torch.Generator().manual_seed(0)
    place = torch.rand(NODES, 3, generator=g, dtype=torch.float64) * RANKS
    far = torch.cdist(place, place)
    rows = {"place": place, "features": torch.randn(NODES, 6, generator=g, dtype=torch.float64), "kind": torch.randint(2, (NODES,), generator=g)}
    return rows | {"graph": torch.zeros(NODES, dtype=torch.long)}, ((far < CUTOFF) & ~torch.eye(NODES, dtype=torch.bool)).nonzero().T.contiguous(), place[:, 0].long()


def sloped(value, by):
    import torch

    return value, torch.autograd.grad(value.square().sum(), by, create_graph=True)[0]


def layers(name, **options):
    """A model of PyTorch Geometric of several layers."""

    def make():
        from torch_geometric.nn import models

        return getattr(models, name)(6, 8, 2, 3, **options), lambda net, d, e: sloped(net(d["features"], e), d["features"])

    return make


def read_out():
    """Layers, a normalization over all nodes, and the mean over each graph's nodes."""
    from torch_geometric import nn

    net = nn.Sequential("x, e, b", [
        (nn.models.GIN(6, 8, 2, 8, norm="graph_norm"), "x, e -> x"), (nn.global_mean_pool, "x, b -> x"), (nn.MLP([8, 8, 3], norm=None), "x -> x"),
    ])
    return net, lambda net, d, e: sloped(net(d["features"], e, d["graph"]), d["features"])


def softmax_of_edges():
    import torch
    from torch_geometric import nn

    block = nn.DeepGCNLayer(nn.GENConv(6, 6, aggr="softmax", t=1.0, learn_t=True), nn.LayerNorm(6), torch.nn.ReLU())
    return nn.Sequential("x, e", [(block, "x, e -> x")]), lambda net, d, e: sloped(net(d["features"], e), d["features"])


def schnet():
    import torch
    from torch_geometric.nn.models import SchNet

    class Given(torch.nn.Module):
        def forward(self, place, graph):
            return self.edges, (place[self.edges[0]] - place[self.edges[1]]).norm(dim=1)

    def call(net, d, e):
        net.interaction_graph.edges = e
        return sloped(net(d["kind"], d["place"], d["graph"]), d["place"])

    return SchNet(16, 16, 2, 8, CUTOFF, interaction_graph=Given()), call


def mace():
    import numpy
    import torch
    from mace import modules  # before e3nn: it says how that is to be loaded
    from e3nn.o3 import Irreps

    block = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    net = modules.ScaleShiftMACE(
        r_max=CUTOFF, num_bessel=4, num_polynomial_cutoff=3, max_ell=2, interaction_cls=block, interaction_cls_first=block, num_interactions=2, num_elements=2,
        hidden_irreps=Irreps("8x0e + 8x1o"), MLP_irreps=Irreps("8x0e"), atomic_energies=numpy.array([[-1.0, -2.0]]), avg_num_neighbors=6.0,
        atomic_numbers=[1, 8], correlation=2, gate=torch.nn.functional.silu, atomic_inter_scale=1.0, atomic_inter_shift=0.0,
    )

    def call(net, d, e):
        still = d["place"].detach().index_select(0, e[0]) * 0  # no edge goes through a periodic boundary
        attributes = torch.nn.functional.one_hot(d["kind"], 2).double()
        of = {"positions": d["place"], "node_attrs": attributes, "edge_index": e, "shifts": still, "unit_shifts": still, "batch": d["graph"]}
        out = net(of | {"cell": torch.eye(3), "ptr": torch.tensor([0, NODES])}, training=True)
        return out["energy"], out["forces"]

    return net, call


def models():
    named = {"GCN": layers("GCN", add_self_loops=False), "GCN, loops added": layers("GCN"), "GraphSAGE": layers("GraphSAGE", aggr="max", norm="layer_norm", jk="cat")}
    named |= {"GIN": layers("GIN", norm="batch_norm"), "GIN, read out": read_out, "GAT": layers("GAT", heads=2, add_self_loops=False), "EdgeCNN": layers("EdgeCNN")}
    named["GATv2, loops added"] = layers("GAT", heads=2, v2=True)
    named |= {"GENConv, softmax": softmax_of_edges, "SchNet": schnet}
    return {f"torch_geometric {n}": make for n, make in named.items()} | {"mace-torch ScaleShiftMACE": mace}


def trained(net, call, rows, edges):
    """Values and forces, of which a loss has gone backward."""
    rows = {n: t.requires_grad_() if t.is_floating_point() else t for n, t in rows.items()}
    value, slope = call(net, rows, edges)
    (value.square().sum() + slope.pow(3).sum()).backward()
    return value.detach(), slope.detach()


def tried(make, moved):
    """[(what, difference over the largest value)] on the first rank, and the bytes that it sends and receives."""
    import torch

    import tessera as ts

    rows, edges, owner = drawn()
    net, call = make()
    nets = [copy.deepcopy(net) for _ in range(RANKS)]
    value, slope = trained(net, call, {n: t.clone() for n, t in rows.items()}, edges)
    order = owner.argsort(stable=True)
    least = 1e-3 * max(p.grad.abs().max().item() for p in net.parameters() if p.grad is not None)

    def off(got, expected, least=1e-30):
        return (ts.full_tensor(got) - expected).abs().max().item() / max(expected.abs().max().item(), least)

    def body(rank):
        mesh, mine = ts.Mesh({"domain": RANKS}), nets[rank]
        ts.distribute_module(mine, mesh)
        ts.set_policies(redistribution=moved)
        own = (owner == rank).nonzero().flatten()
        nodes = ts.OwnedRows(mesh, own)
        here = {n: nodes.shard(t[own]) for n, t in rows.items()}
        with nodes, ts.CommTrace() as trace:
            out = trained(mine, call, here, nodes.edges(edges[:, owner[edges[1]] == rank]))
        pairs = [("value", off(out[0], value[order] if len(value) == NODES else value)), ("slope", off(out[1], slope[order]))]
        for (n, p), q in zip(mine.named_parameters(), net.parameters(), strict=True):
            if q.grad is not None:
                pairs.append((n, off(p.grad, q.grad, least)))
        return pairs, trace.bytes

    return ts.run_threads(RANKS, body, timeout=100.0)[0]


def run(name):
    """One case, printed as a line of JSON."""
    import torch

    import tessera as ts

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    gathered = ""
    torch.manual_seed(0)
    try:
        pairs, sent = tried(models()[name], "error")
    except ts.ImplicitRedistributionError as error:
        gathered = str(error).split()[0]
        torch.manual_seed(0)
        pairs, sent = tried(models()[name], "allow")
    worst = max(pairs, key=lambda p: p[1])
    print("RESULT " + json.dumps({"off": worst[1], "worst": worst[0], "gradients": len(pairs) - 2, "bytes": sent, "gathered": gathered}))

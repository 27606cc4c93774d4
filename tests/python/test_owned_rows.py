"""Graphs whose nodes and edges are sharded alike, from Python: plain networks, batches, segments, sums in one order, rebalancing."""

import pytest
import torch

import tessera as ts
from drawn_graphs import FAR, drawn_graph
from support import assert_same, draw, on_ranks


class Attention(torch.nn.Module):
    """A layer as libraries of graph networks write it for one process: messages scattered at their targets, a softmax over each node's edges, means."""

    def __init__(self):
        super().__init__()
        self.value, self.score = torch.nn.Linear(3, 4), torch.nn.Linear(8, 1)

    @staticmethod
    def scatter(messages, index, nodes, reduce):
        index = index.view(-1, *[1] * (messages.dim() - 1)).expand_as(messages)
        if reduce == "max":
            return messages.new_zeros(nodes, *messages.shape[1:]).scatter_reduce_(0, index, messages, "amax", include_self=False)
        total = messages.new_zeros(nodes, *messages.shape[1:]).scatter_add_(0, index, messages)
        if reduce == "sum":
            return total
        count = messages.new_zeros(nodes).scatter_add_(0, index[:, 0], messages.new_ones(len(messages)))
        return total / count.clamp(min=1).unsqueeze(1)

    def forward(self, x, edges):
        source, target = edges
        h = self.value(x)
        score = torch.nn.functional.leaky_relu(self.score(torch.cat([h[source], h[target]], 1)))
        weight = (score - self.scatter(score.detach(), target, len(x), "max").index_select(0, target)).exp()
        weight = weight / (self.scatter(weight, target, len(x), "sum").index_select(0, target) + 1e-16)
        return self.scatter(weight * h[source], target, len(x), "sum") + self.scatter(h[source].sin(), target, len(x), "mean")


@pytest.mark.parametrize("ranks", [1, 3])
def test_segments_and_rebalancing(ranks):
    ids, owner, _ = drawn_graph(ranks)
    lengths, x = torch.tensor([2, 0, 3, 1, 6, 0]), draw(12, 2).requires_grad_(True)
    y = torch.segment_reduce(x, "mean", lengths=lengths).nan_to_num(0.0)
    slope = torch.autograd.grad(y.square().sum(), x)[0]

    def body(rank):
        mesh = ts.Mesh({"domain": ranks})
        xs = ts.distribute_tensor(x.detach(), mesh, [ts.Shard(0)]).requires_grad_(True)
        ys = torch.segment_reduce(xs, "mean", lengths=ts.distribute_tensor(lengths, mesh, [ts.Shard(0)])).nan_to_num(0.0)
        assert_same(ys, y.detach())
        (first,) = torch.autograd.grad(ys.square().sum(), xs, create_graph=True)
        assert_same(first, slope)
        first.sin().sum().backward()  # libtorch's own has no second derivative
        own = owner == rank
        rows = ts.OwnedRows(mesh, ids[own])
        cost = 1.0 + (ids[own] - FAR).double()
        to = ts.rebalance(rows, cost.unsqueeze(1), cost, [rows.shard(ids[own])], by="bisection", tolerance=1.0, edges=rows.edges([[], []]))
        assert to.imbalance[1] <= to.imbalance[0] and "edges cut" in to.summary()
        assert torch.equal(ts.to_local(to.moved[0]), to.rows.ids) and to.rows.size == 12
        assert torch.equal(ts.to_local(to.move(rows.shard(cost))), 1.0 + (to.rows.ids - FAR).double())
        assert sorted(sum(([int(i) for i in part] for part in ts.world().all_gather(to.rows.ids, sizes=to.rows.sizes).split(1)), [])) == sorted(ids.tolist())
        with pytest.raises(ts.InvalidArgument, match="no row costs anything"):
            ts.rebalance(rows, cost.unsqueeze(1), 0 * cost)
        with pytest.raises(ValueError, match="curve"):
            ts.rebalance(rows, cost.unsqueeze(1), cost, by="chance")

    on_ranks(ranks, body)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_network_in_plain_torch_runs_unchanged_on_owned_rows(ranks):
    ids, owner, ends = drawn_graph(ranks)
    torch.manual_seed(0)
    nets = [Attention().double() for _ in range(ranks + 1)]  # a copy for each rank, and one process's
    for net in nets:
        net.load_state_dict(nets[0].state_dict())

    def trained(net, x, edges):
        forces = torch.autograd.grad(net(x, edges).square().sum(), x, create_graph=True)[0]
        forces.pow(3).sum().backward()
        return forces.detach()

    whole = draw(12, 3).requires_grad_(True)
    expected = trained(nets[-1], whole, ends)

    def body(rank):
        mesh, net = ts.Mesh({"domain": ranks}), nets[rank]
        ts.distribute_module(net, mesh)
        ts.set_policies(redistribution="error")
        own, here = owner == rank, owner[ends[1]] == rank
        nodes = ts.OwnedRows(mesh, ids[own])
        x, edges = nodes.shard(whole.detach()[own]).requires_grad_(True), nodes.edges(ids[ends[:, here]])
        order = torch.cat([(owner == r).nonzero().flatten() for r in range(ranks)])
        assert nodes.size == 12 and nodes.sizes[rank] == int(own.sum()) and "12 rows" in repr(nodes)
        with nodes:
            forces = trained(net, x, edges)
        assert_same(ts.full_tensor(forces), expected[order])
        assert_same(ts.full_tensor(x.grad), whole.grad[order])
        for p, q in zip(net.parameters(), nets[-1].parameters()):
            assert_same(ts.full_tensor(p.grad), q.grad)

    on_ranks(ranks, body)


def test_a_graph_of_another_partition_is_told_to_every_rank():
    def body(rank):
        nodes = ts.OwnedRows(ts.Mesh({"domain": 2}), [10 + rank])
        with pytest.raises(ts.InvalidArgument, match=r"no rank owns: 7 \(needed by rank 1"):
            nodes.numbers([7] if rank == 1 else [])
        with pytest.raises(ts.InvalidArgument, match=r"rank 1: .*11 -> 10 \(edge 0; rank 0 owns 10"):
            nodes.edges([[11], [10]] if rank == 1 else [[], []])
        with pytest.raises(ts.InvalidArgument, match="two ranks own: 3"):
            ts.OwnedRows(ts.Mesh({"domain": 2}), [3])
        edges = nodes.edges([[10], [11 - rank]], anywhere=True)
        x = nodes.shard(torch.ones(1, 2))
        x[edges[0]]
        edges.fill_(1)
        with pytest.raises(ts.InvalidArgument, match="was written to since"):
            x[edges[0]]

    on_ranks(2, body)


def test_batches_of_graphs_of_different_sizes_over_data_ranks_each_cut_over_domain_ranks():
    """Samples are graphs: data ranks have different ones, of which several are one graph without edges between; domain ranks share each. As one process."""
    sizes = [1, 5, 9, 2, 7, 4]  # nodes of each sample; the first has no edges
    g = torch.Generator().manual_seed(1)
    graphs = [(draw(n, 3, seed=n), torch.randint(n, (2, 0 if n == 1 else 4 * n), generator=g), torch.randint(2, (n,), generator=g)) for n in sizes]
    nets = [Attention().double() for _ in range(5)]
    for net in nets:
        net.load_state_dict(nets[0].state_dict())

    def energies(net, x, edges, of, samples):
        h = net(x, edges).sin().sum(1)
        return h.new_zeros(samples).index_add_(0, of, h)

    samples = ts.Dataset.of([{"nodes": {"x": x, "owner": owner}, "edges": {"index": edges}, "energy": x.new_ones(())} for x, edges, owner in graphs])
    order = ts.FixedOrder(6, 6, seed=3)
    whole = on_ranks(1, lambda rank: ts.Loader(samples, order, ts.Mesh({"data": 1}), ["data"], graphs=True).next())[0]
    nodes = whole.fields["nodes"]
    assert whole.rows == 6 and whole.fields["energy"].shape == (6,) and nodes["graph"].bincount().tolist() == [sizes[index] for _, index in whole.samples]
    energies(nets[-1], nodes["x"], whole.fields["edges"]["index"], nodes["graph"], 6).square().mean().backward()

    def body(rank):
        both = ts.Mesh({"data": 2, "domain": 2})
        mesh = ts.Mesh({"domain": 2}, ranks=[rank // 2 * 2, rank // 2 * 2 + 1])  # each data rank's own: its graphs are others
        loader = ts.Loader(samples, order, both, ["data"], workers=1, graphs=True)
        state, batch = loader.state(), loader.next()
        assert batch.rows == 3 and batch.names == ("nodes/x", "nodes/owner", "edges/index", "energy", "nodes/graph")
        loader.restore(state)
        assert torch.equal(loader.next().tensors[0], batch.tensors[0])
        ts.distribute_module(nets[rank], mesh)
        ts.set_policies(redistribution="error")
        of = batch.fields["nodes"]
        graph = ts.shard_graph(mesh, of["owner"], batch.fields["edges"]["index"])
        with graph.nodes:
            e = energies(nets[rank], graph.of_nodes(of["x"]), graph.edges, graph.of_nodes(of["graph"]), batch.rows)
        (e.square().sum() / 6).backward()
        for p, q in zip(nets[rank].parameters(), nets[-1].parameters(), strict=True):
            assert_same(both.group("data").all_reduce(ts.full_tensor(p.grad)), q.grad)

    on_ranks(4, body)


def test_what_is_no_graph_is_refused_with_its_sample():
    def graph(**of):
        return {"nodes": {"x": torch.ones(2, 1)}, "edges": {"index": torch.tensor([[0], [1]])}, **of}

    def body(rank):
        mesh = ts.Mesh({"data": 1})
        for sample, says in ((graph(edges={"index": torch.tensor([[0], [2]])}), "a node that there is not"), (graph(more=1), "the same fields"), ([1], "the same fields")):
            loader = ts.Loader(ts.Dataset.of([graph(), sample]), ts.FixedOrder(2, 2, shuffle=False), mesh, ["data"], graphs=True)
            with pytest.raises(ts.SampleError, match="sample 1"):
                try:
                    loader.next()
                except ts.SampleError as error:
                    assert says in str(error) + str(error.__cause__)
                    raise
        for data in (ts.TensorDataset(torch.ones(2)), ts.Dataset.of([])):
            with pytest.raises(ts.InvalidArgument, match="dictionaries of fields"):
                ts.Loader(data, ts.FixedOrder(2, 2), mesh, ["data"], graphs=True)
        with pytest.raises(ts.InvalidArgument, match="edges/index"):
            ts.Loader(ts.Dataset.of([{"x": 1.0}, {"x": 2.0}]), ts.FixedOrder(2, 2), mesh, ["data"], graphs=True)

    on_ranks(1, body)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sums_in_one_order_are_those_of_one_process_to_the_bit(ranks):
    """Values, gradients and gradients of these, in float32; edges at their targets in another order on each rank."""
    g = torch.Generator().manual_seed(ranks)
    x, e = torch.randn(17, 3, generator=g, requires_grad=True), torch.randn(60, 3, generator=g)
    ends, owner = torch.randint(17, (2, 60), generator=g), torch.randint(ranks, (17,), generator=g)

    def derivatives(x, e, source, target):
        message = (x[source] - x.index_select(0, target)) * e
        y = torch.zeros_like(x).scatter_add(0, target[:, None].expand_as(message), message)
        (first,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        return y, first, torch.autograd.grad((first * first).sum(), x)[0]

    expected = derivatives(x, e, *ends)

    def body(rank):
        own = (owner == rank).nonzero().flatten().flip(0)
        mine = (owner[ends[1]] == rank).nonzero().flatten().flip(0)
        nodes = ts.OwnedRows(ts.Mesh({"domain": ranks}), own)
        edges = nodes.edges(ends[:, mine], order=mine)
        counts = [int((owner[ends[1]] == r).sum()) for r in range(ranks)]
        es = ts.from_local(e[mine], ts.Mesh({"domain": ranks}), [ts.Shard(0)], {0: counts})
        got = derivatives(nodes.shard(x.detach()[own]).requires_grad_(), es, *edges)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(ts.to_local(a), b[own])
        graph = ts.shard_graph(ts.Mesh({"domain": ranks}), owner, ends, ordered=True)
        got = derivatives(graph.of_nodes(x.detach()).requires_grad_(), graph.of_edges(e), *graph.edges)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(ts.to_local(a), b[graph.nodes.ids])
        with pytest.raises(ts.InvalidArgument, match="order of edges"):
            nodes.edges([own, own], order=[-1] * len(own) if rank == 0 else own)

    on_ranks(ranks, body)

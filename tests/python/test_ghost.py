"""Ghosts of arrays that are divided by a table of owners, from Python."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import tessera as ts
from support import assert_same, on_ranks

FAR = 1 << 40


def draw(*shape, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn_graph(ranks, nodes=12, edges=40, seed=0):
    """Ids of nodes, their owners, and edges as positions in these; node 0 is isolated and an edge comes twice; the last of three ranks or more owns nothing."""
    g = torch.Generator().manual_seed(seed)
    ids = FAR + 5 * torch.randperm(nodes, generator=g)
    owner = torch.randint(ranks if ranks < 3 else ranks - 1, (nodes,), generator=g)
    ends = torch.randint(1, nodes, (2, edges), generator=g)
    ends[:, 1] = ends[:, 0]
    ends[1, 2] = ends[0, 2]  # a loop
    return ids, owner, ends


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_an_unchanged_network_on_a_cut_graph(ranks):
    ids, owner, ends = drawn_graph(ranks)
    x, w = draw(12, 3), draw(7, 3, seed=4)

    def energy(positions, weight, source, target, exchanged):
        everything = exchanged(positions)
        a, b = everything[source], everything[target]
        message = torch.tanh(torch.cat([a, b, (a - b).square().sum(1, keepdim=True)], 1) @ weight)
        return torch.zeros_like(positions).index_add(0, target, message).square().sum()

    def trained(positions, weight, *rest):
        forces = torch.autograd.grad(energy(positions, weight, *rest), positions, create_graph=True)[0]
        forces.pow(3).sum().backward()
        return forces.detach()

    positions, weight = x.clone().requires_grad_(True), w.clone().requires_grad_(True)
    expected = trained(positions, weight, *ends, lambda t: t)

    def body(rank):
        mesh = ts.Mesh({"domain": ranks})
        own, here = owner == rank, owner[ends[1]] == rank
        sources, targets = ids[ends[0, here]], ids[ends[1, here]]
        needed = ts.ghosts_of(ids[own], sources)
        plan = ts.GhostPlan(mesh, ids[own], needed)
        assert (plan.owned, plan.ghosts) == (int(own.sum()), len(needed)) and f"rank {rank} of {ranks}" in repr(plan)
        assert sum(rows for _, rows in plan.receives) == plan.ghosts and plan.group == ts.world()
        mine, part = x[own].requires_grad_(True), w.clone().requires_grad_(True)
        with ts.CommTrace() as trace:
            h = ts.ghost_exchange(plan, mine)
        sent = sum(rows for _, rows in plan.sends)
        assert trace.bytes == 24 * (sent + plan.ghosts)  # what is sent and what arrives
        assert torch.equal(h.detach(), torch.cat([x[own]] + [x[ids == i] for i in needed]))
        forces = trained(mine, part, plan.local_rows(sources), plan.local_rows(targets), lambda t: ts.ghost_exchange(plan, t))
        assert_same(forces, expected[own])
        assert_same(mine.grad, positions.grad[own])
        assert_same(ts.world().all_reduce(part.grad), weight.grad)

    on_ranks(ranks, body)


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


def layer(h, source, target, rows, w):
    own = h[:rows]
    return own + torch.zeros_like(own).index_add(0, target, torch.tanh(torch.cat([h[source], h[target]], 1) @ w))


def trained_forces(h, x):
    forces = torch.autograd.grad(h.square().sum(), x, create_graph=True)[0]
    forces.pow(3).sum().backward()
    return forces.detach()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_network_by_a_transport_of_the_users_and_by_layers_of_ghosts(ranks):
    ids, owner, ends = drawn_graph(ranks)
    weights = [draw(6, 3, seed=k) for k in range(3)]
    x = draw(12, 3).requires_grad_(True)
    h = x
    for w in weights:
        h = layer(h, *ends, 12, w)
    expected = trained_forces(h, x)

    def body(rank):
        world, own, here = ts.world(), owner == rank, owner[ends[1]] == rank
        edges, lengths = ids[ends[:, here]], [int((owner == r).sum()) for r in range(ranks)]
        order = torch.cat([(owner == r).nonzero().flatten() for r in range(ranks)])
        needed = ts.ghosts_of(ids[own], edges[0])
        places = [int((ids[order] == i).nonzero()) for i in needed]

        def forward(rows):
            rows[int(own.sum()) :] = world.all_gather(rows[: int(own.sum())].contiguous(), sizes=lengths)[places]

        def reverse(rows):
            everything = rows.new_zeros(12, *rows.shape[1:]).index_add(0, torch.tensor(places, dtype=torch.long), rows[int(own.sum()) :])
            rows[: int(own.sum())] += world.all_reduce(everything)[sum(lengths[:rank]) :][: lengths[rank]]

        plan = ts.GhostPlan(world, ids[own], needed, transport=ts.GhostTransport(forward, reverse))
        mine = x.detach()[own].requires_grad_(True)
        h = mine
        for w in weights:
            h = layer(ts.ghost_exchange(plan, h), plan.local_rows(edges[0]), plan.local_rows(edges[1]), int(own.sum()), w)
        del plan  # what is recorded keeps the functions
        assert_same(trained_forces(h, mine), expected[own])
        assert_same(mine.grad, x.grad[own])
        for depth in (1, 2, 3):
            g = ts.GhostLayers(world, ids[own], edges, depth)
            assert torch.equal(g.nodes.local_rows(edges[0]), g.source[: g.edge_counts[0]])
            h = mine = x.detach()[own].requires_grad_(True)
            for k, w in enumerate(weights):
                h = ts.ghost_exchange(g.nodes, h) if k % depth == 0 else h
                left = g.left_after(k, len(weights))
                edge = slice(g.edge_counts[left])
                h = layer(h, g.source[edge], g.target[edge], g.rows[left], w)
            assert_same(trained_forces(h, mine), expected[own])
            assert_same(mine.grad, x.grad[own])
        text, cheapest = g.costs(3, message=1.0)
        assert f"3 layers on {ranks} ranks" in text and cheapest == (3 if ranks > 1 else 1)

    on_ranks(ranks, body)


def test_a_transport_that_fails_is_told_to_every_rank():
    def body(rank):
        wrong = {"on": "raises"}

        def forward(rows):
            rows[1] = ts.world().all_gather(rows[:1].contiguous())[1 - rank]  # anew after a failure
            if wrong["on"] == "raises" and rank == 1:
                raise OSError("no cable")
            if wrong["on"] == "values" and rank == 0:
                rows[1] = rows[0]
            return rows if wrong["on"] == "returns" else None

        plan = ts.GhostPlan(ts.world(), [rank], [1 - rank], transport=ts.GhostTransport(forward, lambda rows: None))
        x = torch.ones(1, 2, dtype=torch.float64)
        try:
            ts.ghost_exchange(plan, x)
            ts.world().barrier()
            raise AssertionError("nothing was raised")
        except RuntimeError as error:
            assert "OSError: no cable" in str(error)
            assert isinstance(error.__cause__, OSError) == (rank == 1) and isinstance(error, ts.PeerFailedError) == (rank == 0)
        ts.world().barrier()
        ts.set_check_level("collective")
        wrong["on"] = "values"
        with pytest.raises(ts.MismatchError, match=r"On rank 0: the ghost of id 1 \(row 1, owned by rank 1\) got id 0"):
            ts.ghost_exchange(plan, x)
        wrong["on"] = "returns"
        with pytest.raises(RuntimeError, match="forward of a GhostTransport returned a Tensor"):
            ts.ghost_exchange(plan, x)
        with pytest.raises(ts.InvalidArgument, match="transport carries Double"):
            ts.ghost_exchange(plan, x.float())
        with pytest.raises(ts.InvalidArgument, match="with a transport"):
            ts.GhostPlan(ts.world(), [rank], [], transport=ts.GhostTransport(forward, forward) if rank else None)
        ts.set_check_level("local")

    on_ranks(2, body)


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


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradcheck_and_gradgradcheck(ranks):
    """As functions of the whole array, the same on all ranks, so that these perturb alike."""
    ids, owner, _ = drawn_graph(ranks, nodes=5)
    needed = [[int(i) for i in ids[[(r + 1) % 5, 4, (r + 1) % 5]] if owner[ids == i] != r] for r in range(ranks)]
    lengths = [int((owner == r).sum()) for r in range(ranks)]
    both = [n + len(needed[r]) for r, n in enumerate(lengths)]

    def body(rank):
        world, F = ts.world(), ts.functional
        plan = ts.GhostPlan(world, ids[owner == rank], needed[rank])

        def exchanged(x):
            mine = F.replicate(world, x)[owner == rank]
            return F.all_gather(world, ts.ghost_exchange(plan, mine).sin(), both, cotangent="replicated")

        def reduced(op):
            first = sum(both[:rank])
            return lambda y: F.all_gather(
                world, ts.ghost_reduce(plan, F.replicate(world, y)[first : first + both[rank]], op).sin(), lengths, cotangent="replicated"
            )

        x, y = draw(5, 2).requires_grad_(True), draw(sum(both), 2).requires_grad_(True)
        assert gradcheck(exchanged, x) and gradgradcheck(exchanged, x, draw(sum(both), 2, seed=8).requires_grad_(True))
        for op in ("sum", "min", "max"):
            assert gradcheck(reduced(op), y) and gradgradcheck(reduced(op), y, draw(5, 2, seed=9).requires_grad_(True))

    on_ranks(ranks, body)


def test_started_and_of_an_axis_of_a_mesh():
    def body(rank):
        mesh = ts.Mesh({"data": 2, "domain": 2})
        here = mesh.coordinate[1]
        plan = ts.GhostPlan((mesh, "domain"), [here], [1 - here])
        assert plan.group.ranks == mesh.group("domain").ranks and plan.sends == [(1 - here, 1)]
        x = torch.full((1, 2), float(rank), dtype=torch.bfloat16)
        request = ts.ghost_exchange(plan, x, start=True)
        h = request.wait()
        assert request.done() and h.dtype == torch.bfloat16
        assert h.tolist() == [[rank] * 2, [rank ^ 1] * 2]
        assert ts.ghost_reduce(plan, h, "max", start=True).wait().tolist() == [[rank] * 2]
        assert ts.ghost_reduce(plan, h).tolist() == [[2 * rank] * 2]

    on_ranks(4, body)


def test_bad_input_is_told_to_every_rank():
    wrong = {
        "two ranks own: 2 ": ([[1, 2], [2]], [[], []]),
        "no rank owns: 9 ": ([[1], [2]], [[], [9]]),
        "negative ids: -3 ": ([[1], [-3]], [[], []]),
        "owns itself: 1 ": ([[1], [2]], [[1], []]),
        "give a list of whole numbers": ([[1], [2]], [[0.5], []]),
        "shape [1, 1]": ([[[1]], [2]], [[], []]),
    }

    def body(rank):
        mesh = ts.Mesh({"domain": 2})
        for says, (owned, needed) in wrong.items():
            with pytest.raises(ts.InvalidArgument) as caught:
                ts.GhostPlan(mesh, owned[rank], needed[rank])
            assert says in str(caught.value)
        plan = ts.GhostPlan(mesh, [rank], [1 - rank])
        with pytest.raises(ts.InvalidArgument, match="neither owned"):
            plan.local_rows([7])
        assert plan.local_rows(torch.tensor([[rank, 1 - rank]])).tolist() == [[0, 1]]
        with pytest.raises(ValueError, match="of its own"):
            ts.GhostPlan(ts.group([0, 1], timeout=5), [rank], [])
        try:
            ts.ghost_exchange(plan, torch.ones(3 if rank == 0 else 1))
            ts.world().barrier()
        except (ts.InvalidArgument, ts.PeerFailedError) as error:
            assert isinstance(error, ts.InvalidArgument) == (rank == 0) and "a tensor of 3 rows" in str(error)
        ts.world().barrier()
        return ts.ghost_exchange(plan, torch.tensor([rank])).tolist()

    assert ts.run_threads(2, body, timeout=100) == [[0, 1], [1, 0]]


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


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_block_cyclic_and_several_boxes_of_a_field(ranks):
    """Cells of a field in blocks of 2 x 3, dealt to the ranks one after the other; the cells beside a block are its ghosts, wherever they are."""
    rows, columns = 7, 8
    field, weight = draw(rows, columns).requires_grad_(True), draw(3, 3, seed=5)
    expected = torch.nn.functional.conv2d(torch.nn.functional.pad(field, (1, 1, 1, 1))[None, None], weight[None, None])[0, 0]
    scale = draw(rows, columns, seed=6)
    (slope,) = torch.autograd.grad((expected.sin() * scale).sum(), field)
    i, j = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    owner = ((i // 2 * 3 + j // 3) % ranks).flatten()
    beside = [(i + a, j + b, weight[a + 1, b + 1]) for a in (-1, 0, 1) for b in (-1, 0, 1)]

    def body(rank):
        own = (owner == rank).nonzero().flatten()
        taps = [((r * columns + c).flatten()[own], ((r >= 0) & (r < rows) & (c >= 0) & (c < columns)).flatten()[own], w) for r, c, w in beside]
        plan = ts.GhostPlan(ts.Mesh({"ranks": ranks}), own, ts.ghosts_of(own, torch.cat([at[inside] for at, inside, _ in taps])))
        mine = field.detach().flatten()[own].requires_grad_(True)
        cells, out = ts.ghost_exchange(plan, mine), torch.zeros(len(own), dtype=torch.float64)
        for at, inside, w in taps:
            out = out.index_add(0, inside.nonzero().flatten(), w * cells[plan.local_rows(at[inside])])
        assert_same(out, expected.detach().flatten()[own])
        (out.sin() * scale.flatten()[own]).sum().backward()
        assert_same(mine.grad, slope.flatten()[own])

    on_ranks(ranks, body)


def test_what_is_no_list_of_ids_on_one_rank_is_told_to_every_rank():
    def body(rank):
        mesh = ts.Mesh({"domain": 2})
        nodes = ts.OwnedRows(mesh, torch.arange(40, dtype=torch.int32)[10 + rank :: 20])  # any whole numbers, any strides
        wrong = {
            "sources of dtype Float": lambda: nodes.edges(torch.zeros(3, 2, dtype=torch.long) if rank else [[], []]),
            "targets of dtype Float": lambda: nodes.edges([[10], [11.5]] if rank else [[], []]),
            "ids of dtype Float": lambda: nodes.numbers([2**63] if rank else [10]),
            "owned_ids of dtype Bool": lambda: ts.OwnedRows(mesh, [True] if rank else [4]),
            "needed_ids of dtype Float": lambda: ts.GhostPlan(mesh, [rank], ["1"] if rank else []),
            "negative ids: -1 (ghost 0)": lambda: nodes.edges([[-1], [10 + rank]] if rank else [[], []]),
        }
        for says, call in wrong.items():
            with pytest.raises(ts.InvalidArgument) as caught:
                call()
            assert says in str(caught.value) and "rank 1" in str(caught.value)
        plan = ts.GhostPlan(mesh, [rank], [1 - rank])
        for other in (torch.ones(1, 2 + rank), torch.ones(1, 2, dtype=torch.int64 if rank else torch.float64)):
            with pytest.raises(ts.MismatchError, match="message from rank"):
                ts.ghost_exchange(plan, other)
            ts.world().barrier()
        assert ts.ghost_exchange(plan, torch.tensor([rank])).tolist() == [rank, 1 - rank]

    on_ranks(2, body)


def test_metis_divides_a_graph():
    n = torch.arange(63)
    edges = torch.cat([torch.stack([n, n + 1]), torch.stack([n + 1, n])], 1)
    try:
        owner = ts.partition_by_metis(64, edges, 4)
    except ts.NotAvailable as absent:
        assert "libmetis-dev" in str(absent)
        pytest.skip(str(absent))
    assert owner.bincount().tolist() == pytest.approx([16] * 4, abs=2) and int((owner[edges[0]] != owner[edges[1]]).sum()) <= 8
    with pytest.raises(ts.InvalidArgument, match="edge 0 names node 0 of 0"):
        ts.partition_by_metis(0, edges, 4)
    with pytest.raises(ts.InvalidArgument, match="2 x edges"):
        ts.partition_by_metis(64, n, 4)

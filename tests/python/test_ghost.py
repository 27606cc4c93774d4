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

    assert ts.run_threads(2, body, timeout=20) == [[0, 1], [1, 0]]

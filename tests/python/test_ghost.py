"""Ghosts of arrays that are divided by a table of owners, from Python."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import tessera as ts
from drawn_graphs import drawn_graph
from support import assert_same, draw, on_ranks


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

"""Drawn graphs whose nodes are divided by a table of owners."""

import torch

FAR = 1 << 40


def drawn_graph(ranks, nodes=12, edges=40, seed=0):
    """Ids of nodes, their owners, and edges as positions in these; node 0 is isolated and an edge comes twice; the last of three ranks or more owns nothing."""
    g = torch.Generator().manual_seed(seed)
    ids = FAR + 5 * torch.randperm(nodes, generator=g)
    owner = torch.randint(ranks if ranks < 3 else ranks - 1, (nodes,), generator=g)
    ends = torch.randint(1, nodes, (2, edges), generator=g)
    ends[:, 1] = ends[:, 0]
    ends[1, 2] = ends[0, 2]  # a loop
    return ids, owner, ends

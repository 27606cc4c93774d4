"""Attention over packed documents from Python, beside one process: how lengths may be given, tokens and heads over two axes, cuts by cost."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import tessera as ts
from support import assert_same, draw, on_ranks


def by_documents(q, k, v, lengths, causal):
    """One call a document; a row of padding after them."""
    parts, begin = [], 0
    for n in lengths:
        of = [t[:, :, begin : begin + n] for t in (q, k, v)]
        parts.append(scaled_dot_product_attention(*of, is_causal=causal, enable_gqa=True))
        begin += n
    return torch.cat([*parts, torch.zeros(*q.shape[:2], q.shape[2] - begin, v.shape[3], dtype=q.dtype)], 2)


@pytest.mark.parametrize("causal", [False, True])
def test_tokens_and_heads_over_two_axes(causal):
    lengths, rows = [4, 1, 6], [9, 3]
    q, k, v = draw(2, 4, 12, 3), draw(2, 2, 12, 3, seed=4), draw(2, 2, 12, 5, seed=5)
    plain = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = by_documents(*plain, lengths, causal)
    expected.sin().sum().backward()

    def body(rank):
        mesh = ts.Mesh({"context": 2, "tensor": 2})
        ts.set_policies("error")
        cut = [ts.distribute_tensor(t, mesh, [ts.Shard(2), ts.Shard(1)], {2: rows}).requires_grad_() for t in (q, k, v)]
        out = ts.packed_attention(*cut, lengths, is_causal=causal, enable_gqa=True)
        assert ts.spec(out).sizes[2] == rows
        assert_same(out, expected)
        out.sin().sum().backward()
        for t, one in zip(cut, plain, strict=True):
            assert_same(t.grad, one.grad)

    on_ranks(4, body)


def test_lengths_may_be_lists_or_tensors():
    x = draw(2, 1, 5, 3)
    expected = torch.cat([by_documents(r, r, r, n, True) for r, n in zip(x.split(1), ([2, 3], [5, 0]), strict=True)])
    cu_seqlens = [torch.tensor([0, 2, 5]), torch.tensor([0, 5, 5], dtype=torch.int32)]
    for lengths in ([[2, 3], [5, 0]], [c.diff() for c in cu_seqlens], torch.tensor([[2, 3], [5, 0]]), ((2, 3), (5, 0))):
        assert_same(ts.packed_attention(x, x, x, lengths, is_causal=True), expected)
    alike = by_documents(x, x, x, [2, 3], False)
    for lengths in ([2, 3], torch.tensor([2, 3]), (2, 3), [[2, 3]]):
        assert_same(ts.packed_attention(x, x, x, lengths), alike)
    assert not ts.packed_attention(x, x, x, []).any()
    with pytest.raises(ts.InvalidArgument, match="longer than the row of 5 tokens"):
        ts.packed_attention(x, x, x, [2, 4])
    with pytest.raises(ts.InvalidArgument, match="lengths of 3"):
        ts.packed_attention(x, x, x, [[2], [4], [1]])
    with pytest.raises(TypeError):
        ts.packed_attention(x, x, x, [2.5, 1])


def test_cuts_by_cost():
    lengths = [40, 3, 900, 17, 64]
    cut = ts.cut_documents(lengths, 4, is_causal=True, token_cost=8)
    assert sum(cut.sizes) == 1024 and len(cut.sizes) == 4
    assert cut.imbalance < 1.01 < 1.4 < cut.imbalance_of_even
    costs = [i + 1 + 8 for n in lengths for i in range(n)]
    dearest = max(sum(costs[sum(cut.sizes[:p]) : sum(cut.sizes[: p + 1])]) for p in range(4))
    assert abs(cut.imbalance - 4 * dearest / sum(costs)) < 1e-9
    assert max(ts.cut_documents(lengths, 4, is_causal=True, most_tokens=300).sizes) == 300
    assert ts.cut_documents([[2, 6], [8]], 2, tokens=10).sizes == ts.cut_documents(torch.tensor([[2, 6], [0, 8]]), 2, tokens=10).sizes
    with pytest.raises(ts.InvalidArgument, match="0 parts"):
        ts.cut_documents(lengths, 0)

"""Attention to parts of a context, and their join: what all of it together would answer, for any cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvmesh.engine.attention.backend import AttentionBackend
from kvmesh.engine.attention.latent import LatentBackend, UpProjection
from kvmesh.engine.attention.native_backend import NativeAttention
from kvmesh.engine.attention.native_latent import NativeLatent
from kvmesh.engine.attention.parts import AttendedPart, ContextTable, QueryRun, dense_part, join_parts, part_backend
from kvmesh.engine.attention.torch_backend import TorchAttention
from kvmesh.engine.config import AttentionSpec
from kvmesh.engine.config_latent import LatentConfig
from kvmesh.engine.cpu import native
from kvmesh.errors import InternalError
from tests.support.engine.paged import Shape, paged

KINDS = ["torch", pytest.param("native", marks=pytest.mark.skipif(not native.loaded(), reason="no C++ operators"))]


def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, sinks: torch.Tensor | None) -> torch.Tensor:
    """float64, of all tokens; q [T, H, D], k and v [n, K, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("thd,nhd->thn", q.double(), k) * scale
    if sinks is not None:
        scores = torch.cat((scores, sinks.double().expand(len(q), -1)[..., None]), -1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("thn,nhd->thd", weights, v)


def stacked(parts: list[AttendedPart]) -> AttendedPart:
    return AttendedPart(*(torch.stack(both) for both in zip(*parts, strict=True)))


@pytest.mark.parametrize("with_sinks", [False, True])
def test_parts_join_to_the_whole_and_a_sink_counts_once(with_sinks: bool) -> None:
    made = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(size, generator=made) * 2 for size in ((5, 6, 8), (40, 2, 8), (40, 2, 8)))
    sinks = torch.randn(6, generator=made) if with_sinks else None
    expected = whole(q, k, v, 0.3, sinks)
    for cuts in ([40], [0, 40], [13, 27], [1, 0, 38, 1], [0, 0, 0, 40]):
        parts = [dense_part(q, *kv, 0.3) for kv in zip(torch.split(k, cuts), torch.split(v, cuts), strict=True)]
        joined = join_parts(stacked(parts), sinks)
        torch.testing.assert_close(joined.values.double(), expected, atol=1e-5, rtol=1e-5)
        again = join_parts(stacked([joined, AttendedPart.empty(5, 6, 8, q.device)]))  # a part of parts
        torch.testing.assert_close(again.values, joined.values)
        torch.testing.assert_close(again.lse, joined.lse)


def test_nothing_at_all_is_zeros_and_no_nan() -> None:
    none = join_parts(stacked([AttendedPart.empty(2, 3, 4, torch.device("cpu"))] * 3))
    assert (none.values == 0).all() and (none.lse == -torch.inf).all()
    only = join_parts(stacked([AttendedPart.empty(2, 3, 4, torch.device("cpu"))] * 2), torch.tensor([1.0, -2.0, 0.0]))
    assert (only.values == 0).all() and torch.equal(only.lse, torch.tensor([1.0, -2.0, 0.0]).expand(2, 3))
    huge = AttendedPart(torch.ones(2, 1, 1, 1), torch.tensor([300.0, -300.0]).view(2, 1, 1))
    assert join_parts(huge).values.item() == 1.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "shape",
    [Shape(6, 2, 8, 4), Shape(4, 1, 64, 16), Shape(8, 8, 20, 8, torch.bfloat16), Shape(8, 2, 128, 32, torch.bfloat16)],
)
def test_queries_see_the_same_tokens_of_pages_or_none(kind: str, shape: Shape) -> None:
    lengths = [0, 1, 19, 300, 37, 5]
    counts = [1, 1, 1, 1, 50, 3]  # queries of each request
    memory = paged(shape, lengths, torch.device("cpu"))
    spec = AttentionSpec(0.4, softcap=0.0)
    made: AttentionBackend = (NativeAttention if kind == "native" else TorchAttention)(
        memory.pool, shape.heads, [spec, spec]
    )
    parts = part_backend(made)
    assert type(parts).__name__ == ("NativeParts" if kind == "native" else "PartBackend")
    firsts = np.cumsum(counts) - counts
    runs = [QueryRun(int(f), c, row, n) for row, (f, c, n) in enumerate(zip(firsts, counts, lengths, strict=True))]
    q = memory.qkv(sum(counts))[:, : shape.heads]
    parts.plan(runs, memory.table.numpy())
    found = parts.attend(1, q)
    assert not found.values.isnan().any() and not found.lse.isnan().any()
    for run in runs:
        own = slice(run.first, run.first + run.queries)
        if not run.seen:
            assert (found.lse[own] == -torch.inf).all() and (found.values[own] == 0).all()
            continue
        ids = memory.table[run.row, : -(-run.seen // shape.block)].long()
        k, v = (memory.pages[ids, plane].transpose(1, 2).flatten(0, 1)[: run.seen] for plane in (0, 1))
        expected = dense_part(q[own].double(), k.double(), v.double(), 0.4)
        torch.testing.assert_close(found.values[own], expected.values, atol=shape.tolerance, rtol=shape.tolerance)
        torch.testing.assert_close(found.lse[own], expected.lse, atol=shape.tolerance, rtol=shape.tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("queries", "first"), [(1, 0), (70, 0), (9, 61), (1, 69)])
def test_a_chunk_sees_itself(kind: str, dtype: torch.dtype, queries: int, first: int) -> None:
    memory = paged(Shape(6, 2, 10, 4, dtype), [4], torch.device("cpu"))
    backend: AttentionBackend = (NativeAttention if kind == "native" else TorchAttention)(
        memory.pool, 6, [AttentionSpec(0.3, softcap=5.0)] * 2
    )
    made = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(n, h, 10, generator=made).to(dtype) for n, h in ((queries, 6), (70, 2), (70, 2)))
    found = part_backend(backend).chunk(0, q, k, v, first)
    for i in {0, queries // 2, queries - 1}:
        seen = first + i + 1
        expected = dense_part(q[i : i + 1].double(), k[:seen].double(), v[:seen].double(), 0.3, 5.0)
        for mine, right in zip(found, expected, strict=True):
            torch.testing.assert_close(mine[i : i + 1], right, atol=memory.shape.tolerance, rtol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latents_in_parts(kind: str, dtype: torch.dtype) -> None:
    sizes = LatentConfig(0, 32, 12, 8, 10, 0.2, False, False)
    made = torch.Generator().manual_seed(1)
    pages = torch.full((9, 2, 1, 1, 4, 40), torch.nan, dtype=dtype)
    lengths, table = [0, 3, 17], np.array([[0, 0, 0, 0, 0], [8, 0, 0, 0, 0], [4, 1, 7, 2, 3]], dtype=np.int32)
    rows = [torch.randn(length, 40, generator=made).to(dtype) for length in lengths]
    for own, kept in zip(table, rows, strict=True):
        for at, row in enumerate(kept):
            pages[own[at // 4], 1, 0, 0, at % 4] = row
    up = UpProjection(torch.randn(6, 22, 32, generator=made).to(dtype), 12)
    parts = part_backend((NativeLatent if kind == "native" else LatentBackend)(pages, sizes, [up, up]))
    q = torch.randn(5, 6, 40, generator=made).to(dtype)
    parts.plan([QueryRun(0, 1, 0, 0), QueryRun(1, 1, 1, 3), QueryRun(2, 3, 2, 17)], table)
    found = parts.attend(1, q)
    for (first, count), kept in zip(((0, 1), (1, 1), (2, 3)), rows, strict=True):
        own = slice(first, first + count)
        kv = kept.double()[:, None]
        expected = dense_part(q[own].double(), kv, kv[..., :32], sizes.scale)
        tolerance = 2e-5 if dtype == torch.float32 else 2e-2
        for mine, right in zip(found, expected, strict=True):
            torch.testing.assert_close(mine[own], right, atol=tolerance, rtol=tolerance)


def test_tables_are_kept_and_checked() -> None:
    memory = paged(Shape(2, 1, 8, 4), [4], torch.device("cpu"))
    table = ContextTable(TorchAttention(memory.pool, 2, [AttentionSpec(1.0)] * 2))
    table.update([(1, 0), (2,)], np.array([5, 4]))
    assert table.ids[:2, :2].tolist() == [[1, 0], [2, 0]]
    table.update([(1, 0), (3, 2)], np.array([8, 8]))
    assert table.ids[:2, :2].tolist() == [[1, 0], [3, 2]]
    with pytest.raises(InternalError, match="9 tokens of a rank need more than 2 pages"):
        table.update([(1, 0)], np.array([9]))
    with pytest.raises(InternalError, match="no holes"):
        table.update([(-1, 0)], np.array([8]))

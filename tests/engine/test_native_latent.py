"""The C++ operator of latent decode against float64 and against torch's backend: shapes that fit no register, contexts
that end anywhere in a part, one thread and several."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from kvmesh.engine.attention import native_latent
from kvmesh.engine.attention.backend import TokenSpan
from kvmesh.engine.attention.choice import make_latent_backend
from kvmesh.engine.attention.latent import LatentBackend
from kvmesh.engine.attention.native_latent import NativeLatent
from kvmesh.engine.cpu import native
from tests.support.engine.attention_oracle import shifted
from tests.support.engine.latent_oracle import LatentBench, LatentChunk, LatentShape

REASON = native.why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=f"no C++ operators: {REASON}")
BF16 = torch.bfloat16
SHAPES = [
    LatentShape(4, 32, 16, 32, 64, 16),
    LatentShape(9, 24, 64, 20, 512, 16),
    LatentShape(3, 7, 6, 5, 33, 8),
    LatentShape(5, 1, 2, 1, 3, 1),
    LatentShape(2, 16, 0, 16, 24, 16),
    LatentShape(6, 128, 64, 128, 512, 64, BF16),
    LatentShape(1, 12, 6, 16, 90, 16, BF16),
]


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def native_bench(shape: LatentShape, num_pages: int, fill: float = torch.nan) -> LatentBench:
    return LatentBench(shape, num_pages, fill, backend=NativeLatent)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_float64(shape: LatentShape) -> None:
    """Contexts of one part and of several, alone and beside chunks, and on from there with kept tables."""
    bench = native_bench(shape, 160 * 16 // shape.block_tokens + 16)
    rows = [bench.request(done + 4, done) for done in (0, 1, 15, 63, 255, 256, 513, 1000)]
    chunk = bench.request(60, 20)
    with torch.inference_mode():
        bench.step([LatentChunk(row, 1, span=False) for row in rows])
        bench.step([*(LatentChunk(row, 1, span=False) for row in rows), LatentChunk(chunk, 40)])
        bench.step([LatentChunk(row, 1, span=False) for row in rows[1:]])
    for request in rows:
        assert not bench.tail(request).any(), "slots past the last token are zeros"


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads(dtype: torch.dtype) -> None:
    shape = LatentShape(23, 24, 10, 24, 118, 16, dtype)
    bench = native_bench(shape, 200)
    row, others = bench.request(700, 650), [bench.request(done + 50, done) for done in (5, 900, 64)]
    q = bench.normal(1, shape.heads, shape.width)
    alone = bench.backend.decode.plan([row.pages], [row.done - 1]).attend_absorbed(0, q)
    for threads, count in ((1, 0), (1, 3), (2, 1), (3, 0), (5, 2), (2, 3)):
        torch.set_num_threads(threads)
        some = others[:count]
        plan = bench.backend.decode.plan(
            [*(r.pages for r in some), row.pages], [*(r.done - 1 for r in some), row.done - 1]
        )
        queries = torch.cat((bench.normal(count, shape.heads, shape.width), q))
        assert torch.equal(plan.attend_absorbed(0, queries)[-1:], alone)


def test_a_page_table_off_by_one_shows() -> None:
    for index in range(4):
        bench = native_bench(SHAPES[0], 24, fill=0.5)
        done = [bench.request(64, done=60) for _ in range(3)]
        table = shifted(done[1].pages, index, 24)
        with pytest.raises(AssertionError, match=r"chunk 1, layer 0: off by (0\.0?[1-9]|[1-9])"):
            bench.step([LatentChunk(r, 1, span=False) for r in done], {1: table})


def test_which_backend_a_dtype_gets() -> None:
    bench = LatentBench(SHAPES[0], 4)
    assert type(make_latent_backend(bench.pages, bench.shape.sizes, bench.backend.ups)) is NativeLatent
    half = LatentBench(SHAPES[0]._replace(dtype=torch.float16), 4)
    assert type(make_latent_backend(half.pages, half.shape.sizes, half.backend.ups)) is LatentBackend


def test_what_does_not_fit_is_refused() -> None:
    bench = native_bench(SHAPES[0], 4)
    assert isinstance(bench.backend, NativeLatent)
    attend, pages = bench.backend.latent_attention, bench.pages
    q, ids, ends = torch.zeros(2, 4, 80), torch.zeros(2, 2, dtype=torch.int32), torch.tensor([3, 32])
    assert attend(pages, 0, q, ids, ends, 64, 0.1).shape == (2, 4, 64)
    assert attend(pages, 0, q[:0], ids, ends[:0], 64, 0.1).shape == (0, 4, 64)
    for args, why in (
        ((pages, 2, q, ids, ends), "pages"),
        ((pages, 0, q[..., :79], ids, ends), "pages"),
        ((pages, 0, q, ids[:1], ends), "table"),
        ((pages, 0, q, ids, ends[:1]), "table"),
        ((pages, 0, q, ids, torch.tensor([3, 33])), "row 1 ends at 33"),
        ((pages, 0, q, ids, torch.tensor([0, 3])), "row 0 ends at 0"),
    ):
        with pytest.raises(RuntimeError, match=why):
            attend(*args, 64, 0.1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_of_every_size_equal_float64(shape: LatentShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absorbed and written out, all heads at once and one at a time, cold and behind a cached prefix."""
    monkeypatch.setattr(native_latent, "WRITTEN_BYTES", 2 * 200 * 80 * shape.dtype.itemsize)
    for times in (0.0, native_latent.ABSORBED_TIMES, math.inf):
        monkeypatch.setattr(native_latent, "ABSORBED_TIMES", times)
        bench = native_bench(shape, 160 * 16 // shape.block_tokens + 16)
        cold = [bench.request(length + 1) for length in (1, 2, 16, 130)]
        warm = [bench.request(start + length + 1, start) for start, length in ((1, 1), (37, 92), (300, 3), (290, 33))]
        with torch.inference_mode():
            bench.step([LatentChunk(row, row.rows.shape[1] - 1 - row.done) for row in (*cold, *warm)])
            bench.step([LatentChunk(row, 1, span=False) for row in (*cold, *warm)])


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_a_chunk_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    """Of few queries and of many, on one thread and on several."""
    bench = native_bench(LatentShape(6, 24, 10, 24, 52, 16, dtype), 200)
    chunks = [bench.request(700, start) for start in (600, 650)]
    spans = [TokenSpan(600, 100, chunks[0].pages), TokenSpan(650, 2, chunks[1].pages)]
    q = [bench.queries(span.length) for span in spans]
    rows = [chunk.rows[0, span.start : span.start + span.length] for chunk, span in zip(chunks, spans, strict=True)]
    alone = []
    for span, asked, own in zip(spans, q, rows, strict=True):
        plan = bench.backend.plan_prefill([span])
        given = bench.given(asked, [own])
        plan.write(0, given)
        alone.append(plan.attend(0, given))
    other = bench.request(90, 40)
    beside = TokenSpan(40, 30, other.pages)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        plan = bench.backend.plan_prefill([spans[0], beside, spans[1]])
        given = bench.given(torch.cat((q[0], bench.queries(30), q[1])), [rows[0], other.rows[0, 40:70], rows[1]])
        plan.write(0, given)
        answer = plan.attend(0, given)
        assert torch.equal(answer[:100], alone[0]) and torch.equal(answer[-2:], alone[1])

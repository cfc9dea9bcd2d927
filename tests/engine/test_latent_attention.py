"""Latent attention over pages against float64: shapes, ragged and mixed steps, both ways to attend, dirty memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.engine.attention.backend import TokenSpan
from kvmesh.engine.attention.latent import LatentBackend
from kvmesh.errors import InternalError
from kvmesh.kvcache.layout import ShardLayout
from tests.support.engine.attention_oracle import shifted
from tests.support.engine.latent_oracle import LATENT_TOLERANCE, LatentBench, LatentChunk, LatentRequest, LatentShape

BF16, F16 = torch.bfloat16, torch.float16
SHAPES = [
    LatentShape(4, 32, 16, 32, 64, 16),
    LatentShape(1, 128, 64, 128, 512, 16),
    LatentShape(3, 7, 6, 5, 33, 8),
    LatentShape(2, 24, 2, 40, 48, 64),
    LatentShape(5, 1, 2, 1, 3, 1),
    LatentShape(2, 16, 0, 16, 24, 16),
    LatentShape(4, 32, 16, 32, 64, 16, BF16),
    LatentShape(3, 128, 64, 128, 512, 64, BF16),
    LatentShape(3, 7, 6, 5, 33, 8, F16),
]
PLAIN = SHAPES[0]


@pytest.mark.parametrize(
    ("shape", "tile_tokens"),
    [*((shape, 50) for shape in SHAPES), *((shape, tile) for shape in (SHAPES[0], SHAPES[8]) for tile in (1, 512))],
    ids=str,
)
def test_equals_float64(shape: LatentShape, tile_tokens: int) -> None:
    """Rows alone, chunks alone, both at once; then on from there, so that kept tables are used."""
    bench = LatentBench(shape, 120 * 16 // shape.block_tokens + 16)
    bench.backend.tile_tokens = tile_tokens
    bench.backend.score_elements = shape.heads * 40 * min(tile_tokens, 100)
    rows = [bench.request(done + 20, done) for done in (0, 1, 15, 16, 63, 255, 513)]
    cold = [bench.request(length + 8) for length in (1, 2, 16, 65, 130)]
    warm = [bench.request(start + length + 8, start) for start, length in ((1, 1), (16, 5), (37, 92), (300, 33))]

    def rest(request: LatentRequest) -> LatentChunk:
        return LatentChunk(request, request.rows.shape[1] - 8 - request.done)

    with torch.inference_mode():
        bench.step([])
        bench.step([LatentChunk(row, 1, span=False) for row in rows])
        bench.step([rest(row) for row in cold])
        bench.step([*(LatentChunk(row, 1, span=False) for row in rows + cold), *(rest(row) for row in warm)])
        for _ in range(2):
            bench.step([LatentChunk(row, 1, span=False) for row in (*rows[1:], *cold, *warm)])
    for request in (*rows, *cold, *warm):
        assert not bench.tail(request).any(), "slots past the last token are zeros"


def test_a_rank_without_heads_answers_nothing_and_keeps_the_rows() -> None:
    bench = LatentBench(PLAIN._replace(heads=0), 8)
    row, chunk = bench.request(30, 20), bench.request(40, 10)
    bench.step([LatentChunk(row, 1, span=False), LatentChunk(chunk, 30)])
    held = bench.pages[list(chunk.pages), 1, 0, 0].flatten(0, 1)
    assert torch.equal(held[:40], chunk.rows[1])


@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
def test_ragged_steps_of_a_changing_batch(data: st.DataObject) -> None:
    """Requests come, wait, run on and leave their place to others, over one backend that keeps its tables."""
    bench = LatentBench(LatentShape(2, 8, 4, 8, 12, 16), 64)
    bench.backend.tile_tokens, bench.backend.score_elements = 32, 400
    running = [bench.request(150, done) for done in data.draw(st.lists(st.integers(0, 120), max_size=3), "running")]
    for _ in range(4):
        running = data.draw(st.permutations(running), "order")
        if len(running) < 5 and data.draw(st.booleans(), "one more"):
            running.append(bench.request(150))
        lengths = [data.draw(st.integers(0, min(40, 150 - request.done)), "length") for request in running]
        rows = [LatentChunk(r, 1, span=False) for r, n in zip(running, lengths, strict=True) if n == 1]
        spans = [LatentChunk(r, n) for r, n in zip(running, lengths, strict=True) if n > 1]
        bench.step(rows + spans)


@pytest.mark.parametrize("shape", [PLAIN, SHAPES[2], SHAPES[6]], ids=str)
def test_absorbed_equals_expanded(shape: LatentShape) -> None:
    """The same token, as a decode row and as a span of one, over the same pages."""
    bench = LatentBench(shape, 90)
    for done in (0, 1, 15, 16, 200, 300):
        request = bench.request(done + 1, done)
        q, answers = bench.queries(1), []
        for step in (([request.pages], [done], []), ([], [], [TokenSpan(done, 1, request.pages)])):
            plan = bench.backend.plan_mixed(*step)
            given = bench.given(q, [request.rows[0, done : done + 1]])
            plan.write(0, given)
            answers.append(plan.attend(0, given))
        assert torch.allclose(*answers, rtol=0, atol=2 * LATENT_TOLERANCE[shape.dtype])


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_a_request_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    """Of what the plans compute. Products over all tokens of a step (absorb, values) are torch's and may differ."""
    shape = LatentShape(6, 24, 10, 24, 52, 16, dtype)
    bench = LatentBench(shape, 200)
    bench.backend.tile_tokens = 128
    row, chunk = bench.request(400, 390), bench.request(300, 100)
    others = [bench.request(done + 50, done) for done in (5, 700, 64)]
    absorbed, q = bench.normal(1, 6, shape.width), bench.queries(150)
    alone = bench.backend.decode.plan([row.pages], [row.done]).attend_absorbed(0, absorbed)
    span = TokenSpan(100, 150, chunk.pages)
    written, given = bench.backend.plan_prefill([span]), bench.given(q, [chunk.rows[0, 100:250]])
    written.write(0, given)
    expanded = written.attend(0, given)
    for count in (1, 2, 3):
        some = others[:count]
        plan = bench.backend.decode.plan([*(r.pages for r in some), row.pages], [*(r.done for r in some), row.done])
        queries = torch.cat((bench.normal(count, 6, shape.width), absorbed))
        assert torch.equal(plan.attend_absorbed(0, queries)[-1:], alone)
        beside = [TokenSpan(r.done, 7, r.pages) for r in some]
        prefill = bench.backend.plan_prefill([*beside, span])
        rows = [r.rows[0, r.done : r.done + 7] for r in some]
        given = bench.given(torch.cat((bench.queries(7 * count), q)), [*rows, chunk.rows[0, 100:250]])
        prefill.write(0, given)
        assert torch.equal(prefill.attend(0, given)[-150:], expanded)


@pytest.mark.parametrize("kind", ["rows", "spans", "mixed"])
def test_a_page_table_off_by_one_shows(kind: str) -> None:
    """Whichever page of whichever request: the comparison of all other tests here fails, by a wide margin."""
    for wrong in range(3):
        for index in range(4):
            bench = LatentBench(PLAIN, 24, fill=0.5)
            done = [bench.request(64, done=60) for _ in range(3)]
            rows = {"rows": 3, "spans": 0, "mixed": 2}[kind]
            chunks = [LatentChunk(r, 1, span=False) if i < rows else LatentChunk(r, 3) for i, r in enumerate(done)]
            table = shifted(done[wrong].pages, index, 24)
            with pytest.raises(AssertionError, match=r"chunk \d, layer 0: off by (0\.0?[1-9]|[1-9])"):
                bench.step(chunks, {wrong: table})


@pytest.mark.parametrize("kind", ["row", "span"])
@pytest.mark.parametrize("part", ["latent", "rope"])
def test_a_row_of_the_neighbouring_token_shows(kind: str, part: str) -> None:
    """Either part of one cached token's row is its neighbour's: the comparison fails, by a wide margin."""
    for at in (0, 15, 16, 58):
        bench = LatentBench(PLAIN, 8)
        request = bench.request(64, done=60)
        rows = bench.pages[list(request.pages), :, 0, 0].transpose(1, 2).flatten(0, 1)
        columns = slice(PLAIN.latent) if part == "latent" else slice(PLAIN.latent, None)
        page, slot = divmod(at, PLAIN.block_tokens)
        bench.pages[request.pages[page], :, 0, 0, slot, columns] = rows[at + 1, :, columns]
        with pytest.raises(AssertionError, match=r"off by (0\.0*[1-9]|[1-9])"):
            bench.step([LatentChunk(request, 1, span=False) if kind == "row" else LatentChunk(request, 3)])


def test_pages_that_are_not_there() -> None:
    """A plan that fails leaves the tables as they were: the next one is right."""
    bench = LatentBench(PLAIN, 12)
    good, other = bench.request(60, 40), bench.request(60, 20)
    rows = [LatentChunk(good, 1, span=False), LatentChunk(other, 1, span=False)]
    bench.step(rows)
    for pages in ((0,), (0, 1, 12), (0, -1, 2)):
        with pytest.raises(InternalError, match="page"):
            bench.backend.plan_decode([pages, other.pages], [40, other.done])
        with pytest.raises(InternalError, match="page"):
            bench.backend.plan_prefill([TokenSpan(30, 10, pages)])
    bench.step(rows)
    bench.step(rows[:1])
    third = bench.request(40, 30)
    with pytest.raises(InternalError, match="page"):
        bench.backend.plan_decode([third.pages, (0,)], [29, 40])
    bench.step([LatentChunk(third, 1, span=False)])


def test_pages_have_the_layout_of_a_latent_shard() -> None:
    layout = ShardLayout(layers=2, kv_heads=1, block_tokens=16, head_dim=80, itemsize=4, planes=1)
    sizes, ups = PLAIN.sizes, LatentBench(PLAIN, 1).backend.ups
    backend = LatentBackend(torch.zeros(3, *layout.shape), sizes, ups)
    plan = backend.plan_mixed([], [], [TokenSpan(0, 1, (2,))])
    row = torch.arange(1.0, 81.0)
    plan.write(1, torch.cat((torch.zeros(1, backend.query_width), row[None]), -1))
    page = backend.pages[2].flatten()
    at = layout.run_offset(1, 0, 0, 0) // layout.itemsize
    assert torch.equal(page[at : at + 80], row)
    assert not page[:at].any() and not page[at + 80 :].any()


def test_pages_that_hold_no_latent() -> None:
    ups = LatentBench(PLAIN, 1).backend.ups
    for pages, why in (
        (torch.zeros(2, 2, 2, 1, 16, 80), "one plane of one head"),
        (torch.zeros(2, 2, 1, 2, 16, 80), "one plane of one head"),
        (torch.zeros(2, 2, 1, 1, 16, 81), "rows of 81"),
        (torch.zeros(2, 1, 1, 1, 16, 80), "2 attention specs for 1 layers"),
        (torch.zeros(2, 2, 1, 1, 80, 16).transpose(-1, -2), "contiguous"),
    ):
        with pytest.raises(InternalError, match=why):
            LatentBackend(pages, PLAIN.sizes, ups)

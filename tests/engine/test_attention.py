"""The backends of attention against float64: shapes, windows, softcaps, ragged and mixed steps, dirty memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.engine.attention.backend import TokenSpan
from kvmesh.engine.attention.choice import make_backend
from kvmesh.engine.attention.native_backend import NativeAttention
from kvmesh.engine.attention.torch_backend import TorchAttention
from kvmesh.engine.config import AttentionSpec
from kvmesh.engine.cpu import native
from kvmesh.errors import InternalError
from tests.support.engine.attention_oracle import Bench, Chunk, Shape, shifted

needs_native = pytest.mark.skipif(
    not native.loaded(), reason="the CPU operators are not built: python -m kvmesh.engine.cpu.build"
)
EACH = [pytest.param("native", marks=needs_native), "torch"]
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = [
    Shape(2, 1, 64, 16, F32),
    Shape(1, 4, 128, 16, F32),
    Shape(2, 7, 96, 64, F32),
    Shape(1, 8, 256, 16, F32),
    Shape(2, 3, 24, 16, F32),
    Shape(2, 2, 128, 16, BF16),
    Shape(1, 8, 64, 64, BF16),
    Shape(2, 7, 96, 16, BF16),
    Shape(1, 1, 256, 64, BF16),
    Shape(1, 70, 40, 16, BF16),
    Shape(2, 4, 72, 16, F16),
]
PLAIN = Shape(2, 2, 64, 16, F32)
WHOLE = (SHAPES[2], SHAPES[5], SHAPES[10])  # of each dtype one that has every kind of layer


def specs(head_dim: int, heads: int = 0) -> list[AttentionSpec]:
    """Layers as models mix them: plain, a window within a page, windows over pages, softcaps, chunks that end in a page
    and with one; of so many heads some with sinks, which may outweigh all tokens."""
    scale = head_dim**-0.5
    sinks = 6 * torch.randn(heads, generator=torch.Generator().manual_seed(heads))
    found = [
        AttentionSpec(scale),
        AttentionSpec(scale, window=7),
        AttentionSpec(2 * scale, window=75),
        AttentionSpec(scale, softcap=3.0),
        AttentionSpec(scale, window=150, softcap=20.0),
        AttentionSpec(scale, chunk=75),
        AttentionSpec(scale, chunk=128, softcap=20.0),
    ]
    if heads:
        found += [AttentionSpec(scale, sinks=sinks), AttentionSpec(scale, window=75, sinks=sinks)]
        found += [AttentionSpec(scale, softcap=3.0, chunk=64, sinks=sinks - 40)]
    return found


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_float64(name: str, shape: Shape) -> None:
    """Rows alone, chunks alone, both at once; then on from there, so that kept tables are used."""
    layers = specs(shape.head_dim, shape.kv_heads * shape.group)
    if shape not in WHOLE:
        layers = [layers[0], layers[4], layers[5], layers[8]]  # plain, window and softcap, chunks, sinks
    bench = Bench(name, shape, layers, 180 * 16 // shape.block_tokens)
    rows = [bench.request(done + 20, done) for done in (0, 15, 16, 63, 255, 256, 640)]
    cold = [bench.request(length + 8) for length in (1, 2, 65, 150)]
    warm = [bench.request(start + length + 8, start) for start, length in ((1, 1), (16, 5), (37, 92), (300, 33))]
    with torch.inference_mode():
        bench.step([Chunk(row, 1, span=False) for row in rows])
        bench.step([Chunk(row, len(row.kv[0]) - 8 - row.done) for row in cold])
        mixed = [Chunk(row, 1, span=False) for row in rows + cold]
        bench.step([*mixed, *(Chunk(row, len(row.kv[0]) - 8 - row.done) for row in warm)])
        for _ in range(2):
            bench.step([Chunk(row, 1, span=False) for row in (*rows[1:], *cold, *warm)])
    for request in (*rows, *cold, *warm):
        assert not bench.tail(request).any(), "slots past the last token are zeros"


def test_torch_gathers_in_tiles_that_fit_its_scratch() -> None:
    bench = Bench("torch", PLAIN, specs(64), 80)
    assert isinstance(bench.backend, TorchAttention)
    bench.backend.scratch_elements = room = 2 * PLAIN.kv_heads * 64 * 330
    rows = [bench.request(done + 4, done) for done in (300, 20, 200, 100, 310)]
    chunk = bench.request(200, 90)
    for _ in range(2):
        bench.step([*(Chunk(row, 1, span=False) for row in rows), Chunk(chunk, 50)])
    assert bench.backend.scratch.numel() <= room


@pytest.mark.parametrize("name", EACH)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_ragged_steps_of_a_changing_batch(name: str, data: st.DataObject) -> None:
    """Requests come, wait, run on and leave their place to others, over one backend that keeps its tables."""
    bench = Bench(name, Shape(1, 2, 16, 16, F32), specs(16), 64)
    running = [bench.request(150, done) for done in data.draw(st.lists(st.integers(0, 120), max_size=3), "running")]
    for _ in range(4):
        running = data.draw(st.permutations(running), "order")
        if len(running) < 5 and data.draw(st.booleans(), "one more"):
            running.append(bench.request(150))
        lengths = [data.draw(st.integers(0, min(40, 150 - request.done)), "length") for request in running]
        rows = [Chunk(r, 1, span=False) for r, n in zip(running, lengths, strict=True) if n == 1]
        spans = [Chunk(r, n) for r, n in zip(running, lengths, strict=True) if n > 1]
        if rows or spans:
            bench.step(rows + spans)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("kind", ["rows", "spans", "mixed"])
def test_a_page_table_off_by_one_shows(name: str, kind: str) -> None:
    """Whichever page of whichever request: the comparison of all other tests here fails, by a wide margin."""
    layer = [AttentionSpec(0.125)]
    for wrong in range(3):
        for index in range(4):
            bench = Bench(name, PLAIN, layer, 24, fill=0.5)
            done = [bench.request(64, done=60) for _ in range(3)]
            chunks = [Chunk(r, 1 if i < {"rows": 3, "spans": 0, "mixed": 2}[kind] else 3) for i, r in enumerate(done)]
            chunks = [Chunk(r, n, span=n > 1) for r, n, _ in chunks]
            table = shifted(done[wrong].pages, index, 24)
            with pytest.raises(AssertionError, match=r"chunk \d, layer 0.*: off by (0\.0?[1-9]|[1-9])"):
                bench.step(chunks, {wrong: table})


@needs_native
@pytest.mark.usefixtures("two_threads")
def test_native_answers_do_not_depend_on_the_batch_the_chunks_or_the_threads() -> None:
    """To the last bit, in bfloat16, where any other order of sums would show."""
    shape = Shape(2, 3, 64, 16, BF16)
    qkv = torch.randn(700, 10, 64, generator=torch.Generator().manual_seed(1)).to(BF16)

    def answers(cuts: list[int], with_a_row: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Of a prompt in chunks, and of a row with a long context that was beside each of them."""
        bench = Bench("native", shape, [AttentionSpec(0.125, window=650)], 100, fill=0.5)
        own, other, at = bench.request(700), bench.request(700, 690), 0
        chunks, rows = [], []
        for to in [*cuts, 700]:
            beside = ([other.pages], [other.done]) if with_a_row else ([], [])
            plan = bench.backend.plan_mixed(*beside, [TokenSpan(at, to - at, own.pages)])
            step = torch.cat((qkv[:1], qkv[at:to])) if with_a_row else qkv[at:to]
            plan.write(0, step)
            out = plan.attend(0, step)
            chunks.append(out[int(with_a_row) :])
            rows.append(out[: int(with_a_row)])
            at = to
        return torch.cat(chunks), rows

    whole, [row] = answers([], True)
    torch.set_num_threads(1)
    for cuts, with_a_row in (([], False), ([100, 333], True), ([17, 530], False)):
        chunks, rows = answers(cuts, with_a_row)
        assert torch.equal(chunks, whole)
        assert not with_a_row or all(torch.equal(again, row) for again in rows)


@needs_native
def test_native_runs_on_the_cpu_unless_told_otherwise() -> None:
    pages = torch.zeros(2, 1, 2, 1, 16, 32)
    assert type(make_backend(pages, 2, [AttentionSpec(1.0)])) is NativeAttention


@needs_native
def test_what_the_operators_refuse() -> None:
    bench = Bench("native", PLAIN, [AttentionSpec(1.0)], 4)
    plan = bench.backend.plan_decode([(0,)], [3])
    for qkv in (torch.zeros(1, 8, 32), torch.zeros(1, 8, 64).bfloat16(), torch.zeros(64, 8, 1).permute(2, 1, 0)):
        with pytest.raises(RuntimeError, match="pages"):
            plan.attend(0, qkv)
    with pytest.raises(RuntimeError, match="query heads"):
        plan.attend(0, torch.zeros(1, 4, 64))


@pytest.mark.parametrize("name", EACH)
def test_pages_that_are_not_there(name: str) -> None:
    """A plan that fails leaves the tables as they were: the next one is right."""
    bench = Bench(name, PLAIN, specs(64), 12)
    good, other = bench.request(60, 40), bench.request(60, 20)
    bench.step([Chunk(good, 1, span=False), Chunk(other, 1, span=False)])
    for pages in ((0,), (0, 1, 12), (0, -1, 2)):
        with pytest.raises(InternalError, match="page"):
            bench.backend.plan_decode([pages, other.pages], [40, other.done])
    bench.step([Chunk(good, 1, span=False), Chunk(other, 1, span=False)])

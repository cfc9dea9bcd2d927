"""Latent attention by Triton's kernels against float64: odd counts of heads, ragged steps, contexts in pieces, rows
that stand for nobody, dirty memory; and what a step's scratch takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvmesh.engine import capture
from kvmesh.engine.attention import choice
from kvmesh.engine.attention.backend import TokenSpan
from kvmesh.engine.batch import DecodeBatch
from kvmesh.engine.rope import Rotation
from kvmesh.engine.runner import DecodeInput, PrefillInput, SampleParams
from tests.support.checkpoints import prompts
from tests.support.engine.attention_oracle import shifted
from tests.support.engine.latent_oracle import (
    LATENT_TOLERANCE,
    LatentBench,
    LatentChunk,
    LatentShape,
    normed_and_rotated,
)
from tests.support.engine.recorded import RerunCapture, tensors_in
from tests.support.engine.stepper import Stepper
from tests.support.reference import assert_matches_reference

SHAPES = {
    "4 heads": LatentShape(4, 32, 16, 32, 64, 16),
    "one head, DeepSeek's widths": LatentShape(1, 128, 64, 128, 512, 16),
    "odd widths": LatentShape(3, 7, 6, 5, 33, 16),
    "no rope, large block": LatentShape(2, 16, 0, 16, 24, 64),
    "half": LatentShape(3, 24, 16, 16, 48, 16, torch.float16),
}
PLAIN = SHAPES["4 heads"]


@pytest.fixture
def triton_latent(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Any:
    del device  # skips where there is no triton
    from kvmesh.engine.attention import triton_backend, triton_latent

    monkeypatch.setattr(triton_backend, "PROCESSORS", 1)  # the interpreter runs one program after the other
    return triton_latent


def latent_bench(module: Any, device: torch.device, shape: LatentShape, num_pages: int, **more: Any) -> LatentBench:
    return LatentBench(shape, num_pages, backend=module.TritonLatent, device=device, **more)


# ── absorbed decode ──────────────────────────────────────────────────────────────────────────────────────────────────

LENGTHS = (1, 40, 0, 16, 17, 75)
SHARES = ((99, False), (1, False), (1, True))
# DeepSeek's widths in each variant that serves them, of 65 heads a whole tile and one of a single head; every way to
# share contexts over widths that fit no tile.
DECODED = [
    (1, 512, 64, 16, torch.float16, *SHARES[1]),
    (3, 512, 64, 64, torch.float16, *SHARES[2]),
    (17, 512, 64, 16, torch.float16, *SHARES[0]),
    (65, 512, 64, 64, torch.float16, *SHARES[2]),
    *((3, 33, 6, 16, torch.float32, *share) for share in SHARES),
    *((17, 64, 16, 32, torch.float32, *share) for share in SHARES[:2]),
    (2, 24, 0, 16, torch.float32, *SHARES[2]),
]


@pytest.mark.parametrize(("heads", "latent", "rope", "block", "dtype", "longest", "owned"), DECODED, ids=str)
def test_decode_equals_the_oracle(
    heads: int, latent: int, rope: int, block: int, dtype: torch.dtype, longest: int, owned: bool, device: torch.device
) -> None:
    """By the very programs that serve on Hopper: rows of one share and of several, rows that stand for nobody, unused
    entries of the list, tables that name no page behind a row's last one, and NaN wherever no token was written. With
    `owned` two queries of one request share its row of the table."""
    from kvmesh.engine.kernels.decode import scratch_elements, shares_of
    from kvmesh.engine.kernels.latent_decode import latent_decode, variant_for

    made = torch.Generator().manual_seed(heads)
    variant = variant_for(heads, latent, dtype.itemsize, (9, 0))
    lengths = np.array(LENGTHS)
    counts = -(-lengths // block)
    order = torch.randperm(int(counts.sum()) + 3, generator=made).tolist()
    pool = torch.full((len(order), 2, block, latent + rope), torch.nan, dtype=dtype, device=device)
    table = torch.full((len(lengths), int(counts.max()) + 1), -1, dtype=torch.int32)
    rows = []
    for row, length in enumerate(lengths.tolist()):
        rows.append(torch.randn(length, latent + rope, generator=made).to(device, dtype))
        for at in range(0, length, block):
            page = order.pop()
            table[row, at // block] = page
            pool[page, 1, : min(block, length - at)] = rows[-1][at : at + block]
    asked = [(row, length) for row, length in enumerate(lengths.tolist())]
    if owned:
        asked = [(5, 75), (5, 74), (1, 40), (1, 7)]
    seen = np.array([length for _, length in asked])
    q = torch.randn(len(asked), heads, latent + rope, generator=made).to(device, dtype)
    work, joins = shares_of(seen, 0, variant.keys, longest)
    work = np.concatenate((work, np.zeros((2, 4), np.int32)))
    scratch = torch.full((scratch_elements(len(work), heads, latent),), torch.nan, device=device)
    out = torch.full((len(asked), heads, latent), torch.nan, dtype=dtype, device=device)
    owners = torch.tensor([row for row, _ in asked], dtype=torch.int32, device=device) if owned else None
    scale = (latent + rope) ** -0.5
    split = q.transpose(0, 1).contiguous().transpose(0, 1)  # heads lie apart, as a product of each leaves them
    latent_decode(
        split[..., :latent], q[..., latent:], pool[:, 1], table.to(device), owners,
        torch.tensor(seen, dtype=torch.int32, device=device), torch.from_numpy(work).to(device),
        torch.from_numpy(joins).to(device), scale, scratch, out, variant,
    )  # fmt: skip
    for i, (row, length) in enumerate(asked):
        keys = rows[row][:length].double()
        wanted = torch.softmax(q[i].double() @ keys.T * scale, -1) @ keys[:, :latent]
        near = LATENT_TOLERANCE[dtype]
        torch.testing.assert_close(out[i].double(), wanted if length else wanted * 0, atol=near, rtol=near)


@pytest.mark.parametrize(
    ("heads", "latent", "rope", "block", "dtype", "queries", "longest"),
    [
        (3, 33, 6, 16, torch.float32, 8, 99),
        (3, 33, 6, 16, torch.float32, 4, 1),  # a tile of heads of several rows
        (17, 64, 16, 32, torch.float32, 2, 1),  # several tiles, some of rows that a request does not have
        (5, 512, 64, 64, torch.float16, 8, 1),
    ],
    ids=str,
)
def test_rows_of_a_request_share_a_program(
    heads: int, latent: int, rope: int, block: int, dtype: torch.dtype, queries: int, longest: int, device: torch.device
) -> None:
    from kvmesh.engine.kernels.decode import requests_of, scratch_elements, shares_of
    from kvmesh.engine.kernels.latent_decode import latent_decode, variant_for

    made = torch.Generator().manual_seed(heads)
    variant = variant_for(heads * queries, latent, dtype.itemsize, (9, 0))
    rows, ends = np.array([1, 4, 7, 2]), np.array([1, 42, 75, 17])
    pages = -(-ends // block)
    order = torch.randperm(int(pages.sum()) + 3, generator=made).tolist()
    pool = torch.full((len(order), 2, block, latent + rope), torch.nan, dtype=dtype, device=device)
    table = torch.full((len(ends), int(pages.max()) + 1), -1, dtype=torch.int32)
    contexts = []
    for request, end in enumerate(ends.tolist()):
        contexts.append(torch.randn(end, latent + rope, generator=made).to(device, dtype))
        for at in range(0, end, block):
            table[request, at // block] = page = order.pop()
            pool[page, 1, : min(block, end - at)] = contexts[-1][at : at + block]
    lengths = np.concatenate([np.arange(end - count, end) + 1 for count, end in zip(rows, ends, strict=True)])
    owners, counts = np.repeat(np.arange(len(ends)), rows), requests_of(rows, queries)
    firsts = np.cumsum(counts) - counts
    work, joins = shares_of(lengths, 0, variant.keys, longest, requests=counts)
    slots = int(joins[:, 1].sum())
    q = torch.randn(len(lengths), heads, latent + rope, generator=made).to(device, dtype)
    scratch = torch.full((scratch_elements(slots, heads, latent),), torch.nan, device=device)
    out = torch.full((len(lengths), heads, latent), torch.nan, dtype=dtype, device=device)
    arrays = (lengths, work, joins, np.stack((firsts, counts), 1))
    lens, work, joins, requests = (torch.from_numpy(array.astype(np.int32)).to(device) for array in arrays)
    split, scale = q.transpose(0, 1).contiguous().transpose(0, 1), (latent + rope) ** -0.5
    latent_decode(
        split[..., :latent], q[..., latent:], pool[:, 1], table[owners[firsts]].to(device), None, lens, work, joins,
        scale, scratch, out, variant, requests=requests, queries=queries,
    )  # fmt: skip
    for row, (owner, length) in enumerate(zip(owners.tolist(), lengths.tolist(), strict=True)):
        keys = contexts[owner][:length].double()
        wanted = torch.softmax(q[row].double() @ keys.T * scale, -1) @ keys[:, :latent]
        torch.testing.assert_close(
            out[row].double(), wanted, atol=LATENT_TOLERANCE[dtype], rtol=LATENT_TOLERANCE[dtype]
        )


# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SHAPES if name != "4 heads"])  # a short step has several
def test_steps_equal_float64(
    name: str, triton_latent: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows alone, chunks alone, both at once, and on with kept tables; contexts of several pieces that end within a
    tile, some heads at a time; chunks of few queries, which are absorbed, beside others."""
    shape = SHAPES[name]
    monkeypatch.setattr(triton_latent, "absorbed_costs_less", lambda span, sizes, times: span.length <= 5)
    monkeypatch.setattr(triton_latent, "PIECE_TOKENS", 48)
    monkeypatch.setattr(triton_latent, "WORKSPACE_BYTES", 3 * 48 * (shape.nope + shape.value) * shape.dtype.itemsize)
    bench = latent_bench(triton_latent, device, shape, 60)
    rows = [bench.request(done + 6, done) for done in (0, 15, 40)]
    cold = [bench.request(length + 8) for length in (2, 16, 35)]
    warm = [bench.request(start + length + 8, start) for start, length in ((16, 5), (100, 2), (37, 17))]
    with torch.inference_mode():
        bench.step([])
        bench.step([LatentChunk(row, 1, span=False) for row in rows])
        bench.step([LatentChunk(row, row.rows.shape[1] - 8) for row in cold])
        chunks = [LatentChunk(row, row.rows.shape[1] - 8 - row.done) for row in warm]
        plan = bench.backend.plan_prefill([TokenSpan(c.request.done, c.length, c.request.pages) for c in chunks])
        assert plan.runs and plan.pieces  # type: ignore[attr-defined]
        bench.step([*(LatentChunk(row, 1, span=False) for row in rows), *chunks])
        bench.step([LatentChunk(row, 1, span=False) for row in (*rows[1:], *warm)])
    for request in (*cold, *warm):
        page, slot = divmod(request.rows.shape[1] - 9, shape.block_tokens)
        if request in cold:
            assert not bench.pages[request.pages[page], :, :, :, slot + 1 :].any(), "slots past a prompt are zeros"


def test_a_short_step_equals_float64(triton_latent: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row and two chunks of which one is absorbed, over a workspace of two pieces."""
    monkeypatch.setattr(triton_latent, "absorbed_costs_less", lambda span, sizes, times: span.length <= 5)
    monkeypatch.setattr(triton_latent, "PIECE_TOKENS", 24)
    bench = latent_bench(triton_latent, device, LatentShape(3, 12, 6, 5, 33, 16), 12)
    row, long, few = bench.request(20, 18), bench.request(40, 9), bench.request(30, 28)
    with torch.inference_mode():
        bench.step([LatentChunk(row, 1, span=False), LatentChunk(long, 31), LatentChunk(few, 2)])


def test_a_rank_without_heads_keeps_the_rows(triton_latent: Any, device: torch.device) -> None:
    bench = latent_bench(triton_latent, device, PLAIN._replace(heads=0), 8)
    row, chunk = bench.request(30, 20), bench.request(40, 10)
    with torch.inference_mode():
        bench.step([LatentChunk(row, 1, span=False), LatentChunk(chunk, 30)])
    held = bench.pages[list(chunk.pages), 1, 0, 0].flatten(0, 1)
    assert torch.equal(held[:40], chunk.rows[1])


@pytest.mark.parametrize("kind", ["rows", "spans"])
def test_a_page_table_off_by_one_shows(kind: str, triton_latent: Any, device: torch.device) -> None:
    shape = LatentShape(2, 12, 6, 8, 20, 16)
    for index in range(2):
        bench = latent_bench(triton_latent, device, shape, 12, fill=0.5)
        done = [bench.request(32, done=28) for _ in range(2)]
        chunks = [LatentChunk(r, 1, span=False) if kind == "rows" else LatentChunk(r, 3) for r in done]
        with pytest.raises(AssertionError, match=r"chunk \d, layer 0: off by (0\.0?[1-9]|[1-9])"):
            bench.step(chunks, {1: shifted(done[1].pages, index, 12)})


def test_which_chunks_are_absorbed() -> None:
    """DeepSeek's widths: chunks of some hundred queries behind a long context, none without one."""
    from kvmesh.engine.attention.latent import absorbed_costs_less
    from kvmesh.engine.config_latent import LatentConfig

    sizes = LatentConfig(1536, 512, 128, 64, 128, 1.0, False, True)

    def most(start: int, times: float) -> int:
        return sum(absorbed_costs_less(TokenSpan(start, length, ()), sizes, times) for length in range(1, 1000))

    assert most(0, 1.0) == 0 and 160 <= most(100_000, 1.0) <= 175 and 90 <= most(100_000, 1.5) <= 115
    assert most(1000, 1.0) < most(10_000, 1.0)


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Allocations(TorchDispatchMode):
    """Counts the bytes of what operations of torch make new, all together."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tensors_in((args, kwargs))}
        if isinstance(answer, torch.Tensor) and answer.untyped_storage().data_ptr() not in given:
            self.bytes += answer.untyped_storage().nbytes()
        return answer


@pytest.mark.parametrize("context", [500, 4000])
def test_scratch_does_not_grow_with_the_context(
    context: int, triton_latent: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are left out: what a layer allocates is torch's. The rows gathered for one piece are given back before
    the next is."""
    monkeypatch.setattr(triton_latent.TritonLatent, "absorbed_times", math.inf)
    monkeypatch.setattr(triton_latent, "PIECE_TOKENS", 64)
    monkeypatch.setattr(triton_latent, "WORKSPACE_BYTES", 40_000)
    monkeypatch.setattr(triton_latent, "latent_prefill", lambda *args: None)
    bench = latent_bench(triton_latent, device, PLAIN, context // 16 + 4, fill=0.0)
    request = bench.request(context + 50)
    plan = bench.backend.plan_prefill([TokenSpan(context, 50, request.pages)])
    assert len(plan.pieces) == -(-(context + 50) // 64)  # type: ignore[attr-defined]
    given, out = bench.backend.inputs(50), bench.backend.answer(bench.backend.inputs(50))
    with torch.inference_mode(), Allocations() as seen:
        plan.attend(0, given, out)
    gathered = sum(len(piece.slots) for piece in plan.pieces) * PLAIN.width * 4  # type: ignore[attr-defined]
    groups = -(-4 // bench.backend.heads_at_once(64, 50))  # type: ignore[attr-defined]
    most = bench.backend.scratch_bytes(50) - 64 * PLAIN.width * 4  # type: ignore[attr-defined]
    assert groups > 1 and 0 < seen.bytes - gathered * groups <= most


# ── writes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


WRITTEN = [PLAIN, SHAPES["odd widths"], LatentShape(17, 8, 64, 8, 512, 64, torch.float16)]


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    "shape", [PLAIN, SHAPES["odd widths"], LatentShape(17, 8, 64, 8, 512, 64, torch.float16)], ids=str
)
def test_norm_rotation_and_write_equal_the_oracle(shape: LatentShape, normed: bool, device: torch.device) -> None:
    """Rows of slot -1 leave no trace, what no token names stays, and rows in `qkv` are as they were."""
    from kvmesh.engine.kernels.latent_write import rotate_and_write_latents

    made = torch.Generator().manual_seed(3)
    width = shape.heads * (shape.nope + shape.rope)
    qkv = torch.randn(5, width + shape.width, generator=made).to(device, shape.dtype)
    cos, sin = torch.randn(2, 5, 1, shape.rope, generator=made).to(device, shape.dtype).unbind()
    weight = torch.rand(shape.latent, generator=made).to(device, shape.dtype) if normed else None
    rotation = Rotation(shape.heads + 1, cos.contiguous(), sin.contiguous(), weight, 1e-6)
    pool = torch.randn(4, 2, shape.block_tokens, shape.width, generator=made).to(device, shape.dtype)
    slots = torch.tensor([3 * shape.block_tokens + 1, -1, 5, shape.block_tokens, 0], dtype=torch.int32, device=device)
    wanted, before, rows = normed_and_rotated(qkv, rotation, shape), pool.clone(), qkv[:, width:].clone()
    given = qkv.clone()
    rotate_and_write_latents(
        given, pool[:, 1], slots, shape.heads, shape.nope, shape.latent, rotation, interleaved=True
    )
    near = {"atol": LATENT_TOLERANCE[shape.dtype], "rtol": LATENT_TOLERANCE[shape.dtype]}
    torch.testing.assert_close(given[:, :width].double(), wanted[:, :width], **near)
    assert torch.equal(given[:, width:], rows)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, at = divmod(slot, shape.block_tokens)
            torch.testing.assert_close(pool[page, 1, at].double(), wanted[token, width:], **near)
            before[page, 1, at] = pool[page, 1, at]
    assert torch.equal(pool, before)


def test_the_kernel_writes_what_torch_writes(triton_latent: Any, device: torch.device) -> None:
    """Halves instead of pairs, too: pages that one backend wrote are another's."""
    from kvmesh.engine.attention.latent import LatentBackend

    for interleaved in (True, False):
        bench = latent_bench(triton_latent, device, PLAIN, 4, fill=0.0)
        sizes = replace(PLAIN.sizes, interleaved=interleaved)
        pages = [torch.zeros_like(bench.pages) for _ in range(2)]
        given = bench.normal(7, bench.backend.query_width + PLAIN.width)
        cos, sin = bench.normal(7, 1, PLAIN.rope), bench.normal(7, 1, PLAIN.rope)
        rotation = Rotation(PLAIN.heads + 1, cos, sin, bench.normal(PLAIN.latent), 1e-6)
        told = []
        for own, kind in zip(pages, (triton_latent.TritonLatent, LatentBackend), strict=True):
            plan = kind(own, sizes, [bench.up] * 2).plan_prefill([TokenSpan(3, 7, (2,))])
            mine = given.clone()
            plan.rotate_and_write(1, mine, rotation)
            told.append(mine[:, : bench.backend.query_width])
        torch.testing.assert_close(*pages, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(*told, atol=1e-5, rtol=1e-5)


# ── under the runner ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2"])
def test_replayed_steps_equal_the_reference(
    name: str,
    zoo: Callable[[str], Path],
    triton_latent: Any,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decode steps as graphs, and steps of chunks beside rows by pieces; the graphs' work is done again where a GPU
    would replay it."""
    if device.type == "cuda":
        pytest.skip("on a GPU tests/gpu does this with the whole engine")
    monkeypatch.setattr(capture, "CudaCapture", lambda device: RerunCapture())
    monkeypatch.setitem(choice.LATENT_BACKENDS, "cpu", triton_latent.TritonLatent)
    path = zoo(name)
    stepper = Stepper(path, num_pages=24)
    runner = stepper.runner
    assert isinstance(runner.attention, triton_latent.TritonLatent)
    with torch.inference_mode():
        runner._capture(max_rows=2, max_tokens=16)
    assert runner.graphs is not None and runner.pieces is not None
    assert (runner.graphs.sizes, runner.pieces.sizes) == ((1, 2), (32,))
    assert (runner.graphs.failed, runner.pieces.failed) == ("", "")
    asked = prompts(2, runner.config.vocab_size, seed=6, low=17, high=24)
    pages = [stepper.take(len(prompt) + 8) for prompt in asked]
    answers = [[stepper.prefill(asked[0], pages[0])]]
    row = DecodeInput(answers[0][0], len(asked[0]), pages[0], SampleParams())
    chunk = PrefillInput(asked[1][:12], 0, pages[1])
    _, chosen = runner.step([chunk], DecodeBatch.of([row]))  # 13 of the 32 tokens that the bucket has
    row.token_id, row.position = int(chosen.token_ids[0]), row.position + 1
    answers[0].append(row.token_id)
    answers.append([stepper.prefill(asked[1], pages[1], start=12)])
    rows = [row, DecodeInput(answers[1][0], len(asked[1]), pages[1], SampleParams())]
    for answer, more in zip(answers, stepper.decode(rows, 3), strict=True):
        answer.extend(more)
    for prompt, answer in zip(asked, answers, strict=True):
        assert_matches_reference(path, prompt, answer)

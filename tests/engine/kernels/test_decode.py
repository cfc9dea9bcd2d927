from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.engine.config import AttentionSpec
from tests.support.engine import decode_oracle
from tests.support.engine.paged import Paged, Shape, paged, supported

SHAPES = {
    "gqa1": Shape(2, 2, 16, 16),
    "gqa4 padded dim": Shape(8, 2, 96, 16),
    "gqa7 large block": Shape(7, 1, 64, 64),
    "half": Shape(4, 1, 64, 16, torch.float16),
    "bfloat16": Shape(4, 2, 32, 32, torch.bfloat16),
}
SPECS = (AttentionSpec(0.2, window=1), AttentionSpec(0.3, window=20), AttentionSpec(2.0, softcap=3.0))
LENGTHS = (1, 40, 0, 16, 17, 75)


def attended(batch: Paged, lengths: tuple[int, ...], spec: AttentionSpec, longest: int) -> tuple[torch.Tensor, ...]:
    """What the kernel says, and the oracle. The list ends with two entries that are none, as a replayed one's may."""
    from kvmesh.engine.kernels.decode import paged_decode, scratch_elements, shares_of
    from kvmesh.engine.kernels.tiles import tiles_for

    rows, shape = len(lengths), batch.shape
    device = batch.pages.device
    qkv, lens = batch.qkv(rows), torch.tensor(lengths, dtype=torch.int32, device=device)
    tile = tiles_for(shape.dim, shape.dtype.itemsize, shape.block).keys
    shares, joins = shares_of(np.array(lengths), spec.window, tile, longest, spec.chunk)
    work = torch.from_numpy(np.concatenate((shares, np.zeros((2, 4), np.int32)))).to(device)
    scratch = torch.full((scratch_elements(len(shares), shape.heads, shape.dim),), torch.nan, device=device)
    out = torch.full((rows, shape.heads * shape.dim), torch.nan, dtype=shape.dtype, device=device)
    ends = torch.from_numpy(joins).to(device)
    paged_decode(qkv, batch.pages, batch.table, lens, work, ends, spec, scratch, out)
    return out.double(), decode_oracle.paged_decode(qkv, batch.pages, batch.table, lens, spec)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("longest", [pytest.param(99, marks=pytest.mark.slow), 2])
def test_equals_the_oracle(name: str, longest: int, device: torch.device) -> None:
    shape = supported(SHAPES[name], device)
    got, wanted = attended(paged(shape, LENGTHS, device), LENGTHS, AttentionSpec(shape.dim**-0.5), longest)
    torch.testing.assert_close(got, wanted, atol=shape.tolerance, rtol=shape.tolerance)
    assert not got[2].any(), "a row that stands for none leaves zeros"


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(0.2, window=1),
        AttentionSpec(0.3, window=20),
        AttentionSpec(2.0, softcap=3.0),
        AttentionSpec(0.3, chunk=20),  # LENGTHS hold a chunk's last token, 40, and the first of another, 17 of 16
        AttentionSpec(0.3, chunk=16),
    ],
)
def test_window_chunk_and_softcap(spec: AttentionSpec, device: torch.device) -> None:
    shape = Shape(4, 2, 24, 16)
    got, wanted = attended(paged(shape, LENGTHS, device), LENGTHS, spec, 2)
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("longest", "sees"), [(99, (0, 0)), (1, (0, 0)), (1, (20, 0)), (99, (0, 24))])
def test_sinks_take_part_in_the_softmax(longest: int, sees: tuple[int, int], device: torch.device) -> None:
    """Of rows of one share and of several; a row that stands for none still leaves zeros."""
    shape = Shape(4, 2, 24, 16)
    sinks = torch.tensor([0.0, -3.0, 2.0, 40.0], device=device)
    spec = AttentionSpec(0.3, sees[0], chunk=sees[1], sinks=sinks)
    got, wanted = attended(paged(shape, LENGTHS, device), LENGTHS, spec, longest)
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)
    assert not got[2].any()


# Rows of each request, the last of which sees as many tokens as DRAFTED says: a border of a page and of a window lies
# between rows of one request; the third has more rows than a program of 4 takes.
SINKS = torch.tensor([0.0, -3.0, 2.0, 40.0])
ROWS, DRAFTED = (1, 4, 7, 2, 1), (1, 41, 75, 17, 40)


@pytest.mark.parametrize(
    ("shape", "spec", "queries", "longest"),
    [
        (Shape(8, 2, 24, 16), AttentionSpec(0.2), 2, 99),
        (Shape(4, 1, 24, 16), AttentionSpec(0.2), 8, 1),
        (Shape(7, 1, 64, 64, torch.float16), AttentionSpec(0.2), 4, 1),
        (Shape(2, 2, 16, 16), AttentionSpec(0.3, window=20), 8, 99),
        (Shape(1, 1, 16, 16), AttentionSpec(0.3, window=1), 4, 1),
        (Shape(1, 1, 16, 16), AttentionSpec(0.3, chunk=16, softcap=3.0), 8, 1),
        (Shape(4, 1, 24, 16), AttentionSpec(0.3, window=20, sinks=SINKS), 4, 1),
        (Shape(4, 2, 24, 16), AttentionSpec(0.3, chunk=24, sinks=SINKS), 8, 99),
        (Shape(4, 1, 64, 16, torch.bfloat16), AttentionSpec(0.2), 8, 2),
    ],
    ids=range(9),
)
def test_rows_of_a_request_share_a_program(
    shape: Shape, spec: AttentionSpec, queries: int, longest: int, device: torch.device
) -> None:
    """Uneven requests, rows behind them that stand for none, unused entries of the list, NaN where no token is."""
    from kvmesh.engine.kernels.decode import paged_decode, requests_of, scratch_elements, shares_of
    from kvmesh.engine.kernels.tiles import tiles_for

    shape = supported(shape, device)
    batch = paged(shape, DRAFTED, device)
    spec = spec if spec.sinks is None else replace(spec, sinks=spec.sinks.to(device))
    lengths = np.concatenate([np.arange(end - count, end) + 1 for count, end in zip(ROWS, DRAFTED, strict=True)])
    counts = requests_of(np.array(ROWS), queries)
    assert counts.sum() == sum(ROWS) and counts.max() == min(queries, 7)
    owners = np.repeat(np.arange(len(ROWS)), ROWS)  # of each row: whose table it has
    firsts = np.cumsum(counts) - counts
    tile = tiles_for(shape.dim, shape.dtype.itemsize, shape.block).keys
    shares, joins = shares_of(lengths, spec.window, tile, longest, spec.chunk, requests=counts)
    work = np.concatenate((shares, np.zeros((2, 4), np.int32)))
    rows = len(lengths) + 2
    joins = np.concatenate((joins, np.zeros((2, 3), np.int32)))
    slots = int((joins[:, 1]).sum())
    qkv, lens = batch.qkv(rows), torch.tensor([*lengths, 0, 0], dtype=torch.int32, device=device)
    scratch = torch.full((scratch_elements(slots, shape.heads, shape.dim),), torch.nan, device=device)
    out = torch.full((rows, shape.heads * shape.dim), torch.nan, dtype=shape.dtype, device=device)
    paged_decode(
        qkv, batch.pages, batch.table[owners[firsts]], lens, torch.from_numpy(work).to(device),
        torch.from_numpy(joins).to(device), spec, scratch, out,
        requests=torch.from_numpy(np.stack((firsts, counts), 1).astype(np.int32)).to(device), queries=queries,
    )  # fmt: skip
    table = batch.table[[*owners, 0, 0]]
    wanted = decode_oracle.paged_decode(qkv, batch.pages, table, lens, spec)
    torch.testing.assert_close(out.double(), wanted, atol=shape.tolerance, rtol=shape.tolerance)
    assert not out[-2:].any(), "rows that stand for none leave zeros"


CASES = {
    "32 x 1k": [1024] * 32,
    "8 x 8k": [8192] * 8,
    "31 x 1k + 64k": [1024] * 31 + [65536],
    "63 x 2k + 128k": [2048] * 63 + [131072],
    "255 x 1k + 64k": [1024] * 255 + [65536],
}


@pytest.mark.parametrize("name", CASES)
def test_no_processor_runs_on_when_the_others_have_ended(name: str, device: torch.device) -> None:
    """A GPU of 132 processors that hold RESIDENT programs each, 8 KV heads, tiles of 64 tokens; the list in its order,
    each entry taken by who is free first."""
    del device  # skips where there is no triton
    from kvmesh.engine.kernels.decode import BEGIN, END, RESIDENT, longest_share, most_shares, shares_of, tiles_of

    lengths = np.array(CASES[name])
    _, tiles = tiles_of(lengths, 0, 64)
    work, _ = shares_of(lengths, 0, 64, longest_share(tiles, 8, 132))
    assert len(work) <= most_shares(len(lengths), 8, 132)
    programs = np.repeat(work[:, END] - work[:, BEGIN], 8)
    free_at = [0] * min(132 * RESIDENT, len(programs))
    for size in programs.tolist():
        heapq.heapreplace(free_at, free_at[0] + size)
    assert max(free_at) <= 1.3 * programs.sum() / len(free_at)


@given(
    lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=40),
    window=st.sampled_from([0, 1, 16, 100, 4096]),
    chunked=st.booleans(),
    kv_heads=st.sampled_from([1, 2, 8]),
    processors=st.integers(1, 132),
)
def test_shares_cover_what_each_row_sees_once(
    lengths: list[int], window: int, chunked: bool, kv_heads: int, processors: int
) -> None:
    pytest.importorskip("triton", reason="triton is not installed: pip install 'triton>=3.6,<3.7' (Linux only)")
    from kvmesh.engine.kernels.decode import longest_share, most_shares, shares_of, tiles_of

    tile, array = 16, np.array(lengths)
    window, chunk = (0, window) if chunked else (window, 0)
    longest = longest_share(tiles_of(array, window, tile, chunk)[1], kv_heads, processors)
    work, joins = shares_of(array, window, tile, longest, chunk)
    assert len(work) <= most_shares(len(lengths), kv_heads, processors)
    sizes = work[:, 2] - work[:, 1]
    assert ((sizes > 0) & (sizes <= longest)).all()
    assert (np.diff(sizes) <= 0).all(), "the longest first"
    used = set()
    for row, length in enumerate(lengths):
        first = max(0, length - window) if window else 0
        if chunk:
            first = max(0, length - 1) // chunk * chunk
        mine = sorted(work[work[:, 0] == row].tolist(), key=lambda entry: entry[1])
        seen = [at for _, begin, end, _ in mine for at in range(begin, end)]
        assert seen == list(range(first // tile, -(-length // tile)))
        slot, count = joins[row].tolist()
        assert count == len(mine)
        assert [entry[3] for entry in mine] == ([-1] if count == 1 else list(range(slot, slot + count)))
        used.update(range(slot, slot + count))
    assert used == set(range(len(work)))

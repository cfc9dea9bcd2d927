from __future__ import annotations

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


def attended(
    batch: Paged, lengths: tuple[int, ...], spec: AttentionSpec, programs: int, sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """What the kernel says, and the oracle. The list ends with two entries that are none, as a replayed one's may."""
    from kvmesh.engine.kernels.decode import paged_decode, scratch_elements, shares_of
    from kvmesh.engine.kernels.tiles import tiles_for

    rows, shape = len(lengths), batch.shape
    device = batch.pages.device
    qkv, lens = batch.qkv(rows), torch.tensor(lengths, dtype=torch.int32, device=device)
    tile = tiles_for(shape.dim, shape.dtype.itemsize, shape.block).keys
    shares, joins = shares_of(np.array(lengths), spec.window, tile, programs)
    work = torch.from_numpy(np.concatenate((shares, np.zeros((2, 4), np.int32)))).to(device)
    scratch = torch.full((scratch_elements(programs + rows, shape.heads, shape.dim),), torch.nan, device=device)
    out = torch.full((rows, shape.heads * shape.dim), torch.nan, dtype=shape.dtype, device=device)
    ends = torch.from_numpy(joins).to(device)
    paged_decode(qkv, batch.pages, batch.table, lens, work, ends, spec, scratch, out, sinks)
    return out.double(), decode_oracle.paged_decode(qkv, batch.pages, batch.table, lens, spec, sinks)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("programs", [pytest.param(1, marks=pytest.mark.slow), 12])
def test_equals_the_oracle(name: str, programs: int, device: torch.device) -> None:
    shape = supported(SHAPES[name], device)
    got, wanted = attended(paged(shape, LENGTHS, device), LENGTHS, AttentionSpec(shape.dim**-0.5), programs)
    torch.testing.assert_close(got, wanted, atol=shape.tolerance, rtol=shape.tolerance)
    assert not got[2].any(), "a row that stands for none leaves zeros"


@pytest.mark.parametrize(
    "spec", [AttentionSpec(0.2, window=1), AttentionSpec(0.3, window=20), AttentionSpec(2.0, softcap=3.0)]
)
def test_window_and_softcap(spec: AttentionSpec, device: torch.device) -> None:
    shape = Shape(4, 2, 24, 16)
    got, wanted = attended(paged(shape, LENGTHS, device), LENGTHS, spec, 8)
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("programs", [1, 12])
def test_sinks_take_part_in_the_softmax(programs: int, device: torch.device) -> None:
    """Of rows of one share and of several; a row that stands for none still leaves zeros."""
    shape = Shape(4, 2, 24, 16)
    sinks = torch.tensor([0.0, -3.0, 2.0, 40.0], device=device)
    got, wanted = attended(paged(shape, LENGTHS, device), LENGTHS, AttentionSpec(0.3), programs, sinks)
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)
    assert not got[2].any()


CASES = {
    "32 x 1k": [1024] * 32,
    "8 x 8k": [8192] * 8,
    "31 x 1k + 64k": [1024] * 31 + [65536],
    "63 x 2k + 128k": [2048] * 63 + [131072],
    "255 x 1k + 64k": [1024] * 255 + [65536],
}


@pytest.mark.parametrize("name", CASES)
def test_the_longest_share_is_about_the_mean_of_a_processor(name: str, device: torch.device) -> None:
    """The cases of a GPU of 132 processors and 8 KV heads, tiles of 64 tokens."""
    del device  # skips where there is no triton
    from kvmesh.engine.kernels.decode import BEGIN, END, RESIDENT, shares_of

    lengths, programs = np.array(CASES[name]), -(-132 * RESIDENT // 8)
    work, _ = shares_of(lengths, 0, 64, programs)
    mean = float((-(-lengths // 64)).sum()) / programs
    assert (work[:, END] - work[:, BEGIN]).max() <= 1.3 * mean


@given(
    lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=40),
    window=st.sampled_from([0, 1, 16, 100, 4096]),
    programs=st.integers(1, 90),
)
def test_shares_cover_what_each_row_sees_once(lengths: list[int], window: int, programs: int) -> None:
    pytest.importorskip("triton", reason="triton is not installed: pip install 'triton>=3.6,<3.7' (Linux only)")
    from kvmesh.engine.kernels.decode import shares_of

    tile = 16
    work, joins = shares_of(np.array(lengths), window, tile, programs)
    assert len(work) <= programs + len(lengths)
    sizes = work[:, 2] - work[:, 1]
    assert (sizes > 0).all() and (np.diff(sizes) <= 0).all(), "no empty share; the longest first"
    used = set()
    for row, length in enumerate(lengths):
        first = max(0, length - window) if window else 0
        mine = sorted(work[work[:, 0] == row].tolist(), key=lambda entry: entry[1])
        assert [tile for _, begin, end, _ in mine for tile in range(begin, end)] == list(
            range(first // tile, -(-length // tile))
        )
        slot, count = joins[row].tolist()
        assert count == len(mine)
        assert [entry[3] for entry in mine] == ([-1] if count == 1 else list(range(slot, slot + count)))
        used.update(range(slot, slot + count))
    assert not used or max(used) < programs + len(lengths)

from __future__ import annotations

import pytest
import torch

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


def attended(batch: Paged, lengths: tuple[int, ...], spec: AttentionSpec, splits: int) -> tuple[torch.Tensor, ...]:
    """What the kernel says, and the oracle."""
    from kvmesh.engine.kernels.decode import paged_decode, scratch_elements

    rows, shape = len(lengths), batch.shape
    device = batch.pages.device
    qkv, lens = batch.qkv(rows), torch.tensor(lengths, dtype=torch.int64, device=device)
    scratch = torch.full((scratch_elements(rows, shape.heads, shape.dim, splits),), torch.nan, device=device)
    out = torch.full((rows, shape.heads * shape.dim), torch.nan, dtype=shape.dtype, device=device)
    paged_decode(qkv, batch.pages, batch.table, lens, spec, scratch, splits, out)
    return out.double(), decode_oracle.paged_decode(qkv, batch.pages, batch.table, lens, spec)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("splits", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_equals_the_oracle(name: str, splits: int, device: torch.device) -> None:
    shape = supported(SHAPES[name], device)
    got, wanted = attended(paged(shape, LENGTHS, device), LENGTHS, AttentionSpec(shape.dim**-0.5), splits)
    torch.testing.assert_close(got, wanted, atol=shape.tolerance, rtol=shape.tolerance)
    assert not got[2].any(), "a row that stands for none leaves zeros"


@pytest.mark.parametrize(
    "spec", [AttentionSpec(0.2, window=1), AttentionSpec(0.3, window=20), AttentionSpec(2.0, softcap=3.0)]
)
def test_window_and_softcap(spec: AttentionSpec, device: torch.device) -> None:
    shape = Shape(4, 2, 24, 16)
    got, wanted = attended(paged(shape, LENGTHS, device), LENGTHS, spec, 2)
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)


def test_shares_fill_a_gpu_and_no_more(device: torch.device) -> None:
    del device  # skips where there is no triton
    from kvmesh.engine.kernels.decode import MAX_SPLITS, splits_for

    assert [splits_for(rows, 8, 132) for rows in (1, 2, 8, 64, 4096)] == [64, 32, 8, 1, 1]
    assert splits_for(1, 1, 132) == MAX_SPLITS

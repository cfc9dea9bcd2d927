from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kvmesh.engine.config import AttentionSpec
from tests.support.engine import prefill_oracle
from tests.support.engine.paged import Shape, paged, supported

SHAPES = {
    "gqa1": Shape(2, 2, 16, 16),
    "gqa4 padded dim": Shape(4, 1, 96, 16),
    "gqa7 large block": Shape(7, 1, 64, 64),
    "bfloat16": Shape(4, 2, 32, 16, torch.bfloat16),
}
SPECS = (AttentionSpec(0.2, window=1), AttentionSpec(0.3, window=9), AttentionSpec(2.0, softcap=3.0))
RAGGED = ((0, 1), (0, 37), (19, 1), (32, 18), (5, 40))


def both(
    shape: Shape,
    spans: Sequence[tuple[int, int]],
    spec: AttentionSpec,
    device: torch.device,
    variant: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel says, and the oracle."""
    from kvmesh.engine.kernels.prefill import Variant, paged_prefill, usual, work_of

    batch = paged(shape, [start + length for start, length in spans], device)
    rows = sum(length for _, length in spans)
    qkv = batch.qkv(rows)
    out = torch.full((rows, shape.heads * shape.dim), torch.nan, dtype=shape.dtype, device=device)
    cut = Variant(*variant) if variant else usual(shape.dim, shape.dtype.itemsize, shape.block)
    work = torch.from_numpy(work_of(spans, cut.queries)).to(device)
    paged_prefill(qkv, batch.pages, batch.table, work, spec, out, cut)
    return out.double(), prefill_oracle.paged_prefill(qkv, batch.pages, batch.table, spans, spec)


@pytest.mark.parametrize("name", SHAPES)
def test_ragged_spans_with_and_without_a_prefix(name: str, device: torch.device) -> None:
    shape = supported(SHAPES[name], device)
    got, wanted = both(shape, RAGGED, AttentionSpec(shape.dim**-0.5), device)
    torch.testing.assert_close(got, wanted, atol=shape.tolerance, rtol=shape.tolerance)


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(0.2, window=1),
        AttentionSpec(0.3, window=9),
        AttentionSpec(2.0, softcap=3.0),
        AttentionSpec(0.3, chunk=20),  # a chunk begins within a tile
        AttentionSpec(0.3, chunk=32),  # ... and with one, so that some tiles need no mask
    ],
)
def test_window_chunk_and_softcap(spec: AttentionSpec, device: torch.device) -> None:
    shape = Shape(4, 2, 24, 16, torch.float16)
    got, wanted = both(shape, RAGGED, spec, device)
    torch.testing.assert_close(got, wanted, atol=shape.tolerance, rtol=shape.tolerance)


# Scores scaled in the exponent, tiles of several pages and of a part of one, more and fewer queries than keys.
VARIANTS = ((16, 16, 4, 2, True), (32, 32, 4, 2, False), (16, 64, 4, 3, True), (64, 32, 8, 2, True))


SEES = (
    AttentionSpec(0.25),
    AttentionSpec(0.3, window=9),
    AttentionSpec(2.0, softcap=3.0),
    AttentionSpec(0.3, chunk=32),
)


@pytest.mark.parametrize(
    ("variant", "spec"), [(cut, SEES[(i + j) % 4]) for i, cut in enumerate(VARIANTS) for j in range(2)]
)
def test_variants(variant: tuple[int, ...], spec: AttentionSpec, device: torch.device) -> None:
    """A table's last tile of several pages reaches beyond the request's pages: none of that may be read."""
    shape = Shape(2, 1, 24, 16, torch.float16)
    got, wanted = both(shape, ((0, 1), (0, 37), (19, 1), (5, 45)), spec, device, variant=variant)
    torch.testing.assert_close(got, wanted, atol=shape.tolerance, rtol=shape.tolerance)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: candidates are of a GPU's sizes")
def test_candidates_on_a_gpu(device: torch.device) -> None:
    from kvmesh.engine.kernels.prefill import CANDIDATES

    shape = Shape(8, 2, 128, 64, torch.bfloat16)
    spans = ((0, 1), (0, 700), (190, 1), (513, 300))
    for variant in CANDIDATES:
        got, wanted = both(shape, spans, AttentionSpec(128**-0.5), device, variant=variant)
        torch.testing.assert_close(got, wanted, atol=shape.tolerance, rtol=shape.tolerance)


def test_one_token_and_none(device: torch.device) -> None:
    for spans in (((0, 1),), ()):
        got, wanted = both(Shape(2, 1, 16, 16), spans, AttentionSpec(0.25), device)
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("sees", [(0, 0), (7, 0), (0, 16)])
def test_sinks_take_part_in_the_softmax(sees: tuple[int, int], device: torch.device) -> None:
    sinks = torch.tensor([0.0, 3.0], device=device)
    spec = AttentionSpec(0.25, sees[0], chunk=sees[1], sinks=sinks)
    got, wanted = both(Shape(2, 1, 16, 16), ((0, 3), (20, 5)), spec, device)
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)

"""The mask kernel against bits unpacked by numpy, and the draw after it against the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvmesh.engine.batch import SampleParams
from kvmesh.engine.sampling.noise import uniform
from tests.support.engine import oracle

VOCAB = 2 * 4096 + 77  # three chunks, the last in part; its last word has bits of no token
ROWS = 4


@pytest.fixture(scope="module")
def bits() -> np.ndarray:
    made = np.random.default_rng(3)
    bits = made.integers(-(2**31), 2**31, (ROWS, -(-VOCAB // 32)), dtype=np.int64).astype(np.int32)
    bits[1] = 0
    bits[1, 2] = np.int32(-(2**31))  # token 95 alone: the sign bit
    bits[2] = -1
    return bits


def by_hand(logits: torch.Tensor, rows: list[int], bits: np.ndarray, masks: list[int]) -> torch.Tensor:
    allowed = np.unpackbits(bits.view(np.uint8), axis=-1, count=VOCAB, bitorder="little").astype(bool)
    return torch.where(torch.from_numpy(allowed[masks]), logits[rows], -torch.inf)


@pytest.mark.parametrize(("rows", "masks"), [([0, 1, 2, 3], [0, 1, 2, 3]), ([5, 0], [2, 1]), ([4], [3])])
def test_tokens_that_a_mask_does_not_allow_are_minus_infinity(
    rows: list[int], masks: list[int], bits: np.ndarray, device: torch.device
) -> None:
    from kvmesh.engine.kernels.mask import masked

    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1))
    found = masked(*(x.to(device) for x in (logits, torch.tensor(rows), torch.from_numpy(bits), torch.tensor(masks))))
    assert torch.equal(found.cpu(), by_hand(logits, rows, bits, masks))


def test_what_is_allowed_stays_above_minus_infinity(bits: np.ndarray, device: torch.device) -> None:
    from kvmesh.engine.kernels.mask import masked

    logits = torch.full((1, VOCAB), -torch.inf, device=device)
    index = torch.zeros(1, dtype=torch.int64, device=device)
    found = masked(logits, index, torch.from_numpy(bits[1:2]).to(device), index)
    assert int(found.argmax()) == 95 and torch.isfinite(found).sum() == 1


def test_draws_after_a_mask_are_those_of_the_definition(bits: np.ndarray, device: torch.device) -> None:
    from kvmesh.engine.kernels.mask import masked
    from kvmesh.engine.kernels.sample import draw

    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    params = [SampleParams(temperature=1.0, seed=seed) for seed in range(ROWS)]
    rows = torch.arange(ROWS, device=device)
    x = masked(logits.to(device), rows, torch.from_numpy(bits).to(device), rows)
    column = torch.ones(ROWS, 1, dtype=torch.float64, device=device)
    noise = torch.tensor([uniform(p.seed, 0) for p in params], dtype=torch.float64, device=device)
    found = draw(x, rows, x.amax(-1), column, torch.zeros(ROWS, dtype=torch.float64, device=device), noise).tolist()
    every = list(range(ROWS))
    expected = by_hand(logits, every, bits, every).double().numpy()
    assert found == [oracle.token(row, p) for row, p in zip(expected, params, strict=True)]
    assert found[1] == 95

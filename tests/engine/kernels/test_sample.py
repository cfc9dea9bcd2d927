"""Draws by the kernels against the definition, row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvmesh.engine.batch import SampleParams
from kvmesh.engine.sampling.noise import uniform
from tests.support.engine import oracle

VOCAB = 2 * 2048 + 77  # three chunks, the last in part
PARAMS = [
    SampleParams(temperature=1.0, seed=1),
    SampleParams(temperature=0.01, seed=2),
    SampleParams(temperature=50.0, seed=3),
    SampleParams(temperature=1.0, seed=4, min_p=0.2),
    SampleParams(temperature=4.0, seed=5, min_p=0.01),
    SampleParams(temperature=1.0, seed=6, min_p=1.0),
]


def drawn(logits: torch.Tensor, params: list[SampleParams]) -> list[int]:
    """Of rows in an order of their own, one of the batch's left out."""
    from kvmesh.engine.kernels.sample import draw

    device = logits.device
    rows = torch.arange(len(params), device=device).flip(0)
    asked = [params[row] for row in rows.tolist()]
    temperature = torch.tensor([[p.temperature] for p in asked], dtype=torch.float64, device=device)
    noise = torch.tensor([uniform(p.seed, p.token_index) for p in asked], dtype=torch.float64, device=device)
    min_p = torch.tensor([p.min_p for p in asked], dtype=torch.float64, device=device)
    tokens = draw(logits, rows, logits.amax(-1), temperature, min_p, noise).tolist()
    return list(reversed(tokens))


@pytest.mark.parametrize("kind", ["spread", "ties", "peaks", "masked"])
def test_tokens_are_those_of_the_definition(kind: str, device: torch.device) -> None:
    made = torch.Generator().manual_seed(len(kind))
    logits = torch.randn(len(PARAMS) + 1, VOCAB, generator=made) * 3
    if kind == "ties":  # 0 and -0 among them, which are equals
        logits = logits.round()
    elif kind == "peaks":
        logits[:, ::500] += 30
    elif kind == "masked":
        logits[:, 1::2] = -torch.inf
    expected = [oracle.token(row.double().numpy(), p) for row, p in zip(logits, PARAMS, strict=False)]
    assert drawn(logits.to(device), PARAMS) == expected


def test_every_part_of_the_vocabulary_is_drawn_by_its_weight(device: torch.device) -> None:
    """All weights equal: the noise is the token's place, the first and the last among them."""
    logits = torch.zeros(4, VOCAB, device=device)
    params = [SampleParams(temperature=1.0, seed=seed) for seed in range(4)]
    places = [int(uniform(p.seed, 0) * VOCAB) for p in params]
    assert drawn(logits, params) == places
    from kvmesh.engine.kernels.sample import draw

    ends = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64, device=device)
    two = torch.arange(2, device=device)
    heat = torch.ones(2, dtype=torch.float64, device=device)
    assert draw(logits, two, logits.amax(-1), heat, torch.zeros_like(heat), ends).tolist() == [0, VOCAB - 1]


def test_a_row_that_is_not_finite_ends_too(device: torch.device) -> None:
    logits = torch.zeros(3, 300, device=device)
    logits[0, 5], logits[1, 7] = torch.nan, torch.inf
    logits[2] = -torch.inf
    params = [SampleParams(temperature=1.0, seed=seed, min_p=0.5) for seed in range(3)]
    with np.errstate(all="ignore"):
        tokens = drawn(logits, params)
    assert all(0 <= token < 300 for token in tokens)

"""Seeds and lengths of storms."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import pytest

FIXED_SEED = 20  # of `make test`; `make chaos` draws one after another


@dataclass(frozen=True)
class Chaos:
    """`seed` None: draw one for every storm. `minutes` 0: one storm."""

    seed: int | None
    minutes: float

    def next_seed(self) -> int:
        return random.SystemRandom().randrange(1_000_000) if self.seed is None else self.seed


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-minutes", type=float, default=0.0, help="Storm after storm for so long.")
    parser.addoption("--chaos-seed", type=int, default=None, help="Also KVMESH_CHAOS_SEED.")


@pytest.fixture
def chaos(request: pytest.FixtureRequest) -> Chaos:
    minutes = request.config.getoption("--chaos-minutes", 0.0)
    seed = request.config.getoption("--chaos-seed", None)
    if seed is None and os.environ.get("KVMESH_CHAOS_SEED"):
        seed = int(os.environ["KVMESH_CHAOS_SEED"])
    if seed is None and not minutes:
        seed = FIXED_SEED
    return Chaos(seed, float(minutes or 0))

"""3 masters, Redis and 5 pool nodes under kills, freezes, cuts and slow links; every operation is checked.

pytest tests/chaos                                       one storm with the seed of `make test`
KVMESH_CHAOS_SEED=7 pytest tests/chaos/test_storm.py     one storm with this seed
make chaos ARGS="--chaos-minutes 30"                     storm after storm, each with a new seed
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.chaos.conftest import Chaos
from tests.chaos.storm import storm
from tests.support.redis_server import needs_redis

STORM_S = 30.0
LONG_STORM_S = 60.0
AROUND_S = 140.0  # start, end and survey, on a crowded machine

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(0)]


@needs_redis
async def test_whatever_happens_the_store_keeps_its_word(chaos: Chaos, tmp_path: Path) -> None:
    end = time.monotonic() + 60 * chaos.minutes
    length_s = LONG_STORM_S if chaos.minutes else STORM_S
    number = 0
    while number == 0 or time.monotonic() < end:
        seed, number = chaos.next_seed(), number + 1
        print(f"storm {number}: seed {seed} (KVMESH_CHAOS_SEED={seed})")
        folder = tmp_path / str(number)
        folder.mkdir()
        async with asyncio.timeout(length_s + AROUND_S):
            wrong = await storm(seed, length_s, folder)
        assert not wrong, f"{wrong}\nlogs: {folder}"

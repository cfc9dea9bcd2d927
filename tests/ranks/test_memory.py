"""Pages of a rank's region come before they are used, and keep their bytes."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from kvmesh.ranks.worker import prefault as memory
from kvmesh.ranks.worker.prefault import PrefaultAhead
from kvmesh.transfer import EngineConfig, Region, TransferEngine
from tests.transfer.conftest import until

MIB = 1 << 20
NBYTES, AHEAD = 48 * MIB, 8 * MIB


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine("owner#1", EngineConfig(transports=("shm",))) as made:
        yield made


def there(engine: TransferEngine) -> int:
    """Bytes of its only region that the kernel has given."""
    (region,) = engine.segment.regions
    return os.fstat(region.fd).st_blocks * 512


def test_pages_come_ahead_of_their_use_and_no_further(engine: TransferEngine) -> None:
    region = engine.allocate(NBYTES)
    assert region.memory is not None
    data = random.Random(3).randbytes(3 * MIB)
    region.memory[: len(data)] = data
    ahead = PrefaultAhead(region, 2 * MIB, AHEAD)
    before = there(engine)
    for end in (3 * MIB, MIB, 9 * MIB + 5, NBYTES - 1):
        ahead.used(end)
        wanted = min((max(end, 3 * MIB) + AHEAD + 4095) // 4096 * 4096, NBYTES)
        until(lambda wanted=wanted: ahead.touched == wanted, f"{wanted} bytes are there")  # type: ignore[misc]
        assert wanted <= there(engine) <= min(wanted + 2 * MIB, NBYTES), "huge pages are of 2 MiB"
    assert before < there(engine) == NBYTES
    assert bytes(region.memory[: len(data)]) == data and not any(region.memory[len(data) :: 4096])
    ahead.close()


def test_a_kernel_that_gives_none_is_asked_once(engine: TransferEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def none(address: int, length: int) -> bool:
        asked.append(length)
        return False

    monkeypatch.setattr(memory, "populate", none)
    region: Region = engine.allocate(NBYTES)
    ahead = PrefaultAhead(region, 0, AHEAD)
    ahead.used(1)
    until(lambda: len(asked) == 1, "it was asked")
    ahead.close()
    ahead.used(NBYTES)
    assert len(asked) == 1 and ahead.touched == 0

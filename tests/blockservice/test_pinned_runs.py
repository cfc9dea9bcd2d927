"""Pins never keep a pool node from evicting what is idle, however many runs they hold."""

from __future__ import annotations

import pytest

from kvmesh.kvcache.size_classes import BYTES
from kvmesh.pool.partitions import PoolPartitions
from tests.support.nodes import keys_of

MIB = 1 << 20
FAR_NS = 1 << 62


def pool(nbytes: int) -> PoolPartitions:
    return PoolPartitions(0, nbytes, high_percent=95, low_percent=90, lease_seed=1)


def put(made: PoolPartitions, name: object, nbytes: int, pin: str = "") -> None:
    """One block, as a put does it."""
    (key,) = keys_of(name)
    partition = made.room(BYTES, nbytes, 1)
    assert partition.store.begin([key]) != [None]
    partition.store.seal(key)
    if pin == "hard":
        partition.store.pin_hard([key])
    if pin == "soft":
        partition.store.pin([key], FAR_NS, 0)
    made.settle()


def here(made: PoolPartitions, *names: object) -> int:
    return sum(partition.store.holds(key) for partition in made.all() for key in keys_of(*names))


@pytest.mark.parametrize("pin", ["hard", "soft"])
@pytest.mark.parametrize("pinned", [40, 60])
def test_pinned_runs_at_the_cold_end_are_passed_over(pinned: int, pin: str) -> None:
    """Almost half of the memory is pinned and was used longest ago; blocks of another length find room all the same,
    the watermark holds, and nothing pinned goes."""
    made = pool(128 * MIB)
    names = [("pin", i) for i in range(pinned)]
    for name in names:
        put(made, name, MIB, pin)
    for i in range(200):
        put(made, i, MIB)
        assert made.free_bytes * 100 >= 5 * made.capacity_bytes, "the watermark"
    for i in range(60):
        put(made, ("two", i), 2 * MIB)
        assert made.free_bytes * 100 >= 5 * made.capacity_bytes
        assert here(made, *names) == pinned
    assert here(made, ("two", 59)) == 1


def test_softly_pinned_runs_go_when_nothing_else_is_left() -> None:
    made = pool(64 * MIB)
    hard, soft = [("hard", i) for i in range(30)], [("soft", i) for i in range(40)]
    for name in hard:
        put(made, name, MIB, "hard")
    for name in soft:
        put(made, name, MIB, "soft")
    put(made, "two", 2 * MIB)
    assert here(made, *hard) == 30 and 28 <= here(made, *soft) <= 32, "it took the place of two or a little more"


def test_what_is_pinned_no_more_goes_in_its_turn() -> None:
    made = pool(64 * MIB)
    names = [("pin", i) for i in range(30)]
    for name in names:
        put(made, name, MIB, "hard")
    for i in range(60):
        put(made, i, MIB)
    assert here(made, *names) == 30
    for partition in made.all():
        partition.store.unpin(keys_of(*names))
    for i in range(100, 300):
        put(made, i, MIB)
    assert here(made, *names) == 0

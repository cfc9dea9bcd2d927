"""Tombstones of one moment grow old in one moment: they go in steps."""

from __future__ import annotations

from kvmesh.services.store.policy.tombstones import MAX_RETIRED, Tombstones

EACH = 1000


def made(count: int, **settings: int) -> Tombstones:
    tombstones = Tombstones(retention_s=10.0, **settings)
    tombstones.joined("n", 0)
    for i in range(count):
        tombstones.add(1, [(i * EACH + j).to_bytes(16, "big") for j in range(EACH)], b"", 0.0)
    return tombstones


def test_what_grows_old_together_goes_in_steps() -> None:
    tombstones = made(200)
    assert tombstones.retire(11.0) == [], "a member has yet to report them"
    tombstones.reported("n", tombstones.last)
    assert tombstones.retire(9.0) == []
    steps = []
    while gone := tombstones.retire(11.0):
        steps.append(len(gone) * EACH)
        assert tombstones.floor == gone[-1].seq
    assert sum(steps) == 200 * EACH and max(steps) <= MAX_RETIRED + EACH and len(steps) > 10
    assert (len(tombstones), tombstones.floor) == (0, tombstones.last)


def test_the_bound_on_keys_waits_for_no_step() -> None:
    tombstones = made(200, max_keys=50 * EACH)
    tombstones.reported("n", tombstones.last)
    assert len(tombstones.retire(1.0)) > 100
    assert len(tombstones) <= 50

"""The whole tier, on a real disk, against a dict: puts, gets, removals, crashes, torn tails, damage, in any order.

A crash is a copy of the folder as it is, opened in the place of the one that was in use. What was evicted is known from
the changes that the tier announces, and is the only thing that may be missing.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run

from kvmesh.tiers.ssd import SsdTier
from kvmesh.tiers.ssd.format import PAGE, record_bytes
from tests.support.ssd_blocks import BUCKET, WAIT_S, config, files, key, memory, payload, settle

SETTINGS = settings(max_examples=40, stateful_step_count=40, deadline=None)
NUMBERS = st.integers(0, 120)


def length(n: int) -> int:
    """A block's, by its number: from a byte to four pages."""
    return 1 + n * 7919 % (4 * PAGE)


class Model(RuleBasedStateMachine):
    @initialize(direct=st.sampled_from(["auto", "off"]), reinsert=st.sampled_from([0, 25]))
    def begin_life(self, direct: str, reinsert: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvmesh-ssd-"))
        self.life = 0
        self.options = {"direct": direct, "reinsert_percent": reinsert, "capacity_bytes": 5 * BUCKET}
        self.held: set[int] = set()  # stored, and neither evicted nor removed
        self.gone: set[int] = set()  # removed, and not put since
        self.numbers = {key(n): n for n in range(121)}
        self.told: set[bytes] = set()
        self.torn = 0  # blocks that may be missing at the next start
        self.damaged: set[int] = set()  # whose bytes are wrong somewhere on the disk
        self.open()

    def open(self) -> None:
        """What a start evicts, before anybody has asked, is in no change: it counts it."""
        self.tier = SsdTier(config(self.folder / str(self.life), **self.options))
        settle(self.tier)
        self.told = set(self.tier.take_changes().sealed)
        there = {self.numbers[k] for k in self.told}
        assert len(self.held - there) <= self.tier.stats().evicted + self.torn
        self.held &= there

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()
            shutil.rmtree(self.folder)

    def follow(self) -> None:
        """What the tier announces: nothing is there that was not stored; what it gave up it says."""
        settle(self.tier)
        changes = self.tier.take_changes()
        self.told = self.told - set(changes.removed) | set(changes.sealed)
        self.held -= {self.numbers[k] for k in changes.removed}
        assert self.told == set(self.tier.keys()) == {key(n) for n in self.held}

    # ── use ──────────────────────────────────────────────────────────────────────────────────────────

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=25, unique=True))
    def put(self, numbers: list[int]) -> None:
        futures = self.tier.put_many([(key(n), payload(n, length(n))) for n in numbers])
        assert all(future.result(WAIT_S) for future in futures)
        self.held.update(numbers)
        self.gone.difference_update(numbers)
        self.follow()

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=25, unique=True), aligned=st.booleans())
    def get(self, numbers: list[int], aligned: bool) -> None:
        into = [memory(length(n), aligned=aligned) for n in numbers]
        futures = self.tier.get_many_into([(key(n), view) for n, view in zip(numbers, into, strict=True)])
        for n, view, future in zip(numbers, into, futures, strict=True):
            if future.result(WAIT_S):
                assert n in self.held and bytes(view) == payload(n, length(n))
            else:
                assert n not in self.held or n in self.damaged
        self.follow()

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=5, unique=True))
    def remove(self, numbers: list[int]) -> None:
        assert self.tier.remove([key(n) for n in numbers]).result(WAIT_S)
        self.held.difference_update(numbers)
        self.gone.update(numbers)
        self.follow()

    @rule(n=NUMBERS)
    def put_and_remove_at_once(self, n: int) -> None:
        stored = self.tier.put(key(n), payload(n, length(n)))
        removed = self.tier.remove([key(n)])
        again = self.tier.put(key(n), payload(n, length(n)))
        assert removed.result(WAIT_S) and again.result(WAIT_S)
        stored.result(WAIT_S)
        self.held.add(n)
        self.gone.discard(n)
        self.follow()

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────────

    @rule()
    def restart(self) -> None:
        self.tier.close()
        self.open()
        assert self.tier.report.walked == 0
        self.follow()

    @rule()
    def crash(self) -> None:
        self.crashed()
        self.open()
        assert self.tier.report.corrupt == 0
        self.follow()

    def crashed(self) -> Path:
        old = self.folder / str(self.life)
        self.life += 1
        shutil.copytree(old, self.folder / str(self.life))
        self.tier.close()
        shutil.rmtree(old)
        return self.folder / str(self.life)

    @precondition(lambda self: self.tier._core.brain.open_bucket is not None)
    @rule(data=st.data(), zeros=st.booleans())
    def crash_that_tears_the_tail(self, data: st.DataObject, zeros: bool) -> None:
        """The end of the open bucket did not reach the disk: blocks that lay there may be missing, no others."""
        brain = self.tier._core.brain
        number = brain.open_bucket
        places = {n: place for n in self.held if (place := brain.lookup(key(n))) and place.bucket == number}
        end = max([place.offset + record_bytes(place.length) for place in places.values()], default=2 * PAGE)
        path = self.crashed() / f"bucket-{number:012}.kv"
        cut = data.draw(st.integers(PAGE, end))
        os.truncate(path, cut)
        if zeros:
            os.truncate(path, BUCKET)
        torn = {n for n, place in places.items() if place.offset + record_bytes(place.length) > cut}
        self.torn = len(torn)
        self.open()
        self.torn = 0
        # A removal, or a newer copy, may have been torn as well: what is back is whole, unless it was damaged before.
        there = {self.numbers[k] for k in self.told}
        self.gone -= there
        self.held = there
        self.follow()

    @precondition(lambda self: self.held)
    @rule(data=st.data(), crash=st.booleans())
    def damage(self, data: st.DataObject, crash: bool) -> None:
        """A bit of one payload flips, while nobody looks. Whoever reads it gets a miss, then and ever after."""
        n = data.draw(st.sampled_from(sorted(self.held)))
        place = self.tier._core.brain.lookup(key(n))
        assert place is not None
        if crash:
            self.crashed()
        else:
            self.tier.close()
        path = self.folder / str(self.life) / f"bucket-{place.bucket:012}.kv"
        i = data.draw(st.integers(0, place.length - 1))
        with path.open("r+b") as file:
            file.seek(place.offset + PAGE + i)
            file.write(bytes([payload(n, length(n))[i] ^ 1]))  # of what was put: damage done before is not undone
        self.damaged.add(n)
        self.torn = 1
        self.open()
        self.torn = 0
        into = memory(length(n))
        # After a crash an older copy may lie in a bucket that waits to be dropped: then that is served, and right.
        if self.tier.contains(key(n)) and self.tier.get_into(key(n), into).result(WAIT_S):
            assert crash and bytes(into) == payload(n, length(n))
        else:
            assert not self.tier.contains(key(n))
        self.follow()

    # ── what always holds ────────────────────────────────────────────────────────────────────────────

    @invariant()
    def nothing_removed_is_back_and_the_capacity_holds(self) -> None:
        if not hasattr(self, "tier"):
            return
        assert not self.gone & self.held
        assert not any(self.tier.contains(key(n)) for n in self.gone)
        assert sum(path.stat().st_size for path in files(self.folder / str(self.life))) <= 5 * BUCKET
        assert self.tier.stats().counts.io_errors == 0


@pytest.mark.slow
def test_model() -> None:
    run(Model, settings=SETTINGS)

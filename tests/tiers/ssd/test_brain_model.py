"""The SSD tier's brain against a disk of lists: every bucket is the list of records that were written to it, and what
can be found, what goes next and what a restart would find is worked out afresh from them. Broken brains are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run

from kvmesh.tiers.ssd.brain import HITS_KEPT, Brain, Demote, Drop, RecordPlace, Reinsert, Slot, SsdLimits
from kvmesh.tiers.ssd.format import KEY_BYTES, PAGE, FooterEntry, footer_bytes, record_bytes
from tests.support.broken_ssd_brains import BROKEN, ForgetsWhatItRemoved
from tests.support.ssd_blocks import key
from tests.tiers.ssd import test_brain as alone

SETTINGS = settings(max_examples=100, stateful_step_count=60, deadline=None)
BUCKET = 16 * PAGE
KEYS = st.integers(0, 14)
LENGTHS = st.sampled_from([1, PAGE, PAGE + 1, 3 * PAGE])


@dataclass(eq=False)
class Written:
    """One record on the disk."""

    keys: tuple[bytes, ...]
    offset: int
    length: int
    hits: int = 0
    removal: bool = False


@dataclass
class File:
    size: int = BUCKET
    closed: bool = False
    records: list[Written] = field(default_factory=list)


@dataclass
class Begun:
    """A put whose record is being written."""

    key: bytes
    ticket: int
    slot: Slot
    length: int
    wanted: bool = True  # not removed since


class Model(RuleBasedStateMachine):
    make: type[Brain] = Brain

    @initialize(
        low=st.sampled_from([60, 100]),
        reinsert=st.sampled_from([0, 25, 50]),
        hits=st.integers(1, 2),
        exact=st.booleans(),
        below=st.booleans(),
    )
    def begin_life(self, low: int, reinsert: int, hits: int, exact: bool, below: bool) -> None:
        self.limits = SsdLimits(6 * BUCKET, BUCKET, 100, low, reinsert, hits)
        self.worth = {key(n) for n in range(0, 15, 2)} if below else set()
        self.brain = self.make(self.limits, self.worth.__contains__ if below else None)
        self.offered: set[int] = set()  # buckets
        self.exact = exact  # no bucket is ever lost
        self.disk: dict[int, File] = {}
        self.live: dict[bytes, Written] = {}
        self.where: dict[bytes, int] = {}
        self.begun: list[Begun] = []
        self.going: set[int] = set()
        self.removed: set[bytes] = set()  # said on the disk, and not put since
        self.unsaid: set[bytes] = set()  # removed, and there was no room to say so
        self.told: set[bytes] = set()
        self.expected: list[bytes] | None = None  # what is to be re-inserted from the victim
        self.victim = 0
        self.evicting = False

    # ── the model ────────────────────────────────────────────────────────────────────────────────────

    def used(self) -> int:
        return sum(file.size for file in self.disk.values())

    def alive(self, number: int) -> list[Written]:
        return [r for r in self.disk[number].records if not r.removal and self.live.get(r.keys[0]) is r]

    def on_disk(self) -> set[bytes]:
        """What one finds who walks over all files, oldest first."""
        found: set[bytes] = set()
        for number in sorted(self.disk):
            for record in self.disk[number].records:
                if record.removal:
                    found.difference_update(record.keys)
                else:
                    found.update(record.keys)
        return found

    def gone(self, number: int) -> None:
        for record in self.alive(number):
            del self.live[record.keys[0]], self.where[record.keys[0]]
        del self.disk[number]
        self.going.add(number)
        if number == self.victim:
            self.expected = None

    def write(self, slot: Slot, record: Written) -> bool:
        """False: the bucket is lost."""
        if slot.bucket not in self.disk:
            return False
        records = self.disk[slot.bucket].records
        assert slot.offset == (records[-1].offset + record_bytes(records[-1].length) if records else PAGE)
        assert slot.offset + record_bytes(record.length) <= BUCKET
        records.append(record)
        return True

    # ── the shell ────────────────────────────────────────────────────────────────────────────────────

    def end_all(self) -> None:
        while self.begun:
            self.end_write()

    def room_for(self, length: int, removed: int = 0) -> bool:
        if self.brain.fits(length, removed=removed):
            return True
        self.end_all()
        self.close()
        while not self.brain.may_open():
            assert self.used() + BUCKET + BUCKET * len(self.going) > self.limits.capacity_bytes
            closed = [number for number in sorted(self.disk) if self.disk[number].closed]
            step = self.brain.force()
            if isinstance(step, Demote):
                self.check_offer(step, closed[0])
                step = self.brain.force()
            assert step == (Drop(closed[0]) if closed else None)
            if step is None:
                return False
            self.check_offered(step.bucket)
            self.gone(step.bucket)
            self.free(step.bucket)
        number = self.brain.reserve()
        assert number not in self.disk
        self.brain.opened(number)
        self.disk[number] = File()
        assert self.brain.fits(length, removed=removed)
        return True

    def free(self, number: int) -> None:
        self.brain.gone(number)
        self.going.discard(number)

    def close(self) -> None:
        closing = self.brain.close_open()
        if closing is None:
            return
        file = self.disk[closing.bucket]
        assert {e.key for e in closing.entries} == {r.keys[0] for r in self.alive(closing.bucket)}
        assert closing.removed == [k for r in file.records if r.removal for k in r.keys]
        file.size = closing.offset + footer_bytes(len(closing.entries), len(closing.removed))
        assert file.size <= BUCKET
        assert all(r.offset + record_bytes(r.length) <= closing.offset for r in file.records)
        file.closed = True
        self.brain.closed(closing.bucket, file.size)

    # ── rules ────────────────────────────────────────────────────────────────────────────────────────

    @rule(n=KEYS, length=LENGTHS)
    def begin_write(self, n: int, length: int) -> None:
        k = key(n)
        ticket = self.brain.claim(k)
        free = k not in self.live and not any(b.key == k and b.wanted for b in self.begun)
        assert (ticket is not None) == free
        if ticket is None:
            return
        if not self.room_for(length):
            self.brain.unclaim(k, ticket)
            return
        self.begun.append(Begun(k, ticket, self.brain.append(length), length))

    @precondition(lambda self: self.begun)
    @rule()
    def end_write(self) -> None:
        begun = self.begun.pop(0)
        record = Written((begun.key,), begun.slot.offset, begun.length)
        here = self.write(begun.slot, record)
        assert self.brain.commit(begun.key, begun.ticket, begun.slot, begun.length, 7) == (here and begun.wanted)
        if here and begun.wanted:
            self.live[begun.key], self.where[begun.key] = record, begun.slot.bucket
            self.removed.discard(begun.key)

    @rule(numbers=st.lists(KEYS, min_size=1, max_size=3, unique=True))
    def remove(self, numbers: list[int]) -> None:
        keys = [key(n) for n in numbers]
        self.brain.remove(keys)
        for k in keys:
            self.live.pop(k, None)
            self.where.pop(k, None)
        for begun in self.begun:
            begun.wanted = begun.wanted and begun.key not in keys
        self.unsaid.update(keys)
        self.say_removed(keys)

    def say_removed(self, keys: list[bytes]) -> None:
        self.end_all()  # what was begun before lies before it
        if self.room_for(KEY_BYTES * len(keys), len(keys)):
            slot = self.brain.append(KEY_BYTES * len(keys), removed=len(keys))
            assert self.write(slot, Written(tuple(keys), slot.offset, KEY_BYTES * len(keys), removal=True))
            assert self.brain.bury(slot, keys)
            self.removed.update(keys)
            self.unsaid.difference_update(keys)

    @rule(n=KEYS)
    def read(self, n: int) -> None:
        self.brain.hit(key(n))
        if (record := self.live.get(key(n))) is not None:
            record.hits += 1

    @rule()
    def close_bucket(self) -> None:
        self.end_all()
        self.close()

    @rule(max_bytes=st.sampled_from([1, 4 * PAGE, 1 << 20]), leave=st.booleans())
    def make_room(self, max_bytes: int, leave: bool) -> None:
        self.end_all()
        step = self.brain.next_step(max_bytes)
        oldest = next((n for n in sorted(self.disk) if self.disk[n].closed), None)
        if isinstance(step, Drop):
            file = self.disk[step.bucket]
            assert file.closed
            if step.bucket != oldest:
                assert not self.alive(step.bucket) and not any(r.removal for r in file.records)
            elif self.alive(step.bucket):
                self.check_victim(step.bucket)
                assert not [k for k in self.expected or [] if self.where.get(k) == step.bucket]
            self.check_offered(step.bucket)
            self.gone(step.bucket)
            if not leave:
                self.free(step.bucket)
        elif isinstance(step, Demote):
            assert oldest is not None
            self.check_victim(oldest)
            assert not [k for k in self.expected or [] if self.where.get(k) == oldest]
            self.check_offer(step, oldest)
        elif isinstance(step, Reinsert):
            self.check_victim(step.blocks[0][1].bucket)
            assert len(step.blocks) == 1 or sum(place.length for _, place, _ in step.blocks) <= max_bytes
            for k, place, hits in step.blocks:
                self.copy(k, place, hits)

    def check_offer(self, step: Demote, number: int) -> None:
        """Once a bucket, just what is worth it, and where it lies."""
        assert number not in self.offered
        self.offered.add(number)
        told = [(k, place.bucket, place.offset, place.length) for k, place in step.blocks]
        worthy = [r for r in self.alive(number) if r.keys[0] in self.worth]
        assert told == [(r.keys[0], number, r.offset, r.length) for r in worthy] and told
        assert all(self.brain.is_at(k, place) for k, place in step.blocks)

    def check_offered(self, number: int) -> None:
        assert number in self.offered or not [r for r in self.alive(number) if r.keys[0] in self.worth]

    def check_victim(self, number: int) -> None:
        """It is the oldest closed one, room is short, and what is hot in it is known from now on."""
        if self.expected is not None:
            assert number == self.victim
            return
        assert number == min(n for n in self.disk if self.disk[n].closed)
        assert (self.used() + BUCKET) * 100 > self.limits.capacity_bytes * min(
            self.limits.low_percent, self.limits.high_percent
        )
        budget, self.victim = BUCKET * self.limits.reinsert_percent // 100, number
        hot = [r for r in self.alive(number) if r.hits >= self.limits.reinsert_hits]
        hot.sort(key=lambda r: (-min(r.hits, 255), r.offset))
        self.expected = []
        for record in hot:
            budget -= record_bytes(record.length)
            if budget < 0:
                break
            self.expected.append(record.keys[0])

    def copy(self, k: bytes, place: RecordPlace, hits: int) -> None:
        old = self.live[k]
        assert self.expected is not None and k in self.expected and self.where[k] == place.bucket == self.victim
        assert (place.offset, place.length, hits) == (old.offset, old.length, min(old.hits, HITS_KEPT) - 1)
        if not self.room_for(place.length) or not self.brain.is_at(k, place):
            return  # forced out meanwhile
        slot = self.brain.append(place.length)
        record = Written((k,), slot.offset, place.length, hits)
        assert self.write(slot, record)
        assert self.brain.move(k, place, slot, hits)
        self.live[k], self.where[k] = record, slot.bucket

    @precondition(lambda self: self.going)
    @rule()
    def readers_leave(self) -> None:
        self.free(min(self.going))

    @precondition(lambda self: self.disk and not self.exact)
    @rule(which=st.integers(0, 5))
    def lose(self, which: int) -> None:
        number = sorted(self.disk)[which % len(self.disk)]
        removed = self.brain.removed_in(number)
        self.brain.discard(number)
        self.gone(number)
        self.free(number)
        self.end_all()
        removed = [k for k in removed if k not in self.live]  # what was put since stands for itself
        if removed:
            self.say_removed(removed)

    @rule()
    def restart(self) -> None:
        """A brain that is told what the disk holds."""
        self.end_all()
        self.close()
        brain = self.make(self.limits)
        for number in sorted(self.disk):
            entries: dict[bytes, FooterEntry] = {}
            removed: list[bytes] = []
            for record in self.disk[number].records:
                if record.removal:
                    removed += record.keys
                    for k in record.keys:
                        entries.pop(k, None)
                else:
                    entries[record.keys[0]] = FooterEntry(record.keys[0], record.offset, record.length, 7)
            brain.restore(number, self.disk[number].size, list(entries.values()), removed, 0)
        brain.check_integrity()
        assert set(brain.keys()) == self.on_disk()
        if self.exact:
            for k in self.live:
                place, was = brain.lookup(k), self.brain.lookup(k)
                assert place is not None and was is not None
                assert (place.bucket, place.offset, place.length) == (was.bucket, was.offset, was.length)

    # ── what always holds ────────────────────────────────────────────────────────────────────────────

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "brain"):
            return
        self.brain.check_integrity()
        assert set(self.brain.keys()) == set(self.live)
        for k, record in self.live.items():
            place = self.brain.lookup(k)
            assert place is not None
            assert (place.bucket, place.offset, place.length) == (self.where[k], record.offset, record.length)
        assert self.brain.used_bytes >= self.used()
        assert self.brain.live_bytes == sum(record.length for record in self.live.values())

    @invariant()
    def a_restart_would_find_it_all_and_nothing_removed(self) -> None:
        if not hasattr(self, "brain"):
            return
        found = self.on_disk()
        assert found >= set(self.live)
        assert not found & self.removed
        if self.exact:
            assert found - set(self.live) <= self.unsaid

    @invariant()
    def changes_tell_it(self) -> None:
        if not hasattr(self, "brain"):
            return
        changes = self.brain.take_changes()
        assert self.told >= set(changes.removed) and not self.told & set(changes.sealed)
        self.told = self.told - set(changes.removed) | set(changes.sealed)
        assert self.told == set(self.live)


def test_model() -> None:
    run(Model, settings=SETTINGS)


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.slow
def test_broken_brains_are_found(broken: type[Brain]) -> None:
    machine: Callable[[], Model] = type("Broken", (Model,), {"make": broken})
    search = settings(
        SETTINGS, max_examples=2000, derandomize=True, database=None, phases=[Phase.generate],
        report_multiple_bugs=False, print_blob=False,
    )  # fmt: skip
    with pytest.raises((AssertionError, KeyError)):
        run(machine, settings=search)


def test_what_chance_finds_late_is_found_by_a_single_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "Brain", ForgetsWhatItRemoved)
    with pytest.raises(AssertionError):
        alone.test_empty_buckets_go_at_once_unless_older_ones_hold_what_they_say_is_removed()

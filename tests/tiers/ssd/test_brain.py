"""The SSD tier's brain, step by step: what is re-inserted, what goes, and what a restart would find."""

from __future__ import annotations

import pytest

from kvmesh.kvcache.store_stats import Changes
from kvmesh.tiers.ssd.brain import Brain, Demote, Drop, Reinsert, SsdLimits
from kvmesh.tiers.ssd.format import KEY_BYTES, PAGE, FooterEntry, footer_bytes, record_bytes
from tests.support.ssd_blocks import key

BUCKET = 16 * PAGE  # holds six records of one page: header, 6 * 2 pages, footer of 2
LIMITS = SsdLimits(
    capacity_bytes=8 * BUCKET, bucket_bytes=BUCKET, high_percent=100, low_percent=90, reinsert_percent=50
)


def roll(brain: Brain) -> None:
    """Close the open bucket, at its full size, and open the next."""
    closing = brain.close_open()
    if closing is not None:
        brain.closed(closing.bucket, BUCKET)
    assert brain.may_open()
    brain.opened(brain.reserve())


def put(brain: Brain, n: int, length: int = PAGE) -> None:
    ticket = brain.claim(key(n))
    assert ticket is not None
    if not brain.fits(length):
        roll(brain)
    assert brain.commit(key(n), ticket, brain.append(length), length, n)


def filled(buckets: int, limits: SsdLimits = LIMITS, worth: set[bytes] | None = None) -> Brain:
    """Closed buckets of six blocks each, and one more open with a single block."""
    brain = Brain(limits, None if worth is None else worth.__contains__)
    for n in range(6 * buckets + 1):
        put(brain, n)
    return brain


def held(brain: Brain) -> list[int]:
    numbers = {key(n): n for n in range(1000)}
    found: list[bytes] = brain.keys()
    return sorted(numbers[k] for k in found)


def test_a_block_is_found_where_it_was_appended() -> None:
    brain = Brain(LIMITS)
    assert brain.lookup(key(1)) is None and not brain.fits(1)
    brain.opened(brain.reserve())
    ticket = brain.claim(key(1))
    assert ticket is not None and brain.claim(key(1)) is None
    slot = brain.append(5000)
    assert (slot.bucket, slot.offset, slot.size, slot.seq) == (1, PAGE, record_bytes(5000), 1)
    assert key(1) not in brain  # not before it is written
    assert brain.commit(key(1), ticket, slot, 5000, 77)
    assert brain.lookup(key(1)) == (1, 0, PAGE, 5000, 77)
    assert brain.claim(key(1)) is None
    assert brain.append(1).offset == PAGE + record_bytes(5000)


def test_a_full_bucket_has_room_for_its_footer_and_no_more() -> None:
    brain = filled(1)
    assert brain.open_bucket == 2
    place = brain.lookup(key(5))
    assert place is not None and place.bucket == 1
    end = place.offset + record_bytes(PAGE)
    assert end + footer_bytes(6, 0) <= BUCKET < end + record_bytes(PAGE) + footer_bytes(7, 0)
    limits = SsdLimits(capacity_bytes=8 * BUCKET, bucket_bytes=BUCKET)
    brain = Brain(limits)
    brain.opened(brain.reserve())
    assert brain.fits(limits.max_length) and not brain.fits(limits.max_length + 1)
    assert brain.fits(KEY_BYTES * limits.max_removed, removed=limits.max_removed)


def test_the_oldest_bucket_goes_when_one_more_would_not_fit() -> None:
    brain = filled(6)
    assert brain.buckets == 7 and brain.next_step(1 << 20) is None  # with one more: 8, just the capacity
    for n in range(100, 106):
        put(brain, n)
    assert brain.buckets == 8
    # Down to 90%: seven buckets, so two go.
    assert brain.next_step(1 << 20) == Drop(1)
    assert not brain.may_open()  # its space is not free yet
    brain.gone(1)
    assert brain.may_open()
    assert brain.next_step(1 << 20) == Drop(2)
    brain.gone(2)
    assert brain.next_step(1 << 20) is None
    assert held(brain) == [*range(12, 37), *range(100, 106)]
    assert brain.evicted == 12
    brain.check_integrity()


def test_blocks_that_were_read_are_appended_again_before_their_bucket_goes() -> None:
    brain = filled(7)
    for _ in range(2):
        brain.hit(key(4))
    brain.hit(key(1))
    brain.hit(key(999))
    step = brain.next_step(1)  # one block at a time
    assert isinstance(step, Reinsert)
    [(k, place, hits)] = step.blocks
    assert (k, place.bucket, hits) == (key(1), 1, 0)
    assert brain.move(k, place, brain.append(PAGE), hits)
    step = brain.next_step(1)
    assert isinstance(step, Reinsert)
    [(k, place, hits)] = step.blocks
    assert (k, hits) == (key(4), 1)
    assert brain.move(k, place, brain.append(PAGE), hits)
    assert brain.next_step(1) == Drop(1)
    moved = brain.lookup(key(4))
    assert moved is not None and moved.bucket == 8
    assert held(brain) == [1, 4, *range(6, 43)]
    assert (brain.evicted, brain.reinserted) == (4, 2)
    brain.check_integrity()


def test_what_is_worth_it_is_offered_below_once_before_its_bucket_goes() -> None:
    worth = {key(1), key(3), key(4)}
    brain = filled(7, worth=worth)
    brain.hit(key(1))
    step = brain.next_step(1 << 20)
    assert isinstance(step, Reinsert)
    [(k, place, hits)] = step.blocks
    assert brain.move(k, place, brain.append(PAGE), hits), "it stays, so it is not offered"
    brain.remove([key(4)])
    step = brain.next_step(1 << 20)
    assert isinstance(step, Demote)
    assert [(k, place.bucket, place.length) for k, place in step.blocks] == [(key(3), 1, PAGE)]
    assert key(3) in brain and brain.evicted == 0, "until it goes it is found"
    assert brain.next_step(1 << 20) == Drop(1)
    assert key(3) not in brain
    worth.add(key(7))
    step = brain.force()
    assert isinstance(step, Demote) and [k for k, _ in step.blocks] == [key(7)]
    assert brain.force() == Drop(2)
    assert brain.force() == Drop(3), "nothing of it is worth it"
    brain.check_integrity()


def test_re_insertion_takes_the_hottest_that_fit_its_share() -> None:
    brain = filled(7)
    for n, hits in ((0, 1), (1, 3), (2, 1), (3, 9), (4, 2), (5, 5)):
        for _ in range(hits):
            brain.hit(key(n))
    step = brain.next_step(1 << 20)
    assert isinstance(step, Reinsert)
    # Half of 16 pages: four records of two. In order of place, with the hits left, at most two.
    assert [(k, hits) for k, _, hits in step.blocks] == [(key(1), 2), (key(3), 2), (key(4), 1), (key(5), 2)]


def test_a_block_removed_while_it_is_copied_stays_removed() -> None:
    brain = filled(7)
    brain.hit(key(1))
    brain.hit(key(2))
    step = brain.next_step(1 << 20)
    assert isinstance(step, Reinsert)
    (first, first_place, _), (second, second_place, _) = step.blocks
    slot = brain.append(PAGE)
    brain.remove([first])
    assert not brain.is_at(first, first_place)
    assert not brain.move(first, first_place, slot, 0)
    # The victim goes by force meanwhile: what is not copied yet is gone with it.
    assert brain.force() == Drop(1)
    assert not brain.is_at(second, second_place)
    assert not brain.move(second, second_place, brain.append(PAGE), 0)
    assert brain.next_step(1) is None or brain.next_step(1) != Drop(1)
    brain.check_integrity()


def test_a_block_removed_while_it_is_written_is_not_found_and_can_be_put_again() -> None:
    brain = filled(1)
    old = brain.claim(key(500))
    assert old is not None
    slot = brain.append(PAGE)
    brain.remove([key(500)])
    assert not brain.claimed(key(500), old)
    new = brain.claim(key(500))
    assert new is not None
    assert not brain.commit(key(500), old, slot, PAGE, 1)
    assert brain.claimed(key(500), new)
    assert brain.commit(key(500), new, brain.append(PAGE), PAGE, 2)
    brain.unclaim(key(500), new)
    assert key(500) in brain


def test_a_bucket_lost_takes_its_blocks_and_what_it_was_writing() -> None:
    brain = filled(2)
    ticket = brain.claim(key(900))
    assert ticket is not None
    slot = brain.append(PAGE)
    assert brain.discard(3) == Drop(3)
    assert brain.open_bucket is None and not brain.fits(1)
    assert not brain.commit(key(900), ticket, slot, PAGE, 1)
    assert brain.claim(key(900)) is not None
    assert held(brain) == list(range(12))
    assert brain.evicted == 0  # lost, not evicted
    assert brain.reserve() == 4  # a number is never given again
    brain.check_integrity()


def test_empty_buckets_go_at_once_unless_older_ones_hold_what_they_say_is_removed() -> None:
    brain = filled(3)
    brain.remove([key(n) for n in range(6, 12)])
    assert brain.next_step(1) == Drop(2)
    # Bucket 4 says so, and is emptied: it stays, as bucket 1 is older.
    removed = [key(0)]
    brain.remove(removed)
    assert brain.bury(brain.append(KEY_BYTES, removed=1), removed)
    brain.remove([key(18)])
    roll(brain)
    assert brain.next_step(1) is None
    assert brain.removed_in(4) == [key(0)]
    brain.remove([key(n) for n in range(1, 6)])
    assert brain.next_step(1) == Drop(1)
    brain.remove([key(n) for n in range(12, 18)])
    assert brain.next_step(1) == Drop(3)
    assert brain.removed_in(4) == []
    assert brain.next_step(1) == Drop(4)
    assert brain.next_step(1) is None
    brain.check_integrity()


def test_changes_are_net_and_moves_are_none() -> None:
    brain = filled(7)
    assert brain.take_changes() == Changes(tuple(key(n) for n in range(43)), ())
    assert not brain.changed
    brain.hit(key(0))
    step = brain.next_step(1)
    assert isinstance(step, Reinsert)
    k, place, hits = step.blocks[0]
    assert brain.move(k, place, brain.append(PAGE), hits)
    put(brain, 700)
    brain.remove([key(700), key(42), key(999)])
    assert brain.next_step(1) == Drop(1)
    assert brain.changed
    assert brain.take_changes() == Changes((), (key(42), *(key(n) for n in range(1, 6))))


def test_restored_buckets_stand_in_their_order() -> None:
    brain = Brain(LIMITS)
    brain.restore(3, 8 * PAGE, [FooterEntry(key(1), PAGE, 10, 1), FooterEntry(key(2), 3 * PAGE, 10, 2)], [], 20)
    brain.restore(5, 9 * PAGE, [FooterEntry(key(1), PAGE, 10, 3)], [key(2), key(7)], 30)
    assert held(brain) == [1]
    place = brain.lookup(key(1))
    assert place is not None and (place.bucket, place.checksum) == (5, 3)
    assert brain.take_changes() == Changes((key(1),), ())
    assert brain.used_bytes == 17 * PAGE
    assert brain.next_step(1) == Drop(3)  # nothing of it is alive
    assert brain.reserve() == 6
    brain.opened(6)
    assert brain.append(1).seq == 31
    brain.start_after(9, 50)
    assert brain.reserve() == 10


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"low_percent": 99}, "low_percent=99, high_percent=98"),
        ({"reinsert_percent": 51}, "reinsert_percent=51"),
        ({"reinsert_hits": 0}, "reinsert_hits=0"),
        ({"bucket_bytes": 16 * PAGE + 1}, "bucket_bytes=65537"),
        ({"bucket_bytes": 15 * PAGE}, "bucket_bytes=61440"),
        ({"capacity_bytes": 3 * BUCKET}, "capacity_bytes=196608"),
    ],
)
def test_limits_that_cannot_hold(changed: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SsdLimits(**{"capacity_bytes": 8 * BUCKET, "bucket_bytes": BUCKET, **changed})

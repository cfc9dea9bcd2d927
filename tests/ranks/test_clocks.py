"""Times in messages to and from ranks on another host."""

from __future__ import annotations

from typing import get_args

from kvmesh.ranks import protocol as m
from kvmesh.ranks.clocks import KEPT, MOMENTS, ClockOffset, shifted

DURATIONS = {"busy_ns"}


def test_every_time_in_a_message_is_a_moment_or_a_duration() -> None:
    """A new one that is neither would be read by another machine's clock."""
    kinds = get_args(m.ToRank) + get_args(m.ToFront)
    named = {name for kind in kinds for name in kind.__struct_fields__ if name.endswith("_ns")}
    assert named == MOMENTS | DURATIONS


def test_moments_are_shifted_and_nothing_else() -> None:
    done = m.PushDone(7, 3, first_post_ns=100, last_ack_ns=0, bytes_done=5, busy_ns=40)
    there = shifted(done, 1000)
    assert (there.first_post_ns, there.last_ack_ns, there.busy_ns, there.bytes_done) == (1100, 0, 40, 5)
    assert shifted(there, -1000) == done
    ping = m.Ping(4)
    assert shifted(ping, 1000) is ping


def test_an_offset_errs_to_the_safe_side() -> None:
    """The other clock is 1,000 ahead, and messages travel for 5 to 50: a deadline is early there, an event is late
    here."""
    clock = ClockOffset()
    assert clock.ns == 0
    for at, way in ((0, 50), (100, 5), (200, 30)):
        clock.heard(at + 1000, at + way)
    assert clock.ns == 995
    assert shifted(m.PushLease(1, 2000), clock.ns).lease_until_ns <= 2000 + 1000
    event = shifted(m.LoadCopied(1, 1300, 1400), -clock.ns)
    assert event.start_ns >= 300
    for at in range(KEPT):  # the other clock has been slower since
        clock.heard(at + 900, at + 5)
    assert clock.ns == 895

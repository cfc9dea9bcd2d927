"""Tiers, the choice of a rail, trips, rests, probes and what is measured."""

from __future__ import annotations

import pytest

from kvmesh.transfer.config import EngineConfig
from kvmesh.transfer.rails import STALE_S, STALL_S, UNKNOWN_FRAMES, RailBoard, RailState, tiers
from kvmesh.transfer.transports.base import FrameLimits, Rail
from tests.support.transfer.fakes import FakeTransport

MIB = 1 << 20
LIMITS = FrameLimits(MIB, 2 * MIB, 512, 8)


def transport(*pairs: tuple[str, str], name: str = "rdma") -> FakeTransport:
    return FakeTransport(name, LIMITS, pairs or (("", ""),))


def rails(t: FakeTransport) -> tuple[Rail, ...]:
    return tuple(Rail(t, near, far) for near, far in t.pairs)


def board(**options: object) -> RailBoard:
    return RailBoard(EngineConfig(**options))  # type: ignore[arg-type]


def two(made: RailBoard) -> tuple[RailState, RailState]:
    a, b = (made.way(rail) for rail in rails(transport(("a", "x"), ("b", "y"))))
    return a, b


def carry(made: RailBoard, way: RailState, nbytes: int, at: float, took: float) -> None:
    made.posted(way, nbytes, at)
    made.answered(way, nbytes, at + took)
    made.landed(way, nbytes, at, at + took)


def fail(made: RailBoard, way: RailState, at: float, *, down: bool = False) -> bool:
    made.posted(way, MIB, at)
    made.answered(way, MIB, at + 0.001)
    return made.lost(way, at, "broken", at + 0.001, down=down)


# ── tiers ─────────────────────────────────────────────────────────────────────────────────────────


def test_tiers_are_transports_in_order_then_preferred_nics_of_both_sides() -> None:
    ib = transport(*((near, far) for near in "ab" for far in "xy"))
    tcp = transport(name="tcp")
    own = {"cpu:0": (("a",), ("b",)), "cpu:1": (("b",), ("a",))}
    peer = {"cpu:0": (("x",), ("y",))}
    found = tiers((*rails(ib), *rails(tcp)), "cpu:1", "cpu:0", own, peer)
    assert [[(r.local, r.remote) for r in tier] for tier in found] == [
        [("b", "x")],
        [("a", "x"), ("b", "y"), ("a", "y")],
        [("", "")],
    ]


def test_without_topology_all_rails_are_equal_and_neighbours_share_no_nic() -> None:
    ib = transport(*((near, far) for near in "ab" for far in "xy"))
    (tier,) = tiers(rails(ib), "cpu:0", "cuda:7")
    assert [(r.local, r.remote) for r in tier] == [("a", "x"), ("b", "y"), ("a", "y"), ("b", "x")]


def test_a_topology_that_names_other_nics_hides_no_rail() -> None:
    (tier,) = tiers(rails(transport(("eth0", "eth1"))), "cpu:0", "cpu:0", {"cpu:0": (("mlx5_0",), ())}, {})
    assert len(tier) == 1


# ── choice ────────────────────────────────────────────────────────────────────────────────────────


def test_frames_are_dealt_by_measured_bandwidth() -> None:
    """One rail is three times as fast; after a while it carries three times as much."""
    made = board()
    fast, slow = two(made)
    carry(made, fast, 64 * MIB, 0.0, 64 * MIB / 3e9)
    carry(made, slow, 64 * MIB, 0.0, 64 * MIB / 1e9)
    taken = {fast: 0, slow: 0}
    for _ in range(40):
        fast.progress_at = slow.progress_at = 1.0
        choice = made.choose(((fast, slow),), MIB, 1.0)
        assert choice is not None
        made.posted(choice.way, MIB, 1.0)
        taken[choice.way] += 1
        if choice.way.full:
            break
    assert taken[fast] == 8
    assert 1 <= taken[slow] <= 3


def test_rails_of_one_nic_share_its_load() -> None:
    """Frames of another peer over the same NIC count."""
    made = board()
    a, b = two(made)
    t = a.rail.transport
    other = made.way(Rail(t, "a", "z"))
    made.posted(other, 64 * MIB, 0.0)
    choice = made.choose(((a, b),), MIB, 0.0)
    assert choice is not None
    assert choice.way is b


def test_a_rail_of_which_nothing_is_known_gets_little_at_a_time() -> None:
    made = board()
    a, b = two(made)
    carry(made, a, 64 * MIB, 0.0, 1.0)
    for _ in range(UNKNOWN_FRAMES):
        choice = made.choose(((a, b),), MIB, 1.0)
        assert choice is not None
        assert choice.way is b
        made.posted(b, MIB, 1.0)
    choice = made.choose(((a, b),), MIB, 1.0)
    assert choice is not None
    assert choice.way is a


def test_waiting_for_a_full_fast_rail_ends_when_it_stays_silent() -> None:
    made = board()
    fast, slow = two(made)
    carry(made, fast, 64 * MIB, 0.0, 64 * MIB / 10e9)
    carry(made, slow, 64 * MIB, 0.0, 64 * MIB / 0.1e9)
    for _ in range(8):
        made.posted(fast, MIB, 1.0)
    choice = made.choose(((fast, slow),), MIB, 1.0)
    assert choice is not None
    assert (choice.way, choice.open) == (fast, False)
    assert 1.0 < choice.again_at < 1.1
    later = made.choose(((fast, slow),), MIB, choice.again_at + 0.001)
    assert later is not None
    assert (later.way, later.open) == (slow, True)


def test_an_unused_rail_is_believed_in_again() -> None:
    made = board()
    a, b = two(made)
    carry(made, a, 64 * MIB, 0.0, 64 * MIB / 1e9)
    carry(made, b, 64 * MIB, 0.0, 64 * MIB / 0.3e9)
    made.posted(a, 1, 100.0)
    assert made.expected_s(b, 3 * MIB, 100.0) < 3 * MIB / 0.3e9 / 2**8
    fresh = board()
    c, _ = two(fresh)
    carry(fresh, c, 64 * MIB, 0.0, 64 * MIB / 0.3e9)
    assert fresh.expected_s(c, 3 * MIB, STALE_S / 2) == pytest.approx(3 * MIB / 0.3e9, rel=0.01)


def test_a_lost_slice_prefers_another_rail_but_takes_the_same_before_none() -> None:
    made = board()
    a, b = two(made)
    for avoid, expected in ((a, b), (b, a)):
        choice = made.choose(((a, b),), MIB, 0.0, avoid.rail)
        assert choice is not None
        assert choice.way is expected
    choice = made.choose(((a,),), MIB, 0.0, a.rail)
    assert choice is not None
    assert choice.way is a


# ── trips and rests ───────────────────────────────────────────────────────────────────────────────


def test_three_losses_in_ten_seconds_trip_a_rail_and_fewer_do_not() -> None:
    made = board()
    a, b = two(made)
    assert [fail(made, a, t) for t in (0.0, 6.0, 12.0)] == [False, False, False]  # too far apart
    assert fail(made, a, 13.0)
    choice = made.choose(((a, b),), MIB, 13.1)
    assert choice is not None
    assert choice.way is b
    assert a.rest_until == pytest.approx(13.001 + 0.25)


def test_frames_lost_together_are_one_loss() -> None:
    made = board()
    a, _ = two(made)
    for _ in range(8):
        made.posted(a, MIB, 1.0)
    for _ in range(8):
        made.answered(a, MIB, 2.0)
        assert not made.lost(a, 1.0, "broken", 2.0, down=False)
    assert len(a.losses) == 1


def test_a_probe_is_one_small_frame_and_each_failure_doubles_the_rest_to_the_cap() -> None:
    made = board(rest_s=1.0, rest_cap_s=5.0)
    a, b = two(made)
    now, pauses = 0.0, []
    assert fail(made, a, now, down=True)
    for _ in range(5):
        pauses.append(a.pause)
        now = a.rest_until
        assert made.choose(((a, b),), MIB, now - 0.01) != made.choose(((a, b),), MIB, now)
        probe = made.choose(((a, b),), MIB, now)
        assert probe is not None
        assert probe.way is a
        made.posted(a, 4096, now)
        second = made.choose(((a, b),), MIB, now)
        assert second is not None
        assert second.way is b  # one at a time
        made.answered(a, 4096, now)
        assert made.lost(a, now, "still broken", now, down=False)
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]
    now = a.rest_until
    carry(made, a, 4096, now, 0.001)
    assert a.capacity == LIMITS.inflight_frames


def test_a_rail_that_fails_soon_after_it_came_back_rests_twice_as_long() -> None:
    made = board(rest_s=1.0)
    a, _ = two(made)
    fail(made, a, 0.0, down=True)
    carry(made, a, 4096, 2.0, 0.001)
    fail(made, a, 2.5, down=True)
    assert a.pause == 2.0
    carry(made, a, 4096, 10.0, 0.001)
    fail(made, a, 20.0, down=True)
    assert a.pause == 1.0


def test_the_later_tier_is_used_only_while_the_earlier_rests() -> None:
    made = board(rest_s=1.0)
    a, b = two(made)
    both = ((a,), (b,))
    for _ in range(8):
        made.posted(a, MIB, 0.0)
    full = made.choose(both, MIB, 0.0)
    assert full is not None
    assert (full.way, full.open) == (a, False)  # full is not broken
    made.answered(a, MIB, 0.1)
    made.lost(a, 0.0, "unplugged", 0.1, down=True)
    resting = made.choose(both, MIB, 0.2)
    assert resting is not None
    assert resting.way is b


def test_when_all_rest_a_tripped_rail_is_used_and_one_that_is_down_is_not() -> None:
    made = board()
    a, b = two(made)
    fail(made, a, 0.0, down=True)
    for t in (0.0, 0.01, 0.02):
        fail(made, b, t)
    choice = made.choose(((a,), (b,)), MIB, 0.03)
    assert choice is not None
    assert choice.way is b
    fail(made, b, 0.04, down=True)
    assert b.down
    assert made.choose(((a,), (b,)), MIB, 0.05) is None
    assert made.why_none(((a,), (b,))) == "rdma a→x, rdma b→y: broken"
    assert made.why_none(((a, a, a), (b,))) == "rdma a→x, rdma a→x and 2 more: broken"
    a.cause = "rdma a→x: cut"
    assert made.why_none(((a,), (b,))) == "rdma a→x: cut; rdma b→y: broken"


# ── measuring ─────────────────────────────────────────────────────────────────────────────────────


def test_bandwidth_is_that_of_busy_time() -> None:
    made = board()
    a, _ = two(made)
    for i in range(10):  # 4 frames under way at a time, one answered each millisecond, with pauses between the ten
        start = i * 10.0
        for _ in range(4):
            made.posted(a, MIB, start)
        for k in range(1, 5):
            made.answered(a, MIB, start + 0.001 * k)
            made.landed(a, MIB, start, start + 0.001 * k)
    assert a.bandwidth == pytest.approx(MIB / 0.001, rel=0.01)


def test_small_frames_say_nothing_of_bandwidth_at_first_and_little_later() -> None:
    made = board()
    a, _ = two(made)
    for i in range(100):
        carry(made, a, 4096, i * 1.0, 0.0001)
    assert a.bandwidth == 0.0
    carry(made, a, 64 * MIB, 200.0, 64 * MIB / 10e9)
    carry(made, a, 4096, 300.0, 0.0001)
    assert a.bandwidth == pytest.approx(10e9, rel=0.01)


def test_a_silent_rail_holds_no_budget_until_it_moves_again() -> None:
    made = board()
    a, _ = two(made)
    made.posted(a, 3 * MIB, 0.0)
    made.posted(a, 2 * MIB, 0.0)
    made.stalls(a.nic, STALL_S / 2)
    assert a.nic.inflight == 5 * MIB
    made.stalls(a.nic, STALL_S)
    assert a.nic.inflight == 0
    made.posted(a, MIB, STALL_S)
    assert a.nic.inflight == 0
    made.answered(a, 3 * MIB, 1.0)
    assert a.nic.inflight == 3 * MIB
    made.answered(a, 2 * MIB, 1.0)
    made.answered(a, MIB, 1.0)
    assert (a.nic.inflight, a.nic.busy) == (0, {})

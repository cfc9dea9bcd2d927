"""The machine with several ranks and several writers: every (rank, writer) pair has its window, end mark and fence."""

from __future__ import annotations

from kvmesh.errors import RequestCancelled
from kvmesh.ranks import protocol as m
from kvmesh.services.decode import events as e
from kvmesh.services.decode.events import LandingPlace, Phase
from kvmesh.services.decode.handoff import Handoff
from kvmesh.services.decode.limits import NS_PER_MS, Limits, RankShape, Shape

PAIRS = [(rank, peer) for rank in (0, 1) for peer in ("p0", "p1")]
NOW = 10 * NS_PER_MS
LANDING = (e.RankOffsets(0, "d0", (30, 40)), e.RankOffsets(1, "d1", (30, 40)))


def both(message: m.ToRank) -> list[m.TellRank]:
    return [m.TellRank(rank, message) for rank in (0, 1)]


def machine(max_tokens: int = 4) -> Handoff:
    ranks = tuple(
        RankShape(segment=f"d{r}", shard_bytes=10, page_base_offset=0, extent_base_offset=1000) for r in range(2)
    )
    shape = Shape(block_tokens=16, num_pages=8, num_extents=8, direct_landing=True, max_context_tokens=100, ranks=ranks)
    spec = e.Spec(request_id="r", prompt_tokens=20, max_tokens=max_tokens, deadline_ns=10**15)
    h = Handoff(1, spec, Limits(), shape)
    assert h.begin(NOW) == [e.AskPrefill(0, 1, spec, h.times)]
    h.step(e.BeginFill(2), NOW)
    return h


def landed(place: LandingPlace = LandingPlace.PAGES) -> Handoff:
    h = machine()
    opened = h.step(e.Land(5, place, [3, 4], tuple(PAIRS)), NOW)
    offsets = (30, 40) if place is LandingPlace.PAGES else (1030, 1040)
    assert opened == [m.TellRank(rank, m.OpenWindow(peer, 5, offsets)) for rank, peer in PAIRS]
    return h


def test_the_writer_is_told_after_the_last_window() -> None:
    h = landed()
    told = [h.step(m.FromRank(rank, m.WindowOpened(peer, 5)), NOW) for rank, peer in PAIRS]
    assert told[:3] == [[], [], []]
    assert told[3] == [e.TellLanding(0, 1, 5, 4_500, LANDING)]


def test_the_lease_told_makes_up_for_the_wait_for_a_landing() -> None:
    h = machine()
    late = NOW + 3_000 * NS_PER_MS
    h.step(e.Land(5, LandingPlace.PAGES, [3, 4], ((0, "p0"), (1, "p0"))), late)
    h.step(m.FromRank(0, m.WindowOpened("p0", 5)), late)
    assert h.step(m.FromRank(1, m.WindowOpened("p0", 5)), late) == [e.TellLanding(0, 1, 5, 7_500, LANDING)]


def filled(h: Handoff) -> list[e.Action]:
    for rank, peer in PAIRS:
        h.step(m.FromRank(rank, m.WindowOpened(peer, 5)), NOW)
    h.step(e.FirstToken(42, None, 0), NOW)
    out: list[e.Action] = []
    for rank, peer in PAIRS:
        assert not out
        out = h.step(m.FromRank(rank, m.FillEnded(peer, 5)), NOW)
    return out


def test_ready_needs_every_end_mark_and_every_fence() -> None:
    h = landed()
    assert filled(h) == [m.TellRank(rank, m.Fence(peer, 5)) for rank, peer in PAIRS]
    for rank, peer in PAIRS:
        assert h.phase is Phase.LOADING
        h.step(m.FromRank(rank, m.Fenced(peer, 5)), NOW)
    assert h.phase is Phase.READY


def test_a_copy_is_done_when_every_rank_has_copied() -> None:
    h = landed(LandingPlace.EXTENTS)
    filled(h)
    for rank, peer in PAIRS:
        h.step(m.FromRank(rank, m.Fenced(peer, 5)), NOW)
    assert h.step(e.LoadExtents([1, 2]), NOW) == both(m.CopyIn(1, (3, 4), (1, 2)))
    assert h.step(m.FromRank(0, m.Copied(1, True, 1, 2)), NOW) == []
    assert h.step(m.FromRank(0, m.Copied(1, True, 1, 2)), NOW) == []  # the same rank twice is not two ranks
    join = m.Join(1, (1, 2), 20, 42, 0, 4, 0, (), e.GREEDY)
    done = h.step(m.FromRank(1, m.Copied(1, True, 1, 2)), NOW)
    assert done == [e.KeepExtents((3, 4), 0), *both(join), e.SealFull()]


def test_pages_come_back_when_the_answer_ends_or_rank_0_lets_go() -> None:
    h = landed()
    filled(h)
    for rank, peer in PAIRS:
        h.step(m.FromRank(rank, m.Fenced(peer, 5)), NOW)
    h.step(e.Seat(), NOW)
    assert h.token(43, 1, NOW)
    assert h.step(e.Ended(e.Reason.STOP), NOW) == [e.EmitFinish(e.Reason.STOP), e.FreePages((3, 4)), e.Freed()]

    h = landed()
    filled(h)
    for rank, peer in PAIRS:
        h.step(m.FromRank(rank, m.Fenced(peer, 5)), NOW)
    h.step(e.Seat(), NOW)
    assert h.step(e.Ended(e.Reason.STOP, held=True), NOW) == [e.EmitFinish(e.Reason.STOP)]
    assert h.moving_out and h.step(e.Cancel(RequestCancelled("gone")), NOW) == []
    assert h.step(m.FromRank(0, m.Left(1)), NOW) == [e.FreePages((3, 4)), e.Freed()]

    h = landed()
    filled(h)
    for rank, peer in PAIRS:
        h.step(m.FromRank(rank, m.Fenced(peer, 5)), NOW)
    h.step(e.Seat(), NOW)
    fail, *leave = h.step(e.Cancel(RequestCancelled("gone")), NOW)
    assert isinstance(fail, e.EmitFail) and leave == both(m.Leave(1))
    assert h.step(m.FromRank(0, m.Left(1)), NOW) == [e.FreePages((3, 4)), e.Freed()]


def test_tokens_count_once_and_in_order() -> None:
    h = landed()
    filled(h)
    for rank, peer in PAIRS:
        h.step(m.FromRank(rank, m.Fenced(peer, 5)), NOW)
    h.step(e.Seat(), NOW)
    assert not h.token(9, 2, NOW)
    assert h.token(43, 1, NOW)
    assert not h.token(43, 1, NOW)
    assert h.token(44, 2, NOW)
    h.step(e.Cancel(RequestCancelled("gone")), NOW)
    assert not h.token(45, 3, NOW)


def test_a_wrong_block_count_is_an_error_not_a_guess() -> None:
    ranks = (RankShape(segment="d", shard_bytes=10, page_base_offset=0, extent_base_offset=0),)
    shape = Shape(block_tokens=16, num_pages=8, num_extents=8, direct_landing=True, max_context_tokens=9, ranks=ranks)
    h = Handoff(1, e.Spec(request_id="r", prompt_tokens=20, max_tokens=4, deadline_ns=10**15), Limits(), shape)
    h.begin(NOW)
    fail, cancel, freed = h.step(e.BeginFill(3), NOW)
    assert isinstance(fail, e.EmitFail)
    assert "3 blocks" in fail.error.message
    assert isinstance(cancel, e.TellCancel)
    assert isinstance(freed, e.Freed)

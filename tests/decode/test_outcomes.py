"""How requests end, as the conductor is told: who is to blame, and what times it had. The real machine runs."""

import pytest

from kvmesh.errors import (
    ContextTooLong,
    DeadlinePassed,
    HandoffLost,
    InternalError,
    KvmeshError,
    ModelNotFound,
    Overloaded,
    RequestCancelled,
    Unavailable,
)
from kvmesh.ranks import protocol as m
from kvmesh.rpc.pb import conductor_pb2 as pb
from kvmesh.services.decode import events as e
from kvmesh.services.decode.handoff import Handoff
from kvmesh.services.decode.limits import Limits, RankShape, Shape
from kvmesh.services.decode.observe import judge, outcome_of, refusal_of

MS = 1_000_000
RANK = RankShape(segment="s", shard_bytes=1, page_base_offset=0, extent_base_offset=0)
SHAPE = Shape(block_tokens=16, num_pages=64, num_extents=8, direct_landing=True, max_context_tokens=1000, ranks=(RANK,))
FIRST = e.FirstToken(7, None, 0)


@pytest.mark.parametrize(
    ("error", "by_writer", "expected"),
    [
        (RequestCancelled("left"), True, (pb.OUTCOME_CANCELLED, "")),
        (Overloaded("full"), True, (pb.OUTCOME_REFUSED, "")),
        (DeadlinePassed("late"), False, (pb.OUTCOME_REFUSED, "")),
        (ContextTooLong("long"), False, (pb.OUTCOME_REFUSED, "")),
        (ModelNotFound("other"), False, (pb.OUTCOME_REFUSED, "")),
        (HandoffLost("silent"), False, (pb.OUTCOME_FAILED, "p")),  # a timer here, of the writer's progress
        (Unavailable("the prefill failed"), True, (pb.OUTCOME_FAILED, "p")),
        (InternalError("a step failed"), False, (pb.OUTCOME_FAILED, "d")),
        (Unavailable("no token"), False, (pb.OUTCOME_FAILED, "d")),
    ],
)
def test_who_is_to_blame(error: KvmeshError, by_writer: bool, expected: tuple[int, str]) -> None:
    assert judge(error, by_writer=by_writer, prefill="p", own="d") == expected


def adopted(max_tokens: int = 100) -> Handoff:
    """Received at 0, its first token at 30 ms, in the batch."""
    spec = e.Spec(request_id="r", prompt_tokens=10, max_tokens=max_tokens, deadline_ns=1 << 60)
    h = Handoff(1, spec, Limits(), SHAPE)
    h.adopts = True
    h.times.received = 1
    h.begin(1)
    h.step(e.BeginFill(1), 10 * MS)
    h.step(e.Adopted(FIRST, (0,)), 30 * MS)
    h.step(e.Seat(), 35 * MS)
    return h


def told(h: Handoff, end: e.Reason | KvmeshError) -> pb.RequestOutcome:
    return outcome_of(h, end, 2, "p", "d")


def test_times_of_an_answer() -> None:
    h = adopted()
    at = 30 * MS
    for index, gap in enumerate((20, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5), start=1):  # the first one waited for its seat
        at += gap * MS
        assert h.token(9, index, at)
    h.step(e.Ended(e.Reason.STOP), at)
    found = told(h, e.Reason.STOP)
    assert (found.request_id, found.attempt, found.outcome, found.error, found.blamed) == (
        "r",
        2,
        pb.OUTCOME_DONE,
        "",
        "",
    )
    assert (found.output_tokens, found.ttft_us, found.duration_us) == (12, 30_000, at // 1000)
    assert found.tbt_us == pytest.approx((20_000 + 5_000) / 2)  # two of eleven
    assert found.mean_tbt_us == pytest.approx(70_000 / 11, abs=1)


def test_a_preempted_row_counts_the_time_it_was_out() -> None:
    h = adopted()
    assert h.token(9, 1, 40 * MS)
    h.step(e.Preempt([3]), 41 * MS)
    h.step(m.FromRank(0, m.Left(1)), 42 * MS)
    h.step(m.FromRank(0, m.Copied(1, False, 43 * MS, 44 * MS)), 44 * MS)
    h.step(e.LoadExtents([5, 6]), 500 * MS)
    h.step(m.FromRank(0, m.Copied(1, True, 501 * MS, 502 * MS)), 502 * MS)
    assert h.phase is e.Phase.RUNNING, h.phase
    assert h.token(9, 2, 540 * MS)
    assert told(h, e.Reason.STOP).tbt_us == 500_000


def test_a_failed_step_is_this_instances_fault() -> None:
    h = adopted()
    (fail, *_) = [a for a in h.step(m.FromRank(0, m.RankError((1,), "nan")), 50 * MS) if isinstance(a, e.EmitFail)]
    found = told(h, fail.error)
    assert (found.outcome, found.error, found.blamed) == (pb.OUTCOME_FAILED, "internal", "d")


@pytest.mark.parametrize(
    "event", [e.HandoffFailed(InternalError("its rank died"), drained=True), e.PeerLost("reset by peer")]
)
def test_what_the_handoff_brings_is_the_prefill_instances_fault(event: e.Event) -> None:
    spec = e.Spec(request_id="r", prompt_tokens=10, max_tokens=5, deadline_ns=1 << 60)
    h = Handoff(1, spec, Limits(), SHAPE)
    h.begin(1)
    (fail, *_) = [a for a in h.step(event, 5 * MS) if isinstance(a, e.EmitFail)]
    found = told(h, fail.error)
    assert (found.outcome, found.blamed, found.ttft_us, found.tbt_us) == (pb.OUTCOME_FAILED, "p", 0, 0)


def test_a_refusal_blames_nobody() -> None:
    found = refusal_of("r", 1, Unavailable("closed"))
    assert (found.outcome, found.error, found.blamed) == (pb.OUTCOME_REFUSED, "unavailable", "")

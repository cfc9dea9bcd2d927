"""The sender in virtual time: cancels, time-outs, end marks, statistics."""

from __future__ import annotations

from kvmesh.transfer.api import Opcode, TransferState, TransferStatus
from kvmesh.transfer.batch import AfterUnlock
from kvmesh.transfer.epochs import EndMark
from kvmesh.transfer.transports.base import FrameKind
from tests.support.transfer.fakes import World
from tests.support.transfer.virtual import HANDOFF, MIB, PREFETCH, rdma, run, states, world

# ── cancels, time-outs, end marks ─────────────────────────────────────────────────────────────────


def test_cancelled_requests_post_nothing_more_and_others_go_on() -> None:
    made = world()
    first = made.submit(*[MIB] * 8)
    second = made.submit(MIB, at=8 * MIB)
    made.cancel(first)
    assert [s.state for s in made.statuses(first)].count(TransferState.CANCELLED) == 7
    frames = run(made)
    assert sum(f.nbytes for f in frames) == 2 * MIB
    assert states(made, second) == {TransferState.COMPLETED}
    status = made.statuses(first)[0]
    assert status.state is TransferState.COMPLETED  # all of it was on its way: that is not undone
    assert status.drained


def test_a_taken_back_frame_makes_room_at_once() -> None:
    made = world()
    rdma(made).recalls = True
    first, second = made.submit(8 * MIB), made.submit(MIB)
    made.cancel(first)
    assert states(made, first) == {TransferState.CANCELLED}
    assert sum(f.nbytes for f in rdma(made).on()) == MIB
    run(made)
    assert states(made, second) == {TransferState.COMPLETED}


def test_deadlines_and_silence() -> None:
    made = world(ack_timeout_s=2.0)
    write, read = made.submit(100, timeout_s=5.0), made.submit(100, opcode=Opcode.READ, timeout_s=5.0)
    made.wait(2.1)
    assert len(rdma(made).expired) == 2
    made.wait(2.1)
    assert len(rdma(made).expired) == 4
    made.wait(1.0)
    assert made.statuses(write) == [TransferStatus(TransferState.TIMEOUT, 0, "timed out", drained=False)]
    assert states(made, read) == {TransferState.PENDING}  # until its memory is left alone
    assert [f.kind for f in rdma(made).expired[4:]] == [FrameKind.READ]
    rdma(made).lost(rdma(made).on()[1])
    assert made.statuses(read) == [TransferStatus(TransferState.TIMEOUT, 0, "timed out", drained=True)]


def notify(made: World, epoch: int, results: list[TransferStatus]) -> None:
    sender, after = made.sender, AfterUnlock()
    with sender.lock:
        notice = EndMark(next(sender.serials), epoch, b"end", results.append, made.now + 1e6)
        sender.notify(sender.links["peer#1"], notice, after)
    sender.conclude(after)


def test_end_marks_wait_for_older_writes_of_their_epoch_only() -> None:
    made = world()
    results: list[TransferStatus] = []
    made.submit(100, epoch=1)
    notify(made, 1, results)
    made.submit(100, epoch=1)
    made.submit(100, epoch=2)
    older, younger, other = rdma(made).on()
    rdma(made).done(other)
    rdma(made).done(younger)
    assert all(f.kind is not FrameKind.NOTIFY for f in rdma(made).on())
    rdma(made).done(older)
    (mark,) = rdma(made).on()
    assert mark.kind is FrameKind.NOTIFY
    rdma(made).lost(mark)
    rdma(made).done(rdma(made).on()[0])
    assert [r.state for r in results] == [TransferState.COMPLETED]


def test_closing_a_lane_fails_what_waits_anywhere() -> None:
    made = world(nic_inflight_bytes=MIB)
    made.open("peer#2")
    made.submit(64 * MIB)
    queued = made.submit(64 * MIB, peer="peer#2")
    results: list[TransferStatus] = []
    after = AfterUnlock()
    with made.sender.lock:
        made.sender.close_link(made.sender.links["peer#2"], "closed by test", after)
    made.sender.conclude(after)
    assert made.statuses(queued)[0].cause == "closed by test"
    run(made)
    assert made.sender.stats().unfinished == 0
    assert results == []


# ── statistics ────────────────────────────────────────────────────────────────────────────────────


def test_statistics_add_up() -> None:
    made = world(("a", "x"), ("b", "y"))
    made.submit(4 * MIB, traffic_class=PREFETCH)
    made.now += 0.001
    rdma(made).lost(rdma(made).on("a")[1], "unplugged", down=True)
    rdma(made).done(rdma(made).on("a")[0])  # it had arrived before
    rdma(made).done(rdma(made).on("b")[0], (0,), "outside the window")
    stats = made.sender.stats()
    assert sum(n.in_flight_bytes for n in stats.nics) == sum(f.nbytes for f in rdma(made).on())
    assert sum(n.in_flight_frames for n in stats.nics) == len(rdma(made).on())
    run(made)
    batch = made.submit(MIB)
    frames = run(made)
    stats = made.sender.stats()
    nics = {n.nic: n for n in stats.nics}
    assert nics["a"].errors == {"down": 1}
    assert nics["b"].errors == {"refused: outside the window": 1}
    handoffs = [t for n in stats.nics for t in n.traffic if t.traffic_class is HANDOFF]
    assert sum(t.nbytes for t in handoffs) == MIB
    assert sum(t.frames for t in handoffs) == len(frames)
    assert sum(t.slices for t in handoffs) == sum(len(f.parts) for f in frames)
    assert sum(n.latency.count for n in stats.nics) == sum(t.frames for n in stats.nics for t in n.traffic)
    assert nics["b"].latency.cumulative()[-1] == nics["b"].latency.count
    assert stats.requests == {(PREFETCH, TransferState.FAILED): 1, (HANDOFF, TransferState.COMPLETED): 1}
    rails = {r.local: r for r in stats.rails}
    assert (rails["a"].resting, rails["a"].down, rails["a"].cause, rails["a"].rests) == (True, True, "unplugged", 1)
    assert rails["b"].bandwidth > 0
    assert rails["b"].class_bytes[HANDOFF] == MIB
    assert states(made, batch) == {TransferState.COMPLETED}

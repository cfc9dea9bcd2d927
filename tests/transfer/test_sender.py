"""The sender in virtual time: dealing, retries, classes, budgets, verification."""

from __future__ import annotations

import zlib
from itertools import pairwise

import pytest

from kvmesh.transfer.api import Opcode, TransferState, TransferStatus
from kvmesh.transfer.transports.base import Frame, FrameKind, FrameLimits
from tests.support.transfer.fakes import FakeTransport, World
from tests.support.transfer.virtual import BACKGROUND, HANDOFF, KIB, LIMITS, MIB, rdma, run, states, world

# ── rails ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_big_request_goes_over_every_rail_and_every_byte_once() -> None:
    made = world(("a", "x"), ("b", "y"))
    batch = made.submit(3 * MIB + 12345)
    frames = run(made)
    assert states(made, batch) == {TransferState.COMPLETED}
    assert {f.rail.local for f in frames} == {"a", "b"}
    spans = sorted((p[2], p[3]) for f in frames for p in f.parts)
    assert spans[0][0] == MIB
    assert all(a + n == b for (a, n), (b, _) in pairwise(spans))
    assert sum(n for _, n in spans) == 3 * MIB + 12345
    by_rail = [sum(f.nbytes for f in frames if f.rail.local == name) for name in "ab"]
    assert max(by_rail) < 2 * min(by_rail)


def test_a_lost_frame_goes_over_the_other_rail() -> None:
    made = world(("a", "x"), ("b", "y"))
    batch = made.submit(64 * KIB)
    (frame,) = rdma(made).posted.values()
    rdma(made).lost(frame)
    (again,) = rdma(made).posted.values()
    assert (again.rail.local, again.sendings, again.parts) == ("b", 2, frame.parts)
    run(made)
    assert states(made, batch) == {TransferState.COMPLETED}


def test_frames_on_a_rail_that_goes_down_finish_on_the_other() -> None:
    made = world(("a", "x"), ("b", "y"))
    batch = made.submit(4 * MIB)
    for frame in rdma(made).on("a"):
        rdma(made).lost(frame, "port down", down=True)
    assert rdma(made).on("a") == []
    assert rdma(made).on("b") != []
    frames = run(made)
    assert states(made, batch) == {TransferState.COMPLETED}
    assert {f.rail.local for f in frames} == {"b"}
    made.now += 1.0
    batch = made.submit(MIB)
    assert [f.nbytes for f in rdma(made).on("a")] == [made.config.probe_bytes]
    run(made)
    batch = made.submit(4 * MIB)
    assert len({f.rail.local for f in run(made)}) == 2


def test_the_next_transport_serves_while_every_rail_of_the_first_rests_and_cuts_to_its_own_measure() -> None:
    tcp = FakeTransport("tcp", FrameLimits(16 * KIB, 32 * KIB, 8, 4))
    made = world(transports=(FakeTransport("rdma", LIMITS, (("a", "x"),)), tcp))
    batch = made.submit(MIB)
    assert not tcp.posted
    for frame in rdma(made).on():
        rdma(made).lost(frame, "unplugged", down=True)
    assert tcp.posted
    frames = run(made)
    assert max(f.nbytes for f in frames) <= 32 * KIB
    assert max(p[3] for f in frames for p in f.parts) <= 16 * KIB * 5 // 4
    assert states(made, batch) == {TransferState.COMPLETED}


def test_when_every_rail_is_down_requests_fail_with_each_cause() -> None:
    made = world(("a", "x"), ("b", "y"))
    batch = made.submit(4 * MIB)
    for name, cause in (("a", "unplugged"), ("b", "burnt")):
        for frame in rdma(made).on(name):
            rdma(made).lost(frame, cause, down=True)
    (status,) = made.statuses(batch)
    assert (status.state, status.cause) == (TransferState.FAILED, "rdma a→x: unplugged; rdma b→y: burnt")
    assert status.drained
    (status,) = made.statuses(made.submit(100))
    assert status.state is TransferState.FAILED


def test_a_lane_with_one_tripped_rail_goes_on_probing_it() -> None:
    made = world(max_sendings=100)
    batch = made.submit(MIB)
    for _ in range(20):
        made.now += 0.01
        rdma(made).lost(rdma(made).on()[0])
    run(made)
    assert states(made, batch) == {TransferState.COMPLETED}


@pytest.mark.parametrize("opcode", Opcode)
def test_a_loss_that_is_not_settled_fails_undrained(opcode: Opcode) -> None:
    made = world()
    batch = made.submit(KIB, opcode=opcode)
    rdma(made).lost(rdma(made).on()[0], "who knows", settled=False)
    (status,) = made.statuses(batch)
    assert status == TransferStatus(TransferState.FAILED, 0, "who knows", drained=False)


def test_sendings_are_bounded() -> None:
    made = world(("a", "x"), ("b", "y"), max_sendings=5)
    batch = made.submit(KIB)
    for _ in range(5):
        made.now += 100.0
        rdma(made).lost(rdma(made).on()[0])
    assert states(made, batch) == {TransferState.FAILED}
    assert not rdma(made).posted


def test_waiting_for_a_silent_rail_ends_though_nothing_is_answered() -> None:
    """The fast rail is full and says nothing: what waits for it goes over the slow one."""
    made = world(("a", "x"), ("b", "y"))
    link = made.sender.links["peer#1"]
    fast, slow = link.ways.values()
    fast.bandwidth, slow.bandwidth = 10e9, 10e6
    fast.sampled_at = slow.sampled_at = made.now
    made.submit(8 * MIB)
    assert (len(rdma(made).on("a")), len(rdma(made).on("b"))) == (4, 0)
    for _ in range(200):
        made.wait(0.01)
    assert rdma(made).on("b")


# ── classes, budgets, peers ───────────────────────────────────────────────────────────────────────


def test_a_handoff_goes_before_what_was_queued_earlier() -> None:
    made = world()
    background = made.submit(8 * MIB, traffic_class=BACKGROUND)
    handoff = made.submit(8 * MIB, traffic_class=HANDOFF)
    while states(made, handoff) != {TransferState.COMPLETED}:
        made.now += 0.001
        rdma(made).done(rdma(made).on()[0])
    (status,) = made.statuses(background)
    assert status.bytes_done <= 2 * MIB  # what was posted already, and its share
    run(made)
    assert states(made, background) == {TransferState.COMPLETED}


def test_background_is_not_starved_by_handoffs_of_other_peers() -> None:
    made = world(nic_inflight_bytes=MIB)
    made.open("peer#2")
    for _ in range(4):
        made.submit(64 * MIB, traffic_class=HANDOFF)
    background = made.submit(64 * MIB, traffic_class=BACKGROUND, peer="peer#2")
    for _ in range(400):
        made.now += 0.001
        rdma(made).done(rdma(made).on()[0])
    (status,) = made.statuses(background)
    assert 0.02 < status.bytes_done / (400 * 256 * KIB) < 0.10  # 5% beside a NIC that is always full


def test_the_budget_of_a_nic_holds_over_all_peers_and_leaves_room_for_the_urgent() -> None:
    made = world(nic_inflight_bytes=4 * MIB)
    for i in range(2, 12):
        made.open(f"peer#{i}")
    for i in range(1, 12):
        made.submit(8 * MIB, peer=f"peer#{i}", traffic_class=BACKGROUND)
    assert sum(f.nbytes for f in rdma(made).on()) == 2 * MIB
    for i in range(1, 12):
        made.submit(8 * MIB, peer=f"peer#{i}", traffic_class=HANDOFF)
    assert sum(f.nbytes for f in rdma(made).on()) == 4 * MIB
    run(made)
    assert made.sender.board.nics["rdma", ""].inflight == 0
    assert made.sender.stats().unfinished == 0


def test_peers_take_turns_by_bytes() -> None:
    made = world(nic_inflight_bytes=MIB)
    made.open("peer#2")
    many = made.submit(*[64 * MIB] * 8)
    one = made.submit(16 * MIB, peer="peer#2")
    while states(made, one) != {TransferState.COMPLETED}:
        made.now += 0.001
        rdma(made).done(rdma(made).on()[0])
    sent = sum(s.bytes_done for s in made.statuses(many))
    assert 12 * MIB < sent < 20 * MIB


def test_a_flow_that_no_longer_wants_the_room_passes_it_on() -> None:
    """Many wait for the NIC, all but the last are cancelled; the one answer that makes room reaches the last."""
    made = world(nic_inflight_bytes=256 * KIB)
    for i in range(2, 6):
        made.open(f"peer#{i}")
    made.submit(256 * KIB)
    given_up = [made.submit(MIB, peer=f"peer#{i}") for i in range(2, 5)]
    last = made.submit(256 * KIB, peer="peer#5")
    for batch in given_up:
        made.cancel(batch)
    rdma(made).done(rdma(made).on()[0])
    run(made)
    assert states(made, last) == {TransferState.COMPLETED}


def test_frozen_peers_do_not_hold_the_budget_of_others() -> None:
    made = world(nic_inflight_bytes=MIB)
    made.open("frozen#1")
    made.submit(64 * MIB, peer="frozen#1")
    batch = made.submit(4 * MIB)
    assert rdma(made).on(segment="peer#1") == []
    made.wait(0.06)
    for _ in range(100):
        for frame in rdma(made).on(segment="peer#1"):
            made.now += 0.001
            rdma(made).done(frame)
    assert states(made, batch) == {TransferState.COMPLETED}


# ── verification ──────────────────────────────────────────────────────────────────────────────────


def answer_checksum(made: World, frame: Frame, *, wrong: tuple[int, ...] = ()) -> None:
    memory = made.memory
    sums = [zlib.crc32(memory[p[1] - made.address : p[1] - made.address + p[3]]) for p in frame.parts]
    frame.sums = tuple(s ^ (i in wrong) for i, s in enumerate(sums))
    rdma(made).done(frame)


@pytest.mark.parametrize("opcode", Opcode)
def test_verified_requests_complete_only_with_equal_sums(opcode: Opcode) -> None:
    made = world()
    made.memory[:] = bytes(range(256)) * 256
    batch = made.submit(1000, 2000, opcode=opcode, verify=True)
    (frame,) = rdma(made).on()
    rdma(made).done(frame)
    assert states(made, batch) == {TransferState.PENDING}
    assert [s.bytes_done for s in made.statuses(batch)] == [0, 0]
    (check,) = rdma(made).on()
    assert (check.kind, check.parts) == (FrameKind.CHECKSUM, frame.parts)
    answer_checksum(made, check, wrong=(1,))
    first, second = made.statuses(batch)
    assert (first.state, first.bytes_done) == (TransferState.COMPLETED, 1000)
    assert (second.state, second.bytes_done) == (TransferState.PENDING, 0)
    (again,) = rdma(made).on()
    assert (again.kind, again.parts) == (frame.kind, frame.parts[1:])
    rdma(made).done(again)
    answer_checksum(made, rdma(made).on()[0])
    assert states(made, batch) == {TransferState.COMPLETED}


def test_a_rail_that_corrupts_is_left_and_trips() -> None:
    made = world(("a", "x"), ("b", "y"), rest_s=1000.0)
    for _ in range(3):
        made.now += 0.1
        batch = made.submit(1000, verify=True)
        while rdma(made).posted:
            frame = rdma(made).on()[0]
            if frame.kind is FrameKind.CHECKSUM:
                assert frame.avoid is not None
                answer_checksum(made, frame, wrong=(0,) if frame.avoid.local == "a" else ())
            else:
                made.now += 0.1
                rdma(made).done(frame)
        assert states(made, batch) == {TransferState.COMPLETED}
    way = next(w for w in made.sender.links["peer#1"].ways.values() if w.rail.local == "a")
    assert way.cause == "checksum"
    assert made.sender.stats().nics[0].errors["checksum"] == 3


@pytest.mark.parametrize("sums", [None, ()])
def test_what_goes_on_differing_fails(sums: tuple[int, ...] | None) -> None:
    made = world(verify_attempts=3)
    batch = made.submit(1000, verify=True)
    for _ in range(3):
        rdma(made).done(rdma(made).on()[0])
        check = rdma(made).on()[0]
        if sums is None:
            answer_checksum(made, check, wrong=(0,))
        else:
            rdma(made).done(check)  # a target that sends none
    assert made.statuses(batch) == [TransferStatus(TransferState.FAILED, 0, "checksum")]
    assert not rdma(made).posted


def test_a_lost_checksum_is_asked_again_and_a_cancel_waits_for_it() -> None:
    made = world()
    batch = made.submit(1000, verify=True)
    rdma(made).done(rdma(made).on()[0])
    rdma(made).lost(rdma(made).on()[0], settled=False)
    (check,) = rdma(made).on()
    assert check.kind is FrameKind.CHECKSUM
    made.cancel(batch)
    assert made.sender.in_use(made.region)
    answer_checksum(made, check)
    assert states(made, batch) == {TransferState.COMPLETED}
    batch = made.submit(1000, verify=True)
    made.cancel(batch)
    rdma(made).done(rdma(made).on()[0])
    assert states(made, batch) == {TransferState.CANCELLED}

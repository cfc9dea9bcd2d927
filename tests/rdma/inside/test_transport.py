"""The rdma transport between engines, over Soft-RoCE: rxa0 and rxa1 are one host's NICs, rxb0 and rxb1 the other's."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import subprocess
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvmesh.errors import TransferError
from kvmesh.transfer import (
    EngineConfig,
    Notification,
    Opcode,
    Range,
    Region,
    TransferEngine,
    TransferRequest,
    TransferState,
)
from kvmesh.transfer.transports.rdma.transport import RdmaTransport
from tests.support.transfer.peer import Actor, Peer, pattern
from tests.transfer.conftest import Nest, nest, until

__all__ = ["nest"]

GUEST = {"timeout_s": 400, "memory_mb": 3072}
MIB = 1 << 20
LOSS = "tc qdisc replace dev"  # ... nica0 root netem loss 100%: packets vanish, and nobody says so
COMPLETED, FAILED = TransferState.COMPLETED, TransferState.FAILED


def config(side: str, **options: Any) -> EngineConfig:
    return EngineConfig(transports=("rdma",), nics=(f"rx{side}0", f"rx{side}1"), **options)


def ip(command: str) -> None:
    subprocess.run(command, shell=True, check=True)


def transport(actor: Actor) -> RdmaTransport:
    (found,) = actor.engine._transports
    assert isinstance(found, RdmaTransport)
    return found


def rails_used(actor: Actor, batch: Any) -> set[str]:
    return {name for name, nbytes in actor.engine.carried(batch).rails if nbytes}


class Two:
    """A writer and a target in this process, each with a region of `nbytes`."""

    def __init__(self, nest: Nest, nbytes: int, **options: Any) -> None:
        self.writer = nest.actor("writer#1", config("a", **options))
        self.target = nest.actor("target#1", config("b", **options))
        self.near = self.writer.allocate(nbytes, seed=1)
        self.far = self.target.allocate(nbytes)
        self.nbytes = nbytes
        self.segment = self.writer.open(self.target.descriptor())

    def window(self, epoch: int = 1) -> None:
        self.target.window("writer#1", epoch, [(self.far, self.nbytes)])

    def write(self, offset: int, nbytes: int, epoch: int = 1) -> None:
        (status,) = self.writer.transfer("write", self.segment, [(offset, self.far + offset, nbytes)], epoch)
        assert status.state is COMPLETED, status

    def same(self, offset: int = 0, nbytes: int = 0) -> bool:
        nbytes = nbytes or self.nbytes
        return self.writer.read(offset, nbytes) == self.target.read(offset, nbytes)


@pytest.fixture
def two(nest: Nest) -> Two:
    return Two(nest, 8 * MIB)


@pytest.fixture
def links() -> Iterator[None]:
    """Puts back what a test takes down."""
    yield
    for k in (0, 1):
        for side in "ab":
            subprocess.run(f"tc qdisc del dev nic{side}{k} root", shell=True, stderr=subprocess.DEVNULL)
            ip(f"ip link set nic{side}{k} up")
            if f"rx{side}{k}/" not in subprocess.run("rdma link", shell=True, capture_output=True, text=True).stdout:
                ip(f"rdma link add rx{side}{k} type rxe netdev nic{side}{k}")
        ip(f"ip neigh replace 10.90.{k}.2 lladdr 02:90:00:00:b0:0{k} dev nica{k}")
        ip(f"ip neigh replace 10.90.{k}.1 lladdr 02:90:00:00:a0:0{k} dev nicb{k}")
    until(lambda: all("ACTIVE" in state for state in port_states()), "ports are active")


def port_states() -> list[str]:
    names = [f"rx{side}{k}" for side in "ab" for k in (0, 1)]
    return [Path(f"/sys/class/infiniband/{name}/ports/1/state").read_text() for name in names]


# ── bytes ─────────────────────────────────────────────────────────────────────────────────────────


def test_bytes_of_every_size_at_odd_offsets(two: Two) -> None:
    two.window()
    memory = two.target.region.memory  # type: ignore[union-attr]
    assert memory is not None
    for nbytes in (1, 2, 63, 127, 128, 129, 4095, 65537, MIB + 1, 5 * MIB + 13):
        memory[: nbytes + 4200] = b"\xee" * (nbytes + 4200)
        for offset in (4093, 1, 0):
            two.write(offset, nbytes)
            assert two.same(offset, nbytes), (offset, nbytes)
            if offset == 4093:
                assert bytes(memory[:4093]) == b"\xee" * 4093
                assert bytes(memory[offset + nbytes : offset + nbytes + 64]) == b"\xee" * 64


def test_reads_of_every_size(two: Two) -> None:
    memory = two.target.region.memory  # type: ignore[union-attr]
    assert memory is not None
    for nbytes in (1, 129, 65537, 5 * MIB + 13):
        memory[:nbytes] = pattern(nbytes, nbytes)
        (status,) = two.writer.transfer("read", two.segment, [(3, two.far, nbytes)])
        assert status.state is COMPLETED
        assert two.writer.read(3, nbytes) == pattern(nbytes, nbytes)


def test_64_mib_there_and_back(nest: Nest) -> None:
    """Every byte. The guest maps each page that a process touches by a mapping of its host's, which has a limit: what
    was looked at is unmapped again, which shared memory survives."""
    nbytes, step = 64 * MIB - 9, 8 * MIB
    shared = [replace(config(side), transports=("rdma", "shm")) for side in "ab"]
    writer, target = nest.actor("writer#1", shared[0]), nest.actor("target#1", shared[1])
    near, far = writer.engine.allocate(64 * MIB, "cpu:0"), target.engine.allocate(64 * MIB, "cpu:0")

    def pieces(region: Region, offset: int) -> Iterator[memoryview]:
        assert region.memory is not None
        for at in range(0, nbytes, step):
            with memoryview(region.memory)[offset + at : offset + min(at + step, nbytes)] as piece:
                yield piece
            start = region.address + at
            assert libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(step), mmap.MADV_DONTNEED) == 0

    def checksum(region: Region, offset: int) -> int:
        found = 0
        for piece in pieces(region, offset):
            found = zlib.crc32(piece, found)
        return found

    def move(opcode: Opcode, epoch: int, near_offset: int, far_offset: int) -> None:
        batch = writer.engine.allocate_batch(1)
        there = far.base_offset + far_offset
        request = TransferRequest(opcode, near.address + near_offset, segment, there, nbytes, epoch)
        started = time.monotonic()
        writer.engine.submit(batch, [request])
        assert writer.engine.wait_sync(batch, 28)
        assert writer.engine.status(batch, 0).state is COMPLETED
        print(f"{opcode.value}: {time.monotonic() - started:.1f} s")
        assert {name for name, _ in writer.engine.carried(batch).rails} == {"rdma rxa0→rxb0", "rdma rxa1→rxb1"}
        writer.engine.free_batch(batch)

    libc = ctypes.CDLL(None)
    numbers = np.random.default_rng(7)
    sent = 0
    for piece in pieces(near, 5):
        piece[:] = numbers.bytes(len(piece))
        sent = zlib.crc32(piece, sent)
    segment = writer.open(target.descriptor())
    target.window("writer#1", 1, [(far.base_offset, far.length)])
    move(Opcode.WRITE, 1, 5, 3)
    assert checksum(far, 3) == sent
    assert far.memory is not None and near.memory is not None
    assert bytes(far.memory[:3]) == bytes(3) and bytes(far.memory[3 + nbytes :]) == bytes(6)
    move(Opcode.READ, 0, 7, 3)  # two bytes further: what was there would be wrong
    assert checksum(near, 7) == sent
    assert bytes(near.memory[:5]) == bytes(5) and bytes(near.memory[7 + nbytes :]) == bytes(2)


def test_many_small_slices_of_many_buffers(nest: Nest) -> None:
    two = Two(nest, MIB)
    engine, target = two.writer.engine, two.target.engine
    sources = [engine.allocate(64 * 4096, "cpu:0") for _ in range(3)]
    homes = [target.allocate(64 * 4096, "cpu:0") for _ in range(3)]
    for i, source in enumerate(sources):
        source.memory[:] = pattern(i, 64 * 4096)  # type: ignore[index]
    segment = two.writer.open(two.target.descriptor())
    target.open_window("writer#1", 2, [Range(home.base_offset, home.length) for home in homes])
    order = [(i, block) for block in range(63, -1, -1) for i in range(3)]
    requests = [
        TransferRequest(
            Opcode.WRITE, sources[i].address + b * 4096, segment, homes[i].base_offset + (63 - b) * 4096, 4096, 2
        )
        for i, b in order
    ]
    batch = engine.allocate_batch(len(requests))
    engine.submit(batch, requests)
    assert {status.state for status in two.writer.finish(batch)} == {COMPLETED}
    for i, home in enumerate(homes):
        blocks = [pattern(i, 64 * 4096)[b * 4096 : (b + 1) * 4096] for b in range(63, -1, -1)]
        assert bytes(home.memory or b"") == b"".join(blocks)


def test_both_rails_carry(two: Two) -> None:
    two.window()
    batch = two.writer.start("write", two.segment, [(0, two.far, two.nbytes)], 1)
    assert two.writer.engine.wait_sync(batch, 20)
    assert rails_used(two.writer, batch) == {"rdma rxa0→rxb0", "rdma rxa1→rxb1"}
    assert two.same()


def test_concurrent_batches(two: Two) -> None:
    two.window()
    piece = two.nbytes // 64
    batches = [two.writer.start("write", two.segment, [(i * piece, two.far + i * piece, piece)], 1) for i in range(64)]
    for batch in batches:
        assert [status.state for status in two.writer.finish(batch)] == [COMPLETED]
    assert two.same()


def test_verification_compares_memories(two: Two) -> None:
    two.window()
    engine = two.writer.engine
    batch = engine.allocate_batch(1)
    near = two.writer.region.address  # type: ignore[union-attr]
    engine.submit(batch, [TransferRequest(Opcode.WRITE, near + 1, two.segment, two.far + 1, 3 * MIB, 1, verify=True)])
    assert [status.state for status in two.writer.finish(batch)] == [COMPLETED]
    assert two.same(1, 3 * MIB)


def test_nobody_polls_while_nothing_is_under_way(nest: Nest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With polling as on many CPUs; and it polls while work is under way."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    two = Two(nest, 8 * MIB, rdma_spin_s=0.01)
    polls = 0
    nics = [nic for actor in (two.writer, two.target) for nic in transport(actor).own_nics]
    for nic in nics:

        def counted(*words: Any, poll: Any = nic.calls.poll_cq) -> Any:
            nonlocal polls
            polls += 1
            return poll(*words)

        nic.calls.poll_cq = counted
        nic._patience.most_s = 60.0  # however slow this machine is
    two.window()
    batches = [two.writer.start("write", two.segment, [(0, two.far, two.nbytes)], 1) for _ in range(6)]
    assert {status.state for batch in batches for status in two.writer.finish(batch)} == {COMPLETED}
    assert any(nic._patience.window_s > 0 for nic in nics)
    until(lambda: not any(nic.busy for nic in nics), "all is done")
    threading.Event().wait(0.05)
    busy, polls = polls, 0
    threading.Event().wait(0.5)
    assert busy > 100 and polls == 0


# ── notifications ─────────────────────────────────────────────────────────────────────────────────


def test_notifications_of_every_size(two: Two) -> None:
    for epoch, nbytes in enumerate((0, 1, 4096, 4097, 32 << 10), 1):
        two.window(epoch)
        two.write(0, 4096, epoch)
        payload = pattern(nbytes, nbytes)
        assert two.writer.notify(two.segment, epoch, payload).state is COMPLETED
        assert two.target.notified[-1] == Notification("writer#1", epoch, payload)
        two.target.fence("writer#1", epoch)
        status = two.writer.notify(two.segment, epoch, payload)
        assert (status.state, status.cause) == (FAILED, "window closed")
    assert len(two.target.notified) == 5


def test_more_notifications_than_slots(two: Two) -> None:
    done = threading.Semaphore(0)
    for i in range(100):
        two.writer.engine.notify(two.segment, 0, i.to_bytes(2, "little"), lambda status: done.release())
    for _ in range(100):
        assert done.acquire(timeout=20)
    assert sorted(int.from_bytes(n.payload, "little") for n in two.target.notified) == list(range(100))


# ── windows and fences ────────────────────────────────────────────────────────────────────────────


def test_nothing_lands_outside_the_window(two: Two) -> None:
    two.target.window("writer#1", 1, [(two.far + 8192, 4096)])
    copies = [(0, two.far, 4096), (0, two.far + 8192, 4096), (0, two.far + 8192, 4097)]
    statuses = two.writer.transfer("write", two.segment, copies, 1)
    assert [s.cause for s in statuses] == ["outside the window", "", "outside the window"]
    assert two.target.read(0, 8192) == bytes(8192)
    assert two.target.read(8192 + 4096, 4096) == bytes(4096)
    assert two.same(0, 1) is False and two.target.read(8192, 4096) == two.writer.read(0, 4096)
    two.target.window("writer#1", 1, [(two.far, 4096)])  # it grows
    two.write(0, 4096)


def test_an_end_mark_makes_the_fence_free(two: Two) -> None:
    two.window()
    two.write(0, MIB)
    assert two.writer.notify(two.segment, 1, b"end").state is COMPLETED
    two.target.fence("writer#1", 1)
    two.window(2)
    two.write(0, MIB, 2)
    assert two.writer.engine.counters()["rdma.queue_pairs"] <= 2  # the first ones still
    assert "rdma.fences_that_destroyed" not in two.target.engine.counters()


def test_a_fence_asks_first(two: Two) -> None:
    two.window()
    two.write(0, MIB)
    two.target.fence("writer#1", 1)
    assert "rdma.fences_that_destroyed" not in two.target.engine.counters()
    (status,) = two.writer.transfer("write", two.segment, [(0, two.far, 4096)], 1)
    assert status.cause == "window closed"


def test_a_fence_that_destroys_leaves_other_handoffs_whole(nest: Nest) -> None:
    """Without grace every fence destroys: the writes of other epochs start again and land right."""
    two = Two(nest, 16 * MIB, fence_grace_s=1e-9)
    half = two.nbytes // 2
    two.target.window("writer#1", 1, [(two.far, half)])
    for round_ in range(4):
        epoch = 2 + round_
        two.target.window("writer#1", epoch, [(two.far + half, half)])
        kept = two.writer.start("write", two.segment, [(0, two.far, half)], 1)
        cut = two.writer.start("write", two.segment, [(half, two.far + half, half)], epoch)
        until(lambda e=epoch: two.target.engine.landed_bytes("writer#1", e) > 0, "it writes")  # type: ignore[misc]
        two.target.fence("writer#1", epoch)
        two.target.region.memory[half:] = b"\x5a" * half  # type: ignore[index,union-attr]
        assert [s.state for s in two.writer.finish(kept)] == [COMPLETED]
        assert {s.state for s in two.writer.finish(cut)} <= {FAILED, COMPLETED}
        assert two.same(0, half)
        assert two.target.read(half, half) == b"\x5a" * half
        two.target.region.memory[:half] = bytes(half)  # type: ignore[index,union-attr]
    assert two.target.engine.counters()["rdma.fences_that_destroyed"] >= 1


def test_frozen_writer(nest: Nest) -> None:
    """Its NIC goes on alone: the fence must end that, and the writer must not go on when it wakes."""
    target = nest.actor("target#1", config("b"))
    far = target.allocate(8 * MIB)
    writer = nest.peer("writer#1", config("a", max_sendings=2))
    writer.allocate(8 * MIB, 1)
    segment = writer.open(target.descriptor())
    target.window("writer#1", 3, [(far, 8 * MIB)])
    writer.flood("write", segment, [(0, far, 8 * MIB)], 3)
    until(lambda: target.engine.landed_bytes("writer#1", 3) > 8 * MIB, "the flood")
    writer.freeze()
    target.fence("writer#1", 3)
    canary = b"\xc5" * (8 * MIB)
    target.region.memory[:] = canary  # type: ignore[index,union-attr]
    threading.Event().wait(0.3)  # what its NIC still has would land now
    assert target.read(0, 8 * MIB) == canary
    writer.thaw()
    until(writer.flood_over, "the flood ends")
    assert {s.cause for s in writer.flood_result()} <= {"window closed"}
    assert target.read(0, 8 * MIB) == canary
    target.window("writer#1", 4, [(far, 8 * MIB)])
    assert [s.state for s in writer.transfer("write", segment, [(0, far, MIB)], 4)] == [COMPLETED]
    assert target.read(0, MIB) == pattern(1, 8 * MIB)[:MIB]


# ── settings ──────────────────────────────────────────────────────────────────────────────────────


def test_several_queue_pairs_a_rail(links: None, nest: Nest) -> None:
    """They share the work, are lost with their rail, and a fence destroys them all."""
    two = Two(nest, 16 * MIB, rdma_qps_per_rail=3, rdma_slice_bytes=64 << 10, fence_grace_s=1e-9)
    half = two.nbytes // 2
    two.target.window("writer#1", 1, [(two.far, half)])
    piece = half // 32
    batches = [two.writer.start("write", two.segment, [(i * piece, two.far + i * piece, piece)], 1) for i in range(32)]
    for batch in batches:
        assert [status.state for status in two.writer.finish(batch)] == [COMPLETED]
    assert two.same(0, half)
    assert 2 < two.writer.engine.counters()["rdma.queue_pairs"] <= 6  # made as there is work for them
    two.target.window("writer#1", 2, [(two.far + half, half)])
    kept = two.writer.start("write", two.segment, [(0, two.far, half)] * 3, 1)
    cut = two.writer.start("write", two.segment, [(half, two.far + half, half)] * 3, 2)
    until(lambda: two.target.engine.landed_bytes("writer#1", 2) > 0, "it writes")
    two.target.fence("writer#1", 2)
    two.target.region.memory[half:] = b"\x5a" * half  # type: ignore[index,union-attr]
    ip("ip link set nica0 down")
    assert {s.state for s in two.writer.finish(kept, 30)} == {COMPLETED}
    assert {s.state for s in two.writer.finish(cut)} <= {FAILED, COMPLETED}
    assert two.same(0, half)
    assert two.target.read(half, half) == b"\x5a" * half
    assert two.target.engine.counters()["rdma.fences_that_destroyed"] >= 1


def test_the_traffic_class_is_in_the_packets(nest: Nest) -> None:
    two = Two(nest, MIB, rdma_traffic_class=104)
    two.window()
    seen: set[int] = set()
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800)) as tap:
        tap.bind(("nicb0", 0x0800))
        tap.settimeout(5)
        two.write(0, MIB)
        while not seen:
            packet = tap.recv(65536)
            if packet[9] == 17 and packet[22:24] == (4791).to_bytes(2, "big"):  # UDP to RoCE v2's port
                seen.add(packet[1])
    assert seen == {104}


# ── faults ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "blow",
    ["ip link set nica0 down", "ip link set nicb0 down", "rdma link delete rxb0", f"{LOSS} nica0 root netem loss 100%"],
)
def test_a_rail_is_lost_in_mid_transfer(links: None, nest: Nest, blow: str) -> None:
    two = Two(nest, 24 * MIB)
    two.window()
    two.write(0, MIB)
    batch = two.writer.start("write", two.segment, [(0, two.far, two.nbytes)], 1)
    until(lambda: two.writer.engine.status(batch, 0).bytes_done > 2 * MIB, "it is under way")
    started = time.monotonic()
    ip(blow)
    statuses = two.writer.finish(batch, 30)
    print(f"{blow}: finished {time.monotonic() - started:.2f} s later")
    assert [s.state for s in statuses] == [COMPLETED]
    assert two.same()
    two.target.fence("writer#1", 1)


def test_late_packets_of_a_rail_that_was_given_up(links: None, nest: Nest) -> None:
    """They are delayed, not lost: the slices went over the other rail, the extents are in use again."""
    two = Two(nest, 8 * MIB, rdma_ack_exponent=10, rdma_retry_cnt=3)
    memory = two.target.region.memory  # type: ignore[union-attr]
    assert memory is not None
    two.window()
    two.write(0, two.nbytes)
    ip(f"{LOSS} nica0 root netem delay 600ms")
    two.write(0, two.nbytes)
    assert two.same()
    two.target.fence("writer#1", 1)
    memory[:] = b"\xc5" * two.nbytes
    threading.Event().wait(1.2)  # they come now
    assert bytes(memory) == b"\xc5" * two.nbytes


def test_nothing_is_settled_without_the_target(links: None, nest: Nest) -> None:
    """Its process is frozen and the cables are dead: nobody can say that the packets under way will not land."""
    writer = nest.actor("writer#1", config("a", connect_timeout_s=0.5, max_attempts=2))
    target = nest.peer("target#1", config("b"))
    far = target.allocate(4 * MIB)
    target.window("writer#1", 1, [(far, 4 * MIB)])
    writer.allocate(4 * MIB, 1)
    segment = writer.open(target.descriptor())
    assert [s.state for s in writer.transfer("write", segment, [(0, far, 4 * MIB)], 1)] == [COMPLETED]
    target.freeze()
    for k in (0, 1):
        ip(f"{LOSS} nica{k} root netem loss 100%")
    (status,) = writer.transfer("write", segment, [(0, far, 4 * MIB)], 1)
    assert (status.state, status.drained) == (FAILED, False)
    (status,) = writer.transfer("read", segment, [(0, far, MIB)])
    assert (status.state, status.drained) == (FAILED, True)
    target.thaw()


def test_a_lost_rail_comes_back(links: None, nest: Nest) -> None:
    two = Two(nest, 16 * MIB)
    two.window()
    two.write(0, two.nbytes)
    ip("ip link set nica0 down")
    two.write(0, two.nbytes)
    ip("ip link set nica0 up")
    ip("ip neigh replace 10.90.0.2 lladdr 02:90:00:00:b0:00 dev nica0")

    def both() -> bool:
        batch = two.writer.start("write", two.segment, [(0, two.far, two.nbytes)], 1)
        assert two.writer.engine.wait_sync(batch, 20)
        assert two.writer.engine.status(batch, 0).state is COMPLETED
        return len(rails_used(two.writer, batch)) == 2

    until(both, "both rails carry again", 30)
    assert two.same()


def test_own_device_removed(links: None, nest: Nest) -> None:
    two = Two(nest, 24 * MIB)
    two.window()
    batch = two.writer.start("write", two.segment, [(0, two.far, two.nbytes)], 1)
    until(lambda: two.writer.engine.status(batch, 0).bytes_done > 2 * MIB, "it is under way")
    ip("rdma link delete rxa0")
    assert [s.state for s in two.writer.finish(batch, 30)] == [COMPLETED]
    assert two.same()


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_removed_device_comes_back(links: None, nest: Nest, side: str) -> None:
    two = Two(nest, 8 * MIB)
    two.window()
    two.write(0, two.nbytes)
    ip(f"rdma link delete rx{side}0")
    two.write(0, two.nbytes)
    ip(f"rdma link add rx{side}0 type rxe netdev nic{side}0")

    def both() -> bool:
        batch = two.writer.start("write", two.segment, [(0, two.far, two.nbytes)], 1)
        assert two.writer.engine.wait_sync(batch, 20)
        assert two.writer.engine.status(batch, 0).state is COMPLETED
        return len(rails_used(two.writer, batch)) == 2

    until(both, "both rails carry again", 30)
    assert two.same()


def test_killed_target(nest: Nest) -> None:
    writer = nest.actor("writer#1", config("a", connect_timeout_s=1.0, max_attempts=2, rdma_slice_bytes=64 << 10))
    target = nest.peer("target#1", config("b"))
    far = target.allocate(64 * MIB)
    target.window("writer#1", 1, [(far, 64 * MIB)])
    writer.allocate(64 * MIB, 1)
    segment = writer.open(target.descriptor())
    batch = writer.start("write", segment, [(0, far, 64 * MIB)], 1)
    until(lambda: writer.engine.status(batch, 0).bytes_done > 4 * MIB, "it is under way")
    target.kill()
    (status,) = writer.finish(batch, 30)
    assert status.state is FAILED


def test_killed_writer_leaves_nothing(nest: Nest) -> None:
    target = nest.actor("target#1", config("b"))
    far = target.allocate(8 * MIB)
    writer = nest.peer("writer#1", config("a"))
    writer.allocate(8 * MIB, 1)
    segment = writer.open(target.descriptor())
    target.window("writer#1", 1, [(far, 8 * MIB)])
    writer.flood("write", segment, [(0, far, 8 * MIB)], 1)
    until(lambda: target.engine.landed_bytes("writer#1", 1) > 4 * MIB, "the flood")
    writer.kill()
    target.fence("writer#1", 1)
    target.region.memory[:] = b"\xc5" * (8 * MIB)  # type: ignore[index,union-attr]
    threading.Event().wait(0.2)
    assert target.read(0, 8 * MIB) == b"\xc5" * (8 * MIB)


def test_frozen_target_is_only_slow(nest: Nest) -> None:
    """One-sided: what is admitted lands while the target's process sleeps."""
    writer = nest.actor("writer#1", config("a"))
    target = nest.peer("target#1", config("b"))
    far = target.allocate(MIB)
    target.window("writer#1", 1, [(far, MIB)])
    writer.allocate(MIB, 1)
    segment = writer.open(target.descriptor())
    assert [s.state for s in writer.transfer("write", segment, [(0, far, 4096)] * 8, 1)] == [COMPLETED] * 8
    target.freeze()
    assert [s.state for s in writer.transfer("write", segment, [(0, far, MIB)], 1)] == [COMPLETED]
    target.thaw()
    assert target.read(0, MIB) == pattern(1, MIB)


def test_wrong_key(two: Two) -> None:
    """A stale key is refused by the NIC; the next try asks for keys again."""
    two.window()
    two.write(0, 4096)
    (path,) = transport(two.writer)._paths.values()
    with path._lock:
        for keys in path._keys.values():
            keys.rkeys.update({name: rkey + 1 for name, rkey in keys.rkeys.items()})
    two.write(0, MIB)
    assert two.same(0, MIB)
    assert two.writer.engine.counters()["frames_resent"] >= 1


def test_memory_that_is_gone_or_too_small(two: Two) -> None:
    target = two.target.engine
    region = target.allocate(4 * MIB, "cpu:0")
    segment = two.writer.open(two.target.descriptor())
    (status,) = two.writer.transfer("read", segment, [(0, region.base_offset, 4 * MIB)])
    assert status.state is COMPLETED
    with pytest.raises(TransferError, match="not in one region"):
        two.writer.start("read", segment, [(0, region.base_offset, 4 * MIB + 1)])
    target.unregister_memory(region)
    (status,) = two.writer.transfer("read", segment, [(0, region.base_offset, MIB)])
    assert (status.state, status.cause) == (FAILED, "no such memory at the peer")
    two.window()
    two.write(0, MIB)


def test_fewer_endpoints_than_peers(nest: Nest) -> None:
    writer = nest.actor("writer#1", config("a", max_endpoints=2))
    writer.allocate(MIB, 1)
    targets = [nest.actor(f"target#{i}", config("b")) for i in range(5)]
    homes = [target.allocate(MIB) for target in targets]
    segments = [writer.open(target.descriptor()) for target in targets]
    for target, far in zip(targets, homes, strict=True):
        target.window("writer#1", 1, [(far, MIB)])
    for _ in range(3):
        for segment, far in zip(segments, homes, strict=True):
            assert [s.state for s in writer.transfer("write", segment, [(0, far, MIB)], 1)] == [COMPLETED]
    assert all(target.read(0, MIB) == pattern(1, MIB) for target in targets)
    assert writer.engine.counters()["endpoints_evicted"] > 5


def test_a_restarted_target_is_another(nest: Nest) -> None:
    writer = nest.actor("writer#1", config("a", max_attempts=2))
    writer.allocate(MIB, 1)
    old = nest.peer("target", config("b"))
    far = old.allocate(MIB)
    old.window("writer#1", 1, [(far, MIB)])
    segment = writer.open(old.descriptor())
    assert [s.state for s in writer.transfer("write", segment, [(0, far, MIB)], 1)] == [COMPLETED]
    old.kill()
    new = nest.actor("target", config("b"))
    far = new.allocate(MIB)
    new.window("writer#1", 1, [(far, MIB)])
    assert writer.open(new.descriptor()) == segment
    assert [s.state for s in writer.transfer("write", segment, [(0, far, MIB)], 1)] == [COMPLETED]
    assert new.read(0, MIB) == pattern(1, MIB)


def test_processes(nest: Nest) -> None:
    peers: list[Peer] = [nest.peer("here#1", config("a")), nest.peer("there#1", config("b"))]
    bases = [peer.allocate(8 * MIB, seed) for seed, peer in enumerate(peers)]
    here, there = peers
    to_there, to_here = here.open(there.descriptor()), there.open(here.descriptor())
    there.window("here#1", 1, [(bases[1], 4 * MIB)])
    assert [s.state for s in here.transfer("write", to_there, [(5, bases[1], 4 * MIB)], 1)] == [COMPLETED]
    assert there.read(0, 4 * MIB) == pattern(0, 8 * MIB)[5 : 4 * MIB + 5]
    assert [s.state for s in there.transfer("read", to_here, [(0, bases[0], 8 * MIB)])] == [COMPLETED]
    assert there.read(0, 8 * MIB) == pattern(0, 8 * MIB)


def test_memory_of_a_gpu_that_is_not_there(two: Two) -> None:
    """One error, and nothing is left registered."""
    buffer = bytearray(8192)
    with pytest.raises(TransferError, match="CUDA") as caught:
        two.writer.engine.register_memory(buffer, "cuda:0")
    assert caught.value.field == "location"
    with pytest.raises(TransferError, match="location='npu:0'"):
        two.writer.engine.register_memory(buffer, "npu:0")
    two.writer.engine.unregister_memory(two.writer.engine.register_memory(buffer, "cpu:0"))


def test_no_device_of_that_name() -> None:
    with pytest.raises(TransferError, match="none is an RDMA device") as caught:
        TransferEngine("x#1", EngineConfig(transports=("rdma",), nics=("mlx5_7",)))
    assert caught.value.field == "nics"

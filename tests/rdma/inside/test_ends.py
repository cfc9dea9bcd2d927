"""How queue pairs end when the driver fails, and what a fence claims then. The failing calls are injected at the very
driver: pyverbs' `close` of one queue pair, libibverbs' `ibv_modify_qp` of one device."""

from __future__ import annotations

import ctypes
import errno
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvmesh.errors import TransferError
from kvmesh.transfer.transports.rdma import server, verbs
from kvmesh.transfer.transports.rdma.queue_pair import QueuePair
from kvmesh.transfer.transports.rdma.rail import WriteTracker
from kvmesh.transfer.transports.rdma.server import RdmaAccepted
from tests.rdma.inside.test_transport import (
    COMPLETED,
    FAILED,
    LOSS,
    MIB,
    Two,
    config,
    ip,
    links,
    transport,
)
from tests.support.transfer.peer import Actor, Peer, pattern
from tests.transfer.conftest import Nest, nest, until

__all__ = ["links", "nest"]

GUEST = {"timeout_s": 200, "memory_mb": 2048}
CANARY = b"\xc5" * (8 * MIB)
ERR = 6  # ibv_qp_state


class Driver:
    """Fails for one actor's queue pairs while it is told to."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.destroys = self.stops = True  # whether it does
        for nic in transport(actor).own_nics:
            nic.calls._modify_qp = self._modify(nic.calls._modify_qp)

    def _modify(self, real: Any) -> Callable[[int, int, int], int]:
        def modify(qp: int, attributes: int, mask: int) -> int:
            if not self.stops and ctypes.c_uint32.from_address(attributes).value == ERR:
                return errno.EINVAL
            return int(real(qp, attributes, mask))

        return modify

    def hold(self, pairs: list[QueuePair]) -> None:
        assert pairs
        for pair in pairs:
            pair._made = Held(self, pair._made, pair.nic.library.error)

    def targets(self) -> list[QueuePair]:
        found = transport(self.actor)._server.connections()  # type: ignore[union-attr]
        return [it.queue_pair for c in found if isinstance(c, RdmaAccepted) for it in c._landings.values()]

    def openers(self) -> list[QueuePair]:
        tracks = [track for path in transport(self.actor)._paths.values() for track in path._all_tracks()]
        return [track.queue_pair for track in tracks if track.queue_pair is not None]

    def undestroyed(self) -> int:
        return sum(len(nic._endings._stopped) + len(nic._endings._alive) for nic in transport(self.actor).own_nics)


class Held:
    """pyverbs' QP with a driver that may fail."""

    def __init__(self, driver: Driver, real: Any, error: type[Exception]) -> None:
        self.driver, self.real, self.error = driver, real, error
        self.qp_num = real.qp_num

    def close(self) -> None:
        if not self.driver.destroys:
            raise self.error("injected")
        self.real.close()


class Frozen:
    """A target, and a writer elsewhere whose process sleeps in mid-transfer: its NIC goes on alone."""

    def __init__(self, nest: Nest) -> None:
        self.target = nest.actor("target#1", config("b", connect_timeout_s=1.0))
        self.far = self.target.allocate(8 * MIB)
        self.writer: Peer = nest.peer("writer#1", config("a", max_sendings=2, max_attempts=2, connect_timeout_s=1.0))
        self.writer.allocate(8 * MIB, 1)
        self.segment = self.writer.open(self.target.descriptor())
        self.window(3)
        self.writer.flood("write", self.segment, [(0, self.far, 8 * MIB)], 3)
        until(lambda: self.target.engine.landed_bytes("writer#1", 3) > 8 * MIB, "the flood")
        self.writer.freeze()
        self.driver = Driver(self.target)
        self.driver.hold(self.driver.targets())
        self.driver.destroys = False

    def window(self, epoch: int) -> None:
        self.target.window("writer#1", epoch, [(self.far, 8 * MIB)])

    def nothing_lands(self) -> None:
        """Of what its NIC still has."""
        memory = self.target.region.memory  # type: ignore[union-attr]
        assert memory is not None
        memory[:] = CANARY
        threading.Event().wait(0.3)
        assert self.target.read(0, 8 * MIB) == CANARY

    def wakes(self) -> None:
        self.writer.thaw()
        until(self.writer.flood_over, "the flood ends")

    def writes_again(self, epoch: int) -> None:
        self.window(epoch)
        copies = [(0, self.far, 8 * MIB)]
        assert [s.state for s in self.writer.transfer("write", self.segment, copies, epoch)] == [COMPLETED]
        assert self.target.read(0, 8 * MIB) == pattern(1, 8 * MIB)
        self.target.fence("writer#1", epoch)


def test_what_is_not_destroyed_is_stopped_and_destroyed_later(nest: Nest) -> None:
    here = Frozen(nest)
    here.target.fence("writer#1", 3)
    assert here.driver.undestroyed() > 0
    here.nothing_lands()
    here.driver.destroys = True
    here.wakes()
    assert here.target.read(0, 8 * MIB) == CANARY

    epochs = itertools.count(4)

    def destroyed() -> bool:
        here.writes_again(next(epochs))  # each queue pair that a NIC makes is a chance
        return here.driver.undestroyed() == 0

    until(destroyed, "both NICs have made one")


def test_a_fence_that_can_do_neither_fails_by_name(nest: Nest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_AGAIN_S", 0.02)
    here = Frozen(nest)
    here.driver.stops = False
    for _ in range(2):
        with pytest.raises(TransferError, match=r"fence of \('writer#1', 3\): .*not destroyed .*not stopped") as caught:
            here.target.fence("writer#1", 3)
        assert caught.value.field == "nics"
        assert here.target.engine.windows.epochs("writer#1") == [3]
        with pytest.raises(TransferError, match="is being fenced"):
            here.window(3)
    assert "rdma.fences_that_destroyed" not in here.target.engine.counters()
    here.window(4)
    here.wakes()
    (status,) = here.writer.transfer("write", here.segment, [(0, here.far, MIB)], 4)
    assert status.state is FAILED and "still inside" in status.cause  # no connection while the old one may write
    here.driver.destroys = True
    here.target.fence("writer#1", 3)
    here.nothing_lands()
    assert here.driver.undestroyed() == 0
    here.writes_again(4)


def test_a_reset_that_fails_settles_nothing(links: None, nest: Nest) -> None:
    """The target cannot end its side of a queue pair that the writer has given up: the writes on it may still land."""
    two = Two(nest, 8 * MIB, connect_timeout_s=1.0, max_attempts=2, rdma_ack_exponent=10, rdma_retry_cnt=2)
    two.window()
    two.write(0, two.nbytes)
    driver = Driver(two.target)
    driver.hold(driver.targets())
    driver.destroys = driver.stops = False
    for k in (0, 1):
        ip(f"{LOSS} nica{k} root netem loss 100%")
    (status,) = two.writer.transfer("write", two.segment, [(0, two.far, two.nbytes)], 1)
    assert (status.state, status.drained) == (FAILED, False)
    with pytest.raises(TransferError, match="not stopped"):
        two.target.fence("writer#1", 1)
    driver.destroys = True
    two.target.fence("writer#1", 1)


def test_a_read_is_not_settled_while_our_own_queue_pair_lives(links: None, nest: Nest) -> None:
    two = Two(nest, 8 * MIB, rdma_ack_exponent=10, rdma_retry_cnt=2, max_attempts=1)
    copies = [(0, two.far, two.nbytes)]
    assert [s.state for s in two.writer.transfer("read", two.segment, copies)] == [COMPLETED]
    driver = Driver(two.writer)
    for stops in (False, True):
        driver.hold(driver.openers())
        driver.destroys, driver.stops = False, stops
        for k in (0, 1):
            ip(f"{LOSS} nica{k} root netem loss 100%")
        (status,) = two.writer.transfer("read", two.segment, copies)
        assert (status.state, status.drained) == (FAILED, stops)
        assert driver.undestroyed() > 0
        driver.destroys = True
        for k in (0, 1):
            ip(f"tc qdisc del dev nica{k} root")

        def destroyed() -> bool:
            (status,) = two.writer.transfer("read", two.segment, copies)
            return status.state is COMPLETED and driver.undestroyed() == 0

        until(destroyed, "both rails have new queue pairs", 30)


# ── the flush ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """(NIC, operation, bytes) of each chain, as they are posted."""
    chains: list[tuple[str, int, int]] = []
    post = QueuePair.post

    def noted(self: QueuePair, opcode: int, parts: Any, *rest: Any, **more: Any) -> None:
        chains.append((self.nic.name, opcode, sum(part[3] for part in parts)))
        post(self, opcode, parts, *rest, **more)

    monkeypatch.setattr(QueuePair, "post", noted)
    return chains


def test_every_queue_pair_is_flushed_before_an_admission_is_given_back(
    nest: Nest, posted: list[tuple[str, int, int]]
) -> None:
    two = Two(nest, 8 * MIB, fence_grace_s=10.0)

    def written(epoch: int) -> set[tuple[str, int, int]]:
        """The flushes that this asks for: one a rail that carried some of it."""
        two.window(epoch)
        del posted[:]
        two.write(0, two.nbytes, epoch)
        assert {opcode for _, opcode, _ in posted} == {verbs.WRITE}
        flushes = {(name, verbs.READ, 1) for name, _, _ in posted}
        del posted[:]
        return flushes

    most = 0
    for epoch in range(1, 9):
        flushes = written(epoch)
        most = max(most, len(flushes))
        two.target.fence("writer#1", epoch)  # asks
        assert len(posted) == len(flushes) and set(posted) == flushes
    assert most == 2
    flushes = written(9)
    assert two.writer.notify(two.segment, 9, b"end").state is COMPLETED
    assert set(posted[:-1]) == flushes and len(posted) == len(flushes) + 1
    assert posted[-1][1] == verbs.WRITE_WITH_IMM
    del posted[:]
    two.target.fence("writer#1", 9)
    assert posted == []  # it was given back already
    assert "rdma.fences_that_destroyed" not in two.target.engine.counters()


def test_without_the_flush_nothing_is_given_back(nest: Nest, monkeypatch: pytest.MonkeyPatch) -> None:
    two = Two(nest, 8 * MIB, fence_grace_s=0.2)
    two.window()
    two.write(0, two.nbytes)
    monkeypatch.setattr(WriteTracker, "flushed", lambda *_: None)  # no answer
    two.target.fence("writer#1", 1)
    assert two.target.engine.counters()["rdma.fences_that_destroyed"] == 1
    monkeypatch.undo()
    two.window(2)
    two.write(0, two.nbytes, 2)
    assert two.same()
    two.target.fence("writer#1", 2)
    assert two.target.engine.counters()["rdma.fences_that_destroyed"] == 1

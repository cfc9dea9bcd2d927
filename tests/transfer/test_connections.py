"""Connections: what becomes of an address that changed, and of bytes that a broken one still held."""

from __future__ import annotations

import socket
import threading

import pytest

from kvmesh.transfer import EngineConfig, SegmentDescriptor, TransferState
from kvmesh.transfer.segment import LocalSegment, RegionInfo
from kvmesh.transfer.sender import Sender
from kvmesh.transfer.transports import wire
from kvmesh.transfer.transports.tcp.path import TcpStream
from tests.support.transfer.raw import RawTcp
from tests.transfer.conftest import Nest, engine_threads, over, plain_only, until

MIB = 1 << 20


class RawTarget:
    """Takes one connection, says welcome, and then only what the test says."""

    base = 4096

    def __init__(self, nbytes: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(10)
        self.sock: socket.socket | None = None
        port = str(self.listener.getsockname()[1])
        regions = (RegionInfo(self.base, nbytes, "cpu:0", False),)
        self.descriptor = SegmentDescriptor(
            "target#1", "", "token", regions, {"tcp": {"host": "127.0.0.1", "port": port}}
        )

    def welcome(self) -> socket.socket:
        self.sock = sock = self.listener.accept()[0]
        sock.settimeout(10)
        (length,) = wire.LENGTH.unpack(wire.recv_exact(sock, wire.LENGTH.size))
        wire.recv_exact(sock, length)
        data = wire.encode_hello(wire.Welcome(wire.WIRE_VERSION))
        sock.sendall(wire.LENGTH.pack(len(data)) + data)
        return sock

    def close(self) -> None:
        self.listener.close()
        if self.sock is not None:
            self.sock.close()


def test_a_newer_descriptor_leads_to_the_new_address(nest: Nest, transport: str) -> None:
    """The process is the same, its address is not: a path that failed at the old one goes to the new one."""
    config = EngineConfig(transports=(transport,), max_attempts=1, connect_timeout_s=0.5, rest_s=0.01, rest_cap_s=0.02)
    holder, reader = nest.actor("holder#1", config), nest.actor("reader#1", config)
    base = holder.allocate(4096, seed=1)
    reader.allocate(4096)
    old = holder.engine.local_descriptor()
    old.endpoints[transport].update({"port": "1"} if transport == "tcp" else {"path": "@kvmesh-nobody"})
    segment = reader.engine.open_segment(old)
    (status,) = reader.transfer("read", segment, [(0, base, 100)])
    assert status.state is TransferState.FAILED
    reader.open(holder.descriptor())

    def works() -> bool:
        return bool(reader.transfer("read", segment, [(0, base, 100)])[0].state is TransferState.COMPLETED)

    until(works, "it arrives at the new address", 5)


@over("tcp")
@plain_only
def test_what_a_broken_connection_had_not_sent_is_never_sent(nest: Nest) -> None:
    """With MSG_ZEROCOPY it would be read from memory that its owner uses for something else by then."""
    config = EngineConfig(transports=("tcp",), tcp_streams=1, ack_timeout_s=0.2, max_attempts=1, connect_timeout_s=0.3)
    writer = nest.actor("writer#1", config)
    writer.allocate(8 * MIB, seed=1)
    target = RawTarget(8 * MIB)
    segment = writer.engine.open_segment(target.descriptor)
    batch = writer.start("write", segment, [(0, target.base, 8 * MIB)], 1)
    sock = target.welcome()
    target.listener.close()
    (status,) = writer.finish(batch)
    assert (status.state, status.drained) == (TransferState.FAILED, False)
    until(lambda: engine_threads().count("kvmesh-tcp-send") == 0, "the connection is closed")

    def drain() -> None:
        while sock.recv(1 << 20):
            pass

    with pytest.raises(ConnectionResetError):
        drain()
    target.close()


def test_a_defect_does_not_end_the_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it nothing is ever overdue again."""
    sender = Sender(EngineConfig(), LocalSegment())
    ticked = threading.Event()
    calls = 0

    def tick() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("a defect")
        with sender.lock:
            sender._wake_at = float("inf")
        ticked.set()

    monkeypatch.setattr(sender, "tick", tick)
    timer = threading.Thread(target=sender.run)
    timer.start()
    with sender.lock:
        sender._arm(0.0)
    try:
        assert ticked.wait(10)
    finally:
        sender.stop()
        timer.join(10)


@over("tcp")
def test_a_rail_that_fails_after_its_segment_was_closed_is_not_remembered(
    nest: Nest, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(transports=("tcp",), tcp_nics=("127.0.0.1", "127.0.0.2"))
    holder, reader = nest.actor("holder#1", config), nest.actor("reader#1", config)
    base = holder.allocate(4096)
    reader.allocate(4096)
    segment = reader.open(holder.descriptor())
    dialing, go_on = threading.Event(), threading.Event()

    def fail(*args: object) -> None:
        dialing.set()
        assert go_on.wait(20)
        raise OSError("no way")

    monkeypatch.setattr(TcpStream, "_dial_route", fail)
    batch = reader.start("read", segment, [(0, base, 100)])
    assert dialing.wait(10)
    reader.engine.close_segment(segment)
    go_on.set()
    reader.finish(batch)
    until(lambda: engine_threads().count("kvmesh-tcp-send") == 0, "its thread ends")
    assert reader.engine._transports[0]._failing == set()  # type: ignore[attr-defined]


@over("tcp")
def test_an_engine_made_again_under_its_name_is_not_taken_for_its_old_connection(nest: Nest) -> None:
    """Of which the target has not heard yet that it ended."""
    config = EngineConfig(transports=("tcp",))
    target = nest.actor("target#1", config)
    base = target.allocate(4096)
    target.window("writer#1", 1, [(base, 4096)])
    old = [RawTcp(target.engine.local_descriptor(), "writer#1", conn_id) for conn_id in range(1, 5)]
    writer = nest.actor("writer#1", config)
    writer.allocate(4096, seed=1)
    (status,) = writer.transfer("write", writer.open(target.descriptor()), [(0, base, 4096)], 1)
    assert status.state is TransferState.COMPLETED
    for raw in old:
        raw.close()

"""Peers that send what they must not. Each costs its own connection, and nothing else."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv6Address
from types import SimpleNamespace
from typing import Any

import pytest

from kvmesh.errors import TransferError
from kvmesh.transfer import EngineConfig, SegmentDescriptor, TransferState, windows
from kvmesh.transfer.segment import LocalSegment, RegionInfo
from kvmesh.transfer.transports import serving, wire
from kvmesh.transfer.transports.rdma import dial, protocol
from kvmesh.transfer.transports.rdma.device import Registration
from kvmesh.transfer.transports.rdma.gids import Gid
from kvmesh.transfer.transports.rdma.server import RdmaAccepted
from kvmesh.transfer.transports.shm import server as shm_server
from kvmesh.transfer.transports.shm.path import raw_address
from kvmesh.transfer.transports.wire import ProtocolBroken
from tests.support.transfer.peer import Actor
from tests.support.transfer.raw import RawShm, RawTcp, greeting
from tests.transfer.conftest import Nest, over, until

KIB = 1 << 10


@pytest.fixture
def target(nest: Nest, transport: str) -> Actor:
    actor = nest.actor("target#1", EngineConfig(transports=(transport,), connect_timeout_s=0.5))
    actor.allocate(64 * KIB, seed=1)
    return actor


def server(actor: Actor) -> Any:
    return actor.engine._transports[0]._server  # type: ignore[attr-defined]


def works(nest: Nest, actor: Actor, transport: str) -> bool:
    reader = nest.actor("reader#1", EngineConfig(transports=(transport,)))
    reader.allocate(4 * KIB)
    assert actor.region is not None
    (status,) = reader.transfer("read", reader.open(actor.descriptor()), [(0, actor.region.base_offset, 4 * KIB)])
    return status.state is TransferState.COMPLETED


@contextmanager
def no_defect(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What a stranger sends is not a defect of ours: no traceback."""
    with caplog.at_level(logging.WARNING, "kvmesh"):
        yield
    assert [r.message for r in caplog.records if r.exc_info] == []


@over("tcp")
@pytest.mark.parametrize("kind", [wire.WRITE, wire.READ, wire.CHECKSUM])
def test_a_frame_without_parts(nest: Nest, caplog: pytest.LogCaptureFixture, kind: int) -> None:
    actor = nest.actor("target#1", transports=("tcp",))
    base = actor.allocate(4 * KIB)
    actor.window("writer#1", 1, [(base, 4 * KIB)])
    with no_defect(caplog):
        raw = RawTcp(actor.engine.local_descriptor(), "writer#1")
        raw.sock.sendall(wire.HEAD.pack(kind, 0, 0, 0, 1, 1, 0))
        until(lambda: bool(raw.sock.recv(1) or True), "an answer, or the end")
        raw.close()
        until(lambda: not server(actor).connections(), "it is gone")
    assert works(nest, actor, "tcp")


@over("shm")
@pytest.mark.parametrize("kind", [wire.WRITE, wire.CHECKSUM])
def test_a_packet_without_parts(nest: Nest, caplog: pytest.LogCaptureFixture, kind: int) -> None:
    actor = nest.actor("target#1", transports=("shm",))
    base = actor.allocate(4 * KIB)
    actor.window("writer#1", 1, [(base, 4 * KIB)])
    with no_defect(caplog):
        raw = RawShm(actor.engine.local_descriptor(), "writer#1")
        raw.sock.send(wire.HEAD.pack(kind, 0, 0, 0, 1, 1, 0))
        raw.sock.recv(4096)
        raw.close()
        until(lambda: not server(actor).connections(), "it is gone")
    assert works(nest, actor, "shm")


@over("shm")
def test_checksums_of_more_than_a_frame_are_refused(nest: Nest) -> None:
    """512 rows of a whole region each: hours of work, and the region could not be unregistered meanwhile."""
    actor = nest.actor("target#1", transports=("shm",))
    base = actor.allocate(4 * KIB)
    raw = RawShm(actor.engine.local_descriptor(), "writer#1")
    rows = struct.pack("<4Q", base, 4 * KIB, base, 4 * KIB)
    raw.sock.send(wire.HEAD.pack(wire.CHECKSUM, 0, 0, 2, 1, 0, 4 * KIB) + rows)
    assert raw.sock.recv(4096) == b""
    raw.close()


def test_a_token_that_is_no_ascii(target: Actor, caplog: pytest.LogCaptureFixture, transport: str) -> None:
    descriptor = target.engine.local_descriptor()
    forged = SegmentDescriptor(descriptor.name, descriptor.machine, "tökén", (), descriptor.endpoints)
    with no_defect(caplog):
        if transport == "tcp":
            raw = RawTcp(forged, "writer#1")
            assert "not here" in raw.welcome
            raw.close()
        else:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.connect(raw_address(descriptor.endpoints["shm"]["path"]))
                sock.send(greeting(forged, "writer#1", 1))
                with pytest.raises(wire.ConnectionRefused, match="not here"):
                    wire.decode_welcome(sock.recv(4096))
        until(lambda: not server(target).connections(), "it is gone")


@over("tcp")
def test_strangers_that_never_greet_keep_nobody_out(nest: Nest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds a thread: one byte at a time would hold it for hours. Beyond a number of them the oldest go."""
    target = nest.actor("target#1", transports=("tcp",))
    target.allocate(64 * KIB, seed=1)
    monkeypatch.setattr(serving, "MAX_STRANGERS", 8)
    endpoint = target.engine.local_descriptor().endpoints["tcp"]
    address = endpoint["host"], int(endpoint["port"])
    strangers = [socket.create_connection(address, 10) for _ in range(50)]
    for sock in strangers:
        sock.settimeout(0.01)
    assert works(nest, target, "tcp")
    until(lambda: len(server(target).connections()) <= 8 + 4, "the oldest are gone")
    for sock in strangers:
        sock.close()


@pytest.mark.parametrize(("base", "length"), [(-4096, 8192), (4096, 0), (1 << 63, 1 << 62), (4096, -1)])
def test_a_descriptor_with_impossible_regions_is_refused(base: int, length: int) -> None:
    """Its offsets would break the thread that packs them."""
    data = SegmentDescriptor("peer#1", "machine", "token", (RegionInfo(base, length, "cpu:0", True),), {}).encode()
    with pytest.raises(TransferError, match="region"):
        SegmentDescriptor.decode(data)


@pytest.mark.parametrize("port", ["70000", "-1", "0", "x"])
def test_a_descriptor_with_an_impossible_port_fails_its_requests(nest: Nest, port: str) -> None:
    config = EngineConfig(transports=("tcp",), tcp_nics=("127.0.0.1",), rest_s=0.01, max_attempts=2, backoff_s=0.01)
    holder, reader = nest.actor("holder#1", config), nest.actor("reader#1", config)
    base = holder.allocate(4 * KIB)
    reader.allocate(4 * KIB)
    descriptor = holder.engine.local_descriptor()
    for key, value in descriptor.endpoints["tcp"].items():
        if key.startswith("nic:"):
            descriptor.endpoints["tcp"][key] = f"{value.partition('@')[0]}@{port}"
    try:
        segment = reader.engine.open_segment(descriptor)
    except TransferError:
        return
    (status,) = reader.transfer("read", segment, [(0, base, 100)])
    assert status.state is TransferState.FAILED


@over("shm")
@pytest.mark.parametrize("path", ["/tmp/a\0b", "/" + "x" * 200, "@" + "x" * 200, ""])
def test_a_descriptor_with_an_impossible_path_fails_its_requests(nest: Nest, path: str) -> None:
    config = EngineConfig(transports=("shm",), max_attempts=2, backoff_s=0.01)
    holder, reader = nest.actor("holder#1", config), nest.actor("reader#1", config)
    base = holder.allocate(4 * KIB)
    reader.allocate(4 * KIB)
    descriptor = holder.engine.local_descriptor()
    descriptor.endpoints["shm"]["path"] = path
    (status,) = reader.transfer("read", reader.engine.open_segment(descriptor), [(0, base, 100)])
    assert (status.state, status.drained) == (TransferState.FAILED, True)


def test_a_newer_descriptor_without_the_transport_ends_no_thread(nest: Nest, transport: str) -> None:
    script = '{"rules": [{"kind": "delay", "delay_ms": 100}]}'
    config = EngineConfig(transports=(transport,), fault=script, rest_s=0.01, rest_cap_s=0.02)
    holder, reader = nest.actor("holder#1", config), nest.actor("reader#1", config)
    base = holder.allocate(4 * KIB)
    reader.allocate(4 * KIB)
    segment = reader.open(holder.descriptor())
    batch = reader.start("read", segment, [(0, base, 100)])
    link = reader.engine._sender.links[segment]
    link.descriptor = dataclasses.replace(link.descriptor, endpoints={})  # what it was sent by has no endpoint now
    (status,) = reader.finish(batch)
    assert status.state.final
    link.descriptor = holder.engine.local_descriptor()

    def works_again() -> bool:
        return reader.transfer("read", segment, [(0, base, 100)])[0].state is TransferState.COMPLETED

    until(works_again, "the old way is found again", 5)


def test_rdma_a_socket_that_cannot_be_made_holds_no_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen of them, and nobody could dial any more."""

    def none_left(*args: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    listener = socket.create_server(("127.0.0.1", 0))
    endpoint = {"host": "127.0.0.1", "port": str(listener.getsockname()[1])}
    descriptor = SegmentDescriptor("peer#1", "", "token", (), {"rdma": endpoint})
    config = EngineConfig(connect_timeout_s=0.05)
    with monkeypatch.context() as patch:
        patch.setattr("kvmesh.transfer.transports.rdma.dial.socket.socket", none_left)
        for _ in range(20):
            with pytest.raises(OSError, match="too many open files"):
                dial.dial(descriptor, "me#1", 1, (), config, lambda sock: None)
    listener.close()


class Card:
    """Counts what it has made and not destroyed."""

    name, port, mtu, reads, lid, gids, config = "fake0", 1, 5, 4, 0, (Gid(0, "v2", IPv6Address("::1")),), EngineConfig()

    def __init__(self) -> None:
        self.registered = self.made = 0
        self.busy: set[int] = set()
        self.calls = SimpleNamespace(post_send=int, post_recv=int, initialize=max, ready_to_receive=self.pack)

    def register_memory(self, address: int, nbytes: int) -> Registration:
        self.registered += 1
        return Registration(1, 2, 3)

    def deregister(self, made: Registration) -> None:
        self.registered -= 1

    def make_queue_pair(self, *args: object) -> tuple[Any, int, int, Any]:
        self.made += 1
        return SimpleNamespace(qp_num=17), 0, 1, None

    def destroy_queue_pair(self, *args: object) -> None:
        self.made -= 1

    def pack(self, pointer: int, port: int, number: int, *args: object) -> None:
        struct.pack("I", number)  # as for the kernel

    def gid_index(self, address: object) -> int:
        return 0


@pytest.fixture
def rdma() -> Iterator[tuple[RdmaAccepted, Card]]:
    card = Card()
    transport = SimpleNamespace(living_nic=lambda name: card, config=EngineConfig(), own_nics=())
    here, there = socket.create_server(("127.0.0.1", 0)), socket.socket()
    with here, there:
        there.connect(here.getsockname())
        sock, _ = here.accept()
        with sock:
            host = SimpleNamespace(name="target#1", segment=LocalSegment())
            yield RdmaAccepted(SimpleNamespace(host=host, label="rdma"), sock, transport), card  # type: ignore[arg-type]


@pytest.mark.parametrize(("gid", "to", "number"), [("x", "::1", 1), ("::1", "x", 1), ("::1", "::1", 1 << 60)])
def test_rdma_a_connect_that_makes_no_sense_leaves_no_queue_pair(
    rdma: tuple[RdmaAccepted, Card], gid: str, to: str, number: int
) -> None:
    connection, card = rdma
    asked = protocol.Connect(1, "fake0", "fake0", to, number, 0, gid, 0, 5, 4)
    try:
        answer = connection._connect(asked)
        assert answer.cause
    except (ProtocolBroken, struct.error):
        pass
    assert (card.made, card.registered) == (0, 0)


def test_rdma_checksums_of_more_than_a_frame_are_refused(rdma: tuple[RdmaAccepted, Card]) -> None:
    connection, _ = rdma
    for offsets, lengths in [((0,) * 600, (1,) * 600), ((0, 0), (1 << 40, 1 << 40))]:
        with pytest.raises(ProtocolBroken):
            connection._checksum(protocol.Checksum(1, offsets, lengths))


@over("shm")
def test_a_region_shorter_than_described_is_not_read_beyond_its_end(
    nest: Nest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies behind the map is other memory of ours, or none."""
    config = EngineConfig(transports=("shm",))
    holder, reader = nest.actor("holder#1", config), nest.actor("reader#1", config)
    base = holder.allocate(64 * KIB, seed=1)
    reader.allocate(64 * KIB)
    send_region = shm_server.send_region

    def lie(sock: socket.socket, at: int, length: int, fd: int) -> None:
        send_region(sock, at, min(length, 4 * KIB), fd)

    monkeypatch.setattr(shm_server, "send_region", lie)
    segment = reader.open(holder.descriptor())
    for _ in range(2):  # the first has to ask for it
        (status,) = reader.transfer("read", segment, [(0, base, 64 * KIB)])
        assert (status.state, status.cause) == (TransferState.FAILED, "no such memory at the peer")


@over("shm")
def test_a_peer_cannot_use_up_our_maps(nest: Nest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has 65530 of them."""
    monkeypatch.setattr(shm_server, "MAX_MAPS", 4)
    actor = nest.actor("target#1", transports=("shm",))
    base = actor.allocate(4 * KIB)
    raw = RawShm(actor.engine.local_descriptor(), "writer#1")
    length, fd = raw.want(base)
    for at in range(4):
        raw.send_with_fd(wire.HEAD.pack(wire.REGION, 0, 0, 1, at * 4 * KIB, 0, length), fd)
    _, more = raw.want(base)  # taken, so far
    os.close(more)
    raw.send_with_fd(wire.HEAD.pack(wire.REGION, 0, 0, 1, 1 << 30, 0, length), fd)
    os.close(fd)
    until(lambda: not server(actor).connections(), "it is cut off")
    raw.close()


def test_a_peer_cannot_fill_a_window_with_notifications(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "MAX_NOTIFICATIONS", 3)
    table: windows.Windows[None] = windows.Windows()
    table.open("writer#1", 1, [(0, 10, None)])
    assert [table.take_notification("writer#1", 1, serial) for serial in (1, 2, 2, 3, 4, 1)] == [
        True, True, False, True, None, False,
    ]  # fmt: skip

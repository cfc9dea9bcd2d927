"""What only shm has: reads by the caller, checksums in packets, namespaces. Its copies: test_shm_copy."""

from __future__ import annotations

import shutil
import struct
import subprocess
import threading
import zlib
from dataclasses import replace

import pytest

from kvmesh.errors import TransferError
from kvmesh.transfer import EngineConfig, SegmentDescriptor, TransferState
from kvmesh.transfer.segment import machine_id, network_id
from kvmesh.transfer.transports import wire
from tests.support.transfer.networks import HostPeer, Networks, networks
from tests.support.transfer.peer import Actor, Peer, pattern
from tests.support.transfer.raw import RawShm
from tests.transfer.conftest import Nest, over

MIB = 1 << 20

pytestmark = over("shm")


def pair(nest: Nest, nbytes: int, **options: object) -> tuple[Actor, Actor, str, int]:
    target, writer = nest.actor("target#1", **options), nest.actor("writer#1", **options)
    base = target.allocate(nbytes, seed=2)
    writer.allocate(nbytes, seed=1)
    segment = writer.open(target.descriptor())
    target.window("writer#1", 1, [(base, nbytes)])
    return writer, target, segment, base


# ── short reads ───────────────────────────────────────────────────────────────────────────────────


def test_short_reads_are_copied_by_the_caller_and_do_not_nest(nest: Nest, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are queued, what one's end lets go is not read from inside it."""
    from kvmesh.transfer.transports.shm import read as shm_read

    writer, target, segment, base = pair(nest, 4 * MIB, transports=("shm",))
    assert writer.transfer("read", segment, [(0, base, 100)])[0].state is TransferState.COMPLETED  # maps it
    depth, deepest, here = 0, 0, 0
    copy_runs = shm_read.copy_runs
    caller = threading.current_thread()

    def counted(*args: object) -> None:
        nonlocal here
        here += threading.current_thread() is caller
        copy_runs(*args)  # type: ignore[arg-type]

    fetch = shm_read.ShmReader._fetch

    def nested(*args: object) -> None:
        nonlocal depth, deepest
        if threading.current_thread() is caller:
            depth += 1
            deepest = max(deepest, depth)
        fetch(*args)  # type: ignore[arg-type]
        if threading.current_thread() is caller:
            depth -= 1

    monkeypatch.setattr(shm_read, "copy_runs", counted)
    monkeypatch.setattr(shm_read.ShmReader, "_fetch", nested)
    copies = [(i * 200, base + i * 200, 200) for i in range(20 * wire.MAX_PARTS)]
    assert {status.state for status in writer.transfer("read", segment, copies)} == {TransferState.COMPLETED}
    assert writer.read(0, len(copies) * 200) == target.read(0, len(copies) * 200)
    assert here > 0
    assert deepest == 1


# ── checksums ─────────────────────────────────────────────────────────────────────────────────────


def test_checksums_in_packets(nest: Nest) -> None:
    """One little-endian u32 a row; refused whole when a row is not in registered memory."""
    target = nest.actor("target#1", transports=("shm",))
    base = target.allocate(MIB, seed=1)
    raw = RawShm(SegmentDescriptor.decode(target.descriptor()), "asker#1")
    data = pattern(1, MIB)
    raw.sock.send(wire.HEAD.pack(wire.CHECKSUM, 0, 0, 2, 5, 0, 12) + struct.pack("<4Q", base, 4, base + 9, 8))
    packet = raw.sock.recv(4096)
    answer = wire.Asked.parse(packet)
    assert (answer.kind, answer.flags, answer.count, answer.seq, answer.nbytes) == (wire.ANSWER, 0, 0, 5, 8)
    assert wire.unpack_sums(packet[wire.HEAD_BYTES :]) == (zlib.crc32(data[:4]), zlib.crc32(data[9:17]))
    for offset, length in ((base + MIB - 4, 8), (base, 0), (0, 8)):
        raw.sock.send(
            wire.HEAD.pack(wire.CHECKSUM, 0, 0, 2, 6, 0, 4 + length) + struct.pack("<4Q", base, 4, offset, length)
        )
        answer = wire.Asked.parse(raw.sock.recv(4096))
        assert (answer.count, wire.CAUSES[answer.flags]) == (2, "no such memory at the peer")
    raw.close()


# ── namespaces ────────────────────────────────────────────────────────────────────────────────────


UNSHARE = {  # unshare(1)'s option → unshare(2)'s flag
    "--mount": 0x20000,
    "--cgroup": 0x2000000,
    "--uts": 0x4000000,
    "--ipc": 0x8000000,
    "--user": 0x10000000,
}


def unshared(nest: Nest, *options: str) -> Peer:
    """A peer in namespaces of its own."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare (util-linux) here")
    tried = subprocess.run(["unshare", *options, "true"], capture_output=True, text=True, timeout=10)
    if tried.returncode != 0:
        pytest.skip(f"unshare {' '.join(options)}: {tried.stderr.strip()}")
    peer = Peer("target#1", EngineConfig(), unshare=sum(UNSHARE[option] for option in options))
    nest.peers.append(peer)
    return peer


@pytest.mark.parametrize(
    ("option", "carrier"),
    [("--mount", "shm"), ("--ipc", "shm"), ("--uts", "shm"), ("--cgroup", "shm"), ("--user", "tcp")],
)
def test_other_namespaces_work_or_go_over_tcp(nest: Nest, option: str, carrier: str) -> None:
    target, writer = unshared(nest, option), nest.actor("writer#1")
    base = target.allocate(MIB)
    writer.allocate(MIB, seed=1)
    segment = writer.open(target.descriptor())
    target.window("writer#1", 1, [(base, MIB)])
    assert writer.transfer("write", segment, [(0, base, MIB)], 1)[0].state is TransferState.COMPLETED
    assert target.read(0, MIB) == writer.read(0, MIB)
    assert writer.counter(f"{carrier}.write_bytes") == MIB
    assert writer.counter("shm.frames_lost") == 0  # not even tried where it cannot be reached


def test_another_network_namespace_goes_over_tcp_at_once(nest: Nest) -> None:
    """Two containers of one host: same boot, same users, another abstract namespace."""
    with networks() as nets:
        nets.wire("eth1", {"a": ["10.1.0.1/24"], "b": ["10.1.0.2/24"]})
        hosts = [host(nest, nets, name, f"10.1.0.{i}") for i, name in ((1, "a"), (2, "b"))]
        writer, target = hosts
        base = target.allocate(MIB)
        writer.allocate(MIB, seed=1)
        segment = writer.open(target.descriptor())
        assert writer.rails(segment) == ["tcp"]
        target.window("a#1", 1, [(base, MIB)])
        assert writer.transfer("write", segment, [(0, base, MIB)], 1)[0].state is TransferState.COMPLETED
        assert target.read(0, MIB) == writer.read(0, MIB)


def host(nest: Nest, nets: Networks, name: str, address: str) -> HostPeer:
    peer = HostPeer(nets.name(name), f"{name}#1", EngineConfig(host=address))
    nest.peers.append(peer)
    return peer


def test_reaches_only_where_its_socket_can_be_found(nest: Nest) -> None:
    actor = nest.actor("here#1", transports=("shm",))
    own = actor.engine.local_descriptor()
    shm = actor.engine._transports[0]
    assert (own.machine, own.endpoints["shm"]["network"]) == (machine_id(), network_id())
    assert shm.reaches(own)
    for other in (
        replace(own, machine="another"),
        replace(own, endpoints={}),
        replace(own, endpoints={"shm": own.endpoints["shm"] | {"network": "net:[1]"}}),
        replace(own, endpoints={"shm": {"path": own.endpoints["shm"]["path"]}}),
    ):
        assert not shm.reaches(other)
        with pytest.raises(TransferError, match="cannot be reached"):
            actor.open(other.encode())
    assert shm.reaches(replace(own, endpoints={"shm": {"path": "/run/some/socket", "network": "net:[1]"}}))


def test_a_socket_that_this_mount_namespace_does_not_have_costs_no_request(nest: Nest) -> None:
    writer, target = nest.actor("writer#1"), nest.actor("target#1")
    base = target.allocate(MIB)
    writer.allocate(MIB, seed=1)
    own = target.engine.local_descriptor()
    segment = writer.open(replace(own, endpoints=own.endpoints | {"shm": {"path": "/nowhere/socket"}}).encode())
    target.window("writer#1", 1, [(base, MIB)])
    assert writer.transfer("write", segment, [(0, base, MIB)], 1)[0].state is TransferState.COMPLETED
    assert writer.counter("tcp.write_bytes") == MIB

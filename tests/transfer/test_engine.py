"""Bytes against bytes, over both transports, between real processes."""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as changed

from kvmesh.errors import TransferError
from kvmesh.transfer import (
    EngineConfig,
    Notification,
    Opcode,
    Range,
    SegmentDescriptor,
    TransferEngine,
    TransferRequest,
    TransferState,
    TransferStatus,
)
from tests.support.transfer.peer import Actor, pattern
from tests.transfer.conftest import Nest, over, until

MIB = 1 << 20


def pair(nest: Nest, transport: str, nbytes: int = 4 * MIB, **options: object) -> tuple[Actor, Actor, str, int]:
    """A writer and a target in this process; the target's window of epoch 1 spans all of its region."""
    config = EngineConfig(transports=(transport,), **options)  # type: ignore[arg-type]
    writer, target = nest.actor("writer#1", config), nest.actor("target#1", config)
    writer.allocate(nbytes, seed=1)
    base = target.allocate(nbytes)
    segment = writer.open(target.descriptor())
    target.window("writer#1", 1, [(base, nbytes)])
    return writer, target, segment, base


def random_copies(rng: random.Random, nbytes: int, base: int) -> list[tuple[int, int, int]]:
    """Copies whose targets do not overlap, of odd sizes, at odd offsets, from anywhere."""
    copies = []
    at = 0
    while True:
        at += rng.choice([0, 1, 3, 4096, 10_000])
        length = rng.choice([1, 7, 100, 4095, 4097, 32768, 300_001, 1_500_000])
        if at + length > nbytes:
            return copies
        copies.append((rng.randrange(nbytes - length + 1), base + at, length))
        at += length


@pytest.mark.slow
def test_random_copies_between_two_processes_both_ways(nest: Nest, transport: str) -> None:
    nbytes = 8 * MIB
    config = EngineConfig(transports=(transport,))
    here, there = nest.actor("here#1", config), nest.peer("there#1", config)
    mine, its = here.allocate(nbytes, seed=1), there.allocate(nbytes, seed=2)
    to_there, to_here = here.open(there.descriptor()), there.open(here.descriptor())
    rng = random.Random(5)

    for epoch in range(1, 5):
        there.window("here#1", epoch, [(its, nbytes)])
        copies = random_copies(rng, nbytes, its)
        rng.shuffle(copies)
        expected = bytearray(there.read(0, nbytes))
        for near, far, length in copies:
            expected[far - its : far - its + length] = here.read(near, length)
        statuses = here.transfer("write", to_there, copies, epoch)
        assert {s.state for s in statuses} == {TransferState.COMPLETED}
        assert [s.bytes_done for s in statuses] == [length for _, _, length in copies]
        assert there.read(0, nbytes) == bytes(expected)
        there.fence("here#1", epoch)

        copies = [(far - its, near + its, length) for near, far, length in random_copies(rng, nbytes, its)]
        before = bytearray(here.read(0, nbytes))
        remote = there.read(0, nbytes)
        for near, far, length in copies:
            before[near : near + length] = remote[far - its : far - its + length]
        assert {s.state for s in here.transfer("read", to_there, copies)} == {TransferState.COMPLETED}
        assert here.read(0, nbytes) == bytes(before)

    here.window("there#1", 9, [(mine, nbytes)])
    statuses = there.transfer("write", to_here, [(0, mine, nbytes)], 9)
    assert statuses[0].state is TransferState.COMPLETED
    assert here.read(0, nbytes) == there.read(0, nbytes)
    if transport != "rdma":  # a target sees nothing of one-sided writes
        assert here.engine.landed_bytes("there#1", 9) == nbytes


def test_a_closed_window_refuses_and_says_why(nest: Nest, transport: str) -> None:
    writer, target, segment, base = pair(nest, transport)
    for epoch in (2, 3):
        (status,) = writer.transfer("write", segment, [(0, base, 100_000)], epoch)
        assert (status.state, status.cause) == (TransferState.FAILED, "window closed")
        assert status.drained
    target.fence("writer#1", 1)
    (status,) = writer.transfer("write", segment, [(0, base, 4 * MIB)], 1)
    assert (status.state, status.cause) == (TransferState.FAILED, "window closed")
    assert target.read(0, 4 * MIB) == bytes(4 * MIB)


def test_one_slice_outside_the_window_fails_alone(nest: Nest, transport: str) -> None:
    writer, target, segment, base = pair(nest, transport)
    target.window("writer#1", 2, [(base + 4096 * i, 4096) for i in (0, 1, 2, 4)])
    copies = [(4096 * i, base + 4096 * i, 4096) for i in range(5)]
    statuses = writer.transfer("write", segment, copies, 2)
    assert [s.state.value for s in statuses] == ["completed", "completed", "completed", "failed", "completed"]
    assert statuses[3].cause == "outside the window"
    expected = bytearray(writer.read(0, 5 * 4096))
    expected[3 * 4096 : 4 * 4096] = bytes(4096)
    assert target.read(0, 5 * 4096) == bytes(expected)


def test_many_small_requests_share_frames(nest: Nest, transport: str) -> None:
    writer, target, segment, base = pair(nest, transport)
    copies = [(8192 * i, base + 8192 * i, 4096) for i in range(300)]
    batch = writer.start("write", segment, copies, 1)
    assert {s.state for s in writer.finish(batch)} == {TransferState.COMPLETED}
    for near, far, length in copies:
        assert target.read(far - base, length) == writer.read(near, length)
    if transport != "rdma":  # a target sees nothing of one-sided writes
        assert target.engine.landed_bytes("writer#1", 1) == 300 * 4096


async def test_wait_is_for_the_event_loop(nest: Nest, transport: str) -> None:
    writer, target, segment, base = pair(nest, transport)
    batches = [writer.start("write", segment, [(0, base, MIB)], 1) for _ in range(4)]
    await asyncio.gather(*(writer.engine.wait(batch) for batch in batches))
    assert all(writer.engine.status(batch, 0).state is TransferState.COMPLETED for batch in batches)
    assert target.read(0, MIB) == writer.read(0, MIB)


def test_on_done_fires_once_for_all_requests_so_far(nest: Nest, transport: str) -> None:
    writer, _, segment, base = pair(nest, transport)
    batch = writer.engine.allocate_batch(20)
    assert writer.region is not None
    for layer in range(10):
        request = TransferRequest(Opcode.WRITE, writer.region.address, segment, base + layer * 4096, 4096, 1)
        writer.engine.submit(batch, [request, changed(request, remote_offset=base + MIB + layer * 4096)])
    fired: list[int] = []
    done = threading.Event()

    def on_done() -> None:
        fired.append(1)
        done.set()

    writer.engine.on_done(batch, on_done)
    assert done.wait(20)
    assert {s.state for s in writer.engine.statuses(batch)} == {TransferState.COMPLETED}
    assert fired == [1]


def test_end_mark_comes_after_the_bytes(nest: Nest, transport: str) -> None:
    """In the callback itself, every byte submitted before the end mark is there."""
    writer, target, segment, base = pair(nest, transport)
    seen: list[tuple[Notification, bool]] = []
    writer_bytes = writer.read(0, 4 * MIB)

    def on_notify(notification: Notification) -> None:
        seen.append((notification, target.read(0, 4 * MIB) == writer_bytes))

    target.engine.on_notify = on_notify
    for i in range(16):
        writer.start("write", segment, [(i * 256 * 1024, base + i * 256 * 1024, 256 * 1024)], 1)
    status = writer.notify(segment, 1, b"end")
    assert status.state is TransferState.COMPLETED
    assert seen == [(Notification("writer#1", 1, b"end"), True)]


def test_no_end_mark_after_a_write_that_failed(nest: Nest, transport: str) -> None:
    writer, target, segment, base = pair(nest, transport)
    target.window("writer#1", 2, [(base, 4096)])
    writer.start("write", segment, [(0, base, 4096), (0, base + 8192, 4096)], 2)
    status = writer.notify(segment, 2, b"end")
    assert status.state is TransferState.FAILED
    assert "outside the window" in status.cause
    assert writer.notify(segment, 1, b"other epoch").state is TransferState.COMPLETED
    assert [n.payload for n in target.notified] == [b"other epoch"]


def test_end_mark_of_a_fenced_epoch_is_refused(nest: Nest, transport: str) -> None:
    writer, target, segment, _ = pair(nest, transport)
    target.fence("writer#1", 1)
    status = writer.notify(segment, 1, b"late")
    assert (status.state, status.cause) == (TransferState.FAILED, "window closed")
    assert target.notified == []


def test_notification_without_a_listener_fails(nest: Nest, transport: str) -> None:
    writer, target, segment, _ = pair(nest, transport)
    target.engine.on_notify = None
    assert writer.notify(segment, 0, b"hello").cause == "nobody listens for notifications"


@over("shm")
def test_memory_of_the_caller(nest: Nest) -> None:
    """numpy arrays and raw addresses: sources over tcp, targets over shm as well."""
    writer, target = nest.actor("writer#1"), nest.actor("target#1")
    source = np.frombuffer(bytearray(pattern(3, MIB)), dtype=np.uint8)
    sink = np.zeros(MIB, dtype=np.uint8)
    writer.region = writer.engine.register_memory(source, "cpu:0")
    region = target.engine.register_memory((sink.ctypes.data, sink.nbytes), "cpu:0")
    segment = writer.open(target.descriptor())
    target.window("writer#1", 1, [(region.base_offset, MIB)])
    (status,) = writer.transfer("write", segment, [(0, region.base_offset, MIB)], 1)
    assert status.state is TransferState.COMPLETED
    assert bytes(sink) == bytes(source)
    assert "shm.connected" not in writer.engine.counters()

    sink[:] = 0
    writer.allocate(MIB, seed=4)
    (status,) = writer.transfer("write", segment, [(0, region.base_offset, MIB)], 1)
    assert status.state is TransferState.COMPLETED
    assert bytes(sink) == pattern(4, MIB)
    assert writer.engine.counters()["shm.write_bytes"] == MIB


@over("shm")
def test_falls_back_to_the_next_transport(nest: Nest) -> None:
    writer, target = nest.actor("writer#1"), nest.actor("target#1")
    writer.allocate(MIB, seed=1)
    base = target.allocate(MIB)
    descriptor = target.engine.local_descriptor()
    segment = writer.open(replace(descriptor, endpoints=descriptor.endpoints | {"shm": {"path": "@nobody"}}).encode())
    target.window("writer#1", 1, [(base, MIB)])
    (status,) = writer.transfer("write", segment, [(0, base, MIB)], 1)
    assert status.state is TransferState.COMPLETED
    assert target.read(0, MIB) == writer.read(0, MIB)
    assert writer.engine.counters()["tcp.write_bytes"] == MIB


@over("tcp")
def test_ipv6(nest: Nest) -> None:
    config = EngineConfig(transports=("tcp",), host="::1")
    try:
        writer, target = nest.actor("writer#1", config), nest.actor("target#1", config)
    except TransferError as err:
        pytest.skip(f"no IPv6 here: {err}")
    writer.allocate(MIB, seed=1)
    base = target.allocate(MIB)
    segment = writer.open(target.descriptor())
    target.window("writer#1", 1, [(base, MIB)])
    assert writer.transfer("write", segment, [(0, base, MIB)], 1)[0].state is TransferState.COMPLETED
    assert target.read(0, MIB) == writer.read(0, MIB)


def test_a_restarted_peer_is_another_peer(nest: Nest, transport: str) -> None:
    """A connection that reaches a process with another token is refused, whatever its name."""
    writer, target, _, base = pair(nest, transport)
    stale = replace(target.engine.local_descriptor(), token="0" * 32)
    writer.open(stale.encode())
    (status,) = writer.transfer("write", stale.name, [(0, base, 100)], 1)
    assert status.state is TransferState.FAILED
    assert "is not here" in status.cause


def test_newer_descriptor_of_an_open_segment(nest: Nest, transport: str) -> None:
    writer, target, segment, _ = pair(nest, transport)
    more = target.allocate(MIB)
    with pytest.raises(TransferError, match="remote_offset"):
        writer.start("write", segment, [(0, more, MIB)], 1)
    assert writer.open(target.descriptor()) == segment
    target.window("writer#1", 1, [(more, MIB)])
    assert writer.transfer("write", segment, [(0, more, MIB)], 1)[0].state is TransferState.COMPLETED
    assert writer.transfer("read", segment, [(MIB, more, MIB)])[0].state is TransferState.COMPLETED
    assert writer.read(MIB, MIB) == writer.read(0, MIB)


def test_malformed_requests_are_refused_whole(nest: Nest, transport: str) -> None:
    writer, target, segment, base = pair(nest, transport)
    region = writer.region
    assert region is not None
    good = TransferRequest(Opcode.WRITE, region.address, segment, base, 100, 1)
    batch = writer.engine.allocate_batch(2)
    for bad, field in (
        (changed(good, segment="nobody"), "segment"),
        (changed(good, length=0), "length"),
        (changed(good, length=-5), "length"),
        (changed(good, local_address=region.address - 1), "local_address"),
        (changed(good, length=region.length + 1), "local_address"),
        (changed(good, remote_offset=base + region.length - 99), "remote_offset"),
        (changed(good, remote_offset=0), "remote_offset"),
    ):
        with pytest.raises(TransferError, match=f"^{field}=") as caught:
            writer.engine.submit(batch, [good, bad])
        assert caught.value.field == field
    with pytest.raises(TransferError, match="over its 2 requests"):
        writer.engine.submit(batch, [good] * 3)
    assert writer.engine.statuses(batch) == []
    assert target.engine.landed_bytes("writer#1", 1) == 0
    with pytest.raises(TransferError, match="nobody"):
        writer.engine.notify("nobody", 1, b"")
    with pytest.raises(TransferError, match="payload"):
        writer.engine.notify(segment, 1, bytes(40_000))
    with pytest.raises(TransferError, match="unknown or freed"):
        writer.engine.status(batch + 1, 0)  # type: ignore[arg-type]


@over("shm")
def test_windows_only_over_registered_memory(nest: Nest) -> None:
    target = nest.actor("target#1")
    base = target.allocate(4096)
    for offset, length in ((0, 10), (base, 4097), (base, 0), (base + 4096, 1)):
        with pytest.raises(TransferError, match="range="):
            target.engine.open_window("w", 1, [Range(offset, length)])


def test_memory_in_use_cannot_be_unregistered(nest: Nest, transport: str) -> None:
    writer, target, segment, base = pair(nest, transport)
    assert target.region is not None
    with pytest.raises(TransferError, match="open window"):
        target.engine.unregister_memory(target.region)
    target.fence("writer#1", 1)
    assert writer.transfer("read", segment, [(0, base, 100)])[0].state is TransferState.COMPLETED
    target.engine.unregister_memory(target.region)
    with pytest.raises(TransferError, match="not registered"):
        target.engine.unregister_memory(target.region)
    result: list[TransferStatus] = []

    def refused() -> bool:  # over shm the reader may use its map until it has heard that it is withdrawn
        result[:] = writer.transfer("read", segment, [(0, base, 100)])
        return result[0].state is TransferState.FAILED

    until(refused, "reads fail")
    assert result[0].cause == "no such memory at the peer"


def test_closing_a_segment_or_an_engine_fails_what_is_unfinished(nest: Nest, transport: str) -> None:
    writer, _, segment, base = pair(nest, transport, fault="{}")
    for close in (lambda: writer.engine.close_segment(segment), writer.engine.close):
        writer.engine.fault.freeze()
        if segment not in writer.engine._sender.links:
            writer.open(nest.actors[1].descriptor())
        batch = writer.start("write", segment, [(0, base, 4 * MIB)], 1)
        assert writer.engine.fault.wait_held(1, 10)
        close()
        assert writer.engine.wait_sync(batch, 10)
        status = writer.engine.status(batch, 0)
        assert status.state is TransferState.FAILED
        assert "closed" in status.cause
        assert not status.drained
    with pytest.raises(TransferError, match="closed"):
        writer.engine.allocate(4096, "cpu:0")


def test_traffic_class_goes_first(nest: Nest, transport: str) -> None:
    """With everything queued before it, a request of a more urgent class still finishes before the last of them."""
    writer, _, segment, base = pair(nest, transport, fault="{}", tcp_streams=1)
    region = writer.region
    assert region is not None
    writer.engine.fault.freeze()
    order: list[str] = []
    bulk = writer.engine.allocate_batch(40)
    request = TransferRequest(Opcode.WRITE, region.address, segment, base, 4 * MIB, 1, traffic_class=5)
    writer.engine.submit(bulk, [request] * 40)
    urgent = writer.engine.allocate_batch(1)
    writer.engine.submit(urgent, [changed(request, length=100, traffic_class=0)])
    writer.engine.on_done(urgent, lambda: order.append("urgent"))
    writer.engine.on_done(bulk, lambda: order.append("bulk"))
    writer.engine.fault.thaw()
    assert writer.engine.wait_sync(bulk, 60)
    until(lambda: len(order) == 2, "both callbacks")
    assert order == ["urgent", "bulk"]


@over("shm")
def test_descriptor_round_trip_and_refusals(nest: Nest) -> None:
    actor = nest.actor("target#1")
    actor.allocate(4096)
    descriptor = actor.engine.local_descriptor()
    assert SegmentDescriptor.decode(descriptor.encode()) == descriptor
    assert set(descriptor.endpoints) == {"shm", "tcp"}
    for broken in (b"", b"\xc1", descriptor.encode()[:-1], b"\x93\x01\x02\x03"):
        with pytest.raises(TransferError, match="malformed"):
            SegmentDescriptor.decode(broken)
    with pytest.raises(TransferError, match="version 7"):
        SegmentDescriptor.decode(replace(descriptor, version=7).encode())


@pytest.mark.parametrize(
    "options",
    [
        {"transports": ()},
        {"transports": ("rdmx",)},
        {"host": "0.0.0.0"},
        {"tcp_streams": 0},
        {"shm_slice_bytes": 1},
        {"ack_timeout_s": 0},
        {"fault": "{"},
        {"fault": '{"rules": [{"kind": "explode"}]}'},
        {"host": "not an address"},
    ],
)
def test_bad_config_is_refused(nest: Nest, options: dict[str, object]) -> None:
    with pytest.raises(TransferError) as caught:
        nest.actor("x#1", **options)
    assert caught.value.field is not None
    assert caught.value.field in {*options, "advertise_host"}


@over("tcp")
def test_port_in_use_is_said(nest: Nest) -> None:
    first = nest.actor("a#1", transports=("tcp",))
    port = int(first.engine.local_descriptor().endpoints["tcp"]["port"])
    with pytest.raises(TransferError, match=f"port {port}"):
        nest.actor("b#1", port=port)


def test_a_wrapper_that_cannot_be_loaded_is_named() -> None:
    for wrapper in ("kvmesh.nowhere:Wrapper", "kvmesh.transfer:Nothing"):
        with pytest.raises(TransferError, match=f"wrapper=.*{wrapper}") as caught:
            TransferEngine("one", EngineConfig(transports=("shm",), fault="{}", wrapper=wrapper))
        assert caught.value.field == "wrapper"
    unused = EngineConfig(transports=("shm",), wrapper="kvmesh.nowhere:Wrapper")  # no faults are asked for
    TransferEngine("one", unused).close()

"""Whatever a caller hands in that makes no sense: one TransferError, at once, that names the field and the value, and
the engine works on."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace as changed

from kvmesh.transfer import (
    EngineConfig,
    Opcode,
    Range,
    Region,
    SegmentDescriptor,
    TransferEngine,
    TransferError,
    TransferRequest,
    TransferState,
    checks,
)
from kvmesh.transfer.transports.tcp import nics as tcp_nics
from tests.transfer.conftest import TRANSPORTS, Nest, over
from tests.transfer.test_engine import pair

pytestmark = over("shm", "tcp")


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine("a#1", EngineConfig(transports=("tcp",))) as made:
        yield made


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_request_of_the_wrong_types_is_refused_and_the_next_one_goes(nest: Nest, transport: str) -> None:
    """One with a float in it used to end the thread that sends."""
    writer, _, segment, base = pair(nest, transport)
    region = writer.region
    assert region is not None
    good = TransferRequest(Opcode.WRITE, region.address, segment, base, 4096, 1)
    bad: list[tuple[str, Any]] = [
        ("length", 4096.0),
        ("length", np.float64(2048)),
        ("length", None),
        ("remote_offset", float(base)),
        ("remote_offset", -1),
        ("local_address", region),
        ("local_address", -1),
        ("opcode", "write"),  # used to be taken for a read
        ("traffic_class", "urgent"),
        ("handoff_epoch", 0),
        ("handoff_epoch", -1),
        ("handoff_epoch", 1 << 64),
        ("handoff_epoch", "1"),
        ("segment", None),
        ("segment", {}),
    ]
    batch = writer.engine.allocate_batch(3)
    for field, value in bad:
        for requests in ([changed(good, **{field: value})], [good, changed(good, **{field: value})]):
            with pytest.raises(TransferError, match=rf"^{field}=") as caught:
                writer.engine.submit(batch, requests)
            assert caught.value.field == field
    for requests in (good, None, 5, [good, 5], (one for one in [good])):
        with pytest.raises(TransferError, match=r"^requests"):
            writer.engine.submit(batch, requests)  # type: ignore[arg-type]
    assert writer.engine.statuses(batch) == []
    numpys = changed(good, length=np.int64(4096), local_address=np.uint64(region.address), remote_offset=np.int32(base))
    writer.engine.submit(batch, [good, numpys])
    assert writer.engine.wait_sync(batch, 30)
    for status in writer.engine.statuses(batch):
        assert (status.state, status.bytes_done) == (TransferState.COMPLETED, 4096), status
        assert type(status.bytes_done) is int


def test_plain_requests_are_not_copied() -> None:
    requests = [TransferRequest(Opcode.READ, 4096, "x", 4096, 10)] * 3
    assert checks.plain(requests) is requests
    assert checks.plain([]) == []


NUMBERS = np.zeros((64, 64), dtype=np.float32)
READ_ONLY = np.zeros(8)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        (READ_ONLY, r"ndarray \(8,\) is read-only"),
        (b"bytes", "bytes is read-only"),
        (NUMBERS[:, ::2], r"ndarray \(64, 32\) is not contiguous"),
        (np.asfortranarray(np.zeros((4, 5))), "not contiguous"),
        (torch.zeros(8, 4).t(), r"Tensor \(4, 8\) is not contiguous: register buffer.contiguous\(\)"),
        (torch.zeros(8, device="meta"), "memory of a meta device"),
        (np.zeros(0), "0 bytes"),
        (torch.zeros(0), "0 bytes"),
        (np.array([object()]), "Python objects"),
        ([1, 2], "list: not memory"),
        (None, "NoneType: not memory"),
        ((1, 2, 3), r"a pair must be \(address, length\)"),
        (("a", 2), "'a': must be a whole number"),
        ((4096.0, 2), "whole number"),
        ((4096, -1), "-1: must be positive"),
        ((0, 10), "0: must be positive"),
        ((0x1000, 4096), r"\(0x1000, 4096\): this process has no memory"),
        ((0x7F0000000000, 1 << 62), "no memory"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_memory_that_cannot_be_registered(engine: TransferEngine, buffer: object, words: str) -> None:
    with pytest.raises(TransferError, match=f"^buffer.*{words}"):
        engine.register_memory(buffer)


def test_memory_is_checked_to_its_last_page(engine: TransferEngine) -> None:
    """Where the kernel would end the process."""
    mine = engine.allocate(1 << 16)
    engine.unregister_memory(mine)
    assert mine.memory is not None
    engine.register_memory((mine.address, mine.length))
    with pytest.raises(TransferError, match="no memory at some"):
        engine.register_memory((mine.address + 1, 1 << 40))


def test_memory_registered_twice_says_what_is_in_the_way(engine: TransferEngine) -> None:
    array = np.zeros(1000)
    region = engine.register_memory(array)
    assert region.location == "cpu:0"
    with pytest.raises(TransferError, match=rf"overlaps the registered region at \[{region.address:#x}, "):
        engine.register_memory(array[10:20])
    with pytest.raises(TransferError, match=r"^location='cpu:1': this memory is registered already, with 'cpu:0'"):
        engine.register_memory(array, "cpu:1")


@pytest.mark.parametrize("location", ["cpu", "cpu0", "cpu:-1", "gpu:0", "", None, 0])
def test_locations(engine: TransferEngine, location: Any) -> None:
    for call in (lambda: engine.allocate(4096, location), lambda: engine.register_memory(bytearray(8), location)):
        with pytest.raises(TransferError, match=r'^location=.*must be "cpu:N"'):
            call()


def test_calls_of_the_engine(engine: TransferEngine) -> None:
    region = engine.allocate(4096)
    segment = engine.open_segment(engine.local_descriptor())
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: engine.allocate(0), "nbytes=0: must be positive"),
        (lambda: engine.allocate(1.5), "nbytes=1.5: must be a whole number"),  # type: ignore[arg-type]
        (lambda: engine.allocate_batch("x"), "n='x'"),  # type: ignore[arg-type]
        (lambda: engine.open_segment("b#1"), "descriptor='b#1': must be SegmentDescriptor"),  # type: ignore[arg-type]
        (lambda: engine.open_segment(b"junk"), "segment descriptor of 4 bytes is malformed"),
        (lambda: engine.unregister_memory(bytearray(3)), "region=.*must be Region"),  # type: ignore[arg-type]
        (lambda: engine.notify(segment, 1, "text"), "payload='text': must be bytes"),  # type: ignore[arg-type]
        (lambda: engine.notify(segment, -1, b""), "handoff_epoch=-1"),
        (lambda: engine.rails("nobody"), "segment='nobody': not open"),
        (lambda: engine.open_window("b#1", 0, [Range(4096, 1)]), "handoff_epoch=0: a write needs"),
        (lambda: engine.open_window("b#1", 1, [region]), "ranges=.*Range"),  # type: ignore[list-item]
        (lambda: engine.open_window("b#1", 1, Range(4096, 1)), "ranges=.*list"),  # type: ignore[arg-type]
        (lambda: engine.open_window(None, 1, []), "peer=None"),  # type: ignore[arg-type]
        (lambda: engine.fence("b#1", 1, float("nan")), "timeout_s=nan: must be a number of seconds"),
        (lambda: engine.fence("b#1", "1"), "handoff_epoch='1'"),  # type: ignore[arg-type]
        (lambda: engine.fence_peer("b#1", float("inf")), "timeout_s=inf"),
        (lambda: engine.wait_sync(engine.allocate_batch(1), -1.0), "timeout_s=-1.0"),
        (lambda: engine.register_memory(torch.zeros(4).to_sparse()), r"buffer: Tensor \(4,\) is no dense tensor"),
        (lambda: TransferEngine("a\0b"), "name="),
        (lambda: TransferEngine("x" * 2000), "name=.*at most 1024 bytes"),
        (lambda: TransferEngine("x", {"host": "::1"}), "config=.*EngineConfig"),  # type: ignore[arg-type]
    ]
    for call, words in calls:
        with pytest.raises(TransferError, match=f"^{words}") as caught:
            call()
        assert caught.value.field is not None
    assert engine.segment.regions[0].public == region


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"transports": "tcp"}, r"transports='tcp': must be a tuple of names, like \('tcp',\)"),
        ({"transports": ("tcp", "tcp")}, "transports='tcp,tcp': names must differ"),
        ({"nics": "eth0"}, "nics='eth0': must be a tuple"),
        ({"tcp_streams": 1.5}, "tcp_streams=1.5: must be a whole number"),
        ({"port": 80_000}, "port=80000: not in 0..65535"),
        ({"port": "7000"}, "port='7000'"),
        ({"rdma_port": -1}, "rdma_port=-1"),
        ({"fence_grace_s": -1}, "fence_grace_s=-1"),
        ({"request_timeout_s": float("nan")}, "request_timeout_s=nan: must be a finite number"),
        ({"close_timeout_s": float("inf")}, "close_timeout_s=inf"),
        ({"request_timeout_s": "30"}, "request_timeout_s='30': must be a number"),
        ({"tcp_socket_bytes": -1}, "tcp_socket_bytes=-1"),
        ({"topology": {"cpu:0": [["eth0"]]}}, "topology=.*must be str, not dict"),
        ({"tcp_zerocopy": 1}, "tcp_zerocopy=1: must be bool"),
    ],
)
def test_settings(options: dict[str, Any], words: str) -> None:
    with pytest.raises(TransferError, match=f"^{words}") as caught:
        EngineConfig(**options)
    assert caught.value.field == next(iter(options))


def test_a_list_of_names_will_do() -> None:
    config = EngineConfig(transports=["tcp"], tcp_streams=np.int64(3))  # type: ignore[arg-type]
    assert (config.transports, config.tcp_streams) == (("tcp",), 3)
    assert type(config.tcp_streams) is int


def test_why_a_segment_cannot_be_reached() -> None:
    with (
        TransferEngine("s#1", EngineConfig(transports=("shm",))) as shm,
        TransferEngine("t#1", EngineConfig(transports=("tcp",))) as tcp,
    ):
        with pytest.raises(TransferError, match=r"\(tcp: it has none\); its transports: shm"):
            tcp.open_segment(shm.local_descriptor())
        elsewhere = replace(shm.local_descriptor(), name="s#2", machine="another")
        with pytest.raises(TransferError, match=r"\(shm: it is on another host"):
            shm.open_segment(elsewhere)
        contained = replace(shm.local_descriptor(), name="s#3")
        contained.endpoints["shm"]["network"] = "net:[1]"
        with pytest.raises(TransferError, match=r"\(shm: it is in another network namespace"):
            shm.open_segment(contained)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_told_and_leaves_the_parent_alone(engine: TransferEngine) -> None:
    """A child that closed the engine it had inherited used to shut the parent's listener."""
    region = engine.allocate(4096)
    mine, its = os.pipe()
    child = os.fork()
    if child == 0:
        said = ""
        try:
            engine.allocate(4096)
        except TransferError as err:
            said = err.message
        engine.close()
        os.write(its, said.encode())
        os._exit(0)
    os.close(its)
    with open(mine, "rb") as pipe:
        assert pipe.read() == b"the transfer engine was made before this process was forked: make one here"
    assert os.waitpid(child, 0)[1] == 0
    with TransferEngine("later#1", EngineConfig(transports=("tcp",))) as later:
        here = later.allocate(4096)
        segment = later.open_segment(engine.local_descriptor())
        batch = later.allocate_batch(1)
        later.submit(batch, [TransferRequest(Opcode.READ, here.address, segment, region.base_offset, 4096)])
        assert later.wait_sync(batch, 30)
        assert later.status(batch, 0).state is TransferState.COMPLETED


def test_a_region_is_what_registering_returned(engine: TransferEngine) -> None:
    with pytest.raises(TransferError, match="region at offset 999999 is not registered"):
        engine.unregister_memory(Region(0, 5, 999_999, "cpu:0", None))


# ── what requests are told ────────────────────────────────────────────────────────────────────────


def cause_of_read(engine: TransferEngine, descriptor: SegmentDescriptor) -> str:
    """Of the first region there, which cannot be had."""
    region = engine.allocate(4096)
    segment = engine.open_segment(descriptor)
    batch = engine.allocate_batch(1)
    offset = descriptor.regions[0].base_offset
    engine.submit(batch, [TransferRequest(Opcode.READ, region.address, segment, offset, 8)])
    assert engine.wait_sync(batch, 30)
    status = engine.status(batch, 0)
    assert status.state is TransferState.FAILED
    return status.cause


def test_memory_that_shm_cannot_read() -> None:
    with (
        TransferEngine("s#1", EngineConfig(transports=("shm",))) as owner,
        TransferEngine("s#2", EngineConfig(transports=("shm",))) as reader,
    ):
        owner.register_memory(bytearray(8))
        cause = cause_of_read(reader, owner.local_descriptor())
        assert cause.startswith("shm: cannot carry this memory, and no other transport reaches s#1")


def test_a_peer_that_is_not_there_is_named_by_its_address(engine: TransferEngine) -> None:
    with TransferEngine("gone#1", EngineConfig(transports=("tcp",))) as gone:
        gone.register_memory(bytearray(8))
        descriptor = gone.local_descriptor()
    port = descriptor.endpoints["tcp"]["port"]
    assert cause_of_read(engine, descriptor) == f"tcp: [Errno 111] Connection refused: 127.0.0.1:{port}"
    nowhere = replace(descriptor, name="gone#2", endpoints={"tcp": {"host": "no.such.host.invalid", "port": port}})
    assert cause_of_read(engine, nowhere).startswith("tcp: host 'no.such.host.invalid': ")


def test_an_address_that_is_being_checked_for_duplicates_is_not_used() -> None:
    """For the second after a link came up nobody can listen on its link-local address."""

    def told(flags: int) -> tcp_nics.Address | None:
        attribute = struct.pack("=HH", 20, 1) + ipaddress.ip_address("fe80::7").packed
        return tcp_nics._address(struct.pack("=BBBBI", socket.AF_INET6, 64, flags, 253, 1) + attribute)

    assert told(0x40) is None
    found = told(0x80)  # permanent
    assert found is not None
    assert (str(found.ip), found.index) == ("fe80::7", 1)

"""The fault transport does what its rules say, and the engine lives with it."""

from __future__ import annotations

import json

import pytest

from kvmesh.errors import TransferError
from kvmesh.testing.fault.rules import Rule
from kvmesh.transfer import EngineConfig, Opcode, TransferRequest, TransferState
from tests.support.transfer.peer import Actor
from tests.transfer.conftest import Nest, until

MIB = 1 << 20


def pair(nest: Nest, transport: str, *rules: dict[str, object], **options: object) -> tuple[Actor, Actor, str, int]:
    script = json.dumps({"seed": 3, "rules": rules})
    base: dict[str, object] = {"ack_timeout_s": 0.2, "backoff_s": 0.01, "fault": script}
    config = EngineConfig(transports=(transport,), **(base | options))  # type: ignore[arg-type]
    target, writer = nest.actor("target#1", EngineConfig(transports=(transport,))), nest.actor("writer#1", config)
    offset = target.allocate(MIB, seed=2)
    writer.allocate(MIB, seed=1)
    segment = writer.open(target.descriptor())
    target.window("writer#1", 1, [(offset, MIB)])
    return writer, target, segment, offset


@pytest.mark.parametrize("opcode", ["write", "read"])
@pytest.mark.parametrize("kind", ["drop", "cut_from", "delay", "duplicate"])
def test_survived(nest: Nest, transport: str, kind: str, opcode: str) -> None:
    writer, target, segment, base = pair(nest, transport, {"kind": kind, "count": 1, "delay_ms": 20, "op": opcode})
    epoch = 1 if opcode == "write" else 0
    statuses = writer.transfer(opcode, segment, [(0, base, MIB), (0, base, MIB)], epoch)
    assert {s.state for s in statuses} == {TransferState.COMPLETED}
    assert writer.read(0, MIB) == target.read(0, MIB)
    counters = writer.engine.counters()
    assert counters[f"fault.{kind}"] == 1
    assert counters.get("frames_resent", 0) == (1 if kind in ("drop", "cut_from") else 0)


@pytest.mark.parametrize("opcode", ["write", "read"])
def test_corrupt_changes_one_byte_and_not_the_source(nest: Nest, transport: str, opcode: str) -> None:
    writer, target, segment, base = pair(nest, transport, {"kind": "corrupt", "count": 1})
    sources = writer.read(0, MIB), target.read(0, MIB)
    epoch = 1 if opcode == "write" else 0
    assert writer.transfer(opcode, segment, [(0, base, 10_000)], epoch)[0].state is TransferState.COMPLETED
    mine, its = writer.read(0, 10_000), target.read(0, 10_000)
    assert sum(a != b for a, b in zip(mine, its, strict=True)) == 1
    assert (writer.read(0, MIB), target.read(0, MIB))[opcode == "read"] == sources[opcode == "read"]


def test_cut_for_good_ends_in_a_cause(nest: Nest, transport: str) -> None:
    writer, _, segment, base = pair(nest, transport, {"kind": "cut_to", "peer": "target*"}, max_sendings=2)
    (status,) = writer.transfer("write", segment, [(0, base, 100)], 1)
    assert (status.state, status.cause, status.drained) == (TransferState.FAILED, "no answer", True)


def test_rules_match_by_peer_operation_and_turn(nest: Nest, transport: str) -> None:
    writer, _, segment, base = pair(
        nest,
        transport,
        {"kind": "cut_to", "peer": "somebody*"},
        {"kind": "cut_to", "op": "notify"},
        {"kind": "cut_to", "transport": "none"},
        {"kind": "drop", "op": "write", "after": 1, "count": 1},
        max_sendings=1,
    )
    states = [writer.transfer("write", segment, [(0, base, 100)], 1)[0].state.value for _ in range(3)]
    assert states == ["completed", "failed", "completed"]
    assert writer.transfer("read", segment, [(0, base, 100)])[0].state is TransferState.COMPLETED
    assert writer.notify(segment, 0, b"x").state is TransferState.FAILED


def test_duplicated_and_resent_end_marks_are_delivered_once(nest: Nest, transport: str) -> None:
    writer, target, segment, _ = pair(
        nest,
        transport,
        {"kind": "duplicate", "op": "notify", "count": 1},
        {"kind": "cut_from", "op": "notify", "after": 1, "count": 1},
    )
    assert writer.notify(segment, 1, b"one").state is TransferState.COMPLETED
    assert writer.notify(segment, 1, b"two").state is TransferState.COMPLETED
    assert [n.payload for n in target.notified] == [b"one", b"two"]


@pytest.mark.parametrize("fenced", [True, False])
def test_given_up_and_yet_under_way(nest: Nest, transport: str, fenced: bool) -> None:
    """A frame that the writer gave up lands late all the same, unless the target fences: `drained` does not lie."""
    writer, target, segment, base = pair(nest, transport)
    before = target.read(0, MIB)
    writer.engine.fault.freeze("target*", "write")
    (status,) = writer.transfer("write", segment, [(0, base, MIB)], 1)
    assert (status.state, status.drained) == (TransferState.FAILED, False)
    if fenced:
        target.engine.fence("writer#1", 1)
    assert writer.engine.fault.thaw() >= 1
    if fenced:
        # what is answered later than this NOTIFY was asked later: one socket on shm, and thawing sent before it
        assert writer.notify(segment, 0, b"x").state is TransferState.COMPLETED
        assert target.read(0, MIB) == before
    else:
        until(lambda: target.read(0, MIB) == writer.read(0, MIB), "the late packet")


def test_chance_is_seeded(nest: Nest, transport: str) -> None:
    def draw() -> list[str]:
        writer, _, segment, base = pair(
            nest, transport, {"kind": "drop", "probability": 0.5}, max_sendings=1, ack_timeout_s=0.25
        )
        return [writer.transfer("write", segment, [(0, base, 1)], 1)[0].state.value for _ in range(10)]

    first = draw()
    assert first == draw()
    assert set(first) == {"completed", "failed"}


def test_rules_added_later_and_cleared(nest: Nest, transport: str) -> None:
    writer, _, segment, base = pair(nest, transport, max_sendings=1)
    writer.engine.fault.add(Rule(kind="drop"))
    assert writer.transfer("write", segment, [(0, base, 100)], 1)[0].state is TransferState.FAILED
    writer.engine.fault.clear()
    assert writer.transfer("write", segment, [(0, base, 100)], 1)[0].state is TransferState.COMPLETED


def verified(writer: Actor, opcode: str, segment: str, base: int, nbytes: int) -> tuple[TransferState, str]:
    assert writer.region is not None
    batch = writer.engine.allocate_batch(1)
    epoch = 1 if opcode == "write" else 0
    request = TransferRequest(Opcode(opcode), writer.region.address, segment, base, nbytes, epoch, verify=True)
    writer.engine.submit(batch, [request])
    (status,) = writer.finish(batch)
    return status.state, status.cause


@pytest.mark.parametrize("opcode", ["write", "read"])
def test_corruption_is_found_and_mended_when_asked_for(nest: Nest, transport: str, opcode: str) -> None:
    writer, target, segment, base = pair(nest, transport, {"kind": "corrupt", "op": opcode, "count": 1})
    assert verified(writer, opcode, segment, base, 300_000) == (TransferState.COMPLETED, "")
    assert writer.read(0, 300_000) == target.read(0, 300_000)
    assert writer.counter("fault.corrupt") == 1


def test_corruption_that_goes_on_is_a_failure(nest: Nest, transport: str) -> None:
    writer, _, segment, base = pair(nest, transport, {"kind": "corrupt", "op": "write"})
    state, cause = verified(writer, "write", segment, base, 1000)
    assert state is TransferState.FAILED
    assert "checksum" in cause


def test_a_checksum_that_lies_is_not_believed_for_ever(nest: Nest, transport: str) -> None:
    """The bytes are right and their first checksum is not: they are sent again, and completed."""
    writer, target, segment, base = pair(nest, transport, {"kind": "corrupt", "op": "checksum", "count": 1})
    assert verified(writer, "write", segment, base, 1000) == (TransferState.COMPLETED, "")
    assert writer.read(0, 1000) == target.read(0, 1000)


def test_a_rail_that_is_down_says_so_and_comes_back(nest: Nest, transport: str) -> None:
    writer, target, segment, base = pair(nest, transport, {"kind": "down"}, rest_s=0.01)
    (status,) = writer.transfer("write", segment, [(0, base, 100)], 1)
    assert (status.state, status.drained) == (TransferState.FAILED, True)
    assert "link down (fault)" in status.cause
    writer.engine.fault.clear()
    until(
        lambda: writer.transfer("write", segment, [(0, base, 100)], 1)[0].state is TransferState.COMPLETED,
        "the rail is tried again after its rest",
    )
    assert writer.read(0, 100) == target.read(0, 100)


def test_what_a_down_rail_does_not_carry_goes_over_the_next_transport(nest: Nest) -> None:
    script = json.dumps({"rules": [{"kind": "down", "transport": "shm"}]})
    writer, target = nest.actor("writer#1", fault=script), nest.actor("target#1")
    writer.allocate(MIB, seed=1)
    base = target.allocate(MIB)
    segment = writer.open(target.descriptor())
    target.window("writer#1", 1, [(base, MIB)])
    assert writer.transfer("write", segment, [(0, base, MIB)], 1)[0].state is TransferState.COMPLETED
    assert writer.counter("tcp.write_bytes") == MIB
    assert target.read(0, MIB) == writer.read(0, MIB)


def test_a_slow_link_delivers_everything_and_is_not_taken_for_dead(nest: Nest, transport: str) -> None:
    """1 MiB over 20 Mbit/s takes 0.4 s: far longer than what is waited for a silent path."""
    writer, target, segment, base = pair(
        nest, transport, {"kind": "bandwidth", "bandwidth_mbps": 20}, ack_timeout_s=0.05
    )
    statuses = writer.transfer("write", segment, [(i * MIB // 8, base + i * MIB // 8, MIB // 8) for i in range(8)], 1)
    assert {s.state for s in statuses} == {TransferState.COMPLETED}
    assert target.read(0, MIB) == writer.read(0, MIB)
    assert writer.counter("frames_resent") == 0


def test_what_waits_for_a_slow_link_is_taken_back_by_cancel(nest: Nest, transport: str) -> None:
    writer, target, segment, base = pair(nest, transport, {"kind": "bandwidth", "bandwidth_mbps": 0.001})
    before = target.read(0, MIB)
    batch = writer.start("write", segment, [(0, base, MIB)], 1)
    writer.engine.cancel(batch)
    (status,) = writer.finish(batch)
    assert (status.state, status.bytes_done, status.drained) == (TransferState.CANCELLED, 0, True)
    assert target.read(0, MIB) == before


def test_a_frozen_read_that_was_given_up_lands_no_more(nest: Nest, transport: str) -> None:
    """It is settled when it is given up: its memory may be used for something else."""
    writer, _, segment, base = pair(nest, transport, max_sendings=1)
    before = writer.read(0, MIB)
    writer.engine.fault.freeze(op="read")
    (status,) = writer.transfer("read", segment, [(0, base, MIB)])
    assert (status.state, status.drained) == (TransferState.FAILED, True)
    writer.engine.fault.thaw()
    assert writer.transfer("read", segment, [(MIB - 1, base, 1)])[0].state is TransferState.COMPLETED
    assert writer.read(0, MIB - 1) == before[:-1]


def test_a_script_is_replaced_whole_or_not_at_all(nest: Nest) -> None:
    writer = nest.actor("writer#1", fault='{"rules": [{"kind": "drop"}]}')
    control = writer.engine.fault
    with pytest.raises(TransferError, match="explode"):
        control.load('{"rules": [{"kind": "delay", "delay_ms": 1}, {"kind": "explode"}]}')
    assert control.rules() == [Rule(kind="drop")]
    control.load('{"rules": [{"kind": "delay", "delay_ms": 1.5, "jitter_ms": 3, "nic": "eth*"}]}')
    assert control.rules() == [Rule(kind="delay", delay_ms=1.5, jitter_ms=3, nic="eth*")]
    assert not control.remove(Rule(kind="drop"))
    assert control.remove(Rule(kind="delay", delay_ms=1.5, jitter_ms=3, nic="eth*"))
    assert control.rules() == []

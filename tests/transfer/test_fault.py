"""The fault transport does what its rules say, and the engine lives with it."""

from __future__ import annotations

import json

import pytest

from kvmesh.transfer import EngineConfig, TransferState
from kvmesh.transfer.fault import Rule
from tests.transfer.conftest import Nest, until
from tests.transfer.peer import Actor

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
        {"kind": "cut_to", "transport": "rdma"},
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
            nest, transport, {"kind": "drop", "probability": 0.5}, max_sendings=1, ack_timeout_s=0.02
        )
        return [writer.transfer("write", segment, [(0, base, 1)], 1)[0].state.value for _ in range(12)]

    first = draw()
    assert first == draw()
    assert set(first) == {"completed", "failed"}


def test_rules_added_later_and_cleared(nest: Nest, transport: str) -> None:
    writer, _, segment, base = pair(nest, transport, max_sendings=1)
    writer.engine.fault.add(Rule(kind="drop"))
    assert writer.transfer("write", segment, [(0, base, 100)], 1)[0].state is TransferState.FAILED
    writer.engine.fault.clear()
    assert writer.transfer("write", segment, [(0, base, 100)], 1)[0].state is TransferState.COMPLETED

"""What rank processes count is in the metrics of their front: bytes by transport, operation and class, errors, and gone
with the rank."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvmesh.ranks import protocol as m
from kvmesh.telemetry import names
from kvmesh.transfer import TrafficClass
from tests.support.rank_driver import Driver, rank

BLOCK = 8192


@pytest.fixture(autouse=True)
def only_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_active", [])
    names.activate("node")


def shown(name: str, *by: str) -> dict[tuple[str, ...], float]:
    """Samples of one name, summed by these labels."""
    total: dict[tuple[str, ...], float] = defaultdict(float)
    for family in text_string_to_metric_families(names.render()[0].decode()):
        for sample in family.samples:
            if sample.name == name:
                total[tuple(sample.labels[label] for label in by)] += sample.value
    return dict(total)


async def pinged(driver: Driver, condition: Callable[[], bool]) -> None:
    """As the front does it: ask until the answer says so."""
    async with asyncio.timeout(60):
        while not condition():
            driver.client.ping()
            await asyncio.sleep(0.01)


@pytest.fixture(params=["shm", "tcp"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[tuple[str, Driver, Driver]]:
    async with rank("a", None, (request.param,)) as a, rank("b", None, (request.param,)) as b:
        yield request.param, a, b


async def test_bytes_by_transport_operation_and_class(pair: tuple[str, Driver, Driver]) -> None:
    transport, holder, reader = pair
    theirs, ours = holder.client.ready, reader.client.ready
    reader.client.send(m.OpenSegment(theirs.descriptor))
    far = time.monotonic_ns() + 60_000_000_000
    for ticket, (klass, blocks) in enumerate(((TrafficClass.PREFETCH, 3), (TrafficClass.BACKGROUND, 5))):
        offsets = tuple(theirs.extent_base_offset + i * BLOCK for i in range(blocks))
        landing = tuple(ours.extent_base_offset + i * BLOCK for i in range(blocks))
        reader.client.send(m.PullOpen(ticket, theirs.engine_name, offsets, landing, BLOCK, far, klass))
        ended = await reader.take(m.PullEnded)
        assert ended.cause == ""
        assert ended.carried.rails == ((transport, blocks * BLOCK),) and ended.carried.resent == 0
    labels = ("rank", "transport", "operation", "class")

    def moved() -> dict[tuple[str, ...], float]:
        return shown("kvmesh_node_transfer_bytes_total", *labels)

    expected = {
        ("0", transport, "read", "prefetch"): 3.0 * BLOCK,
        ("0", transport, "read", "background"): 5.0 * BLOCK,
    }
    await pinged(reader, lambda: moved() == expected)
    requests = shown("kvmesh_node_transfer_requests_total", "class", "state")
    assert (requests["prefetch", "completed"], requests["background", "completed"]) == (3, 5)
    assert shown("kvmesh_node_transfer_inflight_bytes", "transport") == {(transport,): 0}
    frames = sum(shown("kvmesh_node_transfer_frames_total").values())
    assert sum(shown("kvmesh_node_transfer_latency_seconds_count").values()) == frames >= 2
    assert shown("kvmesh_node_transfer_latency_seconds_sum")[()] > 0
    assert shown("kvmesh_node_transfer_rails_count", "state") == {("ready",): 1}
    # The rank's process ends, and what it counted is not shown as if it went on.
    await reader.client.close()
    assert moved() == {}


async def test_errors_have_a_cause(pair: tuple[str, Driver, Driver]) -> None:
    transport, holder, reader = pair
    theirs, ours = holder.client.ready, reader.client.ready
    reader.client.send(m.OpenSegment(theirs.descriptor))
    await holder.client.close()
    far = time.monotonic_ns() + 2_000_000_000
    base = theirs.extent_base_offset
    reader.client.send(m.PullOpen(1, theirs.engine_name, (base,), (ours.extent_base_offset,), BLOCK, far))
    ended = await reader.take(m.PullEnded)
    assert ended.cause and ended.arrived == ()

    def errors() -> dict[tuple[str, ...], float]:
        return shown("kvmesh_node_transfer_errors_total", "transport", "cause")

    await pinged(reader, lambda: sum(errors().values()) > 0)
    assert {name for name, _ in errors()} == {transport}
    assert all(cause and len(cause) < 40 for _, cause in errors())

"""Growth: twice the work costs twice the steps, and nothing stays behind. Steps are lines of the sender's own files,
counted by the interpreter: no clock decides."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from kvmesh.transfer import sender as core_module
from kvmesh.transfer.api import BatchId, TransferState
from kvmesh.transfer.config import EngineConfig
from kvmesh.transfer.transports.base import FrameLimits
from tests.support.transfer.fakes import FakeTransport, World

KIB = 1 << 10
FOLDER = core_module.__file__.rsplit("/", 1)[0]


def steps(work: Callable[[], None]) -> int:
    """Lines executed in `kvmesh/transfer` by `work`. A loop hidden in C (a scan of a list) counts as one line: the
    containers that the sender holds are covered by `test_memory_is_flat` and by the choice of containers."""
    lines = 0

    def inside(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return inside

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        return inside if frame.f_code.co_filename.startswith(FOLDER) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


def world(links: int, **options: object) -> World:
    limits = FrameLimits(64 * KIB, 64 * KIB, 64, 4)
    config = EngineConfig(max_endpoints=100_000, **options)  # type: ignore[arg-type]
    made = World((FakeTransport("rdma", limits, (("a", "x"), ("b", "y"))),), config)
    for i in range(links):
        made.open(f"peer#{i}")
    return made


def deliver(made: World) -> int:
    """Answers everything in order; frames."""
    transport, frames = made.transports[0], 0
    while transport.posted:
        made.now += 1e-5
        transport.done(next(iter(transport.posted.values())))
        frames += 1
    return frames


def transfer(made: World, links: int, slices: int) -> None:
    """`slices` requests of one slice, dealt over the links, all queued before the first is answered."""
    batches = [made.submit(*[64 * KIB] * (slices // links), peer=f"peer#{i}") for i in range(links)]
    assert deliver(made) == slices // links * links
    for batch in batches:
        known = made.sender.batch(batch)
        assert set(known.states) == {TransferState.COMPLETED}
        del made.sender.batches[batch]


@pytest.mark.parametrize("links", [1, 64])
@pytest.mark.slow
def test_steps_grow_with_slices(links: int) -> None:
    def cost(slices: int) -> float:
        made = world(links)
        return steps(lambda: transfer(made, links, slices)) / slices

    assert cost(4096) < 1.3 * cost(512)


def test_steps_a_slice_do_not_grow_with_peers() -> None:
    def cost(links: int) -> float:
        made = world(links, nic_inflight_bytes=4 << 20)  # far less than all of them could post
        return steps(lambda: transfer(made, links, 2048)) / 2048

    assert cost(256) < 2.0 * cost(8)


def test_steps_of_cancels_and_deadlines_grow_with_what_they_end() -> None:
    def cost(batches: int) -> float:
        made = world(4, nic_inflight_bytes=1 << 20)
        queued: list[BatchId] = []

        def work() -> None:
            for i in range(batches):
                queued.append(made.submit(64 * KIB, 64 * KIB, peer=f"peer#{i % 4}", timeout_s=10.0))
            for batch in queued[::2]:
                made.cancel(batch)
            made.wait(11.0)
            deliver(made)

        lines = steps(work)
        assert all(s.state.final for batch in queued for s in made.statuses(batch))
        return lines / batches

    assert cost(2048) < 1.3 * cost(256)


@pytest.mark.slow
def test_tens_of_thousands_of_slices_over_256_peers() -> None:
    made = world(256)
    transfer(made, 256, 25_600)


def test_memory_is_flat() -> None:
    """After any number of transfers the sender holds as many objects as after few."""
    made = world(16)

    def held(rounds: int) -> int:
        for _ in range(rounds):
            transfer(made, 16, 256)
            made.wait(0.1)
        gc.collect()
        return len(gc.get_objects())

    held(3)
    few = held(1)
    many = held(40)
    assert many - few < 300
    assert len(made.sender._deadlines) < 200
    assert not made.sender.inflight
    assert not made.sender._live

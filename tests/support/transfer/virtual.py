"""One sender in virtual time over made-up transports, for the tests of the sender."""

from __future__ import annotations

from kvmesh.transfer.api import TrafficClass, TransferState
from kvmesh.transfer.config import EngineConfig
from kvmesh.transfer.transports.base import Frame, FrameLimits
from tests.support.transfer.fakes import FakeTransport, World

KIB = 1 << 10
MIB = 1 << 20
LIMITS = FrameLimits(64 * KIB, 256 * KIB, 16, 4)
HANDOFF, PREFETCH, BACKGROUND = TrafficClass.HANDOFF, TrafficClass.PREFETCH, TrafficClass.BACKGROUND


def world(*pairs: tuple[str, str], transports: tuple[FakeTransport, ...] = (), **options: object) -> World:
    made = World(
        transports or (FakeTransport("rdma", LIMITS, pairs or (("", ""),)),),
        EngineConfig(**options),  # type: ignore[arg-type]
    )
    made.open()
    return made


def rdma(made: World) -> FakeTransport:
    return made.transports[0]


def run(made: World, seconds: float = 0.001) -> list[Frame]:
    """Answers every frame, oldest first, each after a while; returns them in order."""
    order = []
    while any(t.posted for t in made.transports):
        for t in made.transports:
            for frame in list(t.posted.values())[:1]:
                made.now += seconds
                t.done(frame)
                order.append(frame)
    return order


def states(made: World, batch: object) -> set[TransferState]:
    return {s.state for s in made.statuses(batch)}  # type: ignore[arg-type]

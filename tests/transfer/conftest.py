"""Engines and peer processes that are closed after each test, and the proof that nothing of them is left."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvmesh.transfer import EngineConfig
from tests.transfer.peer import Actor, Peer


def open_files() -> dict[str, str]:
    """Descriptor → what it is; the one that lists the folder left out."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
    return found


def engine_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("kvmesh-")]


def until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Waits for something that gives no event."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        pause.wait(0.002)


class Nest:
    """Makes actors here and peers elsewhere, and ends them."""

    def __init__(self) -> None:
        self.actors: list[Actor] = []
        self.peers: list[Peer] = []

    def actor(self, name: str, config: EngineConfig | None = None, **options: object) -> Actor:
        actor = Actor(name, config or EngineConfig(**options))  # type: ignore[arg-type]
        self.actors.append(actor)
        return actor

    def peer(self, name: str, config: EngineConfig | None = None, **options: object) -> Peer:
        peer = Peer(name, config or EngineConfig(**options))  # type: ignore[arg-type]
        self.peers.append(peer)
        return peer

    def close(self) -> None:
        for actor in self.actors:
            actor.close()
        for peer in self.peers:
            peer.end()


@pytest.fixture
def nest() -> Iterator[Nest]:
    before = open_files()
    made = Nest()
    yield made
    made.close()
    assert engine_threads() == []
    after = open_files()
    assert {fd: name for fd, name in after.items() if before.get(fd) != name} == {}


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)

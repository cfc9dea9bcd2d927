"""Engines and peer processes that are closed after each test, and the proof that nothing of them is left.

The behaviour tests run over each of TRANSPORTS. Where there are RDMA devices (the guest of tests/rdma) the same files
run over rdma:

    KVMESH_TEST_TRANSPORTS=rdma KVMESH_TEST_RDMA_DEVICES=rxa0,rxa1/rxb0,rxb1 pytest tests/transfer

with the first set of devices for engines of the test's own process and the second for those of peer processes.
KVMESH_TEST_TLS=1 has tcp speak TLS in all of them, and the peers that speak its wire by hand (`raw`), too.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from kvmesh.rpc.authorisation import ROLE_NAME
from kvmesh.rpc.certificates import Certificates, make_certificates
from kvmesh.transfer import EngineConfig
from kvmesh.transfer.config import tls_fields
from tests.support.transfer import raw
from tests.support.transfer.peer import Actor, Peer, forker

TRANSPORTS = tuple(name for name in os.environ.get("KVMESH_TEST_TRANSPORTS", "shm,tcp").split(",") if name)
_DEVICES = [
    tuple(filter(None, names.split(","))) for names in os.environ.get("KVMESH_TEST_RDMA_DEVICES", "/").split("/")
]
TLS = bool(os.environ.get("KVMESH_TEST_TLS"))
plain_only = pytest.mark.skipif(TLS, reason="about what only plain tcp does")


def over(*transports: str) -> pytest.MarkDecorator:
    """For tests of what only these transports do, or can do: they are run when one of them is asked for."""
    missing = not set(transports) & set(TRANSPORTS)
    return pytest.mark.skipif(missing, reason=f"about {', '.join(transports)}; asked for: {', '.join(TRANSPORTS)}")


def cannot_hold(transport: str, where: str, reason: str) -> None:
    """Skips a test over the one transport for which its claim is not made."""
    if transport == where:
        pytest.skip(f"{transport}: {reason}")


def equipped(config: EngineConfig, process: int) -> EngineConfig:
    """With the RDMA devices of the test's process (0) or of its peers' (1), unless the test has chosen; and with TLS
    where that was asked for."""
    if TLS and not config.tls_cert:
        files = replace(_certificates().files, tls_server_name=ROLE_NAME)  # whatever address a test listens at
        config = replace(config, **tls_fields(files, network="untrusted"))  # type: ignore[arg-type]
    if "rdma" not in config.transports or config.nics:
        return config
    return replace(config, nics=_DEVICES[process if process < len(_DEVICES) else 0])


@cache
def _certificates() -> Certificates:
    folder = Path(tempfile.mkdtemp(prefix="kvmesh-test-tls-"))
    atexit.register(shutil.rmtree, folder)
    return make_certificates(folder)


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


def until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
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
        actor = Actor(name, equipped(config or EngineConfig(**options), 0))  # type: ignore[arg-type]
        self.actors.append(actor)
        return actor

    def peer(self, name: str, config: EngineConfig | None = None, **options: object) -> Peer:
        peer = Peer(name, equipped(config or EngineConfig(**options), 1))  # type: ignore[arg-type]
        self.peers.append(peer)
        return peer

    def close(self) -> None:
        for actor in self.actors:
            actor.close()
        for peer in self.peers:
            peer.end()


@pytest.fixture(autouse=True)
def raw_peers_speak_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    if TLS:
        monkeypatch.setattr(raw, "tls_files", _certificates())


@pytest.fixture
def nest() -> Iterator[Nest]:
    forker()  # has a descriptor here for as long as this process lives
    before = open_files()
    made = Nest()
    yield made
    made.close()
    assert engine_threads() == []
    after = open_files()
    assert {fd: name for fd, name in after.items() if before.get(fd) != name} == {}


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)

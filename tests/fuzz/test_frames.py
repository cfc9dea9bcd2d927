"""The frames of the fast path and of the transfer engine, fuzzed: a bad one costs its own connection, nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import struct

import pytest

from kvmesh.rpc.fastpath import frames
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.transfer import EngineConfig, TransferState
from kvmesh.transfer.transports import wire
from kvmesh.transfer.transports.shm.path import raw_address
from tests.fuzz.conftest import Noise
from tests.support.fastpath_service import LIFE, opened, serving
from tests.support.hostile import mangled
from tests.support.services import until as eventually
from tests.support.transfer.peer import Actor
from tests.support.transfer.raw import greeting
from tests.transfer.conftest import Nest, nest, until  # noqa: F401  a fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

KIB = 1 << 10
BATCH = 25  # inputs between two looks at whether all is well


def fast_path_input(rng: random.Random) -> list[bytes]:
    """A connection's bytes: a greeting or none, then calls, some of them mangled."""
    parts = [frames.hello(LIFE)] if rng.random() < 0.8 else [rng.randbytes(rng.randint(1, 200))]
    for _ in range(rng.randint(0, 4)):
        name = rng.choice((b"Lease", b"GetStore", b"Pin", b"NoSuchMethod", rng.randbytes(5)))
        body = rng.choice((pb.LeaseRequest(keys=rng.randbytes(32)).SerializeToString(), rng.randbytes(40), b""))
        kind = rng.choice((frames.CALL, frames.CALL, frames.CANCEL, frames.ANSWER, rng.randint(0, 255)))
        whole = frames.encode(kind, rng.randrange(1 << 32), body, name if kind == frames.CALL else b"", 1000)
        parts.append(whole if rng.random() < 0.5 else mangled(rng, whole))
    return parts


async def test_fast_path(noise: Noise, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(kind="tcp") as (server, _, way):

        async def say(parts: list[bytes]) -> None:
            _, writer = await asyncio.open_connection(*way)
            with contextlib.suppress(ConnectionError):
                for part in parts:
                    writer.write(part)
                    await writer.drain()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

        async def all_gone() -> bool:
            return not len(server) and not server.tasks

        async def well(last: list[list[bytes]]) -> None:
            try:
                async with asyncio.timeout(20), opened(way) as door:
                    body = pb.LeaseRequest(keys=b"k" * 16).SerializeToString()
                    assert pb.LeaseResponse.FromString(await door.call(b"Lease", body, 10.0)).held == b"k" * 16
                await eventually(all_gone)
                assert not [record for record in caplog.records if record.exc_info]
            except (AssertionError, TimeoutError) as error:
                kept = [noise.keep(parts) for parts in last]
                raise AssertionError(f"{error!r} after one of {kept}") from error

        for parts in noise.kept():
            await say(parts)
            await well([parts])
        while noise.goes_on():
            some = [fast_path_input(noise.rng) for _ in range(BATCH)]
            await asyncio.gather(*map(say, some))
            await well(some)


def engine_input(rng: random.Random, hello: bytes, base: int) -> list[bytes]:
    """Messages to a transfer engine: a greeting or none, then frames around real and unreal memory."""
    parts = [hello if rng.random() < 0.85 else mangled(rng, hello)]
    for _ in range(rng.randint(0, 4)):
        kind = rng.choice((wire.WRITE, wire.READ, wire.CHECKSUM, wire.WANT, rng.randint(0, 255)))
        rows = rng.randint(0, 3)
        length = rng.choice((0, 1, 4 * KIB, 1 << 40, (1 << 64) - 1))
        at = rng.choice((base, base + 4 * KIB, 0, (1 << 64) - 1))
        head = wire.HEAD.pack(kind, 0, 0, rows, rng.randrange(1 << 32), rng.randint(0, 3), length)
        raw = head + b"".join(struct.pack("<2Q", at, length) for _ in range(rows))
        parts.append(raw if rng.random() < 0.5 else mangled(rng, raw))
    return parts


@pytest.mark.parametrize("over_what", ["tcp", "shm"])
def test_transfer_engine(over_what: str, nest: Nest, noise: Noise, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    """No window is open, so no byte of the memory may change, whatever is written."""
    target = nest.actor("target#1", EngineConfig(transports=(over_what,), connect_timeout_s=0.5))
    base = target.allocate(64 * KIB, seed=1)
    reader = nest.actor("reader#1", EngineConfig(transports=(over_what,)))
    reader.allocate(64 * KIB)
    descriptor = target.engine.local_descriptor()
    endpoint = descriptor.endpoints[over_what]
    before = contents(target)
    server = target.engine._transports[0]._server  # type: ignore[attr-defined]

    def say(parts: list[bytes]) -> None:
        with contextlib.suppress(OSError):
            if over_what == "tcp":
                with socket.create_connection((endpoint["host"], int(endpoint["port"])), 5) as sock:
                    first, *rest = parts
                    sock.sendall(wire.LENGTH.pack(len(first)) + first + b"".join(rest))
            else:
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                    sock.settimeout(5)
                    sock.connect(raw_address(endpoint["path"]))
                    for part in parts:
                        sock.send(part)

    def well(last: list[list[bytes]]) -> None:
        try:
            (status,) = reader.transfer("read", reader.open(target.descriptor()), [(0, base, 64 * KIB)])
            assert status.state is TransferState.COMPLETED
            assert contents(target) == before, "memory changed without a window"
            assert not [record for record in caplog.records if record.exc_info]
            until(lambda: len(server.connections()) <= 1, "strangers are gone")
        except AssertionError as error:
            kept = [noise.keep(parts) for parts in last]
            raise AssertionError(f"{error} after one of {kept}") from error

    with caplog.at_level(logging.WARNING, "kvmesh"):
        for parts in noise.kept():
            say(parts)
            well([parts])
        turn = 0
        while noise.goes_on():
            some = []
            for _ in range(BATCH):
                turn += 1
                some.append(engine_input(noise.rng, greeting(descriptor, f"writer#{turn}", turn), base))
                say(some[-1])
            well(some)


def contents(actor: Actor) -> bytes:
    assert actor.region is not None and actor.region.memory is not None
    return bytes(actor.region.memory[: 64 * KIB])

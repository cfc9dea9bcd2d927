"""The front's side of a rank host: one authenticated stream to `kvmesh serve ranks` on another machine, which carries
the frames of all the instance's ranks there (ADR 0044)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import xxhash

from kvmesh.errors import InternalError, KvmeshError, Unavailable
from kvmesh.ranks import protocol as m
from kvmesh.ranks.client import RankClient
from kvmesh.ranks.clocks import ClockOffset, shifted
from kvmesh.ranks.ipc import RankFrames, frame
from kvmesh.rpc.bidi import ClientStream
from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.rpc.pb import ranks_pb2, ranks_pb2_grpc
from kvmesh.rpc.protocol import PROTOCOL_VERSION
from kvmesh.version import kvmesh_version

log = logging.getLogger(__name__)

DIAL_S = 5.0
COMING_S = 60.0  # hosts start beside each other, in any order
NOT_THERE = ("failed to connect", "did not answer", "DNS resolution failed")  # of a host that may come
AGAIN_S = 0.5
BEAT_S = 0.5
LEAST_SILENCE_S = 2.0  # a busy event loop is no lost host
PIECE_BYTES = 1 << 20  # of a frame in one message


@cache
def build() -> str:
    """Returns what names the messages of this build: frames between a front and its ranks have no versions."""
    text = Path(m.__file__).read_bytes()
    return f"{kvmesh_version()}-{xxhash.xxh3_64_hexdigest(text)}"


def ranks_at(world: int, hosts: int) -> list[range]:
    """Returns the ranks of the front's own machine and of each further host: as many at each, in order. `hosts` + 1
    divides `world`."""
    each = world // (hosts + 1)
    return [range(at * each, (at + 1) * each) for at in range(hosts + 1)]


class RankHostLink:
    """Carries messages to and from `clients`, the ranks at one rank host. All methods belong to one event loop. A host
    that ends the stream, or says nothing for `silence_s`, has lost all of them."""

    def __init__(
        self,
        address: str,
        instance_id: str,
        incarnation: int,
        clients: Sequence[RankClient],
        threads: int,
        silence_s: float,
        coming_s: float = COMING_S,
    ) -> None:
        self.address = address
        self._who = f"rank host {address}"
        self._hello = ranks_pb2.RankHostHello(
            protocol_version=PROTOCOL_VERSION,
            instance=pb.InstanceRef(instance_id=instance_id, incarnation=incarnation),
            build=build(),
            ranks=[client.rank for client in clients],
            threads=threads,
            silence_ms=int(max(silence_s, LEAST_SILENCE_S) * 1000),
        )
        self._silence_s = max(silence_s, LEAST_SILENCE_S)
        self._coming_s = coming_s
        self._clients: Mapping[int, RankClient] = {client.rank: client for client in clients}
        self._frames = {rank: RankFrames(m.ToFront) for rank in self._clients}
        self._ended = {rank: asyncio.Event() for rank in self._clients}
        self._clock = ClockOffset()
        self._heard_at = 0.0
        self._stream: ClientStream[ranks_pb2.RankHostRequest, ranks_pb2.RankHostEvent] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Dials until the host answers, for `coming_s` at most; its rank processes have started then. Raises
        Unavailable when it does not, or KvmeshError as it refuses."""
        end = time.monotonic() + self._coming_s
        complained = False
        while True:
            stream: ClientStream[ranks_pb2.RankHostRequest, ranks_pb2.RankHostEvent] = ClientStream(
                self._who, self.address, lambda channel: ranks_pb2_grpc.RankHostStub(channel).Run()
            )
            try:
                welcome = await stream.open(ranks_pb2.RankHostRequest(hello=self._hello), DIAL_S)
                break
            except Unavailable as error:
                await stream.close()
                if not any(sign in error.message for sign in NOT_THERE) or time.monotonic() > end:
                    raise Unavailable(f"rank_hosts={self.address!r}: {error.message}") from None
                if not complained:
                    complained = True
                    log.info("%s does not answer yet (%s); waits %.0f s for it", self._who, error, self._coming_s)
                await asyncio.sleep(AGAIN_S)
            except BaseException:
                await stream.close()
                raise
        self._stream, self._heard_at = stream, time.monotonic()
        self._heard(welcome.hello.host_ns)
        for client, pid in zip(self._clients.values(), welcome.hello.pids, strict=True):
            client.attach(self, pid)
        self._tasks = [
            asyncio.create_task(self._read(stream), name=f"read from {self._who}"),
            asyncio.create_task(self._beat(), name=f"beats to {self._who}"),
        ]

    def send(self, rank: int, message: m.ToRank) -> None:
        """Queues a message to one rank without blocking."""
        data = frame(shifted(message, self._clock.ns))
        for at in range(0, len(data), PIECE_BYTES):
            piece = ranks_pb2.RankFrames(rank=rank, data=data[at : at + PIECE_BYTES])
            self._send(ranks_pb2.RankHostRequest(frames=piece))

    async def end(self, rank: int, grace_s: float) -> None:
        """Waits until this rank has ended; after `grace_s` it is killed, and waited for so long once more."""
        for last in (False, True):
            try:
                async with asyncio.timeout(grace_s):
                    await self._ended[rank].wait()
                return
            except TimeoutError:
                if not last:
                    self._send(ranks_pb2.RankHostRequest(kill=ranks_pb2.KillRank(rank=rank)))

    async def close(self) -> None:
        """Ends the stream, and with it what is left of the ranks there."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._stream is not None:
            await self._stream.close()
            self._stream = None

    def _send(self, request: ranks_pb2.RankHostRequest) -> None:
        if self._stream is not None:
            self._stream.send(request)

    async def _read(self, stream: ClientStream[ranks_pb2.RankHostRequest, ranks_pb2.RankHostEvent]) -> None:
        error = await stream.read(self._take)
        self._lost(error)

    def _lost(self, error: KvmeshError) -> None:
        for rank, client in self._clients.items():
            if not self._ended[rank].is_set():
                self._ended[rank].set()
                client.lost(f"lost its host: {error.message}")

    async def _beat(self) -> None:
        while (silent := time.monotonic() - self._heard_at) <= self._silence_s:
            self._send(ranks_pb2.RankHostRequest(beat=ranks_pb2.RankHostBeat()))
            await asyncio.sleep(BEAT_S)
        self._lost(InternalError(f"{self._who} has been silent for {silent:.1f} s"))

    def _heard(self, host_ns: int) -> None:
        self._clock.heard(host_ns, time.monotonic_ns())

    def _take(self, event: ranks_pb2.RankHostEvent) -> None:
        self._heard_at = time.monotonic()
        match event.WhichOneof("kind"):
            case "frames":
                rank = event.frames.rank
                for message in self._frames[rank].feed(event.frames.data):
                    self._clients[rank].received(shifted(message, -self._clock.ns))
            case "beat":
                self._heard(event.beat.host_ns)
            case "ended":
                rank = event.ended.rank
                self._ended[rank].set()
                self._clients[rank].lost(event.ended.cause)

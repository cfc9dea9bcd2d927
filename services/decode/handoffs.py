"""Client side of the Handoff streams: one per prefill instance and life, opened when the first request names it.

A stream that breaks ends every handoff in it (PeerGone) and is forgotten; the next request opens another.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from kvmesh.blockservice.shard_wire import from_wire, writers_of
from kvmesh.errors import KvmeshError, ProtocolMismatch, Unavailable
from kvmesh.rpc import channels, protocol, status
from kvmesh.rpc.pb import common_pb2, prefill_pb2, prefill_pb2_grpc
from services.decode import inputs as i
from services.decode import mapping

log = logging.getLogger(__name__)

WRITE_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 1.0

Key = tuple[str, int, str]
"""(instance_id, incarnation, address)."""
Feed = Callable[[i.Input], None]


class PeerStream:
    """One Handoff stream. Owns its channel and its two tasks; tells the brain when it is up and when it is gone."""

    def __init__(
        self,
        peer: int,
        ref: common_pb2.InstanceRef,
        hello: prefill_pb2.HandoffHello,
        feed: Feed,
        gone: Callable[[int, str], None],
        connect_s: float,
    ) -> None:
        self.peer = peer
        self.key: Key = (ref.instance_id, ref.incarnation, ref.address)
        self.who = f"prefill instance {ref.instance_id} at {ref.address}"
        self._feed = feed
        self._gone = gone
        self._connect_s = connect_s
        self._queue: deque[tuple[prefill_pb2.HandoffRequest, Callable[[], None] | None]] = deque()
        self._queue.append((prefill_pb2.HandoffRequest(hello=hello), None))
        self._readers = from_wire(hello.layouts, "layouts")
        self._news = asyncio.Event()
        self._news.set()

    def send(self, message: prefill_pb2.HandoffRequest, written: Callable[[], None] | None = None) -> None:
        """Queue a message; `written` is called when gRPC has taken it. Never blocks; bounded by the requests here."""
        self._queue.append((message, written))
        self._news.set()

    async def run(self) -> None:
        """Until the stream ends, whoever ends it; then `gone` hears why."""
        channel = channels.connect(self.key[2])
        cause = "the stream was closed here"
        writer: asyncio.Task[None] | None = None
        call: Any = None
        try:
            call = prefill_pb2_grpc.PrefillStub(channel).Handoff()
            writer = asyncio.create_task(self._write(call), name=f"handoffs to {self.key[0]}")
            async with asyncio.timeout(self._connect_s):
                self._welcome(await call.read())
            while (event := await call.read()) is not grpc.aio.EOF:
                self._take(event)
            cause = await self._why_closed(call)
        except TimeoutError:
            cause = f"{self.who} did not answer within {self._connect_s:g} s"
        except grpc.RpcError as err:
            cause = f"{self.who}: {status.from_rpc_error(err).message}"
        except asyncio.InvalidStateError as err:
            cause = f"{self.who}: {err}"
        except KvmeshError as err:
            cause = err.message
        finally:
            self._gone(self.peer, cause)
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
            if call is not None:
                call.cancel()
            await channel.close(grace=None)

    def _welcome(self, event: Any) -> None:
        if event is grpc.aio.EOF:
            raise Unavailable(f"{self.who} closed the stream")
        if not event.HasField("hello"):
            raise ProtocolMismatch(f"{self.who} began without a hello", field="protocol_version")
        protocol.check(event.hello.protocol_version, self.who)
        if not event.hello.writers:
            raise ProtocolMismatch(f"{self.who} names no writers", field="writers")
        cuts = from_wire(event.hello.layouts, "layouts")
        self._feed(i.PeerReady(self.peer, writers_of(tuple(event.hello.writers), cuts, self._readers)))

    def _take(self, message: prefill_pb2.HandoffEvent) -> None:
        found = mapping.from_prefill(message)
        if found is None:
            log.warning("%s sent an event that this build does not know", self.who)
        else:
            self._feed(i.FromPrefill(self.peer, *found))

    async def _write(self, call: Any) -> None:
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                while self._queue:
                    message, written = self._queue.popleft()
                    async with asyncio.timeout(WRITE_TIMEOUT_S + self._connect_s):
                        await call.write(message)
                    if written is not None:
                        written()
        except TimeoutError:
            log.warning("%s takes no messages", self.who)
            call.cancel()  # the reader ends, and with it the stream
        except (grpc.RpcError, asyncio.InvalidStateError):
            return  # the reader knows why

    async def _why_closed(self, call: Any) -> str:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                details = await call.details()
        except (TimeoutError, grpc.RpcError):
            details = ""
        return f"{self.who} closed the stream" + (f": {details}" if details else "")


class Handoffs:
    """All Handoff streams of this instance."""

    def __init__(self, hello: Callable[[], prefill_pb2.HandoffHello], feed: Feed, connect_s: float) -> None:
        self._hello = hello
        self._feed = feed
        self._connect_s = connect_s
        self._numbers = itertools.count(1)
        self._by_key: dict[Key, PeerStream] = {}
        self._by_peer: dict[int, PeerStream] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._by_peer)

    def peer(self, ref: common_pb2.InstanceRef) -> int:
        """The number of the stream to that life of a prefill instance; opened if there is none."""
        key = (ref.instance_id, ref.incarnation, ref.address)
        stream = self._by_key.get(key)
        if stream is None:
            stream = PeerStream(next(self._numbers), ref, self._hello(), self._feed, self._gone, self._connect_s)
            self._by_key[key] = self._by_peer[stream.peer] = stream
            task = asyncio.create_task(self._live(stream), name=f"handoffs with {ref.instance_id}")
            self._tasks[stream.peer] = task
        return stream.peer

    async def _live(self, stream: PeerStream) -> None:
        try:
            await stream.run()
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("handoff stream with %s failed", stream.who)
        finally:
            self._tasks.pop(stream.peer, None)

    def _gone(self, peer: int, cause: str) -> None:
        """Tell the brain; whoever names this instance next gets a new stream."""
        self._feed(i.PeerGone(peer, cause))
        log.warning("handoff stream ended: %s", cause)
        stream = self._by_peer.pop(peer, None)
        if stream is not None and self._by_key.get(stream.key) is stream:
            del self._by_key[stream.key]

    def send(self, peer: int, message: prefill_pb2.HandoffRequest, written: Callable[[], None] | None = None) -> None:
        """Queue a message; nothing happens when the stream is gone (the brain hears of that by PeerGone)."""
        stream = self._by_peer.get(peer)
        if stream is not None:
            stream.send(message, written)

    async def close(self) -> None:
        """End all streams; nothing is left."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

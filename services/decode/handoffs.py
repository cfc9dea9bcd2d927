"""A decode instance opens one Handoff stream to each incarnation of a prefill instance, when the first request names
it. A stream that breaks ends every handoff in it (PeerGone) and is forgotten; the next request opens another."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable

from kvmesh.blockservice.shard_wire import from_wire, grouped_writers_of, writers_of
from kvmesh.errors import ConfigError, KvmeshError, ProtocolMismatch
from kvmesh.rpc.bidi import ClientStream
from kvmesh.rpc.pb import common_pb2, prefill_pb2, prefill_pb2_grpc
from kvmesh.services.decode import inputs as i
from kvmesh.services.decode import mapping

log = logging.getLogger(__name__)

Key = tuple[str, int, str]
"""(instance_id, incarnation, address)."""
Feed = Callable[[i.Input], None]


class PeerStream:
    """Runs one Handoff stream. It tells the brain when it is up (PeerReady) and, through `gone`, when it has ended."""

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
        self._feed = feed
        self._gone = gone
        self._connect_s = connect_s
        self._hello = hello
        self._field = "group_layouts" if hello.group_layouts else "layouts"
        self._readers = from_wire(getattr(hello, self._field), self._field)
        self._ranks = len(hello.segment_descriptors)
        self._stream = ClientStream[prefill_pb2.HandoffRequest, prefill_pb2.HandoffEvent](
            f"prefill instance {ref.instance_id} at {ref.address}",
            ref.address,
            lambda channel: prefill_pb2_grpc.PrefillStub(channel).Handoff(),
        )
        self.send = self._stream.send

    async def run(self) -> None:
        """Opens the stream and reads it until it ends, whoever ends it. Then `gone` is called with the cause."""
        cause = "the stream was closed here"
        try:
            self._welcome(await self._stream.open(prefill_pb2.HandoffRequest(hello=self._hello), self._connect_s))
            cause = (await self._stream.read(self._take)).message
        except KvmeshError as err:
            cause = err.message
        finally:
            self._gone(self.peer, cause)
            await self._stream.close()

    def _welcome(self, event: prefill_pb2.HandoffEvent) -> None:
        if not event.hello.writers:
            raise ProtocolMismatch(f"{self._stream.who} names no writers", field="writers")
        names, grouped = tuple(event.hello.writers), self._field == "group_layouts"
        if bool(event.hello.group_layouts) != grouped:
            why = "keeps no cache groups" if grouped else "keeps its model by cache groups"
            raise ConfigError(f"group_layouts: {self._stream.who} {why}, this instance does not", field="group_layouts")
        cuts = from_wire(getattr(event.hello, self._field), self._field)
        if grouped:
            writers = grouped_writers_of(names, cuts, self._readers, self._ranks)
        else:
            writers = writers_of(names, cuts, self._readers)
        self._feed(i.PeerReady(self.peer, writers))

    def _take(self, message: prefill_pb2.HandoffEvent) -> None:
        found = mapping.from_prefill(message)
        if found is None:
            log.warning("%s sent an event that this build does not know", self._stream.who)
        else:
            self._feed(i.FromPrefill(self.peer, *found))


class Handoffs:
    """Owns all Handoff streams of this instance."""

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
        """Returns the number of the stream to that incarnation of a prefill instance, and opens the stream if there is
        none."""
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
            log.exception("handoff stream with %s failed", stream.key[0])
        finally:
            self._tasks.pop(stream.peer, None)

    def _gone(self, peer: int, cause: str) -> None:
        """Tells the brain that the stream ended, and forgets it: the next request that names this instance opens a new
        one."""
        self._feed(i.PeerGone(peer, cause))
        log.warning("handoff stream ended: %s", cause)
        stream = self._by_peer.pop(peer, None)
        if stream is not None and self._by_key.get(stream.key) is stream:
            del self._by_key[stream.key]

    def send(self, peer: int, message: prefill_pb2.HandoffRequest, written: Callable[[], None] | None = None) -> None:
        """Queues a message. It is dropped when the stream is gone: the brain has been told so by PeerGone."""
        stream = self._by_peer.get(peer)
        if stream is not None:
            stream.send(message, written)

    async def close(self) -> None:
        """Ends all streams and waits until their tasks have ended."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

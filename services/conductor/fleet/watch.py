"""Follows the store master's stream of members and blocks, and gives its events to the brain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from typing import Any

import grpc

from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.rpc import channels, status
from kvmesh.rpc.authorisation import ServerRole
from kvmesh.rpc.leader_client import LeaderTracker, moves_on
from kvmesh.rpc.pb import store_pb2 as pb
from kvmesh.rpc.pb import store_pb2_grpc as pb_grpc
from kvmesh.services.conductor import mapping
from kvmesh.services.conductor.domain import Event, Member, MembersReset, StoreLost

log = logging.getLogger(__name__)

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0


class StoreWatch:
    """Follows whichever store master leads, over one stream at a time that is opened again after every failure.
    `deliver` gets each event; an error that it raises ends the stream, and the next one begins with a snapshot."""

    def __init__(
        self, addresses: str, deliver: Callable[[Event], None], *, silence_s: float, rng: random.Random
    ) -> None:
        """`addresses` is a list, "a:1,b:2". A quiet master still sends empty messages, so a stream that is silent for
        longer than `silence_s` is broken."""
        self._masters = LeaderTracker(addresses)
        self.status = f"connecting to {self.address}"
        self._deliver = deliver
        self._silence_s = silence_s
        self._rng = rng
        self._followed = False

    @property
    def address(self) -> str:
        """The address that it follows, or tries to."""
        return self._masters.current

    async def run(self, stop: asyncio.Event) -> None:
        """Runs until `stop` is set. Raises nothing but CancelledError."""
        failures = 0
        while not stop.is_set():
            self._followed = False
            error = await self._until_broken(stop)
            if stop.is_set():
                return
            failures = 1 if self._followed else failures + 1
            if self.status == "connected" or failures == 1:
                log.warning("stream of the store master at %s broke: %s", self.address, error)
            self.status = f"no connection to {self.address}: {error}"
            self._deliver(StoreLost())
            if isinstance(error, KvmeshError) and moves_on(error) and not self._masters.move_on(error):
                continue  # another master may lead
            wait_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(failures, 10)) * self._rng.uniform(0.5, 1.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await stop.wait()

    async def _until_broken(self, stop: asyncio.Event) -> Exception | None:
        """Reads one stream to its end and returns why it ended; None when stopped."""
        channel = channels.connect(self.address, ServerRole.STORE)
        reading = asyncio.create_task(self._read(channel))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({reading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reading, stopping):
                task.cancel()
            results = await asyncio.gather(reading, stopping, return_exceptions=True)
            await channel.close(grace=None)
        found = results[0]
        if isinstance(found, grpc.RpcError):
            return status.from_rpc_error(found)
        if isinstance(found, TimeoutError):
            return Unavailable(f"silent for over {self._silence_s:.1f} s")
        if isinstance(found, Exception) and not isinstance(found, KvmeshError):
            log.error("reading the store master's stream failed", exc_info=found)
        return found if isinstance(found, Exception) else None

    async def _read(self, channel: grpc.aio.Channel) -> None:
        stream: Any = pb_grpc.StoreMasterStub(channel).Watch(pb.WatchRequest())
        follower = _Follower(self._deliver)
        terms = self._masters.terms
        try:
            while True:
                async with asyncio.timeout(self._silence_s):
                    message = await stream.read()
                if message is grpc.aio.EOF:
                    raise Unavailable("the store master ended the stream")
                terms.hear(message.term)
                self._masters.succeeded()
                follower.take(message)
                if follower.seq is not None:
                    self._following(follower)
        finally:
            stream.cancel()

    def _following(self, follower: _Follower) -> None:
        self._followed = True
        if self.status != "connected":
            log.info("following the store master at %s: %d members", self.address, follower.members)
        self.status = "connected"


class _Follower:
    """One stream, from its snapshot on. `seq` is the number of the last change; None until the snapshot is complete."""

    def __init__(self, deliver: Callable[[Event], None]) -> None:
        self._deliver = deliver
        self._snapshot: list[Member] = []
        self._master: int | None = None
        self._strange = False
        self.seq: int | None = None
        self.members = 0

    def take(self, message: pb.StoreEvents) -> None:
        """Delivers a message's events. Raises Unavailable when something is missing before it."""
        if self._master not in (None, message.master_incarnation):
            raise Unavailable("another store master speaks on the same stream")
        if message.snapshot:
            self._take_snapshot(message)
        elif self.seq is None:
            raise Unavailable("the stream began without a whole snapshot")
        else:
            self._take_changes(message, self.seq)

    def _take_snapshot(self, message: pb.StoreEvents) -> None:
        self._master, self.seq = message.master_incarnation, None
        for event in message.events:
            if event.HasField("member"):
                self._snapshot.append(mapping.member_in(event.member.member))
            elif event.HasField("blocks"):
                self._hear(event.blocks)
        if not message.more:
            self._deliver(MembersReset(message.master_incarnation, tuple(self._snapshot)))
            self.seq, self.members = message.seq, len(self._snapshot)
            self._snapshot = []

    def _take_changes(self, message: pb.StoreEvents, seq: int) -> None:
        for event in message.events:
            seq += 1
            if event.seq != seq:
                raise Unavailable(f"gap in the stream: expected seq {seq}, got {event.seq}")
            self.seq = seq
            if event.HasField("member"):
                self._deliver(mapping.member_event_in(event.member))
            elif event.HasField("blocks"):
                self._hear(event.blocks)
        if message.seq != seq:
            raise Unavailable(f"gap in the stream: have seq {seq}, the master is at {message.seq}")

    def _hear(self, told: pb.Announcement) -> None:
        blocks = mapping.blocks_in(told)
        if blocks is not None:
            self._deliver(blocks)
        elif not self._strange:
            self._strange = True
            log.warning("the store master tells of tier %d of %s: not known here, ignored", told.tier, told.store_id)

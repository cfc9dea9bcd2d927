"""Follows the store master's member stream and hands what it says to the brain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from typing import Any

import grpc

from kvmesh.rpc import channels, status
from kvmesh.rpc.errors import KvmeshError, Unavailable
from kvmesh.rpc.pb import store_pb2 as pb
from kvmesh.rpc.pb import store_pb2_grpc as pb_grpc
from services.conductor.domain import Event, Life, MemberGone, MemberJoined, MembersReset, StoreLost

log = logging.getLogger(__name__)

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0


class MemberWatch:
    """One stream at a time, opened again after every failure. `deliver` takes each event as it comes."""

    def __init__(self, address: str, deliver: Callable[[Event], None], *, silence_s: float, rng: random.Random) -> None:
        """`silence_s`: a quiet master still sends empty messages; a stream silent for longer is broken."""
        self.address = address
        self.status = f"connecting to {address}"
        self._deliver = deliver
        self._silence_s = silence_s
        self._rng = rng
        self._seq: int | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set. Raises nothing but CancelledError."""
        failures = 0
        while not stop.is_set():
            self._seq = None
            error = await self._until_broken(stop)
            if stop.is_set():
                return
            failures = 1 if self._seq is not None else failures + 1
            if self.status == "connected" or failures == 1:
                log.warning("member stream of the store master at %s broke: %s", self.address, error)
            self.status = f"no connection to {self.address}: {error}"
            self._deliver(StoreLost())
            wait_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(failures, 10)) * self._rng.uniform(0.5, 1.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await stop.wait()

    async def _until_broken(self, stop: asyncio.Event) -> Exception | None:
        """Reads one stream to its end and says why it ended; None: stopped."""
        channel = channels.connect(self.address)
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
            log.error("reading the member stream failed", exc_info=found)
        return found if isinstance(found, Exception) else None

    async def _read(self, channel: grpc.aio.Channel) -> None:
        stream: Any = pb_grpc.StoreMasterStub(channel).WatchMembers(pb.WatchMembersRequest())
        try:
            while True:
                async with asyncio.timeout(self._silence_s):
                    message = await stream.read()
                if message is grpc.aio.EOF:
                    raise Unavailable("the store master ended the stream")
                self._take(message)
        finally:
            stream.cancel()

    def _take(self, message: pb.MemberEvents) -> None:
        if message.snapshot:
            members = frozenset(_life(event) for event in message.events)
            self._deliver(MembersReset(message.master_incarnation, members))
            self._seq = message.seq
            if self.status != "connected":
                log.info("following the store master at %s: %d members", self.address, len(members))
            self.status = "connected"
            return
        if self._seq is None:
            raise Unavailable("the stream began without a snapshot")
        for event in message.events:
            self._seq += 1
            if event.seq != self._seq:
                raise Unavailable(f"gap in the member stream: expected seq {self._seq}, got {event.seq}")
            self._deliver(_event(event))
        if message.seq != self._seq:
            raise Unavailable(f"gap in the member stream: have seq {self._seq}, the master is at {message.seq}")


def _life(event: pb.MemberEvent) -> Life:
    return event.member.instance.instance_id, event.member.instance.incarnation


def _event(event: pb.MemberEvent) -> Event:
    if event.change == pb.MEMBER_CHANGE_JOINED:
        return MemberJoined(_life(event))
    return MemberGone(_life(event), "left" if event.change == pb.MEMBER_CHANGE_LEFT else "died")

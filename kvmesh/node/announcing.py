"""Tells the store master what this node's stores hold: one announcement on its way at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import grpc.aio

from kvmesh.kvcache.announce import Announcement, Announcer
from kvmesh.rpc import channels, status
from kvmesh.rpc.errors import InvalidRequest, UnknownInstance
from kvmesh.rpc.pb import store_pb2 as pb
from kvmesh.rpc.pb import store_pb2_grpc as pb_grpc
from kvmesh.telemetry import names

log = logging.getLogger(__name__)

CALL_S = 2.0
FORCE_S = 1.0  # an empty batch so often lets the master notice a lost tail
BACKOFF_S = (0.05, 1.0)
NOT_JOINED_S = 0.05
REFUSED_S = 5.0


class Announcing:
    """The loop around an `Announcer`. `joined()`: whether the master knows this incarnation, as far as we know;
    `rejoin()`: it does not, beat soon."""

    def __init__(
        self,
        announcer: Announcer,
        address: str,
        interval_s: float,
        joined: Callable[[], bool],
        rejoin: Callable[[], None],
    ) -> None:
        self.announcer = announcer
        self._address = address
        self._interval_s = interval_s
        self._joined = joined
        self._rejoin = rejoin
        self._channel: grpc.aio.Channel | None = None
        self._heard_at = 0.0
        self._complained = False

    async def run(self) -> None:
        """Until cancelled."""
        failures = 0
        try:
            while True:
                if not self._joined():
                    await asyncio.sleep(NOT_JOINED_S)
                    continue
                force = time.monotonic() - self._heard_at >= FORCE_S
                word = self.announcer.next(force)
                if word is not None and not await self._say(word):
                    failures += 1
                    await asyncio.sleep(min(BACKOFF_S[0] * 2 ** min(failures, 16), BACKOFF_S[1]))
                    continue
                failures = 0
                if word is None or not word.more:  # parts of a snapshot follow one another at once
                    await asyncio.sleep(self._interval_s)
        finally:
            await self._drop_channel()

    async def _say(self, word: Announcement) -> bool:
        """Whether it was heard. Raises nothing but CancelledError."""
        if self._channel is None:
            self._channel = channels.connect(self._address)
        request = pb.AnnounceRequest(announcement=to_proto(word))
        try:
            answer = await pb_grpc.StoreMasterStub(self._channel).Announce(request, timeout=CALL_S)
        except asyncio.CancelledError:
            self.announcer.failed()
            raise
        except grpc.aio.AioRpcError as error:
            cause = status.from_rpc_error(error)
            if isinstance(cause, UnknownInstance):
                names.NODE_ANNOUNCED.labels(outcome="unknown").inc()
                self.announcer.restart()
                self._rejoin()
                return False
            names.NODE_ANNOUNCED.labels(outcome="failed").inc()
            if isinstance(cause, InvalidRequest):
                # The same again would be refused again, and nothing after it be heard: all of it anew, unhurried.
                log.error("store master at %s refuses what this node announces: %s", self._address, cause)
                self.announcer.restart()
                await asyncio.sleep(REFUSED_S)
                return False
            self.announcer.failed()
            await self._drop_channel()  # gRPC's own reconnect back-off must not delay ours
            if not self._complained:
                self._complained = True
                log.warning("store master at %s does not take announcements: %s", self._address, cause)
            return False
        except Exception:
            log.exception("announcing failed")
            self.announcer.failed()
            return False
        names.NODE_ANNOUNCED.labels(outcome="heard").inc()
        self._complained = False
        self._heard_at = time.monotonic()
        self.announcer.acked(answer.want_snapshot)
        return True

    async def _drop_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            with contextlib.suppress(Exception):
                await channel.close(None)


def to_proto(word: Announcement) -> pb.Announcement:
    return pb.Announcement(
        store_id=word.store_id,
        incarnation=word.incarnation,
        seq=word.seq,
        sealed=b"".join(word.sealed),
        removed=b"".join(word.removed),
        snapshot=word.snapshot,
        part=word.part,
        more=word.more,
    )

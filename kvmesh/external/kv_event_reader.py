"""Reads the KV events of one engine and asks for those that were missed; see `reported_blocks` for what they mean.

vLLM publishes them by ZeroMQ (`--kv-events-config`): batches on a PUB socket, as [topic, number, batch], and past ones
on a ROUTER socket (`replay_endpoint`), which answers the number of the first one wanted with as many as it has kept and
the number -1.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.external.kv_events import KvEventsUnusable, events_of
from kvmesh.external.reported_blocks import ReportedBlocks
from kvmesh.external.zmtp import SUBSCRIBE_ALL, ZmtpConnection

log = logging.getLogger(__name__)

REPLAY_S = 30.0  # one replay, its end included
REPLAYS = 64  # for one gap: a ROUTER drops what its queue cannot take, and each replay must bring something
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 30.0  # before a new connection
_NUMBER_BYTES = 8


@dataclass(frozen=True, slots=True)
class KvEventsAddress:
    """Where an engine publishes its KV events. `replay_port` 0: it replays none."""

    host: str
    port: int
    replay_host: str = ""
    replay_port: int = 0


class KvEventReader:
    """Keeps a connection to an engine's events until it is cancelled. `changed` hears each time that `reported.exact`
    may have changed."""

    def __init__(
        self,
        address: KvEventsAddress,
        reported: ReportedBlocks,
        changed: Callable[[], None],
        *,
        who: str,
        timeout_s: float,
    ) -> None:
        self._address, self._reported, self._changed = address, reported, changed
        self._who, self._timeout_s = who, timeout_s
        self._anew = asyncio.Event()
        self._wait_s = FIRST_WAIT_S

    def reconnect(self, why: str) -> None:
        """Believes nothing of this connection any longer, and makes another."""
        self._lost(why)
        self._anew.set()

    async def run(self) -> None:
        """Connects again and again."""
        anew = asyncio.ensure_future(self._anew.wait())
        try:
            while True:
                reading = asyncio.ensure_future(self._read())
                try:
                    await asyncio.wait({reading, anew}, return_when=asyncio.FIRST_COMPLETED)
                    if reading.done():
                        self._lost(_why(reading))
                        await asyncio.wait({anew}, timeout=self._wait_s)
                        self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)
                finally:
                    reading.cancel()
                    await asyncio.gather(reading, return_exceptions=True)
                if anew.done():
                    self._anew.clear()
                    anew = asyncio.ensure_future(self._anew.wait())
        finally:
            anew.cancel()

    def _lost(self, why: str) -> None:
        self._reported.lost(why)
        self._changed()

    async def _read(self) -> None:
        """Reads one connection to its end, which is an error."""
        at = self._address
        async with ZmtpConnection.open(at.host, at.port, b"SUB", self._timeout_s) as events:
            await events.send([SUBSCRIBE_ALL], self._timeout_s)
            self._reported.begin()
            if await self._fill():
                self._caught_up()
            while True:
                # An idle engine has nothing to tell; whether it lives, its /metrics say.
                seq, payload = _numbered(await events.receive(None))
                batch = events_of(payload)
                if not self._reported.take(seq, batch):
                    self._changed()
                    await self._fill()
                    if self._reported.next < seq:
                        self._reported.skip_to(seq)
                    self._reported.take(seq, batch)
                self._caught_up()

    def _caught_up(self) -> None:
        self._wait_s = FIRST_WAIT_S
        self._reported.caught_up()
        self._changed()

    async def _fill(self) -> bool:
        """Asks for everything from the next batch on; returns whether all of it came."""
        if not self._address.replay_port:
            return False
        try:
            async with asyncio.timeout(REPLAY_S):
                for _ in range(REPLAYS):
                    before = self._reported.next
                    if await self._replay():
                        return True
                    if self._reported.next == before:
                        return False
        except TimeoutError:
            log.warning("%s: its KV events were not replayed within %g s", self._who, REPLAY_S)
        except KvEventsUnusable:
            raise
        except KvmeshError as err:
            log.warning("%s: its KV events cannot be replayed: %s", self._who, err.message)
        return False

    async def _replay(self) -> bool:
        """Takes one replay from the next batch on; returns whether it had no gap."""
        at = self._address
        async with ZmtpConnection.open(at.replay_host or at.host, at.replay_port, b"DEALER", self._timeout_s) as past:
            await past.send([b"", self._reported.next.to_bytes(_NUMBER_BYTES, "big")], self._timeout_s)
            while True:
                try:
                    parts = await past.receive(self._timeout_s)
                except Unavailable:
                    return False  # its end was dropped
                seq, payload = _numbered(parts[1:])  # the first one is empty
                if seq < 0:
                    return True
                if not self._reported.take(seq, events_of(payload)):
                    return False


def _numbered(parts: list[bytes]) -> tuple[int, bytes]:
    """Returns number and batch of [topic, number, batch]."""
    if len(parts) != 3 or len(parts[1]) != _NUMBER_BYTES:
        raise KvEventsUnusable(f"a message of KV events has {len(parts)} parts is not topic, number and batch")
    return int.from_bytes(parts[1], "big", signed=True), parts[2]


def _why(reading: asyncio.Future[None]) -> str:
    """Returns why a connection has ended."""
    with contextlib.suppress(asyncio.CancelledError):
        err = reading.exception()
        if isinstance(err, KvmeshError):
            return err.message
        log.error("reading KV events failed", exc_info=err)
        return f"reading KV events failed: {type(err).__name__}"
    return "cancelled"

"""One membership of an instance: enter, beat at the interval that the peer answered last (to entering or to a beat),
enter again whenever the peer does not know this incarnation or cannot be reached, say goodbye.
"""

from __future__ import annotations

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import Any, ClassVar, NamedTuple

from google.protobuf.descriptor import ServiceDescriptor

from kvmesh.errors import InvalidRequest, KvmeshError, ProtocolMismatch, UnknownInstance
from kvmesh.rpc.leader_client import ServiceClient

log = logging.getLogger(__name__)

# Before a peer has told its own: how long a first call may take, and how soon it is tried again.
ENTER_TIMEOUT_S = 2.0
FIRST_INTERVAL_S = 0.2
FIRST_BACKOFF_S = 0.02
# A peer that refuses us for what we are (another protocol, a bad card) will not change its mind soon.
REFUSED_RETRY_S = 5.0
GOODBYE_TIMEOUT_S = 1.0
URGE_GAP_S = 0.02


class Acknowledged(NamedTuple):
    """How often to beat, and how long silence may last. `pace`: the number of these two, which every beat says: before
    the peer has heard it, it counts on no shorter lease than was told before. `interval_ms` 0: nothing was told."""

    interval_ms: int
    lease_ms: int
    pace: int = 0


class MembershipPeer(ABC):
    """One membership: enter, beat, enter again, say goodbye. Owns its connection."""

    name: ClassVar[str]
    service: ClassVar[ServiceDescriptor]
    fast: ClassVar[str]  # the method of a beat

    def __init__(self, rng: random.Random) -> None:
        self.registered = False
        self._rng = rng
        self._peer = ServiceClient(self.service, (self.fast,))
        self._interval_s = FIRST_INTERVAL_S
        self._lease_s = ENTER_TIMEOUT_S
        self._pace = 0  # the number of what we go by
        self._urged = asyncio.Event()
        self._complained = False
        self._beaten = False  # since it entered last
        self._changed = False  # we are not what we said when we entered

    @property
    @abstractmethod
    def address(self) -> str:
        """Whom to call now."""

    @abstractmethod
    async def _enter(self, peer: ServiceClient, timeout_s: float) -> Acknowledged:
        """Register."""

    @abstractmethod
    async def _beat(self, peer: ServiceClient, timeout_s: float) -> Acknowledged:
        """One heartbeat; it says `_pace`."""

    @abstractmethod
    async def _goodbye(self, peer: ServiceClient, timeout_s: float) -> None: ...

    def urge(self) -> None:
        """Beat soon."""
        self._urged.set()

    def enter_again(self) -> None:
        """Enter again at once: what we are has changed."""
        self._changed = True
        self._urged.set()

    async def run(self, stop: asyncio.Event) -> None:
        stopping = asyncio.ensure_future(stop.wait())
        failures = 0
        try:
            while not stop.is_set():
                error = await self._guarded(self._live(stopping))
                if error is None:
                    break
                failures = 0 if self._beaten else failures + 1
                wait_s = self._after(error, failures)
                await asyncio.wait({stopping}, timeout=wait_s)
            if self.registered and self._peer.address:
                await self._guarded(self._goodbye(self._peer, GOODBYE_TIMEOUT_S))
        finally:
            self.registered = False
            stopping.cancel()
            await self._peer.close()

    async def _live(self, stopping: asyncio.Future[Any]) -> None:
        """Enter and beat until stopped (returns) or until the peer fails us (raises)."""
        self._beaten = self._changed = False
        if not self._peer.address:
            self._peer.connect(self.address)
        told = await self._enter(self._peer, ENTER_TIMEOUT_S)
        self._go_by(told._replace(interval_ms=max(told.interval_ms, 1)))
        if not self.registered:
            log.info("registered with %s at %s", self.name, self.address)
        self._complained = False
        self.registered = True
        while not stopping.done():
            if self._changed:
                self._changed = False
                self._go_by(await self._enter(self._peer, ENTER_TIMEOUT_S))
            # Half a lease: one lost call leaves time for another before the peer takes us for dead.
            self._go_by(await self._beat(self._peer, self._lease_s / 2))
            self._beaten = True
            await self._pause(stopping)

    def _go_by(self, told: Acknowledged) -> None:
        if told.interval_ms:
            self._interval_s = told.interval_ms / 1000
            self._lease_s = max(told.lease_ms, told.interval_ms) / 1000
            self._pace = told.pace

    async def _pause(self, stopping: asyncio.Future[Any]) -> None:
        """One interval, cut short by `urge` but never under URGE_GAP_S."""
        gap_s = min(URGE_GAP_S, self._interval_s)
        await asyncio.wait({stopping}, timeout=gap_s)
        if stopping.done() or self._urged.is_set():
            self._urged.clear()
            return
        urged = asyncio.ensure_future(self._urged.wait())
        try:
            await asyncio.wait({stopping, urged}, timeout=self._interval_s - gap_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            urged.cancel()
            self._urged.clear()

    async def _guarded(self, call: Awaitable[None]) -> KvmeshError | Exception | None:
        """The call's error instead of its exception; cancellation passes."""
        try:
            await call
        except KvmeshError as e:
            await self._peer.close()
            return e
        except Exception as e:
            log.exception("%s: registration loop failed", self.name)
            return e
        return None

    def _after(self, error: Exception, failures: int) -> float:
        """Seconds to wait before entering again; logs what changed."""
        was, self.registered = self.registered, False
        if isinstance(error, UnknownInstance):
            log.info("%s at %s does not know this incarnation: registering again", self.name, self.address)
            return 0.0 if was else self._jittered(self._interval_s)
        if isinstance(error, ProtocolMismatch | InvalidRequest):
            log.error("%s at %s refuses this instance: %s", self.name, self.address, error)
            return self._jittered(REFUSED_RETRY_S)
        if not self._complained:
            self._complained = True
            log.warning("%s at %s does not answer: %s", self.name, self.address, error)
        # Capped at one heartbeat: a silent peer costs no more calls than a live one, and a peer that has come
        # back knows us again within one heartbeat.
        return self._jittered(min(FIRST_BACKOFF_S * 2 ** min(failures, 16), self._interval_s))

    def _jittered(self, seconds: float) -> float:
        return seconds * self._rng.uniform(0.5, 1.0)

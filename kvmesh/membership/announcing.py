"""Tells the store master what this node's stores hold, tier by tier: one announcement on its way at a time.

How often is the master's word, in each answer: the more stores there are, the longer one with nothing to tell keeps
quiet (so a lost tail is noticed that much later), and the longer the gap between two announcements of a busy one. What
comes up after a quiet time is announced at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from kvmesh.errors import InvalidRequest, KvmeshError, NotLeader, StaleTerm, UnknownInstance
from kvmesh.kvcache.announce import Announcement, Announcer
from kvmesh.kvcache.tiers import split_name
from kvmesh.pacing import IDLE_S
from kvmesh.rpc.leader_client import LeaderTracker, ServiceClient
from kvmesh.rpc.pb import store_pb2 as pb
from kvmesh.telemetry import names

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["StoreMaster"]

CALL_S = 2.0
BACKOFF_S = (0.05, 1.0)
NOT_JOINED_S = 0.05
REFUSED_S = 5.0


class _Teller:
    """One announcer, when the master was told last and when it may be told again."""

    def __init__(self, announcer: Announcer) -> None:
        self.announcer = announcer
        self.heard_at = 0.0
        self.not_before = 0.0
        self.told_all = False  # nothing of what was said last is yet to follow, or to be said again
        self._failures = 0

    def note_answer(self, now: float, *, all_of_it: bool) -> None:
        self.heard_at, self.told_all, self._failures = now, all_of_it, 0

    def failed(self, now: float) -> None:
        """Wait longer each time, while the others go on."""
        self._failures += 1
        self.told_all = False
        self.not_before = now + min(BACKOFF_S[0] * 2 ** min(self._failures, 16), BACKOFF_S[1])


class Announcing:
    """The loop around the `Announcer`s of one node, one for each of its tiers; they take turns, so that the snapshot of
    a large tier keeps no change of another waiting. `joined()`: whether the master knows this incarnation, as far as
    we know; `rejoin()`: it does not, beat soon. Whoever beats chooses among `masters`; this loop speaks to the one
    that is `current`."""

    def __init__(
        self,
        announcer: Announcer,
        masters: LeaderTracker,
        interval_s: float,
        joined: Callable[[], bool],
        rejoin: Callable[[], None],
    ) -> None:
        self._tellers = [_Teller(announcer)]
        self._masters = masters
        self._interval_s = interval_s
        self._idle_s, self._gap_s = IDLE_S, 0.0  # as the master has told us last
        self._joined = joined
        self._rejoin = rejoin
        self._master = ServiceClient(SERVICE, ("Announce",))
        self._complained = False

    def add(self, announcer: Announcer) -> None:
        """Add a tier, at any moment."""
        self._tellers.append(_Teller(announcer))

    async def run(self) -> None:
        """Announce until cancelled."""
        try:
            while True:
                if not self._joined():
                    await asyncio.sleep(NOT_JOINED_S)
                    continue
                more = False
                for teller in list(self._tellers):
                    if self._joined():
                        more = await self._turn(teller) or more
                if not more:
                    await asyncio.sleep(self._interval_s)
        finally:
            await self._disconnect()

    async def _turn(self, teller: _Teller) -> bool:
        """Say what it has to say, if anything; whether it goes on at once: parts of a snapshot follow one another."""
        now = time.monotonic()
        silent_s = now - teller.heard_at
        if now < teller.not_before or (teller.told_all and silent_s < self._gap_s):
            return False
        # An empty batch lets the master notice a lost tail.
        word = teller.announcer.next(silent_s >= self._idle_s)
        return word is not None and await self._say(word, teller) and word.more

    async def _say(self, word: Announcement, teller: _Teller) -> bool:
        """Announce `word`; whether the master has heard it. Raises nothing but CancelledError."""
        if self._master.address != self._masters.current:
            await self._disconnect()
            self._master.connect(self._masters.current)
        terms = self._masters.terms
        request = pb.AnnounceRequest(announcement=to_proto(word), term=terms.highest)
        try:
            answer: pb.AnnounceResponse = await self._master.call("Announce", request, CALL_S)
            terms.hear(answer.term)
        except asyncio.CancelledError:
            teller.announcer.failed()
            raise
        except KvmeshError as error:
            await self._failed(error, teller)
            return False
        except Exception:
            log.exception("announcing failed")
            teller.announcer.failed()
            teller.failed(time.monotonic())
            return False
        names.NODE_ANNOUNCED.labels(outcome="heard").inc()
        self._complained = False
        teller.note_answer(time.monotonic(), all_of_it=not (word.more or answer.want_snapshot))
        self._idle_s, self._gap_s = answer.idle_ms / 1000 or IDLE_S, answer.gap_ms / 1000
        teller.announcer.acked(answer.want_snapshot)
        return True

    async def _failed(self, cause: KvmeshError, teller: _Teller) -> None:
        now = time.monotonic()
        teller.failed(now)
        if isinstance(cause, UnknownInstance):
            names.NODE_ANNOUNCED.labels(outcome="unknown").inc()
            for each in self._tellers:  # it has forgotten this node with all its tiers
                each.announcer.restart()
                each.told_all = False
                each.not_before = max(each.not_before, teller.not_before)
            self._rejoin()
            return
        names.NODE_ANNOUNCED.labels(outcome="failed").inc()
        if isinstance(cause, InvalidRequest):
            # The same again would be refused again, and nothing after it be heard: all of it anew, unhurried.
            log.error("store master at %s refuses what this node announces: %s", self._master.address, cause)
            teller.announcer.restart()
            teller.not_before = now + REFUSED_S
            return
        teller.announcer.failed()
        address = self._master.address
        await self._disconnect()  # gRPC's own reconnect back-off must not delay ours
        if isinstance(cause, NotLeader | StaleTerm):
            self._rejoin()
            return
        if not self._complained:
            self._complained = True
            log.warning("store master at %s does not take announcements: %s", address, cause)

    async def _disconnect(self) -> None:
        with contextlib.suppress(Exception):
            await self._master.close()


def to_proto(word: Announcement) -> pb.Announcement:
    """The announcement as it travels: with the node's id and the tier, not the tier's name."""
    store_id, tier = split_name(word.store_id)
    return pb.Announcement(
        store_id=store_id,
        tier=tier.value,  # type: ignore[arg-type]
        incarnation=word.incarnation,
        seq=word.seq,
        sealed=b"".join(word.sealed),
        removed=b"".join(word.removed),
        snapshot=word.snapshot,
        part=word.part,
        more=word.more,
        groups=word.groups,
    )

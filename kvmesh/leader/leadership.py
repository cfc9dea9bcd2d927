"""The shell around a LeaderMachine: it asks Redis, and calls back when a leadership begins or ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from kvmesh.clock import Tick, lease_clock
from kvmesh.leader.leader import (
    Ask,
    BeginLead,
    Event,
    LeaderMachine,
    LeaseSilent,
    Release,
    Rise,
    StepDown,
    StopCompeting,
    TermHeard,
)
from kvmesh.leader.redis_lease import RedisLease
from kvmesh.rpc.terms import clock_is_off, first_term, most_credible, wall_clock

log = logging.getLogger(__name__)

COMPLAIN_S = 60.0  # a line about terms that are not believed


class Leadership:
    """The shell of one process. `on_lead`, `on_rise` (another term, still leading) and `on_end` are called on the loop,
    in turns, and must not block. Check `leads` in the very turn in which something is answered, published or ordered.
    """

    def __init__(
        self,
        lease_s: float | None,
        on_lead: Callable[[int], None],
        on_rise: Callable[[int], None],
        on_end: Callable[[str], None],
        clock: Callable[[], float] = lease_clock,
        first: int | None = None,
    ) -> None:
        """With `lease_s` None there is no Redis, and this process leads from the first step on. `first` is as in
        LeaderMachine."""
        self._leader = LeaderMachine(lease_s, first_term() if first is None else first)
        if clock_is_off():
            text = (
                "the clock of this machine is wrong (%.0f s since 1970): terms begin at %d as if it were another year"
            )
            log.warning(text, wall_clock(), first_term())
        self._clock = clock
        self._on_lead = on_lead
        self._on_rise = on_rise
        self._on_end = on_end
        self._lease: RedisLease | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._complain_at = float("-inf")
        self._silent = False  # Redis did not answer when it was asked last

    # ── questions ────────────────────────────────────────────────────────────────────────────────────

    @property
    def term(self) -> int:
        """The term of this process while it leads, else the highest heard."""
        return self._leader.term

    @property
    def leader(self) -> str:
        """The address of another process that leads, "" when it is unknown."""
        return self._leader.leader_at(self._clock())

    def leads(self) -> bool:
        """Whether this process leads now. A lease that has run out ends the leadership before this returns."""
        if self._leader.leads(self._clock()):
            return True
        self._step(Tick())
        return False

    # ── what happens ─────────────────────────────────────────────────────────────────────────────────

    def begin(self) -> None:
        """Takes the first step; without Redis it is the only one that matters."""
        self._step(Tick())

    def start(self, lease: RedisLease) -> None:
        """Competes for `lease` from now on."""
        self._lease = lease
        self._running = asyncio.create_task(self._run(), name="leadership")

    def hear(self, term: int, *, stranger: bool, who: str) -> bool:
        """Notes that the member `who` has heard of `term` (see leader.TermHeard); returns whether that is credible."""
        most = most_credible()
        if term > most:
            now = self._clock()
            if now >= self._complain_at:
                self._complain_at = now + COMPLAIN_S
                text = "%s tells of term %d, which is not believed: by the clock none is above %d, ours is %d"
                log.warning(text, who, term, most, self.term)
            return False
        self._step(TermHeard(term, stranger, most))
        return True

    async def close(self) -> None:
        """Ends the leadership, gives the lease back, and ends all tasks."""
        self._step(StopCompeting())
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await asyncio.gather(*self._tasks, return_exceptions=True)  # each has its deadline

    async def _run(self) -> None:
        while True:
            self._step(Tick())
            self._changed.clear()  # of what this step has seen: a wait that never waits would let nobody else run
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._leader.next_at - self._clock())):
                    await self._changed.wait()

    def _step(self, event: Event) -> None:
        for action in self._leader.step(event, self._clock()):
            match action:
                case Ask():
                    self._spawn(self._ask(action))
                case Release(life):
                    if self._lease is not None:
                        self._spawn(self._lease.release(life))
                case BeginLead(term):
                    log.info("leading with term %d", term)
                    self._on_lead(term)
                case Rise(term):
                    log.info("term %d from now on: members have heard of an earlier one", term)
                    self._on_rise(term)
                case StepDown(why):
                    log.info("leading no more: %s", why)
                    self._on_end(why)
        self._changed.set()

    async def _ask(self, ask: Ask) -> None:
        assert self._lease is not None, "only who competes asks"
        answer = await self._lease.ask(ask)
        if (silent := isinstance(answer, LeaseSilent)) != self._silent:
            self._silent = silent
            if isinstance(answer, LeaseSilent):
                log.warning("%s: while it is away nobody can begin to lead", answer.why)
            else:
                log.info("redis answers again")
        self._step(answer)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

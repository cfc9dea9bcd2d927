"""Instances that started anew while their model's weights had changed are ordered to fetch the newest ones.

Everything that this needs is told by instances as they register: the epoch of their weights, and the path that these
came from, if others can read it, too. So a conductor that starts anew, or that leads after another, learns it from any
instance that has the newest weights. It knows nothing newer than a checkpoint only when no such instance is left, and
then none has to fetch any.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvmesh.errors import KvmeshError
from kvmesh.membership.places import instance_of
from kvmesh.services.conductor.domain import Life, NewestWeights
from kvmesh.services.conductor.fleet.instance import Instance
from kvmesh.services.conductor.model_control import CATCH_UP, ModelControl

log = logging.getLogger(__name__)

LOOK_S = 1.0
FIRST_S, MOST_S = 5.0, 300.0  # between attempts at one instance; they double
DEADLINE_S = 600.0  # of one attempt
MOST_AT_ONCE = 32  # instances; more would only share what the weights are read from


@dataclass(frozen=True)
class CatchUp:
    """Orders the members that are one instance to fetch weights."""

    instance_id: str
    members: tuple[Instance, ...]
    newest: NewestWeights


@dataclass(slots=True)
class _Tries:
    at: tuple[Life, ...]
    epoch: int
    count: int = 0
    not_before: float = 0.0


@dataclass(slots=True)
class CatchUpPlan:
    """Decides who fetches weights when. Pure: time is passed in."""

    _tries: dict[str, _Tries] = field(default_factory=dict)
    _running: set[str] = field(default_factory=set)

    def due(self, stale: Iterable[tuple[Instance, NewestWeights]], now: float) -> list[CatchUp]:
        """Returns the orders to give now, of instances whose weights are older than their model's newest. Those that
        are given are under way until `ended`."""
        found: dict[str, list[tuple[Instance, NewestWeights]]] = {}
        for instance, newest in stale:
            found.setdefault(instance_of(instance.ref.instance_id), []).append((instance, newest))
        for name in self._tries.keys() - found.keys() - self._running:
            del self._tries[name]
        orders = []
        for name, members in found.items():
            newest = max((one for _, one in members), key=lambda one: one.epoch)
            lives = tuple(sorted(instance.ref.life for instance, _ in members))
            tries = self._tries.get(name)
            if tries is None or (tries.at, tries.epoch) != (lives, newest.epoch):
                if name in self._running:
                    continue
                tries = self._tries[name] = _Tries(lives, newest.epoch)
            if not newest.path or name in self._running or now < tries.not_before:
                continue
            if len(self._running) >= MOST_AT_ONCE:
                break
            self._running.add(name)
            orders.append(CatchUp(name, tuple(instance for instance, _ in members), newest))
        return orders

    def ended(self, order: CatchUp, error: str, now: float) -> float:
        """Notes how an order ended. Returns in how many seconds it is tried again, if it is still needed."""
        self._running.discard(order.instance_id)
        tries = self._tries.get(order.instance_id)
        if tries is None or not error:
            return 0.0
        tries.count += 1
        after_s = min(MOST_S, FIRST_S * 2.0 ** (tries.count - 1))
        tries.not_before = now + after_s
        return after_s


class WeightsCatchUp:
    """Carries the plan out while this conductor leads. `newest` returns the instances with the newest weights of their
    models."""

    def __init__(
        self,
        control: ModelControl,
        newest: Callable[[], Iterable[tuple[Instance, NewestWeights]]],
        leads: Callable[[], bool],
    ) -> None:
        self._control, self._newest, self._leads = control, newest, leads
        self._plan = CatchUpPlan()
        self._tasks: set[asyncio.Task[None]] = set()
        self._looked = float("-inf")

    def tick(self, now: float) -> None:
        """Begins the orders that are due."""
        if now < self._looked + LOOK_S or not self._leads():
            return
        self._looked = now
        behind = (
            (one, newest)
            for one, newest in self._newest()
            # One that has them, and was not let go on, is left by a conductor that ended in between.
            if (one.model.weights_epoch < newest.epoch or CATCH_UP in one.not_ready_reason)
            and not self._control.is_busy(one.model.name)
        )
        for order in self._plan.due(behind, now):
            task = asyncio.create_task(self._one(order), name=f"weights for {order.instance_id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancels what is under way; an instance ends what it has begun."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _one(self, order: CatchUp) -> None:
        newest, error = order.newest, ""
        log.info("%s is ordered to fetch the weights of epoch %d", order.instance_id, newest.epoch)
        try:
            await self._control.catch_up(order.members, newest.epoch, newest.path, DEADLINE_S)
        except KvmeshError as refusal:
            error = refusal.message
        except Exception as unknown:
            log.exception("%s: fetching weights", order.instance_id)
            error = repr(unknown)
        again_s = self._plan.ended(order, error, asyncio.get_running_loop().time())
        if error:
            text = "%s has not got the weights of epoch %d, and is asked again in %g s: %s"
            log.warning(text, order.instance_id, newest.epoch, again_s, error)

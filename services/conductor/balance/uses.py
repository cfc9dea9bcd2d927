"""When somebody last wanted each model: what scaling to zero and back goes by. Pure.

A model is in use when a request for it comes here, whatever the answer; while an instance of it has a request, whoever
placed it; when an instance computes a prompt that another conductor placed; when a gateway says that it holds requests
for it; and when an instance comes, which is given the time to be found. So it has been idle for no longer than this
conductor itself has watched it be idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvmesh.services.conductor.balance.tally import Tally
from kvmesh.services.conductor.domain import Life

MAX_MODELS = 64


@dataclass(slots=True)
class ModelUse:
    """What is known of one model. `held`: requests at the gateway that told last of some, at `held_at`."""

    since: float
    used_at: float
    held: int = 0
    held_at: float = float("-inf")
    lives: frozenset[Life] = field(default_factory=frozenset)  # of its instances that may get work

    def idle_s(self, now: float) -> float:
        """Returns for how long nobody has wanted it."""
        return now - self.used_at


class ModelUses:
    """The uses of all models, at most MAX_MODELS: those without instances that are idle for longest are forgotten."""

    def __init__(self) -> None:
        self._uses: dict[str, ModelUse] = {}

    def used(self, model: str, now: float) -> ModelUse | None:
        """Notes that somebody wants the model. Returns what is known of it, None when there are too many."""
        use = self._uses.get(model)
        if use is None:
            if len(self._uses) >= MAX_MODELS and not self._forget_one():
                return None
            use = self._uses[model] = ModelUse(now, now)
        use.used_at = now
        return use

    def held(self, requests: Iterable[tuple[str, int]], now: float) -> None:
        """Notes how many requests of which models a gateway holds."""
        for model, count in requests:
            if count and (use := self.used(model, now)) is not None:
                use.held, use.held_at = count, now

    def look(self, tallies: Mapping[str, Tally], now: float) -> None:
        """Takes in which models have instances that may get work now, and whether these have requests."""
        for model, tally in tallies.items():
            use = self._uses.get(model)
            lives = frozenset(tally.roles)
            if use is None or tally.is_busy or lives - use.lives:
                use = self.used(model, now)
            if use is not None:
                use.lives = lives
        for model, use in self._uses.items():
            if model not in tallies:
                use.lives = frozenset()

    def of(self, model: str) -> ModelUse | None:
        """Returns what is known of a model, if anything is."""
        return self._uses.get(model)

    @property
    def absent(self) -> Mapping[str, ModelUse]:
        """The known models of which no instance may get work."""
        return {model: use for model, use in self._uses.items() if not use.lives}

    def _forget_one(self) -> bool:
        absent = self.absent
        if not absent:
            return False
        del self._uses[min(absent, key=lambda model: absent[model].used_at)]
        return True

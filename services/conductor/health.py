"""Why an instance that lives gets no work all the same: an operator's word, or failures of its own. Pure."""

from __future__ import annotations

from services.conductor.domain import CordonState, Life, RequestOutcome
from services.conductor.settings import BreakerSettings


class Cordons:
    """By the instance's name: it outlives restarts."""

    def __init__(self) -> None:
        self._cordons: dict[str, tuple[CordonState, str]] = {}

    def of(self, instance_id: str) -> tuple[CordonState, str]:
        """State and reason."""
        return self._cordons.get(instance_id, (CordonState.OPEN, ""))

    def put(self, instance_id: str, state: CordonState, reason: str) -> CordonState:
        """An operator's word; returns what was."""
        was, _ = self.of(instance_id)
        if state is CordonState.OPEN:
            self._cordons.pop(instance_id, None)
        else:
            self._cordons[instance_id] = state, reason
        return was

    def why_not(self, instance_id: str) -> str:
        """Why it gets no work; "" when it may."""
        state, reason = self.of(instance_id)
        return "" if state is CordonState.OPEN else f"{state.value}{f': {reason}' if reason else ''}"


class Breakers:
    """Rests instances that fail requests."""

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings

    def why_not(self, life: Life, now: float) -> str:
        """Why it rests; "" when it does not."""
        return ""

    def heard(self, outcome: RequestOutcome, now: float) -> None:
        """How a request ended."""

    def drop(self, life: Life) -> None:
        """It is over."""

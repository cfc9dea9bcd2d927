"""Operators' words: which instances get no new work whatever they say of themselves. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvmesh.errors import InvalidRequest, KvmeshError, Overloaded, UnknownInstance
from kvmesh.services.conductor.domain import Cordon, CordonState

MAX_CORDONS = 1024
MAX_REASON = 256  # characters

Word = tuple[CordonState, str]  # and the reason


class Cordons:
    """By the instance's name: they outlive its restarts."""

    def __init__(self) -> None:
        self._words: dict[str, Word] = {}

    def of(self, instance_id: str) -> Word:
        """State and reason."""
        return self._words.get(instance_id, (CordonState.OPEN, ""))

    def named(self, state: CordonState) -> Iterator[str]:
        """Who is in that state."""
        return (name for name, (said, _) in self._words.items() if said is state)

    def refusal(self, event: Cordon, *, known: bool) -> KvmeshError | None:
        """Why an operator's word cannot be taken. `known`: such an instance is registered."""
        name = event.instance_id
        if not known and name not in self._words:
            text = f"instance_id={name!r}: no such instance is registered here"
            return UnknownInstance(text, field="instance_id")
        if len(event.reason) > MAX_REASON:
            return InvalidRequest.of("reason", event.reason[:40] + "...", f"is longer than {MAX_REASON} characters")
        if event.state is not CordonState.OPEN and name not in self._words and len(self._words) >= MAX_CORDONS:
            return Overloaded(f"instance_id={name!r}: {MAX_CORDONS} instances are cordoned already")
        return None

    def put(self, event: Cordon) -> None:
        """It holds from now on."""
        if event.state is CordonState.OPEN:
            self._words.pop(event.instance_id, None)
        else:
            self._words[event.instance_id] = event.state, event.reason

    def why_not(self, instance_id: str) -> str:
        """Why it gets no work; "" when it may."""
        if instance_id not in self._words:
            return ""
        state, reason = self.of(instance_id)
        return "" if state is CordonState.OPEN else f"{state.value}{f': {reason}' if reason else ''}"


def changes(before: Mapping[str, Word], after: Mapping[str, Word]) -> Iterator[Cordon]:
    """What a brain that goes by `before` must hear to go by `after`, which is kept for all conductors."""
    for name in before.keys() - after.keys():
        yield Cordon(name, CordonState.OPEN, kept=True)
    for name, (state, reason) in after.items():
        if before.get(name) != (state, reason):
            yield Cordon(name, state, reason, kept=True)

"""Cordons: operators keep instances from new work, whatever the instances report. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvmesh.errors import InvalidRequest, KvmeshError, Overloaded, UnknownInstance
from kvmesh.membership.places import instance_of
from kvmesh.services.conductor.domain import Cordon, CordonState

MAX_CORDONS = 1024
MAX_REASON = 256  # characters

Word = tuple[CordonState, str]  # and the reason
_OPEN: Word = (CordonState.OPEN, "")


class Cordons:
    """The cordons, by the instance's name; they outlast its restarts. Any of its places may be named instead: what is
    said of one holds for all, which end together."""

    def __init__(self) -> None:
        self._words: dict[str, Word] = {}

    def of(self, instance_id: str) -> Word:
        """Returns state and reason."""
        return self._words.get(instance_of(instance_id), _OPEN) if self._words else _OPEN

    def named(self, state: CordonState) -> Iterator[str]:
        """Yields the names of instances in that state."""
        return (name for name, (said, _) in self._words.items() if said is state)

    def refusal(self, event: Cordon, *, known: bool) -> KvmeshError | None:
        """Returns why a cordon is refused, or None. `known` says that such an instance is registered."""
        name = instance_of(event.instance_id)
        if not known and name not in self._words:
            text = f"instance_id={name!r}: no such instance is registered here"
            return UnknownInstance(text, field="instance_id")
        if len(event.reason) > MAX_REASON:
            return InvalidRequest.of("reason", event.reason[:40] + "...", f"is longer than {MAX_REASON} characters")
        if event.state is not CordonState.OPEN and name not in self._words and len(self._words) >= MAX_CORDONS:
            return Overloaded(f"instance_id={name!r}: {MAX_CORDONS} instances are cordoned already")
        return None

    def put(self, event: Cordon) -> None:
        """Applies a cordon."""
        name = instance_of(event.instance_id)
        if event.state is CordonState.OPEN:
            self._words.pop(name, None)
        else:
            self._words[name] = event.state, event.reason

    def why_not(self, instance_id: str) -> str:
        """Returns why the instance gets no work, or ""."""
        state, reason = self.of(instance_id)
        return "" if state is CordonState.OPEN else f"{state.value}{f': {reason}' if reason else ''}"


def changes(before: Mapping[str, Word], after: Mapping[str, Word]) -> Iterator[Cordon]:
    """Yields the events that bring a brain from the cordons `before` to those `after`, which are kept for all
    conductors."""
    for name in before.keys() - after.keys():
        yield Cordon(name, CordonState.OPEN, kept=True)
    for name, (state, reason) in after.items():
        if before.get(name) != (state, reason):
            yield Cordon(name, state, reason, kept=True)

"""What nodes have acknowledged and not announced yet: until it shows in the map, or `settle_s` are over."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

SETTLE_S = 5.0


class PendingChanges:
    """(key, instance) → whether it will be there. Bounded by what is acknowledged within SETTLE_S."""

    def __init__(self) -> None:
        self._until: OrderedDict[tuple[bytes, str], float] = OrderedDict()
        self._by_key: dict[bytes, dict[str, bool]] = {}

    def __len__(self) -> int:
        return len(self._until)

    def expect(self, keys: Iterable[bytes], instance_id: str, present: bool, now: float) -> None:
        """`instance_id` has just said that it has, or no longer has, these keys."""
        for key in keys:
            self._until[key, instance_id] = now + SETTLE_S
            self._until.move_to_end((key, instance_id))
            self._by_key.setdefault(key, {})[instance_id] = present

    def seen(self, key: bytes, holders: set[str], now: float) -> set[str]:
        """`holders` of the map, as they will be."""
        while self._until:
            (old, instance_id), until = next(iter(self._until.items()))
            if until > now:
                break
            self._drop(old, instance_id)
        expected = self._by_key.get(key)
        if expected is None:
            return holders
        for instance_id, present in list(expected.items()):
            if present == (instance_id in holders):
                self._drop(key, instance_id)
            elif present:
                holders = holders | {instance_id}
            else:
                holders = holders - {instance_id}
        return holders

    def ended(self, instance_id: str) -> None:
        """Its life is over, and what it said void."""
        for key, name in [pair for pair in self._until if pair[1] == instance_id]:
            self._drop(key, name)

    def _drop(self, key: bytes, instance_id: str) -> None:
        del self._until[key, instance_id]
        left = self._by_key[key]
        del left[instance_id]
        if not left:
            del self._by_key[key]

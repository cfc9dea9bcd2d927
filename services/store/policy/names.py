"""Of the public client's names the first binding stands, unless it is replaced.

No operation looks at more entries than it has names, or at LOOK for each name when the table is full.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvmesh.errors import Overloaded

Name = tuple[str, str]  # namespace, name
LOOK = 8  # bindings looked at to make room for one


@dataclass(frozen=True, slots=True)
class Binding:
    """Says what a name stands for. `at` is the time of binding in seconds on the master's clock, `after` the last
    tombstone then."""

    key: bytes
    at: float
    after: int


class Names:
    """Keeps at most `most` bindings. A binding stands while nobody has unbound it or removed its block, and its block
    is held by some node or was bound less than `grace_s` ago (its holder has yet to announce it, or a new leader has
    yet to be told)."""

    def __init__(
        self,
        held: Callable[[bytes], bool],
        removed_since: Callable[[bytes, int], bool],
        *,
        grace_s: float = 30.0,
        most: int = 1 << 20,
    ) -> None:
        self._held = held
        self._removed_since = removed_since
        self._grace_s = grace_s
        self._most = most
        self._bound: OrderedDict[Name, Binding] = OrderedDict()  # the oldest first

    def __len__(self) -> int:
        return len(self._bound)

    def load(self, bound: Iterable[tuple[Name, bytes, int]], now: float) -> None:
        """Takes the bindings that an earlier leader left, as (name, key, the last tombstone then). No node has
        announced yet, so the grace begins anew."""
        self._bound.update((name, Binding(key, now, after)) for name, key, after in bound)

    def bind(
        self, namespace: str, names: Sequence[tuple[str, bytes]], after: int, now: float, *, replace: bool = False
    ) -> tuple[list[bytes], dict[Name, bytes], list[Name]]:
        """Returns what each name will stand for, the bindings that are new, and the names that were dropped for room.
        With `replace` each name will stand for the given key, whatever it stands for now; the last key counts for a
        name that is given twice. Nothing is bound before `bound` is called with the new ones: until then a name stands
        for what it stood for. Raises Overloaded when there is no room."""
        fresh = {text for text, _ in names if (namespace, text) not in self._bound}
        dropped = self._make_room(len(fresh), now)
        if replace:
            wanted = {(namespace, text): key for text, key in names}
            new = {name: key for name, key in wanted.items() if self._standing(name, now) != key}
            return [wanted[namespace, text] for text, _ in names], new, dropped
        new = {}
        keys = []
        for text, key in names:
            name = (namespace, text)
            stands_for = self._standing(name, now)
            keys.append(new.setdefault(name, key) if stands_for is None else stands_for)
        return keys, new, dropped

    def bound(self, new: Mapping[Name, bytes], after: int, now: float) -> None:
        """Binds these names to these keys."""
        for name, key in new.items():
            self._bound[name] = Binding(key, now, after)
            self._bound.move_to_end(name)

    def resolve(self, namespace: str, names: Sequence[str]) -> list[bytes | None]:
        """Returns what each name stands for; None for an unknown name."""
        found = [self._bound.get((namespace, name)) for name in names]
        return [b.key if b is not None and not self._removed_since(b.key, b.after) else None for b in found]

    def ends(self, namespace: str, names: Sequence[str], keys: Sequence[bytes | None]) -> list[Name]:
        """Returns those of `names` that stand for the given key; None means for nothing."""
        pairs = zip(names, self.resolve(namespace, names), keys, strict=True)
        return [(namespace, name) for name, key, wanted in pairs if key == wanted]

    def unbound(self, names: Iterable[Name]) -> None:
        """Forgets these names."""
        for name in names:
            self._bound.pop(name, None)

    def _standing(self, name: Name, now: float) -> bytes | None:
        """Returns the key that the name stands for so that nobody else may bind it; None if the name is free."""
        known = self._bound.get(name)
        return known.key if known is not None and self._stands(known, now) else None

    def _stands(self, binding: Binding, now: float) -> bool:
        if self._removed_since(binding.key, binding.after):
            return False
        return now - binding.at < self._grace_s or self._held(binding.key)

    def _make_room(self, count: int, now: float) -> list[Name]:
        """Drops the oldest bindings that do not stand until `count` more fit, and looks at LOOK of them at most for
        each. Returns the dropped names. Raises Overloaded when there is no room."""
        excess = len(self._bound) + count - self._most
        dropped: list[Name] = []
        for _ in range(LOOK * excess):
            if excess <= len(dropped):
                break
            name, binding = next(iter(self._bound.items()), (None, None))
            if name is None or binding is None:
                break
            if self._stands(binding, now):
                self._bound.move_to_end(name)
            else:
                del self._bound[name]
                dropped.append(name)
        if excess > len(dropped):
            raise Overloaded(
                f"{len(self._bound)} names are bound, at most {self._most}: max_names", retry_after_ms=1000
            )
        return dropped

"""Hard pins of the master that nobody wishes for any more: to be undone at each life that has them, or may have.

Kept where the next leader finds them: a pin that nobody remembers would hold memory as long as that life lasts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable

from services.store.policy.nodes import Nodes
from services.store.policy.work import MAX_KEYS

LOOK = 1024  # in one tick
MAX_UNPINS = 1 << 16  # yet to be undone, at nodes that are away too; past it the oldest are forgotten

Life = tuple[str, int]  # instance id, incarnation
Pinned = tuple[Life, bytes]


class Unpins:
    """All that are open, and which of them differ from what is kept."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._open: OrderedDict[Pinned, None] = OrderedDict()
        self._changed: dict[Pinned, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, pinned: Pinned) -> bool:
        return pinned in self._open

    def load(self, kept: Iterable[Pinned]) -> None:
        """What an earlier leader left."""
        self._open.update(dict.fromkeys(kept))

    def add(self, lives: Iterable[Life], key: bytes) -> None:
        """It is pinned there, and should not be."""
        for life in lives:
            self._open[life, key] = None
            self._changed[life, key] = None
        while len(self._open) > MAX_UNPINS:
            self._changed[self._open.popitem(last=False)[0]] = None

    def done(self, life: Life, keys: Iterable[bytes]) -> None:
        """That life has no pin of these any more, or they are wished for again."""
        for key in keys:
            if (life, key) in self._open:
                del self._open[life, key]
                self._changed[life, key] = None

    def due(self, busy: Container[bytes], wished: Callable[[bytes], bool], now: float) -> dict[Life, list[bytes]]:
        """What to ask for now. One that is no member now may join again, the same life, and waits."""
        found: dict[Life, list[bytes]] = {}
        for _ in range(min(LOOK, len(self._open))):
            life, key = pinned = next(iter(self._open))
            node = self._nodes.get(life[0])
            if wished(key) or (node is not None and node.member.incarnation != life[1]):
                self.done(life, (key,))  # its pins ended with that life
                continue
            self._open.move_to_end(pinned)
            keys = found.setdefault(life, [])
            if node is not None and key not in busy and now >= node.avoid_until and len(keys) < MAX_KEYS:
                keys.append(key)
        return {life: keys for life, keys in found.items() if keys}

    # ── what is kept ─────────────────────────────────────────────────────────────────────────────────

    @property
    def owes(self) -> bool:
        """Whether any came or went."""
        return bool(self._changed)

    def take_changed(self) -> list[Pinned]:
        """Those that came or went since the last call; `in` tells which."""
        changed, self._changed = self._changed, {}
        return list(changed)

    def not_kept(self, changed: Iterable[Pinned]) -> None:
        """They are changed still."""
        self._changed.update(dict.fromkeys(changed))

"""What the master orders at nodes, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.store.domain import Member

MAX_KEYS = 64  # of one order


@dataclass(frozen=True)
class Pull:
    """`receiver` copies `keys`, about `nbytes`, from `holders`, tried in this order. `after`: the last tombstone when
    it was ordered. `pins`: what is pinned hard there is pinned hard here too, or not copied."""

    receiver: Member
    holders: tuple[Member, ...]
    keys: tuple[bytes, ...]
    nbytes: int
    after: int
    pins: bool = False


@dataclass(frozen=True)
class Trim:
    """Remove `keys` at `holder`, those of them that each of `keepers` has. `spare`: what somebody has pinned hard there
    stays, and is not done."""

    holder: Member
    keepers: tuple[Member, ...]
    keys: tuple[bytes, ...]
    spare: bool = True


@dataclass(frozen=True)
class Pin:
    """Pin `keys` hard at `holder`, or unpin them."""

    holder: Member
    keys: tuple[bytes, ...]
    hard: bool


@dataclass(frozen=True)
class Discard:
    """Remove `keys` at `holder`: a copy of them was under way when they were removed everywhere."""

    holder: Member
    keys: tuple[bytes, ...]


Work = Pull | Trim | Pin | Discard
Then = Callable[[frozenset[bytes], bool, float], None]


@dataclass(frozen=True)
class Order:
    """To be told `then(done, answered, now)`: the keys for which it was done, and whether the node answered at all."""

    work: Work
    then: Then

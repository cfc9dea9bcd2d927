"""What the front knows and decides of a tier below DRAM: which blocks all ranks have there, which are to be written
next, which of those read deserve to stay in DRAM, how long a read takes. Pure."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence

from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.store_stats import Changes
from kvmesh.tiers.ssd.sketch import FrequencySketch

# A look at the cold blocks costs O(blocks above the threshold). So it looks at MAX_LOOK at most, and only when one in
# SCAN_SHARE of them is new. Blocks further from eviction wait until they come nearer.
MAX_LOOK = 8192
SCAN_SHARE = 8
MAX_FRESH = 65_536


class Contents:
    """Keeps the keys of one part of one tier. A block is there when every one of `ranks` ranks has its shard. `group`
    is the cache group whose objects these are; None if a block is one object."""

    def __init__(self, ranks: int, group: int | None = None) -> None:
        self.group = group
        self._all = (1 << ranks) - 1
        self._ranks: dict[bytes, int] = {}
        self.sizes: dict[bytes, int] = {}  # bytes of blocks, where ranks have told them
        self._touched: dict[bytes, None] = {}  # keys that came or went since `take_touched`
        self._moving: dict[bytes, int] = {}  # key on its way from the tier above → bitset of ranks
        self._there = 0

    def __contains__(self, key: object) -> bool:
        return self._ranks.get(key) == self._all  # type: ignore[call-overload, no-any-return]

    def __len__(self) -> int:
        return self._there

    def keys(self) -> list[bytes]:
        """Returns the keys that every rank has. Its cost is O(blocks)."""
        return [key for key, ranks in self._ranks.items() if ranks == self._all]

    def any_key(self) -> bytes | None:
        """Returns the key of some block that every rank has; None if there is none. Its cost is O(1), unless the ranks
        differ much."""
        return next((key for key, ranks in self._ranks.items() if ranks == self._all), None)

    def named(self) -> list[bytes]:
        """Returns the keys that any rank has, or is about to have. It copies a table: 10 ns a block."""
        return [*self._ranks, *self._moving]

    def changed(
        self, rank: int, sealed: Sequence[bytes], removed: Iterable[bytes], sizes: Sequence[int] = ()
    ) -> Changes:
        """Takes a rank's report. Returns which blocks came and which went with it."""
        came: list[bytes] = []
        went: list[bytes] = []
        for key in removed:
            before = self._ranks.get(key, 0)
            if before == self._all:
                went.append(key)
            if before & ~(1 << rank):
                self._ranks[key] = before & ~(1 << rank)
            else:
                self._ranks.pop(key, None)
                self.sizes.pop(key, None)
        for key in sealed:
            before = self._ranks.get(key, 0)
            self._ranks[key] = after = before | 1 << rank
            if after == self._all != before:
                came.append(key)
        self.sizes.update(zip(sealed, sizes, strict=False))
        self._there += len(came) - len(went)
        self._touched.update(dict.fromkeys((*went, *came)))
        return Changes(tuple(came), tuple(went))

    def moving(self, rank: int, keys: Iterable[bytes], over: bool) -> None:
        """Notes that keys are on their way to this rank from the tier above, or (`over`) no more."""
        for key in keys:
            ranks = self._moving.get(key, 0)
            ranks = ranks & ~(1 << rank) if over else ranks | 1 << rank
            if ranks:
                self._moving[key] = ranks
            else:
                self._moving.pop(key, None)

    def known(self, key: bytes) -> bool:
        """Whether any rank has the block, or is about to."""
        return key in self._ranks or key in self._moving

    def clear(self) -> None:
        """Forgets all keys, because the ranks are gone."""
        self._touched.update(dict.fromkeys(self.keys()))
        self._ranks.clear()
        self._moving.clear()
        self.sizes.clear()
        self._there = 0

    def take_touched(self) -> dict[bytes, None]:
        """Returns the keys that came or went since the last call."""
        touched, self._touched = self._touched, {}
        return touched


class TierSource:
    """Announces all parts of one tier of a node as one store: a key is there as long as any part has it."""

    def __init__(self) -> None:
        self.parts: list[Contents] = []

    def take_changes(self) -> Changes:
        """Returns changes as `NodeStore.take_changes` does."""
        touched: dict[bytes, None] = {}
        for part in self.parts:
            touched.update(part.take_touched())
        here = tuple(key for key in touched if self.holds(key))
        return Changes(here, tuple(touched.keys() - set(here)), self.masks(here))

    def masks(self, keys: Sequence[bytes]) -> bytes:
        """Returns which objects of each key are there, as one mask a key; b"" where every block is one object."""
        if all(part.group is None for part in self.parts):
            return b""
        masks = bytearray(len(keys))
        for part in self.parts:
            for at, key in enumerate(keys):
                masks[at] |= (key in part) << (part.group or 0)
        return bytes(masks)

    def keys(self) -> list[bytes]:
        """Returns all keys, each once. Its cost is O(blocks)."""
        return list(dict.fromkeys(itertools.chain.from_iterable(part.keys() for part in self.parts)))

    def named(self) -> list[bytes]:
        """Returns the keys of blocks that any rank has, some twice. It copies tables: 10 ns a block."""
        return list(itertools.chain.from_iterable(part.named() for part in self.parts))

    def holds(self, key: bytes) -> bool:
        """Whether any part has the block."""
        return any(key in part for part in self.parts)


class WriteBehind:
    """Chooses which blocks of a node store to write to the tier next: the coldest ones, as soon as more than `percent`
    of all extents are in use. `added` is to be called for every sealed block; it is what makes `next` look again."""

    def __init__(self, percent: int, most: int) -> None:
        self._percent = percent
        self._most = most  # blocks that `next` returns at most
        self._added = 0
        self._late = False
        self._queue: deque[bytes] = deque()
        self._refused: dict[bytes, None] = {}  # keys that the tier refused since the last look: not offered again

    def added(self) -> None:
        """Notes that one more block is sealed."""
        self._added += 1

    def hurry(self) -> bool:
        """Notes that some time has passed. Returns whether there is reason to call `next`, which then looks even if few
        blocks were added."""
        self._late = bool(self._added)
        return self._late

    def refused(self, keys: Iterable[bytes]) -> None:
        """Notes that the tier did not take these, because its queue or its space was full."""
        self._refused.update(dict.fromkeys(keys))

    def next(
        self,
        store: NodeStore,
        there: Container[bytes],
        writing: Iterable[bytes],
        extra: int = 0,
        takes: Callable[[bytes], bool] = lambda key: True,
    ) -> list[bytes]:
        """Returns at most `most` blocks; [] when there is nothing to do before more are sealed. `writing` are keys on
        their way, `extra` is how many more blocks are about to come, and `takes` says whether the tier could ever hold
        a block."""
        if not self._queue:
            self._look(store, extra)
        busy = set(writing)
        keys: list[bytes] = []
        while self._queue and len(keys) < self._most:
            key = self._queue.popleft()
            wanted = key not in there and key not in busy and key not in self._refused
            if wanted and store.holds(key) and takes(key):
                keys.append(key)
        return keys

    def _look(self, store: NodeStore, extra: int) -> None:
        usage = store.usage
        excess = usage.total - usage.unheld - usage.total * self._percent // 100 + extra
        excess = min(excess, MAX_LOOK)
        due = self._late or self._added * SCAN_SHARE >= excess
        if excess <= 0 or not (due or extra):
            return
        if due:
            self._added, self._late = 0, False
            self._refused.clear()
        self._queue.extend(store.coldest(excess))


class Promotion:
    """Decides whether blocks that were read from a lower tier stay in DRAM as if computed there, or are evicted first
    after use."""

    def __init__(self, sketch: FrequencySketch) -> None:
        self._sketch = sketch
        self._fresh: dict[bytes, int] = {}  # in the order of sealing; key → monotonic ns

    def sealed(self, key: bytes, now: int) -> None:
        """Notes that a block that the tier has is in DRAM (again), because somebody wanted to read it."""
        self._fresh.pop(key, None)
        if len(self._fresh) < MAX_FRESH:
            self._fresh[key] = now

    @property
    def waiting(self) -> bool:
        return bool(self._fresh)

    def settle(self, store: NodeStore, there: Container[bytes], before: int) -> int:
        """Judges the blocks that were sealed until `before`, so that whoever they were read for has had the time to use
        them. A block that is used less than the one that would be evicted next is evicted before that one; all are in
        the lower tier, too. Returns how many stay."""
        due: list[bytes] = []
        for key, sealed_ns in self._fresh.items():
            if sealed_ns > before:
                break
            due.append(key)
        for key in due:
            del self._fresh[key]
        here = [key for key in due if key in there and store.holds(key)]
        victim = store.coldest(1) if not store.usage.unheld else []
        passing = [key for key in here if victim and not self._sketch.prefers(key, victim[0])]
        store.replicated(here)
        store.evict_first(passing)
        return len(here) - len(passing)


class ReadTime:
    """Predicts the time of a read: first + bytes / rate, fitted by decayed least squares to the latest reads. 0:
    unknown."""

    def __init__(self, decay: float = 0.95) -> None:
        self._decay = decay
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, nbytes: int, took_ns: int) -> None:
        """Records one operation that brought all that it was asked for."""
        for name in ("_n", "_x", "_y", "_xx", "_xy"):
            setattr(self, name, getattr(self, name) * self._decay)
        x, y = float(nbytes), float(took_ns)
        self._n += 1
        self._x += x
        self._y += y
        self._xx += x * x
        self._xy += x * y

    @property
    def read_ns(self) -> int:
        """The time until the first byte."""
        return int(self._fit()[0])

    @property
    def bytes_per_s(self) -> int:
        """The rate after the first byte."""
        slope = self._fit()[1]
        return int(1e9 / slope) if slope > 0 else 0

    def _fit(self) -> tuple[float, float]:
        """Returns ns, and ns a byte."""
        if not self._x:
            return 0.0, 0.0
        mean = self._y / self._x  # the rate if the first byte cost nothing
        spread = self._n * self._xx - self._x * self._x
        if spread < 1e-3 * self._n * self._xx:  # all reads had one size, so the two cannot be told apart
            return 0.0, mean
        slope = (self._n * self._xy - self._x * self._y) / spread
        first = (self._y - slope * self._x) / self._n
        return (first, slope) if slope > 0 and first >= 0 else (0.0, mean)

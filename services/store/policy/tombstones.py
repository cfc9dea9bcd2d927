"""Tombstones record what was removed, and are kept until every node has applied them.

Tombstones have a growing seq (the leader's term in the upper half). A node applies them in that order; while it has not
applied one, what it announces of the removed keys is masked. A node that is asked directly and answers has applied it.
In any case a node is told all tombstones newer than what it reports when it joins or beats, and skips those that it was
asked directly. What was masked may have been sealed anew after the tombstone was applied, so that node owes a snapshot
as soon as nothing of it is masked any more.

Memory is bounded: a tombstone that all members have reported goes after `retention_s`, and the oldest go when more than
`max_keys` keys are kept. `floor` is the highest that has gone: a node that comes with less, and was no member here that
had applied it, may have missed some that nobody knows any more. It is told to remove everything it has.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from kvmesh.kvcache.tombstones import RECORD_KEYS, Tombstone

TERM_SHIFT = 32
MAX_ANSWER_KEYS = 65_536  # in one answer to a node: 1 MiB
MAX_RETIRED = 16_384  # keys that are dropped for their age in one step: some ten milliseconds
MAX_LEFT = 10_000  # names of earlier members
MAX_AWAY = 1024  # names of earlier members in the answer to a removal


def first_seq(term: int, wall_ns: int) -> int:
    """Returns the first seq of a term. Where terms are seconds of the wall clock, two lives of a master may have the
    same one. Then the lower half of the seq is the elapsed fraction of that second, so that the later life's numbers
    are higher; else what a node has applied of one life would count for the other's."""
    seconds, ns = divmod(wall_ns, 10**9)
    if seconds == term:
        return (term << TERM_SHIFT) + (ns << TERM_SHIFT) // 10**9
    late = seconds == term + 1  # the second was over before the clock was read again
    return (term << TERM_SHIFT) + (0xFFFF0000 if late else 0)


class Tombstones:
    """Keeps all tombstones, and how far each member has applied them."""

    def __init__(self, *, retention_s: float = 3600.0, max_keys: int = 1 << 20, wall_ns: int = 0) -> None:
        """`wall_ns` are nanoseconds of the wall clock since the epoch of terms; see `first_seq`."""
        self._retention_s = retention_s
        self._max_keys = max_keys
        self._wall_ns = wall_ns
        self._kept: deque[Tombstone] = deque()
        self._size = 0
        self._keys: dict[bytes, int] = {}  # key → seq of the last tombstone that names it
        self._prefixes: dict[bytes, int] = {}
        self._applied: dict[str, int] = {}
        self._lasting: dict[str, int] = {}  # of members of which not all lasts: what the next incarnation has applied
        self._reported: dict[str, int] = {}  # never more than the same entry of `_applied`
        self._asking: dict[str, int] = {}  # the tombstone that a member is being asked to apply
        self._left: OrderedDict[str, tuple[int, float]] = (
            OrderedDict()
        )  # what earlier members had applied, and since when
        self._owing: set[str] = set()  # stores of which keys were masked
        self.floor = 0
        self.last = 0

    def __len__(self) -> int:
        return len(self._kept)

    def load(self, kept: Iterable[Tombstone], floor: int) -> None:
        """Takes what an earlier leader left."""
        self.floor = self.last = floor
        for each in sorted(kept, key=lambda tombstone: tombstone.seq):
            self._keep(each)

    def add(self, term: int, keys: Sequence[bytes], prefix: bytes, now: float) -> Tombstone:
        """Makes a tombstone with the highest seq so far."""
        made = Tombstone(max(self.last + 1, first_seq(term, self._wall_ns)), tuple(keys), prefix, now)
        self._keep(made)
        return made

    def _keep(self, made: Tombstone) -> None:
        self._kept.append(made)
        self._size += RECORD_KEYS + len(made.keys)
        self.last = made.seq
        self._keys.update(dict.fromkeys(made.keys, made.seq))
        if made.prefix:
            self._prefixes[made.prefix] = made.seq

    # ── members ──────────────────────────────────────────────────────────────────────────────────────

    def joined(self, instance_id: str, applied: int, lasting: int | None = None) -> None:
        """Adds a member that has applied all tombstones up to `applied`. `lasting` is given where its next incarnation
        may have blocks again that this one does not remove: it has applied all up to there."""
        self._lasting.pop(instance_id, None)
        if lasting is not None:
            self._lasting[instance_id] = lasting
        known = min(applied, self.last)
        if self._left.get(instance_id, (0, 0.0))[0] >= self.floor:
            known = max(known, self.floor)  # an earlier incarnation had applied what is forgotten
        self._applied[instance_id] = self._reported[instance_id] = known

    def ended(self, instance_id: str, now: float) -> None:
        """Notes that a node is a member no more."""
        applied = self._applied.pop(instance_id, 0)
        self._left[instance_id] = (min(applied, self._lasting.pop(instance_id, applied)), now)
        self._left.move_to_end(instance_id)
        if len(self._left) > MAX_LEFT:
            self._left.popitem(last=False)
        self._reported.pop(instance_id, None)
        self._owing = {name for name in self._owing if _instance(name) != instance_id}

    def away(self, now: float) -> list[str]:
        """Returns the nodes that were members in the last `retention_s`, are none now, and may come back with what they
        had: the last MAX_AWAY of them. Members of an earlier leader are not known."""
        found: list[str] = []
        for name, (_, since) in reversed(self._left.items()):
            if now - since > self._retention_s or len(found) == MAX_AWAY:
                break
            if name not in self._applied:
                found.append(name)
        return found

    def reported(self, instance_id: str, seq: int) -> None:
        """Notes that a member reports to have applied all up to `seq`."""
        if instance_id in self._reported:
            self._reported[instance_id] = max(self._reported[instance_id], min(seq, self.last))
            self.applied(instance_id, seq)

    def applied(self, instance_id: str, seq: int) -> None:
        """Notes that a member has applied all up to `seq`."""
        if instance_id in self._applied:
            self._applied[instance_id] = max(self._applied[instance_id], min(seq, self.last))

    def asking(self, instance_id: str, seq: int) -> None:
        """Notes that a member is being asked to apply this tombstone (0: no more). Until then heartbeats do not tell it
        of this one, which it could take for another."""
        if seq:
            self._asking[instance_id] = seq
        else:
            self._asking.pop(instance_id, None)

    def is_next(self, instance_id: str, seq: int) -> bool:
        """Whether that member has applied all but this tombstone and later ones: only then may it be asked directly."""
        applied = self._applied.get(instance_id)
        if applied is None or applied < self.floor:
            return False
        at = self._after(applied)
        return at < len(self._kept) and self._kept[at].seq == seq

    def has_applied(self, instance_id: str, seq: int) -> bool:
        """Whether that member has applied the tombstone. False for a node that is no member."""
        return self._applied.get(instance_id, -1) >= seq

    def is_behind(self, instance_id: str) -> bool:
        """Whether that member has a tombstone yet to apply."""
        return self._applied.get(instance_id, self.last) < self.last

    def newer(self, instance_id: str, most: int = MAX_ANSWER_KEYS) -> list[Tombstone]:
        """Returns the tombstones that the member has yet to report, in order: one if there is any, and more up to
        `most` keys."""
        reported = self._reported.get(instance_id, self.last)
        if reported >= self.last:
            return []
        if self._applied[instance_id] < self.floor:
            return [Tombstone(self.floor)]
        found: list[Tombstone] = []
        size = 0
        for at in range(self._after(reported), len(self._kept)):
            each = self._kept[at]
            size += RECORD_KEYS + len(each.keys)
            if each.seq == self._asking.get(instance_id) or (found and size > most):
                break
            found.append(each)
        return found

    def _after(self, seq: int) -> int:
        """Returns the index in `_kept` of the first tombstone above `seq`."""
        return bisect_right(self._kept, seq, key=lambda each: each.seq)

    # ── announcements ────────────────────────────────────────────────────────────────────────────────

    def masked(self, instance_id: str, keys: Sequence[bytes]) -> set[bytes]:
        """Returns those of `keys` that this member must not bring back. Its cost is O(1) when the member is not
        behind."""
        applied = self._applied.get(instance_id, self.last)
        if applied >= self.last:
            return set()
        if applied < self.floor:
            return set(keys)
        return {key for key in keys if self._covered(key) > applied}

    def owes(self, store_id: str) -> None:
        """Notes that keys that this store announced were masked."""
        self._owing.add(store_id)

    def wants_snapshot(self, store_id: str) -> bool:
        """Whether the store owes a snapshot and none of its keys would be masked now."""
        return store_id in self._owing and not self.is_behind(_instance(store_id))

    def began_snapshot(self, store_id: str) -> None:
        """Notes that the first part of a snapshot has arrived."""
        if self.wants_snapshot(store_id):
            self._owing.discard(store_id)

    def covered_since(self, key: bytes, seq: int) -> bool:
        """Whether a tombstone newer than `seq` removed `key`."""
        if self.last <= seq:
            return False
        return self._covered(key) > seq

    def _covered(self, key: bytes) -> int:
        """Returns the seq of the last tombstone that removed `key`; 0 if none that is known did. Its cost is O(length
        of the key), however many tombstones there are."""
        last = self._keys.get(key, 0)
        if self._prefixes:
            last = max(last, *(self._prefixes.get(key[:size], 0) for size in range(1, len(key) + 1)))
        return last

    # ── bounds ───────────────────────────────────────────────────────────────────────────────────────

    def retire(self, now: float) -> list[Tombstone]:
        """Drops and returns the oldest tombstones: those that need not be kept (a bounded number; the next call goes
        on) and those for which there is no room."""
        slowest = min(self._reported.values(), default=self.last)
        gone = []
        left = MAX_RETIRED
        while self._kept:
            oldest = self._kept[0]
            old = oldest.seq <= slowest and now - oldest.at > self._retention_s
            if not (old and left > 0) and (self._size <= self._max_keys or len(self._kept) == 1):
                break
            gone.append(self._kept.popleft())
            self._size -= RECORD_KEYS + len(oldest.keys)
            left -= RECORD_KEYS + len(oldest.keys)
            self.floor = oldest.seq
            for key in oldest.keys:
                if self._keys.get(key) == oldest.seq:
                    del self._keys[key]
            if self._prefixes.get(oldest.prefix) == oldest.seq:
                del self._prefixes[oldest.prefix]
        return gone


def _instance(store_id: str) -> str:
    return store_id.partition("#")[0]

"""What a node store reports of itself: counts, how its extents are used, and why it has no room."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.kvcache.page_pool import PoolExhausted


@dataclass(frozen=True, slots=True)
class Changes:
    """How the sealed keys changed: removing `removed` and then adding `sealed` gives the present state. `groups` has
    one mask of cache groups for each of `sealed`: what is held of it from now on, never 0; empty: 1 each. What has gone
    in all groups is in `removed`, what has gone in some is in `sealed` again."""

    sealed: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    groups: bytes = b""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counts of a node store. `sealed`, `idle` (of those), `writing`, `leases` and the last four are present values;
    the others count since the start."""

    sealed: int
    idle: int
    writing: int
    leases: int
    hits: int  # blocks asked for by `hold` and `lease` and found
    misses: int
    evicted: int
    leases_given: int
    leased_blocks: int  # in all leases given
    soft_pinned: int = 0
    hard_pinned: int = 0
    tombstones: int = 0  # removed blocks whose extents are still being read
    sealed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """How the extents are used. Each is counted once: unheld, idle, writing, pinned, leased and held add up to
    `total`."""

    total: int
    unheld: int
    idle: int  # sealed, can be evicted; `spared` of them by soft pins, only when nothing else is left
    spared: int
    writing: int
    pinned: int  # hard
    leased: int  # and not pinned; those of removed blocks too
    held: int  # by `allocate`, `share` or `hold`, and none of the above

    def __str__(self) -> str:
        return (
            f"{self.held} held, {self.leased} leased, {self.pinned} pinned, {self.writing} being written, "
            f"{self.idle} idle"
        )


class StoreExhausted(PoolExhausted):
    """More extents were asked for than are unheld or idle; none was taken and none evicted. `next_expiry` is when a
    lease or soft pin ends (monotonic ns, None if none is open). Waiting is up to the caller."""

    def __init__(self, wanted: int, usage: StoreUsage, next_expiry: int | None) -> None:
        super().__init__(wanted, usage.unheld + usage.idle, usage.total)
        self.args = (f"{wanted} extents wanted, {self.free} of {self.total} free: {usage}",)
        self.usage = usage
        self.next_expiry = next_expiry

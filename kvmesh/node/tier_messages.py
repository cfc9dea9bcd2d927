"""What front and rank say about tiers below DRAM. A rank's tier has one *part* for each layout of shards that its node
keeps (an instance has part 0), with one number in every tier. Keys travel packed, 16 bytes each. Part of
`kvmesh.node.messages`.
"""

from __future__ import annotations

from kvmesh.node.store_messages import Message

# ── front → rank ──────────────────────────────────────────────────────────────────────────────────


class TierOpen(Message, frozen=True):
    """Recover what lies at `path` and take puts from now on. TierChanged says what there is, then TierOpened answers.
    `identity`: what the blocks belong to beyond their keys; `room`: bytes of the largest. `tier` is a
    kvmesh.kvcache.tiers.Tier; `below`: the one that gets what this one evicts and was used `demote_uses` times, 0:
    none. That one is opened first."""

    tier: int
    part: int
    path: str
    identity: str
    capacity_bytes: int
    room: int
    mixed: bool = False  # blocks of many sizes: TierChanged tells them
    below: int = 0
    demote_uses: int = 0


class TierPut(Message, frozen=True):
    """Store blocks: key i is the `sizes[i]` bytes at `offsets[i]` of this rank's segment, in its host region. Answer
    TierDone; until then nobody may change or free that memory. `uses`: how often each was used lately (0..15)."""

    ticket: int
    tier: int
    part: int
    keys: bytes
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    uses: bytes = b""


class TierGet(Message, frozen=True):
    """Read blocks into extents of `room` bytes at `offsets`. Answer TierDone; until then that memory is the tier's.
    What has not begun at `deadline_ns` is given up."""

    ticket: int
    tier: int
    part: int
    keys: bytes
    offsets: tuple[int, ...]
    room: int
    deadline_ns: int


class TierRemove(Message, frozen=True):
    """None of these is found from now on, nor after a restart. Answer TierDone: all positions, or none (say it again).
    Whatever was stored before is told by a TierChanged that comes first."""

    ticket: int
    tier: int
    part: int
    keys: bytes


class TierUsed(Message, frozen=True):
    """Blocks of this tier were used in memory, so often lately (`uses`: 0..15 of each). No answer."""

    tier: int
    part: int
    keys: bytes
    uses: bytes


class TierProbe(Message, frozen=True):
    """Read this block, for nobody: does the tier answer? TierDone: position 0, or none."""

    ticket: int
    tier: int
    part: int
    key: bytes


# ── rank → front ──────────────────────────────────────────────────────────────────────────────────


class TierOpened(Message, frozen=True):
    """`why_not` "": it is in use; else what is wrong with the folder."""

    tier: int
    part: int
    why_not: str = ""


class TierDone(Message, frozen=True):
    """`done`: positions of the operation that succeeded; `sizes`: bytes of each of those (gets and puts)."""

    ticket: int
    done: tuple[int, ...]
    sizes: tuple[int, ...]
    start_ns: int
    end_ns: int


class TierChanged(Message, frozen=True):
    """How the keys that this rank's part holds have changed: first remove, then add."""

    tier: int
    part: int
    sealed: bytes
    removed: bytes
    sizes: tuple[int, ...] = ()  # of what is sealed, when they differ


class TierMoving(Message, frozen=True):
    """These are on their way into this tier from the one above, which may let go of them from now on; `over`: they have
    arrived (a TierChanged came first), or never will."""

    tier: int
    part: int
    keys: bytes
    over: bool = False


class TierStats(Message, frozen=True):
    """Now, and counts since the start."""

    tier: int
    part: int
    capacity_bytes: int
    used_bytes: int
    blocks: int
    hits: int
    misses: int
    written_bytes: int
    read_bytes: int
    evicted: int
    failed: int  # I/O errors and damaged blocks
    why_not: str = ""  # slower than it could be, or refusing puts for now
    demoted: int = 0  # blocks that came from the tier above
    dropped: int = 0  # ... that were to come, and did not

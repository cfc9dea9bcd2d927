"""What front and rank say about the node store: copies between device pages and the host segment, pulls from others.
Part of `kvmesh.node.messages`, which everybody imports.
"""

from __future__ import annotations

import msgspec

from kvmesh.transfer import Carried, TrafficClass


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages; the class name is the tag."""


# ── front → rank: the node store ──────────────────────────────────────────────────────────────────


class SealCopy(Message, frozen=True):
    """Device pages → host extents, for the node store. Answer SealCopied; the front holds both until then. It may be
    done before a PrefillStep that was sent earlier: name only pages that PrefillStepDone has made complete."""

    ticket: int
    pages: tuple[int, ...]
    extents: tuple[int, ...]


class LoadCopy(Message, frozen=True):
    """Sealed host extents → device pages. Answer LoadCopied. Done before any PrefillStep that is sent later, but not
    before other commands (PushOpen!): pages may be named as complete only once LoadCopied is here, or by that step."""

    ticket: int
    extents: tuple[int, ...]
    pages: tuple[int, ...]


class PullOpen(Message, frozen=True):
    """READ whole shards at `offsets` of `segment` (open already) to `landing`: offsets in this rank's own segment, in
    its host region. Off the step's path. Answer PullEnded, always; until then that memory belongs to the transfer
    engine. What is not here at `deadline_ns` is given up. `traffic_class` is a kvmesh.transfer.TrafficClass."""

    ticket: int
    segment: str
    offsets: tuple[int, ...]
    landing: tuple[int, ...]
    shard_bytes: int
    deadline_ns: int
    traffic_class: int = TrafficClass.PREFETCH
    sizes: tuple[int, ...] = ()
    guard: int = 0
    guard_offset: int = 0


class PullCancel(Message, frozen=True):
    """Stop early; PullEnded says what arrived. Unknown tickets are ignored."""

    ticket: int


class Sum(Message, frozen=True):
    """xxh3_64 of each span of our host region. Answer Summed; until then nobody may write there. What has not begun at
    `deadline_ns` is given up: nobody waits for it any more."""

    ticket: int
    offsets: tuple[int, ...]  # in our own segment
    sizes: tuple[int, ...]
    deadline_ns: int


# ── rank → front ──────────────────────────────────────────────────────────────────────────────────


class SealCopied(Message, frozen=True):
    """`bad`: positions whose KV is not finite. They are not to be sealed: whoever used them could compute nothing."""

    ticket: int
    start_ns: int
    end_ns: int
    bad: tuple[int, ...] = ()


class LoadCopied(Message, frozen=True):
    ticket: int
    start_ns: int
    end_ns: int


class PullEnded(Message, frozen=True):
    """`arrived`: positions of the PullOpen that are complete in their extents; `end_ns` is when the last byte was known
    to be here (the lease must still have held then). No byte of this pull is on its way any more."""

    ticket: int
    arrived: tuple[int, ...]
    cause: str  # "" when all arrived
    bytes_done: int
    start_ns: int
    end_ns: int
    carried: Carried = Carried()


class Summed(Message, frozen=True):
    ticket: int
    sums: tuple[int, ...]  # (): `cause` says why not
    cause: str = ""

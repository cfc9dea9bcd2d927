"""What the store master is told and what it answers: plain records. Nothing here comes from a proto."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvmesh.errors import KvmeshError
from kvmesh.kvcache.announce import Announcement
from kvmesh.kvcache.block_map import Verdict
from kvmesh.kvcache.tiers import TierUse


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    POOL = "pool"  # memory without an engine


@dataclass(frozen=True)
class Member:
    """One life of one instance, as it introduced itself."""

    instance_id: str
    address: str
    incarnation: int
    role: Role
    node_id: str
    store_id: str


class Change(Enum):
    JOINED = "joined"
    LEFT = "left"  # said goodbye
    DIED = "died"  # lease ran out, or a new incarnation took its name


@dataclass(frozen=True)
class Usage:
    """A member's own word on its segment; `free_bytes` are neither sealed nor being written. `tiers`: below DRAM."""

    capacity_bytes: int
    free_bytes: int
    blocks: int
    tiers: tuple[TierUse, ...] = ()
    sending_bytes_per_s: int = 0  # to readers, recent mean
    leases: int = 0
    writing: int = 0  # blocks that are being written now


@dataclass(frozen=True)
class StoreStatus:
    """What the master knows of one member's node store. `seq`: of the last announcement included. `sole_blocks`: no
    other node holds them, at most so many, while it drains."""

    member: Member
    blocks: int
    seq: int
    usage: Usage | None
    draining: bool = False
    sole_blocks: int = 0


# ── events ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Join:
    """`removed_seq`: the last tombstone that this node, whatever its life, has applied."""

    member: Member
    removed_seq: int = 0


@dataclass(frozen=True)
class Beat:
    instance_id: str
    incarnation: int
    usage: Usage | None = None
    removed_seq: int = 0
    pace: int = 0  # the number of the pulse it goes by (see kvmesh/pacing.py); 0: it does not say
    by_door: bool = False  # past gRPC


@dataclass(frozen=True)
class Leave:
    instance_id: str
    incarnation: int


@dataclass(frozen=True)
class Announce:
    announcement: Announcement


@dataclass(frozen=True)
class CaughtUp:
    """All that had arrived by `until` has been heard: silence is judged up to that time. Before it is said once, up to
    the present."""

    until: float


@dataclass(frozen=True)
class Tick:
    pass


Event = Join | Beat | Leave | Announce | CaughtUp | Tick


# ── actions ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Publish:
    """Tell every watcher. Publish and Relay share one `seq`, from 1 without gaps. The blocks of a life that ended are
    gone with this word; nothing else is said about them."""

    seq: int
    change: Change
    member: Member


@dataclass(frozen=True)
class Relay:
    """Tell every watcher: this was applied. Origin and its own seq are the store's."""

    seq: int
    announcement: Announcement


@dataclass(frozen=True)
class Heard:
    """The answer to an Announce. `seq`: the last announcement of that store which is included now; `cut`: keys that
    were too many for one store and are not in the map; `shed`: replicas that were left out for want of memory."""

    verdict: Verdict
    want_snapshot: bool
    seq: int
    cut: int = 0
    shed: int = 0


@dataclass(frozen=True)
class Refuse:
    """The answer to the event is this error."""

    error: KvmeshError


Action = Publish | Relay | Heard | Refuse

"""What the prefill brain is told and what it answers with. Pure data: times are monotonic nanoseconds.

`handle` is instance-wide (the servicer maps a stream's own handles to it) and never reused; `stream` names
the decode instance's Handoff stream, so that its end cancels all of its handoffs.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvmesh.node import messages as m
from kvmesh.rpc.errors import KvmeshError

# ── what happened ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Start:
    """A decode instance asks for a prefill. `deadline_ns` 0: none."""

    handle: int
    stream: int
    request_id: str
    token_ids: tuple[int, ...]
    block_keys: tuple[bytes, ...]  # one per full block of the prompt
    sampling: m.Sampling
    deadline_ns: int = 0
    priority: int = 0  # smaller goes first


@dataclass(frozen=True, slots=True)
class RankLanding:
    """Where one decode rank's shards land: an offset in `segment` per prompt block."""

    rank: int
    segment: str
    offsets: tuple[int, ...]
    first_block: int


@dataclass(frozen=True, slots=True)
class Landing:
    """Decode's answer to SendBeginFill; the lease counts from when that was sent."""

    handle: int
    handoff_epoch: int
    lease_ms: int
    ranks: tuple[RankLanding, ...]


@dataclass(frozen=True, slots=True)
class Renewed:
    """Decode's answer to SendRenew; the lease counts from when that was sent."""

    handle: int
    handoff_epoch: int
    lease_ms: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Decode no longer wants it (or refuses to give a landing)."""

    handle: int
    reason: str


@dataclass(frozen=True, slots=True)
class StreamBroken:
    """The decode instance is gone: nobody is left to tell."""

    stream: int


@dataclass(frozen=True, slots=True)
class FromRank:
    """PrefillStepDone, PushProgress, PushDone, PushFailed, PushDrained or RankError of one rank."""

    rank: int
    message: m.ToFront


@dataclass(frozen=True, slots=True)
class RankLost:
    """A rank process ended: its pages and whatever it was pushing are gone."""

    rank: int
    cause: str


@dataclass(frozen=True, slots=True)
class RanksSilent:
    """A rank has said nothing for too long: frozen, or stuck. It may still wake up and write."""

    cause: str


@dataclass(frozen=True, slots=True)
class RanksBack:
    """It speaks again."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Take no more work; what waits is refused, what runs may end."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Start | Landing | Renewed | Cancel | StreamBroken | FromRank | RankLost | RanksSilent | RanksBack | Stop | Tick


# ── what to do ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ToRank:
    """Send PrefillStep, PushOpen, PushLease or PushCancel to one rank."""

    rank: int
    message: m.ToRank


@dataclass(frozen=True, slots=True)
class SendBeginFill:
    handle: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class SendRenew:
    handle: int
    handoff_epoch: int
    progress_bytes: int


@dataclass(frozen=True, slots=True)
class SendFirstToken:
    handle: int
    sampled: m.Sampled
    cached_tokens: int
    queue_ns: int
    prefill_ns: int


@dataclass(frozen=True, slots=True)
class SendFillDone:
    handle: int
    handoff_epoch: int
    transfer_ns: int
    transfer_bytes: int
    exposed_ns: int  # first token sampled → last byte acknowledged


@dataclass(frozen=True, slots=True)
class SendDrained:
    handle: int
    handoff_epoch: int  # 0: no landing had been given


@dataclass(frozen=True, slots=True)
class SendFailed:
    handle: int
    error: KvmeshError
    drained: bool


class Outcome(enum.Enum):
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Ended:
    """The handoff holds nothing any more; its handle is dead. Times are 0 where a stage did not happen."""

    handle: int
    outcome: Outcome
    cause: str  # error code and message, or the reason of the cancel
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    chunks: int
    arrived_ns: int
    first_step_ns: int  # a rank began its first chunk
    last_step_ns: int  # the ranks ended its last chunk
    first_post_ns: int
    last_ack_ns: int
    transfer_bytes: int


Action = ToRank | SendBeginFill | SendRenew | SendFirstToken | SendFillDone | SendDrained | SendFailed | Ended

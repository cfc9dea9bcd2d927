"""What the prefill brain is told and what it answers with. Pure data: times are monotonic nanoseconds.

`handle` is instance-wide (the servicer maps a stream's own handles to it) and never reused; `stream` names
the decode instance's Handoff stream, so that its end cancels all of its handoffs.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvmesh.blockservice.removals import NotHere
from kvmesh.errors import KvmeshError
from kvmesh.kvcache.layout import ShardLayout
from kvmesh.kvcache.sources import Pulled, PullJob, PullRange
from kvmesh.ranks import protocol as m
from kvmesh.rpc.brain_shell import Tick
from kvmesh.services.prefill.compute_progress import ComputeProgress
from kvmesh.transfer import Carried

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
    pulls: tuple[PullRange, ...] = ()  # where missing blocks may lie; a hint
    removed_seq: int = 0  # of the last removal that this node had carried out when it came
    load_until: int | None = None  # blocks from here on are not read out of its own lower tiers: computing is faster
    traceparent: str = ""
    adopt: bool = False  # decode is in this very instance: it takes the pages themselves, nothing lands or is pushed
    pull_at_ns: int = 0  # `pulls` are fetched from then on, or when its turn comes, if that is sooner; 0: at once
    size_ns: int = 0  # predicted time of computing it, 0: not told; the queue may go by it


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
    readers: tuple[ShardLayout, ...] = ()  # how decode's ranks cut blocks; (): as ours do


@dataclass(frozen=True, slots=True)
class Renewed:
    """Decode's answer to SendRenew; the lease counts from when that was sent."""

    handle: int
    handoff_epoch: int
    lease_ms: int


@dataclass(frozen=True, slots=True)
class HandoffCancelled:
    """Decode no longer wants it (or refuses to give a landing)."""

    handle: int
    reason: str


@dataclass(frozen=True, slots=True)
class StreamBroken:
    """The decode instance is gone: nobody is left to tell."""

    stream: int


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
class Doors:
    """Why no new work is taken from decode instances elsewhere (`remote`) or from this one (`own`); "": it is. What is
    here already goes on."""

    remote: str
    own: str


Event = (
    Start
    | Landing
    | Renewed
    | HandoffCancelled
    | StreamBroken
    | m.FromRank  # PrefillStepDone, a push's messages, SealCopied, LoadCopied or RankError
    | Pulled  # no byte of that pull can land any more
    | NotHere  # blocks that are being removed from this node's store, everywhere in it, in this very turn
    | RankLost
    | RanksSilent
    | RanksBack
    | Stop
    | Doors
    | Tick
)


# ── what to do ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class FetchBlocks:
    """Fetch blocks from other nodes; answered by Pulled, always, once."""

    job: PullJob


@dataclass(frozen=True, slots=True)
class CancelPull:
    """Nobody waits for it any more; Pulled still follows."""

    ticket: int


@dataclass(frozen=True, slots=True)
class SendBeginFill:
    handle: int
    num_blocks: int
    removed_seq: int = 0


@dataclass(frozen=True, slots=True)
class SendRenew:
    handle: int
    handoff_epoch: int
    progress_bytes: int


@dataclass(frozen=True, slots=True)
class Found:
    """The prefix that was not computed, by where it was when the request got its pages."""

    device_tokens: int = 0
    host_tokens: int = 0  # in the own host segment
    lower_tokens: int = 0  # of those: read from a tier below while this request waited
    pulled_tokens: int = 0  # likewise, but fetched from other nodes while this request waited
    pull_from_ns: int = 0  # asked for them; 0: nothing was pulled for it
    pull_until_ns: int = 0  # the last one was sealed here; 0: it did not wait so long
    pull_bytes: int = 0  # of the pull that this request began
    load_from_ns: int = 0  # host segment → device pages; 0: nothing was loaded
    load_until_ns: int = 0

    @property
    def cached_tokens(self) -> int:
        return self.device_tokens + self.host_tokens + self.pulled_tokens

    @property
    def pull_ns(self) -> int:
        return max(self.pull_until_ns - self.pull_from_ns, 0)


@dataclass(frozen=True, slots=True)
class SendFirstToken:
    handle: int
    sampled: m.Sampled
    found: Found
    queue_ns: int
    prefill_ns: int


@dataclass(frozen=True, slots=True)
class SendAdopted:
    """The prompt is computed, and its pages are decode's: one reference each has passed over to whoever gets this."""

    handle: int
    first: SendFirstToken
    pages: tuple[int, ...]


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


class PrefillOutcome(enum.Enum):
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class HandoffEnded:
    """The handoff holds nothing any more; its handle is dead. Times are 0 where a stage did not happen."""

    handle: int
    outcome: PrefillOutcome
    cause: str  # error code and message, or the reason of the cancel
    prompt_tokens: int
    found: Found
    computed_tokens: int
    chunks: int
    arrived_ns: int
    first_step_ns: int  # a rank began its first chunk
    last_step_ns: int  # the ranks ended its last chunk
    first_post_ns: int
    last_ack_ns: int
    transfer_bytes: int
    carried: Carried = field(default_factory=Carried)
    adopt: bool = False  # decode is in this instance: the request is here until it ends there
    meanwhile: ComputeProgress = field(
        default_factory=ComputeProgress
    )  # all that was computed from its first step to its last one
    wire_ns: int = 0  # with bytes on their way, at the slowest rank


Action = (
    m.TellRank  # PrefillStep, PushOpen, PushLease, PushCancel, SealCopy or LoadCopy
    | FetchBlocks
    | CancelPull
    | SendBeginFill
    | SendRenew
    | SendFirstToken
    | SendAdopted
    | SendFillDone
    | SendDrained
    | SendFailed
    | HandoffEnded
)

"""This module has the events and actions of the prefill brain. Pure data: times are monotonic nanoseconds.

`handle` is unique in the instance (the servicer maps a stream's own handles to it) and never reused; `stream` names the
decode instance's Handoff stream, whose end cancels all of its handoffs.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvmesh.blockservice.removals import NotHere
from kvmesh.clock import Tick
from kvmesh.errors import KvmeshError
from kvmesh.kvcache.cache_groups import GroupPages
from kvmesh.kvcache.layout import ShardLayout
from kvmesh.kvcache.sources import Pulled, PullJob, PullRange
from kvmesh.ranks import protocol as m
from kvmesh.services.prefill.compute_progress import ComputeProgress
from kvmesh.services.prefill.pipeline_times import PromptTimes
from kvmesh.transfer import Carried

# ── what happened ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Start:
    """A decode instance asks for a prefill. `deadline_ns` 0 means that there is none."""

    handle: int
    stream: int
    request_id: str
    token_ids: tuple[int, ...]
    block_keys: tuple[bytes, ...]  # one per full block of the prompt
    sampling: m.Sampling
    deadline_ns: int = 0
    priority: int = 0  # smaller goes first
    pulls: tuple[PullRange, ...] = ()  # where missing blocks may lie; a hint
    removed_seq: int = 0  # number of the last removal order that this node had carried out when the request came
    load_until: int | None = None  # from this block on nothing is read from lower tiers here: computing is faster
    traceparent: str = ""
    adopt: bool = False  # decode is in this instance: it takes the pages themselves, nothing lands or is pushed
    pull_at_ns: int = 0  # when `pulls` are fetched, or at the request's turn if that is sooner; 0: at once
    tenant: str = ""
    tenant_weight: float = 1.0  # of its prompts among those of others that wait
    uncached_tokens: int = 1  # predicted to be computed
    size_ns: int = 0  # the predicted time of computing the prompt, which may order the queue; 0: unknown


@dataclass(frozen=True, slots=True)
class RankLanding:
    """Has the byte offsets in `segment` at which one decode rank's shards land, one for each block of the prompt. For a
    model of several cache groups `groups` has them for what is to be sent of each, and `offsets` is empty."""

    rank: int
    segment: str
    offsets: tuple[int, ...]
    first_block: int
    groups: tuple[GroupPages, ...] = ()


@dataclass(frozen=True, slots=True)
class Landing:
    """Is decode's answer to SendBeginFill. The lease counts from when that was sent."""

    handle: int
    handoff_epoch: int
    lease_ms: int
    ranks: tuple[RankLanding, ...]
    readers: tuple[ShardLayout, ...] = ()  # how decode's ranks cut blocks into shards; (): as this instance's do


@dataclass(frozen=True, slots=True)
class Renewed:
    """Is decode's answer to SendRenew. The lease counts from when that was sent."""

    handle: int
    handoff_epoch: int
    lease_ms: int


@dataclass(frozen=True, slots=True)
class HandoffCancelled:
    """Decode no longer wants the prompt's KV, or refuses to give a landing."""

    handle: int
    reason: str


@dataclass(frozen=True, slots=True)
class StreamBroken:
    """The stream to the decode instance ended: all of its handoffs end, and nobody is told how."""

    stream: int


@dataclass(frozen=True, slots=True)
class RankLost:
    """A rank process ended: its pages and whatever it was pushing are gone."""

    rank: int
    cause: str


@dataclass(frozen=True, slots=True)
class RanksSilent:
    """A rank has sent nothing for too long: it is frozen or stuck, and may still wake up and write."""

    cause: str


@dataclass(frozen=True, slots=True)
class RanksBack:
    """The ranks that were silent answer again."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The instance stops: no more work is taken, what waits is refused, what runs may end."""


@dataclass(frozen=True, slots=True)
class EndHandoffs:
    """Ends all handoffs with this error; new ones are taken as before."""

    error: KvmeshError


@dataclass(frozen=True, slots=True)
class LeavePages:
    """The ranks' pages are about to go: no block is found in them any more. There is no handoff, and no copy of them is
    under way."""


@dataclass(frozen=True, slots=True)
class Doors:
    """Says why no new work is taken from decode instances elsewhere (`remote`) or from this instance's own (`own`); ""
    where it is taken. Requests that were taken before go on."""

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
    | NotHere  # blocks that are being removed from this node's store in this very turn of the event loop
    | RankLost
    | RanksSilent
    | RanksBack
    | Stop
    | Doors
    | EndHandoffs
    | LeavePages
    | Tick
)


# ── what to do ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class FetchBlocks:
    """Orders a pull of blocks from other nodes. It is always answered once, by Pulled."""

    job: PullJob


@dataclass(frozen=True, slots=True)
class CancelPull:
    """Cancels a pull that nobody waits for any more. Pulled still follows."""

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
    """Describes the part of a prompt that was not computed, by where its KV was when the request got its pages."""

    device_tokens: int = 0
    host_tokens: int = 0  # in this node's host segment
    lower_tokens: int = 0  # of host_tokens: read from a lower tier while this request waited
    pulled_tokens: int = 0  # fetched from other nodes while this request waited
    pull_from_ns: int = 0  # when its blocks were asked for; 0: nothing was pulled for it
    pull_until_ns: int = 0  # when the last of them was sealed here; 0: the request did not wait so long
    pull_bytes: int = 0  # of the pull that this request began
    load_from_ns: int = 0  # host segment → device pages; 0: nothing was loaded
    load_until_ns: int = 0
    short: tuple[int, ...] = ()  # cache groups that lacked something, so that the prefix found was no longer
    short_blocks: int = 0  # by so many blocks

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
    prompt_scores: m.PromptScores | None = None  # None: they were not asked for


@dataclass(frozen=True, slots=True)
class SendAdopted:
    """Hands a computed prompt to decode in this instance. One reference to each of the pages, which are `groups` where
    the model has several cache groups, passes to whoever gets this."""

    handle: int
    first: SendFirstToken
    pages: tuple[int, ...]
    groups: tuple[GroupPages, ...] = ()


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
    """Reports a handoff that is over: it holds nothing, and its handle is never used again. Times are 0 where a stage
    did not happen."""

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
    adopt: bool = False  # decode is in this instance, so the request stays in it until its answer ends
    meanwhile: ComputeProgress = field(
        default_factory=ComputeProgress
    )  # all that was computed from its first step to its last one
    wire_ns: int = 0  # how long bytes were on their way, at the slowest rank
    times: PromptTimes = field(default_factory=PromptTimes)


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

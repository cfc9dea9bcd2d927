"""This module has the record of one handoff at prefill: pages, chunks, landing, lease, one push for each rank, and what
decode was told. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvmesh.errors import KvmeshError
from kvmesh.kvcache.cache_groups import GroupPages
from kvmesh.ranks import protocol as m
from kvmesh.services.prefill.compute_progress import ComputeProgress
from kvmesh.services.prefill.events import Found, HandoffEnded, Landing, PrefillOutcome, Start
from kvmesh.services.prefill.pipeline_times import PromptTimes
from kvmesh.services.prefill.prompt_pages import PromptPages
from kvmesh.transfer import Carried

# The writer stops before its lease ends, as decode counts the lease from a little later and with another clock. The
# margin has an upper bound, which is large beside any drift of clocks: the lease of a landing that had to wait contains
# the wait, and a tenth of that would leave too little.
LEASE_MARGIN = 0.1
MAX_LEASE_MARGIN_MS = 500


class PrefillPhase(enum.Enum):
    QUEUED = "QUEUED"  # no pages; extents of blocks that were pulled for it
    COMPUTING = "COMPUTING"  # pages; chunks are planned or at the ranks; layers are pushed once there is a landing
    PUSHING = "PUSHING"  # every chunk is computed; the push goes on or still has no landing
    CANCELLING = "CANCELLING"  # nothing new begins; pages are held until neither step nor push can touch them


class Push(enum.Enum):
    """Says what one rank is doing with this handoff's bytes."""

    NONE = "none"  # never opened
    OPEN = "open"
    DRAINING = "draining"  # PushCancel sent, PushDrained to come
    DONE = "done"
    OVER = "over"  # failed or drained: the rank has let go of it


@dataclass(slots=True)
class LandingLease:
    """Is decode's promise to keep the landing open, as the writer counts it (monotonic ns)."""

    from_ns: int
    until_ns: int
    renew_sent_ns: int = 0  # 0: no renewal on its way

    @classmethod
    def granted(cls, from_ns: int, lease_ms: int) -> LandingLease:
        """Returns a lease of `lease_ms` that counts from `from_ns`, less the margin."""
        margin_ms = min(lease_ms * LEASE_MARGIN, MAX_LEASE_MARGIN_MS)
        return cls(from_ns, from_ns + int((lease_ms - margin_ms) * 1_000_000))

    def half_over(self, now: int) -> bool:
        return now - self.from_ns >= (self.until_ns - self.from_ns) / 2


@dataclass(slots=True)
class PrefillHandoff:
    """Keeps the state of one handoff. Its phases are QUEUED → COMPUTING → PUSHING → (done), and CANCELLING from any of
    them."""

    start: Start
    arrived_ns: int
    world: int
    phase: PrefillPhase = PrefillPhase.QUEUED

    compiling: set[int] = field(default_factory=set)  # ranks that compile its grammar
    pull_at_ns: int = 0  # when its own pull is to begin; 0: the pull has begun, or there is none
    planned_to: int = 0  # the block that its prefix is expected to reach when that pull is over
    patient_until_ns: int = 0  # the request waits for no pull longer than this
    pulls: set[int] = field(default_factory=set)  # tickets of the pulls it waits for
    pinned: list[int] = field(default_factory=list)  # extents that arrived for it, one reference each, while QUEUED
    pinned_groups: list[GroupPages] = field(default_factory=list)  # in place of `pinned`, of several cache groups
    arrived: set[bytes] = field(default_factory=set)  # keys of the pinned blocks that came from other nodes,
    raised: set[bytes] = field(default_factory=set)  # and of those that came from this node's lower tiers
    found: Found = field(default_factory=Found)

    pages: list[int] = field(default_factory=list)  # one reference each, until the end
    memory: PromptPages | None = None  # in place of `pages`, of several cache groups
    cached_tokens: int = 0  # tokens that need not be computed
    ready_tokens: int = 0  # of those: their KV is complete in `pages`; the others' is being loaded
    computed_tokens: int = 0  # prefix whose KV is complete when the steps before are, cached tokens included
    loading: int = 0  # ticket of the LoadCopy at the ranks; 0: none
    steps: set[int] = field(default_factory=set)  # numbers of its steps that the ranks have not answered
    chunks: int = 0
    sealable: int = 1 << 62  # how many leading blocks may be cached or sealed: a removed block must not come back
    snapshots: tuple[int, ...] = ()  # tokens after which states are kept that lie not on the grid; ascending
    promised_from: int = 0  # blocks from here on are promised to requests with the same prefix

    begin_sent_ns: int = 0
    landing: Landing | None = None
    lease: LandingLease | None = None
    pushes: list[Push] = field(default_factory=list)
    in_doubt: bool = False  # it is not known of every rank whether bytes are still on their way
    acked_bytes: list[int] = field(default_factory=list)

    scores: list[m.PromptScores] = field(default_factory=list)  # of the chunks computed so far, in order
    sampled_ns: int = 0  # FirstToken is sent; 0: not yet
    fill_told: bool = False  # FillDone is sent
    told: bool = False  # Drained or Failed is sent: nothing more will be
    deaf: bool = False  # its stream is gone, so decode cannot be told anything
    error: KvmeshError | None = None
    reason: str = ""

    first_step_ns: int = 0
    last_step_ns: int = 0
    done_before: ComputeProgress | None = None  # what the instance had computed before this handoff's first step
    meanwhile: ComputeProgress = field(
        default_factory=ComputeProgress
    )  # by the instance, from its first step to its last one
    times: PromptTimes = field(default_factory=PromptTimes)  # of its chunks at the stages of a pipeline
    first_post_ns: int = 0
    last_ack_ns: int = 0
    wire_ns: int = 0  # how long bytes of it were on their way, at the slowest rank
    carried: Carried = field(default_factory=Carried)

    def __post_init__(self) -> None:
        self.pushes = [Push.NONE] * self.world
        self.acked_bytes = [0] * self.world

    @property
    def scored(self) -> bool:
        """Whether the log-probabilities of the prompt's own tokens are wanted, so that all of it is computed."""
        return self.start.sampling.prompt_logprobs >= 0

    @property
    def handle(self) -> int:
        return self.start.handle

    @property
    def prompt_tokens(self) -> int:
        return len(self.start.token_ids)

    def prompt_blocks(self, block_tokens: int) -> int:
        """Returns how many blocks the prompt has, the last of which may be filled in part."""
        return -(-self.prompt_tokens // block_tokens)

    @property
    def epoch(self) -> int:
        """The handoff epoch of the landing; 0 before there is one."""
        return self.landing.handoff_epoch if self.landing else 0

    @property
    def ending(self) -> bool:
        return self.phase is PrefillPhase.CANCELLING

    @property
    def quiet(self) -> bool:
        """Whether no rank has bytes of this handoff on the way. `in_doubt` says whether bytes of a rank that died may
        be."""
        return not any(push in (Push.OPEN, Push.DRAINING) for push in self.pushes)

    @property
    def pushed(self) -> bool:
        """Whether every rank's writes are acknowledged."""
        return all(push is Push.DONE for push in self.pushes)

    @property
    def over(self) -> bool:
        """Whether decode knows how the handoff ended, and neither load nor step nor push can touch the pages any
        more."""
        known = self.told if self.ending else self.fill_told and self.sampled_ns > 0
        return known and self.quiet and not self.steps and not self.loading

    def ended(self) -> HandoffEnded:
        """Returns the summary of a handoff that is over."""
        if self.error is not None:
            outcome, cause = PrefillOutcome.FAILED, f"{self.error.code}: {self.error.message}"
        elif self.ending:
            outcome, cause = PrefillOutcome.CANCELLED, self.reason
        else:
            outcome, cause = PrefillOutcome.DONE, ""
        return HandoffEnded(
            handle=self.handle,
            outcome=outcome,
            cause=cause,
            prompt_tokens=self.prompt_tokens,
            found=self.found,
            computed_tokens=max(self.computed_tokens - self.cached_tokens, 0),
            chunks=self.chunks,
            arrived_ns=self.arrived_ns,
            first_step_ns=self.first_step_ns,
            last_step_ns=self.last_step_ns,
            first_post_ns=self.first_post_ns,
            last_ack_ns=self.last_ack_ns,
            wire_ns=self.wire_ns,
            transfer_bytes=sum(self.acked_bytes),
            carried=self.carried,
            adopt=self.start.adopt,
            meanwhile=self.meanwhile,
            times=self.times,
        )

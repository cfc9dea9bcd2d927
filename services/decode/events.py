"""This module has the events and actions of a request's state machine (handoff.py). See docs/internals/handoff.md.

Messages from and to ranks are the ranks' own (kvmesh/ranks/protocol.py), wrapped in `FromRank` and `TellRank`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from kvmesh.clock import NEVER
from kvmesh.errors import KvmeshError
from kvmesh.kvcache.cache_groups import GroupPages
from kvmesh.kvcache.sources import PullRange
from kvmesh.ranks.protocol import FromRank, Logprobs, PromptScores, Sampling, TellRank
from kvmesh.services.decode.timeline import Timeline


class Phase(enum.IntEnum):
    """Is the state of a request, described in docs/internals/handoff.md. The order is the order of life; a request in
    CANCELLING or a later state has ended for its client."""

    ADMITTED = 0
    RESERVED = 1
    FILLING = 2
    LOADING = 3
    READY = 4
    RUNNING = 5
    DONE = 6
    CANCELLING = 7
    QUARANTINED = 8
    FREE = 9


GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0)


class LandingPlace(enum.Enum):
    """Is the kind of memory that a landing is reserved in."""

    PAGES = "pages"
    EXTENTS = "extents"


class Reason(enum.IntEnum):
    """Says why an answer is complete. The numbers are those of `protocol.Token.finish` and pb.FinishReason."""

    STOP = 1
    LENGTH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Describes one admitted request to the state machine. `carry` belongs to the shell, which gets it back
    untouched."""

    request_id: str
    prompt_tokens: int
    max_tokens: int
    deadline_ns: int  # monotonic
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # EOS included unless ignore_eos without a grammar
    sampling: Sampling = GREEDY
    priority: int = 0
    credit_tokens: int = 0
    block_keys: tuple[bytes, ...] = ()  # of the prompt's full blocks
    chain_digest: bytes = b""  # 32 bytes that the answer's first key is chained from; empty: its blocks are not sealed
    tail: bytes = b""  # the prompt's tokens after its last full block, packed
    said: bytes = b""  # the whole prompt, packed, where a penalty, a grammar or drafts need it; else empty
    drafts: bool = False  # whether drafts are made of its answer
    pulls: tuple[PullRange, ...] = ()  # blocks that decode is to fetch, and where they lie: hints
    load_until: int | None = None  # from this block on nothing is read from this node's lower tiers: a push is faster
    tbt_slo_ns: int = 0  # the request is refused where steps would be longer than this; 0: it has no such limit
    held_tbt_ns: int = 0  # nobody is admitted later who would make its steps longer than this; 0: no such limit
    joins_ns: int = 0  # when it joins the batch, as the conductor predicts (monotonic)
    leaves_ns: int = NEVER  # when it leaves the batch, as the conductor predicts (monotonic)
    carry: Any = None


# ── events ────────────────────────────────────────────────────────────────────────────────────────
# From the prefill instance (may come late, twice, in another order):


@dataclass(frozen=True, slots=True)
class BeginFill:
    """The request has reached the head of prefill's queue, so decode reserves the landing."""

    num_blocks: int
    removed_seq: int = 0  # number of the last removal order that prefill had carried out when it took the request


@dataclass(frozen=True, slots=True)
class RenewLease:
    """The writer asks for more time. It asks only while its ranks make progress."""

    epoch: int
    progress_bytes: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    token_id: int
    logprobs: Logprobs | None
    cached_tokens: int
    queue_us: int = 0
    prefill_us: int = 0
    pull_us: int = 0
    pull_bytes: int = 0
    pulled_tokens: int = 0
    host_tokens: int = 0
    prompt_scores: PromptScores | None = None  # None: they were not asked for


@dataclass(frozen=True, slots=True)
class FillDone:
    """The writer reports that every write is acknowledged. The end marks, which travel with the bytes, decide whether
    the KV is complete; this message brings the figures."""

    epoch: int
    transfer_us: int = 0
    transfer_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Drained:
    """The writer reports that no byte is on its way and none will follow. Epoch 0 means that the writer never had a
    landing."""

    epoch: int


@dataclass(frozen=True, slots=True)
class HandoffFailed:
    """The writer gave up. `drained` False means that it does not know what is still on its way."""

    error: KvmeshError
    drained: bool


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The handoff stream to the prefill instance broke: no message of this writer will come any more."""

    cause: str


# From the prefill half of this very instance (in order, once):


@dataclass(frozen=True, slots=True)
class Adopted:
    """The prompt has been computed in this instance. One reference to each of its `pages` passes over to the request;
    of a model of several cache groups the pages are `groups`, and a state has its slot."""

    first: FirstToken
    pages: tuple[int, ...]
    groups: tuple[GroupPages, ...] = ()


# From this instance's ranks: `FromRank`, and


@dataclass(frozen=True, slots=True)
class Ended:
    """The ranks have taken the request out of their batch: the answer is complete. `held`: a step that runs has it all
    the same, and Left follows when it is over."""

    reason: Reason
    held: bool = False


# From the scheduler, which grants only what a request wants (`wants_landing`, `wants_pages`, `wants_seat`):


@dataclass(frozen=True, slots=True)
class Land:
    """The scheduler has reserved the landing. The prompt's first blocks lie in the extents `held` of this node's store,
    with one reference each. `slots` are the reserved pages or extents: in pages there is one for every block of the
    prompt, in extents only for those that are not in `held`."""

    epoch: int
    place: LandingPlace
    slots: list[int]
    writers: tuple[tuple[int, str], ...]  # (rank of this instance, writer that sends to it)
    held: list[int] = field(default_factory=list)
    # Instead of `slots` and `held`, where the model has several cache groups. Of a state there is one slot to land in,
    # and in pages a second one behind it.
    group_slots: tuple[GroupPages, ...] = ()
    group_held: tuple[GroupPages, ...] = ()
    shared: int = 0  # so many of the first `slots` are pages of other rows, complete; `held` are the blocks after them


@dataclass(frozen=True, slots=True)
class AwaitLanding:
    """The landing of another request brings most of the prompt's blocks: the scheduler reserves none until that one is
    complete or has failed, or half of the time is over that is left to wait for a landing."""

    handle: int


@dataclass(frozen=True, slots=True)
class LoadExtents:
    """The scheduler gives pages for the KV in the extents and for the next token, and a seat in the batch with them.
    The first `shared` of them are pages of other rows and have the KV already."""

    pages: list[int]
    groups: tuple[GroupPages, ...] = ()
    shared: int = 0


@dataclass(frozen=True, slots=True)
class Seat:
    """The scheduler gives a seat in the batch: the request joins it."""


@dataclass(frozen=True, slots=True)
class Grow:
    pages: list[int]
    groups: tuple[GroupPages, ...] = ()


@dataclass(frozen=True, slots=True)
class Preempt:
    """The scheduler takes the pages back: the KV is copied to these extents, one for each page held."""

    extents: list[int]
    groups: tuple[GroupPages, ...] = ()


# From the client and the clock:


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends the request with this error, whatever its phase."""

    error: KvmeshError


@dataclass(frozen=True, slots=True)
class EndAfterStep:
    """Ends the request with this error, once the step that runs is over: what it has computed by then is what its
    client has been told."""

    error: KvmeshError


@dataclass(frozen=True, slots=True)
class Timer:
    """Time has passed: the machine acts on what is due."""


Event = (
    BeginFill | RenewLease | FirstToken | FillDone | Drained | HandoffFailed | PeerLost | Adopted
    | FromRank | Ended | Land | AwaitLanding | LoadExtents | Seat | Grow | Preempt | Cancel | EndAfterStep | Timer
)  # fmt: skip


# ── actions ───────────────────────────────────────────────────────────────────────────────────────
# For ranks (`TellRank`) and for prefill. They are sent as they are.


@dataclass(frozen=True, slots=True)
class AskPrefill:
    """Asks prefill for the prompt's KV. The shell sets `times.asked` when it has written the request to the stream."""

    peer: int
    handle: int
    spec: Spec
    times: Timeline


@dataclass(frozen=True, slots=True)
class RankOffsets:
    """Has the byte offsets in one rank's segment at which that rank's shards of the prompt's blocks land."""

    rank: int
    segment: str
    offsets: tuple[int, ...]
    groups: tuple[GroupPages, ...] = ()  # instead of `offsets`, of what is to be sent of each cache group


@dataclass(frozen=True, slots=True)
class TellLanding:
    """Tells the writer where to write, once every window is open. `lease_ms` counts from when the writer sent
    BeginFill. Blocks before `first_block` are at decode already and are not sent."""

    peer: int
    handle: int
    epoch: int
    lease_ms: int
    ranks: tuple[RankOffsets, ...]
    first_block: int = 0


@dataclass(frozen=True, slots=True)
class TellRenewed:
    peer: int
    handle: int
    epoch: int
    lease_ms: int


@dataclass(frozen=True, slots=True)
class TellCancel:
    peer: int
    handle: int
    reason: str


ToPrefill = TellLanding | TellRenewed | TellCancel


# For the state of the whole instance (state.py), which has the pools, the store and the gateways' outboxes:


@dataclass(frozen=True, slots=True)
class SealFull:
    """The request has joined the batch: its full blocks may be copied into the store."""


@dataclass(frozen=True, slots=True)
class FreePages:
    """Gives back the request's references to these pages. Nothing of the request touches them any more; copies for
    sealing may hold references of their own."""

    pages: tuple[int, ...]
    groups: tuple[GroupPages, ...] = ()


@dataclass(frozen=True, slots=True)
class FreeDropped:
    """Gives back pages that were dropped from a row, as the step that ran then has been collected."""

    groups: tuple[GroupPages, ...]


@dataclass(frozen=True, slots=True)
class FreeExtents:
    """Gives back the request's references to these extents. Nothing of the request touches them any more."""

    extents: tuple[int, ...]
    groups: tuple[GroupPages, ...] = ()


@dataclass(frozen=True, slots=True)
class KeepExtents:
    """Offers these extents to the store: the request's leading blocks lie in them, complete, and nobody touches them
    any more. The first `shared` of them are blocks of the store already."""

    extents: tuple[int, ...]
    shared: int


@dataclass(frozen=True, slots=True)
class EmitFirst:
    """Sends the first token to the client at once, whether or not the KV is complete."""

    first: FirstToken


@dataclass(frozen=True, slots=True)
class EmitFinish:
    reason: Reason


@dataclass(frozen=True, slots=True)
class EmitFail:
    error: KvmeshError


@dataclass(frozen=True, slots=True)
class Freed:
    """Is the machine's last action: the request holds nothing and is forgotten."""


Action = (
    TellRank | AskPrefill | TellLanding | TellRenewed | TellCancel
    | SealFull | FreePages | FreeDropped | FreeExtents | KeepExtents | EmitFirst | EmitFinish | EmitFail | Freed
)  # fmt: skip

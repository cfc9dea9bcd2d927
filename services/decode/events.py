"""What happens to a request's handoff, and what its machine asks for. See handoff.py and docs/internals/handoff.md.

What ranks say and are told are their own messages (kvmesh/ranks/protocol.py), in `FromRank` and `TellRank`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from kvmesh.clock import NEVER
from kvmesh.errors import KvmeshError
from kvmesh.kvcache.sources import PullRange
from kvmesh.ranks.protocol import FromRank, Logprobs, Sampling, TellRank
from kvmesh.services.decode.timeline import Timeline


class Phase(enum.IntEnum):
    """DESIGN's states. The order is the order of life; CANCELLING and later belong to requests that have ended."""

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
    """Where the KV lands."""

    PAGES = "pages"
    EXTENTS = "extents"


class Reason(enum.IntEnum):
    """Why a request finished; the numbers are those of `protocol.Token.finish` and pb.FinishReason."""

    STOP = 1
    LENGTH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One admitted request as the brain sees it. `carry` is the shell's own, untouched here."""

    request_id: str
    prompt_tokens: int
    max_tokens: int
    deadline_ns: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # EOS included unless ignore_eos
    sampling: Sampling = GREEDY
    priority: int = 0
    credit_tokens: int = 0
    block_keys: tuple[bytes, ...] = ()  # of the prompt's full blocks
    chain_digest: bytes = b""  # 32 bytes that the answer's first key is chained from; empty: its blocks are not sealed
    tail: bytes = b""  # the prompt's tokens after its last full block, packed
    said: bytes = b""  # the whole prompt, packed, where a penalty looks at what was said
    pulls: tuple[PullRange, ...] = ()  # where blocks lie that we are to fetch: hints
    load_until: int | None = None  # blocks from here on are not read out of our own lower tiers: a push is faster
    tbt_slo_ns: int = 0  # it is refused where steps would be longer; 0: however long they are
    held_tbt_ns: int = 0  # nobody is admitted later who would make its steps longer; 0: whoever comes
    joins_ns: int = 0  # the batch, as the conductor predicts it
    leaves_ns: int = NEVER  # likewise
    carry: Any = None


# ── events ────────────────────────────────────────────────────────────────────────────────────────
# From the prefill instance (may come late, twice, in another order):


@dataclass(frozen=True, slots=True)
class BeginFill:
    """The request has reached the head of prefill's queue: reserve the landing."""

    num_blocks: int
    removed_seq: int = 0  # of the last removal that prefill had carried out when the request came to it


@dataclass(frozen=True, slots=True)
class RenewLease:
    """Asked only while the writer's ranks make progress."""

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


@dataclass(frozen=True, slots=True)
class FillDone:
    """Every write is acknowledged. The end marks travel with the bytes and decide; this brings the figures."""

    epoch: int
    transfer_us: int = 0
    transfer_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Drained:
    """No byte is on its way and none will follow. `epoch` 0: the writer never had a landing."""

    epoch: int


@dataclass(frozen=True, slots=True)
class HandoffFailed:
    """The writer gave up. `drained` False: it does not know what is still on its way."""

    error: KvmeshError
    drained: bool


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The handoff stream broke: this writer will never be heard of again."""

    cause: str


# From the prefill half of this very instance (in order, once):


@dataclass(frozen=True, slots=True)
class Adopted:
    """The prompt is computed, and these are its pages; a reference of each is ours."""

    first: FirstToken
    pages: tuple[int, ...]


# From a rank of ours: `FromRank`, and


@dataclass(frozen=True, slots=True)
class Ended:
    """The ranks have taken the request out of their batch: the answer is complete."""

    reason: Reason


# From the scheduler (only what the machine's properties ask for):


@dataclass(frozen=True, slots=True)
class Land:
    """Landing reserved. The prompt's first blocks lie in these `held` extents of our own store, one reference each: in
    pages there is a slot for every prompt block, in extents only for the others."""

    epoch: int
    place: LandingPlace
    slots: list[int]
    writers: tuple[tuple[int, str], ...]  # (rank of ours, writer that sends to it)
    held: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LoadExtents:
    """Pages for the KV in the extents and for the next token; a seat in the batch goes with them."""

    pages: list[int]


@dataclass(frozen=True, slots=True)
class Seat:
    """Join the batch."""


@dataclass(frozen=True, slots=True)
class Grow:
    pages: list[int]


@dataclass(frozen=True, slots=True)
class Preempt:
    """Give the pages back; the KV goes to these extents, one a page held."""

    extents: list[int]


# From the client and the clock:


@dataclass(frozen=True, slots=True)
class Cancel:
    """End it with this error, whatever the phase."""

    error: KvmeshError


@dataclass(frozen=True, slots=True)
class Timer:
    """Time has passed: act on what is due."""


Event = (
    BeginFill | RenewLease | FirstToken | FillDone | Drained | HandoffFailed | PeerLost | Adopted
    | FromRank | Ended | Land | LoadExtents | Seat | Grow | Preempt | Cancel | Timer
)  # fmt: skip


# ── actions ───────────────────────────────────────────────────────────────────────────────────────
# For ranks (`TellRank`) and for prefill: nobody in between changes them.


@dataclass(frozen=True, slots=True)
class AskPrefill:
    """Ask for the prompt's KV. `times.asked` is when the request was handed to the stream: whoever does it sets it."""

    peer: int
    handle: int
    spec: Spec
    times: Timeline


@dataclass(frozen=True, slots=True)
class RankOffsets:
    """Where one rank's shards of the prompt's blocks land in its segment."""

    rank: int
    segment: str
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TellLanding:
    """Every window is open. `lease_ms` counts from when the writer sent BeginFill; blocks before `first_block` are
    here already."""

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


# For the instance's state, which has the pools, the store and the gateways:


@dataclass(frozen=True, slots=True)
class SealFull:
    """The request has joined the batch: its full blocks may be copied into the store."""


@dataclass(frozen=True, slots=True)
class FreePages:
    """This request's references go back: nothing of it touches them any more (sealing may still hold its own)."""

    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FreeExtents:
    """As `FreePages`."""

    extents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KeepExtents:
    """Nobody touches these any more, and the request's leading blocks lie in them, complete: the store may have those
    that are not its own already (`shared` of them are)."""

    extents: tuple[int, ...]
    shared: int


@dataclass(frozen=True, slots=True)
class EmitFirst:
    """The first token goes to the client at once, however far the KV is."""

    first: FirstToken


@dataclass(frozen=True, slots=True)
class EmitFinish:
    reason: Reason


@dataclass(frozen=True, slots=True)
class EmitFail:
    error: KvmeshError


@dataclass(frozen=True, slots=True)
class Freed:
    """The machine's last word: forget it."""


Action = (
    TellRank | AskPrefill | TellLanding | TellRenewed | TellCancel
    | SealFull | FreePages | FreeExtents | KeepExtents | EmitFirst | EmitFinish | EmitFail | Freed
)  # fmt: skip

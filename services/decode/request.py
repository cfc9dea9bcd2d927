"""What is known of one request: its memory, the hands on it, its answer. handoff.py alone changes it."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from typing import Literal

from kvmesh.errors import HandoffLost, KvmeshError, Overloaded, Unavailable
from kvmesh.kvcache import keys as block_keys
from services.decode import events as e
from services.decode.events import Phase
from services.decode.limits import Limits, Shape
from services.decode.outbox import GatewayStream
from services.decode.rules import NEVER as NEVER
from services.decode.rules import grow_at
from services.decode.timeline import Timeline

# Keys of one request's blocks: the prompt's as they came with it, the answer's chained as its tokens come. Pure.


class Chain:
    """`keys` names the leading blocks that are known. Without a digest it never grows, and keeps no tokens."""

    __slots__ = ("_block_tokens", "_digest", "keys", "pending")

    def __init__(self, keys: Sequence[bytes], digest: bytes, tail: bytes, block_tokens: int) -> None:
        self.keys = list(keys)
        self._digest = digest
        self._block_tokens = block_tokens
        # Tokens after the last known key; None when nobody wants to know.
        self.pending: array[int] | None = array("I", block_keys.unpack_tokens(tail)) if digest else None

    def upto(self, blocks: int) -> list[bytes]:
        """Keys of the leading `blocks` blocks, or of fewer when no more can be named."""
        pending, step = self.pending, self._block_tokens
        while pending is not None and len(self.keys) < blocks and len(pending) >= step:
            key, self._digest = block_keys.extend(self._digest, block_keys.pack_tokens(pending[:step]))
            del pending[:step]
            self.keys.append(key)
        return self.keys[:blocks]


RETRY_AFTER_MS = 500


class Window(enum.Enum):
    """A window at the transfer engine of one of our ranks; once fenced it is forgotten."""

    OPENING = "opening"
    OPEN = "open"
    FENCING = "fencing"


class Request:
    """Fields and what follows from them; the scheduler reads it."""

    def __init__(self, handle: int, spec: e.Spec, limits: Limits, shape: Shape) -> None:
        self.handle = handle
        self.spec = spec
        self.limits = limits
        self.shape = shape
        self.order = (spec.priority, handle)  # smaller goes first
        self.prompt_blocks = shape.blocks(spec.prompt_tokens)
        self.blocks_max = shape.blocks(spec.prompt_tokens + spec.max_tokens - 1)
        self.phase = Phase.ADMITTED
        self.ended = False  # the client has its one end
        self.times = Timeline()
        self.due = NEVER  # the phase's timer
        # memory and the hands on it
        self.epoch = 0
        self.pages: list[int] = []
        self.extents: list[int] = []
        self.in_pages = False  # the KV is complete in `pages`
        self.windows: dict[tuple[int, str], Window] = {}
        self.marks: set[tuple[int, str]] = set()  # (rank, writer) whose end mark is still to come
        self.first_block = 0  # the landing's first block that the writer sends; those before it lay here already
        self.shared = 0  # leading `extents` that are blocks of our store: read, never written
        self.held: list[int] = []  # the store's extents under `loading`
        self.loading: set[int] = set()  # ranks that copy from `held` into the landing's pages
        self.copying: tuple[Literal["in", "out"], set[int]] | None = None
        self.in_batch = False  # steps of the ranks use `pages`; rank 0 says when none does any more
        # the writer
        self.landing_sent = False
        self.drained = False  # nothing of it is on its way
        self.writer_done = False  # prefill has nothing left to say
        # the answer
        self.first: e.FirstToken | None = None
        self.answer: list[int] | None = [] if spec.said else None  # its tokens, where a penalty looks at them
        self.made = 0  # tokens of the answer known here
        self.last_token = -1
        self.last_ns = 0
        # the batch
        self.seated = False
        self.leaving = False
        self.swap: list[int] = []  # extents reserved for a preemption under way
        self.stalled = False
        self.grow_at = NEVER  # `made` from which on another page is wanted
        # the shared pool
        self.chain = Chain(spec.block_keys, spec.chain_digest, spec.tail, shape.block_tokens)
        self.pulling: set[int] = set()  # pulls that its landing waits for
        self.seal_at = NEVER  # `made` from which on another block is full
        self.sealable = NEVER  # leading blocks that the store may have: what was removed since does not come back
        self.failed = False  # a step failed: its KV is not to be trusted
        # the state's own bookkeeping
        self.peer = 0
        self.adopts = False  # its prompt is computed in this instance: pages come as they are, nothing lands
        self.writers: tuple[tuple[int, str], ...] = ()
        self.stream: GatewayStream | None = None
        self.queue = ""
        self.armed = NEVER

    def note(self, token_id: int) -> None:
        """A token of the answer is known: for its blocks' keys and for penalties, if anybody wants to know."""
        if self.chain.pending is not None:
            self.chain.pending.append(token_id)
        if self.answer is not None:
            self.answer.append(token_id)

    # ── what the scheduler asks ──────────────────────────────────────────────────────────────────

    @property
    def shared_keys(self) -> tuple[bytes, ...]:
        """Of the prompt's blocks that need not be sent if they lie here. Never the one with the last token: prefill
        computes that in any case, and its arrival tells that the computing is over."""
        return self.spec.block_keys[: (self.spec.prompt_tokens - 1) // self.shape.block_tokens]

    @property
    def wants_landing(self) -> bool:
        return self.phase is Phase.ADMITTED and self.times.begin_fill > 0 and not (self.pulling or self.adopts)

    @property
    def wants_pages(self) -> bool:
        """KV is complete in extents."""
        return self.phase is Phase.LOADING and bool(self.extents) and not self.pages and self.copying is None

    @property
    def wants_seat(self) -> bool:
        return self.phase is Phase.READY

    @property
    def running(self) -> bool:
        """In the batch, and nobody takes it out."""
        return self.phase is Phase.RUNNING and not self.leaving

    @property
    def moving_out(self) -> bool:
        """Its pages come back soon."""
        return self.leaving or (self.copying is not None and self.copying[0] == "out")

    @property
    def context(self) -> int:
        """Tokens of KV there are (or will be, once filled)."""
        return self.spec.prompt_tokens + (self.made - 1 if self.made else 0)

    @property
    def room(self) -> int:
        """Tokens that `pages` still take."""
        return len(self.pages) * self.shape.block_tokens - self.context

    @property
    def wake_at(self) -> int:
        """When `Timer` has something to do; NEVER if nothing."""
        return self.due if self.ended else min(self.due, self.spec.deadline_ns)

    @property
    def where(self) -> str:
        """For people: what it waits for."""
        if self.phase is Phase.ADMITTED and self.times.begin_fill and self.adopts:
            return "the prompt was being computed"
        if self.phase is Phase.ADMITTED and self.times.begin_fill:
            return "fetching blocks of the prompt" if self.pulling else "waiting for a landing"
        if self.phase is Phase.ADMITTED:
            return "waiting for prefill"
        if self.phase in (Phase.RESERVED, Phase.FILLING):
            return "the KV was being transferred"
        return "generating" if self.phase is Phase.RUNNING else "waiting for the batch"

    def overdue(self) -> KvmeshError:
        """The error of a phase whose timer ran out."""
        limits = self.limits
        match self.phase:
            case Phase.ADMITTED if self.times.begin_fill:
                why = f"no landing became free within queue_ms={limits.queue_ms}"
            case Phase.ADMITTED:
                why = f"prefill did not begin within queue_ms={limits.queue_ms}"
            case Phase.RESERVED:
                return HandoffLost(f"prefill did not begin to fill within fill_begin_ms={limits.fill_begin_ms}")
            case Phase.FILLING:
                return HandoffLost(f"the KV transfer made no progress for lease_ms={limits.lease_ms}")
            case Phase.LOADING if self.first is None:
                return HandoffLost(f"no first token within lease_ms={limits.lease_ms} after the KV")
            case Phase.RUNNING if not self.stalled:
                return Unavailable(f"no token for token_ms={limits.token_ms}")
            case Phase.RUNNING:
                why = f"no page became free within token_ms={limits.token_ms}"
            case _:
                why = f"no room in the batch within batch_wait_ms={limits.batch_wait_ms}"
        return Overloaded(why, retry_after_ms=RETRY_AFTER_MS)

    def plan_growth(self) -> None:
        """Set `grow_at` for the pages held now."""
        self.grow_at = grow_at(
            len(self.pages),
            self.blocks_max,
            self.spec.prompt_tokens,
            self.shape.block_tokens,
            self.limits.lookahead_tokens,
        )

    def all_ranks(self) -> set[int]:
        """Every rank of the instance."""
        return set(range(len(self.shape.ranks)))

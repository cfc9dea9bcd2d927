"""This module has the state machine of one request in a decode instance: who may touch the request's memory at every
moment. See docs/internals/handoff.md.

    ADMITTED ─▶ RESERVED ─▶ FILLING ─▶ LOADING ─▶ READY ─▶ RUNNING ─▶ DONE ─▶ FREE
        │           │           │       │  ▲          │      │ │
        └───────────┴───────────┴───────┼──┼─preempted┴──────┘ │
                                        ▼  └───────────────────┘
                         CANCELLING ─▶ (drained) ─▶ fenced ─▶ FREE
                              └─▶ QUARANTINED (writer silent or lost) ─▶ fenced ─▶ FREE

A request whose prompt is computed in this instance goes from ADMITTED to READY at once: it adopts the pages.

The machine is pure: events and the time come in, actions go out. Four kinds of *hands* can be on a request's memory:
`windows` (writers that are not fenced yet), `loading` (a rank copies blocks of this node's store into the landing),
`copying` (a rank copies between extents and pages) and `in_batch` (a step may touch the pages; one rank speaks for all:
ADR 0023). The one rule: **memory is given back only when no hand is on it**, whatever the client was told.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

from kvmesh.clock import NEVER
from kvmesh.errors import (
    BY_CODE,
    DeadlinePassed,
    HandoffLost,
    InternalError,
    InvalidRequest,
    KvmeshError,
    Overloaded,
    Unavailable,
)
from kvmesh.instance.sampling import history_of
from kvmesh.kvcache import keys as block_keys
from kvmesh.kvcache.cache_groups import GroupPages
from kvmesh.ranks import protocol as m
from kvmesh.services.decode import events as e
from kvmesh.services.decode.events import LandingPlace, Phase, Reason
from kvmesh.services.decode.limits import NS_PER_MS, Limits, Shape
from kvmesh.services.decode.outbox import GatewayStream
from kvmesh.services.decode.rules import grow_at
from kvmesh.services.decode.timeline import Timeline

RETRY_AFTER_MS = 500


class Chain:
    """Names the blocks of a growing sequence of tokens: `keys` has the keys of the leading full blocks. A chain without
    a digest names only the blocks that it was made with, and keeps no tokens."""

    __slots__ = ("_block_tokens", "_digest", "keys", "pending")

    def __init__(self, keys: Sequence[bytes], digest: bytes, tail: bytes, block_tokens: int) -> None:
        self.keys = list(keys)
        self._digest = digest
        self._block_tokens = block_tokens
        # Tokens after the last named block; None without a digest, as no further block can be named then.
        self.pending: array[int] | None = array("I", block_keys.unpack_tokens(tail)) if digest else None

    def upto(self, blocks: int) -> list[bytes]:
        """Returns the keys of the leading `blocks` blocks, or of fewer when too few tokens are known to name them
        all."""
        pending, step = self.pending, self._block_tokens
        while pending is not None and len(self.keys) < blocks and len(pending) >= step:
            key, self._digest = block_keys.extend(self._digest, block_keys.pack_tokens(pending[:step]))
            del pending[:step]
            self.keys.append(key)
        return self.keys[:blocks]


class Window(enum.Enum):
    """Is the state of one window (a writer's right to write the landing) at the transfer engine of one rank. A window
    that is fenced is forgotten."""

    OPENING = "opening"
    OPEN = "open"
    FENCING = "fencing"


class Handoff:
    """Keeps the state of one request: its memory, the hands on its memory, and its answer. Only `step` changes a
    request, and `token`, which is the fast path of each generated token; the scheduler reads the request."""

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
        self.shared = 0  # leading `extents` that are sealed blocks of the node store: read, never written
        self.awaits = 0  # handle of the request whose landing brings blocks that it waits for
        self.awaits_until = NEVER
        self.lands_alone = False  # it has waited long enough
        self.held: list[int] = []  # the store's extents under `loading`
        self.loading: set[int] = set()  # ranks that copy from `held` into the landing's pages
        self.copying: tuple[Literal["in", "out"], set[int]] | None = None
        # Ranks that compile its grammar: it joins no batch before they have.
        self.compiling = self.all_ranks() if spec.sampling.grammar else set()
        self.in_batch = False  # steps of the ranks use `pages`; `Axes.speaker` says when none does any more
        # the writer (prefill)
        self.landing_sent = False
        self.drained = False  # no byte of the writer is on its way any more
        self.writer_done = False  # no message of prefill is to be expected any more
        # the answer
        self.first: e.FirstToken | None = None
        self.answer: list[int] | None = [] if spec.said else None  # the answer's tokens, where something needs them
        self.made = 0  # tokens of the answer known here
        self.last_token = -1
        self.last_ns = 0
        # the batch
        self.seated = False
        self.leaving = False
        self.parting: KvmeshError | None = None  # it leaves the batch to end with this error
        self.swap: list[int] = []  # extents reserved for a preemption under way
        self.stalled = False
        self.grow_at = NEVER  # the value of `made` at which another page is wanted
        self.drop_at = NEVER  # the value of `made` at which pages may go that no token sees any more
        # the shared pool
        self.chain = Chain(spec.block_keys, spec.chain_digest, spec.tail, shape.block_tokens)
        self.pulling: set[int] = set()  # pulls that its landing waits for
        self.seal_at = NEVER  # the value of `made` at which another block is full
        self.sealable = NEVER  # how many leading blocks may be sealed: a block that was removed must not come back
        self.failed = False  # a step failed: the request's KV is not to be trusted
        # the state's own bookkeeping
        self.peer = 0
        self.adopts = False  # the prompt is computed in this instance: its pages are adopted, nothing lands
        self.writers: tuple[tuple[int, str], ...] = ()
        self.stream: GatewayStream | None = None
        self.queue = ""
        self.armed = NEVER

    def note(self, token_id: int) -> None:
        """Appends a token of the answer to what block keys and penalties are computed from, where the request needs
        either."""
        if self.chain.pending is not None:
            self.chain.pending.append(token_id)
        if self.answer is not None:
            self.answer.append(token_id)

    # ── what the scheduler asks ──────────────────────────────────────────────────────────────────

    @property
    def shared_keys(self) -> tuple[bytes, ...]:
        """The keys of the prompt blocks that need not be sent if this node's store has them. The block with the
        prompt's last token is never among them: prefill computes that block in any case, and its arrival tells that the
        computing is over."""
        return self.spec.block_keys[: (self.spec.prompt_tokens - 1) // self.shape.block_tokens]

    @property
    def wants_landing(self) -> bool:
        waits = self.pulling or self.awaits or self.adopts
        return self.phase is Phase.ADMITTED and self.times.begin_fill > 0 and not waits

    @property
    def wants_pages(self) -> bool:
        """Whether the complete KV lies in extents and waits for pages."""
        return self.phase is Phase.LOADING and self.has_extents and not self.has_pages and self.copying is None

    @property
    def wants_seat(self) -> bool:
        return self.phase is Phase.READY

    @property
    def has_pages(self) -> bool:
        return bool(self.pages)

    def extents_of(self, group: int) -> Sequence[int]:
        """Returns the extents of one cache group that it holds."""
        return self.extents

    @property
    def has_extents(self) -> bool:
        """Whether its KV lies in extents, or is to land there."""
        return bool(self.extents)

    @property
    def has_tail(self) -> bool:
        """Whether what lies after its last full block may be sealed when it parts."""
        return False

    @property
    def has_host_memory(self) -> bool:
        """Whether it has any extents: of its KV, for a preemption, or that its landing is loaded from."""
        return bool(self.extents or self.swap or self.held)

    @property
    def running(self) -> bool:
        """Whether the request is in the batch and is not being taken out of it."""
        return self.phase is Phase.RUNNING and not self.leaving

    @property
    def moving_out(self) -> bool:
        """Whether the request's pages come back soon, because it leaves the batch or is being copied out."""
        return self.leaving or (self.copying is not None and self.copying[0] == "out")

    @property
    def context(self) -> int:
        """The tokens whose KV exists, or will once the landing is filled: the last sampled token has none yet."""
        return self.spec.prompt_tokens + (self.made - 1 if self.made else 0)

    @property
    def room(self) -> int:
        """How many more tokens fit into `pages`."""
        return len(self.pages) * self.shape.block_tokens - self.context

    @property
    def wake_at(self) -> int:
        """When `Timer` has something to do, in monotonic ns; NEVER if it has nothing to do."""
        return self.due if self.ended else min(self.due, self.awaits_until, self.spec.deadline_ns)

    @property
    def where(self) -> str:
        """What the request waits for, in words for an error message."""
        if self.phase is Phase.ADMITTED and self.times.begin_fill and self.adopts:
            return "the prompt was being computed"
        if self.phase is Phase.ADMITTED and self.times.begin_fill:
            if self.awaits:
                return "waiting for another request's landing of the same prompt"
            return "fetching blocks of the prompt" if self.pulling else "waiting for a landing"
        if self.phase is Phase.ADMITTED:
            return "waiting for prefill"
        if self.phase in (Phase.RESERVED, Phase.FILLING):
            return "the KV was being transferred"
        return "generating" if self.phase is Phase.RUNNING else "waiting for the batch"

    def overdue(self) -> KvmeshError:
        """Returns the error that a request ends with when the timer of its phase runs out."""
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
        """Sets `grow_at` (the length of the answer at which another page is wanted) for the pages that are held now."""
        self.grow_at = grow_at(
            len(self.pages),
            self.blocks_max,
            self.spec.prompt_tokens,
            self.shape.block_tokens,
            self.limits.lookahead_tokens,
        )

    def drop(self, out: list[e.Action], *, idle: bool = False) -> None:
        """Gives pages back that no token sees any more; `idle` says that no step has the row. Where every token sees
        all those before it, there are none."""

    def _offsets(self, rank: int) -> tuple[int, ...]:
        """Returns the byte offsets of the landing's blocks in the segment of rank `rank`."""
        shape = self.shape.ranks[rank]
        if self.extents:
            return tuple(shape.extent_base_offset + x * shape.shard_bytes for x in self.extents)
        return tuple(shape.page_base_offset + p * shape.shard_bytes for p in self.pages)

    def _invite(self, rank: int, peer: str) -> m.TellRank:
        """Returns the order to open a window for the writer `peer`. Blocks that this node had already are outside the
        window: nobody may write them."""
        return m.TellRank(rank, m.OpenWindow(peer, self.epoch, self._offsets(rank)[self.first_block :]))

    def _landing(self, rank: int) -> e.RankOffsets:
        """Returns where the landing lies at rank `rank`."""
        return e.RankOffsets(rank, self.shape.ranks[rank].segment, self._offsets(rank))

    def _to_all(self, message: m.ToRank) -> Iterable[m.TellRank]:
        return (m.TellRank(rank, message) for rank in range(len(self.shape.ranks)))

    def all_ranks(self) -> set[int]:
        return set(range(len(self.shape.ranks)))

    # ── in ───────────────────────────────────────────────────────────────────────────────────────

    def begin(self, now: int) -> list[e.Action]:
        """Starts an admitted request: it counts against the capacity, has no memory yet, and prefill is asked for its
        KV."""
        self.times.asked = now
        self._arm(now, self.limits.queue_ms)
        compile_grammar = m.CompileGrammar(self.handle, self.spec.sampling.grammar)
        orders = (m.TellRank(rank, compile_grammar) for rank in sorted(self.compiling))
        return [e.AskPrefill(self.peer, self.handle, self.spec, self.times), *orders]

    def step(self, event: e.Event, now: int) -> list[e.Action]:
        """Takes one event and returns the actions that follow from it. Events may come late, twice, or after the
        end."""
        out: list[e.Action] = []
        if self.phase is Phase.FREE:
            return out
        if type(event) is m.FromRank:
            _RANK_HANDLERS[type(event.message)](self, event.rank, event.message, now, out)
        else:
            _HANDLERS[type(event)](self, event, now, out)
        return out

    def token(self, token_id: int, index: int, now: int) -> bool:
        """Records a token that a decode step made; `now` is the step's end. Returns False if the token is known already
        or the request has ended."""
        if index != self.made or self.ended:
            return False
        self.made = index + 1
        self.last_token = token_id
        self.times.gaps.recent.append(now - self.last_ns)
        self.last_ns = now
        self.note(token_id)
        if index == 1:
            self.times.second = now
        return True

    # ── the fill ─────────────────────────────────────────────────────────────────────────────────

    def _begin_fill(self, event: e.BeginFill, now: int, out: list[e.Action]) -> None:
        if self.phase is not Phase.ADMITTED or self.times.begin_fill:
            return
        if event.num_blocks == self.prompt_blocks:
            self.times.begin_fill = now
            if self.adopts:
                self.due = NEVER  # its ranks are this instance's own, and a lost rank ends all requests
            return
        wrong = f"prefill counts {event.num_blocks} blocks in the prompt, decode {self.prompt_blocks}"
        self._cancel(e.Cancel(InternalError(wrong)), now, out)

    def _land(self, event: e.Land, now: int, out: list[e.Action]) -> None:
        assert self.wants_landing, self.phase
        self.phase = Phase.RESERVED
        self.epoch = event.epoch
        self._take_landing(event)
        self.times.at_decode_tokens = self.first_block * self.shape.block_tokens
        self.windows = dict.fromkeys(event.writers, Window.OPENING)
        self.marks = set(event.writers)
        self._arm(now, self.limits.fill_begin_ms)
        out.extend(self._invite(rank, peer) for rank, peer in event.writers)
        load = self._load_held()
        if load is not None:
            self.loading = self.all_ranks()
            out.extend(self._to_all(load))

    def _await_landing(self, event: e.AwaitLanding, now: int, out: list[e.Action]) -> None:
        assert self.wants_landing, self.phase
        self.awaits = event.handle
        self.awaits_until = (now + self.due) // 2  # the other half is for a landing of its own

    def awaits_no_more(self) -> None:
        """Takes up the wait for a landing of its own, as the one that it waited for is complete or has failed."""
        self.awaits, self.awaits_until = 0, NEVER

    def _take_landing(self, event: e.Land) -> None:
        self.first_block = event.shared + len(event.held)
        if event.place is LandingPlace.PAGES:
            self.pages, self.held = event.slots, event.held
        else:
            self.extents, self.shared = [*event.held, *event.slots], len(event.held)
        assert len(self.pages) + len(self.extents) == self.prompt_blocks > self.first_block

    def _load_held(self) -> m.LoadCopy | None:
        """Returns the order to copy blocks of this node's store into the landing; None if there are none. A request
        loads once, for its landing: the epoch is the ticket."""
        if not self.held:
            return None
        shared = self.first_block - len(self.held)
        return m.LoadCopy(self.epoch, tuple(self.held), tuple(self.pages[shared : self.first_block]))

    def _drop_held(self) -> e.FreeExtents:
        held, self.held = self.held, []
        return e.FreeExtents(tuple(held))

    def _loaded(self, rank: int, done: m.LoadCopied, now: int, out: list[e.Action]) -> None:
        if rank not in self.loading:
            return
        self.loading.discard(rank)
        if self.loading:
            return  # other ranks still copy
        self.times.load_start, self.times.load_end = done.start_ns, done.end_ns
        out.append(self._drop_held())
        if self.phase is Phase.LOADING:
            self.in_pages = True
            self._advance(now, out)
        self._free_if_unused(now, out)

    def _window_opened(self, rank: int, opened: m.WindowOpened, now: int, out: list[e.Action]) -> None:
        key = (rank, opened.peer)
        if opened.handoff_epoch != self.epoch or self.windows.get(key) is not Window.OPENING:
            return
        self.windows[key] = Window.OPEN
        if Window.OPENING in self.windows.values():
            return
        self.landing_sent = True
        self.times.landing = now
        self._arm(now, self.limits.fill_begin_ms)
        # The writer counts from when it sent BeginFill: what it waited here is on top, so that its lease ends a
        # margin before decode's own timer could.
        waited_ms = (now - self.times.begin_fill) // NS_PER_MS
        lease_ms = waited_ms + self.limits.lease_ms - self.limits.lease_margin_ms
        ranks = tuple(map(self._landing, range(len(self.shape.ranks))))
        out.append(e.TellLanding(self.peer, self.handle, self.epoch, lease_ms, ranks, self.first_block))

    def _progress(self, now: int) -> None:
        if self.phase is Phase.RESERVED and self.landing_sent:
            self.phase = Phase.FILLING
        if self.phase is Phase.FILLING:
            self._arm(now, self.limits.lease_ms)

    def _renew(self, event: e.RenewLease, now: int, out: list[e.Action]) -> None:
        if event.epoch == self.epoch and self.phase in (Phase.RESERVED, Phase.FILLING) and self.landing_sent:
            self._progress(now)
            lease_ms = self.limits.lease_ms - self.limits.lease_margin_ms
            out.append(e.TellRenewed(self.peer, self.handle, self.epoch, lease_ms))

    def _first_token(self, event: e.FirstToken, now: int, out: list[e.Action]) -> None:
        if self.first is not None or self.ended:
            return
        # The prompt's scores go to the gateway now; they are not kept as long as the answer runs.
        self.first = event if event.prompt_scores is None else replace(event, prompt_scores=None)
        self.made = 1
        self.last_token, self.last_ns = event.token_id, now
        times, spec = self.times, self.spec
        times.first, times.cached_tokens = now, event.cached_tokens
        times.queue_us, times.prefill_us = event.queue_us, event.prefill_us
        times.pull_us, times.pull_bytes = event.pull_us, event.pull_bytes
        times.pulled_tokens, times.host_tokens = event.pulled_tokens, event.host_tokens
        self.note(event.token_id)
        out.append(e.EmitFirst(event))
        if event.token_id in spec.stop_token_ids and spec.min_tokens <= 1:
            self._finish_early(Reason.STOP, now, out)
        elif spec.max_tokens <= 1:
            self._finish_early(Reason.LENGTH, now, out)
        else:
            self._progress(now)
            if self.phase is Phase.LOADING:
                self._arm(now, self.limits.batch_wait_ms)
            self._advance(now, out)

    def _adopted(self, event: e.Adopted, now: int, out: list[e.Action]) -> None:
        """Takes over pages that are complete and that nobody else writes, with the first token: there is no window, no
        landing and no copy."""
        assert self.adopts and self.phase is Phase.ADMITTED, self.phase
        self.phase = Phase.LOADING
        self._take_adopted(event)
        self.in_pages = True
        self.writer_done = self.drained = True
        self._first_token(event.first, now, out)

    def _take_adopted(self, event: e.Adopted) -> None:
        self.pages = list(event.pages)

    def _finish_early(self, reason: Reason, now: int, out: list[e.Action]) -> None:
        """Ends a request whose answer is complete with its first token. Prefill may still write, so the landing is kept
        until its windows are fenced."""
        self._end(e.EmitFinish(reason), now, out)
        if not self.writer_done:
            out.append(e.TellCancel(self.peer, self.handle, "finished with its first token"))
        self._retire(Phase.CANCELLING, now, out)

    def _fill_ended(self, rank: int, mark: m.FillEnded, now: int, out: list[e.Action]) -> None:
        key = (rank, mark.peer)
        if mark.handoff_epoch != self.epoch or key not in self.marks or not self.landing_sent:
            return
        self.marks.discard(key)
        if self.marks:
            self._progress(now)
            return
        self.drained = True
        if self.phase in (Phase.RESERVED, Phase.FILLING):
            self.times.filled = now
            self.phase = Phase.LOADING
            self.in_pages = self.has_pages and not self.loading
            self._arm(now, self.limits.batch_wait_ms if self.first else self.limits.lease_ms)
            self._fence_windows(out)
            self._advance(now, out)
        elif self.phase is Phase.CANCELLING:
            self._fence_windows(out)

    def _fill_done(self, event: e.FillDone, now: int, out: list[e.Action]) -> None:
        if event.epoch == self.epoch and self.epoch and not self.times.transfer_bytes:
            self.times.transfer_us, self.times.transfer_bytes = event.transfer_us, event.transfer_bytes
        self._quiet(event, now, out)

    def _quiet(self, event: e.FillDone | e.Drained, now: int, out: list[e.Action]) -> None:
        """Handles the writer's word that it writes no more. Its end marks may still be in the queue of a rank of
        ours."""
        if event.epoch != self.epoch:
            return  # epoch 0 although there is a landing: the writer has not heard of the landing yet
        self.writer_done = True
        if self.phase is Phase.ADMITTED:
            self._cancel(e.Cancel(HandoffLost("prefill gave the request up")), now, out)
        elif self.phase is Phase.CANCELLING:
            self.drained = True
            self._fence_windows(out)
            self._free_if_unused(now, out)
        elif self.phase in (Phase.RESERVED, Phase.FILLING):
            self.drained = True
            self.due = min(self.due, now + self.limits.drain_ms * NS_PER_MS)

    def _writer_gone(self, event: e.HandoffFailed | e.PeerLost, now: int, out: list[e.Action]) -> None:
        if isinstance(event, e.PeerLost):
            event = e.HandoffFailed(HandoffLost(f"lost the writer of the KV: {event.cause}"), drained=False)
        self.writer_done = True
        self.drained = self.drained or event.drained
        quiet = self.drained or not self.landing_sent
        if self.ended:
            if self.windows and self.phase is Phase.CANCELLING:
                self._retire(Phase.CANCELLING if quiet else Phase.QUARANTINED, now, out)
        elif self.phase < Phase.LOADING or self.first is None:
            self.times.writer_lost = now
            self._end(e.EmitFail(event.error), now, out)
            self._retire(Phase.CANCELLING if quiet else Phase.QUARANTINED, now, out)

    def _window_fenced(self, rank: int, fenced: m.Fenced, now: int, out: list[e.Action]) -> None:
        key = (rank, fenced.peer)
        if fenced.handoff_epoch != self.epoch or self.windows.get(key) is not Window.FENCING:
            return
        del self.windows[key]
        self._advance(now, out)
        self._free_if_unused(now, out)

    # ── pages and the batch ──────────────────────────────────────────────────────────────────────

    def _advance(self, now: int, out: list[e.Action]) -> None:
        """Goes from LOADING to READY once the KV is in pages that nobody else writes and the first token is here."""
        if self.in_pages and self.has_extents and not self.windows and self.copying is None:
            out.append(self._keep_extents())
        if self.in_pages and not self.windows and not self.times.load_end:
            # The KV landed straight in pages: nothing was copied, but only from here on no writer can touch them.
            self.times.load_start, self.times.load_end = self.times.filled, now
        landed = self.in_pages and not self.windows and not self.compiling
        if self.phase is Phase.LOADING and landed and self.first is not None:
            self.phase = Phase.READY
            if self.seated:
                self._join(now, out)

    def _keep_extents(self) -> e.KeepExtents | e.FreeExtents:
        extents, shared, self.extents, self.shared = tuple(self.extents), self.shared, [], 0
        return e.KeepExtents(extents, shared)

    def _compiled(self, rank: int, done: m.GrammarCompiled, now: int, out: list[e.Action]) -> None:
        self.compiling.discard(rank)
        if done.why_not:
            self._cancel(e.Cancel(InvalidRequest(done.why_not, field="grammar")), now, out)
        elif not self.ended:
            self._advance(now, out)

    def _load(self, event: e.LoadExtents, now: int, out: list[e.Action]) -> None:
        assert self.wants_pages, self.phase
        copy = self._take_pages(event)
        self.seated = True
        self.copying = ("in", self.all_ranks())
        out.extend(self._to_all(copy))

    def _take_pages(self, event: e.LoadExtents) -> m.CopyIn:
        assert len(event.pages) >= len(self.extents)
        self.pages = event.pages
        shared, end = event.shared, len(self.extents)
        return m.CopyIn(self.handle, tuple(self.extents[shared:]), tuple(self.pages[shared:end]))

    def _copied(self, rank: int, done: m.Copied, now: int, out: list[e.Action]) -> None:
        if self.copying is None or done.into_pages != (self.copying[0] == "in"):
            return
        self.copying[1].discard(rank)
        if self.copying[1]:
            return  # other ranks still copy
        self.copying = None
        if done.into_pages:
            if not self.times.load_end:
                self.times.load_start, self.times.load_end = done.start_ns, done.end_ns
            self.in_pages = True
            self._advance(now, out)
        elif self.phase is Phase.LOADING:
            self._give_pages(out)
        self._free_if_unused(now, out)

    def _seat(self, event: e.Seat, now: int, out: list[e.Action]) -> None:
        assert self.wants_seat, self.phase
        self.seated = True
        self._join(now, out)

    def _join(self, now: int, out: list[e.Action]) -> None:
        self.phase = Phase.RUNNING
        self.in_batch = True
        self.stalled = False
        self.times.joined = self.times.joined or now
        self._arm(now, self.limits.token_ms)
        self.plan_growth()
        spec = self.spec
        join = m.Join(
            handle=self.handle,
            pages=tuple(self.pages),
            groups=self._tables(),
            context_tokens=self.context,
            next_token=self.last_token,
            token_index=self.made - 1,
            max_tokens=spec.max_tokens,
            min_tokens=spec.min_tokens,
            stop_token_ids=spec.stop_token_ids,
            sampling=spec.sampling,
            history=self._history(),
            said=self._said(),
        )
        out.extend(self._to_all(join))
        out.append(e.SealFull())

    def _tables(self) -> tuple[GroupPages, ...]:
        """Returns its pages by cache groups, where the model has several."""
        return ()

    def _history(self) -> m.TokenHistory | None:
        if self.answer is None:
            return None
        return history_of(self.spec.sampling, block_keys.unpack_tokens(self.spec.said), self.answer)

    def _said(self) -> m.TokenHistory | None:
        """Returns what drafts are made from. What an earlier attempt has answered is of the answer."""
        if not self.spec.drafts or self.answer is None:
            return None
        asked = len(self.spec.said) - block_keys.TOKEN_BYTES * self.spec.sampling.answered
        answer = self.spec.said[asked:] + block_keys.pack_tokens(self.answer)
        return m.TokenHistory(self.spec.said[:asked], answer)

    def _grow(self, event: e.Grow, now: int, out: list[e.Action]) -> None:
        assert self.running, self.phase
        self.times.gaps.fold()  # here, as the path of every token is to do nothing more than append
        self.stalled = False
        grant = self._take_growth(event)
        self.plan_growth()
        out.extend(self._to_all(grant))

    def _take_growth(self, event: e.Grow) -> m.Grant:
        self.pages.extend(event.pages)
        return m.Grant(self.handle, tuple(event.pages))

    def _preempt(self, event: e.Preempt, now: int, out: list[e.Action]) -> None:
        assert self.running or self.phase is Phase.READY, self.phase
        self._take_swap(event)
        self.times.preemptions += 1
        if self.phase is Phase.RUNNING:
            self._leave(out)
        else:
            self._copy_out(now, out)

    def _copy_out(self, now: int, out: list[e.Action]) -> None:
        """Copies the KV of a preempted request into extents. The request has left the batch, so the answer's length is
        known and only blocks with KV are copied."""
        copy = self._use_swap(out)
        self.phase = Phase.LOADING
        self.seated = self.in_pages = self.stalled = False
        self._arm(now, self.limits.batch_wait_ms)
        self.copying = ("out", self.all_ranks())
        out.extend(self._to_all(copy))

    def _take_swap(self, event: e.Preempt) -> None:
        assert len(event.extents) == len(self.pages) and not self.extents
        self.swap = event.extents

    @property
    def _has_swap(self) -> bool:
        return bool(self.swap)

    def _use_swap(self, out: list[e.Action]) -> m.CopyOut:
        used = self.shape.blocks(self.context)
        self.extents, spare, self.swap = self.swap[:used], self.swap[used:], []
        if spare:
            out.append(e.FreeExtents(tuple(spare)))
        return m.CopyOut(self.handle, tuple(self.pages[:used]), tuple(self.extents))

    def _left(self, rank: int, left: m.Left, now: int, out: list[e.Action]) -> None:
        if self.leaving:
            self._out_of_batch(now, out)

    def _out_of_batch(self, now: int, out: list[e.Action]) -> None:
        self.in_batch = self.leaving = False
        if self.ended:
            self._free_if_unused(now, out)
        elif self._has_swap:
            self._copy_out(now, out)
        elif self.parting is not None:
            self._cancel(e.Cancel(self.parting), now, out)

    def _answer_ended(self, event: e.Ended, now: int, out: list[e.Action]) -> None:
        if not self.in_batch:
            return
        if not self.ended:
            self._end(e.EmitFinish(event.reason), now, out)
            self.phase = Phase.DONE
        if event.held:
            self.leaving, self.due = True, NEVER
        else:
            self._out_of_batch(now, out)

    def _part(self, event: e.EndAfterStep, now: int, out: list[e.Action]) -> None:
        if self.running and self.has_tail:
            self.parting = event.error
            self._leave(out)
        else:
            self._cancel(e.Cancel(event.error), now, out)

    def _step_failed(self, rank: int, failed: m.RankError, now: int, out: list[e.Action]) -> None:
        if not self.in_batch:
            return
        self.failed = self.failed or not failed.code
        if not self.ended:
            error = BY_CODE[failed.code](failed.message, field="grammar") if failed.code else None
            self._end(e.EmitFail(error or InternalError(failed.message)), now, out)
            self.phase = Phase.CANCELLING
            self.due = NEVER
        self._out_of_batch(now, out)

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────

    def _cancel(self, event: e.Cancel, now: int, out: list[e.Action]) -> None:
        if self.ended:
            return
        self._end(e.EmitFail(event.error), now, out)
        if not self.writer_done and self.phase < Phase.READY:
            out.append(e.TellCancel(self.peer, self.handle, event.error.message))
        self._retire(Phase.CANCELLING, now, out)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def _timer(self, event: e.Timer, now: int, out: list[e.Action]) -> None:
        if now >= self.spec.deadline_ns and not self.ended:
            self._cancel(e.Cancel(DeadlinePassed(f"the deadline passed while {self.where}")), now, out)
        elif self.awaits and now >= self.awaits_until:
            self.awaits_no_more()
            self.lands_alone = True
        elif now >= self.due:
            if self.phase is Phase.CANCELLING:
                self._retire(Phase.QUARANTINED, now, out)
            elif self.phase is Phase.RUNNING and now < self.last_ns + self.limits.token_ms * NS_PER_MS:
                self._arm(self.last_ns, self.limits.token_ms)  # tokens came since; the token path sets no timers
            else:
                self._cancel(e.Cancel(self.overdue()), now, out)

    # ── the end ──────────────────────────────────────────────────────────────────────────────────
    # Every request ends here, whatever came before. The one rule is `_free_if_unused`.

    def _end(self, action: e.EmitFinish | e.EmitFail, now: int, out: list[e.Action]) -> None:
        assert not self.ended, "a request ends once"
        self.ended = True
        self.times.ended = now
        out.append(action)

    def _retire(self, phase: Phase, now: int, out: list[e.Action]) -> None:
        """Begins to give back the memory of a request whose client has been told its end. What nobody touches is given
        back now, the rest when the last hand comes off it."""
        self.phase = phase
        self.due = NEVER
        self._leave(out)
        if phase is Phase.CANCELLING and self.windows and self.landing_sent and not self.drained:
            self._arm(now, self.limits.drain_ms)
        else:
            self._fence_windows(out)
        self._free_if_unused(now, out)

    def _fence_windows(self, out: list[e.Action]) -> None:
        for key, window in self.windows.items():
            if window is not Window.FENCING:
                self.windows[key] = Window.FENCING
                rank, peer = key
                out.append(m.TellRank(rank, m.Fence(peer, self.epoch)))

    def _free_if_unused(self, now: int, out: list[e.Action]) -> None:
        if not self.ended or self.windows or self.loading or self.copying or self.in_batch:
            return
        self._give_pages(out)
        self._give_extents(out)
        self.seated = False
        self.phase = Phase.FREE
        self.due = NEVER
        out.append(e.Freed())

    def _give_pages(self, out: list[e.Action]) -> None:
        if self.pages:
            out.append(e.FreePages(tuple(self.pages)))
        self.pages = []

    def _give_extents(self, out: list[e.Action]) -> None:
        if self.extents or self.swap:
            out.append(e.FreeExtents((*self.extents, *self.swap)))
        self.extents, self.swap = [], []

    def _leave(self, out: list[e.Action]) -> None:
        if self.in_batch and not self.leaving:
            self.leaving = True
            out.extend(self._to_all(m.Leave(self.handle)))

    def _arm(self, now: int, ms: int) -> None:
        self.due = now + ms * NS_PER_MS


_Handler = Callable[[Handoff, Any, int, list[e.Action]], None]
_HANDLERS: dict[type[Any], _Handler] = {
    e.BeginFill: Handoff._begin_fill,
    e.RenewLease: Handoff._renew,
    e.FirstToken: Handoff._first_token,
    e.FillDone: Handoff._fill_done,
    e.Drained: Handoff._quiet,
    e.HandoffFailed: Handoff._writer_gone,
    e.PeerLost: Handoff._writer_gone,
    e.Adopted: Handoff._adopted,
    e.Ended: Handoff._answer_ended,
    e.Land: Handoff._land,
    e.AwaitLanding: Handoff._await_landing,
    e.LoadExtents: Handoff._load,
    e.Seat: Handoff._seat,
    e.Grow: Handoff._grow,
    e.Preempt: Handoff._preempt,
    e.Cancel: Handoff._cancel,
    e.EndAfterStep: Handoff._part,
    e.Timer: Handoff._timer,
}
_RankHandler = Callable[[Handoff, int, Any, int, list[e.Action]], None]
_RANK_HANDLERS: dict[type[Any], _RankHandler] = {
    m.WindowOpened: Handoff._window_opened,
    m.FillEnded: Handoff._fill_ended,
    m.Fenced: Handoff._window_fenced,
    m.LoadCopied: Handoff._loaded,
    m.Copied: Handoff._copied,
    m.Left: Handoff._left,
    m.RankError: Handoff._step_failed,
    m.GrammarCompiled: Handoff._compiled,
}

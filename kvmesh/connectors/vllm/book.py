"""The scheduler's side of the connector: which blocks of a request are looked up, loaded and saved. Pure: time is an
argument, and lookups and transfers are orders that somebody else carries out.

    match       tokens beyond vLLM's own hit that the pool has; the first call orders a lookup and says "later"
    allocated   pages are there for them: a load is ordered
    step        blocks that are full after this step, and that the pool does not have: a save is ordered
    received    ranks tell of loads, each in a step of its own; a request whose load failed on any of them is computed
                and not loaded again

Between a prefill engine and a decode engine, without the pool:

    hand_over   prefill: a request has ended whose pages another engine wants; they are held, and it is told where
    match       decode: tokens that another engine keeps for this very request, if its KV is what would be computed here
    allocated   pages are there for them: their receipt is ordered

A request is in the book from `add` to `finish`, so the book is as large as vLLM's own list of requests.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvmesh.connectors.vllm.keys import TokenChain
from kvmesh.connectors.vllm.remote import PageSharing, PushRank, RemotePrefill
from kvmesh.kvcache.keys import Namespace

FRESH_S = 5.0  # how long what a lookup found counts for a request that is not admitted
MAX_SILENT = 1024  # engines that ran out of time and are remembered


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Orders one request's blocks from the pool into these pages."""

    request_id: str
    block_ids: tuple[int, ...]
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Orders the content of these pages, as it is when the step ends, into the pool."""

    block_ids: tuple[int, ...]
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class HoldOrder:
    """Orders that the pages of a prompt stay as they are, for whoever shows the ticket."""

    request_id: str
    ticket: bytes
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReceiveOrder:
    """Orders that blocks of a prompt, from `first_block` on, are pushed by where they are kept into these pages."""

    request_id: str
    source: RemotePrefill
    first_block: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HandoffOrders:
    """Orders what is to be done between two engines. `releases` are prompts that are not wanted any more."""

    holds: tuple[HoldOrder, ...] = ()
    receives: tuple[ReceiveOrder, ...] = ()
    releases: tuple[RemotePrefill, ...] = ()


@dataclass(frozen=True, slots=True)
class HandoffSide:
    """Says who this engine is to others that its pages go to or come from."""

    engine_id: str
    pages: PageSharing
    ranks: tuple[PushRank, ...]


@dataclass(frozen=True, slots=True)
class Match:
    """Answers how many tokens can be loaded; None: ask again. `ask` are keys to look up now. `refused` says why what
    another engine keeps is computed here instead."""

    tokens: int | None
    ask: tuple[bytes, ...] = ()
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Is what one step computes of one request: after it `computed` tokens of `tokens` have KV in `block_ids`."""

    request_id: str
    tokens: Sequence[int]
    computed: int
    block_ids: Sequence[int]


@dataclass(slots=True)
class _Tracked:
    chain: TokenChain
    prompt_tokens: int
    held: bytes = b""  # a byte a block, as the last lookup found them
    asked: float | None = None  # since when a lookup runs
    found: float | None = None  # when the last one ended
    local: int = 0  # blocks that vLLM itself had at the last match
    saved: int = 0  # blocks before this one are held, or were ordered to be saved
    loading: dict[int, int] = field(default_factory=dict)  # page → block
    lost: set[int] = field(default_factory=set)  # blocks of `loading` that some rank could not load
    failed: bool = False
    source: RemotePrefill | None = None  # who keeps the prompt's KV, until it is received or refused
    receiving: RemotePrefill | None = None
    checked: bool = False  # the source's KV is what would be computed here


class RequestBook:
    """Keeps what is known of each request that vLLM has."""

    def __init__(
        self,
        block_tokens: int,
        *,
        lookup_s: float,
        pause_s: float,
        save_decoded: bool = True,
        loads: bool = True,
        saves: bool = True,
        pool: bool = True,
        handoff: HandoffSide | None = None,
    ) -> None:
        """`handoff` is None where nothing is handed over to other engines, or taken from them."""
        self._block_tokens = block_tokens
        self._pool = pool
        self._handoff = handoff
        self._holds: list[HoldOrder] = []
        self._receives: list[ReceiveOrder] = []
        self._releases: list[RemotePrefill] = []
        self._silent: dict[str, float] = {}  # engine → until when it is not asked
        self._lookup_s = lookup_s
        self._pause_s = pause_s
        self._save_decoded = save_decoded
        self._loads = loads
        self._saves = saves
        self._requests: dict[str, _Tracked] = {}
        self._ordered: list[LoadOrder] = []
        self._paused_until = 0.0
        self.late_lookups = 0

    def __len__(self) -> int:
        return len(self._requests)

    def add(
        self, request_id: str, namespace: Namespace, prompt_tokens: int, source: RemotePrefill | None = None
    ) -> None:
        """Adds a request whose KV follows from its tokens. One that is not added is neither loaded nor saved. `source`
        is who keeps its prompt's KV for it."""
        one = _Tracked(TokenChain(namespace, self._block_tokens), prompt_tokens)
        one.source = source
        self._requests[request_id] = one

    def finish(self, request_id: str) -> None:
        """Forgets a request, however it ended."""
        one = self._requests.pop(request_id, None)
        if one is not None and one.source is not None:
            self._releases.append(one.source)

    def clear(self) -> None:
        """Forgets all requests: they are neither loaded nor saved any more, but for loads that are under way."""
        for request_id in list(self._requests):
            self.finish(request_id)

    # ── lookups ──────────────────────────────────────────────────────────────────────────────────

    def match(self, request_id: str, tokens: Sequence[int], local_tokens: int, now: float) -> Match:
        """Returns how many tokens the pool has beyond the `local_tokens` that vLLM has itself. At least one token is
        left to compute, as the next one is sampled from it."""
        one = self._requests.get(request_id)
        if one is None:
            return Match(0)
        one.local = local_tokens // self._block_tokens
        refused = ""
        if one.source is not None:
            count, refused = self._match_source(one, one.source, tokens, local_tokens, now)
            if count:
                return Match(count)
            self._releases.append(one.source)
            one.source = None
        match = self._match_pool(one, tokens, now)
        return replace(match, refused=refused) if refused else match

    def _match_source(
        self, one: _Tracked, source: RemotePrefill, tokens: Sequence[int], local_tokens: int, now: float
    ) -> tuple[int, str]:
        """Returns how many tokens the source has beyond the local ones, and why none is taken."""
        if self._handoff is None or not self._loads:
            return 0, "this engine takes no KV from others (push, kv_role)"
        if not one.checked:
            if why := source.why_not(self._handoff.pages):
                return 0, why
            if source.tokens > one.prompt_tokens:
                return 0, f"{source.tokens} tokens there and a prompt of {one.prompt_tokens} here"
            if source.digest != one.chain.digest(tokens, source.tokens):
                return 0, "tokens, adapter, cache salt, weights or configuration differ"
            one.checked = True
        if now < self._silent.get(source.engine_id, 0.0):
            return 0, f"engine {source.engine_id} ran out of time a moment ago"
        return max(source.tokens - local_tokens, 0), ""

    def _match_pool(self, one: _Tracked, tokens: Sequence[int], now: float) -> Match:
        full = (len(tokens) - 1) // self._block_tokens
        reads = self._loads and self._pool
        if not reads or one.failed or now < self._paused_until or full <= one.local:
            one.saved = max(one.saved, one.local)  # they were saved when they were computed
            return Match(0)
        if one.asked is not None:
            if now - one.asked < self._lookup_s:
                return Match(None)
            self.late_lookups += 1
            self._found(one, b"", now)
            self._paused_until = now + self._pause_s
            return Match(0)
        if one.found is None or now - one.found >= FRESH_S or full > len(one.held) > 0:
            one.chain.reach(tokens, full)
            one.asked = now
            return Match(None, tuple(one.chain.keys[:full]))
        run = 0
        while one.local + run < min(full, len(one.held)) and one.held[one.local + run]:
            run += 1
        return Match(run * self._block_tokens)

    def found(self, request_id: str, held: bytes, now: float) -> None:
        """Tells what a lookup found: one byte a block, 1 for one that the pool has; empty when it failed."""
        one = self._requests.get(request_id)
        if one is not None and one.asked is not None:
            self._found(one, held, now)

    def _found(self, one: _Tracked, held: bytes, now: float) -> None:
        one.asked, one.found, one.held = None, now, held
        if not held:  # nothing is known of what vLLM had by itself
            one.saved = max(one.saved, one.local)

    # ── loads ────────────────────────────────────────────────────────────────────────────────────

    def allocated(self, request_id: str, block_ids: Sequence[int], tokens: int) -> None:
        """Orders a load of `tokens` tokens, which begin where vLLM's own hit ends, into the request's pages."""
        one = self._requests.get(request_id)
        if one is not None and one.source is not None:
            self._receive(request_id, one, one.source, block_ids, tokens)
            return
        count = tokens // self._block_tokens
        if one is None or not count:
            return
        pages = tuple(block_ids[one.local : one.local + count])
        one.loading = {page: one.local + at for at, page in enumerate(pages)}
        self._ordered.append(LoadOrder(request_id, pages, tuple(one.chain.keys[one.local : one.local + count])))

    def _receive(
        self, request_id: str, one: _Tracked, source: RemotePrefill, block_ids: Sequence[int], tokens: int
    ) -> None:
        blocks = -(-tokens // self._block_tokens)  # the last one may be full in part
        pages = tuple(block_ids[one.local : one.local + blocks])
        one.source, one.receiving = None, source
        one.loading = {page: one.local + at for at, page in enumerate(pages)}
        self._receives.append(ReceiveOrder(request_id, source, one.local, pages))

    def received(
        self,
        request_ids: Iterable[str],
        failed_pages: Collection[int],
        late: bool,
        now: float,
        silent: Collection[str] = (),
    ) -> None:
        """Tells which loads have ended on all ranks, and which pages a rank has no content for: of those loads, and of
        others that another rank has not ended yet. `late`: a load ran out of time; then nothing is looked up for a
        while, as the next one would, too. `silent` are requests whose push did: that engine is not asked for a
        while."""
        if failed_pages:
            for each in self._requests.values():
                each.lost.update(block for page, block in each.loading.items() if page in failed_pages)
        for request_id in silent:
            one = self._requests.get(request_id)
            if one is not None and one.receiving is not None:
                self._rest(one.receiving.engine_id, now)
        for request_id in request_ids:
            one = self._requests.get(request_id)
            if one is None:
                continue
            if one.receiving is not None:
                self._pushed(one, one.receiving, one.lost)
                one.receiving = None
            elif one.lost:
                one.failed = True
                one.held = one.held[: min(one.lost)]  # from there on it is computed, and saved again
            one.loading, one.lost = {}, set()
        if late:
            self._paused_until = now + self._pause_s

    def _pushed(self, one: _Tracked, source: RemotePrefill, missing: Collection[int]) -> None:
        """Notes that prefill, which computed what came, has saved it."""
        came = min(missing, default=source.tokens // self._block_tokens)
        one.saved = max(one.saved, min(came, source.tokens // self._block_tokens))

    def _rest(self, engine_id: str, now: float) -> None:
        for known in [name for name, until in self._silent.items() if until <= now]:
            del self._silent[known]
        if len(self._silent) < MAX_SILENT:
            self._silent[engine_id] = now + self._pause_s

    # ── between engines ──────────────────────────────────────────────────────────────────────────

    def hand_over(
        self, request_id: str, tokens: Sequence[int], computed: int, block_ids: Sequence[int], ticket: bytes
    ) -> RemotePrefill | None:
        """Orders that the pages of a request's prompt are held, which must not be freed before the worker says so, and
        returns what the engine that decodes is to be told; None when there is nothing to be handed over. `ticket` is
        random."""
        one = self._requests.get(request_id)
        if one is None or self._handoff is None or not self._saves:
            return None
        count = one.prompt_tokens
        blocks = -(-count // self._block_tokens)
        if computed < count or len(block_ids) < blocks:  # it was preempted: its pages are somebody else's
            return None
        self._holds.append(HoldOrder(request_id, ticket, tuple(block_ids[:blocks])))
        pages = self._handoff.pages
        return RemotePrefill(
            engine_id=self._handoff.engine_id,
            request_id=request_id,
            ticket=ticket.hex(),
            tokens=count,
            digest=one.chain.digest(tokens, count),
            block_tokens=pages.block_tokens,
            layout=pages.layout,
            ranks=self._handoff.ranks,
        )

    def drop(self, source: RemotePrefill) -> None:
        """Orders that a prompt is released which no request here takes."""
        self._releases.append(source)

    def handoffs(self) -> HandoffOrders:
        """Returns what is to be done between engines since the last call."""
        orders = HandoffOrders(tuple(self._holds), tuple(self._receives), tuple(self._releases))
        self._holds, self._receives, self._releases = [], [], []
        return orders

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    def step(self, scheduled: Iterable[Scheduled]) -> tuple[list[LoadOrder], list[SaveOrder]]:
        """Returns what is to be loaded from now on, and saved when this step has run."""
        loads, self._ordered = self._ordered, []
        saves = []
        for each in scheduled:
            one = self._requests.get(each.request_id)
            if one is None or not self._saves or not self._pool:
                continue
            order = self._save(one, each)
            if order.block_ids:
                saves.append(order)
        return loads, saves

    def _save(self, one: _Tracked, each: Scheduled) -> SaveOrder:
        """Returns the blocks that have become full: of tokens that are computed and known. A draft's tokens, and those
        that are still being sampled, come with a later step."""
        known = min(each.computed, len(each.tokens))
        if not self._save_decoded:
            known = min(known, one.prompt_tokens)
        full = min(known // self._block_tokens, len(each.block_ids))
        if full <= one.saved:
            return SaveOrder((), ())
        one.chain.reach(each.tokens, full)
        new = [at for at in range(one.saved, full) if at >= len(one.held) or not one.held[at]]
        one.saved = full
        return SaveOrder(tuple(each.block_ids[at] for at in new), tuple(one.chain.keys[at] for at in new))

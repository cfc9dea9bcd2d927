"""The scheduler's side of the connector: which blocks of a request are looked up, loaded and saved. Pure: time is an
argument, and lookups and transfers are orders that somebody else carries out.

    match       tokens beyond vLLM's own hit that the pool has; the first call orders a lookup and says "later"
    allocated   pages are there for them: a load is ordered
    step        blocks that are full after this step, and that the pool does not have: a save is ordered
    received    a load has ended; a request whose load failed is computed and not loaded again

A request is in the book from `add` to `finish`, so the book is as large as vLLM's own list of requests.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kvmesh.connectors.vllm.keys import TokenChain
from kvmesh.kvcache.keys import Namespace

FRESH_S = 5.0  # how long what a lookup found counts for a request that is not admitted


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
class Match:
    """Answers how many tokens can be loaded; None: ask again. `ask` are keys to look up now."""

    tokens: int | None
    ask: tuple[bytes, ...] = ()


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
    failed: bool = False


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
    ) -> None:
        self._block_tokens = block_tokens
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

    def add(self, request_id: str, namespace: Namespace, prompt_tokens: int) -> None:
        """Adds a request whose KV follows from its tokens. One that is not added is neither loaded nor saved."""
        self._requests[request_id] = _Tracked(TokenChain(namespace, self._block_tokens), prompt_tokens)

    def finish(self, request_id: str) -> None:
        """Forgets a request, however it ended."""
        self._requests.pop(request_id, None)

    def clear(self) -> None:
        """Forgets all requests: they are neither loaded nor saved any more, but for loads that are under way."""
        self._requests.clear()

    # ── lookups ──────────────────────────────────────────────────────────────────────────────────

    def match(self, request_id: str, tokens: Sequence[int], local_tokens: int, now: float) -> Match:
        """Returns how many tokens the pool has beyond the `local_tokens` that vLLM has itself. At least one token is
        left to compute, as the next one is sampled from it."""
        one = self._requests.get(request_id)
        if one is None:
            return Match(0)
        one.local = local_tokens // self._block_tokens
        full = (len(tokens) - 1) // self._block_tokens
        if not self._loads or one.failed or now < self._paused_until or full <= one.local:
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
        count = tokens // self._block_tokens
        if one is None or not count:
            return
        pages = tuple(block_ids[one.local : one.local + count])
        one.loading = {page: one.local + at for at, page in enumerate(pages)}
        self._ordered.append(LoadOrder(request_id, pages, tuple(one.chain.keys[one.local : one.local + count])))

    def received(self, request_ids: Iterable[str], failed_pages: Collection[int], late: bool, now: float) -> None:
        """Tells which loads have ended, and which pages have no content of theirs. `late`: a load ran out of time; then
        nothing is looked up for a while, as the next one would, too."""
        for request_id in request_ids:
            one = self._requests.get(request_id)
            if one is None:
                continue
            missing = [block for page, block in one.loading.items() if page in failed_pages]
            if missing:
                one.failed = True
                one.held = one.held[: min(missing)]  # from there on it is computed, and saved again
            one.loading = {}
        if late:
            self._paused_until = now + self._pause_s

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    def step(self, scheduled: Iterable[Scheduled]) -> tuple[list[LoadOrder], list[SaveOrder]]:
        """Returns what is to be loaded from now on, and saved when this step has run."""
        loads, self._ordered = self._ordered, []
        saves = []
        for each in scheduled:
            one = self._requests.get(each.request_id)
            if one is None or not self._saves:
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

"""Coupled instances in virtual time: what disaggregation is compared with, on as many devices, and what engines of
others are (coupled_cluster.py). Such an instance computes prompts and answers on the same device, as vLLM did.

One pool of pages in device memory, with a prefix cache of its own (the product's, `kvcache.prefix_cache`). Prompts wait
first come, first served, and begin when all of their pages are free.

*Prefill first*: whenever prompts can begin, a step computes as many whole ones as `batch_tokens` hold (one at least),
and the rows stand still. *Chunked*: every step makes a token of each row and computes as many prompt tokens as the rest
of `chunk_tokens` holds. When pages run out, the request that came last gives its own back, and is computed anew from
its first token to its last.

Copies of dp keep step with the fullest of them, and each computes the chunks of its own prompts, beside its own rows;
pages are counted together."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from kvmesh.kvcache.page_pool import PagePool
from kvmesh.kvcache.prefix_cache import PrefixCache
from kvmesh.services.decode import rules
from kvmesh.services.gateway.recovery import AttemptRecovery
from kvmesh.sim.config import MeshMode, SimConfig
from kvmesh.sim.drafted_rows import SpeculatingRows
from kvmesh.sim.hardware.times import NodeSpec, Pieces
from kvmesh.sim.loop import Loop
from kvmesh.sim.report.records import PoolSample, Record
from kvmesh.sim.rows import Row, Rows
from kvmesh.sim.workloads.workload import SimRequest

NO_STEPS = np.zeros(0)


def _ignore() -> None:
    """Is the `stepped` of an instance that nobody watches."""


class CoupledRow(Row):
    """One request. `total`: tokens whose KV it needs before its next token, `computed` of them are there. `attempt`,
    `avoid` and `recovery` are its gateway's."""

    __slots__ = (
        "attempt", "avoid", "computed", "order", "own", "record", "recovery", "request", "slot", "total",
    )  # fmt: skip

    def __init__(self, number: int, request: SimRequest, record: Record) -> None:
        super().__init__(request.input_tokens, record.output_tokens, record.at_s)
        self.order = request.priority, number
        self.request = request
        self.record = record
        self.total = request.input_tokens
        self.computed = 0
        self.slot = 0  # the copy of dp that it is a row of
        self.own: list[int] = []  # its pages when it joined: those that it has grown by are counted alone
        self.attempt = 0
        self.avoid: tuple[str, ...] = ()
        self.recovery: AttemptRecovery | None = None


class Coupled:
    """One instance. `ended(guest)`: it made its last token; `failed(guest, reason)`: it never will. `stepped()`: tokens
    may have come; `kept(keys)`: blocks that the cache has now, some of them new."""

    def __init__(
        self,
        name: str,
        spec: NodeSpec,
        config: SimConfig,
        loop: Loop,
        ended: Callable[[CoupledRow], None],
        failed: Callable[[CoupledRow, str], None],
    ) -> None:
        self.name, self.spec = name, spec
        self._block = config.block_tokens
        self.pool = PagePool(spec.kv_tokens // config.block_tokens)
        self.cache = PrefixCache(self.pool)
        self.caches = config.prefix_cache
        self.live = 0
        self._slots = spec.slots
        self.rows: Rows | SpeculatingRows
        if spec.speculation is None:
            self.rows = Rows(loop, self._decode_s, self._rows_over, self._block)
        else:
            seed = f"{config.seed}:{name}"
            self.rows = SpeculatingRows(loop, self._step_s, self._rows_over, self._block, spec.speculation, seed)
        self._chunked = config.mode is MeshMode.COUPLED_CHUNKED
        self._budget = config.chunk_tokens if self._chunked else config.batch_tokens
        self._limits = config.limits
        self._watermark = rules.watermark(self.pool.total, self._limits)
        self._loop, self._ended, self._failed = loop, ended, failed
        self._waiting: deque[CoupledRow] = deque()
        self._prefilling: list[CoupledRow] = []  # have their pages
        self._pieces: list[tuple[CoupledRow, int]] = []  # in the step under way: tokens of each
        self._grown: list[int] = []  # pages that rows have grown by
        self._busy = False
        self.stepped: Callable[[], None] = _ignore
        self.kept: Callable[[Sequence[bytes]], None] | None = None
        self.preemptions = 0

    # ── in ───────────────────────────────────────────────────────────────────────────────────────

    def arrive(self, guest: CoupledRow) -> None:
        """A request was sent here."""
        self.live += 1
        if self._blocks(guest.request.input_tokens + guest.record.output_tokens) > self.pool.total:
            self._leave(guest)
            self._failed(guest, "longer than the pages hold")
            return
        self._waiting.append(guest)
        if not self._busy:
            self._busy = True
            self._loop.after(0.0, self._next)
        elif len(self._waiting) == 1:
            self.rows.cut()

    @property
    def running(self) -> int:
        """Requests with pages."""
        return len(self.rows) + len(self._prefilling)

    @property
    def waiting(self) -> int:
        """Requests without."""
        return len(self._waiting)

    @property
    def used(self) -> int:
        """Pages that requests have."""
        return self.pool.total - self._free

    @property
    def queued_tokens(self) -> int:
        """To compute, as if nothing were cached of those that wait."""
        return sum(g.total for g in self._waiting) + sum(g.total - g.computed for g in self._prefilling)

    def add_to(self, pool: PoolSample) -> None:
        """Count it in."""
        sample = self.rows.sample()
        used = self.used
        pool.queued += self.waiting
        pool.running += self.running
        pool.queued_tokens += self.queued_tokens
        pool.context_tokens += sample[1] if sample is not None else self.rows.context
        pool.used_blocks += used
        pool.stored_blocks += len(self.cache)
        pool.load += used / self.pool.total / pool.instances
        pool.max_load = max(pool.max_load, used / self.pool.total)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    def _rows_over(self, over: list[Row], grown: int) -> None:
        self.cache.evict(grown - self.pool.free)
        self._grown += self.pool.allocate(grown)
        for row in over:
            assert isinstance(row, CoupledRow)
            self._keep_answer(row)
            self._give_back(row)
            self._finish(row)
        self._next()

    def _next(self) -> None:
        """The step that was under way is over: what it computed counts, and the next one begins."""
        pieces, self._pieces = self._pieces, []
        for guest, tokens in pieces:
            self._computed(guest, tokens)
        self.stepped()
        steps = self._room()
        self._admit()
        self._pieces = self._plan()
        self._busy = bool(self._pieces or steps)
        if self._pieces:
            self._compute()
        elif steps:
            self.rows.run(steps)

    def _plan(self) -> list[tuple[CoupledRow, int]]:
        """Plans which rows compute how many tokens in the next step, first come, first served."""
        rooms = [self._budget] * self._slots  # each copy of dp has a budget of its own
        if self._chunked:
            for row in self.rows.rows:
                assert isinstance(row, CoupledRow)
                rooms[row.slot] -= 1
        pieces: list[tuple[CoupledRow, int]] = []
        begun = set[int]()
        for guest in self._prefilling:
            rest, room = guest.total - guest.computed, rooms[guest.slot]
            if room <= 0 or (not self._chunked and guest.slot in begun and rest > room):
                if self._slots == 1:
                    break
                rooms[guest.slot] = 0  # those behind it at its copy wait, too
                continue
            tokens = min(rest, room) if self._chunked else rest
            pieces.append((guest, tokens))
            begun.add(guest.slot)
            rooms[guest.slot] -= tokens
        return pieces

    def _decode_s(self, batch: int, context_tokens: float) -> float:
        return self._step_s(batch, context_tokens, 1.0)

    def _step_s(self, batch: int, context_tokens: float, queries: float, pieces: Pieces = ()) -> float:
        """Returns the seconds of a step whose copies of dp keep step with the fullest of them."""
        if self._slots > 1 and batch:
            counts, contexts = [0] * self._slots, [0] * self._slots
            for row in self.rows.rows:
                assert isinstance(row, CoupledRow)
                counts[row.slot] += 1
                contexts[row.slot] += self.rows.now_of(row)
            batch = max(batch, max(counts) * self._slots)
            context_tokens *= max(contexts) * self._slots / max(1, sum(contexts))
        if (speculation := self.spec.speculation) is not None:
            return speculation.times.drafted_s(pieces, batch, context_tokens, queries)
        times = self.spec.times
        return times.mixed_s(pieces, batch, context_tokens) if pieces else times.decode_s(batch, context_tokens)

    def _compute(self) -> None:
        times, rows = self.spec.times, self.rows
        shapes = [(tokens, guest.computed) for guest, tokens in self._pieces]
        mixed = self._chunked and len(rows) > 0
        if not mixed:
            seconds = times.prefill_s(shapes)
        elif isinstance(rows, SpeculatingRows):
            seconds = rows.run_beside(lambda queries: self._step_s(len(rows), rows.context, queries, shapes))
        else:
            seconds = self._step_s(len(rows), rows.context, 1.0, shapes)
            rows.run_one(seconds)
        whole = sum(tokens for _, tokens in self._pieces) + (len(rows) if mixed else 0)
        now = self._loop.now
        for guest, tokens in self._pieces:
            guest.record.prefill_gpu_s += seconds * tokens / whole
            if guest.record.prefill_start_s != guest.record.prefill_start_s:
                guest.record.prefill_start_s = now
                guest.record.queue_s = now - guest.record.at_s
        if not mixed:
            self._loop.after(seconds, lambda: self._stalled(seconds))

    def _stalled(self, seconds: float) -> None:
        self.rows.stall(seconds)
        self._next()

    def _computed(self, guest: CoupledRow, tokens: int) -> None:
        """KV of so many more tokens is in its pages; with the last of them comes a token."""
        guest.computed += tokens
        keys = guest.request.keys[: guest.computed // self._block]
        if self.caches:
            done = min(len(keys), (guest.computed - tokens) // self._block)
            self._keep(keys, guest.own[: len(keys)], done)
        if guest.computed < guest.total:
            return
        self._prefilling.remove(guest)
        now, record = self._loop.now, guest.record
        if guest.total == guest.request.input_tokens and record.first_token_s != record.first_token_s:
            record.prefill_end_s = record.kv_end_s = record.first_token_s = now
            record.ttft_s = now - record.at_s
        else:
            guest.leave(now - guest.last_s, NO_STEPS)  # it was computed anew, and its next token comes with that
        guest.last_s = now
        guest.left -= 1
        guest.context = guest.total
        if guest.left:
            self.rows.add(guest)
        else:
            self.pool.release(guest.own)
            guest.own = []
            self._finish(guest)

    # ── pages ────────────────────────────────────────────────────────────────────────────────────

    def _keep(self, keys: Sequence[bytes], pages: Sequence[int], start: int) -> None:
        self.cache.insert(keys, pages, start=start)
        if self.kept is not None:
            self.kept(keys)

    def _keep_answer(self, guest: CoupledRow) -> None:
        """The blocks of its answer stay, where a later prompt may begin with them."""
        if self.caches and guest.request.answer_keys:
            keys = (*guest.request.keys, *guest.request.answer_keys)[: guest.context // self._block]
            # Pages that rows grow by are alike, so the last ones can be its own.
            pages = guest.own + self._grown[len(self._grown) - self._grown_by(guest) :]
            self._keep(keys, pages[: len(keys)], min(len(keys), len(guest.request.keys)))

    def _grown_by(self, guest: CoupledRow) -> int:
        return max(0, self._blocks(guest.context) - len(guest.own))

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block)

    @property
    def _free(self) -> int:
        return self.pool.free + self.cache.evictable

    def _admit(self) -> None:
        """Prompts get all of their pages, in order, while there are any."""
        reserve = self.rows.growth(1)  # what the rows that run take before their next step
        budgets = [self._budget] * self._slots
        for guest in self._prefilling:
            budgets[guest.slot] -= guest.total - guest.computed
        while self._waiting and max(budgets) > 0 and rules.has_seat(self.running, self._limits):
            guest = self._waiting[0]
            # The last token is always computed: it gives the next one.
            usable = guest.request.keys[: (guest.total - 1) // self._block] if self.caches else ()
            found = self.cache.match(usable)
            need = self._blocks(guest.total + 1) - len(found)
            if not rules.may_load(self._free - reserve, need, self._watermark, self.running):
                self.pool.release(found)
                return
            self._waiting.popleft()
            self.cache.evict(need - self.pool.free)
            guest.own = found + self.pool.allocate(need)
            guest.computed = len(found) * self._block
            if guest.record.first_token_s != guest.record.first_token_s:
                guest.record.cached_tokens = guest.computed
            guest.slot = self._emptiest([slot for slot, budget in enumerate(budgets) if budget > 0])
            self._prefilling.append(guest)
            budgets[guest.slot] -= guest.total - guest.computed

    def _emptiest(self, slots: list[int]) -> int:
        """Returns that of these copies of dp which has, or will have, the fewest tokens."""
        if self._slots == 1:
            return 0
        tokens = [0] * self._slots
        for row in (*self._prefilling, *self.rows.rows):
            assert isinstance(row, CoupledRow)
            tokens[row.slot] += self.rows.now_of(row) if row in self.rows.rows else row.total
        return min(slots, key=tokens.__getitem__)

    def _room(self) -> int:
        """For how many steps the rows have pages, at most until the first is over; whoever has to make room does."""
        rows = self.rows
        while rows.rows:
            most, free = rows.until_end, self._free
            if len(rows) * (most // self._block + 1) <= free or rows.growth(most) <= free:
                return most
            if rows.growth(1) <= free:
                return bisect.bisect_right(range(1, most), free, key=rows.growth)
            self._preempt()
        return 0

    def _preempt(self) -> None:
        """The one that came last: prompts under way before rows."""
        self.preemptions += 1
        if self._prefilling:
            guest = self._prefilling.pop()
            self.pool.release(guest.own)
            guest.own = []
        else:
            guest = rules.in_order([row for row in self.rows.rows if isinstance(row, CoupledRow)])[-1]
            self.rows.remove(guest)
            self._give_back(guest)
            guest.total = guest.context
        guest.computed = 0
        self._waiting.appendleft(guest)

    def _give_back(self, guest: CoupledRow) -> None:
        """Its own pages, and as many as it has grown by."""
        grown = self._grown_by(guest)
        self.pool.release(guest.own)
        self.pool.release(self._grown[len(self._grown) - grown :])
        del self._grown[len(self._grown) - grown :]
        guest.own = []

    # ── out ──────────────────────────────────────────────────────────────────────────────────────

    def _finish(self, guest: CoupledRow) -> None:
        guest.record.finish_s = guest.last_s
        guest.record.tbt_s, guest.record.mean_tbt_s = guest.tbt()
        self._leave(guest)
        self._ended(guest)

    def _leave(self, guest: CoupledRow) -> None:
        self.live -= 1

    def check_empty(self) -> None:
        """AssertionError unless everything came back: after the last request."""
        assert not (self.live or self._waiting or self._prefilling or self.rows.rows or self._grown)
        self.cache.check_integrity()
        assert self._free == self.pool.total, f"{self.name}: {self._free} of {self.pool.total} pages came back"

"""A decode instance in virtual time: the service's rules over a node store and pages, steps many at a time (rows.py).

As in `services/decode`: a landing is given in host memory, in order, behind what a prompt's leading blocks take that
lie there already; a filled one gets pages and a seat, is copied into them, and joins the batch at the next step; its
extents become blocks of the store. When pages run out, the last in order goes back to host memory, or fails if there
is no room for it. Differences: a page is granted when it is needed; what is preempted frees its pages at once."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from math import inf
from typing import Protocol

from kvmesh.clock import NEVER
from kvmesh.errors import ContextTooLong, KvmeshError, Overloaded
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.services.conductor.domain import DecodeSample, Load, Outcome, RequestOutcome
from kvmesh.services.conductor.settings import Mode
from kvmesh.services.decode import rules
from kvmesh.services.decode.step_times import StepTimes
from kvmesh.sim.config import SimConfig
from kvmesh.sim.drafted_rows import DraftedRows
from kvmesh.sim.life import Life
from kvmesh.sim.loop import Loop
from kvmesh.sim.node import Node
from kvmesh.sim.report.records import DONE, FAILED, REFUSED
from kvmesh.sim.rows import Row, Rows
from kvmesh.sim.transfers import Puller, TransferJob

MAX_TOLD_STEPS = 512  # in one heartbeat, as a live instance keeps


class DecodeListener(Protocol):
    """What a decode instance tells the simulation."""

    def lands(self, life: Life, at_decode: int) -> None:
        """There is room for it; so many leading blocks need not be sent."""

    def ended(self, life: Life, outcome: str, reason: str) -> None:
        """Its last token was made, or it is given up."""


class _Seat(Row):
    """A request that decodes."""

    __slots__ = ("life", "slot", "swap")

    def __init__(self, life: Life, last_s: float) -> None:
        super().__init__(life.tokens, life.left - 1, last_s)
        self.life = life
        self.swap: list[int] = []  # extents it was preempted into
        self.slot = 0  # the copy of dp that it is a row of

    @property
    def order(self) -> tuple[int, int]:
        """The order of its request in the queue."""
        return self.life.order


class Decoder:
    """One instance."""

    def __init__(self, node: Node, config: SimConfig, loop: Loop, puller: Puller, owner: DecodeListener) -> None:
        self.node = node
        self.store: NodeStore = node.store
        self.limits = config.limits
        self.pages = node.spec.kv_tokens // config.block_tokens
        self.free_pages = self.pages
        self.lives: dict[int, Life] = {}  # whose client waits for its end
        self._block = config.block_tokens
        self._load_rate = config.load_bytes_per_s
        self._loop, self._puller, self._owner = loop, puller, owner
        self._judges = config.conductor.admission.mode is Mode.BASELINE
        self._tbt_slo_s = config.conductor.slo_tbt_s
        self._watermark = rules.watermark(self.pages, self.limits)
        self._swap_reserve = rules.swap_reserve(self.store.total, self.limits)
        self._landing: list[Life] = []  # in order, as `rules.in_order` has it
        self._loading: list[_Seat] = []  # KV complete in extents; in order
        self._seated: dict[int, _Seat] = {}  # have pages
        self._holding = 0  # requests with extents of their own, or held ones
        self.step_times = StepTimes()
        self._slots = node.spec.slots
        self._slot_pages = self.pages // self._slots
        self._fullest = 1, 1.0  # rows of the slot that has the most, and its share of all contexts times the slots
        self.rows: Rows | DraftedRows
        if (speculation := node.spec.speculation) is not None:
            self.rows = DraftedRows(
                loop,
                self._drafted_s,
                self._border,
                self._block,
                speculation,
                f"{config.seed}:{node.name}",
                node.clock,
                self.step_times,
            )
        else:
            step_s = node.spec.times.decode_s if self._slots == 1 else self._lockstep_s
            self.rows = Rows(loop, step_s, self._border, self._block, node.clock, self.step_times)
        self._joining: list[_Seat] = []  # have their pages, and wait for the next border
        self._unwanted: list[_Seat] = []  # leave the batch at the next border
        self._woken = False
        self._request_ms = rules.MeanRequest()
        self._finished: list[str] = []
        self._outcomes: list[RequestOutcome] = []
        self._pulled_bytes = 0
        self.pulls = 0  # under way
        self.preemptions = self.refusals = 0
        self.dead = False

    # ── in ───────────────────────────────────────────────────────────────────────────────────────

    def admit(self, life: Life) -> KvmeshError | None:
        """The second check, after the conductor's: why it is not taken."""
        error = self._refusal(life)
        if error is None:
            life.admitted_s = self._loop.now
            self.lives[life.handle] = life
            keys = (*life.request.keys, *life.request.answer_keys)
            self.node.note(keys)
            for key in keys[-1:]:  # a row's states are kept when it ends
                self.node.keep_states(key)
            self._begin_pull(life)
        else:
            self.refusals += 1
            self._outcomes.append(RequestOutcome(life.name, life.attempt, Outcome.REFUSED, error=error.code))
        return error

    def _refusal(self, life: Life) -> KvmeshError | None:
        blocks = -(-life.tokens // self._block)
        most = -(-(life.tokens + life.left - 1) // self._block)
        if blocks > self.store.total or most > self._slot_pages:
            held = self._slot_pages * self._block
            return ContextTooLong.of("prompt_tokens", life.tokens, f"its pages hold {held} tokens")
        if not rules.admits(len(self.lives), self.limits):
            share = self.limits.max_running / (len(self.lives) - len(self._seated) + 1)
            return Overloaded(
                f"{len(self.lives)} requests here", retry_after_ms=rules.retry_after_ms(self._request_ms.mean, share)
            )
        slow = self._slow_step(life)
        if slow is None:
            return None
        return Overloaded(str(slow), retry_after_ms=rules.retry_after_ms(self._request_ms.mean, slow.rows))

    def _slow_step(self, life: Life) -> rules.SlowStep | None:
        """What the service refuses by; times as it has them, from when each request was admitted."""
        placed, now = life.placed, self._loop.now
        assert placed is not None
        if not (placed.tbt_slo_s and self.lives):
            return None
        self.rows.learn()
        return rules.too_slow(
            self.step_times,
            life.tokens,
            _ns(placed.tbt_slo_s),
            _ns(now + placed.life.first_token_s),
            self._claims(),
            self.limits.max_running,
            _ns(now),
        )

    def _claims(self) -> Iterator[rules.Claim]:
        waiting = {seat.life.handle: seat.context for seat in self._loading}
        for handle, life in self.lives.items():
            seat, placed = self._seated.get(handle), life.placed
            assert placed is not None
            context = waiting.get(handle, life.tokens) if seat is None else self.rows.context_of(seat)
            leaves_s = placed.life.end_s
            leaves_ns = _ns(life.admitted_s + leaves_s) if leaves_s else NEVER
            yield rules.Claim(context, _ns(placed.held_tbt_s), leaves_ns)

    def _begin_pull(self, life: Life) -> None:
        """What the placement has decode itself fetch."""
        placed = life.placed
        assert placed is not None
        if not placed.decode_pulls:
            return
        keys = life.request.keys
        covered = {at for r in placed.decode_pulls for at in range(r.first_block, r.first_block + r.blocks)}
        until = max(covered) + 1
        extents = self.store.begin(keys[:until])
        wanted = [(at, keys[at]) for at in range(until) if extents[at] is not None]
        for key in [key for at, key in wanted if at not in covered]:
            self.store.abandon(key)
        wanted = [(at, key) for at, key in wanted if at in covered]
        if wanted:
            life.decode_pulls = True
            self.pulls += 1
            self._puller.pull(self.node, wanted, placed.decode_pulls, lambda pull: self._pulled(life, pull))

    def _pulled(self, life: Life, pull: TransferJob) -> None:
        if self.dead:
            return
        pull.keep(self.store)
        self._pulled_bytes += pull.wire_bytes
        self.pulls -= 1
        life.decode_pulls = False
        self.knock()

    def want_landing(self, life: Life) -> None:
        """Prefill has begun."""
        bisect.insort(self._landing, life, key=_order)
        self._land()

    def first_token(self, life: Life) -> None:
        """Prefill has sampled it. A request of one token is over with it; whatever comes of its KV is of no use."""
        if life.left == 1:
            if life in self._landing:
                self._landing.remove(life)
            self._keep(life, 0)
            life.record.finish_s = life.first_s
            self._end(life)

    def filled(self, life: Life) -> None:
        """The last byte of its KV is here, and its first token was."""
        if self._too_slow(life):
            self._keep(life, 0)
            self._end(life, REFUSED, "decode")
            self.knock()
            return
        bisect.insort(self._loading, _Seat(life, life.first_s), key=_order)
        self.knock()

    def _too_slow(self, life: Life) -> bool:
        """Where conductors judge prefill alone (the paper's baseline), decode refuses whom it cannot serve in time: the
        prompt was computed for nothing."""
        if not self._judges:
            return False
        here = [*self._loading, *self._joining]
        sample = self.rows.sample()
        context = sample[1] if sample is not None else self.rows.context
        context += life.tokens + sum(seat.context for seat in here)
        seconds = self.node.spec.token_s(len(self.rows) + len(here) + 1, context)
        return seconds > (life.request.tbt_slo_s or self._tbt_slo_s)

    # ── grants ───────────────────────────────────────────────────────────────────────────────────

    def knock(self) -> None:
        """Something may be granted now; steps take it in at their next border."""
        if self.dead:
            return
        self._load()
        self._land()

    def _land(self) -> None:
        at = 0
        while at < len(self._landing):
            life = self._landing[at]
            if life.decode_pulls:
                at += 1
                continue
            blocks = -(-life.tokens // self._block)
            idle = not self._holding
            if not rules.may_land_in_extents(self.store.free, blocks, self._swap_reserve, idle=idle):
                return
            # The last block is always sent: its arrival tells that the computing is over.
            life.held = self.store.hold(life.request.keys[: (life.tokens - 1) // self._block])
            life.extents = self.store.allocate(blocks - len(life.held))
            self._holding += 1
            del self._landing[at]
            self._owner.lands(life, len(life.held))

    def _load(self) -> None:
        """Pages and seats for those whose KV is here."""
        while self._loading and rules.has_seat(len(self._seated), self.limits):
            seat = self._loading[0]
            need = -(-(seat.context + 1) // self._block)
            free = self.free_pages
            if self._slots > 1:
                free_of = [self._slot_pages - used for used in self._used()]
                free = max(free_of)
                seat.slot = free_of.index(free)
            seats = len(self._seated) // self._slots
            if not rules.may_load(free, need, self._watermark // self._slots, seats):
                return
            self.free_pages -= need
            del self._loading[0]
            self._seated[seat.life.handle] = seat
            if self._load_rate:
                nbytes = self.node.cost.handoff(seat.context, 0)
                self._loop.after(nbytes / self._load_rate, lambda seat=seat: self._loaded(seat))  # type: ignore[misc]
            else:
                self._loaded(seat)

    def _loaded(self, seat: _Seat) -> None:
        if self.dead or seat.life.handle not in self._seated:
            return
        if seat.swap:
            self.store.release(seat.swap)
            seat.swap = []
        else:
            self._keep(seat.life, seat.life.tokens // self._block)
        self._joining.append(seat)
        self.rows.cut()
        if not (self._woken or self.rows.running):
            self._woken = True
            self._loop.after(0.0, self._wake)

    def _keep(self, life: Life, known: int) -> None:
        """Its landing is over: the first `known` blocks become the store's, the rest of the extents go back."""
        if not (life.held or life.extents):
            return
        keys, shared = life.request.keys, len(life.held)
        own = max(0, min(known, len(keys)) - shared)
        self.store.adopt_all(keys[shared : shared + own][::-1], life.extents[:own][::-1])
        self.store.release((*life.held, *life.extents[own:]))
        life.held, life.extents = [], []
        self._holding -= 1

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    def _wake(self) -> None:
        self._woken = False
        if not (self.rows.running or self.dead):
            self._border([], 0)

    def _border(self, over: list[Row], grown: int) -> None:
        """Between two steps: rows have ended; others join, pages are granted, and the next run begins."""
        if self.dead:
            return
        self.free_pages -= grown
        for row in over:
            assert isinstance(row, _Seat)
            self._leave(row)
        unwanted, self._unwanted = self._unwanted, []
        for seat in unwanted:
            if seat in self.rows.rows:
                self.free_pages += self.rows.pages_of(seat)
                self.rows.remove(seat)
                del self._seated[seat.life.handle]
        if over or unwanted:
            self.knock()
        joining, self._joining = self._joining, []
        for seat in joining:
            self.rows.add(seat)
        steps = self._room()
        if steps and self.node.machine is not None:
            assert isinstance(self.rows, Rows)  # `SimConfig` refuses a shared host where rows have drafts
            self.rows.run_shared(self.node.machine.decode)
        elif steps:
            self.rows.run(steps)

    def _leave(self, seat: _Seat) -> None:
        self.free_pages += -(-seat.context // self._block)
        del self._seated[seat.life.handle]
        if seat.life.lost:
            return
        self._seal_answer(seat.life)
        record = seat.life.record
        record.finish_s = seat.last_s
        record.tbt_s, record.mean_tbt_s = seat.tbt()
        self._end(seat.life)

    def _seal_answer(self, life: Life) -> None:
        """Full blocks of the answer, where anybody may ask for them, become the store's, if it has room."""
        answer = life.request.answer_keys
        if not answer:
            return
        # Those of the prompt, too: they do not make room for their own continuation.
        chain = (*life.request.keys, *answer)
        begun = [key for key, extent in zip(chain, self.store.begin(chain), strict=True) if extent is not None]
        own = set(answer)
        for key in begun:
            if key not in own:
                self.store.abandon(key)
        self.store.seal_all(reversed([key for key in begun if key in own]))
        self.store.touch(chain)

    def _room(self) -> int:
        """For how many steps there are pages, at most until the first row is over; whoever has to make room does."""
        rows = self.rows
        if self._slots > 1:
            return self._room_of_slots()
        while rows.rows:
            most, free = rows.until_end, self.free_pages
            if len(rows) * (most // self._block + 1) <= free or rows.growth(most) <= free:
                return most
            if rows.growth(1) <= free:
                return bisect.bisect_right(range(1, most), free, key=rows.growth)
            if not self._preempt():
                return 0  # those that are being copied into their pages will run, and end
        return 0

    def _room_of_slots(self) -> int:
        """Does what `_room` does where each slot has pages of its own."""
        rows = self.rows
        while rows.rows:
            counts, contexts = [0] * self._slots, [0] * self._slots
            for row in rows.rows:
                assert isinstance(row, _Seat)
                counts[row.slot] += 1
                contexts[row.slot] += rows.now_of(row)
            self._fullest = max(counts), max(contexts) * self._slots / max(1, sum(contexts))
            # A row takes a page at most once in as many steps as a page has tokens.
            free = [self._slot_pages - used for used in self._used()]
            spare = [one // count if count else inf for one, count in zip(free, counts, strict=True)]
            if (least := min(spare)) >= 1:
                return int(min(rows.until_end, least * self._block))
            slots = range(self._slots)
            if all(spare[slot] >= 1 or self._growth(slot) <= free[slot] for slot in slots):
                return 1
            least = next(slot for slot in slots if spare[slot] < 1 and self._growth(slot) > free[slot])
            if not self._preempt(int(least)):
                return 0
        return 0

    def _growth(self, slot: int) -> int:
        """Returns the pages that a slot's rows take in the next step."""
        rows, block = self.rows, self._block
        seats = [row for row in rows.rows if isinstance(row, _Seat) and row.slot == slot]
        return sum(max(0, -(-(rows.now_of(row) + 1) // block) - rows.pages_of(row)) for row in seats)

    def _used(self) -> list[int]:
        """Returns the pages of each slot's rows, at this border, and of those that are on their way into it."""
        found = [0] * self._slots
        for seat in self._seated.values():
            here = seat in self.rows.rows
            found[seat.slot] += self.rows.pages_of(seat) if here else -(-(seat.context + 1) // self._block)
        return found

    def _lockstep_s(self, batch: int, context_tokens: float) -> float:
        """Returns the seconds of a step whose slots keep step with the fullest of them: the others have dummy rows."""
        most, share = self._fullest
        return self.node.spec.times.decode_s(max(batch, most * self._slots), context_tokens * share)

    def _drafted_s(self, batch: int, context_tokens: float, queries: float) -> float:
        """Returns the same where rows have so many queries each."""
        speculation = self.node.spec.speculation
        assert speculation is not None
        most, share = self._fullest if self._slots > 1 else (0, 1.0)
        return speculation.times.drafted_s((), max(batch, most * self._slots), context_tokens * share, queries)

    def _preempt(self, slot: int | None = None) -> bool:
        seats = [row for row in self.rows.rows if isinstance(row, _Seat) and slot in (None, row.slot)]
        seat = rules.victim(rules.in_order(seats))
        if seat is None:
            return False
        pages = self.rows.pages_of(seat)
        self.rows.remove(seat)
        del self._seated[seat.life.handle]
        self.free_pages += pages
        self.preemptions += 1
        if self.store.free >= pages:
            seat.swap = self.store.allocate(pages)
            bisect.insort(self._loading, seat, key=_order)
        else:
            self._end(seat.life, FAILED, "out of KV memory")
        return True

    # ── out ──────────────────────────────────────────────────────────────────────────────────────

    def _end(self, life: Life, outcome: str = DONE, reason: str = "") -> None:
        del self.lives[life.handle]
        self._request_ms.add((self._loop.now - life.admitted_s) * 1000)
        self._finished.append(life.name)
        self._owner.ended(life, outcome, reason)
        self._outcomes.append(_outcome(life))

    def withdraw(self, life: Life, blamed: str) -> None:
        """Another attempt takes its place, because `blamed` is gone: what it holds here comes back."""
        assert life.lost
        if self.dead or life.handle not in self.lives:
            return
        del self.lives[life.handle]
        self._finished.append(life.name)
        error = f"{blamed} is lost"
        self._outcomes.append(RequestOutcome(life.name, life.attempt, Outcome.FAILED, error=error, blamed=blamed))
        if life in self._landing:
            self._landing.remove(life)
        waiting = next((seat for seat in self._loading if seat.life is life), None)
        if waiting is not None:
            self._loading.remove(waiting)
            self.store.release(waiting.swap)
        self._keep(life, 0)
        seat = self._seated.get(life.handle)
        if seat is not None and seat in self.rows.rows:
            self._unwanted.append(seat)
            self.rows.cut()
        elif seat is not None:  # it is copied into its pages, or waits for a border
            self.store.release(seat.swap)
            seat.swap = []
            if seat in self._joining:
                self._joining.remove(seat)
            self.free_pages += -(-(seat.context + 1) // self._block)
            del self._seated[life.handle]
        self.knock()

    def made(self, life: Life) -> int:
        """Tokens of its answer that this attempt has brought."""
        if math.isnan(life.first_s):
            return 0
        waiting = (seat for seat in self._loading if seat.life is life)
        seat = self._seated.get(life.handle) or next(waiting, None)
        return 1 if seat is None else 1 + self.rows.context_of(seat) - life.tokens

    def die(self) -> list[Life]:
        """The process is gone, with all that it had; returns the requests."""
        self.dead = True
        self.rows.stop()
        return list(self.lives.values())

    @property
    def unwanted(self) -> int:
        """Rows that leave at the next border."""
        return len(self._unwanted)

    def load(self) -> Load:
        """For heartbeats."""
        seats, store = len(self._seated), self.store
        sample = self.rows.sample()
        return Load(
            running_requests=seats,
            waiting_requests=len(self.lives) - seats,
            free_pages=self.free_pages,
            free_extents=store.free,
            context_tokens=sample[1] if sample is not None else self.rows.context,
            store_blocks=store.sealed_blocks,
            store_capacity=store.total,
            pulled_bytes=self._pulled_bytes,
        )

    def report(self) -> tuple[tuple[DecodeSample, ...], tuple[str, ...], tuple[RequestOutcome, ...]]:
        """The step under way, or those since the last call where each has a time of its own, and what has ended."""
        sample = self.rows.sample()
        if self.node.machine is None and self.node.clock is None:
            steps = [sample] if sample is not None else [*self.rows.measured]
        else:
            self.rows.tell()
            steps = [*self.rows.measured][-MAX_TOLD_STEPS:]
        self.rows.measured.clear()
        finished, outcomes = tuple(self._finished), tuple(self._outcomes)
        self._finished, self._outcomes = [], []
        return tuple([DecodeSample(*step) for step in steps]), finished, outcomes

    def check_empty(self) -> None:
        """AssertionError unless everything came back: after the last request."""
        assert not (
            self.lives or self.pulls or self._landing or self._loading or self._seated or self._joining or self._holding
        )
        assert not self.rows.rows and self.rows.context == 0
        assert self.free_pages == self.pages, f"{self.node.name}: {self.free_pages} of {self.pages} pages came back"
        self.store.check_integrity()
        assert self.store.free == self.store.total, f"{self.node.name}: extents are held"


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _order(waiting: Life | _Seat) -> tuple[int, int]:
    return waiting.order


_OUTCOMES = {DONE: Outcome.DONE, REFUSED: Outcome.REFUSED, FAILED: Outcome.FAILED}


def _outcome(life: Life) -> RequestOutcome:
    record = life.record
    done = record.outcome == DONE
    return RequestOutcome(
        record.request_id,
        life.attempt,
        _OUTCOMES[record.outcome],
        record.output_tokens if done else 0,
        record.ttft_s if done else 0.0,
        0.0 if math.isnan(record.tbt_s) else record.tbt_s,
        0.0 if math.isnan(record.mean_tbt_s) else record.mean_tbt_s,
        record.finish_s - record.at_s if done else 0.0,
        "" if done else record.reason,
    )

"""Decides which tokens the ranks compute next: the order of waiting prompts, chunk borders, batches by length. Pure.

- The queue is ordered by rank, smaller first:

      rank = arrival + priority x `priority_step_ns` + class x `size_weight`

  where the class of a request is `work_class` of how long computing it was predicted to take when it was placed. Short
  ones go first, which lowers the mean (shortest processing time), but waiting wears priority and size off: whoever
  comes later than `size_weight` times its size after a request of the same priority does not go before it, so nobody
  waits for ever.
- Where prompts of several tenants are there, whoever had the fewest uncached tokens over its weight goes first
  (tenant_shares.py); rank tells the order within each tenant. Only a request that is less urgent yields to all that are
  more urgent, until its rank is the least of all.
- A request whose uncached rest is over `long_prompt_tokens` runs alone, one chunk a step; shorter ones are packed
  together. With a `size_weight` every step is of the kind of whoever has the least rank, of those that could run and
  the one long request that has begun: a long one is held up between its chunks, never given up. Without one, while
  both kinds are waiting, steps alternate between them: neither starves the other. With several tenants the kind is
  that of whoever goes first.
- With a `chunk_cost` the chunks of a long prompt take equal compute, not equal tokens: those that follow one another
  through the stages of a pipeline wait for the slowest (kvmesh.chunk_pipeline). Where that cost is known in seconds,
  fixed cost of a chunk included, and there are several `stages`, there are as many chunks as fill and empty the
  pipeline soonest.
- A request that does not get its pages blocks everybody behind it in the queue: none overtakes it on memory.
- A request whose next block is being computed or loaded for somebody else is passed over until that block is in the
  cache, and one whose next block is being pulled from another node until it is here, for a bounded time.
"""

from __future__ import annotations

import bisect
import enum
import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvmesh.chunk_pipeline import ChunkCost, best_chunks, bounded_borders, equal_compute_borders
from kvmesh.services.prefill.tenant_shares import TenantShares
from kvmesh.work_class import work_class

NS = 1_000_000_000
# Waiting requests looked at for one step; bounds a step's planning however long the queue is.
SCAN = 64
LEAST_SHARE = 8  # a chunk of equal compute has at least so many times fewer tokens than the longest


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """Has the planner's limits, in tokens and nanoseconds. The service checks them at start (see PrefillConfig)."""

    block_tokens: int
    prefill_chunk_tokens: int = 512
    max_batch_tokens: int = 1024
    long_prompt_tokens: int = 512
    pipeline_depth: int = 2
    priority_step_ns: int = 30_000_000_000
    size_weight: float = 0.0  # 0: sizes do not matter
    grid: int = 0  # no chunk goes beyond a multiple of so many tokens (`cache_groups.snapshot_grid`); 0: no bound
    fair: bool = True  # between tenants; else all prompts are of one
    chunk_cost: ChunkCost | None = None  # what chunks of a long prompt are to have equal; None: tokens
    stages: int = 1  # of the pipeline


def chunk_end(start: int, total: int, block_tokens: int, limit: int, grid: int = 0) -> int:
    """Returns the end of the chunk that begins at `start`: at most `limit` tokens, on a block border or at `total`. No
    chunk goes beyond a multiple of `grid` tokens (`cache_groups.snapshot_grid`; 0: none), since the state there is to
    be kept and only a chunk's end shows it."""
    end = start + limit
    if grid:
        end = min(end, (start // grid + 1) * grid)
    if end >= total:
        return total
    end -= end % block_tokens
    assert end > start, "a chunk holds at least one block"
    return end


_Entry = tuple[int, int, int]  # rank, arrival number, handle


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A waiting prompt: `tokens` are predicted to be computed for it."""

    entry: _Entry
    priority: int
    tenant: str
    tokens: int


class WaitingPrompts:
    """Queues the prompts that wait. Of one tenant's a smaller rank goes first, equal ranks go in order of arrival.
    Between tenants `shares` decides, among the prompts of one priority: that whose first rank is the least."""

    def __init__(self, priority_step_ns: int, size_weight: float = 0.0, shares: TenantShares | None = None) -> None:
        self._step_ns, self._size_weight = priority_step_ns, size_weight
        self._order: list[_Entry] = []
        self._entries: dict[int, _Prompt] = {}
        self._lines: dict[int, dict[str, list[_Entry]]] = {}  # by priority and tenant, sorted
        self._arrivals = 0
        self.shares = shares or TenantShares()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, handle: int) -> bool:
        return handle in self._entries

    def __iter__(self) -> Iterator[int]:
        """Yields the handles, the first to go first."""
        return self._by_turns() if self.shares.several else (handle for _, _, handle in self._order)

    def _by_turns(self) -> Iterator[int]:
        """Yields the handles as they go if each is computed as is predicted."""
        turns: dict[int, list[tuple[float, _Entry, str, int]]] = {}  # heaps: counter, first of the line, tenant, index
        for priority, lines in self._lines.items():
            turns[priority] = [(self.shares.counter(who).served, line[0], who, 0) for who, line in lines.items()]
            heapq.heapify(turns[priority])
        while turns:
            if len(turns) == 1:
                (priority,) = turns
            else:
                priority = min(turns, key=lambda one: min(turn[1] for turn in turns[one]))
            heap = turns[priority]
            served, entry, who, at = heap[0]
            yield entry[2]
            line = self._lines[priority][who]
            if at + 1 < len(line):
                served += self._entries[entry[2]].tokens / self.shares.counter(who).weight
                heapq.heapreplace(heap, (served, line[at + 1], who, at + 1))
            else:
                heapq.heappop(heap)
                if not heap:
                    del turns[priority]

    def add(
        self,
        handle: int,
        priority: int,
        arrived_ns: int,
        size_ns: int = 0,
        *,
        tenant: str = "",
        weight: float = 1.0,
        tokens: int = 1,
    ) -> None:
        """Adds a prompt, whose `handle` must not be in the queue. `size_ns` is the predicted time of computing the
        prompt; 0 means that it is unknown, and the prompt counts as one that takes no time. `tokens` are predicted to
        be computed for it, `weight` is its tenant's."""
        assert handle not in self._entries
        rank = arrived_ns + priority * self._step_ns + round(work_class(size_ns / NS) * NS * self._size_weight)
        entry = (rank, self._arrivals, handle)
        self._arrivals += 1
        self._entries[handle] = _Prompt(entry, priority, tenant, tokens)
        bisect.insort(self._order, entry)
        bisect.insort(self._lines.setdefault(priority, {}).setdefault(tenant, []), entry)
        self.shares.enter(handle, tenant, weight)

    def rank(self, handle: int) -> tuple[int, int]:
        """Returns the rank and arrival number of a prompt: it goes before all that have greater ones. Raises KeyError
        if it is not in the queue."""
        return self._entries[handle].entry[:2]

    def priority(self, handle: int) -> int:
        """Returns the priority of a prompt. Raises KeyError if it is not in the queue."""
        return self._entries[handle].priority

    def remove(self, handle: int) -> None:
        """Takes a prompt out of the queue; its tenant still has it, until the prompt leaves `shares`. Raises KeyError
        if it is not in the queue."""
        prompt = self._entries.pop(handle)
        lines = self._lines[prompt.priority]
        for order in (self._order, lines[prompt.tenant]):
            del order[bisect.bisect_left(order, prompt.entry)]
        if not lines[prompt.tenant]:
            del lines[prompt.tenant]
            if not lines:
                del self._lines[prompt.priority]


@dataclass(slots=True)
class Work:
    """Is an admitted request: it has its pages, and tokens [0, start) are cached or submitted."""

    handle: int
    start: int
    total: int
    long: bool
    rank: tuple[int, int]  # that it had in the queue
    priority: int
    ends: tuple[int, ...] = ()  # of its chunks of equal compute


@dataclass(frozen=True, slots=True)
class Chunk:
    """Orders to compute tokens [start, end) of `handle`. The last chunk samples the first token."""

    handle: int
    start: int
    end: int
    last: bool


class Wait(enum.Enum):
    """Says why a waiting request cannot be admitted now."""

    PAGES = "pages"
    TWIN = "twin"  # its next block is being computed or loaded for another request
    PULL = "pull"  # its next block is on its way from another node
    GRAMMAR = "grammar"  # its grammar is being compiled


# Returns how many tokens of the request are not cached now, or TWIN, PULL or GRAMMAR.
Rest = Callable[[int], "int | Wait"]
# Gives the request its pages. Returns how many leading tokens are cached, PAGES if there are too few pages, or PULL if
# the request's blocks are fetched first.
Admit = Callable[[int], "int | Wait"]
# Returns the tokens, ascending block borders, after which states of an admitted request are kept beside those on the
# grid: a chunk ends there.
Ends = Callable[[int], Sequence[int]]
# Gives the chunk [start, end) of an admitted request what it needs beyond that. Returns False if it has to wait, which
# ends by itself.
Prepare = Callable[[int, int, int], bool]


class Planner:
    """Builds one step at a time out of admitted and waiting requests."""

    def __init__(self, config: PlanConfig) -> None:
        self.config = config
        self.chunk_cost = config.chunk_cost  # measured times may replace it
        self.shares = TenantShares()
        self.waiting = WaitingPrompts(config.priority_step_ns, config.size_weight, self.shares)
        self._work: dict[int, Work] = {}  # with tokens left to submit, in order of admission
        self._blocked = 0  # the handle of the request that did not get its pages; 0: none (handles begin at 1)
        self._last_long = True  # whether the last step was of a long request; so the first one is of short ones
        self._chunk = self._batch = 0  # limits of the step being planned
        self.prepare: Prepare | None = None  # None: an admitted request has all it needs. It is set once.
        self.ends: Ends = lambda _: ()  # It is set once.

    def drop(self, handle: int) -> None:
        """Forgets a request, whether it waits or was admitted. An unknown handle is ignored."""
        self._work.pop(handle, None)
        if handle in self.waiting:
            self.waiting.remove(handle)
        self.shares.leave(handle)
        if handle == self._blocked:
            self._blocked = 0

    @property
    def unsubmitted_tokens(self) -> int:
        """The tokens of admitted requests that are in no step yet."""
        return sum(work.total - work.start for work in self._work.values())

    def next_step(self, rest: Rest, admit: Admit, total: Callable[[int], int], most: int | None = None) -> list[Chunk]:
        """Returns the chunks of the next step, none if nothing can run. `total` gives the tokens of a prompt. `most`
        bounds the tokens of this step, whatever the configuration allows (but a step has at least one block): the rows
        of a decode batch that wait for the step set it."""
        chunk, batch = self.config.prefill_chunk_tokens, self.config.max_batch_tokens
        self._chunk, self._batch = (chunk, batch) if most is None else (min(chunk, most), min(batch, most))
        if self.shares.several:
            first = self._fair_first(rest)
        else:
            first = self._goes_first(rest) if self.config.size_weight else not self._last_long
        for long in (first, not first):
            chunks = self._fill(long, rest, admit, total)
            if chunks:
                self._last_long = long
                return chunks
        return []

    def _goes_first(self, rest: Rest) -> bool:
        """Whether the request with the least rank is a long one."""
        best = min(self._work.values(), key=lambda work: work.rank, default=None)
        running = any(work.long for work in self._work.values())
        for handle in self._candidates():
            if best is not None and best.rank < self.waiting.rank(handle):
                break
            tokens = rest(handle)
            if not isinstance(tokens, int):
                continue
            long = tokens > self.config.long_prompt_tokens
            if not (long and running):  # long ones are computed one after the other
                return long
        return best is not None and best.long

    def _fair_first(self, rest: Rest) -> bool:
        """Whether the request whose tenant goes first is a long one, of those that could run and those that have
        begun."""
        works = self._work.values()
        begun = min(works, key=lambda work: (self._served(work.handle), work.long == self._last_long), default=None)
        running = any(work.long for work in works)
        for handle in self._candidates():
            tokens = rest(handle)
            if not isinstance(tokens, int):
                continue
            long = tokens > self.config.long_prompt_tokens
            if long and running:  # long ones are computed one after the other
                continue
            if begun is None:
                return long
            if begun.priority != self.waiting.priority(handle):
                return begun.long if begun.rank < self.waiting.rank(handle) else long
            had, lacks = self._served(begun.handle), self._served(handle)
            if had == lacks:
                return not self._last_long
            return begun.long if had < lacks else long
        return begun is not None and begun.long

    def _served(self, handle: int) -> float:
        return self.shares.counter(self.shares.tenant(handle)).served

    def _fill(self, long: bool, rest: Rest, admit: Admit, total: Callable[[int], int]) -> list[Chunk]:
        room = self._chunk if long else self._batch
        chunks: list[Chunk] = []
        for work in [w for w in self._work.values() if w.long == long]:
            room = self._take(work, room, chunks)
            if long:
                return chunks
        continued = bool(chunks)
        for handle in self._candidates():
            if room <= 0 or (long and chunks):
                break
            tokens = rest(handle)
            if not isinstance(tokens, int):
                continue
            if (tokens > self.config.long_prompt_tokens) != long:
                if handle == self._blocked:
                    break
                continue
            if min(tokens, self._chunk) > room:
                # Smaller ones may pass only in a step that took the first of the queue, so that each step moves it on.
                if continued:
                    break
                continue
            start = admit(handle)
            if start is Wait.PULL:
                continue
            if not isinstance(start, int):
                self._blocked = handle
                break
            if handle == self._blocked:
                self._blocked = 0
            place = self.waiting.rank(handle), self.waiting.priority(handle)
            end = total(handle)
            work = self._work[handle] = Work(handle, start, end, long, *place, self._borders(start, end, long))
            self.waiting.remove(handle)
            room = self._take(work, room, chunks)
        return chunks

    def _candidates(self) -> list[int]:
        return [handle for handle, _ in zip(self.waiting, range(SCAN), strict=False)]

    def _chunk_limit(self, work: Work) -> int:
        """Returns how many tokens the next chunk of `work` has at most."""
        end = next((end for end in work.ends if end > work.start), work.start + self._chunk)
        return min(self._chunk, end - work.start)

    def _borders(self, start: int, total: int, long: bool) -> tuple[int, ...]:
        """Returns where chunks of equal compute end; none: only the limits of a step cut the prompt."""
        cost, block, most = self.chunk_cost, self.config.block_tokens, self.config.prefill_chunk_tokens
        if cost is None or not long:
            return ()
        most, chunks = max(block, most - most % block), 0
        if cost.step and self.config.stages > 1:
            chunks = best_chunks(cost.work(start, total), self.config.stages, cost.step)
            first = equal_compute_borders(total, chunks, cost, cached=start, block=block)[0]
            most = min(most, -(-(first - start) // block) * block)
        if total - start <= most:
            return ()
        least = most // LEAST_SHARE
        return tuple(bounded_borders(total, most, cost, cached=start, block=block, least=least, wanted=chunks))

    def _take(self, work: Work, room: int, chunks: list[Chunk]) -> int:
        """Moves the next chunk of `work` into `chunks` if it fits into `room` tokens and need not wait; returns the
        room that is left."""
        stop = next((end for end in self.ends(work.handle) if end > work.start), work.total)
        end = chunk_end(work.start, stop, self.config.block_tokens, self._chunk_limit(work), self.config.grid)
        if end - work.start > room or (self.prepare is not None and not self.prepare(work.handle, work.start, end)):
            return room
        chunks.append(Chunk(work.handle, work.start, end, end == work.total))
        room -= end - work.start
        self.shares.charge(work.handle, end - work.start)
        work.start = end
        if end == work.total:
            del self._work[work.handle]
            self.shares.leave(work.handle)
        return room

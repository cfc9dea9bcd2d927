"""All handoffs of one instance, and how they begin and end, whatever pages are made of. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from kvmesh.blockservice.removals import NotHere
from kvmesh.errors import HandoffLost, InternalError, KvmeshError
from kvmesh.kvcache.cache_groups import GroupPages
from kvmesh.ranks import protocol as m
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill.block_traffic import BlockTraffic
from kvmesh.services.prefill.handoff import PrefillHandoff, PrefillPhase, Push
from kvmesh.services.prefill.planner import Chunk, Planner, Wait


class HandoffBook(ABC):
    """Maps handles to handoffs. What depends on how pages and blocks are kept is left to subclasses.

    `actions` collects what the current event leads to. A handoff is in `handoffs` exactly as long as it holds something
    or decode waits to be told how it ended.
    """

    blocks: BlockTraffic

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.handoffs: dict[int, PrefillHandoff] = {}
        self.promised: dict[bytes, int] = {}  # key → how many admitted handoffs will compute or load that block
        self.actions: list[ev.Action] = []
        self.idle = True  # no step is at the ranks
        self._block = planner.config.block_tokens

    def tell(self, h: PrefillHandoff, action: ev.Action) -> None:
        """Sends something to decode, unless the handoff's stream is gone."""
        if not h.deaf:
            self.actions.append(action)

    # ── in ───────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def refusal(self, start: ev.Start) -> KvmeshError | None:
        """Returns why a request can never run here; None if it can."""

    def usable(self, h: PrefillHandoff) -> Sequence[bytes]:
        """Returns the keys of the blocks that may come from the cache. The block with the last token is never among
        them: that token is computed, as it gives the answer's first token. Of a prompt whose own tokens are scored
        there are none: each token's log-probability is computed with the token before."""
        if h.scored:
            return ()
        return h.start.block_keys[: (h.prompt_tokens - 1) // self._block]

    def arrive(self, h: PrefillHandoff) -> int:
        """Takes a handoff that has joined the queue: its pull begins or is planned. Returns the time until which it
        waits for its own pull; 0 if it began none."""
        return self.blocks.arrive(h, self.usable(h), self.promised, next_up=self._next_up())

    def fetch(self, h: PrefillHandoff) -> int:
        """Begins the pull of a handoff when the pull's planned time has come, or the handoff's turn. Returns as
        `arrive` does."""
        return self.blocks.fetch(h, self.usable(h), self.promised, next_up=self._next_up())

    def _next_up(self) -> bool:
        """Whether nothing else is computed while the only handoff in the queue waits."""
        computing = any(other.phase is PrefillPhase.COMPUTING for other in self.handoffs.values())
        return len(self.planner.waiting) == 1 and not computing

    def comes_first(self, handle: int) -> bool:
        """Whether the pull of a handoff whose turn has come before the pull's planned time should begin now; if not,
        its blocks are computed."""
        h = self.handoffs[handle]
        if not h.pull_at_ns or self.blocks.waits(h):
            return False
        return self._pays(h, self._found(h))

    @abstractmethod
    def _found(self, h: PrefillHandoff) -> int:
        """Returns how many leading blocks of a handoff are here, in pages or extents."""

    def _pays(self, h: PrefillHandoff, found: int) -> bool:
        """Whether to wait for the planned pull now: because waiting keeps nobody else from computing, or because
        pulling is faster than computing. `found` is how many leading blocks are here already."""
        alone = self.idle and len(self.planner.waiting) == 1 and not self.planner.unsubmitted_tokens
        return found < h.planned_to and (not alone or self.blocks.rates.pull_pays)

    @abstractmethod
    def rest(self, handle: int) -> int | Wait:
        """Returns how many tokens are not cached now, in device pages or the host segment; TWIN or PULL when the first
        of those tokens' blocks are on their way here."""

    @abstractmethod
    def expected_rest(self, handle: int) -> int:
        """Returns how many tokens will have to be computed if everything on its way here arrives."""

    @abstractmethod
    def admit(self, handle: int) -> int | Wait:
        """Gives a waiting request its pages. Returns how many tokens need not be computed, or PAGES."""

    @abstractmethod
    def for_step(self, h: PrefillHandoff, end: int) -> tuple[tuple[int, ...], tuple[GroupPages, ...]]:
        """Returns `pages` and `groups` of a step that computes a handoff's tokens up to `end`."""

    @abstractmethod
    def loaded(self, rank: int, copied: m.LoadCopied) -> None:
        """Notes that a rank has copied its shards. After the last rank the pages may be matched and pushed."""

    @abstractmethod
    def sealed(self, rank: int, copied: m.SealCopied) -> None:
        """Notes that a rank has copied its shards of blocks to be sealed."""

    def computed(self, h: PrefillHandoff, chunk: Chunk, sampled: m.Sampled | None, end_ns: int) -> None:
        """Notes that the KV of one chunk is in its pages: its full blocks may be matched from now on, and are sealed in
        the store."""
        assert not h.loading, "a step was answered before the load that it was sent after"
        h.computed_tokens = chunk.end
        full = chunk.end // self._block
        self._cache(h, full, h.promised_from)
        self._unpromise(h, full)
        self._written(h, chunk)
        if not chunk.last:
            return
        if sampled is None:
            self.abort(h, InternalError(f"no rank sampled the first token of {h.start.request_id}"))
            return
        h.phase = PrefillPhase.PUSHING
        h.sampled_ns = end_ns
        queue, prefill = max(h.first_step_ns - h.arrived_ns, 0), h.sampled_ns - h.first_step_ns
        scores = m.PromptScores.joined(h.scores) if h.scored else None
        first = ev.SendFirstToken(h.handle, sampled, h.found, queue, prefill, scores)
        h.scores = []
        if h.start.adopt:
            self._hand_over(h, first)
        else:
            self.tell(h, first)

    @abstractmethod
    def _written(self, h: PrefillHandoff, chunk: Chunk) -> None:
        """Seals the blocks that a computed chunk has completed."""

    @abstractmethod
    def _hand_over(self, h: PrefillHandoff, first: ev.SendFirstToken) -> None:
        """Hands the pages and their references over to decode in this instance."""

    @abstractmethod
    def _cache(self, h: PrefillHandoff, end: int, start: int) -> None:
        """Lets others find the handoff's blocks before `end` in its pages; those before `start` can be already."""

    @abstractmethod
    def forget(self, keys: Sequence[bytes]) -> None:
        """Keeps everybody from finding these blocks in pages, as their bytes are in doubt."""

    @abstractmethod
    def cached_keys(self) -> list[bytes]:
        """Returns the keys of all blocks that lie in pages."""

    @abstractmethod
    def clear(self) -> None:
        """Evicts everything idle."""

    @property
    @abstractmethod
    def free_pages(self) -> int:
        """How many pages are free or can be evicted."""

    def removed(self, gone: NotHere) -> None:
        """Forgets removed blocks that lie in pages, and keeps every handoff from sealing or caching them again."""
        self.forget(list(gone.keys) if gone.prefix is None else [key for key in self.cached_keys() if key in gone])
        for h in self.handoffs.values():
            if (first := gone.first(h.start.block_keys)) < len(h.start.block_keys):
                h.sealable = min(h.sealable, first)

    def _load_over(self, h: PrefillHandoff, from_ns: int, until_ns: int) -> None:
        h.loading = 0
        h.found = replace(h.found, load_from_ns=from_ns, load_until_ns=until_ns)

    def _promise(self, h: PrefillHandoff, first: int) -> None:
        h.promised_from = first
        for key in h.start.block_keys[first:]:
            self.promised[key] = self.promised.get(key, 0) + 1

    def _unpromise(self, h: PrefillHandoff, until: int | None = None) -> None:
        keys = h.start.block_keys[h.promised_from : until]
        for key in keys:
            self.promised[key] -= 1
            if not self.promised[key]:
                del self.promised[key]
        h.promised_from += len(keys)

    # ── out ──────────────────────────────────────────────────────────────────────────────────────

    def abort(self, h: PrefillHandoff, error: KvmeshError | None = None, reason: str = "") -> None:
        """Begins nothing more for a handoff: it failed (`error`) or is no longer wanted (`reason`). The first cause
        counts."""
        if h.ending:
            return
        if h.phase is PrefillPhase.COMPUTING:
            self._unpromise(h)
        self.blocks.leave(h, cancel=True)
        h.phase = PrefillPhase.CANCELLING
        h.error, h.reason = error, reason
        self.planner.drop(h.handle)
        for rank, push in enumerate(h.pushes):
            if push is Push.OPEN:
                h.pushes[rank] = Push.DRAINING
            known = push is Push.NONE and h.chunks > 0 and not h.start.adopt  # the rank only has to forget it
            if push is Push.OPEN or known:
                self.actions.append(m.TellRank(rank, m.PushCancel(h.handle)))
        self.settle(h)

    def settle(self, h: PrefillHandoff) -> None:
        """Tells decode how the handoff ended once that is known; gives everything back once nothing can touch it."""
        if h.ending and not h.told and (h.quiet or h.in_doubt):
            h.told = True
            if h.in_doubt or h.error is not None:
                error = h.error or HandoffLost(f"cancelled ({h.reason}), and its last bytes may still be on the way")
                self.tell(h, ev.SendFailed(h.handle, error, drained=not h.in_doubt))
            else:
                self.tell(h, ev.SendDrained(h.handle, h.epoch))
        if h.over and self.handoffs.pop(h.handle, None) is not None:
            self._give_back(h)
            self.actions.append(h.ended())

    @abstractmethod
    def _give_back(self, h: PrefillHandoff) -> None:
        """Releases what a handoff that is over holds."""

    # ── tests ────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def check_integrity(self, others: Sequence[int] = ()) -> None:
        """Raises AssertionError unless references equal holders and promises equal what is being computed. `others` are
        pages that somebody else holds, with repetition. Its cost is O(everything); it is for tests."""

    def _check_promises(self) -> None:
        promised: dict[bytes, int] = {}
        for h in self.handoffs.values():
            assert (h.phase is PrefillPhase.QUEUED) == (h.handle in self.planner.waiting), (
                f"handle {h.handle}: the queue"
            )
            assert not h.over, f"handle {h.handle} should have ended"
            waits = h.pulls or h.pinned or h.pinned_groups or h.pull_at_ns
            assert h.phase is PrefillPhase.QUEUED or not waits, f"handle {h.handle} still waits for pulls"
            if h.phase is PrefillPhase.COMPUTING:
                for key in h.start.block_keys[h.promised_from :]:
                    promised[key] = promised.get(key, 0) + 1
        assert promised == self.promised, "promised blocks are not those being computed"

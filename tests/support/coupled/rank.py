"""One rank under both halves of an instance: commands in order, steps of chunks and rows together, and what lies in
every page and extent, as the tokens whose KV it is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvmesh.kvcache.page_pool import PagePool
from kvmesh.ranks import protocol as m

BLOCK = 4
EXTENT_BASE = 1_000_000
Tokens = tuple[int, ...]


@dataclass
class Row:
    """One request in the batch."""

    tokens: list[int]  # of prompt and answer; the last one has no KV yet
    pages: list[int]
    prompt: int
    most: int
    stalled: bool = False

    @property
    def context(self) -> int:
        return len(self.tokens) - 1


@dataclass
class Rank:
    """`prompts`: tokens of each prefill handle and of each decode handle."""

    pool: PagePool
    prompts: dict[int, Tokens]
    inbox: deque[m.ToRank] = field(default_factory=deque)
    outbox: deque[m.ToFront] = field(default_factory=deque)
    steps: deque[m.PrefillStep] = field(default_factory=deque)
    seals: list[m.SealCopy] = field(default_factory=list)
    rows: dict[int, Row] = field(default_factory=dict)
    pushes: dict[int, m.PushOpen] = field(default_factory=dict)
    windows: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    pages: dict[int, Tokens] = field(default_factory=dict)
    extents: dict[int, Tokens] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)  # prefill handle → tokens
    answers: dict[int, dict[int, int]] = field(default_factory=dict)  # decode handle → index → token
    broken: set[int] = field(default_factory=set)  # a step of theirs has failed
    stalls: int = 0
    mixed: int = 0  # steps with chunks and rows
    largest: int = 0  # tokens of prompts beside rows

    # ── commands ─────────────────────────────────────────────────────────────────────────────────

    def take(self) -> None:
        """The oldest command."""
        match self.inbox.popleft():
            case m.PrefillStep() as step:
                self.steps.append(step)
            case m.SealCopy() as copy:
                self.seals.append(copy)
            case m.LoadCopy(ticket, extents, pages):
                self._into(pages, extents)
                self.outbox.append(m.LoadCopied(ticket, 1, 2))
            case m.CopyIn(handle, extents, pages):
                self._into(pages, extents)
                self.outbox.append(m.Copied(handle, True, 1, 2))
            case m.CopyOut(handle, pages, extents):
                self.extents.update((x, self.pages[p]) for p, x in zip(pages, extents, strict=True))
                self.outbox.append(m.Copied(handle, False, 1, 2))
            case m.Join() as join:
                self._join(join)
            case m.Grant(handle, pages):
                if handle in self.rows:
                    self.rows[handle].pages += pages
                    self.rows[handle].stalled = False
            case m.Leave(handle):
                self.rows.pop(handle, None)
                self.outbox.append(m.Left(handle))
            case m.PushOpen() as push:
                self.pushes[push.handle] = push
                self._push(push.handle)
            case m.PushCancel(handle):
                self.pushes.pop(handle, None)
                self.outbox.append(m.PushDrained(handle))
            case m.OpenWindow(peer, epoch, offsets):
                self.windows[peer, epoch] = offsets
                self.outbox.append(m.WindowOpened(peer, epoch))
            case m.Fence(peer, epoch):
                del self.windows[peer, epoch]
                self.outbox.append(m.Fenced(peer, epoch))
            case other:
                raise AssertionError(f"unexpected {other}")

    def _into(self, pages: tuple[int, ...], extents: tuple[int, ...]) -> None:
        for page, extent in zip(pages, extents, strict=True):
            self._own(page, "a copy")
            self.pages[page] = self.extents[extent]

    def _own(self, page: int, who: str) -> None:
        """Whoever writes a page is the only one who holds it."""
        assert self.pool.refcount(page) == 1, f"{who} writes page {page}, which {self.pool.refcount(page)} hold"

    def _join(self, join: m.Join) -> None:
        assert join.handle not in self.rows
        known = list(self.prompts[join.handle])
        row = self.rows[join.handle] = Row(known, list(join.pages), len(known), join.max_tokens)
        self.answers.setdefault(join.handle, {})[join.token_index] = join.next_token
        row.tokens += [self.answers[join.handle][at] for at in range(join.token_index + 1)]
        assert row.context == join.context_tokens
        self._reads_right(row.tokens[: row.context], row.pages)

    def _reads_right(self, tokens: list[int] | Tokens, pages: list[int] | Tokens) -> None:
        """These pages hold the KV of exactly these tokens."""
        for at in range(-(-len(tokens) // BLOCK)):
            end = min((at + 1) * BLOCK, len(tokens))
            assert self.pages.get(pages[at]) == tuple(tokens[:end]), f"wrong KV in block {at} (page {pages[at]})"

    def finish_seal(self, at: int = 0) -> None:
        copy = self.seals.pop(at)
        self.extents.update((x, self.pages[p]) for p, x in zip(copy.pages, copy.extents, strict=True))
        self.outbox.append(m.SealCopied(copy.ticket, 1, 2))

    # ── other instances ──────────────────────────────────────────────────────────────────────────

    def _push(self, handle: int) -> None:
        """A push is done when its prompt is computed."""
        push = self.pushes.get(handle)
        if push is not None and self.computed.get(handle, 0) >= push.prompt_tokens:
            self._reads_right(self.prompts[handle], push.pages)
            del self.pushes[handle]
            self.outbox.append(m.PushDone(handle, push.handoff_epoch, 1, 2, 64))

    def fill(self, peer: str, epoch: int, tokens: Tokens) -> None:
        """A writer elsewhere writes all that it was invited to, and its end mark."""
        offsets = self.windows.get((peer, epoch))
        if offsets is None:
            return
        first = -(-len(tokens) // BLOCK) - len(offsets)
        for at, offset in enumerate(offsets, first):
            lies = tokens[: min((at + 1) * BLOCK, len(tokens))]
            if offset >= EXTENT_BASE:
                self.extents[offset - EXTENT_BASE] = lies
            else:
                self._own(offset, "a push")
                self.pages[offset] = lies
        self.outbox.append(m.FillEnded(peer, epoch))

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    def step(self, *, fail_rows: bool = False, fail_items: bool = False, stop: bool = False) -> bool:
        """The oldest chunks and every row with room, in one step; False: there was nothing."""
        rows = self._runnable()
        step = self.steps.popleft() if self.steps else None
        if step is not None and rows:
            self.mixed += 1
            self.largest = max(self.largest, sum(len(item.token_ids) for item in step.items))
        if step is not None:
            self._chunks(step, fail_items)
        if rows and fail_rows:
            for handle in rows:
                del self.rows[handle]
            self.outbox.append(m.RankError(tuple(rows), "out of luck"))
        elif rows:
            tokens = tuple(self._token(handle, row, stop) for handle, row in rows.items())
            beside = sum(len(item.token_ids) for item in step.items) if step else 0
            self.outbox.append(m.DecodeStepDone(1, 2, len(rows), 0, tokens, beside))
        return step is not None or bool(rows)

    def _runnable(self) -> dict[int, Row]:
        for handle, row in self.rows.items():
            if row.context >= len(row.pages) * BLOCK and not row.stalled:
                row.stalled = True
                self.stalls += 1
                self.outbox.append(m.Stalled(handle))
        return {handle: row for handle, row in self.rows.items() if not row.stalled}

    def _chunks(self, step: m.PrefillStep, fail: bool) -> None:
        if fail:
            self.broken.update(item.handle for item in step.items)
            self.outbox.append(m.RankError(tuple(item.handle for item in step.items), "out of luck"))
            return
        for item in step.items:
            end = item.start + len(item.token_ids)
            tokens = self.prompts[item.handle]
            broken = item.handle in self.broken
            if not broken:
                self._reads_right(tokens[: item.start], item.pages)
            for at in range(item.start // BLOCK, -(-end // BLOCK)):
                self._own(item.pages[at], "a chunk")
                self.pages[item.pages[at]] = () if broken else tokens[: min((at + 1) * BLOCK, end)]
            self.computed[item.handle] = end
            if not broken:
                self._push(item.handle)
        sampled = tuple(m.Sampled(item.handle, 500 + item.handle) for item in step.items if item.sample)
        self.outbox.append(m.PrefillStepDone(step.step_id, 1, 2, sampled))

    def _token(self, handle: int, row: Row, stop: bool) -> m.Token:
        self._reads_right(row.tokens[: row.context], row.pages)
        page = row.pages[row.context // BLOCK]
        self._own(page, "a row")
        self.pages[page] = tuple(row.tokens)
        index = len(row.tokens) - row.prompt
        token = 1000 + index
        self.answers[handle][index] = token
        row.tokens.append(token)
        finish = 1 if stop else 2 if index + 1 >= row.most else 0
        if finish:
            del self.rows[handle]
        return m.Token(handle, token, index, finish)

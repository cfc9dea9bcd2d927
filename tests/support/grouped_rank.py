"""Plays the front of a rank that keeps its model by cache groups: pages and extents of each group, requests that are
prefilled in chunks, decoded, preempted and taken up elsewhere. Pages that are given back are full of NaN before anybody
else has them."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from kvmesh.engine.batch import PrefillInput
from kvmesh.engine.cache_memory import group_shapes, is_state, zeroed_memory
from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.runner import DecodeInput, Runner, SampleParams
from kvmesh.kvcache.cache_groups import CacheGroup, GroupPages, freed_blocks, needed_blocks, snapshot_grid
from kvmesh.kvcache.keys import pack_tokens
from kvmesh.ranks import protocol as m
from kvmesh.transfer import TransferEngine
from kvmesh.transfer.groups import GroupWrite
from tests.support.rank_driver import BLOCK, GREEDY, AnyDriver

POISON_EPOCH = 77


def told_by_runner(path: Path, prompt: Sequence[int], count: int) -> list[int]:
    """Returns the greedy answer of a runner that keeps everything and has nobody else to serve."""
    return list(_told(path, tuple(prompt), count))


@functools.lru_cache(maxsize=64)
def _told(path: Path, prompt: tuple[int, ...], count: int) -> list[int]:
    checkpoint = open_checkpoint(path)
    shapes = group_shapes(checkpoint.config, torch.float32, BLOCK)
    pages = -(-(len(prompt) + count) // BLOCK)
    memory = zeroed_memory(shapes, [1 if is_state(s.group) else pages for s in shapes], torch.device("cpu"))
    runner = Runner(checkpoint, "float32", "cpu", BLOCK, memory)
    tables = [(0,) if is_state(s.group) else tuple(range(pages)) for s in shapes]
    [first] = runner.prefill([PrefillInput(prompt, 0, (), SampleParams(), tables)])
    assert first is not None
    made = [first.token_id]
    while len(made) < count:
        [token] = runner.decode(
            [DecodeInput(made[-1], len(prompt) + len(made) - 1, (), SampleParams(token_index=len(made)), tables)]
        )
        made.append(token.token_id)
    return made


@dataclass(eq=False)
class GroupedRequest:
    """One request: of each group that keeps tokens the page of each block, -1 where it has none, and of a state the
    slot and the second one."""

    handle: int
    prompt: list[int]
    tables: list[list[int]]
    made: list[int] = field(default_factory=list)

    @property
    def done(self) -> int:
        """The tokens that are computed, once the first token is made."""
        return len(self.prompt) + len(self.made) - 1


class GroupedFront:
    """Has what one rank told of its groups. `spoils`: pages that come back are overwritten with NaN. `early`: pages are
    given back so many blocks too early, which must show."""

    def __init__(self, driver: AnyDriver, path: Path, early: int = 0) -> None:
        self.driver, self.early = driver, early
        self.groups: tuple[CacheGroup, ...] = open_checkpoint(path).config.cache_groups
        self.memory = driver.client.ready.groups
        assert [one.shard.group for one in self.memory] == list(range(len(self.groups)))
        self.free = [list(range(one.num_pages)) for one in self.memory]
        self.free_extents = [list(range(1, one.num_extents)) for one in self.memory]  # the first is full of NaN
        self.grid = snapshot_grid(self.groups, BLOCK)
        self.requests = 0
        self.tickets = 0
        self.holes = 0
        self.drafted = self.kept = 0  # tokens of drafts that were computed, and those that came
        self.failed: list[int] = []  # requests of which a step failed

    async def poison(self, engine: TransferEngine) -> None:
        """Fills extent 0 of each group with NaN, over the wire and into a window whose parts differ in size."""
        ready = self.driver.client.ready
        offsets = tuple(one.extent_base_offset for one in self.memory)
        sizes = tuple(one.shard.shard_bytes for one in self.memory)
        self.driver.client.send(m.OpenWindow(engine.name, POISON_EPOCH, offsets, sizes))
        await self.driver.take(m.WindowOpened)
        segment = engine.open_segment(ready.descriptor)
        region = engine.allocate(max(sizes), "cpu:0")
        assert region.memory is not None
        region.memory[:] = b"\xff" * len(region.memory)
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        write = GroupWrite(engine, POISON_EPOCH, [segment], lambda: loop.call_soon_threadsafe(ended.set))
        write.write(segment, [(region.address, offset, size) for offset, size in zip(offsets, sizes, strict=True)])
        write.mark()
        await asyncio.wait_for(ended.wait(), 20)
        assert not write.cause, write.cause
        await self.driver.take(m.FillEnded)
        self.driver.client.send(m.Fence(engine.name, POISON_EPOCH))
        await self.driver.take(m.Fenced)
        for group in range(len(self.groups)):
            await self.give_back(group, [self.free[group].pop() for _ in range(len(self.free[group]))])

    # ── pages ────────────────────────────────────────────────────────────────────────────────────

    async def give_back(self, group: int, pages: Sequence[int]) -> None:
        """Overwrites pages with NaN; they are the next that anybody gets."""
        pages = [page for page in pages if page >= 0]
        if pages:
            self.tickets += 1
            named, extents = GroupPages(group, 0, tuple(pages)), GroupPages(group, 0, (0,) * len(pages))
            self.driver.client.send(m.LoadCopy(self.tickets, (), (), (named,), (extents,)))
            while (await self.driver.take(m.LoadCopied)).ticket != self.tickets:
                pass
            self.free[group] += pages

    async def give_back_all(self, request: GroupedRequest) -> None:
        for group, table in enumerate(request.tables):
            await self.give_back(group, table)
            request.tables[group] = []

    def freed(self, group: int, tokens: int) -> int:
        found = freed_blocks(self.groups[group], BLOCK, tokens)
        return found + self.early if found else 0

    def named(self, request: GroupedRequest, tokens: int = 0) -> tuple[GroupPages, ...]:
        """Names the pages that a request has, up to those of `tokens` tokens (0: all)."""
        end = -(-tokens // BLOCK) if tokens else None
        found = []
        for group, table in enumerate(request.tables):
            if is_state(self.groups[group]):
                found.append(GroupPages(group, 0, tuple(table)))
                continue
            first = next((at for at, page in enumerate(table) if page >= 0), len(table))
            found.append(GroupPages(group, first, tuple(table[first:end])))
        return tuple(found)

    def landing(self, tokens: int) -> tuple[GroupedRequest, tuple[GroupPages, ...]]:
        """Reserves what a handoff of so many tokens needs; returns the places that it lands in, page or extent."""
        request = self.request(())
        offsets = []
        for number, (group, of) in enumerate(zip(self.groups, self.memory, strict=True)):
            if is_state(group):
                first, own = 0, request.tables[number][:1]
            else:
                blocks = needed_blocks(group, BLOCK, tokens)
                first, own = blocks.start, [self.free[number].pop() for _ in blocks]
                request.tables[number] = [-1] * blocks.start + own
            base = of.page_base_offset if self.driver.client.ready.direct_landing else of.extent_base_offset
            places = own if self.driver.client.ready.direct_landing else [1 + at for at in range(len(own))]
            offsets.append(GroupPages(number, first, tuple(base + at * of.shard.shard_bytes for at in places)))
        return request, tuple(offsets)

    def window(self, peer: str, epoch: int, landing: Sequence[GroupPages], by_first_group: bool = False) -> None:
        """Opens a window for a landing; `by_first_group`: with the size of group 0 throughout, which is too small for
        wider groups."""
        shards = [self.memory[0 if by_first_group else pages.group].shard for pages in landing]
        sizes = [shard.shard_bytes for shard, pages in zip(shards, landing, strict=True) for _ in pages.ids]
        offsets = tuple(offset for pages in landing for offset in pages.ids)
        self.driver.client.send(m.OpenWindow(peer, epoch, offsets, tuple(sizes)))

    async def landed(self, request: GroupedRequest, landing: Sequence[GroupPages]) -> None:
        """Copies what came into pages, where it did not land there."""
        if self.driver.client.ready.direct_landing:
            return
        pages = []
        for number, at in enumerate(landing):
            own = request.tables[number]
            pages.append(GroupPages(number, at.first, tuple(own[at.first :][: len(at.ids)])))
        extents = [GroupPages(at.group, at.first, tuple(range(1, 1 + len(at.ids)))) for at in landing]
        self.driver.client.send(m.CopyIn(request.handle, (), (), tuple(pages), tuple(extents)))
        await self.driver.take(m.Copied)

    async def hear(self, request: GroupedRequest, *kinds: type[m.Message]) -> m.Message:
        """Returns the next message of some kind. Raises AssertionError when the request fails."""
        while True:
            message = await self.driver.take((*kinds, m.RankError))
            if not isinstance(message, m.RankError):
                return message
            assert request.handle not in message.handles, message
            self.failed += message.handles

    # ── a request's life ─────────────────────────────────────────────────────────────────────────

    def request(self, prompt: Sequence[int]) -> GroupedRequest:
        self.requests += 1
        tables = [
            [self.free[group].pop(), self.free[group].pop()] if is_state(of) else []
            for group, of in enumerate(self.groups)
        ]
        return GroupedRequest(self.requests, list(prompt), tables)

    async def load(self, request: GroupedRequest, cut: int, sealed: Sequence[dict[int, int]]) -> None:
        """Takes the first `cut` blocks from extents: `sealed[group][block]`."""
        pages, extents = [], []
        for number, group in enumerate(self.groups):
            blocks = needed_blocks(group, BLOCK, cut * BLOCK)
            if is_state(group):
                pages.append(GroupPages(number, cut - 1, (request.tables[number][0],)))
            else:
                own = [self.free[number].pop() for _ in blocks]
                request.tables[number] = [-1] * blocks.start + own
                pages.append(GroupPages(number, blocks.start, tuple(own)))
            extents.append(GroupPages(number, blocks.start, tuple(sealed[number][block] for block in blocks)))
        self.tickets += 1
        self.driver.client.send(m.LoadCopy(self.tickets, (), (), tuple(pages), tuple(extents)))

    async def prefill(
        self,
        request: GroupedRequest,
        chunk: int,
        start: int = 0,
        push: bool = False,
        sealed: Sequence[dict[int, int]] = (),
        source: Sequence[int] = (),
        computed: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Computes the prompt from token `start` on in chunks. What is complete and may be needed goes into `sealed`;
        states begin with the snapshots `source` of each STATE group. `computed` is told how far it is."""
        prompt = request.prompt
        while start < len(prompt):
            end = min(start + chunk, len(prompt))
            if self.grid:
                end = min(end, start // self.grid * self.grid + self.grid)
            whole = end // BLOCK - 1 if self.grid and end % self.grid == 0 else -1  # a state is sealed of this block
            named, snapshots, sources = [], {}, list(source)
            for number, group in enumerate(self.groups):
                table = request.tables[number]
                if is_state(group):
                    if whole >= 0:
                        snapshots[number] = self.free[number].pop()
                    began = sources.pop(0) if sources else -1
                    named.append(GroupPages(number, 0, (table[0], snapshots.get(number, -1), began)))
                    continue
                freed = self.freed(number, start)
                await self.give_back(number, table[:freed])
                table[:freed] = [-1] * freed
                self.holes += freed
                while len(table) * BLOCK < end:
                    table.append(self.free[number].pop())
                named.append(GroupPages(number, freed, tuple(table[freed:])))
            sample = GREEDY if end == len(prompt) else None
            item = m.PrefillItem(request.handle, tuple(prompt[start:end]), start, (), sample, push, groups=tuple(named))
            self.driver.client.send(m.PrefillStep(start + 1, (item,)))
            done = await self.hear(request, m.PrefillStepDone)
            assert isinstance(done, m.PrefillStepDone)
            request.made += [token.token_id for token in done.sampled]
            if sealed:
                await self.seal(request, start // BLOCK, end // BLOCK, whole, snapshots, sealed)
            for number, slot in snapshots.items():
                await self.give_back(number, [slot])
            start, source = end, ()
            computed(end)

    async def seal(
        self,
        request: GroupedRequest,
        first: int,
        end: int,
        whole: int,
        snapshots: dict[int, int],
        sealed: Sequence[dict[int, int]],
    ) -> None:
        pages, extents = [], []
        for number, group in enumerate(self.groups):
            blocks = range(first, end) if not is_state(group) else range(whole, whole + 1) if whole >= 0 else range(0)
            own = [snapshots[number]] if is_state(group) and blocks else request.tables[number][first:end]
            own = own if blocks else []
            taken = [self.free_extents[number].pop() for _ in blocks]
            sealed[number].update(zip(blocks, taken, strict=True))
            pages.append(GroupPages(number, blocks.start, tuple(own)))
            extents.append(GroupPages(number, blocks.start, tuple(taken)))
        self.tickets += 1
        self.driver.client.send(m.SealCopy(self.tickets, (), (), tuple(pages), tuple(extents)))
        copied = await self.driver.take(m.SealCopied)
        assert copied.ticket == self.tickets and not copied.bad and not copied.bad_groups

    def join(
        self,
        request: GroupedRequest,
        most: int,
        stop: tuple[int, ...] = (),
        room: int = 0,
        least: int = 0,
        sampling: m.Sampling = GREEDY,
    ) -> None:
        """Puts it into the batch, with pages for the next token in every group, or for `room` tokens. It ends by length
        at `most` tokens, or at a `stop` token once it has `least`."""
        self._grow(request, room or request.done + 1)
        self.driver.client.send(
            m.Join(
                request.handle,
                (),
                request.done,
                request.made[-1],
                len(request.made) - 1,
                most,
                least,
                stop,
                sampling,
                groups=self.named(request),
                said=m.TokenHistory(pack_tokens(request.prompt), pack_tokens(request.made)),
            )
        )

    def _grow(self, request: GroupedRequest, tokens: int) -> tuple[GroupPages, ...]:
        more = []
        for number, group in enumerate(self.groups):
            table = request.tables[number]
            before = len(table)
            while not is_state(group) and len(table) * BLOCK < tokens:
                table.append(self.free[number].pop())
            if len(table) > before:
                more.append(GroupPages(number, before, tuple(table[before:])))
        return tuple(more)

    async def decode(self, request: GroupedRequest, most: int, until: int = 0) -> None:
        """Decodes to the end, or until there are `until` tokens; grants pages when it stalls and drops those behind."""
        going: list[tuple[int, list[int]]] = []  # dropped, and given back with the next step
        while len(request.made) < (until or most):
            step = await self.hear(request, m.DecodeStepDone, m.Stalled)
            if isinstance(step, m.Stalled):
                if more := self._grow(request, request.done + 1):
                    self.driver.client.send(m.Grant(request.handle, (), more))
                continue
            assert isinstance(step, m.DecodeStepDone)
            self.drafted += sum(drafted for _, drafted, _ in step.drafts)
            self.kept += sum(kept for _, _, kept in step.drafts)
            for number, pages in going:
                await self.give_back(number, pages)
            going = []
            for token in step.tokens:
                assert token.handle == request.handle and token.token_index == len(request.made)
                request.made.append(token.token_id)
            for number, table in enumerate(request.tables):
                freed = 0 if is_state(self.groups[number]) else self.freed(number, request.done)
                pages = [page for page in table[:freed] if page >= 0]
                if pages and not any(token.finish for token in step.tokens):
                    self.driver.client.send(m.DropPages(request.handle, number, freed))
                    table[:freed] = [-1] * freed
                    going.append((number, pages))
                    self.holes += len(pages)
        for number, pages in going:
            await self.give_back(number, pages)

    async def preempt(self, request: GroupedRequest) -> list[dict[int, int]]:
        """Takes it out of the batch; returns the extents that have what it needs."""
        self.driver.client.send(m.Leave(request.handle))
        await self.driver.take(m.Left)
        for step in [x for x in self.driver.inbox if isinstance(x, m.DecodeStepDone)]:
            request.made += [token.token_id for token in step.tokens]
        self.driver.inbox.clear()
        kept: list[dict[int, int]] = []
        pages, extents = [], []
        for number, group in enumerate(self.groups):
            blocks = range(2) if is_state(group) else needed_blocks(group, BLOCK, request.done)
            kept.append({block: self.free_extents[number].pop() for block in blocks})
            table = request.tables[number]
            pages.append(GroupPages(number, blocks.start, tuple(table[block] for block in blocks)))
            extents.append(GroupPages(number, blocks.start, tuple(kept[number].values())))
        self.driver.client.send(m.CopyOut(request.handle, (), (), tuple(pages), tuple(extents)))
        await self.driver.take(m.Copied)
        await self.give_back_all(request)
        return kept

    async def resume(self, request: GroupedRequest, kept: Sequence[dict[int, int]]) -> None:
        """Copies it into other pages."""
        pages, extents = [], []
        for number in range(len(self.groups)):
            first = min(kept[number], default=0)
            own = [self.free[number].pop(0) for _ in kept[number]]
            request.tables[number] = [-1] * first + own
            pages.append(GroupPages(number, first, tuple(own)))
            extents.append(GroupPages(number, first, tuple(kept[number].values())))
        self.driver.client.send(m.CopyIn(request.handle, (), (), tuple(pages), tuple(extents)))
        await self.driver.take(m.Copied)


async def hand_over(
    a: GroupedFront,
    b: GroupedFront,
    prompt: Sequence[int],
    chunk: int,
    at: int,
    by_first_group: bool = False,
    epoch: int = 1,
) -> GroupedRequest:
    """Prefills on `a`, whose ranks push to the one rank of `b` and are told where to once `at` tokens are computed.
    Returns the request as `b` has it."""
    ready, writers = b.driver.client.ready, a.driver.readies
    landed, landing = b.landing(len(prompt))
    for writer in writers:
        b.window(writer.engine_name, epoch, landing, by_first_group)
    a.driver.client.send(m.OpenSegment(ready.descriptor))
    request = a.request(prompt)
    lease = time.monotonic_ns() + 60_000_000_000
    layouts = tuple(group.shard for writer in writers for group in writer.groups)

    def push(done: int) -> None:
        if not at <= done or request.handle in told:
            return
        told.add(request.handle)
        spec = m.PushOpen(
            request.handle, epoch, ready.engine_name, (), (), 0, 0, len(prompt), lease, group_offsets=landing
        )
        for number in range(len(writers)):
            target = m.PushTarget(0, ready.engine_name, (), landing)
            group = m.PushGroup(number, layouts, tuple(one.shard for one in ready.groups), (target,))
            a.driver.send_to(number, msgspec.structs.replace(spec, group=group) if len(writers) > 1 else spec)

    told: set[int] = set()
    push(0)
    await a.prefill(request, chunk, push=True, computed=push)
    pushed = await a.driver.take((m.PushDone, m.PushFailed))
    assert isinstance(pushed, m.PushDone), pushed
    for writer in writers:
        await b.driver.take(m.FillEnded)
        b.driver.client.send(m.Fence(writer.engine_name, epoch))
        await b.driver.take(m.Fenced)
    await a.give_back_all(request)
    await b.landed(landed, landing)
    landed.prompt, landed.made = list(prompt), list(request.made)
    return landed

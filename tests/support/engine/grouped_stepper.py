"""Drives two runners over the same requests: one with a tensor for all layers, one with a tensor for each cache group,
whose pages go as soon as no later token sees them and are then full of NaN. What both answer is compared to the bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kvmesh.engine.batch import DecodeBatch
from kvmesh.engine.cache_memory import group_memory, group_offsets, group_shapes
from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.runner import DecodeInput, PrefillInput, Runner, SampleParams, pages_over, torch_dtype
from kvmesh.kvcache.cache_groups import CacheKind, freed_blocks, needed_blocks
from tests.support.engine.stepper import NAN_BYTE


@dataclass(eq=False)
class Twice:
    """A request of both runners."""

    token_ids: list[int]
    pages: list[int]
    groups: list[list[int]]  # -1: given back
    params: SampleParams
    done: int = 0
    told: list[object] = field(default_factory=list)


class Twins:
    def __init__(self, path: Path, dtype: str, block_tokens: int, num_pages: int, tails: bool = True) -> None:
        """`tails`: slots past a request's last token are compared, too."""
        self.block, self.tails = block_tokens, tails
        checkpoint = open_checkpoint(path)
        self.config = checkpoint.config
        self.shapes = group_shapes(self.config, torch_dtype(dtype), block_tokens)
        counts = [num_pages] * len(self.shapes)
        memory = bytearray([NAN_BYTE]) * group_offsets(self.shapes, counts)[-1]
        self.memory = group_memory(self.shapes, counts, memory)
        self.grouped = Runner(checkpoint, dtype, "cpu", block_tokens, self.memory)
        checkpoint = open_checkpoint(path)
        layout = self.grouped.layout
        self.pages = pages_over(bytearray([NAN_BYTE]) * (layout.shard_bytes * num_pages), layout, num_pages, dtype)
        self.whole = Runner(checkpoint, dtype, "cpu", block_tokens, self.pages)
        self.free = [list(range(num_pages))[::-1] for _ in (0, *counts)]
        self.held: list[Counter[int]] = [Counter() for _ in counts]
        self.holes = 0  # entries that a step was given as such

    def request(self, token_ids: Sequence[int], after: Twice | None = None, blocks: int = 0) -> Twice:
        """One whose first `blocks` blocks are those of another, as a cache hands them out: of each group what is
        needed to go on after them."""
        pages = list(after.pages[:blocks]) if after else []
        groups: list[list[int]] = []
        for g, shape in enumerate(self.shapes):
            needed = needed_blocks(shape.group, self.block, blocks * self.block)
            groups.append(
                [after.groups[g][block] if block in needed else -1 for block in range(blocks)] if after else []
            )
            assert min([groups[g][block] for block in needed], default=0) >= 0, "the other request has given it back"
            self.held[g].update(page for page in groups[g] if page >= 0)
        params = SampleParams(logprobs=self.config.vocab_size)
        return Twice(list(token_ids), pages, groups, params, done=blocks * self.block)

    def ready(self, request: Twice, tokens: int) -> None:
        """Gives back what no token from here on sees, and takes pages for the next `tokens` tokens."""
        need = -(-(request.done + tokens) // self.block)
        for g, shape in enumerate(self.shapes):
            table = request.groups[g]
            for block in range(freed_blocks(shape.group, self.block, request.done)):
                page, table[block] = table[block], -1
                if page >= 0:
                    self.held[g][page] -= 1
                    if not self.held[g][page]:
                        self.memory[g][page] = torch.nan
                        self.free[1 + g].append(page)  # whoever takes one next takes this
            while len(table) < need:
                table.append(self.free[1 + g].pop())
                self.held[g][table[-1]] += 1
            self.holes += table.count(-1)
        while len(request.pages) < need:
            request.pages.append(self.free[0].pop())

    def step(self, rows: Sequence[Twice] = (), chunks: Sequence[tuple[Twice, int]] = ()) -> None:
        """Computes a token of each row and so many tokens of each chunk in one step of either runner."""
        for request, tokens in [*((row, 1) for row in rows), *chunks]:
            self.ready(request, tokens)
        answers = []
        for runner, grouped in ((self.whole, False), (self.grouped, True)):
            batch = DecodeBatch.of(
                [
                    DecodeInput(
                        row.token_ids[row.done],
                        row.done,
                        () if grouped else tuple(row.pages),
                        row.params,
                        [tuple(table) for table in row.groups] if grouped else (),
                    )
                    for row in rows
                ]
            )
            items = []
            for request, tokens in chunks:
                end = request.done + tokens
                sample = request.params if end >= len(request.token_ids) else None
                ids = request.token_ids[request.done : end]
                if grouped:
                    items.append(PrefillInput(ids, request.done, sample=sample, groups=request.groups))
                else:
                    items.append(PrefillInput(ids, request.done, request.pages, sample))
            first, chosen = runner.step(items, batch)
            answers.append((first, chosen.tokens()))
        assert answers[0] == answers[1], "to the last bit of every log-probability"
        first, more = answers[0]
        for (request, tokens), token in zip([*((row, 1) for row in rows), *chunks], [*more, *first], strict=True):
            request.done += tokens
            if token is not None and request.done == len(request.token_ids):
                request.token_ids.append(token.token_id)
                request.told.append(token)
        for request in [*rows, *(chunk[0] for chunk in chunks)]:
            self.compare(request)

    def compare(self, request: Twice) -> None:
        """What is kept of the request is what the one tensor has of it, past its last token, too."""
        for g, shape in enumerate(self.shapes):
            if shape.group.kind is CacheKind.STATE:
                continue
            for block, (page, whole) in enumerate(zip(request.groups[g], request.pages, strict=True)):
                if page >= 0:
                    end = self.block if self.tails else request.done - block * self.block
                    own, other = self.memory[g][page], self.pages[whole, list(shape.group.layers)]
                    own, other = (pages[:, :, :, :end].contiguous().view(torch.uint8) for pages in (own, other))
                    assert torch.equal(own, other)

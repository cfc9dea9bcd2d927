"""Memory of what a model keeps, one tensor for each cache group (ADR 0037).

A group's tensor is `[pages, layers of the group, planes, heads, tokens, dim]`, a page being one object of the group as
this rank has it, in one piece: it is copied to and from extents and pushed as pages always were. Layers count within
the group. Of a STATE group a page is called a *slot*, holds one state, and has one "token"; its dtype may be the
group's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from kvmesh.engine.axes import Axes
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.parallel import check_shares, share
from kvmesh.engine.stages import stage_groups
from kvmesh.errors import InternalError
from kvmesh.kvcache.cache_groups import CacheGroup, CacheKind, GroupPages, rank_shard
from kvmesh.kvcache.layout import ShardLayout

ALIGNED = 4096  # bytes that each group's memory begins at a multiple of


class GroupShape(NamedTuple):
    """Is what one rank keeps of a group: `layout` of one page, whose size in bytes is `page_bytes`."""

    group: CacheGroup
    layout: ShardLayout
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        return self.layout.shard_bytes


def group_shapes(
    config: ModelConfig,
    dtype: torch.dtype,
    block_tokens: int,
    rank: int = 0,
    world: int = 1,
    layers: range | None = None,
) -> tuple[GroupShape, ...]:
    """Returns what one of `world` ranks that have these layers (None: all) keeps of each group, KV as `dtype`. Raises
    ConfigError when so many ranks cannot share the model, or there is no layer of a group."""
    check_shares(config, Axes(tp=world))
    shapes = []
    layers = range(config.layers) if layers is None else layers
    stage_groups(config.cache_groups, layers)
    for number, group in enumerate(config.cache_groups):
        own = getattr(torch, group.layout.dtype) if group.layout.dtype else dtype
        heads = share(group.layout.heads, rank, world)
        layout = rank_shard(group, layers, heads, block_tokens, own.itemsize, number)
        assert layout is not None, "a rank has layers of each group"
        shapes.append(GroupShape(group, layout, own))
    return tuple(shapes)


def group_offsets(shapes: Sequence[GroupShape], counts: Sequence[int]) -> tuple[int, ...]:
    """Returns where the memory of each group begins, in bytes, where the groups with so many pages follow each other in
    one buffer; and behind them how long it is."""
    return group_starts([count * shape.page_bytes for shape, count in zip(shapes, counts, strict=True)])


def group_starts(sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns where each of several pieces of memory begins that follow each other in one buffer, in bytes, and behind
    them how long it is."""
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // ALIGNED) * ALIGNED)
    return tuple(offsets)


def group_memory(
    shapes: Sequence[GroupShape], counts: Sequence[int], buffer: memoryview | bytearray
) -> tuple[torch.Tensor, ...]:
    """Returns a tensor of `counts[g]` pages for each group over writable memory, laid out as `group_offsets` says.
    Raises InternalError when the buffer is too small."""
    offsets = group_offsets(shapes, counts)
    if len(buffer) < offsets[-1]:
        raise InternalError(f"{list(counts)} pages need {offsets[-1]} bytes, the buffer has {len(buffer)}")
    memory = []
    for shape, count, offset in zip(shapes, counts, offsets, strict=False):
        elements = count * shape.page_bytes // shape.layout.itemsize
        flat = torch.frombuffer(buffer, dtype=shape.dtype, count=elements, offset=offset)
        memory.append(flat.view(count, *shape.layout.shape))
    return tuple(memory)


def zeroed_memory(
    shapes: Sequence[GroupShape], counts: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Returns a tensor of zeros of `counts[g]` pages for each group."""
    return tuple(
        torch.zeros((count, *shape.layout.shape), dtype=shape.dtype, device=device)
        for shape, count in zip(shapes, counts, strict=True)
    )


def check_memory(shapes: Sequence[GroupShape], memory: Sequence[torch.Tensor], device: torch.device) -> None:
    """Raises InternalError unless there is one tensor a group, of its shape and dtype and on the device."""
    if len(memory) != len(shapes):
        raise InternalError(f"{len(memory)} tensors of pages for {len(shapes)} cache groups")
    for shape, pages in zip(shapes, memory, strict=True):
        if tuple(pages.shape[1:]) != shape.layout.shape or pages.dtype != shape.dtype or pages.device != device:
            raise InternalError(
                f"cache group {shape.group.name}: pages are {list(pages.shape)} {pages.dtype} on {pages.device}, "
                f"expected [n, *{list(shape.layout.shape)}] {shape.dtype} on {device}"
            )


def is_state(group: CacheGroup) -> bool:
    return group.kind is CacheKind.STATE


def named_by_group(shapes: Sequence[GroupShape], pages: Sequence[int], slot: int) -> tuple[Sequence[int], ...]:
    """Returns a request's tables where its pages have the same ids in each group, as they have before anything
    serves."""
    return tuple((slot,) if is_state(shape.group) else pages for shape in shapes)


def table_of(pages: GroupPages) -> tuple[int, ...]:
    """Returns the pages of one request as a step takes them: a hole for each block before the first."""
    return (-1,) * pages.first + pages.ids


class StateMemory:
    """Holds the states of all STATE groups of a model: `tensors[i]` is that of `groups[i]`, group `numbers[i]` of the
    model, `[slots, layers of the group, planes, heads, 1, dim]` as `group_memory` made it."""

    def __init__(self, groups: Sequence[CacheGroup], memory: Sequence[torch.Tensor]) -> None:
        self.numbers = tuple(number for number, group in enumerate(groups) if is_state(group))
        self.groups = tuple(groups[number] for number in self.numbers)
        self.tensors = tuple(memory[number] for number in self.numbers)

    def check(self, at: int, slots: Sequence[int]) -> None:
        """Raises InternalError unless these are slots of `tensors[at]`, each once."""
        count = len(self.tensors[at])
        if len(set(slots)) < len(slots):
            raise InternalError(f"state slots {list(slots)}: one stands twice")
        if slots and not 0 <= min(slots) <= max(slots) < count:
            raise InternalError(f"state slots {min(slots)}..{max(slots)} are outside 0..{count - 1}")

    def zero(self, group: int, slots: Sequence[int]) -> None:
        """Makes the states of a group of the model, in these slots, those of no token."""
        at = self.numbers.index(group)
        self.check(at, slots)
        tensor = self.tensors[at]
        tensor.index_fill_(0, torch.tensor(slots, dtype=torch.int64, device=tensor.device), 0)

    def copy(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies the states of a group of the model from slots to others, none of which is a source."""
        at = self.numbers.index(group)
        self.check(at, [*dict.fromkeys(sources), *targets])  # one snapshot may go to several rows
        if len(sources) != len(targets):
            raise InternalError(f"{len(sources)} state slots are to be copied to {len(targets)}")
        tensor = self.tensors[at]
        index = torch.tensor([sources, targets], dtype=torch.int64, device=tensor.device)
        tensor.index_copy_(0, index[1], tensor.index_select(0, index[0]))

    def kept(self, slots: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Returns copies of the states in `slots[i]` of each of `tensors`."""
        found = []
        for at, (tensor, own) in enumerate(zip(self.tensors, slots, strict=True)):
            self.check(at, own)
            found.append(tensor.index_select(0, torch.tensor(own, dtype=torch.int64, device=tensor.device)))
        return found

    def put_back(self, slots: Sequence[Sequence[int]], kept: Sequence[torch.Tensor], which: Sequence[int]) -> None:
        """Writes those of the copies that are `which` back to where they were."""
        for tensor, own, copies in zip(self.tensors, slots, kept, strict=True):
            index = torch.tensor([(own[at], at) for at in which], dtype=torch.int64, device=tensor.device)
            tensor.index_copy_(0, index[:, 0], copies.index_select(0, index[:, 1]))


class StateStep(NamedTuple):
    """Names the states of one step. A sequence is a decode row, of which there are `rows` at first, or a chunk of a
    prompt: sequence i has the `lengths[i]` tokens of the step behind those of sequence i - 1, the first of them at
    position `starts[i]`. Its state is in slot `slots[g][i]` of the model's g-th STATE group, is that after token
    `starts[i]` - 1 before the step (whatever it is where the sequence starts at 0) and is left there."""

    rows: int
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    slots: tuple[tuple[int, ...], ...]


class StatePlan(Protocol):
    """Computes layers with states for one step."""

    def attend_state(self, layer: int, inputs: Any) -> torch.Tensor:
        """Returns the answer of a layer of the model for all tokens of the step, and leaves its states as they are
        after them. What `inputs` are is between the layer and its backend. A layer is computed once a step."""


class StateBackend(Protocol):
    """Computes what a model's layers do with states, which lie in a StateMemory."""

    def plan(self, step: StateStep) -> StatePlan:
        """Plans one step. The plan is valid until the next one is made."""

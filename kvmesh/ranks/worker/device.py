"""Where a rank's pages are, and how whole blocks go between them and its host segment.

On a CPU pages lie in registered memory: peers land in them, pushes read them, copies are done when asked for. A
device's pages are out of the transfer engine's reach (`StagedMemory`): KV lands in host extents, what is pushed goes
through pinned staging memory (`stager`), and copies run beside the steps. Where a NIC reaches them, `pages_rule` says
what goes straight.

The order is the same for every kind of memory: a copy sees all that steps have written before it was asked for; `done`
is called from `poll`, or at once, when the bytes are there. Until then neither end may be used for anything else, by a
step either.
"""

from __future__ import annotations

import ctypes
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import torch

from kvmesh.engine.cache_memory import GroupShape, group_starts
from kvmesh.engine.checkpoint import Checkpoint
from kvmesh.engine.runner import torch_dtype
from kvmesh.kvcache.layout import Run, ShardLayout
from kvmesh.ranks import protocol as m
from kvmesh.ranks.host_memory import available_bytes
from kvmesh.transfer import Region, TransferEngine

EXTENTS_SHARE = 0.25  # of the host's free memory, for the extents of a device where the operator gives no number


class CopiesDone(NamedTuple):
    """Reports the end of a copy. `bad` are positions of blocks whose KV is not finite, if that was asked for."""

    start_ns: int
    end_ns: int
    bad: tuple[int, ...] = ()


Pair = tuple[torch.Tensor, torch.Tensor]  # target, source


class CopyPieces(NamedTuple):
    """Names bytes to copy from `source` to `target`, both uint8 `[bytes]`; offsets of `runs` count from their first
    bytes. No byte of `target` is in two runs. Where they are checked, they are whole blocks of the cache group
    `group`."""

    source: torch.Tensor
    target: torch.Tensor
    runs: Sequence[Run]
    group: int = 0

    def pairs(self) -> Iterator[Pair]:
        for begin, end, length in self.runs:
            yield self.target[end : end + length], self.source[begin : begin + length]


OnDone = Callable[[CopiesDone], None]
T = TypeVar("T")


class GroupBlocks(NamedTuple):
    """Says how many blocks there are of one cache group, and what one is."""

    layout: ShardLayout
    dtype: torch.dtype
    blocks: int

    @property
    def nbytes(self) -> int:
        return self.blocks * self.layout.shard_bytes


class BlockMemory:
    """Is memory of blocks, those of each cache group in one piece: `tensors[g]` is `[blocks, *layout.shape]` of group
    g and begins `starts[g]` bytes after the first of `data`, which is uint8 `[bytes]`."""

    def __init__(self, groups: Sequence[GroupBlocks], data: torch.Tensor) -> None:
        self.groups = tuple(groups)
        self.starts = starts_of(groups)
        self.data = data[: blocks_bytes(groups)]
        self.tensors = tuple(
            data[start : start + group.nbytes].view(group.dtype).view(group.blocks, *group.layout.shape)
            for group, start in zip(groups, self.starts, strict=True)
        )

    def place(self, group: int, block: int) -> int:
        """Returns where a block begins, in bytes after the first of `data`."""
        return self.starts[group] + block * self.groups[group].layout.shard_bytes


def starts_of(groups: Sequence[GroupBlocks]) -> tuple[int, ...]:
    return group_starts([group.nbytes for group in groups])[:-1]


def blocks_bytes(groups: Sequence[GroupBlocks]) -> int:
    """Returns the bytes that the blocks of all groups take together."""
    return starts_of(groups)[-1] + groups[-1].nbytes


def blocks_of(shapes: Sequence[GroupShape], counts: Sequence[int]) -> tuple[GroupBlocks, ...]:
    """Describes `counts[g]` blocks of each group."""
    return tuple(GroupBlocks(s.layout, s.dtype, count) for s, count in zip(shapes, counts, strict=True))


class DeviceMemory(ABC):
    """Manages the memory of one rank: `pages` and, after `open_extents`, `extents`, both `[blocks, layers, planes,
    kv_heads, block_tokens, head_dim]`. `page_region` is None where peers cannot reach pages. Between two steps at most
    `seal_bytes` are copied that nobody waits for, and `move_bytes` that somebody waits for.

    Of a model that is kept by cache groups there are `groups`, as many pages of each as these say, in place of
    `num_pages` of `layout`; `pages` and `extents` are those of group 0, `page_blocks` and `extent_blocks` have all."""

    pages_use = ""  # for people: what peers and pushes reach of a device's pages, and why
    step_tokens = 0  # rows and prompt tokens of the step that runs or is likely to run next
    seal_bytes = 8 << 20  # about a millisecond of copying and checking
    move_bytes = 64 << 20  # about ten milliseconds: a step with a chunk of a prompt takes far longer
    page_region: Region | None = None
    page_blocks: BlockMemory
    extent_blocks: BlockMemory

    def __init__(
        self,
        configure: m.Configure,
        layout: ShardLayout,
        device: torch.device,
        num_pages: int,
        groups: Sequence[GroupBlocks] = (),
    ) -> None:
        self.device, self.layout = device, layout
        self.groups = tuple(groups) or (GroupBlocks(layout, torch_dtype(configure.dtype), num_pages),)
        self.grouped = bool(groups)

    @property
    def pages(self) -> torch.Tensor:
        return self.page_blocks.tensors[0]

    @property
    def extents(self) -> torch.Tensor:
        return self.extent_blocks.tensors[0]

    def open_extents(self, region: Region, blocks: int | Sequence[int]) -> None:
        """Makes `extents` of the host segment's memory, so many of each group."""
        counts = (blocks,) if isinstance(blocks, int) else blocks
        groups = [group._replace(blocks=count) for group, count in zip(self.groups, counts, strict=True)]
        self.extent_blocks = BlockMemory(groups, _bytes_of(region))

    def open_pages(self, engine: TransferEngine) -> None:
        """Registers pages, where they are not yet and can be, once nothing of the start writes to them any more."""
        return

    def withdraw_pages(self, engine: TransferEngine) -> None:
        """Ends the registration of pages: no peer reads or writes them from here on, what it has mapped of them goes.
        Raises TransferError while one still does."""
        return

    def release_pages(self) -> None:
        """Gives the pages' memory back, after `withdraw_pages`; nobody else may hold a view of it."""
        del self.page_blocks

    @abstractmethod
    def restore_pages(self, engine: TransferEngine) -> None:
        """Makes as many pages anew, zeroed and at other places; `open_pages` follows once they are in use."""

    def landed(self) -> None:
        """Makes what peers have written to pages visible to the steps and copies that are launched from now on. It
        follows a fence, on any thread. Raises TransferError when that fails; it is then called again."""
        return

    @abstractmethod
    def copy(self, pieces: CopyPieces, done: OnDone, *, into_pages: bool, check: bool = False) -> None:
        """Copies pieces; `check` looks for values that are not finite in each."""

    @abstractmethod
    def poll(self) -> None:
        """Calls `done` of the copies that have ended since."""

    @property
    @abstractmethod
    def copying(self) -> bool:
        """Whether copies are under way, so that `poll` will have something to do."""

    def begin_step(self, launch: Callable[[], T]) -> Callable[[], T]:
        """Gives the device a step for which nobody waits. Returns what answers `launch()` once the device has begun."""
        launched = launch()
        return lambda: launched

    @abstractmethod
    def keep_pace(self, meanwhile: Callable[[], None]) -> None:
        """Waits while the device is too far behind a layer that was launched, and calls `meanwhile`."""

    @abstractmethod
    def close(self) -> None:
        """Releases the memory, before the transfer engine's memory is freed."""


class Synchronous:
    """Is a device that carries out everything at once."""

    def keep_pace(self, meanwhile: Callable[[], None]) -> None:
        """Returns at once: the device is never behind."""

    def close(self) -> None:
        """Does nothing: the device has nothing to release."""


class CpuMemory(Synchronous, DeviceMemory):
    """Has pages in a region of their own, which peers may be allowed to write to."""

    def __init__(
        self,
        configure: m.Configure,
        layout: ShardLayout,
        num_pages: int,
        engine: TransferEngine,
        home: str,
        groups: Sequence[GroupBlocks] = (),
    ) -> None:
        super().__init__(configure, layout, torch.device("cpu"), num_pages, groups)
        self._home = home
        self.restore_pages(engine)

    def withdraw_pages(self, engine: TransferEngine) -> None:
        if self.page_region is not None:
            engine.unregister_memory(self.page_region)
            self.page_region = None

    def restore_pages(self, engine: TransferEngine) -> None:
        self.page_region = engine.allocate(blocks_bytes(self.groups), self._home)
        self.page_blocks = BlockMemory(self.groups, _bytes_of(self.page_region))

    def copy(self, pieces: CopyPieces, done: OnDone, *, into_pages: bool, check: bool = False) -> None:
        start = time.monotonic_ns()
        bad = move(pieces, self.groups[pieces.group].dtype if check else None)
        done(CopiesDone(start, time.monotonic_ns(), bad))

    copying = False

    def poll(self) -> None:
        """Does nothing: every copy ends at once."""


def move(pieces: CopyPieces, checked: torch.dtype | None) -> tuple[int, ...]:
    """Copies between places on the host; returns the positions of pieces that, as numbers of type `checked`, are not
    finite."""
    bad = []
    for at, (target, source) in enumerate(pieces.pairs()):
        target.copy_(source)
        if checked is not None and not finite(target.view(checked)):
            bad.append(at)
    return tuple(bad)


def finite(block: torch.Tensor) -> bool:
    """Whether a block's KV contains neither NaN nor infinity, as its sum shows. It costs about as much as the copy."""
    return math.isfinite(total(block).item())


def total(block: torch.Tensor) -> torch.Tensor:
    """Returns a sum that overflows for no finite KV; float32 has no wider type that is as fast."""
    return block.sum(dtype=torch.float32 if block.dtype == torch.float16 else None)


class Copy(Protocol):
    """Is one call of `copy` under way."""

    def over(self) -> bool: ...

    def bad(self) -> tuple[int, ...]:
        """Returns the positions that are not finite, once the copy is over."""


class StagedMemory(DeviceMemory):
    """Has pages that only the device reaches. `staging` is registered memory of `slots` times `slot_bytes`, which bytes
    go through on their way to peers."""

    push_region: Region | None = None  # of the pages, where the transfer engine reads them itself
    staging_bytes = 256 << 20
    least_slot_bytes = 256 << 10  # short pieces lie side by side in one

    def __init__(
        self,
        configure: m.Configure,
        layout: ShardLayout,
        device: torch.device,
        num_pages: int,
        engine: TransferEngine,
        home: str,
        groups: Sequence[GroupBlocks] = (),
    ) -> None:
        super().__init__(configure, layout, device, num_pages, groups)
        self.restore_pages(engine)
        self.slot_bytes = max(self.least_slot_bytes, *(group.layout.layer_bytes for group in self.groups))
        self.slots = max(4, self.staging_bytes // self.slot_bytes)
        self.staging = engine.allocate(self.slots * self.slot_bytes, home)
        self._waiting: dict[bool, deque[tuple[Copy, int, OnDone]]] = {True: deque(), False: deque()}  # by into_pages

    def restore_pages(self, engine: TransferEngine) -> None:
        # Zeros, as places that no token was written to may be sent with their block, and are checked when it is sealed.
        self.page_blocks = BlockMemory(self.groups, self._new_pages(blocks_bytes(self.groups), engine))

    def _new_pages(self, nbytes: int, engine: TransferEngine) -> torch.Tensor:
        """Returns zeroed memory for the pages, uint8 `[nbytes]`."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    @abstractmethod
    def _launch(self, pieces: CopyPieces, into_pages: bool, check: bool) -> Copy: ...

    def copy(self, pieces: CopyPieces, done: OnDone, *, into_pages: bool, check: bool = False) -> None:
        start = time.monotonic_ns()
        self._waiting[into_pages].append((self._launch(pieces, into_pages, check), start, done))

    def poll(self) -> None:
        for waiting in self._waiting.values():
            while waiting and waiting[0][0].over():
                copy, start, done = waiting.popleft()
                done(CopiesDone(start, time.monotonic_ns(), copy.bad()))

    @property
    def copying(self) -> bool:
        return any(self._waiting.values())


LATE_LOOKS = 8  # a step of few layers polls less often, so it must not see bytes that it did not wait for


class LateStep(Generic[T]):
    """Is a step that is computed when somebody needs what it makes: later than anybody may rely on."""

    def __init__(self, launch: Callable[[], T]) -> None:
        self._launch: Callable[[], T] | None = launch
        self._launched: T | None = None
        self._error: Exception | None = None

    @property
    def waits(self) -> bool:
        """Whether it is still to be computed."""
        return self._launch is not None

    def run(self) -> None:
        """Computes it, unless that is done. Whoever needs what it makes is told if it failed."""
        launch, self._launch = self._launch, None
        if launch is None:
            return
        try:
            self._launched = launch()
        except Exception as error:
            self._error = error

    def launched(self) -> T:
        self.run()
        if self._error is not None:
            raise self._error
        return cast(T, self._launched)


class LateCopy:
    """Is a copy that is done when it has been polled LATE_LOOKS times: later than anybody may rely on. It sees what the
    step `after` writes, and those before that."""

    def __init__(self, pieces: CopyPieces, checked: torch.dtype | None, after: LateStep[Any] | None = None) -> None:
        self._pieces: CopyPieces | None = pieces
        self._checked = checked
        self._after = after
        self._looked = 0
        self._bad: tuple[int, ...] = ()

    def run(self) -> None:
        if self._pieces is not None:
            if self._after is not None:
                self._after.run()
            self._bad = move(self._pieces, self._checked)
            self._pieces = None

    def over(self) -> bool:
        self._looked += 1
        if self._looked >= LATE_LOOKS:
            self.run()
        return self._pieces is None

    def bad(self) -> tuple[int, ...]:
        return self._bad


class StagedCpuMemory(Synchronous, StagedMemory):
    """Is a device made of host memory for tests, whose copies are done as late as they may be, one by one, and whose
    steps run as late as they may where nobody waits for them. It has few slots, so that they run out."""

    least_slot_bytes = 1
    staging_bytes = 1
    move_bytes = 1

    def __init__(
        self,
        configure: m.Configure,
        layout: ShardLayout,
        num_pages: int,
        engine: TransferEngine,
        home: str,
        groups: Sequence[GroupBlocks] = (),
    ) -> None:
        super().__init__(configure, layout, torch.device("cpu"), num_pages, engine, home, groups)
        self._newest: LateStep[Any] | None = None

    def begin_step(self, launch: Callable[[], T]) -> Callable[[], T]:
        step = self._newest = LateStep(launch)
        return step.launched

    def _launch(self, pieces: CopyPieces, into_pages: bool, check: bool) -> Copy:
        dtype = self.groups[pieces.group].dtype if check else None
        return LateCopy(pieces, dtype, None if into_pages else self._newest)


def weight_bytes(checkpoint: Checkpoint, itemsize: int) -> int:
    """Returns what a checkpoint's tensors take in bytes, at `itemsize` bytes an element."""
    return itemsize * sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())


def num_extents(configure: m.Configure, memory: DeviceMemory) -> int:
    """Returns the number of blocks of the host segment: as many as pages where the operator gives no number; beside a
    device, no more than the host has room for, beside other ranks too."""
    if configure.num_extents:
        return configure.num_extents
    pages = len(memory.pages)
    if memory.device.type == "cpu":
        return pages
    return max(1, min(pages, extents_room(configure) // memory.layout.shard_bytes))


def extents_room(configure: m.Configure) -> int:
    """Returns the bytes of the host that the extents of one rank beside a device may take, where nobody names them."""
    ranks = max(1, configure.device_instances) * configure.world_size
    return int(available_bytes() * min(EXTENTS_SHARE, 2 * EXTENTS_SHARE / ranks))


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns uint8 `[nbytes]` over a contiguous tensor."""
    return tensor.view(torch.uint8).view(-1)


def region_bytes(region: Region) -> torch.Tensor:
    """Returns uint8 `[nbytes]` over a region of this process."""
    return torch.frombuffer((ctypes.c_ubyte * region.length).from_address(region.address), dtype=torch.uint8)


def _bytes_of(region: Region) -> torch.Tensor:
    """Returns uint8 `[nbytes]` over a region that has a view of its memory, which lives as long."""
    assert region.memory is not None
    return torch.frombuffer(region.memory, dtype=torch.uint8)

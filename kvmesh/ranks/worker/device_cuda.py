"""This module keeps pages in a GPU's memory. Copies run on two streams beside the steps', one for each direction.
Where rdma is in use, pages are memory of the driver's own, which is exported to NICs (`kvmesh.transfer.cuda_driver`).

A copy waits on its stream for what the steps' stream had been given when the copy was asked for, so the host need not
watch over a layer. The host only polls events, and waits for one only to keep pace: a prefill step is launched in a
fraction of the time that it takes, and its layers are to be pushed while it runs. `copy_rule` decides whether the copy
engine or a kernel copies.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvmesh.errors import ConfigError, TransferError
from kvmesh.kvcache.layout import ShardLayout
from kvmesh.ranks import protocol as m
from kvmesh.ranks.devices import check_device
from kvmesh.ranks.worker.copy_rule import kernel_programs
from kvmesh.ranks.worker.device import Copy, CopyPieces, GroupBlocks, StagedMemory, region_bytes, total
from kvmesh.ranks.worker.pages_rule import choose_pages_use
from kvmesh.transfer import Region, TransferEngine
from kvmesh.transfer.cuda_driver import (
    DMA_BUF_SUPPORTED,
    FLUSH_BY_HOST,
    FLUSH_OPTIONS,
    ORDERED_FOR_OWNER,
    WRITES_ORDERING,
    CudaDriver,
)

log = logging.getLogger("kvmesh.rank")

LAYERS_AHEAD = 2  # layers that are launched and not done: enough to keep the device busy
LOOK_S = 100e-6
PINNED = 1 | 2  # cudaHostRegisterPortable, Mapped: pinned for all contexts, and the processors reach it
WARM_BYTES = 64  # of the kernel's first copy


def cuda_device(name: str) -> torch.device:
    """Returns the device. Raises ConfigError when there is no such GPU."""
    check_device(name)
    index = int(name.partition(":")[2] or 0)
    if not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}: torch {torch.__version__} finds no CUDA device here", field="device")
    count = torch.cuda.device_count()
    if index >= count:
        raise ConfigError(f"device={name!r}: this host has {count}", field="device")
    return torch.device("cuda", index)


class CudaCopy:
    """Is a copy that is done when its event is. `sums` are pinned, one for each block, if the blocks are to be
    checked."""

    def __init__(self, event: torch.cuda.Event, sums: torch.Tensor | None) -> None:
        self._event = event
        self._sums = sums

    def over(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def bad(self) -> tuple[int, ...]:
        if self._sums is None:
            return ()
        return tuple((~self._sums.isfinite()).nonzero().flatten().tolist())


class DriverMemory:
    """Bytes of a GPU that the driver gave, as torch takes memory of others (the CUDA array interface, version 3)."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class CudaMemory(StagedMemory):
    _driver: CudaDriver | None = None  # if the pages are memory that a NIC may reach
    _address = 0  # of that memory
    _region: Region | None = None  # of the pages, where they are registered
    _no_pages = ""  # why they are not
    _flushes = False
    seal_bytes = move_bytes = 256 << 20  # the device copies beside the steps; five milliseconds on its bus

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
        torch.cuda.set_device(device)
        super().__init__(configure, layout, device, num_pages, engine, home, groups)
        self._streams = {into: torch.cuda.Stream(device) for into in (True, False)}  # type: ignore[no-untyped-call]
        self._pinned: list[Region] = []
        self._layers: deque[torch.cuda.Event] = deque()
        self._mover: Any = None  # kernels.move, if it can copy here
        self._staging_pinned = self._pin(self.staging)

    def _new_pages(self, nbytes: int, engine: TransferEngine) -> torch.Tensor:
        """Returns zeroed memory for the pages: the driver's own where rdma may reach it, else of torch's pool."""
        if "rdma" not in engine.config.transports:
            return super()._new_pages(nbytes, engine)
        try:
            driver = CudaDriver(f"cuda:{self.device.index}")
            if not driver.attribute(DMA_BUF_SUPPORTED):
                raise TransferError("the GPU or its driver exports no dmabuf (DMA_BUF_SUPPORTED is 0)")
            self._address = driver.allocate(nbytes)
            memory = torch.as_tensor(DriverMemory(self._address, nbytes), device=self.device)
        except (TransferError, RuntimeError) as error:  # the latter is torch's, which may not take the memory
            self._no_pages = str(error)
            return super()._new_pages(nbytes, engine)
        self._driver = driver
        return memory.zero_()

    def open_pages(self, engine: TransferEngine) -> None:
        torch.cuda.synchronize(self.device)  # a peer may write as soon as it is told
        region: Region | None = None
        ordered = flushable = False
        if self._driver is not None:
            pages = self.page_blocks.data
            try:
                ordered = self._driver.attribute(WRITES_ORDERING) >= ORDERED_FOR_OWNER
                flushable = bool(self._driver.attribute(FLUSH_OPTIONS) & FLUSH_BY_HOST)
                region = engine.register_memory((pages.data_ptr(), pages.nbytes), self._driver.location)
            except TransferError as error:
                self._no_pages = error.message
        self._region = region
        use = choose_pages_use(engine.config.transports, self._no_pages, ordered=ordered, flushable=flushable)
        self.push_region = region if use.push else None
        self.page_region = region if use.land else None
        self._flushes = use.flush
        self.pages_use = use.why
        log.info("%s", use.why)

    def withdraw_pages(self, engine: TransferEngine) -> None:
        if self._region is not None:
            engine.unregister_memory(self._region)
        self._region = self.push_region = self.page_region = None

    def release_pages(self) -> None:
        torch.cuda.synchronize(self.device)
        super().release_pages()
        if self._driver is not None:
            self._driver.free(self._address)
            self._driver = None
        torch.cuda.empty_cache()

    def landed(self) -> None:
        if self._flushes and self._driver is not None:
            self._driver.flush()

    def open_extents(self, region: Region, blocks: int | Sequence[int]) -> None:
        super().open_extents(region, blocks)
        if self._pin(region) and self._staging_pinned:
            self._start_mover()

    def _start_mover(self) -> None:
        """Compiles the kernel that copies, and copies a piece with it, before a request waits for it."""
        try:
            from kvmesh.engine.kernels import move

            pages, staging = self.page_blocks.data, region_bytes(self.staging)
            staging[:WARM_BYTES] = 255
            for source, target in ((pages, staging), (staging, pages)):
                table = move.as_table(source, target, [(0, 0, WARM_BYTES)])
                if table is None:
                    raise ValueError("pages or staging memory do not begin at a boundary of 16 bytes")
                move.move(source, target, table, 1)
            torch.cuda.synchronize(self.device)
            if not torch.equal(staging[:WARM_BYTES], pages[:WARM_BYTES].cpu()):
                raise ValueError("the kernel does not reach pinned memory")
        except Exception as error:  # of the import, the compiler or the launch: the copy engine is always there
            log.warning("KV is copied by the copy engine alone, slower in short pieces: %s", error)
            return
        self._mover = move

    def _pin(self, region: Region) -> bool:
        """Pins host memory. Without that copies are right as well, but slow, and the host waits for them."""
        started, runtime = time.monotonic(), _runtime()
        code = int(runtime.cudaHostRegister(region.address, region.length, PINNED))
        if code:
            _forget_error(self.device)
            why = f"{runtime.cudaGetErrorString(runtime.cudaError(code))} (CUDA's error {code})"
            text = "%d MiB of host memory could not be pinned: %s; copies of KV are slow, and steps wait for them. %s"
            log.warning(text, region.length >> 20, why, "Raise the limit of locked memory, or take fewer extents")
            return False
        self._pinned.append(region)
        log.info("pinned %d MiB in %.1f s", region.length >> 20, time.monotonic() - started)
        return True

    def _launch(self, pieces: CopyPieces, into_pages: bool, check: bool) -> Copy:
        steps, stream = torch.cuda.current_stream(self.device), self._streams[into_pages]
        stream.wait_stream(steps)
        sums: torch.Tensor | None = None
        with torch.cuda.stream(stream):
            copy_pieces(pieces, self._mover, into_pages, self.step_tokens)
            if check and pieces.runs:
                dtype = self.groups[pieces.group].dtype
                blocks = (target if into_pages else source for target, source in pieces.pairs())
                found = torch.stack([total(block.view(dtype)).float() for block in blocks])
                sums = torch.empty(len(found), pin_memory=True)
                sums.copy_(found, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return CudaCopy(event, sums)

    def keep_pace(self, meanwhile: Callable[[], None]) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        self._layers.append(event)
        while len(self._layers) > LAYERS_AHEAD:
            oldest = self._layers.popleft()
            while not oldest.query():  # type: ignore[no-untyped-call]
                meanwhile()
                time.sleep(LOOK_S)

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        for region in self._pinned:
            _runtime().cudaHostUnregister(region.address)


def copy_pieces(pieces: CopyPieces, mover: Any, into_pages: bool, step_tokens: int) -> None:
    """Copies on the current stream: by `mover`, if it is not None and `kernel_programs` and the pieces' places allow
    it, else one by one."""
    source, target, runs = pieces.source, pieces.target, pieces.runs
    lengths = [length for _, _, length in runs]
    longest = max(lengths, default=0)
    programs = kernel_programs(
        pieces=len(runs), nbytes=sum(lengths), longest=longest, into_pages=into_pages, step_tokens=step_tokens
    )
    table = mover.as_table(source, target, runs) if mover is not None and programs else None
    if table is not None:
        mover.move(source, target, table, programs)
        return
    for to, from_ in pieces.pairs():
        to.copy_(from_, non_blocking=True)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _forget_error(device: torch.device) -> None:
    """Clears CUDA's error state. CUDA keeps the error of a call for whoever asks next, and torch, which asks after each
    launch, would blame that launch."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)

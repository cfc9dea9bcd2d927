"""Memory that nodes can reach: the caller's registered buffers, and a staging region that everything else goes through.

A node that was asked to read a put and gave no answer may still read, or begin to when it wakes. So every put shows a
*ticket*, a random number in the client's registered memory: the node reads the ticket after the blocks and seals
nothing when it has changed. The ticket is cleared before the memory is used for anything else, and so the memory is
free at once.
"""

from __future__ import annotations

import asyncio
import ctypes
import secrets
import struct
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvmesh.errors import DeadlinePassed, InvalidRequest, Overloaded, TransferError
from kvmesh.kvcache.segment_allocator import SegmentAllocator
from kvmesh.storeclient.arguments import whole
from kvmesh.storeclient.calls import ended, in_thread
from kvmesh.transfer import Region, TransferEngine

INLINE_COPY = 2 << 20  # larger copies go to a thread, so that the event loop can serve others
MAX_BYTES = (1 << 63) - 1
UNIT = 4096  # bytes of a unit of staging
TICKETS = 512  # puts under way at once
_TICKET = struct.Struct("<Q")
_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.argtypes, _new_bytes.restype = [ctypes.c_char_p, ctypes.c_ssize_t], ctypes.py_object
_address_of_bytes = ctypes.pythonapi.PyBytes_AsString
_address_of_bytes.argtypes, _address_of_bytes.restype = [ctypes.py_object], ctypes.c_void_p

Data = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Span:
    """Is part of a registered buffer."""

    region: Region
    view: memoryview
    start: int
    nbytes: int
    shared: bool = True  # nodes of this machine can map it

    @property
    def address(self) -> int:
        return self.region.address + self.start

    @property
    def offset(self) -> int:
        """The span's offset in the client's segment."""
        return self.region.base_offset + self.start

    @property
    def memory(self) -> memoryview:
        return self.view[self.start : self.start + self.nbytes]

    def part(self, start: int, nbytes: int) -> Span:
        assert start >= 0 and start + nbytes <= self.nbytes, f"{start}, {nbytes}: not within {self.nbytes} bytes"
        return Span(self.region, self.view, self.start + start, nbytes, self.shared)


class Buffer:
    """Is registered memory of the caller, until `ClientMemory.unregister` or the client's end."""

    def __init__(self, region: Region, view: memoryview, keep: object, shared: bool) -> None:
        self.region = region
        self.view = view  # writable bytes
        self.shared = shared
        self._keep = keep

    def __len__(self) -> int:
        return len(self.view)

    def span(self, start: int = 0, nbytes: int | None = None) -> Span:
        """Returns bytes [start, start + nbytes), by default to the end. Raises InvalidRequest when they are not within
        the buffer."""
        start = whole("start", start, 0, len(self))
        nbytes = len(self) - start if nbytes is None else whole("nbytes", nbytes, 1, MAX_BYTES)
        if not 0 <= start <= len(self) or not 0 < nbytes <= len(self) - start:
            raise InvalidRequest.of("span", (start, nbytes), f"not within a buffer of {len(self)} bytes")
        return Span(self.region, self.view, start, nbytes, self.shared)


@dataclass(eq=False, slots=True)
class Staged:
    """Is registered memory for one transfer, to be given back by `ClientMemory.give_back`."""

    span: Span
    own: Region | None = None  # memory of its own, where it is larger than the staging region


@dataclass(frozen=True, slots=True)
class Ticket:
    """Is a put's ticket: `value` stands at `offset` of the client's segment as long as the put is wanted."""

    offset: int
    value: int


class ClientMemory:
    """Manages all memory that the client's engine has registered. It belongs to the event loop."""

    def __init__(self, engine: TransferEngine, staging_bytes: int) -> None:
        self._engine = engine
        self._staging = _whole(engine.allocate(staging_bytes))
        self._units = SegmentAllocator(self._staging.nbytes // UNIT)
        self._waiting: deque[tuple[int, asyncio.Future[int]]] = deque()
        self._tickets = _whole(engine.allocate(TICKETS * _TICKET.size))
        self._slots = list(range(TICKETS))
        self._leaving: deque[Region] = deque()  # regions that were given back and may still be read
        self._letting_go: asyncio.Task[None] | None = None
        self._state = 1
        self._descriptor = (0, b"")

    # ── the caller's ─────────────────────────────────────────────────────────────────────────────

    def allocate(self, nbytes: int) -> Buffer:
        """Returns zeroed memory that nodes of this machine map and others read. Raises TransferError when there is not
        enough."""
        region = self._engine.allocate(nbytes)
        self._state += 1
        view = _whole(region).view[:nbytes]
        return Buffer(region, view, None, shared="shm" in self._engine.config.transports)

    def register(self, buffer: object) -> Buffer:
        """Registers the caller's own memory, which stays where it is. Raises TransferError when it is read-only, not
        contiguous, or not memory."""
        region = self._engine.register_memory(buffer)
        self._state += 1
        return Buffer(region, _whole(region).view, buffer, shared=False)

    def unregister(self, buffer: Buffer) -> None:
        """Ends a registration. Raises TransferError while something is read from the memory or into it, or when it is
        no buffer of this client."""
        if not isinstance(buffer, Buffer):
            raise InvalidRequest.of("buffer", buffer, "must be what allocate() or register() returned")
        self._engine.unregister_memory(buffer.region)
        self._state += 1

    @property
    def state(self) -> int:
        """A number that grows with every change of what is registered: a node must be shown the descriptor of this
        state or later."""
        return self._state

    @property
    def descriptor(self) -> bytes:
        if self._descriptor[0] != self._state:
            self._descriptor = (self._state, self._engine.local_descriptor().encode())
        return self._descriptor[1]

    # ── staging ──────────────────────────────────────────────────────────────────────────────────

    @property
    def staging_bytes(self) -> int:
        return self._staging.nbytes

    @property
    def staging_free(self) -> int:
        return self._units.free * UNIT

    async def stage(self, nbytes: int, deadline: float) -> Staged:
        """Returns room for so many bytes, in the order of asking. Raises DeadlinePassed when there is none until
        `deadline` (monotonic s)."""
        if nbytes > self.staging_bytes:
            region = await in_thread(partial(self._engine.allocate, nbytes), self._engine.unregister_memory)
            self._state += 1
            return Staged(_whole(region).part(0, nbytes), region)
        units = -(-nbytes // UNIT)
        first = None if self._waiting else self._units.allocate(units)
        if first is None:
            first = await self._wait(units, deadline)
        return Staged(self._staging.part(first * UNIT, nbytes))

    async def _wait(self, units: int, deadline: float) -> int:
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        entry = (units, turn)
        self._waiting.append(entry)
        try:
            await asyncio.wait({turn}, timeout=max(deadline - time.monotonic(), 0))
        except asyncio.CancelledError:
            if turn.done():
                self._units.release(turn.result())
            raise
        finally:
            if not turn.done():
                self._waiting.remove(entry)
            self._serve()
        if not turn.done():
            why = f"no room for {units * UNIT} bytes among {self.staging_bytes} of staging in time (staging_mb)"
            raise DeadlinePassed(why, field="staging_mb")
        return turn.result()

    def give_back(self, staged: Staged) -> None:
        """Takes staged memory back that nobody reads or writes any more."""
        if staged.own is not None:
            self._leaving.append(staged.own)
            if self._letting_go is None or self._letting_go.done():
                self._letting_go = asyncio.get_running_loop().create_task(self._let_go(), name="unregister")
            return
        self._units.release(staged.span.start // UNIT)
        self._serve()

    async def _let_go(self) -> None:
        """Unregisters memory in a thread, as a node that froze within its READ keeps it busy for seconds. What is still
        busy then is tried again with the next memory, and goes with the client at the latest."""
        for _ in range(len(self._leaving)):
            region = self._leaving.popleft()
            try:
                await in_thread(partial(self._engine.unregister_memory, region))
                self._state += 1
            except TransferError:
                self._leaving.append(region)

    async def close(self) -> None:
        """Waits for what still runs; the end of the engine frees the memory."""
        if self._letting_go is not None:
            await ended(self._letting_go)

    def _serve(self) -> None:
        while self._waiting:
            units, turn = self._waiting[0]
            first = self._units.allocate(units)
            if first is None:
                return
            self._waiting.popleft()
            turn.set_result(first)

    # ── tickets ──────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def ticket(self) -> Iterator[Ticket]:
        """Yields the ticket of one put, which is void when the block ends. Raises Overloaded when TICKETS puts are
        under way."""
        if not self._slots:
            raise Overloaded(f"{TICKETS} puts of this client are under way", retry_after_ms=100)
        slot = self._slots.pop()
        at, value = slot * _TICKET.size, secrets.randbits(64) or 1
        _TICKET.pack_into(self._tickets.view, at, value)
        try:
            yield Ticket(self._tickets.offset + at, value)
        finally:
            _TICKET.pack_into(self._tickets.view, at, 0)
            self._slots.append(slot)


def _whole(region: Region) -> Span:
    assert region.memory is not None, "host memory has a view"
    return Span(region, region.memory.cast("B"), 0, region.length)


async def copy(target: memoryview, source: Data) -> None:
    """Copies all of `source` into as many bytes of `target`; much of it in a thread, with the GIL released. When it is
    cancelled, nothing touches either of them once it has raised."""
    if len(target) <= INLINE_COPY:
        target[:] = source
    else:
        await in_thread(partial(_copy, target, source))


def bytes_of(memory: memoryview) -> bytes:
    """Returns a copy of `memory`. Much of it is copied with the GIL released, so that a thread that does so keeps
    nobody waiting."""
    if len(memory) <= INLINE_COPY:
        return bytes(memory)
    made: bytes = _new_bytes(None, len(memory))  # nobody else has it yet
    ctypes.memmove(_address_of_bytes(made), np.frombuffer(memory, np.uint8).ctypes.data, len(memory))
    return made


def _copy(target: memoryview, source: Data) -> None:
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


# ── what callers hand in ─────────────────────────────────────────────────────────────────────────────

Target = Buffer | Span
Source = Data | Buffer | Span


def source_of(one: Source) -> Data | Span:
    """Returns what a put reads. Raises InvalidRequest when it is empty, or no contiguous memory of plain values."""
    if isinstance(one, Buffer):
        return one.span()
    if isinstance(one, Span):
        return one
    try:
        view = memoryview(one)
    except (TypeError, ValueError, BufferError) as error:
        hint = "; of a tensor its .numpy()" if hasattr(one, "data_ptr") else ""
        why = f"must be bytes, or memory such as a numpy array's{hint} ({error})"
        raise InvalidRequest.of("data", type(one).__name__, why) from None
    if not view.c_contiguous:
        raise InvalidRequest.of("data", view.shape, "memory that is not contiguous")
    if not view.nbytes:
        raise InvalidRequest("data: a block has at least one byte, there are no empty ones", field="data")
    if "O" in view.format:
        raise InvalidRequest.of("data", type(one).__name__, "holds Python objects, not their bytes")
    try:
        return view.cast("B")
    except (TypeError, ValueError):  # a structured type cannot be cast
        return np.frombuffer(view, np.uint8).data


def memory_of(one: Data | Span) -> Data:
    return one.memory if isinstance(one, Span) else one


def target_of(one: Target) -> Span:
    """Returns where a get lands. Raises InvalidRequest when it is no registered memory."""
    if isinstance(one, Buffer):
        return one.span()
    if isinstance(one, Span):
        return one
    raise InvalidRequest.of("target", one, "must be registered memory: allocate(), register(), or a span of one")

"""The Transfer Engine's contract: bytes between registered memory regions of many processes.

    engine = TransferEngine(name, config)
    region = engine.allocate(nbytes, "cpu:0")       # or register_memory(buffer, location)
    engine.local_descriptor() ─▶ (any channel) ─▶ peer.open_segment(descriptor)
    batch = engine.allocate_batch(n); engine.submit(batch, [TransferRequest, ...])
    engine.status(batch, i);  await engine.wait(batch)

A *segment* is all registered memory of one engine, addressed by one 64-bit offset space: each region has
a `base_offset` in it. Writers are named by their engine's `name`, which holds the process incarnation,
so a restarted process is another peer.

**Windows and the fence** (DESIGN, "The fence"). Nobody writes into a segment uninvited: the target opens
a *window* (peer, handoff_epoch, ranges) and the transports take a slice only when it lies inside an open
window of that peer and epoch. `fence(peer, handoff_epoch)` closes it; when it returns, no byte of that
epoch can land any more. Reads need no window.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

import msgspec

BatchId = NewType("BatchId", int)


class Opcode(enum.Enum):
    __hash__ = object.__hash__  # members are singletons; Enum's own is written in Python

    READ = "read"  # remote → local
    WRITE = "write"  # local → remote


class TrafficClass(enum.IntEnum):
    """What a transfer is for. Lower values go first; each of the others has a small guaranteed share, so that none
    starves."""

    HANDOFF = 0  # a request waits for it
    PREFETCH = 1  # a prefix that a queued request will want
    BACKGROUND = 2  # replication, offload


class TransferState(enum.Enum):
    __hash__ = object.__hash__

    WAITING = "waiting"  # not posted yet
    PENDING = "pending"  # some slices posted
    COMPLETED = "completed"  # every slice acknowledged by the target, no other path can still carry one
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    FAILED = "failed"

    @property
    def final(self) -> bool:
        return self not in (TransferState.WAITING, TransferState.PENDING)


class TransferRequest(msgspec.Struct, frozen=True, gc=False):
    """One contiguous copy. `local_address` is a virtual address inside a registered region, `remote_offset` an offset
    in the remote segment, `length` is in bytes. `handoff_epoch` names the target's window (for writes; 0 for reads).
    With `verify`, the checksum of the receiver's memory is compared with the sender's after landing; a slice that
    differs is sent again, and fails with cause "checksum" if it goes on differing."""

    opcode: Opcode
    local_address: int
    segment: str
    remote_offset: int
    length: int
    handoff_epoch: int = 0
    traffic_class: int = TrafficClass.HANDOFF
    verify: bool = False


class TransferStatus(msgspec.Struct, frozen=True, gc=False):
    """The state of one request. `drained` says that none of its bytes can still land: always true for COMPLETED and
    CANCELLED, false for FAILED and TIMEOUT where the target has not confirmed that the last path is dead; then only the
    target's fence makes the memory safe."""

    state: TransferState
    bytes_done: int
    cause: str = ""
    drained: bool = True


@dataclass(frozen=True, slots=True)
class Carried:
    """How the bytes of a batch travelled: `rails` are pairs (rail, bytes acknowledged on it), most bytes first;
    `resent` counts the frames that were sent again."""

    rails: tuple[tuple[str, int], ...] = ()
    resent: int = 0

    def __add__(self, other: Carried) -> Carried:
        total: dict[str, int] = {}
        for rail, nbytes in (*self.rails, *other.rails):
            total[rail] = total.get(rail, 0) + nbytes
        return Carried(tuple(sorted(total.items(), key=lambda item: -item[1])), self.resent + other.resent)


@dataclass(frozen=True, slots=True)
class Region:
    """A range of registered memory. `address` is its address in this process, `base_offset` its offset in the segment,
    `length` is in bytes. `kept` says that it holds the bytes that an earlier process left in its file."""

    address: int
    length: int
    base_offset: int
    location: str  # "cpu:0", "cuda:1"
    memory: memoryview | None  # None for memory that the engine does not own (device memory)
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Range:
    offset: int  # in the segment
    length: int


@dataclass(frozen=True, slots=True)
class Notification:
    """What a peer's `notify` delivered: the peer's engine name, the epoch, and a payload of at most 32 KiB."""

    peer: str
    handoff_epoch: int
    payload: bytes


Ranges = Sequence[Range]

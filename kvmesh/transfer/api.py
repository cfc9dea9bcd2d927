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
    """Lower goes first; each of the others keeps a small share of its own, so that none starves."""

    HANDOFF = 0  # somebody waits for it
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
    """One contiguous copy. `local_address` is a virtual address inside a registered region; `remote_offset`
    an offset in the remote segment. `handoff_epoch` names the target's window (writes only; 0 for reads).
    `verify`: once landed, the checksum of the receiver's memory is compared with the sender's; a slice that differs
    is sent again, and FAILED with cause "checksum" if it goes on differing."""

    opcode: Opcode
    local_address: int
    segment: str
    remote_offset: int
    length: int
    handoff_epoch: int = 0
    traffic_class: int = TrafficClass.HANDOFF
    verify: bool = False


class TransferStatus(msgspec.Struct, frozen=True, gc=False):
    """`drained`: nothing of this request can still be on its way. Always true for COMPLETED and CANCELLED;
    false for a FAILED or TIMEOUT whose last path the target has not confirmed to be dead: it must fence."""

    state: TransferState
    bytes_done: int
    cause: str = ""
    drained: bool = True


@dataclass(frozen=True, slots=True)
class Carried:
    """How the bytes of something went: (rail, bytes acknowledged on it), most first, and how many frames had to be sent
    again."""

    rails: tuple[tuple[str, int], ...] = ()
    resent: int = 0

    def __add__(self, other: Carried) -> Carried:
        total: dict[str, int] = {}
        for rail, nbytes in (*self.rails, *other.rails):
            total[rail] = total.get(rail, 0) + nbytes
        return Carried(tuple(sorted(total.items(), key=lambda item: -item[1])), self.resent + other.resent)


@dataclass(frozen=True, slots=True)
class Region:
    """Registered memory. `address` is where this process sees it, `base_offset` where the segment does. `kept`: its
    bytes are those that an earlier process left in its file."""

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
    """What `notify` delivered: the sender's engine name, its epoch, a small payload."""

    peer: str
    handoff_epoch: int
    payload: bytes


Ranges = Sequence[Range]

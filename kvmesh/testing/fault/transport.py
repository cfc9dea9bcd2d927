"""The fault transport: wraps any transport at the writer's or reader's side and makes its frames misfare. For tests.

    engine ─▶ FaultTransport ─▶ rdma, shm or tcp
                  ├ delay      posted `delay_ms` (and up to `jitter_ms` more) later
                  ├ bandwidth  posted when its bytes have passed a link of `bandwidth_mbps`, one link a NIC
                  ├ drop       never posted, never answered; cut_to: the same for everything that matches
                  ├ cut_from   posted, lands, but its answer is lost
                  ├ corrupt    one byte of it arrives changed (the local memory of a write stays as it is)
                  ├ duplicate  posted twice; answered when both are
                  ├ freeze     held, as in a stopped process or a stuck network, until `thaw`: then it is posted late
                  └ down       never posted; lost, settled, and the rail is said to be down

Rules are JSON in `EngineConfig.fault`: {"seed": 7, "rules": [{"kind": "drop", "peer": "decode-*", "op": "write",
"after": 3, "count": 1}]}, or `engine.fault.add(Rule(...))` of an engine whose config says fault="{}" at least
(`rules.Rule` has the fields, docs/transfer.md examples). A frozen or delayed frame that its engine gives up is
*lost and not settled*: it still lands late, unless the target fences. That is the late packet that fences are for. A
frame that waits for its turn on a slow link has not left: it can be taken back.
"""

from __future__ import annotations

import heapq
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import count

import msgspec

from kvmesh.errors import TransferError
from kvmesh.testing.fault.rules import Operation, Rule, Rules, Script, Strike
from kvmesh.transfer import memory
from kvmesh.transfer.segment import LocalRegion, NicInfo, RegionInfo, SegmentDescriptor
from kvmesh.transfer.transports.base import Frame, FrameKind, Rail, Transport, TransportHost

# Things to do later, for the fault transport.


class DelayThread:
    """Does things later, on a thread of its own that starts with the first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def after(self, wait_s: float, act: Callable[[], None]) -> None:
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + wait_s, next(self._order), act))
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="kvmesh-fault", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """What is not due yet is not done any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._due or self._due[0][0] > time.monotonic()):
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                if self._closed:
                    return
                _, _, act = heapq.heappop(self._due)
            act()


log = logging.getLogger(__name__)

_TRACELESS = (FrameKind.READ, FrameKind.CHECKSUM)  # nothing of them can land at the target


class FaultControl:
    """The rules of one engine, and its frozen frames. Thread-safe; changes take effect with the next frame."""

    def __init__(self, script: str) -> None:
        parsed = Script.parse(script)
        self.changed = threading.Condition()
        self.random = random.Random(parsed.seed)
        self._rules = Rules(parsed)
        self._held: list[_Flight] = []

    def add(self, rule: Rule) -> None:
        with self.changed:
            self._rules.add(rule)

    def remove(self, rule: Rule) -> bool:
        """The first rule that equals it; false when there is none."""
        with self.changed:
            return self._rules.remove(rule)

    def load(self, script: str) -> None:
        """Replaces all rules by those of a script; what is frozen stays so until `thaw`. TransferError when it is
        malformed, and nothing has changed then."""
        parsed = Script.parse(script)
        with self.changed:
            self._rules.load(parsed)

    def clear(self) -> None:
        """Forgets all rules; what is frozen stays so until `thaw`."""
        self.load("{}")

    def rules(self) -> list[Rule]:
        with self.changed:
            return self._rules.all()

    def freeze(self, peer: str = "*", op: Operation = "*", nic: str = "*") -> None:
        """Holds every frame to these segments from now on."""
        self.add(Rule(kind="freeze", peer=peer, op=op, nic=nic))

    def thaw(self, peer: str = "*") -> int:
        """Removes freezes of exactly `peer` (all for "*") and posts what was held; returns how many frames."""
        with self.changed:
            self._rules.remove_freezes(peer)
            freed = [f for f in self._held if fnmatchcase(f.parent.link.name, peer)]
            self._held = [f for f in self._held if f not in freed]
        for flight in freed:
            flight.launch()
        return len(freed)

    def wait_held(self, frames: int, timeout_s: float) -> bool:
        """Until so many frames are frozen."""
        with self.changed:
            return self.changed.wait_for(lambda: len(self._held) >= frames, timeout_s)

    # ── for the engine and the transport ─────────────────────────────────────────────────────────────────────────

    def wrap(self, transport: Transport, host: TransportHost) -> FaultTransport:
        return FaultTransport(transport, self, host)

    def strike(self, transport: str, frame: Frame) -> Strike:
        with self.changed:
            return self._rules.strike(transport, frame, time.monotonic())

    def is_down(self, transport: str, frame: Frame) -> bool:
        with self.changed:
            return self._rules.is_down(transport, frame)

    def hold(self, flight: _Flight) -> None:
        with self.changed:
            self._held.append(flight)
            self.changed.notify_all()

    def drop_held(self, transport: FaultTransport, segment: str | None, rail: Rail | None) -> None:
        with self.changed:
            self._held = [f for f in self._held if f.transport is not transport or not f.on(segment, rail)]

    def flip(self, view: memoryview) -> None:
        """Changes one bit somewhere in it."""
        with self.changed:
            at = self.random.randrange(len(view))
        view[at] ^= 0x40


class _Flight:
    """One frame of the engine and the frames really posted for it. Owner of the latter."""

    def __init__(self, transport: FaultTransport, parent: Frame, strike: Strike) -> None:
        self.kinds = kinds = strike.kinds
        self.transport = transport
        self.parent = parent
        self.copies = 2 if "duplicate" in kinds else 1
        self.queued = "bandwidth" in kinds and not kinds & {"delay", "freeze"}  # not posted: has not left this host
        self.void = False  # must not be posted any more
        self.abandoned = False  # its engine waits no longer
        self.posted: list[Frame] = []
        self.answers = 0
        self.settled = True
        self.down = False
        self.lost_cause: str | None = None
        self.refused: Sequence[int] = ()
        self.cause = ""
        self.scratch: LocalRegion | None = None

    def on(self, segment: str | None, rail: Rail | None) -> bool:
        """None: any."""
        return segment in (None, self.parent.link.name) and rail in (None, self.parent.rail)

    def launch(self) -> None:
        """Posts it for real."""
        frame, transport = self.parent, self.transport
        if not self.abandoned and transport.control.is_down(transport.name, frame):
            transport.fail(self, "link down (fault)", down=True)
            return
        source, parts = frame.source, frame.parts
        if "corrupt" in self.kinds and frame.kind is FrameKind.WRITE and not self.void:
            self.scratch = source = transport.corrupted(frame)
            at, parts = source.address, []
            for slot, _, offset, length in frame.parts:
                parts.append((slot, at, offset, length))
                at += length
        children = [
            msgspec.structs.replace(frame, owner=self, rail=transport.inside(frame.rail), parts=parts, source=source)
            for _ in range(self.copies)
        ]
        with transport.lock:
            if not self.void:
                self.posted = children
        if not self.posted:
            if self.scratch is not None:
                transport.drop_scratch(self.scratch)
            return
        for child in children:
            transport.inner.post(child)

    def frame_done(self, frame: Frame, refused: Sequence[int], cause: str) -> None:
        self.refused, self.cause = refused, cause
        self.parent.sums = frame.sums
        self._answered()

    def frame_lost(self, frame: Frame, cause: str, *, settled: bool, down: bool) -> None:
        self.lost_cause, self.settled, self.down = cause, self.settled and settled, down
        self._answered()

    def _answered(self) -> None:
        with self.transport.lock:
            self.answers += 1
            if self.answers < self.copies:
                return
            abandoned = self.abandoned
        if self.scratch is not None:
            self.transport.drop_scratch(self.scratch)
        if abandoned or ("cut_from" in self.kinds and self.lost_cause is None):
            return  # until it expires
        self.transport.end(self)
        if self.lost_cause is not None:
            self.parent.lost(self.lost_cause, settled=self.settled, down=self.down)
        else:
            if "corrupt" in self.kinds and not self.refused:
                self._corrupt_answer()
            self.parent.done(self.refused, self.cause)

    def _corrupt_answer(self) -> None:
        frame = self.parent
        if frame.kind is FrameKind.READ:
            _, address, _, length = frame.parts[0]
            self.transport.control.flip(memory.foreign_view(address, length))
        elif frame.sums:
            frame.sums = (frame.sums[0] ^ 1, *frame.sums[1:])


class FaultTransport(Transport):
    """Stands for `inner` under its name."""

    def __init__(self, inner: Transport, control: FaultControl, host: TransportHost) -> None:
        self.inner = inner
        self.control = control
        self.host = host
        self.limits = inner.limits
        self.device_memory = inner.device_memory
        self.lock = threading.Lock()
        self._flights: dict[int, _Flight] = {}
        self._clockwork = DelayThread()

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.inner.name

    def start(self) -> None:
        self.inner.start()

    def endpoint(self) -> dict[str, str]:
        return self.inner.endpoint()

    def reaches(self, descriptor: SegmentDescriptor) -> bool:
        return self.inner.reaches(descriptor)

    def nics(self) -> tuple[NicInfo, ...]:
        return self.inner.nics()

    def rails(self, descriptor: SegmentDescriptor) -> tuple[Rail, ...]:
        return tuple(replace(rail, transport=self) for rail in self.inner.rails(descriptor))

    def inside(self, rail: Rail) -> Rail:
        """The same rail of the wrapped transport."""
        return replace(rail, transport=self.inner)

    def carries(self, kind: FrameKind, local: LocalRegion, remote: RegionInfo) -> bool:
        return self.inner.carries(kind, local, remote)

    def registered(self, region: LocalRegion) -> None:
        self.inner.registered(region)

    def unregistered(self, region: LocalRegion) -> None:
        self.inner.unregistered(region)

    def fence(self, peer: str, epoch: int) -> None:
        self.inner.fence(peer, epoch)

    # ── frames ────────────────────────────────────────────────────────────────────────────────────

    def post(self, frame: Frame) -> None:
        strike = self.control.strike(self.name, frame)
        kinds, flight = strike.kinds, _Flight(self, frame, strike)
        with self.lock:
            self._flights[frame.serial] = flight
        for kind in kinds:
            self.host.count(f"fault.{kind}")
        if "down" in kinds:
            self._clockwork.after(0, lambda: self.fail(flight, "link down (fault)", down=True))
        elif "freeze" in kinds:
            self.control.hold(flight)
        elif kinds & {"drop", "cut_to"}:
            flight.void = True
        elif strike.wait_s > 0:
            self._clockwork.after(strike.wait_s, flight.launch)
        else:
            flight.launch()

    def fail(self, flight: _Flight, cause: str, *, down: bool) -> None:
        """Of a flight that was not posted: nothing of it will land."""
        with self.lock:
            if flight.void or flight.posted:
                return
            flight.void = True
        self.end(flight)
        flight.parent.lost(cause, settled=True, down=down)

    def end(self, flight: _Flight) -> None:
        with self.lock:
            self._flights.pop(flight.parent.serial, None)

    def recall(self, frame: Frame) -> bool:
        with self.lock:
            flight = self._flights.get(frame.serial)
            if flight is None:
                return False
            posted = list(flight.posted)
            if not posted and flight.queued and not flight.void:
                flight.void = True
                del self._flights[frame.serial]
                return True
        if len(posted) != 1 or not self.inner.recall(posted[0]):
            return False
        self.end(flight)
        return True

    def expire(self, frame: Frame, idle_s: float) -> None:
        with self.lock:
            flight = self._flights.get(frame.serial)
            if flight is None or (flight.queued and not flight.posted and idle_s > 0):
                return  # a slow link is not a dead one
            under_way = flight.posted and flight.answers < flight.copies
            if not under_way:
                nothing_left = flight.void or bool(flight.posted) or flight.queued or frame.kind in _TRACELESS
                flight.abandoned = True
                flight.void = flight.void or flight.queued or frame.kind in _TRACELESS
        if under_way:
            for child in flight.posted:
                self.inner.expire(child, idle_s)
        else:
            self.end(flight)
            frame.lost("no answer", settled=nothing_left)

    def forget(self, segment: str, cause: str, rail: Rail | None = None) -> None:
        flights = self._abandon(segment, rail)
        if flights:
            self._clockwork.after(0, lambda: self._report(flights, cause))
        self.inner.forget(segment, cause, None if rail is None else self.inside(rail))

    def idle(self, segment: str, rail: Rail) -> bool:
        with self.lock:
            busy = any(f.parent.link.name == segment and f.parent.rail == rail for f in self._flights.values())
        return not busy and self.inner.idle(segment, self.inside(rail))

    def close(self, timeout_s: float) -> None:
        self._clockwork.close(timeout_s)
        self._report(self._abandon(None, None), "engine closed")
        self.inner.close(timeout_s)

    def _abandon(self, segment: str | None, rail: Rail | None) -> list[_Flight]:
        """Takes away the frames that are nowhere in `inner`."""
        self.control.drop_held(self, segment, rail)
        with self.lock:
            flights = [f for f in self._flights.values() if not f.posted and not f.abandoned and f.on(segment, rail)]
            for flight in flights:
                flight.abandoned = True
                flight.void = flight.void or flight.parent.kind in _TRACELESS or flight.queued
                del self._flights[flight.parent.serial]
        return flights

    @staticmethod
    def _report(flights: list[_Flight], cause: str) -> None:
        for flight in flights:
            flight.parent.lost(cause, settled=flight.void)

    # ── memory of corrupted writes ────────────────────────────────────────────────────────────────

    def corrupted(self, frame: Frame) -> LocalRegion:
        """A copy of what the frame writes, with one bit changed: a region of its own until it is answered."""
        mapping, fd = memory.allocate(frame.nbytes, "kvmesh:fault", shared=frame.local.fd >= 0)
        scratch = self.host.segment.add(mapping.address, mapping.length, "cpu:0", mapping.view, mapping, fd)
        at = 0
        for _, address, _, length in frame.parts:
            start = address - frame.local.address
            mapping.view[at : at + length] = frame.local.view[start : start + length]
            at += length
        self.control.flip(mapping.view[: frame.nbytes])
        self.inner.registered(scratch)
        return scratch

    def drop_scratch(self, scratch: LocalRegion) -> None:
        try:
            self.host.segment.remove(scratch, 5.0)
        except TransferError as err:
            log.warning("memory of a corrupted write stays: %s", err)
            return
        self.inner.unregistered(scratch)

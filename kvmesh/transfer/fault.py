"""The fault transport: wraps any transport at the writer's or reader's side and makes its frames misfare. For tests.

    engine ─▶ FaultTransport ─▶ shm or tcp
                  ├ delay      posted `delay_ms` later
                  ├ drop       never posted, never answered; cut_to: the same for everything that matches
                  ├ cut_from   posted, lands, but its answer is lost
                  ├ corrupt    one byte of it arrives changed (the local memory of a write stays as it is)
                  ├ duplicate  posted twice; answered when both are
                  └ freeze     held, as in a stopped process or a stuck network, until `thaw`: then it is posted late

Rules are JSON in `EngineConfig.fault`: {"seed": 7, "rules": [{"kind": "drop", "peer": "decode-*", "op": "write",
"after": 3, "count": 1}]}, or `engine.fault.add(Rule(...))` of an engine whose config says fault="{}" at least. Chance
(`probability`) is drawn from `seed`. A held frame that its engine gives up is *lost and not settled*: it still lands
late when thawed, unless the target fences. That is the late packet that fences are for.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Literal

import msgspec

from kvmesh.rpc.errors import TransferError
from kvmesh.transfer import memory
from kvmesh.transfer.segment import LocalRegion, NicInfo, RegionInfo, SegmentDescriptor
from kvmesh.transfer.transport import Frame, Kind, Rail, Transport, TransportHost


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What befalls frames to segments whose name matches `peer`: the first `after` that match are spared, then at
    most `count` (0 = all) are hit."""

    kind: Literal["delay", "drop", "cut_to", "cut_from", "corrupt", "duplicate", "freeze"]
    peer: str = "*"
    transport: str = "*"
    op: Literal["*", "write", "read", "notify"] = "*"
    probability: float = 1.0
    after: int = 0
    count: int = 0
    delay_ms: int = 0


class _Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seed: int = 0
    rules: tuple[Rule, ...] = ()


class FaultControl:
    """The rules of one engine, and its frozen frames. Thread-safe."""

    def __init__(self, script: str) -> None:
        try:
            parsed = msgspec.json.decode(script or "{}", type=_Script)
        except msgspec.MsgspecError as err:
            raise TransferError(f"fault={script[:80]!r}: {err}", field="fault") from err
        self.changed = threading.Condition()
        self.random = random.Random(parsed.seed)
        self._rules = list(parsed.rules)
        self._seen: dict[int, int] = {}
        self._held: list[_Flight] = []

    def add(self, rule: Rule) -> None:
        with self.changed:
            self._rules.append(rule)

    def clear(self) -> None:
        """Forgets all rules; what is frozen stays so until `thaw`."""
        with self.changed:
            self._rules.clear()
            self._seen.clear()

    def freeze(self, peer: str = "*", op: Literal["*", "write", "read", "notify"] = "*") -> None:
        """Holds every frame to these segments from now on."""
        self.add(Rule(kind="freeze", peer=peer, op=op))

    def thaw(self, peer: str = "*") -> int:
        """Removes freezes of exactly `peer` (all for "*") and posts what was held; returns how many frames."""
        with self.changed:
            self._rules = [r for r in self._rules if r.kind != "freeze" or peer not in ("*", r.peer)]
            self._seen.clear()
            freed = [f for f in self._held if fnmatchcase(f.parent.lane.name, peer)]
            self._held = [f for f in self._held if f not in freed]
        for flight in freed:
            flight.launch()
        return len(freed)

    def wait_held(self, frames: int, timeout_s: float) -> bool:
        """Until so many frames are frozen."""
        with self.changed:
            return self.changed.wait_for(lambda: len(self._held) >= frames, timeout_s)

    def hits(self, transport: str, frame: Frame) -> list[Rule]:
        found = []
        with self.changed:
            for i, rule in enumerate(self._rules):
                if (
                    fnmatchcase(frame.lane.name, rule.peer)
                    and fnmatchcase(transport, rule.transport)
                    and rule.op in ("*", frame.kind.name.lower())
                ):
                    seen = self._seen[i] = self._seen.get(i, 0) + 1
                    in_turn = seen > rule.after and (rule.count == 0 or seen <= rule.after + rule.count)
                    if in_turn and (rule.probability >= 1.0 or self.random.random() < rule.probability):
                        found.append(rule)
        return found

    def hold(self, flight: _Flight) -> None:
        with self.changed:
            self._held.append(flight)
            self.changed.notify_all()

    def drop_held(self, transport: FaultTransport, segment: str | None, rail: Rail | None) -> None:
        with self.changed:
            self._held = [f for f in self._held if f.transport is not transport or not f.on(segment, rail)]


class _Flight:
    """One frame of the engine and the frames really posted for it. Owner of the latter."""

    def __init__(self, transport: FaultTransport, parent: Frame, rules: list[Rule]) -> None:
        self.kinds = kinds = {r.kind for r in rules}
        self.transport = transport
        self.parent = parent
        self.deaf = "cut_from" in kinds
        self.corrupt = "corrupt" in kinds
        self.copies = 2 if "duplicate" in kinds else 1
        self.posted: list[Frame] = []
        self.answers = 0
        self.settled = True
        self.down = False
        self.lost_cause: str | None = None
        self.refused: Sequence[int] = ()
        self.cause = ""
        self.abandoned = False
        self.scratch: LocalRegion | None = None

    def on(self, segment: str | None, rail: Rail | None) -> bool:
        """None: any."""
        return segment in (None, self.parent.lane.name) and rail in (None, self.parent.rail)

    def launch(self) -> None:
        """Posts it for real."""
        frame = self.parent
        source = frame.source
        if self.corrupt and frame.kind is Kind.WRITE:
            self.scratch = source = self._corrupted(frame)
            at, parts = source.address, []
            for slot, _, offset, length in frame.parts:
                parts.append((slot, at, offset, length))
                at += length
        else:
            parts = frame.parts
        self.posted = [
            replace(frame, owner=self, rail=self.transport.inside(frame.rail), parts=parts, source=source)
            for _ in range(self.copies)
        ]
        for child in self.posted:
            self.transport.inner.post(child)

    def frame_done(self, frame: Frame, refused: Sequence[int], cause: str) -> None:
        self.refused, self.cause = refused, cause
        self._answered()

    def frame_lost(self, frame: Frame, cause: str, *, settled: bool, down: bool) -> None:
        self.lost_cause, self.settled, self.down = cause, self.settled and settled, down
        self._answered()

    def _answered(self) -> None:
        with self.transport.lock:
            self.answers += 1
            if self.answers < self.copies or self.abandoned:
                return
        if self.scratch is not None:
            self.transport.host.segment.remove(self.scratch, 5.0)
        if self.deaf and self.lost_cause is None:
            return  # until it expires
        self.transport.end(self)
        if self.lost_cause is not None:
            self.parent.lost(self.lost_cause, settled=self.settled, down=self.down)
        else:
            if self.corrupt and self.parent.kind is Kind.READ:
                _, address, _, length = self.parent.parts[0]
                self._flip(memory.foreign_view(address, length))
            self.parent.done(self.refused, self.cause)

    def _corrupted(self, frame: Frame) -> LocalRegion:
        mapping, fd = memory.allocate(frame.nbytes, "kvmesh:fault", shared=frame.local.fd >= 0)
        segment = self.transport.host.segment
        scratch = segment.add(mapping.address, mapping.length, "cpu:0", mapping.view, mapping, fd)
        at = 0
        for _, address, _, length in frame.parts:
            start = address - frame.local.address
            mapping.view[at : at + length] = frame.local.view[start : start + length]
            at += length
        self._flip(mapping.view[: frame.nbytes])
        return scratch

    def _flip(self, view: memoryview) -> None:
        with self.transport.control.changed:
            at = self.transport.control.random.randrange(len(view))
        view[at] ^= 0x40


class FaultTransport(Transport):
    """Stands for `inner` under its name."""

    def __init__(self, inner: Transport, control: FaultControl, host: TransportHost) -> None:
        self.inner = inner
        self.control = control
        self.host = host
        self.limits = inner.limits
        self.lock = threading.Lock()
        self._flights: dict[int, _Flight] = {}
        self._timers: set[threading.Timer] = set()

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

    def carries(self, kind: Kind, local: LocalRegion, remote: RegionInfo) -> bool:
        return self.inner.carries(kind, local, remote)

    def post(self, frame: Frame) -> None:
        rules = self.control.hits(self.name, frame)
        flight = _Flight(self, frame, rules)
        with self.lock:
            self._flights[frame.serial] = flight
        for rule in rules:
            self.host.count(f"fault.{rule.kind}")
        kinds = {r.kind for r in rules}
        if "freeze" in kinds:
            self.control.hold(flight)
        elif kinds & {"drop", "cut_to"}:
            return
        elif "delay" in kinds:
            self._later(flight, max(r.delay_ms for r in rules) / 1000)
        else:
            flight.launch()

    def _later(self, flight: _Flight, delay_s: float) -> None:
        def fire() -> None:
            with self.lock:
                self._timers.discard(timer)
            flight.launch()

        timer = threading.Timer(delay_s, fire)
        timer.daemon = True
        with self.lock:
            self._timers.add(timer)
        timer.start()

    def end(self, flight: _Flight) -> None:
        with self.lock:
            self._flights.pop(flight.parent.serial, None)

    def recall(self, frame: Frame) -> bool:
        with self.lock:
            flight = self._flights.get(frame.serial)
        if flight is None or len(flight.posted) != 1 or not self.inner.recall(flight.posted[0]):
            return False
        self.end(flight)
        return True

    def expire(self, frame: Frame, idle_s: float) -> None:
        with self.lock:
            flight = self._flights.get(frame.serial)
            if flight is None:
                return
            answered = flight.posted and flight.answers >= flight.copies
            dropped = not flight.posted and bool({"drop", "cut_to"} & flight.kinds)
            flight.abandoned = not flight.posted or bool(answered)
        if flight.abandoned:
            self.end(flight)
            frame.lost("no answer", settled=bool(answered) or dropped or frame.kind is Kind.READ)
        else:
            for child in flight.posted:
                self.inner.expire(child, idle_s)

    def forget(self, segment: str, cause: str, rail: Rail | None = None) -> None:
        self._abandon(segment, cause, rail)
        self.inner.forget(segment, cause, None if rail is None else self.inside(rail))

    def idle(self, segment: str, rail: Rail) -> bool:
        with self.lock:
            busy = any(f.parent.lane.name == segment and f.parent.rail == rail for f in self._flights.values())
        return not busy and self.inner.idle(segment, self.inside(rail))

    def close(self, timeout_s: float) -> None:
        with self.lock:
            timers, self._timers = list(self._timers), set()
        for timer in timers:
            timer.cancel()
        self._abandon(None, "engine closed")
        self.inner.close(timeout_s)
        for timer in timers:
            timer.join(timeout_s)

    def fence(self, peer: str, epoch: int) -> None:
        self.inner.fence(peer, epoch)

    def _abandon(self, segment: str | None, cause: str, rail: Rail | None = None) -> None:
        """Ends frames that are nowhere in `inner`."""
        self.control.drop_held(self, segment, rail)
        with self.lock:
            flights = [f for f in self._flights.values() if not f.posted and not f.abandoned and f.on(segment, rail)]
            for flight in flights:
                flight.abandoned = True
        for flight in flights:
            self.end(flight)
            flight.parent.lost(cause, settled=False)

"""The script of the fault transport: which frames are struck, by what, and whose turn it is. No I/O, no threads.

`now` is an argument (seconds of any monotonic clock); chance is drawn from the script's seed, by each rule from a
generator of its own, so that a rule strikes the same turns whatever the other rules do.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

import msgspec

from kvmesh.errors import TransferError

if TYPE_CHECKING:
    from kvmesh.transfer.transports.base import Frame

FaultKind = Literal[
    "delay", "bandwidth", "drop", "cut_to", "cut_from", "corrupt", "duplicate", "freeze", "down"
]  # fmt: skip
Operation = Literal["*", "write", "read", "notify", "checksum"]


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What befalls the frames that match all of `peer` (the segment's name), `transport`, `nic` (this host's end of
    the rail), `remote_nic` (the peer's) and `op`; names are shell patterns. The first `after` that match are spared,
    then at most `count` (0 = all) are struck, each with `probability`. TransferError when a number is out of range."""

    kind: FaultKind
    peer: str = "*"
    transport: str = "*"
    nic: str = "*"
    remote_nic: str = "*"
    op: Operation = "*"
    probability: float = 1.0
    after: int = 0
    count: int = 0
    delay_ms: float = 0.0
    jitter_ms: float = 0.0  # on top of delay_ms, evenly spread over 0..jitter_ms
    bandwidth_mbps: float = 0.0  # megabits a second, of each NIC of this host by itself

    def __post_init__(self) -> None:
        for key in ("after", "count", "delay_ms", "jitter_ms", "bandwidth_mbps"):
            if not getattr(self, key) >= 0:
                raise TransferError(f"fault rule: {key}={getattr(self, key)!r}: must not be negative", field="fault")
        if not 0 <= self.probability <= 1:
            raise TransferError(f"fault rule: probability={self.probability!r}: not in 0..1", field="fault")
        if (self.kind == "bandwidth") != (self.bandwidth_mbps > 0):
            raise TransferError(
                f"fault rule: bandwidth_mbps={self.bandwidth_mbps!r}: kind {self.kind!r}"
                + (" needs it" if self.kind == "bandwidth" else " has no use for it"),
                field="fault",
            )

    def matches(self, transport: str, frame: Frame) -> bool:
        return (
            fnmatchcase(frame.link.name, self.peer)
            and fnmatchcase(transport, self.transport)
            and fnmatchcase(frame.rail.local, self.nic)
            and fnmatchcase(frame.rail.remote, self.remote_nic)
            and self.op in ("*", frame.kind.name.lower())
        )


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seed: int = 0
    rules: tuple[Rule, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Script:
        """TransferError when it is not such JSON."""
        try:
            return msgspec.json.decode(text or "{}", type=cls)
        except msgspec.MsgspecError as err:
            raise TransferError(f"fault={text[:80]!r}: {err}", field="fault") from err


@dataclass(frozen=True, slots=True)
class Strike:
    """What befalls one frame: `wait_s` before it leaves, of which the first part is its turn on a slow link."""

    kinds: frozenset[FaultKind]
    wait_s: float = 0.0


@dataclass(eq=False, slots=True)
class _Active:
    rule: Rule
    random: random.Random
    seen: int = 0
    free_at: dict[tuple[str, str], float] = field(default_factory=dict)  # (transport, NIC): its link is idle from then


class Rules:
    """The rules in force. Not thread-safe."""

    def __init__(self, script: Script) -> None:
        self._active: list[_Active] = []
        self._added = 0
        self._seed = script.seed
        self.load(script)

    def load(self, script: Script) -> None:
        """Replaces all rules; their turns are counted from now."""
        self._active, self._added, self._seed = [], 0, script.seed
        for rule in script.rules:
            self.add(rule)

    def add(self, rule: Rule) -> None:
        self._active.append(_Active(rule, random.Random(f"{self._seed}/{self._added}")))
        self._added += 1

    def remove(self, rule: Rule) -> bool:
        """The first that equals it; false when there is none."""
        for active in self._active:
            if active.rule == rule:
                self._active.remove(active)
                return True
        return False

    def remove_freezes(self, peer: str) -> None:
        self._active = [a for a in self._active if a.rule.kind != "freeze" or peer not in ("*", a.rule.peer)]

    def all(self) -> list[Rule]:
        return [active.rule for active in self._active]

    def strike(self, transport: str, frame: Frame, now: float) -> Strike:
        """Counts the frame against every rule that it matches."""
        kinds: set[FaultKind] = set()
        link_s = delay_s = 0.0
        for active in self._active:
            rule = active.rule
            if not rule.matches(transport, frame):
                continue
            active.seen += 1
            in_turn = active.seen > rule.after and (rule.count == 0 or active.seen <= rule.after + rule.count)
            if not in_turn or (rule.probability < 1.0 and active.random.random() >= rule.probability):
                continue
            kinds.add(rule.kind)
            if rule.kind == "bandwidth":
                nic = (transport, frame.rail.local)
                start = max(now, active.free_at.get(nic, 0.0))
                active.free_at[nic] = start + frame.nbytes * 8 / (rule.bandwidth_mbps * 1e6)
                link_s = max(link_s, active.free_at[nic] - now)
            elif rule.kind == "delay":
                delay_s = max(delay_s, (rule.delay_ms + rule.jitter_ms * active.random.random()) / 1000)
        return Strike(frozenset(kinds), link_s + delay_s)

    def is_down(self, transport: str, frame: Frame) -> bool:
        """Whether a rule without turns or chance says that this rail is down, without counting."""
        return any(
            a.rule.kind == "down"
            and a.rule.probability >= 1.0
            and a.rule.after == a.rule.count == 0
            and a.rule.matches(transport, frame)
            for a in self._active
        )

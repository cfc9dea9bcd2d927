"""What the store master has reported about living members."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvmesh.services.conductor.domain import Life, Member

MAX_GONE = 4096


class Members:
    """What the store master says about its members, over one stream after another. An instance that the master does not
    mention may have registered with the conductor first, so only dead ones get no work. Blocks, however, are fetched
    from known members alone."""

    def __init__(self, grace_s: float) -> None:
        """`grace_s` is how many seconds the members of a restarted master, which has forgotten them, count as
        they did."""
        self.grace_s = grace_s
        self._master: int | None = None
        self._connected = False
        self._known: dict[str, Member] = {}  # by instance: its last life, alive or awaited
        self._awaited: dict[Life, float] = {}  # members of the master before: until when
        self._gone: OrderedDict[Life, str] = OrderedDict()

    @property
    def connected(self) -> bool:
        """Whether the master's stream is up."""
        return self._connected

    def verdict(self, life: Life) -> str:
        """Returns "left" or "died" when a connected master said so of this incarnation, else ""."""
        return self._gone.get(life, "") if self._connected else ""

    def ended(self, life: Life) -> bool:
        """Says whether this master, when last heard, had said that the incarnation left or died."""
        return life in self._gone

    def member(self, instance_id: str) -> Member | None:
        """Returns the member of that name, or None."""
        return self._known.get(instance_id)

    def reset(self, master_incarnation: int, members: Iterable[Member], now: float) -> list[Life]:
        """Applies a snapshot. Returns the incarnations that ended while no stream was up."""
        new = {m.ref.instance_id: m for m in members}
        alive = {m.ref.life for m in new.values()}
        before = {m.ref.life: m for m in self._known.values()}
        replaced = [life for life in before if life not in alive and life[0] in new]
        if master_incarnation == self._master:
            lost = {life for life in before if life not in alive and life not in self._awaited} | {*replaced}
        else:
            # Silence about a member means nothing until it had time to join.
            lost = {*replaced}
            self._awaited = {life: now + self.grace_s for life in before if life not in alive}
            self._gone.clear()
        for life in lost:
            self._bury(life, "died")
        self._master, self._connected = master_incarnation, True
        self._awaited = {
            life: until for life, until in self._awaited.items() if life not in alive and life[0] not in new
        }
        self._known = {life[0]: before[life] for life in self._awaited} | new
        for life in alive:
            self._gone.pop(life, None)
        return sorted(lost)

    def joined(self, member: Member) -> list[Life]:
        """Adds a member. Returns the incarnation whose name it has taken, if that one was still thought to be alive."""
        life = member.ref.life
        before = self._known.get(life[0])
        self._known[life[0]] = member
        self._gone.pop(life, None)
        self._awaited.pop(life, None)
        if before is None or before.ref.life == life:
            return []
        self._awaited.pop(before.ref.life, None)
        self._bury(before.ref.life, "died")
        return [before.ref.life]

    def gone(self, life: Life, how: str) -> None:
        """Notes that the incarnation left or died."""
        known = self._known.get(life[0])
        if known is not None and known.ref.life == life:
            del self._known[life[0]]
        self._awaited.pop(life, None)
        self._bury(life, how)

    def lost(self) -> None:
        """Notes that the stream broke: verdicts are suspended until the next snapshot."""
        self._connected = False

    def expire(self, now: float) -> list[Life]:
        """Returns members of the former master that have not joined the new one in time; nobody reported their
        death."""
        if not self._connected:
            return []
        late = [life for life, until in self._awaited.items() if until <= now]
        for life in late:
            del self._awaited[life]
            self._known.pop(life[0])
        return late

    def _bury(self, life: Life, how: str) -> None:
        self._gone[life] = how
        if len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)

"""Which machines lend ranks to instances elsewhere, and which of them an instance gets (ADR 44). Soft state of the
leader: rank hosts say again what they are before their lease is over. Pure: time is an argument, in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.errors import InvalidRequest, Overloaded

INTERVAL_S = 0.5
LEASE_S = 3.0
KEPT_S = 8.0  # for an instance that has been given hosts: until their own words say that its ranks run there
MAX_HOSTS = 1024
MAX_KEPT = 32  # instances for which hosts are kept at once
MAX_TOLD = 16  # hosts whose lacks are told
RETRY_AFTER_MS = 1_000


@dataclass(frozen=True, slots=True)
class RankHost:
    """One rank host as it says itself. `used`: ranks that run there, by instance; `gpus` 0: it has none."""

    name: str
    incarnation: int
    address: str
    node_id: str
    build: str
    max_ranks: int
    gpus: int
    memory_bytes: int
    used: tuple[tuple[str, tuple[int, ...]], ...] = ()
    fingerprint: str = ""  # of its checkpoint; "": it takes what an instance names

    @property
    def ranks(self) -> int:
        """How many ranks run there."""
        return sum(len(ranks) for _, ranks in self.used)


@dataclass(frozen=True, slots=True)
class RankPlaces:
    """What an instance asks for: so many ranks at each of so many rank hosts of its own build, each with a GPU of its
    own or none."""

    name: str
    incarnation: int
    build: str
    hosts: int
    ranks_each: int
    gpus: bool
    fingerprint: str


@dataclass(slots=True)
class _Kept:
    """Hosts that an instance has been given, until when."""

    incarnation: int
    hosts: tuple[str, ...]
    until: float


class RankHosts:
    """The rank hosts that live, and which of them are kept for whom."""

    def __init__(self) -> None:
        self._hosts: dict[str, tuple[RankHost, float]] = {}  # with the end of its lease
        self._kept: dict[str, _Kept] = {}

    def lend(self, host: RankHost, now: float) -> None:
        """Takes what a rank host says. Raises InvalidRequest where another of its name lives, Overloaded where there
        are too many."""
        self._forget(now)
        known = self._hosts.get(host.name)
        if known is None and len(self._hosts) >= MAX_HOSTS:
            raise Overloaded(f"{MAX_HOSTS} rank hosts are known here already", retry_after_ms=RETRY_AFTER_MS)
        if known is not None and known[0].incarnation > host.incarnation:
            raise InvalidRequest(
                f"instance_id={host.name!r}: a later one of this name is at {known[0].address}", field="instance_id"
            )
        self._hosts[host.name] = (host, now + LEASE_S)

    def leave(self, name: str, incarnation: int) -> None:
        """Forgets a rank host that ends."""
        known = self._hosts.get(name)
        if known is not None and known[0].incarnation == incarnation:
            del self._hosts[name]

    def living(self, now: float) -> list[RankHost]:
        """Returns those that live, by machine."""
        self._forget(now)
        return sorted((host for host, _ in self._hosts.values()), key=lambda one: (one.node_id, one.name))

    def place(self, asked: RankPlaces, now: float) -> tuple[list[str], str]:
        """Returns addresses of rank hosts for an instance, the emptiest first, and keeps them for it; or none, and
        why. Raises InvalidRequest for an incarnation that has been followed by a later one."""
        self._forget(now)
        mine = self._kept.get(asked.name)
        if mine is not None and mine.incarnation > asked.incarnation:
            raise InvalidRequest(f"incarnation={asked.incarnation:x}: a later one has asked", field="instance")
        self._kept.pop(asked.name, None)  # what this one's earlier life was given is free again
        every = self.living(now)
        fits = {host.name: self._lacks(host, asked) for host in every}
        able = sorted((host for host in every if not fits[host.name]), key=lambda one: one.ranks)
        if len(able) < asked.hosts:
            return [], self._why_not(asked, every, fits, len(able))
        if len(self._kept) >= MAX_KEPT:
            return [], f"hosts are kept for {MAX_KEPT} other instances whose ranks have not come yet"
        chosen = able[: asked.hosts]
        self._kept[asked.name] = _Kept(asked.incarnation, tuple(host.name for host in chosen), now + KEPT_S)
        return [host.address for host in chosen], ""

    def _lacks(self, host: RankHost, asked: RankPlaces) -> str:
        """Returns what keeps this instance from this host; "" when nothing does. Ranks of an earlier life of the
        instance do not count: the host ends them when the new one comes."""
        if host.build != asked.build:
            return f"is another build of kvmesh ({host.build.partition('-')[0]})"
        if host.fingerprint not in ("", asked.fingerprint):
            return (
                f"has other weights ({host.fingerprint[:12]}) than the instance ({asked.fingerprint[:12]}): start it "
                "with --model and the folder of the same checkpoint"
            )
        others = [(name, len(ranks)) for name, ranks in host.used if name != asked.name]
        kept = [name for name, one in self._kept.items() if host.name in one.hosts]
        if asked.gpus:
            if host.gpus < asked.ranks_each:
                return f"has {host.gpus} GPUs, {asked.ranks_each} are needed"
            taken = [name for name, _ in others] + kept
            return f"its GPUs are those of {taken[0]}" if taken else ""
        free = host.max_ranks - sum(count for _, count in others)
        if kept and any(name not in dict(others) for name in kept):
            return f"is being taken by {kept[0]}"
        return f"has room for {max(0, free)} more ranks" if free < asked.ranks_each else ""

    @staticmethod
    def _why_not(asked: RankPlaces, every: Sequence[RankHost], fits: dict[str, str], able: int) -> str:
        unfit = [host for host in every if fits[host.name]]
        told = [f"{host.node_id} ({host.address}) {fits[host.name]}" for host in unfit[:MAX_TOLD]]
        lacks = "; ".join([*told, *([f"and {len(unfit) - MAX_TOLD} more"] if len(unfit) > MAX_TOLD else [])])
        return f"{able} of {asked.hosts} rank hosts are there" + (f"; {lacks}" if lacks else "")

    def _forget(self, now: float) -> None:
        self._hosts = {name: one for name, one in self._hosts.items() if one[1] > now}
        self._kept = {
            name: one for name, one in self._kept.items() if one.until > now and not self._have_come(name, one)
        }

    def _have_come(self, name: str, kept: _Kept) -> bool:
        """Whether all hosts say themselves that ranks of this instance run there: nothing is kept any longer."""
        known = [self._hosts[host][0] for host in kept.hosts if host in self._hosts]
        return len(known) == len(kept.hosts) and all(name in dict(host.used) for host in known)

"""What the rounds of balance need to know of the instances, added up while they are met one by one. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmesh.membership.places import instance_of
from kvmesh.services.conductor.domain import Life, Role
from kvmesh.services.conductor.fleet.instance import Instance

MIXED = 0.8  # what a coupled instance brings of one that does only one thing: each waits for the other's steps
MAX_ROWS = 4096  # of one instance, where it names no limit


@dataclass(frozen=True, slots=True)
class TallyCounts:
    """How many instances of one model have each role; fractions occur in hypothetical counts."""

    prefills: float
    decodes: float
    boths: float = 0.0

    def moved(self, was: Role, becomes: Role) -> TallyCounts:
        """Returns the counts after one instance has changed its role."""
        change = {was: -1, becomes: 1}
        return TallyCounts(
            self.prefills + change.get(Role.PREFILL, 0),
            self.decodes + change.get(Role.DECODE, 0),
            self.boths + change.get(Role.BOTH, 0),
        )

    @property
    def serves(self) -> bool:
        """Whether requests can be served."""
        return self.boths >= 1 or (self.prefills >= 1 and self.decodes >= 1)


def _by_role() -> dict[Role, int]:
    return dict.fromkeys(Role, 0)


def _sets_by_role() -> dict[Role, set[str]]:
    return {role: set() for role in Role}


@dataclass(slots=True)
class Tally:
    """Sums over the instances of one model, in seconds and rows, each data-parallel place as an instance: it has rows
    and prompts of its own. `tbt_slo_s` is the model's TBT SLO."""

    tbt_slo_s: float
    roles: dict[Life, Role] = field(default_factory=dict)
    count: dict[Role, int] = field(default_factory=_by_role)
    first: Instance | None = None
    identities: set[tuple[object, ...]] = field(default_factory=set)  # of their KV
    backlog_s: float = 0.0  # of all queues
    carried: float = 0.0  # rows that decode instances answer within the SLO
    decoding: int = 0
    switchable: list[tuple[float, str, Instance, Role]] = field(
        default_factory=list
    )  # who drains soonest, then by name
    _instances: dict[Role, set[str]] = field(default_factory=_sets_by_role)
    _running: int = 0
    _present: int = 0
    _computing: int = 0

    def add(self, i: Instance, now: float) -> None:
        """Adds an instance that may get work, as it is now."""
        self.first = self.first or i
        self.roles[i.ref.life] = i.role
        self.count[i.role] += 1
        self._instances[i.role].add(instance_of(i.ref.instance_id))
        self.identities.add(i.model.kv_identity)
        self.backlog_s += i.queue.wait_s(now)
        self._running += i.load.running_requests
        self._present += i.batch.requests
        self._computing += max(len(i.queue.works), i.load.queued_requests)
        if i.role.decodes:
            self.decoding += 1
            self.carried += _carried(i, self.tbt_slo_s)
        if i.switchable:
            self.switchable.append((drain_s(i, now), i.ref.instance_id, i, i.role))

    @property
    def counts(self) -> TallyCounts:
        """The number of instances by role."""
        return TallyCounts(self.count[Role.PREFILL], self.count[Role.DECODE], self.count[Role.BOTH])

    def places(self, role: Role) -> float:
        """Returns how many places an instance of this role has on average."""
        instances = self._instances[role]
        return self.count[role] / len(instances) if instances else 1.0

    @property
    def is_busy(self) -> bool:
        """Whether any of the instances has a request, or is expected to have one."""
        return bool(self._running or self._present or self._computing)

    @property
    def rows(self) -> int:
        """The number of requests whose prompt is computed and whose answer is not over; decode also reports those that
        it waits for."""
        return max(self._running, self._present - self._computing)


def _carried(instance: Instance, tbt_slo_s: float) -> float:
    """Returns how many rows of the present length the instance answers at once within the SLO; at least 1."""
    load = instance.load
    context = load.context_tokens / load.running_requests if load.running_requests else instance.model.block_tokens
    room = instance.capacity_blocks / max(1.0, context / instance.model.block_tokens + 0.5)
    low, high = 1, max(1, min(instance.max_running or MAX_ROWS, int(room)))
    while low < high:
        middle = (low + high + 1) // 2
        if instance.decode.predict(middle, middle * context) <= tbt_slo_s:
            low = middle
        else:
            high = middle - 1
    return float(low)


def drain_s(instance: Instance, now: float) -> float:
    """Returns the seconds until the instance has done what it has; it takes no new role before."""
    rows = instance.batch.residence_s if instance.role.decodes and instance.batch.requests else 0.0
    return max(rows, instance.queue.wait_s(now))

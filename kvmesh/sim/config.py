"""What is simulated: the instances, the conductors over them, and the limits that services are configured with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from kvmesh.errors import ConfigError
from kvmesh.services.conductor.settings import Settings
from kvmesh.services.decode.limits import Limits
from kvmesh.services.prefill.planner import PlanConfig
from kvmesh.sim.changes import FreezePhase, JoinEvent, KillEvent, LeaveEvent, SlowPhase, StepClock
from kvmesh.sim.hardware.times import NodeSpec
from kvmesh.sim.host import HostModel

CHANGES = ("noise", "spread", "slow", "freeze", "kill", "join", "leave")  # fields of SimConfig
MAX_SCATTER = 3.0  # of a logarithm: factors of twenty


class MeshMode(Enum):
    """How the instances work together."""

    DISAGGREGATED = "disaggregated"  # prefill and decode apart, placed by conductors
    COUPLED_PREFILL_FIRST = "coupled-prefill-first"  # each computes and answers; prompts go before rows
    COUPLED_CHUNKED = "coupled-chunked"  # likewise; chunks of prompts beside the rows, in the same steps


class Routing(Enum):
    """Who says which coupled instance gets a request."""

    ROUND_ROBIN = "round-robin"
    LEAST_LOADED = "least-loaded"  # the fewest requests
    # Conductors, by their policy; to them the instances are engines of others (kvmesh/external). Which blocks an engine
    # holds is believed from what was placed there, or reported by the engine.
    CONDUCTOR = "conductor"
    CONDUCTOR_EXACT = "conductor-exact"

    @property
    def by_conductors(self) -> bool:
        """Whether the product's conductors decide."""
        return self in (Routing.CONDUCTOR, Routing.CONDUCTOR_EXACT)


@dataclass(frozen=True)
class WireChange:
    """From `at_s` (virtual seconds) on the NICs of `nodes`, () for all, carry `share` of what their `NodeSpec` says."""

    at_s: float
    share: float
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SimConfig:
    """One run. Seconds, tokens, bytes. ConfigError names field and value.

    Instances bear the names p0, p1, ... (`prefill`), d0, ... (`decode`) and c0, ... (`coupled`). What is not here is
    as the services have it by default; a timer that gives a request up after so long a wait (queue, landing, batch)
    does not exist here: who waits, waits."""

    mode: MeshMode = MeshMode.DISAGGREGATED
    prefill: Sequence[NodeSpec] = ()
    decode: Sequence[NodeSpec] = ()
    coupled: Sequence[NodeSpec] = ()
    block_tokens: int = 512
    seed: int = 0
    max_output_tokens: int = 0  # answers are cut to so many; 0: never

    # conductors
    conductor: Settings = field(default_factory=Settings)
    conductors: int = 1  # requests go round; every one hears all heartbeats and announcements
    heartbeat_s: float = 1.0  # no beat is lost or late here, so they may be rarer than live ones
    tick_s: float = 1.0
    announce_s: float = 0.05  # a store's changes are announced so long after the first of them
    hop_s: float = 0.001  # request → conductor → decode → prefill: before anything is done for it
    # Conductors' models begin with samples of the hardware, as after a profiling run. Without that they begin with
    # their priors, and heartbeats tell all steps that have ended: the way of a live mesh.
    profiled: bool = True
    told_max_tokens: int = 0  # the bound of the answer that clients send; 0: none
    retries: int = 0  # of a refused request, each after its Retry-After
    orders: bool = False  # a conductor leads: it orders replicas and roles, and they are carried out
    kept_decodes: int = 0  # the first so many decode instances keep their role all the same

    # prefill
    chunk_tokens: int = 8192
    batch_tokens: int = 8192
    long_tokens: int = 8192
    tenant_fairness: bool = True  # where prompts of several tenants wait
    size_weight: float = 16.0  # of predicted prefill times in the lines
    layers: int = 80  # a chunk's KV leaves layer by layer: the last layer's when the step ends
    pull_timeout_s: float = 10.0
    wires: Sequence[WireChange] = ()  # of `prefill` and `decode`; conductors are not told

    # decode
    max_running: int = 256
    max_waiting: int = 4096
    load_bytes_per_s: float = 0.0  # host memory → device pages; 0: no time
    watermark_percent: int = 2
    swap_percent: int = 25

    # node stores
    eviction: str = "lru"
    store_high_percent: int = 95
    store_low_percent: int = 90

    # coupled
    routing: Routing = Routing.LEAST_LOADED
    prefix_cache: bool = True  # of each instance, in its device pages

    host: HostModel | None = (
        None  # one machine that prefill and decode instances and the door share; None: each its own
    )

    # what no conductor is told, of `prefill` and `decode`
    noise: float = 0.0  # standard deviation of the logarithm of each step's own factor; their mean is 1
    spread: float = 0.0  # likewise of each instance's own factor, which stays
    slow: Sequence[SlowPhase] = ()
    freeze: Sequence[FreezePhase] = ()
    kill: Sequence[KillEvent] = ()
    join: Sequence[JoinEvent] = ()
    leave: Sequence[LeaveEvent] = ()
    # An instance that stands still for so long is given up by those whose requests it has, as by a broken connection's
    # keepalive: they are placed again, elsewhere.
    lost_after_s: float = 20.0
    # Where nobody is able to take a request, its gateway asks again for so long.
    patience_s: float = 30.0

    sample_s: float = 10.0

    def __post_init__(self) -> None:
        """Everything that cannot be."""
        at_least_one = (
            "block_tokens", "conductors", "chunk_tokens", "batch_tokens", "layers", "max_running",
        )  # fmt: skip
        for name in at_least_one:
            if getattr(self, name) < 1:
                raise _bad(name, getattr(self, name), "at least 1")
        for name in ("heartbeat_s", "tick_s", "sample_s", "pull_timeout_s", "lost_after_s"):
            if not getattr(self, name) > 0:
                raise _bad(name, getattr(self, name), "above 0")
        for name in (
            "hop_s",
            "announce_s",
            "retries",
            "kept_decodes",
            "max_waiting",
            "max_output_tokens",
            "load_bytes_per_s",
            "size_weight",
            "noise",
            "spread",
            "patience_s",
        ):
            if getattr(self, name) < 0:
                raise _bad(name, getattr(self, name), "not negative")
        for change in self.wires:
            if change.at_s < 0 or not change.share > 0:
                raise _bad("wires", change, "from 0 s on, and a share above 0")
            if unknown := sorted(set(change.nodes) - self._names):
                raise _bad("wires", unknown[0], "an instance of prefill or decode")
        self._check_changes()
        if self.chunk_tokens < self.block_tokens:
            raise _bad("chunk_tokens", self.chunk_tokens, f"at least block_tokens={self.block_tokens}")
        if self.heartbeat_s >= self.conductor.lease_s:
            raise _bad("heartbeat_s", self.heartbeat_s, f"below conductor.lease_s={self.conductor.lease_s}")
        if self.host is not None and any(spec.pipeline is not None or spec.slots > 1 for spec in self._specs):
            raise _bad("host", self.host, "None where an instance has a pipeline or several slots")
        if self.host is not None and any(spec.speculation is not None for spec in self._specs):
            raise _bad("host", self.host, "None where rows have drafts")
        wanted = ("prefill", "decode") if self.mode is MeshMode.DISAGGREGATED else ("coupled",)
        for name in wanted:
            if not getattr(self, name):
                raise _bad(name, "()", f"one instance or more in mode {self.mode.value}")
        for name in ("prefill", "decode", "coupled"):
            for at, spec in enumerate(getattr(self, name)):
                _check_spec(f"{name}[{at}]", spec, self.block_tokens)

    def _check_changes(self) -> None:
        if self.changes and self.mode is not MeshMode.DISAGGREGATED:
            name = next(name for name in CHANGES if getattr(self, name))
            raise _bad(name, getattr(self, name), f"left alone in mode {self.mode.value}")
        for name in ("noise", "spread"):
            if not getattr(self, name) <= MAX_SCATTER:
                raise _bad(name, getattr(self, name), f"at most {MAX_SCATTER:g}")
        for slow in self.slow:
            if not (0 <= slow.from_s < slow.until_s and 0 < slow.times < inf):
                raise _bad("slow", slow, "from 0 s on, until later, and times above 0")
        for freeze in self.freeze:
            if not 0 <= freeze.from_s < freeze.until_s < inf:
                raise _bad("freeze", freeze, "from 0 s on, until later")
        for kill in self.kill:
            if not (0 <= kill.at_s < inf and kill.back_s >= 0):
                raise _bad("kill", kill, "from 0 s on, and back no earlier")
        for name in ("join", "leave"):
            nodes = [one.node for one in getattr(self, name)]
            for one in getattr(self, name):
                if not 0 <= one.at_s < inf:
                    raise _bad(name, one, "from 0 s on")
                if nodes.count(one.node) > 1:
                    raise _bad(name, one, "there once for an instance")
        for name in ("slow", "freeze", "kill", "join", "leave"):
            for one in getattr(self, name):
                if one.node not in self._names:
                    raise _bad(name, one, f"of one of {', '.join(sorted(self._names)[:8])}, ...")
        for pool, specs in (("prefill", self.prefill), ("decode", self.decode)):
            late = [one for one in self.join if one.node[0] == pool[0]]
            if late and len(late) == len(specs):
                raise _bad("join", late[0], f"after another {pool} instance: one is there at first")

    @property
    def joins_late(self) -> set[str]:
        """Names of those that are not there at first."""
        return {one.node for one in self.join}

    @property
    def changes(self) -> bool:
        """Whether instances are otherwise than conductors are told, or come and go."""
        return any(getattr(self, name) for name in CHANGES)

    def clock_of(self, node: str) -> StepClock | None:
        """What the steps of an instance of that name go by; None: by what its `NodeSpec` says."""
        if not (self.noise or self.spread or self.slow or self.freeze) and self.profiled:
            return None
        return StepClock(node, self.seed, noise=self.noise, spread=self.spread, slow=self.slow, freeze=self.freeze)

    @property
    def _specs(self) -> tuple[NodeSpec, ...]:
        return (*self.prefill, *self.decode, *self.coupled)

    @property
    def _names(self) -> set[str]:
        pools = ("p", self.prefill), ("d", self.decode)
        return {f"{letter}{n}" for letter, specs in pools for n in range(len(specs))}

    @property
    def plan(self) -> PlanConfig:
        """The plan's configuration of every prefill instance."""
        chunk = max(self.chunk_tokens, self.block_tokens)
        return PlanConfig(
            block_tokens=self.block_tokens,
            prefill_chunk_tokens=chunk,
            max_batch_tokens=max(self.batch_tokens, chunk),
            long_prompt_tokens=self.long_tokens,
            size_weight=self.size_weight,
            fair=self.tenant_fairness,
        )

    @property
    def limits(self) -> Limits:
        """Of every decode instance. Pages are granted when they are needed, not ahead of it."""
        return Limits(
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            watermark_percent=self.watermark_percent,
            swap_percent=self.swap_percent,
            lookahead_tokens=0,
        )


def _check_spec(name: str, spec: NodeSpec, block_tokens: int) -> None:
    for field_name, least in (("kv_tokens", block_tokens), ("dram_tokens", block_tokens), ("kv_bytes_per_token", 1)):
        if getattr(spec, field_name) < least:
            raise _bad(f"{name}.{field_name}", getattr(spec, field_name), f"at least {least}")
    if not spec.nic_bytes_per_s > 0:
        raise _bad(f"{name}.nic_bytes_per_s", spec.nic_bytes_per_s, "above 0")
    if spec.slots < 1 or spec.kv_tokens // spec.slots < block_tokens:
        raise _bad(f"{name}.slots", spec.slots, f"at least 1, each with {block_tokens} of kv_tokens={spec.kv_tokens}")
    if spec.ssd_tokens > 0 and not spec.ssd_read_bytes_per_s > 0:
        raise _bad(f"{name}.ssd_read_bytes_per_s", spec.ssd_read_bytes_per_s, "above 0 where there is an SSD")


def _bad(name: str, value: object, why: str) -> ConfigError:
    return ConfigError(f"{name}={value}: must be {why}", field=name)

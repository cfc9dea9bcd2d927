"""The settings of the brain. Constants of a single part are in that part's file; a simulation uses the same
settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvmesh.services.conductor.domain import Fetch


class Mode(Enum):
    """When a request is refused (see admission/gate.py)."""

    OFF = "off"  # never
    BASELINE = "baseline"  # TTFT on arrival; decode refuses once the KV is there
    EARLY = "early"  # both pools as they are on arrival
    PREDICTED = "predicted"  # decode as it will be when this prefill ends: the default


class ThresholdMode(Enum):
    FIXED = "fixed"
    ADAPTIVE = "adaptive"


@dataclass(frozen=True)
class AdmissionSettings:
    """The settings of admission/ (gate.py, margins.py, lanes.py). `by_model` holds model name, TTFT SLO and TBT SLO in
    seconds."""

    mode: Mode = Mode.PREDICTED
    by_model: tuple[tuple[str, float, float], ...] = ()
    confidence: float = 0.0  # see margins.py; 0, as in the paper: predictions are taken at their word
    head_room: float = 0.5  # of the room within the SLO, that the batch lane may fill
    batch_share: float = 0.02  # of the machine time of interactive requests, that the batch lane gets in any case
    patience_s: float = 30.0  # which it waits before
    batch_slowdown: float = 0.2  # the fraction by which it may make interactive requests slower


@dataclass(frozen=True)
class AffinitySettings:
    """What affinity is worth at most, in seconds of a whole request (see placing/affinity.py)."""

    session_s: float = 0.0
    origin_s: float = 0.0


@dataclass(frozen=True)
class BalanceSettings:
    """The settings of balance/ (see rounds.py). Only a leader gives orders."""

    replicate: bool = True
    switch_roles: bool = False
    window_s: float = 10.0  # half-life of what is measured: uses of prefixes, demand
    copy_orders: int = 4  # under way at once, and their bytes (see hot.py)
    copy_bytes: int = 1 << 30
    dwell_s: float = 60.0  # an instance keeps a role for at least so long (see roles.py)
    target_load: float = 0.7  # what scale hints make of pools (see scale.py)
    zero_after_s: float = 0.0  # a model that nobody wants for so long wants no instance; 0: it always wants one


@dataclass(frozen=True)
class BreakerSettings:
    """The settings of circuit breakers (see fleet/breaker.py and fleet/health.py)."""

    failures: int = 5  # so many within `window_s`,
    share: float = 0.5  # and this share of its requests: an instance rests
    window_s: float = 10.0
    rest_s: float = 5.0  # at first; doubles while it goes on failing
    max_rest_s: float = 120.0
    probe_s: float = 30.0  # a probe not heard of for so long is given up


@dataclass(frozen=True)
class SizeSettings:
    """The weights used for instances whose queue goes by size (see loads/shortest_first.py)."""

    others: float = 1.0  # of what others wait longer, in the cost of a placement
    later: float = 0.2  # of the work that is behind, likewise
    overtaking: float = 0.5  # of the work that is expected to pass a request while it waits, in what it waits for


@dataclass(frozen=True)
class Settings:
    """The settings of one conductor's brain."""

    lease_s: float = 1.5  # of few instances, as the next; see kvmesh/pacing.py
    heartbeat_s: float = 0.2
    heartbeats_per_s: float = 0.0  # of all together; 0: neither is ever stretched
    slo_ttft_s: float = 30.0
    slo_tbt_s: float = 1.0
    stall_s: float = 0.75  # a pause between steps longer than this was the conductor's own silence
    warm_up_s: float = 3.0  # after a start: an unknown model may just not have registered again yet
    forget_s: float = 60.0  # an instance silent this long leaves the status too
    pending_timeout_s: float = 15.0  # beyond twice what was predicted, a placement nobody reports is forgotten
    balancing_threshold: float = (
        1.0  # fetching is weighed when the best prefix is more than so many times the local one
    )
    threshold_mode: ThresholdMode = ThresholdMode.FIXED
    fetch: Fetch = Fetch.CHEAPER
    policy: str = "kvcache"  # who gets a request: see policies/
    confirmed_s: float = 10.0  # computed blocks count for so long without being announced
    member_grace_s: float = 5.0  # after a master's restart, for its members to join again
    max_explained: int = 4096
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    affinity: AffinitySettings = field(default_factory=AffinitySettings)
    balance: BalanceSettings = field(default_factory=BalanceSettings)
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    sizes: SizeSettings = field(default_factory=SizeSettings)

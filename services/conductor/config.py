"""The conductor's settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmesh.config import ControlConfig
from kvmesh.errors import ConfigError
from kvmesh.services.conductor.policies.registry import POLICY_NAMES
from kvmesh.services.conductor.settings import Mode


@dataclass(frozen=True, kw_only=True)
class ConductorConfig(ControlConfig):
    """The conductor's settings. Raises ConfigError, which names the field, when a value is out of range."""

    store: str = field(default="127.0.0.1:0", metadata={"help": "Store masters, host:port,host:port,..."})
    slo_ttft_ms: int = field(
        default=30_000, metadata={"help": "TTFT beyond which requests are refused, in ms.", "min": 1}
    )
    slo_tbt_ms: int = field(default=1_000, metadata={"help": "TBT beyond which requests are refused, in ms.", "min": 1})
    slo_by_model: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "SLOs of single models, NAME=TTFT_MS:TBT_MS with commas between.",
            "metavar": "NAME=TTFT_MS:TBT_MS,...",
        },
    )
    admission: str = field(
        default="predicted",
        metadata={
            "help": "predicted: requests are refused by what decode will be when their prefill ends; early: by what it "
            "is when they arrive; baseline: by TTFT alone; off: never.",
            "choices": tuple(mode.value for mode in Mode),
        },
    )
    admission_confidence: float = field(
        default=0.9,
        metadata={
            "help": "Of all requests that are taken, the share that shall be within its SLO: predictions are judged by "
            "how far the last ones were exceeded. 0: they are taken at their word.",
            "min": 0,
            "max": 1,
        },
    )
    batch_share: float = field(
        default=0.02,
        metadata={
            "help": "Of the machine time of interactive requests, that the batch lane gets though nothing is idle.",
            "min": 0,
            "max": 1,
        },
    )
    batch_slowdown: float = field(
        default=0.2,
        metadata={
            "help": "By which fraction the batch lane may make interactive requests slower, TTFT and TBT, as they "
            "themselves show; 0: it waits until none come.",
            "min": 0,
        },
    )
    door_port: int = field(
        default=0,
        metadata={
            "help": "TCP port of the door, a shorter way than gRPC for heartbeats and placements; 0 picks a "
            "free one, -1: none.",
            "min": -1,
            "max": 65535,
        },
    )
    max_schedules: int = field(
        default=1024,
        metadata={
            "help": "Requests that wait here to be placed; more are refused at once, with Retry-After.",
            "min": 1,
        },
    )
    heartbeat_interval_ms: int = field(default=200, metadata={"help": "How often instances report, in ms.", "min": 1})
    lease_ms: int = field(
        default=1_500, metadata={"help": "An instance silent for longer gets no work, in ms.", "min": 1}
    )
    heartbeats_per_s: int = field(
        default=500,
        metadata={
            "help": "Heartbeats over gRPC of all instances in a second (four by a door count as one); were there more, "
            "interval and lease grow alike. 0: they never do.",
            "min": 0,
        },
    )
    balancing_threshold: float = field(
        default=1.0,
        metadata={
            "help": "Fetching a prefix from other nodes is weighed when the best one in the mesh is more than so many "
            "times as long as the instance's own; 1: whenever it is longer.",
            "min": 0,
        },
    )
    threshold_mode: str = field(
        default="fixed",
        metadata={
            "help": "adaptive: that threshold, and how dear pulls are taken to be, follow what pulls cost and save.",
            "choices": ("fixed", "adaptive"),
        },
    )
    policy: str = field(
        default="kvcache",
        metadata={
            "help": "Who gets a request. kvcache: Algorithm 1 and what was added to it; the others are for comparison, "
            "or from packages (entry points kvmesh.policies).",
            "choices": POLICY_NAMES,
        },
    )
    session_affinity_ms: int = field(
        default=0,
        metadata={"help": "What staying where a session's last request went may cost a request, in ms.", "min": 0},
    )
    origin_affinity_ms: int = field(
        default=0,
        metadata={"help": "What decoding requests of one origin together may cost a request, in ms.", "min": 0},
    )
    fetch: str = field(
        default="cheaper",
        metadata={
            "help": "cheaper: a prefix is fetched when that is predicted to be faster than computing it; always: "
            "whenever it is weighed; never: every instance for itself.",
            "choices": ("cheaper", "always", "never"),
        },
    )
    store_silence_ms: int = field(
        default=3_000,
        metadata={"help": "A stream of the store master silent for longer is opened again, in ms.", "min": 1},
    )
    redis: str = field(
        default="",
        metadata={
            "help": "Redis that says which of several conductors leads, and keeps cordons; empty: this one is alone.",
            "secret": True,
            "metavar": "redis://HOST:PORT/0",
        },
    )
    peers: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "All conductors of this mesh, HOST:PORT,...: those who join are told to register with each.",
            "metavar": "HOST:PORT,...",
        },
    )
    decision_log: str = field(
        default="",
        metadata={
            "help": "File for all that this conductor hears and answers, as JSON lines; `kvmesh sim --decisions FILE` "
            "makes every decision again."
        },
    )
    decision_log_mb: int = field(default=1024, metadata={"help": "Where that file ends, in MiB.", "min": 1})
    replicate: bool = field(
        default=True, metadata={"help": "While it leads: order copies of hot prefixes before their holders congest."}
    )
    replicate_mb: int = field(default=1024, metadata={"help": "Bytes of such copies at once, in MiB.", "min": 1})
    switch_roles: bool = field(
        default=False,
        metadata={"help": "While it leads: order coupled instances into the role that is short of instances."},
    )
    role_dwell_ms: int = field(
        default=60_000, metadata={"help": "An instance keeps an ordered role at least so long, in ms.", "min": 1}
    )
    balance_window_ms: int = field(
        default=10_000,
        metadata={"help": "Half-life of the load that copies, roles and scale hints go by, in ms.", "min": 100},
    )
    scale_target: float = field(
        default=0.7, metadata={"help": "Load of each pool that scale hints aim at; 1: all its capacity.", "min": 0.05}
    )
    scale_to_zero_after_s: float = field(
        default=0.0,
        metadata={
            "help": "Scale hints want no instance of a model that nobody has wanted for so many seconds, and one as "
            "soon as gateways hold requests for it (their hold_requests). 0: they always want one.",
            "min": 0,
        },
    )

    def __post_init__(self) -> None:
        if self.admission not in {mode.value for mode in Mode}:
            raise ConfigError(
                f"admission={self.admission!r}: choose one of {', '.join(mode.value for mode in Mode)}",
                field="admission",
            )
        if not 0 <= self.admission_confidence <= 1:
            text = f"admission_confidence={self.admission_confidence}: must be between 0 and 1"
            raise ConfigError(text, field="admission_confidence")
        if not 0 <= self.batch_share <= 1:
            raise ConfigError(f"batch_share={self.batch_share}: must be between 0 and 1", field="batch_share")
        if not 0 <= self.batch_slowdown < float("inf"):
            text = f"batch_slowdown={self.batch_slowdown}: must be a number, at least 0"
            raise ConfigError(text, field="batch_slowdown")
        self.slos  # noqa: B018 (refuses what it cannot read)
        self.check_control(redis=self.redis)
        if not 0.05 <= self.scale_target <= 1:
            raise ConfigError(
                f"scale_target={self.scale_target}: must be at least 0.05, at most 1", field="scale_target"
            )
        if not 0 <= self.scale_to_zero_after_s < float("inf"):
            text = f"scale_to_zero_after_s={self.scale_to_zero_after_s}: must be a number, at least 0"
            raise ConfigError(text, field="scale_to_zero_after_s")
        least = (
            ("slo_ttft_ms", 1), ("slo_tbt_ms", 1), ("heartbeat_interval_ms", 1), ("store_silence_ms", 1),
            ("role_dwell_ms", 1), ("max_schedules", 1),
        )  # fmt: skip
        for name, low in least:
            if getattr(self, name) < low:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least {low}", field=name)
        for name in ("session_affinity_ms", "origin_affinity_ms", "heartbeats_per_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 0", field=name)
        if not 0 <= self.balancing_threshold < float("inf"):
            text = f"balancing_threshold={self.balancing_threshold}: must be a number, at least 0"
            raise ConfigError(text, field="balancing_threshold")
        if self.lease_ms < 2 * self.heartbeat_interval_ms:
            beats = 2 * self.heartbeat_interval_ms
            raise ConfigError(f"lease_ms={self.lease_ms}: must be at least two heartbeats ({beats})", field="lease_ms")

    @property
    def slos(self) -> tuple[tuple[str, float, float], ...]:
        """`slo_by_model` as names with TTFT and TBT in seconds. Raises ConfigError when an entry is not
        NAME=TTFT_MS:TBT_MS, or a name occurs twice."""
        found: dict[str, tuple[str, float, float]] = {}
        for text in self.slo_by_model:
            name, _, values = text.rpartition("=")
            ttft_ms, _, tbt_ms = values.partition(":")
            name, parts = name.strip(), (ttft_ms.strip(), tbt_ms.strip())
            if not name or not all(p.isascii() and p.isdigit() and 0 < int(p) < 2**32 for p in parts):
                why = "must be NAME=TTFT_MS:TBT_MS, whole milliseconds of at least 1"
                raise ConfigError(f"slo_by_model={text!r}: {why}", field="slo_by_model")
            if name in found:
                raise ConfigError(f"slo_by_model={text!r}: there are two SLOs of this model", field="slo_by_model")
            found[name] = name, int(parts[0]) / 1000, int(parts[1]) / 1000
        return tuple(found.values())

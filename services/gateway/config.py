"""What the gateway can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvmesh.config import ServiceConfig
from kvmesh.rpc.errors import ConfigError
from services.gateway.recovery import Patience

MAX_NAME_CHARS = 200


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that request validation needs."""

    max_stops: int = 16
    max_stop_chars: int = 256
    max_choices: int = 64
    max_messages: int = 4096


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(ServiceConfig):
    """REST on `http_port`, gRPC on `port`. ConfigError names the field of a bad value."""

    port: int = field(default=8001, metadata={"help": "gRPC port; 0 picks a free one.", "min": 0, "max": 65535})
    http_port: int = field(default=8000, metadata={"help": "REST port; 0 picks a free one.", "min": 0, "max": 65535})
    instance_id: str = field(default="", metadata={"help": "Name in traces; empty: made from the pid."})
    model: str = field(default="", metadata={"help": "Checkpoint folder (tokenizer and chat template)."})
    models: tuple[str, ...] = field(
        default=(), metadata={"help": "More models, NAME=FOLDER with commas between.", "metavar": "NAME=PATH,..."}
    )
    api_keys: str = field(
        default="", metadata={"help": "TOML file of API keys (see kvmesh apikey); empty: everybody may ask."}
    )
    http_tls_cert: str = field(default="", metadata={"help": "PEM certificate (chain) for HTTPS; empty: plain HTTP."})
    http_tls_key: str = field(default="", metadata={"help": "PEM private key of http_tls_cert."})
    served_name: str = field(default="", metadata={"help": "Model name clients use; empty: the folder's name."})
    conductor: str = field(
        default="127.0.0.1:0",
        metadata={"help": "Conductors, HOST:PORT,HOST:PORT,...: one that answers places the requests."},
    )
    timeout_s: float = field(default=600.0, metadata={"help": "Longest life of a request, seconds."})
    ttft_slo_ms: int = field(default=0, metadata={"help": "Time to first token wanted; 0: the conductor's."})
    tbt_slo_ms: int = field(default=0, metadata={"help": "Time between tokens wanted; 0: the conductor's."})
    max_body_bytes: int = field(default=8 << 20, metadata={"help": "Longest request, bytes."})
    max_stops: int = field(default=16, metadata={"help": "Stop strings a request may name."})
    max_stop_chars: int = field(default=256, metadata={"help": "Characters of one stop string."})
    max_choices: int = field(default=64, metadata={"help": "Answers a request may ask for (prompts x n)."})
    max_retries: int = field(
        default=2,
        metadata={"help": "New placements, until its next token, of a request that instances had taken."},
    )
    max_migrations: int = field(
        default=3,
        metadata={"help": "Times an answer that has begun may go on at other instances; 0: its loss is an error."},
    )
    migration_timeout_s: float = field(
        default=30.0,
        metadata={"help": "From the loss of an answer's instance until its next token, elsewhere."},
    )
    token_timeout_s: float = field(
        default=65.0,
        metadata={
            "help": "An answer that has begun and gets no token for so long is taken for lost, and goes on elsewhere; "
            "0: never. Above decode's batch_wait_ms (60 s) and token_ms (30 s): so long may memory pressure pause an "
            "answer rightly. Of an instance that is gone or frozen as a whole its stream tells within 20 s."
        },
    )
    schedule_timeout_ms: int = field(default=5000, metadata={"help": "Longest wait for one placement."})
    schedule_retry_ms: int = field(default=2000, metadata={"help": "How long an unreachable conductor is tried again."})
    max_waiting_batch: int = field(
        default=1024,
        metadata={"help": "Requests of the batch lane that wait here for something idle; more are refused at once."},
    )
    session_timeout_ms: int = field(
        default=5000,
        metadata={"help": "Longest wait for a decode session; so long a new request looks for one that it can reach."},
    )
    session_credit_tokens: int = field(
        default=256, metadata={"help": "Tokens of one answer that may wait for a slow client."}
    )
    threads: int = field(default=2, metadata={"help": "Threads that tokenize and hash."})
    stop_delay_ms: int = field(
        default=0,
        metadata={
            "help": "On stop, /ready says no for so long before anything ends: load balancers look away.",
            "min": 0,
        },
    )
    stop_grace_ms: int = field(
        default=1_500, metadata={"help": "On stop, running requests have so long to end.", "min": 0}
    )

    def __post_init__(self) -> None:
        for name, low in (
            ("timeout_s", 0.001), ("max_body_bytes", 1024), ("max_stops", 0), ("max_stop_chars", 1),
            ("max_choices", 1), ("max_retries", 0), ("schedule_timeout_ms", 1), ("schedule_retry_ms", 0),
            ("session_timeout_ms", 1), ("session_credit_tokens", 2), ("threads", 1), ("ttft_slo_ms", 0),
            ("tbt_slo_ms", 0), ("max_waiting_batch", 0), ("max_migrations", 0), ("migration_timeout_s", 0.001),
            ("token_timeout_s", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if not value >= low:
                raise ConfigError(f"{name}={value}: must be at least {low}", field=name)
        self.folders  # noqa: B018 (refuses what it cannot read)

    @property
    def model_name(self) -> str:
        """The name that clients use for `model`."""
        return self.served_name or Path(self.model).name

    @property
    def folders(self) -> dict[str, str]:
        """Checkpoint folder of every model by the name that clients use. ConfigError: not NAME=PATH, a name twice."""
        found = {self.model_name: self.model} if self.model else {}
        for text in self.models:
            name, equals, path = text.partition("=")
            name, path = name.strip(), path.strip()
            if not (name and equals and path):
                raise ConfigError(f"models={text!r}: must be NAME=FOLDER", field="models")
            if len(name) > MAX_NAME_CHARS:
                raise ConfigError(f"models={text!r}: the name is over {MAX_NAME_CHARS} characters", field="models")
            if name in found:
                raise ConfigError(f"models={text!r}: there are two models of this name", field="models")
            found[name] = path
        return found

    @property
    def limits(self) -> Limits:
        return Limits(self.max_stops, self.max_stop_chars, self.max_choices)

    @property
    def patience(self) -> Patience:
        """With attempts that fail."""
        reach_s = self.session_timeout_ms / 1000
        return Patience(self.max_retries, reach_s, self.max_migrations, self.migration_timeout_s)

"""The configuration of the gateway."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvmesh.config import ServiceConfig
from kvmesh.errors import ConfigError
from kvmesh.rpc.call_limits import CallLimits
from kvmesh.rpc.protocol import MAX_PROMPT_LOGPROBS
from kvmesh.services.gateway.hold_line import HoldLimits
from kvmesh.services.gateway.recovery import RecoveryPatience
from kvmesh.services.gateway.rest.http_limits import BodyBounds, HttpLimits
from kvmesh.services.gateway.rest.response_bounds import ResponseBounds
from kvmesh.services.gateway.rest.system_text import ATTRIBUTION, DROP, HANDLINGS, VolatileLines

MAX_NAME_CHARS = 200


def model_folders(name: str, folder: str, more: Sequence[str]) -> dict[str, str]:
    """Returns the checkpoint folder of every model by the name that clients use: `folder`, if there is one, and `more`,
    NAME=PATH each. Raises ConfigError: not NAME=PATH, a name twice."""
    found = {name: folder} if folder else {}
    for text in more:
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


@dataclass(frozen=True, slots=True)
class GatewayLimits:
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
    rollout: bool = field(
        default=False,
        metadata={
            "help": "Trainers may pause models and change their weights (/v1/rollout/...); of API keys only those with "
            "`trainer = true`."
        },
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
    max_request_memory: int = field(
        default=256 << 20,
        metadata={
            "help": "Bytes that all requests together, REST and gRPC, may hold here: half for their bodies and "
            "prompts, half for what parsing and tokenizing takes on top. More is answered 429. At least 2 x "
            "max_body_bytes."
        },
    )
    http_max_connections: int = field(
        default=0,
        metadata={
            "help": "REST connections; where there are more, the one without a request for longest is closed. 0: half "
            "of the process's descriptors."
        },
    )
    http_max_head_bytes: int = field(
        default=64 << 10, metadata={"help": "Longest head (request line and headers) of a REST request; 431 beyond."}
    )
    http_max_headers: int = field(default=100, metadata={"help": "Headers of a REST request; 431 beyond."})
    http_max_url_bytes: int = field(default=8 << 10, metadata={"help": "Longest URL of a REST request; 414 beyond."})
    http_head_timeout_s: float = field(
        default=10.0,
        metadata={"help": "A REST request's head (and the TLS handshake) must be whole after so long; 408 then."},
    )
    http_body_timeout_s: float = field(
        default=10.0,
        metadata={"help": "A REST request's body must be whole after so long, and a second for each http_body_rate."},
    )
    http_body_rate: int = field(default=64 << 10, metadata={"help": "Slowest body, bytes a second."})
    http_idle_timeout_s: float = field(
        default=60.0, metadata={"help": "A REST connection without a request is closed after so long."}
    )
    http_write_timeout_s: float = field(
        default=60.0,
        metadata={"help": "A client that leaves 256 KiB unread for so long is cut off."},
    )
    allowed_hosts: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "Host names of this gateway. Requests for others are refused where this is set, and where a "
            "gateway without API keys listens on loopback (a web page of a foreign name could reach it there); "
            "localhost and loopback addresses are always allowed. *: any.",
            "metavar": "NAME,...",
        },
    )
    grpc_receiving: int = field(
        default=4,
        metadata={
            "help": "gRPC messages that are received at once, each of up to max_body_bytes; others wait, with 16 KiB "
            "each taken of them. Their memory is part of max_request_memory."
        },
    )
    grpc_waiting: int = field(
        default=1024, metadata={"help": "gRPC calls that may wait for that; more are refused (RESOURCE_EXHAUSTED)."}
    )
    grpc_receive_timeout_s: float = field(
        default=30.0,
        metadata={
            "help": "A gRPC call's message must be there so long after it began to be received; 2 s if others wait."
        },
    )
    grpc_max_calls: int = field(default=8192, metadata={"help": "gRPC calls at once; more are refused."})
    grpc_max_open_calls: int = field(
        default=64,
        metadata={"help": "gRPC calls at once of methods that need no API key (health, status, reflection)."},
    )
    grpc_max_watchers: int = field(default=64, metadata={"help": "Callers that watch gRPC health."})
    grpc_max_streams: int = field(
        default=256, metadata={"help": "gRPC calls of one connection; its further calls wait at the client."}
    )
    grpc_max_connections: int = field(default=1024, metadata={"help": "gRPC connections; more are closed at once."})
    grpc_idle_s: float = field(
        default=300.0, metadata={"help": "A gRPC connection without calls is closed after so long; clients reconnect."}
    )
    max_priority: int = field(
        default=-100,
        metadata={
            "help": "The most urgent priority (smaller goes first) that a request may ask for where there are no API "
            "keys; with them each key's own max_priority, by default 0."
        },
    )
    special_prompts: bool = field(
        default=True,
        metadata={
            "help": "Special tokens (<|im_end|>) in prompts of /v1/completions are special, as other servers have it; "
            "in messages of chats they never are."
        },
    )
    answer_parser: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "How a model's answers are read, and its calls are written (docs/reference/answer-parsers.md): "
            "MODEL=FAMILY, where its config.json and chat template do not tell.",
            "metavar": "MODEL=FAMILY,...",
        },
    )
    volatile_system: str = field(
        default=DROP,
        metadata={
            "help": "Lines of system prompts of /v1/messages that differ from request to request, and would spoil "
            "prefix hits: keep, last (moved to the end of the system prompt), drop."
        },
    )
    volatile_patterns: tuple[str, ...] = field(
        default=(ATTRIBUTION,),
        metadata={
            "help": "How such lines begin: regular expressions. The default is Claude Code's attribution, which is "
            "for Anthropic's billing and tells a model nothing.",
            "metavar": "REGEX,...",
        },
    )
    max_stops: int = field(default=16, metadata={"help": "Stop strings a request may name."})
    max_stop_chars: int = field(default=256, metadata={"help": "Characters of one stop string."})
    max_choices: int = field(default=64, metadata={"help": "Answers a request may ask for (prompts x n)."})
    max_prompt_logprobs: int = field(
        default=131_072,
        metadata={
            "help": "Log-probabilities of prompts that a request may ask for: tokens of its prompts x n x (1 + "
            "alternatives).",
            "max": MAX_PROMPT_LOGPROBS,
        },
    )
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
    max_answers: int = field(
        default=1024,
        metadata={
            "help": "Answers in flight at once (a request may want several); what comes then is refused at once, with "
            "Retry-After."
        },
    )
    max_placing: int = field(
        default=64, metadata={"help": "Placements under way at once; others wait for schedule_timeout_ms at most."}
    )
    hold_requests: int = field(
        default=0,
        metadata={
            "help": "Requests that are held here while no instance of their model is there, in order, for a mesh that "
            "scales to zero; more are answered 503, with Retry-After. Each is one of max_answers, too. 0: none is held."
        },
    )
    hold_ms: int = field(
        default=300_000,
        metadata={"help": "How long one is held at most, in ms; 503 then. Above the time that an instance starts in."},
    )
    hold_bytes: int = field(
        default=64 << 20,
        metadata={"help": "Bytes of prompts that all held requests may have together; part of max_request_memory."},
    )
    session_timeout_ms: int = field(
        default=5000,
        metadata={"help": "Longest wait for a decode session; so long a new request looks for one that it can reach."},
    )
    session_credit_tokens: int = field(
        default=256, metadata={"help": "Tokens of one answer that may wait for a slow client."}
    )
    response_store: str = field(
        default="",
        metadata={
            "help": "Where /v1/responses are kept: a file of SQLite, which gateways of one machine may share, or "
            "redis://HOST:PORT/0, for all gateways of the mesh; empty: this process."
        },
    )
    quota_redis: str = field(
        default="",
        metadata={
            "help": "Redis in which gateways of one mesh share the quotas of API keys, redis://HOST:PORT/0; empty: "
            "each gateway allows every key its whole quota.",
            "secret": True,
        },
    )
    mesh: str = field(
        default="default", metadata={"help": "Name of the mesh in Redis, the same at all gateways of it."}
    )
    max_responses: int = field(
        default=10_000, metadata={"help": "Responses that the store holds; those used longest ago go."}
    )
    max_response_bytes: int = field(
        default=64 << 20, metadata={"help": "Bytes that all stored responses together may take."}
    )
    response_ttl_s: float = field(
        default=86_400.0, metadata={"help": "A stored response goes so long after it was used last."}
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
            ("token_timeout_s", 0), ("grpc_receiving", 1), ("grpc_waiting", 0), ("grpc_receive_timeout_s", 0.1),
            ("grpc_max_calls", 1), ("grpc_max_open_calls", 1), ("grpc_max_watchers", 0), ("grpc_max_streams", 1),
            ("grpc_max_connections", 1), ("grpc_idle_s", 1), ("http_max_connections", 0),
            ("http_max_head_bytes", 1024), ("http_max_headers", 16), ("http_max_url_bytes", 256),
            ("http_head_timeout_s", 0.1), ("http_body_timeout_s", 0.1), ("http_body_rate", 1),
            ("http_idle_timeout_s", 0.1), ("http_write_timeout_s", 0.1), ("max_responses", 1),
            ("max_response_bytes", 1024), ("max_prompt_logprobs", 0), ("response_ttl_s", 0.001),
            ("hold_requests", 0), ("hold_ms", 1), ("hold_bytes", 1024),
        ):  # fmt: skip
            value = getattr(self, name)
            if not value >= low:
                raise ConfigError(f"{name}={value}: must be at least {low}", field=name)
        for name in self.allowed_hosts:
            if not name or any(mark in name for mark in ":/@ "):
                raise ConfigError(
                    f"allowed_hosts={name!r}: must be a host name, without scheme and port", field="allowed_hosts"
                )
        if self.volatile_system not in HANDLINGS:
            raise ConfigError(
                f"volatile_system={self.volatile_system!r}: must be one of {', '.join(HANDLINGS)}",
                field="volatile_system",
            )
        for pattern in self.volatile_patterns:
            try:
                re.compile(pattern)
            except re.error as err:
                raise ConfigError(
                    f"volatile_patterns={pattern!r}: not a regular expression: {err}", field="volatile_patterns"
                ) from None
        if not self.mesh or not self.mesh.isprintable() or any(letter in " :" for letter in self.mesh):
            raise ConfigError(f"mesh={self.mesh!r}: must be a name without spaces and colons", field="mesh")
        if self.max_request_memory < 2 * self.max_body_bytes:
            raise ConfigError(
                f"max_request_memory={self.max_request_memory}: must be at least 2 x max_body_bytes "
                f"({2 * self.max_body_bytes})",
                field="max_request_memory",
            )
        self.answer_families  # noqa: B018 (refuses what it cannot read)

    @property
    def model_name(self) -> str:
        """The name that clients use for `model`."""
        return self.served_name or Path(self.model).name

    @property
    def folders(self) -> dict[str, str]:
        """Checkpoint folder of every model by the name that clients use. ConfigError: not NAME=PATH, a name twice."""
        return model_folders(self.model_name, self.model, self.models)

    @property
    def answer_families(self) -> dict[str, str]:
        """Family of answers by model. ConfigError: not MODEL=FAMILY, a model or family that is not there."""
        folders, found = self.folders, dict[str, str]()
        if not self.answer_parser:
            return found
        from kvmesh.services.gateway.text.answers.families import FAMILIES  # imports llguidance

        for text in self.answer_parser:
            name, equals, family = text.partition("=")
            if not (equals and name in folders):
                raise ConfigError(
                    f"answer_parser={text!r}: must be MODEL=FAMILY of a model here", field="answer_parser"
                )
            if family not in FAMILIES:
                raise ConfigError(
                    f"answer_parser={text!r}: no such family; there are {', '.join(FAMILIES)}", field="answer_parser"
                )
            found[name] = family
        return found

    @property
    def request_memory(self) -> int:
        """What requests may hold besides the gRPC messages that are just being received: those take a place each in
        max_request_memory, whatever their size, unless that would leave too little for one request."""
        receiving = self.grpc_receiving * self.max_body_bytes
        return max(2 * self.max_body_bytes, self.max_request_memory - receiving)

    @property
    def http_limits(self) -> HttpLimits:
        """The bounds of the REST listener."""
        return HttpLimits(
            max_head_bytes=self.http_max_head_bytes,
            max_headers=self.http_max_headers,
            max_url_bytes=self.http_max_url_bytes,
            head_timeout_s=self.http_head_timeout_s,
            idle_timeout_s=self.http_idle_timeout_s,
            write_timeout_s=self.http_write_timeout_s,
            linger_bytes=4 * self.max_body_bytes,
            max_connections=self.http_max_connections,
        )

    @property
    def body_bounds(self) -> BodyBounds:
        """The bounds of the bodies of REST requests."""
        return BodyBounds(self.max_body_bytes, self.http_body_timeout_s, self.http_body_rate)

    @property
    def call_limits(self) -> CallLimits:
        """The bounds of the public gRPC server."""
        return CallLimits(
            message_bytes=self.max_body_bytes,
            calls=self.grpc_max_calls,
            streams=self.grpc_max_streams,
            connections=self.grpc_max_connections,
            idle_s=self.grpc_idle_s,
            watchers=self.grpc_max_watchers,
            open_calls=self.grpc_max_open_calls,
            receiving=self.grpc_receiving,
            waiting=self.grpc_waiting,
            receive_s=self.grpc_receive_timeout_s,
        )

    @property
    def volatile_lines(self) -> VolatileLines:
        """What becomes of lines of system prompts that differ from request to request."""
        return VolatileLines(self.volatile_system, self.volatile_patterns)

    @property
    def response_bounds(self) -> ResponseBounds:
        """What the store of responses may hold."""
        return ResponseBounds(self.max_responses, self.max_response_bytes, self.response_ttl_s)

    @property
    def hold_limits(self) -> HoldLimits:
        """The bounds of requests that are held while no instance is there."""
        return HoldLimits(self.hold_requests, self.hold_bytes, self.hold_ms / 1000)

    @property
    def limits(self) -> GatewayLimits:
        return GatewayLimits(self.max_stops, self.max_stop_chars, self.max_choices)

    @property
    def patience(self) -> RecoveryPatience:
        """How often and how long attempts that fail are made again."""
        reach_s = self.session_timeout_ms / 1000
        return RecoveryPatience(self.max_retries, reach_s, self.max_migrations, self.migration_timeout_s)

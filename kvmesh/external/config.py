"""What `kvmesh serve external` can be told."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmesh.config import ServiceConfig
from kvmesh.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ExternalConfig(ServiceConfig):
    """Engines that are not kvmesh's own, as instances of a mesh. Raises ConfigError naming field and value."""

    instance_id: str = field(
        default="", metadata={"help": "Name of this process; instances have names of their own, made of host and port."}
    )
    url: str = field(
        default="",
        metadata={
            "help": "OpenAI-compatible servers to ask, http://HOST:PORT,...: one instance each. They must take token "
            "ids: vLLM's /inference/v1/generate, or /v1/completions with return_token_ids.",
            "metavar": "URL,...",
        },
    )
    endpoints_file: str = field(
        default="",
        metadata={
            "help": "JSON or YAML file of more such servers; it may change while this runs "
            "(docs/howto/external-engines.md).",
            "metavar": "FILE",
        },
    )
    model: str = field(
        default="",
        metadata={
            "help": "Folder of the model that the engines serve: config.json and generation_config.json are read, "
            "no weights; needed.",
            "metavar": "FOLDER",
        },
    )
    served_name: str = field(default="", metadata={"help": "Model name clients use; empty: the folder's name."})
    engine_model: str = field(
        default="", metadata={"help": "The engines' own name for the model; empty: the first that each serves."}
    )
    engine_api_key: str = field(
        default="", metadata={"help": "Sent to the engines as a bearer token; empty: none.", "secret": True}
    )
    conductor: str = field(default="127.0.0.1:0", metadata={"help": "Conductors, HOST:PORT,HOST:PORT,...; needed."})
    advertise_host: str = field(default="", metadata={"help": "Address that gateways dial; empty: host."})
    max_running: int = field(
        default=256, metadata={"help": "Requests that one engine is given at once; more are refused.", "min": 1}
    )
    block_tokens: int = field(
        default=16,
        metadata={"help": "Tokens a block of an engine whose /metrics do not tell (vllm:cache_config_info).", "min": 1},
    )
    blocks: int = field(
        default=4096, metadata={"help": "Blocks of KV of an engine whose /metrics do not tell.", "min": 1}
    )
    max_context_tokens: int = field(
        default=0,
        metadata={"help": "Longest context where /v1/models does not tell max_model_len; 0: the model's.", "min": 0},
    )
    poll_ms: int = field(
        default=1_000,
        metadata={
            "help": "An engine's /metrics are read this often, and five times as often while it has requests that went "
            "past kvmesh.",
            "min": 50,
        },
    )
    engine_timeout_ms: int = field(
        default=2_000,
        metadata={"help": "Connecting to an engine, and reading its /metrics, take at most so long.", "min": 10},
    )
    engine_silence_ms: int = field(
        default=5_000,
        metadata={
            "help": "An engine whose /metrics have not been answered for so long gets no work, and what it has goes on "
            "elsewhere.",
            "min": 100,
        },
    )
    token_silence_ms: int = field(
        default=60_000,
        metadata={
            "help": "An answer without a further token for so long, once it has begun, goes on elsewhere.",
            "min": 100,
        },
    )
    stop_grace_ms: int = field(
        default=30_000,
        metadata={
            "help": "When it stops, or an endpoint leaves its file, running answers may go on so long.",
            "min": 0,
        },
    )

    def check(self) -> None:
        """Raises ConfigError where something needed is missing."""
        if not self.url and not self.endpoints_file:
            raise ConfigError("url='': give --url http://HOST:PORT, or --endpoints-file", field="url")
        if not self.model:
            raise ConfigError(
                "model='': the folder of the model that the engines serve is needed (--model)", field="model"
            )

"""What an instance that prefills and decodes can be told."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from kvmesh.errors import ConfigError
from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.services.decode.config import DecodeConfig
from kvmesh.services.prefill.config import PrefillConfig

ROLES = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE, "both": pb.ROLE_BOTH}


@dataclass(frozen=True, kw_only=True)
class CoupledConfig(DecodeConfig, PrefillConfig):
    """Fields of a coupled instance: those of both halves, and what joins them."""

    role: str = field(
        default="both",
        metadata={"help": "What it does at first: both, prefill or decode (`kvmesh role`).", "choices": tuple(ROLES)},
    )
    mixed_chunk_tokens: int = field(
        default=0,
        metadata={
            "help": "Prompt tokens in one step at most while answers are generated in it, at least 16; 0: by device, "
            "256 on a CPU, 512 or 1,024 on a GPU by its memory.",
            "min": 0,
        },
    )

    @classmethod
    def of_decode(cls, config: DecodeConfig) -> CoupledConfig:
        """A decode instance that computes short prompts itself."""
        return cls(role="decode", **{f.name: getattr(config, f.name) for f in dataclasses.fields(config)})

    def check(self) -> None:
        """Raises ConfigError naming key and value."""
        super().check()
        if 0 < self.mixed_chunk_tokens < 16:
            raise ConfigError(
                f"mixed_chunk_tokens={self.mixed_chunk_tokens}: must be at least 16", field="mixed_chunk_tokens"
            )
        if self.role not in ROLES:
            raise ConfigError(f"role={self.role!r}: must be one of {', '.join(ROLES)}", field="role")

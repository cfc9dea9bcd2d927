"""What an external instance is registered as: from the engine's own words, and the folder of its model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmesh.errors import ConfigError
from kvmesh.external.engine_protocol import EngineInterface
from kvmesh.kvcache.keys import EXTERNAL
from kvmesh.rpc.pb import common_pb2 as pb

MAX_CONFIG_BYTES = 4 << 20
MOST_CONTEXT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """What the folder of a model says that its engines do not tell."""

    name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_context_tokens: int
    digest: str  # of config.json: engines of one model have one

    @classmethod
    def read(cls, folder: str, served_name: str) -> ModelFolder:
        """Reads config.json, and generation_config.json if there is one. Raises ConfigError naming file and key."""
        path = Path(folder).expanduser()
        raw = _bytes(path / "config.json")
        config = _object(raw, path / "config.json")
        if isinstance(text := config.get("text_config"), dict):
            config = config | text
        generation = path / "generation_config.json"
        told = _object(_bytes(generation), generation) if generation.is_file() else {}
        vocab, longest = config.get("vocab_size"), config.get("max_position_embeddings")
        if type(vocab) is not int or vocab < 1:
            raise ConfigError(
                f"{path / 'config.json'}: vocab_size={vocab!r}: must be a number of tokens", field="model"
            )
        return cls(
            served_name or path.resolve().name,
            vocab,
            _ids(told.get("eos_token_id", config.get("eos_token_id"))),
            longest if type(longest) is int and 0 < longest <= MOST_CONTEXT else 0,
            hashlib.sha256(raw).hexdigest()[:32],
        )


def _bytes(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as err:
        raise ConfigError(f"model: {path}: {err.strerror}", field="model") from None
    if len(raw) > MAX_CONFIG_BYTES:
        raise ConfigError(f"model: {path}: has more than {MAX_CONFIG_BYTES} bytes", field="model")
    return raw


def _object(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"model: {path}: is no JSON object", field="model")
    return found


def _ids(told: Any) -> tuple[int, ...]:
    listed = told if isinstance(told, list) else [told]
    return tuple(one for one in listed if type(one) is int and one >= 0)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine was found to be. Others mean another life of its instance."""

    model: str  # the engine's name for it
    interface: EngineInterface
    max_context_tokens: int
    block_tokens: int
    blocks: int
    keeps_prefixes: bool = True


def card_of(folder: ModelFolder, facts: EngineFacts) -> pb.ModelCard:
    """Returns the card of an external instance. Its fingerprint names the model as the mesh calls it and as its
    config.json has it: which weights an engine has loaded, nobody tells."""
    named = hashlib.sha256(f"{folder.name}\0{folder.digest}".encode()).hexdigest()[:32]
    return pb.ModelCard(
        name=folder.name,
        fingerprint=EXTERNAL + named,
        block_tokens=facts.block_tokens,
        kv_dtype="",
        max_context_tokens=facts.max_context_tokens,
        vocab_size=folder.vocab_size,
        eos_token_ids=folder.eos_token_ids,
    )

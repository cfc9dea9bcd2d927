"""Layers that see chunks and layers without rope as config.json of Llama 4 states them; no torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvmesh.engine.config_read import bad, boolean, integer, positive

FULL, CHUNKED = "full_attention", "chunked_attention"


@dataclass(frozen=True, slots=True)
class NopeConfig:
    """Describes the layers without rope. With `growth` a query of theirs at position t is multiplied by 1 + growth *
    log(1 + floor((t + 1) / step)), so that scores of long contexts stay apart."""

    layers: tuple[int, ...]
    step: int = 8192
    growth: float = 0.0


def read_nope(raw: Mapping[str, Any], layers: int) -> NopeConfig | None:
    """Returns None where every layer has rope. `no_rope_layers` says 1 for a layer that has it."""
    tuned = raw.get("attn_temperature_tuning", True)
    if not isinstance(tuned, int):  # true or a number that transformers takes for true
        raise bad("attn_temperature_tuning", tuned, "must be true or false")
    without = tuple(layer for layer, roped in enumerate(_roped(raw, layers)) if not roped)
    if not without:
        return None
    growth = positive(raw, "attn_scale", 0.1) if tuned else 0.0
    return NopeConfig(without, integer(raw, "floor_scale", 8192), growth)


def read_chunks(raw: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Returns the chunk of each layer in tokens; 0 means that it sees everything."""
    chunk = None if raw.get("attention_chunk_size") is None else integer(raw, "attention_chunk_size")
    types = raw.get("layer_types")
    if types is None:
        return tuple((chunk or 0) * roped for roped in _roped(raw, layers))
    if not isinstance(types, list) or any(name not in (FULL, CHUNKED) for name in types):
        raise bad("layer_types", types, f"not supported; supported: a list of {FULL} and {CHUNKED}")
    if len(types) != layers:
        raise bad("layer_types", types, f"must name num_hidden_layers={layers} layers")
    if CHUNKED in types and chunk is None:
        raise bad("attention_chunk_size", chunk, f"some layers are of {CHUNKED}, which needs a chunk")
    return tuple(chunk or 0 if name == CHUNKED else 0 for name in types)


def _roped(raw: Mapping[str, Any], layers: int) -> list[bool]:
    """Says of each layer whether it has rope: all but each `no_rope_layer_interval`-th unless `no_rope_layers` says
    so."""
    interval = integer(raw, "no_rope_layer_interval", 4)
    value = raw.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(layers)]
    if not isinstance(value, list) or len(value) != layers or any(flag not in (0, 1) for flag in value):
        raise bad("no_rope_layers", value, f"must be a list of 0 or 1 for num_hidden_layers={layers} layers")
    return [bool(flag) for flag in value]


def normed_without_weight(raw: Mapping[str, Any]) -> bool:
    """Says whether rotated queries and keys are divided by their root mean square."""
    return boolean(raw, "use_qk_norm", True)

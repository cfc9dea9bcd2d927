"""Rotary embedding as config.json states it, in both spellings: `rope_parameters` (transformers 5, flat or one object
for each layer type) and `rope_scaling` with `rope_theta`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvmesh.engine.config_families import FULL, SLIDING, Family
from kvmesh.engine.config_read import bad, boolean, integer, positive, positives

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Describes a rotary embedding: `rope_type` and the parameters that this type reads (the others keep their
    defaults)."""

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0  # multiplies cos and sin
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()  # longrope: what each frequency is divided by, long or short already chosen
    partial: float = 1.0  # the first `rotary_dim` of head_dim are rotated, the others stay

    def rotary_dim(self, head_dim: int) -> int:
        return int(head_dim * self.partial)


def read_ropes(
    raw: Mapping[str, Any], family: Family, head_dim: int, max_positions: int, limit: int
) -> tuple[RopeConfig, RopeConfig | None]:
    """Reads the embedding of the layers that see everything, and that of layers with a window where they have one of
    their own.

    `limit` is the longest context that will be asked for, which chooses between longrope's two sets of factors."""
    params = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(params, Mapping):
        raise bad("rope_parameters", params, "must be an object")
    sizes = (head_dim, max_positions, limit)
    if family.local_theta is None:
        if {FULL, SLIDING} & params.keys():
            raise bad("rope_parameters", params, f"one rope for each layer type is not what {family.model_type} has")
        return _rope(raw, params, raw.get("rope_theta") or 10_000.0, family, *sizes), None
    by_type = raw.get("rope_parameters") or {}
    if not isinstance(by_type, Mapping) or not by_type.keys() <= {FULL, SLIDING}:
        raise bad("rope_parameters", by_type, f"must be an object with the keys {FULL} and {SLIDING}")
    full, local = (by_type.get(name) or {} for name in (FULL, SLIDING))
    for part in (full, local):
        if not isinstance(part, Mapping):
            raise bad("rope_parameters", by_type, "must hold an object for each layer type")
    full = {**full, **(raw.get("rope_scaling") or {})}  # as transformers: the older spelling is of these layers alone
    return (
        _rope(raw, full, raw.get("rope_theta") or 1_000_000.0, family, *sizes),
        _rope(raw, local, raw.get("rope_local_base_freq") or family.local_theta, family, *sizes),
    )


def max_context(rope: RopeConfig, max_positions: int, limit: int) -> int:
    """Returns how many positions the model allows. linear and yarn stretch the positions by `factor`; llama3 and
    longrope configs state the stretched length, which longrope's short factors do not reach."""
    if rope.rope_type == "longrope" and limit <= rope.original_max_position_embeddings:
        return min(max_positions, rope.original_max_position_embeddings)
    if rope.rope_type == "linear":
        return int(max_positions * rope.factor)
    if rope.rope_type == "yarn":
        return max(max_positions, int(rope.original_max_position_embeddings * rope.factor))
    return max_positions


def _rope(
    raw: Mapping[str, Any],
    params: Mapping[str, Any],
    theta_default: float,
    family: Family,
    head_dim: int,
    max_positions: int,
    limit: int,
) -> RopeConfig:
    rope_type = params.get("rope_type", params.get("type", "default"))
    rope_type = family.rope_names.get(rope_type, rope_type)
    known = family.rope_types or ROPE_TYPES
    if rope_type not in known:
        raise bad("rope_type", rope_type, f"not supported; supported: {', '.join(known)}")
    partial = _partial(raw, params, family, head_dim)
    theta = positive({"rope_theta": params.get("rope_theta")}, "rope_theta", theta_default)
    if rope_type == "default":
        return RopeConfig(theta=theta, partial=partial)
    if rope_type == "linear":
        return RopeConfig("linear", theta, positive(params, "factor"))
    original = integer(
        {"original_max_position_embeddings": raw.get("original_max_position_embeddings")},
        "original_max_position_embeddings",
        params.get("original_max_position_embeddings") or max_positions,
    )
    if rope_type == "llama3":
        low, high = positive(params, "low_freq_factor"), positive(params, "high_freq_factor")
        if high < low:  # where they are equal, as in Llama 4 Scout, nothing is blended
            raise bad("high_freq_factor", high, f"must be at least low_freq_factor={low}")
        return RopeConfig("llama3", theta, positive(params, "factor"), original, low, high)
    factor = positive(params, "factor", max_positions / original)
    if rope_type == "longrope":
        return RopeConfig(
            "longrope",
            theta,
            factor,
            original,
            attention_factor=_longrope_attention_factor(params, factor, original),
            factors=_longrope_factors(params, int(head_dim * partial) // 2, limit > original),
            partial=partial,
        )
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        attention_factor=_yarn_attention_factor(params, factor),
        beta_fast=positive({"beta_fast": params.get("beta_fast") or None}, "beta_fast", 32.0),
        beta_slow=positive({"beta_slow": params.get("beta_slow") or None}, "beta_slow", 1.0),
        truncate=boolean(params, "truncate", True),
    )


def _partial(raw: Mapping[str, Any], params: Mapping[str, Any], family: Family, head_dim: int) -> float:
    value = params.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if value is None and family.rotary_dim and raw.get("rotary_dim") is not None:
        value = integer(raw, "rotary_dim") / head_dim
    if value in (None, 1):
        return 1.0
    if not family.partial_rotary:
        raise bad("partial_rotary_factor", value, "not supported; supported: 1")
    partial = positive({"partial_rotary_factor": value}, "partial_rotary_factor")
    rotary = int(head_dim * partial)
    if partial > 1 or rotary < 2 or rotary % 2:
        raise bad("partial_rotary_factor", value, f"must rotate an even part of head_dim={head_dim}")
    return partial


def _yarn_attention_factor(params: Mapping[str, Any], factor: float) -> float:
    if params.get("attention_factor") is not None:
        return positive(params, "attention_factor")

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if params.get("mscale") and params.get("mscale_all_dim"):
        return mscale(positive(params, "mscale")) / mscale(positive(params, "mscale_all_dim"))
    return mscale(1.0)


def _longrope_factors(params: Mapping[str, Any], count: int, long: bool) -> tuple[float, ...]:
    """Chooses the factors once for a model, by the longest context that it is opened for (vLLM's rule): KV that
    requests share by their prefix cannot depend on how long one of them becomes (docs/reference/models.md)."""
    short_factors, long_factors = positives(params, "short_factor", count), positives(params, "long_factor", count)
    return long_factors if long else short_factors


def _longrope_attention_factor(params: Mapping[str, Any], factor: float, original: int) -> float:
    """Returns the scale of LongRoPE (arXiv 2402.13753) as transformers has it: sqrt(1 + ln factor / ln original)."""
    if params.get("attention_factor") is not None:
        return positive(params, "attention_factor")
    if factor <= 1:
        return 1.0
    if original == 1:
        raise bad("original_max_position_embeddings", original, "must be greater than 1")
    return math.sqrt(1 + math.log(factor) / math.log(original))

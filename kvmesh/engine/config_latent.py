"""Multi-head latent attention as config.json of DeepSeek-V2 and -V3 states it; no torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvmesh.engine.config_read import bad, boolean, integer, positive

PIECE_TOKENS = 8192  # of contexts whose K and V are written out at a time on a GPU
WORKSPACE_BYTES = 256 << 20  # of K and V of some heads, and of what their queries have found so far
# Of what shares of absorbed rows have found, until they are joined: 128 heads of 512 elements on a GPU with 132
# processors have at most 208 MB.
PARTIAL_BYTES = 200 << 20


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Describes latent attention: widths in elements, and what scores are multiplied by. A query or key of a head has
    `nope` elements without position and `rope` with it; keys share the latter over all heads."""

    query_rank: int  # of the matrix that makes queries; 0: the matrix is whole
    latent: int
    nope: int
    rope: int
    value: int
    scale: float
    bias: bool  # of the projections down to a rank, and of the output's
    interleaved: bool  # the projections give each pair that rope turns side by side, not half a width apart

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> LatentConfig:
        """Reads config.json. Raises CheckpointError naming the first key that is wrong."""
        whole = "q_lora_rank" in raw and raw["q_lora_rank"] is None
        nope, rope = integer(raw, "qk_nope_head_dim", 128), integer(raw, "qk_rope_head_dim", 64)
        if rope % 2:
            raise bad("qk_rope_head_dim", rope, "must be even (rotary embedding turns pairs)")
        return cls(
            query_rank=0 if whole else integer(raw, "q_lora_rank", 1536),
            latent=integer(raw, "kv_lora_rank", 512),
            nope=nope,
            rope=rope,
            value=integer(raw, "v_head_dim", 128),
            scale=float((nope + rope) ** -0.5) * _score_factor(raw),
            bias=boolean(raw, "attention_bias"),
            interleaved=boolean(raw, "rope_interleave", True),
        )


def written_out_bytes(
    sizes: LatentConfig, queries: int, itemsize: int, piece_tokens: int = PIECE_TOKENS, workspace: int = WORKSPACE_BYTES
) -> int:
    """Returns what writing out K and V takes at most beside a step of so many queries, in one layer on a GPU: the
    workspace with its state, and the rows gathered for it."""
    of_head = piece_tokens * (sizes.nope + sizes.value) * itemsize + queries * (sizes.value + 1) * 4
    return max(workspace, of_head) + piece_tokens * (sizes.latent + sizes.rope) * itemsize


def _score_factor(raw: Mapping[str, Any]) -> float:
    """Returns what a stretched rope adds to the scale: the square of YaRN's factor for `mscale_all_dim`, since it
    stands for a factor of queries and of keys, in all of their elements. What `mscale` says of the rotated elements
    alone is in cos and sin (`RopeConfig.attention_factor`)."""
    params = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(params, Mapping):
        raise bad("rope_parameters", params, "must be an object")
    if params.get("rope_type", params.get("type", "default")) == "default" or not params.get("mscale_all_dim"):
        return 1.0
    factor = positive(params, "factor")
    return (0.1 * positive(params, "mscale_all_dim") * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0

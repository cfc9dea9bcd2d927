"""What a Hugging Face `config.json` says about a model, validated; no torch here.

Defaults are those that transformers gives a key that the file leaves out. Everything that the engine cannot run is
refused with a CheckpointError whose one line names the key, its value and what is supported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvmesh.rpc.errors import CheckpointError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Family:
    """What transformers' config class of one architecture adds to the keys."""

    model_type: str
    max_position_embeddings: int
    head_dim: int | None  # None: hidden_size / heads
    eos_token_id: int | None
    qkv_bias: bool | None  # None: the key attention_bias decides, for the output projection too
    qk_norm: bool
    mlp_bias: bool  # the key mlp_bias is read
    sliding_window: bool  # the key use_sliding_window is read


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("llama", 2048, None, 2, None, False, True, False),
    "Qwen2ForCausalLM": Family("qwen2", 32768, None, None, True, False, False, True),
    "Qwen3ForCausalLM": Family("qwen3", 32768, 128, None, None, True, False, True),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: `rope_type` and the parameters that this type reads (the others keep their defaults)."""

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


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How one layer attends: a token sees itself and the `window` - 1 tokens before it (0: all), scores are
    `q·k * scale`, and with `softcap` c they become `c * tanh(scores / c)` (0: they stay)."""

    scale: float
    window: int = 0
    softcap: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model. `max_context_tokens` is what positions allow after rope scaling; `dtype` is the checkpoint's own."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    max_position_embeddings: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    dtype: str

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """Read config.json (`raw`) and generation_config.json (`generation`, for its end-of-sequence ids).

        Raises CheckpointError naming the first key that is missing, wrong or not supported."""
        architecture, family = _family(raw)
        _refuse_unsupported(raw, family)
        hidden, heads = _int(raw, "hidden_size"), _int(raw, "num_attention_heads")
        kv_heads = _int(raw, "num_key_value_heads", heads)
        head_dim = _int(raw, "head_dim", family.head_dim or hidden // heads)
        if heads % kv_heads:
            raise _bad("num_key_value_heads", kv_heads, f"must divide num_attention_heads={heads}")
        if head_dim % 2:
            raise _bad("head_dim", head_dim, "must be even (rotary embedding turns pairs)")
        vocab = _int(raw, "vocab_size")
        max_positions = _int(raw, "max_position_embeddings", family.max_position_embeddings)
        rope = _rope(raw, max_positions)
        attention_bias = _bool(raw, "attention_bias") if family.qkv_bias is None else False
        return cls(
            architecture=architecture,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=_int(raw, "intermediate_size"),
            layers=_int(raw, "num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_positive(raw, "rms_norm_eps", 1e-6),
            tie_word_embeddings=_bool(raw, "tie_word_embeddings"),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=attention_bias,
            mlp_bias=_bool(raw, "mlp_bias") if family.mlp_bias else False,
            qk_norm=family.qk_norm,
            rope=rope,
            max_position_embeddings=max_positions,
            max_context_tokens=_max_context(rope, max_positions),
            eos_token_ids=_eos(raw, generation or {}, vocab, family.eos_token_id),
            dtype=_dtype(raw),
        )

    def canonical(self) -> dict[str, Any]:
        """What decides the KV and the logits of a token, for the fingerprint (eos ids, context limit and the
        stored dtype's name do not; stored bytes enter it by themselves)."""
        fields = asdict(self)
        for name in ("eos_token_ids", "max_context_tokens", "max_position_embeddings", "dtype"):
            del fields[name]
        return fields

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        """One for each layer."""
        return (AttentionSpec(self.head_dim**-0.5),) * self.layers

    @property
    def kv_elements_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim


def _bad(key: str, value: Any, why: str) -> CheckpointError:
    shown = repr(value)
    return CheckpointError(f"config.json: {key}={shown[:77] + '...' if len(shown) > 80 else shown}: {why}", field=key)


def _family(raw: Mapping[str, Any]) -> tuple[str, Family]:
    named = raw.get("architectures")
    if named is None:
        by_type = {family.model_type: name for name, family in FAMILIES.items()}
        named = [by_type.get(str(raw.get("model_type")), f"model_type {raw.get('model_type')}")]
    if not isinstance(named, list) or not named:
        raise _bad("architectures", named, "must be a list of one name")
    for name in named:
        if isinstance(name, str) and name in FAMILIES:
            return name, FAMILIES[name]
    raise _bad("architectures", named, f"not supported; supported: {', '.join(FAMILIES)}")


def _refuse_unsupported(raw: Mapping[str, Any], family: Family) -> None:
    act = raw.get("hidden_act", "silu")
    if act != "silu":
        raise _bad("hidden_act", act, "not supported; supported: silu")
    if raw.get("quantization_config"):
        raise _bad("quantization_config", raw["quantization_config"], f"not supported; supported: {', '.join(DTYPES)}")
    layer_types = raw.get("layer_types")
    if layer_types is not None and (not isinstance(layer_types, list) or set(layer_types) - {"full_attention"}):
        raise _bad("layer_types", layer_types, "not supported; supported: full_attention in every layer")
    if family.sliding_window and layer_types is None and _bool(raw, "use_sliding_window"):
        window, first = raw.get("sliding_window", 4096), raw.get("max_window_layers", 28)
        if window is not None and isinstance(first, int) and first < _int(raw, "num_hidden_layers"):
            raise _bad("use_sliding_window", True, "not supported; supported: full attention in every layer")


def _get(raw: Mapping[str, Any], key: str, default: Any) -> Any:
    """The value, `default` where the key is absent or null; CheckpointError when that is None as well."""
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"config.json: {key} is missing", field=key)
    return value


def _int(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = _get(raw, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise _bad(key, value, "must be a positive integer")
    return value


def _positive(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = _get(raw, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise _bad(key, value, "must be a positive number")
    return float(value)


def _bool(raw: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = _get(raw, key, default)
    if not isinstance(value, bool):
        raise _bad(key, value, "must be true or false")
    return value


def _dtype(raw: Mapping[str, Any]) -> str:
    """`dtype` (transformers 5) or `torch_dtype`; float32 where neither is known."""
    value = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    return value if value in DTYPES else "float32"


def _eos(raw: Mapping[str, Any], generation: Mapping[str, Any], vocab: int, default: int | None) -> tuple[int, ...]:
    """Ids of both files, config.json's first, without repeats."""
    found: dict[int, None] = {}
    for name, source in (("config.json", raw), ("generation_config.json", generation)):
        value = source.get("eos_token_id", default if source is raw else None)
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(token, bool) or not isinstance(token, int):
                raise CheckpointError(f"{name}: eos_token_id={value!r}: must be an integer or a list of them")
            if 0 <= token < vocab:  # transformers uses -1 and ids outside the vocabulary for "none"
                found[token] = None
    return tuple(found)


def _rope(raw: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_scaling` + `rope_theta`; the older wins if set."""
    params = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(params, Mapping):
        raise _bad("rope_parameters", params, "must be an object")
    rope_type = params.get("rope_type", params.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise _bad("rope_type", rope_type, f"not supported; supported: {', '.join(ROPE_TYPES)}")
    partial = params.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise _bad("partial_rotary_factor", partial, "not supported; supported: 1")
    theta = _positive({"rope_theta": params.get("rope_theta")}, "rope_theta", raw.get("rope_theta") or 10_000.0)
    if rope_type == "default":
        return RopeConfig(theta=theta)
    if rope_type == "linear":
        return RopeConfig("linear", theta, _positive(params, "factor"))
    original = _int(
        {"original_max_position_embeddings": raw.get("original_max_position_embeddings")},
        "original_max_position_embeddings",
        params.get("original_max_position_embeddings") or max_positions,
    )
    if rope_type == "llama3":
        low, high = _positive(params, "low_freq_factor"), _positive(params, "high_freq_factor")
        if high <= low:
            raise _bad("high_freq_factor", high, f"must be greater than low_freq_factor={low}")
        return RopeConfig("llama3", theta, _positive(params, "factor"), original, low, high)
    factor = _positive(params, "factor", max_positions / original)
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        attention_factor=_yarn_attention_factor(params, factor),
        beta_fast=_positive({"beta_fast": params.get("beta_fast") or None}, "beta_fast", 32.0),
        beta_slow=_positive({"beta_slow": params.get("beta_slow") or None}, "beta_slow", 1.0),
        truncate=_bool(params, "truncate", True),
    )


def _yarn_attention_factor(params: Mapping[str, Any], factor: float) -> float:
    if params.get("attention_factor") is not None:
        return _positive(params, "attention_factor")

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if params.get("mscale") and params.get("mscale_all_dim"):
        return mscale(_positive(params, "mscale")) / mscale(_positive(params, "mscale_all_dim"))
    return mscale(1.0)


def _max_context(rope: RopeConfig, max_positions: int) -> int:
    """linear and yarn stretch the positions by `factor`; llama3 configs state the stretched length themselves."""
    if rope.rope_type == "linear":
        return int(max_positions * rope.factor)
    if rope.rope_type == "yarn":
        return max(max_positions, int(rope.original_max_position_embeddings * rope.factor))
    return max_positions

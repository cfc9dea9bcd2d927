"""What transformers' config class of one architecture adds to the keys: the config side of a model family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvmesh.engine.config_experts import (
    ExpertsConfig,
    read_deepseek_v2,
    read_deepseek_v3,
    read_glm4_moe,
    read_gpt_oss,
    read_llama4,
    read_minimax_m2,
    read_mixtral,
    read_qwen3_moe,
    read_qwen3_next,
)
from kvmesh.engine.config_read import bad, boolean, integer

FULL, SLIDING = "full_attention", "sliding_attention"

SlidesByDefault = Callable[[Mapping[str, Any], int], bool]  # of (config, layer), where `sliding_window` is set


def _every_layer(_raw: Mapping[str, Any], _layer: int) -> bool:
    return True


def _from_max_window_layers(raw: Mapping[str, Any], layer: int) -> bool:
    first = raw["max_window_layers"]
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise bad("max_window_layers", first, "must be an integer of at least 0")
    return bool(layer >= first)


def _every_other(_raw: Mapping[str, Any], layer: int) -> bool:
    return layer % 2 == 0


def _all_but_each_fourth(_raw: Mapping[str, Any], layer: int) -> bool:
    return (layer + 1) % 4 != 0


def _all_but_each_nth(raw: Mapping[str, Any], layer: int) -> bool:
    return (layer + 1) % integer(raw, "sliding_window_pattern") != 0


@dataclass(frozen=True, slots=True)
class Family:
    """Describes how one family of models writes its config.json. `defaults` are the values of keys that a file leaves
    out; a null there counts as left out, but for the keys of NULLABLE, where it means "none"."""

    model_type: str
    defaults: Mapping[str, Any]
    qkv_bias: bool | None = False  # None: the key attention_bias decides, for the output projection too
    o_bias: bool = True  # the output projection has a bias where attention_bias says so
    mlp_bias: bool = False  # the key mlp_bias is read
    qk_norm: bool | None = False  # None: the key use_qk_norm decides
    row_norm: bool = False  # qk_norm is over all heads at once
    slides: SlidesByDefault | None = None  # None: no layer has a window
    layer_types: bool = True  # the key layer_types decides which layers have the window
    gemma: bool = False  # norms of 1 + weight, before and after each half of a layer; gelu; scaled embedding
    only_post_norms: bool = False  # attention and MLP are normed after, not before
    multipliers: bool = False  # of embedding, scores, residual and logits
    experts: Callable[[Mapping[str, Any], int], ExpertsConfig] | None = None  # of (config, layers)
    local_theta: float | None = None  # layers with a window rotate by a rope of their own, with this theta
    rope_types: tuple[str, ...] = ()  # () all
    rope_names: Mapping[str, str] = field(default_factory=dict)  # older names of rope types
    partial_rotary: bool = False
    rotary_dim: bool = False  # the key rotary_dim may say which part of a head rotates
    fused: bool = False  # the checkpoint joins q, k, v and gate, up
    delta: bool = False  # some layers are gated DeltaNet; norms of 1 + weight
    text_config: bool = False  # of several modalities: the language model's keys and tensors lie one level down
    latent: bool = False  # attention is multi-head latent attention
    sinks: bool = False  # attention has sinks
    chunked: bool = False  # layers see chunks, some have no rope, queries and keys are normed without weights
    dense_size: str = "intermediate_size"  # the key that says how wide the MLPs are
    mtp: bool = False  # the files may have MTP heads; one where config.json does not say how many


NULLABLE = (
    "num_key_value_heads",
    "sliding_window",
    "eos_token_id",
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "q_lora_rank",
    "attention_chunk_size",
)

_LLAMA = {"rms_norm_eps": 1e-6, "eos_token_id": 2, "max_position_embeddings": 2048}
_MISTRAL = _LLAMA | {"max_position_embeddings": 131_072, "sliding_window": 4096, "num_key_value_heads": 8}
_QWEN = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "use_sliding_window": False,
}
_GEMMA2 = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_GEMMA3 = _GEMMA2 | {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}
_PHI3 = {
    "rms_norm_eps": 1e-5,
    "eos_token_id": 32_000,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
}
_MINIMAX_M2 = {
    "vocab_size": 200_064,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 196_608,
    "rope_theta": 5e6,
    "eos_token_id": 200_020,
}
_GPT_OSS = {
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
    "sliding_window": 128,
    "attention_bias": True,
    "rope_theta": 150_000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
_LLAMA4 = {
    "vocab_size": 202_048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
    "rope_theta": 5e5,
    "attention_chunk_size": 8192,
    "eos_token_id": 2,
}

_DEEPSEEK_V3 = {
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
}

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("llama", _LLAMA, qkv_bias=None, mlp_bias=True, layer_types=False),
    "MistralForCausalLM": Family("mistral", _MISTRAL, slides=_every_layer),
    "MinistralForCausalLM": Family("ministral", _MISTRAL, slides=_every_layer),
    "Qwen2ForCausalLM": Family("qwen2", _QWEN, qkv_bias=True, slides=_from_max_window_layers),
    "Qwen3ForCausalLM": Family(
        "qwen3", _QWEN | {"head_dim": 128}, qkv_bias=None, qk_norm=True, slides=_from_max_window_layers
    ),
    "Gemma2ForCausalLM": Family("gemma2", _GEMMA2, qkv_bias=None, slides=_every_other, gemma=True),
    "Gemma3ForCausalLM": Family(
        "gemma3_text", _GEMMA3, None, qk_norm=True, slides=_all_but_each_nth, gemma=True, local_theta=10_000.0
    ),
    "Gemma3ForConditionalGeneration": Family(
        "gemma3",
        _GEMMA3,
        None,
        qk_norm=True,
        slides=_all_but_each_nth,
        gemma=True,
        local_theta=10_000.0,
        text_config=True,
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        _PHI3,
        slides=_every_layer,
        layer_types=False,
        rope_types=("default", "longrope"),
        rope_names={"su": "longrope", "yarn": "longrope"},
        partial_rotary=True,
        fused=True,
    ),
    "GraniteForCausalLM": Family("granite", _LLAMA, qkv_bias=None, mlp_bias=True, layer_types=False, multipliers=True),
    "Olmo3ForCausalLM": Family(
        "olmo3",
        {
            "rms_norm_eps": 1e-5,
            "eos_token_id": 50_279,
            "max_position_embeddings": 2048,
            "sliding_window": 4096,
            "rope_theta": 5e5,
        },
        qkv_bias=None,
        qk_norm=True,
        row_norm=True,
        only_post_norms=True,
        slides=_all_but_each_fourth,
        local_theta=5e5,
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        {
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 32_768,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "use_sliding_window": False,
        },
        qkv_bias=None,
        qk_norm=True,
        slides=_every_layer,
        layer_types=False,
        experts=read_qwen3_moe,
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        {
            "rms_norm_eps": 1e-5,
            "eos_token_id": 2,
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "rope_theta": 1e6,
        },
        slides=_every_layer,
        layer_types=False,
        experts=read_mixtral,
    ),
    "Glm4MoeForCausalLM": Family(
        "glm4_moe",
        {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5,
        },
        qkv_bias=None,
        o_bias=False,
        qk_norm=None,
        layer_types=False,
        rope_types=("default",),
        partial_rotary=True,
        experts=read_glm4_moe,
        mtp=True,
    ),
    "MiniMaxM2ForCausalLM": Family(
        "minimax_m2",
        _MINIMAX_M2,
        qk_norm=True,
        row_norm=True,
        layer_types=False,
        rope_types=("default",),
        partial_rotary=True,
        rotary_dim=True,
        experts=read_minimax_m2,
    ),
    "Qwen3NextForCausalLM": Family(
        "qwen3_next",
        {
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 32_768,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "partial_rotary_factor": 0.25,
        },
        qkv_bias=None,
        qk_norm=True,
        rope_types=("default",),
        partial_rotary=True,
        experts=read_qwen3_next,
        delta=True,
        mtp=True,
    ),
    "DeepseekV2ForCausalLM": Family(
        "deepseek_v2",
        {
            "vocab_size": 102_400,
            "hidden_size": 4096,
            "intermediate_size": 11_008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "eos_token_id": 2,
        },
        layer_types=False,
        experts=read_deepseek_v2,
        latent=True,
    ),
    "DeepseekV3ForCausalLM": Family(
        "deepseek_v3", _DEEPSEEK_V3, layer_types=False, experts=read_deepseek_v3, latent=True, mtp=True
    ),
    "KimiK2ForCausalLM": Family(
        "kimi_k2", _DEEPSEEK_V3, layer_types=False, experts=read_deepseek_v3, latent=True, mtp=True
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss", _GPT_OSS, qkv_bias=None, slides=_every_other, experts=read_gpt_oss, sinks=True
    ),
    "Llama4ForCausalLM": Family(
        "llama4_text",
        _LLAMA4,
        qkv_bias=None,
        rope_types=("default", "llama3"),  # others scale cos and sin, which the norm behind them would undo
        experts=read_llama4,
        chunked=True,
        dense_size="intermediate_size_mlp",
    ),
    "Llama4ForConditionalGeneration": Family(
        "llama4",
        _LLAMA4,
        qkv_bias=None,
        rope_types=("default", "llama3"),
        experts=read_llama4,
        chunked=True,
        dense_size="intermediate_size_mlp",
        text_config=True,
    ),
}


def find_family(raw: Mapping[str, Any]) -> tuple[str, Family]:
    """Returns the architecture and the family that `architectures`, or `model_type` where that is absent, names."""
    named = raw.get("architectures")
    if named is None:
        by_type = {family.model_type: name for name, family in FAMILIES.items()}
        named = [by_type.get(str(raw.get("model_type")), f"model_type {raw.get('model_type')}")]
    if not isinstance(named, list) or not named:
        raise bad("architectures", named, "must be a list of one name")
    for name in named:
        if isinstance(name, str) and name in FAMILIES:
            return name, FAMILIES[name]
    raise bad("architectures", named, f"not supported; supported: {', '.join(FAMILIES)}")


def with_defaults(raw: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Returns the language model's keys, those left out filled in."""
    if family.text_config:
        text = raw.get("text_config")
        if not isinstance(text, Mapping):
            raise bad("text_config", text, "must be an object")
        outer = ("eos_token_id", "tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")
        raw = {key: raw[key] for key in outer if key in raw} | dict(text)
    given = {key: value for key, value in raw.items() if value is not None or key in NULLABLE}
    return {**family.defaults, **given}


def read_windows(raw: Mapping[str, Any], family: Family, layers: int) -> tuple[int, ...]:
    """Returns the window of each layer in tokens, the token itself included; 0 means that it sees everything."""
    if family.chunked:  # its layer_types are of chunks
        return (0,) * layers
    key, value = "sliding_window", raw.get("sliding_window") if family.slides else None
    if "use_sliding_window" in family.defaults and not boolean(raw, "use_sliding_window"):
        key, value = "use_sliding_window", None
    window = 0 if value is None else integer(raw, "sliding_window")
    slides, types = family.slides, _layer_types(raw, layers)
    sliding = [bool(slides and (window or family.gemma) and slides(raw, layer)) for layer in range(layers)]
    if types is not None:
        named = [name == SLIDING for name in types]
        if not family.layer_types and named != sliding:
            raise bad("layer_types", types, f"not supported; supported for {family.model_type}: all layers alike")
        sliding = named
    if any(sliding) and not window:
        raise bad(key, raw.get(key), f"some layers are of {SLIDING}, which needs a window")
    return tuple(window if slide else 0 for slide in sliding)


def _layer_types(raw: Mapping[str, Any], layers: int) -> list[str] | None:
    types = raw.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or any(name not in (FULL, SLIDING) for name in types):
        raise bad("layer_types", types, f"not supported; supported: a list of {FULL} and {SLIDING}")
    if len(types) != layers:
        raise bad("layer_types", types, f"must name num_hidden_layers={layers} layers")
    return types

"""What a Hugging Face `config.json` says about a model, validated; no torch here.

Defaults are those that transformers gives a key that the file leaves out. Everything that the engine cannot run is
refused with a CheckpointError whose one line names the key, its value and what is supported. What families add is in
`config_families`, rotary embedding in `config_rope`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from kvmesh.engine.config_delta import DeltaConfig
from kvmesh.engine.config_experts import ExpertsConfig
from kvmesh.engine.config_families import Family, find_family, read_windows, with_defaults
from kvmesh.engine.config_latent import LatentConfig
from kvmesh.engine.config_positions import NopeConfig, normed_without_weight, read_chunks, read_nope
from kvmesh.engine.config_read import bad, boolean, integer, natural, positive
from kvmesh.engine.config_rope import RopeConfig, max_context, read_ropes
from kvmesh.errors import CheckpointError
from kvmesh.kvcache.cache_groups import CacheGroup, CacheLayout, check_groups, derive_groups

__all__ = ["DTYPES", "AttentionSpec", "ExpertsConfig", "ModelConfig", "RopeConfig"]

DTYPES = ("float32", "bfloat16", "float16")

# Fields that a fingerprint always names: those that there were when keys were first stored.
_FIRST_FIELDS = frozenset(
    [
        "architecture",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "layers",
        "heads",
        "kv_heads",
        "head_dim",
        "rms_norm_eps",
        "tie_word_embeddings",
        "qkv_bias",
        "o_bias",
        "mlp_bias",
        "qk_norm",
        "rope",
        "windows",
        "attention_scale",
        "local_rope",
        "attention_softcap",
        "logit_softcap",
        "activation",
        "embedding_scale",
        "norm_adds_one",
        "post_norms",
        "fused",
        "text_config",
    ]
)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Says how one layer attends: a token sees itself and the `window` - 1 tokens before it (0: all), or those since
    the last multiple of `chunk` (0: all), never both; scores are `q·k * scale`, and with `softcap` c they become `c *
    tanh(scores / c)` (0: they stay). `sinks`, float32 `[H]`, is a logit for each of a rank's query heads that takes
    part in the softmax and has no value."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    chunk: int = 0
    sinks: Any = field(default=None, compare=False)  # a tensor, which this file has no import for; None: no sinks

    @property
    def sees(self) -> tuple[int, int]:
        """Window and chunk: layers that have the same see the same tokens."""
        return self.window, self.chunk


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Describes one model. `max_context_tokens` is what positions allow after rope scaling; `dtype` is the checkpoint's
    own. With `latent` attention what a token keeps is one "KV head" of `head_dim` = latent + rope elements, whatever
    the file says of KV heads."""

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
    windows: tuple[int, ...]  # of each layer, in tokens; 0: none
    attention_scale: float
    local_rope: RopeConfig | None = None  # of the layers with a window, where it is not `rope`
    attention_softcap: float = 0.0  # 0: none
    logit_softcap: float = 0.0  # 0: none
    activation: str = "silu"  # "silu" | "gelu_tanh"
    embedding_scale: float = 1.0
    norm_adds_one: bool = False  # norms multiply by 1 + weight, in float32
    post_norms: bool = False  # attention and MLP are normed before they are added to the residual, too
    pre_norms: bool = True  # attention and MLP are given normed inputs
    row_norm: bool = False  # qk_norm is over all heads of a token at once
    residual_scale: float = 1.0  # what attention and MLP answer times this is added to the residual
    logit_divisor: float = 1.0
    experts: ExpertsConfig | None = None
    fused: bool = False  # the checkpoint holds qkv_proj and gate_up_proj
    text_config: bool = False  # the checkpoint's names have the prefix of a language model among others
    delta: DeltaConfig | None = None  # of the layers that keep a state in place of keys and values
    latent: LatentConfig | None = None  # one row a token in place of keys and values
    sinks: bool = False  # the softmax of each query head has a logit without a value
    chunks: tuple[int, ...] = ()  # of each layer, in tokens; 0: none; (): no layer has one
    nope: NopeConfig | None = None
    qk_norm_plain: bool = False  # queries and keys of layers with rope are normed, without weights
    mtp_layers: int = 0  # MTP heads that the files may have behind the model's layers (`kvmesh.engine.models.mtp`)

    @classmethod
    def from_hf(
        cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None, max_context_tokens: int = 0
    ) -> ModelConfig:
        """Reads config.json (`raw`) and generation_config.json (`generation`, for its end-of-sequence ids).

        `max_context_tokens` is the longest context that will be asked for (0: the model's own limit).
        Raises CheckpointError naming the first key that is missing, wrong or not supported."""
        architecture, family = find_family(raw)
        raw = with_defaults(raw, family)
        _refuse_unsupported(raw, family)
        hidden, heads = integer(raw, "hidden_size"), integer(raw, "num_attention_heads")
        layers, vocab = integer(raw, "num_hidden_layers"), integer(raw, "vocab_size")
        latent = LatentConfig.from_hf(raw) if family.latent else None
        kv_heads = integer(raw, "num_key_value_heads", heads) if latent is None else 1
        head_dim = integer(raw, "head_dim", hidden // heads) if latent is None else latent.latent + latent.rope
        if heads % kv_heads:
            raise bad("num_key_value_heads", kv_heads, f"must divide num_attention_heads={heads}")
        if head_dim % 2 and latent is None:
            raise bad("head_dim", head_dim, "must be even (rotary embedding turns pairs)")
        max_positions = integer(raw, "max_position_embeddings")
        wanted = max_context_tokens or max_positions
        rope, local_rope = read_ropes(raw, family, head_dim if latent is None else latent.rope, max_positions, wanted)
        attention_bias = boolean(raw, "attention_bias") if family.qkv_bias is None else False
        experts = family.experts(raw, layers) if family.experts else None
        return cls(
            architecture=architecture,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=integer(raw, family.dense_size),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=positive(raw, "rms_norm_eps"),
            tie_word_embeddings=boolean(raw, "tie_word_embeddings"),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=attention_bias and family.o_bias,
            mlp_bias=boolean(raw, "mlp_bias") if family.mlp_bias else False,
            qk_norm=boolean(raw, "use_qk_norm") if family.qk_norm is None else family.qk_norm,
            rope=rope,
            max_position_embeddings=max_positions,
            max_context_tokens=max_context(rope, max_positions, wanted),
            eos_token_ids=_eos(raw, generation or {}, vocab),
            dtype=_dtype(raw),
            windows=(0,) * layers if family.delta else read_windows(raw, family, layers),
            attention_scale=_attention_scale(raw, family, head_dim) if latent is None else latent.scale,
            local_rope=local_rope,
            attention_softcap=_softcap(raw, "attn_logit_softcapping") if family.gemma else 0.0,
            logit_softcap=_softcap(raw, "final_logit_softcapping") if family.gemma else 0.0,
            activation="gelu_tanh" if family.gemma else "silu",
            embedding_scale=hidden**0.5 if family.gemma else _multiplier(raw, family, "embedding_multiplier"),
            norm_adds_one=family.gemma or family.delta,
            post_norms=family.gemma or family.only_post_norms,
            pre_norms=not family.only_post_norms,
            row_norm=family.row_norm,
            residual_scale=_multiplier(raw, family, "residual_multiplier"),
            logit_divisor=_multiplier(raw, family, "logits_scaling"),
            experts=experts if experts is not None and experts.layers else None,
            fused=family.fused,
            text_config=family.text_config,
            delta=DeltaConfig.from_hf(raw, layers) if family.delta else None,
            latent=latent,
            sinks=family.sinks,
            chunks=read_chunks(raw, layers) if family.chunked else (),
            nope=read_nope(raw, layers) if family.chunked else None,
            qk_norm_plain=family.chunked and normed_without_weight(raw),
            mtp_layers=natural(raw, "num_nextn_predict_layers", 1) if family.mtp else 0,
        )

    def canonical(self) -> dict[str, Any]:
        """Returns what decides the KV and the logits of a token, for the fingerprint. End-of-sequence ids, context
        limit and the stored dtype's name do not; stored bytes enter the fingerprint by themselves. A field that is
        not one of `_FIRST_FIELDS` is told where it differs from its default only: a model that does not use what is
        new keeps its keys."""
        values = asdict(self)
        new = {field.name for field in fields(self) if field.default == getattr(self, field.name)} - _FIRST_FIELDS
        for name in {"eos_token_ids", "max_context_tokens", "max_position_embeddings", "dtype", "mtp_layers"} | new:
            del values[name]
        if self.experts is not None:
            values["experts"] = self.experts.canonical()
        return values

    def has_experts(self, layer: int) -> bool:
        """Says whether a layer has experts in place of an MLP. The layer of an MTP head has them if any other has."""
        return self.experts is not None and (layer in self.experts.layers or layer >= self.layers)

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """What the model keeps of its tokens (ADR 0037): of config.json alone, whatever an instance's dtype, limits and
        ranks are."""
        if self.delta is not None:
            full = tuple(layer for layer in range(self.layers) if layer not in self.delta.layers)
            kept = CacheGroup("all", full, CacheLayout(planes=2, heads=self.kv_heads, dim=self.head_dim))
            groups = (kept, *self.delta.cache_groups(kept))
            check_groups(groups)
            return groups
        return derive_groups(self.windows, self.kv_heads, self.head_dim, self.kv_planes, self.chunks)

    @property
    def kv_planes(self) -> int:
        """K and V, or one row that stands for both."""
        return 2 if self.latent is None else 1

    @property
    def rotated_dim(self) -> int:
        """Elements of a head that the rope is made for; it may turn a part of them (`RopeConfig.partial`)."""
        return self.head_dim if self.latent is None else self.latent.rope

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        """One spec for each layer."""
        chunks = self.chunks or (0,) * self.layers
        return tuple(
            AttentionSpec(self.attention_scale, window, self.attention_softcap, chunk)
            for window, chunk in zip(self.windows, chunks, strict=True)
        )

    @property
    def kv_elements_per_token(self) -> int:
        layers = self.layers - (0 if self.delta is None else len(self.delta.layers))
        return self.kv_planes * layers * self.kv_heads * self.head_dim


def _refuse_unsupported(raw: Mapping[str, Any], family: Family) -> None:
    key, supported = ("hidden_activation", "gelu_pytorch_tanh") if family.gemma else ("hidden_act", "silu")
    act = raw.get(key, supported)
    if act != supported:
        raise bad(key, act, f"not supported; supported: {supported}")
    if raw.get("quantization_config"):
        raise bad("quantization_config", raw["quantization_config"], f"not supported; supported: {', '.join(DTYPES)}")
    if raw.get("use_bidirectional_attention"):
        raise bad("use_bidirectional_attention", raw["use_bidirectional_attention"], "not supported; supported: false")
    # Gemma 3 in transformers never reads the first, and its class of several modalities not the second.
    for key, unread in (
        ("attn_logit_softcapping", family.local_theta is not None),
        ("final_logit_softcapping", family.text_config),
    ):
        if unread and raw.get(key) is not None:
            raise bad(key, raw[key], f"not supported for {family.model_type}; supported: null")


def _attention_scale(raw: Mapping[str, Any], family: Family, head_dim: int) -> float:
    if family.multipliers:
        return _multiplier(raw, family, "attention_multiplier")
    return float((positive(raw, "query_pre_attn_scalar", head_dim) if family.gemma else head_dim) ** -0.5)


def _multiplier(raw: Mapping[str, Any], family: Family, key: str) -> float:
    return positive(raw, key, 1.0) if family.multipliers else 1.0


def _softcap(raw: Mapping[str, Any], key: str) -> float:
    return 0.0 if raw.get(key) is None else positive(raw, key)


def _dtype(raw: Mapping[str, Any]) -> str:
    """Reads `dtype` (transformers 5) or `torch_dtype`; float32 where neither is known."""
    value = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    return value if value in DTYPES else "float32"


def _eos(raw: Mapping[str, Any], generation: Mapping[str, Any], vocab: int) -> tuple[int, ...]:
    """Returns the end-of-sequence ids of both files, config.json's first, without repeats."""
    found: dict[int, None] = {}
    for name, source in (("config.json", raw), ("generation_config.json", generation)):
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(token, bool) or not isinstance(token, int):
                raise CheckpointError(f"{name}: eos_token_id={value!r}: must be an integer or a list of them")
            if 0 <= token < vocab:  # transformers uses -1 and ids outside the vocabulary for "none"
                found[token] = None
    return tuple(found)

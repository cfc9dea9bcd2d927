"""The shape of a model: what its KV weighs and what a token costs to compute, from its config.json alone.

    KV of a token, GQA and MQA   2 x layers x kv_heads x head_dim x bytes of a value
    KV of a token, MLA           layers x (kv_lora_rank + rope_dim) x bytes: the latent and one rotary key, no K and V

DeepSeek-V3 671B in bf16 comes to 61 x (512 + 64) x 2 = 70,272 bytes, LLaMA3-70B to 2 x 80 x 8 x 128 x 2 = 327,680.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmesh.errors import ConfigError
from kvmesh.kvcache.cache_groups import CacheGroup, CacheKind, CacheLayout, object_shard
from kvmesh.sim.hardware.shape_groups import CHUNKED, CONVOLUTION, DELTA, FULL, LINEAR, SLIDING, groups_of

# Shapes of well-known models: the fields of their published config.json (Hugging Face) that say what they cost.


def _dense(
    layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocab: int, head_dim: int = 128, tied: bool = False
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


def _sparse(shape: dict[str, Any], experts: int, of_token: int, inner: int) -> dict[str, Any]:
    moe = {"num_experts": experts, "num_experts_per_tok": of_token, "moe_intermediate_size": inner}
    return {**shape, **moe}


def _deepseek(heads: int, experts: int, first_dense: int, vocab: int) -> dict[str, Any]:
    """DeepSeek-V3's architecture."""
    return {
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": heads,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": experts,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": first_dense,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": vocab,
    }


LLAMA3, QWEN3 = 128_256, 151_936  # vocabularies

PRESETS: dict[str, dict[str, Any]] = {
    "llama2-7b": _dense(32, 4096, 32, 32, 11008, 32_000),
    "llama3-8b": _dense(32, 4096, 32, 8, 14336, LLAMA3),
    "llama3-70b": _dense(80, 8192, 64, 8, 28672, LLAMA3),
    "llama3-405b": _dense(126, 16384, 128, 8, 53248, LLAMA3),
    "mixtral-8x7b": _sparse(_dense(32, 4096, 32, 8, 14336, 32_000), 8, 2, 14336),
    "mixtral-8x22b": _sparse(_dense(56, 6144, 48, 8, 16384, 32_768), 8, 2, 16384),
    "qwen3-0.6b": _dense(28, 1024, 16, 8, 3072, QWEN3, tied=True),
    "qwen3-1.7b": _dense(28, 2048, 16, 8, 6144, QWEN3, tied=True),
    "qwen3-4b": _dense(36, 2560, 32, 8, 9728, QWEN3, tied=True),
    "qwen3-8b": _dense(36, 4096, 32, 8, 12288, QWEN3),
    "qwen3-14b": _dense(40, 5120, 40, 8, 17408, QWEN3),
    "qwen3-32b": _dense(64, 5120, 64, 8, 25600, QWEN3),
    "qwen3-30b-a3b": _sparse(_dense(48, 2048, 32, 4, 6144, QWEN3), 128, 8, 768),
    "qwen3-235b-a22b": _sparse(_dense(94, 4096, 64, 4, 12288, QWEN3), 128, 8, 1536),
    "gemma2-9b": {
        **_dense(42, 3584, 16, 8, 14336, 256_000, head_dim=256, tied=True),
        "model_type": "gemma2",
        "sliding_window": 4096,
    },
    "falcon-7b": {  # one KV head
        "model_type": "falcon",
        "num_hidden_layers": 32,
        "hidden_size": 4544,
        "num_attention_heads": 71,
        "multi_query": True,
        "vocab_size": 65_024,
        "tie_word_embeddings": True,
    },
    "gemma3-27b": {
        **_dense(62, 5376, 32, 16, 21504, 262_208, tied=True),
        "model_type": "gemma3_text",
        "sliding_window": 1024,
    },
    "gpt-oss-20b": {
        **_sparse(_dense(24, 2880, 64, 8, 2880, 201_088, head_dim=64), 32, 4, 2880),
        "model_type": "gpt_oss",
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
    "qwen3-next-80b-a3b": {
        **_sparse(_dense(48, 2048, 16, 2, 5120, QWEN3, head_dim=256), 512, 10, 512),
        "model_type": "qwen3_next",
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "shared_expert_intermediate_size": 512,
    },
    "deepseek-v3": _deepseek(heads=128, experts=256, first_dense=3, vocab=129_280),
    "kimi-k2": _deepseek(heads=64, experts=384, first_dense=1, vocab=163_840),
}


# Fields of a Hugging Face config.json, read under the names that families give them. Errors name field and value.


class Fields:
    """What one config says; where it describes several models, what it says of the text."""

    def __init__(self, raw: Mapping[str, Any], name: str) -> None:
        text = raw.get("text_config")
        nested = isinstance(text, Mapping) and "num_hidden_layers" not in raw
        self._raw: Mapping[str, Any] = text if nested else raw  # type: ignore[assignment]
        self._name = name
        self.family = str(self._raw.get("model_type", ""))

    def _bad(self, field: str, value: Any, why: str) -> ConfigError:
        shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
        return ConfigError(f"model={self._name!r}: config.json: {field}={shown}: {why}", field=field)

    def number(self, field: str, default: int) -> int:
        """A whole number of at least 0; `default` where it is absent or null."""
        value = self._raw.get(field)
        if value is None:
            return default
        if type(value) is not int or not 0 <= value < 2**40:
            raise self._bad(field, value, "must be a whole number of at least 0")
        return value

    def count(self, *fields: str) -> int:
        """The first of them that is there, at least 1. ConfigError names the first when all are missing."""
        for field in fields:
            if self._raw.get(field) is not None:
                value = self.number(field, 0)
                if value < 1:
                    raise self._bad(field, value, "must be at least 1")
                return value
        raise ConfigError(f"model={self._name!r}: config.json: {fields[0]} is missing", field=fields[0])

    def flag(self, field: str, default: bool) -> bool:
        """True or false; `default` where it is absent or null."""
        value = self._raw.get(field)
        if value is None:
            return default
        if type(value) is not bool:
            raise self._bad(field, value, "must be true or false")
        return value

    def divided(self, hidden: int, heads: int) -> int:
        """The dimension of a head that config.json does not tell."""
        if hidden % heads:
            why = f"is no multiple of num_attention_heads={heads}, and head_dim is missing"
            raise self._bad("hidden_size", hidden, why)
        return hidden // heads

    def kv_heads(self, heads: int) -> int:
        """Returns the number of KV heads: that of all heads where nothing else is said, one with `multi_query`."""
        found = self.number("num_key_value_heads", 0) or self.number("num_kv_heads", 0)
        if self.flag("multi_query", False) and not self.flag("new_decoder_architecture", False):
            found = 1
        found = found or heads
        if heads % found:
            raise self._bad("num_key_value_heads", found, f"must divide num_attention_heads={heads}")
        return found

    def layer_kinds(self, layers: int) -> tuple[list[str], int, int]:
        """Returns (what each layer is, by its name in `layer_types`; tokens of a window, 0: none; those of a chunk).
        Raises ConfigError for a kind that is not known."""
        window, chunk = self.number("sliding_window", 0), self.number("attention_chunk_size", 0)
        if not self.flag("use_sliding_window", True):
            window = 0
        kinds = self._raw.get("layer_types")
        if kinds is None:
            kinds = self._derived_kinds(layers, window, chunk)
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise self._bad("layer_types", kinds, f"must list {layers} layers")
        for kind in kinds:
            if kind not in (FULL, SLIDING, CHUNKED, LINEAR):
                raise self._bad("layer_types", kind, "is no kind of layer that is known")
        for kind, tokens, field in ((SLIDING, window, "sliding_window"), (CHUNKED, chunk, "attention_chunk_size")):
            if kind in kinds and not tokens:
                raise ConfigError(f"model={self._name!r}: config.json: {field} is missing", field=field)
        return kinds, window if SLIDING in kinds else 0, chunk if CHUNKED in kinds else 0

    def _derived_kinds(self, layers: int, window: int, chunk: int) -> list[str]:
        """What families mean that have no `layer_types`."""
        if chunk and self.family.startswith("llama4"):  # layers without rotary positions see all
            rotary = self._raw.get("no_rope_layers")
            every = self.number("no_rope_layer_interval", 4) or 4
            if isinstance(rotary, list) and rotary:
                return [CHUNKED if turned else FULL for turned in rotary]
            return [FULL if (layer + 1) % every == 0 else CHUNKED for layer in range(layers)]
        if every := self.number("full_attention_interval", 0):
            return [FULL if (layer + 1) % every == 0 else LINEAR for layer in range(layers)]
        if not window:
            return [FULL] * layers
        if self.family == "gemma2":
            return [FULL if layer % 2 else SLIDING for layer in range(layers)]
        every = self.number("sliding_window_pattern", 0) or (6 if self.family.startswith("gemma3") else 0)
        if every:  # each such layer sees all
            return [FULL if (layer + 1) % every == 0 else SLIDING for layer in range(layers)]
        full = self.number("max_window_layers", 0) if self.family.startswith("qwen") else 0
        return [FULL if layer < full else SLIDING for layer in range(layers)]

    def delta_net(self) -> DeltaShape | None:
        """Returns the heads of the linear layers (gated DeltaNets); None where config.json does not say."""
        values = self.number("linear_num_value_heads", 0)
        if not values:
            return None
        keys, taps = self.count("linear_num_key_heads"), self.count("linear_conv_kernel_dim")
        if values % keys:
            raise self._bad("linear_num_value_heads", values, f"must be a multiple of linear_num_key_heads={keys}")
        return DeltaShape(keys, values, self.count("linear_key_head_dim"), self.count("linear_value_head_dim"), taps)


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The heads of one gated DeltaNet, and how many tokens its convolution is wide."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def channels(self) -> int:
        """Queries, keys and values of all heads, which the convolution runs over."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def params(self, hidden: int) -> int:
        """Returns the parameters of one layer: what makes channels, gates of the answer and two numbers a value head
        (decay and rate), the convolution, and the output."""
        answers = self.value_heads * self.value_dim
        return hidden * (self.channels + answers + 2 * self.value_heads + answers) + self.channels * self.taps

    def states(self) -> dict[str, CacheLayout]:
        """Returns what one layer keeps, by the group's name: the delta rule's state in float32, and the last inputs of
        its convolution."""
        found = {DELTA: CacheLayout(1, self.value_heads, self.key_dim * self.value_dim, "float32")}
        if self.taps > 1:
            found[CONVOLUTION] = CacheLayout(self.taps - 1, self.key_heads, self.channels // self.key_heads)
        return found


DTYPES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "fp8": 1, "int8": 1}
_PLAIN_MLP = ("gpt2", "gpt_bigcode", "falcon", "gpt_neox", "bloom", "phi")  # two matrices; all others gate with a third


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One model. Parameters are counted in matrices alone: norms and biases are too few to matter."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    attention_params: int  # of all layers
    dense_params: int  # all layers' feed-forward matrices that every token passes
    expert_params: int = 0  # of one expert of one layer
    expert_layers: int = 0
    experts: int = 0  # of a layer; a token passes `experts_per_token` of them
    experts_per_token: int = 0
    shared_params: int = 0  # of one expert layer: those that every token passes beside its experts
    tied: bool = False  # one matrix is both embedding and head
    kv_layers: int = 0  # those that keep KV at all
    window_layers: int = 0  # of those, which see the last `window` tokens alone
    window: int = 0
    kv_lora_rank: int = 0  # MLA: over 0
    rope_dim: int = 0  # of MLA's shared key
    value_dim: int = 0  # of a head, where it is not head_dim
    groups: tuple[CacheGroup, ...] = ()  # what its layers keep

    # ── parameters ───────────────────────────────────────────────────────────────────────────────

    @property
    def mla(self) -> bool:
        """Whether it keeps latents instead of keys and values."""
        return self.kv_lora_rank > 0

    @property
    def head_params(self) -> int:
        """The matrix that turns a token's last state into logits."""
        return self.vocab * self.hidden

    @property
    def layer_params(self) -> int:
        """Parameters of all layers, without embedding and head."""
        return self.attention_params + self.dense_params + self.expert_layers * self.experts * self.expert_params

    @property
    def active_layer_params(self) -> int:
        """Parameters of the layers that one token is multiplied with."""
        routed = self.expert_layers * self.experts_per_token * self.expert_params
        return self.attention_params + self.dense_params + routed

    @property
    def params(self) -> int:
        """Parameters of the whole model."""
        return self.layer_params + self.head_params * (1 if self.tied else 2)

    @property
    def active_params(self) -> int:
        """As models are named by ("37B active"): a token's, embedding and head included."""
        return self.active_layer_params + self.head_params * (1 if self.tied else 2)

    # ── KV ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def delta_numbers(self) -> int:
        """Numbers of all layers' states that the delta rule reads and changes for each token."""
        return sum(len(g.layers) * g.layout.heads * g.layout.dim for g in self.groups if g.name == DELTA)

    def state_bytes(self, dtype: str = "bf16") -> int:
        """Returns the bytes of one request's states in all layers, those of convolutions included."""
        states = [group for group in self.groups if group.kind is CacheKind.STATE]
        return sum(object_shard(g, 1, itemsize(g.layout.dtype or dtype)).shard_bytes for g in states)

    @property
    def full_heads_per_token(self) -> int:
        """Numbers that one token would have in every layer if each kept keys and values of all its KV heads: of MLA,
        what is made of the latent."""
        return self.layers * self.kv_heads * (self.head_dim + self.value_dim)

    @property
    def kv_values_per_token(self) -> int:
        """Numbers kept for one token."""
        if self.mla:
            return self.kv_layers * (self.kv_lora_rank + self.rope_dim)
        return self.kv_layers * self.kv_heads * (self.head_dim + self.value_dim)

    def kv_bytes_per_token(self, dtype: str = "bf16") -> int:
        """Returns the bytes of a token's KV in all layers, once. ConfigError: an unknown dtype."""
        return self.kv_values_per_token * itemsize(dtype)

    def kv_bytes_per_rank(self, tp: int, dtype: str = "bf16") -> int:
        """What each of `tp` ranks keeps of one token: heads are dealt out and, where there are fewer than ranks, kept
        more than once; every rank needs MLA's latent whole. ConfigError: heads that do not divide."""
        if tp < 1 or self.heads % tp:
            raise ConfigError(f"tp={tp}: must divide the {self.heads} attention heads of {self.name}", field="tp")
        if self.mla:
            return self.kv_bytes_per_token(dtype)
        if max(self.kv_heads, tp) % min(self.kv_heads, tp):
            raise ConfigError(f"tp={tp}: does not go with the {self.kv_heads} KV heads of {self.name}", field="tp")
        return self.kv_bytes_per_token(dtype) // min(self.kv_heads, tp)


def itemsize(dtype: str) -> int:
    """Bytes of one value. ConfigError names an unknown dtype."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r}: choose one of {', '.join(DTYPES)}", field="dtype")
    return DTYPES[dtype]


# ── where shapes come from ────────────────────────────────────────────────────────────────────────


def shape_of(model: str) -> ModelShape:
    """A preset's name, a config.json, or a folder that holds one. ConfigError says what is wrong with it."""
    if model.lower() in PRESETS:
        return from_config(PRESETS[model.lower()], model.lower())
    path = Path(model).expanduser()
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as err:
        known = ", ".join(PRESETS)
        raise ConfigError(f"model={model!r}: {file}: {err.strerror}; presets: {known}", field="model") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"model={model!r}: {file} is not JSON", field="model") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"model={model!r}: {file} holds no object", field="model")
    return from_config(raw, path.parent.name if path.name == "config.json" else path.name)


def from_config(raw: Mapping[str, Any], name: str) -> ModelShape:
    """Of what config.json says (that of the text model, where it describes several). ConfigError names the field that
    is missing or wrong."""
    told = Fields(raw, name)
    layers, hidden = told.count("num_hidden_layers", "n_layer", "n_layers"), told.count("hidden_size", "n_embd")
    heads = told.count("num_attention_heads", "n_head")
    lora, rope = told.number("kv_lora_rank", 0), 0
    if lora:
        rope, value = told.count("qk_rope_head_dim"), told.count("v_head_dim")
        head_dim, kv_heads = told.count("qk_nope_head_dim") + rope, heads
        attention = _mla_params(told, hidden, heads, head_dim, rope, value, lora)
    else:
        head_dim = value = told.number("head_dim", 0) or told.divided(hidden, heads)
        kv_heads = told.kv_heads(heads)
        attention = hidden * (heads + kv_heads) * head_dim * 2
        if told.family.startswith("qwen3_next"):  # a gate beside each query
            attention += hidden * heads * head_dim
    kinds, window, chunk = told.layer_kinds(layers)
    linear, delta = kinds.count(LINEAR), told.delta_net()
    layout = CacheLayout(1, 1, lora + rope) if lora else CacheLayout(2, kv_heads, head_dim)
    dense, expert = _feed_forward(told, layers, hidden)
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=told.number("vocab_size", 0) or _vocabulary(told),
        attention_params=(layers - linear) * attention + linear * (delta.params(hidden) if delta else attention),
        dense_params=dense,
        **expert,
        tied=told.flag("tie_word_embeddings", told.family in ("gemma2", "gemma3_text", "gemma3", "gemma")),
        kv_layers=layers - linear,
        window_layers=kinds.count(SLIDING),
        window=window,
        kv_lora_rank=lora,
        rope_dim=rope,
        value_dim=value,
        groups=groups_of(
            kinds,
            window,
            chunk,
            layout,
            delta.states() if delta else {},
            told.number("index_head_dim", 0) if lora else 0,
        ),
    )


def _vocabulary(told: Fields) -> int:
    """Of a family whose config.json may leave it out. Raises ConfigError where it must not."""
    return 262_208 if told.family.startswith("gemma3") else told.count("vocab_size")


def _mla_params(told: Fields, hidden: int, heads: int, head_dim: int, rope: int, value: int, lora: int) -> int:
    """Of one layer: queries (through their own latent, where there is one), the latent, keys and values out of it,
    and the output."""
    q_lora = told.number("q_lora_rank", 0)
    queries = q_lora * (hidden + heads * head_dim) if q_lora else hidden * heads * head_dim
    return queries + hidden * (lora + rope) + lora * heads * (head_dim - rope + value) + heads * value * hidden


def _feed_forward(told: Fields, layers: int, hidden: int) -> tuple[int, dict[str, int]]:
    """Parameters that every token passes, and what ModelShape calls the others."""
    matrices = 2 if told.family in _PLAIN_MLP else 3
    experts = told.number("n_routed_experts", 0) or told.number("num_experts", 0) or told.number("num_local_experts", 0)
    if not experts:
        inner = told.number("intermediate_size", 0) or told.number("n_inner", 0) or told.number("ffn_hidden_size", 0)
        if not inner and told.family in _PLAIN_MLP:
            inner = 4 * hidden
        return layers * matrices * hidden * (inner or told.count("intermediate_size")), {}
    inner = told.number("moe_intermediate_size", 0) or told.count("intermediate_size")
    first_dense = told.number("first_k_dense_replace", 0)
    shared = told.number("n_shared_experts", 0) * inner + told.number("shared_expert_intermediate_size", 0)
    sparse = layers - first_dense
    dense = first_dense * matrices * hidden * told.count("intermediate_size") if first_dense else 0
    return dense + sparse * (matrices * hidden * shared + hidden * experts), {
        "expert_params": matrices * hidden * inner,
        "expert_layers": sparse,
        "shared_params": matrices * hidden * shared + hidden * experts,
        "experts": experts,
        "experts_per_token": told.count("num_experts_per_tok", "num_experts_per_token", "experts_per_token"),
    }

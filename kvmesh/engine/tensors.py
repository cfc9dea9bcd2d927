"""Names and shapes of the tensors that a checkpoint of one config must hold (all families share Llama's naming)."""

from __future__ import annotations

from kvmesh.engine.config import ModelConfig

EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"

Shape = tuple[int, ...]


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def canonical_name(config: ModelConfig, name: str) -> str:
    """Returns the name that a language model by itself would give the tensor `name` of the files: beside other
    modalities it is `language_model.model.…` (as on the Hub) or `model.language_model.…`."""
    if not config.text_config:
        return name
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name.removeprefix("language_model.")


def layer_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Returns the tensors of one decoder layer, names relative to `layer_prefix`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    linears: dict[str, tuple[int, int, bool]] = {
        "self_attn.o_proj": (hidden, q, config.o_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    if config.fused:
        linears["self_attn.qkv_proj"] = (q + 2 * kv, hidden, config.qkv_bias)
        linears["mlp.gate_up_proj"] = (2 * inner, hidden, config.mlp_bias)
    else:
        linears |= {
            "self_attn.q_proj": (q, hidden, config.qkv_bias),
            "self_attn.k_proj": (kv, hidden, config.qkv_bias),
            "self_attn.v_proj": (kv, hidden, config.qkv_bias),
            "mlp.gate_proj": (inner, hidden, config.mlp_bias),
            "mlp.up_proj": (inner, hidden, config.mlp_bias),
        }
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.post_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    shapes: dict[str, Shape] = {f"{name}.weight": (hidden,) for name in norms}
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    for name, (rows, columns, bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Returns every tensor that must be there; with tied embeddings `lm_head.weight` may be absent."""
    embed = (config.vocab_size, config.hidden_size)
    shapes: dict[str, Shape] = {EMBED: embed, NORM: (config.hidden_size,)}
    if not config.tie_word_embeddings:
        shapes[HEAD] = embed
    per_layer = layer_tensors(config)
    for layer in range(config.layers):
        prefix = layer_prefix(layer)
        shapes.update({prefix + name: shape for name, shape in per_layer.items()})
    return shapes

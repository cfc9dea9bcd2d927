"""Names and shapes of the tensors that a checkpoint of one config must hold (all families share Llama's naming)."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.config_latent import LatentConfig

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


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names the tensors of a mixture of experts, relative to `layer_prefix`; three are gate, up and down."""

    router: str
    correction: str
    experts: str
    matrices: tuple[str, str, str]
    shared: tuple[str, str, str]

    def expert(self, index: int) -> tuple[str, str, str]:
        gate, up, down = (f"{self.experts}{index}.{name}.weight" for name in self.matrices)
        return gate, up, down


_GATED = ("gate_proj", "up_proj", "down_proj")
_SHARED = (
    "mlp.shared_experts.gate_proj.weight",
    "mlp.shared_experts.up_proj.weight",
    "mlp.shared_experts.down_proj.weight",
)
_EXPERT_NAMES = {
    "mlp": ExpertNames("mlp.gate.weight", "mlp.gate.e_score_correction_bias", "mlp.experts.", _GATED, _SHARED),
    "block_sparse_moe": ExpertNames(
        "block_sparse_moe.gate.weight",
        "block_sparse_moe.e_score_correction_bias",
        "block_sparse_moe.experts.",
        ("w1", "w3", "w2"),
        _SHARED,
    ),
}


def expert_names(config: ModelConfig) -> ExpertNames:
    """Returns the names in the files on the Hub, one tensor for each expert's matrix (transformers joins them when it
    loads, and takes them apart when it saves)."""
    assert config.experts is not None
    return _EXPERT_NAMES[config.experts.naming]


def _experts_tensors(config: ModelConfig) -> dict[str, Shape]:
    experts = config.experts
    assert experts is not None
    names, hidden = expert_names(config), config.hidden_size
    shapes: dict[str, Shape] = {names.router: (experts.count, hidden)}
    if experts.correction:
        shapes[names.correction] = (experts.count,)
    gated = [(names.expert(index), experts.inner) for index in range(experts.count)]
    if experts.shared_inner:
        gated.append((names.shared, experts.shared_inner))
    for (gate, up, down), inner in gated:
        shapes |= {gate: (inner, hidden), up: (inner, hidden), down: (hidden, inner)}
    return shapes


def _latent_linears(config: ModelConfig, latent: LatentConfig) -> dict[str, tuple[int, int, bool]]:
    """Returns the matrices of latent attention: rows, columns and whether there is a bias."""
    hidden, heads, rank = config.hidden_size, config.heads, latent.query_rank
    queries = heads * (latent.nope + latent.rope)
    found = {
        "self_attn.kv_a_proj_with_mqa": (latent.latent + latent.rope, hidden, latent.bias),
        "self_attn.kv_b_proj": (heads * (latent.nope + latent.value), latent.latent, False),
        "self_attn.o_proj": (hidden, heads * latent.value, latent.bias),
    }
    if not rank:
        return found | {"self_attn.q_proj": (queries, hidden, False)}
    return found | {"self_attn.q_a_proj": (rank, hidden, latent.bias), "self_attn.q_b_proj": (queries, rank, False)}


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, Shape]:
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
    if config.latent is not None:
        mlp = {name: shape for name, shape in linears.items() if name.startswith("mlp.")}
        linears = mlp | _latent_linears(config, config.latent)
    if config.experts is not None and layer in config.experts.layers:
        linears = {name: shape for name, shape in linears.items() if not name.startswith("mlp.")}
    norms = ["post_attention_layernorm"]
    if config.pre_norms:
        norms.append("input_layernorm")
    if config.post_norms:
        norms += ["pre_feedforward_layernorm"] * config.pre_norms + ["post_feedforward_layernorm"]
    shapes: dict[str, Shape] = {f"{name}.weight": (hidden,) for name in norms}
    if config.qk_norm:
        wide = config.row_norm
        shapes["self_attn.q_norm.weight"] = (q if wide else config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (kv if wide else config.head_dim,)
    if config.latent is not None:
        shapes["self_attn.kv_a_layernorm.weight"] = (config.latent.latent,)
        if config.latent.query_rank:
            shapes["self_attn.q_a_layernorm.weight"] = (config.latent.query_rank,)
    for name, (rows, columns, bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if config.experts is not None and layer in config.experts.layers:
        shapes |= _experts_tensors(config)
    return shapes


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Returns every tensor that must be there; with tied embeddings `lm_head.weight` may be absent."""
    embed = (config.vocab_size, config.hidden_size)
    shapes: dict[str, Shape] = {EMBED: embed, NORM: (config.hidden_size,)}
    if not config.tie_word_embeddings:
        shapes[HEAD] = embed
    for layer in range(config.layers):
        prefix = layer_prefix(layer)
        shapes.update({prefix + name: shape for name, shape in layer_tensors(config, layer).items()})
    return shapes

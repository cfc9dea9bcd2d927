"""Names and shapes of the tensors that a checkpoint of one config must hold (all families share Llama's naming)."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.config_delta import DeltaConfig
from kvmesh.engine.config_latent import LatentConfig

EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"
# Of an MTP head, relative to the prefix of its layer.
MTP_JOIN = "eh_proj.weight"
MTP_EMBED = "embed_tokens.weight"
MTP_HEAD = "shared_head.head.weight"

Shape = tuple[int, ...]


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


# What Qwen3-Next calls the parts of its MTP head, and what they are called in the head's layer elsewhere.
_MTP_NAMES = {
    "mtp.layers.0.": "",
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "shared_head.norm.",
}


def canonical_name(config: ModelConfig, name: str) -> str:
    """Returns the name that a language model by itself would give the tensor `name` of the files: beside other
    modalities it is `language_model.model.…` (as on the Hub) or `model.language_model.…`. MTP heads have the names
    that DeepSeek gives them."""
    if config.mtp_layers and name.startswith("mtp."):
        for given, own in _MTP_NAMES.items():
            if name.startswith(given):
                return layer_prefix(config.layers) + own + name.removeprefix(given)
    if not config.text_config:
        return name
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name.removeprefix("language_model.")


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names the tensors of a mixture of experts, relative to `layer_prefix`; three are gate, up and down. `stacked` are
    gate_up and down of all experts, where the checkpoint has them so, and each has its bias as NAME_bias."""

    router: str  # without .weight
    experts: str
    matrices: tuple[str, str, str]
    shared: tuple[str, str, str]
    correction: str = ""
    shared_gate: str = ""
    dense: str = "mlp."  # the MLP of layers without experts

    def expert(self, index: int) -> tuple[str, str, str]:
        gate, up, down = (f"{self.experts}{index}.{name}.weight" for name in self.matrices)
        return gate, up, down

    @property
    def stacked(self) -> tuple[str, str]:
        return self.experts + "gate_up_proj", self.experts + "down_proj"


_GATED = ("gate_proj", "up_proj", "down_proj")


def _shared(block: str) -> tuple[str, str, str]:
    gate, up, down = (f"{block}{name}.weight" for name in _GATED)
    return gate, up, down


_EXPERT_NAMES = {
    "mlp": ExpertNames(
        "mlp.gate", "mlp.experts.", _GATED, _shared("mlp.shared_experts."), "mlp.gate.e_score_correction_bias"
    ),
    "block_sparse_moe": ExpertNames(
        "block_sparse_moe.gate",
        "block_sparse_moe.experts.",
        ("w1", "w3", "w2"),
        _shared("block_sparse_moe.shared_experts."),
        "block_sparse_moe.e_score_correction_bias",
    ),
    "shared_expert": ExpertNames(
        "mlp.gate",
        "mlp.experts.",
        _GATED,
        _shared("mlp.shared_expert."),
        shared_gate="mlp.shared_expert_gate.weight",
    ),
    "router": ExpertNames("mlp.router", "mlp.experts.", _GATED, _shared("mlp.shared_expert.")),
    "feed_forward": ExpertNames(
        "feed_forward.router",
        "feed_forward.experts.",
        _GATED,
        _shared("feed_forward.shared_expert."),
        dense="feed_forward.",
    ),
}


def expert_names(config: ModelConfig) -> ExpertNames:
    """Returns the names in the files on the Hub (where these hold one tensor for each expert's matrix, transformers
    joins them when it loads, and takes them apart when it saves)."""
    assert config.experts is not None
    return _EXPERT_NAMES[config.experts.naming]


def dense_prefix(config: ModelConfig) -> str:
    """Returns what the names of a layer's MLP begin with, relative to `layer_prefix`."""
    return "mlp." if config.experts is None else expert_names(config).dense


def _experts_tensors(config: ModelConfig) -> dict[str, Shape]:
    experts = config.experts
    assert experts is not None
    names, hidden, count, inner = expert_names(config), config.hidden_size, experts.count, experts.inner
    shapes: dict[str, Shape] = {names.router + ".weight": (count, hidden)}
    if experts.router_bias:
        shapes[names.router + ".bias"] = (count,)
    if experts.correction:
        shapes[names.correction] = (count,)
    gated = []
    if experts.stacked:
        gate_up, down = names.stacked
        shapes |= {gate_up: (count, hidden, 2 * inner), down: (count, inner, hidden)}
        if experts.biases:
            shapes |= {gate_up + "_bias": (count, 2 * inner), down + "_bias": (count, hidden)}
    else:
        gated = [(names.expert(index), inner) for index in range(count)]
    if experts.shared_inner:
        gated.append((names.shared, experts.shared_inner))
    for (gate, up, down), columns in gated:
        shapes |= {gate: (columns, hidden), up: (columns, hidden), down: (hidden, columns)}
    if experts.shared_gate:
        shapes[names.shared_gate] = (1, hidden)
    return shapes


def _delta_tensors(delta: DeltaConfig, hidden: int) -> dict[str, Shape]:
    channels, values = delta.key_heads * delta.width, delta.value_heads * delta.value_dim
    return {
        "linear_attn.in_proj_qkvz.weight": (channels + values, hidden),
        "linear_attn.in_proj_ba.weight": (2 * delta.value_heads, hidden),
        "linear_attn.conv1d.weight": (channels, 1, delta.kernel),
        "linear_attn.dt_bias": (delta.value_heads,),
        "linear_attn.A_log": (delta.value_heads,),
        "linear_attn.norm.weight": (delta.value_dim,),
        "linear_attn.out_proj.weight": (hidden, values),
    }


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
    hidden, inner, mlp = config.hidden_size, config.intermediate_size, dense_prefix(config)
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    linears: dict[str, tuple[int, int, bool]] = {
        "self_attn.o_proj": (hidden, q, config.o_bias),
        mlp + "down_proj": (hidden, inner, config.mlp_bias),
    }
    if config.fused:
        linears["self_attn.qkv_proj"] = (q + 2 * kv, hidden, config.qkv_bias)
        linears[mlp + "gate_up_proj"] = (2 * inner, hidden, config.mlp_bias)
    else:
        linears |= {
            "self_attn.q_proj": (q, hidden, config.qkv_bias),
            "self_attn.k_proj": (kv, hidden, config.qkv_bias),
            "self_attn.v_proj": (kv, hidden, config.qkv_bias),
            mlp + "gate_proj": (inner, hidden, config.mlp_bias),
            mlp + "up_proj": (inner, hidden, config.mlp_bias),
        }
    delta = config.delta
    if delta is not None:
        linears["self_attn.q_proj"] = (2 * q, hidden, config.qkv_bias)  # a gate beside each query
    linear = delta is not None and layer in delta.layers
    if linear:
        linears = {name: shape for name, shape in linears.items() if not name.startswith("self_attn.")}
    if config.latent is not None:
        dense = {name: shape for name, shape in linears.items() if name.startswith(mlp)}
        linears = dense | _latent_linears(config, config.latent)
    if config.has_experts(layer):
        linears = {name: shape for name, shape in linears.items() if not name.startswith(mlp)}
    norms = ["post_attention_layernorm"]
    if config.pre_norms:
        norms.append("input_layernorm")
    if config.post_norms:
        norms += ["pre_feedforward_layernorm"] * config.pre_norms + ["post_feedforward_layernorm"]
    shapes: dict[str, Shape] = {f"{name}.weight": (hidden,) for name in norms}
    if config.sinks:
        shapes["self_attn.sinks"] = (config.heads,)
    if delta is not None and linear:
        shapes |= _delta_tensors(delta, hidden)
    elif config.qk_norm:
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
    if config.has_experts(layer):
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


def mtp_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Returns the tensors of the first MTP head, all of which must be there where one is."""
    hidden, prefix = config.hidden_size, layer_prefix(config.layers)
    own: dict[str, Shape] = {f"{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
    own |= {MTP_JOIN: (hidden, 2 * hidden)} | layer_tensors(config, config.layers)
    return {prefix + name: shape for name, shape in own.items()}


def mtp_copies(config: ModelConfig) -> dict[str, Shape]:
    """Returns what a head may have of its own, where it does not share it with the model: embedding and output."""
    size, prefix = (config.vocab_size, config.hidden_size), layer_prefix(config.layers)
    return {prefix + MTP_EMBED: size, prefix + MTP_HEAD: size}

"""Mixtures of experts as config.json states them: how many experts, which layers have them, how a token's are
chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from kvmesh.engine.config_read import bad, boolean, integer, natural, positive

# Fields that a fingerprint always names: those that there were when keys of experts were first stored.
_FIRST_FIELDS = frozenset(
    [
        "layers",
        "count",
        "chosen",
        "inner",
        "score",
        "renormalise",
        "scale",
        "correction",
        "groups",
        "groups_kept",
        "group_score",
        "shared_inner",
        "naming",
    ]
)


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Describes the experts of the `layers` that have them (the others have a dense MLP), and the router.

    A token's scores are the softmax or the sigmoid of its logits, one for each expert, or the softmax of the logits of
    those chosen alone. The `chosen` best experts are taken by score plus correction; with several `groups` of
    neighbours only experts of the `groups_kept` best groups, a group being as good as its best expert or as its best
    two together. An expert's weight is its score without the correction, divided by the sum of those chosen where they
    are renormalised, times `scale`; it multiplies the expert's answer, or with `scale_input` what the expert is given.

    An expert answers down(act(gate(x)) * up(x)), or with `swiglu` of (alpha, limit) down((up + 1) * gate *
    sigmoid(alpha * gate)) of a gate that is at most limit and an up within ±limit."""

    layers: tuple[int, ...]
    count: int
    chosen: int
    inner: int  # columns of one expert
    score: Literal["softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    correction: bool = False  # the checkpoint has a bias of the choice
    groups: int = 1
    groups_kept: int = 1
    group_score: Literal["best", "best_two"] = "best_two"
    shared_inner: int = 0  # columns of the expert that every token has; 0: none
    # What the checkpoint calls the block, its router, its matrices and the shared expert (`tensors.ExpertNames`).
    naming: Literal["mlp", "block_sparse_moe", "shared_expert", "router", "feed_forward"] = "mlp"
    router_bias: bool = False  # logits have a bias
    biases: bool = False  # gate, up and down have a bias for each expert
    swiglu: tuple[float, float] | None = None
    scale_input: bool = False
    shared_gate: bool = False  # the shared expert's answer is multiplied by a sigmoid of the token's
    # How a checkpoint holds one tensor for all experts, [experts, inputs, outputs]: gate's columns before up's, or by
    # turns. None: one tensor for each expert's matrix.
    stacked: Literal["halves", "by_turns"] | None = None

    def canonical(self) -> dict[str, Any]:
        """Returns what enters the fingerprint; a field that is not one of `_FIRST_FIELDS` where it differs from its
        default only."""
        values = asdict(self)
        for field in fields(self):
            if field.name not in _FIRST_FIELDS and values[field.name] == field.default:
                del values[field.name]
        return values


def read_qwen3_moe(raw: Mapping[str, Any], layers: int) -> ExpertsConfig:
    return _checked(
        raw,
        ExpertsConfig(
            _sparse_layers(raw, layers),
            _either(raw, "num_experts", "num_local_experts", 128),
            integer(raw, "num_experts_per_tok", 8),
            integer(raw, "moe_intermediate_size", 768),
            renormalise=boolean(raw, "norm_topk_prob"),
        ),
    )


def read_mixtral(raw: Mapping[str, Any], layers: int) -> ExpertsConfig:
    return _checked(
        raw,
        ExpertsConfig(
            tuple(range(layers)),
            _either(raw, "num_local_experts", "num_experts", 8),
            integer(raw, "num_experts_per_tok", 2),
            integer(raw, "intermediate_size"),
            naming="block_sparse_moe",
        ),
    )


def read_glm4_moe(raw: Mapping[str, Any], layers: int) -> ExpertsConfig:
    inner = integer(raw, "moe_intermediate_size", 1408)
    return _checked(
        raw,
        ExpertsConfig(
            tuple(range(natural(raw, "first_k_dense_replace", 1), layers)),
            _either(raw, "n_routed_experts", "num_local_experts", 128),
            integer(raw, "num_experts_per_tok", 8),
            inner,
            "sigmoid",
            renormalise=boolean(raw, "norm_topk_prob", True),
            scale=positive(raw, "routed_scaling_factor", 1.0),
            correction=True,
            groups=integer(raw, "n_group", 1),
            groups_kept=integer(raw, "topk_group", 1),
            shared_inner=inner * natural(raw, "n_shared_experts", 1),
        ),
    )


def read_minimax_m2(raw: Mapping[str, Any], layers: int) -> ExpertsConfig:
    _only(raw, {"scoring_func": "sigmoid", "use_routing_bias": True, "shared_intermediate_size": 0})
    return _checked(
        raw,
        ExpertsConfig(
            tuple(range(layers)),
            _either(raw, "num_local_experts", "num_experts", 256),
            integer(raw, "num_experts_per_tok", 8),
            integer(raw, "intermediate_size"),
            "sigmoid",
            correction=True,
            naming="block_sparse_moe",
        ),
    )


def read_qwen3_next(raw: Mapping[str, Any], layers: int) -> ExpertsConfig:
    return _checked(
        raw,
        ExpertsConfig(
            _sparse_layers(raw, layers),
            _either(raw, "num_experts", "num_local_experts", 512),
            integer(raw, "num_experts_per_tok", 10),
            integer(raw, "moe_intermediate_size", 512),
            renormalise=boolean(raw, "norm_topk_prob", True),
            shared_inner=integer(raw, "shared_expert_intermediate_size", 512),
            shared_gate=True,
            naming="shared_expert",
        ),
    )


def read_gpt_oss(raw: Mapping[str, Any], layers: int) -> ExpertsConfig:
    return _checked(
        raw,
        ExpertsConfig(
            tuple(range(layers)),
            _either(raw, "num_local_experts", "num_experts", 128),
            _either(raw, "num_experts_per_tok", "experts_per_token", 4),
            integer(raw, "intermediate_size", 2880),
            "softmax_of_chosen",
            naming="router",
            router_bias=True,
            biases=True,
            swiglu=(positive(raw, "swiglu_alpha", 1.702), positive(raw, "swiglu_limit", 7.0)),
            stacked="by_turns",
        ),
    )


def read_llama4(raw: Mapping[str, Any], layers: int) -> ExpertsConfig:
    inner, step = integer(raw, "intermediate_size", 8192), integer(raw, "interleave_moe_layer_step", 1)
    sparse = raw.get("moe_layers")
    sparse = list(range(step - 1, layers, step)) if sparse is None else _layers(raw, "moe_layers")
    return _checked(
        raw,
        ExpertsConfig(
            tuple(layer for layer in range(layers) if layer in sparse),
            integer(raw, "num_local_experts", 16),
            integer(raw, "num_experts_per_tok", 1),
            inner,
            "sigmoid",
            renormalise=False,
            shared_inner=inner,
            naming="feed_forward",
            scale_input=True,
            stacked="halves",
        ),
    )


def read_deepseek_v2(raw: Mapping[str, Any], layers: int) -> ExpertsConfig:
    _only(raw, {"scoring_func": "softmax", "norm_topk_prob": False, "moe_layer_freq": 1, "mlp_bias": False})
    method = raw.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise bad("topk_method", method, "not supported; supported: greedy, group_limited_greedy")
    grouped = method == "group_limited_greedy"
    inner = integer(raw, "moe_intermediate_size", 1407)
    return _checked(
        raw,
        ExpertsConfig(
            tuple(range(natural(raw, "first_k_dense_replace", 0), layers)),
            _either(raw, "n_routed_experts", "num_experts", 64),
            integer(raw, "num_experts_per_tok"),
            inner,
            renormalise=False,
            scale=positive(raw, "routed_scaling_factor", 1.0),
            groups=integer(raw, "n_group") if grouped else 1,
            groups_kept=integer(raw, "topk_group") if grouped else 1,
            group_score="best",
            shared_inner=inner * natural(raw, "n_shared_experts", 2),
        ),
    )


def read_deepseek_v3(raw: Mapping[str, Any], layers: int) -> ExpertsConfig:
    _only(raw, {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1})
    inner = integer(raw, "moe_intermediate_size", 2048)
    return _checked(
        raw,
        ExpertsConfig(
            tuple(range(natural(raw, "first_k_dense_replace", 3), layers)),
            _either(raw, "n_routed_experts", "num_local_experts", 256),
            integer(raw, "num_experts_per_tok", 8),
            inner,
            "sigmoid",
            renormalise=boolean(raw, "norm_topk_prob", True),
            scale=positive(raw, "routed_scaling_factor", 2.5),
            correction=True,
            groups=integer(raw, "n_group", 8),
            groups_kept=integer(raw, "topk_group", 4),
            shared_inner=inner * natural(raw, "n_shared_experts", 1),
        ),
    )


def _layers(raw: Mapping[str, Any], key: str) -> list[int]:
    """Reads a list of layers, which may be absent."""
    value = raw.get(key) or []
    if not isinstance(value, list) or any(isinstance(layer, bool) or not isinstance(layer, int) for layer in value):
        raise bad(key, value, "must be a list of layers")
    return value


def _sparse_layers(raw: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Returns each `decoder_sparse_step`-th layer, but those of `mlp_only_layers`."""
    dense, step = _layers(raw, "mlp_only_layers"), integer(raw, "decoder_sparse_step", 1)
    return tuple(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)


def _only(raw: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raises CheckpointError where a key that transformers does not read says something else than what it does."""
    for key, supported in values.items():
        if raw.get(key, supported) != supported:
            raise bad(key, raw[key], f"not supported; supported: {supported}")


def _either(raw: Mapping[str, Any], key: str, other: str, default: int) -> int:
    """Reads `key`, or `other`, by which transformers' attribute map knows the same value."""
    return integer(raw, key if raw.get(key) is not None or raw.get(other) is None else other, default)


def _checked(raw: Mapping[str, Any], experts: ExpertsConfig) -> ExpertsConfig:
    """Raises CheckpointError where a token cannot have so many experts."""
    if experts.chosen > experts.count:
        raise bad("num_experts_per_tok", experts.chosen, f"must be at most the {experts.count} experts")
    if experts.count % experts.groups or (experts.groups > 1 and experts.count < 2 * experts.groups):
        raise bad("n_group", experts.groups, f"must divide the {experts.count} experts into groups of at least 2")
    if experts.groups_kept > experts.groups:
        raise bad("topk_group", experts.groups_kept, f"must be at most n_group={experts.groups}")
    if experts.groups_kept * (experts.count // experts.groups) < experts.chosen:
        raise bad("topk_group", experts.groups_kept, f"so many groups have fewer than {experts.chosen} experts")
    return experts

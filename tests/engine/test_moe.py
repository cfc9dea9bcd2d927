"""Mixtures of experts: what a router chooses, against a loop over tokens in plain Python; who multiplies; and configs
and files as transformers reads and writes them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.config_experts import ExpertsConfig
from kvmesh.engine.models.experts import LoopedExperts
from kvmesh.engine.models.moe import MoE, Router
from kvmesh.engine.weights import Weights
from tests.support.engine.stepper import Stepper
from tests.support.reference import reference_model

Zoo = Callable[[str], Path]
PLAIN = ExpertsConfig(layers=(0,), count=12, chosen=3, inner=8)
HIDDEN, TOKENS = 16, 40


def chosen_by_hand(experts: ExpertsConfig, logits: list[float], correction: list[float]) -> dict[int, float]:
    """Expert → weight of one token."""
    if experts.score == "softmax":
        total = sum(math.exp(logit) for logit in logits)
        scores = [math.exp(logit) / total for logit in logits]
    else:
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    choice = [score + more for score, more in zip(scores, correction, strict=True)]
    size = experts.count // experts.groups
    counted = 1 if experts.group_score == "best" else 2

    def goodness(group: int) -> float:
        return sum(sorted(choice[group * size : (group + 1) * size])[-counted:])

    kept = sorted(range(experts.groups), key=goodness)[-experts.groups_kept :]
    within = [expert for expert in range(experts.count) if expert // size in kept]
    best = sorted(within, key=lambda expert: choice[expert])[-experts.chosen :]
    total = sum(scores[expert] for expert in best) if experts.renormalise else 1.0
    return {expert: scores[expert] / total * experts.scale for expert in best}


ROUTERS = {
    "softmax": replace(PLAIN, renormalise=False),
    "softmax-renormalised": PLAIN,
    "sigmoid": replace(PLAIN, score="sigmoid", renormalise=False, scale=2.5),
    "correction": replace(PLAIN, score="sigmoid", correction=True, scale=1.7),
    "groups-best-two": replace(PLAIN, score="sigmoid", correction=True, groups=4, groups_kept=2),
    "groups-best": replace(PLAIN, renormalise=False, groups=3, groups_kept=1, group_score="best", scale=16.0),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_chooses_and_weighs_as_by_hand(name: str) -> None:
    experts = ROUTERS[name]
    generator = torch.Generator().manual_seed(len(name))
    weight = torch.randn(experts.count, HIDDEN, generator=generator) / HIDDEN**0.5
    correction = torch.randn(experts.count, generator=generator) * 0.3 if experts.correction else None
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    chosen, weights = Router(experts, weight, correction)(x)
    assert chosen.shape == weights.shape == (TOKENS, experts.chosen) and weights.dtype == torch.float32
    added = [0.0] * experts.count if correction is None else correction.tolist()
    for logits, own, told in zip((x @ weight.T).tolist(), chosen.tolist(), weights.tolist(), strict=True):
        expected = chosen_by_hand(experts, logits, added)
        assert dict(zip(own, told, strict=True)) == pytest.approx(expected, rel=1e-4)


def test_scores_that_are_all_zero_weigh_nothing() -> None:
    experts = replace(PLAIN, score="sigmoid")
    _, weights = Router(experts, torch.full((12, HIDDEN), -100.0))(torch.ones(2, HIDDEN))
    assert torch.equal(weights, torch.zeros(2, 3))


# ── who multiplies ────────────────────────────────────────────────────────────────────────────────


def block_of(path: Path, layer: int, dtype: torch.dtype = torch.float32) -> MoE:
    checkpoint = open_checkpoint(path)
    return MoE(checkpoint.config, Weights(checkpoint, dtype, torch.device("cpu")), layer)


class Counted:
    """An expert that notes how many tokens it was given."""

    def __init__(self, expert: Any) -> None:
        self.expert = expert
        self.asked: list[int] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.asked.append(len(x))
        answer: torch.Tensor = self.expert(x)
        return answer


@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_each_chosen_expert_multiplies_its_tokens_once_and_no_other_is_asked(zoo: Zoo, tokens: int) -> None:
    block = block_of(zoo("minimax_m2"), 1)
    x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(tokens))
    chosen, weights = block.router(x)
    assert isinstance(block.experts, LoopedExperts)
    experts = block.experts.experts
    expected = torch.zeros_like(x)
    for token in range(tokens):
        for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
            expected[token] += experts[expert](x[token : token + 1])[0] * weight
    counted = [Counted(expert) for expert in experts]
    block.experts.experts = counted  # type: ignore[assignment]
    torch.testing.assert_close(block(x), expected)
    asked = {expert: found.asked for expert, found in enumerate(counted) if found.asked}
    assert asked == {expert: [count] for expert, count in Counter(chosen.flatten().tolist()).items()}


def test_added_to_a_residual_is_rounded_once(zoo: Zoo) -> None:
    """The shared expert's answer and the routed ones' meet the residual in float32."""
    block = block_of(zoo("glm4_moe"), 2, torch.bfloat16)
    x, residual = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    assert block.shared is not None
    summed = block._summed(x)
    assert summed.dtype == torch.float32 and torch.equal(block(x), summed.to(torch.bfloat16))
    assert torch.equal(block.add_and_norm(residual, x, None)[0], (summed + residual).to(torch.bfloat16))
    block.shared = None
    assert not torch.allclose(block._summed(x), summed, atol=0.1)


def test_a_model_of_experts_is_not_captured_where_a_loop_multiplies(zoo: Zoo) -> None:
    """The host looks at how many tokens each expert has, which a CUDA graph cannot; kernels do without."""
    assert not Stepper(zoo("mixtral")).runner.model.capturable
    assert Stepper(zoo("granite")).runner.model.capturable


# ── as transformers has it ────────────────────────────────────────────────────────────────────────


SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
READ: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {}),
    ("qwen3_moe", {"num_experts": 12, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": True}),
    ("qwen3_moe", {"num_local_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 24}),
    ("mixtral", {}),
    ("mixtral", {"num_local_experts": 12, "num_experts_per_tok": 3}),
    ("glm4_moe", {}),
    ("glm4_moe", {"first_k_dense_replace": 0, "n_shared_experts": 3, "norm_topk_prob": False}),
    ("glm4_moe", {"n_routed_experts": 24, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}),
    ("minimax_m2", {}),
    ("minimax_m2", {"num_local_experts": 12, "num_experts_per_tok": 3}),
    ("deepseek_v3", {}),
    ("deepseek_v3", {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "num_local_experts": 24}),
]


@pytest.mark.parametrize(("family", "keys"), READ, ids=lambda value: str(value)[:60])
def test_experts_are_read_as_transformers_reads_them(family: str, keys: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    ours = ModelConfig.from_hf(SMALL | keys | {"model_type": family}).experts
    assert ours is not None
    make: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = make.from_config(AutoConfig.for_model(family, **deepcopy(SMALL | keys), pad_token_id=0))
    found = {index: layer.mlp for index, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")}
    assert tuple(found) == ours.layers
    for theirs in found.values():
        gate = theirs.gate
        assert theirs.experts.down_proj.shape == (ours.count, 64, ours.inner)
        assert (gate.top_k, gate.num_experts) == (ours.chosen, ours.count)
        assert getattr(gate, "norm_topk_prob", True) == ours.renormalise
        assert getattr(gate, "routed_scaling_factor", 1.0) == ours.scale
        assert (getattr(gate, "num_group", 1), getattr(gate, "topk_group", 1)) == (ours.groups, ours.groups_kept)
        shared = getattr(theirs, "shared_experts", None)
        assert (0 if shared is None else shared.down_proj.in_features) == ours.shared_inner
        corrected = any("e_score_correction_bias" in name for name, _ in theirs.named_buffers())
        assert (corrected, ours.score) == (
            (True, "sigmoid") if any(name in family for name in ("glm", "mini", "v3")) else (False, "softmax")
        )


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "glm4_moe", "minimax_m2", "deepseek_v2", "deepseek_v3"])
def test_what_transformers_saves_is_opened(zoo: Zoo, name: str, tmp_path: Path) -> None:
    """transformers holds experts joined in memory and saves them one by one, by the names that the Hub has."""
    reference_model(str(zoo(name))).save_pretrained(tmp_path)
    prompt = list(range(3, 60))
    assert Stepper(tmp_path).answer(prompt, 6) == Stepper(zoo(name)).answer(prompt, 6)

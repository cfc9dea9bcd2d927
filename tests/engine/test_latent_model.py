"""Models with latent attention: what config.json becomes, what a token keeps, what ranks have of it, and what of a
checkpoint is not loaded. Their tokens are compared in test_families and test_parallel."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvmesh.engine.axes import Axes
from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.parallel import check_shares, share_of
from kvmesh.engine.rope import inverse_frequencies
from kvmesh.engine.runner import shard_layout
from kvmesh.errors import CheckpointError, ConfigError
from kvmesh.kvcache.cache_groups import CacheKind, CacheLayout, object_shard
from kvmesh.sim.hardware.shapes import shape_of
from tests.support.checkpoints import FAMILY_ZOO, make_checkpoint
from tests.support.engine.stepper import Stepper

# Sizes of the published config.json.
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "torch_dtype": "bfloat16",
}
SMALL = DEEPSEEK_V3 | {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8}


def test_a_token_of_deepseek_v3_weighs_what_kvsize_says() -> None:
    config = ModelConfig.from_hf(DEEPSEEK_V3)
    assert config.kv_elements_per_token * 2 == 70_272 == shape_of("deepseek-v3").kv_bytes_per_token("bf16")
    layout = shard_layout(config, "bfloat16", 64)
    assert layout.shape == (61, 1, 1, 64, 576) and layout.shard_bytes == 64 * 70_272
    [group] = config.cache_groups
    assert (group.kind, group.layers, group.layout) == (CacheKind.ALL, tuple(range(61)), CacheLayout(1, 1, 576))
    assert object_shard(group, 64, 2) == layout
    assert config.max_context_tokens == 163_840


def test_every_rank_keeps_whole_rows_and_its_own_heads() -> None:
    config = ModelConfig.from_hf(DEEPSEEK_V3)
    whole = shard_layout(config, "bfloat16", 64)
    for size in (2, 8, 128):
        check_shares(config, Axes(tp=size))
        assert [shard_layout(config, "bfloat16", 64, Axes(tp=size), rank) for rank in range(size)] == [whole] * size
        own = share_of(config, Axes(tp=size))
        assert (own.heads, own.kv_heads, own.head_dim, own.latent) == (128 // size, 1, 576, config.latent)
    with pytest.raises(ConfigError, match="must divide num_attention_heads=128"):
        check_shares(config, Axes(tp=3))


VERSIONS: list[tuple[str, dict[str, Any]]] = [
    ("deepseek_v3", {}),
    ("deepseek_v3", {"q_lora_rank": None, "rope_scaling": None, "attention_bias": True}),
    ("deepseek_v2", {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False}),
]


@pytest.mark.parametrize(("family", "keys"), VERSIONS, ids=lambda value: str(value)[:40])
def test_read_as_transformers_reads_it(family: str, keys: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = SMALL | keys | {"model_type": family}
    del raw["architectures"]
    theirs = AutoConfig.for_model(family, **deepcopy({k: v for k, v in raw.items() if k != "model_type"}))
    make: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = make.from_config(theirs, attn_implementation="eager")
    ours = ModelConfig.from_hf(raw)
    assert ours.latent is not None
    for spec, layer in zip(ours.attention, model.model.layers, strict=True):
        assert (spec.scale, spec.window) == (layer.self_attn.scaling, 0)
        assert layer.self_attn.kv_a_proj_with_mqa.out_features == ours.head_dim
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps and ours.rotated_dim == theirs.qk_rope_head_dim
    rotary = type(model.model.rotary_emb)(theirs)
    assert torch.equal(inverse_frequencies(ours.rope, ours.rotated_dim), rotary.inv_freq)
    assert ours.rope.attention_factor == rotary.attention_scaling


def test_kimi_k2_by_each_of_its_names() -> None:
    plain = ModelConfig.from_hf(SMALL).canonical()
    kimi = SMALL | {"model_type": "kimi_k2"}
    assert ModelConfig.from_hf(kimi).canonical() == plain
    for named in ({"architectures": ["KimiK2ForCausalLM"]}, {"architectures": None}):
        found = ModelConfig.from_hf(kimi | named).canonical()
        assert found.pop("architecture") == "KimiK2ForCausalLM"
        assert found == {key: value for key, value in plain.items() if key != "architecture"}


def test_only_models_with_a_latent_name_it_in_their_fingerprint() -> None:
    raw = {**SMALL, "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 4, "rope_scaling": None}
    assert "latent" not in ModelConfig.from_hf(raw).canonical()
    plain = ModelConfig.from_hf(SMALL).canonical()
    for change in ({"kv_lora_rank": 256}, {"qk_rope_head_dim": 32}, {"v_head_dim": 64}, {"rope_interleave": False}):
        assert ModelConfig.from_hf(SMALL | change).canonical() != plain


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config=.*not supported"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'.*supported: sigmoid"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
    ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank=0"),
    ("deepseek_v3", {"n_group": 5}, "n_group=5: must divide the 256 experts"),
    ("deepseek_v3", {"rope_scaling": {"type": "dynamic"}}, "rope_type='dynamic'"),
    ("deepseek_v2", {"scoring_func": "softmax", "topk_method": "greedy"}, "norm_topk_prob=True"),
    ("deepseek_v2", {"scoring_func": "softmax", "norm_topk_prob": False}, "topk_method='noaux_tc'.*greedy"),
]


@pytest.mark.parametrize(("family", "change", "named"), REFUSED, ids=lambda value: str(value)[:50])
def test_refused_in_one_line(family: str, change: dict[str, Any], named: str) -> None:
    raw = {key: value for key, value in SMALL.items() if key != "architectures"}
    with pytest.raises(CheckpointError, match=named) as caught:
        ModelConfig.from_hf(raw | {"model_type": family} | change)
    assert "\n" not in caught.value.message and caught.value.field


def test_layers_that_predict_several_tokens_are_not_loaded(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    """The files have them above num_hidden_layers: the answer and the fingerprint are those without."""
    plain, prompt = Stepper(zoo("kimi_k2")), list(range(3, 60))
    path = make_checkpoint(tmp_path, seed=len("kimi_k2"), **FAMILY_ZOO["kimi_k2"])
    tensors = load_file(path / "model.safetensors")
    above = {name: value for name, value in tensors.items() if name.startswith("model.layers.1.")}
    tensors |= {name.replace("layers.1.", "layers.2."): value.clone() for name, value in above.items()}
    tensors["model.layers.2.eh_proj.weight"] = torch.ones(64, 128)
    save_file(tensors, path / "model.safetensors")
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 1}))
    with_more = Stepper(path)
    assert with_more.answer(prompt, 6) == plain.answer(prompt, 6)
    assert open_checkpoint(path).fingerprint == open_checkpoint(zoo("kimi_k2")).fingerprint


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_a_tensor_that_is_not_there_is_named(zoo: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    path = make_checkpoint(tmp_path, **FAMILY_ZOO[name] | {"shards": 1})
    tensors = load_file(path / "model.safetensors")
    missing = "model.layers.1.self_attn.kv_a_layernorm.weight"
    save_file({key: value for key, value in tensors.items() if key != missing}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=missing.replace(".", r"\.")):
        open_checkpoint(path)

"""Configs of each family, in the old spelling and the new: windows, scales, caps and ropes are transformers' own."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.rope import RotaryEmbedding, inverse_frequencies, rotate
from kvmesh.errors import CheckpointError
from tests.support.checkpoints import FAMILY_ZOO, make_checkpoint
from tests.support.engine.stepper import Stepper

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LONGROPE = {"short_factor": [1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2, 2.4], "long_factor": [1.0, 2, 3, 4, 5, 6, 7, 8]}
LINEAR = {"rope_type": "linear", "factor": 8.0}
FEW = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 1}
TYPES = ["sliding_attention", "full_attention", "full_attention"] * 2 + ["sliding_attention"]

# model_type, keys
READ: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_theta": 1e4, "layer_types": ["full_attention"] * 7}),
    ("llama", {"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 2048} | LONGROPE}),
    ("mistral", {}),
    ("mistral", {"sliding_window": None, "rope_theta": 1e6}),
    ("mistral", {"sliding_window": 9, "head_dim": 32, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
    ("ministral", {"sliding_window": 9, "head_dim": 16, "layer_types": TYPES}),
    ("qwen2", {"sliding_window": 9, "max_window_layers": 2}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 2}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 9, "layer_types": TYPES}),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}),
    ("gemma2", {}),
    ("gemma2", {"rope_theta": 777.0, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gemma2", {"layer_types": TYPES, "sliding_window": 11, "query_pre_attn_scalar": 144, "head_dim": 16}),
    ("gemma2", {"rope_parameters": {"rope_theta": 777.0, "rope_type": "default"}, "attention_bias": True}),
    ("gemma3_text", {}),
    ("gemma3_text", {"rope_scaling": LINEAR, "rope_theta": 5e5, "rope_local_base_freq": 500.0}),
    ("gemma3_text", {"sliding_window": 11, "sliding_window_pattern": 2, "query_pre_attn_scalar": 168}),
    ("gemma3_text", {"layer_types": TYPES, "final_logit_softcapping": 20.0}),
    (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": LINEAR | {"rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 600.0},
            }
        },
    ),
    ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 3e5}}}),
    ("phi3", {}),
    ("phi3", {"sliding_window": 9, "num_key_value_heads": None, "rope_theta": 2e4}),
    ("phi3", {"rope_scaling": {"type": "longrope"} | LONGROPE, "max_position_embeddings": 8192}),
    ("phi3", {"rope_scaling": {"type": "su", "original_max_position_embeddings": 4096} | LONGROPE}),
    (
        "phi3",
        {
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 32.0} | LONGROPE,
            "original_max_position_embeddings": 512,
            "max_position_embeddings": 16384,
        },
    ),
    (
        "phi3",
        {
            "partial_rotary_factor": 0.75,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": LONGROPE["short_factor"][:6],
                "long_factor": LONGROPE["long_factor"][:6],
                "attention_factor": 1.3,
            },
        },
    ),
    ("phi3", {"partial_rotary_factor": 0.5}),
    ("granite", {}),
    ("granite", {"attention_multiplier": 0.1, "logits_scaling": 8.0, "embedding_multiplier": 12, "mlp_bias": True}),
    ("olmo3", {}),
    ("olmo3", {"rope_theta": 1e4, "rope_scaling": LINEAR, "sliding_window": 9}),
    ("olmo3", {"layer_types": TYPES, "rope_parameters": {"sliding_attention": {"rope_theta": 600.0}}}),
    ("qwen3_moe", FEW),
    ("qwen3_moe", FEW | {"use_sliding_window": True, "sliding_window": 9, "head_dim": 32, "rope_theta": 1e6}),
    ("mixtral", FEW),
    ("mixtral", FEW | {"sliding_window": 9, "head_dim": 24}),
    ("glm4_moe", FEW),
    ("glm4_moe", FEW | {"partial_rotary_factor": 0.25, "head_dim": 32, "use_qk_norm": True, "rope_theta": 1e6}),
    ("minimax_m2", FEW),
    ("minimax_m2", FEW | {"rotary_dim": 8, "head_dim": 32, "rope_theta": 1e4}),
    ("minimax_m2", FEW | {"rotary_dim": 8, "head_dim": 32, "partial_rotary_factor": 0.5}),
    ("gpt_oss", FEW),
    ("gpt_oss", FEW | {"layer_types": TYPES, "sliding_window": 9, "head_dim": 32, "attention_bias": False}),
]


@pytest.mark.parametrize(("family", "keys"), READ, ids=lambda value: str(value)[:60])
def test_read_as_transformers_reads_it(family: str, keys: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = SMALL | keys
    theirs = AutoConfig.for_model(family, **deepcopy(raw), pad_token_id=0)
    ours = ModelConfig.from_hf(raw | {"model_type": family})
    make: Any = AutoModelForCausalLM
    model = make.from_config(theirs, attn_implementation="eager")
    assert tuple(layer.self_attn.head_dim for layer in model.model.layers) == (ours.head_dim,) * 7
    for spec, layer in zip(ours.attention, model.model.layers, strict=True):
        attention = layer.self_attn
        window = getattr(
            attention, "sliding_window", theirs.sliding_window if family in ("mistral", "phi3", "mixtral") else None
        )
        assert (spec.scale, spec.window) == (attention.scaling, window or 0)
        assert spec.softcap == (getattr(attention, "attn_logit_softcapping", None) or 0.0)
    assert ours.logit_softcap == (getattr(theirs, "final_logit_softcapping", None) or 0.0)
    assert ours.kv_heads == theirs.num_key_value_heads and ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings and ours.eos_token_ids == _eos(theirs)
    _same_ropes(ours, model.model.rotary_emb)


def _eos(theirs: Any) -> tuple[int, ...]:
    value = theirs.eos_token_id
    return tuple(token for token in [value] if token is not None and token < theirs.vocab_size)


def _same_ropes(ours: ModelConfig, theirs: Any) -> None:
    positions = torch.tensor([0, 1, 63, 511, ours.max_position_embeddings - 1])
    x = torch.randn(5, 3, ours.head_dim, generator=torch.Generator().manual_seed(0))
    for rope, name in ((ours.rope, "full_attention"), (ours.local_rope, "sliding_attention")):
        if rope is None:
            continue
        layered = () if ours.local_rope is None else (name,)
        cos, sin = theirs(torch.empty(0), positions[None], *layered)
        prefix = f"{name}_" if layered else ""
        if cos.shape[-1] == len(inverse_frequencies(rope, ours.head_dim)):  # gpt-oss: of one half of the pairs alone
            cos, sin = (torch.cat((of, of), -1) for of in (cos, sin))
        assert torch.equal(inverse_frequencies(rope, ours.head_dim), getattr(theirs, f"{prefix}inv_freq"))
        our_cos, our_sin = RotaryEmbedding(rope, ours.head_dim, torch.float32, torch.device("cpu"))(positions)
        turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        half = torch.cat((-turned[..., cos.shape[-1] // 2 :], turned[..., : cos.shape[-1] // 2]), -1)
        expected = torch.cat((turned * cos[0][:, None] + half * sin[0][:, None], rest), -1)
        torch.testing.assert_close(rotate(x, our_cos, our_sin, torch.empty_like(x)), expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(rotate(x.clone(), our_cos, our_sin, y := x.clone()), y)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"layer_types": TYPES}, "layer_types.*all layers alike"),
    ("mistral", {"sliding_window": 0}, "sliding_window=0: must be a positive integer"),
    ("mistral", {"sliding_window": None, "layer_types": TYPES}, "sliding_window=None.*needs a window"),
    ("phi3", {"sliding_window": 9, "layer_types": TYPES}, "layer_types.*all layers alike"),
    ("gemma2", {"sliding_window": None}, "sliding_window=None.*needs a window"),
    ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu'.*gelu_pytorch_tanh"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("gemma2", {"attn_logit_softcapping": -1}, "attn_logit_softcapping=-1"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
    ("gemma2", {"rope_parameters": {"full_attention": {}}}, "rope_parameters.*each layer type"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    ("gemma3_text", {"rope_parameters": LINEAR}, "rope_parameters.*keys full_attention and sliding_attention"),
    ("gemma3_text", {"rope_parameters": {"full_attention": 3}}, "must hold an object"),
    ("gemma3_text", {"rope_scaling": {"rope_type": "dynamic"}}, "rope_type='dynamic'"),
    ("gemma3_text", {"rope_local_base_freq": -1}, "rope_theta=-1"),
    ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern=0"),
    ("gemma3", {}, "text_config=None"),
    ("gemma3", {"text_config": {"final_logit_softcapping": 30.0}}, "final_logit_softcapping=30.0"),
    ("phi3", {"rope_scaling": LINEAR}, "rope_type='linear'.*default, longrope"),
    ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8}}, "long_factor is missing"),
    ("phi3", {"rope_scaling": {"type": "su", "short_factor": [1.0] * 7}}, "short_factor=.*a list of 8 numbers"),
    ("phi3", {"rope_scaling": {"type": "su"} | LONGROPE | {"long_factor": [0] * 8}}, "long_factor=0"),
    ("phi3", {"partial_rotary_factor": 0.2}, "partial_rotary_factor=0.2: must rotate an even part of head_dim=16"),
    ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
    ("phi3", {"hidden_act": "gelu_new"}, "hidden_act='gelu_new'"),
    ("granite", {"residual_multiplier": 0}, "residual_multiplier=0"),
    ("olmo3", {"sliding_window": None, "layer_types": TYPES}, "sliding_window=None.*needs a window"),
    ("qwen3_moe", {"num_experts_per_tok": 129}, "num_experts_per_tok=129: must be at most the 128 experts"),
    ("qwen3_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers=.*a list of layers"),
    ("mixtral", {"num_local_experts": 0}, "num_local_experts=0"),
    ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace=-1"),
    ("glm4_moe", {"n_group": 3}, "n_group=3: must divide the 128 experts"),
    ("glm4_moe", {"n_group": 128}, "n_group=128: .*groups of at least 2"),
    ("glm4_moe", {"n_group": 4, "topk_group": 5}, "topk_group=5: must be at most n_group=4"),
    ("glm4_moe", {"n_group": 32, "num_experts_per_tok": 5}, "topk_group=1: so many groups have fewer than 5"),
    ("glm4_moe", {"rope_scaling": LINEAR}, "rope_type='linear'.*default"),
    ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
    ("minimax_m2", {"rotary_dim": 7}, "partial_rotary_factor=.*an even part"),
    ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config=.*mxfp4.*supported: float32"),
    ("gpt_oss", {"sliding_window": None, "layer_types": TYPES}, "sliding_window=None.*needs a window"),
    ("llama4_text", {"layer_types": TYPES}, "layer_types=.*full_attention and chunked_attention"),
    ("llama4_text", {"layer_types": ["chunked_attention"]}, "layer_types=.*num_hidden_layers=7"),
    (
        "llama4_text",
        {"layer_types": ["chunked_attention"] * 7, "attention_chunk_size": None},
        "attention_chunk_size=None.*needs a chunk",
    ),
    ("llama4_text", {"no_rope_layers": [1, 0]}, "no_rope_layers=.*num_hidden_layers=7"),
    ("llama4_text", {"attn_temperature_tuning": "yes"}, "attn_temperature_tuning='yes'"),
    ("llama4_text", {"rope_scaling": LINEAR}, "rope_type='linear'.*default, llama3"),
    ("llama4", {}, "text_config=None"),
]


@pytest.mark.parametrize(("family", "change", "named"), REFUSED, ids=lambda value: str(value)[:50])
def test_refused_in_one_line(family: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named) as caught:
        ModelConfig.from_hf(SMALL | change | {"model_type": family})
    assert "\n" not in caught.value.message and caught.value.field


def test_longrope_chooses_for_the_model_not_for_a_request(tmp_path: Path) -> None:
    """By the longest context that the model is opened for; the choice is part of the fingerprint, so KV of one never
    serves the other."""
    path = make_checkpoint(tmp_path, **FAMILY_ZOO["phi3"])
    long, short, edge = (open_checkpoint(path, limit) for limit in (0, 64, 65))
    scaling = FAMILY_ZOO["phi3"]["rope"]
    assert list(long.config.rope.factors) == scaling["long_factor"] == list(edge.config.rope.factors)
    assert list(short.config.rope.factors) == scaling["short_factor"]
    assert (long.config.max_context_tokens, short.config.max_context_tokens) == (512, 64)
    assert long.config.rope.attention_factor == short.config.rope.attention_factor > 1
    assert long.fingerprint == edge.fingerprint != short.fingerprint


def test_gemma3_among_other_modalities(tmp_path: Path) -> None:
    """The language model of a checkpoint that has a vision tower, too: the same tokens as by itself, under both names
    that its tensors go by, and with the keys that the outer config alone has."""
    alone = make_checkpoint(tmp_path / "alone", **FAMILY_ZOO["gemma3"])
    prompt = list(range(3, 80))
    expected = Stepper(alone).answer(prompt, 8)
    raw = json.loads((alone / "config.json").read_text())
    outer: dict[str, Any] = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
    }
    outer |= {"torch_dtype": raw.pop("torch_dtype"), "vision_config": {"hidden_size": 8}}
    del raw["eos_token_id"]
    (alone / "config.json").write_text(json.dumps(outer | {"text_config": raw}))
    tensors = load_file(alone / "model.safetensors")
    for before, after in (("", "language_model."), ("model.", "model.language_model.")):
        renamed = {after + name.removeprefix(before): tensor for name, tensor in tensors.items()}
        renamed["vision_tower.embeddings.weight"] = torch.zeros(2, 2)
        save_file(renamed, alone / "model.safetensors")
        stepper = Stepper(alone)
        assert stepper.answer(prompt, 8) == expected
        assert stepper.checkpoint.config.eos_token_ids == (1, 106)
    del renamed["model.language_model.norm.weight"]
    save_file(renamed, alone / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is missing"):
        open_checkpoint(alone)


def test_fused_tensors_are_named_as_they_are(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, **FAMILY_ZOO["phi3-window"])
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.self_attn.qkv_proj.weight"
    tensors[name] = tensors[name][:-16].contiguous()
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"qkv_proj\.weight has shape \[80, 64\], config.json asks for \[96, 64\]"
    ):
        open_checkpoint(path)


DECIDES: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"sliding_window": 7}),
    ("mistral", {"layer_types": TYPES}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 3}),
    ("gemma2", {"attn_logit_softcapping": 7.0}),
    ("gemma2", {"final_logit_softcapping": None}),
    ("gemma2", {"query_pre_attn_scalar": 7}),
    ("gemma3_text", {"rope_local_base_freq": 7.0}),
    ("gemma3_text", {"sliding_window_pattern": 2}),
    ("phi3", {"partial_rotary_factor": 0.5}),
    ("phi3", {"rope_scaling": {"type": "longrope"} | LONGROPE}),
    ("granite", {"residual_multiplier": 0.5}),
    ("qwen3_moe", {"norm_topk_prob": True}),
    ("glm4_moe", {"routed_scaling_factor": 2.5}),
    ("qwen3_next", {"full_attention_interval": 3}),
    ("qwen3_next", {"linear_num_value_heads": 16}),
    ("gpt_oss", {"sliding_window": 7}),
    ("llama4_text", {"attention_chunk_size": 7}),
    ("llama4_text", {"no_rope_layer_interval": 2}),
    ("llama4_text", {"attn_temperature_tuning": False}),
    ("llama4_text", {"floor_scale": 7}),
    ("llama4_text", {"use_qk_norm": False}),
]


@pytest.mark.parametrize("keys", [{}, {"no_rope_layers": [1, 0, 1, 1, 0, 1, 1], "attention_chunk_size": 9}])
def test_llama_4_is_read_as_transformers_reads_it(keys: dict[str, Any]) -> None:
    from transformers import Llama4TextConfig

    raw = SMALL | {"num_local_experts": 2} | keys
    theirs, ours = Llama4TextConfig(**deepcopy(raw)), ModelConfig.from_hf(raw | {"model_type": "llama4_text"})
    nope = () if ours.nope is None else ours.nope.layers
    assert [int(layer not in nope) for layer in range(7)] == theirs.no_rope_layers
    chunked = ["chunked_attention" if chunk else "full_attention" for chunk in ours.chunks]
    assert chunked == theirs.layer_types and max(ours.chunks) == theirs.attention_chunk_size
    assert ours.nope is not None and (ours.nope.step, ours.nope.growth) == (theirs.floor_scale, theirs.attn_scale)
    assert ours.experts is not None and list(ours.experts.layers) == theirs.moe_layers
    assert (ours.intermediate_size, ours.experts.inner) == (theirs.intermediate_size_mlp, theirs.intermediate_size)
    assert (ours.head_dim, ours.rms_norm_eps) == (theirs.head_dim, theirs.rms_norm_eps)
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]


def test_language_model_of_llama_4(tmp_path: Path) -> None:
    """The same tokens where the text model lies beside another modality, by both namings."""
    alone = make_checkpoint(tmp_path / "alone", **FAMILY_ZOO["llama4"])
    prompt = [7 * i % 300 for i in range(70)]
    expected = Stepper(alone).answer(prompt, 8)
    raw = json.loads((alone / "config.json").read_text())
    outer = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4"}
    (alone / "config.json").write_text(json.dumps(outer | {"text_config": raw, "vision_config": {"hidden_size": 8}}))
    tensors = load_file(alone / "model.safetensors")
    for before, after in (("", "language_model."), ("model.", "model.language_model.")):
        renamed = {after + n.removeprefix(before) if n.startswith(before) else n: t for n, t in tensors.items()}
        renamed["vision_model.embeddings.weight"] = torch.zeros(2, 2)
        save_file(renamed, alone / "model.safetensors")
        assert Stepper(alone).answer(prompt, 8) == expected


@pytest.mark.parametrize(("family", "change"), DECIDES, ids=lambda value: str(value)[:50])
def test_what_decides_kv_or_logits_is_in_the_fingerprint(family: str, change: dict[str, Any]) -> None:
    raw = SMALL | {"model_type": family}
    plain = ModelConfig.from_hf(raw).canonical()
    assert ModelConfig.from_hf(raw | change).canonical() != plain
    assert ModelConfig.from_hf(raw | {"eos_token_id": [1, 2]}).canonical() == plain

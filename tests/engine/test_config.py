"""config.json: what is read, what is refused, and rope frequencies equal to transformers' to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.rope import RotaryEmbedding, inverse_frequencies, rotate
from kvmesh.errors import CheckpointError

BASE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def test_defaults_are_those_of_transformers() -> None:
    qwen = ModelConfig.from_hf(BASE)
    assert (qwen.head_dim, qwen.rms_norm_eps, qwen.rope.theta, qwen.eos_token_ids) == (128, 1e-6, 10000.0, ())
    assert qwen.qk_norm and not qwen.qkv_bias and not qwen.tie_word_embeddings
    llama = ModelConfig.from_hf(BASE | {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": None})
    assert (llama.head_dim, llama.kv_heads, llama.eos_token_ids) == (16, 4, (2,))
    assert not llama.qk_norm and not llama.qkv_bias
    qwen2 = ModelConfig.from_hf(BASE | {"architectures": None, "model_type": "qwen2"})
    assert qwen2.architecture == "Qwen2ForCausalLM" and qwen2.qkv_bias and not qwen2.o_bias


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architectures.*LlamaForCausalLM, .*Qwen3ForCausalLM, .*Phi3ForCausalLM",
        ),
        ({"architectures": []}, "architectures"),
        ({"architectures": None}, "model_type None.*LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'.*silu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.*bfloat16"),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": -1}, "max_window_layers=-1"),
        ({"use_sliding_window": True, "sliding_window": "64"}, "sliding_window='64'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "use_sliding_window=False.*sliding_attention"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types.*chunked.*full_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types.*num_hidden_layers=2"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size='64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_attention_heads": True}, "num_attention_heads=True"),
        ({"vocab_size": -5}, "vocab_size=-5"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3.*num_attention_heads=4"),
        ({"head_dim": 15}, "head_dim=15.*even"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"attention_bias": "yes"}, "attention_bias='yes'"),
        ({"eos_token_id": "two"}, "eos_token_id='two'"),
        ({"rope_theta": -1}, "rope_theta=-1"),
        ({"rope_scaling": "linear"}, "rope_parameters='linear'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type='dynamic'.*default, linear, llama3, yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor=0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 1}}, "high_freq_factor is missing"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 3}},
            "high_freq_factor=3.0.*low_freq_factor=4.0",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "truncate": 1}}, "truncate=1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ],
)
def test_refused_in_one_line(change: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named) as caught:
        ModelConfig.from_hf(BASE | change)
    assert "\n" not in caught.value.message


def test_sliding_window_that_no_layer_uses_is_fine() -> None:
    unused = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    assert ModelConfig.from_hf(BASE | unused).layers == 2
    assert ModelConfig.from_hf(BASE | {"use_sliding_window": False, "sliding_window": 64}).layers == 2


ROPES: list[dict[str, Any]] = [
    {"rope_theta": 1e6},
    {"rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "default", "type": "linear"}},
    {"rope_parameters": {"rope_type": "linear", "factor": 3, "rope_theta": 777.0}},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 100},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e5, "factor": 4.0, "attention_factor": 0.7}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e5, "factor": 40.0, "mscale": 1.3, "mscale_all_dim": 0.7}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e5, "factor": 40.0, "mscale": 1.3}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 24, "beta_slow": 2, "truncate": False}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 1.0, "beta_fast": 0}},
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: str(rope)[:70])
@pytest.mark.parametrize("head_dim", [16, 64, 126])
def test_frequencies_equal_transformers(rope: dict[str, Any], head_dim: int) -> None:
    from copy import deepcopy

    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    raw = BASE | {"head_dim": head_dim} | rope
    theirs = Qwen3RotaryEmbedding(Qwen3Config(**deepcopy(raw)))
    ours = ModelConfig.from_hf(raw).rope
    assert torch.equal(inverse_frequencies(ours, head_dim), theirs.inv_freq)

    positions = torch.tensor([0, 1, 63, 511, 4097])
    cos, sin = theirs(torch.empty(0), positions[None])
    our_cos, our_sin = RotaryEmbedding(ours, head_dim, torch.float32, torch.device("cpu"))(positions)
    x = torch.randn(5, 3, head_dim, generator=torch.Generator().manual_seed(0))
    half = torch.cat((-x[..., head_dim // 2 :], x[..., : head_dim // 2]), -1)
    expected = x * cos[0][:, None] + half * sin[0][:, None]
    torch.testing.assert_close(rotate(x, our_cos, our_sin, out=torch.empty_like(x)), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(rotate(x, our_cos, our_sin, out=torch.empty_like(x)), rotate(x, our_cos, our_sin, out=x))


def test_context_limit_follows_the_scaling() -> None:
    def limit(**change: Any) -> int:
        return ModelConfig.from_hf(BASE | change).max_context_tokens

    assert limit() == 512
    assert limit(rope_scaling={"rope_type": "linear", "factor": 2.5}) == 1280
    assert limit(rope_scaling={"rope_type": "yarn", "factor": 4.0}) == 2048
    assert limit(rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}) == 512
    assert limit(rope_scaling={"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}) == 512

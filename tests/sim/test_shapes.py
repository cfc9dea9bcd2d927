"""Shapes of models: KV of a token against published figures, parameters against the names models bear."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvmesh.errors import ConfigError
from kvmesh.sim.hardware.shapes import PRESETS, from_config, shape_of
from tests.support.paths import ROOT

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
}


@pytest.mark.parametrize(
    ("model", "bytes_per_token"),
    [
        ("deepseek-v3", 70_272),  # 61 x (512 + 64) x 2
        ("kimi-k2", 70_272),
        ("llama3-70b", 327_680),  # 2 x 80 x 8 x 128 x 2
        ("llama3-8b", 131_072),
        ("llama2-7b", 524_288),  # as many KV heads as heads
        ("falcon-7b", 8_192),  # one KV head
        ("qwen3-0.6b", 114_688),  # head_dim x heads is not hidden
    ],
)
def test_kv_of_a_token(model: str, bytes_per_token: int) -> None:
    shape = shape_of(model)
    assert shape.kv_bytes_per_token() == bytes_per_token
    assert shape.kv_bytes_per_token("fp8") * 2 == bytes_per_token
    assert shape.kv_bytes_per_token("fp32") == 2 * bytes_per_token


@pytest.mark.parametrize(
    ("model", "billions", "active"),
    [
        ("llama3-8b", 8.03, 8.03), ("llama3-70b", 70.6, 70.6), ("llama3-405b", 406, 406),
        ("mixtral-8x7b", 46.7, 12.9), ("mixtral-8x22b", 141, 39), ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235, 22), ("deepseek-v3", 671, 37), ("kimi-k2", 1026, 32), ("gemma2-9b", 9.24, 9.24),
        ("gemma3-27b", 27.0, 27.0), ("gpt-oss-20b", 20.9, 4.2), ("qwen3-next-80b-a3b", 79.7, 3.87),
    ],
)  # fmt: skip
def test_parameters_are_those_that_the_models_are_named_by(model: str, billions: float, active: float) -> None:
    shape = shape_of(model)
    assert shape.params / 1e9 == pytest.approx(billions, rel=0.005)
    assert shape.active_params / 1e9 == pytest.approx(active, rel=0.03)


def test_every_preset_can_be_read() -> None:
    for name in PRESETS:
        shape = shape_of(name.upper())
        assert shape.name == name
        assert shape.kv_bytes_per_rank(1) == shape.kv_bytes_per_token()


def test_ranks_share_heads_until_there_are_none_left() -> None:
    llama = shape_of("llama3-70b")
    assert [llama.kv_bytes_per_rank(tp) for tp in (1, 2, 8, 16)] == [327_680, 163_840, 40_960, 40_960]
    assert shape_of("deepseek-v3").kv_bytes_per_rank(8) == 70_272  # every rank needs the latent
    with pytest.raises(ConfigError, match="tp=3: must divide the 64 attention heads"):
        llama.kv_bytes_per_rank(3)


def test_the_demo_models_config_says_what_its_engine_keeps() -> None:
    folder = ROOT / "examples" / "demo-model"
    told = json.loads((folder / "config.json").read_text())
    shape = shape_of(str(folder))
    assert shape.kv_bytes_per_token("fp32") == (
        2 * told["num_hidden_layers"] * told["num_key_value_heads"] * told["head_dim"] * 4
    )
    assert shape_of(str(folder / "config.json")) == shape


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"])
def test_what_is_missing_is_named(field: str) -> None:
    raw = {name: value for name, value in LLAMA.items() if name != field}
    with pytest.raises(ConfigError, match=f"config.json: {field} is missing") as caught:
        from_config(raw, "m")
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers=0: must be at least 1"),
        ({"num_key_value_heads": 7}, "num_key_value_heads=7: must divide num_attention_heads=64"),
        ({"hidden_size": 8191}, "hidden_size=8191: is no multiple of num_attention_heads=64, and head_dim is missing"),
        ({"head_dim": "128"}, "head_dim='128': must be a whole number"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim is missing"),
        ({"num_experts": 8}, "num_experts_per_tok is missing"),
        ({"layer_types": ["mamba"] * 80}, "layer_types='mamba': is no kind of layer"),
        ({"layer_types": ["sliding_attention"] * 80}, "sliding_window is missing"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1: must be true or false"),
    ],
)
def test_what_is_wrong_is_named_with_its_value(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_config({**LLAMA, **change}, "m")
    assert words in caught.value.message


def test_sliding_windows_are_counted_by_layer() -> None:
    kinds = ["sliding_attention", "full_attention"] * 40
    shape = from_config({**LLAMA, "layer_types": kinds, "sliding_window": 1024}, "m")
    assert (shape.kv_layers, shape.window_layers, shape.window) == (80, 40, 1024)
    hybrid = ["linear_attention"] * 60 + ["full_attention"] * 20
    assert from_config({**LLAMA, "layer_types": hybrid}, "m").kv_bytes_per_token() == 327_680 // 4
    unused = from_config({**LLAMA, "sliding_window": 4096, "use_sliding_window": False}, "m")
    assert unused.window_layers == 0
    assert shape_of("gemma2-9b").window_layers == 21


def test_a_linear_layer_has_matrices_and_states_of_its_own() -> None:
    """Qwen3-Next by hand: 12 layers attend, with a gate beside each query, 36 are linear."""
    shape = shape_of("qwen3-next-80b-a3b")
    attends = 2048 * 256 * (2 * 16 + 2 * 2 + 16)  # queries and gates, keys and values, output
    channels = 2 * 16 * 128 + 32 * 128
    linear = 2048 * (channels + 32 * 128) + 2048 * 2 * 32 + 4 * channels + 32 * 128 * 2048
    assert shape.attention_params == 12 * attends + 36 * linear
    assert shape.delta_numbers == 36 * 32 * 128 * 128
    assert shape.state_bytes() == 36 * (32 * 128 * 128 * 4 + 3 * channels * 2)
    assert shape.state_bytes("fp8") == 36 * (32 * 128 * 128 * 4 + 3 * channels)  # the states stay float32
    assert shape_of("llama3-8b").delta_numbers == shape_of("gemma3-27b").state_bytes() == 0
    with pytest.raises(ConfigError, match="linear_num_value_heads=33: must be a multiple of linear_num_key_heads=16"):
        from_config({**PRESETS["qwen3-next-80b-a3b"], "linear_num_value_heads": 33}, "m")


def test_the_text_model_of_several_is_meant_and_other_names_are_known() -> None:
    assert from_config({"vision_config": {}, "text_config": LLAMA}, "m") == from_config(LLAMA, "m")
    gpt = {"model_type": "gpt_bigcode", "n_layer": 40, "n_head": 48, "n_embd": 6144, "n_inner": 24576,
           "multi_query": True, "vocab_size": 49152, "tie_word_embeddings": True}  # fmt: skip
    starcoder = from_config(gpt, "starcoder")
    assert (starcoder.kv_bytes_per_token(), round(starcoder.params / 1e9, 1)) == (2 * 40 * 128 * 2, 15.5)


def test_a_model_that_is_nowhere(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file.*presets: .*llama3-70b"):
        shape_of("gpt-9")
    for text, words in (("{", "is not JSON"), ("[]", "holds no object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=words):
            shape_of(str(tmp_path))
    with pytest.raises(ConfigError, match="dtype='fp4': choose one of"):
        shape_of("llama3-8b").kv_bytes_per_token("fp4")

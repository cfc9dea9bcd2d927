"""`kvmesh kvsize`: what it prints, its JSON, and mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner, Result

from kvmesh.cli.app import app
from kvmesh.cli.kvsize import compared
from kvmesh.sim.hardware.shapes import from_config, shape_of
from tests.support.paths import ROOT

Invoke = Callable[..., Result]
DEMO = ROOT / "examples" / "demo-model"


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Invoke:
    monkeypatch.setenv("TERM", "dumb")
    return lambda *args: CliRunner().invoke(app, ["kvsize", *map(str, args)])


def rows(result: Result) -> dict[str, str]:
    assert result.exit_code == 0, result.output
    return {
        left.strip(): right.strip() for left, _, right in (line.partition("  ") for line in result.stdout.splitlines())
    }


def test_a_latent_counts_and_heads_do_not(invoke: Invoke) -> None:
    told = rows(invoke("deepseek-v3"))
    assert told["KV of a token, bf16"] == "70,272 B"
    assert told["of a block of 64 tokens"] == "4,497,408 B"
    assert told["tokens in a GiB"] == "15,279"
    assert "671B parameters" in told["model"] and "MLA, latent of 512 + 64" in told["model"]


def test_ranks_blocks_and_dtypes(invoke: Invoke) -> None:
    told = rows(invoke("llama3-70b", "--tp", 16, "--block-tokens", 256, "--dtype", "fp8"))
    assert told["KV of a token, fp8"] == "163,840 B"
    assert told["of a block of 256 tokens"] == f"{163_840 * 256:,} B"
    assert told["of a token, each of 16 ranks"] == "20,480 B (kept 2 times in all)"


def test_json_has_the_same_figures(invoke: Invoke) -> None:
    told = json.loads(invoke(DEMO, "--dtype", "fp32", "--tp", 2, "--json").stdout)
    assert (told["bytes_per_token"], told["bytes_per_token_of_a_rank"], told["copies"]) == (4096, 2048, 1)
    assert told["bytes_per_block"] == 64 * 4096 and told["tokens_per_gib"] == 2**30 // 4096


def test_a_window_is_noted(invoke: Invoke) -> None:
    told = rows(invoke("gemma2-9b"))
    assert told["sliding window"].startswith(
        "21 of 42 layers see 4,096 tokens back; a token before them needs 172,032 B"
    )


def test_what_is_missing_is_named(invoke: Invoke, tmp_path: Path) -> None:
    raw = json.loads((DEMO / "config.json").read_text())
    del raw["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    result = invoke(tmp_path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "config.json: num_hidden_layers is missing" in result.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("gpt-9",), "model='gpt-9'"),
        (("llama3-8b", "--dtype", "fp4"), "dtype='fp4': choose one of"),
        (("llama3-8b", "--tp", "3"), "tp=3: must divide the 32 attention heads"),
    ],
)
def test_a_mistake_is_one_line(invoke: Invoke, args: tuple[str, ...], words: str) -> None:
    result = invoke(*args)
    assert result.exit_code == 2 and words in result.stderr and "Traceback" not in result.stderr


# The fields of published config.json files that say what a model keeps.
PUBLISHED: dict[str, dict[str, object]] = {
    "gemma-3-27b": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "num_hidden_layers": 62,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "sliding_window": 1024,
        },
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 24,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "num_local_experts": 32,
        "experts_per_token": 4,
        "vocab_size": 201_088,
    },
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 151_936,
    },
    "llama-4-scout": {
        "model_type": "llama4",
        "text_config": {
            "model_type": "llama4_text",
            "num_hidden_layers": 48,
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_chunk_size": 8192,
            "no_rope_layers": [],
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "vocab_size": 202_048,
        },
    },
}


@pytest.fixture
def published(invoke: Invoke, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def told(name: str, *args: object) -> dict[str, Any]:
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(PUBLISHED[name]), encoding="utf-8")
        result = invoke(file, "--json", *args)
        assert result.exit_code == 0, result.output
        return cast(dict[str, Any], json.loads(result.stdout))

    return told


def test_gemma_3_keeps_most_layers_of_the_last_tokens_alone(published: Callable[..., dict[str, Any]]) -> None:
    told = published("gemma-3-27b", "--block-tokens", 16)
    layer = 2 * 16 * 128 * 2  # bytes of a token in one layer
    everywhere, window = told["groups"]
    assert (everywhere["name"], everywhere["layers"], everywhere["bytes_per_token"]) == ("all", 10, 10 * layer)
    assert (window["name"], window["layers"], window["bytes_per_token"]) == ("window1024", 52, 52 * layer)
    assert (everywhere["bytes_per_token_beyond"], window["bytes_per_token_beyond"]) == (10 * layer, 0)
    # At 32,768 tokens: of ALL 2,048 full blocks and one begun, of the window 63 full, the begun one, and the one whose
    # last token is still seen.
    assert everywhere["row_bytes"]["32768"] == 10 * layer * 16 * 2049
    assert window["row_bytes"]["32768"] == 52 * layer * 16 * 65
    assert window["prefix_bytes"]["32768"] == 52 * layer * 16 * 64
    assert told["tokens_per_gib_in_every_layer"] == 2**30 // (62 * layer)
    assert told["tokens_per_gib_by_groups"]["131072"] > 5 * told["tokens_per_gib_in_every_layer"]


def test_gpt_oss_has_half_its_layers_in_a_window(published: Callable[..., dict[str, Any]]) -> None:
    told = published("gpt-oss-20b")
    layer = 2 * 8 * 64 * 2
    assert [(g["name"], g["layers"], g["bytes_per_token"]) for g in told["groups"]] == [
        ("all", 12, 12 * layer),
        ("window128", 12, 12 * layer),
    ]
    assert told["bytes_per_token"] == 24 * layer == 49_152


def test_qwen3_next_has_states_of_constant_size(published: Callable[..., dict[str, Any]]) -> None:
    told = published("qwen3-next-80b-a3b")
    everywhere, state, conv = told["groups"]
    assert (everywhere["layers"], everywhere["bytes_per_token"]) == (12, 12 * 2 * 2 * 256 * 2)
    assert (state["layers"], state["object_bytes"]) == (36, 36 * 32 * 128 * 128 * 4)  # float32, whatever KV is in
    assert (conv["layers"], conv["object_bytes"]) == (36, 36 * 3 * (2 * 16 * 128 + 32 * 128) * 2)
    assert state["row_bytes"]["4096"] == state["row_bytes"]["131072"] == 2 * state["object_bytes"]
    assert told["bytes_per_token"] == everywhere["bytes_per_token"]  # no state
    assert told["tokens_per_gib_in_every_layer"] == 2**30 // (48 * 2 * 2 * 256 * 2)


def test_llama_4_has_chunks(published: Callable[..., dict[str, Any]]) -> None:
    told = published("llama-4-scout", "--block-tokens", 64)
    everywhere, chunk = told["groups"]
    assert (everywhere["layers"], chunk["layers"], chunk["kind"], chunk["keep"]) == (12, 36, "chunk", 8192)
    assert chunk["prefix_bytes"] == {"4096": 64 * chunk["object_bytes"], "32768": 0, "131072": 0}


def test_a_model_of_one_group_is_told_as_before(invoke: Invoke) -> None:
    told = json.loads(invoke("deepseek-v3", "--json").stdout)
    assert told["bytes_per_token"] == 70_272 and "groups" not in told and "room" not in told


def test_a_trillion_parameters_in_int4_fit_one_node(invoke: Invoke) -> None:
    told = json.loads(invoke("kimi-k2", "--gpu", "h200", "--gpus", 8, "--json").stdout)
    room = {(one["weights"], one["spread"]): one for one in told["room"]}
    assert told["params"] > 1e12 and len(room) == 9
    tp, dcp, dp = (room["int4", spread] for spread in ("tp", "dcp", "dp"))
    assert dcp["tokens"] == 8 * tp["tokens"] > 0  # the latent lies at each of 8 ranks, or once
    assert dp["tokens"] == 8 * dp["longest"] and 0 < dp["longest"] < tp["tokens"]  # attention's weights lie at each
    assert tp["tokens"] == int((139 * 2**30 * 0.9 - tp["weight_bytes"]) / 70_272)
    assert {room["bf16", spread]["why_not"] for spread in ("tp", "dcp", "dp")} == {"the weights do not fit"}
    shown = rows(invoke("kimi-k2", "--gpu", "h200", "--gpus", 8))
    assert shown["8 x h200, TP8, int4 weights"].startswith(f"{tp['tokens']:,} tokens; ")
    assert f"of one request {dp['longest']:,}" in shown["8 x h200, DP8, int4 weights"]


def test_heads_that_are_fewer_than_ranks_lie_there_twice(published: Callable[..., dict[str, Any]]) -> None:
    told = published("qwen3-next-80b-a3b", "--gpu", "h100", "--gpus", 8)
    room = {(one["weights"], one["spread"]): one for one in told["room"]}
    assert 3.5 < room["bf16", "dcp"]["tokens"] / room["bf16", "tp"]["tokens"] < 4  # 2 KV heads; states are dealt out


@pytest.mark.parametrize(("args", "why"), [(["--gpu", "abacus"], "gpu='abacus'"), (["--gpus", 0], "gpus")])
def test_a_node_that_cannot_be_is_refused(invoke: Invoke, args: list[object], why: str) -> None:
    result = invoke("deepseek-v3", *args)
    assert result.exit_code and why in result.output


# ── against a block of every layer for every token ──────────────────────────────────────────────────

GIB = 1 << 30
PRESETS_OF = {"gemma3-27b": "gemma-3-27b", "gpt-oss-20b": "gpt-oss-20b", "qwen3-next-80b-a3b": "qwen3-next-80b-a3b"}


def by_hand(model: str, context: int) -> tuple[int, int]:
    """Bytes of a running request in bf16 with blocks of 64: by groups, and with every layer's keys and values."""
    blocks = context // 64 + 1  # the one begun is there
    if model == "gemma3-27b":  # 10 layers see all, 52 the last 1,024: 15 full blocks, the one begun, and one in part
        layer = 2 * 16 * 128 * 2 * 64
        return 10 * layer * blocks + 52 * layer * 17, 62 * layer * blocks
    if model == "gpt-oss-20b":  # 12 of 24 see the last 128
        layer = 2 * 8 * 64 * 2 * 64
        return 12 * layer * blocks + 12 * layer * 3, 24 * layer * blocks
    if model == "deepseek-v3":  # 576 numbers, or 128 heads of 192 + 128
        return 61 * 576 * 2 * 64 * blocks, 61 * 128 * (192 + 128) * 2 * 64 * blocks
    layer = (
        2 * 2 * 256 * 2 * 64
    )  # Qwen3-Next: 12 of 48 keep all; a state is 32 x 128 x 128 in float32, 3 inputs of 8,192
    return 12 * layer * blocks + 2 * 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2), 48 * layer * blocks


@pytest.mark.parametrize("model", ["gemma3-27b", "gpt-oss-20b", "deepseek-v3", "qwen3-next-80b-a3b"])
def test_groups_against_a_block_of_every_layer(invoke: Invoke, model: str) -> None:
    told = json.loads(invoke(model, "--compare", "--json").stdout)["compared"]
    assert [one["context"] for one in told] == [4096, 32_768, 131_072]
    for one in told:
        here, there = by_hand(model, one["context"])
        assert (one["row_bytes"], one["row_bytes_in_every_layer"]) == (here, there)
        assert one["tokens_per_gib"] == GIB * one["context"] // here
        assert one["tokens_per_gib_in_every_layer"] == GIB * one["context"] // there
    shown = rows(invoke(model, "--compare"))["tokens in a GiB, in requests of 128k"]
    assert shown.startswith(f"{told[-1]['tokens_per_gib']:,}, ")


def test_the_report_has_what_the_command_says() -> None:
    """docs/reports/memory.md is not older than the code."""
    page = (ROOT / "docs" / "reports" / "memory.md").read_text(encoding="utf-8")
    found = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")
    ]
    told = {(row[0], row[1]): row[2:5] for row in found if row[0].strip("`") in (*PRESETS_OF, "deepseek-v3")}
    for model in (*PRESETS_OF, "deepseek-v3"):
        for one in compared(shape_of(model), "bf16", 64):
            here, there = one["tokens_per_gib"], one["tokens_per_gib_in_every_layer"]
            wanted = [f"{here:,}", f"{there:,}", f"{one['row_bytes_in_every_layer'] / one['row_bytes']:.2f}"]
            assert told.pop((f"`{model}`", f"{one['context'] // 1024}k")) == wanted
    assert not told


@pytest.mark.parametrize("preset", PRESETS_OF)
def test_a_preset_keeps_what_its_published_config_says(preset: str) -> None:
    assert shape_of(preset).groups == from_config(PUBLISHED[PRESETS_OF[preset]], preset).groups

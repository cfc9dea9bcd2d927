"""`kvmesh kvsize`: what it prints, its JSON, and mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvmesh.cli.app import app
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

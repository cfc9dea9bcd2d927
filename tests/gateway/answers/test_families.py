"""Which family a checkpoint is of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvmesh.services.gateway.text.answers.families import FAMILIES, find_family
from kvmesh.services.gateway.text.answers.harmony import HarmonyParser
from kvmesh.services.gateway.text.answers.markup import MarkupParser
from tests.support.paths import ROOT

NAMES = {
    *("qwen", "hermes", "qwen3-coder", "llama3", "mistral", "deepseek-v3", "deepseek-v3.1", "deepseek-r1", "kimi-k2"),
    *("glm-4", "minimax-m2", "gpt-oss", "plain"),
}
HERMES = "For each call: <tool_call>\n{\"name\": ...}\n</tool_call> {{ '<|im_start|>' }} <tool_response>"
CODER = "<tool_call>\n<function=example>\n<parameter=a>\n"
R1 = "{% set c = c.split('</think>')[-1] %}<｜tool▁calls▁begin｜>```json"
V3 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>```json"
V31 = "<｜tool▁calls▁begin｜></think>"


def test_all_families_have_their_names() -> None:
    assert set(FAMILIES) == NAMES
    assert all(family.name == name for name, family in FAMILIES.items())


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*/tokenizer_config.json")), ids=lambda path: path.parent.name
)
def test_checkpoints_of_the_repository(path: Path) -> None:
    template = json.loads(path.read_text())["chat_template"]
    model_type = json.loads((path.parent / "config.json").read_text())["model_type"]
    expected = {"qwen3": "qwen", "deepseek_v3": "hermes", "glm4_moe": "hermes"}
    assert find_family(model_type, template).name == expected[model_type]


@pytest.mark.parametrize(
    ("model_type", "template", "name"),
    [
        ("qwen3", HERMES, "qwen"),
        ("qwen3_moe", HERMES, "qwen"),
        ("qwen3_moe", CODER, "qwen3-coder"),
        ("qwen3_next", HERMES, "qwen"),
        ("qwen3_next", CODER, "qwen3-coder"),
        ("qwen3_moe", "", "qwen"),
        ("llama", "<|python_tag|>", "llama3"),
        ("llama", "no tools", "llama3"),
        ("llama", HERMES, "hermes"),
        ("mistral", "[TOOL_CALLS]", "mistral"),
        ("mistral", HERMES, "hermes"),
        ("deepseek_v3", R1, "deepseek-r1"),
        ("deepseek_v3", V3, "deepseek-v3"),
        ("deepseek_v3", V31, "deepseek-v3.1"),
        ("qwen2", R1, "deepseek-r1"),
        ("kimi_k2", "<|tool_calls_section_begin|>", "kimi-k2"),
        ("deepseek_v3", "<|tool_calls_section_begin|>", "kimi-k2"),
        ("glm4_moe", "<tool_call>{name}\n<arg_key>", "glm-4"),
        ("minimax_m2", "{%- set begin = '<minimax:tool_call>' -%}", "minimax-m2"),
        ("gpt_oss", "<|channel|>analysis<|message|>", "gpt-oss"),
        ("gpt_oss", "", "gpt-oss"),
        ("unheard_of", HERMES, "hermes"),
        ("unheard_of", CODER, "qwen3-coder"),
        ("unheard_of", "{{ '<think>' }}", "hermes"),
        ("unheard_of", "<|im_start|>", "plain"),
        ("", "", "plain"),
    ],
)
def test_a_family_is_found(model_type: str, template: str, name: str) -> None:
    assert find_family(model_type, template).name == name


@pytest.mark.parametrize("name", sorted(NAMES - {"plain"}))
def test_markers_hold_all_that_opens_calls(name: str) -> None:
    kind = FAMILIES[name].parser_class
    if issubclass(kind, HarmonyParser):
        return
    assert issubclass(kind, MarkupParser)
    # `<function=` is text: no vocabulary has it as one token.
    assert set(kind.openers) - {"<function="} <= kind.markers
    assert set(kind.think) <= kind.markers

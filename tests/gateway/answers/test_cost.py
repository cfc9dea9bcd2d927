"""Parsers read every character a bounded number of times and keep little of it."""

from __future__ import annotations

import pytest

from kvmesh.services.gateway.text.answers.families import FAMILIES
from kvmesh.services.gateway.text.answers.harmony import HarmonyParser
from kvmesh.services.gateway.text.answers.markup import MarkupParser
from tests.gateway.answers.support import parser

SECTION = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
LONG = {
    "text": ("qwen", "", "some words < and {more} \n", ""),
    "spaces": ("qwen", "a", " \n", "b"),
    "reasoning": ("qwen", "<think>", "some words < and </ more \n", ""),
    "arguments": ("qwen", '<tool_call>{"name": "f", "arguments": {"a": "', 'x\\" <tool_call> } ', '"}}</tool_call>'),
    "depth": ("qwen", '<tool_call>{"name": "f", "arguments": {"a": ', "[{", ""),
    "openers": ("qwen", "", "<tool_call>", ""),
    "begun": ("qwen", "", '<tool_call>{"name": "a', ""),
    "keys": ("qwen", "<tool_call>{", '"x": {"y": 1}, ', '"name": "f"}'),
    "strings": ("qwen", '<tool_call>{"name": "f", "arguments": "', '{\\"a', '"}'),
    "many calls": ("qwen", "", '<tool_call>{"name": "f", "arguments": {"a": "b"}}</tool_call>\n', ""),
    "value": ("qwen3-coder", "<function=write_file><parameter=text>", 'a "b" </parameter> </para\n', ""),
    "typed value": ("qwen3-coder", "<function=write_file><parameter=lines>", '{"a": </parameter>\n', ""),
    "functions": ("qwen3-coder", "", "<function=a>", ""),
    "parameters": ("minimax-m2", '<minimax:tool_call><invoke name="f">', '<parameter name="a">1</parameter>', ""),
    "pairs": ("glm-4", "<tool_call>f", "<arg_key>a</arg_key><arg_value>1</arg_value>", ""),
    "objects": ("llama3", '{"name": "f", "parameters": {}}', '; {"name": "f", "parameters": {"a": 1}}', ""),
    "not closed": ("deepseek-v3.1", f'{SECTION}{{"a": ', "<｜tool▁call", ""),
    "sections": ("kimi-k2", "", "<|tool_calls_section_begin|>", ""),
    "list": ("mistral", "[TOOL_CALLS][", '{"name": "f", "arguments": {"a": [1]}}, ', ""),
    "messages": ("gpt-oss", "", "<|channel|>final<|message|>a<|end|><|start|>assistant", ""),
    "headers": ("gpt-oss", "", "<|channel|>", ""),
}


def work(name: str, size: int, piece: int) -> tuple[float, int]:
    """Characters scanned for each character of the text, and the most that was held."""
    family, begin, middle, end = LONG[name]
    text = begin + middle * (size // len(middle)) + end
    parsing = parser(family)
    assert isinstance(parsing, MarkupParser | HarmonyParser)
    held = told = 0
    for at in range(0, len(text), piece):
        parsed = parsing.feed(text[at : at + piece])
        told += len(parsed.content) + len(parsed.reasoning) + sum(len(call.arguments) for call in parsed.calls)
        held = max(held, parsing.reader.held)
    parsing.finish()
    return parsing.reader.scanned / len(text), held


@pytest.mark.parametrize("name", LONG)
def test_cost_grows_with_the_text_and_no_faster(name: str) -> None:
    short, _ = work(name, 2_000, 1)
    long, held = work(name, 16_000, 1)
    assert long < 40, "what is held back is looked at again for each piece"
    assert long < 1.2 * short
    if name not in ("keys", "strings"):  # there nothing is certain before the end
        assert held < 2000


@pytest.mark.parametrize("name", LONG)
def test_much_at_once(name: str) -> None:
    scanned, _ = work(name, 100_000, 100_000)
    assert scanned < 2
    scanned, _ = work(name, 50_000, 100)
    assert scanned < 3


def test_all_parsers_are_measured() -> None:
    measured = {FAMILIES[family].parser_class for family, *_ in LONG.values()}
    assert {family.parser_class for family in FAMILIES.values()} - measured == {FAMILIES["plain"].parser_class}

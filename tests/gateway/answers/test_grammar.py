"""Grammars of calls, enforced by llguidance over a tokenizer of single bytes and special tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import llguidance
import pytest

from kvmesh.errors import InvalidRequest
from kvmesh.services.gateway.text.answers.families import FAMILIES
from kvmesh.services.gateway.text.answers.tools import ToolSpec
from tests.gateway.answers.support import parse

EOS = 256
MARKERS = sorted({marker for family in FAMILIES.values() for marker in family.markers})
SPECIAL = {marker: EOS + 1 + number for number, marker in enumerate(MARKERS)}

TOOLS = (
    ToolSpec(
        "get",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"enum": ["c", "f"]},
                "at": {"$ref": "#/$defs/point"},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {
                "point": {
                    "type": "object",
                    "properties": {"x": {"type": "number"}},
                    "required": ["x"],
                    "additionalProperties": False,
                }
            },
        },
    ),
    ToolSpec("get_all", {"type": "object", "properties": {}, "additionalProperties": False}),
)
FULL = {"city": 'K "ö" <b>', "days": 3, "unit": "f", "at": {"x": 1.5}}
WITH_GRAMMAR = sorted(set(FAMILIES) - {"plain"})


class Bytes:
    """The tokenizer: a token a byte, then EOS and the markers."""

    eos_token_id = EOS
    bos_token_id = None

    def __init__(self, special: Mapping[str, int]) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"<eos>"] + [marker.encode() for marker in MARKERS]
        self.special_token_ids = [EOS, *special.values()]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def encode(text: str, special: Mapping[str, int]) -> list[int]:
    ids: list[int] = []
    while text:
        marker = next((marker for marker in special if text.startswith(marker)), "")
        ids += [special[marker]] if marker else list(text[0].encode())
        text = text[len(marker) or 1 :]
    return ids


def accepts(grammar: str, text: str, special: Mapping[str, int]) -> bool:
    """Whether an answer of exactly `text` is allowed."""
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes(special)))
    wrong = llguidance.LLMatcher.validate_grammar(grammar, tokenizer)
    assert not wrong, f"{wrong}\n{grammar}"
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    ids = encode(text, special)
    if matcher.try_consume_tokens(ids) != len(ids):
        return False
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.is_accepting())


def dumped(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def tags(begin: str, close: str) -> Any:
    def write(arguments: Mapping[str, Any]) -> str:
        return "".join(
            begin.replace("KEY", key) + (value if isinstance(value, str) else dumped(value)) + close
            for key, value in arguments.items()
        )

    return write


CODER = tags("<parameter=KEY>\n", "\n</parameter>\n")
MINIMAX = tags('<parameter name="KEY">', "</parameter>\n")
GLM = tags("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n")


def calls(family: str, *given: tuple[str, Mapping[str, Any]]) -> str:
    """The calls as a model of the family writes them."""
    if family in ("qwen", "hermes"):
        each = [f'<tool_call>\n{{"name": "{name}", "arguments": {dumped(a)}}}\n</tool_call>' for name, a in given]
        return "\n".join(each)
    if family == "qwen3-coder":
        return "\n".join(f"<tool_call>\n<function={name}>\n{CODER(a)}</function>\n</tool_call>" for name, a in given)
    if family == "glm-4":
        return "\n".join(f"<tool_call>{name}\n{GLM(a)}</tool_call>" for name, a in given)
    if family == "minimax-m2":
        each = [f'\n<invoke name="{name}">\n{MINIMAX(a)}</invoke>\n' for name, a in given]
        return f"<minimax:tool_call>{''.join(each)}</minimax:tool_call>"
    if family == "llama3":
        return "; ".join(f'{{"name": "{name}", "parameters": {dumped(a)}}}' for name, a in given)
    if family == "mistral":
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumped(a)}" for name, a in given)
    if family in ("deepseek-v3", "deepseek-r1"):
        each = [
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumped(a)}\n```<｜tool▁call▁end｜>"
            for name, a in given
        ]
        return f"<｜tool▁calls▁begin｜>{chr(10).join(each)}<｜tool▁calls▁end｜>"
    if family == "deepseek-v3.1":
        each = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumped(a)}<｜tool▁call▁end｜>" for name, a in given]
        return f"<｜tool▁calls▁begin｜>{''.join(each)}<｜tool▁calls▁end｜>"
    if family == "kimi-k2":
        each = [
            f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{dumped(a)}<|tool_call_end|>"
            for number, (name, a) in enumerate(given)
        ]
        return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"
    assert family == "gpt-oss"
    each = [f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumped(a)}" for name, a in given]
    return "<|start|>assistant".join(each)


@pytest.mark.parametrize("special", [{}, SPECIAL], ids=["text", "special"])
@pytest.mark.parametrize("family", WITH_GRAMMAR)
class TestForced:
    def grammar(self, family: str, special: Mapping[str, int], **options: Any) -> str:
        given = {"named": None, "parallel": True, "required": True} | options
        return FAMILIES[family].call_grammar(TOOLS, special=special, **given)

    def test_calls_in_the_familys_markup(self, family: str, special: Mapping[str, int]) -> None:
        grammar = self.grammar(family, special)
        least = {"city": "B", "days": 0}
        for text in (calls(family, ("get", FULL)), calls(family, ("get", least)), calls(family, ("get_all", {}))):
            assert accepts(grammar, text, special), text
        several = calls(family, ("get", least), ("get_all", {}), ("get", FULL))
        assert accepts(grammar, several, special) == (family != "gpt-oss")
        assert not accepts(self.grammar(family, special, parallel=False), several, special)

    def test_what_is_forced_is_what_the_parser_reads(self, family: str, special: Mapping[str, int]) -> None:
        text = calls(family, ("get", FULL))
        assert accepts(self.grammar(family, special), text, special)
        tail = "<|start|>assistant" if family == "gpt-oss" else "</think>"
        answer = parse(family, [text], tools=TOOLS, tail=tail)
        assert answer.content == ""
        assert [(name, json.loads(arguments)) for _, name, arguments in answer.calls] == [("get", FULL)]

    def test_nothing_else(self, family: str, special: Mapping[str, int]) -> None:
        grammar = self.grammar(family, special)
        for name, arguments in (
            ("get", {"city": "B"}),
            ("get", {"city": "B", "days": 1.5}),
            ("get", {"city": "B", "days": "many"}),
            ("get", {"city": "B", "days": 1, "unit": "k"}),
            ("get", {"city": "B", "days": 1, "at": {"y": 1}}),
            ("get", {"city": "B", "days": 1, "more": 1}),
            ("get_some", {}),
        ):
            assert not accepts(grammar, calls(family, (name, arguments)), special), arguments
        assert not accepts(grammar, "", special)
        assert not accepts(grammar, "Hello", special)
        assert not accepts(grammar, calls(family, ("get", FULL))[:-1], special)

    def test_a_named_tool(self, family: str, special: Mapping[str, int]) -> None:
        grammar = self.grammar(family, special, named="get_all")
        assert accepts(grammar, calls(family, ("get_all", {})), special)
        assert not accepts(grammar, calls(family, ("get", FULL)), special)

    def test_calls_or_text(self, family: str, special: Mapping[str, int]) -> None:
        grammar = self.grammar(family, special, required=False)
        text = "<|channel|>final<|message|>Hi {x}" if family == "gpt-oss" else "Hi {x}\n"
        assert accepts(grammar, text, special)
        before = "" if family in ("gpt-oss", "llama3") else "Hi\n"
        assert accepts(grammar, before + calls(family, ("get", FULL)), special)
        assert not accepts(grammar, before + calls(family, ("get", {"city": 1})), special)

    def test_reasoning_before(self, family: str, special: Mapping[str, int]) -> None:
        call = calls(family, ("get", FULL))
        if family == "gpt-oss":
            opened, may = "<|start|>assistant<|channel|>analysis<|message|>", "<|start|>assistant"
            begin, end = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
        else:
            begin, end = ("[THINK]", "[/THINK]") if family == "mistral" else ("<think>", "</think>")
            opened, may = begin + "\n", "assistant\n"
        grammar = self.grammar(family, special, prompt_tail=opened)
        assert accepts(grammar, f"hm {{}}\n{end}{call}", special)
        assert not accepts(grammar, call, special)
        if family != "deepseek-r1":
            grammar = self.grammar(family, special, prompt_tail=may)
            assert accepts(grammar, f"{begin}hm{end}{call}", special)
            assert accepts(grammar, call, special)
        other = FAMILIES[family].grammar_after_reasoning(
            '%json {"type": "integer"}', prompt_tail=opened, special=special
        )
        assert accepts(other, f"hm{end}17", special)
        assert not accepts(other, f"hm{end}x", special)


def test_mistral_without_names_writes_a_list() -> None:
    special = {"[TOOL_CALLS]": SPECIAL["[TOOL_CALLS]"]}
    grammar = FAMILIES["mistral"].call_grammar(TOOLS, named=None, parallel=True, required=True, special=special)
    each = ", ".join(['{"name": "get_all", "arguments": {}}'] * 2)
    assert accepts(grammar, f"[TOOL_CALLS][{each}]", special)


@pytest.mark.parametrize("family", ["qwen3-coder", "minimax-m2", "glm-4"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"type": "string", "pattern": "x"}}},
        {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "object"}]}}},
        {"properties": {}, "required": ["a"]},
        {"anyOf": []},
    ],
)
def test_a_schema_that_tags_cannot_hold_is_refused(family: str, parameters: dict[str, Any]) -> None:
    tool = ToolSpec("f", parameters)
    with pytest.raises(InvalidRequest, match=r"^tools='f': .* cannot be forced"):
        FAMILIES[family].call_grammar([tool], named=None, parallel=False, required=True)


def test_sizes_of_strings_in_tags() -> None:
    tool = ToolSpec("f", {"properties": {"a": {"type": "string", "minLength": 2, "maxLength": 3}}, "required": ["a"]})
    grammar = FAMILIES["minimax-m2"].call_grammar([tool], named=None, parallel=False, required=True)
    for text in ("a", "äb", "a\nb", "abcd"):
        assert accepts(grammar, calls("minimax-m2", ("f", {"a": text})), {}) == (2 <= len(text) <= 3)


def test_refusals() -> None:
    with pytest.raises(InvalidRequest, match="tool_choice='required': is not supported for plain models"):
        FAMILIES["plain"].call_grammar(TOOLS, named=None, parallel=True, required=True)
    with pytest.raises(InvalidRequest, match="tool_choice='x': names no tool of the request"):
        FAMILIES["qwen"].call_grammar(TOOLS, named="x", parallel=True, required=True)
    with pytest.raises(InvalidRequest, match="tools='f': its parameters are not of type"):
        FAMILIES["qwen"].call_grammar([ToolSpec("f", {"type": "array"})], named=None, parallel=True, required=True)

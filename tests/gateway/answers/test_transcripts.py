"""What parsers make of whole answers, and that it does not depend on how the text arrives."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.services.gateway.text.answers.families import FAMILIES
from kvmesh.services.gateway.text.answers.parsed import CallDelta
from tests.gateway.answers.support import Answer, add, parse, parser
from tests.gateway.answers.transcripts import TRANSCRIPTS, Transcript

EVERY = pytest.mark.parametrize("one", TRANSCRIPTS, ids=lambda one: one.name)


@EVERY
def test_an_answer_is_what_it_says(one: Transcript) -> None:
    assert parse(one.family, [one.text], **one.options) == one.expected


@EVERY
def test_a_cut_anywhere_changes_nothing(one: Transcript) -> None:
    for at in range(len(one.text) + 1):
        assert parse(one.family, [one.text[:at], one.text[at:]], **one.options) == one.expected, one.text[:at][-40:]


@EVERY
def test_single_characters_change_nothing(one: Transcript) -> None:
    assert parse(one.family, list(one.text), **one.options) == one.expected


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_random_pieces_change_nothing(data: st.DataObject) -> None:
    one = data.draw(st.sampled_from(TRANSCRIPTS))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(one.text)), max_size=40)))
    pieces = [one.text[a:b] for a, b in zip([0, *cuts], [*cuts, len(one.text)], strict=True)]
    assert parse(one.family, pieces, **one.options) == one.expected


MARKUP = sorted(
    {marker for family in FAMILIES.values() for marker in family.markers}
    | {
        *(
            '{"name": "a", "arguments": {"b": 1}}',
            '{"name": "',
            '"arguments": ',
            "{",
            "}",
            '"',
            "\\",
            "[",
            "]",
            ",",
            ":",
        ),
        *("<function=", "<parameter=", ">", "</parameter>", "</function>", '<invoke name="a">', '<parameter name="b">'),
        *(
            "</invoke>",
            "```json",
            "functions.a:0",
            " to=functions.a",
            "analysis",
            "final",
            "name",
            "\n",
            " ",
            ";",
            "x",
            "é",
        ),
    }
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), st.lists(st.sampled_from(MARKUP), max_size=30), st.data())
def test_any_text_is_parsed_the_same_in_pieces(family: str, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    options = {
        "tail": data.draw(st.sampled_from(["", "<think>", "</think>", "<|start|>assistant"])),
        "reasoning": data.draw(st.booleans()),
    }
    whole = parse(family, [text], **options)
    assert parse(family, list(text), **options) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(family, pieces, **options) == whole


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 2**32))
def test_a_damaged_answer_is_parsed_the_same_in_pieces(seed: int) -> None:
    chance = random.Random(seed)
    one = chance.choice(TRANSCRIPTS)
    text = one.text
    for _ in range(chance.randint(1, 4)):
        at = chance.randint(0, len(text))
        put = chance.choice(["", chance.choice(MARKUP), chance.choice('{}[]"\\<>, \n')])
        text = text[:at] + put + text[at + chance.choice([0, 1, 3, 20]) :]
    family = one.family if chance.random() < 0.8 else chance.choice(sorted(FAMILIES))
    whole = parse(family, [text], **one.options)
    assert parse(family, list(text), **one.options) == whole
    cuts = sorted(chance.randint(0, len(text)) for _ in range(5))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(family, pieces, **one.options) == whole


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), st.text(alphabet="<>[]{}|\"' ab\n", max_size=60))
def test_text_without_markup_is_content(family: str, text: str) -> None:
    tail = "</think>[/THINK]" if family == "mistral" else "</think>"
    assert parse(family, list(text), tail=tail) == Answer(text)


def test_a_piece_tells_what_is_certain() -> None:
    parsing = parser("qwen")
    assert parsing.feed("Hel").content == "Hel"
    assert parsing.feed("lo <to").content == "lo"
    assert parsing.feed("ast> b").content == " <toast> b"
    parsing.feed('\n<tool_call>\n{"name": "write_file", "arguments": ')
    assert parsing.feed('{"path"').calls == [CallDelta(0, "call-0", "write_file", '{"path"')]
    assert parsing.feed(': "a').calls == [CallDelta(0, arguments=': "a')]
    assert parsing.feed('"}').calls == [CallDelta(0, arguments='"}')]
    assert parsing.feed("}\n</tool_call>").calls == []


def test_a_string_of_tags_is_told_as_it_arrives() -> None:
    parsing = parser("qwen3-coder")
    told = Answer()
    add(told, parsing.feed('<tool_call>\n<function=write_file>\n<parameter=text>\nline "1"'))
    assert told.calls == [("call-0", "write_file", '{"text": "line \\"1\\"')]
    add(told, parsing.feed("\n"))
    add(told, parsing.feed("line 2"))
    assert told.calls == [("call-0", "write_file", '{"text": "line \\"1\\"\\nline 2')]


def test_reasoning_is_known_before_the_text() -> None:
    parsing = parser("qwen")
    assert not parsing.reasoning
    parsing.feed("<think>")
    assert parsing.reasoning
    parsing.feed("hm</think>")
    assert not parsing.reasoning
    assert parser("qwen", tail="<think>\n").reasoning
    assert parser("deepseek-r1").reasoning
    assert not parser("deepseek-r1", tail="</think>").reasoning
    assert not parser("qwen", tail="<think>\n", reasoning=False).reasoning
    harmony = parser("gpt-oss", tail="<|start|>assistant")
    harmony.feed("<|channel|>analysis<|message|>")
    assert harmony.reasoning
    harmony.feed("x<|end|>")
    assert not harmony.reasoning

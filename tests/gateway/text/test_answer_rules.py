"""Grammars of forms and calls, as the gateway puts them together for one model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvmesh.errors import InvalidRequest
from kvmesh.services.gateway.text.answer_rules import AnswerRules
from kvmesh.services.gateway.text.answers.families import FAMILIES, PLAIN
from kvmesh.services.gateway.text.chat import AUTO, NONE, REQUIRED, Chat, TemplateMessage, Tool
from kvmesh.services.gateway.text.grammars.asked import AskedForm
from kvmesh.services.gateway.text.grammars.compiler import byte_tokenizer, matcher

SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
FORM = AskedForm("json_schema", SCHEMA, "response_format.json_schema.schema")
LOOK = Tool("look", parameters=SCHEMA)
CALL = '<tool_call>\n{"name": "look", "arguments": {"n": 1}}\n</tool_call>'
MAY_THINK, THINKING = "<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"


def rules(*, thinks: bool = False) -> AnswerRules:
    return AnswerRules(FAMILIES["hermes"], "<tool_call> <think> </think>" if thinks else "<tool_call>", {})


def chat(*tools: Tool, **more: Any) -> Chat:
    return Chat((TemplateMessage("user", "Hi"),), tools, **more)


def takes(grammar: str, text: str) -> bool:
    """Whether `text` is a whole answer."""
    found = matcher(grammar)
    tokens = byte_tokenizer().tokenize_str(text)
    return found.validate_tokens(tokens) == len(tokens) and found.consume_tokens(tokens) and found.is_accepting()


def test_nothing_asked_is_no_grammar() -> None:
    for asked in (
        None,
        chat(),
        chat(LOOK),
        chat(LOOK, tool_choice=NONE),
        chat(Tool("a", strict=True), tool_choice=NONE),
    ):
        assert rules().grammar(None, asked, MAY_THINK) == ""


@pytest.mark.parametrize("asked", [None, chat(), chat(LOOK, tool_choice=NONE)])
def test_a_form_is_all_of_the_answer(asked: Chat | None) -> None:
    grammar = rules().grammar(FORM, asked, MAY_THINK)
    assert takes(grammar, '{"n": 1}') and not takes(grammar, '{"n": 3}')
    assert not takes(grammar, '<think>so</think>{"n": 1}') and not takes(grammar, CALL)


def test_reasoning_comes_before_the_form_where_the_template_knows_it() -> None:
    grammar = rules(thinks=True).grammar(FORM, chat(), MAY_THINK)
    assert takes(grammar, '{"n": 1}') and takes(grammar, '<think>{"n": 3}</think>\n\n{"n": 1}')
    assert not takes(grammar, "<think>so</think>\n\nso")
    opened = rules(thinks=True).grammar(FORM, chat(), THINKING)
    assert takes(opened, 'so</think>\n\n{"n": 1}') and not takes(opened, '{"n": 1}')
    assert takes(rules(thinks=True).grammar(FORM, None, ""), '{"n": 1}')  # a completion does not reason


def test_calls_are_forced_where_they_are_required() -> None:
    grammar = rules().grammar(None, chat(LOOK, Tool("other"), tool_choice=REQUIRED), MAY_THINK)
    assert takes(grammar, CALL) and takes(grammar, f"{CALL}\n{CALL}") and takes(grammar, CALL.replace("look", "other"))
    assert not takes(grammar, "Hi") and not takes(grammar, CALL.replace("1", "3"))
    named = rules().grammar(None, chat(LOOK, Tool("other"), tool_choice=REQUIRED, named="look", parallel=False), "")
    assert (
        takes(named, CALL) and not takes(named, CALL.replace("look", "other")) and not takes(named, f"{CALL}\n{CALL}")
    )


def test_strict_tools_hold_calls_to_their_schemas_and_leave_text_alone() -> None:
    grammar = rules().grammar(None, chat(Tool("look", parameters=SCHEMA, strict=True), tool_choice=AUTO), MAY_THINK)
    assert takes(grammar, "Hi") and takes(grammar, CALL) and takes(grammar, f"I look. {CALL}")
    assert not takes(grammar, CALL.replace("1", "3"))


def test_beside_tools_a_form_is_for_answers_without_a_call() -> None:
    grammar = rules(thinks=True).grammar(FORM, chat(LOOK), MAY_THINK)
    assert takes(grammar, CALL) and takes(grammar, '{"n": 2}') and takes(grammar, f"<think>so</think>{CALL}")
    assert not takes(grammar, "Hi") and not takes(grammar, '{"n": 3}')


def test_what_cannot_be_enforced_is_named() -> None:
    bad = {"type": "object", "properties": {"a": {"unevaluatedProperties": False}}}
    with pytest.raises(InvalidRequest, match=r"tools\.1\.function\.parameters#/properties/a/unevaluatedProperties"):
        rules().grammar(None, chat(LOOK, Tool("b", parameters=bad), tool_choice=REQUIRED), "")
    with pytest.raises(InvalidRequest, match="calls only"):
        rules().grammar(FORM, chat(LOOK, tool_choice=REQUIRED), "")
    with pytest.raises(InvalidRequest, match="not supported for plain models"):
        AnswerRules(PLAIN, "", {}).grammar(None, chat(LOOK, tool_choice=REQUIRED), "")


def test_the_same_is_not_made_twice() -> None:
    made = rules()
    assert made.grammar(FORM, chat(), "") is made.grammar(FORM, chat(), "")
    assert json.loads(made.grammar(FORM, chat(), ""))["grammars"]

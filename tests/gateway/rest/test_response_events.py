"""The order of a response's events, from random answers: each event is held against openai's own model of it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import openai
from hypothesis import given, settings
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseContentPartAddedEvent,
    ResponseContentPartDoneEvent,
    ResponseCreatedEvent,
    ResponseCustomToolCallInputDeltaEvent,
    ResponseCustomToolCallInputDoneEvent,
    ResponseFailedEvent,
    ResponseFunctionCallArgumentsDeltaEvent,
    ResponseFunctionCallArgumentsDoneEvent,
    ResponseIncompleteEvent,
    ResponseInProgressEvent,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
    ResponseReasoningTextDeltaEvent,
    ResponseReasoningTextDoneEvent,
    ResponseTextDeltaEvent,
    ResponseTextDoneEvent,
)

from kvmesh.errors import Overloaded, RequestCancelled
from kvmesh.services.gateway.config import GatewayLimits
from kvmesh.services.gateway.rest.frames import CompletionUsage
from kvmesh.services.gateway.rest.response_events import ResponseWriter
from kvmesh.services.gateway.rest.response_items import read_input, to_messages
from kvmesh.services.gateway.rest.response_tools import read_tools
from kvmesh.services.gateway.rest.responses import ResponseRequest
from kvmesh.services.gateway.text.answers.parsed import CallDelta
from kvmesh.services.gateway.text.chat import ToolCall
from kvmesh.services.gateway.text.completion import LENGTH, STOP, Delta, WholeAnswer

MODELS: dict[str, Any] = {
    "response.created": ResponseCreatedEvent,
    "response.in_progress": ResponseInProgressEvent,
    "response.completed": ResponseCompletedEvent,
    "response.incomplete": ResponseIncompleteEvent,
    "response.failed": ResponseFailedEvent,
    "response.output_item.added": ResponseOutputItemAddedEvent,
    "response.output_item.done": ResponseOutputItemDoneEvent,
    "response.content_part.added": ResponseContentPartAddedEvent,
    "response.content_part.done": ResponseContentPartDoneEvent,
    "response.output_text.delta": ResponseTextDeltaEvent,
    "response.output_text.done": ResponseTextDoneEvent,
    "response.reasoning_text.delta": ResponseReasoningTextDeltaEvent,
    "response.reasoning_text.done": ResponseReasoningTextDoneEvent,
    "response.function_call_arguments.delta": ResponseFunctionCallArgumentsDeltaEvent,
    "response.function_call_arguments.done": ResponseFunctionCallArgumentsDoneEvent,
    "response.custom_tool_call_input.delta": ResponseCustomToolCallInputDeltaEvent,
    "response.custom_tool_call_input.done": ResponseCustomToolCallInputDoneEvent,
}
TOOLS = [
    {"type": "function", "name": "look"},
    {"type": "custom", "name": "patch", "description": "Patches.", "format": {"type": "text"}},
    {
        "type": "namespace",
        "name": "far",
        "description": "Far away.",
        "tools": [{"type": "function", "name": "look"}, {"type": "function", "name": "go"}],
    },
]
NAMES = {"look": ("", "look"), "patch": ("", "patch"), "far.look": ("far", "look"), "go": ("far", "go")}


class Choice:
    """An answer that has come."""

    def __init__(self, finish: str) -> None:
        self.answer = SimpleNamespace(finish=finish)
        self.whole = WholeAnswer()


def body(**more: Any) -> ResponseRequest:
    return ResponseRequest.read({"model": "m", "input": "x", "tools": TOOLS, **more}, GatewayLimits())


def writer(finish: str = STOP, **more: Any) -> tuple[ResponseWriter, Choice]:
    """A writer of a request that runs nowhere."""
    asked, choice = body(**more), Choice(finish)
    usage = CompletionUsage(5, 7, 3, 2)
    request: Any = SimpleNamespace(
        request_id="r_1",
        generation=asked.generation(GatewayLimits()),
        choices=[choice],
        account=SimpleNamespace(usage=lambda choices: usage, stages=lambda choices: {}),
        tenant=SimpleNamespace(name="t"),
        core=SimpleNamespace(responses=SimpleNamespace(underway={})),
        cancel=lambda why: None,
    )
    made = asked.writer(request, timings=False)
    assert isinstance(made, ResponseWriter)
    return made, choice


def parsed(stream: bytes) -> list[Any]:
    """The events of a stream, each as openai's client has it."""
    found = []
    for frame in stream.decode().split("\n\n")[:-1]:
        first, second = frame.split("\n")
        event = json.loads(second.removeprefix("data: "))
        assert first == f"event: {event['type']}"
        found.append(MODELS[event["type"]].model_validate(event, strict=True))
    assert [event.sequence_number for event in found] == list(range(len(found)))
    return found


def check_order(events: list[Any]) -> list[Any]:
    """Returns the items, as their last events tell them. The whole grammar of a stream is here."""
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert events[0].response.output == [] and events[0].response.status == "in_progress"
    items: list[Any] = []
    at = 2
    while kinds[at] == "response.output_item.added":
        added = events[at]
        item, place = added.item, {"item_id": added.item.id, "output_index": len(items)}
        assert added.output_index == len(items) and item.status == "in_progress"
        inside = []
        at += 1
        while kinds[at] != "response.output_item.done":
            assert events[at].item_id == place["item_id"] and events[at].output_index == place["output_index"]
            inside.append(events[at])
            at += 1
        done = events[at].item
        assert (done.id, done.type, events[at].output_index) == (item.id, item.type, len(items))
        names = [event.type.removeprefix("response.") for event in inside]
        if item.type in ("message", "reasoning"):
            kind = "output_text" if item.type == "message" else "reasoning_text"
            assert names[0] == "content_part.added" and names[-2:] == [f"{kind}.done", "content_part.done"]
            assert set(names[1:-2]) <= {f"{kind}.delta"}
            text = "".join(event.delta for event in inside[1:-2])
            assert text == inside[-2].text == inside[-1].part.text == done.content[0].text
        else:
            kind = "function_call_arguments" if item.type == "function_call" else "custom_tool_call_input"
            assert names[-1] == f"{kind}.done" and set(names[:-1]) <= {f"{kind}.delta"}
            text = "".join(event.delta for event in inside[:-1])
            assert text == (done.arguments if item.type == "function_call" else done.input)
        items.append(done)
        at += 1
    assert at == len(events) - 1
    assert [item.to_dict() for item in events[-1].response.output] == [item.to_dict() for item in items]
    assert len({item.id for item in items}) == len(items)
    state: Any = ResponseStreamState(input_tools=[], text_format=openai.omit)
    for event in events:
        state.handle_event(event)
    return items


PIECES = st.text(st.sampled_from('ab "\\\n☃😀{}'), min_size=1, max_size=5)


@st.composite
def answers(draw: Any) -> list[Delta]:
    """Deltas of one answer: reasoning, text and calls in any order, cut anywhere, several in one delta."""
    parts: list[tuple[str, Any]] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["reasoning", "text", "call"]), max_size=6)):
        if kind != "call":
            parts += [(kind, piece) for piece in draw(st.lists(PIECES, min_size=1, max_size=3))]
            continue
        name = draw(st.sampled_from([*NAMES, "unknown"]))
        arguments = [draw(PIECES) for _ in range(draw(st.integers(0, 3)))]
        parts.append(("call", CallDelta(calls, f"call_{calls}", name, draw(st.sampled_from(["", "{"])))))
        parts += [("call", CallDelta(calls, arguments=one)) for one in arguments]
        calls += 1
    deltas = [Delta()]
    for kind, value in parts:
        last = deltas[-1]
        # A parser may give several of one kind, and kinds in this order, in one delta; a call's rest comes before them.
        stage = 2 if last.calls else 1 if last.text else 0
        mine = {"reasoning": 0, "text": 1, "call": 2}[kind]
        if mine < stage or draw(st.booleans()):
            last = Delta()
            deltas.append(last)
        if kind == "reasoning":
            last.reasoning += value
        elif kind == "text":
            last.text += value
        else:
            last.calls.append(value)
    return deltas


@settings(max_examples=80, deadline=None)
@given(answers(), st.sampled_from([STOP, LENGTH]), st.booleans())
def test_events_of_any_answer(deltas: list[Delta], finish: str, sealed: bool) -> None:
    include = ["reasoning.encrypted_content"] if sealed else []
    stream, _ = writer(finish, include=include)
    deltas[-1].finish = finish
    out = b"".join(stream.step(0, delta) for delta in deltas) + stream.end()
    events = parsed(out)
    items = check_order(events)
    assert events[-1].type == ("response.completed" if finish == STOP else "response.incomplete")
    response = events[-1].response
    assert response.usage.output_tokens_details.reasoning_tokens == 2
    # Nothing is lost but white space beside calls and reasoning.
    texts = "".join(delta.text for delta in deltas)
    spoken = "".join(item.content[0].text for item in items if item.type == "message")
    calls = [item for item in items if item.type.endswith("_call")]
    assert "".join(spoken.split()) == "".join(texts.split())
    assert calls or any(delta.reasoning for delta in deltas) or spoken == texts
    thought = "".join(item.content[0].text for item in items if item.type == "reasoning")
    assert thought == "".join(delta.reasoning for delta in deltas)
    assert [call.call_id for call in calls] == [f"call_{index}" for index in range(len(calls))]
    if finish == STOP:
        assert any(item.type != "reasoning" for item in items)
        assert all(item.status == "completed" for item in items)
    # The same answer, not streamed.
    whole, choice = writer(finish, include=include)
    for delta in deltas:
        choice.whole.add(delta)
    one = Response.model_validate_json(whole.whole())
    assert one.status == response.status
    whole_calls = [item for item in one.output if item.type.endswith("_call")]
    assert [
        (item.call_id, item.name, getattr(item, "arguments", None), getattr(item, "input", None))
        for item in whole_calls
    ] == [(item.call_id, item.name, getattr(item, "arguments", None), getattr(item, "input", None)) for item in calls]
    assert "".join(one.output_text.split()) == "".join(texts.split())


@settings(max_examples=50, deadline=None)
@given(answers(), st.integers(0, 30), st.booleans())
def test_an_answer_that_fails_or_is_cancelled(deltas: list[Delta], cut: int, cancelled: bool) -> None:
    stream, _ = writer()
    some = deltas[: max(1, cut)]
    out = b"".join(stream.step(0, delta) for delta in some)
    if cancelled:
        assert stream.cancel()["status"] == "cancelled"
    else:
        stream.fail(Overloaded("too much"))
    assert stream.step(0, Delta(text="late")) == b""
    events = parsed(out + stream.end())
    last = events[-1].response
    assert (events[-1].type, last.status) == (
        ("response.incomplete", "cancelled") if cancelled else ("response.failed", "failed")
    )
    assert (last.error is None) == cancelled
    assert stream.fail(RequestCancelled("again")) == stream.response


def test_a_turn_of_an_answer_is_one_message() -> None:
    """What an answer's items say, given back as the input of the next turn, is what the model had said."""
    stream, _ = writer()
    deltas = [
        Delta(reasoning="Think. "), Delta(reasoning="Look.", text="I will "), Delta(text="look."),
        Delta(calls=[CallDelta(0, "c0", "far.look", '{"what"')]),
        Delta(calls=[CallDelta(0, arguments=':"sea"}'), CallDelta(1, "c1", "patch", '{"input":"a\\nb"}')]),
        Delta(finish=STOP),
    ]  # fmt: skip
    items = check_order(parsed(b"".join(stream.step(0, delta) for delta in deltas) + stream.end()))
    assert [item.type for item in items] == ["reasoning", "message", "function_call", "custom_tool_call"]
    assert (items[2].namespace, items[2].name, items[3].input) == ("far", "look", "a\nb")
    names = read_tools(TOOLS).name_of
    outputs = [
        {"type": "function_call_output", "call_id": "c0", "output": "deep"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
    ]
    back = [item.to_dict() for item in items]
    for turn in (back + outputs, [{**item, "id": None} for item in back] + outputs):
        answer, *results = to_messages("", read_input(turn, 100), names)
        assert (answer.role, answer.reasoning, answer.content) == ("assistant", "Think. Look.", "I will look.")
        assert answer.tool_calls == (
            ToolCall("c0", "far.look", '{"what":"sea"}'),
            ToolCall("c1", "patch", '{"input":"a\\nb"}'),
        )
        assert [(one.role, one.tool_call_id, one.content) for one in results] == [
            ("tool", "c0", "deep"), ("tool", "c1", "done"),
        ]  # fmt: skip
    mixed = [*back[:3], outputs[0], back[3], outputs[1]]  # the client has run one call after the other
    assert to_messages("", read_input(mixed, 100), names)[0] == to_messages("", read_input(back, 100), names)[0]


def test_reasoning_survives_clients_that_carry_encrypted_content_alone() -> None:
    stream, _ = writer(include=["reasoning.encrypted_content"])
    out = stream.step(0, Delta(reasoning="Warum? ☃")) + stream.step(0, Delta(text="So.", finish=STOP)) + stream.end()
    reasoning, message = (item.to_dict() for item in check_order(parsed(out)))
    kept = {name: value for name, value in reasoning.items() if name != "content"}
    (turn,) = to_messages("", read_input([kept, message], 100), read_tools([]).name_of)
    assert (turn.reasoning, turn.content) == ("Warum? ☃", "So.")
    foreign = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "S"}], "encrypted_content": "gAAA"}
    (turn,) = to_messages("", read_input([foreign], 100), read_tools([]).name_of)
    assert turn.reasoning == "S"


def test_messages_in_a_row_stay_messages() -> None:
    items = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert [turn.content for turn in to_messages("", read_input(items, 9), read_tools([]).name_of)] == ["a", "b"]
    split: list[Any] = [{**item, "id": f"msg_r_{index}"} for index, item in enumerate(items)]
    assert [turn.content for turn in to_messages("", read_input(split, 9), read_tools([]).name_of)] == ["ab"]
    other = [split[0], {**split[1], "id": "msg_s_0"}]
    assert len(to_messages("", read_input(other, 9), read_tools([]).name_of)) == 2


def test_tools_as_the_model_sees_them() -> None:
    asked = body(tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "patch"}]})
    (chat,) = asked.generation(GatewayLimits()).prompts
    assert [tool.name for tool in chat.tools] == ["patch"]  # type: ignore[union-attr]
    (chat,) = body().generation(GatewayLimits()).prompts
    assert [tool.name for tool in chat.tools] == ["look", "patch", "far.look", "go"]  # type: ignore[union-attr]
    (chat,) = body(tool_choice={"type": "function", "name": "look"}).generation(GatewayLimits()).prompts
    assert (chat.tool_choice, chat.named) == ("required", "look")  # type: ignore[union-attr]

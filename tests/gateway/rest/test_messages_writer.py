"""The events of /v1/messages, from random answers: they nest, count up, and hold the whole answer."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest

from kvmesh.services.gateway.rest.frames import CompletionUsage
from kvmesh.services.gateway.rest.messages import MessageWriter
from kvmesh.services.gateway.text.answers.parsed import CallDelta
from kvmesh.services.gateway.text.completion import LENGTH, STOP, Delta, WholeAnswer

DELTAS = {"text": ("text_delta", "text"), "tool_use": ("input_json_delta", "partial_json")}
USAGE = {
    "input_tokens": 60,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 40,
    "output_tokens": 9,
    "output_tokens_details": {"thinking_tokens": 4},
}


def request(*, stop_string: str = "", count: int = 9, max_tokens: int = 50) -> Any:
    """What a writer reads of a Request."""
    choice = SimpleNamespace(
        answer=SimpleNamespace(count=count, stop_string=stop_string, finish=""), whole=WholeAnswer()
    )
    account = SimpleNamespace(usage=lambda _: CompletionUsage(100, 9, 40, 4), stages=lambda _: {"choices": []})
    generation = SimpleNamespace(model="tiny", max_tokens=max_tokens)
    return SimpleNamespace(request_id="job", generation=generation, account=account, choices=[choice])


def events(sent: bytes) -> list[dict[str, Any]]:
    """The events of a stream, whose names and types agree."""
    found = []
    for frame in sent.decode().split("\n\n")[:-1]:
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def read(sent: bytes) -> dict[str, Any]:
    """The message that a client makes of a stream. AssertionError: the stream breaks a rule."""
    found = events(sent)
    assert [one["type"] for one in found[:2]] == ["message_start", "ping"]
    assert [one["type"] for one in found[-2:]] == ["message_delta", "message_stop"]
    message, block = found[0]["message"], None
    assert message["content"] == [] and message["stop_reason"] is None and message["usage"] == USAGE
    for event in found[2:-2]:
        kind = event["type"]
        if kind == "content_block_start":
            assert block is None, "one block at a time"
            block = {**event["content_block"], "partial": "", "signed": False}
            assert event["index"] == len(message["content"])
            assert block["type"] in (*DELTAS, "thinking")
        elif kind == "content_block_delta":
            assert block is not None and event["index"] == len(message["content"])
            delta = event["delta"]
            if delta["type"] == "signature_delta":
                assert block["type"] == "thinking"
                block["signed"] = True
                continue
            expected, key = DELTAS.get(block["type"], ("thinking_delta", "thinking"))
            assert delta["type"] == expected and not block["signed"]
            block["partial"] += delta[key]
        else:
            assert kind == "content_block_stop" and block is not None
            assert event["index"] == len(message["content"])
            partial = block.pop("partial")
            assert block.pop("signed") == (block["type"] == "thinking")
            if block["type"] == "tool_use":
                block["input"] = json.loads(partial)
            else:
                block[block["type"]] = partial
            message["content"].append(block)
            block = None
    assert block is None, "every block is closed"
    assert found[-2]["usage"] == USAGE
    return {**message, **found[-2]["delta"]}


def answer(rng: random.Random) -> list[tuple[str, Any]]:
    """Parts of an answer, in the order of its text: reasoning, then text and calls."""
    parts: list[tuple[str, Any]] = [("reasoning", "hm" * rng.randint(1, 4))] if rng.random() < 0.5 else []
    call = 0
    for _ in range(rng.randint(0, 5)):
        if rng.random() < 0.5:
            text = rng.choice(["Hi", "\n\n", " ", "\n\nso", "b\n", "🦊"])
            if parts and parts[-1][0] == "text":
                text = parts.pop()[1] + text
            parts.append(("text", text))
        else:
            parts.append(("call", (call, json.dumps({"n": call, "s": "x" * rng.randint(0, 9)}))))
            call += 1
    return parts


def deltas(parts: list[tuple[str, Any]], rng: random.Random, finish: str) -> list[Delta]:
    """The answer in random pieces. A step holds what several tokens gave, so it may span parts as long as its fields
    keep their order."""
    pieces: list[tuple[str, Any]] = []
    for kind, value in parts:
        text = value[1] if kind == "call" else value
        cuts = sorted(rng.sample(range(1, len(text)), min(len(text) - 1, rng.randint(0, 3)))) if len(text) > 1 else []
        for number, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(text)], strict=True)):
            piece: Any = text[start:end]
            if kind == "call":
                first = number == 0
                piece = CallDelta(value[0], f"call_{value[0]}" if first else "", "f" if first else "", piece)
            pieces.append((kind, piece))
    steps, now = [], Delta()
    for kind, piece in pieces:
        # Of one step a client sees reasoning before text before new calls: text that follows a call begun in it waits.
        late = kind != "call" and any(call.name for call in now.calls)
        if rng.random() < 0.5 or late or (kind == "reasoning" and now.text):
            steps.append(now)
            now = Delta()
        if kind == "call":
            now.calls.append(piece)
        elif kind == "text":
            now.text += piece
        else:
            now.reasoning += piece
    now.finish = finish
    return [*(step for step in steps if step.shows), now]


def joined(parts: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that the answer must come to."""
    blocks: list[dict[str, Any]] = []
    for kind, value in parts:
        if kind == "reasoning":
            blocks.append({"type": "thinking", "thinking": value, "signature": ""})
        elif kind == "call":
            blocks.append({"type": "tool_use", "id": f"call_{value[0]}", "name": "f", "input": json.loads(value[1])})
        elif value.strip() or len(parts) == 1:
            blocks.append({"type": "text", "text": value})
    return blocks


@pytest.mark.parametrize("seed", range(400))
def test_random_answers(seed: int) -> None:
    rng = random.Random(seed)
    parts = answer(rng)
    finish = rng.choice([STOP, LENGTH])
    asked = request()
    writer = MessageWriter(asked, timings=False)
    steps = deltas(parts, rng, finish)
    message = read(b"".join(writer.step(0, step) for step in steps) + writer.end())
    assert message["content"] == joined(parts)
    called = any(kind == "call" for kind, _ in parts)
    reasons = {STOP: "tool_use" if called else "end_turn", LENGTH: "model_context_window_exceeded"}
    assert (message["stop_reason"], message["stop_sequence"]) == (reasons[finish], None)

    choice = asked.choices[0]
    choice.answer.finish = finish
    for step in steps:
        choice.whole.add(step)
    whole = json.loads(MessageWriter(asked, timings=False).whole())
    assert whole["stop_reason"] == message["stop_reason"] and whole["usage"] == USAGE
    assert [one for one in whole["content"] if one["type"] != "text"] == [
        one for one in message["content"] if one["type"] != "text"
    ]


def test_an_answer_in_one_piece() -> None:
    writer = MessageWriter(request(count=50), timings=True)
    call = CallDelta(0, "call_0", "look", '{"a": 1}')
    sent = writer.step(0, Delta("So", finish=LENGTH, reasoning="hm", calls=[call])) + writer.end()
    message = read(sent)
    assert [one["type"] for one in message["content"]] == ["thinking", "text", "tool_use"]
    assert message["stop_reason"] == "max_tokens"
    assert events(sent)[-2]["kvmesh"] == {"choices": []}


def test_which_stop_cut_the_answer() -> None:
    for called in (False, True):
        writer = MessageWriter(request(stop_string="END"), timings=False)
        calls = [CallDelta(0, "call_0", "look", "{}")] if called else []
        message = read(writer.step(0, Delta("Hi", finish=STOP, calls=calls)) + writer.end())
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")


def test_thinking_that_is_not_wanted_leaves_its_block() -> None:
    asked = request()
    writer = MessageWriter(asked, timings=False, thinking=False)
    steps = [Delta(reasoning="secret"), Delta(reasoning="more"), Delta("Hi", finish=STOP)]
    message = read(b"".join(writer.step(0, step) for step in steps) + writer.end())
    assert message["content"] == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": "Hi"},
    ]
    for step in steps:
        asked.choices[0].whole.add(step)
    whole = json.loads(MessageWriter(asked, timings=False, thinking=False).whole())
    assert whole["content"] == message["content"]


def test_the_end_of_a_call_comes_before_the_text_behind_it() -> None:
    writer = MessageWriter(request(), timings=False)
    steps = [
        Delta(calls=[CallDelta(0, "call_0", "look", '{"a"')]),
        Delta("then", calls=[CallDelta(0, arguments=":1}"), CallDelta(1, "call_1", "look", "{}")]),
        Delta(finish=STOP),
    ]
    message = read(b"".join(writer.step(0, step) for step in steps) + writer.end())
    assert [one.get("input", one.get("text")) for one in message["content"]] == [{"a": 1}, "then", {}]


def test_a_call_that_was_cut() -> None:
    asked = request()
    asked.choices[0].whole.add(Delta(calls=[CallDelta(0, "call_0", "look", '{"a": ')], finish=LENGTH))
    whole = json.loads(MessageWriter(asked, timings=False).whole())
    assert whole["content"] == [{"type": "tool_use", "id": "call_0", "name": "look", "input": {}}]

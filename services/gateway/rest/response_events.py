"""Answers of the Responses API: a response object, and the events of one that is streamed.

A stream is `response.created`, `response.in_progress`, then for each item of the output, one after the other, that it
was added, what it gained, and that it is done, and at last `response.completed`, `.incomplete` or `.failed`. Events are
numbered from 0. Text is the usual event, so that its bytes are put together from a prepared part.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from kvmesh.errors import KvmeshError, RequestCancelled
from kvmesh.services.gateway.requests import Request
from kvmesh.services.gateway.rest.frames import CompletionUsage, Piece
from kvmesh.services.gateway.rest.response_items import custom_input, item_id, seal_reasoning
from kvmesh.services.gateway.rest.response_tools import ToolSet
from kvmesh.services.gateway.text.answers.parsed import CallDelta
from kvmesh.services.gateway.text.completion import LENGTH, Delta, TokenLogprob, WholeAnswer
from kvmesh.services.gateway.text.prompt_logprobs import number

Json = dict[str, Any]

IN_PROGRESS, COMPLETED, INCOMPLETE, FAILED, CANCELLED = "in_progress", "completed", "incomplete", "failed", "cancelled"
# OpenAI's events know no cancelled response.
_LAST_EVENT = {
    COMPLETED: "response.completed",
    INCOMPLETE: "response.incomplete",
    CANCELLED: "response.incomplete",
    FAILED: "response.failed",
}


def usage_json(usage: CompletionUsage) -> Json:
    """Returns the usage object of a response."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def error_of(err: KvmeshError) -> Json:
    """Returns the error object of a response that failed; OpenAI's set of codes is closed."""
    if err.http_status == 429:
        code = "rate_limit_exceeded"
    else:
        code = "invalid_prompt" if err.http_status < 500 else "server_error"
    return {"code": code, "message": f"{err.code}: {err.message}"}


class OutputItems:
    """The output of one answer as it grows, item by item; each call returns the events of what changed, without their
    sequence numbers. `sealed`: reasoning is told as encrypted_content, too."""

    def __init__(self, request_id: str, tools: ToolSet, *, sealed: bool) -> None:
        self.items: list[Json] = []
        self._request_id = request_id
        self._tools = tools
        self._sealed = sealed
        self._open: Json | None = None
        self._texts: list[str] = []  # what the open item has gained
        self._logprobs: list[Json] = []
        self._call = -1  # index of the open call
        self._held = Delta()  # white space that may only stand between calls

    # ── what the answer gained ────────────────────────────────────────────────────────────────────

    def add(self, delta: Delta, logprobs: list[Json]) -> list[Json]:
        """Takes a delta; `logprobs` are those of its text."""
        events: list[Json] = []
        rest = [call for call in delta.calls if not self._continues(call)]
        for call in delta.calls:
            if self._continues(call):
                events += self._argue(call.arguments)
        if delta.reasoning:
            if not self._is_open("reasoning"):
                events += self._begin("reasoning", {"summary": [], "content": []})
            events += self._gain("response.reasoning_text.delta", delta.reasoning, content_index=0)
        if delta.text:
            events += self._speak(delta.text, logprobs)
        for call in rest:
            events += self._call_piece(call)
        return events

    def _continues(self, call: CallDelta) -> bool:
        return self._open is not None and call.index == self._call

    def _speak(self, text: str, logprobs: list[Json]) -> list[Json]:
        if not self._is_open("message"):
            text = self._held.text + text
            self._logprobs += logprobs
            if text.isspace():
                self._held.text = text
                return []
            logprobs, self._logprobs = self._logprobs, []
            self._held.text = ""
            events = self._begin("message", {"role": "assistant", "content": []})
        else:
            events = []
        self._logprobs += logprobs
        return events + self._gain("response.output_text.delta", text, content_index=0, logprobs=logprobs)

    def _call_piece(self, call: CallDelta) -> list[Json]:
        if self._continues(call):
            return self._argue(call.arguments)
        if not self._is_open("message"):
            self._held.text, self._logprobs = "", []
        tool = self._tools.client_tool(call.name)
        more: Json = {"call_id": call.id, "name": tool.name}
        if tool.namespace:
            more["namespace"] = tool.namespace
        more["input" if tool.custom else "arguments"] = ""
        events = self._begin("custom_tool_call" if tool.custom else "function_call", more)
        self._call = call.index
        return events + self._argue(call.arguments)

    def _argue(self, arguments: str) -> list[Json]:
        if not arguments:
            return []
        if self._is_open("custom_tool_call"):  # its input is known when the arguments are whole
            self._texts.append(arguments)
            return []
        return self._gain("response.function_call_arguments.delta", arguments)

    # ── items ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def speaks(self) -> bool:
        """Whether there is anything but reasoning."""
        return any(item["type"] != "reasoning" for item in self.items)

    def close(self, status: str) -> list[Json]:
        """The answer has ended. An answer without text and calls has an empty message, unless it was cut."""
        events: list[Json] = []
        if not self.speaks and (self._held.text or status == COMPLETED):
            text, self._held.text = self._held.text, ""
            logprobs, self._logprobs = self._logprobs, []
            events += self._begin("message", {"role": "assistant", "content": []})
            self._logprobs = logprobs
            if text:
                events += self._gain("response.output_text.delta", text, content_index=0, logprobs=logprobs)
        return events + self._end(status)

    def so_far(self) -> list[Json]:
        """Returns the items as they are now."""
        if self._open is None:
            return [*self.items]
        return [*self.items[:-1], self._filled(self._open, IN_PROGRESS, "".join(self._texts))]

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open["type"] == kind

    def _where(self) -> Json:
        assert self._open is not None, "an item is open"
        return {"item_id": self._open["id"], "output_index": len(self.items) - 1}

    def _begin(self, kind: str, fields: Json) -> list[Json]:
        events = self._end(COMPLETED)
        made = item_id(kind, self._request_id, len(self.items))
        self._open = {"id": made, "type": kind, "status": IN_PROGRESS, **fields}
        self._texts, self._call = [], -1
        self.items.append(self._open)
        events.append(
            {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(self._open)}
        )
        if kind in ("reasoning", "message"):
            part = _part(kind, "", [])
            events.append({"type": "response.content_part.added", **self._where(), "content_index": 0, "part": part})
        return events

    def _gain(self, event: str, text: str, **more: Any) -> list[Json]:
        self._texts.append(text)
        return [{"type": event, **self._where(), **more, "delta": text}]

    def _end(self, status: str) -> list[Json]:
        """Closes the open item, if there is one."""
        if self._open is None:
            return []
        where, text, kind = self._where(), "".join(self._texts), self._open["type"]
        item = self.items[-1] = self._filled(self._open, status, text)
        if kind in ("reasoning", "message"):
            at = {**where, "content_index": 0}
            part = item["content"][0]
            told: Json = {"type": "response.reasoning_text.done", **at, "text": text}
            if kind == "message":
                told = {"type": "response.output_text.done", **at, "text": text, "logprobs": part["logprobs"]}
            events = [told, {"type": "response.content_part.done", **at, "part": part}]
        elif kind == "function_call":
            events = [{"type": "response.function_call_arguments.done", **where, "arguments": text}]
        else:
            events = [
                {"type": "response.custom_tool_call_input.delta", **where, "delta": item["input"]},
                {"type": "response.custom_tool_call_input.done", **where, "input": item["input"]},
            ]
        self._open, self._call, self._logprobs = None, -1, []
        done = {"type": "response.output_item.done", "output_index": where["output_index"], "item": item}
        return [*events, done]

    def _filled(self, item: Json, status: str, text: str) -> Json:
        found = {**item, "status": status}
        if item["type"] in ("reasoning", "message"):
            found["content"] = [_part(item["type"], text, self._logprobs)]
            if self._sealed and item["type"] == "reasoning":
                found["encrypted_content"] = seal_reasoning(text)
        elif item["type"] == "function_call":
            found["arguments"] = text
        else:
            found["input"] = custom_input(text)
        return found


def _part(kind: str, text: str, logprobs: list[Json]) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "annotations": [], "logprobs": logprobs, "text": text}


class ResponseWriter:
    """Writes one response (AnswerWriter). `head` are the fields that the request alone tells; `sealed` as OutputItems
    has it; `response` is the response once it has ended."""

    def __init__(
        self, request: Request, head: Mapping[str, Any], tools: ToolSet, *, sealed: bool, timings: bool
    ) -> None:
        self.request = request
        self.response: Json | None = None
        self.begun = False
        self._timings = timings
        self._head = {
            "id": f"resp_{request.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": IN_PROGRESS,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            **head,
            "output": [],
            "usage": None,
        }
        self._output = OutputItems(request.request_id, tools, sealed=sealed)
        self._finish = ""
        self._sequence = 0
        self._text_item = ""
        self._text_open = b""

    @property
    def response_id(self) -> str:
        return str(self._head["id"])

    # ── AnswerWriter ──────────────────────────────────────────────────────────────────────────────

    def step(self, index: int, delta: Delta) -> bytes:
        """See AnswerWriter."""
        if self.response is not None:  # cancelled, while these tokens were on their way
            return b""
        events: list[Json] = []
        if not self.begun:
            self.begun = True
            events = [{"type": f"response.{name}", "response": self._head} for name in ("created", IN_PROGRESS)]
        logprobs = self._told_logprobs(delta.logprobs) if delta.text and self._wants_logprobs else []
        events += self._output.add(delta, logprobs)
        if delta.finish:
            self._finish = delta.finish
            events += self._output.close(self._status)
        return b"".join(map(self._frame, events))

    def end(self) -> bytes:
        """See AnswerWriter."""
        response = self.response or self._ended(self._status)
        return self._frame({"type": _LAST_EVENT[response["status"]], "response": response})

    def whole(self) -> bytes:
        """See AnswerWriter."""
        if self.response is None:
            choice = self.request.choices[0]
            self._finish = choice.answer.finish
            self._take(choice.whole)
            self._ended(self._status)
        return orjson.dumps(self.response)

    # ── other ends ────────────────────────────────────────────────────────────────────────────────

    def fail(self, err: KvmeshError) -> Json:
        """Ends the response with what has come of it: as cancelled, or as failed. Returns it."""
        if self.response is not None:
            return self.response
        if not self.begun and self.request.choices:
            self._take(self.request.choices[0].whole)
        self._output.close(INCOMPLETE)
        cancelled = isinstance(err, RequestCancelled)
        return self._ended(CANCELLED if cancelled else FAILED, None if cancelled else error_of(err))

    def cancel(self) -> Json:
        """Ends the request, and the response with what has come of it. Returns it."""
        self.request.cancel("the client cancelled the response")
        return self.fail(RequestCancelled("cancelled"))

    def so_far(self) -> Json:
        """Returns the response as it is now."""
        return self.response or {**self._head, "output": self._output.so_far()}

    # ── parts ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def _status(self) -> str:
        return INCOMPLETE if self._finish == LENGTH else COMPLETED

    @property
    def _wants_logprobs(self) -> bool:
        return self.request.generation.logprobs >= 0

    def _take(self, whole: WholeAnswer) -> None:
        """An answer that was not streamed: its reasoning, its text, its calls."""
        calls = whole.calls
        logprobs: list[Json] = []
        if self._wants_logprobs and not calls:
            logprobs = self._told_logprobs(_last_entries(whole.entries, len(whole.text), self.request.piece))
        self._output.add(Delta(text=whole.text, reasoning=whole.reasoning), logprobs)
        for call in calls:
            self._output.add(Delta(calls=[call]), [])
        if self._finish:
            self._output.close(self._status)

    def _ended(self, status: str, error: Json | None = None) -> Json:
        account, choices = self.request.account, self.request.choices
        response = self._head | {
            "status": status,
            "completed_at": int(time.time()) if status == COMPLETED else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == INCOMPLETE else None,
            "error": error,
            "output": self._output.items,
            "usage": usage_json(account.usage(choices)) if choices else None,
        }
        if self._timings:
            response["kvmesh"] = account.stages(choices)
        self.response = response
        return response

    def _frame(self, event: Json) -> bytes:
        sequence, self._sequence = self._sequence, self._sequence + 1
        kind = event["type"]
        if kind == "response.output_text.delta" and not event["logprobs"]:
            if event["item_id"] != self._text_item:
                self._text_item = event["item_id"]
                fixed = {name: value for name, value in event.items() if name != "delta"}
                self._text_open = b"event: response.output_text.delta\ndata: " + orjson.dumps(fixed)[:-1]
            return self._text_open + b',"sequence_number":%d,"delta":%b}\n\n' % (sequence, orjson.dumps(event["delta"]))
        told = orjson.dumps({**event, "sequence_number": sequence})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), told)

    def _told_logprobs(self, entries: Sequence[TokenLogprob]) -> list[Json]:
        piece = self.request.piece

        def one(token_id: int, logprob: float) -> Json:
            token, raw = piece(token_id)
            return {"token": token, "logprob": number(logprob), "bytes": raw}

        return [
            one(e.token_id, e.logprob) | {"top_logprobs": [one(token, logprob) for token, logprob in e.top]}
            for e in entries
        ]


def _last_entries(entries: Sequence[TokenLogprob], characters: int, piece: Piece) -> Sequence[TokenLogprob]:
    """The entries of an answer's last tokens, whose text has so many characters: those before are its reasoning's."""
    first = len(entries)
    while first and characters > 0:
        first -= 1
        characters -= len(piece(entries[first].token_id)[0])
    return entries[first:]

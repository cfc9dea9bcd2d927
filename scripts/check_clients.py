"""Unmodified clients against a live mesh with the demo model: which calls of theirs are answered, a line each.

    make up                                                         # in another terminal
    python -m venv /tmp/clients
    /tmp/clients/bin/pip install openai anthropic langchain-openai litellm
    /tmp/clients/bin/python scripts/check_clients.py                # --url for another gateway

Needs nothing of kvmesh, so that the clients' own environment runs it. A client that is not installed is told so and
passed over; the exit status is 1 if a call failed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, Literal

import openai
import pydantic

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

QUESTION = "What is the code of Mira?"
TOLD = "The code of Mira is 4821."
SCHEMA = {
    "type": "object",
    "properties": {"about": {"type": "string", "pattern": "^The code of (Mira|Oskar)$"}},
    "required": ["about"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look_up", "description": "Facts", "parameters": SCHEMA, "strict": True},
}
FLAT_TOOL = {"type": "function", **TOOL["function"]}


class Colour(pydantic.BaseModel):
    """What structured answers are parsed into."""

    colour: Literal["red", "green"]
    n: Literal[1, 2]


class Clients:
    """The calls. Each returns what shows that it worked; `url` is that of /v1."""

    def __init__(self, url: str) -> None:
        self.url, self.root = url, url.removesuffix("/v1")
        self.openai = openai.OpenAI(base_url=url, api_key="none")
        self.model = self.openai.models.list().data[0].id

    def openai_chat(self) -> Any:
        said = self.openai.chat.completions.create(
            model=self.model, messages=[{"role": "user", "content": f"{TOLD} {QUESTION}"}], temperature=0
        )
        return said.choices[0].message.content

    def openai_structured_output(self) -> Any:
        said = self.openai.chat.completions.parse(
            model=self.model, messages=[{"role": "user", "content": "Hi"}], response_format=Colour, max_tokens=60
        )
        return said.choices[0].message.parsed

    def openai_streamed_tools(self) -> Any:
        asked: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "temperature": 0}
        with self.openai.chat.completions.stream(
            model=self.model, messages=[{"role": "user", "content": QUESTION}], **asked
        ) as stream:
            for _ in stream:
                pass
            choice = stream.get_final_completion().choices[0]
        return choice.finish_reason, [call.function.arguments for call in choice.message.tool_calls or []]

    def openai_responses(self) -> Any:
        create = self.openai.responses.create
        first = create(model=self.model, input=f"{TOLD} {QUESTION}", temperature=0)
        asked = "Which code does Mira have?"
        second = create(model=self.model, input=asked, previous_response_id=first.id, temperature=0)
        return first.output_text, second.output_text

    def openai_responses_tools(self) -> Any:
        tools: Any = [FLAT_TOOL]
        with self.openai.responses.stream(
            model=self.model, input=QUESTION, tools=tools, tool_choice="required", temperature=0
        ) as stream:
            events = sum(1 for _ in stream)
            first = stream.get_final_response()
        call: Any = first.output[-1]
        result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": TOLD}]
        second = self.openai.responses.create(
            model=self.model, previous_response_id=first.id, input=result, tools=tools, temperature=0
        )
        return events, call.arguments, second.output_text

    def openai_responses_structured(self) -> Any:
        said = self.openai.responses.parse(model=self.model, input="Hi", text_format=Colour, max_output_tokens=60)
        return said.output_parsed

    def anthropic_tools(self) -> Any:
        import anthropic

        client: Any = anthropic.Anthropic(base_url=self.root, api_key="none")
        asked = {"role": "user", "content": QUESTION}
        tools = [{"name": "look_up", "description": "Facts", "input_schema": SCHEMA}]
        more: dict[str, Any] = {"model": self.model, "max_tokens": 60, "tools": tools, "extra_body": {"temperature": 0}}
        said = client.messages.create(messages=[asked], tool_choice={"type": "any"}, **more)
        [call] = [block for block in said.content if block.type == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": TOLD}
        turns = [
            asked,
            {"role": "assistant", "content": [block.model_dump() for block in said.content]},
            {"role": "user", "content": [result]},
        ]
        with client.messages.stream(messages=turns, **more) as stream:
            last = stream.get_final_message()
        counted = client.messages.count_tokens(model=self.model, messages=[asked])
        return said.stop_reason, call.input, last.content[0].text, last.stop_reason, counted.input_tokens

    def langchain_tools(self) -> Any:
        from langchain_core.messages import HumanMessage, ToolMessage
        from langchain_openai import ChatOpenAI

        made: Any = ChatOpenAI
        model = made(model=self.model, base_url=self.url, api_key="none", temperature=0, max_tokens=80)
        turns: list[Any] = [HumanMessage(QUESTION)]
        called = model.bind_tools([TOOL], tool_choice="required").invoke(turns)
        turns += [called, ToolMessage(TOLD, tool_call_id=called.tool_calls[0]["id"])]
        said = model.bind_tools([TOOL]).invoke(turns)
        form = model.with_structured_output(Colour, method="json_schema").invoke("Hi")
        return called.tool_calls[0]["args"], said.content, form

    def litellm_tools(self) -> Any:
        import litellm

        ask: Callable[..., Any] = litellm.completion
        more = {"model": f"openai/{self.model}", "api_base": self.url, "api_key": "none", "temperature": 0}
        asked = {"role": "user", "content": QUESTION}
        called = ask(messages=[asked], tools=[TOOL], tool_choice="required", **more).choices[0].message
        call = called.tool_calls[0]
        result = {"role": "tool", "tool_call_id": call.id, "content": TOLD}
        said = ask(messages=[asked, called.model_dump(), result], tools=[TOOL], **more)
        return call.function.arguments, said.choices[0].message.content

    def litellm_as_anthropic(self) -> Any:
        import litellm

        ask: Callable[..., Any] = litellm.completion
        asked = [{"role": "user", "content": f"{TOLD} {QUESTION}"}]
        more = {"model": f"anthropic/{self.model}", "api_base": self.root, "api_key": "none", "max_tokens": 40}
        return ask(messages=asked, temperature=0, **more).choices[0].message.content


def main() -> int:
    """Makes every call; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="of the gateway")
    clients = Clients(parser.parse_args().url)
    failed = 0
    for name in [name for name, made in vars(Clients).items() if callable(made) and not name.startswith("_")]:
        try:
            print(f"ok      {name:28} {getattr(clients, name)()!r:.150}", flush=True)
        except ModuleNotFoundError as err:
            print(f"absent  {name:28} pip install {(err.name or '').partition('.')[0].replace('_', '-')}")
        except Exception as err:  # any client has errors of its own
            failed += 1
            print(f"failed  {name:28} {type(err).__name__}: {str(err)[:200]}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

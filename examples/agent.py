"""An agent with one tool, as OpenAI's client sees it: it asks, runs the calls that the model makes, and asks again.

    make up                                   # in another terminal
    pip install openai
    python examples/agent.py                  # --url and --model for another mesh

The demo model only knows what stands in its context, so it has to call the tool. It was not trained to decide when:
the first turn says `tool_choice="required"`, and the mesh holds the call to the tool's schema.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import openai

FACTS = {"Mira": "4821", "Oskar": "1175", "Nina": "9034"}


def look_up(about: str) -> str:
    """Returns what is known; others are told too, as a search would."""
    name = about.removeprefix("The code of ")
    return f"The code of {name} is {FACTS[name]}. The code of Pavel is 1111."


TOOLS: dict[str, Callable[..., str]] = {"look_up": look_up}
TOLD: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Facts about a person.",
            "parameters": {
                "type": "object",
                "properties": {"about": {"type": "string", "pattern": f"^The code of ({'|'.join(FACTS)})$"}},
                "required": ["about"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
]


def answer(client: openai.OpenAI, model: str, question: str) -> str:
    """Returns the model's answer, after at most four rounds of calls."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for turn in range(4):
        said = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOLD,
            tool_choice="auto" if turn else "required",
            temperature=0,
            max_tokens=100,
        )
        message = said.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = TOOLS[call.function.name](**json.loads(call.function.arguments))
            print(f"  {call.function.name}({call.function.arguments}) → {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return "(no answer after four rounds of calls)"


def main() -> None:
    """Asks for each of the facts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="of the gateway")
    parser.add_argument("--model", default="", help="default: the first one served")
    parser.add_argument("--key", default="none", help="API key, where the gateway asks for one")
    given = parser.parse_args()
    client = openai.OpenAI(base_url=given.url, api_key=given.key)
    model = given.model or client.models.list().data[0].id
    for name in FACTS:
        question = f"What is the code of {name}?"
        print(question)
        print(f"  {answer(client, model, question)}")


if __name__ == "__main__":
    main()

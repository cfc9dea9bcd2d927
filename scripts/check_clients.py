"""Unmodified clients against a live mesh with the demo model: which calls of theirs are answered, a line each.

    make up                                                         # in another terminal
    python -m venv /tmp/clients
    /tmp/clients/bin/pip install openai anthropic langchain-openai litellm
    /tmp/clients/bin/python scripts/check_clients.py                # --url for another gateway
    /tmp/clients/bin/python scripts/check_clients.py --load --vllm /opt/vllm/bin/vllm

`--load` runs the field's load generators in place of the clients: aiperf with a trace of Mooncake's form, guidellm and
`vllm bench serve`, each where it is found (docs/howto/measure-with-load-generators.md).

Needs nothing of kvmesh, so that the clients' own environment runs it. A client that is not installed is told so and
passed over; the exit status is 1 if a call failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
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


class ToolAbsent(Exception):
    """A load generator is not on this machine."""


class LoadGenerators:
    """The runs, each of `REQUESTS` requests. A run returns its figures, and raises ToolAbsent if the tool is not
    installed. `folder` is for what the tools write."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.url, self.root, self.folder = args.url, args.url.removesuffix("/v1"), folder
        model = openai.OpenAI(base_url=args.url, api_key="none").models.list().data[0]
        self.model, self.context = model.id, int(getattr(model, "max_context_tokens", 2048))
        self.tokenizer, self.trace = args.tokenizer.resolve(), args.trace
        self.tools = {name: getattr(args, name) for name in ("aiperf", "guidellm", "vllm")}

    def aiperf(self) -> Any:
        # aiperf's workers load a tokenizer by its name in the hub's cache only: a folder's path fails in them
        home = self.folder / "huggingface"
        cached = home / "hub" / "models--local--tokenizer"
        for part in ("refs", "snapshots"):
            (cached / part).mkdir(parents=True)
        (cached / "refs" / "main").write_text("local")
        (cached / "snapshots" / "local").symlink_to(self.tokenizer)
        trace, made = self.folder / "trace.jsonl", self.folder / "aiperf"
        self._cut_trace(trace)
        words = ["profile", "--model", self.model, "--url", self.root, "--endpoint-type", "chat", "--streaming"]
        words += ["--tokenizer", "local/tokenizer", "--input-file", str(trace), "--extra-inputs", "ignore_eos:true"]
        words += ["--custom-dataset-type", "mooncake_trace", "--fixed-schedule", "--use-server-token-count"]
        self._run("aiperf", [*words, "--ui", "none", "--artifact-dir", str(made)], HF_HOME=str(home))
        said = json.loads((made / "profile_export_aiperf.json").read_text())
        self._check(said["request_count"]["avg"], said["error_summary"])
        told = (said["time_to_first_token"]["p50"], said["inter_token_latency"]["p50"])
        return _figures(*told, said["output_token_throughput"]["avg"])

    def guidellm_chat(self) -> Any:
        return self._guidellm("/v1/chat/completions")

    def guidellm_completions(self) -> Any:
        return self._guidellm("/v1/completions")

    def guidellm_responses(self) -> Any:
        return self._guidellm("/v1/responses")

    def vllm_chat(self) -> Any:
        return self._vllm("openai-chat", "/v1/chat/completions")

    def vllm_completions(self) -> Any:
        return self._vllm("openai", "/v1/completions")

    def _guidellm(self, path: str) -> Any:
        made = self.folder / "guidellm.json"
        words = ["run", "--backend", f"kind=openai_http,target={self.root},model={self.model},request_format={path}"]
        words += ["--tokenizer", f"kind=hf_auto,model={self.tokenizer}", "--profile", "kind=concurrent,streams=4"]
        words += ["--constraint", f"kind=max_requests,count={REQUESTS}", "--output", f"kind=json,path={made}"]
        words += ["--data", "kind=synthetic_text,prompt_tokens=128,output_tokens=32", "--disable-console"]
        self._run("guidellm", words)
        said = json.loads(made.read_text())["benchmarks"][0]["metrics"]
        self._check(said["request_totals"]["successful"], said["request_totals"]["errored"])
        names = ("time_to_first_token_ms", "inter_token_latency_ms", "output_tokens_per_second")
        told = [said[name]["successful"] for name in names]
        return _figures(told[0]["median"], told[1]["median"], told[2]["mean"])

    def _vllm(self, backend: str, path: str) -> Any:
        words = ["bench", "serve", "--backend", backend, "--endpoint", path, "--base-url", self.root]
        words += ["--model", self.model, "--tokenizer", str(self.tokenizer), "--num-prompts", str(REQUESTS)]
        words += ["--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "16", "--ignore-eos"]
        words += ["--save-result", "--result-dir", str(self.folder), "--result-filename", "vllm.json"]
        self._run("vllm", words)
        said = json.loads((self.folder / "vllm.json").read_text())
        self._check(said["completed"], said["failed"])
        return _figures(said["median_ttft_ms"], said["median_itl_ms"], said["output_throughput"])

    def _cut_trace(self, into: Path) -> None:
        """Writes the first requests of the trace that fit the model's context, ten times as fast as they came."""
        kept: list[dict[str, Any]] = []
        with self.trace.open(encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                if row["input_length"] + row["output_length"] + TEMPLATE_TOKENS <= self.context:
                    first = kept[0]["timestamp"] if kept else row["timestamp"]
                    kept.append(row | {"timestamp": row["timestamp"] - first})
                if len(kept) == REQUESTS:
                    break
        if len(kept) < REQUESTS:
            raise ValueError(f"trace: {len(kept)} requests of {self.trace} fit {self.context} tokens, not {REQUESTS}")
        rows = [row | {"timestamp": row["timestamp"] / 10} for row in kept]
        into.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")

    def _run(self, tool: str, words: list[str], **env: str) -> None:
        beside = Path(sys.executable).with_name(tool)
        program = shutil.which(self.tools[tool] or (beside if beside.exists() else tool))
        if program is None:
            raise ToolAbsent(f"--{tool} PATH")
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"} | env
        done = subprocess.run(
            [program, *words], env=os.environ | offline, capture_output=True, text=True, timeout=RUN_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"exit status {done.returncode}: {(done.stderr or done.stdout)[-400:]}")

    def _check(self, completed: float, errors: Any) -> None:
        if completed != REQUESTS or errors:
            raise RuntimeError(f"{completed:.0f} of {REQUESTS} requests completed; errors: {errors}")


REQUESTS, RUN_S = 20, 300
TEMPLATE_TOKENS = 100  # what a chat template may add to a prompt of the trace


def _figures(ttft_ms: float, itl_ms: float, tokens_s: float) -> str:
    return f"TTFT {ttft_ms:.0f} ms, ITL {itl_ms:.1f} ms (medians), {tokens_s:.0f} output tokens/s"


def main() -> int:
    """Makes every call; returns the exit status."""
    examples = Path(__file__).resolve().parent.parent / "examples"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="of the gateway")
    parser.add_argument("--load", action="store_true", help="load generators in place of clients")
    for tool in ("aiperf", "guidellm", "vllm"):
        parser.add_argument(f"--{tool}", metavar="PATH", help="default: beside this Python, or on PATH")
    parser.add_argument("--tokenizer", type=Path, default=examples / "demo-model", help="folder of the model's own")
    parser.add_argument(
        "--trace", type=Path, default=examples / "traces" / "conversation-400.jsonl", help="that aiperf replays"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        calls = LoadGenerators(args, Path(folder)) if args.load else Clients(args.url)
        return report(calls)


def report(calls: Clients | LoadGenerators) -> int:
    """Makes every call, prints a line of each, and returns 1 if one failed."""
    failed = 0
    for name in [name for name, made in vars(type(calls)).items() if callable(made) and not name.startswith("_")]:
        try:
            print(f"ok      {name:28} {getattr(calls, name)()!s:.150}", flush=True)
        except ModuleNotFoundError as err:
            print(f"absent  {name:28} pip install {(err.name or '').partition('.')[0].replace('_', '-')}")
        except ToolAbsent as err:
            print(f"absent  {name:28} {err}")
        except Exception as err:  # any client has errors of its own
            failed += 1
            print(f"failed  {name:28} {type(err).__name__}: {str(err)[:400]}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

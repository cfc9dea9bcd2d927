"""`kvmesh chat`: talk to a running mesh."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer
from rich.console import Console

from kvmesh.cli import runs
from kvmesh.cli.console import ApiKey, console, one_line_errors
from kvmesh.errors import ConfigError, InvalidRequest, KvmeshError

DEFAULT_URL = "http://127.0.0.1:8000"


@one_line_errors
def chat(
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="Ask this, print the answer, leave. '-': standard input.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(envvar="KVMESH_URL", help="The mesh; by default the latest `kvmesh up` here.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model name; by default the first one served.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Of the likeliest tokens those that hold this share.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Only so many of the likeliest tokens.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Only tokens this share as likely as the likeliest.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="-2..2, for what the answer has already.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="-2..2, each time the answer has it.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Over 1: fewer repetitions, also of yours.")] = None,
    logit_bias: Annotated[
        list[str] | None, typer.Option(metavar="TOKEN_ID=BIAS", help="-100..100 for one token; may be given again.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    api_key: ApiKey = None,
) -> None:
    """Chat with a running mesh; answers stream as they are made.

    Examples:

        kvmesh chat

        kvmesh chat --message "What is the code of the red door?" --max-tokens 20

        cat question.txt | kvmesh chat -m - --url http://10.0.0.5:8000
    """
    from kvmesh.cli import stream

    biases = _biases(logit_bias or ())
    base = (url or _default_url()).rstrip("/").removesuffix("/v1")
    served = stream.models(base, api_key)
    name = model or (served[0] if served else "")
    if not name:
        raise ConfigError(f"{base} serves no model yet")
    history: list[stream.Message] = [{"role": "system", "content": system}] if system else []
    out = console()
    parameters: dict[str, Any] = {
        "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p,
        "presence_penalty": presence_penalty, "frequency_penalty": frequency_penalty,
        "repetition_penalty": repetition_penalty, "logit_bias": biases, "seed": seed,
    }  # fmt: skip

    def ask(text: str) -> None:
        messages = [*history, {"role": "user", "content": text}]
        answer = stream.chat(base, name, messages, _write, api_key=api_key, **parameters)
        history[:] = [*messages, {"role": "assistant", "content": answer.text}]
        _write("\n")
        if sys.stdout.isatty():
            out.print(f"[dim]{answer.summary()}[/]")

    if message is not None:
        ask(_standard_input() if message == "-" else message)
        return
    _converse(out, base, name, ask, history)


def _biases(given: Iterable[str]) -> dict[str, float] | None:
    """What the gateway is told; whether token and bias can be right it says itself."""
    found: dict[str, float] = {}
    for text in given:
        token_id, _, bias = text.partition("=")
        try:
            found[token_id] = float(bias)
        except ValueError:
            raise InvalidRequest.of("logit_bias", text, "must be TOKEN_ID=BIAS") from None
        if not math.isfinite(found[token_id]):
            raise InvalidRequest.of("logit_bias", text, "the bias must be a finite number")
    return found or None


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise InvalidRequest("message: standard input is not UTF-8 text", field="message") from None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _default_url() -> str:
    from kvmesh.cli.stream import trust

    try:
        run = runs.find_running(None)
    except ConfigError:
        return DEFAULT_URL
    trust(run.http_ca)
    return runs.rest(run)


def _converse(out: Console, url: str, model: str, ask: Callable[[str], None], history: list[dict[str, str]]) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  input() gains history and editing

    out.print(f"[bold]{model}[/] at {url}   [dim]/reset forgets the conversation, /exit or Ctrl-D leaves[/]")
    while True:
        try:
            text = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            out.print()
            return
        if text in ("/exit", "/quit"):
            return
        if text == "/reset":
            history[:] = [one for one in history if one["role"] == "system"]
            out.print("[dim]forgotten[/]")
        elif text.startswith("/"):
            out.print(f"[dim]{text.split()[0]} is unknown; there are /reset and /exit[/]")
        elif text:
            try:
                ask(text)
            except KeyboardInterrupt:
                out.print("\n[dim]cancelled[/]")
            except KvmeshError as err:
                out.print(err.message, style="red", markup=False)

"""`kvmesh up`: a whole mesh on this machine with one command."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape

from kvmesh.cli import models, options, runs, serve
from kvmesh.cli.console import console, one_line_errors
from kvmesh.cli.up.settings import MeshSettings
from kvmesh.config import load
from kvmesh.errors import KvmeshError

if TYPE_CHECKING:
    from types import FrameType

    from kvmesh.cli.stream import ChatAnswer, Message
    from kvmesh.cli.up.mesh import Mesh

HELP = f"""Start a whole mesh on this machine: store master, conductor, prefill, decode and pool nodes, gateway.

Waits until all are ready, asks the model something, prints the streamed answer, and keeps the services running \
until Ctrl-C. A service that dies is started again.

Over several machines: --host ADDRESS on one of them, --join ADDRESS on each other one (docs/operate/multi-host.md). \
A model that needs more than one machine: --decode-mesh and --decode-hosts there, --join ADDRESS --as ranks on the \
others (docs/operate/rank-hosts.md).

{serve.PRECEDENCE}

Examples:

    kvmesh up

    kvmesh up --model demo-moe

    kvmesh up --model ./Qwen2.5-0.5B-Instruct --prefill 2 --decode 2 --dtype bfloat16

    kvmesh up --prefill 2 --decode 2 --pool 1 --pool-memory-mb 1024

    kvmesh up --coupled 1 --prefill 0 --decode 0

    kvmesh up --coupled 1 --prefill 0 --decode 0 --coupled-tp 2 --device cuda --dtype bfloat16

    kvmesh up --prefill 1 --prefill 1@cpu:float32 --decode 1 --decode 1@cpu:float32 --device cuda --dtype bfloat16

    kvmesh up --model ./my-model --external http://127.0.0.1:8100 --prefill 0 --decode 0

    kvmesh up --masters 3 --conductors 2 --redis auto

    kvmesh up --host 10.0.0.1

    kvmesh up --join 10.0.0.1 --prefill 1 --decode 2

    kvmesh up --host 10.0.0.1 --model ./large --device cuda --decode-mesh tp=16 --decode-hosts 2

    kvmesh up --join 10.0.0.1 --model ./large --as ranks

    kvmesh up --model ./chat-model --add-model code=./code-model

    kvmesh up --model Qwen/Qwen3-0.6B --slo-ttft 2000 --slo-tbt 200 --http-port 9000
"""

DEFAULT_PROMPT = "In one sentence: what is a key-value cache in a language model?"
PROMPT_TOKENS = 64
MACHINES_S = 7 * 86400.0  # for others to join; Ctrl-C ends it
LOADING_S = 1800.0  # a large checkpoint from a slow disk; a service that dies is noticed at once


def command() -> Callable[..., None]:
    """The command, its options made from the fields of MeshSettings."""

    @one_line_errors
    def run(**given: Any) -> None:
        path, prompt, leave = (given.pop(name) for name in ("config", "prompt", "exit_after_prompt"))
        given = {key: None if value == [] else value for key, value in given.items()}  # a repeatable one not given
        settings = load(MeshSettings, given, toml=path, env=os.environ, also_known=serve.known_keys())
        code = up(settings, prompt=prompt or leave, leave=leave)
        if code:
            raise typer.Exit(code)

    return options.taking(
        run,
        "up",
        [
            *options.of_config(MeshSettings),
            options.parameter("prompt", bool, True, typer.Option(help="Send one chat request once all are ready.")),
            options.parameter(
                "exit_after_prompt", bool, False, typer.Option("--exit-after-prompt", help="Stop after it.")
            ),
            options.CONFIG,
        ],
    )


def up(settings: MeshSettings, *, prompt: bool, leave: bool) -> int:
    """Run a mesh until SIGINT, SIGTERM or SIGHUP, or with `leave` until the first answer; returns the exit code."""
    out = console()
    demo = not settings.model
    named = bool(settings.served_name) or not (demo or Path(settings.model).is_dir())
    folder = models.resolve(settings.model)
    name = settings.served_name or (folder.name if demo or Path(settings.model).is_dir() else settings.model)
    further = tuple(f"{served.name}={models.resolve(served.path, 'add_model')}" for served in settings.served[1:])
    draft = str(models.resolve(settings.draft_model, "draft_model")) if settings.draft_model else ""
    settings = dataclasses.replace(settings, model=str(folder), served_name=name, add_model=further, draft_model=draft)
    out.print("[dim]starting ...[/]" if out.is_terminal else "starting ...")

    from kvmesh.cli.up import joining
    from kvmesh.cli.up import mesh as meshes
    from kvmesh.cli.up.checks import check_drafts, check_own_ports, check_ranks, check_reach, check_redis, check_tiers
    from kvmesh.cli.up.hashing import fingerprints
    from kvmesh.cli.up.rank_hosts import RankHostWatch, machines_wanted
    from kvmesh.cli.up.screen import StartProgress, joins
    from kvmesh.external.endpoints import of_file as endpoints_of_file

    settings = joining.advertised(settings)
    check_reach(settings)
    if settings.join:
        settings, found = joining.joined(settings, named=named)
        out.print(joins(settings, found), soft_wrap=True)
    check_own_ports(settings)
    check_ranks(settings)
    check_drafts(settings)
    check_redis(settings)
    check_tiers(settings)
    if settings.external_file:  # the same
        endpoints_of_file(settings.external_file)
    if settings.api_keys:  # a bad file is told before anything is started
        from kvmesh.services.gateway.key_file import KeyFile

        KeyFile(settings.api_keys).load()
        settings = dataclasses.replace(settings, api_keys=str(Path(settings.api_keys).absolute()))
    settings = dataclasses.replace(
        settings, run_dir=str(Path(settings.run_dir).absolute() if settings.run_dir else runs.new_run_dir())
    )
    if not settings.join and settings.ranks:  # once, with a bar: instances then find it done
        fingerprints([served.path for served in settings.served])
    told = threading.Event()
    mesh = meshes.Mesh(settings)
    progress = StartProgress(out, mesh.processes)
    mesh.listen(progress)
    watch = RankHostWatch(mesh, lambda line: out.print(line, soft_wrap=True), _join_line(mesh, " --as ranks"))
    with _Signals(told, mesh), watch:
        try:
            with progress:
                mesh.start()
                runs.point_latest(mesh.run_dir)
                # Machines that lend ranks come when somebody starts them.
                mesh.wait_ready(MACHINES_S if machines_wanted(settings) else LOADING_S, stopped=told)
                if not told.is_set():
                    progress.done()
            answered = bool(settings.join) or _serves(out, mesh, told)
            if prompt and answered and mesh.url and not told.is_set():
                answered = _ask(out, mesh)
            if leave:
                return 0 if answered else 1
            if not answered and not told.is_set():
                out.print("\n[bold red]The mesh does not serve[/]  see above; Ctrl-C stops everything.")
                told.wait()
            if not told.is_set():
                for line in _part(mesh) if mesh.settings.join else _whole(mesh):
                    out.print(line, soft_wrap=True)
                told.wait()
            return 0
        finally:
            progress.silence()
            watch.silence()
            out.print("\nstopping ...")
            mesh.stop()
            out.print("stopped; nothing is left running")


def _serves(out: Console, mesh: Mesh, told: threading.Event) -> bool:
    """Whether instances are registered and get work, in time; else what is wrong is printed."""
    from kvmesh.cli.up import serving

    found = serving.wait_serving(mesh, serving.PATIENCE_S, told)
    if found and not told.is_set():
        out.print(f"[red]all processes run, but after {serving.PATIENCE_S:.0f} s the mesh does not serve:[/]")
        for line in found:
            out.print(f"  {escape(line)}", soft_wrap=True)
        out.print(f"  (logs: {mesh.run_dir}/logs)")
    return not found


class _Signals:
    """The first SIGINT, SIGTERM or SIGHUP sets `told`, a second one kills what is still there."""

    def __init__(self, told: threading.Event, mesh: Mesh) -> None:
        self._told = told
        self._mesh = mesh
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._told.is_set():
            self._mesh.stop_now()
        self._told.set()

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def first_prompt(model: Path) -> tuple[list[Message], int]:
    """Messages and max_tokens of the first request: the demo model's own, which it can answer from a context."""
    path = model / "demo_prompt.json"
    if path.is_file():
        told = json.loads(path.read_text(encoding="utf-8"))
        messages = told["messages"] if isinstance(told, dict) else told
        return messages, int(told.get("max_tokens", PROMPT_TOKENS)) if isinstance(told, dict) else PROMPT_TOKENS
    return [{"role": "user", "content": DEFAULT_PROMPT}], PROMPT_TOKENS


def _ask(out: Console, mesh: Mesh) -> bool:
    """Send the first request and show its answer as it comes; False (and why, on the screen) when it failed."""
    from kvmesh.cli import stream

    key = os.environ.get("KVMESH_API_KEY")
    if mesh.settings.api_keys and not key:
        out.print("\n[dim]No first request: the gateway wants an API key, and KVMESH_API_KEY holds none.[/]")
        return True
    stream.trust(mesh.http_ca)
    messages, max_tokens = first_prompt(Path(mesh.settings.model))
    for message in messages:
        text = message["content"]
        shown = text if len(text) <= 600 else f"{text[:400].rsplit(' ', 1)[0]} ... {text[-160:].split(' ', 1)[1]}"
        out.print(f"\n[bold]{message['role']}[/]  {escape(shown)}")
    out.print("\n[bold]assistant[/]  ", end="")

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    try:
        name = mesh.settings.first_model
        answer: ChatAnswer = stream.chat(
            mesh.url, name, messages, write, api_key=key, max_tokens=max_tokens, temperature=0
        )
    except KvmeshError as err:
        out.print(f"\n[red]the request failed:[/] {escape(err.message)}  (logs: {mesh.run_dir}/logs)")
        return False
    out.print(f"\n\n[dim]{answer.summary()}[/]")
    return True


def program() -> str:
    """How this user calls `kvmesh`: by name when it is on the PATH, else by its path (as after `make up`)."""
    own = Path(sys.executable).parent / "kvmesh"
    if shutil.which("kvmesh") or not own.exists():
        return "kvmesh"
    return str(own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own)


def _part(mesh: Mesh) -> tuple[str, ...]:
    """Says how to go on with a machine that has joined."""
    assert mesh.settings.joined is not None, "it was asked before anything was started"
    kvmesh, conductor = program(), ",".join(mesh.settings.joined.conductors)
    if mesh.settings.lends:
        return (
            f"\n[bold green]This machine lends ranks to the mesh of {conductor}[/]",
            f"[bold]Logs[/]    {mesh.run_dir}/logs",
            "",
            "Instances there start ranks here when they need them. Ctrl-C takes the machine away: an instance that has",
            "ranks here ends, its requests go on elsewhere, and it waits for another machine.",
        )
    return (
        f"\n[bold green]This machine serves in the mesh of {conductor}[/]",
        f"[bold]Logs[/]    {mesh.run_dir}/logs",
        f"[bold]Look[/]    {kvmesh} status   {kvmesh} doctor --mesh",
        "",
        "Ctrl-C takes it out of the mesh: requests that run here end within seconds, or go on at other machines.",
    )


def _whole(mesh: Mesh) -> tuple[str, ...]:
    """Says how to go on with a whole mesh."""
    url, name, kvmesh = mesh.url, mesh.settings.first_model, program()
    names = ", ".join((name, *mesh.settings.further_models))
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32})
    auth = ' -H "Authorization: Bearer $KVMESH_API_KEY"' if mesh.settings.api_keys else ""
    ca = f" --cacert {shlex.quote(mesh.http_ca)}" if mesh.http_ca else ""
    client_key = "os.environ['KVMESH_API_KEY']" if mesh.settings.api_keys else "'none'"
    return (
        f"\n[bold green]The mesh is up[/]  {url}/v1   [dim]docs: {url}/docs[/]",
        f"[bold]gRPC[/]            {mesh.addresses['gateway']}",
        *([f"[bold]Models[/]          {escape(names)}"] if mesh.settings.further_models else []),
        "",
        "[bold]curl[/]",
        f"  curl{escape(ca)} {url}/v1/chat/completions -H 'Content-Type: application/json'{auth} "
        f"-d {escape(shlex.quote(body))}",
        "",
        "[bold]Python[/]  [dim](pip install openai)[/]",
        *([f"  [dim]# SSL_CERT_FILE={escape(shlex.quote(mesh.http_ca))} python ...[/]"] if mesh.http_ca else []),
        *(["  import os"] if mesh.settings.api_keys else []),
        "  from openai import OpenAI",
        f"  client = OpenAI(base_url={url + '/v1'!r}, api_key={escape(client_key)})",
        f"  print(client.chat.completions.create(model={name!r}, messages=\\[{{'role': 'user', 'content': 'Hello'}}])"
        ".choices\\[0].message.content)",
        "",
        f"[bold]Logs[/]    {mesh.run_dir}/logs",
        f"[bold]Traces[/]  {mesh.run_dir}/traces",
        f"[bold]Look[/]    {kvmesh} status   {kvmesh} chat   {kvmesh} bench",
        f"        {kvmesh} trace --last   {kvmesh} explain REQUEST_ID",
        *([f"        {kvmesh} role coupled-0 prefill|decode|both"] if mesh.settings.count("coupled") else []),
        "",
        *_invitation(mesh),
        *(() if mesh.url.startswith("https:") else _plaintext(mesh.settings)),
        *_kept_here(mesh.settings),
        "Ctrl-C stops everything.",
    )


def _plaintext(settings: MeshSettings) -> tuple[str, ...]:
    """A warning where keys and prompts travel in the clear though the mesh was asked to guard them."""
    if settings.http_tls_cert or not (settings.api_keys or settings.tls_cert):
        return ()
    what = "API keys and prompts" if settings.api_keys else "prompts"
    return (f"[yellow]REST is plain HTTP: {what} travel unencrypted. Give --http-tls to have HTTPS.[/]", "")


def _kept_here(settings: MeshSettings) -> tuple[str, ...]:
    """A warning where machines can join and will exchange no KV."""
    if not settings.address or not settings.tls_ca or settings.tls_cert or settings.transfer_network == "trusted":
        return ()
    why = "KV goes over mutual TLS, and --tls-cert and --tls-key are not given"
    return (f"[yellow]KV stays on this machine: {why} (or --transfer-network trusted, unencrypted).[/]", "")


def _invitation(mesh: Mesh) -> tuple[str, ...]:
    """The command for other machines, where they can join."""
    if not mesh.settings.address:
        return ()
    return ("[bold]Another machine joins with[/]", f"  {_join_line(mesh)}", "")


def _join_line(mesh: Mesh, more: str = "") -> str:
    """The command with which another machine joins."""
    settings = mesh.settings
    conductors = ",".join(one.spec.address for one in mesh.processes.values() if one.spec.service == "conductor")
    if settings.joined:
        conductors = ",".join(settings.joined.conductors)
    elif settings.advertise_host:
        from kvmesh.rpc.server import join

        ports = (one.rpartition(":")[2] for one in conductors.split(","))
        conductors = ",".join(join(settings.advertise_host, int(port)) for port in ports)
    flags = "" if settings.model == models.resolve("").as_posix() else " --model FOLDER_OF_THE_SAME_CHECKPOINT"
    if settings.tls_ca:
        flags += " --tls-cert FILE --tls-key FILE --tls-ca FILE"
    if settings.transfer_network == "trusted":
        flags += " --transfer-network trusted"
    return f"{program()} up --join {conductors}{more}{flags}"

"""The conductor over three engines of others, beside round-robin and session hash, on agent-like traffic.

Sessions share the system prompt of their agent; each turn's prompt is all that was said before and what is asked now,
and comes when its user has thought. Every fourth session is heavy: it asks with long texts, as tools do. No engine can
keep all sessions. A mesh for each policy (its conductor's `policy` is all that differs) stands before the same engines;
they are loaded in turns, in another order each round, with the same lengths and pauses and other tokens, so that no
turn finds blocks of another. Hits are the engines' own count of cached tokens.

    PYTHON_OF_VLLM=.venv-vllm/bin/python python -m benchmarks.external --json benchmarks/results/external.json
    python -m benchmarks.external --engines kvmesh       # kvmesh's coupled instances behind their own gateways
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from benchmarks import progress
from benchmarks.turns import over
from kvmesh.cli.up import plan
from kvmesh.cli.up.mesh import Mesh
from kvmesh.cli.up.settings import MeshSettings
from kvmesh.kvcache.keys import Namespace, chain, pack_tokens, split
from kvmesh.quantiles import quantile
from tests.support.checkpoints import make_checkpoint
from tests.support.mesh.client import until
from tests.support.vllm_server import PYTHON_ENV, START_S, vllm_server, wait_healthy

MODEL = "agents"
# The conductor's `policy`, and whether the engines' own reports say which blocks they hold.
POLICIES = {
    "conductor": ("kvcache", False),
    "conductor, exact": ("kvcache", True),
    "session hash": ("session_hash", False),
    "round robin": ("round_robin", False),
}
VOCAB, CONTEXT, BLOCK = 2_000, 2_560, 32
FIRST_TOKEN = 300  # ids below are bytes and marks
HEAVY_EVERY = 4
WINDOW_S = 5.0
NAMESPACE = Namespace(fingerprint="00", kv_dtype="")


# ── traffic ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class AgentTraffic:
    """What the sessions of one turn ask. Lengths and pauses follow from `seed`; tokens from `seed` and `turn`."""

    agents: int
    sessions: int
    turns: int
    system_tokens: int
    user_tokens: int
    heavy_tokens: int
    answer_tokens: int
    think_s: float
    start_s: float
    seed: int
    turn: int

    def begins_s(self, session: int) -> float:
        return session * self.start_s / self.sessions

    def thinks_s(self, session: int, at: int) -> float:
        """Returns how long the user thinks before turn `at`."""
        return self.think_s * (0.5 + random.Random(f"think {self.seed} {session} {at}").random())

    def heavy(self, session: int) -> bool:
        return session % HEAVY_EVERY == HEAVY_EVERY - 1

    def system(self, session: int) -> list[int]:
        # Heavy ones must not all be of one agent.
        agent = random.Random(f"agent {self.seed} {session}").randrange(self.agents)
        return self._tokens(f"system {agent}", self.system_tokens)

    def user(self, session: int, at: int) -> list[int]:
        mean = self.heavy_tokens if self.heavy(session) else self.user_tokens
        length = round(mean * (0.5 + random.Random(f"length {self.seed} {session} {at}").random()))
        return self._tokens(f"user {session} {at}", length)

    def _tokens(self, what: str, count: int) -> list[int]:
        draw = random.Random(f"{self.seed} {self.turn} {what}")
        return [draw.randrange(FIRST_TOKEN, VOCAB) for _ in range(count)]


@dataclass
class Asked:
    """One request. Times are seconds since the turn began, or of the request."""

    session: int
    turn: int
    sent_s: float
    prompt: list[int]
    ttft_s: float = 0.0
    last_s: float = 0.0  # from it was sent to its last token
    answer: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    instance: str = ""
    failed: str = ""

    @property
    def tbt_s(self) -> float:
        return (self.last_s - self.ttft_s) / max(1, len(self.answer) - 1)


async def ask(http: httpx.AsyncClient, one: Asked, max_tokens: int) -> None:
    body = {
        "model": MODEL,
        "prompt": one.prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "session": f"s{one.session}",
    }
    began = time.perf_counter()
    try:
        async with http.stream("POST", "/v1/completions", json=body, headers={"x-kvmesh-timings": "1"}) as answer:
            if answer.status_code != 200:
                one.failed = f"{answer.status_code} {(await answer.aread())[:200].decode()}"
                return
            async for line in answer.aiter_lines():
                data = line.removeprefix("data: ")
                if not data or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    one.failed = str(event["error"])[:200]
                    return
                _take(one, event, time.perf_counter() - began)
    except httpx.HTTPError as err:
        one.failed = f"{type(err).__name__}: {err}"


def _take(one: Asked, event: dict[str, Any], now: float) -> None:
    for choice in event.get("choices", ()):
        if ids := choice.get("token_ids"):
            one.ttft_s = one.ttft_s or now
            one.last_s = now
            one.answer += ids
    if usage := event.get("usage"):
        one.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    if told := event.get("kvmesh"):
        one.instance = told["choices"][0]["decode_instance"]


async def run_turn(url: str, traffic: AgentTraffic) -> list[Asked]:
    """Runs all sessions; returns their requests."""
    done: list[Asked] = []
    began = time.perf_counter()

    async def session(http: httpx.AsyncClient, number: int) -> None:
        await asyncio.sleep(traffic.begins_s(number))
        said = traffic.system(number)
        for at in range(traffic.turns):
            if at:
                await asyncio.sleep(traffic.thinks_s(number, at))
            said = said + traffic.user(number, at)
            if len(said) + traffic.answer_tokens >= CONTEXT:
                return
            one = Asked(number, at, time.perf_counter() - began, said)
            done.append(one)
            await ask(http, one, traffic.answer_tokens)
            if one.failed:
                return
            said = said + one.answer

    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=256)) as http:
        await asyncio.gather(*(session(http, number) for number in range(traffic.sessions)))
    return done


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────


def possible_tokens(asked: Sequence[Asked]) -> int:
    """Returns how many tokens one endless cache could have had ready: full blocks of what was said before."""
    seen: set[bytes] = set()
    found = 0
    for one in sorted(asked, key=lambda one: one.sent_s):
        keys = split(chain(NAMESPACE, pack_tokens(one.prompt), BLOCK))
        hit = next((at for at, key in enumerate(keys) if key not in seen), len(keys))
        found += min(hit, (len(one.prompt) - 1) // BLOCK) * BLOCK
        seen.update(split(chain(NAMESPACE, pack_tokens([*one.prompt, *one.answer]), BLOCK)))
    return found


def figures(asked: Sequence[Asked], engines: int, slo_ttft_s: float, slo_tbt_s: float) -> dict[str, Any]:
    """Returns what one turn shows. `most_in_window` is the mean, over windows of WINDOW_S with at least as many
    requests as engines, of the largest share of requests that one engine got in it: 1 / engines would be even."""
    well = [one for one in asked if not one.failed]
    ttft = sorted(one.ttft_s for one in well)
    prompts, cached = sum(len(one.prompt) for one in well), sum(one.cached_tokens for one in well)
    good = [one for one in well if one.ttft_s <= slo_ttft_s and one.tbt_s <= slo_tbt_s]
    windows: dict[int, Counter[str]] = {}
    for one in well:
        windows.setdefault(int(one.sent_s / WINDOW_S), Counter())[one.instance] += 1
    full = [max(many.values()) / many.total() for many in windows.values() if many.total() >= engines]
    names = sorted({one.instance for one in well})
    homes: dict[int, list[str]] = {}
    for one in sorted(well, key=lambda one: one.turn):
        homes.setdefault(one.session, []).append(one.instance)
    later = [before != after for some in homes.values() for before, after in pairwise(some)]
    took = max(one.sent_s + one.last_s for one in well)
    return {
        "requests": len(asked),
        "failed": len(asked) - len(well),
        "ttft_p50_ms": 1000 * quantile(ttft, 0.5),
        "ttft_p90_ms": 1000 * quantile(ttft, 0.9),
        "hit_rate": cached / prompts,
        "possible_hit_rate": possible_tokens(well) / prompts,
        "computed_tokens": prompts - cached,
        "goodput": len(good) / len(asked),
        "good_per_s": len(good) / took,
        "moved": sum(later) / max(1, len(later)),
        "most_in_window": statistics.mean(full) if full else 0.0,
        "requests_by_instance": [sum(many[name] for many in windows.values()) for name in names],
        "requests_by_window": [[windows[at][name] for name in names] for at in sorted(windows)],
        "errors": sorted({one.failed for one in asked if one.failed}),
    }


SHOWN = (
    ("ttft_p50_ms", "TTFT p50, ms", "{:.0f}"),
    ("ttft_p90_ms", "TTFT p90, ms", "{:.0f}"),
    ("hit_rate", "prompt tokens found cached", "{:.3f}"),
    ("possible_hit_rate", "... by one endless cache", "{:.3f}"),
    ("computed_tokens", "prompt tokens computed", "{:.0f}"),
    ("goodput", "requests within both SLOs", "{:.3f}"),
    ("good_per_s", "... a second", "{:.2f}"),
    ("moved", "turns at another engine", "{:.3f}"),
    ("most_in_window", "largest share of one engine", "{:.3f}"),
    ("failed", "failed", "{:.1f}"),
)


def show(rounds: dict[str, list[dict[str, Any]]]) -> None:
    """Prints medians over the rounds, and the median ratio, round by round, to the conductor's."""
    base = rounds["conductor"]
    print(f"{'':>30}" + "".join(f"{name:>24}" for name in rounds))
    for key, text, form in SHOWN:
        cells = []
        for some in rounds.values():
            value = form.format(statistics.median(one[key] for one in some))
            comparable = some is not base and all(one[key] for one in base)
            ratio = f"  ×{over([one[key] for one in some], [one[key] for one in base]):.2f}" if comparable else ""
            cells.append(f"{value + ratio:>24}")
        print(f"{text:>30}" + "".join(cells))
    for name, some in rounds.items():
        print(f"{name}: requests by engine {' | '.join(str(one['requests_by_instance']) for one in some)}")
        print(f"    ... in each {WINDOW_S:g} s of the last round: {some[-1]['requests_by_window']}")


# ── engines and meshes ───────────────────────────────────────────────────────────────────────────────────────────


def endpoint(at: int, port: int, events: int = 0, replay: int = 0) -> dict[str, str]:
    """Returns an entry of the file of endpoints."""
    found = {"url": f"http://127.0.0.1:{port}", "name": f"engine-{at}"}
    if events:
        found |= {"kv_events": f"tcp://127.0.0.1:{events}", "kv_replay": f"tcp://127.0.0.1:{replay}"}
    return found


@contextlib.contextmanager
def vllm_engines(model: Path, folder: Path, args: argparse.Namespace) -> Iterator[list[dict[str, str]]]:
    ports = plan.Ports()
    with contextlib.ExitStack() as stack:
        found = []
        for at in range(args.count):
            port, events, replay = (ports.take() for _ in range(3))
            log = folder / f"vllm-{at}.log"
            told = {"enable_kv_cache_events": True, "publisher": "zmq"}
            told |= {"endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}"}
            more = ["--kv-events-config", json.dumps(told)]
            more += ["--max-model-len", str(CONTEXT), "--block-size", str(BLOCK), "--max-num-seqs", "8"]
            more += ["--num-gpu-blocks-override", str(args.engine_tokens // BLOCK)]
            process = stack.enter_context(vllm_server(model, port, log, MODEL, *more))
            found.append(endpoint(at, port, events, replay))
            # One after the other: imports of all at once take longer than in turn where memory is slow.
            asyncio.run(wait_healthy([(found[-1]["url"], process, log)]))
            progress.tell(f"engine {at + 1} of {args.count} answers")
        yield found


@contextlib.contextmanager
def kvmesh_engines(model: Path, folder: Path, args: argparse.Namespace) -> Iterator[list[dict[str, str]]]:
    blocks = args.engine_tokens // BLOCK
    flags = {"coupled": {"num_pages": blocks, "num_extents": 16}, "conductor": {"admission": "off"}}
    with contextlib.ExitStack() as stack:
        meshes = [
            stack.enter_context(start_mesh(model, folder / f"engine-{at}", flags, coupled=1, memory_mb=64))
            for at in range(args.count)
        ]
        for mesh in meshes:
            mesh.wait_ready(START_S)
        yield [endpoint(at, int(mesh.url.rpartition(":")[2])) for at, mesh in enumerate(meshes)]


@contextlib.contextmanager
def running_engines(model: Path, folder: Path, args: argparse.Namespace) -> Iterator[list[dict[str, str]]]:
    told = json.loads(Path(args.endpoints).read_text())["endpoints"]
    yield [one | {"name": f"engine-{at}"} for at, one in enumerate(told)]


def start_mesh(model: Path, run_dir: Path, flags: dict[str, dict[str, Any]], **settings: Any) -> Mesh:
    return Mesh(
        MeshSettings(
            model=str(model),
            served_name=MODEL,
            prefill=0,
            decode=0,
            http_port=0,
            grpc_port=0,
            run_dir=str(run_dir),
            block_tokens=BLOCK,
            dtype="float32",
            threads=1,
            log_level="warning",
            flags=flags,
            **settings,
        )
    )


async def registered(mesh: Mesh, engines: int) -> None:
    """Returns when the gateway sends requests to every engine's model."""

    async def so() -> bool:
        async with httpx.AsyncClient(base_url=mesh.url, timeout=30) as http:
            body = {"model": MODEL, "prompt": [FIRST_TOKEN] * 8, "max_tokens": 1, "temperature": 0}
            told = [await http.post("/v1/completions", json=body) for _ in range(engines)]
            return all(one.status_code == 200 for one in told)

    await until(so, f"{engines} engines behind {mesh.url}", 120.0)


def endpoints_file(folder: Path, engines: Sequence[dict[str, str]], *, exact: bool) -> str:
    file = folder / f"endpoints{'-exact' * exact}.json"
    told = [{key: text for key, text in one.items() if exact or not key.startswith("kv_")} for one in engines]
    file.write_text(json.dumps({"endpoints": told}))
    return str(file)


def measure(
    engines: Sequence[dict[str, str]], model: Path, folder: Path, args: argparse.Namespace
) -> dict[str, list[Any]]:
    slo = {"slo_ttft_ms": round(1000 * args.slo_ttft_s), "slo_tbt_ms": round(1000 * args.slo_tbt_s)}
    with contextlib.ExitStack() as stack:
        meshes = {
            name: stack.enter_context(
                start_mesh(
                    model,
                    folder / name.replace(", ", "-"),
                    {"conductor": {"policy": policy, "admission": "off", **slo}},
                    external_file=endpoints_file(folder, engines, exact=exact),
                )
            )
            for name, (policy, exact) in POLICIES.items()
            if name in args.policies
        }
        for mesh in meshes.values():
            mesh.wait_ready(START_S)
            asyncio.run(registered(mesh, len(engines)))
        found: dict[str, list[Any]] = {name: [] for name in meshes}
        order = list(meshes)
        for number in range(args.rounds + 1):
            for at, name in enumerate(order):
                turn = len(order) * number + at
                traffic = AgentTraffic(
                    args.agents, args.sessions if number else args.sessions // 3, args.turns if number else 2,
                    args.system_tokens, args.user_tokens, args.heavy_tokens, args.answer_tokens, args.think_s,
                    args.start_s if number else 2.0, args.seed + number, turn,
                )  # fmt: skip
                asked = asyncio.run(run_turn(meshes[name].url, traffic))
                if number:  # the first round fills the engines, and teaches what prompts and steps take
                    found[name].append(figures(asked, len(engines), args.slo_ttft_s, args.slo_tbt_s))
                progress.tell(f"round {number} of {args.rounds}: {name}")
            order = order[1:] + order[:1]
        progress.tell("")
        return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", choices=("vllm", "kvmesh"), default="vllm")
    parser.add_argument("--count", type=int, default=3, help="engines")
    parser.add_argument("--engine-tokens", type=int, default=4_096, help="KV of one engine")
    parser.add_argument("--endpoints", default="", help="file of endpoints that run already; needs --model")
    parser.add_argument("--model", default="", help="with --endpoints: the folder of their model")
    parser.add_argument("--policies", default="", help="with / between; the conductor must be among; empty: all")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--agents", type=int, default=3, help="system prompts")
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--system-tokens", type=int, default=384)
    parser.add_argument("--user-tokens", type=int, default=60)
    parser.add_argument("--heavy-tokens", type=int, default=280)
    parser.add_argument("--answer-tokens", type=int, default=12)
    parser.add_argument("--think-s", type=float, default=4.0)
    parser.add_argument("--start-s", type=float, default=16.0)
    parser.add_argument("--slo-ttft-s", type=float, default=2.0)
    parser.add_argument("--slo-tbt-s", type=float, default=0.2)
    parser.add_argument("--hidden", type=int, default=384, help="width of the model; it has four layers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", default="", help="also write the results here")
    args = parser.parse_args()
    reports = args.engines == "vllm" or args.endpoints
    args.policies = (
        args.policies.split("/")
        if args.policies
        else [name for name, (_, exact) in POLICIES.items() if reports or not exact]
    )
    if "conductor" not in args.policies or set(args.policies) - set(POLICIES):
        parser.error(f"--policies: some of {'/'.join(POLICIES)}, the conductor among them")
    if bool(args.endpoints) is not bool(args.model):
        parser.error("--endpoints and --model: give both, or none")
    if not args.endpoints and args.engines == "vllm" and not os.environ.get(PYTHON_ENV):
        parser.error(f"{PYTHON_ENV} names no Python with vLLM (or give --engines kvmesh)")
    if args.engine_tokens < CONTEXT:
        parser.error(f"--engine-tokens={args.engine_tokens}: an engine must hold one context of {CONTEXT}")
    return args


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = Path(args.model) if args.model else make_checkpoint(
            folder / "model", family="qwen3", vocab_size=VOCAB, hidden_size=args.hidden,
            intermediate_size=3 * args.hidden, num_hidden_layers=4, num_attention_heads=args.hidden // 64,
            num_key_value_heads=2, head_dim=64, max_position_embeddings=CONTEXT,
        )  # fmt: skip
        starts = {"vllm": vllm_engines, "kvmesh": kvmesh_engines}[args.engines]
        with (running_engines if args.endpoints else starts)(model, folder, args) as engines:
            rounds = measure(engines, model, folder, args)
    show(rounds)
    if args.json:
        told = {
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "load": os.getloadavg(),
            "args": vars(args),
            "rounds": rounds,
        }
        Path(args.json).write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()

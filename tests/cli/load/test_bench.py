"""`kvmesh bench`, `replay` and `apikey`: what they send and print. Their gateway follows a script; test_shared_up has a
real one."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvmesh.cli.app import app
from kvmesh.cli.load import replay
from kvmesh.cli.load.bench import BenchWorkload, UniformLengths
from kvmesh.cli.load.load import LoadOutcome
from kvmesh.errors import ConfigError
from kvmesh.services.gateway.api_keys import KeyRing
from kvmesh.sim.workloads import trace
from kvmesh.sim.workloads.trace import TokenMaker, TraceRequest
from tests.support.scripted_http import Gateway, Reply, answer, gateway

Invoke = Callable[..., Result]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Invoke:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    return lambda *args: CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture
def served() -> Iterator[Gateway]:
    """A scripted gateway on a thread of its own: commands run loops of theirs."""
    found: list[Gateway] = []
    ready, done = threading.Event(), threading.Event()

    async def serve() -> None:
        async with gateway() as one:
            found.append(one)
            ready.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(30)
    try:
        yield found[0]
    finally:
        done.set()
        thread.join(30)


# ── what bench sends ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("text", "low", "high"), [("5", 5, 5), ("5:9", 5, 9), ("7:7", 7, 7)])
def test_lengths(text: str, low: int, high: int) -> None:
    assert UniformLengths.parse("input_tokens", text) == UniformLengths(low, high)


@pytest.mark.parametrize("text", ["", "a", "0", "9:5", "5:", ":5", "1.5", "-3", "1:2:3"])
def test_lengths_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match="input_tokens=") as caught:
        UniformLengths.parse("input_tokens", text)
    assert repr(text) in caught.value.message


def sent(work: BenchWorkload, count: int, name: str = "") -> list[tuple[tuple[int, ...], int, float | None]]:
    maker = TokenMaker(2040, work.seed)
    return [(tuple(job.prompt()), job.max_tokens, job.at_s) for job in work.jobs(maker, count, name)]


def test_requests_depend_on_the_seed_alone() -> None:
    work = BenchWorkload(
        input=UniformLengths(5, 50), output=UniformLengths(1, 9), prefix_share=0.5, prefixes=3, rate=7.0, seed=4
    )
    assert sent(work, 30) == sent(work, 40)[:30]
    assert sent(work, 30) != sent(BenchWorkload(**{**vars(work), "seed": 5}), 30)
    lengths = {len(prompt) for prompt, _, _ in sent(work, 200)}
    assert min(lengths) >= 5 and max(lengths) <= 50 and len(lengths) > 20
    assert {tokens for _, tokens, _ in sent(work, 200)} == set(range(1, 10))


def test_arrivals_are_poisson_with_the_rate() -> None:
    times = [
        at
        for _, _, at in sent(BenchWorkload(input=UniformLengths(1, 1), output=UniformLengths(1, 1), rate=20.0), 4000)
        if at
    ]
    gaps = [b - a for a, b in itertools.pairwise([0.0, *times])]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(1 / 20, rel=0.06)
    assert spread == pytest.approx(mean, rel=0.06), "of an exponential distribution both are equal"


@pytest.mark.parametrize(("share", "shared"), [(0.0, 0), (0.8, 32), (1.0, 40)])
def test_the_share_of_each_prompt_that_is_common(share: float, shared: int) -> None:
    work = BenchWorkload(input=UniformLengths(40, 40), output=UniformLengths(1, 1), prefix_share=share, prefixes=2)
    prompts = [prompt for prompt, _, _ in sent(work, 30)] + [prompt for prompt, _, _ in sent(work, 5, "warmup")]
    assert len({prompt[:shared] for prompt in prompts}) == (2 if shared else 1)
    if shared < 40:
        assert len({prompt[shared : shared + 8] for prompt in prompts}) == 35, "the rest is nobody else's"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prefix_share": 1.5}, "prefix_share=1.5: must be between 0 and 1"),
        ({"prefix_share": math.nan}, "prefix_share=nan"),
        ({"prefixes": 0}, "prefixes=0"),
        ({"rate": 0.0}, "rate=0: must be over 0"),
        ({"rate": math.nan}, "rate=nan"),
        ({"rate": math.inf}, "rate=inf"),
    ],
)
def test_workloads_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        BenchWorkload(**{"input": UniformLengths(1, 1), "output": UniformLengths(1, 1), **changes})


# ── what bench prints ─────────────────────────────────────────────────────────────────────────────


def test_bench_prints_figures_and_their_json(invoke: Invoke, served: Gateway, tmp_path: Path) -> None:
    refusal = Reply(status=429, error={"code": "overloaded", "message": "come later"})

    def script(body: dict[str, Any], index: int) -> Reply:
        return refusal if index == 7 else Reply(answer(4, cached=5, prompt=10))

    served.script = script
    done = invoke(
        "bench", "--url", served.url, "--requests", 10, "--warmup", 2, "--input-tokens", 10, "--output-tokens", 4,
        "--slo-ttft", 60_000, "--slo-tbt", 60_000, "--json", tmp_path / "r.json", "--api-key", "k",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    for words in (
        "10 sent in", "9 answered", "1 refused (429)", "1 × 429 overloaded", "come later", "90.0% of those sent",
        "50.0% of prompt tokens came from the cache (45 of 90)",
    ):  # fmt: skip
        assert words in done.output
    for name in ("TTFT", "TBT", "ITL", "TPOT", "E2E", "p50 +p90 +p99", "output tokens/s"):
        assert re.search(name, done.output), name
    told = json.loads((tmp_path / "r.json").read_text())
    assert told["requests"] == {"sent": 10, "answered": 9, "refused_429": 1, "failed": 0}
    assert told["goodput"]["share"] == 0.9
    assert "cached_tokens" in told["definitions"]["hit_rate"]
    assert len(served.asked) == 12
    assert len({body["cache_salt"] for body in served.asked}) == 1, "the warm-up warms what is measured"
    assert all("authorization: bearer k" in head.lower() for head in served.headers)


def test_runs_share_no_cache_unless_asked_to(invoke: Invoke, served: Gateway) -> None:
    for more in ((), (), ("--reuse-cache",)):
        assert invoke("bench", "--url", served.url, "--requests", 1, *more).exit_code == 0
    salts = [body.get("cache_salt") for body in served.asked]
    assert salts[2] is None
    assert len(set(salts)) == 3
    assert served.asked[0]["prompt"] == served.asked[1]["prompt"]


def test_json_to_standard_output_is_all_that_is_there(invoke: Invoke, served: Gateway) -> None:
    done = CliRunner().invoke(app, ["bench", "--url", served.url, "--requests", "2", "--json", "-"])
    assert json.loads(done.stdout)["requests"]["answered"] == 2
    assert "TTFT" in done.stderr


def test_nothing_answered_is_a_failure(invoke: Invoke, served: Gateway) -> None:
    served.script = lambda body, index: Reply(status=503, error={"code": "unavailable", "message": "no"})
    done = invoke("bench", "--url", served.url, "--requests", 3)
    assert done.exit_code == 1
    assert "3 × 503 unavailable" in done.output
    warm = invoke("bench", "--url", served.url, "--requests", 3, "--warmup", 2)
    assert "error: no request of the warm-up was answered: no" in warm.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["bench", "--rate", "1", "--concurrency", "2"], "concurrency=2: give --rate or --concurrency, not both"),
        (["bench", "--rate", "0"], "rate=0: must be over 0"),
        (["bench", "--input-tokens", "9:5"], "input_tokens='9:5': must be at least 1"),
        (["bench", "--output-tokens", "x"], "output_tokens='x': must be N or LOW:HIGH"),
        (["bench", "--input-tokens", "2040"], "exceeds the context of 2048"),
        (["bench", "--model", "big"], "model='big': http://127.0.0.1"),
        (["bench", "--json", "/no/such/r.json"], "json='/no/such/r.json': is no file that can be written"),
        (["replay", "/no/such"], "trace='/no/such': No such file"),
        (["replay", "T", "--speed", "fast"], "speed='fast': must be a number over 0"),
        (["replay", "T", "--speed", "-1"], "speed='-1'"),
        (["replay", "T", "--speed", "nan"], "speed='nan'"),
        (["replay", "T", "--speed", "2", "--concurrency", "2"], "concurrency=2: only with --speed inf"),
        (["replay", "T", "--scale-tokens", "1/0"], "scale_tokens='1/0'"),
        (["replay", "T", "--scale-tokens", "2"], "scale_tokens='2': must be over 0 and at most 1"),
        (["replay", "T", "--scale-tokens", "1/1024"], "makes blocks of 0.5 tokens from 512"),
        (["replay", "T", "--too-long", "drop"], "too_long='drop': choose one of cut, skip"),
        (["replay", "T", "--from", "99"], "no request lies in this slice; its requests are of seconds 0 to"),
        (["replay", "T", "--block-tokens", "256"], "do not fit input_length="),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_line(invoke: Invoke, served: Gateway, tmp_path: Path, args: list[str], message: str) -> None:
    args = [str(write_trace(tmp_path)) if arg == "T" else arg for arg in args]
    done = invoke(*args, "--url", served.url)
    assert done.exit_code == 2, done.output
    (line,) = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert message in line
    assert not served.asked


def test_without_a_mesh_or_a_vocabulary(invoke: Invoke, served: Gateway) -> None:
    assert "nothing answers at http://127.0.0.1:1" in invoke("bench", "--url", "http://127.0.0.1:1").output
    assert "no mesh was started here yet" in invoke("bench").output
    served.cards = [{"id": "other"}]
    done = invoke("bench", "--url", served.url)
    assert "vocab: this gateway does not tell the size of the vocabulary; give --vocab N" in done.output
    assert invoke("bench", "--url", served.url, "--vocab", 100, "--requests", 1).exit_code == 0
    assert max(served.asked[-1]["prompt"]) < 100
    served.cards = []
    assert "serves no model yet" in invoke("bench", "--url", served.url).output


# ── replay ────────────────────────────────────────────────────────────────────────────────────────

ROWS = [
    (0, 1030, 5, [0, 1, 2]),
    (0, 1536, 64, [0, 1, 3]),
    (500, 1030, 5, [0, 1, 2]),
    (2000, 700, 1, [4, 5]),
    (9000, 120_000, 1, list(range(6, 241))),
]


def write_trace(folder: Path) -> Path:
    file = folder / "trace.jsonl"
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    file.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in ROWS))
    return file


def test_replay_sends_equal_prefixes_in_order_and_prints_three_hit_rates(
    invoke: Invoke, served: Gateway, tmp_path: Path
) -> None:
    served.script = lambda body, index: Reply(
        answer(1, cached=64 if index in (1, 2) else 0, prompt=len(body["prompt"]))
    )
    target = tmp_path / "r.json"
    done = invoke(
        "replay",
        write_trace(tmp_path),
        "--url",
        served.url,
        "--speed",
        "inf",
        "--scale-tokens",
        "1/16",
        "--json",
        target,
    )
    assert done.exit_code == 0, done.output
    prompts = [body["prompt"] for body in served.asked]
    assert [len(prompt) for prompt in prompts] == [64 + 1, 96, 64 + 1, 32 + 11, 63 * 32]
    assert [body["max_tokens"] for body in served.asked] == [1, 4, 1, 1, 1]
    assert prompts[0] == prompts[2]
    assert prompts[1][:64] == prompts[0][:64]
    assert prompts[1][64] != prompts[0][64]
    assert len({prompt[0] for prompt in prompts}) == 3
    told = json.loads(target.read_text())
    assert told["trace"] | {"file": ""} == {
        "file": "", "speed": None, "from_s": 0.0, "to_s": None, "scale_tokens": "1/16", "trace_block_tokens": 512,
        "block_tokens": 32, "seed": 0, "requests": 5, "cut": 1, "skipped": 0, "reuse_cache": False, "concurrency": 1,
    }  # fmt: skip
    tokens, hits = sum(map(len, prompts)), told["hit_rates"]
    assert hits["live"] == {
        "by_blocks": round(4 / 74, 4), "by_tokens": round(128 / tokens, 4), "blocks": 74, "hit_blocks": 4,
        "tokens": tokens, "hit_tokens": 128,
    }  # fmt: skip
    assert (hits["ideal"]["hit_blocks"], hits["ideal"]["hit_tokens"]) == (2 + 3, 64 + 65)
    assert (hits["reachable"]["hit_tokens"], hits["reachable"]["block_tokens"]) == (128, 64)
    assert set(hits["definitions"]) == {"live.by_tokens", "live.by_blocks", "ideal", "reachable"}
    for words in ("a hash id is 32 tokens (x 1/16)", "1 cut", "by blocks", "by tokens", "reachable", "unbounded cache"):
        assert words in done.output


def test_replay_leaves_out_what_is_too_long_when_told_to(invoke: Invoke, served: Gateway, tmp_path: Path) -> None:
    done = invoke(
        "replay", write_trace(tmp_path), "--url", served.url, "--speed", "0", "--too-long", "skip", "--max-output", 2
    )
    assert done.exit_code == 0, done.output
    assert "1 left out" in done.output
    assert [(len(body["prompt"]), body["max_tokens"]) for body in served.asked] == [
        (1030, 2), (1536, 2), (1030, 2), (700, 1),
    ]  # fmt: skip


def requests() -> list[TraceRequest]:
    return [TraceRequest(i, float(at), n, out, tuple(ids)) for i, (at, n, out, ids) in enumerate(ROWS)]


@pytest.mark.parametrize(
    ("speed", "times"), [(1.0, [0, 0, 0.5, 2, 9]), (4.0, [0, 0, 0.125, 0.5, 2.25]), (math.inf, [None] * 5)]
)
def test_the_times_of_a_trace(speed: float, times: list[float | None]) -> None:
    made = trace.fit(requests(), trace.TraceShape()).made
    jobs = replay.jobs_of(made, TokenMaker(2040), 512, speed)
    assert [job.at_s for job in jobs] == times
    later = replay.jobs_of(made[2:], TokenMaker(2040), 512, speed)
    assert later[0].at_s in (0.0, None), "a slice begins at once"


@pytest.mark.parametrize(("text", "speed"), [("2", 2.0), ("0.5", 0.5), ("inf", math.inf), ("0", math.inf)])
def test_speeds(text: str, speed: float) -> None:
    assert replay.speed_of(text) == speed


@pytest.mark.parametrize(("text", "scale"), [("1", Fraction(1)), ("1/32", Fraction(1, 32)), ("0.25", Fraction(1, 4))])
def test_scales(text: str, scale: Fraction) -> None:
    assert replay.scale_of(text) == scale


def test_what_was_refused_counts_in_no_live_rate_and_what_was_not_sent_in_none() -> None:
    made = trace.fit(requests()[:4], trace.TraceShape()).made
    outcomes = [
        LoadOutcome(0, 0.0, status=200, prompt_tokens=1030, cached_tokens=0),
        LoadOutcome(1, 0.0, status=429, code="overloaded", prompt_tokens=1536),
        LoadOutcome(2, 0.0, status=200, prompt_tokens=1030, cached_tokens=1023),
    ]
    found = replay.hit_rates(made, outcomes, trace.TraceShape(), TokenMaker(2040), 64)
    assert (found["live"]["blocks"], found["live"]["hit_blocks"], found["live"]["tokens"]) == (6, 1, 2060)
    assert (found["ideal"]["blocks"], found["ideal"]["hit_blocks"]) == (9, 2 + 3)
    assert found["reachable"]["hit_tokens"] == 1024 + 1024
    assert "reachable" not in replay.hit_rates(made, outcomes, trace.TraceShape(), TokenMaker(2040), 0)


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────


def test_keys_are_added_to_a_file_that_holds_none_of_them(invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    keys = {}
    for name in ("alice", "bob"):
        done = CliRunner().invoke(app, ["apikey", name, "--file", str(file)])
        assert done.exit_code == 0, done.output
        keys[name] = done.stdout.strip()
    assert all(key not in file.read_text() for key in keys.values())
    assert file.stat().st_mode & 0o077 == 0
    ring = KeyRing.parse(file.read_text())
    for name, key in keys.items():
        assert ring.tenant(f"Bearer {key}".encode()).name == name
    again = invoke("apikey", "bob", "--file", file)
    assert again.exit_code == 2
    assert "name is used twice" in again.output
    assert len(KeyRing.parse(file.read_text()).entries) == 2
    assert "error: " in invoke("apikey", "no name").output
    printed = CliRunner().invoke(app, ["apikey", "carol"]).stdout
    key, _, entry = printed.partition("\n")
    assert KeyRing.parse(entry).tenant(f"Bearer {key}".encode()).name == "carol"


def test_an_unwritable_file_of_keys(invoke: Invoke, tmp_path: Path) -> None:
    done = invoke("apikey", "a", "--file", tmp_path / "none" / "keys.toml")
    assert done.exit_code == 2
    assert "keys.toml': No such file or directory" in done.output

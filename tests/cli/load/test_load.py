"""The load generator against a scripted gateway, and the figures made of what it saw."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from rich.console import Console

from kvmesh.cli.load import report
from kvmesh.cli.load.load import Generator, Job, LoadOutcome
from kvmesh.cli.load.report import LoadSlo
from kvmesh.cli.load.target import LoadTarget
from tests.support.scripted_http import DONE, Gateway, Reply, answer, frame, gateway, usage


def target(of: Gateway, **more: Any) -> LoadTarget:
    return LoadTarget(url=of.url, model="tiny", context_tokens=2048, vocab_size=2040, block_tokens=64, **more)


def jobs(count: int, max_tokens: int = 3, at_s: float | None = None) -> list[Job]:
    return [Job(i, lambda: [5] * 10, max_tokens, at_s) for i in range(count)]


async def test_an_answer_is_measured() -> None:
    async with gateway() as one:
        one.script = lambda body, index: Reply(answer(4, cached=6))
        generator = Generator(target(one, headers={"Authorization": "Bearer k"}), salt="s")
        await generator.run(jobs(1, 4))
        (got,) = generator.results
    assert got.ok
    assert (got.prompt_tokens, got.completion_tokens, got.cached_tokens, got.request_id) == (10, 4, 6, "cmpl-1")
    assert 0 < got.ttft_s <= got.total_s
    assert 1 <= len(report.intervals(got)) == 3
    assert sum(got.gaps) <= got.total_s - got.ttft_s + 1e-6
    assert one.asked == [
        {
            "model": "tiny", "prompt": [5] * 10, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}, "cache_salt": "s",
        }
    ]  # fmt: skip
    assert "authorization: bearer k" in one.headers[0].lower()


@pytest.mark.parametrize(
    ("reply", "status", "code"),
    [
        (Reply(status=429, error={"code": "overloaded", "message": "later"}), 429, "overloaded"),
        (Reply(status=503, error={"code": None, "type": "server_error", "message": "no"}), 503, "server_error"),
        (Reply([frame(), b'data: {"error": {"code": "handoff_lost", "message": "gone"}}\n\n']), 200, "handoff_lost"),
        (Reply([frame(), frame()]), 200, "broken_off"),
        (Reply([frame()], cut=True), 200, "unreachable"),
        (Reply([frame()], hang=True), 200, "timeout"),
        (Reply([b"data: {oops\n\n"]), 200, "not_understood"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_every_way_to_fail_has_a_name(reply: Reply, status: int, code: str) -> None:
    async with gateway() as one:
        one.script = lambda body, index: reply
        generator = Generator(target(one), timeout_s=0.5)
        await generator.run(jobs(1))
        (got,) = generator.results
    assert (got.status, got.code) == (status, code)
    assert generator.in_flight == 0


async def test_nothing_listens() -> None:
    generator = Generator(
        LoadTarget(url="http://127.0.0.1:1", model="m", context_tokens=0, vocab_size=16, block_tokens=0)
    )
    await generator.run(jobs(2))
    assert [(one.status, one.code) for one in generator.results] == [(0, "unreachable")] * 2


async def test_a_closed_loop_keeps_its_bound_and_order() -> None:
    async with gateway() as one:
        one.crowd = 3
        generator = Generator(target(one), concurrency=3)
        await generator.run([Job(i, lambda i=i: [i], 2) for i in range(12)])  # type: ignore[misc]
        assert one.most == 3
        single = Generator(target(one), concurrency=1)
        one.asked.clear()
        await single.run([Job(i, lambda i=i: [i], 2) for i in range(6)])  # type: ignore[misc]
        assert [body["prompt"] for body in one.asked] == [[i] for i in range(6)]
    assert sorted(got.index for got in generator.results) == list(range(12))


async def test_jobs_wait_for_their_times_and_not_for_each_other() -> None:
    async with gateway() as one:
        one.script = lambda body, index: Reply([frame()], hang=True) if index == 0 else Reply(answer(1))
        generator = Generator(target(one), timeout_s=0.4)
        await generator.run([*jobs(1, at_s=0.0), Job(1, lambda: [1], 1, 0.05)])
    first = next(got for got in generator.results if got.index == 1)
    assert first.ok
    assert first.sent_s >= 0.05
    assert generator.results[0] is first, "it did not wait for the one that hung"


async def test_stop_drops_what_is_in_flight_and_keeps_what_there_is() -> None:
    async with gateway() as one:
        one.script = lambda body, index: Reply([frame()], hang=True) if index == 2 else Reply(answer(1))
        generator = Generator(target(one), concurrency=1)
        running = asyncio.create_task(generator.run(jobs(100)))
        await asyncio.wait_for(one.hanging.wait(), 20)
        generator.stop()
        await asyncio.wait_for(running, 30)
    assert len(generator.results) == 2
    assert generator.dropped == 1
    assert generator.in_flight == 0


async def test_nothing_is_sent_after_the_duration() -> None:
    def endless() -> Any:
        while True:
            yield jobs(1, 1)[0]

    async with gateway() as one:
        generator = Generator(target(one), concurrency=2)
        await asyncio.wait_for(generator.run(endless(), duration_s=0.2), 20)
    assert generator.results
    assert all(got.ok for got in generator.results)


async def test_tokens_that_come_together_and_tokens_without_text() -> None:
    last = frame("", None) + frame("", "length") + usage(10, 5, 0) + DONE
    async with gateway() as one:
        one.script = lambda body, index: Reply([frame("a") + frame("b") + frame("c"), frame("d"), last])
        generator = Generator(target(one))
        await generator.run(jobs(1, 5))
        (got,) = generator.results
    assert len(got.gaps) == 4
    assert len(report.intervals(got)) == 4
    assert sum(gap == 0 for gap in got.gaps) >= 2


# ── figures ───────────────────────────────────────────────────────────────────────────────────────


def outcome(**changes: Any) -> LoadOutcome:
    told = {"index": 0, "sent_s": 0.0, "status": 200, "ttft_s": 0.1, "total_s": 0.5, "completion_tokens": 1}
    return LoadOutcome(**{**told, **changes})


@pytest.mark.parametrize(
    ("gaps", "tokens", "tbt"),
    [
        ([], 1, None),
        ([0.3], 2, 0.3),
        ([0.1, 0.2, 0.3], 4, 0.3),
        ([0.1] * 10 + [0.5], 12, 0.3),  # 11 intervals: the longest two
        ([0.2] * 20, 21, 0.2),
        ([0.4], 3, 0.4),  # two tokens came together: one interval is 0
        ([0.4], 31, 0.4 / 3),  # 30 intervals, 29 of them 0: the longest three
        ([0.1, 0.9], 2, 0.1),  # text that came after the last token is no interval
    ],
)
def test_tbt_is_the_mean_of_the_longest_tenth(gaps: list[float], tokens: int, tbt: float | None) -> None:
    assert report.tbt_s(outcome(gaps=gaps, completion_tokens=tokens)) == (None if tbt is None else pytest.approx(tbt))


MIXED = [
    outcome(prompt_tokens=100, cached_tokens=64, completion_tokens=3, gaps=[0.01, 0.02]),
    outcome(prompt_tokens=100, completion_tokens=2, gaps=[0.2]),
    outcome(prompt_tokens=100, ttft_s=2.0, total_s=3.0),
    outcome(status=429, code="overloaded", prompt_tokens=100, message="come [later]"),
    outcome(status=0, code="unreachable"),
]


@pytest.mark.parametrize(
    ("slo", "kept"),
    [
        (LoadSlo(), 3),
        (LoadSlo(ttft_ms=100), 2),
        (LoadSlo(ttft_ms=99.9), 0),
        (LoadSlo(tbt_ms=20), 2),
        (LoadSlo(ttft_ms=100, tbt_ms=20), 1),
        (LoadSlo(ttft_ms=3000, tbt_ms=1), 1),
    ],
)
def test_goodput_counts_requests_within_both(slo: LoadSlo, kept: int) -> None:
    assert sum(slo.kept(one) for one in MIXED) == kept
    told = report.summarise(MIXED, 2.0, slo)
    if slo:
        assert told["goodput"] == {"requests_per_s": kept / 2, "share": kept / 5, "requests": kept}
    else:
        assert "goodput" not in told


def test_a_summary_of_all_sorts() -> None:
    told = json.loads(json.dumps(report.summarise(MIXED, 2.0, LoadSlo())))
    assert told["requests"] == {"sent": 5, "answered": 3, "refused_429": 1, "failed": 1}
    assert told["errors"] == {"429 overloaded": 1, "- unreachable": 1}
    assert told["hit_rate"] == round(64 / 300, 4), "the refused one's prompt does not count"
    assert told["tokens"] == {"prompt": 300, "cached": 64, "output": 6}
    assert told["throughput"]["output_tokens_per_s"] == 3.0
    assert told["itl_ms"]["max"] == 200
    assert [one["ttft_ms"] for one in told["slowest"]] == sorted((o.ttft_s * 1000 for o in MIXED if o.ok), reverse=True)
    assert set(told["ttft_ms"]) == {"p50", "p90", "p99", "mean", "max"}
    assert set(report.DEFINITIONS) == set(told["definitions"]) >= {"tbt_ms", "goodput", "hit_rate"}


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("outcomes", [MIXED, MIXED[3:], []], ids=["mixed", "all failed", "none"])
def test_the_report_fits_the_screen(outcomes: list[LoadOutcome], width: int) -> None:
    out = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    out.print(report.show(report.summarise(outcomes, 2.0, LoadSlo(500, 50)), [("more", "text")] if outcomes else []))
    text = out.export_text()
    out.file.close()
    assert max(map(len, text.splitlines())) <= width
    if not outcomes:
        assert "no request was sent" in text
        return
    assert "1 × 429 overloaded" in text
    assert "come [later]" in text
    assert ("TTFT  " in text) == (outcomes is MIXED)
    assert "goodput" in text
    assert text.count("kvmesh explain ") == (3 if outcomes is MIXED else 0)

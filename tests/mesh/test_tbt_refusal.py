"""Decode refuses a request for the TBT that it predicts, and the request is answered elsewhere: the whole way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvmesh.cli import collect
from kvmesh.cli.trace import find_trace, read_spans
from kvmesh.errors import InvalidRequest
from kvmesh.services.conductor.records.explain import AVOIDED
from kvmesh.services.decode.step_times import ENOUGH
from tests.support.mesh.client import Answer, prompt, until
from tests.support.mesh.direct import Direct
from tests.support.mesh.harness import Running

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(240)]

VOCAB, TOKENS, LENGTH = 2040, 2 * ENOUGH, 90
ROWS, HELD_MS, ROW_TOKENS = 3, 1, 1900  # rows that no step of a CPU is short enough for, and that stay
STAY_S = 200.0  # their deadline, on a machine that does other things, too
FULL, ROOMY = "decode-0", "decode-1"


async def test_what_decode_refuses_for_its_rows_is_answered_elsewhere(
    mesh: Callable[..., AbstractAsyncContextManager[Running]], demo_path: Path, tmp_path: Path
) -> None:
    """The rows at `FULL` came past this conductor, so it does not know what TBT they are promised: only decode can
    refuse for them. Turns make the conductor place at both instances, whatever it thinks of their load."""
    log = tmp_path / "decisions.jsonl"
    flags = {"conductor": {"policy": "round_robin", "decision_log": str(log)}}
    async with mesh(demo_path, prefill=1, decode=2, flags=flags) as running:
        for name in running.instances():
            await running.ready(name)
        direct = await Direct.of(running)
        prompts = [prompt(seed, LENGTH + seed, VOCAB) for seed in (1, 2)]
        # They show `FULL` how long its steps are, too: alone, nobody is refused.
        right = [await direct.generate(one, TOKENS, prefill="prefill-0", decode=FULL) for one in prompts]
        rows = await with_rows(direct)
        try:
            answers = [await running.client.generate(one, TOKENS) for one in prompts]
            assert not any(row.done() for row in rows), "they stayed for the whole of it"
        finally:
            for row in rows:
                row.cancel()
            await asyncio.gather(*rows, return_exceptions=True)
        assert [one.error for one in (*right, *answers)] == [None] * 4
        assert [one.tokens for one in answers] == [one.tokens for one in right], "at the other one, the right tokens"
        told = [await explained(running, one) for one in answers]
        assert [one["placement"]["decode"]["instance_id"] for one in told] == [ROOMY] * 2
        again = [one["request_id"] for one in told if one["attempt"] == 1]
        assert again, "the conductor placed at both, so one of the two was refused"
        for one in told:
            if one["attempt"]:
                verdicts = {c["instance"]["instance_id"]: c["verdict"] for c in one["candidates"]}
                assert verdicts[FULL] == AVOIDED
        await running.settled()
        for request_id in again:
            await traced(running, request_id)
        logged = "".join(file.read_text() for file in running.mesh.run_dir.glob("logs/gateway*"))
        for request_id in again:
            assert f"request {request_id}: attempt 0 failed, placing it anew: predicted TBT" in logged
    lines = [msgspec.json.decode(line) for line in log.read_bytes().splitlines()]
    for request_id in again:
        decided(lines, request_id)


async def with_rows(direct: Direct) -> list[asyncio.Task[Answer]]:
    """Rows at `FULL` whose TBT is longer than they may have; all of them decode."""
    begun = [asyncio.Event() for _ in range(ROWS)]
    rows = [
        asyncio.create_task(
            direct.generate(
                prompt(10 + n, 64, VOCAB), ROW_TOKENS,
                prefill="prefill-0", decode=FULL, held_tbt_ms=HELD_MS, begun=begun[n], timeout_s=STAY_S,
            )
        )
        for n in range(ROWS)
    ]  # fmt: skip
    async with asyncio.timeout(STAY_S):
        await asyncio.gather(*(one.wait() for one in begun))
    return rows


async def explained(running: Running, answer: Answer) -> dict[str, Any]:
    """The conductor's account of its last placement."""
    told = await collect.explained(running.mesh.addresses["conductor"], answer.request_id)
    assert told is not None
    return told


async def traced(running: Running, request_id: str) -> None:
    """Its trace has both attempts, and the first one says why it was refused."""

    async def both() -> list[dict[str, Any]]:
        try:
            spans = find_trace(list(read_spans(running.mesh.run_dir / "traces")), request_id)
        except InvalidRequest:  # spans are written a little later
            return []
        tries = [span for span in spans if span["name"] == "kvmesh.request"]
        return tries if len(tries) == 2 else []

    first, second = sorted(await until(both, f"both attempts of {request_id}"), key=lambda span: span["start_ns"])
    assert f"over the SLO of {HELD_MS} ms" in first["status"]
    assert second["status"] == ""
    assert [span["attributes"]["kvmesh.attempt"] for span in (first, second)] == [0, 1]
    assert [span["instance"] for span in (first, second)] == [FULL, ROOMY]


def decided(lines: list[dict[str, Any]], request_id: str) -> None:
    """The decision log has both decisions, and what became of the first."""
    first, second = [one for one in lines if one["kind"] == "decision" and one["event"]["request_id"] == request_id]
    assert [one["event"]["avoid"] for one in (first, second)] == [[], [FULL]]
    assert [one["answer"]["placed"]["decode"]["instance_id"] for one in (first, second)] == [FULL, ROOMY]
    ends = {
        one["attempt"]: (one["outcome"], one["error"])
        for one in lines
        if one["kind"] == "outcome" and one["request_id"] == request_id
    }
    assert ends[0] == ("refused", "overloaded")

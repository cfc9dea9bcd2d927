"""`kvmesh profile` on a live mesh: under load it shows where steps spend their time, without load it says so, and
answers stay the same."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.mesh.harness import Running

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]

ROWS, TOKENS = 3, 24  # short answers: one ends while spans are waited for, however slow steps are


def prompt(seed: int) -> list[int]:
    return [20 + (31 * seed + 7 * i) % 200 for i in range(200)]


async def profiled(running: Running, *arguments: str) -> tuple[int, str, str]:
    """Exit status, output and errors of the command."""
    command = [sys.executable, "-m", "kvmesh.cli", "profile", *arguments]
    if not any(":" in one for one in arguments):
        command += ["--conductor", running.mesh.addresses["conductor"]]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    try:
        out, errors = await asyncio.wait_for(process.communicate(), 120)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return process.returncode, out.decode(), errors.decode()


@asynccontextmanager
async def load(running: Running) -> AsyncIterator[list[list[int]]]:
    """A few answers at a time, again and again; on leaving, those that ended have all been the same as the first."""
    expected = [(await running.client.generate(prompt(row), TOKENS)).tokens for row in range(ROWS)]
    over = asyncio.Event()

    async def ask(row: int) -> None:
        while not over.is_set():
            answer = await running.client.generate(prompt(row), TOKENS)
            assert answer.error is None, answer.error
            assert answer.tokens == expected[row]

    tasks = [asyncio.create_task(ask(row)) for row in range(ROWS)]
    try:
        yield expected
    finally:
        over.set()
        await asyncio.gather(*tasks)


async def test_steps_under_load(small_mesh: Running, tmp_path: Path) -> None:
    picture = tmp_path / "steps.json"
    traces = str(small_mesh.mesh.run_dir / "traces")
    async with load(small_mesh):
        code, out, errors = await profiled(
            small_mesh, "decode-0", "--steps", "12", "--timeout", "60", "--json", "--out", str(picture),
            "--trace-dir", traces,
        )  # fmt: skip
        assert code == 0, errors
        code, table, errors = await profiled(small_mesh, small_mesh.mesh.addresses["decode-0"], "--timeout", "60")
        assert code == 0, errors
    told = json.loads(out)
    assert told["instance"] == "decode-0"
    (rank,) = told["ranks"]
    assert rank["steps"] == 12
    assert rank["rows"] > 0
    shares = {one["name"]: one["step_share"] for one in rank["functions"]}
    assert sum(shares.values()) == pytest.approx(1, abs=0.01)
    assert {"norm", "projections", "write", "attention", "mlp", "host", "head"} <= shares.keys()
    assert rank["kv_read_bytes"] > rank["kv_written_bytes"] > 0
    assert "attention" in table
    assert "bound by" in table
    check_picture(json.loads(picture.read_text())["traceEvents"])


def check_picture(events: list[dict[str, Any]]) -> None:
    processes = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    steps = [event for event in events if event["name"] == "step"]
    assert len(steps) == 12
    spans = [event for event in events if event["ph"] == "X" and event["pid"] == processes["requests: decode-0"]]
    assert spans, "the requests' spans are missing"
    begin, end = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
    assert any(span["ts"] < end and span["ts"] + span["dur"] > begin for span in spans), "not on one clock"
    for piece in (event for event in events if event["ph"] == "X" and event["pid"] == processes["decode-0"]):
        inside = (one["ts"] - 0.01 <= piece["ts"] <= one["ts"] + one["dur"] + 0.01 for one in steps)
        assert any(inside), piece


async def test_without_load_and_beside_another(small_mesh: Running) -> None:
    code, _, errors = await profiled(small_mesh, "decode-0", "--timeout", "0.5")
    assert code == 1
    assert "decode-0 ran no step within 0.5 s" in errors
    both = [asyncio.create_task(profiled(small_mesh, "prefill-0", "--steps", "1", "--timeout", "60")) for _ in range(2)]
    refused, first = await asyncio.wait(both, timeout=50, return_when=asyncio.FIRST_COMPLETED)
    ((code, _, errors),) = (task.result() for task in refused)
    assert (code, "one profile at a time" in errors) == (1, True), errors
    # The other one goes on, and sees what comes.
    assert (await small_mesh.client.generate(prompt(77), 2)).error is None
    code, out, errors = await first.pop()
    assert code == 0, errors
    assert "prompt tokens" in out


async def test_an_unknown_name_is_answered_with_those_that_are_there(small_mesh: Running) -> None:
    code, _, errors = await profiled(small_mesh, "decode-9")
    assert code == 1
    assert "instance='decode-9'" in errors
    assert "decode-0, prefill-0" in errors

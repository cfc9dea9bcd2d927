"""A mesh whose last instance is gone: requests are held, an instance starts, all are answered in the order in which
they came; and the conductor says when nobody wants an instance any more."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import httpx
import pytest

from kvmesh.cli.scale import scale_hints
from kvmesh.cli.up import mesh as supervisor
from tests.support.mesh.client import gateway_status, until
from tests.support.mesh.harness import Running

pytestmark = [pytest.mark.mesh, pytest.mark.long, pytest.mark.timeout(240)]

REQUESTS = 20
ABSENT_S = 8.0  # before the supervisor starts it again: the gateway has noticed by then


def placed(log: Path) -> list[str]:
    """Clients' names of the requests that were placed, in this order."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
    names = [line["event"]["request_id"] for line in lines if line["kind"] == "decision" and "placed" in line["answer"]]
    return [name.rpartition("-")[0] for name in names]


async def test_what_comes_while_nobody_is_there_is_answered_in_order_by_the_first_that_comes(
    mesh: Callable[..., AbstractAsyncContextManager[Running]],
    demo_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_FIRST_S", ABSENT_S)
    log = tmp_path / "decisions"
    flags = {
        "gateway": {"hold_requests": REQUESTS},
        "conductor": {"decision_log": str(log), "scale_to_zero_after_s": 2.0, "balance_window_ms": 500},
    }
    async with mesh(demo_path, prefill=0, decode=0, coupled=1, memory_mb=16, flags=flags) as running:

        async def wanted() -> list[int]:
            return [one.instances + one.change for one in await scale_hints(running.mesh.addresses["conductor"])]

        async def gone() -> bool:
            status = await gateway_status(running.grpc)
            return not status.model_status[0].ready

        running.kill("coupled-0")
        await until(gone, "the gateway to notice")
        assert (await gateway_status(running.grpc)).ready, "it holds requests"
        async with httpx.AsyncClient(base_url=running.http, timeout=120) as http:

            async def held(outcome: str = "") -> float:
                name = "kvmesh_gateway_hold_seconds_count" if outcome else "kvmesh_gateway_held_requests"
                labels = f',outcome="{outcome}"' if outcome else ""
                found = re.search(
                    rf'^{name}{{model="demo-model"{labels}}} (\S+)$', (await http.get("/metrics")).text, re.M
                )
                return float(found[1]) if found else 0

            async def ask(number: int) -> int:
                body = {"model": "demo-model", "prompt": [20 + number] * 40, "max_tokens": 2, "ignore_eos": True}
                headers = {"x-request-id": f"r{number}"}
                return (await http.post("/v1/completions", json=body, headers=headers)).status_code

            tasks = []
            for number in range(REQUESTS):
                tasks.append(asyncio.create_task(ask(number)))

                async def comes(count: int = number + 1) -> bool:
                    return await held() + await held("placed") == count

                await until(comes, f"request {number} in the line")
            refused = await ask(REQUESTS) if await held() == REQUESTS else 503
            assert refused == 503, "there is room for so many"
            assert await asyncio.gather(*tasks) == [200] * REQUESTS
            assert await held("placed") == REQUESTS and await held() == 0

        async def told() -> bool:
            return len(placed(log)) >= REQUESTS

        await until(told, "the log")
        assert placed(log) == [f"r{number}" for number in range(REQUESTS)]

        async def none() -> bool:
            return await wanted() == [0]

        await until(none, "none wanted")
        await running.settled()

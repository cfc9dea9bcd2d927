"""How a request went, told by decode, reaches the conductor over the wire: predictions are judged and Explain tells."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from kvmesh.cli import collect, explain
from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import conductor_pb2, conductor_pb2_grpc
from tests.support.mesh.client import until
from tests.support.mesh.harness import Running

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]
TOKENS = 24


async def status(running: Running) -> Any:
    async with connect(running.mesh.addresses["conductor"]) as channel:
        stub: Any = conductor_pb2_grpc.ConductorStub(channel)
        return await stub.GetStatus(conductor_pb2.GetConductorStatusRequest(), timeout=30)


async def told(running: Running, request_id: str) -> dict[str, Any]:
    """What Explain says once decode has reported."""
    found: dict[str, Any] = {}

    async def ended() -> bool:
        found.update(await collect.explained(running.mesh.addresses["conductor"], request_id) or {})
        return bool(found.get("ended"))

    await until(ended, f"the outcome of {request_id}")
    return found


async def test_an_outcome_arrives_and_is_explained(
    mesh: Callable[..., AbstractAsyncContextManager[Running]], demo_path: Path
) -> None:
    async with mesh(demo_path, prefill=1, decode=1, coupled=1) as running:
        for name in running.instances():
            await running.ready(name)
        for first in range(3):
            prompt = [20 + (31 * first + 7 * i) % 200 for i in range(200)]
            answer = await running.client.generate(prompt, TOKENS)
            assert answer.error is None, answer.error
            found = await told(running, answer.request_id)
            ended = found["ended"]
            assert (ended["outcome"], ended["output_tokens"]) == ("OUTCOME_DONE", len(answer.tokens))
            assert 0 < ended["ttft_us"] < ended["duration_us"]
            assert 0 < ended["mean_tbt_us"] <= ended["tbt_us"]
            assert ended["mean_tbt_us"] * (len(answer.tokens) - 1) <= ended["duration_us"]
            assert any(line.startswith("In the end: done: TTFT") for line in explain.sentences(found))
        now = await status(running)
        errors = {error.what: error for error in now.errors}
        assert {"ttft", "tbt", "prefill", "decode_step"} <= set(errors)
        assert errors["ttft"].samples == 3
        assert all(e.p50 <= e.p90 <= e.p99 for e in errors.values())
        assert now.policy and now.admission and now.balancing_threshold > 0
        await running.settled()

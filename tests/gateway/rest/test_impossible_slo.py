"""An SLO that nobody could meet: the client hears of it as of a bad request, unless the SLO is not its own."""

from __future__ import annotations

import openai
import pytest

from kvmesh.errors import InvalidRequest, KvmeshError
from tests.gateway.conftest import Mesh, MeshMaker
from tests.gateway.test_grpc import asks, error_of
from tests.support.gateway.scripted import MODEL

WHY = "no instance can serve this prompt faster than about 12 ms even when idle"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


def impossible(field: str = "ttft_slo_ms") -> KvmeshError:
    return InvalidRequest.of(field, 1, WHY)


@pytest.mark.parametrize("by_header", [False, True])
async def test_over_rest_it_is_400_with_its_field_and_nothing_to_wait_for(mesh: Mesh, by_header: bool) -> None:
    mesh.conductor.failures.append(impossible())
    body, headers = (CHAT, {"x-kvmesh-ttft-slo-ms": "1"}) if by_header else (CHAT | {"ttft_slo_ms": 1}, {})
    response = await mesh.http.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 400
    assert not {"retry-after", "retry-after-ms"} & set(response.headers)
    assert response.json()["error"] == {
        "message": f"ttft_slo_ms=1: {WHY}",
        "type": "invalid_request_error",
        "param": "ttft_slo_ms",
        "code": "invalid_request",
    }
    assert len(mesh.conductor.asked) == 1, "nobody asks again"


async def test_openais_client_does_not_try_again(mesh: Mesh) -> None:
    mesh.conductor.failures.append(impossible("tbt_slo_ms"))
    client = openai.AsyncOpenAI(base_url=f"{mesh.http.base_url}/v1", api_key="none", max_retries=3)
    with pytest.raises(openai.BadRequestError, match="even when idle"):
        await client.completions.create(model=MODEL, prompt="Hi", extra_body={"tbt_slo_ms": 1})
    assert len(mesh.conductor.asked) == 1
    await client.close()


async def test_over_grpc_it_is_an_invalid_argument(mesh: Mesh) -> None:
    mesh.conductor.failures.append(impossible())
    err = await error_of(mesh, asks(ttft_slo_ms=1))
    assert isinstance(err, InvalidRequest)
    assert (err.field, err.message, err.retry_after_ms) == ("ttft_slo_ms", f"ttft_slo_ms=1: {WHY}", 0)


async def test_an_slo_of_the_gateway_is_no_fault_of_the_request(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(ttft_slo_ms=1)
    mesh.conductor.failures.append(impossible())
    response = await mesh.http.post("/v1/chat/completions", json=CHAT)
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert response.json()["error"]["message"] == f"the gateway's own ttft_slo_ms=1: {WHY}"
    mesh.conductor.failures.append(impossible())
    assert (await mesh.http.post("/v1/chat/completions", json=CHAT | {"ttft_slo_ms": 1})).status_code == 400

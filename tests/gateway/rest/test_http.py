"""Readiness, metrics, offline documentation, what happens at the start, and the trace a request leaves."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from kvmesh.errors import CheckpointError, ConfigError
from kvmesh.services.gateway import main
from kvmesh.services.gateway.config import GatewayConfig
from kvmesh.telemetry import setup
from tests.gateway.conftest import Mesh, MeshMaker, until
from tests.support.gateway.scripted import CACHED, MODEL

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


async def test_readiness_says_why_not(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(decodes=0, wait_ready=False)

    async def look() -> Any:
        return await mesh.http.get("/ready")

    response = await until(look, lambda answer: "decode" in answer.text)
    assert response.status_code == 503
    assert response.json()["reason"] == "no decode instance of model 'tiny'"
    assert (await mesh.http.get("/health")).status_code == 200


async def test_an_instance_that_loads_is_not_ready(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvmesh.services.gateway.conductor import why_not_ready

    assert (await mesh.http.get("/ready")).json() == {"status": "ready", "models": {MODEL: {"ready": True}}}
    mesh.conductor.ready = False
    instances = (await mesh.conductor.GetStatus(None, None)).instances  # type: ignore[arg-type]
    assert why_not_ready(MODEL, True, instances) == "no decode instance is ready (decode-0: loading)"
    assert why_not_ready(MODEL, False, instances) == "no instance has registered model 'tiny'"
    assert why_not_ready("other", True, instances) == "no prefill instance of model 'other'"


async def test_a_model_that_nobody_serves_yet_is_503(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(wait_ready=False, served_name="other")
    response = await mesh.http.post("/v1/chat/completions", json=CHAT | {"model": "other"})
    assert response.status_code == 503
    assert "cannot be served yet" in response.json()["error"]["message"]
    assert "retry-after" in response.headers


async def test_metrics(mesh: Mesh) -> None:
    await mesh.http.post("/v1/chat/completions", json=CHAT)
    for text in (
        (await mesh.http.get("/metrics")).text,
        (await mesh.http.get(f"http://{mesh.told['metrics']}/metrics")).text,
    ):
        assert 'kvmesh_gateway_requests_total{outcome="stop",route="chat"}' in text
        assert "kvmesh_gateway_ttft_seconds_bucket" in text
        assert "kvmesh_gateway_tbt_seconds_bucket" in text


async def test_documentation_needs_no_network(mesh: Mesh) -> None:
    page = (await mesh.http.get("/docs")).text
    loads = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(loads) == 3
    for path in loads:
        assert not path.startswith(("http", "//"))
        assert (await mesh.http.get(f"/{path}")).status_code == 200
    assert "http" not in page.replace("http-equiv", "")
    schema = (await mesh.http.get("/openapi.json")).json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/ready"} <= schema["paths"].keys()
    for ref in set(re.findall(r'"\$ref": ?"#/([^"]+)"', json.dumps(schema))):
        found: Any = schema
        for part in ref.split("/"):
            found = found[part]
    body = schema["components"]["schemas"]["ChatRequest"]
    assert body["additionalProperties"] is False
    assert not [name for name in schema["components"]["schemas"] if "ValidationError" in name]
    for path in ("/v1/chat/completions", "/v1/completions"):
        example = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["example"]
        assert (await mesh.http.post(path, json=example)).status_code == 200, "what the page offers to try works"
    assert {"messages", "temperature", "cache_salt"} <= body["properties"].keys()
    for name in ("top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"):
        field = body["properties"][name]
        assert len(field["description"]) > 20, name
        assert field["minimum"] < field["maximum"], name
    assert "-100" in body["properties"]["logit_bias"]["description"]


async def _fails_to_start(config: GatewayConfig) -> None:
    async with asyncio.timeout(10):
        await main.run(config, asyncio.Event(), lambda told: None)


async def test_what_cannot_start_says_why(checkpoint: Path, tmp_path: Path) -> None:
    config = GatewayConfig(port=0, http_port=0, model=str(checkpoint), conductor="127.0.0.1:1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for key in ("http_port", "port", "metrics_port"):
            with pytest.raises(ConfigError, match=f"{key}={port}: the port is in use"):
                await _fails_to_start(dataclasses.replace(config, **{key: port}))
    with pytest.raises(ConfigError, match="model=''"):
        await _fails_to_start(dataclasses.replace(config, model=""))
    with pytest.raises(CheckpointError, match="no such file"):
        await _fails_to_start(dataclasses.replace(config, model=str(tmp_path)))
    for key in ("timeout_s", "max_body_bytes", "session_credit_tokens", "threads"):
        with pytest.raises(ConfigError, match=f"{key}=-1"):
            dataclasses.replace(config, **{key: -1})


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in folder.iterdir() for line in path.read_text().splitlines()]


async def test_a_request_leaves_one_trace(make_mesh: MeshMaker, tmp_path: Path) -> None:
    telemetry = setup.start("gateway", "g", trace_dir=str(tmp_path), otlp_endpoint="", log_level="warning")
    try:
        mesh = await make_mesh()
        parent = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
        body = CHAT | {"seed": 4, "max_tokens": 30}
        await mesh.http.post("/v1/chat/completions", json=body, headers={"traceparent": parent})
        await mesh.quiet()
        await asyncio.to_thread(telemetry.flush)
    finally:
        await asyncio.to_thread(telemetry.shutdown)
    lines = _lines(tmp_path)
    spans = {line["name"]: line for line in lines}
    root = spans[f"chat {MODEL}"]
    assert {line["trace_id"] for line in lines} == {"ab" * 16}
    assert root["parent"] == "cd" * 8
    assert (
        root["attributes"]
        | {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": MODEL,
            "gen_ai.request.seed": 4,
            "gen_ai.request.max_tokens": 30,
            "gen_ai.usage.cache_read.input_tokens": CACHED,
            "gen_ai.response.finish_reasons": ["stop"],
            "kvmesh.outcome": "stop",
        }
        == root["attributes"]
    )
    for name in ("kvmesh.tokenize", "kvmesh.schedule"):
        assert spans[name]["parent"] == root["span_id"]
        assert root["start_ns"] <= spans[name]["start_ns"] <= spans[name]["end_ns"] <= root["end_ns"]
    start = mesh.decodes[0].runs[0].start
    assert start.traceparent.split("-")[2] == root["span_id"]
    assert mesh.conductor.asked[0].traceparent.split("-")[2] == spans["kvmesh.schedule"]["span_id"]

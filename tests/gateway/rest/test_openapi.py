"""/openapi.json tells of every answer; every other test of the gateway holds those it gets against it, too."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from kvmesh.services.gateway.rest.http_protocol import REFUSALS
from kvmesh.services.gateway.rest.openapi import RESPONSES
from tests.gateway.conftest import Mesh, MeshMaker
from tests.support.gateway.documented import check
from tests.support.gateway.scripted import MODEL

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


async def test_the_document_holds_each_answer_with_its_body(mesh: Mesh) -> None:
    told = (await mesh.http.get("/openapi.json")).json()
    assert told["paths"].keys() == RESPONSES.keys()
    for path, operations in told["paths"].items():
        for operation in operations.values():
            assert operation["responses"] == RESPONSES[path]
            for status, answer in operation["responses"].items():
                assert all("schema" in one for one in answer["content"].values()) and answer["content"], (path, status)


async def test_each_example_of_a_body_works(mesh: Mesh) -> None:
    told = (await mesh.http.get("/openapi.json")).json()
    bodies = {
        path: about["post"]["requestBody"]["content"]["application/json"]["example"]
        for path, about in told["paths"].items()
        if "requestBody" in about.get("post", {})
    }
    assert "/v1/responses" in bodies
    for path, body in bodies.items():
        assert (await mesh.http.post(path, json=body)).status_code == 200, path


async def test_calls_of_stored_responses_are_told(mesh: Mesh) -> None:
    paths = (await mesh.http.get("/openapi.json")).json()["paths"]
    one = "/v1/responses/{response_id}"
    assert paths[one].keys() == {"get", "delete"}
    assert paths[f"{one}/cancel"].keys() == {"post"}
    for path, methods in ((one, "DELETE, GET"), (f"{one}/cancel", "POST"), (f"{one}/input_items", "GET")):
        refused = await mesh.http.put(path.replace("{response_id}", "resp_a/b"))
        assert (refused.status_code, refused.headers["allow"]) == (405, methods), path
    listing = paths[f"{one}/input_items"]["get"]["parameters"]
    assert {parameter["name"] for parameter in listing} == {"response_id", "limit", "order", "after"}


async def test_what_the_connection_refuses_is_told_of_every_endpoint() -> None:
    for path, answers in RESPONSES.items():
        for status in REFUSALS:
            assert "text/plain" in answers[str(status)]["content"], (path, status)


@pytest.mark.parametrize(
    ("status", "head"),
    [
        (400, "GET /health HTTP/9.9.9\r\n"),
        (408, "GET /health HTTP/1.1\r\n"),
        (414, f"GET /health?{'x' * 9000} HTTP/1.1\r\n\r\n"),
        (431, f"GET /health HTTP/1.1\r\na: {'x' * 70_000}\r\n\r\n"),
    ],
)
async def test_a_refusal_by_the_connection(make_mesh: MeshMaker, status: int, head: str) -> None:
    mesh = await make_mesh(http_head_timeout_s=0.2)
    host, _, port = str(mesh.told["http"]).rpartition(":")
    async with asyncio.timeout(15):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode())
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().splitlines()
        writer.close()
        await writer.wait_closed()
    assert int(first.split()[1]) == status
    media = next(line.partition(": ")[2] for line in lines if line.startswith("content-type"))
    check("GET", "/health", status, media, None)


async def test_foreign_hosts_and_wrong_keys(mesh: Mesh) -> None:
    for path in ("/v1/models", "/health", "/ready", "/metrics"):
        assert (await mesh.http.get(path, headers={"host": "evil.example"})).status_code == 403


async def test_bodies_that_differ_are_noticed() -> None:
    good = {"error": {"message": "m", "type": "t", "param": None, "code": "c"}}
    check("POST", "/v1/completions", 429, "application/json", json.dumps(good).encode())
    with pytest.raises(AssertionError, match="answers 409, which"):
        check("POST", "/v1/completions", 409, "application/json", b"{}")
    with pytest.raises(AssertionError, match="with text/html"):
        check("GET", "/health", 200, "text/html", b"")
    with pytest.raises(jsonschema.ValidationError, match="'error' is a required"):
        check("POST", "/v1/completions", 429, "application/json", b"{}")

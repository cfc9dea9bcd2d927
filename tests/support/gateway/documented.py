"""Holds every answer of a gateway against what its /openapi.json says of it: status, media type and body."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]

from kvmesh.services.gateway.rest.interfaces import INTERFACES, QUERIES
from kvmesh.services.gateway.rest.openapi import RESPONSES, SCHEMAS

# Of the others: GET.
METHODS = dict.fromkeys((*INTERFACES, *QUERIES), ("POST",)) | {
    "/v1/responses/{response_id}": ("GET", "DELETE"),
    "/v1/responses/{response_id}/cancel": ("POST",),
}


def _draft(schema: Any) -> Any:
    """OpenAPI 3.0 as JSON Schema has it: references lead into this document, and null is a type."""
    if isinstance(schema, list):
        return [_draft(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _draft(value) for key, value in schema.items() if key != "nullable"}
    if schema.get("nullable"):
        found["type"] = [schema["type"], "null"]
    return found


_COMPONENTS = {"components": {"schemas": _draft(SCHEMAS)}}


def operation(method: str, path: str) -> dict[str, Any] | None:
    """The answers of what is called by these; None: there is no such operation."""
    if path.startswith("/v1/models/"):
        path = "/v1/models/{model}"
    if path.startswith("/v1/responses/"):
        tail = path.rpartition("/")[2]
        path = "/v1/responses/{response_id}" + (f"/{tail}" if tail in ("cancel", "input_items") else "")
    return RESPONSES.get(path) if method in METHODS.get(path, ("GET",)) else None


def check(method: str, path: str, status: int, media: str, body: bytes | None) -> None:
    """AssertionError: the document says nothing of such an answer. `body` None: it is a stream."""
    answers = operation(method, path)
    if answers is None:
        return
    where = f"{method} {path} answers {status}"
    assert str(status) in answers, f"{where}, which /openapi.json does not tell"
    content = answers[str(status)]["content"]
    kind = media.partition(";")[0].strip()
    assert kind in content, f"{where} with {kind}; /openapi.json tells of {', '.join(content)}"
    if body is not None and kind == "application/json":
        jsonschema.validate(json.loads(body), _draft(content[kind]["schema"]) | _COMPONENTS)


async def documented(response: httpx.Response) -> None:
    """A hook of an httpx client."""
    media = response.headers.get("content-type", "")
    body = await response.aread() if media.startswith("application/json") else None
    check(response.request.method, response.request.url.path, response.status_code, media, body)

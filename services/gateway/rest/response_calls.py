"""What there is to do with a response besides making it: read it, forget it, cancel it, list its input."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response

from kvmesh.errors import InvalidRequest
from kvmesh.services.gateway.api_keys import Tenant
from kvmesh.services.gateway.core import GatewayCore
from kvmesh.services.gateway.generation import refused
from kvmesh.services.gateway.rest.response_events import CANCELLED, ResponseWriter
from kvmesh.services.gateway.rest.responses import ResponseRequest

PATH = "/v1/responses/{response_id:path}"
MAX_LISTED, LISTED = 100, 20


class NotCancellable(InvalidRequest):
    """The response has ended."""

    code = "response_not_cancellable"


def add(app: FastAPI, core: GatewayCore) -> None:
    """Adds the calls to `app`. All of them ask for a key where the gateway does."""

    def tenant(request: Request) -> Tenant:
        given, other = request.headers.get("authorization"), request.headers.get("x-api-key")
        if given is None and other is not None:
            given = f"Bearer {other}"
        return core.keys.tenant(None if given is None else given.encode("latin-1"), ResponseRequest.route)

    def underway(owner: Tenant, response_id: str) -> ResponseWriter | None:
        found = core.responses.underway.get((owner.name, response_id))
        return found if found is not None and found.response is None else None

    common: dict[str, Any] = {"tags": ["OpenAI"], "response_model": None}

    @app.get(
        f"{PATH}/input_items",
        summary="The input of a response",
        openapi_extra={"parameters": _LISTING},
        **common,
    )
    async def input_items(request: Request, response_id: str) -> Response:
        owner = tenant(request)
        page = _Page(request)
        stored = await core.responses.get(owner.name, response_id)
        return _json(page.of(await core.responses.history(owner.name, stored)))

    # Before the next ones, whose path matches any tail.
    @app.post(f"{PATH}/cancel", summary="Cancel a response that is under way here", **common)
    async def cancel(request: Request, response_id: str) -> Response:
        owner = tenant(request)
        writer = underway(owner, response_id)
        if writer is not None:
            return _json(writer.cancel())
        stored = await core.responses.get(owner.name, response_id)
        if stored.response["status"] == CANCELLED:
            return _json(stored.response)
        status = stored.response["status"]
        raise NotCancellable(
            f"response_id={response_id[:80]!r}: it is {status}; only a response that is under way at this gateway can "
            "be cancelled",
            field="response_id",
        )

    @app.get(PATH, summary="A stored response", **common)
    async def retrieve(request: Request, response_id: str) -> Response:
        owner = tenant(request)
        if request.query_params.get("stream", "false").lower() != "false":
            raise refused("stream", request.query_params["stream"], "stored responses are not streamed")
        writer = underway(owner, response_id)
        if writer is not None:
            return _json(writer.so_far())
        return _json((await core.responses.get(owner.name, response_id)).response)

    @app.delete(PATH, summary="Forget a response", **common)
    async def delete(request: Request, response_id: str) -> Response:
        await core.responses.delete(tenant(request).name, response_id)
        return _json({"id": response_id, "object": "response", "deleted": True})


class _Page:
    """Which part of a list is asked for."""

    def __init__(self, request: Request) -> None:
        asked = request.query_params
        limit, self._order = asked.get("limit", str(LISTED)), asked.get("order", "desc")
        if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= MAX_LISTED):
            raise refused("limit", limit, f"must be a whole number in 1..{MAX_LISTED}")
        if self._order not in ("asc", "desc"):
            raise refused("order", self._order, "must be asc or desc")
        self._limit, self._after = int(limit), asked.get("after", "")

    def of(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        listed = items if self._order == "asc" else items[::-1]
        if self._after:
            places = [index for index, item in enumerate(listed) if item["id"] == self._after]
            if not places:
                raise refused("after", self._after, "the list has no such item")
            listed = listed[places[0] + 1 :]
        page = listed[: self._limit]
        return {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else "",
            "last_id": page[-1]["id"] if page else "",
            "has_more": len(listed) > len(page),
        }


_LISTING = [
    {
        "name": "limit",
        "in": "query",
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": LISTED},
    },
    {"name": "order", "in": "query", "schema": {"type": "string", "enum": ["asc", "desc"], "default": "desc"}},
    {"name": "after", "in": "query", "schema": {"type": "string"}},
]


def _json(body: Any) -> Response:
    return Response(orjson.dumps(body), 200, None, "application/json")

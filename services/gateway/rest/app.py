"""The REST front door: OpenAI's endpoints, health, metrics and offline documentation."""

from __future__ import annotations

import time
from typing import Any

import orjson
import swagger_ui_bundle
from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from kvmesh.errors import InternalError, InvalidRequest, KvmeshError
from kvmesh.services.gateway.api_keys import Tenant
from kvmesh.services.gateway.core import GatewayCore
from kvmesh.services.gateway.generation import brief
from kvmesh.services.gateway.models import Model
from kvmesh.services.gateway.rest import openapi, response_calls, rollout
from kvmesh.services.gateway.rest.bounded_call import BoundedCall
from kvmesh.services.gateway.rest.frames import error_headers, error_json
from kvmesh.services.gateway.rest.http import Receive, Scope, Send, authorization
from kvmesh.services.gateway.rest.interfaces import INTERFACES, QUERIES
from kvmesh.services.gateway.rest.reply import Reply
from kvmesh.telemetry import names


class NotFound(KvmeshError):
    """No such path or method here."""

    code = "not_found"
    http_status = 404
    openai_type = "invalid_request_error"


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, "application/json")


def _failure(err: KvmeshError, status: int | None = None) -> Response:
    headers = {name.decode(): value.decode() for name, value in error_headers(err)}
    return _json(error_json(err), status or err.http_status, headers)


class GatewayApi(FastAPI):
    """FastAPI, but for the calls that answer tokens: those reach their Reply without the layers in between, which cost
    each request as much as its validation, and each chunk of its answer two calls."""

    def __init__(self, core: GatewayCore) -> None:
        super().__init__(title=openapi.TITLE, docs_url=None, redoc_url=None, openapi_url=None)
        self._core = core

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # type: ignore[override]
        """Serves one request, as ASGI has it."""
        call = _call(self._core, scope.get("path", "")) if scope.get("method") == "POST" else None
        if call is None:
            await super().__call__(scope, receive, send)  # type: ignore[arg-type]
        else:
            await call(scope, receive, send)


def _call(core: GatewayCore, path: str) -> BoundedCall[Any] | None:
    """Returns what answers a POST to `path`; None: FastAPI does."""
    if path in INTERFACES:
        return Reply(core, INTERFACES[path])
    if core.config.rollout and path in rollout.CALLS:
        return rollout.CALLS[path](core)
    return QUERIES[path](core) if path in QUERIES else None


def build(core: GatewayCore) -> FastAPI:
    """The application of one gateway."""
    created = int(time.time())
    app = GatewayApi(core)
    app.router.redirect_slashes = False

    first = core.models.names[0]

    for path, kind in INTERFACES.items():
        _add_post(app, core, path, kind.route, kind, first)
    for path, query in QUERIES.items():
        _add_post(app, core, path, query.route, query.body_model, first)
    response_calls.add(app, core)

    def card(model: Model) -> dict[str, Any]:
        facts = ("max_context_tokens", "vocab_size", "block_tokens")
        known = {name: getattr(model.facts, name) for name in facts} if model.facts else {}
        head = {"id": model.name, "object": "model", "created": created, "owned_by": "kvmesh"}
        return {**head, **known, **_state(model)}

    def tenant(request: Request) -> Tenant:
        return core.keys.tenant(authorization(dict(request.headers.raw)), "models")

    @app.get("/v1/models", summary="Models", tags=["OpenAI"], response_model=None)
    async def models(request: Request) -> Response:
        return _json({"object": "list", "data": [card(model) for model in core.models.of(tenant(request))]})

    @app.get(
        "/v1/models/{model:path}",
        summary="One model",
        tags=["OpenAI"],
        response_model=None,
    )
    async def model(request: Request, model: str) -> Response:
        return _json(card(core.models.find(model, tenant(request))))

    @app.get("/health", summary="Is this process alive?", tags=["Operations"], response_model=None)
    async def health() -> Response:
        return _json({"status": "ok", "models": {model.name: _state(model) for model in core.models}})

    @app.get(
        "/ready",
        summary="Can a request of any model be served?",
        tags=["Operations"],
        response_model=None,
    )
    async def ready() -> Response:
        reason = core.not_ready_reason
        told = {"models": {model.name: _state(model) for model in core.models}}
        if not reason:
            return _json({"status": "ready", **told})
        return _json({"status": "not ready", "reason": reason, **told}, 503)

    @app.get(
        "/metrics", summary="Prometheus", tags=["Operations"], response_model=None, response_class=PlainTextResponse
    )
    async def metrics() -> Response:
        body, content_type = names.render()
        return Response(body, media_type=content_type)

    _add_failures(app)
    _add_documentation(app, keys=core.keys.required)
    return app


def _add_post(app: FastAPI, core: GatewayCore, path: str, route: str, body: type[Any], model: str) -> None:
    """Adds the route of a path that GatewayApi answers: it documents it, and refuses other methods."""

    async def endpoint(request: Request) -> Response:
        call = _call(core, path)
        assert call is not None, "one of the two"
        return call

    app.post(
        path,
        name=route,
        summary=route.replace("_", " ").capitalize(),
        tags=["Generation"],
        response_model=None,
        openapi_extra=openapi.body(body, model),
    )(endpoint)


def _state(model: Model) -> dict[str, Any]:
    return {"ready": True} if model.ready else {"ready": False, "not_ready_reason": model.not_ready_reason}


def _methods(app: FastAPI, path: str) -> str:
    """The methods of a path, which may have a route for each; Starlette knows the first route's alone."""
    routes = [route for route in app.routes if isinstance(route, APIRoute) and route.path_regex.match(path)]
    return ", ".join(
        sorted({method for route in routes if route.path == routes[0].path for method in route.methods or ()})
    )


def _add_failures(app: FastAPI) -> None:
    @app.exception_handler(KvmeshError)
    async def named(request: Request, err: KvmeshError) -> Response:
        return _failure(err)

    @app.exception_handler(HTTPException)
    async def http(request: Request, err: HTTPException) -> Response:
        where = f"{request.method} {brief(request.url.path, 200)}"
        if err.status_code in (404, 405):
            allowed = _methods(app, request.url.path) if err.status_code == 405 else ""
            why = f"this endpoint takes {allowed}" if allowed else "no such endpoint"
            answer = _failure(NotFound(f"{where}: {why}; see /docs"), err.status_code)
            answer.headers.update({**(err.headers or {}), **({"Allow": allowed} if allowed else {})})
            return answer
        kind = InvalidRequest if err.status_code < 500 else InternalError
        return _failure(kind(f"{where}: {err.detail}"), err.status_code)

    @app.exception_handler(Exception)
    async def unnamed(request: Request, err: Exception) -> Response:
        return _failure(InternalError(f"the gateway failed: {type(err).__name__}"))


def _add_documentation(app: FastAPI, *, keys: bool) -> None:
    """/docs and /openapi.json; everything the page loads comes from here, so it works without a network."""
    schema: dict[str, Any] = {}

    @app.get("/openapi.json", include_in_schema=False)
    async def document() -> Response:
        if not schema:
            schema.update(openapi.schema(app, keys=keys))
        return _json(schema)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return get_swagger_ui_html(
            openapi_url="openapi.json",
            title=f"{openapi.TITLE} API",
            swagger_js_url="docs/assets/swagger-ui-bundle.js",
            swagger_css_url="docs/assets/swagger-ui.css",
            swagger_favicon_url="docs/assets/favicon-32x32.png",
        )

    app.mount("/docs/assets", StaticFiles(directory=str(swagger_ui_bundle.swagger_ui_path)), name="swagger")

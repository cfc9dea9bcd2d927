"""The interfaces of the REST door by path. A new one is one file and a line here (and its answers in openapi.py)."""

from __future__ import annotations

from collections.abc import Mapping

from kvmesh.services.gateway.rest.chat import ChatRequest
from kvmesh.services.gateway.rest.completions import CompletionRequest
from kvmesh.services.gateway.rest.interface import Asked
from kvmesh.services.gateway.rest.responses import ResponseRequest

INTERFACES: Mapping[str, type[Asked]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponseRequest,
}

"""The POSTs of the REST door by path: interfaces, which generate, and queries, which do not. A new one is one file and
a line here (and its answers in openapi.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvmesh.services.gateway.rest.bounded_call import QueryCall
from kvmesh.services.gateway.rest.chat import ChatRequest
from kvmesh.services.gateway.rest.completions import CompletionRequest
from kvmesh.services.gateway.rest.generate import GenerateTokensRequest
from kvmesh.services.gateway.rest.interface import InterfaceBody
from kvmesh.services.gateway.rest.messages import CountTokens, MessagesRequest
from kvmesh.services.gateway.rest.responses import ResponseRequest
from kvmesh.services.gateway.rest.tokenize import DetokenizeCall, TokenizeCall

INTERFACES: Mapping[str, type[InterfaceBody]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/messages": MessagesRequest,
    "/v1/responses": ResponseRequest,
    "/inference/v1/generate": GenerateTokensRequest,
}

QUERIES: Mapping[str, type[QueryCall[Any]]] = {
    "/v1/messages/count_tokens": CountTokens,
    "/tokenize": TokenizeCall,
    "/detokenize": DetokenizeCall,
}

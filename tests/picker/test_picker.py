"""The endpoint picker over real gRPC, with a real conductor beside it."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.rpc.pb import envoy_external_processor_pb2 as pb
from tests.picker.conftest import MODEL, PickerMesh, Start
from tests.support.ext_proc import (
    BUFFERED,
    FULL_DUPLEX,
    ProxyAnswer,
    body_message,
    headers_message,
    post,
    response_message,
)
from tests.support.services import until

A, B, C = "127.0.0.1:7101", "127.0.0.1:7102", "127.0.0.1:7103"
PROMPT = "What is the capital of the country in which this was written? " * 8


def completion(prompt: Any = PROMPT, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 8, **more}


@pytest.mark.parametrize(("mode", "pieces"), [(FULL_DUPLEX, 1), (FULL_DUPLEX, 5), (BUFFERED, 1)])
async def test_first(start_mesh: Start, mode: int, pieces: int) -> None:
    async with start_mesh() as mesh:
        await mesh.add("a", A)
        await mesh.add("b", B)
        answer = await mesh.proxy.ask(completion(), mode=mode, pieces=pieces)
        print(answer)
        assert set(answer.endpoints) == {A, B}
        again = await mesh.proxy.ask(completion(), mode=mode, pieces=pieces)
        print(again, await mesh.pending("a"), await mesh.pending("b"))

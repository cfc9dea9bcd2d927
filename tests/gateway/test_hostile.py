"""Hostile bytes at every RPC of the gateway: named errors, the gateway alive, nothing left in it."""

from __future__ import annotations

from typing import Any

import pytest

from kvmesh.kvcache.keys import pack_tokens
from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import gateway_pb2 as pb
from tests.gateway.conftest import Mesh, MeshMaker
from tests.support.hostile import BORNE, Case, assault, refused

GATEWAY: Any = pb.DESCRIPTOR.services_by_name["Gateway"]
# A deadline of a millisecond is a wish that the gateway grants.
ENDS = BORNE | {"DEADLINE_EXCEEDED"}
UNREAD = frozenset({"GetGatewayStatus"})  # open to all: its empty message is not even received


@pytest.mark.parametrize("prompt", ["text", "token_ids", "chat"])
@pytest.mark.slow
async def test_noise(make_mesh: MeshMaker, prompt: str) -> None:
    mesh = await make_mesh(timeout_s=3.0)
    prompts: dict[str, Any] = {
        "text": "Hi",
        "token_ids": pack_tokens(range(20)),
        "chat": pb.Chat(messages=[pb.ChatMessage(role="user", content="Hi")]),
    }
    fields: dict[str, Any] = {
        "request_id": "job", "model": "tiny", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 2, "seed": 7,
        "stop": ["x"], "logprobs": True, "top_logprobs": 1, "cache_salt": "s", "priority": 1, "timeout_ms": 2000,
    }  # fmt: skip
    valid = pb.GenerateRequest(**{prompt: prompts[prompt]}, **fields)
    requests = {"Generate": valid, "GetGatewayStatus": pb.GetGatewayStatusRequest()}
    async with connect(str(mesh.told["address"])) as channel:
        seen = await assault(channel, GATEWAY, requests, seed=1, rounds=20, borne=ENDS, unread=UNREAD)
    assert seen["Generate", "OK"], "some are valid all the same"
    assert seen["Generate", "INVALID_ARGUMENT"] > 20
    await whole(mesh)


async def test_each_wrong_value_is_named(mesh: Mesh) -> None:
    wrong: list[tuple[pb.GenerateRequest, str]] = [
        (pb.GenerateRequest(token_ids=b"123"), "token_ids"),
        (pb.GenerateRequest(token_ids=b"\xff\xff\xff\xff"), "prompt"),
        (pb.GenerateRequest(), "prompt"),
        (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="root")])), "chat.messages.0.role"),
        (pb.GenerateRequest(text="Hi", max_tokens=2**32 - 1), "max_tokens"),
        (pb.GenerateRequest(text="Hi", seed=2**64 - 1), "seed"),
        (pb.GenerateRequest(text="Hi", top_k=2**32 - 1), "top_k"),
        (pb.GenerateRequest(text="Hi", temperature=float("nan")), "temperature"),
        (pb.GenerateRequest(text="Hi", priority=-(2**31)), "priority"),
        (pb.GenerateRequest(text="Hi", stop=["x"] * 10_000), "stop"),
        (pb.GenerateRequest(text="Hi", request_id="../../etc"), "request_id"),
    ]
    cases = [Case("Generate", request, "INVALID_ARGUMENT", field) for request, field in wrong[:-1]]
    async with connect(str(mesh.told["address"])) as channel:
        await refused(channel, GATEWAY, cases)
        await refused(
            channel, GATEWAY, [Case("Generate", pb.GenerateRequest(text="x", model="☠"), "NOT_FOUND", "model")]
        )
        await refused(channel, GATEWAY, [Case("Generate", b"\xff" * 30, "INVALID_ARGUMENT", "message")])
    assert not mesh.conductor.asked
    await whole(mesh)


async def whole(mesh: Mesh) -> None:
    """Nothing of what was sent is left."""
    await mesh.quiet()
    for run in mesh.decodes[0].runs:
        assert run.start.token_ids
    status = await mesh.status()
    assert (status.requests, status.ready) == (0, True)
    mesh.decodes[0].script = mesh.says("still here")
    parts = [part async for part in mesh.stub.Generate(pb.GenerateRequest(text="Hi"), timeout=15)]
    assert "".join(part.text for part in parts) == "still here"

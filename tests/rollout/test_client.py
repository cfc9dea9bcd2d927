"""A trainer's client waits where the mesh is too full for a group, and says so where it stays too full."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvmesh.rollout import RolloutClient, RolloutRefused

DONE = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    b'data: {"choices": [{"index": 0, "token_ids": [7, 8], "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'
)


@asynccontextmanager
async def gateway(answers: list[bytes]) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Answers one request a connection, the last answer again and again."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(head.split(b"\r\n")[0])
        writer.write(
            answers[min(len(asked), len(answers)) - 1].replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1)
        )
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}", asked


def full() -> bytes:
    body = b'{"error": {"message": "full now", "param": "n"}}'
    head = b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\nretry-after-ms: 20\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


async def test_a_mesh_that_is_full_or_not_ready_is_asked_again() -> None:
    not_ready = full().replace(b"429 Too Many Requests", b"503 Service Unavailable")
    async with gateway([full(), not_ready, DONE]) as (url, asked), RolloutClient(url) as client:
        group = await client.group([1, 2, 3], 1, max_tokens=2)
    assert group.samples[0].token_ids == [7, 8]
    assert len(asked) == 3


async def test_a_group_of_which_one_sample_found_no_room_is_asked_for_again() -> None:
    half = DONE.replace(b"data: [DONE]", b'data: {"error": {"message": "no room", "code": "overloaded"}}')
    async with gateway([half, DONE]) as (url, asked), RolloutClient(url) as client:
        group = await client.group([1, 2, 3], 1, max_tokens=2)
    assert (group.samples[0].token_ids, group.error) == ([7, 8], "")
    assert len(asked) == 2


async def test_a_mesh_that_stays_full_is_told() -> None:
    async with gateway([full()]) as (url, asked), RolloutClient(url, timeout_s=0.2) as client:
        with pytest.raises(RolloutRefused, match="full now") as refused:
            await client.group([1, 2, 3], 1, max_tokens=2)
    assert (refused.value.status, refused.value.field) == (429, "n")
    assert len(asked) > 1


async def test_what_is_wrong_is_not_asked_again() -> None:
    wrong = full().replace(b"429 Too Many Requests", b"400 Bad Request").replace(b"retry-after-ms: 20\r\n", b"")
    async with gateway([wrong]) as (url, asked), RolloutClient(url) as client:
        with pytest.raises(RolloutRefused):
            await client.group([1, 2, 3], 1, max_tokens=2)
    assert len(asked) == 1

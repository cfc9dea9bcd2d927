"""Clients that leave, instances that fail, deadlines that pass: tokens or one clear error, and nothing left over."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import openai
import pytest

from kvmesh.errors import HandoffLost, InternalError, InvalidRequest, KvmeshError, Overloaded, Unavailable
from kvmesh.rpc.pb import decode_pb2
from kvmesh.services.gateway.rest import reply
from tests.gateway.conftest import Mesh, MeshMaker, seen, until
from tests.support.gateway.scripted import MODEL, BreakStream, Run, Script

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
URL = "/v1/chat/completions"


async def silent(run: Run) -> None:
    """Decode never says a word about it."""
    await asyncio.Event().wait()


def dribble(mesh: Mesh, tokens: int) -> Script:
    """Some tokens, then silence."""

    async def script(run: Run) -> None:
        for index, token in enumerate(mesh.ids("Hello, world")[:tokens]):
            await run.token(token, index)
        await silent(run)

    return script


def once(first: Script, then: Script) -> Script:
    """The first request fares otherwise."""
    scripts = iter([first])

    async def script(run: Run) -> None:
        await next(scripts, then)(run)

    return script


def failing(err: KvmeshError) -> Script:
    async def script(run: Run) -> None:
        await run.fail(err)

    return script


async def breaking(run: Run) -> None:
    raise BreakStream("decode was killed")


async def cancelled(mesh: Mesh, runs: int) -> None:
    """Every request that decode was given has been cancelled, and the gateway holds nothing."""
    (decode,) = mesh.decodes
    await seen(lambda: len(decode.runs) == runs)
    for run in decode.runs:
        await asyncio.wait_for(run.cancelled.wait(), 30)
    await mesh.quiet()


# ── clients that leave ────────────────────────────────────────────────────────────────────────────


async def test_a_client_that_leaves_a_stream_cancels_every_choice(mesh: Mesh) -> None:
    mesh.decodes[0].script = dribble(mesh, 2)
    async with mesh.http.stream("POST", URL, json=CHAT | {"stream": True, "n": 3}) as response:
        async for _ in response.aiter_lines():
            await seen(lambda: len(mesh.decodes[0].runs) == 3)
            break
    await cancelled(mesh, 3)
    assert {run.cancel_reason for run in mesh.decodes[0].runs} == {"the client went away"}


async def test_a_client_that_leaves_while_it_waits_cancels_the_request(mesh: Mesh) -> None:
    mesh.decodes[0].script = dribble(mesh, 2)
    call = asyncio.create_task(mesh.http.post(URL, json=CHAT | {"n": 2}))
    await seen(lambda: len(mesh.decodes[0].runs) == 2)
    call.cancel()
    await cancelled(mesh, 2)


async def test_a_client_that_leaves_before_the_placement_starts_nothing(mesh: Mesh) -> None:
    mesh.conductor.gate.clear()
    call = asyncio.create_task(mesh.http.post(URL, json=CHAT))
    await seen(lambda: mesh.conductor.asked)
    call.cancel()
    await mesh.quiet()
    mesh.conductor.gate.set()
    assert (await mesh.http.post(URL, json=CHAT)).status_code == 200
    assert len(mesh.decodes[0].runs) == 1


async def test_a_client_that_leaves_in_its_body_is_forgotten(mesh: Mesh) -> None:
    host, port = mesh.told["http"].split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST {URL} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{".encode())
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    await mesh.quiet()
    assert (await mesh.http.post(URL, json=CHAT)).status_code == 200


# ── deadlines ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_deadline_before_the_first_token_is_504(mesh: Mesh) -> None:
    mesh.decodes[0].script = silent
    for stream in (False, True):
        headers = {"x-request-timeout-ms": "200"}
        response = await mesh.http.post(URL, json=CHAT | {"stream": stream}, headers=headers)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        assert "0.2 s" in response.json()["error"]["message"]
    await cancelled(mesh, 2)


@pytest.mark.parametrize("stalled_from_s", [0.0, 0.1])
async def test_a_deadline_that_a_stalled_event_loop_notices_late_is_504(mesh: Mesh, stalled_from_s: float) -> None:
    mesh.decodes[0].script = silent
    headers = {"x-request-timeout-ms": "200"}

    reading = reply.Reply.read

    async def read(self: reply.Reply, body: Any, caller: Any) -> Any:
        asyncio.get_running_loop().call_later(stalled_from_s, time.sleep, 1.5)  # longer than last words may take
        if not stalled_from_s:
            await asyncio.sleep(0.01)
        return await reading(self, body, caller)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reply.Reply, "read", read)
        response = await mesh.http.post(URL, json=CHAT, headers=headers)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"


async def test_a_deadline_in_a_stream_is_one_error_event(mesh: Mesh) -> None:
    mesh.decodes[0].script = dribble(mesh, 2)
    headers = {"x-request-timeout-ms": "500"}
    response = await mesh.http.post(URL, json=CHAT | {"stream": True}, headers=headers)
    events = [line for line in response.text.split("\n\n") if line]
    assert response.status_code == 200
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert "[DONE]" not in response.text
    await cancelled(mesh, 1)


async def test_a_deadline_at_the_conductor(mesh: Mesh) -> None:
    mesh.conductor.gate.clear()
    response = await mesh.http.post(URL, json=CHAT, headers={"x-request-timeout-ms": "200"})
    assert response.status_code == 504
    mesh.conductor.gate.set()
    await mesh.quiet()


# ── what the conductor says ───────────────────────────────────────────────────────────────────────


async def test_refusals_are_told_with_when_to_come_again(mesh: Mesh) -> None:
    mesh.conductor.failures.append(Overloaded("ttft would be 9 s", retry_after_ms=2300))
    with pytest.raises(openai.RateLimitError, match="ttft would be 9 s") as caught:
        await mesh.client.chat.completions.create(**CHAT)
    assert caught.value.response.headers["retry-after"] == "3"
    assert caught.value.response.headers["retry-after-ms"] == "2300"
    assert len(mesh.conductor.asked) == 1
    mesh.conductor.failures.append(InvalidRequest("prompt_tokens=9: too long", field="prompt_tokens"))
    with pytest.raises(openai.BadRequestError, match="too long"):
        await mesh.client.chat.completions.create(**CHAT)


async def test_a_conductor_that_is_away_for_a_moment_is_asked_again(mesh: Mesh) -> None:
    mesh.conductor.failures.extend([Unavailable("no ready decode instance"), Unavailable("no ready decode instance")])
    assert (await mesh.http.post(URL, json=CHAT)).status_code == 200
    assert len(mesh.conductor.asked) == 3


async def test_a_conductor_that_stays_away_is_503(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(schedule_retry_ms=300)
    await mesh.conductor.stop()
    response = await mesh.http.post(URL, json=CHAT)
    assert response.status_code == 503
    assert "cannot be reached" in response.json()["error"]["message"]
    assert int(response.headers["retry-after"]) >= 1
    assert (await until(mesh.status, lambda status: not status.ready)).not_ready_reason


# ── what decode says ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("err", "avoided"),
    [(HandoffLost("prefill went away"), "prefill-0"), (Overloaded("no pages"), "decode-0"), (None, "decode-0")],
)
async def test_what_failed_before_the_first_token_is_placed_anew(
    make_mesh: MeshMaker, err: KvmeshError | None, avoided: str
) -> None:
    """`err` None: the whole stream to decode breaks."""
    mesh = await make_mesh()
    mesh.decodes[0].script = once(failing(err) if err else breaking, mesh.says("at last"))
    answer = await mesh.client.chat.completions.create(**CHAT)
    assert answer.choices[0].message.content == "at last"
    first, second = mesh.conductor.asked
    assert (first.attempt, second.attempt) == (0, 1)
    assert first.request_id == second.request_id
    assert list(second.avoid_instance_ids) == [avoided]
    assert [run.start.attempt for run in mesh.decodes[0].runs] == [0, 1]
    assert len(mesh.decodes[0].hellos) == (1 if err else 2)


async def test_without_migration_an_answer_that_nobody_has_seen_is_made_again_whole(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(max_migrations=0)

    async def half(run: Run) -> None:
        await run.prefilled(3)
        for index, token in enumerate(mesh.ids("wrong wrong")):
            await run.token(token, index)
        raise BreakStream("killed")

    mesh.decodes[0].script = once(half, mesh.says("right"))
    answer = await mesh.client.chat.completions.create(**CHAT)
    assert answer.choices[0].message.content == "right"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(mesh.ids("right")) + 1
    first, second = mesh.decodes[0].runs
    assert first.start.sampling.seed == second.start.sampling.seed


async def test_without_migration_an_answer_that_has_begun_to_stream_ends_in_one_error(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(max_migrations=0)

    async def half(run: Run) -> None:
        for index, token in enumerate(mesh.ids("Hello, world")):
            await run.token(token, index)
        await seen(lambda: received)
        raise BreakStream("killed")

    received: list[str] = []
    mesh.decodes[0].script = half

    async def read() -> None:
        async for chunk in await mesh.client.chat.completions.create(**CHAT, stream=True):
            received.append(chunk.choices[0].delta.content or "")

    with pytest.raises(openai.APIError, match="killed"):
        await read()
    assert "".join(received)
    assert len(mesh.conductor.asked) == 1
    await mesh.quiet()


async def test_retries_end(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(max_retries=2)
    mesh.decodes[0].script = failing(HandoffLost("prefill went away"))
    response = await mesh.http.post(URL, json=CHAT | {"stream": True})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "handoff_lost"
    assert "retry-after" in response.headers
    assert [asked.attempt for asked in mesh.conductor.asked] == [0, 1, 2]


async def test_errors_that_are_not_retryable_are_final(mesh: Mesh) -> None:
    mesh.decodes[0].script = failing(InternalError("logits are not finite"))
    response = await mesh.http.post(URL, json=CHAT)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "logits are not finite"
    assert len(mesh.conductor.asked) == 1


async def test_one_failed_choice_cancels_the_others(mesh: Mesh) -> None:
    async def script(run: Run) -> None:
        if run.start.request_id.endswith("-1"):
            await seen(lambda: len(mesh.decodes[0].runs) == 3)
            await run.fail(InternalError("broken"))
        else:
            await silent(run)

    mesh.decodes[0].script = script
    assert (await mesh.http.post(URL, json=CHAT | {"n": 3})).status_code == 500
    await mesh.quiet()
    others = [run for run in mesh.decodes[0].runs if not run.start.request_id.endswith("-1")]
    for run in others:
        await asyncio.wait_for(run.cancelled.wait(), 30)
        assert run.cancel_reason == "broken"


async def test_tokens_come_once_and_in_order(mesh: Mesh) -> None:
    hello = mesh.ids("Hello, world")

    async def repeats(run: Run) -> None:
        for index, token in enumerate(hello):
            await run.token(token, index)
            await run.token(token, index)
        await run.send(decode_pb2.SessionResponse(finished=[run.finished(len(hello))]))

    async def skips(run: Run) -> None:
        await run.token(hello[0], 0)
        await run.token(hello[2], 2)

    async def loses(run: Run) -> None:
        await run.token(hello[0], 0, run.finished(2))

    mesh.decodes[0].script = repeats
    answer = await mesh.client.chat.completions.create(**CHAT)
    assert answer.choices[0].message.content == "Hello, world"
    for script, words in ((skips, "token 1 of the answer is missing"), (loses, "made 2 tokens, 1 arrived")):
        mesh.decodes[0].script = script
        response = await mesh.http.post(URL, json=CHAT)
        assert response.status_code == 500
        assert words in response.json()["error"]["message"]
    await mesh.quiet()


# ── faults of the gateway itself ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_fault_of_the_gateway_is_an_error_object(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def broken(prompts: Any) -> int:
        raise RuntimeError("a secret of the code")

    monkeypatch.setattr(reply, "prompts_bytes", broken)
    answer = await mesh.http.post(path, json=CHAT if "chat" in path else {"model": MODEL, "prompt": "Hi"})
    error = answer.json()["error"]
    assert answer.status_code == 500 and error["code"] == "internal"
    assert error["message"] == "the gateway failed: RuntimeError"
    await mesh.quiet()

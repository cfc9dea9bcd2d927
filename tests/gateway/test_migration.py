"""Answers that lose their instances: the client's stream goes on, or ends in one clear error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from kvmesh.errors import HandoffLost, KvmeshError, Overloaded, Unavailable
from kvmesh.kvcache.keys import chain_tip, pack_tokens
from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.rpc.pb import decode_pb2
from kvmesh.services.gateway.api_keys import ANYBODY
from kvmesh.services.gateway.models import ServedModelFacts
from kvmesh.telemetry import names, setup
from tests.gateway.conftest import Mesh, MeshMaker, seen
from tests.gateway.test_grpc import asks, generate
from tests.support.gateway.scripted import BLOCK_TOKENS, CACHED, MAX_CONTEXT, MODEL, BreakStream, Run, Script

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
TEXT = "Füchse 🦊 und Hasen sagen einander gute Nacht, wie es der Brauch ist"
LOST = Unavailable("decode instance decode-0 is shutting down")


def engine(
    tokens: Sequence[int],
    breaks: Callable[[Run], int | None],
    error: KvmeshError | None = None,
) -> Script:
    """Says `tokens`, wherever it is told to go on; before position `breaks(run)` it fails the request with `error`, or
    (None) its whole stream breaks."""

    async def script(run: Run) -> None:
        start = run.start.sampling.answered_tokens
        at_most = min(len(tokens), start + run.start.sampling.max_tokens)
        stop_at = breaks(run)
        await run.prefilled(CACHED if not start else CACHED + start)
        for at in range(start, at_most):
            if at == stop_at:
                if error is None:
                    raise BreakStream("decode was killed")
                await run.fail(error)
                return
            last = at == at_most - 1
            full = at + 1 - start == run.start.sampling.max_tokens
            reason = pb.FINISH_REASON_LENGTH if full else pb.FINISH_REASON_STOP
            await run.token(tokens[at], at - start, run.finished(at + 1 - start, reason) if last else None)

    return script


def at_positions(*positions: int | None) -> Callable[[Run], int | None]:
    """Of the attempts in their order; afterwards nothing breaks."""

    def breaks(run: Run) -> int | None:
        return positions[run.start.attempt] if run.start.attempt < len(positions) else None

    return breaks


def counted(outcome: str) -> float:
    """Migrations so far."""
    samples = [s for metric in names.GATEWAY_MIGRATIONS.collect() for s in metric.samples if s.name.endswith("_total")]
    return sum(sample.value for sample in samples if sample.labels["outcome"] == outcome)


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in folder.iterdir() for line in path.read_text().splitlines()]


async def read(mesh: Mesh, **more: Any) -> list[str]:
    """The streamed texts, by choice; raises what ends them early."""
    texts = [""] * more.get("n", 1)
    async for chunk in await mesh.client.chat.completions.create(**CHAT | more, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    return texts


# ── the stream goes on ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("error", [None, LOST, HandoffLost("lost the writer of the KV")])
async def test_a_stream_goes_on_where_it_was_lost(make_mesh: MeshMaker, error: KvmeshError | None) -> None:
    mesh = await make_mesh(decodes=2)
    tokens, before = [*mesh.ids(TEXT), mesh.eos], counted("moved")
    for decode in mesh.decodes:
        decode.script = engine(tokens, at_positions(3, 20), error)
    parts = await generate(mesh, asks(max_tokens=100, seed=5, expected_tokens=40))
    at = 0
    for part in parts:
        assert part.first_token_index == at
        at += len(part.token_ids)
    assert [token for part in parts for token in part.token_ids] == tokens
    assert "".join(part.text for part in parts) == TEXT
    last = parts[-1]
    assert (last.finish_reason, last.usage.completion_tokens) == ("stop", len(tokens))
    assert (last.usage.prompt_tokens, last.usage.cached_tokens) == (len(mesh.ids("Hi")), CACHED)
    assert counted("moved") - before == 2

    prompt = mesh.ids("Hi")
    namespace = ServedModelFacts.of(mesh.conductor.card).namespace(ANYBODY, "")
    runs = sorted((run for decode in mesh.decodes for run in decode.runs), key=lambda run: run.start.attempt)
    assert [run.start.sampling.answered_tokens for run in runs] == [0, 3, 20]
    assert {run.start.sampling.seed for run in runs} == {5}
    for run, asked in zip(runs, mesh.conductor.asked, strict=True):
        answered = run.start.sampling.answered_tokens
        assert run.prompt == [*prompt, *tokens[:answered]]
        assert run.start.sampling.max_tokens == asked.max_tokens == 100 - answered
        keys, digest = chain_tip(namespace, pack_tokens(run.prompt), BLOCK_TOKENS)
        assert (run.start.block_keys, run.start.chain_digest, asked.block_keys) == (keys, digest, keys)
        assert (asked.prompt_tokens, asked.answered_tokens) == (len(run.prompt), answered)
        assert asked.expected_output_tokens == 40  # of the whole answer
    assert runs[-1].start.block_keys, "the answer has full blocks by then"
    assert len({run.start.request_id for run in runs}) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_every_choice_goes_on_by_itself(make_mesh: MeshMaker, stream: bool) -> None:
    """Stop strings and logprobs across the breaks; what is not streamed is not thrown away either."""
    mesh = await make_mesh(decodes=2)
    tokens = mesh.ids(TEXT)

    def breaks(run: Run) -> int | None:
        index = int(run.start.request_id[-1])
        return at_positions(4 + 9 * index, 22 + 9 * index)(run) if index else None

    for decode in mesh.decodes:
        decode.script = engine(tokens, breaks, LOST)
    wanted: dict[str, Any] = {"n": 4, "stop": ["Nacht"], "logprobs": True, "top_logprobs": 2}
    if stream:
        assert await read(mesh, **wanted) == [TEXT[: TEXT.index("Nacht")]] * 4
        return
    answer = await mesh.client.chat.completions.create(**CHAT | wanted)
    for choice in answer.choices:
        assert choice.message.content == TEXT[: TEXT.index("Nacht")]
        assert choice.finish_reason == "stop"
        assert choice.logprobs == answer.choices[0].logprobs
    assert answer.usage is not None
    assert answer.usage.completion_tokens % 4 == 0
    assert len([run for decode in mesh.decodes for run in decode.runs]) > 4 + 3


async def test_timings_tell_of_migrations(mesh: Mesh) -> None:
    tokens = mesh.ids(TEXT)
    mesh.decodes[0].script = engine(tokens, at_positions(3, 20), LOST)
    headers = {"x-kvmesh-timings": "1"}
    body = (await mesh.http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 30}, headers=headers)).json()
    (choice,) = body["kvmesh"]["choices"]
    assert (choice["attempts"], choice["migrations"]) == (3, 2)


async def test_an_echoed_prompt_comes_once(mesh: Mesh) -> None:
    tokens = mesh.ids(TEXT)
    mesh.decodes[0].script = engine(tokens, at_positions(9), LOST)
    for stream in (False, True):
        body = {"model": MODEL, "prompt": "Say: ", "echo": True, "max_tokens": len(tokens), "stream": stream}
        response = await mesh.http.post("/v1/completions", json=body)
        if not stream:
            assert response.json()["choices"][0]["text"] == "Say: " + TEXT
            continue
        events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == "Say: " + TEXT


# ── ends that were lost ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "finish", "moved"),
    [
        ({"max_tokens": 5}, "length", False),
        ({"max_tokens": 6}, "stop", False),  # the sixth is EOS
        ({"max_tokens": 9}, "stop", False),
        ({"max_tokens": 9, "ignore_eos": True}, "length", True),
    ],
)
async def test_an_end_that_was_lost(mesh: Mesh, fields: dict[str, Any], finish: str, moved: bool) -> None:
    tokens = [*mesh.ids(TEXT)[:5], mesh.eos, *mesh.ids(TEXT)[:5]]
    until = min(fields["max_tokens"], 6)

    async def script(run: Run) -> None:
        start = run.start.sampling.answered_tokens
        if start:
            await engine(tokens, at_positions())(run)
            return
        for at in range(until):
            await run.token(tokens[at], at)
        raise BreakStream("decode was killed")

    mesh.decodes[0].script = script
    parts = await generate(mesh, asks(**fields))
    assert parts[-1].finish_reason == finish
    assert len(mesh.conductor.asked) == 1 + moved
    assert [token for part in parts for token in part.token_ids] == tokens[: 9 if moved else until]


async def test_a_full_context_is_an_end(mesh: Mesh) -> None:
    prompt = [5] * (MAX_CONTEXT - 3)

    async def script(run: Run) -> None:
        for at, token in enumerate(mesh.ids(TEXT)[:3]):
            await run.token(token, at)
        await run.fail(LOST)

    mesh.decodes[0].script = script
    parts = await generate(mesh, asks(token_ids=pack_tokens(prompt)))
    assert (parts[-1].finish_reason, len(mesh.conductor.asked)) == ("length", 1)


# ── where it cannot go on ─────────────────────────────────────────────────────────────────────────


async def error_of(mesh: Mesh, *, received: list[str] | None = None) -> openai.APIError:
    async def run() -> None:
        async for chunk in await mesh.client.chat.completions.create(**CHAT, stream=True):
            if received is not None:
                received.append(chunk.choices[0].delta.content or "")

    with pytest.raises(openai.APIError) as caught:
        await run()
    return caught.value


async def test_no_further_than_max_migrations(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(max_migrations=2)
    received: list[str] = []
    mesh.decodes[0].script = engine(mesh.ids(TEXT), at_positions(3, 10, 20), LOST)
    error = await error_of(mesh, received=received)
    assert "lost at decode-0 after 20 tokens" in str(error)
    assert "is shutting down" in str(error) and "max_migrations=2 times before" in str(error)
    assert TEXT.startswith("".join(received)) and len("".join(received).encode()) > 15, "all that came was delivered"
    await mesh.quiet()


async def test_no_longer_than_the_timeout(make_mesh: MeshMaker) -> None:
    """The next instance takes it and says nothing; then it is told that nobody waits any more."""
    mesh = await make_mesh(decodes=2, migration_timeout_s=3.0)
    tokens, before = mesh.ids(TEXT), counted("failed")

    async def script(run: Run) -> None:
        if run.start.attempt:
            await asyncio.Event().wait()
        await engine(tokens, at_positions(7), LOST)(run)

    for decode in mesh.decodes:
        decode.script = script
    error = await error_of(mesh)
    assert "after 7 tokens" in str(error) and "within migration_timeout_s=3" in str(error)
    assert counted("failed") - before == 1
    last = next(run for decode in mesh.decodes for run in decode.runs if run.start.attempt == 1)
    await asyncio.wait_for(last.cancelled.wait(), 30)
    await mesh.quiet()


async def test_a_mesh_without_instances_is_waited_for(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(schedule_retry_ms=0)
    mesh.decodes[0].script = engine(mesh.ids(TEXT), at_positions(7), LOST)

    async def script(run: Run) -> None:
        if not run.start.attempt:
            mesh.conductor.failures.extend([Unavailable("no ready decode instance")] * 3)
        await engine(mesh.ids(TEXT), at_positions(7), LOST)(run)

    mesh.decodes[0].script = script
    assert await read(mesh, max_tokens=len(mesh.ids(TEXT))) == [TEXT]
    assert [asked.attempt for asked in mesh.conductor.asked] == [0, 1, 2, 3, 4]
    assert {asked.answered_tokens for asked in mesh.conductor.asked[1:]} == {7}


async def test_a_mesh_that_stays_empty_is_one_error(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(schedule_retry_ms=0, migration_timeout_s=3.0)

    async def script(run: Run) -> None:
        mesh.conductor.failures.extend([Unavailable("no ready decode instance")] * 10_000)
        await engine(mesh.ids(TEXT), at_positions(7), LOST)(run)

    mesh.decodes[0].script = script
    error = await error_of(mesh)
    assert "after 7 tokens" in str(error) and "migration_timeout_s=3 (no ready decode instance)" in str(error)
    await mesh.quiet()


@pytest.mark.slow
async def test_a_full_instance_is_tried_again_and_one_that_dies_of_it_not_for_long(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(max_retries=1)
    tokens = mesh.ids(TEXT)
    dies = False

    async def script(run: Run) -> None:
        if not run.start.attempt:
            await engine(tokens, at_positions(7), LOST)(run)
        elif dies:
            raise BreakStream("decode was killed")
        elif run.start.attempt < 5:
            await run.fail(Overloaded("no pages"))
        else:
            await engine(tokens, at_positions())(run)

    mesh.decodes[0].script = script
    assert await read(mesh, max_tokens=len(tokens)) == [TEXT]
    dies = True
    asked = len(mesh.conductor.asked)
    error = await error_of(mesh)
    assert "max_retries=1 and one more attempt failed" in str(error)
    assert len(mesh.conductor.asked) - asked == 3
    await mesh.quiet()


# ── silence, late tokens, clients that leave ──────────────────────────────────────────────────────


async def test_an_instance_that_falls_silent_is_left(make_mesh: MeshMaker) -> None:
    """It goes on talking when it has been given up: nobody hears it."""
    mesh = await make_mesh(token_timeout_s=2.0)
    tokens, wrong = mesh.ids(TEXT), mesh.ids("wrong")
    old: list[Run] = []

    async def script(run: Run) -> None:
        if run.start.attempt:
            first = old[0]
            await asyncio.wait_for(first.cancelled.wait(), 30)
            for at, token in enumerate(wrong, 6):
                await first.token(token, at)
            await first.send(decode_pb2.SessionResponse(finished=[first.finished(6 + len(wrong))]))
            await engine(tokens, at_positions())(run)
            return
        old.append(run)
        for at in range(6):
            await run.token(tokens[at], at)
        await asyncio.Event().wait()

    mesh.decodes[0].script = script
    assert await read(mesh, max_tokens=len(tokens)) == [TEXT]
    assert "token_timeout_s=2" in old[0].cancel_reason
    assert list(mesh.conductor.asked[1].avoid_instance_ids) == ["decode-0"]


async def test_a_client_that_leaves_during_a_migration(mesh: Mesh) -> None:
    before = counted("abandoned")

    async def script(run: Run) -> None:
        if run.start.attempt:
            await asyncio.Event().wait()
        await engine(mesh.ids(TEXT), at_positions(7), LOST)(run)

    mesh.decodes[0].script = script
    call = asyncio.create_task(mesh.http.post("/v1/chat/completions", json=CHAT))
    await seen(lambda: len(mesh.decodes[0].runs) == 2)
    call.cancel()
    await asyncio.wait_for(mesh.decodes[0].runs[1].cancelled.wait(), 30)
    await mesh.quiet()
    assert counted("abandoned") - before == 1


async def test_a_migration_is_one_span_of_the_request(make_mesh: MeshMaker, tmp_path: Path) -> None:
    telemetry = setup.start("gateway", "g", trace_dir=str(tmp_path), otlp_endpoint="", log_level="warning")
    try:
        mesh = await make_mesh(decodes=2)
        for decode in mesh.decodes:
            decode.script = engine(mesh.ids(TEXT), at_positions(7), HandoffLost("gone"))
        await mesh.client.chat.completions.create(**CHAT | {"max_tokens": 30})
        await mesh.quiet()
        await asyncio.to_thread(telemetry.flush)
    finally:
        await asyncio.to_thread(telemetry.shutdown)
    lines = _lines(tmp_path)
    (root,) = [line for line in lines if line["name"] == f"chat {MODEL}"]
    (span,) = [line for line in lines if line["name"] == "kvmesh.migrate"]
    assert span["parent"] == root["span_id"]
    assert root["start_ns"] < span["start_ns"] < span["end_ns"] <= root["end_ns"]
    found = span["attributes"]
    assert (found["kvmesh.choice"], found["kvmesh.migrate.tokens"]) == (0, 7)
    assert found["kvmesh.migrate.reason"] == "handoff_lost"
    ran = {run.start.attempt: decode.ref.instance_id for decode in mesh.decodes for run in decode.runs}
    assert (found["kvmesh.migrate.from"], found["kvmesh.migrate.to"]) == (ran[0], ran[1])

"""A decode instance over real gRPC: real rank, real KV bytes from a real writer rank, scripted prefill."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
import pytest_asyncio

from kvmesh.ranks.protocol import PromptScores
from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.rpc.status import from_rpc_error
from kvmesh.services.decode import mapping
from kvmesh.services.decode.outbox import Outbox
from kvmesh.services.decode.timeline import Timeline
from tests.support.checkpoints import prompts
from tests.support.decode.bench import SCORES, Bench, Gateway, bench
from tests.support.reference import assert_matches_reference
from tests.support.services import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]
PROMPT = [(7 * i * i + 3 * i) % 90 + 5 for i in range(37)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(checkpoint: Path) -> AsyncIterator[Bench]:
    """One instance for all tests of this file: each leaves it clean. The scripted prefill fills one landing after the
    other, which takes long on a machine that is full."""
    async with bench(checkpoint, fill_begin_ms=60_000) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(mesh: Bench) -> AsyncIterator[Gateway]:
    async with mesh.gateway() as made:
        yield made
    await mesh.full()


@pytest.mark.slow
async def test_tokens_equal_the_reference(gateway: Gateway, checkpoint: Path) -> None:
    answer = await gateway.over(await gateway.start(PROMPT, 30))
    assert len(answer.tokens) == 30
    assert_matches_reference(checkpoint, PROMPT, answer.tokens)
    finished = answer.finished
    assert finished is not None
    assert (finished.reason, finished.prompt_tokens, finished.completion_tokens) == (2, 37, 30)
    assert finished.cached_tokens == 3
    assert answer.prefilled is not None
    assert (answer.prefilled.cached_tokens, answer.prefilled.timings.queue_us) == (3, 7)
    timings = finished.timings
    assert (timings.queue_us, timings.prefill_us) == (7, 8)
    assert timings.first_decode_us > 0
    assert timings.admit_us > 0
    assert timings.reserve_us > 0
    assert gateway.reply is not None
    assert gateway.reply.instance.instance_id == "decode-0"


async def test_many_at_once_share_steps_and_messages(gateway: Gateway, checkpoint: Path) -> None:
    asked = {await gateway.start(prompt, 12): prompt for prompt in prompts(8, 90, low=5, high=30)}
    answers = [await gateway.over(slot) for slot in asked]
    assert gateway.messages < 8 * 12, "tokens of one step travel together"
    # The reference is loaded in this thread, on which the service waits, too: only when all is over.
    for prompt, answer in zip(asked.values(), answers, strict=True):
        assert not answer.failed
        assert_matches_reference(checkpoint, prompt, answer.tokens)


async def test_logprobs_and_stop_tokens(gateway: Gateway) -> None:
    plain = await gateway.over(await gateway.start(PROMPT, 12))
    stop = next(t for t in plain.tokens[2:] if plain.tokens.index(t) >= 2)
    wanted = await gateway.start(PROMPT, 12, logprobs=True, top_logprobs=2, stop_token_ids=[stop])
    other = await gateway.start(PROMPT, 12)
    answer, without = await gateway.over(wanted), await gateway.over(other)
    assert answer.tokens == plain.tokens[: plain.tokens.index(stop) + 1]
    assert answer.finished is not None
    assert answer.finished.reason == pb.FINISH_REASON_STOP
    made = answer.logprobs[-1]
    assert made.logprob < 0
    assert len(made.top) == 2
    assert made.top[0].token_id == answer.tokens[-1]
    assert without.tokens == plain.tokens


async def test_scores_of_prompts_go_before_the_first_token(gateway: Gateway) -> None:
    scored = [await gateway.start(PROMPT, 3, prompt_logprobs=1) for _ in range(2)]
    plain = await gateway.start(PROMPT, 3)
    for slot in (*scored, plain):
        told = (await gateway.over(slot)).prefilled
        assert told is not None and told.HasField("prompt_logprobs") == (slot != plain)
        assert told.prompt_logprobs == (SCORES if slot != plain else pb.PromptLogprobs())


async def test_scored_prompts_have_a_message_each() -> None:
    """Together they could be longer than a message may be; tokens follow."""
    box = Outbox(1)
    for slot in range(3):
        stream = box.open(slot, slot, 9, 0)
        stream.prefilled(Timeline(), PromptScores(bytes(8), bytes(4), bytes(4)) if slot else None)
        stream.push(7, 0, None)
    *scored, rest = mapping.responses(box.take())
    assert [[one.slot for one in message.prefilled] for message in scored] == [[1], [2]]
    assert not any(message.tokens.slot for message in scored)
    assert ([one.slot for one in rest.prefilled], list(rest.tokens.slot)) == ([0], [0, 1, 2])


async def test_one_token_only(gateway: Gateway, checkpoint: Path) -> None:
    answer = await gateway.over(await gateway.start(PROMPT, 1))
    assert_matches_reference(checkpoint, PROMPT, answer.tokens)
    assert answer.finished is not None
    assert answer.finished.completion_tokens == 1


async def test_the_first_token_does_not_wait_for_the_kv(mesh: Bench, gateway: Gateway) -> None:
    mesh.prefill.before_push.close()
    try:
        slot = await gateway.start(PROMPT, 6)
        await gateway.has(slot, 1)
        assert (await mesh.pools()).windows == 1
    finally:
        mesh.prefill.before_push.open()
    assert len((await gateway.over(slot)).tokens) == 6


@pytest.mark.parametrize("gate", ["before_begin", "before_push", "before_end"])
async def test_a_cancel_at_any_stage_gives_everything_back(mesh: Bench, gateway: Gateway, gate: str) -> None:
    held = getattr(mesh.prefill, gate)
    held.close()
    try:
        slot = await gateway.start(PROMPT, 200)

        async def reached() -> bool:
            return bool(held.waiting)

        await until(reached)
        await gateway.cancel(slot)
        assert (await gateway.over(slot)).code == "cancelled"
        await mesh.full()
    finally:
        held.open()


async def test_a_cancel_while_it_runs(mesh: Bench, gateway: Gateway) -> None:
    slot = await gateway.start(PROMPT, 300)
    await gateway.has(slot, 3)
    await gateway.cancel(slot)
    assert (await gateway.over(slot)).code == "cancelled"
    await gateway.cancel(slot)
    await mesh.full()


async def test_a_gateway_that_dies_takes_its_requests_with_it(mesh: Bench) -> None:
    mesh.prefill.before_push.close()
    async with mesh.gateway() as gateway:
        slot = await gateway.start(PROMPT, 300)
        await gateway.has(slot, 1)

    # The writer is told before it is let go: else it may be done before decode has noticed.
    async def told() -> bool:
        return any("session ended" in reason for reason in mesh.prefill.cancelled)

    await until(told)
    mesh.prefill.before_push.open()
    await mesh.full()


async def test_tokens_wait_for_credit_and_the_memory_does_not(mesh: Bench, gateway: Gateway) -> None:
    slot = await gateway.start(PROMPT, 6, credit_tokens=2)
    await gateway.has(slot, 2)
    await mesh.full()
    assert len(gateway.answers[slot].tokens) == 2
    await gateway.credit(slot, 3)
    await gateway.has(slot, 5)
    assert not gateway.answers[slot].over
    await gateway.credit(slot, 1)
    assert len((await gateway.over(slot)).tokens) == 6


async def test_a_deadline_ends_a_request_wherever_it_is(mesh: Bench, gateway: Gateway) -> None:
    mesh.prefill.before_begin.close()
    try:
        answer = await gateway.over(await gateway.start(PROMPT, 6, deadline_ms=50))
        assert answer.code == "deadline_exceeded"
        assert "waiting for prefill" in str(answer.failed)
    finally:
        mesh.prefill.before_begin.open()


async def test_what_prefill_refuses_reaches_the_client_as_it_is(mesh: Bench, gateway: Gateway) -> None:
    mesh.prefill.refuse_with = pb.ErrorDetail(code="overloaded", message="full", retryable=True, retry_after_ms=1234)
    try:
        answer = await gateway.over(await gateway.start(PROMPT, 6))
    finally:
        mesh.prefill.refuse_with = None
    assert answer.failed is not None
    assert (answer.code, answer.failed.message, answer.failed.retry_after_ms) == ("overloaded", "full", 1234)


@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ({"token_ids": b""}, "invalid_request", "token_ids"),
        ({"token_ids": b"abc"}, "invalid_request", "token_ids"),
        ({"token_ids": b"\xff\xff\xff\xff"}, "invalid_request", "token_ids"),
        ({"block_keys": b"x"}, "invalid_request", "block_keys"),
        ({"chain_digest": b"x"}, "invalid_request", "chain_digest"),
        ({"deadline_ms": 0}, "invalid_request", "deadline_ms"),
        ({"max_tokens": 0}, "invalid_request", "max_tokens"),
        ({"temperature": float("nan")}, "invalid_request", "temperature"),
        ({"temperature": -1.0}, "invalid_request", "temperature"),
        ({"top_p": 0.0}, "invalid_request", "top_p"),
        ({"top_logprobs": 21}, "invalid_request", "top_logprobs"),
        ({"model_fingerprint": "other"}, "model_not_found", "model_fingerprint"),
        ({"weights_epoch": 7}, "weights_changed", "weights_epoch"),
        ({"token_ids": bytes(4 * 24 * 16), "block_keys": bytes(16 * 24)}, "context_length_exceeded", "prompt_tokens"),
        ({"placement": None}, "invalid_request", "placement.prefill.address"),
    ],
)
async def test_bad_requests_name_field_and_value(
    gateway: Gateway, changes: dict[str, object], code: str, field: str
) -> None:
    answer = await gateway.over(await gateway.start(PROMPT, **{"max_tokens": 4, **changes}))  # type: ignore[arg-type]
    assert answer.failed is not None
    assert (answer.code, answer.failed.field) == (code, field)
    assert field in answer.failed.message or code == "context_length_exceeded"


async def test_a_placement_of_another_life_is_refused(mesh: Bench, gateway: Gateway) -> None:
    ghost = pb.InstanceRef(instance_id="decode-0", incarnation=1)
    placement = {"prefill": mesh.prefill.ref, "decode": ghost}
    answer = await gateway.over(await gateway.start(PROMPT, 4, placement=placement))
    assert answer.code == "unavailable"


async def test_a_prefill_that_is_not_there_fails_its_requests(mesh: Bench, gateway: Gateway) -> None:
    nobody = pb.InstanceRef(instance_id="prefill-9", address="127.0.0.1:1", incarnation=9)
    answer = await gateway.over(await gateway.start(PROMPT, 4, placement={"prefill": nobody}))
    assert answer.failed is not None
    assert (answer.code, answer.failed.retryable) == ("handoff_lost", True)
    assert "prefill-9" in answer.failed.message


async def test_an_unknown_protocol_version_is_refused(mesh: Bench) -> None:
    gateway = Gateway(mesh)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await gateway.hello(version=99)
    error = from_rpc_error(refused.value)
    assert (error.code, error.field) == ("protocol_mismatch", "protocol_version")
    await gateway.close()


async def test_a_session_that_begins_with_something_else_is_refused(mesh: Bench) -> None:
    gateway = Gateway(mesh)
    await gateway.cancel(1)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await gateway.call.read()
    assert from_rpc_error(refused.value).code == "invalid_request"
    await gateway.close()


async def test_sessions_are_counted(mesh: Bench) -> None:
    async with mesh.gateway(), mesh.gateway():
        during = (await mesh.pools()).streams

    async def fewer() -> bool:
        return (await mesh.pools()).streams == during - 2

    await until(fewer)


async def test_no_task_is_left_behind(mesh: Bench, gateway: Gateway) -> None:
    await gateway.over(await gateway.start(PROMPT, 3))
    await mesh.full()
    before = len(asyncio.all_tasks())
    for _ in range(3):
        async with mesh.gateway() as another:
            await another.over(await another.start(PROMPT, 3))
    await mesh.full()

    async def as_before() -> bool:
        return len(asyncio.all_tasks()) <= before

    await until(as_before)

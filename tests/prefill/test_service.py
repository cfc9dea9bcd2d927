"""The prefill service over real gRPC, with its real rank, against a scripted decode instance with a real rank."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
import pytest_asyncio

from kvmesh.errors import ConfigError, InternalError, InvalidRequest, KvmeshError, ProtocolMismatch
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.rpc.status import from_detail, from_rpc_error
from kvmesh.services.prefill.config import PrefillConfig
from kvmesh.services.prefill.main import run
from tests.support.prefill.client import Decode, decode, settled
from tests.support.rank_driver import BLOCK, Driver, rank
from tests.support.reference import assert_matches_reference, assert_scores_match_reference
from tests.support.services import Running, running, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY = pb_common.SamplingParams(max_tokens=8, top_p=1)
SCORED = pb_common.SamplingParams(max_tokens=8, top_p=1, prompt_logprobs=2)
PROMPT = [(7 * i * i + 3 * i) % 90 + 5 for i in range(61)]


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def config(checkpoint: Path, **fields: Any) -> PrefillConfig:
    known: dict[str, Any] = {
        "model": str(checkpoint),
        "instance_id": "prefill-x",
        "block_tokens": BLOCK,
        "num_pages": 16,
        "conductor": "127.0.0.1:9",  # nobody: registration is tested elsewhere
        "store": "127.0.0.1:9",
        "log_level": "error",
    }
    return PrefillConfig(**(known | fields))


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(checkpoint: Path, traces: Path) -> AsyncIterator[Running]:
    """Shared by the tests that leave it as they found it."""
    before = children()
    async with running(run, config(checkpoint, trace_dir=str(traces))) as found:
        yield found
    assert children() <= before, "a rank is left"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def target(checkpoint: Path) -> AsyncIterator[Driver]:
    async with rank("decode-x", checkpoint, ("shm", "tcp"), pages=200) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def client(service: Running, target: Driver) -> AsyncIterator[Decode]:
    async with decode(service.address, target, target.client.ready.fingerprint) as found:
        yield found


@pytest.mark.slow
async def test_cold_warm_and_chunked_give_the_reference_tokens(
    checkpoint: Path, service: Running, client: Decode
) -> None:
    for salt, cached in (("a", 0), ("a", 48), ("b", 0)):  # the prompt's 3 full blocks
        first, done, pages = await client.prefill(PROMPT, salt=salt)
        assert first.cached_tokens == cached
        assert first.timings.prefill_us > 0
        assert done.timings.transfer_bytes == 4 * client.rank.client.ready.shard_bytes if client.rank else 0
        tokens = await client.generate(PROMPT, first.token_id, pages, 8)
        assert_matches_reference(checkpoint, PROMPT, tokens)
    await settled(service.address, streams=1)


@pytest.mark.slow
async def test_chunks_are_pushed_while_later_ones_are_computed(checkpoint: Path, target: Driver) -> None:
    async with (
        running(run, config(checkpoint, prefill_chunk_tokens=16, long_prompt_tokens=16)) as service,
        decode(service.address, target, target.client.ready.fingerprint) as client,
    ):
        first, _, pages = await client.prefill(PROMPT)
        tokens = await client.generate(PROMPT, first.token_id, pages, 8)
        assert_matches_reference(checkpoint, PROMPT, tokens)
        scored, _, _ = await client.prefill(PROMPT, sampling=SCORED)
        assert_scores_match_reference(checkpoint, PROMPT, scored.prompt_logprobs)


async def test_a_prompt_is_scored_whatever_is_cached(checkpoint: Path, client: Decode) -> None:
    """All of it is computed, and its blocks serve the next one."""
    for sampling, cached in ((GREEDY, 0), (SCORED, 0), (GREEDY, 48)):
        first, _, pages = await client.prefill(PROMPT, salt="scored", sampling=sampling)
        assert first.cached_tokens == cached
        assert_matches_reference(checkpoint, PROMPT, await client.generate(PROMPT, first.token_id, pages, 4))
        assert first.HasField("prompt_logprobs") == (sampling is SCORED)
        if sampling is SCORED:
            assert_scores_match_reference(checkpoint, PROMPT, first.prompt_logprobs)
    alone, _, _ = await client.prefill(PROMPT[:1], sampling=SCORED)
    assert alone.HasField("prompt_logprobs") and not alone.prompt_logprobs.logprobs
    with pytest.raises(AssertionError, match="prompt_logprobs=21"):
        await client.prefill(PROMPT, sampling=pb_common.SamplingParams(max_tokens=2, top_p=1, prompt_logprobs=21))


async def test_logprobs_travel_with_the_first_token(client: Decode) -> None:
    from kvmesh.rpc.pb.common_pb2 import SamplingParams

    sampling = SamplingParams(max_tokens=4, top_p=1, seed=1, logprobs=True, top_logprobs=3)
    first, _, _ = await client.prefill(PROMPT[:20], sampling=sampling)
    assert len(first.logprobs.top) == 3
    assert first.logprobs.top[0].token_id == first.token_id
    assert first.logprobs.top[0].logprob == pytest.approx(first.logprobs.logprob)


def spans_of(folder: Path, trace: str) -> dict[str, dict[str, Any]]:
    """Name → span of one trace, as exported so far."""
    lines = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return {span["name"]: span for span in lines if span["trace_id"] == trace}


async def test_spans_join_the_trace_and_have_honest_borders(service: Running, client: Decode, traces: Path) -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    await client.prefill(PROMPT, salt="traced", traceparent=f"00-{trace}-{parent}-01")

    async def exported() -> dict[str, dict[str, Any]]:
        found = spans_of(traces, trace)
        return found if len(found) == 4 else {}

    found = await until(exported)
    assert set(found) == {"kvmesh.prefill", "kvmesh.queue", "kvmesh.compute", "kvmesh.transfer"}
    life = found["kvmesh.prefill"]
    assert life["parent"] == parent
    assert life["attributes"]["kvmesh.computed_tokens"] == len(PROMPT)
    assert life["attributes"]["kvmesh.request_id"].startswith("request-")
    for name in ("kvmesh.queue", "kvmesh.compute", "kvmesh.transfer"):
        assert found[name]["parent"] == life["span_id"]
        assert life["start_ns"] <= found[name]["start_ns"] <= found[name]["end_ns"] <= life["end_ns"]
    assert found["kvmesh.queue"]["end_ns"] == found["kvmesh.compute"]["start_ns"]
    assert found["kvmesh.transfer"]["attributes"]["kvmesh.transfer.bytes"] > 0
    async with httpx.AsyncClient(trust_env=False) as http:
        metrics = (await http.get(f"http://{service.metrics}/metrics")).text
    assert "kvmesh_prefill_step_seconds_count" in metrics


async def test_a_cancel_before_the_landing_drains_at_once(service: Running, client: Decode) -> None:
    handle = await client.start(PROMPT)
    await client.expect(handle, "begin_fill")
    await client.cancel(handle)
    drained = await client.expect(handle, "drained")
    assert drained.handoff_epoch == 0
    await settled(service.address, streams=1)


async def test_a_broken_stream_gives_everything_back(service: Running, target: Driver) -> None:
    async with decode(service.address, target, target.client.ready.fingerprint) as client:
        for n in range(4):
            handle = await client.start(PROMPT, salt=str(n))
            await client.expect(handle, "begin_fill")
        await client.land(handle, 4)
    await settled(service.address, streams=0)


async def test_two_streams_use_the_same_handles(service: Running, target: Driver, client: Decode) -> None:
    async with decode(service.address, target, target.client.ready.fingerprint) as other:
        one = await client.start(PROMPT[:20], handle=7)
        two = await other.start(PROMPT[:40], handle=7)
        assert (await client.expect(one, "begin_fill")).num_blocks == 2
        assert (await other.expect(two, "begin_fill")).num_blocks == 3
        await client.cancel(7)
        await client.expect(7, "drained")
        await other.cancel(7)
        await other.expect(7, "drained")
    await settled(service.address, streams=1)


def pull(**fields: Any) -> pb_common.PullRange:
    """A hint for the one full block of a prompt of 20 tokens."""
    known: dict[str, Any] = {"instance_id": "prefill-y", "address": "127.0.0.1:9", "incarnation": 1}
    holder = {key: fields.get(key, value) for key, value in known.items()}
    first, blocks = fields.get("first_block", 0), fields.get("blocks", 1)
    return pb_common.PullRange(holder=pb_common.InstanceRef(**holder), first_block=first, blocks=blocks)


BAD_PULLS: list[tuple[list[pb_common.PullRange], str]] = [
    ([pull(blocks=2)], "pulls[0].blocks"),
    ([pull(), pull(first_block=1)], "pulls[1].blocks"),
    ([pull(blocks=0)], "pulls[0].blocks"),
    ([pull(first_block=2**32 - 1, blocks=2**32 - 1)], "pulls[0].blocks"),
    ([pull(address="")], "pulls[0].holder.address"),
    ([pull(address="unix:/tmp/x")], "pulls[0].holder.address"),
    ([pull(instance_id="")], "pulls[0].holder.instance_id"),
    ([pull(incarnation=0)], "pulls[0].holder.incarnation"),
    ([pull()] * 1025, "pulls"),
]
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"model_fingerprint": "00ff"}, "model_not_found", "model_fingerprint"),
    ({"weights_epoch": 7}, "weights_changed", "weights_epoch"),
    ({"token_ids": b"abc"}, "invalid_request", "token_ids"),
    ({"token_ids": b""}, "invalid_request", "token_ids"),
    ({"token_ids": b"\xff\xff\xff\xff"}, "invalid_request", "token_ids"),
    ({"block_keys": b"x" * 15}, "invalid_request", "block_keys"),
    ({"block_keys": b"x" * 32}, "invalid_request", "block_keys"),
    ({"token_ids": b"\x01\0\0\0" * 257}, "context_length_exceeded", "token_ids"),
    *(({"pulls": pulls}, "invalid_request", field) for pulls, field in BAD_PULLS),
]


async def test_bad_requests_fail_alone(client: Decode) -> None:
    for fields, code, field in BAD:
        handle = await client.start(PROMPT[:20], **fields)
        failed = await client.expect(handle, "failed")
        error = from_detail(failed.error)
        assert (error.code, error.field, failed.drained) == (code, field, True)
    await client.prefill(PROMPT[:5])  # the stream goes on


async def test_a_deadline_in_the_queue_is_kept(service: Running, client: Decode) -> None:
    handle = await client.start(PROMPT)  # no landing: it holds its 4 of 16 pages
    others = [await client.start(PROMPT, salt=str(n), deadline_ms=600) for n in range(4)]
    await client.expect(handle, "begin_fill")
    for other in others[:3]:
        await client.expect(other, "begin_fill")
    for other in others:  # the last one waits for pages, the others for landings
        assert from_detail((await client.expect(other, "failed")).error).code == "deadline_exceeded"
    await client.cancel(handle)
    await client.expect(handle, "drained")
    await settled(service.address, streams=1)


async def refused(client: Decode) -> KvmeshError:
    """The error that the stream ends with."""
    try:
        while True:
            await client.read()
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)


async def test_hello_is_checked(service: Running) -> None:
    async with decode(service.address, None, "", hello=False) as client:
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await client.hello(version=99)
        error = from_rpc_error(info.value)
        assert isinstance(error, ProtocolMismatch)
        assert "99" in error.message
    async with decode(service.address, None, "", hello=False) as client:
        await client.start(PROMPT)
        assert isinstance(await refused(client), InvalidRequest)
    async with decode(service.address, None, "", hello=False) as client:
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await client.hello(descriptors=[b"not a descriptor"])
        assert isinstance(from_rpc_error(info.value), InvalidRequest)
    await settled(service.address, streams=0)


async def test_a_handle_used_twice_ends_the_stream(service: Running, target: Driver, checkpoint: Path) -> None:
    async with decode(service.address, target, target.client.ready.fingerprint) as client:
        await client.start(PROMPT, handle=3)
        await client.start(PROMPT, handle=3)
        error = await refused(client)
        assert isinstance(error, InvalidRequest)
        assert error.field == "handle"
    await settled(service.address, streams=0)


@pytest.mark.slow
async def test_an_unreachable_segment_fails_its_handoff_only(service: Running, checkpoint: Path) -> None:
    """Same machine, but that decode speaks a transport that nobody here does."""
    async with rank("decode-y", checkpoint, ("tcp",), pages=8) as away:
        descriptor = away.client.ready.descriptor
        async with decode(service.address, away, away.client.ready.fingerprint, hello=False) as client:
            await client.hello(descriptors=[])  # never told where it is
            assert descriptor
            handle = await client.start(PROMPT[:20])
            await client.expect(handle, "begin_fill")
            await client.land(handle, 2)
            kinds = []
            while "failed" not in kinds:
                event = await client.read()
                kinds.append(str(event.WhichOneof("kind")))
            assert event.failed.drained
            assert from_detail(event.failed.error).code == "handoff_lost"
        await settled(service.address, streams=0)


@pytest.mark.slow
async def test_stop_says_so_and_leaves_nothing(checkpoint: Path, target: Driver) -> None:
    async with (
        running(run, config(checkpoint, stop_grace_ms=100)) as service,
        decode(service.address, target, target.client.ready.fingerprint) as client,
    ):
        handle = await client.start(PROMPT)
        await client.expect(handle, "begin_fill")
        await service.stop()
        error = await refused(client)
        assert error.retryable


@pytest.mark.slow
async def test_a_killed_rank_fails_what_it_had_and_ends_the_service(checkpoint: Path, target: Driver) -> None:
    others = children()
    service = await Running(run, config(checkpoint)).started()
    async with decode(service.address, target, target.client.ready.fingerprint) as client:
        handle = await client.start(PROMPT)
        await client.expect(handle, "begin_fill")
        for pid in children() - others:
            os.kill(pid, signal.SIGKILL)
        kinds = {}
        while "failed" not in kinds:
            event = await client.read()
            kinds[str(event.WhichOneof("kind"))] = event
        assert from_detail(kinds["failed"].failed.error).code == "handoff_lost"
        with pytest.raises(InternalError, match="rank 0"):
            await service.stop()


@pytest.mark.slow
async def test_a_frozen_rank_fails_its_handoffs_and_serves_again_when_it_wakes(
    checkpoint: Path, target: Driver
) -> None:
    others = children()
    async with running(run, config(checkpoint, rank_silence_ms=700)) as service:
        ranks = children() - others
        async with decode(service.address, target, target.client.ready.fingerprint) as client:
            for pid in ranks:
                os.kill(pid, signal.SIGSTOP)
            try:
                handle = await client.start(PROMPT)
                await client.expect(handle, "begin_fill")
                await client.land(handle, 4)
                failed = await client.expect(handle, "failed")
                assert not failed.drained, "a frozen writer cannot say that it has drained"
            finally:
                for pid in ranks:
                    os.kill(pid, signal.SIGCONT)
            await settled(service.address, streams=1)

            async def serves() -> bool:
                handle = await client.start(PROMPT, salt="again")
                kinds: set[str] = set()
                while not kinds & {"first_token", "failed"}:
                    event = await client.read()
                    kinds.add(str(event.WhichOneof("kind")))
                await client.cancel(handle)
                return "first_token" in kinds

            await until(serves)


async def test_bad_config_is_refused_by_name(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="max_batch_tokens=-1"):
        await run(config(checkpoint, max_batch_tokens=-1), asyncio.Event(), lambda _: None)
    with pytest.raises(ConfigError, match="store_low_percent=91: in "):
        await run(config(checkpoint, store_high_percent=90, store_low_percent=91), asyncio.Event(), lambda _: None)

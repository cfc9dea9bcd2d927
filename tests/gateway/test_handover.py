"""What decode is handed: the placement as the conductor made it, and the digest that the answer's keys continue."""

from __future__ import annotations

from typing import Any

import pytest

from kvmesh.kvcache import keys
from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.rpc.pb import conductor_pb2, decode_pb2
from kvmesh.services.gateway.api_keys import ANYBODY
from kvmesh.services.gateway.models import ServedModelFacts
from tests.gateway.conftest import Mesh
from tests.support.gateway.scripted import BLOCK_TOKENS, MODEL, Run


async def complete(mesh: Mesh, prompt: list[int], **more: Any) -> Any:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 30, **more}
    response = await mesh.http.post("/v1/completions", json=body, headers={"x-kvmesh-timings": "1"})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("tokens", [1, BLOCK_TOKENS - 1, BLOCK_TOKENS, 2 * BLOCK_TOKENS + 5])
@pytest.mark.parametrize("salt", ["", "me"])
async def test_keys_of_the_answer_continue_the_prompts(mesh: Mesh, tokens: int, salt: str) -> None:
    """As decode chains them: the prompt's tail and the answer's first tokens make the next block."""
    prompt = [7 + index % 50 for index in range(tokens)]
    answer = list(range(200, 200 + 2 * BLOCK_TOKENS))
    await complete(mesh, prompt, cache_salt=salt)
    start = mesh.decodes[0].runs[0].start
    space = ServedModelFacts.of(mesh.conductor.card).namespace(ANYBODY, salt)
    whole = keys.split(keys.chain(space, prompt + answer, BLOCK_TOKENS))
    full = tokens // BLOCK_TOKENS
    assert keys.split(start.block_keys) == whole[:full]
    assert len(start.chain_digest) == keys.DIGEST_BYTES
    digest, found = start.chain_digest, []
    every = prompt + answer
    for index in range(full, len(every) // BLOCK_TOKENS):
        packed = keys.pack_tokens(every[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS])
        key, digest = keys.extend(digest, packed)
        found.append(key)
    assert found == whole[full:]


async def test_a_prompt_without_a_full_block_starts_at_the_root_of_its_namespace(mesh: Mesh) -> None:
    await complete(mesh, [7, 8, 9], cache_salt="me")
    root = ServedModelFacts.of(mesh.conductor.card).namespace(ANYBODY, "me").root(BLOCK_TOKENS)
    assert mesh.decodes[0].runs[0].start.chain_digest == root


async def test_the_whole_placement_reaches_decode(mesh: Mesh) -> None:
    holder = pb.InstanceRef(instance_id="pool-0", address="127.0.0.1:9", incarnation=7)
    mesh.conductor.more = conductor_pb2.Placement(
        predicted_ttft_ms=12,
        predicted_cached_tokens=48,
        sources=bytes([1, 2, 3]),
        pulls=[
            pb.PullRange(holder=holder, first_block=0, blocks=2),
            pb.PullRange(holder=holder, first_block=2, blocks=1),
        ],
        decode_pulls=[pb.PullRange(holder=holder, first_block=1, blocks=1)],
    )
    # A field of a later build, which this one does not know, is passed on too.
    later = conductor_pb2.Placement()
    later.ParseFromString(mesh.conductor.more.SerializeToString() + b"\xf8\x3f\x05")
    mesh.conductor.more = later
    await complete(mesh, list(range(60)))
    placement = mesh.decodes[0].runs[0].start.placement
    expected = conductor_pb2.Placement(prefill=pb.InstanceRef(instance_id="prefill-0"), decode=mesh.decodes[0].ref)
    expected.MergeFrom(later)
    assert placement.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)
    assert placement.SerializeToString().endswith(b"\xf8\x3f\x05")


async def test_timings_tell_where_the_prefix_came_from(mesh: Mesh) -> None:
    async def script(run: Run) -> None:
        timings = pb.StageTimings(
            queue_us=1, pull_us=700, pull_bytes=4096, pulled_tokens=32, host_tokens=16, at_decode_tokens=16
        )
        finished = run.finished(1)
        finished.cached_tokens = 48
        finished.timings.CopyFrom(timings)
        one = decode_pb2.Prefilled(slot=run.start.slot, cached_tokens=48, timings=timings)
        await run.send(decode_pb2.SessionResponse(prefilled=[one]))
        await run.token(40, 0, finished)

    mesh.decodes[0].script = script
    body = await complete(mesh, list(range(60)))
    stages = body["kvmesh"]["choices"][0]["stages"]
    wanted = {"pull_us": 700, "pull_bytes": 4096, "pulled_tokens": 32, "host_tokens": 16, "at_decode_tokens": 16}
    assert stages | wanted == stages
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 48

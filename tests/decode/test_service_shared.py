"""Blocks that need not be sent: real instances, real bytes. What is here is loaded, what lies elsewhere is pulled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvmesh.rpc.pb import common_pb2 as pb
from tests.support.decode.bench import Answer, Bench, Gateway, bench
from tests.support.rank_driver import BLOCK
from tests.support.reference import assert_matches_reference

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]


def prompt(seed: int, tokens: int = 37) -> list[int]:
    return [(7 * i * i + 3 * i + 11 * seed) % 90 + 5 for i in range(tokens)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["auto", "host"])
async def mesh(checkpoint: Path, request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    """One instance for all tests of this file, whose landings are in pages, or in extents."""
    async with bench(checkpoint, landing=request.param) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(mesh: Bench) -> AsyncIterator[Gateway]:
    async with mesh.gateway() as made:
        yield made
    await mesh.full()


async def right(mesh: Bench, gateway: Gateway, tokens: list[int], count: int, **changes: Any) -> Answer:
    answer = await gateway.over(await gateway.start(tokens, count, **changes))
    assert not answer.failed, answer.failed
    assert len(answer.tokens) == count
    assert_matches_reference(mesh.checkpoint, tokens, answer.tokens)
    return answer


def here(answer: Answer) -> int:
    assert answer.finished is not None
    return answer.finished.timings.at_decode_tokens


async def test_the_second_turn_finds_prompt_and_answer_here(mesh: Bench, gateway: Gateway) -> None:
    first = await right(mesh, gateway, prompt(1), 30)
    assert here(first) == 0
    await mesh.full()
    # 37 + 30 tokens, the last of which has no KV: four blocks.
    assert (await mesh.pools()).store_blocks >= 4
    turn = prompt(1) + first.tokens + prompt(2, 9)
    second = await right(mesh, gateway, turn, 10)
    landed = mesh.prefill.requests[-1]
    assert landed.first_block == 4
    assert here(second) == 4 * BLOCK
    shard = mesh.prefill.writer.client.ready.shard_bytes
    assert landed.pushed_bytes == shard * (-(-len(turn) // BLOCK) - 4), "only the others were sent"
    # Attention does not care in which order blocks lie: only a prompt that shares some of them shows which is which.
    for shared in (1, 2, 3):
        branch = await right(mesh, gateway, turn[: shared * BLOCK + 5] + prompt(3, 20), 10)
        assert here(branch) == shared * BLOCK


async def test_a_prompt_of_full_blocks_is_sent_its_last_one(mesh: Bench, gateway: Gateway) -> None:
    tokens = prompt(3, 2 * BLOCK)
    await right(mesh, gateway, tokens, 3)
    await mesh.full()
    again = await right(mesh, gateway, tokens, 3)
    assert mesh.prefill.requests[-1].first_block == 1
    assert here(again) == BLOCK


async def test_without_a_chain_digest_only_the_prompt_is_shared(mesh: Bench, gateway: Gateway) -> None:
    first = await right(mesh, gateway, prompt(4), 30, chain_digest=b"")
    await mesh.full()
    second = await right(mesh, gateway, prompt(4) + first.tokens, 3)
    assert here(second) == 2 * BLOCK


async def test_a_cancelled_answer_leaves_right_blocks(mesh: Bench, gateway: Gateway) -> None:
    whole = await right(mesh, gateway, prompt(5), 60, chain_digest=b"")
    slot = await gateway.start(prompt(5), 200)
    await gateway.has(slot, 30)
    await gateway.cancel(slot)
    assert (await gateway.over(slot)).code == "cancelled"
    await mesh.full()
    again = await right(mesh, gateway, prompt(5) + whole.tokens[:40], 5)
    assert here(again) >= 4 * BLOCK


async def test_more_prompts_than_the_store_holds_evict_the_coldest(mesh: Bench, gateway: Gateway) -> None:
    for seed in range(10, 22):
        await right(mesh, gateway, prompt(seed, 50), 4)
    await mesh.full()
    assert (await mesh.pools()).store_blocks <= 24
    assert here(await right(mesh, gateway, prompt(21, 50), 4)) == 3 * BLOCK
    assert here(await right(mesh, gateway, prompt(10, 50), 4)) == 0


async def placement(mesh: Bench, holder: pb.InstanceRef, blocks: int) -> dict[str, Any]:
    pulls = [pb.PullRange(holder=holder, first_block=0, blocks=blocks)]
    return {"prefill": mesh.prefill.ref, "decode_pulls": pulls, "pulls": pulls}


@pytest.mark.slow
async def test_decode_pulls_what_another_instance_holds(mesh: Bench, gateway: Gateway) -> None:
    await right(mesh, gateway, prompt(6, 70), 4)
    await mesh.full()
    assert gateway.reply is not None
    where = await placement(mesh, gateway.reply.instance, 4)
    async with mesh.another() as other, other.gateway() as there:
        answer = await right(other, there, prompt(6, 70), 6, placement=where)
        assert here(answer) == 4 * BLOCK
        landed = mesh.prefill.requests[-1]
        assert landed.first_block == 4
        assert [r.blocks for r in landed.start.pulls] == [4], "prefill was told where its blocks lie"
        await other.full()
        assert (await other.pools()).store_blocks == 4, "sealed there too: that is how prefixes spread"


@pytest.mark.parametrize("wrong", ["incarnation", "address", "keys"])
async def test_a_holder_that_is_not_there_costs_nothing_but_the_pull(mesh: Bench, gateway: Gateway, wrong: str) -> None:
    assert gateway.reply is not None
    holder = pb.InstanceRef()
    holder.CopyFrom(gateway.reply.instance)
    holder.instance_id = "prefill-7"
    if wrong == "incarnation":
        holder.incarnation = 3
    elif wrong == "address":
        holder.address = "127.0.0.1:1"
    seed = {"incarnation": 7, "address": 8, "keys": 9}[wrong]
    answer = await right(mesh, gateway, prompt(seed, 70), 4, placement=await placement(mesh, holder, 4))
    assert here(answer) == 0


@pytest.mark.parametrize(
    ("first", "blocks", "address", "incarnation", "field"),
    [
        (0, 0, "h:1", 1, "blocks"),
        (0, 3, "h:1", 1, "blocks"),
        (4_294_967_295, 1, "h:1", 1, "blocks"),
        (0, 2, "", 1, "holder.address"),
        (0, 2, "h:1", 0, "holder.incarnation"),
    ],
)
async def test_bad_pulls_name_the_field(
    mesh: Bench, gateway: Gateway, first: int, blocks: int, address: str, incarnation: int, field: str
) -> None:
    holder = pb.InstanceRef(instance_id="h", address=address, incarnation=incarnation)
    pulls = [pb.PullRange(holder=holder, first_block=first, blocks=blocks)]
    where = {"prefill": mesh.prefill.ref, "decode_pulls": pulls}
    answer = await gateway.over(await gateway.start(prompt(1), 4, placement=where))
    assert answer.failed is not None
    assert (answer.code, answer.failed.field) == ("invalid_request", f"placement.decode_pulls.{field}")


async def test_too_many_pulls_are_refused(mesh: Bench, gateway: Gateway) -> None:
    pull = pb.PullRange(holder=pb.InstanceRef(instance_id="h", address="h:1", incarnation=1), blocks=1)
    where = {"prefill": mesh.prefill.ref, "decode_pulls": [pull] * 1025}
    answer = await gateway.over(await gateway.start(prompt(1), 4, placement=where))
    assert answer.failed is not None
    assert answer.failed.field == "placement.decode_pulls"

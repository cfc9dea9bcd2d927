"""Blocks computed anywhere are used everywhere, and the tokens stay the reference's whatever way the KV took."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.checkpoints import make_checkpoint
from tests.support.mesh.client import Answer, prompt, until
from tests.support.mesh.direct import Direct, ask_to_pull, blocks_at, lookup, node_store
from tests.support.mesh.harness import Running, running_mesh
from tests.support.reference import assert_matches_reference

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

VOCAB = 301
BLOCK = 16
SHAPE: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "tie_word_embeddings": True,
}
# Reads of prefill-1 are late: time enough to strike in the middle of a pull.
SLOW_READS = json.dumps({"rules": [{"kind": "delay", "op": "read", "delay_ms": 700, "peer": "prefill-0/*"}]})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "llama-gqa4"
    make_checkpoint(path, family="llama", vocab_size=VOCAB, **SHAPE)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["shm,tcp", "tcp"])
async def four(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    """2 prefill, 2 decode, 1 pool node, over each transport."""
    async with running_mesh(
        model,
        tmp_path_factory.mktemp("run"),
        prefill=2,
        decode=2,
        pool=1,
        block_tokens=BLOCK,
        memory_mb=16,
        flags={"*": {"transports": request.param}, "prefill": {"prefill_chunk_tokens": 48}},
    ) as running:
        yield running


def check(model: Path, prompt: list[int], answer: Answer) -> None:
    assert answer.error is None
    assert_matches_reference(model, prompt, answer.tokens)


async def sealed(running: Running, name: str, keys: list[bytes]) -> None:
    """All of `keys` are sealed at `name`, and the master knows."""
    address = running.mesh.addresses[name]

    async def there() -> bool:
        return blocks_of(keys) <= await blocks_at(address)

    await until(there, f"{len(keys)} blocks at {name}")

    async def known() -> bool:
        return all(name in holders for holders in await lookup(running, keys))

    await until(known, f"the master's map naming {name}")


def blocks_of(keys: list[bytes]) -> set[bytes]:
    return set(keys)


async def test_prefill_a_to_store_to_prefill_b_to_decode_c(four: Running, model: Path) -> None:
    direct = await Direct.of(four)
    for seed, length in ((11, 7 * BLOCK), (12, 5 * BLOCK + 3), (13, 12 * BLOCK + 1)):
        tokens = prompt(seed, length, VOCAB)
        keys = direct.keys(tokens)
        usable = (length - 1) // BLOCK
        first = await direct.generate(tokens, 10, prefill="prefill-0", decode="decode-0")
        check(model, tokens, first)
        assert first.cached_tokens == 0
        await sealed(four, "prefill-0", keys)
        second = await direct.generate(
            tokens, 10, prefill="prefill-1", decode="decode-1", pulls=[("prefill-0", 0, len(keys))]
        )
        check(model, tokens, second)
        assert second.tokens == first.tokens
        assert second.timings is not None
        assert second.cached_tokens == second.timings.pulled_tokens == usable * BLOCK
        await sealed(four, "prefill-1", keys[:usable])
    await four.settled()


async def test_multi_turn_the_answers_blocks_come_from_decode(four: Running, model: Path) -> None:
    direct = await Direct.of(four)
    tokens = prompt(21, 4 * BLOCK + 5, VOCAB)
    first = await direct.generate(tokens, 3 * BLOCK, prefill="prefill-0", decode="decode-0")
    check(model, tokens, first)
    # The last token's KV was never computed: its block may be incomplete.
    turn = tokens + first.tokens
    done = (len(turn) - 1) // BLOCK
    await sealed(four, "decode-0", direct.keys(turn)[:done])
    turn += prompt(22, 9, VOCAB)
    second = await direct.generate(turn, 8, prefill="prefill-1", decode="decode-0", pulls=[("decode-0", 0, done)])
    check(model, turn, second)
    assert second.timings is not None
    assert second.cached_tokens == second.timings.pulled_tokens == done * BLOCK
    assert second.timings.at_decode_tokens == done * BLOCK  # not sent again
    third = await direct.generate(
        turn,
        8,
        prefill="prefill-0",
        decode="decode-1",
        decode_pulls=[("decode-0", 0, done)],
        pulls=[("decode-0", 0, done)],
    )
    check(model, turn, third)
    assert third.timings is not None
    assert third.timings.at_decode_tokens == done * BLOCK
    await four.settled()


async def test_a_prefix_from_the_pool_node(four: Running, model: Path) -> None:
    direct = await Direct.of(four)
    tokens = prompt(31, 6 * BLOCK + 2, VOCAB)
    keys = direct.keys(tokens)
    first = await direct.generate(tokens, 8, prefill="prefill-0", decode="decode-0")
    check(model, tokens, first)
    await sealed(four, "prefill-0", keys)
    layout, shard_bytes = await layout_of(four, direct, "prefill-0", keys)
    pool = four.mesh.addresses["pool-0"]
    assert await ask_to_pull(pool, keys, [direct.members["prefill-0"]], layout, shard_bytes) == [True] * len(keys)
    await sealed(four, "pool-0", keys)
    second = await direct.generate(tokens, 8, prefill="prefill-1", decode="decode-1", pulls=[("pool-0", 0, len(keys))])
    check(model, tokens, second)
    assert second.timings is not None
    assert second.timings.pulled_tokens == len(keys) * BLOCK
    await four.settled()


async def layout_of(running: Running, direct: Direct, name: str, keys: list[bytes]) -> tuple[str, int]:
    """The layout tag and shard size that the instance's own store answers with."""
    found = await node_store(running.mesh.addresses[name])
    return found.layout, found.shard_bytes


async def test_hints_that_are_wrong_cost_nothing_but_time(four: Running, model: Path) -> None:
    """A holder that has nothing, one that lives another life, ranges over a hole: computed, and right."""
    direct = await Direct.of(four)
    tokens = prompt(41, 5 * BLOCK + 1, VOCAB)
    answer = await direct.generate(tokens, 6, prefill="prefill-1", decode="decode-1", pulls=[("pool-0", 0, 5)])
    check(model, tokens, answer)
    assert answer.cached_tokens == 0
    direct.members["prefill-0"].incarnation ^= 1
    tokens = prompt(42, 5 * BLOCK + 1, VOCAB)
    answer = await direct.generate(tokens, 6, prefill="prefill-1", decode="decode-1", pulls=[("prefill-0", 0, 5)])
    check(model, tokens, answer)
    assert answer.cached_tokens == 0
    await direct.refresh()
    head = tokens[: 3 * BLOCK]
    check(model, head, await direct.generate(head, 4, prefill="prefill-0", decode="decode-0"))
    await sealed(four, "prefill-0", direct.keys(head))
    other = head + prompt(43, 3 * BLOCK, VOCAB)
    answer = await direct.generate(other, 6, prefill="prefill-1", decode="decode-0", pulls=[("prefill-0", 0, 6)])
    check(model, other, answer)
    assert answer.cached_tokens == 3 * BLOCK
    await four.settled()


@pytest.mark.parametrize("transports", ["shm,tcp", "tcp"])
async def test_a_holder_that_goes_away_in_the_middle_of_the_pull(transports: str, model: Path, tmp_path: Path) -> None:
    """Killed, then frozen until its lease is over and evicting afterwards: computed instead, never a wrong token."""
    flags: dict[str, dict[str, Any]] = {
        "*": {"transports": transports},
        "prefill-0": {"num_extents": 24, "store_lease_ms": 400},
        "prefill-1": {"fault": SLOW_READS, "pull_timeout_ms": 4000},
    }
    async with running_mesh(
        model, tmp_path / "run", prefill=2, decode=1, block_tokens=BLOCK, memory_mb=16, flags=flags
    ) as running:
        holder, pid = running.mesh.addresses["prefill-0"], running.pid("prefill-0")
        keys = await pulled_while(running, model, 51, lambda: running.kill("prefill-0"))
        await running.restarted("prefill-0", pid)
        # Its next life holds nothing, and nobody says that it does.
        await running.ready("prefill-0")
        assert not any("prefill-0" in holders for holders in await lookup(running, keys))
        assert await blocks_at(holder) == set()

        pid = running.pid("prefill-0")
        keys = await pulled_while(running, model, 52, lambda: os.kill(pid, signal.SIGSTOP))
        os.kill(pid, signal.SIGCONT)
        await running.ready("prefill-0")  # the freeze lasts four seconds and more: its membership may have lapsed too
        direct = await Direct.of(running)
        for seed in range(60, 64):  # evicts every block of the lapsed lease
            other = prompt(seed, 7 * BLOCK, VOCAB)
            check(model, other, await direct.generate(other, 2, prefill="prefill-0", decode="decode-0"))

        async def evicted() -> bool:
            return not blocks_of(keys) & await blocks_at(holder)

        await until(evicted, "the eviction of what the lapsed lease covered")
        await running.settled()


async def pulled_while(running: Running, model: Path, seed: int, blow: Callable[[], None]) -> list[bytes]:
    """A new prompt of prefill-0 is pulled by prefill-1, and `blow` falls once the lease is given. Its keys."""
    direct = await Direct.of(running)
    tokens = prompt(seed, 8 * BLOCK + 4, VOCAB)
    keys = direct.keys(tokens)
    check(model, tokens, await direct.generate(tokens, 4, prefill="prefill-0", decode="decode-0"))
    await sealed(running, "prefill-0", keys)
    asked = asyncio.ensure_future(
        direct.generate(tokens, 8, prefill="prefill-1", decode="decode-0", pulls=[("prefill-0", 0, len(keys))])
    )

    async def leased() -> bool:
        return (await node_store(running.mesh.addresses["prefill-0"])).leases_given > 0  # of this life

    await until(leased, "the lease")
    blow()
    answer = await asked
    check(model, tokens, answer)
    assert answer.cached_tokens == 0  # what a holder cannot vouch for to the end is not used
    return keys

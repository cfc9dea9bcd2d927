"""Two real vLLM engines on one pool: the answers are those without it, whatever happens to who holds the blocks."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmesh.rpc import channels
from kvmesh.rpc.pb import store_pb2, store_pb2_grpc
from kvmesh.storeclient import ClientConfig, StoreClient
from tests.connectors.vllm.engines import (
    BLOCK_TOKENS,
    PYTHON_ENV,
    EngineProcess,
    StoreProcess,
    make_model,
    python_of_vllm,
    start_pool,
    store_processes,
    transfer_config,
)
from tests.support.mesh.direct import blocks_at
from tests.support.services import until

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not python_of_vllm(), reason=f"{PYTHON_ENV} names no Python with vLLM (`make vllm-env` prints one)"
    ),
]

LOAD_MS = 1_500
TOKENS = 330  # of a prompt: ten blocks and a rest
SLOW_S = 60.0  # a request that takes longer hangs: its load and lookup have 2 s, its tokens a second
LEVEL = 48 << 20  # bytes by which memory may differ over hundreds of requests; their KV would be 150 MB


def prompt(seed: int, tokens: int = TOKENS) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(512) for _ in range(tokens)]


async def _stores(master: str) -> list[store_pb2.StoreStatus]:
    async with channels.connect(master) as channel:
        stub = store_pb2_grpc.StoreMasterStub(channel)
        told = await stub.GetStatus(store_pb2.GetStoreStatusRequest(), timeout=60, wait_for_ready=True)
    return list(told.stores)


async def stored_blocks(master: str, address: str) -> int:
    """Returns how many of the blocks that lie at a pool node the master knows of. Its own count is some time old."""
    keys = [*await blocks_at(address)]
    async with StoreClient(ClientConfig(store=master)) as client:
        return len(keys) - (await client.exists_many(keys)).count(None)


def wait_stored(master: StoreProcess, pool: StoreProcess, blocks: int) -> None:
    async def enough() -> bool:
        return await stored_blocks(master.address, pool.address) >= blocks

    asyncio.run(until(enough, 60.0))


def wait_joined(master: StoreProcess, pool: StoreProcess) -> None:
    async def joined() -> bool:
        stores = await _stores(master.address)
        return any(store.member.instance.address == pool.address and store.usage.capacity_bytes for store in stores)

    asyncio.run(until(joined, 60.0))


@contextlib.contextmanager
def engines(folder: Path, model: Path, *configs: dict[str, Any], **options: Any) -> Iterator[list[EngineProcess]]:
    """Yields engines that are ready, started side by side."""
    made: list[EngineProcess] = []
    try:
        for at, config in enumerate(configs):
            made.append(EngineProcess(model, config, folder / f"engine-{at}.log", **options))
        for one in made:
            one.wait_ready()
        yield made
    finally:
        for one in made:
            one.stop()


def test_two_engines_share_a_pool_that_dies_freezes_and_is_cut(tmp_path: Path) -> None:
    """A answers first, by computing: its tokens are the reference. B then has A's prefixes by the pool, over tcp, so
    that a frozen node is really waited for."""
    model = make_model(tmp_path / "model", 1)
    with contextlib.ExitStack() as stack:
        master, pool = stack.enter_context(store_processes(tmp_path))
        config = transfer_config(
            master.address, transports="tcp", load_timeout_ms=LOAD_MS, lookup_timeout_ms=500, pause_ms=0
        )
        wait_joined(master, pool)
        first, second = stack.enter_context(engines(tmp_path, model, config, config))
        prompts = [prompt(seed) for seed in range(6)]
        expected = first.run(*prompts, max_tokens=12)
        assert expected["cached"] == [0] * 6
        wait_stored(master, pool, 6 * 10)

        told = second.run(prompts[0], max_tokens=12)
        assert told["tokens"] == expected["tokens"][:1] and told["cached"] == [10 * BLOCK_TOKENS]

        longer = [*prompts[1][: 5 * BLOCK_TOKENS], *prompt(99, 40)]  # a prefix of a prefix, then other tokens
        told = second.run(longer, prompts[1], max_tokens=12)
        assert told["cached"] == [5 * BLOCK_TOKENS, 10 * BLOCK_TOKENS]
        assert told["tokens"] == first.run(longer, prompts[1], max_tokens=12)["tokens"]

        pool.freeze()  # the master believes in it for some seconds
        told = second.run(prompts[2], max_tokens=12)
        assert told["tokens"] == expected["tokens"][2:3] and told["cached"] == [0] and told["seconds"] < SLOW_S
        pool.thaw()
        told = second.run(prompts[3], max_tokens=12)
        assert told["tokens"] == expected["tokens"][3:4] and told["seconds"] < SLOW_S

        pool.freeze()  # then it is killed while B waits for what it was asked for
        strike = threading.Timer(LOAD_MS / 2000, pool.kill)
        strike.start()
        told = second.run(prompts[4], max_tokens=12)
        strike.join()
        assert told["tokens"] == expected["tokens"][4:5] and told["cached"] == [0] and told["seconds"] < SLOW_S
        told = second.run(prompts[5], max_tokens=12)
        assert told["tokens"] == expected["tokens"][5:6] and told["cached"] == [0] and told["seconds"] < SLOW_S

        again = start_pool(tmp_path, master)
        stack.callback(again.stop)
        wait_joined(master, again)
        fresh = prompt(7)
        told = second.run(fresh, max_tokens=12)
        wait_stored(master, again, 10)
        shared = first.run(fresh, max_tokens=12)
        assert shared["tokens"] == told["tokens"] and shared["cached"] == [10 * BLOCK_TOKENS]


def test_memory_stays_level_and_no_store_is_needed(tmp_path: Path) -> None:
    """Two thousand requests, with shared prefixes, with a staging that is often full; then the master and the
    pool go, and requests go on."""
    model = make_model(tmp_path / "model", 2)
    with store_processes(tmp_path, memory_mb=64) as (master, pool):
        config = transfer_config(master.address, save_staging_mb=1, load_timeout_ms=LOAD_MS)
        wait_joined(master, pool)
        with engines(tmp_path, model, config, num_gpu_blocks_override=200) as (engine,):
            levels = []
            for turn in range(250):
                shared = prompt(turn % 5)
                batch = [[*shared[: 6 * BLOCK_TOKENS], *prompt(1000 + turn * 8 + at, 40)] for at in range(8)]
                levels.append(engine.run(*batch, max_tokens=4, forget=turn % 3 == 0)["rss"])
            assert levels[-1] - levels[49] < LEVEL, levels
            expected = engine.run(prompt(3), max_tokens=8, forget=True)
            pool.kill()
            master.kill()
            told = engine.run(prompt(3), max_tokens=8, forget=True)
            assert told["tokens"] == expected["tokens"] and told["seconds"] < SLOW_S

"""Blocks that prefill takes from its host segment and from another instance: real services, ranks and bytes."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvmesh.kvcache.keys import split
from kvmesh.rpc import channels
from kvmesh.rpc.pb import blocks_pb2, blocks_pb2_grpc
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.services.prefill.main import run
from tests.prefill.test_service import PROMPT, config, spans_of
from tests.support.prefill.client import Decode, decode, instance, pools, settled
from tests.support.rank_driver import Driver, rank
from tests.support.reference import assert_matches_reference
from tests.support.services import Running, running, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCKS = 3  # full ones of PROMPT


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def target(checkpoint: Path) -> AsyncIterator[Driver]:
    async with rank("decode-x", checkpoint, ("shm", "tcp"), pages=100) as found:
        yield found


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def holder(checkpoint: Path, traces: Path) -> AsyncIterator[Running]:
    """Its telemetry is the process's: it writes the reader's spans too."""
    async with running(run, config(checkpoint, instance_id="prefill-a", trace_dir=str(traces))) as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reader(checkpoint: Path, holder: Running) -> AsyncIterator[Running]:
    async with running(run, config(checkpoint, instance_id="prefill-b", pull_timeout_ms=1_500)) as found:
        yield found


def talk(service: Running, target: Driver):  # type: ignore[no-untyped-def]
    return decode(service.address, target, target.client.ready.fingerprint)


async def hint(service: Running, first: int = 0, blocks: int = BLOCKS, **wrong: object) -> pb_common.PullRange:
    """Blocks of `service`'s node store; `wrong` replaces fields of its reference."""
    ref = (await instance(service.address)).instance
    for name, value in wrong.items():
        setattr(ref, name, value)
    return pb_common.PullRange(holder=ref, first_block=first, blocks=blocks)


async def sealed(service: Running, blocks: int) -> None:
    """That many blocks are in its node store."""

    async def there() -> bool:
        return (await pools(service.address)).store_blocks >= blocks

    await until(there)


async def check(checkpoint: Path, client: Decode, salt: str, **fields: object) -> pb_common.StageTimings:
    """A whole handoff with the reference's tokens; how its prefix was found."""
    first, _, pages = await client.prefill(PROMPT, salt=salt, **fields)
    tokens = await client.generate(PROMPT, first.token_id, pages, 6)
    assert_matches_reference(checkpoint, PROMPT, tokens)
    return first.timings


@pytest.mark.slow
async def test_what_the_device_evicted_comes_back_from_the_host_segment(checkpoint: Path, target: Driver) -> None:
    """Four pages: nothing of the first prompt is left on the device. Five: its head is, and may be pushed at once."""
    for pages, host in ((4, 48), (5, 32)):
        async with (
            running(run, config(checkpoint, num_pages=pages, num_extents=16, max_context_tokens=64)) as service,
            talk(service, target) as client,
        ):
            for salt in ("a", "b"):
                assert (await check(checkpoint, client, salt)).host_tokens == 0
            await settled(service.address, streams=1)
            found = await check(checkpoint, client, "a")
            assert (found.host_tokens, found.pulled_tokens, found.pull_us) == (host, 0, 0)
            assert (await pools(service.address)).store_blocks == 2 * BLOCKS
            await settled(service.address, streams=1)


async def test_a_prefix_is_pulled_from_another_instance(
    checkpoint: Path, target: Driver, holder: Running, reader: Running, traces: Path
) -> None:
    async with talk(holder, target) as client:
        await check(checkpoint, client, "pulled")
    await sealed(holder, BLOCKS)
    async with talk(reader, target) as client:
        parent = "00-" + "a1" * 16 + "-" + "b2" * 8 + "-01"
        # Hints may be wrong: of another life, beyond what is there. The next one is asked.
        pulls = [await hint(holder, incarnation=7), await hint(holder, 0, 2), await hint(holder)]
        found = await check(checkpoint, client, "pulled", pulls=pulls, traceparent=parent)
        shard = target.client.ready.shard_bytes
        assert (found.pulled_tokens, found.host_tokens, found.pull_bytes) == (48, 0, BLOCKS * shard)
        assert found.pull_us > 0
        # Now it has them itself, on the device and in its own store.
        again = await check(checkpoint, client, "pulled", pulls=pulls)
        assert (again.pulled_tokens, again.host_tokens, again.pull_bytes) == (0, 0, 0)
        assert (await pools(reader.address)).store_blocks == BLOCKS
        await settled(reader.address, streams=1)
    await settled(holder.address, streams=0)

    async def recorded() -> bool:
        found = spans_of(traces, "a1" * 16)
        assert {"kvmesh.prefill", "kvmesh.pull", "kvmesh.fetch", "kvmesh.load"} <= found.keys()
        life = found["kvmesh.prefill"]
        assert life["attributes"]["kvmesh.pulled_tokens"] == 48
        assert found["kvmesh.pull"]["parent"] == found["kvmesh.load"]["parent"] == life["span_id"]
        assert found["kvmesh.fetch"]["parent"] == found["kvmesh.pull"]["span_id"]
        return True

    await until(recorded)


async def test_what_nobody_has_is_computed(checkpoint: Path, target: Driver, holder: Running, reader: Running) -> None:
    async with talk(reader, target) as client:
        gone = await hint(holder, address="127.0.0.1:9")
        found = await check(checkpoint, client, "nowhere", pulls=[await hint(holder), gone])
        assert (found.pulled_tokens, found.pull_bytes) == (0, 0)
        await settled(reader.address, streams=1)


@pytest.mark.slow
async def test_a_store_full_of_what_others_read_costs_only_the_shared_blocks(
    checkpoint: Path, target: Driver, holder: Running
) -> None:
    """All extents but one, which the watermark keeps free, are under somebody's lease: what cannot be fetched is
    computed, and what is computed is not shared, until the lease is over. Nobody waits for it, and nobody fails."""
    async with talk(holder, target) as client:
        await check(checkpoint, client, "wanted")
    await sealed(holder, BLOCKS)
    settings = config(checkpoint, instance_id="prefill-c", num_extents=BLOCKS, max_context_tokens=64)
    async with running(run, settings) as service, talk(service, target) as client:
        await check(checkpoint, client, "first")
        await sealed(service, BLOCKS - 1)
        await settled(service.address, streams=1)
        async with channels.connect(service.address) as channel:
            store: Any = blocks_pb2_grpc.NodeStoreStub(channel)
            keys = b"".join(await keys_at(service))
            who = await instance(service.address)
            request = blocks_pb2.LeaseRequest(
                reader="r", holder_incarnation=who.instance.incarnation, keys=keys, lease_ms=60_000
            )
            request.layout = (await store.GetStore(blocks_pb2.GetNodeStoreRequest(), timeout=10)).layout
            lease = await store.Lease(request, timeout=10)
            assert lease.held == b"\1" * (BLOCKS - 1)
            for _ in range(2):
                found = await check(checkpoint, client, "wanted", pulls=[await hint(holder)])
                assert found.pulled_tokens <= 16
            there = await store.Exists(blocks_pb2.ExistsRequest(keys=keys), timeout=10)
            assert 0 not in there.tiers, "what is read went"
            await store.ReleaseLease(blocks_pb2.ReleaseBlocksRequest(lease_id=lease.lease_id), timeout=10)
        await check(checkpoint, client, "anew")
        await settled(service.address, streams=1)
        assert not set(await keys_at(service)) & set(split(keys))


async def keys_at(service: Running) -> list[bytes]:
    """Every key of its node store."""
    async with channels.connect(service.address) as channel:
        store: Any = blocks_pb2_grpc.NodeStoreStub(channel)
        told = [part.keys async for part in store.ListBlocks(blocks_pb2.ListBlocksRequest(), timeout=10)]
    return split(b"".join(told))


async def test_a_cancel_while_a_holder_is_silent(target: Driver, holder: Running, reader: Running) -> None:
    """The holder's port takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        pulls = [await hint(holder, address=f"127.0.0.1:{silent.getsockname()[1]}")]
        async with talk(reader, target) as client:
            await cancel_while_pulling(reader, client, pulls)


async def cancel_while_pulling(reader: Running, client: Decode, pulls: list[pb_common.PullRange]) -> None:
    handle = await client.start(PROMPT, salt="silent", pulls=pulls)

    async def pulling() -> bool:
        return (await pools(reader.address)).pulls == 1

    await until(pulling)
    await client.cancel(handle)
    await client.expect(handle, "drained")
    await settled(reader.address, streams=1)


async def test_two_requests_wait_for_one_pull(
    checkpoint: Path, target: Driver, holder: Running, reader: Running
) -> None:
    async with talk(holder, target) as client:
        await check(checkpoint, client, "both")
    await settled(holder.address, streams=0)
    async with talk(reader, target) as client:
        pulls = [await hint(holder)]
        one = await client.start(PROMPT, salt="both", pulls=pulls)
        two = await client.start(PROMPT[:50], salt="both", pulls=pulls)
        bytes_pulled = 0
        for handle in (one, two):
            begin = await client.expect(handle, "begin_fill")
            await client.land(handle, begin.num_blocks)
            first = await client.expect(handle, "first_token")
            assert first.cached_tokens == 48
            bytes_pulled += first.timings.pull_bytes
            await client.expect(handle, "fill_done")
        assert bytes_pulled == BLOCKS * target.client.ready.shard_bytes
        await settled(reader.address, streams=1)

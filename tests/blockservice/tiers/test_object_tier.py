"""Object storage below a node's memory: real ranks, a real S3 server, and what front and readers make of them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvmesh.blockservice.tiers.parts import TierSettings
from kvmesh.errors import ConfigError
from kvmesh.instance.config import InstanceConfig
from kvmesh.kvcache.tiers import Tier
from kvmesh.pool.config import PoolConfig
from tests.blockservice.tiers.test_tiers import counted, fill_below, lease, own_pull
from tests.support.nodes import SHARD, Bench, bench, keys_of, node
from tests.support.s3_server import S3, s3_server


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server:
        yield server


@pytest.fixture
def settings(s3: S3) -> TierSettings:
    url = f"s3://{s3.bucket()}/kv"
    return TierSettings(path=Path(), capacity_bytes=0, offload_percent=0, staging_percent=25, url=url)


@pytest.fixture
async def desk() -> AsyncIterator[Bench]:
    async with bench() as made:
        yield made


async def test_written_behind_read_back_and_there_for_the_next_life(desk: Bench, settings: TierSettings) -> None:
    keys, never = keys_of(*range(12)), keys_of("never")
    async with node("a", tiers=settings) as a, node("b") as b:
        await fill_below(a, desk, keys)
        pulled = await a.ended(own_pull(a, keys[:6]))
        assert pulled.arrived == pulled.lower == tuple(range(6)), pulled
        await a.check(desk, keys[:6])
        got = await b.ended(b.pull([*keys[4:10], *never], [a.range_of(0, 7)]))
        assert got.arrived == tuple(range(6)), got
        await b.check(desk, keys[4:10])
        told = await counted(a, hits=10, blocks=12)
        assert (int(told.tier), told.capacity_bytes, told.used_bytes) == (Tier.OBJECT.value, 0, 12 * SHARD)
    async with node("a", tiers=settings) as a:
        assert a.blocks is not None and set(a.blocks.lower_keys()) == set(keys)
        assert (await lease(a, keys[:3])).held == b"\1" * 3
        await a.check(desk, keys[:3])
        assert await a.blocks.forget(keys[:4]) == 4
    async with node("a", tiers=settings) as a:
        assert a.blocks is not None and set(a.blocks.lower_keys()) == set(keys[4:])
        assert (await lease(a, keys[2:6])).held == b"\0\0\1\1"


async def test_a_store_that_is_not_there_is_refused_by_name(settings: TierSettings) -> None:
    with pytest.raises(ConfigError, match="object_url=") as refused:
        async with node("a", tiers=replace(settings, url="s3://no-such-bucket/x")):
            pass
    assert refused.value.field == "object_url"


@pytest.mark.parametrize("config", [PoolConfig, InstanceConfig])
def test_what_can_be_no_object_store_is_refused_before_anything_starts(
    config: type[PoolConfig | InstanceConfig],
) -> None:
    for url, why in (
        ("ftp://x", "must be like s3://bucket/prefix; schemes: s3, "),
        ("bucket", "must be like s3://bucket/prefix; schemes: s3, "),
        ("s3://", "names no bucket: must be like s3://bucket/prefix"),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"object_url={url!r}: {why}")) as refused:
            config(object_url=url).check_tiers(90)
        assert refused.value.field == "object_url"
    config(object_url="S3://bucket").check_tiers(90)

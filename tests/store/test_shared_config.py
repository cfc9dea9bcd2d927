"""What the first leader of a mesh was told, later ones go by."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.rpc import channels
from kvmesh.rpc.pb import store_pb2_grpc
from kvmesh.services.store import main
from kvmesh.services.store.config import SHARED, StoreConfig, settled
from tests.support.redis_server import RedisServer, needs_redis, redis_server
from tests.support.services import running, until
from tests.support.store.mesh import TIMEOUT, joining


def test_the_first_leader_writes_its_own() -> None:
    own = StoreConfig(tombstone_s=7200)
    found = settled(own, {})
    assert found.config == own and not found.notes
    assert found.keep == {name.encode(): str(getattr(own, name)).encode() for name in SHARED}


def test_later_ones_go_by_it_and_say_where_they_differ() -> None:
    kept = settled(StoreConfig(tombstone_s=7200, lease_ms=3000), {}).keep
    own = StoreConfig(hot_lookups=256, tombstone_s=60, port=9)
    found = settled(own, kept)
    assert found.config == dataclasses.replace(own, tombstone_s=7200, lease_ms=3000)
    assert not found.keep
    assert sorted(note.split(":")[0] for note in found.notes) == ["lease_ms=2000", "tombstone_s=60"]


def test_reconfigure_writes_what_differs() -> None:
    kept = settled(StoreConfig(tombstone_s=7200), {}).keep
    own = StoreConfig(tombstone_s=60, reconfigure=True)
    found = settled(own, kept)
    assert (found.config, found.keep, found.notes) == (own, {b"tombstone_s": b"60"}, ())
    assert settled(StoreConfig(), {**kept, **found.keep}).config.tombstone_s == 60


def test_what_an_earlier_build_did_not_know_is_added() -> None:
    kept = settled(StoreConfig(), {}).keep
    del kept[b"max_names"]
    assert settled(StoreConfig(max_names=5), kept).keep == {b"max_names": b"5"}


def test_what_does_not_fit_together_is_refused_with_a_note() -> None:
    own = StoreConfig()
    found = settled(own, {b"lease_ms": b"1"})
    assert found.config == own and "lease_ms=1" in found.notes[0]


@given(st.dictionaries(st.sampled_from([name.encode() for name in SHARED] + [b"?"]), st.binary(max_size=30)))
def test_nothing_that_is_kept_keeps_a_master_from_leading(kept: dict[bytes, bytes]) -> None:
    own = StoreConfig()
    found = settled(own, kept)
    for name in SHARED:
        value = kept.get(name.encode(), b"")
        assert getattr(found.config, name) in {getattr(own, name), int(value) if value.isdigit() else -1}
    again = settled(own, {**kept, **found.keep})
    assert again.config == found.config and not again.keep


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as started:
        yield started


async def interval_told(server: RedisServer, **settings: Any) -> int:
    """How often a master of this mesh tells members to beat, once it leads, ms."""
    config = StoreConfig(redis=server.url, mesh="configured", leader_lease_ms=500, **settings)
    async with running(main.run, config) as master, channels.connect(master.address) as channel:
        stub: Any = store_pb2_grpc.StoreMasterStub(channel)
        told: list[int] = []

        async def joined() -> bool:
            with contextlib.suppress(grpc.RpcError):  # it does not lead yet
                told.append((await stub.Join(joining("a"), timeout=TIMEOUT)).heartbeat_interval_ms)
            return bool(told)

        await until(joined)
        return told[0]


@needs_redis
async def test_masters_of_one_mesh_decide_alike(server: RedisServer, tmp_path: Path) -> None:
    assert await interval_told(server, heartbeat_interval_ms=70) == 70
    assert await interval_told(server, heartbeat_interval_ms=90) == 70
    assert await interval_told(server, heartbeat_interval_ms=90, reconfigure=True) == 90
    assert await interval_told(server) == 90

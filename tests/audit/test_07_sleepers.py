"""A reader sleeps past its lease in the middle of a read; the holder gives the extent to another block meanwhile. The
reader wakes with clocks that have stood still, reads the other block's bytes, and must neither seal nor return them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvmesh.storeclient import StoreClient
from tests.audit.sleepers.process import Slept, sleeper
from tests.support.nodes import bench, keys_of, node, until
from tests.support.services import until as until_true
from tests.support.store_clients import MIB, stores, values

pytestmark = pytest.mark.slow

LEASE_MS = 3_000
SLOW_READS = json.dumps({"rules": [{"kind": "delay", "op": "read", "delay_ms": 1_000}]})  # over before a renewal is due


@pytest.mark.parametrize(
    ("transport", "slept"),
    [
        ("shm", "suspended"),
        ("tcp", "paused"),
        pytest.param("shm", "paused", marks=pytest.mark.long),
        pytest.param("tcp", "suspended", marks=pytest.mark.long),
    ],
)
async def test_a_node_that_slept_past_its_lease_seals_nothing_of_it(
    tmp_path: Path, transport: str, slept: Slept
) -> None:
    names = list(range(4))
    transports = (transport,)
    async with bench() as b, node("a", total=8, lease_ms=LEASE_MS, transports=transports) as a:
        await a.fill(b, keys_of(*names))
        async with sleeper("node_reader", tmp_path) as reader:
            reader.tell(
                names=names,
                transport=transport,
                holder=a.name,
                address=a.address,
                incarnation=a.incarnation,
                lease_ms=LEASE_MS,
                fault=SLOW_READS,
            )
            assert await reader.hear() == {"ready": True}
            assert await reader.hear() == {"reading": True}
            assert a.store.stats.leases == 1
            reader.sleep()
            await until(lambda: a.store.stats.leases == 0)  # by its timer
            extents = a.store.allocate(8)
            others = [(key, a.partition.offset(0, extent)) for key, extent in zip(keys_of(*"abcdefgh"), extents)]  # noqa: B905
            await b.write(a, others, a.shard)
            reader.wake(slept)
            end = await reader.hear()
            assert end["wrong"] == [], "another block's bytes are sealed under these keys"
            assert end["arrived"] == [] and "lease" in end["cause"]


@pytest.mark.parametrize(
    ("transport", "into", "slept"),
    [
        ("shm", True, "paused"),
        ("tcp", True, "suspended"),
        ("tcp", False, "paused"),
        pytest.param("shm", True, "suspended", marks=pytest.mark.long),
        pytest.param("tcp", True, "paused", marks=pytest.mark.long),
        pytest.param("tcp", False, "suspended", marks=pytest.mark.long),
    ],
)
async def test_a_client_that_slept_past_its_lease_gets_nothing_of_it(
    tmp_path: Path, transport: str, into: bool, slept: Slept
) -> None:
    (data,) = values(1, MIB)
    async with stores("a", store_lease_ms=LEASE_MS, transports="shm,tcp") as one, one.client() as client:
        key = (await client.put_many([data]))[0].key
        async with sleeper("client_reader", tmp_path) as reader:
            reader.tell(
                store=one.address,
                transport=transport,
                fault=SLOW_READS,
                lease_ms=LEASE_MS,
                key=key.hex(),
                nbytes=MIB,
                into=into,
            )
            assert await reader.hear() == {"ready": True}
            await until_true(lambda: _leases(client, 1))
            reader.sleep()
            await client.remove(key)
            await until_true(lambda: _leases(client, 0))
            others = values(2, *[MIB] * 48)  # more than there is room for: every extent is used again
            await client.put_many(others)
            reader.wake(slept)
            end = await reader.hear()
            assert end["first"] in (None, data[:16].hex()), "another block's bytes are handed to the caller"
            assert end["first"] is None, "and it did sleep in the middle of its read"


async def _leases(client: StoreClient, count: int) -> bool:
    (store,) = (await client._directory.status(5)).stores
    return store.usage.leases == count

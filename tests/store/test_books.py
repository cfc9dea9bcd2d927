"""What is kept for the next leader, when keeping it fails; calls that are cut short by the end of a session; many
tombstones."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from kvmesh.errors import InvalidRequest, NotLeader, Unavailable, UnknownInstance
from kvmesh.rpc.pb import store_pb2 as pb
from kvmesh.services.store.config import StoreConfig
from kvmesh.services.store.durable import MemoryDurable
from kvmesh.services.store.main import Master
from kvmesh.services.store.orders import StoreOrderQueue
from kvmesh.services.store.policy.reconciliation import UnconfirmedRemovals
from kvmesh.services.store.policy.store_policy import StorePolicy
from kvmesh.services.store.policy.tombstones import Tombstones
from kvmesh.services.store.servicer import StoreMasterServicer
from kvmesh.services.store.state import MasterState
from kvmesh.services.store.watchers import Watchers
from tests.support.store.mesh import joining, keys


class Failing(MemoryDurable):
    """Keeps nothing while `lost`; `under_way` lets others run first."""

    lost = False

    def __init__(self) -> None:
        super().__init__()
        self.under_way = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def put(self, kind: str, items: Mapping[bytes, bytes], term: int) -> None:
        self.under_way.set()
        await self.goes_on.wait()
        if self.lost:
            raise Unavailable("redis: no answer")
        await super().put(kind, items, term)

    async def delete(self, kind: str, keys: Collection[bytes], term: int) -> None:
        if self.lost:
            raise Unavailable("redis: no answer")
        await super().delete(kind, keys, term)


def servicer(durable: Failing) -> Any:
    return StoreMasterServicer(
        MasterState(lease_s=60, stall_s=60),
        Watchers(
            incarnation=1,
            interval_s=1,
            max_events=9,
            max_bytes=99,
            max_watchers=1,
            leads=lambda: True,
            term=lambda: 1,
        ),
        incarnation=1,
        clock=time.monotonic,
        leads=lambda: True,
        durable=durable,
        orders=StoreOrderQueue(lambda: True),
    )


def binding(**names: bytes) -> pb.BindRequest:
    return pb.BindRequest(namespace="n", names=[pb.NamedKey(name=name, key=key) for name, key in names.items()])


async def test_a_binding_that_could_not_be_kept_leaves_the_others_as_they_were() -> None:
    one, two, three = keys(3, salt=1)
    durable = Failing()
    master = servicer(durable)
    await master.Bind(binding(x=one), None)
    durable.lost = True
    with pytest.raises(Unavailable):
        await master.Bind(binding(x=two, y=two), None)
    durable.lost = False
    assert (await master.Bind(binding(x=three), None)).keys == one, "it stood all the time"
    await master.close()


async def test_nobody_is_told_of_a_binding_that_is_not_kept() -> None:
    (one,) = keys(1, salt=1)
    durable = Failing()
    master = servicer(durable)
    durable.goes_on.clear()
    durable.lost = True
    bind = asyncio.ensure_future(master.Bind(binding(x=one), None))
    await durable.under_way.wait()
    found = await master.Resolve(pb.ResolveRequest(namespace="n", names=["x"]), None)
    assert found.keys == bytes(16)
    durable.goes_on.set()
    with pytest.raises(Unavailable):
        await bind
    await master.close()


async def test_an_unbinding_that_got_halfway_is_made_good_by_the_next() -> None:
    """Else the next leader would bind the name again."""
    (one,) = keys(1, salt=1)
    durable = Failing()
    master = servicer(durable)
    await master.Bind(binding(x=one), None)
    durable.lost = True
    unbind = pb.ResolveRequest(namespace="n", names=["x"], unbind=True)
    with pytest.raises(Unavailable):
        await master.Resolve(unbind, None)
    durable.lost = False
    await master.Resolve(unbind, None)
    assert (await durable.load())["name"] == {}
    await master.close()


async def test_a_name_is_forgotten_only_while_it_stands_for_what_the_caller_saw() -> None:
    """Two who replace a name at the same time: the first one's new binding is not the other's to end."""
    one, two, three = keys(3, salt=1)
    durable = Failing()
    master = servicer(durable)
    await master.Bind(binding(x=one, y=one), None)

    def unbind(*wanted: bytes) -> pb.ResolveRequest:
        return pb.ResolveRequest(namespace="n", names=["x", "y"][: len(wanted)], unbind=True, keys=b"".join(wanted))

    assert (await master.Resolve(unbind(one), None)).keys == one
    await master.Bind(binding(x=two), None)
    assert (await master.Resolve(unbind(one, bytes(16)), None)).keys == two + one, "neither was meant"
    assert (await master.Bind(binding(x=three, y=three), None)).keys == two + one
    assert len((await durable.load())["name"]) == 2
    await master.Remove(pb.RemoveRequest(keys=one), None)
    await master.Resolve(unbind(bytes(16), bytes(16)), None)
    assert [name[2:] for name in (await durable.load())["name"]] == [b"x"], "its block is there no more"
    for request in (
        pb.ResolveRequest(namespace="n", names=["x"], unbind=True, keys=one + two),
        pb.ResolveRequest(namespace="n", names=["x"], keys=one),
    ):
        with pytest.raises(InvalidRequest, match="keys"):
            await master.Resolve(request, None)
    await master.close()


async def test_a_removal_that_a_reign_does_not_survive_goes_to_the_next_leader() -> None:
    """Whoever asked hears that this master leads no more, and asks another one."""
    master = servicer(Failing())
    began = asyncio.Event()

    async def silent(*args: Any) -> None:
        began.set()
        await asyncio.Event().wait()

    master._orders.call = silent
    await master.Join(joining("a"), None)
    removal = asyncio.ensure_future(master.Remove(pb.RemoveRequest(keys=b"".join(keys(1))), None))
    await began.wait()
    await master.close()
    with pytest.raises(NotLeader):
        await removal


class Counted(int):
    """A number that counts how often it is compared."""

    compared = 0

    def __gt__(self, other: int) -> bool:
        Counted.compared += 1
        return int(self) > int(other)

    def __lt__(self, other: int) -> bool:
        Counted.compared += 1
        return int(self) < int(other)


def test_many_tombstones_cost_no_more_than_few() -> None:
    """Single removals for an hour: each one, and each heartbeat, must not read through all of them."""
    tombstones = Tombstones()
    tombstones.joined("a", 0)
    tombstones.joined("behind", 0)
    count = 20_000
    for i in range(count):
        made = tombstones.add(1, [i.to_bytes(16, "big")], b"", 0.0)
        tombstones.applied("a", made.seq)
        tombstones.reported("a", made.seq)
    tombstones.add(1, [bytes(16)], b"", 0.0)
    tombstones._applied["a"] = tombstones._reported["a"] = Counted(tombstones._applied["a"])
    assert tombstones.is_next("a", tombstones.last) and not tombstones.is_next("behind", tombstones.last)
    assert [each.seq for each in tombstones.newer("a")] == [tombstones.last]
    assert Counted.compared < 100
    few = tombstones.newer("behind", most=50)
    assert [each.keys[0] for each in few] == [i.to_bytes(16, "big") for i in range(len(few))] and len(few) == 5


def test_many_prefixes_cost_no_more_than_few() -> None:
    tombstones = Tombstones()
    for i in range(5_000):
        tombstones.add(1, (), i.to_bytes(4, "big"), 0.0)
    first = tombstones.last - 4_999
    keys_ = [i.to_bytes(4, "big") + bytes(12) for i in (0, 7, 4_999, 5_000)]
    assert [tombstones.covered_since(key, first + 6) for key in keys_] == [False, True, True, False]
    tombstones.joined("a", first + 6)
    assert tombstones.masked("a", keys_) == set(keys_[1:3])


def test_farewells_grow_by_what_is_new() -> None:
    farewells = UnconfirmedRemovals()
    farewells.dropped("a", [bytes(16)])
    before = farewells._open["a"]
    farewells.dropped("a", [b"1" * 16])
    assert farewells._open["a"] is before and len(before) == 2


async def test_much_that_was_kept_is_read_beside_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million names take longer than a lease: a master that read them on its event loop would never lead for long.
    However long it takes, members have a lease from then on to find it."""
    now, threads = 0.0, []

    def slow(self: StorePolicy, *args: Any) -> list[str]:
        nonlocal now
        now += 1_000
        threads.append(threading.get_ident())
        return []

    monkeypatch.setattr(StorePolicy, "lead", slow)
    master = Master(StoreConfig(redis="redis://127.0.0.1:9/0"), clock=lambda: now)
    leading = SimpleNamespace(leads=lambda: True, term=5)
    monkeypatch.setattr(master, "leadership", leading)
    master._durable = MemoryDurable()
    await master._take_over(0)
    assert threads and threads[0] != threading.get_ident()
    assert master.session is not None and master.session.young()
    now += 1_000
    assert not master.session.young()
    await master.session.close()


async def test_a_drain_that_could_not_be_kept_is_kept_by_the_next_try() -> None:
    durable = Failing()
    master = servicer(durable)
    await master.Join(joining("a"), None)
    drain, cancel = pb.DrainRequest(instance_id="a"), pb.DrainRequest(instance_id="a", cancel=True)
    durable.lost = True
    with pytest.raises(Unavailable):
        await master.Drain(drain, None)
    durable.lost = False
    await master.Drain(drain, None)
    assert (await durable.load())["drain"] == {b"a": b""}
    durable.lost = True
    with pytest.raises(Unavailable):
        await master.Drain(cancel, None)
    durable.lost = False
    await master.Drain(cancel, None)
    assert (await durable.load())["drain"] == {}
    await master.close()


async def test_a_drain_that_is_over_does_not_begin_again_under_the_next_leader() -> None:
    """Its node has left, was looked after, and comes back under its name."""
    durable = Failing()
    master = servicer(durable)
    await master.Join(joining("a"), None)
    await master.Drain(pb.DrainRequest(instance_id="a"), None)
    master._state.policy.drains.get("a").done = True
    durable.lost = True
    await master.Leave(pb.LeaveRequest(instance=joining("a").member.instance), None)
    master.tick()
    await asyncio.gather(*master._orders._tasks)
    assert (await durable.load())["drain"] == {b"a": b""}
    durable.lost = False
    master.tick()
    await asyncio.gather(*master._orders._tasks)
    assert (await durable.load())["drain"] == {}
    await master.close()


async def test_a_leaving_nodes_own_drain_ends_with_its_life() -> None:
    """Nothing is kept of it, and one of that name which comes back does not drain; an operator's word stays."""
    durable = Failing()
    master = servicer(durable)
    await master.Join(joining("a"), None)
    life = joining("a").member.instance.incarnation
    ours = pb.DrainRequest(instance_id="a", incarnation=life)
    with pytest.raises(UnknownInstance, match="incarnation=63: no life of 'a'"):
        await master.Drain(pb.DrainRequest(instance_id="a", incarnation=99), None)
    await master.Drain(ours, None)
    drains = master._state.policy.drains
    assert "a" in drains and not (await durable.load())["drain"]
    master._state.policy.drains.joined("a", life)  # it enters again, the same life
    assert "a" in drains
    master._state.policy.drains.joined("a", life + 1)
    assert "a" not in drains
    await master.Drain(ours, None)
    await master.Drain(pb.DrainRequest(instance_id="a"), None)
    assert (await durable.load())["drain"] == {b"a": b""}
    master._state.policy.drains.joined("a", life + 1)
    assert "a" in drains
    await master.close()

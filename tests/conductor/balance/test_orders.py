"""Orders carried out: copies between real node stores, roles at a real server; each ends in time and is told of."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from kvmesh.instance.profiling import RankProfiles
from kvmesh.instance.servicer import add_instance
from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.rpc.server import Server
from kvmesh.services.conductor.balance import orders as carrying
from kvmesh.services.conductor.balance.orders import MAX_ORDERS, BalanceOrders
from kvmesh.services.conductor.domain import OrderEnded, Ref, Replicate, Role, SwitchRole
from kvmesh.telemetry import names
from tests.support.nodes import Node, bench, keys_of, node, until


class Told:
    """What the brain hears."""

    def __init__(self, leads: Callable[[], bool] = lambda: True) -> None:
        self.ended: list[OrderEnded] = []
        self.orders = BalanceOrders(leads, self.ended.append)

    async def all_of(self, *orders: SwitchRole | Replicate) -> list[OrderEnded]:
        try:
            self.orders.carry_out(orders)
            await until(lambda: len(self.ended) >= len(orders))
        finally:
            await self.orders.close()
        return sorted(self.ended, key=lambda one: one.number)


class Front:
    """What the role servicer needs of an instance."""

    def __init__(self, *, switchable: bool = True) -> None:
        self.role: pb.Role.ValueType = pb.ROLE_DECODE
        self.switch: Callable[[pb.Role.ValueType], None] | None = self._become if switchable else None
        self.ref = pb.InstanceRef(instance_id="c0", incarnation=7)
        self.not_ready_reason = ""
        self.profiles = RankProfiles([])

    def _become(self, role: pb.Role.ValueType) -> None:
        self.role = role


@asynccontextmanager
async def instance(front: Front) -> AsyncIterator[str]:
    server = Server("127.0.0.1", 0)
    add_instance(front, server)
    try:
        yield f"127.0.0.1:{await server.start()}"
    finally:
        await server.stop(0)


@contextlib.contextmanager
def silence() -> Iterator[str]:
    """Somebody whose kernel takes connections and who never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def ref(of: Node) -> Ref:
    return Ref(of.name, of.address, of.incarnation)


def switch(number: int, address: str, incarnation: int = 7) -> SwitchRole:
    return SwitchRole(Ref("c0", address, incarnation), Role.PREFILL, "too much to prefill", number)


def counted(order: str, outcome: str) -> float:
    return float(names.CONDUCTOR_ORDERS.labels(order=order, outcome=outcome)._value.get())


async def test_a_copy_is_pulled_by_its_target_in_calls_of_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrying, "PULL_BLOCKS", 8)
    keys = tuple(keys_of(*range(20)))
    before = counted("replicate", "done")
    async with bench() as b, node("a") as a, node("b") as target:
        await a.fill(b, keys)
        (end,) = await Told().all_of(Replicate(keys, ref(a), ref(target), "hot", 3))
        assert end == OrderEnded(3, held=20)
        await target.check(b, keys)
        assert counted("replicate", "done") == before + 1


async def test_what_the_source_has_lost_is_not_held_and_ends_the_copy() -> None:
    keys = tuple(keys_of(*range(10)))
    async with bench() as b, node("a") as a, node("b") as target:
        await a.fill(b, keys[:6])
        (end,) = await Told().all_of(Replicate(keys, ref(a), ref(target), "hot", 1))
        assert end == OrderEnded(1, held=6)


async def test_a_target_that_is_gone_and_one_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrying, "COPY_S", 0.3)
    monkeypatch.setattr(carrying, "ROLE_S", 0.3)
    keys = tuple(keys_of(1))
    with silence() as address:
        source, dead = Ref("a", "127.0.0.1:1", 1), Ref("b", "127.0.0.1:1", 1)
        ends = await Told().all_of(
            Replicate(keys, source, dead, "hot", 1),
            Replicate(keys, source, Ref("c", address, 1), "hot", 2),
            switch(3, "127.0.0.1:1"),
            switch(4, address),
        )
    assert [(end.number, end.held, bool(end.error)) for end in ends] == [(n, 0, True) for n in (1, 2, 3, 4)]


async def test_a_role_is_taken_or_refused() -> None:
    front, fixed = Front(), Front(switchable=False)
    async with instance(front) as address, instance(fixed) as other:
        ends = await Told().all_of(switch(1, address, 8), switch(2, other))
        assert "lives as 7, not 8" in ends[0].error
        assert "was started as a decode instance" in ends[1].error
        assert front.role == pb.ROLE_DECODE
        assert await Told().all_of(switch(3, address)) == [OrderEnded(3)]
        assert front.role == pb.ROLE_PREFILL


async def test_who_leads_no_more_orders_nothing() -> None:
    front = Front()
    async with instance(front) as address:
        ends = await Told(leads=lambda: False).all_of(
            switch(1, address), Replicate((bytes(16),), Ref("a", address, 1), Ref("b", address, 1), "hot", 2)
        )
    assert [end.error for end in ends] == ["this conductor leads no more"] * 2
    assert front.role == pb.ROLE_DECODE


async def test_its_end_cuts_what_is_under_way() -> None:
    """Nobody hears of it then, and no task is left."""
    with silence() as address:
        told = Told()
        told.orders.carry_out([switch(n, address) for n in range(3)])
        await asyncio.sleep(0)
        await asyncio.wait_for(told.orders.close(), 5)
        assert told.ended == []
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("order ")]


async def test_too_many_at_once_are_refused_at_once() -> None:
    with silence() as address:
        told = Told()
        told.orders.carry_out([switch(n, address) for n in range(MAX_ORDERS + 2)])
        assert [end.number for end in told.ended] == [MAX_ORDERS, MAX_ORDERS + 1]
        await told.orders.close()

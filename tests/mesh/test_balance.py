"""A leading conductor's orders in a real mesh: a hot prefix gets a second holder, an idle instance another role, while
requests go on; and what it says of the load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvmesh.cli.role import set_role
from kvmesh.cli.scale import scale_hints
from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.rpc.pb import conductor_pb2, conductor_pb2_grpc
from tests.support.mesh.client import pools, until
from tests.support.mesh.direct import Direct, blocks_at
from tests.support.mesh.harness import Running

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(240)]

FLAGS: dict[str, dict[str, Any]] = {
    "conductor": {
        "switch_roles": True,
        "balance_window_ms": 500,
        "role_dwell_ms": 3000,
        "heartbeat_interval_ms": 50,
        "fetch": "never",  # so that a copy is an order's
    },
    "coupled": {"max_running": 4, "num_pages": 600, "num_extents": 1000},
}


def prompt(tokens: int, seed: int) -> list[int]:
    return [20 + (seed + 7 * i) % 200 for i in range(tokens)]


async def statuses(running: Running) -> dict[str, conductor_pb2.InstanceStatus]:
    async with connect(running.mesh.addresses["conductor"]) as channel:
        stub: Any = conductor_pb2_grpc.ConductorStub(channel)
        told = await stub.GetStatus(conductor_pb2.GetConductorStatusRequest(), timeout=30)
    return {one.instance.instance_id: one for one in told.instances}


async def roles(running: Running) -> dict[str, pb.Role.ValueType]:
    return {name: told.role for name, told in (await statuses(running)).items()}


@asynccontextmanager
async def load(clients: int, ask: Callable[[int], Any]) -> AsyncIterator[list[int]]:
    """Clients that ask one thing after the other; what fails fails the test. Gives how often each was served."""
    stop, served = asyncio.Event(), [0] * clients

    async def client(n: int) -> None:
        while not stop.is_set():
            answer = await ask(n)
            assert answer.error is None, answer.error
            served[n] += 1

    tasks = [asyncio.create_task(client(n)) for n in range(clients)]
    try:
        yield served
    finally:
        stop.set()
        await asyncio.gather(*tasks)


async def test_orders_of_a_leader(mesh: Callable[..., AbstractAsyncContextManager[Running]], demo_path: Path) -> None:
    async with mesh(demo_path, prefill=0, decode=0, coupled=2, block_tokens=16, flags=FLAGS) as running:
        for name in running.instances():
            await running.ready(name)
        await a_hot_prefix_gets_a_second_holder(running)
        await an_idle_instance_takes_another_role(running)
        await running.settled()


async def a_hot_prefix_gets_a_second_holder(running: Running) -> None:
    """One request after the other, so each finds its holder idle and is answered there: nobody would copy the prefix
    but for the order. Where a busy machine makes the holder look slow, the other one computes it after all: then once
    more, with another prefix."""
    direct = await Direct.of(running)
    await become(running, {"coupled-0": pb.ROLE_BOTH, "coupled-1": pb.ROLE_PREFILL})
    for n in range(9):  # what computing takes is known of both, so nobody is tried for being unknown
        for prefill in ("coupled-0", "coupled-1"):
            answer = await direct.generate(prompt(100 + 150 * n, 50 + n), 2, prefill=prefill, decode="coupled-0")
            assert answer.error is None, answer.error
    for seed in range(5):
        hot = prompt(1900, 3 + seed)
        keys = set(direct.keys(hot))
        assert (await direct.generate(hot, 2, prefill="coupled-0", decode="coupled-0")).error is None
        await until(partial(indexed, running, "coupled-0", keys), "the prefix in the index")
        assert not await holds(running, "coupled-1", keys)
        async with load(1, lambda n, hot=hot: running.client.generate(hot, 2)) as served:
            await until(partial(holds, running, "coupled-1", keys), "the prefix at the second instance")
        if await orders(running, "replicate"):
            assert served[0] > 1, "requests went on while it was copied"
            return
    raise AssertionError("nobody ordered a copy")


async def holds(running: Running, name: str, keys: set[bytes]) -> bool:
    return keys <= await blocks_at(running.mesh.addresses[name])


async def indexed(running: Running, name: str, keys: set[bytes]) -> bool:
    held = len(await blocks_at(running.mesh.addresses[name]))
    return held >= len(keys) and (await statuses(running))[name].indexed_blocks == held


async def an_idle_instance_takes_another_role(running: Running) -> None:
    """A pair is made of the two; answers are long. Nobody but the only prefill instance can help, and it may not leave
    its role: it does both. What it holds stays, and what runs goes on.

    Where the machine is busy, prompts are slow and decode may be the one with time left: then coupled-1 does both, and
    coupled-0 may leave its role, as somebody else does prefill."""
    address = running.mesh.addresses["coupled-0"]
    # In this order: were there no decode instance for a moment, the leader would make coupled-0 one.
    await become(running, {"coupled-1": pb.ROLE_DECODE, "coupled-0": pb.ROLE_PREFILL})
    kept = await blocks_at(address)
    assert kept
    before = await orders(running, "switch_role")

    async def does_both() -> bool:
        return pb.ROLE_BOTH in (await roles(running)).values()

    async def hinted() -> bool:
        hints = {hint.role: hint for hint in await scale_hints(running.mesh.addresses["conductor"])}
        return hints.keys() == set((await roles(running)).values()) and all(hint.load > 0.5 for hint in hints.values())

    async with load(12, lambda n: running.client.generate(prompt(40, 100 + n), 100)) as served:
        await until(does_both, "one of them to do both", 75.0)
        await until(hinted, "hints for the new pools")
        aim = sum(served) + 24
        await until(lambda: enough(served, aim), "requests to go on")
    assert await orders(running, "switch_role") > before
    assert kept <= await blocks_at(address), "blocks went with the role"
    assert (await pools(address, "coupled")).requests == 0


async def become(running: Running, wanted: dict[str, pb.Role.ValueType]) -> None:
    for name, role in wanted.items():
        await set_role(running.mesh.addresses[name], role)

    async def known() -> bool:
        return await roles(running) == wanted

    await until(known, f"roles {wanted}")


async def enough(served: list[int], aim: int) -> bool:
    return sum(served) >= aim


async def orders(running: Running, kind: str) -> float:
    """Carried out so far, as the conductor's metrics say."""
    async with httpx.AsyncClient() as http:
        told = (await http.get(f"http://{running.mesh.processes['conductor'].spec.metrics}/metrics")).text
    sought = f'kvmesh_conductor_orders_total{{order="{kind}",outcome="done"}} '
    return sum(float(line.removeprefix(sought)) for line in told.splitlines() if line.startswith(sought))

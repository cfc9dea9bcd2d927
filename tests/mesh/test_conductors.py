"""Two conductors, a Redis, a mesh under load: either is killed, an instance is cordoned, no request is lost."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvmesh.cli import collect, cordon, runs
from kvmesh.rpc.pb import conductor_pb2 as pb
from tests.support.mesh.client import Answer, until
from tests.support.mesh.harness import Running, running_mesh
from tests.support.redis_server import needs_redis

pytestmark = [
    needs_redis,
    pytest.mark.mesh,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="session"),
]

LEASE_S = 2.0  # of the leading conductor
NAMES = ["conductor-0", "conductor-1"]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    folder = tmp_path_factory.mktemp("conductors")
    async with running_mesh(demo_path, folder, decode=2, conductors=2, redis="auto") as running:
        yield running


def prompts(count: int, salt: int = 0) -> list[list[int]]:
    return [[(i * 131 + j * j * 7 + j + salt) % 230 + 20 for j in range(90)] for i in range(count)]


def addresses(mesh: Running) -> tuple[str, ...]:
    return tuple(mesh.mesh.addresses[name] for name in NAMES)


async def told(mesh: Running) -> dict[str, dict[str, Any]]:
    """What each conductor says of itself, by name."""
    found = (await collect.ask_conductors(",".join(addresses(mesh))))["conductors"]
    by_address = {one["address"]: one for one in found}
    return {name: by_address[mesh.mesh.addresses[name]] for name in NAMES}


async def leader(mesh: Running, above: int = 0) -> tuple[str, int]:
    """Who leads with a term above that."""
    found: list[tuple[str, int]] = []

    async def look() -> bool:
        all_of_them = {name: one.get("leadership", {}) for name, one in (await told(mesh)).items()}
        found[:] = [(n, one["term"]) for n, one in all_of_them.items() if one.get("role") == "leader"]
        return any(term > above for _, term in found)

    await until(look, "a leader")
    assert len(found) == 1, found
    return found[0]


async def asked(mesh: Running, name: str) -> float:
    """Requests that conductor has placed in this life."""
    text = await asyncio.to_thread(_metrics, mesh.mesh.processes[name].spec.metrics)
    lines = [line for line in text.splitlines() if line.startswith("kvmesh_conductor_decisions_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines if 'outcome="placed"' in line)


def _metrics(address: str) -> str:
    import urllib.request

    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


async def in_use(mesh: Running) -> str:
    """The conductor that places the gateway's requests now."""
    before = {name: await asked(mesh, name) for name in NAMES}
    await mesh.client.generate(prompts(1)[0], 1)
    (name,) = [name for name in NAMES if await asked(mesh, name) > before[name]]
    return name


async def steady_load(mesh: Running, stop: asyncio.Event, expected: list[Answer]) -> list[tuple[float, Answer, int]]:
    """Requests one after another in each of four lanes until `stop`: (seconds, answer, which prompt)."""
    done: list[tuple[float, Answer, int]] = []

    async def lane(first: int) -> None:
        number = first
        while not stop.is_set():
            index = number % len(expected)
            start = time.monotonic()
            answer = await mesh.client.generate(prompts(len(expected))[index], 12, timeout_s=30, timeout_ms=25_000)
            done.append((time.monotonic() - start, answer, index))
            number += 4

    await asyncio.gather(*(lane(i) for i in range(4)))
    return done


async def test_kill_of_the_conductor_in_use_under_load(mesh: Running) -> None:
    expected = [await mesh.client.generate(p, 12) for p in prompts(8)]
    victim = await in_use(mesh)
    other = next(name for name in NAMES if name != victim)
    pid, before = mesh.pid(victim), await asked(mesh, other)
    stop = asyncio.Event()
    load = asyncio.create_task(steady_load(mesh, stop, expected))

    async def busy() -> bool:
        return await asked(mesh, victim) > 12

    await until(busy, "requests at the victim")
    mesh.kill(victim)

    async def moved() -> bool:
        return await asked(mesh, other) > before + 12

    await until(moved, "requests at the other")
    stop.set()
    for _, answer, index in await load:
        assert answer.error is None, "the other one placed it"
        assert answer.tokens == expected[index].tokens
    await mesh.restarted(victim, pid)
    assert await in_use(mesh) == other, "it stays with the one that answers"

    async def knows_all() -> bool:
        return (await told(mesh))[victim].get("known_instances") == 3

    await until(knows_all, "the new life to know all instances")
    mesh.kill(other)
    again = await mesh.client.generate(prompts(8)[0], 12)
    assert (again.error, again.tokens) == (None, expected[0].tokens), "a restarted conductor places"
    await mesh.restarted(other, 0)
    await mesh.settled()


async def test_the_standby_leads_and_a_frozen_leader_wakes_as_none(mesh: Running) -> None:
    name, term = await leader(mesh)
    mesh.kill(name, signal.SIGSTOP)
    try:
        follower, later = await leader(mesh, above=term)
        assert follower != name
        assert later > term
        answer = await mesh.client.generate(prompts(1)[0], 4, timeout_s=30)
        assert answer.error is None, "placed by whoever answers"
    finally:
        mesh.kill(name, signal.SIGCONT)

    async def stands_by() -> bool:
        said = (await told(mesh))[name].get("leadership", {})
        return (said.get("role"), said.get("term")) == ("standby", later)

    await until(stands_by, "the former leader to say that it leads no more")
    assert await leader(mesh) == (follower, later)


async def test_a_cordon_holds_at_both_and_over_restarts(mesh: Running) -> None:
    request = partial(pb.CordonRequest, instance_id="decode-0")
    assert runs.conductors(runs.find(mesh.mesh.run_dir)) == ",".join(addresses(mesh))
    assert await cordon.tell(addresses(mesh), request(state=pb.CORDON_STATE_CORDONED, reason="a test")) == 0

    async def held() -> bool:
        for address in addresses(mesh):
            found = await collect.ask_conductors(address)
            words = [i["not_ready_reason"] for i in found.get("instances", []) if _id(i) == "decode-0"]
            if words != ["cordoned: a test"]:
                return False
        return True

    await until(held, "the cordon at both")
    for name in ("decode-0", *NAMES):
        pid = mesh.pid(name)
        mesh.kill(name)
        await mesh.restarted(name, pid)
        await until(held, f"the cordon after a restart of {name}")
    for p in prompts(6, salt=5):
        answer = await mesh.client.generate(p, 4)
        assert answer.error is None
        placed = await collect.explained(",".join(addresses(mesh)), answer.request_id)
        assert placed is not None
        assert placed["placement"]["decode"]["instance_id"] == "decode-1"
    assert await cordon.tell(addresses(mesh), request(state=pb.CORDON_STATE_UNSPECIFIED)) == pb.CORDON_STATE_CORDONED

    async def open_again() -> bool:
        found = await collect.ask_conductors(",".join(addresses(mesh)))
        return all(i["ready"] for i in found["instances"])

    await until(open_again, "all instances")
    await mesh.settled()


def _id(one: dict[str, Any]) -> str:
    return str(one["instance"]["instance_id"])

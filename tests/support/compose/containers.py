"""A mesh of containers under test: `docker compose` and what is done to it from outside."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc
import httpx

from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import (
    common_pb2,
    conductor_pb2,
    conductor_pb2_grpc,
    decode_pb2_grpc,
    prefill_pb2_grpc,
    store_pb2,
    store_pb2_grpc,
)
from tests.support.mesh.client import leaks
from tests.support.paths import ROOT

FILES = (ROOT / "compose" / "compose.yaml", ROOT / "tests" / "compose" / "compose.test.yaml")
PROJECT = "kvmesh-test"
COMMAND_S = 240.0
POLL_S = 0.1
LOOKS, LOOK_S = 4, 0.02  # requests seen, before one is called the busiest
METRICS = 9100
PORTS = {"conductor": 7001, "store": 7002, "prefill": 7010, "decode": 7020, "pool": 7030, "redis": 6379}
Worker = prefill_pb2_grpc.PrefillStub | decode_pb2_grpc.DecodeStub


class Refused(AssertionError):
    """A command that failed, with what it said."""


async def run(*command: str, timeout_s: float = COMMAND_S, env: Mapping[str, str] | None = None) -> str:
    """What it printed. Refused: it failed, or took longer."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(env or {})},
    )
    try:
        async with asyncio.timeout(timeout_s):
            said, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise Refused(f"{' '.join(command)}: not done within {timeout_s:g} s") from None
    text = said.decode(errors="replace")
    if process.returncode:
        raise Refused(f"{' '.join(command)}: exit status {process.returncode}: {text[-2000:]}")
    return text


@dataclass(frozen=True, slots=True)
class Container:
    """`address` is "" while it is on no network or does not run. `health`: "", "starting", "healthy" or "unhealthy"."""

    name: str
    service: str
    address: str
    running: bool
    paused: bool
    health: str

    @property
    def target(self) -> str:
        return f"{self.address}:{PORTS[self.service]}"


class Containers:
    """One compose project. Its commands wait for what they do."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = {"COMPOSE_PROJECT_NAME": PROJECT, **env}

    async def compose(self, *arguments: str, timeout_s: float = COMMAND_S) -> str:
        files = [word for path in FILES for word in ("-f", str(path))]
        return await run("docker", "compose", *files, *arguments, timeout_s=timeout_s, env=self.env)

    async def up(self, **scale: int) -> None:
        """All of it, healthy. Twelve processes import at once: on two slow cores that others use that takes minutes."""
        scales = [word for service, count in scale.items() for word in ("--scale", f"{service}={count}")]
        await self.compose("up", "-d", "--wait", "--wait-timeout", "420", *scales, timeout_s=450.0)

    async def down(self) -> None:
        """Nothing is left: containers, networks, volumes."""
        await self.compose("down", "--volumes", "--timeout", "2")

    async def scale(self, service: str, count: int) -> None:
        """As many containers; new ones are healthy, those that are too many have ended."""
        await self.compose("scale", f"{service}={count}")
        await self.healthy(service, count)

    async def all(self) -> list[Container]:
        """Every container of the project, in the order of their names. Asked of the daemon itself: a `docker` process
        for each look would take the machine from what is tested."""
        ours = json.dumps({"label": [f"com.docker.compose.project={PROJECT}"]})
        transport = httpx.AsyncHTTPTransport(uds=_socket())
        async with httpx.AsyncClient(transport=transport, base_url="http://docker", timeout=COMMAND_S) as daemon:
            listed = await daemon.get("/containers/json", params={"all": "1", "filters": ours})
            ids = [one["Id"] for one in listed.raise_for_status().json()]
            told = await asyncio.gather(*(daemon.get(f"/containers/{one}/json") for one in ids))
        # Without those that have just been removed.
        found = [_container(one.raise_for_status().json()) for one in told if one.status_code != 404]
        return sorted(found, key=lambda one: one.name)

    async def of(self, service: str) -> list[Container]:
        return [one for one in await self.all() if one.service == service]

    async def healthy(self, service: str, count: int | None = None, timeout_s: float = 120.0) -> None:
        """All (`count`) containers of `service` are healthy."""

        async def done() -> bool:
            found = await self.of(service)
            return all(one.health == "healthy" for one in found) and count in (None, len(found))

        await until(done, f"{service} healthy", timeout_s)

    # ── what befalls a container ──────────────────────────────────────────────────────────────────

    async def kill(self, name: str) -> None:
        """SIGKILL to all that runs in it."""
        await run("docker", "kill", "-s", "KILL", name)

    async def start(self, name: str) -> None:
        await run("docker", "start", name)

    async def pause(self, name: str) -> None:
        """Again when runc could not freeze it: the kernel has not caught all of its threads in time, and it runs on."""
        for last in (False, False, True):
            try:
                await run("docker", "pause", name)
                break
            except Refused as err:
                if last or "unable to freeze" not in str(err):
                    raise
            await asyncio.sleep(1.0)

    async def unpause(self, name: str) -> None:
        await run("docker", "unpause", name)

    async def restart(self, name: str) -> None:
        """SIGTERM, its grace, and up again."""
        await run("docker", "restart", "-t", "60", name)

    async def disconnect(self, name: str) -> None:
        await run("docker", "network", "disconnect", f"{PROJECT}_mesh", name)

    async def connect(self, container: Container) -> None:
        """Back on the network, under its names; with the address that it had, if nobody else took it."""
        await run(
            "docker", "network", "connect", "--ip", container.address, "--alias", container.service,
            f"{PROJECT}_mesh", container.name,
        )  # fmt: skip

    async def cut(self, source: str, target: str) -> None:
        """Packets from address `source` to `target` are dropped; those the other way pass."""
        await run("iptables", "-I", "DOCKER-USER", "-s", source, "-d", target, "-j", "DROP")

    async def heal(self, source: str, target: str) -> None:
        await run("iptables", "-D", "DOCKER-USER", "-s", source, "-d", target, "-j", "DROP")

    # ── what the services say ─────────────────────────────────────────────────────────────────────

    async def metrics(self, container: Container) -> str:
        async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
            return (await client.get(f"http://{container.address}:{METRICS}/metrics")).text

    async def leader(self, service: str) -> tuple[Container, Container]:
        """(who leads, one who does not) of conductor or store."""
        found: list[Container] = []

        async def known() -> bool:
            roles = [(await _role(one), one) for one in await self.of(service)]
            found[:] = [one for role in ("leader", "standby") for its, one in roles if its == role]
            return [role for role, _ in roles].count("leader") == 1 and len(found) > 1

        await until(known, f"a leader of {service}")
        return found[0], found[1]

    async def busiest(self, service: str) -> Container:
        """Of prefill or decode: who has had most requests in a few looks, and some right now."""
        found = await self.of(service)
        had = dict.fromkeys((one.name for one in found), 0)

        async def known() -> bool:
            pools = await asyncio.gather(*(_pools(stub) for stub in stubs))
            now = {one.name: each.requests + each.handoffs for one, each in zip(found, pools, strict=True)}
            for name, count in now.items():
                had[name] += count
            best = max(had, key=lambda name: had[name])
            return had[best] >= LOOKS and now[best] > 0

        async with AsyncExitStack() as stack:
            stubs = [_stub(one, await stack.enter_async_context(channel_to(one))) for one in found]
            await until(known, f"work at {service}", 30.0, LOOK_S)
        return max(found, key=lambda one: had[one.name])

    async def full(self) -> list[str]:
        """What is left in the pools of workers; nothing, when all of them are full again."""
        left: list[str] = []
        for service in ("prefill", "decode"):
            for one in await self.of(service):
                async with channel_to(one) as channel:
                    left += [f"{one.name}: {leak}" for leak in leaks(await _pools(_stub(one, channel)))]
        return left


def _container(told: dict) -> Container:  # type: ignore[type-arg]
    networks = told["NetworkSettings"]["Networks"]
    address = next((net["IPAddress"] for name, net in networks.items() if name == f"{PROJECT}_mesh"), "")
    state = told["State"]
    return Container(
        told["Name"].lstrip("/"),
        told["Config"]["Labels"]["com.docker.compose.service"],
        address,
        state["Running"],
        state["Paused"],
        state.get("Health", {}).get("Status", ""),
    )


def _socket() -> str:
    """Of the daemon on this machine: the tests need its containers' addresses, too."""
    return os.environ.get("DOCKER_HOST", "").removeprefix("unix://") or "/var/run/docker.sock"


async def until(condition, what: str, timeout_s: float = 60.0, poll_s: float = POLL_S) -> None:  # type: ignore[no-untyped-def]
    """Refused when `condition()` has not become true in time."""
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    while not await condition():
        if loop.time() > end:
            raise Refused(f"not within {timeout_s:g} s: {what}")
        await asyncio.sleep(poll_s)


@asynccontextmanager
async def channel_to(container: Container) -> AsyncIterator[grpc.aio.Channel]:
    async with connect(container.target) as channel:
        yield channel


def _stub(container: Container, channel: grpc.aio.Channel) -> Worker:
    stub = {"prefill": prefill_pb2_grpc.PrefillStub, "decode": decode_pb2_grpc.DecodeStub}[container.service]
    return stub(channel)


async def _pools(worker: Worker) -> common_pb2.PoolCounters:
    return (await worker.GetPools(common_pb2.GetPoolsRequest(), timeout=5)).pools


async def _role(container: Container) -> str:
    """ "leader", "standby" or "" of a conductor or master."""
    if not container.address or not container.running or container.paused:
        return ""
    try:
        async with channel_to(container) as channel:
            if container.service == "conductor":
                stub = conductor_pb2_grpc.ConductorStub(channel)
                told = await stub.GetStatus(conductor_pb2.GetConductorStatusRequest(), timeout=3)
                return told.leadership.role
            master = store_pb2_grpc.StoreMasterStub(channel)
            leads = (await master.GetStatus(store_pb2.GetStoreStatusRequest(), timeout=3)).leading
            return "leader" if leads else "standby"
    except grpc.RpcError:
        return ""

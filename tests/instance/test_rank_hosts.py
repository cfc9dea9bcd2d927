"""Whose ranks a rank host runs, with which settings, and what an instance may say of its hosts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvmesh.errors import ConfigError, HandoffLost, InvalidRequest, KvmeshError, ProtocolMismatch, Unavailable
from kvmesh.instance import host_link
from kvmesh.instance.config import InstanceConfig
from kvmesh.instance.front import check_hosts
from kvmesh.instance.host_link import RankHostLink, ranks_at
from kvmesh.instance.rank_host import RankHostServicer, prepared
from kvmesh.instance.rank_host_config import RanksConfig
from kvmesh.ranks import protocol as m
from kvmesh.ranks.client import RankClient
from kvmesh.rpc import security
from kvmesh.rpc.authorisation import CallerRole, Identity
from kvmesh.rpc.certificates import make_role_certificates
from kvmesh.rpc.pb import ranks_pb2_grpc
from kvmesh.rpc.security import Security, TlsFiles
from kvmesh.rpc.server import Server
from tests.support.mesh.client import until


def config(**given: Any) -> InstanceConfig:
    settings: dict[str, Any] = {"tensor_parallel": 4, "rank_hosts": "10.0.0.2:7,10.0.0.3:7,10.0.0.4:7"}
    return InstanceConfig(**settings | given)


def test_ranks_are_dealt_out_in_order() -> None:
    assert ranks_at(6, 2) == [range(2), range(2, 4), range(4, 6)]
    check_hosts(config())


@pytest.mark.parametrize(
    ("given", "field", "why"),
    [
        ({"tensor_parallel": 6}, "rank_hosts", "do not have equal parts of 6 ranks"),
        ({"rank_hosts": "10.0.0.2"}, "rank_hosts", "must be HOST:PORT"),
        ({"tls_cert": "c", "tls_ca": "a"}, "rank_network", "declared trusted alone"),
        ({"rank_hosts": "", "rank_network": "10.0.0.0/99"}, "rank_network", "not a network"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], field: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        check_hosts(config(**given))
    assert caught.value.field == field
    assert f"{field}=" in caught.value.message


def test_under_tls_a_network_that_is_named_is_trusted() -> None:
    check_hosts(config(tls_cert="c", tls_ca="a", rank_network="10.0.0.0/24"))


def configure(**given: Any) -> m.Configure:
    numbers = {"block_tokens": 16, "num_pages": 8, "num_extents": 8, "memory_bytes": 1 << 20, "threads": 1}
    words = {"instance_id": "d", "model_path": "", "dtype": "float32", "device": "cpu", "transports": ("shm",)}
    shape = {"incarnation": 1, "rank": 0, "world_size": 1, "max_context_tokens": 0}
    return m.Configure(**{**numbers, **words, **shape, **given})


def test_the_host_sets_what_belongs_to_it() -> None:
    host = RanksConfig(host="10.0.0.2", transports="tcp", model="/here", rank_network="eth1")
    there = prepared(host, "10.0.0.1", configure(model_path="/there", host="10.0.0.1", num_pages=9))
    assert (there.model_path, there.host, there.transports) == ("/here", "10.0.0.2", ("tcp",))
    assert (there.rank_network, there.rank_route, there.num_pages) == ("eth1", "10.0.0.1", 9)
    same = prepared(RanksConfig(), "10.0.0.1", configure(model_path="/there", rank_network="10.0.0.0/24"))
    assert (same.model_path, same.rank_network) == ("/there", "10.0.0.0/24")


def test_what_outlives_a_rank_lies_in_folders_of_its_host() -> None:
    """A front names no folder of another machine: not by its settings, and not by its name."""
    host = RanksConfig(ssd_path="/disk", warm_segment="/dev/shm/w")
    for name, folder in (("d.dp1", "d.dp1"), ("../../etc", "%2E.%2F..%2Fetc"), ("..", "%2E.")):
        there = prepared(host, "10.0.0.1", configure(instance_id=name, ssd_path="/etc", warm_segment="/tmp"))
        assert (there.ssd_path, there.warm_segment) == (f"/disk/{folder}", f"/dev/shm/w/{folder}")
    assert prepared(host, "10.0.0.1", configure()).ssd_path == ""
    with pytest.raises(InvalidRequest, match="warm_segment='/tmp': this rank host has no folder"):
        prepared(RanksConfig(ssd_path="/disk"), "10.0.0.1", configure(ssd_path="/etc", warm_segment="/tmp"))


# ── over a real stream; a rank without an engine starts in a second ───────────────────────────────


class Front:
    """The front of one rank at a host."""

    def __init__(self, address: str, instance_id: str = "d", incarnation: int = 1, silence_s: float = 30.0) -> None:
        self.causes: asyncio.Queue[str] = asyncio.Queue()
        self.rank = RankClient(0, lambda *_: None, lambda _, cause: self.causes.put_nowait(cause))
        self.link = RankHostLink(address, instance_id, incarnation, [self.rank], 1, silence_s)

    async def ready(self, **given: Any) -> psutil.Process:
        await self.link.open()
        await self.rank.configure(configure(**given), 60)
        return psutil.Process(self.rank.pid)

    async def lost(self) -> str:
        async with asyncio.timeout(20):
            return await self.causes.get()

    async def close(self) -> None:
        await self.rank.close()
        await self.link.close()


@asynccontextmanager
async def rank_host(tls: Security | None = None, **given: Any) -> AsyncIterator[str]:
    server = Server("127.0.0.1", 0, tls=tls)
    servicer = RankHostServicer(RanksConfig(**given))
    ranks_pb2_grpc.add_RankHostServicer_to_server(servicer, server.grpc)
    await server.start()
    try:
        yield server.address
    finally:
        servicer.end("the test is over")
        await server.stop(0.5)


async def gone(process: psutil.Process) -> None:
    async def over() -> bool:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE

    await until(over, f"the end of {process.pid}", 20)


async def test_a_rank_ends_when_asked_when_killed_and_with_its_front() -> None:
    async with rank_host() as address:
        asked = Front(address)
        process = await asked.ready()
        assert asked.rank.ready.host_bytes >= 1 << 20
        await asked.close()
        await gone(process)
        assert asked.causes.empty()
        killed = Front(address, incarnation=2)
        process = await killed.ready()
        process.kill()
        assert await killed.lost() == f"rank 0 (pid {process.pid} on {address}) was killed by SIGKILL"
        await killed.close()
        dies = Front(address, incarnation=3)
        process = await dies.ready()
        await dies.link.close()
        await gone(process)


async def test_a_newer_incarnation_takes_the_place_of_an_older_one() -> None:
    async with rank_host() as address:
        old, new = Front(address, incarnation=5), Front(address, incarnation=6)
        process = await old.ready()
        await new.ready()
        await gone(process)
        assert "newer incarnation" in await old.lost()
        with pytest.raises(KvmeshError, match="d runs here as incarnation 6"):
            await Front(address, incarnation=5).link.open()
        await old.close()
        await new.close()


async def test_who_is_silent_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_link, "LEAST_SILENCE_S", 0.3)
    async with rank_host() as address:
        front = Front(address, silence_s=3.0)
        process = await front.ready()
        monkeypatch.setattr(front.link, "_send", lambda _: None)
        await gone(process)
        assert "its front has been silent" in await front.lost()
        await front.close()


async def test_what_a_front_may_not_ask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rank_host(max_ranks=1) as address:
        front = Front(address)
        await front.ready()
        with pytest.raises(KvmeshError, match="max_ranks=1: 1 ranks run here"):
            await Front(address, "other").link.open()
        await front.close()
        for name in ("", "x" * 257, "a\x1b[2J"):  # a store master would take this host no more
            with pytest.raises(KvmeshError, match="an instance's name of 1 to 256 characters"):
                await Front(address, name).link.open()
        monkeypatch.setattr(host_link, "build", lambda: "another")
        with pytest.raises((ProtocolMismatch, HandoffLost), match="build='another'"):
            await Front(address).link.open()


async def test_a_certificate_is_of_the_instance_whose_ranks_it_asks_for(tmp_path: Path) -> None:
    wanted = {"host": [Identity(CallerRole.INSTANCE, "*")], "d": [Identity(CallerRole.INSTANCE, "d")]}
    made = make_role_certificates(tmp_path, wanted)
    loaded = {
        name: Security.load(TlsFiles(tls_cert=str(one.cert), tls_key=str(one.key), tls_ca=str(one.ca)))
        for name, one in made.items()
    }
    before = security.use(loaded["d"])
    try:
        async with rank_host(loaded["host"]) as address:
            own, other = Front(address, "d"), Front(address, "e")
            await own.ready()
            await own.close()
            with pytest.raises(Unavailable, match="instance_id='e': the caller's certificate is for instance/d"):
                await other.link.open()
            with suppress(KvmeshError):
                await other.close()
    finally:
        security.use(before)

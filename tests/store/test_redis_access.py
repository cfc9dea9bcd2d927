"""Everything that kvmesh keeps in Redis, over TLS and as users with exactly the rights that the page says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import from_url
from redis.exceptions import NoPermissionError

from kvmesh.cli import terms
from kvmesh.errors import Unavailable
from kvmesh.leader.leader import Ask, LeaseGranted, LeaseHeld, LeaseSilent
from kvmesh.leader.redis_lease import Redis, RedisLease
from kvmesh.rpc.certificates import Certificates, make_certificates
from kvmesh.services.conductor.domain import Cordon, CordonState
from kvmesh.services.conductor.peers.cordon_book import CordonBook
from kvmesh.services.gateway.rest.response_store import RedisResponses, ResponseBounds, open_store
from kvmesh.services.store.durable import RedisDurable
from tests.store.test_redis_lease import keeps_and_fences
from tests.support.redis_server import RedisServer, redis_server, why_no_tls

WHY_NOT = why_no_tls()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operate" / "store-masters.md"
MESH = "prod"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def server(made: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis"), tls=made.files) as started:
        yield started


@pytest.fixture
async def admin(server: RedisServer) -> Any:
    """A client that may do everything, after the users of the page were made and the log of refusals was emptied."""
    rules = re.findall(r"^    ACL (SETUSER .*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rules) == 2
    async with from_url(server.url) as client:
        for rule in rules:
            await client.execute_command("ACL", *rule.split())
        await client.execute_command("ACL", "LOG", "RESET")
        yield client


async def refused(admin: Any) -> list[str]:
    """What Redis has refused to anybody, but for the name and version that the library tells it of itself."""
    found = [one["object"] for one in await admin.acl_log()]
    return [one for one in found if not one.startswith("client")]


def url_of(server: RedisServer, user: str, password: str = "PASSWORD") -> str:
    return server.url.replace("rediss://", f"rediss://{user}:{password}@")


async def test_leaders_and_their_books(server: RedisServer, admin: Any) -> None:
    redis = Redis(url_of(server, "kvmesh"), MESH, 5.0)
    try:
        first, second = RedisLease(redis, "a:1", 60_000), RedisLease(redis, "b:1", 60_000)
        assert await first.ask(Ask(1, 0, 0, 0)) == LeaseGranted(1, 1, True)
        assert await first.ask(Ask(2, 0, 1, 1)) == LeaseGranted(2, 1, True)
        assert isinstance(await second.ask(Ask(1, 0, 0, 0)), LeaseHeld)
        await first.release(0)
        assert await second.ask(Ask(2, 0, 0, 1)) == LeaseGranted(2, 2, False), "it knows that Redis forgot nothing"
        await keeps_and_fences(RedisDurable(redis))
        heard: list[object] = []
        book = CordonBook(redis, heard.append)
        for state in (CordonState.CORDONED, CordonState.OPEN):
            await book.put(Cordon("prefill-0", state, "why"))
        assert len(heard) == 2
        await redis.client.set(redis.key("cordons_version"), 0)
        await book.sync()
    finally:
        await redis.close()
    assert await refused(admin) == []


async def test_terms_shown_and_reset(server: RedisServer, admin: Any) -> None:
    url = url_of(server, "kvmesh")
    redis = Redis(url, MESH, 5.0)
    try:
        await RedisLease(redis, "a:1", 1).ask(Ask(1, 0, 0, 5))
    finally:
        await redis.close()
    assert await terms._kept(url, MESH)
    await terms._forget(url, MESH, force=True)
    assert await refused(admin) == []


async def test_stored_responses(server: RedisServer, admin: Any) -> None:
    store = await open_store(url_of(server, "gateway"), ResponseBounds(2, 4000, 60.0), MESH)
    backend = store._backend
    assert isinstance(backend, RedisResponses)
    try:
        for name in "abc":
            await backend.put(("t", name), b"head", b"items")
        assert await backend.get(("t", "c")) == (b"head", b"items")
        assert (await backend.items([("t", "a"), ("t", "c")]))[1] == b"items"
        assert await backend.delete(("t", "c"))
    finally:
        await backend.close()
    assert await refused(admin) == []


async def test_what_the_users_may_not(server: RedisServer, admin: Any) -> None:
    for user, forbidden in (
        (
            "kvmesh",
            (("GET", "kvmesh:other:leader"), ("GET", "x"), ("FLUSHALL",), ("KEYS", "*"), ("CONFIG", "GET", "*")),
        ),
        ("gateway", (("GET", f"kvmesh:{MESH}:leader"), ("SET", f"kvmesh:{MESH}:terms", "1"), ("ACL", "LIST"))),
    ):
        async with from_url(url_of(server, user)) as client:
            for command in forbidden:
                with pytest.raises(NoPermissionError):
                    await client.execute_command(*command)


async def test_a_redis_that_is_not_the_right_one_or_a_wrong_password(server: RedisServer, tmp_path: Path) -> None:
    stranger = make_certificates(tmp_path)
    for url in (
        url_of(server, "kvmesh").partition("?")[0] + f"?ssl_ca_certs={stranger.ca}",
        url_of(server, "kvmesh", "wrong"),
        server.url.replace("rediss://", "redis://").partition("?")[0],
    ):
        redis = Redis(url, MESH, 2.0)
        try:
            answer = await RedisLease(redis, "a:1", 1000).ask(Ask(1, 0, 0, 0))
            assert isinstance(answer, LeaseSilent) and "PASSWORD" not in answer.why
            with pytest.raises(Unavailable, match="redis: "):
                await RedisDurable(redis).load()
        finally:
            await redis.close()

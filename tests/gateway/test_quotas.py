"""Quotas of API keys: the decision, its twin in Redis, and what clients of each interface are told."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anthropic
import grpc
import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import ConfigError, InvalidRequest, Overloaded, QuotaExceeded, QuotaTooSmall
from kvmesh.rpc.pb import gateway_pb2
from kvmesh.rpc.status import from_rpc_error
from kvmesh.services.gateway import quota_book
from kvmesh.services.gateway.api_keys import KeyRing, Tenant, make_entry
from kvmesh.services.gateway.quota_book import QuotaBook, QuotaGrant, RedisQuotas
from kvmesh.services.gateway.quotas import FIELDS, KeyQuota, QuotaCost, QuotaStanding, QuotaUse, decide
from kvmesh.services.gateway.rest.quota_headers import duration
from kvmesh.telemetry import names
from tests.gateway.conftest import Mesh, MeshMaker, seen, until
from tests.support.gateway.scripted import MODEL
from tests.support.redis_server import RedisServer, needs_redis, redis_server

ALICE, ENTRY = make_entry("alice")
PROMPT = list(range(40))
SLOW_S = 4.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def tenant(name: str = "alice", **limits: int) -> Tenant:
    return Tenant(name, name, quota=KeyQuota(**limits))


# ── the decision ──────────────────────────────────────────────────────────────────────────────────


@given(
    limit=st.integers(1, 500),
    share=st.sampled_from([1.0, 0.5, 1 / 3]),
    steps=st.lists(st.tuples(st.floats(0, 20), st.integers(1, 400)), max_size=60),
)
def test_no_minute_holds_more_than_two_limits(limit: int, share: float, steps: list[tuple[float, int]]) -> None:
    """A bucket that was empty allows its limit at once and as much again while it drains; and whoever waits for as long
    as a refusal says is taken."""
    quota = KeyQuota(prompt_tokens_per_minute=limit)
    use, now, taken = QuotaUse(0.0), 0.0, list[tuple[float, int]]()
    for pause, tokens in steps:
        cost, now = QuotaCost(min(tokens, limit), 1), now + pause
        verdict = decide(use.drain(quota, share, now), 0, quota, share, cost)
        if verdict.exceeded >= 0:
            assert FIELDS[verdict.exceeded] == "prompt_tokens_per_minute" and verdict.wait_s > 0
            now += verdict.wait_s
            verdict = decide(use.drain(quota, share, now), 0, quota, share, cost)
        assert verdict.exceeded < 0
        use.add((1.0, float(cost.prompt_tokens), 0.0))
        taken.append((now, cost.prompt_tokens))
    capacity = max(1.0, limit * share)
    largest = max((tokens for _, tokens in taken), default=0)
    for at, _ in taken:
        minute = sum(tokens for then, tokens in taken if at <= then <= at + 60)
        assert minute <= 2 * capacity + max(0, largest - capacity) + 1e-6


def test_answers_are_settled_and_what_is_over_drains_first() -> None:
    quota = KeyQuota(answer_tokens_per_minute=60)
    use = QuotaUse(0.0)
    assert decide(use.drain(quota, 1.0, 0.0), 0, quota, 1.0, QuotaCost(5, 1)).exceeded < 0
    use.add((0.0, 0.0, 100.0))  # a stream that went on beyond the limit
    verdict = decide(use.drain(quota, 1.0, 0.0), 0, quota, 1.0, QuotaCost(5, 1))
    assert FIELDS[verdict.exceeded] == "answer_tokens_per_minute" and verdict.wait_s == pytest.approx(41)
    assert decide(use.drain(quota, 1.0, 41.01), 0, quota, 1.0, QuotaCost(5, 1)).exceeded < 0


async def test_the_book_counts_right() -> None:
    clock = Clock()
    book = QuotaBook(clock=clock)
    who = tenant(requests_per_minute=3, answer_tokens_per_minute=100, max_running=3)
    first = await book.enter(who, 10, 2)
    assert isinstance(first, QuotaGrant) and first.standing.remaining(0) == 2
    with pytest.raises(QuotaExceeded, match="max_running=3 of key 'alice'"):
        book.check_early(who, 2)
    refused = await book.enter(who, 10, 2)
    assert isinstance(refused, QuotaStanding) and FIELDS[refused.exceeded] == "max_running"
    book.leave(first, 0, refund=True)  # it failed: one request is not used
    for _ in range(3):
        grant = await book.enter(who, 10, 3)
        assert isinstance(grant, QuotaGrant)
        book.leave(grant, 5, refund=False)
    refused = await book.enter(who, 10, 1)
    assert isinstance(refused, QuotaStanding) and refused.wait_s == pytest.approx(20)
    with pytest.raises(QuotaExceeded, match="requests_per_minute=3") as caught:
        book.check_early(who, 1)  # without another look at anything
    assert caught.value.field == "requests_per_minute" and caught.value.retry_after_ms == 20_000
    more = tenant(requests_per_minute=30)  # the file of keys was changed
    book.check_early(more, 1)
    assert isinstance(await book.enter(more, 10, 1), QuotaGrant)
    with pytest.raises(QuotaTooSmall, match="can never be taken"):
        await book.enter(tenant(max_running=3), 1, 4)
    assert await book.enter(tenant(), 10, 1) is None


def test_key_files() -> None:
    ring = KeyRing.parse(ENTRY + "requests_per_minute = 5\nmax_running = 2\nweight = 2\n")
    found = ring.tenant(f"Bearer {ALICE}".encode())
    assert found.quota == KeyQuota(requests_per_minute=5, max_running=2) and found.weight == 2.0
    for line, why in (
        ("requests_per_minute = 0", "requests_per_minute=0: must be 1 to"),
        ("prompt_tokens_per_minute = 1.5", "prompt_tokens_per_minute must be a whole number"),
        ("answer_tokens_per_minute = true", "answer_tokens_per_minute must be a whole number"),
        ("weight = 0", "weight=0: must be 0.01 to 100"),
        ("weight = nan", "weight=nan"),
        ("weight = true", "weight must be a number"),
    ):
        with pytest.raises(ConfigError, match=why):
            KeyRing.parse(f"{ENTRY}{line}\n")


def test_durations() -> None:
    assert [duration(s) for s in (0, 0.12, 1, 1.5, 61.25, 360)] == ["0ms", "120ms", "1s", "1.5s", "1m1.25s", "6m0s"]


# ── Redis ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Redis that is slow because the machine is busy does not count as one that is gone."""
    monkeypatch.setattr(quota_book, "TIMEOUT_S", 20.0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("quotas")) as found:
        yield found


@pytest.fixture
async def pair(server: RedisServer, request: pytest.FixtureRequest) -> AsyncIterator[tuple[QuotaBook, QuotaBook]]:
    """Two gateways of one mesh."""
    books = [QuotaBook(RedisQuotas(server.url, request.node.name.partition("[")[0])) for _ in range(2)]
    for book in (*books, *books):
        await book.beat()
    yield books[0], books[1]
    for book in books:
        await book.close()


async def settled(*books: QuotaBook) -> None:
    for book in books:
        while book._settling:
            await asyncio.wait(set(book._settling), timeout=5)


@needs_redis
async def test_the_script_decides_as_quotas_py_does(server: RedisServer) -> None:
    """Within what drains in the time that twelve calls take on a machine that is busy."""
    shared, dice = RedisQuotas(server.url, "twins"), random.Random(7)
    await shared.beat(60)
    for number in range(40):
        quota = KeyQuota(*(dice.choice((0, 1, 40, 10_000)) for _ in FIELDS))
        use, running = QuotaUse(0.0), 0
        for _ in range(12):
            answers = dice.randint(1, 3)
            cost = QuotaCost(dice.choice((1, 30, 4000)), answers)
            charge = (1.0, float(cost.prompt_tokens), 0.0)
            told = await shared.call(
                f"k{number}", quota, (running, running + answers), cost=cost, charge=charge, owed=(0.0, 0.0, 7.0)
            )
            use.drain(quota, 1.0, 0.0)
            use.add((0.0, 0.0, 7.0 if quota.answer_tokens_per_minute else 0.0))
            ours = decide(use.drain(quota, 1.0, 0.0), running, quota, 1.0, cost)
            assert told.exceeded == ours.exceeded and told.running == ours.running
            assert told.wait_s == pytest.approx(ours.wait_s, abs=SLOW_S)
            for which, (theirs, level) in enumerate(zip(told.levels, ours.levels, strict=True)):
                assert theirs == pytest.approx(level, abs=0.02 + SLOW_S * quota.capacity(which, 1.0) / 60)
            if ours.exceeded < 0:
                use.add(charge)
                running += answers
    await shared.close()


@needs_redis
async def test_two_gateways_share_one_quota(pair: tuple[QuotaBook, QuotaBook]) -> None:
    who, grants = tenant(requests_per_minute=10, answer_tokens_per_minute=1000, max_running=7), []
    for number in range(7):
        grant = await pair[number % 2].enter(who, 5, 1)
        assert isinstance(grant, QuotaGrant), number
        grants.append((pair[number % 2], grant))
    assert grants[-1][1].standing.remaining(0) == 3  # of both
    for book in pair:
        refused = await book.enter(who, 5, 1)
        assert isinstance(refused, QuotaStanding) and FIELDS[refused.exceeded] == "max_running"
    for book, grant in grants:
        book.leave(grant, 150, refund=False)
    await settled(*pair)
    for book in pair:  # 1,050 answer tokens were used, at both together
        refused = await book.enter(who, 5, 1)
        assert isinstance(refused, QuotaStanding) and FIELDS[refused.exceeded] == "answer_tokens_per_minute"
        assert refused.share == 1


@needs_redis
async def test_a_gateway_that_is_gone_runs_nothing(server: RedisServer) -> None:
    who = tenant(max_running=1)
    dead, alive = QuotaBook(RedisQuotas(server.url, "gone")), QuotaBook(RedisQuotas(server.url, "gone"))
    assert dead._shared is not None
    await dead.beat()
    await alive.beat()
    assert isinstance(await dead.enter(who, 1, 1), QuotaGrant)
    assert isinstance(await alive.enter(who, 1, 1), QuotaStanding)
    await dead._shared.beat(0.001)  # its lease ends
    await asyncio.sleep(0.01)
    await alive.beat()
    assert isinstance(await alive.enter(who, 1, 1), QuotaGrant)
    await alive.close()
    await dead._shared._redis.close()


@needs_redis
async def test_redis_dies_and_comes_back(tmp_path: Path) -> None:
    """Each of two has half of the quota meanwhile; what was used is known to all afterwards."""
    who = tenant(requests_per_minute=20, max_running=20)
    with redis_server(tmp_path) as own:
        books = [QuotaBook(RedisQuotas(own.url, "dies")) for _ in range(2)]
        for book in (*books, *books):
            await book.beat()
        before = await books[0].enter(who, 1, 1)
        assert isinstance(before, QuotaGrant) and before.standing.share == 1
        own.kill()
        taken = []
        for book in books:
            found: Any = None
            while isinstance(found := await book.enter(who, 1, 1), QuotaGrant):
                assert found.standing.share == 0.5
                taken.append((book, found))
            assert isinstance(found, QuotaStanding) and found.share == 0.5 and found.limit(0) == 10
        assert len(taken) == 19  # 10 each, of which one gateway had used one before
        assert names.GATEWAY_QUOTA_SHARE._value.get() == 0.5
        for book, grant in taken:
            book.leave(grant, 3, refund=False)
        own.start()
        for book in books:
            await book.beat()
        await settled(*books)
        assert names.GATEWAY_QUOTA_SHARE._value.get() == 1
        refused = await books[1].enter(who, 1, 1)
        assert isinstance(refused, QuotaGrant)  # 19 were used
        assert isinstance(await books[0].enter(who, 1, 1), QuotaStanding)
        for book in books:
            await book.close()


# ── clients ───────────────────────────────────────────────────────────────────────────────────────


def bearer(key: str = ALICE) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def guarded(make_mesh: MeshMaker, folder: Path, limits: str, **config: Any) -> Mesh:
    path = folder / "keys.toml"
    path.write_text(f"{ENTRY}{limits}\n")
    return await make_mesh(api_keys=str(path), **config)


async def complete(mesh: Mesh, **more: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3, **more}
    return await mesh.http.post("/v1/completions", json=body, headers=bearer())


async def test_each_interface_says_which_quota(make_mesh: MeshMaker, tmp_path: Path) -> None:
    mesh = await guarded(make_mesh, tmp_path, "requests_per_minute = 1\nprompt_tokens_per_minute = 1000")
    first = await complete(mesh)
    assert first.status_code == 200
    told = {name: value for name, value in first.headers.items() if "ratelimit" in name}
    assert told == {
        "x-ratelimit-limit-requests": "1",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "960",
        "x-ratelimit-reset-tokens": "2.4s",
    }
    before = len(mesh.conductor.asked)
    with pytest.raises(openai.RateLimitError) as refused:
        await mesh.client.with_options(api_key=ALICE).completions.create(model=MODEL, prompt="Hi")
    assert refused.value.code == "rate_limit_exceeded" and refused.value.param == "requests_per_minute"
    assert "requests_per_minute=1 of key 'alice'" in str(refused.value)
    assert 50 < int(refused.value.response.headers["retry-after"]) <= 60
    with pytest.raises(openai.RateLimitError):  # a stream has not begun
        await mesh.client.with_options(api_key=ALICE).chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True
        )
    async with anthropic.AsyncAnthropic(base_url=mesh.url, api_key=ALICE, max_retries=0) as client:
        with pytest.raises(anthropic.RateLimitError) as caught:
            await client.messages.create(model=MODEL, max_tokens=3, messages=[{"role": "user", "content": "Hi"}])
    body: Any = caught.value.body
    assert body["error"]["type"] == "rate_limit_error" and "requests_per_minute" in body["error"]["message"]
    call = mesh.stub.Generate(
        gateway_pb2.GenerateRequest(text="Hi"), metadata=[("authorization", f"Bearer {ALICE}")], timeout=10
    )
    with pytest.raises(grpc.aio.AioRpcError) as over:
        await call.read()
    assert over.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    err = from_rpc_error(over.value)
    assert isinstance(err, QuotaExceeded) and err.field == "requests_per_minute" and err.retry_after_ms > 50_000
    assert len(mesh.conductor.asked) == before


async def test_anthropics_headers(make_mesh: MeshMaker, tmp_path: Path) -> None:
    mesh = await guarded(make_mesh, tmp_path, "answer_tokens_per_minute = 50\nprompt_tokens_per_minute = 9000")
    async with anthropic.AsyncAnthropic(base_url=mesh.url, api_key=ALICE, max_retries=0) as client:
        raw = await client.messages.with_raw_response.create(
            model=MODEL, max_tokens=3, messages=[{"role": "user", "content": "Hi"}]
        )
    assert raw.headers["anthropic-ratelimit-input-tokens-limit"] == "9000"
    assert int(raw.headers["anthropic-ratelimit-input-tokens-remaining"]) < 9000
    assert raw.headers["anthropic-ratelimit-output-tokens-remaining"] == "50"
    assert raw.headers["anthropic-ratelimit-output-tokens-reset"].endswith("Z")


async def test_what_counts(make_mesh: MeshMaker, tmp_path: Path) -> None:
    """A request that fails gets its charge back; answers count whole, of all choices; a stream is never cut."""
    mesh = await guarded(make_mesh, tmp_path, "requests_per_minute = 3\nanswer_tokens_per_minute = 10")
    mesh.conductor.failures.extend([Overloaded("the mesh is full"), InvalidRequest("no such SLO")])
    assert [(await complete(mesh)).status_code for _ in range(2)] == [429, 400]
    answer = await complete(mesh, n=2, max_tokens=20, stream=True)
    assert answer.status_code == 200 and answer.text.rstrip().endswith("data: [DONE]")
    refused = await complete(mesh)
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert error["param"] == "answer_tokens_per_minute" and error["code"] == "rate_limit_exceeded"
    assert refused.headers["x-ratelimit-remaining-answer-tokens"] == "0"
    assert refused.headers["x-ratelimit-remaining-requests"] == "2"  # one request, whatever its n


async def test_the_file_is_read_again(make_mesh: MeshMaker, tmp_path: Path) -> None:
    mesh = await guarded(make_mesh, tmp_path, "requests_per_minute = 1")
    assert (await complete(mesh)).status_code == 200
    assert (await complete(mesh)).status_code == 429
    (tmp_path / "keys.toml").write_text(f"{ENTRY}requests_per_minute = 100\n")

    async def again() -> int:
        return (await complete(mesh)).status_code

    await until(again, lambda status: status == 200)


@needs_redis
async def test_redis_is_killed_under_two_gateways(
    make_mesh: MeshMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat, of_two = QuotaBook.beat, set[int]()

    async def watched(self: QuotaBook) -> None:
        await beat(self)
        if self._gateways == 2:
            of_two.add(id(self))

    monkeypatch.setattr(QuotaBook, "beat", watched)
    with redis_server(tmp_path) as own:
        limits = "requests_per_minute = 8"
        first = await guarded(make_mesh, tmp_path, limits, quota_redis=own.url, mesh="killed")
        second = await guarded(make_mesh, tmp_path, limits, quota_redis=own.url, mesh="killed")
        assert (await complete(first)).status_code == 200
        told = await complete(second)
        assert told.headers["x-ratelimit-remaining-requests"] == "6"
        assert "x-kvmesh-quota-share" not in told.headers
        await seen(lambda: len(of_two) == 2)
        own.kill()
        for mesh in (first, second):
            answers = [await complete(mesh) for _ in range(6)]
            assert [answer.status_code for answer in answers] == [200] * 3 + [429] * 3
            assert {answer.headers.get("x-kvmesh-quota-share") for answer in answers[:4]} == {"0.5"}
            assert answers[0].headers["x-ratelimit-limit-requests"] == "4"
        metrics = (await first.http.get("/metrics")).text
        assert "kvmesh_gateway_quota_share_ratio 0.5" in metrics

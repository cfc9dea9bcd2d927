"""Prefill and decode in one instance: the tokens of the engine alone, whatever is mixed, cancelled, preempted, killed,
or given another role meanwhile.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from functools import cache, partial
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from kvmesh.cli.role import set_role
from kvmesh.errors import FixedRole, KvmeshError, Unavailable
from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.rpc.pb import conductor_pb2, conductor_pb2_grpc
from kvmesh.testing.local_engine import GenerateParams, LocalEngine
from tests.support.checkpoints import make_checkpoint
from tests.support.mesh.client import Answer, pools, until
from tests.support.mesh.direct import Direct
from tests.support.mesh.harness import Running, running_mesh

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]

BLOCK = 16
LOCAL_TOKENS = 64
SMALL = {"num_pages": 40, "num_extents": 40, "mixed_chunk_tokens": 32}  # so that prompts wait and rows are preempted


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "qwen3", vocab_size=331)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """One instance that does everything, with little memory."""
    flags = {"coupled": SMALL}
    folder = tmp_path_factory.mktemp("alone")
    async with running_mesh(model, folder, prefill=0, decode=0, coupled=1, block_tokens=BLOCK, flags=flags) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mixed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """A coupled instance of two ranks beside a pair, whose decode instance computes short prompts itself."""
    flags = {"decode": {"local_prefill_tokens": LOCAL_TOKENS}, "coupled": {"tensor_parallel": 2}}
    folder = tmp_path_factory.mktemp("mixed")
    async with running_mesh(model, folder, coupled=1, block_tokens=BLOCK, flags=flags) as running:
        for name in running.instances():
            await running.ready(name)
        yield running


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(20, 250) for _ in range(length)]


@cache
def engine(model: Path) -> LocalEngine:
    return LocalEngine(model, block_tokens=BLOCK)


def right(model: Path, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    return [done.token_ids for done in engine(model).generate(prompts, GenerateParams(max_tokens=count))]


def check(answers: Sequence[Answer], expected: Sequence[list[int]]) -> None:
    assert [a.error for a in answers] == [None] * len(answers)
    assert [a.tokens for a in answers] == list(expected)


async def test_sixteen_at_once_cold_then_warm(alone: Running, model: Path) -> None:
    """Long and short, chunked, with shared beginnings; the second time their prefixes are here."""
    shared = prompt(1, 64)
    prompts = [(shared if n % 2 else []) + prompt(10 + n, (5, 17, 32, 120)[n % 4]) for n in range(16)]
    expected = right(model, prompts, 24)
    for cached in (0, 160):
        answers = await asyncio.gather(*(alone.client.generate(p, 24) for p in prompts))
        check(answers, expected)
        assert sum(answer.cached_tokens for answer in answers) >= cached  # what the small pools still have of them
        for answer in answers:
            assert answer.timings is not None
            assert (answer.timings.transfer_us, answer.timings.transfer_bytes, answer.timings.load_us) == (0, 0, 0)
            assert answer.timings.prefill_us and answer.timings.first_decode_us
    await alone.settled()


async def test_preempted_rows_come_back_right(alone: Running, model: Path) -> None:
    """Answers that outgrow the pages together: 10 times 112 tokens need 70 pages, there are 40."""
    prompts = [prompt(100 + n, 16) for n in range(10)]
    expected = right(model, prompts, 97)
    before = await preemptions(alone)
    answers = await asyncio.gather(*(alone.client.generate(p, 97) for p in prompts))
    check(answers, expected)
    assert await preemptions(alone) > before, "nobody had to leave: the test tests nothing"
    await alone.settled()


async def preemptions(running: Running) -> float:
    async with httpx.AsyncClient() as http:
        told = (await http.get(f"http://{running.mesh.processes['coupled-0'].spec.metrics}/metrics")).text
    lines = (line.split() for line in told.splitlines())
    return next(float(line[1]) for line in lines if line[0] == "kvmesh_decode_preemptions_total")


async def test_random_cancels_leave_nothing_behind(alone: Running, model: Path) -> None:
    rng = random.Random(3)
    prompts = [prompt(200 + n % 8, rng.choice([3, 40, 100])) for n in range(24)]
    expected = right(model, prompts, 16)
    victims = set(rng.sample(range(24), 12))
    stop_after = {n: rng.choice([-1, 0, 1, 5]) for n in victims}  # tokens seen; -1: after a random delay

    async def one(n: int) -> Answer | None:
        task: asyncio.Task[Answer]

        def seen(tokens: int) -> None:
            if n in victims and tokens >= stop_after[n] >= 0:
                task.cancel()

        task = asyncio.create_task(alone.client.generate(prompts[n], 16, on_token=seen))
        if stop_after.get(n) == -1:
            asyncio.get_running_loop().call_later(rng.random() * 0.2, task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            return None

    answers = await asyncio.gather(*(one(n) for n in range(24)))
    assert sum(answer is None for answer in answers) >= 6, "hardly anything was cancelled: the test tests nothing"
    for n, answer in enumerate(answers):
        if answer is not None:
            assert (n, answer.error, answer.tokens) == (n, None, expected[n])
    await alone.settled()


async def test_kill_and_come_back(alone: Running, model: Path) -> None:
    prompts = [prompt(300 + n, 40) for n in range(8)]
    expected = right(model, prompts, 40)
    before, struck = alone.pid("coupled-0"), False

    def strike(tokens: int) -> None:
        nonlocal struck
        if tokens >= 3 and not struck:
            struck = True
            alone.kill("coupled-0")

    calls = [alone.client.generate(p, 40, on_token=strike, timeout_s=30, timeout_ms=30_000) for p in prompts]
    answers = await asyncio.gather(*calls)
    assert struck
    for answer, tokens in zip(answers, expected, strict=True):
        assert answer.error is None or isinstance(answer.error, KvmeshError)
        assert answer.tokens == tokens[: len(answer.tokens)]
        assert answer.error is not None or answer.tokens == tokens
    await alone.restarted("coupled-0", before)
    check([await alone.client.generate(prompts[0], 40)], expected[:1])
    await alone.settled()


async def test_every_way_gives_the_same_tokens(mixed: Running, model: Path) -> None:
    """Alone on the coupled instance, as either half of a pair, a pair without it, and wholly on decode."""
    direct = await Direct.of(mixed)
    prompts = [prompt(400 + n, length) for n, length in enumerate((5, 48, 61, 200))]
    expected = right(model, prompts, 20)
    ways = [
        ("coupled-0", "coupled-0"), ("prefill-0", "decode-0"), ("coupled-0", "decode-0"), ("prefill-0", "coupled-0"),
        ("decode-0", "decode-0"),
    ]  # fmt: skip
    for prefill, decode in ways:
        salt = f"{prefill} {decode}"
        calls = [direct.generate(p, 20, prefill=prefill, decode=decode, salt=salt) for p in prompts]
        answers = await asyncio.gather(*calls)
        check(answers, expected)
        moved = [a.timings.transfer_bytes > 0 for a in answers if a.timings is not None]
        assert moved == [prefill != decode] * len(prompts), (prefill, decode)
        again = await direct.generate(prompts[3], 20, prefill=prefill, decode=decode, salt=salt)
        assert (again.error, again.tokens, again.cached_tokens) == (None, expected[3], 192)
    await mixed.settled()


async def test_it_takes_another_role_under_load_and_keeps_its_blocks(mixed: Running, model: Path) -> None:
    address = mixed.mesh.addresses["coupled-0"]
    direct = await Direct.of(mixed)
    prompts = [prompt(500 + n, 20 + 9 * n) for n in range(6)]
    expected = right(model, prompts, 24)
    kept = prompt(600, 130)
    assert (await direct.generate(kept, 4, prefill="coupled-0", decode="coupled-0", salt="kept")).error is None
    stop = asyncio.Event()
    served = [0] * 6

    async def client(n: int) -> None:
        while not stop.is_set():
            answer = await mixed.client.generate(prompts[n], 24, cache_salt=f"{n} {served[n] % 5}")
            assert (answer.error, answer.tokens) == (None, expected[n])
            served[n] += 1

    load = [asyncio.create_task(client(n)) for n in range(6)]
    try:
        blocks = (await pools(address, "decode")).store_blocks
        assert blocks
        for role in (pb.ROLE_DECODE, pb.ROLE_PREFILL, pb.ROLE_BOTH):
            was = (await set_role(address, role)).was
            assert was == {pb.ROLE_DECODE: pb.ROLE_BOTH, pb.ROLE_PREFILL: pb.ROLE_DECODE}.get(role, pb.ROLE_PREFILL)
            await until(partial(has_role, mixed, "coupled-0", role), "the conductor to know the role")
            if role != pb.ROLE_BOTH:
                refused = await direct.generate(prompts[0], 2, prefill="coupled-0", decode="coupled-0", salt="shut")
                assert isinstance(refused.error, Unavailable)
                assert "has the role" in refused.error.message
            more = (await pools(address, "decode")).store_blocks
            assert more >= blocks, "blocks went with the role"
            blocks, aim = more, sum(served) + 12
            while sum(served) < aim:
                await asyncio.wait(load, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
                for task in load:
                    assert not task.done() or task.result()  # what it failed with
    finally:
        stop.set()
    await asyncio.gather(*load)
    again = await direct.generate(kept, 4, prefill="coupled-0", decode="coupled-0", salt="kept")
    assert (again.error, again.cached_tokens) == (None, 128)
    await mixed.settled()


async def has_role(running: Running, name: str, role: pb.Role.ValueType) -> bool:
    async with connect(running.mesh.addresses["conductor"]) as channel:
        stub = conductor_pb2_grpc.ConductorStub(channel)
        status = await stub.GetStatus(conductor_pb2.GetConductorStatusRequest(), timeout=30)
    return any(one.instance.instance_id == name and one.role == role for one in status.instances)


async def test_instances_of_one_role_refuse_another(mixed: Running) -> None:
    with pytest.raises(FixedRole, match="was started as a prefill instance"):
        await set_role(mixed.mesh.addresses["prefill-0"], pb.ROLE_DECODE)

"""The budget of memory that requests hold: what fits, what is refused, who waits, and that all of it comes back."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import BodyTooLarge, ConfigError, KvmeshError, Overloaded
from kvmesh.services.gateway.config import GatewayConfig
from kvmesh.services.gateway.request_memory import SMALL_BYTES, RequestMemory, parse_cost

MIB = 1 << 20


def test_a_full_budget_answers_429_with_a_time_to_come_again() -> None:
    memory = RequestMemory(16 * MIB)
    first = memory.reserve(6 * MIB)
    with pytest.raises(Overloaded) as refused:
        memory.reserve(1 * MIB)
    assert refused.value.retry_after_ms >= 1000
    assert memory.held == 6 * MIB
    first.release()
    first.release()
    assert memory.held == 0
    memory.reserve(1 * MIB).release()


def test_large_requests_leave_a_quarter_to_small_ones() -> None:
    memory = RequestMemory(16 * MIB)
    large = [memory.reserve(1 * MIB) for _ in range(6)]
    with pytest.raises(Overloaded):
        memory.reserve(SMALL_BYTES + 1)
    small = [memory.reserve(SMALL_BYTES) for _ in range(32)]
    with pytest.raises(Overloaded):
        memory.reserve(1)
    for one in (*large, *small):
        one.release()
    assert memory.held == 0


def test_what_never_fits_is_too_large_and_not_429() -> None:
    memory = RequestMemory(16 * MIB)
    with pytest.raises(BodyTooLarge):
        memory.reserve(8 * MIB + 1)
    with memory.reserve(8 * MIB):  # alone, it may take all
        assert memory.held == 8 * MIB
    assert memory.held == 0


def test_a_refused_growth_keeps_what_was_held() -> None:
    memory = RequestMemory(16 * MIB)
    with memory.reserve(4 * MIB) as one:
        with memory.reserve(2 * MIB), pytest.raises(Overloaded):
            one.resize(5 * MIB)
        assert (one.size, memory.held) == (4 * MIB, 4 * MIB)
        one.resize(1 * MIB)
        assert memory.held == 1 * MIB
    one.resize(2 * MIB)  # after its end
    assert memory.held == 0


@given(st.lists(st.tuples(st.sampled_from(["reserve", "resize", "release"]), st.integers(0, 9), st.integers(0, 2000))))
def test_the_account_is_the_sum_of_what_is_held_and_never_over_the_limit(steps: list[tuple[str, int, int]]) -> None:
    memory = RequestMemory(4000)
    held = {}
    for what, index, size in steps:
        try:
            if what == "reserve" and index not in held:
                held[index] = memory.reserve(size)
            elif what == "resize" and index in held:
                held[index].resize(size)
            elif what == "release" and index in held:
                held.pop(index).release()
        except KvmeshError:
            pass
        assert memory.held == sum(one.size for one in held.values()) <= memory.held_limit


async def test_work_waits_its_turn_first_come_first_served() -> None:
    memory = RequestMemory(200)
    order: list[int] = []
    inside = 0
    go = asyncio.Event()

    async def one(index: int, size: int) -> None:
        nonlocal inside
        async with memory.work(size, 30):
            order.append(index)
            inside += size
            assert inside <= memory.working <= memory.work_limit
            await go.wait()
            inside -= size

    tasks = [asyncio.create_task(one(index, size)) for index, size in enumerate((60, 80, 10, 30, 100))]
    await asyncio.sleep(0)
    assert (order, memory.waiting) == ([0], 4)  # 10 would fit, but came after 80
    go.set()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3, 4]
    assert (memory.working, memory.waiting) == (0, 0)


async def test_work_that_never_comes_to_its_turn_is_429_and_leaves_nothing_behind() -> None:
    memory = RequestMemory(200)
    async with memory.work(100, 30):
        with pytest.raises(Overloaded):
            async with memory.work(1, 0.01):
                raise AssertionError("there is no room")
        given_up = asyncio.create_task(memory.work(1, 30).__aenter__())
        await asyncio.sleep(0)
        assert memory.waiting == 1
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        assert (memory.working, memory.waiting) == (100, 0)
    with pytest.raises(BodyTooLarge):
        async with memory.work(101, 30):
            raise AssertionError("it never fits")
    assert memory.working == 0


async def test_a_turn_that_comes_while_it_is_given_up_is_passed_on() -> None:
    memory = RequestMemory(200)
    holder = memory.work(100, 30)
    await holder.__aenter__()
    first, second = (asyncio.create_task(memory.work(100, 30).__aenter__()) for _ in range(2))
    await asyncio.sleep(0)
    await holder.__aexit__(None, None, None)  # the first one's turn
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await second
    assert (memory.working, memory.waiting) == (100, 0)


def test_the_budget_holds_a_body_and_its_work() -> None:
    with pytest.raises(ConfigError, match="max_request_memory=1000000: must be at least 2 x max_body_bytes"):
        GatewayConfig(max_request_memory=1_000_000, max_body_bytes=600_000)
    assert GatewayConfig(max_request_memory=1_200_000, max_body_bytes=600_000).max_request_memory == 1_200_000


SIZE = 2 * MIB
BODIES = {
    "text": b'{"prompt":"%s"}' % (b"a" * SIZE),
    "text with an emoji": b'{"prompt":"%s%s"}' % (b"a" * SIZE, "😀".encode()),
    "text with an escape": b'{"prompt":"%s\\ud83d\\ude00"}' % (b"a" * SIZE),
    "ids": b'{"prompt":[%s]}' % b",".join(b"%d" % (300 + n) for n in range(SIZE // 7)),
    "small ids": b'{"prompt":[%s]}' % b",".join([b"1"] * (SIZE // 2)),
    "floats": b"[%s]" % b",".join([b"1.1"] * (SIZE // 4)),
    "lists": b"[%s]" % b",".join([b"[]"] * (SIZE // 3)),
    "lists in lists": b"[%s]" % b",".join([b"[[[[[]]]]]"] * (SIZE // 11)),
    "objects": b"[%s]" % b",".join([b"{}"] * (SIZE // 3)),
    "objects with a key": b"[%s]" % b",".join([b'{"":1}'] * (SIZE // 7)),
    "objects with a text": b"[%s]" % b",".join(['{"a":"😀"}'.encode()] * (SIZE // 13)),
    "one object of many keys": b"{%s}" % b",".join(b'"%d":1' % n for n in range(SIZE // 10)),
    "texts": b"[%s]" % b",".join([b'"ab"'] * (SIZE // 5)),
}
PEAK_OF_PARSING = """
import sys, orjson
def read(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))
body = sys.stdin.buffer.read()
before = read("VmRSS:")
open("/proc/self/clear_refs", "w").write("5")
parsed = orjson.loads(body)
print(read("VmHWM:") - before)
"""


@pytest.mark.parametrize("name", BODIES)
def test_parsing_takes_no_more_than_is_reckoned_for_it(name: str) -> None:
    body = BODIES[name]
    taken = int(subprocess.run([sys.executable, "-c", PEAK_OF_PARSING], input=body, stdout=-1, check=True).stdout)
    assert taken <= parse_cost(body) + MIB
    assert parse_cost(body[:1000]) == 64_000

"""The places of messages that are received, and messages that would swell."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import DeadlinePassed, Overloaded
from kvmesh.rpc.call_limits import MEMBERS
from kvmesh.rpc.pb import gateway_pb2
from kvmesh.rpc.public_calls import HeldMemory, Metadata, PublicCalls, ReceivePlaces, few_fields
from kvmesh.rpc.server import Server

CHAT = gateway_pb2.GenerateRequest.DESCRIPTOR.fields_by_name["chat"].number


def places(count: int = 1, **more: Any) -> ReceivePlaces:
    return ReceivePlaces(count, **({"waiting": 100, "wait_s": 10.0, "receive_s": 10.0, "give_way_s": 10.0} | more))


async def test_callers_take_turns() -> None:
    """One that opens many calls waits behind itself."""
    made, order = places(), []
    first = asyncio.Event()

    async def call(caller: str) -> None:
        await made.receive(first.wait, caller)
        order.append(caller)

    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        for caller in "aaaaabcb":
            tasks.create_task(call(caller))
        while made.waiting < 7:  # noqa: ASYNC110 (it tells no events)
            await asyncio.sleep(0)
        first.set()
    assert "".join(order) == "aabcabaa"
    assert made.taken == made.waiting == 0


async def test_a_slow_message_gives_way_only_when_others_wait() -> None:
    made = places(give_way_s=0.0)
    never: asyncio.Event = asyncio.Event()
    slow = asyncio.create_task(made.receive(never.wait))
    await asyncio.sleep(0.02)
    assert not slow.done()
    assert await made.receive(lambda: asyncio.sleep(0, "message")) == "message"
    with pytest.raises(DeadlinePassed):
        await slow
    assert made.taken == made.waiting == 0


async def test_bounds_of_waiting() -> None:
    made = places(waiting=1, wait_s=0.05)
    never: asyncio.Event = asyncio.Event()
    held = asyncio.create_task(made.receive(never.wait))
    await asyncio.sleep(0)
    late = asyncio.create_task(made.receive(never.wait))
    await asyncio.sleep(0)
    for call in (made.receive(never.wait), late):
        with pytest.raises(Overloaded) as caught:
            await call
        assert caught.value.retry_after_ms > 0
    held.cancel()
    await asyncio.gather(held, return_exceptions=True)
    assert made.taken == made.waiting == 0


@given(cancelled=st.sets(st.integers(0, 11)), count=st.integers(1, 3))
def test_cancelled_calls_keep_no_place(cancelled: set[int], count: int) -> None:
    async def run() -> None:
        made, go = places(count), asyncio.Event()
        tasks = [asyncio.create_task(made.receive(go.wait, str(index % 3))) for index in range(12)]
        await asyncio.sleep(0)
        go.set()
        for index in cancelled:
            tasks[index].cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(one is True for one in found) >= 12 - len(cancelled)
        assert made.taken == made.waiting == 0

    asyncio.run(run())


def test_fields_are_counted_without_parsing() -> None:
    chat = gateway_pb2.Chat(messages=[gateway_pb2.ChatMessage(role="user", content="x" * 300)] * 50)
    message = gateway_pb2.GenerateRequest(chat=chat, max_tokens=5, stop=["a", "b"], temperature=0.5).SerializeToString()
    assert few_fields(message, 5) and few_fields(message, 54) and not few_fields(message, 4)
    assert few_fields(message, 55, nested=(CHAT,)) and not few_fields(message, 54, nested=(CHAT,))


@given(st.binary(max_size=300), st.integers(0, 50))
def test_any_bytes_can_be_counted(data: bytes, most: int) -> None:
    assert few_fields(data, 300, nested=(CHAT,))
    if few_fields(data, most):
        assert few_fields(data, most + 1)


class _Anybody:
    keys_required = False

    def authorize(self, method: str, metadata: Metadata) -> str:
        return ""

    def hold(self, method: str, message: bytes) -> HeldMemory:
        return _Nothing()


class _Nothing:
    def release(self) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize("public", [False, True])
async def test_a_burst_ends_in_answers(public: bool) -> None:
    """gRPC's own bound of calls that nobody has seen yet cancels some of more than 1,000."""

    async def echo(request: bytes, context: Any) -> bytes:
        return request

    handler = grpc.unary_unary_rpc_method_handler(echo, request_deserializer=bytes)
    server = Server("127.0.0.1", 0, public=PublicCalls(MEMBERS, _Anybody()) if public else None)
    server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("x.Y", {"Z": handler}),))
    await server.start()
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(server.address, options=options) for _ in range(50)]

    async def call(index: int) -> str:
        try:
            await channels[index % 50].unary_unary("/x.Y/Z")(b"x", timeout=60)
        except grpc.aio.AioRpcError as err:
            return str(err.code())
        return "OK"

    codes = Counter(await asyncio.gather(*(call(index) for index in range(2_500))))
    await asyncio.gather(*(channel.close() for channel in channels))
    await server.stop(0)
    assert set(codes) <= {"OK"} | ({str(grpc.StatusCode.RESOURCE_EXHAUSTED)} if public else set())

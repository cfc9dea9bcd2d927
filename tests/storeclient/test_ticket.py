"""A node that is frozen while it should read a put, and wakes when the caller's memory holds something else."""

from __future__ import annotations

import asyncio
import os
import signal

import grpc.aio
import psutil
import pytest

from kvmesh.rpc import channels
from kvmesh.rpc.pb import blocks_pb2, blocks_pb2_grpc
from tests.support.services import until
from tests.support.store_clients import MIB, stores, values


@pytest.mark.parametrize("transports", ["shm,tcp", "tcp"])
@pytest.mark.slow
async def test_a_frozen_node_seals_nothing_of_a_caller_that_has_left(transports: str) -> None:
    before = set(psutil.Process().children())
    async with stores("a") as made, made.client(transports=transports, keys="granted") as client:
        ranks = [child.pid for child in psutil.Process().children() if child not in before]
        buffer = client.allocate(4 * MIB)
        old, new = values(1, 4 * MIB, 4 * MIB)
        buffer.view[:] = old
        first = await client.put_from(buffer)
        (key,) = await client.grant()
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        try:
            put = asyncio.ensure_future(client.put_from(buffer, key=key))
            async with asyncio.timeout(20):
                await until(lambda: writing(made.nodes["a"].address))
            put.cancel()
            await asyncio.wait({put})
            buffer.view[:] = new
        finally:
            for pid in ranks:
                os.kill(pid, signal.SIGCONT)
        await until(lambda: idle(made.nodes["a"].address))
        assert await client.get(key) is None, "sealed though its caller had left"
        assert await client.get(first) == old
        again = await client.put_from(buffer)
        assert await client.get(again) == new


async def told(address: str) -> blocks_pb2.GetNodeStoreResponse:
    channel: grpc.aio.Channel = channels.connect(address)
    try:
        return await blocks_pb2_grpc.NodeStoreStub(channel).GetStore(blocks_pb2.GetNodeStoreRequest(), timeout=10)
    finally:
        await channel.close()


async def writing(address: str) -> bool:
    return (await told(address)).pools.store_writing > 0


async def idle(address: str) -> bool:
    return (await told(address)).pools.store_writing == 0

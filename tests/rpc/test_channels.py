"""A peer that is frozen: its kernel acknowledges everything, and its streams end all the same."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import grpc
import grpc.aio
import pytest

from kvmesh.rpc.channels import CHANNEL_OPTIONS, KEEPALIVE_MS

SERVER = """
import asyncio, grpc, grpc.aio

async def handle(requests, context):
    await context.write(b"here")
    await asyncio.Event().wait()

async def main():
    server = grpc.aio.server()
    handlers = {"Talk": grpc.stream_stream_rpc_method_handler(handle)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()

asyncio.run(main())
"""
FASTER_MS = 400  # than KEEPALIVE_MS, for a test


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


async def test_a_frozen_peer_is_given_up(server: subprocess.Popen[bytes]) -> None:
    assert server.stdout is not None
    port = int(await asyncio.to_thread(server.stdout.readline))
    options = [(name, FASTER_MS if value == KEEPALIVE_MS else value) for name, value in CHANNEL_OPTIONS]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        call = channel.stream_stream("/t.T/Talk")()
        await call.write(b"?")
        assert await call.read() == b"here"
        os.kill(server.pid, signal.SIGSTOP)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), 20 * FASTER_MS / 1000)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

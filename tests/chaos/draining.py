"""Drains, asked of whoever leads, as often as it takes."""

from __future__ import annotations

import asyncio
import time

from kvmesh.errors import KvmeshError
from kvmesh.rpc.pb import store_pb2
from kvmesh.storeclient.directory import Directory

TRY_S = 2.0
PAUSE_S = 0.1


async def drained(store: str, node: str, timeout_s: float) -> bool:
    """Drain `node`; whether it is done in time."""
    return await _ask(store, store_pb2.DrainRequest(instance_id=node), timeout_s, until_done=True)


async def call_off(store: str, node: str, timeout_s: float) -> None:
    """It stays, and takes copies again. AssertionError: nobody has said so in time."""
    request = store_pb2.DrainRequest(instance_id=node, cancel=True)
    assert await _ask(store, request, timeout_s, until_done=False), f"the drain of {node} was not called off"


async def _ask(store: str, request: store_pb2.DrainRequest, timeout_s: float, *, until_done: bool) -> bool:
    deadline = time.monotonic() + timeout_s
    directory = Directory(store)
    try:
        while time.monotonic() < deadline:
            try:
                if (await directory.call("Drain", request, TRY_S)).done or not until_done:
                    return True
            except KvmeshError:
                pass  # nobody leads, or does not know the node yet
            await asyncio.sleep(PAUSE_S)
        return False
    finally:
        await directory.close()

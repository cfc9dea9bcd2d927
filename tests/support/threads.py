"""A store in a thread with a loop of its own, for what blocks."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from tests.support.services import START_S
from tests.support.store_clients import Stores, stores


@contextlib.contextmanager
def in_thread(*nodes: str, **settings: Any) -> Iterator[Stores]:
    """Its nodes must not be stopped from here."""
    started = threading.Event()
    found: dict[str, object] = {}

    async def serve() -> None:
        found["stop"] = stop = asyncio.Event()
        found["loop"] = asyncio.get_running_loop()
        async with stores(*nodes, **settings) as made:
            found["stores"] = made
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert started.wait(START_S), f"the store did not start within {START_S} s"
        made = found["stores"]
        assert isinstance(made, Stores)
        yield made
    finally:
        loop, stop = found["loop"], found["stop"]
        assert isinstance(loop, asyncio.AbstractEventLoop) and isinstance(stop, asyncio.Event)
        loop.call_soon_threadsafe(stop.set)
        thread.join(START_S)

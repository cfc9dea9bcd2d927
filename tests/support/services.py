"""Services of this process for tests: started by their own `run`, stopped and waited for."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

START_S = 90.0  # on a machine that does other things, too

Run = Callable[[Any, asyncio.Event, Callable[[dict[str, object]], None]], Awaitable[None]]


class Running:
    """One service; `stop` may be called early and then again."""

    def __init__(self, run: Run, config: Any) -> None:
        self._stop = asyncio.Event()
        self._started: asyncio.Future[dict[str, object]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(run(config, self._stop, self._started.set_result))

    async def started(self) -> "Running":
        await asyncio.wait({self._task, self._started}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            await self._task
        assert self._started.done(), f"the service did not start within {START_S} s"
        return self

    @property
    def address(self) -> str:
        return str(self._started.result()["address"])

    @property
    def told(self) -> dict[str, object]:
        """What the service said when it had started."""
        return self._started.result()

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def metrics(self) -> str:
        return str(self._started.result()["metrics"])

    async def stop(self) -> None:
        self._stop.set()
        await asyncio.wait_for(self._task, START_S)


@contextlib.asynccontextmanager
async def running(run: Run, config: Any) -> AsyncIterator[Running]:
    service = await Running(run, config).started()
    try:
        yield service
    finally:
        await service.stop()


async def until(what: Callable[[], Awaitable[Any]], timeout_s: float = 60.0) -> Any:
    """Asks until the answer is true; returns it. AssertionErrors of the question count as false until the end."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        late = asyncio.get_running_loop().time() > deadline
        try:
            if (found := await what()) or late:
                assert found, f"not so within {timeout_s} s: {found!r}"
                return found
        except AssertionError:
            if late:
                raise
        await asyncio.sleep(0.01)

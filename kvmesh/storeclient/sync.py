"""This is `StoreClient` for programs without an event loop: the same methods, blocking, safe to call from many threads.

One thread of its own runs the loop; a call costs one hand-over to it and one back. A get of blocks in mapped memory
needs neither: the calling thread copies them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, TypeVar, TypeVarTuple

import uvloop

from kvmesh.errors import Unavailable
from kvmesh.kvcache.tiers import Tier
from kvmesh.storeclient import forks
from kvmesh.storeclient.client import StoreClient
from kvmesh.storeclient.config import ClientConfig
from kvmesh.storeclient.copying import Moved, Policy
from kvmesh.storeclient.directory import Quota, Removed
from kvmesh.storeclient.holding import Place
from kvmesh.storeclient.memory import Buffer, Source, Target
from kvmesh.storeclient.naming import Ref
from kvmesh.storeclient.reading.leased import Got
from kvmesh.storeclient.replicas import Replica
from kvmesh.storeclient.writing import Put

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

CLOSE_S = 15.0


class SyncStoreClient:
    """Is a blocking client of the Store. `close` it, or use `with`. Arguments, results and errors are those of
    `StoreClient`. A call that is interrupted by Ctrl-C returns when nothing moves in the memory that it was given any
    more."""

    def __init__(self, config: ClientConfig | None = None) -> None:
        forks.check()
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()  # half of a call's cost is that of the loop
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvmesh-store-client", daemon=True)
        self._thread.start()
        self._closed = False
        forks.watch(self)
        try:
            self.client = self._run(_made(config))
        except BaseException:
            self._end()
            raise
        self.config = self.client.config

    def __enter__(self) -> SyncStoreClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the client; it may be called more than once. In a forked child it does nothing, as everything is the
        parent's."""
        if self._closed:
            return
        try:
            asyncio.run_coroutine_threadsafe(self.client.close(), self._loop).result(CLOSE_S)
        finally:
            self._end()

    def _end(self) -> None:
        self._closed = True
        with contextlib.suppress(TimeoutError):  # other threads may still wait in calls, which this ends
            asyncio.run_coroutine_threadsafe(_all_ended(), self._loop).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            work.close()
            raise forks.closed(self)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()  # every operation has a deadline of its own
        except concurrent.futures.CancelledError:
            raise Unavailable("this client has been closed meanwhile") from None
        except KeyboardInterrupt:
            future.cancel()
            concurrent.futures.wait([future], CLOSE_S)
            raise

    # ── memory ───────────────────────────────────────────────────────────────────────────────────

    def allocate(self, nbytes: int) -> Buffer:
        return self._run(_called(self.client.allocate, nbytes))

    def register(self, buffer: object) -> Buffer:
        return self._run(_called(self.client.register, buffer))

    def unregister(self, buffer: Buffer) -> None:
        self._run(_called(self.client.unregister, buffer))

    # ── blocks ───────────────────────────────────────────────────────────────────────────────────

    def put(self, data: Source, **options: Any) -> bytes:
        return self._run(self.client.put(data, **options))

    def put_many(self, datas: Sequence[Source], **options: Any) -> list[Put]:
        return self._run(self.client.put_many(datas, **options))

    def put_from(self, source: Target, **options: Any) -> bytes:
        return self._run(self.client.put_from(source, **options))

    def put_many_from(self, sources: Sequence[Target], **options: Any) -> list[Put]:
        return self._run(self.client.put_many_from(sources, **options))

    def content_key(self, data: Source) -> bytes:
        return self.client.content_key(data)

    def grant(self, n: int = 1, **options: Any) -> list[bytes]:
        return self._run(self.client.grant(n, **options))

    def get(self, ref: Ref, **options: Any) -> bytes | None:
        here = None if options else self.client.at_hand([ref], None)
        return here[0].data if here else self._run(self.client.get(ref, **options))

    def get_many(self, refs: Sequence[Ref], **options: Any) -> list[Got]:
        here = None if options else self.client.at_hand(refs, None)
        return here or self._run(self.client.get_many(refs, **options))

    def get_into(self, ref: Ref, target: Target, **options: Any) -> Got:
        here = None if options else self.client.at_hand([ref], [target])
        return here[0] if here else self._run(self.client.get_into(ref, target, **options))

    def get_many_into(self, refs: Sequence[Ref], targets: Sequence[Target], **options: Any) -> list[Got]:
        here = None if options else self.client.at_hand(refs, targets)
        return here or self._run(self.client.get_many_into(refs, targets, **options))

    def exists(self, ref: Ref, **options: Any) -> Tier | None:
        return self._run(self.client.exists(ref, **options))

    def exists_many(self, refs: Sequence[Ref], **options: Any) -> list[Tier | None]:
        return self._run(self.client.exists_many(refs, **options))

    def locate_many(self, refs: Sequence[Ref], **options: Any) -> list[list[Place]]:
        return self._run(self.client.locate_many(refs, **options))

    def remove(self, *refs: Ref, **options: Any) -> Removed:
        return self._run(self.client.remove(*refs, **options))

    def remove_namespace(self, **options: Any) -> Removed:
        return self._run(self.client.remove_namespace(**options))

    def pin(self, *refs: Ref, **options: Any) -> list[int]:
        return self._run(self.client.pin(*refs, **options))

    def unpin(self, *refs: Ref, **options: Any) -> list[int]:
        return self._run(self.client.unpin(*refs, **options))

    def replicas(self, refs: Sequence[Ref], **options: Any) -> list[list[Replica]]:
        return self._run(self.client.replicas(refs, **options))

    def change_replica(self, refs: Sequence[Ref], replicas: int, **options: Any) -> list[int]:
        return self._run(self.client.change_replica(refs, replicas, **options))

    def copy(self, refs: Sequence[Ref], *, to: str, **options: Any) -> list[Moved]:
        return self._run(self.client.copy(refs, to=to, **options))

    def move(self, refs: Sequence[Ref], *, to: str, source: str | None = None, **options: Any) -> list[Moved]:
        return self._run(self.client.move(refs, to=to, source=source, **options))

    def prefetch(self, refs: Sequence[Ref], policy: Policy = Policy.BEST_EFFORT, **options: Any) -> list[bool]:
        return self._run(self.client.prefetch(refs, policy, **options))

    def quotas(self, **options: Any) -> list[Quota]:
        return self._run(self.client.quotas(**options))

    def set_quota(self, namespace: str, blocks: int, **options: Any) -> None:
        self._run(self.client.set_quota(namespace, blocks, **options))

    def counters(self) -> dict[str, int]:
        return self._run(_called(self.client.counters))


async def _made(config: ClientConfig | None) -> StoreClient:
    return StoreClient(config)


async def _all_ended() -> None:
    """Cancels whatever else runs in this loop, and waits until it has ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _called(function: Callable[[*Ts], T], *args: *Ts) -> T:
    """Calls `function` on the loop's thread, to which the client's tables belong."""
    return function(*args)

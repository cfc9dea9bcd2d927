"""Gets without a lease: blocks in the memory of nodes on this machine (docs/adr/0020-reads-without-leases.md).

    the node's index says where it lies ─▶ copy out of the node's memory, mapped read-only ─▶ the index still says so

What changed meanwhile, or is not in the index, goes the usual way. No message, no master; the node hears of reads a
little later, many at once (`Touch`).
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvmesh.clock import lease_clock_ns
from kvmesh.kvcache.keys import KEY_BYTES
from kvmesh.kvcache.tiers import Tier
from kvmesh.storeclient.config import ClientConfig
from kvmesh.storeclient.local_node import LocalNode, LocalNodes
from kvmesh.storeclient.memory import Memory, Span, bytes_of, ended
from kvmesh.storeclient.own_keys import Ref
from kvmesh.storeclient.peers import Peers
from kvmesh.storeclient.reading import Got
from kvmesh.transfer import TransferEngine
from kvmesh.transfer.transports.shm.copy import CopyJob, by_cores

# More is copied by threads: the event loop has others to serve, and two cores move more than one.
INLINE_BYTES = 4 << 20
GIL_BYTES = 128 << 10  # a copy of so many is worth the GIL's hand-over

Place = tuple[LocalNode, int, int, int, int]  # node, entry, version, where in the node's memory, bytes


class LocalReadPlan:
    """What one call can get without a lease. `places[i]`: of the key at i, None: not here. `nbytes`: of all."""

    __slots__ = ("keys", "missing", "nbytes", "places", "targets")

    def __init__(self, keys: Sequence[bytes], targets: Sequence[Span] | None) -> None:
        self.keys = keys
        self.targets = targets
        self.places: list[Place | None] = []
        self.nbytes = 0
        self.missing = 0


class LocalReader:
    """All of one client. Copies may be asked for by any thread; all else on the event loop. `close` it."""

    def __init__(self, config: ClientConfig, engine: TransferEngine, memory: Memory, peers: Peers) -> None:
        self.hits = 0
        self.nbytes = 0
        self._nearby = LocalNodes(config, engine, memory, peers)
        self._counting = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    @property
    def nodes(self) -> int:
        """Whose indexes are here."""
        return len(self._nearby.nodes)

    def met(self, address: str) -> None:
        """This node has just answered: it may be near. Returns at once."""
        self._nearby.met(address)

    def plan(self, refs: Sequence[Ref | None], targets: Sequence[Span] | None) -> LocalReadPlan | None:
        """None: there is nothing of it here, or not all of `refs` are keys. Any thread."""
        nodes = self._nearby.nodes
        if not nodes:
            return None
        now_ns = lease_clock_ns()
        nodes = tuple(node for node in nodes if node.index.current(now_ns))
        keys: list[bytes] = []
        plan = LocalReadPlan(keys, targets)
        places = plan.places
        for ref in refs:
            if type(ref) is not bytes or len(ref) != KEY_BYTES:
                return None
            place = _place(nodes, ref)
            if place is None or (targets is not None and targets[len(keys)].nbytes < place[4]):
                places.append(None)
                plan.missing += 1
            else:
                places.append(place)
                plan.nbytes += place[4]
            keys.append(ref)
        return plan if plan.missing < len(keys) else None

    async def read(self, plan: LocalReadPlan) -> list[Got | None]:
        """Each block that is here; None: ask somebody. Large ones are copied by threads, which are done with the
        caller's memory when this returns or raises."""
        if plan.nbytes <= INLINE_BYTES:
            return self.read_here(plan)
        if plan.targets is None:
            return await asyncio.to_thread(self.read_here, plan)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[BaseException | None] = loop.create_future()

        def finish(error: BaseException | None) -> None:
            loop.call_soon_threadsafe(done.set_result, error)

        self._start(plan, finish, by_cores())
        try:
            error = await asyncio.shield(done)
        finally:
            await ended(done)
        return self._result(plan, None) if error is None else [None] * len(plan.keys)

    def read_here(self, plan: LocalReadPlan) -> list[Got | None]:
        """As `read`, by the thread that calls it, with another one's help for large ones."""
        if plan.targets is None:
            copies = [place and bytes_of(place[0].memory[place[3] : place[3] + place[4]]) for place in plan.places]
            return self._result(plan, copies)
        if plan.nbytes > INLINE_BYTES:
            done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
            _help(self._start(plan, done.put, by_cores() - 1))
            if done.get() is not None:
                return [None] * len(plan.keys)
        else:
            for place, target in zip(plan.places, plan.targets, strict=True):
                if place is not None:
                    _copy(place, target)
        return self._result(plan, None)

    def _start(self, plan: LocalReadPlan, done: Callable[[BaseException | None], None], helpers: int) -> CopyJob:
        """`done` is called by whoever copies the last byte."""
        assert plan.targets is not None, "bytes are made by the thread that asks for them"
        to, of, lengths = [], [], []
        for place, target in zip(plan.places, plan.targets, strict=True):
            if place is not None:
                to.append(target.address)
                of.append(place[0].start + place[3])
                lengths.append(place[4])
        job = CopyJob(to, of, lengths, done)
        if helpers and self._threads is None:
            self._threads = ThreadPoolExecutor(by_cores(), "kvmesh-near")
        for _ in range(helpers):
            assert self._threads is not None
            self._threads.submit(_help, job)
        return job

    def _result(self, plan: LocalReadPlan, copies: Sequence[bytes | None] | None) -> list[Got | None]:
        """What was copied counts if its entry has not changed since, and the node lives."""
        got: list[Got | None] = []
        read: dict[LocalNode, list[bytes]] = {}
        nbytes = 0
        for key, place, data in zip(plan.keys, plan.places, copies or itertools.repeat(None), strict=False):
            if place is None or not place[0].index.still(place[1], place[2]):
                got.append(None)
                continue
            node, _, _, _, size = place
            got.append(Got(key, size, Tier.DRAM, node.store_id, data))
            nbytes += size
            if node in read:
                read[node].append(key)
            else:
                read[node] = [key]
        for node, keys in read.items():
            if not node.lives():
                return [None] * len(got)
            self._nearby.touch(node, keys)
        with self._counting:
            self.hits += sum(map(len, read.values()))
            self.nbytes += nbytes
        return got

    async def close(self) -> None:
        """Bounded."""
        await self._nearby.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False)


def _place(nodes: Sequence[LocalNode], key: bytes) -> Place | None:
    for node in nodes:
        found = node.index.look(key)
        if found is not None:
            entry, version, offset, nbytes = found
            at = offset - node.base
            if 0 <= at <= len(node.memory) - nbytes:  # it may be half of one entry and half of another yet
                return node, entry, version, at, nbytes
    return None


def _copy(place: Place, target: Span) -> None:
    node, _, _, at, nbytes = place
    if nbytes >= GIL_BYTES:
        ctypes.memmove(target.address, node.start + at, nbytes)
    else:
        target.view[target.start : target.start + nbytes] = node.memory[at : at + nbytes]


def _help(job: CopyJob) -> None:
    while job.work():
        pass

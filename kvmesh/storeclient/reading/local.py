"""Gets without a lease: blocks in the memory of nodes on this machine (docs/adr/0020-reads-without-leases.md).

    the node's index says where it lies ─▶ copy out of the node's memory, mapped read-only ─▶ the index still says so

A block that changed meanwhile, or is not in the index, is read under a lease. No message and no master are needed; the
node is told of reads a little later, many at once (`Touch`).

A node's index and memory come to be mapped here as follows:

    an address that answered ─▶ Doors ─▶ connect to the index's socket ─▶ hello and index ─▶ READ a little: the memory
                                         is mapped ─▶ LocalNode, until the connection ends

All of it is tried in the background and given up without an error where it cannot work: another machine, another user,
no shm.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import logging
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvmesh.blockservice.peers import PeerPool, this_machine
from kvmesh.clock import lease_clock_ns
from kvmesh.errors import KvmeshError, TransferError
from kvmesh.kvcache.keys import KEY_BYTES
from kvmesh.kvcache.shared_index import MAX_HELLO_BYTES, SUPPORTED, IndexHello, IndexReader, same_user
from kvmesh.kvcache.size_classes import BYTES
from kvmesh.kvcache.tiers import Tier
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.storeclient.calls import ended
from kvmesh.storeclient.config import ClientConfig
from kvmesh.storeclient.memory import ClientMemory, Span, bytes_of
from kvmesh.storeclient.naming import Ref
from kvmesh.storeclient.reading.leased import Got
from kvmesh.transfer import Opcode, TransferEngine, TransferRequest
from kvmesh.transfer.memory import Mapping, map_peer
from kvmesh.transfer.transports.shm.copy import CopyJob, by_cores
from kvmesh.transfer.transports.shm.path import raw_address
from kvmesh.transfer.transports.shm.server import receive
from kvmesh.transfer.transports.shm.transport import mapped
from kvmesh.transfer.transports.wire import Gone, ProtocolBroken

log = logging.getLogger(__name__)

# More is copied by threads, as the event loop has others to serve, and two cores move more than one.
INLINE_BYTES = 4 << 20
GIL_BYTES = 128 << 10  # for a copy of so many bytes releasing the GIL pays
MAX_NODES = 16
MAX_LOOKED = 4096
OPEN_S = 2.0  # the limit of each step of opening a node
AGAIN_S = 5.0  # how long after a failed attempt a node that answers is tried again
PROBE_BYTES = 8
TOUCH_S = 0.05
TOUCH_KEYS = 32_768  # keys in one call
TOUCH_CALLS = 65_536  # reads that are remembered until they are told
TOUCH_CALL_S = 2.0
CLOSE_S = 1.0

# ── nodes of this machine ────────────────────────────────────────────────────────────────────────────


class LocalNode:
    """Is one incarnation of a node on this machine. Its blocks lie in `memory` at their offset less `base`."""

    __slots__ = ("address", "base", "index", "life", "memory", "sock", "start", "store_id", "touched")

    def __init__(
        self, address: str, sock: socket.socket, hello: IndexHello, index: Mapping, found: tuple[Mapping, int]
    ) -> None:
        """Raises ValueError when what the node gave is no index."""
        mapping, self.start = found
        inside = self.start - mapping.address
        self.address = address
        self.sock = sock
        self.store_id = hello.store_id
        self.life = hello.incarnation
        self.base = hello.base
        self.memory = mapping.view[inside : inside + hello.nbytes]
        self.index = IndexReader(index.view)
        self.touched: deque[Sequence[bytes]] = deque(maxlen=TOUCH_CALLS)  # keys of each call; the oldest are dropped

    def lives(self) -> bool:
        """Whether the connection to the node has not ended. It may be called in any thread."""
        try:
            return bool(self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:  # closed at this end
            return False


class LocalNodes:
    """Finds the nodes of this machine for one client. `nodes` and `touch` may be used in any thread; all else belongs
    to the event loop."""

    def __init__(self, config: ClientConfig, engine: TransferEngine, memory: ClientMemory, peers: PeerPool) -> None:
        self.nodes: tuple[LocalNode, ...] = ()
        self._able = SUPPORTED and config.near and not config.fault and "shm" in engine.config.transports
        self._engine = engine
        self._memory = memory
        self._peers = peers
        self._looked: dict[str, float] = {}  # address → when it may be looked at again
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._armed = False
        self._closed = False

    def met(self, address: str) -> None:
        """Notes that a node has just answered, and looks in the background whether it is on this machine. It returns at
        once."""
        now = time.monotonic()
        if self._able and self._looked.get(address, 0.0) <= now and len(self.nodes) < MAX_NODES and not self._closed:
            if len(self._looked) >= MAX_LOOKED:
                self._looked.clear()
            self._looked[address] = now + AGAIN_S
            self._spawn(self._find(address))

    async def close(self) -> None:
        """Tells nodes what was read, and ends within about CLOSE_S."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        telling = [asyncio.ensure_future(self._tell(node)) for node in self.nodes if node.touched]
        if telling:
            await asyncio.wait(telling, timeout=CLOSE_S)
        for task in telling:
            task.cancel()
        await asyncio.gather(*telling, return_exceptions=True)
        for node in self.nodes:
            self._ended(node)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ── finding them ─────────────────────────────────────────────────────────────────────────────

    async def _find(self, address: str) -> None:
        if any(node.address == address for node in self.nodes):
            return
        try:
            node = await self._opened(address)
        except (KvmeshError, OSError, ValueError, Gone, ProtocolBroken) as error:
            log.info("%s is read under leases: %s", address, error)
            return
        if node is None:
            return
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(node.sock, self._ended, node)
        self.nodes = (*self.nodes, node)

    def _ended(self, node: LocalNode) -> None:
        """Forgets a node whose connection has ended: nothing that it said is believed any more. A copy out of its
        memory keeps that memory mapped."""
        self.nodes = tuple(one for one in self.nodes if one is not node)
        asyncio.get_running_loop().remove_reader(node.sock)
        node.sock.close()
        self._looked.pop(node.address, None)

    async def _opened(self, address: str) -> LocalNode | None:
        """Returns the node, None if it offers no index or is not on this machine. Raises whatever an attempt can fail
        with."""
        async with self._peers.use(address) as peer:
            told: pb.DoorsResponse = await peer.calls.over_grpc("Doors", pb.DoorsRequest(), OPEN_S)
            if not told.index_path or (told.machine, told.network) != this_machine():
                return None
            async with asyncio.timeout(OPEN_S):
                sock, hello, index = await _hello(told.index_path, told.ticket)
            try:
                if hello.incarnation != told.incarnation:
                    raise ValueError("another life answers at the index's socket")
                (name,) = self._peers.learn(peer, (hello.store_id, hello.incarnation), [hello.descriptor])
                return LocalNode(address, sock, hello, index, await self._memory_of(name, hello))
            except BaseException:
                sock.close()
                raise

    async def _memory_of(self, segment: str, hello: IndexHello) -> tuple[Mapping, int]:
        """Maps the node's memory by reading a little of it. Raises TransferError when the memory is not reached by
        shm."""
        engine = self._engine
        staged = await self._memory.stage(PROBE_BYTES, time.monotonic() + OPEN_S)
        try:
            batch = engine.allocate_batch(1)
            try:
                request = TransferRequest(Opcode.READ, staged.span.address, segment, hello.base, PROBE_BYTES)
                engine.submit(batch, [request], OPEN_S)
                reading = asyncio.ensure_future(engine.wait(batch))
                try:
                    await asyncio.shield(reading)
                finally:
                    engine.cancel(batch)
                    await ended(reading)  # the engine answers in bounded time
            finally:
                engine.free_batch(batch)
        finally:
            self._memory.give_back(staged)
        found = mapped(engine.rails(segment), segment, hello.base, hello.nbytes)
        if found is None:
            raise TransferError(f"the memory of {hello.store_id} is not mapped here")
        return found

    # ── telling them ─────────────────────────────────────────────────────────────────────────────

    def touch(self, node: LocalNode, keys: Sequence[bytes]) -> None:
        """Notes that these keys were read. It may be called in any thread."""
        node.touched.append(keys)
        if not self._armed and self._loop is not None:
            self._armed = True
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._arm)

    def _arm(self) -> None:
        asyncio.get_running_loop().call_later(TOUCH_S, self._send)

    def _send(self) -> None:
        self._armed = False
        for node in self.nodes:
            if node.touched and not self._closed:
                self._spawn(self._tell(node))

    async def _tell(self, node: LocalNode) -> None:
        """Tells a node what was read. The first key is to become the most recently used: so the last call comes first,
        and in it the first key before all others."""
        calls = [node.touched.popleft() for _ in range(len(node.touched))]
        keys = [key for call in reversed(calls) for key in call]
        async with self._peers.use(node.address) as peer:
            for start in reversed(range(0, len(keys), TOUCH_KEYS)):
                some = b"".join(keys[start : start + TOUCH_KEYS])
                request = pb.TouchBlocksRequest(keys=some, layout=BYTES, holder_incarnation=node.life)
                with contextlib.suppress(KvmeshError):  # only the order of eviction is lost
                    await peer.call("Touch", request, TOUCH_CALL_S)


async def _hello(path: str, ticket: bytes) -> tuple[socket.socket, IndexHello, Mapping]:
    """Connects to the index's socket, with the ticket that the node has given, if any. Returns the connection, the
    node's hello and its index. Raises OSError, TransferError or ValueError."""
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.connect(raw_address(path))
        if not same_user(sock):
            raise ValueError("another user's")
        if ticket:
            sock.send(ticket)
        said: asyncio.Future[None] = loop.create_future()
        loop.add_reader(sock, _wake, said)
        try:
            await said
        finally:
            loop.remove_reader(sock)
        buffer = bytearray(MAX_HELLO_BYTES)
        got, fd = receive(sock, buffer)
        if fd < 0:
            raise ValueError("a hello without an index")
        try:
            hello = IndexHello.decode(bytes(buffer[:got]))
            return sock, hello, map_peer(fd, hello.index_bytes)
        finally:
            os.close(fd)
    except BaseException:
        sock.close()
        raise


def _wake(said: asyncio.Future[None]) -> None:
    if not said.done():
        said.set_result(None)


# ── reads ────────────────────────────────────────────────────────────────────────────────────────────

_Found = tuple[LocalNode, int, int, int, int]  # node, entry, version, where in the node's memory, bytes


class LocalReadPlan:
    """Tells what one call can get without a lease. `places[i]` is that of the i-th key, None if it is not on this
    machine; `nbytes` is the sum of all."""

    __slots__ = ("keys", "missing", "nbytes", "places", "targets")

    def __init__(self, keys: Sequence[bytes], targets: Sequence[Span] | None) -> None:
        self.keys = keys
        self.targets = targets
        self.places: list[_Found | None] = []
        self.nbytes = 0
        self.missing = 0


class LocalReader:
    """Carries out all local reads of one client. Copies may be made in any thread; all else belongs to the event loop.
    `close` it."""

    def __init__(self, config: ClientConfig, engine: TransferEngine, memory: ClientMemory, peers: PeerPool) -> None:
        self.hits = 0
        self.nbytes = 0
        self._nearby = LocalNodes(config, engine, memory, peers)
        self._counting = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    @property
    def nodes(self) -> int:
        """How many nodes' indexes are mapped here."""
        return len(self._nearby.nodes)

    def met(self, address: str) -> None:
        """Notes that this node has just answered: it may be on this machine. It returns at once."""
        self._nearby.met(address)

    def plan(self, refs: Sequence[Ref | None], targets: Sequence[Span] | None) -> LocalReadPlan | None:
        """Returns what can be read locally; None if nothing can, or not all of `refs` are keys. It may be called in any
        thread."""
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
        """Returns each block that is on this machine; None where a holder must be asked. Much data is copied by
        threads, which are done with the caller's memory when this returns or raises."""
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
        """Reads as `read` does, in the calling thread, with the help of other threads for much data."""
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
        """Starts copying; `done` is called by whoever copies the last byte."""
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
        """Returns what was copied, where the block's entry has not changed since and the node lives."""
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
        """Ends local reads, within a bounded time."""
        await self._nearby.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False)


def _place(nodes: Sequence[LocalNode], key: bytes) -> _Found | None:
    for node in nodes:
        found = node.index.look(key)
        if found is not None:
            entry, version, offset, nbytes = found
            at = offset - node.base
            if 0 <= at <= len(node.memory) - nbytes:  # the entry may have changed while it was read
                return node, entry, version, at, nbytes
    return None


def _copy(place: _Found, target: Span) -> None:
    node, _, _, at, nbytes = place
    if nbytes >= GIL_BYTES:
        ctypes.memmove(target.address, node.start + at, nbytes)
    else:
        target.view[target.start : target.start + nbytes] = node.memory[at : at + nbytes]


def _help(job: CopyJob) -> None:
    while job.work():
        pass

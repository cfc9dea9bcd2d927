"""Nodes of this machine whose index (`shared_index`) and memory this client has mapped.

    an address that answered ─▶ Doors ─▶ connect to the index's socket ─▶ hello and index ─▶ READ a little: the memory
                                         is mapped ─▶ NearNode, until the connection ends

Everything is looked for in the background and given up quietly: another machine, another user, no shm.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from functools import cache
from typing import Any

import grpc

from kvmesh.errors import KvmeshError, TransferError
from kvmesh.kvcache.index_hello import MAX_HELLO_BYTES, IndexHello, same_user
from kvmesh.kvcache.shared_index import SUPPORTED, IndexReader
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.storeclient.config import ClientConfig
from kvmesh.storeclient.lease import LAYOUT
from kvmesh.storeclient.memory import Memory, ended
from kvmesh.storeclient.peers import Peers
from kvmesh.transfer import Opcode, TransferEngine, TransferRequest
from kvmesh.transfer.memory import Mapping, map_peer
from kvmesh.transfer.segment import machine_id, network_id
from kvmesh.transfer.transports.shm.path import raw_address
from kvmesh.transfer.transports.shm.server import receive
from kvmesh.transfer.transports.shm.transport import mapped
from kvmesh.transfer.transports.wire import Gone, ProtocolBroken

log = logging.getLogger(__name__)

MAX_NODES = 16
MAX_LOOKED = 4096
OPEN_S = 2.0  # for each step of opening one
AGAIN_S = 5.0  # after one that led to nothing, if the node still answers
PROBE_BYTES = 8
TOUCH_S = 0.05
TOUCH_KEYS = 32_768  # of one call
TOUCH_CALLS = 65_536  # remembered
TOUCH_CALL_S = 2.0
CLOSE_S = 1.0


class LocalNode:
    """One life of one node. `memory`: where all of its blocks lie, by offset - `base`."""

    __slots__ = ("address", "base", "index", "life", "memory", "sock", "start", "store_id", "touched")

    def __init__(
        self, address: str, sock: socket.socket, hello: IndexHello, index: Mapping, found: tuple[Mapping, int]
    ) -> None:
        """ValueError: it is no index."""
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
        """Whether its connection has not ended. Any thread."""
        try:
            return bool(self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:  # closed by us
            return False


class LocalNodes:
    """Of one client. `nodes` and `touch` are for any thread; all else belongs to the event loop."""

    def __init__(self, config: ClientConfig, engine: TransferEngine, memory: Memory, peers: Peers) -> None:
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
        """It has just answered. Returns at once."""
        now = time.monotonic()
        if self._able and self._looked.get(address, 0.0) <= now and len(self.nodes) < MAX_NODES and not self._closed:
            if len(self._looked) >= MAX_LOOKED:
                self._looked.clear()
            self._looked[address] = now + AGAIN_S
            self._spawn(self._find(address))

    async def close(self) -> None:
        """What was read is told; ends within about CLOSE_S."""
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
        except (KvmeshError, grpc.RpcError, OSError, ValueError, Gone, ProtocolBroken) as error:
            log.info("%s is read under leases: %s", address, error)
            return
        if node is None:
            return
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(node.sock, self._ended, node)
        self.nodes = (*self.nodes, node)

    def _ended(self, node: LocalNode) -> None:
        """Its connection has: nothing of it is believed any more. What is being copied out of its memory keeps that."""
        self.nodes = tuple(one for one in self.nodes if one is not node)
        asyncio.get_running_loop().remove_reader(node.sock)
        node.sock.close()
        self._looked.pop(node.address, None)

    async def _opened(self, address: str) -> LocalNode | None:
        """None: it offers nothing, or is not near. Raises what an attempt can end with."""
        async with self._peers.use(address) as peer:
            told: pb.DoorsResponse = await peer.stub.Doors(pb.DoorsRequest(), timeout=OPEN_S)
            if not told.index_path or (told.machine, told.network) != _here():
                return None
            async with asyncio.timeout(OPEN_S):
                sock, hello, index = await _hello(told.index_path)
            try:
                if hello.incarnation != told.incarnation:
                    raise ValueError("another life answers at the index's door")
                name = self._peers.learn(peer, hello.incarnation, hello.descriptor)
                return LocalNode(address, sock, hello, index, await self._memory_of(name, hello))
            except BaseException:
                sock.close()
                raise

    async def _memory_of(self, segment: str, hello: IndexHello) -> tuple[Mapping, int]:
        """Mapped by reading a little of it. TransferError: it is not reached so."""
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
        """These were read. Any thread."""
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
        """The first key is to be the most recent: the last call first, and its own first key before all others."""
        calls = [node.touched.popleft() for _ in range(len(node.touched))]
        keys = [key for call in reversed(calls) for key in call]
        async with self._peers.use(node.address) as peer:
            for start in reversed(range(0, len(keys), TOUCH_KEYS)):
                some = b"".join(keys[start : start + TOUCH_KEYS])
                request = pb.TouchBlocksRequest(keys=some, layout=LAYOUT, holder_incarnation=node.life)
                with contextlib.suppress(KvmeshError):  # it is a cache: nothing but an order is lost
                    await peer.call("Touch", request, TOUCH_CALL_S)


async def _hello(path: str) -> tuple[socket.socket, IndexHello, Mapping]:
    """The connection, what the node says, its index. OSError, TransferError, ValueError."""
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.connect(raw_address(path))
        if not same_user(sock):
            raise ValueError("another user's")
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


@cache
def _here() -> tuple[str, str]:
    return machine_id(), network_id()

"""The index of a pool node: what lies sealed in its DRAM and where, for readers of this machine, in shared memory.

    store ── sealed, gone ──▶ IndexWriter ══ sealed memfd ══▶ readers (kvmesh/storeclient/reading/local.py)
     reader ── connects (a ticket) ──▶ fast path ── hello, the memfd's descriptor ──▶ reader; the connection stays open

Every change is written in the turn in which the store makes it: an entry is void before its extent can be anybody
else's, and before a removal is acknowledged. The end of the connection is the end of the index.

Of public blocks alone (layout "bytes"): nobody else's readers go without a lease.
"""

from __future__ import annotations

import array
import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Sequence

from kvmesh.clock import lease_clock_ns
from kvmesh.errors import PermissionDenied, TransferError
from kvmesh.kvcache import shared_index
from kvmesh.kvcache.shared_index import IndexHello, IndexWriter, index_bytes, same_user
from kvmesh.kvcache.size_classes import BYTES, PAGE
from kvmesh.pool.partitions import PoolPartitions
from kvmesh.pool.slabs import SlabPartition
from kvmesh.ranks import protocol as m
from kvmesh.rpc.authorisation import RpcCaller, why_not
from kvmesh.rpc.fastpath.tickets import TICKET_BYTES, CallerTickets
from kvmesh.transfer import memory
from kvmesh.transfer.transports.registry import may_use

log = logging.getLogger(__name__)

MAX_BLOCKS = 1 << 22  # in one index: 200 MiB of it
MAX_READERS = 256
BEAT_S = 0.4
_LEASE = "/kvmesh.v1.NodeStore/Lease"  # who may do that may read without one


class NodeIndex:
    """One life's, on its event loop. Made before any partition is; `open` when readers may come, and `close` it before
    anything else of the node ends."""

    def __init__(
        self,
        store_id: str,
        incarnation: int,
        descriptor: bytes,
        base: int,
        nbytes: int,
    ) -> None:
        """`descriptor`: of the rank's segment, whose `nbytes` from offset `base` on hold all blocks. TransferError:
        there is no memory that others could map."""
        size = index_bytes(min(max(nbytes // PAGE, 1), MAX_BLOCKS))
        label = f"kvmesh-index:{incarnation:x}"
        self._mapping, self._fd = memory.allocate(size, label, shared=True, huge_pages="never", prefault=True)
        if self._fd < 0:
            raise TransferError("no memory can be shared here")
        self.table = IndexWriter(self._mapping.view)
        self._hello = IndexHello(store_id, incarnation, base, nbytes, self._mapping.length, descriptor).encode()
        self._sock: socket.socket | None = None
        self._tickets: CallerTickets | None = None
        self._readers: set[socket.socket] = set()
        self._beating: asyncio.TimerHandle | None = None

    def follow(self, partition: SlabPartition) -> None:
        """One that has just come up, empty, if it is of public blocks."""
        if partition.shown_layout == BYTES:
            partition.store.journals.append(_Journal(self.table, partition))

    # ── the fast path ─────────────────────────────────────────────────────────────────────────────────

    def open(self, tickets: CallerTickets | None = None) -> str:
        """Its path; "": it cannot listen, and nobody reads without a lease. With `tickets` a reader says one first."""
        self._tickets = tickets
        name = f"kvmesh-index-{os.getpid()}-{secrets.token_hex(8)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            sock.bind("\0" + name)
            sock.listen(64)
        except OSError as error:
            sock.close()
            log.warning("no index for readers of this machine: %s", error)
            return ""
        self._sock = sock
        asyncio.get_running_loop().add_reader(sock, self._accept)
        self._beat()
        return "@" + name

    def _beat(self) -> None:
        self.table.beat(lease_clock_ns())
        self._beating = asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    def _accept(self) -> None:
        assert self._sock is not None, "the door is open"
        try:
            reader, _ = self._sock.accept()
        except OSError as error:  # gone again, or no descriptor is left
            log.info("index: %s", error)
            return
        try:
            reader.setblocking(False)
            if not same_user(reader) or len(self._readers) >= MAX_READERS:
                reader.close()
                return
            if self._tickets is None:
                self._show(reader)
        except OSError as error:
            log.info("index: a reader went again: %s", error)
            reader.close()
            return
        self._readers.add(reader)
        said = self._said if self._tickets is None else self._said_ticket
        asyncio.get_running_loop().add_reader(reader, said, reader)

    def _show(self, reader: socket.socket) -> None:
        """Hands over the index. Raises OSError."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self._fd]))]
        reader.sendmsg([self._hello], rights)

    def _said_ticket(self, reader: socket.socket) -> None:
        """Hands over the index to whom the ticket is of, if they may lease blocks. Readers that say none count among
        the others, and are as bounded."""
        assert self._tickets is not None
        try:
            known = self._tickets.redeem(reader.recv(TICKET_BYTES + 1))
            if known is None:
                raise PermissionDenied("it has no ticket: no certificate was shown over gRPC")
            if reason := why_not(RpcCaller("unix", known), _LEASE):
                raise PermissionDenied(reason)
            self._show(reader)
        except (OSError, PermissionDenied) as error:
            log.info("index: a reader is sent away: %s", error)
            return self._said(reader)
        asyncio.get_running_loop().add_reader(reader, self._said, reader)
        return None

    def _said(self, reader: socket.socket) -> None:
        """Readers say nothing further: this is its end."""
        asyncio.get_running_loop().remove_reader(reader)
        self._readers.discard(reader)
        reader.close()

    @property
    def readers(self) -> int:
        """Connected now."""
        return len(self._readers)

    def close(self) -> None:
        """Whoever reads finds out with the next look. Idempotent."""
        if self._fd < 0:
            return
        self.table.end()
        if self._beating is not None:
            self._beating.cancel()
        if self._sock is not None:
            asyncio.get_running_loop().remove_reader(self._sock)
            self._sock.close()
            self._sock = None
        for reader in list(self._readers):
            self._said(reader)
        os.close(self._fd)
        self._fd = -1


class _Journal:
    """Of one partition's store, see `node_store.Journal`."""

    def __init__(self, table: IndexWriter, partition: SlabPartition) -> None:
        self._table = table
        self._partition = partition

    def sealed(self, key: bytes, extent: int, nbytes: int | None) -> None:
        partition = self._partition
        self._table.put(key, partition.offset(0, extent), partition.shard_bytes if nbytes is None else nbytes)

    def gone(self, key: bytes, extent: int, held: bool) -> None:
        self._table.drop(key, self._partition.offset(0, extent))

    def removed(self, keys: Sequence[bytes]) -> None:
        """What of it is sealed is `gone` in the same turn."""


def index_of(
    transports: Sequence[str], store_id: str, incarnation: int, ready: m.Ready, partitions: PoolPartitions
) -> NodeIndex | None:
    """The index of all partitions that will come up, in the memory of this rank; None: readers could not rely on it
    here, or could not reach that memory."""
    if not shared_index.SUPPORTED or not may_use(transports, "shm"):
        return None
    try:
        index = NodeIndex(store_id, incarnation, ready.descriptor, ready.extent_base_offset, ready.host_bytes)
    except TransferError as error:
        log.warning("no index for readers of this machine: %s", error.message)
        return None
    partitions.on_partition.append(index.follow)
    return index

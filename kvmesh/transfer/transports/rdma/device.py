"""A NIC: one port of one device, its registered memory, its completion queues and the thread that polls them."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import select
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv6Address
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kvmesh.errors import TransferError
from kvmesh.transfer.api import Region
from kvmesh.transfer.config import EngineConfig
from kvmesh.transfer.segment import LocalRegion
from kvmesh.transfer.transports.rdma import dmabuf, gids, verbs
from kvmesh.transfer.transports.rdma.library import Library

# How a queue pair ends: destroyed; or, when the driver fails, stopped, and destroyed later; or an error with a name.
#
# destroy ─▶ destroyed                       nothing lands any more
#    └ fails ─▶ ERR ─▶ stopped, kept         nothing lands any more; destroying is tried again at the next chance
#                └ fails ─▶ device gone?     the kernel has destroyed all of it
#                             └ no ─▶ TransferError: it may still land something; try again

GONE_WITHIN_S = 0.5  # from the first call that a removed device refuses until the kernel is through with removing it
_LOOK_S = 0.002


class PyverbsQueuePair(Protocol):
    """pyverbs' QP. `close` destroys it; after a failure it may be called again, after success it does nothing."""

    qp_num: int

    def close(self) -> None: ...


class Endings:
    """Ends the queue pairs of one NIC; it is thread-safe. `stop` modifies a queue pair to ERR (and raises OSError),
    `is_gone` says whether the kernel has removed the device, `error` is the class that pyverbs raises."""

    def __init__(
        self, name: str, error: type[Exception], stop: Callable[[int], None], is_gone: Callable[[], bool]
    ) -> None:
        self.name = name
        self._error = error
        self._stop = stop
        self._is_gone = is_gone
        # Destroying waits until every event of the queue pair that was read is acknowledged, and pyverbs waits with
        # the GIL held: no event may be between the two while we are in there. Whoever reads events holds it, too.
        self.events_lock = threading.Lock()
        self._lock = threading.Lock()
        # What is not destroyed is kept here: pyverbs would try it by itself once nobody has it, without that lock.
        self._stopped: dict[PyverbsQueuePair, Callable[[], None]] = {}
        self._alive: set[PyverbsQueuePair] = set()

    def end(self, made: PyverbsQueuePair, pointer: int, freed: Callable[[], None]) -> None:
        """Returns when the NIC neither reads nor writes memory for this queue pair. `freed` is called when the queue
        pair is destroyed, which may be later. Raises TransferError when it can be neither destroyed nor stopped; then
        it must be called again."""
        with self._lock:
            self._again()
            cause = self._destroy(made)
            if cause and self._stop_it(made, pointer, cause):
                self._stopped[made] = freed
            else:
                freed()
            self._alive.discard(made)

    def again(self) -> None:
        """Tries once more to destroy queue pairs whose destruction failed."""
        if self._stopped or self._alive:
            with self._lock:
                self._again()

    # ── lock held ─────────────────────────────────────────────────────────────────────────────────

    def _again(self) -> None:
        self._alive = {made for made in self._alive if self._destroy(made)}
        ended = [made for made in self._stopped if not self._destroy(made) or self._is_gone()]
        for made in ended:
            self._stopped.pop(made)()

    def _destroy(self, made: PyverbsQueuePair) -> str:
        """Destroys a queue pair; returns "" or why that failed."""
        with self.events_lock:
            try:
                made.close()
            except self._error as err:
                return str(err) or type(err).__name__
        return ""

    def _stop_it(self, made: PyverbsQueuePair, pointer: int, cause: str) -> bool:
        """Stops a queue pair. Returns False when the kernel removed the device, and the queue pair with it. Raises
        TransferError when the queue pair is still alive."""
        try:
            self._stop(pointer)
        except OSError as err:
            removed = err.errno in (errno.EIO, errno.ENODEV)
            if self._gone_within(GONE_WITHIN_S if removed else 0.0):
                return False
            self._alive.add(made)
            raise TransferError(
                f"rdma: {self.name}: queue pair {made.qp_num} is not destroyed ({cause}) and not stopped ({err})",
                field="nics",
            ) from err
        log.warning("%s: queue pair %d is stopped, but not destroyed: %s", self.name, made.qp_num, cause)
        return True

    def _gone_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self._is_gone():
            if time.monotonic() >= until:
                return False
            time.sleep(_LOOK_S)
        return True


log = logging.getLogger(__name__)

TAG_SHIFT = 40  # of a work request's id: above it the queue pair, below what the queue pair wants to know
_CQ_ENTRIES = 8192
_COMPLETION = struct.Struct("<QII8xI20x")  # a row of verbs.COMPLETION_ROW
_DEVICE_FATAL, _PORT_ACTIVE, _PORT_ERR, _GID_CHANGE = 8, 9, 10, 18  # ibv_event_type


class Completions(Protocol):
    """The owner of the work requests of one tag."""

    def completed(self, low: int, status: int, opcode: int, imm: int) -> None:
        """Handles a completion, on the NIC's thread."""
        ...

    def port_lost(self, cause: str) -> None:
        """Handles the loss of the port or device, after which nothing completes. It runs on the NIC's thread."""
        ...


@dataclass(eq=False, slots=True)
class Patience:
    """Learns how long to poll for the next completion before the thread sleeps. Polling pays when the next one comes
    within `most_s`; only completions that came during sleep teach. Pure."""

    most_s: float
    window_s: float = 0.0

    def completed(self, waited_s: float, *, slept: bool) -> None:
        """Notes a completion `waited_s` after the one before; one that polling found changes nothing."""
        if not slept:
            return
        if waited_s > self.most_s:
            self.window_s = 0.0
        else:
            self.window_s = min(self.most_s, max(2 * self.window_s, 2 * waited_s))


class _Nobody:
    """The owner of completions that no one needs."""

    def completed(self, low: int, status: int, opcode: int, imm: int) -> None:
        return

    def port_lost(self, cause: str) -> None:
        return


@dataclass(frozen=True, slots=True)
class Registration:
    """Memory that this NIC may read and write, and so may peers who have the `rkey`."""

    mr: int
    lkey: int
    rkey: int


@dataclass(eq=False, slots=True)
class CompletionQueue:
    """A completion queue. `room` counts work requests that may still be promised to queue pairs; half of the entries
    are reserved for completions of queue pairs that are already gone."""

    made: Any
    pointer: int
    channel: Any
    channel_pointer: int
    fd: int
    room: int


class RdmaNic:
    """One port of one RDMA device; it is thread-safe. `cause` says why the NIC cannot be used; "" means that it can."""

    def __init__(self, library: Library, name: str, port: int, config: EngineConfig) -> None:
        self.name = name
        self.port = port
        self.library = library
        self.config = config
        self.cause = ""
        self._lock = threading.Lock()
        self._tags = count(1)
        self._owners: dict[int, Completions] = {}
        self._registered: dict[int, Registration] = {}
        self._queues: list[CompletionQueue] = []
        self._closing = False
        self.busy: set[int] = set()  # tags of queue pairs with work under way: a hint, nearly always right
        self._patience = Patience(config.rdma_spin_s if len(os.sched_getaffinity(0)) > 1 else 0.0)
        self._rows = np.zeros(verbs.POLL_ROWS, verbs.COMPLETION_ROW)
        self._rows_at = self._rows.ctypes.data
        self._raw = self._rows.view(np.uint8).data
        try:
            self._context = library.device.Context(name=name)
            self._pd = library.pd.PD(self._context)
            attributes = self._context.query_port(port)
            limits = self._context.query_device()
        except library.error as err:
            raise TransferError(f"rdma: {name} port {port} cannot be opened: {err}", field="nics") from err
        self.mtu = int(attributes.active_mtu)  # 1 = 256 ... 5 = 4096
        self.lid = int(attributes.lid)
        self.reads = max(1, min(16, int(limits.max_qp_rd_atom)))
        self._max_cqe = int(limits.max_cqe)
        self.calls = verbs.Calls(library.libibverbs, verbs.find_context(self._context, name))
        inode = (gids.SYS_INFINIBAND / name).stat().st_ino
        self._endings = Endings(name, library.error, self.calls.stop, lambda: gids.is_gone(inode))
        self.pd_pointer = verbs.find_pd(self._pd, self.calls.context)
        os.set_blocking(self.calls.async_fd, False)
        self.gids = gids.usable_gids(gids.read_gids(name, port), name, config.rdma_gid_index)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=f"kvmesh-rdma-{name}", daemon=True)
        self._probe()

    def _probe(self) -> None:
        """Makes and destroys a queue pair, so that a NIC that cannot work is found at the start. Raises
        TransferError."""
        try:
            made, pointer, tag, queue = self.make_queue_pair(16, 1, 0, _Nobody())
            self.destroy_queue_pair(made, pointer, tag, queue, 17)
        except (OSError, TransferError) as err:
            os.close(self._wake)
            raise TransferError(f"rdma: {self.name} cannot be used: {err}", field="nics") from err

    def start(self) -> None:
        self._thread.start()

    @property
    def folder(self) -> Path:
        return gids.SYS_INFINIBAND / self.name / "ports" / str(self.port)

    def why_down(self) -> str:
        """Returns why the port cannot be used, or "" while it is active."""
        if self.cause:
            return self.cause
        try:
            state = (self.folder / "state").read_text().strip()
        except OSError:
            return f"{self.name} is gone"
        return "" if state.startswith("4:") else f"{self.name} port {self.port} is {state.partition(': ')[2] or state}"

    def gid_index(self, address: IPv6Address) -> int:
        """Returns the present index of this address. Raises OSError when the port has lost it."""
        for gid in self.gids:
            if gid.address == address:
                return gid.index
        raise OSError(f"{self.name} has no GID {address} any more")

    def gbps(self) -> float:
        """Returns the port's rate in 10^9 bits a second; 0 when /sys does not say."""
        try:
            found = re.match(r"([\d.]+) Gb/sec", (self.folder / "rate").read_text())
        except OSError:
            return 0.0
        return float(found.group(1)) if found else 0.0

    def numa(self) -> int:
        """Returns the NUMA node, -1 when /sys does not say."""
        try:
            return int((gids.SYS_INFINIBAND / self.name / "device" / "numa_node").read_text())
        except (OSError, ValueError):
            return -1

    # ── memory ────────────────────────────────────────────────────────────────────────────────────

    def register(self, region: LocalRegion) -> None:
        """Registers a region, once. Raises TransferError when the kernel refuses (memlock limit, or device memory
        without dmabuf)."""
        public = region.public
        if region.base in self._registered:
            return
        if region.on_host:
            made = self.register_memory(public.address, public.length)
        else:
            made = self.register_device_memory(public)
        with self._lock:
            self._registered[region.base] = made

    def register_device_memory(self, public: Region) -> Registration:
        with dmabuf.exported(public.location, public.address, public.length) as (fd, offset):
            return self._keys(
                lambda: self.calls.register_dmabuf(self.pd_pointer, fd, offset, public.address, public.length),
                public.length,
            )

    def register_memory(self, address: int, nbytes: int) -> Registration:
        """Registers memory of the transport's own, which its owner deregisters."""
        return self._keys(lambda: self.calls.register(self.pd_pointer, address, nbytes), nbytes)

    def _keys(self, register: Callable[[], tuple[int, int, int]], nbytes: int) -> Registration:
        try:
            return Registration(*register())
        except OSError as err:
            hint = ": raise the limit of locked memory (ulimit -l)" if err.errno == 12 else ""
            raise TransferError(
                f"rdma: {self.name} cannot register {nbytes} bytes: {err}{hint}", field="buffer"
            ) from err

    def registration(self, base: int) -> Registration | None:
        return self._registered.get(base)

    def unregister(self, region: LocalRegion) -> None:
        with self._lock:
            made = self._registered.pop(region.base, None)
        if made is not None:
            self.deregister(made)

    def deregister(self, made: Registration) -> None:
        try:
            self.calls.deregister(made.mr)
        except OSError as err:
            if not self.cause:
                log.warning("%s: memory not deregistered: %s", self.name, err)

    # ── queue pairs ───────────────────────────────────────────────────────────────────────────────

    def make_queue_pair(self, depth: int, receives: int, inline: int, owner: Completions) -> tuple[Any, int, int, Any]:
        """Returns (pyverbs' QP, its address, the tag of its work requests, its completion queue). Raises OSError or
        TransferError."""
        why = self.why_down()
        if why:
            raise OSError(why)
        qp = self.library.qp
        self._endings.again()
        with self._lock:
            queue = self._queue_with(depth + receives)
            queue.room -= depth + receives
        try:
            caps = qp.QPCap(depth, max(receives, 1), 1, 1, inline)
            kind = self.library.enums.IBV_QPT_RC
            made = qp.QP(self._pd, qp.QPInitAttr(qp_type=kind, scq=queue.made, rcq=queue.made, cap=caps, sq_sig_all=0))
            pointer = verbs.find_qp(made, self.calls.context, self.pd_pointer, queue.pointer)
        except BaseException as err:
            queue.room += depth + receives
            if isinstance(err, self.library.error):
                raise OSError(f"{self.name}: {err}") from err
            raise
        tag = next(self._tags)
        self._owners[tag] = owner
        return made, pointer, tag, queue

    def destroy_queue_pair(self, made: Any, pointer: int, tag: int, queue: CompletionQueue, promised: int) -> None:
        """Returns when the NIC neither reads nor writes memory for this queue pair. Raises TransferError when the
        driver can neither destroy nor stop it; then it must be called again."""
        self._owners.pop(tag, None)

        def freed() -> None:
            with self._lock:
                queue.room += promised

        self._endings.end(made, pointer, freed)

    def _queue_with(self, room: int) -> CompletionQueue:
        for queue in self._queues:
            if queue.room >= room:
                return queue
        entries = min(_CQ_ENTRIES, self._max_cqe)
        cq = self.library.cq
        try:
            channel = cq.CompChannel(self._context)
            made = cq.CQ(self._context, entries, None, channel)
        except self.library.error as err:
            raise OSError(f"{self.name}: {err}") from err
        channel_pointer = verbs.find_channel(channel, self.calls.context)
        pointer = verbs.find_cq(made, self.calls.context, channel_pointer)
        fd = ctypes.c_int.from_address(channel_pointer + 8).value
        os.set_blocking(fd, False)
        queue = CompletionQueue(made, pointer, channel, channel_pointer, fd, entries // 2)
        self._queues.append(queue)
        os.eventfd_write(self._wake, 1)
        return queue

    # ── the thread ────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(self.calls.async_fd, select.POLLIN)
        watched: dict[int, CompletionQueue] = {}
        patience = self._patience
        last = time.perf_counter()  # when something completed
        slept = False
        while not self._closing:
            queues = self._queues
            if sum([self._drain(queue) for queue in queues]):
                now = time.perf_counter()
                patience.completed(now - last, slept=slept)
                last, slept = now, False
                continue
            if patience.window_s and not slept and self.busy and time.perf_counter() - last < patience.window_s:
                continue  # each poll has let go of the GIL
            for queue in list(queues):
                if queue.fd not in watched:
                    watched[queue.fd] = queue
                    poll.register(queue.fd, select.POLLIN)
                self.calls.request_event(queue.pointer, 0)
            if sum([self._drain(queue) for queue in queues]):  # completed before we asked
                last = time.perf_counter()
                continue
            slept = True
            for fd, _ in poll.poll():
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                elif fd in watched:
                    if not self.calls.take_cq_event(watched[fd].channel_pointer) and self.cause:
                        poll.unregister(fd)  # the device is gone and its files always ready
                elif not self._take_event():
                    poll.unregister(fd)

    def _drain(self, queue: CompletionQueue) -> bool:
        got = self.calls.poll_cq(queue.pointer, verbs.POLL_ROWS, self._rows_at)
        if got <= 0:
            return False
        for wr_id, status, opcode, imm in _COMPLETION.iter_unpack(self._raw[: got * _COMPLETION.size]):
            owner = self._owners.get(wr_id >> TAG_SHIFT)
            if owner is not None:
                try:
                    owner.completed(wr_id & ((1 << TAG_SHIFT) - 1), status, opcode, imm)
                except Exception:
                    log.exception("%s: completion", self.name)
        return True

    def _take_event(self) -> bool:
        """Handles one event of the device. Returns False when the device has ended and no further event will come."""
        with self._endings.events_lock:
            event = self.calls.take_async_event()
        if event is None:
            return not self.cause
        kind, element = event
        if kind == _DEVICE_FATAL:
            self.cause = f"{self.name} failed or was removed"
            self._lose(self.cause)
        elif kind == _PORT_ERR and element == self.port:
            self._lose(f"{self.name} port {self.port} is down")
        elif kind == _GID_CHANGE:
            self._look_again()
        return True

    def _look_again(self) -> None:
        try:
            found = gids.read_gids(self.name, self.port)
            self.gids = gids.usable_gids(found, self.name, self.config.rdma_gid_index)
        except TransferError as err:
            log.warning("%s: %s", self.name, err)

    def _lose(self, cause: str) -> None:
        log.warning("rdma: %s", cause)
        for owner in list(self._owners.values()):
            try:
                owner.port_lost(cause)
            except Exception:
                log.exception("%s: port lost", self.name)

    def close(self, timeout_s: float) -> None:
        """Closes the NIC, whose queue pairs are destroyed by then."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                log.warning("%s: its thread does not end", self.name)
                return
        for made in self._registered.values():
            self.deregister(made)
        self._registered.clear()
        self._endings.again()
        closing = [thing for queue in self._queues for thing in (queue.made, queue.channel)]
        self._queues = []
        for thing in (*closing, self._pd, self._context):
            try:
                thing.close()
            except self.library.error as err:
                if not self.cause:
                    log.warning("%s: %s", self.name, err)
        os.close(self._wake)

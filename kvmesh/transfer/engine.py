"""The Transfer Engine: moves bytes between registered memory regions of many processes (see `api`).

caller ─▶ TransferEngine ─▶ Sender (batches, links, time-outs) ─▶ Transport (rdma, shm, tcp, a third party's)
                │                                                        │
                ├── LocalSegment: own regions ◀── land, serve ───────────┤
                └── Windows: who may write where ◀── admit, leave ───────┘
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvmesh.errors import TransferError
from kvmesh.transfer import checks, memory, segment_file, topology
from kvmesh.transfer import host as this_host
from kvmesh.transfer.api import (
    BatchId,
    Carried,
    Notification,
    Range,
    Region,
    TransferRequest,
    TransferState,
    TransferStatus,
)
from kvmesh.transfer.batch import AfterUnlock
from kvmesh.transfer.config import EngineConfig
from kvmesh.transfer.epochs import EndMark
from kvmesh.transfer.peer_link import PeerLink
from kvmesh.transfer.segment import LocalRegion, LocalSegment, SegmentDescriptor, describe, machine_id
from kvmesh.transfer.sender import Sender
from kvmesh.transfer.stats import EngineStats
from kvmesh.transfer.transports import registry, wire
from kvmesh.transfer.transports.base import Rail, Transport
from kvmesh.transfer.windows import Windows

# The NICs that each memory location prefers, and the ways to a peer.


def placed(transports: Sequence[Transport], config: EngineConfig) -> topology.Topology:
    """Returns which NICs each memory location of this host prefers. Raises TransferError when `config.nics` names a NIC
    that no transport uses."""
    nics = [nic for transport in transports for nic in transport.nics()]
    names = [nic.name for nic in nics]
    for name in config.nics:
        if name not in names:
            raise TransferError(_no_nic(name, names, config), field="nics")
    if not names and not config.topology:
        return {}
    return topology.resolve(config.topology, this_host.look(env=os.environ), nics)


def _no_nic(name: str, used: Sequence[str], config: EngineConfig) -> str:
    """Returns the error message for a NIC that cannot be used, with the names that could be."""
    here = this_host.look()
    devices, nets = [d.name for d in here.rdma], [n.name for n in here.nets]
    kinds = ", ".join(config.transports)
    if name in devices or name in nets:
        why = "no transport here uses it: rdma takes RDMA devices that are up, tcp interfaces that have an address"
    else:
        why = f"not here: RDMA devices {', '.join(devices) or 'none'}; interfaces {', '.join(nets) or 'none'}"
    return f"nics={name!r}: {why} (transports: {kinds}; in use: {', '.join(used) or 'none'})"


NOTHING_LEAVES = (
    ", and nothing may leave this one unencrypted: give every service --tls-cert, --tls-key and --tls-ca, all three, "
    "and tcp goes over TLS; or, where the network between hosts may carry KV as it is, --transfer-network trusted"
)


def why_unreachable(descriptor: SegmentDescriptor, transports: Sequence[Transport], stays: bool) -> str:
    """Returns an error message that says for each transport why it does not reach the segment, and what to do. `stays`
    says that no byte may leave this host."""
    if stays and descriptor.machine != machine_id():
        return f"segment {descriptor.name!r} is on another host{NOTHING_LEAVES}"
    causes = []
    for transport in transports:
        name = transport.name
        if name not in descriptor.endpoints:
            causes.append(f"{name}: it has none")
        elif name != "shm":
            causes.append(f"{name}: no NIC here and there that can reach each other")
        elif descriptor.machine != machine_id():
            causes.append("shm: it is on another host, or in another user namespace")
        else:
            causes.append("shm: it is in another network namespace, and no shm_dir is set")
    has = ", ".join(descriptor.endpoints) or "none"
    why = f"segment {descriptor.name!r} cannot be reached ({'; '.join(causes)}); its transports: {has}"
    return f"{why}{NOTHING_LEAVES}" if stays else why


def ways(
    descriptor: SegmentDescriptor, transports: Sequence[Transport], only: Callable[[Rail], bool] | None
) -> tuple[Rail, ...]:
    """Returns the rails to a segment, in the order of `transports`; `only` filters them."""
    rails = tuple(rail for transport in transports for rail in transport.rails(descriptor))
    return rails if only is None else tuple(rail for rail in rails if only(rail))


log = logging.getLogger(__name__)


class TransferEngine:
    """Moves bytes between this process's registered memory and that of its peers. A process usually has one; all
    methods are thread-safe. Targets know the writer by `name`, which must therefore contain the process's incarnation.
    `choices` says which transports are used and why. `on_notify` runs on an engine thread and must return soon."""

    def __init__(
        self,
        name: str,
        config: EngineConfig | None = None,
        on_notify: Callable[[Notification], None] | None = None,
    ) -> None:
        checks.name("name", name)
        checks.instance("config", config, EngineConfig, type(None))
        self.name = name
        self.config = config = config or EngineConfig()
        self.token = secrets.token_hex(16)
        self.segment = LocalSegment()
        self.windows: Windows[LocalRegion] = Windows()
        self.on_notify = on_notify
        self.fault = registry.wrapper(config)
        self._sender = Sender(config, self.segment)
        self._closed = threading.Event()
        self._close_lock = threading.Lock()
        self._inviting = threading.Lock()  # from looking up a window's memory until the window is open
        self._stays = registry.stays(config)  # its bytes, on this host
        choices: list[registry.TransportChoice] = []
        self._transports = registry.started(self, config, self.fault, choices)
        self.choices = tuple(choices)
        self.config = config = replace(config, transports=tuple(one.name for one in choices if one.used))
        try:
            self.topology = self._sender.topology = placed(self._transports, config)
        except TransferError:
            for transport in self._transports:
                transport.close(config.close_timeout_s)
            raise
        self._timer = threading.Thread(target=self._sender.run, name="kvmesh-transfer-timer", daemon=True)
        self._timer.start()
        _engines.add(self)

    # ── memory ────────────────────────────────────────────────────────────────────────────────────

    def allocate(self, nbytes: int, location: str = "cpu:0", *, path: str = "", keep: bool = True) -> Region:
        """Allocates at least `nbytes` of zeroed, page-aligned memory and registers it; it is shared memory when shm is
        on. It lives until `unregister_memory` or `close`, and after that as long as a view of it is held.

        With `path` the memory is this file in a tmpfs. If `keep` is set and an earlier process left the file with the
        same size, its bytes stay and `Region.kept` is true (see `segment_file`). Raises ConfigError when another
        process holds the file or it cannot be used.
        """
        self._check_open()
        nbytes, c = checks.whole("nbytes", nbytes, 1), self.config
        checks.location(location)
        if path:
            found = segment_file.allocate(path, nbytes, keep=keep, huge_pages=c.huge_pages, prefault=c.prefault)
        else:
            shared, label = "shm" in c.transports, f"kvmesh:{self.name}"
            found = memory.allocate(nbytes, label, shared=shared, huge_pages=c.huge_pages, prefault=c.prefault)
        mapping, fd = found
        return self._register(mapping.address, mapping.length, location, mapping.view, mapping, fd)

    def register_memory(self, buffer: object, location: str = "cpu:0") -> Region:
        """Registers memory of the caller, which must keep it alive: a writable contiguous buffer (bytearray, numpy), an
        (address, length) pair, or an object with `data_ptr()` and `nbytes` (a contiguous torch tensor).

        Peers reach such memory over tcp. Over shm it can be the target of writes, but neither the source of writes nor
        the source of reads. GPU memory ("cuda:1") is reached by rdma alone, beside whatever other transports there are,
        and needs a driver that exports it as a dmabuf. Registering exactly the same memory again returns the same
        region, which then needs as many unregistrations. Raises TransferError when the buffer is unfit, or overlaps a
        registered region in another way.
        """
        self._check_open()
        checks.location(location)
        address, length, view = memory.writable(buffer)
        if not checks.on_host(location):
            if not any(transport.device_memory for transport in self._transports):
                names = ", ".join(self.config.transports)
                raise TransferError(
                    f"location={location!r}: only host memory can be registered with {names}", field="location"
                )
            view = memoryview(b"")  # never touched from here
        elif isinstance(buffer, tuple):
            memory.check_mapped(address, length)
        known = self.segment.again(address, length, location, buffer)
        return known.public if known else self._register(address, length, location, view, buffer, -1)

    def _register(self, address: int, length: int, location: str, view: memoryview, keep: object, fd: int) -> Region:
        region = self.segment.add(address, length, location, view, keep, fd)
        done: list[Transport] = []
        try:
            for transport in self._transports:
                transport.registered(region)
                done.append(transport)
        except TransferError:
            for transport in done:
                transport.unregistered(region)
            self.segment.remove(region, 0.0)
            raise
        return region.public

    def unregister_memory(self, region: Region) -> None:
        """Ends a registration. Raises TransferError while the region has an open window, or an unfinished request, or a
        frame of one that timed out, uses it; also when a peer still reads it after `close_timeout_s`."""
        checks.instance("region", region, Region)
        mine = self.segment.by_offset(region.base_offset, region.length)
        if mine is None:
            raise TransferError(f"region at offset {region.base_offset} is not registered", field="region")
        if self.segment.let_go(mine):
            return
        with self._inviting, self._sender.lock:  # whoever looks it up, and uses it then, holds one of them
            window, it = self.windows.overlapping(mine.base, mine.length), f"region at offset {mine.base}"
            if window is not None:
                raise TransferError(f"{it} has an open window {window}: fence it", field="region")
            if self._sender.in_use(mine):
                raise TransferError(f"{it} is used by a transfer", field="region")
            self.segment.hide(mine)
        self.segment.remove(mine, self.config.close_timeout_s)
        for transport in self._transports:
            transport.unregistered(mine)

    # ── segments ──────────────────────────────────────────────────────────────────────────────────

    def local_descriptor(self) -> SegmentDescriptor:
        """Describes all memory registered so far. Memory that is registered later is reached only with a newer
        descriptor."""
        endpoints = {transport.name: transport.endpoint() for transport in self._transports}
        nics = tuple(nic for transport in self._transports for nic in transport.nics())
        return describe(self.name, self.token, self.segment, endpoints, nics, self.topology)

    def open_segment(self, descriptor: SegmentDescriptor | bytes, only: Callable[[Rail], bool] | None = None) -> str:
        """Makes a peer's segment known and returns its name; connections are made at first use. Opening it again with a
        newer descriptor updates its regions. `only` selects rails, for example to test one pair of NICs. Raises
        TransferError when no transport reaches the segment; later uses of the segment raise it, too."""
        self._check_open()
        if isinstance(descriptor, bytes | bytearray | memoryview):
            descriptor = SegmentDescriptor.decode(bytes(descriptor))
        checks.instance("descriptor", descriptor, SegmentDescriptor)
        inside = not self._stays or descriptor.machine == machine_id()
        transports = tuple(t for t in self._transports if inside and t.reaches(descriptor))
        if not transports:
            why = why_unreachable(descriptor, self._transports, self._stays)
            raise self._sender.refuse_segment(descriptor.name, why)
        with self._sender.lock:
            known = self._sender.links.get(descriptor.name)
            if known is not None and known.descriptor.token == descriptor.token:
                known.renew(descriptor, ways(descriptor, transports, only))
                return descriptor.name
        if known is not None:
            self.close_segment(descriptor.name)
        sender = self._sender
        rails = ways(descriptor, transports, only)
        link = PeerLink(descriptor, rails, sender, sender.serials, sender.board, sender.dealer, sender.finals)
        with sender.lock:
            sender.open_link(link)
        return descriptor.name

    def rails(self, segment: str) -> tuple[Rail, ...]:
        """Returns the rails to an open segment. Raises TransferError when it is not open."""
        with self._sender.lock:
            return self._sender.opened(segment).rails

    def reaches_devices(self, segment: str) -> bool:
        """Says whether there are rails to a segment over which a device's memory can be read or written, here or there,
        and not all of them rest; False also while it is not open."""
        with self._sender.lock:
            link = self._sender.links.get(segment)
            return link is not None and any(not link.ways[rail].rest_until for rail in link.device_rails)

    def close_segment(self, name: str) -> None:
        """Closes a segment: its unfinished requests fail, its connections and maps are closed. Unknown names are
        ignored."""
        after = AfterUnlock()
        with self._sender.lock:
            self._sender.refused.pop(name, None)
            link = self._sender.links.get(name)
            if link is None:
                return
            self._sender.close_link(link, f"segment {name} was closed", after)
        self._sender.conclude(after)
        for transport in link.transports:
            transport.forget(name, link.closed)

    # ── batches ───────────────────────────────────────────────────────────────────────────────────

    def allocate_batch(self, n: int) -> BatchId:
        """Returns a new batch that takes up to `n` requests, in one or more calls of `submit`."""
        self._check_open()
        return self._sender.new_batch(checks.whole("n", n, 1))

    def submit(self, batch: BatchId, requests: Sequence[TransferRequest], timeout_s: float | None = None) -> None:
        """Queues requests and returns. Raises TransferError, and queues nothing, when one is malformed; later failures
        are in the requests' statuses. `timeout_s` defaults to the configuration's `request_timeout_s`."""
        requests = checks.plain(requests)
        if not requests:
            return
        self._check_open()
        timeout_s = self.config.request_timeout_s if timeout_s is None else checks.seconds("timeout_s", timeout_s)
        self._sender.submit(batch, requests, time.monotonic() + timeout_s)

    def status(self, batch: BatchId, i: int) -> TransferStatus:
        """Returns the status of the i-th request submitted to this batch. Raises TransferError when there is none."""
        with self._sender.lock:
            known = self._sender.batch(batch)
            if not 0 <= i < len(known.states):
                raise TransferError(f"i={i}: the batch has {len(known.states)} requests", field="i")
            return known.status(i)

    def statuses(self, batch: BatchId) -> list[TransferStatus]:
        """Returns the statuses of all requests of this batch, in the order of submission."""
        with self._sender.lock:
            known = self._sender.batch(batch)
            return [known.status(i) for i in range(len(known.states))]

    def carried(self, batch: BatchId) -> Carried:
        """Returns by which rails the bytes of this batch have travelled so far."""
        with self._sender.lock:
            known = self._sender.batch(batch)
            rails = tuple((str(rail), nbytes) for rail, nbytes in known.rails.items() if nbytes)
            return Carried(rails, known.resent)

    async def wait(self, batch: BatchId) -> None:
        """Waits until every request submitted so far is final, which the requests' time-outs bound."""
        await self._sender.wait(batch)

    def wait_sync(self, batch: BatchId, timeout_s: float) -> bool:
        """Blocks as `wait` does, and returns False when `timeout_s` passes first."""
        return self._sender.wait_sync(batch, checks.seconds("timeout_s", timeout_s))

    def on_done(self, batch: BatchId, callback: Callable[[], None]) -> None:
        """Calls `callback` once every request submitted so far is final: at once if they already are, else on an engine
        thread or on a thread inside `wait_sync`. The callback must return soon; it may call the engine."""
        self._sender.on_final(batch, callback)

    def cancel(self, batch: BatchId) -> None:
        """Stops posting the batch's requests. A request with nothing on its way becomes CANCELLED at once. The others
        become final when their last slice is answered: COMPLETED if that was all of the request, else CANCELLED; or
        TIMEOUT when the target stays silent."""
        after = AfterUnlock()
        with self._sender.lock:
            self._sender.cancel(self._sender.batch(batch), TransferState.CANCELLED, "cancelled", after)
        self._sender.conclude(after)

    def free_batch(self, batch: BatchId) -> None:
        """Forgets a batch. Raises TransferError while one of its requests is not final."""
        with self._sender.lock:
            known = self._sender.batch(batch)
            if known.open:
                raise TransferError(f"batch={batch}: {known.open} requests are not final", field="batch")
            del self._sender.batches[batch]

    # ── end marks ─────────────────────────────────────────────────────────────────────────────────

    def notify(
        self,
        segment: str,
        handoff_epoch: int,
        payload: bytes,
        on_done: Callable[[TransferStatus], None] | None = None,
    ) -> None:
        """Delivers `payload` (at most 32 KiB) to the target's `on_notify` once, after every write submitted before to
        that segment and epoch has been acknowledged. It is not delivered when one of those writes failed or was
        cancelled, or when the target's window is closed. Epoch 0 needs no window. `on_done` gets COMPLETED or the
        reason, on an engine thread."""
        checks.payload(payload, wire.MAX_NOTIFY_BYTES)
        handoff_epoch = checks.whole("handoff_epoch", handoff_epoch)
        self._check_open()
        after = AfterUnlock()
        sender = self._sender
        with sender.lock:
            link = sender.opened(segment)
            deadline = time.monotonic() + self.config.request_timeout_s
            notice = EndMark(next(sender.serials), handoff_epoch, bytes(payload), on_done, deadline)
            sender.notify(link, notice, after)
        sender.conclude(after)

    def deliver(self, peer: str, epoch: int, serial: int, payload: bytes) -> int:
        """Passes a peer's notification to `on_notify`. Returns 0, or the wire code of a refusal. Transports call it."""
        callback = self.on_notify
        if callback is None:
            return wire.NO_LISTENER
        fresh = self.windows.take_notification(peer, epoch, serial)
        if fresh is None:
            return wire.WINDOW_CLOSED
        if not fresh:
            return 0
        try:
            callback(Notification(peer, epoch, payload))
        except Exception:
            log.exception("on_notify raised")
        return 0

    # ── windows and fences ────────────────────────────────────────────────────────────────────────

    def open_window(self, peer: str, handoff_epoch: int, ranges: Sequence[Range]) -> None:
        """Allows `peer` to write into these ranges of this segment in this epoch; a second call adds ranges. Each
        window must end in a fence. Raises TransferError for a range that is not inside one registered region, and for
        an epoch that is being or was fenced."""
        self._check_open()
        checks.window(peer, handoff_epoch, ranges)
        homes: list[tuple[int, int, LocalRegion | None]] = []
        with self._inviting:
            for r in ranges:
                region = self.segment.by_offset(r.offset, r.length)
                if region is None or r.length <= 0:
                    raise TransferError(f"range=({r.offset}, {r.length}): not in one registered region", field="ranges")
                homes.append((r.offset, r.length, region if region.on_host else None))
            self.windows.open(peer, handoff_epoch, homes)

    def fence(self, peer: str, handoff_epoch: int, timeout_s: float = 5.0) -> None:
        """Closes the window, and returns when no byte of that epoch can land any more. It usually blocks for
        microseconds; at most for two frames, or for `fence_grace_s` when the writer froze inside a frame. It is
        idempotent. Raises TransferError after `timeout_s`, or when a driver does not end writes that may still land
        (rdma): the window then stays closed, and the fence must be repeated."""
        checks.window(peer, handoff_epoch, ())
        timeout_s = checks.seconds("timeout_s", timeout_s)
        if self.windows.shut(peer, handoff_epoch):
            for transport in self._transports:
                transport.fence(peer, handoff_epoch)
        self.windows.fence(peer, handoff_epoch, timeout_s, self.config.fence_grace_s)

    def fence_peer(self, peer: str, timeout_s: float = 5.0) -> None:
        """Fences every epoch of this peer that has a window, all within `timeout_s`. Raises as `fence` does."""
        deadline = time.monotonic() + checks.seconds("timeout_s", timeout_s)
        for epoch in self.windows.epochs(peer):
            self.fence(peer, epoch, max(0.0, deadline - time.monotonic()))

    def landed_bytes(self, peer: str, handoff_epoch: int) -> int:
        """Returns how many bytes of whole slices have landed in the window of this peer and epoch."""
        return self.windows.landed_bytes(peer, handoff_epoch)

    # ── life ──────────────────────────────────────────────────────────────────────────────────────

    def count(self, what: str, n: int = 1) -> None:
        self._sender.count(what, n)

    def counters(self) -> dict[str, int]:
        return dict(self._sender.counters)

    def stats(self) -> EngineStats:
        """Returns the engine's counters and present state: per local NIC, per rail, per traffic class."""
        return self._sender.stats()

    def close(self) -> None:
        """Fails what is unfinished, closes every window, socket and descriptor, and ends every thread. It is idempotent
        and takes at most `close_timeout_s` a step, even with frozen peers. Views of allocated memory stay valid. It
        must not be called from an engine's callback."""
        with self._close_lock:
            if self._closed.is_set():
                return
            self._closed.set()
            after = AfterUnlock()
            sender = self._sender
            with sender.lock:
                for link in list(sender.links.values()):
                    sender.close_link(link, "engine closed", after)
            sender.conclude(after)
            self.windows.close_all()
            for transport in self._transports:
                transport.close(self.config.close_timeout_s)
            sender.stop()
            if self._timer is not threading.current_thread():
                self._timer.join(self.config.close_timeout_s)
            self.segment.close()

    def __enter__(self) -> TransferEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed.is_set():
            made_before = "was made before this process was forked: make one here"
            raise TransferError(f"the transfer engine {made_before if self in _inherited else 'is closed'}")


# Engines that a forked child inherits, and cannot use: their threads stayed with the parent. To the child they are
# closed at once, without touching what they share with the parent: closing a listener's socket for good closes it for
# both.

_engines: weakref.WeakSet[TransferEngine] = weakref.WeakSet()
_inherited: weakref.WeakSet[TransferEngine] = weakref.WeakSet()


def _forked() -> None:
    """Marks the engines that a forked child inherited as closed. It runs in the child, where no other thread exists
    yet; locks may be held by threads that are not there."""
    for engine in list(_engines):
        _inherited.add(engine)
        engine._closed = threading.Event()
        engine._closed.set()
        engine._close_lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)

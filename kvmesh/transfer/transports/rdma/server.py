"""The target: lends queue pairs and keys to openers, and takes them back in a fence.

It does not see what lands. So it hands out no key before the greeting, admits an opener to an epoch only while the
window is open, and remembers to whom: `fence` asks those to stop, and destroys the queue pairs of whoever does not say
at once that nothing is under way. A destroyed queue pair lands nothing, whatever the writer's NIC still sends.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
import zlib
from ipaddress import IPv6Address
from typing import TYPE_CHECKING

from kvmesh.errors import TransferError
from kvmesh.transfer.memory import Mapping
from kvmesh.transfer.segment import LocalRegion
from kvmesh.transfer.transports import wire
from kvmesh.transfer.transports.rdma import protocol, verbs
from kvmesh.transfer.transports.rdma.channel import Channel
from kvmesh.transfer.transports.rdma.device import RdmaNic
from kvmesh.transfer.transports.rdma.queue_pair import QueuePair
from kvmesh.transfer.transports.serving import Accepted, AcceptingServer
from kvmesh.transfer.transports.wire import Hello, ProtocolBroken, Welcome

if TYPE_CHECKING:
    from kvmesh.transfer.transports.rdma.transport import RdmaTransport

log = logging.getLogger(__name__)

_MAX_LANDINGS = 256  # queue pairs of one connection
_HEAD_BYTES = protocol.LETTER.size
_AGAIN_S = 0.25  # between tries to destroy what the driver does not destroy


class LandingQueuePair:
    """An opener's queue pair at the target, with its mailbox (a `queue_pair.Sink`)."""

    def __init__(self, owner: RdmaAccepted, nic: RdmaNic) -> None:
        self.owner = owner
        self.nic = nic
        self.mailbox = Mapping(-1, protocol.SLOTS * protocol.SLOT_BYTES, writable=True)
        self.registration = nic.register_memory(self.mailbox.address, self.mailbox.length)
        try:
            self.queue_pair = QueuePair(nic, 16, protocol.SLOTS, self)
        except BaseException:
            nic.deregister(self.registration)
            raise
        self._registered = True

    def close(self) -> None:
        """Destroys the queue pair, after which nothing lands through it. Raises TransferError when the driver fails;
        then it must be called again. It is for one thread."""
        self.queue_pair.close()
        if self._registered:
            self._registered = False
            self.nic.deregister(self.registration)

    def chain_done(self, queue_pair: QueuePair, token: object) -> None:
        return  # we send nothing here

    def failed(self, queue_pair: QueuePair, status: int, cause: str, *, down: bool) -> None:
        log.debug("rdma: queue pair of %r: %s", self.owner.peer, cause)  # the opener finds out, and resets

    def received(self, queue_pair: QueuePair, imm: int) -> None:
        """Reads the letter in slot `imm`."""
        if imm >= protocol.SLOTS:
            self.owner.broken_protocol(f"letter in slot {imm}")
            return
        at = imm * protocol.SLOT_BYTES
        seq, epoch, serial, admission, nbytes = protocol.LETTER.unpack_from(self.mailbox.view, at)
        if nbytes > protocol.LETTER_BYTES:
            self.owner.broken_protocol(f"letter of {nbytes} bytes")
            return
        payload = bytes(self.mailbox.view[at + _HEAD_BYTES : at + _HEAD_BYTES + nbytes])
        try:
            queue_pair.expect(1)
        except OSError as err:
            log.debug("rdma: %s", err)
        self.owner.deliver(seq, epoch, serial, admission, payload)


class RdmaAccepted(Accepted):
    """One opener's control connection and all its queue pairs at this target."""

    def __init__(self, server: AcceptingServer, sock: socket.socket, transport: RdmaTransport) -> None:
        super().__init__(server, sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.transport = transport
        self._changed = threading.Condition(threading.Lock())
        self._landings: dict[tuple[str, int], LandingQueuePair] = {}
        self._doomed: list[
            LandingQueuePair
        ] = []  # to be destroyed; empty whenever the lock is free, unless the driver fails
        self._generation = 1
        self._admitted: dict[int, int] = {}  # epoch → the newest admission
        self._admissions = 0
        self._channel: Channel | None = None
        self._released = False

    def read_hello(self) -> Hello:
        (length,) = wire.LENGTH.unpack(wire.recv_exact(self.sock, wire.LENGTH.size))
        if length > wire.MAX_HELLO_BYTES:
            raise ProtocolBroken(f"hello of {length} bytes")
        return wire.decode_hello(bytes(wire.recv_exact(self.sock, length)))

    def send_welcome(self, welcome: Welcome) -> None:
        data = wire.encode_hello(welcome)
        self.sock.sendall(wire.LENGTH.pack(len(data)) + data)

    def serve(self) -> None:
        channel = Channel(self.sock)
        with self._changed:
            self._channel = channel
        if self.dead:
            raise wire.Gone("cut")
        try:
            channel.run(self._take, lambda now: float("inf"))
        except TransferError as err:
            raise wire.Gone(str(err)) from err

    def release(self) -> None:
        """Returns only when nothing can land any more; a connection that would supersede this one waits for that."""
        with self._changed:
            self._released = True
            while True:
                try:
                    self._destroy_all()
                    break
                except TransferError:  # logged
                    self._changed.wait(_AGAIN_S)
            self._changed.notify_all()
        if self._channel is not None:
            self._channel.close()

    # ── the fence ─────────────────────────────────────────────────────────────────────────────────

    def fence(self, epoch: int, grace_s: float) -> None:
        """Returns when nothing that this opener ever posted for the epoch can land; the window is already closed.
        Raises TransferError when the driver does not end a queue pair: the connection is cut, and the fence must be
        repeated."""
        with self._changed:
            number = self._admitted.get(epoch)
            if number is None:
                return
            waits = threading.current_thread() is not self.thread
            if grace_s > 0 and self._channel is not None and waits:
                self._channel.send(protocol.encode(protocol.Revoke(epoch, number)))
                self._changed.wait_for(lambda: epoch not in self._admitted, grace_s)
            if epoch not in self._admitted:
                return
            try:
                self._destroy_all()
            except TransferError:  # the connection's thread keeps trying
                if waits and self._changed.wait_for(lambda: epoch not in self._admitted, 2 * _AGAIN_S):
                    return
                raise
            self.host.count("rdma.fences_that_destroyed")
            if self._channel is not None:
                self._channel.send(protocol.encode(protocol.GenerationFenced(self._generation)))
            self._changed.notify_all()

    def _destroy_all(self) -> None:
        """Destroys all queue pairs and begins a new generation, so that no earlier admission holds for later queue
        pairs. Raises TransferError as `_destroy` does; admissions then stay, for the next fence to find. The caller
        holds the lock."""
        self._generation += 1
        landings, self._landings = self._landings, {}
        self._destroy(*landings.values())
        self._admitted.clear()

    def _destroy(self, *landings: LandingQueuePair) -> None:
        """Destroys these queue pairs, and those that failed before. Raises TransferError when one can be neither
        destroyed nor stopped: it is kept, the connection is cut, and its thread keeps trying. The caller holds the
        lock, so that no fence finds a queue pair half destroyed."""
        self._doomed += landings
        failed: list[LandingQueuePair] = []
        cause = ""
        for landing in self._doomed:
            try:
                landing.close()
            except TransferError as err:
                failed.append(landing)
                cause = str(err)
        self._doomed = failed
        if failed:
            if any(landing in failed for landing in landings):
                log.error("rdma connection of %r: its queue pairs may still land something: %s", self.peer, cause)
            self.interrupt()
            raise TransferError(cause, field="nics")

    # ── messages ──────────────────────────────────────────────────────────────────────────────────

    def broken_protocol(self, what: str) -> None:
        log.warning("rdma connection of %r closed: %s", self.peer, what)
        self.interrupt()

    def _send(self, message: protocol.Told) -> None:
        if self._channel is not None:
            self._channel.send(protocol.encode(message))

    def _take(self, data: memoryview) -> None:
        message = protocol.decode_asked(data)
        match message:
            case protocol.Connect():
                self._send(self._connect(message))
            case protocol.Reset():
                with self._changed:
                    landing = self._landings.pop((message.name, message.qp_num), None)
                    if landing is not None:
                        self._destroy(landing)
                self._send(protocol.ResetDone(message.seq))
            case protocol.AdmitEpoch():
                self._admit(message)
            case protocol.Released():
                self._let_go(message.epoch, message.admission)
            case protocol.AskKeys():
                self._send(self._keys(message))
            case protocol.Notify():
                self.deliver(message.seq, message.epoch, message.serial, message.admission, message.payload)
            case protocol.Checksum():
                self._send(self._checksum(message))
            case protocol.Landed():
                self.host.windows.landed(self.peer, message.epoch, message.nbytes)

    def _connect(self, asked: protocol.Connect) -> protocol.Connected:
        nic = self.transport.living_nic(asked.to)
        if nic is None:
            return protocol.Connected(asked.seq, f"no NIC {asked.to!r} here")
        with self._changed:
            generation = self._generation
            if len(self._landings) >= _MAX_LANDINGS:
                return protocol.Connected(asked.seq, f"over {_MAX_LANDINGS} queue pairs on one connection")
        psn = secrets.randbelow(1 << 24)
        mtu = max(1, min(asked.mtu, nic.mtu, protocol.mtu_code(self.transport.config.rdma_mtu)))
        reads = max(1, min(asked.reads, nic.reads))
        landing: LandingQueuePair | None = None
        try:
            landing = LandingQueuePair(self, nic)
            index = nic.gid_index(IPv6Address(_packed(asked.to_gid)))
            route = verbs.Route(_packed(asked.gid), index, asked.lid, nic.gids[0].kind != "ib")
            landing.queue_pair.connect(asked.qp_num, asked.psn, psn, route, mtu, reads)
            landing.queue_pair.expect(protocol.SLOTS)
        except BaseException as err:  # what the opener sent may make no sense at all
            if landing is not None:
                with self._changed:
                    self._destroy(landing)
            if isinstance(err, OSError | TransferError):
                return protocol.Connected(asked.seq, f"at the peer: {err}")
            raise
        with self._changed:
            stale = self._generation != generation or self._released
            if stale:
                self._destroy(landing)
                return protocol.Connected(asked.seq, "a fence came between", retry=True)
            old = self._landings.pop((asked.name, asked.qp_num), None)
            self._landings[(asked.name, asked.qp_num)] = landing
            if old is not None:
                self._destroy(old)
        made = landing.queue_pair
        mailbox = landing.registration.rkey
        return protocol.Connected(
            asked.seq, "", False, made.number, psn, nic.lid, mtu, reads, generation, landing.mailbox.address, mailbox
        )

    def _admit(self, asked: protocol.AdmitEpoch) -> None:
        with self._changed:  # a fence closes the window first, then comes here: it finds what we admit now
            ranges = self.host.windows.ranges(self.peer, asked.epoch)
            if ranges is None:
                self._send(protocol.Admitted(asked.seq))
                return
            self._admissions += 1
            self._admitted[asked.epoch] = self._admissions
            starts, ends = (tuple(side) for side in ranges)
            self._send(protocol.Admitted(asked.seq, self._admissions, self._generation, starts, ends))

    def _let_go(self, epoch: int, number: int) -> None:
        with self._changed:
            if number and self._admitted.get(epoch) == number:
                del self._admitted[epoch]
                self._changed.notify_all()

    def deliver(self, seq: int, epoch: int, serial: int, admission: int, payload: bytes) -> None:
        """Delivers a notification that came by mailbox or control connection. The admission that it gives back is taken
        first, because whoever hears the notification will fence."""
        self._let_go(epoch, admission)
        self._send(protocol.Answer(seq, self.host.deliver(self.peer, epoch, serial, payload)))

    def _keys(self, asked: protocol.AskKeys) -> protocol.KeysAre:
        region = self.host.segment.by_offset(asked.base, 1)
        if region is None or region.base != asked.base:
            return protocol.KeysAre(asked.seq)
        made = {nic.name: nic.registration(region.base) for nic in self.transport.own_nics}
        rkeys = {name: registration.rkey for name, registration in made.items() if registration is not None}
        return protocol.KeysAre(asked.seq, region.address, region.length, rkeys)

    def _checksum(self, asked: protocol.Checksum) -> protocol.Answer:
        if len(asked.offsets) > wire.MAX_PARTS or sum(asked.lengths) > wire.MAX_FRAME_BYTES:
            raise ProtocolBroken(f"checksums of {len(asked.offsets)} parts, {sum(asked.lengths)} bytes")
        segment = self.host.segment
        regions: list[LocalRegion] = []
        try:
            for offset, length in zip(asked.offsets, asked.lengths, strict=True):
                region = segment.use(offset, length) if length > 0 else None
                if region is None:
                    return protocol.Answer(asked.seq, wire.NO_MEMORY)
                regions.append(region)
            parts = zip(regions, asked.offsets, asked.lengths, strict=True)
            return protocol.Answer(asked.seq, 0, tuple(zlib.crc32(r.slice_at(o, n)) for r, o, n in parts))
        except ValueError as err:
            raise ProtocolBroken(f"checksum: {err}") from err
        finally:
            for region in regions:
                segment.unuse(region)


def _packed(gid: str) -> bytes:
    try:
        return socket.inet_pton(socket.AF_INET6, gid)
    except OSError as err:
        raise ProtocolBroken(f"GID {gid!r}") from err


def fence_peer(server: AcceptingServer, peer: str, epoch: int, grace_s: float) -> None:
    """Fences the epoch at every connection of that peer, with one grace time for all. Raises TransferError when one
    failed; the others are fenced by then."""
    deadline = time.monotonic() + grace_s
    failed: TransferError | None = None
    for connection in server.connections():
        if isinstance(connection, RdmaAccepted) and connection.peer == peer:
            try:
                connection.fence(epoch, max(0.0, deadline - time.monotonic()))
            except TransferError as err:
                failed = err
    if failed is not None:
        raise TransferError(f"fence of ({peer!r}, {epoch}): {failed}", field="nics") from failed

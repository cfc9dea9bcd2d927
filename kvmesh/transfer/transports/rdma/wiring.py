"""The opener's queue pairs: made with the target, broken off, and settled with it.

_begin ─ Connect ─▶ Connected ─ _ready ─▶ in use ─ _break ─▶ _reset ─ Reset ─▶ ResetDone: what was on it is settled
                                            └── GenerationFenced: settled at once, the target has destroyed its side
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from kvmesh.errors import TransferError
from kvmesh.transfer.transports.base import Frame, FrameKind, Rail
from kvmesh.transfer.transports.rdma import protocol, verbs
from kvmesh.transfer.transports.rdma.admissions import Admissions
from kvmesh.transfer.transports.rdma.channel import Channel
from kvmesh.transfer.transports.rdma.queue_pair import QueuePair
from kvmesh.transfer.transports.rdma.rail import Later, OutgoingMailbox, RailPhase, WriteTracker

if TYPE_CHECKING:
    from kvmesh.transfer.transports.rdma.transport import RdmaTransport

log = logging.getLogger(__name__)

PROGRESS_S = 0.05  # how often a target hears how much has landed
Handler = Callable[[protocol.Told, Later], None]


def run_all(later: Later) -> None:
    for action in later:
        action()


class Wiring(ABC):
    """What a path knows of its target, and the queue pairs of its rails. `_lock` guards all of it. A method runs either
    on its caller's thread with the lock held, or on the path's thread without the lock; docstrings say which."""

    def __init__(self, transport: RdmaTransport) -> None:
        self.transport = transport
        self.host = transport.host
        self.config = transport.config
        self._lock = threading.Lock()
        self._tracks: dict[Rail, list[WriteTracker]] = {}  # each has a queue pair
        self._channel: Channel | None = None
        self._asked: dict[int, tuple[float, Handler]] = {}
        self._keys: dict[int, protocol.KeysAre] = {}
        self._admissions = Admissions()
        self._releasing: dict[int, int] = {}  # epoch → admission: given back as soon as all of it is flushed
        self._unclean = False  # something waits for a flush
        self._seqs = count(1)
        self._generation = 0  # the target's, by its last message
        self._landed: dict[int, int] = {}
        self._told_at = 0.0
        self._telling = False

    @abstractmethod
    def _pump(self, track: WriteTracker, later: Later) -> None:
        """Sends what waits and may go now. The caller holds the lock."""

    # ── lock held ─────────────────────────────────────────────────────────────────────────────────

    def _all_tracks(self) -> list[WriteTracker]:
        return [track for tracks in self._tracks.values() for track in tracks]

    def _ask(self, make: Callable[[int], protocol.Asked], handler: Handler) -> None:
        if self._channel is not None:
            seq = next(self._seqs)
            self._asked[seq] = (time.monotonic() + self.config.connect_timeout_s, handler)
            self._channel.send(protocol.encode(make(seq)))
            self._channel.defer(lambda: None)  # its thread minds the time

    def _break(self, track: WriteTracker, cause: str, *, down: bool) -> None:
        if track.state in (RailPhase.READY, RailPhase.CONNECTING) and self._channel is not None:
            track.break_off(cause, down=down)
            self._channel.defer(partial(self._reset, track))

    def _ended_write(self, frame: Frame, nbytes: int) -> None:
        """Notes that a write is off the wire, because it completed or was settled."""
        if frame.kind is FrameKind.WRITE:
            number = self._admissions.landed(frame.epoch)
            if nbytes:
                self._landed[frame.epoch] = self._landed.get(frame.epoch, 0) + nbytes
            if number:
                self._release(frame.epoch, number)

    def _release(self, epoch: int, number: int) -> None:
        """Gives an admission back, now or when the epoch is flushed."""
        self._releasing[epoch] = number
        if self._flushed(epoch) and self._channel is not None:
            del self._releasing[epoch]
            self._tell_landed(time.monotonic())
            self._channel.send(protocol.encode(protocol.Released(epoch, number)))

    def _flushed(self, epoch: int) -> bool:
        """Says whether what was written in the epoch is in the peer's memory. An acknowledgement only says that the
        peer's NIC has the bytes. The answer to a READ behind them, on the same queue pair and region, says that they
        are written: the READ follows the WRITE, and on PCIe no read overtakes a write. When it returns False, flushes
        are on their way and `_clean` follows."""
        clean = True
        for track in self._all_tracks():
            try:
                clean = track.flush(epoch) and clean
            except OSError as err:
                self._break(track, str(err), down=True)
                clean = False
        self._unclean = self._unclean or not clean
        return clean

    def _clean(self, later: Later) -> None:
        """Looks again at everything that waited for flushes."""
        if self._unclean:
            self._unclean = False
            for epoch, number in list(self._releasing.items()):
                self._release(epoch, number)
            for track in self._all_tracks():
                self._pump(track, later)

    def _settle(
        self, frames: list[Frame], cause: str, later: Later, *, settled: bool, down: bool, dead: bool = True
    ) -> None:
        """Reports these frames as lost. `dead` says that our queue pair is destroyed; until then a READ may still land
        here."""
        for frame in frames:
            self._ended_write(frame, 0)
            sure = settled and (dead or frame.kind is not FrameKind.READ)
            later.append(partial(frame.lost, cause, settled=sure, down=down))

    def _tell_landed(self, now: float) -> None:
        if self._channel is not None:
            for epoch, nbytes in self._landed.items():
                self._channel.send(protocol.encode(protocol.Landed(epoch, nbytes)))
        self._landed.clear()
        self._told_at = now
        self._telling = False

    # ── from the NIC's thread ─────────────────────────────────────────────────────────────────────

    def chain_done(self, track: WriteTracker, queue_pair: QueuePair, token: object) -> None:
        later: Later = []
        with self._lock:
            if track.queue_pair is not queue_pair:
                return
            now = track.progress_at = time.monotonic()
            posted = track.posted.pop(token, None) if isinstance(token, int) else None
            if posted is not None:
                frame = posted.frame
                refused = sum(frame.parts[i][3] for i in posted.refused)
                self._ended_write(frame, frame.nbytes - refused)
                if self._landed:
                    self._progress(now)
                later.append(partial(frame.done, posted.refused, posted.cause))
            elif isinstance(token, tuple):
                track.flushed(*token)
            self._pump(track, later)
            self._clean(later)
        run_all(later)

    def failed(self, track: WriteTracker, queue_pair: QueuePair, status: int, cause: str, *, down: bool) -> None:
        with self._lock:
            if track.queue_pair is not queue_pair:
                return
            if status == verbs.REMOTE_ACCESS:
                self._keys.clear()  # the peer may have unregistered it: ask again
            self._break(track, cause, down=down)

    def _progress(self, now: float) -> None:
        """Tells the target how much landed: now, or soon if it was told lately."""
        if now - self._told_at >= PROGRESS_S:
            self._tell_landed(now)
        elif not self._telling and self._channel is not None:
            self._telling = True
            self._channel.defer(lambda: None)  # `_due` says when

    # ── the path's thread, lock free ───────────────────────────────────────────────────────────────

    def _due(self, now: float) -> float:
        """Returns when the channel's thread must look again; it is called before the thread sleeps."""
        with self._lock:
            until = min((deadline for deadline, _ in self._asked.values()), default=float("inf"))
            if until <= now and self._channel is not None:
                self._channel.shut("the peer does not answer")
            if self._telling:
                if now - self._told_at >= PROGRESS_S:
                    self._tell_landed(now)
                else:
                    until = min(until, self._told_at + PROGRESS_S)
            return until

    def _begin(self, track: WriteTracker) -> None:
        pair = track.pair
        track.nic = self.transport.living_nic(pair.local) or track.nic
        try:
            queue_pair = QueuePair(track.nic, self.config.rdma_queue_depth, 0, track)
        except (OSError, TransferError) as err:
            self._cannot(track, str(err))
            return
        psn = secrets.randbelow(1 << 24)
        nic = track.nic
        mtu = min(nic.mtu, protocol.mtu_code(self.config.rdma_mtu))

        def connect(seq: int) -> protocol.Connect:
            gid, remote = str(pair.local_gid.address), str(pair.remote_gid.address)
            return protocol.Connect(
                seq, nic.name, pair.remote, remote, queue_pair.number, psn, gid, nic.lid, mtu, nic.reads
            )

        with self._lock:
            track.number, track.made = queue_pair.number, queue_pair
            self._ask(connect, lambda told, later: self._defer_ready(track, queue_pair, psn, told))

    def _defer_ready(self, track: WriteTracker, queue_pair: QueuePair, psn: int, message: protocol.Told) -> None:
        if self._channel is not None and isinstance(message, protocol.Connected):
            self._channel.defer(partial(self._ready, track, queue_pair, psn, message))

    def _ready(self, track: WriteTracker, queue_pair: QueuePair, psn: int, message: protocol.Connected) -> None:
        """Handles the target's answer to a Connect."""
        outgoing: OutgoingMailbox | None = None
        cause = message.cause
        if not cause:
            pair = track.pair
            is_global = pair.local_gid.kind != "ib"
            try:
                index = track.nic.gid_index(pair.local_gid.address)
                route = verbs.Route(pair.remote_gid.address.packed, index, message.lid, is_global)
                outgoing = OutgoingMailbox(track.nic)
                queue_pair.connect(message.qp_num, message.psn, psn, route, message.mtu, message.reads)
            except (OSError, TransferError) as err:
                cause = str(err)
        later: Later = []
        with self._lock:
            if track.made is not queue_pair:  # broken off meanwhile, which has destroyed it
                track.doomed += [outgoing] if outgoing is not None else []
            elif cause or message.generation < self._generation:
                track.doomed += [outgoing] if outgoing is not None else []
                track.break_off(cause or "fenced by the peer", down=bool(cause) and not message.retry)
            else:
                track.made = None
                track.queue_pair, track.outgoing = queue_pair, outgoing
                queue_pair.generation = message.generation
                track.mailbox = (message.mailbox, message.mailbox_key)
                track.slots = list(range(protocol.SLOTS))
                track.state = RailPhase.READY
                track.progress_at = time.monotonic()
                self.host.count("rdma.queue_pairs")
                self._pump(track, later)
                if track.forgotten and not track.busy():
                    self._break(track, "evicted to make room", down=False)
        run_all(later)
        if track.state is RailPhase.RESETTING or track.doomed:
            self._reset(track)

    def _cannot(self, track: WriteTracker, cause: str) -> None:
        with self._lock:
            track.break_off(cause, down=True)
        self._reset(track)

    def _destroy(self, track: WriteTracker) -> bool:
        """Destroys what was broken off; returns whether nothing is left. What the driver fails to end keeps its memory,
        and is tried again next time."""
        with self._lock:
            doomed, track.doomed = track.doomed, []
        failed: list[QueuePair | OutgoingMailbox] = []
        for thing in sorted(
            doomed, key=lambda thing: isinstance(thing, OutgoingMailbox)
        ):  # queue pairs before their memory
            try:
                if failed and isinstance(thing, OutgoingMailbox):
                    failed.append(thing)
                else:
                    thing.close()
            except TransferError as err:
                log.error("rdma to %s: a queue pair may still read something: %s", track.rail, err)
                failed.append(thing)
        with self._lock:
            track.doomed += failed
        return not failed

    def _reset(self, track: WriteTracker) -> None:
        """Destroys our queue pair, then has the target destroy its own."""
        dead = self._destroy(track)
        later: Later = []
        with self._lock:
            if track.state is RailPhase.RESETTING:
                reads = [f for f in track.stranded if f.kind is FrameKind.READ]
                track.stranded = [f for f in track.stranded if f.kind is not FrameKind.READ]
                self._settle(reads, track.fault[0], later, settled=True, down=track.fault[1], dead=dead)
                number, name = track.number, track.nic.name
                self._ask(lambda seq: protocol.Reset(seq, name, number), partial(self._reset_done, track))
        run_all(later)

    def _reset_done(self, track: WriteTracker, message: protocol.Told, later: Later) -> None:
        if track.state is not RailPhase.RESETTING:
            return
        cause, down = track.fault
        stranded, track.stranded = track.stranded, []
        track.ended()
        self._settle(stranded, cause, later, settled=True, down=down)
        if down or track.forgotten:
            waiting = list(track.queue)
            track.queue.clear()
            later += [partial(frame.lost, cause, settled=True, down=down) for frame in waiting]
        if track.forgotten:
            self._drop_locked(track)
        self._pump(track, later)
        self._clean(later)

    def _drop(self, track: WriteTracker) -> None:
        with self._lock:
            self._drop_locked(track)

    def _drop_locked(self, track: WriteTracker) -> None:
        if track.forgotten and not track.busy() and track.state is RailPhase.NEW:
            tracks = self._tracks.get(track.rail, [])
            if track in tracks:
                tracks.remove(track)
            if not tracks:
                self._tracks.pop(track.rail, None)
            if not self._tracks and self._channel is not None:
                self._channel.shut("idle")

    def _fenced(self, generation: int) -> None:
        """Settles what was on queue pairs of older generations, all of which the target has destroyed."""
        with self._lock:
            self._admissions.fenced(generation)
            self._releasing.clear()
            self._generation = generation
            tracks = []
            for track in self._all_tracks():
                if track.queue_pair is not None and track.queue_pair.generation < generation:
                    track.break_off("fenced by the peer", down=False)
                    tracks.append(track)
        dead = {track for track in tracks if self._destroy(track)}
        later: Later = []
        with self._lock:
            for track in tracks:
                if track.state is RailPhase.RESETTING:
                    stranded, track.stranded = track.stranded, []
                    track.ended()
                    sure = track in dead
                    self._settle(stranded, "fenced by the peer", later, settled=True, down=False, dead=sure)
                    self._pump(track, later)
            self._clean(later)
        run_all(later)

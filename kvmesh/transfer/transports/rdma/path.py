"""The opener: one control connection to a target, and the rails over which one-sided operations go.

    post ─▶ Track.queue ─ pump ─▶ keys known? admitted? room? ─▶ queue pair ═▶ completion (NIC's thread) ─▶ done
                                     └── asks the target, goes on when it has answered

One thread per target: it dials, reads answers, makes and destroys queue pairs, and reports what was lost. Whoever
posts, or completes something, pumps: nothing there waits.
"""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from kvmesh.transfer.segment import SegmentDescriptor, why_no_answer
from kvmesh.transfer.transports import wire
from kvmesh.transfer.transports.base import Frame, FrameKind, Rail
from kvmesh.transfer.transports.dialing import connect_patiently
from kvmesh.transfer.transports.rdma import dial, protocol
from kvmesh.transfer.transports.rdma.channel import Channel
from kvmesh.transfer.transports.rdma.gids import Pair
from kvmesh.transfer.transports.rdma.rail import Later, OutgoingNotification, RailPhase, WriteTracker
from kvmesh.transfer.transports.rdma.wiring import Wiring, run_all
from kvmesh.transfer.transports.wire import Gone

if TYPE_CHECKING:
    from kvmesh.transfer.transports.rdma.transport import RdmaTransport


log = logging.getLogger(__name__)


class RdmaPath(Wiring):
    """The opener's side of one segment. Methods are thread-safe and do not block unless their docstring says so."""

    def __init__(self, transport: RdmaTransport, descriptor: SegmentDescriptor, pairs: dict[Rail, Pair]) -> None:
        super().__init__(transport)
        self.descriptor = descriptor
        self.pairs = pairs
        self.closed = ""
        self._ended = threading.Condition(self._lock)
        self._sock: socket.socket | None = None  # while dialing
        self._running = False
        self._conn_id = 0
        self._stranded: list[Frame] = []  # of a control connection that broke
        self._asking_keys: set[int] = set()

    # ── from the engine ───────────────────────────────────────────────────────────────────────────

    def renew(self, descriptor: SegmentDescriptor, pairs: dict[Rail, Pair]) -> None:
        """Takes a newer descriptor of the same process; queue pairs made from now on use it."""
        with self._lock:
            self.descriptor, self.pairs = descriptor, pairs
            for track in self._all_tracks():
                track.pair = pairs.get(track.rail, track.pair)

    def take(self, frame: Frame) -> bool:
        """Takes a frame. Returns False when the path is closed."""
        later: Later = []
        start = False
        with self._lock:
            if self.closed:
                return False
            pair = self.pairs.get(frame.rail)
            if pair is None:
                later.append(partial(frame.lost, f"{frame.rail}: no such rail", settled=True, down=True))
            else:
                track = self._choose(frame.rail, pair)
                track.forgotten = False
                track.queue.append(frame)
                start, self._running = not self._running, True
                if self._channel is not None:
                    self._pump(track, later)
        if start:
            try:
                self.transport.spawn(threading.Thread(target=self._thread, name="kvmesh-rdma-peer", daemon=True))
            except OSError as err:
                self._unreachable(str(err))
        run_all(later)
        return True

    def _choose(self, rail: Rail, pair: Pair) -> WriteTracker:
        """Returns the rail's queue pair with the least to do, or a new one while all are busy and another is
        allowed."""
        tracks, most = self._tracks.setdefault(rail, []), self.config.rdma_qps_per_rail
        if tracks and most == 1:
            return tracks[0]
        track = min(tracks, key=WriteTracker.load, default=None)
        if track is None or (track.busy() and len(tracks) < most):
            track = WriteTracker(self, rail, pair, self.transport.nic(pair.local))
            tracks.append(track)
        return track

    def recall(self, frame: Frame) -> bool:
        with self._lock:
            for track in self._tracks.get(frame.rail, ()):
                if frame in track.queue:
                    track.queue.remove(frame)
                    return True
        return False

    def expire(self, frame: Frame, idle_s: float) -> None:
        with self._lock:
            for track in self._tracks.get(frame.rail, ()):
                if self._channel is None:
                    return
                if track.holds(frame):
                    if time.monotonic() - track.progress_at >= idle_s:
                        self._break(track, f"nothing completes on {track.rail}", down=idle_s > 0)
                elif track.asks(frame):
                    self._channel.shut(f"no answer from {self.descriptor.name} over rdma")

    def idle(self, rail: Rail) -> bool:
        with self._lock:
            unsettled = (RailPhase.CONNECTING, RailPhase.RESETTING)
            return not any(track.busy() or track.state in unsettled for track in self._tracks.get(rail, ()))

    def forget(self, rail: Rail, cause: str) -> None:
        """Gives up one rail; the path's thread reports its frames as lost."""
        with self._lock:
            for track in self._tracks.get(rail, ()):
                track.forgotten = True
                if self._channel is not None:
                    if track.state is RailPhase.READY:
                        self._break(track, cause, down=False)
                    else:
                        self._channel.defer(partial(self._drop, track))

    def close(self, cause: str) -> None:
        with self._lock:
            self.closed = self.closed or cause
            if self._channel is not None:
                self._channel.shut(cause)
            if self._sock is not None:
                try:
                    self._sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # not connected
            self._ended.notify_all()

    # ── the pump: lock held ───────────────────────────────────────────────────────────────────────

    def _pump(self, track: WriteTracker, later: Later) -> None:
        while track.queue and self._channel is not None and self._send(track, track.queue[0], later):
            track.queue.popleft()

    def _send(self, track: WriteTracker, frame: Frame, later: Later) -> bool:
        """Sends a frame if it may go now; returns whether it left the queue."""
        channel = self._channel
        assert channel is not None
        if frame.kind is FrameKind.CHECKSUM:
            seq = next(self._seqs)
            track.checks[seq] = frame
            offsets, lengths = (tuple(part[i] for part in frame.parts) for i in (2, 3))
            channel.send(protocol.encode(protocol.Checksum(seq, offsets, lengths)))
            return True
        if track.state is RailPhase.NEW:
            track.state = RailPhase.CONNECTING
            channel.defer(partial(self._begin, track))
        if track.state is not RailPhase.READY or track.queue_pair is None:
            return False
        try:
            if frame.kind is FrameKind.NOTIFY:
                return self._send_letter(track, frame, channel)
            return self._post(track, frame, channel, later)
        except OSError as err:  # posted in part, or not at all
            self._break(track, str(err), down=True)
            return True

    def _post(self, track: WriteTracker, frame: Frame, channel: Channel, later: Later) -> bool:
        assert frame.group is not None and track.queue_pair is not None
        base = frame.group.remote.base_offset
        keys = self._keys.get(base)
        if keys is None:
            if base not in self._asking_keys:
                self._asking_keys.add(base)
                self._ask(lambda seq: protocol.AskKeys(seq, base), partial(self._keys_are, base))
            return False
        everything = tuple(range(len(frame.parts)))
        rkey = keys.rkeys.get(track.pair.remote)
        own = track.nic.registration(frame.local.base)
        if rkey is None or own is None:
            cause = wire.CAUSES[wire.NO_MEMORY] if rkey is None else f"memory not registered with {track.nic.name}"
            later.append(partial(frame.done, everything, cause))
            return True
        refused: tuple[int, ...] = ()
        if frame.kind is FrameKind.WRITE:
            admission = self._admissions.known.get(frame.epoch)
            if admission is not None and admission.generation == track.queue_pair.generation:
                refused = admission.outside(frame.parts)
                if refused and frame.serial not in admission.asked_by:
                    admission = None  # it may have grown
            else:
                admission = None
            if admission is None:
                self._ask_admission(frame.epoch)
                return False
            if len(refused) == len(everything):
                later.append(partial(frame.done, everything, wire.CAUSES[wire.OUTSIDE_WINDOW]))
                return True
        if len(everything) > track.queue_pair.free:
            return False
        if not track.posted:
            track.progress_at = time.monotonic()
        if frame.kind is FrameKind.WRITE:
            self._admissions.flew(frame.epoch)
        cause = wire.CAUSES[wire.OUTSIDE_WINDOW] if refused else ""
        track.post(frame, rkey, own.lkey, keys.address - base, refused, cause)
        return True

    def _send_letter(self, track: WriteTracker, frame: Frame, channel: Channel) -> bool:
        notice = frame.notice
        assert notice is not None
        seq = next(self._seqs)
        if len(notice.payload) <= protocol.LETTER_BYTES and not track.slots:
            return False
        # The end mark tells the target that we are done with the epoch: its fence need not ask.
        if self._admissions.idle(frame.epoch) and not self._flushed(frame.epoch):
            return False
        self._tell_landed(time.monotonic())
        admission = self._admissions.give_up(frame.epoch)
        if len(notice.payload) > protocol.LETTER_BYTES:
            track.letters[seq] = OutgoingNotification(frame, -1)
            message = protocol.Notify(seq, frame.epoch, notice.serial, admission, notice.payload)
            channel.send(protocol.encode(message))
            return True
        return track.post_letter(seq, frame, admission)

    def _ask_admission(self, epoch: int) -> None:
        waiting = (f.serial for t in self._all_tracks() for f in t.queue if f.epoch == epoch)
        if self._admissions.ask(epoch, waiting):
            self._ask(lambda seq: protocol.AdmitEpoch(seq, epoch), partial(self._admitted, epoch))

    # ── the path's thread ─────────────────────────────────────────────────────────────────────────

    def _thread(self) -> None:
        while True:
            sock, cause = connect_patiently(self._dial, self.config, lambda: self.closed, self._pause)
            if sock is None:
                advice = "" if self.closed else why_no_answer(self.descriptor, "rdma")
                self._unreachable(f"{cause}: {advice}" if advice else cause)
                return
            channel = Channel(sock)
            self._connected(channel)
            try:
                channel.run(partial(self._told, channel), self._due)
            except Gone as err:
                cause = f"rdma control connection to {self.descriptor.name}: {err}"
            except Exception as err:  # whatever the peer has sent: this thread alone reports what was on the path
                log.warning("rdma control connection to %s: %r", self.descriptor.name, err)
                cause = f"rdma control connection to {self.descriptor.name}: {err}"
                channel.shut(cause)
                self._pause(self.config.backoff_s)
            again = self._disconnected(channel, cause)
            channel.close()
            if not again:
                return

    def _pause(self, seconds: float) -> None:
        with self._lock:
            self._ended.wait_for(lambda: bool(self.closed), seconds * random.uniform(0.5, 1.5))

    def _dial(self) -> socket.socket:
        def opened(sock: socket.socket) -> None:
            with self._lock:
                if self.closed:
                    raise Gone(self.closed)
                self._sock = sock

        conn_id = next(self.transport.conn_ids)
        supersedes = (self._conn_id,) if self._conn_id else ()
        try:
            sock = dial.dial(self.descriptor, self.host.name, conn_id, supersedes, self.config, opened)
        finally:
            with self._lock:
                self._sock = None
        self._conn_id = conn_id
        self.host.count("rdma.connected")
        return sock

    def _connected(self, channel: Channel) -> None:
        later: Later = []
        with self._lock:
            self._channel = channel
            if self.closed:
                channel.shut(self.closed)
            stranded, self._stranded = self._stranded, []
            self._settle(stranded, "the control connection broke", later, settled=True, down=False)
            for track in self._all_tracks():
                self._pump(track, later)
        run_all(later)

    def _disconnected(self, channel: Channel, cause: str) -> bool:
        """Handles the end of the control connection; returns whether to connect again, because frames must be settled
        or wait."""
        with self._lock:
            self._channel = None
            tracks = self._all_tracks()
            for track in tracks:
                track.break_off(cause, down=False)
            self._asked.clear()
            self._asking_keys.clear()
            self._keys.clear()
            self._admissions.disconnected()
            self._releasing.clear()
            self._generation = 0
            self._landed.clear()
        dead = {track for track in tracks if self._destroy(track)}
        later: Later = []
        with self._lock:
            for track in tracks:
                asked = [*track.checks.values(), *(letter.frame for letter in track.letters.values())]
                track.checks.clear()
                track.letters.clear()
                writes = [f for f in track.stranded if f.kind is FrameKind.WRITE]
                others = [f for f in track.stranded if f.kind is not FrameKind.WRITE]
                self._stranded += writes
                track.stranded = []
                track.ended()
                self._settle(others + asked, cause, later, settled=True, down=False, dead=track in dead)
                if track.forgotten and not track.queue:
                    self._drop_locked(track)
            again = not self.closed and bool(self._stranded or any(t.queue for t in self._all_tracks()))
            if not again:
                self._running = False
                if self.closed:
                    self._lose_all(self.closed, later)
        run_all(later)
        return again

    def _unreachable(self, cause: str) -> None:
        later: Later = []
        with self._lock:
            self._running = False
            self._lose_all(self.closed or cause, later)
        run_all(later)

    def _lose_all(self, cause: str, later: Later) -> None:
        down = not self.closed
        stranded, self._stranded = self._stranded, []
        self._settle(stranded, cause, later, settled=False, down=down)
        for track in self._all_tracks():
            waiting = list(track.queue)
            track.queue.clear()
            later += [partial(frame.lost, cause, settled=True, down=down) for frame in waiting]

    def _told(self, channel: Channel, data: memoryview) -> None:
        later: Later = []
        message = protocol.decode_told(data)
        if isinstance(message, protocol.GenerationFenced):
            self._fenced(message.generation)
            return
        with self._lock:
            if isinstance(message, protocol.Revoke):
                if self._admissions.revoke(message.epoch, message.admission):
                    self._release(message.epoch, message.admission)
            elif isinstance(message, protocol.Answer):
                for track in self._all_tracks():
                    if track.answered(message.seq, message, later):
                        track.progress_at = time.monotonic()
                        self._pump(track, later)
                        break
            else:
                _, handler = self._asked.pop(message.seq, (0.0, None))
                if handler is not None:
                    handler(message, later)
        run_all(later)

    # ── answers: lock held ────────────────────────────────────────────────────────────────────────

    def _keys_are(self, base: int, message: protocol.Told, later: Later) -> None:
        if isinstance(message, protocol.KeysAre):
            self._asking_keys.discard(base)
            self._keys[base] = message
            self._pump_all(later)

    def _admitted(self, epoch: int, message: protocol.Told, later: Later) -> None:
        if not isinstance(message, protocol.Admitted):
            return
        asked_by = self._admissions.admitted(epoch, message.admission, message.generation, message.starts, message.ends)
        if not message.admission:
            for track in self._all_tracks():
                for frame in [f for f in track.queue if f.serial in asked_by and f.kind is FrameKind.WRITE]:
                    track.queue.remove(frame)
                    cause = wire.CAUSES[wire.WINDOW_CLOSED]
                    later.append(partial(frame.done, tuple(range(len(frame.parts))), cause))
        else:  # a queue pair of an older generation was destroyed by a fence, even if we have not heard of it yet
            for track in self._all_tracks():
                if track.queue_pair is not None and track.queue_pair.generation < message.generation:
                    self._break(track, "fenced by the peer", down=False)
        self._pump_all(later)

    def _pump_all(self, later: Later) -> None:
        for track in self._all_tracks():
            self._pump(track, later)

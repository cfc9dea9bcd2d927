"""The opener: one control connection to a target, and the rails over which one-sided operations go.

    post ─▶ Track.queue ─ pump ─▶ keys known? admitted? room? ─▶ queue pair ═▶ completion (NIC's thread) ─▶ done
                                     └── asks the target, goes on when it has answered

One thread per target: it dials, reads answers, makes and destroys queue pairs, and reports what was lost. Whoever
posts, or completes something, pumps: nothing there waits.
"""

from __future__ import annotations

import random
import secrets
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from kvmesh.rpc.errors import TransferError
from kvmesh.transfer import wire
from kvmesh.transfer.dialing import connect_patiently
from kvmesh.transfer.rdma import dial, protocol, verbs
from kvmesh.transfer.rdma.admissions import Admissions
from kvmesh.transfer.rdma.channel import Channel
from kvmesh.transfer.rdma.gids import Pair
from kvmesh.transfer.rdma.queue_pair import QueuePair
from kvmesh.transfer.rdma.rail import Later, Letter, Outgoing, State, Track
from kvmesh.transfer.segment import SegmentDescriptor
from kvmesh.transfer.transport import Frame, Kind, Rail
from kvmesh.transfer.wire import Gone, ProtocolBroken

if TYPE_CHECKING:
    from kvmesh.transfer.rdma.transport import RdmaTransport

_PROGRESS_S = 0.05  # how often a target hears how much has landed
Handler = Callable[[protocol.Told, Later], None]


def _run(later: Later) -> None:
    for action in later:
        action()


class RdmaPath:
    """To one segment. Methods are thread-safe and do not block, unless they are called so."""

    def __init__(self, transport: RdmaTransport, descriptor: SegmentDescriptor, pairs: dict[Rail, Pair]) -> None:
        self.transport = transport
        self.host = transport.host
        self.config = transport.config
        self.descriptor = descriptor
        self.pairs = pairs
        self.closed = ""
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._tracks: dict[Rail, Track] = {}
        self._channel: Channel | None = None
        self._sock: socket.socket | None = None  # while dialing
        self._running = False
        self._conn_id = 0
        self._stranded: list[Frame] = []  # of a control connection that broke
        self._asked: dict[int, tuple[float, Handler]] = {}
        self._asking_keys: set[int] = set()
        self._keys: dict[int, protocol.KeysAre] = {}
        self._admissions = Admissions()
        self._seqs = count(1)
        self._generation = 0  # the target's, as it told last
        self._landed: dict[int, int] = {}
        self._told_at = 0.0
        self._telling = False

    # ── from the engine ───────────────────────────────────────────────────────────────────────────

    def take(self, frame: Frame) -> bool:
        """False: the path is closed."""
        later: Later = []
        start = False
        with self._lock:
            if self.closed:
                return False
            pair = self.pairs.get(frame.rail)
            if pair is None:
                later.append(partial(frame.lost, f"{frame.rail}: no such rail", settled=True, down=True))
            else:
                track = self._tracks.get(frame.rail)
                if track is None:
                    track = Track(self, frame.rail, pair, self.transport.nic(pair.local))
                    self._tracks[frame.rail] = track
                track.forgotten = False
                track.queue.append(frame)
                start, self._running = not self._running, True
                if self._channel is not None:
                    self._pump(track, later)
        if start:
            self.transport.spawn(threading.Thread(target=self._thread, name="kvmesh-rdma-peer", daemon=True))
        _run(later)
        return True

    def recall(self, frame: Frame) -> bool:
        with self._lock:
            track = self._tracks.get(frame.rail)
            if track is not None and frame in track.queue:
                track.queue.remove(frame)
                return True
        return False

    def expire(self, frame: Frame, idle_s: float) -> None:
        with self._lock:
            track = self._tracks.get(frame.rail)
            if track is None or self._channel is None:
                return
            if track.holds(frame):
                if time.monotonic() - track.progress_at >= idle_s:
                    self._break(track, f"nothing completes on {track.rail}", down=idle_s > 0)
            elif track.asks(frame):
                self._channel.shut(f"no answer from {self.descriptor.name} over rdma")

    def idle(self, rail: Rail) -> bool:
        with self._lock:
            track = self._tracks.get(rail)
            return track is None or not (track.busy() or track.state in (State.CONNECTING, State.RESETTING))

    def forget(self, rail: Rail, cause: str) -> None:
        """Gives up one rail. Its frames are reported by the path's thread."""
        with self._lock:
            track = self._tracks.get(rail)
            if track is None:
                return
            track.forgotten = True
            if self._channel is not None:
                if track.state is State.READY:
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

    def _pump(self, track: Track, later: Later) -> None:
        while track.queue and self._channel is not None and self._send(track, track.queue[0], later):
            track.queue.popleft()

    def _send(self, track: Track, frame: Frame, later: Later) -> bool:
        """Whether it has left the queue."""
        channel = self._channel
        assert channel is not None
        if frame.kind is Kind.CHECKSUM:
            seq = next(self._seqs)
            track.checks[seq] = frame
            offsets, lengths = (tuple(part[i] for part in frame.parts) for i in (2, 3))
            channel.send(protocol.encode(protocol.Checksum(seq, offsets, lengths)))
            return True
        if track.state is State.NEW:
            track.state = State.CONNECTING
            channel.defer(partial(self._begin, track))
        if track.state is not State.READY or track.queue_pair is None:
            return False
        try:
            if frame.kind is Kind.NOTIFY:
                return self._send_letter(track, frame, channel)
            return self._post(track, frame, channel, later)
        except OSError as err:  # posted in part, or not at all
            self._break(track, str(err), down=True)
            return True

    def _post(self, track: Track, frame: Frame, channel: Channel, later: Later) -> bool:
        assert frame.group is not None and track.queue_pair is not None
        base = frame.group.remote.base_offset
        keys = self._keys.get(base)
        if keys is None:
            if base not in self._asking_keys:
                self._asking_keys.add(base)
                self._ask(lambda seq: protocol.Keys(seq, base), partial(self._keys_are, base))
            return False
        everything = tuple(range(len(frame.parts)))
        rkey = keys.rkeys.get(track.pair.remote)
        own = track.nic.registration(frame.local.base)
        if rkey is None or own is None:
            cause = wire.CAUSES[wire.NO_MEMORY] if rkey is None else f"memory not registered with {track.nic.name}"
            later.append(partial(frame.done, everything, cause))
            return True
        refused: tuple[int, ...] = ()
        if frame.kind is Kind.WRITE:
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
        if frame.kind is Kind.WRITE:
            self._admissions.flew(frame.epoch)
        cause = wire.CAUSES[wire.OUTSIDE_WINDOW] if refused else ""
        track.post(frame, rkey, own.lkey, keys.address - base, refused, cause)
        return True

    def _send_letter(self, track: Track, frame: Frame, channel: Channel) -> bool:
        notice = frame.notice
        assert notice is not None
        seq = next(self._seqs)
        if len(notice.payload) <= protocol.LETTER_BYTES and not track.slots:
            return False
        # The end mark tells the target that we are done with the epoch: its fence need not ask.
        self._tell_landed(time.monotonic())
        admission = self._admissions.give_up(frame.epoch)
        if len(notice.payload) > protocol.LETTER_BYTES:
            track.letters[seq] = Letter(frame, -1)
            message = protocol.Notify(seq, frame.epoch, notice.serial, admission, notice.payload)
            channel.send(protocol.encode(message))
            return True
        return track.post_letter(seq, frame, admission)

    def _ask(self, make: Callable[[int], protocol.Asked], handler: Handler) -> None:
        if self._channel is not None:
            seq = next(self._seqs)
            self._asked[seq] = (time.monotonic() + self.config.connect_timeout_s, handler)
            self._channel.send(protocol.encode(make(seq)))
            self._channel.defer(lambda: None)  # its thread minds the time

    def _ask_admission(self, epoch: int) -> None:
        waiting = (f.serial for t in self._tracks.values() for f in t.queue if f.epoch == epoch)
        if self._admissions.ask(epoch, waiting):
            self._ask(lambda seq: protocol.Admit(seq, epoch), partial(self._admitted, epoch))

    def _break(self, track: Track, cause: str, *, down: bool) -> None:
        if track.state in (State.READY, State.CONNECTING) and self._channel is not None:
            track.break_off(cause, down=down)
            self._channel.defer(partial(self._reset, track))

    def _ended_write(self, frame: Frame, nbytes: int) -> None:
        """A write is off the wire: completed, or settled."""
        if frame.kind is Kind.WRITE:
            number = self._admissions.landed(frame.epoch)
            if nbytes:
                self._landed[frame.epoch] = self._landed.get(frame.epoch, 0) + nbytes
            if number and self._channel is not None:
                self._tell_landed(time.monotonic())
                self._channel.send(protocol.encode(protocol.Released(frame.epoch, number)))

    def _settle(self, frames: list[Frame], cause: str, later: Later, *, settled: bool, down: bool) -> None:
        for frame in frames:
            self._ended_write(frame, 0)
            later.append(partial(frame.lost, cause, settled=settled, down=down))

    # ── from the NIC's thread ─────────────────────────────────────────────────────────────────────

    def chain_done(self, track: Track, queue_pair: QueuePair, token: object) -> None:
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
            self._pump(track, later)
        _run(later)

    def failed(self, track: Track, queue_pair: QueuePair, status: int, cause: str, *, down: bool) -> None:
        with self._lock:
            if track.queue_pair is not queue_pair:
                return
            if status == verbs.REMOTE_ACCESS:
                self._keys.clear()  # the peer may have unregistered it: ask again
            self._break(track, cause, down=down)

    def _progress(self, now: float) -> None:
        """Tells the target now or, when it heard lately, soon."""
        if now - self._told_at >= _PROGRESS_S:
            self._tell_landed(now)
        elif not self._telling and self._channel is not None:
            self._telling = True
            self._channel.defer(lambda: None)  # `_due` says when

    def _tell_landed(self, now: float) -> None:
        if self._channel is not None:
            for epoch, nbytes in self._landed.items():
                self._channel.send(protocol.encode(protocol.Landed(epoch, nbytes)))
        self._landed.clear()
        self._told_at = now
        self._telling = False

    # ── the path's thread ─────────────────────────────────────────────────────────────────────────

    def _thread(self) -> None:
        while True:
            sock, cause = connect_patiently(self._dial, self.config, lambda: self.closed, self._pause)
            if sock is None:
                self._unreachable(cause)
                return
            channel = Channel(sock)
            self._connected(channel)
            try:
                channel.run(partial(self._told, channel), self._due)
            except (Gone, ProtocolBroken) as err:
                cause = f"rdma control connection to {self.descriptor.name}: {err}"
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
            for track in self._tracks.values():
                self._pump(track, later)
        _run(later)

    def _disconnected(self, channel: Channel, cause: str) -> bool:
        """Whether to connect again: something must be settled, or waits."""
        with self._lock:
            self._channel = None
            tracks = list(self._tracks.values())
            for track in tracks:
                track.break_off(cause, down=False)
            self._asked.clear()
            self._asking_keys.clear()
            self._keys.clear()
            self._admissions.disconnected()
            self._generation = 0
            self._landed.clear()
        for track in tracks:
            self._destroy(track)
        later: Later = []
        with self._lock:
            for track in tracks:
                asked = [*track.checks.values(), *(letter.frame for letter in track.letters.values())]
                track.checks.clear()
                track.letters.clear()
                writes = [f for f in track.stranded if f.kind is Kind.WRITE]
                others = [f for f in track.stranded if f.kind is not Kind.WRITE]
                self._stranded += writes
                track.stranded = []
                track.state = State.NEW
                self._settle(others + asked, cause, later, settled=True, down=False)
                if track.forgotten and not track.queue:
                    del self._tracks[track.rail]
            again = not self.closed and bool(self._stranded or any(t.queue for t in self._tracks.values()))
            if not again:
                self._running = False
                if self.closed:
                    self._lose_all(self.closed, later)
        _run(later)
        return again

    def _unreachable(self, cause: str) -> None:
        later: Later = []
        with self._lock:
            self._running = False
            self._lose_all(self.closed or cause, later)
        _run(later)

    def _lose_all(self, cause: str, later: Later) -> None:
        down = not self.closed
        stranded, self._stranded = self._stranded, []
        self._settle(stranded, cause, later, settled=False, down=down)
        for track in self._tracks.values():
            waiting = list(track.queue)
            track.queue.clear()
            later += [partial(frame.lost, cause, settled=True, down=down) for frame in waiting]

    def _due(self, now: float) -> float:
        with self._lock:
            until = min((deadline for deadline, _ in self._asked.values()), default=float("inf"))
            if until <= now and self._channel is not None:
                self._channel.shut("the peer does not answer")
            if self._telling:
                if now - self._told_at >= _PROGRESS_S:
                    self._tell_landed(now)
                else:
                    until = min(until, self._told_at + _PROGRESS_S)
            return until

    def _told(self, channel: Channel, data: memoryview) -> None:
        later: Later = []
        message = protocol.decode_told(data)
        if isinstance(message, protocol.Fenced):
            self._fenced(message.generation)
            return
        with self._lock:
            if isinstance(message, protocol.Revoke):
                if self._admissions.revoke(message.epoch, message.admission):
                    self._tell_landed(time.monotonic())
                    channel.send(protocol.encode(protocol.Released(message.epoch, message.admission)))
            elif isinstance(message, protocol.Answer):
                for track in self._tracks.values():
                    if track.answered(message.seq, message, later):
                        track.progress_at = time.monotonic()
                        self._pump(track, later)
                        break
            else:
                _, handler = self._asked.pop(message.seq, (0.0, None))
                if handler is not None:
                    handler(message, later)
        _run(later)

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
            for track in self._tracks.values():
                for frame in [f for f in track.queue if f.serial in asked_by and f.kind is Kind.WRITE]:
                    track.queue.remove(frame)
                    cause = wire.CAUSES[wire.WINDOW_CLOSED]
                    later.append(partial(frame.done, tuple(range(len(frame.parts))), cause))
        else:  # a queue pair of an older generation was destroyed by a fence, even if we have not heard of it yet
            for track in self._tracks.values():
                if track.queue_pair is not None and track.queue_pair.generation < message.generation:
                    self._break(track, "fenced by the peer", down=False)
        self._pump_all(later)

    def _pump_all(self, later: Later) -> None:
        for track in self._tracks.values():
            self._pump(track, later)

    # ── queue pairs: the path's thread, lock not held ─────────────────────────────────────────────

    def _begin(self, track: Track) -> None:
        pair = track.pair
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

    def _defer_ready(self, track: Track, queue_pair: QueuePair, psn: int, message: protocol.Told) -> None:
        if self._channel is not None and isinstance(message, protocol.Connected):
            self._channel.defer(partial(self._ready, track, queue_pair, psn, message))

    def _ready(self, track: Track, queue_pair: QueuePair, psn: int, message: protocol.Connected) -> None:
        """The target has answered a Connect."""
        outgoing: Outgoing | None = None
        cause = message.cause
        if not cause:
            pair = track.pair
            is_global = pair.local_gid.kind != "ib"
            route = verbs.Route(pair.remote_gid.address.packed, pair.local_gid.index, message.lid, is_global)
            try:
                outgoing = Outgoing(track.nic)
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
                track.state = State.READY
                track.progress_at = time.monotonic()
                self.host.count("rdma.queue_pairs")
                self._pump(track, later)
                if track.forgotten and not track.busy():
                    self._break(track, "evicted to make room", down=False)
        _run(later)
        if track.state is State.RESETTING or track.doomed:
            self._reset(track)

    def _cannot(self, track: Track, cause: str) -> None:
        with self._lock:
            track.break_off(cause, down=True)
        self._reset(track)

    def _destroy(self, track: Track) -> None:
        with self._lock:
            doomed, track.doomed = track.doomed, []
        for thing in sorted(doomed, key=lambda thing: isinstance(thing, Outgoing)):  # queue pairs before their memory
            thing.close()

    def _reset(self, track: Track) -> None:
        """Ours is destroyed; then the target destroys its own."""
        self._destroy(track)
        later: Later = []
        with self._lock:
            if track.state is State.RESETTING:
                reads = [f for f in track.stranded if f.kind is Kind.READ]
                track.stranded = [f for f in track.stranded if f.kind is not Kind.READ]
                self._settle(reads, track.fault[0], later, settled=True, down=track.fault[1])
                number, name = track.number, track.nic.name
                self._ask(lambda seq: protocol.Reset(seq, name, number), partial(self._reset_done, track))
        _run(later)

    def _reset_done(self, track: Track, message: protocol.Told, later: Later) -> None:
        if track.state is not State.RESETTING:
            return
        cause, down = track.fault
        stranded, track.stranded = track.stranded, []
        self._settle(stranded, cause, later, settled=True, down=down)
        track.state = State.NEW
        if down or track.forgotten:
            waiting = list(track.queue)
            track.queue.clear()
            later += [partial(frame.lost, cause, settled=True, down=down) for frame in waiting]
        if track.forgotten:
            self._drop_locked(track)
        self._pump(track, later)

    def _drop(self, track: Track) -> None:
        with self._lock:
            self._drop_locked(track)

    def _drop_locked(self, track: Track) -> None:
        if track.forgotten and not track.busy() and track.state is State.NEW:
            self._tracks.pop(track.rail, None)
            if not self._tracks and self._channel is not None:
                self._channel.shut("idle")

    def _fenced(self, generation: int) -> None:
        """The target has destroyed every queue pair of an older generation: what was on them is settled."""
        with self._lock:
            self._admissions.fenced(generation)
            self._generation = generation
            tracks = []
            for track in self._tracks.values():
                if track.queue_pair is not None and track.queue_pair.generation < generation:
                    track.break_off("fenced by the peer", down=False)
                    tracks.append(track)
        for track in tracks:
            self._destroy(track)
        later: Later = []
        with self._lock:
            for track in tracks:
                if track.state is State.RESETTING:
                    stranded, track.stranded = track.stranded, []
                    self._settle(stranded, "fenced by the peer", later, settled=True, down=False)
                    track.state = State.NEW
                    self._pump(track, later)
        _run(later)

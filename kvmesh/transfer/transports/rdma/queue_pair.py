"""A queue pair: chains of work requests, each with one signalled completion, and never more than the queue holds."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np

from kvmesh.transfer.transports.rdma import verbs
from kvmesh.transfer.transports.rdma.device import TAG_SHIFT, RdmaNic
from kvmesh.transfer.transports.rdma.verbs import Route

INLINE_BYTES = 128
_RECEIVE = 1 << (TAG_SHIFT - 1)  # marks the id of a receive
_FEW = 56  # rows up to here are packed one by one: numpy's start-up costs more
_ROW = verbs.WORK_ROW.itemsize
# A work request and, right behind it, its one SGE: a row of WORK_ROW.
_pack = struct.Struct("<QQQiIIIQI76xQII").pack_into
_SIGNALED_INLINE = verbs.SIGNALED | verbs.INLINE
assert struct.calcsize("<QQQiIIIQI76xQII") == _ROW


class Sink(Protocol):
    """The user of a queue pair. Its methods are called on the NIC's thread."""

    def chain_done(self, queue_pair: QueuePair, token: object) -> None: ...

    def failed(self, queue_pair: QueuePair, status: int, cause: str, *, down: bool) -> None:
        """Notes that nothing more will complete. It may be called more than once."""
        ...

    def received(self, queue_pair: QueuePair, imm: int) -> None: ...


class QueuePair:
    """A queue pair. `post` is for one thread at a time; `free` counts work requests that fit. It must be closed."""

    def __init__(self, nic: RdmaNic, depth: int, receives: int, sink: Sink) -> None:
        self.nic = nic
        self.depth = depth
        self.generation = 0
        self._sink = sink
        self._promised = depth + receives
        self._inline = INLINE_BYTES
        try:
            self._made, self.pointer, self._tag, self._queue = nic.make_queue_pair(depth, receives, self._inline, self)
        except OSError:
            self._inline = 0
            self._made, self.pointer, self._tag, self._queue = nic.make_queue_pair(depth, receives, 0, self)
        self.number: int = self._made.qp_num
        self.closed = False
        self._close_lock = threading.Lock()
        self._chains: dict[int, tuple[int, object]] = {}
        self._base = self._tag << TAG_SHIFT
        self._seq = 0
        self._posted = 0  # written by the thread that posts
        self._ended = 0  # by the NIC's thread
        self._rows = np.zeros(depth, verbs.WORK_ROW)
        at = self._at = self._rows.ctypes.data
        self._sge_at = at + verbs.SEND_ROW.itemsize
        self._raw = self._rows.view(np.uint8).data
        self._rows["n_sges"] = 1
        self._links = at + _ROW * np.arange(1, depth + 1, dtype=np.uint64)
        self._sges = self._links - np.uint64(verbs.SGE_ROW.itemsize)
        self._bad = ctypes.c_void_p()
        self._bad_at = ctypes.addressof(self._bad)
        self._post_all = partial(nic.calls.post_send, self.pointer, at, self._bad_at)
        self._receive = np.zeros(1, verbs.RECEIVE_ROW)
        self._receive["id"] = (self._tag << TAG_SHIFT) | _RECEIVE
        self._receive_at = self._receive.ctypes.data

    @property
    def free(self) -> int:
        return self.depth - self._posted + self._ended

    def connect(self, remote_number: int, remote_psn: int, psn: int, route: Route, mtu: int, reads: int) -> None:
        """Connects to the peer's queue pair; `mtu` and `reads` are what both sides support. Raises OSError."""
        calls, nic, config = self.nic.calls, self.nic, self.nic.config
        calls.initialize(self.pointer, nic.port, config.rdma_pkey_index)
        class_, level = config.rdma_traffic_class, config.rdma_service_level
        calls.ready_to_receive(self.pointer, nic.port, remote_number, remote_psn, route, mtu, reads, class_, level)
        calls.ready_to_send(self.pointer, psn, config.rdma_ack_exponent, config.rdma_retry_cnt, reads)

    def post(
        self,
        opcode: int,
        parts: Sequence[tuple[int, int, int, int]],
        delta: int,
        lkey: int,
        rkey: int,
        token: object,
        imm: int = 0,
    ) -> None:
        """Posts one chain of at most `free` parts (_, local address, remote offset, length). `delta` added to an offset
        gives the peer's address; `imm` may go with a chain of one. `chain_done` with the token follows, or `failed`.
        Raises OSError when the NIC does not take the whole chain; some of it may then be on its way."""
        n = len(parts)
        seq = self._seq = self._seq + 1
        wr_id = self._base + seq
        if n == 1:
            _, address, offset, length = parts[0]
            flags = _SIGNALED_INLINE if length <= self._inline and opcode != verbs.READ else verbs.SIGNALED
            _pack(
                self._raw, 0, wr_id, 0, self._sge_at, 1, opcode, flags, imm, offset + delta, rkey, address, length, lkey
            )  # fmt: skip
        elif n <= _FEW:
            self._pack_each(opcode, parts, delta, lkey, rkey, wr_id)
        else:
            self._pack_all(opcode, parts, delta, lkey, rkey, wr_id)
        self._posted += n
        if not self._chains:
            self.nic.busy.add(self._tag)
        self._chains[seq] = (n, token)  # before it can complete
        code = self._post_all()
        if code:
            code = abs(code)
            raise OSError(code, f"{self.nic.name}: post_send: {os.strerror(code)}")

    def _pack_each(
        self, opcode: int, parts: Sequence[tuple[int, int, int, int]], delta: int, lkey: int, rkey: int, wr_id: int
    ) -> None:
        raw, sge = self._raw, self._sge_at
        inline = 0 if opcode == verbs.READ else self._inline
        at = 0
        following = self._at + _ROW
        for _, address, offset, length in parts:
            flags = verbs.INLINE if length <= inline else 0
            _pack(raw, at, wr_id, following, sge + at, 1, opcode, flags, 0, offset + delta, rkey, address, length, lkey)
            at += _ROW
            following += _ROW
        at -= _ROW  # the last one once more: the chain ends there, and tells when it is done
        flags |= verbs.SIGNALED
        _pack(raw, at, wr_id, 0, sge + at, 1, opcode, flags, 0, offset + delta, rkey, address, length, lkey)

    def _pack_all(
        self, opcode: int, parts: Sequence[tuple[int, int, int, int]], delta: int, lkey: int, rkey: int, wr_id: int
    ) -> None:
        n = len(parts)
        table = np.array(parts, dtype=np.int64)
        rows = self._rows[:n]
        lengths = table[:, 3]
        rows["id"], rows["opcode"], rows["rkey"], rows["lkey"] = wr_id, opcode, rkey, lkey
        rows["address"], rows["length"] = table[:, 1], lengths
        rows["sges"] = self._sges[:n]
        rows["next"] = self._links[:n]
        rows["remote"] = table[:, 2] + delta
        small = opcode != verbs.READ and int(lengths.max()) <= self._inline
        rows["flags"] = verbs.INLINE if small else 0
        rows["imm"] = 0
        last = rows[n - 1]
        last["next"] = 0
        last["flags"] |= verbs.SIGNALED

    def expect(self, n: int) -> None:
        """Posts receives for `n` writes with immediate. Raises OSError."""
        for _ in range(n):
            code = self.nic.calls.post_recv(self.pointer, self._receive_at, self._bad_at)
            if code:
                code = abs(code)
                raise OSError(code, f"{self.nic.name}: post_recv: {os.strerror(code)}")

    def completed(self, low: int, status: int, opcode: int, imm: int) -> None:
        if status != verbs.SUCCESS:
            if not self.closed:
                cause = f"{self.nic.name}: {verbs.status_text(status)}"
                down = status not in (verbs.REMOTE_ACCESS, verbs.FLUSHED)
                self._sink.failed(self, status, cause, down=down)
            return
        if low & _RECEIVE:
            self._sink.received(self, imm)
            return
        n, token = self._chains.pop(low, (0, None))
        if n:
            self._ended += n
            if not self._chains:
                self.nic.busy.discard(self._tag)
            self._sink.chain_done(self, token)

    def port_lost(self, cause: str) -> None:
        self._sink.failed(self, -1, cause, down=True)

    def close(self) -> None:
        """Returns when the queue pair can neither read nor write any more. It is idempotent. Raises TransferError when
        the driver fails; the queue pair may then go on, and `close` may be called again."""
        with self._close_lock:
            self.closed = True  # what it tells from now on is of no use
            self._chains.clear()
            self.nic.busy.discard(self._tag)
            if self._made is not None:
                self.nic.destroy_queue_pair(self._made, self.pointer, self._tag, self._queue, self._promised)
                self._made = None

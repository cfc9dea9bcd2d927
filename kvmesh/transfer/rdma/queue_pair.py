"""A queue pair: chains of work requests, each with one signalled completion, never more than its queue holds."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvmesh.transfer.rdma import verbs
from kvmesh.transfer.rdma.device import TAG_SHIFT, Nic
from kvmesh.transfer.rdma.verbs import Route

INLINE_BYTES = 128
_RECEIVE = 1 << (TAG_SHIFT - 1)  # marks the id of a receive
_FEW = 14  # rows up to here are packed one by one: numpy's start-up costs more
_SEND = struct.Struct("<QQQiIIIQI")
_SGE = struct.Struct("<QII")


class Sink(Protocol):
    """Who uses a queue pair. Called on the NIC's thread."""

    def chain_done(self, queue_pair: QueuePair, token: object) -> None: ...

    def failed(self, queue_pair: QueuePair, status: int, cause: str, *, down: bool) -> None:
        """Nothing more will complete. May be called more than once."""
        ...

    def received(self, queue_pair: QueuePair, imm: int) -> None: ...


class QueuePair:
    """`post` is for one thread at a time; `free` counts work requests that fit. Must be closed."""

    def __init__(self, nic: Nic, depth: int, receives: int, sink: Sink) -> None:
        self.nic = nic
        self.depth = self.free = depth
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
        self._count_lock = threading.Lock()
        self._chains: dict[int, tuple[int, object]] = {}
        self._seq = 0
        self._rows = np.zeros(depth, verbs.SEND_ROW)
        self._sges = np.zeros(depth, verbs.SGE_ROW)
        self._rows_at = self._rows.ctypes.data
        self._raw_rows = self._rows.view(np.uint8).data
        self._raw_sges = self._sges.view(np.uint8).data
        sges_at = self._sges.ctypes.data
        self._rows["n_sges"] = 1
        self._rows["sges"] = sges_at + verbs.SGE_ROW.itemsize * np.arange(depth, dtype=np.uint64)
        self._links = self._rows_at + verbs.SEND_ROW.itemsize * np.arange(1, depth + 1, dtype=np.uint64)
        self._sges_at = sges_at
        self._bad = ctypes.c_void_p()
        self._bad_at = ctypes.addressof(self._bad)
        self._receive = np.zeros(1, verbs.RECEIVE_ROW)
        self._receive["id"] = (self._tag << TAG_SHIFT) | _RECEIVE
        self._receive_at = self._receive.ctypes.data

    def connect(self, remote_number: int, remote_psn: int, psn: int, route: Route, mtu: int, reads: int) -> None:
        """To the peer's queue pair; OSError. `mtu` and `reads` are what both sides can."""
        calls, nic, config = self.nic.calls, self.nic, self.nic.config
        calls.initialize(self.pointer, nic.port)
        calls.ready_to_receive(self.pointer, nic.port, remote_number, remote_psn, route, mtu, reads)
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
        """One chain: parts are (_, local address, remote offset, length), `delta` makes an offset the peer's address.
        Fresh addresses each time. At most `free` parts. `chain_done` follows with the token, or `failed`. OSError when
        the NIC does not take all of it: some of it may be on its way then."""
        n = len(parts)
        self._seq += 1
        seq = self._seq
        last = n - 1
        wr_id = (self._tag << TAG_SHIFT) | seq
        if n <= _FEW:
            self._pack(opcode, parts, delta, lkey, rkey, wr_id, imm)
        else:
            table = np.array(parts, dtype=np.int64)
            sges, rows = self._sges[:n], self._rows[:n]
            lengths = table[:, 3]
            sges["address"], sges["length"], sges["lkey"] = table[:, 1], lengths, lkey
            rows["id"], rows["opcode"], rows["rkey"] = wr_id, opcode, rkey
            rows["next"] = self._links[:n]
            rows["next"][last] = 0
            rows["remote"] = table[:, 2] + delta
            small = opcode != verbs.READ and int(lengths.max()) <= self._inline
            rows["flags"] = verbs.INLINE if small else 0
            rows["flags"][last] |= verbs.SIGNALED
        with self._count_lock:
            self.free -= n
            self._chains[seq] = (n, token)
        code = self.nic.calls.post_send(self.pointer, self._rows_at, self._bad_at)
        if code:
            code = abs(code)
            raise OSError(code, f"{self.nic.name}: post_send: {os.strerror(code)}")

    def _pack(
        self,
        opcode: int,
        parts: Sequence[tuple[int, int, int, int]],
        delta: int,
        lkey: int,
        rkey: int,
        wr_id: int,
        imm: int,
    ) -> None:
        last = len(parts) - 1
        row, sge = self._rows_at, self._sges_at
        for i, (_, address, offset, length) in enumerate(parts):
            _SGE.pack_into(self._raw_sges, 16 * i, address, length, lkey)
            flags = verbs.INLINE if length <= self._inline and opcode != verbs.READ else 0
            following = row + 128 * (i + 1)
            if i == last:
                flags |= verbs.SIGNALED
                following = 0
            _SEND.pack_into(
                self._raw_rows, 128 * i, wr_id, following, sge + 16 * i, 1, opcode, flags, imm, offset + delta, rkey
            )

    def expect(self, n: int) -> None:
        """Posts receives for `n` writes with immediate; OSError."""
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
        with self._count_lock:
            n, token = self._chains.pop(low, (0, None))
            self.free += n
        if n:
            self._sink.chain_done(self, token)

    def port_lost(self, cause: str) -> None:
        self._sink.failed(self, -1, cause, down=True)

    def close(self) -> None:
        """When it returns, nothing can be read or written by it any more. Idempotent."""
        with self._count_lock:
            if self.closed:
                return
            self.closed = True
            self._chains.clear()
        made, self._made = self._made, None
        self.nic.destroy_queue_pair(made, self._tag, self._queue, self._promised)

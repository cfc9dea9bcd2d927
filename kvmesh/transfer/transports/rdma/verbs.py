"""The hot path: libibverbs through ctypes, on the very objects that pyverbs made.

pyverbs holds the GIL in every call and builds a Python object per work request. Here a work request is a row of a numpy
array, a chain of them is one call, and ctypes releases the GIL in it. The addresses of the C structs (`ibv_qp *` and so
on) stand somewhere in pyverbs' objects; `found` looks through the words of an object for the one whose target holds
what it must (the context, the queue pair number, ...), reading only through the kernel, so a wrong guess cannot crash.

Layouts: infiniband/verbs.h. post_send, post_recv, poll_cq and req_notify_cq are slots of `ibv_context.ops`, as the
header's inline functions use them: stable since libibverbs 1.1.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvmesh.errors import TransferError

WRITE, WRITE_WITH_IMM, READ = 0, 1, 4  # ibv_wr_opcode
SIGNALED, INLINE = 2, 8  # ibv_send_flags
RECEIVED_IMM = 129  # ibv_wc_opcode: IBV_WC_RECV_RDMA_WITH_IMM
LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ = 1, 2, 4  # ibv_access_flags
POLL_ROWS = 256

_SEND = {"id": ("u8", 0), "next": ("u8", 8), "sges": ("u8", 16), "n_sges": ("i4", 24), "opcode": ("u4", 28)}
_SEND |= {"flags": ("u4", 32), "imm": ("u4", 36), "remote": ("u8", 40), "rkey": ("u4", 48)}
_SGE = {"address": ("u8", 0), "length": ("u4", 8), "lkey": ("u4", 12)}
_SEND_BYTES = 128


def _row(fields: dict[str, tuple[str, int]], itemsize: int) -> np.dtype[np.void]:
    formats, offsets = ([field[i] for field in fields.values()] for i in (0, 1))
    layout: Any = {"names": list(fields), "formats": formats, "offsets": offsets, "itemsize": itemsize}
    made: np.dtype[np.void] = np.dtype(layout)
    return made


# ibv_send_wr, with the members of an RDMA operation; 128 bytes with what follows.
SEND_ROW = _row(_SEND, _SEND_BYTES)
SGE_ROW = _row(_SGE, 16)
# A work request with its one SGE right behind it.
WORK_ROW = _row(_SEND | {name: (kind, _SEND_BYTES + at) for name, (kind, at) in _SGE.items()}, _SEND_BYTES + 16)
RECEIVE_ROW = np.dtype([("id", "u8"), ("next", "u8"), ("sges", "u8"), ("n_sges", "i4"), ("pad", "u4")])
COMPLETION_ROW = np.dtype(
    {
        "names": ["id", "status", "opcode", "vendor", "bytes", "imm", "qp_num"],
        "formats": ["u8", "u4", "u4", "u4", "u4", "u4", "u4"],
        "offsets": [0, 8, 12, 16, 20, 24, 28],
        "itemsize": 48,
    }
)
STATUS = (
    "success",
    "local length error",
    "local queue pair error",
    "local EEC error",
    "local protection error",
    "flushed",
    "memory window error",
    "bad response",
    "local access error",
    "remote invalid request",
    "remote access error",
    "remote operation error",
    "retries exceeded: no acknowledgement",
    "receiver not ready",
)
SUCCESS, FLUSHED, REMOTE_ACCESS = 0, 5, 10

_P, _I = ctypes.c_void_p, ctypes.c_int
_POLL_CQ, _REQ_NOTIFY, _POST_SEND, _POST_RECV = 96, 104, 208, 216  # in ibv_context
_CMD_FD, _ASYNC_FD = 264, 268


def status_text(status: int) -> str:
    return STATUS[status] if status < len(STATUS) else f"completion status {status}"


# ── finding the structs ───────────────────────────────────────────────────────────────────────────


class _Memory:
    """Reads this process's memory through the kernel; it returns None where nothing is mapped."""

    def __init__(self) -> None:
        self._fd = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)

    def read(self, address: int, nbytes: int) -> bytes | None:
        try:
            data = os.pread(self._fd, nbytes, address)
        except (OSError, OverflowError):
            return None
        return data if len(data) == nbytes else None

    def close(self) -> None:
        os.close(self._fd)


def found(thing: object, holds: Callable[[bytes], bool], nbytes: int, what: str) -> int:
    """Returns the one address among the words of the object `thing` whose first `nbytes` bytes satisfy `holds`. Raises
    TransferError when there is none, or more than one."""
    words = type(thing).__basicsize__ // 8
    raw = ctypes.string_at(id(thing), 8 * words)
    memory = _Memory()
    try:
        fitting: set[int] = set()
        for address in struct.unpack(f"<{words}Q", raw)[2:]:  # behind the reference count and the type
            if address % 8 == 0 and 4096 <= address < 1 << 63:
                data = memory.read(address, nbytes)
                if data is not None and holds(data):
                    fitting.add(address)
    finally:
        memory.close()
    if len(fitting) != 1:
        raise TransferError(
            f"rdma: {len(fitting)} candidates for the {what} in pyverbs' {type(thing).__name__}: this pyverbs is built "
            "in an unknown way",
            field="transports",
        )
    return fitting.pop()


def _is_event_file(fd: int) -> bool:
    try:
        return "infinibandevent" in os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return False


def find_context(context: object, device: str) -> int:
    def holds(data: bytes) -> bool:
        (at,) = struct.unpack_from("<Q", data)
        memory = _Memory()
        try:
            name = memory.read(at + 24, 64) if at >= 4096 else None  # ibv_device.name
        finally:
            memory.close()
        (async_fd,) = struct.unpack_from("<i", data, _ASYNC_FD)
        return name is not None and name.split(b"\0")[0] == device.encode() and _is_event_file(async_fd)

    return found(context, holds, _ASYNC_FD + 4, "ibv_context")


def find_pd(pd: Any, context: int) -> int:
    expected = struct.pack("<QI", context, pd.handle)
    return found(pd, lambda data: data == expected, len(expected), "ibv_pd")


def find_channel(channel: object, context: int) -> int:
    def holds(data: bytes) -> bool:
        owner, fd = struct.unpack("<Qi", data)
        return bool(owner == context and _is_event_file(fd))

    return found(channel, holds, 12, "ibv_comp_channel")


def find_cq(cq: Any, context: int, channel: int) -> int:
    def holds(data: bytes) -> bool:
        owner, events, _, _, cqe = struct.unpack("<QQQIi", data)
        return bool(owner == context and events == channel and cqe == cq.cqe)

    return found(cq, holds, 32, "ibv_cq")


def find_qp(qp: Any, context: int, pd: int, cq: int) -> int:
    def holds(data: bytes) -> bool:
        owner, _, domain, sends, receives, _, _, number = struct.unpack("<QQQQQQII", data)
        return bool((owner, domain, sends, receives, number) == (context, pd, cq, cq, qp.qp_num))

    return found(qp, holds, 56, "ibv_qp")


# ── the calls ─────────────────────────────────────────────────────────────────────────────────────


class _Address(ctypes.Structure):
    """The C struct ibv_ah_attr."""

    _fields_ = (
        ("gid", ctypes.c_uint64 * 2),
        ("flow_label", ctypes.c_uint32),
        ("sgid_index", ctypes.c_uint8),
        ("hop_limit", ctypes.c_uint8),
        ("traffic_class", ctypes.c_uint8),
        ("lid", ctypes.c_uint16),
        ("service_level", ctypes.c_uint8),
        ("source_bits", ctypes.c_uint8),
        ("rate", ctypes.c_uint8),
        ("is_global", ctypes.c_uint8),
        ("port", ctypes.c_uint8),
    )


class _Attributes(ctypes.Structure):
    """The C struct ibv_qp_attr."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("state", "current", "path_mtu", "migration", "qkey", "rq_psn")),
        *((name, ctypes.c_uint32) for name in ("sq_psn", "remote_qp_num", "access")),
        ("caps", ctypes.c_uint32 * 5),
        ("address", _Address),
        ("alternate", _Address),
        ("pkey_index", ctypes.c_uint16),
        ("alternate_pkey_index", ctypes.c_uint16),
        *((name, ctypes.c_uint8) for name in ("notify_drained", "draining", "reads", "remote_reads", "rnr_timer")),
        *((name, ctypes.c_uint8) for name in ("port", "timeout", "retry_cnt", "rnr_retry", "alternate_port")),
        ("alternate_timeout", ctypes.c_uint8),
        ("rate_limit", ctypes.c_uint32),
    )


# Bits of ibv_qp_attr_mask
_STATE, _ACCESS, _PKEY, _PORT, _AV, _MTU, _TIMEOUT = 1 << 0, 1 << 3, 1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 9
_RETRY, _RNR_RETRY, _RQ_PSN, _READS, _RNR_TIMER = 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 15
_SQ_PSN, _REMOTE_READS, _REMOTE_QP = 1 << 16, 1 << 17, 1 << 20
_INIT, _RTR, _RTS, _ERR = 1, 2, 3, 6


@dataclass(frozen=True, slots=True)
class Route:
    """The route to the peer's port: its GID (16 bytes), through our GID at `sgid_index`. RoCE always has the global
    header; InfiniBand routes by `lid` within a subnet."""

    gid: bytes
    sgid_index: int
    lid: int = 0
    is_global: bool = True


class Calls:
    """libibverbs' functions for one context. All release the GIL; failures raise OSError with libibverbs' errno."""

    def __init__(self, libibverbs: ctypes.CDLL, context: int) -> None:
        self.context = context
        self.async_fd = ctypes.c_int.from_address(context + _ASYNC_FD).value
        self.poll_cq = self._slot(_POLL_CQ, _P, _I, _P)
        self.request_event = self._slot(_REQ_NOTIFY, _P, _I)
        self.post_send = self._slot(_POST_SEND, _P, _P, _P)
        self.post_recv = self._slot(_POST_RECV, _P, _P, _P)
        self._get_cq_event = self._named(libibverbs, "ibv_get_cq_event", _I, _P, _P, _P)
        self._ack_cq_events = self._named(libibverbs, "ibv_ack_cq_events", None, _P, ctypes.c_uint)
        self._get_async_event = self._named(libibverbs, "ibv_get_async_event", _I, _P, _P)
        self._ack_async_event = self._named(libibverbs, "ibv_ack_async_event", None, _P)
        self._modify_qp = self._named(libibverbs, "ibv_modify_qp", _I, _P, _P, _I)
        self._reg_mr = self._named(libibverbs, "ibv_reg_mr", _P, _P, _P, ctypes.c_size_t, _I)
        self._dereg_mr = self._named(libibverbs, "ibv_dereg_mr", _I, _P)
        self._reg_dmabuf: Any = None
        if hasattr(libibverbs, "ibv_reg_dmabuf_mr"):
            u64 = ctypes.c_uint64
            self._reg_dmabuf = self._named(libibverbs, "ibv_reg_dmabuf_mr", _P, _P, u64, ctypes.c_size_t, u64, _I, _I)

    def _slot(self, offset: int, *arguments: Any) -> Any:
        return ctypes.CFUNCTYPE(_I, *arguments)(_P.from_address(self.context + offset).value or 0)

    @staticmethod
    def _named(libibverbs: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
        prototype = ctypes.CFUNCTYPE(result, *arguments, use_errno=True)
        return prototype((name, libibverbs))

    def take_cq_event(self, channel: int) -> bool:
        """Reads one event of a channel with a non-blocking file, and acknowledges it. Returns False when there
        is none."""
        cq, owner = _P(), _P()
        if self._get_cq_event(channel, ctypes.addressof(cq), ctypes.addressof(owner)):
            return False
        self._ack_cq_events(cq, 1)
        return True

    def take_async_event(self) -> tuple[int, int] | None:
        """Returns (type, element) of the device's next event, acknowledged, or None. For a port's events `element` is
        the port number."""
        event = (ctypes.c_uint64 * 2)()
        if self._get_async_event(self.context, ctypes.addressof(event)):
            return None
        element, kind = event[0], event[1] & 0xFFFFFFFF
        self._ack_async_event(ctypes.addressof(event))
        return kind, element

    def register(self, pd: int, address: int, nbytes: int) -> tuple[int, int, int]:
        """Registers memory and returns (address of the ibv_mr, lkey, rkey)."""
        return self._keys(self._reg_mr(pd, address, nbytes, LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ))

    def register_dmabuf(self, pd: int, fd: int, offset: int, address: int, nbytes: int) -> tuple[int, int, int]:
        """Registers device memory that a dmabuf names, and returns what `register` does. Raises TransferError when this
        libibverbs cannot."""
        if self._reg_dmabuf is None:
            raise TransferError("rdma: this libibverbs has no ibv_reg_dmabuf_mr (it came with 34)", field="location")
        access = LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ
        return self._keys(self._reg_dmabuf(pd, offset, nbytes, address, fd, access))

    @staticmethod
    def _keys(mr: int | None) -> tuple[int, int, int]:
        if not mr:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        lkey, rkey = (ctypes.c_uint32.from_address(mr + at).value for at in (36, 40))
        return mr, lkey, rkey

    def deregister(self, mr: int) -> None:
        code = self._dereg_mr(mr)
        if code:
            raise OSError(code, os.strerror(code))

    def initialize(self, qp: int, port: int, pkey_index: int) -> None:
        access = LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ
        self._modify(qp, _STATE | _PKEY | _PORT | _ACCESS, state=_INIT, port=port, access=access, pkey_index=pkey_index)

    def ready_to_receive(
        self, qp: int, port: int, qp_num: int, psn: int, route: Route, mtu: int, reads: int, traffic_class: int, sl: int
    ) -> None:
        """Modifies a queue pair to RTR. `mtu` is the verbs' number (5 for 4096). It may take long, as the kernel
        resolves the peer's address."""
        attributes = _Attributes(state=_RTR, path_mtu=mtu, remote_qp_num=qp_num, rq_psn=psn, remote_reads=reads)
        attributes.rnr_timer = 12
        attributes.address.gid[:] = struct.unpack("<QQ", route.gid)
        attributes.address.sgid_index = route.sgid_index
        attributes.address.hop_limit = 64
        attributes.address.traffic_class = traffic_class
        attributes.address.service_level = sl
        attributes.address.lid = route.lid
        attributes.address.is_global = int(route.is_global)
        attributes.address.port = port
        self._apply(qp, attributes, _STATE | _AV | _MTU | _REMOTE_QP | _RQ_PSN | _REMOTE_READS | _RNR_TIMER)

    def ready_to_send(self, qp: int, psn: int, timeout: int, retry_cnt: int, reads: int) -> None:
        mask = _STATE | _TIMEOUT | _RETRY | _RNR_RETRY | _SQ_PSN | _READS
        self._modify(qp, mask, state=_RTS, sq_psn=psn, timeout=timeout, retry_cnt=retry_cnt, rnr_retry=6, reads=reads)

    def stop(self, qp: int) -> None:
        """Modifies a queue pair to ERR: packets for it are dropped, and its work requests are flushed (InfiniBand
        Architecture Specification, 10.3.1)."""
        self._modify(qp, _STATE, state=_ERR)

    def _modify(self, qp: int, mask: int, **values: int) -> None:
        self._apply(qp, _Attributes(**values), mask)

    def _apply(self, qp: int, attributes: _Attributes, mask: int) -> None:
        code = self._modify_qp(qp, ctypes.addressof(attributes), mask)
        if code:
            raise OSError(code, os.strerror(code))


assert ctypes.sizeof(_Attributes) == 144 and ctypes.sizeof(_Address) == 32, "ibv_qp_attr has another layout here"

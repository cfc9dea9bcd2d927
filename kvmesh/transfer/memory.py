"""Memory that peers may see and never write: sealed memfds, read-only maps, and native copies.

    owner: memfd_create ─▶ ftruncate ─▶ mmap(read, write) ─▶ seal FUTURE_WRITE | SHRINK | GROW | SEAL ─▶ reopen O_RDONLY
    peer:  fd over SCM_RIGHTS ─▶ check seals and size ─▶ mmap(read)

After the seal nobody, the owner included, can make another writable map or write(2) to it; SHRINK lets a peer read its
map without fear of SIGBUS. All through libc by ctypes, because Python's mmap keeps a duplicate of the descriptor for as
long as somebody holds a view.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import stat
import time
import weakref
from array import array
from collections.abc import Sequence
from itertools import count as count_up
from itertools import islice
from operator import add, eq, ne
from typing import Any

import numpy as np

from kvmesh.errors import TransferError
from kvmesh.transfer import checks

log = logging.getLogger(__name__)

PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20
_F_SEAL_FUTURE_WRITE = 0x10
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_GATHER_RUNS = 4  # below, memmove by memmove is faster
_GATHER_MEAN_BYTES = 8 << 10  # above, memmove by memmove is twice as fast, while the GIL comes back at once
_GATHER_BUSY_MEAN_BYTES = 128 << 10  # above, one memmove is worth the GIL's hand-over
_GATHER_MAX = 1024  # UIO_MAXIOV
_GIL_WAIT_S = 0.001  # a run that took so much longer than its bytes had to wait for the GIL
_SLOWEST_BYTES_PER_S = 1e9
_GIL_BUSY_S = 1.0
_clock = time.monotonic

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MS_ASYNC = 1  # does nothing but look whether all of it is mapped
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value


class Mapping:
    """`length` mapped bytes at `address`, unmapped when this object and every view of it are gone. Mappings of at least
    a huge page are aligned to one, because the kernel would otherwise map a file's huge pages as small ones. `lock` is
    a descriptor that is closed after unmapping. `kept` says that the bytes are those of an earlier process
    (`segment_file`)."""

    def __init__(self, fd: int, length: int, *, writable: bool, lock: int = -1, kept: bool = False) -> None:
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = _map_aligned(length, prot, flags, fd) if length >= HUGE_PAGE else _map(None, length, prot, flags, fd)
        self.address: int = address
        self.length = length
        self.kept = kept
        self._array = (ctypes.c_ubyte * length).from_address(address)
        unmap = weakref.finalize(self._array, _unmap, address, length, lock)
        unmap.atexit = False  # a daemon thread may still copy while the interpreter ends
        self.view: memoryview = memoryview(self._array).cast("B")


def _unmap(address: int, length: int, lock: int) -> None:
    _libc.munmap(address, length)
    if lock >= 0:
        os.close(lock)


def _map(at: int | None, length: int, prot: int, flags: int, fd: int) -> int:
    address: int | None = _libc.mmap(at, length, prot, flags, fd, 0)
    if address is None or address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise TransferError(f"mmap of {length} bytes failed: {os.strerror(code)}")
    return address


def _map_aligned(length: int, prot: int, flags: int, fd: int) -> int:
    """Reserves one huge page more than needed, maps over the aligned part, and unmaps the rest."""
    reserved = _map(None, length + HUGE_PAGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    address = -(-reserved // HUGE_PAGE) * HUGE_PAGE
    end = -(-(address + length) // PAGE) * PAGE
    try:
        _map(address, length, prot, flags | _MAP_FIXED, fd)
    except TransferError:
        _libc.munmap(reserved, length + HUGE_PAGE)
        raise
    if address > reserved:
        _libc.munmap(reserved, address - reserved)
    if reserved + length + HUGE_PAGE > end:
        _libc.munmap(end, reserved + length + HUGE_PAGE - end)
    return address


def allocate(
    nbytes: int, label: str, *, shared: bool, huge_pages: str = "auto", prefault: bool = False
) -> tuple[Mapping, int]:
    """Returns zeroed memory and a read-only descriptor of it, or -1 where it cannot be shared (no memfd).

    `huge_pages` "auto" asks for transparent huge pages; "hugetlb" takes reserved ones where there are enough (else it
    logs a warning and does as "auto"); "never" asks for none. `prefault` touches every page now and has the kernel
    collapse them to huge pages where it can.
    """
    length = -(-nbytes // PAGE) * PAGE
    found: tuple[Mapping, int] | None = None
    if shared and hasattr(os, "memfd_create"):
        if huge_pages == "hugetlb":
            found = _hugetlb(nbytes, label)
        try:
            found = found or _sealed(length, label, 0)
        except OSError as err:
            if err.errno not in (errno.ENOSYS, errno.EPERM, errno.EINVAL):
                raise TransferError(f"memfd of {length} bytes failed: {err}") from err
    mapping, fd = found or (Mapping(-1, length, writable=True), -1)
    advise(mapping, huge_pages, prefault)
    return mapping, fd


def _hugetlb(nbytes: int, label: str) -> tuple[Mapping, int] | None:
    length = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
    try:
        return _sealed(length, label, os.MFD_HUGETLB | os.MFD_HUGE_2MB)
    except (OSError, TransferError) as err:
        log.warning("huge_pages='hugetlb': no reserved huge pages for %d bytes (%s); small ones", length, err)
        return None


def advise(mapping: Mapping, huge_pages: str, prefault: bool) -> None:
    """Applies huge-page advice and prefault to a mapping. What the kernel does not support is left out."""
    huge = huge_pages != "never" and mapping.length >= HUGE_PAGE
    if huge:
        _libc.madvise(mapping.address, mapping.length, mmap.MADV_HUGEPAGE)
    if prefault:
        if _libc.madvise(mapping.address, mapping.length, _MADV_POPULATE_WRITE) != 0:
            ctypes.memset(mapping.address, 0, mapping.length)
        if huge:  # works where /sys lets shared memory have no huge pages of its own accord
            _libc.madvise(mapping.address, mapping.length // HUGE_PAGE * HUGE_PAGE, _MADV_COLLAPSE)


def populate(address: int, length: int) -> bool:
    """Has the kernel allocate all pages of a part of a writable map of ours now, without changing their bytes. Returns
    False when the kernel cannot, or has no memory."""
    done: int = _libc.madvise(address, length, _MADV_POPULATE_WRITE)
    return done == 0


def _sealed(length: int, label: str, flags: int) -> tuple[Mapping, int]:
    fd = os.memfd_create(label[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(fd, length)
        mapping = Mapping(fd, length, writable=True)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | _F_SEAL_FUTURE_WRITE)
        os.fchmod(fd, 0o400)
        return mapping, os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(fd)


def map_peer(fd: int, length: int) -> Mapping:
    """Maps a peer's memory read-only, after checking that the peer cannot shrink it: a memfd must be sealed, a file
    must pass `peers_file`. It does not close `fd`. Raises TransferError when the check fails or the memory is too
    short."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as err:
        raise TransferError(f"peer's region is not a memfd: {err}") from err
    if not (seals & fcntl.F_SEAL_SHRINK or peers_file(fd)):
        raise TransferError("peer's region is not sealed against shrinking")
    size = os.fstat(fd).st_size
    if length <= 0 or size < length:
        raise TransferError(f"peer's region has {size} bytes, says {length}")
    return Mapping(fd, length, writable=False)


def peers_file(fd: int) -> bool:
    """Says whether `fd` is a file as `segment_file` makes them: a regular file of our user, opened read-only. Only
    memfds have seals; these files can have none."""
    found, mode = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and mode == os.O_RDONLY


def foreign_view(address: int, length: int) -> memoryview:
    """Returns a view of memory that the caller keeps alive."""
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")


def writable(buffer: object) -> tuple[int, int, memoryview]:
    """Returns address, length and view of a writable contiguous buffer, an (address, length) pair, or an object with
    `data_ptr()` and `nbytes` (a contiguous torch tensor). Raises TransferError for anything else."""
    if isinstance(buffer, tuple):
        if len(buffer) != 2:
            raise TransferError(f"buffer={checks.shown(buffer)}: a pair must be (address, length)", field="buffer")
        address, length = checks.whole("buffer[0]", buffer[0], 1), checks.whole("buffer[1]", buffer[1], 1, 1 << 62)
        view = None
    elif hasattr(buffer, "data_ptr") and _has_nbytes(buffer):
        strided = str(getattr(buffer, "layout", "torch.strided")) == "torch.strided"
        if not strided or getattr(buffer, "is_quantized", False):
            raise TransferError(f"{_kind(buffer)} is no dense tensor: register buffer.to_dense()", field="buffer")
        contiguous = getattr(buffer, "is_contiguous", None)
        if contiguous is not None and not contiguous():
            raise TransferError(f"{_kind(buffer)} is not contiguous: register buffer.contiguous()", field="buffer")
        device = getattr(getattr(buffer, "device", None), "type", "cpu")
        if device != "cpu":
            raise TransferError(f"{_kind(buffer)} is memory of a {device} device", field="buffer")
        try:
            address, length = int(buffer.data_ptr()), int(getattr(buffer, "nbytes"))  # noqa: B009
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise TransferError(f"{_kind(buffer)} has no memory of its own: {error}", field="buffer") from None
        view = None
    else:
        try:
            raw = memoryview(buffer)  # type: ignore[arg-type]
        except TypeError:
            raise TransferError(
                f"{_kind(buffer)}: not memory; a numpy array, a bytearray, a torch tensor or (address, length) is",
                field="buffer",
            ) from None
        if raw.readonly:
            raise TransferError(f"{_kind(buffer)} is read-only, and peers may write: register a copy", field="buffer")
        if not raw.c_contiguous:
            why = "is not contiguous (C order): register numpy.ascontiguousarray(buffer)"
            raise TransferError(f"{_kind(buffer)} {why}", field="buffer")
        if "O" in raw.format:
            raise TransferError(f"{_kind(buffer)} holds Python objects, not their bytes", field="buffer")
        if raw.nbytes == 0:
            raise TransferError(f"{_kind(buffer)} has 0 bytes", field="buffer")
        view = raw.cast("B")
        length = view.nbytes
        address = np.frombuffer(view, dtype=np.uint8).ctypes.data if length else 0
    if length <= 0 or address <= 0:
        raise TransferError(f"{_kind(buffer)} has {length} bytes at {address:#x}", field="buffer")
    return address, length, foreign_view(address, length) if view is None else view


def _has_nbytes(buffer: object) -> bool:
    try:
        return hasattr(buffer, "nbytes")
    except RuntimeError:  # a sparse tensor's
        return True


def _kind(buffer: object) -> str:
    """Returns a user's name for a buffer, such as "buffer: ndarray (4, 5)"."""
    shape = getattr(buffer, "shape", None)
    return f"buffer: {type(buffer).__name__}{f' {tuple(shape)}' if shape is not None else ''}"


def check_mapped(address: int, length: int) -> None:
    """Raises TransferError when this process has no memory at some of these addresses: a copy there would end the
    process."""
    start = address // PAGE * PAGE
    if _libc.msync(start, address + length - start, _MS_ASYNC) != 0 and ctypes.get_errno() == errno.ENOMEM:
        raise TransferError(
            f"buffer=({address:#x}, {length}): this process has no memory at some of these addresses", field="buffer"
        )


# ── copies ────────────────────────────────────────────────────────────────────────────────────────

_gather: Any = getattr(_libc, "process_vm_readv", None)
if _gather is not None:
    _gather.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    _gather.restype = ctypes.c_ssize_t


class _Gil:
    """Remembers until when the GIL is contended: while it is, many runs are copied in one system call."""

    busy_until = 0.0


def copy_runs(targets: Sequence[int], sources: Sequence[int], lengths: Sequence[int]) -> None:
    """Copies run by run between addresses of this process, with the GIL released.

    memmove is fastest, but releases and takes the GIL for every run, which costs 5 ms each beside a busy Python thread.
    So runs of one length at equal distances (consecutive pages in every layer) are one numpy copy. Many small runs, and
    larger ones during a second after a wait for the GIL, are one system call: process_vm_readv on this process itself.
    """
    targets, sources, lengths = merged(targets, sources, lengths)
    count = len(lengths)
    at = 0
    if count >= _GATHER_RUNS and _evenly(targets, sources, lengths):
        return
    if _gather is None or count < _GATHER_RUNS or sum(lengths) > count * _GATHER_BUSY_MEAN_BYTES:
        _one_by_one(targets, sources, lengths)
        return
    if sum(lengths) > count * _GATHER_MEAN_BYTES and _clock() >= _Gil.busy_until:
        at = _while_free(targets, sources, lengths)
    while at < count:
        end = at + _GATHER_MAX
        if not _gathered(targets[at:end], sources[at:end], lengths[at:end]):
            _one_by_one(targets[at:end], sources[at:end], lengths[at:end])
        at = end


def _while_free(targets: Sequence[int], sources: Sequence[int], lengths: Sequence[int]) -> int:
    """Copies runs one by one until one waited for the GIL; returns how many were copied."""
    move, clock = ctypes.memmove, _clock
    before = clock()
    for i, length in enumerate(lengths):
        move(targets[i], sources[i], length)
        now = clock()
        if now - before > _GIL_WAIT_S + length / _SLOWEST_BYTES_PER_S:
            _Gil.busy_until = now + _GIL_BUSY_S
            return i + 1
        before = now
    return len(lengths)


class _Rows:
    """Lets numpy see `count` runs of `length` bytes, `stride` bytes apart."""

    def __init__(self, address: int, count: int, length: int, stride: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (address, False),
            "shape": (count, length),
            "strides": (stride, 1),
        }


def _evenly(targets: Sequence[int], sources: Sequence[int], lengths: Sequence[int]) -> bool:
    """Copies runs of one length at equal distances. Returns False, and copies nothing, when they are not such runs."""
    count, length = len(lengths), lengths[0]
    to, of = targets[1] - targets[0], sources[1] - sources[0]
    if abs(to) < length or lengths.count(length) != count:
        return False
    if targets[-1] - targets[0] != to * (count - 1) or sources[-1] - sources[0] != of * (count - 1):
        return False
    if any(map(ne, targets, count_up(targets[0], to))) or any(map(ne, sources, count_up(sources[0], of))):
        return False
    np.copyto(np.asarray(_Rows(targets[0], count, length, to)), np.asarray(_Rows(sources[0], count, length, of)))
    return True


def _one_by_one(targets: Sequence[int], sources: Sequence[int], lengths: Sequence[int]) -> None:
    move = ctypes.memmove
    for target, source, length in zip(targets, sources, lengths, strict=True):
        move(target, source, length)


def _gathered(targets: Sequence[int], sources: Sequence[int], lengths: Sequence[int]) -> bool:
    count = len(lengths)
    iov = array("Q", bytes(32 * count))
    iov[0 : 2 * count : 2] = array("Q", targets)
    iov[1 : 2 * count : 2] = array("Q", lengths)
    iov[2 * count :: 2] = array("Q", sources)
    iov[2 * count + 1 :: 2] = iov[1 : 2 * count : 2]
    at = iov.buffer_info()[0]
    copied: int = _gather(os.getpid(), at, count, at + 16 * count, count, 0)
    return copied == sum(lengths)


def merged(
    targets: Sequence[int], sources: Sequence[int], lengths: Sequence[int]
) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """Joins runs that are adjacent on both sides."""
    if not any(map(eq, map(add, targets, lengths), islice(targets, 1, None))):
        return targets, sources, lengths
    out_t: list[int] = []
    out_s: list[int] = []
    out_n: list[int] = []
    end_t = end_s = -1
    for target, source, length in zip(targets, sources, lengths, strict=True):
        if target == end_t and source == end_s:
            out_n[-1] += length
        else:
            out_t.append(target)
            out_s.append(source)
            out_n.append(length)
        end_t, end_s = target + length, source + length
    return out_t, out_s, out_n

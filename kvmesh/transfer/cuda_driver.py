"""What the transfer engine and ranks ask of CUDA's driver beside torch: memory that a NIC can reach, dmabufs of it, and
the order of a NIC's writes. Numbers and rules are those of the driver's manual.

    allocate ─▶ export ─▶ a NIC registers the dmabuf, and writes ─▶ flush, where WRITES_ORDERING says so ─▶ kernels read

cuMemGetHandleForAddressRange wants a range at the host's page size, all of it in memory that cuMemAlloc gave or that is
mapped. Memory of `allocate` is whole allocations of GRAIN bytes at a multiple of it, so any range in it can be widened
to page boundaries. Memory of torch's pool is not: with expandable segments it is mapped piece by piece, and without the
flag that lets NICs reach it.

A NIC's completion says that its writes are ordered before what the host does next. Kernels launched afterwards on the
GPU that owns the memory see them where GPU_DIRECT_RDMA_WRITES_ORDERING is at least OWNER; else the host must flush.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from typing import Any

from kvmesh.errors import TransferError

GRAIN = 2 << 20  # bytes: the driver's own pages for large allocations
EXPORT_PAGE = 64 << 10  # dmabufs are cut at the host's page size; 64 KiB is a multiple of every one

FLUSH_OPTIONS, WRITES_ORDERING, DMA_BUF_SUPPORTED = 117, 118, 124  # of CUdevice_attribute
ORDERED_FOR_OWNER = 100  # CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER; larger: for more devices
FLUSH_BY_HOST = 1  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
_FLUSH_CURRENT_CONTEXT, _FLUSH_TO_OWNER = 0, 100  # target and scope of cuFlushGPUDirectRDMAWrites
_DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
_ORDINAL = re.compile(r"cuda:(\d+)")


class CudaDriver:
    """One GPU, through the driver. Methods may be called on any thread: each makes the GPU's primary context, which is
    torch's, current while it runs. Raises TransferError where there is no driver or no such GPU."""

    def __init__(self, location: str, library: str = "libcuda.so.1") -> None:
        found = _ORDINAL.fullmatch(location)
        if found is None:
            raise TransferError(f"location={location!r}: rdma registers cpu and cuda memory", field="location")
        self.location = location
        try:
            self._cuda: Any = ctypes.CDLL(library)
        except OSError as err:
            raise self._error(f"there is no CUDA driver here ({err})") from err
        self._device = ctypes.c_int(-1)
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(int(found[1])))

    def _error(self, why: str) -> TransferError:
        return TransferError(f"location={self.location!r}: {why}", field="location")

    def _call(self, name: str, *arguments: object) -> None:
        """Calls a function of the driver. Raises TransferError when it is missing or fails."""
        function = getattr(self._cuda, name, None)
        if function is None:
            raise self._error(f"the CUDA driver is too old: it has no {name}")
        code = function(*arguments)
        if code:
            raise self._error(f"{name} fails with CUDA error {code}")

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        try:
            self._call("cuCtxPushCurrent_v2", context)
            try:
                yield
            finally:
                self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def attribute(self, number: int) -> int:
        """Returns a CUdevice_attribute. Raises TransferError when the driver does not know it."""
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(number), self._device)
        return value.value

    def allocate(self, nbytes: int) -> int:
        """Returns the address of at least `nbytes` of the GPU's memory, not zeroed: whole GRAINs, so that exports cover
        it. It lives as long as the primary context, which something else must hold (torch does). Raises TransferError
        when the GPU has no room."""
        address = ctypes.c_uint64()
        with self._current():
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(-(-nbytes // GRAIN) * GRAIN))
        return address.value

    def free(self, address: int) -> None:
        """Gives back what `allocate` returned. Nothing may use it any more, a registration neither."""
        with self._current():
            self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def export(self, address: int, nbytes: int) -> tuple[int, int]:
        """Returns (dmabuf descriptor, which the caller closes; offset of `address` in it). Raises TransferError when
        the memory cannot be exported."""
        if not self.attribute(DMA_BUF_SUPPORTED):
            raise self._error("the GPU or its driver exports no dmabuf (DMA_BUF_SUPPORTED is 0)")
        start, length = covering(address, nbytes)
        fd = ctypes.c_int(-1)
        kind, flags = ctypes.c_int(_DMA_BUF_FD), ctypes.c_ulonglong(0)
        with self._current():
            self._call(
                "cuMemGetHandleForAddressRange",
                ctypes.byref(fd),
                ctypes.c_uint64(start),
                ctypes.c_size_t(length),
                kind,
                flags,
            )
        return fd.value, address - start

    def flush(self) -> None:
        """Returns when what NICs have written is seen by kernels that are launched from now on."""
        with self._current():
            target, scope = ctypes.c_int(_FLUSH_CURRENT_CONTEXT), ctypes.c_int(_FLUSH_TO_OWNER)
            self._call("cuFlushGPUDirectRDMAWrites", target, scope)


def covering(address: int, nbytes: int) -> tuple[int, int]:
    """Returns (start, length) of the EXPORT_PAGEs that hold these bytes."""
    start = address // EXPORT_PAGE * EXPORT_PAGE
    return start, -(-(address + nbytes - start) // EXPORT_PAGE) * EXPORT_PAGE

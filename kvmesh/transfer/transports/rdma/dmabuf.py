"""Device memory as a dmabuf: how a GPU's memory is registered with a NIC without a vendor's peer-memory module."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

from kvmesh.errors import TransferError

_RANGE_HANDLE_DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
_PAGE = 64 << 10  # dmabufs of CUDA memory are cut at the host's page size; 64 KiB is a multiple of every one


@contextlib.contextmanager
def exported(location: str, address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yields (dmabuf descriptor, offset of `address` in it) and closes the descriptor afterwards, when the NIC holds
    its own. Raises TransferError where CUDA, its driver or this GPU cannot export the memory."""
    if not location.startswith("cuda"):
        raise TransferError(f"location={location!r}: rdma registers cpu and cuda memory", field="location")
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        export = cuda.cuMemGetHandleForAddressRange
    except (OSError, AttributeError) as err:
        raise TransferError(
            f"location={location!r}: the CUDA driver cannot export memory as a dmabuf ({err})", field="location"
        ) from err
    start = address // _PAGE * _PAGE
    length = -(-(address + nbytes - start) // _PAGE) * _PAGE
    fd = ctypes.c_int(-1)
    export.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint64]
    code = export(ctypes.addressof(fd), start, length, _RANGE_HANDLE_DMA_BUF_FD, 0)
    if code:
        raise TransferError(
            f"location={location!r}: cuMemGetHandleForAddressRange of {length} bytes fails with CUDA error {code}: "
            "the GPU or its driver has no dmabuf",
            field="location",
        )
    try:
        yield fd.value, address - start
    finally:
        os.close(fd.value)

"""Device memory as a dmabuf: how a GPU's memory is registered with a NIC without a vendor's peer-memory module."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from kvmesh.transfer.cuda_driver import CudaDriver


@contextlib.contextmanager
def exported(location: str, address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yields (dmabuf descriptor, offset of `address` in it) and closes the descriptor afterwards, when the NIC holds
    its own. Raises TransferError where CUDA, its driver or this GPU cannot export the memory."""
    fd, offset = CudaDriver(location).export(address, nbytes)
    try:
        yield fd, offset
    finally:
        os.close(fd)

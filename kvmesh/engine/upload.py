"""What a step needs on the device, put there by one copy that nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
ALIGNED = 16  # bytes that each array begins at a multiple of
ROOM = 1 << 16  # bytes that a buffer holds at first


class Upload:
    """Copies arrays to `device` through two pinned buffers that are used in turn, so that one can be filled while the
    device still reads the other. On a CPU the tensors are the arrays themselves. Whoever sends before the launches that
    need the tensors makes the device wait for the copy, and the host for nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.shares_memory = device.type == "cpu"  # then there is nothing to copy, and nothing to wait for
        self._buffers = () if self.shares_memory else (_Buffer(device), _Buffer(device))
        self._turn = 0

    def send(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """Returns the arrays on the device, each of its own shape and dtype; they may be changed at once, except on a
        CPU."""
        if self.shares_memory:
            return [torch.from_numpy(array) for array in arrays]
        places, end = [], 0
        for array in arrays:
            places.append(end)
            end += -(-array.nbytes // ALIGNED) * ALIGNED
        if not end:
            return [torch.empty(a.shape, dtype=torch.from_numpy(a).dtype, device=self.device) for a in arrays]
        self._turn = 1 - self._turn
        buffer = self._buffers[self._turn]
        room = buffer.room(end)
        for at, array in zip(places, arrays, strict=True):
            room[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        sent = buffer.send(end)
        return [
            sent[at : at + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
            for at, array in zip(places, arrays, strict=True)
        ]


class _Buffer:
    """Is pinned host memory that copies to the device are made from. It grows with what is sent."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._memory = torch.empty(ROOM, dtype=torch.uint8, pin_memory=True)

    def room(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Returns memory to write to, once the last copy has read it: long ago, unless the host is two steps ahead."""
        self._sent.synchronize()
        if nbytes > len(self._memory):
            self._memory = torch.empty(2 * nbytes, dtype=torch.uint8, pin_memory=True)
        written: npt.NDArray[np.uint8] = self._memory.numpy()
        return written

    def send(self, nbytes: int) -> torch.Tensor:
        """Starts the copy of the first bytes into memory of their own, and returns that."""
        made = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        made.copy_(self._memory[:nbytes], non_blocking=True)
        self._sent.record()
        return made

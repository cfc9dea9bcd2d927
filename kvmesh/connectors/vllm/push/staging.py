"""Memory that pushed blocks go through, and the copies between it and vLLM's pages. Here a block lies in one piece,
layer after layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvmesh.connectors.vllm.config import ConnectorConfig
from kvmesh.connectors.vllm.mover import ALIGN, Pages
from kvmesh.errors import ConfigError
from kvmesh.transfer import Range, TransferEngine

MAX_BLOCKS = 1024  # in one staging: a window's offsets are one small message

Bytes = npt.NDArray[np.uint8]


class WorkerPages:
    """Is the pages of one rank, layer by layer."""

    def __init__(self, layers: Sequence[Pages]) -> None:
        self._layers = list(layers)
        self.block_bytes = sum(layer.shape[1] for layer in layers)

    def copy_out(self, page: int, block: Bytes) -> None:
        """Copies a page of each layer into one piece of memory."""
        at = 0
        for layer in self._layers:
            source = layer[page]
            np.copyto(block[at : at + len(source)], source)
            at += len(source)

    def copy_in(self, page: int, block: Bytes) -> None:
        """Copies one piece of memory into a page of each layer."""
        at = 0
        for layer in self._layers:
            target = layer[page]
            np.copyto(target, block[at : at + len(target)])
            at += len(target)


class PushStaging:
    """Is the staging of one thread: `blocks` blocks of registered memory."""

    def __init__(self, engine: TransferEngine, block_bytes: int, config: ConnectorConfig) -> None:
        """Raises ConfigError when it holds no block."""
        self._size = block_bytes
        self._step = -(-block_bytes // ALIGN) * ALIGN
        self.blocks = min((config.push_staging_mb << 20) // config.push_threads // self._step, MAX_BLOCKS)
        if self.blocks < 1:
            why = f"is too little: a block has {block_bytes:,} bytes, and each of push_threads needs one"
            raise ConfigError(f"push_staging_mb={config.push_staging_mb}: {why}", field="push_staging_mb")
        self._region = engine.allocate(self.blocks * self._step)
        assert self._region.memory is not None, "host memory has a view"
        self._memory = np.frombuffer(self._region.memory, np.uint8)

    def block(self, slot: int) -> Bytes:
        """Returns the memory of one block."""
        return self._memory[slot * self._step : slot * self._step + self._size]

    def address(self, slot: int) -> int:
        """Returns where a block lies in this process."""
        return self._region.address + slot * self._step

    def range(self, slot: int) -> Range:
        """Returns where a block lies in the segment."""
        return Range(self._region.base_offset + slot * self._step, self._size)

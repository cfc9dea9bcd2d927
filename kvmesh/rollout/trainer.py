"""A trainer's tensors where ranks of a mesh read them: a segment of the transfer engine, in the trainer's process."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from kvmesh.errors import InvalidRequest
from kvmesh.ranks.protocol import RemoteTensor
from kvmesh.transfer import EngineConfig, Region, TransferEngine

ITEMSIZE = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}


class TrainerSegment:
    """Holds one set of weights for ranks to read. `add` copies a tensor in; `descriptor` and `tensors` go with the
    order to update. What was added is to stay as it is until that order is answered."""

    def __init__(self, config: EngineConfig | None = None, name: str = "") -> None:
        self._engine = TransferEngine(name or f"trainer-{os.getpid()}#{secrets.token_hex(4)}", config or EngineConfig())
        self._regions: dict[str, Region] = {}
        self._told: dict[str, RemoteTensor] = {}

    def __enter__(self) -> TrainerSegment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, name: str, dtype: str, shape: Sequence[int], data: Any) -> None:
        """Copies a tensor, contiguous, named and cut as the model's checkpoint on the Hub has it; the one of that name
        before is overwritten. `dtype` is "F64", "F32", "BF16" or "F16". Raises InvalidRequest for bytes that do not
        fit the shape."""
        view = memoryview(data).cast("B")
        wanted = math.prod(shape) * ITEMSIZE.get(dtype, 0)
        if not wanted or wanted != len(view):
            why = f"{len(view)} bytes; one of {', '.join(ITEMSIZE)} of that shape has {wanted}"
            raise InvalidRequest.of(f"tensors.{name}", f"{dtype} {list(shape)}", why)
        region = self._regions.get(name)
        if region is None or region.length < wanted:
            region = self._regions[name] = self._engine.allocate(wanted)
        assert region.memory is not None
        region.memory[:wanted] = view
        self._told[name] = RemoteTensor(name, dtype, tuple(shape), region.base_offset)

    @property
    def descriptor(self) -> bytes:
        """Names the segment and how it is reached."""
        return self._engine.local_descriptor().encode()

    @property
    def tensors(self) -> tuple[RemoteTensor, ...]:
        return tuple(self._told.values())

    def close(self) -> None:
        self._engine.close()

"""Where new weights are read from, and how little of them a rank reads: boxes of a tensor, as spans of its bytes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

from kvmesh.engine.checkpoint import ITEMSIZE, TensorInfo, TensorPart
from kvmesh.engine.config import ModelConfig
from kvmesh.errors import CheckpointError

MAX_SPANS = 1 << 16  # of one tensor; a box of more is read with what lies between


class TensorSource(Protocol):
    """Is where weights are read from: a checkpoint's files, a trainer's memory, or object storage."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    @property
    def mtp(self) -> Mapping[str, TensorInfo]:
        """The tensors of an MTP head; a head that is loaded keeps its own through an update."""

    def check_mtp(self) -> None:
        """Raises CheckpointError unless there is a whole MTP head."""

    def info(self, name: str) -> TensorInfo: ...

    def part(self, name: str, box: Sequence[range]) -> TensorPart:
        """Returns memory that holds the box of a tensor which the ranges along its first axes span. Raises KvmeshError
        when it cannot be had."""

    def release(self, name: str) -> None: ...

    def close(self) -> None: ...


class RemoteSource(ABC):
    """Is a TensorSource whose bytes cost what reading them takes, so that no more is read than a rank keeps.

    `least_gap`: where the wanted spans of a tensor lie closer to each other than so many bytes, what lies between is
    read with them. `nbytes_read` counts what was read of tensors; `until` is when reading is to be over, by
    `time.monotonic`."""

    least_gap: int

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.tensors: Mapping[str, TensorInfo] = {}
        self.mtp: Mapping[str, TensorInfo] = {}
        self.nbytes_read = 0
        self.until = math.inf

    def check_mtp(self) -> None:
        """Raises CheckpointError: only the model's own tensors are read from elsewhere."""
        raise CheckpointError("new weights are those of the model alone, without an MTP head", field="speculate")

    def info(self, name: str) -> TensorInfo:
        return self.tensors[name]

    def part(self, name: str, box: Sequence[range]) -> TensorPart:
        """See TensorSource."""
        info = self.tensors[name]
        read, spans = box_spans(info.shape, ITEMSIZE[info.dtype], box, self.least_gap)
        data = memoryview(bytearray(sum(end - first for first, end in spans)))
        self._read(info, spans, data)
        self.nbytes_read += len(data)
        bounds = [*map(len, read), *info.shape[len(read) :]]
        inner = tuple(range(wide) for wide in bounds[: len(read)]) + tuple(box[len(read) :])
        return TensorPart(data, tuple(bounds), inner)

    @abstractmethod
    def _read(self, info: TensorInfo, spans: Sequence[tuple[int, int]], into: memoryview) -> None:
        """Reads these spans of a tensor's bytes, one after the other, into memory that just holds them. Raises
        KvmeshError when they cannot be had by `until`."""

    def release(self, name: str) -> None:  # noqa: B027 - for all of them
        """Does nothing: none of what was read is kept here, it lives as long as its views."""

    @abstractmethod
    def close(self) -> None: ...


def box_spans(
    shape: Sequence[int], itemsize: int, box: Sequence[range], least_gap: int
) -> tuple[Sequence[range], list[tuple[int, int]]]:
    """Returns the box that is read for `box`, which is this one or larger along its last axes, and its byte spans,
    ascending: no more than MAX_SPANS, and with at least `least_gap` bytes between each two. The last axes of `box` that
    are read whole are left out of what is returned. Pure."""
    while box:
        inner = itemsize * math.prod(shape[len(box) :])  # bytes of one step along the last axis of the box
        wide, last = shape[len(box) - 1], box[-1]
        gap = (wide - len(last)) * inner
        outer = math.prod(len(one) for one in box[:-1])
        if gap and (outer == 1 or (gap >= least_gap and outer <= MAX_SPANS)):
            starts = [0]
            for axis, one in enumerate(box[:-1]):
                step = inner * math.prod(shape[axis + 1 : len(box)])
                starts = [start + index * step for start in starts for index in one]
            first, length = last.start * inner, len(last) * inner
            return box, [(start + first, start + first + length) for start in starts]
        box = box[:-1]
    return box, [(0, itemsize * math.prod(shape))]

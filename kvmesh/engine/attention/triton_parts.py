"""Attention to parts of contexts by Triton's decode kernels, each query as a row of its own; runs of many queries that
see the same are left to matrix products of torch (`parts.PartBackend`), which read the context once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from kvmesh.engine.attention.backend import AttentionBackend
from kvmesh.engine.attention.parts import AttendedPart, LatentParts, PartBackend, QueryRun
from kvmesh.engine.attention.triton_backend import TritonAttention
from kvmesh.engine.attention.triton_latent import TritonLatent
from kvmesh.engine.kernels.decode import longest_share, paged_decode, scratch_elements, shares_of, tiles_of
from kvmesh.engine.kernels.latent_decode import latent_decode
from kvmesh.errors import InternalError

FEW = 16  # queries of a run that are rows of the kernel


class KernelRows:
    """Lists, for the queries of short runs, the work of a decode kernel."""

    def __init__(
        self, backend: TritonAttention | TritonLatent, runs: Sequence[QueryRun], table: npt.NDArray[np.int32]
    ) -> None:
        counts = [run.queries for run in runs]
        rows = np.concatenate([np.arange(run.first, run.first + run.queries) for run in runs])
        lengths = np.repeat(np.array([run.seen for run in runs], dtype=np.int64), counts)
        self.rows = backend.tensor(rows)
        self.table = backend.tensor(table[np.repeat([run.row for run in runs], counts)])
        self.lengths = backend.tensor(lengths.astype(np.int32))
        tiles = tiles_of(lengths, 0, backend.tile)[1]
        longest = longest_share(tiles, backend.share_programs, backend.processors, backend.resident)
        work, joins = shares_of(lengths, 0, backend.tile, longest, all_joined=True)
        self.work, self.joins = backend.tensor(work), backend.tensor(joins)

    def scratch(self, heads: int, width: int) -> torch.Tensor:
        need = scratch_elements(len(self.work), heads, width)
        return torch.empty(need, dtype=torch.float32, device=self.table.device)


class TritonParts(PartBackend):
    backend: TritonAttention
    few: KernelRows | None

    def plan(self, runs: Sequence[QueryRun], table: npt.NDArray[np.int32]) -> None:
        few, many = split_runs(runs)
        super().plan(many, table)
        self.few = KernelRows(self.backend, few, table) if few else None

    def attend(self, layer: int, q: torch.Tensor) -> AttendedPart:
        found, few = super().attend(layer, q), self.few
        if few is None:
            return found
        own = q.index_select(0, few.rows)
        values = own.new_empty(len(own), q.shape[1] * self.width, dtype=torch.float32)
        lse = values.new_empty(len(own), q.shape[1])
        where = (few.table, few.lengths, few.work, few.joins)
        pages, scratch = self.backend.layers[layer], few.scratch(q.shape[1], self.width)
        paged_decode(own, pages, *where, replace(self.specs[layer], sinks=None), scratch, values, lse)
        found.values[few.rows], found.lse[few.rows] = values.view(len(own), q.shape[1], self.width), lse
        return found


class TritonLatentParts(LatentParts):
    backend: TritonLatent
    few: KernelRows | None

    def plan(self, runs: Sequence[QueryRun], table: npt.NDArray[np.int32]) -> None:
        few, many = split_runs(runs)
        super().plan(many, table)
        self.few = KernelRows(self.backend, few, table) if few else None

    def attend(self, layer: int, q: torch.Tensor) -> AttendedPart:
        found, few, backend = super().attend(layer, q), self.few, self.backend
        if few is None:
            return found
        own, heads = q.index_select(0, few.rows), q.shape[1]
        values = own.new_empty(len(own), heads, self.width, dtype=torch.float32)
        lse = values.new_empty(len(own), heads)
        latent_decode(
            own[..., : self.width],
            own[..., self.width :],
            backend.layers[layer],
            few.table,
            None,
            few.lengths,
            few.work,
            few.joins,
            backend.scale,
            few.scratch(heads, self.width),
            values,
            backend.variant,
            lse,
        )
        found.values[few.rows], found.lse[few.rows] = values, lse
        return found


def split_runs(runs: Sequence[QueryRun]) -> tuple[list[QueryRun], list[QueryRun]]:
    """Returns the runs of few queries and those of many; what sees nothing is in neither."""
    seeing = [run for run in runs if run.seen]
    return [run for run in seeing if run.queries <= FEW], [run for run in seeing if run.queries > FEW]


def triton_parts(backend: AttentionBackend) -> PartBackend:
    """Returns what attends to parts of contexts in the pages of a backend of Triton's. Raises InternalError for any
    other."""
    if isinstance(backend, TritonLatent):
        return TritonLatentParts(backend)
    if isinstance(backend, TritonAttention):
        return TritonParts(backend)
    raise InternalError(f"{type(backend).__name__} is no backend of Triton's")

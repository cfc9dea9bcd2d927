"""Attention to parts of contexts by Triton's decode kernels, each query as a row of its own and those of one request
together; runs of many queries that see the same are left to matrix products of torch (`parts.PartBackend`). Either way
the context is read once for all of them."""

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
from kvmesh.engine.kernels.decode import (
    MOST_QUERIES,
    longest_share,
    paged_decode,
    request_tiles_of,
    requests_of,
    scratch_elements,
    shares_of,
)
from kvmesh.engine.kernels.latent_decode import latent_decode
from kvmesh.errors import InternalError

FEW = 16  # queries of a run that are rows of the kernel


class KernelRows:
    """Lists, for the queries of short runs, the work of a decode kernel."""

    def __init__(
        self,
        backend: TritonAttention | TritonLatent,
        runs: Sequence[QueryRun],
        table: npt.NDArray[np.int32],
        heads_times: int,
    ) -> None:
        runs = sorted(runs, key=lambda run: (run.row, run.seen))  # ranks of cp have a request's queries in several runs
        counts = [run.queries for run in runs]
        rows = np.concatenate([np.arange(run.first, run.first + run.queries) for run in runs])
        lengths = np.repeat(np.array([run.seen for run in runs], dtype=np.int64), counts)
        owners, own = np.unique(np.repeat([run.row for run in runs], counts), return_counts=True)
        self.queries = backend.queries_for(MOST_QUERIES, heads_times) if own.max() > 1 else 1
        requests = requests_of(own, self.queries)
        self.rows = backend.tensor(rows)
        self.table = backend.tensor(table[np.repeat(owners, -(-own // self.queries))])
        self.lengths = backend.tensor(lengths.astype(np.int32))
        programs, resident, tile = backend.share_sizes(self.queries)
        _, tiles = request_tiles_of(lengths, requests, 0, tile)
        longest = longest_share(tiles, programs, backend.processors, resident)
        several = requests if self.queries > 1 else None
        work, joins = shares_of(lengths, 0, tile, longest, all_joined=True, requests=several)
        self.work, self.joins, self._slots = backend.tensor(work), backend.tensor(joins), int(joins[:, 1].sum())
        firsts = np.cumsum(requests) - requests
        self.requests = backend.tensor(np.stack((firsts, requests), 1).astype(np.int32))

    def scratch(self, heads: int, width: int) -> torch.Tensor:
        need = scratch_elements(self._slots, heads, width)
        return torch.empty(need, dtype=torch.float32, device=self.table.device)


class TritonParts(PartBackend):
    backend: TritonAttention
    few: KernelRows | None

    def plan(self, runs: Sequence[QueryRun], table: npt.NDArray[np.int32]) -> None:
        few, many = split_runs(runs)
        super().plan(many, table)
        self.few = KernelRows(self.backend, few, table, self.heads_times) if few else None

    def attend(self, layer: int, q: torch.Tensor) -> AttendedPart:
        found, few = super().attend(layer, q), self.few
        if few is None:
            return found
        own = q.index_select(0, few.rows)
        values = own.new_empty(len(own), q.shape[1] * self.width, dtype=torch.float32)
        lse = values.new_empty(len(own), q.shape[1])
        where = (few.table, few.lengths, few.work, few.joins)
        pages, scratch = self.backend.layers[layer], few.scratch(q.shape[1], self.width)
        spec = replace(self.specs[layer], sinks=None)
        paged_decode(own, pages, *where, spec, scratch, values, lse, requests=few.requests, queries=few.queries)
        found.values[few.rows], found.lse[few.rows] = values.view(len(own), q.shape[1], self.width), lse
        return found


class TritonLatentParts(LatentParts):
    backend: TritonLatent
    few: KernelRows | None

    def plan(self, runs: Sequence[QueryRun], table: npt.NDArray[np.int32]) -> None:
        few, many = split_runs(runs)
        super().plan(many, table)
        self.few = KernelRows(self.backend, few, table, self.heads_times) if few else None

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
            backend.variant_of(few.queries),
            lse,
            few.requests,
            few.queries,
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

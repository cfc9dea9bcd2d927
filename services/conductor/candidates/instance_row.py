"""What stands in the columns for one instance. Pure."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import chain
from zlib import crc32

import numpy as np

from kvmesh.native import library
from kvmesh.services.conductor.candidates.fields import Floats
from kvmesh.services.conductor.costs.fit import FittedCosts
from kvmesh.services.conductor.domain import Role
from kvmesh.services.conductor.fleet.instance import Instance


@cache
def native() -> Callable[..., None] | None:
    """Returns `kv_fill` of rows.cpp, or None where native code was not built."""
    lib = library.library()
    if lib is None:
        return None
    fill: Callable[..., None] = lib.kv_fill
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    lib.kv_fill.argtypes, lib.kv_fill.restype = (pointer, number, pointer, number, number, pointer), None
    return fill


def write(table: Floats, address: int, rows: Sequence[int], loads: Sequence[tuple[float, ...]]) -> None:
    """Writes the first columns of these rows (at least one), as `load` returns them. `address` is that of the table in
    memory, 0 if unknown."""
    told = array("d", chain.from_iterable(loads))
    fill = native()
    if fill is None or not address:
        table[: len(loads[0]), rows] = np.frombuffer(told).reshape(len(rows), -1).T
        return
    where = array("q", rows)
    fill(address, table.shape[1], where.buffer_info()[0], len(rows), len(loads[0]), told.buffer_info()[0])


@lru_cache(maxsize=16_384)
def node(node_id: str) -> float:
    """Returns the value of the NODE column for that node."""
    return float(crc32(node_id.encode()))


def load(instance: Instance, *, is_open: bool) -> tuple[tuple[float, ...], tuple[bool, ...]]:
    """Returns the columns from BACKLOG on, and which rare properties from RANKED on the instance has."""
    queue, batch = instance.queue, instance.batch
    backlog_s, as_of, works, ranked, long_share, chunk_s = queue.figures()
    requests, context, free_blocks, free_pages, mean_blocks = batch.figures()
    weight = queue.size_weight
    yields = ranked and any(work.yields for work in queue.works.values())
    coming = queue.coming_share if instance.mixes else 0.0
    running = min(requests, instance.max_running or requests) if instance.mixes else 0
    values = (
        backlog_s,
        as_of,
        works,
        ranked and any(work.priority for work in queue.works.values()),
        yields,
        requests,
        context,
        running,
        free_blocks,
        free_pages,
        batch.residence_s,
        mean_blocks,
        instance.last_seen,
        batch.stays.tightest_slo_s,
        is_open,
        instance.slot,
        long_share,
        chunk_s,
        weight,
        instance.lease.seconds,
        coming,
    )
    return values, (
        ranked,
        yields,
        running > 0,
        chunk_s > 0,
        weight > 0,
        (backlog_s > 0 or coming > 0) and instance.role is not Role.PREFILL,
    )


def models(instance: Instance) -> tuple[object, ...]:
    """Returns what `learnt` depends on; while it is equal, so are the columns."""
    fits = instance.prefill.fit, instance.decode.fit, instance.pull.fit
    known = ((fit.coefficients, fit.prior, fit.fading_from) for fit in fits)
    return *known, instance.transfer.bytes_per_s, instance.prefill.chunk_tokens


def learnt(instance: Instance) -> tuple[tuple[float, ...], tuple[bool, ...]]:
    """Returns the columns from PREFILL on, and which rare properties from CHUNKED on the instance has."""
    fits = instance.prefill.fit, instance.decode.fit, instance.pull.fit
    chunk_tokens = instance.prefill.chunk_tokens
    values = *(x for fit in fits for x in _model(fit)), instance.transfer.bytes_per_s, chunk_tokens
    bends = (bool(fit.coefficients.d or fit.prior.d) for fit in fits)
    return values, (chunk_tokens < float("inf"), *bends)


def registration(instance: Instance) -> tuple[object, ...]:
    """Returns what `registered` depends on."""
    return instance.role, instance.local_prefill_tokens, instance.chunk_tokens, instance.mixes


def registered(instance: Instance, group: int) -> tuple[tuple[float, ...], tuple[bool, ...]]:
    """Returns the columns from GROUP on, and which rare properties from LIMITED on the instance has."""
    model, capacity = instance.model, instance.capacity_blocks * instance.model.block_tokens
    limit = model.max_context_tokens - 1 if model.max_context_tokens else float("inf")
    values = (
        group,
        instance.role.prefills,
        instance.role.decodes,
        instance.alone_tokens,
        instance.mixes,
        min(capacity, limit),
        min(capacity - 1, limit),
        instance.capacity_blocks,
        instance.max_running or float("inf"),
        instance.chunk_tokens,
        model.cost.least_token_bytes,
        node(instance.node_id),
    )
    return values, (instance.max_running > 0,)


def _model(fit: FittedCosts) -> tuple[float, ...]:
    now, prior = fit.coefficients, fit.prior
    return (
        *(now.a, now.b, now.c, now.d, now.knee),
        *(prior.a, prior.b, prior.c, prior.d, prior.knee),
        fit.fading_from,
    )

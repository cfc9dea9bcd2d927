"""Which leading blocks of a prompt each instance of a large fleet has, for all of them at once. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.conductor.prefixes.index import FEW_BITS, Place, Survey, places
from services.conductor.screening.columns import View
from services.conductor.screening.fields import NO_ROW, Field, Floats, Mask

FEW_RUNS = 8
MAX_RUNS = 64  # of a survey, that are told apart


@dataclass(frozen=True)
class Held:
    """Which leading blocks of a prompt each instance has in memory: all, those that are sealed; and the end of the last
    run of which it has anything, in any tier."""

    depth: Floats
    sealed: Floats
    last: Floats


def held(view: View, survey: Survey) -> Held:
    """Of every instance. O(runs × instances), a few microseconds for a thousand."""
    count = len(view.columns)
    depth, sealed, last = np.zeros(count), np.zeros(count), np.zeros(count + 1)
    if not survey.runs:
        return Held(depth, sealed, last[:count])
    if len(survey.runs) <= FEW_RUNS and all(
        run.sealed.bit_count() + run.coming.bit_count() <= FEW_BITS for run in survey.runs
    ):
        return _held_by_few(view, survey, depth, sealed, last[:count])
    own, own_coming = view.columns[Field.SEALED].astype(np.intp), view.columns[Field.PENDING].astype(np.intp)
    alive = alive_sealed = np.ones(count, dtype=np.bool_)
    for run in survey.runs[:MAX_RUNS]:
        last[view.columns.rows_of(run.sealed)] = run.end
        if alive.any():
            has = _has(run.sealed, own)
            alive_sealed = alive_sealed & has
            alive = alive & (has | _has(run.coming, own_coming)) if run.coming else alive & has
            depth[alive], sealed[alive_sealed] = run.end, run.end
    rest = 0
    for run in survey.runs[MAX_RUNS:]:
        rest |= run.sealed
    last[view.columns.rows_of(rest)] = survey.runs[-1].end if rest else 0
    return Held(depth, sealed, last[:count])


def _held_by_few(view: View, survey: Survey, depth: Floats, sealed: Floats, last: Floats) -> Held:
    """The same, one by one."""
    columns = view.columns
    own, own_coming = columns[Field.SEALED], columns[Field.PENDING]
    for run in survey.runs:
        for row in columns.rows_of(run.sealed).tolist():
            if row >= 0:
                last[row] = run.end
    first = survey.runs[0]
    rows = {*columns.rows_of(first.sealed).tolist(), *columns.rows_pending(first.coming)} - {NO_ROW}
    for row in rows:
        slot = int(own[row])
        place = Place(1 << slot if slot >= 0 else 0, 1 << int(own_coming[row]))
        depth[row], sealed[row] = survey.depth(place), survey.depth(Place(place.sealed))
    return Held(depth, sealed, last)


def _has(mask: int, slots: np.ndarray[tuple[int], np.dtype[np.intp]]) -> Mask:
    """Whether each of these slots (-1: none) is in the bitset."""
    there = np.zeros(max(mask.bit_length(), int(slots.max(initial=0)) + 1) + 1, dtype=np.bool_)
    there[places(mask)] = True
    there[-1] = False
    return there[slots]

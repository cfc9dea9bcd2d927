"""Which leading blocks of a prompt each instance of a large fleet has, for all of them at once. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from kvmesh.services.conductor.candidates.columns import View
from kvmesh.services.conductor.candidates.fields import ColumnField, Floats, Mask
from kvmesh.services.conductor.prefixes.grouped_survey import GroupedSurvey
from kvmesh.services.conductor.prefixes.index import FEW_BITS, HeldRun, PrefixPlace, PrefixSurvey

MAX_RUNS = 64  # of a survey, that are told apart where many hold them


@dataclass(slots=True)
class HeldBlocks:
    """How many leading blocks of a prompt each instance has in memory: `depth` counts all, `sealed` the sealed ones.
    `last` is the end of the last run of which it holds anything, in any tier. `ends` holds all values of `depth`, and
    perhaps others."""

    depth: Floats
    sealed: Floats
    last: Floats
    ends: Collection[int] = (0,)


def told_apart(survey: PrefixSurvey) -> int:
    """Returns how many of the survey's runs are looked at: if there are many holders, runs from the first one on that
    few hold are treated as one."""
    if len(survey.runs) <= MAX_RUNS or any(is_few(run) for run in survey.runs[:MAX_RUNS]):
        return len(survey.runs)
    return MAX_RUNS


def is_few(run: HeldRun) -> bool:
    """Says whether so few instances hold the run that they are looked at one by one."""
    return run.sealed.bit_count() + run.coming.bit_count() <= FEW_BITS


def held(view: View, survey: PrefixSurvey) -> HeldBlocks:
    """Returns the held blocks of every instance. Runs that many hold are looked at for all instances at once; from the
    first run that few hold, only these few can have more."""
    if isinstance(survey, GroupedSurvey):
        return _held_of_groups(view, survey)
    count, slots = len(view.columns), view.columns.slots
    depth, sealed, last = np.zeros(count), np.zeros(count), np.zeros(count + 1)
    alive: Mask | None = None  # who has all the runs so far; None: all have
    alive_sealed: Mask | None = None
    ends = {0}
    for run in survey.runs[:MAX_RUNS]:
        if is_few(run):
            few = {
                *view.columns.slots.rows_of_few(view.columns.slots.in_memory(run.sealed)),
                *view.columns.rows_pending(run.coming),
            }
            rows = [row for row in few if row >= 0 and (alive is None or alive[row])]
            ends |= _exact(view, survey, rows, depth, sealed)
            break
        has_sealed = _has(view, slots.in_memory(run.sealed), 0)
        alive_sealed = has_sealed if alive_sealed is None else alive_sealed & has_sealed
        has = _has(view, slots.in_memory(run.sealed), run.coming) if run.coming else has_sealed
        alive = has if alive is None else alive & has
        depth[alive], sealed[alive_sealed] = run.end, run.end
        ends.add(run.end)
    _last(view, survey, last)
    return HeldBlocks(depth, sealed, last[:count], sorted(ends))


def _held_of_groups(view: View, survey: GroupedSurvey) -> HeldBlocks:
    """Returns the same of several cache groups, where `sealed` is what decode needs not be sent. Instances that have
    the same objects of the same runs are told of together."""
    columns, slots = view.columns, view.columns.slots
    count = len(columns)
    has, last = [], np.zeros(count)
    for run in survey.runs:
        any_here = _has(view, run.sealed, run.coming)
        last[any_here] = run.end
        has += [_has(view, slots.in_memory(sealed), 0) for sealed in run.groups]
        has += [_has(view, 0, coming) for coming in run.soon if coming]
    depth, sealed, ends = np.zeros(count), np.zeros(count), {0}
    if has and count:
        packed = np.packbits(np.stack(has), axis=0)
        _, rows, alike = np.unique(packed, axis=1, return_index=True, return_inverse=True)
        told = []
        for row in rows.tolist():
            slot, coming = columns[ColumnField.SEALED].item(row), columns[ColumnField.PENDING].item(row)
            place = PrefixPlace(1 << int(slot) if slot >= 0 else 0, 1 << int(coming))
            told.append((survey.depth(place), survey.landed(place)))
            ends.add(told[-1][0])
        depth, sealed = np.array(told, dtype=np.float64)[alike.reshape(-1)].T.copy()
    return HeldBlocks(depth, sealed, last, sorted(ends))


def _exact(view: View, survey: PrefixSurvey, rows: list[int], depth: Floats, sealed: Floats) -> set[int]:
    """Fills in the values of these few rows one by one; returns their depths."""
    ends = set()
    for row in rows:
        slot, coming = view.columns[ColumnField.SEALED].item(row), view.columns[ColumnField.PENDING].item(row)
        place = PrefixPlace(1 << int(slot) if slot >= 0 else 0, 1 << int(coming))
        found = survey.depth(place)
        ends.add(found)
        depth[row] = found
        sealed[row] = survey.depth(PrefixPlace(place.sealed)) if place.sealed else 0
    return ends


def _last(view: View, survey: PrefixSurvey, last: Floats) -> None:
    """Fills in `last`: each slot is handled in the last run that it shows in. The final element is for slots without a
    row."""
    seen = 0
    for run in reversed(survey.runs):
        new = run.sealed & ~seen
        if not new:
            continue
        seen |= new
        if new.bit_count() <= FEW_BITS:
            for row in view.columns.slots.rows_of_few(new):
                last[row] = max(last[row], run.end)
        else:
            rows = view.columns.slots.rows_of(new)
            last[rows] = np.maximum(last[rows], run.end)


def _has(view: View, sealed: int, coming: int) -> Mask:
    """Returns which instances have one of these slots of the block map, or of `Pending`."""
    there = np.zeros(len(view.columns) + 1, dtype=np.bool_)  # the last one is for slots of no row
    there[view.columns.slots.rows_of(sealed)] = True
    if coming:
        there[view.columns.rows_pending(coming)] = True
    return there[:-1]

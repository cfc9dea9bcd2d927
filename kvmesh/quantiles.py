"""Quantiles of values that are all known; `kvmesh.sim.report.sketch` has those of streams that nobody keeps."""

from __future__ import annotations

from collections.abc import Sequence


def quantile(ordered: Sequence[float], share: float) -> float:
    """Returns the quantile `share` (0 to 1) of values in rising order, linear between the two nearest ranks. There must
    be at least one value."""
    place = share * (len(ordered) - 1)
    low = min(int(place), len(ordered) - 2)
    if low < 0:
        return ordered[0]
    return ordered[low] + (ordered[low + 1] - ordered[low]) * (place - low)

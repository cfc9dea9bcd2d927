"""What fitted models say at every instance at once. Pure."""

from __future__ import annotations

import numpy as np

from services.conductor.candidates.columns import View
from services.conductor.candidates.fields import BENDS, Floats
from services.conductor.costs.fit import HALF_LIFE_S
from services.conductor.costs.interference import SLOWEST


def fitted(
    view: View,
    model: int,
    x1: Floats | float,
    x2: Floats | float,
    n: Floats | float | None = None,
    *,
    prior: bool = False,
) -> Floats:
    """As `FittedModel.predict`; `prior`: what its prior says. `n`: None is 1."""
    columns, at = view.columns, model + 5 * prior
    each: Floats = columns[at] if n is None else columns[at] * n
    seconds: Floats = each + columns[at + 1] * x1 + columns[at + 2] * x2
    if not columns.rare(BENDS[model]):
        return seconds
    return seconds + columns[at + 3] * np.maximum(0.0, x1 - columns[at + 4])


def admitted(view: View, model: int, x1: Floats | float, x2: Floats | float, n: Floats | float | None = None) -> Floats:
    """As `FittedModel.admission_s`."""
    seconds, before = fitted(view, model, x1, x2, n), fitted(view, model, x1, x2, n, prior=True)
    if (seconds <= before).all():  # nothing to fade
        return seconds
    floor = np.minimum(seconds, before)
    return np.maximum(floor, seconds * left(view, model))


def left(view: View, model: int) -> Floats:
    """What counts of a fit to which nothing was added for a while, 0 to 1."""
    age_s = np.maximum(0.0, view.now - view.columns[model + 10])
    return np.exp2(-age_s / HALF_LIFE_S)


def mixed(step_s: Floats, chunk_s: Floats, busy_s: Floats, stay_s: Floats) -> Floats:
    """As `interference.mixed_tbt_s`."""
    share = np.minimum(1.0, np.maximum(0.0, busy_s) / np.maximum(SLOWEST * stay_s, 1e-9))
    return step_s + chunk_s * share

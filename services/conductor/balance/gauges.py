"""What an autoscaler reads: scale hints as metrics.

kvmesh_conductor_scale_hint_count{model,role}    instances to add, or to take away
kvmesh_conductor_scale_wanted_count{model,role}  instances wanted: with Kubernetes' HorizontalPodAutoscaler an
                                                 external metric of target AverageValue 1
kvmesh_conductor_pool_load_ratio{model,role}     demand over capacity
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvmesh.telemetry import names
from services.conductor.balance.scale import Hint

MAX_LOAD = 1e6  # a pool without instances has no finite load

_GAUGES = names.CONDUCTOR_SCALE_HINT, names.CONDUCTOR_SCALE_WANTED, names.CONDUCTOR_POOL_LOAD


class ScaleGauges:
    """Pools that are no more are shown no more."""

    def __init__(self) -> None:
        self._shown: set[tuple[str, str]] = set()

    def show(self, hints: Sequence[Hint]) -> None:
        """These are all there are."""
        found = {(hint.model, hint.role.value): hint for hint in hints}
        for labels in self._shown - found.keys():
            for gauge in _GAUGES:
                gauge.remove(*labels)
        for labels, hint in found.items():
            load = hint.load if math.isfinite(hint.load) else MAX_LOAD
            for gauge, value in zip(_GAUGES, (hint.change, hint.instances + hint.change, load), strict=True):
                gauge.labels(*labels).set(value)
        self._shown = set(found)

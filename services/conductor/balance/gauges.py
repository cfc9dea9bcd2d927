"""What is shown of pools as metrics; what an autoscaler reads:

kvmesh_conductor_scale_hint_count{model,role}    instances to add, or to take away
kvmesh_conductor_scale_wanted_count{model,role}  instances wanted: with Kubernetes' HorizontalPodAutoscaler an
                                                 external metric of target AverageValue 1
kvmesh_conductor_pool_load_ratio{model,role}     demand over capacity

and what predictions are worth: kvmesh_conductor_prediction_error_ratio{what,quantile,group}.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvmesh.services.conductor.admission.gate import Loads
from kvmesh.services.conductor.balance.scale import Hint
from kvmesh.services.conductor.costs.accuracy import PredictionError
from kvmesh.services.conductor.fleet.instance import Instance
from kvmesh.services.conductor.fleet.walk import Pace, Walk
from kvmesh.telemetry import names
from kvmesh.telemetry.present_series import PresentSeries

MAX_LOAD = 1e6  # a pool without instances has no finite load


class ScaleGauges:
    """Shows scale hints; pools that no longer exist are removed."""

    def __init__(self) -> None:
        self._hint = PresentSeries(names.CONDUCTOR_SCALE_HINT)
        self._wanted = PresentSeries(names.CONDUCTOR_SCALE_WANTED)
        self._load = PresentSeries(names.CONDUCTOR_POOL_LOAD)

    def show(self, hints: Sequence[Hint]) -> None:
        """Shows these hints, which are all there are."""
        found = {(hint.model, hint.role.value): hint for hint in hints}
        self._hint.show({labels: hint.change for labels, hint in found.items()})
        self._wanted.show({labels: hint.instances + hint.change for labels, hint in found.items()})
        self._load.show({labels: min(hint.load, MAX_LOAD) for labels, hint in found.items()})


def error_shares(errors: Sequence[PredictionError]) -> dict[tuple[str, ...], float]:
    """Returns what CONDUCTOR_PREDICTION_ERROR shows, by its labels."""
    found: dict[tuple[str, ...], float] = {}
    for error in errors:
        shares = (("bias", error.bias), ("p50", error.p50), ("p90", error.p90), ("p99", error.p99))
        found.update({(error.what.value, quantile, error.group): share for quantile, share in shares})
    return found


class LoadGauges:
    """Shows the loads of pools, which are added up while the instances are visited some at a time."""

    def __init__(self, loads: Callable[[Iterable[Instance]], dict[str, Loads]]) -> None:
        self._loads = loads
        self._walk = Walk(Pace(1500, 30))
        self._found: dict[str, Loads] = {}

    def begin(self, everybody: Sequence[Instance]) -> None:
        """Starts to visit these instances, unless a visit is under way."""
        if not self._walk.under_way:
            self._walk.begin(everybody)

    def tick(self, passed_s: float) -> None:
        """Visits the next instances, and shows the loads when all were visited."""
        if self._walk.under_way:
            self._meet(self._walk.next(passed_s))

    def _meet(self, some: Sequence[Instance]) -> None:
        for model, loads in self._loads(some).items():
            old = self._found.get(model, loads)
            self._found[model] = Loads(max(old.prefill, loads.prefill), max(old.decode, loads.decode))
        if not self._walk.under_way:
            for model, loads in self._found.items():
                names.CONDUCTOR_SLO_LOAD.labels(model=model, pool="prefill").set(loads.prefill)
                names.CONDUCTOR_SLO_LOAD.labels(model=model, pool="decode").set(loads.decode)
            self._found = {}

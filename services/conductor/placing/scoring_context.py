"""What one request's choice depends on, besides the instances. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvmesh.services.conductor.admission.judge import Judge
from kvmesh.services.conductor.domain import Fetch
from kvmesh.services.conductor.loads.shortest_first import ALONE, OvertakingTerms
from kvmesh.services.conductor.placing.nearness import NOWHERE, Nearness


@dataclass(slots=True)
class ScoringContext:
    """What one request is weighed by besides the instances. Times are in seconds."""

    ttft_slo_s: float
    tbt_slo_s: float
    threshold: float  # Settings.balancing_threshold
    now: float
    rng: random.Random
    judge: Judge
    fetch: Fetch = Fetch.CHEAPER
    near: Nearness = NOWHERE  # what being far from its session and origin costs
    overtaking: OvertakingTerms = ALONE  # shorter requests that will come meanwhile and overtake it

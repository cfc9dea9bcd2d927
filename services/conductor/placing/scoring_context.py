"""What a choice is made by, besides the instances. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

from services.conductor.admission.judge import Judge
from services.conductor.domain import Fetch
from services.conductor.loads.shortest_first import ALONE, Line
from services.conductor.placing.nearness import NOWHERE, Near


@dataclass(slots=True)
class Terms:
    """Of one request; seconds."""

    ttft_slo_s: float
    tbt_slo_s: float
    threshold: float  # Settings.balancing_threshold
    now: float
    rng: random.Random
    judge: Judge
    fetch: Fetch = Fetch.CHEAPER
    near: Near = NOWHERE  # to whom it belongs, besides
    line: Line = ALONE  # who comes meanwhile

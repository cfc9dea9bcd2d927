"""The policies that are compared: the paper's, what was added to it one by one, and all together."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from benchmarks.paper_setup import Case, Parameters, config_of
from kvmesh.sim.config import SimConfig
from services.conductor.domain import Fetch
from services.conductor.settings import AffinitySettings, Settings, SizeSettings, ThresholdMode

ARRIVAL = 1e-18  # a size weight so little that lines go by arrival alone: first come, first served
TURNS = 0.0  # by arrival, long and short prompts taking turns
ONE_LINE = 1 << 30  # no prompt is long: all are packed into steps in the order of the line


@dataclass(frozen=True)
class Policy:
    """One way to serve. Defaults: Algorithm 1 as it is printed, every line by arrival."""

    fetch: str = "always"
    threshold: float = 1.0
    adaptive: bool = False
    size_weight: float = ARRIVAL
    long_tokens: int = 8192
    others: float = 0.0  # see services/conductor/loads/sizes.py
    later: float = 0.0
    overtaking: float = 0.0
    session_s: float = 0.0
    copies: bool = False  # of hot prefixes, ordered by a leader

    @property
    def name(self) -> str:
        """What differs from Algorithm 1."""
        base = asdict(Policy())
        return " ".join(f"{name}={value}" for name, value in asdict(self).items() if value != base[name]) or "paper"

    def told(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)


def policy_of(told: dict[str, Any]) -> Policy:
    """What `told` said."""
    return Policy(**{one.name: told[one.name] for one in fields(Policy)})


def paper_grid() -> list[Policy]:
    """Its threshold is tuned by hand; how long prompts share a line with short ones it does not say: both ways."""
    return [
        *(Policy(threshold=one) for one in (1.0, 2.0, 4.0)),
        Policy(long_tokens=ONE_LINE),
    ]


def better_grid(paper: Policy) -> list[Policy]:
    """The weight of sizes, and how much of the overtaking that theory foresees is counted. Fetching as in `paper`."""
    base = replace(paper, long_tokens=8192, others=1.0, later=0.2)
    tried = ((4.0, 1.0), (8.0, 1.0), (16.0, 1.0), (32.0, 1.0), (8.0, 0.5), (16.0, 0.5))
    return [replace(base, size_weight=weight, overtaking=share) for weight, share in tried]


def added(paper: Policy, better: Policy) -> dict[str, Policy]:
    """What is reported: alone, on top of the paper's policy; together; and what could be added to that."""
    return {
        PAPER: paper,
        "paper, fetch if cheaper": replace(paper, fetch="cheaper"),
        "paper, adaptive threshold": replace(paper, adaptive=True),
        "paper, cheaper and congestion": replace(paper, fetch="cheaper", adaptive=True),
        TURNS_TAKEN: replace(paper, size_weight=TURNS, long_tokens=8192),
        "size in the line alone": replace(better, others=0.0, later=0.0, overtaking=0.0),
        "... placed by what others lose": replace(better, overtaking=0.0),
        BETTER: better,
        "better, fetch if cheaper": replace(better, fetch="cheaper"),
        "better, hot copies": replace(better, copies=True),
    }


PAPER, TURNS_TAKEN, BETTER = "paper", "paper, long and short take turns", "better: ... and overtaking foreseen"
MAIN = PAPER, TURNS_TAKEN, BETTER


def config(at: Parameters, policy: Policy, admission: str, seed: int) -> SimConfig:
    """The paper's set-up, served so. TBT is judged by the tightest of the paper's thresholds."""
    base = config_of(at, Case(admission=admission))
    return replace(
        base,
        seed=seed,
        size_weight=policy.size_weight,
        long_tokens=policy.long_tokens,
        orders=policy.copies,
        conductor=_settings(base.conductor, at, policy),
    )


def _settings(base: Settings, at: Parameters, policy: Policy) -> Settings:
    return replace(
        base,
        slo_tbt_s=at.slo.tbt_s[0],
        fetch=Fetch(policy.fetch),
        balancing_threshold=policy.threshold,
        threshold_mode=ThresholdMode.ADAPTIVE if policy.adaptive else ThresholdMode.FIXED,
        affinity=AffinitySettings(session_s=policy.session_s),
        sizes=SizeSettings(policy.others, policy.later, policy.overtaking),
        max_explained=0,
    )

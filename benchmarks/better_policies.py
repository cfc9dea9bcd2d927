"""The policies that are compared: the paper's, what was added to it one by one, and all together."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from benchmarks.paper_setup import Case, Parameters, config_of
from kvmesh.services.conductor.domain import Fetch
from kvmesh.services.conductor.settings import BalanceSettings, Settings, SizeSettings
from kvmesh.sim.config import SimConfig

ARRIVAL = 1e-18  # a size weight so little that lines go by arrival alone: first come, first served


@dataclass(frozen=True)
class Policy:
    """One way to serve. Defaults: Algorithm 1 as it is printed, every line by arrival."""

    fetch: str = "always"
    threshold: float = 1.0
    size_weight: float = ARRIVAL
    step_tokens: int = 8192  # of prefill; a prompt that is longer is computed alone, chunk by chunk
    others: float = 0.0  # see services/conductor/loads/shortest_first.py
    later: float = 0.0
    overtaking: float = 0.0
    prefills: int = 8  # of 16 instances, at first
    roles: bool = False  # follow load: a leader orders switches
    kept: int = 0  # decode instances that keep theirs
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
    """Its threshold is tuned by hand; how long a step is it does not say."""
    return [
        *(Policy(threshold=one) for one in (1.0, 2.0, 4.0)),
        Policy(step_tokens=4096),
    ]


def better_grid() -> list[Policy]:
    """The weight of sizes, how much of what others lose and of the overtaking that theory foresees is counted, and how
    many decode instances keep their role."""
    base = Policy(step_tokens=4096, later=0.2, roles=True)
    tried = (
        (16.0, 0.5, 0.5, 0),
        (8.0, 0.5, 0.5, 0),
        (16.0, 0.5, 1.0, 0),
        (16.0, 0.5, 1.0, 3),
        (16.0, 0.5, 1.0, 4),
        (16.0, 1.0, 0.5, 3),
        (16.0, 2.0, 0.5, 3),
    )
    return [
        replace(base, size_weight=weight, others=others, overtaking=share, kept=kept)
        for weight, others, share, kept in tried
    ]


PAPER, SPLIT, LED = "paper", "paper, 12 + 4 by hand", "paper, roles follow load"
SIZES, PLACED = "sizes in the line alone", "and placed by what others lose"
LINES, BETTER = "lines by size: and overtaking foreseen", "ours: and roles follow load"
COPIES = "ours, copies of hot prefixes"
BOTH = "ours, 12 + 4 at first"
MAIN = PAPER, SPLIT, LINES, BETTER, BOTH


def added(paper: Policy, better: Policy) -> dict[str, Policy]:
    """What is reported: what each part does alone and on top of the one before it, and what it comes to together."""
    lines = replace(better, roles=False, kept=0)
    return {
        PAPER: paper,
        SPLIT: replace(paper, prefills=12),
        LED: replace(paper, roles=True, kept=better.kept),
        SIZES: replace(lines, others=0.0, later=0.0, overtaking=0.0),
        PLACED: replace(lines, overtaking=0.0),
        LINES: lines,
        BETTER: better,
        BOTH: replace(better, prefills=12),
        COPIES: replace(better, copies=True),
    }


def config(at: Parameters, policy: Policy, admission: str, seed: int) -> SimConfig:
    """The paper's set-up, served so. TBT is judged by the tightest of the paper's thresholds."""
    decodes = at.cluster.nodes - policy.prefills
    base = config_of(at, Case(admission=admission, prefill=policy.prefills, decode=decodes))
    return replace(
        base,
        seed=seed,
        size_weight=policy.size_weight,
        long_tokens=policy.step_tokens,
        chunk_tokens=policy.step_tokens,
        batch_tokens=policy.step_tokens,
        orders=policy.roles or policy.copies,
        kept_decodes=policy.kept,
        conductor=_settings(base.conductor, at, policy),
    )


def _settings(base: Settings, at: Parameters, policy: Policy) -> Settings:
    return replace(
        base,
        slo_tbt_s=at.slo.tbt_s[0],
        fetch=Fetch(policy.fetch),
        balancing_threshold=policy.threshold,
        balance=BalanceSettings(replicate=policy.copies, switch_roles=policy.roles),
        sizes=SizeSettings(policy.others, policy.later, policy.overtaking),
        max_explained=0,
    )

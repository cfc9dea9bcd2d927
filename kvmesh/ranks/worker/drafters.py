"""Which drafters a rank has, by its settings."""

from __future__ import annotations

from collections.abc import Callable

from kvmesh.drafts.drafter import Drafter
from kvmesh.drafts.ngram import NgramDrafter
from kvmesh.drafts.speculator import Speculator
from kvmesh.drafts.suffix import SuffixDrafter
from kvmesh.ranks import protocol as m
from kvmesh.ranks.speculation import NO_DRAFTS, check_speculation
from kvmesh.ranks.wake import axes_of

DRAFTERS: dict[str, tuple[Callable[[], Drafter], ...]] = {
    NO_DRAFTS: (),
    "ngram": (NgramDrafter,),
    "suffix": (SuffixDrafter,),
}


def speculator_of(configure: m.Configure, states: bool) -> Speculator | None:
    """Returns what drafts for a rank, or None. `states`: the model has some, which a draft that is cut changes. Raises
    ConfigError as `check_speculation` and Speculator do."""
    check_speculation(configure.speculate, axes_of(configure))
    drafters = [make() for make in DRAFTERS[configure.speculate]]
    return Speculator(drafters, configure.max_draft_tokens, again=states) if drafters else None

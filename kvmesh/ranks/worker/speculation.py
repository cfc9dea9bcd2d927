"""Which drafters a rank has, by its settings."""

from __future__ import annotations

from collections.abc import Callable

from kvmesh.drafts.drafter import Drafter
from kvmesh.drafts.ngram import NgramDrafter
from kvmesh.drafts.speculator import Speculator
from kvmesh.drafts.suffix import SuffixDrafter
from kvmesh.errors import ConfigError
from kvmesh.ranks import protocol as m
from kvmesh.ranks.wake import axes_of

DRAFTERS: dict[str, tuple[Callable[[], Drafter], ...]] = {
    m.NO_DRAFTS: (),
    "ngram": (NgramDrafter,),
    "suffix": (SuffixDrafter,),
}


def speculator_of(configure: m.Configure, states: bool) -> Speculator | None:
    """Returns what drafts for a rank, or None. `states`: the model has some, which a draft that is cut changes. Raises
    ConfigError naming field and value for an unknown drafter, and for ranks that verify no drafts."""
    if configure.speculate not in DRAFTERS:
        known = ", ".join(DRAFTERS)
        raise ConfigError(f"speculate={configure.speculate!r}: must be one of {known}", field="speculate")
    drafters = [make() for make in DRAFTERS[configure.speculate]]
    if not drafters:
        return None
    axes = axes_of(configure)
    for name in ("pp", "dp", "cp", "dcp"):
        if (size := getattr(axes, name)) > 1:
            why = f"{name}={size}: drafts are verified by one rank, or by ranks of tp"
            raise ConfigError(f"speculate={configure.speculate!r} with {why}", field="speculate")
    return Speculator(drafters, configure.max_draft_tokens, again=states)

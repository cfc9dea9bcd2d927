"""Which drafters a rank has, by its settings."""

from __future__ import annotations

from collections.abc import Callable

from kvmesh.drafts.drafter import Drafter
from kvmesh.drafts.ngram import NgramDrafter
from kvmesh.drafts.speculator import Speculator
from kvmesh.drafts.suffix import SuffixDrafter
from kvmesh.engine.mtp import MtpDrafter
from kvmesh.engine.runner import Runner
from kvmesh.errors import ConfigError
from kvmesh.ranks import protocol as m
from kvmesh.ranks.speculation import NO_DRAFTS, check_speculation
from kvmesh.ranks.wake import axes_of

HEAD_SHARE = 4  # an MTP head has a page for each so many of the model's: its KV begins where decode does


def _mtp(runner: Runner) -> Drafter:
    tokens = runner.attention.most_tokens or runner.config.max_context_tokens
    return MtpDrafter(runner, max(1, tokens // runner.layout.block_tokens // HEAD_SHARE))


DRAFTERS: dict[str, tuple[Callable[[Runner], Drafter], ...]] = {
    NO_DRAFTS: (),
    "ngram": (lambda _: NgramDrafter(),),
    "suffix": (lambda _: SuffixDrafter(),),
    "mtp": (_mtp,),
    "mtp+ngram": (_mtp, lambda _: NgramDrafter()),
}


def wants_mtp(configure: m.Configure) -> bool:
    """Whether the model's MTP head is to be loaded."""
    return _mtp in DRAFTERS.get(configure.speculate, ())


def speculator_of(configure: m.Configure, states: bool, runner: Runner) -> Speculator | None:
    """Returns what drafts for a rank, or None. `states`: the model has some, which a draft that is cut changes. Raises
    ConfigError as `check_speculation` and Speculator do, and for stages of a model with states."""
    axes = axes_of(configure)
    check_speculation(configure.speculate, axes)
    if states and axes.pp > 1 and configure.speculate != NO_DRAFTS:
        why = f"pp={axes.pp}: an earlier stage hears too late that its states have to go back"
        raise ConfigError(f"speculate={configure.speculate!r} with {why}", field="speculate")
    drafters = [make(runner) for make in DRAFTERS[configure.speculate]]
    return Speculator(drafters, configure.max_draft_tokens, again=states) if drafters else None

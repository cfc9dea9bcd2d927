"""Which drafters a rank has, by its settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from kvmesh.drafts.drafter import Drafter
from kvmesh.drafts.ngram import NgramDrafter
from kvmesh.drafts.speculator import Speculator
from kvmesh.drafts.suffix import SuffixDrafter
from kvmesh.engine.checkpoint import Checkpoint, open_checkpoint
from kvmesh.engine.draft_model import FirstRanksDrafter, ModelDrafter, check_draft_model
from kvmesh.engine.mtp import MtpDrafter
from kvmesh.engine.runner import Runner, shard_layout
from kvmesh.errors import ConfigError
from kvmesh.ranks import protocol as m
from kvmesh.ranks.sizing import draft_pages
from kvmesh.ranks.speculation import NO_DRAFTS, check_draft_folder, check_speculation
from kvmesh.ranks.wake import axes_of

HEAD_SHARE = 4  # an MTP head has a page for each so many of the model's: its KV begins where decode does
WARM_UP = -1  # a handle that no row has


class DraftingRank(NamedTuple):
    """Is what drafters of a rank are made of. `draft` is the draft model's checkpoint, where one is named; `rows` is
    what `Runner.use_pages` captures steps of."""

    configure: m.Configure
    runner: Runner
    draft: Checkpoint | None = None
    rows: int | None = None


def _mtp(rank: DraftingRank) -> Drafter:
    return MtpDrafter(rank.runner, max(1, _pages(rank.runner) // HEAD_SHARE))


def _pages(runner: Runner) -> int:
    """Returns how many pages hold all tokens of a rank."""
    tokens = runner.attention.most_tokens or runner.config.max_context_tokens
    return tokens // runner.layout.block_tokens


def _draft(rank: DraftingRank) -> Drafter:
    runner, draft = rank.runner, rank.draft
    assert draft is not None, "check_draft_folder"
    group = runner.mesh.mlp  # all ranks that verify the drafts of one row (`check_speculation`)
    drafter = _model_drafter(rank, draft) if group.rank == 0 else None
    if drafter is not None and group.size == 1:
        return drafter
    return FirstRanksDrafter(ModelDrafter.name, drafter, group, runner.device)


def _model_drafter(rank: DraftingRank, draft: Checkpoint) -> ModelDrafter:
    target, block = rank.runner, rank.runner.layout.block_tokens
    layout = shard_layout(draft.config, target.dtype, block)
    count = draft_pages(_pages(target), target.layout.shard_bytes, layout.shard_bytes)
    pages = torch.zeros((count, *layout.shape), dtype=target.dtype, device=target.device)
    runner = Runner(draft, target.dtype, target.device, block, pages)
    runner.use_pages(pages, rank.configure.cuda_graphs, rank.rows, 0)
    drafter = ModelDrafter(runner, target.config.vocab_size)
    for _ in range(2):  # the first steps take longer than others, which would be held against it
        drafter.begin(WARM_UP, [0], [0])
        drafter.propose([WARM_UP], [2])
        drafter.end(WARM_UP)
    return drafter


def _ngram(_: DraftingRank) -> Drafter:
    return NgramDrafter()


def _suffix(_: DraftingRank) -> Drafter:
    return SuffixDrafter()


DRAFTERS: dict[str, tuple[Callable[[DraftingRank], Drafter], ...]] = {
    NO_DRAFTS: (),
    "ngram": (_ngram,),
    "suffix": (_suffix,),
    "mtp": (_mtp,),
    "mtp+ngram": (_mtp, _ngram),
    "mtp+suffix": (_mtp, _suffix),
    "draft": (_draft,),
    "draft+ngram": (_draft, _ngram),
    "draft+suffix": (_draft, _suffix),
}


def wants_mtp(configure: m.Configure) -> bool:
    """Whether the model's MTP head is to be loaded."""
    return _mtp in DRAFTERS.get(configure.speculate, ())


def draft_checkpoint(configure: m.Configure, target: Checkpoint) -> Checkpoint | None:
    """Returns the draft model that is named. Raises ConfigError as `check_draft_folder` and `check_draft_model` do,
    CheckpointError as `open_checkpoint` does."""
    check_draft_folder(configure.speculate, configure.draft_model)
    if not configure.draft_model:
        return None
    draft = open_checkpoint(configure.draft_model, configure.max_context_tokens)
    check_draft_model(draft, target)
    return draft


def speculator_of(rank: DraftingRank, states: bool) -> Speculator | None:
    """Returns what drafts for a rank, or None. `states`: the model has some, which a draft that is cut changes. Raises
    ConfigError as `check_speculation` and Speculator do, and for stages of a model with states."""
    configure = rank.configure
    axes = axes_of(configure)
    check_speculation(configure.speculate, axes)
    if states and axes.pp > 1 and configure.speculate != NO_DRAFTS:
        why = f"pp={axes.pp}: an earlier stage hears too late that its states have to go back"
        raise ConfigError(f"speculate={configure.speculate!r} with {why}", field="speculate")
    drafters = [make(rank) for make in DRAFTERS[configure.speculate]]
    return Speculator(drafters, configure.max_draft_tokens, again=states) if drafters else None

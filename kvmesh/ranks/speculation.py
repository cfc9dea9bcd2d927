"""Which drafts ranks verify, and which ranks do."""

from __future__ import annotations

from kvmesh.engine.axes import Axes
from kvmesh.errors import ConfigError

NO_DRAFTS = "off"
SPECULATE = (
    NO_DRAFTS,
    "ngram",
    "suffix",
    "mtp",
    "mtp+ngram",
    "mtp+suffix",
    "draft",
    "draft+ngram",
    "draft+suffix",
)


def check_speculation(speculate: str, axes: Axes) -> None:
    """Raises ConfigError naming field and value for an unknown kind of drafts, and for ranks at which it cannot be
    made: every rank drafts for itself, and a model that drafts computes at each of them."""
    if speculate not in SPECULATE:
        raise ConfigError(f"speculate={speculate!r}: must be one of {', '.join(SPECULATE)}", field="speculate")
    if axes.pp > 1 and wants_draft_model(speculate):
        why = "a stage would wait for what the first rank drafts"
        raise ConfigError(f"speculate={speculate!r} with pp={axes.pp}: {why}", field="speculate")
    if not wants_mtp(speculate):
        return
    for name, why in (
        ("pp", "only the last stage has what the head goes on from"),
        ("cp", "the head attends with one rank's context"),
        ("dcp", "the head attends with one rank's context"),
    ):
        if (size := getattr(axes, name)) > 1:
            raise ConfigError(f"speculate={speculate!r} with {name}={size}: {why}", field="speculate")


def wants_draft_model(speculate: str) -> bool:
    """Whether a draft model drafts, alone or beside another drafter."""
    return "draft" in speculate.split("+")


def wants_mtp(speculate: str) -> bool:
    """Whether the model's MTP head drafts, alone or beside another drafter."""
    return "mtp" in speculate.split("+")


def check_draft_folder(speculate: str, draft_model: str) -> None:
    """Raises ConfigError unless the folder of a draft model is named where one drafts, and there alone."""
    if wants_draft_model(speculate) and not draft_model:
        raise ConfigError(f"speculate={speculate!r}: name the draft model's folder (draft_model)", field="draft_model")
    if draft_model and not wants_draft_model(speculate):
        why = f"speculate={speculate!r} asks no draft model: set draft, draft+ngram or draft+suffix"
        raise ConfigError(f"draft_model={draft_model!r}: {why}", field="draft_model")

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
    """Raises ConfigError naming field and value for an unknown kind of drafts, and for ranks that verify none."""
    if speculate not in SPECULATE:
        raise ConfigError(f"speculate={speculate!r}: must be one of {', '.join(SPECULATE)}", field="speculate")
    for name in ("pp", "dp", "cp", "dcp"):
        if speculate != NO_DRAFTS and (size := getattr(axes, name)) > 1:
            why = f"{name}={size}: drafts are verified by one rank, or by ranks of tp"
            raise ConfigError(f"speculate={speculate!r} with {why}", field="speculate")


def wants_draft_model(speculate: str) -> bool:
    """Whether a draft model drafts, alone or beside another drafter."""
    return "draft" in speculate.split("+")


def check_draft_folder(speculate: str, draft_model: str) -> None:
    """Raises ConfigError unless the folder of a draft model is named where one drafts, and there alone."""
    if wants_draft_model(speculate) and not draft_model:
        raise ConfigError(f"speculate={speculate!r}: name the draft model's folder (draft_model)", field="draft_model")
    if draft_model and not wants_draft_model(speculate):
        why = f"speculate={speculate!r} asks no draft model: set draft, draft+ngram or draft+suffix"
        raise ConfigError(f"draft_model={draft_model!r}: {why}", field="draft_model")

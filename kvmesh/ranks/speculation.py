"""Which drafts ranks verify, and which ranks do."""

from __future__ import annotations

from kvmesh.engine.axes import Axes
from kvmesh.errors import ConfigError

NO_DRAFTS = "off"
SPECULATE = (NO_DRAFTS, "ngram", "suffix", "mtp", "mtp+ngram")
COPYING = ("ngram", "suffix")  # kinds that follow from tokens alone, which every rank knows


def check_speculation(speculate: str, axes: Axes) -> None:
    """Raises ConfigError naming field and value for an unknown kind of drafts, and for ranks at which it cannot be
    made: every rank drafts for itself, and a model that drafts computes at each of them."""
    if speculate not in SPECULATE:
        raise ConfigError(f"speculate={speculate!r}: must be one of {', '.join(SPECULATE)}", field="speculate")
    if speculate in (NO_DRAFTS, *COPYING):
        return
    for name, why in (
        ("pp", "only the last stage has what the head goes on from"),
        ("cp", "the head attends with one rank's context"),
        ("dcp", "the head attends with one rank's context"),
    ):
        if (size := getattr(axes, name)) > 1:
            raise ConfigError(f"speculate={speculate!r} with {name}={size}: {why}", field="speculate")

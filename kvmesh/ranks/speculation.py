"""Which drafts ranks verify, and which ranks do."""

from __future__ import annotations

from kvmesh.engine.axes import Axes
from kvmesh.errors import ConfigError

NO_DRAFTS = "off"
SPECULATE = (NO_DRAFTS, "ngram", "suffix", "mtp", "mtp+ngram")


def check_speculation(speculate: str, axes: Axes) -> None:
    """Raises ConfigError naming field and value for an unknown kind of drafts, and for ranks that verify none."""
    if speculate not in SPECULATE:
        raise ConfigError(f"speculate={speculate!r}: must be one of {', '.join(SPECULATE)}", field="speculate")
    for name in ("pp", "dp", "cp", "dcp"):
        if speculate != NO_DRAFTS and (size := getattr(axes, name)) > 1:
            why = f"{name}={size}: drafts are verified by one rank, or by ranks of tp"
            raise ConfigError(f"speculate={speculate!r} with {why}", field="speculate")

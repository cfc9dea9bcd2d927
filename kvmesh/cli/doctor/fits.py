"""How many ranks can share a model along each axis."""

from __future__ import annotations

from kvmesh.cli.doctor.findings import Finding
from kvmesh.engine.axes import Axes
from kvmesh.errors import ConfigError

SIZES = range(2, 65)
BLOCK_TOKENS = 64  # as `kvmesh up` has them by default
WHAT = {
    "tp": "heads and MLPs (tp)",
    "pp": "stages of layers (pp)",
    "cp": "contexts, of prompts and rows (cp)",
    "tp=N,dcp": "contexts, at tp's ranks (dcp)",
    "ep=dp,dp": "experts, requests apart (dp)",
}


def fits(path: str) -> list[Finding]:
    """Says of a checkpoint folder which sizes each axis may have, contexts with blocks of `BLOCK_TOKENS`. Raises
    CheckpointError."""
    from kvmesh.engine.checkpoint import open_checkpoint
    from kvmesh.engine.parallel import check_shares
    from kvmesh.engine.stages import check_stages

    config, found = open_checkpoint(path).config, []
    for name, what in WHAT.items():
        good, why = [], ""
        for size in SIZES:
            axes = Axes.parse(f"{name}={size}".replace("N", str(size)))
            try:
                check_shares(config, axes)
                check_stages(config, axes)
                axes.check_blocks(BLOCK_TOKENS)
            except ConfigError as error:
                why = why or error.message
            else:
                good.append(str(size))
        told = f"{', '.join(good)} ranks" if good else f"one rank only: {why}"
        found.append(Finding(what, "ok", f"{told} (--prefill-mesh, --decode-mesh {name}=N)" if good else told))
    return found

"""How a user gets what an optional feature needs: kvmesh is installed from a clone, and so are its extras."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def install(extra: str, *, package: Path = Path(__file__).parent) -> str:
    """Returns the command that installs the extra. `package` is the folder that kvmesh runs from: inside a clone
    (`make`, `pip install -e .`), or a copy."""
    clone = package.parent
    if (clone / "pyproject.toml").is_file():
        return f"{shlex.quote(sys.executable)} -m pip install -e {shlex.quote(f'{clone}[{extra}]')}"
    return f"{shlex.quote(sys.executable)} -m pip install '.[{extra}]' in the clone that kvmesh was installed from"

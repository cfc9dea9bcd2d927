"""Compiles the native code of the conductor: `python -m kvmesh.native.build`, run once at install (seconds)."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from kvmesh.native import compiling, library

TIMEOUT_S = 300


def compile_into(folder: Path) -> Path:
    """The library in `folder`, compiled unless it is there; all but the newest few builds in that folder go. Raises
    BuildFailed, OSError (folder not writable)."""

    def compile_to(made: Path) -> None:
        sources = map(str, library.sources())
        compiling.run([compiling.compiler(), *library.FLAGS, *sources, "-o", str(made)], TIMEOUT_S)

    return compiling.install(folder / library.file_name(), compile_to, ["native-*.so"])


def main() -> int:
    """Build it where it can be built. Never an error: without it everything works, more slowly."""
    started = time.monotonic()
    if any((folder / library.file_name()).exists() for folder in library.folders()):
        print("native code of decisions: built")
        return 0
    try:
        compiling.in_first(library.folders(), compile_into)
    except compiling.BuildFailed as err:
        print(f"native code of decisions: not built, numpy and plain Python are used; {err}", file=sys.stderr)
    else:
        print(f"built the native code of decisions ({time.monotonic() - started:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())

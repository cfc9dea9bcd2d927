"""Compiles the native code of the conductor: `python -m kvmesh.native.build`, run once at install (seconds)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvmesh.native import library

TIMEOUT_S = 300
COMPILERS = ("c++", "g++", "clang++")


class BuildFailed(Exception):
    """What the compiler said, or that there is none."""


def compiler() -> str:
    """`CXX` if it is set, else the first one that is there. Raises BuildFailed."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else list(COMPILERS)
    for name in names:
        if shutil.which(name):
            return name
    raise BuildFailed(f"no compiler: none of {', '.join(names)} is there")


def compile_into(folder: Path) -> Path:
    """The library in `folder`, compiled unless it is there; older builds in that folder go. Raises BuildFailed,
    OSError (folder not writable)."""
    target = folder / library.file_name()
    if target.exists():
        return target
    tool = compiler()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = str(Path(scratch, target.name))
        run([tool, *library.FLAGS, *map(str, library.sources()), "-o", made])
        os.replace(made, target)  # a process that starts meanwhile finds all of it or nothing
    for old in folder.glob("native-*.so"):
        if old.name != target.name:
            old.unlink(missing_ok=True)
    return target


def run(command: list[str]) -> None:
    """Raises BuildFailed with what the command said."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.CalledProcessError as err:
        raise BuildFailed(f"{' '.join(command)}\n{err.stderr}") from None
    except subprocess.TimeoutExpired:
        raise BuildFailed(f"{' '.join(command)}\nnot done after {TIMEOUT_S} s") from None


def main() -> int:
    """Build it where it can be built. Never an error: without it everything works, more slowly."""
    reason, started = "", time.monotonic()
    for folder in library.folders():
        if (folder / library.file_name()).exists():
            print("native code of decisions: built")
            return 0
    for folder in library.folders():
        try:
            compile_into(folder)
        except (BuildFailed, OSError) as err:
            reason = str(err)
            if isinstance(err, BuildFailed):
                break
        else:
            print(f"built the native code of decisions ({time.monotonic() - started:.0f} s)")
            return 0
    print(f"native code of decisions: not built, numpy and plain Python are used; {reason}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compiles a shared library at install, for `kvmesh.native.build` and `kvmesh.engine.cpu.build`: a folder has all of
a build or none of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

COMPILERS = ("c++", "g++", "clang++")
KEPT = 4  # builds of other sources than these, and this one

T = TypeVar("T")


class BuildFailed(Exception):
    """The message is what the compiler said, or why there is no build."""


def compiler() -> str:
    """Returns `CXX` if it is set, else the first C++ compiler that is there. Raises BuildFailed when there is none."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else list(COMPILERS)
    for name in names:
        if shutil.which(name):
            return name
    raise BuildFailed(f"no compiler: none of {', '.join(names)} is there")


def run(command: list[str], timeout_s: float) -> None:
    """Raises BuildFailed with what the command said."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.CalledProcessError as err:
        raise BuildFailed(f"{' '.join(command)}\n{err.stderr}") from None
    except subprocess.TimeoutExpired:
        raise BuildFailed(f"{' '.join(command)}\nnot done after {timeout_s:g} s") from None


def install(target: Path, compile_to: Callable[[Path], None], older: Iterable[str]) -> Path:
    """Returns `target`, which `compile_to` makes in a folder of its own unless it is there. Of what matches one of the
    patterns `older` beside it, all but the newest `KEPT` builds are removed then: several checkouts may share one
    environment. Raises BuildFailed, or OSError (folder not writable)."""
    if target.exists():
        return target
    folder = target.parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch, target.name)
        compile_to(made)
        os.replace(made, target)  # a process that starts meanwhile finds all of it or nothing
    beside = sorted((path for pattern in older for path in folder.glob(pattern)), key=_made_ns, reverse=True)
    kept = list(dict.fromkeys([target.stem, *(path.stem for path in beside)]))[:KEPT]
    for old in beside:
        if old.stem not in kept:
            old.unlink(missing_ok=True)
    return target


def _made_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # another process removes builds, too
        return 0


def in_first(places: Iterable[Path], compile_into: Callable[[Path], T]) -> T:
    """Returns what `compile_into` gives for the first folder that can be written to. Raises BuildFailed when the
    compiler fails, or no folder can."""
    reason = ""
    for folder in places:
        try:
            return compile_into(folder)
        except OSError as err:
            reason = str(err)
    raise BuildFailed(reason)

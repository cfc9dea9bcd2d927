"""Finds and loads what `kvmesh.native.build` made; never compiles.

No headers but the compiler's own are needed: the library is called through ctypes, and asks the interpreter for the few
functions of its stable ABI that python_abi.h declares. A build is named by its key: flags, machine and the sources'
bytes. So one of other sources is not found.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import sys
from pathlib import Path

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
# No product is fused with a sum, and no sum is reordered: what comes out are numpy's bits.
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-fno-fast-math", "-fvisibility=hidden")
if sys.platform == "darwin":
    FLAGS = (*FLAGS, "-undefined", "dynamic_lookup")
SWITCH = "KVMESH_NATIVE"  # "0": numpy and plain Python, whatever is there
BUILD = "python -m kvmesh.native.build"


def sources() -> list[Path]:
    """What is compiled."""
    return sorted(SOURCES.glob("*.cpp"))


def folders() -> list[Path]:
    """Returns where builds may lie: the virtual environment (if this is one), then the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    own = [Path(sys.prefix, "share", "kvmesh", "native")] if sys.prefix != sys.base_prefix else []
    return [*own, cache / "kvmesh" / "native"]


def file_name() -> str:
    """Of a build of these sources for this machine."""
    digest = hashlib.sha256("\0".join((sys.platform, platform.machine(), *FLAGS)).encode())
    for path in (*sources(), *sorted(SOURCES.glob("*.h"))):
        digest.update(path.read_bytes())
    return f"native-{digest.hexdigest()[:16]}.so"


def find() -> tuple[ctypes.PyDLL | None, str]:
    """The library, or why it cannot be used."""
    if os.environ.get(SWITCH) == "0":
        return None, f"{SWITCH}=0"
    if sys.implementation.name != "cpython":
        return None, f"this is {sys.implementation.name}, not CPython"
    name = file_name()
    path = next((folder / name for folder in folders() if (folder / name).exists()), None)
    if path is None:
        return None, f"no build of these sources: run {BUILD}"
    try:
        return ctypes.PyDLL(str(path)), ""
    except OSError as err:
        return None, f"{path} does not load: {err}"


@functools.cache
def _found() -> tuple[ctypes.PyDLL | None, str]:
    return find()


def library() -> ctypes.PyDLL | None:
    """The library; looks for it once a process. Its functions keep the GIL."""
    return _found()[0]


def why_not() -> str:
    """Why there is none; empty when there is."""
    return _found()[1]


def tell() -> None:
    """One line in the log on what decisions run on, for a service that starts."""
    if why := why_not():
        log.warning("decisions run in numpy and plain Python, at half the speed: %s", why)
    else:
        log.info("decisions run in native code")

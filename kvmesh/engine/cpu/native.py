"""Finds and loads what `kvmesh.engine.cpu.build` made; never compiles.

A build is named by its key: torch's version, compiler flags and the sources' bytes. A build of other sources or for
another torch is thus not found; one for a CPU with more features than this one is refused.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
from pathlib import Path

import torch

from kvmesh.native.library import folders

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
# What the kernels use, as /proc/cpuinfo and as the compiler call it.
FEATURES = {
    "avx2": "-mavx2",
    "fma": "-mfma",
    "avx512f": "-mavx512f",
    "avx512bw": "-mavx512bw",
    "avx512dq": "-mavx512dq",
    "avx512vl": "-mavx512vl",
    "avx512_bf16": "-mavx512bf16",
}
FLAGS = (
    "-O3", "-std=c++20", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-strict-aliasing", "-mprefer-vector-width=512",
    *FEATURES.values(),
)  # fmt: skip
TILES = "KVMESH_AMX"  # "0": no AMX tiles
PROVEN = ".tiles"  # beside a build: AMX tiles have done their sums in a process of their own, on the machine that built
SWITCH = "KVMESH_NATIVE"  # "0": the torch path, whatever is there
# glibc's mallopt: M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, and what they are set to.
HEAP = {-3: 1 << 28, -1: 1 << 29}


def sources() -> list[Path]:
    return sorted(SOURCES.glob("*.cpp"))


def file_name() -> str:
    digest = hashlib.sha256("\0".join((torch.__version__, *FLAGS)).encode())
    for path in (*sources(), *sorted(SOURCES.glob("*.h"))):
        digest.update(path.read_bytes())
    return f"kvmesh-{digest.hexdigest()[:16]}.so"


def missing_features() -> list[str]:
    """Returns the CPU features that the kernels need and this machine lacks, sorted; all of them where it cannot be
    told."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return sorted(FEATURES)
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return sorted(FEATURES.keys() - line.split())


def why_not() -> str:
    """Says why the operators cannot be used here; empty once they are loaded."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    if missing := missing_features():
        return f"this CPU lacks {', '.join(missing)}"
    name = file_name()
    path = next((folder / name for folder in folders() if (folder / name).exists()), None)
    if path is None:
        return "no build for this torch: run python -m kvmesh.engine.cpu.build"
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except OSError as err:
        return f"{path} does not load: {err}"
    wanted = os.environ.get(TILES) != "0" and path.with_suffix(PROVEN).exists()
    if torch.ops.kvmesh.use_tiles.default(int(wanted)):
        log.info("products of several rows and attention of prompts run on AMX tiles")
    return ""


@functools.cache
def loaded() -> bool:
    """Whether `torch.ops.kvmesh` is there; tries once a process and logs one line when it is not."""
    reason = why_not()
    if reason:
        log.info("torch's own operators run on the CPU: %s", reason)
        return False
    keep_heap()
    return True


def keep_heap() -> None:
    """Makes glibc keep freed memory. Tensors of a step come and go, tens of MB each (logits of 64 rows: 39). By default
    glibc maps such anew every time, and every time the system zeroes their pages: 5 % of a decode step of 64 rows.
    Other C libraries are left as they are."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for name, nbytes in HEAP.items():
            mallopt(name, nbytes)

"""Compiles the C++ operators: `python -m kvmesh.engine.cpu.build`, run once at install (seconds to a minute).

Only a compiler is needed: torch brings its headers. OpenMP is not linked: its symbols come from the runtime that torch
has loaded, so that there is one thread pool, torch's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils import cpp_extension

from kvmesh.engine.cpu import native
from kvmesh.native import compiling
from kvmesh.native.library import folders

TIMEOUT_S = 600
PROOF_S = 120


def compile_into(folder: Path) -> Path:
    """Returns the library in `folder`, compiled unless it is there; all but the newest few builds in that folder are
    removed. Raises BuildFailed, or OSError (folder not writable)."""
    return compiling.install(folder / native.file_name(), compile_to, ["kvmesh-*.so", f"kvmesh-*{native.PROVEN}"])


def compile_to(made: Path) -> None:
    """Compiles the operators, each source on a core of its own, and links them to `made`."""
    compiler = compiling.compiler()
    flags = [*native.FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    for path in cpp_extension.include_paths():
        flags += ["-isystem", path]

    def compile_one(source: Path) -> str:
        part = str(made.with_name(source.stem + ".o"))
        compiling.run([compiler, *flags, "-c", str(source), "-o", part], TIMEOUT_S)
        return part

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, native.sources()))
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    compiling.run([compiler, "-shared", *objects, *libraries, "-ltorch_cpu", "-lc10", "-o", str(made)], TIMEOUT_S)


def prove_tiles(library: Path) -> bool:
    """Finds out whether AMX tiles can be used: they have to do a product in a process of their own, which may crash,
    before any server tries. Leaves a mark beside the library."""
    mark = library.with_suffix(native.PROVEN)
    mark.unlink(missing_ok=True)
    asked = f"import torch; torch.ops.load_library({str(library)!r}); exit(not torch.ops.kvmesh.use_tiles(1))"
    try:
        done = subprocess.run([sys.executable, "-c", asked], capture_output=True, timeout=PROOF_S, check=False)
    except subprocess.TimeoutExpired:
        return False
    if done.returncode == 0:
        mark.touch()
    return done.returncode == 0


def main() -> int:
    """Builds what this machine can use. Without a compiler this is no error: everything works without the operators,
    more slowly."""
    if missing := native.missing_features():
        print(f"CPU operators: not built, this CPU lacks {', '.join(missing)}; torch's own are used")
        return 0
    started = time.monotonic()
    if any((folder / native.file_name()).exists() for folder in folders()):
        print("CPU operators: built")
        return 0
    print("building the CPU operators ...", flush=True)
    try:
        tiles = compiling.in_first(folders(), lambda folder: prove_tiles(compile_into(folder)))
    except compiling.BuildFailed as err:
        print(f"CPU operators: not built, torch's own are used; {err}", file=sys.stderr)
    else:
        on = ", AMX tiles are used" if tiles else ""
        print(f"built the CPU operators ({time.monotonic() - started:.0f} s){on}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

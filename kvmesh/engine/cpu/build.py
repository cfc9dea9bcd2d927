"""Compiles the C++ operators: `python -m kvmesh.engine.cpu.build`, run once at install (seconds to a minute).

Only a compiler is needed: torch brings its headers. OpenMP is not linked: its symbols come from the runtime that torch
has loaded, so that there is one thread pool, torch's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils import cpp_extension

from kvmesh.engine.cpu import native

TIMEOUT_S = 600
PROOF_S = 120


class BuildFailed(Exception):
    """The compiler failed; the message is what it said."""


def compile_into(folder: Path) -> Path:
    """Returns the library in `folder`, compiled unless it is there; older builds in that folder are removed. Raises
    BuildFailed, or OSError (no compiler, folder not writable)."""
    target = folder / native.file_name()
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    compiler = cpp_extension.get_cxx_compiler()  # type: ignore[no-untyped-call]
    flags = [*native.FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    for path in cpp_extension.include_paths():
        flags += ["-isystem", path]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:

        def compile_one(source: Path) -> str:
            made = str(Path(scratch, source.stem + ".o"))
            run([compiler, *flags, "-c", str(source), "-o", made])
            return made

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, native.sources()))
        made = str(Path(scratch, target.name))
        folders = [f"-L{path}" for path in cpp_extension.library_paths()]
        run([compiler, "-shared", *objects, *folders, "-ltorch_cpu", "-lc10", "-o", made])
        os.replace(made, target)  # a process that starts meanwhile finds all of it or nothing
    for old in (*folder.glob("kvmesh-*.so"), *folder.glob(f"kvmesh-*{native.PROVEN}")):
        if old.stem != target.stem:
            old.unlink(missing_ok=True)
    return target


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


def run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.CalledProcessError as err:
        raise BuildFailed(f"{' '.join(command)}\n{err.stderr}") from None
    except subprocess.TimeoutExpired:
        raise BuildFailed(f"{' '.join(command)}\nnot done after {TIMEOUT_S} s") from None


def main() -> int:
    """Builds what this machine can use. Without a compiler this is no error: everything works without the operators,
    more slowly."""
    if missing := native.missing_features():
        print(f"CPU operators: not built, this CPU lacks {', '.join(missing)}; torch's own are used")
        return 0
    reason, started = "", time.monotonic()
    for folder in native.folders():
        if (folder / native.file_name()).exists():
            print("CPU operators: built")
            return 0
    print("building the CPU operators ...", flush=True)
    for folder in native.folders():
        try:
            tiles = prove_tiles(compile_into(folder))
        except (BuildFailed, OSError) as err:
            reason = str(err)
            if isinstance(err, BuildFailed):
                break
        else:
            on = ", AMX tiles are used" if tiles else ""
            print(f"built the CPU operators ({time.monotonic() - started:.0f} s){on}")
            return 0
    print(f"CPU operators: not built, torch's own are used; {reason}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

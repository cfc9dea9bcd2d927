"""Which kvmesh this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

SOURCE = "0+source"  # run from its sources, without having been installed


def kvmesh_version() -> str:
    try:
        return version("kvmesh")
    except PackageNotFoundError:
        return SOURCE

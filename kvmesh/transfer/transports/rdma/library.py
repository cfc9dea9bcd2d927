"""pyverbs and the libibverbs it is bound to: found, checked to be of one version, loaded once."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvmesh.errors import TransferError

_INSTALL = "install the python3-pyverbs of the distribution, or the PyPI pyverbs of the installed rdma-core's version"


@dataclass(frozen=True, slots=True)
class Library:
    """pyverbs' modules and libibverbs. Versions are rdma-core's ("44.0"), "" where a package does not say its own."""

    pyverbs_version: str
    libibverbs_version: str
    libibverbs: ctypes.CDLL
    device: Any
    pd: Any
    cq: Any
    qp: Any
    enums: Any
    error: type[Exception]


@cache
def load() -> Library:
    """Loads pyverbs and libibverbs. Raises TransferError, which says what to install, when pyverbs is missing or of
    another version than libibverbs."""
    try:
        device, pd, cq, qp = (importlib.import_module(f"pyverbs.{name}") for name in ("device", "pd", "cq", "qp"))
        error = importlib.import_module("pyverbs.pyverbs_error").PyverbsRDMAError
        enums = _enums()
    except ImportError as err:
        raise TransferError(why_not_imported(err), field="transports") from err
    with open("/proc/self/maps") as maps:
        path = mapped_libibverbs(maps.read())
    libibverbs_version = version_in(path)
    pyverbs_version = _pyverbs_version()
    wrong = why_versions_differ(pyverbs_version, libibverbs_version)
    if wrong:
        raise TransferError(wrong, field="transports")
    library = ctypes.CDLL(path or "libibverbs.so.1", use_errno=True)
    return Library(pyverbs_version, libibverbs_version, library, device, pd, cq, qp, enums, error)


def devices() -> list[str]:
    """Returns the names of the RDMA devices that verbs can open here; empty where the kernel has no verbs."""
    library = load()
    try:
        return [found.name.decode() for found in library.device.get_device_list()]
    except library.error:
        return []


def _enums() -> Any:
    try:
        return importlib.import_module("pyverbs.libibverbs_enums")  # 57 and later
    except ImportError:
        return importlib.import_module("pyverbs.enums")


def _pyverbs_version() -> str:
    try:
        return importlib.metadata.version("pyverbs")
    except importlib.metadata.PackageNotFoundError:
        return ""  # the distribution's package says nothing; the dynamic linker has checked its private symbols


def why_not_imported(err: ImportError) -> str:
    """Returns one line that tells the operator why pyverbs cannot be imported and what to install."""
    text = str(err)
    if "IBVERBS_PRIVATE" in text or "undefined symbol" in text or "version `" in text:
        return f"rdma: pyverbs does not match the installed libibverbs ({text}): {_INSTALL}"
    if "libibverbs" in text or "librdmacm" in text:
        return f"rdma: pyverbs needs rdma-core's libraries ({text}): install libibverbs1 and librdmacm1"
    return f"rdma: pyverbs cannot be imported ({text}): {_INSTALL}"


def why_versions_differ(pyverbs: str, libibverbs: str) -> str:
    """Returns why the two versions do not fit, or "". pyverbs binds private symbols, so major versions must be equal.
    An unknown version counts as fitting; its objects are verified one by one (`verbs`)."""
    if pyverbs and libibverbs and pyverbs.split(".")[0] != libibverbs.split(".")[0]:
        return f"rdma: pyverbs {pyverbs} does not match libibverbs {libibverbs}: {_INSTALL}"
    return ""


def mapped_libibverbs(maps: str) -> str:
    """Returns the path of the mapped libibverbs in a text like /proc/self/maps, or ""."""
    found = re.search(r"(/\S*/libibverbs\.so\.\S+)", maps)
    return found.group(1) if found else ""


def version_in(path: str) -> str:
    """Returns rdma-core's version in a file name: libibverbs.so.1.14.44.0 gives 44.0."""
    found = re.search(r"libibverbs\.so\.\d+\.\d+\.(\d+\.\d+)", path)
    return found.group(1) if found else ""

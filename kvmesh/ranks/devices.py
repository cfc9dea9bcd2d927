"""This module checks the names of the devices that ranks compute on."""

from __future__ import annotations

from kvmesh.errors import ConfigError

STAGED_CPU = "cpu-staged"  # a CPU whose pages are treated as a GPU's are, so that tests see the same order of copies


def check_device(name: str) -> None:
    """Raises ConfigError if this is no name of a device. Whether the device is there, only the rank can see."""
    kind, _, index = name.partition(":")
    if name not in ("cpu", STAGED_CPU, "cuda") and not (kind == "cuda" and index.isdigit()):
        raise ConfigError(f"device={name!r}: must be cpu, cuda, cuda:N or {STAGED_CPU} (for tests)", field="device")


def device_of(name: str, rank: int, ranks: int) -> str:
    """Returns the device of one rank: with several ranks, "cuda" is a GPU for each. Raises ConfigError when they would
    have to share the GPU that is named."""
    if ranks == 1 or not name.startswith("cuda"):
        return name
    if name != "cuda":
        raise ConfigError(f"device={name!r}: {ranks} ranks need a GPU each: cuda", field="device")
    return f"cuda:{rank}"

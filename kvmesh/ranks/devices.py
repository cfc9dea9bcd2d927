"""Names of the devices that ranks compute on."""

from __future__ import annotations

from kvmesh.errors import ConfigError

STAGED_CPU = "cpu-staged"  # a CPU whose pages are treated as a GPU's are: what order matters there, matters here


def check_device(name: str) -> None:
    """ConfigError for what is no device's name; whether it is there, only the rank can see."""
    kind, _, index = name.partition(":")
    if name not in ("cpu", STAGED_CPU, "cuda") and not (kind == "cuda" and index.isdigit()):
        raise ConfigError(f"device={name!r}: must be cpu, cuda, cuda:N or {STAGED_CPU} (for tests)", field="device")


def device_of(name: str, rank: int, ranks: int) -> str:
    """A rank's: with several ranks, "cuda" is a GPU for each. ConfigError: they cannot share the one that is named."""
    if ranks == 1 or not name.startswith("cuda"):
        return name
    if name != "cuda":
        raise ConfigError(f"device={name!r}: {ranks} ranks need a GPU each: cuda", field="device")
    return f"cuda:{rank}"

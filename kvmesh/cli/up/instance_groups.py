"""How many instances of one service a mesh starts, and where and in which numbers each computes: `2,1@cpu:float32`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvmesh.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
MOST = 64
METAVAR = "N[@DEVICE][:DTYPE]"

_ENTRY = re.compile(r"(?P<count>\d+)(?:@(?P<device>cpu|cuda(?::\d+)?))?(?::(?P<dtype>[a-z]+\d*))?")


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """Instances of one service that are told the same. An empty `device` or `dtype` is the mesh's."""

    count: int
    device: str = ""
    dtype: str = ""


def groups_of(key: str, value: int | str) -> tuple[InstanceGroup, ...]:
    """Returns the groups that an option `key` asks for: a number, or entries N[@DEVICE][:DTYPE] with commas between.

    Raises ConfigError, which names the option and the entry, for what is no such entry, for a dtype that engines do not
    compute in, and for more than MOST instances."""
    found = []
    for entry in str(value).split(","):
        match = _ENTRY.fullmatch(entry.strip())
        if match is None:
            why = f"must be {METAVAR}, as 2, 1@cpu:float32 or 1@cuda:0; N is at least 0"
            raise ConfigError(f"{key}={entry.strip()!r}: {why}", field=key)
        device, dtype = match["device"] or "", match["dtype"] or ""
        if dtype and dtype not in DTYPES:
            raise ConfigError(f"{key}={entry.strip()!r}: dtype must be one of {', '.join(DTYPES)}", field=key)
        found.append(InstanceGroup(int(match["count"]), device, dtype))
    if (total := sum(group.count for group in found)) > MOST:
        raise ConfigError(f"{key}={value!r}: at most {MOST} instances, not {total}", field=key)
    return tuple(found)

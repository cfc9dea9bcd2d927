"""Names of members of the mesh. An instance whose ranks form several data-parallel groups is several members, its
places: `decode-0`, `decode-0.dp1`, ... They share a process, and what an operator says of one holds for all."""

from __future__ import annotations

import functools
import re

_PLACE = re.compile(r"\.dp[1-9][0-9]{0,3}\Z")


def place_name(instance_id: str, place: int) -> str:
    """Returns the name of the member at this place on `dp`; the first has the instance's own."""
    return f"{instance_id}.dp{place}" if place else instance_id


@functools.lru_cache(maxsize=16_384)
def instance_of(member_id: str) -> str:
    """Returns the name of the instance whose place this member is."""
    return _PLACE.sub("", member_id)

"""Bounds of the REST listener."""

from __future__ import annotations

import resource
from dataclasses import dataclass

_MOST_CONNECTIONS = 16384  # at 10 KB each


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds of one listener."""

    max_head_bytes: int = 64 << 10
    max_headers: int = 100
    max_url_bytes: int = 8 << 10
    head_timeout_s: float = 10.0
    idle_timeout_s: float = 60.0
    write_timeout_s: float = 60.0
    linger_bytes: int = 16 << 20
    max_connections: int = 0
    max_heads_bytes: int = 32 << 20

    @property
    def connections(self) -> int:
        """Half of the process's descriptors, unless told otherwise: gRPC and sessions need theirs."""
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if descriptors == resource.RLIM_INFINITY:
            descriptors = 2 * _MOST_CONNECTIONS
        return self.max_connections or max(16, min(_MOST_CONNECTIONS, descriptors // 2))


@dataclass(frozen=True, slots=True)
class BodyBounds:
    """How long a body may be, and by when it must be here: `timeout_s` after it began, and a second later for each
    `rate` bytes of it that have come."""

    limit: int
    timeout_s: float
    rate: int

    def by_s(self, received: int) -> float:
        """Seconds from the beginning until more than `received` bytes must have come."""
        return self.timeout_s + received / self.rate

"""Bounds of a gRPC server; configurations name them, so nothing here imports gRPC."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CallLimits:
    """The bounds of a gRPC server. The defaults suit a server that members of the mesh call."""

    message_bytes: int = 64 << 20
    calls: int = 65_536  # at once, of all methods
    streams: int = 8_192  # of one connection; a caller's further calls wait on its side
    connections: int = 32_768
    idle_s: float = 0.0  # a connection without calls is closed after so long; 0: never
    watchers: int = 4_096  # of health
    # Of a public server:
    open_calls: int = 64  # at once of methods that need no key
    receiving: int = 4  # messages that are received at once
    waiting: int = 1_024  # calls that wait to be received; each may hold a window meanwhile
    wait_s: float = 10.0
    receive_s: float = 30.0
    give_way_s: float = 2.0  # a message that takes longer gives its place to one that waits


MEMBERS = CallLimits()

"""The sockets between the ranks of one instance: turns go from the leader to its followers."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from kvmesh.errors import InternalError
from kvmesh.ranks.lockstep import LockstepTurns, Turn

READ_BYTES = 4096


class Followers:
    """The leader's ends, one a follower; none where it is alone. InternalError when a follower takes nothing."""

    def __init__(self, socks: Sequence[socket.socket], timeout_s: float) -> None:
        self._socks = socks
        self._timeout_s = timeout_s
        for sock in socks:
            sock.settimeout(timeout_s)

    def tell(self, turn: Turn | None) -> None:
        """Say it to all."""
        if turn is None:
            return
        for rank, sock in enumerate(self._socks, 1):
            try:
                sock.sendall(turn.encode())
            except OSError as error:
                raise InternalError(f"rank {rank} does not listen: {error or type(error).__name__}") from None


class LeaderPort:
    """A follower's end. InternalError when the leader is gone."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._turns = LockstepTurns()
        self.fileno = sock.fileno()

    def turns(self) -> list[Turn]:
        """What has arrived; never waits."""
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise InternalError(f"rank 0 is gone: {error}") from None
        if not data:
            raise InternalError("rank 0 is gone")
        return self._turns.feed(data)

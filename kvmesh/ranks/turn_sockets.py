"""The sockets that turns take from rank 0 to ranks on other hosts: TCP between the ranks themselves, over the rank
network, as a turn before each step must not wait for two fronts' event loops.

Rank 0 listens on a port of its own and tells where in the store behind the front. A follower that dials shows the
secret which the front gave all ranks of this incarnation; who does not is let go. The front's word is authenticated,
these connections are as plain as the collectives beside them (`rank_network`).
"""

from __future__ import annotations

import hmac
import logging
import socket
import struct
import time
from collections.abc import Collection

from kvmesh.errors import InternalError
from kvmesh.ranks.rendezvous import StoreCaller

log = logging.getLogger("kvmesh.rank")

SECRET_BYTES = 32
GREETING = struct.Struct(f"<{SECRET_BYTES}sI")
KEY = "kvmesh/turns"
GREETING_S = 2.0  # a stranger that says nothing keeps the ranks waiting for no longer
TCP_USER_TIMEOUT = 18  # Linux


def accept_followers(
    caller: StoreCaller, address: str, secret: bytes, ranks: Collection[int], patience_s: float, timeout_s: float
) -> dict[int, socket.socket]:
    """Listens at `address`, tells the followers, and returns a socket for each of `ranks`. Raises InternalError when
    one does not come in time."""
    found: dict[int, socket.socket] = {}
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=len(ranks) + 16) as listener:
        caller.call("set", (KEY,), (f"{address} {listener.getsockname()[1]}".encode(),))
        end = time.monotonic() + patience_s
        while missing := sorted(set(ranks) - set(found)):
            listener.settimeout(max(0.0, end - time.monotonic()) or 0.001)
            try:
                sock, peer = listener.accept()
            except TimeoutError:
                raise InternalError(f"rank {missing[0]} did not come to rank 0 within {patience_s:.0f} s") from None
            rank = _greeted(sock, secret)
            if rank not in missing:
                log.warning("%s: a connection for turns that shows no secret of this instance", peer[0])
                sock.close()
                continue
            _prepare(sock, timeout_s)
            found[rank] = sock
    return found


def dial_leader(caller: StoreCaller, secret: bytes, rank: int, patience_s: float, timeout_s: float) -> socket.socket:
    """Returns the connection of this follower to rank 0. Raises InternalError when there is none."""
    try:
        where = caller.call("get", (KEY,), timeout_s=patience_s)[0].decode()
        address, _, port = where.rpartition(" ")
        sock = socket.create_connection((address, int(port)), timeout_s)
        sock.sendall(GREETING.pack(secret, rank))
    except (OSError, TimeoutError) as error:
        raise InternalError(f"rank 0 cannot be reached: {error}") from None
    _prepare(sock, timeout_s)
    return sock


def _greeted(sock: socket.socket, secret: bytes) -> int:
    """Returns the rank that has come; -1 for a stranger."""
    data, end = b"", time.monotonic() + GREETING_S
    try:
        while len(data) < GREETING.size:
            sock.settimeout(max(0.001, end - time.monotonic()))
            piece = sock.recv(GREETING.size - len(data))
            if not piece:
                return -1
            data += piece
    except OSError:
        return -1
    shown, rank = GREETING.unpack(data)
    return int(rank) if hmac.compare_digest(shown, secret) else -1


def _prepare(sock: socket.socket, timeout_s: float) -> None:
    """A turn goes at once, and a peer whose host is gone is noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, TCP_USER_TIMEOUT, max(1, int(timeout_s * 1000)))

"""Tickets: how a connection over a Unix socket is known to be of somebody who has shown a certificate over gRPC.

The user at the other end of a Unix socket does not say which role a process has, and with a network namespace of the
host's own not even that it can read this process's files (docs/adr/0040-roles-by-certificate.md). So who asks over gRPC
where the fast path is gets a ticket, and greets with it.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

from kvmesh.rpc.authorisation import Identity

TICKET_BYTES = 16
VALID_S = 30.0
MAX_TICKETS = 1024  # that nobody has used yet; the oldest is forgotten when there are more


class CallerTickets:
    """The tickets of one process. Each is good for one connection, once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._issued: OrderedDict[bytes, tuple[float, frozenset[Identity]]] = OrderedDict()

    def issue(self, identities: frozenset[Identity]) -> bytes:
        """Returns a new ticket for a caller who has shown a certificate with these identities."""
        ticket = secrets.token_bytes(TICKET_BYTES)
        self._issued[ticket] = self._clock() + VALID_S, identities
        if len(self._issued) > MAX_TICKETS:
            self._issued.popitem(last=False)
        return ticket

    def redeem(self, ticket: bytes) -> frozenset[Identity] | None:
        """Returns whose ticket it is, and forgets it; None when it was never issued, was used, or is too old."""
        until, identities = self._issued.pop(ticket, (0.0, frozenset()))
        return identities if self._clock() < until else None

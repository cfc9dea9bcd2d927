"""Clients and forks: a forked child cannot use a client of its parent, nor make one of its own.

The event loop and the threads of an inherited client stayed with the parent. In the child that client is closed at
once, without touching the connections that the two share. A new client would hang: gRPC's own threads stayed with the
parent as well, and it starts no others in a child.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

from kvmesh.errors import ConfigError, InvalidRequest, KvmeshError, Unavailable

if TYPE_CHECKING:
    from kvmesh.storeclient.client import StoreClient
    from kvmesh.storeclient.sync import SyncStoreClient

ADVICE = "make clients after the fork only, or start processes by spawn"

_clients: weakref.WeakSet[StoreClient | SyncStoreClient] = weakref.WeakSet()
_inherited: weakref.WeakSet[StoreClient | SyncStoreClient] = weakref.WeakSet()
_made = False  # whether a client was made in this process, or in one that it was forked from
_forked_after = False  # whether this process was forked from one that had made a client


def check() -> None:
    """Raises ConfigError in a process in which no client can work."""
    if _forked_after:
        raise ConfigError(
            f"client: a parent of this process had made one before it was forked: {ADVICE}", field="client"
        )


def watch(client: StoreClient | SyncStoreClient) -> None:
    global _made
    _made = True
    _clients.add(client)


def closed(client: object) -> KvmeshError:
    """Returns the error that a call of a closed client raises."""
    if client in _inherited:
        return InvalidRequest(f"client: it was made before this process was forked: {ADVICE}", field="client")
    return Unavailable("this client is closed")


def _forked() -> None:
    """Runs in the child after a fork, where no other thread runs yet."""
    global _forked_after
    _forked_after = _made
    for client in list(_clients):
        _inherited.add(client)
        client._closed = True


os.register_at_fork(after_in_child=_forked)

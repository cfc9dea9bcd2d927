"""What the parts of one client share."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.kvcache.client.choice import Here
from kvmesh.kvcache.client.config import ClientConfig
from kvmesh.kvcache.client.directory import Directory
from kvmesh.kvcache.client.hints import Hints
from kvmesh.kvcache.client.memory import Memory
from kvmesh.kvcache.client.peers import Peers
from kvmesh.transfer import TransferEngine


@dataclass(frozen=True, slots=True)
class ClientContext:
    """Owned by the client, which closes it after all of them."""

    config: ClientConfig
    engine: TransferEngine
    memory: Memory
    peers: Peers
    directory: Directory
    hints: Hints
    here: Here

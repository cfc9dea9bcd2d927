"""What the parts of one client share."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.storeclient.choice import ReaderLocation
from kvmesh.storeclient.config import ClientConfig
from kvmesh.storeclient.directory import Directory
from kvmesh.storeclient.hints import Hints
from kvmesh.storeclient.memory import Memory
from kvmesh.storeclient.peers import Peers
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
    here: ReaderLocation

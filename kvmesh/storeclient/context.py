"""This module has what the parts of one client share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvmesh.blockservice.peers import PeerPool
from kvmesh.storeclient.config import ClientConfig
from kvmesh.storeclient.directory import Directory
from kvmesh.storeclient.memory import ClientMemory
from kvmesh.storeclient.replicas import Hints, ReaderLocation
from kvmesh.transfer import TransferEngine


@dataclass(frozen=True, slots=True)
class ClientContext:
    """The client owns all of it, and closes it after the parts that use it. `turns` bounds the operations under way;
    see ClientConfig.concurrency."""

    config: ClientConfig
    engine: TransferEngine
    memory: ClientMemory
    peers: PeerPool
    directory: Directory
    hints: Hints
    here: ReaderLocation
    turns: asyncio.Semaphore


class EngineSegments:
    """Nodes' segments that this process's own engine has open, counted by users: two addresses may lead to one node."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._users: dict[str, int] = {}

    def open(self, descriptor: bytes) -> str:
        """See `SegmentOpener`."""
        name = self._engine.open_segment(descriptor)
        self._users[name] = self._users.get(name, 0) + 1
        return name

    def release(self, name: str) -> None:
        """See `SegmentOpener`."""
        self._users[name] -= 1
        if not self._users[name]:
            del self._users[name]
            self._engine.close_segment(name)

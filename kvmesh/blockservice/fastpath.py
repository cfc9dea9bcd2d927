"""The fast paths of a node store: its calls over a Unix socket and a TCP port, beside gRPC."""

from __future__ import annotations

import logging

from kvmesh.blockservice.peers import SERVICE, this_machine
from kvmesh.blockservice.servicer import NodeStoreServicer
from kvmesh.errors import ConfigError
from kvmesh.rpc import security
from kvmesh.rpc.fastpath.server import FastServer
from kvmesh.rpc.pb import blocks_pb2 as pb

log = logging.getLogger(__name__)


class FastPathServers:
    """One life's. None is open before `open`; `close` it before what the servicer stands on ends."""

    def __init__(self, servicer: NodeStoreServicer, life: int) -> None:
        self._server = FastServer(SERVICE, servicer, life)
        self.index_path = ""  # of the socket that hands over the index of what is sealed here
        machine, network = this_machine()
        self._told = pb.DoorsResponse(incarnation=life, machine=machine, network=network)

    async def open(self, host: str, port: int) -> None:
        """`port` 0: any free one, -1: none. ConfigError: door_port is in use.

        Where TLS is configured there is none over TCP: nothing that gRPC would hide goes by it in the clear."""
        if port >= 0 and security.current().server_credentials() is None:
            try:
                self._told.calls_port = await self._server.listen_tcp(host, port, "door_port")
            except ConfigError:
                if port:
                    raise
                log.warning("no door over TCP", exc_info=True)
        try:
            self._told.calls_path = await self._server.listen_unix()
        except OSError as error:
            log.warning("no door over a Unix socket: %s", error)

    def describe(self) -> pb.DoorsResponse:
        """What callers hear of them."""
        self._told.index_path = self.index_path
        return self._told

    async def close(self) -> None:
        """Bounded. Idempotent."""
        self._told.calls_path, self._told.calls_port = "", 0
        await self._server.close()

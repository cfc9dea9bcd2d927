"""The holder's side: NodeStore over gRPC. Every input is checked before anything is touched.

`lease_rpcs` (readers), `block_rpcs` (which blocks are here, removal, pins), `copy_rpcs` (blocks that come here).
"""

from __future__ import annotations

from kvmesh.blockservice.block_rpcs import BlockRpcs
from kvmesh.blockservice.copy_rpcs import CopyRpcs
from kvmesh.blockservice.lease_rpcs import LeaseRpcs
from kvmesh.blockservice.rpc_checks import ServedNode
from kvmesh.rpc.pb import blocks_pb2_grpc as pb_grpc

SERVICE = "kvmesh.v1.NodeStore"


class NodeStoreServicer(LeaseRpcs, BlockRpcs, CopyRpcs, pb_grpc.NodeStoreServicer):
    """One node's. Errors are named ones; a refused call has changed nothing."""

    def __init__(self, node: ServedNode) -> None:
        self._node = node

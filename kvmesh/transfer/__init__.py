"""The Transfer Engine: bytes between registered memory regions, and the fence that ends them.

`api` is the contract, `engine.TransferEngine` what callers use. It knows nothing of KV, models or requests.
"""

from kvmesh.errors import TransferError
from kvmesh.transfer.api import (
    BatchId,
    Carried,
    Notification,
    Opcode,
    Range,
    Region,
    TrafficClass,
    TransferRequest,
    TransferState,
    TransferStatus,
)
from kvmesh.transfer.config import EngineConfig
from kvmesh.transfer.engine import TransferEngine
from kvmesh.transfer.groups import GroupLanding, GroupWrite
from kvmesh.transfer.mapped import copy_mapped, peek
from kvmesh.transfer.segment import RegionInfo, SegmentDescriptor

__all__ = [
    "BatchId",
    "Carried",
    "EngineConfig",
    "GroupLanding",
    "GroupWrite",
    "Notification",
    "Opcode",
    "Range",
    "Region",
    "RegionInfo",
    "SegmentDescriptor",
    "TrafficClass",
    "TransferEngine",
    "TransferError",
    "TransferRequest",
    "TransferState",
    "TransferStatus",
    "copy_mapped",
    "peek",
]

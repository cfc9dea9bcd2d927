"""The highest term this node has heard from any master: one object, heard by all loops, checked before an order."""

from kvmesh.rpc.masters import Terms

__all__ = ["Terms"]

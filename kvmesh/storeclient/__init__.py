"""The public client of the Store (docs/howto/store-client.md): `StoreClient` for asyncio, `SyncStoreClient` else."""

from kvmesh.storeclient.calls import Source, Target
from kvmesh.storeclient.client import StoreClient
from kvmesh.storeclient.config import ClientConfig
from kvmesh.storeclient.directory import Quota, Removed
from kvmesh.storeclient.holding import Place
from kvmesh.storeclient.memory import Buffer, Data, Span
from kvmesh.storeclient.moving import Moved
from kvmesh.storeclient.naming import content_key
from kvmesh.storeclient.own_keys import Ref
from kvmesh.storeclient.prefetching import Policy
from kvmesh.storeclient.reading import Got
from kvmesh.storeclient.sync import SyncStoreClient
from kvmesh.storeclient.writing import Pin, Put

__all__ = [
    "Buffer",
    "ClientConfig",
    "Data",
    "Got",
    "Moved",
    "Pin",
    "Place",
    "Policy",
    "Put",
    "Quota",
    "Ref",
    "Removed",
    "Source",
    "Span",
    "StoreClient",
    "SyncStoreClient",
    "Target",
    "content_key",
]

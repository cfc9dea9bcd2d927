"""The public client of the Store (docs/howto/store-client.md): `StoreClient` for asyncio, `SyncStoreClient` for
blocking calls."""

from kvmesh.storeclient.client import StoreClient
from kvmesh.storeclient.config import ClientConfig
from kvmesh.storeclient.copying import Moved, Policy
from kvmesh.storeclient.directory import Quota, Removed
from kvmesh.storeclient.holding import Place
from kvmesh.storeclient.memory import Buffer, Data, Source, Span, Target
from kvmesh.storeclient.naming import Ref, content_key
from kvmesh.storeclient.reading.leased import Got
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

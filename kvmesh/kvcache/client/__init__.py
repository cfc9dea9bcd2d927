"""The public client of the Store (docs/store-client.md): `StoreClient` for asyncio, `SyncStoreClient` for the rest."""

from kvmesh.kvcache.client.calls import Source, Target
from kvmesh.kvcache.client.client import StoreClient
from kvmesh.kvcache.client.config import ClientConfig
from kvmesh.kvcache.client.directory import Quota, Removed
from kvmesh.kvcache.client.holding import Place
from kvmesh.kvcache.client.memory import Buffer, Data, Span
from kvmesh.kvcache.client.moving import Moved
from kvmesh.kvcache.client.naming import content_key
from kvmesh.kvcache.client.ownkeys import Ref
from kvmesh.kvcache.client.prefetching import Policy
from kvmesh.kvcache.client.reading import Got
from kvmesh.kvcache.client.sync import SyncStoreClient
from kvmesh.kvcache.client.writing import Pin, Put

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

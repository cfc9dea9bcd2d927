"""The public client's older name: users import `kvmesh.kvcache.client`. The client itself is `kvmesh.storeclient`."""

from kvmesh.storeclient import *  # noqa: F403
from kvmesh.storeclient import __all__ as __all__

"""What each tenant may have at this node, as the master says it: enforced over turns of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from kvmesh.blockservice.partitions import Partitions


class QuotaEnforcer:
    """Of one node, on its loop. `start`: makes a task that ends with the node."""

    def __init__(
        self, partitions: Partitions, start: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
    ) -> None:
        self._partitions = partitions
        self._start = start
        self._enforcing: asyncio.Task[None] | None = None

    def told(self, limits: Mapping[bytes, int]) -> None:
        """These and no others, from now on."""
        self._partitions.quotas.limit(limits, [partition.store for partition in self._partitions.all()])
        self.enforce()

    def enforce(self) -> None:
        """A step, and in later turns all others that lead somewhere. To be said now and then, as blocks come free."""
        if (self._enforcing is None or self._enforcing.done()) and self._partitions.quotas.enforce():
            self._enforcing = self._start(self._go_on(), "enforce quotas")

    async def _go_on(self) -> None:
        more = True
        while more:
            await asyncio.sleep(0)
            more = self._partitions.quotas.enforce()
            self._partitions.settle()

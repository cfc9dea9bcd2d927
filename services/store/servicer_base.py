"""What the parts of the StoreMaster servicer share."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from kvmesh.errors import InvalidRequest, KvmeshError
from kvmesh.rpc.pb import store_pb2_grpc as pb_grpc
from services.store.domain import Event, Heard
from services.store.durable import Durable
from services.store.orders import StoreOrderQueue
from services.store.policy.records import Write
from services.store.state import MasterState

log = logging.getLogger(__name__)


class Base(pb_grpc.StoreMasterServicer, ABC):
    """Its attributes are set by `StoreMasterServicer`."""

    _state: MasterState
    _clock: Callable[[], float]
    _durable: Durable
    _orders: StoreOrderQueue
    _owing = False  # what the policy owes is being kept
    _books: asyncio.Lock  # one change of what is kept at a time: what is not kept yet is told to nobody

    @property
    def term(self) -> int:
        """Under which this master leads, or led last."""
        return self._state.policy.term

    @abstractmethod
    def _step(self, event: Event) -> Heard | None:
        """Apply one event now. Raises what the brain refuses, NotLeader."""

    async def _keep(self, writes: Sequence[Write]) -> None:
        """To be known to the next leader before anybody is answered. Raises StaleTerm, Unavailable."""
        for write in writes:
            if write.puts:
                await self._durable.put(write.kind, write.puts, self.term)
            if write.drops:
                await self._durable.delete(write.kind, write.drops, self.term)

    async def _keep_meanwhile(self, writes: Sequence[Write]) -> None:
        """As `_keep`, when nobody waits for it, and what the policy owes: what is kept too long does no harm, or is
        tried again."""
        self._owing, every = True, list(writes)
        try:
            async with self._books:
                every += self._state.policy.owed()
                await self._keep(every)
        except KvmeshError as error:
            log.warning("what was forgotten is still kept: %s", error)
            self._state.policy.not_kept(every)
        finally:
            self._owing = False


def text(field: str, value: str, most: int, *, empty: bool = True) -> str:
    """`value`, when it may stand in the master's books. Raises InvalidRequest naming `field`."""
    if not value and not empty:
        raise InvalidRequest.of(field, value, "must not be empty")
    if len(value.encode()) > most:
        raise InvalidRequest.of(field, value, f"has more than {most} bytes")
    if "\0" in value:
        raise InvalidRequest.of(field, value, "holds a NUL")
    return value

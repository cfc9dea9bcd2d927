"""Orders that are carried out to their end, though whoever gave them goes away: gRPC cancels a call with its caller."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvmesh.errors import InvalidRequest, KvmeshError

log = logging.getLogger(__name__)

ORDERS_KEPT = 64

Answer = TypeVar("Answer")


class RunningOrders:
    """Owns the orders that are under way, and keeps the answers of the last ones. Each has a deadline of its own; all
    belong to one event loop and end with it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._known: OrderedDict[str, tuple[str, asyncio.Task[Any]]] = OrderedDict()  # what is ordered, by id

    async def carry_out(self, order: Coroutine[Any, Any, Answer], order_id: str = "", what: str = "") -> Answer:
        """Returns what `order` returns, and raises what it raises. It goes on when this call is cancelled. One of an id
        that is known is not carried out again: its answer is the first one's, unless that was an error after which one
        may try again. Raises InvalidRequest where that id was of something else than `what`."""
        try:
            task = self._repeated(order_id, what) if order_id else None
        except InvalidRequest:
            order.close()
            raise
        if task is not None:
            order.close()
        else:
            task = asyncio.create_task(order)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            if order_id:
                self._known[order_id] = what, task
                while len(self._known) > ORDERS_KEPT:
                    self._known.popitem(last=False)
        try:
            answer: Answer = await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                task.add_done_callback(_log_end)
            raise
        return answer

    def _repeated(self, order_id: str, what: str) -> asyncio.Task[Any] | None:
        known, task = self._known.get(order_id, ("", None))
        if task is None or (task.done() and _may_try_again(task)):
            return None
        if known != what:
            raise InvalidRequest.of("order_id", order_id, f"was given to another order: {known}")
        return task


def _may_try_again(task: asyncio.Task[Any]) -> bool:
    if task.cancelled():
        return True
    error = task.exception()
    return error is not None and (not isinstance(error, KvmeshError) or error.retryable)


def _log_end(task: asyncio.Task[Any]) -> None:
    """Tells how an order ended whose caller cannot hear it any more."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("an order whose caller has gone failed: %s", error)

"""What all requests of a gateway share."""

from __future__ import annotations

import asyncio
import datetime
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from kvmesh.rpc.traces import TraceKeeper
from kvmesh.services.gateway.api_keys import Tenant
from kvmesh.services.gateway.concurrency import AnswerRoom
from kvmesh.services.gateway.conductor import Catalog, Conductor
from kvmesh.services.gateway.config import GatewayConfig
from kvmesh.services.gateway.generation import Generation
from kvmesh.services.gateway.hold_gate import HoldGate
from kvmesh.services.gateway.key_file import KeyFile
from kvmesh.services.gateway.models import Model, Models, ServedModelFacts
from kvmesh.services.gateway.pauses import PauseGate
from kvmesh.services.gateway.quota_book import QuotaBook
from kvmesh.services.gateway.request_memory import WORK_TIMEOUT_S, RequestMemory, tokenize_cost
from kvmesh.services.gateway.rest.response_store import MemoryResponses, ResponseStore
from kvmesh.services.gateway.sessions import Sessions
from kvmesh.services.gateway.text.prepare import ModelBounds, Prepared
from kvmesh.telemetry import names

if TYPE_CHECKING:
    from kvmesh.services.gateway.requests import Request

_SMALL_WORK_BYTES = 4 << 20
Made = TypeVar("Made")


class GatewayCore:
    """The models and who may use them, the way to the conductor, the sessions to decode, the requests in flight."""

    def __init__(
        self,
        config: GatewayConfig,
        models: Models,
        keys: KeyFile,
        conductor: Conductor,
        sessions: Sessions,
        catalog: Catalog,
        memory: RequestMemory | None = None,
        responses: ResponseStore | None = None,
        quotas: QuotaBook | None = None,
        holds: HoldGate | None = None,
    ) -> None:
        self.config = config
        self.models = models
        self.keys = keys
        self.conductor = conductor
        self.sessions = sessions
        self.catalog = catalog
        self.memory = memory or RequestMemory(config.request_memory)
        bounds = config.response_bounds
        self.responses = responses or ResponseStore(MemoryResponses(bounds), bounds)
        self.traces = TraceKeeper()
        self.pauses = PauseGate()
        self.holds = holds or HoldGate(config.hold_limits, models.names)
        self.quotas = quotas or QuotaBook()
        self.room = AnswerRoom(config.max_answers)
        self.running: set[Request] = set()
        self.idle = asyncio.Event()
        self.idle.set()
        self.leaving = False  # nobody should send it new requests; what comes all the same is served
        self.stopping = False  # what runs is being ended
        self._preparing: set[asyncio.Task[Any]] = set()
        self._pool = ThreadPoolExecutor(config.threads, thread_name_prefix="tokenize")

    def enter(self, request: Request) -> None:
        """`request` begins. Raises Overloaded when there is no room for its answers."""
        self.room.enter(request.generation.choices)
        self.running.add(request)
        self.idle.clear()
        names.GATEWAY_RUNNING.set(len(self.running))

    def leave(self, request: Request) -> None:
        """`request` has ended and holds nothing any more."""
        self.running.discard(request)
        self.room.leave(request.generation.choices)
        if not self.running:
            self.idle.set()
        names.GATEWAY_RUNNING.set(len(self.running))

    def queues(self) -> dict[str, tuple[int, int]]:
        """Returns of each model with requests how many wait for their first token, and how many have it. Any thread
        may call it."""
        found = dict[str, tuple[int, int]]()
        for request in list(self.running):
            model, has_token = request.account.served_model, request.account.first_token_ns > 0
            waiting, running = found.get(model, (0, 0))
            found[model] = (waiting + (not has_token), running + has_token)
        return found

    @property
    def not_ready_reason(self) -> str:
        """ "" while requests of any model can be served."""
        return "shutting down" if self.leaving else self.models.not_ready_reason

    async def prepare(
        self, generation: Generation, model: Model, facts: ServedModelFacts, tenant: Tenant
    ) -> list[Prepared]:
        """Template, tokens and keys, off the event loop."""
        bounds = ModelBounds(facts.block_tokens, facts.max_context_tokens, facts.vocab_size)
        namespace = facts.namespace(tenant, generation.cache_salt)
        now = datetime.datetime.now
        work = functools.partial(model.preparer.prepare, generation, namespace, bounds, now)
        return await self.in_thread(tokenize_cost(generation.prompts), work)

    async def in_thread(self, cost: int, work: Callable[[], Made]) -> Made:
        """Does `work`, which takes about `cost` bytes of memory, off the event loop. Raises Overloaded when there is no
        room for it in time."""
        if cost <= _SMALL_WORK_BYTES:  # as many as there are threads
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        # Who waits may go; the thread that has begun works on, and its memory is taken until it has ended.
        task = asyncio.create_task(self._in_turn(cost, work))
        self._preparing.add(task)
        task.add_done_callback(self._prepared)
        return await asyncio.shield(task)

    async def _in_turn(self, cost: int, work: Callable[[], Made]) -> Made:
        async with self.memory.work(min(cost, self.memory.work_limit), WORK_TIMEOUT_S):
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _prepared(self, task: asyncio.Task[Any]) -> None:
        self._preparing.discard(task)
        if not task.cancelled():
            task.exception()  # nobody may be left to take it

    def close(self) -> None:
        """Let the threads end; what they still work on is of no use to anybody."""
        self._pool.shutdown(wait=False, cancel_futures=True)

"""What all requests of a gateway share."""

from __future__ import annotations

import asyncio
import datetime
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvmesh.telemetry import names
from services.gateway.api_keys import Tenant
from services.gateway.conductor import Catalog, Conductor
from services.gateway.config import GatewayConfig
from services.gateway.generation import Generation
from services.gateway.key_file import KeyFile
from services.gateway.models import Facts, Model, Models
from services.gateway.prepare import ModelBounds, Prepared
from services.gateway.sessions import Sessions

if TYPE_CHECKING:
    from services.gateway.requests import Request


class Core:
    """The models and who may use them, the way to the conductor, the sessions to decode, the requests in flight."""

    def __init__(
        self,
        config: GatewayConfig,
        models: Models,
        keys: KeyFile,
        conductor: Conductor,
        sessions: Sessions,
        catalog: Catalog,
    ) -> None:
        self.config = config
        self.models = models
        self.keys = keys
        self.conductor = conductor
        self.sessions = sessions
        self.catalog = catalog
        self.running: set[Request] = set()
        self.idle = asyncio.Event()
        self.idle.set()
        self.leaving = False  # nobody should send it new requests; what comes all the same is served
        self.stopping = False  # what runs is being ended
        self._pool = ThreadPoolExecutor(config.threads, thread_name_prefix="tokenize")

    def enter(self, request: Request) -> None:
        """`request` begins."""
        self.running.add(request)
        self.idle.clear()
        names.GATEWAY_RUNNING.set(len(self.running))

    def leave(self, request: Request) -> None:
        """`request` has ended and holds nothing any more."""
        self.running.discard(request)
        if not self.running:
            self.idle.set()
        names.GATEWAY_RUNNING.set(len(self.running))

    @property
    def not_ready_reason(self) -> str:
        """ "" while requests of any model can be served."""
        return "shutting down" if self.leaving else self.models.not_ready_reason

    async def prepare(self, generation: Generation, model: Model, facts: Facts, tenant: Tenant) -> list[Prepared]:
        """Template, tokens and keys, off the event loop."""
        bounds = ModelBounds(facts.block_tokens, facts.max_context_tokens, facts.vocab_size)
        namespace = facts.namespace(tenant, generation.cache_salt)
        now = datetime.datetime.now
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, model.preparer.prepare, generation, namespace, bounds, now
        )

    def close(self) -> None:
        """Let the threads end; what they still work on is of no use to anybody."""
        self._pool.shutdown(wait=False, cancel_futures=True)

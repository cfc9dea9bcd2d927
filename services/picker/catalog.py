"""What may be picked: engines as the conductor knows them, gateways as they say themselves; looked up every second."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import time
from collections.abc import Callable, Collection, Sequence
from urllib.parse import urlsplit

import httpx

from kvmesh.errors import KvmeshError
from kvmesh.rpc.addresses import split_address
from kvmesh.rpc.pb import conductor_pb2
from kvmesh.rpc.server import join
from kvmesh.services.gateway.conductor import PLACED_S, Conductor
from kvmesh.services.gateway.models import ServedModelFacts
from kvmesh.services.picker.decide import PickableEngine, PickableGateway
from kvmesh.telemetry import names

log = logging.getLogger(__name__)

LOOK_S = 1.0
PROBE_TIMEOUT_S = 1.0
RESOLVE_TIMEOUT_S = 2.0
RESOLVED_S = 5.0  # so long an address that was found for a name is believed
FORGET_S = 30.0  # a conductor that is silent for so long knows nothing of its instances any more


class EndpointNames:
    """Addresses of names, `ip:port` each: proxies are told no names. A name may stand for several (the pods behind a
    headless service). What cannot be found keeps its last addresses."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._found: dict[str, tuple[tuple[str, ...], float]] = {}

    async def addresses_of(self, name: str) -> tuple[str, ...]:
        """Returns each `ip:port` of a `host:port`, in order; () while none was ever found."""
        host, port = split_address(name)
        with contextlib.suppress(ValueError):
            return (join(str(ipaddress.ip_address(host)), port),)
        found, at = self._found.get(name, ((), float("-inf")))
        if found and self._clock() < at + RESOLVED_S:
            return found
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError, TimeoutError) as err:
            log.warning("endpoint %s: its address is not found: %s", name, err or "too slow")
            return found
        found = tuple(sorted({join(str(info[4][0]), port) for info in infos}))
        self._found[name] = found, self._clock()
        return found

    def keep_only(self, living: Collection[str]) -> None:
        """Forgets the addresses of all other names."""
        for name in self._found.keys() - set(living):
            del self._found[name]


def url_address(url: str) -> str:
    """Returns `host:port` of an engine's URL; "" when it has no host, or its port is none."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    except ValueError:
        return ""
    return join(parts.hostname, port) if parts.hostname and port else ""


class EndpointCatalog:
    """Engines, gateways and the facts of models, as of the last look. `sent` counts the requests by endpoint that this
    picker sent there by its own choice and that are not over."""

    def __init__(
        self, conductor: Conductor, gateways: Sequence[str], *, probes: bool, on_ready: Callable[[bool, str], None]
    ) -> None:
        """`probes`: gateways are asked whether they are ready. `on_ready` hears whether there is an endpoint, and if
        not, why."""
        self._conductor = conductor
        self._gateway_names = tuple(gateways)
        self._probes = probes
        self._on_ready = on_ready
        self._names = EndpointNames()
        self._ready_gateways: dict[str, bool] = {}  # by address
        self._by_id: dict[str, PickableEngine] = {}
        self._by_address: dict[str, PickableEngine] = {}
        self._by_model: dict[str, list[PickableEngine]] = {}
        self._looked_at = float("-inf")
        self.why_not = "the conductor has not answered yet"
        self.facts: dict[str, ServedModelFacts] = {}
        self.sent: dict[str, int] = {}

    def engine(self, instance_id: str) -> PickableEngine | None:
        """Returns the engine of that name, if it has a URL."""
        return self._by_id.get(instance_id)

    def at(self, address: str) -> PickableEngine | None:
        """Returns the engine at that `ip:port`."""
        return self._by_address.get(address)

    def engines(self, model: str) -> list[PickableEngine]:
        """Returns the engines that serve `model`; "" stands for any."""
        return self._by_model.get(model, []) if model else list(self._by_id.values())

    @property
    def engine_models(self) -> Collection[str]:
        """The models that engines serve."""
        return self._by_model.keys()

    @property
    def gateways(self) -> list[PickableGateway]:
        """All gateways that have an address, with what was sent there."""
        return [
            PickableGateway(address, ready, self.sent.get(address, 0))
            for address, ready in self._ready_gateways.items()
        ]

    def enter(self, address: str) -> None:
        """A request was sent to that endpoint."""
        self.sent[address] = self.sent.get(address, 0) + 1

    def leave(self, address: str) -> None:
        """It is over."""
        left = self.sent.get(address, 0) - 1
        if left > 0:
            self.sent[address] = left
        else:
            self.sent.pop(address, None)

    # ── looks ─────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Looks until cancelled."""
        async with httpx.AsyncClient(timeout=PROBE_TIMEOUT_S, trust_env=False) as client:
            while True:
                await self.look(client)
                await asyncio.sleep(LOOK_S)

    async def look(self, client: httpx.AsyncClient) -> None:
        """Looks at everything once."""
        asking = asyncio.create_task(self._ask())
        resolved = await asyncio.gather(*map(self._names.addresses_of, self._gateway_names))
        addresses = list(dict.fromkeys(address for some in resolved for address in some))
        states = await asyncio.gather(*(self._probe(client, address) for address in addresses))
        found = await asking
        self._ready_gateways = dict(zip(addresses, states, strict=True))
        await self._take(found)
        self._names.keep_only([*self._gateway_names, *(url_address(one.http_url) for one in found or ())])
        ready = sum(self._ready_gateways.values()), sum(one.ready for one in self._by_id.values())
        for kind, count in zip(("gateway", "engine"), ready, strict=True):
            names.PICKER_ENDPOINTS.labels(kind=kind).set(count)
        self._on_ready(any(ready), "" if any(ready) else self.why_not or "no endpoint is ready")

    async def _ask(self) -> list[conductor_pb2.InstanceStatus] | None:
        try:
            cards, instances = await self._conductor.look()
        except KvmeshError as err:
            if self.why_not != err.message:
                log.warning("%s", err.message)
            self.why_not = err.message
            return None
        self.why_not = ""
        self.facts = {name: ServedModelFacts.of(card) for name, card in cards.items()}
        return [one for one in instances if one.http_url]

    async def _take(self, told: list[conductor_pb2.InstanceStatus] | None) -> None:
        now = asyncio.get_running_loop().time()
        if told is None:
            if now > max(self._looked_at + FORGET_S, self._conductor.placed_at + PLACED_S):
                self._set([])
            return
        self._looked_at = now
        addresses = await asyncio.gather(*map(self._address, told))
        self._set([_engine(one, address) for one, address in zip(told, addresses, strict=True) if address])

    async def _address(self, one: conductor_pb2.InstanceStatus) -> str:
        name = url_address(one.http_url)
        return next(iter(await self._names.addresses_of(name)), "") if name else ""

    def _set(self, engines: Sequence[PickableEngine]) -> None:
        self._by_id = {one.instance_id: one for one in engines}
        self._by_address = {one.address: one for one in engines}
        by_model: dict[str, list[PickableEngine]] = {}
        for one in engines:
            by_model.setdefault(one.model, []).append(one)
        self._by_model = by_model

    async def _probe(self, client: httpx.AsyncClient, address: str) -> bool:
        if not self._probes:
            return True
        try:
            return (await client.get(f"http://{address}/ready")).status_code == 200
        except httpx.HTTPError as err:
            if self._ready_gateways.get(address, True):
                log.warning("gateway %s is not ready: %s", address, err or type(err).__name__)
            return False


def _engine(told: conductor_pb2.InstanceStatus, address: str) -> PickableEngine:
    load = told.load
    waiting = load.queued_requests + load.running_requests + load.waiting_requests
    requests = max(told.pending_requests, waiting)
    return PickableEngine(told.instance.instance_id, address, told.model, told.ready, told.queue_ms / 1000, requests)


def endpoints_ready(engines: Collection[PickableEngine], gateways: Collection[PickableGateway]) -> tuple[int, int]:
    """Returns how many endpoints there are, and how many of them are ready."""
    everyone = [one.ready for one in engines] + [one.ready for one in gateways]
    return len(everyone), sum(everyone)

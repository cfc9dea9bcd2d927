"""All that one vLLM worker has for pushes: a transfer engine, a control channel, what sends and what receives.

prefill   hold ─▶ (decode asks) ─▶ pushes ─▶ freed
decode    receive ─▶ windows ─▶ poll; release, where the prompt is not wanted
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Sequence

from kvmesh.connectors.vllm.book import HandoffOrders, ReceiveOrder
from kvmesh.connectors.vllm.config import ConnectorConfig
from kvmesh.connectors.vllm.counts import WorkerCounts
from kvmesh.connectors.vllm.mover import Pages
from kvmesh.connectors.vllm.push.arrivals import ReceivedPages
from kvmesh.connectors.vllm.push.endpoint import PushEndpoint
from kvmesh.connectors.vllm.push.receiver import PageReceiver
from kvmesh.connectors.vllm.push.sender import PageSender
from kvmesh.connectors.vllm.remote import PushRank
from kvmesh.rpc import security
from kvmesh.storeclient.config import split_list
from kvmesh.transfer import EngineConfig, TransferEngine
from kvmesh.transfer.config import tls_fields


class PushWorker:
    """Holds, pushes and receives pages of one rank. Its methods are of one thread, the worker's. Its owner must `close`
    it."""

    def __init__(
        self,
        pages: Sequence[Pages],
        rank: int,
        layout: str,
        config: ConnectorConfig,
        *,
        sends: bool = True,
        receives: bool = True,
    ) -> None:
        """Raises ConfigError or TransferError: a port is in use, a staging holds no block, a NIC does not exist."""
        self._counts = WorkerCounts()
        self._sender: PageSender | None = None
        self._receiver: PageReceiver | None = None
        self._engine = TransferEngine(f"vllm:{rank}:{os.getpid()}:{secrets.token_hex(6)}", engine_config(config))
        self._endpoint = PushEndpoint(config, rank)
        address = ""
        try:
            if sends:
                self._sender = PageSender(self._engine, pages, layout, config, self._counts)
                address = self._endpoint.listen(self._sender)
            if receives:
                self._receiver = PageReceiver(self._engine, self._endpoint, pages, rank, layout, config, self._counts)
        except BaseException:
            self.close()
            raise
        self.place = PushRank(address, self._engine.name)

    @property
    def held(self) -> int:
        """How many prompts are held."""
        return self._sender.held if self._sender is not None else 0

    def windows_of(self, engine: str) -> int:
        """How many windows an engine may write into, or is being kept from writing into."""
        return len(self._engine.windows.epochs(engine))

    def carry_out(self, orders: HandoffOrders) -> None:
        """Begins to hold prompts, and releases others. What is to be received is begun by `receive`."""
        if self._sender is not None:
            for hold in orders.holds:
                self._sender.hold(hold)
        if self._receiver is not None:
            for source in orders.releases:
                self._receiver.release(source)

    def receive(self, order: ReceiveOrder) -> None:
        """Begins a load, which `poll` tells the end of."""
        assert self._receiver is not None, "the scheduler takes nothing from others without kv_role"
        self._receiver.receive(order)

    def cancel(self, request_ids: Collection[str]) -> None:
        """Gives up the loads of requests that have ended."""
        if self._receiver is not None and request_ids:
            self._receiver.cancel(request_ids)

    def poll(self) -> ReceivedPages:
        """Returns the loads that are over since the last call."""
        return self._receiver.poll() if self._receiver is not None else ReceivedPages()

    def freed(self) -> set[str]:
        """Returns the requests whose pages vLLM may give to others, each once."""
        return self._sender.freed() if self._sender is not None else set()

    def take_counts(self) -> dict[str, int]:
        """Returns what was counted since the last call."""
        return self._counts.take()

    def close(self) -> None:
        """Ends everything within a bounded time. No page is written any more."""
        if self._receiver is not None:
            self._receiver.close()
        self._endpoint.close()
        if self._sender is not None:
            self._sender.close()
        self._engine.close()


def engine_config(config: ConnectorConfig) -> EngineConfig:
    """Returns the settings of a worker's transfer engine, which are those of the Store's client."""
    client, tls = config.client(), security.current()
    fields = tls_fields(tls.paths, network=client.transfer_network)
    return EngineConfig(
        transports=client.transport_list,
        host=client.host,
        advertise_host=client.advertise_host,
        nics=split_list(client.nics),
        leave_host=client.transfer_network == "trusted" or tls.channel_credentials() is None,
        tls_cert=fields.get("tls_cert", ""),
        tls_key=fields.get("tls_key", ""),
        tls_ca=fields.get("tls_ca", ""),
        tls_server_name=fields.get("tls_server_name", ""),
    )

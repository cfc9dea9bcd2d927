"""The class that vLLM loads. It translates between vLLM's connector interface and the parts of this package."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from kvmesh.connectors.vllm.book import HandoffOrders, HandoffSide, LoadOrder, RequestBook, SaveOrder, Scheduled
from kvmesh.connectors.vllm.config import ConnectorConfig
from kvmesh.connectors.vllm.identity import checkpoint_identity
from kvmesh.connectors.vllm.keys import KvContent
from kvmesh.connectors.vllm.lookup import HeldLookups
from kvmesh.connectors.vllm.mover import PageMover
from kvmesh.connectors.vllm.pages import pages_of
from kvmesh.connectors.vllm.push.worker import PushWorker
from kvmesh.connectors.vllm.remote import TICKET_BYTES, PageSharing, PushRank, RemotePrefill
from kvmesh.errors import ConfigError, InvalidRequest, KvmeshError
from kvmesh.kvcache.keys import Namespace
from kvmesh.rpc import security
from kvmesh.storeclient import SyncStoreClient

log = logging.getLogger("vllm.kvmesh")  # vLLM's own handlers show it

COMPUTED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
DRAFTS = ("ngram", "ngram_gpu", "suffix")  # speculation without KV of its own


@dataclass
class StepOrders(KVConnectorMetadata):
    """Is what the scheduler wants of the workers with one step."""

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    handoffs: HandoffOrders = field(default_factory=HandoffOrders)


@dataclass
class PageFacts(KVConnectorHandshakeMetadata):
    """Is what a worker tells the scheduler of its pages: `layout` is part of every key. `push` is where others ask this
    rank to push."""

    layout: str
    parts: int
    block_bytes: int
    push: PushRank | None = None


@dataclass
class LateLoads(KVConnectorWorkerMetadata):
    """Is how many loads of this step's workers ran out of time, and which requests' pushes did."""

    count: int
    pushes: frozenset[str] = frozenset()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, LateLoads)
        return LateLoads(self.count + other.count, self.pushes | other.pushes)


@dataclass
class PrefixTransferStats(KVConnectorStats):
    """Is what was counted since the last time; vLLM logs it every so often. All values are sums."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        return not any(self.data.values())


class KvmeshConnector(KVConnectorBase_V1):
    """Keeps prefixes of vLLM in kvmesh's Store: blocks that any instance has computed are loaded by all others. Hands
    prompts over from a prefill engine to a decode engine, too, where `push` is set."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises ConfigError for a setting or a model that it cannot serve, naming it."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = ConnectorConfig.of(self._kv_transfer_config.kv_connector_extra_config)
        _check_supported(vllm_config, kv_cache_config)
        security.configure(security.TlsFiles.from_env(os.environ))
        (group,) = kv_cache_config.kv_cache_groups
        self._block_tokens = int(group.kv_cache_spec.block_size)
        self._layers = list(group.layer_names)
        self._ranks = int(vllm_config.parallel_config.tensor_parallel_size)
        self._client: SyncStoreClient | None = None
        self._requests: dict[str, Any] = {}
        self._book: RequestBook | None = None
        self._lookups: HeldLookups | None = None
        self._mover: PageMover | None = None
        self._facts: PageFacts | None = None
        self._late = 0
        self._late_pushes: frozenset[str] = frozenset()
        self._pusher: PushWorker | None = None
        self._failed_pages: frozenset[int] = frozenset()
        self._content: KvContent | None = None
        self._epoch = 0
        if role == KVConnectorRole.SCHEDULER:
            self._identity = self._config.model_identity or checkpoint_identity(_folder(vllm_config.model_config))

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a save that is skipped is a miss later, a prompt that is not handed over is computed by decode

    def shutdown(self) -> None:
        """Ends everything within a bounded time. vLLM may call it while the interpreter ends."""
        for part in (self._lookups, self._mover, self._pusher, self._client):
            try:
                if part is not None:
                    part.close()
            except (KvmeshError, RuntimeError, TimeoutError) as error:
                log.warning("KvmeshConnector: %s was not closed: %s", type(part).__name__, error)

    # ── worker ───────────────────────────────────────────────────────────────────────────────────

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Raises ConfigError for pages that it cannot move."""
        blocks = int(self._kv_cache_config.num_blocks)
        pages, shapes = [], []
        for name in self._layers:
            page, shape = pages_of(name, kv_caches[name], blocks)
            pages.append(page)
            shapes.append(shape)
        layers = self._vllm_config.compilation_config.static_forward_context
        how = [
            f"{type(getattr(layers[name], 'impl', None)).__qualname__} {getattr(layers[name], 'isa', '')}"
            for name in self._layers
        ]
        layout = hashlib.sha256(repr((shapes, how, self._config.part_kib)).encode()).hexdigest()
        self._client = SyncStoreClient(self._config.client())
        rank = get_tensor_model_parallel_rank()
        self._mover = PageMover(self._client, pages, rank, self._ranks, self._config)
        place = None
        if self._config.push:
            sends = bool(self._kv_transfer_config.is_kv_producer)
            receives = bool(self._kv_transfer_config.is_kv_consumer)
            self._pusher = PushWorker(pages, rank, layout, self._config, sends=sends, receives=receives)
            place = self._pusher.place
            log.info(
                "KvmeshConnector: rank %d pushes as %s, asked at %s", rank, place.engine, place.address or "no port"
            )
        self._facts = PageFacts(layout, len(self._mover.parts), self._mover.block_bytes, place)
        log.info(
            "KvmeshConnector: rank %d of %d: %d layers in %d parts, %d bytes a block of %d tokens, pages %s",
            rank,
            self._ranks,
            len(pages),
            len(self._mover.parts),
            self._mover.block_bytes,
            self._block_tokens,
            shapes[0],
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._facts

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Takes a step's orders. Prompts are held from here on, before the step computes: decode may ask already."""
        super().bind_connector_metadata(connector_metadata)
        if self._pusher is not None:
            self._pusher.carry_out(self._orders().handoffs)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._mover is not None:
            for order in self._orders().loads:
                self._mover.load(order)
        if self._pusher is not None:
            for receive in self._orders().handoffs.receives:
                self._pusher.receive(receive)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: loads end between steps."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: pages are copied when the step ends, as a step may write a block's last token only then."""

    def wait_for_save(self) -> None:
        if self._mover is not None:
            for order in self._orders().saves:
                self._mover.save(order)

    def _orders(self) -> StepOrders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, StepOrders)
        return orders

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._mover is None:
            return None, None
        results = self._mover.poll()
        self._failed_pages, self._late = results.failed_pages, results.late
        loaded = set(results.request_ids)
        freed: set[str] = set()
        if self._pusher is not None:
            self._pusher.cancel(finished_req_ids)
            pushed = self._pusher.poll()
            self._failed_pages |= pushed.failed_pages
            self._late_pushes = pushed.late
            loaded.update(order.request_id for order in pushed.orders)
            freed = self._pusher.freed()
        return freed or None, loaded or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_pages = self._failed_pages, frozenset()
        return set(failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        late, self._late = self._late, 0
        pushes, self._late_pushes = self._late_pushes, frozenset()
        return LateLoads(late, pushes) if late or pushes else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._mover is None:
            return None
        counts = self._mover.take_counts()
        if self._pusher is not None:
            counts |= self._pusher.take_counts()
        return PrefixTransferStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return PrefixTransferStats(data=data or {})

    # ── scheduler ────────────────────────────────────────────────────────────────────────────────

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Learns of the workers' pages, after which keys can be computed. Raises ConfigError when workers differ."""
        facts = [one for _, one in sorted(metadata.items()) if isinstance(one, PageFacts)]
        if len(facts) != self._ranks or len({(one.layout, one.parts, one.block_bytes) for one in facts}) > 1:
            raise ConfigError(f"tensor_parallel_size={self._ranks}: the workers' pages differ: {facts}")
        model, cache = self._vllm_config.model_config, self._vllm_config.cache_config
        self._content = KvContent(
            engine=f"vllm {vllm.__version__}",
            model=self._identity,
            model_config=_configuration(model),
            dtype=str(model.dtype),
            kv_dtype=str(cache.cache_dtype),
            block_tokens=self._block_tokens,
            ranks=self._ranks,
            layout=facts[0].layout,
            more={"quantization": str(model.quantization), "max_model_len": str(model.max_model_len)},
        )
        transfer = self._kv_transfer_config
        self._client = SyncStoreClient(self._config.client())
        timeout_s = self._config.lookup_timeout_ms / 1000
        self._lookups = HeldLookups(self._client, ranks=self._ranks, parts=facts[0].parts, timeout_s=timeout_s)
        self._book = RequestBook(
            self._block_tokens,
            lookup_s=timeout_s,
            pause_s=self._config.pause_ms / 1000,
            save_decoded=self._config.save_decoded,
            loads=bool(transfer.is_kv_consumer),
            saves=bool(transfer.is_kv_producer),
            pool=self._config.pool,
            handoff=self._side(facts),
        )
        log.info("KvmeshConnector: store %s, namespace %r", self._config.store, self._config.namespace)
        if why := self._config.unreachable():
            log.warning("KvmeshConnector: %s", why)

    def _side(self, facts: Sequence[PageFacts]) -> HandoffSide | None:
        """Returns who this engine is to others that its pages go to or come from."""
        if not self._config.push:
            return None
        sharing = PageSharing(self._block_tokens, facts[0].layout, self._ranks)
        ranks = tuple(one.push for one in facts if one.push is not None)
        return HandoffSide(str(self._kv_transfer_config.engine_id), sharing, ranks)

    def on_new_request(self, request: Any) -> None:
        if self._book is None or self._content is None:
            return
        source = self._source(request)
        if not _follows_from_tokens(request):
            if source is not None:
                self._book.drop(source)
            return
        lora = request.lora_request
        namespace = Namespace(
            fingerprint=self._content.fingerprint(),
            kv_dtype=self._content.kv_dtype,
            lora=f"{lora.lora_name}\n{lora.lora_path}" if lora is not None else "",
            tenant_salt=request.cache_salt or "",
            weights_epoch=self._epoch,
            tenant=self._config.namespace,
        )
        self._requests[request.request_id] = request
        self._book.add(request.request_id, namespace, request.num_prompt_tokens, source)

    def _source(self, request: Any) -> RemotePrefill | None:
        """Returns who keeps the KV of a request's prompt, as the request says."""
        params = request.kv_transfer_params
        if not isinstance(params, dict) or not params.get("do_remote_prefill"):
            return None
        try:
            return RemotePrefill.of(params)
        except InvalidRequest as error:
            log.warning("KvmeshConnector: request %s is computed here: %s", request.request_id, error.message)
            return None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._book is None or self._lookups is None or request.skip_reading_prefix_cache:
            return 0, False
        now = time.monotonic()
        for request_id, held in self._lookups.answers():
            self._book.found(request_id, held, now)
        match = self._book.match(request.request_id, request.all_token_ids, num_computed_tokens, now)
        if match.refused:
            log.warning("KvmeshConnector: request %s is computed here: %s", request.request_id, match.refused)
        if match.ask:
            self._lookups.ask(request.request_id, match.ask)
        return match.tokens, bool(match.tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._book is not None and num_external_tokens:
            (block_ids,) = blocks.get_block_ids()
            self._book.allocated(request.request_id, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self._book is None:
            return StepOrders()
        loads, saves = self._book.step(self._scheduled(scheduler_output))
        return StepOrders(loads, saves, self._book.handoffs())

    def _scheduled(self, scheduler_output: Any) -> Iterator[Scheduled]:
        """Yields what the step computes. vLLM's own lists are asked, so none is kept here."""
        assert self._kv_cache_manager is not None
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is not None:
                (block_ids,) = self._kv_cache_manager.get_block_ids(request_id)
                computed = request.num_computed_tokens + tokens
                yield Scheduled(request_id, request.all_token_ids, computed, block_ids)

    def update_connector_output(self, connector_output: Any) -> None:
        """Passes on what the ranks tell. One that could not load says so when its own load ends; `finished_recving` has
        a request when the last rank's does, which may be a later step."""
        if self._book is not None:
            meta = connector_output.kv_connector_worker_meta
            told = meta if isinstance(meta, LateLoads) else LateLoads(0)
            failed = connector_output.invalid_block_ids or set()
            now = time.monotonic()
            finished = connector_output.finished_recving or ()
            self._book.received(finished, failed, told.count > 0, now, told.pushes)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Has the pages of a prompt held that another engine decodes. What is to be saved to the pool was copied when
        its step ended."""
        self._requests.pop(request.request_id, None)
        if self._book is None:
            return False, None
        params = request.kv_transfer_params
        source = None
        if isinstance(params, dict) and params.get("do_remote_decode") and request.status in COMPUTED:
            ticket = secrets.token_bytes(TICKET_BYTES)
            computed = request.num_computed_tokens
            source = self._book.hand_over(request.request_id, request.all_token_ids, computed, block_ids, ticket)
            if source is None:
                why = "it needs push, a kv_role that produces, and KV that follows from its tokens alone"
                log.warning("KvmeshConnector: request %s is not handed over: %s", request.request_id, why)
        self._book.finish(request.request_id)
        return source is not None, source.params() if source is not None else None

    def reset_cache(self) -> bool | None:
        """Has this instance never load again what was saved before, as vLLM's weights may have changed. Requests that
        are under way are neither loaded nor saved any more: their KV may be of both weights."""
        self._epoch = time.time_ns()
        self._requests.clear()
        if self._book is not None:
            self._book.clear()
        return True


def _follows_from_tokens(request: Any) -> bool:
    """Whether the request's KV follows from its token ids, its adapter and its salt. A session whose input streams may
    take tokens back."""
    return not request.mm_features and request.prompt_embeds is None and not request.resumable


def _check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises ConfigError for what the connector cannot serve, naming the setting."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if transfer.kv_load_failure_policy != "recompute":
        why = "a holder that dies would fail requests; set kv_load_failure_policy to recompute in --kv-transfer-config"
        raise ConfigError(f"kv_load_failure_policy={transfer.kv_load_failure_policy!r}: {why}")
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"{name}={getattr(parallel, name)}: KvmeshConnector serves tensor parallelism alone")
    speculation = vllm_config.speculative_config
    if speculation is not None and speculation.method not in DRAFTS:
        why = f"drafts with KV of their own are not stored; there are {', '.join(DRAFTS)}"
        raise ConfigError(f"speculative_config.method={speculation.method!r}: {why}")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
        why = (
            "KvmeshConnector stores one group of attention layers; a model with states or several groups has none such"
        )
        raise ConfigError(f"KV cache groups {kinds}: {why}; run it without --kv-transfer-config")


def _folder(model_config: Any) -> str:
    """Returns the folder of the checkpoint, which vLLM has downloaded by now if it was named by its hub name."""
    name = str(model_config.model)
    if os.path.isdir(name):
        return name
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(name, revision=model_config.revision, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, ValueError):
        return name


def _configuration(model_config: Any) -> str:
    """Returns a hash of the model's configuration as vLLM uses it, overrides included; its path is no part of it."""
    told = model_config.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        told.pop(name, None)
    return hashlib.sha256(repr(sorted(told.items(), key=str)).encode()).hexdigest()

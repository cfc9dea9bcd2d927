"""The names of all spans, attributes and metrics.

The spans of one request:

    chat <model> | text_completion <model>   gateway; root, or child of the client's traceparent
    ├── kvmesh.hold                          gateway; waited for an instance of the model to be there
    ├── kvmesh.tokenize                      gateway
    ├── kvmesh.schedule                      gateway
    │   └── kvmesh.place                     conductor
    └── kvmesh.request                       decode, the request's whole life there
        ├── kvmesh.admit                     decode: received → prefill asked
        ├── kvmesh.prefill                   prefill: received → everything acknowledged
        │   ├── kvmesh.queue                 received → first chunk starts
        │   ├── kvmesh.pull                  other nodes asked for blocks → what arrived is sealed here
        │   │   └── kvmesh.fetch             one for each holder: lease asked → last byte read
        │   │       ├── kvmesh.lease         holder: asked → answered, what came from below DRAM included
        │   │       ├── kvmesh.serve         holder: lease given → given back
        │   │       │   └── kvmesh.read      holder's rank: first READ came → last byte sent; not of one-sided reads
        │   │       └── kvmesh.transfer      for each rank: first byte asked for → last one read
        │   ├── kvmesh.load                  own host segment → device pages
        │   ├── kvmesh.compute               first chunk starts → first token sampled
        │   │   └── kvmesh.stage             each of a pipeline's: its first chunk has come → last one computed
        │   │       └── kvmesh.chunk         each of its chunks: has come → is computed
        │   └── kvmesh.transfer              first byte posted → last acknowledged
        ├── kvmesh.reserve                   decode: BeginFill → landing sent
        ├── kvmesh.load                      decode: landing → device pages
        ├── kvmesh.first_decode              decode: joined the batch → second token
        └── kvmesh.generate                  decode: second token → finish

An endpoint picker (`kvmesh.pick`: headers came → endpoints known) stands beside these, below the client's traceparent;
where it asks the conductor, `kvmesh.place` is below it.

A program that uses the store by itself, in a span of its own, sees below that span:

    kvmesh.locate, kvmesh.resolve, kvmesh.bind   store master: the call came → answered
    kvmesh.put                                   node: the call came → sealed
    kvmesh.lease, kvmesh.serve                   holder, as above

Attributes: GenAI semantic conventions where they exist, else `kvmesh.*`.
Metrics: `kvmesh_<service>_<what>_<unit>`; durations in seconds, sizes in bytes; label values are bounded sets.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvmesh.telemetry import metrics_server
from kvmesh.telemetry.sampled import SampledFamily, SampledMetrics
from kvmesh.version import kvmesh_version
from kvmesh.watched_files import WatchedFiles

# ── spans ─────────────────────────────────────────────────────────────────────────────────────────

SPAN_CHAT = "chat"  # + " <model>"
SPAN_COMPLETION = "text_completion"  # + " <model>"
SPAN_HOLD = "kvmesh.hold"
SPAN_TOKENIZE = "kvmesh.tokenize"
SPAN_SCHEDULE = "kvmesh.schedule"
SPAN_MIGRATE = "kvmesh.migrate"  # an answer goes on elsewhere: from the loss to the next token
SPAN_PICK = "kvmesh.pick"  # endpoint picker: the request's headers came → answered
SPAN_PLACE = "kvmesh.place"
SPAN_REQUEST = "kvmesh.request"
SPAN_ADMIT = "kvmesh.admit"
SPAN_PREFILL = "kvmesh.prefill"
SPAN_QUEUE = "kvmesh.queue"
SPAN_PULL = "kvmesh.pull"
SPAN_FETCH = "kvmesh.fetch"
SPAN_LEASE = "kvmesh.lease"
SPAN_SERVE = "kvmesh.serve"
SPAN_READ = "kvmesh.read"
SPAN_PUT = "kvmesh.put"
SPAN_LOCATE = "kvmesh.locate"
SPAN_RESOLVE = "kvmesh.resolve"
SPAN_BIND = "kvmesh.bind"
SPAN_COMPUTE = "kvmesh.compute"
SPAN_STAGE = "kvmesh.stage"
SPAN_CHUNK = "kvmesh.chunk"
SPAN_TRANSFER = "kvmesh.transfer"
SPAN_RESERVE = "kvmesh.reserve"
SPAN_LOAD = "kvmesh.load"
SPAN_FIRST_DECODE = "kvmesh.first_decode"
SPAN_GENERATE = "kvmesh.generate"

# ── attributes ────────────────────────────────────────────────────────────────────────────────────

OPERATION = "gen_ai.operation.name"  # "chat" | "text_completion"
PROVIDER = "gen_ai.provider.name"  # "kvmesh"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_ID = "gen_ai.response.id"
MAX_TOKENS = "gen_ai.request.max_tokens"
TEMPERATURE = "gen_ai.request.temperature"
TOP_P = "gen_ai.request.top_p"
TOP_K = "gen_ai.request.top_k"
SEED = "gen_ai.request.seed"
STREAM = "gen_ai.request.stream"
CHOICE_COUNT = "gen_ai.request.choice.count"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_INPUT_TOKENS = "gen_ai.usage.cache_read.input_tokens"
ERROR_TYPE = "error.type"  # `code` of the error tree

REQUEST_ID = "kvmesh.request_id"
ATTEMPT = "kvmesh.attempt"
PRIORITY = "kvmesh.priority"
INSTANCE = "kvmesh.instance_id"
PREFILL_INSTANCE = "kvmesh.prefill.instance_id"
DECODE_INSTANCE = "kvmesh.decode.instance_id"
CHOICE_INDEX = "kvmesh.choice"
FROM_INSTANCE = "kvmesh.migrate.from"
TO_INSTANCE = "kvmesh.migrate.to"
LOSS_REASON = "kvmesh.migrate.reason"
CARRIED_TOKENS = "kvmesh.migrate.tokens"  # of the answer, that had come
TTFT_MS = "kvmesh.ttft_ms"
PREDICTED_TTFT_MS = "kvmesh.predicted_ttft_ms"
PREDICTED_TBT_MS = "kvmesh.predicted_tbt_ms"
PREDICTED_CACHED_TOKENS = "kvmesh.predicted_cached_tokens"
PREDICTED_TERM = "kvmesh.predicted"  # + ".queue_ms" and the other terms of the TTFT
PROMPT_TOKENS = "kvmesh.prompt_tokens"
CACHED_TOKENS = "kvmesh.cached_tokens"  # the prefix really found
DEVICE_TOKENS = "kvmesh.device_tokens"  # of the cached ones: lay in device pages,
HOST_TOKENS = "kvmesh.host_tokens"  # in the own host segment,
PULLED_TOKENS = "kvmesh.pulled_tokens"  # on other nodes
PULL_BYTES = "kvmesh.pull.bytes"
TIER = "kvmesh.pull.tier"  # of it that they lay in, as far as was known
LOWER_TOKENS = "kvmesh.lower_tokens"  # of the cached ones in the own host segment: read from a tier below for this
SHORT_GROUPS = "kvmesh.short_groups"  # cache groups, by name, that lacked something, so that fewer tokens are cached
HOLDER = "kvmesh.pull.holder"  # instance id of the node that blocks were read from
WANTED_BLOCKS = "kvmesh.pull.wanted_blocks"
READER = "kvmesh.lease.reader"  # who leased
LEASED_BLOCKS = "kvmesh.lease.blocks"
LEASED_BYTES = "kvmesh.lease.bytes"  # of all ranks
LEASED_TIERS = "kvmesh.lease.tiers"  # "dram=3 ssd=1": where the blocks were found, and how many
LEASE_END = "kvmesh.lease.end"  # "given back" | "ran out"
READS = "kvmesh.read.count"  # requests that the holder's ranks served
READ_BYTES = "kvmesh.read.bytes"
READS_SEEN = "kvmesh.read.seen"  # False: whatever was read was read one-sided (rdma, shm), which leaves no trace here
CALL_PATH = "kvmesh.call.path"  # "fast path" | "grpc"
KEYS = "kvmesh.keys"  # keys, or names, in a call
AT_DECODE_TOKENS = "kvmesh.at_decode_tokens"  # of the prompt: their KV lay in decode's store and was not sent
DECODE_PULLED_TOKENS = "kvmesh.decode.pulled_tokens"  # fetched by decode from other nodes for this request
COMPUTED_TOKENS = "kvmesh.computed_tokens"  # by prefill: the rest
CHUNKS = "kvmesh.chunks"
STAGE = "kvmesh.stage.number"  # from 0
STAGE_BUSY_MS = "kvmesh.stage.busy_ms"  # of its chunks of this prompt
STAGE_IDLE_MS = "kvmesh.stage.idle_ms"  # before these, and behind the last one where nothing followed it
CHUNK_START = "kvmesh.chunk.start"  # its first token
CHUNK_END = "kvmesh.chunk.end"
BUBBLE = "kvmesh.bubble"  # idle time of the stages of a pipeline, of their idle and busy time
BLOCKS = "kvmesh.blocks"
BLOCK_TOKENS = "kvmesh.block_tokens"
TRANSFER_BYTES = "kvmesh.transfer.bytes"
TRANSFER_TRANSPORT = "kvmesh.transfer.transport"  # "shm" | "tcp" | ..., the one with most bytes first
TRANSFER_RAILS = "kvmesh.transfer.rails"  # "rdma mlx5_0→mlx5_1=1048576 ...": bytes acknowledged on each
TRANSFER_RETRIES = "kvmesh.transfer.retries"  # frames sent again
TRANSFER_OPERATION = "kvmesh.transfer.operation"  # "write" (a push) | "read" (a pull)
HANDOFF_EPOCH = "kvmesh.handoff_epoch"
PREEMPTIONS = "kvmesh.preemptions"
CANDIDATES = "kvmesh.candidates"
OUTCOME = "kvmesh.outcome"
ENDPOINTS = "kvmesh.pick.endpoints"  # host:port,host:port,..., the choice first
TENANT = "kvmesh.tenant"  # name of the API key's entry, at most 64 characters

MAX_RAILS = 16  # named in one span


def transfer_attributes(
    operation: str, nbytes: int, rails: Sequence[tuple[str, int]], retries: int
) -> dict[str, str | bool | int | float]:
    """Returns the attributes of a `kvmesh.transfer` span. `rails` are pairs ("transport" or "transport local→remote",
    bytes), most bytes first."""
    return {
        TRANSFER_OPERATION: operation,
        TRANSFER_BYTES: nbytes,
        TRANSFER_TRANSPORT: ",".join(dict.fromkeys(rail.partition(" ")[0] for rail, _ in rails)),
        TRANSFER_RAILS: ", ".join(f"{rail}={carried}" for rail, carried in rails[:MAX_RAILS]),
        TRANSFER_RETRIES: retries,
    }


# ── metrics ───────────────────────────────────────────────────────────────────────────────────────

# "node": the node store of a prefill, decode or pool process, served beside the service's own.
SERVICES = ("gateway", "conductor", "prefill", "decode", "store", "node", "external", "picker")
REGISTRIES: dict[str, CollectorRegistry] = {name: CollectorRegistry() for name in SERVICES}
_PROCESS = CollectorRegistry()
ProcessCollector(registry=_PROCESS)

# Seconds: from a millisecond, where a local mesh lives, to a minute, where a deadline does.
_WAIT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LONG = (*_WAIT, 120, 300, 600)
_STEP = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_SHARE = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def _counter(name: str, text: str, *labels: str) -> Counter:
    return Counter(f"kvmesh_{name}", text, labels, registry=REGISTRIES[name.split("_")[0]])


def _gauge(name: str, text: str, *labels: str) -> Gauge:
    return Gauge(f"kvmesh_{name}", text, labels, registry=REGISTRIES[name.split("_")[0]])


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
    return Histogram(f"kvmesh_{name}", text, labels, registry=REGISTRIES[name.split("_")[0]], buckets=buckets)


# Gateway. outcome: stop, length, cancelled, or the `code` of the error tree. route: chat, completions, grpc. model: one
# that is served, "" of requests that ended before they had one.
GATEWAY_REQUESTS = _counter("gateway_requests_total", "Requests that ended.", "route", "outcome")
GATEWAY_RUNNING = _gauge("gateway_running_requests", "Requests in flight.")
GATEWAY_TTFT = _histogram("gateway_ttft_seconds", "Received until the first token is sent.", _LONG, "model")
GATEWAY_TBT = _histogram("gateway_tbt_seconds", "Time between tokens of one request.", _STEP, "model")
GATEWAY_REQUEST_SECONDS = _histogram("gateway_request_seconds", "Received until finished.", _LONG, "model")
GATEWAY_TOKENIZE = _histogram("gateway_tokenize_seconds", "Template, tokenize and hash.", _STEP)
GATEWAY_SCHEDULE = _histogram("gateway_schedule_seconds", "Asking the conductor.", _STEP)
GATEWAY_PROMPT_TOKENS = _counter("gateway_prompt_tokens_total", "Prompt tokens of accepted requests.", "model")
GATEWAY_CACHED_TOKENS = _counter("gateway_cached_tokens_total", "Prompt tokens that came from a prefix cache.", "model")
GATEWAY_OUTPUT_TOKENS = _counter("gateway_output_tokens_total", "Tokens sent to clients.", "model")
GATEWAY_RETRIES = _counter("gateway_retries_total", "Further attempts after an instance failed.", "reason")
# reason: the loss's error code. outcome: moved, failed (the request with it), abandoned (the client left meanwhile).
GATEWAY_MIGRATIONS = _counter("gateway_migrations_total", "Answers to be gone on with elsewhere.", "reason", "outcome")
GATEWAY_MIGRATION_GAP = _histogram("gateway_migration_gap_seconds", "Loss until the next token, elsewhere.", _WAIT)
GATEWAY_BATCH_WAITING = _gauge("gateway_batch_waiting_requests", "Of the batch lane, waiting for something idle.")
GATEWAY_STREAMS = _gauge("gateway_streams_count", "Open Session streams.")
GATEWAY_READY = _gauge("gateway_ready_bool", "1 when requests are served, of any model.")
GATEWAY_MODEL_READY = _gauge("gateway_model_ready_bool", "1 when requests of that model are served.", "model")
GATEWAY_REQUEST_MEMORY = _gauge("gateway_request_memory_bytes", "Held by requests, of half of max_request_memory.")
# reason: full (429, come again), too_large (413, never fits).
GATEWAY_MEMORY_REFUSED = _counter("gateway_request_memory_refused_total", "Requests without room in memory.", "reason")
GATEWAY_HTTP_CONNECTIONS = _gauge("gateway_http_connections_count", "Open REST connections.")
# reason: connections (too many: the one idle for longest), unread (a client that reads no answer), host (a foreign
# Host or Origin), or the HTTP status of a refused head.
GATEWAY_HTTP_REFUSED = _counter("gateway_http_refused_total", "REST connections and heads refused.", "reason")
GATEWAY_UNAUTHORIZED = _counter("gateway_unauthorized_total", "Calls without a valid API key.", "route")

# Held: while no instance of their model is there. outcome: placed, expired (none came in time), left (the client), or
# failed (the gateway stopped).
GATEWAY_HELD = _gauge("gateway_held_requests", "Held until an instance of their model is there.", "model")
GATEWAY_HOLD_SECONDS = _histogram("gateway_hold_seconds", "How long they were held.", _LONG, "model", "outcome")

# what: requests (too many in flight), placements (too many wait for the conductor), held (no room to be held).
GATEWAY_REFUSED = _counter("gateway_refused_total", "Requests refused at once, for want of room here.", "what")

# field: requests_per_minute, prompt_tokens_per_minute, answer_tokens_per_minute, max_running (of a key in keys.toml).
GATEWAY_QUOTA_REFUSED = _counter("gateway_quota_refused_total", "Requests over a quota of their API key.", "field")
GATEWAY_QUOTA_SHARE = _gauge(
    "gateway_quota_share_ratio",
    "The part of each key's quota that this gateway may use by itself; 1: all, or all gateways share one in Redis.",
)
GATEWAY_QUOTA_REDIS_FAILURES = _counter(
    "gateway_quota_redis_failures_total", "Calls to the Redis of quotas that failed or took too long."
)

# reason: too_large (over max_response_bytes), unavailable (the store failed, or was too slow).
GATEWAY_RESPONSES_NOT_STORED = _counter("gateway_responses_not_stored_total", "Responses that are not kept.", "reason")

# Endpoint picker. by: placement (the conductor's), load (of engines, without tokens), gateway, none (refused before).
# outcome: picked, or the `code` of the error tree.
PICKER_DECISIONS = _counter("picker_decisions_total", "Requests answered with endpoints, or refused.", "by", "outcome")
PICKER_SECONDS = _histogram("picker_decision_seconds", "Whole request here until its endpoints are known.", _STEP)
PICKER_TOKENIZE = _histogram("picker_tokenize_seconds", "Template, tokenize, hash, and the wait for a thread.", _STEP)
PICKER_SCHEDULE = _histogram("picker_schedule_seconds", "Asking the conductor.", _STEP)
PICKER_STREAMS = _gauge("picker_streams_count", "Open streams of proxies: requests that are not over.")
# found: known (tokenized before, as a part of another text), new.
PICKER_CHARS = _counter("picker_prompt_chars_total", "Characters of prompts.", "found")
# endpoint: chosen, fallback, other (one that was not named), untold, refused (the engine answered 5xx).
PICKER_SERVED = _counter("picker_served_total", "Requests by who answered them.", "endpoint")
# outcome: told, lost (the conductor could not be reached: it forgets them after a while by itself).
PICKER_RELEASES = _counter("picker_releases_total", "Requests whose end the conductor was to be told.", "outcome")
PICKER_ENDPOINTS = _gauge("picker_endpoints_count", "Endpoints that may be picked.", "kind")
PICKER_READY = _gauge("picker_ready_bool", "1 when there is an endpoint to pick.")

# Conductor. outcome: placed, overloaded, unavailable, ...; reason: ttft, tbt, capacity, no_instance.
CONDUCTOR_DECISIONS = _counter("conductor_decisions_total", "Schedule calls answered.", "outcome")
CONDUCTOR_REJECTIONS = _counter("conductor_rejections_total", "Schedule calls refused.", "reason", "lane")
CONDUCTOR_ADMITTED = _counter("conductor_admitted_total", "Requests placed.", "lane")
CONDUCTOR_SLO_LOAD = _gauge("conductor_slo_load_ratio", "Greatest predicted TTFT / SLO, or TBT / SLO.", "model", "pool")
CONDUCTOR_SCHEDULE = _histogram("conductor_schedule_seconds", "One placement decision.", _STEP)
CONDUCTOR_PREDICTED_TTFT = _histogram("conductor_predicted_ttft_seconds", "TTFT of placements.", _WAIT)
CONDUCTOR_TTFT_ERROR = _histogram("conductor_prefill_error_seconds", "Absolute error of predicted prefill time.", _WAIT)
# what: see services/conductor/costs/accuracy.py; quantile: p50, p90, p99 of |measured - predicted| / predicted, or
# bias, the median with its sign; group: a model's name, of its coupled instances with " coupled" behind it.
CONDUCTOR_PREDICTION_ERROR = _gauge(
    "conductor_prediction_error_ratio", "Error of predictions, relative to them.", "what", "quantile", "group"
)
CONDUCTOR_INSTANCES = _gauge("conductor_instances_count", "Known instances.", "role", "state")
# Of an instance that is cordoned or drains; with STORE_DRAINED it says that the instance can be deleted (alerts.yml).
CONDUCTOR_IDLE = _gauge("conductor_idle_bool", "It gets no work, and no request is there or on its way.", "member")
CONDUCTOR_HEARTBEATS = _counter("conductor_heartbeats_total", "Heartbeats taken.")
CONDUCTOR_HEARTBEAT_WAIT = _histogram(
    "conductor_heartbeat_wait_seconds", "Arrived by the door until taken, at most.", _STEP
)
CONDUCTOR_SCHEDULE_WAIT = _histogram("conductor_schedule_wait_seconds", "Read until its turn to be placed.", _STEP)
CONDUCTOR_DOOR_CALLS = _counter("conductor_door_calls_total", "Calls through the door, past gRPC.", "method")
CONDUCTOR_INDEX_BLOCKS = _gauge("conductor_index_blocks_count", "Distinct blocks that node stores have announced.")
CONDUCTOR_FETCHED_BLOCKS = _counter("conductor_fetched_blocks_total", "Blocks that placements told prefill to fetch.")
CONDUCTOR_HEARTBEAT_AGE = _gauge("conductor_heartbeat_age_seconds", "Longest silence of a live instance.")
CONDUCTOR_HEARTBEAT_INTERVAL = _gauge("conductor_heartbeat_interval_seconds", "As instances are told now.")
# order: replicate, switch_role; outcome: done, failed, dropped (this conductor led no more).
CONDUCTOR_ORDERS = _counter("conductor_orders_total", "Orders that a leading conductor gave.", "order", "outcome")
CONDUCTOR_SCALE_HINT = _gauge("conductor_scale_hint_count", "Instances to add, or to take away.", "model", "role")
CONDUCTOR_SCALE_WANTED = _gauge("conductor_scale_wanted_count", "Instances that the load wants.", "model", "role")
CONDUCTOR_POOL_LOAD = _gauge("conductor_pool_load_ratio", "Of a pool's capacity at its SLO.", "model", "role")

# Prefill. outcome: done, cancelled, failed.
PREFILL_REQUESTS = _counter("prefill_requests_total", "Handoffs that ended.", "outcome")
PREFILL_QUEUED = _gauge("prefill_waiting_requests", "Requests in the queue.")
PREFILL_QUEUED_TOKENS = _gauge("prefill_waiting_tokens", "Uncached tokens in the queue.")
PREFILL_RUNNING = _gauge("prefill_running_requests", "Requests being computed or transferred.")
PREFILL_QUEUE = _histogram("prefill_queue_seconds", "Received until the first chunk starts.", _WAIT)
PREFILL_COMPUTE = _histogram("prefill_compute_seconds", "First chunk starts until the first token.", _WAIT)
PREFILL_TRANSFER = _histogram("prefill_transfer_seconds", "First byte posted until the last acknowledged.", _WAIT)
PREFILL_STEP = _histogram("prefill_step_seconds", "One engine step.", _WAIT)
PREFILL_STAGE_SECONDS = _counter(
    "prefill_stage_seconds_total", "Time of a pipeline's stages while it has steps: busy or idle.", "stage", "state"
)
PREFILL_BUBBLE = _histogram(
    "prefill_bubble_ratio", "Share of the stages' time in which a pipeline stood still for a prompt.", _SHARE
)
PREFILL_TRANSFER_BYTES = _counter("prefill_transfer_bytes_total", "KV bytes acknowledged by decode.")
PREFILL_COMPUTED_TOKENS = _counter("prefill_computed_tokens_total", "Prompt tokens computed.")
PREFILL_CACHED_TOKENS = _counter("prefill_cached_tokens_total", "Prompt tokens found in the prefix cache.")
PREFILL_SHORT_BLOCKS = _counter(
    "prefill_short_blocks_total", "Blocks by which this cache group made prefix hits shorter.", "group"
)
# tier: device, host, lower (read into host memory for the request), remote.
PREFILL_HIT_TOKENS = _counter("prefill_hit_tokens_total", "Of them, by where they lay.", "tier")
# state: total, free, cached
PREFILL_PAGES = _gauge("prefill_pages_count", "Device pages, by cache group.", "state", "group")
PREFILL_HANDOFFS = _gauge("prefill_handoffs_count", "Handoffs by state.", "state")
PREFILL_LEASE_STOPS = _counter("prefill_lease_stops_total", "Transfers stopped as their lease ran out.")
PREFILL_READY = _gauge("prefill_ready_bool", "1 when work is taken.")

# Decode. outcome: stop, length, cancelled, or an error's `code`.
DECODE_REQUESTS = _counter("decode_requests_total", "Requests that ended.", "outcome")
DECODE_RUNNING = _gauge("decode_running_requests", "Requests in the batch.")
DECODE_WAITING = _gauge("decode_waiting_requests", "Admitted requests outside the batch.")
DECODE_HANDOFFS = _gauge("decode_handoffs_count", "Handoffs by state of the machine.", "state")
DECODE_RESERVE = _histogram("decode_reserve_seconds", "BeginFill until the landing is sent.", _STEP)
DECODE_FILL = _histogram("decode_fill_seconds", "Landing sent until every end mark is here.", _WAIT)
DECODE_LOAD = _histogram("decode_load_seconds", "Landing into device pages.", _STEP)
DECODE_FIRST_DECODE = _histogram("decode_first_decode_seconds", "Joined the batch until the second token.", _WAIT)
DECODE_TBT = _histogram("decode_tbt_seconds", "Time between tokens as the engine makes them.", _STEP)
DECODE_STEP = _histogram("decode_step_seconds", "One engine step.", _STEP)
DECODE_BATCH = _histogram("decode_batch_requests", "Requests in a step.", _BATCH)
DECODE_CONTEXT_TOKENS = _gauge("decode_context_tokens", "Tokens of KV that a step reads.")
DECODE_OUTPUT_TOKENS = _counter("decode_output_tokens_total", "Tokens made.")
DECODE_DRAFT_TOKENS = _counter("decode_draft_tokens_total", "Tokens computed as drafts.", "drafter")
DECODE_ACCEPTED_DRAFT_TOKENS = _counter(
    "decode_accepted_draft_tokens_total", "Tokens that were foreseen by drafts.", "drafter"
)
DECODE_PREEMPTIONS = _counter("decode_preemptions_total", "Requests whose KV went back to the host segment.")
# state: total, free
DECODE_PAGES = _gauge("decode_pages_count", "Device pages, by cache group.", "state", "group")
# state: total, free, quarantined, sealed
DECODE_EXTENTS = _gauge("decode_extents_count", "Host extents, by cache group.", "state", "group")
DECODE_AT_DECODE_TOKENS = _counter("decode_at_decode_tokens_total", "Prompt tokens whose KV lay here: not sent.")
DECODE_FENCES = _counter("decode_fences_total", "Writers fenced.", "reason")
DECODE_STREAMS = _gauge("decode_streams_count", "Open streams.", "kind")  # kind: session, handoff
DECODE_READY = _gauge("decode_ready_bool", "1 when work is taken.")

# External instances, all of a process. outcome: done, or a code of the error tree.
EXTERNAL_REQUESTS = _counter("external_requests_total", "Requests to external engines that ended.", "outcome")
EXTERNAL_TTFT = _histogram("external_ttft_seconds", "Request sent to the engine until its first token.", _WAIT)
EXTERNAL_OUTPUT_TOKENS = _counter("external_output_tokens_total", "Tokens that engines have sent.")
EXTERNAL_ENDPOINTS = _gauge("external_endpoints_count", "Endpoints that flags and the file name now.")
EXTERNAL_READY = _gauge("external_ready_bool", "1 when the instance takes work.", "instance_id")
EXTERNAL_EXACT = _gauge("external_exact_bool", "1 while its engine reports which blocks it holds.", "instance_id")

# Store master. change: joined, left, died.
STORE_MEMBERS = _gauge("store_members_count", "Live members.", "role")
STORE_DRAINED = _gauge("store_drained_bool", "It drains, and all its blocks are elsewhere, too.", "member")
STORE_CHANGES = _counter("store_member_changes_total", "Membership changes.", "change")
STORE_BEATS = _counter("store_beats_total", "Heartbeats taken.")
STORE_TERMS_REFUSED = _counter("store_terms_refused_total", "Terms told by members that are not credible.")
STORE_HEARTBEAT_WAIT = _histogram("store_heartbeat_wait_seconds", "Arrived by the door until taken, at most.", _STEP)
STORE_DOOR_CALLS = _counter("store_door_calls_total", "Calls through the door, past gRPC.", "method")
STORE_HEARTBEAT_AGE = _gauge("store_heartbeat_age_seconds", "Longest silence of a live member.")
STORE_HEARTBEAT_INTERVAL = _gauge("store_heartbeat_interval_seconds", "As members are told now.")
STORE_ANNOUNCE_IDLE = _gauge("store_announce_idle_seconds", "Between two words of a store with nothing to tell.")
STORE_ANNOUNCE_GAP = _gauge("store_announce_gap_seconds", "Between two of a busy one, at least; 0: its own interval.")
STORE_WATCHERS = _gauge("store_watchers_count", "Open Watch streams.")
STORE_OVERRUNS = _counter("store_watch_overruns_total", "Watch streams closed as the watcher fell behind.")
STORE_ANNOUNCEMENTS = _counter("store_announcements_total", "Announcements taken.", "verdict")
STORE_KEYS = _counter("store_announced_keys_total", "Keys in them.", "change")  # ... over_limit, shed
STORE_SNAPSHOTS = _counter("store_snapshots_asked_total", "Announcements answered with the wish for a snapshot.")
STORE_BLOCKS = _gauge("store_blocks_count", "Distinct blocks in the map.")
STORE_REPLICAS = _gauge("store_replicas_count", "Replicas of all blocks together.")
STORE_UNSWEPT = _gauge("store_unswept_count", "Replicas of dropped stores that still take memory.")
STORE_MAP_BYTES = _gauge("store_map_bytes", "About what the map takes.")
STORE_ORDERS = _counter("store_orders_total", "Calls at nodes.", "order", "outcome")  # outcome: answered, failed

# Node store. outcome: all, some, none of the blocks came; state: sealed, writing, free.
NODE_PULLS = _counter("node_pulls_total", "Pull jobs that ended.", "outcome")
NODE_PULL = _histogram("node_pull_seconds", "A pull job asked for until ended.", _WAIT)
NODE_PULLED_BLOCKS = _counter("node_pulled_blocks_total", "Blocks read from other nodes.")
NODE_PULLED_BYTES = _counter("node_pulled_bytes_total", "KV bytes read from other nodes.")
NODE_PULL_LAPSED = _counter("node_pull_lapsed_total", "Reads discarded since their lease had run out.")
NODE_LEASES_GIVEN = _counter("node_leases_given_total", "Leases given to readers.")
NODE_LEASES = _gauge("node_leases_count", "Leases given to readers and not over.")
NODE_BLOCKS = _gauge("node_blocks_count", "Blocks of the host segment.", "state")
NODE_CAPACITY = _gauge("node_capacity_bytes", "Size of the host segment.")
NODE_FREE = _gauge("node_free_bytes", "Of it neither sealed nor being written.")
NODE_FRAGMENTATION = _gauge(
    "node_fragmentation_ratio", "1 - largest free run / all free memory of a pool node; 0: any free memory serves."
)
NODE_EVICTED = _gauge("node_evicted_blocks_count", "Blocks evicted since the start.")
NODE_OFFLOADED = _counter("node_offloaded_blocks_total", "Cold blocks that pool nodes hold at this node's wish.")
# Below DRAM. tier: ssd; outcome: hit, miss. Of a model with several cache groups an object of a block counts as one.
NODE_TIER_BLOCKS = _gauge("node_tier_blocks_count", "Blocks, or objects, in this tier of the node.", "tier")
NODE_TIER_USED = _gauge("node_tier_used_bytes", "Bytes that this tier takes.", "tier")
NODE_TIER_WRITTEN = _counter("node_tier_written_blocks_total", "Blocks, or objects, copied to this tier.", "tier")
NODE_TIER_DEMOTED = _counter(
    "node_tier_demoted_blocks_total", "Blocks, or objects, that the tier above evicted to here.", "tier", "outcome"
)
NODE_TIER_READ = _counter("node_tier_read_blocks_total", "Blocks, or objects, asked of this tier.", "tier", "outcome")
NODE_TIER_READ_SECONDS = _histogram(
    "node_tier_read_seconds", "A read asked of the ranks until answered.", _WAIT, "tier"
)
# fault: io (the disk or the store failed), full (the disk had no room), damaged (bytes were not those written; of warm
# memory, too, which is tier "warm").
NODE_TIER_FAULTS = _counter(
    "node_tier_faults_total", "Faults of a tier's medium; none gives a wrong byte.", "tier", "fault"
)
NODE_TIER_REFUSED = _counter("node_tier_refused_blocks_total", "Blocks, or objects, not staged: over the budget.")
NODE_ANNOUNCED = _counter("node_announcements_total", "Announcements sent to the store master.", "outcome")

# The transfer engines of a node's ranks; a NIC "" where the transport has no choice. operation: write, read, notify,
# checksum; class: handoff, prefetch, background; state of rails: ready, resting, down, of requests: see TransferState.
_NIC = ("rank", "transport", "nic")
_WORK = (*_NIC, "operation", "class")
NODE_TRANSFER_BYTES = SampledFamily("kvmesh_node_transfer_bytes", "Bytes that arrived over this NIC.", "counter", _WORK)
NODE_TRANSFER_FRAMES = SampledFamily(
    "kvmesh_node_transfer_frames", "Frames (work requests) answered.", "counter", _WORK
)
NODE_TRANSFER_SLICES = SampledFamily("kvmesh_node_transfer_slices", "Slices in them.", "counter", _WORK)
NODE_TRANSFER_ERRORS = SampledFamily(
    "kvmesh_node_transfer_errors", "Frames and slices that failed.", "counter", (*_NIC, "cause")
)
NODE_TRANSFER_INFLIGHT = SampledFamily(
    "kvmesh_node_transfer_inflight_bytes", "Bytes posted and not answered.", "gauge", _NIC
)
NODE_TRANSFER_INFLIGHT_FRAMES = SampledFamily(
    "kvmesh_node_transfer_inflight_frames_count", "Frames of them.", "gauge", _NIC
)
NODE_TRANSFER_LATENCY = SampledFamily(
    "kvmesh_node_transfer_latency_seconds", "A frame posted until answered.", "histogram", _NIC
)
NODE_TRANSFER_BANDWIDTH = SampledFamily(
    "kvmesh_node_transfer_bandwidth_bytes", "Bytes per second of busy periods.", "histogram", _NIC
)
NODE_TRANSFER_RAILS = SampledFamily(
    "kvmesh_node_transfer_rails_count", "Rails to all peers, by state.", "gauge", (*_NIC, "state")
)
NODE_TRANSFER_REQUESTS = SampledFamily(
    "kvmesh_node_transfer_requests", "Requests that ended.", "counter", ("rank", "class", "state")
)
NODE_TRANSFER_WAITING = SampledFamily(
    "kvmesh_node_transfer_waiting_count", "Peers with something to post.", "gauge", ("rank", "class")
)
NODE_TRANSFER_FAMILIES = (
    NODE_TRANSFER_BYTES,
    NODE_TRANSFER_FRAMES,
    NODE_TRANSFER_SLICES,
    NODE_TRANSFER_ERRORS,
    NODE_TRANSFER_INFLIGHT,
    NODE_TRANSFER_INFLIGHT_FRAMES,
    NODE_TRANSFER_LATENCY,
    NODE_TRANSFER_BANDWIDTH,
    NODE_TRANSFER_RAILS,
    NODE_TRANSFER_REQUESTS,
    NODE_TRANSFER_WAITING,
)
NODE_TRANSFERS = SampledMetrics(NODE_TRANSFER_FAMILIES)  # told by the ranks with their pongs
REGISTRIES["node"].register(NODE_TRANSFERS)

# A mixture of experts; one series a layer. `kvmesh.ranks.expert_metrics` says over how many tokens.
NODE_EXPERT_CHOICES = SampledFamily(
    "kvmesh_node_expert_choices", "Experts chosen for tokens, of all layers together.", "counter", ()
)
NODE_EXPERT_IMBALANCE = SampledFamily(
    "kvmesh_node_expert_imbalance_ratio",
    "Tokens of a layer's busiest expert over the mean, lately.",
    "gauge",
    ("layer",),
)
NODE_EXPERT_IDLE = SampledFamily(
    "kvmesh_node_expert_idle_count", "Experts of a layer that no token had lately.", "gauge", ("layer",)
)
NODE_EXPERT_FAMILIES = (NODE_EXPERT_CHOICES, NODE_EXPERT_IMBALANCE, NODE_EXPERT_IDLE)
NODE_EXPERTS = SampledMetrics(NODE_EXPERT_FAMILIES)  # told by rank 0's pongs
REGISTRIES["node"].register(NODE_EXPERTS)

BUILD_INFO: dict[str, Gauge] = {
    name: _gauge(f"{name}_build_info", "Always 1; the label tells the build.", "version") for name in SERVICES
}

_active: list[str] = []


def activate(service: str) -> None:
    """Marks this process as `service` (it may be several), so that the service's metrics are served."""
    if service in SERVICES and service not in _active:
        _active.append(service)
        BUILD_INFO[service].labels(version=kvmesh_version()).set(1)


class _Active(Collector):
    """Collects the metrics of the process and of its active services, so that idle families of others are not shown."""

    def collect(self) -> Iterator[Metric]:
        yield from _PROCESS.collect()
        for service in _active:
            yield from REGISTRIES[service].collect()


def render() -> tuple[bytes, str]:
    """Returns the metrics of this process in Prometheus' text format, and the content type."""
    # generate_latest wants only `collect`.
    registry: Any = _Active()
    return generate_latest(registry), CONTENT_TYPE_LATEST


def serve_metrics(
    host: str,
    port: int,
    limits: metrics_server.MetricsLimits | None = None,
    tls: WatchedFiles[ssl.SSLContext] | None = None,
) -> tuple[int, Callable[[], None]]:
    """Serves `/metrics`, `/live` and `/ready` from threads of their own; returns the bound port and a function that
    closes it.

    Raises ConfigError, which names the port, when it is in use.
    """
    registry: Any = _Active()
    return metrics_server.serve(host, port, registry, limits, tls)

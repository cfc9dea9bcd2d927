"""How long one instance's hardware takes for a step of the model it runs. Seconds of virtual time.

Roofline: each kind of kernel is bound by arithmetic or by memory, whichever takes longer, and the kinds add up:

    linear      max(2 x parameters x tokens / FLOP/s, weights / bytes/s)     weights once a step, whatever it computes
    attention   max(FLOPs of all (query, key) pairs / FLOP/s, KV read / bytes/s), rows and prompts apart; a linear
                layer has no pairs: its state is read and written once a row or piece, whatever their context, and each
                of its numbers takes three multiply-adds a token (what the key finds, what is put there, the answer)
    all-reduce  two a layer: 2 (n-1)/n x tokens x hidden x bytes over the GPUs' links, and a latency each
    overhead    a constant of a step

with the shares of the datasheet that `hardware.Efficiency` states. Fitted: `t = a + b x tokens + c x attended`, the
form that the conductor learns online (services/conductor/costs/models.py), read from a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmesh.chunk_pipeline import ChunkCost
from kvmesh.errors import ConfigError
from kvmesh.kvcache.cache_groups import CacheGroup, is_single, object_shard
from kvmesh.services.conductor.costs.cache_cost import CacheCost
from kvmesh.services.conductor.costs.file import Costs
from kvmesh.sim.hardware.hardware import GPUS_OF_A_NODE, Hardware
from kvmesh.sim.hardware.node_room import token_bytes
from kvmesh.sim.hardware.shapes import ModelShape, itemsize
from kvmesh.sim.hardware.speculation import Speculation

Pieces = Sequence[tuple[int, int]]


class Times(Protocol):
    """One instance's hardware running one model. A piece is (tokens computed, tokens cached before them)."""

    def prefill_s(self, pieces: Pieces) -> float:
        """One step that computes these pieces of prompts together."""

    def decode_s(self, batch: int, context_tokens: float) -> float:
        """One step of `batch` rows whose contexts have so many tokens in all."""

    def mixed_s(self, pieces: Pieces, batch: int, context_tokens: float) -> float:
        """One step of both: chunked prefill beside decoding rows."""


class Pipeline(Protocol):
    """Prefill over several stages of layers: a step is in one of them at a time, and the next step behind it."""

    def stages_s(self, pieces: Pieces) -> Sequence[float]:
        """What each stage takes for a step."""

    def send_s(self, tokens: int) -> float:
        """Until a step of so many tokens is at the next stage."""

    def chunk_cost(self) -> ChunkCost:
        """What a chunk costs a stage."""


@dataclass(frozen=True)
class NodeSpec:
    """One instance as the simulator builds it. Sizes in tokens of KV, rates in bytes a second."""

    times: Times
    kv_tokens: int  # what the device memory holds beside the weights
    dram_tokens: int  # of the node store
    ssd_tokens: int  # 0: none
    nic_bytes_per_s: float  # each way
    ssd_read_bytes_per_s: float
    kv_bytes_per_token: int
    groups: tuple[tuple[CacheGroup, int], ...] = ()  # with bytes of a value; (): one group that keeps all
    slots: int = 1  # copies of dp: each has an equal part of `kv_tokens`, and rows of its own
    speculation: Speculation | None = None  # of rows; None: a step makes one token of each
    pipeline: Pipeline | None = None  # of prefill; None: one stage, whose steps take `times.prefill_s`

    def token_s(self, batch: int, context_tokens: float) -> float:
        """Returns the seconds in which each of `batch` rows makes a token, as far as that can be foreseen."""
        return (self.speculation or self.times).decode_s(batch, context_tokens)


def attended(computed: int, cached: int) -> float:
    """(query, key) pairs of a causal piece: each token sees what is cached, those before it, and itself."""
    return computed * (cached + (computed + 1) / 2)


def attended_within(window: int, computed: int, cached: int) -> float:
    """Counts as `attended` does where a token sees the last `window` tokens alone, itself among them."""
    short = min(computed, max(0, window - cached))  # tokens that still see everything before them
    return attended(short, cached) + (computed - short) * window


class Roofline:
    """`gpus` GPUs of one kind in tensor parallelism. Holds constants alone; safe to share."""

    def __init__(
        self, hardware: Hardware, gpus: int, shape: ModelShape, *, weight_dtype: str = "bf16", kv_dtype: str = "bf16"
    ) -> None:
        """ConfigError: GPUs that the model's heads cannot be dealt to, an unknown dtype."""
        self.hardware, self.gpus, self.shape = hardware, gpus, shape
        self.kv_rank_bytes = shape.kv_bytes_per_rank(gpus, kv_dtype)
        self.weight_bytes = shape.params * itemsize(weight_dtype)
        reached = hardware.efficiency
        self._read_s = 1 / (hardware.memory_bytes_per_s * reached.memory)  # a byte, on each GPU
        self._linear_s = 2 / (gpus * hardware.flops * reached.linear)  # a parameter and token
        self._weight_s = itemsize(weight_dtype) / gpus * self._read_s  # a parameter
        self._step_s = reached.step_s
        layer_pairs_s = pair_flops(shape) / (gpus * hardware.flops * reached.attention)
        self._pair_s = layer_pairs_s * (shape.kv_layers - shape.window_layers)
        self._window_pair_s = layer_pairs_s * shape.window_layers
        row_pair_s = row_pair_flops(shape) / (gpus * hardware.flops * reached.attention)
        self._row_s = max(row_pair_s, self.kv_rank_bytes / shape.kv_layers * self._read_s)  # a layer and context token
        self._context_s = self.kv_rank_bytes * self._read_s  # reading one cached token
        self._delta_s = 6.0 * shape.delta_numbers / (gpus * hardware.flops * reached.attention)  # a token
        self._state_s = 2 * shape.state_bytes(kv_dtype) / gpus * self._read_s  # a row, or a piece of a prompt
        reduces = 2 * shape.layers if gpus > 1 else 0
        self._reduce_s = reduces * reached.all_reduce_s
        moved = 2 * (gpus - 1) / gpus * shape.hidden * 2  # activations are bf16
        self._reduce_token_s = reduces * moved / (hardware.link_bytes_per_s * reached.all_reduce)

    def prefill_s(self, pieces: Pieces) -> float:
        """See `Times`."""
        return self.mixed_s(pieces, 0, 0.0)

    def decode_s(self, batch: int, context_tokens: float) -> float:
        """See `Times`."""
        return self._fixed_s(batch, batch) + self._rows_s(batch, context_tokens)

    def mixed_s(self, pieces: Pieces, batch: int, context_tokens: float) -> float:
        """See `Times`. Every piece is reckoned to need one row of logits."""
        tokens, pairs_s, read_s = 0, 0.0, 0.0
        for computed, cached in pieces:
            tokens += computed
            pairs_s += self._pair_s * attended(computed, cached)
            if self._window_pair_s:
                pairs_s += self._window_pair_s * attended_within(self.shape.window, computed, cached)
            read_s += self._context_s * (cached + computed)
            if self._state_s:
                pairs_s += self._delta_s * computed
                read_s += self._state_s
        rows_s = self._rows_s(batch, context_tokens) if batch else 0.0
        return self._fixed_s(tokens + batch, len(pieces) + batch) + max(pairs_s, read_s) + rows_s

    def _fixed_s(self, tokens: int, sampled: int) -> float:
        """Returns the seconds of all but attention, for so many tokens of which `sampled` become logits."""
        shape = self.shape
        flops_s = self._linear_s * (shape.active_layer_params * tokens + shape.head_params * sampled)
        weights_s = self._weight_s * (_touched_params(shape, tokens) + shape.head_params)
        return self._step_s + max(flops_s, weights_s) + self._reduce_s + self._reduce_token_s * tokens

    def _rows_s(self, batch: int, context_tokens: float) -> float:
        """Attention of decoding rows."""
        shape = self.shape
        seen = context_tokens * (shape.kv_layers - shape.window_layers)
        if shape.window_layers:
            seen += min(context_tokens, float(batch * shape.window)) * shape.window_layers
        return self._row_s * seen + batch * max(self._delta_s, self._state_s)


def pair_flops(shape: ModelShape) -> float:
    """Returns the FLOPs of one (query, key) pair in one layer: a score and a weighted value for each head."""
    return 2.0 * shape.heads * (shape.head_dim + shape.value_dim)


def row_pair_flops(shape: ModelShape) -> float:
    """Returns the same for a decoding row; MLA's rows work on the latent itself."""
    if shape.mla:
        return 2.0 * shape.heads * (2 * shape.kv_lora_rank + shape.rope_dim)
    return pair_flops(shape)


def _touched_params(shape: ModelShape, tokens: int) -> float:
    """Parameters of the layers that a step reads: of the experts, those that any token is expected to be sent to."""
    always = shape.attention_params + shape.dense_params
    if not shape.experts:
        return always
    share = 1 - (1 - shape.experts_per_token / shape.experts) ** tokens
    return always + share * shape.expert_layers * shape.experts * shape.expert_params


def node_spec(
    hardware: Hardware,
    gpus: int,
    shape: ModelShape,
    *,
    weight_dtype: str = "bf16",
    kv_dtype: str = "bf16",
    times: Times | None = None,
    block_tokens: int = 512,
    kv_tokens: int | None = None,
) -> NodeSpec:
    """An instance over `gpus` GPUs with its share of the node's memory, disks and NICs; `times`: measured ones instead
    of the roofline's; `kv_tokens`: instead of those that tensor parallelism leaves room for. Where the model keeps
    several cache groups, device memory holds tokens of running requests as `node_room` counts them, and stores hold
    full blocks of `block_tokens`. ConfigError: the weights do not fit."""
    if gpus < 1:
        raise ConfigError(f"gpus={gpus}: must be at least 1", field="gpus")
    single = is_single(shape.groups)
    if kv_tokens is None or times is None:
        roofline = Roofline(hardware, gpus, shape, weight_dtype=weight_dtype, kv_dtype=kv_dtype)
        times = times or roofline
        room = hardware.memory_bytes * hardware.efficiency.device_memory - roofline.weight_bytes / gpus
        of_token = roofline.kv_rank_bytes if single else token_bytes(shape, gpus, kv_dtype, block_tokens)
        kv_tokens = int(room // of_token)
        if kv_tokens < 1:
            need, have = roofline.weight_bytes / 2**30, gpus * hardware.memory_bytes / 2**30
            told = f"({need:,.0f} GiB in {weight_dtype}) do not fit {gpus} x {hardware.name} ({have:,.0f} GiB)"
            text = f"model={shape.name!r}: the weights {told}; more GPUs, or --weight-dtype fp8"
            raise ConfigError(text, field="model")
    share = gpus / GPUS_OF_A_NODE
    kv_bytes = stored = shape.kv_bytes_per_token(kv_dtype)
    groups = () if single else tuple((g, itemsize(g.layout.dtype or kv_dtype)) for g in shape.groups)
    if groups:
        objects = tuple((g, object_shard(g, block_tokens, size).shard_bytes) for g, size in groups)
        stored = -(-CacheCost(block_tokens, kv_bytes, objects).block // block_tokens)
    return NodeSpec(
        times=times,
        kv_tokens=kv_tokens,
        dram_tokens=int(hardware.node_dram_bytes * share // stored),
        ssd_tokens=int(hardware.node_ssd_bytes * share // stored),
        nic_bytes_per_s=hardware.node_nic_bytes_per_s * share * hardware.efficiency.network,
        ssd_read_bytes_per_s=hardware.node_ssd_bytes_per_s * share,
        kv_bytes_per_token=kv_bytes,
        groups=groups,
    )


class Fitted:
    """The times of one kind of instance; the form of a model is in `kvmesh.services.conductor.costs.fit`."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        # A step of both reads weights and starts kernels once: of the two constants the smaller one is not paid.
        self._shared_s = min(costs.prefill.a, costs.decode_step.a)

    def prefill_s(self, pieces: Pieces) -> float:
        """See `Times`."""
        tokens = sum(computed for computed, _ in pieces)
        pairs = sum(computed * (computed + 2 * cached) / 2 for computed, cached in pieces)
        return self.costs.prefill.at(tokens, pairs)

    def decode_s(self, batch: int, context_tokens: float) -> float:
        """See `Times`."""
        return self.costs.decode_step.at(batch, context_tokens)

    def mixed_s(self, pieces: Pieces, batch: int, context_tokens: float) -> float:
        """See `Times`: a chunk keeps the arithmetic busy, rows wait for memory, so the two add up."""
        if not pieces:
            return self.decode_s(batch, context_tokens)
        if not batch:
            return self.prefill_s(pieces)
        return self.prefill_s(pieces) + self.decode_s(batch, context_tokens) - self._shared_s

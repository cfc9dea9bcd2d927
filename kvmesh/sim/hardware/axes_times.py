"""How long an instance takes whose ranks share a model along named axes (dp, pp, cp, tp, ep, dcp). Seconds.

The kinds of kernels are those of `times.Roofline`, which this equals where tp is the only axis; each is bound by
arithmetic or by memory, and the kinds and the collectives (`collectives.Fabric`) add up. T are the tokens of the copy
(of dp) with the most, S those of all copies. A prefill rank of cp has T / cp of a chunk (zig-zag, so equal pairs); rows
that decode are at all ranks of cp.

    attention's matrices   over tp, whole at each rank of cp: T / cp tokens in prefill, T in decode; an all-reduce
    MLP                    over cp · tp; an all-reduce over both (with cp a gather and a reduce-scatter, as many bytes)
    experts, ep            E / n a rank, S · k / n tokens times the unevenness; dispatch and combine (all-to-all) of the
                           tokens that a rank has, and a gather over tp, whose ranks dispatch a part each
    experts, cut by tensor over cp · tp or, `tensor_experts`, over all axes of `ep` ("DP + TP"): all S tokens are
                           gathered and their results reduce-scattered
    prefill attention      pairs / (cp · tp); with cp a gather of the chunk's K and V; for cached ones, with cp or dcp,
                           a gather of Q and a reduce-scatter of what each rank found (joined by log-sum-exp)
    decode attention       KV read / (cp · dcp); with dcp a gather of Q over dcp and a reduce-scatter of the answers,
                           with cp an all-reduce of them
    drafts                 a row's queries are so many in all of these but in what attention reads
    pipeline               a stage has its layers' part of all that; chunks follow one another
                           (kvmesh.chunk_pipeline), rows go round in as many micro-batches as stages

Unevenness of experts: of n ranks that draw S · k times, the fullest is expected to have sqrt(2 ln n) standard
deviations more than the mean (the greatest of n normal variables); `skew` is a factor on top, for experts that are hot.
Grouped products are bound by reading weights until each expert has many tokens (facts/field.md, "Multi-node MoE").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from kvmesh.chunk_pipeline import ChunkCost, bounded_borders, pipeline_ends, stage_layers
from kvmesh.errors import ConfigError
from kvmesh.kvcache.cache_groups import is_single
from kvmesh.services.prefill.planner import LEAST_SHARE
from kvmesh.sim.hardware.collectives import Fabric, MeshAxes, RankSpan, span, stages_apart
from kvmesh.sim.hardware.hardware import GPUS_OF_A_NODE, Hardware
from kvmesh.sim.hardware.node_room import BF16, WEIGHTS, token_bytes
from kvmesh.sim.hardware.shapes import ModelShape
from kvmesh.sim.hardware.speculation import HEAD_PAGES, HEAD_STEP_S, head_shape
from kvmesh.sim.hardware.times import (
    NodeSpec,
    Pieces,
    attended,
    attended_within,
    node_spec,
    pair_flops,
    row_pair_flops,
)

CHUNK_TOKENS = 8192


class _OneStage(NamedTuple):
    """The axes of a pipeline's last stage by itself."""

    dp: int
    cp: int
    tp: int
    ep: tuple[str, ...]
    dcp: int
    pp: int = 1


class AxesRoofline:
    """An instance of axes.world GPUs, `node` of them a node. Holds constants alone; safe to share."""

    def __init__(
        self,
        gpu: Hardware,
        axes: MeshAxes,
        shape: ModelShape,
        *,
        weight_dtype: str = "bf16",
        kv_dtype: str = "bf16",
        fp8_products: bool = False,
        tensor_experts: bool = False,
        mlp_over: tuple[str, ...] = ("cp", "tp"),
        micro_batches: int = 1,
        skew: float = 1.0,
        expert_nodes: float = math.inf,
        chunk_tokens: int = CHUNK_TOKENS,
        block_tokens: int = 1,
        node: int = GPUS_OF_A_NODE,
        mtp: bool = False,
    ) -> None:
        """`weight_dtype` is a kind of `node_room.WEIGHTS`. With `fp8_products` matrices are multiplied, and tokens
        dispatched, in FP8. `mlp_over`=("tp",) keeps MLPs whole at each rank of cp, which then multiplies its own tokens
        alone. A token's experts lie on at most `expert_nodes` nodes. `micro_batches`=2 hides all-to-all of rows under
        the other half's computing. A prompt is cut into chunks of equal compute, none over `chunk_tokens`, where a
        pipeline has several stages. `mtp` loads the model's MTP head. Raises ConfigError for axes that the model's
        heads or layers do not divide by, or a GPU that lacks units for FP8."""
        if weight_dtype not in WEIGHTS:
            raise ConfigError(
                f"weight_dtype={weight_dtype!r}: choose one of {', '.join(WEIGHTS)}", field="weight_dtype"
            )
        if fp8_products and not gpu.fp8_flops:
            raise ConfigError(f"fp8_products: {gpu.name} has no units for FP8", field="fp8_products")
        if micro_batches not in (1, 2):
            raise ConfigError(f"micro_batches={micro_batches}: must be 1 or 2", field="micro_batches")
        self.gpu, self.axes, self.shape = gpu, axes, shape
        self.world = axes.dp * axes.pp * axes.cp * axes.tp
        self.layers = stage_layers(shape.layers, axes.pp)
        self.fabric = Fabric.of(gpu, node)
        self.chunk_tokens, self._block = chunk_tokens, block_tokens
        self._kept_share = 1.0
        self._micro_batches, self._skew, self._expert_nodes = micro_batches, skew, expert_nodes
        self._tensor_experts = tensor_experts and bool(axes.ep)
        kv_rank = self._check_heads(kv_dtype)
        if not is_single(shape.groups):  # what a token weighs among those of long contexts
            kept = token_bytes(shape, axes.tp, kv_dtype, max(16, block_tokens))
            self._kept_share = kept / kv_rank

        self._tp, self._mlp = span(axes, ("tp",), node), span(axes, mlp_over, node)
        self._mlp_by_context = "cp" in mlp_over
        self._cp, self._dcp = span(axes, ("cp",), node), span(axes, ("dcp",), node)
        self._experts = span(axes, axes.ep, node) if axes.ep else RankSpan(1)
        self._apart = stages_apart(axes, node)
        left: int = math.prod(getattr(axes, name) for name in ("cp", "tp") if name not in axes.ep)
        self._expert_ranks = self._experts.ranks * left  # that share one layer's experts
        self._whole_experts = bool(axes.ep) and not self._tensor_experts

        reached = gpu.efficiency
        flops = gpu.fp8_flops if fp8_products else gpu.flops
        self._flop_s = 1 / (flops * reached.linear)
        self._head_flop_s = 1 / (gpu.flops * reached.linear)
        self._read_s = 1 / (gpu.memory_bytes_per_s * reached.memory)
        self._step_s = reached.step_s
        routed = shape.expert_layers * shape.experts * shape.expert_params
        of_expert = WEIGHTS[weight_dtype]
        of_other = BF16 if routed and weight_dtype == "int4" else of_expert
        self._of_expert, self._of_other = of_expert, of_other
        self._of_head = BF16 if weight_dtype == "int4" else of_other
        self._dispatched = 1.0 if fp8_products else BF16
        heads = shape.heads / axes.tp
        layer_pair_s = pair_flops(shape) / (axes.cp * axes.tp * gpu.flops * reached.attention)
        self._pair_s = layer_pair_s * (shape.kv_layers - shape.window_layers)
        self._window_pair_s = layer_pair_s * shape.window_layers
        self.kv_rank_bytes = kv_rank / (axes.cp * axes.dcp)  # of a token at one rank, all layers
        row_pair_s = row_pair_flops(shape) / (axes.cp * axes.tp * gpu.flops * reached.attention)
        self._row_pair_s = row_pair_s
        self._row_read_s = self.kv_rank_bytes / max(1, shape.kv_layers) * self._read_s
        self._context_s = self.kv_rank_bytes * self._read_s
        self._delta_s = 6.0 * shape.delta_numbers / (axes.cp * axes.tp * gpu.flops * reached.attention)
        self._state_s = 2 * shape.state_bytes(kv_dtype) / axes.tp * self._read_s
        self._kv_token = float(kv_rank)  # bytes of a token's K and V at the ranks of one tp place, all layers
        self._prefill_q, self._prefill_o = heads * shape.head_dim * BF16, heads * shape.value_dim * BF16
        wide = heads * axes.dcp
        self._row_q = wide * (shape.kv_lora_rank + shape.rope_dim if shape.mla else shape.head_dim) * BF16
        self._row_o = wide * (shape.kv_lora_rank if shape.mla else shape.value_dim) * BF16
        self._hidden = shape.hidden * BF16
        self._head: AxesRoofline | None = None
        if mtp:  # the last stage has it
            self._head = AxesRoofline(
                replace(gpu, efficiency=replace(reached, step_s=HEAD_STEP_S)),
                _OneStage(axes.dp, axes.cp, axes.tp, axes.ep, axes.dcp),
                head_shape(shape),
                weight_dtype=weight_dtype,
                kv_dtype=kv_dtype,
                fp8_products=fp8_products,
                tensor_experts=tensor_experts,
                mlp_over=mlp_over,
                skew=skew,
                expert_nodes=expert_nodes,
                node=node,
            )

    def _check_heads(self, kv_dtype: str) -> int:
        axes = self.axes
        kv_rank = self.shape.kv_bytes_per_rank(axes.tp, kv_dtype)
        heads = 1 if self.shape.mla else self.shape.kv_heads
        shared = max(1, axes.tp // heads)
        if shared % axes.dcp:
            told = f"dcp={axes.dcp}: must divide the {shared} ranks of tp={axes.tp} that have the same KV heads"
            raise ConfigError(told, field="dcp")
        return kv_rank

    # ── memory ───────────────────────────────────────────────────────────────────────────────────

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights at the rank that has the most of them; an MTP head's vocabulary is the model's."""
        shape = self.shape
        vocabulary = shape.params - shape.layer_params
        ends = 1 if self.axes.pp == 1 else max(1, vocabulary // shape.head_params)  # embedding and head lie apart
        head = self._head._layer_bytes() if self._head is not None else 0.0
        return self._layer_bytes() + vocabulary / ends * self._of_head / self.axes.tp + head

    def _layer_bytes(self) -> float:
        shape, part = self.shape, self.layers[0] / self.shape.layers
        experts = shape.expert_layers * shape.experts * shape.expert_params * self._of_expert / self._expert_ranks
        others = shape.attention_params / self.axes.tp + shape.dense_params / self._mlp.ranks
        return part * (experts + others * self._of_other)

    @property
    def slot_tokens(self) -> int:
        """Tokens of KV that one copy of dp holds; 0 or less: the weights do not fit."""
        room = self.gpu.memory_bytes * self.gpu.efficiency.device_memory - self.weight_bytes
        layers = self.layers[0] + (HEAD_PAGES if self._head is not None else 0.0)
        return math.floor(room / (self.kv_rank_bytes * self._kept_share * layers / self.shape.layers))

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV that the instance holds: each copy has its own."""
        return self.axes.dp * self.slot_tokens

    # ── prefill ──────────────────────────────────────────────────────────────────────────────────

    def stages_s(self, pieces: Pieces) -> list[float]:
        """Returns what each stage takes for one step that computes these pieces of prompts; every copy of dp has some,
        the longest first, each where there is the least."""
        return self._stages_s(self._deal(pieces), 0, 0.0)

    def send_s(self, tokens: float) -> float:
        """Returns the seconds until so many tokens' activations are at the next stage."""
        shared = self.axes.cp * self.axes.tp
        return self.fabric.send_s(tokens / shared * self._hidden, apart=self._apart) if self.axes.pp > 1 else 0.0

    def prefill_s(self, pieces: Pieces) -> float:
        """See `times.Times`: until the last of them is through all stages; over several stages each is cut into chunks
        that follow one another."""
        if self.axes.pp == 1:
            return self.stages_s(pieces)[0]
        times, sends = [], []
        for computed, cached in pieces:
            ends = self.borders(computed, cached)
            for start, end in zip([cached, *ends[:-1]], ends, strict=True):
                times.append(self.stages_s([(end - start, start)]))
                sends.append(self.send_s(end - start))
        return pipeline_ends(times, sends)[-1][-1] if times else 0.0

    def borders(self, computed: int, cached: int, most: int = 0) -> list[int]:
        """Returns the ends of the chunks of equal compute of a prompt, none longer than `most` tokens; 0: as the
        instance cuts them."""
        longest = most or self.chunk_tokens
        return bounded_borders(
            cached + computed,
            longest,
            self.chunk_cost(),
            cached=cached,
            block=self._block,
            least=longest // LEAST_SHARE,
        )

    def chunk_cost(self) -> ChunkCost:
        """Returns what a chunk costs one stage, as the sum of a step, its tokens and its pairs: from chunks that are
        long enough to be bound by arithmetic."""
        few, many = self.chunk_tokens, 2 * self.chunk_tokens
        pair_s = (self._pair_s + (self._window_pair_s if self.shape.window >= many else 0.0)) / self.axes.pp
        work = [self._stages_s([[(tokens, 0)]], 0, 0.0)[0] - pair_s * attended(tokens, 0) for tokens in (few, many)]
        token_s = max(0.0, (work[1] - work[0]) / (many - few)) or work[0] / few
        return ChunkCost(token_s, pair_s, max(0.0, work[0] - token_s * few))

    # ── decode ───────────────────────────────────────────────────────────────────────────────────

    def decode_s(self, batch: int, context_tokens: float) -> float:
        """See `times.Times`: rows and contexts are even over the copies of dp. Over several stages it is the round in
        which each of as many micro-batches makes its tokens."""
        return self._decode_s(batch, context_tokens, 1.0)

    def _decode_s(self, batch: int, context_tokens: float, queries: float) -> float:
        dp, stages = self.axes.dp, self.axes.pp
        parts = min(stages, max(1, math.ceil(batch / dp)))
        rows = math.ceil(batch / parts)
        if self._micro_batches == 2 and rows >= 2 * dp:
            times = self._overlapped(rows, context_tokens / parts, queries)
        else:
            times = self._stages_s([[]] * dp, rows, context_tokens / parts, queries)
        if stages == 1:
            return times[0]
        send_s = self.send_s(math.ceil(rows / dp) * queries)
        return max(sum(times) + stages * send_s, parts * max(times))

    def mixed_s(self, pieces: Pieces, batch: int, context_tokens: float) -> float:
        """See `times.Times`; over several stages rows and chunks go through them once."""
        return self.drafted_s(pieces, batch, context_tokens, 1.0)

    def drafted_s(self, pieces: Pieces, batch: int, context_tokens: float, queries: float) -> float:
        """See `speculation.SpeculationTimes`."""
        if not pieces:
            return self._decode_s(batch, context_tokens, queries)
        if not batch:
            return self.prefill_s(pieces)
        times = self._stages_s(self._deal(pieces), batch, context_tokens, queries)
        tokens = sum(computed for computed, _ in pieces) + batch * queries
        return sum(times) + (self.axes.pp - 1) * self.send_s(tokens)

    def head_s(self, batch: int, answer_tokens: float, queries: float = 1.0) -> float:
        """See `speculation.SpeculationTimes`. Raises ConfigError without a head."""
        if self._head is None:
            raise ConfigError(f"speculate='mtp': {self.shape.name} is there without its MTP head", field="speculate")
        return self._head.drafted_s((), batch, answer_tokens, queries)

    # ── one step ─────────────────────────────────────────────────────────────────────────────────

    def _deal(self, pieces: Pieces) -> list[list[tuple[int, int]]]:
        slots: list[list[tuple[int, int]]] = [[] for _ in range(self.axes.dp)]
        loads = [0.0] * self.axes.dp
        for computed, cached in sorted(pieces, reverse=True):
            least = loads.index(min(loads))
            slots[least].append((computed, cached))
            loads[least] += computed
        return slots

    def _stages_s(
        self, slots: Sequence[Pieces], batch: int, context_tokens: float, queries: float = 1.0
    ) -> list[float]:
        """Returns the seconds of each stage for pieces of each copy and rows of all."""
        compute_s, talk_s, head_s = self._whole_s(slots, batch, context_tokens, queries)
        layers = self.shape.layers
        found = [self._step_s + (compute_s + talk_s) * own / layers for own in self.layers]
        found[-1] += head_s
        return found

    def _overlapped(self, rows: int, context_tokens: float, queries: float) -> list[float]:
        """Returns the same for rows in two halves, of which one computes while the other's tokens are on their way; the
        dense layers take them together, so weights of those are read once."""
        half = -(-rows // 2)
        none: list[Pieces] = [[]] * self.axes.dp
        compute_s, talk_s, head_s = self._whole_s(none, half, context_tokens / 2, queries)
        shape = self.shape
        moe = shape.expert_layers / shape.layers
        together, apart_s, _ = self._whole_s(none, rows, context_tokens, queries)
        both_s = max(2 * compute_s, 2 * talk_s) * moe + (together + apart_s) * (1 - moe)
        found = [self._step_s + both_s * own / shape.layers for own in self.layers]
        found[-1] += head_s
        return found

    def _whole_s(
        self, slots: Sequence[Pieces], batch: int, context_tokens: float, queries: float
    ) -> tuple[float, float, float]:
        """Returns (computing, collectives, head) of all layers; each row has so many queries on average."""
        axes, shape, dp = self.axes, self.shape, self.axes.dp
        rows = math.ceil(batch / dp)
        asked = rows * queries
        of_slot = [sum(computed for computed, _ in pieces) for pieces in slots]
        most = max(of_slot, default=0)
        everywhere = sum(of_slot) + batch * queries
        split = most / axes.cp + asked  # tokens that a rank multiplies with attention's matrices
        sampled = max((len(pieces) for pieces in slots), default=0) + asked

        compute_s = self._products_s(split, most + asked, everywhere)
        head_s = self._bound_s(shape.head_params / axes.tp, sampled, self._of_head, self._head_flop_s)
        attention_s = max((self._pieces_s(pieces) for pieces in slots), default=0.0)
        if rows:
            attention_s += self._rows_s(rows, context_tokens / dp, queries)
        talk_s = self._talk_s(split, most, asked, everywhere, slots)
        return compute_s + attention_s, talk_s, head_s

    def _bound_s(self, params: float, tokens: float, of_value: float, flop_s: float) -> float:
        return max(2 * params * tokens * flop_s, params * of_value * self._read_s)

    def _products_s(self, split: float, tokens: float, everywhere: float) -> float:
        """Returns the seconds of all matrices but the head. Where every token passes all of them at the same ranks they
        are bound together, as one kind of kernel."""
        axes, shape = self.axes, self.shape
        mlp, passing = self._mlp.ranks, tokens if self._mlp_by_context else split
        flops = 2 * (shape.attention_params * split / axes.tp + shape.dense_params * passing / mlp)
        nbytes = (shape.attention_params / axes.tp + shape.dense_params / mlp) * self._of_other
        if not shape.experts:
            return max(flops * self._flop_s, nbytes * self._read_s)
        passed = everywhere if self._experts.ranks > 1 else tokens
        uneven, fuller = self._uneven(passed) if self._whole_experts else (1.0, 1.0)
        routed = shape.expert_layers * shape.experts_per_token * shape.expert_params
        expert_flops = 2 * routed * passed / self._expert_ranks * uneven
        touched = _touched(shape, passed)
        weights = shape.expert_layers * shape.experts * shape.expert_params / self._expert_ranks * touched * fuller
        expert_bytes = weights * self._of_expert
        if self._experts.ranks == 1:
            return max((flops + expert_flops) * self._flop_s, (nbytes + expert_bytes) * self._read_s)
        own_s = max(flops * self._flop_s, nbytes * self._read_s)
        return own_s + max(expert_flops * self._flop_s, expert_bytes * self._read_s)

    def _uneven(self, tokens: float) -> tuple[float, float]:
        """Returns how many times as many tokens as the mean, and as many experts that any token reaches, the fullest of
        the ranks has."""
        ranks, shape = self._experts.ranks, self.shape
        if ranks < 2 or not tokens:
            return 1.0, 1.0
        deviations = math.sqrt(2 * math.log(ranks))
        mean = tokens * shape.experts_per_token / ranks
        fullest = min(ranks, (1 + deviations * math.sqrt((1 - 1 / ranks) / mean)) * self._skew)
        own = shape.experts / ranks
        touched = _touched(shape, tokens)
        scatter = deviations * math.sqrt(own * touched * (1 - touched))
        return fullest, min(own, own * touched + scatter) / (own * touched)

    def _pieces_s(self, pieces: Pieces) -> float:
        """Returns the seconds of attention of one copy's pieces."""
        pairs_s = read_s = 0.0
        for computed, cached in pieces:
            pairs_s += self._pair_s * attended(computed, cached)
            if self._window_pair_s:
                pairs_s += self._window_pair_s * attended_within(self.shape.window, computed, cached)
            read_s += self._context_s * (cached + computed)
            if self._state_s:
                pairs_s += self._delta_s * computed
                read_s += self._state_s
        return max(pairs_s, read_s)

    def _rows_s(self, rows: int, context_tokens: float, queries: float) -> float:
        """Returns the seconds of attention of one copy's rows: their KV is read once for all queries of a row."""
        shape = self.shape
        seen = context_tokens * (shape.kv_layers - shape.window_layers)
        if shape.window_layers:
            seen += min(context_tokens, float(rows * shape.window)) * shape.window_layers
        row_s = max(self._row_pair_s * queries, self._row_read_s)
        return row_s * seen + rows * max(self._delta_s * queries, self._state_s)

    def _talk_s(self, split: float, most: int, rows: float, everywhere: float, slots: Sequence[Pieces]) -> float:
        """Returns the seconds of all layers' collectives."""
        axes, shape, fabric = self.axes, self.shape, self.fabric
        tokens = most + rows
        moe = shape.expert_layers
        total = shape.layers * fabric.reduce_s_of(split * self._hidden, self._tp)
        shared = fabric.reduce_s_of((tokens if self._mlp_by_context else split) * self._hidden, self._mlp)
        total += (shape.layers - moe) * shared
        if self._tensor_experts:
            total += moe * 2 * fabric.gather_s(everywhere * self._hidden, self._experts)
        elif self._whole_experts:
            own = tokens / (axes.cp * axes.tp)
            uneven, _ = self._uneven(everywhere)
            for of_value in (self._dispatched, BF16):
                nbytes = shape.hidden * of_value * uneven
                total += moe * fabric.all_to_all_s(
                    own, nbytes, shape.experts_per_token, self._experts, self._expert_nodes
                )
            total += moe * fabric.gather_s(split * self._hidden, self._tp)
        else:
            total += moe * shared
        if most:
            longest = max(slots, key=lambda pieces: sum(computed for computed, _ in pieces))
            behind = sum(computed for computed, cached in longest if cached)
            total += self._context_talk_s(most, behind)
        if rows:
            group = fabric.gather_s(rows * self._row_q, self._dcp) + fabric.gather_s(rows * self._row_o, self._dcp)
            group += fabric.reduce_s_of(rows * self._row_o / axes.dcp, self._cp)
            total += shape.kv_layers * group
        return total

    def _context_talk_s(self, tokens: int, behind: int) -> float:
        """Returns the seconds of a step's collectives over cp and dcp: of `tokens` tokens, of which `behind` have
        cached ones before them, which lie at all ranks of these."""
        fabric, layers, dcp = self.fabric, self.shape.kv_layers, self.axes.dcp
        found = layers * fabric.gather_s(tokens * self._kv_token / max(1, layers), self._cp)
        for group, heads in ((self._cp, 1), (self._dcp, dcp)):
            if behind:
                found += layers * fabric.gather_s(behind * heads * self._prefill_q, group)
                found += layers * fabric.gather_s(behind * heads * self._prefill_o, group)
        return found


def _touched(shape: ModelShape, tokens: float) -> float:
    """Returns the share of a layer's experts that some of so many tokens is expected to reach."""
    missed: float = (1 - shape.experts_per_token / shape.experts) ** tokens
    return 1 - missed


def axes_node_spec(times: AxesRoofline, kv_dtype: str = "bf16", block_tokens: int = 512) -> NodeSpec:
    """Returns an instance of these ranks with its share of the memory, disks and NICs of the nodes that they lie on.
    Raises ConfigError: the weights do not fit."""
    gpu, shape, axes = times.gpu, times.shape, times.axes
    if times.slot_tokens < block_tokens:
        need, have = times.weight_bytes / 2**30, gpu.memory_bytes * gpu.efficiency.device_memory / 2**30
        why = f"a rank of {axes} has {need:,.0f} GiB of weights, and {gpu.name} room for {have:,.0f}"
        raise ConfigError(f"model={shape.name!r}: {why}; more ranks, or --weight-dtype fp8", field="model")
    whole = node_spec(gpu, times.world, shape, kv_dtype=kv_dtype, times=times, block_tokens=block_tokens, kv_tokens=1)
    slots = axes.dp
    return replace(
        whole,
        kv_tokens=slots * (times.slot_tokens // block_tokens) * block_tokens,
        slots=slots,
        pipeline=times if axes.pp > 1 else None,
    )

"""One model on one device over paged KV: `prefill` computes chunks, `decode` one token for each row of a batch.

The caller owns `pages` and decides who holds which page; the runner keeps no state of requests. Not thread-safe: one
thread steps. Steps that fail raise a named error and leave the runner usable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvmesh.engine.attention.backend import AttentionBackend, StepPlan, TokenSpan
from kvmesh.engine.attention.by_context import ContextAttention
from kvmesh.engine.attention.choice import make_backend, make_latent_backend
from kvmesh.engine.attention.grouped import GroupedAttention, GroupedPlan, GroupedSpan
from kvmesh.engine.axes import Axes
from kvmesh.engine.batch import Chosen, Column, DecodeBatch, DecodeInput, PrefillInput, SampledToken, SampleParams
from kvmesh.engine.cache_memory import GroupShape, check_memory, group_shapes
from kvmesh.engine.checkpoint import Checkpoint
from kvmesh.engine.config import DTYPES, ModelConfig
from kvmesh.engine.context import context_turn
from kvmesh.engine.models.blocks import DecoderModel
from kvmesh.engine.models.dispatch import share_rounds
from kvmesh.engine.models.latent import up_projections
from kvmesh.engine.models.moe import count_choices, exchanged_experts
from kvmesh.engine.models.mtp import MtpHead
from kvmesh.engine.models.registry import MODELS
from kvmesh.engine.models.token_shares import share_tokens
from kvmesh.engine.parallel import ALONE, ExpertsCut, RankMesh, check_shares, share, share_of
from kvmesh.engine.rope import Rotation
from kvmesh.engine.sampler import Preparation, Sampler, TokensInFlight
from kvmesh.engine.sampling.prompt_scores import TokenScores, score_tokens
from kvmesh.engine.stages import BusyTime, stage_groups, stage_layers
from kvmesh.engine.tensor_sources import TensorSource
from kvmesh.engine.weights import Weights
from kvmesh.engine.weights_memory import WeightsMemory
from kvmesh.engine.weights_update import WeightsUpdate
from kvmesh.errors import ConfigError, ContextTooLong, InternalError, InvalidRequest, NonFiniteLogits
from kvmesh.kvcache.cache_groups import CacheGroup, is_single
from kvmesh.kvcache.layout import ShardLayout

if TYPE_CHECKING:
    from kvmesh.engine.graphs import DecodeGraphs  # imports triton
    from kvmesh.engine.pieces import PieceGraphs

__all__ = [
    "DecodeInput",
    "PrefillInput",
    "Runner",
    "SampleParams",
    "SampledToken",
    "pages_over",
    "shard_layout",
    "torch_dtype",
]


def torch_dtype(name: str | torch.dtype) -> torch.dtype:
    """Returns the dtype called "float32", "bfloat16" or "float16" (torch's own is taken too). Raises ConfigError
    otherwise."""
    name = str(name).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"dtype={name!r} is not supported; supported: {', '.join(DTYPES)}", field="dtype")
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


ONE = Axes()


def shard_layout(
    config: ModelConfig, dtype: str | torch.dtype, block_tokens: int, axes: Axes = ONE, rank: int = 0
) -> ShardLayout:
    """Returns what a rank holds of each block: by default the whole model. Raises ConfigError when ranks along these
    axes cannot share it."""
    check_shares(config, axes)
    place = axes.place(rank)
    heads, layers = share(config.kv_heads, place.tp, axes.tp), stage_layers(config, axes, rank)
    return ShardLayout(
        len(layers),
        len(heads),
        block_tokens,
        config.head_dim,
        torch_dtype(dtype).itemsize,
        layers.start,
        heads.start,
        config.kv_planes,
        turn=context_turn(axes, rank),
        turns=axes.turns,
    )


def pages_over(
    buffer: memoryview | bytearray, layout: ShardLayout, num_pages: int, dtype: str | torch.dtype
) -> torch.Tensor:
    """Returns `pages` over writable memory of at least `num_pages * layout.shard_bytes` bytes, page p at p *
    shard_bytes."""
    nbytes = num_pages * layout.shard_bytes
    if len(buffer) < nbytes:
        raise InternalError(f"{num_pages} pages need {nbytes} bytes, the buffer has {len(buffer)}")
    flat = torch.frombuffer(buffer, dtype=torch_dtype(dtype), count=nbytes // layout.itemsize)
    return flat.view(num_pages, *layout.shape)


NOBODY = DecodeBatch.of(())


class Runner:
    """Loads `checkpoint` as `dtype` onto `device`; `pages [num_pages, *layout.shape]` must be on that device and of
    that dtype, or there is one such tensor for each cache group of the model, as `kvmesh.engine.cache_memory` has it,
    and steps name pages group by group (`PrefillInput.groups`); of a model with the one group that keeps all, that one
    tensor is `pages`.

    A step raises NonFiniteLogits, and may then be computed again without those rows, unless the runner is `tolerant`:
    then it answers the token -1 where logits are not finite, as a step over states changes these in place.

    `block_tokens` are those of a block; where ranks share contexts, a page of each has its part of them.

    In a `mesh` it loads and holds this rank's share; every rank must then make the same calls in the same order, and
    gets the same answers, but for stages of a pipeline before the last: these get no tokens of chunks, no
    log-probabilities and no scores, and do not wait for the last stage in a step without decode rows. A pipeline is
    `tolerant` always. Ranks of different places on `dp` have steps of their own; where they share experts (`rounds` is
    not None) each must make as many, those without a token by `serve`. `experts_cut` says how ranks share experts
    (`parallel.cuts_experts_whole`). `cuda_graphs`: as `use_pages` has it. With `mtp` the last stage loads the MTP head,
    too, for a `kvmesh.engine.mtp.MtpDrafter`. `weights_memory` can release the weights; with `weights_apart` a CPU's
    are taken not to be in the host's own memory, as those of a device are."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: str | torch.dtype,
        device: str | torch.device,
        block_tokens: int,
        pages: torch.Tensor | Sequence[torch.Tensor],
        mesh: RankMesh = ALONE,
        cuda_graphs: bool = False,
        experts_cut: ExpertsCut = "auto",
        mtp: bool = False,
        weights_apart: bool = False,
    ) -> None:
        self.config = checkpoint.config
        self.mesh = mesh
        own = share_of(self.config, mesh.axes)
        self.stage_layers = stage_layers(self.config, mesh.axes, mesh.rank)  # the layers of the model that it has
        self.layout = shard_layout(self.config, dtype, block_tokens, mesh.axes, mesh.rank)
        self._dtype, self._own = torch_dtype(dtype), own
        self.device = (pages if isinstance(pages, torch.Tensor) else pages[0]).device
        if torch.device(device).type != self.device.type:
            raise InternalError(f"pages are on {self.device}, the runner on {device}")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # where Triton launches
        self._sampler = Sampler(self.device)
        self.tolerant = mesh.axes.pp > 1
        self._check_pages(pages)
        self._experts_cut: ExpertsCut = experts_cut
        with torch.inference_mode():
            weights = Weights(checkpoint, self._dtype, self.device, mesh, experts_cut)
            self.model = MODELS[self.config.architecture](own, weights)
            self.mtp = MtpHead(own, weights, self.model) if mtp and self.model.stage.last else None
        self.weights_memory = WeightsMemory(self.model, self.mtp, self.device.type != "cpu" or weights_apart)
        self._stage = self.model.stage
        experts, self.expert_counts = self.config.experts, None
        if experts is not None:
            self.expert_counts = count_choices(self.model.layers, experts, self.device, self.stage_layers.start)
        self._exchanged = exchanged_experts(self.model.layers)  # before MLPs are those of shared tokens
        self.shared_tokens = share_tokens(self.model.layers, mesh.group("cp"))
        if self.mtp is not None and exchanged_experts([self.mtp.layer]):
            raise ConfigError("speculate=mtp: the head's experts would lie over dp", field="speculate")
        self.rounds = share_rounds(self._exchanged, mesh, self.device)
        self.use_pages(pages, cuda_graphs)
        checkpoint.close()  # everything has been copied out of the file mappings

    def new_weights(self, source: TensorSource) -> WeightsUpdate:
        """Returns what puts the weights of `source` in the place of those that the model has. No step may run between
        the begin and the end of `WeightsUpdate.apply`, and what is in pages is of the old weights."""

        def build(weights: Weights) -> DecoderModel:
            made = MODELS[self.config.architecture](self._own, weights)
            share_tokens(made.layers, self.mesh.group("cp"))
            return made

        weights = Weights(source, self._dtype, self.device, self.mesh, self._experts_cut)
        return WeightsUpdate(self.model, weights, build)

    def use_pages(
        self,
        pages: torch.Tensor | Sequence[torch.Tensor],
        cuda_graphs: bool,
        max_rows: int | None = None,
        max_tokens: int | None = None,
        max_drafts: int = 0,
    ) -> None:
        """Computes over these pages from here on, in place of those before. `cuda_graphs`: decode steps of up to
        `max_rows` rows, and steps that compute prompts of up to `max_tokens` tokens, are captured at once and replayed
        (on a CUDA device; None: as many as that is good for, 0: none), and with `max_drafts` decode steps of up to
        `max_rows` requests with as many drafted tokens each. A group's ranks call this together, once they
        are connected."""
        self._check_pages(pages)
        self.memory = (pages,) if isinstance(pages, torch.Tensor) else tuple(pages)
        self.drop_graphs()
        if not isinstance(pages, torch.Tensor) and is_single(self.config.cache_groups):
            [pages] = pages
        self.attention: AttentionBackend | GroupedAttention | ContextAttention
        if isinstance(pages, torch.Tensor):
            self.attention = self._backend(pages, range(len(self.stage_layers)))
            if self.mesh.group("cp", "dcp").size > 1:
                self.attention = ContextAttention(self.attention, self.mesh)
        else:
            if self.mesh.group("cp", "dcp").size > 1:
                raise InternalError("a model of several cache groups is not shared by context")
            groups = self.groups
            self.attention = GroupedAttention(groups, pages, self._backend, self.model.state_backend)
        capturable = (
            self.attention.capturable
            and self.mesh.world.capturable
            and self.model.capturable
            and self._stage.alone
            and self.device.type == "cuda"
        )
        if cuda_graphs and capturable:
            with torch.inference_mode():
                # Of a step with prompts, what exchanged experts send depends on all places' tokens: it is not captured.
                self._capture(max_rows, max_tokens if self.rounds is None else 0, max_drafts)

    def leave_pages(self) -> None:
        """Computes over one blank page (of each group) from here on, so that nothing here holds the pages of before."""
        one = [torch.zeros_like(pages[:1]) for pages in self.memory]
        self.use_pages(one if isinstance(self.attention, GroupedAttention) else one[0], cuda_graphs=False)

    def _backend(self, pages: torch.Tensor, layers: Sequence[int]) -> AttentionBackend:
        if self.config.latent is None:
            specs = self.model.attention
            return make_backend(pages, self._own.heads, [specs[layer] for layer in layers])
        ups = up_projections(self.model)
        return make_latent_backend(pages, self.config.latent, [ups[layer] for layer in layers])

    def drop_graphs(self) -> None:
        """Launches every step kernel by kernel from here on. A group is closed only after this: NCCL waits for graphs
        that hold its calls."""
        self.graphs: DecodeGraphs | None = None
        self.pieces: PieceGraphs | None = None
        if self.rounds is not None:
            self.rounds.sizes = ()

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def shapes(self) -> tuple[GroupShape, ...]:
        """What this rank keeps of each cache group."""
        tp = self.mesh.tp
        return group_shapes(self.config, self._dtype, self.layout.block_tokens, tp.rank, tp.size, self.stage_layers)

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The model's cache groups with this rank's layers, which count from its first."""
        return stage_groups(self.config.cache_groups, self.stage_layers)

    def zero_slots(self, group: int, slots: Sequence[int]) -> None:
        """Makes the states of a STATE group in these slots those of no token, before the first step of whoever has
        them."""
        self._grouped().states.zero(group, slots)

    def copy_slots(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies states of a STATE group between two steps: a snapshot into a row's slot, or the other way round. No
        target is a source."""
        self._grouped().states.copy(group, sources, targets)

    def keep_states(self, slots: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Returns copies of states, of each STATE group in the order of groups those in `slots[g]`, for
        `put_back_states`."""
        return self._grouped().states.kept(slots)

    def put_back_states(
        self, slots: Sequence[Sequence[int]], kept: Sequence[torch.Tensor], which: Sequence[int]
    ) -> None:
        """Makes the states in slots `slots[g][i]`, for each i of `which`, what they were when they were kept."""
        self._grouped().states.put_back(slots, kept, which)

    def _grouped(self) -> GroupedAttention:
        if not isinstance(self.attention, GroupedAttention):
            raise InternalError("the runner has one tensor for all cache groups")
        return self.attention

    def _check_pages(self, pages: torch.Tensor | Sequence[torch.Tensor]) -> None:
        if not isinstance(pages, torch.Tensor):
            check_memory(self.shapes, pages, self.device)
            return
        if tuple(pages.shape[1:]) != self.layout.shape or pages.dtype != self._dtype or pages.device != self.device:
            raise InternalError(
                f"pages are {list(pages.shape)} {pages.dtype} on {pages.device}, expected "
                f"[n, *{list(self.layout.shape)}] {self._dtype} on {self.device}"
            )

    def _capture(self, max_rows: int | None, max_tokens: int | None, max_drafts: int = 0) -> None:
        from kvmesh.engine.capture import CudaCapture
        from kvmesh.engine.graphs import MAX_ROWS, DecodeGraphs
        from kvmesh.engine.pieces import PieceGraphs, piece_sizes

        assert not isinstance(self.attention, ContextAttention), "it is not capturable"
        capture = CudaCapture(self.device)  # of both: one pool
        if max_rows != 0:
            room, longest = self.attention.most_tokens, self.config.max_context_tokens
            longest = longest if room is None else min(room, longest)
            self.graphs = DecodeGraphs(
                self._replayable,
                self.attention,
                -(-longest // self.layout.block_tokens),
                capture,
                self.mesh.world,
                max_rows or MAX_ROWS,
                max_drafts,
            )
            if self.rounds is not None:
                self.rounds.sizes = self.graphs.sizes
        if max_tokens != 0 and not (self.graphs and self.graphs.failed):
            self.pieces = PieceGraphs(
                self.model, self.attention, piece_sizes(self._own, max_tokens), capture, self.expert_counts
            )

    def _replayable(self, tokens: torch.Tensor, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes what the last layer makes of a decode step, and logits, by launches that can be captured. Rows that
        stand for none are at position 0, where no decode row is, and choose no expert that is counted."""
        positions, counts = plan.positions, self.expert_counts
        if self.rounds is not None:
            self.rounds.padded = len(tokens)  # rows that exchanged experts send, those for none among them
        with nullcontext() if counts is None else counts.only(counts.once(positions > 0)):
            hidden = self.model.hidden(tokens, positions, _attend(plan, None))
            return hidden, self.model.logits(hidden)

    def prefill(
        self, items: Sequence[PrefillInput], on_layer: Callable[[int], None] | None = None
    ) -> list[SampledToken | None]:
        """Computes all chunks in one step; one answer per item, None where nothing was to be sampled.

        `on_layer(i)` is called once layer i of all items is in `pages`, before the layer attends; on a CUDA device,
        once that is launched: who reads waits for an event of the current stream. Raises InvalidRequest (token ids),
        ContextTooLong, NonFiniteLogits (`rows` index `items`)."""
        return self.step(items, NOBODY, on_layer)[0]

    def decode(self, rows: Sequence[DecodeInput]) -> list[SampledToken]:
        """Computes one more token for each row, in order. Raises NonFiniteLogits (`rows` index `rows`), InvalidRequest
        (token ids), ContextTooLong."""
        return self.step((), DecodeBatch.of(rows))[1].tokens()

    @torch.inference_mode()
    def step(
        self,
        items: Sequence[PrefillInput],
        rows: DecodeBatch,
        on_layer: Callable[[int], None] | None = None,
        on_scores: Callable[[int, TokenScores], None] | None = None,
        on_late: Callable[[Callable[[], Chosen]], None] | None = None,
        on_hidden: Callable[[torch.Tensor], None] | None = None,
    ) -> tuple[list[SampledToken | None], Chosen]:
        """Computes chunks and decode rows in one pass over the weights: one answer per item and one per row.

        `on_layer` and what is raised are as for `prefill` and `decode`; `rows` of NonFiniteLogits index the decode rows
        first, then the items. `on_scores(i, scores)` gets those of the targets of item i; without it none are made.
        At a stage before the last, `on_late` gets what waits for the rows' tokens, and none are returned; without it
        the step waits for them. `on_hidden` gets what the last layer has made of the decode rows, `[rows, width]`, at
        the last stage."""
        if not items and not len(rows.positions):
            return [], Chosen(NOBODY.token_ids, {})
        self._check_prefill(items)
        self._check_decode(rows)
        count = end = len(rows.positions)
        wanted: dict[int, int] = {}  # items that ask for a token, and which of the step's tokens is their last
        for i, item in enumerate(items):
            end += len(item.token_ids)
            if item.sample is not None:
                wanted[i] = end - 1
        params, indices, tokens = rows.params, rows.indices, rows.token_ids
        if wanted:
            asked = [items[i].sample for i in wanted]
            params = [*params, *(p for p in asked if p is not None)]
            indices = np.append(indices, [p.answered + p.token_index for p in params[count:]])
        if items:
            tokens = np.concatenate((tokens, *(np.asarray(item.token_ids, np.int64) for item in items)))
        beside = [tokens]
        if count + len(wanted) < end:
            beside.append(np.array([*range(count), *wanted.values()], np.int64))
        if not self._stage.last:
            params = ()
        ready = self._sampler.prepare(params, indices, self.config.vocab_size, beside)
        graphs, size = self.graphs if not items else None, None
        if self.rounds is not None:
            self.rounds.begin(end, graphs is not None and graphs.holds(self._tables(rows)))
            size = self.rounds.replayed
        if graphs is not None:
            pages = self._tables(rows)
            logits = graphs.logits(rows.token_ids, pages, rows.positions, size=size, lengths=rows.lengths)
            if logits is not None:
                if on_hidden is not None:
                    on_hidden(graphs.hidden(count).clone())
                return [], self._choose(logits, ready)
        plan = self._plan(rows, items)
        self._stage.begin()
        hidden = self._hidden(ready.beside[0], plan, on_layer)
        if not self._stage.last:
            return [None] * len(items), self._passed_on(hidden, count, on_late)
        if on_hidden is not None:
            on_hidden(hidden[:count])
        bad = self._score(items, count, hidden, on_scores) if on_scores is not None else ()
        first, chosen = self._sample(list(wanted), count, len(items), hidden, ready)
        for i in bad:
            first[i] = SampledToken(-1)
        if count and not self._stage.alone:
            self._stage.send_tokens(torch.from_numpy(chosen.token_ids).to(self.device))
        return first, chosen

    def busy(self, end_ns: int) -> BusyTime:
        """Returns when this rank's stage computed in the step that ended at `end_ns`, without what it waited for other
        stages; zeros where there is one stage."""
        return self._stage.busy(end_ns)

    def _passed_on(
        self, hidden: torch.Tensor, rows: int, on_late: Callable[[Callable[[], Chosen]], None] | None
    ) -> Chosen:
        """Gives the next stage what this one has computed. Returns the tokens of the decode rows once the last stage
        has chosen them, or gives `on_late` what waits for them."""
        self._stage.send(hidden)
        if rows:
            tokens = self._stage.await_tokens(rows)
            if on_late is None:
                return Chosen(tokens().cpu().numpy(), {})
            on_late(lambda: Chosen(tokens().cpu().numpy(), {}))
        elif self.device.type == "cuda":  # a step ends when its work does
            torch.cuda.current_stream(self.device).synchronize()
        return Chosen(NOBODY.token_ids, {})

    @torch.inference_mode()
    def serve(self, between_layers: Callable[[], None] | None = None) -> None:
        """Takes part in a step of other data-parallel ranks, with no token of its own: their tokens get this rank's
        experts. `between_layers` is called in a step that is launched, not in one that is replayed."""
        if self.rounds is None:
            return
        self.rounds.begin(0, True)
        if self.rounds.replayed:
            assert self.graphs is not None, "every rank has what all replay"
            self.graphs.replay_for_nobody(self.rounds.replayed)
            return
        for block in self._exchanged if self.rounds.anyone else ():
            block.serve()
            if between_layers is not None:
                between_layers()

    @torch.inference_mode()
    def launch(
        self, rows: DecodeBatch, before: TokensInFlight | None = None, source: Column | None = None
    ) -> TokensInFlight:
        """Launches a step of decode rows, of which there is one at least, and does not wait for it. Row i goes on with
        the token of row `source[i]` of the step `before`, on the device, or with `rows.token_ids[i]` where `source[i]`
        is negative. Raises InvalidRequest, ContextTooLong; rows whose logits are not finite show in the result. As for
        histories see `Sampler.launch`."""
        self._check_decode(rows)
        beside, merely_on = [rows.token_ids], False
        if before is not None and source is not None:
            merely_on = len(source) == len(before.token_ids) and np.array_equal(source, np.arange(len(source)))
            beside += [] if merely_on else [source]
        ready = self._sampler.prepare(rows.params, rows.indices, self.config.vocab_size, beside, apart=True)
        tokens, *where = ready.beside
        if before is not None and merely_on:
            tokens = before.token_ids
        elif before is not None and where:
            tokens = torch.where(where[0] < 0, tokens, before.token_ids[where[0].clamp(min=0)])
        logits = None
        if self.graphs is not None:
            on_device = tokens if before is not None else None
            logits = self.graphs.logits(rows.token_ids, self._tables(rows), rows.positions, on_device)
        if logits is None:
            plan = self._plan(rows, ())
            attend = _attend(plan, None)
            if plan.own is not None:
                hidden = self._hidden_of_own(tokens, plan, attend)
            else:
                hidden = self.model.hidden(tokens, plan.positions, attend)
            logits = self.model.logits(hidden)
        return self._sampler.launch(logits, ready)

    def _tables(self, rows: DecodeBatch) -> Sequence[Any]:
        return rows.groups if isinstance(self.attention, GroupedAttention) else rows.pages

    def _plan(self, rows: DecodeBatch, items: Sequence[PrefillInput]) -> StepPlan:
        lengths = rows.lengths
        if isinstance(self.attention, GroupedAttention):
            named = [GroupedSpan(item.start, len(item.token_ids), item.groups) for item in items]
            if lengths is None:
                return self.attention.plan_mixed(rows.groups, rows.positions, named)
            return self.attention.plan_drafts(rows.groups, rows.positions, lengths, named)
        spans = [TokenSpan(item.start, len(item.token_ids), item.pages) for item in items]
        if lengths is None:
            return self.attention.plan_mixed(rows.pages, rows.positions, spans)
        return self.attention.plan_drafts(rows.pages, rows.positions, lengths, spans)

    def _hidden(self, token_ids: torch.Tensor, plan: StepPlan, on_layer: Callable[[int], None] | None) -> torch.Tensor:
        attend = _attend(plan, on_layer)
        if plan.own is not None:
            return self._hidden_of_own(token_ids, plan, attend)
        hidden = self.pieces.hidden(token_ids, plan.positions, attend) if self.pieces is not None else None
        return self.model.hidden(token_ids, plan.positions, attend) if hidden is None else hidden

    def _hidden_of_own(
        self, token_ids: torch.Tensor, plan: StepPlan, attend: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """Computes those of the step's tokens that are this rank's, and gathers all of them over cp."""
        assert self.shared_tokens is not None and plan.own is not None and plan.back is not None
        self.shared_tokens.counts = plan.counts
        hidden = self.model.hidden(token_ids.index_select(0, plan.own), plan.positions, attend)
        return self.shared_tokens.group.gather_rows(hidden, plan.counts).index_select(0, plan.back)

    def _sample(
        self, wanted: Sequence[int], count: int, items: int, hidden: torch.Tensor, ready: Preparation
    ) -> tuple[list[SampledToken | None], Chosen]:
        """Runs the head and the sampler only for the tokens that were asked for: of `count` decode rows, and of the
        items `wanted`."""
        first: list[SampledToken | None] = [None] * items
        if not count and not wanted:
            if self.device.type == "cuda":  # a step ends when its work does
                torch.cuda.current_stream(self.device).synchronize()
            return first, Chosen(NOBODY.token_ids, {})
        if len(ready.beside) > 1:
            hidden = hidden[ready.beside[1]]
        try:
            chosen = self._choose(self.model.logits(hidden), ready)
        except NonFiniteLogits as err:
            names = [*range(count), *(count + i for i in wanted)]
            raise NonFiniteLogits(err.message, rows=tuple(names[row] for row in err.rows)) from None
        if not wanted:
            return first, chosen
        for row, i in enumerate(wanted, count):
            first[i] = chosen.scored.get(row) or SampledToken(int(chosen.token_ids[row]))
        return first, Chosen(chosen.token_ids[:count], {row: s for row, s in chosen.scored.items() if row < count})

    def _score(
        self,
        items: Sequence[PrefillInput],
        count: int,
        hidden: torch.Tensor,
        on_scores: Callable[[int, TokenScores], None],
    ) -> list[int]:
        """Scores the targets of the items, whose tokens stand behind `count` decode rows. Returns the items whose
        logits are not finite, where the runner is tolerant. Raises NonFiniteLogits else."""
        bad, at = [], count
        for i, item in enumerate(items):
            if item.targets:
                mine = hidden[at : at + len(item.targets)]
                scores = score_tokens(self.model.logits, mine, item.targets, item.top, self.config.vocab_size)
                if scores.finite:
                    on_scores(i, scores)
                else:
                    bad.append(i)
            at += len(item.token_ids)
        if bad and not self.tolerant:
            rows = tuple(count + i for i in bad)
            raise NonFiniteLogits(f"logits of prompts in batch rows {list(rows)[:16]} are not finite", rows=rows)
        return bad

    def _choose(self, logits: torch.Tensor, ready: Preparation) -> Chosen:
        return self._sampler.launch(logits, ready).result() if self.tolerant else self._sampler.choose(logits, ready)

    def _check_decode(self, rows: DecodeBatch) -> None:
        if len(rows.positions):
            last = int(rows.positions.max())
            if last >= self.config.max_context_tokens:
                raise ContextTooLong(f"position {last} is beyond {self.config.max_context_tokens} tokens of context")
            self._check_tokens(int(rows.token_ids.min()), int(rows.token_ids.max()))

    def _check_prefill(self, items: Sequence[PrefillInput]) -> None:
        for item in items:
            if not item.token_ids:
                raise InvalidRequest.of("token_ids", (), "a prefill chunk needs at least one token")
            self._check_tokens(min(item.token_ids), max(item.token_ids))
            if item.targets:
                self._check_tokens(min(item.targets), max(item.targets))
            if item.start < 0 or item.start + len(item.token_ids) > self.config.max_context_tokens:
                raise ContextTooLong(
                    f"tokens {item.start}..{item.start + len(item.token_ids)} exceed {self.config.max_context_tokens} "
                    "tokens of context"
                )

    def _check_tokens(self, lowest: int, highest: int) -> None:
        """Refuses an id outside the embedding, which is an IndexError on a CPU and the end of the process on a GPU."""
        vocab = self.config.vocab_size
        if lowest < 0 or highest >= vocab:
            bad = lowest if lowest < 0 else highest
            raise InvalidRequest.of("token_ids", bad, f"token ids of this model lie in 0..{vocab - 1}")


def _attend(plan: StepPlan, on_layer: Callable[[int], None] | None) -> Callable[..., torch.Tensor]:
    def attend(
        layer: int, qkv: torch.Tensor, rotation: Rotation | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if rotation is None:  # a layer with states in place of pages
            assert isinstance(plan, GroupedPlan)
            answer = plan.attend_state(layer, qkv)
            if on_layer is not None:
                on_layer(layer)
            return answer
        plan.rotate_and_write(layer, qkv, rotation)
        if on_layer is not None:
            on_layer(layer)
        return plan.attend(layer, qkv, out)

    return attend

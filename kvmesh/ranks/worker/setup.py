"""What a rank chooses for its device before it serves: dtype, sizes of steps, pages. The rules are in
`kvmesh.ranks.sizing`; here the device and the host are asked for their numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch

from kvmesh.engine.batch import DecodeBatch
from kvmesh.engine.cache_memory import GroupShape, is_state, named_by_group, zeroed_memory
from kvmesh.engine.checkpoint import Checkpoint
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.cpu import native
from kvmesh.engine.parallel import share_of
from kvmesh.engine.pieces import piece_sizes
from kvmesh.engine.runner import DecodeInput, PrefillInput, Runner, SampleParams, shard_layout
from kvmesh.engine.stages import check_stages
from kvmesh.errors import ConfigError
from kvmesh.kvcache.cache_groups import CacheKind, is_single, peak_blocks
from kvmesh.kvcache.layout import ShardLayout
from kvmesh.ranks import protocol as m
from kvmesh.ranks import sizing
from kvmesh.ranks.host_memory import available_bytes
from kvmesh.ranks.speculation import NO_DRAFTS
from kvmesh.ranks.wake import axes_of
from kvmesh.ranks.worker.device import extents_room, weight_bytes
from kvmesh.ranks.worker.device_cuda import cuda_device


class DeviceUse(NamedTuple):
    """Bytes of a GPU. `free`: when nothing of this process was there; `peak`: of what torch gave out at once, `held`:
    of what it has from the driver; `free_now` at the same moment."""

    total: int
    free: int
    peak: int
    held: int
    free_now: int

    @property
    def libraries(self) -> int:
        """What this process has beside torch's: the context, kernels, libraries' workspaces."""
        return max(0, self.free - self.free_now - self.held)


class RankSetup:
    """The settings of one rank. `configure` is what the front said, with what it left open chosen; `why` the reasons.
    Raises ConfigError where the device has no room for the model and one request, and for a model that only the engine
    runs yet. `draft` is a model that drafts beside it."""

    def __init__(self, configure: m.Configure, checkpoint: Checkpoint, draft: Checkpoint | None = None) -> None:
        self._draft = draft
        self.grouped = configure.cache_groups and not is_single(checkpoint.config.cache_groups)
        if not self.grouped:
            _refuse_states(checkpoint.config)
        self._kind = sizing.device_kind(configure.device)
        self._device = cuda_device(configure.device) if self._kind == "cuda" else torch.device("cpu")
        self._total, self._free = _device_memory(self._device)
        self._config: ModelConfig = checkpoint.config
        check_stages(self._config, axes_of(configure))
        operators = self._kind == "cpu" and configure.dtype == sizing.AUTO and native.loaded()
        dtype, dtype_why = sizing.choose_dtype(configure.dtype, self._config.dtype, self._kind, operators)
        steps = sizing.choose_steps(configure.steps, self._kind, self._total)
        self.configure = msgspec.structs.replace(configure, dtype=dtype, steps=steps)
        self.ahead, self._ahead_why = sizing.choose_order(configure.async_steps, self._kind, configure.world_size)
        self.rows = steps.get("max_running", 0)
        self.max_drafts = 0 if configure.speculate == NO_DRAFTS else configure.max_draft_tokens
        self.tokens = sizing.step_tokens(steps, configure.block_tokens)
        chosen = [key for key, value in configure.steps.items() if not value]
        sizes = ", ".join(f"{key} {value:,}" for key, value in steps.items())
        by = f" ({', '.join(chosen) if len(chosen) < len(steps) else 'all'} by device)" if chosen else ""
        self.why = [f"{dtype} ({dtype_why})", *([f"{sizes}{by}"] if sizes else [])]

    def choose_pages(self, layout: ShardLayout, checkpoint: Checkpoint) -> sizing.ChosenPages:
        """Returns how many pages there can be, before anything is loaded. Of a GPU this is estimated, `profiled`
        measures it."""
        c = self.configure
        if c.num_pages or c.memory_bytes:
            return sizing.ChosenPages(c.num_pages or max(1, c.memory_bytes // layout.shard_bytes), "as told")
        weights = self._own_weights(checkpoint, layout.itemsize)
        step = sizing.step_bytes(self._config, self.tokens, self.rows, layout.itemsize)
        if self._kind == "cuda":
            room, source = sizing.cuda_room(self._total, self._free, max(1, c.device_instances))
            taken = {"weights": weights, "a step": step, **self._beside_steps(layout)}
            return sizing.choose_pages(room, taken, self._need(layout, 1), source)
        room, source = sizing.host_room(available_bytes(), c.device_instances, c.world_size, c.room_bytes)
        taken = {"weights": weights, "a step": step, "the process": sizing.RANK_BYTES, **self._beside_model(layout)}
        if c.num_extents:
            taken["host blocks"] = c.num_extents * layout.shard_bytes
        copies = 1 if c.num_extents else 2
        return sizing.choose_pages(room, taken, self._need(layout, copies), source, sizing.MOST_CPU_BYTES)

    def _own_weights(self, checkpoint: Checkpoint, itemsize: int) -> int:
        """Returns about how many bytes of weights this rank has: each data-parallel group has all but the experts that
        lie over several."""
        axes, experts = axes_of(self.configure), self._config.experts
        whole = weight_bytes(checkpoint, itemsize)
        if experts is None or "dp" not in axes.ep:
            return whole // axes.replica
        elements = len(experts.layers) * experts.count * 3 * experts.inner * self._config.hidden_size
        shared = min(elements * itemsize, whole)
        return shared // axes.world + (whole - shared) // axes.replica

    # ── by cache group ───────────────────────────────────────────────────────────────────────────

    def needs(self, shapes: Sequence[GroupShape]) -> tuple[sizing.GroupNeed, ...]:
        """Returns what decides how many blocks there are of each group."""
        block, step = self.configure.block_tokens, max(1, self.tokens)
        return tuple(sizing.GroupNeed(shape.page_bytes, peak_blocks(shape.group, block, step)) for shape in shapes)

    def choose_group_pages(self, shapes: Sequence[GroupShape], checkpoint: Checkpoint) -> sizing.ChosenPages:
        """Returns what `choose_pages` does, with a number for each group."""
        c, needs = self.configure, self.needs(shapes)
        if c.num_pages:
            return _counted(sizing.named_counts(c.num_pages, needs, self._requests), "as told")
        if c.memory_bytes:
            return self._split(c.memory_bytes, needs, "as told")
        layout = shapes[0].layout
        weights = self._own_weights(checkpoint, layout.itemsize)
        step = sizing.step_bytes(self._config, self.tokens, self.rows, layout.itemsize)
        if self._kind == "cuda":
            room, source = sizing.cuda_room(self._total, self._free, max(1, c.device_instances))
            taken = {"weights": weights, "a step": step, **self._beside_steps(layout)}
            return self._choose(room, taken, shapes, 1, source)
        room, source = sizing.host_room(available_bytes(), c.device_instances, c.world_size, c.room_bytes)
        taken = {"weights": weights, "a step": step, "the process": sizing.RANK_BYTES, **self._beside_model(layout)}
        if c.num_extents:
            counts = self.extent_counts(shapes, ())
            taken["host blocks"] = sum(n * shape.page_bytes for n, shape in zip(counts, shapes, strict=True))
        return self._choose(room, taken, shapes, 1 if c.num_extents else 2, source, sizing.MOST_CPU_BYTES)

    def extent_counts(self, shapes: Sequence[GroupShape], pages: Sequence[int]) -> tuple[int, ...]:
        """Returns the number of blocks of each group in the host segment, as `num_extents` does of one group."""
        c, needs = self.configure, self.needs(shapes)
        if c.num_extents:
            return sizing.named_counts(c.num_extents, needs, self._requests)
        if self._kind == "cpu":
            return tuple(pages)
        counts = sizing.split(extents_room(c), needs, self._requests)
        return tuple(max(2, min(own, there)) for own, there in zip(counts, pages, strict=True))

    @property
    def _requests(self) -> int:
        return self.rows or sizing.PREFILL_ROWS

    def _split(self, nbytes: int, needs: Sequence[sizing.GroupNeed], why: str) -> sizing.ChosenPages:
        counts = sizing.split(nbytes, needs, self._requests)
        if not counts[0]:
            least = sum(max(1, need.peak or 1) * need.block_bytes for need in needs)
            raise ConfigError(
                f"memory_mb={nbytes / sizing.MIB:.1f}: one request needs {-(-least // sizing.MIB)} MiB of windows and "
                "states, and as much again for the rest",
                field="memory_mb",
            )
        return _counted(counts, why)

    def _choose(
        self,
        room: int,
        taken: Mapping[str, int],
        shapes: Sequence[GroupShape],
        copies: int,
        source: str,
        most_bytes: int = 0,
    ) -> sizing.ChosenPages:
        """Chooses windows and states first, then as many pages of the others as there is room for beside them."""
        needs = self.needs(shapes)
        room_left = max(0, room - sum(taken.values())) // copies
        counts = sizing.split(min(room_left, most_bytes or room_left), needs, self._requests)
        kept = {at: count for at, count in enumerate(counts) if at and needs[at].peak is not None}
        nbytes = sum(count * needs[at].block_bytes for at, count in kept.items())
        need = self._need(shapes[0].layout, copies)
        others = sum(one.block_bytes for at, one in enumerate(needs) if at not in kept)
        need = dataclasses.replace(need, page_bytes=others + self._draft_page(others))
        taken = {**taken, "windows and states": nbytes * copies}
        found = sizing.choose_pages(room, taken, need, source, max(1, most_bytes - nbytes) if most_bytes else 0)
        return _counted(tuple(kept.get(at, found.count) for at in range(len(needs))), found.why)

    def group_settings(self, pages: sizing.ChosenPages, shapes: Sequence[GroupShape], runner: Runner) -> str:
        """Returns what `settings` does, with the pages of each group."""
        sizes = [
            f"{count:,} {'slots' if is_state(shape.group) else 'pages'} of {shape.group.name}, "
            f"{count * shape.page_bytes >> 20:,} MiB"
            for shape, count in zip(shapes, pages.groups, strict=True)
        ]
        return self._told(f"{'; '.join(sizes)}: {pages.why}", runner)

    @property
    def most_tokens(self) -> int:
        """The tokens of the largest step that computes prompts; 0 where none does."""
        return self.tokens + self.rows if self.tokens else 0

    def trial_pages(self, layout: ShardLayout) -> torch.Tensor:
        """Returns pages for a runner that has no others yet: as many as `profiled` needs."""
        count = max(1, -(-self.tokens // layout.block_tokens)) if self.profiles else 1
        return torch.zeros((count, *layout.shape), dtype=getattr(torch, self.configure.dtype), device=self._device)

    def trial_memory(self, shapes: Sequence[GroupShape]) -> tuple[torch.Tensor, ...]:
        """Returns what `trial_pages` does with a tensor for each cache group, with slots for all that `largest_step`
        computes."""
        pages = max(1, -(-self.tokens // shapes[0].layout.block_tokens)) if self.profiles else 1
        slots = self.rows + pages if self.profiles else 1
        return zeroed_memory(shapes, [slots if is_state(shape.group) else pages for shape in shapes], self._device)

    @property
    def profiles(self) -> bool:
        """Whether the number of pages is measured: on a GPU where nobody names it."""
        return self._kind == "cuda" and not self.configure.num_pages and not self.configure.memory_bytes

    def profiled(
        self,
        runner: Runner,
        layout: ShardLayout,
        use: Callable[[], DeviceUse] | None = None,
        shapes: Sequence[GroupShape] = (),
    ) -> sizing.ChosenPages:
        """Runs the largest step that there can be over the trial pages, and returns how many pages fit beside what it
        took, of each group where there are `shapes`. The trial pages go. `use`: for tests, in place of the GPU's own
        numbers."""
        trial = sum(pages.nbytes for pages in runner.memory)
        largest_step(runner, self.tokens, self.rows)
        found = (use or self._used)()
        runner.leave_pages()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        alone = self.configure.device_instances <= 1
        room, source = sizing.cuda_room(found.total, found.free, max(1, self.configure.device_instances))
        taken = {
            "weights and the largest step": found.peak - trial,
            "libraries": found.libraries if alone else min(found.libraries, sizing.LIBRARY_BYTES),
            **self._beside_steps(layout),
        }
        if shapes:
            return self._choose(room, taken, shapes, 1, source)
        return sizing.choose_pages(room, taken, self._need(layout, 1), source)

    def _beside_steps(self, layout: ShardLayout) -> dict[str, int]:
        """Returns what a GPU has beside steps: captured ones, and what attention may take that no trial shows."""
        latents = sizing.latent_bytes(self._config, self.tokens, self.rows, layout.itemsize)
        return {
            "CUDA graphs": self._graph_bytes(layout),
            "attention over latents": latents,
            **self._beside_model(layout),
        }

    def _beside_model(self, layout: ShardLayout) -> dict[str, int]:
        """Returns what a draft model's weights take."""
        return {"draft model": weight_bytes(self._draft, layout.itemsize)} if self._draft is not None else {}

    def _draft_page(self, page_bytes: int) -> int:
        """Returns what a draft model's KV takes for each page of so many bytes that the model has."""
        if self._draft is None:
            return 0
        own = shard_layout(self._draft.config, self.configure.dtype, self.configure.block_tokens).shard_bytes
        return min(own, page_bytes // sizing.DRAFT_SHARE)

    def settings(self, pages: sizing.ChosenPages, layout: ShardLayout, runner: Runner) -> str:
        """Returns what was chosen and why, in one line for people."""
        tokens, nbytes = pages.count * layout.block_tokens, pages.count * layout.shard_bytes
        size = f"{pages.count:,} pages of {layout.block_tokens} tokens ({tokens:,} in all), {nbytes >> 20:,} MiB"
        return self._told(f"{size}: {pages.why}", runner)

    def _told(self, pages: str, runner: Runner) -> str:
        told = [*self.why, pages]
        if self.rows and (self._kind == "cuda" or self.ahead):
            order = "a step is launched before the last one's tokens are read" if self.ahead else "steps are waited for"
            told.append(f"{order} ({self._ahead_why})")
        if self._kind == "cuda":
            told.append(self._graphs(runner))
        return "; ".join(told)

    def _graphs(self, runner: Runner) -> str:
        graphs, pieces, told = runner.graphs, runner.pieces, []
        if graphs is None and pieces is None:
            return f"no CUDA graphs ({'no Triton' if self.configure.cuda_graphs else 'as told'})"
        if graphs is not None:
            sizes = ", ".join(str(size) for size in graphs.sizes) or "no"
            told.append(f"CUDA graphs of {sizes} rows")
            if graphs.drafted_sizes:
                sizes = ", ".join(str(size) for size in graphs.drafted_sizes)
                told.append(f"CUDA graphs of {sizes} rows with drafts")
            if graphs.sizes and graphs.sizes[-1] < self.rows:
                told.append(f"more than {graphs.sizes[-1]} rows are launched one by one")
            if graphs.failed:
                told.append(graphs.failed)
        if pieces is not None:
            sizes = f"{pieces.sizes[0]} to {pieces.sizes[-1]:,}" if pieces.sizes else "no"
            told.append(f"{pieces.count:,} pieces of steps that compute prompts, {sizes} tokens")
            if pieces.failed:
                told.append(pieces.failed)
        return "; ".join(told)

    def _graph_bytes(self, layout: ShardLayout) -> int:
        """What captured steps keep: one step of all rows or of the largest pieces, whose memory all share, the pieces'
        buffers, and the driver's part of each size (the pieces of one size launch what one step does)."""
        c = self.configure
        if not c.cuda_graphs:
            return 0
        from kvmesh.engine.graphs import MAX_ROWS, buckets, drafted_buckets  # imports triton

        own = share_of(self._config, axes_of(c))
        rows, sizes = min(self.rows, MAX_ROWS), piece_sizes(own, self.most_tokens) if self.tokens else ()
        tokens = sizes[-1] if sizes else 0
        drafted = drafted_buckets(rows, self.max_drafts) if rows else ()
        steps = len(buckets(rows) if rows else ()) + len(drafted) + len(sizes)
        rows = max((rows, *drafted))
        return sizing.step_bytes(self._config, tokens, rows, layout.itemsize) + sizing.GRAPH_BYTES * steps

    def _need(self, layout: ShardLayout, copies: int) -> sizing.PageNeed:
        c, most = self.configure, self._config.max_context_tokens
        longest = min(c.max_context_tokens, most) if c.max_context_tokens else most
        return sizing.PageNeed(
            layout.shard_bytes + self._draft_page(layout.shard_bytes),
            c.block_tokens,
            copies,
            longest,
            bool(c.max_context_tokens),
            self.rows or sizing.PREFILL_ROWS,
        )

    def _used(self) -> DeviceUse:
        torch.cuda.synchronize(self._device)
        peak, held = torch.cuda.max_memory_allocated(self._device), torch.cuda.memory_reserved(self._device)
        free_now, total = torch.cuda.mem_get_info(self._device)
        return DeviceUse(total, self._free, peak, held, free_now)


SCORED_TOKENS, SCORED_TOP = 1024, 20  # of the trial: more tokens than a slice has, and the most that may be asked


def largest_step(runner: Runner, tokens: int, rows: int) -> None:
    """Computes `tokens` of prompts beside `rows` rows over the runner's pages, the rows sampled in the way that takes
    the most memory."""
    block, most = runner.layout.block_tokens, runner.config.max_context_tokens
    shapes, at = runner.shapes, 0
    items: list[PrefillInput] = []
    longest = max(1, most // block) * block if most >= block else most
    while at < tokens:
        count = min(tokens - at, longest)
        first = at // block
        pages = tuple(range(first, first - (-count // block)))
        groups = named_by_group(shapes, pages, rows + len(items))
        asked_of = SampleParams(temperature=1.0, top_k=50, top_p=0.9)
        items.append(PrefillInput((0,) * count, 0, pages, asked_of, groups))
        at += -(-count // block) * block
    # Adjusted logits are a copy in float64; what top_p leaves is gathered in another; log-probabilities are a third.
    asked = [SampleParams(temperature=1.0, top_p=0.9, logit_bias=((0, 1.0),), logprobs=0) for _ in range(rows)]
    batch = [DecodeInput(0, 0, (0,), params, named_by_group(shapes, (0,), row)) for row, params in enumerate(asked)]
    for item in items[:1]:  # scores are made in slices, of which a prompt of this length has several
        item.targets, item.top = (0,) * min(len(item.token_ids), SCORED_TOKENS), SCORED_TOP
    runner.step(items, DecodeBatch.of(batch), lambda _: None, lambda *_: None)


def _device_memory(device: torch.device) -> tuple[int, int]:
    """Returns a GPU's memory and what of it is free; zeros for a CPU."""
    if device.type != "cuda":
        return 0, 0
    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.cuda.set_device(device)
    free, total = torch.cuda.mem_get_info(device)
    torch.cuda.reset_peak_memory_stats(device)
    return total, free


def _counted(counts: tuple[int, ...], why: str) -> sizing.ChosenPages:
    return sizing.ChosenPages(counts[0], why, counts)


def _refuse_states(config: ModelConfig) -> None:
    """Raises ConfigError for a model that keeps states, which only an instance with cache groups has a place for."""
    if states := [group.name for group in config.cache_groups if group.kind is CacheKind.STATE]:
        raise ConfigError(
            f"{config.architecture} keeps recurrent states ({', '.join(states)}), which need cache_groups=true",
            field="cache_groups",
        )

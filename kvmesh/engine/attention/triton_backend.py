"""The CUDA backend of `attention`: Triton kernels that read pages where they are.

What a decode step needs (positions, slots, lengths, the lists of work) lies in one device buffer at a fixed address,
with a pinned twin on the host; a step sends it as one small copy, and a row's table of pages only when they change. So
a decode step can be captured once and replayed for other requests (`graphs`). Slots that hold no token are never read
here; those of a page that a prompt ends in are zeroed, since pages are pushed whole, with nothing of other requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from kvmesh.engine.attention.backend import (
    AttentionBackend,
    MixedPlan,
    SpanTokens,
    StepPlan,
    StepTables,
    TokenSpan,
)
from kvmesh.engine.batch import Integers
from kvmesh.engine.config import AttentionSpec
from kvmesh.engine.kernels.decode import (
    MOST_QUERIES,
    RESIDENT,
    longest_share,
    most_shares,
    paged_decode,
    queries_for,
    request_tiles_of,
    requests_of,
    scratch_elements,
    shares_of,
    tiles_of,
)
from kvmesh.engine.kernels.fused import rotate_and_write
from kvmesh.engine.kernels.prefill import LONG_CONTEXT, for_long_contexts, paged_prefill, usual, work_of
from kvmesh.engine.kernels.tiles import tiles_for
from kvmesh.engine.kernels.write import write_kv
from kvmesh.engine.rope import Rotation
from kvmesh.errors import InternalError

PROCESSORS = 132  # streaming multiprocessors of an H100, for pages that are on no GPU (tests)
CHOICE_STEPS = 16  # how long the shares may be is chosen anew: a row grows by a tile in more steps than that
STEP_COLUMNS = 4  # token ids, positions, slots, lengths
REQUEST_COLUMNS = 2  # of each request: its first row, how many it has
ROW_MULTIPLE = 16  # rows of a table: columns stay aligned, so that kernels are compiled once


def processors_of(device: torch.device) -> int:
    """Returns how many streaming multiprocessors the device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else PROCESSORS


def sent(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copies an array to the device without waiting for the copy."""
    made = torch.from_numpy(np.ascontiguousarray(array))
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


def capability_of(device: torch.device) -> tuple[int, int]:
    """Returns the GPU's generation; Hopper's for pages that are on no GPU (tests)."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


class ShareSizes(NamedTuple):
    """Says how a share is computed: by so many programs, of which a processor holds `resident`, in tiles of `tile`
    tokens."""

    programs: int
    resident: int
    tile: int


class ShareBackend(Protocol):
    """Is a backend whose decode steps are lists of shares; `share_dim` columns of each query head are what a share
    finds, `windows` is what layers see."""

    share_dim: int
    windows: list[tuple[int, int]]
    processors: int
    num_heads: int
    block_tokens: int
    device: torch.device

    def queries_for(self, rows: int, times: int = 1) -> int:
        """Returns how many rows of a request a program takes where requests have up to so many, with `times` as many
        heads as the backend's."""

    def share_sizes(self, queries: int) -> ShareSizes:
        """Returns the sizes of shares of requests of up to so many rows."""

    def page_array(self, pages: Sequence[int], end: int, seen: int = 0) -> np.ndarray:
        """As of `PagedMemory`."""

    def oldest_seen(self, position: int) -> int:
        """As of `PagedMemory`."""


class TritonAttention(AttentionBackend):
    """Attends through Triton's kernels. `decode_tables` serve the steps that are not replayed, and grow with the
    batch."""

    capturable = True

    def __init__(self, pages: torch.Tensor, num_heads: int, specs: Sequence[AttentionSpec]) -> None:
        super().__init__(pages, num_heads, specs)
        self.layers = [pages[:, layer] for layer in range(self.num_layers)]
        self.processors = processors_of(self.device)
        self.windows = sorted({spec.sees for spec in self.specs})  # and chunks
        self.share_programs, self.resident, self.share_dim = self.kv_heads, RESIDENT, self.head_dim
        self.tile = tiles_for(self.head_dim, pages.element_size(), self.block_tokens).keys
        cut = self.head_dim, pages.element_size(), self.block_tokens
        self.variant = usual(*cut)  # of prefill
        self.long_variant = for_long_contexts(*cut, capability_of(self.device))
        self.decode_tables = LaunchedTables(self)

    def queries_for(self, rows: int, times: int = 1) -> int:
        return queries_for(rows, times * self.num_heads // self.kv_heads)

    def share_sizes(self, queries: int) -> ShareSizes:
        return ShareSizes(self.share_programs, self.resident, self.tile)  # a KV head's program has all rows

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        """Copies an array to the device without waiting for the copy."""
        return sent(array, self.device)

    def plan_prefill(self, spans: Sequence[TokenSpan]) -> TritonPrefillPlan:
        return TritonPrefillPlan(self, spans)

    def plan_mixed(self, pages: Sequence[Sequence[int]], positions: Integers, spans: Sequence[TokenSpan]) -> StepPlan:
        if not spans or not pages:
            return super().plan_mixed(pages, positions, spans)
        return TritonMixedPlan(self, self.plan_decode(pages, positions), self.plan_prefill(spans), len(pages))

    def plan_decode(self, pages: Sequence[Sequence[int]], positions: Integers) -> DecodePlan:
        return DecodePlan(self, self.decode_tables.filled(pages, positions), len(pages))

    def plan_drafts(
        self, pages: Sequence[Sequence[int]], positions: Integers, lengths: Integers, spans: Sequence[TokenSpan]
    ) -> StepPlan:
        """Plans the rows of a request as one of its list of work: its K and V are read once for all of them."""
        if not pages:
            return self.plan_prefill(spans)
        decode = DecodePlan(self, self.decode_tables.filled(pages, positions, lengths), len(pages))
        return TritonMixedPlan(self, decode, self.plan_prefill(spans), len(pages)) if spans else decode

    def step_tables(self, rows: int, width: int, request_rows: int = 1) -> DecodeTables:
        return DecodeTables(self, rows, width, self.queries_for(request_rows))

    def replayed(self, tables: StepTables, rows: int) -> DecodePlan:
        assert isinstance(tables, DecodeTables)
        return DecodePlan(self, tables, rows, replayed=True)


class TritonPlan(StepPlan):
    """Writes K and V of a step's tokens in one launch, the rotation included. `layers` are the pages of each layer,
    `slots` int32 `[T]` as of `kernels.write.write_kv`."""

    layers: Sequence[torch.Tensor]
    slots: torch.Tensor

    def write(self, layer: int, qkv: torch.Tensor) -> None:
        write_kv(qkv, self.layers[layer], self.slots)

    def rotate_and_write(self, layer: int, qkv: torch.Tensor, rotation: Rotation) -> None:
        pages = self.layers[layer]
        if rotation.heads + 2 * pages.shape[2] == qkv.shape[1]:  # of queries alone: the kernel rotates keys as well
            super().rotate_and_write(layer, qkv, rotation)
        else:
            rotate_and_write(qkv, pages, self.slots, rotation)


def table_of(ids: Sequence[np.ndarray]) -> np.ndarray:
    """Returns int32 `[rows, width]`, each row the pages of one request; what lies behind them is 0."""
    table = np.zeros((len(ids), max(map(len, ids), default=0)), dtype=np.int32)
    for row, own in zip(table, ids, strict=True):
        row[: len(own)] = own
    return table


class TritonPrefillPlan(TritonPlan):
    def __init__(self, backend: TritonAttention, spans: Sequence[TokenSpan]) -> None:
        self.backend, self.layers = backend, backend.layers
        block = backend.block_tokens
        tokens = SpanTokens.of(backend, spans)
        ends = (span.start + span.length for span in spans)
        self.variant = backend.long_variant if max(ends, default=0) >= LONG_CONTEXT else backend.variant
        self.positions = backend.tensor(tokens.positions)
        self.slots = backend.tensor((tokens.page_ids * block + tokens.positions % block).astype(np.int32))
        self.table = backend.tensor(table_of(tokens.ids))
        self.work = backend.tensor(work_of([(span.start, span.length) for span in spans], self.variant.queries))

    def attend(self, layer: int, qkv: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        backend = self.backend
        out = backend.answer(qkv) if out is None else out
        paged_prefill(qkv, backend.layers[layer], self.table, self.work, backend.specs[layer], out, self.variant)
        return out


class TritonMixedPlan(TritonPlan, MixedPlan):
    """Writes the K and V of rows and spans together."""

    def __init__(self, backend: TritonAttention, decode: DecodePlan, prefill: TritonPrefillPlan, rows: int) -> None:
        super().__init__(backend, decode, prefill, rows)
        self.layers, self.slots = backend.layers, torch.cat((decode.slots, prefill.slots))


class Mirrored:
    """Is an array in pinned host memory and its twin on the device. `host` may be written between `wait` and `send`."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.device = torch.zeros(shape, dtype=dtype, device=device)
        self._pinned = torch.zeros(shape, dtype=dtype, pin_memory=on_gpu)
        self._sent = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self.host: np.ndarray = self._pinned.numpy()

    def wait(self) -> None:
        """Waits until the last copy has read the host's side, which is long ago unless the host runs ahead of the
        device."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self, first: int, end: int) -> None:
        """Copies rows [first, end) to the device."""
        if first < end:
            self.device[first:end].copy_(self._pinned[first:end], non_blocking=True)
        if self._sent is not None:
            self._sent.record()


class WorkList:
    """Lists the shares of a step for the layers of one window or chunk (`kernels.decode.shares_of`), as views of the
    step's inputs on the host and on the device. `used` is how many entries the step has; `split` tells that some row
    has other than one share."""

    def __init__(
        self,
        sizes: ShareSizes,
        processors: int,
        sees: tuple[int, int],
        host: tuple[np.ndarray, np.ndarray],
        device: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        (self.window, self.chunk), self._sizes, self._processors = sees, sizes, processors
        self._work, self._joins = host
        self.work, self.joins = device
        self.used, self.split = 0, True
        self._longest, self._rows, self._age = 1, 0, 0

    def fill(self, lengths: np.ndarray, requests: np.ndarray | None = None) -> None:
        """Takes the lengths of a step's rows; `requests` are the rows of each request, where they share its work."""
        (programs, resident, tile), processors = self._sizes, self._processors
        count = len(lengths if requests is None else requests)
        self._age += 1
        if count != self._rows or self._age >= CHOICE_STEPS:
            if requests is None:
                _, tiles = tiles_of(lengths, self.window, tile, self.chunk)
            else:
                _, tiles = request_tiles_of(lengths, requests, self.window, tile, self.chunk)
            self._longest = longest_share(tiles, programs, processors, resident)
            self._rows, self._age = count, 0
        work, joins = shares_of(lengths, self.window, tile, self._longest, self.chunk, requests=requests)
        # Rows may have been replaced by longer ones since the choice.
        while len(work) > most_shares(count, programs, processors):
            self._longest *= 2
            work, joins = shares_of(lengths, self.window, tile, self._longest, self.chunk, requests=requests)
        self.used, self.split = len(work), bool((joins[:, 1] != 1).any())
        self._work[: len(work)] = work
        self._work[len(work) :] = 0  # begins where it ends: none
        self._joins[: len(joins)] = joins
        if requests is not None:
            self._joins[len(joins) :] = 0  # rows that stand for none are of no request


class DecodeTables:
    """Holds what the kernels read of a decode batch of up to `rows` rows and `width` pages a row, at addresses that
    stay. `scratch` serves all layers, which follow each other.

    With `queries` above 1 up to so many rows of a request are computed together: then the page table has a row for each
    request, so that it stays as it is whatever is drafted, and `requests` says which rows these have. One of more rows
    is several requests."""

    def __init__(self, backend: ShareBackend, rows: int, width: int, queries: int = 1) -> None:
        self.rows = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
        self.backend, self.width, self.queries = backend, width, queries
        self.sizes = sizes = backend.share_sizes(queries)
        self.table = Mirrored((self.rows, width), torch.int32, backend.device)
        entries = most_shares(self.rows, sizes.programs, backend.processors)
        join_columns = 2 if queries == 1 else 3
        columns, lists = STEP_COLUMNS * self.rows, 4 * entries + join_columns * self.rows
        if queries > 1:
            columns += REQUEST_COLUMNS * self.rows
        self.step = Mirrored((columns + lists * len(backend.windows),), torch.int32, backend.device)
        host, device = self.step.host, self.step.device
        of_rows = STEP_COLUMNS * self.rows
        self._columns = host[:of_rows].reshape(STEP_COLUMNS, self.rows)
        self.token_ids, self.positions, self.slots, self.lengths = device[:of_rows].view(STEP_COLUMNS, -1).unbind()
        self._requests = host[of_rows:columns].reshape(-1, REQUEST_COLUMNS)
        self.requests = device[of_rows:columns].view(-1, REQUEST_COLUMNS) if queries > 1 else None
        self.lists: dict[tuple[int, int], WorkList] = {}
        for at, sees in zip(range(columns, len(host), lists), backend.windows, strict=True):
            joins = at + 4 * entries
            self.lists[sees] = WorkList(
                sizes,
                backend.processors,
                sees,
                (host[at:joins].reshape(-1, 4), host[joins : at + lists].reshape(-1, join_columns)),
                (device[at:joins].view(-1, 4), device[joins : at + lists].view(-1, join_columns)),
            )
        # Each row has a slot, and those of a request one more for each further share.
        slots = self.rows + queries * (entries - self.rows)
        need = scratch_elements(slots, backend.num_heads, backend.share_dim)
        self.scratch = torch.empty(need, dtype=torch.float32, device=backend.device)
        self._known: list[tuple[int, ...]] = [()] * self.rows
        self._counts = np.zeros(self.rows, dtype=np.int64)

    def fill(
        self,
        pages: Sequence[Sequence[int]],
        positions: Integers,
        token_ids: Integers = (),
        padded_rows: int = 0,
        lengths: Integers | None = None,
    ) -> None:
        """Takes the next step: row i computes the token at `positions[i]`. Rows from there to `padded_rows` stand for
        none: they write nothing and attend to nothing. `lengths`: how many rows in order are of each request, at
        positions that follow each other and over the same pages; None: one each. Raises InternalError for too few
        pages, or pages that do not exist."""
        count, block = len(pages), self.backend.block_tokens
        where = np.asarray(positions, dtype=np.int64)
        owners, requests = np.arange(count), None
        if self.queries == 1:
            self._update(pages, where)
        else:
            rows = np.ones(count, np.int64) if lengths is None else np.asarray(lengths, np.int64)
            requests = requests_of(rows, self.queries)
            firsts = np.cumsum(requests) - requests
            owners = np.repeat(np.arange(len(requests)), requests)
            self._update([pages[row] for row in firsts.tolist()], where[firsts])
        if count and (where // block >= self._counts[owners]).any():
            row = int((where // block >= self._counts[owners]).argmax())
            raise InternalError(f"token {where[row]} needs more than {self._counts[owners[row]]} pages of {block}")
        self.step.wait()
        tokens, at, slots, ends = self._columns
        tokens[: len(token_ids)] = token_ids
        at[:count] = where
        slots[:count] = self.table.host[owners, where // block] * block + where % block
        ends[:count] = where + 1
        end = max(count, padded_rows)
        tokens[count:end] = at[count:end] = ends[count:end] = 0
        slots[count:end] = -1
        if requests is not None:
            self._requests[: len(requests)] = np.stack((firsts, requests), 1)
        for work in self.lists.values():
            work.fill(ends[:end].astype(np.int64), requests)
        self.step.send(0, len(self.step.host))

    def holds(self, pages: Sequence[Sequence[int]]) -> bool:
        """Says whether every row's pages have room."""
        return max(len(row) for row in pages) <= self.width

    def _update(self, pages: Sequence[Sequence[int]], where: np.ndarray) -> None:
        """Writes and sends the tables of those rows whose pages have changed."""
        changed = [i for i, row in enumerate(pages) if row is not self._known[i] and tuple(row) != self._known[i]]
        if not changed:
            return
        found = [self._ids(pages[i], int(where[i])) for i in changed]
        self.table.wait()
        for i, ids in zip(changed, found, strict=True):
            self.table.host[i, : len(ids)] = ids
            self._known[i], self._counts[i] = tuple(pages[i]), len(ids)
        self.table.send(changed[0], changed[-1] + 1)

    def _ids(self, row: Sequence[int], position: int) -> Sequence[int] | np.ndarray:
        """Returns all pages of a row that computes the token at `position`, for which there may be too few."""
        end = len(row) * self.backend.block_tokens
        return self.backend.page_array(row, end, self.backend.oldest_seen(min(position, end - 1))) if row else row


class LaunchedTables:
    """Keeps the tables of steps that are not replayed, one for requests of one row and one for those of several. They
    grow with the batch."""

    def __init__(self, backend: ShareBackend) -> None:
        self._backend = backend
        self._tables = {1: DecodeTables(backend, ROW_MULTIPLE, 8)}

    def filled(
        self, pages: Sequence[Sequence[int]], positions: Integers, lengths: Integers | None = None
    ) -> DecodeTables:
        """Returns tables that hold the step, as of `DecodeTables.fill`, until the next one."""
        drafted = lengths is not None and len(lengths) < len(pages)
        queries = self._backend.queries_for(MOST_QUERIES) if drafted else 1
        rows, width = len(pages), max((len(row) for row in pages), default=0)
        have = self._tables.get(queries)
        if have is None or rows > have.rows or width > have.width:
            had = (0, 0) if have is None else (2 * have.rows, 2 * have.width)
            size = max(rows, ROW_MULTIPLE, had[0]), max(width, 8, had[1])
            have = self._tables[queries] = DecodeTables(self._backend, *size, queries)
        have.fill(pages, positions, lengths=lengths)
        return have


class DecodeStep:
    """Is the first `rows` rows of `tables` as they were filled last, until they are filled again. A `replayed` step
    then is any of at most so many rows, over the same addresses."""

    def __init__(self, tables: DecodeTables, rows: int, replayed: bool) -> None:
        self.tables, self.replayed = tables, replayed
        columns = (tables.token_ids, tables.positions, tables.slots, tables.lengths)
        self.token_ids, self.positions, self.slots, self.lengths = (column[:rows] for column in columns)
        self.most = most_shares(rows, tables.sizes.programs, tables.backend.processors)

    def shares(self, sees: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the list of work of layers that see so much, and what joins it, None where no row needs that."""
        work = self.tables.lists[sees]
        joins = work.joins if self.replayed or work.split else None
        return work.work[: self.most if self.replayed else work.used], joins


class DecodePlan(DecodeStep, TritonPlan):
    """Attends for the rows of a `DecodeStep`."""

    def __init__(self, backend: TritonAttention, tables: DecodeTables, rows: int, replayed: bool = False) -> None:
        DecodeStep.__init__(self, tables, rows, replayed)
        self.backend, self.layers = backend, backend.layers

    def attend(self, layer: int, qkv: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        backend, tables, spec = self.backend, self.tables, self.backend.specs[layer]
        out = backend.answer(qkv) if out is None else out
        work, joins = self.shares(spec.sees)
        paged_decode(
            qkv,
            backend.layers[layer],
            tables.table.device,
            self.lengths,
            work,
            joins,
            spec,
            tables.scratch,
            out,
            requests=tables.requests,
            queries=tables.queries,
        )
        return out

"""The CUDA backend of `attention`: Triton kernels that read pages where they are.

What a decode step needs (page tables, positions, slots, lengths) lies in device buffers at fixed addresses, each with a
pinned twin on the host; a step sends one small copy, and a row's table only when its pages change. So a decode step can
be captured once and replayed for other requests (`graphs`). Slots that hold no token are never read here; those of a
page that a prompt ends in are zeroed, since pages are pushed whole, with nothing of other requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvmesh.engine.attention import AttentionBackend, Span, StepPlan
from kvmesh.engine.batch import Integers
from kvmesh.engine.config import AttentionSpec
from kvmesh.engine.kernels.decode import paged_decode, scratch_elements, splits_for
from kvmesh.engine.kernels.prefill import paged_prefill, work_of
from kvmesh.engine.kernels.tiles import tiles_for
from kvmesh.engine.kernels.write import write_kv
from kvmesh.errors import InternalError

PROCESSORS = 132  # streaming multiprocessors of an H100, for pages that are on no GPU (tests)
TOKENS, POSITIONS, SLOTS, LENGTHS = range(4)


class TritonAttention(AttentionBackend):
    """`decode_tables` of steps that are not replayed grow with the batch."""

    capturable = True

    def __init__(self, pages: torch.Tensor, num_heads: int, specs: Sequence[AttentionSpec]) -> None:
        super().__init__(pages, num_heads, specs)
        self.layers = [pages[:, layer] for layer in range(self.num_layers)]
        on_gpu = self.device.type == "cuda"
        self.processors = torch.cuda.get_device_properties(self.device).multi_processor_count if on_gpu else PROCESSORS
        self.decode_tables = DecodeTables(self, 8, 8)

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        """On the device, without waiting for the copy."""
        made = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type != "cuda":
            return made
        return made.pin_memory().to(self.device, non_blocking=True)

    def plan_prefill(self, spans: Sequence[Span]) -> StepPlan:
        return PrefillPlan(self, spans)

    def plan_decode(self, pages: Sequence[Sequence[int]], positions: Integers) -> StepPlan:
        rows, width = len(pages), max(len(row) for row in pages)
        if rows > self.decode_tables.rows or width > self.decode_tables.width:
            have = self.decode_tables
            self.decode_tables = DecodeTables(self, max(rows, 2 * have.rows), max(width, 2 * have.width))
        self.decode_tables.fill(pages, positions)
        return DecodePlan(self, self.decode_tables, rows)


class PrefillPlan:
    def __init__(self, backend: TritonAttention, spans: Sequence[Span]) -> None:
        self.backend = backend
        block = backend.block_tokens
        ids = [backend.page_array(span.pages, span.start + span.length) for span in spans]
        table = np.zeros((len(spans), max(len(row) for row in ids)), dtype=np.int32)
        positions, slots = [], []
        for at, (span, row) in enumerate(zip(spans, ids, strict=True)):
            table[at, : len(row)] = row
            where = np.arange(span.start, span.start + span.length)
            positions.append(where)
            slots.append(row[where // block] * block + where % block)
            if filled := (span.start + span.length) % block:
                backend.pages[int(row[-1]), :, :, :, filled:] = 0
        tiles = tiles_for(backend.head_dim, backend.pages.element_size(), block)
        self.positions = backend.tensor(np.concatenate(positions))
        self.slots = backend.tensor(np.concatenate(slots))
        self.table = backend.tensor(table)
        self.work = backend.tensor(work_of([(span.start, span.length) for span in spans], tiles.queries))

    def write(self, layer: int, qkv: torch.Tensor) -> None:
        write_kv(qkv, self.backend.layers[layer], self.slots)

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        backend = self.backend
        out = qkv.new_empty(qkv.shape[0], backend.num_heads * backend.head_dim)
        paged_prefill(qkv, backend.layers[layer], self.table, self.work, backend.specs[layer], out)
        return out


class Mirrored:
    """An array on the host, pinned, and its twin on the device. `host` may be written between `wait` and `send`."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.device = torch.zeros(shape, dtype=dtype, device=device)
        self._pinned = torch.zeros(shape, dtype=dtype, pin_memory=on_gpu)
        self._sent = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self.host: np.ndarray = self._pinned.numpy()

    def wait(self) -> None:
        """Until the last copy has read the host's side: long ago, but for a host that runs ahead of the device."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self, first: int, end: int) -> None:
        """Rows [first, end) to the device."""
        if first < end:
            self.device[first:end].copy_(self._pinned[first:end], non_blocking=True)
        if self._sent is not None:
            self._sent.record()


class DecodeTables:
    """What the kernels read of a decode batch of up to `rows` rows and `width` pages a row, at addresses that stay.
    `scratch` serves all layers: they follow each other."""

    def __init__(self, backend: TritonAttention, rows: int, width: int) -> None:
        self.backend, self.rows, self.width = backend, rows, width
        self.table = Mirrored((rows, width), torch.int32, backend.device)
        self.step = Mirrored((4, rows), torch.int64, backend.device)
        heads, dim = backend.num_heads, backend.head_dim
        need = max(scratch_elements(n, heads, dim, self.splits(n)) for n in range(1, rows + 1))
        self.scratch = torch.empty(need, dtype=torch.float32, device=backend.device)
        self._known: list[tuple[int, ...]] = [()] * rows
        self._counts = np.zeros(rows, dtype=np.int64)

    def splits(self, rows: int) -> int:
        return splits_for(rows, self.backend.kv_heads, self.backend.processors)

    def fill(
        self,
        pages: Sequence[Sequence[int]],
        positions: Integers,
        token_ids: Integers = (),
        padded_rows: int = 0,
    ) -> None:
        """The next step: row i computes the token at `positions[i]`. Rows from there to `padded_rows` stand for none:
        they write nothing and attend to nothing. InternalError: too few pages, or pages that do not exist."""
        count, block = len(pages), self.backend.block_tokens
        where = np.asarray(positions, dtype=np.int64)
        self._update(pages)
        if count and (where // block >= self._counts[:count]).any():
            row = int((where // block >= self._counts[:count]).argmax())
            raise InternalError(f"token {where[row]} needs more than {self._counts[row]} pages of {block}")
        self.step.wait()
        step = self.step.host
        step[TOKENS, : len(token_ids)] = token_ids
        step[POSITIONS, :count] = where
        step[SLOTS, :count] = self.table.host[np.arange(count), where // block].astype(np.int64) * block + where % block
        step[LENGTHS, :count] = where + 1
        end = max(count, padded_rows)
        step[TOKENS, count:end] = step[POSITIONS, count:end] = step[LENGTHS, count:end] = 0
        step[SLOTS, count:end] = -1
        self.step.send(0, 4)

    def _update(self, pages: Sequence[Sequence[int]]) -> None:
        """Write and send the tables of rows whose pages are others than they were."""
        changed = [i for i, row in enumerate(pages) if row is not self._known[i] and tuple(row) != self._known[i]]
        if not changed:
            return
        block = self.backend.block_tokens
        found = [self.backend.page_array(row, len(row) * block) if row else row for row in (pages[i] for i in changed)]
        self.table.wait()
        for i, ids in zip(changed, found, strict=True):
            self.table.host[i, : len(ids)] = ids
            self._known[i], self._counts[i] = tuple(pages[i]), len(ids)
        self.table.send(changed[0], changed[-1] + 1)


class DecodePlan:
    """The first `rows` rows of `tables`, as they were filled last. Valid until they are filled again."""

    def __init__(self, backend: TritonAttention, tables: DecodeTables, rows: int) -> None:
        self.backend, self.tables = backend, tables
        self.token_ids, self.positions, self.slots, self.lengths = tables.step.device[:, :rows].unbind()
        self.splits = tables.splits(rows)

    def write(self, layer: int, qkv: torch.Tensor) -> None:
        write_kv(qkv, self.backend.layers[layer], self.slots)

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        backend, tables = self.backend, self.tables
        out = qkv.new_empty(qkv.shape[0], backend.num_heads * backend.head_dim)
        paged_decode(
            qkv,
            backend.layers[layer],
            tables.table.device,
            self.lengths,
            backend.specs[layer],
            tables.scratch,
            self.splits,
            out,
        )
        return out

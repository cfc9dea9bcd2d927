"""Attention over one tensor of pages for each cache group (ADR 0037).

Each group that keeps tokens has a backend of its own over its pages, with tables of its own, so that a layer meets what
it would meet in a model of this group's layers alone. Pages that no later token sees are holes in a group's table
(`backend.PagedMemory.page_array`). States have no pages to attend over: a step names their slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from kvmesh.engine.attention.backend import AttentionBackend, StepPlan, StepTables, TokenSpan
from kvmesh.engine.batch import Integers
from kvmesh.engine.cache_memory import StateBackend, StateMemory, StatePlan, StateStep, is_state
from kvmesh.engine.rope import Rotation
from kvmesh.errors import InternalError
from kvmesh.kvcache.cache_groups import CacheGroup, CacheKind

Tables = Sequence[Sequence[Sequence[int]]]  # [group][row]: pages, or the slot of a state


class GroupedSpan(NamedTuple):
    """Is a TokenSpan whose pages are named group by group."""

    start: int
    length: int
    groups: Sequence[Sequence[int]]


class GroupedAttention:
    """Attends over `memory[g]`, the pages of `groups[g]`. `make` returns the backend over the pages of some layers of
    the model, `make_states` that of its states, where it has any. Plans take tables group by group, as
    `DecodeBatch.groups` has them. Raises InternalError where no group keeps tokens."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        memory: Sequence[torch.Tensor],
        make: Callable[[torch.Tensor, Sequence[int]], AttentionBackend],
        make_states: Callable[[StateMemory], StateBackend],
    ) -> None:
        self.groups, self.memory = tuple(groups), tuple(memory)
        self.tokens = tuple(number for number, group in enumerate(groups) if not is_state(group))
        if not self.tokens:
            raise InternalError("no cache group keeps tokens")
        self.backends: list[AttentionBackend] = []
        self.places: dict[int, tuple[int, int]] = {}  # of each layer: (which backend, layer within it)
        for number in self.tokens:
            layers = groups[number].layers
            for local, layer in enumerate(layers):
                self.places.setdefault(layer, (len(self.backends), local))
            self.backends.append(make(memory[number], layers))
        self.states = StateMemory(groups, memory)
        self._state_backend = make_states(self.states) if self.states.numbers else None
        first = self.backends[0]
        self.device, self.dtype, self.block_tokens = first.device, first.dtype, first.block_tokens
        self.num_heads, self.kv_heads, self.head_dim = first.num_heads, first.kv_heads, first.head_dim
        # Whoever replays a decode step would have to keep slots at an address, too.
        self.capturable = self._state_backend is None and all(backend.capturable for backend in self.backends)

    @property
    def most_tokens(self) -> int | None:
        """The tokens of the longest request that finds room; None where each group gives back what lies behind."""
        counts = [
            backend.num_pages * self.block_tokens
            for number, backend in zip(self.tokens, self.backends, strict=True)
            if self.groups[number].kind is CacheKind.ALL
        ]
        return min(counts, default=None)

    def plan_mixed(self, tables: Tables, positions: Integers, spans: Sequence[GroupedSpan]) -> GroupedPlan:
        """Plans one step of decode rows and spans, as `AttentionBackend.plan_mixed` does. Raises InternalError unless
        there is one table a group, and as `page_array` does."""
        return self._plan(tables, positions, None, spans)

    def plan_drafts(
        self, tables: Tables, positions: Integers, lengths: Integers, spans: Sequence[GroupedSpan]
    ) -> GroupedPlan:
        """Plans as `AttentionBackend.plan_drafts` does. The rows of one request are one sequence of its states."""
        return self._plan(tables, positions, lengths, spans)

    def _plan(
        self, tables: Tables, positions: Integers, lengths: Integers | None, spans: Sequence[GroupedSpan]
    ) -> GroupedPlan:
        if any(len(span.groups) != len(self.groups) for span in spans):
            raise InternalError(f"a chunk has one table for each of {len(self.groups)} cache groups")
        plans = []
        for number, backend in zip(self.tokens, self.backends, strict=True):
            rows = self.rows_of(tables, number, len(positions))
            own = [TokenSpan(span.start, span.length, span.groups[number]) for span in spans]
            if lengths is None:
                plans.append(backend.plan_mixed(rows, positions, own))
            else:
                plans.append(backend.plan_drafts(rows, positions, lengths, own))
        states = None
        if self._state_backend is not None:
            states = self._state_backend.plan(self._states(tables, positions, lengths, spans))
        return GroupedPlan(self, plans, states)

    def rows_of(self, tables: Tables, number: int, rows: int) -> Sequence[Sequence[int]]:
        """Returns one group's tables of so many rows. Raises InternalError when these are not all there."""
        if not rows:
            return ()
        if len(tables) != len(self.groups) or len(tables[number]) != rows:
            raise InternalError(f"{rows} rows have one table each for each of {len(self.groups)} cache groups")
        return tables[number]

    def _states(
        self, tables: Tables, positions: Integers, lengths: Integers | None, spans: Sequence[GroupedSpan]
    ) -> StateStep:
        counts = [1] * len(positions)
        rows: Sequence[int] = range(len(positions))
        slots = []
        if lengths is not None:
            counts = [int(length) for length in lengths]
            rows = [end - length for end, length in zip(accumulate(counts), counts, strict=True)]
        for at, number in enumerate(self.states.numbers):
            named = self.rows_of(tables, number, len(positions))
            own = [named[row][0] for row in rows]
            own += [span.groups[number][0] for span in spans]
            self.states.check(at, own)
            slots.append(tuple(own))
        starts = (*(int(positions[row]) for row in rows), *(span.start for span in spans))
        alone = next((at for at, count in enumerate(counts) if count > 1), len(counts))
        return StateStep(alone, starts, (*counts, *(span.length for span in spans)), tuple(slots))

    def step_tables(self, rows: int, width: int, request_rows: int = 1) -> GroupedTables:
        """Returns tables for decode steps that are replayed, as `TritonAttention.step_tables` does."""
        return GroupedTables(self, [backend.step_tables(rows, width, request_rows) for backend in self.backends])

    def replayed(self, tables: StepTables, rows: int) -> GroupedPlan:
        """Returns the plan of any step of at most so many rows of `tables`."""
        assert isinstance(tables, GroupedTables)
        plans = [backend.replayed(own, rows) for backend, own in zip(self.backends, tables.tables, strict=True)]
        return GroupedPlan(self, plans, None)

    def inputs(self, tokens: int) -> torch.Tensor:
        return self.backends[0].inputs(tokens)

    def answer(self, qkv: torch.Tensor) -> torch.Tensor:
        return self.backends[0].answer(qkv)


class GroupedPlan(StepPlan):
    """Runs each layer by its group's plan, layers with states by `states`."""

    def __init__(self, backend: GroupedAttention, plans: Sequence[StepPlan], states: StatePlan | None) -> None:
        self.plans, self.states = tuple(plans), states
        self.positions = plans[0].positions
        self._of = {layer: (plans[at], local) for layer, (at, local) in backend.places.items()}

    def write(self, layer: int, qkv: torch.Tensor) -> None:
        plan, local = self._of[layer]
        plan.write(local, qkv)

    def rotate_and_write(self, layer: int, qkv: torch.Tensor, rotation: Rotation) -> None:
        plan, local = self._of[layer]
        plan.rotate_and_write(local, qkv, rotation)

    def attend(self, layer: int, qkv: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        plan, local = self._of[layer]
        return plan.attend(local, qkv, out)

    def attend_state(self, layer: int, inputs: Any) -> torch.Tensor:
        """As of `StatePlan`."""
        assert self.states is not None, f"layer {layer} has no states"
        return self.states.attend_state(layer, inputs)


class GroupedTables:
    """Holds the tables of each group for decode steps that are replayed; the others of a step's inputs are those of the
    first group's."""

    def __init__(self, backend: GroupedAttention, tables: Sequence[StepTables]) -> None:
        self._backend, self.tables = backend, tuple(tables)
        self.token_ids = tables[0].token_ids

    def holds(self, pages: Tables) -> bool:
        return all(own.holds(pages[number]) for number, own in zip(self._backend.tokens, self.tables, strict=True))

    def fill(
        self,
        pages: Tables,
        positions: Integers,
        token_ids: Integers = (),
        padded_rows: int = 0,
        lengths: Integers | None = None,
    ) -> None:
        for number, own in zip(self._backend.tokens, self.tables, strict=True):
            named = self._backend.rows_of(pages, number, len(positions))
            own.fill(named, positions, token_ids, padded_rows, lengths)

"""The batch as columns against one record a row, and the plans of a backend that has seen every step before against
plans made on the spot: whatever joins, grows, stalls, leaves and ends between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.engine.attention.backend import AttentionBackend
from kvmesh.engine.attention.choice import make_backend
from kvmesh.engine.attention.torch_backend import TorchAttention
from kvmesh.engine.attention.torch_backend import TorchDecodePlan as TorchPlan
from kvmesh.engine.batch import Chosen, DecodeBatch, SampledToken, SampleParams
from kvmesh.engine.config import AttentionSpec
from kvmesh.ranks import protocol as m
from kvmesh.ranks.worker.rows import RunningRows

BLOCK, PAGES, VOCAB = 4, 32, 6
SAMPLING = m.Sampling(0.0, 1.0, 0, 1)


@dataclass
class Record:
    token: int
    position: int
    length: int
    join: m.Join
    params: SampleParams
    pages: tuple[int, ...]
    stalled: bool = False

    def takes(self, token: int) -> m.Token:
        index, self.token = self.length, token
        self.position += 1
        self.length += 1
        stops = token in self.join.stop_token_ids and self.length >= self.join.min_tokens
        finish = 1 if stops else 2 if self.length >= self.join.max_tokens else 0
        told = m.Logprobs(-token / 2, ((token, -0.5),)) if self.params.logprobs is not None else None
        return m.Token(self.join.handle, token, index, finish, told)


@st.composite
def joins(draw: st.DrawFn) -> tuple[int, int, tuple[int, ...], int, int, tuple[int, ...], bool, int]:
    held = draw(st.integers(1, 4))
    pages = draw(st.lists(st.integers(0, PAGES - 1), min_size=held, max_size=held))
    context = held * BLOCK - draw(st.integers(0, 3))  # soon without room
    stop = draw(st.lists(st.integers(0, VOCAB - 1), max_size=2))
    most, least, answered = draw(st.integers(4, 9)), draw(st.integers(0, 9)), draw(st.integers(0, 3))
    return (
        context,
        draw(st.integers(0, VOCAB - 1)),
        tuple(pages),
        most,
        least,
        tuple(stop),
        draw(st.booleans()),
        answered,
    )


PLACE = st.integers(0, 7)
JOINS = st.tuples(st.just("join"), joins())
ACTIONS = st.one_of(
    JOINS,
    st.tuples(st.just("grant"), st.tuples(PLACE, st.lists(st.integers(0, PAGES - 1), max_size=2))),
    st.tuples(st.just("leave"), PLACE),
    st.tuples(st.just("step"), st.lists(st.integers(0, VOCAB - 1), min_size=16, max_size=16)),
    st.tuples(st.just("step"), st.lists(st.integers(0, VOCAB - 1), min_size=16, max_size=16)),
)


def backends() -> list[AttentionBackend]:
    pages = torch.zeros(PAGES, 1, 2, 1, BLOCK, 2)
    specs = (AttentionSpec(1.0),)
    return [TorchAttention(pages, 1, specs), make_backend(pages, 1, specs)]


def planned(backend: AttentionBackend, batch: DecodeBatch) -> list[object]:
    """What kernels are given, without what lies past a row's last page."""
    plan = backend.plan_decode(batch.pages, batch.positions)
    if isinstance(plan, TorchPlan):
        return [plan.positions.tolist(), plan.page_ids.tolist(), plan.slots.tolist()]
    sequences, table = plan.sequences[:, :3].tolist(), plan.table.tolist()  # type: ignore[attr-defined]
    used = [ids[: position // BLOCK + 1] for ids, position in zip(table, batch.positions.tolist(), strict=False)]
    return [plan.positions.tolist(), sequences, used]


@settings(max_examples=150, deadline=None)
@given(st.lists(JOINS, min_size=3, max_size=6), st.lists(ACTIONS, max_size=30))
def test_columns_do_what_records_would(first: list[tuple[str, Any]], then: list[tuple[str, Any]]) -> None:
    rows, records, kept = RunningRows(BLOCK), dict[int, Record](), backends()
    for handle, (kind, what) in enumerate([*first, *then]):
        match kind, what:
            case "join", (context, token, pages, most, least, stop, scored, answered):
                params = SampleParams(logprobs=1 if scored else None, answered=answered)
                join = m.Join(handle, pages, context, token, 0, most, least, stop, SAMPLING)
                rows.join(join, params)
                records[handle] = Record(token, context, 1, join, params, pages)
            case "grant", (place, more):
                rows.grant(-1, tuple(more))
                if place < len(records):
                    chosen = list(records)[place]
                    rows.grant(chosen, tuple(more))
                    records[chosen].pages += tuple(more)
                    records[chosen].stalled = False
            case "leave", int(place):
                gone = list(records)[place] if place < len(records) else -1
                rows.leave(gone)
                records.pop(gone, None)
            case _, tokens:
                step(rows, records, kept, tokens)
        assert len(rows) == len(records)
        assert rows.live == sum(not record.stalled for record in records.values())


def step(rows: RunningRows, records: dict[int, Record], kept: list[AttentionBackend], tokens: list[int]) -> None:
    full = {h for h, r in records.items() if not r.stalled and r.position >= len(r.pages) * BLOCK}
    for handle in full:
        records[handle].stalled = True
    assert set(rows.stall()) == full
    if not rows.live:
        return
    batch = rows.batch()
    handles = [rows.handle(row) for row in range(rows.live)]
    assert set(handles) == {h for h, r in records.items() if not r.stalled}
    columns = (batch.token_ids.tolist(), batch.positions.tolist(), batch.indices.tolist(), batch.pages, batch.params)
    wanted = [records[h] for h in handles]
    assert list(zip(*columns, strict=True)) == [
        (r.token, r.position, r.params.answered + r.length, r.pages, r.params) for r in wanted
    ]
    for backend, fresh in zip(kept, backends(), strict=True):
        assert planned(backend, batch) == planned(fresh, batch)
    made = np.resize(np.array(tokens, np.int64), len(handles))
    scored = {
        at: SampledToken(token, -token / 2, ((token, -0.5),))
        for at, token in enumerate(made.tolist())
        if wanted[at].params.logprobs is not None
    }
    expected = tuple(r.takes(token) for r, token in zip(wanted, made.tolist(), strict=True))
    assert rows.advance(Chosen(made, scored)) == expected
    assert batch.positions.tolist() == columns[1], "a step's own columns are not changed"
    for token in expected:
        if token.finish:
            del records[token.handle]

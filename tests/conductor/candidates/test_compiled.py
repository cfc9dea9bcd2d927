"""What native code finds is what numpy and plain Python find, to the last bit."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvmesh.native import library
from kvmesh.services.conductor.candidates import bounds, compiled, instance_row, select
from kvmesh.services.conductor.candidates.prefix_holders import held
from kvmesh.services.conductor.candidates.selection import Selection
from kvmesh.services.conductor.domain import Fetch, Schedule
from kvmesh.services.conductor.placing import ties
from kvmesh.services.conductor.settings import AffinitySettings
from tests.conductor.candidates.test_bounds import Fleet, asked

pytestmark = pytest.mark.skipif(bool(library.why_not()), reason=f"no native code: {library.why_not()}")


def same(one: Any, other: Any, among: Any) -> bool:
    """Bit for bit, at each of `among`; a float stands for the same one everywhere."""
    one, other = (np.broadcast_to(np.asarray(x), among.shape)[among] for x in (one, other))
    return bool(np.array_equal(one, other, equal_nan=True))


def both(found: tuple[Any, ...], request: Schedule) -> tuple[bounds.CostBounds, bounds.CostBounds, Selection]:
    """The weights of one request, by numpy and compiled."""
    _, decodes, _, mesh, terms = found
    blocks, again = held(decodes.view, mesh.survey), compiled.held(decodes.view, mesh.survey)
    for name in ("depth", "sealed", "last"):
        assert np.array_equal(getattr(blocks, name), getattr(again, name)), name
    assert set(again.ends) == {0, *again.depth.tolist()}
    assert set(again.ends) <= set(blocks.ends)
    native = compiled.functions()
    assert native is not None
    plain = bounds.CostBounds(request, mesh, terms, blocks, decodes)
    return plain, compiled.CompiledBounds(request, mesh, terms, blocks, decodes, native), decodes


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 1 << 32), st.integers(2, 14), st.sampled_from(list(Fetch)), st.floats(0, 50))
def test_the_bounds_are_the_same_bits(seed: int, size: int, fetch: Fetch, later_s: float) -> None:
    fleet = Fleet(seed, size, fetch=fetch, affinity=AffinitySettings(), lease_s=1e6)
    fleet.brain.now += later_s  # fits fade
    rng = random.Random(seed)
    for i in range(5):
        request = fleet.request(i, **({"ttft_slo_s": rng.choice([1e-3, 0.05, 0.5])} if i % 2 else {}))
        found = asked(fleet.brain, request)
        if found is None or not found[1]:
            continue
        plain, native, decodes = both(found, request)
        everybody = np.ones(len(decodes.view.columns), dtype=np.bool_)
        for alone in (False, True):
            one, other = plain.answers(alone=alone), native.answers(alone=alone)
            for name in ("tbt", "landing", "slot", "tail", "short", "score"):
                assert same(getattr(one, name), getattr(other, name), everybody), name
            plain.arriving = native.arriving = rng.choice([0, 1 << 20])
            at_decode = rng.choice([0, 0, 3, 150])
            for among in (decodes.mask, found[0].mask):
                room_s = one.landing if alone else rng.choice([0.0, 0.01])
                want = plain.prompts(among, at_decode, room_s, alone=alone)
                got = native.prompts(among, at_decode, room_s, alone=alone)
                for name in ("cost", "least", "draining"):
                    assert same(getattr(want, name), getattr(got, name), among), name
        fleet.brain.step(request)


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 1e-6, 0.5, 0.502, 3.0, np.inf]), st.integers(0, 3)), min_size=1),
    st.sampled_from([0.0, 0.4, 0.51, np.inf]),
)
def test_the_next_to_weigh_are_the_same(rows: Sequence[tuple[float, int]], best: float) -> None:
    bound, crowd = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    native = compiled.functions()
    assert native is not None
    low, tied = compiled.NextToWeigh(native, bound, crowd).tied(best)
    assert (low, None if tied is None else list(tied)) == select.tied(bound, crowd, best)
    if tied is not None:
        assert best > ties.as_good(low)


@given(st.lists(st.integers(0, 15), min_size=1, max_size=5, unique=True), st.integers(1, 7), st.integers(0, 1 << 32))
def test_rows_are_written_the_same(rows: list[int], fields: int, seed: int) -> None:
    rng = random.Random(seed)
    loads = [tuple(rng.choice([0, True, 2.5, np.inf, 1 << 40]) for _ in range(fields)) for _ in rows]
    tables = np.zeros((9, 16)), np.zeros((9, 16))
    for table, address in zip(tables, (0, tables[1].ctypes.data), strict=True):
        instance_row.write(table, address, rows, loads)
    assert tables[0].any() == any(map(any, loads))
    assert np.array_equal(*tables)

"""The figures beside the paper's: one set-up, read strictly and used to the last key; how lines are compared."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper_figures import FIGURES, Line, Panel
from benchmarks.paper_runs import Inputs, Task, bands, simulate
from benchmarks.paper_setup import PARAMETERS, Case, Parameters, config_of, read, requests_of, summary_of
from kvmesh.errors import ConfigError
from kvmesh.sim.hardware.hardware import Efficiency
from kvmesh.sim.hardware.times import Times

NOWHERE = Path("no-trace")
HALF = ("gpus", "block_tokens")
OTHER = {"gpu": "a100", "name": "qwen3-32b", "dtype": "fp8", "fetch": "never", "routing": "round-robin"}


def _keys(section: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Of all leaves."""
    if not is_dataclass(section):
        return [path]
    return [key for one in fields(section) for key in _keys(getattr(section, one.name), (*path, one.name))]


def _changed(section: Any, path: tuple[str, ...]) -> Any:
    """With another value there."""
    name, rest = path[0], path[1:]
    value = getattr(section, name)
    if rest:
        return replace(section, **{name: _changed(value, rest)})
    if isinstance(value, str):
        return replace(section, **{name: OTHER[name]})
    if isinstance(value, tuple):
        return replace(section, **{name: (*value, 1.0)})
    if name in HALF:
        return replace(section, **{name: value // 2})
    return replace(section, **{name: value * 2 if isinstance(value, int) else value * 0.9})


def _steps(times: Times) -> tuple[float, ...]:
    """A long prompt, one token, a batch of rows."""
    return times.prefill_s([(9000, 300)]), times.prefill_s([(1, 0)]), times.decode_s(64, 1e6)


def _made(at: Parameters) -> list[Any]:
    """All that runs depend on, of cases that together use everything."""
    found: list[Any] = []
    for case in (Case(), Case(coupled="chunked"), Case(coupled="plain")):
        config = config_of(at, case)
        specs = [*config.prefill, *config.decode, *config.coupled]
        times = [
            (s.times.prefill_s([(9000, 300)]), s.times.prefill_s([(1, 0)]), s.times.decode_s(64, 1e6)) for s in specs
        ]
        found += [replace(s, times=None) for s in specs] + times  # type: ignore[arg-type]
        found += [getattr(config, f.name) for f in fields(config) if f.name not in ("prefill", "decode", "coupled")]
    made = list(requests_of(at, Case(synthetic=True), NOWHERE))
    found += [(r.at_s, r.input_tokens, r.output_tokens, r.keys[-1:]) for r in made]
    summary = summary_of(at)
    return [*found, summary.ttft_slo_s, summary.tbt_slos_s]


@pytest.mark.long
def test_every_key_of_the_file_is_used() -> None:
    at = read()
    base = _made(at)
    assert _made(at) == base
    unused = [".".join(key) for key in _keys(at) if _made(_changed(at, key)) == base]
    assert not unused


def test_the_file_says_what_the_simulator_has_for_all() -> None:
    """The efficiencies were set once, for all GPUs and all runs."""
    assert read().efficiency == Efficiency()


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("nodes = 16", "nodes = 16\nnode_count = 3", "cluster.node_count"),
        ("[slo]", "[extra]\nx = 1\n[slo]", "extra"),
        ("seed = 1", "", "run.seed"),
        ("linear = 0.60", 'linear = "0.60"', "efficiency.linear"),
        ("max_running = 256 ", "max_running = 2.5 ", "engine.max_running"),
        ("tbt_s = [0.1, 0.2, 0.3]", "tbt_s = []", "slo.tbt_s"),
        ("[model]", "[model", "parameters"),
    ],
)
def test_a_file_that_says_more_less_or_something_else_is_refused(
    tmp_path: Path, old: str, new: str, field: str
) -> None:
    text = PARAMETERS.read_text()
    assert old in text
    path = tmp_path / "parameters.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert caught.value.field == field


def test_the_synthetic_workload_has_the_papers_statistics() -> None:
    """3,993 requests, 15,325 and 149 tokens, 66% of the input in the cache of one that forgets nothing."""
    at = read()
    seen: set[bytes] = set()
    inputs = outputs = found = count = 0
    for request in requests_of(at, Case(synthetic=True), NOWHERE):
        hits = next((n for n, key in enumerate(request.keys) if key not in seen), len(request.keys))
        seen.update(request.keys)
        count, found = count + 1, found + hits * at.engine.block_tokens
        inputs, outputs = inputs + request.input_tokens, outputs + request.output_tokens
    assert count == 3993
    assert inputs / count == pytest.approx(15_325, rel=0.02)
    assert outputs / count == pytest.approx(149, rel=0.02)
    assert found / inputs == pytest.approx(0.66, abs=0.02)


def test_lines_are_compared_by_their_ratio_to_the_base() -> None:
    panel = Panel("t", "s", (Line("far", 8.0, 20.0), Line("near", 2.58, 4.0), Line("base", 2.0, 4.0)), "base")
    assert [panel.ratio(line) for line in panel.lines] == [pytest.approx(0.8), pytest.approx(1.29), None]
    assert panel.within
    assert not Panel("t", "s", (*panel.lines, Line("off", 2.7, 4.0)), "base").within


def test_an_order_is_that_of_the_paper_or_not() -> None:
    def panel(*ours: float) -> Panel:
        return Panel("t", "s", tuple(Line(f"{n}", mine, float(n)) for n, mine in enumerate(ours)))

    assert panel(1.0, 2.0, 9.0).ordered
    assert not panel(2.0, 1.0, 9.0).ordered
    assert Panel("t", "s", (Line("x", 1.0), Line("y", 2.0, 3.0))).ordered is None
    assert replace(panel(2.0, 1.0, 9.0), alike=False).ordered is None


def test_figures_share_runs_and_name_cases_that_can_be() -> None:
    at = read()
    assert len({figure.name for figure in FIGURES}) == len(FIGURES)
    cases = [case for figure in FIGURES for case in figure.cases.values()]
    assert len(set(cases)) < len(cases)
    for case in cases:
        config = config_of(at, case)
        assert len(config.prefill) + len(config.decode) + len(config.coupled) == at.cluster.nodes


def test_a_run_tells_what_figures_are_made_of() -> None:
    told = simulate(Task(Inputs(read(), NOWHERE, 40), Case(synthetic=True, nic_gbps=100.0)))
    assert told["requests"] == told["outcomes"]["done"] == 40
    assert told["ttft_s"]["mean"] > 0
    found = told["copies"]
    assert [band["ranks"][0] for band in found] == [1, 2, 16, 101][: len(found)]
    assert all(before["uses"] >= after["uses"] for before, after in pairwise(found))
    assert all(0 <= band["end"] <= band["ever"] <= min(8, band["uses"]) for band in found)
    assert found[0]["end"] > 0


def test_bands_are_means_of_ranks() -> None:
    assert bands([(9, 8, 8), (4, 2, 3), (2, 0, 1)]) == [
        {"ranks": [1, 1], "uses": 9, "end": 8, "ever": 8},
        {"ranks": [2, 3], "uses": 3, "end": 1, "ever": 2},
    ]

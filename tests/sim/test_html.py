"""The report: whole on one page, every chart drawn of what was summed up, nothing from outside."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.sim.report import html
from kvmesh.sim.report.plots import HEIGHT, WIDTH, Chart, Line, draw, log_ticks, nice_ticks, number
from kvmesh.sim.report.records import REFUSED, MeshSample, PoolSample, Record
from kvmesh.sim.report.summary import Summary
from tests.support.sim.records import done

VOID = {"meta", "br"}


class Balanced(HTMLParser):
    """Fails on a tag that is not closed, or closed in the wrong order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def run(name: str = "run", rate: float = 1.0, **sweep: str) -> dict[str, Any]:
    summary = Summary()
    for index in range(50):
        at_s = index / rate
        summary.add(done(index, at_s=at_s, ttft_s=0.1 * (1 + index % 7) * rate, cached_tokens=index * 10))
        summary.sample(
            MeshSample(at_s, {"prefill": PoolSample(8, 2, 3, load=0.5), "decode": PoolSample(8, 0, 9, load=0.2)})
        )
    summary.add(Record(50, "r50", 50 / rate, 10, 1, outcome=REFUSED, reason="tbt<&"))
    return {"name": name, "sweep": sweep, "setup": {"model": "<m>", "prefill": 8}, "summary": summary.to_json()}


def check(page: str) -> list[str]:
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    return parser.seen


def test_a_page_of_one_run_is_whole_and_needs_nothing_else() -> None:
    page = html.page([run()], "a <title>")
    tags = check(page)
    assert tags.count("svg") == 8 and "script" not in tags and "link" not in tags
    assert not re.search(r"(src|href|url|@import|xlink|https?:)", page)
    assert "nan" not in page and "None" not in page
    assert "a &lt;title&gt;" in page and "&lt;m&gt;" in page and "refused: tbt&lt;&amp;" in page
    assert "prefers-color-scheme:dark" in page and "width=device-width" in page
    assert "share of all requests" in page  # definitions


def test_several_runs_are_laid_over_each_other_and_goodput_over_rate() -> None:
    page = html.page([run("a", 1.0, speed="1"), run("b", 2.0, speed="2")], "t")
    check(page)
    assert "Goodput against rate" in page and "Requests a second that keep the SLO" in page
    assert page.count("<details") == 2 and page.count("<details open>") == 1
    assert "Goodput against rate" not in html.page([run("a", policy="x"), run("b", policy="y")], "t")


def test_what_else_was_swept_becomes_lines() -> None:
    runs = [run(f"{s}{p}", float(s), speed=s, policy=p) for s in "12" for p in ("kvcache", "random")]
    page = html.page(runs, "t")
    chart = page[page.index("Goodput against rate, TBT ≤ 100 ms") :]
    chart = chart[: chart.index("</figure>")]
    assert "policy kvcache" in chart and "policy random" in chart
    assert chart.count('class="line') == 2 and chart.count("<circle") == 4


def test_a_run_in_which_nothing_was_done_is_shown_too() -> None:
    summary = Summary()
    summary.add(Record(0, "r0", 0.0, 10, 1, outcome=REFUSED, reason="ttft"))
    page = html.page([{"name": "x", "setup": {}, "summary": summary.to_json()}], "t")
    check(page)
    assert "nothing to show" in page and "nan" not in page


def test_charts_stay_inside_their_box() -> None:
    points = [(x / 10, math.exp(x / 20)) for x in range(1, 100)]
    for log in (False, True):
        drawn = draw(Chart("t", "x", "y", [Line("a", points)], x_log=log, marks=[(5.0, "here")]))
        path = re.search(r'class="line k0" d="([^"]+)"', drawn)
        assert path is not None
        numbers = [float(one) for one in re.findall(r"[\d.]+", path[1])]
        assert all(0 <= x <= WIDTH for x in numbers[::2]) and all(0 <= y <= HEIGHT for y in numbers[1::2])
        xs = numbers[::2]
        assert xs == sorted(xs)


def test_higher_values_are_drawn_higher_and_told_on_hover() -> None:
    drawn = draw(Chart("t", "x", "y", [Line("load", [(0, 1.0), (10, 3.0)], 2)]))
    heights = [float(y) for y in re.findall(r'cy="([\d.]+)"', drawn)]
    assert heights[0] > heights[1]
    assert "<title>load: 3 at 10</title>" in drawn
    assert "legend" not in drawn  # of one line


def test_a_point_without_extent_and_a_zero_on_a_log_axis() -> None:
    check(draw(Chart("t", "x", "y", [Line("a", [(5.0, 0.0)])])))
    drawn = draw(Chart("t", "x", "y", [Line("a", [(0.0, 0.5), (1.0, 1.0)])], x_log=True, percent=True))
    assert drawn.count("<circle") == 1


@given(st.floats(-1e9, 1e9), st.floats(1e-3, 1e9))
def test_ticks_cover_and_are_few(low: float, extent: float) -> None:
    extent = max(extent, abs(low) * 1e-6)  # a float far from zero has no finer steps to put a tick on
    ticks = nice_ticks(low, low + extent)
    assert ticks[0] <= low + extent * 1e-6 and ticks[-1] >= low + extent * (1 - 1e-6)
    assert 2 <= len(ticks) <= 9


@given(st.floats(1e-6, 1e6), st.floats(1.01, 1e6))
def test_log_ticks_cover(low: float, factor: float) -> None:
    ticks = log_ticks(low, low * factor)
    assert ticks == sorted(ticks) and ticks[0] <= low * 1.002 and ticks[-1] >= low * factor * 0.998


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.1234, "0.123"), (12.34, "12.3"), (1234, "1234"), (56789, "56.8k"), (2.5e9, "2.5G")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text

"""What benchmarks/equals.py makes of placements and waits, and that what it slows down runs on afterwards."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys

import psutil
import pytest

from benchmarks.equals_figures import (
    Hits,
    able_share,
    as_expected,
    binned,
    change_after,
    herd,
    is_right,
    left_cached,
    line_time,
    most_of,
    parse_decision,
    spread,
    told_against_right,
)
from benchmarks.slowing import slowed
from kvmesh.services.conductor.domain import Placed, Refuse, Role
from kvmesh.services.conductor.records.journal import Header, Recorder
from tests.support.conductor.brain import Brain, reset


def test_decisions_are_read_as_the_conductor_writes_them() -> None:
    lines: list[bytes] = []
    brain = Brain(7)
    recorder = Recorder(Header(7, brain.now, brain.settings), lambda line: lines.append(line) or 0, 1 << 30)  # type: ignore[func-returns-value]
    brain.state = recorder  # type: ignore[assignment]
    brain.step(reset(1, "p0", "d0"))
    brain.add("p0", Role.PREFILL)
    brain.add("d0", Role.DECODE)
    placed, refused = brain.schedule(200), brain.schedule(200, ttft_slo_s=1e-9)
    assert isinstance(placed, Placed)
    assert isinstance(refused, Refuse)
    first, second = [one for line in lines if (one := parse_decision(line)) is not None]
    assert (first.prefill, first.decode, first.prompt_tokens) == ("p0", "d0", 200)
    assert first.ttft_s == placed.ttft_s
    assert (second.prefill, second.decode, second.ttft_s) == ("", "", 0.0)
    assert second.retry_after_s == (refused.error.retry_after_ms or 0) / 1000
    assert [line_time(line) for line in lines][1:] == pytest.approx([brain.now] * (len(lines) - 1), abs=1e-6)


def test_an_instance_that_got_nothing_counts() -> None:
    shares = spread(["d0", "d1"], [("d0", 10)] * 5)
    assert shares.requests == {"d0": 5, "d1": 0}
    assert (shares.by_requests, shares.by_tokens, shares.fair) == (1.0, 1.0, False)


@pytest.mark.parametrize(
    ("counts", "fair"), [((60, 40), True), ((61, 39), False), ((45, 45, 10), True), ((46, 44, 10), False)]
)
def test_goals_of_two_and_of_three(counts: tuple[int, ...], fair: bool) -> None:
    names = [f"p{i}" for i in range(len(counts))]
    placed = [(name, 1) for name, count in zip(names, counts, strict=True) for _ in range(count)]
    assert spread(names, placed).fair is fair
    assert most_of(1) == 1.0


def test_equal_requests_of_unequal_tokens_are_not_fair() -> None:
    assert not spread(["p0", "p1"], [("p0", 500), ("p1", 10)] * 4).fair


@pytest.mark.parametrize(
    ("prompt", "answer", "following", "left"),
    [(128, 1, 300, 128), (128, 0, 300, 64), (100, 28, 300, 64), (100, 29, 300, 128), (640, 64, 641, 640)],
)
def test_what_a_turn_leaves_are_full_blocks_of_known_kv(prompt: int, answer: int, following: int, left: int) -> None:
    assert left_cached(prompt, answer, following, 64) == left


def hits(*phases: tuple[float, float, float], rate: float = 6.0, seed: int = 1) -> Hits:
    """Placements by phases of (start, end, share), by chance."""
    rng = random.Random(seed)
    return [
        (low + n / rate, rng.random() < share) for low, high, share in phases for n in range(round((high - low) * rate))
    ]


def in_turn(*phases: tuple[float, float, float], rate: float = 6.0) -> Hits:
    """Placements by phases of (start, end, share), as evenly as can be."""
    return [
        (low + n / rate, n * share % 1 < share)
        for low, high, share in phases
        for n in range(round((high - low) * rate))
    ]


@pytest.mark.parametrize("rate", [1.0, 6.0])
@pytest.mark.parametrize("fell", [0.0, 4.0, 9.0])
@pytest.mark.parametrize("before", [0.5, 1.0])
def test_when_a_share_fell(before: float, fell: float, rate: float) -> None:
    placed = in_turn((0, 10 + fell, before), (10 + fell, 40, 0.05), rate=rate)
    assert change_after(placed, 10, 40, 0.25, falls=True) == pytest.approx(fell, abs=2 / rate)


@pytest.mark.parametrize("back", [0.0, 4.0, 9.0])
def test_when_a_share_came_back(back: float) -> None:
    placed = in_turn((0, back, 0.0), (back, 30, 0.5))
    assert change_after(placed, 0, 30, 0.5, falls=False) == pytest.approx(back, abs=0.4)


@pytest.mark.parametrize("share", [0.6, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_share_that_stayed_has_not_changed(share: float, seed: int) -> None:
    assert change_after(hits((0, 20, share), seed=seed), 0, 20, 0.25, falls=True) is None
    assert change_after(hits((0, 20, 1 - share), seed=seed), 0, 20, 0.75, falls=False) is None


@pytest.mark.parametrize("share", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(5))
def test_a_share_that_was_as_expected_from_the_start_has_fallen_at_once(share: float, seed: int) -> None:
    assert change_after(hits((0, 20, share), seed=seed), 0, 20, 0.25, falls=True) == 0.0


def test_a_share_that_fell_too_little_has_not_fallen() -> None:
    assert change_after(hits((0, 10, 1.0), (10, 30, 0.6)), 0, 30, 0.25, falls=True) is None


def test_too_few_placements_after_a_change_tell_nothing() -> None:
    placed = [(float(at), at < 20) for at in range(26)]
    assert change_after(placed[:22], 0, 30, 0.0, falls=True) is None
    assert change_after(placed, 0, 30, 0.0, falls=True) == 19.0
    assert change_after(placed[:3], 0, 30, 1.0, falls=False) is None


def test_a_tried_instance_is_not_one_that_gets_its_share() -> None:
    assert as_expected(1, 60, 0.0, at_most=True)
    assert not as_expected(2, 60, 0.0, at_most=True)
    assert as_expected(24, 60, 0.5, at_most=False)
    assert not as_expected(20, 60, 0.5, at_most=False)


def test_shares_by_seconds() -> None:
    assert binned([(0.1, True), (0.9, False), (2.5, True)], 0, 3, 1.0) == [0.5, None, 1.0]


def test_a_third_of_the_speed_beside_one_equal_is_a_quarter_of_the_work() -> None:
    assert able_share(1 / 3, 1) == pytest.approx(0.25)
    assert able_share(0.0, 2) == 0.0


def test_waits_are_compared_in_the_order_in_which_clients_come_back() -> None:
    assert told_against_right([2.0, 0.5, 1.0], 2.0) == [(0.5, 0.5), (1.0, 1.0), (2.0, 1.5)]


@pytest.mark.parametrize(
    ("told", "right", "kept"),
    [(2.0, 1.0, True), (2.1, 1.0, False), (0.5, 1.0, True), (0.4, 1.0, False), (0.1, 0.01, True), (0.2, 0.01, False)],
)
def test_right_is_within_a_factor_of_two(told: float, right: float, kept: bool) -> None:
    assert is_right(told, right) is kept


def test_a_herd_is_what_comes_at_once() -> None:
    assert herd([0.01, 0.02, 0.09, 0.11, 5.0]) == 3
    assert herd([]) == 0


async def test_what_was_slowed_runs_on() -> None:
    words = "-c", "import sys; sys.stdin.read()"
    child = await asyncio.create_subprocess_exec(sys.executable, *words, stdin=subprocess.PIPE)
    try:
        async with slowed([child.pid], 20.0, 10.0) as pace:
            pass
        assert 0 < pace.stopped < 1
        assert psutil.Process(child.pid).status() != psutil.STATUS_STOPPED
    finally:
        child.kill()
        await child.wait()

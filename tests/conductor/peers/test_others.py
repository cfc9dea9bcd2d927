"""Several conductors that do not hear of each other: load stays about as even as with one.

The instances here serve one prompt after the other, in the time that was predicted; each reports to every conductor.
"""

from __future__ import annotations

import heapq
import random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.services.conductor.domain import Heartbeat, Load, Placed, PrefillSample, Ref, Register, Role, Schedule
from kvmesh.services.conductor.loads.queues import PrefillQueue, PrefillWork
from kvmesh.services.conductor.peers.others import FADE_S, OtherConductors, water
from kvmesh.services.conductor.settings import Settings
from kvmesh.services.conductor.state import ConductorState
from tests.support.conductor.brain import card

SERVERS, BEAT_S, LOAD = 8, 0.2, 0.85
EACH_S, TOKENS = 1e-4, 1000  # a token takes, a prompt has (log-normal around it)
ROOM = 10**6


class Server:
    """A prefill instance: what waits there as [name, tokens left, tokens], and what is done."""

    def __init__(self, name: str, now: float) -> None:
        self.ref, self.at = Ref(name, f"{name}:1", 1), now
        self.line: list[list[float | str]] = []
        self.done: list[tuple[str, int]] = []
        self.seq = 1

    def wait_s(self, now: float) -> float:
        left_s, self.at = now - self.at, now
        while self.line and left_s > 0:
            used_s = min(left_s, float(self.line[0][1]) * EACH_S)
            self.line[0][1] = float(self.line[0][1]) - used_s / EACH_S
            left_s -= used_s
            if self.line[0][1] <= 1e-6:
                name, _, tokens = self.line.pop(0)
                self.done.append((str(name), int(tokens)))
        return sum(float(work[1]) for work in self.line) * EACH_S

    def beat(self, now: float) -> Heartbeat:
        queued, self.seq = int(self.wait_s(now) / EACH_S), self.seq + 1
        samples = tuple(PrefillSample(name, n, 0, n * EACH_S, 0, 0.0) for name, n in self.done)
        self.done.clear()
        load = Load(queued_requests=len(self.line), queued_tokens=queued, free_pages=ROOM, free_extents=ROOM)
        return Heartbeat(
            self.ref, self.seq, True, load, "", samples, finished_request_ids=tuple(s.request_id for s in samples)
        )


def brain(seed: int, servers: list[Server], now: float) -> ConductorState:
    """It knows what prompts take."""
    made = ConductorState(Settings(stall_s=1e9, lease_s=1e9, slo_ttft_s=1e9, slo_tbt_s=1e9), random.Random(seed), now)
    model, idle = card(max_context_tokens=ROOM), Load(free_pages=ROOM, free_extents=ROOM)
    for server in servers:
        made.step(Register(server.ref, Role.PREFILL, "n", model, ROOM, 64), now)
        known = tuple(PrefillSample(f"w{n}", 90 * n, 0, 90 * n * EACH_S, 0, 0.0) for n in range(1, 30))
        made.step(Heartbeat(server.ref, 1, True, idle, "", known), now - FADE_S * 5)
    decode = Ref("d", "d:1", 1)
    made.step(Register(decode, Role.DECODE, "n", model, ROOM, ROOM), now)
    made.step(Heartbeat(decode, 1, True, idle), now)
    return made


def mean_wait_s(conductors: int, seed: int, seconds: float = 9.0) -> float:
    """Of prompts that come by chance to one of the conductors."""
    rng, now = random.Random(seed), 100.0
    servers = {f"p{n}": Server(f"p{n}", now) for n in range(SERVERS)}
    brains = [brain(seed * 100 + n, list(servers.values()), now) for n in range(conductors)]
    gap_s = TOKENS * EACH_S / (LOAD * SERVERS)
    todo = [(now + rng.random() * BEAT_S, name) for name in servers] + [(now, "")]
    heapq.heapify(todo)
    waits: list[float] = []
    while todo[0][0] < 100.0 + seconds:
        now, what = heapq.heappop(todo)
        if what:
            heapq.heappush(todo, (now + BEAT_S, what))
            beat = servers[what].beat(now)
            for each in brains:
                each.step(beat, now)
            continue
        heapq.heappush(todo, (now + rng.expovariate(1 / gap_s), ""))
        tokens = max(20, int(TOKENS * rng.lognormvariate(-0.32, 0.8)))
        name = f"r{len(waits)}"
        (answer,) = rng.choice(brains).step(Schedule(name, 0, "demo", tokens, 1), now)
        assert isinstance(answer, Placed)
        server = servers[answer.prefill.instance_id]
        waits.append(server.wait_s(now))
        server.line.append([name, float(tokens), tokens])
    return mean(waits[len(waits) // 3 :])


@pytest.mark.slow
def test_several_conductors_do_not_herd(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = mean(mean_wait_s(1, seed) for seed in range(2))
    several = mean(mean_wait_s(6, seed) for seed in range(2))
    monkeypatch.setattr(OtherConductors, "due", lambda self, now: False)
    herding = mean(mean_wait_s(6, seed) for seed in range(2))
    print(
        f"mean wait: one {alone * 1e3:.0f} ms, six {several * 1e3:.0f} ms, six that do not care {herding * 1e3:.0f} ms"
    )
    assert several < 3 * alone, (alone, several)
    assert several < 0.9 * herding, (several, herding)


def test_the_only_one_expects_nobody() -> None:
    others = OtherConductors(0.0)
    assert not others.due(100.0)
    others.computed(2.0, 100.0)
    assert others.due(100.0) and others.rate == pytest.approx(2.0 / FADE_S)
    assert not others.due(100.0 + 10 * FADE_S) and others.rate == 0.0


@given(st.lists(st.floats(0, 100), min_size=1, max_size=20), st.floats(0, 100))
def test_water_finds_its_level(heights: list[float], volume: float) -> None:
    level = water(heights, volume)
    assert level >= min(heights) - 1e-9
    assert sum(max(0.0, level - height) for height in heights) == pytest.approx(volume, abs=1e-6)


def test_what_is_expected_ends_with_the_report() -> None:
    queue, now = PrefillQueue(0.0), 10.0
    assert not queue.expect(0.0, now)
    assert queue.expect(2.0, now) and queue.wait_s(now) == 2.0 and queue.told_s(now) == 0.0
    assert queue.expect(0.5, now) and queue.wait_s(now) == 0.5, "in place of what was expected before"
    queue.add(PrefillWork("r", 100, 1.0, (), now, now + 60))
    assert queue.wait_s(now) == 1.5 and queue.told_s(now) == 1.0
    assert queue.wait_s(now + 1.25) == 0.25 and queue.told_s(now + 1.25) == 0.0
    queue.report(50, 0.01, now + 0.1)
    assert queue.told_s(now + 0.1) == queue.wait_s(now + 0.1) and queue.silent_s(now + 0.3) == pytest.approx(0.2)

"""Agents at engines of others, each of which keeps its own blocks alone: sessions come back to theirs, and do not pile
up at one engine because it computed their common system prompt first."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from kvmesh.services.conductor.domain import (
    BlockKnowledge,
    Load,
    Outcome,
    PrefillSample,
    RequestOutcome,
    Role,
)
from kvmesh.services.conductor.placing.ties import TIE_CAP_S, RoomCandidate, use_room
from tests.support.conductor.brain import BLOCK, Brain, card, chain

ENGINES, CAPACITY = ("e0", "e1", "e2"), 128
SESSIONS, TURNS, ASKED = 12, 5, 4  # blocks asked in a turn
TOKEN_S = 0.0005


class Agents:
    """Sessions that take turns, one request at a time, at engines with an LRU of CAPACITY blocks each."""

    def __init__(self, policy: str, gap_s: float, system: int) -> None:
        self.brain = Brain(3, policy=policy)
        self.kept: dict[str, dict[bytes, None]] = {name: {} for name in ENGINES}
        self.where: list[tuple[int, str]] = []  # session, engine
        self.hits = 0
        for name in ENGINES:
            told = {"http_url": f"http://{name}", "knowledge": BlockKnowledge.EXACT}
            self.brain.add(name, Role.BOTH, capacity=CAPACITY, model=card(fingerprint="external-f"), **told)
        for turn in range(TURNS):
            for session in range(SESSIONS):
                self._wait(gap_s)
                self._ask(session, chain("system", system) + chain(f"s{session}", ASKED * (turn + 1)))

    def _load(self, name: str) -> Load:
        kept = len(self.kept[name])
        return Load(free_pages=1000, free_extents=1000, store_blocks=kept, store_capacity=CAPACITY)

    def _wait(self, left_s: float) -> None:
        while left_s > 0:
            self.brain.now += min(left_s, 1.2)
            left_s -= 1.2
            for name in ENGINES:
                self.brain.beat(name, self._load(name))

    def _ask(self, session: int, keys: tuple[bytes, ...]) -> None:
        brain, prompt = self.brain, BLOCK * len(keys) + 3
        name = brain.placed(prompt, keys=keys, session=f"s{session}").decode.instance_id
        kept = self.kept[name]
        hit = next((at for at, key in enumerate(keys) if key not in kept), len(keys))
        for key in reversed(keys):
            kept.pop(key, None)
            kept[key] = None
        gone = tuple(kept)[: max(0, len(kept) - CAPACITY)]
        for key in gone:
            del kept[key]
        brain.seal(name, keys, removed=gone)
        computed = prompt - BLOCK * hit
        sample = PrefillSample(f"r{brain.requests}", computed, BLOCK * hit, TOKEN_S * computed, 0, 0.0)
        done = RequestOutcome(f"r{brain.requests}", 0, Outcome.DONE, 16, 0.1, 0.02, 0.02, 0.5)
        brain.beat(
            name,
            self._load(name),
            prefill_samples=(sample,),
            finished_request_ids=(f"r{brain.requests}",),
            outcomes=(done,),
        )
        self.where.append((session, name))
        self.hits += hit

    @property
    def most(self) -> float:
        """The largest share of requests at one engine."""
        return max(Counter(name for _, name in self.where).values()) / len(self.where)

    @property
    def moves(self) -> int:
        """Turns at another engine than the last one of their session."""
        homes = [[name for session, name in self.where if session == one] for one in range(SESSIONS)]
        return sum(before != after for some in homes for before, after in pairwise(some))


@pytest.mark.parametrize("gap_s", [3.0, 15.0])
def test_slow_agents_do_not_pile_up_at_the_engine_that_has_their_system_prompt(gap_s: float) -> None:
    agents, hashed = Agents("kvcache", gap_s, 48), Agents("session_hash", gap_s, 48)
    assert agents.most <= 0.5 and agents.most <= hashed.most
    assert agents.hits >= 0.98 * hashed.hits
    brain = agents.brain
    told = [why for n in range(1, brain.requests + 1) if (why := brain.state.explain(f"r{n}")) is not None]
    handicaps = [kind.named_terms().get("room_ms", 0.0) for why in told for kind in why.kinds]
    assert any(handicaps) and min(handicaps) == 0.0
    for why in told:
        for kind in why.kinds:
            terms = kind.named_terms()
            parts = ("ttft_ms", "stall_ms", "answer_ms", "handoff_ms", "far_ms", "line_ms", "room_ms")
            assert kind.cost_s * 1000 == pytest.approx(sum(terms.get(name, 0.0) for name in parts))


def test_sessions_come_back_where_no_engine_is_busy() -> None:
    """What an engine was given lately is no reason to leave it, where its prompts were short."""
    agents, hashed = Agents("kvcache", 0.3, 12), Agents("session_hash", 0.3, 12)
    assert agents.hits >= 0.98 * hashed.hits
    assert agents.most < hashed.most
    assert agents.moves <= SESSIONS * TURNS / 10


def test_room_is_used_by_those_who_wait_no_longer_and_only_where_the_best_has_none() -> None:
    idle, busy = (0.0, 0), (0.1, 0)
    full, roomy = RoomCandidate(1.0, idle, 5), RoomCandidate(1.5, idle, 0)
    assert use_room([full, roomy]) == [0.5 + 2 * TIE_CAP_S, 0.0]
    assert use_room([roomy, full, roomy._replace(score_s=1.2)]) == pytest.approx([0.0, 0.2 + 2 * TIE_CAP_S, 0.0])
    assert not any(use_room([full, roomy._replace(waits=busy)]))
    assert not any(use_room([full, roomy._replace(waits=(0.0, 1))]))
    assert not any(use_room([full, full._replace(score_s=2.0)])), "every cache is full"
    assert not any(use_room([full._replace(drops=0), roomy]))
    assert not any(use_room([full, roomy._replace(score_s=0.5)])), "the roomy one is better in any case"

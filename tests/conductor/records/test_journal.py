"""The decision log: written while a brain works, replayed by another, bit for bit."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvmesh.errors import ConfigError
from kvmesh.kvcache.keys import Keys
from kvmesh.services.conductor.domain import (
    BlockKnowledge,
    Cordon,
    CordonState,
    DecodeSample,
    Lead,
    Load,
    Outcome,
    Placed,
    RequestOutcome,
    RequestsHeld,
    Role,
    Schedule,
)
from kvmesh.services.conductor.policies.registry import BUILT_IN
from kvmesh.services.conductor.records.journal import Header, Recorder, line_of
from kvmesh.services.conductor.settings import BalanceSettings, Settings
from kvmesh.sim.fitting import decisions
from tests.support.conductor.brain import Brain, card, chain, reset

LIMIT = 1 << 30


class Lines:
    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def write(self, line: bytes) -> int:
        self.lines.append(line)
        return sum(map(len, self.lines)) if len(self.lines) < 50 else 0


def recorded(lines: Lines, seed: int = 7, limit: int = LIMIT, **settings: Any) -> Brain:
    """A brain of the tests whose steps are written down."""
    brain = Brain(seed, **settings)
    brain.state = Recorder(Header(seed, brain.now, brain.settings), lines.write, limit)  # type: ignore[assignment]
    return brain


def live(brain: Brain, seed: int, requests: int = 60) -> int:
    """A lively history: shared prefixes, blocks that come and go, samples, outcomes, refusals; returns placements."""
    chance = random.Random(seed)
    prefills, decodes = [f"p{i}" for i in range(4)], [f"d{i}" for i in range(3)]
    brain.step(reset(1, *prefills, *decodes))
    brain.step(Lead(1))
    for name in prefills:
        brain.add(name, Role.PREFILL)
    for name in decodes:
        brain.add(name, Role.DECODE, local_prefill_tokens=64)
    placed: list[tuple[str, Placed]] = []
    for at in range(requests):
        brain.now += chance.random() * 0.05
        prompt, family = chance.randrange(17, 900), chance.randrange(5)
        answer = brain.schedule(
            prompt,
            keys=chain(f"family-{family}", prompt // 16),
            ttft_slo_s=chance.choice((0.0, 0.05)),
            session=f"s{family}",
        )
        if isinstance(answer, Placed):
            placed.append((f"r{brain.requests}", answer))
        if chance.random() < 0.3:
            brain.seal(chance.choice(prefills), chain(f"family-{family}", prompt // 16)[: chance.randrange(1, 20)])
        if chance.random() < 0.5 and placed:
            name, one = placed.pop(chance.randrange(len(placed)))
            brain.done(one.prefill.instance_id, name, 100, seconds=chance.random() * 0.1)
            outcome = RequestOutcome(name, 0, Outcome.DONE, chance.randrange(1, 40), 0.1, 0.02, 0.02, 0.5)
            rows = DecodeSample(chance.randrange(1, 9), chance.randrange(1, 5000), 0.01 + chance.random() / 100)
            load = Load(free_pages=1000, free_extents=1000, running_requests=chance.randrange(9))
            brain.beat(
                one.decode.instance_id,
                load,
                decode_samples=(rows,),
                finished_request_ids=(name,),
                outcomes=(outcome,),
            )
        if at % 20 == 7:
            brain.step(Cordon(chance.choice(prefills), CordonState(chance.choice(("open", "cordoned")))))
            brain.beat_all()
            brain.tick(0.01)
    return brain.requests


@pytest.mark.parametrize("policy", [*BUILT_IN])
def test_every_decision_is_made_again_bit_for_bit(policy: str) -> None:
    lines = Lines()
    asked = live(recorded(lines, policy=policy), seed=3)
    found = decisions.replay(lines.lines)
    assert (found.decisions, found.different, found.differences) == (asked, 0, [])
    assert found.placed > asked / 4 and found.placed + found.refused == asked


def live_with_engines(brain: Brain, seed: int, requests: int = 80) -> int:
    """A history of engines of others: blocks that they report or are believed to hold, what is known of them changes,
    one is lost and another begins in its place; returns placements."""
    chance = random.Random(seed)
    model = card(fingerprint="external-f")
    names = [f"e{i}" for i in range(3)]
    lives = dict.fromkeys(names, 1)

    def begin(name: str, knowledge: BlockKnowledge) -> None:
        more = {"model": model, "http_url": f"http://{name}", "knowledge": knowledge, "chunk_tokens": 512}
        brain.add(name, Role.BOTH, incarnation=lives[name], capacity=60, **more)

    brain.step(Lead(1))
    for name in names:
        begin(name, BlockKnowledge.FALLBACK)
    held: dict[str, dict[bytes, None]] = {name: {} for name in names}
    placed: list[tuple[str, Placed]] = []
    for at in range(requests):
        brain.now += chance.random() * 0.05
        prompt, family = chance.randrange(17, 900), chance.randrange(5)
        keys = chain(f"family-{family}", prompt // 16)
        answer = brain.schedule(prompt, keys=keys, session=f"s{family}", ttft_slo_s=chance.choice((0.0, 0.2)))
        if isinstance(answer, Placed):
            placed.append((f"r{brain.requests}", answer))
            there = answer.decode.instance_id
            new = tuple(key for key in keys if key not in held[there])
            held[there] |= dict.fromkeys(new)
            gone = tuple(held[there])[: max(0, len(held[there]) - 60)]
            for key in gone:
                del held[there][key]
            brain.seal(there, new, removed=gone, incarnation=lives[there])
        if chance.random() < 0.6 and placed:
            request, one = placed.pop(chance.randrange(len(placed)))
            there = one.decode.instance_id
            brain.done(there, request, 100, seconds=chance.random() * 0.1)
            outcome = RequestOutcome(request, 0, Outcome.DONE, chance.randrange(1, 40), 0.1, 0.02, 0.02, 0.5)
            brain.beat(there, Load(free_pages=40, running_requests=chance.randrange(4)), outcomes=(outcome,))
        if at % 20 == 9:
            name = chance.choice(names)
            begin(name, chance.choice((BlockKnowledge.EXACT, BlockKnowledge.FALLBACK)))
            brain.beat(name, ready=False)
            brain.beat_all()
        if at % 30 == 17:
            name = chance.choice(names)
            lives[name] += 1
            begin(name, BlockKnowledge.FALLBACK)
            held[name].clear()
            brain.tick(0.01)
    return brain.requests


@pytest.mark.parametrize("policy", ["kvcache", "session_hash", "round_robin"])
def test_decisions_about_engines_of_others_are_made_again(policy: str) -> None:
    lines = Lines()
    brain = recorded(lines, policy=policy)
    asked = live_with_engines(brain, seed=6)
    found = decisions.replay(lines.lines)
    assert (found.decisions, found.different, found.differences) == (asked, 0, [])
    assert found.placed > asked / 2
    told = [json.loads(raw) for raw in lines.lines]
    answers = [one["answer"]["placed"] for one in told if "placed" in one.get("answer", ())]
    assert {one["prefill"]["instance_id"] for one in answers} == {"e0", "e1", "e2"}
    if policy == "kvcache":
        assert sum(one["cached_tokens"] > 0 for one in answers) > asked / 4, "no decision hung on what they hold"
    # What they hold makes the decisions: without a word of it they come out otherwise.
    deaf = [raw for raw, one in zip(lines.lines, told, strict=True) if one.get("type") != "Blocks"]
    assert decisions.replay(deaf).different > 0


def test_a_log_is_replayed_by_another_process_with_another_hash_seed(tmp_path: Path) -> None:
    lines = Lines()
    asked = live(recorded(lines), seed=4)
    file = tmp_path / "decisions.jsonl"
    file.write_bytes(b"".join(lines.lines))
    code = (
        "import sys; from pathlib import Path; from kvmesh.sim.fitting.decisions import replay;"
        "r = replay(Path(sys.argv[1]).open('rb')); print(r.decisions, r.different)"
    )
    other = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    ran = subprocess.run(
        [sys.executable, "-c", code, str(file)],
        env=os.environ | {"PYTHONHASHSEED": other},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ran.stdout.split() == [str(asked), "0"]


def test_a_log_that_was_tampered_with_is_noticed() -> None:
    lines = Lines()
    live(recorded(lines), seed=5)
    changed = 0
    for at, raw in enumerate(lines.lines):
        told = json.loads(raw)
        if told.get("type") == "Heartbeat" and told["event"]["decode_samples"]:
            told["event"]["decode_samples"][0]["duration_s"] *= 3
            lines.lines[at] = json.dumps(told).encode() + b"\n"
            changed += 1
    found = decisions.replay(lines.lines)
    assert changed and found.different > 0
    assert any("placed.tbt_s" in difference.fields() for difference in found.differences)


def test_a_decision_line_tells_people_why() -> None:
    lines = Lines()
    brain = recorded(lines)
    brain.pair()
    brain.placed(100)
    told = json.loads(lines.lines[-1])
    assert told["kind"] == "decision" and told["event"]["request_id"] == "r1"
    assert {w["instance"] for w in told["weighed"]} == {"p0", "d0"}
    assert "queue_ms" in told["weighed"][0]["terms"] or "queue_ms" in told["weighed"][1]["terms"]
    assert [kind["verdict"] for kind in told["kinds"]] == ["chosen"]


def test_outcomes_stand_in_the_log_once_more() -> None:
    lines = Lines()
    brain = recorded(lines)
    brain.pair()
    brain.placed(100)
    brain.beat("d0", outcomes=(RequestOutcome("r1", 0, Outcome.DONE, output_tokens=9),))
    outcomes = [json.loads(raw) for raw in lines.lines if b'"kind":"outcome"' in raw]
    assert [(o["request_id"], o["outcome"], o["output_tokens"]) for o in outcomes] == [("r1", "done", 9)]


def test_what_gateways_hold_is_heard_again() -> None:
    lines = Lines()
    brain = recorded(lines, balance=BalanceSettings(window_s=1.0, replicate=False))
    held = RequestsHeld((("demo", 3), ("other", 1)))
    brain.step(held)
    found = [line_of(raw, number) for number, raw in enumerate(lines.lines[1:], 2)]
    assert [one.event for one in found if one is not None] == [held]
    assert decisions.replay(lines.lines).different == 0


def test_a_full_log_says_so_and_the_brain_goes_on() -> None:
    lines = Lines()
    brain = recorded(lines, limit=2_000)
    brain.pair()
    for _ in range(5):
        brain.placed(100)
    assert json.loads(lines.lines[-1])["kind"] == "end"
    assert sum(map(len, lines.lines)) < 6_000
    assert brain.placed(100)
    found = decisions.replay(lines.lines)
    assert found.different == 0


def test_half_a_last_line_is_what_a_killed_conductor_leaves() -> None:
    lines = Lines()
    brain = recorded(lines)
    brain.pair()
    brain.placed(100)
    brain.placed(100)
    found = decisions.replay([*lines.lines[:-1], lines.lines[-1][:40]])
    assert (found.decisions, found.different) == (1, 0)


@pytest.mark.parametrize(
    ("first", "rest", "told"),
    [
        (b"", (), "line 1: is not JSON"),
        (b"[]\n", (), "line 1: must be an object"),
        (b'{"kind":"log","version":9}\n', (), "version=9"),
        (None, (b'{"kind":"event","type":"Nothing","at":1}\n',), "line 2: type='Nothing'"),
        (None, (b'{"kind":"event","type":"Tick"}\n',), "line 2:"),
        (None, (b'{"kind":"decision","at":1,"event":{"attempt":"x"}}\n',), "line 2:"),
    ],
)
def test_what_is_no_decision_log_is_named(first: bytes | None, rest: tuple[bytes, ...], told: str) -> None:
    lines = Lines()
    recorded(lines)
    with pytest.raises(ConfigError, match=told):
        decisions.replay([lines.lines[0] if first is None else first, *rest])


def test_settings_come_back_as_they_were() -> None:
    from kvmesh.services.conductor.records import journal

    lines = Lines()
    settings = replace(Settings(), policy="random", balancing_threshold=1.7)
    Recorder(Header(5, 1.25, settings), lines.write, LIMIT)
    assert journal.header_of(lines.lines[0]) == Header(5, 1.25, settings)


@pytest.mark.parametrize("keys", [chain("x", 6), Keys.of(chain("x", 6))])
def test_the_schedule_in_a_line_is_the_whole_request(keys: Sequence[bytes]) -> None:
    from kvmesh.services.conductor.records import journal

    lines = Lines()
    brain = recorded(lines)
    brain.pair()
    brain.placed(100, keys=keys, avoid=frozenset({"p9"}), priority=-3, tenant="t")
    line = journal.line_of(lines.lines[-1], 9)
    assert line is not None and isinstance(line.event, Schedule)
    assert line.event.keys == Keys.of(chain("x", 6)) and line.event.avoid == {"p9"} and line.event.priority == -3

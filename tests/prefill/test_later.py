"""Pulls that are planned for later: from the wire to the timer, and what load tells of them meanwhile."""

from __future__ import annotations

import asyncio

from kvmesh.blockservice.peer_segments import PeerSegments
from kvmesh.blockservice.removals import NotHere
from kvmesh.clock import NEVER, Tick
from kvmesh.instance.served_weights import ServedWeights
from kvmesh.kvcache.sources import PullRange
from kvmesh.ranks import protocol as m
from kvmesh.rpc.pb import prefill_pb2 as pb
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill import wire
from kvmesh.services.prefill.rates import Rates
from kvmesh.services.prefill.report import Reporter
from kvmesh.services.prefill.runner import PrefillRunner
from tests.prefill.test_runner import Others, hinted
from tests.support.prefill.script import BOOT_NS, MS, make_state, prompt
from tests.support.services import until

KEYS = bytes(range(48))


def test_the_wire_counts_from_when_it_came_and_bounds_it() -> None:
    asked = hinted(1, KEYS, "prefill-2")
    told = {}
    for after_ms in (0, 250, 1 << 31):
        asked.pull_after_ms = after_ms
        told[after_ms] = wire.start_in(asked, 1, 1, ServedWeights("f00d"), "me", 7 * MS, "", 512).pull_at_ns
    assert told == {0: 0, 250: 257 * MS, 1 << 31: (7 + wire.MAX_PULL_AFTER_MS) * MS}


async def test_a_timer_begins_it() -> None:
    state, others = make_state(extents=8, depth=1), Others()
    runner = PrefillRunner(
        state, [others], PeerSegments([others]), Reporter(state, "prefill-1"), ServedWeights("f00d"), lambda: None
    )
    runner.puller = others
    stream = runner.open_stream([])
    runner.take(stream, pb.HandoffRequest(start=hinted(1, bytes(48))))  # computes: the other one's turn is far
    later = hinted(2, KEYS, "prefill-2")
    later.pull_after_ms = 20
    began = asyncio.get_running_loop().time()
    runner.take(stream, pb.HandoffRequest(start=later))
    assert not others.jobs
    assert state.load().queued_tokens == 13 + 1, "what is to be fetched need not be computed"

    async def pulled() -> bool:
        return bool(others.jobs)

    await until(pulled)
    assert asyncio.get_running_loop().time() - began >= 0.02
    runner.close_stream(stream)
    runner.close()


def test_without_hints_nothing_is_put_off() -> None:
    """It is for pulls from others; what lies below here is read at once."""
    state = make_state()
    tokens, keys = prompt("abc+1", 4)
    state.step(ev.Start(1, 1, "r1", tokens, keys, m.Sampling(0.0, 1.0, 0, 0), pull_at_ns=BOOT_NS + MS), BOOT_NS)
    assert state.handoffs[1].pull_at_ns == 0 and state.next_due() == NEVER


def test_what_ends_before_its_time_is_computed_at_most_once_more() -> None:
    """A store without room: the turn comes, no pull can begin, and the request is computed in the same moment."""
    state = make_state(extents=0, depth=1)
    tokens, keys = prompt("abc+1", 4)
    hints = (PullRange("A", "A:1", 1, 0, 3),)
    start = ev.Start(1, 1, "r1", tokens, keys, m.Sampling(0.0, 1.0, 0, 0), pulls=hints, pull_at_ns=BOOT_NS + 999 * MS)
    steps = [a.message for a in state.step(start, BOOT_NS) if isinstance(a, m.TellRank)]
    assert [type(step) for step in steps] == [m.PrefillStep]


def test_rates_follow_what_was_seen() -> None:
    rates = Rates()
    assert rates.pull_pays, "unknown"
    rates.computed_ns = 10.0
    rates.pulled(4, 20)
    assert rates.pulled_ns == 5.0 and rates.pull_pays
    for _ in range(20):
        rates.pulled(1, 50)
    assert not rates.pull_pays
    rates.pulled(0, 50)
    assert 49 < rates.pulled_ns < 50


def test_what_was_removed_meanwhile_is_not_fetched() -> None:
    """Else it would lie here again, and be announced."""
    state = make_state(extents=16, depth=1)
    busy_tokens, busy_keys = prompt("xyz+1", 4)
    state.step(ev.Start(1, 1, "r1", busy_tokens, busy_keys, m.Sampling(0.0, 1.0, 0, 0)), BOOT_NS)
    tokens, keys = prompt("abcd+1", 4)
    hints = (PullRange("A", "A:1", 1, 0, 4),)
    start = ev.Start(2, 1, "r2", tokens, keys, m.Sampling(0.0, 1.0, 0, 0), pulls=hints, pull_at_ns=BOOT_NS + 30 * MS)
    assert not [a for a in state.step(start, BOOT_NS) if isinstance(a, ev.FetchBlocks)]
    state.step(NotHere(frozenset({keys[2]})), BOOT_NS)
    (pull,) = [a for a in state.step(Tick(), BOOT_NS + 30 * MS) if isinstance(a, ev.FetchBlocks)]
    assert pull.job.keys == tuple(keys[:2])
    state.check_integrity()


def test_prompts_that_are_the_same_are_computed_once_in_the_load_too() -> None:
    """Of 13 tokens the last one gives the answer's first. Later ones wait for those before, running or waiting."""
    state = make_state(pages=64, depth=1, long=100, batch=100, chunk=100)

    def start(handle: int, text: str) -> None:
        tokens, keys = prompt(text, 4)
        state.step(ev.Start(handle, 1, f"r{handle}", tokens, keys, m.Sampling(0.0, 1.0, 0, 0)), BOOT_NS)

    start(1, "abc+1")  # runs
    start(2, "abc+1")
    start(3, "abc+1")
    assert state.load().queued_tokens == 13 + 1 + 1
    for handle in (4, 5, 6):
        start(handle, "xyz+1")
    assert state.load().queued_tokens == 13 + 2 + 13 + 1 + 1

"""The handoff's invariants under every interleaving that hypothesis finds; and that breaking the fence shows.

*one writer per page; references = holders; no page free while somebody could touch it; the pools return to full;
every request ends exactly once.* The world (world.py) checks them after every single input.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from kvmesh.node import messages as m
from services.decode import events as e
from services.decode import handoff, state
from services.decode import inputs as i
from tests.decode.world import World

EXAMPLES = int(os.environ.get("KVMESH_EXAMPLES", "60"))
SETTINGS = settings(
    max_examples=EXAMPLES, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


class AdversarialMesh(RuleBasedStateMachine):
    """Prefill instances say anything at any time, even lies; ranks are slow; clients come and go."""

    @initialize(direct=st.booleans(), pages=st.integers(3, 8), extents=st.integers(2, 6), running=st.integers(1, 3))
    def build(self, direct: bool, pages: int, extents: int, running: int) -> None:
        self.world = World(pages=pages, extents=extents, running=running, direct=direct)
        self.requests: list[tuple[int, int]] = []

    @rule(
        prompt=st.integers(1, 14),
        most=st.integers(1, 12),
        priority=st.integers(-1, 1),
        credit=st.sampled_from([0, 1, 99]),
    )
    def start(self, prompt: int, most: int, priority: int, credit: int) -> None:
        slot = self.world.start(prompt, most, priority=priority, credit=credit, deadline=100_000)
        self.requests.append((self.world.session, slot))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.cancel(*data.draw(st.sampled_from(self.requests)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), tokens=st.integers(1, 5))
    def credit(self, data: st.DataObject, tokens: int) -> None:
        session, slot = data.draw(st.sampled_from(self.requests))
        self.world.feed(i.AddCredit(session, slot, tokens))

    @rule()
    def gateway_dies(self) -> None:
        self.world.closed.add(self.world.session)
        self.world.feed(i.SessionClosed(self.world.session, "reset"))
        self.world.open_session()

    @rule()
    def prefill_dies(self) -> None:
        self.world.feed(i.PeerGone(self.world.peer, "reset"))
        self.world.open_peer()

    @precondition(lambda self: self.world.asked)
    @rule(data=st.data(), token=st.sampled_from([7, 1000]))
    def prefill_says(self, data: st.DataObject, token: int) -> None:
        world = self.world
        handle = data.draw(st.sampled_from(sorted(world.asked)))
        h = world.state.requests.get(handle)
        epoch = world.landings.get(handle, h.epoch if h else 0)
        says: list[e.Event] = [
            e.BeginFill(world.asked[handle]),
            e.RenewLease(epoch, 1),
            e.FirstToken(token, None, 0),
            e.FillDone(epoch),
            e.Drained(epoch),
            world.failure(True),
            world.failure(False),
        ]
        world.prefill_says(handle, data.draw(st.sampled_from(says)))

    @precondition(lambda self: self.world.asked)
    @rule(data=st.data())
    def prefill_begins(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.world.asked)))
        self.world.honest_prefill(handle)

    @rule(prompt=st.integers(1, 14), most=st.integers(2, 12), fences=st.booleans(), copies=st.booleans())
    def one_handoff_goes_right(self, prompt: int, most: int, fences: bool, copies: bool) -> None:
        """Without it, hardly any request would ever run."""
        self.start(prompt, most, 0, 99)
        for handle in self.world.asked:
            self.world.honest_prefill(handle)
        self.world.settle(fences=fences, copies=copies)
        self.world.honest_fills(fences=fences, copies=copies)

    @precondition(lambda self: self.world.landings)
    @rule(data=st.data())
    def end_mark(self, data: st.DataObject) -> None:
        world = self.world
        handle = data.draw(st.sampled_from(sorted(world.landings)))
        if (h := world.state.requests.get(handle)) is not None:
            world.rank.says.append(m.FillEnded(f"p{h.peer}", world.landings[handle]))

    @precondition(lambda self: self.world.rank.commands)
    @rule()
    def rank_takes_a_command(self) -> None:
        self.world.rank.take_command()
        self.world.check()

    @precondition(lambda self: self.world.rank.fencing)
    @rule()
    def fence_ends(self) -> None:
        self.world.rank.finish_fence()

    @precondition(lambda self: self.world.rank.copies)
    @rule()
    def copy_ends(self) -> None:
        self.world.rank.finish_copy()

    @rule(stop=st.booleans())
    def rank_steps(self, stop: bool) -> None:
        self.world.rank.step(stop)

    @precondition(lambda self: self.world.rank.rows)
    @rule()
    def step_fails(self) -> None:
        rows = self.world.rank.rows
        handles = tuple(rows)
        rows.clear()
        self.world.rank.says.append(m.RankError(handles, "out of luck"))

    @precondition(lambda self: self.world.rank.says)
    @rule()
    def front_hears(self) -> None:
        self.world.rank_says()

    @rule()
    def everything_catches_up(self) -> None:
        self.world.settle()

    @rule(ms=st.sampled_from([1, 700, 2_100, 5_100, 11_000, 40_000]))
    def time_passes(self, ms: int) -> None:
        self.world.wait(ms)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.wind_down()


def test_no_interleaving_breaks_the_invariants() -> None:
    run_state_machine_as_test(AdversarialMesh, settings=SETTINGS)


class FreesBeforeFenced(handoff.Handoff):
    """The bug that this whole design is about: memory goes back while the writer's window is open."""

    def _settle(self, now: int, out: list[e.Action]) -> None:
        if self.ended:
            self.windows.clear()
        super()._settle(now, out)


class FreesBeforeLeft(handoff.Handoff):
    """Memory goes back while a step may still be on it."""

    def _settle(self, now: int, out: list[e.Action]) -> None:
        if self.ended:
            self.batch.clear()
        super()._settle(now, out)


class FreesBeforeCopied(handoff.Handoff):
    """Memory goes back while a copy reads or writes it."""

    def _settle(self, now: int, out: list[e.Action]) -> None:
        if self.ended:
            self.copying = None
        super()._settle(now, out)


class JoinsBeforeFenced(handoff.Handoff):
    """Steps write into a page that the writer's window still covers."""

    def _advance(self, now: int, out: list[e.Action]) -> None:
        windows, self.windows = self.windows, {}
        super()._advance(now, out)
        self.windows = windows


@pytest.mark.parametrize("broken", [FreesBeforeFenced, FreesBeforeLeft, FreesBeforeCopied, JoinsBeforeFenced])
def test_a_broken_rule_is_found(broken: type[handoff.Handoff], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "Handoff", broken)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            AdversarialMesh,
            settings=settings(
                SETTINGS,
                max_examples=400,
                derandomize=True,
                database=None,
                report_multiple_bugs=False,
                phases=[Phase.generate],
            ),
        )


def test_a_broken_fence_in_one_line_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, spelled out: cancel, the page goes to another request, the first writer wakes up."""

    def story() -> None:
        world = World(pages=3, extents=0, running=3)
        world.start(5, 4)
        world.prefill_says(1, e.BeginFill(2))
        world.settle()
        world.cancel(world.session, 1)
        world.prefill_says(1, e.Drained(world.landings[1]))
        world.rank.take_command()  # Fence has reached the rank; a slice of the old writer is still landing
        world.start(5, 4)
        world.prefill_says(2, e.BeginFill(2))
        world.rank.finish_fence()
        world.settle()
        world.wind_down()

    story()
    monkeypatch.setattr(state, "Handoff", FreesBeforeFenced)
    with pytest.raises(AssertionError, match=r"which is free|gave up|no request"):
        story()

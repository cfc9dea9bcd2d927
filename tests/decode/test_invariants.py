"""The handoff's invariants under every interleaving that hypothesis finds; and that breaking the fence shows.

*one writer per page; references = holders; no page or extent free while somebody could touch it; a sealed block holds
what its key names; pools and store return to full; every request ends exactly once.* The world (world.py) checks them
after every single input.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from kvmesh.ranks import protocol as m
from kvmesh.services.decode import events as e
from kvmesh.services.decode import handoff, scheduler, sealing, sharing, state
from kvmesh.services.decode import inputs as i
from tests.support.decode.world import World

EXAMPLES = int(os.environ.get("KVMESH_EXAMPLES", "60"))
SETTINGS = settings(
    max_examples=EXAMPLES, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


class AdversarialMesh(RuleBasedStateMachine):
    """Prefill instances say anything at any time, even lies; ranks are slow; clients come and go."""

    @initialize(
        direct=st.booleans(),
        pages=st.integers(3, 8),
        extents=st.integers(2, 6),
        running=st.integers(1, 3),
        here=st.integers(0, 2),
    )
    def build(self, direct: bool, pages: int, extents: int, running: int, here: int) -> None:
        self.world = World(pages=pages, extents=extents, running=running, direct=direct)
        self.world.have(1, here)
        self.requests: list[tuple[int, int]] = []

    @rule(
        prompt=st.integers(1, 14),
        most=st.integers(1, 12),
        priority=st.integers(-1, 1),
        credit=st.sampled_from([0, 1, 99]),
        text=st.integers(0, 2),
        pull=st.tuples(st.integers(0, 2), st.integers(0, 3)),
    )
    def start(self, prompt: int, most: int, priority: int, credit: int, text: int, pull: tuple[int, int]) -> None:
        slot = self.world.start(prompt, most, priority=priority, credit=credit, deadline=100_000, text=text, pull=pull)
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

    @rule(
        prompt=st.integers(1, 14),
        most=st.integers(2, 12),
        text=st.integers(0, 2),
        fences=st.booleans(),
        copies=st.booleans(),
    )
    def one_handoff_goes_right(self, prompt: int, most: int, text: int, fences: bool, copies: bool) -> None:
        """Without it, hardly any request would ever run."""
        self.start(prompt, most, 0, 99, text, (0, 0))
        for handle in self.world.asked:
            self.world.honest_prefill(handle)
        self.world.settle(fences=fences, copies=copies)
        self.world.honest_fills(fences=fences, copies=copies)

    @rule(prompt=st.integers(5, 14))
    def one_lands_on_what_is_here(self, prompt: int) -> None:
        self.start(prompt, 5, 0, 99, 1, (0, 0))
        for handle in self.world.asked:
            self.world.honest_prefill(handle)
        self.world.settle(copies=False)

    @rule(prompt=st.integers(5, 14), most=st.integers(2, 6), fences=st.booleans())
    def answers_to_one_prompt(self, prompt: int, most: int, fences: bool) -> None:
        """The second one's landing waits for the first one's, and takes its pages."""
        for _ in range(2):
            self.start(prompt, most, 0, 99, 3, (0, 0))
        for handle in self.world.asked:
            self.world.honest_prefill(handle)
        self.world.settle(fences=fences)
        while self.world.honest_fills(fences=fences):
            pass

    @precondition(lambda self: self.world.landings)
    @rule(data=st.data())
    def end_mark(self, data: st.DataObject) -> None:
        world = self.world
        handle = data.draw(st.sampled_from(sorted(world.landings)))
        if handle in world.state.requests:
            world.end_mark(handle)

    @rule()
    def writers_scribble(self) -> None:
        self.world.rank.scribble()
        self.world.check()

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data())
    def pull_ends(self, data: st.DataObject) -> None:
        job = self.world.jobs[0]
        self.world.pull_ends(sorted(data.draw(st.sets(st.sampled_from(range(len(job.keys)))))))

    @precondition(lambda self: self.world.store.keys())
    @rule(data=st.data())
    def another_node_reads(self, data: st.DataObject) -> None:
        keys = data.draw(st.lists(st.sampled_from(self.world.store.keys()), min_size=1, max_size=2, unique=True))
        self.world.lease(keys)

    @precondition(lambda self: self.world.leases)
    @rule()
    def it_has_read(self) -> None:
        self.world.unlease()

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
    @rule(data=st.data())
    def copy_ends(self, data: st.DataObject) -> None:
        self.world.rank.finish_copy(data.draw(st.integers(0, len(self.world.rank.copies) - 1)))
        self.world.check()

    @rule(stop=st.booleans(), ahead=st.booleans(), drafted=st.integers(0, 3))
    def rank_steps(self, stop: bool, ahead: bool, drafted: int) -> None:
        self.world.rank.step(stop, ahead, 0 if ahead else drafted)  # a step with drafts is waited for

    @precondition(lambda self: self.world.rank.vain)
    @rule()
    def step_in_flight_ends(self) -> None:
        self.world.rank.end_step()
        self.world.check()

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


@pytest.mark.slow
def test_no_interleaving_breaks_the_invariants() -> None:
    run_state_machine_as_test(AdversarialMesh, settings=SETTINGS)


class FreesBeforeFenced(handoff.Handoff):
    """The bug that this whole design is about: memory goes back while the writer's window is open."""

    def _free_if_unused(self, now: int, out: list[e.Action]) -> None:
        if self.ended:
            self.windows.clear()
        super()._free_if_unused(now, out)


class FreesBeforeLeft(handoff.Handoff):
    """Memory goes back while a step may still be on it."""

    def _free_if_unused(self, now: int, out: list[e.Action]) -> None:
        if self.ended:
            self.in_batch = False
        super()._free_if_unused(now, out)


class FreesWhatIsHeld(handoff.Handoff):
    """Memory goes back when the answer is complete, though a step in flight has the row."""

    def step(self, event: e.Event, now: int) -> list[e.Action]:
        return super().step(e.Ended(event.reason) if isinstance(event, e.Ended) else event, now)


class FreesBeforeCopied(handoff.Handoff):
    """Memory goes back while a copy reads or writes it."""

    def _free_if_unused(self, now: int, out: list[e.Action]) -> None:
        if self.ended:
            self.copying = None
        super()._free_if_unused(now, out)


class JoinsBeforeFenced(handoff.Handoff):
    """Steps write into a page that the writer's window still covers."""

    def _advance(self, now: int, out: list[e.Action]) -> None:
        windows, self.windows = self.windows, {}
        super()._advance(now, out)
        self.windows = windows


class FreesBeforeLoaded(handoff.Handoff):
    """Memory goes back while our own blocks are copied into it."""

    def _free_if_unused(self, now: int, out: list[e.Action]) -> None:
        if self.ended:
            self.loading.clear()
        super()._free_if_unused(now, out)


class JoinsBeforeLoaded(handoff.Handoff):
    """Steps read pages into which our own blocks have not been copied yet."""

    def _advance(self, now: int, out: list[e.Action]) -> None:
        self.in_pages = self.in_pages or bool(self.loading and not self.marks)
        super()._advance(now, out)


class SealsTheUnfinished(handoff.Handoff):
    """The block of the last token sampled counts as full, though that token has no KV yet."""

    context = property(lambda self: self.spec.prompt_tokens + self.made)


class KeepsNoPages(sealing.Sealing):
    """Pages under a copy for the store have no reference of their own."""

    def _copy(self, *args: Any, **kwargs: Any) -> m.SealCopy | None:
        message = super()._copy(*args, **kwargs)
        if message is not None:
            self._pages.release(message.pages)
        return message


class SealsEarly(sealing.Sealing):
    """Blocks can be found before their bytes are there."""

    def _copy(self, keys: list[bytes], *args: Any, **kwargs: Any) -> m.SealCopy | None:
        message = super()._copy(keys, *args, **kwargs)
        for key in keys if message is not None else ():
            if self._store.writing(key):
                self._store.seal(key)
        return message


class InvitesOverOwnBlocks(handoff.Handoff):
    """The writer may write where our own blocks lie."""

    def _invite(self, rank: int, peer: str) -> m.TellRank:
        return m.TellRank(rank, m.OpenWindow(peer, self.epoch, self._offsets(rank)))


class SharesWhatIsLanding(sharing.PromptSharing):
    """Rows take pages that another row's landing has not filled yet."""

    def awaited(self, h: handoff.Handoff) -> int:
        for other in dict.fromkeys(self._coming.values()):
            keys = other.shared_keys[: len(other.pages)]
            self.pages.enter(other.handle, keys, other.pages[: len(keys)])
        return super().awaited(h)


BROKEN: list[tuple[Any, str, Any]] = [
    (state, "Handoff", FreesBeforeFenced),
    (state, "Handoff", FreesBeforeLeft),
    (state, "Handoff", FreesBeforeCopied),
    (state, "Handoff", JoinsBeforeFenced),
    (state, "Handoff", FreesBeforeLoaded),
    (state, "Handoff", JoinsBeforeLoaded),
    (state, "Handoff", SealsTheUnfinished),
    (scheduler, "Sealing", KeepsNoPages),
    (scheduler, "Sealing", SealsEarly),
    (state, "Handoff", InvitesOverOwnBlocks),
]


@pytest.mark.parametrize(("module", "name", "broken"), BROKEN, ids=[broken.__name__ for _, _, broken in BROKEN])
def test_a_broken_rule_is_found(module: Any, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, name, broken)
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


def test_a_row_that_a_step_in_flight_has_keeps_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer has ended, and the next step has been launched with it."""

    def story() -> None:
        world = World(pages=3, extents=0, running=3)
        world.start(5, 4)
        world.honest_prefill(1)
        world.settle()
        assert world.honest_fills()
        world.settle()
        world.rank.step(stop=True, ahead=True)
        assert world.rank.vain
        world.rank_says()
        world.settle()
        world.rank.end_step()
        world.wind_down()

    story()
    monkeypatch.setattr(state, "Handoff", FreesWhatIsHeld)
    with pytest.raises(AssertionError, match="which is free"):
        story()


def test_a_page_shared_before_it_is_complete_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose landing the second one waits for is cancelled before its bytes are there."""

    def story() -> None:
        world = World(pages=8, running=3)
        for _ in range(2):
            world.start(9, 4, text=1)
        for handle in (1, 2):
            world.honest_prefill(handle)
        world.settle()
        world.rank.scribble()
        world.cancel(world.session, 1)
        world.prefill_says(1, e.Drained(world.landings[1]))
        world.settle()
        while world.honest_fills():
            pass
        world.wind_down()

    story()
    monkeypatch.setattr(scheduler, "PromptSharing", SharesWhatIsLanding)
    with pytest.raises(AssertionError, match="joins with wrong bytes"):
        story()

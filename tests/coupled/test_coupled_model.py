"""Prefill and decode over one pool, every interleaving that hypothesis finds: one writer a page, references = holders,
what rows and chunks read is their own KV, and every admitted request ends by itself: nobody waits for ever for memory
that the other half holds.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from kvmesh.kvcache.prefix_cache import CachedPages
from kvmesh.services.coupled import coupling
from kvmesh.services.coupled.coupling import Coupling
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill.handoff_table import HandoffTable
from tests.support.coupled.world import CHUNK, MIXED, World

EXAMPLES = int(os.environ.get("KVMESH_EXAMPLES", "60"))
SETTINGS = settings(
    max_examples=EXAMPLES, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TEXTS = st.text(alphabet="ab", max_size=4)


class Coupled(RuleBasedStateMachine):
    @initialize(
        pages=st.integers(5, 12), extents=st.integers(0, 12), running=st.integers(1, 4), watermark=st.integers(0, 20)
    )
    def build(self, pages: int, extents: int, running: int, watermark: int) -> None:
        self.world = World(pages=pages, extents=extents, running=running, watermark=watermark)

    @rule(
        text=TEXTS,
        more=st.integers(0, 3),
        most=st.integers(1, 14),
        priority=st.integers(-1, 1),
        own=st.sampled_from([True, True, True, False]),
    )
    def start(self, text: str, more: int, most: int, priority: int, own: bool) -> None:
        if text or more:
            self.world.start(text, more, most, own=own, priority=priority)
            self.world.check()

    @rule(text=TEXTS, more=st.integers(1, 3))
    def somebody_elsewhere_wants_a_prompt(self, text: str, more: int) -> None:
        self.world.prefill_for_others(text, more)
        self.world.check()

    @precondition(lambda self: self.world.tokens)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.cancel(data.draw(st.sampled_from(sorted(self.world.tokens))))
        self.world.check()

    @precondition(lambda self: self.world.store.keys())
    @rule(data=st.data())
    def is_removed(self, data: st.DataObject) -> None:
        self.world.remove(data.draw(st.sampled_from(sorted(self.world.store.keys()))))
        self.world.check()

    @precondition(lambda self: self.world.rank.inbox)
    @rule(count=st.integers(1, 6))
    def rank_takes_commands(self, count: int) -> None:
        for _ in range(min(count, len(self.world.rank.inbox))):
            self.world.rank.take()

    @rule(how=st.sampled_from(["", "", "", "", "stop", "fail_rows", "fail_items"]))
    def rank_steps(self, how: str) -> None:
        self.world.rank.step(**({how: True} if how else {}))

    @rule(steps=st.integers(1, 4))
    def rank_is_quick(self, steps: int) -> None:
        for _ in range(steps):
            self.world.settle()
            self.world.rank.step()
        self.world.check_store()

    @precondition(lambda self: self.world.rank.seals)
    @rule(data=st.data())
    def a_copy_ends(self, data: st.DataObject) -> None:
        self.world.rank.finish_seal(data.draw(st.integers(0, len(self.world.rank.seals) - 1)))

    @precondition(lambda self: self.world.rank.outbox)
    @rule(count=st.integers(1, 4))
    def front_hears(self, count: int) -> None:
        for _ in range(min(count, len(self.world.rank.outbox))):
            self.world.hear()
            self.world.check()

    @rule()
    def writers_elsewhere_are_done(self) -> None:
        self.world.fills()
        self.world.check()

    @rule()
    def ranks_are_silent_for_a_while(self) -> None:
        self.world.feed_prefill(ev.RanksSilent("silent"))
        self.world.check()
        self.world.feed_prefill(ev.RanksBack())

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.wind_down()


def test_no_interleaving_breaks_the_invariants() -> None:
    run_state_machine_as_test(Coupled, settings=SETTINGS)


# ── and what breaks when a rule of the coupling does ──────────────────────────────────────────────


def shares_instead_of_giving(self: HandoffTable, h: Any, first: ev.SendFirstToken) -> None:
    """Prefill keeps its references: pages never come back."""
    self.pool.share(h.pages)
    HAND_OVER(self, h, first)


def gives_back_too(self: HandoffTable, h: Any, first: ev.SendFirstToken) -> None:
    """Prefill gives its references back as well: decode's pages are anybody's."""
    pages = list(h.pages)
    HAND_OVER(self, h, first)
    self.pool.release(pages)


def caches_the_partial_block(self: HandoffTable, h: Any, first: ev.SendFirstToken) -> None:
    """The last block is shared although it is not full: whoever matches it writes where another reads."""
    keys = [*h.start.block_keys, b"partial" + h.start.token_ids[-1:][0].to_bytes(2)][: len(h.pages)]
    self.cache.insert(keys, h.pages)
    HAND_OVER(self, h, first)


def no_second_look(self: Coupling) -> bool:
    """Nobody hears that the other half gave memory back."""
    return False


HAND_OVER = HandoffTable._hand_over
BROKEN: list[tuple[Any, str, Any]] = [
    (HandoffTable, "_hand_over", shares_instead_of_giving),
    (HandoffTable, "_hand_over", gives_back_too),
    (HandoffTable, "_hand_over", caches_the_partial_block),
    (Coupling, "prefill_due", no_second_look),
    (CachedPages, "free", property(lambda self: self._pool.free)),
    (coupling, "FIRST_OF_DECODE", 1),
]


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    BROKEN,
    ids=["shared", "given twice", "partial", "prefill", "idle", "handles"],
)
def test_a_broken_rule_is_found(owner: Any, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(Exception):  # noqa: B017  # AssertionError or a pool's own refusal
        run_state_machine_as_test(
            Coupled,
            settings=settings(
                SETTINGS,
                max_examples=300,
                derandomize=True,
                database=None,
                report_multiple_bugs=False,
                phases=[Phase.generate],
            ),
        )


# ── single stories ────────────────────────────────────────────────────────────────────────────────


def test_a_prompt_is_adopted_and_its_partial_block_is_nobody_elses() -> None:
    world = World()
    one = world.start("ab", 2, 6)
    world.run(2)
    (h,) = world.decode.requests.values()
    assert h.running and len(h.pages) == 3
    assert [world.prefill.pool.refcount(page) for page in h.pages] == [2, 2, 1]  # the cache has the full ones
    assert not world.prefill.handoffs
    two = world.start("ab", 3, 6)  # shares the prefix while the first one runs
    world.run()
    assert world.finished == {one, two}
    assert [end.found.device_tokens for end in world.ended] == [0, 8]
    assert all(end.transfer_bytes == 0 and not end.first_post_ns for end in world.ended)
    world.wind_down()


def test_while_rows_run_a_step_has_few_prompt_tokens() -> None:
    world = World(pages=20)
    world.start("a", 1, 14)
    world.run(1)
    world.start("babbab", 1, 3)
    world.run()
    assert world.rank.mixed >= 3
    assert world.rank.largest == MIXED
    assert not world.failed


@pytest.mark.parametrize("elsewhere", [False, True])
def test_rows_of_another_place_bound_a_steps_prompt_tokens_too(elsewhere: bool) -> None:
    world = World(pages=20)
    world.coupling.others_run = lambda: elsewhere
    world.start("babbab", 1, 1)
    world.run()
    assert [end.chunks for end in world.ended] == [-(-25 // (MIXED if elsewhere else CHUNK))]
    world.wind_down()


def test_half_computed_prompts_leave_room_for_rows() -> None:
    """A row gets the pages that it needs at once, though prompts enough for the whole pool wait: they leave some."""
    world = World(pages=7, watermark=20)
    first = world.start("a", 1, 12)
    world.run(1)
    second = world.start("bbbb", 1, 1)
    world.run()
    assert world.finished == {first, second}
    assert not world.rank.stalls
    world.wind_down()


def test_cancel_at_every_point_of_a_request() -> None:
    """ADMITTED in the line, its chunks at the rank, sampled but not heard, running: all pages come back each time."""
    for at in range(12):
        world = World(pages=8)
        slot = world.start("abab", 1, 4)
        for _ in range(at):
            if world.rank.inbox:
                world.rank.take()
            elif world.rank.outbox:
                world.hear()
            else:
                world.rank.step()
        world.cancel(slot)
        world.check()
        world.wind_down()
        assert world.ends[slot] == 1

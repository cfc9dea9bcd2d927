"""Prefill and decode over the pools of several cache groups: what rows and chunks read is what it should be, references
are holders, and every admitted request ends by itself.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from kvmesh.kvcache.cache_groups import CacheGroup, GroupPages, freed_blocks
from kvmesh.services.coupled import coupling
from kvmesh.services.decode import events as e
from kvmesh.services.decode.grouped import handoff
from kvmesh.services.prefill.prompt_pages import PromptPages, PromptPools
from tests.support.coupled.grouped_world import CoupledGroupedWorld
from tests.support.decode.grouped_world import ALL, B, chunk, state, window

EXAMPLES = int(os.environ.get("KVMESH_EXAMPLES", "10"))
SETTINGS = settings(
    max_examples=EXAMPLES, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
MODELS: dict[str, tuple[CacheGroup, ...]] = {
    "gemma": (ALL, window(6)),
    "mistral": (window(9),),
    "llama4": (ALL, chunk(8)),
    "qwen3-next": (ALL, state(), state("conv")),
    "all of it": (ALL, window(7), state()),
}
# Pages; of the other groups, below. Of `all` twice as many as the longest row has: another may have computed the same
# blocks beside it, whose pages the cache keeps as long as the row's own later blocks hang on them.
BOUNDED = {"all": (16, 20), "state": (5, 9), "conv": (5, 9)}


class CoupledGroups(RuleBasedStateMachine):
    @initialize(model=st.sampled_from(sorted(MODELS)), data=st.data(), extents=st.integers(6, 14))
    def build(self, model: str, data: st.DataObject, extents: int) -> None:
        groups = MODELS[model]
        pages = [data.draw(st.integers(*BOUNDED.get(group.name, (10, 18))), label=group.name) for group in groups]
        self.world = CoupledGroupedWorld(groups, pages, [extents] * len(groups))

    @rule(prompt=st.integers(1, 18), most=st.integers(1, 14), text=st.integers(0, 2), priority=st.integers(-1, 1))
    def start(self, prompt: int, most: int, text: int, priority: int) -> None:
        self.world.start(prompt, most, text=text, priority=priority)

    @rule(prompt=st.integers(1, 18), most=st.integers(2, 14), text=st.integers(0, 2), steps=st.integers(0, 4))
    def one_runs(self, prompt: int, most: int, text: int, steps: int) -> None:
        self.world.start(prompt, most, text=text)
        self.world.run(steps)

    @precondition(lambda self: self.world.made)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.cancel(data.draw(st.sampled_from(sorted(self.world.made))))

    @precondition(lambda self: self.world.rank.commands)
    @rule(count=st.integers(1, 5))
    def rank_takes_commands(self, count: int) -> None:
        for _ in range(min(count, len(self.world.rank.commands))):
            self.world.rank.take()

    @precondition(lambda self: self.world.rank.copies)
    @rule(data=st.data())
    def a_copy_ends(self, data: st.DataObject) -> None:
        self.world.rank.finish_copy(data.draw(st.integers(0, len(self.world.rank.copies) - 1)))

    @precondition(lambda self: self.world.rank.says)
    @rule(count=st.integers(1, 4))
    def front_hears(self, count: int) -> None:
        for _ in range(min(count, len(self.world.rank.says))):
            self.world.hear()

    @precondition(lambda self: self.world.rank.steps)
    @rule()
    def chunks_are_computed(self) -> None:
        self.world.rank.chunks()

    @rule(steps=st.integers(1, 6), ahead=st.booleans())
    def it_runs(self, steps: int, ahead: bool) -> None:
        self.world.run(steps, ahead)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.wind_down()


def test_no_interleaving_breaks_a_row_or_a_prompt() -> None:
    run_state_machine_as_test(CoupledGroups, settings=SETTINGS)


def test_a_prompt_is_adopted_with_its_holes_and_its_state() -> None:
    world = CoupledGroupedWorld(MODELS["all of it"], [12, 10, 8], [12] * 3)
    slot = world.start(4 * B + 1, 9)
    world.run(4)
    [h] = world.state.requests.values()
    assert h.running and [run.first for run in h.runs.values()] == [0, freed_blocks(window(7), B, h.context), 0]
    assert h.runs[1].first > 1
    assert len(h.runs[2].ids) == 2, "it has a second slot"
    world.run(30)
    assert world.finished == {slot}
    world.wind_down()


# ── and what breaks when a rule of the coupling does ──────────────────────────────────────────────


def holes_forgotten(self: handoff.GroupedHandoff, event: e.Adopted) -> None:
    """A run that begins behind a hole is taken for one that begins at block 0."""
    TAKE(self, event)
    for run in self.runs.values():
        run.first = 0


def shares_instead_of_giving(self: PromptPools, pages: PromptPages, *, keep: Sequence[GroupPages] = ()) -> None:
    """Prefill keeps its references to what is adopted: pages never come back."""
    for group, _, ids in keep:
        self.pools[group].share(ids)
    END(self, pages, keep=keep)


def gives_back_too(self: PromptPools, pages: PromptPages, *, keep: Sequence[GroupPages] = ()) -> None:
    """Prefill gives its references back as well: a row's pages are anybody's."""
    END(self, pages)


def no_second_look(self: coupling.Coupling) -> bool:
    """Nobody hears that the other half gave memory back."""
    return False


TAKE, END = handoff.GroupedHandoff._take_adopted, PromptPools.end
BROKEN: list[tuple[Any, str, Any]] = [
    (handoff.GroupedHandoff, "_take_adopted", holes_forgotten),
    (PromptPools, "end", shares_instead_of_giving),
    (PromptPools, "end", gives_back_too),
    (coupling.Coupling, "prefill_due", no_second_look),
    (coupling, "FIRST_OF_DECODE", 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "broken"), BROKEN, ids=["holes", "shared", "given twice", "prefill", "handles"]
)
def test_a_broken_rule_is_found(owner: Any, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(Exception):  # noqa: B017  # AssertionError or a pool's own refusal
        run_state_machine_as_test(
            CoupledGroups,
            settings=settings(
                SETTINGS,
                max_examples=200,
                derandomize=True,
                database=None,
                report_multiple_bugs=False,
                phases=[Phase.generate],
            ),
        )

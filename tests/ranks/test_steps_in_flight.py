"""Steps that are launched before the tokens of the one before are read, on a CPU that runs as far behind the host as it
may: the tokens are those of a request that runs alone, and no page is free while a step may touch it. Rules that are
broken show."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from kvmesh.engine.batch import Chosen
from kvmesh.engine.sampling.grammar import AnswerGrammar
from kvmesh.errors import GrammarFailed
from kvmesh.ranks import protocol as m
from kvmesh.ranks.worker import steps as steps_module
from kvmesh.ranks.worker.rows import PageHolds, RunningRows
from kvmesh.transfer import EngineConfig, TransferEngine
from tests.support import steps_world
from tests.support.checkpoints import make_checkpoint
from tests.support.steps_world import (
    GRAMMAR,
    MOST_REQUESTS,
    PENALISED_GRAMMAR,
    SAMPLING,
    Device,
    Request,
    World,
)

EXAMPLES = int(os.environ.get("KVMESH_EXAMPLES", "30"))
SETTINGS = settings(
    max_examples=EXAMPLES,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a failure is not made smaller: that takes minutes
)


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    torch.set_num_threads(1)
    path = make_checkpoint(tmp_path_factory.mktemp("tiny") / "m", vocab_size=300, hidden_size=32, intermediate_size=32)
    with TransferEngine("rank#1", EngineConfig(transports=("shm",))) as engine:
        yield Device(path, engine)


class FrontAndRank(RuleBasedStateMachine):
    """Requests come, stall, are preempted and cancelled at any moment; the front hears of it late."""

    device: Device
    ahead = True
    kinds: tuple[int, ...] = tuple(range(len(SAMPLING)))
    hurries = False

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.device, self.ahead)
        self.world.hurries = self.hurries

    def some(self, data: st.DataObject, **having: bool) -> Request | None:
        found = [
            request
            for request in self.world.live()
            if all(getattr(request, name) == value for name, value in having.items())
        ]
        return data.draw(st.sampled_from(found)) if found else None

    @precondition(lambda self: len(self.world.live()) < MOST_REQUESTS)
    @rule(
        prompt=st.sampled_from([(7,), (9, 8, 7), (1, 2, 3, 4), (5, 6, 7, 8, 9, 10)]),
        kind=st.integers(0, len(SAMPLING) - 1),
        most=st.integers(1, 9),
        stop_at=st.integers(0, 9),
        least=st.integers(0, 4),
        spare=st.integers(0, 2),
    )
    def start(self, prompt: tuple[int, ...], kind: int, most: int, stop_at: int, least: int, spare: int) -> None:
        self.world.start(prompt, self.kinds[kind % len(self.kinds)], most, stop_at, least, spare)

    @rule(count=st.integers(1, 4), hears=st.booleans())
    def steps(self, count: int, hears: bool) -> None:
        for _ in range(count):
            self.world.step()
            if hears:
                self.world.hear()

    @precondition(lambda self: self.world.said)
    @rule(messages=st.sampled_from([1, 2, 100]))
    def front_hears(self, messages: int) -> None:
        self.world.hear(messages)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if (request := self.some(data, ended=False, in_batch=True)) is not None:
            self.world.cancel(request)

    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        if (request := self.some(data, ended=False, in_batch=True, leaving=False)) is not None:
            self.world.preempt(request)

    @precondition(lambda self: any(request.swapped for request in self.world.requests.values()))
    @rule()
    def resume(self) -> None:
        self.world.resume(next(r for r in self.world.requests.values() if r.swapped))

    @rule(data=st.data())
    def grant(self, data: st.DataObject) -> None:
        request = self.some(data, ended=False, in_batch=True, leaving=False)
        if request is not None and len(request.pages) < 4:
            self.world.grant(request)

    @rule(data=st.data())
    def spoil(self, data: st.DataObject) -> None:
        if (request := self.some(data, ended=False, in_batch=True, swapping=False)) is not None:
            self.world.spoil(request)

    @rule(at_once=st.booleans())
    def device_begins_steps(self, at_once: bool) -> None:
        self.world.hurries = at_once

    def teardown(self) -> None:
        self.world.wind_down()


@pytest.mark.parametrize(
    "ahead", [pytest.param(True, id="ahead"), pytest.param(False, id="in-turn", marks=pytest.mark.slow)]
)
def test_whatever_happens_tokens_are_those_of_a_request_alone(
    device: Device, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FrontAndRank, "device", device, raising=False)
    monkeypatch.setattr(FrontAndRank, "ahead", ahead)
    run_state_machine_as_test(FrontAndRank, settings=SETTINGS)


class GivesBackAtOnce(PageHolds[Any]):
    """Pages of a row that is out of the batch are free, whatever step has it."""

    def out(self, handle: int, what: Any) -> bool:
        return True


class CountsTheOldestStep(PageHolds[Any]):
    """A row that ends waits for the step that is over next, not for the last one that has it."""

    def over(self) -> list[Any]:
        super().over()
        free, self._held = [what for _, what in self._held], type(self._held)()
        return free


class KeepsTheTokenTooMany(RunningRows):
    """What the next step has made of a row that stopped counts."""

    def collected(self, step: Any, chosen: Chosen, next_step: Any = None) -> Any:
        made = super().collected(step, chosen, next_step)
        if next_step is not None:
            next_step.vain.clear()
        return made


class BelievesRowsStay(RunningRows):
    """Each row takes the token that was made in its place."""

    def source(self) -> Any:
        source = super().source()
        source[source >= 0] = range((source >= 0).sum())
        return source


class LeavesAtOnce(steps_module.Steps):
    """Left does not wait for the step in flight."""

    def leave(self, handle: int) -> None:
        self.rows.leave(handle)
        self._send(m.Left(handle))


class TellsStallsFirst(steps_module.Steps):
    """Stalled comes before the token that made the row stall, so that the front sees room."""

    def _run_ahead(self, begin: Any) -> None:
        for handle in self.rows.stall():
            self._send(m.Stalled(handle))
        super()._run_ahead(begin)


class SamplesWithoutHistory(steps_module.StepInFlight):
    """Rows with penalties do not wait for the tokens that they are penalised for."""

    def may_precede(self, batch: Any) -> bool:
        return True


class NeverRests(RunningRows):
    """A row with a grammar is in the next step before its token is known."""

    def rest(self) -> list[int]:
        return []


class ForgetsWhoRests(RunningRows):
    """Rows that rested are not put back."""

    def wake(self, handles: Any) -> None:
        pass


BROKEN: list[tuple[Any, str, Any]] = [
    (steps_module, "StepInFlight", SamplesWithoutHistory),
    (steps_module, "PageHolds", GivesBackAtOnce),
    (steps_module, "PageHolds", CountsTheOldestStep),
    (steps_module, "RunningRows", KeepsTheTokenTooMany),
    (steps_module, "RunningRows", BelievesRowsStay),
    (steps_world, "Steps", LeavesAtOnce),
    (steps_world, "Steps", TellsStallsFirst),
    (steps_module, "RunningRows", NeverRests),
    (steps_module, "RunningRows", ForgetsWhoRests),
]


@pytest.mark.parametrize(("module", "name", "broken"), BROKEN, ids=[broken.__name__ for _, _, broken in BROKEN])
def test_a_broken_rule_is_found(
    device: Device, module: Any, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FrontAndRank, "device", device, raising=False)
    monkeypatch.setattr(module, name, broken)
    if broken is SamplesWithoutHistory:  # what its tokens show is rare among all kinds
        monkeypatch.setattr(FrontAndRank, "kinds", (5, 0))
        monkeypatch.setattr(FrontAndRank, "hurries", True)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            FrontAndRank,
            settings=settings(
                SETTINGS,
                max_examples=400,
                derandomize=True,
                database=None,
                report_multiple_bugs=False,
                phases=[Phase.generate],
            ),
        )


# ── the same, spelled out ────────────────────────────────────────────────────────────────────────


def two(device: Device, kinds: tuple[int, int], stop_at: int = 9, hurries: bool = False) -> World:
    """Two requests whose first decode step is in flight; the first may stop early."""
    world = World(device)
    world.hurries = hurries
    for kind, at in zip(kinds, (stop_at, 9), strict=True):
        world.start((1, 2, 3), kind, 9, at, 0, 2)
    world.step()
    world.hear()
    world.step()
    assert not world.said, "nobody has waited for the step"
    return world


def decoded(world: World) -> list[m.DecodeStepDone]:
    return [message for message in world.said if isinstance(message, m.DecodeStepDone)]


def test_a_row_that_stops_costs_one_token_too_many_and_its_pages_wait(device: Device) -> None:
    world = two(device, (1, 0), stop_at=2)
    first, other = world.requests.values()
    world.step()
    world.step()
    (step, *_) = [one for one in decoded(world) if any(token.finish for token in one.tokens)]
    assert step.held == (first.handle,) and not any(isinstance(message, m.Left) for message in world.said)
    pages = set(first.pages)
    world.hear()
    assert pages <= world.in_use() and first.pages, "the step that has it in vain is not over"
    world.step()
    made = [message for message in world.said if isinstance(message, m.DecodeStepDone | m.Left)]
    assert [token.handle for token in made[0].tokens] == [other.handle] and made[0].batch == 2  # type: ignore[union-attr]
    assert made[1] == m.Left(first.handle)
    world.wind_down()


@pytest.mark.parametrize("broken", [False, True], ids=["right", "broken"])
def test_penalties_wait_for_the_tokens_that_they_are_for(
    device: Device, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken:
        monkeypatch.setattr(steps_module, "StepInFlight", SamplesWithoutHistory)
    world = two(device, (5, 0), hurries=True)
    world.cancel(world.requests[2])  # the sampler begins anew, with the histories
    if broken:
        with pytest.raises(AssertionError, match="is another"):
            world.wind_down()
    else:
        world.wind_down()


def test_rows_with_penalties_that_stay_need_not_wait(device: Device) -> None:
    world = two(device, (5, 4))
    world.step()
    assert len(decoded(world)) == 1 and world.steps.has_work
    world.step()
    assert len(decoded(world)) == 2, "each call launches a step and reads the one before"
    world.wind_down()


@pytest.mark.parametrize("free", [0, 5], ids=["greedy", "penalised"])
@pytest.mark.parametrize("constrained", [GRAMMAR, PENALISED_GRAMMAR])
def test_a_row_with_a_grammar_lags_and_the_others_do_not_wait(device: Device, free: int, constrained: int) -> None:
    world = two(device, (free, constrained))
    for calls in range(1, 7):
        world.step()
        assert len(decoded(world)) == calls, "each call launches a step and reads the one before"
        assert world.steps.has_work
    assert [len(step.tokens) for step in decoded(world)] == [2, 1, 2, 1, 2, 1]
    world.wind_down()


def test_rows_with_a_grammar_alone_wait_for_their_own_tokens(device: Device) -> None:
    world = two(device, (GRAMMAR, PENALISED_GRAMMAR))
    for calls in range(1, 5):
        world.step()
        assert [len(step.tokens) for step in decoded(world)] == [2] * calls
    world.wind_down()


def test_a_grammar_that_fails_ends_its_row_alone(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    world = two(device, (1, GRAMMAR))
    well, failing = world.requests.values()
    world.step()  # reads the first step: the row rests, and is in the next one

    def fails(*_: Any) -> None:
        raise GrammarFailed("grammar: too much")

    monkeypatch.setattr(AnswerGrammar, "fill", fails)
    failing.spoiled = True
    world.hurries = True
    world.step()
    world.step()
    errors = [message for message in world.said if isinstance(message, m.RankError)]
    assert [(error.handles, error.code) for error in errors] == [((failing.handle,), "grammar_failed")]
    assert "too much" in errors[0].message
    world.hear()
    assert failing.ended and not failing.pages and not well.ended
    world.wind_down()


def test_what_is_not_finite_fails_its_row_alone(device: Device) -> None:
    world = two(device, (1, 2))
    spoiled, well = world.requests.values()
    world.step()  # reads the first
    world.spoil(spoiled)
    world.step()
    world.step()
    world.hear()
    assert world.errors == 1 and spoiled.ended and not spoiled.pages
    assert len(well.made) > len(spoiled.made) > 0 and not well.ended
    world.wind_down()


def test_a_launch_that_fails_leaves_the_step_before_it(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    world = two(device, (0, 1))

    def fails(*_: Any) -> None:
        raise RuntimeError("no memory")

    made = world.steps.begin
    monkeypatch.setattr(world.steps, "begin", fails)
    world.step()
    assert [type(message) for message in world.said] == [m.DecodeStepDone, m.RankError, m.RankError]
    assert len(world.said[0].tokens) == 2, "their tokens were made"  # type: ignore[union-attr]
    monkeypatch.setattr(world.steps, "begin", made)
    for request in world.requests.values():
        request.spoiled = True
    world.wind_down()


def test_a_step_that_fails_fails_its_rows_and_their_next_step(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    world = two(device, (0, 1))

    def fails(*_: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(device.runner, "launch", fails)
    world.step()  # launches the next one, too, and finds that the first failed
    for request in world.requests.values():
        request.spoiled = True
    assert not world.said, "the next step has their pages"
    world.step()
    assert [type(message) for message in world.said] == [m.RankError] * 2
    monkeypatch.undo()
    world.wind_down()


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("launch"), st.sets(st.integers(0, 5), min_size=1)),
            st.tuples(st.just("over"), st.none()),
            st.tuples(st.just("out"), st.integers(0, 5)),
        )
    )
)
def test_holds_say_what_counting_steps_would(events: list[tuple[str, Any]]) -> None:
    holds: PageHolds[int] = PageHolds()
    flying: list[set[int]] = []
    waiting: list[tuple[int, int, list[set[int]]]] = []  # what is to be said, of whom, and the steps that have it
    for number, (kind, what) in enumerate(events):
        match kind:
            case "launch":
                holds.launched(sorted(what))
                flying.append(set(what))
            case "over" if flying:
                gone = flying.pop(0)
                waiting = [(n, h, [s for s in steps if s is not gone]) for n, h, steps in waiting]
                assert holds.over() == [n for n, _, steps in waiting if not steps]
                waiting = [entry for entry in waiting if entry[2]]
            case "out":
                having = [step for step in flying if what in step]
                assert holds.out(what, number) == (not having)
                if having:
                    waiting.append((number, what, having))

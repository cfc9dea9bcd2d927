"""Steps that verify drafts, with requests that stall, are preempted, cancelled and stop at any moment: the tokens,
log-probabilities and ends are those of a request that runs alone, whatever is drafted. Rules that are broken show.

Drafts are right as often as not: what a drafter proposes is the request's own answer, with errors that are drawn.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from torch.utils._python_dispatch import TorchDispatchMode

from kvmesh.drafts.drafter import NO_DRAFT, Draft
from kvmesh.drafts.ngram import NgramDrafter
from kvmesh.drafts.speculator import Speculator
from kvmesh.drafts.step_share import NO_COSTS, DraftCosts
from kvmesh.engine.batch import PrefillInput, SampleParams
from kvmesh.engine.cache_memory import group_shapes, is_state, zeroed_memory
from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.runner import Runner
from kvmesh.engine.sampling.grammar import AnswerGrammar
from kvmesh.engine.sampling.history import History
from kvmesh.errors import InternalError
from kvmesh.kvcache.cache_groups import GroupPages
from kvmesh.kvcache.keys import pack_tokens
from kvmesh.ranks import protocol as m
from kvmesh.ranks.worker import rows as rows_module
from kvmesh.ranks.worker import steps as steps_module
from kvmesh.ranks.worker import verification
from kvmesh.ranks.worker.steps import Steps
from kvmesh.transfer import EngineConfig, TransferEngine
from tests.ranks.test_steps_in_flight import FrontAndRank
from tests.support.checkpoints import make_checkpoint
from tests.support.engine.qwen3_next import make_qwen3_next
from tests.support.steps_world import BLOCK, Device, World

EXAMPLES = int(os.environ.get("KVMESH_EXAMPLES", "25"))
SETTINGS = settings(
    max_examples=EXAMPLES,
    stateful_step_count=40,
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


class Foresees:
    """Proposes what comes, and errs in one token of `errs_every`."""

    name = "foresees"
    needs_hidden = True
    computes = False
    errs_every = 3

    def __init__(self) -> None:
        self.world: World | None = None
        self.known: dict[int, list[int]] = {}
        self.turn = 0

    def begin(self, handle: int, prompt: Sequence[int], answer: Sequence[int]) -> None:
        assert handle not in self.known
        self.known[handle] = list(answer)

    def extend(self, handle: int, tokens: Sequence[int], hidden: torch.Tensor | None = None) -> None:
        assert hidden is None or len(hidden) == len(tokens)
        self.known[handle] += tokens

    def propose(self, handles: Sequence[int], most: Sequence[int]) -> list[Draft]:
        return [self._proposed(handle, count) for handle, count in zip(handles, most, strict=True)]

    def _proposed(self, handle: int, count: int) -> Draft:
        assert self.world is not None
        request, made = self.world.requests[handle], len(self.known[handle])
        comes = [token.sampled.token_id for token in request.expected]
        assert self.known[handle] == comes[:made], "a drafter is told what the answer is"
        draft = [*comes[made : made + count], *[5] * count][:count]
        for at in range(count):
            self.turn += 1
            if not self.turn % self.errs_every:
                draft[at] = (draft[at] + 1) % 300
        self.turn += 1
        return Draft(draft, 3) if self.turn % 4 else NO_DRAFT

    def end(self, handle: int) -> None:
        del self.known[handle]


class Moody(Speculator):
    """Has hopes now and then, so that steps are launched ahead between those with drafts."""

    turn = 0

    def hopes(self, handles: Sequence[int], costs: DraftCosts) -> bool:
        self.turn += 1
        return super().hopes(handles, costs) and self.turn % 7 < 5


class FrontAndDraftingRank(FrontAndRank):
    drafted = 0
    kept = 0

    def __init__(self) -> None:
        super().__init__()
        self.drafter = Foresees()
        speculator = Moody([self.drafter], 5, adapts=False)
        self.world = World(self.device, self.ahead, speculator)
        self.drafter.world = self.world

    def teardown(self) -> None:
        self.world.wind_down()
        assert not self.drafter.known and not self.world.steps._variants._kept, "a row is forgotten when it has left"
        counts = self.world.speculator.counts
        assert counts.kept[0] == self.world.kept
        type(self).drafted += counts.drafted[0]
        type(self).kept += counts.kept[0]


@pytest.mark.parametrize(("size", "error"), [(1, RuntimeError("broken")), (2, InternalError("broken"))])
def test_a_drafter_that_raises_ends_the_rows_as_other_faults_do(size: int, error: Exception) -> None:
    failed: list[Any] = []

    def propose(share_ppm: int) -> Any:
        raise error

    steps: Any = SimpleNamespace(_propose=propose, rows=SimpleNamespace(handles=lambda: (3, 4)))
    steps._runner = SimpleNamespace(mesh=SimpleNamespace(world=SimpleNamespace(size=size)))
    steps._rows_failed = lambda handles, found: failed.append((handles, found))
    assert Steps._proposed(steps, 0) is None
    assert failed == [((3, 4), error)]
    steps._runner.mesh.world.size = 2
    steps._propose = lambda share_ppm: 1 / 0
    with pytest.raises(ZeroDivisionError):  # the other ranks may not have failed
        Steps._proposed(steps, 0)


@pytest.mark.parametrize("room", [[0, 0], [0, 1]])
def test_a_step_waits_for_no_draft_that_has_no_room(room: list[int]) -> None:
    called: list[str] = []
    steps: Any = SimpleNamespace(draft_costs=NO_COSTS, begin=lambda launch: launch, _snapshots=(), batches=None)
    steps.rows = SimpleNamespace(room_for_drafts=lambda whole_blocks: room)
    steps._hopes = lambda costs: True
    steps._run_ahead = lambda begin: called.append("ahead")

    def settle() -> None:
        called.append("waits")
        raise InternalError("seen")

    steps.settle = settle
    if any(room):
        with pytest.raises(InternalError):
            Steps.run(steps, None, lambda: None)
    else:
        Steps.run(steps, None, lambda: None)
    assert called == (["waits"] if any(room) else ["ahead"])


@pytest.mark.parametrize("ahead", [pytest.param(True, id="ahead"), pytest.param(False, id="in-turn")])
def test_whatever_is_drafted_tokens_are_those_of_a_request_alone(
    device: Device, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FrontAndDraftingRank, "device", device, raising=False)
    monkeypatch.setattr(FrontAndDraftingRank, "ahead", ahead)
    run_state_machine_as_test(FrontAndDraftingRank, settings=SETTINGS)
    assert FrontAndDraftingRank.drafted > FrontAndDraftingRank.kept > FrontAndDraftingRank.drafted / 4


@pytest.mark.parametrize("ahead", [pytest.param(True, id="ahead"), pytest.param(False, id="in-turn")])
def test_rows_draft_in_steps_that_compute_prompts(device: Device, ahead: bool) -> None:
    drafter = Foresees()
    drafter.world = world = World(device, ahead, Speculator([drafter], 5, adapts=False))
    world.start((1, 2, 3), 0, 20, 20, 0, 6)
    world.step()
    world.hear()
    for seed in range(3):
        world.start((4, 5, seed + 6), 0, 6, 6, 0, 2)
        world.step()
        world.hear()
    assert world.drafts_beside
    world.wind_down()


def keeps_everything(sampled: Sequence[int], draft: Sequence[int]) -> int:
    return len(draft)


def one_noise(batch: Any, drafts: Any, variants: Any) -> Any:
    """All tokens of a draft are sampled with the noise of the first."""
    made = verification.expand(batch, drafts, variants)
    made.batch.indices[:] = made.batch.indices[
        [first for first, n in zip(made.firsts, made.batch.lengths, strict=True) for _ in range(n)]
    ]
    return made


class IgnoresStops(rows_module.RunningRows):
    """An answer goes on behind a stop token that a draft foresaw."""

    def advance_by(self, made: Any, scores: Any) -> Any:
        kept, self._stop = self._stop, [frozenset() for _ in self._stop]
        try:
            said, counts = super().advance_by([own[:-1] or own for own in made], scores)
        finally:
            self._stop = kept[: len(self._stop)]
        return said, counts


class HasRoomForAll(rows_module.RunningRows):
    """Drafts are as long as they like, whatever pages there are and however long the answer may be."""

    def room_for_drafts(self, whole_blocks: bool) -> list[int]:
        return [5] * self.live


def forgets_accepted(params: Any, made: Any) -> None:
    """Penalties and grammars see the first token of each step alone."""


def same_history(self: History, tokens: Sequence[int]) -> list[History]:
    """Penalties behind a draft's tokens do not see these."""
    return [History(*self.table()[:1]) for _ in tokens]


def forbidden_too(self: AnswerGrammar, tokens: Sequence[int]) -> list[AnswerGrammar]:
    """What a grammar forbids is proposed, and masks behind it are those before it."""
    self._caught_up()
    found = []
    for _ in tokens:
        later = AnswerGrammar(self._compiled, (), self._eos, may_end=self._may_end)
        later._matcher = self._matcher.deep_copy() if self._matcher is not None else None
        found.append(later)
    return found


# ── states ───────────────────────────────────────────────────────────────────────────────────────

MADE = 40
SLOTS = (1, 2)  # of the row: what steps change, and the copy at borders


class AnswersAlone(Foresees):
    """Foresees one answer, with errors."""

    def __init__(self, answer: list[int], errs_every: int) -> None:
        super().__init__()
        self.answer, self.errs_every = answer, errs_every

    def _proposed(self, handle: int, count: int) -> Draft:
        made = len(self.known[handle])
        draft = [*self.answer[made : made + count], *[5] * count][:count]
        for at in range(count):
            self.turn += 1
            if not self.turn % self.errs_every:
                draft[at] = (draft[at] + 1) % 200
        return Draft(draft, 3)


def with_states(path: Path, prompt: list[int], speculator: Speculator | None) -> tuple[list[int], list[torch.Tensor]]:
    """Answers greedily; returns the tokens and the states that are kept of the last border."""
    checkpoint = open_checkpoint(path)
    groups = checkpoint.config.cache_groups
    shapes = group_shapes(checkpoint.config, torch.float32, BLOCK)
    pages = -(-(len(prompt) + MADE) // BLOCK)
    memory = zeroed_memory(shapes, [3 if is_state(s.group) else pages for s in shapes], torch.device("cpu"))
    runner = Runner(checkpoint, "float32", "cpu", BLOCK, memory)
    tables = [SLOTS[:1] if is_state(group) else tuple(range(pages)) for group in groups]
    [first] = runner.prefill([PrefillInput(prompt, 0, (), SampleParams(), tables)])
    assert first is not None
    said: list[Any] = []
    pusher: Any = type("NoPusher", (), {"step_begins": lambda self, items: None})()
    steps = steps_module.Steps(runner, pusher, BLOCK, said.append, groups=groups, speculator=speculator)
    made = [first.token_id]
    named = [GroupPages(g, 0, SLOTS if is_state(group) else tables[g]) for g, group in enumerate(groups)]
    history = m.TokenHistory(pack_tokens(prompt), pack_tokens(made))
    greedy = m.Sampling(0.0, 1.0, 0, 1)
    steps.join(m.Join(1, (), len(prompt), made[0], 0, MADE, 0, (), greedy, groups=tuple(named), said=history))
    while steps.has_work:
        steps.run(None, lambda: None)
    made += [token.token_id for step in said for token in step.tokens]
    assert sum(len(step.tokens) for step in said) == MADE - 1
    return made, [tensor[SLOTS[1]].clone() for tensor, group in zip(memory, groups, strict=True) if is_state(group)]


@pytest.fixture(scope="module")
def delta_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3_next(tmp_path_factory.mktemp("delta"))


def test_states_go_back_to_the_last_token_that_was_kept(delta_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [9, 8, 7, 3, 2, 9, 8]
    truth, border = with_states(delta_model, prompt, None)
    for errs_every in (2, 5, 1000):
        speculator = Speculator([AnswersAlone(truth, errs_every)], 7, again=True, adapts=False)
        made, kept = with_states(delta_model, prompt, speculator)
        assert made == truth
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(kept, border, strict=True)), "the state at a border"
        assert speculator.counts.kept[0] > MADE / 8
    monkeypatch.setattr(steps_module.Steps, "_roll_back", lambda *_: None)
    made, _ = with_states(delta_model, prompt, Speculator([AnswersAlone(truth, 5)], 7, again=True, adapts=False))
    assert made != truth, "a state that has seen wrong tokens must show"


# ── off ──────────────────────────────────────────────────────────────────────────────────────────


class Operators(TorchDispatchMode):
    """Notes the operators that are called, with the sizes of what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.called.append((str(func), tuple(made.shape) if isinstance(made, torch.Tensor) else ()))
        return made


def test_without_drafts_a_step_calls_what_it_always_called(device: Device) -> None:
    """Neither a rank that drafts nothing nor one that drafts but sees no hope calls or allocates anything more."""
    called = []
    for speculator in (None, None, Speculator([NgramDrafter()], 7)):  # the first grows what the runner keeps
        world = World(device, ahead=False, speculator=speculator)
        world.start((1, 2, 3), 0, 9, 9, 0, 2)
        world.start((4, 5), 1, 9, 9, 0, 2)
        for _ in range(3):  # a rank keeps what follows from its rows
            world.step()
            world.hear()
        if speculator is not None:
            for row in speculator._rows.values():
                row.hope = 0.0
        with Operators() as operators:
            world.step()
        called.append(operators.called)
        world.wind_down()
    assert called[1] == called[2] and len(called[1]) > 10


BROKEN: list[tuple[Any, str, Any]] = [
    (verification, "accepted", keeps_everything),
    (steps_module, "expand", one_noise),
    (steps_module, "RunningRows", IgnoresStops),
    (steps_module, "RunningRows", HasRoomForAll),
    (steps_module, "note_accepted", forgets_accepted),
    (History, "ahead", same_history),
    (AnswerGrammar, "ahead", forbidden_too),
]


@pytest.mark.parametrize(("module", "name", "broken"), BROKEN, ids=[broken.__name__ for _, _, broken in BROKEN])
def test_a_broken_rule_is_found(
    device: Device, module: Any, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FrontAndDraftingRank, "device", device, raising=False)
    monkeypatch.setattr(FrontAndDraftingRank, "ahead", False)
    monkeypatch.setattr(module, name, broken)
    with pytest.raises(Exception):  # noqa: B017  an assertion here, or of whatever it met first
        run_state_machine_as_test(
            FrontAndDraftingRank,
            settings=settings(SETTINGS, max_examples=400, derandomize=True, database=None, phases=[Phase.generate]),
        )

"""Experts over data-parallel ranks: tokens reach the ranks that have their experts, and come back as one rank would
have answered them; ranks with uneven work, or none, keep step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.engine.axes import Axes
from kvmesh.engine.models.dispatch import Dispatch, PaddedDispatch, RaggedDispatch, StepRounds, owners_along_dp
from kvmesh.engine.parallel import ALONE, Group, RankMesh, share
from kvmesh.engine.runner import NOBODY, DecodeInput, PrefillInput, SampleParams
from tests.support.engine.rank_processes import run_ranks
from tests.support.engine.stepper import Stepper
from tests.support.engine.threaded_mesh import over_threads
from tests.support.reference import Forced, assert_as_close_as_reference, assert_matches_reference

HIDDEN, CHOSEN = 6, 3


class Together(Group):
    """A rank that is a thread beside others of this process."""

    def __init__(self, rank: int, parts: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.parts, self.barrier = rank, len(parts), parts, barrier

    def _all(self, mine: Any) -> list[Any]:
        self.parts[self.rank] = mine
        self.barrier.wait(20)
        found = list(self.parts)
        self.barrier.wait(20)
        return found

    def all_max(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._all(x)).amax(0)

    def gather_rows(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        parts = self._all(x)
        assert [len(part) for part in parts] == list(counts)
        return torch.cat(parts)

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        assert len(x) == sum(sent)
        parts = [pieces[self.rank] for pieces in self._all(torch.split(x, list(sent)))]
        assert [len(part) for part in parts] == list(received)
        return torch.cat(parts)


def together(size: int, work: Callable[[Group], Any]) -> list[Any]:
    """Runs `work` at every rank of a group; what each returns."""
    parts: list[Any] = [None] * size
    barrier = threading.Barrier(size)

    def at(rank: int) -> Any:
        try:
            return work(Together(rank, parts, barrier))
        except BaseException:
            barrier.abort()  # the others do not wait for the one that failed
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(at, range(size)))


def answered(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, own: set[int]) -> torch.Tensor:
    """What experts answer that add their own number to what they multiply: those of `own` alone."""
    mine = torch.tensor([[expert in own for expert in row] for row in chosen.tolist()]).view(chosen.shape)
    scale = (weights * mine * (chosen + 1)).sum(1, keepdim=True)
    return x.float() * scale + (weights * mine).sum(1, keepdim=True)


@pytest.mark.parametrize("kind", ["ragged", "padded"])
@settings(max_examples=12, deadline=None)
@given(tokens=st.lists(st.integers(0, 5), min_size=2, max_size=4), experts=st.integers(4, 9), seed=st.integers(0, 99))
def test_each_token_gets_the_answers_of_all_its_experts(kind: str, tokens: list[int], experts: int, seed: int) -> None:
    """Whatever the ranks have: none of a rank's tokens is another's, and a rank without one answers the others'."""
    size = len(tokens)
    random = torch.Generator().manual_seed(seed)
    given_x = [torch.randn(count, HIDDEN, generator=random) for count in tokens]
    scores = [torch.rand(count, experts, generator=random) for count in tokens]
    chosen = [score.topk(CHOSEN).indices for score in scores]
    owners = [dp for dp in range(size) for _ in share(experts, dp, size)]

    def rank(group: Group) -> tuple[torch.Tensor, int]:
        rounds = StepRounds(group, torch.device("cpu"), most_padded=0 if kind == "ragged" else 9)
        rounds.begin(tokens[group.rank], False)
        assert rounds.anyone == any(tokens) and rounds.padded == (max(tokens) if kind == "padded" else 0)
        dispatch: Dispatch = RaggedDispatch(group, torch.tensor(owners))
        if kind == "padded":
            dispatch = PaddedDispatch(group, experts, lambda: rounds.padded)
        x, choice = given_x[group.rank], chosen[group.rank]
        arrived = dispatch.dispatch(x, choice, choice.float() / 7)
        own = {expert for expert, dp in enumerate(owners) if dp == group.rank}
        return dispatch.combine(answered(arrived.x, arrived.chosen, arrived.weights, own), arrived), len(arrived.x)

    found = together(size, rank)
    for x, choice, (out, _) in zip(given_x, chosen, found, strict=True):
        torch.testing.assert_close(out, answered(x, choice, choice.float() / 7, set(range(experts))))
    if kind == "ragged":  # a row goes once to each rank that has one of its experts, and to no other
        pairs = {(at, t, owners[e]) for at, own in enumerate(chosen) for t, row in enumerate(own.tolist()) for e in row}
        assert sum(came for _, came in found) == len(pairs)


@pytest.mark.parametrize("text", ["dp=2,ep=dp", "dp=2,tp=2,ep=dp+tp", "dp=2,cp=2,tp=2,ep=dp+cp", "dp=3,pp=2,ep=dp"])
def test_every_expert_lies_along_dp_at_some_place_of_the_other_axes(text: str) -> None:
    axes = Axes.parse(text)
    for rank in range(axes.world):
        place = axes.place(rank)
        planes = [axes.rank(place._replace(cp=cp, tp=tp)) for cp in range(axes.cp) for tp in range(axes.tp)]
        owned = [owners_along_dp(11, axes, plane) for plane in planes]
        reached = [{dp for dp in column if dp < axes.dp} for column in zip(*owned, strict=True)]
        assert all(len(where) == 1 for where in reached)  # one rank of dp, at one or several places beside it
        mine = share(11, axes.peers(rank, axes.ep).index(rank), axes.experts)
        assert [e for e, dp in enumerate(owners_along_dp(11, axes, rank)) if dp == place.dp] == list(mine)


# ── whole models ──────────────────────────────────────────────────────────────────────────────────

MODELS = ["qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral"]
PROMPTS = [[(7 * i * i + 5 * i + seed) % 250 + 3 for i in range(n)] for seed, n in enumerate((37, 5, 21, 1))]
CHUNK, TOKENS, ROUNDS = 16, 5, 15
# Of each request: at which place on `dp` it is, and in which round it comes. Place 1 prefills while 0 decodes, has
# nothing in between, and goes on when 0 is done; what is beyond place 1 never has any.
PLAN = ((0, 0), (1, 3), (0, 1), (1, 9))


class Case(NamedTuple):
    """One mesh of some of the ranks, from `first` on, and up to how many tokens its steps are padded."""

    mesh: str
    first: int
    most_padded: int


# Those of one line at once.
CASES = (
    (Case("dp=2,ep=dp", 0, 0), Case("tp=2,ep=tp", 2, 0)),
    (Case("dp=2,tp=2,ep=dp+tp", 0, 9),),
    (Case("dp=2,tp=2,ep=dp", 0, 1000),),
)


class Told(NamedTuple):
    """What one rank says of one model: the answers of its own requests, and how often its tokens chose an expert."""

    answers: dict[int, list[int]]
    counted: torch.Tensor
    half: Forced | None
    rounds: int


def told(path: Path, mesh: RankMesh, most_padded: int) -> Told:
    stepper = Stepper(path, mesh=mesh)
    runner, rounds = stepper.runner, stepper.runner.rounds
    if rounds is not None:
        rounds.most_padded = most_padded
    mine = {at: start for at, (dp, start) in enumerate(PLAN) if dp == mesh.place.dp or mesh.axes.dp == 1}
    pages = {at: stepper.take(len(PROMPTS[at]) + TOKENS) for at in mine}
    left = {at: list(PROMPTS[at]) for at in mine}
    answers: dict[int, list[int]] = {at: [] for at in mine}
    now = 0
    while now < ROUNDS or any(len(answer) < TOKENS for answer in answers.values()):
        begun = [at for at, start in mine.items() if start <= now and len(answers[at]) < TOKENS]
        new = [at for at in begun if left[at]]
        running = [at for at in begun if not left[at]]
        items = []
        for at in new:
            start, chunk = len(PROMPTS[at]) - len(left[at]), left[at][:CHUNK]
            left[at] = left[at][CHUNK:]
            items.append(PrefillInput(chunk, start, pages[at], None if left[at] else SampleParams()))
        rows = [
            DecodeInput(answers[at][-1], len(PROMPTS[at]) + len(answers[at]) - 1, pages[at], SampleParams())
            for at in running
        ]
        batch = NOBODY.of(rows)
        if items or rows:
            first, chosen = runner.step(items, batch)
            for at, token in zip([*running, *new], [*chosen.tokens(), *first], strict=True):
                answers[at] += [token.token_id] if token is not None else []
        else:
            runner.serve()
        now += 1
    assert runner.expert_counts is not None
    counted = runner.expert_counts.table.clone()
    half = forced_half(path, mesh) if mesh.axes.experts == 4 else None
    return Told(answers, counted, half, rounds.count if rounds is not None else 0)


def forced_half(path: Path, mesh: RankMesh) -> Forced | None:
    """Computes a prompt in bfloat16 at place 0 on `dp`; the others serve it, until nobody has work."""
    stepper = Stepper(path, dtype="bfloat16", mesh=mesh)
    half, rounds = None, stepper.runner.rounds
    if not mesh.place.dp:
        half = stepper.forced(PROMPTS[0], 31, chunks=(16, 7))
    stepper.runner.serve()
    while rounds is not None and rounds.anyone:
        stepper.runner.serve()
    return half


def rank_main(rank: int, folder: Path, paths: list[Path]) -> None:
    torch.set_num_threads(1)
    for number, cases in enumerate(CASES):
        for case in cases:
            axes = Axes.parse(case.mesh)
            if case.first <= rank < case.first + axes.world:
                name = f"{number}-{case.first}"
                mesh = RankMesh(axes, rank - case.first, str(folder / f"meet-{name}"), timeout_s=30)
                mesh.connect(60)
                said = [told(path, mesh, case.most_padded) for path in paths]
                torch.save(said, folder / f"{name}-{rank - case.first}.pt")
                mesh.close()


@pytest.mark.slow
def test_ranks_with_uneven_work_answer_as_one_does(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    """Experts over dp, over dp and tp, over tp alone; ragged, padded, and both in turn."""
    paths = [zoo(name) for name in MODELS]
    run_ranks(rank_main, (tmp_path, paths), 4)
    alone = [told(path, ALONE, 0) for path in paths]
    for number, cases in enumerate(CASES):
        for case in cases:
            axes = Axes.parse(case.mesh)
            said = [
                torch.load(tmp_path / f"{number}-{case.first}-{rank}.pt", weights_only=False)
                for rank in range(axes.world)
            ]
            for at, path in enumerate(paths):
                own = [answers[at] for answers in said]
                assert len({one.rounds for one in own}) == 1
                together: dict[int, list[int]] = {}
                counted = torch.zeros_like(own[0].counted)
                for rank, one in enumerate(own):
                    place = axes.place(rank)
                    if place.tp:
                        leader = own[axes.rank(place._replace(tp=0))]
                        assert (one.answers, one.half) == (leader.answers, leader.half)
                        assert torch.equal(one.counted, leader.counted)
                    else:
                        together |= one.answers
                        counted += one.counted
                assert sorted(together) == list(range(len(PROMPTS)))
                for request, tokens in together.items():
                    assert_matches_reference(path, PROMPTS[request], tokens)
                assert together == alone[at].answers, (case, path.name)
                assert torch.equal(counted, alone[at].counted)
                if axes.experts == 4:
                    assert own[0].half is not None
                    assert_as_close_as_reference(path, [own[0].half])


@pytest.mark.slow
def test_places_whose_ranks_share_contexts_answer_as_one_does(zoo: Callable[[str], Path]) -> None:
    """A place without tokens serves the experts of the others, whose MLPs have the tokens of all ranks of cp."""
    path = zoo("qwen3_moe")
    said = over_threads(Axes.parse("dp=2,cp=2,ep=dp+cp"), lambda mesh: told(path, mesh, 9).answers)
    assert said[0] == said[1] and said[2] == said[3]
    together = said[0] | said[2]
    assert sorted(together) == list(range(len(PROMPTS)))
    for request, tokens in together.items():
        assert_matches_reference(path, PROMPTS[request], tokens)

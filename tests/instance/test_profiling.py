"""One profile at a time: who is asked, when it is over, and what is said when it cannot be."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from kvmesh.errors import DeadlinePassed, InternalError, InvalidRequest, Overloaded, Unavailable
from kvmesh.instance import profiling
from kvmesh.instance.profiling import RankProfiles, on_wire
from kvmesh.ranks import protocol as m
from kvmesh.ranks.client import RankClient

STEP = m.ProfiledStep(1_000, 1_500, 4, 40, 0)


class Listening:
    """A rank that only listens: what it answers, the test says."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.heard: list[m.ToRank] = []

    def send(self, message: m.ToRank) -> None:
        self.heard.append(message)


class Two:
    def __init__(self) -> None:
        self.ranks = [Listening(0), Listening(1)]
        self.profiles = RankProfiles(cast(list[RankClient], self.ranks))

    async def begin(self, steps: int = 3, deadline_ms: int = 500) -> asyncio.Task[list[m.Profiled]]:
        task = asyncio.create_task(self.profiles.profile("d-0", steps, deadline_ms))
        await asyncio.sleep(0)  # it runs until it waits
        return task

    def asked(self, rank: int) -> m.Profile:
        message = self.ranks[rank].heard[-1]
        assert isinstance(message, m.Profile)
        return message

    def answer(self, rank: int, **what: Any) -> None:
        assert self.profiles.rank_said(rank, m.Profiled(self.asked(rank).ticket, **what))


async def test_all_ranks_are_asked_the_same_and_their_answers_come_in_order() -> None:
    two = Two()
    task = await two.begin()
    assert two.asked(0) == two.asked(1)
    assert two.asked(0).steps == 3
    two.answer(1, device="second", steps=(STEP,))
    two.answer(0, device="first", steps=(STEP,))
    assert [answer.device for answer in await task] == ["first", "second"]
    assert not any(isinstance(message, m.ProfileStop) for rank in two.ranks for message in rank.heard)


async def test_a_second_one_is_refused_while_the_first_runs() -> None:
    two = Two()
    task = await two.begin()
    with pytest.raises(Overloaded, match="d-0 is being profiled"):
        await two.profiles.profile("d-0", 1, 100)
    for rank in (0, 1):
        two.answer(rank, steps=(STEP,))
    await task
    again = await two.begin()
    for rank in (0, 1):
        two.answer(rank, steps=(STEP,))
    assert len(await again) == 2


async def test_who_goes_away_ends_it_at_the_ranks() -> None:
    two = Two()
    task = await two.begin()
    ticket = two.asked(0).ticket
    two.answer(0, steps=(STEP,))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert two.ranks[1].heard[-1] == m.ProfileStop(ticket)
    assert not isinstance(two.ranks[0].heard[-1], m.ProfileStop)
    late = await two.begin()
    assert two.profiles.rank_said(1, m.Profiled(ticket, steps=(STEP,)))  # of the one before: of no use
    two.answer(0, steps=(STEP,))
    assert not late.done()
    two.answer(1, steps=(STEP,))
    assert len(await late) == 2


async def test_nothing_ran() -> None:
    two = Two()
    task = await two.begin(deadline_ms=2_000)
    two.answer(0)
    two.answer(1)
    with pytest.raises(DeadlinePassed, match=r"d-0 ran no step within 2 s: .*send it requests"):
        await task


async def test_a_rank_that_says_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "ANSWER_S", 0.0)
    two = Two()
    task = await two.begin(deadline_ms=20)
    two.answer(0, steps=(STEP,))
    with pytest.raises(DeadlinePassed, match="no profile came from rank 1"):
        await task


async def test_a_rank_that_could_not_says_why() -> None:
    two = Two()
    task = await two.begin()
    two.answer(0, steps=(STEP,))
    two.answer(1, why_not="RuntimeError: no CUPTI")
    with pytest.raises(InternalError, match="rank 1 has no profile: RuntimeError: no CUPTI"):
        await task


async def test_a_lost_rank_ends_it() -> None:
    two = Two()
    two.profiles.ranks_lost("nobody waits")
    task = await two.begin()
    two.profiles.ranks_lost("rank 1 was killed by SIGKILL")
    with pytest.raises(Unavailable, match="SIGKILL"):
        await task


@pytest.mark.parametrize(("steps", "deadline_ms", "field"), [(257, 0, "steps"), (1, 120_001, "deadline_ms")])
async def test_bounds(steps: int, deadline_ms: int, field: str) -> None:
    two = Two()
    with pytest.raises(InvalidRequest, match=f"{field}=.*at most"):
        await two.profiles.profile("d-0", steps, deadline_ms)
    assert two.ranks[0].heard == []


async def test_zeros_are_the_defaults() -> None:
    assert profiling.checked(0, 0) == (16, 10_000)


def test_other_messages_are_for_others() -> None:
    assert not Two().profiles.rank_said(0, m.Left(1))


def test_the_answer_on_the_wire_says_all() -> None:
    function = m.ProfiledFunction("mlp", 300, 1, 2, 3, 4, 5)
    pieces = m.ProfiledPieces(("mlp",), (0, 0), (10, 30), (5, 6), 7)
    experts = (m.ProfiledExperts(1, (3, 0, 5)),)
    sent = on_wire(m.Profiled(1, "cpu", 2, (STEP,), (function,), pieces, 1e9, 2e9, experts=experts))
    assert [(layer.layer, list(layer.tokens)) for layer in sent.experts] == [(1, [3, 0, 5])]
    (step,), (one,) = sent.steps, sent.functions
    assert (step.start_unix_ns, step.duration_ns, step.rows, step.context_tokens) == (1_000, 500, 4, 40)
    moved = (one.weight_bytes, one.kv_read_bytes, one.kv_written_bytes, one.activation_bytes, one.products)
    assert (one.name, one.busy_ns, *moved) == ("mlp", 300, 1, 2, 3, 4, 5)
    assert (list(sent.piece_which), list(sent.piece_starts_ns), list(sent.piece_ns)) == ([0, 0], [10, 30], [5, 6])
    assert (sent.device, sent.layers, sent.pieces_left_out, sent.products_per_s) == ("cpu", 2, 7, 2e9)

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.services.conductor.domain import Load
from kvmesh.services.conductor.loads.batch_forecast import DecodeWork
from kvmesh.services.conductor.loads.queues import IN_FLIGHT_S, PrefillQueue, PrefillWork, RunningBatch

PER_TOKEN = 0.001


def work(name: str, tokens: int, at: float, expires_at: float = 1e9) -> PrefillWork:
    return PrefillWork(name, tokens, tokens * PER_TOKEN, (), at, expires_at)


def stay(name: str, tokens: int, blocks: int, at: float, expires_at: float = 1e9) -> DecodeWork:
    return DecodeWork(name, tokens, blocks, at, expires_at)


def test_a_placement_counts_at_once_and_drains_with_time() -> None:
    queue = PrefillQueue(0.0)
    queue.add(work("a", 1000, 0.0))
    queue.add(work("b", 500, 0.0))
    assert queue.wait_s(0.0) == pytest.approx(1.5)
    assert queue.wait_s(1.0) == pytest.approx(0.5)
    assert queue.wait_s(9.0) == 0.0
    queue.add(work("c", 500, 9.0))
    assert queue.wait_s(9.0) == pytest.approx(0.5)


def test_a_tenant_has_its_turn_before_what_others_wait_for() -> None:
    queue = PrefillQueue(0.0)
    for i in range(10):
        queue.add(replace(work(f"g{i}", 1000, 0.0), tenant="greedy"))
    assert not queue.passes("modest"), "the instance has one queue for all"
    queue.fair = True
    assert queue.passes("modest") and not queue.passes("greedy"), "there is nobody else"
    assert queue.turn_s("modest", 1.0, 0.0, short=False) == pytest.approx(1.0), "after what is computed"
    queue.add(replace(work("m", 500, 0.0), tenant="modest", tenant_weight=0.5))
    assert queue.passes("greedy")
    assert queue.turn_s("modest", 0.5, 0.0, short=False) == pytest.approx(0.5 * 3 + 1.0), "a third is its share"
    assert queue.turn_s("modest", 0.5, 5.25, short=False) == pytest.approx(0.5 * 3 / 2 + 1.0), "half is done"
    assert queue.turn_s("greedy", 1.0, 0.0, short=False) == pytest.approx(10 * 1.5 + 1.0)
    queue.finish("m", 6.0, done=True)
    assert not queue.passes("greedy")
    queue.clear()
    assert not queue.passes("modest")


def test_a_report_corrects_what_was_settled_and_spares_what_is_flying() -> None:
    queue = PrefillQueue(0.0)
    queue.add(work("a", 1000, 0.0))
    queue.add(work("b", 1000, 0.99))
    queue.report(600, PER_TOKEN, 1.0)  # 400 tokens of "a" are done; "b" is not there yet
    assert queue.wait_s(1.0) == pytest.approx(0.6 + 1.0)
    queue.report(1600, PER_TOKEN, 1.2)  # both are there
    assert queue.wait_s(1.2) == pytest.approx(1.6)


@given(st.lists(st.tuples(st.sampled_from(["add", "finish", "withdraw", "clear"]), st.integers(0, 4))))
def test_tokens_to_come_are_those_of_what_is_there(steps: list[tuple[str, int]]) -> None:
    queue = PrefillQueue(0.0)
    for at, (what, number) in enumerate(steps):
        name = str(number)
        match what:
            case "add":
                queue.add(work(name, 100 * number + at, float(at)))
            case "finish":
                queue.finish(name, float(at), done=at % 2 == 0)
            case "withdraw":
                queue.withdraw(name, float(at))
            case _:
                queue.clear()
        assert queue.coming_tokens == sum(one.computed_tokens for one in queue.works.values())


def test_an_instance_that_stands_still_does_not_drain() -> None:
    queue = PrefillQueue(0.0)
    queue.add(work("a", 1000, 0.0))
    for now in (1.0, 2.0, 3.0):
        queue.report(1000, PER_TOKEN, now)
        assert queue.wait_s(now) == pytest.approx(1.0)


def test_unexplained_tokens_count_as_foreign_work() -> None:
    queue = PrefillQueue(0.0)
    queue.report(3000, PER_TOKEN, 1.0)
    assert queue.wait_s(1.0) == pytest.approx(3.0)
    queue.add(work("a", 500, 0.98))
    queue.report(3500, PER_TOKEN, 1.0)  # "a" may be among them already: it is not counted twice
    assert queue.wait_s(1.0) == pytest.approx(3.5)


def test_a_leaked_placement_weighs_nothing_once_the_instance_reports_empty() -> None:
    queue = PrefillQueue(0.0)
    queue.add(work("lost", 100_000, 0.0, expires_at=50.0))
    queue.report(0, PER_TOKEN, 1.0)
    assert queue.wait_s(1.0) == 0.0
    assert queue.expired(49.0) == []
    assert queue.expired(50.0) == ["lost"]
    assert queue.withdraw("lost", 50.0) is not None
    assert queue.works == {}


def test_withdrawing_takes_the_work_back() -> None:
    queue = PrefillQueue(0.0)
    queue.add(work("a", 1000, 0.0))
    queue.add(work("b", 500, 0.0))
    queue.withdraw("a", 0.0)
    assert queue.wait_s(0.0) == pytest.approx(0.5)
    assert queue.withdraw("a", 0.0) is None
    queue.withdraw("b", 0.0)
    assert queue.wait_s(0.0) == 0.0


def test_withdrawing_leaves_what_others_have_placed() -> None:
    queue = PrefillQueue(0.0)
    queue.add(work("ours", 1000, 0.0))
    queue.report(5000, PER_TOKEN, 1.0)  # 4000 of them are of another conductor
    assert queue.wait_s(1.0) == pytest.approx(5.0)
    queue.withdraw("ours", 1.0)
    assert queue.wait_s(1.0) == pytest.approx(4.0)


def test_batched_prefill_shows_as_speed() -> None:
    queue, now = PrefillQueue(0.0), 0.0
    for j in range(8):
        queue.add(work(f"{j // 4}-{j % 4}", 1000, now))
    for i in range(40):  # four predicted seconds of work done in every second
        for j in range(4):
            queue.add(work(f"{i + 2}-{j}", 1000, now))
        now += 1.0
        for j in range(4):
            queue.finish(f"{i}-{j}", now, done=True)
        queue.report(8000, PER_TOKEN, now)
    assert queue.speedup == pytest.approx(4.0, rel=0.1)
    assert queue.wait_s(now) == pytest.approx(2.0, rel=0.1)


def test_time_in_which_it_may_have_been_idle_is_no_slowness() -> None:
    """One short prompt in each second, under way whenever it reports: it was idle most of the time between."""
    queue, now = PrefillQueue(0.0), 0.0
    for i in range(40):
        queue.add(work(f"{i}", 100, now + 0.9))
        now += 1.0
        queue.report(50, PER_TOKEN, now)
        queue.finish(f"{i}", now, done=True)
    assert queue.speedup == 1.0


def test_what_is_done_of_a_long_prompt_counts_as_it_is_done() -> None:
    queue, now = PrefillQueue(0.0), 0.0
    queue.add(work("long", 100_000, 0.0))
    for done in range(1, 31):  # twice as fast as predicted
        now += 1.0
        queue.report(100_000 - 2000 * done, PER_TOKEN, now)
    assert queue.speedup == pytest.approx(2.0, rel=0.1)


def test_cancelled_work_does_not_count_as_speed() -> None:
    queue, now = PrefillQueue(0.0), 0.0
    for i in range(40):
        queue.add(work(f"{i}", 50_000, now))
        now += 1.0
        queue.finish(f"{i}", now, done=False)
        queue.report(100, PER_TOKEN, now)
    assert queue.speedup == pytest.approx(1.0)


def test_decode_counts_flying_requests_once() -> None:
    batch = RunningBatch()
    batch.report(Load(running_requests=2, waiting_requests=1, free_pages=100, context_tokens=300), 0.0)
    batch.add(stay("a", 50, 4, 1.0))
    assert (batch.requests, batch.free_blocks) == (4, 96)
    batch.report(Load(running_requests=2, waiting_requests=2, free_pages=96, context_tokens=300), 1.0 + IN_FLIGHT_S)
    assert (batch.requests, batch.free_blocks) == (4, 96)
    assert batch.context_tokens == pytest.approx(300 + 2 * 50)


def test_room_is_extents_or_pages_and_waiting_for_it_takes_as_long_as_others_stay() -> None:
    batch = RunningBatch()
    batch.report(Load(running_requests=4, free_pages=2, free_extents=10), 0.0)
    assert batch.landing_wait_s(10) == 0.0
    batch.add(stay("a", 640, 10, 0.0))
    assert batch.free_blocks == 0
    batch.residence_s = 5.0
    assert batch.landing_wait_s(10) == pytest.approx(1.0)  # one in five leaves within a fifth of a stay


def test_how_long_requests_stay_is_learnt() -> None:
    batch = RunningBatch()
    for i in range(100):
        batch.add(stay(str(i), 10, 1, float(i)))
        batch.finish(str(i), i + 4.0)
    assert batch.residence_s == pytest.approx(4.0, rel=0.05)


prefill_move = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 5), st.integers(1, 5000)),
    st.tuples(st.just("finish"), st.integers(0, 5), st.booleans()),
    st.tuples(st.just("withdraw"), st.integers(0, 5), st.none()),
    st.tuples(st.just("report"), st.none(), st.integers(0, 20_000)),
)


@given(st.lists(st.tuples(prefill_move, st.floats(0, 2)), max_size=50))
def test_the_queue_is_never_negative_and_returns_to_zero(steps: list[tuple[tuple[str, object, object], float]]) -> None:
    queue, now = PrefillQueue(0.0), 0.0
    for (move, name, value), pause in steps:
        now += pause
        match move, value:
            case "add", int():
                queue.add(work(str(name), value, now, expires_at=now + 10))
            case "finish", bool():
                queue.finish(str(name), now, done=value)
            case "withdraw", _:
                queue.withdraw(str(name), now)
            case "report", int():
                queue.report(value, PER_TOKEN, now)
        assert queue.wait_s(now) >= 0.0
    now += 10
    for name in queue.expired(now):
        queue.withdraw(name, now)
    assert queue.works == {}
    queue.report(0, PER_TOKEN, now)
    assert queue.wait_s(now) == 0.0


decode_move = st.tuples(
    st.sampled_from(["add", "finish", "drop", "report"]), st.integers(0, 5), st.integers(1, 5000), st.floats(0, 0.1)
)


@given(st.lists(decode_move, max_size=50))
def test_the_batch_is_never_negative_and_returns_to_zero(steps: list[tuple[str, int, int, float]]) -> None:
    batch, now = RunningBatch(), 0.0
    for move, name, tokens, pause in steps:
        now += pause
        if move == "add":
            batch.add(stay(str(name), tokens, tokens // 64 + 1, now, expires_at=now + 10))
        elif move == "finish":
            batch.finish(str(name), now)
        elif move == "drop":
            batch.drop(str(name))
        else:
            batch.report(Load(free_pages=tokens), now)
        assert batch.requests >= 0
        assert batch.context_tokens >= 0
        assert batch.free_blocks >= 0
        assert batch.landing_wait_s(tokens) >= 0
    for name in batch.expired(now + 10):
        batch.drop(name)
    batch.report(Load(free_pages=77), now + 10)
    assert (batch.works, batch.requests, batch.context_tokens, batch.free_blocks) == ({}, 0, 0, 77)


# ── short prompts pass long ones ─────────────────────────────────────────────────────────────────


def long_work(name: str, chunks: int) -> PrefillWork:
    return PrefillWork(name, chunks * 1000, chunks * 1000 * PER_TOKEN, (), 0.0, 1e9, chunks=chunks)


def test_a_short_prompt_waits_for_the_chunk_under_way_and_not_for_all_of_a_long_one() -> None:
    queue = PrefillQueue(0.0)
    queue.add(long_work("long", 8))
    assert queue.ahead_s(0.0, 0)[0] == pytest.approx(8.0)
    assert queue.ahead_s(0.0, 0, short=True)[0] == pytest.approx(0.5)
    assert queue.ahead_s(7.8, 0, short=True)[0] == pytest.approx(0.2)  # never more than all that is left


def test_short_prompts_before_it_let_as_much_of_the_long_one_in() -> None:
    queue = PrefillQueue(0.0)
    queue.add(long_work("long", 8))
    queue.add(work("a", 1000, 0.0))
    queue.add(work("b", 1000, 0.0))
    assert queue.ahead_s(0.0, 0, short=True)[0] == pytest.approx(2 + 2 + 0.5)
    assert queue.ahead_s(0.0, 0)[0] == pytest.approx(10.0)  # a long one goes behind both kinds
    queue.finish("long", 8.0, done=True)
    queue.report(2000, PER_TOKEN, 8.0)
    assert queue.ahead_s(8.0, 0, short=True)[0] == queue.wait_s(8.0) == pytest.approx(2.0)


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=12), st.floats(0, 30))
def test_short_prompts_wait_no_longer_than_long_ones(works: list[tuple[int, bool]], now: float) -> None:
    queue = PrefillQueue(0.0)
    for n, (chunks, goes) in enumerate(works):
        queue.add(long_work(f"{n}", chunks))
        if goes:
            queue.withdraw(f"{n}", 0.0)
    whole = queue.ahead_s(now, 0)[0]
    assert -1e-9 <= queue.ahead_s(now, 0, short=True)[0] <= whole + 1e-9
    if not any(work.long for work in queue.works.values()):
        assert queue.ahead_s(now, 0, short=True)[0] == pytest.approx(whole)

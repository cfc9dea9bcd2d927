"""What decode predicts of its own steps, and whom it refuses by that."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvmesh.clock import NEVER
from kvmesh.errors import KvmeshError, Overloaded
from kvmesh.instance.served_weights import ServedWeights
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.rpc.pb import common_pb2, conductor_pb2, decode_pb2
from kvmesh.services.decode import events as e
from kvmesh.services.decode.handoff import Handoff
from kvmesh.services.decode.limits import NS_PER_MS, Limits, RankShape, Shape
from kvmesh.services.decode.requests import ServingInstance, check_start
from kvmesh.services.decode.scheduler import Scheduler
from kvmesh.services.decode.step_times import ENOUGH, StepTimes


def step_ns(rows: int, context: int) -> int:
    return 10 * NS_PER_MS + rows * 1 * NS_PER_MS + context * 500


def learnt(seed: int = 1, noise: float = 0.05, steps: int = 200) -> StepTimes:
    rng, times = random.Random(seed), StepTimes()
    for _ in range(steps):
        rows = rng.randint(1, 16)
        context = sum(rng.randint(50, 4000) for _ in range(rows))
        odd = 20 if rng.random() < 0.05 else 1  # the machine did something else
        times.add(rows, context, int(step_ns(rows, context) * odd * rng.uniform(1 - noise, 1 + noise)))
    return times


@pytest.mark.parametrize("seed", range(5))
def test_it_learns_both_slopes_through_noise_and_odd_steps(seed: int) -> None:
    times = learnt(seed)
    for rows, context in ((1, 100), (8, 16_000), (32, 64_000)):
        assert times.predict_ns(rows, context) == pytest.approx(step_ns(rows, context), rel=0.1)


def test_a_slope_that_was_never_seen_is_none() -> None:
    times = StepTimes()
    for _ in range(100):
        times.add(4, 1000, 20 * NS_PER_MS)
    assert times.predict_ns(64, 100_000) == pytest.approx(20 * NS_PER_MS, rel=0.01)


def test_little_is_not_enough() -> None:
    times = StepTimes()
    for _ in range(ENOUGH - 1):
        times.add(4, 1000, 20 * NS_PER_MS)
    assert times.predict_ns(4, 1000) == 0
    times.add(4, 1000, 0)  # nonsense
    assert times.predict_ns(4, 1000) == 0


def test_it_follows_what_changes() -> None:
    times = learnt()
    for _ in range(256):
        times.add(8, 8_000, 100 * NS_PER_MS)
    assert times.predict_ns(8, 8_000) == pytest.approx(100 * NS_PER_MS, rel=0.01)


# ── who is refused ────────────────────────────────────────────────────────────────────────────────


def scheduler(rows: int, held_ms: int = 0, max_running: int = 64) -> Scheduler:
    """An instance with so many requests of 1,000 tokens, that has learnt `step_ns`."""
    where = RankShape(segment="d", shard_bytes=1, page_base_offset=0, extent_base_offset=0)
    shape = Shape(
        block_tokens=16, num_pages=9999, num_extents=9999, direct_landing=True, max_context_tokens=9999, ranks=(where,)
    )
    limits = Limits(max_running=max_running)
    made = Scheduler(limits, shape, NodeStore(9999), lambda: 1)
    made.step_times = learnt(noise=0.0)
    for handle in range(rows):
        made.requests[handle] = Handoff(handle, spec(held_ms=held_ms), limits, shape)
        made.live += 1
    return made


def spec(slo_ms: int = 0, held_ms: int = 0) -> e.Spec:
    return e.Spec(
        request_id="r", prompt_tokens=1000, max_tokens=9, deadline_ns=1 << 60,
        tbt_slo_ns=slo_ms * NS_PER_MS, held_tbt_ns=held_ms * NS_PER_MS,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "slo_ms", "held_ms", "refused"),
    [
        (9, 30, 0, False),  # a step of 10 rows and 10,000 tokens takes 25 ms
        (9, 20, 0, True),  # ... which is too long for the newcomer
        (9, 30, 30, False),
        (9, 30, 20, True),  # ... for those who are there
        (9, 0, 20, False),  # nobody asks: the batch lane, an answer that goes on
        (0, 1, 0, False),  # alone it shows how long a step is
    ],
)
def test_who_would_break_an_slo_is_refused(rows: int, slo_ms: int, held_ms: int, refused: bool) -> None:
    error: KvmeshError | None = scheduler(rows, held_ms).refusal(spec(slo_ms), 0)
    assert (error is not None) is refused
    if refused:
        assert isinstance(error, Overloaded) and "over the SLO of 20 ms" in error.message
        assert error.retry_after_ms >= 100


def test_requests_that_have_ended_and_those_that_wait_for_a_seat_lengthen_no_step() -> None:
    some = scheduler(9)
    for h in list(some.requests.values())[:5]:
        h.ended = True
    assert some.refusal(spec(20), 0) is None, "a step of 5 rows takes 17.5 ms"
    assert scheduler(40, max_running=4).refusal(spec(20), 0) is None, "a step of 4 rows takes 16 ms"


def test_who_will_have_left_when_it_joins_lengthens_none_of_its_steps() -> None:
    def beside(leaves_ms: int) -> Scheduler:
        some = scheduler(0)
        for handle in range(9):
            one = replace(spec(held_ms=30), leaves_ns=leaves_ms * NS_PER_MS)
            some.requests[handle] = Handoff(handle, one, some.limits, some.shape)
        return some

    long = replace(spec(20), joins_ns=5_000 * NS_PER_MS)
    assert beside(leaves_ms=4_000).refusal(long, now=0) is None
    assert beside(leaves_ms=6_000).refusal(long, now=0) is not None
    overdue = beside(leaves_ms=4_000).refusal(long, now=4_000 * NS_PER_MS)
    assert overdue is not None, "whoever should have left, and has not, may stay for longer"


def test_the_bounds_come_with_the_placement() -> None:
    life = conductor_pb2.PredictedLife(first_token_ms=3, end_ms=9)
    placement = conductor_pb2.Placement(life=life, tbt_slo_ms=40, held_tbt_ms=50)
    placement.prefill.address = "127.0.0.1:1"
    start = decode_pb2.StartRequest(token_ids=bytes(20), deadline_ms=1000, placement=placement)
    start.sampling.max_tokens, start.sampling.top_p = 1, 1.0
    here = ServingInstance(common_pb2.InstanceRef(), ServedWeights("", 0), 16, 512, (2,), 256)
    found = check_start(start, here, 7, None)
    assert (found.tbt_slo_ns, found.held_tbt_ns) == (40 * NS_PER_MS, 50 * NS_PER_MS)
    assert (found.joins_ns, found.leaves_ns) == (7 + 3 * NS_PER_MS, 7 + 9 * NS_PER_MS)
    start.placement.ClearField("life")
    assert check_start(start, here, 7, None).leaves_ns == NEVER

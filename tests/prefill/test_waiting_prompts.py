"""The line by size: short requests first, and nobody waits for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.errors import ConfigError
from kvmesh.instance.served_weights import ServedWeights
from kvmesh.rpc.pb import decode_pb2
from kvmesh.services.conductor.domain import Placed, PredictedLife, Ref
from kvmesh.services.conductor.mapping import placement_out
from kvmesh.services.decode.mapping import start_prefill
from kvmesh.services.prefill import wire
from kvmesh.services.prefill.config import PrefillConfig
from kvmesh.services.prefill.planner import NS, PlanConfig, Planner, Wait, WaitingPrompts
from kvmesh.work_class import work_class
from tests.prefill.test_runner import hinted

CONFIG = PlanConfig(
    block_tokens=4,
    prefill_chunk_tokens=8,
    max_batch_tokens=16,
    long_prompt_tokens=8,
    priority_step_ns=1000,
    size_weight=4.0,
)
NS_PER_TOKEN = 10


def test_a_short_one_goes_first_until_the_long_one_has_waited_its_weight() -> None:
    line = WaitingPrompts(1000, 4.0)
    # Classes of these times: 2^(n/2) times 2^-30 s = 0.93 ns, so 59.6, 14.9 and 3.7 ns.
    line.add(1, 0, 0, 80)  # 238: until then shorter ones pass it
    line.add(2, 0, 150, 20)  # 210
    line.add(3, 0, 390, 5)  # 405
    line.add(4, 0, 399, 0)  # nobody told its size
    line.add(5, -1, 1150, 10)  # 180: one step of priority is worth 1000 of waiting
    assert list(line) == [5, 2, 1, 4, 3]


class Machine:
    """A planner whose steps take NS_PER_TOKEN a token; its clock goes on with them."""

    def __init__(self, config: PlanConfig = CONFIG) -> None:
        self.planner, self.now = Planner(config), 0
        self.tokens: dict[int, int] = {}
        self.arrived: dict[int, int] = {}
        self.begun: dict[int, int] = {}
        self.done: dict[int, int] = {}
        self.twins: set[int] = set()

    def add(self, tokens: int) -> int:
        handle = len(self.tokens) + 1
        self.tokens[handle], self.arrived[handle] = tokens, self.now
        self.planner.waiting.add(handle, 0, self.now, tokens * NS_PER_TOKEN)
        return handle

    def rank(self, handle: int) -> tuple[float, int]:
        size_ns = work_class(self.tokens[handle] * NS_PER_TOKEN / NS) * NS
        return self.arrived[handle] + round(CONFIG.size_weight * size_ns), handle

    def rest(self, handle: int) -> int | Wait:
        return Wait.TWIN if handle in self.twins else self.tokens[handle]

    def step(self) -> list[int]:
        chunks = self.planner.next_step(self.rest, lambda handle: 0, self.tokens.__getitem__)
        for chunk in chunks:
            self.begun.setdefault(chunk.handle, self.now)
        self.now += NS_PER_TOKEN * sum(chunk.end - chunk.start for chunk in chunks)
        for chunk in chunks:
            if chunk.last:
                self.done[chunk.handle] = self.now
        return [chunk.handle for chunk in chunks]


def test_short_ones_pass_a_long_one_between_its_chunks_as_long_as_they_rank_before_it() -> None:
    machine = Machine()
    long = machine.add(24)  # three chunks, rank 960
    assert machine.step() == [long]
    short = machine.add(4)  # comes at 80: rank 240
    assert machine.step() == [short]
    assert machine.step() == [long]
    machine.now = 950
    late = machine.add(4)  # rank 1110
    assert machine.step() == [long]
    assert machine.step() == [late]


def test_without_a_weight_both_kinds_take_turns_whatever_their_sizes() -> None:
    machine = Machine(replace(CONFIG, size_weight=0.0))
    long, short = machine.add(16), [machine.add(8) for _ in range(4)]
    assert [machine.step() for _ in range(4)] == [short[:2], [long], short[2:], [long]]


def test_a_long_one_that_has_begun_is_not_passed_by_other_long_ones() -> None:
    machine = Machine()
    long = machine.add(40)
    machine.step()
    other = machine.add(12)  # ranks before it
    assert [machine.step()[0] for _ in range(6)] == [long] * 4 + [other] * 2


def test_one_that_waits_for_its_twin_is_passed_over() -> None:
    machine = Machine()
    first, second = machine.add(4), machine.add(24)
    machine.twins = {first}
    assert machine.step() == [second]
    machine.twins = set()
    assert machine.step() == [first]


def test_a_long_one_comes_to_its_end_behind_a_stream_that_could_be_all_that_is_served() -> None:
    """Twice as much short work as there is time for: it waits its weight, and what has come till then."""
    machine = Machine()
    long = machine.add(24)
    while long not in machine.done:
        for _ in range(4):  # 32 tokens, a step takes 16
            machine.add(8)
        machine.step()
    bound = CONFIG.size_weight * machine.tokens[long] * NS_PER_TOKEN
    before = sum(
        tokens * NS_PER_TOKEN
        for handle, tokens in machine.tokens.items()
        if handle != long and machine.rank(handle) < machine.rank(long)
    )
    assert machine.begun[long] <= before + 16 * NS_PER_TOKEN
    passed = [h for h in machine.begun if machine.arrived[h] > bound and machine.begun[h] < machine.begun[long]]
    assert not passed, "who comes later than its weight does not go before it"


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_every_step_moves_the_first_one_on(data: st.DataObject) -> None:
    """The least rank of all that could run, or the long one that has begun."""
    machine = Machine()
    for _ in range(data.draw(st.integers(1, 25))):
        for tokens in data.draw(st.lists(st.integers(1, 40), max_size=4)):
            machine.add(tokens)
        machine.now += data.draw(st.integers(0, 500))
        left = [h for h in machine.tokens if h not in machine.done]
        running = [h for h in left if h in machine.begun]
        stepped = machine.step()
        if not left:
            assert not stepped
            continue
        able = [h for h in left if h in running or not (running and machine.tokens[h] > CONFIG.long_prompt_tokens)]
        assert min(able, key=machine.rank) in stepped
    while machine.step():
        pass
    assert machine.done.keys() == machine.tokens.keys()


@pytest.mark.parametrize("weight", [-1.0, 1001.0, float("nan")])
def test_a_weight_that_cannot_be_is_refused_by_name(weight: float) -> None:
    config = PrefillConfig(model="m", size_weight=weight)
    with pytest.raises(ConfigError, match="size_weight"):
        config.check()


def test_the_size_that_was_predicted_travels_from_the_decision_to_the_line() -> None:
    ref = Ref("p", "127.0.0.1:1", 1)
    placed = Placed(ref, ref, 1.0, 0.1, 0, {}, b"", life=PredictedLife(prefill_start_s=0.25, prefill_end_s=1.5))
    start = decode_pb2.StartRequest(request_id="r", placement=placement_out(placed))
    asked = hinted(1, bytes(range(48)), "elsewhere")
    asked.prefill_us = start_prefill(1, start, 1, 0, "").start.prefill_us
    assert wire.start_in(asked, 1, 1, ServedWeights("f00d"), "me", 0, "", 512).size_ns == 1_250_000_000

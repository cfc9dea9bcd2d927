"""What is on its way at both ends of the wires slows pulls and pushes down, in predictions and so in placements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.services.conductor.domain import Fetch, Placed, PrefillSample, Role
from kvmesh.services.conductor.loads.outgoing import OutgoingLoad, Wires
from kvmesh.services.conductor.score import shared_bytes
from tests.support.conductor.brain import Brain, chain
from tests.support.conductor.sharing import BYTES, LONG, X, mesh, other

P, D = ("p0", 1), ("d0", 1)


def slow_wires(brain: Brain) -> None:
    """All have shown pushes of 10 MB/s, so that bytes matter beside computing; and fast computing."""
    for name in brain.refs:
        if name.startswith("p"):
            for i in range(60):
                sample = PrefillSample(f"{name}{i}", 100 + i, 0, 0.002, 1_000_000, 0.1)
                brain.beat(name, prefill_samples=(sample,))


# ── the account ───────────────────────────────────────────────────────────────────────────────────


def test_pulls_and_pushes_arrive_until_they_end() -> None:
    wires = Wires()
    wires.pull("a", [OutgoingLoad(D, 5)], 10.0, [OutgoingLoad(P, 70)], 2.0)
    wires.push("a", D, 100, begins=1.0, until=20.0)
    wires.push("b", D, 1000, begins=0.0, until=20.0)
    assert (wires.arriving(D), wires.arriving(P)) == (5, 0), "what is to come later does not fill the wires now"
    wires.expire(1.0)
    assert (wires.arriving(D), wires.arriving(P)) == (1105, 0)
    wires.expire(2.0)
    assert wires.arriving(P) == 70
    wires.end("b")
    assert wires.arriving(D) == 105
    wires.expire(10.0)
    assert (wires.arriving(D), wires.arriving(P)) == (100, 0)
    wires.expire(20.0)
    assert wires.arriving(D) == 0


flow = st.tuples(st.integers(0, 7), st.integers(0, 100), st.floats(0, 10), st.floats(0, 10))


@given(st.lists(st.one_of(flow, st.integers(0, 7)), max_size=40), st.floats(0, 30))
def test_nothing_stays_on_the_wires_for_ever(steps: list[tuple[int, int, float, float] | int], end: float) -> None:
    """However requests come, come again and end: never less than nothing, and nothing at last."""
    wires = Wires()
    for step in steps:
        if isinstance(step, int):
            wires.end(str(step))
        else:
            number, nbytes, begins, lasts = step
            wires.pull(str(number), [OutgoingLoad(P, nbytes)], begins + lasts, [OutgoingLoad(D, nbytes)], begins)
            wires.push(str(number), D, nbytes, begins, begins + lasts)
        assert wires.arriving(P) >= 0
        assert wires.arriving(D) >= 0
    wires.expire(end)
    wires.expire(100.0)
    assert (wires.arriving(P), wires.arriving(D)) == (0, 0)


@pytest.mark.parametrize(
    ("others", "lost"), [((), 0), ((0, 0), 0), ((5, 3), 5), ((3, 80), 10)], ids=["none", "idle", "sender", "full"]
)
def test_a_flow_loses_at_the_fuller_end_at_most_its_own_size(others: tuple[int, ...], lost: int) -> None:
    assert shared_bytes(10, *others) == lost


# ── predictions ───────────────────────────────────────────────────────────────────────────────────


def tail_ms(placed: Placed) -> float:
    return placed.terms["transfer_tail_ms"]


def test_pushes_towards_one_decode_instance_slow_each_other_down() -> None:
    brain = mesh(2, 1)
    slow_wires(brain)
    alone = brain.placed(200, request_id="a")
    brain.tick(0.0)  # its push begins at once
    beside = brain.placed(200, request_id="b")
    assert alone.prefill != beside.prefill, "another sender: what they share is the receiver"
    assert tail_ms(beside) == pytest.approx(2 * tail_ms(alone), rel=0.15)
    brain.beat(alone.prefill.instance_id, prefill_samples=(PrefillSample("a", 200, 0, 0.004, 204_800, 0.02),))
    brain.beat(beside.prefill.instance_id, prefill_samples=(PrefillSample("b", 200, 0, 0.004, 204_800, 0.02),))
    assert tail_ms(brain.placed(200, request_id="c")) < 1.5 * tail_ms(alone)


def test_of_two_decode_instances_the_one_that_nobody_sends_to_is_taken() -> None:
    brain = mesh(1, 2)
    slow_wires(brain)
    ways = []
    for i in range(2):
        ways.append(brain.placed(400, request_id=f"r{i}").decode.instance_id)
        brain.tick(0.06)
        brain.beat_all()  # the rows do not differ: neither has told of any
    assert sorted(ways) == ["d0", "d1"]


def test_pulls_that_arrive_at_one_reader_slow_each_other_down() -> None:
    """From two holders, which have nothing else to send."""
    brain = mesh(1, 1, pools=2)
    brain.seal("pool0", X)
    brain.seal("pool1", chain("y", 64))
    first = brain.placed(LONG, keys=X, request_id="a")
    brain.beat("p0")
    second = brain.placed(LONG, keys=chain("y", 64), request_id="b")
    assert [r.instance_id for r in (*first.pulls, *second.pulls)] == ["pool0", "pool1"]
    each_ms = 64 * BYTES * 2e-9 * 1000  # by the prior
    assert second.terms["pull_ms"] - first.terms["pull_ms"] == pytest.approx(each_ms, rel=0.01)


def test_a_sender_that_others_pull_from_pushes_slower() -> None:
    def pushes_ms(pulled_from: bool) -> float:
        brain = mesh(2, 2, fetch=Fetch.ALWAYS)
        slow_wires(brain)
        brain.seal("p0", X)
        if pulled_from:  # by p1, for a decode instance that does not matter here
            pulling = other(brain, request_id="a", avoid=frozenset({"d0"}))
            brain.beat("p0")
            assert [(r.instance_id, r.blocks) for r in pulling.pulls] == [("p0", 64)]
        return tail_ms(brain.placed(LONG, keys=X, request_id="b", avoid=frozenset({"p1", "d1"})))

    assert pushes_ms(True) == pytest.approx(2 * pushes_ms(False), rel=0.05)


def test_a_role_that_receives_nothing_is_not_slowed_down() -> None:
    brain = Brain()
    brain.add("c0", Role.BOTH)
    first = brain.placed(200)
    assert tail_ms(first) == tail_ms(brain.placed(200)) == 0.0

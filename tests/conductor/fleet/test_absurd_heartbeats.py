"""What one member tells of its own work, however absurd, refuses nobody's request at the others."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.errors import KvmeshError
from kvmesh.rpc.pb import conductor_pb2 as pb
from kvmesh.services.conductor import mapping
from kvmesh.services.conductor.domain import DecodeSample, Placed, PrefillSample, Role
from tests.support.conductor.brain import Brain
from tests.support.messages import random_message


def served(brain: Brain) -> None:
    """One honest request, from its placement to its end at p0 and d0."""
    name = f"r{brain.requests}"
    brain.now += 0.1
    brain.done("p0", name, 150)
    brain.beat("d0", decode_samples=(DecodeSample(1, 150, 0.01),), finished_request_ids=(name,))


def noise(brain: Brain, rng: random.Random) -> None:
    """Any numbers at all: sizes and times up to what the fields hold."""
    told = pb.HeartbeatRequest()
    told.CopyFrom(random_message(rng, pb.HeartbeatRequest.DESCRIPTOR, ["n", "demo", b"k" * 16]))
    told.instance.Clear()
    told.instance.instance_id, told.instance.address, told.instance.incarnation = "n", "n:1", 1
    brain.seq += 1
    told.seq = brain.seq
    try:
        brain.step(mapping.heartbeat_in(told))
    except KvmeshError:
        return


def slow(brain: Brain, rng: random.Random) -> None:
    """Times that could be, but are as slow as can be believed, of many requests that nobody knows."""
    times = rng.choice((1e3, 9e3))
    samples = tuple(
        PrefillSample(str(rng.random()), tokens, 0, min(3600.0, times * 0.01), tokens * 1024, times * tokens * 1e-6)
        for tokens in rng.choices((1, 100, 4000), k=64)
    )
    brain.beat("n", prefill_samples=samples, decode_samples=(DecodeSample(1, 100, times * 0.01),) * 4)


@settings(max_examples=30, deadline=None)
@given(
    st.randoms(use_true_random=False),
    st.sampled_from((noise, slow)),
    st.sampled_from((Role.PREFILL, Role.DECODE, Role.BOTH)),
    st.sampled_from((0, 1, 10)),
    st.sampled_from((1, 10, 60)),
    st.sampled_from((0.001, 0.1, 1.0)),
)
def test_absurd_samples_of_one_member_refuse_nobody(
    rng: random.Random, absurd: object, role: Role, known: int, beats: int, every_s: float
) -> None:
    brain = Brain()
    brain.pair()
    for _ in range(known):
        brain.placed(150)
        served(brain)
    brain.add("n", role)
    for _ in range(beats):
        absurd(brain, rng)
        brain.now += every_s
    for _ in range(4):
        brain.now += 1.0
        brain.beat("p0")
        brain.beat("d0")
        answer = brain.schedule(150)
        assert isinstance(answer, Placed), answer
        served(brain)


@pytest.mark.parametrize(
    "sample",
    [
        PrefillSample("x", 1 << 32, 0, 0.1, 0, 0.0),
        PrefillSample("x", 1, 1 << 44, 0.1, 0, 0.0),
        PrefillSample("x", 100, 0, 0.1, 0, 0.0, beside_tokens=1 << 40),
        PrefillSample("x", 100, 0, 4000.0, 0, 0.0),
        PrefillSample("x", 100, 0, 0.1, 1000, 50_000.0),
        PrefillSample("x", 100, 0, 0.1, 1 << 60, 1.0),
        PrefillSample("x", 100, 0, 0.1, 0, 0.0, 0, 1 << 60, 1.0),
    ],
)
def test_what_cannot_be_teaches_nothing(sample: PrefillSample) -> None:
    brain = Brain()
    brain.pair()
    assert brain.beat("p0", prefill_samples=(sample,)) == []  # no comparison with what was predicted either
    brain.beat("d0", decode_samples=(DecodeSample(1, 100, 4000.0), DecodeSample(1 << 40, 1 << 50, 0.01)))
    assert list(brain.state.prediction_errors(brain.now)) == []

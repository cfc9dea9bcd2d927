"""What a conductor makes of the axes of instances: first guesses, fits of their own, and what it shows."""

from __future__ import annotations

import pytest

from kvmesh.chunk_pipeline import pipelined_s
from kvmesh.cli.instances import axes_text
from kvmesh.engine.axes import Axes
from kvmesh.errors import InvalidRequest
from kvmesh.instance.front import axes_pb
from kvmesh.rpc.pb import conductor_pb2 as pb
from kvmesh.services.conductor.costs.first_guess import TYPICAL_CHUNK, TYPICAL_TOKENS, first_decode_step, first_prefill
from kvmesh.services.conductor.costs.models import DECODE_PRIOR, PREFILL_PRIOR, PrefillModel
from kvmesh.services.conductor.domain import InstanceAxes, Role
from kvmesh.services.conductor.mapping import axes_in, axes_out
from tests.support.conductor.brain import Brain

PIPELINE = InstanceAxes(pp=4, tp=2)


def test_the_first_guess_of_a_pipeline_is_that_of_its_chunks_through_its_stages() -> None:
    chunks = TYPICAL_TOKENS // TYPICAL_CHUNK
    one = PrefillModel(PREFILL_PRIOR).predict(TYPICAL_TOKENS, 0, steps=chunks)
    assert PrefillModel(first_prefill(InstanceAxes())).predict(TYPICAL_TOKENS, 0, steps=chunks) == pytest.approx(one)
    work_s = one - chunks * PREFILL_PRIOR.a
    # Each of 4 stages, of two ranks, has an eighth of the work, and each chunk its constant.
    told = PrefillModel(first_prefill(PIPELINE)).predict(TYPICAL_TOKENS, 0, steps=chunks)
    assert told == pytest.approx(pipelined_s(work_s / 8 + chunks * PREFILL_PRIOR.a, chunks, 4))
    assert first_decode_step(InstanceAxes(pp=4)) == DECODE_PRIOR  # a row goes through all stages
    assert first_decode_step(InstanceAxes(tp=2, cp=2)).at(0, 4096) == pytest.approx(
        DECODE_PRIOR.a / 2 + DECODE_PRIOR.c * 1024
    )


def test_a_prompt_is_placed_where_axes_make_it_fast_before_anything_was_measured() -> None:
    brain = Brain()
    brain.add("p0", Role.PREFILL)
    brain.add("p1", Role.PREFILL, axes=PIPELINE)
    brain.add("d0", Role.DECODE)
    assert brain.placed(3000).prefill.instance_id == "p1"
    assert (brain.view("p1").axes, brain.view("p0").axes) == (PIPELINE, InstanceAxes())


def test_instances_learn_from_those_with_the_same_axes_alone() -> None:
    brain = Brain()
    brain.add("d0", Role.DECODE)
    for name, axes in (("p0", InstanceAxes()), ("p1", PIPELINE), ("p2", PIPELINE)):
        brain.add(name, Role.PREFILL, axes=axes)
    models = {name: brain.state._fleet.named(name).prefill for name in ("p0", "p1", "p2")}
    before = {name: model.predict(2000, 0) for name, model in models.items()}
    for number in range(40):
        brain.tick(0.1)
        brain.done("p1", f"x{number}", 500 + 50 * number, seconds=2.0 + 0.1 * number)
    after = {name: model.predict(2000, 0) for name, model in models.items()}
    assert after["p0"] == before["p0"]
    assert after["p2"] > 5 * before["p2"]


def test_axes_travel_and_are_shown() -> None:
    axes = Axes.parse("dp=2,cp=2,tp=4,ep=dp+tp,dcp=2")
    told = axes_pb(axes)
    assert told is not None
    found = axes_in(told)
    assert found == InstanceAxes(dp=2, cp=2, tp=4, dcp=2, ep=("dp", "tp"))
    assert axes_out(found) == told and axes_pb(Axes()) is None and axes_out(InstanceAxes()) is None
    assert axes_in(pb.InstanceAxes()) == InstanceAxes()
    assert axes_text({"axes": found._asdict()}) == "dp2·cp2·tp4·dcp2·ep(dp+tp)"
    assert axes_text({"axes": {"pp": 2, "tp": 0}}) == "pp2" and axes_text({}) == axes_text({"axes": None}) == ""


@pytest.mark.parametrize(
    ("axes", "field"),
    [(pb.InstanceAxes(pp=1025), "axes.pp"), (pb.InstanceAxes(ep=["pp"]), "axes.ep"),
     (pb.InstanceAxes(ep=["dp"] * 4), "axes.ep")],
)  # fmt: skip
def test_axes_that_cannot_be_are_refused(axes: pb.InstanceAxes, field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        axes_in(axes)
    assert error.value.field == field

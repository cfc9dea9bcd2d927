"""Instances whose weights change: who has older ones than others ever had gets no work, and a pause has a name."""

from __future__ import annotations

from kvmesh.errors import Paused, Unavailable
from kvmesh.services.conductor.domain import Placed, Role
from tests.support.conductor.brain import Brain, card


def test_an_instance_with_older_weights_than_the_models_gets_no_work() -> None:
    brain = Brain()
    brain.pair()
    assert isinstance(brain.schedule(), Placed)
    brain.add("p2", Role.PREFILL, model=card(weights_epoch=5))
    brain.add("d2", Role.DECODE, model=card(weights_epoch=5))
    brain.beat_all()
    for _ in range(4):
        placed = brain.placed()
        assert (placed.prefill.instance_id, placed.decode.instance_id) == ("p2", "d2")
    old = next(i for i in brain.state.instances if not i.model.weights_epoch)
    assert (
        "has weights of epoch 0, the model is at epoch 5: update them"
        in brain.view(old.ref.instance_id).not_ready_reason
    )
    # It starts anew, and others have gone: still nothing of older weights is placed.
    for name in ("p2", "d2"):
        brain.beat(name, ready=False, not_ready_reason="shutting down")
    brain.refused(Unavailable)


def test_a_pause_is_told_as_one() -> None:
    brain = Brain()
    brain.pair()
    for one in brain.state.instances:
        brain.beat(one.ref.instance_id, ready=False, not_ready_reason=f"{Paused.PREFIX}weights epoch 7")
    refusal = brain.refused(Paused)
    assert "weights epoch 7" in str(refusal.error) and refusal.error.retryable


def test_no_handoff_is_planned_between_weights_of_two_epochs() -> None:
    """As after a conductor that died when one instance of two had taken new weights; and the prefill instance would
    refuse it by name (tests/audit/test_08_weights_epoch.py)."""
    brain = Brain()
    brain.add("p0", Role.PREFILL)
    brain.add("d0", Role.DECODE, model=card(weights_epoch=5))
    brain.beat_all()
    brain.refused(Unavailable)
    brain.add("p1", Role.PREFILL, model=card(weights_epoch=5))
    placed = brain.placed()
    assert (placed.prefill.instance_id, placed.decode.instance_id) == ("p1", "d0")

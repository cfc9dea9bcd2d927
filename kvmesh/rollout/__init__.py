"""For trainers: rollouts on a live mesh whose weights change (docs/howto/rollouts.md)."""

from kvmesh.rollout.client import (
    Gathered,
    MemoryGivenBack,
    RolloutClient,
    RolloutGroup,
    RolloutRefused,
    RolloutSample,
    WeightsUpdated,
    new_epoch,
)
from kvmesh.rollout.trainer import TrainerSegment

__all__ = [
    "Gathered",
    "MemoryGivenBack",
    "RolloutClient",
    "RolloutGroup",
    "RolloutRefused",
    "RolloutSample",
    "TrainerSegment",
    "WeightsUpdated",
    "new_epoch",
]

"""For trainers: rollouts on a live mesh whose weights change (docs/howto/rollouts.md)."""

from kvmesh.rollout.client import RolloutClient, RolloutGroup, RolloutRefused, Sample, WeightsUpdated, new_epoch
from kvmesh.rollout.trainer import TrainerSegment

__all__ = [
    "RolloutClient",
    "RolloutGroup",
    "RolloutRefused",
    "Sample",
    "TrainerSegment",
    "WeightsUpdated",
    "new_epoch",
]

"""What GetStatus shows. Times are in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.kvcache.tiers import TierUse
from kvmesh.services.conductor.domain import BlockKnowledge, CordonState, InstanceAxes, Load, ModelCard, Ref, Role


@dataclass(frozen=True)
class TierView:
    """What GetStatus shows of a lower tier of one instance."""

    use: TierUse
    indexed_blocks: int
    block_s: float  # expected, to read one block of its model


@dataclass(frozen=True)
class InstanceView:
    """What GetStatus shows of one instance."""

    ref: Ref
    role: Role
    card: ModelCard
    ready: bool  # may get work now
    not_ready_reason: str
    load: Load
    silent_s: float
    capacity_blocks: int
    queue_s: float = 0.0  # predicted
    pending: int = 0  # placements not reported finished yet
    indexed_blocks: int = 0  # sealed in its node store's memory in this very life, as the index has it
    tiers: tuple[TierView, ...] = ()  # below that
    cordon: CordonState = CordonState.OPEN
    cordon_reason: str = ""
    breaker: str = ""  # why it rests
    tbt_s: float = 0.0  # predicted, of its batch now
    node_id: str = ""
    axes: InstanceAxes = InstanceAxes()  # noqa: RUF009 - it is immutable
    http_url: str = ""  # of an external instance: whom it asks
    knowledge: BlockKnowledge = BlockKnowledge.ANNOUNCED

    @property
    def model(self) -> str:
        """The model's name."""
        return self.card.name

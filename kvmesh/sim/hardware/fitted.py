"""Step times as they were measured: fits of a live mesh (services/conductor/costs/file.py) run in virtual time."""

from __future__ import annotations

from kvmesh.sim.hardware.times import Pieces
from services.conductor.costs.file import Costs


class Fitted:
    """The times of one kind of instance; the form of a model is in `services.conductor.costs.fit`."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        # A step of both reads weights and starts kernels once: of the two constants the smaller one is not paid.
        self._shared_s = min(costs.prefill.a, costs.decode_step.a)

    def prefill_s(self, pieces: Pieces) -> float:
        """See `Times`."""
        tokens = sum(computed for computed, _ in pieces)
        pairs = sum(computed * (computed + 2 * cached) / 2 for computed, cached in pieces)
        return self.costs.prefill.at(tokens, pairs)

    def decode_s(self, batch: int, context_tokens: float) -> float:
        """See `Times`."""
        return self.costs.decode_step.at(batch, context_tokens)

    def mixed_s(self, pieces: Pieces, batch: int, context_tokens: float) -> float:
        """See `Times`: a chunk keeps the arithmetic busy, rows wait for memory, so the two add up."""
        if not pieces:
            return self.decode_s(batch, context_tokens)
        if not batch:
            return self.prefill_s(pieces)
        return self.prefill_s(pieces) + self.decode_s(batch, context_tokens) - self._shared_s
